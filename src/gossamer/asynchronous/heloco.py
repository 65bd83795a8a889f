"""HeLoCo: a server that turns each late pseudo-gradient towards its momentum before it takes it in."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous.contract import PushInfo, ServerRule
from gossamer.errors import ConfigError
from gossamer.options import within

__all__ = ["heloco"]


class _State(NamedTuple):
    """The model and the momentum, an average of what was taken in."""

    x: Tensor
    m: Tensor


def heloco(
    lr: float = 0.7, momentum: float = 0.9, rho: float = 1.0, c_ok: float = 0.2, conflict: float = 0.5,
    turn: float = 1.0, beta_max: float = 0.5, kappa: float = 3.0, eps: float = 1e-8,
) -> ServerRule:  # fmt: skip
    """Workers start ahead, where the momentum points; each tensor of what comes back is made to agree with the momentum.

    start = θ - η μ m;  G = ρ Δ̂;  m ← μ m + (1 - μ) G;  θ ← θ - η (G + μ m)

    with, for each tensor, u = Δ/‖Δ‖, v = m/‖m‖, c = cos(Δ, m) and conf = ‖Δ‖ / (‖Δ‖ + κ ‖m‖ + ε):
    c ≥ c_ok:  Δ̂ = Δ
    c < 0:     Δ̂ = Δ - β c ‖Δ‖ v, β = min(-k_s c conf, β_max):  its part along m shrinks to 1 - β of itself
    else:      Δ̂ = ‖Δ‖ ũ / ‖ũ‖, ũ = (1 - l) u + l v, l = min(k_d (1 - c) conf, 1):  it turns and keeps its length

    Args:
        lr, momentum: η and μ, the latter in [0, 1).
        rho: ρ, the weight of one arrival; the authors recommend 1/√workers.
        c_ok: cosine in [-1, 1] from which a tensor passes unchanged; -1 passes all (MLA).
        conflict, turn: k_s and k_d, how strongly to shrink and to turn; beta_max and kappa bound both.
    Cost: a push and a fetch of one model per local phase; model and m kept at the server (2 P).
    Source: arXiv 2606.00271, table 3 for the defaults.
    Differs: the server sends the starting point ahead, so that m need not travel.
    Fails when: the momentum is wrong: everything that corrects it is shrunk by up to β_max.

    >>> heloco().elementwise
    False
    """
    within("heloco", "lr", lr, 0.0, math.inf, low_open=True)
    within("heloco", "momentum", momentum, 0.0, 1.0)
    within("heloco", "rho", rho, 0.0, math.inf, low_open=True)
    within("heloco", "eps", eps, 0.0, math.inf, low_open=True)
    for option, value in (("conflict", conflict), ("turn", turn), ("kappa", kappa)):
        within("heloco", option, value, 0.0, math.inf)
    if not -1 <= c_ok <= 1 or not 0 <= beta_max <= 1:
        raise ConfigError(
            f"heloco got c_ok = {c_ok!r}, beta_max = {beta_max!r}; allowed are [-1, 1] and [0, 1]: choose values in that range"
        )
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

    options = {
        "lr": lr, "momentum": momentum, "rho": rho, "c_ok": c_ok, "conflict": conflict, "turn": turn,
        "beta_max": beta_max, "kappa": kappa, "eps": eps,
    }  # fmt: skip
    return ServerRule("heloco", options, init, greet, absorb, elementwise=False, state_copies=2)
