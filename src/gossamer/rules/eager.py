"""Eager updates: a worker applies its own share at once and the others' a round late, so that training hides the transfer."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, OuterSGD, Rule
from gossamer.settings.options import Decay, OverTime, Positive, factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree


class _State(NamedTuple):
    """Where the round began, and the outer momentum b; both differ between workers."""

    anchor: Tensor
    b: Tensor


@factory
def eager(lr: OverTime[Positive] = 0.4, momentum: OverTime[Decay] = 0.9, fresh: bool = True) -> Rule:
    """DiLoCo on the last round's mean, in which every worker replaces its own old pseudo-gradient by its new one.

    Δ_i^t = θ_i(start) - θ_i(end);   d_i = Δ̄^{t-1} + (1/n) (Δ_i^t - Δ_i^{t-1})
    b_i ← μ b_i + d_i;   θ_i ← θ_i(start) - η (d_i + μ b_i);   Δ^{-1} = 0

    Args:
        lr: outer learning rate η.
        momentum: outer Nesterov momentum μ.
        fresh: False is the naive delayed variant, d_i = Δ̄^{t-1}, which the paper found clearly worse; its workers stay equal.
    Cost: 2(n-1)/n models per worker and round, in flight while the next round trains; start copy and momentum, in addition to
        the pseudo-gradient in flight, kept (2 P).
    Source: Kale, Douillard, Donchev, arXiv 2502.12996.
    Differs: before the first mean has arrived, Δ^{-1} counts as zero, so the first step is η (1 + μ) Δ_i^0 / n (the paper does
        not state this); the mean of the d_i is then Δ̄^t / n + (1 - 1/n) Δ̄^{t-1} in every round. The last mean arrives after the
        end.
    Fails when: the outer learning rate is DiLoCo's 0.7 with momentum 0.9: gradients that are a round old need a smaller one.

    >>> eager().delay_rounds
    1
    """
    eta, mu = lr, momentum

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(x.clone(), torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return s.anchor - x

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        d = combined + (1.0 / ctx.n) * ((s.anchor - x) - own_decoded) if fresh else combined
        b = mu * s.b + d
        theta = s.anchor - eta * (d + mu * b)
        return theta, _State(theta, b)

    return Rule(
        init,
        send,
        mean,
        recv,
        needs="everyone",
        single_worker_limit=OuterSGD(lr, momentum, momentum > 0.0) if fresh else "outer optimizer",
        identical=not fresh,
        state_copies=2,
        delay_rounds=1,
        reset=lambda x, s: s._replace(b=torch.zeros_like(s.b)),
        start=lambda s: s.anchor,
    )
