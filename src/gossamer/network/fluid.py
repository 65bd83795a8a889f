"""Streams of bits that share links, max-min fair at each moment; bandwidths are piecewise constant.

A stream uses a few links at once. All rates grow together until a link is full. The streams of that link then keep their
rate, while the others grow on.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.network.links import Floats

Places = NDArray[np.int64]
_SAME = 1 + 1e-12
"""Shares that differ only in their last bits count as equal."""
_FEW = 16
"""Streams, up to which lists are faster than arrays."""


class Use(NamedTuple):
    """A link that a stream uses, and its bandwidth for that stream; two directions of one link may differ."""

    link: int
    bandwidth_bps: float


class LinkChange(NamedTuple):
    """From `at_s` on, all bandwidths of a link are multiplied by `factor`."""

    at_s: float
    link: int
    factor: float


def max_min_rates(uses: Places, seconds_per_bit: Floats, factors: Floats) -> Floats:
    """The rate of each stream in bits per second, `[streams]`; infinite where nothing bounds it.

    A link is full when `Σ rate · seconds_per_bit` over its streams is its factor.

    Args:
        uses, seconds_per_bit: `[streams, k]`; an entry of 0 seconds per bit does not count.
        factors: `[links]`.
    Cost: O(streams · k + links) per iteration; the number of iterations is the longest chain of bottleneck links, usually two
        or three.

    >>> uses, alone = np.array([[0, 1], [0, 2], [0, 2]]), np.array([[9, 2], [9, 100], [9, 100]])
    >>> max_min_rates(uses, 1 / alone, np.ones(3)).round(12).tolist()
    [2.0, 3.5, 3.5]
    """
    rates, room = np.full(len(uses), math.inf), factors.copy()
    growing = np.flatnonzero((seconds_per_bit > 0).any(axis=1))
    while len(growing):
        own, takes = uses[growing], seconds_per_bit[growing]
        load = np.bincount(own.ravel(), takes.ravel(), len(room))
        even = np.full(len(room), math.inf)
        np.divide(room, load, out=even, where=load > 0)
        bounds = np.where(takes > 0, even[own], math.inf)
        rate = bounds.min(axis=1)
        # If no stream of a link has a tighter bottleneck elsewhere, the link is full at even shares. Were nearly equal ones not
        # taken as equal, the next iteration would have almost nothing left to share.
        held_here = bounds <= rate[:, None] * _SAME
        waits = np.zeros(len(room), bool)
        waits[own[(takes > 0) & ~held_here]] = True
        settled = (held_here & ~waits[own]).any(axis=1)
        rates[growing[settled]] = rate[settled]
        room -= np.bincount(own[settled].ravel(), (rate[settled, None] * takes[settled]).ravel(), len(room))
        np.maximum(room, 0.0, out=room)  # what is left of a full link may round below nothing
        growing = growing[~settled]
    return rates


def rates_of_few(uses: Sequence[Sequence[tuple[int, float]]], factors: Mapping[int, float]) -> list[float]:
    """`max_min_rates` to the last bit: of a few streams, each `(link, seconds per bit)`, sooner than an array is made.

    >>> rates_of_few([[(0, 1 / 8), (1, 1 / 2)], [(0, 1 / 8), (2, 1 / 64)], [(0, 1 / 8), (2, 1 / 64)]], {0: 1.0, 1: 1.0, 2: 1.0})
    [2.0, 3.0, 3.0]
    """
    rates, room = [math.inf] * len(uses), {**factors}
    growing = [k for k, own in enumerate(uses) if own]
    while growing:
        load = _sums((link, takes) for k in growing for link, takes in uses[k])
        even = {link: room[link] / takes for link, takes in load.items()}
        rate = {k: min(even[link] for link, _ in uses[k]) for k in growing}
        held = {k: {link for link, _ in uses[k] if even[link] <= rate[k] * _SAME} for k in growing}
        waits = {link for k in growing for link, _ in uses[k] if link not in held[k]}
        settled = dict.fromkeys(k for k in growing if held[k] - waits)
        for link, taken in _sums((link, rate[k] * takes) for k in settled for link, takes in uses[k]).items():
            room[link] = max(0.0, room[link] - taken)
        for k in settled:
            rates[k] = rate[k]
        growing = [k for k in growing if k not in settled]
    return rates


def _sums(parts: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The sum of each link, in the order of its parts."""
    sums: dict[int, float] = {}
    for link, part in parts:
        sums[link] = sums.get(link, 0.0) + part
    return sums


def ends_at_once(leaves_s: Floats, bits: Floats, uses: Places, seconds_per_bit: Floats) -> Floats:
    """When the last bit of each stream leaves, `[streams]`, as `Fluid` has it but for rounding, of many streams in small groups.

    A group are those that share links with each other, directly or through others. Each has a clock of its own, and all go from
    event to event together.

    Args:
        leaves_s: when each begins; links do not change.
        uses, seconds_per_bit: as in `max_min_rates`.
    Cost: for each event of the group that has most, one `max_min_rates` of all streams that have not ended.

    >>> uses, alone = np.array([[0], [0], [1]]), np.array([[8.0], [8.0], [8.0]])
    >>> ends_at_once(np.array([0.0, 1.0, 5.0]), np.array([16.0, 16.0, 16.0]), uses, 1 / alone).tolist()
    [3.0, 4.0, 7.0]
    """
    group = _groups(uses, seconds_per_bit > 0)
    factors = np.ones(1 + int(uses.max(initial=0)))
    left, ends = bits.astype(float), np.zeros(len(bits))
    clock_s = _least(group, leaves_s, len(bits))
    flying = np.arange(len(bits))
    while len(flying):
        own = group[flying]
        now_s, leaves = clock_s[own], leaves_s[flying]
        begun = leaves <= now_s
        some = flying[begun]
        rates = max_min_rates(uses[some], seconds_per_bit[some], factors)
        event_s = leaves.copy()
        takes_s = np.where(left[some] > 0, math.inf, 0.0)
        np.divide(left[some], rates, out=takes_s, where=(left[some] > 0) & (rates > 0))
        event_s[begun] = now_s[begun] + takes_s
        clock_s = _least(own, event_s, len(bits))
        to_s = clock_s[own]
        over = begun & (event_s <= to_s * _SAME)
        ends[flying[over]] = to_s[over]
        goes_on = ~over[begun]
        left[some[goes_on]] -= rates[goes_on] * (to_s - now_s)[begun][goes_on]
        flying = flying[~over]
    return ends


def _groups(uses: Places, counts: NDArray[np.bool_]) -> Places:
    """A number for each stream, which those have in common that share links, directly or through others."""
    streams, links = len(uses), 1 + int(uses.max(initial=0))
    group = np.arange(streams)
    rows, places = np.nonzero(counts)
    used = uses[rows, places]
    while True:
        of_link = _least(used, group[rows], links)
        found = np.minimum(group, _least(rows, of_link[used], streams)).astype(np.int64)
        found = found[found]  # that of the stream whose number it has, which may have found a lower one
        if (found == group).all():
            return group
        group = found


def _least(places: Places, values: Places | Floats, count: int) -> Floats:
    """The least of the values at each place, `[count]`; infinity where there is none."""
    least = np.full(count, math.inf)
    np.minimum.at(least, places, values)
    return least


@dataclass(slots=True)
class _Stream:
    """A stream in flight: the bits left at `at_s`, and its rate since then; of its links, those that bound it."""

    uses: tuple[tuple[int, float], ...]
    """Links, and seconds per bit of each."""
    row: int
    bits: float
    at_s: float
    most_bps: float
    rate_bps: float = 0.0

    def flow(self, to_s: float) -> None:
        """Moves its bits until `to_s`."""
        if to_s > self.at_s:
            self.bits, self.at_s = max(0.0, self.bits - self.rate_bps * (to_s - self.at_s)), to_s

    @property
    def end_s(self) -> float:
        """When its last bit leaves, if nothing changes."""
        return self.at_s + (self.bits / self.rate_bps if self.rate_bps else math.inf)


class Fluid:
    """Streams in flight, and a clock that only goes forward.

        fluid.start(7, bits=8e6, uses=[Use(0, 1e6), Use(3, 5e6)])     # 7 is the caller's name for the stream
        fluid.advance(fluid.next_s)                                   # -> [7] once its last bit has left

    Args:
        links: the number of links.
        changes: of their bandwidths, in any order.
    Cost: for each start or end, one `max_min_rates` of the streams that share links with it, directly or through others;
        some 0.1 ms where these are few.
    """

    def __init__(self, links: int, changes: Iterable[LinkChange] = ()):
        self.now_s = 0.0
        self._factors = np.ones(links)
        self._changes = sorted(changes, reverse=True)
        self._streams: dict[int, _Stream] = {}
        self._on: list[set[int]] = [set() for _ in range(links)]
        """The streams of each link."""
        self._uses, self._seconds_per_bit = np.zeros((16, 1), np.int64), np.zeros((16, 1))
        """What `max_min_rates` takes, a row for each stream, so that no rates are computed from objects."""
        self._free = [*range(16)]
        """The rows of no stream."""
        self._unsettled: set[int] = set()
        """Links that have changed since rates were last computed."""
        self._ends: list[tuple[float, int]] = []
        """A heap of when streams end. A stream whose end has moved has a newer entry too, and the old one is skipped."""
        self.advance(0.0)

    @property
    def next_s(self) -> float:
        """When the next stream ends or bandwidth changes; infinity when nothing is in flight."""
        self._settle()
        while self._ends and not self._stands(*self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return min([self._ends[0][0], *(change.at_s for change in self._changes[-1:])])

    def start(self, name: int, bits: float, uses: Sequence[Use], most_bps: float = math.inf) -> None:
        """Adds a stream, now, which is never faster than `most_bps`."""
        bounds = [use for use in uses if use.bandwidth_bps < math.inf]
        own, row = tuple((use.link, 1 / use.bandwidth_bps) for use in bounds), self._row(len(bounds))
        self._seconds_per_bit[row] = 0.0
        for place, (link, seconds_per_bit) in enumerate(own):
            self._uses[row, place], self._seconds_per_bit[row, place] = link, seconds_per_bit
            self._on[link].add(name)
            self._unsettled.add(link)
        stream = _Stream(own, row, bits, self.now_s, most_bps, 0.0 if bounds else most_bps)
        self._streams[name] = stream
        if not bounds:
            heapq.heappush(self._ends, (stream.end_s, name))

    def advance(self, to_s: float) -> list[int]:
        """Moves the clock to `to_s`, at most `next_s`, and returns the names of the streams that have ended."""
        self._settle()
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= to_s * (1 + 1e-12):
            end_s, name = heapq.heappop(self._ends)
            if self._stands(end_s, name):
                ended.append(name)
                gone = self._streams.pop(name)
                self._free.append(gone.row)
                for link, _ in gone.uses:
                    self._on[link].remove(name)
                    self._unsettled.add(link)
        self.now_s = to_s
        while self._changes and self._changes[-1].at_s <= to_s:
            change = self._changes.pop()
            self._factors[change.link] = change.factor
            self._unsettled.add(change.link)
        return ended

    def _stands(self, end_s: float, name: int) -> bool:
        return name in self._streams and self._streams[name].end_s == end_s

    def _row(self, links: int) -> int:
        """A row for a stream of so many links."""
        if not self._free:
            more = len(self._uses)
            self._free += range(more, 2 * more)
            self._grow(more, 0)
        if links > self._uses.shape[1]:
            self._grow(0, links - self._uses.shape[1])
        return self._free.pop()

    def _grow(self, rows: int, columns: int) -> None:
        """Makes room for so many more streams, and links of each."""
        more = ((0, rows), (0, columns))
        self._uses, self._seconds_per_bit = np.pad(self._uses, more), np.pad(self._seconds_per_bit, more)

    def _settle(self) -> None:
        """Computes the rates of all streams that a change can reach from link to link."""
        names: dict[int, None] = {}
        seen = set[int]()
        reached = sorted(self._unsettled)
        self._unsettled.clear()
        for link in reached:
            if link not in seen:
                seen.add(link)
                for name in self._on[link]:
                    if name not in names:
                        names[name] = None
                        reached += [link for link, _ in self._streams[name].uses]
        if not names:
            return
        streams = [self._streams[name] for name in names]
        for name, stream, rate_bps in zip(names, streams, self._rates(streams), strict=True):
            if rate_bps != stream.rate_bps:
                stream.flow(self.now_s)
                stream.rate_bps = rate_bps
                heapq.heappush(self._ends, (stream.end_s, name))

    def _rates(self, streams: Sequence[_Stream]) -> list[float]:
        """The rates of streams that share links with each other alone; each with a limit has one more link, to itself."""
        if len(streams) <= _FEW:
            own = [[*one.uses, *_limit(-1 - k, one.most_bps)] for k, one in enumerate(streams)]
            return rates_of_few(
                own, {link: 1.0 if link < 0 else float(self._factors[link]) for use in own for link, _ in use}
            )
        rows = [stream.row for stream in streams]
        uses, seconds_per_bit, factors = self._uses[rows], self._seconds_per_bit[rows], self._factors
        bounded = [place for place, stream in enumerate(streams) if stream.most_bps < math.inf]
        if bounded:
            uses, seconds_per_bit = np.pad(uses, ((0, 0), (0, 1))), np.pad(seconds_per_bit, ((0, 0), (0, 1)))
            uses[bounded, -1] = len(factors) + np.arange(len(bounded))
            seconds_per_bit[bounded, -1] = [1 / streams[place].most_bps for place in bounded]
            factors = np.concatenate([factors, np.ones(len(bounded))])
        return max_min_rates(uses, seconds_per_bit, factors).tolist()


def _limit(link: int, most_bps: float) -> list[tuple[int, float]]:
    """What a stream uses that is never faster than that: a link to itself."""
    return [(link, 1 / most_bps)] if most_bps < math.inf else []
