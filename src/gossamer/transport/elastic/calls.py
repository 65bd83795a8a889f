"""The requests between asynchronous workers, without any I/O; a part of each of their transports.

There are no rounds to close here. A worker that has taken its last step stays until all others have too, as they may
still fetch its message or meet it.
"""

from torch import Tensor

from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.core import Outgoing
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.sockets.header import LIFE_LIMIT, NO_TICKET, SMALL_BYTES, LetterKind
from gossamer.transport.sockets.letter import Letter


def life_of(nonce: int) -> int:
    """The number that identifies a process of a slot in messages and records, from the process's nonce.

    >>> life_of((1 << 40) + 7)
    7
    """
    return nonce % LIFE_LIMIT


class Calls:
    """The common base of `Fetches` and `Meetings`. Callers must then send the letters in `outbox`.

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
        """Whether this worker is not ready yet or is ending, and starts no new calls."""

    @property
    def life(self) -> int:
        """The number of this process."""
        return life_of(self.members.own.nonce)

    @property
    def done(self) -> set[int]:
        """The others that have announced their last step, and whose slots have no newer process."""
        return {slot for slot, nonce in self._done.items() if self.members.entries[slot].nonce == nonce}

    @property
    def alone(self) -> bool:
        """Whether no other worker trains or may come back."""
        others = self.members.with_status(MemberStatus.ALIVE, MemberStatus.JOINING)
        return all(entry.slot in self.done for entry in others)

    @property
    def awaited(self) -> frozenset[int]:
        """Peers from which a message is due, which are pinged."""
        others = self.members.with_status(MemberStatus.ALIVE, MemberStatus.JOINING) if self.over else []
        return frozenset({entry.slot for entry in others} - self.done) | self._awaited()

    def accepts(self, letter: Letter, size: int) -> bool:
        """Whether a body of this size may follow such a header."""
        return size == self._payload_bytes if letter.kind == LetterKind.MESSAGE else size <= SMALL_BYTES

    def finish(self) -> None:
        """Announces that this worker has taken its last step."""
        self.over = True
        self.tick(0.0)

    def stop(self) -> None:
        """Ends this worker at any point: its callbacks are not called any more."""
        self.closed = True

    def receive(self, letter: Letter, now: float) -> None:
        """Handles a received letter."""
        if letter.kind == LetterKind.DONE:
            if (entry := self.members.entries.get(letter.sender)) is not None:
                self._done[entry.slot] = entry.nonce
        else:
            self._called(letter, now)

    def lost(self, peer: int) -> None:
        """Notes that the connection with a peer is gone."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Repeats the announcement of the last step, as a peer that lost its connection may have missed it."""
        if self.over:
            for entry in self.members.with_status(MemberStatus.ALIVE):
                self._send(entry.slot, LetterKind.DONE)

    def _called(self, letter: Letter, now: float) -> None:
        raise NotImplementedError

    def _awaited(self) -> frozenset[int]:
        raise NotImplementedError

    def _send(self, peer: int, kind: LetterKind, ticket: Ticket = NO_TICKET, body: Tensor | None = None) -> None:
        letter = Letter(kind, self.members.me, ticket, round=self.members.own.round)
        self.outbox.append(Outgoing(peer, letter if body is None else letter._replace(steps=self.steps, body=body)))
