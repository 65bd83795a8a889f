"""How often workers of a graph meet, and the two condition numbers of such random meetings."""

from collections.abc import Mapping

import numpy as np

from gossamer.errors import ConfigError
from gossamer.topologies.mixing import Mixing

__all__ = ["Rates", "conditions", "meeting_rates"]

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
