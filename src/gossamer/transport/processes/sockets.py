"""One worker per process over encrypted connections: the counterpart of a process group for runs with keys.

gloo and NCCL cannot encrypt. So where a run has keys, each pair of workers has one connection of ours
(`gossamer.transport.sockets`), opened by the worker of the higher number. No departure is tolerated: a message counts
on arrival, without the COMMIT of an elastic run, and a lost connection fails all waits on it. Waits and the first
failure are on the notice board in the store of the run, as over a process group.

An unannounced payload stays in its connection, whose reader pauses: a worker that is ahead of its peers costs them no
memory.
"""

import contextlib
import queue
import secrets
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gossamer.errors import PeerError, RefusedError
from gossamer.layout import Reused
from gossamer.transport import wire
from gossamer.transport.contract import Delivery, Sound, Ticket
from gossamer.transport.elastic.ask import View, show
from gossamer.transport.elastic.members import MemberStatus, SlotEntry, is_process
from gossamer.transport.processes.board import Cause, cause_of
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.waiting import RoundTransport, TicketState, Way, grace
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import CLOSED, Endpoint, Owner, PeerConnection, finish_together
from gossamer.transport.sockets.header import LIFE_LIMIT, WATCHER, LetterKind, Limits, called
from gossamer.transport.sockets.letter import Letter
from gossamer.transport.sockets.listener import Arrival, ConnectionLimit, Refusals

_AGAIN_S = 0.1
"""Pause after a failed connection."""
_PARTING_S = 5.0
"""How long the others have to read this worker's goodbye."""


class _Peer(NamedTuple):
    """The state of another worker."""

    connection: PeerConnection
    arrivals: "queue.SimpleQueue[Channel]"
    """The connection opened by the peer."""


class SocketTransport(RoundTransport[TicketState]):
    """The transport of this process over our own connections; see `gossamer.transport.contract.Transport`.

    Args:
        member: this process's worker, the device of collected frames, and the store of the notice board.
        endpoint: where this process listens.
        addresses: where each worker listens.
    Raises: PeerError for an invalid address.

    Cost: no copy of a message that is one contiguous frame, one of any other, and those between a device and the host.
        Two threads per peer.
    """

    def __init__(self, member: Member, endpoint: Endpoint, addresses: Sequence[object]) -> None:
        super().__init__(member, endpoint.timeout_s, TicketState)
        me = member.worker
        for worker, one in enumerate(addresses):
            if not one or not is_process(one):
                raise PeerError(
                    f"worker {worker} published no address ({one!r:.60}); install the same gossamer version everywhere"
                )
        self._endpoint, self._addresses = endpoint, [str(one) for one in addresses]
        self._closed = False
        self._lost: dict[int, str] = {}
        """Why the connection with each lost worker is gone."""
        self._rounds = dict.fromkeys(range(member.workers), 0)
        """The newest round of each worker's messages."""
        self._began_s: dict[int, float] = {}
        """The time at which the header of each peer's current message was read."""
        self._nonce = secrets.randbelow(LIFE_LIMIT)
        self._refusals, self._guests = Refusals(), ConnectionLimit()
        most = LIFE_LIMIT - 1  # tighter bounds apply once the exchange is announced (`_accepts`)
        self._owner = Owner(
            me,
            endpoint,
            Limits(member.workers, most, most, most),
            self._accepts,
            self._heard,
            self._gone,
            self._refusals,
            self._left,
            Reused(sys.maxsize).take,  # touching fresh memory costs as much as a transfer over loopback
        )
        arrivals = {peer: queue.SimpleQueue[Channel]() for peer in range(member.workers) if peer != me}
        self._peers = {peer: _Peer(self._connection(peer, came), came) for peer, came in arrivals.items()}
        self._listener = endpoint.listen(self._arrived, self._refusals)

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes; its bytes are read from now on.

        Raises: TransportError when the message would be larger than `wire.LIMIT_BYTES`.
        """
        wire.frames_bytes(like)
        with self._news:
            exchange = self._exchanges[ticket]
            assert peer not in exchange.likes, (ticket, peer)
            exchange.likes[peer] = tuple(like)
            self._begin(exchange, "from", peer)
            self._news.notify_all()  # its reader may wait for this

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Starts sending; the frames must stay unchanged until `ready(ticket)`."""
        exchange = self._exchanges[ticket]
        payload = self._post(exchange, frames).payload
        with self._news:
            self._rounds[self.worker] = max(self._rounds[self.worker], ticket.round)
            self._begin(exchange, "to", peer)
        self._peers[peer].connection.send(
            Letter(LetterKind.PAYLOAD, self.worker, ticket, round=ticket.round, body=payload)
        )

    def broadcast(self, data: Tensor) -> None:
        """Overwrites flat bytes in host memory with those of worker 0, before the first exchange. Raises: as `wait`."""
        # A leg that no exchange uses: worker 0 may post its first message before another has received this.
        ticket = Ticket(0, leg=2)
        for peer in self._peers if self.worker == 0 else (0,):
            if self.worker == 0:
                self.post(ticket, peer, [data])
            else:
                self.expect(ticket, peer, [data])
        self.wait(ticket)
        for frames in self.collect(ticket).values():
            data.copy_(frames[0])

    def close(self, *, at_once: bool = False) -> None:
        """Ends all connections, once the others have read what is queued, or `at_once`. A second call does nothing."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            self._news.notify_all()  # wakes readers that wait for an announcement
        self._listener.close()
        self._listener.hang_up()
        self._guests.close()
        limit_s = 0.0 if at_once else min(_PARTING_S, self._endpoint.timeout_s)
        finish_together([peer.connection for peer in self._peers.values()], limit_s)
        for peer in self._peers.values():
            while not peer.arrivals.empty():  # it came when this process had given it up
                peer.arrivals.get().close()
        self._exchanges.clear()

    # --- the connections ----------------------------------------------------------------------------------------------

    def _connection(self, peer: int, arrivals: "queue.SimpleQueue[Channel]") -> PeerConnection:
        endpoint = self._endpoint

        def dialled() -> Channel:
            deadline = time.monotonic() + endpoint.timeout_s
            while True:
                try:
                    return endpoint.dial(self._addresses[peer], self.worker, peer)
                except (RefusedError, ConnectionRefusedError):  # a retry would fail too
                    raise
                except (OSError, PeerError):  # when all dial at once, a listener drops excess connections
                    if self._closed or time.monotonic() >= deadline:
                        raise
                time.sleep(_AGAIN_S)

        def came() -> Channel:
            try:
                return arrivals.get(timeout=endpoint.timeout_s)
            except queue.Empty:
                raise TimeoutError(f"it did not connect for {endpoint.timeout_s:g} s") from None

        return PeerConnection(peer, self._owner, dialled if peer < self.worker else came)

    def _arrived(self, arrival: Arrival) -> None:
        """Handles a connection authenticated by a key of the run."""
        channel, host, number, same, whose = arrival
        channel.wait_at_most(self._endpoint.timeout_s)
        if same and number == WATCHER:
            self._guests.admit(channel, whose)
            with channel, contextlib.suppress(OSError):
                show(channel, self._view(), self._endpoint.run)
            self._guests.release(channel)
            return
        if same and number in self._peers and number > self.worker:
            # An owner of the key could open any number of them: only the first is used.
            peer = self._peers[number]
            with self._news:  # else `close`, which empties the queue, could end between, or another could arrive
                if peer.connection.channel is None and peer.arrivals.empty() and not self._closed:
                    peer.arrivals.put(channel)
                    return
        channel.close()
        self._refusals.add(
            host,
            RefusedError("bounds" if same else "other run", f"it calls itself {called(number)}, which nobody awaits"),
        )

    def _accepts(self, connection: PeerConnection, letter: Letter, size: int) -> bool:
        peer, ticket = connection.peer, letter.ticket
        if letter.kind is not LetterKind.PAYLOAD:
            return False
        with self._news:
            # The peer may be ahead of this worker. Until the exchange is announced, its bytes stay in the connection.
            self._news.wait_for(lambda: self._closed or self._expects(ticket, peer))
            if self._closed:
                raise ConnectionError(CLOSED)
            self._began_s[peer] = time.perf_counter()
            return size == wire.frames_bytes(self._exchanges[ticket].likes[peer])

    def _expects(self, ticket: Ticket, peer: int) -> bool:
        exchange = self._exchanges.get(ticket)
        return exchange is not None and ("from", peer) in exchange.pending

    def _heard(self, connection: PeerConnection, letter: Letter) -> None:
        peer, began_s, now_s = connection.peer, self._began_s[connection.peer], time.perf_counter()
        self._deliveries.append(Delivery(letter.ticket, peer, letter.body.numel(), now_s - began_s, began_s))
        with self._news:
            self._rounds[peer] = max(self._rounds[peer], letter.round)
            exchange = self._exchanges[letter.ticket]
            exchange.received[peer] = letter.body
            self._settle(exchange, {("from", peer)})

    def _left(self, connection: PeerConnection, letter: Letter) -> None:
        """Records that a message was sent."""
        with self._news:
            if letter.kind is LetterKind.PAYLOAD and (exchange := self._exchanges.get(letter.ticket)) is not None:
                self._settle(exchange, {("to", connection.peer)})

    def _gone(self, connection: PeerConnection, why: str) -> None:
        # The end of a peer after the last message may be noticed before this process has recorded that the message was
        # sent.
        if not self._closed:
            grace()
        with self._news:
            self._lost[connection.peer] = why
            self._fail(connection.peer, ConnectionError(why))

    def _begin(self, exchange: TicketState, way: Way, peer: int) -> None:
        """Records that a message is pending; the caller holds the lock."""
        exchange.pending.add((way, peer))
        if peer in self._lost:
            self._fail(peer, ConnectionError(self._lost[peer]))

    def _cause(self, peer: int, error: Exception) -> Cause:
        refused = {what.rpartition(": ")[2] for what in self._refusals.counts if what.startswith(f"worker {peer}: ")}
        return "changed" if "checksum" in refused else "foreign" if refused else cause_of(error)

    def _view(self) -> View:
        """This worker's view, for status queries."""
        now_s = time.monotonic()
        with self._news:
            ended = {j: MemberStatus.LEFT if why == CLOSED else MemberStatus.SUSPECT for j, why in self._lost.items()}
            entries = [
                SlotEntry(slot, 0, 0, ended.get(slot, MemberStatus.ALIVE), 0, address, self._rounds[slot])
                for slot, address in enumerate(self._addresses)
            ]
        moved = {slot: peer.connection.moved_s for slot, peer in self._peers.items()}
        return View(self.worker, entries, {slot: now_s - s for slot, s in moved.items() if s}, self._refusals.counts)
