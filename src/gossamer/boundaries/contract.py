"""The interface of boundary codecs: what crosses the cut between two stages of a pipeline, in one direction."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.settings.options import in_short


class Boundary(NamedTuple):
    """`encode(h) -> payload` and `decode(payload, like) -> h'`, both pure and deterministic, outside of autograd.

    `h` is `[B, S, D]`: the hidden states of a micro-batch of B sequences of S tokens, or their gradient, of any float dtype. The
    payload is flat uint8, ready for the network; `like` gives shape and dtype of the result. All lossy ones compute in fp32.

    The receiving stage trains on h' as if it were h, and the gradient of h' goes back as the gradient of h ("straight through").
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], Tensor]
    most_bytes: Callable[[tuple[int, int, int]], int]
    """Maps the shape of an fp32 `h` to the bytes of its longest payload."""
    fixed: bool = True
    """Whether every payload for a shape has `most_bytes`; others are sent with their length before them."""
    exact: bool = False
    """Whether h' is h to the last bit."""
    unit: int = 1
    """The hidden size D must be a multiple of it."""
    again_bytes: Callable[[tuple[int, int, int]], int] | None = None
    """For a boundary with memory: the payload bytes for samples seen before."""
    linear: bool = False
    """Whether h' is a fixed linear projection of h, so that a part of h known to both ends may be subtracted before and
    added after.
    """
    name: str = ""
    """The name of its factory; the factory decorator fills in name and options."""
    options: Mapping[str, Any] = MappingProxyType({})
    """The options of its factory, by name."""

    @property
    def remembers(self) -> bool:
        """Whether the difference from a sample's last visit is encoded, which both ends remember."""
        return self.again_bytes is not None

    @property
    def length_first(self) -> bool:
        """Whether only the sender knows the length of a payload, so that it is sent before it."""
        return not (self.fixed or self.remembers)

    def __repr__(self) -> str:
        return in_short(self)


def join(*parts: Tensor) -> Tensor:
    """The bytes of tensors, one after the other."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def in_pieces(payload: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The payload cut into pieces of these sizes in bytes, each copied to aligned memory, so that it can be read as any
    dtype.

    Raises: ValueError when the payload has another length.
    """
    if payload.numel() != sum(sizes):
        raise ValueError(f"the payload of a boundary has {payload.numel()} bytes and should have {sum(sizes)}")
    return tuple(piece.clone() for piece in payload.split(list(sizes)))
