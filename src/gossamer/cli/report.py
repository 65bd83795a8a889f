"""`gossamer report`: several runs on one page."""

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json
from gossamer.errors import ConfigError
from gossamer.record.progress import echo, printable

log = logging.getLogger("gossamer")


def command(
    folders: Annotated[tuple[Path, ...], Parameter(name="RUN")],
    /,
    *,
    out: Path = Path("report.html"),
    json: Json = False,
) -> None:
    """Writes one page with the table and the curves of several runs, priced on the networks of the first.

    Args:
        folders: run folders
        out: the page (default: report.html)

    Raises: ConfigError for a page that does not end in .html, which could be a run's own file.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"--out got '{out}' but the page is HTML, and replaces what is there; name a file that ends in .html"
        )
    from gossamer.run.config.document import load_run

    documents = [load_run(folder) for folder in folders]  # a folder without a run is refused before torch is imported
    from gossamer.data.settings import passes_warning
    from gossamer.report.page.page import write_report
    from gossamer.run.config.run_file import parse

    runs = dict(zip(_labels(folders, documents), folders, strict=True))
    words = shlex.join(["gossamer", "report", *map(str, folders), "--out", str(out)])
    rows = write_report(runs, out, parse(documents[0]).network, command=words)
    for row in rows:
        if repeats := passes_warning(row["passes"]):
            log.warning("%s: %s", row["method"], repeats)
    print_runs(runs, rows, out, json=json)


def _labels(folders: Sequence[Path], documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the runs, or those of their folders, whichever differ; names that make runs of other settings seeds of one
    method are not taken.
    """
    from gossamer.report.table import seeds_are_alike

    names = [str(document.get("name", folder.name)) for folder, document in zip(folders, documents, strict=True)]
    besides = [{key: one for key, one in run.items() if key not in ("name", "seed", "network")} for run in documents]
    choices = [names] if seeds_are_alike(names, besides) else []
    # A name that is not UTF-8 can be on no page.
    choices += [printable(folder.name) for folder in folders], [printable(str(folder)) for folder in folders]
    return next((labels for labels in choices if len({*labels}) == len(folders)), choices[-1])


def print_runs(
    runs: Mapping[str, Path], rows: Sequence[Mapping[str, Any]], page: Path, *, json: bool, **more: Path | None
) -> None:
    """Prints the table of some runs and where their page is, with `more` files of the same comparison, or all of it as JSON."""
    from gossamer.report.page.page import table_of

    files = {"report": page, "table": table_of(page), **more}
    if json:
        shown = [
            {"folder": folder, **{key: value for key, value in row.items() if not key.startswith("loss_at_")}}
            for folder, row in zip(runs.values(), rows, strict=True)
        ]
        print_json({**files, "runs": shown})
        return
    from rich.console import Console

    from gossamer.report.table import number_text, over_seeds, render_table, stages_notes

    console = Console()
    shown = render_table(rows, console.width if console.is_terminal else 120)
    Console(width=1000).print(shown)  # a terminal continues what is too long on a further line
    for method, losses, mean, deviation in over_seeds(rows):
        if len(losses) > 1:
            each = ", ".join(number_text(loss, ".4f") for loss in losses)
            sound = (
                f"{number_text(mean, '.4f')}, standard deviation {number_text(deviation, '.4f')}"
                if math.isfinite(mean)
                else "not finite"
            )
            echo(f"{method}: {sound} over {len(losses)} seeds ({each})")
    for sentence in stages_notes(rows):
        echo(sentence)
    for name, file in files.items():
        if file is not None:
            echo(f"{name}: {file}")
