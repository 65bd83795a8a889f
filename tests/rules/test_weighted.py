"""Weighting by local steps: a worker with few steps counts as if it had gone on as it began, in any rule on parameters."""

import math

import pytest
import torch

from drifted_rounds import context, play
from gossamer.codecs import exact, int4
from gossamer.errors import ConfigError
from gossamer.rounds.kernel import Kernel, outer_update
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.stability import resolve_alpha
from gossamer.rules import RULES, anchored, diloco, eager, error_feedback, gasloc, gossip, noloco, restarted, weighted
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.tree import leaves, map_leaves

P, N = 7, 4
STEPS = (6, 2, 3, 1)
ROWS = {
    **{name: factory() for name, factory in RULES.items()},
    "gasloc-eta1": gasloc(lr=1.0),
    "gasloc-heavy_ball": gasloc(optimizer="heavy_ball", momentum=0.5),
    "eager-delayed": eager(fresh=False),
    "diloco-error_feedback": error_feedback(diloco()),
    "noloco-anchored": anchored(noloco()),
    "diloco-restarted": restarted(diloco()),
}
PARAMETERS = {name: rule for name, rule in ROWS.items() if rule.site == "parameters"}
every_rule = pytest.mark.parametrize("rule", PARAMETERS.values(), ids=PARAMETERS.keys())


def topology_for(rule, n=N):
    fitting = {"everyone": "complete", "static": "ring", "tree": "star", "push": "random_push"}
    return make_topology(fitting.get(rule.needs, "random"), n)


def scaled(drift, steps):
    """The drift, times how many steps of a worker make all of them."""
    return lambda i, t, x: max(steps) / steps[i] * drift(i, t, x)


@pytest.mark.sampled(6)
@every_rule
def test_with_equal_steps_a_rule_is_itself_to_the_last_bit(rule):
    start, drift = [random_vectors(1, P, dtype=torch.float32)[0]] * N, random_drift(P, dtype=torch.float32)
    plain, states = play(rule, topology_for(rule), start, 5, drift, steps=3)
    same, inner = play(weighted(rule), topology_for(rule), start, 5, drift, steps=3)
    assert all(map(torch.equal, plain, same))
    for outer, wrapped in zip(states, inner, strict=True):
        assert all(map(torch.equal, leaves(outer), leaves(wrapped.inner)))


OVERLAPPED = [
    (name, steps) for name, rule in PARAMETERS.items() for steps in (0, 3) if not (steps and rule.delay_rounds)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "overlap_steps"), OVERLAPPED)
def test_with_unequal_steps_it_is_the_rule_on_drifts_as_long_as_those_of_all_steps(name, overlap_steps):
    rule = PARAMETERS[name]
    start, drift, topology = [random_vectors(1, P)[0]] * N, random_drift(P), topology_for(rule)
    schedule = Schedule(overlap_steps=overlap_steps)
    expected, _ = play(rule, topology, start, 5, scaled(drift, STEPS), steps=STEPS, schedule=schedule)
    got, _ = play(weighted(rule), topology, start, 5, drift, steps=STEPS, schedule=schedule)
    plain, _ = play(rule, topology, start, 5, drift, steps=STEPS, schedule=schedule)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not all(map(torch.allclose, plain, expected))


AVERAGING = [
    name
    for name, r in PARAMETERS.items()
    if r.mean_preserving and r.single_worker_limit == "inner" and r.needs != "push"
]
CODED = [(name, c) for name in AVERAGING for c in (exact(), int4()) if c.exact or PARAMETERS[name].needs != "everyone"]


@pytest.mark.parametrize(("name", "codec"), CODED)
def test_the_mean_of_the_drifts_is_that_of_the_drifts_per_step(name, codec):
    rule, drift, start = PARAMETERS[name], random_drift(P), random_vectors(1, P)[0]
    xs, _ = play(weighted(rule), topology_for(rule), [start] * N, 1, drift, steps=STEPS, codec=codec)
    per_step = [sum(drift(i, h, start) for h in range(steps)) / steps for i, steps in enumerate(STEPS)]
    torch.testing.assert_close(sum(xs) / N, start + max(STEPS) * sum(per_step) / N)


@every_rule
def test_where_a_rule_says_its_round_began_is_where_it_was_left(rule):
    start, drift = [random_vectors(1, P)[0]] * N, random_drift(P)
    for some in (rule, weighted(rule)):
        xs, states = play(some, topology_for(rule), start, 3, drift, steps=2)
        if some.start is not None and not rule.delay_rounds:
            assert all(torch.equal(x, some.start(s)) for x, s in zip(xs, states, strict=True))
    assert weighted(rule).state_copies == rule.state_copies + (rule.start is None)


@pytest.mark.parametrize(
    "rule", [weighted(gasloc()), weighted(gossip()), weighted(diloco())], ids=lambda rule: rule.name
)
def test_chunked_updates_are_equal_to_the_last_bit(rule):
    """`test_exchange` compiles them too."""
    topology = make_topology("complete" if rule.needs == "everyone" else "ring", 3)
    start, drift = random_vectors(3, 1001, dtype=torch.float32), random_drift(1001, dtype=torch.float32)
    expected, _ = play(rule, topology, start, 3, drift, steps=[7, 3, 5])
    got, _ = play(rule, topology, start, 3, drift, steps=[7, 3, 5], kernel=Kernel(outer_update, 100))
    assert all(map(torch.equal, expected, got))


def test_resetting_and_wrapping_again_reach_the_rule_inside():
    x = random_vectors(1, P)[0]
    rule = weighted(error_feedback(diloco()))
    state = map_leaves(lambda t: t + 1, rule.init(x, context(0, 0, make_topology("complete", N).mixing(0), x)))
    assert torch.equal(rule.reset(x, state).inner.inner.b, torch.zeros_like(x))
    assert anchored(weighted(gasloc())).start is not None and restarted(weighted(gasloc())).start is not None


def test_rules_without_local_steps_or_with_an_open_gossip_step_are_refused():
    with pytest.raises(ConfigError, match="'data_parallel' acts on gradients"):
        weighted(RULES["data_parallel"]())
    with pytest.raises(ConfigError, match="resolve_alpha"):
        weighted(gasloc(alpha="auto"))
    settled = weighted(resolve_alpha(gasloc(alpha="auto"), make_topology("random", 8)))
    assert not math.isnan(settled.options["alpha"])
