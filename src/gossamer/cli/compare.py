"""`gossamer compare`: all variants of an experiment file side by side."""

import logging
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli.report import publish, show
from gossamer.cli.run_file import File, Overrides, imported_parts, whole_numbers
from gossamer.cli.simulate import train_here
from gossamer.cli.watch import WATCHABLE, Watchable
from gossamer.errors import ConfigError, MissingPackageError, TrainingError

if TYPE_CHECKING:
    from gossamer.report.figures import Figure
    from gossamer.report.reach import PointResult
    from gossamer.report.terminal import Terminal
    from gossamer.run.experiment import Point

__all__ = ["command"]

log = logging.getLogger("gossamer")


def command(
    file: File = None, /, *, overrides: Overrides = (), out: Path | None = None, seeds: str = "", scale: str = "",
    resume: bool = False, output: Watchable = WATCHABLE,
) -> None:  # fmt: skip
    """Simulates every variant of an experiment file, and writes their table, report and figure.

    Args:
        out: folder of all runs (default: runs/ and the name of the file)
        seeds: run every variant with each of these seeds, such as 0,1,2
        scale: take the sizes of the file's [scale.NAME]
        resume: keep the finished runs, and train the others
    """
    if file is None:
        raise ConfigError(
            "no experiment file was given (got none, need one); name a TOML file such as configs/demo.toml"
        )
    from gossamer.report.reach import PointResult
    from gossamer.run.document import load, settings
    from gossamer.run.experiment import figure, points
    from gossamer.run.settle import settle

    document = load(file, settings([*overrides]))
    asked = figure(document)
    runs = points(document, seeds=whole_numbers("--seeds", seeds) if seeds else [], scale=scale)
    out = out or Path("runs") / "-".join([file.stem, *([scale] if scale else [])])
    folders = _folders(runs, out, resume=resume)
    told = set[str]()
    for run in runs:  # before the first of them is trained
        parts = imported_parts(run.config, told)
        told |= {code.name for code in parts.codes}
        settle(run.config, parts)
    try:
        with output.watching(out), output.showing() as terminal:
            _train_all(runs, folders, terminal, resume=resume)
        page = out / "report.html"
        rows = publish(folders, page, runs[0].config.network, _words(file, out, seeds, scale))
        outcomes = [PointResult(run.method, run.at, run.seed, row) for run, row in zip(runs, rows, strict=True)]
        drawn, numbers = _write_figure(outcomes, asked, out)
        show(folders, rows, page, json=output.json, figure=drawn, numbers=numbers)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command with --resume keeps the finished runs") from None


def _words(file: Path, out: Path, seeds: str, scale: str) -> str:
    """The command that compares these runs, for their page."""
    options = {"--out": out, "--seeds": seeds, "--scale": scale}
    return shlex.join(
        ["gossamer", "compare", str(file), *(str(w) for key, own in options.items() if own for w in (key, own))]
    )


def _folders(runs: "Sequence[Point]", out: Path, *, resume: bool) -> dict[str, Path]:
    """The folder of each run by its label. Raises ConfigError for one that is shared, or already exists."""
    from gossamer.run.experiment import folder_name

    folders = {run.label: out / folder_name(run.label) for run in runs}
    if alike := [run.label for run in runs if [*folders.values()].count(folders[run.label]) > 1]:
        raise ConfigError(
            f"the labels {alike} would share the folder '{folders[alike[0]]}'; set labels that differ in a letter or digit"
        )
    for label, folder in folders.items():
        if not resume and folder.exists():
            raise ConfigError(
                f"'{folder}' of variant '{label}' already exists; "
                "name another folder with --out, remove it, or continue with --resume"
            )
    return folders


def _train_all(
    runs: "Sequence[Point]", folders: Mapping[str, Path], terminal: "Terminal", *, resume: bool
) -> None:  # fmt: skip
    """Trains run after run; with `resume` only unfinished runs, which start again."""
    from gossamer.run.finished import is_finished

    for run in runs:
        folder = folders[run.label]
        if resume and is_finished(run.config, folder):
            continue
        if (folder / "run.toml").exists():
            shutil.rmtree(folder)
        terminal.follow(run.label, folder, run.config.record.print_every)
        try:
            train_here(run.config, folder)
        except TrainingError as error:  # a diverging setting is a result of the comparison, and the others still run
            print(f"gossamer: {run.label}: {error}", file=sys.stderr)


def _write_figure(
    outcomes: "Sequence[PointResult]", asked: "Figure | None", out: Path
) -> tuple[Path | None, Path | None]:
    """Writes the outcomes, and the figure that the experiment asks for with its numbers; returns the files of these two."""
    from gossamer.record.files import atomic_write
    from gossamer.report.figures import draw_figure, lines, table

    atomic_write(out / "outcomes.jsonl", lines(outcomes).encode())
    if asked is None:
        return None, None
    drawn, numbers = out / "figure.svg", out / "figure.md"
    try:
        atomic_write(numbers, table(outcomes, asked).encode())
    except MissingPackageError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return None, None
    try:
        atomic_write(drawn, draw_figure(outcomes, asked))
    except MissingPackageError as missing:
        log.warning("%s", missing)
        return None, numbers
    return drawn, numbers
