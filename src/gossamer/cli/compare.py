"""`gossamer compare`: all variants of an experiment file side by side."""

import logging
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from gossamer.cli.report import print_runs
from gossamer.cli.run_file_options import (
    ALL_SAVE,
    Continues,
    ExperimentFile,
    Overrides,
    check_experiment,
    experiment_and_folder,
    runs_at_a_time,
    whole_numbers,
)
from gossamer.cli.watch import WATCHABLE, Watchable
from gossamer.errors import ConfigError, MissingPackageError
from gossamer.record.progress import echo
from gossamer.stop_signals import leaving

if TYPE_CHECKING:
    from gossamer.report.figures import Figure
    from gossamer.report.results import PointResult
    from gossamer.run.config.experiment_file import Point
    from gossamer.run.experiments.processes import RunEnd

log = logging.getLogger("gossamer")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Which runs are not trained again."""

    resume: Continues[bool] = False
    """keep the finished runs, continue those that were stopped, and train the others"""
    reuse: Continues[Path | None] = None
    """copy runs of the same settings and seeds from this folder of a gossamer tune or compare, and train the others"""


_ALL_ANEW = Earlier()


def command(
    file: ExperimentFile = None,
    /,
    *,
    overrides: Overrides = (),
    out: Path | None = None,
    seeds: str = "",
    scale: str = "",
    jobs: int = 1,
    earlier: Earlier = _ALL_ANEW,
    output: Watchable = WATCHABLE,
) -> None:
    """Simulates every variant of an experiment file, and writes their table, report and figure.

    Args:
        out: folder of all runs (default: runs/ and the name of the file)
        seeds: run every variant with each of these seeds, such as 0,1,2
        scale: take the sizes of the file's [scale.NAME]
        jobs: runs at a time, each in its own process (default: one, in this process)
    """
    with experiment_and_folder(file, overrides, out, scale, "such as configs/demo.toml") as (document, out):
        from gossamer.report.figures import check_figure
        from gossamer.report.page.page import write_report
        from gossamer.report.results import PointResult
        from gossamer.report.table import has_diverged
        from gossamer.run.config.experiment_file import figure, overruled_settings, points

        jobs = runs_at_a_time(jobs)
        asked = figure(document)
        runs = points(document, seeds=whole_numbers("--seeds", seeds) if seeds else [], scale=scale)
        folders = folders_of(runs, out, resume=earlier.resume)
        if asked is not None:
            check_figure(runs, asked)
        if sentence := overruled_settings(document, scale=scale):
            log.warning("%s", sentence)
        doubts = check_experiment(run.config for run in runs)
        ended = trained(runs, folders, out, jobs=jobs, earlier=earlier, output=output)
        page, options = out / "report.html", {"--out": out, "--seeds": seeds, "--scale": scale}
        words = ["gossamer", "compare", file, *(word for one in options.items() if one[1] for word in one)]
        words += [word for one in overrides for word in ("--set", one)]
        lines = [ended[run.label] for run in runs]
        lost = [run.label for run, line in zip(runs, lines, strict=True) if line is not None and has_diverged(line.row)]
        rows = write_report(folders, page, None, command=shlex.join(map(str, words)), notes=doubts, lost=lost)
        outcomes = [
            PointResult(run.method, run.at, run.seed, row, line and line.origin)
            for run, row, line in zip(runs, rows, lines, strict=True)
        ]
        drawn, numbers = _write_figure(outcomes, asked, out)
        print_runs(folders, rows, page, json=output.json, figure=drawn, numbers=numbers)


def trained(
    runs: "Sequence[Point]",
    folders: Mapping[str, Path],
    out: Path,
    *,
    jobs: int,
    earlier: Earlier,
    output: Watchable,
    enough: Callable[[], bool] = lambda: False,
) -> "dict[str, PointResult | None]":
    """Trains the runs of an experiment, and shows their progress; see `gossamer.run.experiments.compare.train_all`."""
    from gossamer.record.locks import locked
    from gossamer.run.experiments.compare import train_all

    # A second comparison would remove and retrain the runs that are in progress in the first.
    with locked(out, None), output.watching(out), output.showing() as terminal, leaving(ALL_SAVE) as asked:

        def follow(run: "Point") -> None:
            terminal.follow(run.label, folders[run.label], run.config.record.print_every)

        def tell(run: "Point", ended: "RunEnd") -> None:
            terminal.ended(run.label)
            if ended.error:  # a diverging setting is a result of the comparison, and the others still run
                echo(f"gossamer: {run.label}: {ended.error}", file=sys.stderr)

        return train_all(
            runs,
            folders,
            out / "outcomes.jsonl",
            jobs=jobs,
            resume=earlier.resume,
            reuse=earlier.reuse,
            began=follow,
            on_end=tell,
            enough=enough,
            asked=asked.is_set,
        )


def folders_of(runs: "Sequence[Point]", out: Path, *, resume: bool) -> dict[str, Path]:
    """The folder of each run by its label. Raises ConfigError for one that is shared, or already exists."""
    from gossamer.run.config.experiment_file import folder_name

    if (out / "run.toml").exists():
        raise ConfigError(
            f"'{out}' is the folder of a run, and a comparison has one of its own; name another with --out"
        )
    folders = {run.label: out / folder_name(run.label) for run in runs}
    many = Counter(folders.values())
    if alike := [run.label for run in runs if many[folders[run.label]] > 1][:4]:
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


def _write_figure(
    outcomes: "Sequence[PointResult]", asked: "Figure | None", out: Path
) -> tuple[Path | None, Path | None]:
    """Writes the outcomes, and the figure that the experiment asks for with its numbers; returns the files of these two."""
    from gossamer.record.whole_files import atomic_write
    from gossamer.report.figures import draw_figure, figure_table
    from gossamer.report.results import read_results, result_lines
    from gossamer.run.config.experiment_file import place_in_experiment

    file, here = out / "outcomes.jsonl", {place_in_experiment(one) for one in outcomes}
    of_others = [one for one in read_results(file) if place_in_experiment(one) not in here]  # such as of more seeds
    atomic_write(file, result_lines([*of_others, *outcomes]).encode())
    if asked is None:
        return None, None
    drawn, numbers = out / "figure.svg", out / "figure.md"
    try:
        atomic_write(numbers, figure_table(outcomes, asked).encode())
    except MissingPackageError as error:
        echo(f"gossamer: {error}", file=sys.stderr)
        return None, None
    try:
        atomic_write(drawn, draw_figure(outcomes, asked))
    except MissingPackageError as missing:
        log.warning("%s", missing)
        return None, numbers
    return drawn, numbers
