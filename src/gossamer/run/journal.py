"""What is written down of an event-driven run as it goes: every event, and validations and snapshots at the ends of rounds."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gossamer.clock import Absence, Phase, Record, Transfer, Update
from gossamer.record import checkpoint
from gossamer.record.events import EventWriter
from gossamer.record.folder import RunFolder
from gossamer.record.progress import Progress
from gossamer.run.config import RunConfig, digest

__all__ = ["Diary"]


class Diary:
    """Keeps the record of a run whose rounds are told by progress: as many inner steps as one in step would have.

    With a server those count that it has absorbed, else those that were taken.

    Args:
        assess: the figures of a validation, `loss` among them.
        snapshots: what is to be kept, each with the number of its owner.
        finished: rounds that are over already, of a run that is resumed.
    """

    def __init__(
        self, config: RunConfig, folder: Path, record: RunFolder, log: EventWriter, assess: Callable[[], dict[str, Any]],
        snapshots: Callable[[], list[tuple[int, dict[str, Any]]]], progress: Progress | None = None, *, finished: int = 0,
        steps: int = 0,
    ) -> None:  # fmt: skip
        self._config, self._record, self._log, self._progress = config, record, log, progress
        self._store, self._digest = folder / "checkpoints", digest(config)
        self._assess, self._snapshots = assess, snapshots
        self._losses: list[float] = []
        self.round, self.steps = finished, steps
        self.loss, self.tokens, self.time_s = math.nan, 0, 0.0

    def enter(self, event: Record, time_s: float, local_steps: Sequence[int]) -> None:
        """Writes one event, and closes the rounds that end with it; the last ends with the run."""
        fields = {name: value for name, value in event._asdict().items() if name not in ("report", "change", "kind")}
        if isinstance(event, Absence):
            self._log.write(self.round, event.change, **fields)
            return
        self.time_s = time_s
        if isinstance(event, Transfer):
            self._log.write(self.round, event.kind, **fields)
        elif isinstance(event, Update):
            self._log.write(self.round, "update", **fields)
            self.steps += sum(local_steps[i] for i in event.workers)
        else:
            self._enter_phase(event, local_steps[event.worker])
        while self.round < min(self.steps // (self._config.workers * self._config.full_steps), self._config.rounds - 1):
            self.round += 1
            self.close_round(self.round)

    def _enter_phase(self, event: Phase, steps: int) -> None:
        phase, done = event.report, event.number + 1
        self._log.write(
            self.round, "phase", start_s=event.start_s, end_s=event.end_s, worker=event.worker, number=event.number,
            steps=steps, tokens=phase.tokens,
        )  # fmt: skip
        self._record.log(
            "train", round=self.round, worker=event.worker, step=done * steps, loss=phase.loss, lr=phase.lr,
            tokens=done * phase.tokens, time_s=event.end_s,
        )  # fmt: skip
        self._losses.append(phase.loss)
        self.tokens += phase.tokens
        if self._config.server is None:
            self.steps += steps

    def close_round(self, finished: int) -> None:
        """Validates and saves what is due after so many rounds."""
        config = self._config
        if config.due(config.run.eval_every, finished):
            figures = self._assess()
            self.loss = figures["loss"]
            self._record.log(
                "eval", round=finished - 1, step=finished * config.full_steps, tokens=self.tokens, time_s=self.time_s,
                **figures,
            )  # fmt: skip
        if config.due(config.run.checkpoint_every, finished):
            for owner, state in self._snapshots():
                checkpoint.save(self._store, finished, owner, state, digest=self._digest)
        if self._progress is not None:
            figures = {"val": self.loss, "time_s": self.time_s}
            if self._losses:
                figures = {"loss": math.fsum(self._losses) / len(self._losses), **figures}
            self._progress.update(
                config.name, finished, **{name: value for name, value in figures.items() if not math.isnan(value)}
            )
            self._losses.clear()
