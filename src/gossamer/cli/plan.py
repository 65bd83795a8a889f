"""`gossamer plan`: methods priced on a network before anything is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.run_file import whole_numbers
from gossamer.cli.tables import print_table
from gossamer.errors import ConfigError, choose

if TYPE_CHECKING:
    from gossamer.models.sizes import ModelConfig
    from gossamer.network.plan import RunPlan

__all__ = ["PlanOptions", "command"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is planned for, and what is tried."""

    model: Annotated[str, Parameter(metavar="SIZE")] = "134m"
    """size of the model (default: 134m)"""
    vocab: int = 256
    """tokens of the vocabulary (default: 256, for bytes)"""
    workers: int | None = None
    """number of workers, where the network file lists none"""
    seq_len: int = 128
    """tokens of a sequence (default: 128)"""
    batch_size: int = 8
    """sequences of a worker's inner step (default: 8)"""
    step_s: float | None = None
    """seconds of an inner step, where the network file gives none"""
    peak_flops: float | None = None
    """FLOP/s of a worker, from which the step time follows"""
    mfu: float = 0.4
    """share of peak FLOP/s that is reached (default: 0.4)"""
    local_steps: Annotated[str, Parameter(metavar="15,30")] = "15,30,60,120,240"
    """local steps to try"""
    codec: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """codec to try besides exact; may be repeated"""
    target: float = 0.9
    """utilisation to reach (default: 0.9)"""
    out: Path | None = None
    """write a run file with the chosen settings"""
    adapt: bool = False
    """adapt local steps to measured seconds (run.adapt)"""
    weigh_steps: bool = False
    """let all workers count fully (run.weigh_steps)"""


def command(network: Path, /, options: PlanOptions | None = None) -> None:
    """Prices every method on a network, chooses one, and writes a run file for it.

    Args:
        network: network file (TOML)
    """
    from gossamer.models.sizes import ModelConfig
    from gossamer.network.links import read_network
    from gossamer.network.plan import PLAN_HEADINGS, PlanSettings, plan, plan_rows

    options = options or PlanOptions()
    model = ModelConfig(size=options.model)
    settings = PlanSettings(
        vocab_size=options.vocab, workers=options.workers, seq_len=options.seq_len, batch_size=options.batch_size,
        local_steps=whole_numbers("--local-steps", options.local_steps), codecs=_bits_per_parameter(options, model),
        target=options.target, step_s=options.step_s, peak_flops=options.peak_flops, mfu=options.mfu,
    )  # fmt: skip
    made = plan(read_network(network), model, settings)
    vocabulary = f"{options.model} with a vocabulary of {options.vocab:,} (--vocab)"
    print(f"{vocabulary}: {made.parameters:,} parameters, {len(made.best.local_steps)} workers, MB sent by one of them")
    print_table(PLAN_HEADINGS, plan_rows(made), text=2, bold=made.candidates.index(made.best))
    reached = f"fewest local steps that reach {options.target:.0%} compute utilisation"
    if made.best.utilisation < options.target:
        reached = f"none reaches {options.target:.0%} compute utilisation"
    print(f"chosen: {made.best.method} with {made.best.full_steps} local steps and codec {made.best.codec} ({reached})")
    if options.out is not None:
        _write_run_file(made, options, options.out)


def _bits_per_parameter(options: PlanOptions, model: "ModelConfig") -> dict[str, float]:
    """What each codec to try makes of a parameter. Raises ConfigError for one that is not in the table."""
    from gossamer.codecs import CODECS
    from gossamer.codecs.message import payload_bytes
    from gossamer.models.sizes import parameter_count
    from gossamer.network.plan import EXACT

    parameters, bits = parameter_count(model, options.vocab), dict(EXACT)
    for name in options.codec:
        if name not in CODECS:
            raise ConfigError(choose("codec", name, CODECS) + "; correct the name")
        bits[name] = 8 * payload_bytes(CODECS[name](), parameters) / parameters
    return bits


def _write_run_file(made: "RunPlan", options: PlanOptions, out: Path) -> None:
    from gossamer.network.plan import run_toml
    from gossamer.record.files import writing

    if out.exists():
        raise ConfigError(f"'{out}' already exists; name another file with --out, or remove it")
    text = run_toml(made, name=out.stem, adapt=options.adapt, weigh_steps=options.weigh_steps)
    with writing(out):
        out.write_text(text, encoding="utf-8")
    print(f"run file: {out}")
