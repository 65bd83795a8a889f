"""Will the workers stay together? The mean-square stability of a rule's disagreement on a topology, before anything is run.

Without drift the disagreement of a gossip rule with momentum obeys a linear recursion (`Consensus`). On a static or periodic
topology its companion matrices are known; on a random one the second moment is what counts, and for exchangeable draws it
closes in three numbers. The model has no loss: the curvature that workers share pulls them together as well.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.rounds.recursion import Recursion, consensus_recursion, rule_recursion
from gossamer.settings.options import Decay, check_option
from gossamer.topologies import Topology
from gossamer.topologies.mixing import Consensus, Mixing, MomentumSite, laplacian_condition, matrix, spectral_gap

if TYPE_CHECKING:  # gossip on a topology is predicted without torch
    from gossamer.rounds.merging import Merge
    from gossamer.rules import Rule

Array = NDArray[Any]

_MOST_WORK, _MOST_SEARCHED = 5e8, 1e7
"""The most work of one analysis, in multiplications (up to ten seconds), and of one that a search repeats."""
_OF_A_ROUND = 2e4
"""The fixed work per round of a period, in equivalent multiplications."""


class _Analysis(NamedTuple):
    """The quantities of a topology that do not depend on (α, γ)."""

    of: "Callable[[Recursion], Stability]"
    work: float = 0.0
    """The work in multiplications; 0 for a few milliseconds or less."""


class Stability(NamedTuple):
    """The evolution of a rule's disagreement on a topology."""

    radius: float
    """Factor by which the rms disagreement shrinks per round in the long run; it grows above one."""
    variance: float
    """Steady variance per dimension of the disagreement space when every round adds drift of unit variance to what is sent;
    infinite if unstable, nan if not known. The mean over workers of |θ_i - mean|² is (n-1)/n of it per parameter."""
    method: Literal["closed form", "companion", "second moment"]
    """The method of computation: exact for exchangeable draws, exact for periodic sequences, estimated from 256 draws."""

    @property
    def stable(self) -> bool:
        """Whether the disagreement stays bounded; a radius within 1e-9 of one counts as one."""
        return self.radius < 1.0 - 1e-9


class Gossip(NamedTuple):
    """The stability of gossip on a topology with one step and momentum, and the settings that would be stable."""

    consensus: Consensus
    stability: Stability
    largest_gamma: float
    """As `largest_stable_gamma` of its step and site; nan if no momentum is stable."""
    best_alpha: float
    """As `best_alpha` of its momentum and site."""


class Outlook(NamedTuple):
    """Predictions for gossip on a topology."""

    spectral_gap: float | None
    """Of the mean mixing matrix; None where that is not known."""
    laplacian_condition: float | None
    """Of the mean mixing matrix; None where that is not known, or not symmetric."""
    gossip: tuple[Gossip, ...]
    """With momentum after mixing (site "post"), before mixing ("pre") and of drifts alone ("drift"), and without momentum; empty
    where the weights are not doubly stochastic, so that gossip does not preserve the mean, and where it takes too long."""


def stability(consensus: Consensus, topology: Topology) -> Stability:
    """The rms contraction per round and the steady variance of a recursion on a topology, all workers alive.

    With `W_α = (1-α) I + α W`, the pair (θ, θ_prev) at site "pre", (θ, z_prev) at "post", and (θ, m) at "drift" and "start",
    is multiplied by

        pre: [[W_α + γ I, -γ I], [I, 0]]        post: [[(1+γ) W_α, -γ I], [W_α, 0]]
        drift: [[W_α, γ W_α], [0, γ I]]         start: [[W_α, γ I], [0, γ I]]

    and the radius is that of their product over a period, or of the second moment `S -> E[M S Mᵀ]` of random ones (its
    square root). Drift enters as noise on θ before the round, so at "pre" the momentum sees it too; at "drift" and "start" it
    enters m as well, and at "start" it is not mixed. There the matrix is triangular: no momentum below one is unstable where
    gossip is stable without.

    Raises: ConfigError when alpha is still "auto", and for a topology that `too_large` says cannot be predicted.
    Cost: O(n) for exchangeable topologies, O(period · n log n) for circulant ones (ring, exponential), O(period · n³) for
        others; for those whose mixings do not commute (base, unless n is a power of k + 1) that holds for every pair (α, γ)
        again: half a second for 255 workers.
    Source: static graphs are heavy-ball and Nesterov gossip; random pairs with momentum at "pre" are the gossip of Loizou
        and Richtárik, arXiv 1905.08645; the second moments are ours.

    >>> from gossamer.topologies import random
    >>> [round(stability(Consensus(1.0, gamma, "post"), random(8)).radius, 3) for gamma in (0.0, 0.7, 0.9)]
    [0.655, 0.914, 1.022]
    """
    if math.isnan(consensus.alpha):
        raise ConfigError(
            f"the gossip step is {consensus.alpha}, which stands for alpha = 'auto', but must be a number; call "
            "resolve_alpha(rule, topology) first"
        )
    return _analysis(topology).of(consensus_recursion(consensus))


def few_rounds_warning(rule: "Rule", rounds: int) -> str | None:
    """A sentence where the outer momentum of a rule is still building up in most rounds of a run, so that its loss says little.

    After r rounds a momentum γ has 1 - γ^r of its full size, and 3/(1 - γ) of them make 95 % of it.

    >>> from gossamer.rules import diloco
    >>> few_rounds_warning(diloco(), 8)  # doctest: +ELLIPSIS
    "the momentum 0.9 of rule 'diloco' has its full size after some 30 rounds and this run has 8, ... a momentum of at most 0.62"
    >>> few_rounds_warning(diloco(momentum=0.5), 8)
    """
    gamma = rule.options.get("momentum")
    if not isinstance(gamma, float) or not 0 < gamma < 1 or rounds >= (needed := math.ceil(3 / (1 - gamma) - 1e-9)):
        return None
    less = f", or a momentum of at most {math.floor(100 * (1 - 3 / rounds)) / 100:g}" if rounds > 3 else ""
    return (
        f"the momentum {gamma:g} of rule '{rule.name}' has its full size after some {needed} rounds and this run has {rounds}, "
        f"so that its loss here says little about longer runs; take more rounds{less}"
    )


def stability_of(rule: "Rule", topology: Topology, merge: "Merge" = "keep") -> Stability | None:
    """The stability of a rule whose result a schedule merges into the parameters (`Schedule.merge`).

    None without consensus, and for a topology that is `too_large`.

    Mixing the updates first (`Rule.mixes_updates`) leaves less of their variance. The merge is part of the recursion: it damps
    fast disagreement, such as that of momentum, and keeps slow disagreement longer. "taylor" is not linear: without drift it
    corrects nothing, and with drift by no more than λ times it. So the radius is that of "keep", and the disagreement bounded
    where that is below one, but the variance is not known (nan).

    Raises and cost: as `stability`.

    >>> from gossamer.rules import gasloc
    >>> from gossamer.topologies import random
    >>> [round(stability_of(gasloc(momentum=0.9), random(8), merge).radius, 3) for merge in ("keep", 0.5)]
    [1.022, 0.684]
    """
    if rule.consensus is None or too_large(topology):
        return None
    if isinstance(merge, str):  # without drift there is nothing to keep
        result = stability(rule.consensus, topology)
        from gossamer.rounds.updates import left_by_updates

        left = math.nan if merge == "taylor" else left_by_updates(rule, topology.n)
        return result._replace(variance=result.variance * left)
    return _analysis(topology).of(rule_recursion(rule, merge))


def largest_stable_gamma(alpha: float, site: MomentumSite, topology: Topology) -> float:
    """The supremum of the momenta in [0, 1] that are stable with this gossip step; nan if none is.

    Smaller momenta are usually stable too, but a gossip step above one may need some.

    >>> from gossamer.topologies import random
    >>> round(largest_stable_gamma(1.0, "pre", random(8)), 3), round(largest_stable_gamma(1.0, "post", random(8)), 3)
    (0.744, 0.859)
    """
    analysis = _analysis(topology)

    def stable(gamma: float) -> bool:
        return analysis.of(consensus_recursion(Consensus(alpha, gamma, site))).stable

    if stable(1.0 - 1e-6):
        return 1.0
    low = next((k / 32 for k in range(31, -1, -1) if stable(k / 32)), math.nan)
    high = low + 1 / 32
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def best_alpha(gamma: float, site: MomentumSite, topology: Topology) -> float:
    """The gossip step in (0, 2) with the least steady variance at this momentum, to three digits.

    Stable whenever a step above 1e-6 is; if none is, the one with the smallest radius.

    >>> from gossamer.topologies import random
    >>> best_alpha(0.0, "post", random(8)), best_alpha(0.9, "post", random(8)) < 1
    (1.0, True)
    """
    if topology.n == 1:
        return 1.0
    analysis = _analysis(topology)

    def cost(log_alpha: float) -> tuple[bool, float]:
        result = analysis.of(consensus_recursion(Consensus(math.exp(log_alpha), gamma, site)))
        return not result.stable, result.variance if result.stable else result.radius

    grid = np.linspace(math.log(1e-6), math.log(1.99), 25).tolist()
    best = min(range(len(grid)), key=lambda k: cost(grid[k]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 2e-4:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if cost(left) <= cost(right) else (left, high)
    return float(f"{math.exp((low + high) / 2):.3g}")


def resolve_alpha(rule: "Rule", topology: Topology) -> "Rule":
    """The rule with `alpha = "auto"` replaced by `best_alpha` for the topology; any other rule as it is.

    >>> from gossamer.rules import gasloc
    >>> from gossamer.topologies import complete
    >>> resolve_alpha(gasloc(alpha="auto", momentum=0.0), complete(4)).options["alpha"]
    1.0
    """
    if rule.consensus is None or not math.isnan(rule.consensus.alpha):
        return rule
    from gossamer.rules import RULES

    if rule.at is not None:
        raise ConfigError(
            f"rule '{rule.name}' has alpha = 'auto' and numbers that change over the run, for each of which another step would "
            "be best; set a number, such as 1.0"
        )
    if rule.name not in RULES:
        raise ConfigError(
            f"rule '{rule.name}' has alpha = 'auto', which is found for rules of gossamer.rules only; set a number, such as "
            "gossamer.rounds.stability.best_alpha(gamma, site, topology)"
        )
    if too_large(topology) or _analysis(topology).work > _MOST_SEARCHED:
        raise ConfigError(
            f"rule.alpha is 'auto', but the best gossip step on topology '{topology.name}' with {topology.n:,} workers takes too "
            "long to find; set a number, such as 1.0"
        )
    alpha = best_alpha(rule.consensus.gamma, rule.consensus.site, topology)
    return RULES[rule.name](**{**rule.options, "alpha": alpha})


def least_stable(
    rules: "Sequence[tuple[int, Rule]]", topology: Topology, merge: "Merge" = "keep"
) -> "tuple[int, Rule]":
    """Of the variants of a rule over its schedule, by inner step, the one whose disagreement shrinks least."""

    def radius(variant: "tuple[int, Rule]") -> float:
        result = stability_of(variant[1], topology, merge)
        return 0.0 if result is None else result.radius

    return rules[0] if len(rules) == 1 else max(rules, key=radius)


def stability_warning(rule: "Rule", topology: Topology, merge: "Merge" = "keep") -> str | None:
    """A sentence for a rule whose disagreement is predicted not to stay bounded, with stable settings; None if it is
    stable.

    >>> from gossamer.rules import gasloc
    >>> from gossamer.topologies import random
    >>> stability_warning(gasloc(), random(8)) is None, "1.022" in str(stability_warning(gasloc(momentum=0.9), random(8)))
    (True, True)
    """
    now = None if rule.consensus is None else stability_of(rule, topology, merge)
    if rule.consensus is None or now is None or now.stable:
        return None
    grows = (
        f"rule '{rule.name}' is predicted to lose consensus on topology '{topology.name}' with {topology.n} workers: the "
        f"disagreement is multiplied by {now.radius:.3f} per round, where below 1 is needed (the curvature of the loss, which "
        "this ignores, may help)"
    )
    if not isinstance(merge, str):
        return f"{grows}; with schedule.merge = {merge:g}, use a smaller rule.momentum, or a smaller schedule.merge"
    if _analysis(topology).work > _MOST_SEARCHED:
        return f"{grows}; use a smaller rule.momentum or rule.alpha"
    alpha, gamma, site = rule.consensus
    limit, best = largest_stable_gamma(alpha, site, topology), best_alpha(gamma, site, topology)
    by_momentum = (
        f"no momentum is stable with gossip step {alpha:g}"
        if math.isnan(limit)
        else f"with gossip step {alpha:g} the largest stable momentum is {limit:.3f}"
    )
    by_step = (
        f"with momentum {gamma:g} the best gossip step is {best:g}"
        if stability(Consensus(best, gamma, site), topology).stable
        else f"with momentum {gamma:g} no gossip step is stable"
    )
    return f"{grows}; {by_momentum}, and {by_step}"


def outlook(topology: Topology, *, alpha: float, gamma: float) -> Outlook:
    """The predictions for gossip with this step and momentum on a topology.

    Raises: ConfigError when alpha is outside (0, 2) or gamma outside [0, 1).

    >>> from gossamer.topologies import random
    >>> predicted = outlook(random(8), alpha=1.0, gamma=0.5)
    >>> [(row.consensus.site, round(row.stability.radius, 3), row.best_alpha) for row in predicted.gossip]
    [('post', 0.807, 0.795), ('pre', 0.866, 0.808), ('drift', 0.655, 1.06), ('post', 0.655, 1.0)]
    """
    check_option("gossip", "alpha", alpha, Annotated[float, Field(gt=0, lt=2)])
    check_option("gossip", "momentum", gamma, Decay)
    if not topology.doubly_stochastic or too_large(topology):
        return Outlook(None, None, ())
    gap = condition = mean_gap(topology)
    if gap is not None:
        condition = _condition(topology) if topology.symmetric else None
    if _analysis(topology).work > _MOST_SEARCHED:
        return Outlook(gap, condition, ())
    sites: tuple[MomentumSite, ...] = ("post", "pre", "drift")
    limits = {site: largest_stable_gamma(alpha, site, topology) for site in sites}

    def row(site: MomentumSite, momentum: float) -> Gossip:
        consensus = Consensus(alpha, momentum, site)
        result = stability(consensus, topology)
        return Gossip(consensus, result, limits[site], best_alpha(momentum, site, topology))

    return Outlook(gap, condition, (*(row(site, gamma) for site in sites), row("post", 0.0)))


def too_large(topology: Topology) -> bool:
    """Whether the stability of a doubly stochastic topology is too expensive to predict (more than some seconds).

    >>> from gossamer.topologies import chain, random, ring
    >>> too_large(random(20_000)), too_large(ring(20_000)), too_large(chain(20_000))
    (False, False, True)
    """
    if topology.n == 1 or topology.exchangeable or topology.everyone or not topology.doubly_stochastic:
        return False
    rounds, n = topology.period or _DRAWS * 100, topology.n  # sampled rounds are iterated many times
    work = rounds * n**3 + (topology.period or 0) * _OF_A_ROUND
    return work > _MOST_WORK and (rounds * n > 100_000 or not _all_circulant(topology))


def mean_gap(topology: Topology) -> float | None:
    """The spectral gap of the mean mixing matrix; None for a topology that keeps no mean, or has no such matrix in closed form,
    and for one that is `too_large`.

    >>> from gossamer.topologies import complete, ring
    >>> mean_gap(complete(4)), round(mean_gap(ring(4)) or 0.0, 4)
    (1.0, 0.6667)
    """
    if not topology.doubly_stochastic or (topology.period is None and not topology.exchangeable) or too_large(topology):
        return None
    if (values := _mean_values(topology)) is not None:
        return 1.0 - float(np.abs(values).max())
    return spectral_gap(_mean_matrix(topology))


def _condition(topology: Topology) -> float:
    """`laplacian_condition` of the mean mixing matrix of a symmetric topology."""
    if (values := _mean_values(topology)) is None:
        return laplacian_condition(_mean_matrix(topology))
    least, most = 1.0 - np.real(values).max(), 1.0 - np.real(values).min()
    return 1.0 if topology.n == 1 else float(most / least) if least > 1e-12 else math.inf


def _mean_values(topology: Topology) -> Array | None:
    """The eigenvalues of the mean mixing matrix on the disagreement space, where they are known without forming it."""
    n = topology.n
    if n == 1 or topology.everyone:
        return np.zeros(1)
    if topology.period is None:  # exchangeable: a multiple of I plus one of J, and the trace is the same for each draw
        return np.array([(_traces(topology)[0] - 1.0) / (n - 1)])
    if not _all_circulant(topology):
        return None
    first = np.mean([_first_row(topology.mixing(t)) for t in range(topology.period)], axis=0)
    return np.fft.fft(first)[1:]


def _mean_matrix(topology: Topology) -> NDArray[np.float64]:
    """The mean mixing matrix over a period."""
    assert topology.period is not None
    return np.mean([matrix(topology.mixing(t)) for t in range(topology.period)], axis=0)


_DRAWS = 256
"""Rounds sampled from a topology that is neither periodic nor exchangeable."""


def _analysis(topology: Topology) -> _Analysis:
    """The quantities of a topology that do not depend on (α, γ), cached."""
    if not topology.doubly_stochastic:
        raise ConfigError(
            f"topology '{topology.name}' has weights that are not doubly stochastic, so gossip does not preserve the "
            "mean; use one that is, such as 'random'"
        )
    if too_large(topology):
        raise ConfigError(
            f"topology '{topology.name}' has {topology.n:,} workers, too many to predict whether they stay together; take "
            "fewer, or topology 'random', 'ring' or 'exponential', of which this is known for any number"
        )
    if topology.n == 1:
        return _Analysis(lambda recursion: Stability(0.0, 0.0, "closed form"))
    if topology.exchangeable:
        if (cached := _of_exchangeable.get(topology.mixing)) is None:
            cached = _of_exchangeable[topology.mixing] = _exchangeable(topology)
        return cached
    if topology.everyone and topology.period == 1:  # W = J, which is zero on the disagreement space
        return _periodic(np.zeros((1, 1, 1, 1)))
    if topology.period is not None:
        return _periodic(_invariant_blocks(topology))
    return _sampled(_restricted([topology.mixing(t) for t in range(_DRAWS)]))


_of_exchangeable: WeakKeyDictionary[Callable[..., Mixing], _Analysis] = WeakKeyDictionary()
"""Keyed by the plan of a topology: each query needs the weights of all workers, possibly a million."""


def _exchangeable(topology: Topology) -> _Analysis:
    """`E[W] = a1 I` and `E[WᵀW] = a2 I` on the disagreement space, by exchangeability; both come from traces, which are
    the same for every draw.
    """
    n = topology.n
    a1, a2 = ((trace - 1.0) / (n - 1) for trace in _traces(topology))

    def analysis(recursion: Recursion) -> Stability:
        own, pull = recursion.own, np.outer(recursion.pulled, recursion.sent)
        # Of the second moments S of one worker's state: S -> E[(own + pull (W - I)) S (own + pull (W - I))ᵀ].
        step = np.kron(own, own) + (a1 - 1) * (np.kron(own, pull) + np.kron(pull, own))
        step += (1 - 2 * a1 + a2) * np.kron(pull, pull)
        result = Stability(math.sqrt(_spectral_radius(step)), math.inf, "closed form")
        if not result.stable:
            return result
        drift = np.kron(recursion.drift, recursion.drift)
        return result._replace(variance=float(np.linalg.solve(np.eye(len(step)) - step, step @ drift)[0]))

    return _Analysis(analysis)


def _traces(topology: Topology) -> tuple[float, float]:
    """Those of W and of WᵀW, which are the same for every draw of an exchangeable topology."""
    if (traces := _traces_of.get(topology.mixing)) is None:
        rows = topology.mixing(0).rows
        once = {id(row): row for row in rows}  # the members of a group have one row
        place = dict(zip(once, range(len(once)), strict=True))
        row_of = np.fromiter((place[id(row)] for row in rows), np.int64, len(rows))
        at = np.repeat(np.arange(len(once)), np.fromiter(map(len, once.values()), np.int64, len(once)))
        numbers = chain.from_iterable(chain.from_iterable(once.values()))
        entries = np.fromiter(numbers, float, 2 * len(at)).reshape(-1, 2)
        worker, weight = entries[:, 0].astype(np.int64), entries[:, 1]
        own = weight[row_of[worker] == at]
        traces = _total(own, np.ones_like(at[: len(own)])), _total(weight * weight, np.bincount(row_of)[at])
        _traces_of[topology.mixing] = traces
    return traces


_traces_of: WeakKeyDictionary[Callable[..., Mixing], tuple[float, float]] = WeakKeyDictionary()


def _total(numbers: Array, counts: NDArray[np.int64]) -> float:
    """The exact sum, rounded once as by `math.fsum`, of numbers with multiplicities: a million weights take few
    distinct values.
    """
    values, places = np.unique(numbers, return_inverse=True)
    times = np.zeros(len(values), np.int64)
    np.add.at(times, places, counts)
    return float(sum(Fraction(value) * count for value, count in zip(values.tolist(), times.tolist(), strict=True)))


def _restricted(mixings: Sequence[Mixing]) -> Array:
    """The mixing matrices on the disagreement space `[t, n-1, n-1]`, in one orthonormal basis of it."""
    n = mixings[0].n
    basis = np.linalg.qr(np.column_stack([np.ones(n), np.eye(n)[:, 1:]]))[0][:, 1:]
    return np.stack([basis.T @ matrix(mixing) @ basis for mixing in mixings])


def _invariant_blocks(topology: Topology) -> Array:
    """The disagreement space in invariant parts, `[parts, t, b, b]`: scalars where the mixings are all circulant, or
    symmetric and commute; else one part of size n - 1."""
    mixings = [topology.mixing(t) for t in range(topology.period or 0)]
    n = topology.n
    if _all_circulant(topology):
        return np.fft.fft(np.stack([*map(_first_row, mixings)]))[:, 1:].T[:, :, None, None]

    w = _restricted(mixings)
    if not topology.symmetric:
        return w[None]
    # The eigenvectors of a generic combination are common to all, if common ones exist.
    vectors = np.linalg.eigh(np.tensordot(np.random.default_rng(0).normal(size=len(w)), w, 1))[1]
    rotated = vectors.T @ w @ vectors
    values = np.diagonal(rotated, axis1=1, axis2=2)
    if np.abs(rotated - values[:, :, None] * np.eye(n - 1)).max() > 1e-10:
        return w[None]
    return values.T[:, :, None, None]


def _all_circulant(topology: Topology) -> bool:
    """Whether each mixing of a period is circulant; never for a random topology."""
    return topology.period is not None and all(_is_circulant(topology.mixing(t)) for t in range(topology.period))


def _is_circulant(mixing: Mixing) -> bool:
    first = mixing.rows[0]
    if mixing.everyone:  # no need to check a million entries for a thousand workers
        return len({w for _, w in first}) == 1
    return all(row == tuple(sorted(((j + i) % mixing.n, w) for j, w in first)) for i, row in enumerate(mixing.rows))


def _first_row(mixing: Mixing) -> Array:
    row = np.zeros(mixing.n)
    for j, w in mixing.rows[0]:
        row[j] = w
    return row


def _companion(recursion: Recursion, w: Array) -> Array:
    """One round `[..., k b, k b]` of the state of all workers for mixings `w` `[..., b, b]`."""
    own, pull, eye = recursion.own, np.outer(recursion.pulled, recursion.sent), np.eye(w.shape[-1])
    step = own[:, None, :, None] * eye[:, None, :] + pull[:, None, :, None] * (w - eye)[..., None, :, None, :]
    size = len(own) * len(eye)
    return step.reshape(*w.shape[:-2], size, size)


def _drifted(recursion: Recursion, b: int) -> Array:
    """The second moments `[k b, k b]` of one round's drift."""
    return np.kron(np.outer(recursion.drift, recursion.drift), np.eye(b))


def _periodic(parts: Array) -> _Analysis:
    """Products of companion matrices over a period, part by part; `parts` is `[parts, period, b, b]`."""
    _, period, b, _ = parts.shape

    def analysis(recursion: Recursion) -> Stability:
        steps = [_companion(recursion, parts[:, t]) for t in range(period)]
        product = reduce(lambda done, step: step @ done, steps)
        # Exact averaging leaves rounding errors, and the roots of those are not small.
        product = np.where(np.abs(product) < 1e-12, 0.0, product)
        result = Stability(_spectral_radius(product) ** (1 / period), math.inf, "companion")
        if not result.stable:
            return result

        drift = _drifted(recursion, b)
        s = np.zeros_like(product)
        for step in steps:
            s = _carried(step, s + drift)
        power = product  # s <- Σ_k power^k s (power^k)ᴴ, doubling the number of terms
        while 1e-16 < (peak := np.abs(power).max()) < 1e50:
            s = s + _carried(power, s)
            power = power @ power
        if peak > 1.0:  # so close to one that the eigenvalues do not decide
            return result
        total = 0.0
        for step in steps:
            s = _carried(step, s + drift)
            total += float(np.trace(s[:, :b, :b], axis1=1, axis2=2).real.mean()) / b
        return result._replace(variance=total / period)

    return _Analysis(analysis, period * max(_OF_A_ROUND, b**3.0 if b > 1 else 2e3 * len(parts)))


def _sampled(mixings: Array) -> _Analysis:
    """Power iteration of `S -> mean_t M_t S M_tᵀ` over drawn mixings `[draws, b, b]`, whose terms sum to the variance."""
    draws, b, _ = mixings.shape

    def analysis(recursion: Recursion) -> Stability:
        steps, drift = _companion(recursion, mixings), _drifted(recursion, b)

        def carried(s: Array) -> Array:
            return np.tensordot(steps @ s, steps, axes=([0, 2], [0, 2])) / draws

        # The dominant eigenvalue is real; adding one to all of them takes the others of its size away from the circle.
        s, before, growth = np.eye(len(drift)) / len(drift), 0.0, 1.0
        for _ in range(10_000):
            s = s + carried(s)
            before, growth = growth, float(np.trace(s))
            s = s / growth
            if abs(growth - before) < 1e-11:
                break
        square = max(growth - 1.0, 0.0)
        result = Stability(math.sqrt(square), math.inf, "second moment")
        if not result.stable:
            return result

        term, last, total = drift, 1.0, 0.0
        for _ in range(10_000):
            term = carried(term)
            last = float(np.trace(term[:b, :b])) / b
            total += last
            if float(np.trace(term)) < 1e-9 * b:
                break
        return result._replace(variance=total + last * square / (1.0 - square))

    return _Analysis(analysis, 100 * draws * b**3.0)


def _carried(step: Array, s: Array) -> Array:
    return step @ s @ step.conj().swapaxes(-1, -2)


def _spectral_radius(m: Array) -> float:
    return float(np.abs(np.linalg.eigvals(m)).max())
