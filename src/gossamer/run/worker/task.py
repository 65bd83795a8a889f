"""The task of a run: model, loss, batches and inner optimizer; Gossamer's or the user's."""

import hashlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from gossamer import rng
from gossamer.data.corpus import Batches, open_corpus, text_fingerprint
from gossamer.data.token_files import FileCorpus
from gossamer.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_fingerprint
from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.library.guard import must_be_trainable
from gossamer.models.llama import build_model
from gossamer.models.llama import loss as next_token_loss
from gossamer.optimizers.inner import OptimizerFactory
from gossamer.run.config.layouts import Holding, holding_of, layout_for
from gossamer.run.config.resolved import RunSettings
from gossamer.run.config.user_parts import GIVEN, KEYS, UserParts, caller
from gossamer.settings.user_code import guarding

log = logging.getLogger("gossamer")

Loss = Callable[[nn.Module, Any], Tensor]
PASSED_BY_NAME = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")


class Task(NamedTuple):
    """The task of every worker of a run."""

    model: Callable[[], nn.Module]
    """A new model on the CPU, always with the same parameters, and with all its experts."""
    loss: Loss
    """The loss of a model on a batch: a scalar, in nats per token for text."""
    data: Batches
    optimizer: OptimizerFactory | None
    """Makes the user's inner optimizer; None for the one in the settings."""
    draws: bool
    """Whether a forward pass may draw random numbers."""
    tokenizer: Tokenizer | None
    """The tokenizer of the text; None for a user's batches."""
    holding: Holding | None
    """The part of the model that each worker holds; None if all hold all of it."""


def task_of(run: RunSettings, *, scored: bool = False) -> Task:
    """Opens the data of a run and prepares the factories of its model and optimizer.

    Args: `scored`: text in files is all for validation.
    Raises: DataError; ConfigError, and UserCodeError when code of the user's fails.
    """
    text = run.data
    # Half of it, as others wait for this worker up to `run.timeout_s`, and it still has a round to train.
    patience_s = run.loop.timeout_s / 2
    data = (
        OwnBatches(run) if text.own else open_corpus(text, run.workers, run.seed, scored=scored, patience_s=patience_s)
    )
    tokenizer = None if isinstance(data, OwnBatches) else data.tokenizer
    layout: Layout | None = None
    if run.model.own:
        model = partial(_own_model, run, WeakSet[nn.Module]())
    else:
        words = tokenizer or load_tokenizer(run.data.tokenizer)
        model = partial(build_model, run.model, words.vocab_size, run.data.seq_len, run.seed)
        layout = layout_for(run.model, words.vocab_size)
    return Task(
        model,
        _loss(run),
        data,
        _optimizer(run) if "optimizer" in run.parts.own else None,
        draws=run.model.own or run.model.loss is not None or run.model.dropout > 0.0,
        tokenizer=tokenizer,
        holding=holding_of(run, layout),
    )


def _own_model(run: RunSettings, before: WeakSet[nn.Module]) -> nn.Module:
    """The user's model, made right after `torch.manual_seed(seed)`; torch's generator is left as it was.

    Args: `before` are those that were made before and are still there.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(run.seed)
        model = caller(run.parts, "model", run.model.size)(**(run.model.options or {}))
    must_be_trainable(model, "the run")
    if model in before:
        raise ConfigError(
            f"{KEYS['model']} is '{run.model.size}', which returned the same {type(model).__name__} twice; make a new model in "
            "each call, as each worker trains its own"
        )
    before.add(model)
    return model


def _loss(run: RunSettings) -> Loss:
    if run.model.loss is None:
        return guarding(f"{KEYS['model']} '{run.model.size}'", next_token_loss) if run.model.own else next_token_loss
    name, loss_function = run.model.loss, caller(run.parts, "loss", run.model.loss)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = loss_function(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise ConfigError(
                f"{KEYS['loss']} is '{name}', which returned {shown}; return a scalar tensor, such as a mean"
            )
        return value

    return loss


def _optimizer(run: RunSettings) -> OptimizerFactory:
    """The user's optimizer, with those settings of [inner] that it takes by name."""
    function, options = run.parts.own["optimizer"], dict(run.inner.options or {})
    try:
        takes = inspect.signature(function).parameters
    except ValueError:
        takes = {}
    if not run.inner.optimizer.startswith(GIVEN):
        ours = {name: getattr(run.inner, name) for name in PASSED_BY_NAME if name in takes}
        defaults = {name: takes[name].default for name in ours}
        # A name may have another type there, such as Adafactor's pair of eps.
        fit = (name for name, value in ours.items() if _pair(defaults[name]) in (None, _pair(value)))
        options = {name: ours[name] for name in fit} | options

    def optimizer(parameters: list[nn.Parameter]) -> Any:
        made = caller(run.parts, "optimizer", run.inner.optimizer)(parameters, **options)
        if not all(
            hasattr(made, name) for name in ("step", "zero_grad", "param_groups", "state_dict", "load_state_dict")
        ):
            raise ConfigError(
                f"{KEYS['optimizer']} is '{run.inner.optimizer}', which returned a {type(made).__name__}; return an optimizer "
                "such as torch.optim.AdamW"
            )
        if {*map(id, parameters)}.isdisjoint(id(p) for group in made.param_groups for p in group["params"]):
            raise ConfigError(
                f"{KEYS['optimizer']} is '{run.inner.optimizer}', which returned a {type(made).__name__} with none of the "
                f"{len(parameters)} parameters that it was called with, so that nothing would be trained; make it of these"
            )
        try:
            inspect.signature(made.step).bind()
        except TypeError as error:
            raise ConfigError(
                f"{KEYS['optimizer']} is '{run.inner.optimizer}', whose step cannot be called alone ({error}), as one with a "
                "line search cannot; name one that steps on the gradients that it finds, such as torch.optim:AdamW"
            ) from None
        return made

    return optimizer


def _pair(value: object) -> bool | None:
    """Whether a value is a tuple of numbers; None for a parameter without a default."""
    return None if value in (None, inspect.Parameter.empty) else isinstance(value, tuple)


TEXT, FILES = "the text of data.source", "the content of the token files of data.source"
TOKENIZER, MODEL = "the tokenizer of data.tokenizer", "the parameters of model.size"
"""Inputs of a run by which workers and records are compared."""


def common_inputs(task: Task, parts: UserParts) -> dict[str, str]:
    """Hashes of the text, its tokenizer and the user's model, which all workers of a run share."""
    hashes = {TEXT: text_fingerprint(task.data)}
    if isinstance(task.data, FileCorpus) and task.data.files:
        hashes[FILES] = task.data.files
    if task.tokenizer is not None:
        hashes[TOKENIZER] = tokenizer_fingerprint(task.tokenizer)
    if "model" in parts.own:
        hashes[MODEL] = _hash_of([*task.model().parameters()])
    return hashes


def found_by_each(task: Task, parts: UserParts) -> dict[str, str]:
    """Inputs that each worker computes and all must share: `common_inputs`, and hashes of code."""
    return common_inputs(task, parts) | {f"the code of {code.name}": code.sha256[:16] for code in parts.codes}


class OwnBatches:
    """Batches of the user's function `batch(worker, step)`. It must be deterministic.

    This is checked at the first batch of each worker. A process with all workers warns if their batches are the same.
    """

    def __init__(self, run: RunSettings) -> None:
        self._run, self._checked, self.read = run, set[int](), ()
        self._first: dict[int, str] = {}
        self._batch = partial(caller(run.parts, "data", str(run.data.source)), **(run.data.options or {}))
        name = run.data.validation
        self._validation = None if name is None else caller(run.parts, "validation", name)

    def batch(self, worker: int, step: int) -> Any:
        """See `Batches.batch`. Raises: ConfigError when it differs from one call to the next."""
        batch = self._repeatable_batch(worker, step)
        with rng.TURN:
            if worker not in self._first:
                self._first[worker] = f"{step} {_hash_of(batch)}"
                if len(self._first) == self._run.workers:
                    warn_of_equal_batches(self._first.values())
        return batch

    def _repeatable_batch(self, worker: int, step: int) -> Any:
        with rng.TURN:
            batch = self._batch(worker, step)
            if worker not in self._checked:
                self._checked.add(worker)
                if not _equal(batch, self._batch(worker, step)):
                    raise ConfigError(
                        f"{KEYS['data']} is '{self._run.data.source}', which returned different batches for worker {worker} "
                        f"and step {step} when called twice; make the batch depend on these two alone, with a torch.Generator "
                        "seeded from them"
                    )
            return batch

    def fingerprint(self, worker: int) -> str:
        """Sixteen hex digits of the first batch of a worker."""
        return _hash_of(self._repeatable_batch(worker, 0))

    def read_ahead(self, worker: int, step: int, batches: int) -> None:
        """A no-op: batches are computed on demand."""

    def validation(self, num_batches: int) -> list[Any]:
        """See `Batches.validation`: the user's, or the batches after the last inner step."""
        run, n = self._run, self._run.workers
        if self._validation is not None:
            return [self._validation(k) for k in range(num_batches)]
        last = run.loop.steps * run.data.accumulate
        return [self._repeatable_batch(k % n, last + k // n) for k in range(num_batches)]

    def state(self) -> dict[str, Any]:
        """Empty: batches depend only on worker and step."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """A no-op."""


def warn_of_equal_batches(fingerprints: Collection[object]) -> None:
    """Warns when the first batches of all workers, of which these are the fingerprints, are the same."""
    if len(fingerprints) > 1 == len({*fingerprints}):
        log.warning(
            "all %d workers begin with the same batch, so that more workers add nothing; let the batch of a function "
            "batch(worker, step) depend on the worker, such as by a torch.Generator seeded from both",
            len(fingerprints),
        )


def _hash_of(batch: Any) -> str:
    """Sixteen hex digits that hash a batch of any type."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            digest.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Mapping):
            add([*value.items()])
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            digest.update(b"[")
            for part in value:
                add(part)
        else:
            digest.update(repr(value).encode())

    add(batch)
    return digest.hexdigest()[:16]


def _equal(value: Any, other: Any) -> bool:
    """Whether two batches of any type are bitwise equal."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.shape == other.shape and torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other)
    if isinstance(value, Mapping):
        return (
            isinstance(other, Mapping)
            and value.keys() == other.keys()
            and all(_equal(value[k], other[k]) for k in value)
        )
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device; on the CPU, the batch itself."""
    if device.type == "cpu":
        return batch
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: on_device(one, device) for key, one in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(on_device(one, device) for one in batch)
    return batch


def buffers_of(model: nn.Module) -> list[Tensor]:
    """The buffers that belong to a model's state, such as the running statistics of batch norm."""
    saved = model.state_dict(keep_vars=True)
    return [buffer for name, buffer in model.named_buffers() if name in saved]
