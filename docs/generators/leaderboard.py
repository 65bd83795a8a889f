"""The leaderboard: methods at their tuned settings, at equal tokens, and what such a run sends and takes."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from generators.claims import NOT_RUN
from generators.sources import RESULTS, ROOT
from gossamer.report.figures import INK, chart_style, dashed_styles, mean_and_deviation, on_any_ground, plain_axes, svg
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import points
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.resolve import resolve
from gossamer.run.planning.check import counted
from gossamer.run.planning.plan import BYTES

LEADERBOARD = "leaderboard_tuned"
"""The stem of its outcomes."""
OVER_TIME_FILE = ROOT / "docs" / "pictures" / "slow_uplink.svg"
_MEGA, _MINUTE = 1e6, 60
_SLOW = "slow-uplink"
_OVER_TIME = {
    "data_parallel": ("data parallel, bf16", {"name": "bf16", "back": "bf16"}),
    "diloco": ("DiLoCo, 4 bits", {"name": "fp4", "back": "bf16"}),
    "muloco": ("DiLoCo with Muon, 4 bits", {"name": "fp4", "back": "bf16"}),
    "streaming_diloco": ("streaming DiLoCo, 4 bits", None),
    "sparseloco": ("SparseLoCo, 3 % of 2 bits", None),
    "gossip": ("gossip, one peer, 8 bits", {"name": "int8"}),
    "gasloc": ("GASLoC, one peer, 8 bits", {"name": "int8"}),
    "gasloc_2peer": ("GASLoC, two peers, 8 bits", {"name": "int8"}),
}
"""What is drawn over time, and the codec that it is priced with where it was trained with messages of fp32."""
_ROUNDS_PRICED = 16


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
    return markdown_lines([heads, ["---", *["---:"] * (len(heads) - 1)], *rows])


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


def drawn_over_time(ended: Iterable[PointResult]) -> bytes:
    """Mean validation loss over priced minutes beside one slow uplink, as SVG; only the end of a curve is annealed.

    Messages are compressed: the seconds of what was trained with fp32 are those that it takes with its codec.
    """
    from matplotlib.figure import Figure as Canvas

    runs: dict[str, list[Sequence[tuple[float, float]]]] = {}
    for one in ended:
        if one.row["loss"] is not None and _SLOW in one.row["loss_at_s"]:
            runs.setdefault(one.method, []).append(one.row["loss_at_s"][_SLOW])
    with chart_style():
        canvas = Canvas(figsize=(7.5, 4.2), layout="constrained")
        axes = canvas.subplots()
        ends = list[tuple[float, float, str, str]]()
        styles = dashed_styles(_OVER_TIME)
        for method, (label, codec) in _OVER_TIME.items():
            if method not in runs:
                continue
            curves, share = runs[method], share_of_seconds(method, codec)
            drawn = [
                (share * statistics.fmean(s for s, _ in some) / _MINUTE, statistics.fmean(loss for _, loss in some))
                for some in zip(*curves, strict=True)
            ]
            colour, line = styles[method]
            axes.plot(*zip(*drawn, strict=True), color=colour, linestyle=line, linewidth=1.4)
            axes.plot(*drawn[-1], marker="o", markersize=5, color=colour)
            ends.append((*drawn[-1], label, colour))
        axes.set_xscale("log")
        axes.set_ylim(1.4, 2.6)
        axes.set_ylabel("validation loss, nats per byte", color=INK)
        heights = apart([loss for _, loss, _, _ in ends], 0.045)
        for (minutes, loss, label, colour), height in zip(ends, heights, strict=True):
            axes.annotate(
                label,
                (minutes, loss),
                (1.02, height),
                textcoords=axes.get_yaxis_transform(),
                va="center",
                fontsize=8,
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5},
            )
        plain_axes(axes, "priced minutes, one uplink of eight at a tenth")
        return on_any_ground(svg(canvas))


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights of labels, each moved up from the one below it until they do not overlap."""
    found, below = dict[int, float](), -math.inf
    for place in sorted(range(len(heights)), key=heights.__getitem__):
        found[place] = below = max(heights[place], below + least)
    return [found[place] for place in range(len(heights))]


def share_of_seconds(method: str, codec: Mapping[str, str] | None) -> float:
    """The share of its seconds beside one slow uplink that a method takes with a codec."""
    if codec is None:
        return 1.0
    document = load_document(ROOT / "experiments" / "evidence" / f"{LEADERBOARD}.toml")
    (row,) = (one for one in document["variant"] if one["label"] == method)
    seconds = list[float]()
    for variant in (row, {**row, "codec": dict(codec)}):
        run = resolve(points({**document, "variant": [variant]}, seeds=[0])[0].config)
        priced = counted(run, layout_for(run.model, BYTES), _ROUNDS_PRICED).networks
        seconds.append(next(one.round_s for one in priced if one.name == _SLOW) or math.nan)
    return seconds[1] / seconds[0]


def _mean_minutes(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return None if len(known) < len(seconds) else statistics.fmean(known) / _MINUTE
