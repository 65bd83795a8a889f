"""Tuning every method of an experiment file with the same budget of tokens: the methods to tune, and the runs.

The methods are searched at the same time (`gossamer.run.experiments.search`), so that all cores have work. The runs of all of
them have the same seeds, and with them the same initial parameters, order of data and matchings.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import with_config
from typing_extensions import TypedDict

from gossamer.errors import ConfigError
from gossamer.record.jsonl import json_line, records
from gossamer.record.origin import Origin, origin
from gossamer.record.progress import say
from gossamer.record.whole_files import Appender, atomic_write, make_folder
from gossamer.run.config.document import with_settings
from gossamer.run.config.experiment_file import OuterValues, TuneConfig, Variant, base_and_variants, folder_name
from gossamer.run.config.recipes import TABLES
from gossamer.run.config.run_file import RunConfig, digest, parse, shortened
from gossamer.run.experiments.processes import RunEnd, RunPool
from gossamer.run.experiments.search import GridPoint, OuterPair, Search, SearchResult, Space, Trial, search
from gossamer.settings import over_time
from gossamer.settings.options import Number, Positive, options_of
from gossamer.settings.schema import RECORD, Records, build


@with_config(RECORD)
class RunOutcome(TypedDict):
    """A run that has ended, as a line of `outcomes.jsonl`."""

    run: str
    """Digest of everything that affects its loss."""
    method: str
    lr: Positive
    outer: OuterValues | None
    rung: Number
    seed: int
    tokens: int
    loss: float | None
    """None if it diverged or was refused."""
    error: str
    origin: Origin


class Contender(NamedTuple):
    """A method to tune."""

    row: Variant
    document: dict[str, Any]
    asked: TuneConfig
    config: RunConfig
    """Of the document."""
    table: str
    """The table of η and γ: "rule" or "server"; empty if the method has no such pair, or a fixed one."""

    @property
    def space(self) -> Space:
        """What is searched."""
        seeds, rungs = len(self.asked.seeds), len(self.asked.rungs)
        tokens = tuple(self.tokens(rung) * seeds for rung in range(rungs))
        outers: tuple[OuterPair | None, ...] = self.asked.outer if self.table else (None,)
        final = self.tokens(rungs) * len({*self.asked.final_seeds} - {*self.asked.seeds})
        return Space(len(self.asked.lr), outers, tokens, self.asked.budget_tokens, final, self.asked.grid == "cross")

    @property
    def deciding(self) -> int:
        """The rung that decides: the final, or without one the last."""
        return len(self.asked.rungs) - 1 + bool(self.asked.final_seeds)

    def seeds(self, rung: int) -> tuple[int, ...]:
        """Seeds of the runs on a rung."""
        return self.asked.seeds if rung < len(self.asked.rungs) else self.asked.final_seeds

    def steps(self, rung: int) -> int:
        """Inner steps of a run on a rung: whole rounds, at least one. The final has those of the last rung."""
        length, shares = self.config.length, (*self.asked.rungs, 1.0)
        return length.timetable.begin(
            max(1, length.timetable.rounds_within(math.floor(shares[rung] * length.loop.steps)))
        )

    def tokens(self, rung: int) -> int:
        """Tokens of a run on a rung, by all workers."""
        return self.config.workers * self.steps(rung) * self.config.length.step_tokens

    def lr(self, setting: GridPoint) -> float:
        """The inner learning rate of a setting."""
        return self.asked.lr[0] * 2.0**setting.doublings

    def chosen(self, setting: GridPoint) -> dict[str, Any]:
        """A setting as dotted keys."""
        chosen: dict[str, Any] = {"inner.lr": self.lr(setting)}
        if setting.outer is not None:
            if self.table not in self.document:  # the file means the default rule, whose settings need its name
                chosen[f"{self.table}.name"] = getattr(self.config, self.table).name
            chosen |= {f"{self.table}.lr": setting.outer[0], f"{self.table}.momentum": setting.outer[1]}
        return chosen

    def run(self, trial: Trial, seed: int) -> RunConfig:
        """One run of a trial, which records its losses and neither models nor checkpoints."""
        lean = {
            "run.eval_every": 0,
            "run.eval_workers": False,
            "run.checkpoint_every": 0,
            "record.export": False,
            "record.keep_checkpoints": False,
        }
        name = f"{self.row.label} {self.describe(trial.setting)} rung={trial.rung} seed={seed}"
        config = parse(with_settings(self.document, {**self.chosen(trial.setting), **lean, "seed": seed, "name": name}))
        return shortened(config, self.steps(trial.rung))

    def describe(self, setting: GridPoint) -> str:
        """A setting in words."""
        outer = "" if setting.outer is None else " outer={:g},{:g}".format(*setting.outer)
        return f"lr={self.lr(setting):g}{outer}"


class Tuned(NamedTuple):
    """The result of tuning a method."""

    contender: Contender
    result: SearchResult | None
    """None while its search has not ended."""
    losses: Mapping[Trial, Sequence[float]]
    """Losses by trial and seed; NaN where a run diverged. In the order of the trials."""


def contenders(document: Mapping[str, Any], *, scale: str = "") -> list[Contender]:
    """The methods of an experiment file with a [tune] table.

    A variant may have its own table `tune`, with `lr` and `outer`.
    Raises: ConfigError for any other file.
    """
    if "tune" not in document:
        raise ConfigError(
            f"the file has no table [tune] among its keys ({', '.join(document) or 'none'}); write one with budget_tokens and "
            "lr = [5e-4, 1e-3, 2e-3]"
        )
    if "sweep" in document:
        raise ConfigError(
            f"the file has sweep = {document['sweep']!r:.60}, but gossamer tune has its own grid; remove [sweep]"
        )
    base, rows = base_and_variants(document, scale=scale)
    methods = [_contender(document["tune"], base, row) for row in rows]
    places = [folder_name(one.row.label) for one in methods]
    if alike := [one.row.label for one, place in zip(methods, places, strict=True) if places.count(place) > 1]:
        raise ConfigError(f"the labels {alike} would share a folder; set labels that differ in a letter or digit")
    return methods


def _contender(table: Any, base: Mapping[str, Any], row: Variant) -> Contender:
    overrides = row.table.get("tune", {})
    if "sweep" in row.table or not isinstance(overrides, Mapping) or not overrides.keys() <= {"lr", "outer"}:
        raise ConfigError(
            f"the variant '{row.label}' has {'a sweep' if 'sweep' in row.table else f'tune = {overrides!r:.60}'}, but gossamer "
            "tune takes tune = { lr = [...], outer = [...] } there; all else is the same for every method"
        )
    asked = build(TuneConfig, {**table, **overrides} if isinstance(table, Mapping) else table, "tune")
    document = with_settings(base, {**row.settings, "name": row.label})
    config = parse(document)
    kind = next((kind for kind in ("server", "pair") if getattr(config, kind) is not None), "rule")
    choice = getattr(config, kind)
    factory = TABLES[kind].get(choice.name)
    names = {*choice.options} if factory is None else {option.name for option in options_of(factory)}
    paired = {"lr", "momentum"} <= names and choice.options.get("optimizer") != "sgd" and asked.outer
    for name in ("lr", "momentum") if paired else ():
        if over_time.changes(choice.options.get(name)):
            raise ConfigError(
                f"the variant '{row.label}' has {kind}.{name} = {choice.options[name]!r:.60}, which changes over the run, and "
                "gossamer tune would try constant pairs (η, γ) in its place; write tune = { outer = [] } in the variant to keep "
                f"it, or remove {kind}.{name}"
            )
    contender = Contender(row, document, asked, config, kind if paired else "")
    if (start := config.run.synchronous_steps) >= (steps := contender.steps(0)):
        raise ConfigError(
            f"the variant '{row.label}' begins with run.synchronous_steps = {start} and tune.rungs = {[*asked.rungs]} with runs "
            f"of {steps} inner steps, in which its method never begins; set a longer first rung or a shorter start"
        )
    return contender


class _Method:
    """One method in the course of its search.

    Args: `known` are the outcomes of its earlier runs by what decides them, to which it adds the others.
    """

    def __init__(self, contender: Contender, known: dict[str, RunOutcome]) -> None:
        self.contender, self._known = contender, known
        self.search: Search = search(contender.space)
        self.losses: dict[Trial, list[float]] = {}
        self._batch: tuple[Trial, ...] = next(self.search)
        self._left: set[tuple[Trial, int]] = set()
        self.result: SearchResult | None = None

    def ready(self) -> list[tuple[Trial, int]]:
        """The runs, each a trial and a seed, of the next batch; empty while the last is in progress, and when the
        search is complete.
        """
        while self.result is None and not self._left:
            missing = []
            for trial in self._batch:
                seeds = self.contender.seeds(trial.rung)
                self.losses.setdefault(trial, [math.nan] * len(seeds))
                for seed in seeds:
                    outcome = self._known.get(_key(self.contender.run(trial, seed)))
                    if outcome is None:
                        missing.append((trial, seed))
                    else:
                        self._record_loss(trial, seed, outcome["loss"])
            self._left = {*missing}
            if missing:
                return missing
            self._advance()
        return []

    def end(self, trial: Trial, seed: int, outcome: RunOutcome) -> None:
        """Takes the outcome of a run."""
        self._known[outcome["run"]] = outcome
        self._record_loss(trial, seed, outcome["loss"])
        self._left.remove((trial, seed))
        if not self._left:
            self._advance()

    def _record_loss(self, trial: Trial, seed: int, loss: float | None) -> None:
        self.losses[trial][self.contender.seeds(trial.rung).index(seed)] = math.nan if loss is None else loss

    def _advance(self) -> None:
        try:
            self._batch = self.search.send({trial: statistics.fmean(self.losses[trial]) for trial in self._batch})
        except StopIteration as end:
            self.result = end.value


def tune(
    methods: Sequence[Contender],
    out: Path,
    *,
    jobs: int = 1,
    resume: bool = False,
    asked: Callable[[], bool] = lambda: False,
) -> list[Tuned]:
    """Searches all methods, with so many runs at a time; every run that ends is kept in `outcomes.jsonl` of the folder.

    Args:
        jobs: runs at a time, each in its own process with its share of the cores; one runs here.
        resume: keep the runs that have ended; those that were stopped continue.
        asked: whether to stop, once the runs in progress have saved after their round.
    Raises: ConfigError for a budget that is too small, and for a folder that holds outcomes already; as `simulate`, except
        that a run which diverges is a result.
    """
    file = out / "outcomes.jsonl"
    if file.exists() and file.stat().st_size and not resume:  # an empty one is of a search that was refused
        raise ConfigError(f"'{file}' already exists; name another folder with --out, remove it, or go on with --resume")
    lines = [one for _, one in records(file, _OUTCOMES)] if file.exists() else []
    searches = dict[str, _Method]()
    for contender in methods:
        label = contender.row.label
        searches[label] = _Method(contender, {one["run"]: one for one in lines if one["method"] == label})
    make_folder(out)
    origin("", None)  # caches the commit before the first run
    atomic_write(file, "".join(map(json_line, lines)).encode())  # without a killed process's partial line
    with contextlib.closing(Appender(file)) as kept, RunPool(jobs, asked=asked) as apart:
        while True:
            for label, method in searches.items():
                for trial, seed in method.ready():
                    config = method.contender.run(trial, seed)
                    place = out / folder_name(label) / folder_name(config.name.removeprefix(f"{label} "))
                    apart.add((label, trial, seed), config, place)
            if not apart.busy:
                break
            for (label, trial, seed), ended in apart.ended():
                method = searches[label]
                outcome = _outcome(method.contender, trial, seed, ended)
                kept.write(json_line(outcome))
                _report(outcome)
                method.end(trial, seed, outcome)
    return [
        Tuned(method.contender, method.result, method.losses)
        for method in searches.values()
        if method.result is not None
    ]


def searched(methods: Sequence[Contender], outcomes: Path) -> list[Tuned]:
    """The state of each method's search from the runs in `outcomes.jsonl`, without training.

    A run is recognised by its method, setting, rung, tokens and seed, regardless of other changes in its file.
    Raises: DataError for an invalid line.
    """
    lines = [one for _, one in records(outcomes, _OUTCOMES)]
    tuned = []
    for contender in methods:
        known = dict[str, RunOutcome]()
        for line in lines:
            rung, is_of_method = line["rung"], line["method"] == contender.row.label
            if is_of_method and rung <= contender.deciding and line["tokens"] == contender.tokens(rung):
                setting = GridPoint(round(math.log2(line["lr"] / contender.asked.lr[0])), line["outer"])
                known[_key(contender.run(Trial(setting, rung), line["seed"]))] = line
        method = _Method(contender, known)
        method.ready()
        tuned.append(Tuned(contender, method.result, method.losses))
    return tuned


def _report(outcome: RunOutcome) -> None:
    loss = f"loss {outcome['loss']:.4f}" if outcome["loss"] is not None else outcome["error"]
    outer = "" if outcome["outer"] is None else " outer {:g}, {:g},".format(*outcome["outer"])
    say(
        f"{outcome['method']}: lr {outcome['lr']:g},{outer} {outcome['tokens']:,} tokens, seed {outcome['seed']}: {loss} "
        f"({outcome['origin']['seconds']:.0f} s)"
    )


_OUTCOMES = Records[RunOutcome](RunOutcome)


def _outcome(contender: Contender, trial: Trial, seed: int, ended: RunEnd) -> RunOutcome:
    config = contender.run(trial, seed)
    return {
        "run": _key(config),
        "method": contender.row.label,
        "lr": contender.lr(trial.setting),
        "outer": trial.setting.outer,
        "rung": trial.rung,
        "seed": seed,
        "tokens": contender.tokens(trial.rung),
        "loss": ended.loss,
        "error": ended.error,
        "origin": origin(digest(config), ended.seconds, ended.text),
    }


def _key(config: RunConfig) -> str:
    return f"{digest(config)}-{config.run.eval_batches}"


def tuned_file(document: Mapping[str, Any], tuned: Sequence[Tuned], source: str, *, scale: str = "") -> str:
    """An experiment file with every method at the settings that were chosen for it; without those of which every run diverged."""
    base, _ = base_and_variants(document, scale=scale)
    rows = [
        {"label": one.contender.row.label, **one.contender.row.settings, **one.contender.chosen(one.result.best)}
        for one in tuned
        if one.result is not None and one.result.best is not None
    ]
    extra = {"figure": document["figure"]} if "figure" in document else {}
    head = f"# The methods of {source} at the settings that `gossamer tune` chose for each, with the same budget for all.\n"
    return head + tomli_w.dumps({**base, **extra, "variant": rows})
