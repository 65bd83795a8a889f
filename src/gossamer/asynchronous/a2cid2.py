"""A²CiD²: random pairwise averaging, accelerated by a momentum copy that mixes with the parameters over time."""

import math
from typing import Literal, NamedTuple

from torch import Tensor

from gossamer.asynchronous.contract import PairRule
from gossamer.settings.options import NotNegative, Positive, factory

__all__ = ["a2cid2", "acceleration"]


class _State(NamedTuple):
    """The momentum copy x̃."""

    copy: Tensor


def acceleration(chi1: float, chi2: float) -> tuple[float, float]:
    """`η = 1 / (2 √(χ₁ χ₂))` per second and `α̃ = ½ √(χ₁ / χ₂)`, for the conditions of the meetings in seconds.

    >>> acceleration(4.0, 1.0)
    (0.25, 1.0)
    """
    return 1 / (2 * math.sqrt(chi1 * chi2)), 0.5 * math.sqrt(chi1 / chi2)


@factory
def a2cid2(eta: NotNegative | Literal["auto"] = "auto", alpha: Positive = 0.5) -> PairRule:
    """Each worker keeps a copy x̃, which a meeting pulls harder than x; between meetings x and x̃ mix.

    dt seconds:   (x, x̃) ← (s x + (1 - s) x̃, (1 - s) x + s x̃),  s = (1 + exp(-2 η dt)) / 2
    local phase:  x ← x + d,  x̃ ← x̃ + d,  d = end - start
    meeting:      x ← x + ½ (peer_decoded - own_decoded),  x̃ ← x̃ + α̃ (peer_decoded - own_decoded)

    Mixing and meeting keep Σ_i (x_i + x̃_i). The mean of x alone is kept too if all workers are evaluated at the same time.

    Args:
        eta: η per second; "auto" computes η and α̃ from the meetings, `acceleration(*conditions(n, rates))`, once they are
            known. η = 0 is AD-PSGD.
        alpha: α̃, the share of the difference by which a meeting moves the copy; x moves by a half.
    Cost: one model each way per meeting; x̃ kept (1 P).
    Source: Nabli, Belilovsky, Oyallon, arXiv 2306.08289.
    Differs: both ends mix to the time of the meeting before they send; the authors' code sends before it mixes, which keeps the
        mean only approximately. A local phase takes the place of one gradient, so rates are per second and not per step.
    Fails when: η and α̃ assume more frequent meetings than there are: the momentum then outruns the averaging; on the complete
        graph χ₁ ≈ χ₂, and there is no gain.

    >>> a2cid2(0.1).state_copies
    1
    """
    if eta == "auto":
        return a2cid2(0.0)._replace(settle=lambda chi1, chi2: a2cid2(*acceleration(chi1, chi2)))

    def init(x: Tensor) -> _State:
        return _State(x.clone())

    def advance(x: Tensor, s: _State, dt: float) -> tuple[Tensor, _State]:
        gap = (1 - math.exp(-2 * eta * dt)) / 2 * (s.copy - x)  # 1 - s; in this form equal x and x̃ stay so, bit for bit
        return x + gap, _State(s.copy - gap)

    def learn(x: Tensor, s: _State, drift: Tensor) -> tuple[Tensor, _State]:
        return x + drift, _State(s.copy + drift)

    def tell(x: Tensor, s: _State) -> Tensor:
        return x

    def meet(x: Tensor, s: _State, own_decoded: Tensor, peer_decoded: Tensor) -> tuple[Tensor, _State]:
        pull = peer_decoded - own_decoded
        return x + 0.5 * pull, _State(s.copy + alpha * pull)

    return PairRule(init, advance, learn, tell, meet, state_copies=1)
