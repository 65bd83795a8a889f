"""Prices: the model written out message by message, published settings by hand, and what must hold on every network."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.clock.durations import Durations
from gossamer.errors import ConfigError
from gossamer.network import fluid, pricing
from gossamer.network.fluid import FairRates, ends_at_once, max_min_rates, rates_of_few
from gossamer.network.links import Change, Network, Route, Site, jitter_factors, tcp_bps
from gossamer.network.pricing import price, price_everyone, price_together
from gossamer.network.store_time import StoreLink
from gossamer.network.timeline import Timeline, legs_of
from gossamer.record.logs.trace import (
    KINDS,
    Entry,
    Kind,
    Operation,
    Trace,
    from_entries,
    from_targets,
    share_in_mean,
)

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


def test_a_round_in_a_store_takes_its_requests_pauses_and_bytes_one_after_the_other() -> None:
    """Worker 1 is slow, so worker 0 closes the round, half a pause after the message of worker 1 is there."""
    network = Network(uplink_bps=(8e6, 4e6), downlink_bps=8e6, step_s=(1.0, 11.0), store=StoreLink(latency_s=0.1))
    there_0, there_1 = 1 + 0.1 + 1, 11 + 0.1 + 2
    closed = there_1 + (there_1 - there_0) / 8 + 0.1 + (0.1 + 1) + (0.1 + 1) + 0.1
    ends = closed + 0.1 + (0.1 + 1), closed + 0.25 + 0.1 + 0.1 + (0.1 + 1)
    ends = ends[0], ends[1] + max(0.0, (closed - there_1) / 8 - 0.25)
    timeline = price(means(1, 2, 1_000_000, 1), network)
    assert timeline.end_s[0].tolist() == pytest.approx(ends)
    assert timeline.waits_on.tolist() == [[1, 1]]
    assert timeline.communication_s[0].tolist() == pytest.approx([ends[0] - 1, ends[1] - 11])
    swap = from_targets(np.array([[1, 0]]), 1_000_000, steps=1)
    assert price(swap, network).end_s[0, 0] == pytest.approx(ends[0] - 1.1), (
        "no mean is written, and one message is read"
    )
    assert price_together([swap], network)[0].end_s.tolist() == price(swap, network).end_s.tolist()
    large = price(means(1, 40, 1_000_000, 1), replace(network, uplink_bps=4e6, step_s=1.0)).end_s
    assert large.max() > 39 * 1.1, "the closer reads one message after the other"
    several = means(1, 2, 1_000_000, 1)
    several = several._replace(messages=several.messages._replace(fragment=np.array([0, 1])))
    for wrong, sentence in (
        (lambda: price(several, network), "exchanges more than once a round"),
        (lambda: price_everyone(np.array([[1, 1]]), 1000, network, kind="mean"), "does not know; remove [store]"),
        (lambda: Durations(network, 2), "virtual time does not know"),
        (lambda: replace(network, mean="ring"), "has a [store] and mean"),
    ):
        with pytest.raises(ConfigError) as refused:
            wrong()
        assert sentence in str(refused.value)


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
def networks(draw: st.DrawFn, n: int, loses: bool = True) -> Network:
    def option(values: st.SearchStrategy[float]) -> float | tuple[float, ...]:
        return draw(st.one_of(values, st.lists(values, min_size=n, max_size=n).map(tuple)))

    rates, seconds = st.floats(1e3, 1e9), st.floats(0, 5)
    return Network(
        uplink_bps=option(rates),
        downlink_bps=option(rates),
        latency_s=option(seconds),
        loss=option(st.sampled_from((0.0, 1e-4, 0.02, 0.5))) if loses and draw(st.booleans()) else 0.0,
        step_s=draw(st.none() | seconds) if draw(st.booleans()) else option(seconds),
        duplex=draw(st.sampled_from(("full", "half"))),
        mean=draw(st.sampled_from(("owners", "ring", "tree"))),
    )


def per_worker(option: float | tuple[float, ...], n: int) -> list[float]:
    return list(option) if isinstance(option, tuple) else [option] * n


def rates_by_hand(uses: list[list[tuple[int, float]]]) -> list[float]:
    """Bits per second of streams, each with its links and seconds per bit: all grow alike until a link of theirs is full."""
    rates, growing, room = (
        [0.0] * len(uses),
        set(range(len(uses))),
        dict.fromkeys({link for own in uses for link, _ in own}, 1.0),
    )
    while growing:
        load = {link: sum(s for k in growing for at, s in uses[k] if at == link) for link in room}
        rise = min((room[link] / load[link] for link in room if load[link]), default=math.inf)
        full = {link for link in room if load[link] and room[link] / load[link] <= rise * (1 + 1e-12)}
        for k in growing:
            rates[k] += rise
        for link in room:
            room[link] -= rise * load[link] if load[link] else 0.0
        growing -= {k for k in growing if rise == math.inf or any(at in full and s for at, s in uses[k])}
    return rates


def ends_by_hand(leaves: list[float], bits: list[float], uses: list[list[tuple[int, float]]]) -> list[float]:
    """When the last bit of each stream is through."""
    left, ends, now = list(bits), [math.inf] * len(bits), min(leaves, default=0.0)
    while math.inf in ends:
        active = [k for k in range(len(bits)) if leaves[k] <= now and ends[k] == math.inf]
        rates = rates_by_hand([uses[k] for k in active])
        over = [now + (left[k] / rate if left[k] else 0.0) for k, rate in zip(active, rates, strict=True)]
        until = min([*over, *(at for at in leaves if at > now)])
        for k, rate, end in zip(active, rates, over, strict=True):
            left[k] -= rate * (until - now) if until > now else 0.0
            if end <= until * (1 + 1e-12):
                ends[k] = until
        now = until
    return ends


def alone_by_hand(network: Network, n: int, j: int, i: int) -> float:
    """Bits per second of a message with nobody else on its way, on links without an end."""
    latency, loss = per_worker(network.latency_s, n), per_worker(network.loss, n)
    return float(tcp_bps(np.array(2 * max(latency[j], latency[i])), np.array(1 - (1 - loss[j]) * (1 - loss[i]))))


def exchange_by_hand(trace: Trace, network: Network) -> list[list[float]]:
    """The end of each round and worker, one message after the other, for traces of exchanges."""
    n, m = trace.workers, trace.messages
    up, down = per_worker(network.uplink_bps, n), per_worker(network.downlink_bps, n)
    latency = per_worker(network.latency_s, n)
    clock, ends = [0.0] * n, []
    for r in range(trace.rounds):
        start = list(clock)
        for i in range(n):
            step_s = None if network.step_s is None else per_worker(network.step_s, n)[i]
            clock[i] += trace.compute_s[r, i] if step_s is None else int(trace.steps[r, i]) * step_s
        streams: dict[tuple[int, int], int] = {}
        for k in np.flatnonzero(m.round == r):
            pair = int(m.source[k]), int(m.target[k])
            streams[pair] = streams.get(pair, 0) + int(m.bytes[k])
        into = 0 if network.duplex == "half" else n
        over = ends_by_hand(
            [max(clock[j], start[i]) for j, i in streams],
            [8.0 * size for size in streams.values()],
            [
                [(j, 1 / up[j]), (into + i, 1 / down[i]), (2 * n + k, 1 / alone_by_hand(network, n, j, i))]
                for k, (j, i) in enumerate(streams)
            ],
        )
        end = list(clock)
        for (j, i), left_s in zip(streams, over, strict=True):
            arrival = left_s + max(latency[j], latency[i])
            end[i], end[j] = max(end[i], arrival), max(end[j], arrival)
        ends.append(end)
        clock = list(end)
    return ends


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_exchanges_cost_what_the_model_says_message_by_message(data: st.DataObject) -> None:
    trace = data.draw(runs(kinds=("exchange",)))
    network = data.draw(networks(trace.workers))
    np.testing.assert_allclose(price(trace, network).end_s, exchange_by_hand(trace, network), rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.floats(1, 100))
def test_more_bandwidth_is_never_slower_while_no_two_messages_share_a_direction(
    data: st.DataObject, factor: float
) -> None:
    n, rounds = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    network = replace(data.draw(networks(n)), duplex="full", mean=data.draw(st.sampled_from(("ring", "tree"))))
    targets = np.array([data.draw(st.permutations(range(n))) for _ in range(rounds)])
    compute_s = [[data.draw(st.floats(0, 10)) for _ in range(n)] for _ in range(rounds)]
    trace = from_targets(targets, 10**5, steps=3, compute_s=compute_s, kind=data.draw(st.sampled_from(KINDS)))
    name, worker = (
        data.draw(st.sampled_from(("uplink_bps", "downlink_bps"))),
        data.draw(st.integers(0, trace.workers - 1)),
    )
    rates = per_worker(getattr(network, name), trace.workers)
    rates[worker] *= factor
    faster = price(trace, replace(network, **{name: tuple(rates)}))
    assert (faster.end_s <= price(trace, network).end_s).all()


def test_where_two_messages_share_a_direction_more_bandwidth_for_one_may_be_less_for_the_other() -> None:
    # into 2 fit 8 kbit/s: with 2 kbit/s of its own the first leaves 6 to the second, with 8 it takes its half
    trace = from_targets(np.array([[2, 2, 2]]), 1000, steps=0)
    for uplink_bps, ends in ((2e3, [4, 4 / 3, 4]), (8e3, [2, 2, 2])):
        network = Network(uplink_bps=(uplink_bps, 8e3, 8e3), downlink_bps=8e3)
        np.testing.assert_allclose(price(trace, network).end_s, [ends])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_round_never_takes_longer_than_if_its_messages_shared_their_links_evenly_all_the_time(
    data: st.DataObject,
) -> None:
    trace = data.draw(runs(kinds=(data.draw(st.sampled_from(KINDS)),)))
    first = trace.messages.span(0, int(np.searchsorted(trace.messages.round, 1)))
    trace = Trace(trace.steps[:1], trace.compute_s[:1], first)
    network = data.draw(networks(trace.workers))
    fair = price(trace, network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "_MOST_REPLAYED", -1)
        even = price(trace, network)
    assert (fair.end_s <= even.end_s * (1 + 1e-9)).all()


@settings(max_examples=30, deadline=None)
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


def test_a_mean_does_not_delay_workers_outside_it() -> None:
    trace = means(1, 4, 3000, steps=30, members=range(1, 4))
    timeline = price(trace, Network(uplink_bps=8e3, downlink_bps=8e3, step_s=1))
    assert timeline.end_s.tolist() == [[30, 34, 34, 34]]


def test_two_peers_share_a_direction_evenly() -> None:
    ring = np.array([[[2, 1], [0, 2], [1, 0]]])
    network = Network(uplink_bps=FULL_BPS, downlink_bps=math.inf, step_s=0)
    assert price(from_targets(ring, PAYLOAD, steps=1), network).total_s == pytest.approx(2 * 5 / 3)


def test_peers_that_come_one_after_the_other_each_have_a_slow_link_to_themselves() -> None:
    # an exchange at full bandwidth takes 5/3 s, and 50/3 s into worker 0. That of 1 leaves at once and has gone when that of
    # 2 leaves at 30 s; sharing evenly all the time would take 30 + 100/3 s. What 2 sends to 1 has the other nine tenths.
    everyone = np.array([[[1, 2], [0, 2], [0, 1]]])
    network = Network(uplink_bps=FULL_BPS, downlink_bps=(FULL_BPS / 10, FULL_BPS, FULL_BPS), step_s=STEP_S)
    timeline = price(from_targets(everyone, PAYLOAD, [0, 0, 30]), network)
    np.testing.assert_allclose(timeline.end_s, [[30 + 50 / 3, 30 + 5 / 3 / 0.9, 30 + 50 / 3]])


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


def test_the_wait_is_attributed_to_the_late_worker_or_to_the_slower_link() -> None:
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
    # 0 has the share of 1 at 10 s. From 90 s on it reads three more chunks through its thin link, 10 s each: the share of 2,
    # and two sums. That of 1 leaves when the share of 2 is there: at 8000 - 800 bit/s for 10/9 s
    np.testing.assert_allclose(held.end_s, [[120.0, 90 + 10 / 9 + 20, 120.0]])
    assert held.waits_on.tolist() == [[2, 2, 0]], "the last one itself waits for the thinnest link"


def test_a_late_worker_delays_only_exchanges_that_need_it() -> None:
    # three workers, chunks of 1000 bytes: all of 0's shares have left at 2 s, 0's sum waits for the shares of 2
    mean = means(1, 3, 3000, steps=1)._replace(compute_s=np.array([[0.0, 0.0, 1.0]]))
    thin = Network(uplink_bps=(8e3, 8e6, 8e6), downlink_bps=8e6)
    assert price(mean, thin).total_s == pytest.approx(2 + 2)
    late = mean._replace(compute_s=np.array([[0.0, 0.0, 3.0]]))
    assert price(late, thin).total_s == pytest.approx(3 + 2, abs=0.01)


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


def test_a_network_of_other_workers_is_refused() -> None:
    network = Network(uplink_bps=(1e9, 1e9), downlink_bps=1e9)
    with pytest.raises(ConfigError, match="uplink_bps lists 2 workers but the run has 3"):
        price(from_targets(np.array([[0, 1, 2]]), 10, steps=1), network)


# --- how a mean is carried ------------------------------------------------------------------------------------------


def test_a_ring_takes_as_many_legs_as_it_has_links_twice_but_two() -> None:
    n, chunk_s = 8, 8 * PAYLOAD / 8 / FULL_BPS
    network = Network(uplink_bps=FULL_BPS, downlink_bps=FULL_BPS, latency_s=0.1, step_s=1, mean="ring")
    assert price(means(1, n, PAYLOAD, steps=30), network).total_s == pytest.approx(30 + 14 * (0.1 + chunk_s))


def test_a_tree_takes_two_whole_payloads_for_each_doubling_and_a_slow_leaf_holds_one_of_them() -> None:
    whole_s = 8 * PAYLOAD / FULL_BPS
    network = Network(uplink_bps=FULL_BPS, downlink_bps=FULL_BPS, latency_s=0.1, step_s=1, mean="tree")
    for n, doublings in ((2, 1), (3, 2), (5, 3), (8, 3)):
        timeline = price(means(1, n, 120_000, steps=30), network)
        assert timeline.total_s == pytest.approx(30 + 2 * doublings * (0.1 + 0.12 * whole_s))
    leaf = replace(network, uplink_bps=(FULL_BPS,) * 7 + (FULL_BPS / 10,), latency_s=0.0)
    timeline = price(means(1, 8, PAYLOAD, steps=30), leaf)
    assert timeline.total_s == pytest.approx(30 + (10 + 5) * whole_s)
    assert (timeline.waits_on == 7).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.sampled_from(("owners", "ring", "tree")))
def test_every_way_to_carry_a_mean_moves_the_bytes_of_the_trace(
    n: int, mean: Literal["owners", "ring", "tree"]
) -> None:
    trace = means(1, n, 2520 * n, steps=1)
    moved = sum(leg.times * leg.bytes.sum() for leg in legs_of(mean, trace.messages))
    assert moved == pytest.approx(trace.sent_bytes.sum())
    assert trace.sent_bytes.sum() == 2 * (n - 1) * 2520 * n


def test_half_duplex_takes_turns() -> None:
    pair = from_targets(np.array([[1, 0]]), 1000, steps=0)
    assert price(pair, Network(uplink_bps=8e3, downlink_bps=8e3, step_s=0, duplex="half")).total_s == 2.0
    one_way = from_targets(np.array([[1, 1]]), 1000, steps=0)
    assert price(one_way, Network(uplink_bps=8e3, downlink_bps=8e3, step_s=0, duplex="half")).total_s == 1.0


# --- sites ----------------------------------------------------------------------------------------------------------

TWO_SITES = {"paris": Site(workers=(0, 1)), "tokyo": Site(workers=(2, 3))}


def test_a_route_adds_its_latency_between_sites_only() -> None:
    network = Network(
        uplink_bps=math.inf,
        downlink_bps=math.inf,
        latency_s=(0.1, 0.2, 0.1, 0.1),
        step_s=0,
        sites=TWO_SITES,
        routes=(Route(between=("tokyo", "paris"), latency_s=1.0),),
    )
    assert price(from_targets(np.array([[1, 0, 3, 2]]), 10, steps=1), network).end_s.tolist() == [[0.2, 0.2, 0.1, 0.1]]
    assert price(from_targets(np.array([[2, 3, 0, 1]]), 10, steps=1), network).end_s.tolist() == [[1.1, 1.2, 1.1, 1.2]]


def test_streams_that_leave_a_site_together_share_its_uplink_and_one_alone_has_it_all() -> None:
    sites = {**TWO_SITES, "paris": Site(workers=(0, 1), uplink_bps=8e3)}
    network = Network(uplink_bps=8e6, downlink_bps=8e6, step_s=0, sites=sites)
    # 0 and 1 send 1000 bytes each into tokyo through one uplink; what comes back is fast
    both = price(from_targets(np.array([[2, 3, 0, 1]]), 1000, steps=1), network)
    np.testing.assert_allclose(both.end_s, [[2.0] * 4])
    one = price(from_targets(np.array([[2, 1, 0, 3]]), 1000, steps=1), network)
    np.testing.assert_allclose(one.end_s, [[1.0, 0.0, 1.0, 0.0]])
    within = price(from_targets(np.array([[1, 0, 3, 2]]), 1000, steps=1), network)
    np.testing.assert_allclose(within.end_s, [[0.001] * 4])


def test_a_later_transfer_takes_half_of_a_shared_link() -> None:
    # 0 sends 2000 bytes from second 0 on, 1 sends 1000 from second 1 on: alone for 1 s, both at half speed until second 3
    sites = {**TWO_SITES, "paris": Site(workers=(0, 1), uplink_bps=8e3)}
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, step_s=(0, 1, 0, 0), sites=sites)
    entries = [
        Entry(0, 0, 1, 0.0, (Operation("exchange", 0, ((2, 2000),), ()),)),
        Entry(0, 1, 1, 0.0, (Operation("exchange", 0, ((3, 500),), ()),)),
        Entry(0, 2, 1, 0.0, (Operation("exchange", 0, (), ((0, 2000),)),)),
        Entry(0, 3, 1, 0.0, (Operation("exchange", 0, (), ((1, 500),)),)),
    ]
    np.testing.assert_allclose(price(from_entries(entries), network).end_s, [[2.5, 2.0, 2.5, 2.0]])


def test_a_route_is_shared_and_its_other_direction_is_not() -> None:
    route = Route(between=("paris", "tokyo"), bandwidth_bps=8e3)
    network = Network(uplink_bps=8e6, downlink_bps=8e6, step_s=0, sites=TWO_SITES, routes=(route,))
    swap = price(from_targets(np.array([[2, 1, 0, 3]]), 1000, steps=1), network)
    np.testing.assert_allclose(swap.end_s, [[1.0, 0.0, 1.0, 0.0]])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 10**6)), min_size=1, max_size=6), st.floats(1e3, 1e6))
def test_a_shared_link_is_busy_until_all_bytes_are_through(
    streams: list[tuple[float, int]], bandwidth_bps: float
) -> None:
    n = len(streams)
    sites = {"here": Site(workers=tuple(range(n)), uplink_bps=bandwidth_bps), "there": Site(workers=(n,))}
    seconds = tuple(start for start, _ in streams)
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, step_s=(*seconds, 0.0), sites=sites)
    entries = [
        Entry(0, i, 1, 0.0, (Operation("exchange", 0, ((n, size),), ()),)) for i, (_, size) in enumerate(streams)
    ]
    got = tuple((i, size) for i, (_, size) in enumerate(streams))
    entries.append(Entry(0, n, 1, 0.0, (Operation("exchange", 0, (), got),)))
    busy_s = 0.0
    for start_s, size in sorted(streams):
        busy_s = max(busy_s, start_s) + 8 * size / bandwidth_bps
    assert price(from_entries(entries), network).total_s == pytest.approx(busy_s)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_max_min_rates_fill_no_link_beyond_its_bandwidth_and_give_each_stream_a_full_one(data: st.DataObject) -> None:
    links, streams = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    bandwidth = np.array(data.draw(st.lists(st.floats(1, 1e9), min_size=links, max_size=links)))
    uses = np.array([data.draw(st.permutations(range(links)))[: min(links, 2)] for _ in range(streams)])
    rates = max_min_rates(uses, 1 / bandwidth[uses], np.ones(links))
    load = np.bincount(uses.ravel(), np.repeat(rates, uses.shape[1]), links) / bandwidth
    assert (load <= 1 + 1e-9).all()
    for stream, own in enumerate(uses):
        # fair: on some full link of its own nobody is faster
        assert any(
            load[k] > 1 - 1e-9 and rates[stream] >= rates[(uses == k).any(axis=1)].max() * (1 - 1e-9) for k in own
        )


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_few_streams_have_the_rates_that_arrays_give_them_to_the_last_bit(data: st.DataObject) -> None:
    links, streams = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    factors = np.array([data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) for _ in range(links)])
    speeds = st.one_of(st.sampled_from([1e6, 3e6, 1e7]), st.floats(1, 1e9))
    used = [data.draw(st.permutations(range(links)))[: data.draw(st.integers(0, links))] for _ in range(streams)]
    few = [[(link, 1 / data.draw(speeds)) for link in own] for own in used]
    uses, seconds_per_bit = np.zeros((streams, links), np.int64), np.zeros((streams, links))
    for row, own in enumerate(few):
        for place, (link, takes) in enumerate(own):
            uses[row, place], seconds_per_bit[row, place] = link, takes
    rates = max_min_rates(uses, seconds_per_bit, factors).tolist()
    assert rates_of_few(few, dict(enumerate(factors.tolist()))) == rates


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streams_that_share_no_link_have_the_rates_that_they_have_alone_to_the_last_bit(data: st.DataObject) -> None:
    links, factors = 8, np.array([data.draw(st.sampled_from([0.1, 0.5, 1.0])) for _ in range(8)])
    rates, speeds = FairRates(links), st.one_of(st.sampled_from([1e6, 3e6]), st.floats(1, 1e9))
    used = [
        data.draw(st.lists(st.integers(0, 7), max_size=3, unique=True)) for _ in range(data.draw(st.integers(1, 20)))
    ]
    ways = [rates.way([(link, data.draw(speeds)) for link in own], data.draw(speeds)) for own in used]
    together = fluid._rates(sorted(ways), factors)  # pyright: ignore[reportPrivateUsage]
    found = rates.of(ways, factors, 0)
    assert [found[way.number] for way in sorted(ways)] == together


def test_rates_are_computed_once_for_streams_that_share_links_whatever_else_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, compute, rates = list[int](), fluid._rates, FairRates(links=2)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(fluid, "_rates", lambda ways, factors: computed.append(len(ways)) or compute(ways, factors))
    near, far = ([rates.way([(link, bandwidth)]) for bandwidth in (1e6, 2e6, 3e6)] for link in (0, 1))
    for one in range(1, 4):
        for other in range(1, 4):
            rates.of([*near[:one], *far[:other]], np.ones(2), 0)
    assert sorted(computed) == [1, 1, 2, 2, 3, 3], "not for each of the nine sets"


# --- links that change, and steps that vary -------------------------------------------------------------------------


def test_a_message_under_way_slows_down_when_its_link_does() -> None:
    pair = from_targets(np.array([[1, 1], [1, 1]]), 1000, steps=1)
    network = Network(
        uplink_bps=8e3,
        downlink_bps=math.inf,
        step_s=0,
        changes=(Change(at_s=2.0, factor=1.0, worker=0), Change(at_s=0.5, factor=0.5, worker=0)),
    )
    # half of the first at full speed and the rest at half: 1.5 s; the second half at half speed until 2 s, then whole
    np.testing.assert_allclose(price(pair, network).end_s, [[1.5, 1.5], [2.75, 2.75]])


def test_a_change_of_a_site_moves_the_link_that_its_workers_share() -> None:
    sites = {**TWO_SITES, "paris": Site(workers=(0, 1), uplink_bps=8e3)}
    network = Network(
        uplink_bps=8e6, downlink_bps=8e6, step_s=0, sites=sites, changes=(Change(at_s=0.0, factor=0.1, site="paris"),)
    )
    assert price(from_targets(np.array([[2, 1, 0, 3]]), 1000, steps=1), network).total_s == pytest.approx(10.0)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_replay_of_the_whole_run_on_links_of_their_own_costs_what_its_rounds_cost(data: st.DataObject) -> None:
    trace = data.draw(runs())
    network = data.draw(networks(trace.workers))
    replayed = price(trace, replace(network, changes=(Change(at_s=0.0, factor=1.0, worker=0),)))
    np.testing.assert_allclose(replayed.end_s, price(trace, network).end_s, rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_replay_ends_and_its_seconds_add_up(data: st.DataObject) -> None:
    trace = data.draw(runs())
    n = trace.workers
    halves = {"a": Site(workers=tuple(range(0, n, 2)), uplink_bps=1e5)}
    if n > 1:
        halves["b"] = Site(workers=tuple(range(1, n, 2)), downlink_bps=2e5)
    network = replace(
        data.draw(networks(n)), sites=halves, changes=(Change(at_s=data.draw(st.floats(0, 9)), factor=0.5, site="a"),)
    )
    overlap = np.full(len(trace.messages.round), data.draw(st.integers(0, 50)))
    trace = trace._replace(messages=trace.messages._replace(overlap_steps=overlap))
    timeline = price(trace, network)
    spent = (timeline.compute_s + timeline.communication_s).cumsum(axis=0)
    np.testing.assert_allclose(spent, timeline.end_s, rtol=1e-9, atol=1e-9)


def test_jitter_has_mean_one_its_own_deviation_and_nothing_to_do_with_the_number_of_workers() -> None:
    for kind in ("lognormal", "uniform"):
        network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=1.0, jitter=0.3, jitter_kind=kind, seed=3)
        factors = jitter_factors(network, 0, 100_000)
        assert factors.mean() == pytest.approx(1, abs=0.01)
        assert factors.std() == pytest.approx(0.3, abs=0.01)
        assert factors.min() > 0
        assert (jitter_factors(network, 0, 10) == factors[:10]).all()
        assert (jitter_factors(network, 1, 10) != factors[:10]).all()
        assert (jitter_factors(replace(network, seed=4), 0, 10) != factors[:10]).all()


def test_jitter_moves_the_seconds_of_the_local_phases() -> None:
    trace = from_targets(np.tile(np.arange(4), (3, 1)), 10, steps=30)
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=2.0, jitter=0.1)
    expected = [60 * jitter_factors(network, r, 4) for r in range(3)]
    np.testing.assert_array_equal(price(trace, network).compute_s, expected)


# --- operations that overlap ----------------------------------------------------------------------------------------


@pytest.fixture(params=["replayed", "by rounds"])
def replayed_or_by_rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap is priced by replaying a run, or a round at once where rounds are large, here all."""
    if request.param == "by rounds":
        monkeypatch.setattr(pricing, "_MOST_REPLAYED", 0)


def overlapped(rounds: int, overlap_steps: int, steps: int = 10, size: int = 1000) -> Trace:
    """Two workers that swap one message a round."""
    trace = from_targets(np.tile([1, 0], (rounds, 1)), size, steps=steps)
    return trace._replace(messages=trace.messages._replace(overlap_steps=np.full(2 * rounds, overlap_steps)))


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_a_transfer_hides_behind_the_steps_that_it_overlaps_with() -> None:
    network = Network(uplink_bps=8e3, downlink_bps=8e3, latency_s=3.0, step_s=1.0)  # 4 s for a message
    waits_at_once = price(overlapped(3, 0), network)
    assert waits_at_once.end_s[:, 0].tolist() == [14, 28, 42]
    hidden = price(overlapped(3, 4), network)
    assert hidden.end_s[:, 0].tolist() == [10, 20, 34], "the last one has nothing to hide behind"
    part = price(overlapped(3, 1), network)
    assert part.end_s[:, 0].tolist() == [10, 23, 40]
    assert part.compute_s[:, 0].tolist() == [10, 10, 10]
    assert part.communication_s[:, 0].tolist() == [0, 3, 7]


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_an_overlap_of_more_than_a_round_is_waited_for_rounds_later() -> None:
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=25.0, step_s=1.0)
    # sent at 10, 20, 30, ... and waited for 15 steps later: the first is due at 25 and comes at 35
    assert price(overlapped(3, 15), network).end_s[:, 0].tolist() == [10, 20, 65]
    assert price(overlapped(2, 15), network).end_s[:, 0].tolist() == [10, 45]


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_a_worker_with_fewer_steps_waits_after_its_share_of_them() -> None:
    # both compute for 10 s a round; a message of 6 s is waited for after 4 of 10 steps, or 2 of 5, which is 4 s for either
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=6.0, step_s=(1.0, 2.0))
    trace = overlapped(2, 4)._replace(steps=np.array([[10, 5], [10, 5]]))
    timeline = price(trace, network)
    assert timeline.end_s.tolist() == [[10, 10], [28, 28]]
    assert timeline.communication_s.tolist() == [[0, 0], [2 + 6, 2 + 6]]
    # 3 of 10 steps are 1.5 of 5, so 1: it waits from 12 s to 16 s and sends at 24 s, the other from 13 s to 16 s and at 23 s
    rounded = price(overlapped(2, 3)._replace(steps=np.array([[10, 5], [10, 5]])), network)
    assert rounded.end_s.tolist() == [[10, 10], [30, 30]]


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_what_is_sent_after_another_exchange_goes_with_the_steps_before_both() -> None:
    # the second entry has no steps of its own; its message of 15 s is waited for after 10 of 10 steps, or 5 of 5
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=15.0, step_s=(1.0, 2.0))
    steps = [[10, 5], [0, 0], [10, 5], [10, 5]]
    late = fragments(steps, 10).messages
    trace = fragments(steps, 10)._replace(messages=late.span(2, 4))
    assert price(trace, network).end_s.tolist() == [[10, 10], [10, 10], [25, 25], [35, 35]]


def fragments(steps: list[list[int]], overlap_steps: int, size: int = 1000, kind: Kind = "exchange") -> Trace:
    """Two workers that swap one fragment after each part of their rounds."""

    def operations(i: int, fragment: int) -> tuple[Operation, ...]:
        moved = ((1 - i, size),)
        return (Operation(kind, fragment, moved, moved, overlap_steps),)

    return from_entries(
        Entry(part, i, own, 0.0, operations(i, part % 3))
        for part, both in enumerate(steps)
        for i, own in enumerate(both)
    )


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_an_overlap_longer_than_the_parts_of_a_round_has_several_fragments_under_way() -> None:
    # parts of 3, 3 and 4 steps; each fragment is waited for 5 steps after it left, and takes 4 s: nothing is exposed but the end
    steps = [[3, 3], [3, 3], [4, 4]] * 2
    hidden = price(fragments(steps, 5), Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=4.0, step_s=1.0))
    assert hidden.end_s[:, 0].tolist() == [3, 6, 10, 13, 16, 24]
    # With 7 s the first is waited for from 8 s to 10 s, so the third part ends at 12 s. The second is due after step 11, at 13 s,
    # when it comes. The third left at 12 s and is due after step 15, at 17 s: a wait of 2 s. The fourth left at 15 s and is due
    # after step 18, at 22 s, when it comes. Those of 20 s and 24 s are due after the end, so the run ends at 31 s.
    late = price(fragments(steps, 5), Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=7.0, step_s=1.0))
    assert late.end_s[:, 0].tolist() == [3, 6, 12, 15, 20, 31]
    assert late.communication_s[:, 0].tolist() == [0, 0, 2, 0, 2, 7]


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_means_overlap_over_parts_and_a_late_worker_delays_both_of_their_halves() -> None:
    # a mean through two owners is two exchanges of 2 s: sent at 3 s, there at 7 s, waited for after 3 steps and so at 6 s
    steps = [[3, 3], [3, 3], [4, 4]]
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=2.0, step_s=1.0)
    assert price(fragments(steps, 3, kind="mean"), network).end_s[:, 0].tolist() == [3, 7, 16]
    # at half the pace the other sends its share at 6 s, so sums leave at 8 s and come at 10 s: the first has waited since 6 s
    uneven = price(fragments(steps, 3, kind="mean"), replace(network, step_s=(1.0, 2.0)))
    assert uneven.end_s[:2].tolist() == [[3, 6], [10, 12]]


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_fragments_under_way_together_share_the_link() -> None:
    # 8 kbit at 2 kbit/s: 4 s alone. Sent at 3, 6 and 9 s: the first is alone until 6, and has 1 s left; shared until 8.
    # The second then has 3 s left, 1 s alone until 9, 2 s shared with the third until 13, when that has 2 s left: 15.
    network = Network(uplink_bps=2e3, downlink_bps=math.inf, step_s=1.0)
    timeline = price(fragments([[3, 3], [3, 3], [3, 3]], 9), network)
    np.testing.assert_allclose(timeline.end_s[:, 0], [3, 6, 15])
    # waited for after 4 steps: at 7 s until 8 s, which moves the third to 10 s; the second is due at 11 s and comes at
    # 8 + 2 + 2·1 = 12 s, while the run has nothing left to do but to wait for the third, which has 3 s left: 15 s
    np.testing.assert_allclose(price(fragments([[3, 3], [3, 3], [3, 3]], 4), network).end_s[:, 0], [3, 6, 15])


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_a_worker_without_steps_in_a_part_waits_before_its_next_one() -> None:
    # the straggler takes its only step in the last part; the others' fragments are under way for 2 s
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=2.0, step_s=(1.0, 10.0))
    timeline = price(fragments([[5, 0], [5, 0], [5, 1]], 3), network)
    # its message leaves at 0 s, the other's at 5 s: it waits until 7 s, sends, waits until 12 s, and then takes its step
    assert timeline.end_s.tolist() == [[5, 0], [10, 7], [24, 24]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 40), st.floats(0, 30), st.data())
def test_rounds_cost_the_same_whole_or_in_parts(
    rounds: int, steps: int, overlap_steps: int, latency_s: float, data: st.DataObject
) -> None:
    network = Network(uplink_bps=8e3, downlink_bps=8e3, latency_s=latency_s, step_s=1.0)
    whole = overlapped(rounds, overlap_steps, steps)
    first = data.draw(st.integers(0, steps - 1))
    parts = whole._replace(
        steps=np.tile([[first] * 2, [steps - first] * 2], (rounds, 1)),
        compute_s=np.zeros((2 * rounds, 2)),
        messages=whole.messages._replace(round=2 * whole.messages.round + 1),
    )
    np.testing.assert_allclose(price(parts, network).end_s[1::2], price(whole, network).end_s, rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(0, 30),
    st.floats(0, 30),
)
def test_where_nothing_is_shared_a_longer_overlap_is_never_slower(
    steps: list[tuple[int, int]], overlap_steps: int, latency_s: float
) -> None:
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=latency_s, step_s=(1.0, 1.5))
    totals = [
        price(fragments([list(both) for both in steps], tau), network).total_s
        for tau in (overlap_steps, overlap_steps + 1)
    ]
    assert totals[1] <= totals[0] * (1 + 1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["exchange", "mean"])
@pytest.mark.parametrize("overlap_steps", [3, 10, 30])
@pytest.mark.parametrize("latency_s", [0.0, 0.3])
def test_rounds_that_overlap_cost_at_once_nearly_what_their_replay_says(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, overlap_steps: int, latency_s: float
) -> None:
    n, rounds, rng = 12, 5, np.random.default_rng(overlap_steps)
    network = Network(
        uplink_bps=tuple(rng.lognormal(np.log(2e7), 0.7, n)),
        downlink_bps=tuple(rng.lognormal(np.log(5e7), 0.7, n)),
        latency_s=tuple(latency_s * rng.random(n)),
        step_s=tuple(rng.lognormal(np.log(0.05), 0.3, n)),
    )
    everyone = np.array([[[j for j in range(n) if j != i] for i in range(n)]] * rounds)
    for size in (1e4, 1e5, 1e6):
        trace = from_targets(everyone, int(20 * size / n), steps=10, kind=kind)
        overlap = np.full(len(trace.messages.round), overlap_steps)
        trace = trace._replace(messages=trace.messages._replace(overlap_steps=overlap))
        replayed = price(trace, network)
        monkeypatch.setattr(pricing, "_MOST_REPLAYED", 0)
        by_rounds = price(trace, network)
        monkeypatch.undo()
        assert 0.95 < by_rounds.total_s / replayed.total_s < 1.1
        assert (by_rounds.communication_s >= 0).all() and set(np.unique(by_rounds.waits_on)) <= {*range(n)}
        np.testing.assert_array_equal(by_rounds.compute_s, replayed.compute_s)
        spent = (by_rounds.compute_s + by_rounds.communication_s).cumsum(axis=0)
        np.testing.assert_allclose(spent, by_rounds.end_s, rtol=1e-9)


def test_latency_keeps_no_link_busy_where_large_rounds_overlap() -> None:
    n, latency_s = 33, (0.3, *[0.001] * 32)  # 1,056 messages a round
    everyone = np.array([[[j for j in range(n) if j != i] for i in range(n)]] * 5)
    trace = from_targets(everyone, 1000, steps=10)
    trace = trace._replace(messages=trace.messages._replace(overlap_steps=np.full(len(trace.messages.round), 20)))
    network = Network(uplink_bps=1e9, downlink_bps=1e9, latency_s=latency_s, step_s=0.01)
    # The first messages leave after 0.1 s, come at 0.4 s and are waited for after 30 steps; so it continues.
    assert price(trace, network).total_s == pytest.approx(1.0013, rel=1e-3)


def test_rounds_of_which_only_some_messages_overlap_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = from_targets(np.array([[[1, 2], [0, 2], [0, 1]]] * 3), 1000, steps=10)
    mixed = trace._replace(messages=trace.messages._replace(overlap_steps=np.where(trace.messages.target == 0, 4, 0)))
    network = Network(uplink_bps=2e3, downlink_bps=math.inf, step_s=(1.0, 0.1, 1.0))
    replayed = price(mixed, network)
    monkeypatch.setattr(pricing, "_MOST_REPLAYED", 0)
    np.testing.assert_array_equal(price(mixed, network).end_s, replayed.end_s)


def test_a_stream_without_bits_ends_although_nothing_is_left_for_it() -> None:
    uses, takes = np.array([[1, 2], [2, 0], [2, 4], [3, 0]]), np.array([[1, 1], [1e-18, 1], [1e-18, 1 / 3], [1, 1.0]])
    ends = ends_at_once(np.zeros(4), np.array([8000.0, 800, 0, 8000]), uses, takes)
    assert ends[2] == 0 and np.isfinite(ends).all()


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_runs_that_are_priced_together_cost_what_each_costs_alone(data: st.DataObject) -> None:
    first = data.draw(runs())
    network = data.draw(networks(first.workers))
    network = network if network.step_s is None else replace(network, jitter=data.draw(st.sampled_from((0.0, 0.3))))
    scaled = [
        first._replace(steps=k * first.steps, messages=first.messages._replace(bytes=k * first.messages.bytes))
        for k in (1, 2, 3)
    ]
    for trace, together in zip(scaled, price_together(scaled, network), strict=True):
        alone = price(trace, network)
        for one, other in zip(together[:4], alone[:4], strict=True):
            assert one.shape == other.shape
        np.testing.assert_allclose(together.end_s, alone.end_s, rtol=1e-9)
        np.testing.assert_allclose(together.compute_s, alone.compute_s, rtol=1e-9)
        assert set(np.unique(together.waits_on)) <= {*range(trace.workers)}
        if network.shares:  # where rates that one run has needed serve the others
            np.testing.assert_array_equal(together.end_s, alone.end_s)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_streams_of_many_groups_at_once_end_when_those_of_each_do(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    use = st.tuples(st.integers(0, 15), st.sampled_from((0.0, 1 / 8, 1 / 3, 1.0)))
    uses = data.draw(
        st.lists(st.lists(use, min_size=2, max_size=2, unique_by=lambda one: one[0]), min_size=count, max_size=count)
    )
    leaves = data.draw(st.lists(st.sampled_from((0.0, 1.0, 2.5, 40.0)), min_size=count, max_size=count))
    bits = data.draw(st.lists(st.sampled_from((0.0, 1.0, 10.0, 100.0)), min_size=count, max_size=count))
    links, takes = (np.array([[one[k] for one in own] for own in uses]) for k in (0, 1))
    found = ends_at_once(np.array(leaves), np.array(bits), links, takes)
    np.testing.assert_allclose(found, ends_by_hand(leaves, bits, uses), rtol=1e-9)


@pytest.mark.usefixtures("replayed_or_by_rounds")
def test_a_round_without_steps_scales_no_overlap() -> None:
    network = Network(uplink_bps=math.inf, downlink_bps=math.inf, latency_s=3.0, step_s=1.0)
    assert price(fragments([[0, 0], [4, 4]], 2), network).end_s[:, 0].tolist() == [0, 8]


def test_what_is_no_trace_or_no_network_is_refused_with_the_function_that_makes_one() -> None:
    network = Network(uplink_bps=1e6, downlink_bps=1e6, step_s=1.0)
    swap = from_targets(np.array([[1, 0]]), payload_bytes=1000, steps=30)
    with pytest.raises(ConfigError, match=r"price got 'runs/a', which is no Trace; make one with gossamer\.read_trace"):
        price("runs/a", network)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"price got 'net\.toml', which is no Network"):
        price(swap, "net.toml")  # type: ignore[arg-type]


@settings(max_examples=30)
@given(data=st.data(), kind=st.sampled_from(KINDS), routed=st.booleans())
def test_what_everyone_sends_everyone_costs_what_its_messages_do_one_by_one(
    data: st.DataObject, kind: Kind, routed: bool
) -> None:
    n = 33  # whose 1,056 messages are too many for a replay
    network = data.draw(networks(n, loses=False))
    if routed:
        sites = {"a": Site(workers=tuple(range(5))), "b": Site(workers=tuple(range(5, n)))}
        network = replace(network, sites=sites, routes=(Route(between=("a", "b"), latency_s=2.0),))
    network = replace(network, step_s=network.step_s or 0.0)
    steps = data.draw(
        st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=1, max_size=3).map(np.array)
    )
    size = data.draw(st.integers(0, 10**6))
    others = np.array([[j for j in range(n) if j != i] for i in range(n)])
    trace = from_targets(np.broadcast_to(others, (len(steps), *others.shape)), size, steps, kind=kind)
    one_by_one, at_once = price(trace, network), price_everyone(steps, size, network, kind=kind)
    np.testing.assert_allclose(at_once.end_s, one_by_one.end_s, rtol=1e-12)
    np.testing.assert_allclose(at_once.communication_s, one_by_one.communication_s, rtol=1e-9, atol=1e-9)


def test_messages_that_share_links_are_not_priced_at_once() -> None:
    shared = Network(uplink_bps=1e6, downlink_bps=1e6, step_s=1.0, changes=(Change(at_s=1.0, factor=0.5, worker=0),))
    for network in (shared, Network(uplink_bps=1e6, downlink_bps=1e6, latency_s=0.1, loss=0.01)):
        with pytest.raises(ConfigError, match="give price a trace"):
            price_everyone(np.ones((1, 2), int), 100, network, kind="mean")


@given(st.floats(1e-4, 10), st.floats(1e-8, 0.5), st.floats(1.01, 10))
def test_tcp_is_slower_the_longer_the_way_and_the_more_is_lost(round_trip_s: float, loss: float, times: float) -> None:
    one = tcp_bps(np.array(round_trip_s), np.array(loss))
    assert tcp_bps(np.array(times * round_trip_s), np.array(loss)) * times == pytest.approx(float(one))
    assert tcp_bps(np.array(round_trip_s), np.array(times * loss)) < one
    assert one <= 8 * 1460 / round_trip_s * math.sqrt(1.5 / loss)  # Mathis et al., which it is for few losses
    rare = float(tcp_bps(np.array(round_trip_s), np.array(1e-9)))
    assert rare == pytest.approx(8 * 1460 / round_trip_s * math.sqrt(1.5 / 1e-9), rel=1e-3)
    assert tcp_bps(np.array(round_trip_s), np.array(0.0)) == math.inf
    assert tcp_bps(np.array(1e-310), np.array(loss)) == math.inf


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_thin_link_is_as_fast_as_tcp_on_it_however_wide_it_is(kind: Kind) -> None:
    swap = from_targets(np.array([[1, 0]]), payload_bytes=10**6, steps=1, kind=kind)
    wide = Network(uplink_bps=1e12, downlink_bps=math.inf, latency_s=0.1, loss=(0.0, 0.01), step_s=1.0)
    reached_bps = float(tcp_bps(np.array(0.2), np.array(0.01)))
    halves = 1 if kind == "exchange" else 2
    expected_s = 1.0 + halves * 0.1 + 8e6 / reached_bps
    assert price(swap, wide).end_s.ravel().tolist() == pytest.approx([expected_s] * 2)


def test_a_lossy_route_bounds_each_message_over_it_and_not_those_within_a_site() -> None:
    sites = {"a": Site(workers=(0, 1)), "b": Site(workers=(2, 3))}
    network = Network(
        uplink_bps=1e9,
        downlink_bps=1e9,
        latency_s=0.01,
        step_s=1.0,
        sites=sites,
        routes=(Route(between=("a", "b"), latency_s=0.04, loss=0.001),),
    )
    within, across = (np.array([targets]) for targets in ([1, 0, 3, 2], [2, 3, 0, 1]))
    reached_bps = float(tcp_bps(np.array(0.1), np.array(0.001)))
    for targets, expected_s in ((within, 1.01 + 8e-3), (across, 1.05 + 8e6 / reached_bps)):
        ends_s = price(from_targets(targets, payload_bytes=10**6, steps=1), network).end_s
        assert ends_s.ravel().tolist() == pytest.approx([expected_s] * 4)


def shares_of_means(draw: st.DrawFn, n: int, rounds: int, steps: st.SearchStrategy[int], seconds: float = 0.0) -> Trace:
    """Means among all or some workers, whose chunks are of two sizes."""
    members = sorted(draw(st.sets(st.integers(0, n - 1), min_size=2))) if draw(st.booleans()) else range(n)
    there, back = ([draw(st.sampled_from([900, 1000])) for _ in members] for _ in range(2))
    return from_entries(
        Entry(
            r,
            i,
            draw(steps),
            seconds * i,
            (Operation("mean", 0, (), (), 0, share_in_mean(members, i, there, back)),) if i in members else (),
        )
        for r in range(rounds)
        for i in range(n)
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_mean_as_one_row_costs_what_its_messages_cost(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 8))
    trace = shares_of_means(data.draw, n, 3, st.integers(0, 40), data.draw(st.sampled_from([0.0, 1.5])))
    network = data.draw(networks(n))
    listed = price(trace.listed(), network)
    np.testing.assert_array_equal(price(trace, network).end_s, listed.end_s)  # few messages are priced one by one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "_MOST_REPLAYED", 0)
        if not network.shares:
            listed = price(trace.listed(), network)
            np.testing.assert_allclose(price(trace, network).end_s, listed.end_s, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_on_shared_links_workers_that_are_alike_stand_for_each_other(data: st.DataObject) -> None:
    groups, draw = data.draw(st.integers(1, 3)), data.draw
    sizes = [draw(st.integers(1, 4)) for _ in range(groups)]
    site = np.repeat(np.arange(groups), sizes)
    n = len(site)
    if n < 2:
        return
    rate = st.sampled_from([1e5, 3e5, 1e6])

    def by_site(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(np.array([draw(values) for _ in range(groups)])[site].tolist())

    names = [f"s{k}" for k in range(groups)]
    network = Network(
        uplink_bps=by_site(rate),
        downlink_bps=by_site(rate),
        latency_s=by_site(st.sampled_from([0.0, 0.1])),
        loss=by_site(st.sampled_from([0.0, 0.01])),
        step_s=by_site(st.sampled_from([1.0, 1.01])),
        duplex=draw(st.sampled_from(["full", "half"])),
        sites={
            name: Site(
                workers=tuple(np.flatnonzero(site == k).tolist()), uplink_bps=draw(rate), downlink_bps=draw(rate)
            )
            for k, name in enumerate(names)
        },
        routes=tuple(
            Route(between=(a, b), latency_s=0.2, bandwidth_bps=draw(rate))
            for k, a in enumerate(names)
            for b in names[k + 1 :]
        ),
        changes=(Change(at_s=1001.0, factor=0.3, worker=n - 1), Change(at_s=1000.5, factor=0.5, site="s0")),
    )
    steps = [1000 * draw(st.integers(1, 2)) for _ in range(groups)]
    there = [draw(st.sampled_from([20_000, 30_000])) for _ in range(groups)]
    own = np.array(there)[site].tolist()
    trace = from_entries(
        Entry(r, i, steps[site[i]], 0.0, (Operation("mean", 0, (), (), 0, share_in_mean(range(n), i, own, own)),))
        for r in range(2)
        for i in range(n)
    )
    listed = price(trace.listed(), network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "_MOST_REPLAYED", 0)
        found = price(trace, network)
        np.testing.assert_allclose(found.end_s, listed.end_s, rtol=1e-9)
        patch.setattr(pricing, "_MOST_KINDS", 1)  # then as many messages as there are
        np.testing.assert_allclose(price(trace, network).end_s, listed.end_s, rtol=1e-9)


def test_a_mean_of_a_thousand_workers_is_priced_where_links_are_shared_and_steps_vary() -> None:
    n, size = 1024, 500
    share = [(Operation("mean", 0, (), (), 0, share_in_mean(range(n), i, [size] * n, [size] * n)),) for i in range(n)]
    trace = from_entries(Entry(r, i, 30, 0.0, share[i]) for r in range(2) for i in range(n))
    sites = {
        name: Site(workers=tuple(range(a, a + 512)), uplink_bps=1e8, downlink_bps=1e8)
        for name, a in (("here", 0), ("there", 512))
    }
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=0.5, sites=sites)
    across_s = 2 * 8 * 512 * 512 * size / 1e8  # each way, all of a site's messages share its link
    np.testing.assert_allclose(price(trace, network).end_s[0], 15 + across_s, rtol=1e-9)
    uneven = price(trace, replace(network, jitter=0.1))
    slowest = uneven.compute_s[0].max()
    assert slowest < uneven.end_s[0].max() < slowest + across_s
