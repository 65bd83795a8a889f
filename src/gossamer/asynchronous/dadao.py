"""DADAO: optimal asynchronous decentralised optimisation of smooth and strongly convex sums; a reference for tests."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous.contract import PairRule
from gossamer.errors import ConfigError
from gossamer.settings.options import Positive, factory


class _State(NamedTuple):
    """The state of worker i in addition to X: X̃, and the dual variables Y, Ỹ, Z, Z̃."""

    x_: Tensor
    y: Tensor
    y_: Tensor
    z: Tensor
    z_: Tensor


def meetings_per_s(chi1: float, chi2: float) -> float:
    """Meetings per second in the whole graph that the method assumes, `√(2 χ₁ χ₂)`, at one gradient per worker and second.

    Args: the conditions of the graph when its rates sum to one meeting per second.
    """
    return math.sqrt(2 * chi1 * chi2)


@factory
def dadao(strong_convexity: Positive, smoothness: Positive, chi1: Positive) -> PairRule:
    """Accelerated gradients and accelerated gossip, both in continuous time; finds the minimum of Σ_i f_i exactly.

    dt seconds, exactly, with ν = μ/2:  X' = e (X̃ - X);  X̃' = e (X - X̃);  Y' = a (Ỹ - Y);  Ỹ' = -θ (ν X̃ + Y + Z);
                                     Z' = a (Z̃ - Z);  Z̃' = ã (Z - Z̃)
    gradient:  r = ∇f_i(X) - ν X - Ỹ;   X ← X - γ r;  X̃ ← X̃ - γ̃ r;  Ỹ ← Ỹ + (δ + δ̃) r
    meeting:   p = own_decoded - peer_decoded of Y + Z;   Z ← Z - β p;  Z̃ ← Z̃ - β̃ p

    e = √(ν/L)/8;  a = √(ν/L)/4;  ã = √(ν/L)/8;  θ = √(L/ν)/2;  γ = 1/(4L);  γ̃ = 1/(4√(Lν));  δ = √(ν/L)/4;  δ̃ = 1;
    β = 1/2;  β̃ = 2 χ₁ √(L/ν)

    A "local phase" is one gradient: it moves x by exactly -∇f_i(x). One per worker and second is assumed.

    Args:
        strong_convexity: μ of every f_i.
        smoothness: L of every f_i.
        chi1: χ₁ of the actual meetings, in seconds; they should be `meetings_per_s` in the whole graph.
    Cost: one vector each way per meeting; five vectors kept (5 P).
    Source: Nabli and Oyallon, arXiv 2208.00779, and the authors' code.
    Differs: X̃ starts at X.
    Fails when: the sum is not convex, or gradients do not arrive at unit rate: it is a reference for tests, not for training.

    >>> dadao(1.0, 10.0, chi1=1.0).state_copies
    5
    """
    if smoothness < strong_convexity:
        raise ConfigError(
            f"pair 'dadao' got smoothness = {smoothness!r} for strong_convexity = {strong_convexity!r}; "
            "allowed are finite numbers from strong_convexity on: give the largest curvature of any worker"
        )
    big_l, nu = smoothness, strong_convexity / 2
    q = math.sqrt(nu / big_l)
    e, a, a_, theta = q / 8, q / 4, q / 8, 1 / (2 * q)
    gamma, gamma_, delta, delta_ = 1 / (4 * big_l), 1 / (4 * math.sqrt(big_l * nu)), q / 4, 1.0
    beta, beta_ = 0.5, 2 * chi1 / q
    generator = torch.tensor(
        [  # columns: X, X̃, Y, Ỹ, Z, Z̃
            [-e, e, 0, 0, 0, 0],
            [e, -e, 0, 0, 0, 0],
            [0, 0, -a, a, 0, 0],
            [0, -theta * nu, -theta, 0, -theta, 0],
            [0, 0, 0, 0, -a, a],
            [0, 0, 0, 0, a_, -a_],
        ],
        dtype=torch.float64,
    )

    def init(x: Tensor) -> _State:
        return _State(x.clone(), *(torch.zeros_like(x) for _ in range(4)))

    def advance(x: Tensor, s: _State, dt: float) -> tuple[Tensor, _State]:
        flow = torch.linalg.matrix_exp(dt * generator).to(x.dtype)
        x, *rest = flow @ torch.stack([x, *s])
        return x, _State(*rest)

    def learn(x: Tensor, s: _State, drift: Tensor) -> tuple[Tensor, _State]:
        r = -drift - nu * x - s.y_
        return x - gamma * r, s._replace(x_=s.x_ - gamma_ * r, y_=s.y_ + (delta + delta_) * r)

    def tell(x: Tensor, s: _State) -> Tensor:
        return s.y + s.z

    def meet(x: Tensor, s: _State, own_decoded: Tensor, peer_decoded: Tensor) -> tuple[Tensor, _State]:
        p = own_decoded - peer_decoded
        return x, s._replace(z=s.z - beta * p, z_=s.z_ - beta_ * p)

    return PairRule(init, advance, learn, tell, meet, state_copies=5, any_phase=False)
