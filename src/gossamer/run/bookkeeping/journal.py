"""The journal that every driver writes at the end of a round: losses, validations and checkpoints when due."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

from gossamer.clock import Absence, Phase, Record, Relay, Transfer, Update
from gossamer.clock.saved import as_dicts, rebuilt
from gossamer.errors import DataError, TrainingError
from gossamer.finite import GO_ON
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder, Unrecorded, store_file
from gossamer.record.lineage import Lineage
from gossamer.record.logs.events import EventWriter
from gossamer.record.logs.trace import Entry
from gossamer.record.progress import say
from gossamer.run.bookkeeping.spent_seconds import EventSeconds
from gossamer.run.config.pipeline import donor_of
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.replica import Replica, merged_phases
from gossamer.run.worker.worker import RoundReport, Worker

Save = Callable[[int], None]
"""Saves the state after a number of rounds."""


def saver(
    digest: str | Lineage, folder: Path, snapshots: Callable[[], Iterable[tuple[int, Any]]], *, keep: int = 2
) -> Save:
    """Saves the state of each owner in order, and keeps the newest `keep` generations."""

    def save(finished: int) -> None:
        for owner, state in snapshots():
            checkpoint.save(folder / "checkpoints", finished, owner, state, digest=digest, keep=keep)

    return save


def saved_when_unreadable(error: DataError, folder: Path, finished: int | None = None) -> str:
    """The message of a run that ends regularly because its stream cannot be read; without `finished`, of one worker."""
    what = "this worker has saved and left" if finished is None else f"stopped after round {finished}, and saved"
    in_store, resumes = store_file(folder).exists(), f"resume with --resume {quote(str(folder))}"
    return f"{error}; {what}; {'start it again with the same command' if in_store else resumes}"


class Journal:
    """Writes the record of a run, round by round.

    Args:
        record: where to write; replaced after the run was stopped and continued.
        validate: the figures of a validation, `loss` among them.
        save: writes a checkpoint of all owners in this process.
        kind: the kind of validation lines: "eval" for the run as a whole, "validation" for one worker.
    """

    def __init__(
        self,
        run: RunSettings,
        record: Callable[[], RunFolder | Unrecorded],
        validate: Callable[[], Mapping[str, Any]],
        save: Save,
        *,
        kind: str = "eval",
    ) -> None:
        self.run, self._record = run, record
        self._validate, self._save, self._kind = validate, save, kind
        self.loss = math.nan
        """Loss of the last validation; NaN before the first."""
        self._saved: int | None = None

    @property
    def record(self) -> RunFolder | Unrecorded:
        """The current record."""
        return self._record()

    def begin(self, **behind: Any) -> None:
        """Validates the initial values, as the end of round -1, in a run that validates during training; `loss` stays
        NaN.

        Args: `behind` are further fields of the line.
        """
        if self.run.loop.eval_every:
            self.record.log(self._kind, round=-1, **behind, step=0, tokens=0, **self._validate())

    def log(self, worker: Worker, round: int, report: RoundReport) -> None:
        """Writes a worker's round into the metrics and the trace.

        In the trace each fragment has its own rounds, which end when it is sent.
        """
        whole, steps = report.whole, self._steps_behind(worker.replica, round + 1)
        more: dict[str, Any] = {"hashes": worker.hashes()} if self.run.record.hash else {}
        if (staged := worker.replica.staged) is not None:
            more["boundary_bytes"] = staged.sent_bytes()
        more |= self._recovered(worker.index, round) | self._distrust(worker, round)
        if (norms := worker.loop.update_norms()) is not None:
            more |= dict(zip(("update_norm", "capped_norm"), norms, strict=True))
        self.record.log(
            "train",
            round=round,
            worker=worker.index,
            step=steps,
            loss=whole.loss,
            lr=whole.lr,
            tokens=steps * self.run.step_tokens,
            **more,
        )
        entry, gathered = round * worker.loop.method.sends_per_round, []
        for phase, sent in zip(report.phases, report.operations, strict=True):
            gathered.append(phase)
            if sent:
                part = merged_phases(gathered)
                self.record.log_trace(Entry(entry, worker.index, len(part.losses), part.compute_s, tuple(sent)))
                entry, gathered = entry + 1, []

    def _recovered(self, worker: int, round: int) -> dict[str, Any]:
        """Reports the stages of a worker lost before a round, and their source of recovery."""
        run, sources = self.run, dict[str, str]()
        for one in run.pipeline.lost:
            if (one.worker, one.after) == (worker, round):
                donor = donor_of(one, run.pipeline, run.workers)
                sources[str(one.stage)] = "neighbours" if donor is None else f"worker {donor}"
                source = "the mean of its neighbours" if donor is None else f"that of worker {donor}"
                say(
                    f"round {round + 1}: stage {one.stage} of worker {worker} was lost after round {round}, and went on from "
                    f"{source} with a new inner optimizer"
                )
        return {"recovered": sources} if sources else {}

    def _distrust(self, worker: Worker, round: int) -> dict[str, Any]:
        """Reports the senders of declined or shortened messages in a round, and their numbers."""
        declined, loop = Counter(worker.loop.declined), worker.loop
        loop.declined.clear()
        for j in sorted(declined):
            say(
                f"round {round + 1}: worker {worker.index} declined what worker {j} sent, as it is not finite or cannot be "
                "decoded; its weight stays with the others"
            )
        shortened, far = loop.newly_distrusted()
        counts = {"shortened": shortened, "declined": declined + far}
        return {name: {str(j): some[j] for j in sorted(some)} for name, some in counts.items() if some}

    def end_round(self, finished: int, **behind: Any) -> None:
        """Validates and saves if due after `finished` rounds.

        Args: `behind` are further fields of a validation line, such as the steps and tokens so far.
        Raises: TrainingError when the saved state, or the loss after the last round, is not finite.
        """
        run = self.run
        if run.due(run.loop.eval_every, finished):
            figures = self._validate()
            self.loss = figures["loss"]
            self.record.log(self._kind, round=finished - 1, **behind, **figures)
            if finished == run.rounds and not math.isfinite(self.loss):
                raise TrainingError(f"the run ended with a validation loss of {self.loss}; {GO_ON}")
        if run.due(run.loop.checkpoint_every, finished):
            self.save(finished)

    def save(self, finished: int) -> None:
        """Saves after `finished` rounds, due or not, for a run that stops there; unless saved already. Raises: as `end_round`."""
        if self._saved != finished:
            self.record.remain()
            self._save(finished)
            self._saved = finished

    def _steps_behind(self, replica: Replica, finished: int) -> int:
        """Inner steps included in a worker's model after `finished` rounds, by any worker.

        `steps_taken` is the position in its own data. In an elastic run a newcomer's begins at its slot's last
        position, while the state that it took over includes all rounds, which determines its position on every curve.
        """
        if not self.run.loop.elastic or replica.places is not None:
            return replica.steps_taken
        return max(replica.steps_taken, self.run.timetable.steps_before(replica.index, finished))

    def end_own_round(self, replica: Replica, finished: int) -> None:
        """As `end_round` for one worker, whose lines have the inner steps and tokens included in its model."""
        step = self._steps_behind(replica, finished)
        self.end_round(finished, worker=replica.index, step=step, tokens=step * self.run.step_tokens)


def log_phase(
    record: RunFolder | Unrecorded,
    events: EventWriter,
    round: int,
    phase: Phase,
    steps: int,
    declined: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Writes a local phase of `steps` inner steps into metrics and events, in a round of the run.

    Args: `declined` is the number of declined messages by sender since the previous phase.
    """
    more = {"declined": {str(j): declined[j] for j in sorted(declined)}} if declined else {}
    report, done = phase.report, phase.number + 1
    events.write(
        round,
        "phase",
        worker=phase.worker,
        number=phase.number,
        start_s=phase.start_s,
        end_s=phase.end_s,
        steps=steps,
        tokens=report.tokens,
    )
    record.log(
        "train",
        round=round,
        worker=phase.worker,
        step=done * steps,
        loss=report.loss,
        lr=report.lr,
        tokens=done * report.tokens,
        time_s=phase.end_s,
        **more,
    )


class _JournalState(NamedTuple):
    round: int
    steps: int
    tokens: int
    time_s: float
    loss: float


class EventJournal:
    """Writes the record of a run without rounds: every event, and `Journal.end_round` at each round's worth of steps.

    A round is over when as many inner steps have been taken as one synchronous round of all workers has. With a server,
    absorbed steps count.

    Args:
        log: as the record of a `Journal`.
        seconds: if this process sees the local phases of all workers, records the breakdown of their time.
        end_round: called in place of that of the journal.
    """

    def __init__(
        self,
        journal: Journal,
        log: Callable[[], EventWriter],
        seconds: EventSeconds | None = None,
        end_round: Callable[..., None] | None = None,
    ) -> None:
        self._journal, self._log, self._seconds = journal, log, seconds
        self._end = end_round or journal.end_round
        self.round = self.steps = 0
        """Completed rounds and the steps that count for them; set both first for a resumed run."""
        self.tokens, self.time_s = 0, 0.0

    @property
    def loss(self) -> float:
        """Loss of the last validation."""
        return self._journal.loss

    def begin(self) -> None:
        """Validates the initial values; see `Journal.begin`."""
        self._journal.begin(time_s=0.0)

    def log(self, event: Record, time_s: float, local_steps: Sequence[int]) -> None:
        """Writes one event, and ends the rounds that end with it; the last ends with the run."""
        if self._seconds is not None:
            self._seconds.count(event)
        fields = {name: value for name, value in event._asdict().items() if name not in ("report", "change", "kind")}
        if isinstance(event, Absence):
            self._log().write(self.round, event.change, **fields)
            return
        self.time_s = time_s
        if isinstance(event, Transfer | Relay):
            self._log().write(self.round, event.kind, **fields)
        elif isinstance(event, Update):
            self._log().write(self.round, "update", **fields)
            self.steps += sum(local_steps[i] for i in event.workers)
        else:
            self._log_phase(event, local_steps[event.worker])
        self.catch_up()

    def catch_up(self) -> None:
        """Ends all rounds completed by the steps so far, except the last."""
        run = self._journal.run
        while self.round < min(self.steps // (run.workers * run.full_steps), run.rounds - 1):
            self.round += 1
            self._end_round(self.round)

    def end(self) -> None:
        """Ends the last round."""
        if self._seconds is not None:
            self._seconds.end(self.time_s)
        self.round = self._journal.run.rounds
        self._end_round(self.round)

    def _log_phase(self, event: Phase, steps: int) -> None:
        log_phase(self._journal.record, self._log(), self.round, event, steps)
        self.tokens += event.report.tokens
        if self._journal.run.kind != "server":
            self.steps += steps

    def _end_round(self, finished: int) -> None:
        step = finished * self._journal.run.full_steps
        for seconds in [] if self._seconds is None else self._seconds.round(finished - 1):
            self._journal.record.log_seconds(seconds)
        self._end(finished, step=step, tokens=self.tokens, time_s=self.time_s)

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint at the end of a round."""
        seconds = None if self._seconds is None else self._seconds.state()
        journal = _JournalState(self.round, self.steps, self.tokens, self.time_s, self._journal.loss)
        return {**as_dicts(journal), "seconds": seconds}

    def restore(self, state: Any) -> None:
        """Continues from a state. Raises KeyError and ValueError when it does not fit."""
        seconds = state["seconds"]
        saved = rebuilt(_JournalState, {name: state[name] for name in _JournalState._fields})
        self.round, self.steps, self.tokens, self.time_s, self._journal.loss = saved
        if self._seconds is not None:
            self._seconds.restore(seconds)
