"""Prices: the model written out message by message, published settings by hand, and what must hold on every network."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.network import Network, Timeline, from_toml, price, read_network, to_toml
from gossamer.trace import Entry, Operation, Trace, from_entries, from_targets

N, PAYLOAD, STEP_S = 8, 1_000_000, 1.0
FULL_BPS = 8 * PAYLOAD / (5 / 3)
"""At this bandwidth one exchange lasts 5/3 inner steps."""


def matchings(rounds: int, n: int, seed: int = 0) -> np.ndarray:
    """Each worker's partner in uniformly random perfect matchings, `[rounds, n]`."""
    order = np.argsort(np.random.default_rng(seed).random((rounds, n)), axis=1)
    partners = np.empty((rounds, n), int)
    np.put_along_axis(partners, order[:, 0::2], order[:, 1::2], 1)
    np.put_along_axis(partners, order[:, 1::2], order[:, 0::2], 1)
    return partners


def means(rounds: int, n: int, payload: int, steps: int, members: range | None = None) -> Trace:
    """A run whose members average through chunk owners after each round."""
    group = members or range(n)

    def operations(i: int) -> tuple[Operation, ...]:
        moved = tuple((j, 2 * payload // len(group)) for j in group if j != i)
        return (Operation("mean", 0, moved, moved),) if i in group else ()

    return from_entries(Entry(r, i, steps, 0.0, operations(i)) for r in range(rounds) for i in range(n))


@st.composite
def runs(draw: st.DrawFn, kinds: tuple[str, ...] = ("exchange", "mean")) -> Trace:
    """Small runs in which anybody may send anything to anybody."""
    n, rounds = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    entries = []
    for r in range(rounds):
        edges = draw(
            st.dictionaries(
                st.tuples(st.sampled_from(kinds), st.integers(0, 1), st.integers(0, n - 1), st.integers(0, n - 1)),
                st.integers(0, 10**6),
                max_size=8,
            )
        )
        for i in range(n):
            operations = tuple(
                Operation(
                    kind,  # pyright: ignore[reportArgumentType]
                    fragment,
                    tuple((t, b) for (k, f, s, t), b in edges.items() if (k, f, s) == (kind, fragment, i) and t != i),
                    tuple((s, b) for (k, f, s, t), b in edges.items() if (k, f, t) == (kind, fragment, i) and s != i),
                )
                for kind in kinds
                for fragment in (0, 1)
            )
            entries.append(Entry(r, i, draw(st.integers(0, 40)), draw(st.floats(0, 10)), operations))
    return from_entries(entries)


@st.composite
def networks(draw: st.DrawFn, n: int) -> Network:
    def option(values: st.SearchStrategy[float]) -> float | tuple[float, ...]:
        return draw(st.one_of(values, st.lists(values, min_size=n, max_size=n).map(tuple)))

    rates, seconds = st.floats(1e3, 1e9), st.floats(0, 5)
    return Network(
        uplink_bps=option(rates),
        downlink_bps=option(rates),
        latency_s=option(seconds),
        step_s=draw(st.none() | seconds) if draw(st.booleans()) else option(seconds),
    )


def per_worker(option: float | tuple[float, ...], n: int) -> list[float]:
    return list(option) if isinstance(option, tuple) else [option] * n


def exchange_by_hand(trace: Trace, network: Network) -> list[list[float]]:
    """The end of each round and worker, one message after the other, for traces of exchanges."""
    n, m = trace.workers, trace.messages
    up, down = per_worker(network.uplink_bps, n), per_worker(network.downlink_bps, n)
    latency = per_worker(network.latency_s, n)
    clock, ends = [0.0] * n, []
    for r in range(trace.rounds):
        for i in range(n):
            step_s = None if network.step_s is None else per_worker(network.step_s, n)[i]
            clock[i] += trace.compute_s[r, i] if step_s is None else int(trace.steps[r, i]) * step_s
        streams: dict[tuple[int, int], int] = {}
        for k in np.flatnonzero(m.round == r):
            pair = int(m.source[k]), int(m.target[k])
            streams[pair] = streams.get(pair, 0) + int(m.bytes[k])
        end = list(clock)
        for (j, i), size in streams.items():
            out, into = sum(a == j for a, _ in streams), sum(b == i for _, b in streams)
            arrival = clock[j] + max(latency[j], latency[i]) + 8 * size / min(up[j] / out, down[i] / into)
            end[i], end[j] = max(end[i], arrival), max(end[j], arrival)
        ends.append(end)
        clock = list(end)
    return ends


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_exchanges_cost_what_the_model_says_message_by_message(data: st.DataObject) -> None:
    trace = data.draw(runs(kinds=("exchange",)))
    network = data.draw(networks(trace.workers))
    np.testing.assert_allclose(price(trace, network).end_s, exchange_by_hand(trace, network), rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(data: st.DataObject, factor: float) -> None:
    trace = data.draw(runs())
    network = data.draw(networks(trace.workers))
    name, worker = (
        data.draw(st.sampled_from(("uplink_bps", "downlink_bps"))),
        data.draw(st.integers(0, trace.workers - 1)),
    )
    options = {key: getattr(network, key) for key in ("uplink_bps", "downlink_bps", "latency_s", "step_s")}
    rates = per_worker(options[name], trace.workers)
    rates[worker] *= factor
    faster = price(trace, Network(**{**options, name: tuple(rates)}))
    assert (faster.end_s <= price(trace, network).end_s).all()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_compute_and_exposed_communication_add_up_to_the_wall_clock(data: st.DataObject) -> None:
    trace = data.draw(runs())
    timeline = price(trace, data.draw(networks(trace.workers)))
    assert (timeline.communication_s >= 0).all()
    idle = timeline.communication_s == 0
    assert (timeline.waits_on == np.arange(trace.workers))[idle].all(), "who did not wait waited for nobody"
    spent = (timeline.compute_s + timeline.communication_s).cumsum(axis=0)
    np.testing.assert_allclose(spent, timeline.end_s, rtol=1e-9, atol=1e-9)
    assert ((timeline.utilisation >= 0) & (timeline.utilisation <= 1 + 1e-9)).all()


def test_infinite_bandwidth_without_latency_costs_compute_only() -> None:
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, step_s=2.0)
    for trace in (from_targets(matchings(5, N), PAYLOAD, steps=30), means(5, N, PAYLOAD, steps=30)):
        timeline = price(trace, network)
        assert timeline.total_s == 5 * 60
        assert timeline.mean_utilisation == 1
        assert (timeline.communication_s == 0).all()
        assert (timeline.waits_on == np.arange(N)).all()


SLOW_UPLINK = Network(uplink_bps=(FULL_BPS / 10, *[FULL_BPS] * (N - 1)), downlink_bps=FULL_BPS, step_s=STEP_S)
SLOW_BOTH = Network(uplink_bps=SLOW_UPLINK.uplink_bps, downlink_bps=SLOW_UPLINK.uplink_bps, step_s=STEP_S)
STRAGGLER_STEPS = [15] + [30] * (N - 1)


def test_half_the_steps_hide_an_uplink_of_a_tenth_in_one_peer_gossip() -> None:
    timeline = price(from_targets(matchings(1, N), PAYLOAD, STRAGGLER_STEPS), SLOW_UPLINK)
    np.testing.assert_allclose(timeline.end_s, 30 + 5 / 3, rtol=1e-12)


def test_a_slow_downlink_holds_the_pair_and_spreads_to_half_the_run() -> None:
    one = price(from_targets(matchings(1, N), PAYLOAD, STRAGGLER_STEPS), SLOW_BOTH)
    assert one.total_s == pytest.approx(30 + 10 * 5 / 3)
    assert sorted(one.end_s[0])[:6] == pytest.approx([30 + 5 / 3] * 6)
    many = price(from_targets(matchings(5000, N), PAYLOAD, STRAGGLER_STEPS), SLOW_BOTH)
    assert many.total_s / 5000 == pytest.approx(37.8, abs=0.2)


def test_diloco_waits_for_the_slowest_link_of_all() -> None:
    timeline = price(means(1, N, PAYLOAD, steps=30), SLOW_UPLINK)
    np.testing.assert_allclose(timeline.end_s, 30 + 2 * 7 / 8 * 5 / 3 * 10, rtol=1e-12)
    assert (timeline.waits_on == 0).all()
    assert timeline.mean_utilisation == pytest.approx(30 / 59.1667, rel=1e-4)


def test_a_mean_pays_two_latencies_and_an_exchange_one() -> None:
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=(0.5, *[0.1] * (N - 1)), step_s=0)
    assert price(means(1, N, PAYLOAD, steps=1), network).total_s == 1.0
    pair = price(from_targets(np.array([[1, 0, 3, 2, 5, 4, 7, 6]]), PAYLOAD, steps=1), network)
    assert pair.end_s.tolist() == [[0.5, 0.5, *[0.1] * 6]]


def test_a_mean_does_not_hold_those_who_are_not_part_of_it() -> None:
    trace = means(1, 4, 3000, steps=30, members=range(1, 4))
    timeline = price(trace, Network(uplink_bps=8e3, downlink_bps=8e3, step_s=1))
    assert timeline.end_s.tolist() == [[30, 34, 34, 34]]


def test_two_peers_share_a_direction_evenly() -> None:
    ring = np.array([[[2, 1], [0, 2], [1, 0]]])
    network = Network(uplink_bps=FULL_BPS, downlink_bps=math.inf, step_s=0)
    assert price(from_targets(ring, PAYLOAD, steps=1), network).total_s == pytest.approx(2 * 5 / 3)


def test_fragments_for_one_peer_cost_what_they_cost_together() -> None:
    def run(*sizes: int) -> Timeline:
        def operations(peer: int) -> tuple[Operation, ...]:
            return tuple(Operation("exchange", f, ((peer, b),), ((peer, b),)) for f, b in enumerate(sizes))

        entries = [Entry(0, 0, 1, 0.0, operations(1)), Entry(0, 1, 1, 0.0, operations(0))]
        return price(from_entries(entries), Network(uplink_bps=8e3, downlink_bps=8e3, latency_s=1.0))

    assert run(100, 900).total_s == run(1000).total_s == 2.0


def test_a_round_with_both_kinds_exchanges_first() -> None:
    def operations(peer: int) -> tuple[Operation, ...]:
        return tuple(Operation(kind, 0, ((peer, 1000),), ((peer, 1000),)) for kind in ("mean", "exchange"))

    entries = [Entry(0, 0, 1, 1.0, operations(1)), Entry(0, 1, 1, 3.0, operations(0))]
    assert price(from_entries(entries), Network(uplink_bps=8e3, downlink_bps=8e3)).end_s.tolist() == [[5.0, 5.0]]


def test_the_wait_is_put_down_to_who_was_late_or_to_the_slower_link() -> None:
    pair = np.array([[1, 0]])
    late = price(from_targets(pair, 1000, steps=[1, 100]), Network(uplink_bps=8e3, downlink_bps=8e3, step_s=1))
    assert late.waits_on.tolist() == [[1, 1]]
    thin = Network(uplink_bps=(8.0, 8e3), downlink_bps=8e3, step_s=1)
    assert price(from_targets(pair, 1000, steps=1), thin).waits_on.tolist() == [[0, 0]]
    alone = price(from_targets(np.array([[0, 1]]), 1000, steps=[1, 100]), thin)
    assert alone.waits_on.tolist() == [[0, 1]]
    mean = means(1, 3, 3000, steps=1)
    held = price(
        mean._replace(compute_s=np.array([[0.0, 0.0, 90.0]])), Network(uplink_bps=8e3, downlink_bps=(8e2, 8e3, 8e3))
    )
    assert held.end_s.tolist() == [[130.0] * 3]
    assert held.waits_on.tolist() == [[2, 2, 0]], "the last one itself waits for the thinnest link"


def test_measured_seconds_count_where_the_network_gives_no_step_time() -> None:
    trace = from_targets(np.array([[0, 1], [0, 1]]), 10, steps=30, compute_s=[[1.0, 2.0], [3.0, 4.0]])
    assert price(trace, Network(uplink_bps=1e3, downlink_bps=1e3)).end_s.tolist() == [[1, 2], [4, 6]]
    assert price(trace, Network(uplink_bps=1e3, downlink_bps=1e3, step_s=(1, 0.5))).end_s.tolist() == [
        [30, 15],
        [60, 30],
    ]


def test_a_run_without_rounds_takes_no_time() -> None:
    timeline = price(from_targets(np.empty((0, 3), int), 10, steps=1), Network(uplink_bps=1e3, downlink_bps=1e3))
    assert timeline.total_s == 0
    assert timeline.mean_utilisation == 1


@settings(max_examples=50, deadline=None)
@given(networks(3))
def test_a_network_comes_back_from_its_toml(network: Network) -> None:
    assert from_toml(to_toml(network)) == network


def test_an_infinite_link_comes_back_from_its_toml() -> None:
    network = Network(uplink_bps=math.inf, downlink_bps=(1e9, math.inf))
    assert from_toml(to_toml(network)) == network


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("uplink_bps = 1e9", "'downlink_bps' is needed"),
        ("uplink_bps = 1e9\ndownlink_bps = 0", "downlink_bps is 0"),
        ("uplink_bps = nan\ndownlink_bps = 1e9", "uplink_bps is nan"),
        ("uplink_bps = true\ndownlink_bps = 1e9", "uplink_bps is True"),
        ("uplink_bps = [1e9, -1.0]\ndownlink_bps = 1e9", "uplink_bps is -1.0"),
        ("uplink_bps = '1 Gbit'\ndownlink_bps = 1e9", "uplink_bps is '1 Gbit'"),
        ("uplink_bps = 1" + "0" * 400 + "\ndownlink_bps = 1e9", "uplink_bps is 1000"),
        ("uplink_bps = 1e9\ndownlink_bps = 1e9\nlatency_s = -0.1", "latency_s is -0.1"),
        ("uplink_bps = 1e9\ndownlink_bps = 1e9\nstep_s = inf", "step_s is inf"),
        ("uplink_bps = 1e9\ndownlink_bps = 1e9\nlatency = 0.1", "did you mean 'latency_s'"),
        ("uplink_bps =", "not TOML"),
    ],
)
def test_a_network_that_cannot_be_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_toml(text)


def test_a_network_of_other_workers_is_refused() -> None:
    network = Network(uplink_bps=(1e9, 1e9), downlink_bps=1e9)
    with pytest.raises(ConfigError, match="uplink_bps lists 2 workers but the run has 3"):
        price(from_targets(np.array([[0, 1, 2]]), 10, steps=1), network)


def test_a_network_file_is_read_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wan.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e9\nlatency_s = 0.05\n")
    assert read_network(tmp_path / "wan.toml") == Network(uplink_bps=1e8, downlink_bps=1e9, latency_s=0.05)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_network(tmp_path / "lan.toml")
