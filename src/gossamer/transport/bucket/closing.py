"""How a round is closed, and what a closed one leads to: its commit, with a mean or the messages of a worker's peers."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from gossamer.errors import CheckpointError, PeerError, TransportError
from gossamer.transport.bucket.bucket import Item
from gossamer.transport.bucket.objects import (
    Commit,
    TakenPart,
    commit_head,
    commit_in,
    commit_name,
    following,
    mean_name,
    message_name,
    part_in,
)
from gossamer.transport.bucket.protocol import StoreWorker
from gossamer.transport.bucket.requests import Do, Steps
from gossamer.transport.bucket.slots import SlotHolder

RoundEnd = tuple[Commit, Any]
"""A closed round with its mean or, in gossip, the messages of a worker's peers by slot."""


class ClosedRounds:
    """The outcomes of rounds, as one worker has read them."""

    def __init__(self, holder: SlotHolder[StoreWorker]) -> None:
        self._holder, self._terms, self._store, self._work = holder, holder.terms, holder.store, holder.work
        self.commits: dict[int, Commit] = {}
        """The commits that it has read, by round."""
        self.steps: tuple[int, ...] = (0,) * holder.terms.workers
        """Inner steps behind each slot, after the round that this worker has ended or added last."""

    def read(self, round: int) -> Steps[Commit | None]:
        """The outcome of a round; None while it is open. Raises: CheckpointError."""
        if round not in self.commits:
            item = yield from self._store.read(commit_name(round))
            if item is None:
                return None
            commit = commit_in(round, item.head, self._terms.workers)
            if commit is None or not item.is_of(commit.closer[0]):
                raise CheckpointError(
                    f"the commit of round {round + 1} in the store is none that a worker of this run writes; start all with the "
                    "same gossamer, or start again with an empty store"
                )
            self.commits[round] = commit
            seen = self._holder.seen
            seen.newest = max(seen.newest, round)  # no listing has shown the one that it has just created
        return self.commits[round]

    def ended(self, commit: Commit, own: Item) -> Steps[RoundEnd | None]:
        """What a closed round leads to for a worker with a part in it, whose message is `own`.

        None where some of it is not visible yet, or is gone. Raises: PeerError, as `mean`.
        """
        if not self._terms.gossip:
            return (yield from self.mean(commit, own))
        peers = yield Do(partial(self._work.peers, commit.round, commit.parts))
        items = yield from self._messages(commit, peers, None)
        if items is None:
            return None
        outcome = following(commit, {**items, self._holder.slot: own})
        self._correct(commit, outcome)
        return outcome, {slot: item.body for slot, item in items.items()}

    def mean(self, commit: Commit, own: Item | None) -> Steps[RoundEnd | None]:
        """A closed round and its mean; None where part of it is not visible yet, or is gone.

        Where the closer is not trusted, both are computed from the messages that the commit names, whose signatures prove their
        writers. Which messages it has left out is the closer's choice. Raises: PeerError where these may not count.
        """
        round = commit.round
        if self._terms.seal.trusts(commit.closer[0]):
            there = yield from self._store.read(mean_name(round, commit.mean))
            return None if there is None else (commit, there.body)
        items = yield from self._messages(commit, commit.parts, own)
        if items is None:
            return None
        mean: bytes | memoryview = yield Do(partial(self._work.mean, round, {j: one.body for j, one in items.items()}))
        outcome, sha256 = following(commit, items), hashlib.sha256(mean).hexdigest()
        if sha256 != commit.mean:
            there = yield from self._store.read(mean_name(round, commit.mean))
            if there is None:
                return None
            if (yield Do(partial(self._work.is_mean, round, bytes(mean), there.body))):
                mean = there.body
            else:
                outcome = outcome._replace(mean=sha256)
        self._correct(commit, outcome)
        return outcome, memoryview(mean)

    def _messages(self, commit: Commit, slots: Iterable[int], own: Item | None) -> Steps[dict[int, Item] | None]:
        """The messages of these slots, on which a commit builds; None where one is not there. Raises: PeerError."""
        items, round = dict[int, Item](), commit.round
        for slot in slots:
            item = own if slot == self._holder.slot else None
            if item is None:
                item = yield from self._store.read(message_name(round, slot, commit.parts[slot].life))
            if item is None:
                return None
            sound = yield Do(partial(self._work.is_sound, round, item.body))
            if part_in(commit.parts[slot].life, item.head, round, self._terms.workers) is None or not sound:
                raise PeerError(
                    f"worker {commit.closer[0]} has closed round {round + 1} over what worker {slot} sent, which is not sound; "
                    "take its key out of [peers] and start again with an empty store"
                )
            items[slot] = item
        return items

    def _correct(self, commit: Commit, outcome: Commit) -> None:
        """Replaces the content of a commit by what follows from its messages, and names its closer."""
        if outcome != commit:
            self._work.say(
                f"round {commit.round + 1}: worker {commit.closer[0]} has closed it with what does not follow from its messages, "
                "which is not believed; look at that machine, and take its key out of [peers] before the next run"
            )
            self.commits[commit.round] = outcome


class OpenRound:
    """A round that one worker may have to close.

    Args: `own` is the message that it has sent.
    """

    def __init__(self, holder: SlotHolder[StoreWorker], rounds: ClosedRounds, own: Item) -> None:
        self._holder, self._rounds, self._own = holder, rounds, own
        self.since_s = holder.clock()
        """When it had sent its message."""
        self._complete_s: float | None = None
        """When the round could first be closed; None before."""
        self._unsound = set[tuple[int, int]]()
        """The slots and lives whose messages do not count."""

    def close_in_turn(self) -> Steps[Commit | None]:
        """Closes this round once all live workers have sent, or the deadline is over, and it is this worker's turn."""
        holder, terms = self._holder, self._holder.terms
        now = holder.looked_s
        present = holder.seen.messages[holder.round] | {holder.slot: holder.life}
        sent = {slot: life for slot, life in present.items() if (slot, life) not in self._unsound}
        late = now - self.since_s >= terms.deadline_s
        if not late and not holder.alive() <= sent.keys():
            return None
        if self._complete_s is None:
            self._complete_s = now
        # One worker closes it, the others only if that takes long: otherwise n workers would read n messages each.
        order = sorted(sent, key=lambda slot: (slot - holder.round) % terms.workers)
        if now - self._complete_s < order.index(holder.slot) * terms.timeout_s / 4:
            return None
        taken = yield from self._taken(sent, late=late)
        return None if taken is None else (yield from self._close(taken))

    def _taken(self, sent: Mapping[int, int], *, late: bool) -> Steps[dict[int, tuple[Item, TakenPart]] | None]:
        """The sound messages among those sent, by slot; None where the round should stay open for others."""
        holder, work = self._holder, self._holder.work
        taken: dict[int, tuple[Item, TakenPart]] = {}
        for slot, life in sorted(sent.items()):
            is_own = slot == holder.slot
            item = self._own if is_own else (yield from holder.store.try_read(message_name(holder.round, slot, life)))
            if isinstance(item, TransportError):
                work.say(str(item))
                item = Item(None, memoryview(b""))
            if item is None:
                if not late:
                    return None  # a listing may show what cannot be read yet
                continue
            part = part_in(life, item.head, holder.round, holder.terms.workers)
            if not is_own and not (yield Do(partial(work.is_sound, holder.round, item.body))):
                part = None
            if part is None:
                self._unsound.add((slot, life))
                work.say(f"round {holder.round + 1}: what worker {slot} sent is not sound, and does not count")
            else:
                taken[slot] = item, part
        if {slot for slot, _ in self._unsound} & sent.keys() and not late:
            return None  # the workers to wait for may change now
        return taken

    def _close(self, taken: Mapping[int, tuple[Item, TakenPart]]) -> Steps[Commit | None]:
        """Closes this round over these messages; returns the outcome, which another worker may have decided."""
        holder, round = self._holder, self._holder.round
        bodies = {slot: item.body for slot, (item, _) in taken.items()}
        parts = {slot: part for slot, (_, part) in taken.items()}
        steps = [parts[slot].steps if slot in parts else before for slot, before in enumerate(self._rounds.steps)]
        sizes = {str(slot): len(body) for slot, body in bodies.items()}
        sha256 = ""
        if not holder.terms.gossip:
            mean: bytes = yield Do(partial(holder.work.mean, round, bodies))
            sha256, sizes["mean"] = hashlib.sha256(mean).hexdigest(), len(mean)
            yield from holder.store.create(mean_name(round, sha256), {}, mean)
        head = commit_head(parts, steps, sha256, (holder.slot, holder.life), sizes)
        yield from holder.store.create(commit_name(round), head)
        return (yield from self._rounds.read(round))
