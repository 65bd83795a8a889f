"""`gossamer report`: several runs on one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json

if TYPE_CHECKING:
    from gossamer.network.links import Network

__all__ = ["command", "publish", "show"]


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
    """
    from gossamer.run.config import parse
    from gossamer.run.document import load_run

    documents = [load_run(folder) for folder in folders]
    runs = {folder.name: folder for folder in folders}
    show(runs, publish(runs, out, parse(documents[0]).network), out, json=json)


def publish(runs: Mapping[str, Path], page: Path, networks: "Mapping[str, Network]") -> list[dict[str, Any]]:
    """Writes the page, its table and its pictures; returns the rows of the table."""
    from gossamer.report.page import write_pages

    return write_pages(runs, page, networks)


def show(
    runs: Mapping[str, Path], rows: Sequence[Mapping[str, Any]], page: Path, *, json: bool, **more: Path | None
) -> None:
    """Prints the table of some runs and where their page is, with `more` files of the same comparison, or all of it as JSON."""
    if json:
        shown = [
            {"folder": folder, **{key: value for key, value in row.items() if not key.startswith("loss_at_")}}
            for folder, row in zip(runs.values(), rows, strict=True)
        ]
        print_json({"report": page, **more, "runs": shown})
        return
    from rich.console import Console

    from gossamer.report.table import over_seeds, render_table

    console = Console()
    Console(width=None if console.is_terminal else 120).print(render_table(rows))
    for method, losses, mean, deviation in over_seeds(rows):
        if len(losses) > 1:
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{method}: {mean:.4f} ± {deviation:.4f} over {len(losses)} seeds ({each})")
    for name, file in {"report": page, **more}.items():
        if file is not None:
            print(f"{name}: {file}")
