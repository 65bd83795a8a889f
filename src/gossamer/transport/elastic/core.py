"""The exchanges of one worker of an elastic run, without any I/O: received letters and the time in, letters to send
out.

An exchange with a peer is committed only when both ends have both payloads and know this of each other:

    expected and posted       ->  send PAYLOAD
    its payload is here too   ->  send COMMIT
    its COMMIT is here too    ->  the exchange is made

A payload that is not finite, or that cannot be decoded, is declined before the COMMIT. On any failure before an end has
sent its COMMIT, the exchange is missed at both ends: the other cannot count it without that letter. Once it has sent it
and has not received the other's, the outcome is unsure: this end does not count the exchange and the other may. No
protocol over an unreliable link avoids this case (two generals); here it takes the loss of one small letter at the
right moment, and moves the mean of all by one pull.

Sockets drive it in `gossamer.transport.elastic.transport`, and a network with faults over virtual time in
`tests/faulty_network`.
"""

from collections.abc import Callable, Container, Iterable
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from gossamer.errors import RefusedError
from gossamer.rng import key
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.members import (
    Members,
    MemberStatus,
    SlotEntry,
    membership_update,
    read_membership_update,
)
from gossamer.transport.sockets.header import NO_TICKET, SMALL_BYTES, LetterKind
from gossamer.transport.sockets.letter import Letter, body_of

MOST_EARLY = 8
"""The most payloads of one peer and fragment kept for rounds this worker has not reached; further ones are declined."""


class Outcome(StrEnum):
    """The outcome of an exchange with one peer, as known at one end."""

    MADE = "made"
    MISSED = "missed"
    """Neither end counts it."""
    UNSURE = "unsure"
    """This end does not count it; the other one may."""
    DECLINED = "declined"
    """Neither end counts it, as the peer's message is invalid."""


class Outgoing(NamedTuple):
    """A letter to be sent to a peer."""

    peer: int
    letter: Letter


class _PeerExchange:
    """An exchange with one peer under one ticket, from this end."""

    def __init__(self, size: int, view: int, sound: Callable[[Tensor], bool] | None) -> None:
        self.size, self.view, self.sound = size, view, sound
        self.steps = 0
        """Inner steps of this worker's slot that its payload contains."""
        self.posted_s: float | None = None
        self.received: Letter | None = None
        self.committed = False
        self.confirmed = False
        self.outcome: Outcome | None = None

    def close(self, why: Outcome = Outcome.MISSED) -> None:
        """Ends it without counting it, unless it has ended."""
        if self.outcome is None:
            self.outcome = Outcome.UNSURE if self.committed else why
            self.received = None


class ElasticCore:
    """The exchanges of one worker and its membership view. Callers must then send the letters in `outbox`.

    Args:
        members: its view, its own entry included.
        timeout_s: how long a fault of a peer may delay this worker. A peer may be silent for a beat less, and an
            exchange may take a beat less from the moment its payload was posted.
        deadline_s: how long a round waits for peers that have not answered, alive or not; `timeout_s` if None.
        beat_s: how often a peer that is waited for is pinged.
    """

    def __init__(
        self, members: Members, *, timeout_s: float, deadline_s: float | None = None, beat_s: float = 0.5
    ) -> None:
        self.members, self.me = members, members.me
        self.limit_bytes: int | None = None
        """The most bytes of a payload, where sizes depend on the participants; None where the ticket determines the size."""
        self.outbox: list[Outgoing] = []
        self.round, self.steps = -1, 0
        """This worker's round, and the completed inner steps of its slot."""
        self.passed = False
        """Whether a peer has declined because it is in a later round already."""
        self._patience_s, self._beat_s = timeout_s - beat_s, beat_s
        self.limit_s = min(self._patience_s, deadline_s or timeout_s)
        """How long an exchange may take."""
        self._pacts: dict[tuple[Ticket, int], _PeerExchange] = {}
        self._early: dict[tuple[Ticket, int], Letter] = {}
        self._over: set[tuple[Ticket, int]] = set()
        self._planned: frozenset[int] = frozenset()
        self._view = 0
        self._heard_s: dict[int, float] = {}
        self._asked_s: dict[int, float] = {}
        self._awaited: frozenset[int] = frozenset()
        self._watched_s: dict[int, float] = {}
        """Since when this worker needs a message of a peer, or will in this round."""
        self._ticked_s = -1e9
        self._told: dict[int, int] = {}
        self._sizes: dict[tuple[int, int], int] = {}
        self._held_steps: dict[int, int] = {}
        self._doubted_s: dict[int, float] = {}
        """Since when a worker is pinged because others contradict its own entry."""
        self.claims: list[SlotEntry] = []
        """Processes reported to fill a slot that have not been contacted yet: they are to be dialled."""
        self.replaced: dict[int, SlotEntry] = {}
        """The last process of each slot that was replaced: it may be alive, with peers unknown here."""

    def begin_round(self, round: int, alive: frozenset[int], peers: Iterable[int]) -> None:
        """Begins a round with these peers, which follow from its topology over `alive`."""
        assert round > self.round or self.limit_bytes is not None, (round, self.round)
        self.round, self.passed = round, False
        self._planned = frozenset(peers)
        self.plan(alive)
        self._over.clear()
        self._held_steps.clear()
        self.members.progress(self.me, round)
        for ticket, peer in [*self._early]:
            if not self._may_be_announced(ticket, peer):
                del self._early[ticket, peer]
                self._decline(ticket, peer)

    def plan(self, workers: frozenset[int], history_hash: int = 0) -> None:
        """Fixes the participants of this round and its history; the other end of each exchange must agree."""
        self._view = key(history_hash, "view", *sorted(workers))

    def expect(self, ticket: Ticket, peer: int, size: int, sound: Callable[[Tensor], bool] | None = None) -> None:
        """Announces an exchange with a peer whose payload has this many bytes; an invalid payload is declined."""
        pact = self._pacts[ticket, peer] = _PeerExchange(size, self._view, sound)
        self._sizes[ticket.fragment, ticket.leg] = size
        entry = self.members.entries.get(peer)
        if entry is None or entry.status != MemberStatus.ALIVE:
            pact.close()  # the peer was lost since the round was drawn
        elif (letter := self._early.pop((ticket, peer), None)) is not None:
            self._payload(letter)

    def post(self, ticket: Ticket, peer: int, payload: Tensor, now: float) -> None:
        """Sends this worker's payload, unless the exchange has failed already."""
        pact = self._pacts[ticket, peer]
        pact.posted_s, pact.steps = now, self.steps
        if pact.outcome is None:
            letter = Letter(LetterKind.PAYLOAD, self.me, ticket, pact.view, max(self.round, 0), self.steps, payload)
            self.outbox.append(Outgoing(peer, letter))
            self._commit(ticket, peer, pact)

    def knows(self, ticket: Ticket) -> bool:
        """Whether the payload size of this ticket is known."""
        return self.limit_bytes is not None or (ticket.fragment, ticket.leg) in self._sizes

    def accepts(self, letter: Letter, size: int) -> bool:
        """Whether a body of this size may follow such a header; if not, its sender violates the protocol."""
        if letter.kind != LetterKind.PAYLOAD:
            return size <= SMALL_BYTES
        if self.limit_bytes is not None:
            return size <= self.limit_bytes
        return size == self._sizes.get((letter.ticket.fragment, letter.ticket.leg))

    def receive(self, letter: Letter, now: float, nonce: int | None = None) -> int | None:
        """Handles a received letter, and returns the nonce of its sender's process.

        Args: `nonce` is that of the process at the other end of the connection; None as long as it is not known. After
            a partition two processes may claim one slot: from the one that does not fill it, only the view counts.
            Raises: RefusedError for an impossible view, which changes nothing.
        """
        peer = letter.sender
        if letter.kind == LetterKind.MEMBERSHIP:
            nonce = self._merge(letter, nonce, now)
        if not self.is_filled_by(peer, nonce):
            return nonce
        self._heard_s[peer] = now
        self.members.progress(peer, letter.round)
        if letter.kind == LetterKind.PAYLOAD:
            self._payload(letter)
        elif letter.kind == LetterKind.PING:
            self._send(peer, LetterKind.PONG)
        elif letter.kind in (LetterKind.COMMIT, LetterKind.DECLINE):
            self._answer(letter)
        return nonce

    def is_filled_by(self, slot: int, nonce: int | None) -> bool:
        """Whether this process fills the slot, as far as known."""
        entry = self.members.entries.get(slot)
        return nonce is None or entry is None or entry.nonce == nonce

    def give_slot(
        self, nonce: int, address: str, ended: Container[int] = (), allowed: Container[int] | None = None
    ) -> SlotEntry | None:
        """Gives a newcomer a slot, and announces it to all; None if no slot is available.

        A mean over everyone needs more than half of the slots. A worker that sees at most half alive gives away no slot
        of an unreachable worker: both sides of a partition would grow, and continue with two histories.

        Args:
            ended: the nonces of processes known to have ended.
            allowed: the slots that the newcomer's key may fill; None for any.
        """
        few = 2 * (len(self.members.with_status(MemberStatus.ALIVE)) + 1) <= self.members.slots
        unsure = self.members.with_status(MemberStatus.SUSPECT, MemberStatus.JOINING)
        kept = (
            {entry.slot for entry in unsure if entry.nonce not in ended}
            if few and self.limit_bytes is not None
            else set()
        )
        if allowed is not None:
            kept |= {slot for slot in range(self.members.slots) if slot not in allowed}
        before = dict(self.members.entries)
        entry = self.members.give_slot(nonce, address, kept)
        if entry is not None and entry.slot in before:
            self._part_with(entry.slot)
            if before[entry.slot].status != MemberStatus.LEFT:
                self.replaced[entry.slot] = before[entry.slot]
        self.spread()
        return entry

    def resend_view(self, peer: int) -> None:
        """Resends this worker's view, which may have been lost with one of several connections to a peer."""
        self._told.pop(peer, None)
        self.tell(peer)

    def lost(self, peer: int) -> None:
        """Notes that the connection with a peer is gone: its exchanges fail, and it is suspected."""
        for (_, other), pact in self._pacts.items():
            if other == peer:
                pact.close()
        self._drop_early(peer)
        self._told.pop(peer, None)
        if self.members.suspect(peer):
            self.spread()

    def _drop_early(self, peer: int) -> None:
        for early in [early for early in self._early if early[1] == peer]:
            del self._early[early]

    def _part_with(self, slot: int) -> None:
        """Closes the exchanges with the former process of a slot. With the COMMIT of the next one, a payload that it has sent
        early would be counted at this end alone.
        """
        self.give_up([slot])
        self._drop_early(slot)

    def tick(self, now: float) -> None:
        """Closes exchanges that have timed out, pings the peers that this worker needs, and suspects silent ones."""
        waits = {peer for (_, peer), pact in self._pacts.items() if pact.outcome is None}
        planned = {entry.slot for entry in self.members.with_status(MemberStatus.ALIVE)} & self._planned
        self._doubted_s = {
            peer: since_s
            for peer, since_s in self._doubted_s.items()
            if self._heard_s.get(peer, -1e9) < since_s and self._may_be_suspected(peer)
        }
        # A worker that was itself stopped did not receive: peers silent during that time may be alive.
        before = self._watched_s if now - self._ticked_s < 4 * self._beat_s else {}
        self._ticked_s = now
        self._watched_s = {peer: before.get(peer, now) for peer in waits | planned | self._awaited | {*self._doubted_s}}
        for peer in sorted(self._watched_s):
            if now - max(self._heard_s.get(peer, -1e9), self._asked_s.get(peer, -1e9)) >= self._beat_s:
                self._asked_s[peer] = now
                self._send(peer, LetterKind.PING)
        for (ticket, peer), pact in self._pacts.items():
            if pact.outcome is None and pact.posted_s is not None and now >= pact.posted_s + self.limit_s:
                pact.close()
                self._decline(ticket, peer)
        for peer in sorted(self._watched_s):
            if now >= self._silent_until_s(peer) and self.members.suspect(peer):
                self.give_up([peer])
                self.spread()

    def _silent_until_s(self, peer: int) -> float:
        """The time until which a pinged peer may be silent."""
        since_s = max(self._heard_s.get(peer, -1e9), self._watched_s[peer])
        return since_s + min(self._patience_s, max(4 * self._beat_s, self.limit_s))

    def wait_for(self, peers: Iterable[int]) -> None:
        """Adds peers from which other letters are due: they are pinged too."""
        self._awaited = frozenset(peers)

    def deadline(self) -> float:
        """The time at which `tick` next closes an exchange, or suspects a peer; infinite if none is waited for."""
        posted = (pact.posted_s for pact in self._pacts.values() if pact.outcome is None and pact.posted_s is not None)
        silent = (self._silent_until_s(peer) for peer in self._watched_s if self._may_be_suspected(peer))
        return min(min(posted, default=float("inf")) + self.limit_s, min(silent, default=float("inf")))

    def _may_be_suspected(self, peer: int) -> bool:
        entry = self.members.entries.get(peer)
        return entry is not None and entry.status == MemberStatus.ALIVE

    def settled(self, ticket: Ticket) -> bool:
        """Whether all exchanges of a ticket have ended, successfully or not."""
        return all(pact.outcome is not None for (other, _), pact in self._pacts.items() if other == ticket)

    def collect(self, ticket: Ticket) -> tuple[dict[int, Tensor], dict[int, Outcome]]:
        """The payloads of committed exchanges, by peer, and the outcome of each exchange; forgets the ticket."""
        payloads: dict[int, Tensor] = {}
        outcomes: dict[int, Outcome] = {}
        for peer in sorted(peer for other, peer in self._pacts if other == ticket):
            pact = self._pacts.pop((ticket, peer))
            assert pact.outcome is not None, (ticket, peer)
            self._over.add((ticket, peer))
            outcomes[peer] = pact.outcome
            if pact.outcome is Outcome.MADE:
                assert pact.received is not None
                payloads[peer] = pact.received.body
                for slot, steps in ((peer, pact.received.steps), (self.me, pact.steps)):
                    self._held_steps[slot] = max(steps, self._held_steps.get(slot, 0))
        if self.limit_bytes is None:
            self.count_steps()
        return payloads, outcomes

    def count_steps(self) -> None:
        """Records that the steps of payloads since the last call are now included in this worker's parameters."""
        for peer, steps in self._held_steps.items():
            self.members.progress(peer, 0, steps)
        self._held_steps.clear()

    def next_round(self) -> int:
        """The next round, or a later one that the others are in.

        A worker that was suspected takes part again from the round that it announced. One that is too late for its
        peers catches up with their round.
        """
        late = self.members.newest_round if self.passed else 0
        return max(self.round + 1, self.members.own.since, late)

    @property
    def kept(self) -> int:
        """Payloads received for exchanges that are not announced yet."""
        return len(self._early)

    @property
    def was_contacted(self) -> bool:
        """Whether this worker has received any letter."""
        return bool(self._heard_s)

    @property
    def contacted_by_all(self) -> bool:
        """Whether this worker has received a letter from all peers that it knows to be alive."""
        return all(entry.slot in self._heard_s for entry in self.members.with_status(MemberStatus.ALIVE))

    def silent_s(self, now: float) -> dict[int, float]:
        """Seconds since the last letter from each other worker."""
        return {peer: max(0.0, now - heard_s) for peer, heard_s in self._heard_s.items()}

    def spread(self, *, ask: bool = False) -> None:
        """Sends this worker's view to all live peers; `ask` requests answers."""
        for entry in self.members.with_status(MemberStatus.ALIVE):
            self.tell(entry.slot)
            if ask:
                self._send(entry.slot, LetterKind.PING)

    def announce(self) -> None:
        """Announces this worker's round to all live peers."""
        for entry in self.members.with_status(MemberStatus.ALIVE):
            self._send(entry.slot, LetterKind.PONG)

    def tell(self, peer: int) -> None:
        """Sends this worker's view to one peer, unless the peer has it."""
        if self._told.get(peer) != self.members.version:
            self._told[peer] = self.members.version
            self._send(peer, LetterKind.MEMBERSHIP, body=body_of(membership_update(self.members.entries)))

    def _merge(self, letter: Letter, nonce: int | None, now: float) -> int | None:
        entries, limits = read_membership_update(letter.content, self.members.limits), self.members.limits
        if entries is None or not self.members.admits(entries):
            raise RefusedError(
                "bounds",
                f"worker {letter.sender} sent a membership update that cannot be in a run of {limits.workers} workers, "
                f"{limits.rounds} rounds and {limits.steps} inner steps; test its memory, and start all with the same gossamer",
            )
        version, known = self.members.version, self.members.entries
        for before, after in self.members.merge(entries, letter.sender):
            if before is not None and (after.nonce != before.nonce or after.status == MemberStatus.LEFT):
                self._part_with(after.slot)
            if before is not None and after.nonce != before.nonce and before.status != MemberStatus.LEFT:
                self.replaced[after.slot] = before
        if self.members.version != version:
            self.spread()
        more = any(entry.slot in known and known[entry.slot].rank > entry.rank for entry in entries)
        if self.members.version != version or more:
            self.tell(letter.sender)
        self._ask_the_doubted(now)
        return next((entry.nonce for entry in entries if entry.slot == letter.sender), nonce)

    def _ask_the_doubted(self, now: float) -> None:
        doubts, self.members.doubts = self.members.doubts, {}
        for slot, claim in doubts.items():
            known = self.members.entries.get(slot)
            if known is None or known.nonce != claim.nonce:
                self.claims.append(claim)
            elif known.status <= MemberStatus.ALIVE and slot not in self._doubted_s:
                self._doubted_s[slot] = now
                self.resend_view(slot)  # it answers if it has newer information
                self._send(slot, LetterKind.PING)

    def give_up(self, peers: Container[int]) -> None:
        """Closes exchanges that can only fail: a peer has left, another process fills its slot, or their attempt is over."""
        for (ticket, peer), pact in self._pacts.items():
            if peer in peers and pact.outcome is None:
                pact.close()
                self._decline(ticket, peer)

    def _payload(self, letter: Letter) -> None:
        ticket, peer = letter.ticket, letter.sender
        pact = self._pacts.get((ticket, peer))
        if pact is None:
            kept = sum((early.fragment, other) == (ticket.fragment, peer) for early, other in self._early)
            if self._may_be_announced(ticket, peer) and kept < MOST_EARLY:
                self._early[ticket, peer] = letter
            else:
                self._decline(ticket, peer)
        elif pact.outcome is not None:
            self._decline(ticket, peer)
        elif letter.view != pact.view or letter.body.numel() != pact.size:
            pact.close()
            self._decline(ticket, peer)
        elif pact.sound is not None and not pact.sound(letter.body):
            # Before the COMMIT, without which the other end cannot count it either: so the mean of all does not move.
            pact.close(Outcome.DECLINED)
            self._decline(ticket, peer)
        else:
            pact.received = letter
            self._commit(ticket, peer, pact)

    def _may_be_announced(self, ticket: Ticket, peer: int) -> bool:
        """Whether an exchange that is not announced may still be."""
        if ticket.round != self.round:
            return ticket.round > self.round
        return peer in self._planned and (ticket, peer) not in self._over

    def _answer(self, letter: Letter) -> None:
        pact = self._pacts.get((letter.ticket, letter.sender))
        if letter.kind == LetterKind.DECLINE and letter.ticket.round == self.round and letter.round > self.round:
            self.passed = True
        if pact is None or pact.outcome is not None:
            return
        if letter.kind == LetterKind.DECLINE:
            pact.close()
        else:
            pact.confirmed = True
            self._conclude(letter.sender, pact)

    def _commit(self, ticket: Ticket, peer: int, pact: _PeerExchange) -> None:
        """Sends the COMMIT once one payload is sent and the other received."""
        if pact.posted_s is not None and pact.received is not None and not pact.committed:
            pact.committed = True
            self._send(peer, LetterKind.COMMIT, ticket)
            self._conclude(peer, pact)

    def _conclude(self, peer: int, pact: _PeerExchange) -> None:
        if pact.committed and pact.confirmed:
            pact.outcome = Outcome.MADE
            if self.limit_bytes is None and pact.received is not None:  # the slot's next process must know it at once
                self.members.progress(peer, 0, pact.received.steps)

    def _decline(self, ticket: Ticket, peer: int) -> None:
        self._send(peer, LetterKind.DECLINE, ticket)
        self.tell(peer)

    def _send(self, peer: int, kind: LetterKind, ticket: Ticket = NO_TICKET, body: Tensor | None = None) -> None:
        letter = Letter(kind, self.me, ticket, self._view, max(self.round, 0), self.steps)
        self.outbox.append(Outgoing(peer, letter if body is None else letter._replace(body=body)))
