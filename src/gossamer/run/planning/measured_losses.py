"""What methods lose at equal tokens, as it was measured over local steps, and the settings it was measured at.

One small model was trained: 139,584 parameters, 8 workers that read the same text, 20 tokens for each parameter, a warm-up of a
fifth of the steps, and for every method and number of local steps the settings that a search of whole runs chose for it.
`measured_losses.json` is written by `make results` from the committed outcomes, and
`tests/run/planning/test_measured_losses.py` holds it against them.
"""

import json
import math
from collections.abc import Mapping
from importlib import resources
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

__all__ = [
    "CODECS_MEASURED", "DRIFT", "GAP_POWER", "MEASURED", "MEASURED_PARAMETERS", "MEASURED_STEPS", "MEASURED_WORKERS",
    "NATS_PER_E_FOLD", "TunedLoss", "measured_above", "measured_schedule", "nearest_measured",
]  # fmt: skip

MEASURED_PARAMETERS, MEASURED_WORKERS, MEASURED_STEPS = 139_584, 8, 1350
_WARMUP = 0.2
"""Of the steps: a shorter warm-up costs methods with few local steps more than others."""


class TunedLoss(NamedTuple):
    """Losses by seed, and the settings of these runs."""

    losses: tuple[float, ...]
    """Nats per byte of held-out text, of the mean model; those of all methods have the same seeds."""
    inner_lr: float
    lr: float | None
    """Outer learning rate; None for a method that has none, or where it is that of the method."""
    momentum: float | None


def _read() -> Mapping[str, Any]:
    file = resources.files("gossamer.run.planning") / "measured_losses.json"
    return json.loads(file.read_text(encoding="utf-8"))


_DOCUMENT = _read()
MEASURED: Mapping[str, Mapping[int, TunedLoss]] = {
    method: {int(steps): TunedLoss(tuple(one.pop("losses")), **one) for steps, one in own.items()}
    for method, own in _DOCUMENT["losses"].items()
}
"""By method, as a plan names it, and local steps."""
CODECS_MEASURED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    method: {codec: tuple(above) for codec, above in own.items()} for method, own in _DOCUMENT["codecs"].items()
}
"""Nats by seed that a lossy codec adds, by method, with 30 local steps."""
NATS_PER_E_FOLD: float = _DOCUMENT["nats_per_e_fold"]
"""By how much the loss falls with e times as many tokens: DiLoCo, from 20 to 79 tokens a parameter."""
GAP_POWER: float = _DOCUMENT["gap_power"]
"""By which power of tokens for each parameter DiLoCo came nearer to data parallelism, in as many rounds."""
DRIFT: Mapping[str, float] = _DOCUMENT["drift"]
"""By which power of tokens, parameters and workers the difference of two methods changed where that was measured."""


def measured_above(method: str, rounds: float) -> tuple[tuple[float, ...], float] | None:
    """Nats by seed above data parallelism after as many tokens in so many rounds, and how much of their mean was not measured.

    Between measured numbers of rounds they are interpolated in their logarithm; with fewer rounds they go on as between the last
    two, and with more than an exchange after each step they stay. None for a method that was not measured. One that was measured
    with one number of rounds changes with others as DiLoCo does.

    >>> above, beyond = measured_above("DiLoCo", 1350 / 240)
    >>> [round(nats, 2) for nats in above], round(beyond, 2)
    ([0.4, 0.42, 0.4, 0.42, 0.37], 0.07)
    >>> measured_above("heloco", 45), measured_above("data parallel", 45)
    (None, ((0.0, 0.0, 0.0, 0.0, 0.0), 0.0))
    """
    known = MEASURED.get(method, {})
    if not known:
        return None
    if len(known) > 1:
        return _along(known, rounds)
    ((steps, one),) = known.items()
    diloco, beyond = _along(MEASURED["DiLoCo"], rounds)
    there, own = fmean(_above(MEASURED["DiLoCo"][steps])), _above(one)
    return tuple(fmean(diloco) / there * nats for nats in own), abs(beyond / there * fmean(own))


def _along(known: Mapping[int, TunedLoss], rounds: float) -> tuple[tuple[float, ...], float]:
    """The same, along what was measured with several numbers of rounds."""
    local_steps, steps = MEASURED_STEPS / rounds, sorted(known)
    if local_steps <= steps[0]:
        return _above(known[steps[0]]), 0.0
    low, high = next(((a, b) for a, b in pairwise(steps) if local_steps <= b), (steps[-2], steps[-1]))
    first, last = _above(known[low]), _above(known[high])
    share = math.log(local_steps / low) / math.log(high / low)
    if share <= 1:
        return tuple(a + share * (b - a) for a, b in zip(first, last, strict=True)), 0.0
    beyond = (share - 1) * (fmean(last) - fmean(first))
    return tuple(nats + beyond for nats in last), abs(beyond)


def _above(one: TunedLoss) -> tuple[float, ...]:
    least = MEASURED["data parallel"][1].losses
    return tuple(loss - other for loss, other in zip(one.losses, least, strict=True))


def nearest_measured(method: str, local_steps: int) -> tuple[int, TunedLoss]:
    """The measured local steps of a method that are nearest in their logarithm, and what was measured there.

    >>> nearest_measured("GASLoC 2-Peer", 15)[0], nearest_measured("GASLoC 2-Peer", 240)[0]
    (10, 120)
    """
    known = MEASURED[method]
    steps = min(known, key=lambda one: abs(math.log(one / local_steps)))
    return steps, known[steps]


def measured_schedule(steps: int) -> dict[str, Any]:
    """The keys of `[inner]` that all that was measured has in common, for a run of so many inner steps.

    >>> measured_schedule(1350)
    {'clip': 1.0, 'schedule': 'cosine', 'warmup_steps': 270}
    """
    return {"clip": 1.0, "schedule": "cosine", "warmup_steps": max(1, round(_WARMUP * steps))}
