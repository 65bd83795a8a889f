"""DiLoCo: an outer optimizer on the averaged pseudo-gradient; SlowMo: the same with a heavy-ball optimizer."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, OuterSGD, Rule
from gossamer.settings.options import Decay, OverTime, Positive, factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree


class _State(NamedTuple):
    """Where the round began, and the outer momentum b (absent for outer SGD)."""

    anchor: Tensor
    b: Tree


@factory
def diloco(
    lr: OverTime[Positive] = 0.7,
    momentum: OverTime[Decay] = 0.9,
    optimizer: Literal["nesterov", "heavy_ball", "sgd"] = "nesterov",
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


@factory
def slowmo(lr: OverTime[Positive] = 1.0, momentum: OverTime[Decay] = 0.7) -> Rule:
    """All workers average their parameters, and heavy-ball momentum acts on the movement of the average.

    u ← β u + (θ_start - mean_j θ_j);   θ ← θ_start - α u

    Args:
        lr: slow learning rate α.
        momentum: slow momentum β; the paper finds 0.4 to 0.8.
    Cost: 2(n-1)/n models per worker and round; start copy and momentum kept (2 P).
    Source: Wang et al., arXiv 1910.00643, algorithm 1.
    Differs: the paper divides the pseudo-gradient by the inner learning rate and multiplies u by it again, which is the same
        while that rate is constant; here u is in units of the parameters, so a schedule does not rescale past steps. It is
        `diloco(lr, momentum, optimizer="heavy_ball")`. The inner buffers stay as they are.
    Fails when: α / (1 - β), the factor on steady progress, is large: at α = 1 and β = 0.9 it is ten.

    >>> slowmo(momentum=0.5).single_worker_limit
    OuterSGD(lr=1.0, momentum=0.5, nesterov=False)
    """
    return diloco(lr, momentum, optimizer="heavy_ball")
