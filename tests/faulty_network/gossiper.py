"""A process that gossips over the virtual network: what `gossamer.run.elastic.elastic_rounds` does in a round, as events."""

import math
import struct

from torch import Tensor

from faulty_network.participant import LAYOUT, LOCAL_STEPS, NUMEL, Participant
from gossamer.codecs import exact
from gossamer.rounds.exchange import Exchange, begin
from gossamer.rounds.setup import Part, Setup
from gossamer.topologies.mixing import without
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.core import Outcome
from gossamer.transport.sockets.letter import body_of

_VECTOR = struct.Struct(f"<{NUMEL}d")


class Gossiper(Participant):
    """A process whose rule exchanges with some peers in each round."""

    _exchange: Exchange | None = None

    def _enter(self, round: int) -> None:
        if self._must_end(round):
            return
        core, plan, ticket = self.core, self.plan, Ticket(round)
        alive = self.members.alive(round) | {self.slot}
        self._mixing = plan.topology.mixing(round, alive)
        core.steps = self.steps + LOCAL_STEPS
        core.begin_round(round, alive, self._mixing.receives_from(self.slot))
        if plan.rule is None:
            for peer in self._mixing.receives_from(self.slot):
                core.expect(ticket, peer, _VECTOR.size)
        else:
            assert isinstance(self.x, Tensor)
            setup = Setup(plan.rule, exact(), self, Part(self.x, self.s, LAYOUT), self.network.seed)
            self._exchange = begin(setup, self._mixing, self._context(round, self._mixing))
        self.flush()
        self.network.after(self.network.phase_s(self.slot), lambda: self._trained(ticket), self)

    def _trained(self, ticket: Ticket) -> None:
        self._drift()
        self.steps += LOCAL_STEPS
        self._posted_s, self._waits_for = self.network.now, ticket
        if self._exchange is None:
            self._sent = tuple(map(float, self.x))
            body = body_of(_VECTOR.pack(*self._sent))
            for peer in self._mixing.sends_to(self.slot):
                self.core.post(ticket, peer, body, self.network.now)
        else:
            self._exchange.post()
            assert self._exchange.sent is not None and isinstance(self._exchange.sent.message, Tensor)
            self._sent = tuple(self._exchange.sent.message.tolist())
        self.flush()
        self.network.after(self.plan.limit_s, self._tick, self)
        self._poll()

    def _tick(self) -> None:
        self.core.tick(self.network.now)
        self.flush()
        self._poll()

    def _poll(self) -> None:
        """Ends the round, once its exchanges have ended."""
        ticket = self._waits_for
        if ticket is None or self.ended or not self.core.settled(ticket):
            return
        self._waits_for = None
        row = self._mixing.rows[self.slot]
        if self._exchange is None:
            received = {peer: _VECTOR.unpack(body.numpy().tobytes()) for peer, body in self._collect(ticket).items()}
            received[self.slot] = self._sent
            lost = [peer for peer, _ in row if peer not in received]
            moved = [
                sum(w * (received[peer][i] - self._sent[i]) for peer, w in row if peer in received)
                for i in range(NUMEL)
            ]
            self.x = [sum(w * received[peer][i] for peer, w in without(row, self.slot, lost)) for i in range(NUMEL)]
            off = max(abs(x - y - z) for x, y, z in zip(self.x, self._sent, moved, strict=True))
            assert off < 1e-6 * (1 + abs(self.x[0])), f"{self} moves by other than its pulls in {ticket}"
        else:
            assert self._exchange.advance()
            self._exchange.finish()
        assert all(map(math.isfinite, map(float, self.x))), f"{self} has numbers that are not finite"
        self.rounds, self.finished = self.rounds + 1, ticket.round + 1
        self._keep(self.finished)
        if self.disk_fails:
            self._fail("cannot save a checkpoint")
            return
        round = self.core.next_round()
        if round > self.finished + self.plan.rejoin_rounds and round < self.network.last_round:
            self._fetch(round)
        else:
            self._enter(round)

    def _collect(self, ticket: Ticket) -> dict[int, Tensor]:
        payloads, outcomes = self.core.collect(ticket)
        weights, ledger = dict(self._mixing.rows[self.slot]), self.network.ledger
        for peer, outcome in outcomes.items():
            sender, pull = None, ()
            if outcome is Outcome.MADE:
                body = payloads[peer]
                letter, sender = next(pair for pair in reversed(self._origins) if pair[0].body is body)
                theirs = _VECTOR.unpack(body.numpy().tobytes())
                pull = tuple(weights[peer] * (a - b) for a, b in zip(theirs, self._sent, strict=True))
                self.made += 1
                ledger.counted(sender, letter.steps - LOCAL_STEPS, letter.steps, self.uid)
            ledger.enter(ticket, self.uid, peer, outcome, sender, pull)
        return payloads
