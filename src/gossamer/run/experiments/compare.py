"""Training the runs of a comparison, several at a time, each with a line in `outcomes.jsonl` as soon as it has ended."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from gossamer.errors import ConfigError, DataError
from gossamer.record.jsonl import records
from gossamer.record.origin import Origin, origin
from gossamer.record.progress import say
from gossamer.record.whole_files import Appender, atomic_write, make_folder
from gossamer.report.reading.runs import diverged_row
from gossamer.report.results import PointResult, read_results, result_lines
from gossamer.report.table import summary_rows
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.stability import few_rounds_warning
from gossamer.run.bookkeeping.finished import is_evaluated, is_finished, measures_alike
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import Point, place_in_experiment
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.config.run_file import digest, dump, parse
from gossamer.run.experiments.processes import RunEnd, RunPool
from gossamer.run.experiments.shared_start import shared_trunks, stands_at_its_trunk
from gossamer.settings.schema import Records


def doubts_about(runs: Iterable[ResolvedRun]) -> list[str]:
    """What to know before runs are compared, in sentences: methods whose outer momentum needs more rounds than they have."""
    warnings = [
        few_rounds_warning(one.method.rule, one.rounds)
        for one in runs
        if one.kind == "rounds" and isinstance(one.method, Method)
    ]
    return list(dict.fromkeys(sentence for sentence in warnings if sentence is not None))


@with_config(ConfigDict(extra="ignore"))
class _Ended(TypedDict):
    """The common fields of the lines of a search and of a comparison."""

    origin: NotRequired[Origin | None]


_ENDED = Records[_Ended](_Ended)


def train_all(
    runs: Sequence[Point],
    folders: Mapping[str, Path],
    file: Path,
    *,
    jobs: int = 1,
    resume: bool = False,
    reuse: Path | None = None,
    began: Callable[[Point], None],
    on_end: Callable[[Point, RunEnd], None],
    enough: Callable[[], bool] = lambda: False,
    asked: Callable[[], bool] = lambda: False,
) -> dict[str, PointResult | None]:
    """Trains the runs of an experiment into their folders, by label; a diverged run is a result, and the others
    continue.

    Runs that are compared with each other are scheduled together: by point of a sweep, then by seed, so that an early
    stop leaves complete comparisons.

    Args:
        file: receives a line for each ended run, in the order of their ends, after existing lines of other runs.
        jobs: the most runs at a time, each in its own process with its share of the cores; one runs here.
        resume: keep the finished runs; those that were stopped continue, and the others start.
        reuse: a folder of `gossamer tune` or of another comparison, whose finished runs of these settings and seeds are
            copied.
        began, on_end: called for each run that begins here, and for each that ends.
        enough: called after each end; once true, no further run begins.
        asked: whether to stop, once the runs in progress have saved after their round.
    Returns: the line of each run, by label; None for a finished run without one.
    Raises: ConfigError when a finished run had other settings, or there is none to reuse; DataError for an invalid
        line, and for a finished run whose files lack data of its line.
    """
    lines = {place_in_experiment(one): one for one in read_results(file)} if file.exists() else {}
    trunks = dict(zip((run.label for run in runs), shared_trunks([run.config for run in runs]), strict=True))
    over = dict[str, PointResult | None]()
    if resume:
        begun = [run for run in runs if not (trunks[run.label] and stands_at_its_trunk(run.config, folders[run.label]))]
        over |= _finished(begun, folders, file, lines)
    if reuse:
        over |= _copied([run for run in runs if run.label not in over], folders, reuse, some=not resume)
    waiting = {run.label: run for run in _in_turn(runs) if run.label not in over}
    jobs = min(jobs, max(1, len(waiting)))  # so that no cores are reserved for runs that do not exist
    origin("", None)  # caches the commit before the first run
    make_folder(file.parent)
    places = {place_in_experiment(run) for run in runs}
    of_others = [line for place, line in lines.items() if place not in places]
    gone = (run for run in waiting.values() if not folders[run.label].exists())
    again = {run.label: line for run in gone if (line := _line_of(run, lines.get(place_in_experiment(run))))}

    def write_all() -> None:
        ended = (line for line in {**again, **over}.values() if line is not None)
        atomic_write(file, result_lines([*of_others, *ended]).encode())

    write_all()  # with the line of a run whose folder is gone, until that run has ended again: it may record hours
    if again:
        say(
            f"{len(again)} of {len(runs)} runs have a line in '{file}' and no folder, and train again, "
            f"'{next(iter(again))}' first; bring the folders back to keep them"
        )
    pool = RunPool(jobs, began=lambda label: began(waiting[label]), asked=asked)
    with contextlib.closing(Appender(file)) as written, pool as apart:
        for label, run in waiting.items():
            trunk = file.parent / "trunks" / trunks[label] if trunks[label] and jobs == 1 else None
            apart.add(label, run.config, folders[label], trunk)
        while apart.busy:
            for label, ended in apart.ended():
                run = waiting[label]
                computed = origin(digest(run.config), ended.seconds, ended.text)
                over[label] = line = _result(run, folders, computed, diverged=ended.loss is None)
                written.write(result_lines([line]))
                on_end(run, ended)
            if enough():
                apart.drop()
    if again:
        write_all()  # a run that has ended again has two lines until here
    return over


def _finished(
    runs: Iterable[Point], folders: Mapping[str, Path], file: Path, lines: Mapping[Any, PointResult]
) -> dict[str, PointResult | None]:
    """The runs that are finished in their folders, by label, each with its line; None without one. Raises: DataError."""
    over = dict[str, PointResult | None]()
    for run in runs:
        folder, line = folders[run.label], _line_of(run, lines.get(place_in_experiment(run)))
        if is_finished(settings_of(run.config), folder):
            _adopt(run, folders)
            over[run.label] = None if line is None else _as_recorded(run, folders, line)
        elif line is not None and line.row["loss"] is not None and (folder / "run.toml").exists():
            raise DataError(
                f"'{folder}' has ended, as '{file}' says, and its metrics lack the last validation; bring them back, or remove "
                "that folder to train the run again"
            )
    return over


def _result(
    run: Point, folders: Mapping[str, Path], run_origin: Origin | None, *, diverged: bool = False
) -> PointResult:
    """The line of a run that has ended in its folder, priced on its own networks."""
    (row,) = summary_rows({run.label: folders[run.label]}, None)
    return PointResult(run.method, run.at, run.seed, diverged_row(row) if diverged else row, run_origin)


def _line_of(run: Point, line: PointResult | None) -> PointResult | None:
    """The run's line, if left by exactly this run; None for one of other settings or without an origin."""
    if line is None or line.origin is None or line.origin["digest"] != digest(run.config):
        return None
    return line


def _as_recorded(run: Point, folders: Mapping[str, Path], line: PointResult) -> PointResult:
    """The recomputed line of a finished run. Raises: DataError where its trace is missing, or lacks messages counted in
    the line.
    """
    recomputed = _result(run, folders, line.origin)
    had, has = line.row["sent_bytes"], recomputed.row["sent_bytes"]
    if had is not None and (has is None or has < had):
        raise DataError(
            f"'{folders[run.label]}' has sent {had:,.0f} bytes per worker, as its line in outcomes.jsonl says, and its trace has "
            f"{has or 0:,.0f}; bring the trace back, or remove that folder to train the run again"
        )
    return recomputed


def _copied(
    missing: Sequence[Point], folders: Mapping[str, Path], reuse: Path, *, some: bool
) -> dict[str, PointResult]:
    """Copies runs that are finished in a folder of `reuse`; returns their lines, by label.

    Raises: ConfigError when there are no outcomes, or when `some` requires a reusable run and there is none.
    """
    if not (outcomes := reuse / "outcomes.jsonl").is_file():
        raise ConfigError(
            f"--reuse got '{reuse}', which has no outcomes.jsonl; name the --out of a gossamer tune or compare"
        )
    computed = {one["digest"]: one for _, line in records(outcomes, _ENDED) if (one := line.get("origin"))}
    there = dict[str, list[tuple[Path, RunSettings]]]()
    for file in sorted([*reuse.glob("*/run.toml"), *reuse.glob("*/*/run.toml")]):
        recorded = settings_of(parse(load_document(file)))
        there.setdefault(recorded.digest, []).append((file.parent, recorded))
    taken = list[tuple[Point, Origin]]()
    for run in missing:
        settings = settings_of(run.config)
        alike = (place for place, recorded in there.get(settings.digest, []) if measures_alike(settings, recorded))
        place = next((place for place in alike if is_evaluated(settings, place)), None)
        if place is not None and settings.digest in computed:
            _copy(place, folders[run.label])
            _adopt(run, folders)
            taken.append((run, computed[settings.digest]))
    if some and not taken:
        raise ConfigError(
            f"none of the {len(missing)} runs is finished in '{reuse}' with the same settings, seed and validations; gossamer "
            "tune validates the mean model once, after the last round: set run.eval_every = 0 and "
            "run.eval_workers = false, or leave --reuse out"
        )
    say(f"{len(taken)} of {len(missing)} runs are copied from '{reuse}'")
    return {run.label: _result(run, folders, run_origin) for run, run_origin in taken}


def _adopt(run: Point, folders: Mapping[str, Path]) -> None:
    """Sets a finished run's name and networks to those of this experiment."""
    file = folders[run.label] / "run.toml"
    there = parse(load_document(file))
    if (there.name, there.network) != (run.config.name, run.config.network):
        atomic_write(file, dump(replace(there, name=run.config.name, network=run.config.network)).encode())


def _copy(place: Path, here: Path) -> None:
    """Copies a run to another folder, such that a partial copy is never mistaken for a run."""
    part = here.with_name(f"{here.name}.part")
    for old in (part, here):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(place, part)
    part.rename(here)


def _in_turn(runs: Sequence[Point]) -> list[Point]:
    """The runs, the first point of each variant before the second of any, and the first seed there before the second."""
    points, seeds = dict[str, list[str]](), [*dict.fromkeys(run.seed for run in runs)]
    places = []
    for run in runs:
        point_order, here = points.setdefault(run.method, []), place_in_experiment(run)[1]
        point_order += [] if here in point_order else [here]
        places.append((point_order.index(here), seeds.index(run.seed)))
    return [run for _, run in sorted(zip(places, runs, strict=True), key=lambda pair: pair[0])]
