"""Training the runs of a comparison, several at a time, each with a line in `outcomes.jsonl` as soon as it has ended."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gossamer.record.files import LineWriter, atomic_write, make_folder
from gossamer.record.origin import Origin, origin
from gossamer.report.results import PointResult, read_results, result_lines
from gossamer.report.table import summary_rows
from gossamer.run.apart import Apart, RunEnd
from gossamer.run.config import digest
from gossamer.run.experiment import Point, place_of
from gossamer.run.finished import is_finished
from gossamer.run.trunks import shared_trunks, stands_at_its_trunk

__all__ = ["train_all"]


def train_all(
    runs: Sequence[Point], folders: Mapping[str, Path], file: Path, *, jobs: int = 1, resume: bool = False,
    began: Callable[[Point], None], told: Callable[[Point, RunEnd], None],
) -> dict[str, Origin | None]:  # fmt: skip
    """Trains the runs of an experiment into their folders, by label; one that diverges is a result, and the others still run.

    Those that are compared with each other come together: point by point of a sweep, and there seed by seed. Whoever stops it has
    whole comparisons.

    Args:
        file: gets a line of each run that has ended, in the order of their ends.
        jobs: at most so many runs at a time, each in a process of its own with its share of the cores; one runs here.
        resume: keep the finished runs; the others start again.
        began, told: are called for each run that begins here, and for each that ends.
    Returns: what each run was computed by; None of a finished run without a line.
    Raises: ConfigError when a finished run had other settings, DataError for a line that is none.
    """
    known = {place_of(one): one for one in read_results(file)} if resume and file.exists() else {}
    kept, origins = list[PointResult](), dict[str, Origin | None]()
    trunks = dict(zip((run.label for run in runs), shared_trunks([run.config for run in runs]), strict=True))
    for run in runs if resume else ():
        if trunks[run.label] and stands_at_its_trunk(run.config, folders[run.label]):
            continue
        if is_finished(run.config, folders[run.label]):
            origins[run.label], line = None, known.get(place_of(run))
            if line is not None and line.origin is not None and line.origin["digest"] == digest(run.config):
                origins[run.label] = line.origin
                kept.append(line)
    waiting = {run.label: run for run in _in_turn(runs) if run.label not in origins}
    jobs = min(jobs, max(1, len(waiting)))  # a run has no use for the cores of one that does not exist
    origin("", None)  # asks which commit this is before the first run
    make_folder(file.parent)
    atomic_write(file, result_lines(kept).encode())
    with _Lines(file) as written, Apart(jobs, began=lambda label: began(waiting[label])) as apart:
        for label, run in waiting.items():
            trunk = file.parent / "trunks" / trunks[label] if trunks[label] and jobs == 1 else None
            apart.add(label, run.config, folders[label], trunk)
        while apart.busy:
            for label, ended in apart.ended():
                run = waiting[label]
                origins[label] = found = origin(digest(run.config), ended.seconds, ended.text)
                (row,) = summary_rows({label: folders[label]}, runs[0].config.network)
                written.write(PointResult(run.method, run.at, run.seed, row, found))
                told(run, ended)
    return origins


class _Lines(LineWriter):
    """Writes `outcomes.jsonl`."""

    def write(self, result: PointResult) -> None:
        """Appends one line."""
        self._file.write(result_lines([result]))


def _in_turn(runs: Sequence[Point]) -> list[Point]:
    """The runs, the first point of each variant before the second of any, and the first seed there before the second."""
    points, seeds = dict[str, list[str]](), [*dict.fromkeys(run.seed for run in runs)]
    places = []
    for run in runs:
        mine, here = points.setdefault(run.method, []), place_of(run)[1]
        mine += [] if here in mine else [here]
        places.append((mine.index(here), seeds.index(run.seed)))
    return [run for _, run in sorted(zip(places, runs, strict=True), key=lambda pair: pair[0])]
