"""A relay between two processes that stops carrying bytes without closing anything, as a firewall that forgets a connection."""

import contextlib
import socket
import threading
from collections.abc import Iterator

PIECE_BYTES = 1 << 16


class SilentRelay:
    """Carries the connections to its port on to another port of loopback, until it falls silent.

    Args: `until` is what a client sends right before it does; None where `fall_silent` is called.
    """

    def __init__(self, target: int, until: bytes | None = None) -> None:
        self.silent = threading.Event()
        """Set once it carries nothing more."""
        self._target, self._until = target, until
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """From now on nothing is carried; no connection is closed, and new ones are accepted."""
        self.silent.set()

    def close(self) -> None:
        """Closes all connections."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._open.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), 10.0)
                except OSError:  # nobody listens there yet
                    near.close()
                    continue
                far.settimeout(None)
                self._open.append(far)
                threading.Thread(target=self._carry, args=(near, far, self._until), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, None), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, until: bytes | None) -> None:
        came = b""
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                came = (came + data)[-PIECE_BYTES:]
                if until is not None and until in came:
                    self.fall_silent()
                if not self.silent.is_set():
                    sink.sendall(data)
            if not self.silent.is_set():
                sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def silent_relay(target: int, until: bytes | None = None) -> Iterator[SilentRelay]:
    """A relay to this port, closed in the end."""
    relay = SilentRelay(target, until)
    try:
        yield relay
    finally:
        relay.close()
