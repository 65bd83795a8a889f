"""CHOCO: gossip that sends only compressed changes of a public copy."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import OverTime, Share, factory
from gossamer.topologies.mixing import pull
from gossamer.tree import Tree


class _State(NamedTuple):
    """This worker's public copy, and how far the neighbours' public copies pull it."""

    public: Tensor
    drawn: Tensor


@factory
def choco(alpha: OverTime[Share] = 0.3) -> Rule:
    """Workers gossip on public copies of each other, and keep them up to date with compressed differences.

    q_i = decode(encode(θ_i - x̂_i));   x̂_i ← x̂_i + q_i;   θ_i ← θ_i + α Σ_j w_ij (x̂_j - x̂_i)

    A worker keeps no copy of its neighbours: the sum over neighbours changes by Σ_j w_ij (q_j - q_i), so one running sum is
    enough. For that reason the graph must be static, and any other is refused.

    Args:
        alpha: consensus step α; a coarser codec needs a smaller one. With an exact codec 1 is gossip.
    Cost: one payload to each peer per round; public copy and running sum kept (2 P).
    Source: Koloskova, Stich and Jaggi, arXiv 1902.00340.
    Differs: the public copies begin at the common starting point instead of at zero.
    Fails when: α is too large for the codec: the workers diverge.

    >>> choco().needs
    'static'
    """

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(x.clone(), torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return x - s.public

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        drawn = s.drawn + combined
        return x + alpha * drawn, _State(s.public + own_decoded, drawn)

    return Rule(
        init, send, pull, recv, needs="static", single_worker_limit="inner", mean_preserving=True, state_copies=2
    )
