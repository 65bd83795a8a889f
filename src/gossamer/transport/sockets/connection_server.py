"""The connections of a server that workers join: threads carry their letters, and one session decides and computes."""

import contextlib
import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from gossamer.errors import ConfigError, PeerError, RefusedError, TransportError
from gossamer.record.progress import say
from gossamer.transport.alike import difference
from gossamer.transport.contract import Ticket
from gossamer.transport.processes.interfaces import announced_address
from gossamer.transport.processes.local import LISTENER
from gossamer.transport.sockets.addresses import listen, loopback_warning, shown
from gossamer.transport.sockets.connection import Endpoint, Owner, PeerConnection, refusal
from gossamer.transport.sockets.handshake import HANDSHAKE_S
from gossamer.transport.sockets.header import LetterKind, Limits
from gossamer.transport.sockets.letter import Letter, receive_letter, send_letter, small
from gossamer.transport.sockets.listener import Arrival, ConnectionLimit, Listener, Refusals
from gossamer.transport.sockets.server_client import NO_NUMBERS, NO_RUN, SETTINGS_BYTES, read_settings_in

log = logging.getLogger("gossamer")

PARTING_S = 5.0
"""How long a run that is over waits for those that are still told so."""


class _Reply(Protocol):
    @property
    def peer(self) -> int: ...


R = TypeVar("R", bound=_Reply)


_ALONE_S = 2.0
"""How long a server that is asked to stop waits for somebody to come back."""


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


class Awaited(NamedTuple):
    """The letter that a peer sends next, and nothing else."""

    ticket: Ticket
    size: int


class PeerProtocol(Protocol):
    """What a server and its workers say to each other. But for `letters`, called in threads of connections."""

    limits: Limits
    hello_bytes: int

    def hello(self, peer: int, body: Tensor) -> Sequence[int]:
        """What the session is told of the hello of a worker. Raises RefusedError."""
        ...

    def letters(self, reply: Any) -> Iterable[Callable[[], Letter]]:
        """What makes the letters of a reply, in the thread that sends them."""
        ...

    def awaited(self, reply: Any) -> Awaited | None:
        """What the peer sends after this reply; None where nothing is left."""
        ...

    def content(self, letter: Letter, start_s: float) -> Any:
        """What has come, with the time at which it was asked for. Raises TransportError."""
        ...


class _WorkerConnection(PeerConnection):
    """A connection with a worker."""

    def __init__(self, arrival: Arrival, owner: Owner) -> None:
        # Before the threads start, which read them.
        self.awaited: Awaited | None = None
        """What it is to send next."""
        self.asked_s = self.asked_at = 0.0
        """When it was asked for that, since the run began and on the clock of `time.monotonic`."""
        self.done = False
        """Whether nothing is left to tell it."""
        super().__init__(arrival.peer, owner, lambda: arrival.channel)


class _Joined(NamedTuple):
    arrival: Arrival
    hello: Sequence[int]


class _Heard(NamedTuple):
    connection: PeerConnection
    content: Any


class _Lost(NamedTuple):
    connection: PeerConnection
    reason: str


class ConnectionServer:
    """The connections of one process. Threads carry their letters; the thread that calls `run` does all else.

    Args:
        endpoint: where workers come to, whose listener is closed by `close`; its `timeout_s` is how long a worker may be silent,
            and how long the run goes on with nobody there.
        settings: what this process runs, so that those of another run can be told what differs.
    """

    def __init__(self, endpoint: Endpoint, protocol: PeerProtocol, settings: Mapping[str, str]) -> None:
        self._endpoint, self._protocol, self._settings = endpoint, protocol, settings
        self.refusals, self._silent = Refusals(), ConnectionLimit()
        self._me, limits = protocol.limits.workers, protocol.limits
        self._owner = Owner(
            self._me,
            endpoint.run,
            limits,
            endpoint.timeout_s,
            self._accepts,
            self._heard,
            lambda connection, why: self._inputs.put(_Lost(connection, why)),
            self.refusals,
        )
        # Threads only put into this queue and one thread takes from it, so the order of what it has taken is the order of the
        # record, and no lock is needed around the session.
        self._inputs: queue.SimpleQueue[_Joined | _Heard | _Lost] = queue.SimpleQueue()
        self._connections: dict[int, _WorkerConnection] = {}
        self._listener: Listener | None = None
        self._began, self._begin_s = time.monotonic(), 0.0
        self._session: Session[Any]

    def open(self) -> None:
        """Lets workers come."""
        endpoint = self._endpoint
        host, port = endpoint.listener.getsockname()[:2]
        try:
            host = announced_address(host)
        except ConfigError as error:  # its workers have its address from the user
            log.warning("%s", error)
        say(f"serving {self._me} workers on {shown(host, port)}")
        self._listener = Listener(
            endpoint.listener,
            endpoint.secret,
            endpoint.run,
            self._arrived,
            self.refusals,
            older=b"GOSS",
            keys=endpoint.keys,
        )

    def run(self, session: Session[Any], begin_s: float, asked: Callable[[], bool] = lambda: False) -> None:
        """Passes all that comes to a session, until it is over, or this is asked to stop and nobody is there.

        Raises: PeerError when nobody is there and nobody comes within `timeout_s`.
        """
        self._session, self._began, self._begin_s = session, time.monotonic(), begin_s
        timeout_s, alone_since_s = self._endpoint.timeout_s, begin_s
        while not session.over:
            item = self._next()
            now_s = self.now()
            if item is not None:
                self._handle(item, now_s)
            self._drop_silent(now_s)
            self._send(session.tick(now_s))
            if self._connections:
                alone_since_s = now_s
            elif asked() and now_s - alone_since_s > _ALONE_S:
                return  # nobody will end the round after which it would stop
            elif now_s - alone_since_s > timeout_s:
                raise PeerError(
                    f"no worker has been here for {timeout_s:g} s and {session.progress}; check the workers' logs, then resume"
                )
        self._see_off()
        session.close(self.now())

    def close(self) -> None:
        """Lets nobody come any more, and ends all connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener.hang_up()
        for connection in self._connections.values():
            connection.close()
        while not self._inputs.empty():  # those who came too late for an answer shall not wait for one
            if isinstance(item := self._inputs.get(), _Joined):
                item.arrival.channel.close()

    def now(self) -> float:
        """Seconds since the run began."""
        return self._begin_s + time.monotonic() - self._began

    def _see_off(self) -> None:
        """The session is over: lets nobody come any more, and those who have just come hear from it that nothing is left."""
        assert self._listener is not None
        self._listener.close()
        deadline = time.monotonic() + PARTING_S
        while time.monotonic() < deadline:
            # Asked before the queue is: whoever is attended to when this is false has already been put into it.
            somebody = self._connections or self._listener.busy
            try:
                item = self._inputs.get(timeout=0.05)
            except queue.Empty:
                if somebody:
                    continue
                return
            if not isinstance(item, _Lost):
                self._handle(item, self.now())
            elif self._connections.get(item.connection.peer) is item.connection:
                # Who leaves a run that is over is no loss, and the record ends with the run.
                del self._connections[item.connection.peer]

    def _next(self) -> _Joined | _Heard | _Lost | None:
        """The next input; None when the session has to act before one comes, or nothing comes for a second."""
        wait_s = min(self._session.next_closing_s - self.now(), self._endpoint.timeout_s / 4, 1.0)
        try:
            return self._inputs.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return None

    def _handle(self, item: _Joined | _Heard | _Lost, now_s: float) -> None:
        if isinstance(item, _Joined):
            peer = item.arrival.peer
            if (current := self._connections.get(peer)) is not None:
                current.refuse(why := f"worker {peer} reconnected; this connection is closed")
                self._drop(current, None if current.done else why, now_s)
            # Made in this thread: what its own threads hear of it comes into the queue after it is known here.
            self._connections[peer] = _WorkerConnection(item.arrival, self._owner)
            self._send(self._session.join(peer, item.hello, now_s))
            return
        current = self._connections.get(item.connection.peer)
        if current is None or item.connection is not current:
            return  # what comes over a connection that was replaced is ignored
        if isinstance(item, _Heard):
            self._send(self._session.hear(current.peer, item.content, now_s))
        else:
            self._drop(current, None if current.done else item.reason, now_s)

    def _drop(self, connection: PeerConnection, reason: str | None, now_s: float) -> None:
        del self._connections[connection.peer]
        self._send(self._session.leave(connection.peer, reason, now_s))

    def _drop_silent(self, now_s: float) -> None:
        """Leaves those behind that were asked for something and have neither sent nor taken a byte for too long."""
        timeout_s, now = self._endpoint.timeout_s, time.monotonic()
        for peer, connection in [*self._connections.items()]:
            if connection.awaited is not None and now - max(connection.asked_at, connection.moved_s) > timeout_s:
                why = f"worker {peer} did nothing for {timeout_s:g} s; look at its log, or raise run.timeout_s"
                connection.refuse(why)
                self._drop(connection, why, now_s)

    def _send(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            connection = self._connections[reply.peer]
            connection.asked_s, connection.asked_at = self.now(), time.monotonic()
            # Before the letters are queued: the answer may come at once, and is compared with this in another thread.
            connection.awaited = self._protocol.awaited(reply)
            for letter in self._protocol.letters(reply):
                connection.send(letter)
            if connection.awaited is None:
                connection.done = True
                connection.end()

    # What follows happens in threads of the listener and of connections.

    def _arrived(self, arrival: Arrival) -> None:
        # Who knows the secret and says nothing costs a thread too, until its time is over.
        self._silent.admit(arrival.channel, arrival.host)
        try:
            hello = self._hello(arrival)
        except (TransportError, OSError) as error:
            self.refusals.add(f"worker {arrival.peer}", error)
            self._turn_away(arrival, str(error))
        else:
            self._inputs.put(_Joined(arrival, hello))
        finally:
            self._silent.release(arrival.channel)

    def _hello(self, arrival: Arrival) -> Sequence[int]:
        """What a worker of this run says first."""
        peer, run, limits, protocol = arrival.peer, self._endpoint.run, self._protocol.limits, self._protocol
        deadline = time.monotonic() + HANDSHAKE_S
        if not arrival.same_run:
            accepts = small(LetterKind.SETTINGS, most_bytes=SETTINGS_BYTES)
            theirs = read_settings_in(receive_letter(arrival.channel, NO_RUN, NO_NUMBERS, accepts, deadline=deadline))
            differ = theirs and difference(f"worker {peer}", theirs, "the server", self._settings)
            raise RefusedError(
                "other run",
                f"worker {peer} runs another configuration{f': {differ}' if differ else ''}; start all workers with the same run "
                "file, data and gossamer",
            )
        if not 0 <= peer < limits.workers:
            raise RefusedError(
                "bounds",
                f"worker {peer} is none of the {limits.workers} workers that are served here; give --worker 0 to "
                f"{limits.workers - 1}",
            )
        letter = receive_letter(
            arrival.channel,
            run,
            limits,
            deadline=deadline,
            accepts=lambda letter, size: (
                (letter.kind, letter.sender, size) == (LetterKind.HELLO, peer, protocol.hello_bytes)
            ),
        )
        return protocol.hello(peer, letter.body)

    def _turn_away(self, arrival: Arrival, why: str) -> None:
        """Tells somebody why it is refused, and hangs up once it has read that."""
        me, run = (self._me, self._endpoint.run) if arrival.same_run else (0, NO_RUN)
        with arrival.channel as channel, contextlib.suppress(OSError):
            channel.wait_at_most(PARTING_S)
            send_letter(channel, refusal(me, why), run)
            channel.drain()

    def _accepts(self, connection: PeerConnection, letter: Letter, size: int) -> bool:
        assert isinstance(connection, _WorkerConnection)
        return letter.kind is LetterKind.PUSH and connection.awaited == (letter.ticket, size)

    def _heard(self, connection: PeerConnection, letter: Letter) -> None:
        assert isinstance(connection, _WorkerConnection)
        connection.awaited = None
        self._inputs.put(_Heard(connection, self._protocol.content(letter, connection.asked_s)))


def listener_at(host: str, port: int) -> socket.socket:
    """The socket to listen on: the one a launcher has made, or a new one. Raises TransportError when there is none.

    That of a launcher is taken once: processes that are started later do not have it, and must not look for it.
    """
    if (inherited := os.environ.pop(LISTENER, None)) is not None:
        return socket.socket(fileno=int(inherited))
    sock = listen(host, port)
    if (warning := loopback_warning(host, sock.getsockname()[0])) is not None:
        log.warning(warning)
    return sock
