"""Jacobi gossip: its weights, the recursion it stands for, what it gains on a long ring, and what training has to do with it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.rules import gossip, jacobi
from gossamer.rules.jacobi import weights
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology


@given(st.integers(0, 1000), st.floats(0.01, 64))
def test_the_three_weights_keep_the_mean_and_the_first_forgets_what_was_before(t, dimension):
    a, b, c = weights(t, dimension)
    assert a + b - c == pytest.approx(1, abs=1e-12)
    assert min(a, b, c) >= 0 and (c == 0) == (t == 0)


@pytest.mark.parametrize("name", ["ring", "exponential", "complete", "chain"])
@pytest.mark.parametrize("dimension", [1.0, 2.0])
def test_workers_that_stand_still_follow_the_recursion_of_the_polynomials(name, dimension):
    topology = make_topology(name, 8)
    start = random_vectors(8, 5)
    got, _ = play(jacobi(dimension, every=6), topology, start, 6)
    w = torch.tensor(
        [[dict(row).get(j, 0.0) for j in range(8)] for row in topology.mixing(0).rows], dtype=torch.float64
    )
    before = now = torch.stack(start)
    for t in range(6):
        a, b, c = weights(t, dimension)
        before, now = now, a * w @ now + b * now - c * before
    torch.testing.assert_close(torch.stack(got), now, rtol=0, atol=1e-12)


def apart(xs):
    mean = sum(xs) / len(xs)
    return float(torch.stack([x - mean for x in xs]).norm())


@pytest.mark.full
def test_on_a_ring_of_32_it_agrees_in_a_quarter_of_the_rounds_of_gossip_and_knows_no_gap():
    ring, start = make_topology("ring", 32), random_vectors(32, 50)
    plain = {rounds: apart(play(gossip(), ring, start, rounds)[0]) for rounds in (8, 32, 128)}
    fast = {rounds: apart(play(jacobi(every=rounds), ring, start, rounds)[0]) for rounds in (8, 32, 64)}
    assert fast[8] < 0.75 * plain[8] and fast[32] < 0.3 * plain[32] and fast[32] < 1.1 * plain[128]
    assert fast[64] < 0.6 * plain[128]


def test_what_is_trained_enters_once_and_is_no_part_of_the_momentum():
    start, drift = random_vectors(1, 7) * 6, random_drift(7)
    got, states = play(jacobi(every=5), make_topology("ring", 6), start, 12, drift)
    trained = sum(drift(i, t, start[0]) for i in range(6) for t in range(12)) / 6
    torch.testing.assert_close(sum(got) / 6, start[0] + trained, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(s.moved for s in states), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)


def test_alike_drifts_leave_it_without_any_momentum():
    got, states = play(
        jacobi(), make_topology("ring", 6), random_vectors(1, 7) * 6, 12, lambda i, t, x: torch.ones_like(x)
    )
    assert apart(got) < 1e-12 and all(float(s.moved.norm()) < 1e-12 for s in states)
