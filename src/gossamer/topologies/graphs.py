"""Topologies that are the same in every round."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from gossamer.errors import ConfigError
from gossamer.settings.options import Count, Share, factory
from gossamer.topologies.contract import Edge, Seed, Topology, Workers, over_alive, planned_topology
from gossamer.topologies.mixing import Mixing, from_edges, in_groups, metropolis, must_be_planned
from gossamer.topologies.sequences import powers_of_two


@factory
def complete(n: Workers, *, seed: Seed = 0) -> Topology:
    """All workers receive from all: `W = J = 11ᵀ/n`. Cost: n - 1 messages per worker and round, or 2(n-1)/n as a shared mean.

    Fails when: a link is slow: everybody waits for every message.

    >>> complete(2).mixing(0).rows
    (((0, 0.5), (1, 0.5)), ((0, 0.5), (1, 0.5)))
    """
    must_be_planned("complete", n)

    def build(round: int, workers: Sequence[int]) -> Mixing:
        return in_groups(n, [workers])

    return planned_topology(
        n, build, everyone=True, tree=n == 2, symmetric=True, doubly_stochastic=True, psd=True, period=1, exact_rounds=1
    )


@factory
def ring(n: Workers, *, seed: Seed = 0, edge_weight: Share | None = None) -> Topology:
    """Each worker receives from the one before and the one after it; two workers share one link.

    Args:
        edge_weight: λ of the weighted Laplacian, so that `w_ij = λ/2`, where 1 leaves a worker no own weight; None for
            1/(degree + 1), 1/3 from n = 3 on.
    Cost: 2 messages per worker and round. The spectral gap decreases as 1/n².
    Fails when: there are many workers: the disagreement shrinks slowly.

    >>> ring(4).mixing(0).receives_from(0)
    (1, 3)
    """

    def edges(round: int, m: int) -> Iterable[Edge]:
        weighted = metropolis(m, [(i, (i + 1) % m) for i in range(m)])
        return weighted if edge_weight is None else [(i, j, edge_weight / 2) for i, j, _ in weighted]

    return planned_topology(
        n,
        over_alive(edges, n),
        tree=n == 2,
        symmetric=True,
        doubly_stochastic=True,
        psd=n <= 3 if edge_weight is None else edge_weight <= 0.5,
        period=1,
    )


@factory
def torus(n: Workers, *, seed: Seed = 0, rows: Count | None = None) -> Topology:
    """A grid of `rows` times n / rows workers that wraps around at both edges, with weights 1/(degree + 1).

    With workers missing, the others form the most square grid of their number, which for a prime number is a ring.

    Args:
        rows: a divisor of n; None for the most square grid.
    Cost: up to 4 messages per worker and round. The spectral gap decreases as 1/n.
    Fails when: the outer momentum is high: with 8 workers the disagreement of GASLoC stays bounded up to 0.5 only.
    Raises: ConfigError when n is a prime: a grid of one row is a ring.

    >>> torus(9).mixing(0).receives_from(4)
    (1, 3, 5, 7)
    """
    if n > 1 and _most_square(n) == 1:
        raise ConfigError(
            f"topology 'torus' got n = {n}, a prime; allowed are products of two numbers above 1: "
            f"use {n + 1 if n > 2 else 4} workers, or topology 'ring'"
        )
    if rows is not None and (n % rows != 0 or (n > 1 and rows in (1, n))):
        divisors = [d for d in range(2, n) if n % d == 0] if n > 1 else [1]
        raise ConfigError(
            f"topology 'torus' got rows = {rows} for n = {n}; allowed are {', '.join(map(str, divisors))}: choose one of them"
        )

    def edges(round: int, m: int) -> Iterable[Edge]:
        height = rows if rows is not None and m == n else _most_square(m)
        width = m // height
        across = [(i, i - i % width + (i + 1) % width) for i in range(m)]
        down = [(i, (i + width) % m) for i in range(m)]
        return metropolis(m, across + down)

    return planned_topology(n, over_alive(edges, n), symmetric=True, doubly_stochastic=True, period=1)


@factory
def star(n: Workers, *, seed: Seed = 0) -> Topology:
    """The first worker alive exchanges with all others, which exchange only with it; Metropolis weights, 1/n on every link.

    Cost: n - 1 messages for the hub, 1 for the others. The spectral gap is 1/n.
    Fails when: the hub has a slow link: all others wait for its n - 1 messages.

    >>> star(4).mixing(0, frozenset({1, 2, 3})).sends_to(1)
    (2, 3)
    """
    return planned_topology(
        n,
        over_alive(lambda round, m: metropolis(m, [(0, i) for i in range(1, m)]), n),
        tree=True,
        symmetric=True,
        doubly_stochastic=True,
        psd=True,
        period=1,
    )


@factory
def chain(n: Workers, *, seed: Seed = 0) -> Topology:
    """A ring without one link: each worker receives from its neighbours; Metropolis weights, 1/3 from n = 3 on.

    Cost: 2 messages per worker and round, 1 for the two at the ends. Spectral gap 2/3 (1 - cos(π/n)), a quarter of the ring's.
    Fails when: there are many workers: the disagreement shrinks slowly, as the spectral gap decreases as 1/n².

    >>> [chain(4).mixing(0).receives_from(i) for i in range(4)]
    [(1,), (0, 2), (1, 3), (2,)]
    """
    return planned_topology(
        n,
        over_alive(lambda round, m: metropolis(m, [(i - 1, i) for i in range(1, m)]), n),
        tree=True,
        symmetric=True,
        doubly_stochastic=True,
        psd=n <= 3,
        period=1,
    )


@factory
def tree(n: Workers, *, seed: Seed = 0, branching: Count = 2) -> Topology:
    """A balanced tree: worker i > 0 exchanges with its parent, worker ⌊(i - 1) / k⌋; Metropolis weights.

    Args:
        branching: k, children of a worker; 1 is a chain, n - 1 a star.
    Cost: up to k + 1 messages per worker and round; for k > 1 no two workers are more than 2 log_k n links apart.
    Fails when: plain gossip runs on it: the disagreement shrinks slowly, with 8 workers by 5 % a round. `relaysum` is made for
        trees.

    >>> [tree(6).mixing(0).receives_from(i) for i in range(6)]
    [(1, 2), (0, 3, 4), (0, 5), (1,), (1,), (2,)]
    """

    def edges(round: int, m: int) -> Iterable[Edge]:
        return metropolis(m, [((i - 1) // branching, i) for i in range(1, m)])

    return planned_topology(
        n,
        over_alive(edges, n),
        tree=True,
        symmetric=True,
        doubly_stochastic=True,
        psd=n <= max(branching + 1, 3),
        period=1,
    )


@factory
def exponential(n: Workers, *, seed: Seed = 0) -> Topology:
    """Worker i receives from i + 1, i + 2, i + 4, … (mod n), L = ⌈log2 n⌉ peers with weight 1/(L + 1) each; directed.

    Cost: L messages per worker and round. Spectral gap 2/(L + 1) for even n, a little more for odd n.
    Source: arXiv 2110.13363.
    Fails when: uplinks are slow: each worker sends L messages per round, where `one_peer_exponential` sends one.

    >>> exponential(8).mixing(0).receives_from(0)
    (1, 2, 4)
    """

    def edges(round: int, m: int) -> Iterable[Edge]:
        hops = powers_of_two(m)
        return ((i, (i + hop) % m, 1.0 / (len(hops) + 1)) for i in range(m) for hop in hops)

    return planned_topology(
        n, over_alive(edges, n), tree=n == 2, symmetric=n <= 3, doubly_stochastic=True, psd=n <= 3, period=1
    )


@factory
def graph(n: Workers, *, seed: Seed = 0, edges: Sequence[Sequence[float]]) -> Topology:
    """Any connected undirected graph, with Metropolis weights, or with its own.

    With workers missing, the links between the others remain.

    Args:
        edges: a link (i, j), or (i, j, w_ij) if it has its own weight.
    Cost: as many messages per worker and round as it has links.
    Raises: ConfigError when a link is impossible, the graph is not connected, or the weights of a worker exceed one.

    >>> graph(4, edges=[(0, 1), (1, 2), (2, 3)]) .mixing(0).receives_from(1)
    (0, 2)
    """
    links = _links(n, edges)
    weighted = all(w is not None for w in links.values())

    def build(round: int, workers: Sequence[int]) -> Mixing:
        alive = set(workers)
        left = {(i, j): w for (i, j), w in links.items() if i in alive and j in alive}
        if not weighted:
            return from_edges(n, metropolis(n, left))
        return from_edges(n, [edge for (i, j), w in left.items() for edge in ((i, j, w or 0.0), (j, i, w or 0.0))])

    made = planned_topology(n, build, tree=len(links) == n - 1, symmetric=True, doubly_stochastic=True, period=1)
    for i, row in enumerate(made.mixing(0).rows):
        if dict(row)[i] < 0.0:
            raise ConfigError(
                f"topology 'graph' got edges whose weights at worker {i} sum to {1 - dict(row)[i]:g}; they may sum to 1 at most"
            )
    return made


def _links(n: int, edges: Sequence[Sequence[float]]) -> dict[tuple[int, int], float | None]:
    """The links with their weights. Raises ConfigError for those that are impossible, or do not connect all workers."""
    links: dict[tuple[int, int], float | None] = {}
    above = list(range(n))  # union-find: a parent of each worker in its component

    def root(i: int) -> int:
        while above[i] != i:
            above[i] = i = above[above[i]]
        return i

    for edge in edges:
        ends, weight = tuple(edge[:2]), edge[2] if len(edge) == 3 else None
        whole = len(ends) == 2 and len(edge) <= 3 and all(end == int(end) and 0 <= end < n for end in ends)
        if not whole or ends[0] == ends[1] or (weight is not None and not weight > 0):
            raise ConfigError(
                f"topology 'graph' got the edge {tuple(edge)} for {n} workers; allowed are two different workers from 0 to "
                f"{n - 1}, and a weight above 0: correct it"
            )
        i, j = sorted(map(int, ends))
        links[i, j] = weight
        above[root(j)] = root(i)
    if (alone := next((i for i in range(n) if root(i) != root(0)), None)) is not None:
        raise ConfigError(
            f"topology 'graph' got {len(links)} links that do not connect worker {alone} with worker 0; add one that does"
        )
    if 0 < (without := sum(w is None for w in links.values())) < len(links):
        raise ConfigError(
            f"topology 'graph' got {without} of {len(links)} edges without a weight; give all of them one, or none"
        )
    return links


def edges_of(graph: object) -> tuple[int, list[list[float]]]:
    """The number of nodes of a networkx graph or a list of edges, and its edges with nodes numbered in order.

    Nodes that are the numbers from 0 on keep them.

    >>> edges_of([("a", "b"), ("b", "c")])
    (3, [[0, 1], [1, 2]])

    Raises: ConfigError for anything else, for a directed graph, and for a list that leaves a number out.
    """
    if hasattr(graph, "is_directed") and graph.is_directed():  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            f"topology got a directed {type(graph).__name__}; give an undirected graph, such as its to_undirected()"
        )
    try:
        if hasattr(graph, "nodes"):
            nodes = list(graph.nodes)  # pyright: ignore[reportAttributeAccessIssue]
            edges = [[a, b, *([] if w is None else [float(w)])] for a, b, w in graph.edges(data="weight")]  # pyright: ignore[reportAttributeAccessIssue]
        else:
            edges = [list(edge) for edge in graph]  # pyright: ignore[reportGeneralTypeIssues]
            nodes = sorted({node for a, b, *_ in edges for node in (a, b)})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"topology got a {type(graph).__name__}, which is no graph ({error}); give a topology, its name, a networkx graph "
            "or a list of edges (i, j)"
        ) from None
    place = {node: i for i, node in enumerate(_as_numbered(nodes, listed=not hasattr(graph, "nodes")))}
    return len(nodes), [[place[a], place[b], *weight] for a, b, *weight in edges]


def _as_numbered(nodes: list[Any], *, listed: bool) -> list[Any]:
    """Nodes in the order of their numbers where those are 0 to n - 1. Raises: ConfigError for a list that leaves one out."""
    if not all(isinstance(node, Integral) for node in nodes):
        return nodes
    numbers = sorted(nodes)
    if numbers == [*range(len(nodes))]:
        return numbers
    if listed:
        some = f"{', '.join(map(str, numbers[:9]))}{', …' if len(numbers) > 9 else ''}"
        raise ConfigError(f"topology got edges between {some}; number the workers from 0 on, without a gap")
    return nodes


def _most_square(m: int) -> int:
    """The largest divisor of m up to its square root: the rows of the most square grid."""
    return max((d for d in range(1, math.isqrt(m) + 1) if m % d == 0), default=1)
