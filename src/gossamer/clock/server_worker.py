"""One worker of a server, without clock or connection: virtual time, real processes and replays all run this code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.clock.phases import Learner, Report
from gossamer.clock.server_core import Push, StartingPoint

__all__ = ["ServerWorker"]


@dataclass
class _Held:
    """A worker's state of one fragment: its starting point, and the work since."""

    start: StartingPoint
    tokens: int = 0
    steps: int = 0
    unanswered: bool = False  # pushed, and the reply has not arrived


class ServerWorker:
    """One worker of a server: it trains, pushes a fragment after each phase, and continues from the replies.

    Args:
        spans: the fragments, as slices of the learner's flat vector.
        starts: a starting point for each fragment.
        overlap: whether it goes on training while a reply is in flight, instead of waiting.
    """

    def __init__(
        self, learner: Learner, spans: Sequence[tuple[int, int]], starts: Mapping[int, StartingPoint], *,
        overlap: bool = False,
    ) -> None:  # fmt: skip
        self.learner, self.spans, self.overlap = learner, spans, overlap
        self.waits_for: int | None = None
        """The fragment whose reply it waits for; None while it trains."""
        self._held = {p: self._start_from(p, start) for p, start in starts.items()}
        self._inbox: dict[int, StartingPoint] = {}  # arrived during a phase, used when it ends

    def train(self, number: int) -> tuple[Report, Push | None]:
        """Trains the local phase of this number; returns the report, and the push that follows it, if any."""
        report = self.learner.local_phase(number)
        for held in self._held.values():
            held.tokens += report.tokens
            held.steps += self.learner.local_steps
        p, received = number % len(self.spans), self._inbox
        self._inbox = {}
        for q, start in received.items():
            self._held[q] = self._start_from(q, start)
        if self._held[p].unanswered:
            self.waits_for = p  # the last push of this fragment has had no reply yet
            return report, None
        if p in received:
            return report, None  # nothing has been learned on it since
        self.waits_for = None if self.overlap else p
        return report, self._push(p)

    def receive(self, starts: Mapping[int, StartingPoint]) -> bool:
        """Accepts replies, now or at the end of its current phase; returns whether it begins a phase now."""
        if self.waits_for is None:
            self._inbox.update(starts)
            return False
        for p, start in starts.items():
            self._held[p] = self._start_from(p, start)
        if self.waits_for not in starts:
            return False
        self.waits_for = None
        return True

    def leave(self) -> None:
        """Drops unused replies; the worker needs starting points of all fragments to continue."""
        self._inbox, self.waits_for = {}, len(self.spans) - 1

    def _start_from(self, p: int, start: StartingPoint) -> _Held:
        a, b = self.spans[p]
        self.learner.x[a:b].copy_(start.x)
        return _Held(start)

    def _push(self, p: int) -> Push:
        held, (a, b) = self._held[p], self.spans[p]
        held.unanswered = True
        return Push(p, held.start.x - self.learner.x[a:b], held.start.updates, held.tokens, held.steps)
