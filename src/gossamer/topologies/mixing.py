"""Mixing: the peers and weights of each worker, and the two sums over messages in a fixed order.

`pull` is exactly zero at consensus and sums to zero over the workers for doubly stochastic weights, so any lossy codec keeps
the mean. `mean` is summed in the same order everywhere, so replicas that receive from everyone stay bitwise identical.
Neither is computed as a matrix product: `W @ X` differs from a real exchange in the last bits, and with reduced-precision
matrix units in more than that.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError
from gossamer.tree import Tree, map_leaves

if TYPE_CHECKING:  # topologies are chosen without torch
    from torch import Tensor

MOST_MESSAGES = 2_000_000
"""The most messages of a round; planning so many takes some seconds."""

MOST_TOGETHER = 100_000
"""The most workers of topologies in which all pairs meet sooner or later; planning a round takes some seconds."""

Row = tuple[tuple[int, float], ...]
T = TypeVar("T")
Combine = Callable[[Tree, Mapping[int, Tree], int, Row], Any]
MomentumSite = Literal["pre", "post", "drift", "start"]


class Consensus(NamedTuple):
    """The linear recursion of a rule's disagreement when every drift is zero.

    With `z = y + α·pull(y)` and y = θ: site "post" is `θ' = z + γ(z - z_prev)`, site "pre" is `θ' = z + γ(θ - θ_prev)`. At site
    "drift" it is `y = θ + γ m`, `θ' = z` and `m ← γ m`, where m is the momentum of drifts, to which no θ contributes; at site
    "start" `θ' = z + γ m`, as neither momentum nor drift are mixed with the parameters.
    """

    alpha: float
    gamma: float
    site: MomentumSite


class Mixing(NamedTuple):
    """One round of a topology: row i holds the workers that worker i receives from, and their weights.

    `rows[i]` is `((j, w_ij), ...)` in ascending j and always holds i itself, even at weight zero; every other entry has a
    weight other than zero. `columns[j]` is the ascending tuple of j and the workers that receive from it, which
    all members of a group share.
    """

    rows: tuple[Row, ...]
    columns: tuple[tuple[int, ...], ...]

    @property
    def n(self) -> int:
        """Number of workers."""
        return len(self.rows)

    def receives_from(self, i: int) -> tuple[int, ...]:
        """The peers whose messages worker i needs, ascending."""
        return tuple(j for j, _ in self.rows[i] if j != i)

    def sends_to(self, i: int) -> tuple[int, ...]:
        """The peers that need the message of worker i, ascending."""
        return tuple(j for j in self.columns[i] if j != i)

    @property
    def everyone(self) -> bool:
        """Whether all receive from all, with the same weights."""
        first = self.rows[0]
        return len(first) == self.n and all(row is first or row == first for row in self.rows)

    def weight(self, i: int) -> float:
        """The own weight w_ii of worker i."""
        return next(w for j, w in self.rows[i] if j == i)


def from_edges(n: int, edges: Iterable[tuple[int, int, float]], sums: Literal["rows", "columns"] = "rows") -> Mixing:
    """The mixing in which i receives from j with weight w for each `(i, j, w)`; own weights complete each row to sum one.

    With `sums = "columns"` they complete each column: the share a worker keeps and the shares it sends sum to one.

    Raises: ConfigError for more than `MOST_MESSAGES`, and for edges that are none.

    >>> from_edges(2, [(0, 1, 0.5), (1, 0, 0.5)]).rows
    (((0, 0.5), (1, 0.5)), ((0, 0.5), (1, 0.5)))
    """
    listed = list(islice(edges, MOST_MESSAGES + 1))
    if len(listed) > MOST_MESSAGES:
        raise ConfigError(
            f"a round of {n:,} workers has more than {MOST_MESSAGES:,} messages, too many to plan; take fewer workers, or a "
            "topology with fewer peers"
        )
    try:
        at, source, weight = np.array(listed, float).reshape(len(listed), 3).T
    except (TypeError, ValueError):
        raise ConfigError(f"the edges of a topology are {listed!r:.80}; give triples (worker, peer, weight)") from None
    at, source = at.astype(np.int64), source.astype(np.int64)
    beyond = (at < 0) | (at >= n) | (source < 0) | (source >= n)
    wrong = beyond | (at == source) | (weight == 0.0) | ~np.isfinite(weight)
    if wrong.any():
        raise ConfigError(
            f"a topology of {n} workers has the edge {listed[wrong.argmax()]!r:.80}; give (worker, peer, weight) with two "
            f"workers from 0 to {n - 1} and a weight other than 0"
        )
    first, then = (at, source) if sums == "rows" else (source, at)
    order = np.lexsort((then, first))
    counts, terms = np.bincount(first, minlength=n), weight[order]
    self_weights = 1.0 - np.bincount(first[order], terms, n)
    # Python itself sums these, since from 3.12 on it does not add one term after the other.
    if (more := np.flatnonzero(counts > 2)).size:
        values, ends = terms.tolist(), counts.cumsum()
        self_weights[more] = [1.0 - sum(values[a:b]) for a, b in zip((ends - counts)[more], ends[more], strict=True)]
    everybody = np.arange(n)
    at, source = np.concatenate([at, everybody]), np.concatenate([source, everybody])
    order = np.lexsort((source, at))
    twice = (np.diff(at[order]) == 0) & (np.diff(source[order]) == 0)
    if twice.any():
        place = order[twice.argmax()]
        raise ConfigError(
            f"a topology of {n} workers has the edge from worker {source[place]} to worker {at[place]} twice; add up their "
            "weights"
        )
    entries = zip(source[order].tolist(), np.concatenate([weight, self_weights])[order].tolist(), strict=True)
    rows = _cut(tuple(entries), np.bincount(at, minlength=n))
    order = np.lexsort((at, source))
    return Mixing(rows, _cut(tuple(at[order].tolist()), np.bincount(source, minlength=n)))


def _cut(entries: tuple[T, ...], counts: NDArray[np.int64]) -> tuple[tuple[T, ...], ...]:
    """Consecutive slices of `entries`, one of each length in `counts`."""
    return tuple([entries[a:b] for a, b in pairwise([0, *counts.cumsum().tolist()])])


def must_be_planned(name: str, n: int) -> None:
    """Raises ConfigError for more than `MOST_TOGETHER` workers."""
    if n > MOST_TOGETHER:
        raise ConfigError(
            f"topology '{name}' got {n:,} workers and can be planned for {MOST_TOGETHER:,} at most; take fewer, or topology "
            "'random' or 'ring', in which a worker has few peers in each round"
        )


def in_groups(n: int, groups: Iterable[Sequence[int]]) -> Mixing:
    """The mixing in which the members of each group take their mean; a worker in no group, or alone in one, keeps its
    value.

    `w_ij = 1 / |group|` within a group, so `W` is a symmetric projection: `W² = W = Wᵀ`. The rows of a group are the same object,
    which `from_edges` cannot give: the own weight 1 - (m-1)/m differs from 1/m in the last bit.

    >>> in_groups(4, [[3, 1]]).rows
    (((0, 1.0),), ((1, 0.5), (3, 0.5)), ((2, 1.0),), ((1, 0.5), (3, 0.5)))
    """
    rows: list[Row] = [((i, 1.0),) for i in range(n)]
    columns: list[tuple[int, ...]] = [(i,) for i in range(n)]
    for group in groups:
        members = tuple(sorted(group))
        row = tuple((j, 1.0 / len(members)) for j in members)
        for i in members:
            rows[i], columns[i] = row, members  # shared: n rows of n peers each would be n² numbers
    return Mixing(tuple(rows), tuple(columns))


def in_pairs(partners: Iterable[int]) -> Mixing:
    """The mixing in which worker i and its partner take their mean; a worker that is its own partner keeps its value.

    For a million workers it takes a third of the time of `from_edges`, with the same weights.

    >>> in_pairs([2, 1, 0]).rows == from_edges(3, [(0, 2, 0.5), (2, 0, 0.5)]).rows
    True
    """
    there = [(i, j) for i, j in enumerate(partners)]
    rows = [((i, 0.5), (j, 0.5)) if i < j else ((j, 0.5), (i, 0.5)) if j < i else ((i, 1.0),) for i, j in there]
    return Mixing(tuple(rows), tuple([(i, j) if i < j else (j, i) if j < i else (i,) for i, j in there]))


def metropolis(n: int, links: Iterable[tuple[int, int]]) -> list[tuple[int, int, float]]:
    """Metropolis weights `w_ij = 1 / (1 + max(deg i, deg j))` of an undirected graph, as edges for `from_edges`.

    Symmetric and doubly stochastic on any graph, without a negative own weight; on a regular graph all weights are
    1 / (degree + 1). A link may be given once or in both directions; loops are ignored.

    >>> metropolis(3, [(0, 1), (0, 2)]) == [(0, 1, 1 / 3), (0, 2, 1 / 3), (1, 0, 1 / 3), (2, 0, 1 / 3)]
    True
    """
    linked: list[set[int]] = [set() for _ in range(n)]
    for i, j in links:
        if i != j:
            linked[i].add(j)
            linked[j].add(i)
    return [(i, j, 1.0 / (1 + max(len(linked[i]), len(linked[j])))) for i in range(n) for j in sorted(linked[i])]


def without(row: Row, i: int, lost: Collection[int]) -> Row:
    """The row of worker i when its exchanges with these peers failed: their weight goes to its own message.

    If the other ends do the same, symmetric weights stay symmetric and the mean is kept.

    >>> without(((0, 0.5), (1, 0.25), (2, 0.25)), 0, [2])
    ((0, 0.75), (1, 0.25))
    """
    if not lost:
        return row
    more = sum(w for j, w in row if j in lost)
    return tuple((j, w + more if j == i else w) for j, w in row if j not in lost)


def matrix(mixing: Mixing) -> NDArray[np.float64]:
    """The dense mixing matrix W `[n, n]`, for analysis only: training never multiplies by it."""
    dense = np.zeros((mixing.n, mixing.n))
    for i, row in enumerate(mixing.rows):
        for j, w in row:
            dense[i, j] = w
    return dense


def spectral_gap(w: NDArray[np.float64]) -> float:
    """`1 - ||W - J||_2`: one minus the largest singular value of W `[n, n]` on the disagreement space.

    One round shrinks the distance to the mean at least by the factor `1 - gap`. For a normal W (any symmetric one, any
    circulant one) it is also one minus the second largest |eigenvalue|. Cost: O(n³).

    >>> round(spectral_gap(np.full((4, 4), 1 / 4)), 12)
    1.0
    """
    n = len(w)
    return 1.0 - float(np.linalg.norm(w - 1.0 / n, 2))


def laplacian_condition(w: NDArray[np.float64]) -> float:
    """`χ = λ_max / λ_2` of the Laplacian `I - W` of a symmetric W `[n, n]`; infinite where the graph is not connected.

    Accelerated gossip needs about sqrt(χ) rounds where plain gossip needs χ. One for the complete graph and for one worker.

    Raises: ConfigError when W is not symmetric. Cost: O(n³).

    >>> round(laplacian_condition(np.full((4, 4), 1 / 4)), 12)
    1.0
    """
    skew = float(np.abs(w - w.T).max())
    if skew > 1e-12:
        raise ConfigError(
            f"the Laplacian condition number is defined for symmetric weights, and these differ from their transpose by up "
            f"to {skew:.3g}; use spectral_gap for directed graphs"
        )
    if len(w) == 1:
        return 1.0
    values = np.linalg.eigvalsh(np.eye(len(w)) - w)
    return float(values[-1] / values[1]) if values[1] > 1e-12 else float("inf")


def widen(x: "Tensor") -> "Tensor":
    """Converts to fp32 or wider for sums: a bf16 accumulator loses the mean within a few rounds."""
    return x.float() if x.is_floating_point() and x.element_size() == 2 else x


def _added(terms: "Iterator[Tensor]", like: "Tensor") -> "Tensor":
    """The sum of the terms in order, accumulated in place in the first, which must not be shared; zeros for no terms."""
    total = next(terms, None)
    if total is None:
        return widen(like).new_zeros(like.shape)
    for term in terms:
        total += term  # no alpha=, lerp or addcmul anywhere: eager code fuses those and compiled code does not
    return total


def pull(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The pull of the neighbourhood on worker i: `pull_i = Σ_j w_ij (m_j - m_i)`, j ascending, of the decoded messages m.

    Args: `own_decoded` is m_i as the others decoded it, `received[j]` is m_j as i decoded it; both have the same shape.
    Cost: reads 1 + |row| messages, writes one.
    """

    def one(message: "Tensor", *others: "Tensor") -> "Tensor":
        me = widen(message)
        return _added((w * (widen(other) - me) for w, other in zip(weights, others, strict=True)), me)

    peers = [j for j, _ in row if j != i]
    weights = [w for j, w in row if j != i]
    return map_leaves(one, own_decoded, *(received[j] for j in peers))


def mean(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The weighted mean `mean_i = Σ_j w_ij m_j` with j ascending, i's own message in its place.

    Bitwise the same on every worker whose row is the same. Cost: reads |row| messages, writes one.
    """

    def one(*messages: "Tensor") -> "Tensor":
        return _added((w * widen(message) for (_, w), message in zip(row, messages, strict=True)), messages[0])

    return map_leaves(one, *(own_decoded if j == i else received[j] for j, _ in row))


def each(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> Any:
    """The messages of the peers, in ascending order of senders, which are `ctx.peers` of a rule."""
    return tuple(received[j] for j, _ in row if j != i)
