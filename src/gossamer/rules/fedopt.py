"""FedOpt: an adaptive optimizer as the outer one."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import Decay, OverTime, Positive, factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree


class _State(NamedTuple):
    """Where the round began, and the first and second moment of the averaged pseudo-gradient."""

    anchor: Tensor
    m: Tensor
    v: Tensor


@factory
def fedopt(
    lr: OverTime[Positive] = 0.01,
    optimizer: Literal["adagrad", "yogi", "adam"] = "adam",
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
) -> Rule:
    """All workers average their pseudo-gradients and take one adaptive outer step from the start of the round.

    d = (1/n) Σ_j (θ_start - θ_j);   m ← β1 m + (1 - β1) d
    v ← v + d²   [adagrad]     v - (1 - β2) d² sign(v - d²)   [yogi]     β2 v + (1 - β2) d²   [adam]
    θ ← θ_start - η m / (√v + τ)

    with m = 0 and v = τ² at the beginning, and no correction of the bias.

    Args:
        lr: outer learning rate η; the first steps of "adam" are about η (1 - β1) / √(1 - β2).
        optimizer: how the second moment is kept.
        beta1: decay of the first moment.
        beta2: decay of the second moment; not used by "adagrad".
        tau: τ; pseudo-gradients well below it count in proportion to their size, those above it by their sign.
    Cost: 2(n-1)/n models per worker and round; start copy and both moments kept (3 P).
    Source: Reddi et al., arXiv 2003.00295, algorithm 2.
    Differs: every worker participates in every round, and each keeps the server's state, which is the same everywhere.
    Fails when: τ is as small as an inner Adam's ε: noise in coordinates that hardly move becomes whole steps; on language models
        an outer Adam was less stable than Nesterov (arXiv 2311.08105).

    >>> fedopt(optimizer="yogi").state_copies
    3
    """

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(x.clone(), torch.zeros_like(x), torch.full_like(x, float(tau) * tau))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return s.anchor - x

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        d = combined
        square = d * d
        m = beta1 * s.m + (1.0 - beta1) * d
        if optimizer == "adagrad":
            v = s.v + square
        elif optimizer == "yogi":
            v = s.v - (1.0 - beta2) * (square * torch.sign(s.v - square))
        else:
            v = beta2 * s.v + (1.0 - beta2) * square
        # In fp64, because torch's own fp32 root is off by a last bit now and then in eager mode and never in compiled code.
        root = torch.sqrt(v.double()).to(v.dtype)
        theta = s.anchor - lr * (m / (root + tau))
        return theta, _State(theta, m, v)

    return Rule(
        init,
        send,
        mean,
        recv,
        needs="everyone",
        single_worker_limit="outer optimizer",
        mean_preserving=True,
        identical=True,
        state_copies=3,
        reset=lambda x, s: s._replace(m=torch.zeros_like(s.m)),
        start=lambda s: s.anchor,
    )
