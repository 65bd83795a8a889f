"""Boundary codecs that send a whole number of few bits per element and a scale per group: `intk` and `aqsgd`."""

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gossamer.boundaries.contract import Boundary, in_pieces, join
from gossamer.codecs.blocks import absmax_bf16
from gossamer.codecs.packing import num_bytes, pack_codes, unpack_codes
from gossamer.settings.options import Count, factory

Bits = Annotated[int, Field(ge=2, le=8)]


def _most(bits: int, zero: bool) -> float:
    """The number of steps from the middle level to the largest magnitude."""
    return (1 << bits - 1) - 1 if zero else ((1 << bits) - 1) / 2


def _encoded(groups: Tensor, bits: int, zero: bool = True) -> Tensor:
    """The codes and scales of `[groups, elements]` in fp32."""
    scales, top = absmax_bf16(groups), _most(bits, zero)
    wide = scales.float()
    # A group that is not finite has the scale NaN, whatever its codes.
    steps = groups / wide.masked_fill(wide == 0, 1.0)[:, None] * top
    codes = steps.round_().nan_to_num_(0.0) + top if zero else (steps + top).round_().nan_to_num_(0.0)
    return join(pack_codes(codes.to(torch.uint8).reshape(-1), bits), scales)


def _decoded(payload: Tensor, groups: int, elements: int, bits: int, zero: bool = True) -> Tensor:
    packed, scales = in_pieces(payload, num_bytes(groups * elements, bits), 2 * groups)
    top = _most(bits, zero)
    steps = unpack_codes(packed, bits, groups * elements).view(groups, elements).float() - top
    return steps / top * scales.view(torch.bfloat16).float()[:, None]


@factory
def intk(bits: Bits = 6, group: Count = 32, zero: bool = True) -> Boundary:
    """Sends every element as one of 2^bits - 1 levels, evenly spaced up to the largest magnitude of its group of channels.

    s = max |h| over the group;   q = round(h / s · (2^(bits - 1) - 1));   h' = s q / (2^(bits - 1) - 1)

    A group with a NaN or an infinity decodes to NaN throughout.

    Args:
        bits: of an element.
        zero: whether zero is a level. With false there are 2^bits, as the authors have them, and none is zero:
            q = round((h / s + 1) (2^bits - 1) / 2), h' = s (2 q / (2^bits - 1) - 1). At 2 bits that is four levels in place of
            three, and a relative error on Gaussian data of 0.45 in place of 0.66; from 6 bits on the two are alike.
        group: neighbouring channels of one token that share a scale; it divides the hidden size.
    Cost: bits + 16/group bits per element, 6.5 for 6 bits in groups of 32.
    Source: the fixed-point quantizer of the gradients in the code of TAH-Quant, arXiv 2506.01352.
    Differs: scales are bf16, rounded up, and levels are symmetric. With fp16 scales a group of gradients below 6e-8 would
        vanish, and the authors' 1e-6 in the denominator shrinks all of that size.
    Fails when: a group holds an outlier: the rest of it rounds to zero. On activations use `tahquant`.

    >>> boundary = intk(bits=3, group=2); h = torch.tensor([[[1.0, -0.4]]])
    >>> boundary.decode(boundary.encode(h), h)
    tensor([[[ 1.0000, -0.3333]]])
    """

    def encode(h: Tensor) -> Tensor:
        return _encoded(h.float().reshape(-1, group), bits, zero)

    def decode(payload: Tensor, like: Tensor) -> Tensor:
        return _decoded(payload, like.numel() // group, group, bits, zero).view(like.shape).to(like.dtype)

    def most_bytes(shape: tuple[int, int, int]) -> int:
        return num_bytes(math.prod(shape), bits) + 2 * (math.prod(shape) // group)

    return Boundary(encode, decode, most_bytes, unit=group)


@factory
def aqsgd(bits: Bits = 4) -> Boundary:
    """Sends how a sample's activations have changed since its last visit, in few bits; a first visit is sent whole.

    m(ξ) = a(ξ) at the first visit of sample ξ, then   m(ξ) += Q(a(ξ) - m(ξ));   the receiving stage trains on m(ξ)

    Both ends keep m and compute it from the same bytes, so that they agree to the last bit. As the model settles the difference
    shrinks, and with it the error, which a quantizer of `a` itself would keep. Q has a scale per channel of a sequence.

    Args:
        bits: of an element of the difference.
    Cost: bits + 16/S bits per element for sequences of S tokens, 32 at a first visit; on each end, the last message of every
        sample of the worker: windows · S · D elements.
    Source: AQ-SGD, arXiv 2206.01299, and its code: 4 bits forward, 8 backward, one scale per channel.
    Differs: scales are per sequence rather than per micro-batch, so that neighbours do not change a sample's message; m
        is fp32 rather than fp16, and there is no first epoch without compression beyond the first visits.
    Fails when: samples are seen once, as in one epoch of pretraining: every visit is a first one. Use it for activations, as the
        gradients of a sample do not come near each other from visit to visit.

    >>> boundary = aqsgd(); change = torch.tensor([[[0.1], [-0.7]]])
    >>> boundary.decode(boundary.encode(change), change).flatten().tolist()
    [0.1004464328289032, -0.703125]
    """

    def encode(h: Tensor) -> Tensor:
        return _encoded(h.float().transpose(1, 2).reshape(-1, h.shape[1]), bits)

    def decode(payload: Tensor, like: Tensor) -> Tensor:
        B, S, D = like.shape
        return _decoded(payload, B * D, S, bits).view(B, D, S).transpose(1, 2).contiguous().to(like.dtype)

    def most_bytes(shape: tuple[int, int, int]) -> int:
        return 4 * math.prod(shape)  # of first visits

    def again_bytes(shape: tuple[int, int, int]) -> int:
        B, S, D = shape
        return B * (num_bytes(S * D, bits) + 2 * D)  # each sample is sent separately

    return Boundary(encode, decode, most_bytes, fixed=False, again_bytes=again_bytes)
