"""One process of a real server without its connections: the core, its records and its checkpoints.

Sockets (`gossamer.run.served.server`) and the replay of a record (`gossamer.run.replay.served`) give it the same inputs. The
server of a region has the same session without checkpoints of its own: it begins from the model of the global server above it,
and passes on what it has learned in letters (`gossamer.run.served.region_protocol`).
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gossamer.clock import SERVER, Absence, Relay, Transfer, Update
from gossamer.clock.fragment import RegionReport
from gossamer.clock.phases import Budget
from gossamer.clock.server_core import Send, ServerAction, ServerCore
from gossamer.layout import arrange, layout_of
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.config.run_file import RunConfig, digest
from gossamer.run.config.settle import WithServer
from gossamer.run.served.protocol import Terms
from gossamer.run.served.records import ServerFiles, ServerRecords, Snapshots, open_files, restored
from gossamer.run.served.region_protocol import Answer, Region, RegionLetter, Welcome
from gossamer.tree import nbytes

__all__ = ["Pushed", "Reply", "ServerSession", "open_session", "region_session"]

log = logging.getLogger("gossamer")


class Reply(NamedTuple):
    """Starting points for a worker, and what goes with them."""

    send: Send
    terms: Terms

    @property
    def peer(self) -> int:
        """Whom it is for."""
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
        resumed: rounds that were over when the run was resumed; None where it was not.
        region: whose server this is; None for one that serves all workers.
        elsewhere: inner steps of the run that this core does not count.
    """

    def __init__(
        self, config: RunConfig, settled: WithServer, core: ServerCore, budget: Budget, records: ServerRecords,
        resumed: int | None, region: Region | None = None, elsewhere: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.core, self.records, self.journal = config, core, records, records.journal
        self.letters: list[RegionLetter] = []
        """What the global server is to be told, in order; the driver sends it and calls `answer` with each answer."""
        self._budget, self._resumed, self._region, self._elsewhere = budget, resumed, region, elsewhere
        self._unanswered = deque[RegionLetter]()
        self._joined: dict[int, Terms] = {}  # of those who have joined and have no starting point yet
        self._ended, self._wrote_s = False, records.now_s
        self._local_steps = [settled.config.local_steps_of(i) for i in range(config.workers)]

    def join(self, worker: int, owned: Sequence[int], now_s: float) -> list[Reply]:
        """A worker joins that has checkpoints of the rounds `owned`."""
        again, rounds = self.core.joins(worker) > 0, self.config.rounds
        cut = rounds if self._resumed is None or self.core.seen(worker) else self._resumed
        restored = max((r for r in owned if 0 < r <= cut), default=0) if again else 0
        self.records.write("join", now_s, worker=worker, checkpoint=restored)
        if again:
            self.records.enter(Absence(now_s, worker, "return"))
        # A region's round is ahead of what it has reported: there the number of phases alone tells what is void.
        cut = cut if self._region is None else rounds
        self._joined[worker] = Terms(0, 0, 0, 0, int(again), cut, restored, 0)
        return self._perform(self.core.join(worker))

    def push(self, worker: int, fragment: int, message: Tensor, size: int, start_s: float, now_s: float) -> list[Reply]:
        """The next push that the server expects of this worker has arrived, with `size` bytes."""
        phase, _ = self.core.may_push(worker) or (0, 0)
        self.records.write("push", now_s, worker=worker, phase=phase, fragment=fragment)
        self.records.enter(Transfer("push", start_s, now_s, worker, SERVER, fragment, size))
        push = self.core.counted(worker, fragment, message, self.config.step_tokens)
        return self._perform(self.core.push(worker, push, now_s))

    def hear(self, worker: int, content: Pushed, now_s: float) -> list[Reply]:
        """As `push`."""
        return self.push(worker, *content, now_s)

    def leave(self, worker: int, reason: str | None, now_s: float) -> list[Reply]:
        """A worker is gone, because of a reason; None for one to which nothing was left to train."""
        self.records.write("leave", now_s, worker=worker)
        if reason is not None:
            log.warning("worker %d is gone (%s); the others go on", worker, reason)
            self.records.enter(Absence(now_s, worker, "leave"))
        self._joined.pop(worker, None)
        return self._perform(self.core.leave(worker, now_s))

    def answer(self, answer: Answer, start_s: float, now_s: float) -> list[Reply]:
        """The global server has answered the oldest letter that it had not."""
        self.records.write("answer", now_s)
        asked = self._unanswered.popleft()
        if answer.x is not None and self._region is not None:
            self.core.merge(asked.fragment, answer.x)
            arrived = Relay("merge", start_s, now_s, self._region.number, asked.fragment, nbytes(answer.x))
            self.records.enter(arrived)
        self._ended = asked.done
        self._elsewhere = answer.grant.elsewhere
        self.journal.steps = self.core.absorbed_steps + self._elsewhere
        return self._perform(self.core.grant(answer.grant.steps, more=answer.grant.more))

    def tick(self, now_s: float) -> list[Reply]:
        """Closes the windows that are due. Raises what validating or saving has raised."""
        self.records.check()
        replies: list[Reply] = []
        while actions := self.core.tick(now_s):
            self.records.write("tick", now_s)
            replies += self._perform(actions)
        # A region with nothing else to say asks, before the global server takes it for lost.
        late, done = now_s - self._wrote_s > self.config.run.timeout_s / 4, self.core.over
        if self._region is not None and not self._unanswered and not self._ended and (done or late):
            self.records.write("tick", now_s)
            self._write_to_global(done=done)
        return replies

    @property
    def over(self) -> bool:
        """Whether all steps have been taken and absorbed; in a region, whether the global server knows it."""
        return self.core.over if self._region is None else self._ended

    @property
    def next_closing_s(self) -> float:
        """When the next window closes."""
        return self.core.next_closing_s

    @property
    def progress(self) -> str:
        """How far the run is, in words."""
        done = self.core.absorbed_steps + self._elsewhere
        return f"{done} of {self.config.workers * self.config.run.steps} inner steps are done"

    def close(self, now_s: float) -> None:
        """The last round is over: validates and saves, unless a global server does."""
        if self._region is None:
            self.records.close(now_s)

    def _perform(self, actions: Sequence[ServerAction]) -> list[Reply]:
        replies: list[Reply] = []
        for action in actions:
            if isinstance(action, Update):
                self.journal.tokens = self.core.absorbed_steps * self.config.step_tokens
                self.records.enter(action, self._local_steps)
            elif isinstance(action, Send):
                none = Terms(0, 0, 0, 0, 0, self.config.rounds, 0, 0)
                steps = action.absorbed_steps + self._elsewhere
                terms = self._joined.pop(action.worker, none)._replace(
                    round=steps // (self.config.workers * self.config.full_steps), go=int(action.go),
                    phases=action.phases, elapsed_us=int(self.records.now_s * 1e6),
                )  # fmt: skip
                replies.append(Reply(action, terms))
            elif isinstance(action, RegionReport):
                self._write_to_global(action.fragment, action.message)
        asks = any(letter.message is None for letter in self._unanswered)
        if self._region is not None and self._budget.more and not asks:
            left, members = self._budget.steps - self._budget.begun, self._region.members
            if left < sum(self._local_steps[i] for i in members):  # not enough for a phase of each
                self._write_to_global()
        return replies

    def _write_to_global(self, fragment: int = -1, message: Tensor | None = None, *, done: bool = False) -> None:
        assert self._region is not None
        phases = tuple(self.core.phases(i) for i in self._region.members)
        letter = RegionLetter(fragment, self._budget.begun, self.core.absorbed_steps, done, phases, message)
        self._wrote_s = self.records.now_s
        self.letters.append(letter)
        self._unanswered.append(letter)


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
    """The session of a server that serves all workers, with its files. Raises CheckpointError and ConfigError.

    Args: `start` is the number of rounds that are over, whose checkpoint is restored; 0 for a run that starts again, None for a
        new one.
    """
    n = config.workers
    with open_files(config, folder, start, owner=n, replays=replays) as files:
        saved = restored(config, folder, start)
        begin_s = saved.get("time_s", 0.0)
        budget = Budget(n * config.run.steps)
        core = _core(config, settled, probe, probe.x.clone(), budget, begin_s)
        if saved:
            core.restore(saved)
        snapshots = Snapshots(folder, probe, core.state)
        records = ServerRecords(
            config, files, snapshots, begin_s=begin_s, round=start or 0, steps=core.absorbed_steps
        )  # fmt: skip
        records.write("serve", begin_s, workers=n, round=start or 0, digest=digest(config))
        if not start:
            records.begin()
        yield ServerSession(config, settled, core, budget, records, start or None)


def region_session(
    config: RunConfig, settled: WithServer, files: ServerFiles, probe: Probe, region: Region, welcome: Welcome,
    begin_s: float,
) -> ServerSession:  # fmt: skip
    """The session of a region's server, which the global server has welcomed."""
    n, grant = config.workers, welcome.grant
    budget = Budget(grant.steps, more=grant.more)
    core = _core(config, settled, probe, welcome.x, budget, begin_s, set(range(n)) - set(region.members))
    phases = dict(zip(region.members, welcome.phases, strict=True))
    core.enroll([phases.get(i, 0) for i in range(n)], again=welcome.again)
    round = min(grant.elsewhere // (n * config.full_steps), config.rounds - 1)
    records = ServerRecords(config, files, None, begin_s=begin_s, round=round, steps=grant.elsewhere)
    records.write("begin", begin_s, region=region.number, key=welcome.key, digest=digest(config))
    resumed = round if welcome.again else None
    return ServerSession(config, settled, core, budget, records, resumed, region, grant.elsewhere)


def _core(
    config: RunConfig, settled: WithServer, probe: Probe, x: Tensor, budget: Budget, begin_s: float,
    strangers: Iterable[int] = (),
) -> ServerCore:  # fmt: skip
    layout, spans = arrange(layout_of(probe.model), *config.fragments)
    steps = [settled.config.local_steps_of(i) for i in range(config.workers)]
    return ServerCore(
        settled.rule, x, layout, spans, steps, budget=budget, expected_until_s=begin_s + config.run.timeout_s,
        strangers=strangers,
    )  # fmt: skip
