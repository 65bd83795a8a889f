"""A connection with another process: a thread that reads letters, one that writes them, and an owner that is told.

Nobody waits for a peer here: a letter is queued and goes out as the other end takes it, and what comes in is handed on at once.
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gossamer.errors import GossamerError, RefusedError, TransportError
from gossamer.transport.keys import Keys
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.header import LetterKind, Limits
from gossamer.transport.sockets.letter import Letter, body_of, fresh_memory, receive_letter, send_letter
from gossamer.transport.sockets.listener import Refusals

REFUSAL_BYTES = 1000
PARTING_S = 5.0
"""How long the other end has to read why a connection ends."""
SETTLES_S = 5.0
"""How often a connection that sends nothing looks whether the other end has all of it."""
CLOSED = "it was closed"
"""Why a connection is gone whose other end has said that nothing follows."""
_LAST = {LetterKind.END, LetterKind.REFUSAL}


class Endpoint(NamedTuple):
    """Where a process listens, and what it proves itself with."""

    listener: socket.socket
    run: int
    secret: bytes
    timeout_s: float
    deadline_s: float | None = None
    keys: Keys | None = None
    """In place of the secret, where the run has them."""


class Owner(NamedTuple):
    """Whom a connection reports to; the functions are called in the connection's own threads."""

    me: int
    """The number of this process."""
    run: int
    limits: Limits
    timeout_s: float
    """How long the other end may take no bytes, or be silent in the middle of a letter."""
    accepts: Callable[["PeerConnection", Letter, int], bool]
    """Whether a body of this size may follow a header."""
    heard: Callable[["PeerConnection", Letter], None]
    """Takes a letter in; a TransportError ends the connection, and the other end reads why."""
    lost: Callable[["PeerConnection", str], None]
    """The connection is gone, and why; called once."""
    refusals: Refusals
    sent: Callable[["PeerConnection", Letter], None] = lambda connection, letter: None
    """A letter has left, and its body may change."""
    memory: Callable[[int], Tensor] = fresh_memory
    """Gives that of a body that comes."""


class PeerConnection:
    """One end of a connection with a process.

    Args:
        peer: its number.
        opened: makes the channel, in a thread of the connection, so that nobody waits for a peer that does not answer.
        first: what is sent before anything else.
    """

    def __init__(self, peer: int, owner: Owner, opened: Callable[[], Channel], first: Letter | None = None) -> None:
        self.peer = peer
        self.nonce: int | None = None
        """Of the process at the other end, once it has said so."""
        self._owner, self._opened = owner, opened
        # Letters leave in the order in which they were queued, whichever threads have queued them; None closes the queue.
        self._letters: queue.SimpleQueue[Letter | Callable[[], Letter] | None] = queue.SimpleQueue()
        if first is not None:
            self._letters.put(first)
        self.channel: Channel | None = None
        """Once it is open."""
        self._lost, self._done = threading.Lock(), threading.Event()
        self._closed = False
        _start(self._write)

    @property
    def moved_s(self) -> float:
        """When bytes last went or came, on the clock of `time.monotonic`."""
        return 0.0 if self.channel is None else self.channel.moved_s

    def send(self, letter: Letter | Callable[[], Letter]) -> None:
        """Queues a letter, or what makes one in the thread that sends it."""
        self._letters.put(letter)

    def end(self) -> None:
        """Queues the word that nothing follows, after which the other end closes."""
        # A letter and no closed direction of the socket, which encryption would not survive (`Channel.close`).
        self._letters.put(Letter(LetterKind.END, self._owner.me))

    def finish(self, timeout_s: float) -> None:
        """Sends what is queued, says that nothing follows, and closes once the other end has read it or `timeout_s` is over."""
        self.end()
        self._done.wait(timeout_s)
        self.close()

    def refuse(self, why: str) -> None:
        """Tells the other end why this connection ends, and ends it once it has read that, or has not for some seconds."""
        self._letters.put(refusal(self._owner.me, why))
        _start(self.finish, PARTING_S)

    def close(self) -> None:
        """Ends the connection at once; may be called twice."""
        # In this order: a writer that has just opened the channel looks at `_closed` afterwards, so one of both closes it.
        self._closed = True
        self._letters.put(None)
        if self.channel is not None:
            self.channel.interrupt()

    def _write(self) -> None:
        try:
            self._write_all()
        except BaseException as error:
            # A fault of this process; without this, letters would be queued for ever, for a thread that is gone.
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
            channel.wait_at_most(self._owner.timeout_s)
            while (item := self._next_letter(channel)) is not None and not self._closed:
                letter = item if isinstance(item, Letter) else item()
                send_letter(channel, letter, self._owner.run)
                self._owner.sent(self, letter)
                if letter.kind is LetterKind.END:
                    return  # the connection lasts until the other end has closed, which the reader notices
            self._end(CLOSED)
        except (OSError, GossamerError) as error:
            self._end(str(error))

    def _next_letter(self, channel: Channel) -> "Letter | Callable[[], Letter] | None":
        while not channel.settle():
            with contextlib.suppress(queue.Empty):
                return self._letters.get(timeout=min(SETTLES_S, self._owner.timeout_s / 8))
        return self._letters.get()

    def _read(self, channel: Channel, writer: threading.Thread) -> None:
        try:
            self._read_all(channel)
        finally:  # whatever its owner has raised
            # The last thread of both frees the descriptor. The writer ends: the connection is interrupted and its queue closed.
            self.close()
            writer.join()
            channel.close()

    def _read_all(self, channel: Channel) -> None:
        owner = self._owner
        try:
            while (
                letter := receive_letter(
                    channel, owner.run, owner.limits, self._accepts, idle=True, memory=owner.memory
                )
            ).kind not in _LAST:
                owner.heard(self, letter)
            self._end(CLOSED if letter.kind is LetterKind.END else refused_by("it", letter))
        except TransportError as error:
            owner.refusals.add(f"worker {self.peer}", error)
            # The owner goes on at once, and the other end has some seconds to read what was wrong.
            self._lose(str(error))
            self.refuse(str(error))
            channel.drain()
            self._end(str(error))
        except (OSError, GossamerError) as error:
            self._end(str(error))

    def _accepts(self, letter: Letter, size: int) -> bool:
        """Whether this peer may send it now, which is asked before its body is read."""
        if letter.sender != self.peer:
            raise RefusedError("bounds", f"worker {self.peer} calls itself worker {letter.sender}")
        if letter.kind in _LAST:
            return size <= REFUSAL_BYTES
        return self._owner.accepts(self, letter, size)

    def _lose(self, why: str) -> None:
        # Reader and writer may both fail, and the owner is told once: this lock is never released.
        if self._lost.acquire(blocking=False):
            self._owner.lost(self, why)

    def _end(self, why: str) -> None:
        self._done.set()
        self.close()
        self._lose(why)


def refusal(me: int, why: str) -> Letter:
    """The letter with the reason why a connection ends."""
    return Letter(LetterKind.REFUSAL, me, body=body_of(why.encode()[:REFUSAL_BYTES]))


def refused_by(who: str, letter: Letter) -> str:
    """The sentence about a refusal, in which nothing stands that a terminal would obey."""
    said = letter.content.decode("utf-8", "replace")
    return f"{who} refused this process: {''.join(c for c in said if c.isprintable())}"


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True, name="gossamer connection").start()
