"""A²CiD²: random pairwise averaging, accelerated by a momentum copy that mixes with the parameters over time.

How often workers of a graph meet, and the two condition numbers of such random meetings.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from gossamer.asynchronous.contract import PairRule
from gossamer.errors import ConfigError
from gossamer.settings.options import NotNegative, Positive, factory
from gossamer.topologies.mixing import Mixing


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


Rates = Mapping[tuple[int, int], float]
"""Meetings per second of each pair `(i, j)`, i < j, of a graph."""


def meeting_rates(mixing: Mixing, meetings_per_s: float) -> dict[tuple[int, int], float]:
    """The rates at which each worker starts `meetings_per_s / 2` meetings per second, with a uniformly chosen neighbour.

    `λ_ij = (r / 2) (1 / deg_i + 1 / deg_j)`; on a regular graph everyone takes part in r meetings per second.

    >>> from gossamer.topologies import ring
    >>> meeting_rates(ring(4).mixing(0), 1.0)
    {(0, 1): 0.5, (0, 3): 0.5, (1, 2): 0.5, (2, 3): 0.5}
    """
    degree = [max(1, len(mixing.receives_from(i))) for i in range(mixing.n)]
    linked = {(min(i, j), max(i, j)) for i in range(mixing.n) for j in mixing.receives_from(i)}
    return {(i, j): meetings_per_s / 2 * (1 / degree[i] + 1 / degree[j]) for i, j in sorted(linked)}


def conditions(n: int, rates: Rates) -> tuple[float, float]:
    """`χ₁ = 1 / λ₂(Λ)` and `χ₂ = ½ max_(i,j) (e_i - e_j)ᵀ Λ⁺ (e_i - e_j)`, both in seconds, for the Laplacian Λ of the rates.

    Meetings at random mix in a time of the order of χ₁, accelerated ones in √(χ₁ χ₂); χ₂ is never above χ₁.

    Raises: ConfigError when the graph is not connected.
    Cost: O(n³).
    Source: arXiv 2306.08289.

    >>> [round(chi, 6) for chi in conditions(2, {(0, 1): 1.0})]
    [0.5, 0.5]
    """
    laplacian = np.zeros((n, n))
    for (i, j), rate in rates.items():
        laplacian[i, i] += rate
        laplacian[j, j] += rate
        laplacian[i, j] -= rate
        laplacian[j, i] -= rate
    values = np.linalg.eigvalsh(laplacian)
    if n < 2 or values[1] < 1e-12 * values[-1] or values[-1] <= 0:
        raise ConfigError(
            f"{n} workers with {len(rates)} pairs that meet are not connected, so they cannot reach consensus; "
            "give at least two workers and pairs that lead from each to all others"
        )
    inverse = np.linalg.pinv(laplacian)
    resistance = max(inverse[i, i] + inverse[j, j] - 2 * inverse[i, j] for i, j in rates)
    return float(1 / values[1]), float(resistance / 2)
