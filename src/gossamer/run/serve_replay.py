"""Computes the run of a real server again, in one process from the record of arrivals, with the same bits.

The server's decisions follow from its inputs and their times, which `gossamer.record.arrivals` keeps, and a worker's numbers from
the starting points it got and the checkpoint it restored. A phase whose push never arrived left no trace in any of them.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gossamer.clock import LoopOptions
from gossamer.errors import ConfigError, DataError
from gossamer.record.arrivals import ServerInput, arrivals_file, read_arrivals
from gossamer.run.config import RunConfig, digest
from gossamer.run.evaluate import Probe, Result
from gossamer.run.parts import own_parts
from gossamer.run.serve_protocol import HERE, settled_server, use_threads
from gossamer.run.serve_worker import ServedWorker, Trained
from gossamer.run.server_session import Reply, ServerSession, open_session
from gossamer.run.settle import WithServer
from gossamer.run.task import Task, task_of

__all__ = ["replay_server"]


def replay_server(config: RunConfig, folder: Path, recorded: Path) -> Result:
    """Computes the server run in the folder `recorded` again and records it in `folder`.

    It ends where the record ends, so an interrupted run is replayed up to its interruption.

    Raises: ConfigError when the record is of another run or `folder` holds one; DataError for an impossible record.
    Cost: parameters, gradients and inner state of every worker, and the rule's state.
    """
    if config.server is None:
        raise ConfigError(
            f"a replay needs a run with a [server], and '{config.name}' has none; give the run file of the server"
        )
    parts = own_parts(config)
    settled = settled_server(config, parts)
    use_threads(config)
    inputs = read_arrivals(recorded)
    for item in inputs:
        if item.event == "serve" and (item.workers, item.digest) != (config.workers, digest(config)):
            raise ConfigError(
                f"'{recorded}' is a run of {item.workers} workers with digest {item.digest} and the run file has "
                f"{config.workers} with {digest(config)}; replay it with its own run.toml"
            )
    task = task_of(config, parts)
    probe = Probe(config, task, torch.device("cpu"))
    outcome, began = None, time.perf_counter()
    for begin, lines in _processes(inputs):
        start = begin.round or None
        with open_session(config, settled, folder, probe, start, replays=True) as session:
            _Replay(session, settled, folder, task, str(arrivals_file(recorded))).run(lines)
            journal = session.journal
            outcome = Result(
                journal.loss, journal.tokens, journal.tokens / (time.perf_counter() - began), {HERE: journal.time_s}
            )
    assert outcome is not None  # a record begins with a process
    return outcome


def _processes(inputs: Sequence[ServerInput]) -> Iterator[tuple[ServerInput, list[ServerInput]]]:
    """Each process of the server with its inputs."""
    begins = [k for k, item in enumerate(inputs) if item.event == "serve"]
    for a, b in zip(begins, [*begins[1:], len(inputs)], strict=True):
        yield inputs[a], list(inputs[a + 1 : b])


class _Replay:
    """One process of the server, with its workers as objects in this one."""

    def __init__(self, session: ServerSession, settled: WithServer, folder: Path, task: Task, where: str) -> None:
        self._session, self._settled, self._folder, self._task, self._where = session, settled, folder, task, where
        config, self._device = session.config, torch.device("cpu")
        self._options = LoopOptions(codec=settled.codec, seed=config.seed)
        self._workers: dict[int, ServedWorker] = {}  # those that are present
        self._trained: dict[int, Trained] = {}  # their last phases
        self._sent_s: dict[int, float] = {}  # when their last starting points were sent

    def run(self, inputs: Sequence[ServerInput]) -> None:
        """Gives the session all inputs in their order, and trains the phases that were pushed."""
        for item in inputs:
            worker, now_s = item.worker, item.time_s
            if item.event == "tick":
                self._receive(self._session.tick(now_s), now_s)
                continue
            if worker >= self._session.config.workers or (worker in self._workers) == (item.event == "join"):
                raise self._impossible(item, "a worker joins once before it pushes or leaves")
            if item.event == "join":
                self._join(item)
            elif item.event == "push":
                self._push(item)
            else:
                del self._workers[worker]
                self._receive(self._session.leave(worker, None, now_s), now_s)
        if self._session.core.over:
            self._session.close(inputs[-1].time_s)

    def _join(self, item: ServerInput) -> None:
        worker, owned = item.worker, [item.checkpoint] if item.checkpoint else []
        served = ServedWorker(
            worker, self._session.config, self._settled.config, self._folder, self._task, self._device
        )
        self._workers[worker], self._sent_s[worker] = served, item.time_s
        for reply in self._session.join(worker, owned, item.time_s):
            if reply.terms.checkpoint != item.checkpoint:
                raise self._impossible(item, f"no worker can restore round {item.checkpoint} then")
            served.join(reply.send.starts, reply.terms)

    def _push(self, item: ServerInput) -> None:
        worker, session = item.worker, self._session
        if session.core.may_push(worker) != (item.phase, item.fragment):
            raise self._impossible(item, f"what it may push is phase and fragment {session.core.may_push(worker)}")
        trained = self._trained[worker] = self._workers[worker].train()
        self._workers[worker].log(session.record, session.events, trained, self._sent_s[worker], item.time_s)
        layout = session.core.layouts[item.fragment]
        message, size = self._options.transmit(trained.push.message, layout, worker, item.phase, item.fragment)
        assert isinstance(message, Tensor)
        self._receive(session.push(worker, item.fragment, message, size, item.time_s, item.time_s), item.time_s)

    def _receive(self, replies: Sequence[Reply], now_s: float) -> None:
        for reply in replies:
            worker = reply.send.worker
            self._sent_s[worker] = now_s
            self._workers[worker].receive(self._trained[worker], reply.send.starts, reply.terms)

    def _impossible(self, item: ServerInput, rule: str) -> DataError:
        what = f"'{item.event}' of worker {item.worker}, phase {item.phase}, fragment {item.fragment}"
        return DataError(
            f"{self._where} has {what} at {item.time_s} s, which cannot be: {rule}; replay an unchanged record"
        )
