"""Where the seconds of a run went: measured, priced and known in virtual time, in one format."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_virtual import METHODS, timed

from commands import run
from gossamer.errors import DataError
from gossamer.network.links import Network
from gossamer.network.pricing import price
from gossamer.record.logs.seconds import RoundSeconds, read_seconds, seconds_lines
from gossamer.record.logs.trace import Messages, from_targets, read_trace
from gossamer.rounds.stopwatch import held_up
from gossamer.run.bookkeeping.spent_seconds import priced
from gossamer.run.config.run_file import dump
from gossamer.run.simulated.simulate import simulate
from gossamer.transport.contract import Delivery, Ticket, Wait
from tiny import tiny

DYADIC = {"step_s": [0.125, 0.25, 0.375], "uplink_bps": 2.0**26, "downlink_bps": 2.0**26, "latency_s": 0.0625}


def of(worker, seconds):
    return [one for one in seconds if one.worker == worker]


def columns(folder):
    return {tuple(json.loads(line)) for path in folder.glob("seconds*.jsonl") for line in path.read_text().splitlines()}


def adds_up(seconds, workers, end_s, tolerance=1e-9):
    """Whether the rounds of each worker follow each other without a gap, up to the end of the run."""
    for i in range(workers):
        ends = [one.end_s for one in of(i, seconds)]
        lengths = [one.total_s for one in of(i, seconds)]
        assert np.cumsum(lengths) == pytest.approx(ends, rel=tolerance, abs=tolerance)
        assert ends[-1] == pytest.approx(end_s, rel=tolerance, abs=tolerance)


def test_what_is_written_is_read_back(tmp_path):
    seconds = [
        RoundSeconds(0, 0, "home", 1.5, 0.25, {2: 0.5, -1: 1.0}, 0.125, 3.375),
        RoundSeconds(0, 1, None, 1.0, 0, {}, 0, 1.0),
    ]
    (tmp_path / "seconds.jsonl").write_text(seconds_lines(seconds[:1]))
    (tmp_path / "seconds-001.jsonl").write_text(seconds_lines(seconds[1:]))
    assert read_seconds(tmp_path) == [seconds[1], seconds[0]]
    assert (seconds[0].waiting_s, seconds[0].total_s) == (1.5, 3.375)


@pytest.mark.parametrize(
    "change",
    [
        {"round": -1},
        {"worker": 1.5},
        {"compute_s": -1.0},
        {"end_s": 1e99},
        {"other_s": "1"},
        {"network": 3},
        {"waiting_for": {"-2": 1.0}},
        {"waiting_for": {"a": 1.0}},
        {"waiting_for": {"1": -1.0}},
        {"waiting_for": [1]},
        {"more": 1},
    ],
)
def test_a_line_that_gossamer_does_not_write_is_refused_with_its_place(change, tmp_path):
    good = json.loads(seconds_lines([RoundSeconds(0, 0, None, 1.0, 0.0, {}, 0.0, 1.0)]))
    (tmp_path / "seconds.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
    with pytest.raises(DataError, match=r"seconds\.jsonl:2"):
        read_seconds(tmp_path)


def test_a_wait_is_for_the_peer_whose_message_began_to_come_last():
    ticket, arrived = Ticket(3), [Delivery(Ticket(3), 1, 10, 0.5, 2.0), Delivery(Ticket(3), 2, 10, 2.0, 7.0)]
    assert [*held_up([Wait(ticket, 5.0, 9.0)], arrived)] == [(2, 2.0, 2.0)]
    assert [*held_up([Wait(ticket, 8.0, 9.0)], arrived)] == [(2, 0.0, 1.0)]  # its bytes were coming already
    assert [*held_up([Wait(Ticket(4), 8.0, 9.0)], arrived)] == [(None, 0.0, 1.0)]


def test_the_worker_that_is_ready_first_waits_until_the_message_of_the_other_leaves():
    trace = from_targets(np.array([[1, 0], [1, 0]]), payload_bytes=1000, steps=10)
    network = Network(uplink_bps=8000, downlink_bps=8000, step_s=(1.0, 3.0))
    fast, slow = (of(i, priced(trace, network, "n")) for i in (0, 1))
    assert fast[0] == RoundSeconds(0, 0, "n", 10.0, 1.0, {1: 20.0}, 0.0, 31.0)
    assert slow[0] == RoundSeconds(0, 1, "n", 30.0, 1.0, {}, 0.0, 31.0)
    assert [one.end_s for one in fast + slow] == [31.0, 62.0] * 2


def test_a_mean_waits_for_the_last_of_all_workers_in_the_sum():
    trace = from_targets(np.array([[[1, 2], [0, 2], [0, 1]]]), payload_bytes=1000, steps=10, kind="mean")
    for i, one in enumerate(priced(trace, Network(uplink_bps=8000, downlink_bps=8000, step_s=(1.0, 2.0, 3.0)), "n")):
        assert one.waiting_for == ({} if i == 2 else {2: 20.0 - 10.0 * i})


@pytest.mark.parametrize("kind", ["mean", "exchange"])
def test_what_a_slower_link_of_a_peer_takes_longer_than_ones_own_is_waiting_for_that_peer(kind):
    """Three of four workers have links ten times as fast as the fourth's uplink, which is all that holds them up."""
    targets = (
        np.array([[[j for j in range(4) if j != i] for i in range(4)]]) if kind == "mean" else np.array([[3, 2, 1, 0]])
    )
    trace = from_targets(targets, payload_bytes=1000, steps=10, kind=kind)
    network = Network(uplink_bps=(8000, 8000, 8000, 800), downlink_bps=8000, step_s=1.0)
    found = [of(i, priced(trace, network, "n"))[0] for i in range(4)]
    assert found[3].waiting_for == {}  # whose own link it is
    held_up = range(3) if kind == "mean" else [0]
    for i in held_up:
        assert found[i].waiting_for[3] == pytest.approx(0.9 * found[3].transfer_s)
        assert found[i].transfer_s == pytest.approx(0.1 * found[3].transfer_s)
    if kind == "exchange":
        assert not found[1].waiting_for and not found[2].waiting_for


def test_what_overlaps_is_waited_for_only_after_the_steps_that_hide_it():
    trace = from_targets(np.array([[1, 0], [1, 0], [0, 1]]), payload_bytes=1000, steps=10)
    late = Messages(*trace.messages[:6], np.full_like(trace.messages.overlap_steps, 5))
    network = Network(uplink_bps=8000, downlink_bps=8000, step_s=(1.0, 3.0))
    fast, slow = (of(i, priced(trace._replace(messages=late), network, "n")) for i in (0, 1))
    assert fast[0].waiting_for == {} and fast[0].end_s == 10.0
    assert fast[1].waiting_for == {1: 15.0} and fast[1].transfer_s == 1.0  # due at 15 s, sent at 30 s
    assert all(one.waiting_for == {} for one in slow)


def test_without_a_network_only_computing_takes_time():
    trace = from_targets(np.array([[1, 0], [1, 0]]), payload_bytes=1000, steps=10, compute_s=[1.0, 2.0])
    assert priced(trace, None, None) == [
        RoundSeconds(r, i, None, 1.0 + i, 0.0, {}, 0.0, (r + 1) * (1.0 + i)) for r in (0, 1) for i in (0, 1)
    ]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_priced_seconds_add_up_to_the_timeline(data):
    n, rounds, parts = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    targets = np.array(data.draw(st.lists(st.permutations(range(n)), min_size=rounds, max_size=rounds)))
    trace = from_targets(targets, 1000, steps=4, kind=data.draw(st.sampled_from(["exchange", "mean"])))
    overlap = np.full_like(trace.messages.overlap_steps, data.draw(st.integers(0, 5)))
    trace = trace._replace(messages=trace.messages._replace(overlap_steps=overlap))
    step_s = tuple(data.draw(st.lists(st.floats(0.01, 3.0), min_size=n, max_size=n)))
    network = Network(uplink_bps=8000, downlink_bps=4000, step_s=step_s, latency_s=0.125)
    timeline, seconds = price(trace, network), priced(trace, network, "n", parts)
    assert {one.round for one in seconds} == set(range(math.ceil(rounds / parts)))
    for i in range(n):
        ends = [one.end_s for one in of(i, seconds)]
        assert np.cumsum([one.total_s for one in of(i, seconds)]) == pytest.approx(ends)
        assert ends[-1] == timeline.end_s[-1, i]
        assert all(
            min(one.compute_s, one.transfer_s, one.waiting_s) >= 0 and one.other_s == 0 for one in of(i, seconds)
        )
        assert all(peer != i for one in of(i, seconds) for peer in one.waiting_for)


def test_a_simulation_in_rounds_is_priced_on_each_of_its_networks(tmp_path):
    networks = {"home": {**DYADIC, "step_s": [0.125, 0.5, 0.125]}, "lan": {**DYADIC, "step_s": 0.125}}
    config = tiny(network=networks, schedule__fragments=2, run__steps=8)
    result = simulate(config, tmp_path)
    seconds, trace = read_seconds(tmp_path), read_trace(tmp_path)
    assert set(result.time_s) == {"home", "lan"}
    for name, network in config.network.items():
        own = [one for one in seconds if one.network == name]
        assert [(one.round, one.worker) for one in own] == [
            (r, i) for r in range(config.length.rounds) for i in range(3)
        ]
        assert result.time_s[name] == price(trace, network).total_s == max(one.end_s for one in own)
    slow = of(1, [one for one in seconds if one.network == "home"])
    assert all(one.compute_s == 1.0 and not one.waiting_for for one in slow)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_virtual_seconds_add_up_to_the_virtual_clock_exactly(method, tmp_path):
    result = simulate(timed(DYADIC, **method), tmp_path)
    seconds = read_seconds(tmp_path)
    assert {one.network for one in seconds} == {"clock"} and {one.round for one in seconds} == {0, 1, 2, 3}
    adds_up(seconds, 3, result.time_s["clock"])
    computed = [sum(one.compute_s for one in of(i, seconds)) for i in range(3)]
    phases = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for i in range(3):
        own = [p["end_s"] - p["start_s"] for p in phases if p["event"] == "phase" and p["worker"] == i]
        assert computed[i] == pytest.approx(sum(own))


def test_a_full_quorum_waits_for_its_slowest_worker_and_a_lone_push_for_none(tmp_path):
    quorum = timed(DYADIC, server={"name": "decoupled_diloco", "quorum": 3, "merging": "average"})
    simulate(quorum, tmp_path / "quorum")
    whole = read_seconds(tmp_path / "quorum")
    for one in whole:
        assert set(one.waiting_for) <= ({2} if one.worker != 2 else set())
    # After every phase of 2 steps worker 0 is (0.375 - 0.125) * 2 s early, and the last phase needs no reply.
    assert sum(one.waiting_s for one in of(0, whole)) == pytest.approx(3 * 0.5)
    assert all(one.transfer_s > 0 for one in whole if one.round > 0)
    simulate(timed(DYADIC, server__name="cgad"), tmp_path / "alone")
    assert all(one.waiting_for == {} for one in read_seconds(tmp_path / "alone"))


def test_a_worker_that_is_away_neither_computes_nor_waits(tmp_path):
    absences = [{"worker": 1, "leave_s": 0.6, "return_s": 1.9}]
    result = simulate(timed(DYADIC, server__name="heloco", events={"absences": absences}, run__steps=16), tmp_path)
    seconds = read_seconds(tmp_path)
    adds_up(seconds, 3, result.time_s["clock"])
    assert sum(one.other_s for one in of(1, seconds)) >= 1.3
    assert all(one.waiting_for == {} for one in seconds)


@pytest.mark.timeout(240)
def test_a_fast_worker_waits_for_a_slow_one_and_all_records_have_the_same_columns(tmp_path):
    config = tiny(workers=2, run__steps=8, run__pace_s=[0.0, 0.5], run__timeout_s=100)
    (tmp_path / "run.toml").write_text(dump(config))
    began = time.monotonic()
    code, output = run("train", tmp_path / "run.toml", "--out", tmp_path / "real", "--local", 2)
    wall_s = time.monotonic() - began
    assert code == 0, output
    seconds = read_seconds(tmp_path / "real")
    assert {one.network for one in seconds} == {None}
    fast, slow = of(0, seconds), of(1, seconds)
    assert [one.round for one in fast] == [one.round for one in slow] == [0, 1, 2, 3]
    for own in (fast, slow):
        assert [one.total_s for one in own] == pytest.approx(np.diff([0.0, *(one.end_s for one in own)]), abs=1e-6)
        assert own[-1].end_s <= wall_s
    # Each worker's clock starts with its own first round, and the fast process may begin later than the slow one.
    assert slow[-1].end_s >= 8 * 0.5 and fast[-1].end_s >= 6 * 0.5
    assert all(one.compute_s >= 2 * 0.5 for one in slow)
    assert all(set(one.waiting_for) <= {1} for one in fast) and all(set(one.waiting_for) <= {0} for one in slow)
    assert sum(one.waiting_s for one in fast) > sum(one.waiting_s for one in slow) + 0.5
    simulate(tiny(run__steps=4), tmp_path / "rounds")
    simulate(timed(server__name="cgad"), tmp_path / "virtual")
    assert len({column for name in ("real", "rounds", "virtual") for column in columns(tmp_path / name)}) == 1
