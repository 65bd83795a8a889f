"""Topologies: who talks to whom in which round, as pure functions of (seed, round, alive).

Every worker computes the same answer without talking, a run resumes in any round, and a lost worker is simply left out.
Each factory plans for m positions; the workers alive take them in ascending order, and the others are left with a self-loop
of weight one.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from gossamer.checks import whole
from gossamer.errors import ConfigError, choose
from gossamer.matching import random_matchings
from gossamer.mixing import Mixing, from_edges, metropolis
from gossamer.rng import numpy_rng

__all__ = [
    "TOPOLOGIES",
    "Plan",
    "Topology",
    "base",
    "chain",
    "complete",
    "draw",
    "exponential",
    "hypercube",
    "make_topology",
    "one_peer_exponential",
    "pga",
    "random",
    "random_push",
    "ring",
    "star",
    "torus",
    "tree",
]

Edge = tuple[int, int, float]


class Plan(Protocol):
    """The mixing of a round; `alive` names the workers that take part, None is everyone."""

    def __call__(self, round: int, alive: frozenset[int] | None = None) -> Mixing: ...


class Topology(NamedTuple):
    """A sequence of mixings, and tags that say what holds of each of them, whoever is alive.

    `everyone`, `static` and `tree` speak of the workers that are alive; `period` and `exact_rounds` hold while all are.
    """

    name: str
    n: int
    options: dict[str, Any]
    mixing: Plan

    static: bool = False
    """The same mixing in every round."""
    everyone: bool = False
    """All hear all with equal weights; the rows are bitwise the same."""
    tree: bool = False
    """Static, and the links form a tree."""
    symmetric: bool = False
    """w_ij = w_ji, bitwise."""
    doubly_stochastic: bool = False
    """No weight is negative, rows and columns sum to one: the mean is kept."""
    column_stochastic: bool = False
    """No weight is negative and columns sum to one, rows perhaps not: the sum of what is pushed is kept."""
    psd: bool = False
    """Symmetric without negative eigenvalues."""
    period: int | None = None
    """Rounds after which a deterministic sequence repeats; None if it is random."""
    exchangeable: bool = False
    """Random, independent over the rounds, and no worker is special: renaming the workers does not change the law. Every draw
    has the same own weights and the same peer weights, in some order."""
    exact_rounds: int | None = None
    """Rounds, from round zero on, after which everyone holds the exact mean; None if that takes forever."""


def complete(n: int, *, seed: int = 0) -> Topology:
    """Everyone hears everyone: `W = J = 11ᵀ/n`. Cost: n - 1 messages per worker and round, or 2(n-1)/n as a shared mean.

    >>> complete(2).mixing(0).rows
    (((0, 0.5), (1, 0.5)), ((0, 0.5), (1, 0.5)))
    """

    def build(round: int, workers: Sequence[int]) -> Mixing:
        # Not from_edges: the own weight 1 - (m-1)/m differs from 1/m in the last bit, and these rows must not differ.
        row = tuple((j, 1.0 / len(workers)) for j in workers)
        hearers = {i: tuple(j for j in workers if j != i) for i in workers}
        rows = tuple(row if i in hearers else ((i, 1.0),) for i in range(n))
        return Mixing(rows, tuple(hearers.get(i, ()) for i in range(n)))

    return _topology(
        "complete", n, {}, build,
        everyone=True, tree=n == 2, symmetric=True, doubly_stochastic=True, psd=True, period=1, exact_rounds=1,
    )  # fmt: skip


def ring(n: int, *, seed: int = 0, edge_weight: float | None = None) -> Topology:
    """Each worker hears the one before and the one after it; two workers share one link.

    Args:
        edge_weight: λ in (0, 1] of the weighted Laplacian, so that `w_ij = λ/2`; None for 1/(degree + 1), 1/3 from n = 3 on.
    Cost: 2 messages per worker and round. Slow for many workers: the spectral gap shrinks like 1/n².

    >>> ring(4).mixing(0).hears_from(0)
    (1, 3)
    """
    whole("topology 'ring'", "n", n, 1)
    if edge_weight is not None and not (isinstance(edge_weight, int | float) and 0.0 < edge_weight <= 1.0):
        raise ConfigError(
            f"topology 'ring' got edge_weight = {edge_weight!r}; allowed is (0, 1], where 1 leaves a worker no own weight: "
            "choose a value in that range, or none for 1/3"
        )

    def edges(round: int, m: int) -> Iterable[Edge]:
        weighted = metropolis(m, [(i, (i + 1) % m) for i in range(m)])
        return weighted if edge_weight is None else [(i, j, edge_weight / 2) for i, j, _ in weighted]

    return _topology(
        "ring", n, {"edge_weight": edge_weight}, _from(edges, n),
        tree=n == 2, symmetric=True, doubly_stochastic=True,
        psd=n <= 3 if edge_weight is None else edge_weight <= 0.5, period=1,
    )  # fmt: skip


def torus(n: int, *, seed: int = 0, rows: int | None = None) -> Topology:
    """A grid of `rows` times n / rows workers that wraps around at both edges, with weights 1/(degree + 1).

    With workers missing, the others form the most square grid of their number, which for a prime number is a ring.

    Args:
        rows: a divisor of n; None for the most square grid.
    Cost: up to 4 messages per worker and round. The spectral gap shrinks like 1/n.
    Raises: ConfigError when n is a prime: a grid of one row is a ring.

    >>> torus(9).mixing(0).hears_from(4)
    (1, 3, 5, 7)
    """
    whole("topology 'torus'", "n", n, 1)
    if n > 1 and _most_square(n) == 1:
        raise ConfigError(
            f"topology 'torus' got n = {n}, a prime; allowed are products of two numbers above 1: "
            f"use {n + 1 if n > 2 else 4} workers, or topology 'ring'"
        )
    if rows is not None:
        whole("topology 'torus'", "rows", rows, 1)
        if n % rows != 0 or (n > 1 and rows in (1, n)):
            divisors = [d for d in range(2, n) if n % d == 0] if n > 1 else [1]
            raise ConfigError(
                f"topology 'torus' got rows = {rows} for n = {n}; allowed are {', '.join(map(str, divisors))}: choose one"
            )

    def edges(round: int, m: int) -> Iterable[Edge]:
        height = rows if rows is not None and m == n else _most_square(m)
        width = m // height
        across = [(i, i - i % width + (i + 1) % width) for i in range(m)]
        down = [(i, (i + width) % m) for i in range(m)]
        return metropolis(m, across + down)

    return _topology(
        "torus", n, {"rows": rows}, _from(edges, n), symmetric=True, doubly_stochastic=True, period=1
    )  # fmt: skip


def star(n: int, *, seed: int = 0) -> Topology:
    """The first worker alive hears everyone, everyone hears it; Metropolis weights, 1/n on every link.

    Cost: n - 1 messages for the hub, 1 for the others. The spectral gap is 1/n.

    >>> star(4).mixing(0, frozenset({1, 2, 3})).sends_to(1)
    (2, 3)
    """
    return _topology(
        "star", n, {}, _from(lambda round, m: metropolis(m, [(0, i) for i in range(1, m)]), n),
        tree=True, symmetric=True, doubly_stochastic=True, psd=True, period=1,
    )  # fmt: skip


def chain(n: int, *, seed: int = 0) -> Topology:
    """Each worker hears the one before and the one after it, a ring cut open; Metropolis weights, 1/3 from n = 3 on.

    Cost: 2 messages per worker and round, 1 for the two at the ends. Spectral gap 2/3 (1 - cos(π/n)), a quarter of the ring's.

    >>> [chain(4).mixing(0).hears_from(i) for i in range(4)]
    [(1,), (0, 2), (1, 3), (2,)]
    """
    return _topology(
        "chain", n, {}, _from(lambda round, m: metropolis(m, [(i - 1, i) for i in range(1, m)]), n),
        tree=True, symmetric=True, doubly_stochastic=True, psd=n <= 3, period=1,
    )  # fmt: skip


def tree(n: int, *, seed: int = 0, branching: int = 2) -> Topology:
    """A balanced tree: worker i > 0 hears worker ⌊(i - 1) / k⌋ above it, and that one hears it; Metropolis weights.

    Args:
        branching: k of at least 1, how many a worker has below it; 1 is a chain, n - 1 a star.
    Cost: up to k + 1 messages per worker and round; for k > 1 no two workers are more than 2 log_k n links apart.

    >>> [tree(6).mixing(0).hears_from(i) for i in range(6)]
    [(1, 2), (0, 3, 4), (0, 5), (1,), (1,), (2,)]
    """
    whole("topology 'tree'", "branching", branching, 1)

    def edges(round: int, m: int) -> Iterable[Edge]:
        return metropolis(m, [((i - 1) // branching, i) for i in range(1, m)])

    return _topology(
        "tree", n, {"branching": branching}, _from(edges, n),
        tree=True, symmetric=True, doubly_stochastic=True, psd=n <= max(branching + 1, 3), period=1,
    )  # fmt: skip


def exponential(n: int, *, seed: int = 0) -> Topology:
    """Worker i hears i + 1, i + 2, i + 4, … (mod n), L = ⌈log2 n⌉ peers with weight 1/(L + 1) each; directed.

    Cost: L messages per worker and round. Spectral gap 2/(L + 1) for even n, a little more for odd n.
    Source: arXiv 2110.13363.

    >>> exponential(8).mixing(0).hears_from(0)
    (1, 2, 4)
    """

    def edges(round: int, m: int) -> Iterable[Edge]:
        hops = _hops(m)
        return [(i, (i + hop) % m, 1.0 / (len(hops) + 1)) for i in range(m) for hop in hops]

    return _topology(
        "exponential", n, {}, _from(edges, n),
        tree=n == 2, symmetric=n <= 3, doubly_stochastic=True, psd=n <= 3, period=1,
    )  # fmt: skip


def one_peer_exponential(n: int, *, seed: int = 0) -> Topology:
    """In round t, worker i hears i + 2^(t mod L) (mod n) with weight 1/2, L = ⌈log2 n⌉; directed, doubly stochastic.

    Cost: 1 message per worker and round. Exact after L rounds when n is a power of two.
    Source: arXiv 2110.13363.

    >>> [one_peer_exponential(8).mixing(t).hears_from(0) for t in range(4)]
    [(1,), (2,), (4,), (1,)]
    """

    def edges(round: int, m: int) -> Iterable[Edge]:
        hops = _hops(m)
        return [(i, (i + hops[round % len(hops)]) % m, 0.5) for i in range(m)] if hops else []

    length = len(_hops(n))
    return _topology(
        "one_peer_exponential", n, {}, _from(edges, n),
        tree=n == 2, symmetric=n <= 2, doubly_stochastic=True, psd=n <= 2, period=length,
        exact_rounds=length if n == 1 << length else None,
    )  # fmt: skip


def hypercube(n: int, *, seed: int = 0) -> Topology:
    """In round t, worker j and worker j XOR 2^(t mod log2 n) take their mean; exact after log2 n rounds.

    With workers missing, those alive take the first corners of the smallest hypercube that holds them, and a worker whose
    partner's corner is empty waits for the next round: still connected over a period, no longer exact.

    Cost: 1 message per worker and round.
    Raises: ConfigError when n is not a power of two.

    >>> [hypercube(8).mixing(t).hears_from(5) for t in range(3)]
    [(4,), (7,), (1,)]
    """
    whole("topology 'hypercube'", "n", n, 1)
    length = len(_hops(n))
    if n != 1 << length:
        raise ConfigError(
            f"topology 'hypercube' got n = {n}; allowed are powers of two: use {1 << (length - 1)} or {1 << length} workers, "
            "or topology 'base', which is exact for every n"
        )

    def edges(round: int, m: int) -> Iterable[Edge]:
        hops = _hops(m)
        hop = hops[round % len(hops)] if hops else 0
        return [(j, j ^ hop, 0.5) for j in range(m) if hop and j ^ hop < m]

    return _topology(
        "hypercube", n, {}, _from(edges, n),
        tree=n == 2, symmetric=True, doubly_stochastic=True, psd=True, period=length, exact_rounds=length,
    )  # fmt: skip


def random(n: int, *, seed: int = 0, peers: int = 1) -> Topology:
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
    whole("topology 'random'", "n", n, 1)
    whole("topology 'random'", "peers", peers, 1, max(1, n - 1))

    def edges(round: int, m: int) -> Iterable[Edge]:
        k = min(peers, m - 1)
        if k < 1:
            return []
        w = 1.0 / (k + 1)
        pairs = random_matchings(m, k, seed, round).tolist()
        return [edge for i, j in pairs for edge in ((i, j, w), (j, i, w))]

    return _topology(
        "random", n, {"peers": peers}, _from(edges, n),
        symmetric=True, doubly_stochastic=True, psd=peers == 1, exchangeable=True,
    )  # fmt: skip


def base(n: int, *, seed: int = 0, peers: int = 1) -> Topology:
    """The Base-(k+1) graph: exact averaging for every n, with at most k peers per round, in about 2 log_{k+1} n rounds.

    With n = Σ_l a_l (k+1)^p_l in base k + 1, block V_l has a_l sub-blocks of (k+1)^p_l workers. First every block averages
    within itself. Then block after block gives each of its sub-blocks the mean of itself and all blocks behind it: every
    worker behind meets one worker in each sub-block, with weight `|V_l| / (a_l Σ_{i≥l} |V_i|)`, and the sub-blocks average
    within themselves.

    Args:
        peers: k in 1 .. n - 1; at most the number of workers alive, less one, is used.
    Cost: up to k messages per worker and round.
    Source: arXiv 2305.11420 (its "simple" form).

    >>> [base(n).exact_rounds for n in (3, 5, 6, 7, 8, 12, 24)]
    [3, 5, 5, 5, 3, 7, 9]
    """
    whole("topology 'base'", "n", n, 1)
    whole("topology 'base'", "peers", peers, 1, max(1, n - 1))
    rounds = lru_cache(maxsize=4)(lambda m: _base_rounds(m, min(peers, m - 1)) if m > 1 else [[]])
    length = len(rounds(n))
    return _topology(
        "base", n, {"peers": peers}, _from(lambda round, m: rounds(m)[round % len(rounds(m))], n),
        tree=n == 2, symmetric=True, doubly_stochastic=True, psd=n <= peers + 1, period=length, exact_rounds=length,
    )  # fmt: skip


def random_push(n: int, *, seed: int = 0, peers: int = 1) -> Topology:
    """Every worker sends to `peers` others that it draws by itself; each share, and the one it keeps, is 1/(peers + 1).

    Whom a worker hears from is left to chance: nobody or many, so rows do not sum to one, and only a push rule such as 'sgp',
    which sends its mass along, finds the mean. In return nobody has to agree with anybody about who meets whom.

    Args:
        peers: k in 1 .. n - 1; at most the number of workers alive, less one, is used.
    Cost: k messages sent per worker and round, k received on average.
    Source: push-sum, Kempe, Dobra and Gehrke, FOCS 2003.

    >>> mixing = random_push(4, seed=1).mixing(1)
    >>> [mixing.sends_to(i) for i in range(4)], [len(mixing.hears_from(i)) for i in range(4)]
    ([(2,), (2,), (1,), (2,)], [0, 1, 3, 0])
    """
    whole("topology 'random_push'", "n", n, 1)
    whole("topology 'random_push'", "peers", peers, 1, max(1, n - 1))

    def build(round: int, workers: Sequence[int]) -> Mixing:
        m = len(workers)
        k = min(peers, m - 1)
        if k < 1:
            return from_edges(n, [])
        bits = numpy_rng(seed, "topology", round).bit_generator.random_raw(m * k).reshape(m, k).tolist()
        edges = [
            (workers[(j + 1 + hop) % m], workers[j], 1.0 / (k + 1)) for j in range(m) for hop in _chosen(bits[j], m - 1)
        ]
        return from_edges(n, edges, sums="columns")

    return _topology(
        "random_push", n, {"peers": peers}, build, doubly_stochastic=False, column_stochastic=True, exchangeable=True
    )  # fmt: skip


def pga(n: int, *, seed: int = 0, every: int = 6, graph: str | Mapping[str, Any] = "one_peer_exponential") -> Topology:
    """Gossip with periodic global averaging: everyone hears everyone in every `every`-th round, in the others `graph` rules.

    Args:
        every: K of at least 1; the rounds K - 1, 2K - 1, … are global.
        graph: the topology of the other rounds, by its name, or with its options as in `{name = "random", peers = 2}`.
    Cost: that of `graph`, and n - 1 messages per worker in a global round, in which everyone waits for everyone.
    Source: Chen et al., arXiv 2105.09080.
    Fails when: one link is slow: global rounds wait for it. On a random `graph` the predicted stability is an estimate that
        takes the global rounds for random ones too.

    >>> [len(pga(8, every=3).mixing(t).hears_from(0)) for t in range(6)]
    [1, 1, 7, 1, 1, 7]
    """
    whole("topology 'pga'", "every", every, 1)
    spec = {"name": graph} if isinstance(graph, str) else graph
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise ConfigError(
            f"topology 'pga' got graph = {graph!r}; allowed are a topology's name, or a table with its name and options: "
            "give one"
        )
    between, average = make_topology(**{**spec, "n": n, "seed": seed}), complete(n)

    def build(round: int, workers: Sequence[int]) -> Mixing:
        return (average if (round + 1) % every == 0 else between).mixing(round, frozenset(workers))

    if every == 1 or (between.static and between.mixing(0) == average.mixing(0)):
        tags = {tag: getattr(average, tag) for tag in ("everyone", "tree", "period", "exact_rounds")}
        between = average
    else:
        period = None if between.period is None else math.lcm(between.period, every)
        tags = {"period": period, "exact_rounds": min(every, between.exact_rounds or every)}
    inherited = {tag: getattr(between, tag) for tag in ("symmetric", "doubly_stochastic", "column_stochastic", "psd")}
    return _topology("pga", n, {"every": every, "graph": graph}, build, **tags, **inherited)


TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "base": base,
    "chain": chain,
    "complete": complete,
    "exponential": exponential,
    "hypercube": hypercube,
    "one_peer_exponential": one_peer_exponential,
    "pga": pga,
    "random": random,
    "random_push": random_push,
    "ring": ring,
    "star": star,
    "torus": torus,
    "tree": tree,
}


def make_topology(name: str, n: int, seed: int = 0, **options: Any) -> Topology:
    """The topology of that name in `TOPOLOGIES`, with its own options.

    Raises: ConfigError when the name or an option is unknown, or a value cannot work.

    >>> make_topology("random", 8, peers=2).options
    {'peers': 2}
    """
    if name not in TOPOLOGIES:
        raise ConfigError(choose("topology", name, TOPOLOGIES))
    allowed = set(inspect.signature(TOPOLOGIES[name]).parameters) - {"n", "seed"}
    for option, value in options.items():
        if not allowed:
            raise ConfigError(f"topology '{name}' takes no options, and got {option} = {value!r}: leave it out")
        if option not in allowed:
            raise ConfigError(choose(f"option of topology '{name}'", option, allowed))
    return TOPOLOGIES[name](n, seed=seed, **options)


def draw(topology: Topology, round: int) -> str:
    """A picture of one round in plain text: up to 16 workers on a circle, and in any case who hears whom with what weight.

    >>> print(draw(star(4), 0))
    star, 4 workers, round 0
    <BLANKLINE>
            0
          . . .
        .   .   .
      .     .     .
    3       .       1
            .
            .
            .
            2
    <BLANKLINE>
    0 hears 1, 2, 3 (0.25 each)
    1 hears 0 (0.25)
    2 hears 0 (0.25)
    3 hears 0 (0.25)
    """
    mixing = topology.mixing(round)
    lines = [f"{topology.name}, {topology.n} worker{'s' * (topology.n != 1)}, round {round}", ""]
    if topology.n <= 16:
        lines += [*_circle(mixing), ""]
    listed = min(topology.n, 64)
    for i in range(listed):
        heard = {j: f"{w:.3g}" for j, w in mixing.rows[i] if j != i}
        if len(heard) > 1 and len(set(heard.values())) == 1:
            told = f"{', '.join(map(str, heard))} ({heard.popitem()[1]} each)"
        else:
            told = ", ".join(f"{j} ({w})" for j, w in heard.items()) or "nobody"
        lines.append(f"{i} hears {told}")
    if topology.n > listed:
        lines.append(f"... and {topology.n - listed} more workers")
    return "\n".join(lines)


def _circle(mixing: Mixing) -> list[str]:
    """Worker 0 on top, the others clockwise, and dots along the links."""
    n = mixing.n
    radius = 4 if n <= 8 else 8
    turns = [2 * math.pi * i / n for i in range(n)]
    # (line, column), rounded so that the last bit of a cosine cannot move a dot
    places = [(round(radius - radius * math.cos(a), 6), round(2 * radius + 2 * radius * math.sin(a), 6)) for a in turns]
    grid = [[" "] * (4 * radius + 2) for _ in range(2 * radius + 1)]
    for i, j in sorted({(min(a, b), max(a, b)) for a in range(n) for b in mixing.hears_from(a)}):
        (y, x), (to_y, to_x) = places[i], places[j]
        steps = math.ceil(max(abs(to_y - y), abs(to_x - x) / 2))
        for part in (s / steps for s in range(1, steps)):
            grid[_nearest(y + (to_y - y) * part)][_nearest(x + (to_x - x) * part)] = "."
    for i, (y, x) in enumerate(places):
        for k, digit in enumerate(str(i)):
            grid[_nearest(y)][_nearest(x) + k] = digit
    return "\n".join("".join(row).rstrip() for row in grid).rstrip().split("\n")


def _nearest(x: float) -> int:
    return math.floor(x + 0.5)


def _topology(
    name: str, n: int, options: dict[str, Any], build: Callable[[int, Sequence[int]], Mixing], **tags: Any
) -> Topology:
    """Wraps `build(round, workers)` into a plan that remembers the last few rounds, as every worker asks for the same one."""
    whole(f"topology '{name}'", "n", n, 1)
    if n == 1:
        tags = dict.fromkeys(("everyone", "tree", "symmetric", "doubly_stochastic", "psd"), True)
        tags |= {"period": 1, "exact_rounds": 0}
    tags.setdefault("column_stochastic", tags["doubly_stochastic"])
    static = tags.get("period") == 1

    @lru_cache(maxsize=4)
    def planned(round: int, alive: frozenset[int]) -> Mixing:
        workers = sorted(alive)
        assert not workers or 0 <= workers[0] <= workers[-1] < n, (workers, n)
        return build(round, workers)

    everyone = frozenset(range(n))

    def mixing(round: int, alive: frozenset[int] | None = None) -> Mixing:
        return planned(0 if static else round, everyone if alive is None else alive)

    return Topology(name, n, options, mixing, static=static, **tags)


def _from(edges: Callable[[int, int], Iterable[Edge]], n: int) -> Callable[[int, Sequence[int]], Mixing]:
    """Lets the workers alive take the positions of `edges(round, m)` in ascending order."""

    def build(round: int, workers: Sequence[int]) -> Mixing:
        return from_edges(n, [(workers[i], workers[j], w) for i, j, w in edges(round, len(workers))])

    return build


def _chosen(bits: Sequence[int], m: int) -> list[int]:
    """As many different numbers below m as there are random 64-bit numbers."""
    left = list(range(m))
    return [left.pop(draw % len(left)) for draw in bits]


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
        """Lets positions that differ in one mixed-radix digit take their mean, a digit per round; returns the round after."""
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


def _hops(m: int) -> list[int]:
    """1, 2, 4, …, the powers of two below m."""
    return [1 << p for p in range((m - 1).bit_length())] if m > 1 else []


def _most_square(m: int) -> int:
    """The largest divisor of m up to its square root: the rows of the most square grid."""
    return max((d for d in range(1, math.isqrt(m) + 1) if m % d == 0), default=1)
