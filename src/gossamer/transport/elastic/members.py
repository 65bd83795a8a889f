"""The membership view of one worker of an elastic run: pure data whose merge is commutative.

A run has slots, numbered as its workers are. A process fills a slot; another process may fill it later. A view has one
entry per slot, and of two entries the one with the later incarnation counts. So merged views are equal, whatever the
order of merges.
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
"""The most by which an incarnation may exceed the known one of its slot.

Each increment takes a loss and an answer, so a partition of a day counts fewer. This leaves room above any single
letter: a worker reported as suspect can always answer with a later incarnation.
"""
_MOST_OUTBID = 1 << 10
"""The most by which a worker outbids the incarnation of a process that cannot be reached: forged letters must not
exhaust the range.
"""
_LONE_LEAD = 2
"""The most rounds by which one key is believed to be ahead of all others."""
_LONGEST_ADDRESS = 100
_FEW = 32
"""Cached encoded or parsed updates: all workers send the same ones to each other."""


class SlotTakenError(PeerError):
    """Another process fills this process's slot."""

    def __init__(self, slot: int, timeout_s: float) -> None:
        super().__init__(
            f"another process fills slot {slot} now: it was given the slot too, or this one could not be reached for "
            f"{timeout_s:g} s; start it again with --join to get a free slot"
        )


class MemberStatus(IntEnum):
    """The status of a process; within one incarnation a later status replaces an earlier one."""

    JOINING = 0
    """It was given the slot and is fetching its state."""
    ALIVE = 1
    SUSPECT = 2
    """Its connection was lost, or it has been silent. If alive, it answers with its next incarnation."""
    LEFT = 3
    """It has ended regularly."""


class SlotEntry(NamedTuple):
    """A slot's entry in a membership view."""

    slot: int
    incarnation: int
    """Counts the processes of the slot, and the times that one answered a suspicion."""
    nonce: int
    """A random number of the process, which distinguishes processes that claim one slot."""
    status: MemberStatus
    since: int
    """The first round in which it takes part."""
    address: str = ""
    """`host:port` at which it listens."""
    round: int = 0
    """Its newest known round."""
    steps: int = 0
    """The slot's inner steps whose result another worker holds: the slot's next process continues after them."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """The rank of an entry: of two entries of a slot, the larger counts."""
        return self.incarnation, self.nonce, self.status


def merged(a: SlotEntry, b: SlotEntry) -> SlotEntry:
    """The merge of two entries of one slot; commutative and idempotent.

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
    """One worker's membership view.

    Args:
        limits: of the run; it has a slot for each worker.
        me: the slot of this worker.
        entries: the initial entries, this worker's own included.
    """

    def __init__(self, limits: Limits, me: int, entries: Iterable[SlotEntry]) -> None:
        self.limits, self.slots, self.me = limits, limits.workers, me
        self.entries: dict[int, SlotEntry] = {}
        self.version = 0
        """Counts the changes to announce to others."""
        self.replaced = False
        """Whether another process has taken this worker's slot."""
        self.doubts: dict[int, SlotEntry] = {}
        """Unverified reports about slots by workers that do not own them; the slot's process is to be asked."""
        self.disproved = set[int]()
        """The nonces of processes whose claims about closed rounds proved false: their word on a state counts for nothing."""
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
        """The newest round of workers that are alive, as far as it is believed here.

        A round that one other key alone claims is believed up to a few rounds after those of all other keys: else a
        letter would take all workers to the end of the run. One that is really ahead is reached over some rounds.
        """
        alive = sorted((e for e in self.entries.values() if e.status == MemberStatus.ALIVE), key=lambda e: -e.round)
        if not alive:
            return self.own.round
        first = alive[0]
        rest = [entry for entry in alive if not self._are_one(first.slot, entry.slot)]
        third = any(not self._are_one(self.me, entry.slot) for entry in rest)
        if self._are_one(self.me, first.slot) or not third:
            return first.round
        return min(first.round, rest[0].round + _LONE_LEAD)

    def _are_one(self, slot: int, other: int) -> bool:
        """Whether two slots belong to one key; without keys each is separate."""
        return slot == other or (self._speaks_for is not None and self._speaks_for(slot, other))

    def alive(self, round: int) -> frozenset[int]:
        """The slots whose workers take part in a round."""
        return frozenset(
            slot for slot, entry in self.entries.items() if entry.status == MemberStatus.ALIVE and entry.since <= round
        )

    def left_after(self, round: int) -> frozenset[int]:
        """The slots whose workers have left after taking part in this round."""
        return frozenset(
            slot
            for slot, entry in self.entries.items()
            if entry.status == MemberStatus.LEFT and entry.nonce and entry.since <= round <= entry.round
        )

    def with_status(self, *statuses: MemberStatus) -> list[SlotEntry]:
        """The entries with these statuses, without this worker's."""
        return [entry for slot, entry in sorted(self.entries.items()) if slot != self.me and entry.status in statuses]

    @property
    def alone(self) -> bool:
        """Whether all other workers seen so far have finished for good.

        A worker asked to leave may come back, and until one has joined, one may.
        """
        others = [entry for slot, entry in self.entries.items() if slot != self.me and entry.nonce]
        return bool(others) and all(
            entry.status == MemberStatus.LEFT and entry.round >= self.limits.rounds for entry in others
        )

    @property
    def expects_company(self) -> bool:
        """Whether the run has other slots, none of which has had a process yet."""
        others = [entry for slot, entry in self.entries.items() if slot != self.me and entry.nonce]
        return self.slots > 1 and all(entry.status == MemberStatus.JOINING for entry in others)

    def restrict_trust(self, speaks_for: Callable[[int, int], bool]) -> None:
        """Restricts trust in a worker to the slots that it owns: `speaks_for(worker, slot)`.

        Until a slot has reported itself, or after it was lost, others are believed about it, as two workers that cannot
        reach each other know each other through a third; its own report always takes precedence. Otherwise a report by
        others that would change an entry becomes one of `doubts`.
        """
        self._speaks_for, self._unproven = speaks_for, set(self.entries) - {self.me}

    def merge(
        self, entries: Iterable[SlotEntry], source: int | None = None
    ) -> list[tuple[SlotEntry | None, SlotEntry]]:
        """Merges another worker's view; returns the changed entries of others, before and after, ignoring rounds and
        steps.

        A worker that is reported as suspect answers with its next incarnation, which takes part from the round after
        the newest known one, so that no worker waits for it in a round that it has missed.

        Args: `source` is the worker that sent it; None for a trusted update.
        """
        changed: list[tuple[SlotEntry | None, SlotEntry]] = []
        for entry in entries:
            is_own = source is None or self._speaks_for is None or self._speaks_for(source, entry.slot)
            before = self.entries.get(entry.slot)
            after = self._after(before, entry) if is_own else self._after_hearsay(before, entry)
            if after is not None:
                self.entries[entry.slot] = after
                if before is None or before.rank != after.rank:
                    changed.append((before, after))
        self.version += bool(changed)
        return changed

    def _after(self, before: SlotEntry | None, entry: SlotEntry) -> SlotEntry | None:
        """A slot's entry after a report by a worker that owns it; None for this worker's own, which it changes itself."""
        if entry.slot == self.me:
            self._about_me(entry)
            return None
        unproven = self._speaks_for is not None and entry.slot in self._unproven
        self._unproven.discard(entry.slot)
        self._promised.discard(entry.slot)
        if unproven and before is not None and before.rank > entry.rank:
            # No process of the slot has ever reported itself.
            return entry._replace(steps=max(before.steps, entry.steps))
        return entry if before is None else merged(before, entry)

    def _after_hearsay(self, before: SlotEntry | None, entry: SlotEntry) -> SlotEntry | None:
        """A slot's entry after a report by a worker that does not own it; None where the slot's process is asked instead."""
        if entry.slot == self.me or (before is not None and entry.slot not in self._unproven):
            self._secondhand_report(entry)
            return None
        if entry.incarnation - (before.incarnation if before else 0) > _MOST_OUTBID:
            return None
        self._unproven.add(entry.slot)
        entry = entry._replace(round=0)
        return entry if before is None else merged(before, entry)

    def admits(self, entries: Iterable[SlotEntry]) -> bool:
        """Whether the incarnations in an update are plausible, given the last known ones of their slots."""
        known = {slot: entry.incarnation for slot, entry in self.entries.items()}
        return all(entry.incarnation <= known.get(entry.slot, 0) + _JUMP for entry in entries)

    def suspect(self, slot: int) -> bool:
        """Marks a worker as unreachable; returns whether that is new."""
        entry = self.entries.get(slot)
        if entry is None or entry.status > MemberStatus.ALIVE:
            return False
        self.entries[slot] = entry._replace(status=MemberStatus.SUSPECT)
        self._unproven.add(slot)
        self.version += 1
        return True

    def progress(self, slot: int, round: int, steps: int = 0) -> None:
        """Updates a worker's round, and the inner steps whose result another worker holds."""
        entry = self.entries.get(slot)
        if entry is not None and (round > entry.round or steps > entry.steps):
            self.entries[slot] = entry._replace(round=max(entry.round, round), steps=max(entry.steps, steps))

    def declare(self, status: MemberStatus, since: int | None = None) -> None:
        """Changes this worker's own entry."""
        own = self.own
        self.entries[self.me] = own._replace(status=status, since=own.since if since is None else since)
        self.version += 1

    def give_slot(self, nonce: int, address: str, kept: Container[int] = ()) -> SlotEntry | None:
        """Gives a newcomer the lowest free slot, and returns its entry; None when all are filled.

        A slot given to another process that has not taken it yet comes last.

        Args: `kept` are reserved slots.
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
            return True  # else a false report that it is filled would keep its owner out
        return entry is None or entry.status != MemberStatus.ALIVE

    def _is_promised(self, slot: int) -> bool:
        """Whether the slot was given to a process that may still come."""
        entry = self.entries.get(slot)
        return slot in self._promised or (entry is not None and entry.status == MemberStatus.JOINING)

    def _secondhand_report(self, entry: SlotEntry) -> None:
        """A report about a slot that its sender does not own: at most a reason to ask the slot's process."""
        before = self.entries.get(entry.slot)
        if entry.slot == self.me:
            own = self.own
            if own.status < MemberStatus.ALIVE:
                # A returning process continues after the steps of its slot that others hold; a training one knows its
                # own.
                self.entries[self.me] = own._replace(steps=max(own.steps, entry.steps))
            if entry.rank[:2] == own.rank[:2] and own.status <= MemberStatus.ALIVE and entry.status > own.status:
                self._answer()
            elif entry.nonce != own.nonce and entry.rank > own.rank:
                self.doubts[self.me] = entry
            # A later incarnation of this process than its own is forged.
        elif before is not None and entry.rank <= before.rank:
            return
        elif entry.status == MemberStatus.JOINING:
            # So it comes last when slots are given; it reports itself once it has joined.
            self._promised.add(entry.slot)
        else:
            self.doubts[entry.slot] = entry

    def _answer(self) -> None:
        """Answers a suspicion of this worker, keeping its round unless others are ahead.

        If it moved to a later round each time, repeated suspicions would keep it out.
        """
        own = self.own
        ahead = own.status == MemberStatus.ALIVE and self.newest_round > own.round
        since = self.newest_round + 1 if ahead else own.since
        self.entries[self.me] = own._replace(incarnation=own.incarnation + 1, since=since)
        self.version += 1

    def outbid(self, entry: SlotEntry) -> None:
        """Reclaims this worker's slot from a process that could not be reached at its reported address."""
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
    """The encoded entries of a view, for `read_membership_update`."""
    return _written(tuple(entry for _, entry in sorted(entries.items())))


@lru_cache(maxsize=_FEW)
def _written(entries: tuple[SlotEntry, ...]) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


@lru_cache(maxsize=_FEW)
def read_membership_update(raw: bytes, limits: Limits) -> tuple[SlotEntry, ...] | None:
    """The entries that another worker sent; None for anything else, or where a number is above the limits of the run.

    >>> entry, limits = SlotEntry(1, 0, 5, MemberStatus.ALIVE, 0, "127.0.0.1:4000"), Limits(2, 9, 90)
    >>> read_membership_update(membership_update({1: entry}), limits) == (entry,)
    True
    >>> read_membership_update(membership_update({1: entry._replace(round=10)}), limits), read_membership_update(b"[[1]]", limits)
    (None, None)
    """
    values = json_from_peer(raw)
    if not isinstance(values, list) or len(values) > limits.workers:
        return None
    entries = tuple(entry for value in values if (entry := _entry(value, limits)) is not None)
    return entries if len(entries) == len(values) == len({entry.slot for entry in entries}) else None


def _entry(value: object, limits: Limits) -> SlotEntry | None:
    match value:
        case [int(slot), int(incarnation), int(nonce), int(status), int(since), str(address), int(round), int(steps)]:
            numbers = slot, incarnation, nonce, status, since, round, steps
            # A worker that returns in the last round takes part from the round after it.
            last, rounds = limits.workers - 1, limits.rounds
            most = last, MOST_INCARNATIONS, _NONCES, len(MemberStatus) - 1, rounds + 1, rounds, limits.steps
            sound = all(type(one) is int and 0 <= one <= limit for one, limit in zip(numbers, most, strict=True))
            if sound and _is_address(address):
                return SlotEntry(slot, incarnation, nonce, MemberStatus(status), since, address, round, steps)
    return None


def is_process(address: object, nonce: object = 0) -> bool:
    """Whether address (empty for none) and nonce of a process are well-formed.

    >>> is_process("127.0.0.1:4000", 7), is_process("127.0.0.1", 7), is_process("127.0.0.1:4000", -1), is_process(None)
    (True, False, False, False)
    """
    return type(nonce) is int and 0 <= nonce < _NONCES and isinstance(address, str) and _is_address(address)


def _is_address(text: str) -> bool:
    """Whether this is a valid address of a process; empty if unknown."""
    named = text.isascii() and text.isprintable() and len(text) <= _LONGEST_ADDRESS and " " not in text
    try:
        return not text or (named and bool(split(text)))
    except ValueError:
        return False
