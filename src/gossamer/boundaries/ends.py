"""One direction of a boundary in use: the memory of its ends, and the bytes that crossed it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.boundaries.contract import Boundary, in_pieces, join
from gossamer.errors import CheckpointError
from gossamer.transport.processes.pipe import LENGTH_BYTES


class BoundaryEnd:
    """The sender or the receiver of one direction, or both in one process, as they share the same memory.

    Args: `shape` of a micro-batch `[B, S, D]`.
    Cost: for a codec that remembers, a message of each sample seen so far, `S · D` fp32.
    """

    def __init__(self, codec: Boundary, shape: tuple[int, int, int]) -> None:
        self.codec, self.shape = codec, shape
        _, S, D = shape
        self._first_bytes = 4 * S * D
        self._change_bytes = codec.again_bytes((1, S, D)) if codec.again_bytes else 0
        self.memory: dict[int, Tensor] = {}
        """The receiver's copy of each sample from its last visit, `[S, D]`."""
        self.sent_bytes = 0
        """Bytes of all payloads since `take_sent`, including length prefixes."""

    @property
    def length_first(self) -> bool:
        """Whether only the sender knows the length of a payload."""
        return self.codec.length_first

    def encode(self, h: Tensor, samples: Sequence[int]) -> Tensor:
        """The payload of the activations (or gradients) `[B, S, D]` of these samples."""
        payload = self._encode(h, samples) if self.codec.remembers else self.codec.encode(h)
        self.sent_bytes += payload.numel() + (LENGTH_BYTES if self.length_first else 0)
        return payload

    def decode(self, payload: Tensor, like: Tensor, samples: Sequence[int]) -> Tensor:
        """The decoded activations that the receiver trains on. Raises: ValueError when the payload does not fit."""
        if not self.codec.remembers:
            return self.codec.decode(payload, like)
        parts = in_pieces(payload, *self._sample_bytes(samples, {*self.memory}))
        one = torch.empty(1, *self.shape[1:], dtype=torch.float32, device=like.device)
        for sample, part in zip(samples, parts, strict=True):
            self._take(sample, part, one)
        return torch.stack([self.memory[sample] for sample in samples]).to(like.dtype)

    def cross(self, h: Tensor, samples: Sequence[int]) -> Tensor:
        """The activations at the other end when this object is both ends."""
        if not self.codec.remembers:
            return self.decode(self.encode(h, samples), h, samples)
        self.encode(h, samples)
        return torch.stack([self.memory[sample] for sample in samples]).to(h.dtype)

    def take_sent(self) -> int:
        """The bytes of all payloads since the last call."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent

    def payload_bytes(self, batches: Sequence[Sequence[int]]) -> list[int | None]:
        """The length of each payload to come, for these micro-batches; None where only the sender knows it."""
        if self.codec.remembers:
            seen = {*self.memory}
            return [sum(self._sample_bytes(samples, seen)) for samples in batches]
        return [self.codec.most_bytes(self.shape) if self.codec.fixed else None] * len(batches)

    def _sample_bytes(self, samples: Sequence[int], seen: set[int]) -> list[int]:
        """The bytes of each sample for a codec with memory; adds the samples to `seen`."""
        sizes: list[int] = []
        for sample in samples:
            sizes.append(self._change_bytes if sample in seen else self._first_bytes)
            seen.add(sample)
        return sizes

    def _encode(self, h: Tensor, samples: Sequence[int]) -> Tensor:
        parts: list[Tensor] = []
        for sample, own in zip(samples, h.float().split(1), strict=True):
            parts.append(self.codec.encode(own - self.memory[sample]) if sample in self.memory else join(own))
            self._take(sample, parts[-1], own)
        return torch.cat(parts)

    def _take(self, sample: int, part: Tensor, like: Tensor) -> None:
        """Updates the memory from the bytes sent, alike at both ends."""
        if sample in self.memory:
            self.memory[sample] = self.memory[sample] + self.codec.decode(part, like)[0]
        else:
            self.memory[sample] = part.clone().view(torch.float32).view(like.shape[1:])

    def state(self) -> dict[str, Any]:
        """The state of this end for a checkpoint."""
        return {"samples": [*self.memory], "messages": [*self.memory.values()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a saved state; a codec that remembers nothing ignores it. Raises CheckpointError when it does not fit."""
        if not self.codec.remembers:
            return
        samples, messages = state.get("samples", []), state.get("messages", [])
        if (
            not isinstance(samples, list)
            or not isinstance(messages, list)
            or len(samples) != len(messages)
            or not all(isinstance(one, int) for one in samples)
            or not all(isinstance(one, Tensor) and one.shape == self.shape[1:] for one in messages)
            or any(one.dtype != torch.float32 for one in messages)
        ):
            raise CheckpointError(
                f"the checkpoint of a boundary with codec '{self.codec.name}' does not hold messages of shape "
                f"{list(self.shape[1:])} in fp32; use the run file that wrote it, or remove the checkpoint"
            )
        self.memory = dict(zip(samples, messages, strict=True))


class _Through(torch.autograd.Function):
    """Straight through: the activation crosses one end, and its gradient the other."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, there: BoundaryEnd, back: BoundaryEnd, samples: Sequence[int]) -> Tensor:
        ctx.back, ctx.samples = back, samples
        with torch.autocast(h.device.type, enabled=False):  # codecs compute in fp32, as those of two processes do
            return there.cross(h.detach(), samples)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back.cross(gradient, ctx.samples), None, None, None


def through(h: Tensor, there: BoundaryEnd, back: BoundaryEnd, samples: Sequence[int]) -> Tensor:
    """The activation as the next stage receives it, whose gradient arrives as that of `h`, all in one process.

    Shapes: `h` is `[B, S, D]`, with B samples.
    """
    return _Through.apply(h, there, back, samples)
