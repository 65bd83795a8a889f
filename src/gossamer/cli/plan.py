"""`gossamer plan`: methods priced on a network before anything is trained."""

import math
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gossamer.cli.help_columns import OPTIONS
from gossamer.cli.output import must_be_new_file, print_json, working
from gossamer.cli.race import NO_RACE, Race, RaceOptions, in_minutes, prepare_race, print_race, race, race_facts
from gossamer.cli.run_file_options import quantity, runs_at_a_time, whole_numbers
from gossamer.cli.tables import print_sentence, print_table
from gossamer.cli.watch import WATCHABLE, Watchable
from gossamer.errors import ConfigError, choose
from gossamer.record.progress import echo, say
from gossamer.settings.quantities import BYTES, FLOPS, HOURS, SECONDS, TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gossamer.models.sizes import ModelConfig
    from gossamer.network.links import Network
    from gossamer.run.config.run_file import RunConfig
    from gossamer.run.planning.candidates import Priced
    from gossamer.run.planning.choice import Candidate, Pick
    from gossamer.run.planning.expected_loss import Law
    from gossamer.run.planning.plan import PlanSettings, RunPlan
    from gossamer.run.planning.planned_stages import ShardPlan, StagePlan

_CODECS = ("bf16", "int8", "fp4")
_SPARE = ("computing", "loss (nats)", "tokens", "codec there, back", "local steps")
"""Columns of a plan that a narrow terminal leaves out, the first of them first."""
_MOST_E_FOLDS = math.log(10)
_YEAR_H = 8766.0
_HELD_BYTES, _LARGE_BYTES = 16, 8e9
"""Bytes of a parameter in fp32 with its gradient and both moments of AdamW, and those of a replica that many devices lack."""
_SLOWER = 1.05
"""Above so many times the hours of DDP, the recommendation says whose hours it has, as `gossamer train` sends after the step."""
_MODEL, _GOAL, _MACHINES, _TRIED, _FILE = (
    Parameter(group=OPTIONS[title]) for title in ("Model and text", "Goal", "Machines", "What is tried", "Run file")
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is planned for, and what is tried."""

    model: Annotated[str | None, Parameter(metavar="SIZE|FILE"), _MODEL] = None
    """size of the model, up to 70b, or the run file that has it, with its text and inner step (default: the one that was
    probed, else 134m)"""
    data: Annotated[str | None, _MODEL] = None
    """text of the run file and of a race, as in data.source (default: stdlib)"""
    tokenizer: Annotated[str | None, _MODEL] = None
    """tokenizer of the run file, as in data.tokenizer, whose vocabulary is planned for (default: bytes)"""
    vocab: Annotated[int | None, _MODEL] = None
    """tokens of the vocabulary (default: as it was probed, else 256, for bytes)"""
    seq_len: Annotated[int | None, _MODEL] = None
    """tokens of a sequence (default: as it was probed, else 128)"""
    batch_size: Annotated[int | None, _MODEL] = None
    """sequences of a worker's inner step (default: as it was probed, else 8)"""
    tokens: Annotated[float | None, quantity(TOKENS), _GOAL] = None
    """to train on (default: 20 for each parameter)"""
    hours: Annotated[float | None, quantity(HOURS), _GOAL] = None
    """to train for, in place of --tokens"""
    loss: Annotated[float | None, _GOAL] = None
    """to reach, in place of --tokens; needs --anchor or --law"""
    anchor: Annotated[str | None, Parameter(metavar="LOSS@TOKENS"), _GOAL] = None
    """what data parallelism reached on your text, such as 3.21@1e9"""
    law: Annotated[Path | None, _GOAL] = None
    """file (TOML) with floor, scale and power of loss = floor + scale / tokens^power on your text, and the range of tokens"""
    workers: Annotated[int | None, _MACHINES] = None
    """number of workers, where the network file lists none"""
    step_s: Annotated[float | None, quantity(SECONDS), _MACHINES] = None
    """seconds of an inner step, where the network file gives none, or that of another model"""
    peak_flops: Annotated[float | None, quantity(FLOPS), _MACHINES] = None
    """FLOP/s of a worker, from which the step time follows"""
    mfu: Annotated[float, _MACHINES] = 0.4
    """share of peak FLOP/s that is reached (default: 0.4)"""
    memory_bytes: Annotated[float | None, quantity(BYTES), _MACHINES] = None
    """memory of a machine, without activations: a model that takes more is sharded in its site, or cut into stages"""
    local_steps: Annotated[str, Parameter(metavar="15,30"), _TRIED] = "5,15,30,60,120,240,480"
    """local steps to try"""
    codec: Annotated[tuple[str, ...], Parameter(metavar="NAME"), _TRIED] = ()
    """codec to try besides exact; may be repeated (default: bf16, int8 and fp4)"""
    boundary: Annotated[tuple[str, ...], Parameter(metavar="NAME"), _TRIED] = ()
    """boundary codec to try between stages; may be repeated (default: dense, cast, intk and tahquant)"""
    keep_all: Annotated[bool, _TRIED] = False
    """leave no slow worker out"""
    method: Annotated[str | None, Parameter(metavar="NAME"), _TRIED] = None
    """take this method; without, data parallelism, DiLoCo, streaming DiLoCo or GASLoC is taken"""
    all: Annotated[bool, _TRIED] = False
    """show every candidate and all other methods, not the best of each family only"""
    out: Annotated[Path | None, _FILE] = None
    """write a run file with the chosen settings"""
    adapt: Annotated[bool, _FILE] = False
    """adapt local steps to measured seconds (run.adapt)"""
    weigh_steps: Annotated[bool, _FILE] = False
    """let all workers count fully (run.weigh_steps)"""


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
    _check_numbers(options)
    if asked.race is not None:
        say(f"pricing all candidates; then the best of them train for {in_minutes(asked.race)}")
    _check_out(options)
    _check_goal(options)
    links = read_network(network)  # a missing file is reported before torch is imported
    must_be_direct(links, "gossamer plan")
    _check_workers(links, options, network)
    options = _of_run_file(options)
    links, parts, made, priced, choice = _planned(links, network, options, json=json)
    prepared = None if asked.race is None else prepare_race(made, choice, priced, network, asked)
    result, text = None, _run_file(made, choice.best, options)
    passes = _passes(text)  # refuses what no run file can have, such as a name with a line break
    if prepared is None:
        _write(options.out, text)  # before the table, whose reader may close the pipe
    if not json:
        for sentence in doubts_of(links):
            print_sentence(sentence)
        _print(made, parts, priced, choice, options)
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


def _check_workers(links: "Network", options: PlanOptions, file: Path) -> None:
    """Raises ConfigError for a number of workers that is not that of the network."""
    if options.workers is not None and links.workers not in (None, options.workers):
        raise ConfigError(
            f"--workers got {options.workers} and '{file}' has {links.workers} workers; leave --workers out, or give a file with "
            "one number for all workers, or with as many entries"
        )


def _check_out(options: PlanOptions) -> None:
    """Raises ConfigError for a file that exists, and for options of a file where none is written."""
    if options.out is not None:
        must_be_new_file(options.out)
    elif given := [name for name in ("adapt", "weigh_steps") if getattr(options, name)]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} was given, which is of a run file, and no --out; add --out FILE, or remove it"
        )


def _planned(
    links: "Network", file: Path, options: PlanOptions, *, json: bool
) -> "tuple[Network, StagePlan | ShardPlan | None, RunPlan, Priced, Pick]":
    """The network as it is planned for, how a replica is divided, the plan, the priced methods and the choice."""
    from gossamer.models.sizes import parameter_count
    from gossamer.run.config.spelling import must_be_named

    links, model, step = _timed_model(links, options, file)
    if options.method is not None:
        must_be_named("method", options.method)
    for name in options.codec:
        must_be_named("codec", name)
    # Not before: a wrong name is reported before torch is imported.
    from gossamer.run.planning.candidates import USUAL, choose_among, price_recipes
    from gossamer.run.planning.plan import plan
    from gossamer.run.planning.planned_stages import plan_in_parts

    settings = _settings(options, step, parameter_count(model, step["vocab_size"]))
    boundaries, parts = _boundaries(options), None
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
    from gossamer.record.whole_files import writing

    if out is not None:
        with writing(out):
            out.write_text(text, encoding="utf-8")


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


def _check_numbers(options: PlanOptions) -> None:
    """Raises ConfigError for a number that a plan refuses, before the network file is read."""
    from gossamer.run.planning.plan import BOUNDS, PlanSettings
    from gossamer.settings.options import Positive, check_values

    for name, kind in {**BOUNDS, "memory_bytes": Positive}.items():
        option = "vocab" if name == "vocab_size" else name
        if (value := getattr(options, option)) is not None:
            check_values(kind, **{f"--{option.replace('_', '-')}": value})
    PlanSettings(local_steps=_local_steps(options))


def _check_goal(options: PlanOptions) -> None:
    """Raises ConfigError for goals that exclude each other, or a loss without an anchor or a law."""
    goals = {"--tokens": options.tokens, "--hours": options.hours, "--loss": options.loss}
    if len(given := [name for name, value in goals.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(given)} were given, and a plan has one goal; give one of them")
    known = {"--anchor": options.anchor, "--law": options.law}
    named = [name for name, value in known.items() if value is not None]
    if (options.loss is not None or named) and (options.loss is None or len(named) != 1):
        loss = "nothing" if options.loss is None else f"{options.loss:g}"
        raise ConfigError(
            f"--loss got {loss} with {' and '.join(named) or 'neither --anchor nor --law'}, but a loss on your text is known "
            "only from what was measured there; give --loss with one of them, such as --loss 3.0 --anchor 3.21@1e9, or --tokens "
            "or --hours"
        )


def _settings(options: PlanOptions, step: dict[str, int], parameters: int) -> "PlanSettings":
    """The settings of a plan. Raises ConfigError for options that do not fit each other."""
    from gossamer.run.planning.plan import PlanSettings, bits_per_parameter

    tokens, law = _tokens(options, parameters, step["vocab_size"])
    return PlanSettings(
        vocab_size=step["vocab_size"],
        seq_len=step["seq_len"],
        batch_size=step["batch_size"],
        workers=options.workers,
        local_steps=_local_steps(options),
        codecs=bits_per_parameter(options.codec or _CODECS, parameters),
        tokens=tokens,
        hours=options.hours,
        keep_all=options.keep_all,
        step_s=options.step_s,
        peak_flops=options.peak_flops,
        mfu=options.mfu,
        source=options.data or "stdlib",
        tokenizer=options.tokenizer,
        law=law,
    )


def _local_steps(options: PlanOptions) -> list[int]:
    """The local steps to try. Raises ConfigError for a table of changes, and for what are no whole numbers."""
    if "{" in options.local_steps:
        raise ConfigError(
            f"--local-steps got '{options.local_steps}', and a plan tries local steps that stay the same, as no measurement says "
            "what a change does to the loss; give whole numbers, and price a run file that has the table by gossamer check"
        )
    return whole_numbers("--local-steps", options.local_steps)


def _tokens(options: PlanOptions, parameters: int, vocab_size: int) -> "tuple[float | None, Law | None]":
    """The number of tokens to plan for, and the law of losses on the user's text; None where it is not given.

    Raises: ConfigError for a loss that is too far from its anchor, and what is no anchor or no law.
    """
    from gossamer.run.planning.expected_loss import TOKENS_PER_PARAMETER, LossScale, read_law

    if options.loss is None:
        return options.tokens, None
    if options.law is not None:
        law = read_law(options.law)
        return law.tokens_for(options.loss), law
    assert options.anchor is not None
    reached, _, at = options.anchor.partition("@")
    try:
        measured, tokens = float(reached), float(at)
    except ValueError:
        raise ConfigError(f"--anchor is '{options.anchor}' but must be LOSS@TOKENS, such as 3.21@1e9") from None
    scale = LossScale(parameters, 2, TOKENS_PER_PARAMETER * parameters, vocab_size)
    e_folds = (measured - options.loss) / scale.per_e_fold
    if not (tokens > 0 and abs(e_folds) <= _MOST_E_FOLDS):
        raise ConfigError(
            f"--loss {options.loss:g} is too far from --anchor {options.anchor} to be foretold; give an anchor with at "
            "least a tenth and at most ten times the tokens that it takes"
        )
    return tokens * math.exp(e_folds), None


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
        "hours_to_loss": None if (hours := _hours_to_loss(made, choice, options)) == math.inf else hours,
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


def _timed_model(network: "Network", options: PlanOptions, file: Path) -> "tuple[Network, ModelConfig, dict[str, int]]":
    """The network with seconds that are those of the model to plan for, that model, and the size of its inner step.

    Seconds of another model or inner step than the one to plan for are scaled by its multiplications.
    """
    from gossamer.models.sizes import ModelConfig, parameter_count
    from gossamer.network.links import StepOf

    of = network.step_of or StepOf(model=ModelConfig(size="134m"))
    asked = {"vocab_size": _vocabulary(options), "seq_len": options.seq_len, "batch_size": options.batch_size}
    step = {name: getattr(of, name) if value is None else value for name, value in asked.items()}
    model = of.model if options.model is None else _model(options.model)
    same = model == of.model and all(getattr(of, name) == value for name, value in step.items())
    if network.step_of is None or same:
        _check_seconds(network, options, file)
        return network, model, step
    network, measured = replace(network, step_s=None, step_of=None), network.step_s
    _check_seconds(network, options, file)
    if options.step_s is None and options.peak_flops is None and measured is not None:
        work = parameter_count(model, step["vocab_size"]) * step["seq_len"] * step["batch_size"]
        factor = work / (parameter_count(of.model, of.vocab_size) * of.seq_len * of.batch_size)
        scaled = tuple(factor * s for s in measured) if isinstance(measured, tuple) else factor * measured
        echo(
            f"gossamer: step_s in '{file}' was measured with model {of}; it is scaled by {factor:.4g}, as the multiplications "
            "are, which is a guess: --step-s or --peak-flops says better, or probe again with --set model.size=SIZE",
            file=sys.stderr,
        )
        return replace(network, step_s=scaled), model, step
    return network, model, step


def _of_run_file(options: PlanOptions) -> PlanOptions:
    """The options with the text, the tokenizer and the inner step of the run file that has the model, unless they are given."""
    if options.model is None or not options.model.endswith(".toml"):
        return options
    data = _run_with_model(options.model).data
    has: dict[str, Any] = {"seq_len": data.seq_len, "batch_size": data.batch_size * data.accumulate}
    if isinstance(data.source, str):
        has["data"] = data.source
    elif options.data is None:
        echo(
            f"gossamer: '{options.model}' has {len(data.source)} texts, and a plan is for one: it takes stdlib; give --data, or "
            "set data.source in the run file that it writes",
            file=sys.stderr,
        )
    if data.tokenizer != "bytes" and options.vocab is None:
        has["tokenizer"] = data.tokenizer
    return replace(options, **{name: value for name, value in has.items() if getattr(options, name) is None})


def _run_with_model(file: str) -> "RunConfig":
    """The run file that has the model."""
    from gossamer.run.config.document import load_document
    from gossamer.run.config.run_file import parse

    return parse(load_document(Path(file)))


def _model(named: str) -> "ModelConfig":
    """The model of a size, or of a run file."""
    from gossamer.models.sizes import LARGE, SIZES, ModelConfig
    from gossamer.settings.user_code import is_code

    if named.endswith(".toml"):
        return _run_with_model(named).model
    if named in LARGE:
        return ModelConfig(size="1b", **LARGE[named]._asdict())
    if named not in SIZES and not is_code(named):
        raise ConfigError(choose("--model", named, [*SIZES, *LARGE]) + "; correct the name, or give a run file")
    return ModelConfig(size=named)


def _vocabulary(options: PlanOptions) -> int | None:
    """The vocabulary to plan for; None where nothing gives it. Raises ConfigError where options contradict each other."""
    if options.tokenizer is None:
        return options.vocab
    from gossamer.data.tokenizer import vocabulary

    size = vocabulary(options.tokenizer)
    if size is None and options.vocab is None:
        raise ConfigError(
            f"--tokenizer is '{options.tokenizer}', which is not on this machine, so nothing says how many tokens it has; give "
            "--vocab, or the path of its file"
        )
    if size is not None and options.vocab not in (None, size):
        raise ConfigError(
            f"--vocab is {options.vocab:,} and '{options.tokenizer}' has {size:,} tokens; leave --vocab out, or correct it"
        )
    return options.vocab if size is None else size


def _check_seconds(network: "Network", options: PlanOptions, file: Path) -> None:
    """Raises ConfigError for seconds of an inner step that would not count."""
    given = {"--step-s": options.step_s, "--peak-flops": options.peak_flops}
    named = [f"{name} got {value:g}" for name, value in given.items() if value is not None]
    if network.step_s is not None and named:
        raise ConfigError(
            f"{named[0]}, but '{file}' has step_s, which are the seconds of this model's inner step; give them in one place"
        )
    if len(named) == 2:
        raise ConfigError(f"{' and '.join(named)}, but both give the seconds of an inner step; give one of them")


def _boundaries(options: PlanOptions) -> tuple[str, ...]:
    """The boundary codecs to try. Raises ConfigError for one that a plan does not know."""
    from gossamer.run.planning.planned_stages import BOUNDARY_PAIRS

    if options.boundary and options.memory_bytes is None:
        raise ConfigError(
            f"--boundary got {', '.join(options.boundary)} and --memory-bytes nothing, so nothing is cut; give --memory-bytes"
        )
    for name in options.boundary:
        if name not in BOUNDARY_PAIRS:
            raise ConfigError(choose("boundary codec", name, BOUNDARY_PAIRS) + "; correct the name")
    return options.boundary


def _print_cut(cut: "StagePlan") -> None:
    """Prints the ways to cut a replica, and which is taken."""
    from gossamer.report.table import digits_text
    from gossamer.run.planning.planned_stages import SPEED_LEFT

    chosen = cut.chosen
    echo(
        f"a replica takes {cut.replica_bytes / 1e9:.4g} GB without activations; in {chosen.stages} stages, cut before the layers "
        f"{', '.join(map(str, chosen.cuts))}, a process takes {chosen.stage_bytes / 1e9:.4g} GB at most"
    )
    rows = list[tuple[str, ...]]()
    for one in cut.tried:
        speed = digits_text(one.step_s), f"{one.unhindered:.1%}", f"{one.computing:.1%}"
        rows.append((f"{one.forward}, {one.backward} back", str(one.micro_batches), *speed))
    headings = ("boundary codec", "micro-batches", "s/step", "speed left", "computing")
    print_table(headings, rows, bold=cut.tried.index(chosen))
    for name, why in cut.refused.items():
        echo(f"refused: {name}: {why}")
    some = f"whose links leave {SPEED_LEFT:.0%} of the speed"
    why = f"the mildest {some}" if chosen.unhindered >= SPEED_LEFT else f"the fastest, as there is none {some}"
    echo(f"boundary codec: {chosen.forward} ({why})")
    echo(f"its stages compute for {chosen.computing:.1%} of an inner step and wait for each other in the rest")
    links, n = cut.made.network.stages, cut.made.workers
    speed = "" if links and links.speeds else ", each as fast as the one that takes step_s for a whole replica"
    print_sentence(
        f"a worker is then {chosen.stages} machines and not one, {n * chosen.stages} in all{speed}; the hours are of that many"
    )
    if links is None:
        print_sentence("what crosses between stages takes no time here, as the network file has no [stages]")
    if chosen.unhindered < SPEED_LEFT and cut.made.model.bottleneck is None:
        echo("fewer bytes cross in another model, which is narrow at its cuts: model.bottleneck 'resbm' or 'subspace'")
    echo()


def _print_memory(made: "RunPlan", parts: "StagePlan | ShardPlan | None", choice: "Pick", options: PlanOptions) -> None:
    """Prints what a replica takes, as far as it is known, and how it is divided."""
    from gossamer.run.planning.planned_stages import ShardPlan, StagePlan

    if isinstance(parts, StagePlan):
        _print_cut(parts)
    elif isinstance(parts, ShardPlan):
        print_sentence(
            f"a replica takes {parts.replica_bytes / 1e9:.4g} GB without activations, more than a machine has; the "
            f"{parts.shards} of a site hold it in shards of {parts.replica_bytes / parts.shards / 1e9:.4g} GB (FSDP2), so the "
            "workers are sites; --boundary dense cuts it into stages instead"
        )
    elif options.memory_bytes is not None:
        echo(f"a replica fits a process of {options.memory_bytes / 1e9:.4g} GB, without activations")
    elif (held := _HELD_BYTES * made.parameters) >= _LARGE_BYTES:
        site = f" (in shards of {held / choice.best.site / 1e9:.4g} GB)" if choice.best.site > 1 else ""
        print_sentence(
            f"a replica takes about {held / 1e9:.4g} GB{site} for weights, gradients and AdamW, and more for outer state and "
            "activations; --memory-bytes cuts one that does not fit"
        )


def _print(
    made: "RunPlan", parts: "StagePlan | ShardPlan | None", priced: "Priced", choice: "Pick", options: PlanOptions
) -> None:
    """Prints how a replica is divided, the candidates, and which is taken."""
    from gossamer.report.table import digits_text
    from gossamer.run.planning.candidates import USUAL, chosen_from
    from gossamer.run.planning.choice import PLAN_HEADINGS, leading, notes_on, plan_rows
    from gossamer.run.planning.plan import choosable
    from gossamer.run.planning.planned_stages import StagePlan
    from gossamer.run.planning.teams import sites_apart

    shown = [*made.candidates, *priced.candidates]
    stages = parts.chosen.stages if isinstance(parts, StagePlan) else 1
    print_sentence(_recommendation(choice, shown, asked=options.method is not None, stages=stages))
    _print_memory(made, parts, choice, options)
    print_sentence(_what_is_trained(made, choice, options))
    if made.network.step_of is None and options.step_s is None and options.peak_flops is None:
        print_sentence(
            "seconds of an inner step are those of the network file, which names no model: they are the same with any --model"
        )
    asked = [one for one in shown if one.method == choice.best.method]
    usually = chosen_from(made, priced)
    rivals = choosable(usually if options.method is None else asked, made.options)
    if not options.all:
        shown = leading(choice, shown)
    missing = print_table(PLAN_HEADINGS, plan_rows(choice, shown), text=2, bold=shown.index(choice.best), spare=_SPARE)
    if missing:
        print_sentence(f"a wider terminal, or a file, has also: {', '.join(missing)}")
    print_sentence(_basis(choice))
    for sentence in notes_on(choice, shown):
        print_sentence(sentence)
    if not (options.boundary or made.network.stages) and (why := sites_apart(made.network)):
        print_sentence(why)
    parallel = next((one for one in shown if one.collective and not one.left_out), None)
    if parallel is not None:
        print_sentence(_as_ddp(choice, parallel))
    for name, why in priced.unpriced.items():
        if options.all or (name == USUAL and made.workers > 1):
            print_sentence(f"no price: {name}: {why}")
    _print_choice(made, choice, usually, rivals)
    if options.loss is not None:
        by, hours = "law" if options.law is not None else "anchor", _hours_to_loss(made, choice, options)
        when = "not foretold" if hours is None else f"after about {digits_text(hours)} h"
        echo(f"loss {options.loss:g} by the {by}: {when if hours != math.inf else 'never'}", flush=True)


def _what_is_trained(made: "RunPlan", choice: "Pick", options: PlanOptions) -> str:
    """The model, the workers and the tokens of a plan, with its hours."""
    from gossamer.report.table import digits_text

    settings = made.options
    default = settings.tokens is None and settings.hours is None
    return (
        f"{options.model or made.model.size} with a vocabulary of {settings.vocab_size:,} (--vocab): {made.parameters:,} "
        f"parameters, {made.workers} worker{'s' * (made.workers > 1)} with inner steps of {settings.batch_size:,} x "
        f"{settings.seq_len:,} tokens, {choice.tokens:.4g} tokens{', 20 a parameter (--tokens or --hours)' if default else ''}; "
        f"loss in {digits_text(choice.hours)} h"
    )


def _hours_to_loss(made: "RunPlan", choice: "Pick", options: PlanOptions) -> float | None:
    """Hours until the choice reaches the loss asked for; infinite where a law excludes it, None where it is unknown."""
    penalty, law = choice.best.penalty(choice.scale), made.options.law
    if options.loss is None or penalty is None:
        return None
    if law is None:
        return choice.hours_to_loss(choice.best)
    return choice.hours_of(choice.best) * law.times_as_many(options.loss, penalty.nats)


def _recommendation(choice: "Pick", candidates: "Sequence[Candidate]", *, asked: bool, stages: int) -> str:
    """The choice, with its hours and tokens, compared with one machine alone, one site alone and data parallelism.

    Args: `stages` of a worker, which needs as many machines.
    """
    from gossamer.report.table import digits_text
    from gossamer.run.planning.choice import ALONE, SITE_ALONE

    best = choice.best
    fewest = min(best.local_steps)
    steps = "" if best.full_steps == 1 else f" with {best.full_steps:,} local steps"
    if fewest < best.full_steps:
        steps = f" with {fewest:,} to {best.full_steps:,} local steps"
    beside = list[str]()
    for words, some in (
        ("one machine alone", [one for one in candidates if one.method == ALONE]),
        ("one site alone", [one for one in candidates if one.method == SITE_ALONE]),
        ("data parallelism", [one for one in candidates if one.method == "data parallel" and not one.left_out]),
    ):
        if some and best not in some:
            other = min(some, key=lambda one: one.seconds_per_token)
            faster = other.seconds_per_token / best.seconds_per_token
            times, how = (faster, "as fast as") if faster >= 1 else (1 / faster, "the hours of")
            beside.append(
                f"{times:,.{1 if times < 9.95 else 0}f} times {how} {words} ({digits_text(choice.hours_of(other))} h)"
            )
    head = f"{'asked for:' if asked else 'take'} {best.method}{steps}{_team(best)}{_codecs(best)}"
    if stages > 1:
        head += f", on {stages} machines a worker ({stages * len(best.local_steps)} in all)"
    if best.unhidden_round_s is not None and best.unhidden_round_s > _SLOWER * best.round_s:
        head += ", as DDP runs it"
    return f"{head}: {digits_text(choice.hours)} h for {choice.tokens:.3g} tokens" + "".join(
        f", {words}" for words in beside
    )


def _codecs(candidate: "Candidate") -> str:
    """The codec of each direction, in words."""
    from gossamer.run.planning.choice import ALONE, format_codecs

    there, _, back = format_codecs(candidate).partition(", ")
    if candidate.method == ALONE:
        return ""
    return f", {there} there and {back} back" if back and back != there else f", {there}"


def _team(candidate: "Candidate") -> str:
    """The participants, in words."""
    from gossamer.run.planning.choice import SITE_ALONE

    n, gone = len(candidate.local_steps) + len(candidate.left_out), {*candidate.left_out}
    if candidate.site > 1:
        return f" between {n} sites of {candidate.site} workers, each of which trains as one"
    staying = [i for i in range(n) if i not in gone]
    if not gone:
        return ("", " on both workers", f" on all {n} workers")[min(n, 3) - 1]
    if len(staying) == 1:
        return f" (worker {staying[0]})"
    if len(gone) < len(staying) and candidate.method != SITE_ALONE:
        return f" without {candidate.dropped}"
    return f" on workers {', '.join(map(str, staying))}" if len(staying) <= 8 else f" on {len(staying)} of {n} workers"


def _as_ddp(choice: "Pick", candidate: "Candidate") -> str:
    """How data parallelism is priced, and its time with the messages as Gossamer sends them."""
    from gossamer.report.table import digits_text
    from gossamer.run.planning.plan import BACKWARD

    assert candidate.unhidden_round_s is not None
    ways = {"owners": "through owners of chunks", "ring": "along a ring", "tree": "along a tree"}
    hours = choice.hours_of(candidate) * candidate.unhidden_round_s / candidate.round_s
    return (
        f"data parallelism as DDP runs it: all-reduce {ways[candidate.collective]}, of which backward hides up to "
        f"{BACKWARD:.0%} of a step; gossamer train sends after the step, in {digits_text(hours)} h"
    )


def _basis(choice: "Pick") -> str:
    """The source of the losses."""
    from gossamer.network.estimates.wall_clock import FITTED_PARAMETERS
    from gossamer.run.planning.expected_loss import TOKENS_PER_PARAMETER
    from gossamer.run.planning.measured_losses import MEASURED_PARAMETERS, MEASURED_WORKERS

    unit = "nats a byte" if choice.scale.vocab_size <= 256 else "nats a token"
    measured = (
        f"{MEASURED_PARAMETERS:,} parameters, {MEASURED_WORKERS} workers, {TOKENS_PER_PARAMETER} tokens a parameter and four "
        "times as many"
    )
    line = (
        f"loss: {unit} above data parallelism after all tokens, expected; ±: half of the 95 % interval of a difference; "
        f"measured with {measured}"
    )
    if not choice.scale.outside or choice.scale.workers == 1:
        return line
    small = choice.scale.log_fraction_to(FITTED_PARAMETERS[0]) < 1
    return (
        f"{line}. {' and '.join(choice.scale.outside)} are outside of that: how methods differ there is not "
        f"known, and the lowest expectation is taken. DiLoCo's gap is "
        f"{'between the measured one and ' if small else ''}that of arXiv 2503.09799"
    )


def _print_choice(
    made: "RunPlan", choice: "Pick", priced: "Sequence[Candidate]", rivals: "Sequence[Candidate]"
) -> None:
    """Prints what is taken, and what was near; `rivals` are those of the `priced` that could have been taken."""
    from gossamer.report.table import digits_text, spread_text
    from gossamer.run.planning.choice import doublings_that_help, hours_text, lower_without_some
    from gossamer.run.planning.plan import in_a_site

    best = choice.best
    left = f"dropping {best.dropped} (slowest): " if best.dropped and best.trained_as == best.method else ""
    steps = f"{best.full_steps:,} local step{'s' if best.full_steps > 1 else ''}"
    sends = f"{digits_text(best.round_bytes / 1e6)} MB and " if best.round_bytes else ""
    print_sentence(
        f"chosen: {left}{best.method}, {steps}{_codecs(best)}: {sends}{spread_text(best.round_s, best.spread_s)} s a round, "
        f"{hours_text(choice, best)} h"
    )
    if best.spread_s >= 0.001 * best.round_s:
        print_sentence(
            "± of hours and seconds: half of the 95 % interval of their mean over the rounds that were priced, as they depend on "
            "chance; gossamer check of the run file has its own, of fewer rounds"
        )
    if not choice.whole_round(best):
        print_sentence(
            f"no method ends a round in that time, and a run has one at least: {digits_text(best.round_s / 3600)} h; give more "
            "--tokens or --hours, or fewer --local-steps"
        )
    most = max(made.options.local_steps)
    if (doublings := doublings_that_help(choice, rivals, most)) is not None:
        print_sentence(
            f"more than {most:,} local steps, the most that were tried, are expected to end lower: --local-steps "
            f"{','.join(str(most << k) for k in range(doublings + 1))} tries them"
        )
    if best.fewer:
        print_sentence(
            f"{best.fewer} of {best.full_steps:,} local steps, so that nobody waits; what fewer steps learn counts less"
        )
    if best.site > 1:
        print_sentence(f"in a site, {best.site} workers train as one, {in_a_site(best, made.options)}")
    if best.left_out:
        gone = best.dropped if len(best.left_out) <= 8 else "the workers left out"
        print_sentence(
            f"text that only {gone} ha{'s' if len(best.left_out) == 1 else 've'} is lost; --keep-all plans with everybody"
        )
    if made.options.keep_all and (lower := lower_without_some(choice, priced)) is not None:
        why = "a plan in stages" if made.replica else "--keep-all"
        print_sentence(f"{lower.name} is expected to end lower, and is not taken, as {why} leaves nobody out")
    if choice.undecided:
        print_sentence(
            f"not told apart and within 0.02 nats: {choice.undecided_in_words}; the lowest expectation is taken, within 0.005 "
            "nats the fastest"
        )
    if made.workers > 1:
        print_sentence("another method is taken with --method NAME; --all shows every candidate")


def _run_file(made: "RunPlan", chosen: "Candidate", options: PlanOptions) -> str:
    """The run file of the chosen candidate."""
    from gossamer.run.planning.candidates import recipe_toml
    from gossamer.run.planning.plan import run_toml

    name = (options.out or Path("planned.toml")).stem
    if chosen in made.candidates:
        return run_toml(made, chosen, name=name, adapt=options.adapt, weigh_steps=options.weigh_steps)
    run = {key: True for key in ("adapt", "weigh_steps") if getattr(options, key)}
    return recipe_toml(made, chosen, name=name, run=run)
