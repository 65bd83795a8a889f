"""What a recorded run costs on a network: `price(trace, network) -> Timeline`, pure and exact.

Worker i starts round t at S_i, which is when its receives are announced, and is ready at `R_i = S_i + H_i·step_s_i`.

* exchange: a message j → i leaves at `max(R_j, S_i)` and arrives after `latency + 8·bytes / rate`. The round of i ends at
  the latest of R_i, the arrivals at i and the arrivals of what i sent.
* mean, of P bytes over n members: "owners" is what Gossamer does, two exchanges of P/n between every two members, there
  and back; each begins its second when its first is over. The others are models of an all-reduce, where all members start
  at `max R_i` and go on together, in legs that begin when the one before has arrived everywhere: "ring" has 2(n-1) legs of
  P/n to the next, "tree" 2⌈log2 n⌉ legs of P, pairwise down to one worker and back.

Messages that go through one direction of a link at the same time share it, max-min fair (`gossamer.fluid`): who is done
leaves its part to the others. A message alone in both its directions has `min(uplink_j, downlink_i)`, and k that leave
together have a k-th each; where such cases decide when everyone ends, a round is priced at once. Otherwise it is replayed
event by event. As no worker is in two rounds at a time, rounds follow each other as before.

A whole run is replayed where sites or routes share links, bandwidths change, or an operation overlaps with the steps after
it. A message that overlaps is waited for after `⌊overlap_steps · steps_i / max steps⌋` more inner steps of worker i, however
many rounds these belong to, or at the end of the run.

While no two messages share a direction, everything is a maximum or a sum of terms that fall with the bandwidth, so more of
it is never slower. Where they do, more for one may be less for another.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.fluid import Fluid, LinkChange, Use
from gossamer.network import Floats, Links, MeanKind, Network, jitter_factors, links_of
from gossamer.trace import KINDS, Integers, Kind, Messages, Trace

__all__ = ["Leg", "Timeline", "legs_of", "price"]

_MOST_REPLAYED = 1000
"""Messages of a round that is replayed by itself; of more, all could share links with all, and each event is felt by all."""


class Timeline(NamedTuple):
    """When everything happened, as arrays `[rounds, workers]`; a worker's round starts where its last one ended."""

    compute_s: Floats
    """Seconds of the local phase."""
    communication_s: Floats
    """Exposed communication: all other seconds of the round."""
    waits_on: Integers
    """The worker behind most of that wait: who was late, or whose link was the slower end; itself without a wait."""
    end_s: Floats
    """Seconds from the start of the run to the end of the round."""

    @property
    def total_s(self) -> float:
        """Wall-clock seconds of the run: when the last worker ends its last round."""
        return float(self.end_s.max(initial=0.0))

    @property
    def utilisation(self) -> Floats:
        """Share of the run that each worker spends computing, `[workers]`; 1 for a run that takes no time."""
        total = self.total_s
        return self.compute_s.sum(axis=0) / total if total else np.ones(self.end_s.shape[1])

    @property
    def mean_utilisation(self) -> float:
        """The mean of `utilisation` over the workers."""
        return float(self.utilisation.mean())


def price(trace: Trace, network: Network) -> Timeline:
    """When each worker would have finished each round of this trace on this network.

    Raises: ConfigError when the network describes another number of workers than the trace has.
    Cost: O(messages), vectorised over a round: 1 to 3 s for 10,000 workers and 1,000 rounds of single exchanges. A replay
        costs 0.1 to 1 ms for each message. A round of more than 1,000 messages is not replayed by itself but priced as if
        its messages shared their links evenly all the time, which is never too fast and some per cent too slow at most.

    >>> from gossamer.trace import from_targets
    >>> swap = from_targets(np.array([[1, 0]]), payload_bytes=1000, steps=30)
    >>> price(swap, Network(uplink_bps=(8000, 800), downlink_bps=8000, step_s=1)).end_s
    array([[40., 40.]])
    """
    links = links_of(network, trace.workers)
    if network.shares or trace.messages.overlap_steps.any():
        return _Replay(trace, network, links).run()
    timeline = _empty(trace)
    bounds = np.searchsorted(trace.messages.round, np.arange(trace.rounds + 1))
    end = np.zeros(trace.workers)
    for r in range(trace.rounds):
        start, seconds = end, _seconds(trace, network, links, r)
        ready = start + seconds
        messages = trace.messages.span(bounds[r], bounds[r + 1])
        end, waits_on, sure = _round(start, ready, messages, links, network)
        if not sure and len(messages.round) <= _MOST_REPLAYED:
            alone = Trace(trace.steps[r, None], seconds[None], messages._replace(round=np.zeros_like(messages.round)))
            replayed = _Replay(alone, network, links._replace(step_s=None), start).run()
            end, waits_on = replayed.end_s[0], replayed.waits_on[0]
        timeline.compute_s[r], timeline.communication_s[r] = seconds, end - ready
        timeline.waits_on[r], timeline.end_s[r] = waits_on, end
    return timeline


class Leg(NamedTuple):
    """Messages of a mean that are under way together, as columns, and how often they are sent one after the other."""

    source: Integers
    target: Integers
    bytes: Floats
    times: int


def legs_of(mean: MeanKind, messages: Messages) -> Iterator[Leg]:
    """The legs of a mean, whichever way its messages were recorded; all move `2(n-1)` times the bytes that are averaged.

    >>> from gossamer.trace import from_targets
    >>> trace = from_targets(np.array([[[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]]), 200, steps=1, kind="mean")
    >>> [(leg.bytes.tolist(), leg.times) for leg in legs_of("tree", trace.messages)]
    [([400.0, 400.0], 1), ([400.0], 1), ([400.0], 1), ([400.0, 400.0], 1)]
    """
    members = np.union1d(messages.source, messages.target)
    n = len(members)
    payload = messages.bytes.sum() / (2 * (n - 1))
    if mean == "owners":
        source, target, size = _streams(messages)
        yield Leg(source, target, size / 2, 2)
    elif mean == "ring":
        yield Leg(members, np.roll(members, -1), np.full(n, payload / n), 2 * (n - 1))
    else:
        inwards = []
        for stride in (1 << s for s in range((n - 1).bit_length())):
            far = members[stride :: 2 * stride]
            inwards.append(Leg(far, members[:: 2 * stride][: len(far)], np.full(len(far), payload), 1))
        yield from inwards
        yield from (leg._replace(source=leg.target, target=leg.source) for leg in reversed(inwards))


def _empty(trace: Trace) -> Timeline:
    shape = trace.rounds, trace.workers
    return Timeline(np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape))


def _seconds(trace: Trace, network: Network, links: Links, r: int) -> Floats:
    """Seconds of the local phases of a round, `[workers]`."""
    if links.step_s is None:
        return trace.compute_s[r]
    return trace.steps[r] * links.step_s * jitter_factors(network, r, trace.workers)


# --- links of their own: a round at once ----------------------------------------------------------------------------


def _round(
    start: Floats, ready: Floats, messages: Messages, links: Links, network: Network
) -> tuple[Floats, Integers, bool]:
    """When each worker ends a round, whom it waits for, and whether that is sure; otherwise it may be earlier."""
    edges = np.searchsorted(messages.kind, np.arange(len(KINDS) + 1))
    # The shares of a mean may come while others are still busy with an exchange, on one link with it.
    end, waits_on, all_sure = ready, np.arange(len(ready)), int(np.count_nonzero(np.diff(edges))) < 2
    for kind, first, last in zip(KINDS, edges[:-1], edges[1:], strict=True):
        if first < last:
            end, waits_on, sure = _CARRY[kind](start, end, waits_on, messages.span(first, last), links, network)
            all_sure = all_sure and sure
    return end, waits_on, all_sure


_Carry = Callable[[Floats, Floats, Integers, Messages, Links, Network], tuple[Floats, Integers, bool]]


def _exchange(
    start: Floats, ready: Floats, waits_on: Integers, messages: Messages, links: Links, network: Network
) -> tuple[Floats, Integers, bool]:
    """Point to point, given when each worker began its round and was ready."""
    source, target, size = _streams(messages)
    leaves = np.maximum(ready[source], start[target])
    ways = _ways(source, target, links, network)
    takes, sure = _even_shares(ways, leaves, size)
    arrival = leaves + links.message_latency_s(source, target) + takes
    end = _latest(ready, source, target, arrival)

    waits_on = waits_on.copy()
    slower = np.where(ways.up_is_slower, source, target)
    behind = np.where(ready[source] >= start[target], source, target)
    for worker in (source, target):
        last = (arrival == end[worker]) & (arrival > ready[worker])
        late = leaves - ready[worker] > arrival - leaves
        waits_on[worker[last]] = np.where(late, behind, slower)[last]
    surely = end if sure.all() else _latest(ready, source[sure], target[sure], arrival[sure])
    return end, waits_on, bool((end == surely).all())


def _mean(
    start: Floats, ready: Floats, waits_on: Integers, messages: Messages, links: Links, network: Network
) -> tuple[Floats, Integers, bool]:
    """Through chunk owners, two exchanges; or in legs: all members start when the last is ready and end together."""
    if network.mean == "owners":
        half = messages._replace(bytes=messages.bytes / 2)
        there, waits_there, sure_there = _exchange(start, ready, waits_on, half, links, network)
        back, waits_back, sure_back = _exchange(start, there, waits_on, half, links, network)
        return back, np.where(back - there > there - ready, waits_back, waits_there), sure_there and sure_back
    members = np.union1d(messages.source, messages.target)
    last = slowest = members[ready[members].argmax()]
    begins, takes, longest, all_sure = ready[last], 0.0, 0.0, True
    for leg in legs_of(network.mean, messages):
        ways = _ways(leg.source, leg.target, links, network)
        seconds, sure = _even_shares(ways, np.zeros(len(leg.source)), leg.bytes)
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


class _Ways(NamedTuple):
    """The two directions that each message goes through, as numbers of links, and what an even part of each means for it."""

    up: Integers
    down: Integers
    up_s_per_bit: Floats
    down_s_per_bit: Floats
    lonely: bool
    """No two messages share a direction."""

    @property
    def up_is_slower(self) -> NDArray[np.bool_]:
        """Whether the sender's side has the smaller part for each message."""
        return self.up_s_per_bit >= self.down_s_per_bit


def _ways(source: Integers, target: Integers, links: Links, network: Network) -> _Ways:
    up, down = source, target if network.duplex == "half" else len(links.uplink_bps) + target
    up_s_per_bit, down_s_per_bit = 1 / links.uplink_bps[source], 1 / links.downlink_bps[target]
    both = np.concatenate([up, down])
    lonely = int(np.bincount(both).max()) == 1
    if not lonely:
        # An even part: each bit of one waits until the link has moved a bit of every other message too.
        loads = np.bincount(both, np.concatenate([up_s_per_bit, down_s_per_bit])).astype(float)
        up_s_per_bit, down_s_per_bit = loads[up], loads[down]
    return _Ways(up, down, up_s_per_bit, down_s_per_bit, lonely)


def _even_shares(ways: _Ways, leaves: Floats, size: Integers | Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Seconds of each message if all share their links evenly all the time, and whether it surely takes these.

    Nothing is ever slower. Where a link is the slower one for all its messages, and these leave together and are of one
    size, it is full until all have gone through it, so none is faster either.
    """
    takes = 8 * size.astype(float) * np.maximum(ways.up_s_per_bit, ways.down_s_per_bit)
    if ways.lonely:
        return takes, np.ones(len(size), bool)
    slower, other = np.where(ways.up_is_slower, [ways.up, ways.down], [ways.down, ways.up])
    links = 1 + int(max(slower.max(), other.max()))
    alike = np.ones(links, bool)
    alike[other] = False
    for of_message in (leaves, size):
        least, most = np.full(links, math.inf), np.full(links, -math.inf)
        np.minimum.at(least, slower, of_message)
        np.maximum.at(most, slower, of_message)
        alike &= least >= most
    return takes, alike[slower] | (takes == 0)


def _latest(ready: Floats, source: Integers, target: Integers, arrival: Floats) -> Floats:
    """When each worker has all that it sends and receives behind it."""
    end = ready.copy()
    np.maximum.at(end, target, arrival)
    np.maximum.at(end, source, arrival)
    return end


def _streams(messages: Messages) -> tuple[Integers, Integers, Integers]:
    """Source, target and bytes of each pair that talks: fragments for one peer follow each other on one stream."""
    source, target, size = messages.source, messages.target, messages.bytes
    first = np.ones(len(source), bool)
    first[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[first], target[first], np.add.reduceat(size, np.flatnonzero(first))


# --- shared or changing links: event by event -----------------------------------------------------------------------


class _Stream(NamedTuple):
    """A message under way."""

    operation: "_Operation"
    source: int
    target: int
    left_s: float


class _Operation:
    """An exchange or a mean of one round while it is under way; a mean through owners is two exchanges."""

    def __init__(self, round: int, kind: Kind, overlap_steps: int, messages: Messages, mean: MeanKind):
        self.then: _Operation | None = None
        if kind == "mean" and mean == "owners":
            kind, messages = "exchange", messages._replace(bytes=messages.bytes / 2)
            self.then = _Operation(round, kind, overlap_steps, messages, mean)
        self.round, self.kind, self.overlap_steps = round, kind, overlap_steps
        self.members = set(np.union1d(messages.source, messages.target).tolist())
        self.entered_s: dict[int, float] = {}
        self.done_s: dict[int, float] = {}
        self.blamed: dict[int, int] = {}
        self.begun_s = 0.0
        self.sends: dict[int, list[tuple[int, float]]] = {i: [] for i in self.members}
        self.missing = dict.fromkeys(self.members, 0)
        """Messages of an exchange from and to each worker that have not arrived."""
        self.legs: Iterator[Leg] = iter(())
        self.missing_of_leg = 0
        if kind == "exchange":
            for source, target, size in zip(*(column.tolist() for column in _streams(messages)), strict=True):
                self.sends[source].append((target, size))
                self.missing[source] += 1
                self.missing[target] += 1
        else:
            self.legs = (leg for one in legs_of(mean, messages) for leg in itertools.repeat(one, one.times))


class _Replay:
    """A run replayed over links that are shared or change: a heap of things to do, and the streams under way."""

    def __init__(self, trace: Trace, network: Network, links: Links, start_s: Floats | None = None):
        self.trace, self.network, self.links = trace, network, links
        n, sites = trace.workers, len(links.site_uplink_bps)
        places = {name: 2 * n + place for place, name in enumerate(network.sites)}
        self.fluid = Fluid(
            links=2 * n + 2 * sites + sites * sites,
            changes=[
                LinkChange(change.at_s, link, change.factor)
                for change in network.changes
                for link in (
                    (change.worker, n + change.worker)
                    if change.worker is not None
                    else (places[change.site or ""], sites + places[change.site or ""])
                )
            ],
        )
        self.timeline = _empty(trace)
        self.finished_steps = np.vstack([np.zeros((1, n), np.int64), trace.steps.cumsum(axis=0)])
        self.bounds = np.searchsorted(trace.messages.round, np.arange(trace.rounds + 1))
        self.operations: dict[int, list[_Operation]] = {}
        self.streams: dict[int, _Stream] = {}
        self.todo: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.now_s = 0.0

        self.round = [0] * n
        self.begun = [-1] * n
        """The round whose messages a worker takes."""
        self.start_s: list[float] = [0.0] * n if start_s is None else start_s.tolist()
        self.local_end_s: list[float | None] = [None] * n
        """When the local phase would end without a wait inside it; None while it is not there yet."""
        self.longest_s = [0.0] * n
        """The longest wait for one operation in this round."""
        self.held: list[list[tuple[_Operation, int, float]]] = [[] for _ in range(n)]
        """What others would send a worker, but it has not begun the round in which it receives that."""
        self.stages: list[list[_Operation]] = [[] for _ in range(n)]
        """What the worker still has to wait for in this round, in this order."""
        self.pending: list[list[tuple[int, _Operation]]] = [[] for _ in range(n)]
        """Operations that overlap, and after how many of its inner steps the worker waits for each."""
        self.closing: set[int] = set()
        """Workers that have nothing left to do but to wait for those."""

    def run(self) -> Timeline:
        """Everything in its order."""
        if self.trace.rounds:
            for i, start_s in enumerate(self.start_s):
                self.at(start_s, self.begin_round, i)
        while self.todo or self.streams:
            self.now_s = min(self.todo[0][0] if self.todo else math.inf, self.fluid.next_s)
            for name in self.fluid.advance(self.now_s):
                stream = self.streams.pop(name)
                latency_s = self.links.message_latency_s(np.array([stream.source]), np.array([stream.target]))
                self.at(self.now_s + float(latency_s[0]), self.arrive, stream)
            while self.todo and self.todo[0][0] <= self.now_s:
                _, _, act, arguments = heapq.heappop(self.todo)
                act(*arguments)
        return self.timeline

    def at(self, when_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Does something then."""
        heapq.heappush(self.todo, (when_s, next(self.order), act, arguments))

    def begin_round(self, i: int) -> None:
        """The local phase begins."""
        r = self.begun[i] = self.round[i]
        self.start_s[i], self.local_end_s[i], self.longest_s[i] = self.now_s, None, 0.0
        seconds = float(_seconds(self.trace, self.network, self.links, r)[i])
        self.timeline.compute_s[r, i], self.timeline.waits_on[r, i] = seconds, i
        for message in [message for message in self.held[i] if message[0].round == r]:
            self.held[i].remove(message)
            operation, source, size = message
            self.send(operation, source, i, size)
        self.at(self.now_s + seconds, self.end_local_phase, i)

    def end_local_phase(self, i: int) -> None:
        """All inner steps are done, but for what had to wait on the way."""
        self.local_end_s[i] = self.now_s
        self.collect(i)

    def collect(self, i: int) -> None:
        """Goes on once everything that was due in this local phase has come; the steps after it were as much later."""
        local_end_s = self.local_end_s[i]
        if local_end_s is None:
            return
        r = self.round[i]
        steps, finished = int(self.trace.steps[r, i]), int(self.finished_steps[r + 1, i])
        step_s = self.timeline.compute_s[r, i] / steps if steps else 0.0
        due = [(after, operation) for after, operation in self.pending[i] if after <= finished]
        if all(i in operation.done_s for _, operation in due):
            ready_s = local_end_s
            for after, operation in due:
                came_s = operation.done_s[i] + (finished - after) * step_s
                if came_s > ready_s:
                    self.blame(i, came_s - local_end_s, operation)
                    ready_s = came_s
            self.pending[i] = [one for one in self.pending[i] if one not in due]
            self.local_end_s[i] = None
            self.at(ready_s, self.be_ready, i)

    def be_ready(self, i: int) -> None:
        """Enters what overlaps, and then what has to be waited for."""
        r = self.round[i]
        if r not in self.operations:
            self.operations[r] = list(self.plan(r))
        own = [operation for operation in self.operations[r] if i in operation.members]
        self.stages[i] = [operation for operation in own if not operation.overlap_steps]
        for operation in own:
            if operation.overlap_steps:
                due = int(self.finished_steps[r + 1, i]) + self.own_overlap_steps(r, i, operation.overlap_steps)
                self.pending[i].append((due, operation.then or operation))
                self.enter(operation, i)
        self.next_stage(i)

    def own_overlap_steps(self, r: int, i: int, overlap_steps: int) -> int:
        """Steps of a worker that go with so many of the one that takes most; a round without steps scales nothing."""
        steps = self.trace.steps[r]
        most = int(steps.max())
        return overlap_steps * int(steps[i]) // most if most else overlap_steps

    def plan(self, r: int) -> Iterator[_Operation]:
        """The operations of a round."""
        messages = self.trace.messages.span(self.bounds[r], self.bounds[r + 1])
        for code, kind in enumerate(KINDS):
            for overlap_steps in np.unique(messages.overlap_steps[messages.kind == code]).tolist():
                these = (messages.kind == code) & (messages.overlap_steps == overlap_steps)
                yield _Operation(
                    r, kind, overlap_steps, Messages(*(column[these] for column in messages)), self.network.mean
                )

    def next_stage(self, i: int) -> None:
        """The next operation to wait for, or the end of the round."""
        if self.stages[i]:
            self.enter(self.stages[i][0], i)
            return
        r = self.round[i]
        if r + 1 == self.trace.rounds and any(i not in operation.done_s for _, operation in self.pending[i]):
            self.closing.add(i)
            return
        self.timeline.end_s[r, i] = self.now_s
        self.timeline.communication_s[r, i] = max(0.0, self.now_s - self.start_s[i] - self.timeline.compute_s[r, i])
        self.round[i] += 1
        if self.round[i] < self.trace.rounds:
            self.begin_round(i)
        if all(done > r for done in self.round):
            self.operations.pop(r, None)

    def enter(self, operation: _Operation, i: int) -> None:
        """A worker is ready for an operation."""
        operation.entered_s[i] = self.now_s
        if operation.kind == "exchange":
            for target, size in operation.sends[i]:
                if self.begun[target] < operation.round:
                    self.held[target].append((operation, i, size))
                else:
                    self.send(operation, i, target, size)
            if not operation.missing[i]:
                self.complete(operation, i)
        elif len(operation.entered_s) == len(operation.members):
            operation.begun_s = self.now_s
            self.next_leg(operation)

    def next_leg(self, operation: _Operation) -> None:
        """All messages of a mean's next leg leave; after the last leg it is there for everybody."""
        leg = next(operation.legs, None)
        if leg is None:
            for i in sorted(operation.members):
                self.complete(operation, i)
            return
        operation.missing_of_leg = len(leg.source)
        for source, target, size in zip(leg.source.tolist(), leg.target.tolist(), leg.bytes.tolist(), strict=True):
            self.send(operation, source, target, size)

    def send(self, operation: _Operation, source: int, target: int, size: float) -> None:
        """A message leaves."""
        links, n, sites = self.links, self.trace.workers, len(self.links.site_uplink_bps)
        a, b = int(links.site[source]), int(links.site[target])
        uses = [
            (source, links.uplink_bps[source]),
            (target if self.network.duplex == "half" else n + target, links.downlink_bps[target]),
        ]
        if a != b:
            uses += [
                (2 * n + a, links.site_uplink_bps[a]),
                (2 * n + sites + b, links.site_downlink_bps[b]),
                (2 * n + 2 * sites + a * sites + b, links.route_bps[a, b]),
            ]
        name = next(self.order)
        self.streams[name] = _Stream(operation, source, target, self.now_s)
        self.fluid.start(name, 8 * size, [Use(link, float(bandwidth_bps)) for link, bandwidth_bps in uses])

    def arrive(self, stream: _Stream) -> None:
        """A message is there, which both of its ends have waited for, or the whole leg of a mean."""
        operation, source, target, left_s = stream
        up, down = self.links.uplink_bps[source], self.links.downlink_bps[target]
        slower = source if up <= down else target
        if operation.kind == "exchange":
            for i in (source, target):
                operation.missing[i] -= 1
                late = left_s - operation.entered_s.get(i, math.inf) > self.now_s - left_s
                behind = source if operation.entered_s[source] == left_s else target
                operation.blamed[i] = behind if late else slower
                if not operation.missing[i] and i in operation.entered_s:
                    self.complete(operation, i)
            return
        operation.missing_of_leg -= 1
        if not operation.missing_of_leg:
            last = max(operation.entered_s, key=lambda i: operation.entered_s[i])
            for i in operation.members:
                late = operation.begun_s - operation.entered_s[i] > self.now_s - operation.begun_s
                operation.blamed[i] = last if late else slower
            self.next_leg(operation)

    def complete(self, operation: _Operation, i: int) -> None:
        """An operation is over for a worker."""
        operation.done_s[i] = self.now_s
        if not operation.overlap_steps:
            self.blame(i, self.now_s - operation.entered_s[i], operation)
        if operation.then is not None:
            self.enter(operation.then, i)
        elif not operation.overlap_steps:
            self.stages[i].pop(0)
            self.next_stage(i)
        elif self.local_end_s[i] is not None:
            self.collect(i)
        elif i in self.closing:
            self.blame(i, self.now_s - operation.entered_s[i], operation)
            self.next_stage(i)

    def blame(self, i: int, waited_s: float, operation: _Operation) -> None:
        """Puts the round's wait down to whom this operation waited for, if it was the longest so far."""
        if waited_s > self.longest_s[i]:
            self.longest_s[i] = waited_s
            self.timeline.waits_on[self.round[i], i] = operation.blamed[i]
