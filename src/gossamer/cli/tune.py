"""`gossamer tune`: the best settings of every method of an experiment file, each found with the same budget."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli.output import PLAIN, Output, print_json
from gossamer.cli.run_file_options import (
    ALL_SAVE,
    Continues,
    ExperimentFile,
    Overrides,
    check_experiment,
    experiment_and_folder,
    runs_at_a_time,
)
from gossamer.errors import ConfigError
from gossamer.record.progress import echo
from gossamer.stop_signals import leaving

if TYPE_CHECKING:
    from gossamer.run.experiments.search import GridPoint
    from gossamer.run.experiments.tune import Tuned


def command(
    file: ExperimentFile = None,
    /,
    *,
    overrides: Overrides = (),
    out: Path | None = None,
    scale: str = "",
    jobs: int | None = None,
    resume: Continues[bool] = False,
    output: Output = PLAIN,
) -> None:
    """Finds learning rates and outer settings for every variant of an experiment file, with the same budget of tokens for each.

    The file says in [tune] what is tried. The chosen settings are written as tuned.toml, which gossamer compare runs.

    Args:
        out: folder of all runs (default: runs/ and the name of the file)
        scale: take the sizes of the file's [scale.NAME]
        jobs: runs at a time, each in its own process (default: one for each core)
        resume: keep the finished runs, continue those that were stopped, and train the others
    """
    for one in overrides:
        if one.partition("=")[0].strip() == "seed":
            raise ConfigError(
                f"--set got '{one}', but the runs of a search have the seeds of tune.seeds; set tune.seeds"
            )
    with experiment_and_folder(file, overrides, out, scale, "with a [tune] table") as (document, out):
        from gossamer.record.locks import locked
        from gossamer.record.whole_files import atomic_write
        from gossamer.run.experiments.tune import contenders, tune, tuned_file

        jobs = runs_at_a_time(jobs)
        methods = contenders(document, scale=scale)
        check_experiment(method.config for method in methods)
        with locked(out, None), output.silenced(), leaving(ALL_SAVE) as asked:
            tuned = tune(methods, out, jobs=jobs, resume=resume, asked=asked.is_set)
    assert file is not None  # or it had been refused
    page, chosen = out / "tune.md", out / "tuned.toml"
    atomic_write(page, f"# Tuned with one budget\n\n{tuned_page(tuned)}".encode())
    atomic_write(chosen, tuned_file(document, tuned, file.name, scale=scale).encode())
    if output.json:
        print_json({"report": page, "file": chosen, "methods": [_as_json(one) for one in tuned]})
    else:
        echo("\n".join(_lines(one)[0] for one in tuned))
        echo(f"report: {page}\nfile: {chosen}")


def _outer(setting: "GridPoint") -> str:
    return "" if setting.outer is None else "({:g}, {:g})".format(*setting.outer)


def _loss(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses)


def _lines(tuned: "Tuned") -> list[str]:
    """The settings chosen for a method, in sentences."""
    result, contender = tuned.result, tuned.contender
    if result is None:
        return [f"{contender.row.label}: the search has not ended"]
    spent = f"{result.spent:,} of {contender.asked.budget_tokens:,} tokens"
    if result.best is None:
        where = "of the final" if contender.asked.final_seeds else "that was run to the end"
        return [f"{contender.row.label}: every setting {where} has diverged ({spent}); lower tune.lr"]
    loss = next(_loss(losses) for trial, losses in tuned.losses.items() if trial == (result.best, contender.deciding))
    outer = f", (η, γ) = {_outer(result.best)}" if result.best.outer else ""
    ends = {"lr": "the learning rate", "outer_lr": "η", "momentum": "γ"}
    open_in = [ends[edge] for edge in result.edges]
    if not open_in:
        where = "an interior optimum"
    elif contender.asked.grid == "cross":  # which grows on both sides of the best as long as it is paid for
        where = f"the budget ended before both neighbours in {' and '.join(open_in)} had run"
    else:
        where = f"at the edge of {' and of '.join(open_in)}"
    return [
        f"{contender.row.label}: lr {contender.lr(result.best):g}{outer}, loss {loss:.4f}, "
        f"{where} ({spent}, {len(tuned.losses)} trials)"
    ]


def tuned_page(tuned: "Sequence[Tuned]") -> str:
    """All that was tried for each method, as Markdown."""
    from gossamer.report.table import DASH, markdown_lines, markdown_text

    parts = list[str]()
    for method in tuned:
        contender = method.contender
        heads = ["lr", *(["(η, γ)"] if contender.table else []), "steps", "tokens of a run", "loss", "each seed"]
        rows = []
        for (setting, rung), losses in method.losses.items():
            each = [DASH if math.isnan(loss) else f"{loss:.4f}" for loss in losses]
            mean = DASH if math.isnan(_loss(losses)) else f"{_loss(losses):.4f}"
            outer = [_outer(setting)] if contender.table else []
            sizes = [str(contender.steps(rung)), f"{contender.tokens(rung):,}"]
            rows.append([f"{contender.lr(setting):g}", *outer, *sizes, mean, ", ".join(each)])
        table = markdown_lines([heads, ["---:"] * len(heads), *rows])
        lines = [f"## {contender.row.label}", *_lines(method)]
        parts += [*(f"{markdown_text(line)}\n" for line in lines), table]
    return "\n".join(parts)


def _as_json(tuned: "Tuned") -> dict[str, Any]:
    from gossamer.run.experiments.search import Trial

    result, contender = tuned.result, tuned.contender
    assert result is not None  # all searches have ended
    chosen = {} if result.best is None else contender.chosen(result.best)
    tried = [
        {
            "lr": contender.lr(setting),
            "outer": setting.outer,
            "steps": contender.steps(rung),
            "tokens": contender.space.cost(Trial(setting, rung)),
            "losses": losses,
        }
        for (setting, rung), losses in tuned.losses.items()
    ]
    return {
        "method": contender.row.label,
        "chosen": chosen,
        "interior": result.best is not None and not result.edges,
        "edges": result.edges,
        "spent_tokens": result.spent,
        "budget_tokens": contender.asked.budget_tokens,
        "tried": tried,
    }
