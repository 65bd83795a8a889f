"""A replica in stages, all in one process: bitwise equal to a pipeline of processes.

Each boundary compresses its messages in both directions, as between two processes. It is used by simulations, and as
the reference for pipelines of processes.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.boundaries import Boundary
from gossamer.boundaries.ends import BoundaryEnd, through
from gossamer.errors import CheckpointError
from gossamer.models.llama import Llama
from gossamer.models.llama import loss as next_token_loss
from gossamer.models.sizes import crossing
from gossamer.models.stages import Stage, stages_of
from gossamer.run.config.document import DIRECTIONS
from gossamer.run.config.pipeline import boundary_of, cuts_of
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.compiled import made_ready
from gossamer.tree import nbytes

MicroBatch = tuple[Tensor, Sequence[int]]
"""Tokens, int64 `[B, S + 1]`, and the numbers of these B samples."""


class InStages(Protocol):
    """The interface between a replica and a model in stages, all or some of which are in this process."""

    model: nn.Module
    """The parameters that this process holds, under the names of the whole model."""

    def begin(self) -> None:
        """Begins a local phase."""
        ...

    def backward(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Accumulates the gradients of the mean loss over micro-batches, in order; returns the loss of each."""
        ...

    def clip(self, max_norm: float, *, again: bool = False) -> None:
        """Shortens the gradients to this norm, which is the root of the sum over stages, in their order, of squared norms.

        Args: `again` is whether the gradients have changed since `backward`.
        """
        ...

    def squares(self) -> dict[int, float]:
        """The squared norms of the last gradients of its stages, by the first layer of each; a checkpoint's before any step."""
        ...

    def sent_bytes(self) -> list[list[int]]:
        """The bytes that crossed each boundary since the last call, forward and backward."""
        ...

    def state(self) -> Any:
        """The state of the boundaries for a checkpoint."""
        ...

    def restore(self, state: Any, squares: Mapping[int, float]) -> None:
        """Restores a saved state, possibly of other cuts. Raises CheckpointError if it is invalid."""
        ...


def spans_of(run: RunSettings) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one after its last."""
    cuts = cuts_of(run.pipeline, run.model, run.data)
    return [*pairwise([0, *cuts, run.model.shape.layers])]


def boundary_ends(run: RunSettings, layer: int) -> tuple[BoundaryEnd, BoundaryEnd]:
    """The forward and the backward direction of the boundary before this layer."""
    shape = (run.data.batch_size, run.data.seq_len, crossing(run.model, layer))
    there, back = (BoundaryEnd(boundary_of(getattr(run.pipeline, direction)), shape) for direction in DIRECTIONS)
    return there, back


def computing(run: RunSettings, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which forward passes have the precision of the run."""
    return torch.autocast(device.type, torch.bfloat16, enabled=run.inner.autocast == "bf16")


def squared_norm(stage: nn.Module) -> Tensor:
    """The squared norm of a stage's gradient, a scalar."""
    return torch.nn.utils.get_total_norm([p.grad for p in stage.parameters() if p.grad is not None]).square()


def lost_of(table: Tensor, codec: Boundary) -> Tensor:
    """The part of the embeddings `[V, D]` that a linear boundary codec would lose."""
    rows = table[None]
    return (rows - codec.decode(codec.encode(rows), rows))[0]


def squared_grad_norms(stages: Iterable[Stage], saved: Mapping[int, float]) -> dict[int, float]:
    """As `InStages.squares`; `saved` are those of a checkpoint."""
    found = {stage.first: stage for stage in stages if any(p.grad is not None for p in stage.parameters())}
    return {first: squared_norm(stage).item() for first, stage in found.items()} or {**saved}


Boundaries = Mapping[int, tuple[BoundaryEnd, BoundaryEnd]]
"""The forward and the backward direction of each, by the layer that it lies before."""


def boundaries_state(boundaries: Boundaries) -> dict[int, list[dict[str, Any]]]:
    """The state of a process's boundaries for a checkpoint."""
    return {layer: [end.state() for end in ends] for layer, ends in boundaries.items()}


def restore_boundaries(boundaries: Boundaries, state: Any) -> None:
    """Restores saved boundaries, possibly of other cuts: a new boundary starts with empty memory.

    Raises: CheckpointError when the state is invalid.
    """
    if not isinstance(state, dict) or not all(isinstance(ends, list) and len(ends) == 2 for ends in state.values()):
        raise CheckpointError(
            f"the checkpoint holds {type(state).__name__!r} in place of the boundaries of a pipeline; use the run file that "
            "wrote it, or remove the checkpoint"
        )
    for layer, ends in boundaries.items():
        for end, saved in zip(ends, state.get(layer, ({}, {})), strict=True):
            end.restore(saved)


class StagedModel:
    """The stages of a model, which share its parameters, and the boundaries between them; see `InStages`.

    Cost: none beyond the model, except for codecs with memory.
    """

    def __init__(self, model: Llama, run: RunSettings) -> None:
        self.model: nn.Module = model
        self._run = run
        self.stages = stages_of(model, cuts_of(run.pipeline, run.model, run.data))
        self.boundaries = [boundary_ends(run, stage.first) for stage in self.stages[1:]]
        """The forward and the backward direction of each, in order of the stages."""
        self._by_layer = {stage.first: ends for stage, ends in zip(self.stages[1:], self.boundaries, strict=True)}
        self._linear = self.boundaries[0][0].codec.linear
        self._rest: Tensor | None = None
        self._forward = made_ready(Stage.forward, run)
        self._squares: Mapping[int, float] = {}

    def begin(self) -> None:
        """Begins a local phase: passes the part of the embeddings `[V, D]` that a linear codec would lose to all stages."""
        if self._linear:
            self._rest = lost_of(self.stages[0].table, self.boundaries[0][0].codec)
            # With chunks, once per process.
            for there, _ in self.boundaries[: self._run.pipeline.stages - 1]:
                there.sent_bytes += nbytes(self._rest)

    def loss(self, batch: Tensor, samples: Sequence[int]) -> Tensor:
        """The mean cross-entropy of a micro-batch, int64 `[B, S + 1]`, of these samples; see `gossamer.models.llama.loss`."""

        def logits(tokens: Tensor) -> Tensor:
            h = self._forward(self.stages[0], tokens, tokens)
            known = None if self._rest is None else self._rest[tokens]
            for stage, (there, back) in zip(self.stages[1:], self.boundaries, strict=True):
                h = (
                    through(h, there, back, samples)
                    if known is None
                    else through(h - known, there, back, samples) + known
                )
                h = self._forward(stage, h, tokens)
            return h

        return next_token_loss(logits, batch)

    def backward(self, batches: Sequence[MicroBatch]) -> list[float]:
        """See `InStages`."""
        losses: list[float] = []
        for batch, samples in batches:
            with computing(self._run, batch.device):
                value = self.loss(batch, samples)
            (value / len(batches) if len(batches) > 1 else value).backward()
            losses.append(value.item())
        return losses

    def clip(self, max_norm: float, *, again: bool = False) -> None:
        """See `InStages`."""
        squares = [squared_norm(stage) for stage in self.stages]
        total = sum(squares[1:], squares[0]).sqrt()
        for stage in self.stages:
            torch.nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm, total)

    def squares(self) -> dict[int, float]:
        """See `InStages`."""
        return squared_grad_norms(self.stages, self._squares)

    def sent_bytes(self) -> list[list[int]]:
        """See `InStages`."""
        return [[end.take_sent() for end in ends] for ends in self.boundaries]

    def state(self) -> dict[int, list[dict[str, Any]]]:
        """See `InStages`."""
        return boundaries_state(self._by_layer)

    def restore(self, state: Any, squares: Mapping[int, float]) -> None:
        """See `InStages`."""
        restore_boundaries(self._by_layer, state)
        self._squares = squares
