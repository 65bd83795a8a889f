"""The losses of methods at equal tokens, measured over local steps, and the settings of these measurements.

One small model was trained: 139,584 parameters, 8 workers that read the same text, 20 tokens for each parameter, a warm-up of a
fifth of the steps, and for every method and number of local steps the settings that a search of whole runs chose for it. DiLoCo
and GASLoC were trained four times as long too, at the same settings.
`measured_losses.json` is written by `make results` from the committed outcomes, and
`tests/run/planning/test_measured_losses.py` holds it against them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

MEASURED_PARAMETERS, MEASURED_WORKERS, MEASURED_STEPS = 139_584, 8, 1350
LONGER_STEPS = 5400
"""Inner steps of the runs that show how the losses of methods change with length."""
_UNIT = 30
"""Local steps of DiLoCo at which its loss is the unit of others."""
_RISES_FROM = 5
"""Local steps from which more of them never lose less, as published runs and the theory of drift agree."""
FAR_STEPS = 4
"""The factor of local steps over which a loss is carried without a mark."""
_WARMUP = 0.4
"""Share of the steps that warms up in run files of small models; the losses here are of a fifth (docs/adr/0105)."""


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
"""Losses by method, as a plan names it, and local steps."""
EVERY_STEP = frozenset(method for method, own in MEASURED.items() if [*own] == [1]) - {"data parallel"}
"""Methods that exchange after every step, in all that was measured of them."""
CODECS_MEASURED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    method: {codec: tuple(above) for codec, above in own.items()} for method, own in _DOCUMENT["codecs"].items()
}
"""The loss that a lossy codec adds, by method and seed, in units of DiLoCo's with 30 local steps and exact messages."""
_BySeed = Mapping[str, Mapping[int, tuple[float, ...]]]
"""Losses by method and local steps, seed by seed."""


def _above(tuned: TunedLoss) -> tuple[float, ...]:
    """Nats above data parallelism, by seed."""
    least = MEASURED["data parallel"][1].losses
    return tuple(loss - other for loss, other in zip(tuned.losses, least, strict=True))


def _in_units(above: _BySeed) -> _BySeed:
    """In units of the loss of DiLoCo with `_UNIT` local steps."""
    unit = fmean(above["DiLoCo"][_UNIT])
    return {
        method: {steps: tuple(nats / unit for nats in some) for steps, some in by_steps.items()}
        for method, by_steps in above.items()
    }


def _monotone(above: _BySeed) -> _BySeed:
    """The same with means that do not fall with more local steps, from `_RISES_FROM` on.

    Where they do, which is the chance of few seeds, neighbours have their common mean; differences between seeds stay.
    """
    rising = dict[str, dict[int, tuple[float, ...]]]()
    for method, by_steps in above.items():
        pools = list[list[int]]()
        for steps in sorted(one for one in by_steps if one >= _RISES_FROM):
            pools.append([steps])
            while len(pools) > 1 and _mean_of(by_steps, pools[-2]) > _mean_of(by_steps, pools[-1]):
                last = pools.pop()
                pools[-1] += last
        common = {steps: _mean_of(by_steps, pool) for pool in pools for steps in pool}
        rising[method] = {
            steps: tuple(nats + common[steps] - fmean(some) for nats in some) if steps in common else some
            for steps, some in by_steps.items()
        }
    return rising


def _mean_of(by_steps: Mapping[int, tuple[float, ...]], pool: Sequence[int]) -> float:
    return fmean(fmean(by_steps[steps]) for steps in pool)


_LONG: _BySeed = {
    method: {int(steps): tuple(some) for steps, some in own.items()} for method, own in _DOCUMENT["longer"].items()
}
_LONGER = _in_units(_monotone(_LONG))
_SHORTER = _in_units(
    _monotone(
        {
            method: {steps: _above(one) for steps, one in own.items()}
            for method, own in MEASURED.items()
            if method in _LONG
        }
    )
)
LEAST_ROUNDS = 45
"""Rounds of the longer runs with 120 local steps."""
FEW_ROUNDS_NATS = min(_LONG["DiLoCo"][120])
"""The loss of DiLoCo in these runs, with the seed that lost least: the least price of few rounds."""
NATS_PER_E_FOLD: float = _DOCUMENT["nats_per_e_fold"]
"""The decrease of the loss with e times as many tokens: DiLoCo, from 20 to 79 tokens a parameter."""
GAP_POWER: float = _DOCUMENT["gap_power"]
"""The power of tokens for each parameter by which DiLoCo's gap to data parallelism falls, with 30 local steps."""
DRIFT: Mapping[str, float] = _DOCUMENT["drift"]
"""The powers of tokens, parameters and workers by which the difference of two methods changed where that was measured."""


class RelativeLoss(NamedTuple):
    """The loss of a method in runs of one length, in units of DiLoCo's with 30 local steps."""

    by_seed: tuple[float, ...]
    """Losses by seed; those of all methods have the same seeds."""
    beyond: float
    """The part of their mean that was not measured."""


def relative_losses(method: str, local_steps: int) -> tuple[RelativeLoss, RelativeLoss] | None:
    """The losses in `MEASURED_STEPS` and in `LONGER_STEPS`; None for a method that was not measured.

    Between measured numbers of local steps they are interpolated in their logarithm. With more, they continue as from 30 to the
    most; with fewer than in the longer runs they change as in the shorter ones. What was measured with one number of local steps
    stands to DiLoCo in longer runs as it does in shorter ones; with more local steps it rises by as much as DiLoCo does, and with
    fewer it is not taken to fall, neither of which is measured.

    >>> [[round(nats, 2) for nats in one.by_seed] for one in relative_losses("GASLoC 2-Peer", 30)]
    [[1.38, 1.23, 1.22, 1.3, 1.31], [1.02, 1.42, 0.86]]
    >>> relative_losses("heloco", 30), relative_losses("data parallel", 1)[1].by_seed
    (None, (0.0, 0.0, 0.0))
    """
    if method in EVERY_STEP and local_steps > 1:
        return None
    if method in _LONGER:
        return _at_local_steps(_SHORTER[method], local_steps), _longer(method, local_steps)
    if method not in MEASURED:
        return None
    at, only = nearest_measured(method, local_steps)
    own, diloco = _above(only), _above(MEASURED["DiLoCo"][at])

    def beside(there: RelativeLoss, here: RelativeLoss) -> RelativeLoss:
        n = len(there.by_seed)  # the longer runs have the first of the seeds
        unit, more = fmean(diloco[:n]) / fmean(there.by_seed), fmean(here.by_seed) - fmean(there.by_seed)
        return RelativeLoss(tuple(nats / unit + max(0.0, more) for nats in own[:n]), abs(more))

    there, here = (
        (_at_local_steps(_SHORTER["DiLoCo"], steps), _longer("DiLoCo", steps)) for steps in (at, local_steps)
    )
    return beside(there[0], here[0]), beside(there[1], here[1])


def _at_local_steps(known: Mapping[int, tuple[float, ...]], local_steps: int) -> RelativeLoss:
    """The losses of runs of one length, from those with several numbers of local steps."""
    steps = sorted(known)
    if local_steps <= steps[0]:
        return RelativeLoss(known[steps[0]], 0.0)
    if local_steps <= steps[-1]:
        low, high = next((a, b) for a, b in pairwise(steps) if local_steps <= b)
        share = math.log(local_steps / low) / math.log(high / low)
        return RelativeLoss(tuple(a + share * (b - a) for a, b in zip(known[low], known[high], strict=True)), 0.0)
    rises = (fmean(known[steps[-1]]) - fmean(known[_UNIT])) / math.log(steps[-1] / _UNIT)
    more = rises * math.log(local_steps / steps[-1])
    return RelativeLoss(tuple(one + more for one in known[steps[-1]]), abs(more))


def _longer(method: str, local_steps: int) -> RelativeLoss:
    """The loss in the longer runs, which have no fewest local steps."""
    known, fewest = _LONGER[method], min(_LONGER[method])
    if local_steps >= fewest:
        return _at_local_steps(known, local_steps)
    fewer, there = (fmean(_at_local_steps(_SHORTER[method], steps).by_seed) for steps in (local_steps, fewest))
    some = tuple(one * fewer / there for one in known[fewest])
    return RelativeLoss(some, abs(fmean(known[fewest]) - fmean(some)))


def nearest_measured(method: str, local_steps: int) -> tuple[int, TunedLoss]:
    """The measured local steps of a method that are nearest in their logarithm, and what was measured there.

    >>> nearest_measured("GASLoC 2-Peer", 15)[0], nearest_measured("GASLoC 2-Peer", 240)[0]
    (10, 120)
    """
    known = MEASURED[method]
    steps = min(known, key=lambda one: abs(math.log(one / local_steps)))
    return steps, known[steps]


def carried_from(method: str, local_steps: int) -> int | None:
    """The nearest measured local steps of a method, where its loss is carried from there over more than `FAR_STEPS` times.

    >>> carried_from("gossip", 240), carried_from("gossip", 5), carried_from("gossip", 120), carried_from("DiLoCo", 480)
    (30, 30, None, None)
    """
    steps, _ = nearest_measured(method, local_steps)
    return None if steps <= FAR_STEPS * local_steps and local_steps <= FAR_STEPS * steps else steps


def measured_schedule(steps: int) -> dict[str, Any]:
    """Clipping and schedule of all that was measured, with the warm-up that is within 0.01 nats of the lowest for each method.

    >>> measured_schedule(1350)
    {'clip': 1.0, 'schedule': 'cosine', 'warmup_steps': 540}
    """
    return {"clip": 1.0, "schedule": "cosine", "warmup_steps": max(1, round(_WARMUP * steps))}
