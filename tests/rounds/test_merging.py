"""What happens to the steps that were taken under a transfer: they are kept, weighed or corrected."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drifted_rounds import play
from gossamer.errors import ConfigError
from gossamer.layout import Layout, Leaf
from gossamer.rounds.merging import Merge, merging
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.stability import stability_of, stability_warning
from gossamer.rules import diloco, gasloc, gossip, sparta
from gossamer.testing import check_parity
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology, random

P = 9
LAYOUT = Layout((Leaf("a", (2, 3), 0, 6), Leaf("b", (3,), 6, 9)), P)
MERGES: list[Merge] = ["keep", "taylor", 0.0, 0.5, 1.0]
drawn = st.integers(0, 1 << 30)
MANY = settings(deadline=None, max_examples=20)


def merged(sent: Tensor, live: Tensor, result: Tensor, merge: Merge, strength: float = 0.5) -> Tensor:
    """What becomes of `live` when the update makes `result` of `sent`."""
    x = live.clone()
    with merging(x, LAYOUT, sent, merge, strength):
        assert torch.equal(x, sent), "an update sees the parameters as they were sent"
        x.copy_(result)
    return x


def three(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return random_vectors(3, P, seed, dtype=dtype)


@MANY
@given(seed=drawn)
def test_a_correction_of_strength_zero_keeps_to_the_last_bit(seed: int) -> None:
    sent, live, result = three(seed)
    assert torch.equal(merged(sent, live, result, "taylor", 0.0), merged(sent, live, result, "keep"))


@pytest.mark.parametrize("merge", ["keep", "taylor", 0.0])
@MANY
@given(seed=drawn)
def test_without_steps_in_between_every_merge_gives_the_result_and_a_number_gives_it_for_zero(
    merge: Merge, seed: int
) -> None:
    sent, _, result = three(seed)
    assert torch.equal(merged(sent, sent, result, merge), result)


@MANY
@given(seed=drawn)
def test_a_number_weighs_what_was_trained_against_the_result(seed: int) -> None:
    sent, live, result = three(seed)
    assert torch.equal(merged(sent, live, result, 0.0), result)
    assert torch.equal(merged(sent, live, result, 1.0), live)
    torch.testing.assert_close(merged(sent, live, result, 0.25), 0.25 * live + 0.75 * result)


@MANY
@given(seed=drawn, strength=st.floats(0.01, 2.0), scale=st.sampled_from([1.0, 1e-15, 1e12]))
def test_the_correction_of_each_tensor_is_as_long_as_its_strength_says_and_points_as_the_squares_do(
    seed: int, strength: float, scale: float
) -> None:
    sent, live, result = (scale * v for v in three(seed))
    moved, jump = live - sent, result - sent
    difference = merged(sent, live, result, "keep").double() - merged(sent, live, result, "taylor", strength).double()
    for leaf in LAYOUT.leaves:
        piece = slice(leaf.start, leaf.stop)
        wanted = (moved[piece].double() ** 2 * jump[piece].double()).clone()
        wanted *= strength * moved[piece].double().norm() / wanted.norm()
        torch.testing.assert_close(difference[piece], wanted, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("still", ["moved", "jump"])
def test_a_tensor_that_was_not_trained_or_not_updated_is_not_corrected(still: str) -> None:
    sent, live, result = three(0)
    (live if still == "moved" else result)[6:] = sent[6:]
    kept, corrected = merged(sent, live, result, "keep"), merged(sent, live, result, "taylor")
    assert torch.equal(kept[6:], corrected[6:]) and not torch.equal(kept[:6], corrected[:6])


@MANY
@given(seed=drawn, curvature=st.floats(0.1, 1.0), jump=st.floats(-0.5, 0.5).filter(lambda v: abs(v) > 1e-3))
def test_on_a_quadratic_the_correction_goes_towards_the_steps_that_the_result_would_have_taken(
    seed: int, curvature: float, jump: float
) -> None:
    """For f = h/2 x² a step of length lr moves x by -lr h x, so from A it would have moved by -lr h A."""
    sent = 1.0 + three(seed, torch.float64)[0].abs()
    result, steps, lr = sent * (1 + jump), 3, 0.1
    live, ideal = sent.clone(), result.clone()
    for _ in range(steps):
        live, ideal = live - lr * curvature * live, ideal - lr * curvature * ideal
    kept, corrected = merged(sent, live, result, "keep"), merged(sent, live, result, "taylor", 0.01)
    right = (ideal - kept) * (corrected - kept)
    assert bool((right > 0).all())


@MANY
@given(seed=drawn, overlap=st.integers(1, 3))
def test_workers_that_keep_what_they_trained_under_a_sparse_average_keep_their_mean(seed: int, overlap: int) -> None:
    start, drift = random_vectors(4, P, seed), random_drift(P, seed)
    for rule in (sparta(3), gossip()):
        schedule = Schedule(overlap_steps=overlap)
        xs, _ = play(rule, make_topology("random", 4), start, 5, drift, steps=3, schedule=schedule)
        total = sum(start) + sum(drift(i, step, start[0]) for i in range(4) for step in range(15))
        torch.testing.assert_close(sum(xs), total)


def test_equal_workers_that_average_have_trained_as_one_alone_whatever_was_in_flight() -> None:
    start, drift = [random_vectors(1, P)[0]] * 3, random_drift(P)
    for rule in (sparta(3), gossip()):
        xs, _ = play(
            rule,
            make_topology("complete", 3),
            start,
            4,
            lambda i, step, x: drift(0, step, x),
            steps=3,
            schedule=Schedule(overlap_steps=2),
        )
        alone = start[0] + sum(drift(0, step, start[0]) for step in range(12))
        for x in xs:
            torch.testing.assert_close(x, alone)


def test_a_correction_reaches_the_parameters_of_a_streaming_round_and_nothing_else() -> None:
    """The outer state sees what is sent only, and the first result comes from what was sent before any merge."""
    start, drift, thirds = [random_vectors(1, P)[0]] * 3, random_drift(P), ((0, 3), (3, 6), (6, 9))
    topology = make_topology("complete", 3)
    made = {
        merge: play(
            diloco(),
            topology,
            start,
            1,
            drift,
            steps=3,
            spans=thirds,
            schedule=Schedule(fragments=3, overlap_steps=2, merge=merge),
        )
        for merge in ("keep", "taylor")
    }
    assert not any(torch.allclose(a, b) for a, b in zip(made["keep"][0], made["taylor"][0], strict=True))
    for ours, theirs in zip(made["keep"][1], made["taylor"][1], strict=True):
        assert all(torch.equal(a.anchor, b.anchor) for a, b in zip(ours, theirs, strict=True))


def test_the_number_of_threads_changes_no_bit_of_a_correction() -> None:
    numel, before = 100_000, torch.get_num_threads()
    layout = Layout((Leaf("w", (numel,), 0, numel),), numel)
    sent, live, result = random_vectors(3, numel, dtype=torch.float32)
    made = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            x = live.clone()
            with merging(x, layout, sent, "taylor", 0.5):
                x.copy_(result)
            made.append(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)


def test_stability_predicts_for_a_correction_what_it_predicts_without_and_no_variance() -> None:
    rule, topology = gasloc(momentum=0.9), random(8)
    kept, corrected = (stability_of(rule, topology, merge) for merge in ("keep", "taylor"))
    assert kept is not None and corrected is not None
    assert kept.radius == corrected.radius and corrected.variance != corrected.variance
    assert stability_warning(rule, topology, "taylor") == stability_warning(rule, topology, "keep") is not None


def test_a_strength_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"merge_strength is 0\.2 and schedule\.merge is 'keep'.*merge = 'taylor'"):
        Schedule(merge_strength=0.2)
    with pytest.raises(ConfigError, match="merge_strength"):
        Schedule(merge="taylor", merge_strength=-1.0)


def test_real_processes_correct_as_the_simulator_does() -> None:
    check_parity(diloco(), "complete", workers=2, schedule=Schedule(fragments=2, overlap_steps=2, merge="taylor"))
