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
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import PeerError, TransportError, first_line
from gossamer.layout import Reused
from gossamer.transport import wire
from gossamer.transport.contract import Delivery, Reduce, Sound, Ticket, Wait
from gossamer.transport.processes.backend import backend_of, block, follow, hold, poll, whole_of
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import THREADS
from gossamer.transport.processes.waiting import ExchangeTimes, PeerWait

GRACE_S = 0.25
"""How long after a lost connection a transfer that had completed may still be reported as complete."""
Way = Literal["from", "to"]


class ByteCount(NamedTuple):
    """Bytes sent, or received, since the start."""

    payload_bytes: int = 0
    """The frames."""
    wire_bytes: int = 0
    """The frames, the gaps between them and the headers."""

    def plus(self, frames: Sequence[Tensor], packed: int) -> "ByteCount":
        """The count after one more message."""
        payload = sum(frame.numel() * frame.element_size() for frame in frames)
        return ByteCount(self.payload_bytes + payload, self.wire_bytes + wire.HEADER_BYTES + packed)


class _ChangedError(TransportError):
    """A payload whose checksum is wrong."""


class _Landing(NamedTuple):
    """The memory for the message of one peer."""

    expected: wire.Header
    header: Tensor
    payload: Tensor
    like: tuple[Tensor, ...]

    def check_header(self) -> wire.Header:
        header = wire.decode_header(self.header.cpu().numpy().tobytes(), self.expected.sender)
        wire.check_header(header, self.expected)
        return header

    def check_payload(self, header: wire.Header) -> None:
        if header.checksum is not None and header.checksum != (found := wire.checksum(self.payload)):
            raise _ChangedError(
                f"the {header.payload_bytes} bytes of worker {header.sender} in {header.ticket} changed in transit, "
                f"checksum {found:016x} instead of {header.checksum:016x}; a network card or memory is faulty: test both machines"
            )


class _Packed(NamedTuple):
    """A message in the form in which it is sent."""

    frames: tuple[Tensor, ...]
    payload: Tensor
    checksum: int | None


class _Transfer(NamedTuple):
    """One tensor in flight."""

    way: Way
    tensor: Tensor
    rank: int
    tag: int


class _Begun(NamedTuple):
    """Messages in flight."""

    transfers: set[tuple[Way, int]]
    landings: list[_Landing]
    works: list[dist.Work]
    memory: list[_Transfer]
    """Kept alive as long as it may be read or written."""


class _Exchange:
    """The transfers of one ticket."""

    def __init__(self) -> None:
        self.landings: dict[int, _Landing] = {}
        self.pending: set[tuple[Way, int]] = set()
        self.begun: dict[int, deque[_Begun]] = {}
        """Messages by the peer of the thread that waits for them, in order."""
        self.batch: list[_Transfer] = []
        self.gathered: set[tuple[Way, int]] = set()
        """Transfers that start together; `batch` has their operations."""
        self.failure: tuple[int, Exception] | None = None
        """The peer of the first transfer that failed, and its error."""
        self.packed: _Packed | None = None
        """The message posted last, which may go to further peers."""


class GroupTransport:
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

    keeps_frames = False

    def __init__(
        self,
        member: Member,
        *,
        run: int,
        timeout_s: float,
        checksum: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.worker = member.worker
        self.sent = ByteCount()
        self.received = ByteCount()
        self._member = member
        self._run = run
        self._checksum = checksum
        self._group = group
        self._batched = backend_of(group) == "nccl"
        self._finish = poll if self._batched else block
        self._device = member.device
        self._carrier = self._device if self._batched else torch.device("cpu")
        self._patience = PeerWait(member, timeout_s)
        self._memory = Reused(sys.maxsize)
        self._exchanges: dict[Ticket, _Exchange] = {}
        self._measured = ExchangeTimes()
        self._lifelines: set[int] = set()
        self._news = threading.Condition()

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes; its transfer can begin from now on.

        Raises: TransportError when the message would be larger than `wire.LIMIT_BYTES`.
        """
        exchange = self._exchange(ticket)
        assert peer not in exchange.landings, (ticket, peer)
        size = wire.frames_bytes(like)
        expected = wire.Header(self._run, ticket, peer, size, 0 if self._checksum else None)
        header = torch.empty(wire.HEADER_BYTES, dtype=torch.uint8, device=self._carrier)
        landing = _Landing(expected, header, self._allocate(size), tuple(like))
        exchange.landings[peer] = landing
        self._begin(exchange, ticket, "from", peer, landing.header, landing.payload)

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Starts sending; the frames must stay unchanged until `ready(ticket)`.

        Raises: TransportError when the message is larger than `wire.LIMIT_BYTES`.
        """
        exchange = self._exchange(ticket)
        _, payload, checksum = exchange.packed = self._pack(frames, exchange.packed)
        raw = bytearray(wire.encode_header(wire.Header(self._run, ticket, self.worker, payload.numel(), checksum)))
        header = torch.frombuffer(raw, dtype=torch.uint8).to(self._carrier)
        self.sent = self.sent.plus(frames, payload.numel())
        self._begin(exchange, ticket, "to", peer, header, payload)

    def ready(self, ticket: Ticket) -> bool:
        """Whether everything expected under the ticket has arrived and everything posted has been sent.

        Raises: PeerError when a peer died or runs another configuration, TransportError when bytes are not as agreed.
        """
        exchange = self._exchange(ticket)
        self._launch(exchange)
        with self._news:
            if exchange.failure is None:
                return not exchange.pending
        raise self._broken(ticket, *exchange.failure)

    def wait(self, ticket: Ticket) -> None:
        """Returns once `ready(ticket)`.

        Raises: PeerError after `timeout_s`, or as soon as a failure is known, naming the worker that failed first if
            known; TransportError when bytes are not as agreed.
        """
        exchange, start_s = self._exchange(ticket), time.perf_counter()
        self._launch(exchange)
        self._patience.wait(ticket.round, lambda seconds: self._missing(exchange, seconds))
        self.ready(ticket)
        self._measured.waited.append(Wait(ticket, start_s, time.perf_counter()))

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """The frames received under a ready ticket, by peer; forgets the ticket."""
        exchange = self._exchanges.pop(ticket, None) or _Exchange()
        assert not exchange.pending | exchange.gathered and exchange.failure is None, f"{ticket} is not ready"
        frames: dict[int, list[Tensor]] = {}
        for peer, landing in sorted(exchange.landings.items()):
            self.received = self.received.plus(landing.like, landing.payload.numel())
            frames[peer] = wire.unpack_frames(landing.payload.to(self._device), landing.like)
        return frames

    def deliveries(self) -> list[Delivery]:
        """The messages received since the last call; none on NCCL, where header and payload arrive together."""
        return self._measured.deliveries()

    def waits(self) -> list[Wait]:
        """The times that `wait` blocked its caller since the last call."""
        return self._measured.waits()

    def close(self) -> None:
        """Forgets all tickets; transfers in flight end with the process group (`hang_up`), which may still be in use."""
        self._exchanges.clear()

    def _pack(self, frames: Sequence[Tensor], before: _Packed | None) -> _Packed:
        """The packed message, which must stay unchanged; it is packed, copied to the host and checksummed once for all
        its peers.
        """
        if before is not None and [*map(id, before.frames)] == [*map(id, frames)]:
            return before
        packed = wire.pack_frames(frames, self._allocate if self._device == self._carrier else None)
        payload = packed if self._batched else wire.on_host(packed)
        return _Packed((*frames,), payload, wire.checksum(payload) if self._checksum else None)

    def _exchange(self, ticket: Ticket) -> _Exchange:
        if (exchange := self._exchanges.get(ticket)) is None:
            exchange = self._exchanges[ticket] = _Exchange()
        return exchange

    def _allocate(self, size: int) -> Tensor:
        if self._batched:
            return torch.empty(size, dtype=torch.uint8, device=self._carrier)
        return self._memory.take(size) if self._device.type == "cpu" else wire.host_memory(size, self._device)

    def _begin(self, exchange: _Exchange, ticket: Ticket, way: Way, peer: int, header: Tensor, payload: Tensor) -> None:
        """Starts, or on NCCL collects for later, the header and the payload to or from a peer."""
        assert peer != self.worker and (way, peer) not in exchange.pending | exchange.gathered, (ticket, way, peer)
        if peer not in self._lifelines and not self._batched:
            self._lifelines.add(peer)
            # The lifeline fails when the connection is lost, which gloo does not report to a thread that waits for a
            # message.
            threading.Thread(target=self._hold_lifeline, args=(peer,), name=THREADS, daemon=True).start()
        rank = self._member.rank_of(peer)
        header_tag, payload_tag = wire.tags(self._run, ticket, payload.numel(), self._member.part)
        exchange.gathered.add((way, peer))
        exchange.batch.append(_Transfer(way, header, rank, header_tag))
        if payload.numel():
            exchange.batch.append(_Transfer(way, payload, rank, payload_tag))
        if not self._batched:
            self._launch(exchange)

    def _launch(self, exchange: _Exchange) -> None:
        """Starts the collected transfers, and a thread that waits for their end."""
        batch, transfers = exchange.batch, exchange.gathered
        exchange.batch, exchange.gathered = [], set()
        if not batch:
            return
        landings = [exchange.landings[peer] for way, peer in transfers if way == "from"]
        with self._news:
            exchange.pending |= transfers  # before they start, as a lifeline fails what is pending
        try:
            works = self._together(batch) if self._batched else [self._alone(transfer) for transfer in batch]
        except RuntimeError as error:  # gloo raises at once when the connection was lost before
            self._settle(exchange, transfers, error)
            return
        begun, peer = _Begun(transfers, landings, works, batch), min(peer for _, peer in transfers)
        with self._news:
            if peer in exchange.begun:  # its thread takes this too: waking another takes as long as a small message
                exchange.begun[peer].append(begun)
                return
            exchange.begun[peer] = deque([begun])
        follow(functools.partial(self._follow, exchange, peer))

    def _alone(self, transfer: _Transfer) -> dist.Work:
        way, tensor, rank, tag = transfer
        group = whole_of(self._group)
        return group.recv([tensor], rank, tag) if way == "from" else group.send([tensor], rank, tag)

    def _together(self, batch: Sequence[_Transfer]) -> list[dist.Work]:
        # As in torch's `batch_isend_irecv`, which accepts only groups of torch's registry.
        group, device = whole_of(self._group), batch[0].tensor.device
        if not group._get_backend(device).supports_coalescing:
            return [self._alone(transfer) for transfer in batch]
        group._start_coalescing(device)
        for transfer in batch:
            self._alone(transfer)
        return [group._end_coalescing(device)]

    def _follow(self, exchange: _Exchange, peer: int) -> None:
        """Waits for the messages to and from a peer, in order."""
        begun: _Begun | None = None
        error: Exception | None = None
        while True:
            with self._news:
                if begun is not None:
                    self._settle(exchange, begun.transfers, error)
                if not exchange.begun[peer]:
                    del exchange.begun[peer]  # under the lock: later messages get a new thread
                    return
                begun = exchange.begun[peer].popleft()
            error = self._error_of(begun)

    def _error_of(self, begun: _Begun) -> Exception | None:
        """Waits for messages and validates them."""
        _, landings, works, _ = begun
        try:
            # A payload of an unexpected size never arrives, so the header is checked first if possible.
            before = len(works) if self._batched else 1
            for work in works[:before]:
                self._finish(work)
            headers = [landing.check_header() for landing in landings]
            began_s = time.perf_counter()
            for work in works[before:]:
                self._finish(work)
            if before < len(works):
                seconds = time.perf_counter() - began_s
                for header in headers:
                    self._measured.came.append(
                        Delivery(header.ticket, header.sender, header.payload_bytes, seconds, began_s)
                    )
            for landing, header in zip(landings, headers, strict=True):
                landing.check_payload(header)
        except (RuntimeError, TransportError) as error:
            return error
        return None

    def _hold_lifeline(self, peer: int) -> None:
        """Waits until the connection is lost, and then fails the transfers that gloo would leave hanging."""
        try:
            block(hold(self._member.rank_of(peer), self._group))
        except RuntimeError as error:
            time.sleep(GRACE_S)
            with self._news:
                for exchange in list(self._exchanges.values()):
                    if transfers := {transfer for transfer in exchange.pending if transfer[1] == peer}:
                        self._settle(exchange, transfers, error)

    def _settle(self, exchange: _Exchange, transfers: set[tuple[Way, int]], error: Exception | None) -> None:
        with self._news:
            exchange.pending -= transfers
            if error is not None and exchange.failure is None:
                exchange.failure = min(peer for _, peer in transfers), error
            if not exchange.pending or exchange.failure is not None:
                self._news.notify_all()

    def _missing(self, exchange: _Exchange, seconds: float) -> list[int]:
        """Waits at most `seconds`, and returns the ranks that the exchange still waits for; none once it is done or has
        failed.
        """
        with self._news:
            if self._news.wait_for(lambda: not exchange.pending or exchange.failure is not None, seconds):
                return []
            return self._patience.ranks_of(exchange.pending)

    def _broken(self, ticket: Ticket, peer: int, error: Exception) -> TransportError:
        """The error to raise after a transfer with `peer` failed."""
        cause = "closed"
        if isinstance(error, TransportError):
            cause = "changed" if isinstance(error, _ChangedError) else "foreign"
        named = self._patience.failed(ticket.round, self._member.rank_of(peer), cause)
        return error if isinstance(error, TransportError) else named


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
