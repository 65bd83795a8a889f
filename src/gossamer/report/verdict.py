"""The first sentence of a report: conclusions supported by the runs."""

import math
import statistics
from collections.abc import Mapping, Sequence, Set
from typing import Any

from gossamer.report.paired import effect
from gossamer.report.reach import at_equal_time
from gossamer.report.results import PointResult
from gossamer.report.table import method_and_seed, number_text, seconds_text

_UNSEARCHED = "At these settings, for which this comparison did not search."
"""Said of each comparison: other settings of the same two methods may rank them the other way round."""


def _nats(loss: float) -> str:
    return number_text(loss, ".4f")


def verdict(rows: Sequence[Mapping[str, Any]], *, running: bool = False) -> str:
    """The conclusion from the last losses of runs: paired differences between methods and their 95 % interval.

    Only methods with two or more seeds in common are compared. With many methods, the two with the lowest means are
    compared, and the sentence states the post-hoc selection.

    Args: `running` is whether some have not ended, so that no claim is made.

    >>> rows = [{"method": f"{m} seed={s}", "loss": x + 0.01 * s} for m, x in (("a", 2.0), ("b", 2.1)) for s in range(3)]
    >>> verdict(rows)  # doctest: +ELLIPSIS
    'a ended with a lower validation loss than b: 2.0100 against 2.1100, by 0.1000 (95 % interval 0.1000 to 0.1000, 3 seeds)...'
    >>> verdict(rows[::3])
    'a ended at 2.0000 and b at 2.1000: one seed each, so this says nothing about which is better.'
    """
    losses: dict[str, dict[str, float]] = {}
    lost = set[str]()  # methods of which a seed diverged
    for row in rows:
        method, seed = method_and_seed(row["method"])
        if row["loss"] is not None and math.isfinite(row["loss"]):
            losses.setdefault(method, {})[seed] = row["loss"]
        elif row["loss"] is not None:
            lost.add(method)
    if not losses:
        return "No run has a validation loss yet." if running else _none(rows)
    ordered = sorted(losses, key=lambda method: statistics.fmean(losses[method].values()))
    if running:
        lowest = f"{ordered[0]} at {_nats(statistics.fmean(losses[ordered[0]].values()))}"
        return f"Not all of these runs have ended; lowest validation loss so far: {lowest}. Nothing is claimed before the end."
    besides = _about_excluded(rows, losses, lost)
    # The mean of the seeds that did not diverge would be too low.
    ordered = [method for method in ordered if method not in lost]
    if not ordered:
        besides = _about_excluded(rows, losses, lost - losses.keys())
        return f"No method ended with a finite validation loss with all of its seeds.{besides}"
    if len(ordered) == 1:
        return f"{_alone(ordered[0], [*losses[ordered[0]].values()])}.{besides}"
    ranked = [row for row in rows if method_and_seed(row["method"])[0] in ordered]
    besides = f"{_sooner(ranked, ordered[0])}{besides}"
    first, second = ordered[:2]
    shared = sorted(losses[first].keys() & losses[second].keys())
    if len(shared) < 2:
        at, other = (_nats(statistics.fmean(losses[method].values())) for method in (first, second))
        both = f"{first} ended at {at} and {second} at {other}"
        why = "one seed each, so this says nothing about which is better"
        if max(len(losses[method]) for method in (first, second)) > 1:
            why = "they have no two seeds in common, so this says nothing about which is better"
        return f"{both}: {why}.{besides}"
    return _compared(first, second, losses, shared) + _picked(len(ordered)) + besides


def ahead_at_equal_time(results: Sequence[PointResult], leader: str, where: str = "") -> str:
    """Which method is ahead when the first of them ends, as the lowest last loss is no answer where it takes longer.

    Empty where the leader by last losses ends first itself, or where no network has a clock for all methods.

    Args: `where` names the network in place of its name.
    """
    then = at_equal_time(results)
    if then is None or then.first == leader:
        return ""
    ends = (
        f"{then.first} ends first {where or f'on {then.network}'}, after {seconds_text(then.end_s)} at {then.loss:.3f}"
    )
    by_then, ahead = then.by_then(leader), then.ahead
    has = f"{leader} has no validation by then"
    if by_then is not None:
        has = f"the last validation of {leader} by then is {by_then:.3f}"
    if ahead not in (leader, then.first):
        has = f"{has}, and that of {ahead} {then.by_then(ahead):.3f}"
    against = then.others.get(leader if ahead == then.first else ahead)
    if against is not None and against.half is not None and abs(against.mean) <= against.half:
        return f"{ends}; {has}: at equal time no difference is shown."
    with_seed = " with this seed" if against is not None and against.half is None else ""
    return f"{ends}; {has}: at equal time {ahead} is ahead{with_seed}."


def _sooner(rows: Sequence[Mapping[str, Any]], leader: str) -> str:
    """That sentence about the rows of a table."""
    named = [(*method_and_seed(row["method"]), row) for row in rows]
    said = ahead_at_equal_time([PointResult(method, {}, int(seed or 0), row) for method, seed, row in named], leader)
    return f" {said}" if said else ""


def _none(rows: Sequence[Mapping[str, Any]]) -> str:
    """The sentence if no ended run has a finite loss."""
    if any(row["loss"] is not None for row in rows):
        return "No run ended with a finite validation loss."
    return "No run has a validation of its mean model; gossamer evaluate makes that of a real one."


def _about_excluded(rows: Sequence[Mapping[str, Any]], losses: Mapping[str, Any], lost: Set[str]) -> str:
    """Sentences about methods that diverged, with all seeds or with some, and about methods without a score."""
    diverged, partly = lost - losses.keys(), lost & losses.keys()
    unscored = {method_and_seed(row["method"])[0] for row in rows} - losses.keys() - lost
    have = "have" if len(unscored) > 1 else "has"
    sentences = [
        (diverged, "ended without a finite loss"),
        (partly, "ended without a finite loss with some of their seeds, and cannot lead"),
        (unscored, f"{have} no validation of the mean model"),
    ]
    return "".join(f" {len(some)} more {words}." for some, words in sentences if some)


def _compared(first: str, second: str, losses: Mapping[str, Mapping[str, float]], shared: Sequence[str]) -> str:
    # The means that ranked them may be of more seeds than those that both have.
    means = {method: statistics.fmean(losses[method][seed] for seed in shared) for method in (first, second)}
    first, second = sorted((first, second), key=lambda method: means[method])
    difference = effect([(losses[second][seed] - losses[first][seed], losses[first][seed]) for seed in shared])
    mean, half = difference.mean, difference.half or 0.0
    interval = f"(95 % interval {_nats(mean - half)} to {_nats(mean + half)}, {len(shared)} seeds)"
    if mean - half > 0:
        against = f"{_nats(means[first])} against {_nats(means[second])}"
        ended = f"{first} ended with a lower validation loss than {second}: {against}"
        return f"{ended}, by {_nats(mean)} {interval}. {_UNSEARCHED}"
    both = f"{first} ({_nats(means[first])}) and {second} ({_nats(means[second])})"
    return f"No difference is shown between {both}: {_nats(mean)} apart {interval}. {_UNSEARCHED}"


def _picked(methods: int) -> str:
    if methods == 2:
        return ""
    return f" These have the lowest means of {methods} methods; to pick them after the fact favours the first."


def _alone(method: str, of_seeds: Sequence[float]) -> str:
    """The loss of the only method."""
    ended = f"{method} ended with a validation loss of {_nats(statistics.fmean(of_seeds))}"
    if len(of_seeds) == 1:
        return ended
    return f"{ended}, the mean of {len(of_seeds)} seeds from {_nats(min(of_seeds))} to {_nats(max(of_seeds))}"
