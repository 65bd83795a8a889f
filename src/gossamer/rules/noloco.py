"""NoLoCo: heavy-ball outer steps inside small random groups, which pull the slow weights towards the group's mean."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, OuterSGD, Rule
from gossamer.settings.options import Decay, OverTime, Positive, factory
from gossamer.topologies.mixing import Consensus, pull
from gossamer.tree import Tree


class _State(NamedTuple):
    """Slow weights φ and the local heavy-ball buffer δ, which is never mixed."""

    phi: Tensor
    delta: Tensor


@factory
def noloco(lr: OverTime[Positive] = 0.7, momentum: OverTime[Decay] = 0.5) -> Rule:
    """A heavy-ball step towards the mean of the group's fast weights.

    δ ← a δ - b mean_j(φ_j - θ_j) - c (φ - mean_j φ_j);  φ ← φ + δ;  θ ← φ

    With c = b, as in the authors' code, the two means collapse to b (mean_j θ_j - φ), so only θ is sent.

    Args:
        lr: b, the outer learning rate and at the same time the pull c.
        momentum: a, the heavy-ball momentum.
    Cost: one model to each peer per round; φ and δ kept (2 P).
    Source: arXiv 2506.10911, and the authors' `noloco_mean` configuration (b 0.7, a 0.5).
    Differs: the group is the row of the mixing, so any doubly stochastic topology works; the paper uses random pairs. c ≠ b would
        need twice the bytes and is not offered, as in the authors' code.
    Fails when: the momentum is above the stable range, 0.83 for 8 workers in random pairs at b = 0.7: the disagreement diverges.

    >>> noloco().consensus
    Consensus(alpha=0.7, gamma=0.5, site='pre')
    """
    a, b = momentum, lr

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(x.clone(), torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return x

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        group_mean = x + combined  # combined = mean_j θ_j - θ
        delta = a * s.delta + b * (group_mean - s.phi)
        phi = s.phi + delta
        return phi, _State(phi, delta)

    return Rule(
        init,
        send,
        pull,
        recv,
        needs="connected",
        single_worker_limit=OuterSGD(lr, momentum),
        mean_preserving=True,
        consensus=Consensus(b, a, "pre"),
        state_copies=2,
        reset=lambda x, s: s._replace(delta=torch.zeros_like(s.delta)),
    )
