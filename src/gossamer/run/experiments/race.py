"""Candidates of a plan trained against each other in the time that their price gives them.

A small model replaces the planned one, with all links slowed down by the ratio of parameters. So a round of it is
priced like a round of the planned model, and all readers of a run folder, such as a report or `gossamer price`, show
the seconds of the planned one. All candidates get the same seconds. Each trains the whole rounds that fit them and one
more with as many local steps as fit the rest, and its learning rate decays at its own end. One machine alone and,
where there are sites, one site alone are always in the race.

The losses are those of the small model.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from gossamer.errors import ConfigError
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.links import times_as_fast, to_options
from gossamer.optimizers.spectral_muon import is_fast_in_bf16
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.report.paired import Standing, standing
from gossamer.report.results import PointResult
from gossamer.run.config.document import flat, load_document, with_settings
from gossamer.run.config.experiment_file import Point
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.recipes import recipe
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import parse
from gossamer.run.planning.candidates import PLANNED
from gossamer.run.planning.check import counted
from gossamer.run.planning.choice import ALONE, SITE_ALONE, Candidate, Pick
from gossamer.run.planning.expected_loss import TOKENS_PER_PARAMETER, LossScale
from gossamer.run.planning.measured_losses import measured_schedule, nearest_measured
from gossamer.run.planning.plan import RunPlan, network_of
from gossamer.run.planning.planned_run_file import method_tables
from gossamer.settings.schema import toml_value

FILE = "race.toml"
"""The experiment file of a race, in its folder; `gossamer compare` trains it too."""
MOST_SEEDS = 10
SMALL = ModelConfig(size="0.2m", layers=2)
"""The model of the measured losses."""
_SIZES = (
    ModelConfig(size="1m"),
    ModelConfig(size="0.2m"),
    SMALL,
)
"""Models to race with, the largest first."""
LENGTHS = (TOKENS_PER_PARAMETER, 10, 5)
"""Tokens per parameter of the choice, the most first; with fewer, methods cannot be distinguished."""
_SEQ_LEN, _SEQUENCES = 64, 32
"""Tokens of a sequence, and sequences of a step of all workers (at least one each), as in the measured losses."""
_ROUNDS, _FEWEST = 8, 3
"""The fewest rounds of the choice, and of any candidate."""
_VALIDATIONS, _VALIDATED = 8, 65_536
"""Validations of a run, and their tokens, reduced for short runs to a tenth of the time."""
_COMPILED_FROM = 300
"""Inner steps from which compiling pays for itself."""
VOCABULARY = 256
"""Tokens of the vocabulary of a race, which are bytes."""
_PLAYED, _LOOKS = 8, 4
"""Rounds simulated for the price of a shorter one, and search iterations for more steps that fit."""


class Entrant(NamedTuple):
    """A candidate with the rounds that its price gives it."""

    label: str
    candidate: Candidate
    rounds: int
    """With the last one, which may be shorter."""
    last: tuple[int, ...]
    """Inner steps of each worker in the last round."""
    seconds: float
    """Seconds of the network; less than the race's time if no further step fits."""

    @property
    def steps(self) -> int:
        """Inner steps of a worker that takes the full number."""
        return (self.rounds - 1) * self.candidate.full_steps + max(self.last)

    @property
    def local_steps(self) -> int | list[int] | dict[str, list[int]]:
        """Those of each round, as a run file has them."""
        steps = self.candidate.local_steps
        if self.last != steps:
            return {"0": list(steps), str((self.rounds - 1) * max(steps)): list(self.last)}
        return steps[0] if len({*steps}) == 1 else list(steps)

    @property
    def taken(self) -> int:
        """Inner steps of all workers together."""
        return (self.rounds - 1) * self.candidate.taken + self.candidate.site * sum(self.last)


class Course(NamedTuple):
    """A race: candidates, length and model."""

    model: ModelConfig
    parameters: int
    seq_len: int
    batch_size: int
    horizon_s: float
    """Seconds of the network that every candidate gets."""
    entrants: tuple[Entrant, ...]
    """The choice of the plan first."""
    left: Mapping[str, str]
    """Candidates of the shortlist that cannot be raced, with reasons."""

    @property
    def tokens(self) -> int:
        """Of one run of each candidate."""
        return sum(one.taken for one in self.entrants) * self.seq_len * self.batch_size

    def tokens_of(self, entrant: Entrant) -> int:
        """Of one run of a candidate."""
        return entrant.taken * self.seq_len * self.batch_size


def label_of(candidate: Candidate) -> str:
    """The name of a candidate among others of its plan.

    >>> label_of(Candidate("DiLoCo", "fp4", "bf16", (15, 9), 1.0, 1.0, 0.9, 1.0))
    'DiLoCo uneven 9-15 fp4'
    """
    most, fewest = candidate.full_steps, min(candidate.local_steps)
    return f"{candidate.name} {most if most == fewest else f'{fewest}-{most}'} {candidate.codec}"


def alone(made: RunPlan) -> list[Candidate]:
    """The quickest machine alone and, where there are sites, the quickest of these alone, as the plan prices them."""
    quickest = list[Candidate]()
    for method in (ALONE, SITE_ALONE):
        priced = [one for one in made.candidates if one.method == method]
        quickest += [min(priced, key=lambda one: one.seconds_per_token)] if priced else []
    return quickest


def with_single_machine(made: RunPlan, some: Sequence[Candidate]) -> list[Candidate]:
    """A shortlist, extended by the single machine or site unless included."""
    return [*some, *(one for one in alone(made) if one not in some)]


def courses(made: RunPlan, some: Sequence[Candidate]) -> Iterator[Course]:
    """The ways to race a shortlist, whose choice comes first: the smallest model and the shortest way first.

    The least of all have fewer candidates, without the last of the shortlist. The choice, the next one and what is alone stay.
    """
    keep = [one for one in some if one in alone(made)]
    others = [one for one in some if one not in keep or one is some[0]]
    for count in range(min(2, len(others)), len(others)):
        few = [*others[:count], *(one for one in keep if one not in others[:count])]
        yield course_of(made, few, SMALL, LENGTHS[-1])._replace(
            left={label_of(one): "the minutes do not suffice for it" for one in others[count:]}
        )
    sizes = [(model, each, parameter_count(model, VOCABULARY)) for model in _SIZES for each in LENGTHS]
    for model, each, _ in sorted(sizes, key=lambda one: one[1] * one[2] ** 2):
        yield course_of(made, some, model, each)


def course_of(
    made: RunPlan,
    some: Sequence[Candidate],
    model: ModelConfig,
    tokens_per_parameter: float,
    horizon_s: float | None = None,
) -> Course:
    """The race in which the choice trains on `tokens_per_parameter` tokens a parameter, or more if that gives too few
    rounds.

    Args: `horizon_s` is the time; that of the choice unless given.
    """
    n, choice = made.workers, some[0]
    batch_size = max(1, _SEQUENCES // n)
    parameters = parameter_count(model, VOCABULARY)
    if horizon_s is None:
        of_round = choice.taken * _SEQ_LEN * batch_size
        horizon_s = max(_ROUNDS, round(tokens_per_parameter * parameters / of_round)) * choice.round_s
    course = Course(model, parameters, _SEQ_LEN, batch_size, horizon_s, (), {})
    entrants, left = list[Entrant](), dict[str, str]()
    for one in some:
        if any(label_of(one) == entrant.label for entrant in entrants):
            continue  # it differs only in its return codec, and the better-ranked one is raced
        rounds = math.floor(horizon_s / one.round_s * (1 + 1e-9))
        if _fragments(one) > 1 and model.shape.layers == 1:
            left[label_of(one)] = "it needs a layer for each of its fragments, and the small model has one in all"
        elif rounds < _FEWEST:
            left[label_of(one)] = (
                f"{rounds} round{'s' * (rounds != 1)} in that time, of which at least {_FEWEST} are needed"
            )
        else:
            entrants.append(_entrant(course, made, one, rounds))
    return course._replace(entrants=tuple(entrants), left=left)


def _entrant(course: Course, made: RunPlan, candidate: Candidate, rounds: int) -> Entrant:
    """A candidate with its whole rounds within the time of a race, and a shorter last one in the remaining time.

    The seconds of a round with fewer steps are convex in these, so what is interpolated between two that are known is no less.
    """
    left_s = course.horizon_s - rounds * candidate.round_s
    whole = Entrant(label_of(candidate), candidate, rounds, candidate.local_steps, rounds * candidate.round_s)
    fewest, most = min(_fragments(candidate), course.model.shape.layers), candidate.full_steps
    if most <= fewest:
        return whole

    def of_each(steps: int) -> tuple[int, ...]:
        return tuple(max(fewest, own * steps // most) for own in candidate.local_steps)

    def seconds(steps: int) -> float:
        return _round_s(course, made, candidate, of_each(steps))

    # The plan has priced other rounds than `seconds` plays, of which only the difference between two lengths is taken.
    beyond_s = candidate.round_s - seconds(most)
    low, low_s, high, high_s = fewest, seconds(fewest) + beyond_s, most, candidate.round_s
    if low_s > left_s:
        return whole
    for _ in range(_LOOKS):
        if (between := low + math.floor((left_s - low_s) / (high_s - low_s) * (high - low))) <= low:
            break
        low, low_s = between, seconds(between) + beyond_s
        if low_s > left_s:  # by rounding alone
            low, low_s = low - 1, seconds(low - 1) + beyond_s
    return whole._replace(rounds=rounds + 1, last=of_each(low), seconds=whole.seconds + low_s)


def _round_s(course: Course, made: RunPlan, candidate: Candidate, local_steps: tuple[int, ...]) -> float:
    """The price of a round of a candidate with other local steps of each worker, as its run would be priced."""
    short = Entrant("", candidate, 1, local_steps, 0.0)
    text = _row(course, made, short) | {"run": {"steps": _PLAYED * max(local_steps), "local_steps": list(local_steps)}}
    base = {"model": toml_value(course.model), "data": {"source": "stdlib", "seq_len": 8, "batch_size": 1}}
    drafted = {key: value for key, value in text.items() if key != "label"}
    run = resolve(parse(with_settings(base, flat(drafted))))
    (priced,) = counted(run, layout_for(course.model, VOCABULARY), _PLAYED).networks
    assert priced.round_s is not None, priced.note
    return priced.round_s


def document(
    course: Course, made: RunPlan, source: str | Sequence[str], *, compiled: bool | None = None
) -> dict[str, Any]:
    """The experiment file of a race.

    Args:
        source: the text, as in data.source.
        compiled: in bf16 where that is fast on this processor, which the file keeps; unless given, where there is a compiler and
            the way is long enough.
    """
    n = made.workers
    if compiled is None:
        longest = max(one.steps for one in course.entrants)
        compiled = longest >= _COMPILED_FROM and shutil.which(os.environ.get("CXX", "g++")) is not None
    faster = {"compile": True, **({"autocast": "bf16"} if is_fast_in_bf16() else {})} if compiled else {}
    base: dict[str, Any] = {
        "name": "race",
        "workers": n,
        "seed": made.options.seed,
        "model": toml_value(course.model),
        "data": {"source": source, "seq_len": course.seq_len, "batch_size": course.batch_size},
        "inner": faster,
        "run": {"eval_workers": False, "checkpoint_every": 0},
        "record": {"tensorboard": False, "export": False, "keep_checkpoints": False},
    }
    step, trained = course.seq_len * course.batch_size, course.tokens_of(course.entrants[0])
    batches = max(8, min(_VALIDATED, trained // 30) // step)
    rows = []
    for one in course.entrants:
        local_steps = one.candidate.local_steps
        run = {
            "steps": one.steps,
            "local_steps": one.local_steps,
            "batched": min(8, len(local_steps)),
            "eval_every": math.ceil(one.steps / _VALIDATIONS),
            "eval_batches": batches,
        }
        rows.append({**_row(course, made, one), "run": run})
    return {**base, "variant": rows}


def _row(course: Course, made: RunPlan, entrant: Entrant) -> dict[str, Any]:
    """A variant of the experiment file, but for its table `[run]`."""
    team, site = network_of(made, entrant.candidate), entrant.candidate.site
    return {
        "label": entrant.label,
        **_method(entrant.candidate, course.model),
        "workers": len(entrant.candidate.local_steps),
        **{f"inner.{key}": value for key, value in measured_schedule(entrant.steps).items()},
        **({"data.batch_size": site * course.batch_size} if site > 1 else {}),
        "network": {"planned": to_options(times_as_fast(team, course.parameters / made.parameters))},
    }


def _fragments(candidate: Candidate) -> int:
    """The fragments in which a candidate's method sends a model of many layers."""
    return (
        1
        if candidate.trained_as in PLANNED.values()
        else recipe(candidate.method).settings.get("schedule.fragments", 1)
    )


def _method(candidate: Candidate, model: ModelConfig) -> dict[str, Any]:
    """The settings of a candidate as a variant has them; with fewer fragments where the model has fewer layers."""
    _, tuned = nearest_measured(candidate.trained_as, candidate.full_steps)
    rates = {"inner.lr": tuned.inner_lr}
    if candidate.trained_as in PLANNED.values():
        return {**method_tables(candidate), **rates}
    outer = {f"rule.{key}": value for key in ("lr", "momentum") if (value := getattr(tuned, key)) is not None}
    fewer = {"schedule.fragments": model.shape.layers} if _fragments(candidate) > model.shape.layers else {}
    return {"method": candidate.method, **rates, **outer, **fewer}


def written_race(folder: Path, course: Course, made: RunPlan, text: Mapping[str, Any]) -> None:
    """Writes the experiment file of a race into its folder."""
    make_folder(folder)
    head = (
        f"# A race of {len(course.entrants)} candidates of `gossamer plan` with {course.parameters:,} parameters.\n"
        f"# Links are slower by as much as the model is smaller than the planned {made.parameters:,}, so that rounds take the\n"
        f"# time of the planned one; each candidate has the rounds that fit {course.horizon_s:.6g} s of it.\n"
        "# Losses are those of the small model.\n"
    )
    atomic_write(folder / FILE, (head + tomli_w.dumps(text)).encode())


def opened_race(folder: Path, some: Sequence[Candidate]) -> dict[str, Any]:
    """The experiment file of a race that continues.

    Raises: ConfigError where there is none, or its candidates are not those of the shortlist.
    """
    if not (file := folder / FILE).is_file():
        raise ConfigError(f"--resume was given and '{file}' is not there; leave --resume out to begin a race")
    text = load_document(file)
    there, here = [str(row.get("label")) for row in text.get("variant", [])], [label_of(one) for one in some]
    if strange := [label for label in there if label not in here]:
        raise ConfigError(
            f"the race in '{folder}' has the candidate '{strange[0]}', which is not on the shortlist of this plan "
            f"({', '.join(here)}); give the network, the model and the options of then, or begin a race in another --race-folder"
        )
    return text


def race_standings(
    runs: Sequence[Point], results: Sequence[PointResult]
) -> tuple[list[int], dict[str, list[float]], Standing | None]:
    """The seeds that all candidates have ended, their losses there, and how the candidates stand; None before the first seed.

    A run that diverged has an infinite loss.
    """
    ended = {(one.method, one.seed): one.row["loss"] for one in results}
    labels = [*dict.fromkeys(run.method for run in runs)]
    seeds = [
        seed for seed in dict.fromkeys(run.seed for run in runs) if all((label, seed) in ended for label in labels)
    ]
    losses = {
        label: [
            loss if (loss := ended[label, seed]) is not None and math.isfinite(loss) else math.inf for seed in seeds
        ]
        for label in labels
    }
    return seeds, losses, standing(losses) if seeds else None


def carried_over(
    losses: Mapping[str, Sequence[float]], candidates: Mapping[str, Candidate], choice: Pick, raced: LossScale
) -> Standing:
    """The standing of candidates for the planned model: `E(planned) + (loss - E(raced)) · gap(planned) / gap(raced)`
    for each seed.

    E is what the plan expects of a candidate in the time, for the planned model and for the raced one, whose rounds are
    fewer. So a race that ends as expected leaves the plan unchanged, and deviations shrink like the gap of all methods
    to data parallelism.

    Args: `losses` are those of the race, `choice` is that of the plan, and `raced` the plan's expectation of the race.
    """
    there, shrinks = choice._replace(scale=raced), choice.scale.gap / raced.gap if raced.gap else 1.0
    moved = dict[str, list[float]]()
    for label, some in losses.items():
        planned, here = choice.loss(candidates[label]), there.loss(candidates[label])
        assert planned is not None and here is not None, "a shortlist has none whose loss is not known"
        moved[label] = [planned.nats + shrinks * (loss - here.nats) for loss in some]
    return standing(moved)
