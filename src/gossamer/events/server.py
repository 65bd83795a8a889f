"""Workers around a server that takes what they send as it comes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.events.agenda import (
    ARRIVAL,
    DECISION,
    PHASE,
    REPLY,
    SERVER,
    Absence,
    Agenda,
    Learner,
    Links,
    Phase,
    Record,
    Transfer,
    Update,
    plan_absences,
)
from gossamer.network import Network
from gossamer.servers import Arrival, ServerRule, pack
from gossamer.servers.fragments import put, take
from gossamer.tree import nbytes

__all__ = ["ServerRun"]


class _Greeting(NamedTuple):
    """A starting point for one fragment, and how many updates the server had made of it."""

    start: Tensor
    updates: int


class _Push(NamedTuple):
    """A pseudo-gradient on its way to the server or waiting there."""

    worker: int
    epoch: int
    message: Tensor
    updates: int
    tokens: int
    steps: int


@dataclass
class _Held:
    """What a worker holds of one fragment: where it started from, and its work since."""

    greeting: _Greeting
    tokens: int = 0
    steps: int = 0
    away: bool = False  # pushed, and the reply has not arrived


@dataclass
class _Seat:
    """Where a worker of a server stands."""

    held: list[_Held]
    inbox: dict[int, _Greeting] = field(default_factory=dict)  # arrived in a phase, to be taken when it ends
    present: bool = True
    epoch: int = 0  # counts leaves and returns: what was planned in an earlier one is void
    phases: int = 0
    waits_for: int | None = None  # the fragment without which it does not go on


@dataclass
class _Desk:
    """What the server keeps of one fragment."""

    state: Any
    updates: int = 0
    pending: list[_Push] = field(default_factory=list)
    closing: bool = False


class ServerRun:
    """Workers that push pseudo-gradients to a server and fetch where to go on from, each at its own pace.

    After its k-th local phase a worker pushes fragment k mod `fragments`. It then waits for the reply, or with `overlap` goes
    on training and takes the reply at the end of the phase it arrived in; what it did meanwhile on that fragment is lost. A
    server with a window also closes it when nobody is left who could still come.

    A worker that leaves loses the phase it is in; its pushes on the way still count. When it returns it fetches all fragments.

    Args:
        learners: all start from the parameters of the first.
        network: links to the server, whose own costs nothing, and seconds of an inner step.
        fragments: parts of whole tensors that travel one by one, each with its own ages and state.
        overlap: needs at least two fragments.
    Raises: ConfigError for options that do not fit together.
    Cost: the rule's state at the server; one starting point per worker beside its model.
    """

    def __init__(
        self, rule: ServerRule, learners: Sequence[Learner], network: Network, *, fragments: int = 1, overlap: bool = False,
        absences: Sequence[Absence] = (),
    ) -> None:  # fmt: skip
        if overlap and fragments < 2:
            raise ConfigError(
                f"overlap = {overlap} with fragments = {fragments} would throw away all that is learned meanwhile; "
                "take at least 2 fragments, or let workers wait"
            )
        self.rule, self.learners, self.overlap = rule, learners, overlap
        self.fragments = pack(learners[0].layout, fragments)
        self._links = Links(network, len(learners))
        self._agenda = Agenda()
        self._desks = [_Desk(rule.init(take(learners[0].x, fragment))) for fragment in self.fragments]
        greetings = [self._greeting(p) for p in range(fragments)]
        self._seats = [_Seat([_Held(greeting) for greeting in greetings]) for _ in learners]
        plan_absences(self._agenda, absences, len(learners), self._change)
        for i, learner in enumerate(learners):
            for fragment, greeting in zip(self.fragments, greetings, strict=True):
                put(learner.x, fragment, greeting.start)
            self._begin_phase(i)

    @property
    def time_s(self) -> float:
        """The virtual time."""
        return self._agenda.time_s

    def model(self) -> Tensor:
        """The server's parameters `[P]`."""
        x = torch.empty_like(self.learners[0].x)
        for fragment, desk in zip(self.fragments, self._desks, strict=True):
            put(x, fragment, desk.state.x)
        return x

    def states(self) -> list[Any]:
        """The state of the rule for each fragment."""
        return [desk.state for desk in self._desks]

    def run(self, until_s: float = math.inf) -> Iterator[Record]:
        """What happens up to a virtual time, as it happens; may be stopped anywhere and called again."""
        return self._agenda.run(until_s, self._close_all)

    def _greeting(self, p: int) -> _Greeting:
        return _Greeting(self.rule.greet(self._desks[p].state), self._desks[p].updates)

    def _begin_phase(self, i: int) -> None:
        start_s, seat = self.time_s, self._seats[i]
        end_s = start_s + self.learners[i].local_steps * self._links.step_s[i]
        self._agenda.plan(end_s, PHASE, i, partial(self._end_phase, i, seat.epoch, start_s))

    def _end_phase(self, i: int, epoch: int, start_s: float) -> list[Record]:
        learner, seat = self.learners[i], self._seats[i]
        if epoch != seat.epoch:
            return []
        index, seat.phases = seat.phases, seat.phases + 1
        report = learner.local_phase(index)
        for held in seat.held:
            held.tokens += report.tokens
            held.steps += learner.local_steps
        p, received = index % len(self.fragments), seat.inbox
        seat.inbox = {}
        for q, greeting in received.items():
            self._take(i, q, greeting)
        if seat.held[p].away:
            seat.waits_for = p  # the last push of this fragment is still unanswered
        elif p not in received:
            self._push(i, p)
            seat.waits_for = None if self.overlap else p
        if seat.waits_for is None:
            self._begin_phase(i)
        return [Phase(start_s, self.time_s, i, index, report)]

    def _take(self, i: int, p: int, greeting: _Greeting) -> None:
        put(self.learners[i].x, self.fragments[p], greeting.start)
        self._seats[i].held[p] = _Held(greeting)

    def _push(self, i: int, p: int) -> None:
        seat = self._seats[i]
        held = seat.held[p]
        held.away = True
        message = held.greeting.start - take(self.learners[i].x, self.fragments[p])
        push = _Push(i, seat.epoch, message, held.greeting.updates, held.tokens, held.steps)
        takes_s = self._links.transfer_s(i, SERVER, nbytes(message))
        self._agenda.plan(self.time_s + takes_s, ARRIVAL, i, partial(self._arrive, push, p, self.time_s))

    def _arrive(self, push: _Push, p: int, start_s: float) -> list[Record]:
        arrived = Transfer("push", start_s, self.time_s, push.worker, SERVER, p, nbytes(push.message))
        if self.rule.window is None:
            return [arrived, self._absorb(p, [push])]
        self._desks[p].pending.append(push)
        self._consider(p)
        return [arrived]

    def _consider(self, p: int) -> None:
        """Lets the window of a fragment close after the grace period if its quorum is there."""
        window, desk = self.rule.window, self._desks[p]
        if window is None or desk.closing or not desk.pending:
            return
        if len(desk.pending) >= min(window.quorum, sum(seat.present for seat in self._seats)):
            desk.closing = True
            self._agenda.plan(self.time_s + window.grace_s, DECISION, p, partial(self._close, p))

    def _close(self, p: int) -> list[Record]:
        desk = self._desks[p]
        pushes, desk.pending, desk.closing = sorted(desk.pending, key=lambda push: push.worker), [], False
        return [self._absorb(p, pushes)] if pushes else []

    def _close_all(self) -> list[Record]:
        return [record for p in range(len(self.fragments)) for record in self._close(p)]

    def _absorb(self, p: int, pushes: Sequence[_Push]) -> Update:
        desk, layout, window = self._desks[p], self.fragments[p].layout, self.rule.window
        arrivals = [
            Arrival(push.worker, desk.updates - push.updates, push.tokens, push.steps, layout) for push in pushes
        ]
        message, oldest = pushes[0].message, max(arrivals, key=lambda arrival: arrival.age)
        if window is not None:
            message = window.merge([push.message for push in pushes], arrivals)
        desk.state = self.rule.absorb(desk.state, message, oldest)
        desk.updates += 1
        for push in pushes:
            if push.epoch == self._seats[push.worker].epoch:
                self._reply(push.worker, (p,))
        return Update(
            self.time_s, p, tuple(arrival.worker for arrival in arrivals), tuple(arrival.age for arrival in arrivals)
        )

    def _reply(self, i: int, parts: Sequence[int]) -> None:
        greetings = {p: self._greeting(p) for p in parts}
        takes_s = self._links.transfer_s(SERVER, i, sum(nbytes(greeting.start) for greeting in greetings.values()))
        action = partial(self._receive, i, self._seats[i].epoch, greetings, self.time_s)
        self._agenda.plan(self.time_s + takes_s, REPLY, i, action)

    def _receive(self, i: int, epoch: int, greetings: dict[int, _Greeting], start_s: float) -> list[Record]:
        seat = self._seats[i]
        if epoch != seat.epoch:
            return []
        if seat.waits_for is None:
            seat.inbox.update(greetings)
        else:
            for p, greeting in greetings.items():
                self._take(i, p, greeting)
        if seat.waits_for in greetings:
            seat.waits_for = None
            self._begin_phase(i)
        return [
            Transfer("fetch", start_s, self.time_s, SERVER, i, p, nbytes(greeting.start))
            for p, greeting in greetings.items()
        ]

    def _change(self, absence: Absence) -> list[Record]:
        seat = self._seats[absence.worker]
        seat.present, seat.epoch = absence.change == "return", seat.epoch + 1
        seat.inbox, seat.waits_for = {}, None
        if seat.present:
            everything = range(len(self.fragments))
            seat.waits_for = everything[-1]
            self._reply(absence.worker, everything)
        else:
            for p in range(len(self.fragments)):
                self._consider(p)  # fewer present workers need a smaller quorum
        return [absence]
