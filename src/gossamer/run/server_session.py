"""One process of a real server without its connections: the core, its records and its checkpoints.

Nobody waits for a validation or a snapshot: a round that ends is validated and saved in a thread, as the server was then, while
the next pushes are absorbed and answered. A round that is due before the last is done waits for it, so at most one is under way.

Sockets (`gossamer.run.serve`) and the replay of a record (`gossamer.run.serve_replay`) give it the same inputs.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.clock import SERVER, Absence, Transfer, Update
from gossamer.clock.phases import Budget
from gossamer.clock.server_core import Send, ServerAction, ServerCore
from gossamer.layout import arrange, layout_of
from gossamer.record import checkpoint
from gossamer.record.arrivals import ArrivalWriter, ServerInput
from gossamer.record.events import EventWriter
from gossamer.record.files import worker_suffix
from gossamer.record.folder import RunFolder
from gossamer.record.progress import say
from gossamer.run.config import RunConfig, digest, dump
from gossamer.run.evaluate import Probe
from gossamer.run.history import lineage
from gossamer.run.journal import EventJournal, Journal, saver
from gossamer.run.serve_protocol import HERE, Terms
from gossamer.run.settle import WithServer

__all__ = ["Reply", "ServerFiles", "ServerSession", "open_session"]

log = logging.getLogger("gossamer")


class Reply(NamedTuple):
    """Starting points for a worker, and what goes with them."""

    send: Send
    terms: Terms


class _Ended(NamedTuple):
    """The server as it was at the end of the round that is validated and saved. No rule writes into its old state."""

    round: int
    state: dict[str, Any]


class ServerFiles(NamedTuple):
    """Where a server process writes, and with what."""

    record: RunFolder
    events: EventWriter
    arrivals: ArrivalWriter | None = None
    """Where every input is written first; None in a replay."""
    aside: ThreadPoolExecutor | None = None
    """The thread that validates and saves; None to do so at once."""


class ServerSession:
    """The core of one server process with its records. Inputs come from one thread, with the seconds since the run began.

    Args:
        settled: what `config` runs.
        start: rounds of the run that are over, whose checkpoint is restored; 0 for a run that starts again, None for a new one.
    """

    def __init__(
        self, config: RunConfig, settled: WithServer, folder: Path, probe: Probe, start: int | None, files: ServerFiles
    ) -> None:
        self.config, (self.record, self.events, self._arrivals, self._aside) = config, files
        self._probe, self._resumed = probe, start or None
        self._under_way = Future[None]()
        self._under_way.set_result(None)
        self._local_steps = [settled.config.local_steps_of(i) for i in range(config.workers)]
        n, saved = config.workers, dict[str, Any]()
        line = lineage(config, folder)
        if start is not None:
            saved = checkpoint.load(folder / "checkpoints", start, n, line) if start else saved
            checkpoint.rewind(folder / "checkpoints", start, n)
        self.begin_s = saved.get("time_s", 0.0)
        """When this process of the server began, since the run began."""
        layout, spans = arrange(layout_of(probe.model), *config.fragments)
        self.core = ServerCore(
            settled.rule, probe.x.clone(), layout, spans, self._local_steps, budget=Budget(n * config.run.steps),
            expected_until_s=self.begin_s + config.run.timeout_s,
        )  # fmt: skip
        if saved:
            self.core.restore(saved)
        self._now_s = self.begin_s
        self._write("serve", workers=n, round=start or 0, digest=digest(config))
        self._ended = _Ended(0, {})
        save = saver(line, folder, lambda: [(n, self._ended.state)], keep=2 if files.arrivals is not None else 3)
        self._journal = Journal(config, lambda: files.record, self._assess, save)
        self.journal = EventJournal(self._journal, lambda: files.events, end_round=self._end_round)
        self.journal.round, self.journal.steps = start or 0, self.core.absorbed_steps

    def join(self, worker: int, owned: Sequence[int], now_s: float) -> list[Reply]:
        """A worker joins that has checkpoints of the rounds `owned`."""
        again, rounds = self.core.joins(worker) > 0, self.config.rounds
        cut = rounds if self._resumed is None or self.core.seen(worker) else self._resumed
        restored = max((r for r in owned if 0 < r <= cut), default=0) if again else 0
        self._now_s = now_s
        self._write("join", worker=worker, checkpoint=restored)
        if again:
            self.journal.enter(Absence(now_s, worker, "return"), now_s, [])
        return self._perform(self.core.join(worker), Terms(0, 0, 0, 0, int(again), cut, restored, 0))

    def push(self, worker: int, fragment: int, message: Tensor, size: int, start_s: float, now_s: float) -> list[Reply]:
        """The next push that the server expects of this worker has arrived, with `size` bytes."""
        self._now_s = now_s
        phase, _ = self.core.may_push(worker) or (0, 0)
        self._write("push", worker=worker, phase=phase, fragment=fragment)
        self.journal.enter(Transfer("push", start_s, now_s, worker, SERVER, fragment, size), now_s, [])
        push = self.core.counted(worker, fragment, message, self.config.step_tokens)
        return self._perform(self.core.push(worker, push, now_s))

    def leave(self, worker: int, reason: str | None, now_s: float) -> list[Reply]:
        """A worker is gone, because of a reason; None for one to which nothing was left to train."""
        self._now_s = now_s
        self._write("leave", worker=worker)
        if reason is not None:
            log.warning("worker %d is gone (%s); the others go on", worker, reason)
            self.journal.enter(Absence(now_s, worker, "leave"), now_s, [])
        return self._perform(self.core.leave(worker, now_s))

    def tick(self, now_s: float) -> list[Reply]:
        """Closes the windows that are due. Raises what validating or saving has raised."""
        if self._under_way.done():
            self._under_way.result()
        replies: list[Reply] = []
        while actions := self.core.tick(now_s):
            self._now_s = now_s
            self._write("tick")
            replies += self._perform(actions)
        return replies

    def close(self, now_s: float) -> None:
        """The last round is over: validates and saves."""
        self._now_s = self.journal.time_s = now_s
        self.journal.end()
        self._under_way.result()

    def _end_round(self, finished: int, losses: Sequence[float], **behind: Any) -> None:
        """Has the end of a round validated and saved, after that of the one before."""
        run = self.config.run
        if not any(self.config.due(every, finished) for every in (run.eval_every, run.checkpoint_every)):
            return
        self._under_way.result()
        self._ended = _Ended(finished, {**self.core.state(), "time_s": self._now_s})
        end = partial(self._journal.end_round, finished, [*losses], **behind)
        if self._aside is None:
            end()
        else:
            self._under_way = self._aside.submit(end)

    def _perform(self, actions: Sequence[ServerAction], joined: Terms | None = None) -> list[Reply]:
        replies: list[Reply] = []
        for action in actions:
            if isinstance(action, Update):
                self.journal.tokens = self.core.absorbed_steps * self.config.step_tokens
                self.journal.enter(action, self._now_s, self._local_steps)
            elif isinstance(action, Send):
                terms = (joined or Terms(0, 0, 0, 0, 0, self.config.rounds, 0, 0))._replace(
                    round=action.absorbed_steps // (self.config.workers * self.config.full_steps),
                    go=int(action.go), phases=action.phases, elapsed_us=int(self._now_s * 1e6),
                )  # fmt: skip
                replies.append(Reply(action, terms))
        return replies

    def _assess(self) -> dict[str, Any]:
        round, state = self._ended
        loss = self._probe.loss(state["x"])
        say(
            f"round {round} of {self.config.rounds}: validation {loss:.4f} after {sum(state['updates'])} updates, "
            f"{self.core.present} workers"
        )
        return {"loss": loss}

    def _write(self, event: str, **fields: Any) -> None:
        if self._arrivals is not None:
            self._arrivals.write(ServerInput(event, self._now_s, **fields))


@contextlib.contextmanager
def open_session(
    config: RunConfig,
    settled: WithServer,
    folder: Path,
    probe: Probe,
    start: int | None,
    *,
    replays: bool = False,
) -> Iterator[ServerSession]:
    """A session with its files, which a replay writes for the workers as well. Raises CheckpointError and ConfigError."""
    n = config.workers
    owner, suffix = (None, "") if replays else (n, worker_suffix(n))
    with contextlib.ExitStack() as files:
        record = files.enter_context(RunFolder(folder, dump(config), config.record, worker=owner, resume_round=start))
        events = files.enter_context(EventWriter(folder, network=HERE, workers=n, suffix=suffix, resume_round=start))
        arrivals = aside = None
        if not replays:
            arrivals = files.enter_context(ArrivalWriter(folder, resume=bool(start)))
            aside = files.enter_context(
                ThreadPoolExecutor(1, "aside", torch.set_num_threads, (torch.get_num_threads(),))
            )
        yield ServerSession(config, settled, folder, probe, start, ServerFiles(record, events, arrivals, aside))
