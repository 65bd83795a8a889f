"""Gossamer in Lightning: one callback, and a folder for each worker.

    place = as_worker()                                        # before Trainer
    loader = DataLoader(place.shard(dataset), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        devices=1, default_root_dir=f"out/worker-{place.worker}",
        callbacks=[LightningCallback("diloco", local_steps=30), ModelCheckpoint(folder, filename="{step}", monitor="step",
        mode="max", save_top_k=2, every_n_train_steps=500)], **options
    )
    trainer.fit(module, loader, ckpt_path=last_common_checkpoint(folder))

Start it with `torchrun --nproc-per-node 2 train.py`.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from gossamer.errors import require
from gossamer.integrations.begin import (
    begin_outer,
    must_be_alone,
    must_count_the_site,
    must_have_rounds,
    warn_of_few_checkpoints,
)
from gossamer.integrations.environment import rule_and_options
from gossamer.integrations.place import newest_common_step
from gossamer.library import Outer, OuterMethod, OuterOptions
from gossamer.rules import Rule

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = require("lightning.pytorch", "integrations", "LightningCallback").Callback

_STEP = re.compile(r"step=?(\d+)(?:-v\d+)?\.ckpt$")


def last_common_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint of this worker's folder whose step all workers have; None where they have none in common.

    All workers call it together, each with its own folder, after `as_worker()` and before `fit`. The names of the checkpoints
    must have their step, as with `ModelCheckpoint(folder, filename="{step}", ...)`.

    Raises: PeerError when another worker has ended.

    >>> import tempfile
    >>> last_common_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    paths = {int(match[1]): path for path in Path(folder).glob("*.ckpt") if (match := _STEP.search(path.name))}
    step = newest_common_step(paths)
    return str(paths[step]) if step else None


class LightningCallback(Callback):
    """A `Callback` that exchanges with the other workers after every `local_steps` optimizer steps.

    A batch counts as a step when an optimizer has stepped since the batch before, so accumulated batches count once, and two
    optimizers in one batch once too. The outer state is saved in every checkpoint of Lightning, and training resumes to the same
    bits. `outer/rounds`, and `outer/seconds` spent in exchanges since this `fit` began, go to the module's logger.

    Let `max_steps` be a multiple of `local_steps`, with two optimizers in each batch of twice as many, as Lightning counts both:
    steps after the last exchange stay with the worker that took them. Keep two checkpoints or more (`save_top_k`), and resume
    from `last_common_checkpoint`: a worker that dies may lack the newest.

    Args: as of `gossamer.Outer`, with the rule and its options from GOSSAMER_OUTER where none is given, and without the model,
        which is the LightningModule.
    Raises: ConfigError if the Trainer counts several processes, or takes fewer steps than a round has; CheckpointError if the
        outer state is missing or does not fit, or workers resume from different steps. Later what Outer raises.
    Cost: that of Outer; on resuming one more copy of the parameters for a moment.
    """

    outer: "Outer[LightningModule] | None" = None
    """The outer loop, while the Trainer fits and after."""

    def __init__(self, rule: str | Rule | OuterMethod | None = None, **options: Unpack[OuterOptions]) -> None:
        self._rule, self._options = rule_and_options(rule, options)
        self._saved: Mapping[str, Any] | None = None
        self._steps, self._seconds = 0, 0.0
        # Loggers are silent on all ranks but 0. Lightning reads the rank when it is imported, maybe before `as_worker`.
        require("lightning.pytorch.utilities", "integrations", "LightningCallback").rank_zero_only.rank = 0

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Refuses to fit with several processes."""
        if stage == "fit":
            must_be_alone(trainer.world_size, "Lightning", None)
            must_count_the_site(trainer.world_size, "Lightning", self._options)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Makes the outer loop, or continues that of a checkpoint."""
        self._steps, self._seconds = trainer.global_step, 0.0
        saved = self._saved or self.state_dict() or None  # a second `fit` continues from the first
        self.outer = begin_outer(
            pl_module, self._rule, self._options, step=self._steps, saved=saved if self._steps else None
        )
        must_have_rounds(self.outer, _steps_in_all(trainer))
        _warn_of_few_checkpoints(trainer, self.outer)
        self.outer.lr = lambda: float(trainer.optimizers[0].param_groups[0]["lr"])
        self._saved = None

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts one optimizer step, and exchanges where a round ends."""
        assert self.outer is not None
        if trainer.global_step > self._steps:
            self._steps, began = trainer.global_step, time.perf_counter()
            self.outer.step()
            self._seconds += time.perf_counter() - began
            pl_module.log_dict({"outer/rounds": float(self.outer.rounds), "outer/seconds": self._seconds})

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Finishes the exchanges in flight, and ends the outer loop."""
        if self.outer is not None:
            self.outer.finish()
            self.outer.close()

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Ends the outer loop, so that the peers learn of it."""
        if self.outer is not None:
            self.outer.close()

    def state_dict(self) -> dict[str, Any]:
        """The outer state, for Lightning's checkpoint; empty before training."""
        return {} if self.outer is None else {**self.outer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the outer state of a checkpoint until training starts."""
        self._saved = state_dict or None


def _steps_in_all(trainer: "Trainer") -> float:
    """The optimizer steps of the whole training; infinite where Lightning cannot tell, as with accumulation that changes.

    Its `max_steps` counts each of several optimizers, and here they count once a batch.
    """
    changes = any(type(one).__name__ == "GradientAccumulationScheduler" for one in trainer.callbacks)  # pyright: ignore
    if changes or (trainer.max_steps > 0 and len(trainer.optimizers) > 1):
        return float("inf")
    return trainer.estimated_stepping_batches


def _warn_of_few_checkpoints(trainer: "Trainer", outer: Outer[Any]) -> None:
    """Warns where no `ModelCheckpoint` keeps enough; one that saves the last only (`save_top_k=0`) keeps one."""
    kept = {one: getattr(one, "save_top_k", -1) for one in trainer.checkpoint_callbacks}
    if kept and not any(number < 0 for number in kept.values()):
        one = max(kept, key=lambda one: kept[one])
        every = getattr(one, "_every_n_train_steps", 0)
        warn_of_few_checkpoints(outer, max(1, kept[one]), every, "save_top_k of ModelCheckpoint")
