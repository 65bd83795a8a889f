"""The leaderboard: methods at their tuned settings, at equal tokens, and what such a run sends and takes."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from generators.claims import NOT_RUN
from generators.sources import RESULTS, ROOT
from gossamer.report.figures import chart_style, mean_and_deviation, plain_axes, svg
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_numbers
from gossamer.run.config.document import load_document

LEADERBOARD = "leaderboard_tuned"
"""The stem of its outcomes."""
_MEGA, _MINUTE = 1e6, 60


class Standing(NamedTuple):
    """What the runs of a method say; each list has an entry for each seed that all methods have."""

    method: str
    loss: list[float]
    """After all tokens."""
    sent_bytes: float
    minutes: dict[str, float | None]
    """By network: of the whole run; None where the network has no price."""


def standings(ended: Iterable[PointResult]) -> list[Standing]:
    """The methods, best first, over the seeds that all have ended with a finite loss."""
    runs: dict[str, dict[int, PointResult]] = {}
    for one in ended:
        if one.row["loss"] is not None and math.isfinite(one.row["loss"]):
            runs.setdefault(one.method, {})[one.seed] = one
    seeds = sorted(set.intersection(*(set(own) for own in runs.values()))) if runs else []
    if not seeds:
        return []
    networks = list(dict.fromkeys(name for own in runs.values() for name in own[seeds[0]].row["wall_s"]))
    found = [
        Standing(
            method,
            [own[seed].row["loss"] for seed in seeds],
            statistics.fmean(own[seed].row["sent_bytes"] for seed in seeds),
            {name: _mean_minutes([own[seed].row["wall_s"].get(name) for seed in seeds]) for name in networks},
        )
        for method, own in runs.items()
    ]
    return sorted(found, key=lambda one: statistics.fmean(one.loss))


def leaderboard_table(found: Sequence[Standing], asked: Sequence[str] = ()) -> str:
    """The standings as Markdown: means over the seeds, with the sample standard deviation of the losses.

    Args: `asked` are methods that shall have a row, whether they have been run or not.
    """
    networks = [*found[0].minutes] if found else []
    heads = ["method", "loss at equal tokens", "MB sent", *(f"minutes, {name}" for name in networks)]
    rows = [
        [
            one.method,
            mean_and_deviation(one.loss),
            f"{one.sent_bytes / _MEGA:.1f}",
            *(DASH if (minutes := one.minutes[name]) is None else f"{minutes:.1f}" for name in networks),
        ]
        for one in found
    ]
    missing = [name for name in asked if name not in {one.method for one in found}]
    rows += [[name, NOT_RUN, *[DASH] * (len(heads) - 2)] for name in missing]
    return markdown_numbers(heads, rows)


def committed_standings(stem: str) -> list[Standing]:
    """The standings of the committed outcomes of an experiment; none where it has none."""
    outcomes = RESULTS / "evidence" / f"{stem}.jsonl"
    return standings(read_results(outcomes)) if outcomes.exists() else []


def leaderboard_page() -> str:
    """The table of the committed outcomes, with a row for each registered method."""
    rows: list[dict[str, Any]] = load_document(ROOT / "experiments" / "evidence" / "leaderboard.toml")["variant"]
    asked = [row.get("label", row["method"]) for row in rows]
    return leaderboard_table(committed_standings(LEADERBOARD), asked)


def drawn_standings(found: Sequence[Standing]) -> bytes:
    """The standings as SVG: the loss of each method, best at the top, and the minutes of its run on each network."""
    from matplotlib.figure import Figure as Canvas

    networks, places = [*found[0].minutes], range(len(found))
    with chart_style():
        canvas = Canvas(figsize=(8.0, 1.0 + 0.3 * len(found)), layout="constrained")
        losses, minutes = canvas.subplots(1, 2, sharey=True)
        means = [statistics.fmean(one.loss) for one in found]
        spreads = [statistics.stdev(one.loss) if len(one.loss) > 1 else 0.0 for one in found]
        losses.errorbar(means, places, xerr=spreads, fmt="o")
        losses.set_yticks(places, [one.method for one in found])
        losses.invert_yaxis()
        for marker, name in zip(itertools.cycle("os^Dv"), networks):
            known = [(one.minutes[name], place) for place, one in enumerate(found) if one.minutes[name] is not None]
            minutes.plot([x for x, _ in known], [y for _, y in known], marker, linestyle="none", label=name)
        minutes.set_xscale("log")
        minutes.legend()
        plain_axes(losses, "loss at equal tokens, nats per byte")
        plain_axes(minutes, "minutes of the run")
        return svg(canvas)


def _mean_minutes(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return None if len(known) < len(seconds) else statistics.fmean(known) / _MINUTE
