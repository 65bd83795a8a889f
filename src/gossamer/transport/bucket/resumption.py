"""With which state a worker resumes that comes, or whose message a round was closed without."""

from collections import Counter
from functools import partial

from gossamer.errors import CheckpointError
from gossamer.transport.bucket.bucket import Item
from gossamer.transport.bucket.closing import ClosedRounds
from gossamer.transport.bucket.objects import Basis, parsed, state_name
from gossamer.transport.bucket.protocol import StoreWorker
from gossamer.transport.bucket.requests import Do, Steps
from gossamer.transport.bucket.slots import SlotHolder
from gossamer.transport.bucket.states import loaded

AHEAD = 8
"""Most missed rounds after which a worker continues from its own state and reads their means, to keep its inner optimizer."""
_STRIKES = 5


class Resumption:
    """Brings one worker to the newest closed round, by a state and the outcomes that follow it."""

    def __init__(self, holder: SlotHolder[StoreWorker], rounds: ClosedRounds) -> None:
        self._holder, self._rounds = holder, rounds
        self._terms, self._store, self._work, self._seen = holder.terms, holder.store, holder.work, holder.seen
        self._states, self._unsound = holder.states, holder.states.unsound

    def resume(self, own: int) -> Steps[Basis]:
        """Catches up with the newest closed round, and sets the round of the worker.

        Args: `own` is the number of rounds behind its own newest state.
        Raises: CheckpointError where no state leads there.
        """
        waited_s, terms = 0.0, self._terms  # its own pauses: a process that was stopped looks again before it gives up
        while True:
            yield from self._holder.look(None)
            newest = max(self._seen.states, default=-1)
            first = newest if newest >= 0 and (newest < own or self._is_new(own)) else own
            yield from self._holder.look(max(0, first - 1))
            finished = self._seen.newest + 1
            if terms.gossip:
                finished = max(finished, own)  # a listing may lack the outcomes that led to its own state
            unsound = len(self._unsound)
            begun = yield from self._first_that_leads(own, finished)
            if begun is not None:
                # All inner steps that count in a mean belong to the slot, in any of its lives.
                begun = begun._replace(steps=self._rounds.steps[self._holder.slot])
                yield Do(partial(self._work.start, self._holder.round, begun))
                return begun
            if len(self._unsound) > unsound:
                continue  # with the best of those that are left
            if waited_s > terms.timeout_s:
                if self._unsound:
                    raise [*self._unsound.values()][-1]
                raise CheckpointError(
                    f"{finished} rounds are closed and no state from which they follow is there any more: neither this worker "
                    "nor the store has one; start again with an empty store"
                )
            waited_s += yield from self._store.pause(waited_s)

    def _first_that_leads(self, own: int, finished: int) -> Steps[Basis | None]:
        """The first of its bases that leads to the newest round; None where none does, or one cannot be loaded."""
        unsound = len(self._unsound)
        for after, donor in self._bases_in_gossip(own, finished) if self._terms.gossip else self._bases(own, finished):
            begun = yield from self._loaded(after, own, donor)
            follow = self._continue_after(finished) if self._terms.gossip else self._add_means(after)
            if begun is not None and (yield from follow):
                return begun
            if len(self._unsound) > unsound:
                return None
        return None

    # --- the choice of a state ----------------------------------------------------------------------------------------

    def _is_new(self, own: int) -> bool:
        """Whether it has no state at all, not even that of the start."""
        return self._terms.start_in_store and not own

    def _bases(self, own: int, finished: int) -> list[tuple[int, int]]:
        """The states from which it may continue, best first: the rounds behind each, and -1, as those of all slots are equal."""
        states = sorted((one for one in self._seen.states if state_name(one) not in self._unsound), reverse=True)
        preferred = 1 if states and states[0] > own and finished - own > AHEAD else 0
        mine = [] if self._is_new(own) else [own]
        return [(base, -1) for base in [*states[:preferred], *mine, *states[preferred:]] if base <= finished]

    def _bases_in_gossip(self, own: int, finished: int) -> list[tuple[int, int]]:
        """The states from which it may continue, best first: the rounds behind each, and its slot; -1 for the common start."""
        me, start = self._holder.slot, -1 if self._terms.start_in_store else self._holder.slot
        there = [
            (after, slot)
            for slot, some in self._seen.holders.items()
            for after in some
            if after <= finished and state_name(after, slot) not in self._unsound
        ]
        newest = max([own, *(after for after, slot in there if slot == me)])
        is_young = finished - newest <= self._terms.rejoin_rounds

        def order(base: tuple[int, int]) -> tuple[bool, int, bool]:
            is_others = base[1] != me
            return is_others and is_young, -base[0], is_others

        bases = sorted({(0, start), (own, me), *there}, key=order)
        # Without means the start leads nowhere near the others: it stands for no state that is damaged.
        lost = bool(self._unsound) and not self._terms.seal.proves_writers
        return [base for base in bases if base[0] or not lost]

    def _loaded(self, after: int, own: int, donor: int) -> Steps[Basis | None]:
        """Restores its own state, or loads the one in the store, after so many rounds; None where there is none."""
        me = self._holder.slot
        if after in (0, own) and donor in (-1, me):
            sha256 = yield Do(partial(self._work.restore, after))
            if sha256 is not None:
                return Basis(after, me, sha256)
        name = state_name(after, donor)
        item = yield from self._states.read(name)
        writer = self._writer(item, donor)
        if item is None or writer is None:
            self._seen.states.discard(after)  # until a listing shows it again
            self._seen.holders[donor].discard(after)
            return None
        found: str | CheckpointError = yield Do(partial(loaded, self._work.load, after, writer, item.body))
        doubts = after and self._terms.compares_states and not self._terms.seal.trusts(writer)
        if doubts and not isinstance(found, CheckpointError):
            found = (yield from self._compared(after, writer)) or found
        if not isinstance(found, CheckpointError):
            return Basis(after, writer, found)
        self._states.pass_over(name, found)
        return None

    def _writer(self, item: Item | None, donor: int) -> int | None:
        """The slot of the writer of a state, as its head says; None where that is none, another than the donor, or not proved."""
        match item:
            case Item(head={"slot": int(slot)}) if 0 <= slot < self._terms.workers and donor in (-1, slot):
                return slot if item.is_of(slot) else None
        return None

    def _compared(self, after: int, slot: int) -> Steps[CheckpointError | None]:
        """Compares the state that was loaded with what the others say of theirs in their messages of the next round.

        That round must be over: waits for it while others live, for a timeout at most. Returns the error where two or more,
        and more than half of those that ended the round before, have another state.
        """
        waited_s, terms = 0.0, self._terms
        while waited_s <= terms.timeout_s and not self._work.asked() and (yield from self._rounds.read(after)) is None:
            yield from self._holder.look(after)
            if self._holder.alive() <= {self._holder.slot}:
                break
            waited_s += yield from self._store.pause(waited_s)
        mine, others = (yield Do(self._work.common)), dict[int, str]()
        names = yield from self._store.names(f"r{after:08d}-f")
        for match in parsed(names):
            if match["sender"] and int(match["round"]) == after and int(match["sender"]) < terms.workers:
                item = yield from self._store.try_read(match[0])
                match item:
                    case Item(head={"state": str(common), "begun": None}):
                        others[int(match["sender"])] = common
        most, count = Counter(others.values()).most_common(1)[0] if others else (mine, 0)
        if most == mine:
            return None
        if count > 1 and 2 * count > len(others):
            return CheckpointError(
                f"worker {slot} has written it, and {count} of {len(others)} workers had another one after round {after}; look "
                f"at the machine of worker {slot}"
            )
        self._work.say(
            f"the state of worker {slot} after round {after} is taken on its word alone: no two workers have the same; if one of "
            "these machines is bad, take its key out of [peers] before the next run"
        )
        return None

    # --- the rounds since then ----------------------------------------------------------------------------------------

    def _continue_after(self, finished: int) -> Steps[bool]:
        """In gossip: continues after so many rounds; returns whether the outcome of the last can be read."""
        before = (yield from self._rounds.read(finished - 1)) if finished else None
        if before is not None:
            self._rounds.steps = before.steps
        self._holder.round = finished
        return before is not None or not finished

    def _add_means(self, after: int) -> Steps[bool]:
        """Adds the means of all closed rounds; returns whether all of them could be read."""
        round, strikes = after, 0
        if after and (before := (yield from self._rounds.read(after - 1))) is not None:
            self._rounds.steps = before.steps
        while True:
            commit = yield from self._rounds.read(round)
            if commit is None and self._seen.newest < round:
                self._holder.round = round
                return True
            ended = None if commit is None else (yield from self._rounds.mean(commit, None))
            if ended is None:
                strikes += 1  # it may not show yet, or be removed
                if strikes == _STRIKES or self._work.asked():
                    return False
                yield from self._store.pause(0.0)
                continue
            yield Do(partial(self._work.add, *ended))
            self._rounds.steps, round, strikes = ended[0].steps, round + 1, 0
