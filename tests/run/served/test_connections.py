"""The end of a server's run as its connections see it, without sockets."""

import queue
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.asynchronous.heloco import heloco
from gossamer.clock.phases import Budget
from gossamer.clock.server_core import Send, ServerAction, ServerCore
from gossamer.layout import Layout, Leaf
from gossamer.run.served import connections
from gossamer.run.served.connections import ConnectionServer
from gossamer.run.served.protocol import Terms
from gossamer.run.served.session import Reply

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
        self.ends, self.progress = list[float](), "no step is done"
        self.records = SimpleNamespace(close=self.ends.append)

    def _replies(self, actions: Sequence[ServerAction]) -> list[Reply]:
        return [Reply(one, Terms(*[0] * len(Terms._fields))) for one in actions if isinstance(one, Send)]

    def join(self, worker: int, owned: Sequence[int], now_s: float) -> list[Reply]:
        return self._replies(self.core.join(worker))

    def hear(self, worker: int, content: object, now_s: float) -> list[Reply]:
        return self._replies(self.core.push(worker, self.core.counted(worker, 0, torch.ones(P), 1), now_s))

    def leave(self, worker: int, reason: str | None, now_s: float) -> list[Reply]:
        return self._replies(self.core.leave(worker, now_s))

    def tick(self, now_s: float) -> list[Reply]:
        return self._replies(self.core.tick(now_s))


def served(
    session: Session, script: list[Callable[[ConnectionServer], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert not script and session.core.is_finished and len(session.ends) == 1


def joins(worker: int) -> Callable[[ConnectionServer], object]:
    return lambda server: connections._Joined(SimpleNamespace(peer=worker), ())  # type: ignore[arg-type]


def pushes(worker: int) -> Callable[[ConnectionServer], object]:
    return lambda server: connections._Heard(server._connections[worker], None)  # type: ignore[arg-type]


def is_lost(worker: int) -> Callable[[ConnectionServer], object]:
    return lambda server: connections._Lost(server._connections[worker], "it was closed")


@pytest.mark.parametrize("last", ["pushes", "is lost"])
def test_a_worker_that_comes_back_as_the_run_ends_trains_what_it_is_given_or_is_lost_and_the_run_has_ended(
    last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The third phase is that of worker 1, so worker 0 is refused another one and ends, and then worker 1 is lost.
    script = [joins(0), joins(1), pushes(1), pushes(0), is_lost(0), is_lost(1), joins(1)]
    script += [pushes(1)] if last == "pushes" else []
    session = Session()
    served(session, [*script, is_lost(1)], monkeypatch)
    assert session.core.absorbed_steps == (3 if last == "pushes" else 2) * STEPS


@pytest.mark.parametrize("worker_0", ["has left", "is lost", "joins"])
def test_a_server_that_was_stopped_for_longer_than_its_timeout_gives_up_no_run_whose_workers_were_there_before(
    worker_0: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_s = 0.0

    def stands_still(server: ConnectionServer) -> None:
        nonlocal stopped_s
        stopped_s += 2 * TIMEOUT_S

    def after_that(then: Callable[[ConnectionServer], object]) -> Callable[[ConnectionServer], object]:
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
