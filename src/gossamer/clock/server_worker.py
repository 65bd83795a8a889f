"""One worker of a server, without clock or connection: virtual time, real processes and replays all run this code."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossamer.clock.fragment import Push, StartingPoint
from gossamer.clock.phases import Learner, Report
from gossamer.tree import must_fit


class _Contribution(NamedTuple):
    """A worker's state of one fragment: its starting point, and the work since."""

    start: StartingPoint
    tokens: int
    steps: int
    unanswered: bool  # pushed, and the reply has not arrived


class ServerWorkerState(NamedTuple):
    """The part of a checkpoint for one worker of a server, by fragment."""

    held: dict[int, _Contribution]
    inbox: dict[int, StartingPoint]
    waits_for: int | None


class ServerWorker:
    """One worker of a server: it trains, pushes a fragment after each phase, and continues from the replies.

    Args:
        spans: the fragments, as slices of the learner's flat vector.
        starts: a starting point for each fragment.
        overlap: whether it continues training while a reply is in flight, instead of waiting.
    """

    def __init__(
        self,
        learner: Learner,
        spans: Sequence[tuple[int, int]],
        starts: Mapping[int, StartingPoint],
        *,
        overlap: bool = False,
    ) -> None:
        self.learner, self.spans, self.overlap = learner, spans, overlap
        self.waits_for: int | None = None
        """The fragment whose reply it waits for; None while it trains."""
        self._held = {p: self._start_from(p, start) for p, start in starts.items()}
        self._inbox: dict[int, StartingPoint] = {}  # arrived during a phase, used when it ends

    def train(self, number: int) -> tuple[Report, Push | None]:
        """Trains the local phase of this number; returns the report, and the push that follows it, if any."""
        report = self.learner.local_phase(number)
        for q, held in self._held.items():
            steps = held.steps + self.learner.local_steps
            self._held[q] = held._replace(tokens=held.tokens + report.tokens, steps=steps)
        p, received = number % len(self.spans), self._inbox
        self._inbox = {}
        for q, start in received.items():
            self._held[q] = self._start_from(q, start)
        if self._held[p].unanswered:
            self.waits_for = p  # the last push of this fragment has had no reply yet
            return report, None
        if p in received:
            return report, None  # no training since its last push
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
        """Drops unused replies; to continue, the worker needs starting points of all fragments."""
        self._inbox, self.waits_for = {}, len(self.spans) - 1

    def state(self) -> ServerWorkerState:
        """The current starting points, and the work since."""
        return ServerWorkerState(dict(self._held), dict(self._inbox), self.waits_for)

    def restore(self, state: ServerWorkerState) -> None:
        """Continues from a state; the learner has its own. Raises ValueError when it does not fit."""
        for p, start in [*((p, one.start) for p, one in state.held.items()), *state.inbox.items()]:
            if p not in self._held:
                raise ValueError(f"a starting point of fragment {p}, of {len(self.spans)}")
            must_fit([start.x], [self._held[p].start.x])
        if len(state.held) != len(self.spans) or state.waits_for not in (None, *self._held):
            raise ValueError(f"{len(state.held)} starting points, and it waits for fragment {state.waits_for}")
        self._held = {p: one._replace(start=self._here(one.start)) for p, one in state.held.items()}
        self._inbox, self.waits_for = dict(state.inbox), state.waits_for

    def _start_from(self, p: int, start: StartingPoint) -> _Contribution:
        a, b = self.spans[p]
        start = self._here(start)
        self.learner.x[a:b].copy_(start.x)
        return _Contribution(start, 0, 0, unanswered=False)

    def _here(self, start: StartingPoint) -> StartingPoint:
        """A starting point moved to the learner's device; messages and checkpoints are on the host."""
        return start._replace(x=start.x.to(self.learner.x.device))

    def _push(self, p: int) -> Push:
        held, (a, b) = self._held[p], self.spans[p]
        self._held[p] = held._replace(unanswered=True)
        return Push(p, held.start.x - self.learner.x[a:b], held.start.updates, held.tokens, held.steps)
