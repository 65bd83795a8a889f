"""Charts of runs: their style, their curves, and figures as SVG or PNG."""

import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gossamer.report.runs import (
    Curve,
    RunData,
    alignment_curve,
    disagreement_curve,
    divergence_curve,
    loss_curves,
    persistence_curve,
    priced_curve,
    training_curve,
)
from gossamer.report.table import DAY, HOUR, MINUTE

__all__ = ["FAINT", "INK", "Chart", "charts_of", "draw_chart", "drawing", "line_style", "plain_axes", "png", "svg"]

INK, FAINT = "#2b2b2b", "#d9d9d9"
_COLOURS = ("#1f6f9f", "#d2691e", "#3f8f5b", "#8a5aa8", "#b8476b", "#8c7a3d", "#4a4a4a", "#2aa3a3")
_DASHES = ((), (5, 2), (1, 1.5), (5, 1.5, 1, 1.5))
_CLOCKS = ((DAY, "days"), (HOUR, "hours"), (MINUTE, "minutes"), (1, "s"))


class Chart(NamedTuple):
    """One curve for each run, in their order; a run without points keeps its place, so that the colours of the others stay."""

    title: str
    x_label: str
    curves: list[Curve]
    log: bool = False


def charts_of(runs: Sequence[RunData], networks: Iterable[str]) -> list[Chart]:
    """All charts of the runs: loss against progress and the wall-clock of each network, disagreements, training loss."""
    loss = "Validation loss of the mean model"
    charts = [Chart(loss, *loss_curves(runs))]
    for name in networks:
        slowest = max((run.timelines[name].total_s for run in runs if name in run.timelines), default=0.0)
        unit_s, unit = next((size, unit) for size, unit in _CLOCKS if slowest >= 2 * size or size == 1)
        charts.append(
            Chart(f"{loss} on {name}", f"wall-clock ({unit})", [priced_curve(run, name, unit_s) for run in runs])
        )
    disagreement = [disagreement_curve(run) for run in runs]
    charts.append(Chart("Disagreement of the workers (rms)", "round", disagreement, log=True))
    divergence = [divergence_curve(run) for run in runs]
    charts.append(Chart("Disagreement of their predictions (Jensen-Shannon, nats)", "round", divergence, log=True))
    charts.append(Chart("Alignment of pseudo-gradients", "round", [alignment_curve(run) for run in runs], log=True))
    charts.append(Chart("Persistence of their mean", "round", [persistence_curve(run) for run in runs]))
    charts.append(Chart("Training loss, mean over workers", "round", [training_curve(run) for run in runs]))
    return charts


def draw_chart(chart: Chart) -> Any:
    """The chart as a matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    with drawing():
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for place, (x, y) in enumerate(chart.curves):
            colour, dashes = line_style(place)
            marker = "o" if len(x) <= 25 else None
            axes.plot(x, y, color=colour, linewidth=1.6, dashes=dashes or (None, None), marker=marker, markersize=3)
        if chart.log and any(value > 0 for _, y in chart.curves for value in y):
            axes.set_yscale("log", nonpositive="mask")
        else:
            # The loss falls so far in the first tenth of training that the ends, which matter, would be one line.
            late = [value for _, y in chart.curves for value in y[len(y) // 10 :] if math.isfinite(value)]
            low, high = min(late, default=0.0), max(late, default=1.0)
            axes.set_ylim(low - 0.05 * (high - low or 1.0), high + 0.05 * (high - low or 1.0))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        plain_axes(axes, chart.x_label)
    return figure


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib settings for making and writing figures; with a fixed salt, equal figures give equal bytes."""
    import matplotlib

    with matplotlib.rc_context(
        {"svg.hashsalt": "gossamer", "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}
    ):
        yield


def plain_axes(axes: Any, x_label: str, *, grid: bool = True) -> None:
    """Removes everything from the axes that nobody reads."""
    axes.set_xlabel(x_label, color=INK)
    if grid:
        axes.grid(which="both", color=FAINT, linewidth=0.6)
    axes.tick_params(which="both", colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def svg(figure: Any) -> bytes:
    """A matplotlib figure as SVG, without a date."""
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


def line_style(place: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dashes of the run at this place: all colours solid first, then dashed."""
    return _COLOURS[place % len(_COLOURS)], _DASHES[place // len(_COLOURS) % len(_DASHES)]


def png(figure: Any) -> bytes:
    """A matplotlib figure as PNG; equal figures give equal bytes."""
    image = io.BytesIO()
    with drawing():
        figure.savefig(image, format="png", dpi=100, metadata={"Software": None})
    return image.getvalue()
