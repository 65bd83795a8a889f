"""n workers in one process over virtual time: the counterpart of `synchronous` for asynchronous methods.

Real models train, and seconds are those of one of the run's networks. A run ends after `workers · run.steps` inner steps of all
workers together, the same number of tokens as a run in rounds. A round ends when one synchronous round's worth of inner
steps has been taken. Validations, checkpoints and the learning-rate schedule count these rounds.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from gossamer.clock import Absence, GossipRun, LoopOptions, PairRun, Phase, Record, Relay, ServerRun, Transfer, Update
from gossamer.clock.saved import as_dicts, rebuilt, within
from gossamer.errors import CheckpointError, ConfigError, DataError
from gossamer.network.links import Network
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.lineage import Lineage
from gossamer.record.logs.events import EventWriter
from gossamer.record.machines import Threads
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.bookkeeping.evaluate import Probe, Probes, Result, assess, mean_buffers, mean_of, publish
from gossamer.run.bookkeeping.inputs import note_inputs
from gossamer.run.bookkeeping.journal import EventJournal, Journal, saver
from gossamer.run.bookkeeping.resume import History, Resume, resumed
from gossamer.run.bookkeeping.spent_seconds import EventSeconds
from gossamer.run.bookkeeping.which_round import Start, alone, begin_or_resume
from gossamer.run.config.resolved import InPairs, ResolvedRun, RunSettings, WithServer
from gossamer.run.simulated.threads import WorkerThreads
from gossamer.run.worker.numerics import threads_of
from gossamer.run.worker.replica import LocalPhase, Replica, must_start_alike
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import Task, on_device, task_of
from gossamer.transport.processes.launch import one_device
from gossamer.tree import leaves, must_fit

logger = logging.getLogger("gossamer")


class VirtualTimeSimulation:
    """A simulation over virtual time, a pure function of run file and seed. It holds files and threads only while
    `opened`.

    Args:
        recorded: see `gossamer.run.simulated.simulate.engine_of`.
    Raises: ConfigError, PairingError, DataError and CheckpointError.
    Cost: parameters, gradients and inner state of every worker, and the method's own state.
    """

    _record: RunFolder
    _log: EventWriter

    def __init__(self, run: ResolvedRun, folder: Path, *, resume: Resume = False, recorded: Path | None = None) -> None:
        assert run.event_driven and run.network is not None and run.network_name is not None
        self.run, self.folder, self._name = run, folder, run.network_name
        for sentence in run.warnings:
            logger.warning(sentence)
        device, self._tally = one_device(run.loop.device), _Tally(run)
        self._threads = threads_of(run, recorded or (folder if resume else None))
        self.task, self._worker_threads = task_of(run), WorkerThreads(device, run, self._threads)
        self._learners = [_Learner(i, run, self.task, device, self._tally, self._threads) for i in range(run.workers)]
        must_start_alike(self._learners)
        for learner in self._learners:
            learner.turns = self._worker_threads.turns
        self._loop = _loop(run, run.network, self._learners)
        self._device = torch.device("cpu") if isinstance(self._loop, ServerRun) else device
        """The device of everything but the learners: a server computes and is scored on the host, as real ones are."""
        probe = Probe(run, self.task, self._device)
        self._pending: deque[Record] = deque()
        start, lineage, saved = _started(Store(run, folder), self.task, resumed(run, folder, resume))
        save = saver(lineage, folder, lambda: _snapshots(self._loop, run.workers, self._state()))
        self._journal = Journal(run, lambda: self._record, lambda: self._assessed(probe), save)
        self._events = EventJournal(self._journal, lambda: self._log, EventSeconds(run.workers, self._name))
        self._busy_s, self.finished, self._cut = 0.0, start.round, start.cut
        if saved is not None:
            self._restore(saved)
        self._tokens_before = self._events.tokens

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the files of the run and starts the threads, which may compute local phases ahead of virtual time."""
        run, cut = self.run, self._cut
        with (
            RunFolder(
                self.folder,
                run.document,
                run.record,
                resume_round=cut,
                threads=(self._threads, run.owners.stop),
                computes=self.finished < run.rounds,
            ) as self._record,
            EventWriter(self.folder, network=self._name, workers=run.workers, resume_round=cut) as self._log,
            self._worker_threads.opened(),
        ):
            note_inputs(run, self.task, self.folder, None)
            for learner in self._learners:
                learner.pool = (
                    self._worker_threads.pool
                    if self._worker_threads.count > 1 and _may_run_ahead(run, learner)
                    else None
                )
            if self.finished == 0:
                self._events.begin()
            yield
            self._cut = self.finished

    def advance(self) -> None:
        """Advances to the end of the next round. Raises TrainingError when a number is not finite."""
        began, steps = time.perf_counter(), [learner.local_steps for learner in self._learners]
        self._events.catch_up()  # one event may end several rounds, and a checkpoint be of the first
        while self._events.round == self.finished:
            if self._pending:
                self._events.log(self._pending.popleft(), self._loop.time_s, steps)
            elif (records := self._loop.step()) is not None:
                self._pending.extend(records)
            else:
                self._events.end()
        self.finished = self._events.round
        self._busy_s += time.perf_counter() - began

    def save(self) -> None:
        """Saves the complete state of the run."""
        self._journal.save(self.finished)

    def result(self) -> Result:
        """The figures of the rounds so far; after the last, the model is published."""
        events = self._events
        if self.finished == self.run.rounds and self.run.record.export:
            x, buffers = _model(self._loop), mean_buffers(self.buffers())
            publish(self.run, self.task, x, self.folder, buffers, finished=self.finished, loss=events.loss)
        speed = (events.tokens - self._tokens_before) / self._busy_s if self._busy_s else 0.0
        return Result(events.loss, events.tokens, speed, {self._name: events.time_s})

    def models(self) -> list[Tensor]:
        """The parameters of each worker, or of the server."""
        return [self._loop.model()] if isinstance(self._loop, ServerRun) else self._loop.models()

    def buffers(self) -> list[list[Tensor]]:
        """The buffers of each worker's model."""
        return [learner.buffers for learner in self._learners]

    def _state(self) -> dict[str, Any]:
        """The state to resume from: the loop, the learners, the journal, and events not in it yet."""
        return {
            "loop": self._loop.state(),
            "learners": [learner.state() for learner in self._learners],
            "steps": self._tally.steps,
            "journal": self._events.state(),
            "pending": [[type(record).__name__, as_dicts(record)] for record in self._pending],
        }

    def _restore(self, saved: Any) -> None:
        """Continues from a checkpoint. Raises CheckpointError when it does not fit."""
        try:
            state = on_device(saved["run"], self._device)
            self._loop.restore(state["loop"])
            for learner, saved_learner in zip(self._learners, state["learners"], strict=True):
                learner.restore(saved_learner)
            self._tally.steps = int(state["steps"])
            self._events.restore(state["journal"])
            records = [rebuilt(_RECORDS[name], record) for name, record in state["pending"]]
            within(records, worker=len(self._learners))
            self._pending.extend(_reported(record) for record in records)
        except DataError:
            raise
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint in '{self.folder}' does not fit this run ({str(error).splitlines()[0]}); resume with the run "
                "file that wrote it"
            ) from None

    def _assessed(self, probe: Probe) -> dict[str, Any]:
        """The figures of a validation: of the server's model, or of the mean and each worker's own."""
        run, buffers = self._loop, self.buffers()
        probe.threads = self._threads.at(self.run.owners[0], self.finished)
        if isinstance(run, ServerRun):
            return {"loss": probe.loss(run.model(), mean_buffers(buffers))}
        return assess(run.models(), Probes([probe]), buffers)._asdict()


_Loop = ServerRun | PairRun | GossipRun
_RECORDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Absence, Phase, Transfer, Relay, Update)}


def _started(store: Store, task: Task, past: History | None) -> tuple[Start, Lineage, Any]:
    """The start of the run, the lineage of checkpoints, and the content of the round's; None at the start.

    Raises: CheckpointError and ConfigError.
    """
    run, folder = store.run, store.folder
    if past is not None and "run.steps" in past.changes:
        raise ConfigError(
            f"run.steps is {past.changes['run.steps'][0]} in '{folder}' and {run.loop.steps} now, but an asynchronous run "
            "keeps it, as its workers have shared its steps out; set it back, or start again with another --out"
        )
    start = begin_or_resume(store, task, past, alone(store, past, run.owners))
    saved = None
    if past is not None and start.round:
        saved = checkpoint.load(store.path, start.round, run.owners[0], past.lineage)
        # Before newer checkpoints are removed: real workers, which resume from their own newest round, would need them.
        if "run" not in saved:
            raise CheckpointError(
                f"'{folder}' holds checkpoints of real processes, and an asynchronous simulation continues from its own alone; "
                f"go on with gossamer train --resume {quote(str(folder))}, or repeat it with --replay"
            )
    return start, start.go_on(run.owners), saved


def _reported(record: Record) -> Record:
    """The record with the report of its phase."""
    return record._replace(report=rebuilt(LocalPhase, record.report)) if isinstance(record, Phase) else record


def _loop(run: ResolvedRun, network: Network, learners: "Sequence[_Learner]") -> _Loop:
    """The event loop of this run."""
    options = LoopOptions(
        absences=run.absences,
        codec=run.method.codec,
        seed=run.seed,
        budget=run.workers * run.loop.steps,
        begins=lambda worker, number: learners[worker].begin(number),
    )
    match run.method:
        case WithServer(rule=rule):
            spans, overlap = learners[0].spans, run.events.overlap
            return ServerRun(rule, learners, network, spans=spans, overlap=overlap, options=options)
        case InPairs(rule=rule, rates=rates):
            return PairRun(rule, learners, network, rates, options)
        case Method(rule=rule, topology=topology):
            return GossipRun(rule, topology, learners, network, options)


def _may_run_ahead(run: RunSettings, learner: "_Learner") -> bool:
    """Whether threads may compute local phases of a worker ahead of virtual time.

    A phase is lost if its worker leaves during it, gossip reads parameters in the middle of a phase, and a validation buffers.
    """
    return run.kind != "no waiting" and not run.events.absences and not learner.buffers


class _Tally:
    """The progress of the run."""

    def __init__(self, run: RunSettings) -> None:
        self.steps, self._per_round = 0, run.workers * run.full_steps

    @property
    def rounds(self) -> int:
        """Completed rounds, by the phases that have ended."""
        return self.steps // self._per_round


class _Learner(Replica):
    """A replica whose local phase may be computed before the virtual time at which it ends."""

    def __init__(
        self, index: int, run: RunSettings, task: Task, device: torch.device, tally: _Tally, threads: Threads
    ) -> None:
        super().__init__(index, run, task, device)
        self._tally, self._threads_by_round = tally, threads
        self.pool: Executor | None = None
        """Threads that compute phases ahead; None to compute each when it ends."""
        self._ahead: Future[LocalPhase] | None = None

    def begin(self, number: int) -> None:
        """Begins a phase, which alone accesses x until it ends."""
        self.round = self._tally.rounds
        self.threads = self._threads_by_round.at(self.index, self.round)
        if self.pool is not None:
            self._ahead = self.pool.submit(super().local_phase, number)

    def state(self) -> dict[str, Any]:
        """As `Replica.state`, with parameters and position in the run. Cost: waits for a phase that is computed ahead."""
        ahead = None if self._ahead is None else as_dicts(self._ahead.result())
        place = {"x": self.x, "round": self.round, "steps_taken": self.steps_taken, "ahead": ahead}
        return {**super().state(), **place}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a saved state. Raises CheckpointError, KeyError and ValueError when it does not fit."""
        must_fit([state["x"]], [self.x])
        self.x.copy_(state["x"])
        super().restore(state)
        self.round, self.steps_taken = int(state["round"]), int(state["steps_taken"])
        if state["ahead"] is not None:
            self._ahead = Future()
            self._ahead.set_result(rebuilt(LocalPhase, state["ahead"]))

    def local_phase(self, round: int) -> LocalPhase:
        """The inner steps of a phase, which ends now."""
        phase = super().local_phase(round) if self._ahead is None else self._ahead.result()
        self._ahead = None
        self._tally.steps += self.local_steps
        return phase


def _model(run: _Loop) -> Tensor:
    return run.model() if isinstance(run, ServerRun) else mean_of(run.models())


def _snapshots(run: _Loop, workers: int, state: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The snapshots to save by owner, the first with the state of the whole run; the server is last."""
    if isinstance(run, ServerRun):
        return [(workers, {"x": run.model(), "outer": leaves(tuple(run.states())), "run": state})]
    return [(i, {"x": x, "run": state} if i == 0 else {"x": x}) for i, x in enumerate(run.models())]
