"""What a codec is: a pure pair of functions between a tensor and the tensors that stand for it on the wire."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gossamer.tree import Tree

__all__ = ["Codec"]


class Codec(NamedTuple):
    """`encode(x, key) -> payload` and `decode(payload, like) -> x'`, both pure and deterministic.

    The payload is a tree of flat tensors whose bytes are the price; its shapes and dtypes depend on those of `x` alone, so
    that a receiver knows how much to expect, and `encode` of a tensor on the meta device tells them. `x` is flat, of any
    float dtype and length. `key`, a 63-bit number, seeds whatever is drawn; `like` gives shape and dtype of the result.

    The other fields are claims that the tests check. All lossy codecs work in fp32, so each claim holds to the rounding of
    fp32 (1e-5) and while neither the elements nor their squares leave its normal range (1e-18 to 1e18 is safe).
    """

    name: str
    encode: Callable[[Tensor, int], Tree]
    decode: Callable[[Tree, Tensor], Tensor]
    exact: bool = False
    """Whether `decode(encode(x))` is `x` to the last bit."""
    draws: bool = False
    """Whether the key matters."""
    unbiased: bool = False
    """Whether the mean of `decode(encode(x, key))` over keys is `x`."""
    linear: bool = False
    """Whether `decode(encode(x, key))` is linear in `x` for every fixed key."""
    contraction: float | None = None
    """δ > 0 with ||x - x'||² <= (1 - δ) ||x||² for every x, in the mean over keys if it draws; None if there is none known."""
    blockwise: int | None = None
    """A length such that cutting x at any multiple of it and encoding the pieces gives the same x'; None if there is none."""
    payload_bytes: Callable[[int], int] | None = None
    """Elements of an fp32 tensor to bytes of its payload; every row of `CODECS` has one."""
