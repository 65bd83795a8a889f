"""Computes the run of a real server again, in one process from the record of arrivals, with the same bits.

The server's decisions follow from its inputs and their times, which `gossamer.record.logs.arrivals` keeps, and a worker's
numbers from the starting points it got and the checkpoint it restored. A phase whose push never arrived left no trace in any of
them. One that a server absorbed and lost when it died is computed, as others saw what it did, and leaves the record of the
replay when its worker joins again, as it leaves the worker's own: otherwise it would be there twice, and readers that go by
rounds would take either.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.clock import LoopOptions
from gossamer.errors import ConfigError, DataError
from gossamer.record.logs.arrivals import ServerInput, arrivals_file, read_arrivals
from gossamer.run.bookkeeping.evaluate import Probe, Result
from gossamer.run.bookkeeping.journal import EventJournal
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.served.protocol import HERE, use_threads
from gossamer.run.served.session import Reply, ServerSession, open_session
from gossamer.run.served.worker import ServedWorker, Trained
from gossamer.run.worker.task import Task, task_of

__all__ = ["replay_server"]


class _Recorded(NamedTuple):
    """A recorded run, and where its replay goes."""

    config: ResolvedRun
    task: Task
    probe: Probe
    folder: Path
    where: Path


def replay_server(config: ResolvedRun, folder: Path, recorded: Path) -> Result:
    """Computes the server run in the folder `recorded` again and records it in `folder`.

    It ends where the record ends, so an interrupted run is replayed up to its interruption.

    Raises: ConfigError when the record is of another run or `folder` holds one; DataError for an impossible record.
    Cost: parameters, gradients and inner state of every worker, and the state of the rule at the server.
    """
    if config.kind != "server":
        raise ConfigError(
            f"a replay needs a run with a [server], and '{config.name}' has none; give the run file of the server"
        )
    use_threads(config)
    inputs = _of_this_run(read_arrivals(recorded), config, recorded)
    task, began = task_of(config), time.perf_counter()
    run = _Recorded(config, task, Probe(config, task, torch.device("cpu")), folder, recorded)
    journal = _replay_processes(run, inputs)
    return Result(journal.loss, journal.tokens, journal.tokens / (time.perf_counter() - began), {HERE: journal.time_s})


def _of_this_run(inputs: list[ServerInput], config: ResolvedRun, recorded: Path) -> list[ServerInput]:
    """The inputs, if the processes that had them are of this run. Raises ConfigError."""
    for item in inputs:
        if item.event == "serve" and (item.workers, item.digest) != (config.workers, config.digest):
            raise ConfigError(
                f"'{recorded}' is a run of {item.workers} workers with digest {item.digest} and the run file has "
                f"{config.workers} with {config.digest}; replay it with its own run.toml"
            )
    return inputs


def _processes(inputs: Sequence[ServerInput]) -> Iterator[tuple[ServerInput, list[ServerInput]]]:
    """Each process of the server with its inputs."""
    begins = [k for k, item in enumerate(inputs) if item.event == "serve"]
    for a, b in zip(begins, [*begins[1:], len(inputs)], strict=True):
        yield inputs[a], list(inputs[a + 1 : b])


def _replay_processes(run: _Recorded, inputs: Sequence[ServerInput]) -> EventJournal:
    """The run of a server, process by process."""
    journal = None
    for begin, lines in _processes(inputs):
        start = begin.round or None
        with open_session(run.config, run.folder, run.probe, start, replays=True) as session:
            replay = _Replay(session, run, arrivals_file(run.where))
            for item in lines:
                replay.enter(item)
            if session.core.over:
                session.close(lines[-1].time_s)
            journal = session.journal
    assert journal is not None  # a record begins with a process
    return journal


class _Replay:
    """One process of a server, with its workers as objects in this one."""

    def __init__(self, session: ServerSession, run: _Recorded, where: Path) -> None:
        self.session, self._run, self._where = session, run, where
        self._device = torch.device("cpu")
        self._options = LoopOptions(codec=run.config.method.codec, seed=run.config.seed)
        self._workers: dict[int, ServedWorker] = {}  # those that are present
        self._joins: dict[int, ServerInput] = {}  # of those who have no starting point yet
        self._trained: dict[int, Trained] = {}  # their last phases
        self._sent_s: dict[int, float] = {}  # when their last starting points were sent

    def enter(self, item: ServerInput) -> None:
        """Gives the session the next input, and trains the phase that was pushed."""
        worker, now_s = item.worker, item.time_s
        if item.event == "tick":
            self._receive(self.session.tick(now_s), now_s)
            return
        if item.event not in ("join", "push", "leave"):
            raise self._impossible(item, "it is none of such a server")
        if worker >= self.session.config.workers or (worker in self._workers) == (item.event == "join"):
            raise self._impossible(item, "a worker joins once before it pushes or leaves")
        if item.event == "join":
            self._join(item)
        elif item.event == "push":
            self._push(item)
        else:
            del self._workers[worker]
            self._joins.pop(worker, None)
            self._receive(self.session.leave(worker, None, now_s), now_s)

    def _join(self, item: ServerInput) -> None:
        worker, owned, run = item.worker, [item.checkpoint] if item.checkpoint else [], self._run
        served = ServedWorker(worker, run.config, run.folder, run.task, self._device)
        self._workers[worker], self._joins[worker] = served, item
        self._receive(self.session.join(worker, owned, item.time_s), item.time_s)

    def _push(self, item: ServerInput) -> None:
        worker, session = item.worker, self.session
        if session.core.may_push(worker) != (item.phase, item.fragment):
            raise self._impossible(item, f"what it may push is phase and fragment {session.core.may_push(worker)}")
        trained = self._trained[worker] = self._workers[worker].train()
        self._workers[worker].log(
            session.records.record, session.records.events, trained, self._sent_s[worker], item.time_s
        )
        layout = session.core.layouts[item.fragment]
        message, size = self._options.transmit(trained.push.message, layout, worker, item.phase, item.fragment)
        assert isinstance(message, Tensor)
        self._receive(session.push(worker, item.fragment, message, size, item.time_s, item.time_s), item.time_s)

    def _receive(self, replies: Sequence[Reply], now_s: float) -> None:
        for reply in replies:
            worker = reply.send.worker
            self._sent_s[worker] = now_s
            if (item := self._joins.pop(worker, None)) is None:
                self._workers[worker].receive(self._trained[worker], reply.send.starts, reply.terms)
                continue
            if reply.terms.checkpoint != item.checkpoint:
                raise self._impossible(item, f"no worker can restore round {item.checkpoint} then")
            served, records = self._workers[worker], self.session.records
            served.join(reply.send.starts, reply.terms)
            if reply.terms.again:  # what a server had absorbed and lost when it died, as the worker itself drops it
                records.record.drop(served.uncounted(reply.terms))
                records.events.drop(served.uncounted(reply.terms))

    def _impossible(self, item: ServerInput, rule: str) -> DataError:
        what = f"'{item.event}' of worker {item.worker}, phase {item.phase}, fragment {item.fragment}"
        return DataError(
            f"{self._where} has {what} at {item.time_s} s, which cannot be: {rule}; replay an unchanged record"
        )
