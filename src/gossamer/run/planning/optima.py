"""Learning rates, warm-up and momentum of a planned run, for its size: those of our search of a small model, or published ones.

From the geometric mean of the measured size and of the smallest published one on they are published: the inner learning rate and
its batch by the fits of arXiv 2503.09799, with its warm-up and cosine; an outer learning rate of 0.7 and a momentum of 0.9, as
arXiv 2311.08105 and 2412.01152 train DiLoCo. For GASLoC no grid is published: it has the defaults of its rule.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gossamer.network.estimates.wall_clock import batch_tokens_fit, inner_lr_fit
from gossamer.run.planning.measured_losses import (
    MEASURED,
    MEASURED_PARAMETERS,
    MEASURED_WORKERS,
    measured_schedule,
    nearest_measured,
)

_SMALLEST, _MOST_REPLICAS = 35_000_000, 8
"""Parameters from which on the fits hold, and replicas up to which they do."""
_WARMUP_STEPS, _LAST_LR = 1000, 0.05
"""Steps of the warm-up of arXiv 2503.09799, and the share of the learning rate at its end."""
_RULES: Mapping[str, Mapping[str, Any]] = {
    "DiLoCo": {"lr": 0.7, "momentum": 0.9},
    "GASLoC 2-Peer": {"lr": 0.7, "momentum": 0.5},
    "GASLoC 1-Peer": {"lr": 0.7, "momentum": 0.5},
}
"""The outer learning rate and momentum of methods that a plan prices by formula."""


class Optima(NamedTuple):
    """Settings of a run, and where they are from."""

    inner: Mapping[str, Any]
    """Keys of `[inner]`."""
    rule: Mapping[str, Any]
    """Keys of `[rule]`; empty where they are those of the method."""
    source: str
    """A comment of the run file, in whole lines."""


def is_published(parameters: int) -> bool:
    """Whether a model of so many parameters is nearer to the published ones than to the measured one."""
    return parameters >= math.sqrt(MEASURED_PARAMETERS * _SMALLEST)


def optima(
    method: str,
    parameters: int,
    replicas: int,
    batch_tokens: float,
    steps: int,
    local_steps: int,
    *,
    own_lr: bool = False,
) -> Optima:
    """The settings for a method, a model and a run of so many inner steps.

    Args:
        method: as a plan names it, or a recipe, which keeps its outer settings.
        batch_tokens: of all replicas together in an inner step.
        own_lr: the inner learning rate is that of the recipe.

    >>> large = optima("DiLoCo", 10**9, 2, 1024 * 300, 10_000, 30)
    >>> large.inner["lr"], large.inner["warmup_steps"], large.rule
    (0.000309, 1000, {'lr': 0.7, 'momentum': 0.9})
    """
    replicas = 1 if method == "data parallel" else min(replicas, _MOST_REPLICAS)
    if not is_published(parameters):
        return _measured(method, steps, local_steps, own_lr)
    fitted = max(parameters, _SMALLEST)
    lr, batch = inner_lr_fit(fitted, replicas), batch_tokens_fit(fitted, replicas)
    lr *= min(1.0, math.sqrt(batch_tokens / batch))
    inner = {
        "clip": 1.0,
        "schedule": "cosine",
        "warmup_steps": max(1, min(_WARMUP_STEPS, steps // 5)),
        "min_lr_ratio": _LAST_LR,
        **({} if own_lr else {"lr": float(f"{lr:.3g}")}),
    }
    source = (
        ""
        if own_lr
        else (
            f"# inner.lr: 22256 N^-0.8827 M^0.2929 (arXiv 2503.09799), that is for batches of {batch:.2g} tokens; of fewer, as\n"
            f"# the {batch_tokens:.2g} of this run, times the root of their ratio (arXiv 2205.10330).\n"
        )
    )
    source += "# Warm-up and cosine: arXiv 2503.09799."
    rule = dict(_RULES.get(method, {}))
    if rule:
        of = (
            "arXiv 2311.08105"
            if method == "DiLoCo"
            else "the defaults of gasloc, as no search of a model of this size is published"
        )
        source += f" lr and momentum of [rule]: {of}."
    return Optima(inner, rule, f"{source}\n")


def _measured(method: str, steps: int, local_steps: int, own_lr: bool) -> Optima:
    """The settings of the search of a small model, with about as many local steps."""
    if method not in MEASURED:
        return Optima(measured_schedule(steps), {}, "# Warm-up: the best share of the steps for small models.\n")
    at, tuned = nearest_measured(method, local_steps)
    outer = {key: value for key in ("lr", "momentum") if (value := getattr(tuned, key)) is not None}
    source = (
        f"# Best at {at} local step{'s' if at > 1 else ''}, for {MEASURED_PARAMETERS:,} parameters and {MEASURED_WORKERS} "
        f"workers: inner.lr = {tuned.inner_lr:g}{', with the lr and momentum of [rule]' if outer else ''}.\n"
        "# gossamer tune searches for your model.\n"
    )
    inner = {**measured_schedule(steps), **({} if own_lr else {"lr": tuned.inner_lr})}
    return Optima(inner, outer, source)
