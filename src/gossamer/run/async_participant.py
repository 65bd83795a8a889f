"""One real worker that waits for nobody: what gossip without waiting and meetings have in common."""

import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.clock import Phase
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.events import EventWriter
from gossamer.record.files import worker_suffix
from gossamer.record.folder import RunFolder
from gossamer.record.order import Finished, OrderWriter
from gossamer.record.progress import say
from gossamer.run.config import RunConfig, digest, dump
from gossamer.run.evaluate import Probe
from gossamer.run.journal import Journal, log_phase
from gossamer.run.meeting import Seat
from gossamer.run.replica import LocalPhase, Replica
from gossamer.run.seconds import Stopwatch
from gossamer.run.serve_protocol import HERE
from gossamer.run.standings import say_changes
from gossamer.run.task import Task
from gossamer.run.train import end_round
from gossamer.transport.calling import CallTransport
from gossamer.transport.calls import Calls
from gossamer.transport.launch import device_of
from gossamer.tree import Tree, leaves

__all__ = ["AsyncParticipant", "due_round", "save_worker"]

PATIENCE_S = 1.0


class AsyncParticipant(ABC):
    """One worker with its model, data, records and connections.

    All workers together take `workers · run.steps` inner steps: nobody begins a local phase once those that it knows of have been
    begun. Whoever is done stays, so that the others can still hear or meet it, until all that are alive are done.

    Args:
        config: the run as in its file; `settled` has the local steps of its workers.
        again: whether what an interrupted run has left in the folder is void.
    """

    calls: Calls
    log: OrderWriter
    record: RunFolder
    events: EventWriter

    def __init__(
        self, config: RunConfig, settled: RunConfig, folder: Path, task: Task, seat: Seat, asked: threading.Event, *,
        again: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.settled, self.folder, self.slot = config, settled, folder, seat.members.me
        self._seat, self._asked, self._again = seat, asked, again
        self.device = device_of(config.run.device)
        self.replica = Replica(self.slot, settled, task, self.device)
        self._probe = Probe(config, task, self.device)
        self._known = dict(seat.members.entries)
        self.stopwatch = Stopwatch(self.slot)
        station = seat.station
        self.limit_s = min(station.timeout_s, station.deadline_s or station.timeout_s)
        """How long it waits for an answer."""
        self._began = time.perf_counter()
        self.transport: CallTransport

    @property
    @abstractmethod
    def x(self) -> Tensor:
        """Its parameters `[P]` as they are now."""

    @property
    @abstractmethod
    def outer(self) -> Tree:
        """The state of its method."""

    @abstractmethod
    def phase(self, number: int, round: int, alive: frozenset[int]) -> tuple[LocalPhase, float]:
        """Trains a local phase and does what follows it; returns its report and when it began."""

    @abstractmethod
    def end(self) -> float:
        """Ends, with `changed` held; returns the time that has passed for the method since its last event."""

    @property
    def busy(self) -> bool:
        """Whether it is amid something that another worker counts on."""
        return False

    def now_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._began

    def train(self) -> None:
        """Trains until all steps of the run are taken, or until it is asked to leave."""
        config, cut = self.config, 0 if self._again else None
        suffix = worker_suffix(self.slot)
        try:
            with (
                OrderWriter(self.folder, self.slot) as self.log,
                RunFolder(self.folder, dump(config), config.record, worker=self.slot, resume_round=cut) as self.record,
                EventWriter(
                    self.folder, network=HERE, workers=config.workers, suffix=suffix, resume_round=cut
                ) as self.events,
            ):
                self._began = time.perf_counter()
                self.stopwatch.start()
                self.transport = CallTransport(self._seat.members, self._seat.station, self.calls)
                try:
                    self._train()
                finally:
                    self.transport.close()
        finally:
            self._seat.station.listener.close()

    def _train(self) -> None:
        with self.transport.changed:
            self.calls.closed = False
        journal = Journal(
            self.config, lambda: self.record, lambda: {"loss": self._probe.loss(self.x, self.replica.buffers)}, self._save,
            kind="validation",
        )  # fmt: skip
        number, round, report = 0, 0, None
        while not self._asked.is_set() and self._claims(number):
            alive = self.transport.begin_phase(number)
            self._known = say_changes(self._known, self.transport, round=round)
            report, start_s = self.phase(number, round, alive)
            self.stopwatch.phase(report.compute_s)
            phase = Phase(start_s, self.now_s(), self.slot, number, report)
            log_phase(self.record, self.events, round, phase, self.replica.local_steps)
            number += 1
            reached = self._rounds_over(number)
            if reached > round:
                self.record.log_seconds(self.stopwatch.round(round))
            if due := due_round(self.config, round, reached):
                end_round(journal, self.replica, due, report, f" after {number} phases")
            round = reached
        self.transport.begin_phase(number)
        left = self._asked.is_set()
        self._stay(left)
        why = "left" if left and self._claims(number) else "finished"
        finished = self.config.rounds if why == "finished" else round
        with self.transport.changed:
            self.log.write(Finished(why, finished, self.end(), self.now_s()))
        self.record.log_seconds(self.stopwatch.round(round))
        if why == "finished":
            end_round(journal, self.replica, finished, report, f" after {number} phases")
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
        begun = number * self.settled.local_steps_of(self.slot)
        for slot, (ended, trains) in self.transport.phases().items():
            if slot != self.slot:
                begun += (ended + trains) * self.settled.local_steps_of(slot)
        return begun < self.config.workers * self.config.run.steps

    def _rounds_over(self, number: int) -> int:
        """Rounds of the run that are over, as far as this worker knows: the steps of all, over those of a round."""
        ended = {slot: ended for slot, (ended, _) in self.transport.phases().items()} | {self.slot: number}
        steps = sum(count * self.settled.local_steps_of(slot) for slot, count in ended.items())
        return min(steps // (self.config.workers * self.settled.full_steps), self.config.rounds - 1)

    def _save(self, finished: int) -> None:
        with self.transport.changed:
            x, outer = self.x, self.outer
        save_worker(self.config, self.folder, finished, self.replica, x, outer)


def due_round(config: RunConfig, before: int, reached: int) -> int:
    """The last of the rounds that have ended since `before` after which something is due; 0 for none."""
    run = config.run
    over = range(before + 1, reached + 1)
    return max((r for r in over if config.due(run.eval_every, r) or config.due(run.checkpoint_every, r)), default=0)


def save_worker(config: RunConfig, folder: Path, finished: int, replica: Replica, x: Tensor, outer: Tree) -> None:
    """Saves one worker after so many rounds of the run."""
    state: dict[str, Any] = {"x": x, "outer": leaves(outer), **replica.state(), "steps_taken": replica.steps_taken}
    line = Lineage(digest(config))
    checkpoint.save(folder / "checkpoints", finished, replica.index, state, digest=line)
