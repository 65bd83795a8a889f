"""One worker per process: point-to-point messages of torch.distributed, over gloo or NCCL; no collectives.

The behaviour of gloo (torch 2.13), by experiment, and our measures:

* `Work.is_completed()` of an `isend` or `irecv` stays false until `wait()` is called, and there is no future. A `wait`
  that times out closes the connections to all peers, healthy ones too. So the transfers with each peer of a ticket have
  a thread in a `wait` without a timeout, sequentially: posted data has mostly been sent by the time the answer arrives.
  This costs no processor time and does not block the interpreter; our deadline is on a condition variable, notified
  once, when all have ended or one has failed.
* A message larger than the memory it is received into ends the receiving process. So the tag of a payload depends on its
  size. The tag of the header does not, so that a header can always be read and a mismatch reported.
* To touch fresh memory costs as much as a transfer over loopback (64 MB: 71 instead of 42 ms). So receive buffers are
  reused once no view of them is left.
* When a peer is killed, transfers with it that have not begun fail within milliseconds, and those with other peers
  continue. But a transfer in the middle of its bytes waits forever. So there is a lifeline to each peer, a receive that
  is never answered: it fails when the connection does, and then we end all transfers with that peer.
* When a peer is stopped, there is no event until our deadline.
* A thread that comes back from C++ while Python shuts down aborts the process ("terminate called without an active
  exception"). So before `main` returns, `hang_up` closes all connections, by a `wait` that times out, and joins the threads.
  A `wait` that ends because its peer has left closes no other connection: the others are closed one by one.

On NCCL tags do not exist, and each transfer waits on the device for those before it. So transfers start only at the
first `ready` or `wait` of a ticket, as one batch: call `ready` once after the last post, and start tickets in the same
order on all workers.
"""

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import PeerError, TransportError, first_line
from gossamer.layout import Reused
from gossamer.transport import wire
from gossamer.transport.contract import Delivery, Reduce, Sound, Ticket
from gossamer.transport.processes.backend import backend_of, block, follow, hold, poll, whole_of
from gossamer.transport.processes.board import Cause, cause_of
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import THREADS
from gossamer.transport.processes.waiting import PackedMessage, RoundTransport, TicketState, Way, grace


class _ChangedError(TransportError):
    """A payload whose checksum is wrong."""


class _Message(NamedTuple):
    """A message to or from a peer; its memory is kept alive as long as it may be read or written."""

    way: Way
    peer: int
    header: wire.Header
    """What is sent, or expected."""
    raw: Tensor
    """The bytes of the header."""
    payload: Tensor

    def received_header(self) -> wire.Header:
        """The header of a received message. Raises: TransportError for one that is not as expected."""
        header = wire.decode_header(self.raw.cpu().numpy().tobytes(), self.peer)
        wire.check_header(header, self.header)
        return header

    def check_payload(self, header: wire.Header) -> None:
        """Raises: TransportError for a payload that has another checksum than its header."""
        if header.checksum is not None and header.checksum != (computed := wire.checksum(self.payload)):
            raise _ChangedError(
                f"the {header.payload_bytes} bytes of worker {header.sender} in {header.ticket} changed in transit, checksum "
                f"{computed:016x} instead of {header.checksum:016x}; a network card or memory is faulty: test both machines"
            )


_Started = tuple[list[_Message], list[dist.Work]]
"""Messages in flight, and their transfers: of one message its header and its payload; on NCCL one of all."""


def _sides(messages: Sequence[_Message]) -> set[tuple[Way, int]]:
    return {(one.way, one.peer) for one in messages}


class _TicketState(TicketState):
    def __init__(self) -> None:
        super().__init__()
        self.started: dict[int, deque[_Started]] = {}
        """Messages by the peer of the thread that waits for them, in order."""
        self.batch: list[_Message] = []
        """Messages that start together."""


class GroupTransport(RoundTransport[_TicketState]):
    """The transport of this process over a process group of all workers; see `gossamer.transport.contract.Transport`.

    Args:
        member: this process's worker, the device of collected frames, and the store for the notice board, which should
            outlive all workers.
        run: 64-bit digest of the configuration; messages of another run are refused.
        timeout_s: how long `wait` waits.
        checksum: whether each payload carries a checksum; only measurements of links omit it.
        group: the process group; the default one when None. `hang_up` closes its connections.

    Cost: no copy of a message that is one contiguous frame, one copy of any other; with gloo and a device, one copy each
        way between device and host. One reused thread per peer of a ticket, and one per peer.
    """

    def __init__(
        self,
        member: Member,
        *,
        run: int,
        timeout_s: float,
        checksum: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(member, timeout_s, _TicketState)
        self._run, self._checksum, self._group = run, checksum, group
        self._batched = backend_of(group) == "nccl"
        self._finish = poll if self._batched else block
        self._carrier = member.device if self._batched else torch.device("cpu")
        self._memory = Reused(sys.maxsize)
        self._lifelines: set[int] = set()

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes; its transfer can begin from now on.

        Raises: TransportError when the message would be larger than `wire.LIMIT_BYTES`.
        """
        exchange, size = self._exchanges[ticket], wire.frames_bytes(like)
        assert peer not in exchange.likes, (ticket, peer)
        header = wire.Header(self._run, ticket, peer, size, 0 if self._checksum else None)
        raw = torch.empty(wire.HEADER_BYTES, dtype=torch.uint8, device=self._carrier)
        exchange.likes[peer], exchange.received[peer] = tuple(like), self._allocate(size)
        self._begin(exchange, _Message("from", peer, header, raw, exchange.received[peer]))

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Starts sending; the frames must stay unchanged until `ready(ticket)`.

        Raises: TransportError when the message is larger than `wire.LIMIT_BYTES`.
        """
        exchange = self._exchanges[ticket]
        _, payload, checksum = self._post(exchange, frames)
        header = wire.Header(self._run, ticket, self.worker, payload.numel(), checksum)
        raw = torch.frombuffer(bytearray(wire.encode_header(header)), dtype=torch.uint8).to(self._carrier)
        self._begin(exchange, _Message("to", peer, header, raw, payload))

    def close(self) -> None:
        """Forgets all tickets; transfers in flight end with the process group (`hang_up`), which may still be in use."""
        self._exchanges.clear()

    def _packed(self, frames: tuple[Tensor, ...]) -> PackedMessage:
        packed = wire.pack_frames(frames, self._allocate if self._member.device == self._carrier else None)
        payload = packed if self._batched else wire.on_host(packed)
        return PackedMessage(frames, payload, wire.checksum(payload) if self._checksum else None)

    def _allocate(self, size: int) -> Tensor:
        if self._batched:
            return torch.empty(size, dtype=torch.uint8, device=self._carrier)
        device = self._member.device
        return self._memory.take(size) if device.type == "cpu" else wire.host_memory(size, device)

    def _begin(self, exchange: _TicketState, message: _Message) -> None:
        """Starts a message, or on NCCL collects it for later."""
        pending = message.way, message.peer
        assert message.peer != self.worker and pending not in exchange.pending, (message.header.ticket, pending)
        if message.peer not in self._lifelines and not self._batched:
            self._lifelines.add(message.peer)
            # The lifeline fails when the connection is lost, which gloo does not report to a thread that waits for a
            # message.
            threading.Thread(target=self._hold_lifeline, args=(message.peer,), name=THREADS, daemon=True).start()
        with self._news:
            exchange.pending.add(pending)  # before it starts, as a lifeline fails what is pending
        exchange.batch.append(message)
        if not self._batched:
            self._launch(exchange)

    def _launch(self, exchange: _TicketState) -> None:
        """Starts the collected messages, and a thread that waits for their end."""
        messages, exchange.batch = exchange.batch, []
        if not messages:
            return
        try:
            started = messages, self._transfers(messages)
        except RuntimeError as error:  # gloo raises at once when the connection was lost before
            self._settle(exchange, _sides(messages), error)
            return
        peer = min(one.peer for one in messages)
        with self._news:
            if peer in exchange.started:  # its thread takes this too: waking another takes as long as a small message
                exchange.started[peer].append(started)
                return
            exchange.started[peer] = deque([started])
        follow(functools.partial(self._follow, exchange, peer))

    def _transfers(self, messages: Sequence[_Message]) -> list[dist.Work]:
        group, device, works = whole_of(self._group), messages[0].payload.device, list[dist.Work]()
        # As in torch's `batch_isend_irecv`, which accepts only groups of torch's registry.
        coalesces = self._batched and group._get_backend(device).supports_coalescing
        if coalesces:
            group._start_coalescing(device)
        for one in messages:
            begin, rank = group.recv if one.way == "from" else group.send, self._member.rank_of(one.peer)
            tags = wire.tags(self._run, one.header.ticket, one.payload.numel(), self._member.part)
            works += [
                begin([part], rank, tag) for part, tag in zip((one.raw, one.payload), tags, strict=True) if part.numel()
            ]
        return [group._end_coalescing(device)] if coalesces else works

    def _follow(self, exchange: _TicketState, peer: int) -> None:
        """Waits for the messages to and from a peer, in order."""
        started: _Started | None = None
        error: Exception | None = None
        while True:
            with self._news:
                if started is not None:
                    self._settle(exchange, _sides(started[0]), error)
                if not exchange.started[peer]:
                    del exchange.started[peer]  # under the lock: later messages get a new thread
                    return
                started = exchange.started[peer].popleft()
            error = self._error_of(started)

    def _error_of(self, started: _Started) -> Exception | None:
        """Waits for messages and validates them."""
        messages, works = started
        try:
            # A payload of an unexpected size never arrives, so the header is checked first if possible.
            first = len(works) if self._batched else 1
            for work in works[:first]:
                self._finish(work)
            received = [(one, one.received_header()) for one in messages if one.way == "from"]
            began_s = time.perf_counter()
            for work in works[first:]:
                self._finish(work)
            if first < len(works):
                seconds = time.perf_counter() - began_s
                for one, _ in received:
                    self._deliveries.append(
                        Delivery(one.header.ticket, one.peer, one.payload.numel(), seconds, began_s)
                    )
            for one, header in received:
                one.check_payload(header)
        except (RuntimeError, TransportError) as error:
            return error
        return None

    def _hold_lifeline(self, peer: int) -> None:
        """Waits until the connection is lost, and then fails the transfers that gloo would leave hanging."""
        try:
            block(hold(self._member.rank_of(peer), self._group))
        except RuntimeError as error:
            grace()
            self._fail(peer, error)

    def _cause(self, peer: int, error: Exception) -> Cause:
        if not isinstance(error, TransportError):
            return cause_of(error)
        return "changed" if isinstance(error, _ChangedError) else "foreign"


def all_reduce(timeout_s: float, group: dist.ProcessGroup | None = None) -> Reduce:
    """Sums each frame over all workers in place with the backend's collective, whose order of summation is unspecified.

    Args: `group` has all workers; the default group when None.
    Raises (when called): PeerError after `timeout_s` or when a connection closes; a collective does not report which.
    Cost: a global barrier; 2(n-1)/n of the frames per worker where the backend uses a ring; over gloo, frames of a GPU are
        copied to the host and back.
    """

    whole, on_host = whole_of(group), backend_of(group) == "gloo"

    def reduce(frames: Sequence[Tensor], ticket: Ticket) -> None:
        try:
            for frame in frames:
                total = frame.cpu() if on_host else frame  # a no-op for a frame on the host
                whole.allreduce(total).wait(timedelta(seconds=timeout_s))
                if total is not frame:
                    frame.copy_(total)
        except RuntimeError as error:
            raise PeerError(
                f"the all-reduce of round {ticket.round} failed on worker {whole.rank()} "
                f'({first_line(error)}); look at the logs of the others, or set reduction = "ordered" to '
                "learn which worker fails"
            ) from error

    return reduce
