"""Runs side by side: one table for the terminal, one HTML page that needs nothing beside itself.

Both show what a run left in its folder (`gossamer.record.folder`), priced on any number of networks (`gossamer.network.links`).
What a run does not have is a dash; a number that was not finite is "not finite".
"""

import base64
import contextlib
import io
import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from gossamer.errors import DataError, MissingPackageError, require
from gossamer.network.links import Network, to_toml
from gossamer.network.pricing import price
from gossamer.network.timeline import Timeline
from gossamer.record.events import EventLog, read_events
from gossamer.record.files import atomic_write
from gossamer.record.folder import read_metrics
from gossamer.record.trace import read_trace, trace_files
from gossamer.report.panels import MANY, grid, ranking

__all__ = [
    "drawing",
    "line_style",
    "markdown_lines",
    "markdown_table",
    "over_seeds",
    "pictures",
    "plain",
    "ranked",
    "render_table",
    "summary_rows",
    "svg",
    "write_report",
]

log = logging.getLogger("gossamer")

_DASH = "–"
_PROGRESS = (("tokens", "tokens"), ("step", "inner steps"), ("round", "round"))
_COLOURS = ("#1f6f9f", "#d2691e", "#3f8f5b", "#8a5aa8", "#b8476b", "#8c7a3d", "#4a4a4a", "#2aa3a3")
_DASHES = ((), (5, 2), (1, 1.5), (5, 1.5, 1, 1.5))
_INK, _FAINT = "#2b2b2b", "#d9d9d9"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_CLOCKS = ((_DAY, "days"), (_HOUR, "hours"), (_MINUTE, "minutes"), (1, "s"))


class _Run(NamedTuple):
    """What one folder holds."""

    label: str
    evals: list[dict[str, Any]]
    """Evaluations of the mean model, one a round, by round."""
    trains: list[dict[str, Any]]
    sent_bytes: float | None
    """In the mean over the workers."""
    timelines: dict[str, Timeline]
    config: str | None
    sample: str | None


_Curve = tuple[list[float], list[float]]


class _Chart(NamedTuple):
    """One curve for each run, in their order; a run without points keeps its place and with it its colour."""

    title: str
    x_label: str
    curves: list[_Curve]
    log: bool = False


def summary_rows(runs: Mapping[str, Path], networks: Mapping[str, Network]) -> list[dict[str, Any]]:
    """One row per run: how good it ended, what it sent and how long it would have taken on each network.

    Keys: `method`; `loss`, `worst_loss` and `disagreement` of the last evaluation; `sent_bytes`, the mean over the
    workers; `wall_s` and `utilisation`, each by name of network; `loss_at_s`, by name of network the seconds at which the
    last worker had ended an evaluated round, with the loss. A value is None where the run does not tell, and NaN where it
    was not finite.

    Raises: DataError for a folder that is missing or unreadable, ConfigError for a network of other workers.
    """
    return [_row(run) for run in _load(runs, networks)]


def ranked(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows as they are to be shown: in the order given, or, of many, the lowest loss first."""
    return list(rows) if len(rows) < MANY else sorted(rows, key=lambda row: _rank(row["loss"]))


def render_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of `summary_rows` as a table for the terminal."""
    headings, cells = _table(ranked(rows))
    table = Table(header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if place else "left")
    for line in cells:
        table.add_row(*map(Text, line))
    return table


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `summary_rows` as a Markdown table, for a page that quotes them."""
    headings, cells = _table(ranked(rows))
    return markdown_lines([headings, ["---", *["---:"] * (len(headings) - 1)], *cells])


def markdown_lines(lines: Iterable[Sequence[str]]) -> str:
    r"""Lines of cells as those of a Markdown table; the first is the headings, the second their dashes.

    >>> print(markdown_lines([["a", "b"], ["---", "---"], ["1", "2"]]), end="")
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "".join(
        "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[float], float, float]]:
    """Per method the final losses of its seeds, their mean and their sample standard deviation.

    Seeds are told apart by the end of the label, " seed=3"; a row without a loss is left out.

    >>> over_seeds([{"method": "a seed=0", "loss": 1.0}, {"method": "a seed=1", "loss": 3.0}])
    [('a', [1.0, 3.0], 2.0, 1.4142135623730951)]
    """
    losses: dict[str, list[float]] = {}
    for row in rows:
        if row["loss"] is not None:
            losses.setdefault(row["method"].partition(" seed=")[0], []).append(row["loss"])
    return [
        (method, own, statistics.fmean(own), statistics.stdev(own) if len(own) > 1 else 0.0)
        for method, own in losses.items()
    ]


def write_report(runs: Mapping[str, Path], out_html: Path, networks: Mapping[str, Network] | None = None) -> None:
    """Writes a page with the table, the curves, each run's configuration and text sample; it loads nothing else.

    Without matplotlib the page has no curves, and a sentence that says so, which is logged as well.
    Raises: DataError and ConfigError as `summary_rows` does.
    """
    networks = networks or {}
    loaded = _load(runs, networks)
    if len(loaded) >= MANY:
        loaded.sort(key=lambda run: _rank(_row(run)["loss"]))
    title = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        _html_table([_row(run) for run in loaded]),
        *_html_drawn(loaded, networks),
        *(_html_details(f"Network {name}", to_toml(network)) for name, network in networks.items()),
        *(_html_details(f"Configuration of {run.label}", run.config) for run in loaded if run.config is not None),
        *(_html_details(f"Text sample of {run.label}", run.sample) for run in loaded if run.sample is not None),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    page = "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}<style>{_STYLE}</style></head>\n<body>',
            *body,
            "</body>\n</html>\n",
        ]
    )
    atomic_write(Path(out_html), page.encode())


def _html_drawn(runs: Sequence[_Run], networks: Mapping[str, Network]) -> list[str]:
    """All that matplotlib draws on a page, or the sentence of what is missing."""
    try:
        require("matplotlib.figure", "plots", "drawing the curves")
    except MissingPackageError as missing:
        log.warning("%s", missing)
        return [f"<p>{escape(str(missing))}</p>"]
    many, charts = len(runs) >= MANY, "".join(_charts(runs, networks))
    return [
        _html_picture("Where each ended", ranking([_row(run) for run in runs])) if many else _html_legend(runs),
        f'<section class="{"panels" if many else "charts"}">{charts}</section>',
    ]


def pictures(runs: Mapping[str, Path]) -> dict[str, bytes]:
    """PNG pictures of many runs by file name, to stand beside a table: where each ended, and how it went there; none of few.

    Raises: DataError as `summary_rows` does, and MissingPackageError without matplotlib.
    """
    loaded = sorted(_load(runs, {}), key=lambda run: _rank(_row(run)["loss"]))
    if len(loaded) < MANY:
        return {}
    require("matplotlib.figure", "plots", "drawing the pictures of many runs")
    x_label, curves = _loss_curves(loaded)
    figures = {
        "ranking.png": ranking([_row(run) for run in loaded]),
        "curves.png": grid([run.label for run in loaded], curves, x_label),
    }
    return {name: _png(figure) for name, figure in figures.items()}


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    with drawing():
        figure.savefig(image, format="png", dpi=100, metadata={"Software": None})
    return image.getvalue()


def _rank(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _load(runs: Mapping[str, Path], networks: Mapping[str, Network]) -> list[_Run]:
    return [_load_one(label, Path(folder), networks) for label, folder in runs.items()]


def _load_one(label: str, folder: Path, networks: Mapping[str, Network]) -> _Run:
    if not folder.is_dir():
        raise DataError(
            f"run '{label}' should be in {folder}, which is not a folder; give the folder of a finished or running run"
        )
    metrics = read_metrics(folder)
    evals = {line["round"]: line for line in metrics if line["kind"] == "eval" and "worker" not in line}
    sent_bytes, timelines = None, {}
    if (events := read_events(folder)) is not None:
        sent_bytes, timelines = float(events.sent_bytes.mean()), {events.network: _as_it_went(events)}
    elif any(path.stat().st_size for path in trace_files(folder)):  # without bytes, the run has only just started
        trace = read_trace(folder)
        sent_bytes = float(trace.sent_bytes.mean())
        if trace.workers > 1:  # one that is alone is on no network
            timelines = {name: price(trace, network) for name, network in networks.items()}
    return _Run(
        label,
        list(evals.values()),
        [line for line in metrics if line["kind"] == "train"],
        sent_bytes,
        timelines,
        _read_text(folder / "run.toml"),
        _read_text(folder / "sample.txt"),
    )


def _as_it_went(events: EventLog) -> Timeline:
    """The seconds of an event-driven run, which are part of what it computed."""
    end_s = np.broadcast_to(events.end_s[:, None], events.compute_s.shape)
    spent_s = np.diff(end_s, axis=0, prepend=0.0)
    return Timeline(events.compute_s, spent_s - events.compute_s, np.zeros(end_s.shape, np.int32), end_s)


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def _number(line: Mapping[str, Any], key: str) -> float | None:
    """A figure of a metrics line: None where it is missing, NaN where it was not finite. Raises DataError otherwise."""
    return _as_number(line[key], key, line["round"]) if key in line else None


def _as_number(value: object, key: str, round: int) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise DataError(
            f"the metrics of round {round} have {key} {value!r:.60} but need a number or null; repair the file"
        )
    return float(value)


def _row(run: _Run) -> dict[str, Any]:
    last: dict[str, Any] = run.evals[-1] if run.evals else {"round": -1}
    losses = last.get("worker_losses", [])
    if not isinstance(losses, list):
        raise DataError(
            f"the metrics of round {last['round']} have worker_losses {losses!r:.60} but need a list of numbers"
        )
    worst = [_as_number(loss, "worker_losses", last["round"]) for loss in losses]
    return {
        "method": run.label,
        "loss": _number(last, "loss"),
        # max() would lose a NaN among finite losses.
        "worst_loss": math.nan if any(map(math.isnan, worst)) else max(worst, default=None),
        "disagreement": _number(last, "disagreement"),
        "sent_bytes": run.sent_bytes,
        "wall_s": {name: timeline.total_s for name, timeline in run.timelines.items()},
        "utilisation": {name: timeline.mean_utilisation for name, timeline in run.timelines.items()},
        "loss_at_s": {name: list(zip(*_priced_curve(run, name, 1.0), strict=True)) for name in run.timelines},
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headings and the cells that both the page and the terminal show."""
    networks = list(dict.fromkeys(name for row in rows for name in row["wall_s"]))
    headings = ["method", "val loss", "worst worker", "disagreement", "sent per worker"]
    return headings + [f"time on {name} (computing)" for name in networks], [_cells(row, networks) for row in rows]


def _cells(row: Mapping[str, Any], networks: Sequence[str]) -> list[str]:
    wall_s, utilisation = row["wall_s"], row["utilisation"]
    return [
        row["method"],
        _figure(row["loss"], ".4f"),
        _figure(row["worst_loss"], ".4f"),
        _figure(row["disagreement"], ".3g"),
        _DASH if row["sent_bytes"] is None else _bytes(row["sent_bytes"]),
        *(
            f"{_seconds(wall_s[name])} ({100 * utilisation[name]:.0f} %)" if name in wall_s else _DASH
            for name in networks
        ),
    ]


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return _DASH
    return format(value, form) if math.isfinite(value) else "not finite"


def _bytes(number: float) -> str:
    """A number of bytes for people.

    >>> _bytes(0), _bytes(34_000_000)
    ('0 B', '34.0 MB')
    """
    if number < 1000:
        return f"{number:.0f} B"
    power = min(int(math.log10(number)) // 3, 5)
    return f"{number / 1000**power:.1f} {' kMGTP'[power]}B"


def _seconds(number: float) -> str:
    """A span of time for people.

    >>> _seconds(0.25), _seconds(31.7), _seconds(5400), _seconds(200_000)
    ('0.25 s', '31.7 s', '1 h 30 min', '2 d 7 h')
    """
    if number < _MINUTE:
        return f"{number:.3g} s"
    whole = int(number)
    if number < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if number < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    rows = ranked(rows)
    headings, cells = _table(rows)
    best = min((row["loss"] for row in rows if row["loss"] is not None and math.isfinite(row["loss"])), default=None)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = []
    for row, line in zip(rows, cells, strict=True):
        first, loss, *rest = map(escape, line)
        mark = ' class="best"' if best is not None and row["loss"] == best and len(rows) > 1 else ""
        lines.append(f"<tr><th>{first}</th><td{mark}>{loss}</td>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _html_legend(runs: Sequence[_Run]) -> str:
    """One legend for all charts, in HTML so that it stays readable however many runs there are."""
    entries = []
    for place, run in enumerate(runs):
        colour, dashes = line_style(place)
        pattern = f' stroke-dasharray="{" ".join(str(2 * part) for part in dashes)}"' if dashes else ""
        line = f'<path d="M0 4H30" stroke="{colour}" stroke-width="2.5"{pattern}/>'
        entries.append(f'<li><svg width="30" height="8">{line}</svg>{escape(run.label)}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _html_details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _charts(runs: Sequence[_Run], networks: Mapping[str, Network]) -> list[str]:
    """The charts that have something to show, as HTML."""
    loss = "Validation loss of the mean model"
    charts = [_Chart(loss, *_loss_curves(runs))]
    for name in networks:
        slowest = max((run.timelines[name].total_s for run in runs if name in run.timelines), default=0.0)
        unit_s, unit = next((size, unit) for size, unit in _CLOCKS if slowest >= 2 * size or size == 1)
        charts.append(
            _Chart(f"{loss} on {name}", f"wall-clock ({unit})", [_priced_curve(run, name, unit_s) for run in runs])
        )
    disagreement = [_curve((float(e["round"]), _number(e, "disagreement")) for e in run.evals) for run in runs]
    charts.append(_Chart("Disagreement of the workers (rms)", "round", disagreement, log=True))
    charts.append(_Chart("Training loss, mean over workers", "round", [_training_curve(run) for run in runs]))
    shown = [chart for chart in charts if any(x for x, _ in chart.curves)]
    if len(runs) < MANY:
        return [_html_chart(chart) for chart in shown]
    labels, first_of_many = [run.label for run in runs], (charts[0], charts[1 + len(networks)])
    return [_html_picture(c.title, grid(labels, c.curves, c.x_label, log=c.log)) for c in first_of_many if c in shown]


def _loss_curves(runs: Sequence[_Run]) -> tuple[str, list[_Curve]]:
    """Validation losses against how far each run was, and how that is measured."""
    evals = [line for run in runs for line in run.evals]
    key, label = next(
        choice for choice in _PROGRESS if choice[0] == "round" or all(choice[0] in line for line in evals)
    )
    return label, [_curve((_number(e, key), _number(e, "loss")) for e in run.evals) for run in runs]


def _curve(points: Iterable[tuple[float | None, float | None]]) -> _Curve:
    """The points that have both coordinates; NaN leaves a gap."""
    known = [(x, y) for x, y in points if x is not None and y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _priced_curve(run: _Run, network: str, unit_s: float) -> _Curve:
    """Validation loss against the time at which the last worker had ended the round, in units of `unit_s`."""
    if network not in run.timelines:
        return [], []
    finish = [0.0, *(run.timelines[network].end_s.max(axis=1) / unit_s).tolist()]
    return _curve((finish[e["round"] + 1], _number(e, "loss")) for e in run.evals if -1 <= e["round"] < len(finish) - 1)


def _training_curve(run: _Run) -> _Curve:
    losses: dict[int, list[float]] = {}
    for line in run.trains:
        if (loss := _number(line, "loss")) is not None:
            losses.setdefault(line["round"], []).append(loss)
    return [float(round) for round in losses], [sum(values) / len(values) for values in losses.values()]


def _html_chart(chart: _Chart) -> str:
    """The chart as an image that the page carries inside itself."""
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
            # The first tenth of training falls so far that the ends, which are to be compared, would be one line.
            late = [value for _, y in chart.curves for value in y[len(y) // 10 :] if math.isfinite(value)]
            low, high = min(late, default=0.0), max(late, default=1.0)
            axes.set_ylim(low - 0.05 * (high - low or 1.0), high + 0.05 * (high - low or 1.0))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        plain(axes, chart.x_label)
    return _html_picture(chart.title, figure, f"{chart.title}, against {chart.x_label}")


def _html_picture(title: str, figure: Any, alt: str = "") -> str:
    """A matplotlib figure that the page carries inside itself."""
    with drawing():
        data = base64.b64encode(svg(figure)).decode()
    image_tag = f'<img alt="{escape(alt or title, quote=True)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption>{escape(title)}</figcaption>{image_tag}</figure>"


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Settings under which a figure is made and written; a fixed salt makes equal figures equal bytes."""
    import matplotlib

    with matplotlib.rc_context(
        {"svg.hashsalt": "gossamer", "font.family": "DejaVu Sans", "font.size": 9, "text.color": _INK}
    ):
        yield


def plain(axes: Any, x_label: str, *, grid: bool = True) -> None:
    """Leaves to axes only what is read."""
    axes.set_xlabel(x_label, color=_INK)
    if grid:
        axes.grid(which="both", color=_FAINT, linewidth=0.6)
    axes.tick_params(which="both", colors=_INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)


def svg(figure: Any) -> bytes:
    """A matplotlib figure as SVG, without the date."""
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


def line_style(place: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dashes of the run at this place: colours first, then the same colours dashed."""
    return _COLOURS[place % len(_COLOURS)], _DASHES[place // len(_COLOURS) % len(_DASHES)]


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #2b2b2b; background: #fafaf8; }
body { margin: 0 auto; max-width: 1200px; padding: 2rem 1.5rem; }
h1 { font-size: 1.6rem; font-weight: 600; margin: 0 0 1.2rem; }
.scroll, figure, details { background: #fff; border: 1px solid #e4e4e0; border-radius: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .55rem .9rem; text-align: right; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; font-weight: 600; font-size: .85rem; color: #6a6a66; }
th:first-child { text-align: left; }
tbody th { font-weight: 500; }
tbody tr > * { border-top: 1px solid #ecece8; }
.best { font-weight: 700; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; padding: 0; margin: 1.6rem 0 .8rem; }
.legend svg { margin-right: .5rem; vertical-align: middle; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
.charts { margin-bottom: 1.6rem; }
.panels figure { margin: 1rem 0; }
figure { margin: 0; padding: .8rem; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .4rem; }
img { width: 100%; height: auto; display: block; }
details { margin-bottom: .6rem; padding: .5rem .9rem; }
summary { cursor: pointer; }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; }
"""
