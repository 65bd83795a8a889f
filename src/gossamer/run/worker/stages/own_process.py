"""One process of a replica in stages: its layers, its sides of the boundaries, and its communication with the others.

Every process reads the data of its worker. Activations and gradients cross as the payloads of the boundary codecs, and
once a step all processes exchange losses and gradient norms.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.boundaries.ends import BoundaryEnd
from gossamer.errors import TransportError
from gossamer.models.llama import Llama
from gossamer.models.sizes import crossing
from gossamer.models.stages import OwnLayers, Stage
from gossamer.record.logs.stage_seconds import StageSeconds
from gossamer.record.logs.trace import Operation
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.compiled import made_ready
from gossamer.run.worker.stages.in_one_process import (
    MicroBatch,
    boundaries_state,
    boundary_ends,
    computing,
    lost_of,
    restore_boundaries,
    spans_of,
    squared_grad_norms,
    squared_norm,
)
from gossamer.run.worker.stages.torch_stage import BoundaryStage, must_have_schedules, schedule_of
from gossamer.transport.processes.pipe import Flow, Pipe
from gossamer.tree import nbytes


class _Side:
    """This process's side of one boundary: encoder and decoder."""

    def __init__(
        self, pipe: Pipe, boundary: int, other: int, ends: tuple[BoundaryEnd, BoundaryEnd], like: Tensor, *, sends: bool
    ) -> None:
        self._pipe, self._other, self._like = pipe, other, like
        self._out, self._into = ends if sends else ends[::-1]
        names = ("forward", "backward") if sends else ("backward", "forward")
        self._leaving, self._coming = (Flow(name, boundary) for name in names)
        self._sends = sends
        self._samples: Sequence[Sequence[int]] = ()
        self._known: Sequence[Tensor] | None = None

    def begin(self, samples: Sequence[Sequence[int]], known: Sequence[Tensor] | None) -> None:
        """Announces all messages of a step, with micro-batches of these samples.

        Args: `known` is the part of each micro-batch's activations known to both ends; None for none.
        """
        self._samples, self._known = samples, known
        most_bytes = self._into.codec.most_bytes(self._into.shape)
        self._pipe.expect(self._coming, self._other, self._into.payload_bytes(samples), most_bytes)

    def send(self, micro: int, h: Tensor) -> None:
        """See `gossamer.run.worker.stages.torch_stage.Carrier`."""
        if self._sends and self._known is not None:
            h = h - self._known[micro]
        payload = self._out.encode(h, self._samples[micro])
        self._pipe.send(self._leaving, self._other, payload, length_first=self._out.length_first)

    def receive(self, micro: int) -> Tensor:
        """See `gossamer.run.worker.stages.torch_stage.Carrier`. Raises TransportError for a payload that does not fit."""
        payload = self._pipe.receive(self._coming, self._other).to(self._like.device)
        try:
            h = self._into.decode(payload, self._like, self._samples[micro])
            return h if self._sends or self._known is None else h + self._known[micro]
        except ValueError as error:
            raise TransportError(
                f"stage {self._other} of this worker sent a payload that cannot be decoded ({error}); start all processes with "
                "the same run file and gossamer version"
            ) from None


class _Computing(nn.Module):
    """A stage whose forward pass has the precision of the run."""

    def __init__(self, stage: Stage, run: RunSettings, device: torch.device) -> None:
        super().__init__()
        self.stage, self._run, self._device = stage, run, device
        self._forward = made_ready(Stage.forward, run)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        with computing(self._run, self._device):
            return self._forward(self.stage, x, tokens)


class LocalStages:
    """The stages of a model that this process has, as `gossamer.run.worker.stages.in_one_process.InStages`.

    Args: `whole` is a model with the initial parameters; those of other stages are freed.
    Raises: PeerError, wherever it computes, when another process of the worker is gone.
    Cost: payloads in flight for all micro-batches of a step, and a message to and from each other process a step.
    """

    def __init__(self, whole: Llama, run: RunSettings, pipe: Pipe, device: torch.device) -> None:
        must_have_schedules()
        self._run, self._pipe, self._device = run, pipe, device
        spans = spans_of(run)
        self._places = range(pipe.part, len(spans), pipe.parts)
        self._pieces = len(spans)
        self.model: nn.Module = OwnLayers(whole, [spans[k] for k in self._places]).to(device)
        self._stages = {k: Stage(whole, *spans[k]).to(device) for k in self._places}
        self.boundaries = {
            b: boundary_ends(run, spans[b + 1][0])
            for b in range(self._pieces - 1)
            if b in self._places or b + 1 in self._places
        }
        """The forward and the backward direction of each boundary of these stages."""
        self._by_layer = {spans[b + 1][0]: ends for b, ends in self.boundaries.items()}
        self._sides: list[_Side] = []
        linear = next(iter(self.boundaries.values()))[0].codec.linear
        self._table_shape = whole.model.embed_tokens.weight.shape if linear else None
        self._rest: Tensor | None = None
        carried = [self._carried(k, whole) for k in self._places]
        self._accumulate = run.data.accumulate
        self._losses: list[float] = []
        self._schedule = schedule_of(run.pipeline.schedule, carried, self._accumulate, self._loss)
        self._squares: list[Tensor] | None = None
        self._saved: Mapping[int, float] = {}
        self._unused: dict[int, Any] = {}
        """The restored memories of boundaries that other cuts had, until a local phase makes them old."""
        self._sent = torch.zeros(self._pieces - 1, 2, dtype=torch.int64)
        self._sent_by_all = self._sent
        self._compute_s = 0.0

    def _carried(self, k: int, whole: Llama) -> BoundaryStage:
        """The stage of torch for piece k of the model."""
        run, tokens = self._run, (self._run.data.batch_size, self._run.data.seq_len)
        sides, shapes = list[_Side | None](), list[Tensor]()
        for boundary, sends in ((k - 1, False), (k, True)):
            if not 0 <= boundary < self._pieces - 1:
                sides.append(None)
                shapes.append(
                    torch.empty(*tokens, whole.vocab_size, device="meta", requires_grad=True)
                    if sends
                    else torch.empty(*tokens, dtype=torch.int64, device="meta")
                )
                continue
            width = crossing(run.model, spans_of(run)[boundary + 1][0])
            other = (k + 1 if sends else k - 1) % self._pipe.parts
            like = torch.empty(*tokens, width, device=self._device)
            sides.append(_Side(self._pipe, boundary, other, self.boundaries[boundary], like, sends=sends))
            shapes.append(torch.empty(*tokens, width, device="meta", requires_grad=True))
        self._sides += [side for side in sides if side is not None]
        module = _Computing(self._stages[k], run, self._device)
        return BoundaryStage(
            module, (k, self._pieces), self._device, self._pipe.group, (shapes[0], shapes[1]), (sides[0], sides[1])
        )

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """One micro-batch's share of the mean loss."""
        with computing(self._run, self._device):
            value = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self._losses.append(value.item())
        return value / self._accumulate if self._accumulate > 1 else value

    def begin(self) -> None:
        """Begins a local phase: passes the part of the embeddings `[V, D]` that a linear codec would lose to all stages."""
        self._unused = {}
        if self._table_shape is None:
            return
        part, last = self._pipe.part, self._pipe.parts - 1
        if part == 0:
            self._rest = lost_of(self._stages[0].table, next(iter(self.boundaries.values()))[0].codec)
        else:
            size = 4 * math.prod(self._table_shape)
            self._pipe.expect(Flow("embeddings", part - 1), part - 1, [size], size)
            came = self._pipe.receive(Flow("embeddings", part - 1), part - 1)
            self._rest = came.view(torch.float32).view(self._table_shape).to(self._device)
        if part < last:
            self._pipe.send(
                Flow("embeddings", part), part + 1, self._rest.view(-1).view(torch.uint8), length_first=False
            )
            self.boundaries[part][0].sent_bytes += nbytes(self._rest)

    def backward(self, batches: Sequence[MicroBatch]) -> list[float]:
        """See `gossamer.run.worker.stages.in_one_process.InStages`; all processes of the worker return the same losses."""
        began_s, waited_s = time.perf_counter(), self._pipe.waited_s
        known = None if self._rest is None else [self._rest[batch[:, :-1]] for batch, _ in batches]
        for side in self._sides:
            side.begin([samples for _, samples in batches], known)
        tokens = torch.cat([batch for batch, _ in batches])
        first = [tokens[:, :-1]] if 0 in self._places else []
        self._losses.clear()
        self._schedule.step(*first, target=tokens[:, 1:], return_outputs=False, tokens=tokens[:, :-1])
        self._pipe.flush()
        losses = self._losses or [0.0] * self._accumulate
        clips = self._run.inner.clip is not None
        squares = [float(squared_norm(self._stages[k])) if clips else 0.0 for k in self._places]
        gathered = self._pipe.gather(torch.tensor([*losses, *squares], dtype=torch.float64))
        self._squares = self._in_order(gathered, self._accumulate) if clips else None
        self._compute_s += time.perf_counter() - began_s - (self._pipe.waited_s - waited_s)
        return gathered[(self._pieces - 1) % self._pipe.parts][: self._accumulate].tolist()

    def _in_order(self, gathered: Sequence[Tensor], skipped: int) -> list[Tensor]:
        """The numbers of all pieces, in order, from the vectors of all processes."""
        parts = self._pipe.parts
        return [gathered[k % parts][skipped + k // parts].float() for k in range(self._pieces)]

    def clip(self, max_norm: float, *, again: bool = False) -> None:
        """See `gossamer.run.worker.stages.in_one_process.InStages`."""
        if again or self._squares is None:
            own = torch.tensor([float(squared_norm(stage)) for stage in self._stages.values()], dtype=torch.float64)
            self._squares = self._in_order(self._pipe.gather(own), 0)
        total = sum(self._squares[1:], self._squares[0]).sqrt().to(self._device)
        for stage in self._stages.values():
            torch.nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm, total)

    def end_round(self, operations: Sequence[Sequence[Operation]]) -> list[list[Operation]]:
        """Sums the traffic of the worker's processes in a round; all of them call it, with their own operations.

        Returns: the operations of the worker, with the bytes of all its parts. `sent_bytes` then has those of all boundaries.
        """
        for b, ends in self.boundaries.items():
            self._sent[b] = torch.tensor([end.take_sent() for end in ends])
        flat = [size for some in operations for one in some for size in one.sizes]
        total = torch.stack(
            self._pipe.gather(torch.cat((self._sent.flatten(), torch.tensor(flat, dtype=torch.int64))))
        ).sum(0)
        self._sent_by_all = total[: self._sent.numel()].view_as(self._sent)
        sizes = iter(total[self._sent.numel() :].tolist())
        return [[one.resized(sizes) for one in some] for some in operations]

    def seconds(self, round: int, worker: int, outer_bytes: int) -> StageSeconds:
        """This process's seconds and traffic since the last call."""
        forward, backward = self._sent.sum(0).tolist()
        found = StageSeconds(
            round, worker, self._pipe.part, self._compute_s, self._pipe.waited_s, forward, backward, outer_bytes
        )
        self._compute_s = self._pipe.waited_s = 0.0
        return found

    def squares(self) -> dict[int, float]:
        """See `gossamer.run.worker.stages.in_one_process.InStages`."""
        return squared_grad_norms(self._stages.values(), self._saved)

    def sent_bytes(self) -> list[list[int]]:
        """See `gossamer.run.worker.stages.in_one_process.InStages`; for the round ended by `end_round`."""
        return self._sent_by_all.tolist()

    def validate(self, batches: Sequence[Tensor]) -> float:
        """The mean loss over batches, int64 `[B, S + 1]`, with exact boundaries; all processes of the worker return the same."""
        losses = [0.0] * len(batches)
        with torch.no_grad():
            for number, batch in enumerate(batches):
                for k, stage in self._stages.items():
                    h = self._validated(k, stage, batch)
                    if k + 1 == self._pieces:
                        losses[number] = F.cross_entropy(h.float().flatten(0, 1), batch[:, 1:].flatten()).item()
                    else:
                        payload = h.contiguous().view(-1).view(torch.uint8)
                        self._pipe.send(Flow("validation", k), (k + 1) % self._pipe.parts, payload, length_first=False)
        self._pipe.flush()
        gathered = self._pipe.gather(torch.tensor(losses, dtype=torch.float64))
        return math.fsum(gathered[(self._pieces - 1) % self._pipe.parts].tolist()) / len(batches)

    def _validated(self, k: int, stage: Stage, batch: Tensor) -> Tensor:
        """The output of one piece of the model for a batch, whose input comes from the piece before it."""
        tokens = x = batch[:, :-1]
        if k > 0:
            stream, other = Flow("validation", k - 1), (k - 1) % self._pipe.parts
            model = self._run.model
            width = crossing(model, stage.first) if stage.subspace is None else model.shape.hidden_size
            shape = (*tokens.shape, width)
            self._pipe.expect(stream, other, [4 * math.prod(shape)], 4 * math.prod(shape))
            x = self._pipe.receive(stream, other).view(torch.float32).view(shape).to(self._device)
        with computing(self._run, self._device):
            return stage(x, tokens, full=True)

    def state(self) -> dict[int, list[dict[str, Any]]]:
        """See `gossamer.run.worker.stages.in_one_process.InStages`."""
        return {**self._unused, **boundaries_state(self._by_layer)}

    def restore(self, state: Any, squares: Mapping[int, float]) -> None:
        """See `gossamer.run.worker.stages.in_one_process.InStages`."""
        restore_boundaries(self._by_layer, state)
        cuts = {first for first, _ in spans_of(self._run)}
        self._unused = {layer: ends for layer, ends in state.items() if layer not in cuts}
        self._saved = squares
