"""The interface of topologies: a plan of mixings, and tags that state their properties."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field

from gossamer.settings.options import Given, in_short
from gossamer.topologies.mixing import Mixing, from_edges

Edge = tuple[int, int, float]
MOST_WORKERS = 1_000_000
Workers = Given[Annotated[int, Field(ge=1, le=MOST_WORKERS)]]
Seed = Given[int]


class Plan(Protocol):
    """The mixing of a round; `alive` names the workers that take part, None is everyone."""

    def __call__(self, round: int, alive: frozenset[int] | None = None) -> Mixing: ...


class Topology(NamedTuple):
    """A sequence of mixings, and tags that hold for each of them, whichever workers are alive.

    `everyone`, `static` and `tree` refer to the workers that are alive; `period` and `exact_rounds` hold while all are.
    """

    n: int
    mixing: Plan
    name: str = ""
    """The name of its factory; the factory decorator fills in name and options."""
    options: Mapping[str, Any] = MappingProxyType({})
    static: bool = False
    """The same mixing in every round."""
    everyone: bool = False
    """All receive from all with equal weights; the rows are bitwise the same."""
    tree: bool = False
    """Static, and the links form a tree."""
    symmetric: bool = False
    """w_ij = w_ji, bitwise."""
    doubly_stochastic: bool = False
    """No weight is negative, rows and columns sum to one: the mean is kept."""
    column_stochastic: bool = False
    """No weight is negative and columns sum to one, rows need not: the sum over the workers is kept."""
    psd: bool = False
    """Symmetric without negative eigenvalues."""
    period: int | None = None
    """Rounds after which a deterministic sequence repeats; None if it is random."""
    exchangeable: bool = False
    """Random, independent over the rounds, and symmetric: permuting the workers does not change the distribution. Every
    draw has the same self-weights and the same peer weights, in some order.
    """
    exact_rounds: int | None = None
    """Rounds, from round zero on, after which all workers hold the exact mean; None if never."""

    def __repr__(self) -> str:
        return in_short(self)


def planned_topology(n: int, build: Callable[[int, Sequence[int]], Mixing], **tags: Any) -> Topology:
    """Wraps `build(round, workers)` into a plan that caches the last few rounds, as all workers request the same ones."""
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

    return Topology(n, mixing, static=static, **tags)


def over_alive(edges: Callable[[int, int], Iterable[Edge]], n: int) -> Callable[[int, Sequence[int]], Mixing]:
    """Assigns the workers alive to the positions of `edges(round, m)` in ascending order."""

    def build(round: int, workers: Sequence[int]) -> Mixing:
        if len(workers) == n:
            return from_edges(n, edges(round, n))
        return from_edges(n, [(workers[i], workers[j], w) for i, j, w in edges(round, len(workers))])

    return build


def chosen(bits: Sequence[int], m: int) -> list[int]:
    """Different numbers below m, one for each of the random 64-bit numbers."""
    picked: list[int] = []
    for k, draw in enumerate(bits):
        place = draw % (m - k)  # among the numbers that are left, in their order
        for one in sorted(picked):
            place += one <= place
        picked.append(place)
    return picked
