"""A connection with another process: a reader thread, a writer thread, and callbacks of its owner.

No call waits for a peer: letters are queued and sent as the other end accepts them, and received ones are passed on at
once.
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from gossamer.errors import GossamerError, RefusedError, TransportError
from gossamer.transport.keys import Keys
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.header import LetterKind, Limits
from gossamer.transport.sockets.letter import Letter, body_of, fresh_memory, receive_letter, send_letter
from gossamer.transport.sockets.listener import Arrival, Listener, Refusals

REFUSAL_BYTES = 1000
PARTING_S = 5.0
"""How long the other end has to read the reason for the end of a connection."""
SETTLES_S = 5.0
"""How often an idle connection checks whether the other end has confirmed everything."""
MOST_WAITING = 1 << 13
"""The most unsent letters of a connection. Few wait over a slow link, and any number for a peer that asks and does not read."""
CLOSED = "it was closed"
"""The reason for a connection that the other end has ended regularly."""
_LAST = {LetterKind.END, LetterKind.REFUSAL}


class Endpoint(NamedTuple):
    """The listening socket of a process, and its credentials."""

    listener: socket.socket
    run: int
    secret: bytes
    timeout_s: float
    deadline_s: float | None = None
    keys: Keys | None = None
    """Used in place of the secret, if the run has keys."""

    def listen(self, arrived: Callable[[Arrival], None], refusals: Refusals, *, older: bytes = b"GOSL") -> Listener:
        """Accepts connections of the run. Args: as of `Listener`."""
        return Listener(self.listener, self.secret, self.run, arrived, refusals, older=older, keys=self.keys)

    def dial(self, address: str, me: int, whom: int, most_s: float | None = None) -> Channel:
        """A connection of process `me` with process `whom` of the run. Raises: as `gossamer.transport.sockets.handshake.dial`."""
        timeout_s = self.timeout_s if most_s is None else min(most_s, self.timeout_s)
        return dial(address, self.secret, run=self.run, me=me, timeout_s=timeout_s, keys=self.keys, whom=whom)


class Owner(NamedTuple):
    """The callbacks of a connection, called in its threads."""

    me: int
    """The number of this process."""
    endpoint: Endpoint
    """Its `timeout_s` is how long the other end may accept no bytes, or pause in the middle of a letter."""
    limits: Limits
    accepts: Callable[["PeerConnection", Letter, int], bool]
    """Whether a body of this size may follow a header."""
    received: Callable[["PeerConnection", Letter], None]
    """Handles a received letter; a TransportError ends the connection, and its reason is sent to the other end."""
    lost: Callable[["PeerConnection", str], None]
    """Called once with the reason when the connection is gone."""
    refusals: Refusals
    sent: Callable[["PeerConnection", Letter], None] = lambda connection, letter: None
    """Called when a letter was sent and its body may change."""
    memory: Callable[[int], Tensor] = fresh_memory
    """Allocates memory for a received body."""


class PeerConnection:
    """One end of a connection with a process.

    Args:
        peer: its number.
        opened: opens the channel, in a thread of the connection, so that no caller waits for an unresponsive peer.
        first: the letter sent first.
    """

    def __init__(self, peer: int, owner: Owner, opened: Callable[[], Channel], first: Letter | None = None) -> None:
        self.peer = peer
        self.nonce: int | None = None
        """The nonce of the process at the other end, once known."""
        self._owner, self._opened = owner, opened
        # Letters are sent in the order in which any thread queued them; None closes the queue.
        self._letters: queue.SimpleQueue[Letter | Callable[[], Letter] | None] = queue.SimpleQueue()
        if first is not None:
            self._letters.put(first)
        self.channel: Channel | None = None
        """The channel, once open."""
        self._lost, self._done = threading.Lock(), threading.Event()
        self._closed = False
        _start(self._write)

    @property
    def moved_s(self) -> float:
        """The time of the last progress, on the clock of `time.monotonic`."""
        return 0.0 if self.channel is None else self.channel.moved_s

    def send(self, letter: Letter | Callable[[], Letter]) -> None:
        """Queues a letter, or a function that makes one in the sending thread.

        A peer that does not read what it asks for loses its connection: its answers would fill the memory.
        """
        if self._letters.qsize() < MOST_WAITING:
            self._letters.put(letter)
        elif not self._closed:
            self._closed = True
            # In a thread, as the caller may hold locks of the owner. Not a refusal: others may cause letters to a slow peer.
            _start(self._end, f"it reads more slowly than letters to it come, and {MOST_WAITING} of them wait")

    def end(self) -> None:
        """Queues the END letter, after which the other end closes."""
        # A letter instead of a half-closed socket, which TLS does not support (`Channel.interrupt`).
        self._letters.put(Letter(LetterKind.END, self._owner.me))

    def finish(self, timeout_s: float) -> None:
        """Sends queued letters and END, and closes once the other end has read them or `timeout_s` is over."""
        self.end()
        self._done.wait(timeout_s)
        self.close()

    def refuse(self, why: str) -> None:
        """Sends the reason why this connection ends, and ends it once it is read, or after some seconds."""
        self._letters.put(refusal(self._owner.me, why))
        _start(self.finish, PARTING_S)

    def close(self) -> None:
        """Ends the connection at once; may be called twice."""
        # In this order: a writer that has just opened the channel checks `_closed` afterwards, so one of the two closes
        # it.
        self._closed = True
        self._letters.put(None)
        if self.channel is not None:
            self.channel.interrupt()

    def _write(self) -> None:
        try:
            self._write_all()
        except BaseException as error:
            # A fault of this process; without this, letters would be queued forever for a dead thread.
            self._end(f"{type(error).__name__}: {error}")
            raise

    def _write_all(self) -> None:
        try:
            self.channel = channel = self._opened()
        except (OSError, GossamerError) as error:
            self._end(str(error))
            return
        _start(self._read, channel, threading.current_thread())
        try:
            channel.wait_at_most(self._owner.endpoint.timeout_s)
            while (item := self._next_letter(channel)) is not None and not self._closed:
                letter = item if isinstance(item, Letter) else item()
                send_letter(channel, letter, self._owner.endpoint.run)
                self._owner.sent(self, letter)
                if letter.kind is LetterKind.END:
                    return  # the connection lasts until the other end closes, which the reader notices
            self._end(CLOSED)
        except (OSError, GossamerError) as error:
            self._end(str(error))

    def _next_letter(self, channel: Channel) -> "Letter | Callable[[], Letter] | None":
        while not channel.settle():
            with contextlib.suppress(queue.Empty):
                return self._letters.get(timeout=min(SETTLES_S, self._owner.endpoint.timeout_s / 8))
        return self._letters.get()

    def _read(self, channel: Channel, writer: threading.Thread) -> None:
        try:
            self._read_all(channel)
        finally:  # even if a callback has raised
            # The last of both threads frees the descriptor. The writer ends, as the connection is interrupted and its
            # queue closed.
            self.close()
            writer.join()
            channel.close()

    def _read_all(self, channel: Channel) -> None:
        owner = self._owner
        try:
            while (
                letter := receive_letter(
                    channel, owner.endpoint.run, owner.limits, self._accepts, idle=True, memory=owner.memory
                )
            ).kind not in _LAST:
                owner.received(self, letter)
            self._end(CLOSED if letter.kind is LetterKind.END else refused_by("it", letter))
        except TransportError as error:
            owner.refusals.add(f"worker {self.peer}", error)
            # The owner continues at once, and the other end has some seconds to read the reason.
            self._lose(str(error))
            self.refuse(str(error))
            channel.drain()
            self._end(str(error))
        except (OSError, GossamerError) as error:
            self._end(str(error))

    def _accepts(self, letter: Letter, size: int) -> bool:
        """Whether this peer may send this letter now, checked before its body is read."""
        if letter.sender != self.peer:
            raise RefusedError("bounds", f"worker {self.peer} calls itself worker {letter.sender}")
        if letter.kind in _LAST:
            return size <= REFUSAL_BYTES
        return self._owner.accepts(self, letter, size)

    def _lose(self, why: str) -> None:
        # Reader and writer may both fail, and the owner is notified once: this lock is never released.
        if self._lost.acquire(blocking=False):
            self._owner.lost(self, why)

    def _end(self, why: str) -> None:
        self._done.set()
        self.close()
        self._lose(why)


def finish_together(connections: Iterable[PeerConnection], timeout_s: float) -> None:
    """Finishes connections at the same time: several peers that hang cost the timeout only once."""
    enders = [threading.Thread(target=one.finish, args=(timeout_s,)) for one in connections]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()


def refusal(me: int, why: str) -> Letter:
    """The letter with the reason for the end of a connection."""
    return Letter(LetterKind.REFUSAL, me, body=body_of(why.encode()[:REFUSAL_BYTES]))


def refused_by(who: str, letter: Letter) -> str:
    """The sentence about a refusal, without terminal control characters."""
    reason = letter.content.decode("utf-8", "replace")
    return f"{who} refused this process: {''.join(c for c in reason if c.isprintable())}"


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True, name="gossamer connection").start()
