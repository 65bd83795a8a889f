"""A connection under TLS 1.3 in which both ends have shown a certificate that the other one lists: see `gossamer.transport.keys`.

It is what a `Channel` needs of a socket. One thread may read while another one writes, which an OpenSSL connection does not
survive by itself, as Python lets go of its own lock in there: so each step into OpenSSL is short and under a lock, and whoever
has to wait for the other end waits for the descriptor, without the lock. Needs no torch.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gossamer.errors import RefusedError
from gossamer.transport.keys import Keys, fingerprint

__all__ = ["TlsSocket", "encrypted"]

T = TypeVar("T")

_NOT_LISTED = (
    "it refused the key of this machine ({own}); its run file must list it in [peers], as gossamer keys show prints it"
)


class TlsSocket:
    """One end of an encrypted connection."""

    def __init__(self, sock: ssl.SSLSocket, own: bytes) -> None:
        self._sock, self._own = sock, own
        self._lock = threading.Lock()
        self._timeout_s: float | None = None
        self.family = sock.family
        sock.setblocking(False)

    @property
    def peer_certificate(self) -> bytes | None:
        """The certificate that the other end has proved to own."""
        return self._sock.getpeercert(binary_form=True)

    def settimeout(self, timeout_s: float) -> None:
        """How long one step may wait for the other end."""
        self._timeout_s = timeout_s

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As of a socket."""
        self._sock.setsockopt(level, option, value)

    def handshake(self, deadline: float) -> None:
        """Both ends show their certificates.

        Raises: OSError when the connection is lost or it takes too long; RefusedError when the other end shows a certificate that
            is not listed, or does not encrypt. That the other end refuses the own one, whoever dials learns at its first read.
        """
        self._timeout_s = max(0.0, deadline - time.monotonic())
        # With a deadline for all steps: a timeout for one alone would let a stranger send a byte at a time for ever.
        if self._step(lambda: self._sock.do_handshake() is None, deadline) is None:
            raise ConnectionError("it hung up")

    def recv_into(self, view: memoryview | bytearray) -> int:
        """Fills a part of a buffer with what comes next; 0 at the end of the connection. Raises: OSError."""
        return self._step(lambda: self._sock.recv_into(view)) or 0

    def sendall(self, view: memoryview) -> None:
        """Sends all of this. Raises: OSError."""
        sent = 0
        while sent < len(view):
            rest = view[sent:]
            if (taken := self._step(lambda: self._sock.send(rest))) is None:  # noqa: B023 - called at once
                raise BrokenPipeError("it hung up")
            sent += taken

    def shutdown(self, how: int) -> None:
        """Ends the connection for whoever waits for it."""
        # The method of the plain socket: that of an encrypted one forgets its keys, and a thread that reads would see ciphertext.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Frees the descriptor."""
        with self._lock:
            self._sock.close()

    def _step(self, call: Callable[[], T], deadline: float | None = None) -> T | None:
        """Does one step with OpenSSL, and waits for the other end while it needs bytes from it, or room; None once it hung up."""
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return None
            except ssl.SSLCertVerificationError as error:
                raise RefusedError(
                    "key", f"it showed a certificate that is not in the run's [peers] ({error.verify_message})"
                ) from None
            except ssl.SSLError as error:
                raise self._told(error) from None
            _wait(self._sock.fileno(), event, self._timeout_s)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("it took too long")

    def _told(self, error: ssl.SSLError) -> OSError:
        """What an error of OpenSSL means."""
        reason = error.reason or ""
        if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            return RefusedError("key", _NOT_LISTED.format(own=fingerprint(self._own)))
        if "DECRYPTION_FAILED" in reason or "BAD_RECORD_MAC" in reason:
            return RefusedError(
                "changed",
                "what it sent was changed on its way; somebody on the path, or a faulty network card, changes the bytes",
            )
        if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason or "UNKNOWN_PROTOCOL" in reason:
            return RefusedError(
                "key", "it does not encrypt; give all machines the same run file with [peers], and their keys"
            )
        return ConnectionError(f"its encryption failed ({reason.lower().replace('_', ' ')})")


def _wait(descriptor: int, event: int, timeout_s: float | None) -> None:
    """Waits until a descriptor is ready, or its connection is over. Raises: TimeoutError."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
        raise TimeoutError("timed out")


def encrypted(sock: socket.socket, keys: Keys, *, server: bool) -> TlsSocket:
    """A connection whose ends have not shown their certificates yet (`TlsSocket.handshake`). The plain socket is detached."""
    return TlsSocket(
        keys.context(server=server).wrap_socket(sock, server_side=server, do_handshake_on_connect=False),
        keys.certificate,
    )
