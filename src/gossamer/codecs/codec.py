"""What a codec is: a pure pair of functions between a tensor and the tensors that stand for it on the wire."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.tree import Tree

__all__ = ["Codec", "both_ways"]


class Codec(NamedTuple):
    """`encode(x, key) -> payload` and `decode(payload, like) -> x'`, both pure and deterministic.

    The payload is a tree of flat tensors whose bytes are the price; its shapes and dtypes depend on those of `x` alone, so
    that a receiver knows how much to expect, and `encode` of a tensor on the meta device tells them. `x` is flat, of any
    float dtype and length. `key`, a 63-bit number, seeds whatever is drawn; `like` gives shape and dtype of the result.

    The other fields are claims that the tests check. All lossy codecs work in fp32, so each claim holds to the rounding of
    fp32 (1e-5) and while neither the elements nor their squares leave its normal range (1e-18 to 1e18 is safe).
    """

    encode: Callable[[Tensor, int], Tree]
    decode: Callable[[Tree, Tensor], Tensor]
    name: str = ""
    """That of its factory, which fills it in, and the options too."""
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
    options: Mapping[str, Any] = MappingProxyType({})
    """What its factory was given, by name, which workers must have in common; the way back has its own."""
    back: "Codec | None" = None
    """What the sums of a mean over everyone travel back in; None where everyone gets all payloads whole, see `both_ways`."""


def both_ways(codec: Codec, back: Codec) -> Codec:
    """The codec, whose means over everyone go through chunk owners, from where the sums travel back in another.

    Each worker k owns an n-th: it hears that of every payload, and sends everyone B(Σ_j w_j C(q_j)) of its chunk, which all
    decode from the same bytes, itself too. Chunks begin at multiples of `codec.blockwise`, so that C is what it is without;
    a codec without that sees each chunk as a tensor of its own.

    Args: `back` may be of any kind; exact keeps the mean of what was told to the last bit.
    Raises (in a round): PairingError for a rule that does not take a mean over everyone.
    Cost: (n-1)/n payloads of C and as many of B per worker and round, instead of n - 1 of C: less for n > 2 where B = C.
    Source: all-to-all, sum in fp32 and all-gather as in torchft's quantised all-reduce; prime (INTELLECT-1, arXiv 2412.01152)
        goes round a ring and quantises at every hop.
    Differs: quantised twice, whatever the number of workers. The second error is not fed back.
    Fails when: the sum of sparse payloads goes back in as sparse a codec: most of what was sent is dropped again.

    >>> from gossamer.codecs import bf16, fp4
    >>> codec = both_ways(fp4(), bf16()); codec.name, codec.back.name
    ('fp4', 'bf16')
    """
    return codec._replace(back=back)
