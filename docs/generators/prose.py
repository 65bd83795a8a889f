"""Docstrings as Markdown: equations in blocks, labelled paragraphs, tables and links to papers."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from generators.docstrings import LABEL, block, capital, is_equation, under
from generators.methods_table import linked
from gossamer.settings.options import Option, options_of, summary

PARTS = ("Cost", "Source", "Differs", "Fails when")
"""The labelled parts that a page shows, in their order."""


def escaped(text: str) -> str:
    """Text in which Markdown finds no markup of its own, except between backticks; papers become links.

    >>> print(escaped("Σ_j w_ij `a_b` in (0, 1), 2 * 3, arXiv 1234.56789"))
    Σ\\_j w\\_ij `a_b` in (0, 1), 2 \\* 3, [arXiv 1234.56789](https://arxiv.org/abs/1234.56789)
    """
    parts = re.split(r"(`[^`]*`)", text)
    plain = (re.sub(r"([_*\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    return linked("".join(itertools.chain(*itertools.zip_longest(plain, parts[1::2], fillvalue=""))))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |\n" for row in lines
    )


def labelled(made: object) -> dict[str, str]:
    """The labelled parts of a docstring, such as "Cost" and "Fails when", each on one line."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(made) or "").splitlines():
        begins = LABEL.match(line)
        if begins:
            name, found[begins[1]] = begins[1], begins[2]
        elif name and line.startswith("    "):
            found[name] += " " + line.strip()
        else:
            name = ""
            if " Cost: " in line:  # on one line with the sentence before it
                found["Cost"] = line.partition(" Cost: ")[2]
    return found


def about(made: object, *, first: bool = True, labels: Iterable[str] = PARTS) -> str:
    """What a docstring says in sentences, equations and labelled parts; without its options and examples."""
    body = (inspect.getdoc(made) or "").split("\n\n")[1:]
    parts = [escaped(summary(made))] if first else []
    for paragraph in body:
        if not LABEL.match(paragraph) and not paragraph.startswith(">>>"):
            parts.append(block(paragraph) if is_equation(paragraph) else escaped(" ".join(paragraph.split())))
    found = labelled(made)
    parts += [under(label, escaped(found[label])) for label in labels if label in found]
    return "\n\n".join(parts) + "\n"


def options_table(factory: Callable[..., Any]) -> str:
    """The options of a factory with their defaults and bounds; empty if it has none."""
    rows = [(f"`{one.name}`", escaped(one.allowed), _default(one), begun(one.doc)) for one in options_of(factory)]
    return table(("option", "allowed", "default", "meaning"), rows) if rows else ""


def begun(text: str) -> str:
    """A text for Markdown, with a capital at its beginning."""
    return escaped(capital(text))


def _default(option: Option) -> str:
    if option.needed:
        return "required"
    return f"`{option.default!r}`" if not isinstance(option.default, str) else f'`"{option.default}"`'
