"""The price of a recorded run on a network: `price(trace, network) -> Timeline`, pure and exact.

Worker i starts round t at S_i, which is when its receives are announced, and is ready at `R_i = S_i + H_i·step_s_i`.

* exchange: a message j → i leaves at `max(R_j, S_i)` and arrives after `latency + 8·bytes / rate`. The round of i ends at
  the latest of three times: R_i, the last arrival at i, and the last arrival of a message from i.
* mean, of P bytes over n members. "owners" is what Gossamer does: two exchanges of P/n between every two members, to the
  chunk owners and back. A worker begins its second exchange when its first is over. The others are models of an all-reduce.
  All members start at `max R_i` and proceed together in legs; a leg begins when the one before it has arrived everywhere.
  "ring" has 2(n-1) legs of P/n to the next worker, "tree" 2⌈log2 n⌉ legs of P, pairwise down to one worker and back.

Where packets are lost, a message is never faster than `gossamer.network.links.tcp_bps`.

Messages that use the same direction of a link at the same time share it, max-min fair (`gossamer.network.fluid`): when one
ends, the others speed up. An uncontended message runs at `min(uplink_j, downlink_i)`; k simultaneous ones get 1/k each. Where
such cases decide when everyone ends, a round is priced at once. Otherwise it goes from event to event: an exchange in groups of
messages that share links, anything else in a replay. No worker is in two rounds at a time, so each round can be priced by itself.

A whole run is replayed where sites or routes share links, bandwidths change, or an operation overlaps with the steps after
it, unless its rounds are large. Worker i waits for an overlapping message after `⌊overlap_steps · steps_i / max steps⌋` more
inner steps, across rounds if need be, or at the end of the run.

With a store (`[store]`) all messages go through it, in rounds whose price is a formula (`gossamer.network.store_time`).

While no two messages share a direction, all times are maxima and sums of terms that fall with the bandwidth, so more
bandwidth is never slower. Where messages share, more bandwidth for one may slow down another.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError
from gossamer.network.fluid import ends_at_once
from gossamer.network.links import Floats, Links, Network, PerWorker, links_of, must_be_direct
from gossamer.network.replay import Paths, Replay
from gossamer.network.store_time import store_seconds
from gossamer.network.timeline import (
    Leg,
    Timeline,
    compute_seconds,
    legs_among,
    legs_of,
    no_rounds,
    operations_of,
    overlap_of_each,
    streams_of,
)
from gossamer.record.logs.trace import KINDS, Integers, Kind, Mean, Messages, Trace

_MOST_REPLAYED = 1000
"""Most messages of a single round that is replayed; with more, each event may change the rates of all others."""
_MOST_KINDS = 16
"""Most groups of equal workers in the replay of a large mean."""


def price(trace: Trace, network: Network, computing: PerWorker = 1.0) -> Timeline:
    """When each worker would have finished each round of this trace on this network.

    Args: `computing` is the share of an inner step in which a worker computes. In the rest the stages of a pipeline wait for each
        other, which counts towards the seconds of a local phase, and not towards utilisation.
    Raises: ConfigError when the network describes another number of workers than the trace has, or one of the two is none.
    Cost: O(messages), vectorised over a round: 10 to 20 s for 100,000 workers and 1,000 rounds of single exchanges. A replay
        costs 0.03 to 1 ms per message. Rounds of more than 1,000 messages are not replayed. They are priced as if these shared
        their links evenly all the time, which is never too fast and at most some per cent too slow; so are those of which all
        messages overlap, one operation after the other, which is right within a tenth. A mean that is one row of the trace
        costs O(members), with more than 1,000 messages as well: some 10 ms of a thousand workers. Where links are shared,
        workers that are alike and ready together are replayed as one; otherwise up to eight groups are, which is up to a
        hundredth too slow, in some 20 ms.

    >>> from gossamer.record.logs.trace import from_targets
    >>> swap = from_targets(np.array([[1, 0]]), payload_bytes=1000, steps=30)
    >>> price(swap, Network(uplink_bps=(8000, 800), downlink_bps=8000, step_s=1)).end_s
    array([[40., 40.]])
    """
    for given, kind, how in ((trace, Trace, "gossamer.read_trace(RUN)"), (network, Network, "gossamer.Network(...)")):
        if not isinstance(given, kind):
            raise ConfigError(f"price got {given!r:.60}, which is no {kind.__name__}; make one with {how}")
    return _price(trace, Paths(network, links_of(network, trace.workers)), computing)


def _price(trace: Trace, paths: Paths, computing: PerWorker) -> Timeline:
    network, links = paths.network, paths.links
    share = np.broadcast_to(np.asarray(computing, float), trace.workers)
    if network.store is not None:
        timeline = no_rounds(trace)._replace(computing=share)
        for r in range(trace.rounds):
            timeline.compute_s[r] = compute_seconds(trace, network, links, r)
        ends = store_seconds(trace, links.uplink_bps, links.downlink_bps, network.store.latency_s, timeline.compute_s)
        timeline.end_s[:], timeline.waits_on[:] = ends
        timeline.communication_s[:] = np.diff(timeline.end_s, axis=0, prepend=0) - timeline.compute_s
        return timeline
    trace = trace.listed(lambda mean: mean.pairs <= _MOST_REPLAYED)  # few messages are priced one by one
    overlaps = np.append(trace.messages.overlap_steps, [mean.overlap_steps for mean in trace.means]) > 0
    large = bool(trace.means) or _most_of_a_round(trace) > _MOST_REPLAYED
    of_means = bool(trace.means) and not len(trace.messages.round) and not overlaps.any() and network.mean == "owners"
    if (network.shares and not of_means) or (overlaps.any() and not (overlaps.all() and large)):
        timeline = Replay(trace.listed(), paths).run()
    else:
        timeline = (_overlapping if overlaps.any() else _rounds)(trace, network, links)
    return timeline._replace(computing=share)


def price_together(traces: Sequence[Trace], network: Network, computing: PerWorker = 1.0) -> list[Timeline]:
    """`price` of each of several runs with as many workers and rounds, faster than one by one where they gossip.

    Where two messages share a link, the worker waited for may be the other of the two than in `price`.

    Raises: ConfigError as `price`.
    """
    if not traces:
        return []
    n, count = traces[0].workers, len(traces)
    links = links_of(network, n)
    if network.shares or network.store is not None or not all(map(_is_small_gossip, traces)):
        paths = Paths(network, links)
        return [_price(trace, paths, computing) for trace in traces]
    # One run on as many copies of the network, without messages between them. Seconds are passed in, as jitter is by worker.
    traces = [trace.listed() for trace in traces]  # few messages each
    each = ("uplink_bps", "downlink_bps", "latency_s", "loss", "site")
    seconds = [[compute_seconds(trace, network, links, r) for r in range(trace.rounds)] for trace in traces]
    moved = [
        trace.messages._replace(source=trace.messages.source + k * n, target=trace.messages.target + k * n)
        for k, trace in enumerate(traces)
    ]
    messages = Messages(*map(np.concatenate, zip(*moved, strict=True)))
    order = np.argsort(messages.round, kind="stable")
    everyone = Trace(
        np.hstack([trace.steps for trace in traces]),
        np.hstack([np.reshape(some, (-1, n)) for some in seconds]),
        Messages(*(column[order] for column in messages)),
    )
    copies = links._replace(step_s=None, **{name: np.tile(getattr(links, name), count) for name in each})
    parts = [np.split(one, count, axis=1) for one in _rounds(everyone, network, copies, count)[:4]]
    share = np.broadcast_to(np.asarray(computing, float), n)
    return [
        Timeline(compute_s, communication_s, waits_on - k * n, end_s, share)
        for k, (compute_s, communication_s, waits_on, end_s) in enumerate(zip(*parts, strict=True))
    ]


def _is_small_gossip(trace: Trace) -> bool:
    """Whether a round is some exchanges, without overlap."""
    messages = trace.messages
    return (
        not messages.kind.any() and not trace.means and not trace.overlaps and _most_of_a_round(trace) <= _MOST_REPLAYED
    )


def _most_of_a_round(trace: Trace) -> int:
    """The messages of the round that has most."""
    return int(np.bincount(trace.messages.round).max(initial=0))


# --- separate links: a round at once ---------------------------------------------------------------------------------


def _rounds(trace: Trace, network: Network, links: Links, runs: int = 1) -> Timeline:
    """Rounds without overlap, one after the other, of one run or of several side by side."""
    bounds, timeline, end = trace.bounds, no_rounds(trace), np.zeros(trace.workers)
    means = _means_by_round(trace)
    for r in range(trace.rounds):
        start, seconds = end, compute_seconds(trace, network, links, r)
        ready = start + seconds
        messages = trace.messages.span(bounds[r], bounds[r + 1])
        exact = len(messages.round) <= runs * _MOST_REPLAYED
        end, waits_on, sure = _round(start, ready, messages, links, network, exact)
        if not sure and exact and not messages.kind.any():
            end, waits_on = _exchange_by_events(start, ready, messages, links, network)
        elif not sure and exact:
            end, waits_on = _replayed(start, seconds, messages, Paths(network, links._replace(step_s=None)))
        for mean in means.get(r, ()):
            end, waits_on = _large_mean(start, end, waits_on, mean, links, network)
        timeline.compute_s[r], timeline.communication_s[r] = seconds, end - ready
        timeline.waits_on[r], timeline.end_s[r] = waits_on, end
    return timeline


def _replayed(start: Floats, seconds: Floats, messages: Messages, paths: Paths) -> tuple[Floats, Integers]:
    """When each worker ends a round that is replayed alone, and which worker it waits for."""
    steps = np.ones((1, len(start)), np.int64)
    alone = Trace(steps, seconds[None], messages._replace(round=np.zeros_like(messages.round)))
    replayed = Replay(alone, paths, start).run()
    return replayed.end_s[0], replayed.waits_on[0]


def _round(
    start: Floats, ready: Floats, messages: Messages, links: Links, network: Network, ask: bool
) -> tuple[Floats, Integers, bool]:
    """When each worker ends a round, which worker it waits for, and whether that is exact; if not, it may end earlier.

    Args: `ask` is whether to determine if it is exact, which takes longer than the price of a large round.
    """
    edges = np.searchsorted(messages.kind, np.arange(len(KINDS) + 1))
    # Messages of a mean may share a link with those of an exchange that other workers have not finished.
    end, waits_on, all_sure = ready, np.arange(len(ready)), int(np.count_nonzero(np.diff(edges))) < 2
    for kind, first, last in zip(KINDS, edges[:-1], edges[1:], strict=True):
        if first < last:
            end, waits_on, sure = _CARRY[kind](start, end, waits_on, messages.span(first, last), links, network, ask)
            all_sure = all_sure and sure
    return end, waits_on, all_sure


_Carry = Callable[[Floats, Floats, Integers, Messages, Links, Network, bool], tuple[Floats, Integers, bool]]


def _exchange(
    start: Floats, ready: Floats, waits_on: Integers, messages: Messages, links: Links, network: Network, ask: bool
) -> tuple[Floats, Integers, bool]:
    """An exchange, given when each worker started its round and was ready."""
    source, target, size = streams_of(messages)
    ways = _ways(source, target, links, network)
    return _ended(start, ready, waits_on, source, target, size, ways, links, ask)


def _ended(
    start: Floats,
    ready: Floats,
    waits_on: Integers,
    source: Integers,
    target: Integers,
    size: Integers | Floats,
    ways: "_Ways",
    links: Links,
    ask: bool,
) -> tuple[Floats, Integers, bool]:
    """An exchange of these streams on these ways."""
    leaves = np.maximum(ready[source], start[target])
    takes, sure = _even_shares(ways, leaves, size, ask)
    arrival = leaves + links.message_latency_s(source, target) + takes
    end, waits_on = _arrived(start, ready, waits_on, source, target, leaves, arrival, ways.up_is_slower)
    if not ask:
        return end, waits_on, False
    surely = end if sure.all() else _latest(ready, source[sure], target[sure], arrival[sure])
    return end, waits_on, bool((end == surely).all())


def _arrived(
    start: Floats,
    ready: Floats,
    waits_on: Integers,
    source: Integers,
    target: Integers,
    leaves: Floats,
    arrival: Floats,
    slower_up: NDArray[np.bool_],
) -> tuple[Floats, Integers]:
    """When an exchange ends for each worker, and whom it waits for, given when its messages leave and arrive."""
    end, waits_on = _latest(ready, source, target, arrival), waits_on.copy()
    for worker in (source, target):
        last = np.flatnonzero((arrival == end[worker]) & (arrival > ready[worker]))
        a, b, held, left_s = source[last], target[last], worker[last], leaves[last]
        late = left_s - ready[held] > arrival[last] - left_s
        waits_on[held] = np.where(np.where(late, ready[a] >= start[b], slower_up[last]), a, b)
    return end, waits_on


def _exchange_by_events(
    start: Floats, ready: Floats, messages: Messages, links: Links, network: Network
) -> tuple[Floats, Integers]:
    """An exchange whose messages do not share their links evenly all the time, like `Replay` up to rounding."""
    n, (source, target, size) = len(ready), streams_of(messages)
    up_s, down_s = 1 / links.uplink_bps[source], 1 / links.downlink_bps[target]
    down = target if network.duplex == "half" else n + target
    if network.duplex == "full":
        # A link that cannot be full bounds nothing, and so ties no messages to each other. An uplink must bound what comes
        # through it where a downlink was left out, so uplinks are left out only where all downlinks behind them are in.
        idle = np.bincount(target, links.uplink_bps[source], n) <= links.downlink_bps
        down_s = np.where(idle[target], 0.0, down_s)
        behind = np.bincount(source, np.where(idle[target], math.inf, links.downlink_bps[target]), n)
        up_s = np.where((behind <= links.uplink_bps)[source], 0.0, up_s)
    uses, seconds_per_bit = [source, down], [up_s, down_s]
    if links.loses:
        uses.append(2 * n + np.arange(len(source)))
        seconds_per_bit.append(1 / links.stream_bps(source, target))
    leaves = np.maximum(ready[source], start[target])
    left = ends_at_once(leaves, (8 * size).astype(float), np.stack(uses, axis=1), np.stack(seconds_per_bit, axis=1))
    arrival = left + links.message_latency_s(source, target)
    slower_up = links.uplink_bps[source] <= links.downlink_bps[target]
    return _arrived(start, ready, np.arange(n), source, target, leaves, arrival, slower_up)


def _mean(
    start: Floats, ready: Floats, waits_on: Integers, messages: Messages, links: Links, network: Network, ask: bool
) -> tuple[Floats, Integers, bool]:
    """A mean: two exchanges through chunk owners, or legs, where all members start when the last is ready and end together."""
    if network.mean == "owners":
        half = messages._replace(bytes=messages.bytes / 2)
        there, waits_there, sure_there = _exchange(start, ready, waits_on, half, links, network, ask)
        back, waits_back, sure_back = _exchange(start, there, waits_on, half, links, network, ask)
        return back, np.where(back - there > there - ready, waits_back, waits_there), sure_there and sure_back
    members = np.union1d(messages.source, messages.target)
    return _legs(ready, waits_on, members, legs_of(network.mean, messages), links, network, ask)


def _legs(
    ready: Floats, waits_on: Integers, members: Integers, legs: Iterable[Leg], links: Links, network: Network, ask: bool
) -> tuple[Floats, Integers, bool]:
    """A mean in legs, which begins when the last of its members is ready."""
    last = slowest = members[ready[members].argmax()]
    begins, takes, longest, all_sure = ready[last], 0.0, 0.0, True
    for leg in legs:
        ways = _ways(leg.source, leg.target, links, network)
        seconds, sure = _even_shares(ways, np.zeros(len(leg.source)), leg.bytes, ask)
        seconds += links.message_latency_s(leg.source, leg.target)
        place = seconds.argmax()
        takes += leg.times * seconds[place]
        all_sure = all_sure and bool(sure[place])
        if seconds[place] > longest:
            longest, slowest = seconds[place], (leg.source if ways.up_is_slower[place] else leg.target)[place]

    end, waits_on = ready.copy(), waits_on.copy()
    end[members] = begins + takes
    held = members[begins + takes > ready[members]]
    waits_on[held] = np.where(begins - ready[held] > takes, last, slowest)
    return end, waits_on, all_sure


_CARRY: dict[Kind, _Carry] = {"exchange": _exchange, "mean": _mean}


# --- large rounds that overlap with the steps after them ----------------------------------------------------------------

_NEVER = np.iinfo(np.int64).max


class _InFlight(NamedTuple):
    """An overlapping operation in flight, for each worker."""

    after: Integers
    """Inner steps after which it is awaited; `_NEVER` for workers that have it or take no part."""
    entered_s: Floats
    done_s: Floats
    waits_on: Integers


def _overlapping(trace: Trace, network: Network, links: Links) -> Timeline:
    """A run whose operations all overlap with the steps after them, a round at once.

    The messages of an operation leave once all earlier messages of their two workers are through, so that they share
    links with each other alone.
    """
    n, timeline, finished = trace.workers, no_rounds(trace), trace.steps.cumsum(axis=0)
    at_once = links._replace(latency_s=np.zeros(n), route_latency_s=np.zeros_like(links.route_latency_s))
    operations = _operations(trace, network)
    everybody, end, free, in_flight = np.arange(n), np.zeros(n), np.zeros(n), list[_InFlight]()
    for r in range(trace.rounds):
        start, seconds = end, compute_seconds(trace, network, links, r)
        step_s = np.divide(seconds, trace.steps[r], out=np.zeros(n), where=trace.steps[r] > 0)
        local_end = start + seconds
        end, waits_on = local_end.copy(), everybody.copy()
        for one in in_flight:
            due = np.flatnonzero(one.after <= finished[r])
            came_s = one.done_s[due] + (finished[r] - one.after)[due] * step_s[due]
            late = came_s > end[due]
            end[due[late]], waits_on[due[late]] = came_s[late], one.waits_on[due[late]]
            one.after[due] = _NEVER
        ready = end
        for overlap_steps, members, carry in operations(r):
            entered = np.maximum(start, free), np.maximum(ready, free)
            done_s, blamed = carry(*entered, everybody, links)
            through_s, _ = carry(*entered, everybody, at_once)
            after = np.full(n, _NEVER)
            after[members] = (finished[r] + overlap_of_each(trace, r, overlap_steps))[members]
            free[members] = through_s[members]
            in_flight.append(_InFlight(after, ready, done_s, blamed))
        in_flight = [one for one in in_flight if (one.after < _NEVER).any()]
        if r + 1 == trace.rounds:
            longest_s = end - local_end
            for one in in_flight:
                included, waited_s = one.after < _NEVER, one.done_s - one.entered_s
                waits_on = np.where(included & (waited_s > longest_s), one.waits_on, waits_on)
                longest_s = np.where(included, np.maximum(longest_s, waited_s), longest_s)
                end = np.where(included, np.maximum(end, one.done_s), end)
        timeline.compute_s[r], timeline.communication_s[r] = seconds, np.maximum(0.0, end - start - seconds)
        timeline.waits_on[r], timeline.end_s[r] = waits_on, end
    return timeline


_CarryOne = Callable[[Floats, Floats, Integers, Links], tuple[Floats, Integers]]


def _operations(trace: Trace, network: Network) -> Callable[[int], Iterator[tuple[int, Integers, _CarryOne]]]:
    """The operations of each round: overlapping steps, members, and what carries it."""
    bounds, means = trace.bounds, _means_by_round(trace)

    def of_round(r: int) -> Iterator[tuple[int, Integers, _CarryOne]]:
        for kind, steps, these in operations_of(trace.messages.span(*bounds[r : r + 2])):

            def listed(
                start: Floats, ready: Floats, waits_on: Integers, links: Links, kind: Kind = kind, all: Messages = these
            ) -> tuple[Floats, Integers]:
                return _CARRY[kind](start, ready, waits_on, all, links, network, False)[:2]

            yield steps, np.union1d(these.source, these.target), listed
        for mean in means.get(r, ()):

            def whole(
                start: Floats, ready: Floats, waits_on: Integers, links: Links, mean: Mean = mean
            ) -> tuple[Floats, Integers]:
                return _large_mean(start, ready, waits_on, mean, links, network)

            yield mean.overlap_steps, mean.members, whole

    return of_round


# --- among everyone -------------------------------------------------------------------------------------------------


def price_everyone(
    steps: Integers, message_bytes: int, network: Network, *, kind: Kind, computing: PerWorker = 1.0
) -> Timeline:
    """The price of rounds in which everyone sends everyone one message, without a list of the n² messages.

    It is that of `gossamer.record.logs.trace.from_targets` with all others as targets, up to rounding. A message arrives after
    `max(R_j, S_i) + max(l_j, l_i) + max(u_j, d_i)`, so the last one of a worker is from or to the one of the others for which
    `R`, `l` or `u` (or `S`, `l`, `d`), or a sum of some of them, is largest; no others are looked at.

    Args: `steps` are inner steps, `[rounds, workers]`.
    Raises: ConfigError as `price`, and where links are shared, change or lose packets, which asks for all messages.
    Cost: O(workers) per round and site; a tenth of a second for a mean among 100,000 workers.

    >>> uneven = Network(uplink_bps=(8000, 800), downlink_bps=8000, step_s=1)
    >>> price_everyone(np.array([[30, 30]]), 1000, uneven, kind="exchange").end_s
    array([[40., 40.]])
    """
    must_be_direct(network, "a price without a list of messages")
    if network.shares or network.loses:
        raise ConfigError(
            f"{kind} among all {steps.shape[1]} workers was to be priced at once, but the network has links that are shared, "
            "change or lose packets; give price a trace of it"
        )
    rounds, n = steps.shape
    links, everybody, sizes = links_of(network, n), np.arange(n), np.full(n, message_bytes)
    none = Messages(*(np.empty(0, np.int64) for _ in Messages._fields))
    trace = Trace(steps, np.zeros(steps.shape), none)
    timeline = no_rounds(trace)._replace(computing=np.broadcast_to(np.asarray(computing, float), n))
    end = np.zeros(n)
    for r in range(rounds):
        start, seconds = end, compute_seconds(trace, network, links, r)
        end, waits_on = ready, _ = start + seconds, everybody
        if n > 1 and kind == "exchange":
            end, waits_on = _exchange_of_everyone(start, ready, sizes, 0 * sizes, links, network)
        elif n > 1:
            mean = Mean(r, 0, 0, everybody, sizes, 0 * sizes)
            end, waits_on = _large_mean(start, ready, everybody, mean, links, network)
        timeline.compute_s[r], timeline.communication_s[r] = seconds, end - ready
        timeline.waits_on[r], timeline.end_s[r] = waits_on, end
    return timeline


def _means_by_round(trace: Trace) -> dict[int, list[Mean]]:
    """The means of each round; fragments that are awaited together count as one."""
    means: dict[int, list[Mean]] = {}
    for mean in trace.means:
        of_round = means.setdefault(mean.round, [])
        for place, other in enumerate(of_round):
            if other.overlap_steps == mean.overlap_steps and np.array_equal(other.members, mean.members):
                of_round[place] = other._replace(there=other.there + mean.there, back=other.back + mean.back)
                break
        else:
            of_round.append(mean)
    return means


def _large_mean(
    start: Floats, ready: Floats, waits_on: Integers, mean: Mean, links: Links, network: Network
) -> tuple[Floats, Integers]:
    """A mean without a list of its messages, whose number is the square of the members'."""
    members, sizes = mean.members, (mean.there / 2, mean.back / 2)
    if network.mean != "owners":
        legs = legs_among(network.mean, members, (mean.there.sum() + mean.back.sum()) / 2)
        return _legs(ready, waits_on, members, legs, links, network, ask=False)[:2]
    if network.shares:
        return _mean_of_kinds(start, ready, waits_on, mean, links, network)
    if network.loses or math.prod(len(np.unique(some)) for some in sizes) > _MOST_KINDS:
        return _mean(start, ready, waits_on, mean.listed(), links, network, ask=False)[:2]
    member_links, begun, entered = _only(links, members), start[members], ready[members]
    there, waits_there = _exchange_of_everyone(begun, entered, *sizes, member_links, network)
    back, waits_back = _exchange_of_everyone(begun, there, *sizes, member_links, network)
    end, waits_on = ready.copy(), waits_on.copy()
    end[members], waits_on[members] = back, members[np.where(back - there > there - entered, waits_back, waits_there)]
    return end, waits_on


def _only(links: Links, workers: Integers) -> Links:
    """The links of these workers."""
    each = ("uplink_bps", "downlink_bps", "latency_s", "loss", "site")
    return links._replace(step_s=None, **{name: getattr(links, name)[workers] for name in each})


def _mean_of_kinds(
    start: Floats, ready: Floats, waits_on: Integers, mean: Mean, links: Links, network: Network
) -> tuple[Floats, Integers]:
    """A mean where links are shared or change: a replay with one worker for all that are in one place, have equal links and
    are ready together, as whatever happens to one of them happens to all.

    Where they are ready at many times, those of some consecutive ones count as ready with the last of them.
    """
    members = mean.members
    member_links, begun, entered = _only(links, members), start[members], ready[members]
    of_workers = [change.worker for change in network.changes if change.worker is not None]
    changing = np.where(np.isin(members, of_workers), members, -1)
    columns = (
        member_links.site,
        member_links.uplink_bps,
        member_links.downlink_bps,
        member_links.latency_s,
        member_links.loss,
        changing,
        mean.there,
        mean.back,
    )
    kinds = _groups(*columns)
    count = int(kinds.max()) + 1
    if count > _MOST_KINDS:
        whole = Paths(network, links._replace(step_s=None))
        return _replayed(start, ready - start, mean.listed(), whole)
    group = _groups(kinds, begun, entered)
    if group.max() >= _MOST_KINDS:
        order, sizes = np.lexsort((entered, kinds)), np.bincount(kinds)
        rank = np.empty(len(members), np.int64)
        rank[order] = np.arange(len(members)) - np.repeat(sizes.cumsum() - sizes, sizes)
        group = _groups(kinds, rank * max(1, _MOST_KINDS // 2 // count) // sizes[kinds])
    one_of, last_start = np.zeros((2, group.max() + 1))
    one_of = one_of.astype(np.int64)
    order = np.argsort(entered, kind="stable")
    one_of[group[order]] = order  # the last write wins: the last to be ready
    np.maximum.at(last_start, group, begun)
    changes = tuple(
        change if change.worker is None else replace(change, worker=int(group[members == change.worker][0]))
        for change in network.changes
        if change.worker is None or change.worker in members
    )
    counts = np.bincount(group)
    source, target = np.nonzero(~np.diag(counts == 1))
    sizes = mean.there[one_of][target] + mean.back[one_of][source]
    code, none = np.full(len(source), KINDS.index("mean"), np.int8), np.zeros(len(source), np.int32)
    messages = Messages(none, code, source, target, none, sizes, none)
    paths = Paths(replace(network, changes=changes), _only(member_links, one_of), counts)
    last, late = _replayed(last_start, entered[one_of] - last_start, messages, paths)
    end, waits_on = ready.copy(), waits_on.copy()
    end[members] = np.maximum(entered, last[group])
    waits_on[members] = np.where(last[group] > entered, members[one_of[late[group]]], members)
    return end, waits_on


def _groups(*columns: Integers | Floats) -> Integers:
    """The number of the group of each place, where those that are alike in all columns are one."""
    rows = np.stack([column.astype(float) for column in columns])
    return np.unique(rows, axis=1, return_inverse=True)[1].reshape(-1)


def _exchange_of_everyone(
    start: Floats, ready: Floats, there: Floats | Integers, back: Floats | Integers, links: Links, network: Network
) -> tuple[Floats, Integers]:
    """An exchange among everyone, computed from the messages that may be the last of some worker.

    Worker i sends worker j `there[j] + back[i]` bytes; few of them differ.
    """
    n = len(ready)
    up_s, down_s = (n - 1) / links.uplink_bps, (n - 1) / links.downlink_bps
    if network.duplex == "half":
        up_s = down_s = up_s + down_s
    alike_there, alike_back = _groups(links.site, there), _groups(links.site, back)
    senders, receivers = (
        np.unique(np.concatenate(some))
        for some in (
            [_extremes(alike_back, ready, links.latency_s, 8 * (size + back) * up_s) for size in np.unique(there)],
            [_extremes(alike_there, start, links.latency_s, 8 * (there + size) * down_s) for size in np.unique(back)],
        )
    )
    everybody = np.arange(n)
    source = np.concatenate([np.repeat(senders, n), np.tile(everybody, len(receivers))])
    target = np.concatenate([np.tile(everybody, len(senders)), np.repeat(receivers, n)])
    source, target = source[source != target], target[source != target]
    ways = _Ways(source, n + target, up_s[source], down_s[target], n == 2)
    sizes = there[target] + back[source]
    end, waits_on, _ = _ended(start, ready, everybody, source, target, sizes, ways, links, ask=False)
    return end, waits_on


def _extremes(groups: Integers, *terms: Floats) -> Integers:
    """The workers of each group with the largest sum of each choice of terms, and the next largest for that worker itself."""
    extremes = set[int]()
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        for count in range(1, len(terms) + 1):
            for some in combinations(terms, count):
                total = sum(some[1:], some[0])[members]
                for _ in range(min(2, len(members))):
                    place = total.argmax()
                    extremes.add(int(members[place]))
                    total[place] = -math.inf
    return np.array(sorted(extremes))


class _Ways(NamedTuple):
    """The two link directions that each message uses, as numbers, and how fast it is if each is shared evenly."""

    up: Integers
    down: Integers
    up_s_per_bit: Floats
    down_s_per_bit: Floats
    uncontended: bool
    """No two messages share a direction."""
    alone_s_per_bit: Floats | None = None
    """Rate of each message, where packets are lost, if it were alone on its way."""

    @property
    def up_is_slower(self) -> NDArray[np.bool_]:
        """Whether each message is slower on the sender's side."""
        return self.up_s_per_bit >= self.down_s_per_bit


def _ways(source: Integers, target: Integers, links: Links, network: Network) -> _Ways:
    up, down = source, target if network.duplex == "half" else len(links.uplink_bps) + target
    up_s_per_bit, down_s_per_bit = 1 / links.uplink_bps[source], 1 / links.downlink_bps[target]
    both = np.concatenate([up, down])
    uncontended = int(np.bincount(both).max()) == 1
    alone_s_per_bit = 1 / links.stream_bps(source, target) if links.loses else None
    if not uncontended:
        # Shared evenly: for each bit of a message, the link also moves one bit of every other message.
        loads = np.bincount(both, np.concatenate([up_s_per_bit, down_s_per_bit])).astype(float)
        up_s_per_bit, down_s_per_bit = loads[up], loads[down]
    return _Ways(up, down, up_s_per_bit, down_s_per_bit, uncontended, alone_s_per_bit)


def _even_shares(ways: _Ways, leaves: Floats, size: Integers | Floats, ask: bool) -> tuple[Floats, NDArray[np.bool_]]:
    """Seconds of each message if all share their links evenly all the time, and whether that is exact; no, unless asked.

    No message is ever slower than that. If a link is the slower one for all its messages, and these leave together and have
    one size, the link is full until all have passed, so none is faster either. A message that loses too many packets for its even
    share leaves some to the others, and has its own rate all the time.
    """
    sizes = size.astype(float)
    s_per_bit: Floats = np.maximum(ways.up_s_per_bit, ways.down_s_per_bit)
    held = np.zeros(len(size), bool)
    if ways.alone_s_per_bit is not None:
        held = ways.alone_s_per_bit >= s_per_bit
        s_per_bit = np.maximum(s_per_bit, ways.alone_s_per_bit)
    takes: Floats = 8 * sizes * s_per_bit
    if ways.uncontended or not ask:
        return takes, np.full(len(size), ways.uncontended)
    slower, other = np.where(ways.up_is_slower, [ways.up, ways.down], [ways.down, ways.up])
    links = 1 + int(max(slower.max(), other.max()))
    alike = np.ones(links, bool)
    alike[other] = False
    alike[slower[held]] = False
    for of_message in (leaves, sizes):
        least, most = np.full(links, math.inf), np.full(links, -math.inf)
        np.minimum.at(least, slower, of_message)
        np.maximum.at(most, slower, of_message)
        alike &= least >= most
    return takes, alike[slower] | held | (takes == 0)


def _latest(ready: Floats, source: Integers, target: Integers, arrival: Floats) -> Floats:
    """When each worker has finished everything that it sends and receives."""
    end = ready.copy()
    np.maximum.at(end, target, arrival)
    np.maximum.at(end, source, arrival)
    return end
