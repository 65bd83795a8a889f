"""Paired statistics of runs over seeds: the effect with its interval, and pre-specified tests."""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from gossamer.errors import require
from gossamer.report.table import DASH

Side = Literal["below", "above"]
Slope = Literal["rising", "falling"]
_LEVEL = 0.05  # of every test


class Effect(NamedTuple):
    """Differences from a target, seed by seed."""

    differences: tuple[float, ...]
    mean: float
    half: float | None
    """Half the width of the 95 % interval of the mean; None for less than two seeds, like the tests."""
    percent: float | None
    """The mean, in per cent of the target's mean loss."""
    one_sided: float | None
    """p-value of the test that the mean is not on the pre-specified side."""
    equivalent: float | None
    """p-value of the test that the mean is outside of the margin: the larger of two one-sided tests."""
    apart: float | None
    """Two-sided p-value of the test that the mean is 0."""


def effect(pairs: Sequence[tuple[float, float]], *, margin: float | None = None, side: Side | None = None) -> Effect:
    """The effect from pairs of a difference and the target's loss, one per seed.

    With n differences of mean d and sample standard deviation s, T = (d - bound) √n / s has Student's t distribution with n - 1
    degrees of freedom at the edge of the hypothesis: that d is 0 or on the other side, or beyond ± margin.

    Args: `margin` is in nats.
    Source: equivalence by two one-sided tests, Schuirmann 1987.
    Fails when: the differences are far from normal, or the margin was chosen after they were seen.

    >>> result = effect([(-0.02, 2.0), (-0.03, 2.0), (-0.01, 2.0)], margin=0.05, side="below")
    >>> [round(number, 4) for number in result[1:]]
    [-0.02, 0.0248, -1.0, 0.0371, 0.0175, 0.0742]
    """
    differences, n = tuple(difference for difference, _ in pairs), len(pairs)
    mean, loss = statistics.fmean(differences), statistics.fmean(loss for _, loss in pairs)
    percent = 100 * mean / loss if loss else None
    if n < 2:
        return Effect(differences, mean, None, percent, None, None, None)
    error = statistics.stdev(differences) / math.sqrt(n)

    def below(bound: float) -> float:
        """p-value for a mean below the bound."""
        if error == 0:
            return float(mean >= bound)
        t = (mean - bound) / error
        return (1 + math.copysign(t_within(t, n - 1), t)) / 2

    def above(bound: float) -> float:
        return float(mean <= bound) if error == 0 else 1 - below(bound)

    return Effect(
        differences,
        mean,
        _quantile(1 - _LEVEL, n - 1) * error,
        percent,
        None if side is None else below(0.0) if side == "below" else above(0.0),
        None if margin is None else max(below(margin), above(-margin)),
        min(1.0, 2 * min(below(0.0), above(0.0))),
    )


def t_within(t: float, nu: int) -> float:
    """The probability that Student's t with ν degrees of freedom lies within ± t; ν is a whole number from 1 on.

    With θ = atan(|t| / √ν):   sin θ (1 + 1/2 cos²θ + 1·3/(2·4) cos⁴θ + …)   for even ν,
    2/π (θ + sin θ (cos θ + 2/3 cos³θ + 2·4/(3·5) cos⁵θ + …))   for odd ν, up to cos^(ν-2) θ.

    Source: Abramowitz and Stegun 26.7.3, 26.7.4.

    >>> round(t_within(2.776, 4), 4), round(t_within(12.706, 1), 4)
    (0.95, 0.95)
    """
    theta = math.atan(abs(t) / math.sqrt(nu))
    term = total = 0.0
    for power in range(nu % 2, nu - 1, 2):
        term = term * (power - 1) / power * math.cos(theta) ** 2 if power > 1 else math.cos(theta) ** power
        total += term
    within = math.sin(theta) * total
    return 2 / math.pi * (theta + within) if nu % 2 else within


@functools.cache
def _quantile(within: float, nu: int) -> float:
    """The t within ± which Student's t lies with this probability, by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, nu) < within:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, nu) < within else (low, middle)
    return high


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values of several tests, adjusted so that the chance of any false rejection among them stays at its level.

    The k-th smallest of m (from 0) becomes max over those up to it of min(1, (m - k) p). None is skipped.

    Source: Holm 1979.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    ranked = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for k, (p, place) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - k) * p))
        adjusted[place] = largest
    return adjusted


class Standing(NamedTuple):
    """The standing of several arms with the same seeds relative to the one with the lowest mean loss."""

    best: str
    above: Mapping[str, Effect]
    """Of every other arm: its loss above that of the best, seed by seed."""
    alike: tuple[str, ...]
    """Arms not distinguishable from the best, at 5 % after Holm's correction; all others, with one seed."""

    @property
    def decided(self) -> bool:
        """Whether all other arms are distinguishable from the best."""
        return not self.alike

    def may_be_best(self, arm: str) -> bool:
        """Whether an arm is the best, or not distinguishable from it."""
        return arm == self.best or arm in self.alike


def standing(losses: Mapping[str, Sequence[float]]) -> Standing:
    """The arm with the lowest mean loss, and those not distinguishable from it.

    Args: `losses` are those of the same seeds in each arm, at least one; infinite or NaN for a run that diverged, whose arm is
        never the best unless all have diverged, and never alike.
    Fails when: many arms are tried, as the best of many is partly the luckiest; Holm's correction makes no allowance for that.

    >>> result = standing({"a": [1.0, 1.1, 1.0], "b": [1.2, 1.31, 1.2], "c": [1.01, 1.1, 0.99]})
    >>> result.best, result.alike, round(result.above["b"].mean, 3)
    ('a', ('c',), 0.203)
    """
    means = {arm: mean if math.isfinite(mean := statistics.fmean(some)) else math.inf for arm, some in losses.items()}
    best = min(means, key=means.__getitem__)
    sound = [arm for arm in losses if arm != best and math.isfinite(means[arm])]
    above = {
        arm: effect([(one - least, least) for one, least in zip(losses[arm], losses[best], strict=True)])
        for arm in sound
    }
    adjusted = dict(zip(sound, holm([above[arm].apart for arm in sound]), strict=True))
    alike = tuple(arm for arm in sound if (p := adjusted[arm]) is None or p >= _LEVEL)
    return Standing(best, above, alike)


def trend(rows: Sequence[Sequence[float]], slope: Slope) -> float | None:
    """p-value of Page's test that values have no trend along a sweep, with a row per seed; None for too few.

    It takes two seeds and three points at least.

    Raises: MissingPackageError without scipy.
    Source: Page 1963; exact for small samples.
    Fails when: neighbouring points share more than the seed, such as one trunk.

    >>> round(trend([[1.0, 2.0, 3.0], [1.1, 2.2, 2.1], [0.9, 1.0, 1.5]], "rising"), 3)
    0.032
    """
    stats = require("scipy.stats", "plots", "a test of trend")
    if len(rows) < 2 or len(rows[0]) < 3:
        return None
    ordered = [[*row] if slope == "rising" else [*reversed(row)] for row in rows]
    return float(stats.page_trend_test(ordered).pvalue)


def effect_heads(margin: float | None, side: Side | None) -> list[str]:
    """The headings of `effect_cells`."""
    heads = ["each seed", "mean, 95 % interval", "in %"]
    heads += [] if side is None else [f"p ({side}, Holm)"]
    return heads + ([] if margin is None else [f"p (within ±{margin:g})", "verdict"])


def effect_cells(
    arms: Sequence[Sequence[tuple[float, float] | None]], margin: float | None, side: Side | None
) -> list[list[str]]:
    """A line of cells for each arm, from its pairs of each seed as `effect` takes them; None for a seed without a difference.

    With a margin the last cell is a verdict, at 5 %: "lower" or "higher" if the mean differs from 0 after Holm's correction over
    the arms, "equivalent" if it is surely within the margin, "open" if neither.
    """
    effects = [
        effect(known, margin=margin, side=side) if (known := [pair for pair in arm if pair is not None]) else None
        for arm in arms
    ]
    adjusted = holm([None if one is None else one.one_sided for one in effects])
    apart = holm([None if one is None else one.apart for one in effects])
    lines = []
    for arm, one, p, p_apart in zip(arms, effects, adjusted, apart, strict=True):
        cells = [", ".join(DASH if pair is None else f"{pair[0]:+.4f}" for pair in arm)]
        if one is None:
            cells += [DASH, DASH]
        else:
            cells += [f"{one.mean:+.4f}" + ("" if one.half is None else f" ± {one.half:.4f}")]
            cells += [DASH if one.percent is None else f"{one.percent:+.2f}"]
        cells += [] if side is None else [p_value_text(p)]
        known = sum(pair is not None for pair in arm)
        # Those that are missing may have diverged.
        few = f" ({known} of {len(arm)} seeds)" if 0 < known < len(arm) else ""
        verdict = _verdict(one, p_apart) + few
        cells += [] if margin is None else [p_value_text(None if one is None else one.equivalent), verdict]
        lines.append(cells)
    return lines


def _verdict(effect: Effect | None, p_apart: float | None) -> str:
    if effect is None or effect.equivalent is None or p_apart is None:
        return DASH
    words = ["lower" if effect.mean < 0 else "higher"] if p_apart < _LEVEL else []
    return ", ".join(words + ["equivalent"] * (effect.equivalent < _LEVEL)) or "open"


def p_value_text(p: float | None) -> str:
    """A p-value as text for a table.

    >>> p_value_text(0.0321), p_value_text(1e-6), p_value_text(None)
    ('0.032', '< 0.001', '–')
    """
    return DASH if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"
