"""The listener for other processes: a bounded number of unauthenticated connections, which are passed on after the
handshake.

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
"""Pause after a connection that could not be accepted."""
REPORTED = 20
"""The number of refusals reported individually; then only the 32nd, the 64th and so on."""
_STEPS = 3
"""Steps of a handshake: no data yet, begun, and authenticated by TLS with a listed certificate."""
_PLACES = 64
"""The most connections at each step of the handshake."""
_MOST_COUNTS = 256
"""The most separate counters of peers and kinds: strangers may connect from any number of addresses."""


class Refusals:
    """Refusals of a process, counted by peer and kind; thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts by peer and kind, such as `worker 3: bounds`."""
        with self._lock:
            return dict(self._counts)

    def count(self, refusal: str) -> int:
        """Counts one without a report, and returns its count."""
        with self._lock:
            key = (
                refusal
                if refusal in self._counts or len(self._counts) < _MOST_COUNTS
                else f"others: {refusal.rpartition(': ')[2]}"
            )
            self._counts[key] += 1
            return self._counts[key]

    def add(self, peer: str, error: Exception) -> None:
        """Counts one, and reports it unless there are many."""
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
    """A bound on unproductive connections, per peer and in total.

    A new one is always admitted, and the oldest is dropped: of the same peer, or of the peer with the most. If new ones
    were refused instead, an attacker that fills the limit would lock out all others.
    """

    def __init__(self, per_peer: int = 8, total: int = 64) -> None:
        self._per_peer, self._total, self._closed = per_peer, total, False
        self._open: dict[Channel, str] = {}
        """The peer of each connection, oldest first."""
        self._lock = threading.Lock()

    def admit(self, channel: Channel, peer: str) -> None:
        """Counts a new connection, and ends those beyond the limit; it is itself ended after `close`."""
        with self._lock:
            if self._closed:
                channel.interrupt()
                return
            counts = Counter(self._open.values())
            if counts[peer] >= self._per_peer:
                self._end(peer)
            elif len(self._open) >= self._total:
                self._end(counts.most_common(1)[0][0])
            self._open[channel] = peer

    def release(self, channel: Channel) -> None:
        """Stops counting a connection."""
        with self._lock:
            self._open.pop(channel, None)

    def close(self) -> None:
        """Ends all of them, and those that are admitted later."""
        with self._lock:
            self._closed = True
            while self._open:
                self._end(next(iter(self._open.values())))

    def _end(self, peer: str) -> None:
        """Ends the oldest connection of a peer; its thread notices."""
        oldest = next(channel for channel, whose in self._open.items() if whose == peer)
        del self._open[oldest]
        oldest.interrupt()


class Arrival(NamedTuple):
    """An authenticated connection."""

    channel: Channel
    host: str
    peer: int
    """The number that it claims."""
    same_run: bool
    """Whether it is of this run, which it knows too."""
    whose: str
    """Its key, or its address in a run without keys: limits count by it, as one key may connect from many addresses."""


class Listener:
    """Accepts connections on one socket and passes each, after authentication, to `arrived` in a separate thread.

    Args: `older` as in `prove_to_dialler`; `keys` encrypt each connection, and replace the secret.
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
        # Each step has its own limit: connections stuck at one step never displace those at a later one. One address
        # may use all free places, as honest workers may share it with strangers behind one router. A worker is displaced
        # only if that many others arrive during one round trip to it.
        self._handshakes = [ConnectionLimit(_PLACES, _PLACES) for _ in range(_STEPS)]
        self._closed = False
        self._busy = 0
        self._lock = threading.Lock()
        self.address = shown(*sock.getsockname()[:2])
        # In a thread, as newcomers and returning peers arrive during training.
        threading.Thread(target=self._accept, daemon=True, name="gossamer listener").start()

    @property
    def busy(self) -> bool:
        """Whether an accepted connection is not handled yet."""
        return self._busy > 0

    def close(self) -> None:
        """Stops accepting; connections being handled continue."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a close alone would let the thread in accept take one more
        self._sock.close()

    def hang_up(self) -> None:
        """Ends unauthenticated connections."""
        for step in self._handshakes:
            step.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._sock.accept()
            except OSError:  # for example no free file descriptor, or closed
                time.sleep(RETRY_S)
                continue
            with self._lock:
                self._busy += 1
            # In a separate thread, as a stranger may be slow; their number is bounded in `_attend`.
            thread = threading.Thread(
                target=self._attend, args=(sock, str(address[0])), daemon=True, name="gossamer arrival"
            )
            try:
                thread.start()
            except RuntimeError:  # no thread available; the peer may retry, and the next one is accepted
                sock.close()
                with self._lock:
                    self._busy -= 1
                time.sleep(RETRY_S)

    def _attend(self, sock: socket.socket, host: str) -> None:
        try:
            # The only place where a process accepts. The channel is admitted first, as a stranger may delay its
            # handshake, and displacement ends the channel.
            channel = Channel(sock, HANDSHAKE_S)
            steps = iter(self._handshakes)
            step = next(steps)
            step.admit(channel, host)

            def advance(whose: str = host) -> None:
                nonlocal step
                left, step = step, next(steps)
                # Before releasing the previous step: `hang_up` visits the steps in this order.
                step.admit(channel, whose)
                left.release(channel)

            try:
                peer, same = self._proof(channel, advance)
            except (PeerError, OSError) as error:
                channel.close()  # silently: reveals nothing to a stranger
                if not self._closed:
                    self.refusals.add(host, error)
                return
            finally:
                step.release(channel)
            whose = host if self._keys is None else self._keys.name(channel.certificate)
            try:
                self._arrived(Arrival(channel, host, peer, same, whose))
            except BaseException:  # a fault of this process, for which the other end must not wait
                channel.close()
                raise
        finally:
            with self._lock:
                self._busy -= 1

    def _proof(self, channel: Channel, advance: Callable[..., None]) -> tuple[int, bool]:
        """The handshake's result: the number of the other end, and whether it is of this run; `advance` is called after
        each step but the last, with the other end's key once it is known.
        """
        if self._keys is None:
            return prove_to_dialler(channel, self._secret, run=self._run, older=self._older, begun=advance)
        deadline = time.monotonic() + HANDSHAKE_S
        channel.encrypt(self._keys, server=True, deadline=deadline, answered=advance)
        self._keys.must_list(channel.certificate)
        advance(self._keys.name(channel.certificate))
        peer, same = prove_to_dialler(channel, self._secret, run=self._run, older=self._older)
        if peer not in GUESTS:
            self._keys.must_have(channel.certificate, peer)
        return peer, same
