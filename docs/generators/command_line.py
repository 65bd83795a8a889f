"""The reference of the command line: every verb with its arguments, as `--help` has them."""

import inspect
import io
import re
from collections.abc import Iterator

from rich.console import Console

from generators.prose import escaped, table
from gossamer.cli import VERBS, app

_HEAD = """# Command line

```
gossamer VERB [ARGUMENTS] [OPTIONS]
```

Every verb ends with code 0, or with code 2 and one sentence for a mistake. `gossamer --help` lists the verbs.
`gossamer VERB --help` prints what this page has about the verb.
"""


def page() -> str:
    """The page, from the parser itself."""
    rows = [(f"[`{verb}`](#{verb})", escaped(words)) for verb, words in VERBS.items()]
    return "\n".join([_HEAD, table(("verb", "what it does"), rows), *map(_verb, VERBS)])


def _verb(verb: str) -> str:
    rows = [(f"`{name}`", escaped(meaning)) for name, meaning in arguments(verb)]
    body = (inspect.getdoc(app[verb].default_command) or "").partition("Args:")[0].split("\n\n")[1:]
    parts = [f"## {verb}\n", escaped(VERBS[verb]) + "\n", *(escaped(" ".join(one.split())) + "\n" for one in body)]
    return "\n".join(parts) + ("\n" + table(("argument", "meaning"), rows) if rows else "")


def arguments(verb: str) -> Iterator[tuple[str, str]]:
    """The arguments that the help of a verb lists, with their meaning."""
    shown = io.StringIO()
    app.help_print([verb], console=Console(file=shown, width=10_000))
    found: list[list[str]] = []
    for line in shown.getvalue().splitlines():
        if begins := re.match(r"  (\S.*?)(?:  +(\S.*))?$", line):
            found.append([begins[1], begins[2] or ""])
        elif found and line.startswith("   "):
            found[-1][1] = line.strip()
    yield from ((name, meaning) for name, meaning in found)
