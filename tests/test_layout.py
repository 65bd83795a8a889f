"""Fragments: one flat buffer that the parameters are views of, and a model that does not notice."""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.layout import Layout, Leaf, attach, flat_gradients, layout_of


class Small(nn.Module):
    """Embedding and head tied, a norm, an odd number of biases, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(torch.relu(self.up(self.norm(self.embed(tokens)))))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


TOKENS = torch.arange(22).view(2, 11) % 11


@pytest.fixture
def model() -> Small:
    """A small model with the same weights each time."""
    torch.manual_seed(1)
    return Small()


def test_the_layout_has_tied_weights_once_and_frozen_ones_never(model: Small) -> None:
    layout = layout_of(model)
    assert [leaf.name for leaf in layout.leaves] == ["embed.weight", "norm.weight", "norm.bias", "up.weight", "up.bias"]
    assert layout.leaves[3] == Leaf("up.weight", (7, 6), 78, 120)
    assert layout.numel == 11 * 6 + 6 + 6 + 7 * 6 + 7


def test_parameters_are_views_of_the_buffer_in_both_directions(model: Small) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = attach(model, layout_of(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    x[66] = 5.0
    assert model.norm.weight[0] == 5.0
    with torch.no_grad():
        model.head.weight[0, 0] = -3.0
    assert x[0] == -3.0
    own = x.untyped_storage().data_ptr()
    assert all((p.untyped_storage().data_ptr() == own) == p.requires_grad for p in model.parameters())
    assert model.head.weight is model.embed.weight


def test_parameters_with_a_storage_each_are_views_that_end_where_they_do(model: Small) -> None:
    x = attach(model, layout_of(model), own_storage=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [p.untyped_storage().nbytes() for p in trained] == [4 * p.numel() for p in trained]
    assert all(p.is_contiguous() and p.storage_offset() == 0 for p in trained)
    x[66] = 5.0
    assert model.norm.weight[0] == 5.0
    del x
    gc.collect()
    assert model.norm.weight[0] == 5.0  # each keeps the memory


def test_attaching_to_a_row_at_an_odd_offset_leaves_the_other_rows_alone(model: Small) -> None:
    layout = layout_of(model)
    rows = torch.zeros(3, layout.numel)
    x = attach(model, layout, rows[1])
    assert x.data_ptr() == rows[1].data_ptr()
    assert rows[1].abs().sum() > 0
    assert rows[0].abs().sum() == rows[2].abs().sum() == 0


def test_gradients_and_loss_are_bitwise_those_of_the_model_before(model: Small) -> None:
    twin = copy.deepcopy(model)
    attach(twin, layout_of(twin), torch.empty(layout_of(twin).numel + 1)[1:])
    losses = [m(TOKENS) for m in (model, twin)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None) == (not own.requires_grad)
        assert own.grad is None or torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_an_optimizer_made_before_attaching_keeps_working_bitwise(model: Small, name: str) -> None:
    twin = copy.deepcopy(model)
    optimizers = [getattr(torch.optim, name)(m.parameters(), lr=0.01) for m in (model, twin)]
    x = attach(twin, layout_of(twin))
    start = x.clone()
    for _ in range(3):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(TOKENS).backward()
            optimizer.step()
    assert not torch.equal(x, start)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_flat_gradients_are_the_gradients_and_survive_zeroing(model: Small, micro_batches: int) -> None:
    twin, layout = copy.deepcopy(model), layout_of(model)
    gradient = flat_gradients(twin, layout, torch.zeros(layout.numel))
    for m in (model, twin):
        for _ in range(2):
            m.zero_grad(set_to_none=False)
            for _ in range(micro_batches):
                m(TOKENS).backward()
    named = dict(model.named_parameters())
    assert torch.equal(gradient, torch.cat([named[leaf.name].grad.flatten() for leaf in layout.leaves]))


def test_a_slice_counts_from_its_own_beginning(model: Small) -> None:
    layout = layout_of(model)
    part = layout.slice(66, 120)
    assert part == Layout(
        (Leaf("norm.weight", (6,), 0, 6), Leaf("norm.bias", (6,), 6, 12), Leaf("up.weight", (7, 6), 12, 54)), 54
    )
    assert layout.slice(0, layout.numel) == layout
    with pytest.raises(AssertionError, match="inside a tensor"):
        layout.slice(66, 100)


def test_a_tensor_without_numbers_is_in_one_of_two_slices_that_meet_there() -> None:
    leaves = (Leaf("a", (2,), 0, 2), Leaf("none", (0,), 2, 2), Leaf("b", (3,), 2, 5), Leaf("end", (0,), 5, 5))
    layout = Layout(leaves, 5)
    parts = [layout.slice(0, 2), layout.slice(2, 5)]
    assert [[leaf.name for leaf in part.leaves] for part in parts] == [["a"], ["none", "b", "end"]]
    assert layout.slice(0, 5) == layout


def test_a_model_without_anything_to_train_is_refused(model: Small) -> None:
    with pytest.raises(ConfigError, match="Small has 0 trainable parameters"):
        layout_of(model.requires_grad_(False))


def test_a_model_of_two_dtypes_is_refused_unless_the_odd_one_is_frozen(model: Small) -> None:
    model.frozen.to(torch.bfloat16)
    layout_of(model)
    model.norm.to(torch.float64)
    with pytest.raises(ConfigError, match="2 kinds of dtype and device"):
        layout_of(model)
