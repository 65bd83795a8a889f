"""The pairs of a round: matchings of n workers that have no pair in common."""

import numpy as np
from numpy.typing import NDArray

from gossamer.rng import numpy_rng

__all__ = ["factors", "random_matchings"]


def factors(n: int, spokes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pairs of some factors of the complete graph on n vertices, `[factors, ⌊n/2⌋, 2]`, by the circle method.

    The factors 0 .. n - 2 (n - 1 if n is odd) have no pair in common and contain every pair; with an odd n each factor leaves
    a different vertex unpaired.

    >>> factors(4, np.arange(3)).tolist()
    [[[1, 2], [0, 3]], [[2, 0], [1, 3]], [[0, 1], [2, 3]]]
    """
    order = n - 1 + n % 2  # of the circle; an even number of vertices has one more in its centre, an odd one none
    spokes = spokes[:, None]
    around = np.arange(1, (order + 1) // 2)
    left, right = (spokes + around) % order, (spokes - around) % order
    if n % 2 == 0:
        left, right = np.hstack([left, spokes]), np.hstack([right, np.full((len(spokes), 1), order)])
    return np.stack([left, right], axis=2)


def random_matchings(n: int, k: int, seed: int, round: int) -> NDArray[np.int64]:
    """The pairs of k matchings drawn without a common pair, `[k · ⌊n/2⌋, 2]`, equal for equal arguments.

    They are random factors under random names: each matching is uniform over all perfect ones.

    Args: `k` from 1 to n - 1.
    """
    # Raw bits and a sort: numpy may change how `permutation` uses its bits, and workers may run different versions of it.
    bits = numpy_rng(seed, "topology", round).bit_generator
    spokes = _least(bits.random_raw(n - 1 + n % 2), k)
    pairs = factors(n, spokes).reshape(-1, 2)
    return np.argsort(bits.random_raw(n), kind="stable")[pairs]


def _least(numbers: NDArray[np.uint64], k: int) -> NDArray[np.int64]:
    """The places of the k least numbers in their order, `argsort(numbers, kind="stable")[:k]`, without sorting all."""
    if k >= len(numbers):
        return np.argsort(numbers, kind="stable")
    among = np.flatnonzero(numbers <= np.partition(numbers, k - 1)[k - 1])
    return among[np.argsort(numbers[among], kind="stable")[:k]]
