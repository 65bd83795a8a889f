"""The one list of what dashboards show of a run: curves by name, of each worker and their mean.

| curve | of |
|---|---|
| `train/loss`, `train/lr`, `train/tokens` | each worker, mean |
| `eval/loss`, `eval/disagreement`, `eval/tokens`, … | the mean model, or the server's |
| `eval/own_loss` | each worker's own model, mean |
| `validation/loss`, `validation/tokens` | a real worker's own model |
| `alignment/alignment`, `alignment/persistence` | all workers |
| `sent_bytes` | each worker in a round, mean |
| `seconds/compute`, `…/transfer`, `…/waiting`, `…/other` | each worker in a round, mean |

A worker's curve ends in `/worker-003`, that of their mean in `/mean`. A process that writes for one worker knows no mean. Seconds
of a declared network have its name, as in `seconds/waiting/home/mean`.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.whole_files import worker_suffix

__all__ = ["CurvePoint", "Means", "of_bytes", "of_metrics", "of_seconds"]

_WORKER = "/worker-"


class CurvePoint(NamedTuple):
    """Values of some curves at one place."""

    round: int
    step: int
    values: Mapping[str, float]


def of_metrics(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """What one line of metrics adds to the curves.

    >>> of_metrics("train", {"round": 0, "worker": 3, "step": 15, "loss": 2.5})
    {'train/loss/worker-003': 2.5}
    >>> of_metrics("eval", {"round": 0, "loss": 2.0, "worker_losses": [2.0, 3.0]})
    {'eval/loss': 2.0, 'eval/own_loss/worker-000': 2.0, 'eval/own_loss/worker-001': 3.0, 'eval/own_loss/mean': 2.5}
    """
    end = f"/worker{worker_suffix(fields['worker'])}" if "worker" in fields else ""
    found = {
        f"{kind}/{name}{end}": value
        for name, value in fields.items()
        if name not in ("round", "worker", "step") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if own := [x for x in fields.get("worker_losses", ()) if x is not None]:
        found |= {f"{kind}/own_loss/worker{worker_suffix(i)}": x for i, x in enumerate(fields["worker_losses"])}
        found[f"{kind}/own_loss/mean"] = math.fsum(own) / len(own)
    return {name: value for name, value in found.items() if value is not None}


def of_bytes(worker: int, sent_bytes: int) -> dict[str, float]:
    """What the bytes that a worker sent in a round add to the curves."""
    return {f"sent_bytes/worker{worker_suffix(worker)}": sent_bytes}


def of_seconds(seconds: RoundSeconds) -> dict[str, float]:
    """What the seconds of a worker's round add to the curves.

    >>> list(of_seconds(RoundSeconds(0, 1, "home", 3.0, 0.5, {2: 1.5}, 0.0, 5.0)).items())[2]
    ('seconds/waiting/home/worker-001', 1.5)
    """
    where = "" if seconds.network is None else f"/{seconds.network}"
    kinds = ("compute", "transfer", "waiting", "other")
    return {
        f"seconds/{kind}{where}/worker{worker_suffix(seconds.worker)}": getattr(seconds, f"{kind}_s") for kind in kinds
    }


class Means:
    """The means over the workers of one process, each when the next round begins.

    >>> means = Means()
    >>> means.add(CurvePoint(0, 15, {"train/loss/worker-000": 2.0})), means.add(CurvePoint(0, 15, {"train/loss/worker-001": 3.0}))
    ([], [])
    >>> means.add(CurvePoint(1, 30, {"train/loss/worker-000": 1.0}))
    [CurvePoint(round=0, step=15, values={'train/loss/mean': 2.5})]
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int, list[float]]] = {}

    def add(self, point: CurvePoint) -> list[CurvePoint]:
        """Takes over what belongs to workers; returns the means of rounds that are over."""
        # All at once, so that what belongs to one inner step comes together: a dashboard may take steps in their order only.
        over = [self._end(curve) for curve, (round, _, _) in [*self._open.items()] if round != point.round]
        for name, value in point.values.items():
            curve, found, _ = name.partition(_WORKER)
            if not found or f"{curve}/mean" in point.values:
                continue
            self._open.setdefault(curve, (point.round, point.step, []))[2].append(value)
        return over

    def end(self) -> list[CurvePoint]:
        """The means of the rounds under way."""
        return [self._end(curve) for curve in [*self._open]]

    def _end(self, curve: str) -> CurvePoint:
        round, step, values = self._open.pop(curve)
        return CurvePoint(round, step, {f"{curve}/mean": math.fsum(values) / len(values)})
