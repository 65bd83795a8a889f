"""DiLoCoX: DiLoCo on pseudo-gradients of low rank with error feedback, whose mean arrives while the next round trains."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer import rng
from gossamer.layout import Layout
from gossamer.options import Count, Decay, Positive, factory
from gossamer.rules.contract import Context, Rule
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
    """Where the round began, the momentum, the error to send next, what is in flight, and the right factors to start from."""

    anchor: Tensor
    b: Tensor
    unsent: Tensor
    flying: Tree
    basis: Tensor


@factory
def dilocox(
    lr: Positive = 0.4,
    momentum: Decay = 0.9,
    rank: Count = 64,
    form: Literal["restart", "eager", "blocking"] = "restart",
) -> Rule:
    """DiLoCo in which each matrix of the pseudo-gradient is sent as two factors, and their mean is applied a round late.

    m_i = e_i + θ(start) - θ_i(end);   P = orth(m_i V_i), Q = m_iᵀ P for each matrix;   c_i = decode(P) decode(Q)ᵀ
    e_i ← m_i - c_i;   V_i ← decode(Q);   d = (1/n) Σ_j c_j of the last round;   b ← μ b + d;   θ ← θ(start) - η (d + μ b)

    "restart" is this: a worker's own round counts through the mean alone. "eager" replaces its own old share by its new drift,
    d_i = d + (1/n) (θ(start) - θ_i(end) - c_i), as `eager` does. "blocking" waits for the mean of the same round. The codec of
    the run, int4 in the paper, carries P and Q; biases, norms and matrices that factors would not make smaller are sent whole.

    Args:
        lr: outer learning rate η.
        momentum: outer Nesterov momentum μ.
        rank: r, columns of P and Q.
        form: what becomes of the local progress while the mean is in flight.
    Cost: r (rows + columns) numbers per matrix in place of rows · columns, to everyone: n - 1 payloads per worker and round, in
        flight while the next round trains; start, momentum, error, message in flight (not if "blocking") and V kept (4 P and V).
    Source: DiLoCoX, arXiv 2506.21263, from its abstract and public summaries; low rank as in PowerSGD, arXiv 1905.13727.
    Differs: coded messages are gathered, where PowerSGD reduces P and then Q, in two sums that depend on each other. V is each
        worker's own, and drawn in round 0. A message that is in flight has an error that is not known when the next one is
        sent, so its error is added to the one after that. The rank and the local steps stay as they are set, where theirs shrink
        with the effective rank of the mean. What becomes of the local progress was not readable: both forms are ours.
    Fails when: a worker leaves, as its unsent error is lost; workers on different processors decode products that differ in the
        last bit, and drift apart; or the pseudo-gradient has many directions of equal size.

    >>> dilocox(rank=8).delay_rounds, dilocox(form="blocking").delay_rounds
    (1, 0)
    """
    eta, mu, delayed = lr, momentum, form != "blocking"

    def init(x: Tensor, ctx: Context) -> _State:
        drawn = [
            torch.randn(m.columns * m.rank, generator=rng.torch_rng(0, "dilocox", k))
            for k, m in enumerate(_matrices(ctx.layout, rank))
        ]
        zeros = torch.zeros_like(x)
        basis = torch.cat([torch.empty(0), *drawn]).to(x)
        return _State(x.clone(), zeros, zeros.clone(), zeros.clone() if delayed else (), basis)

    def pending(x: Tensor, s: _State) -> Tensor:
        return s.unsent + (s.anchor - x)

    def send(x: Tensor, s: _State, ctx: Context) -> _Factors:
        return _factored(pending(x, s), s.basis, _matrices(ctx.layout, rank))

    def recv(x: Tensor, s: _State, told: _Factors, heard: _Factors, ctx: Context) -> tuple[Tensor, _State]:
        matrices = _matrices(ctx.layout, rank)
        c = _whole(told, matrices, x)
        d = _mean(heard, told, matrices, x)
        if form == "eager":
            d = d + (1.0 / ctx.n) * ((s.anchor - x) - c)
        b = mu * s.b + d
        theta = s.anchor - eta * (d + mu * b)
        now = pending(x, s)
        unsent, flying = (s.flying - c, now) if delayed else (now - c, ())
        return theta, _State(theta, b, unsent, flying, told.right)

    return Rule(
        init,
        send,
        _gathered,
        recv,
        needs="everyone",
        n1_limit="outer optimizer",
        elementwise=False,
        identical=form != "eager",
        feeds_back=True,
        state_copies=3 + delayed,
        delay_rounds=int(delayed),
        reset=lambda x, s: s._replace(b=torch.zeros_like(s.b)),
        start=lambda s: s.anchor,
    )


def _gathered(told: Tree, heard: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The messages of all workers in their order, one behind the other in each tensor."""
    return map_leaves(lambda *each: torch.cat(each), *(told if j == i else heard[j] for j, _ in row))


@lru_cache(maxsize=64)
def _matrices(layout: Layout, rank: int) -> tuple[_Matrix, ...]:
    """The tensors of a layout that two factors of this rank make smaller; one of more than two axes counts by its first."""
    found = []
    for leaf in layout.leaves:
        rows = leaf.shape[0] if len(leaf.shape) > 1 else 1
        columns = (leaf.stop - leaf.start) // max(rows, 1)
        if rank * (rows + columns) < rows * columns:
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


def _mean(heard: _Factors, own: _Factors, matrices: Sequence[_Matrix], like: Tensor) -> Tensor:
    """The mean of the vectors that the gathered messages stand for, summed in their order."""
    sizes = [leaf.numel() for leaf in own]
    n = max(gathered.numel() // size for gathered, size in zip(heard, sizes, strict=True) if size)
    total: Tensor | None = None
    for k in range(n):
        one = _Factors(*(leaf[k * size : (k + 1) * size] for leaf, size in zip(heard, sizes, strict=True)))
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
