"""The event queue of virtual time. Events are data, so that a queue can be saved and resumed."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gossamer.clock.events import Record
from gossamer.clock.saved import as_dicts, rebuilt

# The order of events at the same time. Phases end before any message arrives, so that with equal clocks and free links all
# messages of a round have arrived when the first is handled. Messages between servers without delay come before the
# next push.
ABSENCE, PHASE, RELAY, ARRIVAL, DECISION, REPLY = range(6)

_Planned = tuple[float, int, int, int, Any]


class _Saved(NamedTuple):
    """A planned event, with the name of its type."""

    time_s: float
    kind: int
    worker: int
    serial: int
    name: str
    event: dict[str, Any]


class EventQueueState(NamedTuple):
    """The part of a checkpoint for an event queue."""

    time_s: float
    serial: int
    stuck: bool
    planned: list[_Saved]


class EventQueue:
    """The planned events and the virtual time.

    Args:
        perform: executes an event, and returns its records.
        stuck: called when only absences are planned.
    """

    def __init__(self, perform: Callable[[Any], list[Record]], stuck: Callable[[], list[Record]] = lambda: []) -> None:
        self.time_s = 0.0
        self._perform, self._stuck = perform, stuck
        self._heap: list[_Planned] = []
        self._serial = self._work = 0
        self._was_stuck = False  # since the last event

    def plan(self, time_s: float, kind: int, worker: int, event: Any) -> None:
        """Plans an event, a named tuple, at a time; at equal times smaller kinds come first, then smaller workers."""
        self._work += kind != ABSENCE
        heapq.heappush(self._heap, (time_s, kind, worker, self._serial, event))
        self._serial += 1

    def step(self, until_s: float = math.inf) -> list[Record] | None:
        """The records of the next event up to and at `until_s`, possibly none; None when there is no such event."""
        if self._work == 0 and not self._was_stuck:
            self._was_stuck = True
            if records := self._stuck():
                return records
        self._was_stuck = False
        if not self._heap or self._heap[0][0] > until_s:
            return None
        self.time_s, kind, _, _, event = heapq.heappop(self._heap)
        self._work -= kind != ABSENCE
        return self._perform(event)

    def run(self, until_s: float) -> Iterator[Record]:
        """Runs all events up to and at `until_s`."""
        while (records := self.step(until_s)) is not None:
            yield from records  # an event is complete before its records are yielded, so a caller may stop anywhere
        if until_s < math.inf:
            self.time_s = max(self.time_s, until_s)

    def state(self) -> EventQueueState:
        """The time and the planned events."""
        planned = [
            _Saved(time_s, kind, worker, serial, type(event).__name__, as_dicts(event))
            for time_s, kind, worker, serial, event in sorted(self._heap)
        ]
        return EventQueueState(self.time_s, self._serial, self._was_stuck, planned)

    def restore(self, state: EventQueueState, kinds: Sequence[type]) -> list[Any]:
        """Continues from a state, with events of these kinds; returns them. Raises ValueError for any other."""
        named = {kind.__name__: kind for kind in kinds}
        if not 0 <= state.time_s < math.inf or not {one.name for one in state.planned} <= named.keys():
            raise ValueError(f"a time of {state.time_s} and events {sorted({one.name for one in state.planned})}")
        heap: list[_Planned] = []
        for time_s, kind, worker, serial, name, event in state.planned:
            if not (time_s >= state.time_s and ABSENCE <= kind <= REPLY and 0 <= serial < state.serial):
                raise ValueError(f"event {serial} of kind {kind} at {time_s} s, when it is {state.time_s} s")
            heap.append((time_s, kind, worker, serial, rebuilt(named[name], event)))
        if len({serial for _, _, _, serial, _ in heap}) < len(heap):
            raise ValueError("two events with one number")
        heapq.heapify(heap)
        self.time_s, self._serial, self._was_stuck, self._heap = state.time_s, state.serial, state.stuck, heap
        self._work = sum(kind != ABSENCE for _, kind, _, _, _ in heap)
        return [event for *_, event in heap]


class VirtualTimeLoop:
    """A loop over the events of its queue."""

    _queue: EventQueue

    @property
    def time_s(self) -> float:
        """The virtual time."""
        return self._queue.time_s

    def run(self, until_s: float = math.inf) -> Iterator[Record]:
        """Yields the events up to a virtual time as they happen; may be stopped anywhere and called again."""
        return self._queue.run(until_s)

    def step(self) -> list[Record] | None:
        """The records of the next event; None after the last."""
        return self._queue.step()
