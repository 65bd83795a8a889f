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

P, STEPS = 4, 5


class Connection:
    """A connection with a worker, without a socket."""

    def __init__(self, arrival: Any, owner: object) -> None:
        self.peer, self.awaited, self.done, self.asked_s, self.asked_at = arrival.peer, None, False, 0.0, 0.0
        self.moved_s = time.monotonic()

    def end(self) -> None: ...


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
        self.ends = list[float]()
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


@pytest.mark.parametrize("last", ["pushes", "is lost"])
def test_a_worker_that_comes_back_as_the_run_ends_trains_what_it_is_given_or_is_lost_and_the_run_has_ended(
    last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_WorkerConnection", Connection)
    letters = SimpleNamespace(
        limits=SimpleNamespace(workers=2),
        awaited=lambda reply: (0, P) if reply.send.go else None,
        letters=lambda reply: (),
    )
    endpoint: Any = SimpleNamespace(timeout_s=60.0)
    server, session = ConnectionServer(endpoint, letters, {}), Session()  # type: ignore[arg-type]
    server._listener = SimpleNamespace(close=lambda: None, busy=False)  # type: ignore[assignment]

    def joins(worker: int) -> Callable[[], object]:
        return lambda: connections._Joined(SimpleNamespace(peer=worker), ())  # type: ignore[arg-type]

    def pushes(worker: int) -> Callable[[], object]:
        return lambda: connections._Heard(server._connections[worker], None)  # type: ignore[arg-type]

    def is_lost(worker: int) -> Callable[[], object]:
        return lambda: connections._Lost(server._connections[worker], "it was closed")

    # The third phase is that of worker 1, so worker 0 is refused another one and ends, and then worker 1 is lost.
    script = [joins(0), joins(1), pushes(1), pushes(0), is_lost(0), is_lost(1), joins(1)]
    script += [pushes(1)] if last == "pushes" else []
    script += [is_lost(1)]

    def get(timeout: float) -> object:
        if not script:
            raise queue.Empty
        return script.pop(0)()

    server._inputs = SimpleNamespace(get=get)  # type: ignore[assignment]
    server.run(session, 0.0)  # type: ignore[arg-type]
    assert not script and session.core.is_finished and len(session.ends) == 1
    assert session.core.absorbed_steps == (3 if last == "pushes" else 2) * STEPS
