"""`gossamer report`: several runs on one page."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from gossamer.network.links import Network

__all__ = ["command", "publish"]


def command(folders: Annotated[tuple[Path, ...], Parameter(name="RUN")], /, *, out: Path = Path("report.html")) -> None:
    """Writes one page with the table and the curves of several runs, priced on the networks of the first.

    Args:
        folders: run folders
        out: the page (default: report.html)
    """
    from gossamer.run.config import parse
    from gossamer.run.document import load_run

    documents = [load_run(folder) for folder in folders]
    publish({folder.name: folder for folder in folders}, out, parse(documents[0]).network)


def publish(runs: Mapping[str, Path], page: Path, networks: "Mapping[str, Network]") -> list[dict[str, Any]]:
    """Writes the page, its table and its pictures, and prints the table; returns its rows."""
    from rich.console import Console

    from gossamer.report.page import write_pages
    from gossamer.report.table import over_seeds, render_table

    rows = write_pages(runs, page, networks)
    console = Console()
    Console(width=None if console.is_terminal else 120).print(render_table(rows))
    for method, losses, mean, deviation in over_seeds(rows):
        if len(losses) > 1:
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{method}: {mean:.4f} ± {deviation:.4f} over {len(losses)} seeds ({each})")
    print(f"report: {page}")
    return rows
