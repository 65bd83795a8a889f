"""The connection test between two ends of `gossamer doctor`. Needs no torch.

After mutual authentication by the secret of the run or its keys:

    dialler → listener   its clock; a port at which it listens now, and a random number that it sends there
    listener → dialler   its clock; the address that it sees; whether it reached that port there and read that number
    dialler → listener   repeatedly: how many bytes it will send, or wants to receive; 0 ends it

The listener dials back only to the address of the dialler, so it cannot be used to probe other machines.
"""

import contextlib
import hashlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gossamer.errors import PeerError
from gossamer.transport.keys import Keys
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import dial_any
from gossamer.transport.sockets.header import WATCHER
from gossamer.transport.sockets.listener import Arrival, Listener, Refusals

RUN = int(hashlib.sha256(b"gossamer doctor").hexdigest()[:16], 16)
"""A placeholder for the run's number."""
PATIENCE_S = 5.0
"""Timeout of each step; a slower machine counts as unreachable."""
MOST_BYTES = 1 << 25
_FIRST_BYTES, _LONG_ENOUGH_S = 1 << 16, 0.5
_HELLO = struct.Struct("<dH16s")
_ANSWER = struct.Struct("<d?46s")
_ORDER = struct.Struct("<?Q")


class ThereAndBack(NamedTuple):
    """The measured connection to another machine running `gossamer doctor`."""

    clock_ahead_s: float
    """Offset of the other end's clock, accurate to half of `round_trip_s`."""
    round_trip_s: float
    seen_as: str
    """The address under which the other end sees this machine."""
    reached_back: bool
    """Whether the other end could open a connection to this machine."""
    up_bps: float
    """Bits per second towards the other end, over one connection, encrypted if there are keys."""
    down_bps: float


def examine(
    address: str, secret: bytes, keys: Keys | None, listener: socket.socket | None = None
) -> ThereAndBack | None:
    """The result of testing the connection to `gossamer doctor` at `host:port`; None where another process with these
    credentials listens, such as a run.

    Args: `listener` accepts the other end's connection back.
    Raises: OSError without an answer; PeerError when the other end refuses, does not know the secret, or is lost.
    Cost: at most 64 MiB, or about two seconds, over the link.
    """
    channel, accepted = dial_any(address, secret, run=RUN, me=WATCHER, timeout_s=PATIENCE_S, keys=keys)
    with channel:
        if not accepted:
            return None
        number = secrets.token_bytes(16)
        port = 0 if listener is None else listener.getsockname()[1]
        with _sends_number(listener, number):
            sent_s, began = time.time(), time.monotonic()
            channel.write(_HELLO.pack(sent_s, port, number))
            theirs_s, reached, seen = _ANSWER.unpack(channel.read(_ANSWER.size, time.monotonic() + 2 * PATIENCE_S))
            waited_s = time.monotonic() - began
        trips = [_timed(channel, 1, up=True) for _ in range(5)]
        # The other end read its clock when it answered, after it had dialled back.
        ahead_s = theirs_s - (sent_s + waited_s - min(trips) / 2)
        up_bps, down_bps = (_speed_bps(channel, up=up) for up in (True, False))
        channel.write(_ORDER.pack(True, 0))
        return ThereAndBack(
            ahead_s, min(trips), seen.rstrip(b"\0").decode("ascii", "replace"), reached, up_bps, down_bps
        )


class ExaminationServer:
    """Answers every `gossamer doctor` that dials here, each in a separate thread, until it is closed.

    Args:
        sock: listens; closed by `close`.
        report: called with the address of each answered peer, and whether it is reachable from here.
    """

    def __init__(
        self, sock: socket.socket, secret: bytes, keys: Keys | None, report: Callable[[str, bool], None]
    ) -> None:
        self._report = report
        self._listener = Listener(sock, secret, RUN, self._arrived, Refusals(), keys=keys)
        self.address = self._listener.address

    def close(self) -> None:
        """Stops answering."""
        self._listener.close()
        self._listener.hang_up()

    def _arrived(self, arrival: Arrival) -> None:
        with arrival.channel as channel, contextlib.suppress(OSError, PeerError, struct.error):
            if not arrival.same_run:
                return
            channel.wait_at_most(PATIENCE_S)
            _, port, number = _HELLO.unpack(channel.read(_HELLO.size))
            reached = bool(port) and _can_dial_back(arrival.host, port, number)
            channel.write(_ANSWER.pack(time.time(), reached, arrival.host.partition("%")[0].encode()))
            self._report(arrival.host, reached)
            while True:
                up, size = _ORDER.unpack(channel.read(_ORDER.size))
                if not 0 < size <= MOST_BYTES:
                    return
                if up:
                    channel.read(size)
                    channel.write(b"\1")
                else:
                    channel.write(bytes(size))


def _can_dial_back(host: str, port: int, number: bytes) -> bool:
    try:
        with Channel(socket.create_connection((host, port), timeout=PATIENCE_S), PATIENCE_S) as back:
            return back.read(len(number), time.monotonic() + PATIENCE_S) == number
    except OSError:
        return False


@contextlib.contextmanager
def _sends_number(listener: socket.socket | None, number: bytes) -> Iterator[None]:
    """A context in which the listener sends the number to each connection."""
    if listener is None:
        yield
        return

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with Channel(sock, PATIENCE_S) as back, contextlib.suppress(OSError):
                    back.write(number)

    # Both machines test each other concurrently: one that only dialled would be unreachable for the other.
    threading.Thread(target=answer, daemon=True, name="gossamer doctor").start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the accept in the thread


def _timed(channel: Channel, size: int, *, up: bool) -> float:
    """Seconds until `size` bytes went one way, and a few bytes the other."""
    began = time.monotonic()
    channel.write(_ORDER.pack(up, size) + (bytes(size) if up else b""))
    channel.read(1 if up else size)
    return time.monotonic() - began


def _speed_bps(channel: Channel, *, up: bool) -> float:
    """Bits per second, from messages that grow until one takes half a second or reaches the limit."""
    size = _FIRST_BYTES
    while True:
        took_s = _timed(channel, size, up=up)
        if took_s >= _LONG_ENOUGH_S or size == MOST_BYTES:
            return 8 * size / took_s
        size = min(MOST_BYTES, 4 * size)
