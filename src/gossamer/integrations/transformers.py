"""Gossamer in the Hugging Face `Trainer`: one callback, and a folder for each worker.

    place = as_worker()                                        # before TrainingArguments
    args = TrainingArguments(f"out/worker-{place.worker}", **options)
    trainer = Trainer(
        model, args, train_dataset=place.shard(dataset), callbacks=[TransformersCallback("diloco", local_steps=30)]
    )
    trainer.train(resume_from_checkpoint=last_common_checkpoint(args.output_dir))

Start it with `torchrun --nproc-per-node 2 train.py`.
"""

import inspect
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import Unpack

from gossamer.errors import ConfigError, require
from gossamer.integrations.begin import (
    begin_outer,
    load_outer,
    must_be_alone,
    must_count_the_site,
    must_have_rounds,
    save_outer,
    warn_of_copies,
    warn_of_few_checkpoints,
)
from gossamer.integrations.environment import rule_and_options
from gossamer.integrations.place import newest_common_step
from gossamer.library import Outer, OuterMethod, OuterOptions
from gossamer.rules import Rule

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments
else:
    TrainerCallback = require("transformers", "integrations", "TransformersCallback").TrainerCallback


def last_common_checkpoint(folder: str | Path | None) -> str | None:
    """The newest checkpoint of this worker's folder whose step all workers have; None where they have none in common.

    All workers call it together, each with its own folder, after `as_worker()` and before `train`. A checkpoint counts once the
    outer state is in it, which is saved last.

    Args: `folder` is the `output_dir` of the Trainer.
    Raises: PeerError when another worker has ended.

    >>> import tempfile
    >>> last_common_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    root = Path(str(folder))
    steps = [int(path.name.removeprefix("checkpoint-")) for path in root.glob("checkpoint-*") if _is_whole(path)]
    step = newest_common_step(steps)
    return str(root / f"checkpoint-{step}") if step else None


def _is_whole(path: Path) -> bool:
    """Whether it is a checkpoint of the Trainer with an outer state."""
    number = path.name.removeprefix("checkpoint-")
    return number.isascii() and number.isdigit() and any(path.glob("outer/**/round-*/*.json"))


class TransformersCallback(TrainerCallback):
    """A `TrainerCallback` that exchanges with the other workers after every `local_steps` optimizer steps.

    A step counts when the optimizer has taken it, however many batches were accumulated; one that fp16 training skips counts
    too, so that workers stay together. The outer state is saved in the folder `outer` of each checkpoint, and training resumes to
    the same bits. Log entries gain `outer/rounds`, and `outer/seconds` spent in exchanges since `train` began; a reporter
    shows them if it comes after this callback: `report_to="none", callbacks=[TransformersCallback(...), TensorBoardCallback()]`.

    Let `max_steps` be a multiple of `local_steps`: steps after the last exchange stay with the worker that took them. Keep two
    checkpoints or more (`save_total_limit`), and resume from `last_common_checkpoint`: a worker that dies may lack the newest.

    With `site=(0, 2), join="HOST:PORT"` a worker is all processes of one `torchrun`, over which the Trainer shards the model by
    FSDP2 (`fsdp=True`, `fsdp_config={"version": 2}`). They save to one folder, and `Place(0, 2).shard(dataset)` is their data.

    Args: as of `gossamer.Outer`, with the rule and its options from GOSSAMER_OUTER where none is given, and without the model.
    Raises: when training begins, ConfigError if the Trainer counts several processes without a site, or several GPUs in one,
        may change the batch size by itself, saves on SIGTERM without its callbacks, or takes fewer steps than a round has;
        CheckpointError if the checkpoint has no outer state that fits, or workers resume from different steps. Later what Outer
        raises.
    Cost: that of Outer; on resuming one more copy of the parameters for a moment.
    """

    outer: Outer[nn.Module] | None = None
    """The outer loop, while the Trainer trains and after."""

    def __init__(self, rule: str | Rule | OuterMethod | None = None, **options: Unpack[OuterOptions]) -> None:
        self._rule, self._options = rule_and_options(rule, options)
        self._seconds = 0.0

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Makes the outer loop, or continues that of a checkpoint."""
        must_be_alone(args.world_size, "the Trainer", self._options)
        must_count_the_site(args.world_size, "the Trainer", self._options)
        must_be_alone(max(1, args.n_gpu), "the Trainer", {})
        if args.auto_find_batch_size:
            raise ConfigError(
                f"auto_find_batch_size = {args.auto_find_batch_size} starts training again on one worker only, while its peers "
                "wait; set it to False and choose per_device_train_batch_size"
            )
        if getattr(args, "enable_jit_checkpoint", False):
            raise ConfigError(
                f"enable_jit_checkpoint = {args.enable_jit_checkpoint} saves a checkpoint on SIGTERM without its callbacks, so "
                "without the outer state, and may push out one that has it; set it to False, and resume from a checkpoint of "
                "save_steps"
            )
        model: nn.Module = kwargs["model"]
        self._seconds = 0.0
        saved = self._load(args, state.global_step) if state.global_step else None
        asked = bool(getattr(args, "fsdp", None)) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        warn_of_copies(model, args.world_size, "the Trainer", asked=asked)
        self.outer = begin_outer(model, self._rule, self._options, step=state.global_step, saved=saved)
        must_have_rounds(self.outer, state.max_steps)
        if args.save_strategy != "no" and not args.save_only_model:
            every = state.save_steps if args.save_strategy == "steps" else 0
            warn_of_few_checkpoints(self.outer, args.save_total_limit or 0, every, "save_total_limit")
        optimizer = kwargs["optimizer"]
        self.outer.lr = lambda: float(optimizer.param_groups[0]["lr"])

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Counts one optimizer step, and exchanges where a round ends."""
        assert self.outer is not None
        began = time.perf_counter()
        self.outer.step()
        self._seconds += time.perf_counter() - began

    def on_log(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Adds the numbers of the outer loop to a log entry."""
        if self.outer is not None and kwargs.get("logs") is not None:
            numbers = {"outer/rounds": self.outer.rounds, "outer/seconds": round(self._seconds, 4)}
            for entry in (kwargs["logs"], *state.log_history[-1:]):
                entry.update(numbers)

    def on_save(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Saves the outer state in the checkpoint that the Trainer has just written, unless it holds the model only."""
        if self.outer is not None and not args.save_only_model:
            save_outer(
                self.outer, Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "outer", self._options
            )

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Finishes the exchanges in flight, and ends the outer loop."""
        if self.outer is None:
            return
        # The Trainer has loaded the best checkpoint already, to which updates in flight do not belong.
        is_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        best = [(p, p.detach().clone()) for p in self.outer.model.parameters() if is_best and p.requires_grad]
        self.outer.finish()
        with torch.no_grad():
            for p, chosen in best:
                p.copy_(chosen)
        self.outer.close()

    def _load(self, args: "TrainingArguments", step: int) -> Any:
        """The outer state in the checkpoint of this step."""
        folder = _given_to_train() or args.resume_from_checkpoint or f"{args.output_dir}/checkpoint-{step}"
        return load_outer(Path(folder) / "outer", self._options)


def _given_to_train() -> str | None:
    """The checkpoint from which the Trainer that calls has loaded the weights; it gives its callbacks no name of it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_inner_training_loop":
        frame = frame.f_back
    given = None if frame is None else frame.f_locals.get("resume_from_checkpoint")
    return os.fspath(given) if isinstance(given, str | os.PathLike) else None
