"""A vector whose matrices are sent as two factors of low rank each, by one step of the power iteration (PowerSGD)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer import rng
from gossamer.layout import Layout
from gossamer.topologies.mixing import widen


class Matrix(NamedTuple):
    """A tensor that is sent as two factors, `[rows, rank]` and `[columns, rank]`."""

    start: int
    stop: int
    rows: int
    columns: int
    rank: int


class Factors(NamedTuple):
    """A message: the left and the right factors of all matrices, and what is not factored, each one flat tensor."""

    left: Tensor
    right: Tensor
    rest: Tensor


def drawn(matrices: Sequence[Matrix]) -> Tensor:
    """The right factors of all matrices in round 0, the same for every worker."""
    sizes = (one.columns * one.rank for one in matrices)
    kind = torch.float32
    normal = [torch.randn(size, dtype=kind, generator=rng.torch_rng(0, "dilocox", k)) for k, size in enumerate(sizes)]
    return torch.cat([torch.empty(0, dtype=kind), *normal])


@lru_cache(maxsize=64)
def matrices_of(layout: Layout, full_rank: int, rank: int) -> tuple[Matrix, ...]:
    """The tensors that two factors of full rank make smaller, for factors of `rank`; more than two axes count by their first."""
    matrices = []
    for leaf in layout.leaves:
        rows = leaf.shape[0] if len(leaf.shape) > 1 else 1
        columns = (leaf.stop - leaf.start) // max(rows, 1)
        if full_rank * (rows + columns) < rows * columns:
            matrices.append(Matrix(leaf.start, leaf.stop, rows, columns, rank))
    return tuple(matrices)


def factored(m: Tensor, basis: Tensor, matrices: Sequence[Matrix]) -> Factors:
    """One step of the power iteration for each matrix, from the right factors in `basis`."""
    left, right = [m[:0]], [m[:0]]
    places = _places(matrices)
    for one, (_, (a, b)) in zip(matrices, places, strict=True):
        matrix = widen(m[one.start : one.stop]).view(one.rows, one.columns)
        p = torch.linalg.qr(matrix @ widen(basis[a:b]).view(one.columns, one.rank)).Q
        left.append(p.reshape(-1).to(m.dtype))
        right.append((matrix.T @ p).reshape(-1).to(m.dtype))
    return Factors(torch.cat(left), torch.cat(right), torch.cat([m[a:b] for a, b in _between(matrices, m.numel())]))


def first_columns(basis: Tensor, matrices: Sequence[Matrix], full_rank: int) -> Tensor:
    """The leading columns of right factors of full rank, as many as these matrices are sent with."""
    if all(one.rank == full_rank for one in matrices):
        return basis
    return torch.cat([v[:, : one.rank].reshape(-1) for one, v in _columns(basis, matrices, full_rank)])


def with_columns(basis: Tensor, right: Tensor, matrices: Sequence[Matrix], full_rank: int) -> Tensor:
    """Right factors of full rank whose first columns are those that were sent; the others wait for a larger rank."""
    if all(one.rank == full_rank for one in matrices):
        return right
    basis = basis.clone()
    sent = (right[a:b] for _, (a, b) in _places(matrices))
    for (one, v), q in zip(_columns(basis, matrices, full_rank), sent, strict=True):
        v[:, : one.rank] = q.view(one.columns, one.rank)
    return basis


def _columns(basis: Tensor, matrices: Sequence[Matrix], full_rank: int) -> Iterator[tuple[Matrix, Tensor]]:
    """Each matrix with its right factor of full rank."""
    full = [one._replace(rank=full_rank) for one in matrices]
    for one, (_, (a, b)) in zip(matrices, _places(full), strict=True):
        yield one, basis[a:b].view(one.columns, full_rank)


def effective_rank(matrix: Tensor) -> float:
    """The exponential of the entropy of the squared singular values: k for k equal ones; 0 for zeros."""
    squares = torch.linalg.svdvals(matrix.double()).square()
    if not (total := squares.sum()) > 0:
        return 0.0
    p = squares / total
    return float(torch.special.entr(p).sum().exp())


def whole(message: Factors, matrices: Sequence[Matrix], like: Tensor) -> Tensor:
    """The vector that a message stands for."""
    x, at = torch.empty_like(like), 0
    for one, ((a, b), (c, d)) in zip(matrices, _places(matrices), strict=True):
        p, q = message.left[a:b].view(one.rows, one.rank), message.right[c:d].view(one.columns, one.rank)
        x[one.start : one.stop] = (p @ q.T).reshape(-1)
    for a, b in _between(matrices, like.numel()):
        x[a:b] = message.rest[at : at + b - a]
        at += b - a
    return x


def mean_of_gathered(combined: Factors, own: Factors, matrices: Sequence[Matrix], like: Tensor) -> Tensor:
    """The mean of the vectors that the gathered messages stand for, summed in their order."""
    sizes = [leaf.numel() for leaf in own]
    n = max(gathered.numel() // size for gathered, size in zip(combined, sizes, strict=True) if size)
    total: Tensor | None = None
    for k in range(n):
        one = Factors(*(leaf[k * size : (k + 1) * size] for leaf, size in zip(combined, sizes, strict=True)))
        share = (1.0 / n) * whole(one, matrices, like)
        total = share if total is None else total + share
    assert total is not None
    return total


def _places(matrices: Sequence[Matrix]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The positions of the left and the right factor of each matrix in the flat tensors of a message."""
    ends = [(0, 0)]
    for one in matrices:
        ends.append((ends[-1][0] + one.rows * one.rank, ends[-1][1] + one.columns * one.rank))
    return [((a, c), (b, d)) for (a, b), (c, d) in pairwise(ends)]


def _between(matrices: Sequence[Matrix], numel: int) -> Iterator[tuple[int, int]]:
    """The parts of the vector that no factored matrix covers; at least one, which may be empty."""
    end = 0
    for one in matrices:
        yield end, one.start
        end = one.stop
    yield end, numel
