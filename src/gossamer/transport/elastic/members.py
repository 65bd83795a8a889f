"""Who takes part in an elastic run, in the view of one worker: pure data that views merge into, in any order.

A run has slots, numbered as its workers are. A process fills a slot; another process may fill it later. What is known of a slot
is one entry, and of two entries the one of the later incarnation counts. So views that have been merged with each other are
equal, whatever the order in which the news came.
"""

import json
from collections.abc import Container, Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from gossamer.errors import PeerError

__all__ = ["Members", "SlotEntry", "SlotTakenError", "Standing", "merged", "news", "read_news"]

_LIMIT = 1 << 62
_LONGEST_ADDRESS = 100
_FEW = 32
"""News that are kept as they were read or written: everybody sends the same to everybody."""


class SlotTakenError(PeerError):
    """Another process fills the slot of this one."""

    def __init__(self, slot: int, timeout_s: float) -> None:
        super().__init__(
            f"another process fills slot {slot} now: it was given the slot too, or this one could not be reached for "
            f"{timeout_s:g} s; start it again with --join to get a free slot"
        )


class Standing(IntEnum):
    """What is known of a process; within one incarnation a later one of these replaces an earlier one."""

    JOINING = 0
    """It has been given the slot and fetches its state."""
    GHOST = 1
    """It trains to warm its inner optimizer, and nobody exchanges with it yet."""
    ALIVE = 2
    SUSPECT = 3
    """Its connection was lost, or it has been silent. If it lives, it says so under its next incarnation."""
    LEFT = 4
    """It has ended on purpose."""


class SlotEntry(NamedTuple):
    """What is known of a slot."""

    slot: int
    incarnation: int
    """Counts the processes that have filled the slot, and the times that one was suspected and has answered."""
    nonce: int
    """A random number of the process, which tells two processes apart that claim one slot."""
    standing: Standing
    since: int
    """The first round that it takes part in."""
    address: str = ""
    """`host:port` at which it listens."""
    round: int = 0
    """The newest round that it is known to have been in."""
    steps: int = 0
    """The slot's inner steps whose result another worker holds: whoever fills the slot goes on after them."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Of two entries of a slot, the one with the larger rank counts."""
        return self.incarnation, self.nonce, self.standing


def merged(a: SlotEntry, b: SlotEntry) -> SlotEntry:
    """Two entries of one slot as one; the order does not matter, nor does a repetition.

    >>> a = SlotEntry(2, 0, 7, Standing.ALIVE, 0, round=5, steps=75)
    >>> merged(a, a._replace(standing=Standing.SUSPECT, round=3)).round
    5
    >>> merged(a, a._replace(incarnation=1, round=1, steps=0)) == merged(a._replace(incarnation=1, round=1, steps=0), a)
    True
    """
    last = max(a, b, key=lambda entry: entry.rank)
    same = a.rank[:2] == b.rank[:2]
    return last._replace(round=max(a.round, b.round) if same else last.round, steps=max(a.steps, b.steps))


class Members:
    """The view of one worker.

    Args:
        slots: how many there are.
        me: the slot that this worker fills.
        entries: what is known at the start, this worker's own entry among it.
    """

    def __init__(self, slots: int, me: int, entries: Iterable[SlotEntry]) -> None:
        self.slots, self.me = slots, me
        self.entries: dict[int, SlotEntry] = {}
        self.version = 0
        """Counts the changes that others should hear of."""
        self.replaced = False
        """Whether another process has taken this worker's slot."""
        for entry in entries:
            self.entries[entry.slot] = entry
        assert me in self.entries and all(0 <= slot < slots for slot in self.entries), (me, slots)

    @property
    def own(self) -> SlotEntry:
        """This worker's own entry."""
        return self.entries[self.me]

    @property
    def newest_round(self) -> int:
        """The newest round that a worker which is alive is known to have been in."""
        return max((e.round for e in self.entries.values() if e.standing == Standing.ALIVE), default=self.own.round)

    def alive(self, round: int) -> frozenset[int]:
        """The slots whose workers take part in a round."""
        return frozenset(
            slot for slot, entry in self.entries.items() if entry.standing == Standing.ALIVE and entry.since <= round
        )

    def of_standing(self, *standings: Standing) -> list[SlotEntry]:
        """The entries of these standings, but one's own."""
        return [
            entry for slot, entry in sorted(self.entries.items()) if slot != self.me and entry.standing in standings
        ]

    @property
    def alone(self) -> bool:
        """Whether nobody else lives, as far as is known, nor may come back."""
        return not self.of_standing(Standing.JOINING, Standing.GHOST, Standing.ALIVE, Standing.SUSPECT)

    def merge(self, theirs: Iterable[SlotEntry]) -> list[tuple[SlotEntry | None, SlotEntry]]:
        """Takes over news; returns what changed of others, before and after, but for rounds and steps.

        A worker that reads that it is suspected answers with its next incarnation, which takes part from the round after the
        newest that it knows of, so that nobody waits for it in a round that it has missed.
        """
        changed: list[tuple[SlotEntry | None, SlotEntry]] = []
        for entry in theirs:
            if entry.slot == self.me:
                self._about_me(entry)
                continue
            before = self.entries.get(entry.slot)
            if before == entry:
                continue
            after = entry if before is None else merged(before, entry)
            self.entries[entry.slot] = after
            if before is None or before.rank != after.rank:
                changed.append((before, after))
        self.version += bool(changed)
        return changed

    def suspect(self, slot: int) -> bool:
        """Notes that a worker cannot be reached; returns whether that is news."""
        entry = self.entries.get(slot)
        if entry is None or entry.standing > Standing.ALIVE:
            return False
        self.entries[slot] = entry._replace(standing=Standing.SUSPECT)
        self.version += 1
        return True

    def progress(self, slot: int, round: int, steps: int = 0) -> None:
        """Notes the round that a worker is in, and the inner steps whose result another worker holds."""
        entry = self.entries.get(slot)
        if entry is not None and (round > entry.round or steps > entry.steps):
            self.entries[slot] = entry._replace(round=max(entry.round, round), steps=max(entry.steps, steps))

    def declare(self, standing: Standing, since: int | None = None) -> None:
        """Changes what this worker says of itself."""
        own = self.own
        self.entries[self.me] = own._replace(standing=standing, since=own.since if since is None else since)
        self.version += 1

    def give_slot(self, nonce: int, address: str, kept: Container[int] = ()) -> SlotEntry | None:
        """Gives a newcomer the lowest slot that nobody fills, and returns its entry; None when all are filled.

        One that somebody else has been given, and has not yet taken, comes last.

        Args: `kept` are slots that nobody gets.
        """
        free = [slot for slot in range(self.slots) if slot != self.me and slot not in kept and self._is_free(slot)]
        if not free:
            return None
        free.sort(key=self._is_promised)
        before = self.entries.get(free[0])
        steps, incarnation = (before.steps, before.incarnation + 1) if before else (0, 0)
        entry = SlotEntry(free[0], incarnation, nonce, Standing.JOINING, 0, address, 0, steps)
        self.entries[free[0]] = entry
        self.version += 1
        return entry

    def _is_free(self, slot: int) -> bool:
        entry = self.entries.get(slot)
        return entry is None or entry.standing not in (Standing.ALIVE, Standing.GHOST)

    def _is_promised(self, slot: int) -> bool:
        """Whether somebody has been given the slot, who may still come."""
        entry = self.entries.get(slot)
        return entry is not None and entry.standing == Standing.JOINING

    def _about_me(self, entry: SlotEntry) -> None:
        own = self.own
        if entry.rank <= own.rank:
            self.entries[self.me] = own._replace(steps=max(own.steps, entry.steps))
        elif entry.nonce != own.nonce:
            self.replaced = True
        elif own.standing <= Standing.ALIVE:
            alive = own.standing == Standing.ALIVE
            since = max(own.round, self.newest_round) + 1 if alive else own.since
            self.entries[self.me] = own._replace(incarnation=entry.incarnation + 1, since=since)
            self.version += 1


def news(entries: Mapping[int, SlotEntry]) -> bytes:
    """What a worker sends of its view; `read_news` reads it."""
    return _written(tuple(entry for _, entry in sorted(entries.items())))


@lru_cache(maxsize=_FEW)
def _written(entries: tuple[SlotEntry, ...]) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def read_news(raw: bytes, slots: int) -> list[SlotEntry] | None:
    """The entries that another worker sent; None for anything else.

    >>> entry = SlotEntry(1, 0, 5, Standing.ALIVE, 0, "127.0.0.1:4000")
    >>> read_news(news({1: entry}), slots=2) == [entry], read_news(news({1: entry}), slots=1), read_news(b"[[1]]", 2)
    (True, None, None)
    """
    entries = _read(raw, slots)
    return None if entries is None else list(entries)


@lru_cache(maxsize=_FEW)
def _read(raw: bytes, slots: int) -> tuple[SlotEntry, ...] | None:
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list) or len(values) > slots:
        return None
    entries = tuple(entry for value in values if (entry := _entry(value, slots)) is not None)
    return entries if len(entries) == len(values) == len({entry.slot for entry in entries}) else None


def _entry(value: object, slots: int) -> SlotEntry | None:
    match value:
        case [int(slot), int(incarnation), int(nonce), int(standing), int(since), str(address), int(round), int(steps)]:
            numbers = (slot, incarnation, nonce, standing, since, round, steps)
            sound = all(type(number) is int and 0 <= number < _LIMIT for number in numbers)
            if sound and slot < slots and standing < len(Standing) and _is_address(address):
                return SlotEntry(slot, incarnation, nonce, Standing(standing), since, address, round, steps)
    return None


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    named = text.isascii() and text.isprintable() and len(text) <= _LONGEST_ADDRESS and host and " " not in text
    return not text or bool(named and port.isdigit() and int(port) < 1 << 16)
