"""What methods lose at equal tokens, as it was measured over local steps, and the settings it was measured at.

One small model was trained: 139,584 parameters, 8 workers that read the same text, 20 tokens for each parameter, and for every
method and number of local steps the settings that a search of whole runs chose for it. For other models it is a guide: it tells
which method loses more, and not how much. `tests/run/planning/test_plan_choice.py` holds the figures against the committed
outcomes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

__all__ = ["MEASURED", "MEASURED_FOR", "TunedLoss", "loss_penalty", "nearest", "penalty_text"]

MEASURED_FOR = "139,584 parameters and 8 workers"
"""The model and the workers of `MEASURED`."""


class TunedLoss(NamedTuple):
    """A mean over five seeds, and the settings of these runs."""

    loss: float
    """Nats per byte of held-out text, of the mean model."""
    inner_lr: float
    lr: float | None = None
    """Outer learning rate; None for a method that has none."""
    momentum: float | None = None


MEASURED: Mapping[str, Mapping[int, TunedLoss]] = {
    "data parallel": {1: TunedLoss(1.4615, 0.004)},
    "DiLoCo": {
        1: TunedLoss(1.5003, 0.008, 0.7, 0.3),
        5: TunedLoss(1.5582, 0.004, 0.7, 0.3),
        10: TunedLoss(1.6118, 0.004, 0.7, 0.5),
        30: TunedLoss(1.6886, 0.002, 1.0, 0.5),
        60: TunedLoss(1.7023, 0.004, 1.0, 0.7),
        120: TunedLoss(1.7350, 0.002, 1.0, 0.7),
    },
    "GASLoC 2-Peer": {
        1: TunedLoss(1.5111, 0.004, 1.0, 0.3),
        5: TunedLoss(1.5951, 0.004, 0.5, 0.5),
        10: TunedLoss(1.6612, 0.002, 0.7, 0.5),
        30: TunedLoss(1.7258, 0.002, 0.7, 0.7),
        60: TunedLoss(1.7518, 0.004, 1.0, 0.7),
        120: TunedLoss(1.7594, 0.002, 1.0, 0.5),
    },
    "GASLoC 1-Peer": {
        1: TunedLoss(1.5293, 0.004, 1.0, 0.3),
        5: TunedLoss(1.6389, 0.004, 0.7, 0.3),
        10: TunedLoss(1.7169, 0.004, 0.7, 0.3),
        30: TunedLoss(1.7656, 0.002, 1.0, 0.3),
        60: TunedLoss(1.7804, 0.002, 1.0, 0.5),
        120: TunedLoss(1.7865, 0.002, 1.0, 0.5),
    },
    "local_sgd": {30: TunedLoss(1.7381, 0.002)},
    "gossip": {30: TunedLoss(1.7850, 0.002)},
}
"""By method, as a plan names it, and local steps."""

_LEAST = MEASURED["data parallel"][1].loss


def loss_penalty(method: str, local_steps: int) -> float | None:
    """Nats above data parallelism after as many tokens, interpolated in the logarithm of local steps.

    With more local steps than were measured it is that of the most, which is too little. None for a method that was not measured,
    and between two numbers of local steps there must be two.

    >>> loss_penalty("DiLoCo", 30), loss_penalty("DiLoCo", 240), loss_penalty("gossip", 60)
    (0.2271, 0.2735, None)
    """
    known = MEASURED.get(method, {})
    if local_steps in known:
        return round(known[local_steps].loss - _LEAST, 4)
    if len(known) < 2:
        return None
    losses = [one.loss for one in known.values()]
    return round(float(np.interp(math.log(local_steps), np.log([*known]), losses)) - _LEAST, 4)


def penalty_text(method: str, local_steps: int) -> str:
    """`loss_penalty` for a table.

    >>> penalty_text("DiLoCo", 30), penalty_text("DiLoCo", 240), penalty_text("sgp", 1)
    ('+0.227', '≥ +0.274', '–')
    """
    penalty = loss_penalty(method, local_steps)
    if penalty is None:
        return "–"
    return f"{'≥ ' if local_steps > max(MEASURED[method]) else ''}{penalty:+.3f}"


def nearest(method: str, local_steps: int) -> tuple[int, TunedLoss]:
    """The measured local steps of a method that are nearest in their logarithm, and what was measured there.

    >>> nearest("GASLoC 2-Peer", 15)[0], nearest("GASLoC 2-Peer", 240)[0]
    (10, 120)
    """
    known = MEASURED[method]
    steps = min(known, key=lambda one: abs(math.log(one / local_steps)))
    return steps, known[steps]
