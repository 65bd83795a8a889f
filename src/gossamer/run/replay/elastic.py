"""Replays an elastic run in one process from its log of outcomes, bit for bit.

Deaths, deadlines and joins decided which messages counted and which states were taken over; the log has all of it
(`gossamer.record.logs.outcomes`). The run folder gets the metrics, the trace and the checkpoints of a simulation, and a
copy of the log, so that the two folders can be compared. A validation scores the workers present in its round. Work of
a worker in a round that it did not survive is in neither. Rounds before a change of settings use the earlier settings.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigError
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.logs.outcomes import OUTCOMES, Life
from gossamer.run.bookkeeping.evaluate import Probe, Probes, Result, assess
from gossamer.run.bookkeeping.finished import must_be_record_of
from gossamer.run.bookkeeping.inputs import must_have_inputs, note_inputs
from gossamer.run.bookkeeping.journal import Journal
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.elastic.elastic_rounds import KEPT
from gossamer.run.replay.driver import copy_record, ends_early
from gossamer.run.replay.repeat import Repeat, Reports
from gossamer.run.replay.script import outcomes_of, script_of
from gossamer.run.replay.stretches import stretches
from gossamer.run.simulated.threads import WorkerThreads
from gossamer.run.worker.numerics import threads_of
from gossamer.run.worker.task import task_of
from gossamer.run.worker.worker import Worker
from gossamer.transport.processes.launch import one_device


def replay_elastic(run: ResolvedRun, folder: Path, recorded: Path) -> Result:
    """Replays the elastic run in the folder `recorded` and records it in `folder`, as far as its log goes.

    Raises: ConfigError when the record is of another run or of none, or `folder` holds one; DataError for a log that contradicts
        itself.
    Cost: as a simulation, and the states that workers took over.
    """
    must_be_record_of(run, recorded)
    newest = {slot: max(checkpoint.rounds(recorded / "checkpoints", slot), default=0) for slot in range(run.workers)}
    lives = outcomes_of(recorded)  # after the checkpoints, to which a run in progress adds more
    if not lives:
        raise ConfigError(
            f"'{recorded}' has no log of outcomes (outcomes-*.jsonl), which real runs with run.elastic = true write; any other "
            "run in rounds is repeated by gossamer simulate alone"
        )
    for slot, some in lives.items():
        behind = max(max(one.begun.after, *(done.round + 1 for done in one.rounds), 0) for one in some)
        if newest.get(slot, 0) > behind:
            raise ends_early(OUTCOMES.path(recorded, slot), newest[slot], f"worker {slot}")
    began, replay = time.perf_counter(), _Replay(run, folder, lives, recorded)
    replay.run()
    for slot, some in lives.items():
        copy_record(OUTCOMES.path(recorded, slot), folder, sum(life.lines for life in some))
    for path in recorded.glob("branches.json"):
        shutil.copyfile(path, folder / path.name)
    tokens = replay.tokens()
    return Result(replay.loss, tokens, tokens / (time.perf_counter() - began), {})


class _Replay:
    """A replayed elastic run, with its record."""

    def __init__(self, run: ResolvedRun, folder: Path, lives: Mapping[int, Sequence[Life]], recorded: Path) -> None:
        self._run, self._folder = run, folder
        device, task, some = one_device(run.loop.device), task_of(run), stretches(run, recorded, real=True)
        must_have_inputs(run, task, recorded, "repeat")
        self._task = task
        probe, method = Probe(run, task, device), run.in_rounds
        self._threads = threads_of(run, recorded)
        self._probes, self._worker_threads = Probes([probe]), WorkerThreads(device, run, self._threads)
        probe.threads = self._threads.at(0, 0)
        self._sends_per_round = method.sends_per_round
        rounds = max(one.run.rounds for one in some)
        self._script = script_of(lives, method, rounds, run.seed, recorded)
        self._repeat = Repeat(some, task, self._script, recorded, probe.x, logged=True, threads=self._threads)
        self._present: list[Worker] = []
        self.loss = math.nan
        """Loss of the mean of the workers present in the round of the last validation."""

    def run(self) -> None:
        """Trains all rounds of the script, and records them."""
        run, repeat = self._run, self._repeat
        with (
            self._worker_threads.opened(),
            RunFolder(
                self._folder,
                run.document,
                run.record,
                traced_per_round=self._sends_per_round,
                threads=(self._threads, run.owners.stop),
            ) as record,
        ):
            note_inputs(run, self._task, self._folder, None)
            journal = self._journal(record)
            if 0 in self._script.turns:
                journal.begin()
            for round, reports in repeat.rounds(self._worker_threads.each):
                if journal.run is not repeat.stretch.run:
                    journal = self._journal(record)
                self._record(round, reports, journal)
            self.loss = self._validate()["loss"] if math.isnan(journal.loss) else journal.loss

    def tokens(self) -> int:
        """Tokens of the workers whose work was not lost."""
        return sum(worker.replica.steps_taken for worker in self._repeat.workers) * self._run.step_tokens

    def _journal(self, record: RunFolder) -> Journal:
        """The journal of a stretch of rounds with its settings."""
        return Journal(self._repeat.stretch.run, lambda: record, self._validate, self._save_all)

    def _record(self, round: int, reports: Reports, journal: Journal) -> None:
        run, finished, turn = journal.run, round + 1, self._script.turns[round]
        for worker, report in reports:
            journal.log(worker, round, report)
        if reports:
            self._present = [worker for worker, _ in reports if worker.index not in turn.overruled]
            journal.end_round(finished, step=run.timetable.begin(finished), tokens=self.tokens())
        for slot, end in turn.ends.items():
            worker = self._repeat.workers[slot]
            for exchange in worker.loop.pop_rest():
                exchange.finish()
                worker.replica.recompute()
            # A worker saves when it leaves, or when its peers have ended.
            if end.behind < run.rounds or not end.trained:
                self._save(worker, end.behind if end.left else run.rounds)

    def _validate(self) -> dict[str, Any]:
        replicas = [worker.replica for worker in self._present or self._repeat.workers]
        return assess([r.evaluated for r in replicas], self._probes, [r.buffers for r in replicas])._asdict()

    def _save_all(self, finished: int) -> None:
        self._worker_threads.each(lambda worker: self._save(worker, finished), self._present)

    def _save(self, worker: Worker, finished: int) -> None:
        lineage = self._repeat.stretch.run.lineage
        checkpoint.save(self._folder / "checkpoints", finished, worker.index, worker.state(), digest=lineage, keep=KEPT)
