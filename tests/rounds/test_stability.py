"""Stability: the published tables, closed forms, and brute-force simulation of the recursion all tell the same."""

import contextlib
import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.cli.gossip_table import gossip_table
from gossamer.errors import ConfigError
from gossamer.rounds.recursion import rule_recursion
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.stability import (
    best_alpha,
    largest_stable_gamma,
    outlook,
    resolve_alpha,
    stability,
    stability_of,
    stability_warning,
)
from gossamer.rules import RULES, Consensus, Rule, anchored, gasloc, gossip, noloco, weighted
from gossamer.run.planning.check import examine_run
from gossamer.testing.drifted_workers import random_vectors
from gossamer.topologies import TOPOLOGIES, Topology, base, complete, exponential, make_topology, random, ring, star
from gossamer.topologies.mixing import from_edges, laplacian_condition, matrix
from tiny import tiny

GOSSIPED = [name for name in TOPOLOGIES if make_topology(name, 8).doubly_stochastic]

MomentumSite = Literal["pre", "post", "drift"]
RING = ring(8, edge_weight=1.0)
LARGEST_GAMMA = [  # α, peers, then (pre, post) for 4, 8, 16 and 32 workers
    (1.0, 1, [(0.795, 1), (0.744, 0.859), (0.724, 0.815), (0.715, 0.797)]),
    (1.0, 2, [(0.928, 1), (0.850, 1), (0.820, 1), (0.807, 1)]),
    (0.5, 1, [(0.909, 1), (0.884, 1), (0.874, 1), (0.870, 1)]),
    (0.5, 2, [(0.969, 1), (0.934, 1), (0.920, 1), (0.914, 1)]),
]
EIGHT_WORKERS = [  # γ, then (radius, variance) of 1-peer pre, 1-peer post, 2-peer pre, 2-peer post
    (0.0, [(0.655, 0.75), (0.655, 0.75), (0.488, 0.31), (0.488, 0.31)]),
    (0.5, [(0.866, 3.59), (0.807, 2.72), (0.799, 1.58), (0.666, 0.93)]),
    (0.7, [(0.977, 23.79), (0.914, 7.13), (0.919, 4.77), (0.763, 1.55)]),
    (0.8, [(1.029, math.inf), (0.968, 20.64), (0.974, 15.99), (0.810, 2.10)]),
    (0.9, [(1.080, math.inf), (1.022, math.inf), (1.026, math.inf), (0.857, 2.98)]),
]


def simulate(consensus: Consensus, topology: Topology, drift: float, rounds: int, samples: int = 200) -> np.ndarray:
    """The variance per dimension of the disagreement after each round, from the recursion itself, word for word."""
    alpha, gamma, site = consensus
    rng = np.random.default_rng(1)
    theta = rng.normal(size=(topology.n, samples))
    theta -= theta.mean(0)  # so that rounding is relative to the disagreement alone
    prev = 0.0 * theta if site == "drift" else theta
    variances = []
    period = topology.period or rounds
    weights = [matrix(topology.mixing(t)) for t in range(period)]
    for t in range(rounds):
        noise = drift * rng.normal(size=theta.shape)
        y = theta + noise
        if site == "drift":
            prev = gamma * prev + noise
            y = y + gamma * prev
        z = y + alpha * (weights[t % period] @ y - y)
        if site == "drift":
            theta = z
        else:
            theta, prev = (z + gamma * (z - prev), z) if site == "post" else (z + gamma * (y - prev), y)
        apart = theta - theta.mean(0)
        variances.append((apart**2).sum() / samples / (topology.n - 1))
    return np.array(variances)


@pytest.mark.parametrize(("alpha", "peers", "limits"), LARGEST_GAMMA)
def test_the_largest_stable_momenta_are_those_of_the_table(alpha: float, peers: int, limits: list) -> None:
    for n, (pre, post) in zip((4, 8, 16, 32), limits, strict=True):
        topology = random(n, peers=peers)
        assert largest_stable_gamma(alpha, "pre", topology) == pytest.approx(pre, abs=6e-4)
        assert largest_stable_gamma(alpha, "post", topology) == pytest.approx(post, abs=6e-4)


def test_many_random_pairs_bear_a_momentum_of_one_over_root_two() -> None:
    assert largest_stable_gamma(1.0, "pre", random(4000)) == pytest.approx(1 / math.sqrt(2), abs=2e-4)
    assert largest_stable_gamma(1.0, "post", random(4000)) == pytest.approx(0.781, abs=6e-4)


@pytest.mark.parametrize(("gamma", "expected"), EIGHT_WORKERS)
def test_contraction_and_variance_of_eight_workers_are_those_of_the_table(gamma: float, expected: list) -> None:
    predicted = [stability(Consensus(1.0, gamma, s), random(8, peers=k)) for k in (1, 2) for s in ("pre", "post")]
    for (radius, variance), row in zip(expected, predicted, strict=True):
        assert row.method == "closed form"
        assert row.radius == pytest.approx(radius, abs=6e-4)
        assert row.variance == pytest.approx(variance, abs=6e-3)
        assert row.stable == (radius < 1)


def test_heavy_ball_on_a_ring_turns_chi_into_its_root() -> None:
    chi = laplacian_condition(matrix(RING.mixing(0)))
    smallest = 2 / chi
    alpha = 4 / (math.sqrt(2) + math.sqrt(smallest)) ** 2
    gamma = ((math.sqrt(chi) - 1) / (math.sqrt(chi) + 1)) ** 2
    assert (round(alpha, 3), round(gamma, 3)) == (1.046, 0.199)
    accelerated = stability(Consensus(alpha, gamma, "pre"), RING)
    assert accelerated.radius == pytest.approx(math.sqrt(gamma), abs=1e-6)
    assert round(accelerated.radius, 3) == 0.446
    plain = stability(Consensus(2 / (2 + smallest), 0.0, "pre"), RING)
    assert plain.radius == pytest.approx((chi - 1) / (chi + 1)) and round(plain.radius, 3) == 0.745


def test_nesterov_gossip_on_a_ring_is_its_closed_form() -> None:
    root = math.sqrt(laplacian_condition(matrix(RING.mixing(0))))
    predicted = stability(Consensus(0.5, (root - 1) / (root + 1), "post"), RING)
    assert predicted.radius == pytest.approx(1 - 1 / root, abs=1e-6) and round(predicted.radius, 3) == 0.617


@pytest.mark.parametrize(
    ("gamma", "site", "radius"), [(0.0, "pre", 0.805), (0.312, "pre", 0.559), (0.363, "post", 0.642)]
)
def test_momentum_accelerates_a_ring_of_thirds(gamma: float, site: MomentumSite, radius: float) -> None:
    assert stability(Consensus(1.0, gamma, site), ring(8)).radius == pytest.approx(radius, abs=1e-3)


def test_more_gossip_than_the_graph_bears_needs_momentum() -> None:
    assert not stability(Consensus(1.046, 0.0, "pre"), RING).stable
    assert stability(Consensus(1.046, 0.1, "pre"), RING).stable
    assert largest_stable_gamma(1.046, "pre", RING) == 1.0


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", GOSSIPED)
@pytest.mark.parametrize(
    "consensus", [Consensus(0.9, 0.3, "pre"), Consensus(0.8, 0.4, "post"), Consensus(0.9, 0.4, "drift")], ids=str
)
def test_the_steady_variance_is_that_of_a_simulation(name: str, consensus: Consensus) -> None:
    topology = make_topology(name, 16 if name == "hypercube" else 12)
    predicted = stability(consensus, topology)
    assert predicted.method == ("closed form" if topology.exchangeable else "companion")
    simulated = simulate(consensus, topology, drift=1.0, rounds=360)[120:].mean()  # a multiple of every period here
    assert simulated == pytest.approx(predicted.variance, rel=0.04)


@pytest.mark.parametrize("name", sorted(set(GOSSIPED) - {"random", "groups", "complete"}))
@pytest.mark.parametrize("consensus", [Consensus(1.0, 0.5, "pre"), Consensus(1.0, 0.9, "post")], ids=str)
def test_a_deterministic_contraction_is_that_of_a_simulation(name: str, consensus: Consensus) -> None:
    topology = make_topology(name, 8 if name == "hypercube" else 12)
    variances = simulate(consensus, topology, drift=0.0, rounds=252, samples=20)
    early, late = variances[84:168].mean(), variances[168:].mean()  # 84 is a multiple of every period here
    assert stability(consensus, topology).radius == pytest.approx((late / early) ** (1 / 168), rel=0.005)


def test_momentum_on_the_drift_contracts_like_the_slower_of_gossip_and_momentum() -> None:
    for topology in (random(8), random(7, peers=2), RING, exponential(6), complete(5)):
        alone = stability(Consensus(0.9, 0.0, "post"), topology).radius
        for gamma in (0.0, 0.3, 0.7, 0.99):
            predicted = stability(Consensus(0.9, gamma, "drift"), topology)
            assert predicted.radius == pytest.approx(max(alone, gamma), abs=1e-6)
            assert predicted.stable
        assert largest_stable_gamma(0.9, "drift", topology) == 1.0


def test_random_pairs_beyond_the_limit_drift_apart_in_a_simulation() -> None:
    limit = largest_stable_gamma(1.0, "pre", random(8))
    for gamma, bounded in ((limit - 0.06, True), (limit + 0.1, False)):
        variances = simulate(Consensus(1.0, gamma, "pre"), random(8), drift=1.0, rounds=600, samples=400)
        assert (variances[-50:].mean() < 1.5 * variances[250:300].mean()) == bounded


@pytest.mark.sampled(2)
@pytest.mark.parametrize("peers", [1, 2])
@pytest.mark.parametrize("n", [7, 8])
def test_the_second_moment_of_many_draws_agrees_with_the_closed_form(n: int, peers: int) -> None:
    exact = random(n, peers=peers)
    drawn = exact._replace(exchangeable=False)
    for consensus in (Consensus(1.0, 0.5, "pre"), Consensus(0.7, 0.8, "post"), Consensus(1.0, 0.9, "pre")):
        expected, predicted = stability(consensus, exact), stability(consensus, drawn)
        assert predicted.method == "second moment"
        assert predicted.radius == pytest.approx(expected.radius, rel=0.01)
        assert predicted.variance == pytest.approx(expected.variance, rel=0.04)


def test_the_second_moment_of_a_constant_draw_is_that_of_its_companion() -> None:
    for topology in (RING, exponential(6), complete(5)):
        for consensus in (Consensus(0.7, 0.4, "post"), Consensus(0.9, 0.6, "pre"), Consensus(0.9, 0.0, "post")):
            expected = stability(consensus, topology)
            predicted = stability(consensus, topology._replace(period=None))
            assert (expected.method, predicted.method) == ("companion", "second moment")
            assert predicted.radius == pytest.approx(expected.radius, abs=1e-4)
            assert predicted.variance == pytest.approx(expected.variance, rel=1e-4)


def test_a_renamed_static_graph_is_as_stable() -> None:
    names = np.random.default_rng(3).permutation(9)

    def renamed(topology: Topology) -> Topology:
        rows = topology.mixing(0).rows
        edges = [(int(names[i]), int(names[j]), w) for i, row in enumerate(rows) for j, w in row if i != j]
        mixing = from_edges(9, edges)
        return topology._replace(mixing=lambda round, alive=None: mixing)

    for topology in (ring(9), exponential(9)):  # circulant before, not after
        for consensus in (Consensus(1.0, 0.5, "pre"), Consensus(1.0, 0.5, "post")):
            one, other = stability(consensus, topology), stability(consensus, renamed(topology))
            assert one.radius == pytest.approx(other.radius, abs=1e-6)
            assert one.variance == pytest.approx(other.variance, rel=1e-9)


@pytest.mark.parametrize("name", ["base", "complete", "hypercube", "one_peer_exponential"])
def test_exact_averaging_has_radius_zero(name: str) -> None:
    for site in ("pre", "post"):
        assert stability(Consensus(1.0, 0.0, site), make_topology(name, 8)).radius == 0.0
    assert stability(Consensus(1.0, 0.0, "post"), base(13, peers=2)).radius == 0.0


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_one_worker_never_disagrees(name: str) -> None:
    topology = make_topology(name, 1)
    assert stability(Consensus(1.0, 0.99, "pre"), topology)[:2] == (0.0, 0.0)
    assert largest_stable_gamma(1.0, "pre", topology) == 1.0
    assert best_alpha(0.9, "pre", topology) == 1.0


def test_islands_never_agree() -> None:
    islands = from_edges(4, [(0, 1, 0.5), (1, 0, 0.5)])
    topology = ring(4)._replace(mixing=lambda round, alive=None: islands)
    assert stability(Consensus(1.0, 0.5, "post"), topology).radius == pytest.approx(1.0)
    assert math.isnan(largest_stable_gamma(1.0, "post", topology))
    warning = stability_warning(gasloc(momentum=0.7), topology)
    assert warning is not None
    assert (
        "no momentum is stable with gossip step 1" in warning
        and "with momentum 0.7 no gossip step is stable" in warning
    )


def test_the_best_step_without_momentum_is_known() -> None:
    assert best_alpha(0.0, "post", random(8)) == 1.0
    assert best_alpha(0.0, "pre", complete(6)) == pytest.approx(1.0, abs=2e-3)


@given(
    gamma=st.floats(0.0, 0.98),
    site=st.sampled_from(["pre", "post"]),
    topology=st.sampled_from([random(5), random(8), random(9, peers=2), ring(7), star(5), exponential(6), base(5)]),
)
@settings(max_examples=12, deadline=None)
def test_the_best_step_is_stable_and_no_other_is_better(gamma: float, site: MomentumSite, topology: Topology) -> None:
    best = stability(Consensus(best_alpha(gamma, site, topology), gamma, site), topology)
    assert best.stable
    for alpha in np.linspace(0.05, 1.95, 39):
        assert stability(Consensus(float(alpha), gamma, site), topology).variance >= best.variance * (1 - 1e-4)


def test_below_the_largest_momentum_is_stable_and_above_is_not() -> None:
    for topology in (random(8), random(9), base(6), make_topology("torus", 16)):
        limit = largest_stable_gamma(1.0, "post", topology)
        assert 0 < limit < 1
        assert stability(Consensus(1.0, limit - 1e-4, "post"), topology).stable
        assert not stability(Consensus(1.0, limit + 1e-4, "post"), topology).stable


def test_auto_is_settled_for_the_topology() -> None:
    topology = random(8)
    rule = resolve_alpha(gasloc(alpha="auto", momentum=0.9, lr=0.5), topology)
    assert rule.options == {**gasloc(lr=0.5, momentum=0.9).options, "alpha": best_alpha(0.9, "post", topology)}
    assert rule.consensus is not None and stability(rule.consensus, topology).stable
    assert stability_warning(rule, topology) is None


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_settled_stays_as_it_is(name: str) -> None:
    rule = RULES[name]()
    assert resolve_alpha(rule, random(8)) is rule


def test_auto_has_no_stability_before_it_is_settled() -> None:
    with pytest.raises(ConfigError, match=r"call resolve_alpha\(rule, topology\)"):
        stability_warning(gasloc(alpha="auto"), random(8))


def test_the_warning_says_how_bad_it_is_and_what_would_be_stable() -> None:
    warning = stability_warning(gasloc(momentum=0.9), random(8))
    assert warning is not None
    assert "rule 'gasloc'" in warning and "topology 'random' with 8 workers" in warning
    assert "multiplied by 1.022 per round" in warning
    assert "with gossip step 1 the largest stable momentum is 0.859" in warning
    assert f"with momentum 0.9 the best gossip step is {best_alpha(0.9, 'post', random(8)):g}" in warning


def test_rules_whose_replicas_are_equal_are_never_warned_about() -> None:
    assert stability_warning(RULES["diloco"](), complete(8)) is None


def test_large_topologies_are_analysed_at_once() -> None:
    for topology in (random(5000, peers=2), ring(5000), make_topology("one_peer_exponential", 1024)):
        assert 0 < stability(Consensus(0.3, 0.5, "post"), topology).radius < 1


def test_a_push_topology_has_no_mean_to_agree_on() -> None:
    topology = make_topology("random_push", 8)
    with pytest.raises(ConfigError, match=r"random_push.*doubly stochastic"):
        stability(Consensus(1.0, 0.5, "post"), topology)
    predicted = outlook(topology, alpha=1.0, gamma=0.5)
    assert predicted.gossip == () and "sgp" in gossip_table(topology, predicted)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", GOSSIPED)
@pytest.mark.parametrize("n", [1, 8])
def test_every_topology_can_be_described(name: str, n: int) -> None:
    topology = make_topology(name, n)
    predicted = outlook(topology, alpha=0.8, gamma=0.6)
    table = gossip_table(topology, predicted)
    for site in ("post", "pre", "drift"):
        expected = stability(Consensus(0.8, 0.6, site), topology)
        (line,) = (line for line in table.split("\n") if f'"{site}"' in line)
        assert f"x {expected.radius:.3f}" in line and f" {expected.variance:.3g} " in line
    assert "spectral gap" in table
    assert [one.consensus.gamma for one in predicted.gossip] == [0.6, 0.6, 0.6, 0.0]


@pytest.mark.parametrize("wrong", [{"alpha": 0.0, "gamma": 0.5}, {"alpha": 1.0, "gamma": 1.0}])
def test_steps_and_momenta_out_of_range_are_not_described(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="which must be a number"):
        outlook(random(8), **wrong)


MERGED = [
    gasloc(momentum=0.9),
    gasloc(1.0),
    gasloc(form="published"),
    gasloc(optimizer="heavy_ball"),
    gasloc(form="drift"),
    noloco(),
    gossip(),
]


WITH_A_MERGE = pytest.mark.parametrize(
    "rule", [*MERGED, anchored(gasloc()), weighted(gasloc())], ids=lambda rule: f"{rule.name}{rule.options}"
)


@WITH_A_MERGE
@pytest.mark.parametrize("schedule", [Schedule(merge=0.5), Schedule(merge=0.3, overlap_steps=1)], ids=str)
def test_with_a_merge_the_recursion_is_what_a_run_does_after_one_drift(rule: Rule, schedule: Schedule) -> None:
    drifts, topology, rounds = random_vectors(6, 1), random(6), 9
    start = [torch.zeros(1, dtype=torch.float64)] * 6
    xs, _ = play(rule, topology, start, rounds, lambda i, t, x: drifts[i] * (t == 0), schedule=schedule, steps=2)
    assert isinstance(schedule.merge, float)
    own, pulled, sent, _ = rule_recursion(rule, schedule.merge)
    state = np.kron(np.eye(len(sent))[0], torch.cat(drifts).numpy())
    for t in range(rounds):
        mixed = matrix(topology.mixing(t)) - np.eye(6)
        state = (np.kron(own, np.eye(6)) + np.kron(np.outer(pulled, sent), mixed)) @ state
    np.testing.assert_allclose(state[:6], torch.cat(xs).numpy(), rtol=1e-9, atol=1e-12)


@WITH_A_MERGE
def test_a_merge_that_keeps_nothing_is_the_plain_recursion(rule: Rule) -> None:
    hides = rule.consensus is None or rule.consensus.site != "drift"  # drift from its momentum
    drawn = random(6)._replace(exchangeable=False)  # takes ten times as long
    for topology in (random(8), ring(8), *([] if hides else [drawn])):
        plain, merged = stability_of(rule, topology), stability_of(rule, topology, 0.0)
        assert plain is not None and merged is not None
        assert merged.radius == pytest.approx(plain.radius, rel=1e-5) and merged.method == plain.method
        assert hides or merged.variance == pytest.approx(plain.variance, rel=1e-3)


def test_a_momentum_that_random_pairs_do_not_bear_is_stable_with_a_merge() -> None:
    rule, topology = gasloc(momentum=0.9), random(8)
    assert stability_warning(rule, topology, 0.5) is None
    assert "multiplied by 1.022" in str(stability_warning(rule, topology, 0.0))
    assert "a smaller schedule.merge" in str(stability_warning(rule, topology, 1.0))
    merged, drawn = (stability_of(rule, one, 0.5) for one in (topology, topology._replace(exchangeable=False)))
    assert merged is not None and drawn is not None
    assert round(merged.radius, 3) == 0.684 and drawn.radius == pytest.approx(merged.radius, rel=0.01)
    assert drawn.variance == pytest.approx(merged.variance, rel=0.02)


def test_a_check_predicts_the_disagreement_with_the_merge_of_the_schedule() -> None:
    run = tiny(workers=8, rule__momentum=0.9, schedule__merge=0.5)
    (with_merge, without) = (examine_run(one) for one in (run, tiny(workers=8, rule__momentum=0.9)))
    assert with_merge.disagreement == pytest.approx(0.684, abs=1e-3) and not with_merge.warnings
    assert without.disagreement == pytest.approx(1.022, abs=1e-3) and "lose consensus" in without.warnings[0]


def test_the_default_momentum_is_stable_up_to_32_workers_on_every_topology_but_those_that_gasloc_names() -> None:
    unstable: dict[str, set[int]] = {}
    for name in TOPOLOGIES:
        for n in range(2, 33):
            with contextlib.suppress(ConfigError):  # some do not exist for every n, and push graphs keep no mean
                if not stability(gasloc().consensus, make_topology(name, n)).stable:
                    unstable.setdefault(name, set()).add(n)
    assert unstable.keys() == {"torus", "base"}
    assert unstable["base"] == {5, 6, *range(9, 16), *range(17, 32)}
    assert "`torus` and `base`, each at some sizes (`base` at 5, 6, 9 to 15 and 17 to 31)" in " ".join(
        gasloc.__doc__.split()
    )
