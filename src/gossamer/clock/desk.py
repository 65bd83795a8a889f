"""The two sides of a server method without any clock: the server's desk for one fragment, and the seat of one worker.

Virtual time and real processes both run these, so that what a message does is written once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gossamer.asynchronous import Arrival, Fragment, ServerRule
from gossamer.asynchronous.fragments import put, take
from gossamer.clock.agenda import Learner, Report
from gossamer.layout import Layout

__all__ = ["Desk", "Greeting", "Push", "Seat"]


class Greeting(NamedTuple):
    """A starting point for one fragment, and how many updates the server had made of it."""

    start: Tensor
    updates: int


class Push(NamedTuple):
    """A pseudo-gradient on its way to the server, or waiting there."""

    fragment: int
    phase: int
    """Number of the local phase after which it was pushed."""
    message: Tensor
    updates: int
    """Those the server had made when it sent the starting point."""
    tokens: int
    steps: int


class Desk:
    """What the server keeps of one fragment: the rule's state, and how many updates it has made."""

    def __init__(self, rule: ServerRule, x: Tensor, layout: Layout) -> None:
        self.rule, self.layout = rule, layout
        self.state = rule.init(x)
        self.updates = 0

    def greet(self) -> Greeting:
        """Where a worker is to start from now."""
        return Greeting(self.rule.greet(self.state), self.updates)

    def absorb(self, pushes: Sequence[tuple[int, Push]]) -> tuple[int, ...]:
        """One update of these pushes, each with its worker and in ascending order of them; returns their ages."""
        arrivals = [
            Arrival(worker, self.updates - push.updates, push.tokens, push.steps, self.layout)
            for worker, push in pushes
        ]
        message, oldest = pushes[0][1].message, max(arrivals, key=lambda arrival: arrival.age)
        if self.rule.window is not None:
            message = self.rule.window.merge([push.message for _, push in pushes], arrivals)
        self.state = self.rule.absorb(self.state, message, oldest)
        self.updates += 1
        return tuple(arrival.age for arrival in arrivals)


@dataclass
class _Held:
    """What a worker holds of one fragment: where it started from, and its work since."""

    greeting: Greeting
    tokens: int = 0
    steps: int = 0
    away: bool = False  # pushed, and the reply has not arrived


class Seat:
    """One worker of a server: it trains, pushes a fragment after each phase, and takes the replies.

    Args:
        greetings: one for each fragment.
        overlap: whether it goes on training while a reply is under way, instead of waiting.
        phases: local phases it has behind it.
    """

    def __init__(
        self, learner: Learner, fragments: Sequence[Fragment], greetings: Sequence[Greeting], *, overlap: bool = False,
        phases: int = 0,
    ) -> None:  # fmt: skip
        self.learner, self.fragments, self.overlap = learner, fragments, overlap
        self.phases = phases
        self.waits_for: int | None = None
        """The fragment without which it does not go on."""
        self._held: list[_Held] = [_Held(greeting) for greeting in greetings]
        self._inbox: dict[int, Greeting] = {}  # arrived in a phase, to be taken when it ends
        for p, greeting in enumerate(greetings):
            self._take(p, greeting)

    def train(self) -> tuple[int, Report, Push | None]:
        """One local phase: its number, its report, and what is pushed after it."""
        number, self.phases = self.phases, self.phases + 1
        report = self.learner.local_phase(number)
        for held in self._held:
            held.tokens += report.tokens
            held.steps += self.learner.local_steps
        p, received = number % len(self.fragments), self._inbox
        self._inbox = {}
        for q, greeting in received.items():
            self._take(q, greeting)
        if self._held[p].away:
            self.waits_for = p  # the last push of this fragment is still unanswered
            return number, report, None
        if p in received:
            return number, report, None  # nothing has been learned on it since
        self.waits_for = None if self.overlap else p
        return number, report, self._push(p, number)

    def receive(self, greetings: Mapping[int, Greeting]) -> bool:
        """Takes replies, now or at the end of the phase it is in; whether it goes on training now."""
        if self.waits_for is None:
            self._inbox.update(greetings)
            return False
        for p, greeting in greetings.items():
            self._take(p, greeting)
        if self.waits_for not in greetings:
            return False
        self.waits_for = None
        return True

    def leave(self) -> None:
        """Forgets what it waited for; it will need all fragments to go on."""
        self._inbox, self.waits_for = {}, len(self.fragments) - 1

    def _take(self, p: int, greeting: Greeting) -> None:
        put(self.learner.x, self.fragments[p], greeting.start)
        self._held[p] = _Held(greeting)

    def _push(self, p: int, number: int) -> Push:
        held = self._held[p]
        held.away = True
        message = held.greeting.start - take(self.learner.x, self.fragments[p])
        return Push(p, number, message, held.greeting.updates, held.tokens, held.steps)
