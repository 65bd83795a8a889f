"""DiLoCo: an outer optimizer on the averaged pseudo-gradient."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, OuterSGD, Rule
from gossamer.settings.options import Decay, Positive, factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree

__all__ = ["diloco"]


class _State(NamedTuple):
    """Where the round began, and the outer momentum b (absent for outer SGD)."""

    anchor: Tensor
    b: Tree


@factory
def diloco(
    lr: Positive = 0.7, momentum: Decay = 0.9, optimizer: Literal["nesterov", "heavy_ball", "sgd"] = "nesterov"
) -> Rule:
    """All workers average their pseudo-gradients and take one outer optimizer step from the start of the round.

    Δ_i = θ_start - θ_i(end);  d = (1/n) Σ_j Δ_j;  b ← μ b + d
    θ ← θ_start - η (d + μ b)   [nesterov]      - η b   [heavy_ball]      - η d   [sgd]

    Args:
        lr: outer learning rate η.
        momentum: outer momentum μ; not used by "sgd".
        optimizer: which outer step; all in the dialect of `torch.optim.SGD` (dampening 0).
    Cost: 2(n-1)/n models per worker and round; start copy and momentum kept (2 P, for "sgd" 1 P).
    Source: Douillard et al., arXiv 2311.08105, algorithm 1.
    Differs: the mean is summed in worker order, bitwise the same everywhere. The inner state stays local, as in the paper.
    Fails when: a link is slow, because everybody waits for it; or with one local step, an adaptive inner optimizer and momentum
        0.9 (arXiv 2503.09799).

    >>> diloco(lr=1.0, optimizer="sgd").state_copies
    1
    """
    eta, mu = lr, 0.0 if optimizer == "sgd" else momentum

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(x.clone(), () if optimizer == "sgd" else torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return s.anchor - x

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        d = combined
        if optimizer == "sgd":
            theta, b = s.anchor - eta * d, ()
        else:
            b = mu * s.b + d
            step = d + mu * b if optimizer == "nesterov" else b
            theta = s.anchor - eta * step
        return theta, _State(theta, b)

    return Rule(
        init,
        send,
        mean,
        recv,
        needs="everyone",
        single_worker_limit=OuterSGD(lr, mu, optimizer == "nesterov" and mu > 0.0),
        mean_preserving=True,
        identical=True,
        state_copies=1 if optimizer == "sgd" else 2,
        reset=None if optimizer == "sgd" else lambda x, s: s._replace(b=torch.zeros_like(s.b)),
        start=lambda s: s.anchor,
    )
