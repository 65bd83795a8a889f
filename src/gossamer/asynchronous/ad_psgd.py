"""AD-PSGD: workers meet in pairs at random times and take their average."""

from torch import Tensor

from gossamer.asynchronous.contract import PairRule
from gossamer.settings.options import factory
from gossamer.tree import Tree


@factory
def ad_psgd() -> PairRule:
    """Two workers that meet move to their average; between meetings each trains on its own.

    local phase:  x ← x + (end - start)          meeting of i and j:  x_i ← x_i + ½ (x_j - x_i), and so for j

    Cost: one model each way per meeting; nothing kept.
    Source: Lian et al., arXiv 1710.06952.
    Differs: whole local phases between meetings where the paper has single gradients; times of meetings are random and
        independent of the local phases.
    Fails when: the graph mixes slowly, such as a long ring: the disagreement grows with χ₁ of the meetings.

    >>> ad_psgd().state_copies
    0
    """

    def init(x: Tensor) -> Tree:
        return ()

    def advance(x: Tensor, s: Tree, dt: float) -> tuple[Tensor, Tree]:
        return x, s

    def learn(x: Tensor, s: Tree, drift: Tensor) -> tuple[Tensor, Tree]:
        return x + drift, s

    def tell(x: Tensor, s: Tree) -> Tensor:
        return x

    def meet(x: Tensor, s: Tree, own_decoded: Tensor, peer_decoded: Tensor) -> tuple[Tensor, Tree]:
        return x + 0.5 * (peer_decoded - own_decoded), s

    return PairRule(init, advance, learn, tell, meet)
