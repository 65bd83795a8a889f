"""Many simulations: every combination of some settings, each with several seeds."""

import itertools
import logging
import math
import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, Unpack, cast

from gossamer.errors import ConfigError, TrainingError
from gossamer.report.page.page import write_report
from gossamer.run.config.document import flat
from gossamer.run.experiments.compare import doubts_about
from gossamer.run.simulated.keywords import Keywords, Run
from gossamer.run.simulated.simulate import simulate
from gossamer.run.simulated.simulation import Columns, RecordedRun
from gossamer.settings.user_code import name_of

log = logging.getLogger("gossamer")


class SweptRun(NamedTuple):
    """One run of a sweep."""

    at: Mapping[str, Any]
    """The values of the settings that were swept."""
    seed: int
    loss: float
    """Of the mean model in the last validation; NaN for a run that diverged."""
    run: RecordedRun | None
    """Its record; None for a run that diverged."""
    error: str = ""
    """Why it diverged."""


class Sweep:
    """The runs of a sweep, in the order of its settings, the seed changing fastest.

    Args:
        folders: those of the runs, in which also a run that diverged has left its record.
        temporary: a folder that is removed with this object.
        notes: what to know before the runs are compared, for their page.
    """

    def __init__(
        self,
        runs: Sequence[SweptRun],
        folders: Sequence[Path],
        temporary: Path | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.runs, self._folders, self._notes = list(runs), [*folders], [*notes]
        self._words = words_of([one.at for one in self.runs])
        if temporary is not None:
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)

    @property
    def table(self) -> Columns:
        """A row for each run: the settings that were swept, seed and loss."""
        return Columns(
            [{**words, "seed": one.seed, "loss": one.loss} for words, one in zip(self._words, self.runs, strict=True)]
        )

    def best(self) -> SweptRun:
        """The run whose settings have the lowest mean loss over the seeds; its first seed. Raises ConfigError if all diverged."""
        groups = [[*some] for _, some in itertools.groupby(self.runs, key=lambda one: one.at)]
        means = [math.fsum(one.loss for one in some) / len(some) for some in groups]
        sound = [(mean, k) for k, mean in enumerate(means) if math.isfinite(mean)]
        if not sound:
            raise ConfigError(
                f"all {len(self.runs)} runs of the sweep diverged ({self.runs[0].error}); lower the learning rates"
            )
        return groups[min(sound)[1]][0]

    def report(self, path: str | Path) -> Path:
        """Writes a page with the table and the curves of all runs; returns its path."""
        labels = [label_of(words, one.seed) for words, one in zip(self._words, self.runs, strict=True)]
        networks = next((one.run.config.network for one in self.runs if one.run is not None), {})
        lost = {label for label, one in zip(labels, self.runs, strict=True) if one.run is None}
        folders = dict(zip(labels, self._folders, strict=True))
        write_report(folders, Path(path), networks, notes=self._notes, lost=lost)
        return Path(path)

    def __repr__(self) -> str:
        return f"<Sweep of {len(self.runs)} runs over {', '.join(self.runs[0].at)}>"


def sweep(
    grid: Mapping[str, Sequence[Any]],
    run: Run = None,
    out: str | Path | None = None,
    *,
    seeds: Sequence[int] = (0,),
    progress: bool = False,
    **given: Unpack[Keywords],
) -> Sweep:
    """Simulates every combination of some settings, with each seed.

    Args:
        grid: lists of values, by keyword of `simulate` or by dotted key of a run file: `{"rule": [gasloc(), diloco()],
            "inner.lr": [1e-3, 2e-3]}`.
        run: the run that all of them vary, as in `simulate`.
        out: a folder for all run folders; None for a temporary one, removed with the returned object.
        seeds: run each combination with each of them. A seed decides the first parameters and what is drawn of pairs and
            codecs; of a text also the order of the batches, but your own `data` gives the same batches for every seed.
        progress: show the progress of each run on stderr.
        given: as in `simulate`, the same for all runs.
    Raises: as `simulate`; a diverged run is a result and does not end the sweep.

    >>> import gossamer, torch
    >>> task = {"model": lambda: torch.nn.Linear(2, 1), "data": lambda worker, step: torch.full((4, 2), float(worker)),
    ...         "loss": lambda model, x: (model(x) - 1).square().mean()}
    >>> result = gossamer.sweep({"inner.lr": [1e-3, 1e-1]}, workers=2, local_steps=5, rounds=2, **task)
    >>> result.best().at
    {'inner.lr': 0.1}
    """
    _check_sweep(grid, seeds, given)
    folder, runs, doubts = Path(mkdtemp(prefix="gossamer-") if out is None else out), list[SweptRun](), list[str]()
    all_at = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for (at, words), seed in itertools.product(zip(all_at, words_of(all_at), strict=True), seeds):
        place = folder / f"{len(runs):03d}"
        try:
            done = simulate(run, place, progress=progress, **_keywords(at, label_of(words, seed), seed, given))
        except TrainingError as error:
            runs.append(SweptRun(at, seed, math.nan, None, str(error)))
            continue
        runs.append(SweptRun(at, seed, done.loss, RecordedRun(done.config, place)))
        for sentence in doubts_about([done.resolved]):
            if sentence not in doubts:
                doubts.append(sentence)
                log.warning("%s", sentence)
    if len(seeds) > 1 and callable(given.get("data")):
        doubts.append(_ONE_ORDER)
    folders = [folder / f"{k:03d}" for k in range(len(runs))]
    return Sweep(runs, folders, folder if out is None else None, doubts)


def _check_sweep(grid: Mapping[str, Sequence[Any]], seeds: Sequence[int], given: Keywords) -> None:
    """Raises ConfigError for what is no sweep: no lists of values, no list of seeds, or a setting that was given twice."""
    given_lists = grid.values() if isinstance(grid, Mapping) else ()
    lists = [isinstance(values, Sequence) and not isinstance(values, str) and values for values in given_lists]
    if not lists or not all(lists):
        raise ConfigError(f"grid is {grid!r:.80}; give lists of values by name, such as {{'inner.lr': [1e-3, 2e-3]}}")
    if not isinstance(seeds, Sequence) or not seeds or not all(type(seed) is int for seed in seeds):
        raise ConfigError(f"seeds is {seeds!r:.80}; give a list of whole numbers, such as [0, 1, 2]")
    if len({*seeds}) < len(seeds):
        raise ConfigError(
            f"seeds is {seeds!r:.80}, which has a number twice, and equal runs would count as independent; give each once"
        )
    if "seed" in (asked := {**grid, **given}):
        raise ConfigError(
            f"seed is {asked['seed']!r:.60}, and a sweep runs each combination with all of its seeds; give seeds=[0, 1, 2]"
        )
    if twice := grid.keys() & {*given, *flat(dict(given.get("settings", {})))}:
        raise ConfigError(f"{min(twice)} is in the grid and was given for all runs too; leave one of them out")


def _keywords(at: Mapping[str, Any], label: str, seed: int, given: Keywords) -> Keywords:
    """The keywords of `simulate` for one run; those of the grid that are no keywords are keys of its run file."""
    keywords = {name: value for name, value in at.items() if name in Keywords.__annotations__}
    dotted = {name: value for name, value in at.items() if name not in keywords}
    settings = {"name": label, **given.get("settings", {}), **dotted}
    return cast(Keywords, {**given, **keywords, "seed": seed, "settings": settings})


_ONE_ORDER = (
    "All seeds have the same batches in the same order, as data is a function that is not given the seed: what differs between "
    "them are the first parameters and what is drawn of pairs and codecs."
)
_PARTS = ("rule", "topology", "codec", "schedule", "method", "model", "data", "loss", "optimizer", "validation")
"""Settings whose values are known by their own names."""


def label_of(words: Mapping[str, Any], seed: int) -> str:
    """What a run of a sweep is called.

    >>> label_of({"rule": "diloco", "inner.lr": 0.001}, 0)
    'diloco lr=0.001 seed=0'
    """
    parts = [str(word) if name in _PARTS else f"{name.rpartition('.')[2]}={word}" for name, word in words.items()]
    return " ".join([*parts, f"seed={seed}"])


def words_of(combinations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of each combination as a table has them: of a rule, a topology or a codec its name, with what differs, and with
    a number where nothing that is recorded does.

    >>> from gossamer.rules import diloco, gasloc
    >>> [words["rule"] for words in words_of([{"rule": one} for one in (gasloc(), diloco(), diloco(momentum=0.5))])]
    ['gasloc', 'diloco(momentum=0.9)', 'diloco(momentum=0.5)']
    """
    return [
        {name: _value_label(value, [one[name] for one in combinations if name in one]) for name, value in at.items()}
        for at in combinations
    ]


def _value_label(value: Any, among: Sequence[Any]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name, options = getattr(value, "name", None), getattr(value, "options", None)
    if not isinstance(name, str) or not isinstance(options, Mapping):
        word = name_of(value).rpartition(":")[2].rpartition("<locals>.")[2] if callable(value) else str(value)
        others = [*{id(other): other for other in among if callable(other)}]
        return word if len(others) < 2 or word.isidentifier() else f"{word} {others.index(id(value)) + 1}"
    alike = [other for other in among if getattr(other, "name", None) == name]
    differing = {key: one for key, one in options.items() if any(other.options.get(key) != one for other in alike)}
    word = name or type(value).__name__.lower()  # one that no factory made has no name
    word = f"{word}({', '.join(f'{key}={one}' for key, one in differing.items())})" if differing else word
    twins = [*{id(other): other for other in alike if other.options == options}]
    return word if len(twins) < 2 else f"{word} {twins.index(id(value)) + 1}"
