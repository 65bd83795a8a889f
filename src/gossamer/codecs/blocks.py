"""Iteration over a flat tensor in blocks, several at a time, and a scale for each block."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.layout import Reused

SLAB = 1 << 16  # elements; fp32 temporaries of this size stay in the cache
# On an accelerator, where each slab costs kernel launches: int8 of 134M numbers took 600 ms, and takes 2.5.
_DEVICE_SLAB = 1 << 26
_BF16_MAX = torch.finfo(torch.bfloat16).max
_MAPPED_BYTES = 1 << 24  # the C library reuses smaller blocks, and maps larger ones again for each allocation
_MEMORY = Reused(keep_bytes=1 << 28)


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for a codec's output; large blocks come from a pool that keeps at most 256 MiB."""
    if device.type != "cpu" or numel * dtype.itemsize < _MAPPED_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    return _MEMORY.take(numel * dtype.itemsize).view(dtype)


def num_blocks(numel: int, block: int) -> int:
    """The number of blocks of this length that cover this many elements."""
    return -(-numel // block)


def slab_on(device: torch.device, slab: int = SLAB) -> int:
    """Elements processed at a time on this device: a slab on a CPU; on another device, as many as its memory can spare."""
    return slab if device.type == "cpu" else _DEVICE_SLAB


def spans(x: Tensor, block: int, slab: int = SLAB) -> Iterator[tuple[int, int]]:
    """Ranges that cover a flat tensor: whole blocks of some `slab` elements each (`slab_on`), and a shorter last block by itself;
    none on the meta device.

    >>> list(spans(torch.empty(70000), 4096))
    [(0, 65536), (65536, 69632), (69632, 70000)]
    """
    if x.is_meta:
        return
    whole = x.numel() // block * block
    step = max(slab_on(x.device, slab) // block, 1) * block
    for start in range(0, whole, step):
        yield start, min(start + step, whole)
    if whole < x.numel():
        yield whole, x.numel()


def as_blocks(x: Tensor, block: int) -> Tensor:
    """A flat tensor as fp32 `[blocks, block]`, the last block filled up with zeros."""
    gap = -x.numel() % block
    return (pad(x.float(), (0, gap)) if gap else x.float()).reshape(-1, block)


def absmax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, fp32; NaN unless that is finite."""
    largest = blocks.abs().amax(1)
    return torch.where(largest.isfinite(), largest, math.nan)


def absmax_bf16(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, rounded up to bf16 so that no element is beyond it; NaN unless that is finite."""
    largest = blocks.abs().amax(1)
    rounded = ((largest.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(largest <= _BF16_MAX, rounded, math.nan)


def storable(scales: Tensor) -> Tensor:
    """Scales rounded to the nearest bf16; NaN unless that is finite."""
    rounded = scales.bfloat16()
    return torch.where(rounded.isfinite(), rounded, math.nan)
