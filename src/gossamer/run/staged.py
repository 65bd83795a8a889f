"""A replica in stages, all of them in one process: what a pipeline of processes computes, to the last bit.

Each boundary compresses what crosses it, in both directions, as the ends of two processes would. So this is what a simulation
runs, and what pipelines of processes are compared with.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.boundaries.ends import BoundaryEnd, through
from gossamer.errors import CheckpointError
from gossamer.models.llama import Llama
from gossamer.models.sizes import crossing
from gossamer.models.stages import stages_of
from gossamer.run.config import RunConfig
from gossamer.run.document import DIRECTIONS
from gossamer.run.pipeline import boundary_of, cuts_of
from gossamer.tree import nbytes

__all__ = ["StagedModel"]


class StagedModel:
    """The stages of a model, which share its parameters, and the boundaries between them.

    Cost: none beyond the model, but for codecs that remember.
    """

    def __init__(self, model: Llama, config: RunConfig) -> None:
        self.stages = stages_of(model, cuts_of(config.pipeline, config.model))
        tokens = (config.data.batch_size, config.data.seq_len)
        codecs = [boundary_of(getattr(config.pipeline, direction)) for direction in DIRECTIONS]
        self.boundaries = [
            tuple(BoundaryEnd(codec, (*tokens, crossing(config.model, stage.first))) for codec in codecs)
            for stage in self.stages[1:]
        ]
        """The forward and the backward direction of each, in order of the stages."""
        self._table, self._linear = model.model.embed_tokens.weight, codecs[0].linear
        self._rest: Tensor | None = None

    def begin(self) -> None:
        """A local phase begins: all stages learn which part of the embeddings `[V, D]` a linear codec would lose."""
        if self._linear:
            table = self._table.detach()[None]
            there, _ = self.boundaries[0]
            self._rest = (table - there.codec.decode(there.codec.encode(table), table))[0]
            for there, _ in self.boundaries:
                there.sent_bytes += nbytes(self._rest)

    def loss(self, batch: Tensor, samples: Sequence[int]) -> Tensor:
        """The mean cross-entropy of a micro-batch, int64 `[B, S + 1]`, of these samples; see `gossamer.models.llama.loss`."""
        tokens = batch[:, :-1]
        h = self.stages[0](tokens, tokens)
        known = None if self._rest is None else self._rest[tokens]
        for stage, (there, back) in zip(self.stages[1:], self.boundaries, strict=True):
            h = through(h, there, back, samples) if known is None else through(h - known, there, back, samples) + known
            h = stage(h, tokens)
        return F.cross_entropy(h.float().flatten(0, 1), batch[:, 1:].flatten())

    def clip(self, max_norm: float) -> None:
        """Shortens the gradients to this norm, which is the root of the sum over stages, in their order, of squared norms."""
        parts = [[p for p in stage.parameters() if p.grad is not None] for stage in self.stages]
        norms = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
        total = sum((norm.square() for norm in norms[1:]), norms[0].square()).sqrt()
        for part in parts:
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, total)

    def sent_bytes(self) -> list[list[int]]:
        """The bytes that crossed each boundary since the last call, forward and backward."""
        taken = [[end.sent_bytes for end in ends] for ends in self.boundaries]
        for ends in self.boundaries:
            for end in ends:
                end.sent_bytes = 0
        return taken

    def state(self) -> list[list[dict[str, Any]]]:
        """What a checkpoint holds of the boundaries."""
        return [[end.state() for end in ends] for ends in self.boundaries]

    def restore(self, state: Any) -> None:
        """Restores a saved state. Raises CheckpointError when it does not fit."""
        if not isinstance(state, list) or [len(ends) for ends in state] != [2] * len(self.boundaries):
            raise CheckpointError(
                f"the checkpoint does not hold {len(self.boundaries)} boundaries of a pipeline; use the run file that wrote "
                "it, or remove the checkpoint"
            )
        for ends, saved in zip(self.boundaries, state, strict=True):
            for end, one in zip(ends, saved, strict=True):
                end.restore(one)
