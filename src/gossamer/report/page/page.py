"""Runs side by side as one HTML page that needs no other file: the parts of the live page, frozen, with settings and samples."""

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from gossamer.network.links import Network, to_toml
from gossamer.record.folder import finite
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.report.page.assets import whole_page
from gossamer.report.page.contents import page_contents
from gossamer.report.page.view import run_view
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.moment import moment_of
from gossamer.report.reading.runs import RunData, diverged_row, read_runs, summary_row
from gossamer.report.table import MANY, html_table, loss_rank, markdown_table, stages_notes

_FIRST, _LAST = 24, 4
"""Rounds of each run whose pairs and seconds are on the page."""
_PATIENCE_S = 600
"""Time limit for reading a run beyond its table."""
_FEW = 4
"""The most configurations shown side by side; more are folded into one."""
_MOST_NUMBERS = 30_000
"""The approximate limit of numbers from all rounds of all runs; many or large runs get fewer rounds."""


def write_report(
    runs: Mapping[str, Path],
    out_html: Path,
    networks: Mapping[str, Network] | None,
    *,
    command: str = "",
    notes: Sequence[str] = (),
    lost: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Writes a self-contained page with conclusions, table, curves, pairs and seconds, settings and samples.

    Next to it is its table, named after it (`table_of`).

    Returns: the rows of its table (`gossamer.report.table.summary_rows`), in the order of `runs`.

    Equal folders give equal pages. The date is that of the newest record.

    Args:
        networks: those that price all runs; None prices each on those of its own run file.
        command: the command to show.
        notes: what to know before these runs are compared.
        lost: the labels of runs that ended without a finite loss, which their folders may not show.
    Raises: DataError and ConfigError as `summary_rows` does.
    """
    loaded = read_runs(runs, networks)
    row_of = {run.followed.label: summary_row(run) for run in loaded}
    row_of |= {label: diverged_row(row_of[label]) for label in lost}
    if len(loaded) >= MANY:
        loaded.sort(key=lambda run: loss_rank(row_of[run.followed.label]["loss"]))
    rows = [row_of[run.followed.label] for run in loaded]
    followed = [run.followed for run in loaded]
    for one in followed:
        one.look(time.monotonic() + _PATIENCE_S)
    title = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs compared"
    newest_s = max((one.modified_s for one in followed), default=0.0)
    # A report treats a run as over: no worker is silent.
    views = [run_view(one, one.modified_s, run.ends_s) for one, run in zip(followed, loaded, strict=True)]
    contents = page_contents(
        views,
        rows,
        title=title,
        live=False,
        command=command,
        date=f"{datetime.fromtimestamp(newest_s, UTC):%Y-%m-%d %H:%M} UTC" if newest_s else "an unknown time",
        notes=[*notes, *stages_notes(rows)],
    )
    contents["moments"] = _moments(followed)
    page = whole_page(title, finite(contents), html_table(rows), "\n".join(_details(loaded)))
    make_folder(Path(out_html).parent)
    atomic_write(Path(out_html), page.encode())
    rows = [*row_of.values()]
    atomic_write(table_of(Path(out_html)), markdown_table(rows).encode())
    return rows


def table_of(page: Path) -> Path:
    """The path of a page's table.

    >>> table_of(Path("runs/report.html")).name
    'report-table.md'
    """
    return page.with_name(f"{page.stem}-table.md")


def _moments(runs: Sequence[FollowedRun]) -> list[dict[int, Any]]:
    """By run the rounds that can be drawn: its first and its last ones, within the limit."""
    room = _MOST_NUMBERS // max(1, len(runs))
    moments: list[dict[int, Any]] = []
    for run in runs:
        drawn: dict[int, Any] = {}
        spent = 0
        last = range(max(_FIRST, run.done - _LAST), run.done)
        for round in [*range(min(_FIRST, run.done)), *last] if run.file is not None else ():
            if spent < room:
                drawn[round] = moment_of(run, round)
                spent += 3 * len(drawn[round]["pairs"]) + 7 * sum(map(len, drawn[round]["seconds"].values()))
                drawn[round]["seconds"] = _short(drawn[round]["seconds"])
        moments.append(drawn)
    return moments


def _short(seconds: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[list[Any]]]:
    return {
        name: [[float(f"{x:.5g}") if isinstance(x, float) else x for x in row] for row in rows]
        for name, rows in seconds.items()
    }


def _details(runs: Sequence[RunData]) -> list[str]:
    networks = dict[str, Network]()
    for run in runs:
        for name, network in run.networks.items():
            if networks.setdefault(name, network) != network:
                networks[f"{name} of {run.followed.label}"] = network
    settings = [_fold(f"Configuration of {run.followed.label}", run.config) for run in runs if run.config is not None]
    if len(settings) > _FEW:
        settings = ["<details><summary>Configurations</summary>", *settings, "</details>"]
    return [
        *(_fold(f"Network {name}", to_toml(network)) for name, network in networks.items()),
        *settings,
        *(_fold(f"What changed in {run.followed.label}", "\n".join(run.branches)) for run in runs if run.branches),
        *(_fold(f"Text sample of {run.followed.label}", run.sample) for run in runs if run.sample is not None),
    ]


def _fold(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
