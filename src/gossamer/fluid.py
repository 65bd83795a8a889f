"""Streams of bits through links that they share: at each moment max-min fair, bandwidths constant piece by piece.

A stream uses a few links at once, and its rate is the largest that is fair: all rates grow alike until a link is full;
its streams then keep theirs while the others grow on.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fluid", "LinkChange", "Use", "max_min_rates"]

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


class Use(NamedTuple):
    """A link that a stream goes through, and how fast it could alone; two directions of one link may differ."""

    link: int
    bandwidth_bps: float


class LinkChange(NamedTuple):
    """From `at_s` on, all bandwidths of a link are multiplied by this."""

    at_s: float
    link: int
    factor: float


def max_min_rates(uses: Places, seconds_per_bit: Floats, factors: Floats) -> Floats:
    """The rate of each stream in bits per second, `[streams]`; infinite where nothing bounds it.

    A link is full when `Σ rate · seconds_per_bit` over its streams is its factor.

    Args:
        uses, seconds_per_bit: `[streams, k]`; what is 0 seconds a bit does not count.
        factors: `[links]`.
    Cost: O(streams · k) for each link that fills.

    >>> uses, alone = np.array([[0, 1], [0, 2], [0, 2]]), np.array([[9, 2], [9, 100], [9, 100]])
    >>> max_min_rates(uses, 1 / alone, np.ones(3)).round(12).tolist()
    [2.0, 3.5, 3.5]
    """
    counts = seconds_per_bit > 0
    rates = np.full(len(uses), math.inf)
    growing = counts.any(axis=1)
    rates[growing] = 0.0
    room = factors.copy()
    while growing.any():
        load = np.bincount(uses[growing].ravel(), seconds_per_bit[growing].ravel(), len(room))
        rises = np.full(len(room), math.inf)
        np.divide(room, load, out=rises, where=load > 0)
        rise = rises.min()
        rates[growing] += rise
        room -= rise * load
        # Links that fill together may differ in their last bits, and one left for another turn would rise by next to nothing.
        full = rises <= rise * (1 + 1e-12)
        growing &= ~(full[uses] & counts).any(axis=1)
    return rates


class Fluid:
    """Streams under way, and a clock that only goes forward.

        fluid.start(7, bits=8e6, uses=[Use(0, 1e6), Use(3, 5e6)])     # 7 is the caller's name for the stream
        fluid.advance(fluid.next_s)                                   # -> [7] once its last bit has left

    Args:
        links: how many there are.
        width: the most links that a stream uses.
        changes: how their bandwidths change, in any order.
    Cost: O(streams) for each start or end of one, times the number of links that fill.
    """

    def __init__(self, links: int, width: int, changes: Iterable[LinkChange] = ()):
        self.now_s = 0.0
        self._factors = np.ones(links)
        self._changes = sorted(changes, reverse=True)
        self._names: list[int] = []
        self._bits = np.empty(0)
        self._uses: Places = np.empty((0, width), np.int64)
        self._seconds_per_bit = np.empty((0, width))
        self._rates: Floats | None = None
        self.advance(0.0)

    @property
    def next_s(self) -> float:
        """When the next stream ends or bandwidth changes; infinity when nothing is under way."""
        if not self._names:
            return math.inf
        return min([float(self._ends_s().min()), *(change.at_s for change in self._changes[-1:])])

    def start(self, name: int, bits: float, uses: Sequence[Use]) -> None:
        """Adds a stream, now."""
        width = self._uses.shape[1]
        uses = [*uses, *[Use(0, math.inf)] * (width - len(uses))]
        self._names.append(name)
        self._bits = np.append(self._bits, bits)
        self._uses = np.vstack([self._uses, [[use.link for use in uses]]])
        self._seconds_per_bit = np.vstack([self._seconds_per_bit, [[1 / use.bandwidth_bps for use in uses]]])
        self._rates = None

    def advance(self, to_s: float) -> list[int]:
        """Lets the streams flow until `to_s`, which is `next_s` at most, and returns the names of those that have ended."""
        ended: list[int] = []
        if self._names:
            rates, over = self._current_rates(), self._ends_s() <= to_s * (1 + 1e-12)
            ended = [name for name, done in zip(self._names, over, strict=True) if done]
            self._names = [name for name, done in zip(self._names, over, strict=True) if not done]
            self._bits = self._bits[~over] - rates[~over] * (to_s - self.now_s)
            self._uses, self._seconds_per_bit = self._uses[~over], self._seconds_per_bit[~over]
            self._rates = None if ended else rates
        self.now_s = to_s
        while self._changes and self._changes[-1].at_s <= to_s:
            change = self._changes.pop()
            self._factors[change.link] = change.factor
            self._rates = None
        return ended

    def _current_rates(self) -> Floats:
        if self._rates is None:
            self._rates = max_min_rates(self._uses, self._seconds_per_bit, self._factors)
        return self._rates

    def _ends_s(self) -> Floats:
        return self.now_s + self._bits / self._current_rates()
