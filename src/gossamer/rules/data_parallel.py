"""Data parallelism: the baseline that every other rule tries to match with fewer bytes."""

from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree


@factory
def data_parallel() -> Rule:
    """Gradients are averaged before every inner step, so all workers take the same step.

    g ← (1/n) Σ_j g_j,  then  θ ← Inner(θ, g)

    Cost: 2(n-1)/n gradients per worker and inner step, behind a barrier of all; nothing kept.
    Source: the usual synchronous SGD, as in arXiv 1706.02677.
    Differs: the mean is summed in worker order instead of the order of a ring, so that it is the same to the last bit in
        the simulator, in real processes and on every worker.
    Fails when: the slowest link is slow: every step waits for it.

    >>> data_parallel().site
    'gradients'
    """

    def init(x: Tensor, ctx: Context) -> Tree:
        return ()

    def send(x: Tensor, s: Tree, ctx: Context) -> Tree:
        return x

    def recv(x: Tensor, s: Tree, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        return combined, s

    return Rule(
        init,
        send,
        mean,
        recv,
        needs="everyone",
        single_worker_limit="inner",
        site="gradients",
        mean_preserving=True,
        identical=True,
    )
