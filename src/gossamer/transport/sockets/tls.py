"""A mutually authenticated TLS 1.3 connection with listed certificates: see `gossamer.transport.keys`.

It has the socket methods that a `Channel` needs. Bytes are encrypted and decrypted in memory, and cross the plain
socket in large pieces. An `ssl.SSLSocket` is unsuitable: it sends in records of 16 kB, it is not safe for concurrent
reading and writing, as Python releases its lock within OpenSSL, and its `shutdown` of one direction drops the keys of
both. Needs no torch.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable

from gossamer.errors import RefusedError
from gossamer.transport.keys import Keys, certificate_fingerprint

_PIECE_BYTES = 1 << 18
_FIRST = b"\x16"
"""The first byte of a TLS handshake."""
_OUT_OF_DATE = (9, 10)
"""OpenSSL's errors for a certificate that is not valid yet, or expired."""


def must_begin_tls(sock: socket.socket, deadline: float) -> None:
    """Checks the first byte before a TLS state is created, so that a flood of strangers is cheap.

    Raises: RefusedError if it is not a handshake, OSError if none arrives in time.
    """
    sock.settimeout(max(1e-3, deadline - time.monotonic()))
    first = sock.recv(1, socket.MSG_PEEK)
    if not first:
        raise ConnectionError("it hung up")
    if first != _FIRST:
        raise _in_the_clear()


def _in_the_clear() -> RefusedError:
    return RefusedError("key", "it does not encrypt; give all machines the same run file with [peers], and their keys")


def wait_until(sock: "socket.socket | TlsSocket", deadline: float) -> None:
    """Lets the next read or write take the time that is left. Raises TimeoutError when none is."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    sock.settimeout(left_s)


def send_all(sock: socket.socket, content: memoryview | bytes, moved: Callable[[], None] = lambda: None) -> None:
    """Sends all data over a plain socket, and calls `moved` after each part. Raises: OSError.

    The socket's timeout applies to each part. With `socket.sendall` it would apply to the total, and a slow link would
    look like a stalled peer.
    """
    view = memoryview(content)
    while view:
        view = view[sock.send(view) :]
        moved()


class TlsSocket:
    """One end of an encrypted connection over a plain one; one thread may read while another writes."""

    def __init__(self, sock: socket.socket, keys: Keys, *, server: bool) -> None:
        self._sock, self._own = sock, keys.certificate
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = keys.context(server=server).wrap_bio(self._came, self._goes, server_side=server)
        self._state = threading.Lock()
        """The lock of each OpenSSL call, never held while waiting for the other end."""
        self._order = threading.Lock()
        """Held from encryption until the bytes are in the socket: records are numbered, and must be sent in order."""
        self.settimeout, self.shutdown, self.close = sock.settimeout, sock.shutdown, sock.close

    @property
    def peer_certificate(self) -> bytes | None:
        """The authenticated certificate of the other end."""
        return self._tls.getpeercert(binary_form=True)

    def handshake(self, deadline: float, answered: Callable[[], None] = lambda: None) -> None:
        """Performs the mutually authenticated handshake.

        Args: `answered` is called once this end has sent its first message, which on the listening side follows a
            complete ClientHello.
        Raises: OSError when the connection is lost or it takes too long; RefusedError when the other end shows an
            unlisted certificate, or does not encrypt. The dialler learns of a refusal of its own certificate at its
            first read.
        """
        has_answered = False
        while True:
            try:
                with self._state:
                    self._tls.do_handshake()
            except ssl.SSLWantReadError:
                if self._goes.pending and not has_answered:
                    has_answered = True
                    answered()
                self._flush()
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):  # the peer may have hung up; the local error counts
                    self._flush()  # sends the alert to the other end
                raise self._as_os_error(error) from None
            else:
                self._flush()
                return
            # The remaining time at each step: a per-step timeout would let a stranger send a byte at a time forever.
            wait_until(self._sock, deadline)
            if not self._take():
                raise ConnectionError("it hung up")

    def recv_into(self, view: memoryview | bytearray) -> int:
        """Reads available bytes into a buffer; 0 at the end of the connection. Raises: OSError."""
        into = memoryview(view)
        while True:
            filled, answers = self._decrypted(into)
            if answers:
                self._flush()
            if filled is None:
                return 0
            if filled or not into:
                return filled
            if not self._take():
                return 0

    def send_all(self, view: memoryview, moved: Callable[[], None]) -> None:
        """Sends all data, see the function of this name. Raises: OSError."""
        self._flush(lambda: self._encrypt(view), moved)

    def _encrypt(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._tls.write(view[done:])

    def _decrypted(self, into: memoryview) -> tuple[int | None, bool]:
        """Decrypts received data into the buffer; None after the other end's close_notify.

        Also returns whether a reply must be sent: an alert, or an answer to a key update. It is checked here, outside
        of encryption: otherwise a reader could wait for a writer whose bytes it saw, and that one for the other end,
        which may wait too.
        """
        filled, ended = 0, False
        with self._state:
            try:
                while filled < len(into) and not ended:
                    taken = int(self._tls.read(len(into) - filled, into[filled:]))
                    filled, ended = filled + taken, not taken
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                ended = True
            except ssl.SSLError as error:
                raise self._as_os_error(error) from None
            return (None if ended and not filled else filled), self._goes.pending > 0

    def _take(self) -> bool:
        """Waits for bytes; False when the other end hangs up."""
        raw = self._sock.recv(_PIECE_BYTES)
        with self._state:
            self._came.write(raw)
        return bool(raw)

    def _flush(self, encrypt: Callable[[], None] = lambda: None, moved: Callable[[], None] = lambda: None) -> None:
        with self._order:
            with self._state:
                encrypt()
                raw = self._goes.read()
            send_all(self._sock, raw, moved)

    def _as_os_error(self, error: ssl.SSLError) -> OSError:
        """Our error for an error of OpenSSL."""
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OUT_OF_DATE:
            return RefusedError(
                "key",
                f"its certificate does not hold at {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, which is the time on "
                f"this machine ({error.verify_message}); set the clock, or make a new key there with gossamer keys new NAME",
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return RefusedError(
                "key", f"it showed a certificate that is not in the run's [peers] ({error.verify_message})"
            )
        reason = error.reason or ""
        if "ALERT_CERTIFICATE_EXPIRED" in reason:
            return RefusedError(
                "key",
                f"the certificate of this machine ({certificate_fingerprint(self._own)}) has expired by the clock of the other "
                "end; set the clock there, or make a new key here with gossamer keys new NAME",
            )
        if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            return RefusedError(
                "key",
                f"it refused the key of this machine ({certificate_fingerprint(self._own)}); its run file must list it in "
                "[peers], as gossamer keys show prints it",
            )
        if "DECRYPTION_FAILED" in reason or "BAD_RECORD_MAC" in reason:
            return RefusedError(
                "changed",
                "what it sent was changed on its way; somebody on the path, or a faulty network card, changes the bytes",
            )
        if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
            return _in_the_clear()
        return ConnectionError(f"its encryption failed ({reason.lower().replace('_', ' ')})")
