"""HALoS: delayed Nesterov at the server of each region and at a global server, and a merge of models on the way down."""

from typing import Any, NamedTuple

from torch import Tensor

from gossamer.asynchronous.contract import PushInfo, Regions, ServerRule
from gossamer.asynchronous.delayed_nesterov import delayed_nesterov
from gossamer.settings.options import Count, Decay, Portion, Positive, factory


class _Local(NamedTuple):
    """The server of a region."""

    nesterov: Any
    """Its state of delayed Nesterov, model included."""
    s: Tensor
    """The model that the next report is measured from."""

    @property
    def x(self) -> Tensor:
        return self.nesterov.x


@factory
def halos(
    lr: Positive = 0.15,
    momentum: Decay = 0.5,
    delay: Count = 2,
    local_lr: Positive = 0.2,
    local_momentum: Decay = 0.9,
    local_delay: Count = 16,
    every: Count = 32,
    alpha: Portion = 0.25,
    carry: bool = False,
) -> ServerRule:
    """Workers push to the server of their region; after K pushes it reports to a global server, and merges its answer.

    local, at each push Δ:    θ_l ← DN(θ_l, Δ; ε_l, β_l, N_l);  the worker continues from θ_l at once
    local, K pushes after s: D_l = s - θ_l goes to the global server, asynchronously
    global, at each D_l:      Θ ← DN(Θ, D_l; ε, β, N);  Θ goes back to region l alone
    local, at Θ:              θ_l ← (1 - α) θ_l + α Θ;  s ← θ_l;  the count of pushes starts again

    with DN(θ, d; ε, β, N):  acc ← acc + d;  at every N-th call  m ← β m + acc / N,  acc ← 0,  θ ← θ - ε (N β m + d)
                             otherwise                           θ ← θ - ε d

    Args:
        lr: ε, learning rate of the global server.
        momentum: β, momentum of the global server.
        delay: N, reports between two updates of the global momentum.
        local_lr: ε_l, learning rate of the server of a region.
        local_momentum: β_l, momentum of the server of a region.
        local_delay: N_l, pushes between two updates of a region's momentum.
        every: K, pushes that a region's server absorbs after a merge before it reports.
        alpha: α, the weight of the global model in a merge; 0 leaves the regions independent.
        carry: whether the part of the pushes between report and merge that the merge keeps is in the next report:
            s ← (1 - α) θ_l(at the report) + α Θ.
    Cost: in a region a push and a fetch of one model per local phase, and between regions one model up and one down per K pushes
        of a region; models, momenta, sums and s kept (4 P at the server of each region, 3 P at the global one).
    Source: arXiv 2506.04531; equations and defaults as in the authors' code, github.com/utnslab/halos.
    Differs: when the steps of the run are spent, each region reports what it has not reported, so that the global model, which is
        the result, has all work. The authors' command line explains α as the weight of the region's model; their code and
        this one give it to the global model. `carry` is ours.
    Fails when: a region is slow: its report is as old as its K pushes and is not damped; without `carry`, pushes between
        report and merge never reach the other regions.

    >>> halos().regions.every
    32
    """
    local = delayed_nesterov(local_lr * local_delay, local_momentum, local_delay)  # its step is divided by N_l

    def init(x: Tensor) -> _Local:
        return _Local(local.init(x), x.clone())

    def greet(state: _Local) -> Tensor:
        return state.x

    def absorb(state: _Local, message: Tensor, arrival: PushInfo) -> _Local:
        return state._replace(nesterov=local.absorb(state.nesterov, message, arrival))

    def tell(state: _Local) -> tuple[_Local, Tensor]:
        return state._replace(s=state.x), state.s - state.x

    def merge(state: _Local, theta: Tensor) -> _Local:
        x = (1 - alpha) * state.x + alpha * theta
        return _Local(state.nesterov._replace(x=x), (1 - alpha) * state.s + alpha * theta if carry else x)

    return ServerRule(
        init,
        greet,
        absorb,
        state_copies=4,
        regions=Regions(delayed_nesterov(lr * delay, momentum, delay), every, tell, merge),
    )
