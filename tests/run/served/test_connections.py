"""The end of a server's run as its connections see it, without sockets."""

import queue
import socket
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.asynchronous.heloco import heloco
from gossamer.clock.phases import Budget
from gossamer.clock.server_core import Send, ServerAction, ServerCore
from gossamer.errors import LostConnectionError
from gossamer.layout import Layout, Leaf
from gossamer.run.served import connections
from gossamer.run.served.connections import ConnectionServer
from gossamer.run.served.protocol import HELLO_BYTES, Terms
from gossamer.run.served.session import Reply
from gossamer.transport.contract import Ticket
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import LetterKind, Limits
from gossamer.transport.sockets.letter import Letter
from gossamer.transport.sockets.server_client import connect

P, STEPS, TIMEOUT_S = 4, 5, 60.0


class Connection:
    """A connection with a worker, without a socket."""

    def __init__(self, arrival: Any, owner: object) -> None:
        self.peer, self.awaited, self.done, self.asked_s, self.asked_at = arrival.peer, None, False, 0.0, 0.0
        self.moved_s = time.monotonic()

    def end(self) -> None: ...

    def refuse(self, why: str) -> None: ...


class Session:
    """What a server decides for two workers that train three local phases together."""

    def __init__(self) -> None:
        self.core = ServerCore(
            heloco(),
            torch.ones(P),
            Layout((Leaf("w", (P,), 0, P),), P),
            [(0, P)],
            [STEPS] * 2,
            budget=Budget(3 * STEPS),
        )
        self.ends, self.here, self.progress = list[float](), set[int](), "no step is done"
        self.records = SimpleNamespace(close=self.ends.append)

    def _replies(self, actions: Sequence[ServerAction]) -> list[Reply]:
        return [Reply(one, Terms(*[0] * len(Terms._fields))) for one in actions if isinstance(one, Send)]

    def join(self, worker: int, owned: Sequence[int], now_s: float) -> list[Reply]:
        assert worker not in self.here, "the record would have it twice"
        self.here.add(worker)
        return self._replies(self.core.join(worker))

    def hear(self, worker: int, content: object, now_s: float) -> list[Reply]:
        return self._replies(self.core.push(worker, self.core.counted(worker, 0, torch.ones(P), 1), now_s))

    def leave(self, worker: int, reason: str | None, now_s: float) -> list[Reply]:
        self.here.remove(worker)
        return self._replies(self.core.leave(worker, now_s))

    def tick(self, now_s: float) -> list[Reply]:
        return self._replies(self.core.tick(now_s))


Step = Callable[[ConnectionServer], object]


def served(session: Session, script: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves two workers whose connections have this input; None is none within the time that the server waits."""
    monkeypatch.setattr(connections, "_WorkerConnection", Connection)
    letters = SimpleNamespace(
        limits=SimpleNamespace(workers=2),
        awaited=lambda reply: (0, P) if reply.send.go else None,
        letters=lambda reply: (),
    )
    endpoint: Any = SimpleNamespace(timeout_s=TIMEOUT_S)
    server = ConnectionServer(endpoint, letters, {})  # type: ignore[arg-type]
    server._listener = SimpleNamespace(close=lambda: None, busy=False)  # type: ignore[assignment]

    def get(timeout: float) -> object:
        if not script or (item := script.pop(0)(server)) is None:
            raise queue.Empty
        return item

    server._inputs = SimpleNamespace(get=get)  # type: ignore[assignment]
    server.run(session, 0.0)  # type: ignore[arg-type]
    assert not script and session.core.is_finished and len(session.ends) == 1 and not session.here


def joins(worker: int) -> Step:
    return lambda server: connections._Joined(SimpleNamespace(peer=worker), ())  # type: ignore[arg-type]


def pushes(worker: int) -> Step:
    return lambda server: connections._Heard(server._connections[worker], None)  # type: ignore[arg-type]


def is_lost(worker: int) -> Step:
    return lambda server: connections._Lost(server._connections[worker], "it was closed")


@pytest.mark.parametrize(
    ("steps", "script"),
    [
        # The third phase is that of worker 1, so worker 0 is refused another one and ends, and then worker 1 is lost.
        (3, [pushes(1), pushes(0), is_lost(0), is_lost(1), joins(1), pushes(1), is_lost(1)]),
        (2, [pushes(1), pushes(0), is_lost(0), is_lost(1), joins(1), is_lost(1)]),
        # Worker 0 ends when the run is over for the first time, and both come back.
        (3, [pushes(1), pushes(0), is_lost(1), is_lost(0), joins(1), joins(0), pushes(1), is_lost(1), is_lost(0)]),
    ],
)
def test_a_worker_that_comes_back_as_the_run_ends_trains_what_it_is_given_or_is_lost_and_the_run_has_ended(
    steps: int, script: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    served(session, [joins(0), joins(1), *script], monkeypatch)
    assert session.core.absorbed_steps == steps * STEPS


@pytest.mark.parametrize("worker_0", ["has left", "is lost", "joins"])
def test_a_server_that_was_stopped_for_longer_than_its_timeout_gives_up_no_run_whose_workers_were_there_before(
    worker_0: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_s = 0.0

    def stands_still(server: ConnectionServer) -> None:
        nonlocal stopped_s
        stopped_s += 2 * TIMEOUT_S

    def after_that(then: Step) -> Step:
        return lambda server: stands_still(server) or then(server)

    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s))
    # With the time of the stop, worker 1 is dropped as silent.
    script = {
        "has left": [joins(0), joins(1), pushes(0), pushes(0), is_lost(0), stands_still],
        "is lost": [joins(0), after_that(is_lost(0)), joins(0), pushes(0), pushes(0), pushes(0), is_lost(0)],
        "joins": [joins(1), stands_still, joins(0), pushes(0), pushes(0), pushes(0), is_lost(0)],
    }[worker_0]
    session = Session()
    served(session, script, monkeypatch)
    assert session.core.absorbed_steps == (2 if worker_0 == "has left" else 3) * STEPS


def test_a_worker_that_comes_while_the_server_ends_is_hung_up_on() -> None:
    limits = Limits(workers=1, rounds=1, steps=1)
    letters: Any = SimpleNamespace(limits=limits, hello=lambda peer, body: [])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ConnectionServer(Endpoint(listener, 7, b"s", 60.0), letters, {})
        server._joined_s[0] = time.monotonic()  # so that it has to wait before it may join again
        server.open()
        worker = connect(server._listener.address, secret=b"s", run=7, me=0, limits=limits, timeout_s=60.0)  # type: ignore[union-attr]
        worker.send(Letter(LetterKind.HELLO, 0, body=torch.zeros(HELLO_BYTES, dtype=torch.uint8)))
        while not server._newest:
            time.sleep(0.01)
        server.close()
        with worker.channel, pytest.raises(LostConnectionError):
            worker.receive(LetterKind.START, Ticket(0), 0)
