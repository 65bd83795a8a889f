"""A round replayed message by message, where links are shared or change."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gossamer.network.fluid import FairRates, Fluid, LinkChange, StreamWay
from gossamer.network.links import Floats, Links, MeanKind, Network
from gossamer.network.timeline import Leg, Timeline, compute_seconds, legs_of, no_rounds, operations_of, overlap_of_each
from gossamer.record.logs.trace import Integers, Kind, Messages, Trace


class _Message(NamedTuple):
    """A message in flight."""

    operation: "_Operation"
    source: int
    target: int
    left_s: float
    path: "_Path"


class _Path(NamedTuple):
    """What messages from one worker to another go through."""

    way: StreamWay
    latency_s: float
    slower: int
    """Of the two workers, the one with the slower link."""


class Paths:
    """The paths between workers of a network, made when they are first asked for, for any number of replays.

    Args: `counts` is how many equal workers each of them stands for; a message then stands for one from each to each.
    """

    def __init__(self, network: Network, links: Links, counts: Integers | None = None):
        self.network, self.links, self.loses = network, links, links.loses
        self.counts = np.ones(len(links.uplink_bps), np.int64) if counts is None else counts
        n, sites = len(links.uplink_bps), len(links.site_uplink_bps)
        places = {name: 2 * n + place for place, name in enumerate(network.sites)}
        self.changes = [
            LinkChange(change.at_s, link, change.factor)
            for change in network.changes
            for link in (
                (change.worker, n + change.worker)
                if change.worker is not None
                else (places[change.site or ""], sites + places[change.site or ""])
            )
        ]
        self.rates = FairRates(links=2 * n + 2 * sites + sites * sites)
        self._paths: dict[tuple[int, int], _Path] = {}

    def between(self, source: int, target: int) -> _Path:
        """The path from one worker to another."""
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = self._path(source, target)
        return path

    def _path(self, source: int, target: int) -> _Path:
        links, n, sites = self.links, len(self.links.uplink_bps), len(self.links.site_uplink_bps)
        a, b = int(links.site[source]), int(links.site[target])
        same, half = source == target, self.network.duplex == "half"
        senders, receivers = self.counts[source] - same, self.counts[target] - same
        uses = [
            (source, links.uplink_bps[source] / receivers),
            (target if half else n + target, links.downlink_bps[target] / senders),
        ]
        if same and half:
            uses = [(source, 1 / (1 / uses[0][1] + 1 / uses[1][1]))]
        if a != b:
            every = senders * receivers
            uses += [
                (2 * n + a, links.site_uplink_bps[a] / every),
                (2 * n + sites + b, links.site_downlink_bps[b] / every),
                (2 * n + 2 * sites + a * sites + b, links.route_bps[a, b] / every),
            ]
        ends = np.array([source]), np.array([target])
        most_bps = float(links.stream_bps(*ends)[0]) if self.loses else math.inf
        return _Path(
            self.rates.way([(link, float(bandwidth_bps)) for link, bandwidth_bps in uses], most_bps),
            float(links.message_latency_s(*ends)[0]),
            source if links.uplink_bps[source] <= links.downlink_bps[target] else target,
        )


class _Operation:
    """An exchange or a mean of one round in flight; a mean through owners is two exchanges."""

    def __init__(self, round: int, kind: Kind, messages: Messages, mean: MeanKind, overlap: Integers | None):
        self.then: _Operation | None = None
        if kind == "mean" and mean == "owners":
            kind, messages = "exchange", messages._replace(bytes=messages.bytes / 2)
            self.then = _Operation(round, kind, messages, mean, overlap)
        self.round, self.kind = round, kind
        self.overlap = None if overlap is None else overlap.tolist()
        """The inner steps of each worker that it overlaps with; None where it is waited for at once."""
        source, target = messages.source.tolist(), messages.target.tolist()
        self.members = {*source, *target}
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
            before = None
            for a, b, size in zip(source, target, messages.bytes.tolist(), strict=True):
                if (a, b) == before:  # fragments for one peer follow each other on one stream
                    self.sends[a][-1] = b, self.sends[a][-1][1] + size
                    continue
                before = a, b
                self.sends[a].append((b, size))
                self.missing[a] += 1
                self.missing[b] += 1
        else:
            self.legs = (leg for one in legs_of(mean, messages) for leg in itertools.repeat(one, one.times))


class Replay:
    """A run replayed over links that are shared or change: a heap of things to do, and the streams in flight."""

    def __init__(self, trace: Trace, paths: Paths, start_s: Floats | None = None):
        self.trace, self.paths = trace, paths
        n = trace.workers
        self.fluid = Fluid[_Message](paths.rates, paths.changes)
        self.timeline = no_rounds(trace)
        self.steps: list[list[int]] = trace.steps.tolist()
        self.finished_steps: list[list[int]] = np.vstack(
            [np.zeros((1, n), np.int64), trace.steps.cumsum(axis=0)]
        ).tolist()
        self.bounds = trace.bounds
        self.operations: dict[int, list[_Operation]] = {}
        self.compute_s: dict[int, list[float]] = {}
        self.through = [0] * (trace.rounds + 1)
        """How many workers have finished each round."""
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
        while self.todo or self.fluid:
            self.now_s = min(self.todo[0][0] if self.todo else math.inf, self.fluid.next_s)
            for message in self.fluid.advance(self.now_s):
                self.at(self.now_s + message.path.latency_s, self.arrive, message)
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
        if r not in self.compute_s:
            self.compute_s[r] = compute_seconds(self.trace, self.paths.network, self.paths.links, r).tolist()
        seconds = self.compute_s[r][i]
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
        steps, finished = self.steps[r][i], self.finished_steps[r + 1][i]
        step_s = self.compute_s[r][i] / steps if steps else 0.0
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
            self.at(ready_s, self.enter_operations, i)

    def enter_operations(self, i: int) -> None:
        """Enters what overlaps, and then what has to be waited for."""
        r = self.round[i]
        if r not in self.operations:
            self.operations[r] = list(self.plan(r))
        operations = [operation for operation in self.operations[r] if i in operation.members]
        self.stages[i] = [operation for operation in operations if operation.overlap is None]
        for operation in operations:
            if operation.overlap is not None:
                after = self.finished_steps[r + 1][i] + operation.overlap[i]
                self.pending[i].append((after, operation.then or operation))
                self.enter(operation, i)
        self.next_stage(i)

    def plan(self, r: int) -> Iterator[_Operation]:
        """The operations of a round."""
        messages = self.trace.messages.span(self.bounds[r], self.bounds[r + 1])
        for kind, overlap_steps, these in operations_of(messages):
            overlap = overlap_of_each(self.trace, r, overlap_steps) if overlap_steps else None
            yield _Operation(r, kind, these, self.paths.network.mean, overlap)

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
        self.timeline.communication_s[r, i] = max(0.0, self.now_s - self.start_s[i] - self.compute_s[r][i])
        self.round[i] += 1
        self.through[r] += 1
        if self.round[i] < self.trace.rounds:
            self.begin_round(i)
        if self.through[r] == self.trace.workers:
            del self.operations[r], self.compute_s[r]

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
        path = self.paths.between(source, target)
        self.fluid.start(_Message(operation, source, target, self.now_s, path), 8 * size, path.way)

    def arrive(self, message: _Message) -> None:
        """A message is there, which both of its ends have waited for, or the whole leg of a mean."""
        operation, source, target, left_s, path = message
        if operation.kind == "exchange":
            for i in (source, target):
                operation.missing[i] -= 1
                late = left_s - operation.entered_s.get(i, math.inf) > self.now_s - left_s
                behind = source if operation.entered_s[source] == left_s else target
                operation.blamed[i] = behind if late else path.slower
                if not operation.missing[i] and i in operation.entered_s:
                    self.complete(operation, i)
            return
        operation.missing_of_leg -= 1
        if not operation.missing_of_leg:
            last = max(operation.entered_s, key=lambda i: operation.entered_s[i])
            for i in operation.members:
                late = operation.begun_s - operation.entered_s[i] > self.now_s - operation.begun_s
                operation.blamed[i] = last if late else path.slower
            self.next_leg(operation)

    def complete(self, operation: _Operation, i: int) -> None:
        """An operation is over for a worker."""
        operation.done_s[i] = self.now_s
        if operation.overlap is None:
            self.blame(i, self.now_s - operation.entered_s[i], operation)
        if operation.then is not None:
            self.enter(operation.then, i)
        elif operation.overlap is None:
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
