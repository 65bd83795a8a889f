"""n workers in one process, round by round: a research run with every worker's replica on one CPU or one GPU.

The workers' parameters are the rows of one `[n, P]` tensor, their models views of it and their inner optimizers untouched. A
pool of threads trains them, each with as many intra-op threads as the process of a worker has: on small models that is
faster than one process per worker, and each worker computes exactly what its own process would.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from gossamer.errors import DataError
from gossamer.network.inner_steps import InnerSteps
from gossamer.network.links import Network, jitter_factors
from gossamer.network.pacing import PaceNote, links_at, uplinks_bps
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder, read_metrics
from gossamer.record.lineage import Lineage
from gossamer.record.logs.pipeline_work import write_pipeline
from gossamer.record.logs.seconds import unmeasured
from gossamer.record.logs.stage_seconds import STAGES_FILE, stage_lines
from gossamer.record.logs.trace import read_trace
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.exchange import Each
from gossamer.rounds.loop import EVERYONE, Membership, finish_together
from gossamer.rounds.together import Together
from gossamer.run.bookkeeping.evaluate import (
    Assessment,
    Probe,
    Probes,
    Result,
    assess,
    mean_buffers,
    publish,
    trained_model_of,
)
from gossamer.run.bookkeeping.inputs import note_inputs
from gossamer.run.bookkeeping.journal import Journal, saved_when_unreadable
from gossamer.run.bookkeeping.resume import History, Resume, resumed
from gossamer.run.bookkeeping.spent_seconds import priced
from gossamer.run.bookkeeping.which_round import Start, alone, begin_or_resume
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.simulated.threads import WorkerThreads
from gossamer.run.worker.batched import Stacks
from gossamer.run.worker.numerics import threads_of
from gossamer.run.worker.replica import LocalPhase, Replica, must_start_alike, step_on_gradients
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.stages.recovery import recover_all
from gossamer.run.worker.stages.timing import in_stages, pipeline_work, stage_seconds
from gossamer.run.worker.task import Task, task_of
from gossamer.run.worker.worker import RoundReport, Segment, Worker
from gossamer.transport.contract import Transport
from gossamer.transport.memory import MemoryNetwork
from gossamer.transport.processes.launch import one_device

log = logging.getLogger("gossamer")


class Rounds:
    """A simulation in rounds. It trains while `opened`, and holds neither files nor threads otherwise.

    Args:
        recorded: see `gossamer.run.simulated.simulate.engine_of`.
    Raises: ConfigError, PairingError, DataError, CheckpointError.
    """

    _record: RunFolder

    def __init__(self, run: ResolvedRun, folder: Path, *, resume: Resume = False, recorded: Path | None = None) -> None:
        m = run.in_rounds
        for sentence in run.warnings:
            log.warning(sentence)
        self.run, self.folder, device = run, folder, one_device(run.loop.device)
        self.task, self._threads = task_of(run), threads_of(run, recorded or (folder if resume else None))
        probe = Probe(run, self.task, device)
        mailboxes, together = MemoryNetwork(run.workers), Together(run.workers)
        self.workers = make_workers(run, self.task, m, probe.x, mailboxes.transport, together)
        self._sends_per_round = m.sends_per_round
        start, lineage = _started(self.workers, Store(run, folder), resumed(run, folder, resume))
        self.finished, self._cut = start.round, start.cut
        self._worker_threads = WorkerThreads(device, run, self._threads)
        self._train = Stacks(self.workers, run.loop.batched).train if run.loop.batched > 1 else train_each
        for worker in self.workers:
            worker.replica.turns = self._worker_threads.turns
        probes = [probe, *(Probe(run, self.task, device) for _ in range(self._worker_threads.count - 1))]
        for one in probes:
            one.turns = self._worker_threads.turns
        self._all_probes, self._probes = probes, Probes(probes, self._worker_threads.each)
        self._journal = Journal(
            run,
            lambda: self._record,
            lambda: self._assessed()._asdict(),
            lambda finished: _save(self.workers, folder, finished, lineage, self._worker_threads.each),
        )
        self._before, self._busy_s = _tokens(self.workers), 0.0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the files of the run and starts the threads."""
        run = self.run
        self._take_threads()
        with (
            self._worker_threads.opened(),
            RunFolder(
                self.folder,
                run.document,
                run.record,
                resume_round=self._cut,
                traced_per_round=self._sends_per_round,
                threads=(self._threads, run.owners.stop),
                computes=self.finished < run.rounds,
            ) as self._record,
        ):
            note_inputs(run, self.task, self.folder, None)
            write_pipeline(self.folder, pipeline_work(run, self.workers[0].replica.layout))
            if self.finished == 0:
                self._journal.begin()
            yield
            self._cut = self.finished

    def advance(self) -> None:
        """Trains the next round. Raises TrainingError when a number is not finite; DataError when a stream cannot be read."""
        run, workers, round = self.run, self.workers, self.finished
        try:
            for worker in workers:
                worker.replica.read_ahead(round)
        except DataError as error:  # before any change in the round
            if self.finished == 0:
                raise
            self.save()
            raise DataError(saved_when_unreadable(error, self.folder, self.finished)) from error
        began, finished = time.perf_counter(), round + 1
        self._take_threads()
        reports = train_together(workers, round, self._worker_threads.each, self._train)
        self._busy_s += time.perf_counter() - began
        for worker, report in zip(workers, reports, strict=True):
            self._journal.log(worker, round, report)
        if run.network is not None and finished < run.rounds:
            _adapt(run.network, workers, round, reports)
        self._journal.end_round(finished, step=run.timetable.begin(finished), tokens=_tokens(workers))
        self.finished = finished

    def _take_threads(self) -> None:
        """Sets each worker's intra-op threads for the next round; the mean is scored with those of worker 0."""
        for worker in self.workers:
            worker.replica.threads = self._threads.at(worker.index, self.finished)
        for probe in self._all_probes:
            probe.threads = self._threads.at(0, self.finished)

    def save(self) -> None:
        """Saves all workers."""
        self._journal.save(self.finished)

    def result(self) -> Result:
        """The figures of the rounds so far; after the last, the mean model is published."""
        loss = self._assessed().loss if math.isnan(self._journal.loss) else self._journal.loss
        layout = self.workers[0].replica.layout
        steps = {name: in_stages(network, self.run, layout) for name, network in self.run.networks.items()}
        time_s = _record_seconds(self._record, steps, self._sends_per_round)
        if self.finished == self.run.rounds and self.run.record.export:
            union, buffers = trained_model_of(self.task, self.models()), mean_buffers(self.buffers())
            publish(self.run, self.task, union, self.folder, buffers, finished=self.finished, loss=loss)
        tokens = _tokens(self.workers)
        return Result(loss, tokens, (tokens - self._before) / self._busy_s if self._busy_s else 0.0, time_s)

    def models(self) -> list[Tensor]:
        """The parameters of each worker, as they are evaluated."""
        return [worker.replica.scored for worker in self.workers]

    def buffers(self) -> list[list[Tensor]]:
        """The buffers of each worker's model."""
        return [worker.replica.buffers for worker in self.workers]

    def _assessed(self) -> Assessment:
        return assess(self.models(), self._probes, self.buffers())


def make_workers(
    run: RunSettings,
    task: Task,
    m: Method,
    like: Tensor,
    transport: Callable[[int], Transport],
    together: Together | None = None,
    membership: Callable[[int], Membership] = lambda worker: EVERYONE,
) -> list[Worker]:
    """All workers of a run at its start, with rows of one matrix as their parameters if all have the same ones.

    Args:
        like: a vector of parameters of the task's model.
        transport: makes the transport of a worker.
        together: computes means once for all; None to pass messages through the transports.
        membership: makes the membership view of a worker.
    Raises: ConfigError unless they start alike.
    """
    if task.holding is not None:
        replicas = [Replica(i, run, task, like.device) for i in range(run.workers)]
    else:
        stacked = torch.empty(run.workers, like.numel(), dtype=like.dtype, device=like.device)
        replicas = [Replica(i, run, task, like.device, x) for i, x in enumerate(stacked)]
        must_start_alike(replicas)
    return [
        Worker(one, m, transport(one.index), together=together, membership=membership(one.index)) for one in replicas
    ]


def _tokens(workers: Sequence[Worker]) -> int:
    """The tokens that all workers have trained on."""
    return sum(worker.replica.steps_taken for worker in workers) * workers[0].run.step_tokens


def _started(workers: Sequence[Worker], store: Store, past: History | None) -> tuple[Start, Lineage]:
    """The start of all workers, with restored state, and the lineage of checkpoints. Raises: as `begin_or_resume`."""
    owners, task = store.run.owners, workers[0].replica.task
    start = begin_or_resume(store, task, past, alone(store, past, owners))

    def restore(i: int, line: Lineage) -> None:
        workers[i].restore(store.load(task, start.round, i, line))
        store.take_over(i, start.round, workers[i].state(), line, store.run.lineage)

    lineage = start.go_on(owners, restore)
    for owner in owners if past is not None else ():
        store.forget_others(owner)
    return start, lineage


def _save(workers: Sequence[Worker], folder: Path, finished: int, lineage: Lineage, each: Each) -> None:
    """Saves all workers, several at a time."""
    store = folder / "checkpoints"
    each(lambda worker: checkpoint.save(store, finished, worker.index, worker.state(), digest=lineage), workers)


Train = Callable[[Sequence[tuple[Worker, Segment]], Each], list[LocalPhase]]
"""Trains each of these workers up to the stop of its segment."""


def train_each(turns: Sequence[tuple[Worker, Segment]], each: Each) -> list[LocalPhase]:
    """One computation for each worker, as in its own process."""
    return each(lambda turn: turn[0].train(turn[1]), turns)


def train_together(workers: Sequence[Worker], round: int, each: Each, train: Train = train_each) -> list[RoundReport]:
    """One round of all workers: every segment of all of them before the next. After the last one, nothing is in flight."""
    reports = [RoundReport([], []) for _ in workers]
    if workers:
        recover_all(workers, round)
    loops = [worker.loop for worker in workers]
    for segments in zip(*(worker.segments(round) for worker in workers), strict=True):
        turns = list(zip(workers, segments, strict=True))
        phases = train(turns, each)
        operations = each(lambda turn: turn[0].send(turn[1]), turns)
        for report, phase, sent in zip(reports, phases, operations, strict=True):
            report.phases.append(phase)
            report.operations.append(sent)
        finish_together(loops, loops[0].due(round, segments[0].stop), each)
        each(lambda turn: turn[0].receive(turn[1]), turns)
    if workers:
        step_on_gradients([worker.replica for worker in workers], round, each)
    if workers and round + 1 == workers[0].run.rounds:
        finish_together(loops, dict.fromkeys(key for loop in loops for key in loop.rest()), each)
        each(lambda worker: worker.replica.recompute(), workers)
    return reports


def _record_seconds(record: RunFolder, steps: Mapping[str, InnerSteps], parts: int) -> dict[str, float]:
    """Prices the run on each of these networks and records the breakdown; returns the total seconds on each."""
    if not steps:
        seconds = priced(read_trace(record.path, messages=False), None, None, parts)
        record.write_seconds(unmeasured(record.path, sorted(seconds, key=lambda one: one.round)))
        return {}
    trace = read_trace(record.path)
    by_network = {name: priced(trace, one.network, name, parts, one.computing) for name, one in steps.items()}
    record.write_seconds(seconds for some in by_network.values() for seconds in some)
    if any(len(shares) > 1 for one in steps.values() for shares in one.by_stage):
        trained = [line for line in read_metrics(record.path) if line["kind"] == "train"]
        stages = (stage_seconds(one, by_network[name], trained) for name, one in steps.items())
        record.write_text(STAGES_FILE, stage_lines(chain.from_iterable(stages)))
    return {name: max((one.end_s for one in some), default=0.0) for name, some in by_network.items()}


def _adapt(network: Network, workers: Sequence[Worker], round: int, reports: Sequence[RoundReport]) -> None:
    """Adapts local steps for the next round to this network's seconds."""
    n, notes = len(workers), dict[int, PaceNote]()
    links = links_at(network, n, max(worker.pacer.clock_s for worker in workers if worker.pacer is not None))
    assert links.step_s is not None
    step_s = (links.step_s * jitter_factors(network, round, n)).tolist()
    uplink_bps = uplinks_bps(links).tolist()
    for i, (worker, report) in enumerate(zip(workers, reports, strict=True)):
        seen = {i: uplink_bps[i] / 8} if math.isfinite(uplink_bps[i]) else {}
        notes[i] = worker.pace_note(report, seen, step_s[i])
    for worker in workers:
        worker.adapt(notes)
