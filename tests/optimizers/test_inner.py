"""The inner optimizer: plain `torch.optim` underneath, the right tensors in the right part, schedules and clipping."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.layout import attach, layout_of
from gossamer.models.llama import build_model
from gossamer.models.sizes import ModelConfig
from gossamer.optimizers import InnerOptimizer, Joined, SpectralMuon, spectral_muon
from gossamer.optimizers.inner import InnerConfig, build_optimizer, clip_gradients, lr_scale, uncompiled
from gossamer.optimizers.spectral_muon import orthogonalized
from gossamer.run.config.document import with_settings
from gossamer.run.config.run_file import parse


class Small(nn.Module):
    """Embedding, norm, two hidden layers with biases, and a head: what any language model has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(self.norm(self.embed(tokens))))))


def small(flat: bool = True) -> Small:
    torch.manual_seed(0)
    model = Small()
    if flat:
        attach(model, layout_of(model))
    return model


def train(model: nn.Module, optimizer: InnerOptimizer, steps: int = 4, first: int = 0) -> None:
    for step in range(first, first + steps):
        tokens = torch.randint(0, 7, (5, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(config: InnerConfig, model: Small) -> torch.optim.Optimizer:
    """The same optimizer in torch's own words, one group per kind of decay, in a Python loop."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
    momentum = config.momentum
    return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=momentum > 0, foreach=False)


@pytest.mark.parametrize(
    "config",
    [
        InnerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
        InnerConfig(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.2),
        InnerConfig(optimizer="sgd", lr=0.1, momentum=0.0),
    ],
)
def test_adamw_and_sgd_are_plain_torch_optim_without_decay_on_vectors(config: InnerConfig) -> None:
    ours, theirs = small(), small(flat=False)
    train(ours, build_optimizer(config, ours))
    train(theirs, plain(config, theirs))
    assert torch.allclose(vector(ours), vector(theirs), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(vector(ours), vector(small()), atol=1e-3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon])
def test_an_optimizer_without_the_compiler_takes_the_steps_of_torchs_to_the_last_bit(
    kind: Any,
) -> None:
    found = []
    for one in (kind, uncompiled(kind)):
        model = small(flat=False)
        weights = [model.up.weight, model.down.weight]
        optimizer = one([{"params": [w]} for w in weights], lr=0.01)
        train(model, optimizer)
        assert torch.is_grad_enabled() and optimizer.step(lambda: 2.0) == 2.0
        again = one([{"params": [w]} for w in weights], lr=0.5)
        again.load_state_dict(optimizer.state_dict())
        found.append([vector(model), *(value for s in again.state.values() for value in s.values())])
    assert len(found[0]) == len(found[1]) > 1 or kind is torch.optim.SGD
    assert all(map(torch.equal, *found))


def test_muon_is_plain_muon_on_hidden_matrices_and_plain_adamw_on_the_rest() -> None:
    config = InnerConfig(optimizer="muon", lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=False)
    ours, theirs = small(), small(flat=False)
    train(ours, build_optimizer(config, ours))
    rest = [
        {"params": [theirs.embed.weight, theirs.head.weight], "weight_decay": 0.1},
        {"params": [theirs.norm.weight, theirs.norm.bias, theirs.up.bias], "weight_decay": 0.0},
    ]
    hidden = [theirs.up.weight, theirs.down.weight]
    muon = torch.optim.Muon(
        hidden, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(rest, lr=0.02, betas=config.betas)
    train(theirs, Joined(muon=muon, adamw=adamw))
    assert torch.allclose(vector(ours), vector(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_spectral_muon_is_the_muon_of_muloco(nesterov: bool, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(shape, generator=generator)
    ours = nn.Parameter(w.clone())
    optimizer = SpectralMuon([ours], lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov)
    m = torch.zeros(shape)
    for _ in range(6):
        g = ours.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        m = 0.9 * m + g
        update = newton_schulz(g + 0.9 * m if nesterov else m)
        w = (1 - 0.02 * 0.1) * w - 0.02 * math.sqrt(shape[0] / shape[1]) * update
        assert torch.allclose(ours.data, w, rtol=1e-6, atol=1e-7)


def newton_schulz(u: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Five steps with the coefficients of MuLoCo's code."""
    steps = [
        [4.0848, -6.8946, 2.9270],
        [3.9505, -6.3029, 2.6377],
        [3.7418, -5.5913, 2.3037],
        [2.8769, -3.1427, 1.2046],
        [2.8366, -3.0525, 1.2012],
    ]
    if u.shape[0] > u.shape[1]:
        return newton_schulz(u.T, dtype).T
    x = u.to(dtype) / u.to(dtype).norm()
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.to(u.dtype)


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (5, 5)])
def test_products_summed_in_fp32_give_the_same_orthogonal_factor_but_for_its_last_bit(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    u = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    found = []
    for has in (True, False):
        monkeypatch.setattr(spectral_muon, "computes_bf16", lambda has=has: has)
        found.append(orthogonalized(u))
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    torch.testing.assert_close(found[0], found[1], rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize(
    ("machine", "computes", "amx", "fast"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),  # AVX-512 alone
        ("AMD64", False, False, False),
        ("aarch64", True, False, True),
        ("aarch64", False, False, False),
    ],
)
def test_bf16_is_fast_with_amx_tiles_or_on_arm_and_not_with_avx512_alone(
    machine: str, computes: bool, amx: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectral_muon.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(spectral_muon, "computes_bf16", lambda: computes)
    assert spectral_muon.is_fast_in_bf16() == fast


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (40, 16), (8, 40)])
def test_the_update_of_spectral_muon_is_the_orthogonal_factor_within_some_percent(
    shape: tuple[int, int],
) -> None:
    u = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    assert torch.cosine_similarity(orthogonalized(u).float().flatten(), (left @ right).flatten(), dim=0) > 0.999
    values = torch.linalg.svdvals(orthogonalized(u).float())
    assert 0.93 < values.min() <= values.max() < 1.07
    exact = torch.linalg.svdvals(newton_schulz(u.double(), torch.float64))
    assert 0.95 < exact.min() <= exact.max() < 1.05
    assert torch.equal(orthogonalized(u.T), orthogonalized(u).T)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.NAdam])
def test_a_users_optimizer_of_torch_steps_with_equal_bits_and_keeps_its_kind_and_its_hooks(
    kind: Any,
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = kind([{"params": parameters, "lr": 0.01}])
        made.register_step_post_hook(lambda *_: hooked.append(kind))
        return made

    hooked: list[type] = []
    ours, plain = small(), small()
    mine = build_optimizer(InnerConfig(), ours, factory=make)
    train(ours, mine)
    assert isinstance(mine, kind) and type(mine).__module__ == kind.__module__ and len(hooked) == 4
    theirs = make(list(plain.parameters()))
    train(plain, theirs)
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert str(mine.state_dict()) == str(theirs.state_dict())


def test_a_users_optimizer_that_is_differentiable_or_none_of_torchs_kinds_is_left_as_it_is() -> None:
    class Own(torch.optim.SGD):
        pass

    for make in (lambda p: torch.optim.SGD(p, differentiable=True), Own):
        assert type(build_optimizer(InnerConfig(), small(), factory=make)) in (torch.optim.SGD, Own)


def test_the_recipe_muloco_trains_with_the_settings_of_its_authors_code() -> None:
    found = parse(with_settings({}, {"method": "muloco", "workers": 2})).inner
    assert (found.optimizer, found.lr, found.momentum, found.nesterov) == ("spectral_muon", 0.02, 0.95, False)
    assert (found.weight_decay, found.betas) == (0.01, (0.9, 0.95))


@pytest.mark.parametrize(
    ("shape", "stacks"), [((3,), False), ((16, 8, 3, 3), False), ((16, 8, 3), False), ((3, 4), True)]
)
def test_spectral_muon_refuses_what_is_neither_a_matrix_nor_a_stack_that_was_announced(
    shape: tuple[int, ...], stacks: bool
) -> None:
    with pytest.raises(ConfigError, match=r"SpectralMuon got a parameter of shape .*; only matrices"):
        SpectralMuon([torch.zeros(shape)], stacks=stacks)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_stack_of_matrices_steps_as_each_alone_to_the_last_bit(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 24, 8, generator=generator)
    alone = [matrix.clone() for matrix in whole]
    together = SpectralMuon([whole], nesterov=nesterov, stacks=True)
    each = SpectralMuon(alone, nesterov=nesterov)
    for _ in range(3):
        whole.grad = torch.randn(3, 24, 8, generator=generator)
        for matrix, gradient in zip(alone, whole.grad, strict=True):
            matrix.grad = gradient.clone()
        together.step()
        each.step()
    assert torch.equal(whole, torch.stack(alone))


@pytest.mark.parametrize("kind", ["muon", "spectral_muon"])
@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_the_matrices_of_attention_and_mlp_of_a_llama_and_nothing_else(tied: bool, kind: str) -> None:
    model = build_model(ModelConfig(size="0.2m", tie_embeddings=tied), 256, 16, 0)
    optimizer = build_optimizer(InnerConfig(optimizer=kind), model)
    assert isinstance(optimizer, Joined)
    assert isinstance(optimizer.parts["muon"], torch.optim.Muon if kind == "muon" else SpectralMuon)
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {
        part: {names[id(p)] for group in inner.param_groups for p in group["params"]}
        for part, inner in optimizer.parts.items()
    }
    assert taken["muon"] == {name for name in names.values() if "proj" in name}
    assert taken["adamw"] == set(names.values()) - taken["muon"]


def test_frozen_parameters_are_left_out() -> None:
    model = small(flat=False)
    model.up.weight.requires_grad_(False)
    for kind in ("accum_adamw", "adamw", "muon", "sgd", "spectral_muon"):
        groups = build_optimizer(InnerConfig(optimizer=kind), model).param_groups
        assert all(p is not model.up.weight for group in groups for p in group["params"])


@pytest.mark.parametrize("kind", ["accum_adamw", "adamw", "muon", "sgd", "spectral_muon"])
def test_every_optimizer_resumes_bit_for_bit_from_its_state(kind: str) -> None:
    config = InnerConfig(optimizer=kind, lr=0.01)
    model = small()
    optimizer = build_optimizer(config, model)
    train(model, optimizer, steps=3)
    resumed = small()
    resumed.load_state_dict(model.state_dict())
    continued = build_optimizer(config, resumed)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as from a file: not the live tensors
    train(model, optimizer, steps=3, first=3)
    train(resumed, continued, steps=3, first=3)
    assert torch.equal(vector(model), vector(resumed))


@pytest.mark.parametrize("kind", ["accum_adamw", "adamw", "muon", "sgd", "spectral_muon"])
def test_the_learning_rate_of_every_group_can_be_set(kind: str) -> None:
    model = small()
    optimizer = build_optimizer(InnerConfig(optimizer=kind), model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = vector(model)
    train(model, optimizer, steps=1)
    assert torch.equal(vector(model), before)


@pytest.mark.parametrize("kind", ["accum_adamw", "adamw", "muon", "sgd", "spectral_muon"])
def test_gradients_can_be_kept_where_they_are(kind: str) -> None:
    model = small()
    optimizer = build_optimizer(InnerConfig(optimizer=kind), model)
    train(model, optimizer, steps=1)
    kept = [p.grad for p in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is grad and not grad.any() for p, grad in zip(model.parameters(), kept, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_muon_refuses_a_state_of_another_optimizer_and_a_model_without_hidden_matrices() -> None:
    model = small()
    state = build_optimizer(InnerConfig(optimizer="adamw"), model).state_dict()
    with pytest.raises(ValueError, match="not of"):
        build_optimizer(InnerConfig(optimizer="muon"), model).load_state_dict(state)
    with pytest.raises(ConfigError, match="Linear has 0 hidden matrices"):
        build_optimizer(InnerConfig(optimizer="muon"), nn.Linear(3, 3))


def test_the_cosine_schedule_at_its_key_points() -> None:
    config = InnerConfig(schedule="cosine", warmup_steps=10, min_lr_ratio=0.2)
    scales = [lr_scale(config, step, 100) for step in (0, 4, 9, 10, 55, 100)]
    assert scales == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.6, 0.2])


def test_the_wsd_schedule_at_its_key_points() -> None:
    config = InnerConfig(schedule="wsd", warmup_steps=10, min_lr_ratio=0.2, decay_fraction=0.25)
    scales = [lr_scale(config, step, 200) for step in (0, 9, 10, 149, 150, 175, 200)]
    assert scales == pytest.approx([0.1, 1.0, 1.0, 1.0, 1.0, 0.6, 0.2])


def test_the_constant_schedule_only_warms_up() -> None:
    config = InnerConfig(schedule="constant", warmup_steps=4)
    assert [lr_scale(config, step, 100) for step in (0, 1, 2, 3, 4, 99)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_scale(InnerConfig(schedule="constant", warmup_steps=0), 0, 100) == 1.0


@given(
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup=st.integers(0, 60),
    floor=st.floats(0, 1),
    decay=st.floats(0.01, 1),
    total=st.integers(1, 50),
)
@settings(max_examples=50, deadline=None)
def test_a_scale_rises_in_the_warm_up_falls_after_it_and_is_never_above_one(
    schedule: str, warmup: int, floor: float, decay: float, total: int
) -> None:
    config = InnerConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor, decay_fraction=decay)
    halves = [k / 2 for k in range(2 * total)]  # workers with fewer local steps are between whole steps
    scales = [lr_scale(config, progress, total) for progress in halves]
    assert all(0 < scale <= 1 or (scale == 0 and floor == 0) for scale in scales)
    after = [scale for progress, scale in zip(halves, scales, strict=True) if progress >= warmup]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(after))
    if schedule != "wsd" or warmup <= (1 - decay) * total:
        during = [scale for progress, scale in zip(halves, scales, strict=True) if progress < warmup]
        assert all(b >= a for a, b in itertools.pairwise(during))


def test_clipping_returns_the_norm_that_was_and_shortens_only_what_is_longer() -> None:
    model = small()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    norm = math.sqrt(sum(p.numel() for p in model.parameters()))
    assert clip_gradients(model.parameters(), 2 * norm).item() == pytest.approx(norm)
    assert all((p.grad == 1).all() for p in model.parameters() if p.grad is not None)
    assert clip_gradients(model.parameters(), 1.0).item() == pytest.approx(norm)
    assert clip_gradients(model.parameters(), 1.0).item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"autocast": "fp16"}, r"unknown inner.autocast 'fp16'; did you mean 'bf16'\?"),
        ({"lr": 0.0}, "inner.lr is 0.0 but must be a number above 0"),
        ({"lr": math.nan}, "inner.lr is nan"),
        ({"betas": (0.9, 1.0)}, r"inner.betas\[1\] is 1.0"),
        (
            {"betas": (0.9,)},
            r"inner.betas is \(0.9,\) but must be a list of 2, each a number from 0 to below 1",
        ),
        ({"eps": 0.0}, "inner.eps is 0.0"),
        ({"weight_decay": -0.1}, "inner.weight_decay is -0.1"),
        ({"momentum": 1.0}, "inner.momentum is 1.0"),
        ({"clip": 0.0}, "inner.clip is 0.0 but must be a number above 0, or left out"),
        ({"warmup_steps": -1}, "inner.warmup_steps is -1"),
        ({"min_lr_ratio": 1.5}, "inner.min_lr_ratio is 1.5"),
        ({"decay_fraction": 0.0}, "inner.decay_fraction is 0.0"),
        ({"moments_every": 0}, "inner.moments_every is 0 but must be a whole number of at least 1"),
        ({"averaging": "gap"}, "unknown inner.averaging 'gap'; did you mean 'gpa'"),
        ({"mu_x": 1.0}, "inner.mu_x is 1.0 but must be a number from 0 to below 1"),
        ({"mu_y": -0.1}, "inner.mu_y is -0.1 but must be a number from 0 to 1"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        InnerConfig(**options)


def muon_step(gradient: Tensor) -> Tensor:
    """What the first step of muon takes off the hidden matrix with this gradient, in units of its rate and scale."""
    model = small()
    optimizer = build_optimizer(InnerConfig(optimizer="muon", lr=0.1, weight_decay=0.0), model)
    before = model.up.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.up.weight.grad = gradient.clone()
    optimizer.step()
    return (before - model.up.weight.detach()) / (0.1 * 0.2 * max(gradient.shape) ** 0.5)


def test_a_step_of_muon_is_nearly_the_orthogonal_factor_of_its_gradient_and_turns_with_it() -> None:
    """As near as the iteration in bf16 comes: singular values from 0.65 to 1.2."""
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(6, 4, generator=generator)
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    step = muon_step(gradient)
    assert 0.65 < torch.linalg.svdvals(step).min() <= torch.linalg.svdvals(step).max() < 1.2
    assert torch.cosine_similarity(step.flatten(), (u @ v).flatten(), dim=0) > 0.95
    left, right = (torch.linalg.qr(torch.randn(k, k, generator=generator)).Q for k in (6, 4))
    assert torch.allclose(muon_step(left @ gradient @ right), left @ step @ right, atol=0.06)
    assert torch.allclose(muon_step(100 * gradient), step, atol=0.06)
