"""CGAD: an asynchronous outer Adam that attenuates each message by its age."""

import math
from typing import Annotated, NamedTuple

import torch
from pydantic import AllowInfNan, Field
from torch import Tensor

from gossamer.asynchronous.contract import PushInfo, ServerRule
from gossamer.settings.options import Decay, NotNegative, Positive, factory

# Adam moves on without a gradient, as m decays slower than sqrt(v): a message this small must not count as a step.
NEGLIGIBLE = 1e-6


class _State(NamedTuple):
    """The model, Adam's two moments, and how many steps they have seen."""

    x: Tensor
    m: Tensor
    v: Tensor
    steps: Tensor


def attenuation(age: int, decay: float = 0.1, cutoff: float = 16.0) -> float:
    """`σ(τ) = γ(τ) exp(-α τ)` with a cosine cut-off, `γ(τ) = (1 + cos(π τ / τ_c)) / 2` up to τ_c and 0 from there on.

    >>> attenuation(0), attenuation(16), round(attenuation(8, decay=0.0), 12)
    (1.0, 0.0, 0.5)
    """
    gamma = 0.5 * (1.0 + math.cos(math.pi * age / cutoff)) if age < cutoff else 0.0
    return gamma * math.exp(-decay * age)


@factory
def cgad(
    lr: Positive = 1e-3,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    eps: Positive = 1e-8,
    decay: NotNegative = 0.1,
    cutoff: Annotated[float, Field(gt=0), AllowInfNan(True)] = 16.0,
) -> ServerRule:
    """Adam on pseudo-gradients, each attenuated by its age in both moments.

    d = σ(τ) Δ;  m ← β₁ m + (1 - β₁) d;  v ← β₂ v + (1 - β₂) d²;  θ ← θ - η m̂ / (√v̂ + ε)

    With several fragments each has its own age and its own moments, which is PA-CGAD.

    Args:
        lr: outer learning rate η: about how far one step moves each parameter.
        beta1: decay β₁ of the first moment.
        beta2: decay β₂ of the second moment.
        eps: ε, which keeps the denominator above zero.
        decay: α of `attenuation`.
        cutoff: age τ_c from which a message has weight zero; `inf` for no cut-off ("Adam-Decay").
    Cost: a push and a fetch of one model per local phase; model and two moments kept at the server (3 P).
    Source: arXiv 2605.09126.
    Differs: the shape of γ and all defaults are ours, as the source does not state them. A message with σ below 1e-6 is skipped
        altogether, moments included.
    Fails when: all messages are equally old: Adam is invariant to a common factor, so nothing is attenuated.

    >>> cgad().options["cutoff"]
    16.0
    """

    def init(x: Tensor) -> _State:
        return _State(x.clone(), torch.zeros_like(x), torch.zeros_like(x), torch.tensor(0))

    def greet(s: _State) -> Tensor:
        return s.x

    def absorb(s: _State, message: Tensor, arrival: PushInfo) -> _State:
        sigma = attenuation(arrival.age, decay, cutoff)
        if sigma < NEGLIGIBLE:
            return s
        steps, d = s.steps + 1, sigma * message
        m = beta1 * s.m + (1 - beta1) * d
        v = beta2 * s.v + (1 - beta2) * (d * d)
        m_hat, v_hat = m / (1 - beta1 ** int(steps)), v / (1 - beta2 ** int(steps))
        return _State(s.x - lr * (m_hat / (v_hat.sqrt() + eps)), m, v, steps)

    return ServerRule(init, greet, absorb, state_copies=3)
