"""Codecs that send a code of few bits per element and a scale per block: int8, int4, fp4 and sign.

Every element is divided by the scale of its block, the ratio is rounded to the nearest of a few levels (or drawn from the
two nearest), and the receiver multiplies the level by the scale.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.codecs.blocks import SLAB, absmax, absmax_bf16, as_blocks, empty, num_blocks, spans, storable
from gossamer.codecs.codec import Codec
from gossamer.codecs.packing import lookup, num_bytes, pack_codes
from gossamer.codecs.passes import passes_for
from gossamer.settings.options import factory

Rounding = Literal["nearest", "stochastic"]
Block = Annotated[int, Field(ge=8, le=SLAB, multiple_of=8)]
_SEVENTHS = tuple((code - 8) / 7 for code in range(16))
_E3M0 = (0.0, *(2.0 ** (e - 7) for e in range(1, 8)), 0.0, *(-(2.0 ** (e - 7)) for e in range(1, 8)))
_MANTISSA = 23  # bits of the mantissa of fp32
_LEAST = (127 - 6) << _MANTISSA  # 2⁻⁶ as fp32, read as a whole number
_SLACK = 1 + 2**-7  # the most by which rounding a scale up to bf16 enlarges it


class Quantized(NamedTuple):
    """Packed codes (uint8), and a scale (fp32 for int8, else bf16) for each block."""

    codes: Tensor
    scales: Tensor


@factory
def int8(block: Block = 4096, rounding: Rounding = "nearest") -> Codec:
    """Sends every element as one of 255 levels, evenly spaced up to the largest magnitude of its block.

    s = max |x| over the block;   q = round(127 x / s);   x' = s q / 127

    A block with a NaN or an infinity decodes to NaN throughout. Encoding x' again gives x' ("nearest").

    Args:
        block: elements per scale.
        rounding: "stochastic" rounds up with the probability that makes the mean of x' equal to x.
    Cost: 8 + 32/block bits per element, 8.008 for 4096. Relative error 0.9 % on Gaussian data.
    Source: the block-wise symmetric quantizer in common use; int8 pseudo-gradients as in INTELLECT-1, arXiv 2412.01152.
    Differs: INTELLECT-1 has a codebook per message, which is `int8_statistical`.
    Fails when: a block holds an element a few hundred times larger than the rest: the rest is rounded to zero.

    >>> codec = int8(); x = torch.tensor([1.0, -0.5, 0.001])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([ 1.0000, -0.5039,  0.0000])
    """

    def code(ratio: Tensor, generator: torch.Generator | None) -> Tensor:
        return _linear(ratio, 127, generator).to(torch.int8).view(torch.uint8)

    return _block_codec(
        "encode_int8", 8, block, absmax, code, (), rounding, _contraction(rounding, block, 1 / 254, 0.0)
    )


@factory
def int4(block: Block = 64, rounding: Rounding = "nearest") -> Codec:
    """Sends every element as one of 15 levels, evenly spaced up to the largest magnitude of its block, two to a byte.

    s = max |x| over the block;   q = round(7 x / s);   x' = s q / 7;   q + 8 is sent, low nibble first

    A block with a NaN or an infinity (or a magnitude beyond 3.38e38) decodes to NaN throughout. Encoding x' again gives x'
    ("nearest").

    Args:
        block: elements per scale.
        rounding: "stochastic" rounds up with the probability that makes the mean of x' equal to x.
    Cost: 4 + 16/block bits per element, 4.25 for 64. Relative error 10.8 % on Gaussian data.
    Source: the block-wise symmetric quantizer in common use.
    Differs: scales are bf16, rounded up.
    Fails when: the block is long or holds an outlier: most elements then round to zero. fp4 spans a range of 64 instead.

    >>> codec = int4(); x = torch.tensor([7.0, -3.2, 0.4])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([ 7., -3.,  0.])
    """

    def code(ratio: Tensor, generator: torch.Generator | None) -> Tensor:
        return _linear(ratio, 7, generator).add_(8).to(torch.uint8)

    contraction = _contraction(rounding, block, _SLACK / 14, 0.0)
    return _block_codec("encode_int4", 4, block, absmax_bf16, code, _SEVENTHS, rounding, contraction)


@factory
def fp4(block: Block = 256, rounding: Rounding = "nearest") -> Codec:
    """Sends every element as a sign and one of eight magnitudes, zero and seven powers of two: the float format E3M0.

    s = max |x| over the block;   code = sign·8 + e;   x' = 0 for e = 0,  ± s 2^(e-7) for e = 1..7;   two to a byte

    "nearest" is nearest in value, ties away from zero: it switches at s 2⁻⁷ and at 1.5 s 2^j, so that x'/x lies in [2/3, 4/3]
    from s 2⁻⁶ on, and below s 2⁻⁷ everything is zero. "stochastic" goes up with probability (|x| - low) / (high - low),
    which makes the mean of x' equal to x. Powers of two times s are exact. Encoding x' again gives x' ("nearest"). A block
    with a NaN or an infinity (or a magnitude beyond 3.38e38) decodes to NaN throughout.

    Args:
        block: elements per scale.
        rounding: see above.
    Cost: 4 + 16/block bits per element, 4.0625 for 256. Relative error 19.5 % on Gaussian data (28 % if stochastic),
        within 4 % of that for blocks of 64 to 4096.
    Source: Streaming DiLoCo, arXiv 2501.18512 §2.4; the format in eXmY, arXiv 2405.13938.
    Differs: the papers do not state scale, zero and rounding; these are ours. Scales are bf16, rounded up.
    Fails when: accuracy matters more than range: int4 in blocks of 64 has half the error on Gaussian data. The strength of
        fp4 is its range of 2⁶ within a block.

    >>> codec = fp4(); x = torch.tensor([8.0, -1.0, 3.1, 0.05])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([ 8., -1.,  4.,  0.])
    """

    def code(ratio: Tensor, generator: torch.Generator | None) -> Tensor:
        magnitude = ratio.abs()
        bits = magnitude.view(torch.int32)  # one memory, read as numbers or as exponents and mantissas
        # Below the least power of two the levels are 0 and 2⁻⁶, with the same spacing as 2⁻⁶ and 2⁻⁵: shifted up by one octave
        # they round the same way, and the code is one less.
        small = (bits - _LEAST) >> 31
        magnitude += (small & _LEAST).view(torch.float32)
        # Within an octave the mantissa counts linearly from one power of two to the next: adding a half (or a draw) to it
        # carries into the exponent exactly when the upper one is to be taken.
        bits += 1 << (_MANTISSA - 1) if generator is None else _draws(ratio, generator)
        bits >>= _MANTISSA
        bits += small
        bits -= (_LEAST >> _MANTISSA) - 1
        return (bits | ratio.view(torch.int32) >> 28 & 8).to(torch.uint8)

    contraction = _contraction(rounding, block, _SLACK / 128, 1 / 9)
    return _block_codec("encode_fp4", 4, block, absmax_bf16, code, _E3M0, rounding, contraction)


@factory
def sign(block: Block = 1024) -> Codec:
    """Sends the sign of every element, eight to a byte, and the mean magnitude of its block.

    s = mean |x| over the block;   x' = s if x >= 0 else -s

    A zero element in a block with nonzero ones decodes to s. A block with a NaN or an infinity decodes to NaN throughout.

    Args:
        block: elements per scale.
    Cost: 1 + 16/block bits per element, 1.016 for 1024. Relative error 60 % on Gaussian data, √(1 - 2/π).
    Source: scaled sign compression, Karimireddy et al., arXiv 1901.09847.
    Differs: a scale per block instead of one per tensor.
    Fails when: used without error feedback: the magnitudes of elements within a block are lost.

    >>> codec = sign(); x = torch.tensor([3.0, -1.0])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([ 2., -2.])
    """

    def mean_magnitude(blocks: Tensor) -> Tensor:
        return storable(blocks.abs().mean(1))

    def code(ratio: Tensor, generator: torch.Generator | None) -> Tensor:
        return (ratio >= 0).view(torch.uint8)

    contraction = (1 - 2**-16) / block  # ||x - x'||² = ||x||² - block·s², and block·s >= ||x||; the rest rounds s
    return _block_codec("encode_sign", 1, block, mean_magnitude, code, (-1.0, 1.0), "nearest", contraction)


def _linear(ratio: Tensor, levels: int, generator: torch.Generator | None) -> Tensor:
    """The ratio times `levels` as whole numbers, in place."""
    steps = ratio.mul_(levels)
    if generator is None:
        return steps.round_()
    steps += _draws(ratio, generator).float() * 2.0**-_MANTISSA  # exact; whole numbers times one have the default dtype
    return steps.floor_().clamp_(max=levels)  # the sum with a draw just below 1 may round up


def _draws(like: Tensor, generator: torch.Generator) -> Tensor:
    """Whole numbers (int32) from 0 to 2²³ - 1, as many as there are elements."""
    words = torch.empty(like.numel() // 2, dtype=torch.int64, device=like.device)
    words.random_(-(1 << 63), None, generator=generator)
    return (words.view(torch.int32) & ((1 << _MANTISSA) - 1)).view(like.shape)


def _contraction(rounding: Rounding, block: int, h: float, relative: float) -> float | None:
    """δ of a quantizer that divides by the largest magnitude of a block.

    Let that magnitude be 1 and h at most half the distance from zero to the first level; N = block - 1 and g² = N h².
    nearest: the error of an element is at most √c of it, or at most h and at most the element itself; the largest element
        is of the first kind. Hence ||x - x'||² <= c + g² while ||x||² >= 1 + g². Evenly spaced levels have c = h², powers
        of two have c = 1/9, which is `relative`.
    stochastic: the mean squared error of an element u is at most u²/8 from the first level on and u (2 h - u) below it, and
        the ratio of 1/8 + Σ u (2 h - u) to 1 + Σ u² is at most the larger eigenvalue of [[1/8, g], [g, -1]].
    """
    g2 = (block - 1) * h * h
    if rounding == "nearest":
        return (1 - max(h * h, relative)) / (1 + g2)
    left = 1 - (1 / 8 - 1 + math.sqrt((1 / 8 + 1) ** 2 + 4 * g2)) / 2
    return left if left > 0 else None


def _block_codec(
    name: str,
    bits: int,
    block: int,
    scale: Callable[[Tensor], Tensor],
    code: Callable[[Tensor, torch.Generator | None], Tensor],
    levels: tuple[float, ...],
    rounding: Rounding,
    contraction: float | None,
) -> Codec:
    """A codec of `bits` per element: `code` of ratios to the scale; NaN scales make NaN blocks.

    Args:
        name: the pass over a long tensor that encodes as the plain form here does; with random draws, "_drawn" follows it.
        levels: of the codes; none for whole numbers from -127 to 127, in units of 1/127.
    """
    draws = rounding == "stochastic"
    pass_name = f"{name}_drawn" if draws else name
    scale_dtype = scale(torch.zeros(1, 1, dtype=torch.float32)).dtype

    def part(payload: Quantized, start: int, stop: int) -> Quantized:
        """The codes and scales of some elements, from the start of a block on."""
        codes, scales = payload
        return Quantized(
            codes[start * bits // 8 : num_bytes(stop, bits)], scales[start // block : num_blocks(stop, block)]
        )

    def encode(x: Tensor, key: int) -> Quantized:
        codes = empty(num_bytes(x.numel(), bits), torch.uint8, x.device)
        made = Quantized(codes, torch.empty(num_blocks(x.numel(), block), dtype=scale_dtype, device=x.device))
        if (passes := passes_for(x)) is not None:
            # Torch has the order of the sums of magnitudes: piece by piece, so that their second reader finds them in the cache.
            for start, stop in spans(x, block, 4 * SLAB) if bits == 1 else ((0, x.numel()),):
                codes, scales = part(made, start, stop)
                if bits == 1:
                    scales.copy_(scale(x[start:stop].view(scales.numel(), -1)))
                passes(pass_name, x[start:stop], stop - start, block, codes, scales, key)
            return made
        generator = torch.Generator(x.device).manual_seed(key) if draws and not x.is_meta else None
        for start, stop in spans(x, block):
            codes, scales = part(made, start, stop)
            blocks = as_blocks(x[start:stop], block)
            # The last block is a separate slab: its padding does not count.
            scales.copy_(scale(blocks[:, : stop - start]))
            ratio = blocks / scales.float().masked_fill_(scales == 0, 1.0)[:, None]
            codes.copy_(pack_codes(code(ratio, generator).view(-1), bits)[: codes.numel()])
        return made

    def decode(payload: Quantized, like: Tensor) -> Tensor:
        x, (codes, scales) = empty(like.numel(), like.dtype, like.device), payload
        fits = codes.numel() == num_bytes(x.numel(), bits) and scales.numel() == num_blocks(x.numel(), block)
        if fits and (passes := passes_for(x)) is not None:
            given = codes.contiguous(), scales.contiguous()
            if levels:
                table = torch.tensor(levels, dtype=torch.float32)  # its address is read as that of fp32
                passes("decode_levels", x, x.numel(), block, *given, table, bits)
            else:
                passes("decode_int8", x, x.numel(), block, *given)
            return x
        for start, stop in spans(x, block):
            codes, scales = part(payload, start, stop)
            units = lookup(codes, bits, levels) if levels else codes.view(torch.int8).float() / 127
            x[start:stop] = (units[: stop - start].view(scales.numel(), -1) * scales.float()[:, None]).view(-1)
        return x

    def payload_bytes(numel: int) -> int:
        return num_bytes(numel, bits) + scale_dtype.itemsize * num_blocks(numel, block)

    return Codec(
        encode,
        decode,
        draws=draws,
        unbiased=draws,
        contraction=contraction,
        blockwise=None if draws else block,
        payload_bytes=payload_bytes,
    )
