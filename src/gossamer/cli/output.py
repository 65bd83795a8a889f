"""The options that verbs with results share: `--json`, `--quiet`, and where their results go.

Results go to stdout, everything else to stderr. With `--json` stdout has one line: an object, whose keys `docs/json.md` explains.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gossamer.cli.help_columns import OPTIONS
from gossamer.errors import ConfigError
from gossamer.record.progress import echo, printable

if TYPE_CHECKING:
    from gossamer.report.terminal import Terminal

Json = Annotated[
    bool,
    Parameter(
        name="--json", help="print the result as one JSON object on one line (docs/json.md)", group=OPTIONS["Output"]
    ),
]
"""The output of a verb that shows no progress."""


@Parameter(name="*", group=OPTIONS["Output"])
@dataclass(frozen=True, kw_only=True)
class Output:
    """How a verb that takes a while says what it found."""

    json: Json = False
    quiet: Annotated[bool, Parameter(help="print the result only: no progress")] = False

    def silenced(self) -> AbstractContextManager[None]:
        """A context without progress, if that was asked for, or the result is for a program."""
        from gossamer.record.progress import quieted

        return quieted(self.silent)

    @property
    def silent(self) -> bool:
        """Whether no progress is printed."""
        return self.quiet or self.json

    @contextmanager
    def showing(self) -> "Iterator[Terminal]":
        """A context in which the terminal shows the progress of the runs reported to it, unless progress is not to be printed."""
        from gossamer.report.terminal import Terminal

        with self.silenced(), Terminal() as terminal:
            yield terminal


PLAIN = Output()
"""Text, with progress."""


def must_be_new_file(out: Path) -> None:
    """Refuses a file that is there, and makes the folder of one that is not, before the work whose result it is for.

    Raises: ConfigError; DiskError for a folder that cannot be made, or in which nothing can be written.
    """
    from tempfile import TemporaryFile

    from gossamer.record.whole_files import make_folder, writing

    if out.exists():
        raise ConfigError(f"'{out}' already exists; name another file with --out, or remove it")
    make_folder(out.parent)
    with writing(out), TemporaryFile(dir=out.parent):
        pass


@contextmanager
def working(sentence: str) -> Iterator[None]:
    """Shows on a terminal what is in progress, while the body runs."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(printable(sentence))):
        yield


def print_json(result: Any) -> None:
    """Prints a result as JSON on one line; a number that is not finite becomes null."""
    from gossamer.record.folder import finite

    echo(json.dumps(finite(json_value(result)), allow_nan=False))


def json_value(value: Any) -> Any:
    """A value as dicts, lists, numbers and texts only.

    >>> from gossamer.network.links import Site
    >>> json_value({"where": Path("runs"), 3: (Site(workers=(0, 1)),)})["3"][0]["workers"]
    [0, 1]
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return json_value(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if is_dataclass(value) and not isinstance(value, type):
        return json_value(asdict(value))
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    if isinstance(value, Path):
        return str(value)
    return value
