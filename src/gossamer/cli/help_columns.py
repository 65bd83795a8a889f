"""How `--help` lays out its lists: names on the left, and what they mean in its own column, as wide as the terminal."""

import io
import textwrap
from typing import TYPE_CHECKING, Any

from cyclopts import Group
from cyclopts.help.formatters.plain import PlainFormatter

from gossamer.record.progress import echo

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions, RenderableType

_TITLES = (
    "Options",
    "Model and text",
    "Goal",
    "Machines",
    "What is tried",
    "Run file",
    "Race",
    "Continue",
    "Several machines",
    "Output",
)
OPTIONS = {title: Group(title, sort_key=place) for place, title in enumerate(_TITLES)}
"""The groups of options by title, in the order in which `--help` lists them; a verb has a few of them."""
_WIDEST_NAME = 20
_NARROWEST_TEXT = 30


class HelpColumns(PlainFormatter):
    """The plain text of cyclopts in two columns; line breaks of docstrings are no line breaks here."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        """Prints one list of verbs, arguments or options."""
        rows = [
            (", ".join((*entry.display_labels_with_metavar,)), _words(entry.description), entry.choices, entry.required)
            for entry in panel.entries
        ]
        if not rows:
            return
        left = 2 + min(_WIDEST_NAME, max(len(name) for name, *_ in rows)) + 2
        lines = [f"{panel.title}:"]
        for name, text, choices, required in rows:
            if choices:
                text += f" [choices: {', '.join(choices)}]"
            if required:
                text += " [required]"
            wrapped = textwrap.wrap(text, max(_NARROWEST_TEXT, console.width - left), break_on_hyphens=False) or [""]
            head = f"  {name}"
            if len(head) + 2 > left:
                lines.append(head)
                head = ""
            lines += [f"{head:{left}}{wrapped[0]}".rstrip(), *(" " * left + line for line in wrapped[1:])]
        echo("\n".join([*lines, ""]), file=console.file)


def _words(description: "RenderableType | Any") -> str:
    """A description on one line; cyclopts may have wrapped it in an object of rich."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=10_000, color_system=None, highlight=False).print(description or "", end="")
    return " ".join(out.getvalue().split())
