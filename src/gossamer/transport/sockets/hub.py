"""The connections of a server that workers join: threads carry their frames, and one session decides and computes."""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from gossamer.errors import GossamerError, PeerError, TransportError
from gossamer.record.progress import say
from gossamer.transport.alike import difference
from gossamer.transport.contract import Turn
from gossamer.transport.processes.local import LISTENER
from gossamer.transport.sockets.handshake import HANDSHAKE_S, HalfOpen, prove_to_worker
from gossamer.transport.sockets.stream import HELLO, Stream

__all__ = ["Conversation", "Credentials", "Hub", "Manner", "Session", "listener_at"]

log = logging.getLogger("gossamer")

REPORTED = 20
"""The refused connections that are each reported; after them, only the 32nd, the 64th and so on are."""
PARTING_S = 5.0
"""How long a run that is over waits for those that are still told so."""


class _Reply(Protocol):
    @property
    def peer(self) -> int: ...


R = TypeVar("R", bound=_Reply)


class Session(Protocol[R]):
    """What decides and computes. Each input has its seconds since the run began, and returns what peers are told."""

    def join(self, peer: int, hello: Sequence[int], now_s: float, /) -> list[R]:
        """A peer joins, anew if it was there before."""
        ...

    def hear(self, peer: int, content: Any, now_s: float, /) -> list[R]:
        """What a peer has sent has arrived."""
        ...

    def leave(self, peer: int, reason: str | None, now_s: float, /) -> list[R]:
        """A peer is gone, because of a reason; None for one to which nothing was left to tell."""
        ...

    def tick(self, now_s: float) -> list[R]:
        """Time has passed."""
        ...

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        ...

    @property
    def progress(self) -> str:
        """How far the run is, in words."""
        ...

    @property
    def next_closing_s(self) -> float:
        """When it has something to do although nothing comes."""
        ...

    def close(self, now_s: float) -> None:
        """The run is over."""
        ...


class Credentials(NamedTuple):
    """What a process of a run proves to another."""

    me: int
    """Its number: the server follows the workers."""
    secret: bytes
    key: int
    """See `gossamer.run.served.protocol.run_key`."""
    settings: Mapping[str, str]
    """What this process runs, so that those of another run can be told what differs."""


class Conversation(Generic[R]):
    """A connection whose other end has said who it is. What it is told is put into `replies`."""

    def __init__(self, peer: int, stream: Stream) -> None:
        self.peer, self.stream = peer, stream
        self.replaced = False
        """Whether the peer has come again over another connection; None in `replies` tells its thread."""
        self.replies: queue.SimpleQueue[R | None] = queue.SimpleQueue()

    def next(self) -> R:
        """What the peer is told next. Raises PeerError when it has come again over another connection."""
        if (reply := self.replies.get()) is None:
            raise PeerError(f"{self.stream.name} has come again over another connection")
        return reply


class Manner(NamedTuple):
    """How workers are talked with.

    Args: `talk(connection, heard, now)` sends each reply and passes on what it receives, until nothing is left to tell.
    """

    workers: int
    """How many there are."""
    greeting: int
    """Numbers in the hello of a worker."""
    talk: Callable[[Conversation[Any], Callable[[Any], None], Callable[[], float]], None]


class _Joined(NamedTuple):
    connection: Conversation[Any]
    hello: list[int]


class _Heard(NamedTuple):
    connection: Conversation[Any]
    content: Any


class _Lost(NamedTuple):
    connection: Conversation[Any]
    reason: str | None


class Hub:
    """The connections of one process. One thread for each carries its frames; the thread that calls `run` does all else.

    Args:
        listener: where peers come to; it is closed by `close`.
        timeout_s: how long a peer may be silent, and how long the run goes on with nobody there.
    """

    def __init__(self, listener: socket.socket, member: Credentials, manner: Manner, timeout_s: float) -> None:
        self._listener, self._member, self._manner, self._timeout_s = listener, member, manner, timeout_s
        self._inputs: queue.SimpleQueue[_Joined | _Heard | _Lost] = queue.SimpleQueue()
        self._connections: dict[int, Conversation[Any]] = {}
        self._threads: list[threading.Thread] = []
        self._half_open, self._refused = HalfOpen(), 0
        self._parting_s: float | None = None  # how long the connected still hear the last; None while peers may come
        self._began, self._begin_s = time.monotonic(), 0.0
        self._session: Session[Any]

    def open(self) -> None:
        """Lets peers come."""
        host, port = self._listener.getsockname()[:2]
        say(f"serving {self._manner.workers} workers on {host}:{port}")
        threading.Thread(target=self._accept, daemon=True).start()

    def run(self, session: Session[Any], begin_s: float) -> None:
        """Passes all that comes to a session, until it is over.

        Raises: PeerError when nobody is there and nobody comes within `timeout_s`.
        """
        self._session, self._began, self._begin_s = session, time.monotonic(), begin_s
        timeout_s, alone_since_s = self._timeout_s, begin_s
        while not session.over:
            item = self._next()
            now_s = self.now()
            if item is not None:
                self._handle(item, now_s)
            self._send(session.tick(now_s))
            if self._connections:
                alone_since_s = now_s
            elif now_s - alone_since_s > timeout_s:
                raise PeerError(
                    f"no worker has been here for {timeout_s:g} s and {session.progress}; check the workers' logs, then resume"
                )
        self._see_off()
        session.close(self.now())

    def close(self) -> None:
        """Lets nobody come any more, and ends the connections once all have been told the last."""
        deadline = self._stop_listening()
        self._half_open.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for connection in self._connections.values():
            connection.stream.close()

    def now(self) -> float:
        """Seconds since the run began."""
        return self._begin_s + time.monotonic() - self._began

    def _stop_listening(self) -> float:
        """Lets nobody come any more; returns until when the threads of connections may go on, the same whenever it is called."""
        if self._parting_s is None:
            self._parting_s = time.monotonic() + PARTING_S
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # a close alone would let the thread in accept take one more
            self._listener.close()
        return self._parting_s

    def _see_off(self) -> None:
        """The session is over: lets nobody come any more, and those who have just come hear from it that nothing is left."""
        deadline = self._stop_listening()
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                item = self._inputs.get(timeout=0.05)
                if not isinstance(
                    item, _Lost
                ):  # who leaves a run that is over is no loss, and the record ends with the run
                    self._handle(item, self.now())

    def _next(self) -> "_Joined | _Heard | _Lost | None":
        """The next input; None when the session has to act before one comes, or nothing comes for a second."""
        wait_s = min(self._session.next_closing_s - self.now(), self._timeout_s / 4, 1.0)
        try:
            return self._inputs.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return None

    def _handle(self, item: "_Joined | _Heard | _Lost", now_s: float) -> None:
        connection = item.connection
        peer, current = connection.peer, self._connections.get(connection.peer)
        if isinstance(item, _Joined):
            if current is not None:
                current.replaced = True
                current.replies.put(None)
                current.stream.stop_listening()
                self._drop(current, "came again over another connection", now_s)
            self._connections[peer] = connection
            self._send(self._session.join(peer, item.hello, now_s))
        elif connection is not current:
            return  # messages over the replaced connection are ignored
        elif isinstance(item, _Heard):
            self._send(self._session.hear(peer, item.content, now_s))
        else:
            self._drop(connection, item.reason, now_s)

    def _drop(self, connection: Conversation[Any], reason: str | None, now_s: float) -> None:
        del self._connections[connection.peer]
        self._send(self._session.leave(connection.peer, reason, now_s))

    def _send(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            self._connections[reply.peer].replies.put(reply)

    # What follows happens in a thread for each connection.

    def _accept(self) -> None:
        while True:
            try:
                sock, who = self._listener.accept()
            except OSError as error:
                if self._parting_s is not None:
                    return
                log.warning("could not accept a connection (%s); trying again", error)
                time.sleep(1.0)
                continue
            self._half_open.admit(sock, who[0])
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._attend, args=(sock, f"{who[0]}:{who[1]}"), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _attend(self, sock: socket.socket, who: str) -> None:
        """Carries the frames of one connection, after its other end has proved that it knows the secret."""
        try:
            number, same_run = prove_to_worker(sock, self._member.secret, run=self._member.key)
        except PeerError as error:
            sock.close()  # without a word: a stranger learns nothing
            self._refused += 1
            if self._refused <= REPORTED or self._refused.bit_count() == 1:
                log.warning("refused connection %d, from %s: %s", self._refused, who, error)
            return
        finally:
            self._half_open.settle(sock)
        name = f"worker {number}"
        stream = Stream(
            sock, run=self._member.key, me=self._member.me, peer=number, name=name, timeout_s=HANDSHAKE_S
        )  # fmt: skip
        connection = None
        try:
            connection, hello = self._greet(stream, same_run)
            self._inputs.put(_Joined(connection, hello))
            known = connection
            self._manner.talk(known, lambda content: self._inputs.put(_Heard(known, content)), self.now)
        except GossamerError as error:
            if connection is None:
                log.warning("refused a worker from %s: %s", who, error)
            else:
                self._inputs.put(_Lost(connection, str(error)))
            replaced = connection is not None and connection.replaced
            stream.refuse(f"{name} has come again from elsewhere" if replaced else str(error))
        else:
            self._inputs.put(_Lost(connection, None))
        finally:
            stream.close()

    def _greet(self, stream: Stream, same_run: bool) -> tuple[Conversation[Any], list[int]]:
        """The connection of a peer of this run, and its hello."""
        if not same_run:
            theirs = stream.receive_settings()
            differ = theirs and difference(stream.name, theirs, "the server", self._member.settings)
            raise PeerError(
                f"{stream.name} runs another configuration{f': {differ}' if differ else ''}; start all workers with the same run "
                "file, data and gossamer"
            )
        if not 0 <= stream.peer < self._manner.workers:
            raise TransportError(
                f"{stream.name} is none of the {self._manner.workers} workers that are served here; give --worker 0 to "
                f"{self._manner.workers - 1}"
            )
        (hello,) = stream.receive(Turn(0, 0, HELLO), [torch.empty(self._manner.greeting, dtype=torch.int64)])
        stream.wait_at_most(self._timeout_s)
        return Conversation(stream.peer, stream), [int(number) for number in hello]


def listener_at(host: str, port: int) -> socket.socket:
    """The socket to listen on: the one a launcher has made, or a new one. Raises TransportError when there is none.

    That of a launcher is taken once: processes that are started later do not have it, and must not look for it.
    """
    if (inherited := os.environ.pop(LISTENER, None)) is not None:
        return socket.socket(fileno=int(inherited))
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise TransportError(f"the server could not listen on {host}:{port} ({error}); choose another port") from None
