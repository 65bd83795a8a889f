"""Topologies that change from round to round, and the matchings of n workers that have no pair in common."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.rng import numpy_rng
from gossamer.settings.options import Count, check_option, factory
from gossamer.topologies.contract import Edge, Seed, Topology, Workers, chosen, over_alive, planned_topology
from gossamer.topologies.mixing import MOST_MESSAGES, Mixing, from_edges, in_pairs, must_be_planned


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


@factory
def one_peer_exponential(n: Workers, *, seed: Seed = 0) -> Topology:
    """In round t, worker i receives from i + 2^(t mod L) (mod n) with weight 1/2, L = ⌈log2 n⌉; directed, doubly stochastic.

    Cost: 1 message per worker and round. Exact after L rounds when n is a power of two.
    Source: arXiv 2110.13363.
    Fails when: the outer momentum is high: with 8 workers the disagreement of GASLoC stays bounded up to 0.618 only.

    >>> [one_peer_exponential(8).mixing(t).receives_from(0) for t in range(4)]
    [(1,), (2,), (4,), (1,)]
    """

    def edges(round: int, m: int) -> Iterable[Edge]:
        hops = powers_of_two(m)
        return [(i, (i + hops[round % len(hops)]) % m, 0.5) for i in range(m)] if hops else []

    length = len(powers_of_two(n))
    return planned_topology(
        n,
        over_alive(edges, n),
        tree=n == 2,
        symmetric=n <= 2,
        doubly_stochastic=True,
        psd=n <= 2,
        period=length,
        exact_rounds=length if n == 1 << length else None,
    )


@factory
def hypercube(n: Workers, *, seed: Seed = 0) -> Topology:
    """In round t, worker j and worker j XOR 2^(t mod log2 n) take their mean; exact after log2 n rounds.

    With workers missing, those alive take the first corners of the smallest hypercube that holds them, and a worker whose
    partner's corner is empty is idle in that round: the graph stays connected over a period, but is no longer exact.

    Cost: 1 message per worker and round.
    Fails when: the outer momentum is high: with 8 workers the disagreement of GASLoC stays bounded up to 0.618 only.
    Raises: ConfigError when n is not a power of two.

    >>> [hypercube(8).mixing(t).receives_from(5) for t in range(3)]
    [(4,), (7,), (1,)]
    """
    length = len(powers_of_two(n))
    if n != 1 << length:
        raise ConfigError(
            f"topology 'hypercube' got n = {n}; allowed are powers of two: use {1 << (length - 1)} or {1 << length} workers, "
            "or topology 'base', which is exact for every n"
        )

    def edges(round: int, m: int) -> Iterable[Edge]:
        hops = powers_of_two(m)
        hop = hops[round % len(hops)] if hops else 0
        return [(j, j ^ hop, 0.5) for j in range(m) if hop and j ^ hop < m]

    return planned_topology(
        n,
        over_alive(edges, n),
        tree=n == 2,
        symmetric=True,
        doubly_stochastic=True,
        psd=True,
        period=length,
        exact_rounds=length,
    )


@factory
def random(n: Workers, *, seed: Seed = 0, peers: Count = 1) -> Topology:
    """Every round draws `peers` random matchings without a common pair; all weights are 1/(peers + 1).

    The matchings are factors of one factorisation of the complete graph (the circle method), under random names: a matching
    is uniform over all perfect ones, and with an odd number of workers each matching leaves another one idle.

    Args:
        peers: k in 1 .. n - 1; at most the number of workers alive, less one, is used.
    Cost: k messages per worker and round; about 2 µs per message to plan a round.
    Source: arXiv 2606.11081 (k-Peer); how the matchings are drawn is ours.
    Fails when: the outer momentum is high: with 8 workers in pairs the disagreement of GASLoC stays bounded up to 0.859, and not
        with DiLoCo's 0.9.

    >>> random(6, seed=1).mixing(3) == random(6, seed=1).mixing(3)
    True
    """
    _fewer("random", peers, n)

    def build(round: int, workers: Sequence[int]) -> Mixing:
        k = min(peers, len(workers) - 1)
        if k < 1:
            return from_edges(n, [])
        pairs = np.asarray(workers)[random_matchings(len(workers), k, seed, round)]
        if k == 1:
            partners = np.arange(n)
            partners[pairs] = pairs[:, ::-1]
            return in_pairs(partners.tolist())
        w = 1.0 / (k + 1)
        return from_edges(n, (edge for i, j in pairs.tolist() for edge in ((i, j, w), (j, i, w))))

    return planned_topology(n, build, symmetric=True, doubly_stochastic=True, psd=peers == 1, exchangeable=True)


@factory
def base(n: Workers, *, seed: Seed = 0, peers: Count = 1) -> Topology:
    """The Base-(k+1) graph: exact averaging for every n, with at most k peers per round, in about 2 log_{k+1} n rounds.

    With n = q r, where no prime factor of q is above k + 1 and those of r all are: first the simple graph averages each of q
    runs of r workers, then the hyper-hypercube averages across the runs: it writes a worker's run in a mixed radix of
    factors of q up to k + 1, and in each round those that differ in one digit take their mean. For r = 1 that is all. The
    simple graph over all n is taken where it is shorter.

    Simple graph: with r = Σ_l a_l (k+1)^p_l in base k + 1, block V_l has a_l sub-blocks of (k+1)^p_l workers. First every
    block averages within itself. Then block after block gives each of its sub-blocks the mean of itself and all later blocks:
    every worker of a later block meets one worker in each sub-block, with weight `|V_l| / (a_l Σ_{i≥l} |V_i|)`, and the
    sub-blocks average within themselves.

    Args:
        peers: k in 1 .. n - 1; at most the number of workers alive, less one, is used.
    Cost: up to k messages per worker and round.
    Source: arXiv 2305.11420, algorithms 1 to 3.
    Differs: workers of a block that meet nobody in a round are idle; the authors' code lets them average among themselves.
    Fails when: the outer momentum is high: with 8 workers the disagreement of GASLoC stays bounded up to 0.618 only.

    >>> [base(n).exact_rounds for n in (3, 5, 6, 7, 8, 12, 24)]
    [3, 5, 4, 5, 3, 5, 6]
    """
    _fewer("base", peers, n)
    must_be_planned("base", n)
    rounds = lru_cache(maxsize=4)(lambda m: _base_rounds(m, min(peers, m - 1)) if m > 1 else [[]])
    length = len(rounds(n))
    return planned_topology(
        n,
        over_alive(lambda round, m: rounds(m)[round % len(rounds(m))], n),
        tree=n == 2,
        symmetric=True,
        doubly_stochastic=True,
        psd=all(_radices(m, min(peers, m - 1))[1] == 1 for m in range(2, n + 1)),  # then all rounds are projections
        period=length,
        exact_rounds=length,
    )


@factory
def random_push(n: Workers, *, seed: Seed = 0, peers: Count = 1) -> Topology:
    """Every worker sends to `peers` others that it draws independently; each share, and the one it keeps, is 1/(peers + 1).

    A worker receives from a random number of others, possibly none, so rows do not sum to one, and only a push rule such as
    'sgp', which also sends a weight, finds the mean. In return no coordination of pairs is needed.

    Args:
        peers: k in 1 .. n - 1; at most the number of workers alive, less one, is used.
    Cost: k messages sent per worker and round, k received on average.
    Source: push-sum, Kempe, Dobra and Gehrke, FOCS 2003.
    Fails when: the rule sends no weights: rows do not sum to one, so the mean is lost. Such rules are refused.

    >>> mixing = random_push(4, seed=1).mixing(1)
    >>> [mixing.sends_to(i) for i in range(4)], [len(mixing.receives_from(i)) for i in range(4)]
    ([(2,), (2,), (1,), (2,)], [0, 1, 3, 0])
    """
    _fewer("random_push", peers, n)

    def build(round: int, workers: Sequence[int]) -> Mixing:
        m = len(workers)
        k = min(peers, m - 1)
        if k < 1:
            return from_edges(n, [])
        bits = numpy_rng(seed, "topology", round).bit_generator.random_raw(m * k).reshape(m, k)
        if k == 1:  # of a million workers in a third of the time
            hops = [(hop,) for hop in (bits[:, 0] % np.uint64(m - 1)).tolist()]
        else:
            hops = [chosen(draws, m - 1) for draws in bits.tolist()]
        edges = ((workers[(j + 1 + hop) % m], workers[j], 1.0 / (k + 1)) for j in range(m) for hop in hops[j])
        return from_edges(n, edges, sums="columns")

    return planned_topology(n, build, doubly_stochastic=False, column_stochastic=True, exchangeable=True)


def _base_rounds(m: int, k: int) -> list[list[Edge]]:
    """The rounds of the Base-(k+1) graph over m positions: the shorter of its two forms, and of equal ones the first."""
    radices, rest = _radices(m, k)
    runs = (_simple_base(range(start, start + rest), k) for start in range(0, m, rest))
    across = (_digit_by_digit(range(start, m, rest), radices) for start in range(rest))
    return min(_side_by_side(runs) + _side_by_side(across), _simple_base(range(m), k), key=len)


def _radices(m: int, k: int) -> tuple[list[int], int]:
    """Factors of m from k + 1 down, the largest first as often as they divide, and the part of m that is left."""
    radices = []
    for radix in range(k + 1, 1, -1):
        while m % radix == 0:
            radices.append(radix)
            m //= radix
    return radices, m


def _digit_by_digit(positions: range, radices: Sequence[int]) -> list[list[Edge]]:
    """The hyper-hypercube: in each round, positions that differ only in one mixed-radix digit take their mean."""
    rounds, stride = [], 1
    for radix in radices:
        rounds.append(
            [
                (x, positions[i + (other - digit) * stride], 1.0 / radix)
                for i, x in enumerate(positions)
                for digit in (i // stride % radix,)
                for other in range(radix)
                if other != digit
            ]
        )
        stride *= radix
    return rounds


def _side_by_side(sequences: Iterable[list[list[Edge]]]) -> list[list[Edge]]:
    """Sequences of rounds over different positions at the same time; a shorter one is idle at the end."""
    return [[edge for edges in rounds for edge in edges] for rounds in zip_longest(*sequences, fillvalue=())]


def _simple_base(positions: range, k: int) -> list[list[Edge]]:
    """The rounds of the simple Base-(k+1) graph over consecutive positions."""
    blocks: list[tuple[range, int, int]] = []  # (positions, number of sub-blocks a, rounds p that average a sub-block)
    left = positions
    for p in reversed(range(len(positions).bit_length())):
        a = len(left) // (k + 1) ** p
        if a:
            size = a * (k + 1) ** p
            blocks.append((left[:size], a, p))
            left = left[size:]

    rounds = _side_by_side(_digit_by_digit(block, [k + 1] * p + [a] * (a > 1)) for block, a, p in blocks)
    for t, (block, a, p) in enumerate(blocks[:-1], start=len(rounds)):
        behind, size = range(block.stop, positions.stop), (k + 1) ** p
        w = len(block) / (len(block) + len(behind)) / a
        subs = [block[c * size : (c + 1) * size] for c in range(a)]
        meeting = [edge for sub in subs for i, j in zip(behind, sub, strict=False) for edge in ((i, j, w), (j, i, w))]
        within = _side_by_side(_digit_by_digit(sub, [k + 1] * p) for sub in subs)
        rounds = _side_by_side([rounds, [[]] * t + [meeting, *within]])
    return rounds


def powers_of_two(m: int) -> list[int]:
    """1, 2, 4, …, the powers of two below m."""
    return [1 << p for p in range((m - 1).bit_length())] if m > 1 else []


def _fewer(topology: str, peers: int, n: int) -> None:
    """Raises ConfigError for more peers than there are other workers, or than can be planned; a worker alone may name one."""
    check_option(f"topology '{topology}'", "peers", peers, Annotated[int, Field(ge=1, le=max(1, n - 1))])
    if n * peers > MOST_MESSAGES:
        raise ConfigError(
            f"topology '{topology}' got peers = {peers} for {n:,} workers, but at most {MOST_MESSAGES:,} messages a round can be "
            f"planned; lower peers to {max(1, MOST_MESSAGES // n)}, or take fewer workers"
        )
