"""The record of an `Outer`: a run folder from which `gossamer status`, `watch` and `report` show the user's loop."""

import contextlib
import logging
import numbers
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from gossamer.errors import ConfigError, DiskError
from gossamer.record.folder import RecordConfig, RunFolder
from gossamer.record.locks import locked
from gossamer.record.logs.seconds import recorded_s
from gossamer.record.logs.trace import Entry, Operation
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.stopwatch import Stopwatch
from gossamer.settings.over_time import Timetable
from gossamer.settings.schema import toml_value
from gossamer.transport.contract import Delivery, Wait

_FILES = RecordConfig(tensorboard=False)
log = logging.getLogger("gossamer")


class Recorder:
    """The record of a loop that has none: nothing is written. It is also that of further processes of a worker."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        """The folder that was given to `Outer.record`, if it was called."""

    def open(self, first_round: int | None) -> None:
        """Opens the folder; later calls do nothing.

        Args: `first_round` makes rounds of this worker in the folder from this one on void; None makes a new record.
        Raises: ConfigError for a folder that holds another run, or in which this worker trains already; DiskError.
        """

    def step(self, loss: Tensor | float | None) -> None:
        """Counts an inner step. The loss stays on its device until the round ends. Raises: ConfigError for no single number."""

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """A context for an exchange; the seconds since the last one are those of training."""
        return contextlib.nullcontext()

    def sent(self, round: int, operations: Sequence[Operation]) -> None:
        """Records the messages that are sent after the steps since the last such call."""

    def reduced(self, seconds: float) -> None:
        """Counts the seconds of an all-reduce."""

    def waited(self, waits: Sequence[Wait], deliveries: Sequence[Delivery]) -> None:
        """Counts the waits of this worker."""

    def end_round(self, round: int, step: int, lr: float | None) -> None:
        """Writes the losses and the seconds of a round that has ended, with so many inner steps behind the worker."""

    def validated(self, round: int, step: int, loss: float) -> None:
        """Writes a validation of this worker's model after a round; -1 stands for the initial values."""

    def drop_round(self) -> None:
        """Discards the round that has begun, as where a site takes over another's state."""

    def close(self) -> None:
        """Closes the files, and releases the folder. A second call does nothing."""


class Recording(Recorder):
    """Writes the record of one worker, round by round: losses, messages and seconds, from the first step on.

    Args:
        run_toml: the run file of the folder.
        step_tokens: tokens of an inner step.
        traced_per_round: exchanges of a round.
    """

    def __init__(self, folder: Path, run_toml: str, step_tokens: int, worker: int, traced_per_round: int) -> None:
        super().__init__(folder)
        self._into, self._run_toml = folder, run_toml
        self.worker, self._step_tokens, self._traced_per_round = worker, step_tokens, traced_per_round
        self._since_s = time.perf_counter()  # seconds since then belong to the first round
        self._opened: contextlib.ExitStack | None = None
        self._is_over = False
        self.drop_round()

    def open(self, first_round: int | None) -> None:
        """See `Recorder`."""
        if self._opened is not None:
            return
        with contextlib.ExitStack() as opened, _in_own_words():
            opened.enter_context(locked(self._into, self.worker))
            before_s = recorded_s(self._into, self.worker, first_round)  # before these lines are cut
            self._files = opened.enter_context(
                RunFolder(
                    self._into,
                    self._run_toml,
                    _FILES,
                    worker=self.worker,
                    resume_round=first_round,
                    traced_per_round=self._traced_per_round,
                )
            )
            self._stopwatch = Stopwatch(self.worker, before_s)
            self._stopwatch.start(self._since_s)
            self._opened = opened.pop_all()
            weakref.finalize(self, self._opened.close)  # also where an error ends the program before `close`

    def drop_round(self) -> None:
        """See `Recorder`."""
        self._loss: Tensor | float = 0.0
        self._losses = self._entries = 0
        self._untraced_steps, self._untraced_s = 0, 0.0

    def step(self, loss: Tensor | float | None) -> None:
        """See `Recorder`."""
        self._untraced_steps += 1
        if loss is None:
            return
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ConfigError(
                    f"step() got a loss of shape {tuple(loss.shape)}; give one number, such as loss.mean().detach()"
                )
            loss = loss.detach().double().reshape(())
        elif not isinstance(loss, numbers.Real):
            raise ConfigError(
                f"step() got {loss!r:.60} as its loss; give one number, or a tensor of one, such as loss.detach()"
            )
        self._loss, self._losses = self._loss + loss, self._losses + 1

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """See `Recorder`."""
        compute_s = time.perf_counter() - self._since_s
        self._stopwatch.phase(compute_s)
        self._untraced_s += compute_s
        yield
        self._since_s = time.perf_counter()

    def sent(self, round: int, operations: Sequence[Operation]) -> None:
        """See `Recorder`."""
        if operations:
            entry = round * self._traced_per_round + self._entries
            part = Entry(entry, self.worker, self._untraced_steps, self._untraced_s, tuple(operations))
            self._write(self._files.log_trace, part)
            self._entries, self._untraced_steps, self._untraced_s = self._entries + 1, 0, 0.0

    def reduced(self, seconds: float) -> None:
        """See `Recorder`."""
        self._stopwatch.phase(0.0, seconds)

    def waited(self, waits: Sequence[Wait], deliveries: Sequence[Delivery]) -> None:
        """See `Recorder`."""
        if self._opened is not None:  # `Outer.metrics` may be called before the first step
            self._stopwatch.waited(waits, deliveries)

    def end_round(self, round: int, step: int, lr: float | None) -> None:
        """See `Recorder`."""
        known: dict[str, Any] = {} if lr is None else {"lr": lr}
        known["loss"] = float(self._loss) / self._losses if self._losses else None
        seconds = self._stopwatch.round(round)
        self._log("train", round, step, **known)
        self._write(self._files.log_seconds, seconds)
        self.drop_round()
        self._since_s = time.perf_counter()  # not before: the seconds until here are counted

    def validated(self, round: int, step: int, loss: float) -> None:
        """See `Recorder`."""
        self._log("validation", round, step, loss=loss)

    def _log(self, kind: str, round: int, step: int, **figures: Any) -> None:
        behind = {"worker": self.worker, "step": step, "tokens": step * self._step_tokens}
        self._write(self._files.log, kind, round=round, **behind, **figures)

    def _write(self, write: Callable[..., None], *what: Any, **fields: Any) -> None:
        """Writes a line. A disk that is full ends the record, and not the training of all workers."""
        if self._is_over:
            return
        try:
            write(*what, **fields)
        except DiskError as error:
            log.warning("worker %d trains on without a record: %s", self.worker, error)
            self._is_over = True

    def close(self) -> None:
        """See `Recorder`."""
        if self._opened is not None:
            self._opened.close()


@contextlib.contextmanager
def _in_own_words() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        reason = str(error).partition("; ")[0]
        raise ConfigError(
            f"{reason}; give record() another folder, or load the outer state that belongs to it before the first step"
        ) from None


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def run_toml(
    method: Method, timetable: Timetable, *, name: str, workers: int, steps: int, seed: int, model: str
) -> str:
    """A run file with what pages show of a loop. Verbs that would train or evaluate refuse it, as it does not contain the loop.

    Raises: ConfigError for fewer steps than a round has.
    """
    if not (timetable := timetable._replace(steps=steps)).rounds:
        raise ConfigError(
            f"record() got steps={steps}, and the first round has {timetable.at(0).full_steps}; give more"
        )
    stretches = timetable.stretches
    table = {str(one.step): one.local_steps for one in stretches}
    parts = {"rule": method.rule, "topology": method.topology, "codec": method.codec}
    schedule = {"fragments": method.schedule.fragments, "overlap_steps": method.schedule.overlap_steps}
    document = {
        "name": name,
        "workers": workers,
        "seed": seed,
        **{table: {"name": part.name, **_without_none(part.options)} for table, part in parts.items()},
        "schedule": schedule,
        "model": {"size": f"python:{model}"},
        "data": {"source": "python:loop"},
        "inner": {"optimizer": "python:loop"},
        "record": {"tensorboard": False},
        "run": {
            # A run file has whole rounds, and later steps are not exchanged.
            "steps": timetable.begin(timetable.rounds),
            "local_steps": table if timetable.changes else stretches[0].local_steps,
        },
    }
    return tomli_w.dumps(toml_value(document))
