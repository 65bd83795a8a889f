"""The agenda of virtual time: what is going to happen and when."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from gossamer.clock.events import Record

__all__ = ["ABSENCE", "ARRIVAL", "DECISION", "PHASE", "REPLY", "Action", "Agenda"]

# What comes first of all that happens at one time. Phases end before any message arrives, so that with equal clocks and free
# links everyone's message of a round has arrived when the first is handled.
ABSENCE, PHASE, ARRIVAL, DECISION, REPLY = range(5)

Action = Callable[[], list[Record]]


class Agenda:
    """What is going to happen and when, and the virtual time."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._heap: list[tuple[float, int, int, int, Action]] = []
        self._serial = itertools.count()
        self._work = 0

    def plan(self, time_s: float, kind: int, worker: int, action: Action) -> None:
        """Lets `action` happen at a time, after those of a smaller kind, or of a smaller worker, at the same time."""
        self._work += kind != ABSENCE
        heapq.heappush(self._heap, (time_s, kind, worker, next(self._serial), action))

    def run(self, until_s: float, stuck: Action | None = None) -> Iterator[Record]:
        """Everything up to and at `until_s`; `stuck` is called when nothing is planned but absences."""
        while True:
            if self._work == 0 and stuck is not None:
                yield from stuck()
            if not self._heap or self._heap[0][0] > until_s:
                break
            self.time_s, kind, _, _, action = heapq.heappop(self._heap)
            self._work -= kind != ABSENCE
            yield from action()  # an action is done before its records are seen, so a caller may stop anywhere
        if until_s < math.inf:
            self.time_s = max(self.time_s, until_s)
