"""HeLoCo: a server that turns each stale pseudo-gradient towards its momentum before it absorbs it."""

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.asynchronous.contract import PushInfo, ServerRule
from gossamer.settings.options import Decay, NotNegative, Portion, Positive, factory


class _State(NamedTuple):
    """The model and the momentum, a running average of the absorbed messages."""

    x: Tensor
    m: Tensor


@factory
def heloco(
    lr: Positive = 0.7,
    momentum: Decay = 0.9,
    rho: Positive = 1.0,
    c_ok: Annotated[float, Field(ge=-1, le=1)] = 0.2,
    conflict: NotNegative = 0.5,
    turn: NotNegative = 1.0,
    beta_max: Portion = 0.5,
    kappa: NotNegative = 3.0,
    eps: Positive = 1e-8,
) -> ServerRule:
    """Workers start ahead along the momentum; the server corrects each tensor of their messages towards the momentum.

    start = θ - η μ m;  G = ρ Δ̂;  m ← μ m + (1 - μ) G;  θ ← θ - η (G + μ m)

    with, for each tensor, u = Δ/‖Δ‖, v = m/‖m‖, c = cos(Δ, m) and conf = ‖Δ‖ / (‖Δ‖ + κ ‖m‖ + ε):
    c ≥ c_ok:  Δ̂ = Δ
    c < 0:     Δ̂ = Δ - β c ‖Δ‖ v, β = min(-k_s c conf, β_max):  its part along m shrinks to 1 - β of itself
    else:      Δ̂ = ‖Δ‖ ũ / ‖ũ‖, ũ = (1 - l) u + l v, l = min(k_d (1 - c) conf, 1):  it turns and keeps its length

    Args:
        lr: outer learning rate η.
        momentum: μ, the share that the server's average of messages keeps at each arrival.
        rho: ρ, the weight of one arrival; the authors recommend 1/√workers.
        c_ok: cosine from which a tensor passes unchanged; -1 passes all (MLA).
        conflict: k_s, how strongly to shrink a tensor that points against the momentum.
        turn: k_d, how strongly to turn a tensor that deviates from the momentum.
        beta_max: the largest share by which the part along m shrinks.
        kappa: κ; the larger it is, the longer than m a message must be for the full correction.
        eps: ε; vectors shorter than it count as having no direction.
    Cost: a push and a fetch of one model per local phase; model and m kept at the server (2 P).
    Source: arXiv 2606.00271, table 3 for the defaults.
    Differs: the server sends the starting point ahead, so that m need not travel.
    Fails when: the momentum is wrong: messages that would correct it are shrunk by up to β_max.

    >>> heloco().elementwise
    False
    """
    eta, mu = lr, momentum

    def corrected(d: Tensor, m: Tensor) -> Tensor:
        norm_d, norm_m = float(d.norm()), float(m.norm())
        if norm_d < eps or norm_m < eps:
            return d
        u, v = d / norm_d, m / norm_m
        c = max(-1.0, float((u * v).sum()))  # opposite vectors can round to a cosine just below -1
        confidence = norm_d / (norm_d + kappa * norm_m + eps)
        if c >= c_ok:
            return d
        if c < 0:
            beta = min(-conflict * c * confidence, beta_max)
            return d - beta * c * norm_d * v
        share = min(turn * (1 - c) * confidence, 1.0)
        turned = (1 - share) * u + share * v
        return norm_d * turned / max(float(turned.norm()), eps)

    def init(x: Tensor) -> _State:
        return _State(x.clone(), torch.zeros_like(x))

    def greet(s: _State) -> Tensor:
        return s.x - eta * mu * s.m

    def absorb(s: _State, message: Tensor, arrival: PushInfo) -> _State:
        blocks = [corrected(message[b.start : b.stop], s.m[b.start : b.stop]) for b in arrival.layout.leaves]
        g = rho * torch.cat(blocks)
        m = mu * s.m + (1 - mu) * g
        return _State(s.x - eta * (g + mu * m), m)

    return ServerRule(init, greet, absorb, elementwise=False, state_copies=2)
