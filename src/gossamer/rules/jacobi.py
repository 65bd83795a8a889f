"""Jacobi gossip: momentum on the displacement by gossip, with weights that do not depend on the spectral gap."""

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import Count, factory
from gossamer.topologies.mixing import pull
from gossamer.tree import Tree


class _State(NamedTuple):
    """How far the last exchange moved this worker; its mean over the workers is zero."""

    moved: Tensor


@factory
def jacobi(dimension: Annotated[float, Field(gt=0, le=64)] = 1.0, every: Count = 8) -> Rule:
    """Gossip with momentum, such that K rounds average like the best polynomial of degree K for graphs of that
    dimension.

    m_i ← a_t Σ_j w_ij (θ_j - θ_i) + c_t m_i;   θ_i ← θ_i + m_i;   t = round mod K

    Without drift it is x_{t+1} = (a_t W + b_t) x_t - c_t x_{t-1} with a_t + b_t - c_t = 1, the recursion of the Jacobi
    polynomials. The drift of the local phases is not part of m, so it counts once, and the mean of all workers follows the
    inner optimizers.

    Args:
        dimension: d of the graph, 1 for a ring, 2 for a torus; it describes the density of the spectrum near one.
        every: K, rounds after which the momentum is reset; 1 is gossip with a damped weight.
    Cost: one model to each peer per round; its last displacement kept (1 P).
    Source: Berthier, Bach and Gaillard, arXiv 1805.08531, for fixed values; α = d/2, β = 0.
    Differs: local phases between the exchanges, and a reset every K rounds, without which c_t goes to one and old disagreement
        never decays.
    Fails when: the graph changes, or mixes within a few rounds, where plain gossip is as good.

    >>> [round(weight, 3) for weight in weights(1, 1.0)]
    [1.26, 0.028, 0.288]
    """

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return x

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        a, _, c = weights(ctx.round % every, dimension)
        moved = a * combined + c * s.moved
        return x + moved, _State(moved)

    return Rule(
        init,
        send,
        pull,
        recv,
        needs="static",
        single_worker_limit="inner",
        compiles=False,
        mean_preserving=True,
        state_copies=1,
    )


def weights(t: int, dimension: float) -> tuple[float, float, float]:
    """a_t, b_t and c_t of the Jacobi polynomials with α = d/2 and β = 0; a_t + b_t - c_t = 1, and c_0 = 0."""
    s = dimension / 2
    up, down = 2 * t + s + 2, 2 * (t + 1 + s) ** 2
    a = (2 * t + s + 1) * up / down
    b = (2 * t + s + 1) * s * s / (down * (2 * t + s))
    c = 2 * t * t * up / (down * (2 * t + s))
    return a, b, c
