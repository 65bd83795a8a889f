"""A process of the virtual network whose rule needs everyone: its rounds are closed as real workers close them.

`proposed` and `committed` of `gossamer.transport.elastic.transport` block; here the same decisions are taken as the letters come.
"""

import math
import struct
from collections.abc import Sequence

from torch import Tensor

from faulty_network.participant import LAYOUT, LOCAL_STEPS, NUMEL, KeptState, Participant
from gossamer.codecs import exact
from gossamer.rounds.exchange import Exchange, begin
from gossamer.rounds.setup import Part, Setup
from gossamer.rounds.sharing import first_sharing
from gossamer.transport.contract import IncompleteError, Ticket
from gossamer.transport.elastic.closing import Closing, Proposal
from gossamer.transport.elastic.core import Outgoing
from gossamer.transport.elastic.members import Members
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter, body_of
from gossamer.tree import leaves, map_leaves, refill

_VECTOR = struct.Struct(f"<{NUMEL}d")


class Averager(Participant):
    """A process whose rule takes a mean over everyone."""

    _exchange: Exchange | None = None
    _waits = False
    """Whether its local phase is over, and the update of its round is not made."""
    _tried = -1
    """The last attempt of this round that it has taken part in."""

    def close(self) -> None:
        """Says goodbye for good, and ends."""
        if self.listens and not self.ended:
            self.members.progress(self.members.me, self.members.limits.rounds)
        super().close()

    def take_place(self, members: Members, x: float, after: int) -> None:
        """See `Gossiper.take_place`; its rounds are closed by a leader."""
        plan = self.plan
        self.closing = Closing(members, limit_s=plan.limit_s, beat_s=plan.beat_s)
        self.sharing = first_sharing(plan.slots) if plan.constant_batch else None
        super().take_place(members, x, after)
        self.core.limit_bytes = 1 << 10

    def _outbox(self) -> list[Outgoing]:
        outbox = super()._outbox() + self.closing.outbox
        self.closing.outbox.clear()
        return outbox

    def _heard(self, letter: Letter) -> None:
        if letter.kind in (LetterKind.REPORT, LetterKind.PROPOSAL, LetterKind.CLOSED):
            self.closing.receive(letter, self.network.now)

    def _watch(self, now: float) -> None:
        self.core.wait_for(self.closing.awaited)
        self.core.tick(now)
        self.closing.tick(now)

    def _enter(self, round: int) -> None:
        if self._must_end(round):
            return
        if self.sharing is not None:
            self.sharing = self.sharing.begun()
            self._places = self.sharing.places(self.slot)
        self.core.steps = self.steps + LOCAL_STEPS
        self.core.begin_round(round, self.members.alive(round) | {self.slot}, range(self.plan.slots))
        self.closing.begin_round(round)
        self._tried = -1
        self.flush()
        self.network.after(self.network.phase_s(self.slot), self._trained, self)

    def _trained(self) -> None:
        self._drift()
        self._waits = True
        self.closing.ready(self.network.now)
        self.flush()
        self._poll()

    def _poll(self) -> None:
        if not self._waits or self.ended:
            return
        if self._waits_for is not None and self.closing.is_overtaken(self._tried):
            self.core.give_up(range(self.plan.slots))
        if self._waits_for is not None and self.core.settled(self._waits_for):
            whole, unsound = self._receive(self._waits_for)
            if self._waits_for is None and whole:
                self.closing.hold(self._tried, self.network.now)
            elif self._waits_for is None:
                self.closing.fail(self._tried, self.network.now, unsound)
        if self._waits_for is None:
            self._conclude()
        self.flush()

    def _conclude(self) -> None:
        """Makes the update, tries again, or takes another's state."""
        closing = self.closing
        if closing.closed:
            self._update()
        elif needed := closing.needed(self.network.now):
            self._fail(f"needs the message of worker {sorted(needed)}, which is not finite")
        elif self.members.replaced:
            self._must_end(closing.round)
        elif closing.left_out or self.members.alone:
            self._waits = False
            self._fetch(closing.round, closing.source)
        elif closing.proposed is not None and closing.proposed.attempt != self._tried:
            self._try(closing.proposed)

    def _try(self, named: Proposal) -> None:
        """Takes part in an attempt."""
        core, plan, round = self.core, self.plan, self.core.round
        self._tried, self._workers, self._posted_s = named.attempt, sorted(named.workers), self.network.now
        core.plan(named.workers, self.closing.history_hash)
        self._mixing = plan.topology.mixing(round, named.workers)
        if self.sharing is not None:
            self._mixing = self.sharing.weighed(self._mixing, named.workers)
        if plan.rule is None:
            ticket = Ticket(round, 0, 2 * named.attempt)
            others = [peer for peer in self._workers if peer != self.slot]
            for peer in others:
                core.expect(ticket, peer, _VECTOR.size)
            body = body_of(_VECTOR.pack(*self.x))
            for peer in others:
                core.post(ticket, peer, body, self.network.now)
            self._waits_for = ticket
        else:
            assert isinstance(self.x, Tensor)
            setup = Setup(
                plan.rule, exact(), self, Part(self.x, self.s, LAYOUT), self.network.seed, attempt=named.attempt
            )
            self._exchange = begin(setup, self._mixing, self._context(round, self._mixing))
            self._exchange.post()
            self._waits_for = self._exchange.waits_for
        self.network.after(plan.limit_s, self._tick, self)
        self._poll()

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """See `gossamer.transport.Transport`; one that lies sends NaN."""
        lies = self.slot in self.network.liars and ticket.round >= self.network.liars[self.slot]
        super().post(ticket, peer, [math.nan * frame for frame in frames] if lies else frames)

    def _receive(self, ticket: Ticket) -> tuple[bool, frozenset[int]]:
        """Whether everything has come that the mean needs, and whose messages were declined."""
        whole, unsound = True, frozenset[int]()
        if self._exchange is None:
            self._told = {peer: _VECTOR.unpack(body.numpy().tobytes()) for peer, body in self._collect(ticket).items()}
            self._told[self.slot] = tuple(self.x)
            whole = [*self._workers] == sorted(self._told)
        else:
            try:
                if not self._exchange.advance():
                    self._waits_for, self._posted_s = self._exchange.waits_for, self.network.now
                    self.network.after(self.plan.limit_s, self._tick, self)
                    return False, unsound
            except IncompleteError as error:
                whole, unsound = False, error.unsound
        self._waits_for = None
        return whole, unsound

    def _tick(self) -> None:
        self._watch(self.network.now)
        self.flush()
        self._poll()

    def _update(self) -> None:
        """Makes the update of a round that is closed."""
        closing, round, line = self.closing, self.closing.round, self.closing.history_hash
        assert closing.proposed is not None
        named = closing.proposed
        assert named.attempt == self._tried, f"{self} closes round {round} with a mean that it does not have"
        closing.advance()
        self.core.count_steps()
        if self._exchange is None:
            row = self._mixing.rows[self.slot]
            self.x = [sum(w * self._told[peer][i] for peer, w in row) for i in range(NUMEL)]
        else:
            self._exchange.finish()
        assert all(map(math.isfinite, map(float, self.x))), f"{self} has numbers that are not finite"
        self._waits = False
        self.rounds, self.made, self.finished = self.rounds + 1, self.made + 1, round + 1
        if self.sharing is None:
            self.steps += LOCAL_STEPS
            self._count(Ticket(round, 0, 2 * named.attempt))
        else:
            before, self.sharing = self.sharing, self.sharing.closed(named.workers, LOCAL_STEPS)
            self.steps = self.sharing.steps[self.slot]
            self.network.ledger.shared(
                self.uid, line, (closing.history_hash, named.workers), before, self.sharing, self._places
            )
        self.network.ledger.closed(self.uid, round, line, closing.history_hash, named, tuple(map(float, self.x)))
        self._keep(self.finished)
        if self.disk_fails:
            self._fail("cannot save a checkpoint")
        else:
            self._enter(closing.round)

    def _count(self, ticket: Ticket) -> None:
        """Enters whose steps the mean of a round contains."""
        for peer in self._workers:
            if peer != self.slot:
                steps, sender = next(
                    (letter.steps, uid)
                    for letter, uid in reversed(self._origins)
                    if (letter.ticket, letter.sender) == (ticket, peer)
                )
                self.network.ledger.counted(sender, steps - LOCAL_STEPS, steps, self.uid)

    def _collect(self, ticket: Ticket) -> dict[int, Tensor]:
        return self.core.collect(ticket)[0]

    def _keep(self, after: int) -> None:
        x, s = tuple(map(float, self.x)), map_leaves(Tensor.clone, self.s)
        self.kept = KeptState(after, x, s, self.closing.history_hash, self.sharing)

    def _round_after(self, kept: KeptState, round: int) -> int:
        self.s = refill(kept.s, map(Tensor.clone, leaves(kept.s)))
        self.closing.begin_round(kept.after, kept.line)
        self.sharing = kept.sharing
        return kept.after
