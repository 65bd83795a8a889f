"""The byte stream of one connection: the only object that touches a connected socket.

Channels are created in two places, for dialling (`handshake.dial`) and accepting (`listener.Listener`), before anything
is sent; there they are encrypted, if the run has keys (`gossamer.transport.sockets.tls`). Needs no torch.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from types import TracebackType

from gossamer.transport.keys import Keys
from gossamer.transport.sockets.keepalive import expect_answers, has_unanswered, keep_alive, silent_s
from gossamer.transport.sockets.tls import TlsSocket, must_begin_tls, send_all, wait_until

PIECE_BYTES = 1 << 20


class Channel:
    """One end of a connection; one thread may read while another writes, and any thread may interrupt it.

    Args: `timeout_s` is how long the other end may accept no bytes, or pause in the middle of a message.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock: socket.socket | TlsSocket = sock
        self._plain, self._waits_for_answers = sock, True
        self.moved_s = time.monotonic()
        """The time of the last progress, on the clock of `time.monotonic`: slow is not silent."""
        self._tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if self._tcp:  # sends each letter without delay
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wait_at_most(timeout_s)

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def encrypt(
        self, keys: Keys, *, server: bool, deadline: float, answered: Callable[[], None] = lambda: None
    ) -> None:
        """Encrypts the connection, before anything is sent. Args and Raises: as of `TlsSocket.handshake`."""
        assert isinstance(self._sock, socket.socket)
        if server:
            must_begin_tls(self._sock, deadline)
        self._sock = sock = TlsSocket(self._sock, keys, server=server)
        sock.handshake(deadline, answered)
        self.wait_at_most(self.timeout_s)

    @property
    def certificate(self) -> bytes | None:
        """The authenticated certificate of the other end, as DER; None without encryption."""
        return self._sock.peer_certificate if isinstance(self._sock, TlsSocket) else None

    def wait_at_most(self, timeout_s: float) -> None:
        """Sets the timeout."""
        self.timeout_s = timeout_s
        self._sock.settimeout(timeout_s)
        if self._tcp:
            # A connection cut during a local phase is detected, and redialled, well before a peer has waited
            # `timeout_s` for it.
            keep_alive(self._plain, timeout_s / 2)
            self._wait_for_answers()

    def _wait_for_answers(self) -> None:
        # Else a silently cut connection lasts a quarter of an hour, for which TCP retransmits.
        self._waits_for_answers, self._waits_since_s = True, time.monotonic()
        expect_answers(self._plain, self.timeout_s)

    def settle(self) -> bool:
        """Whether the other end has confirmed everything sent; from then on only keepalive detects its loss.

        Only the writer may call it. Raises: ConnectionError where the path to the other end is cut.
        """
        if not (self._tcp and self._waits_for_answers):
            return True
        if not has_unanswered(self._plain):
            self._waits_for_answers = False
            expect_answers(self._plain, None)
            return True
        # Earlier than `timeout_s`, for which the process at the other end may hang: its system still confirms.
        for_s = min(time.monotonic() - self._waits_since_s, silent_s(self._plain))
        if for_s > self.timeout_s / 2:
            raise ConnectionError(f"its machine has confirmed nothing for {for_s:.0f} s")
        return False

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """The next `size` bytes; all before the deadline, if there is one. Raises: OSError."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def read_into(self, view: memoryview, deadline: float | None = None, *, idle: bool = False) -> None:
        """Fills a buffer with the next bytes.

        Args: `idle` allows unlimited silence before the first byte.
        Raises: OSError; ConnectionError when the other end closes early.
        """
        filled = 0
        while filled < len(view):
            # A socket's timeout applies to one step: a peer that sends a byte at a time would never exceed it. So with
            # a deadline, each step gets the remaining time.
            self._before(deadline)
            try:
                got = self._sock.recv_into(view[filled : filled + PIECE_BYTES])
            except TimeoutError:
                if idle and filled == 0:
                    continue
                raise self._late("it sent nothing", deadline) from None
            if not got:
                raise ConnectionError(f"it closed the connection after {filled} of {len(view)} bytes")
            filled += got
            self.moved_s = time.monotonic()

    def read_some(self, view: memoryview) -> int:
        """Reads available bytes into a buffer, waiting indefinitely; 0 when the other end has closed. Raises: OSError."""
        while True:
            with contextlib.suppress(TimeoutError):
                got = self._sock.recv_into(view)
                self.moved_s = time.monotonic()
                return got

    def write(self, data: bytes | memoryview, deadline: float | None = None) -> None:
        """Sends all of the data. Raises: OSError."""
        view = memoryview(data)
        if self._tcp and not self._waits_for_answers:
            self._wait_for_answers()

        def moved() -> None:
            self.moved_s = time.monotonic()
            self._before(deadline)

        # In pieces, to bound the amount encrypted at a time.
        for start in range(0, len(view), PIECE_BYTES):
            self._before(deadline)
            piece = view[start : start + PIECE_BYTES]
            try:
                if isinstance(self._sock, TlsSocket):
                    self._sock.send_all(piece, moved)
                else:
                    send_all(self._sock, piece, moved)
            except TimeoutError:
                raise self._late("it took no bytes", deadline) from None

    def drain(self) -> None:
        """Reads and discards until either end closes.

        Closing a connection with unread bytes resets it, and the other end might lose the last letter.
        """
        scratch = bytearray(PIECE_BYTES)
        with contextlib.suppress(OSError):
            while self._sock.recv_into(scratch):
                pass

    def interrupt(self) -> None:
        """Ends the connection for readers and writers in other threads, which then close it; may be called twice.

        One direction is never closed alone: the end of sending is a letter (`LetterKind.END`), as encryption ends for
        both directions at once.
        """
        with contextlib.suppress(OSError):
            # No close: its descriptor could be reused for another connection while a thread is about to read from it.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and frees its descriptor, which no other thread may still use; may be called twice."""
        self.interrupt()
        self._sock.close()

    def _late(self, silence: str, deadline: float | None) -> TimeoutError:
        return TimeoutError(f"{silence} for {self.timeout_s:g} s" if deadline is None else "it took too long")

    def _before(self, deadline: float | None) -> None:
        if deadline is not None:
            wait_until(self._sock, deadline)
