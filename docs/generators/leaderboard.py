"""The leaderboard: methods at their tuned settings, at equal tokens, at equal bytes, and by the time to a loss that all reach."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from generators.claims import NOT_RUN
from generators.sources import RESULTS, ROOT
from gossamer.report.charts import drawing, plain_axes, svg
from gossamer.report.figures import spread
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines
from gossamer.run.config.document import load

__all__ = ["LEADERBOARD", "Standing", "drawn_standings", "leaderboard_page", "leaderboard_table", "standings"]

LEADERBOARD = "leaderboard_tuned"
"""The stem of its outcomes."""
_BUDGET = "gasloc"
_MEGA, _MINUTE = 1e6, 60


class Standing(NamedTuple):
    """What the runs of a method say; each list has an entry for each seed that all methods have."""

    method: str
    loss: list[float]
    """After all tokens."""
    sent_bytes: float
    at_bytes: list[float | None]
    """The last validated loss before more is sent than `gasloc` sends in a whole run; None without one."""
    seconds: dict[str, list[float | None]]
    """By network: until the loss that the worst method ends with; None where the network has no price."""


def standings(ended: Iterable[PointResult]) -> list[Standing]:
    """The methods, best first, over the seeds that all have ended with a finite loss."""
    runs: dict[str, dict[int, PointResult]] = {}
    for one in ended:
        if one.row["loss"] is not None and math.isfinite(one.row["loss"]):
            runs.setdefault(one.method, {})[one.seed] = one
    seeds = sorted(set.intersection(*(set(own) for own in runs.values()))) if runs else []
    if not seeds or _BUDGET not in runs:
        return []
    worst = {seed: max(own[seed].row["loss"] for own in runs.values()) for seed in seeds}
    networks = list(dict.fromkeys(name for own in runs.values() for name in own[seeds[0]].row["loss_at_s"]))
    found = [
        Standing(
            method, [own[seed].row["loss"] for seed in seeds], statistics.fmean(own[seed].row["sent_bytes"] for seed in seeds),
            [_last(own[seed].row["loss_at_bytes"], runs[_BUDGET][seed].row["sent_bytes"]) for seed in seeds],
            {name: [_first(own[seed].row["loss_at_s"].get(name, ()), worst[seed]) for seed in seeds] for name in networks},
        )
        for method, own in runs.items()
    ]  # fmt: skip
    return sorted(found, key=lambda one: statistics.fmean(one.loss))


def leaderboard_table(found: Sequence[Standing], asked: Sequence[str] = ()) -> str:
    """The standings as Markdown: means over the seeds, with the sample standard deviation of the losses.

    Args: `asked` are methods that shall have a row, whether they have been run or not.
    """
    networks = [*found[0].seconds] if found else []
    heads = [
        "method", "loss at equal tokens", "MB sent", f"loss at {_BUDGET}'s bytes",
        *(f"minutes to the worst's loss, {name}" for name in networks),
    ]  # fmt: skip
    rows = [
        [
            one.method, spread(one.loss), f"{one.sent_bytes / _MEGA:.1f}", spread(one.at_bytes),
            *(_mean(one.seconds[name]) for name in networks),
        ]
        for one in found
    ]  # fmt: skip
    missing = [name for name in asked if name not in {one.method for one in found}]
    rows += [[name, NOT_RUN, *[DASH] * (len(heads) - 2)] for name in missing]
    return markdown_lines([heads, ["---", *["---:"] * (len(heads) - 1)], *rows])


def leaderboard_page() -> str:
    """The table of the committed outcomes, with a row for each registered method."""
    outcomes = RESULTS / "evidence" / f"{LEADERBOARD}.jsonl"
    rows: list[dict[str, Any]] = load(ROOT / "experiments" / "evidence" / "leaderboard.toml")["variant"]
    asked = [row.get("label", row["method"]) for row in rows]
    return leaderboard_table(standings(read_results(outcomes)) if outcomes.exists() else [], asked)


def drawn_standings(found: Sequence[Standing]) -> bytes:
    """The standings as SVG: the loss of each method, best at the top, and its minutes to the worst's on each network."""
    from matplotlib.figure import Figure as Canvas

    networks, places = [*found[0].seconds], range(len(found))
    with drawing():
        canvas = Canvas(figsize=(8.0, 1.0 + 0.3 * len(found)), layout="constrained")
        losses, minutes = canvas.subplots(1, 2, sharey=True)
        means = [statistics.fmean(one.loss) for one in found]
        spreads = [statistics.stdev(one.loss) if len(one.loss) > 1 else 0.0 for one in found]
        losses.errorbar(means, places, xerr=spreads, fmt="o")
        losses.set_yticks(places, [one.method for one in found])
        losses.invert_yaxis()
        for marker, name in zip(itertools.cycle("os^Dv"), networks):
            known = [
                (statistics.fmean(some) / _MINUTE, place)
                for place, one in enumerate(found)
                if (some := [each for each in one.seconds[name] if each is not None]) and len(some) == len(one.loss)
            ]
            minutes.plot([x for x, _ in known], [y for _, y in known], marker, linestyle="none", label=name)
        minutes.set_xscale("log")
        minutes.legend()
        plain_axes(losses, "loss at equal tokens, nats per byte")
        plain_axes(minutes, "minutes to the loss of the worst")
        return svg(canvas)


def _last(curve: Sequence[tuple[float, float]], most: float) -> float | None:
    return next((loss for sent, loss in reversed(curve) if sent <= most), None)


def _first(curve: Sequence[tuple[float, float]], wanted: float) -> float | None:
    return next((seconds for seconds, loss in curve if loss <= wanted), None)


def _mean(seconds: Sequence[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    return DASH if len(known) < len(seconds) else f"{statistics.fmean(known) / _MINUTE:.1f}"
