"""What a plan knows of losses: the committed outcomes over local steps, seed by seed, with the settings of their runs."""

import functools
import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

from generators.local_steps import LENGTHS
from generators.sources import RESULTS, ROOT, config_of
from generators.surface import PENALTY, codec_costs, committed_surface, means_by_seed
from gossamer.network.estimates.wall_clock import DILOCO_FITS
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import markdown_lines
from gossamer.run.config.document import load_document
from gossamer.run.planning.expected_loss import EXACT_CODECS, PUBLISHED, TEXT
from gossamer.run.planning.measured_losses import (
    CODECS_MEASURED,
    DRIFT,
    GAP_POWER,
    LEAST_ROUNDS,
    MEASURED,
    MEASURED_PARAMETERS,
    MEASURED_WORKERS,
    NATS_PER_E_FOLD,
)

FILE = ROOT / "src" / "gossamer" / "run" / "planning" / "measured_losses.json"
PAGE = RESULTS / "plan_losses.md"

_BY_LOCAL_STEPS = ("DiLoCo", "GASLoC 2-Peer", "GASLoC 1-Peer")
_RECIPES = (
    "local_sgd",
    "streaming_diloco",
    "eager",
    "muloco",
    "sparseloco",
    "gossip",
    "gasloc_drift",
    "fgd_pairs",
    "noloco",
)
"""Of the leaderboard, those that have 30 local steps and another price than what was measured over local steps."""
_EVERY_STEP = {"distro": "DisTrO", "demo": "DeMo"}
"""Those that exchange after every step, measured at both lengths, with their labels there."""
_LARGER = 870e3 / 139_584
"""By how much the larger model of `size-870k` is larger."""

_Losses = dict[int, float]


def measured_losses() -> str:
    """The text of `FILE`."""
    cells = _cells()
    known = {"data parallel": {1: cells["data_parallel"]}}
    for method in _BY_LOCAL_STEPS:
        known[method] = {steps: cells[f"{method}, H = {steps}"] for steps in LENGTHS}
    known |= {recipe: {30: cells[recipe]} for recipe in _RECIPES}
    known |= {recipe: {1: _every_step(label)} for recipe, label in _EVERY_STEP.items()}
    methods = [
        f"  {json.dumps(method)}: {{\n"
        + ",\n".join(f'   "{steps}": {json.dumps(one)}' for steps, one in own.items())
        + "\n  }"
        for method, own in known.items()
    ]
    rest = {
        "codecs": _codecs(),
        "longer": _longer(),
        "nats_per_e_fold": round(_per_e_fold(), 4),
        "gap_power": round(_gap_power(), 2),
        "drift": {name: round(value, 2) for name, value in _drift().items()},
    }
    others = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in rest.items())
    return '{\n "losses": {\n' + ",\n".join(methods) + "\n },\n" + others + "\n}\n"


def _cells() -> dict[str, dict[str, Any]]:
    """Losses and settings by label, with one warm-up for all."""
    document = load_document(config_of(RESULTS / "evidence" / "equal_warmup.jsonl")[0])
    cells = dict[str, dict[str, Any]]()
    for variant in document["variant"]:
        losses, rule = _losses("equal_warmup", variant["label"]), variant.get("rule", {})
        settings = {"inner_lr": variant["inner"]["lr"], "lr": rule.get("lr"), "momentum": rule.get("momentum")}
        cells[variant["label"]] = {"losses": [round(loss, 4) for loss in losses.values()], **settings}
    return cells


def _every_step(label: str) -> dict[str, Any]:
    """The losses of a method that exchanges after every step, and its learning rate."""
    variants = load_document(config_of(RESULTS / "evidence" / "recent_longer-short.jsonl")[0])["variant"]
    lr = next(one["inner"]["lr"] for one in variants if one["label"] == label)
    losses = [round(loss, 4) for loss in _losses("recent_longer-short", label).values()]
    return {"losses": losses, "inner_lr": lr, "lr": None, "momentum": None}


def _losses(stem: str, label: str, **at: Any) -> _Losses:
    """By seed, in their order."""
    found = {
        one.seed: one.row["loss"]
        for one in _results(stem)
        if one.method == label and all(one.at.get(key.replace("__", ".")) == value for key, value in at.items())
    }
    return dict(sorted(found.items()))


@functools.cache
def _results(stem: str) -> list[PointResult]:
    return read_results(RESULTS / "evidence" / f"{stem}.jsonl")


def _above(one: _Losses, other: _Losses) -> list[float]:
    return [round(loss - other[seed], 4) for seed, loss in one.items()]


def _codecs() -> Mapping[str, Mapping[str, list[float]]]:
    """What a codec adds, by seed, where DiLoCo with 30 local steps and exact messages loses 1 against data parallelism.

    Four bits from runs of 1,350 steps, with 30 local steps; all others from those of 5,400, in the mean over local steps.
    """
    at = {"run__steps": 1350}
    four = _above(_losses("systems_tuned", "DiLoCo, fp4"), _losses("systems_tuned", "DiLoCo"))
    four += _above(
        _losses("straggler_codecs", "DiLoCo, H = 30, 4 bits", **at),
        _losses("straggler_codecs", "DiLoCo, H = 30, fp32", **at),
    )
    gap = _gap("equal_warmup")
    found = {"DiLoCo": {"fp4": [round(nats / gap, 4) for nats in four]}}
    surface = committed_surface()
    unit = statistics.fmean(surface["DiLoCo, exact"][30].values())
    for name, own in codec_costs(surface).items():
        method, _, codec = name.rpartition(", ")
        if method in _BY_LOCAL_STEPS and codec not in EXACT_CODECS:
            found.setdefault(method, {})[codec] = [round(nats / unit, 4) for nats in means_by_seed(own)]
    return found


def _longer() -> Mapping[str, Mapping[int, list[float]]]:
    """Nats above data parallelism in four times as many steps, by seed."""
    least = _losses("four_times_as_long", "data_parallel")
    return {
        method: {
            steps: _above(_losses("four_times_as_long", f"{method}, H = {steps}"), least)
            for steps in LENGTHS
            if steps > 1
        }
        for method in _BY_LOCAL_STEPS
    } | {recipe: {1: _above(_losses("recent_longer", label), least)} for recipe, label in _EVERY_STEP.items()}


def _per_e_fold() -> float:
    """By how much the loss falls when there are e times as many tokens: DiLoCo, 20 to 79 for each parameter."""
    short, long = (_losses("rounds", "DiLoCo", run__steps=steps) for steps in (1350, 5400))
    return statistics.fmean(_above(short, long)) / math.log(4)


def _gap_power() -> float:
    """By which power of the tokens DiLoCo comes nearer with 30 local steps."""
    return math.log(_gap("equal_warmup") / _gap("four_times_as_long")) / math.log(4)


def _gap(stem: str) -> float:
    """What DiLoCo with 30 local steps loses against data parallelism."""
    return statistics.fmean(_above(_losses(stem, "DiLoCo, H = 30"), _losses(stem, "data_parallel")))


def _drift() -> Mapping[str, float]:
    """By which power of tokens, of parameters and of workers the difference between two methods changed where it was measured."""

    def gap(stem: str, method: str = "GASLoC 1-Peer", **at: Any) -> float:
        return statistics.fmean(_above(_losses(stem, method, **at), _losses(stem, "DiLoCo", **at)))

    short, long = (gap("rounds", run__steps=steps) for steps in (1350, 5400))
    few, many = (gap(stem, "GASLoC 2-Peer") for stem in ("cells_tuned", "cells_tuned-n32"))
    return {
        "tokens": abs(math.log(long / short)) / math.log(4),
        "parameters": abs(math.log(gap("size-870k") / short)) / math.log(_LARGER),
        "workers": abs(math.log(many / few)) / math.log(4),
    }


def losses_page() -> str:
    """The text of `PAGE`: for each part of what a plan expects, its law and the runs that it stands on."""
    law = "[arXiv 2503.09799](https://arxiv.org/abs/2503.09799)"
    fits = ", ".join(f"{a} · N^{power} with {n}" for n, (a, power) in DILOCO_FITS.items())
    here = f"{MEASURED_PARAMETERS:,} parameters"
    rows = [
        ["what a plan expects", "from 35M parameters on", f"of {here}", "runs"],
        ["---", "---", "---", "---"],
        ["level: data parallelism", f"18.129 · N^-0.0953 ({law})", "measured", _runs("equal_warmup")],
        [
            "DiLoCo's gap with 30 local steps, by workers",
            f"{fits} workers, N from 35M to 2.4B ({law}); logarithms in between, none with one worker, above 8 as from 4 to 8",
            f"measured with {MEASURED_WORKERS} workers; other numbers stand to it as at 35M",
            _runs("equal_warmup", "outer_lr", "leaderboard_tuned"),
        ],
        [
            "the gap, by tokens",
            "as published, at 20 a parameter",
            f"(tokens a parameter / 20)^-{GAP_POWER}",
            _runs("equal_warmup", "four_times_as_long"),
        ],
        [
            "what e times as many tokens bring",
            "2085.43 · D^-0.3658 ([arXiv 2404.10102](https://arxiv.org/abs/2404.10102))",
            f"{NATS_PER_E_FOLD} nats",
            _runs("rounds"),
        ],
        [
            "few rounds R",
            f"a share of what n workers gain together, in proportion to {LEAST_ROUNDS} / R",
            "the same",
            _runs("four_times_as_long"),
        ],
        [
            "one local step of DiLoCo",
            "as much as 120, the worst as published " + f"({law})",
            "measured",
            _runs("equal_warmup"),
        ],
    ]
    for method, own in MEASURED.items():
        if method == "data parallel":
            continue
        every_step = method in _EVERY_STEP
        longer = ("four_times_as_long",) if every_step or method in _BY_LOCAL_STEPS else ()
        stems = (*(("recent_longer-short", "recent_longer") if every_step else ("equal_warmup",)), *longer)
        steps = ", ".join(map(str, own))
        published = PUBLISHED.get(method)
        there = "the share of DiLoCo's gap that was measured"
        if published is not None:
            more = f" {100 * published.share:+.1f} %" if published.share else ""
            there = f"as DiLoCo{more} from {published.parameters / 1e6:,.0f}M on ({published.source})"
        if method == "DiLoCo":
            there = "the share of its gap with 30 that was measured"
        measured = f"share of DiLoCo's gap, measured with {steps} local steps; never falls from 5 on"
        if every_step:
            measured = "share of DiLoCo's gap with 30, measured at both lengths with an exchange after every step"
        rows.append([method, there, measured, _runs(*stems)])
    for method, codecs in CODECS_MEASURED.items():
        stems = [PENALTY, "systems_tuned", "straggler_codecs"] if method == "DiLoCo" else [PENALTY]
        rows.append([f"{method}: {', '.join(codecs)}", "share of DiLoCo's gap", "measured", _runs(*stems)])
    drift = ", ".join(f"{name}^{power}" for name, power in DRIFT.items())
    rows.append(
        [
            "interval: lengths, sizes, workers",
            f"differences may change by {drift}",
            "seeds, paired (95 %)",
            _runs("rounds", "size-870k", "cells_tuned", "cells_tuned-n32"),
        ]
    )
    rows.append(
        ["interval: texts", f"{100 * TEXT:.0f} % of the gap", "the same", _runs("tuned_again", "tuned_again-prose")]
    )
    return "\n\n".join(
        (
            "# What a plan expects, and on which runs it stands",
            "    make results",
            "Nats above data parallelism that reads the same tokens. Between both sizes everything is interpolated in the "
            "logarithm of the parameters. [How it is put together](../adr/0071-published-laws-hold-the-level.md).",
            markdown_lines(rows).rstrip() + "\n",
        )
    )


def _runs(*stems: str) -> str:
    """Links to committed outcomes. Raises: FileNotFoundError for one that is not there."""
    for stem in stems:
        (RESULTS / "evidence" / f"{stem}.jsonl").stat()
    return ", ".join(f"[{stem}](evidence/{stem}.md)" for stem in stems)
