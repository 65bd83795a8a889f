"""The stage of torch's pipelines, with our payloads in place of its tensors.

All private parts of `torch.distributed.pipelining` are used only here: six methods that its schedules call to send and
to receive, the two caches they read, and the two methods by which stages vote on shape inference, which ours are given.
A test detects when one of them is gone.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules

from gossamer.errors import ConfigError

SINCE = "2.13"
"""The version of torch whose pipelines these stages are made for; 2.11 asks other processes for shapes, and refuses bf16."""


def must_have_schedules() -> None:
    """Raises ConfigError where torch is too old for the stages of several processes."""
    if torch.__version__ < SINCE:
        raise ConfigError(
            f"pipeline.stages in several processes needs torch {SINCE} and this is {torch.__version__}; install it, or simulate "
            "the run, which takes any version"
        )


class Carrier(Protocol):
    """One stage's side of a boundary."""

    def send(self, micro: int, h: Tensor) -> None:
        """Starts sending the activations, or gradients, of a micro-batch to the other side."""
        ...

    def receive(self, micro: int) -> Tensor:
        """Waits for the activations, or gradients, from the other side."""
        ...


class TorchSchedule(Protocol):
    """The interface of torch's schedules that we use."""

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ):
        """Passes all micro-batches forward and backward through the stages of this process."""
        ...


class BoundaryStage(PipelineStage):
    """A stage between two sides; None at an end of the pipeline.

    Sending starts at once and never blocks, and receiving blocks on first use, so the schedule has no operations to
    start, batch or wait for.
    """

    def __init__(
        self,
        module: nn.Module,
        place: tuple[int, int],
        device: torch.device,
        group: dist.ProcessGroup,
        shapes: tuple[Tensor, Tensor],
        sides: tuple[Carrier | None, Carrier | None],
    ) -> None:
        super().__init__(module, *place, device, *shapes, group=group)
        self._before, self._after = sides

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the activations."""
        if self._after is not None:
            (h,), _ = self.fwd_cache[fwd_chunk_id]
            self._after.send(fwd_chunk_id, h.detach())
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing: `_retrieve_recv_activations` receives."""
        return []

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        assert self._before is not None
        return (self._before.receive(fwd_chunk_id).requires_grad_(),)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the gradients of what was received."""
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        if self._before is not None:
            (gradient,) = gradients
            assert gradient is not None
            self._before.send(bwd_chunk_id, gradient)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing: `_retrieve_recv_grads` receives."""
        return []

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        assert self._after is not None
        return (self._after.receive(bwd_chunk_id),)

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


def schedule_of(
    name: str, stages: Sequence[BoundaryStage], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> TorchSchedule:
    """The schedule of this name for the stages of this process; gradients of the micro-batches' losses are summed
    without scaling.

    Source: GPipe, arXiv 1811.06965; 1F1B and interleaved stages, arXiv 2104.04473, section 2.2.
    """
    logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)  # it logs its whole plan with an error
    if name == "interleaved":
        return ScheduleInterleaved1F1B([*stages], micro_batches, loss, scale_grads=False)
    (stage,) = stages
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    return kind(stage, micro_batches, loss, scale_grads=False)
