"""Printing tables: other packages compute the rows, and a verb prints them."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossamer.cli.output import print_json
from gossamer.record.progress import echo, printable

_SHORTEST, _LEGIBLE = 8, 20
"""Characters to which a text may be cut, and those that spare columns make room for."""


def print_sentence(text: str, indent: int = 0) -> None:
    """Prints a line, which ends between two words where that of a terminal ends; a file has lines of any length.

    Args:
        indent: of what follows on further lines of a terminal.
    """
    console, text = Console(), printable(text)
    if console.is_terminal:
        text = textwrap.fill(
            text,
            console.width,
            subsequent_indent=" " * min(indent, console.width // 2),
            break_on_hyphens=False,
            break_long_words=False,
        )
    echo(text)


class _Column(NamedTuple):
    lines: tuple[str, ...]
    """The heading, and a cell for each row."""
    is_text: bool

    @property
    def width(self) -> int:
        return max(map(cell_len, self.lines))

    @property
    def legible(self) -> int:
        """The width in which a text can be read, and a number is whole."""
        return min(self.width, _LEGIBLE) if self.is_text else self.width


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    text: int = 1,
    bold: int | None = None,
    spare: Sequence[str] = (),
) -> list[str]:
    """Prints rows in columns, and returns the headings of those that a narrow terminal lacks; a title brings lines around them.

    Args:
        text: the number of columns with text, on the left; the others have numbers. Under a title, text after the first wraps.
        bold: the index of a row to print in bold.
        spare: headings of columns that a terminal leaves out where it is too narrow, the first of them first.
    """
    console, missing, lines = Console(), list[str](), [[*map(printable, line)] for line in (headings, *rows)]
    columns = [_Column(cells, place < text) for place, cells in enumerate(zip(*lines, strict=True))]
    for heading in spare if console.is_terminal else ():
        if sum(one.legible for one in columns) + 2 * (len(columns) - 1) <= console.width:
            break
        missing.append(heading)
        columns = [one for one in columns if one.lines[0] != heading]
    wraps = [bool(title) and place > 0 and one.is_text for place, one in enumerate(columns)]
    edges = 3 * len(columns) + 1 if title else 2 * (len(columns) - 1)
    widths = [one.legible if may_wrap else one.width for one, may_wrap in zip(columns, wraps, strict=True)]
    if not title and console.is_terminal:
        widths = _cut(columns, console.width - edges)
    view = Table(
        title=Text(printable(title), style="table.title") if title else None,
        title_justify="left",
        box=HEAVY_HEAD if title else None,
        pad_edge=bool(title),
        header_style="bold",
    )
    for one, may_wrap, width in zip(columns, wraps, widths, strict=True):
        view.add_column(
            Text(one.lines[0]),
            justify="left" if one.is_text else "right",
            no_wrap=not may_wrap,
            max_width=None if may_wrap else width,
            overflow="fold" if may_wrap else "ellipsis",
        )
    for place, row in enumerate(zip(*(one.lines[1:] for one in columns), strict=True)):
        view.add_row(*map(Text, row), style="bold" if place == bold else None)
    # A file has lines of any length, and a terminal continues what is still too long on a further line.
    Console(width=max(console.width, sum(widths) + edges)).print(view)
    return missing


def _cut(columns: Sequence[_Column], room: int) -> list[int]:
    """The widths of columns where not all are whole: texts are cut and never numbers, the longest first."""
    widths, texts = [one.width for one in columns], [place for place, one in enumerate(columns) if one.is_text]
    while texts and sum(widths) > room:
        longest = max(texts, key=widths.__getitem__)
        if widths[longest] <= _SHORTEST:
            break
        widths[longest] -= 1
    return widths


def print_estimate(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    assumptions: Iterable[str],
    *,
    json: Any = None,
    **shape: Any,
) -> None:
    """Prints the table of an estimate and all that was assumed; or `json`, where a verb gives it, in their place."""
    if json is not None:
        print_json(json)
        return
    print_table(headings, rows, **shape)
    for sentence in assumptions:
        echo(f"assumed: {sentence}")
