"""The connections of a server that workers join: threads transport letters, and one session decides and computes."""

import contextlib
import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gossamer.errors import ConfigError, PeerError, RefusedError, TransportError
from gossamer.record.progress import say
from gossamer.run.served.letters import Awaited, WorkerLetters
from gossamer.run.served.protocol import HELLO_BYTES
from gossamer.run.served.session import Pushed, Reply, ServerSession
from gossamer.transport.alike import difference
from gossamer.transport.processes.interfaces import announced_address
from gossamer.transport.processes.local import LISTENER
from gossamer.transport.sockets.addresses import listen, loopback_warning, shown
from gossamer.transport.sockets.connection import Endpoint, Owner, PeerConnection, refusal
from gossamer.transport.sockets.handshake import HANDSHAKE_S
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter, letters_up_to, receive_letter, send_letter
from gossamer.transport.sockets.listener import Arrival, ConnectionLimit, Listener, Refusals
from gossamer.transport.sockets.server_client import NO_NUMBERS, NO_RUN, SETTINGS_BYTES, read_settings_in

log = logging.getLogger("gossamer")

PARTING_S = 5.0
"""How long a finished run waits for workers that are still being notified."""
_REJOIN_S = 1.0
"""The shortest time between two joins of one worker: each is recorded, and answered with the model."""
_ALONE_S = 2.0
"""How long a server that is asked to stop waits for a worker to come back."""


class _WorkerConnection(PeerConnection):
    """A connection with a worker."""

    def __init__(self, arrival: Arrival, owner: Owner) -> None:
        # Set before the threads start, which read them.
        self.awaited: Awaited | None = None
        """The letter that it should send next."""
        self.asked_s = self.asked_at = 0.0
        """The time of that request, since the run began and on the clock of `time.monotonic`."""
        self.done = False
        """Whether it has been served completely."""
        super().__init__(arrival.peer, owner, lambda: arrival.channel)


class _Joined(NamedTuple):
    arrival: Arrival
    hello: Sequence[int]


class _Heard(NamedTuple):
    connection: PeerConnection
    content: Pushed


class _Lost(NamedTuple):
    connection: PeerConnection
    reason: str


class ConnectionServer:
    """The connections of one process. Threads transport letters; the thread that calls `run` does everything else.

    Args:
        endpoint: where workers connect, whose listener is closed by `close`; its `timeout_s` is how long a worker may
            be silent, and how long the run continues without workers.
        settings: this run's settings, to report differences to workers of another run.
    """

    def __init__(self, endpoint: Endpoint, letters: WorkerLetters, settings: Mapping[str, str]) -> None:
        self._endpoint, self._letters, self._settings = endpoint, letters, settings
        self.refusals, self._silent = Refusals(), ConnectionLimit()
        self._me = letters.limits.workers
        self._owner = Owner(
            self._me,
            endpoint,
            letters.limits,
            self._accepts,
            self._heard,
            lambda connection, why: self._inputs.put(_Lost(connection, why)),
            self.refusals,
        )
        # Threads only put into this queue and one thread takes from it, so the order of its items is the order of the
        # record, and the session needs no lock.
        self._inputs: queue.SimpleQueue[_Joined | _Heard | _Lost] = queue.SimpleQueue()
        self._connections: dict[int, _WorkerConnection] = {}
        self._joined_s: dict[int, float] = {}
        """The time of each worker's last join, on the clock of `time.monotonic`."""
        self._newest: dict[int, Arrival] = {}
        """The last arrival of each worker."""
        self._listener: Listener | None = None
        self._closed = False
        self._zero_s = time.monotonic()
        """When the run began, on the clock of `time.monotonic`."""
        self._session: ServerSession

    def open(self) -> None:
        """Lets workers come."""
        host, port = self._endpoint.listener.getsockname()[:2]
        try:
            host = announced_address(host)
        except ConfigError as error:  # its workers get its address from the user
            log.warning("%s", error)
        say(f"serving {self._me} workers on {shown(host, port)}")
        self._listener = self._endpoint.listen(self._arrived, self.refusals, older=b"GOSS")

    def run(self, session: ServerSession, begin_s: float, asked: Callable[[], bool] = lambda: False) -> None:
        """Passes all input to a session, until it is over, or until a stop is requested and no worker is connected.

        Raises: PeerError when no worker is connected and none connects within `timeout_s`.
        """
        self._session, self._zero_s = session, time.monotonic() - begin_s
        while self._serve(asked):
            self._see_off()
            if session.core.is_finished:  # else a late arrival has got the steps that a lost worker has left
                session.records.close(self.now())
                return

    def _serve(self, asked: Callable[[], bool]) -> bool:
        """Passes all input to the session until it is over; returns whether it is. Raises: as `run`."""
        session, timeout_s, alone_since_s = self._session, self._endpoint.timeout_s, self.now()
        while not session.core.is_finished:
            # Until the session must act without one, and for a second at most.
            item = self._next(min(session.core.next_closing_s - self.now(), timeout_s / 4, 1.0))
            now_s = self.now()
            # Before the item, as who is lost now was here: this process may have been stopped since its last look.
            if self._connections:
                alone_since_s = now_s
            if item is not None:
                self._handle(item, now_s)
            self._drop_silent(now_s)
            self._send(session.tick(now_s))
            if self._connections or session.core.is_finished:
                continue
            if asked() and now_s - alone_since_s > _ALONE_S:
                return False  # no worker will end the round after which it would stop
            if now_s - alone_since_s > timeout_s:
                raise PeerError(
                    f"no worker has been here for {timeout_s:g} s and {session.progress}; check the workers' logs, then resume"
                )
        return True

    def close(self) -> None:
        """Stops accepting, and ends all connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener.hang_up()
        for connection in self._connections.values():
            connection.close()
        self._closed = True  # first, so that either this call or the thread of a late arrival hangs up
        self._hang_up()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._zero_s

    def _hang_up(self) -> None:
        """Ends the connections of arrivals that get no answer any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(item := self._inputs.get_nowait(), _Joined):
                    item.arrival.channel.close()

    def _see_off(self) -> None:
        """Ends a finished session, unless it continues: stops accepting, and notifies late arrivals that the run is over."""
        assert self._listener is not None
        self._listener.close()
        deadline = time.monotonic() + PARTING_S
        while time.monotonic() < deadline and self._session.core.is_finished:
            # Checked before the queue: any connection handled by then is already in the queue.
            somebody = self._connections or self._listener.busy
            item = self._next(0.05)
            if item is not None:
                self._handle(item, self.now())
            elif not somebody:
                return

    def _next(self, wait_s: float) -> _Joined | _Heard | _Lost | None:
        """The next input; None where none comes within so many seconds."""
        try:
            return self._inputs.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return None

    def _handle(self, item: _Joined | _Heard | _Lost, now_s: float) -> None:
        if isinstance(item, _Joined):
            peer = item.arrival.peer
            if (current := self._connections.get(peer)) is not None:
                current.refuse(why := f"worker {peer} reconnected; this connection is closed")
                self._drop(current, why, now_s)
            self._joined_s[peer] = time.monotonic()
            # Created in this thread, so that input from its threads is queued after it is known here.
            self._connections[peer] = _WorkerConnection(item.arrival, self._owner)
            self._send(self._session.join(peer, item.hello, now_s))
            return
        current = self._connections.get(item.connection.peer)
        if current is None or item.connection is not current:
            return  # input of a replaced connection is ignored
        if isinstance(item, _Heard):
            self._send(self._session.hear(current.peer, item.content, now_s))
        else:
            self._drop(current, item.reason, now_s)

    def _drop(self, connection: _WorkerConnection, why: str, now_s: float) -> None:
        del self._connections[connection.peer]
        self._send(self._session.leave(connection.peer, None if connection.done else why, now_s))

    def _drop_silent(self, now_s: float) -> None:
        """Drops workers that owe a letter and have made no progress for too long."""
        timeout_s, now = self._endpoint.timeout_s, time.monotonic()
        for peer, connection in [*self._connections.items()]:
            if connection.awaited is not None and now - max(connection.asked_at, connection.moved_s) > timeout_s:
                why = f"worker {peer} did nothing for {timeout_s:g} s; look at its log, or raise run.timeout_s"
                connection.refuse(why)
                self._drop(connection, why, now_s)

    def _send(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            connection = self._connections[reply.peer]
            connection.asked_s, connection.asked_at = self.now(), time.monotonic()
            # Set before the letters are queued: the answer may arrive at once, and is compared with this in another
            # thread.
            connection.awaited = self._letters.awaited(reply)
            for letter in self._letters.letters(reply):
                connection.send(letter)
            if connection.awaited is None:
                connection.done = True
                connection.end()

    # The following runs in threads of the listener and of connections.

    def _arrived(self, arrival: Arrival) -> None:
        # A silent peer that knows the secret costs a thread too, until its timeout.
        self._silent.admit(arrival.channel, arrival.whose)
        try:
            hello = self._hello(arrival)
            self._newest[arrival.peer] = arrival
            # A worker that reconnects all the time would fill the record and the memory.
            time.sleep(max(0.0, self._joined_s.get(arrival.peer, 0.0) + _REJOIN_S - time.monotonic()))
            if self._newest[arrival.peer] is not arrival:
                raise PeerError(f"worker {arrival.peer} reconnected; this connection is closed")
        except (TransportError, OSError) as error:
            self.refusals.add(f"worker {arrival.peer}", error)
            self._refuse(arrival, str(error))
        else:
            self._inputs.put(_Joined(arrival, hello))
            if self._closed:
                self._hang_up()
        finally:
            self._silent.release(arrival.channel)

    def _hello(self, arrival: Arrival) -> Sequence[int]:
        """The HELLO of a worker of this run."""
        peer, run, limits = arrival.peer, self._endpoint.run, self._letters.limits
        deadline = time.monotonic() + HANDSHAKE_S
        if not arrival.same_run:
            accepts = letters_up_to(LetterKind.SETTINGS, most_bytes=SETTINGS_BYTES)
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
            accepts=lambda letter, size: (letter.kind, letter.sender, size) == (LetterKind.HELLO, peer, HELLO_BYTES),
        )
        return self._letters.hello(peer, letter.body)

    def _refuse(self, arrival: Arrival, why: str) -> None:
        """Sends the reason for a refusal, and closes once it is read."""
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
        self._inputs.put(_Heard(connection, self._letters.content(letter, connection.asked_s)))


def listener_at(host: str, port: int) -> socket.socket:
    """The listening socket: the launcher's, or a new one. Raises TransportError if none can be opened.

    The launcher's is used once: processes started later do not have it, and must not look for it.
    """
    if (inherited := os.environ.pop(LISTENER, None)) is not None:
        return socket.socket(fileno=int(inherited))
    sock = listen(host, port)
    if (warning := loopback_warning(host, sock.getsockname()[0])) is not None:
        log.warning(warning)
    return sock
