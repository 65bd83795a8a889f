"""Alignment and persistence of pseudo-gradients: what they say of whether outer momentum can pay."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.run.worker.worker import Worker
from gossamer.topologies.mixing import widen

_BLOCK = 1 << 14  # elements that torch sums in one thread, so that the number of threads changes no bit


class Alignment:
    """Measures the pseudo-gradients Δ_i of all workers of a simulation in rounds: what their local phases moved them by.

    Alignment A_t = |mean_i Δ_i|² / mean_i |Δ_i|² is 1 where all workers move alike, and about 1/n where they share nothing.
    Persistence is the cosine of mean Δ between a round and the one before: averages with a momentum γ gain where it is near 1.
    Of a rule that exchanges gradients, Δ_i is the gradient.

    Cost: two copies of all workers' parameters, and five reads of them per round.
    Source: A_t is 1 / (n times the gradient diversity) of arXiv 1706.05699, definition 1, of local phases in place of gradients.
    Fails when: a run is resumed, as the first round then has no round before it, and no persistence.
    """

    def __init__(self) -> None:
        self._before: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._last: Tensor | None = None

    def begin(self, workers: Sequence[Worker]) -> None:
        """Is called before local steps."""
        self._before = [worker.replica.x.clone() for worker in workers]

    def end(self, workers: Sequence[Worker]) -> None:
        """Is called after them, and before anything is received."""
        moved = [
            widen(worker.replica.x) - widen(x)
            if worker.replica.gradient is None
            else widen(worker.replica.gradient).clone()
            for worker, x in zip(workers, self._before, strict=True)
        ]
        self._moved = [a + b for a, b in zip(self._moved, moved, strict=True)] if self._moved else moved
        self._before = []

    def figures(self) -> dict[str, float | None]:
        """Alignment and persistence of the round that is over; None where all stood still, or no round went before."""
        n, moved = len(self._moved), self._moved
        mean = torch.zeros_like(moved[0])
        for one in moved:
            mean += one / n
        square, squares = _dot(mean, mean), sum(_dot(one, one) for one in moved) / n
        last, self._last, self._moved = self._last, mean, []
        length = (square * _dot(last, last)) ** 0.5 if last is not None else 0.0
        return {
            "alignment": square / squares if squares else None,
            "persistence": _dot(last, mean) / length if last is not None and length else None,
        }


def _dot(a: Tensor, b: Tensor) -> float:
    parts = [(x.double() * y.double()).sum() for x, y in zip(a.split(_BLOCK), b.split(_BLOCK), strict=True)]
    return float(torch.stack(parts).sum())
