"""How a worker of gossip without waiting gets the newest message of a peer: it asks, and the peer answers while it trains.

    worker -> peer   FETCH
    peer -> worker   MESSAGE   its newest one; its ticket has the version, which counts the messages of a slot, and the life of
                               the process that has published it
                     REFUSE    it has published none yet

The answer is sent by the threads of the connection, so nobody waits for anybody's training.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.calls import Calls
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.sockets.header import LIFE_LIMIT, LetterKind
from gossamer.transport.sockets.letter import Letter


class Fetched(NamedTuple):
    """A message that has come."""

    version: int
    life: int
    """Of the process that has published it."""
    steps: int
    """Inner steps of the slot of that process that it contains."""
    payload: Tensor


class Fetches(Calls):
    """The messages that a worker publishes and fetches.

    Args: `limit_s` is how long it waits for an answer.
    Cost: the newest message of this worker, and those that have come and were not taken.
    """

    def __init__(self, members: Members, payload_bytes: int, *, limit_s: float) -> None:
        super().__init__(members, payload_bytes)
        self._limit_s = limit_s
        self._newest: tuple[int, Tensor] | None = None
        self._since_s: dict[int, float] = {}
        self._came: dict[int, Fetched] = {}
        self.took_s = 0.0
        """How long the answer took that came last."""

    def publish(self, version: int, payload: Tensor, steps: int = 0) -> None:
        """From now on this message is the newest, which contains so many inner steps of this worker's slot."""
        self._newest, self.steps = (version, payload), steps

    def ask(self, peers: Iterable[int], now: float) -> None:
        """Asks these peers for their newest messages; those that are not alive have none."""
        alive = {entry.slot for entry in self.members.with_status(MemberStatus.ALIVE)}
        for peer in peers:
            if peer in alive:
                self._since_s[peer] = now
                self._send(peer, LetterKind.FETCH)

    @property
    def pending(self) -> bool:
        """Whether an answer may still come."""
        return bool(self._since_s)

    def take(self) -> dict[int, Fetched]:
        """The messages that have come, by peer; forgets what was asked."""
        came, self._came = self._came, {}
        self._since_s.clear()
        return came

    def lost(self, peer: int) -> None:
        """See `Calls`."""
        self._since_s.pop(peer, None)

    def tick(self, now: float) -> None:
        """See `Calls`; gives up what has taken too long."""
        super().tick(now)
        for peer in [peer for peer, since_s in self._since_s.items() if now >= since_s + self._limit_s]:
            del self._since_s[peer]

    def _called(self, letter: Letter, now: float) -> None:
        peer = letter.sender
        if letter.kind == LetterKind.FETCH and self._newest is not None:
            version, payload = self._newest
            self._send(peer, LetterKind.MESSAGE, Ticket(version, self.life), payload)
        elif letter.kind == LetterKind.FETCH:
            self._send(peer, LetterKind.REFUSE)
        elif peer in self._since_s:  # else it comes too late, or was never asked for
            self.took_s = now - self._since_s.pop(peer)
            version, life, _ = letter.ticket
            if letter.kind == LetterKind.MESSAGE and 0 < version <= self.members.limits.rounds and life < LIFE_LIMIT:
                self._came[peer] = Fetched(version, life, letter.steps, letter.body)

    def _asked(self) -> frozenset[int]:
        return frozenset(self._since_s)
