"""What a codec is: a pure pair of functions between a tensor and the tensors that stand for it on the wire."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gossamer.tree import Tree

__all__ = ["Codec"]


class Codec(NamedTuple):
    """`encode(x, key) -> payload` and `decode(payload, like) -> x'`, both pure and deterministic.

    The payload is a tree of tensors whose bytes are the price; its shapes and dtypes depend on those of `x` alone, so that a
    receiver knows how much to expect. `key` seeds any rounding that draws; `like` gives shape and dtype of the result.
    """

    name: str
    encode: Callable[[Tensor, int], Tree]
    decode: Callable[[Tree, Tensor], Tensor]
    exact: bool = False
    """Whether `decode(encode(x))` is `x` to the last bit."""
