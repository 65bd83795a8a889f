"""The store of a run whose machines have keys: it listens on loopback only, and its traffic leaves the machine
encrypted.

A torch store neither encrypts nor authenticates. Here its port is open only on the machine that hosts it, an
authenticating listener forwards the connections of the other machines to it, and each of those reaches it through a
local loopback port. So other users of these machines can reach the board of a run, but no one on the network between
them.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import PeerError
from gossamer.transport.keys import Keys
from gossamer.transport.processes.store import (
    client_of,
    hosted_store,
    listening,
    reached_in_time,
    reached_store,
)
from gossamer.transport.sockets.addresses import shown
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.listener import Arrival, ConnectionLimit, Listener, Refusals

_RUN = int.from_bytes(b"a store", "big")
"""A placeholder for the run's number, which is unknown before the store is read."""
_PIECE_BYTES = 1 << 16
_MOST_OF_A_WORKER = 16
"""The most connections of a key for each of its workers; a process needs one, and some more where the host is slow."""


class KeyedStore:
    """A store hosted or reached through authenticated connections, which `close` ends."""

    def __init__(self, store: TCPStore, port: "_Gate | Listener") -> None:
        self.store, self._port = store, port

    @classmethod
    def hosted(cls, host: str, port: int, keys: Keys, timeout_s: float) -> "KeyedStore":
        """A new store in this process, which the owners of the run's keys reach at this address.

        Raises: OSError when the port is taken or the host unknown.
        """
        outside = listening(host, port)
        try:
            inside = hosted_store("127.0.0.1", 0, timeout_s)
        except BaseException:
            outside.close()
            raise

        most = _MOST_OF_A_WORKER * max(len(keys.numbers(one)) for one in keys.certificates)
        limit = ConnectionLimit(most, most * len(keys.certificates))  # each costs two threads and two descriptors

        def arrived(arrival: Arrival) -> None:
            limit.admit(arrival.channel, arrival.whose)
            try:
                near = socket.create_connection(("127.0.0.1", inside.port), timeout_s)
            except OSError:
                arrival.channel.close()
            else:
                _carry(arrival.channel, near)
            finally:
                limit.release(arrival.channel)

        return cls(inside, Listener(outside, b"", _RUN, arrived, Refusals(), keys=keys))

    @classmethod
    def reached(cls, host: str, port: int, keys: Keys, me: int, timeout_s: float) -> "KeyedStore":
        """The store behind this address, where worker 0 hosts it.

        Raises: OSError or RuntimeError when it cannot be reached within `timeout_s`; PeerError where the other end does
            not have the key of worker 0; ConfigError where this machine's key is not that of worker `me`.
        """

        def dialled(left_s: float) -> Channel:
            return dial(shown(host, port), b"", run=_RUN, me=me, timeout_s=left_s, keys=keys, whom=0)

        gate = _Gate(reached_in_time(timeout_s, dialled), lambda: dialled(timeout_s))
        try:
            return cls(client_of("127.0.0.1", gate.port, timeout_s), gate)
        except BaseException:
            gate.close()
            raise

    def close(self) -> None:
        """Stops accepting connections."""
        self._port.close()


def meeting_store(
    host: str, port: int, *, hosts: bool, me: int, keys: Keys | None, timeout_s: float
) -> tuple[Store, KeyedStore | None]:
    """The store at which processes rendezvous, which this one `hosts` or reaches; with keys also the carrier, which is
    to be closed.

    Args: `me` is a worker number of this machine's key.
    Raises: OSError or RuntimeError when it cannot be reached, or created; PeerError and ConfigError for keys that do
        not fit.
    """
    if keys is None:
        return (hosted_store if hosts else reached_store)(host, port, timeout_s), None
    keys.must_own(me)
    behind = (
        KeyedStore.hosted(host, port, keys, timeout_s) if hosts else KeyedStore.reached(host, port, keys, me, timeout_s)
    )
    return behind.store, behind


class _Gate:
    """A loopback port: its first connection is forwarded over an existing channel, each further one over a new channel."""

    def __init__(self, first: Channel, again: Callable[[], Channel]) -> None:
        self._first, self._again = [first], again
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        # In a thread, as the store's C++ client connects while its constructor blocks the calling thread.
        threading.Thread(target=self._accept, daemon=True, name="gossamer store").start()

    def close(self) -> None:
        """Stops accepting; existing connections last until either end closes them."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # a close alone would leave the thread in accept
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                first = self._first.pop() if self._first else None  # here, as only one of two connections may take it
                threading.Thread(target=self._connect, args=(near, first), daemon=True, name="gossamer store").start()
        for channel in self._first:
            channel.close()

    def _connect(self, near: socket.socket, first: Channel | None) -> None:
        try:
            channel = self._again() if first is None else first
        except (OSError, PeerError):
            near.close()  # so that the store's client notices
            return
        _carry(channel, near)


def _carry(channel: Channel, near: socket.socket) -> None:
    """Forwards bytes in both directions until either end closes."""
    # Requests and answers may overlap, so each direction has its thread.
    inward = threading.Thread(target=_carry_in, args=(channel, near), daemon=True, name="gossamer store")
    near.settimeout(None)
    inward.start()
    with contextlib.suppress(OSError):
        while data := near.recv(_PIECE_BYTES):
            channel.write(data)
    channel.interrupt()
    inward.join()  # before closing: a freed descriptor may be reused by another connection
    channel.close()
    near.close()


def _carry_in(channel: Channel, near: socket.socket) -> None:
    view = memoryview(bytearray(_PIECE_BYTES))
    with contextlib.suppress(OSError):  # including corrupted data, after which forwarding stops
        while got := channel.read_some(view):
            near.sendall(view[:got])
    with contextlib.suppress(OSError):
        near.shutdown(socket.SHUT_RDWR)  # wakes the other thread
