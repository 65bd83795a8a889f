"""Workers around a server that takes what they send as it comes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.asynchronous import ServerRule, pack
from gossamer.asynchronous.fragments import put, take
from gossamer.clock.agenda import (
    ARRIVAL,
    DECISION,
    PHASE,
    REPLY,
    SERVER,
    Absence,
    Agenda,
    Begins,
    Budget,
    Learner,
    Links,
    Phase,
    Record,
    Transfer,
    Update,
    plan_absences,
)
from gossamer.clock.desk import Desk, Greeting, Push, Seat
from gossamer.codecs import Codec, exact
from gossamer.codecs.message import round_trip
from gossamer.errors import ConfigError
from gossamer.network.links import Network
from gossamer.tree import nbytes

__all__ = ["ServerRun"]


@dataclass
class _Presence:
    """Whether a worker is there."""

    present: bool = True
    epoch: int = 0  # counts leaves and returns: what was planned in an earlier one is void
    trains: bool = False


@dataclass
class _Queue:
    """Pushes of one fragment that wait for their window to close, each with its worker and that one's epoch."""

    pushes: list[tuple[int, int, Push]] = field(default_factory=list)
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
        codec: what pushes go through, drawing from `seed`; starting points are sent as they are.
        budget: inner steps of all workers together; the run ends when all of them have been absorbed.
        begins: called when a local phase begins, so that a driver may compute it meanwhile.
    Raises: ConfigError for options that do not fit together.
    Cost: the rule's state at the server; one starting point per worker beside its model.
    """

    def __init__(
        self, rule: ServerRule, learners: Sequence[Learner], network: Network, *, fragments: int = 1, overlap: bool = False,
        absences: Sequence[Absence] = (), codec: Codec | None = None, seed: int = 0, budget: float = math.inf,
        begins: Begins = lambda worker, number: None,
    ) -> None:  # fmt: skip
        if overlap and fragments < 2:
            raise ConfigError(
                f"overlap = {overlap} with fragments = {fragments} would throw away all that is learned meanwhile; "
                "take at least 2 fragments, or let workers wait"
            )
        self.rule, self.learners = rule, learners
        self.fragments = pack(learners[0].layout, fragments)
        self._codec, self._seed, self._budget = codec or exact(), seed, Budget(budget)
        self._links, self._begins = Links(network, len(learners)), begins
        self._agenda = Agenda()
        self._desks = [Desk(rule, take(learners[0].x, fragment), fragment.layout) for fragment in self.fragments]
        self._queues = [_Queue() for _ in self.fragments]
        greetings = [desk.greet() for desk in self._desks]
        self._seats = [Seat(learner, self.fragments, greetings, overlap=overlap) for learner in learners]
        self._presence = [_Presence() for _ in learners]
        plan_absences(self._agenda, absences, len(learners), self._change)
        for i in range(len(learners)):
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

    def _begin_phase(self, i: int) -> None:
        start_s, seat, steps = self.time_s, self._seats[i], self.learners[i].local_steps
        self._presence[i].trains = self._budget.claim(steps)
        if self._presence[i].trains:
            end_s = start_s + self._links.phase_s(i, seat.phases, steps)
            self._agenda.plan(end_s, PHASE, i, partial(self._end_phase, i, self._presence[i].epoch, start_s))
            self._begins(i, seat.phases)

    def _end_phase(self, i: int, epoch: int, start_s: float) -> list[Record]:
        seat = self._seats[i]
        if epoch != self._presence[i].epoch:
            return []
        self._presence[i].trains = False
        number, report, push = seat.train()
        if push is not None:
            message, size = round_trip(self._codec, push.message, self._seed, i, number, push.fragment)
            arrives_s = self.time_s + self._links.transfer_s(i, SERVER, size)
            action = partial(self._arrive, i, epoch, push._replace(message=message), size, self.time_s)
            self._agenda.plan(arrives_s, ARRIVAL, i, action)
        if seat.waits_for is None:
            self._begin_phase(i)
        return [Phase(start_s, self.time_s, i, number, report)]

    def _arrive(self, i: int, epoch: int, push: Push, size: int, start_s: float) -> list[Record]:
        p = push.fragment
        arrived = Transfer("push", start_s, self.time_s, i, SERVER, p, size)
        if self.rule.window is None:
            return [arrived, self._absorb(p, [(i, epoch, push)])]
        self._queues[p].pushes.append((i, epoch, push))
        self._consider(p)
        return [arrived]

    def _consider(self, p: int) -> None:
        """Lets the window of a fragment close after the grace period if its quorum is there."""
        window, queue = self.rule.window, self._queues[p]
        if window is None or queue.closing or not queue.pushes:
            return
        if len(queue.pushes) >= min(window.quorum, sum(worker.present for worker in self._presence)):
            queue.closing = True
            self._agenda.plan(self.time_s + window.grace_s, DECISION, p, partial(self._close, p))

    def _close(self, p: int) -> list[Record]:
        pushes, self._queues[p] = self._queues[p].pushes, _Queue()
        return [self._absorb(p, sorted(pushes, key=lambda waiting: waiting[0]))] if pushes else []

    def _close_all(self) -> list[Record]:
        return [record for p in range(len(self.fragments)) for record in self._close(p)]

    def _absorb(self, p: int, pushes: Sequence[tuple[int, int, Push]]) -> Update:
        ages = self._desks[p].absorb([(i, push) for i, _, push in pushes])
        for i, epoch, _ in pushes:
            if epoch == self._presence[i].epoch:
                self._reply(i, (p,))
        return Update(self.time_s, p, tuple(i for i, _, _ in pushes), ages)

    def _reply(self, i: int, parts: Sequence[int]) -> None:
        greetings = {p: self._desks[p].greet() for p in parts}
        takes_s = self._links.transfer_s(SERVER, i, sum(nbytes(greeting.start) for greeting in greetings.values()))
        action = partial(self._receive, i, self._presence[i].epoch, greetings, self.time_s)
        self._agenda.plan(self.time_s + takes_s, REPLY, i, action)

    def _receive(self, i: int, epoch: int, greetings: dict[int, Greeting], start_s: float) -> list[Record]:
        if epoch != self._presence[i].epoch:
            return []
        if self._seats[i].receive(greetings):
            self._begin_phase(i)
        return [
            Transfer("fetch", start_s, self.time_s, SERVER, i, p, nbytes(greeting.start))
            for p, greeting in greetings.items()
        ]

    def _change(self, absence: Absence) -> list[Record]:
        i, worker = absence.worker, self._presence[absence.worker]
        worker.present, worker.epoch = absence.change == "return", worker.epoch + 1
        self._seats[i].leave()
        if worker.trains:
            self._budget.give_back(self.learners[i].local_steps)
            worker.trains = False
        if worker.present:
            self._reply(i, range(len(self.fragments)))
        else:
            for p in range(len(self.fragments)):
                self._consider(p)  # fewer present workers need a smaller quorum
        return [absence]
