"""The rules by which outcomes decide a claim, fixed before the outcomes they decide."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from generators.gains import MARGIN
from gossamer.report.paired import effect, holm, p_value_text, trend

_LEVEL = 0.05
_ALIKE = 0.5
"""Spearman's ρ that two rankings must surely exceed to count as alike."""
_FEW = 3


class Arm(NamedTuple):
    """One comparison of a claim."""

    name: str
    pairs: Sequence[tuple[float, float]]
    """Of each seed the loss of the method that the claim praises minus the other's, and the other's."""


class Found(NamedTuple):
    """What outcomes say of a claim."""

    effect: str
    verdict: str
    """holds, holds in part, fails, open, not testable here, or not run yet."""


def leads(arms: Sequence[Arm]) -> Found:
    """Whether the praised method leads: the 95 % interval of the difference is below 0, after Holm's correction over the arms.

    It holds if it leads in each arm, in part if in some, fails if every arm is decided and none for it, and is open otherwise.
    """
    apart = _apart(arms)
    below = [p is not None and p < _LEVEL and _mean(arm) < 0 for arm, p in zip(arms, apart, strict=True)]
    decided = [(p is not None and p < _LEVEL) or _equivalent(arm) for arm, p in zip(arms, apart, strict=True)]
    return _found(arms, below, [not led and known for led, known in zip(below, decided, strict=True)])


def equal(arms: Sequence[Arm]) -> Found:
    """Whether the two are equivalent: the 90 % interval of the difference lies within the margin of all stages.

    It holds if they are so in each arm, in part if in some, fails if they surely differ in all, and is open otherwise.
    """
    alike = [_equivalent(arm) for arm in arms]
    apart = [p is not None and p < _LEVEL and not same for p, same in zip(_apart(arms), alike, strict=True)]
    return _found(arms, alike, apart)


def matches(arms: Sequence[Arm]) -> Found:
    """Whether the praised method leads or is equivalent, by the same rules, in each arm; it fails where all surely trail."""
    apart, alike = _apart(arms), [_equivalent(arm) for arm in arms]
    sure = [p is not None and p < _LEVEL for p in apart]
    reached = [same or (known and _mean(arm) < 0) for arm, known, same in zip(arms, sure, alike, strict=True)]
    return _found(arms, reached, [known and not own for known, own in zip(sure, reached, strict=True)])


def costs_little(arms: Sequence[Arm], percent: float) -> Found:
    """Whether the praised method costs less than so many per cent of the other's loss, by the 95 % interval of each arm."""
    effects = [effect(arm.pairs) for arm in arms]
    ends = [
        (one.percent - 100 * half / loss, one.percent + 100 * half / loss)
        if (half := one.half) is not None and one.percent is not None
        else (-float("inf"), float("inf"))
        for one, arm in zip(effects, arms, strict=True)
        for loss in [statistics.fmean(loss for _, loss in arm.pairs)]
    ]
    return _found(arms, [high < percent for _, high in ends], [low > percent for low, _ in ends])


def rises(rows: Mapping[str, Sequence[Sequence[float]]]) -> Found:
    """Whether values rise along a sweep by Page's test, after Holm's correction; of each name a row for each seed."""
    up, down = (holm([trend(own, slope) for own in rows.values()]) for slope in ("rising", "falling"))
    said = ", ".join(f"{name}: p {_is(p)}" for name, p in zip(rows, up, strict=True))
    sure = [[p is not None and p < _LEVEL for p in some] for some in (up, down)]
    return Found(said, _verdict(*sure))


def ranked_alike(ours: Sequence[float], theirs: Sequence[float]) -> Found:
    """Whether two methods rank the same settings alike: the 95 % interval of Spearman's ρ (Fisher's z) lies above 0.5.

    It fails where the interval lies below. No threshold was registered; this is that of the expectation for stage 7.
    """
    from scipy.stats import spearmanr

    rho, n = float(cast(Any, spearmanr(ours, theirs)).statistic), len(ours)
    if n < 5 or not math.isfinite(rho):
        return Found(f"ρ = {rho:.2f} over {n} settings", "open")
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (n - 3))  # the variance of z for ranks: Bonett and Wright 2000
    bounded = max(-1 + 1e-9, min(1 - 1e-9, rho))
    low, high = math.tanh(math.atanh(bounded) - half), math.tanh(math.atanh(bounded) + half)
    return Found(f"ρ = {rho:.2f} [{low:.2f}, {high:.2f}] over {n} settings", _verdict([low > _ALIKE], [high < _ALIKE]))


def stays(growth: Mapping[str, Sequence[float]], factor: float) -> Found:
    """Whether a quantity grows by less than this factor, by the 95 % interval of its mean logarithm over the seeds.

    It holds if it is so under each name, in part if under some, and fails if it surely grows by more under all, as what ends
    infinite does.
    """
    said, ends = list[str](), list[tuple[float, float]]()
    for name, seeds in growth.items():
        if not all(map(math.isfinite, seeds)):
            said.append(f"{name}: without bound")
            ends.append((math.inf, math.inf))
            continue
        found = effect([(math.log(one), 1.0) for one in seeds])
        half = math.inf if found.half is None else found.half
        said.append(f"{name}: × {math.exp(found.mean):.2f}")
        ends.append((found.mean - half, found.mean + half))
    bound = math.log(factor)
    return Found(", ".join(said), _verdict([high < bound for _, high in ends], [low > bound for low, _ in ends]))


def _verdict(fulfilled: Sequence[bool], refuted: Sequence[bool]) -> str:
    if all(fulfilled):
        return "holds"
    return "holds in part" if any(fulfilled) else "fails" if all(refuted) else "open"


def _is(p: float | None) -> str:
    said = p_value_text(p)
    return said if said.startswith("<") else f"= {said}"


def _apart(arms: Sequence[Arm]) -> list[float | None]:
    return holm([effect(arm.pairs).apart for arm in arms])


def _equivalent(arm: Arm) -> bool:
    p = effect(arm.pairs, margin=MARGIN).equivalent
    return p is not None and p < _LEVEL


def _mean(arm: Arm) -> float:
    return statistics.fmean(difference for difference, _ in arm.pairs)


def _found(arms: Sequence[Arm], fulfilled: Sequence[bool], refuted: Sequence[bool]) -> Found:
    """Few arms are listed; of many, how many there are for the claim and against it."""
    if len(arms) > _FEW:
        means = sorted(_mean(arm) for arm in arms)
        open_ = len(arms) - sum(fulfilled) - sum(refuted)
        said = (
            f"{len(arms)} arms: {sum(fulfilled)} for it, {sum(refuted)} against it, {open_} open; means from {means[0]:+.3f} to "
            f"{means[-1]:+.3f}"
        )
    else:
        said = "; ".join(
            f"{arm.name} {one.mean:+.4f}"
            + ("" if one.half is None else f" ± {one.half:.4f}")
            + f" ({len(arm.pairs)} seeds)"
            for arm in arms
            for one in [effect(arm.pairs)]
        )
    return Found(said, _verdict(fulfilled, refuted))
