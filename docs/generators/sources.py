"""What numbers of a page are read from: committed outcomes of runs, and tables of other pages."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from gossamer.report.figures import swept
from gossamer.report.reach import reach
from gossamer.report.results import PointResult, read_results
from gossamer.run.config.experiment_file import place_in_experiment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"

NUMBER = r"[+−-]?\d+(?:\.\d+)?"
TEXT = "text "
"""Before the heading of a column whose cells are taken as they are."""
_MEGA = 1e6


def config_of(outcomes: Path) -> tuple[Path, str]:
    """The experiment file of some outcomes, and its size: the longest name that fits is the file's, the rest the size."""
    at_top = outcomes.parent.name == RESULTS.name
    folder, words = (
        ROOT / "configs" if at_top else ROOT / "experiments" / outcomes.parent.name,
        outcomes.stem.split("-"),
    )
    for many in range(len(words), 0, -1):
        if (file := folder / f"{'-'.join(words[:many])}.toml").exists():
            return file, "-".join(words[many:])
    raise FileNotFoundError(
        f"{outcomes} has no experiment file {folder / outcomes.stem}.toml; add it, or rename the outcomes"
    )


def losses_by_seed(ended: Iterable[PointResult]) -> dict[str, dict[int, float]]:
    """The last losses of the runs that have one, by method and seed; of an experiment without a sweep."""
    losses: dict[str, dict[int, float]] = {}
    for one in ended:
        if one.row["loss"] is not None:
            losses.setdefault(one.method, {})[one.seed] = one.row["loss"]
    return losses


class Reading(NamedTuple):
    """What was read of one run, or of one row."""

    point: str
    """Where it stands in a sweep."""
    seed: int
    value: float | str


class Source(NamedTuple):
    """A file to read from."""

    labels: tuple[str, ...]
    read: Callable[[str, Mapping[str, str], str], list[Reading]]
    """The readings of a label, of those that have some values, of one measure."""


@cache
def source(file: Path) -> Source:
    """What a file of outcomes (.jsonl) or a page with tables (.md) holds."""
    if file.suffix == ".jsonl":
        results = read_results(file)
        return Source(tuple(dict.fromkeys(one.method for one in results)), partial(_of_outcomes, results))
    rows = [*_rows(file.read_text(encoding="utf-8"))]
    labels = tuple(dict.fromkeys(next(iter(row.values())) for row in rows))
    return Source(("*", *labels), partial(_of_rows, rows))


def _of_outcomes(results: list[PointResult], label: str, only: Mapping[str, str], measure: str) -> list[Reading]:
    found = []
    for run in results:
        values = {key: str(swept(value)) for name, value in run.at.items() for key in (name, name.rpartition(".")[2])}
        values |= {"seed": str(run.seed)}
        if run.method == label and all(value in map(values.get, name.split("/")) for name, value in only.items()):
            value = _measured(run, results, measure)
            found += [] if value is None else [Reading(place_in_experiment(run)[1], run.seed, value)]
    return found


def _measured(run: PointResult, results: list[PointResult], measure: str) -> float | None:
    plain = {"loss": "loss", "worst": "worst_loss", "disagreement": "disagreement"}
    if measure in plain:
        return run.row[plain[measure]]
    if measure == "worst above mean":
        return run.row["worst_loss"] - run.row["loss"]
    if measure == "seconds to validation":
        (curve,) = run.row["loss_at_s"].values()
        return curve[0][0]
    if measure == "sent MB":
        return run.row["sent_bytes"] / _MEGA
    if measure == "training seconds":
        return None if run.origin is None else run.origin["seconds"]
    if measure.startswith("seconds on "):
        return run.row["wall_s"][measure.removeprefix("seconds on ")]
    against = re.fullmatch(r"(time to|rounds to|behind) (.+?)(?: by (.+))?", measure)
    if against is None:
        raise ValueError(f"outcomes have no '{measure}'; name one of those that docs/generators/bound.py lists")
    what, target, by = against.groups()
    alike = [one for one in results if one.at == run.at]
    found = [
        one for one in reach(alike, target, paired=by is not None) if (one.method, one.seed) == (run.method, run.seed)
    ]
    (mine,) = [one for one in found if by in (None, one.network)]
    if what == "behind":
        return mine.behind
    if what == "time to" or mine.ratio is None:
        return mine.ratio
    curve = run.row["loss_at_s"][mine.network]
    # There is one evaluation after each round.
    return 1 + next(k for k, (_, loss) in enumerate(curve) if loss <= mine.target_loss)


def _rows(text: str) -> Iterator[dict[str, str]]:
    """The rows of all tables of a page, by their headings; the second of a name is "name (2)"."""
    heads: list[str] = []
    for line in text.splitlines():
        cells = [re.sub(r"<!--.*?-->|\*\*|`", "", cell).strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = [
                name if (n := cells[: k + 1].count(name)) == 1 else f"{name} ({n})" for k, name in enumerate(cells)
            ]
        elif set(line) - set("|-: "):
            yield dict(zip(heads, cells, strict=True))


def _of_rows(rows: list[dict[str, str]], label: str, only: Mapping[str, str], measure: str) -> list[Reading]:
    found, heading = [], measure.removeprefix(TEXT)
    for k, row in enumerate(rows):
        first = next(iter(row.values()))
        if heading in row and (label == "*" or first == label) and all(row.get(n) == v for n, v in only.items()):
            point, seed = ("", int(row["seed"])) if "seed" in row else (str(k), 0)
            values = [row[heading]] if measure.startswith(TEXT) else _values(row[heading])
            found += [Reading(point, seed, value) for value in values]
    return found


def _values(cell: str) -> list[float]:
    """The numbers of a cell; a time is one, in seconds."""
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    if times := re.findall(rf"({NUMBER}) (d|h|min|s)\b", cell):
        return [sum(float(number) * units[unit] for number, unit in times)]
    return [float(number.replace("−", "-")) for number in re.findall(NUMBER, cell)]
