"""`gossamer init`: run files to start from."""

import itertools
import re
from pathlib import Path
from shlex import quote
from typing import Annotated

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json
from gossamer.cli.tables import print_sentence

EXAMPLES = Path(__file__).parents[1] / "configs"
"""The example run files, experiment files and network files, as they are installed."""


def command(
    folder: Path = Path("configs"),
    /,
    *,
    listed: Annotated[bool, Parameter(name="--list")] = False,
    json: Json = False,
) -> None:
    """Writes commented run files, experiment files and a network file to start from; a file that exists is kept as it is.

    Args:
        folder: folder to write them to (default: configs)
        listed: show what there is, and write nothing
    """
    names = [path.relative_to(EXAMPLES) for path in sorted(EXAMPLES.rglob("*.toml"))]
    about = {str(name): _about(EXAMPLES / name) for name in names}
    written = [] if listed else [str(name) for name in names if _written(name, folder)]
    if json:
        print_json({"folder": folder, "files": about, "written": written})
        return
    for name, sentence in about.items():
        kept = "" if listed or name in written else " (exists, and was kept)"
        print_sentence(f"{folder / name}{kept}: {sentence}", 2)
    if not listed:
        file = quote(str(folder / "gasloc.toml"))
        print_sentence(f"next: gossamer check {file}, then gossamer simulate {file}", 2)


def _about(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"[.:;](?= |$)", " ".join(line[2:] for line in lines), maxsplit=1)[0]


def _written(name: Path, folder: Path) -> bool:
    """Writes one of the examples; False when there is such a file already."""
    from gossamer.record.whole_files import atomic_write, make_folder

    path = folder / name
    if path.exists():
        return False
    make_folder(path.parent)
    atomic_write(path, (EXAMPLES / name).read_bytes())  # a part of it would count as a file of the user
    return True
