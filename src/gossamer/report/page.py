"""Runs side by side as one HTML page that needs no other file: table, charts, configurations and text samples."""

import base64
import logging
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gossamer.errors import MissingPackageError, require
from gossamer.network.links import Network, to_toml
from gossamer.record.files import atomic_write, make_folder
from gossamer.report.charts import charts_of, draw_chart, drawing, line_style, png, svg
from gossamer.report.panels import ranking, small_charts
from gossamer.report.runs import RunData, loss_curves, read_runs, summary_row
from gossamer.report.table import MANY, html_table, loss_rank, markdown_table, summary_rows

__all__ = ["pictures", "write_pages", "write_report"]

log = logging.getLogger("gossamer")


def write_report(runs: Mapping[str, Path], out_html: Path, networks: Mapping[str, Network] | None = None) -> None:
    """Writes a page with the table, the charts, and each run's configuration and text sample; it loads nothing from elsewhere.

    Without matplotlib the page has a sentence that says so in place of the charts; it is logged too.
    Raises: DataError and ConfigError as `summary_rows` does.
    """
    networks = networks or {}
    loaded = read_runs(runs, networks)
    if len(loaded) >= MANY:
        loaded.sort(key=lambda run: loss_rank(summary_row(run)["loss"]))
    title = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        html_table([summary_row(run) for run in loaded]),
        *_html_drawn(loaded, networks),
        *(_html_details(f"Network {name}", to_toml(network)) for name, network in networks.items()),
        *(_html_details(f"Configuration of {run.label}", run.config) for run in loaded if run.config is not None),
        *(
            _html_details(f"Changes of settings of {run.label}", "\n".join(run.branches))
            for run in loaded
            if run.branches
        ),
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


def write_pages(runs: Mapping[str, Path], page: Path, networks: Mapping[str, Network]) -> list[dict[str, Any]]:
    """Writes the page, and next to it `table.md` and the pictures of many runs; returns the rows of the table.

    Raises: as `write_report`.
    """
    make_folder(page.parent)
    write_report(runs, page, networks)
    rows = summary_rows(runs, networks)
    atomic_write(page.with_name("table.md"), markdown_table(rows).encode())
    try:
        for name, image in pictures(runs).items():
            atomic_write(page.with_name(name), image)
    except MissingPackageError:
        pass  # write_report has logged why
    return rows


def _html_drawn(runs: Sequence[RunData], networks: Mapping[str, Network]) -> list[str]:
    """Everything on the page that needs matplotlib, or the sentence that it is missing."""
    try:
        require("matplotlib.figure", "plots", "drawing the curves")
    except MissingPackageError as missing:
        log.warning("%s", missing)
        return [f"<p>{escape(str(missing))}</p>"]
    many, charts = len(runs) >= MANY, "".join(_html_charts(runs, networks))
    return [
        _html_picture("Where each ended", ranking([summary_row(run) for run in runs])) if many else _html_legend(runs),
        f'<section class="{"panels" if many else "charts"}">{charts}</section>',
    ]


def pictures(runs: Mapping[str, Path]) -> dict[str, bytes]:
    """PNG pictures of many runs by file name, for use next to a table: the ranking, and the loss curve of each; none of few.

    Raises: DataError as `summary_rows` does, and MissingPackageError without matplotlib.
    """
    loaded = sorted(read_runs(runs, {}), key=lambda run: loss_rank(summary_row(run)["loss"]))
    if len(loaded) < MANY:
        return {}
    require("matplotlib.figure", "plots", "drawing the pictures of many runs")
    x_label, curves = loss_curves(loaded)
    figures = {
        "ranking.png": ranking([summary_row(run) for run in loaded]),
        "curves.png": small_charts([run.label for run in loaded], curves, x_label),
    }
    return {name: png(figure) for name, figure in figures.items()}


def _html_legend(runs: Sequence[RunData]) -> str:
    """One legend for all charts, in HTML so that it stays readable with any number of runs."""
    entries = []
    for place, run in enumerate(runs):
        colour, dashes = line_style(place)
        pattern = f' stroke-dasharray="{" ".join(str(2 * part) for part in dashes)}"' if dashes else ""
        line = f'<path d="M0 4H30" stroke="{colour}" stroke-width="2.5"{pattern}/>'
        entries.append(f'<li><svg width="30" height="8">{line}</svg>{escape(run.label)}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _html_details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _html_charts(runs: Sequence[RunData], networks: Mapping[str, Network]) -> list[str]:
    """The charts that have something to show, as HTML; of many runs only the loss and the disagreement, in panels."""
    charts = charts_of(runs, networks)
    shown = [chart for chart in charts if any(x for x, _ in chart.curves)]
    if len(runs) < MANY:
        return [_html_picture(c.title, draw_chart(c), f"{c.title}, against {c.x_label}") for c in shown]
    labels, first_of_many = [run.label for run in runs], (charts[0], charts[1 + len(networks)])
    return [
        _html_picture(c.title, small_charts(labels, c.curves, c.x_label, log=c.log))
        for c in first_of_many
        if c in shown
    ]


def _html_picture(title: str, figure: Any, alt: str = "") -> str:
    """A matplotlib figure that is embedded in the page."""
    with drawing():
        data = base64.b64encode(svg(figure)).decode()
    image_tag = f'<img alt="{escape(alt or title, quote=True)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption>{escape(title)}</figcaption>{image_tag}</figure>"


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
