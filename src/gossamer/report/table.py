"""Runs side by side as a table, for the terminal, in Markdown and in HTML.

A missing value is a dash; a number that was not finite is "not finite".
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from gossamer.network.links import Network
from gossamer.record.lineage import stages_sentence
from gossamer.record.progress import printable
from gossamer.report.metrics import METRICS, Metric
from gossamer.report.reading.runs import read_runs, summary_row

MANY = 12
"""From this number of runs on, tables are ranked by loss and charts get a panel for each run."""
DASH = "–"
_LARGEST = 1e6
"""From here on a number has an exponent; a loss is below 20 nats, in a loop of one's own perhaps some thousands."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def summary_rows(runs: Mapping[str, Path], networks: Mapping[str, Network] | None) -> list[dict[str, Any]]:
    """One row per run: its last losses, the bytes it sent and the time it takes on each network, or on those of its own run file.

    Keys: `method`; `loss`, `worst_loss` and `disagreement` of the newest evaluation, if the settings have not changed since;
    `loss_of_workers`, the mean of the losses of the workers' own models in that round, or where the mean model was not
    validated, in the newest that they have; `round`, the rounds that were over then, and `rounds`, those of the record;
    `passes`, how often the text was trained on; `sent_bytes`, the mean over the workers; `wall_s` and `utilisation`, each by
    name of network; `changed_stages`, the changes of stages in words, where all rounds are priced with the last ones;
    `loss_at_s`, by name of network pairs of the seconds when the last worker ended an evaluated round, and the loss then;
    `loss_at_bytes` and `loss_at_round`, such pairs with the bytes that a worker had sent and the rounds that were over.
    Initial values are in none of them. A value is None where it is missing, and NaN where it was not finite.

    Raises: DataError for a folder that is missing or unreadable, ConfigError for a network of other workers.
    """
    return [summary_row(run) for run in read_runs(runs, networks)]


def stages_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each run whose stages changed."""
    changed = ((row["method"], row.get("changed_stages")) for row in rows)
    return [stages_sentence(method, words) for method, words in changed if words]


def ranked(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows in the order to show them: as given, or the lowest loss first if there are many."""
    return list(rows) if len(rows) < MANY else sorted(rows, key=lambda row: loss_rank(row["loss"]))


def has_diverged(row: Mapping[str, Any]) -> bool:
    """Whether a run ended with a loss that is not finite."""
    return row["loss"] is not None and not math.isfinite(row["loss"])


def loss_rank(loss: float | None) -> float:
    """A key that sorts losses from best to worst; those missing or not finite come last."""
    return loss if loss is not None and math.isfinite(loss) else math.inf


def render_table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """The rows of `summary_rows` as a table for a terminal of this width.

    Cells break between words, the longest first, and nowhere else: part of a number is another number. So the table may be wider.
    """
    headings, cells = table_cells(ranked(rows))
    lines = [[*map(printable, line)] for line in (headings, *cells)]
    columns = [*zip(*lines, strict=True)]
    fewest = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    widths = [max(map(cell_len, column)) for column in columns]
    while sum(widths) + 3 * len(widths) + 1 > width and widths != fewest:
        widths[max((w, place) for place, w in enumerate(widths) if w > fewest[place])[1]] -= 1
    table = Table(header_style="bold")
    for place, heading in enumerate(lines[0]):
        table.add_column(Text(heading), justify="right" if place else "left", width=widths[place])
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    return table


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `summary_rows` as a Markdown table."""
    headings, cells = table_cells(ranked(rows))
    return markdown_numbers(headings, cells)


def markdown_numbers(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with numbers, which are aligned to the right, in all columns but the first."""
    return markdown_lines([headings, ["---", *["---:"] * (len(headings) - 1)], *rows])


def markdown_lines(lines: Iterable[Sequence[str]]) -> str:
    r"""A Markdown table of these lines of cells; the first has the headings, the second their dashes.

    >>> print(markdown_lines([["a", "b"], ["---", "---"], ["1", "2"]]), end="")
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "".join("| " + " | ".join(map(markdown_text, line)) + " |\n" for line in lines)


def markdown_text(text: str) -> str:
    r"""A text escaped for a line or a cell of Markdown: no breaks, no HTML, no terminal control characters.

    >>> print(markdown_text("a|b\nc <script> \x07 < 0.001"))
    a\|b c &lt;script> \x07 < 0.001
    """
    text = printable(text).replace("\n", " ")
    text = re.sub(r"(\\*)\|", r"\1\1\\|", text)  # a backslash before a bar would otherwise escape the next character
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def method_and_seed(label: str) -> tuple[str, str]:
    """The method of a run, and its seed, with which its label ends; an empty seed where it does not.

    >>> method_and_seed("a lr=1 seed=3"), method_and_seed("a seed=3 lr=1"), method_and_seed("a")
    (('a lr=1', '3'), ('a seed=3 lr=1', ''), ('a', ''))
    """
    method, _, seed = label.rpartition(" seed=")
    return (method, seed) if method and seed.lstrip("-").isdecimal() else (label, "")


def seeds_are_alike(names: Sequence[str], settings: Sequence[Any]) -> bool:
    """Whether runs with names that differ in the seed alone have equal settings, so that they count as one method's.

    >>> seeds_are_alike(["a seed=0", "a seed=1", "b seed=0"], [1, 1, 2]), seeds_are_alike(["a seed=0", "a seed=1"], [1, 2])
    (True, False)
    """
    first, methods = dict[str, Any](), [method_and_seed(name)[0] for name in names]
    return all(first.setdefault(method, one) == one for method, one in zip(methods, settings, strict=True))


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[float], float, float]]:
    """Per method the final losses of its seeds, their mean and their sample standard deviation; both are NaN if a seed diverged.

    A row without a loss does not count.

    >>> over_seeds([{"method": "a seed=0", "loss": 1.0}, {"method": "a seed=1", "loss": 3.0}])
    [('a', [1.0, 3.0], 2.0, 1.4142135623730951)]
    """
    losses: dict[str, list[float]] = {}
    for row in rows:
        if row["loss"] is not None:
            losses.setdefault(method_and_seed(row["method"])[0], []).append(row["loss"])
    return [
        (
            method,
            of_seeds,
            *(_mean_and_deviation(of_seeds) if all(map(math.isfinite, of_seeds)) else (math.nan, math.nan)),
        )
        for method, of_seeds in losses.items()
    ]


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `summary_rows` as an HTML table that marks the best loss."""
    rows = ranked(rows)
    headings, cells = table_cells(rows)
    best = min((row["loss"] for row in rows if row["loss"] is not None and math.isfinite(row["loss"])), default=None)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = []
    for row, line in zip(rows, cells, strict=True):
        first, loss, *rest = map(escape, line)
        mark = ' class="best"' if best is not None and row["loss"] == best and len(rows) > 1 else ""
        lines.append(f"<tr><th>{first}</th><td{mark}>{loss}</td>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def table_cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headings and the cells of each row, as the page and the terminal show them."""
    networks = list(dict.fromkeys(name for row in rows for name in row["wall_s"]))
    columns = [metric for metric in METRICS if metric.heading and metric.shown(rows)]
    headings = [metric.heading for metric in columns] + [f"time on {name} (computing)" for name in networks]
    return ["method", *headings], [
        [row["method"], *(_cell(metric, row) for metric in columns), *(_time_text(row, name) for name in networks)]
        for row in rows
    ]


def _cell(metric: Metric, row: Mapping[str, Any]) -> str:
    if (value := row.get(metric.name)) is None:
        return DASH
    if metric.unit == "bytes":
        return _bytes_text(value)
    form = ".4f" if metric.unit == "nats per token" else ".3g"
    text = digits_text(value, 3) if metric.unit == "passes" else number_text(value, form)
    return text + _round_note(row.get("round"), row.get("rounds")) if metric.dated else text


def _round_note(round: int | None, rounds: int | None) -> str:
    """The round of a loss, if the run has continued since."""
    return "" if round is None or rounds is None or round >= rounds else f" (round {round} of {rounds})"


def _time_text(row: Mapping[str, Any], network: str) -> str:
    """Seconds for people, with the share that was computed where it is known."""
    if network not in row["wall_s"]:
        return DASH
    utilisation = row["utilisation"][network]
    share = "" if math.isnan(utilisation) else f" ({100 * utilisation:.0f} %)"
    last = ", all in the last stages" if row.get("changed_stages") else ""
    return f"{seconds_text(row['wall_s'][network])}{share}{last}"


def number_text(value: float | None, form: str) -> str:
    """A number for a table or a picture; a dash for None, and a power of ten for what a run that diverges has.

    >>> number_text(2.5, ".4f"), number_text(2.5e40, ".4f"), number_text(float("nan"), ".4f")
    ('2.5000', '2.5e+40', 'not finite')
    """
    if value is None:
        return DASH
    return format(value, form if abs(value) < _LARGEST else ".4g") if math.isfinite(value) else "not finite"


def digits_text(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits, at least to ones, and commas between thousands; never with an exponent.

    >>> digits_text(31.4712), digits_text(94_910.3), digits_text(999.7, 3), digits_text(2.7134e-7)
    ('31.47', '94,910', '1,000', '0.0000002713')
    """
    if 0 < abs(value) < 1e-4:
        return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:,.{digits}g}"


def wall_clock_text(seconds: float) -> str:
    """Seconds, or from an hour on hours, with four digits, as a plan and a check have them.

    >>> wall_clock_text(31.4712), wall_clock_text(12_345.6)
    ('31.47 s', '3.429 h')
    """
    return f"{digits_text(seconds)} s" if seconds < _HOUR else f"{digits_text(seconds / _HOUR)} h"


def spread_text(value: float, half: float) -> str:
    """A number as by `digits_text`, with half of its interval where that is a thousandth of it or more.

    >>> spread_text(496.5, 50.6), spread_text(496.5, 0.1)
    ('496.5 ± 51', '496.5')
    """
    return digits_text(value) + (f" ± {digits_text(half, 2)}" if value and half / value >= 0.001 else "")


def _bytes_text(number: float) -> str:
    """A number of bytes for people.

    >>> _bytes_text(0), _bytes_text(34_000_000)
    ('0 B', '34.0 MB')
    """
    if number < 1000:
        return f"{number:.0f} B"
    power = min(int(math.log10(number)) // 3, 5)
    return f"{number / 1000**power:.1f} {' kMGTP'[power]}B"


def seconds_text(number: float) -> str:
    """A span of time for people.

    >>> seconds_text(0.25), seconds_text(31.7), seconds_text(5400), seconds_text(200_000)
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
