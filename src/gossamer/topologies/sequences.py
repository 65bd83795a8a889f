"""Topologies that change from round to round."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated

from gossamer.errors import ConfigError
from gossamer.options import Count, Interval, check_option, factory
from gossamer.rng import numpy_rng
from gossamer.topologies.contract import Edge, Seed, Topology, Workers, chosen, over_alive, planned_topology
from gossamer.topologies.matching import random_matchings
from gossamer.topologies.mixing import Mixing, from_edges

__all__ = ["base", "hypercube", "one_peer_exponential", "powers_of_two", "random", "random_push"]


@factory
def one_peer_exponential(n: Workers, *, seed: Seed = 0) -> Topology:
    """In round t, worker i receives from i + 2^(t mod L) (mod n) with weight 1/2, L = ⌈log2 n⌉; directed, doubly stochastic.

    Cost: 1 message per worker and round. Exact after L rounds when n is a power of two.
    Source: arXiv 2110.13363.

    >>> [one_peer_exponential(8).mixing(t).hears_from(0) for t in range(4)]
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
    Raises: ConfigError when n is not a power of two.

    >>> [hypercube(8).mixing(t).hears_from(5) for t in range(3)]
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

    >>> random(6, seed=1).mixing(3) == random(6, seed=1).mixing(3)
    True
    """
    _fewer("random", peers, n)

    def edges(round: int, m: int) -> Iterable[Edge]:
        k = min(peers, m - 1)
        if k < 1:
            return []
        w = 1.0 / (k + 1)
        pairs = random_matchings(m, k, seed, round).tolist()
        return [edge for i, j in pairs for edge in ((i, j, w), (j, i, w))]

    return planned_topology(
        n, over_alive(edges, n), symmetric=True, doubly_stochastic=True, psd=peers == 1, exchangeable=True
    )


@factory
def base(n: Workers, *, seed: Seed = 0, peers: Count = 1) -> Topology:
    """The Base-(k+1) graph: exact averaging for every n, with at most k peers per round, in about 2 log_{k+1} n rounds.

    With n = Σ_l a_l (k+1)^p_l in base k + 1, block V_l has a_l sub-blocks of (k+1)^p_l workers. First every block averages
    within itself. Then block after block gives each of its sub-blocks the mean of itself and all later blocks: every worker of
    a later block meets one worker in each sub-block, with weight `|V_l| / (a_l Σ_{i≥l} |V_i|)`, and the sub-blocks average
    within themselves.

    Args:
        peers: k in 1 .. n - 1; at most the number of workers alive, less one, is used.
    Cost: up to k messages per worker and round.
    Source: arXiv 2305.11420 (its "simple" form).

    >>> [base(n).exact_rounds for n in (3, 5, 6, 7, 8, 12, 24)]
    [3, 5, 5, 5, 3, 7, 9]
    """
    _fewer("base", peers, n)
    rounds = lru_cache(maxsize=4)(lambda m: _base_rounds(m, min(peers, m - 1)) if m > 1 else [[]])
    length = len(rounds(n))
    return planned_topology(
        n,
        over_alive(lambda round, m: rounds(m)[round % len(rounds(m))], n),
        tree=n == 2,
        symmetric=True,
        doubly_stochastic=True,
        psd=n <= peers + 1,
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

    >>> mixing = random_push(4, seed=1).mixing(1)
    >>> [mixing.sends_to(i) for i in range(4)], [len(mixing.hears_from(i)) for i in range(4)]
    ([(2,), (2,), (1,), (2,)], [0, 1, 3, 0])
    """
    _fewer("random_push", peers, n)

    def build(round: int, workers: Sequence[int]) -> Mixing:
        m = len(workers)
        k = min(peers, m - 1)
        if k < 1:
            return from_edges(n, [])
        bits = numpy_rng(seed, "topology", round).bit_generator.random_raw(m * k).reshape(m, k).tolist()
        edges = [
            (workers[(j + 1 + hop) % m], workers[j], 1.0 / (k + 1)) for j in range(m) for hop in chosen(bits[j], m - 1)
        ]
        return from_edges(n, edges, sums="columns")

    return planned_topology(n, build, doubly_stochastic=False, column_stochastic=True, exchangeable=True)


def _base_rounds(m: int, k: int) -> list[list[Edge]]:
    """The rounds of the Base-(k+1) graph over m positions."""
    blocks: list[tuple[range, int, int]] = []  # (positions, number of sub-blocks a, rounds p that average a sub-block)
    start, power = 0, 0
    while (k + 1) ** (power + 1) <= m:
        power += 1
    for p in range(power, -1, -1):
        a = (m - start) // (k + 1) ** p
        if a:
            blocks.append((range(start, start + a * (k + 1) ** p), a, p))
            start = blocks[-1][0].stop

    rounds: dict[int, list[Edge]] = {}

    def average(positions: range, radices: Sequence[int], first: int) -> int:
        """Averages positions that differ in one mixed-radix digit, a digit per round; returns the next round."""
        stride = 1
        for t, radix in enumerate(radices, start=first):
            for x in range(len(positions)):
                digit = x // stride % radix
                others = (x + (other - digit) * stride for other in range(radix) if other != digit)
                rounds.setdefault(t, []).extend((positions[x], positions[y], 1.0 / radix) for y in others)
            stride *= radix
        return first + len(radices)

    meeting = max(average(positions, [k + 1] * p + [a] * (a > 1), 0) for positions, a, p in blocks)
    for t, (positions, a, p) in enumerate(blocks[:-1], start=meeting):
        behind, size = range(positions.stop, m), (k + 1) ** p
        w = len(positions) / (m - positions.start) / a
        for c in range(a):
            sub = positions[c * size : (c + 1) * size]
            rounds.setdefault(t, []).extend(
                edge for i, j in zip(behind, sub, strict=False) for edge in ((i, j, w), (j, i, w))
            )
            average(sub, [k + 1] * p, t + 1)
    return [rounds[t] for t in range(len(rounds))]


def powers_of_two(m: int) -> list[int]:
    """1, 2, 4, …, the powers of two below m."""
    return [1 << p for p in range((m - 1).bit_length())] if m > 1 else []


def _fewer(topology: str, peers: int, n: int) -> None:
    """Raises ConfigError for more peers than there are other workers; a worker alone may name one."""
    check_option(f"topology '{topology}'", "peers", peers, Annotated[int, Interval(f"[1, {max(1, n - 1)}]")])
