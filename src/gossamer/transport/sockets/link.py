"""One connection between two workers of an elastic run: a thread that reads letters and one that writes them.

Nobody waits for a peer here: a letter is queued and goes out as the other end takes it, and what comes in is handed on at once.
Transport security would wrap the socket right after it is opened or accepted, before the handshake.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import GossamerError, PeerError, TransportError
from gossamer.transport import wire
from gossamer.transport.sockets import letter as letters
from gossamer.transport.sockets.letter import Letter

__all__ = ["Connection", "Listener", "Owner", "Station", "exactly", "receive_letter", "send_letter"]

PIECE_BYTES = 1 << 20
RETRY_S = 0.1
"""After a connection that could not be accepted."""


class Station(NamedTuple):
    """Where a worker listens, and what it proves itself with."""

    listener: socket.socket
    run: int
    secret: bytes
    timeout_s: float
    deadline_s: float | None = None


class Owner(NamedTuple):
    """Whom a link reports to; both functions are called in the link's own thread."""

    run: int
    timeout_s: float
    """How long the other end may take no bytes, or be silent in the middle of a letter."""
    accepts: Callable[[Letter, int], bool]
    """Whether a body of this size may follow a header."""
    heard: Callable[["Connection", Letter], None]
    lost: Callable[["Connection", str], None]
    """The link is gone, and why; called once."""


class Connection:
    """One end of a connection with a worker.

    Args: `opened` makes the socket, in the link's own thread, so that nobody waits for a peer that does not answer.
    """

    def __init__(self, peer: int, owner: Owner, opened: Callable[[], socket.socket], first: Letter) -> None:
        self.peer = peer
        self.nonce: int | None = None
        """Of the process at the other end, once it has said so."""
        self._owner, self._opened = owner, opened
        self._letters: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._letters.put(first)
        self._sock: socket.socket | None = None
        self._ended, self._done = threading.Lock(), threading.Event()
        self._closed = False
        _start(self._write)

    def send(self, letter: Letter) -> None:
        """Queues a letter."""
        self._letters.put(letter)

    def finish(self, timeout_s: float) -> None:
        """Sends what is queued, says that nothing follows, and closes once the other end has read it or `timeout_s` is over."""
        self._letters.put(None)
        self._done.wait(timeout_s)
        self.close()

    def close(self) -> None:
        """Ends the connection at once; may be called twice."""
        self._closed = True
        self._letters.put(None)
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        why = "it was closed"
        try:
            self._sock = sock = self._opened()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(self._owner.timeout_s)
            # Else a connection that was cut without a word lasts a quarter of an hour.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._owner.timeout_s))
            _start(self._read, sock)
            while (letter := self._letters.get()) is not None and not self._closed:
                send_letter(sock, letter, self._owner.run)
            if not self._closed:
                sock.shutdown(socket.SHUT_WR)
            return
        except (OSError, GossamerError) as error:
            why = str(error)
        self._end(why)

    def _read(self, sock: socket.socket) -> None:
        why = "it was closed"
        try:
            with sock:
                while True:
                    letter = receive_letter(sock, self._owner.run, self._owner.accepts, idle=True)
                    if letter.sender != self.peer:
                        raise PeerError(f"worker {self.peer} calls itself worker {letter.sender}")
                    self._owner.heard(self, letter)
        except (OSError, GossamerError) as error:
            why = str(error)
        self._end(why)

    def _end(self, why: str) -> None:
        if self._ended.acquire(blocking=False):  # never released: a link ends once
            self._done.set()
            self.close()
            self._owner.lost(self, why)


class Listener:
    """Accepts connections on one address and hands each to `taken` in a thread of its own."""

    def __init__(self, sock: socket.socket, taken: Callable[[socket.socket, str], None]) -> None:
        self._sock, self._taken, self._closed = sock, taken, False
        self.port: int = sock.getsockname()[1]
        _start(self._accept)

    def close(self) -> None:
        """Accepts no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._sock.accept()
            except OSError:  # no file descriptor is left, say, or it was closed
                time.sleep(RETRY_S)
                continue
            _start(self._taken, sock, str(address[0]))


def send_letter(sock: socket.socket, letter: Letter, run: int) -> None:
    """Sends a letter; the timeout of the socket limits progress, not the whole transfer. Raises: OSError."""
    sock.sendall(letters.encode(letter, run))
    view = letter.body.numpy().data
    for start in range(0, letter.body.numel(), PIECE_BYTES):
        sock.sendall(view[start : start + PIECE_BYTES])


def receive_letter(
    sock: socket.socket, run: int, accepts: Callable[[Letter, int], bool], *, idle: bool = False
) -> Letter:  # fmt: skip
    """The next letter.

    Args: `idle` allows the other end to be silent for ever before a letter begins.
    Raises: OSError when the connection is lost or stalls, TransportError or PeerError for what is no letter.
    """
    head, size, check = letters.decode(exactly(sock, letters.HEADER_BYTES, idle=idle).numpy().tobytes(), run)
    if not accepts(head, size):
        raise TransportError(
            f"worker {head.sender} sent {size} bytes as {head.kind.name.lower()} in {head.ticket}, which is not their size; all "
            "workers must run the same rule, codec and model"
        )
    body = exactly(sock, size)
    if size and wire.checksum(body) != check:
        raise TransportError(
            f"the {size} bytes of worker {head.sender} in {head.ticket} changed in transit; a network card or memory is faulty: "
            "test both machines"
        )
    return head._replace(body=body)


def exactly(sock: socket.socket, size: int, *, idle: bool = False) -> Tensor:
    """The next `size` bytes. Raises: OSError; ConnectionError when the other end closes before."""
    buffer = torch.empty(size, dtype=torch.uint8)
    view, filled = buffer.numpy().data, 0
    while filled < size:
        try:
            got = sock.recv_into(view[filled : filled + PIECE_BYTES])
        except TimeoutError:
            if idle and filled == 0:
                continue
            raise
        if not got:
            raise ConnectionError(f"it was closed after {filled} of {size} bytes")
        filled += got
    return buffer


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True, name="gossamer link").start()
