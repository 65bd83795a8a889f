"""DiLoCoX: DiLoCo on pseudo-gradients of low rank with error feedback, whose mean arrives while the next round trains."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Adapted, Context, Rule
from gossamer.rules.low_rank import (
    Factors,
    Matrix,
    drawn,
    effective_rank,
    factored,
    first_columns,
    matrices_of,
    mean_of_gathered,
    whole,
    with_columns,
)
from gossamer.settings.options import Count, Decay, Number, OverTime, Positive, factory
from gossamer.topologies.mixing import Row
from gossamer.tree import Tree, map_leaves


class _State(NamedTuple):
    """Where the round began, the momentum, the error to send next, what is in flight, and the right factors to start from.

    Those are always of full rank. The effective ranks are accumulated for the next decision on the rank.
    """

    anchor: Tensor
    b: Tensor
    unsent: Tensor
    flying: Tree
    basis: Tensor
    tally: Tree


@factory
def dilocox(
    lr: OverTime[Positive] = 0.4,
    momentum: OverTime[Decay] = 0.9,
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

    def matrices(ctx: Context) -> tuple[Matrix, ...]:
        return matrices_of(ctx.layout, rank, min(ctx.rank, rank) or rank)

    def init(x: Tensor, ctx: Context) -> _State:
        zeros, basis = torch.zeros_like(x), drawn(matrices_of(ctx.layout, rank, rank)).to(x)
        tally = torch.tensor([rank, 0.0, 0.0], dtype=torch.float64, device=x.device) if adapt_every else ()
        return _State(x.clone(), zeros, zeros.clone(), zeros.clone() if delayed else (), basis, tally)

    def pending(x: Tensor, s: _State) -> Tensor:
        return s.unsent + (s.anchor - x)

    def send(x: Tensor, s: _State, ctx: Context) -> Factors:
        sent = matrices(ctx)
        return factored(pending(x, s), first_columns(s.basis, sent, rank), sent)

    def recv(x: Tensor, s: _State, own_decoded: Factors, combined: Factors, ctx: Context) -> tuple[Tensor, _State]:
        sent = matrices(ctx)
        c = whole(own_decoded, sent, x)
        d = mean_of_gathered(combined, own_decoded, sent, x)
        tally = _counted(s.tally, d, sent, rank, adapt_every) if isinstance(s.tally, Tensor) else ()
        if form == "eager":
            d = d + (1.0 / ctx.n) * ((s.anchor - x) - c)
        b = mu * s.b + d
        theta = s.anchor - eta * (d + mu * b)
        now = pending(x, s)
        unsent, flying = (s.flying - c, now) if delayed else (now - c, ())
        return theta, _State(theta, b, unsent, flying, with_columns(s.basis, own_decoded.right, sent, rank), tally)

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
        adapted=(lambda s: _adapted_rank(s.tally, rank)) if adapt_every else None,
    )


def _gathered(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The messages of all workers, concatenated in worker order in each tensor."""
    return map_leaves(lambda *each: torch.cat(each), *(own_decoded if j == i else received[j] for j, _ in row))


def _counted(tally: Tensor, d: Tensor, matrices: Sequence[Matrix], full_rank: int, every: int) -> Tensor:
    """Rank, and sum and count of the effective ranks since it was decided, after a mean d; an all-zero matrix is not counted."""
    ranks = [effective_rank(d[one.start : one.stop].view(one.rows, one.columns)) for one in matrices]
    seen = [one for one in ranks if one > 0]
    if not seen:
        return tally
    rank, total, count = tally.tolist()
    total, count = total + sum(seen) / len(seen), count + 1
    if count == every:
        average = total / count - 1e-6  # a whole number up to rounding is whole
        rank, total, count = min(full_rank, ceil(average)), 0.0, 0
    return torch.tensor([rank, total, count], dtype=tally.dtype, device=tally.device)


def _adapted_rank(tally: Tensor, full_rank: int) -> Adapted:
    """The rank adapted to the accumulated effective ranks; the initial one without data, as when traffic is counted."""
    return Adapted(full_rank if tally.is_meta else int(tally[0]), full_rank)
