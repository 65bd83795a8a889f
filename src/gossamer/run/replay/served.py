"""Replays the run of a real server in one process from the record of arrivals, bit for bit.

The server's decisions follow from its inputs and their times, which `gossamer.record.logs.arrivals` keeps, and a
worker's results from the starting points it received and the checkpoint it restored. A phase whose push never arrived,
as its server stopped or its worker died, affected no other result. It is in the record of its worker, written before
the push, unless that worker rejoined and dropped it; so it is replayed for the record if present. A phase that a server
absorbed and lost at its death is replayed, as others saw its effect, and dropped from the replay's record when its
worker rejoins, as from the worker's own: otherwise it would be recorded twice.

A server resumed with other settings is replayed with the recorded settings of each of its processes.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gossamer.clock import SERVER, LoopOptions
from gossamer.errors import ConfigError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.arrivals import ServerInput, arrivals_file, read_arrivals
from gossamer.record.machines import Threads
from gossamer.run.bookkeeping.evaluate import Probe, Result
from gossamer.run.bookkeeping.finished import must_be_record_of
from gossamer.run.bookkeeping.inputs import must_have_inputs, note_inputs
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import HERE
from gossamer.run.replay.driver import Actor, Contradiction, Missing, ends_early, follow
from gossamer.run.replay.stretches import Stretch, stretches
from gossamer.run.served.served_worker import CompletedPhase, ServedWorker
from gossamer.run.served.session import Pushed, Reply, ServerSession, open_session
from gossamer.run.worker.numerics import threads_of, using_threads
from gossamer.run.worker.task import Task, task_of
from gossamer.transport.processes.launch import one_device
from gossamer.tree import nbytes


def replay_server(run: ResolvedRun, folder: Path, recorded: Path) -> Result:
    """Replays the server run in the folder `recorded` and records it in `folder`.

    It ends where the record ends, so an interrupted run is replayed up to its interruption.

    Raises: ConfigError when the record is of another run or `folder` holds one; DataError for an impossible record.
    Cost: parameters, gradients and inner state of every worker, and the state of the rule at each server.
    """
    if run.kind != "server":
        raise ConfigError(
            f"a replay needs a run with a [server], and '{run.name}' has none; give the run file of the server"
        )
    if any(recorded.glob("arrivals-*.jsonl")):  # regional servers
        raise ConfigError(
            f"'{recorded}' was recorded by 0.1.0 with real regions; this version replays servers without regions"
        )
    threads = threads_of(run, recorded)
    inputs, began = read_arrivals(recorded), time.perf_counter()
    saved = checkpoint.rounds(recorded / "checkpoints", run.workers)
    unpushed = _Unpushed(inputs, recorded)
    some = stretches(run, recorded, real=True)
    settings, journal = [_settings(one, some, recorded) for one, _ in _processes(inputs)], None
    for now, (begin, lines) in zip(settings, _processes(inputs), strict=True):
        task = task_of(now)
        must_have_inputs(now, task, recorded, "repeat")
        probe = Probe(now, task, torch.device("cpu"))
        probe.threads = threads.at(run.workers, begin.round)
        with (
            using_threads(probe.threads),
            open_session(now, folder, probe, begin.round or None, replays=threads) as session,
        ):
            # Checked first that the folder is of this run: its checkpoints from before a change of settings stay valid.
            for path in recorded.glob("branches.json"):
                shutil.copyfile(path, folder / path.name)
            note_inputs(now, task, folder, None)
            session.records.stops = {*saved, *(item.round for item in inputs if item.event == "serve")}
            server = _Server(session, now, task, folder, arrivals_file(recorded), lines, inputs, unpushed, threads)
            for _ in follow([server]):
                pass
            server.end()
            if session.core.is_finished:
                session.records.close(lines[-1].time_s)
            journal = session.journal
    assert journal is not None  # a record begins with a process
    if (newest := max(saved, default=0)) > journal.round:
        raise ends_early(arrivals_file(recorded), newest, "the server")
    return Result(journal.loss, journal.tokens, journal.tokens / (time.perf_counter() - began), {HERE: journal.time_s})


class _Unpushed:
    """Recorded phases whose pushes never arrived: at most the last one of each worker."""

    def __init__(self, inputs: Sequence[ServerInput], recorded: Path) -> None:
        self._last_joins = {item.worker: item for item in inputs if item.event == "join"}
        self._steps: dict[int, int] = {}
        for line in read_metrics(recorded):
            if line["kind"] == "train" and isinstance(worker := line.get("worker"), int):
                self._steps[worker] = max(self._steps.get(worker, 0), line.get("step", 0))

    def has(self, join: ServerInput, phases: int, local_steps: int) -> bool:
        """Whether the worker of this join has recorded the phase after these, and no later process dropped it."""
        return self._last_joins[join.worker] is join and self._steps.get(join.worker, 0) > phases * local_steps


def _settings(begin: ServerInput, some: Sequence[Stretch], recorded: Path) -> ResolvedRun:
    """The settings of a process of the server. Raises ConfigError when it is of another run."""
    candidates = [one.run for one in some if one.run.digest == begin.digest and one.first <= begin.round]
    now = some[-1].run
    if not candidates or begin.workers != now.workers:
        must_be_record_of(now, recorded)  # names the difference
        raise ConfigError(
            f"'{recorded}' is a run of {begin.workers} workers with digest {begin.digest} and the run file has {now.workers} "
            f"with {now.digest}; replay it with its own run.toml"
        )
    return candidates[-1]


def _processes(inputs: Sequence[ServerInput]) -> Iterator[tuple[ServerInput, list[ServerInput]]]:
    """Each process of a server with its inputs."""
    begins = [k for k, item in enumerate(inputs) if item.event == "serve"]
    for a, b in zip(begins, [*begins[1:], len(inputs)], strict=True):
        yield inputs[a], list(inputs[a + 1 : b])


class _Server(Actor[ServerInput]):
    """One process of a server, with its workers as objects in this one.

    Windows, staleness and budget depend only on the order and times of its inputs.
    """

    def __init__(
        self,
        session: ServerSession,
        run: ResolvedRun,
        task: Task,
        folder: Path,
        file: Path,
        lines: Sequence[ServerInput],
        inputs: Sequence[ServerInput],
        unpushed: _Unpushed,
        threads: Threads,
    ) -> None:
        super().__init__("server", "the server", file, lines)
        self._session, self._run, self._task, self._folder = session, run, task, folder
        self._threads = threads
        self._device = one_device(run.loop.device)
        """The workers' device; the server computes on the host."""
        self._options = LoopOptions(codec=run.with_server.codec, seed=run.seed)
        self._workers: dict[int, ServedWorker] = {}  # those that are present
        self._restored = {(item.worker, item.checkpoint) for item in inputs if item.event == "join"}
        self._joins: dict[int, ServerInput] = {}  # of workers without a starting point yet
        self._trained: dict[int, CompletedPhase] = {}  # their last phases
        self._sent_s: dict[int, float] = {}  # when their last starting points were sent
        self._unpushed, self._present = unpushed, dict[int, ServerInput]()  # the join events of present workers
        self._now_s = 0.0

    def named(self, event: ServerInput) -> str:
        """See `Actor`."""
        return f"'{event.event}' of worker {event.worker}, phase {event.phase}, fragment {event.fragment} at {event.time_s:g} s"

    def missing(self, event: ServerInput) -> Missing | None:
        """See `Actor`. A server only waits for its next input, so a missing one can never arrive."""
        worker, core = event.worker, self._session.core
        if event.event not in ("join", "push", "leave", "tick"):
            raise Contradiction("it is none of such a server")
        if event.event == "tick":
            return None
        if worker >= self._run.workers or (worker in self._workers) == (event.event == "join"):
            raise Contradiction("a worker joins once before it pushes or leaves")
        if event.event == "push" and core.expected_push(worker) != (event.phase, event.fragment):
            raise Contradiction(f"what it may push is phase and fragment {core.expected_push(worker)}")
        return None

    def take(self, event: ServerInput) -> None:
        """See `Actor`."""
        session, worker, now_s = self._session, event.worker, event.time_s
        self._now_s = now_s
        if event.event == "tick":
            self._receive(session.tick(now_s), now_s)
        elif event.event == "join":
            self._join(event)
        elif event.event == "push":
            self._push(event)
        else:
            # A worker stopped on request saved first; for a dead one no process has restored such a checkpoint.
            if worker not in self._joins and (worker, self._workers[worker].finished_rounds) in self._restored:
                self._workers[worker].save()
            self._record_unpushed(worker)
            # The reason is not recorded. Whether it was a loss follows, as in a server, from the last reply.
            reason = None if worker not in self._joins and self._workers[worker].is_done else ""
            del self._workers[worker]
            self._joins.pop(worker, None)
            self._receive(session.leave(worker, reason, now_s), now_s)

    def end(self) -> None:
        """Ends the process: records the unpushed phases of present workers."""
        for worker in sorted(self._workers):
            self._record_unpushed(worker)

    def _record_unpushed(self, worker: int) -> None:
        served = self._workers[worker]
        if worker in self._joins or served.is_done:
            return
        if self._unpushed.has(self._present[worker], served.phases, served.learner.local_steps):
            records = self._session.records
            served.log(records.record, records.events, served.train(), self._sent_s[worker], self._now_s)

    def _join(self, item: ServerInput) -> None:
        worker, owned = item.worker, [item.checkpoint] if item.checkpoint else []
        served = ServedWorker(worker, self._run.unpaced(), self._folder, self._task, self._device)
        self._workers[worker], self._joins[worker], self._present[worker] = served, item, item
        self._receive(self._session.join(worker, owned, item.time_s), item.time_s)

    def _push(self, item: ServerInput) -> None:
        worker, session = item.worker, self._session
        # Training can be deferred until now, as it only depends on the starting points sent.
        trained = self._trained[worker] = self._workers[worker].train()
        self._workers[worker].log(
            session.records.record, session.records.events, trained, self._sent_s[worker], item.time_s
        )
        layout = session.core.layouts[item.fragment]
        message, size = self._options.transmit(
            trained.push.message, layout, worker, item.phase, item.fragment, on=torch.device("cpu")
        )
        assert isinstance(message, Tensor)
        content = Pushed(item.fragment, message, size, item.time_s)
        self._receive(session.hear(worker, content, item.time_s), item.time_s)

    def _receive(self, replies: Sequence[Reply], now_s: float) -> None:
        for reply in replies:
            worker = reply.send.worker
            self._sent_s[worker] = now_s
            if (item := self._joins.pop(worker, None)) is None:
                trained = self._trained[worker]
                self._workers[worker].receive(trained, reply.send.starts, reply.terms)
                for p, start in reply.send.starts.items():
                    self._session.records.events.write(
                        trained.round,
                        "fetch",
                        source=SERVER,
                        target=worker,
                        fragment=p,
                        bytes=nbytes(start.x),
                        start_s=now_s,
                        end_s=now_s,
                    )
                continue
            if reply.terms.checkpoint != item.checkpoint:
                raise Contradiction(f"no worker can restore round {item.checkpoint} then")
            served, records = self._workers[worker], self._session.records
            served.join(reply.send.starts, reply.terms)
            begun = reply.terms.cut_round if reply.terms.again else 0
            served.learner.threads = self._threads.at(worker, begun)
            if reply.terms.again:  # phases lost with a dead server, which the worker drops too
                records.record.drop(served.uncounted(reply.terms))
                records.events.drop(served.uncounted(reply.terms))
