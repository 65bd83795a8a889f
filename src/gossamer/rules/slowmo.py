"""SlowMo: slow momentum around local steps and an exact average."""

from gossamer.rules.contract import Rule
from gossamer.rules.diloco import diloco
from gossamer.settings.options import Decay, Positive, factory

__all__ = ["slowmo"]


@factory
def slowmo(lr: Positive = 1.0, momentum: Decay = 0.7) -> Rule:
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
