"""One process of an elastic run over the virtual network: what `gossamer.run.elastic.elastic_rounds` and its transport do, as
events.

`gossamer.transport.elastic.transport` moves letters with sockets and threads, and `gossamer.run.elastic.elastic_rounds` trains
between them. Here the same decisions are taken at virtual times; the exchanges and the view of the members are the same
classes. What it does in a round stands in `faulty_network.gossiper` and, for a rule that needs everyone, in
`faulty_network.averager`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from faulty_network.connections import End, FaultyConnection
from gossamer.layout import Layout, Leaf
from gossamer.rounds.exchange import initial_state
from gossamer.rounds.sharing import Sharing
from gossamer.rules import Context, Rule
from gossamer.topologies import Topology
from gossamer.topologies.mixing import Mixing
from gossamer.transport import wire
from gossamer.transport.contract import Sound, Ticket
from gossamer.transport.elastic.core import MOST_EARLY, ElasticCore, Outgoing
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry, membership_update
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter, body_of
from gossamer.tree import Tree
from tiny import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from faulty_network.network import FaultyNetwork

NUMEL, LOCAL_STEPS = 2, 3
LAYOUT = Layout((Leaf("x", (NUMEL,), 0, NUMEL),), NUMEL)


class Arrangement(NamedTuple):
    """What all processes of a run have in common."""

    slots: int
    topology: Topology
    rule: Rule | None
    timeout_s: float
    deadline_s: float | None
    rejoin_rounds: int
    constant_batch: bool = False
    """Whether the workers of a mean over everyone share the slots of those that are dead."""
    """Local phases that a newcomer trains before anybody exchanges with it."""

    @property
    def beat_s(self) -> float:
        """How often a process looks at its clock, as in `gossamer.transport.elastic.transport`."""
        return min(1.0, self.timeout_s / 8)

    @property
    def limit_s(self) -> float:
        """How long a round may wait."""
        return min(self.timeout_s - self.beat_s, self.deadline_s or self.timeout_s)


class KeptState(NamedTuple):
    """The state of a process between two rounds, for those that ask for it."""

    after: int
    """Rounds of the run that it has behind it."""
    x: tuple[float, ...]
    s: Tree = ()
    line: int = 0
    """The hash of the rounds that were closed, see `gossamer.transport.elastic.closing`."""
    sharing: Sharing | None = None
    """How slots are shared after these rounds."""


class Participant(ABC):
    """A process; `gossamer.transport.Transport` is what its exchanges see of it."""

    keeps_frames = False

    def __init__(self, network: "FaultyNetwork", *, uid: int, nonce: int, address: str) -> None:
        self.network, self.plan, self.uid, self.nonce, self.address = network, network.plan, uid, nonce, address
        self.slot = self.worker = self.place = uid % self.plan.slots
        self.x: Any = None
        """Its parameters: plain numbers, or a tensor where a rule updates them."""
        self.links: dict[int, list[End]] = {}
        self.waiting: list[Callable[[], object]] = []
        """What has come while it was stopped."""
        self.dead = self.closed = self.stopped = self.listens = self.takes_part = self.disk_fails = False
        self.quiet = False
        self.newest: dict[int, int] = {}
        """The largest number of a letter that has come from each process."""
        self.refused = set[int]()
        """The nonces of processes whose machines have said that they run no more."""
        self.rounds = self.made = 0
        self._resumed_s = self._posted_s = 0.0
        self._waits_for: Ticket | None = None
        self._dialled_s: dict[int, float] = {}
        self._looked_s: dict[int, float] = {}
        self._blocked: tuple[float, Ticket] | None = None
        self._origins: deque[tuple[Letter, int]] = deque(maxlen=40)

    def __str__(self) -> str:
        return f"process {self.uid}" + (f" (worker {self.slot})" if self.listens or self.dead else "")

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self.dead or self.closed

    def knows(self, other: "Participant") -> bool:
        """Whether it would call the other one, or is connected with it."""
        known = self.members.with_status(MemberStatus.ALIVE, MemberStatus.SUSPECT) if self.listens else []
        known += self.core.replaced.values() if self.listens else []
        return any(entry.address == other.address for entry in known)

    def take_place(self, members: Members, x: float, after: int) -> None:
        """Fills a slot, with parameters from somebody who has so many rounds behind it."""
        plan, self.members = self.plan, members
        self.slot = self.worker = members.me
        if self.network.keyed:
            members.restrict_trust(lambda worker, slot: worker == slot)
        self.core = ElasticCore(members, timeout_s=plan.timeout_s, deadline_s=plan.deadline_s, beat_s=plan.beat_s)
        self.x = torch.full((NUMEL,), x, dtype=torch.float64) if plan.rule else [x] * NUMEL
        self.s: Tree = ()
        self.steps, self.finished, self.listens = members.own.steps, after, True
        if plan.rule is not None:
            mixing = plan.topology.mixing(0)
            self.s = initial_state(plan.rule, mixing, self.x, self._context(0, mixing))
        self.network.after(plan.beat_s * self.network.random.random(), self._house, self)
        self._keep(after)

    def begin(self) -> None:
        """Trains from the start of the run."""
        self.takes_part = True
        self.network.ledger.born(self.uid, self.slot, asked=())
        self._enter(0)

    # Joining, as in `gossamer.transport.elastic.newcomer`

    def ask(self, donor: "Participant") -> None:
        """Asks for a slot and a state."""
        network = self.network
        if donor.ended or not donor.takes_part or network.heals_in_s(self, donor):
            self._fail("cannot reach its donor")
        else:
            network.after(network.latency_s(), lambda: donor.host(self), donor)
            network.after(self.plan.timeout_s, lambda: self.listens or self.ended or self._fail("waited in vain"), self)

    def host(self, newcomer: "Participant") -> None:
        """Gives a newcomer a slot."""
        own = self.core.give_slot(newcomer.nonce, newcomer.address, self.refused)
        self.flush()
        entries, network = dict(self.members.entries), self.network
        network.after(network.latency_s(), lambda: newcomer.receive(self, own, entries), newcomer)

    def receive(self, donor: "Participant", own: SlotEntry | None, entries: dict[int, SlotEntry]) -> None:
        """The answer has come, if the donor lived long enough: asks all others which round they are in."""
        if donor.ended or own is None:
            self._fail("finds all slots filled" if own is None else "loses its donor")
        elif not self.ended:
            self.take_place(Members(limits(self.plan.slots), own.slot, entries.values()), 0.0, 0)
            self.network.note(f"{self} has been given the slot")
            self.core.spread(ask=True)
            self.flush()
            self._look(self.network.now)

    def _look(self, since_s: float) -> None:
        """Waits until somebody has said which round the others are in."""
        core, waited_s = self.core, self.network.now - since_s
        if core.was_contacted and (core.contacted_by_all or waited_s >= 4 * self.plan.beat_s):
            self._fetch(self.members.newest_round + 1)
        elif waited_s >= self.plan.timeout_s:
            self._fail("is answered by nobody")
        else:
            self.network.after(0.1, lambda: self._look(since_s), self)

    # The transport, as in `gossamer.transport.elastic.transport`

    def flush(self) -> None:
        """Sends what the core wants to send."""
        for peer, letter in self._outbox():
            entry = self.members.entries.get(peer)
            if self.closed or entry is None:
                continue
            ends = self._ends_to(peer)
            if not ends and entry.address:
                ends = [self._dial(entry)]
            if ends:
                known = [end for end in ends if end.nonce is not None]
                (known or ends)[-1].send(letter)

    def _outbox(self) -> list[Outgoing]:
        """Takes what shall be sent."""
        outbox, self.core.outbox = self.core.outbox, []
        return outbox

    def accept(self, end: End) -> None:
        """Somebody has dialled."""
        self._add(end)

    def may_read(self, letter: Letter) -> bool:
        """Whether it is known how large such a payload is."""
        return self.closed or letter.kind != LetterKind.PAYLOAD or self.core.knows(letter.ticket)

    def take(self, end: End, letter: Letter) -> None:
        """A letter has come."""
        if self.ended or end.over:
            return
        if not self.core.accepts(letter, letter.body.numel()):
            end.connection.break_off("both")
            return
        if letter.kind == LetterKind.PAYLOAD:
            self._origins.append((letter, end.connection.processes[1 - end.side].uid))
        end.nonce = self.core.receive(letter, self.network.now, end.nonce)
        self._look_for_claimed()
        if not self.core.is_filled_by(end.peer, end.nonce):
            end.send(self._greeting())
        else:
            self._heard(letter)
        self.flush()
        self._poll()

    def _heard(self, letter: Letter) -> None:  # noqa: B027 - gossip needs no more
        """Takes a letter in that the core has seen already."""

    def lost(self, end: End) -> None:
        """A connection is gone, and this end notices it."""
        if end.over or self.ended:
            return
        end.over = True
        ends = self.links.get(end.peer, [])
        if end in ends:
            ends.remove(end)
        entry = self.members.entries.get(end.peer)
        if entry is not None and self.core.is_filled_by(end.peer, end.nonce) and not self._ends_to(end.peer):
            self.core.lost(end.peer)
        else:
            self.core.resend_view(end.peer)
        self.flush()
        self._poll()

    def _ends_to(self, slot: int) -> list[End]:
        return [end for end in self.links.get(slot, []) if self.core.is_filled_by(slot, end.nonce)]

    def _look_for_claimed(self) -> None:
        claims, self.core.claims = self.core.claims, []
        for entry in claims:
            found = any(end.nonce == entry.nonce for end in self.links.get(entry.slot, []))
            waited_s = self.network.now - self._looked_s.get(entry.slot, -1e9)
            if found or not entry.address or waited_s < self.plan.beat_s:
                continue
            self._looked_s[entry.slot] = self.network.now
            if entry.slot == self.slot:
                self.network.after(
                    2 * self.network.latency_s(), lambda entry=entry: self._look_for_namesake(entry), self
                )
            else:
                self._dial(entry).nonce = entry.nonce

    def _look_for_namesake(self, entry: SlotEntry) -> None:
        there = self.network.process_at(entry.address)
        if there is not None and not there.closed and not self.network.heals_in_s(self, there):
            self.members.replaced = True
        else:
            self.members.outbid(entry)
            self.core.spread()
        self.flush()
        self._poll()

    def _dial(self, entry: SlotEntry) -> End:
        self._dialled_s[entry.slot] = self.network.now
        target = next(p for p in self.network.processes if p.address == entry.address)
        end = FaultyConnection(self.network, self, target, entry.slot).ends[0]
        self._add(end)
        return end

    def _add(self, end: End) -> None:
        self.links.setdefault(end.peer, []).append(end)
        end.send(self._greeting())

    def _greeting(self) -> Letter:
        body = body_of(membership_update(self.members.entries))
        return Letter(LetterKind.MEMBERSHIP, self.slot, round=max(self.core.round, 0), body=body)

    def _house(self) -> None:
        if self.closed:
            return
        now, beat_s = self.network.now, self.plan.beat_s
        self._watch(now)
        for entry in self.members.with_status(MemberStatus.SUSPECT):
            ends, waited_s = self._ends_to(entry.slot), now - self._dialled_s.get(entry.slot, -1e9)
            if entry.address and not ends and waited_s >= 2 * beat_s:
                self._dial(entry)
            elif ends:
                self.core.tell(entry.slot)
        for entry in self.core.replaced.values():
            waited_s = now - self._dialled_s.get(entry.slot, -1e9)
            if waited_s >= self.plan.timeout_s and entry.nonce not in self.refused:
                self._dial(entry).nonce = entry.nonce
        self.flush()
        self._poll()
        self.network.after(beat_s, self._house, self)

    def _watch(self, now: float) -> None:
        """Looks at the time."""
        self.core.tick(now)

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        """See `gossamer.transport.Transport`."""
        self.core.expect(ticket, peer, wire.frames_bytes(like))

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """See `gossamer.transport.Transport`."""
        self.core.post(ticket, peer, wire.pack_frames(frames).clone(), self.network.now)

    def ready(self, ticket: Ticket) -> bool:
        """See `gossamer.transport.Transport`."""
        return self.core.settled(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Never needed: a process is only asked to continue when it can."""
        raise AssertionError(f"{self} would block for {ticket}")

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """See `gossamer.transport.Transport`."""
        return {peer: [body.view(torch.float64)] for peer, body in self._collect(ticket).items()}

    def close(self) -> None:
        """Says goodbye and ends."""
        if self.listens and not self.ended:
            self.members.declare(MemberStatus.LEFT)
            self.core.spread()
            self.flush()
            for end in [end for ends in self.links.values() for end in ends]:
                end.connection.finish(end.side)
        self.closed, self.listens = True, False

    # Its life

    def crash(self, *, quiet: bool) -> None:
        """Ends without a word; `quiet` lets nobody notice by itself, as when a machine loses its power."""
        self.dead, self.quiet, self.listens = True, quiet, False
        for connection in self.network.connections:
            if self in connection.processes:
                side = connection.processes.index(self)
                connection.break_off("nobody" if quiet else ("listener", "dialler")[side])

    def proceed(self) -> None:
        """Continues after it was stopped."""
        self.stopped, self._resumed_s = False, self.network.now
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            if not self.ended:
                act()

    def check(self) -> None:
        """What must hold after each event."""
        if not self.takes_part or self.ended:
            return
        assert not self.core.outbox, f"{self} keeps letters"
        assert self.core.kept <= MOST_EARLY * self.plan.slots, f"{self} keeps {self.core.kept} payloads"
        if self._waits_for is not None:
            waited_s = self.network.now - max(self._posted_s, self._resumed_s)
            assert waited_s <= self.plan.limit_s + 0.01, f"{self} waits for {waited_s:.1f} s"

    def _fail(self, why: str) -> None:
        self.network.note(f"{self} {why}, and ends")
        self.close()

    @abstractmethod
    def _enter(self, round: int) -> None:
        """Begins a round, unless the run is over for this process."""

    @abstractmethod
    def _poll(self) -> None:
        """Continues as far as it needs to wait for nothing."""

    @abstractmethod
    def _collect(self, ticket: Ticket) -> dict[int, Tensor]:
        """The payloads of a ticket, which is over."""

    def _must_end(self, round: int) -> bool:
        """Whether the run is over for this process, which it leaves then."""
        if not self.members.replaced and round < self.network.last_round:
            return False
        if self.members.replaced:
            self._fail("has been replaced")
        self.close()
        return True

    def _keep(self, after: int) -> None:
        self.kept = KeptState(after, tuple(map(float, self.x)))

    def _fetch(self, round: int, source: int | None = None) -> None:
        """Takes the state of the first worker that gives it, as this one is new or has been away for long."""
        network = self.network
        for entry in sorted(self.members.with_status(MemberStatus.ALIVE), key=lambda entry: entry.slot != source):
            donor = network.process_at(entry.address)
            if donor is not None and donor.takes_part and not donor.stopped and not network.heals_in_s(self, donor):
                network.after(3 * network.latency_s(), lambda donor=donor: self._adopt(donor.kept, round), self)
                return
        self._fail("finds nobody to take a state from")

    def _adopt(self, kept: KeptState, round: int) -> None:
        for i in range(NUMEL):
            self.x[i] = kept.x[i]
        self.finished, round = kept.after, self._round_after(kept, round)
        self.steps = max(self.steps, self.members.own.steps)
        if not self.takes_part:
            network = self.network
            others = [p for p in network.living if p is not self and p.takes_part]
            asked = {p.uid for p in others if not p.stopped and not network.heals_in_s(self, p)}
            network.ledger.born(self.uid, self.slot, asked=None if any(p.slot == self.slot for p in others) else asked)
            self.members.declare(MemberStatus.ALIVE, round)
            self.core.spread()
            self.flush()
            self.takes_part = True
        self._keep(self.finished)
        self._enter(round)

    def _round_after(self, kept: KeptState, round: int) -> int:
        """The round to continue with after another worker's state, where `round` was planned."""
        round = max(round, kept.after)
        return round if self.takes_part else max(round, self.members.newest_round + 1)

    def _drift(self) -> None:
        """A local phase."""
        drift = self.network.random.gauss(0, 1)
        for i in range(NUMEL):
            self.x[i] += drift

    def _context(self, round: int, mixing: Mixing) -> Context:
        return Context(self.slot, mixing.n, round, LOCAL_STEPS, mixing.weight(self.slot), LAYOUT, LOCAL_STEPS)
