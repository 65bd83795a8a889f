"""Stochastic gradient push: gossip on directed graphs in which a worker need not receive as much as it sends."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import factory
from gossamer.topologies.mixing import mean


class Mass(NamedTuple):
    """The mass a worker holds `[P]`, and the weight `[1]` (fp32 or wider) that divides it."""

    mass: Tensor
    weight: Tensor


@factory
def sgp() -> Rule:
    """Workers split their mass and its weight among their receivers; the parameters are the ratio of the two.

    y_i = x_i + (z_i(end of the local phase) - z_i);   x_i ← Σ_j p_ij y_j;   w_i ← Σ_j p_ij w_j;   z_i ← x_i / w_i

    Columns of p sum to one, so the total mass is kept. Where rows do not sum to one, x alone would be biased towards workers
    that receive much; w has the same bias, and the division removes it. On a doubly stochastic topology w stays one, and the
    rule is `gossip`.

    Cost: one model and one number to each peer per round; mass kept (1 P).
    Source: Assran et al., arXiv 1811.10792.
    Differs: the local phase may have many steps, and its drift is added to x as their gradient step is. The error of a lossy
        codec stays with its sender, so that the sums of x and w are kept with any codec; but where rows do not sum to one, x is
        rounded and w is not, and z moves without end: lossy codecs are refused there.
    Fails when: a worker receives nothing for long: its weight shrinks, and its own drift counts for more in z.

    >>> sgp().needs
    'push'
    """

    def init(x: Tensor, ctx: Context) -> Mass:
        wide = torch.promote_types(x.dtype, torch.float32)
        return Mass(x.clone(), torch.ones(1, dtype=wide, device=x.device))

    def send(x: Tensor, s: Mass, ctx: Context) -> Mass:
        return Mass(s.mass + (x - (s.mass / s.weight).to(x.dtype)), s.weight)

    def recv(x: Tensor, s: Mass, own_decoded: Mass, combined: Mass, ctx: Context) -> tuple[Tensor, Mass]:
        sent = send(x, s, ctx)
        mass, weight = (h + (o - t) for h, o, t in zip(combined, sent, own_decoded, strict=True))
        return (mass / weight).to(x.dtype), Mass(mass.to(x.dtype), weight)

    return Rule(
        init,
        send,
        mean,
        recv,
        needs="push",
        single_worker_limit="inner",
        elementwise=False,
        mean_preserving=True,
        state_copies=1,
    )
