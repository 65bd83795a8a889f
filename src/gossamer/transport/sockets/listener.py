"""Where processes are accepted: a bounded number of strangers proves that they know the secret, and is handed on then.

Needs no torch.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gossamer.errors import PeerError, RefusedError, TransportError
from gossamer.transport.keys import SECRET_WORD, Keys
from gossamer.transport.sockets.addresses import shown
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import HANDSHAKE_S, prove_to_dialler
from gossamer.transport.sockets.header import GUESTS

log = logging.getLogger("gossamer")

RETRY_S = 0.1
"""After a connection that could not be accepted."""
REPORTED = 20
"""The refusals that are each reported; after them, only the 32nd, the 64th and so on are."""
_STEPS = 3
"""Of a handshake: nothing has come, the other end has begun, and it has proved by TLS that it owns a listed certificate."""
_PLACES = 64
"""At each step of the handshake."""
_MOST_COUNTS = 256
"""Peers and kinds that are counted apart: strangers may come from any number of addresses."""


class Refusals:
    """What a process has refused, counted by peer and kind. Threads may share it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """How often, by peer and kind, such as `worker 3: bounds`."""
        with self._lock:
            return dict(self._counts)

    def count(self, what: str) -> int:
        """Counts one without a report, and returns how many there are of it."""
        with self._lock:
            key = (
                what
                if what in self._counts or len(self._counts) < _MOST_COUNTS
                else f"others: {what.rpartition(': ')[2]}"
            )
            self._counts[key] += 1
            return self._counts[key]

    def add(self, peer: str, error: Exception) -> None:
        """Counts one, and reports it unless there were many."""
        kind = (
            error.kind
            if isinstance(error, RefusedError)
            else "protocol"
            if isinstance(error, TransportError)
            else "lost"
        )
        self.count(f"{peer}: {kind}")
        with self._lock:
            number = self._counts.total()
        if number <= REPORTED or number.bit_count() == 1:
            log.warning("refused connection %d, from %s: %s", number, peer, error)


class ConnectionLimit:
    """Connections that cost the process without doing anything for it: a bounded number of each peer, and of all.

    A new one is always admitted, and the oldest gives way: of its own peer, or of the peer that has most. Were new ones refused
    instead, whoever fills the places would keep everybody else out.
    """

    def __init__(self, per_peer: int = 8, total: int = 64) -> None:
        self._per_peer, self._total = per_peer, total
        self._open: dict[Channel, str] = {}
        """The peer of each, the oldest first."""
        self._lock = threading.Lock()

    def admit(self, channel: Channel, peer: str) -> None:
        """Counts a new connection, and ends those for which it leaves no room."""
        with self._lock:
            counts = Counter(self._open.values())
            if counts[peer] >= self._per_peer:
                self._end(peer)
            elif len(self._open) >= self._total:
                self._end(counts.most_common(1)[0][0])
            self._open[channel] = peer

    def release(self, channel: Channel) -> None:
        """Counts a connection no longer."""
        with self._lock:
            self._open.pop(channel, None)

    def close(self) -> None:
        """Ends all of them."""
        with self._lock:
            while self._open:
                self._end(next(iter(self._open.values())))

    def _end(self, peer: str) -> None:
        """Ends the oldest connection of a peer; its thread notices."""
        oldest = next(channel for channel, whose in self._open.items() if whose == peer)
        del self._open[oldest]
        oldest.interrupt()


class Arrival(NamedTuple):
    """A connection whose other end has proved that it knows the secret."""

    channel: Channel
    host: str
    peer: int
    """What it calls itself."""
    same_run: bool
    """Whether it is of this run, which it has been told."""


class Listener:
    """Accepts connections on one socket and hands each, once its other end knows the secret, to `arrived` in a thread of its own.

    Args: `older` as of `prove_to_dialler`; `keys` encrypt each connection, and stand in place of the secret.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        run: int,
        arrived: Callable[[Arrival], None],
        refusals: Refusals,
        *,
        older: bytes = b"GOSL",
        keys: Keys | None = None,
    ) -> None:
        self._sock, self._run, self._older, self._keys = sock, run, older, keys
        self._secret = secret if keys is None else SECRET_WORD
        self._arrived, self.refusals = arrived, refusals
        # Each step has its own places: however many connections stay at one, they end none at a later one. An address may have
        # all places that no other wants, as honest workers share it with strangers behind one router. A worker is ended only if
        # so many others come during one round trip to it.
        self._handshakes = [ConnectionLimit(_PLACES, _PLACES) for _ in range(_STEPS)]
        self._closed = False
        self._busy = 0
        self._lock = threading.Lock()
        self.address = shown(*sock.getsockname()[:2])
        # Newcomers and peers that come back arrive while this worker trains.
        threading.Thread(target=self._accept, daemon=True, name="gossamer listener").start()

    @property
    def busy(self) -> bool:
        """Whether somebody who has come is not attended to yet."""
        return self._busy > 0

    def close(self) -> None:
        """Accepts no more; those who are attended to go on."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a close alone would let the thread in accept take one more
        self._sock.close()

    def hang_up(self) -> None:
        """Ends the connections of strangers."""
        for step in self._handshakes:
            step.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._sock.accept()
            except OSError:  # no file descriptor is left, say, or it was closed
                time.sleep(RETRY_S)
                continue
            with self._lock:
                self._busy += 1
            # In a thread of its own, as a stranger may take its time; how many there are is bounded in `_attend`.
            thread = threading.Thread(
                target=self._attend, args=(sock, str(address[0])), daemon=True, name="gossamer arrival"
            )
            try:
                thread.start()
            except RuntimeError:  # no thread is left; who has come may come again, and the next one is accepted
                sock.close()
                with self._lock:
                    self._busy -= 1
                time.sleep(RETRY_S)

    def _attend(self, sock: socket.socket, host: str) -> None:
        try:
            # The one place where a process accepts. The channel is admitted first, as a handshake takes as long as a stranger
            # likes, and it is the channel that is ended then.
            channel = Channel(sock, HANDSHAKE_S)
            steps = iter(self._handshakes)
            step = next(steps)
            step.admit(channel, host)

            def advance() -> None:
                nonlocal step
                left, step = step, next(steps)
                step.admit(channel, host)  # before it leaves its place: `hang_up` looks at the steps in this order
                left.release(channel)

            try:
                peer, same = self._proof(channel, advance)
            except (PeerError, OSError) as error:
                channel.close()  # without a word: a stranger learns nothing
                if not self._closed:
                    self.refusals.add(host, error)
                return
            finally:
                step.release(channel)
            self._arrived(Arrival(channel, host, peer, same))
        finally:
            with self._lock:
                self._busy -= 1

    def _proof(self, channel: Channel, advance: Callable[[], None]) -> tuple[int, bool]:
        """What a stranger proves: its number, and whether it is of this run; `advance` is called after each step but the last."""
        if self._keys is None:
            return prove_to_dialler(channel, self._secret, run=self._run, older=self._older, begun=advance)
        deadline = time.monotonic() + HANDSHAKE_S
        channel.encrypt(self._keys, server=True, deadline=deadline, answered=advance)
        self._keys.must_list(channel.certificate)
        advance()
        peer, same = prove_to_dialler(channel, self._secret, run=self._run, older=self._older)
        if peer not in GUESTS:
            self._keys.must_have(channel.certificate, peer)
        return peer, same
