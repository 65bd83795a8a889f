"""One real worker that waits for nobody: what gossip without waiting and meetings have in common."""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

from torch import Tensor

from gossamer.clock import Phase
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.folder import RunFolder
from gossamer.record.logs.events import EventWriter
from gossamer.record.logs.order import Entered, Finished, OrderWriter
from gossamer.record.packed import cold, frozen
from gossamer.record.progress import say
from gossamer.record.whole_files import worker_suffix
from gossamer.run.asynchronous.async_state import AsyncSeat, Core, adopt, content_of, phases_behind, state_of
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.journal import Journal, log_phase
from gossamer.run.bookkeeping.spent_seconds import Stopwatch, recorded_s
from gossamer.run.bookkeeping.text_read import tell_text
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.participant.agreement import HERE
from gossamer.run.participant.membership_log import say_changes
from gossamer.run.participant.seat import addresses_in
from gossamer.run.participant.state_transfer import give_state, take_state
from gossamer.run.worker.replica import LocalPhase, Replica
from gossamer.run.worker.task import Task
from gossamer.transport.elastic.call_transport import CallTransport
from gossamer.transport.elastic.calls import Calls
from gossamer.transport.elastic.members import MemberStatus
from gossamer.transport.elastic.newcomer import Handover
from gossamer.transport.processes.launch import device_of
from gossamer.transport.sockets.channel import Channel

__all__ = ["AsyncParticipant", "due_round", "save_state"]

PATIENCE_S = 1.0


class AsyncParticipant(ABC, Generic[Core]):
    """One worker with its model, data, records and connections.

    All workers together take `workers · run.steps` inner steps: nobody begins a local phase once those that it knows of have been
    begun. Whoever is done stays, so that the others can still hear or meet it, until all that are alive are done.

    Cost: besides the model a copy of it with its outer and inner state, as of the last local phase, for newcomers.
    """

    calls: Calls
    core: Core
    log: OrderWriter
    record: RunFolder
    events: EventWriter
    transport: CallTransport
    stopwatch: Stopwatch
    _journal: Journal

    def __init__(self, config: ResolvedRun, folder: Path, task: Task, seat: AsyncSeat, asked: threading.Event) -> None:
        self.config, self.folder, self.slot = config, folder, seat.members.me
        self._seat, self._asked = seat, asked
        self.device = device_of(config.run.device)
        self.replica = Replica(self.slot, config, task, self.device)
        self._probe = Probe(config, task, self.device)
        self._known = dict(seat.members.entries)
        endpoint = seat.endpoint
        self.limit_s = min(endpoint.timeout_s, endpoint.deadline_s or endpoint.timeout_s)
        """How long it waits for an answer."""
        self._began = time.perf_counter()
        self._budget = config.workers * config.run.steps
        self._held: dict[int, int] = {}
        """Inner steps of other slots that its parameters contain."""
        self._state: dict[str, Any] = {}
        """As of the end of its last local phase."""
        self._kept, self._ready = Handover(0, bytes, cold), threading.Event()

    @property
    def x(self) -> Tensor:
        """Its parameters `[P]` as they are now."""
        return self.core.x

    def begin(self) -> None:
        """Begins, right before others can hear or meet it."""
        return

    @abstractmethod
    def phase(self, number: int, round: int, alive: frozenset[int]) -> tuple[LocalPhase, float]:
        """Trains a local phase, does what follows it and calls `mark`; returns its report and when it began."""

    @abstractmethod
    def end(self) -> float:
        """Ends, with `changed` held; returns the time that has passed for the method since its last event."""

    @property
    def busy(self) -> bool:
        """Whether it is amid something that another worker counts on."""
        return False

    @property
    def life(self) -> int:
        """The number of this process."""
        return self.calls.life

    def now_s(self) -> float:
        """Seconds since it began, or since the first process that wrote these files did."""
        return time.perf_counter() - self._began

    def holds(self, slot: int, steps: int) -> None:
        """Notes that its parameters contain so many inner steps of another slot, as that one says."""
        self._held[slot] = max(min(steps, self._budget), self._held.get(slot, 0))
        self.transport.holds(slot, self._held[slot])

    def mark(self, phases: int) -> None:
        """A checkpoint or a newcomer gets the state as it is now, with so many local phases of its slot behind it.

        Called where nothing else changes it, by the thread that trains.
        """
        source = self.slot, self.life, self.log.place
        self._state = content_of(self.core, self.replica, phases=phases, source=source, held=self._held)

    def train(self) -> None:
        """Trains until all steps of the run are taken, or until it is asked to leave."""
        seat = self._seat
        try:
            self.transport = CallTransport(seat.members, seat.endpoint, self.calls, host=self._host)
            self.transport.redial.addresses = lambda: addresses_in(self.folder, self.config, seat.endpoint.run)
            failed = True
            try:
                begun = self._begin()
                with self._recording(begun):
                    self._train(begun)
                failed = False
            finally:
                self.transport.close(leaves=not failed)
        finally:
            seat.endpoint.listener.close()

    @contextlib.contextmanager
    def _recording(self, begun: Entered) -> Iterator[None]:
        """Opens the record, and drops what is void of it."""
        config, folder, slot = self.config, self.folder, self.slot
        cut, before = begun.round if self._seat.goes_on else None, begun.number * self.replica.local_steps
        before_s = recorded_s(folder, slot, cut)
        with (
            RunFolder(  # first: it refuses a folder that holds another run
                folder, config.document, config.record, worker=slot, resume_round=cut,
                void=lambda line: line.get("kind") == "train" and line.get("step") not in range(before + 1),
            ) as self.record,
            OrderWriter(folder, slot, life=self.life, goes_on=begun != Entered(0, 0, None, 0.0)) as self.log,
            EventWriter(
                folder, network=HERE, workers=config.workers, suffix=worker_suffix(slot), resume_round=cut,
                void=lambda line: line["event"] == "phase" and line["number"] >= begun.number,
            ) as self.events,
        ):  # fmt: skip
            tell_text(self.record, self.replica.task.data)
            self._journal = Journal(
                config, lambda: self.record, lambda: {"loss": self._probe.loss(self.x, self.replica.buffers)}, self._save,
                kind="validation",
            )  # fmt: skip
            if (begun.number, begun.source) == (0, None):
                self._journal.begin(worker=slot)
            self._began = time.perf_counter() - before_s
            self.stopwatch = Stopwatch(slot, before_s)
            self.log.write(begun._replace(time_s=before_s))
            try:
                yield
            finally:  # else the thread of a connection would write into files that are closed
                with self.transport.changed:
                    self.calls.stop()

    def _begin(self) -> Entered:
        """Takes over the state that this process begins with."""
        seat, members, local = self._seat, self._seat.members, self.config.local_steps_of(self.slot)
        joins, state = members.own.status == MemberStatus.JOINING, seat.state
        if joins:
            self.transport.first_round(self.config.run.timeout_s)
        held = min(members.own.steps, self._budget)
        number = phases_behind(0 if state is None else state.phases, held, local)
        if joins and state is not None and self._rounds_over(number) > state.after + self.config.run.rejoin_rounds:
            state = None
        if state is None and seat.donor is not None:
            offer, content = take_state(members, seat.endpoint, first=seat.donor, behind=0)
            state, number = state_of(content, offer.after), phases_behind(0, held, local)
        if state is None:
            return Entered(number, 0, None, 0.0)
        adopt(state, self.core, self.replica)
        own, donor = state.source[0] == self.slot, state.source[0]
        self._held = state.held | ({} if own else {donor: state.phases * self.config.local_steps_of(donor)})
        round = state.after if own else max(state.after, self._rounds_over(number))
        if joins:
            whose = "its own checkpoint" if own else f"the state of worker {donor}"
            say(
                f"worker {self.slot} joins after {number} local phases of its slot, with {whose} after round {state.after}"
            )
        return Entered(number, round, state.source, 0.0)

    def _train(self, begun: Entered) -> None:
        number = begun.number
        self.mark(number)
        round = max(begun.round, self._rounds_over(number))
        self._keep(round)
        self._ready.set()
        self.transport.begin_phase(number)
        with self.transport.changed:
            self.calls.steps = number * self.config.local_steps_of(self.slot)
            self.begin()
            self.calls.closed = False
        if self.transport.members.own.status == MemberStatus.JOINING:
            self.transport.declare(MemberStatus.ALIVE, round)
        while not self._asked.is_set() and self._claims(number):
            alive = self.transport.begin_phase(number)
            self._known = say_changes(self._known, self.transport, round=round, done=self.calls.done)
            report, start_s = self.phase(number, round, alive)
            self.stopwatch.phase(report.compute_s)
            phase = Phase(start_s, self.now_s(), self.slot, number, report)
            log_phase(self.record, self.events, round, phase, self.replica.local_steps)
            number += 1
            reached = max(round, self._rounds_over(number))
            self._keep(reached)
            if reached > round:
                self.record.log_seconds(self.stopwatch.round(round))
            if due := due_round(self.config, round, reached):
                self._journal.end_own_round(self.replica, due)
            round = reached
        self._leave(number, round)

    def _leave(self, number: int, round: int) -> None:
        """Ends after so many local phases: stays for the others, saves and says so."""
        self.transport.begin_phase(number)
        left = self._asked.is_set()
        self._stay(left)
        why = "left" if left and self._claims(number) else "finished"
        finished = self.config.rounds if why == "finished" else round
        with self.transport.changed:
            self.log.write(Finished(why, finished, self.end(), self.now_s()))
            self.mark(number)
        self.record.log_seconds(self.stopwatch.round(round))
        if why == "finished":
            self._journal.end_own_round(self.replica, finished)
        else:
            self._save(finished)
            say(f"worker {self.slot} leaves after {number} local phases, as it was asked to, and has saved its state")

    def _stay(self, left: bool) -> None:
        """Stays until everybody who is alive has taken the last step; who leaves ends what it is amid of."""
        with self.transport.changed:
            if not left:
                self.calls.finish()
                self.transport.flush()
                while not self.calls.alone and not self._asked.is_set():
                    self.transport.changed.wait(PATIENCE_S)
            self.calls.closed = True
            while self.busy:
                self.transport.changed.wait(PATIENCE_S)

    def _claims(self, number: int) -> bool:
        """Whether steps are left for the phase of this number, as far as this worker knows."""
        begun = number * self.config.local_steps_of(self.slot)
        for slot, one in self.transport.phases().items():
            if slot != self.slot:
                local = self.config.local_steps_of(slot)
                begun += (phases_behind(one.ended, one.steps, local) + one.trains) * local
        return begun < self._budget

    def _rounds_over(self, number: int) -> int:
        """Rounds of the run that are over, as far as this worker knows: the steps of all, over those of a round."""
        steps = number * self.config.local_steps_of(self.slot)
        for slot, one in self.transport.phases().items():
            if slot != self.slot:
                local = self.config.local_steps_of(slot)
                steps += phases_behind(one.ended, one.steps, local) * local
        return min(steps // (self.config.workers * self.config.full_steps), self.config.rounds - 1)

    def _keep(self, after: int) -> None:
        """Keeps the state of the last local phase for newcomers, when so many rounds are over."""
        self._kept = Handover(after, frozen(self._state), cold)

    def _host(self, channel: Channel) -> None:
        if self._ready.wait(self._seat.endpoint.timeout_s):  # before, it has no state, and who asks may ask another
            give_state(channel, self.transport, self._seat.endpoint, lambda: self._kept)

    def _save(self, finished: int) -> None:
        save_state(self._seat.line, self.folder, finished, self.slot, self._state)


def due_round(config: RunSettings, before: int, reached: int) -> int:
    """The last of the rounds that have ended since `before` after which something is due; 0 for none."""
    run = config.run
    over = range(before + 1, reached + 1)
    return max((r for r in over if config.due(run.eval_every, r) or config.due(run.checkpoint_every, r)), default=0)


def save_state(line: Lineage, folder: Path, finished: int, slot: int, state: dict[str, Any]) -> None:
    """Saves one worker after so many rounds of the run."""
    checkpoint.save(folder / "checkpoints", finished, slot, state, digest=line)
