"""RelaySum on trees: the mean of all, each worker as late as it is far, from one message for all neighbours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.codecs import CODECS, bf16
from gossamer.errors import PairingError
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rules import local_sgd, relaysum
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import TOPOLOGIES, make_topology
from gossamer.topologies.mixing import from_edges, matrix, metropolis

P = 7
TREES = [("chain", {}), ("star", {}), ("tree", {}), ("tree", {"branching": 3})]
close = torch.testing.assert_close
on_trees = pytest.mark.parametrize(("name", "options"), TREES, ids=[f"{name}-{options}" for name, options in TREES])


def links_between(topology):
    """How many links lead from each worker to each other one `[n, n]`."""
    linked, reached = matrix(topology.mixing(0)) > 0, np.eye(topology.n, dtype=bool)
    far = np.zeros((topology.n, topology.n), dtype=int)
    for _ in range(topology.n):
        far += ~reached
        reached = reached @ linked
    return far


def delays(topology):
    """τ_ij, in rounds."""
    return np.maximum(links_between(topology) - 1, 0)


def tree_of(parents):
    """A tree in which worker i + 1 hangs on worker `parents[i]`."""
    n = len(parents) + 1
    mixing = from_edges(n, metropolis(n, [(parent, i) for i, parent in enumerate(parents, start=1)]))
    return make_topology("star", n)._replace(mixing=lambda round, alive=None: mixing)


def watched(topology, start, rounds, drift, **options):
    """Where each worker stood at the end of each local phase `[t][i]`, and what `play` returns."""
    halves = [[start] * topology.n for _ in range(rounds)]

    def watching(i, t, x):
        halves[t][i] = x + drift(i, t, x)
        return drift(i, t, x)

    return halves, play(relaysum(), topology, [start] * topology.n, rounds, watching, **options)


def late_mean(i, halves, start, tau):
    """The mean of all as they were, for worker i, τ rounds ago."""
    t, n = len(halves) - 1, len(tau)
    return sum((halves[t - tau[i, j]][j] if t >= tau[i, j] else start) for j in range(n)) / n


@pytest.mark.full
@given(
    parents=st.integers(1, 7).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n)))),
    rounds=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_on_any_tree_everyone_takes_the_mean_of_all_as_late_as_they_are_far(parents, rounds):
    topology, start = tree_of(parents), random_vectors(1, P)[0]
    halves, (xs, _) = watched(topology, start, rounds, random_drift(P))
    for i, x in enumerate(xs):
        close(x, late_mean(i, halves, start, delays(topology)), rtol=0, atol=1e-12)


@on_trees
def test_drifts_that_depend_on_the_point_are_averaged_as_late_too(name, options):
    topology, start = make_topology(name, 9, **options), random_vectors(1, P)[0]
    halves, (xs, _) = watched(topology, start, 12, lambda i, t, x: 0.1 * torch.sin(x * (i + 1) + t))
    for i, x in enumerate(xs):
        close(x, late_mean(i, halves, start, delays(topology)), rtol=0, atol=1e-12)


def test_two_workers_and_the_hub_of_a_star_take_the_exact_mean_without_delay():
    start, drift = random_vectors(1, P)[0], random_drift(P)
    xs, _ = play(relaysum(), make_topology("chain", 2), [start] * 2, 9, drift)
    ys, _ = play(local_sgd(), make_topology("complete", 2), [start] * 2, 9, drift)
    assert all(torch.allclose(x, y, rtol=0, atol=1e-13) for x, y in zip(xs, ys, strict=True))
    halves, (xs, _) = watched(make_topology("star", 6), start, 5, drift)
    close(xs[0], sum(halves[-1]) / 6)


@pytest.mark.sampled(8)
@on_trees
@pytest.mark.parametrize("n", [1, 2, 5, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workers_that_stand_still_stay_to_the_last_bit_on_any_tree(name, options, n, dtype):
    x = random_vectors(1, 40, dtype=dtype)[0]
    xs, _ = play(relaysum(), make_topology(name, n, **options), [x] * n, 12)
    assert all(torch.equal(x, y) for y in xs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", [factory() for factory in CODECS.values()], ids=CODECS)
def test_both_ends_of_a_link_hold_the_same_sums_to_the_last_bit_through_any_codec(codec):
    topology, start = make_topology("tree", 7), random_vectors(1, 300, dtype=torch.float32)[0]
    _, states = play(relaysum(), topology, [start] * 7, 9, random_drift(300, dtype=torch.float32), codec=codec)
    peers = [topology.mixing(0).receives_from(i) for i in range(7)]
    for i, state in enumerate(states):
        for k, j in enumerate(peers[i]):
            assert torch.equal(state.came[k], states[j].went[peers[j].index(i)])
            assert state.came[k].any()


def test_errors_of_a_codec_leave_the_tree_instead_of_adding_up():
    """The sums obey m_t = m_{t-2} + (the sent message), in which errors would walk, were they not subtracted by the bit."""
    topology, start, rounds = make_topology("chain", 5), torch.zeros(64, dtype=torch.float64), 150
    halves, (_, states) = watched(topology, start, rounds, random_drift(64), codec=bf16())
    for i in range(1, 5):  # what came to worker i from the lower end of the chain
        true = sum(halves[rounds - 1 - (i - 1 - j)][j] for j in range(i))
        error = float((states[i].came[0] - true).abs().max())
        largest = 5 * max(float(half.abs().max()) for half in halves[-1])  # of the sent messages
        assert 0 < error < i * 2**-8 * largest


@pytest.mark.sampled(1)
@on_trees
def test_a_steady_drift_moves_everyone_by_its_share_of_one_plus_the_mean_delay(name, options):
    topology, start = make_topology(name, 8, **options), torch.zeros(1, dtype=torch.float64)
    xs, states = play(relaysum(), topology, [start] * 8, 250, lambda i, t, x: torch.ones_like(x))
    ys, _ = play(relaysum(), topology, xs, 1, lambda i, t, x: torch.ones_like(x), states=states, first=250)
    for x, y in zip(xs, ys, strict=True):
        assert float(y - x) == pytest.approx(1 / (1 + delays(topology).mean()), abs=1e-9)


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if not make_topology(name, 8).tree])
def test_a_graph_that_is_no_tree_is_refused(name):
    with pytest.raises(
        PairingError, match=f"'relaysum' on topology '{name}'.* relays sums along a tree; use topology 'tree'"
    ):
        incompatibilities.check(Combination(rule=relaysum(), topology=make_topology(name, 8)))
