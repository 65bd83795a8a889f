"""The life of a worker in a store: it takes a slot, resumes, and trains and exchanges round by round (`protocol`)."""

from collections.abc import Callable
from functools import partial

from gossamer.errors import PeerError
from gossamer.transport.bucket.bucket import Item
from gossamer.transport.bucket.closing import ClosedRounds, OpenRound, RoundEnd
from gossamer.transport.bucket.objects import Commit, commit_name, message_head, message_name, state_name
from gossamer.transport.bucket.protocol import StoreTerms, StoreWorker
from gossamer.transport.bucket.requests import Do, Steps, TrainPhase
from gossamer.transport.bucket.resumption import Resumption
from gossamer.transport.bucket.slots import SlotHolder, SlotLostError


class Attendance(SlotHolder[StoreWorker]):
    """One worker of a run in rounds whose state lies in a store; see `SlotHolder`."""

    def __init__(self, terms: StoreTerms, work: StoreWorker, nonce: str, clock: Callable[[], float]) -> None:
        super().__init__(terms, work, nonce, clock)
        self.rounds = ClosedRounds(self)
        self._resumption = Resumption(self, self.rounds)
        self._cleared = set[tuple[int, int]]()
        """The slots and lives of dead processes whose objects were removed."""

    # --- a life -------------------------------------------------------------------------------------------------------

    def live(self) -> Steps[None]:
        """Takes a slot, catches up with the run, and trains until its end or until asked to leave.

        Raises: PeerError where all slots are taken, or it is another run; CheckpointError for a store that is damaged.
        """
        yield from self.agree()
        while not self.work.asked():
            if (yield from self.rounds.read(self.terms.rounds - 1)) is not None:
                return
            yield from self.claim()
            try:
                if self.slot >= 0:
                    yield from self._train()
            except SlotLostError:
                self.work.say(f"slot {self.slot} was taken by another process, as this one was silent for too long")
                self.slot = -1
                continue
            break
        if self.slot >= 0:
            yield from self.release()

    def _train(self) -> Steps[None]:
        work, terms = self.work, self.terms
        own: int = yield Do(partial(work.begin, self.slot, self.life))
        if terms.start_in_store:
            yield from self._put_start()
        while True:
            begun = yield from self._resumption.resume(own)
            if self.round >= terms.rounds:
                return
            if self.seen.newest < 0 and self.round == 0:
                yield from self._await_company()
            while not work.asked():
                common = (yield Do(work.common)) if terms.compares_states else None
                body = yield TrainPhase(partial(work.train, self.round))
                head = message_head(work.steps(), begun, common)
                ended = yield from self._exchange(Item(head, memoryview(body)))
                if ended is None:
                    break
                yield Do(partial(work.mix if terms.gossip else work.finish, *ended))
                own = self.round = self.round + 1
                begun = None
                yield from self._keep_state(ended[0])
                if self.round == terms.rounds:
                    return
            if work.asked():
                yield Do(partial(work.restore, own))
                return

    def _put_start(self) -> Steps[None]:
        """Creates the state of the start, unless the run has begun; the first one created counts, also for its creator.

        A listing may lack what is there. A start that is created late leads nowhere: means are removed before the state that they
        follow, and newer states are preferred.
        """
        yield from self.look(None)
        if not self.seen.states:
            yield from self.look(0)
        if not self.seen.states and self.seen.newest < 0:
            body = yield Do(partial(self.work.state, 0))
            yield from self.store.create(state_name(0), {"slot": self.slot}, body)

    def _await_company(self) -> Steps[None]:
        start_s, was_reported = self.clock(), False
        while self.terms.workers > 1 and not self.work.asked():
            yield from self.look(self.round)
            waited_s = self.clock() - start_s
            if len(self.alive()) > 1 or self.seen.newest >= 0:
                return
            if waited_s >= self.terms.timeout_s:
                self.work.say(f"nobody else has come within {self.terms.timeout_s:g} s, so this worker trains alone")
                return
            if not was_reported:
                was_reported = True
                self.work.say(f"waiting for another worker, for up to {self.terms.timeout_s:g} s")
            yield from self.store.pause(waited_s)

    # --- a round ------------------------------------------------------------------------------------------------------

    def _exchange(self, own: Item) -> Steps[RoundEnd | None]:
        """Sends a message; returns the commit of this round and what follows from it, None where it does not count."""
        terms, round, name = self.terms, self.round, message_name(self.round, self.slot, self.life)
        yield from self.store.create(name, own.head, own.body)
        open_round = OpenRound(self, self.rounds, own)
        unread_s = 0.0  # its own pauses since the round was closed
        while True:
            yield from self.look(round)
            is_closed = self.seen.newest >= round
            commit = yield from (self.rounds.read(round) if is_closed else open_round.close_in_turn())
            if commit is not None:
                if not self._counts(commit):
                    yield from self.store.remove(name)  # nobody looks for it any more
                    return None
                ended = yield from self.rounds.ended(commit, own)
                if ended is not None:
                    self.rounds.steps = ended[0].steps
                    return ended
                if max(self.seen.states, default=-1) > round + 1:
                    return None  # it is removed by now: the others are far ahead
                if unread_s > 2 * terms.timeout_s:
                    raise PeerError(
                        f"worker {commit.closer[0]} has closed round {round + 1} over messages, or with a mean, that are not in "
                        "the store, so no worker can continue; look at that machine, and start again with an empty store"
                    )
            if self.work.asked():
                return None
            if commit is None and self.seen.newest >= round:
                shown = f"the outcome of round {round + 1}, or a later one up to '{commit_name(self.seen.newest)}',"
                unread_s += yield from self.store.pause_for(shown, unread_s)
                continue
            pause_s = yield from self.store.pause(self.clock() - open_round.since_s)
            unread_s += pause_s if commit is not None else 0.0

    def _counts(self, commit: Commit) -> bool:
        """Whether a round was closed over the message of this process, rather than without it or over one of another life."""
        part = commit.parts.get(self.slot)
        return part is not None and part.life == self.life

    # --- its states ---------------------------------------------------------------------------------------------------

    def _keep_state(self, commit: Commit) -> Steps[None]:
        """Writes the state after a round where one is due, and removes what nobody needs any more.

        The closer writes that of all; in gossip each slot keeps its own.
        """
        if not self.terms.gossip and commit.closer != (self.slot, self.life):
            return
        body = yield Do(partial(self.work.state, self.round))
        if body is None:
            return
        head = {"slot": self.slot}
        if not self.terms.gossip:
            yield from self.put_state(head, body)
            return
        yield from self.store.create(state_name(self.round, self.slot), head, body)
        known = self.seen.holders[self.slot]
        known.add(self.round)
        yield from self.states.remove_older(known, self.round, self.slot)
        yield from self._remove_of_the_gone()

    def _remove_of_the_gone(self) -> Steps[None]:
        """In gossip: removes what slots without a live holder have left, once it is older than this slot's last state but one.

        Nobody continues from it then, as newer states are there. The last process of a slot is cleared up after once.
        """
        states = sorted(self.seen.holders[self.slot])
        until = min(states[0], self.round - self.terms.rejoin_rounds) if len(states) > 1 else 0
        live = self.alive()
        for slot, life in [*self.seen.lives.items()]:
            there = [one for one in self.seen.holders[slot] if state_name(one, slot) in self.listed]
            if slot in live or (slot, life) in self._cleared or max(there, default=0) >= until:
                continue
            if self.seen.sent_until(slot, life) <= until:
                self._cleared.add((slot, life))
                yield from self.states.remove_rounds(0, until, f"{slot:05d}")
                for state in there:
                    yield from self.store.remove(state_name(state, slot))
