"""Partitions of a flat vector into short rows that are encoded separately: runs of it, or tiles of its matrices."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from gossamer.codecs.blocks import num_blocks, slab_on, spans
from gossamer.layout import Layout


class Cut(NamedTuple):
    """The rows of a flat vector of `numel` elements, in the order in which they are encoded."""

    numel: int
    rows: tuple[tuple[int, int], ...]
    """How many rows of which length there are, in order; the lengths of neighbours differ."""
    views: Callable[[Tensor], Iterator[Tensor]]
    """Views `[m, n, height, width]` of the vector, each of m n rows of height · width elements; none on the meta device."""

    def kept(self, k: int, chunk: int) -> tuple[tuple[int, int], ...]:
        """As `rows`, with the elements that are kept of each in place of its length: its share of k in `chunk`, rounded up."""
        return tuple((count, num_blocks(length * k, chunk)) for count, length in self.rows)


def vector_cut(numel: int, chunk: int) -> Cut:
    """Runs of `chunk` elements, and a shorter last one."""

    def views(x: Tensor) -> Iterator[Tensor]:
        for start, stop in spans(x, chunk):
            yield x[start:stop].reshape(-1, 1, 1, min(chunk, stop - start))

    return Cut(numel, _merged([(numel // chunk, chunk), (1, numel % chunk)]), views)


def tiles(layout: Layout, chunk: int) -> Cut:
    """The tensors one after the other: each matrix in the tiles of `chunk` elements that are nearest to a square, no wider than
    high, smaller ones at its right and lower edges; each vector in runs. Further dimensions count as columns.

    >>> from gossamer.layout import Leaf
    >>> layout = Layout((Leaf("w", (100, 70), 0, 7000), Leaf("b", (100,), 7000, 7100)), 7100)
    >>> tiles(layout, 4096).rows        # 64 x 64; 64 x 6; 36 x 64; 36 x 6; the vector
    ((1, 4096), (1, 384), (1, 2304), (1, 216), (1, 100))
    """
    width = max(d for d in range(1, math.isqrt(chunk) + 1) if chunk % d == 0)
    blocks = [
        (leaf.start, leaf.stop, columns, block)
        for leaf in layout.leaves
        for columns in (leaf.shape[0] and (leaf.stop - leaf.start) // leaf.shape[0] if len(leaf.shape) > 1 else 0,)
        for block in _blocks(leaf.stop - leaf.start, columns, chunk // width, width, chunk)
    ]

    def views(x: Tensor) -> Iterator[Tensor]:
        for start, stop, columns, (top, left, m, n, height, across) in () if x.is_meta else blocks:
            matrix = x[start:stop].reshape(-1, columns or stop - start)
            step = max(1, slab_on(x.device) // (height * n * across))
            for first in range(0, m, step):
                few = min(step, m - first)
                begin = top + first * height
                part = matrix[begin : begin + few * height, left : left + n * across]
                yield part.unflatten(0, (few, height)).unflatten(2, (n, across)).transpose(1, 2)

    return Cut(layout.numel, _merged([(m * n, height * across) for *_, (_, _, m, n, height, across) in blocks]), views)


_Block = tuple[int, int, int, int, int, int]
"""A grid of equal tiles: first row and column, tiles down and across, and their height and width."""


def _blocks(numel: int, columns: int, height: int, width: int, chunk: int) -> list[_Block]:
    """The blocks of equal tiles of a matrix; of a vector, for which `columns` is 0, as a matrix of one row."""
    rows = numel // columns if columns else 1
    if not columns:
        columns, height, width = numel, 1, chunk
    blocks = []
    for top, m, h in ((0, rows // height, height), (rows - rows % height, 1, rows % height)):
        for left, n, w in ((0, columns // width, width), (columns - columns % width, 1, columns % width)):
            if m * n * h * w:
                blocks.append((top, left, m, n, h, w))
    return blocks


def _merged(rows: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours of one length as one; without those that have no elements."""
    merged: list[tuple[int, int]] = []
    for count, length in rows:
        if count * length and merged and merged[-1][1] == length:
            merged[-1] = merged[-1][0] + count, length
        elif count * length:
            merged.append((count, length))
    return tuple(merged)
