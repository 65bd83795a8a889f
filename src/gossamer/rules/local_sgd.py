"""Local SGD, also known as FedAvg with full participation."""

from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree


@factory
def local_sgd() -> Rule:
    """After the local phase all workers continue from their mean.

    θ ← (1/n) Σ_j θ_j(end of the local phase)

    It is `diloco(lr=1, momentum=0)`.

    Cost: 2(n-1)/n models per worker and round; nothing kept.
    Source: Stich, arXiv 1805.09767; McMahan et al., arXiv 1602.05629.
    Differs: any inner optimizer; its state stays local. A lossy codec acts on the parameters themselves, and training in steps
        smaller than its own is lost, so all but the finest are refused; `diloco(lr=1, optimizer="sgd")` compresses
        pseudo-gradients instead.
    Fails when: the local phase is long and the shards differ: the mean of the workers' own optima is not the common optimum.

    >>> local_sgd().needs
    'everyone'
    """

    def init(x: Tensor, ctx: Context) -> Tree:
        return ()

    def send(x: Tensor, s: Tree, ctx: Context) -> Tree:
        return x

    def recv(x: Tensor, s: Tree, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        return combined, s

    return Rule(init, send, mean, recv, needs="everyone", single_worker_limit="inner", identical=True)
