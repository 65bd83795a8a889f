"""TAH-Quant: tiles of channels, bits by entropy, and a Hadamard rotation of tiles that an outlier dominates."""

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.boundaries.contract import Boundary, in_pieces, join
from gossamer.boundaries.intk import Bits
from gossamer.codecs.packing import num_bytes, pack_codes, unpack_codes
from gossamer.settings.options import Portion, factory

Tile = Literal[8, 16, 32, 64, 128, 256]


class _Plan(NamedTuple):
    """The settings of a `tahquant`."""

    tile: int
    high: int
    low: int
    share: float
    token: bool

    def counts(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Tiles, bits of the map of precisions, and those of them that are set: units of low precision."""
        B, S, D = shape
        tiles = B * S * (D // self.tile)
        if self.token:
            return tiles, B * S, B * int(S * (1 - self.share))
        return tiles, tiles, round((1 - self.share) * tiles)

    def low_tiles(self, shape: tuple[int, int, int]) -> int:
        """Tiles of low precision."""
        tiles, units, lows = self.counts(shape)
        return lows * (tiles // units)


@functools.cache
def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix `[size, size]` over √size: symmetric and orthonormal, its first row constant.

    >>> hadamard(4) * 2
    tensor([[ 1.,  1.,  1.,  1.],
            [ 1., -1.,  1., -1.],
            [ 1.,  1., -1., -1.],
            [ 1., -1., -1.,  1.]])
    """
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return (h / math.sqrt(size)).float()


@factory
def tahquant(
    tile: Tile = 64,
    bits: Bits = 4,
    low_bits: Bits = 3,
    high_share: Portion = 0.8,
    granularity: Literal["tile", "token"] = "tile",
) -> Boundary:
    """Sends tiles of neighbouring channels in 4 or 3 bits per element, those that an outlier dominates after a rotation.

    z = min y;   s = (max y - z) / (2^b - 1);   q = round((y - z) / s);   h' = z + s q, rotated back

    A tile whose largest magnitude is at least twice the second largest is rotated: the outlier changes places with the first
    element, and y = H h for the orthonormal Hadamard matrix H, whose first row is constant: so the outlier adds the same to
    every element, which z takes up. Of other tiles y = h. Entropies -Σ p ln p of p = |h| / Σ |h|, before the rotation, decide
    who gets the fewer bits: those with the lowest. A tile with a NaN or an infinity decodes to NaN throughout.

    Args:
        tile: channels of a token that share z and s; it divides the hidden size.
        bits: of an element of high precision.
        low_bits: of an element of low precision.
        high_share: the share of tiles, or of the tokens of a sequence, with high precision.
        granularity: whether tiles of a micro-batch or tokens of a sequence are ranked by entropy.
    Cost: high_share · bits + (1 - high_share) · low_bits + 34/tile bits per element, and log₂(tile) more per rotated tile:
        4.331 to 4.425 with the defaults. By token it is 33/tile + 1/D.
    Source: arXiv 2506.01352; by token its first version and the authors' code, by tile its second.
    Differs: ranking by tile is described in one sentence, so the details are ours: all tiles of a micro-batch, ties by index.
        Codes are computed with z and s as they are sent, in fp16.
    Fails when: magnitudes exceed 65504, beyond which z is infinite, or are below 1e-6, as those of gradients may be,
        where fp16 loses s: for them take `intk`. There is no error feedback, so a bias stays.

    >>> boundary = tahquant(tile=8, high_share=1.0); h = torch.tensor([[[0.0, 0.1, 9.0, 0.2, 0.0, 0.1, 0.3, 0.1]]])
    >>> (boundary.decode(boundary.encode(h), h) - h).abs().max() < 0.05
    tensor(True)
    """
    plan = _Plan(tile, bits, low_bits, high_share, granularity == "token")

    def most_bytes(shape: tuple[int, int, int]) -> int:
        return _bytes(plan, shape, plan.counts(shape)[0])

    return Boundary(
        lambda h: _encode(plan, h),
        lambda payload, like: _decode(plan, payload, like),
        most_bytes,
        fixed=False,
        unit=tile,
    )


def _sizes(plan: _Plan, shape: tuple[int, int, int], rotated: int) -> tuple[int, ...]:
    """The bytes of each part of a payload, in order."""
    tiles, units, _ = plan.counts(shape)
    low = plan.low_tiles(shape)
    return (
        num_bytes(units, 1),
        num_bytes(tiles, 1),
        num_bytes(low * plan.tile, plan.low),
        num_bytes((tiles - low) * plan.tile, plan.high),
        2 * tiles,
        2 * tiles,
        num_bytes(rotated, _pivot_bits(plan)),
    )


def _bytes(plan: _Plan, shape: tuple[int, int, int], rotated: int) -> int:
    return sum(_sizes(plan, shape, rotated))


def _pivot_bits(plan: _Plan) -> int:
    return plan.tile.bit_length() - 1


def _is_low(plan: _Plan, h: Tensor) -> Tensor:
    """Which tiles (or tokens) `[units]` get few bits: those of the lowest entropy, of equal ones the first."""
    values = h.abs() if plan.token else h.abs().view(1, -1, plan.tile)
    p = values / values.sum(-1, keepdim=True).clamp_min(1e-30)
    order = torch.special.entr(p).sum(-1).argsort(dim=1, stable=True)
    low = torch.zeros(order.shape, dtype=torch.bool, device=h.device)
    low.scatter_(1, order[:, : plan.counts((h.shape[0], h.shape[1], h.shape[2]))[2] // len(order)], value=True)
    return low.view(-1)


def _swapped(tiles: Tensor, pivots: Tensor) -> Tensor:
    """The tiles with the pivot element and the first one swapped."""
    out, rows = tiles.clone(), torch.arange(len(tiles), device=tiles.device)
    out[:, 0] = tiles[rows, pivots]
    out[rows, pivots] = tiles[:, 0]
    return out


def _encode(plan: _Plan, h: Tensor) -> Tensor:
    h = h.float().contiguous()
    low_units, tiles = _is_low(plan, h), h.view(-1, plan.tile).clone()
    low = low_units.repeat_interleave(len(tiles) // len(low_units))
    largest = tiles.abs().topk(2, dim=1)
    rotate = largest.values[:, 0] >= 2 * largest.values[:, 1]
    rotate &= largest.values[:, 0] > 0  # nothing is gained by rotating zeros
    pivots = largest.indices[rotate, 0]
    tiles[rotate] = _swapped(tiles[rotate], pivots) @ hadamard(plan.tile).to(h.device)
    z = tiles.amin(1).half()
    spread = torch.where(low, (1 << plan.low) - 1, (1 << plan.high) - 1)
    s = ((tiles.amax(1) - z.float()) / spread).half()
    step = s.float()
    q = ((tiles - z.float()[:, None]) / step.masked_fill(step <= 0, 1.0)[:, None]).round_().nan_to_num_(0.0)
    q = torch.minimum(q.clamp_min_(0), spread[:, None]).to(torch.uint8)
    return join(
        pack_codes(low_units.to(torch.uint8), 1),
        pack_codes(rotate.to(torch.uint8), 1),
        pack_codes(q[low].view(-1), plan.low),
        pack_codes(q[~low].view(-1), plan.high),
        z,
        s,
        pack_codes(pivots.to(torch.uint8), _pivot_bits(plan)),
    )


def _decode(plan: _Plan, payload: Tensor, like: Tensor) -> Tensor:
    B, S, D = like.shape
    tiles, units, lows = plan.counts((B, S, D))
    bitmaps = num_bytes(units, 1) + num_bytes(tiles, 1)
    if payload.numel() < bitmaps:
        raise ValueError(f"a payload of tahquant has {payload.numel()} bytes and should have at least {bitmaps}")
    rotate = unpack_codes(payload[num_bytes(units, 1) : bitmaps].clone(), 1, tiles).bool()
    parts = in_pieces(payload, *_sizes(plan, (B, S, D), int(rotate.sum())))
    low_units = unpack_codes(parts[0], 1, units).bool()
    if int(low_units.sum()) != lows:
        raise ValueError(
            f"a payload of tahquant marks {int(low_units.sum())} units of low precision and should mark {lows}"
        )
    low = low_units.repeat_interleave(tiles // units)
    q = torch.empty(tiles, plan.tile, dtype=torch.float32, device=like.device)
    few = plan.low_tiles((B, S, D)) * plan.tile
    q[low] = unpack_codes(parts[2], plan.low, few).float().view(-1, plan.tile)
    q[~low] = unpack_codes(parts[3], plan.high, tiles * plan.tile - few).float().view(-1, plan.tile)
    z, s = (part.view(torch.float16).float()[:, None] for part in parts[4:6])
    y = q * s + z
    pivots = unpack_codes(parts[6], _pivot_bits(plan), int(rotate.sum())).long()
    y[rotate] = _swapped(y[rotate] @ hadamard(plan.tile).to(like.device), pivots)
    return y.view(like.shape).to(like.dtype)
