"""The codec that keeps the largest frequencies of the tensor."""

import functools
import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gossamer.codecs.blocks import empty, num_blocks, spans
from gossamer.codecs.codec import Codec
from gossamer.codecs.topk import Kept, ValueFormat, topk, value_dtype
from gossamer.settings.options import factory

_SIDE = 64
_TILE = _SIDE * _SIDE


@factory
def dct_topk(k: Annotated[int, Field(ge=1, le=_TILE)] = 64, values: ValueFormat = "same") -> Codec:
    """Sends the k largest coefficients of the cosine transform of every run of 4096 elements, taken as 64 x 64.

    C = D X Dᵀ with D_fj = √(2/64) cos(π (j + ½) f / 64), row 0 over √2;   X' = Dᵀ topk(C) D

    D is orthonormal, so ||X - X'||² is the sum of the squares of the coefficients that are not sent. A shorter last run is
    filled up with zeros and costs as much as a whole one. A NaN or an infinity makes all of its run decode to NaN.

    Args:
        k: kept coefficients of a run.
        values: the format of the coefficients on the wire; "same" is that of the tensor.
    Cost: k (12 + value bits) / 4096 bits per element, 0.69 for 64 fp32 values; two products with a 64 x 64 matrix each way.
    Source: DeMo, arXiv 2411.19870.
    Differs: runs of the flat vector rather than tiles of a matrix; signs, momentum and error feedback are left to the rule.
    Fails when: workers run on different processors or libraries: a matrix product may differ in the last bit, and replicas
        that must stay equal drift apart. Without error feedback, the other coefficients are never sent.

    >>> codec = dct_topk(k=1); x = torch.full((4096,), 0.5)
    >>> torch.allclose(codec.decode(codec.encode(x, 0), x), x)
    True
    """
    inner = topk(k, _TILE, values)

    def encode(x: Tensor, key: int) -> Kept:
        kept = inner.encode(coefficients(x), key)
        return Kept(kept.indices, kept.values.to(value_dtype(values, x)))

    def decode(payload: Kept, like: Tensor) -> Tensor:
        kept = empty(num_blocks(like.numel(), _TILE) * _TILE, torch.float32, like.device)
        return from_coefficients(inner.decode(payload, kept), like)

    def payload_bytes(numel: int) -> int:
        assert inner.payload_bytes is not None
        return inner.payload_bytes(num_blocks(numel, _TILE) * _TILE)

    return Codec(encode, decode, contraction=inner.contraction, blockwise=_TILE, payload_bytes=payload_bytes)


def coefficients(x: Tensor) -> Tensor:
    """The cosine transform of every run of 4096 elements of a flat tensor, in fp32; the last run is filled up with zeros.

    >>> x = torch.full((4096,), 0.5); coefficients(x)[:2].round(decimals=4)
    tensor([32.,  0.])
    """
    spectrum = empty(num_blocks(x.numel(), _TILE) * _TILE, torch.float32, x.device)
    spectrum[: x.numel()] = x
    spectrum[x.numel() :] = 0.0
    _transform(spectrum, dct(x.device))
    return spectrum


def from_coefficients(spectrum: Tensor, like: Tensor) -> Tensor:
    """The inverse of `coefficients`, for a tensor of this shape and dtype."""
    x = spectrum.to(torch.float32, copy=True)
    _transform(x, dct(like.device).T)
    return x[: like.numel()].to(like.dtype)


@functools.cache
def dct(device: torch.device) -> Tensor:
    """The orthonormal transform D, fp32 `[64, 64]`, computed in fp64."""
    frequency = torch.arange(_SIDE, dtype=torch.float64)[:, None]
    place = torch.arange(_SIDE, dtype=torch.float64)
    waves = math.sqrt(2 / _SIDE) * torch.cos(math.pi * (place + 0.5) * frequency / _SIDE)
    waves[0] /= math.sqrt(2)
    return waves.float().to(device)


def _transform(x: Tensor, matrix: Tensor) -> None:
    """M X Mᵀ of every 64 x 64 run of a flat tensor, in place."""
    for start, stop in spans(x, _TILE):
        tiles = x[start:stop].view(-1, _SIDE, _SIDE)
        tiles.copy_(matrix @ (tiles @ matrix.T))
