"""The agenda of virtual time: planned events in order."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from gossamer.clock.events import Record

__all__ = ["ABSENCE", "ARRIVAL", "DECISION", "PHASE", "RELAY", "REPLY", "Action", "Agenda"]

# The order of events at the same time. Phases end before any message arrives, so that with equal clocks and free links all
# messages of a round have arrived when the first is handled. What servers send each other in no time comes before the next
# push.
ABSENCE, PHASE, RELAY, ARRIVAL, DECISION, REPLY = range(6)

Action = Callable[[], list[Record]]


class Agenda:
    """The planned events and the virtual time."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._heap: list[tuple[float, int, int, int, Action]] = []
        self._serial = itertools.count()
        self._work = 0

    def plan(self, time_s: float, kind: int, worker: int, action: Action) -> None:
        """Plans `action` at a time; at equal times smaller kinds come first, then smaller workers."""
        self._work += kind != ABSENCE
        heapq.heappush(self._heap, (time_s, kind, worker, next(self._serial), action))

    def run(self, until_s: float, stuck: Action | None = None) -> Iterator[Record]:
        """Runs all events up to and at `until_s`; calls `stuck` when nothing but absences is planned."""
        while True:
            if self._work == 0 and stuck is not None:
                yield from stuck()
            if not self._heap or self._heap[0][0] > until_s:
                break
            self.time_s, kind, _, _, action = heapq.heappop(self._heap)
            self._work -= kind != ABSENCE
            yield from action()  # an action is complete before its records are yielded, so a caller may stop anywhere
        if until_s < math.inf:
            self.time_s = max(self.time_s, until_s)
