"""EASGD: workers explore around a centre and are pulled back to it elastically."""

from typing import NamedTuple

from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import OverTime, Share, factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree


class _State(NamedTuple):
    """The centre, bitwise the same on all workers."""

    centre: Tensor


@factory
def easgd(elasticity: OverTime[Share] = 0.9) -> Rule:
    """Each worker moves towards a shared centre, and the centre towards the mean of the workers.

    θ_i ← θ_i - a (θ_i - c);   c ← c + a Σ_j (θ_j - c) = (1 - n a) c + n a mean_j θ_j;   a = β / n, both from the old values

    Args:
        elasticity: β = n a; above one the centre would overshoot the mean.
    Cost: 2(n-1)/n models per worker and round, which every worker needs to move the centre itself; the centre kept (1 P).
    Source: Zhang, Choromanska and LeCun, arXiv 1412.6651 (synchronous form; β 0.9).
    Differs: no server. The inner optimizer is the user's; with momentum in it, it is their EAMSGD. The centre is the model to
        keep at the end; runs are evaluated on the workers and on their mean, which follows the centre.
    Fails when: there are many workers: each is pulled to the centre by β / n only, so they drift far apart.

    >>> easgd().identical
    False
    """

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(x.clone())

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return x

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        a = elasticity / ctx.n
        return x - a * (x - s.centre), _State(s.centre + elasticity * (combined - s.centre))

    return Rule(init, send, mean, recv, needs="everyone", single_worker_limit="outer optimizer", state_copies=1)
