"""One process of a sharded worker: FSDP2 over the micro-batches of a step.

Each process has a shard of every parameter, rows of it as FSDP2 cuts them, with its gradient, inner and outer state, and trains
on its share of the micro-batches of `data.accumulate`; FSDP2 gathers a layer when it is computed, and averages
gradients. Checkpoints hold the state of the whole worker, so that their readers need no knowledge of shards.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.layout import Layout, Leaf, layout_of
from gossamer.library.dtensors import local, reshard
from gossamer.library.flat import flat_of
from gossamer.models.llama import Llama
from gossamer.optimizers import InnerOptimizer
from gossamer.optimizers.inner import build_optimizer
from gossamer.record.logs.trace import Operation
from gossamer.run.config.layouts import Spans, arranged
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.stages.checkpoints import Arranged, cut_out, joined
from gossamer.run.worker.stages.in_one_process import computing
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.pipe import Pipe, group_of_worker

_LOST = ("gloo", "nccl", "connection", "timed out", "timeout")
"""Texts in a collective's error that mean a lost peer; any other error in a step is not a peer's fault."""


class Shards:
    """This process's shard of a model, and the collectives of its worker's processes.

    Args: `model` is whole, on its device, with the initial parameters; it is sharded here.
    Raises: PeerError, wherever it computes, when another process of the worker is gone.
    Cost: parameters, gradients, inner and outer state of a shard, a copy of its parameters, and a layer gathered; for a
        checkpoint one vector of the whole model at a time, in host memory, and for the first process all of them.
    """

    def __init__(self, model: Llama, run: RunSettings, member: Member, pipe: Pipe) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # both take a second to import, only needed here
        from torch.distributed.fsdp import fully_shard

        self._run, self._pipe, self._device = run, pipe, member.device
        self.part, self.parts = pipe.part, pipe.parts
        self._whole = Arranged(*arranged(layout_of(model), run))
        mesh = DeviceMesh.from_group(_collectives(member, run.loop.timeout_s), member.device.type)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model = model
        self.flat = flat_of(model, mesh, run.schedule)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._own = nn.Module()
        """The shards as plain parameters in the same memory, for elementwise optimizers."""
        for k, p in enumerate(self._parameters):
            self._own.register_parameter(f"shard_{k}", nn.Parameter(local(p)))

    def optimizer(self) -> InnerOptimizer:
        """The inner optimizer of this shard."""
        return build_optimizer(self._run.inner, self._own)

    def share(self, micro_batches: int) -> range:
        """The micro-batches of a step for this process; all processes have equally many."""
        each = micro_batches // self.parts
        return range(self.part * each, (self.part + 1) * each)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context for the forward and backward passes of a step, after which the shards have the mean gradient."""
        for p in self._parameters:
            p.grad = None
        with self._translate_errors():
            yield
        for p, shard in zip(self._parameters, self._own.parameters(), strict=True):
            shard.grad = None if p.grad is None else local(p.grad)

    def all_losses(self, losses: Sequence[float]) -> list[float]:
        """The losses of all micro-batches of a step, in order; the same on all processes of the worker."""
        gathered = self._pipe.gather(torch.tensor(losses, dtype=torch.float64))
        return [loss for each in gathered for loss in each.tolist()]

    def all_reduce_sum(self, value: float) -> float:
        """The sum over the shards, in order."""
        gathered = self._pipe.gather(torch.tensor([value], dtype=torch.float64))
        return sum((float(one) for one in gathered[1:]), float(gathered[0]))

    def clip(self, max_norm: float) -> None:
        """As `clip_gradients`, by the norm over all shards."""
        gradients = [shard.grad for shard in self._own.parameters() if shard.grad is not None]
        squares = sum(float(g.double().square().sum()) for g in gradients)
        norm = torch.tensor(math.sqrt(self.all_reduce_sum(squares)), device=self._device)
        torch.nn.utils.clip_grads_with_norm_(self._own.parameters(), max_norm, norm)

    def validate(self, loss: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]) -> float:
        """The mean loss over batches, computed by all processes, as none has a whole model."""
        self._model.eval()
        with self._translate_errors(), torch.no_grad(), computing(self._run, self._device):
            losses = [loss(self._model, batch).item() for batch in batches]
        # Parameters gathered by a forward pass without backward would be stale after the next step.
        reshard(self._model)
        return math.fsum(losses) / len(losses)

    def end_round(self, operations: Sequence[Sequence[Operation]]) -> list[list[Operation]]:
        """The operations of a round with the bytes of all shards."""
        sizes = [size for some in operations for one in some for size in one.sizes]
        total = iter(torch.stack(self._pipe.gather(torch.tensor(sizes or [0]))).sum(0).tolist())
        return [[one.resized(total) for one in some] for some in operations]

    def whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the whole worker; all processes call it, and the first one gets it."""
        return self._of_all(state, self._joined, self._joined_rows)

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This process's state, from the state of a whole worker. Raises: KeyError, TypeError or ValueError."""
        return self._of_all(state, self._cut, self._cut_rows)

    def _of_all(
        self,
        state: Mapping[str, Any],
        vector: Callable[[Tensor, int | None], Tensor],
        rows: Callable[[Tensor, tuple[int, ...]], Tensor],
    ) -> dict[str, Any]:
        shapes = {id(shard): tuple(p.shape) for shard, p in zip(self._own.parameters(), self._parameters, strict=True)}
        # The state numbers its tensors in this order.
        full = [shapes[id(p)] for group in self.optimizer().param_groups for p in group["params"]]
        moments = {
            k: {name: rows(value, full[k]) if isinstance(value, Tensor) else value for name, value in one.items()}
            for k, one in state["inner"]["state"].items()
        }
        return {**self._whole.mapped(state, vector), "inner": {**state["inner"], "state": moments}}

    def _rows(self, count: int, part: int) -> slice:
        """The rows of a tensor of `count` rows that FSDP2 assigns to a part."""
        each = -(-count // self.parts)
        return slice(min(part * each, count), min((part + 1) * each, count))

    def _places(self, layout: Layout) -> list[Spans]:
        """The spans of a vector that each part has: rows of each tensor."""

        def span(leaf: Leaf, part: int) -> tuple[int, int]:
            rows, width = self._rows(leaf.shape[0], part), math.prod(leaf.shape[1:])
            return leaf.start + width * rows.start, leaf.start + width * rows.stop

        return [tuple(span(leaf, part) for leaf in layout.leaves) for part in range(self.parts)]

    def _gather(self, flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The vectors of all parts, of these sizes."""
        padded = flat.new_zeros(max(1, *sizes), device="cpu")
        padded[: flat.numel()] = flat.detach().cpu()
        return [each[:size] for each, size in zip(self._pipe.gather(padded), sizes, strict=True)]

    def _joined(self, value: Tensor, fragment: int | None) -> Tensor:
        """A vector `[k P]` of the whole model from those of all parts; other values are the same on all."""
        layout = self._whole.fragment(fragment)
        places = self._places(layout)
        sizes = [sum(b - a for a, b in spans) for spans in places]
        size_here = sizes[self.part]
        times = value.numel() // size_here if size_here else 0
        if not times or value.shape != (times * size_here,):
            return value
        vectors = self._gather(value, [times * size for size in sizes])
        return value if self.part else joined(vectors, places, layout.numel)  # only the first process saves

    def _cut(self, value: Tensor, fragment: int | None) -> Tensor:
        """This process's part of such a vector."""
        layout = self._whole.fragment(fragment)
        return cut_out(value, self._places(layout)[self.part], layout.numel)

    def _joined_rows(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the inner optimizer, of the shape of a parameter or a number that is the same on all."""
        rows = self._rows(shape[0], self.part)
        if value.shape != (_length(rows), *shape[1:]):
            return value
        lengths = [_length(self._rows(shape[0], part)) for part in range(self.parts)]
        pieces = self._gather(value.reshape(-1), [length * math.prod(shape[1:]) for length in lengths])
        return value if self.part else torch.cat(pieces).view(shape)

    def _cut_rows(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        return value[self._rows(shape[0], self.part)].clone() if value.shape == shape else value

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translates the failure of a collective into the loss of a process of the worker."""
        try:
            yield
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in _LOST):
                raise
            raise self._pipe.gone((self.part + 1) % self.parts, error) from error


def _collectives(member: Member, timeout_s: float) -> dist.ProcessGroup:
    """The device mesh of FSDP2's collectives, separate from the pipe's group, whose threads wait for messages."""
    if member.device.type == "cuda" and dist.get_backend() != "nccl":
        raise ConfigError(
            f"run.shards is {member.parts} on GPUs and what carries the run is {dist.get_backend()}; FSDP2 needs NCCL, and so a "
            "GPU for each process: start no more processes than this machine has GPUs, or set run.device = 'cpu'"
        )
    return group_of_worker(member, timeout_s, "shards")


def _length(rows: slice) -> int:
    return rows.stop - rows.start
