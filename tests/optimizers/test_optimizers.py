"""Inner optimizers of our own: what they are in their limits, and that nothing of them is lost on the way to a file."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.layout import attach, layout_of, views
from gossamer.optimizers import GPA, AccoAdamW, AccumAdamW, InnerOptimizer, QHAdopt, mu_x_like_diloco, toward
from gossamer.optimizers.inner import InnerConfig, build_optimizer, clip_gradients, lr_scale
from gossamer.record import checkpoint

KINDS = ("acco_adamw", "accum_adamw", "adamw", "muon", "qh_adopt", "sgd", "spectral_muon")
AVERAGINGS = ("gpa", "schedule_free")


class Small(nn.Module):
    """An embedding, a hidden layer with a bias, a norm and a head: something for every part of an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.hidden(self.embed(tokens)))))


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def backward(model: nn.Module, step: int) -> None:
    tokens = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def train(model: nn.Module, optimizer: InnerOptimizer, steps: int = 5, first: int = 0) -> list[Tensor]:
    """The parameters after every step."""
    path = []
    for step in range(first, first + steps):
        backward(model, step)
        optimizer.step()
        path.append(vector(model))
    return path


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def kept(optimizer: InnerOptimizer, model: nn.Module, name: str) -> Tensor:
    """x or z of GPA in the order of the model."""
    assert isinstance(optimizer, GPA)
    return torch.cat([optimizer.state[p][name].flatten() for p in model.parameters()])


def base_of(kind: str, **options: float) -> Callable[[nn.Module], InnerOptimizer]:
    return lambda model: build_optimizer(InnerConfig(optimizer=kind, lr=0.02, moments_every=2, **options), model)


def same(model: nn.Module, other: nn.Module) -> bool:
    return torch.equal(vector(model), vector(other))


# GPA: its limits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mu_y", [0.0, 0.7, 1.0])
def test_an_average_without_memory_is_the_base_optimizer_bit_for_bit(kind: str, mu_y: float) -> None:
    averaged, alone = small(), small()
    path = train(averaged, GPA(base_of(kind)(averaged), mu_x=0.0, mu_y=mu_y))
    assert all(map(torch.equal, path, train(alone, base_of(kind)(alone))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mu_x", [0.3, 0.9, None])
def test_gradients_at_the_iterate_leave_the_base_optimizer_as_it_is_bit_for_bit(kind: str, mu_x: float | None) -> None:
    averaged, alone = small(), small()
    base = base_of(kind) if mu_x is not None else base_of(kind, weight_decay=0.0)
    optimizer = GPA(base(averaged), mu_x=mu_x, mu_y=0.0)
    x = vector(averaged)
    for t, (y, z) in enumerate(zip(train(averaged, optimizer), train(alone, base(alone)), strict=True), start=1):
        assert torch.equal(y, z)
        x = toward(x, z, 1 / t if mu_x is None else 1 - mu_x)
    assert torch.equal(kept(optimizer, averaged, "x"), x)
    optimizer.eval()
    assert torch.equal(vector(averaged), x)


def quadratic(
    lr: float, mu_x: float | None, mu_y: float, steps: int
) -> tuple[GPA, nn.Parameter, Callable[[Tensor], Tensor]]:
    """GPA over SGD on a badly conditioned quadratic in fp64, and the gradient of that."""
    curvature = torch.tensor([3.0, 1.0, 0.1], dtype=torch.float64)
    w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = GPA(torch.optim.SGD([w], lr=lr), mu_x=mu_x, mu_y=mu_y)
    for _ in range(steps):
        w.grad = curvature * w.detach()
        optimizer.step()
    return optimizer, w, lambda point: curvature * point


def test_with_gradients_at_the_average_it_is_primal_averaging() -> None:
    optimizer, w, gradient = quadratic(0.3, 0.8, 1.0, steps=20)
    x = z = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for _ in range(20):
        z = z - 0.3 * gradient(x)
        x = 0.8 * x + 0.2 * z
    torch.testing.assert_close(w.data, x, rtol=1e-12, atol=0)
    assert torch.equal(optimizer.state[w]["x"], w.data)


def schedule_free(
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    rates: list[float],
    beta: float,
    decay: float,
    beta2: float | None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, y, z) after every step, as in algorithm 1 of arXiv 2405.15682; SGD for no β₂, else AdamW with bias correction."""
    x = y = z = start
    v, largest, total, path = torch.zeros_like(start), 0.0, 0.0, []
    for t, rate in enumerate(rates, start=1):
        g = gradient(y)
        if beta2 is not None:
            v = beta2 * v + (1 - beta2) * g**2
            g = g / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        z = z - rate * g - rate * decay * y
        largest = max(largest, rate)
        total += largest**2
        x = (1 - largest**2 / total) * x + largest**2 / total * z
        y = (1 - beta) * z + beta * x
        path.append((x, y, z))
    return path


@pytest.mark.parametrize(("kind", "beta2"), [("adamw", 0.95), ("accum_adamw", 0.95), ("sgd", None)])
@pytest.mark.parametrize("shape", ["constant", "cosine"])
def test_schedule_free_is_that_of_its_authors_from_the_warm_up_on(kind: str, beta2: float | None, shape: str) -> None:
    config = InnerConfig(
        optimizer=kind,
        averaging="schedule_free",
        lr=0.1,
        betas=(0.9, 0.95),
        momentum=0.9,
        weight_decay=0.3,
        mu_y=0.9,
        schedule=shape,
        warmup_steps=5,
        moments_every=1,
    )
    layer = nn.Linear(3, 1, bias=False).double()
    curvature, start = torch.tensor([[3.0, 1.0, 0.1]]).double(), torch.tensor([[1.0, -2.0, 3.0]]).double()
    layer.weight.data.copy_(start)
    optimizer = build_optimizer(config, layer)
    assert isinstance(optimizer, GPA)
    rates = [0.1 * lr_scale(config, t, 15) for t in range(15)]
    expected = schedule_free(lambda point: curvature * point, start, rates, 0.9, 0.3, beta2)
    for rate, (x, y, z) in zip(rates, expected, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        layer.weight.grad = curvature * layer.weight.detach()
        optimizer.step()
        own = optimizer.state[layer.weight]
        for ours, theirs in ((own["x"], x), (layer.weight.data, y), (own["z"], z)):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]


def test_with_a_constant_learning_rate_schedule_free_evaluates_the_mean_of_the_points_after_each_step() -> None:
    optimizer, w, gradient = quadratic(0.3, None, 0.9, steps=20)
    path = schedule_free(gradient, torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), [0.3] * 20, 0.9, 0.0, None)
    mean = torch.stack([z for _, _, z in path]).mean(0)
    torch.testing.assert_close(optimizer.state[w]["x"], mean, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mu", [0.5, 0.9])
def test_with_one_weight_for_both_it_is_nesterov(mu: float) -> None:
    _, w, gradient = quadratic(0.3, mu, mu, steps=20)
    theirs = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    sgd = torch.optim.SGD([theirs], lr=0.3 * (1 - mu), momentum=mu, nesterov=True)
    for _ in range(20):
        theirs.grad = gradient(theirs.detach())
        sgd.step()
    torch.testing.assert_close(w.data, theirs.data, rtol=1e-11, atol=0)


def test_weight_decay_acts_on_the_iterate() -> None:
    w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = GPA(torch.optim.AdamW([w], lr=0.1, weight_decay=0.5), mu_x=0.5, mu_y=0.5)
    for _ in range(3):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert optimizer.state[w]["z"].item() == pytest.approx(2 * 0.95**3, rel=1e-12)
    x = 2.0
    for t in (1, 2, 3):
        x = 0.5 * x + 0.5 * 2 * 0.95**t
    assert w.item() == pytest.approx((x + 2 * 0.95**3) / 2, rel=1e-12)


def test_mu_x_of_a_diloco_is_the_papers_table() -> None:
    table = {1: 0.9, 4: 0.974, 8: 0.9869, 16: 0.9934, 32: 0.9967, 64: 0.9984, 128: 0.9992}
    assert {h: round(mu_x_like_diloco(h), 4) for h in table} == table


# GPA: a torch optimizer


@settings(max_examples=30, deadline=None)
@given(mu_x=st.one_of(st.none(), st.floats(0, 0.999)), mu_y=st.floats(0, 1), steps=st.integers(1, 6))
def test_the_parameters_are_always_what_x_and_z_say(mu_x: float | None, mu_y: float, steps: int) -> None:
    model = small()
    optimizer = GPA(torch.optim.SGD(model.parameters(), lr=0.5), mu_x=mu_x, mu_y=mu_y)
    train(model, optimizer, steps)
    y = vector(model)
    assert torch.equal(y, toward(kept(optimizer, model, "z"), kept(optimizer, model, "x"), mu_y))
    optimizer.recompute()
    assert torch.equal(vector(model), y)


@given(a=st.floats(-1e3, 1e3, width=32), b=st.floats(-1e3, 1e3, width=32), weight=st.floats(0, 1))
def test_what_lies_between_two_numbers_lies_between_them(a: float, b: float, weight: float) -> None:
    value = toward(torch.tensor(a), torch.tensor(b), weight).item()
    slack = 1e-6 * max(abs(a), abs(b)) + 1e-38  # below the normal range of fp32 there are no six digits
    assert min(a, b) - slack <= value <= max(a, b) + slack
    assert value == pytest.approx((1 - weight) * a + weight * b, abs=4 * slack)


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_evaluation_mode_shows_the_average_and_training_continues_to_the_same_bits(averaging: str) -> None:
    paused, through = small(), small()
    config = InnerConfig(averaging=averaging, lr=0.02, mu_x=0.9)
    optimizer, other = build_optimizer(config, paused), build_optimizer(config, through)
    train(paused, optimizer, 3)
    assert isinstance(optimizer, GPA)
    y = vector(paused)
    for _ in range(2):  # saying it twice changes nothing
        optimizer.eval()
        assert torch.equal(vector(paused), kept(optimizer, paused, "x")) and not torch.equal(vector(paused), y)
    with pytest.raises(RuntimeError, match="average of 3 steps"):
        train(paused, optimizer, 1, first=3)
    optimizer.train()
    assert torch.equal(vector(paused), y)
    train(paused, optimizer, 3, first=3)
    train(through, other, 6)
    assert same(paused, through)


@pytest.mark.parametrize("averaging", [*AVERAGINGS, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_eval", [False, True])
def test_every_optimizer_resumes_from_a_file_bit_for_bit(
    kind: str, averaging: str | None, in_eval: bool, tmp_path: Path
) -> None:
    config = InnerConfig(optimizer=kind, averaging=averaging, lr=0.02, mu_x=0.9, moments_every=3)
    model, resumed = small(), small()
    optimizer = build_optimizer(config, model)
    train(model, optimizer, 4)  # in the middle of a window of moments
    if in_eval and isinstance(optimizer, GPA):
        optimizer.eval()
    checkpoint.save(tmp_path, 1, 0, {"model": dict(model.state_dict()), "inner": optimizer.state_dict()}, digest="d")
    state = checkpoint.load(tmp_path, 1, 0, "d")
    train(
        resumed, continued := build_optimizer(config, resumed), 2, first=50
    )  # that it has a past of its own is no matter
    resumed.load_state_dict(state["model"])
    continued.load_state_dict(state["inner"])
    assert same(model, resumed)
    for one in (optimizer, continued):
        if isinstance(one, GPA):
            one.train()
    for group in continued.param_groups:  # still the groups that the steps read
        group["lr"] = 0.01
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    assert all(map(torch.equal, train(model, optimizer, 5, 4), train(resumed, continued, 5, 4)))


def test_the_parameters_follow_from_the_state_whatever_the_model_has() -> None:
    model, other = small(), small()
    optimizer = GPA(torch.optim.SGD(model.parameters(), lr=0.1), mu_x=0.9)
    train(model, optimizer, 3)
    GPA(torch.optim.SGD(other.parameters(), lr=0.1), mu_x=0.9).load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(model, other)


def test_a_state_of_another_model_is_refused_in_a_sentence() -> None:
    model, other = small(), nn.Linear(4, 3)
    optimizer = GPA(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 1)
    for parameters, words in (
        ([*other.parameters()], r"parameter 0 .*\(5, 4\)"),
        ([model.embed.weight], "parameter 1"),
    ):
        with pytest.raises(ValueError, match=words):
            GPA(torch.optim.SGD(parameters, lr=0.1)).load_state_dict(optimizer.state_dict())


def test_schedulers_clipping_and_closures_work_as_on_the_base() -> None:
    averaged, alone = small(), small()
    optimizer, sgd = (torch.optim.SGD(model.parameters(), lr=0.5) for model in (averaged, alone))
    gpa = GPA(optimizer, mu_x=0.0)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (gpa, sgd)]
    for step in range(4):
        for model, one in ((averaged, gpa), (alone, sgd)):
            backward(model, step)
            clip_gradients(model.parameters(), 0.1)
            assert one.step(lambda: 3.5) == 3.5
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5**5
    assert same(averaged, alone)


def test_a_closure_sees_the_point_between_iterate_and_average() -> None:
    w = nn.Parameter(torch.tensor([1.0]))
    optimizer = GPA(torch.optim.SGD([w], lr=0.5), mu_x=0.75, mu_y=0.5)
    seen = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        w.grad = torch.ones_like(w)
        seen.append(w.item())
        return 0.0

    for _ in range(2):
        optimizer.step(closure)
    assert seen == [1.0, 0.6875]


def test_parameters_loaded_before_the_first_step_are_where_it_begins() -> None:
    model, loaded = small(), small()
    optimizer = GPA(torch.optim.SGD(loaded.parameters(), lr=0.1), mu_x=0.9)
    with torch.no_grad():
        for one in (model, loaded):
            for p in one.parameters():
                p.add_(1.0)
    train(model, GPA(torch.optim.SGD(model.parameters(), lr=0.1), mu_x=0.9))
    train(loaded, optimizer)
    assert same(model, loaded)


def test_a_group_added_later_is_averaged_and_stepped_too() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = GPA(torch.optim.SGD([first], lr=0.5, momentum=0.9), mu_x=0.5)
    first.grad = torch.ones(2)
    optimizer.step()
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(optimizer.state[second]["z"], torch.full((3,), 0.5))
    assert optimizer.base.param_groups[1]["momentum"] == 0.9


def test_a_model_and_its_optimizer_can_be_copied_together() -> None:
    model = small()
    optimizer = GPA(base_of("muon")(model), mu_x=0.9)
    train(model, optimizer, 2)
    twin, continued = copy.deepcopy((model, optimizer))
    assert all(map(torch.equal, train(model, optimizer, 3, 2), train(twin, continued, 3, 2)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mu_x": 1.0}, "mu_x = 1.0"),
        ({"mu_x": -0.1}, "mu_x = -0.1"),
        ({"mu_y": 1.1}, "mu_y = 1.1"),
        ({"mu_y": float("nan")}, "mu_y = nan"),
    ],
)
def test_weights_out_of_range_are_refused_with_a_sentence(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        GPA(torch.optim.SGD(small().parameters(), lr=0.1), **options)
    with pytest.raises(ConfigError, match=r"local_steps = 0"):
        mu_x_like_diloco(0)


# GPA beside peers: x and z in flat buffers


def flat(averaging: str = "gpa") -> tuple[Small, GPA, Tensor, Tensor, Tensor]:
    """A model with parameters, average and iterate in three flat buffers."""
    model = small()
    layout = layout_of(model)
    y = attach(model, layout)
    x, z = torch.empty_like(y), torch.empty_like(y)
    config = InnerConfig(averaging=averaging, lr=0.02, mu_x=0.9)
    optimizer = build_optimizer(config, model, x=views(model, layout, x), z=views(model, layout, z))
    assert isinstance(optimizer, GPA)
    return model, optimizer, y, x, z


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_average_and_iterate_may_lie_in_buffers_that_are_given(averaging: str) -> None:
    model, optimizer, y, x, z = flat(averaging)
    own = small()
    other = build_optimizer(InnerConfig(averaging=averaging, lr=0.02, mu_x=0.9), own)
    assert torch.equal(x, y) and torch.equal(z, y), "they can be looked at before the first step"
    assert all(map(torch.equal, train(model, optimizer), train(own, other)))
    assert torch.equal(x, kept(other, own, "x")) and torch.equal(z, kept(other, own, "z"))
    assert not torch.equal(x, z)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, 5)
    assert torch.equal(y, toward(z, x, 0.7)), "a state that was loaded is in the buffers too"


def test_what_peers_mix_into_average_and_iterate_is_where_the_next_gradient_is_taken() -> None:
    workers = [flat() for _ in range(2)]
    for k, (model, optimizer, *_) in enumerate(workers):
        train(model, optimizer, 3, first=10 * k)
    mean_y = (workers[0][2] + workers[1][2]) / 2
    for place in (3, 4):  # x and z, each worker's replaced by the mean of both
        mean = (workers[0][place] + workers[1][place]) / 2
        for worker in workers:
            worker[place].copy_(mean)
    for _, optimizer, y, *_ in workers:
        assert not torch.allclose(y, mean_y, rtol=0, atol=1e-3)
        optimizer.recompute()
        torch.testing.assert_close(y, mean_y)  # y is linear in x and z
    (one, first, *_), (two, second, *_) = workers
    assert not same(one, small()) and same(one, two)
    train(one, first, 1, 20)
    train(two, second, 1, 21)
    torch.testing.assert_close(workers[0][3], workers[1][3], rtol=0, atol=0.02)  # from there each on its own


# AccumAdamW


def with_gradients(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], gradients: list[Tensor], dtype: torch.dtype
) -> Tensor:
    """Where an optimizer takes a parameter that starts at ones along given gradients."""
    w = nn.Parameter(torch.ones_like(gradients[0], dtype=dtype))
    optimizer = make([w])
    for g in gradients:
        w.grad = g.to(dtype)
        optimizer.step()
    return w.data


def draws(steps: int, numel: int = 257) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) for _ in range(steps)]


OPTIONS = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("numel", [257, 70_001])  # the second in several pieces
def test_moments_of_every_step_are_adamw_bit_for_bit(numel: int) -> None:
    gradients = draws(12, numel)
    ours = with_gradients(lambda w: AccumAdamW(w, **OPTIONS, moments_every=1), gradients, torch.float32)
    theirs = with_gradients(lambda w: torch.optim.AdamW(w, **OPTIONS, foreach=False), gradients, torch.float32)
    assert torch.equal(ours, theirs)


def test_a_parameter_whose_memory_is_not_in_one_run_is_averaged_and_stepped_like_any_other() -> None:
    found = []
    for transposed in (False, True):
        start = torch.arange(6.0).reshape(2, 3)
        w = nn.Parameter(start.T.contiguous().T if transposed else start.clone())
        assert w.is_contiguous() != transposed
        optimizer = GPA(AccumAdamW([w], lr=0.1, moments_every=2), mu_x=0.5)
        for step in range(3):
            w.grad = torch.full_like(w, 1.0 + step)
            optimizer.step()
        found.append(w.data)
    assert torch.equal(*found) and not torch.equal(found[0], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("s", [2, 3, 7])
def test_accum_adamw_is_the_papers_update(s: int) -> None:
    theta = torch.ones(257, dtype=torch.float64)
    m, v, b = (torch.zeros_like(theta) for _ in range(3))
    lr, (beta1, beta2), eps, decay = OPTIONS.values()
    for t, g in enumerate(draws(15), start=1):
        g = g.double()
        k = -(-t // s)
        m_hat = (beta1 * m + (1 - beta1) * g) / (1 - beta1**k)
        v_hat = (beta2 * v + (1 - beta2) * g * g) / (1 - beta2**k)
        theta = (1 - lr * decay) * theta - lr * m_hat / (v_hat.sqrt() + eps)
        b = b + g / s
        if t % s == 0:
            m, v, b = beta1 * m + (1 - beta1) * b, beta2 * v + (1 - beta2) * b * b, torch.zeros_like(b)
    ours = with_gradients(lambda w: AccumAdamW(w, **OPTIONS, moments_every=s), draws(15), torch.float64)
    torch.testing.assert_close(ours, theta, rtol=1e-12, atol=1e-14)
    other = with_gradients(lambda w: AccumAdamW(w, **OPTIONS, moments_every=s + 1), draws(15), torch.float64)
    assert not torch.allclose(ours, other, atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(s=st.integers(1, 6), steps=st.integers(1, 12), beta1=st.floats(0, 0.95), beta2=st.floats(0, 0.99))
def test_a_gradient_that_stays_makes_adamw_of_any_window(s: int, steps: int, beta1: float, beta2: float) -> None:
    constant = draws(1, 9) * steps
    options = {**OPTIONS, "betas": (beta1, beta2)}
    ours = with_gradients(lambda w: AccumAdamW(w, **options, moments_every=s), constant, torch.float64)
    theirs = with_gradients(lambda w: torch.optim.AdamW(w, **options), constant, torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_moments_change_at_the_end_of_a_window_only() -> None:
    w = nn.Parameter(torch.ones(9))
    optimizer = AccumAdamW([w], moments_every=3)
    seen = []
    for g in draws(6, 9):
        w.grad = g
        optimizer.step()
        seen.append((optimizer.state[w]["exp_avg"].clone(), optimizer.state[w]["exp_avg_sq"].clone()))
    zeros = torch.zeros(9)
    moved = [not torch.equal(a[0], b[0]) for a, b in itertools.pairwise([(zeros, zeros), *seen])]
    assert moved == [False, False, True, False, False, True]
    window = torch.stack(draws(6, 9)[:3]).mean(0)
    torch.testing.assert_close(seen[2][0], 0.1 * window)
    torch.testing.assert_close(seen[2][1], 0.001 * window**2)


def test_a_parameter_without_a_gradient_keeps_its_window() -> None:
    often, seldom = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AccumAdamW([often, seldom], moments_every=2)
    for step in range(4):
        often.grad, seldom.grad = torch.ones(3), torch.ones(3) if step == 3 else None
        assert optimizer.step(lambda: 2.5) == 2.5
    assert (optimizer.state[often]["step"], optimizer.state[seldom]["step"]) == (4, 1)
    assert not optimizer.state[seldom]["exp_avg"].any() and seldom[0] < 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1.0}, "lr = -1.0"),
        ({"betas": (0.9, 1.0)}, "betas = "),
        ({"eps": -1e-8}, "eps = "),
        ({"weight_decay": -0.1}, "weight_decay = "),
        ({"moments_every": 0}, "moments_every = 0"),
    ],
)
def test_impossible_settings_of_accum_adamw_are_refused_with_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        AccumAdamW(small().parameters(), **options)


def qh(**options) -> Callable[[list[nn.Parameter]], QHAdopt]:
    return lambda w: QHAdopt(w, **{**OPTIONS, **options})


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_qh_adopt_is_the_papers_update_from_the_gradient_alone_to_the_momentum_alone(share: float) -> None:
    first, *rest = [g.double() for g in draws(15)]
    theta, u, v = torch.ones(257, dtype=torch.float64), torch.zeros(257, dtype=torch.float64), first * first
    lr, (beta1, beta2), eps, decay = OPTIONS.values()
    for t, g in enumerate(rest, start=1):
        scaled = (g / v.sqrt().clamp(min=eps)).clamp(-(t**0.25), t**0.25)
        u = beta1 * u + (1 - beta1) * scaled
        theta = (1 - lr * decay) * theta - lr * ((1 - share) * scaled + share * u)
        v = beta2 * v + (1 - beta2) * g * g
    ours = with_gradients(qh(slow_weight=share), draws(15), torch.float64)
    torch.testing.assert_close(ours, theta, rtol=1e-12, atol=1e-14)
    without_momentum = with_gradients(qh(slow_weight=share, betas=(0.0, 0.9)), draws(15), torch.float64)
    only_gradient = with_gradients(qh(slow_weight=0.0), draws(15), torch.float64)
    torch.testing.assert_close(without_momentum, only_gradient)


def test_after_some_steps_a_slow_momentum_remembers_what_the_workers_agreed_on_and_a_fast_one_does_not() -> None:
    for beta, left in ((0.995, 0.852), (0.9, 0.034)):
        w = nn.Parameter(torch.ones(3))
        optimizer = QHAdopt([w], betas=(beta, 0.9999))
        for g in (1.0, 1.0, *[0.0] * 32):
            w.grad = torch.full_like(w, g)
            optimizer.step()
            if g:
                agreed = optimizer.state[w]["exp_avg"].clone()
        assert float(optimizer.state[w]["exp_avg"][0] / agreed[0]) == pytest.approx(left, abs=1e-3)


def test_workers_with_one_second_moment_that_average_every_step_take_the_step_on_their_mean_scaled_gradient() -> None:
    """As data parallelism does: with equal v, which averaging keeps equal for one step, all else is linear in ĝ."""
    common, gradients = draws(1)[0], [g.clamp(-0.5, 0.5) for g in draws(3)]

    def stepped(g: Tensor) -> tuple[Tensor, Tensor]:
        w = nn.Parameter(torch.ones(257))
        optimizer = QHAdopt([w], **{**OPTIONS, "slow_weight": 0.6})
        for one in (common.abs() + 1.0, g):
            w.grad = one
            optimizer.step()
        return w.detach(), optimizer.state[w]["exp_avg"]

    apart = [stepped(g) for g in gradients]
    together = stepped(sum(gradients, torch.zeros(257)) / 3)
    for averaged, wanted in zip((sum(some) / 3 for some in zip(*apart, strict=True)), together, strict=True):
        torch.testing.assert_close(averaged, wanted)


def test_a_long_scaled_gradient_is_bounded_by_the_fourth_root_of_the_step() -> None:
    w = nn.Parameter(torch.zeros(1))
    optimizer = QHAdopt([w], lr=1.0, betas=(0.9, 0.9999), weight_decay=0.0, slow_weight=0.0)
    moved = []
    for g in (1e-3, *[1e3] * 3):
        before, w.grad = w.detach().clone(), torch.full_like(w, g)
        optimizer.step()
        moved.append(float(before - w.detach()))
        optimizer.state[w]["exp_avg_sq"].fill_(1e-6)
    assert moved == pytest.approx([0.0, 1.0, 2**0.25, 3**0.25])


def late(*halves: Tensor) -> list[Tensor]:
    """As gradients come: nothing at first."""
    return [torch.zeros_like(halves[0]), *halves]


@pytest.mark.parametrize("numel", [257, 70_001])  # the second in several pieces
def test_where_both_halves_have_one_gradient_acco_is_adamw_bit_for_bit(numel: int) -> None:
    gradients = draws(6, numel)
    twice = late(*(g for g in gradients for _ in range(2)))
    theirs = with_gradients(lambda w: torch.optim.AdamW(w, **OPTIONS, foreach=False), gradients, torch.float32)
    assert torch.equal(with_gradients(lambda w: AccoAdamW(w, **OPTIONS), twice, torch.float32), theirs)
    estimated = with_gradients(lambda w: AccoAdamW(w, **OPTIONS), twice[:-1], torch.float32)
    assert torch.equal(estimated, theirs)  # the first half alone has made the same step


def test_the_step_is_that_of_the_mean_of_both_halves_whatever_was_estimated() -> None:
    halves = draws(8)
    means = [(a + b) / 2 for a, b in zip(halves[::2], halves[1::2], strict=True)]
    theirs = with_gradients(lambda w: torch.optim.AdamW(w, **OPTIONS, foreach=False), means, torch.float32)
    assert torch.equal(with_gradients(lambda w: AccoAdamW(w, **OPTIONS), late(*halves), torch.float32), theirs)
    estimated = with_gradients(lambda w: AccoAdamW(w, **OPTIONS), late(*halves[:-1]), torch.float32)
    one = with_gradients(
        lambda w: torch.optim.AdamW(w, **OPTIONS, foreach=False), [*means[:-1], halves[-2]], torch.float32
    )
    assert torch.equal(estimated, one) and not torch.equal(estimated, theirs)
