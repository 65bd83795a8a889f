"""The bytes of one connection: the only object that touches a connected socket.

A channel is made at one place where a process dials (`handshake.dial`) and at one where it accepts (`listener.Listener`), before
anything is sent; there it is encrypted, if the run has keys (`gossamer.transport.sockets.tls`). Needs no torch.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from types import TracebackType

from gossamer.transport.keys import Keys
from gossamer.transport.sockets.keepalive import expect_answers, has_unanswered, keep_alive, silent_s
from gossamer.transport.sockets.tls import TlsSocket, must_encrypt, send_all

PIECE_BYTES = 1 << 20


class Channel:
    """One end of a connection; one thread may read while another writes, and any may interrupt it.

    Args: `timeout_s` is how long the other end may take no bytes, or send none in the middle of something.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock: socket.socket | TlsSocket = sock
        self._plain, self._waits_for_answers = sock, True
        self.moved_s = time.monotonic()
        """When bytes last went or came, on the clock of `time.monotonic`: who is slow is not silent."""
        self._tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if self._tcp:  # a letter shall not wait for the next one
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
            must_encrypt(self._sock, deadline)
        self._sock = sock = TlsSocket(self._sock, keys, server=server)
        sock.handshake(deadline, answered)
        self.wait_at_most(self.timeout_s)

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the other end has proved to own, as DER; None without encryption."""
        return self._sock.peer_certificate if isinstance(self._sock, TlsSocket) else None

    def wait_at_most(self, timeout_s: float) -> None:
        """Sets the timeout."""
        self.timeout_s = timeout_s
        self._sock.settimeout(timeout_s)
        if self._tcp:
            # A connection that is cut in a local phase is lost, and dialled again, well before anybody waits `timeout_s` for it.
            keep_alive(self._plain, timeout_s / 2)
            self._wait_for_answers()

    def _wait_for_answers(self) -> None:
        # Else a connection that was cut without a word lasts a quarter of an hour, as long as TCP repeats what it has sent.
        self._waits_for_answers, self._waits_since_s = True, time.monotonic()
        expect_answers(self._plain, self.timeout_s)

    def settle(self) -> bool:
        """Whether the other end has all that was sent; from then on keepalive alone tells whether it is there.

        Only whoever writes may call it. Raises: ConnectionError where the way to the other end is cut.
        """
        if not (self._tcp and self._waits_for_answers):
            return True
        if not has_unanswered(self._plain):
            self._waits_for_answers = False
            expect_answers(self._plain, None)
            return True
        # Sooner than after `timeout_s`, for which the other end may hang: then its system answers all the same.
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

        Args: `idle` allows the other end to be silent for ever before the first of them.
        Raises: OSError; ConnectionError when the other end closes before.
        """
        filled = 0
        while filled < len(view):
            # A timeout of a socket holds for one step alone: whoever sends a byte at a time would never exceed it. So what has to
            # be over by a deadline gets what is left of it at every step.
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
        """Fills the front of a buffer with what comes next, however late; 0 when the other end has closed. Raises: OSError."""
        while True:
            with contextlib.suppress(TimeoutError):
                got = self._sock.recv_into(view)
                self.moved_s = time.monotonic()
                return got

    def write(self, data: bytes | memoryview, deadline: float | None = None) -> None:
        """Sends all of this. Raises: OSError."""
        view = memoryview(data)
        if self._tcp and not self._waits_for_answers:
            self._wait_for_answers()

        def moved() -> None:
            self.moved_s = time.monotonic()
            self._before(deadline)

        # In pieces, so that what is encrypted at a time is bounded.
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
        """Reads on until the other end closes, or this one is closed; what comes is dropped.

        Were a connection closed over bytes that nobody has read, the system would reset it, and the other end might lose what it
        was just told.
        """
        scratch = bytearray(PIECE_BYTES)
        with contextlib.suppress(OSError):
            while self._sock.recv_into(scratch):
                pass

    def interrupt(self) -> None:
        """Ends the connection for whoever reads or writes it in another thread, and who closes it then; may be called twice.

        Nobody closes one direction alone: whoever sends no more says so in a letter (`LetterKind.END`), as encryption ends for
        both directions at once.
        """
        with contextlib.suppress(OSError):
            # No close: its descriptor would be free for the next connection while a thread is about to read from it, which would
            # then read what belongs to somebody else.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and frees its descriptor, which no other thread may use any more; may be called twice."""
        self.interrupt()
        self._sock.close()

    def _late(self, what: str, deadline: float | None) -> TimeoutError:
        return TimeoutError(f"{what} for {self.timeout_s:g} s" if deadline is None else "it took too long")

    def _before(self, deadline: float | None) -> None:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it took too long")
            self._sock.settimeout(left_s)
