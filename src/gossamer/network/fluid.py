"""Streams of bits that share links, max-min fair at each moment; bandwidths are piecewise constant.

A stream uses a few links at once. All rates grow together until a link is full. The streams of that link then keep their
rate, while the others grow on.
"""

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gossamer.network.links import Floats

Places = NDArray[np.int64]
T = TypeVar("T")
_SAME = 1 + 1e-12
"""Shares that differ only in their last bits count as equal."""
_FEW = 16
"""Number of streams up to which lists are faster than arrays."""
_AT_ONCE = 64
"""Number of streams up to which a scan of all is faster than a search for those that a change can reach."""
_MOST_KEPT = 100_000
"""Sets of streams whose rates are cached."""


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
        links, takes = uses[growing], seconds_per_bit[growing]
        load = np.bincount(links.ravel(), takes.ravel(), len(room))
        even = np.full(len(room), math.inf)
        np.divide(room, load, out=even, where=load > 0)
        bounds = np.where(takes > 0, even[links], math.inf)
        rate = bounds.min(axis=1)
        # If no stream of a link has a tighter bottleneck elsewhere, the link is full at even shares. Were nearly equal ones not
        # taken as equal, the next iteration would have almost nothing left to share.
        held_here = bounds <= rate[:, None] * _SAME
        waits = np.zeros(len(room), bool)
        waits[links[(takes > 0) & ~held_here]] = True
        settled = (held_here & ~waits[links]).any(axis=1)
        rates[growing[settled]] = rate[settled]
        room -= np.bincount(links[settled].ravel(), (rate[settled, None] * takes[settled]).ravel(), len(room))
        np.maximum(room, 0.0, out=room)  # what is left of a full link may round below nothing
        growing = growing[~settled]
    return rates


def rates_of_few(uses: Sequence[Sequence[tuple[int, float]]], factors: Mapping[int, float]) -> list[float]:
    """`max_min_rates` to the last bit, for a few streams, each `(link, seconds per bit)`: faster than with arrays.

    >>> rates_of_few([[(0, 1 / 8), (1, 1 / 2)], [(0, 1 / 8), (2, 1 / 64)], [(0, 1 / 8), (2, 1 / 64)]], {0: 1.0, 1: 1.0, 2: 1.0})
    [2.0, 3.0, 3.0]
    """
    rates, room = [math.inf] * len(uses), {**factors}
    growing = [k for k, links in enumerate(uses) if links]
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
    """When the last bit of each stream leaves, `[streams]`, like `Fluid` up to rounding, for many streams in small groups.

    The streams of a group share links with each other, directly or through others. Each group has a separate clock, and all
    advance from event to event together.

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
        groups = group[flying]
        now_s, leaves = clock_s[groups], leaves_s[flying]
        begun = leaves <= now_s
        some = flying[begun]
        rates = max_min_rates(uses[some], seconds_per_bit[some], factors)
        event_s = leaves.copy()
        takes_s = np.where(left[some] > 0, math.inf, 0.0)
        np.divide(left[some], rates, out=takes_s, where=(left[some] > 0) & (rates > 0))
        event_s[begun] = now_s[begun] + takes_s
        clock_s = _least(groups, event_s, len(bits))
        to_s = clock_s[groups]
        over = begun & (event_s <= to_s * _SAME)
        ends[flying[over]] = to_s[over]
        goes_on = ~over[begun]
        left[some[goes_on]] -= rates[goes_on] * (to_s - now_s)[begun][goes_on]
        flying = flying[~over]
    return ends


def _groups(uses: Places, counts: NDArray[np.bool_]) -> Places:
    """A number for each stream, equal for those that share links, directly or through others."""
    streams, links = len(uses), 1 + int(uses.max(initial=0))
    group = np.arange(streams)
    rows, places = np.nonzero(counts)
    used = uses[rows, places]
    while True:
        of_link = _least(used, group[rows], links)
        joined = np.minimum(group, _least(rows, of_link[used], streams)).astype(np.int64)
        joined = joined[joined]  # the number of its representative, which may be lower by now
        if (joined == group).all():
            return group
        group = joined


def _least(places: Places, values: Places | Floats, count: int) -> Floats:
    """The least of the values at each place, `[count]`; infinity where there is none."""
    least = np.full(count, math.inf)
    np.minimum.at(least, places, values)
    return least


class StreamWay(NamedTuple):
    """The links of a stream; equal ones have one number in their `FairRates`, and streams on them equal rates."""

    number: int
    uses: tuple[tuple[int, float], ...]
    """Links that may bound it, and seconds per bit of each."""
    most_bps: float
    """Upper bound of its rate."""
    links: int
    """The same links as bits of one number."""


class FairRates:
    """Max-min fair rates of streams on few ways, computed once for each set of streams that share links.

    Args:
        links: the number of links.
    """

    def __init__(self, links: int):
        self.links = links
        self._ways: dict[tuple[tuple[tuple[int, float], ...], float], StreamWay] = {}
        self._rates: dict[tuple[Hashable, ...], dict[int, float]] = {}

    def way(self, uses: Iterable[tuple[int, float]], most_bps: float = math.inf) -> StreamWay:
        """The way through these links, each with its bandwidth in bit/s, on which no stream is faster than `most_bps`."""
        bounds = tuple((link, 1 / bandwidth_bps) for link, bandwidth_bps in uses if bandwidth_bps < math.inf)
        links = sum(1 << link for link in {link for link, _ in bounds})
        return self._ways.setdefault((bounds, most_bps), StreamWay(len(self._ways), bounds, most_bps, links))

    def of(self, ways: Iterable[StreamWay], factors: Floats, state: Hashable) -> Mapping[int, float]:
        """The rate of a stream on each of these ways, by its number; all streams that share links must be among them.

        Args:
            factors: of all links; where these differ, so does `state`.
        """
        ordered = sorted(ways)
        key = (state, *(way.number for way in ordered))
        rates = self._rates.get(key)
        if rates is None:
            if len(self._rates) >= _MOST_KEPT:
                self._rates.clear()
            if len(parts := _apart(ordered)) > 1:  # fewer sets of streams, each of which comes more often
                rates = {number: rate for part in parts for number, rate in self.of(part, factors, state).items()}
            else:
                rates = {way.number: rate for way, rate in zip(ordered, _rates(ordered, factors), strict=True)}
            self._rates[key] = rates
        return rates


def _apart(ways: Iterable[StreamWay]) -> list[list[StreamWay]]:
    """The ways in groups that share links with each other, directly or through others."""
    parts = list[tuple[int, list[StreamWay]]]()
    for way in ways:
        links, joined, others = way.links, [way], list[tuple[int, list[StreamWay]]]()
        for part in parts:
            if links & part[0]:
                links, joined = links | part[0], part[1] + joined
            else:
                others.append(part)
        parts = [*others, (links, joined)]
    return [joined for _, joined in parts]


def _rates(ways: Sequence[StreamWay], factors: Floats) -> list[float]:
    """The rates of streams that share links with each other alone; each with a limit has one more link, to itself."""
    alone = len(factors)
    uses = [
        [*way.uses, *([(alone + k, 1 / way.most_bps)] if way.most_bps < math.inf else [])] for k, way in enumerate(ways)
    ]
    if len(ways) <= _FEW:
        return rates_of_few(
            uses, {link: float(factors[link]) if link < alone else 1.0 for stream in uses for link, _ in stream}
        )
    links, seconds_per_bit = np.zeros((2, len(uses), max(map(len, uses))))
    for k, stream in enumerate(uses):
        for place, (link, takes) in enumerate(stream):
            links[k, place], seconds_per_bit[k, place] = link, takes
    return max_min_rates(links.astype(np.int64), seconds_per_bit, np.append(factors, np.ones(len(ways)))).tolist()


@dataclass(slots=True, eq=False)
class _Stream(Generic[T]):
    """A stream in flight: the bits left at `at_s`, and its rate since then."""

    what: T
    way: StreamWay
    bits: float
    at_s: float
    rate_bps: float = 0.0
    end_s: float = math.inf
    """When its last bit leaves, if nothing changes."""

    def flow(self, at_s: float, rate_bps: float) -> None:
        """Moves its bits until `at_s`, from when it has another rate."""
        if at_s > self.at_s:
            self.bits, self.at_s = max(0.0, self.bits - self.rate_bps * (at_s - self.at_s)), at_s
        self.rate_bps = rate_bps
        self.end_s = self.at_s + (self.bits / rate_bps if rate_bps else math.inf)


class Fluid(Generic[T]):
    """Streams in flight, and a clock that only goes forward; false when nothing is in flight.

        rates = FairRates(links=4)
        fluid = Fluid[str](rates)
        fluid.start("a", bits=8e6, way=rates.way([(0, 1e6), (3, 5e6)]))
        fluid.advance(fluid.next_s)                                   # -> ["a"] once its last bit has left

    Args:
        rates: of the links; shared by all runs with the same changes.
        changes: of the bandwidths of links, in any order.
    Cost: for each start or end, a look at the streams that share links with it, directly or through others, and where these are
        on other ways than ever before, their rates; some 0.01 ms where they are few, and 0.1 ms with their rates.
    """

    def __init__(self, rates: FairRates, changes: Iterable[LinkChange] = ()):
        self.now_s = 0.0
        self._rates, self._factors = rates, np.ones(rates.links)
        self._changes = sorted(changes, reverse=True)
        self._streams: dict[int, _Stream[T]] = {}
        self._names = itertools.count()
        self._on: list[dict[int, _Stream[T]]] = [{} for _ in range(rates.links)]
        """The streams of each link."""
        self._unsettled: set[int] = set()
        """Links that have changed since rates were last computed."""
        self._ends: list[tuple[float, int]] = []
        """A heap of when streams end. A stream whose end has moved has a newer entry too, and the old one is skipped."""
        self.advance(0.0)

    def __bool__(self) -> bool:
        return bool(self._streams)

    @property
    def next_s(self) -> float:
        """When the next stream ends or bandwidth changes; infinity when nothing is in flight."""
        self._settle()
        while self._ends and not self._is_current(*self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return min(self._ends[0][0], self._changes[-1].at_s) if self._changes else self._ends[0][0]

    def start(self, payload: T, bits: float, way: StreamWay) -> None:
        """Adds a stream, now, under the name that `advance` returns."""
        name, stream = next(self._names), _Stream(payload, way, bits, self.now_s)
        self._streams[name] = stream
        for link, _ in way.uses:
            self._on[link][name] = stream
            self._unsettled.add(link)
        if not way.uses:
            stream.flow(self.now_s, way.most_bps)
            heapq.heappush(self._ends, (stream.end_s, name))

    def advance(self, to_s: float) -> list[T]:
        """Moves the clock to `to_s`, at most `next_s`, and returns the streams that have ended."""
        self._settle()
        ended: list[T] = []
        while self._ends and self._ends[0][0] <= to_s * _SAME:
            end_s, name = heapq.heappop(self._ends)
            if self._is_current(end_s, name):
                gone = self._streams.pop(name)
                ended.append(gone.what)
                for link, _ in gone.way.uses:
                    del self._on[link][name]
                    self._unsettled.add(link)
        self.now_s = to_s
        while self._changes and self._changes[-1].at_s <= to_s:
            change = self._changes.pop()
            self._factors[change.link] = change.factor
            self._unsettled.add(change.link)
        return ended

    def _is_current(self, end_s: float, name: int) -> bool:
        stream = self._streams.get(name)
        return stream is not None and stream.end_s == end_s

    def _settle(self) -> None:
        """Computes the rates of all streams that a change can reach from link to link."""
        if not self._unsettled:
            return
        reached = self._streams if len(self._streams) <= _AT_ONCE else self._affected_streams()
        self._unsettled.clear()
        rates = self._rates.of([stream.way for stream in reached.values()], self._factors, len(self._changes))
        for name, stream in reached.items():
            rate_bps = rates[stream.way.number]
            if rate_bps != stream.rate_bps:
                stream.flow(self.now_s, rate_bps)
                heapq.heappush(self._ends, (stream.end_s, name))

    def _affected_streams(self) -> dict[int, _Stream[T]]:
        """The streams that what has changed can reach from link to link."""
        links, seen, reached = list(self._unsettled), set(self._unsettled), dict[int, _Stream[T]]()
        for link in links:
            for name, stream in self._on[link].items():
                if name not in reached:
                    reached[name] = stream
                    for other, _ in stream.way.uses:
                        if other not in seen:
                            seen.add(other)
                            links.append(other)
        return reached
