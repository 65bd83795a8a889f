"""Topologies in which groups of workers average exactly: the cells of a grid along one axis, or groups drawn at random."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.rng import numpy_rng
from gossamer.settings.options import Count, factory
from gossamer.topologies.contract import MOST_WORKERS, Seed, Topology, Workers, planned_topology
from gossamer.topologies.mixing import Mixing, in_groups

Size = Annotated[int, Field(ge=2)]


@factory
def grid(n: Workers, *, seed: Seed = 0, side: Size | None = None, dimension: Count = 2) -> Topology:
    """Workers occupy the cells of an M^d grid, and in round t those on one line along axis t mod d average exactly.

    Worker number p of those alive has the cell of the digits of p in base M: a line along axis a holds those whose
    numbers differ only in digit a. Axes along which no two workers share a line are left out, and a worker alone on its
    line is idle. With workers missing, those alive take the first cells again, so the graph stays connected over a
    period, and each W is a projection.

    Args:
        side: M, the largest group; None for the smallest that holds all workers.
        dimension: d; at most M^d workers fit, and 1 is one group of all.
    Cost: up to M - 1 messages per worker and round. Exact after d rounds when n = M^d, and for any full box of n = a M^k cells.
    Source: Moshpit SGD, Ryabinin et al., arXiv 2103.03239.
    Differs: a group exchanges whole messages, where theirs are reduced in 2 (M-1)/M of one. The first n cells are taken, theirs
        are drawn: on 20 of 27 drawn cells d rounds leave 0.55 of the disagreement on average and 0.51 on the first 20, on 14
        of 27 it is 0.86 and 0.47, and workers in drawn cells may never meet.
    Fails when: one worker of a group is slow: the group waits for it.
    Raises: ConfigError when n workers do not fit.

    >>> [grid(9).mixing(t).receives_from(5) for t in range(3)]
    [(3, 4), (2, 8), (3, 4)]
    """
    dimension = min(dimension, MOST_WORKERS.bit_length())  # beyond, even two cells along each axis are enough for all
    if side is not None and n > side**dimension:
        raise ConfigError(
            f"topology 'grid' got side = {side} and dimension = {dimension} for n = {n}; allowed are at most {side**dimension} "
            f"workers: raise side to {_smallest_side(n, dimension)}, or dimension"
        )

    def axes(m: int) -> list[int]:
        """M^0, M^1, …: the distance between neighbours along each axis."""
        base = side or _smallest_side(m, dimension)
        return [base**a for a in range(dimension) if base**a < m]

    def build(round: int, workers: Sequence[int]) -> Mixing:
        m = len(workers)
        if m < 2:
            return in_groups(n, [])
        base, strides = side or _smallest_side(m, dimension), axes(m)
        stride = strides[round % len(strides)]
        lines: dict[int, list[int]] = {}
        for p, worker in enumerate(workers):
            lines.setdefault(p - p // stride % base * stride, []).append(worker)
        return in_groups(n, lines.values())

    period = len(axes(n))
    one_group = period == 1
    return planned_topology(
        n,
        build,
        everyone=one_group,
        tree=n == 2,
        symmetric=True,
        doubly_stochastic=True,
        psd=True,
        period=period,
        exact_rounds=period if n > 1 and n % axes(n)[-1] == 0 else None,
    )


@factory
def groups(n: Workers, *, seed: Seed = 0, size: Size = 4) -> Topology:
    """Every round draws groups of up to M workers, each of which averages exactly; all draws are independent.

    The m workers alive form r = ⌈m / M⌉ groups whose sizes differ by at most one, and one alone is idle. As W² = W, a
    round shrinks the squared disagreement by the factor E = (r - 1) / (m - 1), averaged over draws, whatever the sizes.

    Args:
        size: M, the largest group; 2 is `random` pairs.
    Cost: up to M - 1 messages per worker and round.
    Source: random groups as analysed for Moshpit SGD, arXiv 2103.03239.
    Differs: a group exchanges whole messages, where theirs are reduced in 2 (M-1)/M of one.
    Fails when: one worker of a group is slow: the group waits for it.

    >>> sorted(len(groups(10, size=4).mixing(0).receives_from(i)) for i in range(10))
    [2, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    """

    def build(round: int, workers: Sequence[int]) -> Mixing:
        m = len(workers)
        if m <= size:
            return in_groups(n, [workers])
        # Raw bits and a sort: numpy may change how `permutation` uses its bits, and workers may run different versions of it.
        bits = numpy_rng(seed, "topology", round).bit_generator.random_raw(m)
        order = [workers[p] for p in np.argsort(bits, kind="stable").tolist()]
        count = -(-m // size)
        return in_groups(n, [order[k * m // count : (k + 1) * m // count] for k in range(count)])

    whole = {"everyone": True, "period": 1, "exact_rounds": 1, "tree": n == 2} if n <= size else {"exchangeable": True}
    return planned_topology(n, build, symmetric=True, doubly_stochastic=True, psd=True, **whole)


def _smallest_side(n: int, dimension: int) -> int:
    """The least M of 2 and above with M^d >= n."""
    side = max(2, round(n ** (1 / dimension)) - 1)
    while side**dimension < n:
        side += 1
    return side
