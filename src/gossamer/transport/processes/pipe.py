"""The processes of one worker: payloads from stage to stage, and vectors among all of them.

Payloads cross as flat bytes over gloo, from and to host memory, in a process group private to the worker. Each stream,
such as the activations at one boundary, has a thread that receives its messages in order, as they arrive: so bytes are
in flight while a stage computes, and a lost stage is noticed at once. Sending never blocks.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import PeerError, TransportError, first_line
from gossamer.rng import key
from gossamer.transport.processes.backend import block, connected, hang_up
from gossamer.transport.processes.board import cause_of
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import THREADS
from gossamer.transport.processes.waiting import PeerWait

LENGTH_BYTES = 8
"""Bytes of the length prefix of a payload whose size only the sender knows."""


class Flow(NamedTuple):
    """Messages in one direction between two processes of a worker; both ends use the same name."""

    name: str
    boundary: int


class _Receiver:
    """The receiving thread of one stream. It is inside torch only while a message is announced."""

    def __init__(self, stream: Flow, part: int, group: dist.ProcessGroup) -> None:
        self._stream, self._part, self._group = stream, part, group
        self._announced: SimpleQueue[tuple[int | None, int] | None] = SimpleQueue()
        self.came: SimpleQueue[Tensor | Exception] = SimpleQueue()
        # In a thread, as torch's receive blocks until the message has arrived, and training continues meanwhile.
        threading.Thread(target=self._receive_all, name=THREADS, daemon=True).start()

    def announce(self, sizes: Sequence[int | None], most_bytes: int) -> None:
        """Announces the lengths of the next messages; None if each is sent as a prefix."""
        for size in sizes:
            self._announced.put((size, most_bytes))

    def end(self) -> None:
        """Ends the thread once all announced messages have arrived."""
        self._announced.put(None)

    def _receive_all(self) -> None:
        try:
            while (announced := self._announced.get()) is not None:
                self.came.put(self._receive(*announced))
        except (RuntimeError, TransportError) as error:
            self.came.put(error)

    def _receive(self, size: int | None, most_bytes: int) -> Tensor:
        if size is None:
            size = int(self._bytes(LENGTH_BYTES, _tag(self._stream)).view(torch.int64))
            if not 0 <= size <= most_bytes:
                raise TransportError(
                    f"a payload of {size} bytes is announced at boundary {self._stream.boundary} and at most {most_bytes} are "
                    "possible; start all processes with the same run file and gossamer version"
                )
        return self._bytes(size, _tag(self._stream, size))

    def _bytes(self, size: int, tag: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        work = dist.irecv(buffer, group=self._group, group_src=self._part, tag=tag)
        assert work is not None
        block(work)
        return buffer


def _tag(stream: Flow, size: int | None = None) -> int:
    """The tag of a payload, which includes its size: gloo ends a process that receives more than its buffer holds."""
    return key(0, "pipe", *stream, -1 if size is None else size) >> 33


def group_of_worker(member: Member, timeout_s: float, name: str, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of the processes of this worker. Raises TransportError when it cannot be made."""
    ranks = [member.rank_of(member.worker, part) for part in range(member.parts)]
    limit = timedelta(seconds=timeout_s)
    try:
        made = connected(
            member.store,
            timeout_s,
            lambda: dist.new_group(ranks, limit, backend, use_local_synchronization=True, group_desc=name),
        )
    except RuntimeError as error:
        raise TransportError(
            f"{member.name(member.rank)} could not connect to the other {member.parts - 1} of its worker "
            f"({first_line(error)}); look at their logs, and check GLOO_SOCKET_IFNAME"
        ) from error
    assert isinstance(made, dist.ProcessGroup)
    return made


class Pipe:
    """This process's connections to the others of its worker, created by all at the same time; `close` it.

    Args: `timeout_s` is how long it waits for one of them.
    Raises: PeerError, wherever it waits, naming worker and stage of the process that failed first if known.
    Cost: for `gather`, one small message to and from each.
    """

    def __init__(self, member: Member, timeout_s: float) -> None:
        self.part, self.parts = member.part, member.parts
        self.round = 0
        """The current round, for messages."""
        self.waited_s = 0.0
        """Seconds that this process has waited for others."""
        self._member, self._timeout_s = member, timeout_s
        self._patience = PeerWait(member, timeout_s)
        self.group = group_of_worker(member, timeout_s, "stages", backend="gloo")
        self._receivers: dict[Flow, _Receiver] = {}
        self._sending: list[tuple[int, dist.Work, Tensor]] = []

    def expect(self, stream: Flow, part: int, sizes: Sequence[int | None], most_bytes: int) -> None:
        """Announces the next messages of another part, by their lengths; see `send`."""
        if stream not in self._receivers:
            self._receivers[stream] = _Receiver(stream, part, self.group)
        self._receivers[stream].announce(sizes, most_bytes)

    def send(self, stream: Flow, part: int, payload: Tensor, *, length_first: bool) -> None:
        """Starts sending flat bytes; they must stay unchanged until `flush`."""
        payload = payload.cpu()
        messages = [(payload, _tag(stream, payload.numel()))]
        if length_first:
            messages.insert(0, (torch.tensor([payload.numel()]).view(torch.uint8), _tag(stream)))
        for tensor, tag in messages:
            try:
                work = dist.isend(tensor, group=self.group, group_dst=part, tag=tag)
            except RuntimeError as error:
                raise self.gone(part, error) from error
            assert work is not None
            self._sending.append((part, work, tensor))

    def receive(self, stream: Flow, part: int) -> Tensor:
        """Waits for the next announced message."""
        came, began_s = self._receivers[stream].came, time.perf_counter()
        found: list[Tensor | Exception] = []

        def missing(seconds: float) -> list[int]:
            try:
                found.append(came.get(timeout=max(seconds, 1e-3)))
            except Empty:
                return [self._rank(part)]
            return []

        self._patience.wait(self.round, missing)
        self.waited_s += time.perf_counter() - began_s
        (message,) = found
        if isinstance(message, TransportError):
            self._patience.failed(self.round, self._rank(part), "foreign")
            raise message
        if isinstance(message, Exception):
            raise self.gone(part, message) from message
        return message

    def flush(self) -> None:
        """Waits until everything has been sent."""
        began_s = time.perf_counter()
        for part, work, _ in self._sending:
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise self.gone(part, error) from error
        self._sending.clear()
        self.waited_s += time.perf_counter() - began_s

    def gather(self, numbers: Tensor) -> list[Tensor]:
        """The vectors of all parts, in order; all have the same shape and dtype."""
        own = numbers.cpu().contiguous()
        others = [part for part in range(self.parts) if part != self.part]
        for part in others:
            self.expect(Flow("gather", part), part, [own.nbytes], own.nbytes)
            self.send(Flow("gather", self.part), part, own.view(torch.uint8), length_first=False)
        came = {part: self.receive(Flow("gather", part), part).view(numbers.dtype) for part in others}
        self.flush()
        return [came.get(part, own) for part in range(self.parts)]

    def close(self) -> None:
        """Ends the connections; those of a failed run are cut."""
        for receiver in self._receivers.values():
            receiver.end()
        hang_up(self.group)

    def _rank(self, part: int) -> int:
        return self._member.rank_of(self._member.worker, part)

    def gone(self, part: int, error: Exception) -> PeerError:
        """The error to raise when a connection with another part has failed."""
        return self._patience.failed(self.round, self._rank(part), cause_of(error))
