"""Who takes part in an elastic run, in the view of one worker: pure data that views merge into, in any order.

A run has slots, numbered as its workers are. A process fills a slot; another process may fill it later. What is known of a slot
is one entry, and of two entries the one of the later incarnation counts. So views that have been merged with each other are
equal, whatever the order in which they came.
"""

import json
from collections.abc import Callable, Container, Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from gossamer.errors import PeerError
from gossamer.record.jsonl import json_from_peer
from gossamer.transport.sockets.addresses import split
from gossamer.transport.sockets.header import Limits

_NONCES = 1 << 62
MOST_INCARNATIONS = 1 << 30
_JUMP = 1 << 16
"""How far an incarnation may be above the one that is known of its slot.

Each takes a loss and an answer, so a part of a network that is cut off for a day has counted fewer. It leaves room above whatever
a single letter says: a worker that somebody calls suspect can always answer with a later incarnation.
"""
_MOST_OUTBID = 1 << 10
"""How far a worker follows the incarnation of a process that is not found: letters that were made up shall not use them up."""
_LONGEST_ADDRESS = 100
_FEW = 32
"""Updates that are kept as they were read or written: everybody sends the same to everybody."""


class SlotTakenError(PeerError):
    """Another process fills the slot of this one."""

    def __init__(self, slot: int, timeout_s: float) -> None:
        super().__init__(
            f"another process fills slot {slot} now: it was given the slot too, or this one could not be reached for "
            f"{timeout_s:g} s; start it again with --join to get a free slot"
        )


class MemberStatus(IntEnum):
    """What is known of a process; within one incarnation a later one of these replaces an earlier one."""

    JOINING = 0
    """It has been given the slot and fetches its state."""
    ALIVE = 1
    SUSPECT = 2
    """Its connection was lost, or it has been silent. If it lives, it says so under its next incarnation."""
    LEFT = 3
    """It has ended on purpose."""


class SlotEntry(NamedTuple):
    """What is known of a slot."""

    slot: int
    incarnation: int
    """Counts the processes that have filled the slot, and the times that one was suspected and has answered."""
    nonce: int
    """A random number of the process, which tells two processes apart that claim one slot."""
    status: MemberStatus
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
        return self.incarnation, self.nonce, self.status


def merged(a: SlotEntry, b: SlotEntry) -> SlotEntry:
    """Two entries of one slot as one; the order does not matter, nor does a repetition.

    >>> a = SlotEntry(2, 0, 7, MemberStatus.ALIVE, 0, round=5, steps=75)
    >>> merged(a, a._replace(status=MemberStatus.SUSPECT, round=3)).round
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
        limits: of the run; it has a slot for each worker.
        me: the slot that this worker fills.
        entries: what is known at the start, this worker's own entry among it.
    """

    def __init__(self, limits: Limits, me: int, entries: Iterable[SlotEntry]) -> None:
        self.limits, self.slots, self.me = limits, limits.workers, me
        self.entries: dict[int, SlotEntry] = {}
        self.version = 0
        """Counts the changes that others should hear of."""
        self.replaced = False
        """Whether another process has taken this worker's slot."""
        self.doubts: dict[int, SlotEntry] = {}
        """What others have said of slots for which they do not speak; whoever fills the slot is to be asked."""
        self._speaks_for: Callable[[int, int], bool] | None = None
        self._unproven = set[int]()
        self._promised = set[int]()
        for entry in entries:
            self.entries[entry.slot] = entry
        assert me in self.entries and all(0 <= slot < self.slots for slot in self.entries), (me, limits)

    @property
    def own(self) -> SlotEntry:
        """This worker's own entry."""
        return self.entries[self.me]

    @property
    def newest_round(self) -> int:
        """The newest round that a worker which is alive is known to have been in."""
        return max((e.round for e in self.entries.values() if e.status == MemberStatus.ALIVE), default=self.own.round)

    def alive(self, round: int) -> frozenset[int]:
        """The slots whose workers take part in a round."""
        return frozenset(
            slot for slot, entry in self.entries.items() if entry.status == MemberStatus.ALIVE and entry.since <= round
        )

    def left_after(self, round: int) -> frozenset[int]:
        """The slots whose workers have left, but not before they took part in this round."""
        return frozenset(
            slot
            for slot, entry in self.entries.items()
            if entry.status == MemberStatus.LEFT and entry.nonce and entry.since <= round <= entry.round
        )

    def with_status(self, *statuses: MemberStatus) -> list[SlotEntry]:
        """The entries of these statuses, but one's own."""
        return [entry for slot, entry in sorted(self.entries.items()) if slot != self.me and entry.status in statuses]

    @property
    def alone(self) -> bool:
        """Whether all others that have ever been here have ended for good.

        Who was asked to leave may come back, and while nobody has come yet, somebody may.
        """
        others = [entry for slot, entry in self.entries.items() if slot != self.me and entry.nonce]
        return bool(others) and all(
            entry.status == MemberStatus.LEFT and entry.round >= self.limits.rounds for entry in others
        )

    @property
    def expects_company(self) -> bool:
        """Whether the run has other slots, and no process has taken part in any of them yet."""
        others = [entry for slot, entry in self.entries.items() if slot != self.me and entry.nonce]
        return self.slots > 1 and all(entry.status == MemberStatus.JOINING for entry in others)

    def believe_only(self, speaks_for: Callable[[int, int], bool]) -> None:
        """From now on believes a worker about those slots alone for which it speaks: `speaks_for(worker, slot)`.

        Of a slot that has said nothing of itself yet, or was lost since, others are believed until it does, which counts in any
        case: two workers that cannot reach each other know each other by a third. Else what others say of a slot becomes one of
        `doubts`, if it would change anything.
        """
        self._speaks_for, self._unproven = speaks_for, set(self.entries) - {self.me}

    def merge(self, theirs: Iterable[SlotEntry], source: int | None = None) -> list[tuple[SlotEntry | None, SlotEntry]]:
        """Takes over what another worker knows; returns what changed of others, before and after, but for rounds and steps.

        A worker that reads that it is suspected answers with its next incarnation, which takes part from the round after the
        newest that it knows of, so that nobody waits for it in a round that it has missed.

        Args: `source` is the worker that says so; None where it is to be believed.
        """
        changed: list[tuple[SlotEntry | None, SlotEntry]] = []
        for entry in theirs:
            told = source is not None and self._speaks_for is not None and not self._speaks_for(source, entry.slot)
            before = self.entries.get(entry.slot)
            unproven = self._speaks_for is not None and (before is None or entry.slot in self._unproven)
            if told and (entry.slot == self.me or not unproven):
                self._hearsay(entry)
                continue
            if told:
                if entry.incarnation - (before.incarnation if before else 0) > _MOST_OUTBID:
                    continue
                self._unproven.add(entry.slot)
                entry = entry._replace(round=0)
            elif entry.slot == self.me:
                self._about_me(entry)
                continue
            else:
                self._unproven.discard(entry.slot)
                self._promised.discard(entry.slot)
            if before == entry:
                continue
            if before is None:
                after = entry
            elif unproven and not told and before.rank > entry.rank:  # nobody who fills the slot has ever said so
                after = entry._replace(steps=max(before.steps, entry.steps))
            else:
                after = merged(before, entry)
            self.entries[entry.slot] = after
            if before is None or before.rank != after.rank:
                changed.append((before, after))
        self.version += bool(changed)
        return changed

    def admits(self, theirs: Iterable[SlotEntry]) -> bool:
        """Whether the incarnations in an update can have come about since this worker last heard of their slots."""
        known = {slot: entry.incarnation for slot, entry in self.entries.items()}
        return all(entry.incarnation <= known.get(entry.slot, 0) + _JUMP for entry in theirs)

    def suspect(self, slot: int) -> bool:
        """Notes that a worker cannot be reached; returns whether that is new."""
        entry = self.entries.get(slot)
        if entry is None or entry.status > MemberStatus.ALIVE:
            return False
        self.entries[slot] = entry._replace(status=MemberStatus.SUSPECT)
        self._unproven.add(slot)
        self.version += 1
        return True

    def progress(self, slot: int, round: int, steps: int = 0) -> None:
        """Notes the round that a worker is in, and the inner steps whose result another worker holds."""
        entry = self.entries.get(slot)
        if entry is not None and (round > entry.round or steps > entry.steps):
            self.entries[slot] = entry._replace(round=max(entry.round, round), steps=max(entry.steps, steps))

    def declare(self, status: MemberStatus, since: int | None = None) -> None:
        """Changes what this worker says of itself."""
        own = self.own
        self.entries[self.me] = own._replace(status=status, since=own.since if since is None else since)
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
        entry = SlotEntry(free[0], incarnation, nonce, MemberStatus.JOINING, 0, address, 0, steps)
        self.entries[free[0]] = entry
        self.version += 1
        return entry

    def _is_free(self, slot: int) -> bool:
        entry = self.entries.get(slot)
        if self._speaks_for is not None and slot in self._unproven:
            return True  # else whoever says that it is filled would keep its owner out
        return entry is None or entry.status != MemberStatus.ALIVE

    def _is_promised(self, slot: int) -> bool:
        """Whether somebody has been given the slot, who may still come."""
        entry = self.entries.get(slot)
        return slot in self._promised or (entry is not None and entry.status == MemberStatus.JOINING)

    def _hearsay(self, entry: SlotEntry) -> None:
        """What a worker says of a slot that is not its own: at most a reason to ask whoever fills the slot."""
        before = self.entries.get(entry.slot)
        if entry.slot == self.me:
            own = self.own
            if own.status < MemberStatus.ALIVE:
                # One that comes back goes on after the steps of its slot that anybody holds; one that trains knows its own.
                self.entries[self.me] = own._replace(steps=max(own.steps, entry.steps))
            if entry.rank[:2] == own.rank[:2] and own.status <= MemberStatus.ALIVE and entry.status > own.status:
                self._answer()
            elif entry.nonce != own.nonce and entry.rank > own.rank:
                self.doubts[self.me] = entry
            # A later incarnation of this process than it has given itself was made up by whoever says so.
        elif before is not None and entry.rank <= before.rank:
            return
        elif entry.status == MemberStatus.JOINING:
            self._promised.add(entry.slot)  # so comes last when slots are given; it speaks for itself once it is there
        else:
            self.doubts[entry.slot] = entry

    def _answer(self) -> None:
        """Says that this worker lives to one that cannot reach it: with no other round, unless others are ahead.

        Were it to wait for a later round each time, whoever says so again and again would keep it out.
        """
        own = self.own
        ahead = own.status == MemberStatus.ALIVE and self.newest_round > own.round
        since = self.newest_round + 1 if ahead else own.since
        self.entries[self.me] = own._replace(incarnation=own.incarnation + 1, since=since)
        self.version += 1

    def outbid(self, entry: SlotEntry) -> None:
        """Takes this worker's slot back from a process that nobody has found where it is said to be."""
        own = self.own
        if entry.rank > own.rank and entry.incarnation - own.incarnation <= _MOST_OUTBID:
            self.entries[self.me] = own._replace(incarnation=entry.incarnation + 1)
            self.version += 1

    def _about_me(self, entry: SlotEntry) -> None:
        own = self.own
        if entry.rank <= own.rank:
            self.entries[self.me] = own._replace(steps=max(own.steps, entry.steps))
        elif entry.nonce != own.nonce:
            self.replaced = True
        elif own.status <= MemberStatus.ALIVE:
            alive = own.status == MemberStatus.ALIVE
            since = max(own.round, self.newest_round) + 1 if alive else own.since
            self.entries[self.me] = own._replace(incarnation=entry.incarnation + 1, since=since)
            self.version += 1


def membership_update(entries: Mapping[int, SlotEntry]) -> bytes:
    """What a worker sends of its view; `read_membership_update` reads it."""
    return _written(tuple(entry for _, entry in sorted(entries.items())))


@lru_cache(maxsize=_FEW)
def _written(entries: tuple[SlotEntry, ...]) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def read_membership_update(raw: bytes, limits: Limits) -> list[SlotEntry] | None:
    """The entries that another worker sent; None for anything else, or where a number is above the limits of the run.

    >>> entry, limits = SlotEntry(1, 0, 5, MemberStatus.ALIVE, 0, "127.0.0.1:4000"), Limits(2, 9, 90)
    >>> read_membership_update(membership_update({1: entry}), limits) == [entry]
    True
    >>> read_membership_update(membership_update({1: entry._replace(round=10)}), limits), read_membership_update(b"[[1]]", limits)
    (None, None)
    """
    entries = _read(raw, limits)
    return None if entries is None else list(entries)


@lru_cache(maxsize=_FEW)
def _read(raw: bytes, limits: Limits) -> tuple[SlotEntry, ...] | None:
    values = json_from_peer(raw)
    if not isinstance(values, list) or len(values) > limits.workers:
        return None
    entries = tuple(entry for value in values if (entry := _entry(value, limits)) is not None)
    return entries if len(entries) == len(values) == len({entry.slot for entry in entries}) else None


def _entry(value: object, limits: Limits) -> SlotEntry | None:
    match value:
        case [int(slot), int(incarnation), int(nonce), int(status), int(since), str(address), int(round), int(steps)]:
            numbers = (slot, incarnation, nonce, status, since, round, steps)
            # One that is back in the last round takes part from the round after it on.
            most = (
                limits.workers - 1,
                MOST_INCARNATIONS,
                _NONCES,
                len(MemberStatus) - 1,
                limits.rounds + 1,
                limits.rounds,
                limits.steps,
            )
            sound = all(type(one) is int and 0 <= one <= limit for one, limit in zip(numbers, most, strict=True))
            if sound and _is_address(address):
                return SlotEntry(slot, incarnation, nonce, MemberStatus(status), since, address, round, steps)
    return None


def is_process(address: object, nonce: object = 0) -> bool:
    """Whether a process may say that it listens there, empty for nowhere, and that this is its random number.

    >>> is_process("127.0.0.1:4000", 7), is_process("127.0.0.1", 7), is_process("127.0.0.1:4000", -1), is_process(None)
    (True, False, False, False)
    """
    return type(nonce) is int and 0 <= nonce < _NONCES and isinstance(address, str) and _is_address(address)


def _is_address(text: str) -> bool:
    """Whether this may be where a process listens; empty for one of which nothing is known."""
    named = text.isascii() and text.isprintable() and len(text) <= _LONGEST_ADDRESS and " " not in text
    try:
        return not text or (named and bool(split(text)))
    except ValueError:
        return False
