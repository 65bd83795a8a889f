"""What a plan knows of losses: the committed outcomes over local steps, seed by seed, with the settings of their runs."""

import functools
import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

from generators.local_steps import LENGTHS
from generators.sources import RESULTS, ROOT, config_of
from generators.surface import codec_costs, committed_surface, means_by_seed
from gossamer.report.results import PointResult, read_results
from gossamer.run.config.document import load_document
from gossamer.run.planning.expected_loss import EXACT_CODECS

FILE = ROOT / "src" / "gossamer" / "run" / "planning" / "measured_losses.json"

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
    }


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
