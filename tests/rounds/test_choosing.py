"""Which fragment goes next: the one that changes fastest, alike on all workers, and none is forgotten."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.codecs import exact
from gossamer.errors import ConfigError
from gossamer.record.folder import read_metrics
from gossamer.rounds.choosing import FragmentChoice
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.kernel import PLAIN
from gossamer.rounds.schedule import Schedule
from gossamer.rules import diloco
from gossamer.run.simulated.simulate import simulate
from gossamer.testing.drifted_workers import random_drift, random_vectors, simulated_workers
from gossamer.topologies import complete
from tiny import tiny

SPANS = [(0, 3), (3, 6), (6, 9)]
shapes = st.integers(2, 5).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, p + 3)))


def picks(choice, rounds, rate, delay=0):
    """The fragments sent in these rounds; `rate(p, number)` is measured so many sends after each send, which it is in flight."""
    found, flying = [], []
    for number in range(rounds * choice.sends):
        round, place = divmod(number, choice.sends)
        for p in [p for p, since in flying if number - since > delay]:
            choice.state[0, p] = rate(p, number)
        flying = [(p, since) for p, since in flying if number - since <= delay]
        found.append(choice.pick(round, place, [p for p, _ in flying]))
        choice.sent(round, place)
        flying.append((found[-1], number))
    return found


@given(shape=shapes, delay=st.integers(0, 1))
def test_fragments_that_change_alike_are_sent_in_turn(shape, delay):
    fragments, sends = shape
    found = picks(FragmentChoice(fragments, sends), 4, lambda p, number: 1.0, min(delay, fragments - 2))
    assert found == [number % fragments for number in range(4 * sends)]


@settings(deadline=None)
@given(shape=shapes, rates=st.lists(st.floats(0.0, 1e6), min_size=12, max_size=12))
def test_each_fragment_is_sent_at_least_once_in_any_round_and_one_send(shape, rates):
    fragments, sends = shape
    found = picks(FragmentChoice(fragments, sends), 6, lambda p, number: rates[(5 * p + number) % 12])
    for k in range(len(found) - sends):
        assert set(found[k : k + sends + 1]) == set(range(fragments))


def test_the_fragment_that_changes_fastest_is_sent_more_often_than_once_a_round():
    found = picks(FragmentChoice(3, 5), 6, lambda p, number: (1.0, 9.0, 2.0)[p])
    counts = [found.count(p) for p in range(3)]
    assert counts[1] > counts[2] >= counts[0] >= 5


def make_workers(schedule, numel=9, n=2, dtype=torch.float32):
    m = Method(diloco(0.7, 0.9), complete(n), exact(), schedule, PLAIN)
    return simulated_workers(m, [random_vectors(1, numel, dtype=dtype)[0]] * n, steps=6, spans=SPANS)


def test_while_rates_are_unknown_the_bits_are_those_of_streaming_in_turn():
    one, other = make_workers(Schedule(fragments=3)), make_workers(Schedule(fragments=3, sends=3))
    for each in (one, other):
        each.train(range(1), random_drift(9, dtype=torch.float32))
    assert all(torch.equal(x, y) for x, y in zip(one.xs, other.xs, strict=True))


def test_the_rate_of_a_fragment_is_how_far_its_outer_value_moved_for_each_send_between_two():
    drift = random_drift(9)
    one = make_workers(Schedule(fragments=3, sends=3), dtype=torch.float64)
    start = one.xs[0].clone()
    one.train(range(1), drift)
    rates, last, between = one.states[0][-1].tolist()
    moved = [float((one.xs[0] - start)[a:b].norm()) for a, b in SPANS]
    assert last == [0, 1, 2] and between == [3, 3, 3]
    assert rates[2] == pytest.approx(moved[2] / 3)  # sent at the end of the round, so nothing was trained since


@pytest.mark.parametrize("overlap", [0, 2])
def test_all_workers_choose_alike_though_their_own_steps_differ(overlap):
    some = make_workers(
        Schedule(fragments=3, sends=4, overlap_steps=overlap, merge="taylor" if overlap else "keep"), n=3
    )
    chosen = []
    for t in range(6):
        some.train(range(t, t + 1), random_drift(9, dtype=torch.float32))
        assert all(torch.equal(some.states[0][-1], s[-1]) for s in some.states)
        chosen += [p for _, p in sorted(some.loops[0]._choice.of.items())]
    assert chosen != [k % 3 for k in range(24)] and set(chosen) == {0, 1, 2}


@pytest.mark.full
def test_a_run_that_chooses_resumes_from_a_checkpoint_with_fragments_in_flight(tmp_path):
    run = tiny(
        rule__name="diloco",
        topology__name="complete",
        run__local_steps=6,
        run__steps=36,
        run__checkpoint_every=12,
        schedule={"fragments": 3, "sends": 4, "overlap_steps": 2, "merge": "taylor"},
        record__hash=True,
        codec__name="int8",
        model={"hidden_size": 16, "intermediate_size": 24, "layers": 3, "heads": 2, "kv_heads": 1},
    )
    whole = simulate(run, tmp_path / "whole")
    simulate(run, tmp_path / "parts", until=4)
    assert simulate(run, tmp_path / "parts", resume=True).loss == whole.loss
    assert all(len(line["hashes"]) == 4 for line in read_metrics(tmp_path / "whole") if line["kind"] == "train")


@pytest.mark.parametrize(("fragments", "sends", "every"), [(3, 2, ()), (1, 1, ()), (2, 3, (1, 1))])
def test_too_few_sends_or_fragments_are_refused(fragments, sends, every):
    with pytest.raises(ConfigError, match=f"schedule.sends is {sends}"):
        Schedule(fragments=fragments, sends=sends, inner_every=every)
