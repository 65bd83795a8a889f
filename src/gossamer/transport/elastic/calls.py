"""What workers that wait for nobody ask of each other, without any I/O: a part of each of their transports.

There are no rounds to close here. A worker that has taken its last step stays until everybody else has too, as the others may
still want its message or meet it.
"""

from torch import Tensor

from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.core import Outgoing
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.sockets.header import LIFE_LIMIT, NO_TICKET, SMALL_BYTES, LetterKind
from gossamer.transport.sockets.letter import Letter


def life_of(nonce: int) -> int:
    """The number by which messages and records name a process that fills a slot, from the random number of the process.

    >>> life_of((1 << 40) + 7)
    7
    """
    return nonce % LIFE_LIMIT


class Calls:
    """What `Fetches` and `Meetings` have in common. Whoever calls it then sends what lies in `outbox`.

    Args:
        members: this worker's view.
        payload_bytes: of every message.
    """

    def __init__(self, members: Members, payload_bytes: int) -> None:
        self.members, self._payload_bytes = members, payload_bytes
        self.outbox: list[Outgoing] = []
        self.over = False
        """Whether this worker has taken its last step."""
        self.steps = 0
        """Inner steps of this worker's slot that its messages contain."""
        self._done: dict[int, int] = {}
        self.closed = True
        """Whether this worker is not ready yet or ends, and begins nothing new with others."""

    @property
    def life(self) -> int:
        """The number of this process."""
        return life_of(self.members.own.nonce)

    @property
    def done(self) -> set[int]:
        """The others that have said that they have taken their last step, and whose slots no other process fills since."""
        return {slot for slot, nonce in self._done.items() if self.members.entries[slot].nonce == nonce}

    @property
    def alone(self) -> bool:
        """Whether nobody is left who trains, or may come back."""
        others = self.members.with_status(MemberStatus.ALIVE, MemberStatus.JOINING)
        return all(entry.slot in self.done for entry in others)

    @property
    def awaited(self) -> frozenset[int]:
        """Those of whom something must come, so that they are asked whether they live."""
        others = self.members.with_status(MemberStatus.ALIVE, MemberStatus.JOINING) if self.over else []
        return frozenset({entry.slot for entry in others} - self.done) | self._asked()

    def accepts(self, letter: Letter, size: int) -> bool:
        """Whether a body of this size may follow such a header."""
        return size == self._payload_bytes if letter.kind == LetterKind.MESSAGE else size <= SMALL_BYTES

    def finish(self) -> None:
        """This worker has taken its last step."""
        self.over = True
        self.tick(0.0)

    def stop(self) -> None:
        """This worker ends, be it amid of something: whoever has made it is called back no more."""
        self.closed = True

    def heard(self, letter: Letter, now: float) -> None:
        """Takes a letter in."""
        if letter.kind == LetterKind.DONE:
            if (entry := self.members.entries.get(letter.sender)) is not None:
                self._done[entry.slot] = entry.nonce
        else:
            self._called(letter, now)

    def lost(self, peer: int) -> None:
        """Notes that the connection with a peer is gone."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Says again that this worker is over: who has lost a connection meanwhile has not heard it."""
        if self.over:
            for entry in self.members.with_status(MemberStatus.ALIVE):
                self._send(entry.slot, LetterKind.DONE)

    def _called(self, letter: Letter, now: float) -> None:
        raise NotImplementedError

    def _asked(self) -> frozenset[int]:
        raise NotImplementedError

    def _send(self, peer: int, kind: LetterKind, ticket: Ticket = NO_TICKET, body: Tensor | None = None) -> None:
        letter = Letter(kind, self.members.me, ticket, round=self.members.own.round)
        self.outbox.append(Outgoing(peer, letter if body is None else letter._replace(steps=self.steps, body=body)))
