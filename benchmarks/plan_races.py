"""Races what `gossamer plan` picks against its shortlist, on six networks and at two model sizes: docs/results/races.md.

    python benchmarks/plan_races.py --core-hours 1 --jobs 2     # goes on where it stopped
    python benchmarks/plan_races.py --own-size even_10m --core-hours 2      # two candidates, with all of the planned parameters
    python benchmarks/plan_races.py --held-out --core-hours 12 --jobs 2     # eight networks that no rule has seen; goes on too
    python benchmarks/plan_races.py --page              # writes the page only

Every cell is a network of configs/networks and a model in bytes and seconds of an inner step; what is trained is a small model
(`gossamer.run.experiments.race`), with five seeds that have chosen nothing. Each outcome is
appended to docs/results/races/outcomes.jsonl as soon as the run has ended. What counts as right was registered before the first
of them (docs/evidence/registered.md). With --own-size the pick and what the plan would pick at the scale of the small model are
trained with the 869,504 parameters that were planned, three seeds each: docs/results/races/own_size.jsonl.

With --held-out the eight networks of benchmarks/held_out run on two other texts: docs/results/races/held_out.jsonl, and the last
section of the page. One text is the manual of Perl (Debian: apt-get install perl-doc, or unpack it and give --pods the folder of
its *.pod), the other the package sympy, which torch brings along.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.links import read_network
from gossamer.record.jsonl import json_line
from gossamer.record.origin import origin
from gossamer.report.paired import Standing, effect, standing
from gossamer.report.table import markdown_lines
from gossamer.run.config.experiment_file import Point, points
from gossamer.run.config.run_file import digest
from gossamer.run.experiments.processes import RunEnd, RunPool
from gossamer.run.experiments.race import LENGTHS, SMALL, Course, alone, course_of, document, label_of
from gossamer.run.planning.candidates import USUAL, choose_among, price_recipes
from gossamer.run.planning.choice import Candidate, Pick, best_of_each, pick, shortlist
from gossamer.run.planning.expected_loss import LossScale
from gossamer.run.planning.measured_losses import MEASURED_PARAMETERS
from gossamer.run.planning.plan import PlanSettings, RunPlan, bits_per_parameter, plan

ROOT = Path(__file__).parents[1]
OUTCOMES = ROOT / "docs" / "results" / "races" / "outcomes.jsonl"
OWN_SIZE = OUTCOMES.with_name("own_size.jsonl")
PAGE = ROOT / "docs" / "results" / "races.md"
NETWORKS = {
    "even_1g": "even, 1 Gbit/s",
    "even_10m": "even, 10 Mbit/s",
    "slow_in_turn": "slow in turn",
    "two_sites": "two sites, 100 Mbit/s",
    "slow_uplink": "one uplink at a tenth",
    "strangers": "eight strangers at home",
}
MODELS = {"1m": 256, "134m": 32_000}
"""Sizes with their vocabularies: 869,504 and 134,105,856 parameters. The networks say what an inner step takes, for both."""
CELLS = [(network, size) for size in MODELS for network in NETWORKS]
SEEDS, AGAIN, LATER, LAST = (tuple(range(first, first + 5)) for first in (40, 45, 50, 55))
RACED_AGAIN = {("slow_uplink", "134m"): AGAIN, ("even_10m", "1m"): LATER, ("strangers", "134m"): LAST}
"""Cells whose race changed with the plan: seeds that nobody had seen."""
PLANNED = ModelConfig(size="1m")
MARGIN = 0.02
CODECS = ("bf16", "int8", "fp4")
HELD_OUT = OUTCOMES.with_name("held_out.jsonl")
HELD_OUT_NETWORKS = ROOT / "benchmarks" / "held_out"
HELD_OUT_SEEDS, HELD_OUT_HOURS, FOUR = tuple(range(60, 65)), 12.0, 4
"""Fresh seeds, the most core-hours, and how many of the best of the plan are raced."""


class HeldOut(NamedTuple):
    """A network that no rule has seen, and what the planner picked before it changed; as registered."""

    network: str
    text: str
    size: str
    planned: str
    """For the planned model."""
    raced: str
    """For the raced model, in the time of the race."""


HELD_OUT_CELLS = (
    HeldOut("two_desks", "sympy", "134m", "DiLoCo uneven 30-60 fp4", "DiLoCo uneven 7-15 fp4"),
    HeldOut("three_homes", "pods", "1m", "DiLoCo uneven 3-15 fp4", "DiLoCo uneven 3-15 fp4"),
    HeldOut("six_and_a_modem", "sympy", "134m", "GASLoC 1-Peer 32-480 int8", "GASLoC 1-Peer 32-480 int8"),
    HeldOut("four_cities", "pods", "1m", "DiLoCo 15 fp4", "DiLoCo 5 fp4"),
    HeldOut("three_sites", "pods", "134m", "DiLoCo 480 fp4", "GASLoC 1-Peer 480 int8"),
    HeldOut("satellite", "sympy", "1m", "DiLoCo 15 fp4", "GASLoC 2-Peer 5 int8"),
    HeldOut("campus", "pods", "134m", "DiLoCo uneven 192-480 fp4", "DiLoCo uneven 192-480 fp4"),
    HeldOut("fast_lan", "sympy", "1m", "data parallel 1 bf16", "data parallel 1 bf16"),
)


class Cell(NamedTuple):
    """What is raced on a network at a size."""

    made: RunPlan
    course: Course
    choice: str
    """What the plan picks."""
    second: str
    """What the plan would pick if its losses were those of the small model."""
    expected: dict[str, float]
    """Nats that the plan expects of each candidate there, above data parallelism that reads as much as the pick."""
    round_s: dict[str, float]
    """Seconds of a round of each candidate, by the plan as it is now."""

    def has_run(self, label: str, lines: Sequence[dict[str, Any]]) -> bool:
        """Whether a candidate is in the lines of the cell, within 5 % of the price that it has now."""
        prices = (one["round_s"] for one in lines if one["label"] == label)
        return any(math.isclose(price, self.round_s.get(label, 0.0), rel_tol=0.05) for price in prices)


class Planned(NamedTuple):
    """A plan with all that it chooses from."""

    made: RunPlan
    choice: Pick
    everything: tuple[Candidate, ...]

    def at_the_scale_of_the_race(self, seconds: float) -> Pick:
        """What the plan would choose for the small model, in the time of a race."""
        of_worker = _step_tokens(self.made)
        fastest_s = min(one.round_s / (one.taken * of_worker) for one in self.everything)
        tokens = seconds / fastest_s
        steps = tokens / (self.made.workers * of_worker)
        n = self.made.workers
        return pick(self.everything, LossScale(MEASURED_PARAMETERS, n, tokens, 256, steps=steps, seconds=seconds))


def _step_tokens(made: RunPlan) -> int:
    """Of a worker in the race."""
    course = course_of(made, [made.best], SMALL, LENGTHS[0])
    return course.seq_len * course.batch_size


def planned(network: Path, size: str) -> Planned:
    """The plan for a network and a size."""
    model = ModelConfig(size=size)
    bits = bits_per_parameter(CODECS, parameter_count(model, MODELS[size]))
    made = plan(read_network(network), model, PlanSettings(vocab_size=MODELS[size], codecs=bits))
    priced = price_recipes(made, USUAL)
    return Planned(made, choose_among(made, priced), (*made.candidates, *priced.candidates))


def _expectations(choice: Pick, everything: Sequence[Candidate]) -> dict[str, float]:
    """Nats that a plan expects of each candidate above data parallelism that reads as much as the choice.

    Of several with one label, as each kind of machine is alone, the lowest is kept: it is the one that is raced.
    """
    known = [(loss.nats, label_of(one)) for one in everything if (loss := choice.loss(one)) is not None]
    return {label: nats for nats, label in sorted(known, reverse=True)}


def _prices(everything: Sequence[Candidate]) -> dict[str, float]:
    """Seconds of a round by label."""
    return {label_of(one): one.round_s for one in everything}


def cell_of(network: str, size: str, horizon_s: float | None = None) -> Cell:
    """The plan of a cell with its shortlist, and its pick for the small model in the time of the race.

    Args: `horizon_s` is that time; that of this plan unless given.
    """
    of = planned(ROOT / "configs" / "networks" / f"{network}.toml", size)
    some = shortlist(of.choice, of.everything)
    seconds = horizon_s or course_of(of.made, some[:1], SMALL, LENGTHS[0]).horizon_s
    second = of.at_the_scale_of_the_race(seconds)
    if second.best not in some:
        some.append(second.best)
    course = course_of(of.made, some, SMALL, LENGTHS[0], seconds)
    expected = _expectations(second, of.everything)
    return Cell(of.made, course, label_of(of.choice.best), label_of(second.best), expected, _prices(of.everything))


def held_out_cell(cell: HeldOut, folder: Path = HELD_OUT_NETWORKS) -> Cell:
    """Who runs on a network that no rule has seen, by the plan as it is now.

    That are its pick for the raced model in the time of the race and that for the planned one, the four best of its table (the
    best of each method) for the raced model, both picks that were registered, the quickest machine alone and, where there are
    sites, the quickest of these alone. The time is that in which the registered pick for the raced model reads 20 tokens a
    parameter, or has eight rounds if that is longer.
    """
    of = planned(folder / f"{cell.network}.toml", cell.size)
    by_label = {label_of(one): one for one in reversed(of.everything)}  # the first of several with one label
    if cell.raced not in by_label:
        raise SystemExit(f"{cell.network}: the registered pick '{cell.raced}' is no candidate of the plan any more")
    seconds = course_of(of.made, [by_label[cell.raced]], SMALL, LENGTHS[0]).horizon_s
    second = of.at_the_scale_of_the_race(seconds)
    expected = _expectations(second, of.everything)
    rows = [one for one in best_of_each(second, of.everything) if one.trained_as == one.method]  # not what is alone
    rows.sort(key=lambda one: expected.get(label_of(one), math.inf))
    some = [second.best, *rows[:FOUR], of.choice.best, by_label[cell.raced]]
    some += [by_label[cell.planned]] if cell.planned in by_label else []
    course = course_of(of.made, [*some, *alone(of.made)], SMALL, LENGTHS[0], seconds)
    return Cell(of.made, course, label_of(of.choice.best), label_of(second.best), expected, _prices(of.everything))


def texts(pods: Path | None) -> dict[str, str]:
    """Where the two texts are, by name; the manual of Perl as .txt files in runs/, as no ending is known by which it is read."""
    found = sorted({one.resolve() for one in pods.glob("*.pod")} if pods else _installed_pods())
    if sum(one.stat().st_size for one in found) < FEWEST_BYTES:
        raise SystemExit(
            f"{len(found)} files of the manual of Perl are here; install Debian's perl-doc, or give --pods the folder of another"
        )
    os.chdir(ROOT)  # so that the digest of a run does not depend on where the repository is
    folder = Path("runs", "held_out", "pods")
    folder.mkdir(parents=True, exist_ok=True)
    for one in found:
        (folder / f"{one.stem}.txt").write_bytes(one.read_bytes())
    if not metadata.version("sympy").startswith("1.14"):
        raise SystemExit(f"sympy is {metadata.version('sympy')} here; install 1.14, which was registered")
    sympy = util.find_spec("sympy")
    assert sympy is not None and sympy.origin is not None
    return {"pods": str(folder), "sympy": str(Path(sympy.origin).parent)}


FEWEST_BYTES = 4_000_000


def _installed_pods() -> set[Path]:
    return {one.resolve() for one in Path("/usr/share/perl").glob("*/pod/*.pod")}


def at_its_own_size(network: str) -> Cell:
    """The pick of a plan for 869,504 parameters, and that at the scale of the small model, both as planned."""
    cell = cell_of(network, "1m")
    two = [one.candidate for one in cell.course.entrants if one.label in (cell.choice, cell.second)]
    return cell._replace(course=course_of(cell.made, two, PLANNED, LENGTHS[0]))


def run(core_hours: float, own_size: str | None, jobs: int) -> None:
    """Trains what is missing, cell by cell and seed by seed, until the hours of these runs are over."""
    to = OWN_SIZE if own_size else OUTCOMES
    to.parent.mkdir(parents=True, exist_ok=True)
    known = {(one["network"], one["size"], one["label"], one["seed"], one["horizon_s"]) for one in outcomes(to)}
    origin("", None)  # asks which commit this is before the first run
    left_s = 3600 * core_hours
    for network, size in [(own_size, "1m")] if own_size else CELLS:
        if left_s <= 0:
            return
        there = [] if own_size else of_cell(outcomes(), network, size)
        ended = verdict(there)
        horizon_s = None if ended is None else there[0]["horizon_s"]
        cell = at_its_own_size(network) if own_size else cell_of(network, size, horizon_s)
        if ended is not None:  # a pick that has changed since joins the race that its cell has
            late = (one for one in cell.course.entrants if one.label == cell.second and one.label not in ended.losses)
            cell = cell._replace(course=cell.course._replace(entrants=tuple(late)))
        if not cell.course.entrants:
            continue
        text = document(cell.course, cell.made, "stdlib", compiled=True)
        some = sorted(points(text, seeds=SEEDS[:3] if own_size else seeds_of(network, size)), key=lambda one: one.seed)
        some = [one for one in some if (network, size, one.method, one.seed, cell.course.horizon_s) not in known]

        def line(
            method: str,
            seed: int,
            ended: RunEnd,
            of_config: str,
            cell: Cell = cell,
            of: tuple[str, str] = (network, size),
        ) -> dict[str, Any]:
            return _outcome(cell, (*of, method, seed), ended, of_config)

        left_s -= _trained(some, to, line, left_s, jobs)


def _trained(
    some: Sequence[Point],
    to: Path,
    line_of: Callable[[str, int, RunEnd, str], dict[str, Any]],
    most_s: float,
    jobs: int,
) -> float:
    """Trains runs until their seconds are over, and adds each outcome to a file as soon as it is there; returns these seconds."""
    spent_s = 0.0
    with tempfile.TemporaryDirectory() as scratch, RunPool(jobs) as apart:
        for one in some:
            apart.add((one.method, one.seed, digest(one.config)), one.config, Path(scratch) / one.label)
        while apart.busy:
            for (method, seed, of_config), ended in apart.ended():
                spent_s += ended.core_s
                line = line_of(method, seed, ended, of_config)
                with to.open("a", encoding="utf-8") as file:
                    file.write(json_line(line))
                print(line["network"], line["size"], method, seed, ended.loss, ended.error, ended.core_s, flush=True)
            if spent_s >= most_s:
                apart.drop()
    return spent_s


def run_held_out(
    core_hours: float, jobs: int, sources: dict[str, str], cells: Sequence[HeldOut] = HELD_OUT_CELLS
) -> None:
    """Trains what is missing of the networks that no rule has seen, cell by cell, for so many core-hours and twelve in all."""
    HELD_OUT.parent.mkdir(parents=True, exist_ok=True)
    origin("", None)  # asks which commit this is before the first run
    spent_s = sum(one["core_s"] for one in outcomes(HELD_OUT))
    until_s = min(spent_s + 3600 * core_hours, 3600 * HELD_OUT_HOURS)
    for cell in cells:
        before = outcomes(HELD_OUT)
        left_s = until_s - sum(one["core_s"] for one in before)
        if left_s <= 0:
            return
        raced = held_out_cell(cell)
        for label, why in raced.course.left.items():
            print(cell.network, "not raced:", label, why, flush=True)
        known = {(one["network"], one["label"], one["seed"], one["horizon_s"]) for one in before}
        text = document(raced.course, raced.made, sources[cell.text], compiled=True)
        runs = sorted(points(text, seeds=HELD_OUT_SEEDS), key=lambda one: one.seed)
        runs = [one for one in runs if (cell.network, one.method, one.seed, raced.course.horizon_s) not in known]

        def line(
            method: str, seed: int, ended: RunEnd, of_config: str, cell: HeldOut = cell, raced: Cell = raced
        ) -> dict[str, Any]:
            own = _outcome(raced, (cell.network, cell.size, method, seed), ended, of_config)
            entrant = next(one for one in raced.course.entrants if one.label == method)
            return {
                **own,
                "text": cell.text,
                "registered": method == cell.raced,
                "registered_planned": method == cell.planned,
                "share_of_last": max(entrant.last) / entrant.candidate.full_steps,
                "expected": raced.expected.get(method),
            }

        _trained(runs, HELD_OUT, line, left_s, jobs)


def _outcome(cell: Cell, run: tuple[str, str, str, int], ended: RunEnd, of_config: str) -> dict[str, Any]:
    """The line of a run that has ended."""
    network, size, method, seed = run
    entrant = next(entrant for entrant in cell.course.entrants if entrant.label == method)
    return {
        "network": network,
        "size": size,
        "label": method,
        "seed": seed,
        "loss": ended.loss,
        "error": ended.error,
        "chosen": method == cell.choice,
        "second": method == cell.second,
        "round_s": entrant.candidate.round_s,
        "rounds": entrant.rounds,
        "tokens": cell.course.tokens_of(entrant),
        "horizon_s": cell.course.horizon_s,
        "core_s": ended.core_s,
        "origin": origin(of_config, ended.seconds, ended.text),
    }


def seeds_of(network: str, size: str) -> tuple[int, ...]:
    """Those of a cell."""
    return RACED_AGAIN.get((network, size), SEEDS)


def outcomes(file: Path = OUTCOMES) -> list[dict[str, Any]]:
    """The runs that have ended."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def of_cell(lines: Sequence[dict[str, Any]], network: str, size: str) -> list[dict[str, Any]]:
    """The runs of a cell with its seeds; where its time has changed with the plan since, those of the last."""
    seeds = seeds_of(network, size)
    own = [one for one in lines if (one["network"], one["size"]) == (network, size) and one["seed"] in seeds]
    return [one for one in own if one["horizon_s"] == own[-1]["horizon_s"]]


class Verdict(NamedTuple):
    """How the candidates of a cell stand."""

    standing: Standing
    decided: bool
    """Whether the best is told apart from the second best."""
    losses: dict[str, list[float]]

    def above(self, label: str) -> float:
        """Nats of a candidate above the best, in the mean."""
        return statistics.fmean(self.losses[label]) - statistics.fmean(self.losses[self.standing.best])


def verdict(lines: Sequence[dict[str, Any]]) -> Verdict | None:
    """That of the runs of a cell, by the rules that were registered; None before all of its runs have ended."""
    return _verdict(lines, seeds_of(lines[0]["network"], lines[0]["size"])) if lines else None


def _verdict(lines: Sequence[dict[str, Any]], seeds: Sequence[int]) -> Verdict | None:
    """That of these seeds."""
    labels = [*dict.fromkeys(one["label"] for one in lines)]
    ended = {(one["label"], one["seed"]): one["loss"] for one in lines}
    if any((label, seed) not in ended for label in labels for seed in seeds):
        return None
    losses = {label: [math.inf if (x := ended[label, seed]) is None else x for seed in seeds] for label in labels}
    by_mean = sorted(losses, key=lambda label: statistics.fmean(losses[label]))
    pairs = [(b - a, a) for a, b in zip(losses[by_mean[0]], losses[by_mean[1]], strict=True)]
    apart = effect(pairs).apart
    return Verdict(standing(losses), apart is not None and apart < 0.05, losses)


_OF_THE_QUICKEST = {
    ("two_desks", "one machine alone 1 exact"): 0.07278494921852574,
    ("three_homes", "one machine alone 1 exact"): 0.0937157145298299,
    ("campus", "one machine alone 1 exact"): 0.4876743648323414,
}
"""Nats that the planner of these races expected of the quickest machine, in place of which it wrote those of the slowest."""


def held_out_outcomes(file: Path | None = None) -> list[dict[str, Any]]:
    """The runs on networks that no rule has seen, where one machine alone has the expectation of the machine that ran."""
    lines = outcomes(file or HELD_OUT)
    return [{**one, "expected": _OF_THE_QUICKEST.get((one["network"], one["label"]), one["expected"])} for one in lines]


SECTION = "## Networks that no rule has seen"
"""The last of the page."""


def held_out_section(lines: Sequence[dict[str, Any]]) -> str:
    """What came of the networks that no rule has seen, from the outcomes alone."""
    parts = [
        SECTION,
        (
            "Eight networks on two texts, written for this; picks, seeds and what counts were "
            "[registered](../evidence/registered.md#races-on-networks-that-no-rule-has-seen) before the planner changed. All "
            "candidates of a network have the same time, with a shorter last round."
        ),
        "    python benchmarks/plan_races.py --held-out --core-hours 12 --jobs 2",
    ]
    rows = [["network", "text", "model", "pick", "lowest in the race", "pick above it, nats", "told apart"]]
    rows[0] += ["registered pick", "above the lowest, nats", "told apart"]
    rows.append(["---", "---", "---", "---", "---", "---:", "---", "---", "---:", "---"])
    done, tables, within = 0, list[str](), {"second": 0, "registered": 0}
    apart_of, holds, off = dict.fromkeys(within, 0), dict.fromkeys(within, 0), list[float]()
    for cell in HELD_OUT_CELLS:
        own = [one for one in lines if one["network"] == cell.network]
        own = [one for one in own if one["horizon_s"] == own[-1]["horizon_s"]]
        one = None if not own else _verdict(own, HELD_OUT_SEEDS)
        if one is None:
            continue
        done += 1
        row = [cell.network, cell.text, cell.size]
        for which in within:
            label = next((line["label"] for line in reversed(own) if line[which]), None)
            row += [label or "not raced"]
            row += [one.standing.best] if which == "second" else []
            if label is None:
                row += ["", ""]
                continue
            is_within, is_above = one.above(label) <= MARGIN, not one.standing.may_be_best(label)
            within[which] += is_within
            apart_of[which] += is_above
            holds[which] += is_within and not is_above
            row += [_gap(one, label), "yes" if is_above else "no"]
        rows.append(row)
        tables.append(f"### {cell.network}, {cell.size}, {cell.text}")
        tables.append(_held_out_table(own, one))
        off += [nats - one.above(label) for label, nats in _expected_above(own, one).items()]
    if not done:
        return "\n\n".join([*parts, "None has run with all seeds."]) + "\n"
    core_hours = sum(one["core_s"] for one in lines) / 3600
    parts.append(
        f"{done} of {len(HELD_OUT_CELLS)} networks have run with all seeds, {len(lines)} runs in {core_hours:.2f} core-hours. "
        f"Within {MARGIN:g} nats of the lowest are {within['second']} picks of the planner as it was when they ran and "
        f"{within['registered']} of the registered ones; significantly above it (5 %, Holm) are {apart_of['second']} and "
        f"{apart_of['registered']}. By both, {holds['second']} and {holds['registered']} hold: all were aimed at, six expected. "
        f"What a plan expected of {len(off)} other candidates above the lowest is off by "
        f"{statistics.fmean(map(abs, off)):.3f} nats in the mean, {statistics.median(map(abs, off)):.3f} in the median."
    )
    return "\n\n".join([*parts, markdown_lines(rows).rstrip(), *tables]) + "\n"


def _expected_above(lines: Sequence[dict[str, Any]], one: Verdict) -> dict[str, float]:
    """What a plan expected of each other candidate above the one that ended lowest, where it expected something of both."""
    expected: dict[str, float | None] = {line["label"]: line["expected"] for line in lines}
    least = expected.pop(one.standing.best)
    return {} if least is None else {label: nats - least for label, nats in expected.items() if nats is not None}


def _held_out_table(lines: Sequence[dict[str, Any]], one: Verdict) -> str:
    """All candidates of a network, the lowest first; ± is half a 95 % interval of the paired difference."""
    above = _expected_above(lines, one)
    rows = [["candidate", "rounds", "s a round", "tokens", "loss, mean of the seeds", "above the lowest", "expected"]]
    rows.append(["---", *["---:"] * 6])
    for label in sorted(one.losses, key=lambda label: statistics.fmean(one.losses[label])):
        line = next(line for line in reversed(lines) if line["label"] == label)
        mean = statistics.fmean(one.losses[label])
        gap = "" if label == one.standing.best else _gap(one, label)
        expected = f"{above[label]:+.4f}" if label in above else ""
        rows.append(
            [
                label,
                f"{line['rounds'] - 1 + line['share_of_last']:.4g}",
                f"{line['round_s']:.4g}",
                f"{line['tokens']:,}",
                f"{mean:.4f}" if math.isfinite(mean) else "diverged",
                gap,
                expected,
            ]
        )
    return markdown_lines(rows).rstrip()


_SINCE = (
    "The planner has changed since. In {} of {} cells its pick of today was not raced, or not at its price, and the row has the "
    "last pick that was, with the commit of its plan: {}."
)


def page() -> str:
    """The page, from the outcomes."""
    lines = outcomes()
    by_cell = {cell: of_cell(lines, *cell) for cell in CELLS}
    found = {cell: verdict(some) for cell, some in by_cell.items()}
    done = {cell: one for cell, one in found.items() if one is not None}
    plans, missing = dict[tuple[str, str], Cell](), list[str]()
    for cell in done:
        own = by_cell[cell]
        now = cell_of(*cell, own[0]["horizon_s"])
        if not now.has_run(now.second, own):  # the row has the last pick that was raced
            last = next(one for one in reversed(own) if one["second"])
            missing.append(
                f"{NETWORKS[cell[0]]}, {cell[1]}: {now.second} (raced: {last['label']}, of {last['origin']['commit'][:8]})"
            )
            now = now._replace(second=last["label"])
        expected = {label: nats for label, nats in now.expected.items() if now.has_run(label, own)}
        plans[cell] = now._replace(expected=expected)
    picks = {cell: one.second for cell, one in plans.items()}
    rows = [["network", "model", "pick", "lowest in the race", "pick above it, nats", "told apart", "best decided"]]
    rows[0] += ["pick for the planned model", "above the lowest, nats"]
    rows.append(["---", "---", "---", "---", "---:", "---", "---", "---", "---:"])
    for (network, size), one in done.items():
        chosen, planned = picks[network, size], plans[network, size].choice
        row = [NETWORKS[network], size, chosen, one.standing.best, _gap(one, chosen)]
        row += ["no" if one.standing.may_be_best(chosen) else "yes", "yes" if one.decided else "no"]
        has_run = plans[network, size].has_run(planned, by_cell[network, size])
        rows.append([*row, planned, _gap(one, planned) if has_run else "not raced"])
    far = sum(one.above(picks[cell]) > MARGIN for cell, one in done.items())
    apart = sum(not one.standing.may_be_best(picks[cell]) for cell, one in done.items())
    for_planned = [
        (one, plan.choice) for cell, one in done.items() if (plan := plans[cell]).has_run(plan.choice, by_cell[cell])
    ]
    not_raced = len(done) - len(for_planned)
    far_for_planned = sum(one.above(label) > MARGIN for one, label in for_planned)
    off = [
        one.above(label) - gap
        for cell, one in done.items()
        for label in one.losses
        if (gap := _expected(plans[cell], one, label)) is not None
    ]
    core_hours = sum(one["core_s"] for one in lines) / 3600
    parts = [
        "# Races of what a plan picks",
        "    python benchmarks/plan_races.py",
        (
            "What `gossamer plan` picks, raced against its shortlist: 139,584 parameters are trained for the time that bytes and "
            "seconds of the planned model give each candidate, and losses are those of the small model. "
            "[Registered](../evidence/registered.md#races-of-what-a-plan-picks) before the first run, and "
            "[again](../evidence/registered.md#losses-of-a-plan-with-one-warm-up) before the last; "
            "five seeds that chose nothing."
        ),
        (
            f"{len(done)} of {len(CELLS)} cells have run, with {len(lines)} runs and {core_hours:.2f} core-hours, "
            f"those of former plans among them. Of these, picks more than {MARGIN:g} nats above the lowest: {far}; "
            f"picks told apart from the lowest (5 %, Holm): {apart}; "
            f"races whose two lowest are not told apart: {sum(not one.decided for one in done.values())}."
        ),
        (
            "The pick is the plan's for the model that is trained, in the time of the race, as `gossamer plan` picks for a model "
            "of that size. For the planned model, which has many more rounds in its time, the plan may pick another candidate, "
            "and expects that one to end higher in the race; it stands beside, where it has run."
        ),
        (
            "The rule that was registered first judges the pick for the planned model. By it, picks more than "
            f"{MARGIN:g} nats above the lowest: {far_for_planned}; picks that were not raced: {not_raced}. The planner's rules "
            "were changed after these races, so they test nothing any more; [networks that no rule has "
            "seen](#networks-that-no-rule-has-seen) test the planner."
        ),
        *([_SINCE.format(len(missing), len(done), "; ".join(missing))] if missing else []),
        (
            f"Of {len(off)} candidates above the lowest of their cell the distance is off what the plan expects by "
            f"{math.sqrt(statistics.fmean(x * x for x in off)):.3f} nats (root mean square), "
            f"and at most by {max(map(abs, off)):.3f}."
        ),
    ]
    if done:
        parts.append(markdown_lines(rows).rstrip())
    for (network, size), one in done.items():
        parts.append(f"## {NETWORKS[network]}, {size}")
        parts.append(_table(by_cell[network, size], one, plans[network, size]))
    if whole := outcomes(OWN_SIZE):
        parts += _at_its_own_size(whole)
    if not_run := [f"{NETWORKS[network]} with {size}" for (network, size), one in found.items() if one is None]:
        parts.append(f"Not run, or not with all seeds: {'; '.join(not_run)}.")
    return "\n\n".join(parts) + "\n\n" + held_out_section(held_out_outcomes())


def _at_its_own_size(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Whether the pick, or that at the scale of the small model, ends lower with the parameters that were planned."""
    parts = [
        "## With all parameters",
        (
            "The pick of the plan and its pick at the scale of the race, trained with 869,504 parameters for the "
            "hours of the plan, over seeds that both have ended "
            "([registered](../evidence/registered.md#races-with-all-parameters)):"
        ),
        "    python benchmarks/plan_races.py --own-size even_10m",
    ]
    rows = [
        [
            "network",
            "pick of the plan",
            "pick at the scale of the race",
            "loss of each",
            "seeds",
            "the plan's above the other's",
        ]
    ]
    rows.append(["---", "---", "---", "---", "---:", "---:"])
    for network in dict.fromkeys(one["network"] for one in lines):
        own = [one for one in lines if one["network"] == network]
        ended = {(one["chosen"], one["seed"]): one["loss"] for one in own}
        seeds = [seed for seed in SEEDS if (True, seed) in ended and (False, seed) in ended]
        if not seeds:
            continue
        found = effect([(ended[True, seed] - ended[False, seed], ended[False, seed]) for seed in seeds])
        names = [next(one["label"] for one in own if one["chosen"] == chosen) for chosen in (True, False)]
        means = [statistics.fmean(ended[chosen, seed] for seed in seeds) for chosen in (True, False)]
        half = "" if found.half is None else f" ± {found.half:.4f}"
        rows.append(
            [NETWORKS[network], *names, f"{means[0]:.4f}, {means[1]:.4f}", str(len(seeds)), f"{found.mean:+.4f}{half}"]
        )
    return [*parts, markdown_lines(rows).rstrip()]


def _gap(one: Verdict, label: str) -> str:
    """How far a candidate ends above the lowest."""
    if label == one.standing.best:
        return "0"
    stands = one.standing.above.get(label)
    return "diverged" if stands is None else f"{stands.mean:+.4f} ± {stands.half or 0:.4f}"


def _expected(cell: Cell, one: Verdict, label: str) -> float | None:
    """How far the plan expects a candidate above the lowest; None of that itself, and where the plan does not know."""
    own, least = cell.expected.get(label), cell.expected.get(one.standing.best)
    return None if label == one.standing.best or own is None or least is None else own - least


def _table(lines: Sequence[dict[str, Any]], one: Verdict, cell: Cell) -> str:
    """All candidates of a cell, the lowest first."""
    rows = [["candidate", "rounds", "s a round", "tokens", "loss, mean of the seeds", "above the lowest", "expected"]]
    rows.append(["---", *["---:"] * 6])
    for label in sorted(one.losses, key=lambda label: statistics.fmean(one.losses[label])):
        line = next(line for line in lines if line["label"] == label)
        stands = one.standing.above.get(label)
        gap = "" if stands is None else f"{stands.mean:+.4f} ± {stands.half or 0:.4f}"
        words = " (pick)" if label == cell.second else ""
        mean = statistics.fmean(one.losses[label])
        loss = f"{mean:.4f}" if math.isfinite(mean) else "diverged"
        expected = _expected(cell, one, label)
        sizes = (str(line["rounds"]), f"{line['round_s']:.4g}", f"{line['tokens']:,}")
        rows.append([label + words, *sizes, loss, gap, "" if expected is None else f"{expected:+.4f}"])
    return markdown_lines(rows).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--core-hours",
        type=float,
        default=1.0,
        help="time of the runs, each on one core, after which no further one begins",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process with its own core")
    parser.add_argument("--own-size", choices=[*NETWORKS], help="a network whose two picks are trained as planned")
    parser.add_argument("--held-out", action="store_true", help="race the networks that no rule has seen; resumes")
    parser.add_argument(
        "--pods", type=Path, help="folder of *.pod of the manual of Perl (default: where Debian has it)"
    )
    parser.add_argument("--page", action="store_true", help="write the page from the outcomes, and train nothing")
    given = parser.parse_args()
    if given.held_out:  # their section alone: the others' picks are those of the plan as it is
        if not given.page:
            run_held_out(given.core_hours, given.jobs, texts(given.pods))
        before = PAGE.read_text(encoding="utf-8").partition(SECTION)[0]
        PAGE.write_text(f"{before.rstrip()}\n\n{held_out_section(held_out_outcomes())}", encoding="utf-8")
        return
    if not given.page:
        run(given.core_hours, given.own_size, given.jobs)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
