"""The race of a plan's shortlist, for `gossamer plan --race`."""

import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from gossamer.cli.compare import Earlier, folders_of, trained
from gossamer.cli.help_columns import OPTIONS
from gossamer.cli.run_file_options import quantity, runs_at_a_time
from gossamer.cli.tables import print_table
from gossamer.cli.watch import Watchable
from gossamer.errors import ConfigError
from gossamer.record.progress import echo, say
from gossamer.settings.quantities import MINUTES

if TYPE_CHECKING:
    from gossamer.report.paired import Standing
    from gossamer.report.results import PointResult
    from gossamer.run.config.experiment_file import Point
    from gossamer.run.experiments.race import Course
    from gossamer.run.planning.candidates import Priced
    from gossamer.run.planning.choice import Candidate, Pick
    from gossamer.run.planning.plan import RunPlan

_SEEDS, _SHARE, _TIMED = 3, 0.8, 2
"""Seeds that must fit, the share of the minutes that may be filled by estimate, and how often a step is timed."""
_TOGETHER, _START_S, _ROUND_S = 0.7, 1.5, 0.01
"""Step time of one replica of several as a share of a lone one's; seconds of a run before its first step, and of an exchange."""


@Parameter(name="*", group=OPTIONS["Race"])
@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """Whether the shortlist of a plan is trained, and how."""

    race: Annotated[float | None, quantity(MINUTES)] = None
    """train the shortlist for so many minutes: a small model, for the time that its price gives each candidate"""
    race_folder: Path | None = None
    """folder of the race (default: in runs/, after the network and the model)"""
    resume: bool = False
    """keep the finished runs of the race, and train others for so many minutes more"""
    jobs: int | None = None
    """runs of the race at a time (default: one for each core)"""


NO_RACE = RaceOptions()


class Race(NamedTuple):
    """The result of a race."""

    folder: Path
    report: Path
    text: dict[str, Any]
    """Its experiment file."""
    candidates: "dict[str, Candidate]"
    """Candidates by label; the choice of the plan first."""
    seeds: tuple[int, ...]
    """Seeds whose runs have ended for all candidates."""
    losses: dict[str, list[float]]
    """Losses with these seeds, by label; infinite where a run diverged."""
    standing: "Standing | None"
    """The standing of the candidates; None before the first seed has ended."""
    planned_standing: "Standing | None"
    """The same for the planned model, with what the plan expects to change."""
    left: dict[str, str]
    """Candidates of the shortlist that are not raced, and why."""
    parameters: int
    planned: int
    """Parameters of the planned model."""

    @property
    def choice(self) -> str:
        """The label of the plan's choice."""
        return next(iter(self.candidates))

    @property
    def taken(self) -> str:
        """The label of the plan's choice, or of the lowest for the planned model where the race separates the two."""
        standing = self.planned_standing
        return self.choice if standing is None or standing.may_be_best(self.choice) else standing.best

    @property
    def seconds(self) -> float:
        """Seconds on the network for each candidate: whole rounds of the choice."""
        return self.rounds(self.choice) * self.candidates[self.choice].round_s

    def rounds(self, label: str) -> int:
        """The number of rounds of a candidate's run, including the last one."""
        return -(-self._run(label)["steps"] // self.candidates[label].full_steps)

    def last(self, label: str) -> tuple[int, ...]:
        """The inner steps of each worker in the last round."""
        given = self._run(label)["local_steps"]
        return tuple([*given.values()][-1]) if isinstance(given, dict) else self.candidates[label].local_steps

    def tokens(self, label: str) -> int:
        """The tokens that a candidate's run reads."""
        data = self.text["data"]
        one = self.candidates[label]
        steps = (self.rounds(label) - 1) * one.taken + one.site * sum(self.last(label))
        return steps * data["seq_len"] * data["batch_size"]

    def _run(self, label: str) -> dict[str, Any]:
        """The settings of a candidate's run."""
        return next(row["run"] for row in self.text["variant"] if row["label"] == label)


class Prepared(NamedTuple):
    """A race before its first run."""

    folder: Path
    text: dict[str, Any]
    """Its experiment file."""
    candidates: "dict[str, Candidate]"
    """Candidates by label; the choice of the plan first."""
    left: dict[str, str]
    """Candidates of the shortlist that are not raced, and why."""
    ends: float
    """When the minutes are over, by `time.monotonic`."""


def prepare_race(made: "RunPlan", choice: "Pick", priced: "Priced", network: Path, asked: RaceOptions) -> Prepared:
    """The race of a plan's shortlist that fits the minutes, with its experiment file in its folder.

    Raises: ConfigError for minutes in which nothing fits, and a folder that exists.
    """
    from gossamer.run.experiments.race import label_of, opened_race, with_single_machine
    from gossamer.run.planning.candidates import chosen_from
    from gossamer.run.planning.choice import shortlist

    began, some = time.monotonic(), with_single_machine(made, shortlist(choice, chosen_from(made, priced)))
    assert asked.race is not None
    if len(some) < 2:
        raise ConfigError(
            f"--race has only one candidate, {some[0].name}, as nothing else is near it; leave --race out, or try more "
            "--local-steps and --codec"
        )
    folder = asked.race_folder or Path("runs") / f"race-{network.stem}-{made.model.size}"
    if asked.resume:
        text, left = opened_race(folder, some), dict[str, str]()
    else:
        text, left = _begun(made, some, folder, 60 * asked.race, runs_at_a_time(asked.jobs))
    by_label = {label_of(one): one for one in some}
    raced = {label: by_label[label] for label in (row["label"] for row in text["variant"])}
    left = {label: left.get(label, "it is not in the race that continues") for label in by_label if label not in raced}
    return Prepared(folder, text, raced, left, began + 60 * asked.race)


def race(prepared: Prepared, made: "RunPlan", choice: "Pick", asked: RaceOptions, output: Watchable) -> Race:
    """Trains the shortlist of a plan for the minutes.

    Raises: as `simulate`, but for runs that diverge.
    """
    from gossamer.models.sizes import ModelConfig, parameter_count
    from gossamer.report.results import read_results
    from gossamer.run.config.experiment_file import points
    from gossamer.run.experiments.race import MOST_SEEDS, VOCABULARY, race_standings
    from gossamer.settings.schema import build

    folder, text, raced, left, ends = prepared
    jobs = runs_at_a_time(asked.jobs)
    runs = points(text, seeds=range(made.options.seed, made.options.seed + MOST_SEEDS))
    outcomes = folder / "outcomes.jsonl"
    folders = folders_of(runs, folder, resume=True)

    def enough() -> bool:
        spent = [one.origin["seconds"] or 0.0 for one in read_results(outcomes) if one.origin]
        return time.monotonic() + max(spent, default=0.0) > ends

    try:
        trained(runs, folders, folder, jobs=jobs, earlier=Earlier(resume=True), output=output, enough=enough)
    except KeyboardInterrupt:
        words = (
            f"stopped; the same command with --resume keeps the finished runs in '{folder}' and continues the others"
        )
        raise KeyboardInterrupt(words) from None
    ended = read_results(outcomes)
    report = _written_page(runs, folders, ended, folder)
    seeds, losses, standing = race_standings(runs, ended)
    parameters = parameter_count(build(ModelConfig, text["model"], "model"), VOCABULARY)
    result = Race(folder, report, text, raced, tuple(seeds), losses, standing, None, left, parameters, made.parameters)
    return result if standing is None else result._replace(planned_standing=_as_planned(result, made, choice))


def _written_page(
    runs: "Sequence[Point]", folders: Mapping[str, Path], ended: "Sequence[PointResult]", folder: Path
) -> Path:
    """Writes the page of the runs that have ended."""
    from gossamer.report.page.page import write_report
    from gossamer.run.experiments.race import FILE

    report, done = folder / "report.html", {(one.method, one.seed) for one in ended}
    shown = {run.label: at for run in runs if (run.method, run.seed) in done and (at := folders[run.label]).exists()}
    lost = {(one.method, one.seed) for one in ended if one.row["loss"] is None}
    labels = [run.label for run in runs if (run.method, run.seed) in lost]
    write_report(shown, report, None, command=shlex.join(["gossamer", "compare", str(folder / FILE)]), lost=labels)
    return report


def _as_planned(raced: Race, made: "RunPlan", choice: "Pick") -> "Standing":
    """The standing of the candidates for the planned model, with what the plan expects to change."""
    from gossamer.run.experiments.race import VOCABULARY, carried_over
    from gossamer.run.planning.expected_loss import LossScale

    data, tokens = raced.text["data"], raced.tokens(raced.choice)
    steps = tokens / (made.workers * data["seq_len"] * data["batch_size"])
    scale = LossScale(raced.parameters, made.workers, tokens, VOCABULARY, steps=steps, seconds=raced.seconds)
    return carried_over(raced.losses, raced.candidates, choice, scale)


def _begun(
    made: "RunPlan", some: "Sequence[Candidate]", folder: Path, seconds: float, jobs: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Writes a race that fits the seconds into its folder; returns its experiment file, and why candidates are left out."""
    from gossamer.record.locks import locked
    from gossamer.run.config.experiment_file import points
    from gossamer.run.config.resolve import resolve
    from gossamer.run.experiments.race import courses, document, written_race

    _must_be_new(folder)
    course = _largest_that_fits(courses(made, some), made, seconds, jobs)
    text = document(course, made, made.options.source)
    for run in points(text):
        resolve(run.config)
    with locked(folder, None):
        _must_be_new(folder)  # again, as a second race may have begun meanwhile
        written_race(folder, course, made, text)
    return text, dict(course.left)


def _must_be_new(folder: Path) -> None:
    from gossamer.run.experiments.race import FILE

    if (folder / FILE).exists() or (folder / "run.toml").exists():
        raise ConfigError(
            f"'{folder}' already has a run or a race; go on with --resume, name another --race-folder, or remove it"
        )


def _largest_that_fits(ways: "Iterable[Course]", made: "RunPlan", seconds: float, jobs: int) -> "Course":
    """The largest way of which three seeds fit the seconds, by the measured seconds of an inner step of each model.

    Args: the smallest of the ways comes first.

    Raises: ConfigError where not even the smallest fits.
    """
    import torch

    from gossamer.run.config.experiment_file import points
    from gossamer.run.config.resolve import settings_of
    from gossamer.run.experiments.race import document
    from gossamer.run.worker.numerics import using_threads
    from gossamer.run.worker.step_time import step_time
    from gossamer.transport.processes.launch import available_cores

    step_s, largest = dict[int, float](), None
    for way in ways:  # a model is only timed where the next smaller way fits
        if way.parameters not in step_s:
            say(f"timing an inner step of a model of {way.parameters:,} parameters")
            (run, *_) = points(document(way, made, made.options.source, compiled=False))
            settings, device = settings_of(run.config), torch.device("cpu")
            # With the threads of a run of the race, and the least of several, as other processes may have had the cores.
            with using_threads(max(1, available_cores() // jobs)):
                took_s = [step_time(settings, 0, device, test_s=0.2).seconds for _ in range(_TIMED)]
            step_s[way.parameters] = min(took_s)
        takes = (
            _SEEDS
            / min(jobs, _SEEDS * len(way.entrants))
            * sum(
                _START_S + one.rounds * _ROUND_S + one.taken * _TOGETHER * step_s[way.parameters]
                for one in way.entrants
            )
        )
        if takes > _SHARE * seconds:
            if largest is None:
                minutes, first = math.ceil(takes / _SHARE / 60), way.entrants[0]
                fewer = first.candidate.full_steps > min(made.options.local_steps)
                raise ConfigError(
                    f"--race got {in_minutes(seconds / 60)}, and {_SEEDS} seeds of {len(way.entrants)} candidates take about "
                    f"{in_minutes(minutes)} here, as {first.label} needs {first.rounds} rounds to have learnt something; give "
                    f"{minutes:,}{', or fewer --local-steps' * fewer}"
                )
            break
        largest = way
    assert largest is not None, "there is a way for each model"
    return largest


def in_minutes(number: float) -> str:
    """Minutes in words.

    >>> in_minutes(1), in_minutes(2.5)
    ('1 minute', '2.5 minutes')
    """
    return f"{number:,g} minute{'s' * (number != 1)}"


def race_facts(result: Race) -> dict[str, Any]:
    """A race as JSON."""
    from gossamer.run.planning.choice import Candidate

    def of(label: str, candidate: Candidate) -> dict[str, Any]:
        stands = None if result.standing is None else result.standing.above.get(label)
        return {
            "label": label,
            "chosen": label == result.choice,
            "rounds": result.rounds(label),
            "last_local_steps": result.last(label),
            "round_s": candidate.round_s,
            "tokens": result.tokens(label),
            "losses": result.losses[label],
            "above": None if stands is None else {"nats": stands.mean, "half": stands.half},
            "alike": result.standing is not None and label in result.standing.alike,
        }

    return {
        "folder": result.folder,
        "report": result.report,
        "parameters": result.parameters,
        "source": result.text["data"]["source"],
        "seeds": result.seeds,
        "best": None if result.standing is None else result.standing.best,
        "decided": result.standing is not None and result.standing.decided,
        "taken": result.taken,
        "candidates": [of(label, one) for label, one in result.candidates.items()],
        "left": result.left,
    }


def print_race(result: Race) -> None:
    """Prints the standing of the candidates."""
    from gossamer.report.table import digits_text

    standing, n = result.standing, len(result.seeds)
    echo()
    echo(
        f"race of {len(result.candidates)} candidates over {digits_text(result.seconds / 3600)} h of the network, with a model "
        f"of {result.parameters:,} parameters on '{result.text['data']['source']}', {n} seed{'s' * (n != 1)}"
    )
    for label, why in result.left.items():
        echo(f"not raced: {label}: {why}")
    if standing is None:
        echo("no seed has ended with all candidates; the same command with --resume continues")
        return
    means = {label: sum(some) / n for label, some in result.losses.items()}
    labels = sorted(means, key=means.__getitem__)
    rows = []
    for label in labels:
        one, stands = result.candidates[label], standing.above.get(label)
        gap = "lowest" if label == standing.best else "diverged"
        if stands is not None:
            gap = f"{stands.mean:+.4f}" + ("" if stands.half is None else f" ± {stands.half:.4f}")
        part = max(result.last(label)) / one.full_steps
        rounds = str(result.rounds(label)) if part == 1 else f"{result.rounds(label) - 1 + part:.2f}"
        sizes = (rounds, digits_text(one.round_s), f"{result.tokens(label):.3g}")
        rows.append((label, *sizes, f"{means[label]:.4f}", gap))
    headings = ("candidate", "rounds", "s a round", "tokens", "loss", "above the lowest")
    print_table(headings, rows, bold=labels.index(standing.best))
    echo(
        "loss: nats a byte of the small model, mean of the seeds, 95 % interval of the paired difference; with "
        f"{result.planned:,} parameters losses are others, and their order may be"
    )
    echo(_verdict(result, standing))
    changes = f"what the plan expects to change with {result.planned:,} parameters and their rounds"
    echo(f"taken: {result.taken}, by these losses and {changes}")
    echo(f"race: {result.folder}")
    echo(f"report: {result.report}")


def _verdict(result: Race, standing: "Standing") -> str:
    """The leader, whether that is decided, and the standing of the plan's choice."""
    if len(result.seeds) < 2:
        return (
            f"verdict: {standing.best} ends lowest; one seed decides nothing: the same command with --resume runs more"
        )
    if standing.decided:
        words = f"verdict: {standing.best} ends lowest, and differs from all others (paired, 5 %, Holm)"
    else:
        alike = " and ".join(standing.alike)
        words = f"verdict: {standing.best} ends lowest in the mean, and does not clearly differ from {alike}"
    if result.choice == standing.best:
        return f"{words}; it is the choice of the plan"
    where = "is one of these" if result.choice in standing.alike else "ends higher"
    return f"{words}; the choice of the plan, {result.choice}, {where}"
