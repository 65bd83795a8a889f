"""The breakdown of a run's seconds: priced for a simulation in rounds, known in virtual time."""

from typing import Any, NamedTuple

import numpy as np

from gossamer.clock import SERVER, Absence, Phase, Record, Transfer, Update
from gossamer.clock.saved import as_dicts, rebuilt
from gossamer.network.links import Floats, Network, PerWorker, links_of
from gossamer.network.pricing import price
from gossamer.network.timeline import Timeline
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.logs.trace import KINDS, Integers, Messages, Trace
from gossamer.rounds.stopwatch import Tally

# --- priced -----------------------------------------------------------------------------------------------------------


def priced(
    trace: Trace, network: Network | None, name: str | None, parts: int = 1, computing: PerWorker = 1.0
) -> list[RoundSeconds]:
    """The seconds of a traced run on a network; without one those that its workers computed.

    Args:
        parts: trace entries per round of the run.
        computing: as in `gossamer.network.pricing.price`.
    Raises: ConfigError as `price` does.
    """
    if network is None:
        still = np.zeros_like(trace.compute_s)
        timeline = Timeline(trace.compute_s, still, still.astype(np.int32), trace.compute_s.cumsum(axis=0))
    else:
        timeline = price(trace, network, computing)
    # Fast path: without communication there is no waiting, and a trace may have millions of messages.
    late_s, peer = _lateness(trace, timeline) if network else (timeline.communication_s, np.zeros_like(trace.steps))
    waiting_s = np.clip(late_s, 0.0, timeline.communication_s)
    transfer_s = timeline.communication_s - waiting_s
    longer_s = np.zeros_like(transfer_s)
    if network is not None and (len(trace.messages.round) or trace.means):
        # What the link of the one that held a worker up took longer than its own would have is waiting for that one.
        own_s = _own_links_s(trace, network)
        longer_s = np.clip(np.minimum(transfer_s, np.take_along_axis(own_s, timeline.waits_on, 1)) - own_s, 0.0, None)
    between_s = timeline.compute_s * (1 - np.asarray(timeline.computing))
    rounds: list[RoundSeconds] = []
    for i in range(trace.workers):
        tally = Tally(i, name)
        for r in range(trace.rounds):
            tally.compute_s += float(timeline.compute_s[r, i] - between_s[r, i])
            tally.other_s += float(between_s[r, i])
            tally.transfer_s += float(transfer_s[r, i] - longer_s[r, i])
            tally.wait(int(peer[r, i]), float(waiting_s[r, i]))
            tally.wait(int(timeline.waits_on[r, i]), float(longer_s[r, i]))
            tally.end_s = float(timeline.end_s[r, i])
            if (r + 1) % parts == 0 or r + 1 == trace.rounds:
                rounds.append(tally.round(r // parts))
    return sorted(rounds, key=lambda one: (one.round, one.worker))


def _own_links_s(trace: Trace, network: Network) -> Floats:
    """How long each worker's messages of a round take on its own uplink and downlink alone, `[rounds, workers]`."""
    at, _, source, target, _, size, _ = trace.messages
    links = links_of(network, trace.workers)
    taken = []
    for end, bps in ((source, links.uplink_bps), (target, links.downlink_bps)):
        sums = np.zeros((trace.rounds, trace.workers))
        np.add.at(sums, (at, end), size)
        for mean in trace.means:
            sums[mean.round, mean.members] += mean.sent_bytes if end is source else mean.received_bytes
        taken.append(8 * sums / np.asarray(bps))
    return np.maximum(*taken)


def _lateness(trace: Trace, timeline: Timeline) -> tuple[Floats, Integers]:
    """The delay from the start of a worker's wait until the last awaited message was sent, `[rounds, workers]`, and its
    sender.

    A message is sent when its sender has trained and its target has begun the round; a mean when all of its workers
    have.
    """
    late_s, peer = np.full(timeline.end_s.shape, -np.inf), np.zeros(timeline.end_s.shape, np.int32)
    messages = Messages(*map(np.concatenate, zip(trace.messages, *(mean.ring() for mean in trace.means), strict=True)))
    if not len(messages.round):
        return late_s, peer
    start_s = np.vstack([np.zeros(trace.workers), timeline.end_s[:-1]])
    ready_s = start_s + timeline.compute_s
    at, kind, source, target, _, _, overlap = messages
    left_s, behind = np.maximum(ready_s[at, source], start_s[at, target]), source
    means = kind == KINDS.index("mean")
    if means.any():
        _, group = np.unique(np.stack([at[means], overlap[means]]), axis=1, return_inverse=True)
        group = group.reshape(-1)
        entered_s, whose = ready_s[at[means], source[means]], source[means]
        order = np.argsort(entered_s, kind="stable")
        last = np.zeros(group.max() + 1, np.int64)
        last[group[order]] = order  # the last write wins: the last to begin
        behind = behind.copy()
        left_s[means], behind[means] = entered_s[last[group]], whose[last[group]]
    rows = []
    for end, other in ((target, source), (source, target)):
        due, began_s = _due(trace, timeline, start_s, ready_s, at, end, overlap)
        rows.append((left_s - began_s, due, end, np.where(means, behind, other)))
    lateness, due, end, whose = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.argsort(lateness, kind="stable")  # the latest is written last
    late_s[due[order], end[order]] = lateness[order]
    peer[due[order], end[order]] = whose[order]
    return late_s, peer


def _due(
    trace: Trace,
    timeline: Timeline,
    start_s: Floats,
    ready_s: Floats,
    at: Integers,
    worker: Integers,
    overlap: Integers,
) -> tuple[Integers, Floats]:
    """The round in which a worker waits for each message, and the start of the wait."""
    steps, finished = trace.steps, np.vstack([np.zeros((1, trace.workers), np.int64), trace.steps.cumsum(axis=0)])
    most = np.maximum(steps.max(axis=1), 1)
    after = finished[at + 1, worker] + overlap * steps[at, worker] // most[at]
    due, began_s = at.copy(), ready_s[at, worker].copy()
    for i in np.unique(worker[overlap > 0]).tolist():
        these = (worker == i) & (overlap > 0)
        r = np.minimum(np.searchsorted(finished[1:, i], after[these]), trace.rounds - 1)
        step_s = timeline.compute_s[r, i] / np.maximum(steps[r, i], 1)
        due[these] = r
        began_s[these] = np.minimum(start_s[r, i] + (after[these] - finished[r, i]) * step_s, ready_s[r, i])
    return due, began_s


# --- known ------------------------------------------------------------------------------------------------------------


class _TallyState(NamedTuple):
    end_s: float
    compute_s: float
    transfer_s: float
    other_s: float
    waiting_for: dict[int, float]


class _SecondsState(NamedTuple):
    """As the fields of `EventSeconds`; `pushed_s` has fragment, worker and time."""

    tallies: list[_TallyState]
    spans: list[list[tuple[float, float]]]
    away_until: dict[int, float]
    pushed_s: list[tuple[int, int, float]]
    waits_for: list[int]


class EventSeconds:
    """The seconds of all workers of a run over virtual time, by its events.

    Between two local phases a worker is delayed by its messages to and from a server, and waits for the worker that
    pushed last into the update that it needs; if there is no other worker, for the server.
    """

    def __init__(self, workers: int, network: str) -> None:
        self._tallies = [Tally(i, network) for i in range(workers)]
        self._spans: list[list[tuple[float, float]]] = [[] for _ in range(workers)]
        """Time spans of each worker's messages since its last local phase."""
        self._away_until: dict[int, float] = {}
        self._pushed_s: dict[tuple[int, int], float] = {}
        self._waits_for = [SERVER] * workers

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint for seconds not in a round yet."""
        tallies = [
            _TallyState(one.end_s, one.compute_s, one.transfer_s, one.other_s, one.waiting_for) for one in self._tallies
        ]
        pushed_s = [(*which, when_s) for which, when_s in self._pushed_s.items()]
        return as_dicts(_SecondsState(tallies, self._spans, self._away_until, pushed_s, self._waits_for))

    def restore(self, state: Any) -> None:
        """Continues from a state. Raises ValueError when it does not fit."""
        saved = rebuilt(_SecondsState, state)
        if len(saved.spans) != len(self._tallies) or len(saved.waits_for) != len(self._tallies):
            raise ValueError(f"seconds of {len(saved.spans)} workers for {len(self._tallies)}")
        for tally, saved_tally in zip(self._tallies, saved.tallies, strict=True):
            tally.end_s, tally.compute_s, tally.transfer_s, tally.other_s, tally.waiting_for = saved_tally
        self._spans, self._away_until, self._waits_for = saved.spans, saved.away_until, saved.waits_for
        self._pushed_s = {(p, worker): when_s for p, worker, when_s in saved.pushed_s}

    def count(self, event: Record) -> None:
        """Counts one event, in the order in which they happen."""
        match event:
            case Phase():
                if event.worker in self._away_until:
                    self._idle(event.worker, self._away_until.pop(event.worker))
                self._add_delay(event.worker, event.start_s)
                tally = self._tallies[event.worker]
                tally.compute_s += event.end_s - event.start_s
                tally.end_s = event.end_s
            case Transfer(kind="push"):
                self._spans[event.source].append((event.start_s, event.end_s))
                self._pushed_s[event.fragment, event.source] = event.end_s
            case Transfer():
                self._spans[event.target].append((event.start_s, event.end_s))
            case Update():
                arrived = {i: self._pushed_s[event.fragment, i] for i in event.workers}
                last = max(arrived, key=arrived.__getitem__)
                for i, came_s in arrived.items():
                    self._waits_for[i] = last if came_s < arrived[last] else SERVER
            case Absence():
                self._spans[event.worker].clear()
                self._away_until[event.worker] = event.time_s

    def round(self, round: int) -> list[RoundSeconds]:
        """Ends a round: the seconds of each worker up to the end of its last local phase."""
        return [tally.round(round) for tally in self._tallies]

    def end(self, time_s: float) -> None:
        """Counts the rest of the run, without steps, before the last round ends."""
        for i in range(len(self._tallies)):
            self._idle(i, time_s)

    def _idle(self, i: int, until_s: float) -> None:
        tally = self._tallies[i]
        tally.other_s += max(0.0, until_s - tally.end_s)
        tally.end_s = max(tally.end_s, until_s)

    def _add_delay(self, i: int, until_s: float) -> None:
        """Counts transfer and waiting since the last local phase, up to the start of the next."""
        tally = self._tallies[i]
        waiting_s, at_s = 0.0, tally.end_s
        for start_s, end_s in sorted(self._spans[i]):
            arrival_s = min(end_s, until_s)  # transfers during training cost nothing
            if arrival_s > at_s:
                waiting_s += max(0.0, start_s - at_s)
                tally.transfer_s += arrival_s - max(at_s, start_s)
                at_s = arrival_s
        tally.wait(self._waits_for[i], waiting_s + max(0.0, until_s - at_s))
        self._spans[i].clear()
        tally.end_s = until_s
