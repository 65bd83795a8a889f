"""The process of a server: threads carry the frames of its workers' connections, and one session decides and computes.

Every push is absorbed when it arrives, whatever its staleness. With one worker the bits equal a simulation's; with
more, `gossamer.run.serve_replay` recomputes them from the record of arrivals.

A worker may die, hang or come late: its connection ends, the other workers take its unfinished steps, and when it returns
it receives the server's model and continues with its own last checkpoint of the inner optimizer. That may be older than the
server's, which is written first, as neither waits for the other.

The server may die too. One that is resumed goes on from its newest snapshot, and its workers, which try again for
`run.timeout_s`, join it as workers that return do. It grants every phase anew, so what they were training when it died, and what
it absorbed after its snapshot, is trained again and counts once.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.codecs import Codec, fitted
from gossamer.codecs.message import decode, payload_like
from gossamer.errors import GossamerError, PeerError, TransportError
from gossamer.finite import all_finite
from gossamer.record import checkpoint
from gossamer.record.progress import say
from gossamer.run.config import RunConfig
from gossamer.run.evaluate import Probe
from gossamer.run.history import Resume, history
from gossamer.run.parts import own_parts
from gossamer.run.serve_protocol import OWNED, run_key, run_settings, settled_server, use_threads
from gossamer.run.server_session import Reply, ServerSession, open_session
from gossamer.run.task import task_of
from gossamer.transport import Turn
from gossamer.transport.alike import difference
from gossamer.transport.handshake import HANDSHAKE_S, HalfOpen, prove_to_worker
from gossamer.transport.local import LISTENER
from gossamer.transport.secret import SECRET_FILE, environment_secret, folder_secret
from gossamer.transport.stream import HELLO, PUSH, START, Stream
from gossamer.tree import leaves, refill

__all__ = ["serve"]

log = logging.getLogger("gossamer")

REPORTED = 20
"""The refused connections that are each reported; after them, only the 32nd, the 64th and so on are."""


class _Connection:
    """A connection whose worker has identified itself. Its replies are put into `replies`."""

    def __init__(self, worker: int, stream: Stream) -> None:
        self.worker, self.stream = worker, stream
        self.replaced = False
        """Whether the worker has come again over another connection; None in `replies` tells its thread."""
        self.replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()


class _Joined(NamedTuple):
    connection: _Connection
    owned: list[int]


class _Pushed(NamedTuple):
    connection: _Connection
    fragment: int
    message: Tensor
    bytes: int
    start_s: float


class _Lost(NamedTuple):
    connection: _Connection
    reason: str | None  # None for a worker to which nothing was left to train


def serve(config: RunConfig, folder: Path, host: str, port: int, *, resume: Resume = False) -> None:
    """Serves workers until together they have taken all inner steps of the run.

    Workers prove that they know the secret of the run, which is in GOSSAMER_SECRET, or else in the run folder, where a new one is
    written if there is none.

    Args: `resume` goes on from the newest sound checkpoint of the server; "auto" starts where there is none.
    Raises: ConfigError, CheckpointError; PeerError when no worker is left and none comes within `run.timeout_s`.
    Cost: the rule's state; one message and one starting point per worker in flight.
    """
    use_threads(config)
    parts = own_parts(config)
    settled = settled_server(config, parts)
    task = task_of(config, parts)
    probe, start = Probe(config, task, torch.device("cpu")), None
    if resume:
        store, past, me = folder / "checkpoints", history(config, folder), config.workers
        start = past.newest(
            folder, [checkpoint.rounds(store, me, past.lineage)], auto=resume == "auto", owners=[me],
            faults=lambda round: [checkpoint.fault(store, round, me, past.lineage)],
        )  # fmt: skip
        if start == config.rounds:
            say(checkpoint.ended(folder, start))
            return
        past.go_on(folder, start)
    secret = folder_secret(folder, make=True)
    if not environment_secret():
        log.warning(
            "the workers need the secret of the run: copy '%s' into the run folder of each machine",
            folder / SECRET_FILE,
        )
    with open_session(config, settled, folder, probe, start) as session, _listener(host, port) as listener:
        key, own = run_key(settled.config, task, parts), run_settings(settled.config, task, parts)
        _Server(session, settled.codec, key, secret, own).run(listener)


class _Server:
    """The connections of a session. One thread for each carries its frames; the thread that calls `run` does all else."""

    def __init__(
        self, session: ServerSession, codec: Codec, key: int, secret: bytes, settings: Mapping[str, str]
    ) -> None:  # fmt: skip
        self._session, self._config, self._key, self._secret = session, session.config, key, secret
        self._settings = settings
        self._codecs = [fitted(codec, layout) for layout in session.core.layouts]
        self._inputs: queue.SimpleQueue[_Joined | _Pushed | _Lost] = queue.SimpleQueue()
        self._connections: dict[int, _Connection] = {}
        self._threads: list[threading.Thread] = []
        self._half_open, self._refused = HalfOpen(), 0
        self._began = time.monotonic()

    def run(self, listener: socket.socket) -> None:
        """Serves until all steps have been taken and absorbed."""
        host, port = listener.getsockname()[:2]
        say(f"serving {self._config.workers} workers on {host}:{port}")
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        core, timeout_s, alone_since_s = self._session.core, self._config.run.timeout_s, self._now()
        try:
            while not core.over:
                item = self._next(timeout_s)
                now_s = self._now()
                if item is not None:
                    self._handle(item, now_s)
                self._send(self._session.tick(now_s))
                if self._connections:
                    alone_since_s = now_s
                elif now_s - alone_since_s > timeout_s:
                    raise PeerError(
                        f"no worker has been here for {timeout_s:g} s and {core.absorbed_steps} of "
                        f"{self._config.workers * self._config.run.steps} inner steps are done; check the workers' logs, then "
                        "resume"
                    )
            self._session.close(self._now())
        finally:
            listener.close()
            self._half_open.close()
            deadline = time.monotonic() + 5.0
            for thread in self._threads:  # they still send the last starting points
                thread.join(max(0.0, deadline - time.monotonic()))
            for connection in self._connections.values():
                connection.stream.close()

    def _now(self) -> float:
        return self._session.begin_s + time.monotonic() - self._began

    def _next(self, timeout_s: float) -> _Joined | _Pushed | _Lost | None:
        """The next input; None when a window closes before, or nothing comes for a second."""
        wait_s = min(self._session.core.next_closing_s - self._now(), timeout_s / 4, 1.0)
        try:
            return self._inputs.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return None

    def _handle(self, item: _Joined | _Pushed | _Lost, now_s: float) -> None:
        connection = item.connection
        worker, current = connection.worker, self._connections.get(connection.worker)
        if isinstance(item, _Joined):
            if current is not None:
                current.replaced = True
                current.replies.put(None)
                current.stream.stop_listening()
                self._drop(current, "came again over another connection", now_s)
            self._connections[worker] = connection
            self._send(self._session.join(worker, item.owned, now_s))
        elif connection is not current:
            return  # messages over the replaced connection are ignored
        elif isinstance(item, _Pushed):
            _, p, message, size, start_s = item
            self._send(self._session.push(worker, p, message, size, start_s, now_s))
        else:
            self._drop(connection, item.reason, now_s)

    def _drop(self, connection: _Connection, reason: str | None, now_s: float) -> None:
        del self._connections[connection.worker]
        self._send(self._session.leave(connection.worker, reason, now_s))

    def _send(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._connections[reply.send.worker].replies.put(reply)

    # What follows happens in a thread for each connection.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, who = listener.accept()
            except OSError as error:
                if listener.fileno() < 0:
                    return  # the run is over
                log.warning("could not accept a connection (%s); trying again", error)
                time.sleep(1.0)
                continue
            self._half_open.admit(sock, who[0])
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._attend, args=(sock, f"{who[0]}:{who[1]}"), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _attend(self, sock: socket.socket, who: str) -> None:
        """Carries the frames of one connection, after its worker has proved that it knows the secret."""
        try:
            worker, same_run = prove_to_worker(sock, self._secret, run=self._key)
        except PeerError as error:
            sock.close()  # without a word: a stranger learns nothing
            self._refused += 1
            if self._refused <= REPORTED or self._refused.bit_count() == 1:
                log.warning("refused connection %d, from %s: %s", self._refused, who, error)
            return
        finally:
            self._half_open.settle(sock)
        stream = Stream(
            sock, run=self._key, me=self._config.workers, peer=worker, name=f"worker {worker}", timeout_s=HANDSHAKE_S
        )  # fmt: skip
        connection = None
        try:
            connection, owned = self._greet(stream, same_run)
            self._inputs.put(_Joined(connection, owned))
            self._exchange(connection)
        except GossamerError as error:
            if connection is None:
                log.warning("refused a worker from %s: %s", who, error)
            else:
                self._inputs.put(_Lost(connection, str(error)))
            replaced = connection is not None and connection.replaced
            stream.refuse(f"worker {worker} has come again from elsewhere" if replaced else str(error))
        else:
            self._inputs.put(_Lost(connection, None))
        finally:
            stream.close()

    def _greet(self, stream: Stream, same_run: bool) -> tuple[_Connection, list[int]]:
        """The connection of a worker of this run, and the rounds of its checkpoints."""
        if not same_run:
            theirs = stream.receive_settings()
            differ = theirs and difference(stream.name, theirs, "the server", self._settings)
            raise PeerError(
                f"{stream.name} runs another configuration{f': {differ}' if differ else ''}; start all workers with the same run "
                "file, data and gossamer"
            )
        if stream.peer >= self._config.workers:
            raise TransportError(
                f"{stream.name} is none of this run, whose workers are 0 to {self._config.workers - 1}; give it such a number"
            )
        (owned,) = stream.receive(Turn(0, 0, HELLO), [torch.empty(OWNED, dtype=torch.int64)])
        stream.wait_at_most(self._config.run.timeout_s)
        return _Connection(stream.peer, stream), [int(round) for round in owned]

    def _exchange(self, connection: _Connection) -> None:
        """Sends each reply and receives the push that follows it, until nothing is left to train.

        Raises: PeerError when the worker has come again over another connection.
        """
        stream, spans, number = connection.stream, self._session.core.spans, 0
        while True:
            if (reply := connection.replies.get()) is None:
                raise PeerError(f"{stream.name} has come again over another connection")
            for p, (x, updates) in reply.send.starts.items():
                terms = torch.tensor(reply.terms._replace(updates=updates), dtype=torch.int64)
                stream.send(Turn(number, p, START), [terms, x])
            if not reply.terms.go:
                return
            number = reply.terms.phases
            p = number % len(spans)
            like, start_s = torch.empty(spans[p][1] - spans[p][0]), self._now()
            frames = stream.receive(Turn(number, p, PUSH), leaves(payload_like(self._codecs[p], like)))
            message = _decoded(self._codecs[p], frames, like, connection.worker)
            size = sum(frame.numel() * frame.element_size() for frame in frames)
            self._inputs.put(_Pushed(connection, p, message, size, start_s))


def _decoded(codec: Codec, frames: Sequence[Tensor], like: Tensor, worker: int) -> Tensor:
    """The pseudo-gradient in these frames. Raises TransportError when there is none."""
    try:
        message = decode(codec, refill(payload_like(codec, like), frames), like)
    except (RuntimeError, ValueError, IndexError) as error:
        raise TransportError(
            f"worker {worker} pushed a payload that codec '{codec.name}' cannot decode ({str(error).splitlines()[0]:.100})"
        ) from None
    if not all_finite(message):
        raise TransportError(
            f"worker {worker} pushed {message.numel()} numbers that are not all finite; lower inner.lr"
        )
    return message


def _listener(host: str, port: int) -> socket.socket:
    """The socket to listen on: the one a launcher has made, or a new one. Raises TransportError when there is none."""
    if LISTENER in os.environ:
        return socket.socket(fileno=int(os.environ[LISTENER]))
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise TransportError(f"the server could not listen on {host}:{port} ({error}); choose another port") from None
