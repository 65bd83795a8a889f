"""The options of `gossamer plan`: what is planned for, and what is tried."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gossamer.cli.help_columns import OPTIONS
from gossamer.cli.output import must_be_new_file
from gossamer.cli.run_file_options import quantity, whole_numbers
from gossamer.errors import ConfigError, choose
from gossamer.record.progress import echo
from gossamer.settings.quantities import BYTES, FLOPS, HOURS, SECONDS, TOKENS

if TYPE_CHECKING:
    from gossamer.models.sizes import ModelConfig
    from gossamer.network.links import Network
    from gossamer.run.config.run_file import RunConfig
    from gossamer.run.planning.expected_loss import Law
    from gossamer.run.planning.plan import PlanSettings

_CODECS = ("bf16", "int8", "fp4")
_MOST_E_FOLDS = math.log(10)
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


def check_workers(links: "Network", options: PlanOptions, file: Path) -> None:
    """Raises ConfigError for a number of workers that is not that of the network."""
    if options.workers is not None and links.workers not in (None, options.workers):
        raise ConfigError(
            f"--workers got {options.workers} and '{file}' has {links.workers} workers; leave --workers out, or give a file with "
            "one number for all workers, or with as many entries"
        )


def check_out(options: PlanOptions) -> None:
    """Raises ConfigError for a file that exists, and for options of a file where none is written."""
    if options.out is not None:
        must_be_new_file(options.out)
    elif given := [name for name in ("adapt", "weigh_steps") if getattr(options, name)]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} was given, which is of a run file, and no --out; add --out FILE, or remove it"
        )


def check_numbers(options: PlanOptions) -> None:
    """Raises ConfigError for a number that a plan refuses, before the network file is read."""
    from gossamer.run.planning.plan import BOUNDS, PlanSettings
    from gossamer.settings.options import Positive, check_values

    for name, kind in {**BOUNDS, "memory_bytes": Positive}.items():
        option = "vocab" if name == "vocab_size" else name
        if (value := getattr(options, option)) is not None:
            check_values(kind, **{f"--{option.replace('_', '-')}": value})
    PlanSettings(local_steps=_local_steps(options))


def check_goal(options: PlanOptions) -> None:
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


def settings_for(options: PlanOptions, step: dict[str, int], parameters: int) -> "PlanSettings":
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


def timed_model(network: "Network", options: PlanOptions, file: Path) -> "tuple[Network, ModelConfig, dict[str, int]]":
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


def of_run_file(options: PlanOptions) -> PlanOptions:
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


def boundaries_of(options: PlanOptions) -> tuple[str, ...]:
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
