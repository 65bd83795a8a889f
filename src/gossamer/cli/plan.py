"""`gossamer plan`: methods priced on a network before anything is trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json, working
from gossamer.cli.run_file_options import whole_numbers
from gossamer.cli.tables import print_table
from gossamer.errors import ConfigError, choose

if TYPE_CHECKING:
    from gossamer.models.sizes import ModelConfig
    from gossamer.network.links import Network
    from gossamer.run.planning.candidates import Priced
    from gossamer.run.planning.plan import Candidate, RunPlan
    from gossamer.run.planning.planned_stages import StagePlan
    from gossamer.run.planning.without_slowest import LeftOut

__all__ = ["PlanOptions", "command"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is planned for, and what is tried."""

    model: Annotated[str | None, Parameter(metavar="SIZE")] = None
    """size of the model (default: the one that was probed, else 134m)"""
    vocab: int | None = None
    """tokens of the vocabulary (default: as it was probed, else 256, for bytes)"""
    workers: int | None = None
    """number of workers, where the network file lists none"""
    seq_len: int | None = None
    """tokens of a sequence (default: as it was probed, else 128)"""
    batch_size: int | None = None
    """sequences of a worker's inner step (default: as it was probed, else 8)"""
    step_s: float | None = None
    """seconds of an inner step, where the network file gives none, or that of another model"""
    peak_flops: float | None = None
    """FLOP/s of a worker, from which the step time follows"""
    mfu: float = 0.4
    """share of peak FLOP/s that is reached (default: 0.4)"""
    local_steps: Annotated[str, Parameter(metavar="15,30")] = "15,30,60,120,240"
    """local steps to try"""
    codec: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """codec to try besides exact; may be repeated"""
    target: float = 0.9
    """utilisation to reach, of replicas in stages the share of the time that is left to inner steps; a lower one leaves more
    time to exchange, and so fewer local steps (default: 0.9)"""
    method: Annotated[str | None, Parameter(metavar="NAME")] = None
    """price this method only, and take it; without, data parallelism, DiLoCo or GASLoC is taken"""
    memory_bytes: float | None = None
    """memory of a process, without activations: a model that takes more is cut into stages"""
    boundary: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """boundary codec to try between stages; may be repeated (default: dense, cast, intk and tahquant)"""
    out: Path | None = None
    """write a run file with the chosen settings"""
    adapt: bool = False
    """adapt local steps to measured seconds (run.adapt)"""
    weigh_steps: bool = False
    """let all workers count fully (run.weigh_steps)"""


def command(network: Path, /, options: PlanOptions | None = None, *, json: Json = False) -> None:
    """Prices every method on a network, chooses one, and writes a run file for it.

    Args:
        network: network file (TOML), such as gossamer probe writes
    """
    from gossamer.models.sizes import parameter_count
    from gossamer.network.links import read_network
    from gossamer.run.planning.candidates import best_of, price_recipes
    from gossamer.run.planning.plan import PlanSettings, bits_per_parameter, plan
    from gossamer.run.planning.planned_stages import plan_in_stages
    from gossamer.run.planning.without_slowest import without_slowest

    options = options or PlanOptions()
    if options.out is not None and options.out.exists():
        raise ConfigError(f"'{options.out}' already exists; name another file with --out, or remove it")
    links, model, step = _what(read_network(network), options, network)
    settings = PlanSettings(
        **step, workers=options.workers, local_steps=whole_numbers("--local-steps", options.local_steps),
        codecs=bits_per_parameter(options.codec, parameter_count(model, step["vocab_size"])),
        target=options.target, step_s=options.step_s, peak_flops=options.peak_flops, mfu=options.mfu,
    )  # fmt: skip
    boundaries = _boundaries(options)
    cut = None
    if options.memory_bytes is not None:
        cut = plan_in_stages(links, model, settings, options.memory_bytes, boundaries)
    made = plan(links, model, settings) if cut is None else cut.made
    with working("pricing every method" if options.method is None else f"pricing {options.method}"):
        priced = price_recipes(made, options.method)
    chosen = made.best if options.method is None else best_of(made, priced, options.method)
    text = None if options.out is None else _run_file(made, chosen, options, options.out)
    left_out = without_slowest(made)
    if json:
        print_json(
            {
                "parameters": made.parameters, "workers": len(chosen.local_steps), "chosen": chosen,
                "candidates": [*made.candidates, *priced.candidates], "unpriced": priced.unpriced,
                "without": None if left_out is None else left_out._asdict(), "run_file": options.out,
                "stages": None if cut is None else {
                    "replica_bytes": cut.replica_bytes, "chosen": cut.chosen, "tried": cut.tried, "refused": cut.refused,
                },
            }
        )  # fmt: skip
    else:
        if cut is not None:
            _print_cut(cut, settings.target)
        elif options.memory_bytes is not None:
            print(f"a replica fits a process of {options.memory_bytes / 1e9:.4g} GB, without activations")
        _print(made, priced, chosen, left_out)
    if options.out is not None and text is not None:
        from gossamer.record.whole_files import writing

        with writing(options.out):
            options.out.write_text(text, encoding="utf-8")
        if not json:
            print(f"run file: {options.out}")


def _what(network: "Network", options: PlanOptions, file: Path) -> "tuple[Network, ModelConfig, dict[str, int]]":
    """The network with seconds that are those of the model to plan for, that model, and the size of its inner step.

    Raises: ConfigError when the seconds were measured with another inner step and no others are given.
    """
    from gossamer.models.sizes import ModelConfig
    from gossamer.network.links import StepOf

    of = network.step_of or StepOf(model=ModelConfig(size="134m"))
    asked = {"vocab_size": options.vocab, "seq_len": options.seq_len, "batch_size": options.batch_size}
    step = {name: getattr(of, name) if value is None else value for name, value in asked.items()}
    model = of.model if options.model is None else ModelConfig(size=options.model)
    same = model == of.model and all(getattr(of, name) == value for name, value in step.items())
    if network.step_of is None or same:
        return network, model, step
    if options.step_s is None and options.peak_flops is None:
        raise ConfigError(
            f"step_s in '{file}' was measured with model {of}, and another inner step was asked for; give --step-s or "
            "--peak-flops, or probe again with --set model.size=SIZE"
        )
    return replace(network, step_s=None, step_of=None), model, step


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


def _print_cut(cut: "StagePlan", target: float) -> None:
    """Prints the ways to cut a replica, and which is taken."""
    chosen = cut.chosen
    print(
        f"a replica takes {cut.replica_bytes / 1e9:.4g} GB without activations; in {chosen.stages} stages, cut before the layers "
        f"{', '.join(map(str, chosen.cuts))}, a process takes {chosen.stage_bytes / 1e9:.4g} GB at most"
    )
    rows = [
        (
            f"{one.forward}, {one.backward} back", str(one.micro_batches), f"{one.step_s:.4g}", f"{one.unhindered:.1%}",
            f"{one.computing:.1%}",
        )
        for one in cut.tried
    ]  # fmt: skip
    headings = ("boundary codec", "micro-batches", "s/step", "speed left", "computing")
    print_table(headings, rows, bold=cut.tried.index(chosen))
    for name, why in cut.refused.items():
        print(f"refused: {name}: {why}")
    some = f"whose links leave {target:.0%} of the speed"
    why = f"the mildest {some}" if chosen.unhindered >= target else f"the fastest, as there is none {some}"
    print(f"boundary codec: {chosen.forward} ({why})")
    if chosen.unhindered < target and cut.made.model.bottleneck is None:
        print("fewer bytes cross in another model, which is narrow at its cuts: model.bottleneck 'resbm' or 'subspace'")
    print()


def _print(made: "RunPlan", priced: "Priced", chosen: "Candidate", left_out: "LeftOut | None") -> None:
    """Prints the candidates, and which methods have no price."""
    from gossamer.run.planning.measured_losses import MEASURED_FOR
    from gossamer.run.planning.plan import PLAN_HEADINGS, plan_rows

    options, size = made.options, made.model.size
    vocabulary = f"{size} with a vocabulary of {options.vocab_size:,} (--vocab)"
    print(f"{vocabulary}: {made.parameters:,} parameters, {len(chosen.local_steps)} workers, MB sent by one of them")
    shown = [*made.candidates, *priced.candidates]
    headings, rows = PLAN_HEADINGS, plan_rows(shown)
    if made.replica:
        headings = (*headings, "between stages")
        rows = [(*row, f"{one.between_stages:.1%}") for row, one in zip(rows, shown, strict=True)]
    print_table(headings, rows, text=2, bold=shown.index(chosen))
    print(
        f"loss: nats above data parallel after as many tokens, without a codec, measured with {MEASURED_FOR}; for other models "
        "a guide"
    )
    for name, why in priced.unpriced.items():
        print(f"no price: {name}: {why}")
    _print_choice(made.candidates, chosen, options.target)
    if left_out is not None:
        print(left_out)


def _print_choice(usual: "Sequence[Candidate]", chosen: "Candidate", target: float) -> None:
    least = "fewest local steps" if chosen.loss_penalty is None else "lowest measured loss"
    reached = chosen.in_local_phases >= target
    if chosen.between_stages:
        share = chosen.in_local_phases
        why = (
            f"{f'{least} of those' if reached else 'none is there'} with which the exchange leaves {target:.0%} of the time to "
            f"inner steps: {share:.1%}, of which stages compute for {chosen.utilisation / share:.1%} and wait for each other in "
            "the rest"
        )
    elif reached:
        why = f"{least} of those that reach {target:.0%} compute utilisation"
    else:
        why = f"none reaches {target:.0%} compute utilisation; {least} of those about as fast as the fastest"
    print(f"chosen: {chosen.method} with {chosen.full_steps} local steps and codec {chosen.codec} ({why})")
    if chosen in usual:
        local_sgd, gossip = (_measured_above(*pair) for pair in (("local_sgd", "DiLoCo"), ("gossip", "GASLoC 1-Peer")))
        print(
            "another method is taken with --method NAME; local_sgd and gossip send what DiLoCo and GASLoC 1-Peer do, and ended "
            f"{local_sgd:.2f} and {gossip:.2f} above them with 30 local steps"
        )


def _measured_above(method: str, other: str) -> float:
    """By how much a method ended above another, with 30 local steps."""
    from gossamer.run.planning.measured_losses import MEASURED

    return MEASURED[method][30].loss - MEASURED[other][30].loss


def _run_file(made: "RunPlan", chosen: "Candidate", options: PlanOptions, out: Path) -> str:
    """The run file of the chosen candidate."""
    from gossamer.run.planning.candidates import recipe_toml
    from gossamer.run.planning.plan import run_toml

    if chosen in made.candidates:
        return run_toml(made, chosen, name=out.stem, adapt=options.adapt, weigh_steps=options.weigh_steps)
    run = {key: True for key in ("adapt", "weigh_steps") if getattr(options, key)}
    return recipe_toml(made, chosen, name=out.stem, run=run)
