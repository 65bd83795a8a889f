"""Pictures of many runs, whose curves would hide each other in one chart: a ranking, and a small chart for each run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gossamer.report.charts import FAINT, INK
from gossamer.report.reading.runs import Curve
from gossamer.report.table import number_text

__all__ = ["ranking", "small_charts"]

_BAND, _OWN = "#e7e7e3", "#1f6f9f"


def ranking(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A figure with a line for each row of `summary_rows`, in their order: loss, worst worker, and bytes sent.

    Losses far behind the best half are drawn at the edge, with their number.
    """
    from matplotlib.figure import Figure

    losses = [row["loss"] for row in rows if row["loss"] is not None and math.isfinite(row["loss"])]
    best, middle = min(losses, default=0.0), float(np.median(losses or [1.0]))
    far = best + 4 * max(middle - best, 1e-3)
    figure = Figure(figsize=(9.2, 0.9 + 0.2 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, row in enumerate(rows):
        loss, worst = _edge(row["loss"], far), _edge(row["worst_loss"], far)
        left.plot([loss, max(loss, worst)], [place, place], color=FAINT, linewidth=2.5, solid_capstyle="round")
        left.plot(loss, place, "o", color=_OWN, markersize=4.5)
        left.annotate(
            number_text(row["loss"], ".4f"), (1.0, place), xycoords=("axes fraction", "data"), xytext=(3, 0),
            textcoords="offset points", va="center", fontsize=7, color=INK,
        )  # fmt: skip
        if row["sent_bytes"]:
            right.plot(row["sent_bytes"], place, "o", color=_OWN, markersize=4.5)
    left.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=7.5)
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.set_xlim(best - 0.04 * (far - best), far)
    left.set_xlabel("validation loss of the mean model; bar to the worst worker")
    right.set_xlabel("sent per worker (bytes)")
    if any(row["sent_bytes"] for row in rows):
        right.set_xscale("log")
    for axes in (left, right):
        axes.grid(color=FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=INK, labelsize=7.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure


def small_charts(
    labels: Sequence[str], curves: Sequence[Curve], x_label: str, *, log: bool = False, columns: int = 8
) -> Any:
    """A figure with a small chart for each curve on equal axes, each with the middle half of all curves and the best one."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    drawn = [(label, xs, ys) for label, (xs, ys) in zip(labels, curves, strict=True) if xs]
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(1.35 * columns, 0.4 + 1.15 * lines))
    figure.subplots_adjust(
        left=0.025, right=0.995, bottom=0.42 / (0.4 + 1.15 * lines), top=0.985 - 0.1 / lines, wspace=0.12, hspace=0.3
    )
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    at, low, high = _middle_half([(xs, ys) for _, xs, ys in drawn])
    finite_ends = [(ys[-1], k) for k, (_, _, ys) in enumerate(drawn) if math.isfinite(ys[-1])]
    lowest = min(finite_ends, default=(0.0, 0))[1]
    for axes, (label, xs, ys) in zip(panels, drawn, strict=False):
        axes.fill_between(at, low, high, color=_BAND, linewidth=0)
        axes.plot(*drawn[lowest][1:], color=INK, linewidth=0.6)
        axes.plot(xs, ys, color=_OWN, linewidth=1.4)
        axes.set_title(label, fontsize=6.5, pad=2, color=INK)
        axes.tick_params(length=0, labelsize=6, colors=INK)
        axes.grid(color=FAINT, linewidth=0.4)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.locator_params(axis="x", nbins=3)
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    values = np.array([y for _, _, ys in drawn for y in ys[len(ys) // 4 :] if math.isfinite(y)] or [0.0, 1.0])
    if log and (values > 0).any():
        panels[0].set_yscale("log", nonpositive="mask")
    else:
        # A run that diverged would flatten all others into one line at the bottom.
        bottom, top = (
            values.min(),
            min(values.max(), np.quantile(values, 0.9) + 2 * np.ptp(np.quantile(values, (0.1, 0.9)))),
        )
        panels[0].set_ylim(bottom - 0.05 * (top - bottom or 1.0), top + 0.05 * (top - bottom or 1.0))
    figure.supxlabel(x_label, fontsize=7.5, color=INK)
    return figure


def _edge(value: float | None, far: float) -> float:
    return far if value is None or not math.isfinite(value) else min(value, far)


def _middle_half(curves: Sequence[Curve]) -> tuple[Any, Any, Any]:
    """The middle half of all curves, at the points of the curve that has most."""
    at = np.array(max((xs for xs, _ in curves), key=len, default=[0.0]))
    heights = np.array([np.interp(at, xs, ys, left=np.nan, right=np.nan) for xs, ys in curves])
    known = np.isfinite(heights).any(axis=0)
    low, high = np.nanquantile(heights[:, known], (0.25, 0.75), axis=0)
    return at[known], low, high
