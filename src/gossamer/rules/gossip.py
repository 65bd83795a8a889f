"""Gossip averaging, D-PSGD in its adapt-then-combine form."""

from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import factory
from gossamer.topologies.mixing import Consensus, pull
from gossamer.tree import Tree


@factory
def gossip() -> Rule:
    """After the local phase every worker moves to the weighted mean of its neighbourhood.

    θ_i ← Σ_j w_ij θ_j(end of the local phase)

    One inner SGD step per round is D-PSGD (ATC); on the complete graph it is then data-parallel SGD, and with more steps local
    SGD.

    Cost: one model to each peer per round; nothing kept.
    Source: Lian et al., arXiv 1705.09056; adapt-then-combine as in arXiv 2410.11998.
    Differs: the combine step follows the inner steps (the original combines first and adds the gradient of the old point).
    Fails when: the graph mixes slowly and the shards differ: the disagreement grows as local steps / spectral gap.

    >>> gossip().needs
    'connected'
    """

    def init(x: Tensor, ctx: Context) -> Tree:
        return ()

    def send(x: Tensor, s: Tree, ctx: Context) -> Tree:
        return x

    def recv(x: Tensor, s: Tree, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        return x + combined, s

    return Rule(
        init,
        send,
        pull,
        recv,
        needs="connected",
        single_worker_limit="inner",
        mean_preserving=True,
        consensus=Consensus(1.0, 0.0, "post"),
    )
