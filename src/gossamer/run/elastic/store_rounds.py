"""Rounds of workers that communicate only through a store, which holds the whole state of the run (`gossamer.transport.bucket`).

For rules that leave all workers equal after each round: the commits turn any earlier state into the newest one, and what a
worker keeps for itself, such as its inner optimizer, is its own or that of a state in the store. Also for gossip, where each
slot has states. The commits record who took part, so the log of outcomes is written from them, and the run can be replayed.
"""

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import CheckpointError, ConfigError, DataError, GossamerError
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.locks import locked
from gossamer.record.logs.outcomes import OUTCOMES, Begun, Ended, RoundOutcome
from gossamer.record.logs.seconds import recorded_s
from gossamer.record.packed import packable_snapshot, packed, unpacked
from gossamer.record.progress import say
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.rounds.in_store import RoundsInStore
from gossamer.rounds.loop import OuterLoop
from gossamer.rounds.stopwatch import Stopwatch
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.inputs import note_inputs
from gossamer.run.bookkeeping.journal import Journal, saved_when_unreadable
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import use_recorded_threads
from gossamer.run.participant.in_store import bind_folder, open_store
from gossamer.run.participant.life import KEPT
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import Task
from gossamer.run.worker.worker import RoundReport, Segment, Worker
from gossamer.stop_signals import Asked, leaving
from gossamer.transport.bucket.bucket import Bucket
from gossamer.transport.bucket.objects import Basis, Commit
from gossamer.transport.bucket.perform import perform, renewing
from gossamer.transport.bucket.protocol import StoreTerms
from gossamer.transport.bucket.rounds import Attendance
from gossamer.transport.processes.launch import device_of

log = logging.getLogger("gossamer")


def must_fit_a_store(run: ResolvedRun) -> None:
    """Raises ConfigError for a run that cannot use a store, beyond what no pairing of methods allows there."""
    obstacle = f"it is of the kind '{run.kind}'" if run.kind != "rounds" else "data.constant_batch is true"
    if run.kind != "rounds" or run.data.constant_batch:
        raise ConfigError(
            f"--store was given for a run that it does not carry: {obstacle}; it carries runs of rules "
            "such as gasloc, gossip, diloco, slowmo, fedopt and local_sgd with one exchange a round, and runs with a [server], "
            "whose exchanges may be of fragments"
        )


def train_in_store(run: ResolvedRun, folder: Path, url: str) -> None:
    """Starts, joins or continues the run in a store as one of its workers, until its end or until asked to leave.

    Raises: ConfigError, DataError, CheckpointError, PeerError, TrainingError.
    """
    must_fit_a_store(run)
    bucket, terms, task = open_store(run, folder, url)
    terms = terms._replace(gossip=run.in_rounds.rule.needs != "everyone", rejoin_rounds=run.loop.rejoin_rounds)
    with leaving() as asked, contextlib.ExitStack() as open_:
        asked.at_once = True  # until it trains
        work = StoreWork(run, folder, task, asked, open_)
        one = Attendance(terms, work, secrets.token_hex(16), time.monotonic)
        try:
            with renewing(one, bucket, work.over.wait):
                perform(one.live(), bucket, wait=work.wait, most_bytes=lambda: work.most_bytes)
        finally:
            work.over.set()
        work.leave(one.round)
        if run.rounds - 1 in one.rounds.commits:  # else it has left
            write_outcomes(folder, run, _all_commits(one, bucket, terms))
            say(f"the run in the store has ended after {run.rounds} rounds")


class StoreWork(RoundsInStore):
    """The computations of a worker: see `gossamer.transport.bucket.protocol.StoreWorker`."""

    def __init__(self, run: ResolvedRun, folder: Path, task: Task, asked: Asked, open_: contextlib.ExitStack) -> None:
        self._run, self._folder, self._task, self._asked = run, folder, task, asked
        self._of_slot = open_.enter_context(contextlib.ExitStack())
        """Closes the lock and the record of its slot."""
        self._method, self._line = run.in_rounds, lineage_of(run, folder)
        self._fresh = task.data.state()
        gossip = self._method.rule.needs != "everyone"
        super().__init__(run.workers, device_of(run.loop.device), gossip=gossip)
        self._kept = (0, lambda: b"")
        """Its state after so many rounds, which is never changed."""
        self._finished, self._record = 0, list[RunFolder]()
        self._saved = -1
        self.over = threading.Event()
        """Set when all waits shall end."""
        self.most_bytes = 1 << 24
        """Most bytes of an object: of a state, with the parameters, those of the outer state and of the inner optimizer."""

    # --- slots and states ---------------------------------------------------------------------------------------------

    def agree(self, identity: str) -> None:
        """See `StoreWorker`."""
        bind_folder(self._folder, identity)

    def begin(self, slot: int, life: int) -> int:
        """See `StoreWorker`."""
        self.slot, self.life = slot, life
        self._of_slot.close()  # of one that it has lost: another process may have it now, and write these files
        # A hung process may hold the lock after it has lost its slot to this one.
        self._of_slot.enter_context(locked(self._folder, slot, strict=False))
        use_recorded_threads(self._run, self._folder, slot)
        self._make()
        self.most_bytes = 128 * self._replica.layout.numel + (1 << 24)
        self._record.clear()
        self._kept, self._saved = (0, lambda: b""), -1  # of another slot, where it has lost that
        say(f"worker {slot} takes part in the run of the store, as number {life + 1} in its slot")
        self._asked.sentence = f"worker {slot} is asked to leave after its round"
        self._asked.left_s = lambda: self._replica.phase_left_s
        return max(checkpoint.rounds(self._folder / "checkpoints", slot), default=0)

    def _make(self) -> None:
        """The worker as it is at the start of the run."""
        run = self._run
        self._replica = Replica(self.slot, run, self._task, self._device)
        self._probe = Probe(run, self._task, self._device)
        transport = self.transport(self.slot)
        self._worker = Worker(
            self._replica, self._method, transport, together=self.together, membership=self.membership
        )

    @property
    def loop(self) -> OuterLoop:
        """See `RoundsInStore`."""
        return self._worker.loop

    def restore(self, after: int) -> str | None:
        """See `StoreWorker`."""
        self._finished = 0  # what it has begun to train since is no state to be saved
        if after == self._kept[0] and after:
            self._worker.restore(unpacked(self._kept[1]()))
        elif after == 0:
            self._make()
            return ""
        else:
            try:
                saved = checkpoint.load(self._folder / "checkpoints", after, self.slot, self._line)
                self._worker.restore({**saved, "under_way": []})
            except GossamerError as error:
                log.warning("worker %d takes another's state: %s", self.slot, error)
                return None
        self._finished = after
        return hashlib.sha256(self._packed()).hexdigest()

    def load(self, after: int, donor: int, body: memoryview) -> str:
        """See `StoreWorker`."""
        raw = bytes(body)
        state = unpacked(raw)
        if not isinstance(state, dict):
            raise CheckpointError(
                f"the state after {after} rounds in the store is none; start again with an empty store"
            )
        taken = {**state, "data": self._fresh, "under_way": []}
        self._worker.must_be_of_another(taken)
        self._worker.take_over(taken)
        return hashlib.sha256(raw).hexdigest()

    def add(self, commit: Commit, mean: memoryview) -> None:
        """See `StoreWorker`."""
        super().add(commit, mean)
        self._replica.recompute()

    def start(self, round: int, begun: Basis) -> None:
        """See `StoreWorker`."""
        run = self._run
        self._replica.steps_taken, self._finished = begun.steps, round
        if round:
            state = f"the state of slot {begun.donor} after round {begun.after}" if begun.after else "that of the start"
            means = f" and the means of {round - begun.after} more" if round > begun.after and self.together else ""
            say(f"worker {self.slot} continues at round {round + 1}, with {state}{means}")
        if self._record or round == run.rounds:
            return
        self._asked.at_once = False
        before_s = recorded_s(self._folder, self.slot, round)
        record = RunFolder(
            self._folder, run.document, run.record, worker=self.slot, resume_round=round, traced_per_round=1
        )
        self._record.append(self._of_slot.enter_context(record))
        note_inputs(run, self._task, self._folder, self.slot)
        self._journal = Journal(
            run,
            lambda: self._record[0],
            lambda: {"loss": self._probe.loss(self._replica.evaluated, self._replica.buffers)},
            self._save,
            kind="validation",
        )
        self._stopwatch = Stopwatch(self.slot, before_s)
        if not round:
            self._journal.begin(worker=self.slot)
        self._stopwatch.start()

    # --- a round ------------------------------------------------------------------------------------------------------

    def train(self, round: int) -> bytes:
        """See `StoreWorker`."""
        try:
            self._replica.read_ahead(round)
        except DataError as error:  # its state is that after the last round, as the phase has not begun
            self._save_finished()
            raise DataError(saved_when_unreadable(error, self._folder)) from error
        self._segments: Iterator[Segment] = self._worker.segments(round)
        self._segment = next(self._segments)
        self._phase = self._worker.train(self._segment)
        return self.message(round)

    def steps(self) -> int:
        """See `StoreWorker`."""
        return self._replica.steps_taken

    def end_round(self, commit: Commit, exchanges: int) -> None:
        """See `RoundsInStore`."""
        round, worker, segment = commit.round, self._worker, self._segment
        report = RoundReport([self._phase], [worker.send(segment)])
        worker.receive(segment)
        assert next(self._segments, None) is None
        self._finished = round + 1
        if self._finished < self._run.rounds:
            with_state = packable_snapshot(self._state())
            self._kept = self._finished, with_state
        self._record[0].show_exchanges(alive=len(self._present), made=exchanges, missed=0, unsure=0)
        self._stopwatch.phase(report.whole.compute_s)
        self._journal.log(worker, round, report)
        self._journal.end_own_round(self._replica, self._finished)
        self._record[0].log_seconds(self._stopwatch.round(round))

    def state(self, finished: int) -> bytes | None:
        """See `StoreWorker`."""
        return self._packed() if self._run.due(self._run.loop.checkpoint_every, finished) else None

    def _state(self) -> dict[str, Any]:
        return {**self._worker.state(), "under_way": [], "line": 0}

    def _packed(self) -> bytes:
        return packed(self._state())

    def _save(self, finished: int) -> None:
        folder = self._folder / "checkpoints"
        checkpoint.save(folder, finished, self.slot, self._worker.state(), digest=self._line, keep=KEPT)
        self._saved = finished

    def _save_finished(self) -> None:
        """Saves the state after its last round, unless it is saved."""
        if self._saved != self._finished and self._finished:
            self._save(self._finished)

    # --- the end ------------------------------------------------------------------------------------------------------

    def asked(self) -> bool:
        """See `StoreWorker`."""
        return self._asked.is_set()

    def say(self, sentence: str) -> None:
        """See `StoreWorker`."""
        say(sentence)

    def wait(self, seconds: float) -> None:
        """Waits, or until asked to leave."""
        self._asked.pause(seconds)

    def leave(self, round: int) -> None:
        """Saves the state, unless it is saved."""
        if self._record:
            self._save_finished()
        if self._asked.is_set() and self._record and round < self._run.rounds:
            after = f"after round {self._finished}" if self._finished else "before it has ended a round"
            saved = ", and has saved its state" if self._finished else ""
            say(f"worker {self.slot} leaves {after}, as it was asked to{saved}")


def _all_commits(attendance: Attendance, bucket: Bucket, terms: StoreTerms) -> list[Commit]:
    """The outcomes of all rounds, those from the store that this worker has not read."""
    commits: list[Commit] = []
    for round in range(terms.rounds):
        commit = perform(attendance.rounds.read(round), bucket, wait=time.sleep)
        if commit is None:
            raise CheckpointError(
                f"the store has no outcome of round {round + 1}, though later ones are there; somebody has removed it"
            )
        commits.append(commit)
    return commits


def write_outcomes(folder: Path, run: ResolvedRun, commits: Sequence[Commit]) -> None:
    """Writes the log of outcomes of all slots from the commits of the rounds."""
    make_folder(folder)
    atomic_write(folder / "run.toml", run.document.encode())  # of a process that came after the end, too
    slots = sorted({slot for commit in commits for slot in commit.parts})
    for slot in slots:
        events = list[Begun | RoundOutcome | Ended]()
        for commit in commits:
            if (part := commit.parts.get(slot)) is not None:
                if part.begun is not None:
                    after, donor, sha256, steps = part.begun
                    events.append(Begun(commit.round, after, donor, steps, part.life, sha256))
                alive = None if len(commit.parts) == run.workers else frozenset(commit.parts)
                events.append(RoundOutcome(commit.round, alive, frozenset(), frozenset(), part.steps))
        if slot in commits[-1].parts and len(commits) == run.rounds:
            events.append(Ended(run.rounds, "finished"))
        lines = "".join(OUTCOMES.line(event, time_s=0.0) for event in events)
        atomic_write(OUTCOMES.path(folder, slot), lines.encode())  # several processes may have this folder
