"""Waits of a process for others of its run, with timeouts that name the missing or failed ones; the common half of the
transports of runs in rounds, over a process group and over connections with keys.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from torch import Tensor

from gossamer.errors import PeerError, TransportError
from gossamer.transport import wire
from gossamer.transport.contract import Ticket, Times, Wait
from gossamer.transport.processes.board import Board, Cause, Failure, Note, blame, sentence
from gossamer.transport.processes.member import Member

_GRACE_S, _GRACES = 0.25, 25
"""How long after a lost connection a message that had arrived or left may still be recorded as complete; in pauses."""
Way = Literal["from", "to"]


def grace() -> None:
    """Gives the other threads time to record what had arrived or left when a connection was lost."""
    # One pause could end while this process is stopped, or before a busy machine has run the others; of many, some follow.
    for _ in range(_GRACES):
        time.sleep(_GRACE_S / _GRACES)


class PeerWait:
    """Waits of this process, during which it posts the awaited peers on the notice board.

    Args: `timeout_s` is the longest.
    """

    def __init__(self, member: Member, timeout_s: float) -> None:
        self._member, self._timeout_s = member, timeout_s
        self._beat_s = min(1.0, timeout_s / 8)
        self.board = Board(member.entries, member.rank, member.ranks, patience_s=min(2.0, timeout_s / 4))

    def wait(self, round: int, missing: Callable[[float], Sequence[int]]) -> None:
        """Returns once no peer is missing.

        Args: `missing` waits at most a given number of seconds, and returns the ranks still awaited.
        Raises: PeerError after the timeout, or as soon as a failure is known, naming the process that failed first if
            known.
        """
        deadline = time.monotonic() + self._timeout_s
        before: dict[int, Note] | None = None
        noted = False
        while ranks := missing(min(self._beat_s, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise self._late(round, ranks, before or {})
            self.board.post_waits(ranks)
            noted = True
            if (standing := self.board.failure()) is not None:
                raise PeerError(self._sentence(standing))
            if before is None and time.monotonic() >= deadline - 3 * self._beat_s:
                before = self.board.look(ranks)
        if noted:
            self.board.post_waits(())

    def ranks_of(self, pending: Iterable[tuple[str, int]]) -> list[int]:
        """The ranks of the workers whose messages are pending ("from"); if all have arrived, of those that have not
        received ours.
        """
        peers = [*pending]
        receives = sorted(peer for way, peer in peers if way == "from")
        return [*map(self._member.rank_of, receives or sorted(peer for _, peer in peers))]

    def failed(self, round: int, rank: int, cause: Cause) -> PeerError:
        """The error to raise when the process of this rank has failed; the first failure of the run counts."""
        return PeerError(self._sentence(self.board.claim(Failure(rank, round, self._member.rank, cause))))

    def _late(self, round: int, ranks: Sequence[int], before: Mapping[int, Note]) -> PeerError:
        """The error to raise when the deadline has passed."""
        chain = blame(self._member.rank, ranks, before, self.board.look(ranks))
        mine = Failure(chain[-1], round, self._member.rank, "silent")
        standing = self.board.claim(mine)
        return PeerError(self._sentence(standing, chain if standing == mine else []))

    def _sentence(self, failure: Failure, chain: Sequence[int] = ()) -> str:
        text = sentence(failure, self._member.rank, self._timeout_s, chain, self._member.name)
        lost = "; the launcher's store does not answer either, so another may have failed before it"
        return f"{text}{lost}" if self.board.gone else text


class PackedMessage(NamedTuple):
    """A message in the form in which it is sent, with its checksum where the transport carries one."""

    frames: tuple[Tensor, ...]
    payload: Tensor
    checksum: int | None = None


class TicketState:
    """The messages of one ticket."""

    def __init__(self) -> None:
        self.likes: dict[int, tuple[Tensor, ...]] = {}
        """Shapes and dtypes of the message of each peer."""
        self.received: dict[int, Tensor] = {}
        """The bytes of each peer's message."""
        self.pending: set[tuple[Way, int]] = set()
        self.failure: tuple[int, Exception] | None = None
        """The peer of the first message that failed, and its error."""
        self.posted: PackedMessage | None = None
        """The message posted last, which may go to further peers."""


E = TypeVar("E", bound=TicketState)


class RoundTransport(Times, Generic[E]):
    """The waits of a transport that tolerates no departure; see `gossamer.transport.contract.Transport`.

    A subclass starts the messages, and reports their end by `_settle` and a lost peer by `_fail`, from any thread.

    Args: `exchange` makes the record of a ticket.
    """

    keeps_frames = False

    def __init__(self, member: Member, timeout_s: float, exchange: type[E]) -> None:
        super().__init__()
        self.worker = member.worker
        self._member, self._patience = member, PeerWait(member, timeout_s)
        self._exchanges: defaultdict[Ticket, E] = defaultdict(exchange)
        self._news = threading.Condition()
        """The lock of the exchanges; notified when all messages of one have ended, or one has failed."""

    def ready(self, ticket: Ticket) -> bool:
        """Whether everything expected under the ticket has arrived and everything posted has been sent.

        Raises: PeerError when a peer died or runs another configuration, TransportError when bytes are not as agreed.
        """
        exchange = self._exchanges[ticket]
        self._launch(exchange)
        with self._news:
            if exchange.failure is None:
                return not exchange.pending
        peer, error = exchange.failure
        named = self._patience.failed(ticket.round, self._member.rank_of(peer), self._cause(peer, error))
        raise error if isinstance(error, TransportError) else named

    def wait(self, ticket: Ticket) -> None:
        """Returns once `ready(ticket)`.

        Raises: PeerError after the timeout, or as soon as a failure is known, naming the worker that failed first if
            known; TransportError when bytes are not as agreed.
        """
        exchange, start_s = self._exchanges[ticket], time.perf_counter()
        self._launch(exchange)
        self._patience.wait(ticket.round, lambda seconds: self._missing(exchange, seconds))
        self.ready(ticket)
        self._waits.append(Wait(ticket, start_s, time.perf_counter()))

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """The frames received under a ready ticket, by peer; forgets the ticket."""
        exchange = self._exchanges.pop(ticket, None) or TicketState()
        assert not exchange.pending and exchange.failure is None, f"{ticket} is not ready"
        return {
            peer: wire.unpack_frames(exchange.received[peer].to(self._member.device), like)
            for peer, like in sorted(exchange.likes.items())
        }

    def _post(self, exchange: E, frames: Sequence[Tensor]) -> PackedMessage:
        """The message, packed once for all its peers; it must stay unchanged."""
        before = exchange.posted
        if before is None or [*map(id, before.frames)] != [*map(id, frames)]:
            exchange.posted = before = self._packed((*frames,))
        return before

    def _packed(self, frames: tuple[Tensor, ...]) -> PackedMessage:
        return PackedMessage(frames, wire.on_host(wire.pack_frames(frames)))

    def _launch(self, exchange: E) -> None:
        """Starts what was only collected so far."""

    def _cause(self, peer: int, error: Exception) -> Cause:
        """The fault of a peer whose message failed."""
        raise NotImplementedError

    def _settle(self, exchange: TicketState, ended: set[tuple[Way, int]], error: Exception | None = None) -> None:
        """Records that messages have arrived or left, or have failed."""
        with self._news:
            exchange.pending -= ended
            if error is not None and ended and exchange.failure is None:
                exchange.failure = min(peer for _, peer in ended), error
            if not exchange.pending or exchange.failure is not None:
                self._news.notify_all()

    def _fail(self, peer: int, error: Exception) -> None:
        """Ends all that is pending with a peer whose connection is lost."""
        with self._news:
            for exchange in list(self._exchanges.values()):
                self._settle(exchange, {one for one in exchange.pending if one[1] == peer}, error)

    def _missing(self, exchange: TicketState, seconds: float) -> list[int]:
        """Waits at most `seconds`, and returns the ranks that the exchange still waits for; none once it is done or has
        failed.
        """
        with self._news:
            if self._news.wait_for(lambda: not exchange.pending or exchange.failure is not None, seconds):
                return []
            return self._patience.ranks_of(exchange.pending)
