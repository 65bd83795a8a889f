"""One server process without its connections: the core, its records and its checkpoints.

Sockets (`gossamer.run.served.server`) and the replay of a record (`gossamer.run.replay.served`) give it the same inputs.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gossamer.clock import SERVER, Absence, Transfer, Update
from gossamer.clock.phases import Budget
from gossamer.clock.server_core import CoreState, Send, ServerAction, ServerCore
from gossamer.layout import arrange, layout_of
from gossamer.record.machines import Threads
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.served.protocol import Terms
from gossamer.run.served.records import ServerRecords, open_files, restored

log = logging.getLogger("gossamer")


class Reply(NamedTuple):
    """Starting points for a worker, with their terms."""

    send: Send
    terms: Terms

    @property
    def peer(self) -> int:
        """The worker it is for."""
        return self.send.worker


class Pushed(NamedTuple):
    """A push that has arrived."""

    fragment: int
    message: Tensor
    bytes: int
    start_s: float


class ServerSession:
    """The core of one server process with its records. Inputs come from one thread, with the seconds since the run began.

    Args:
        core: with the budget that its workers share.
        resumed: completed rounds when the run was resumed; None if it was not.
    """

    def __init__(self, run: ResolvedRun, core: ServerCore, records: ServerRecords, resumed: int | None) -> None:
        self.run, self.core, self.records, self.journal = run, core, records, records.journal
        self._resumed = resumed
        self._joined: dict[int, Terms] = {}  # of workers that have joined without a starting point yet
        self._local_steps = [run.local_steps_of(i) for i in range(run.workers)]

    def join(self, worker: int, owned: Sequence[int], now_s: float) -> list[Reply]:
        """A worker joins that has checkpoints of the rounds `owned`."""
        again, rounds = self.core.joins(worker) > 0, self.run.rounds
        cut = rounds if self._resumed is None or self.core.seen(worker) else self._resumed
        restored = max((r for r in owned if 0 < r <= cut), default=0) if again else 0
        self.records.write("join", now_s, worker=worker, checkpoint=restored)
        if again:
            self.records.log(Absence(now_s, worker, "return"))
        self._joined[worker] = Terms(0, 0, 0, 0, int(again), cut, restored, 0)
        return self._perform(self.core.join(worker))

    def hear(self, worker: int, content: Pushed, now_s: float) -> list[Reply]:
        """The next push that the server expects of this worker has arrived."""
        phase, _ = self.core.expected_push(worker) or (0, 0)
        self.records.write("push", now_s, worker=worker, phase=phase, fragment=content.fragment)
        self.records.log(Transfer("push", content.start_s, now_s, worker, SERVER, content.fragment, content.bytes))
        push = self.core.counted(worker, content.fragment, content.message, self.run.step_tokens)
        return self._perform(self.core.push(worker, push, now_s))

    def leave(self, worker: int, reason: str | None, now_s: float) -> list[Reply]:
        """A worker is gone, with a reason (empty in a replay); None for one with no phase left."""
        self.records.write("leave", now_s, worker=worker)
        if reason:
            log.warning("worker %d is gone (%s); the others go on", worker, reason)
        if reason is not None:
            self.records.log(Absence(now_s, worker, "leave"))
        self._joined.pop(worker, None)
        return self._perform(self.core.leave(worker, now_s))

    def tick(self, now_s: float) -> list[Reply]:
        """Closes windows that are due. Re-raises errors of validating or saving."""
        self.records.check()
        replies: list[Reply] = []
        while actions := self.core.tick(now_s):
            self.records.write("tick", now_s)
            replies += self._perform(actions)
        return replies

    def restore_whole(self, state: CoreState, time_s: float) -> None:
        """Continues from the state of another process between two inputs. Raises ValueError when it does not fit."""
        self.core.restore_whole(state)
        self.records.now_s, self.journal.steps = time_s, self.core.absorbed_steps

    @property
    def progress(self) -> str:
        """The progress of the run, in words."""
        return f"{self.core.absorbed_steps} of {self.run.workers * self.run.loop.steps} inner steps are done"

    def _perform(self, actions: Sequence[ServerAction]) -> list[Reply]:
        replies: list[Reply] = []
        for action in actions:
            if isinstance(action, Update):
                self.journal.tokens = self.core.absorbed_steps * self.run.step_tokens
                self.records.log(action, self._local_steps)
            elif isinstance(action, Send):
                none = Terms(0, 0, 0, 0, 0, self.run.rounds, 0, 0)
                terms = self._joined.pop(action.worker, none)._replace(
                    round=action.absorbed_steps // (self.run.workers * self.run.full_steps),
                    go=int(action.go),
                    phases=action.phases,
                    elapsed_us=int(self.records.now_s * 1e6),
                )
                replies.append(Reply(action, terms))
        return replies


@contextlib.contextmanager
def open_session(
    run: ResolvedRun,
    folder: Path,
    probe: Probe,
    start: int | None,
    *,
    replays: Threads | None = None,
    takes_over: bool = False,
    aside: bool = True,
) -> Iterator[ServerSession]:
    """The session of a server that serves all workers, with its files. Raises CheckpointError and ConfigError.

    Args:
        start: the number of completed rounds, whose checkpoint is restored; 0 for a restarted run, None for a new one.
        replays: as in `open_files`.
        takes_over: whether `restore_whole` follows, in place of that checkpoint; the log has the inputs up to there.
        aside: whether to validate and save in another thread.
    """
    n = run.workers
    saved = restored(run, folder, start, loads=not takes_over)  # before its files are truncated to that round
    with open_files(run, folder, start, replays=replays, aside=aside) as files:
        begin_s = saved.get("time_s", 0.0)
        layout, spans = arrange(layout_of(probe.model), *run.fragments)
        core = ServerCore(
            run.with_server.rule,
            probe.x.clone(),
            layout,
            spans,
            [run.local_steps_of(i) for i in range(n)],
            budget=Budget(n * run.loop.steps),
            expected_until_s=begin_s + run.loop.timeout_s,
        )
        if saved:
            core.restore(saved)
        records = ServerRecords(
            run, folder, files, probe, core.state, begin_s=begin_s, round=start or 0, steps=core.absorbed_steps
        )
        if not takes_over:
            records.write("serve", begin_s, workers=n, round=start or 0, digest=run.digest)
        if not start:
            records.begin()
        yield ServerSession(run, core, records, None if takes_over else start or None)
