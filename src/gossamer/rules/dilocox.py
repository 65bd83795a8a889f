"""DiLoCoX: DiLoCo on pseudo-gradients of low rank with error feedback, whose mean arrives while the next round trains."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer import rng
from gossamer.layout import Layout
from gossamer.rules.contract import Adapted, Context, Rule
from gossamer.settings.options import Count, Decay, Number, Positive, factory
from gossamer.topologies.mixing import Row, widen
from gossamer.tree import Tree, map_leaves

__all__ = ["dilocox"]


class _Matrix(NamedTuple):
    """A tensor that is sent as two factors, `[rows, rank]` and `[columns, rank]`."""

    start: int
    stop: int
    rows: int
    columns: int
    rank: int


class _Factors(NamedTuple):
    """A message: the left and the right factors of all matrices, and what is not factored, each one flat tensor."""

    left: Tensor
    right: Tensor
    rest: Tensor


class _State(NamedTuple):
    """Where the round began, the momentum, the error to send next, what is in flight, and the right factors to start from.

    Those are always of full rank. A tally of the effective ranks counts towards the next decision on the rank.
    """

    anchor: Tensor
    b: Tensor
    unsent: Tensor
    flying: Tree
    basis: Tensor
    tally: Tree


@factory
def dilocox(
    lr: Positive = 0.4,
    momentum: Decay = 0.9,
    rank: Count = 64,
    form: Literal["restart", "eager", "blocking"] = "restart",
    adapt_every: Number = 0,
) -> Rule:
    """DiLoCo in which each matrix of the pseudo-gradient is sent as two factors, and their mean is applied a round late.

    m_i = e_i + θ(start) - θ_i(end);   P = orth(m_i V_i), Q = m_iᵀ P for each matrix;   c_i = decode(P) decode(Q)ᵀ
    e_i ← m_i - c_i;   V_i ← decode(Q);   d = (1/n) Σ_j c_j of the last round;   b ← μ b + d;   θ ← θ(start) - η (d + μ b)

    "restart" is this: a worker's own round counts through the mean alone. "eager" replaces its own old share by its new drift,
    d_i = d + (1/n) (θ(start) - θ_i(end) - c_i), as `eager` does. "blocking" waits for the mean of the same round. The codec of
    the run, int4 in the paper, carries P and Q; biases, norms and matrices that factors would not make smaller are sent whole.

    Each `adapt_every` rounds r ← min(r_1, ⌈mean of exp(-Σ_k p_k log p_k)⌉) over these rounds and matrices of d, p_k = σ_k²/Σσ²
    of singular values σ, and H_i ← max(1, ⌊H_i,1 r / r_1⌋). All workers have the same d. r_1 and H_i,1 are those set.

    Args:
        lr: outer learning rate η.
        momentum: outer Nesterov momentum μ.
        rank: r, columns of P and Q; the most of them and the first, r_1, if they adapt.
        form: what becomes of the local progress while the mean is in flight.
        adapt_every: rounds between two decisions on rank and local steps; 0 leaves both as they are.
    Cost: r (rows + columns) numbers per matrix in place of rows · columns, to everyone: n - 1 payloads per worker and round, in
        flight while the next round trains; start, momentum, error, message in flight (not if "blocking") and V kept (4 P and V).
    Source: DiLoCoX, arXiv 2506.21263, from its abstract and public summaries; low rank as in PowerSGD, arXiv 1905.13727.
    Differs: coded messages are gathered, where PowerSGD reduces P and then Q, in two sums that depend on each other. V is each
        worker's own, and drawn in round 0. A message that is in flight has an error that is not known when the next one is
        sent, so its error is added to the one after that. What becomes of the local progress, and how rank and steps are found
        exactly, was not readable: both forms, the entropy, one rank for all matrices and the rounding are ours.
    Fails when: a worker leaves, as its unsent error is lost; workers on different processors decode products that differ in the
        last bit, drift apart, and may decide on different ranks; or the pseudo-gradient has many directions of equal size.

    >>> dilocox(rank=8).delay_rounds, dilocox(form="blocking").delay_rounds
    (1, 0)
    """
    eta, mu, delayed = lr, momentum, form != "blocking"

    def factored(ctx: Context) -> tuple[_Matrix, ...]:
        return _matrices(ctx.layout, rank, min(ctx.rank, rank) or rank)

    def init(x: Tensor, ctx: Context) -> _State:
        zeros, basis = torch.zeros_like(x), _drawn(_matrices(ctx.layout, rank, rank)).to(x)
        tally = torch.tensor([rank, 0.0, 0.0], dtype=torch.float64, device=x.device) if adapt_every else ()
        return _State(x.clone(), zeros, zeros.clone(), zeros.clone() if delayed else (), basis, tally)

    def pending(x: Tensor, s: _State) -> Tensor:
        return s.unsent + (s.anchor - x)

    def send(x: Tensor, s: _State, ctx: Context) -> _Factors:
        matrices = factored(ctx)
        return _factored(pending(x, s), _first_columns(s.basis, matrices, rank), matrices)

    def recv(x: Tensor, s: _State, own_decoded: _Factors, combined: _Factors, ctx: Context) -> tuple[Tensor, _State]:
        matrices = factored(ctx)
        c = _whole(own_decoded, matrices, x)
        d = _mean(combined, own_decoded, matrices, x)
        tally = _counted(s.tally, d, matrices, rank, adapt_every) if isinstance(s.tally, Tensor) else ()
        if form == "eager":
            d = d + (1.0 / ctx.n) * ((s.anchor - x) - c)
        b = mu * s.b + d
        theta = s.anchor - eta * (d + mu * b)
        now = pending(x, s)
        unsent, flying = (s.flying - c, now) if delayed else (now - c, ())
        return theta, _State(theta, b, unsent, flying, _with_columns(s.basis, own_decoded.right, matrices, rank), tally)

    return Rule(
        init,
        send,
        _gathered,
        recv,
        needs="everyone",
        single_worker_limit="outer optimizer",
        elementwise=False,
        identical=form != "eager",
        unsent=lambda s: s.unsent,
        state_copies=3 + delayed,
        delay_rounds=int(delayed),
        reset=lambda x, s: s._replace(b=torch.zeros_like(s.b)),
        start=lambda s: s.anchor,
        adapted=(lambda s: _decided(s.tally, rank)) if adapt_every else None,
    )


def _drawn(matrices: Sequence[_Matrix]) -> Tensor:
    """The right factors of all matrices in round 0, the same for every worker."""
    sizes = (one.columns * one.rank for one in matrices)
    drawn = [torch.randn(size, generator=rng.torch_rng(0, "dilocox", k)) for k, size in enumerate(sizes)]
    return torch.cat([torch.empty(0), *drawn])


def _gathered(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The messages of all workers in their order, one behind the other in each tensor."""
    return map_leaves(lambda *each: torch.cat(each), *(own_decoded if j == i else received[j] for j, _ in row))


@lru_cache(maxsize=64)
def _matrices(layout: Layout, full_rank: int, rank: int) -> tuple[_Matrix, ...]:
    """The tensors that two factors of full rank make smaller, for factors of `rank`; more than two axes count by their first."""
    found = []
    for leaf in layout.leaves:
        rows = leaf.shape[0] if len(leaf.shape) > 1 else 1
        columns = (leaf.stop - leaf.start) // max(rows, 1)
        if full_rank * (rows + columns) < rows * columns:
            found.append(_Matrix(leaf.start, leaf.stop, rows, columns, rank))
    return tuple(found)


def _factored(m: Tensor, basis: Tensor, matrices: Sequence[_Matrix]) -> _Factors:
    """One step of the power iteration for each matrix, from the right factors in `basis`."""
    left, right = [m[:0]], [m[:0]]
    places = _places(matrices)
    for one, (_, (a, b)) in zip(matrices, places, strict=True):
        matrix = widen(m[one.start : one.stop]).view(one.rows, one.columns)
        p = torch.linalg.qr(matrix @ widen(basis[a:b]).view(one.columns, one.rank)).Q
        left.append(p.reshape(-1).to(m.dtype))
        right.append((matrix.T @ p).reshape(-1).to(m.dtype))
    return _Factors(torch.cat(left), torch.cat(right), torch.cat([m[a:b] for a, b in _between(matrices, m.numel())]))


def _first_columns(basis: Tensor, matrices: Sequence[_Matrix], full_rank: int) -> Tensor:
    """Of right factors of full rank, as many columns as these matrices are sent with."""
    if all(one.rank == full_rank for one in matrices):
        return basis
    return torch.cat([v[:, : one.rank].reshape(-1) for one, v in _columns(basis, matrices, full_rank)])


def _with_columns(basis: Tensor, right: Tensor, matrices: Sequence[_Matrix], full_rank: int) -> Tensor:
    """Right factors of full rank whose first columns are those that were sent; the others wait for a larger rank."""
    if all(one.rank == full_rank for one in matrices):
        return right
    basis = basis.clone()
    sent = (right[a:b] for _, (a, b) in _places(matrices))
    for (one, v), q in zip(_columns(basis, matrices, full_rank), sent, strict=True):
        v[:, : one.rank] = q.view(one.columns, one.rank)
    return basis


def _columns(basis: Tensor, matrices: Sequence[_Matrix], full_rank: int) -> Iterator[tuple[_Matrix, Tensor]]:
    """Each matrix with its right factor of full rank."""
    full = [one._replace(rank=full_rank) for one in matrices]
    for one, (_, (a, b)) in zip(matrices, _places(full), strict=True):
        yield one, basis[a:b].view(one.columns, full_rank)


def _counted(tally: Tensor, d: Tensor, matrices: Sequence[_Matrix], full_rank: int, every: int) -> Tensor:
    """Rank, and sum and number of the effective ranks since it was decided, after a mean d; all zeros count for nothing."""
    found = [_effective_rank(d[one.start : one.stop].view(one.rows, one.columns)) for one in matrices]
    seen = [one for one in found if one > 0]
    if not seen:
        return tally
    rank, total, count = tally.tolist()
    total, count = total + sum(seen) / len(seen), count + 1
    if count == every:
        average = total / count - 1e-6  # a whole number up to rounding is whole
        rank, total, count = min(full_rank, ceil(average)), 0.0, 0
    return torch.tensor([rank, total, count], dtype=tally.dtype, device=tally.device)


def _effective_rank(matrix: Tensor) -> float:
    """The exponential of the entropy of the squared singular values: k for k equal ones; 0 for zeros."""
    squares = torch.linalg.svdvals(matrix.double()).square()
    if not (total := squares.sum()) > 0:
        return 0.0
    p = squares / total
    return float(torch.special.entr(p).sum().exp())


def _decided(tally: Tensor, full_rank: int) -> Adapted:
    """What a tally says of the next round; without data, as when traffic is counted, it is the first."""
    return Adapted(full_rank if tally.is_meta else int(tally[0]), full_rank)


def _whole(message: _Factors, matrices: Sequence[_Matrix], like: Tensor) -> Tensor:
    """The vector that a message stands for."""
    x, at = torch.empty_like(like), 0
    for one, ((a, b), (c, d)) in zip(matrices, _places(matrices), strict=True):
        p, q = message.left[a:b].view(one.rows, one.rank), message.right[c:d].view(one.columns, one.rank)
        x[one.start : one.stop] = (p @ q.T).reshape(-1)
    for a, b in _between(matrices, like.numel()):
        x[a:b] = message.rest[at : at + b - a]
        at += b - a
    return x


def _mean(combined: _Factors, own: _Factors, matrices: Sequence[_Matrix], like: Tensor) -> Tensor:
    """The mean of the vectors that the gathered messages stand for, summed in their order."""
    sizes = [leaf.numel() for leaf in own]
    n = max(gathered.numel() // size for gathered, size in zip(combined, sizes, strict=True) if size)
    total: Tensor | None = None
    for k in range(n):
        one = _Factors(*(leaf[k * size : (k + 1) * size] for leaf, size in zip(combined, sizes, strict=True)))
        share = (1.0 / n) * _whole(one, matrices, like)
        total = share if total is None else total + share
    assert total is not None
    return total


def _places(matrices: Sequence[_Matrix]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where the left and the right factor of each matrix stand in the flat tensors of a message."""
    ends = [(0, 0)]
    for one in matrices:
        ends.append((ends[-1][0] + one.rows * one.rank, ends[-1][1] + one.columns * one.rank))
    return [((a, c), (b, d)) for (a, b), (c, d) in pairwise(ends)]


def _between(matrices: Sequence[_Matrix], numel: int) -> Iterator[tuple[int, int]]:
    """The parts of the vector that no factored matrix covers; at least one, which may be empty."""
    end = 0
    for one in matrices:
        yield end, one.start
        end = one.stop
    yield end, numel
