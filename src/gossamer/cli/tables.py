"""Printing tables: other packages compute the rows, and a verb prints them."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import HEAVY_HEAD
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
    rows, headings, console = [[*map(printable, row)] for row in rows], [*map(printable, headings)], Console()
    missing = list[str]()
    widths = [max([len(head), *(len(row[place]) for row in rows)]) for place, head in enumerate(headings)]
    for heading in spare if console.is_terminal else ():
        if (
            sum(min(w, _LEGIBLE) if k < text else w for k, w in enumerate(widths)) + 2 * len(widths) - 2
            <= console.width
        ):
            break
        missing.append(heading)
        place = headings.index(heading)
        text -= place < text
        for each in (headings, widths, *rows):
            del each[place]
    if not title and not console.is_terminal:
        console = Console(width=sum(widths) + 2 * len(widths))  # a file has lines of any length
    # Where a line of a terminal is too short for all, texts are cut and never numbers, the longest first.
    texts, room = widths[:text], console.width - sum(widths[text:]) - 2 * (len(widths) - 1)
    while sum(texts) > room and max(texts) > _SHORTEST:
        texts[texts.index(max(texts))] -= 1
    if console.is_terminal:  # which continues what is still too long on a further line
        wrapped = [min(w, _LEGIBLE) if 0 < place < text else w for place, w in enumerate(widths)]
        fewest = sum(wrapped) + 3 * len(widths) + 1 if title else sum(texts + widths[text:]) + 2 * (len(widths) - 1)
        console = Console(width=max(console.width, fewest))
    view = Table(
        title=Text(printable(title), style="table.title") if title else None,
        title_justify="left",
        box=HEAVY_HEAD if title else None,
        pad_edge=bool(title),
        header_style="bold",
    )
    for place, heading in enumerate(headings):
        may_wrap, is_text = bool(title) and 0 < place < text, place < text
        most = texts[place] if is_text and not title and console.is_terminal else None
        view.add_column(
            Text(heading),
            justify="left" if is_text else "right",
            no_wrap=not may_wrap,
            max_width=most,
            overflow="fold" if may_wrap else "ellipsis",
        )
    for place, row in enumerate(rows):
        view.add_row(*map(Text, row), style="bold" if place == bold else None)
    console.print(view)
    return missing


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
