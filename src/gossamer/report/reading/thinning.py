"""Figures by round and worker in bounded memory, and curves thinned to screen resolution."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_ROUNDS = 2048
_MOST_CELLS = 1 << 22


class Grid:
    """One figure of each worker in each round: the mean over the rounds of a row, or their sum.

    A row is one round at first. Beyond 2048 rows, neighbouring rows are merged, repeatedly, so that memory is bounded
    for long runs.

    >>> grid = Grid(2)
    >>> for round in range(3): grid.put(round, 0, 1.0 * round)
    >>> grid.rounds().tolist(), grid.values()[:, 0].tolist()
    ([0, 1, 2], [0.0, 1.0, 2.0])
    """

    def __init__(self, columns: int, *, summed: bool = False) -> None:
        self.columns, self.stride, self.summed = columns, 1, summed
        self.rows = 0
        """Rows up to the last one with a figure."""
        self._most = min(_MOST_ROUNDS, max(2, _MOST_CELLS // max(columns, 1) // 2 * 2))
        self._sum = np.zeros((16, columns))
        self._count = np.zeros((16, columns), np.int32)

    def put(self, round: int, column: int, value: float) -> None:
        """Adds a figure; the last of several for one cell counts where each row is one round and figures are not summed."""
        row = round // self.stride
        while row >= self._most:
            self._halve()
            row = round // self.stride
        if row >= len(self._sum):
            more = min(self._most, max(2 * len(self._sum), row + 1)) - len(self._sum)
            self._sum = np.vstack([self._sum, np.zeros((more, self.columns))])
            self._count = np.vstack([self._count, np.zeros((more, self.columns), np.int32)])
        self.rows = max(self.rows, row + 1)
        if self.stride == 1 and not self.summed:
            self._sum[row, column], self._count[row, column] = value, 1
        else:
            self._sum[row, column] += value
            self._count[row, column] += 1

    def rounds(self) -> NDArray[np.int64]:
        """The last round of each row."""
        return (np.arange(self.rows, dtype=np.int64) + 1) * self.stride - 1

    def values(self) -> NDArray[np.float64]:
        """`[rows, columns]`; NaN where there is no figure."""
        total, count = self._sum[: self.rows], self._count[: self.rows]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(count > 0, total if self.summed else total / count, np.nan)

    def mean_at(self, round: int) -> float:
        """The mean over the columns in a round; NaN where nothing is known."""
        row = round // self.stride
        if not 0 <= row < self.rows:
            return math.nan
        known = self._count[row] > 0
        values = self._sum[row, known] / (1 if self.summed else self._count[row, known])
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else math.nan

    def _halve(self) -> None:
        half = len(self._sum) // 2
        whole, counts = self._sum[: 2 * half], self._count[: 2 * half]
        self._sum = whole.reshape(half, 2, self.columns).sum(1)
        self._count = counts.reshape(half, 2, self.columns).sum(1).astype(np.int32)
        self.rows = -(-self.rows // 2)
        self.stride *= 2


class KeptLines:
    """Lines by round, of which at most 2049 are kept: every second, fourth and so on, and always the newest.

    >>> kept = KeptLines()
    >>> for round in range(5000): kept.add({"round": round})
    >>> [line["round"] for line in kept.lines()][:3], kept.lines()[-1], len(kept.lines())
    ([0, 4, 8], {'round': 4999}, 1251)
    """

    def __init__(self) -> None:
        self._due: list[Mapping[str, Any]] = []
        self._newest: Mapping[str, Any] | None = None
        self._stride, self._seen = 1, 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line, replacing an earlier one of the same round."""
        if self._newest is not None and line["round"] <= self._newest["round"]:
            others = [one for one in self._due if one["round"] != line["round"]]
            self._due = sorted([*others, line], key=lambda one: one["round"])
            self._newest = max(self._newest, line, key=lambda one: (one["round"], one is line))
            return
        self._newest = line
        if self._seen % self._stride == 0:
            self._due.append(line)
        self._seen += 1
        if len(self._due) > _MOST_ROUNDS:
            self._due = self._due[::2]
            self._stride *= 2

    def lines(self) -> list[Mapping[str, Any]]:
        """The kept lines, by round."""
        newest = [] if self._newest is None or self._newest in self._due[-1:] else [self._newest]
        return [*self._due, *newest]


def thinned(values: Sequence[float], most: int) -> list[int]:
    """The indices of at most `most` values that preserve the shape of a curve: the lowest and the highest of each
    stretch.

    The first and the last value stay, and so does every peak. NaN counts only where a stretch has nothing else.

    >>> thinned([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0], 6)
    [0, 1, 2, 5, 6, 7]
    """
    count = len(values)
    if count <= most:
        return [*range(count)]
    stretches = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    for edge in range(stretches):
        first, last = 1 + edge * (count - 2) // stretches, 1 + (edge + 1) * (count - 2) // stretches
        known = [(values[place], place) for place in range(first, last) if not math.isnan(values[place])]
        kept |= {min(known)[1], max(known)[1]} if known else {first}
    return sorted(kept)


def spread_out(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spaced, including the first and the last.

    >>> spread_out(3, 8), spread_out(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return [*range(count)]
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
