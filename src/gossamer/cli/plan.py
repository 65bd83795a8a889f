"""`gossamer plan`: methods priced on a network before anything is trained."""

import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli.output import print_json, working
from gossamer.cli.plan_options import (
    PlanOptions,
    boundaries_of,
    check_goal,
    check_numbers,
    check_out,
    check_workers,
    of_run_file,
    settings_for,
    timed_model,
)
from gossamer.cli.printed_plan import hours_to_loss, print_plan
from gossamer.cli.race import NO_RACE, Race, RaceOptions, in_minutes, prepare_race, print_race, race, race_facts
from gossamer.cli.run_file_options import runs_at_a_time
from gossamer.cli.tables import print_sentence
from gossamer.cli.watch import WATCHABLE, Watchable
from gossamer.errors import ConfigError
from gossamer.record.progress import echo, say

if TYPE_CHECKING:
    from gossamer.network.links import Network
    from gossamer.run.planning.candidates import Priced
    from gossamer.run.planning.choice import Candidate, Pick
    from gossamer.run.planning.plan import RunPlan
    from gossamer.run.planning.planned_stages import ShardPlan, StagePlan

_YEAR_H = 8766.0


def command(
    network: Path, /, options: PlanOptions | None = None, *, asked: RaceOptions = NO_RACE, output: Watchable = WATCHABLE
) -> None:
    """Prices every method on a network, chooses one, and writes a run file for it; with --race after a race of the best.

    Args:
        network: network file (TOML), such as gossamer probe writes
    """
    from gossamer.network.links import doubts_of, must_be_direct, read_network

    options, json = options or PlanOptions(), output.json
    _check_race(asked, options, output)
    check_numbers(options)
    if asked.race is not None:
        say(f"pricing all candidates; then the best of them train for {in_minutes(asked.race)}")
    check_out(options)
    check_goal(options)
    links = read_network(network)  # a missing file is reported before torch is imported
    must_be_direct(links, "gossamer plan")
    check_workers(links, options, network)
    options = of_run_file(options)
    links, parts, made, priced, choice = _planned(links, network, options, json=json)
    prepared = None if asked.race is None else prepare_race(made, choice, priced, network, asked)
    result, text = None, _run_file(made, choice.best, options)
    passes = _passes(text)  # refuses what no run file can have, such as a name with a line break
    if prepared is None:
        _write(options.out, text)  # before the table, whose reader may close the pipe
    if not json:
        for sentence in doubts_of(links):
            print_sentence(sentence)
        print_plan(made, parts, priced, choice, options)
    best = choice.best
    if prepared is not None:  # a race that does not fit its minutes is refused before the plan is printed
        result = race(prepared, made, choice, asked, output)
        best = result.candidates[result.taken]
        _write(options.out, text := _run_file(made, best, options))
        passes = _passes(text)
    if json:
        print_json({**_facts(made, parts, priced, choice, result, options), "passes": passes})
        return
    if result is not None:
        print_race(result)
    for sentence in _doubts(links, choice, passes):
        print_sentence(sentence)
    if options.out is not None:
        _print_written(made, options, raced=best != choice.best)


def _planned(
    links: "Network", file: Path, options: PlanOptions, *, json: bool
) -> "tuple[Network, StagePlan | ShardPlan | None, RunPlan, Priced, Pick]":
    """The network as it is planned for, how a replica is divided, the plan, the priced methods and the choice."""
    from gossamer.models.sizes import parameter_count
    from gossamer.run.config.spelling import must_be_named

    links, model, step = timed_model(links, options, file)
    if options.method is not None:
        must_be_named("method", options.method)
    for name in options.codec:
        must_be_named("codec", name)
    # Not before: a wrong name is reported before torch is imported.
    from gossamer.run.planning.candidates import USUAL, choose_among, price_recipes
    from gossamer.run.planning.plan import plan
    from gossamer.run.planning.planned_stages import plan_in_parts

    settings = settings_for(options, step, parameter_count(model, step["vocab_size"]))
    boundaries, parts = boundaries_of(options), None
    if options.memory_bytes is not None:
        parts = plan_in_parts(links, model, settings, options.memory_bytes, boundaries)
    made = plan(links, model, settings) if parts is None else parts.made
    everything = options.all or (json and options.method is None)
    with working("pricing every method" if everything else "pricing"):
        only = options.method or (None if everything else USUAL)
        priced = price_recipes(made, only, thorough=options.method is not None)
    return links, parts, made, priced, choose_among(made, priced, options.method)


def _passes(text: str) -> float | None:
    """The passes over the text of a run file. Raises ConfigError for what is none."""
    from gossamer.run.config.run_file import parse
    from gossamer.run.planning.check import passes_of

    return passes_of(parse(tomllib.loads(text)))


def _doubts(links: "Network", choice: "Pick", passes: float | None) -> list[str]:
    """Warnings of a network that changes often, of a plan that takes years, and of a text that is repeated many times."""
    from gossamer.data.settings import passes_warning
    from gossamer.run.planning.plan import MOST_STRETCHES

    sentences = list[str]()
    if (changes := len({change.at_s for change in links.changes})) >= MOST_STRETCHES:
        sentences.append(
            f"the network changes at {changes:,} times, and with {MOST_STRETCHES} or more only the first rounds of each "
            "candidate are priced, some of which end before; plan for it as it is most of the time, with fewer [[changes]]"
        )
    if choice.hours > _YEAR_H:
        sentences.append(
            f"that takes {choice.hours / _YEAR_H:.3g} years; plan for fewer --tokens, for --hours, or for a smaller --model"
        )
    if repeats := passes_warning(passes, "give more of it by --data, or plan for fewer --tokens or --hours"):
        sentences.append(repeats)
    return sentences


def _write(out: Path | None, text: str) -> None:
    """Writes the run file, unless none is asked for."""
    from gossamer.record.whole_files import atomic_write

    if out is not None:
        atomic_write(out, text.encode())


def _print_written(made: "RunPlan", options: PlanOptions, *, raced: bool) -> None:
    from gossamer.run.planning.plan import BYTES

    echo(f"run file: {options.out}{', of what the race found lowest' if raced else ''}")
    if made.options.vocab_size != BYTES and options.tokenizer is None:
        echo(f"it reads bytes; give data.tokenizer one of {made.options.vocab_size:,} tokens, as was planned")


def _check_race(asked: RaceOptions, options: PlanOptions, output: Watchable) -> None:
    """Raises ConfigError for a race that cannot be, and for its options without one."""
    if asked.race is None:
        given = {
            "--race-folder": asked.race_folder,
            "--resume": asked.resume,
            "--jobs": asked.jobs,
            "--watch": output.watch,
        }
        if wrong := [name for name, value in given.items() if value]:
            raise ConfigError(f"{wrong[0]} was given and --race was not, so nothing is trained; add --race MINUTES")
        return
    if not 0 < asked.race < math.inf:
        raise ConfigError(f"--race got {in_minutes(asked.race)}; give a number above 0, such as 10")
    if asked.jobs is not None:
        runs_at_a_time(asked.jobs)  # refuses fewer than 1
    if options.memory_bytes is not None:
        raise ConfigError(
            f"--race got {in_minutes(asked.race)} and --memory-bytes {options.memory_bytes:g}, but a race trains replicas in one "
            "piece; remove one of the two"
        )
    if options.method is not None:
        raise ConfigError(
            f"--race got {in_minutes(asked.race)} and --method '{options.method}', but a race compares methods; remove one of "
            "them"
        )


def _facts(
    made: "RunPlan",
    parts: "StagePlan | ShardPlan | None",
    priced: "Priced",
    choice: "Pick",
    result: Race | None,
    options: PlanOptions,
) -> dict[str, Any]:
    """A plan as JSON."""
    from gossamer.run.planning.planned_stages import ShardPlan, StagePlan

    def of(candidate: "Candidate") -> dict[str, Any]:
        return {
            **candidate._asdict(),
            "hours": choice.hours_of(candidate),
            "tokens": choice.tokens_of(candidate),
            "whole_round": choice.whole_round(candidate),
            "loss": choice.loss(candidate) if choice.foretold(candidate) else None,
            "carried_from": choice.carried_from(candidate),
            "above_choice": choice.above_best(candidate) if choice.foretold(candidate) else None,
        }

    return {
        "parameters": made.parameters,
        "workers": made.workers,
        "tokens": choice.tokens,
        "hours": choice.hours,
        "hours_to_loss": None if (hours := hours_to_loss(made, choice, options)) == math.inf else hours,
        "chosen": of(choice.best),
        "undecided": [of(one) for one in choice.undecided],
        "candidates": [of(one) for one in [*made.candidates, *priced.candidates]],
        "race": None if result is None else race_facts(result),
        "outside": choice.scale.outside,
        "unpriced": priced.unpriced,
        "run_file": options.out,
        "stages": _division(parts) if isinstance(parts, StagePlan) else None,
        "shards": _division(parts) if isinstance(parts, ShardPlan) else None,
    }


def _division(parts: "StagePlan | ShardPlan") -> dict[str, Any]:
    return {name: value for name, value in parts._asdict().items() if name != "made"}


def _run_file(made: "RunPlan", chosen: "Candidate", options: PlanOptions) -> str:
    """The run file of the chosen candidate."""
    from gossamer.run.planning.candidates import recipe_toml
    from gossamer.run.planning.planned_run_file import run_toml

    name = (options.out or Path("planned.toml")).stem
    if chosen in made.candidates:
        return run_toml(made, chosen, name=name, adapt=options.adapt, weigh_steps=options.weigh_steps)
    run = {key: True for key in ("adapt", "weigh_steps") if getattr(options, key)}
    return recipe_toml(made, chosen, name=name, run=run)
