"""The interface of codecs: a pair of pure functions between a tensor and its payload on the wire, and its measured error."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.layout import Layout
from gossamer.settings.options import in_short
from gossamer.tree import Tree


class Codec(NamedTuple):
    """`encode(x, key) -> payload` and `decode(payload, like) -> x'`, both pure and deterministic.

    The payload is a tree of flat tensors; its cost is their bytes. Its shapes and dtypes depend only on those of `x`, so that a
    receiver knows how much to expect, and `encode` of a tensor on the meta device returns them. `x` is flat, of any float dtype
    and length. `key`, a 63-bit number, seeds all random draws; `like` gives shape and dtype of the result.

    The other fields are claims that the tests check. All lossy codecs work in fp32, so each claim holds to the rounding of
    fp32 (1e-5) while the elements and their squares stay in its normal range (1e-18 to 1e18 is safe).
    """

    encode: Callable[[Tensor, int], Tree]
    decode: Callable[[Tree, Tensor], Tensor]
    name: str = ""
    """The name of its factory; the factory decorator fills in name and options."""
    exact: bool = False
    """Whether `decode(encode(x))` is `x` to the last bit."""
    draws: bool = False
    """Whether the key matters."""
    unbiased: bool = False
    """Whether the mean of `decode(encode(x, key))` over keys is `x`."""
    linear: bool = False
    """Whether `decode(encode(x, key))` is linear in `x` for every fixed key."""
    contraction: float | None = None
    """δ > 0 with ||x - x'||² <= (1 - δ) ||x||² for every x, averaged over keys if it draws; None if none is known."""
    blockwise: int | None = None
    """A length such that cutting x at any multiple of it and encoding the pieces gives the same x'; None if there is none."""
    payload_bytes: Callable[[int], int] | None = None
    """Maps the number of elements of an fp32 tensor to the bytes of its payload; every row of `CODECS` has it."""
    options: Mapping[str, Any] = MappingProxyType({})
    """The options of its factory, by name, which must be equal on all workers; the return leg has its own."""
    fit: "Callable[[Layout], Codec] | None" = None
    """For a codec that looks at the shapes of tensors: the codec for flat vectors of this layout, see `fitted`; without it, it
    encodes a flat vector as one tensor. None for all others."""
    back: "Codec | None" = None
    """The codec of the second leg of an all-to-all mean; None where every worker receives all payloads whole, see `both_ways`."""

    def __repr__(self) -> str:
        return in_short(self)


def fitted(codec: Codec, layout: Layout) -> Codec:
    """The codec for vectors of a layout, or for the messages about them; itself where it does not look at shapes.

    A codec must be fitted before it is applied to a fragment, so that both ends cut the same tiles.
    """
    if codec.fit is None:
        return codec
    return codec.fit(layout)._replace(name=codec.name, options=codec.options)


def both_ways(codec: Codec, back: Codec) -> Codec:
    """Computes all-to-all means at chunk owners, which return the sums through a second codec.

    Each worker k owns an n-th of the vector: it receives that chunk of every payload, and sends everyone B(Σ_j w_j C(q_j)) of
    its chunk. All workers, the owner too, decode it from the same bytes. Chunks begin at multiples of `codec.blockwise`, so that
    C gives the same result as without chunks; a codec without blockwise encodes each chunk as a separate tensor.

    Args: `back` may be of any kind; exact keeps the mean of the decoded messages to the last bit.
    Raises (in a round): PairingError for a rule that does not take a mean over everyone.
    Cost: (n-1)/n payloads of C and as many of B per worker and round, instead of n - 1 of C: less for n > 2 where B = C.
    Source: all-to-all, sum in fp32 and all-gather as in torchft's quantised all-reduce; prime (INTELLECT-1, arXiv 2412.01152)
        uses a ring and quantises at every hop.
    Differs: quantised twice, whatever the number of workers. The second error is not fed back.
    Fails when: the sum of sparse payloads returns through an equally sparse codec: it drops most of the sum again.

    >>> from gossamer.codecs import bf16, fp4
    >>> codec = both_ways(fp4(), bf16()); codec.name, codec.back.name
    ('fp4', 'bf16')
    """
    return codec._replace(back=back)


_NUMEL = 4096


def relative_error(codec: Codec) -> float:
    """`||x - x'|| / ||x||` for 4096 Gaussian numbers x, always the same; infinite where x' is not finite.

    A bound such as `contraction` holds for every x and is far from typical; parameters are close to Gaussian.

    Cost: the codec once each way, below a millisecond.

    >>> from gossamer.codecs import exact, int4, topk
    >>> [round(relative_error(codec), 1) for codec in (exact(), int4(), topk())]
    [0.0, 0.1, 0.9]
    """
    if codec.exact:
        return 0.0
    x = torch.randn(_NUMEL, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    error = float((codec.decode(codec.encode(x, 0), x) - x).norm() / x.norm())
    return error if math.isfinite(error) else math.inf
