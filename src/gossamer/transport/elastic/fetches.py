"""Fetching a peer's newest message in asynchronous gossip: the peer answers while it trains.

    worker -> peer   FETCH
    peer -> worker   MESSAGE   its newest one; its ticket has the version, which counts the messages of a slot, and the life of
                               the process that has published it
                     REFUSE    it has published none yet

The answer is sent by the connection's threads, so that no worker waits for another's training.
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
    """A fetched message."""

    version: int
    life: int
    """The life of the process that published it."""
    steps: int
    """Inner steps of that process's slot that it includes."""
    payload: Tensor


class Fetches(Calls):
    """The messages that a worker publishes and fetches.

    Args: `limit_s` is how long it waits for an answer.
    Cost: the newest message of this worker, and fetched ones not taken yet.
    """

    def __init__(self, members: Members, payload_bytes: int, *, limit_s: float) -> None:
        super().__init__(members, payload_bytes)
        self._limit_s = limit_s
        self._newest: tuple[int, Tensor] | None = None
        self._since_s: dict[int, float] = {}
        self._came: dict[int, Fetched] = {}
        self.took_s = 0.0
        """The seconds that the last answer took."""

    def publish(self, version: int, payload: Tensor, steps: int = 0) -> None:
        """Publishes a message, which includes `steps` inner steps of this worker's slot."""
        self._newest, self.steps = (version, payload), steps

    def ask(self, peers: Iterable[int], now: float) -> None:
        """Requests the newest messages of these peers; dead ones are skipped."""
        alive = {entry.slot for entry in self.members.with_status(MemberStatus.ALIVE)}
        for peer in peers:
            if peer in alive:
                self._since_s[peer] = now
                self._send(peer, LetterKind.FETCH)

    @property
    def pending(self) -> bool:
        """Whether an answer may still arrive."""
        return bool(self._since_s)

    def take(self) -> dict[int, Fetched]:
        """The messages received, by peer; clears the requests."""
        came, self._came = self._came, {}
        self._since_s.clear()
        return came

    def lost(self, peer: int) -> None:
        """See `Calls`."""
        self._since_s.pop(peer, None)

    def tick(self, now: float) -> None:
        """See `Calls`; gives up requests that have timed out."""
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
        elif peer in self._since_s:  # else it is too late, or was never requested
            self.took_s = now - self._since_s.pop(peer)
            version, life, _ = letter.ticket
            if letter.kind == LetterKind.MESSAGE and 0 < version <= self.members.limits.rounds and life < LIFE_LIMIT:
                self._came[peer] = Fetched(version, life, letter.steps, letter.body)

    def _awaited(self) -> frozenset[int]:
        return frozenset(self._since_s)
