"""Computes a real run that waited for nobody again, in one process from the order of its events, with the same bits.

Every process of the run is computed as far as its events go, also those that died, came back or were resumed. What a slot has
trained again counts once in the metrics: as its last process has trained it.

The run folder gets the metrics, events and checkpoints of its workers, one validation at the end, and a copy of the record, so
that the two folders can be compared.
"""

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn

from torch import Tensor

from gossamer.clock import Phase
from gossamer.clock.gossip_worker import GossipWorker
from gossamer.clock.pair_worker import PairWorker
from gossamer.clock.phases import LoopOptions
from gossamer.errors import ConfigError, DataError
from gossamer.finite import must_be_finite
from gossamer.record.branches import described, read_branches
from gossamer.record.checkpoint import Lineage
from gossamer.record.folder import RunFolder
from gossamer.record.logs.events import EventWriter
from gossamer.record.logs.order import (
    Entered,
    Finished,
    Learned,
    Met,
    Mixed,
    OrderEvent,
    OrderLife,
    Published,
    Told,
    read_order,
)
from gossamer.record.packed import packed, unpacked
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.asynchronous.pair_process import pair_rule_of
from gossamer.run.asynchronous.participant import due_round, save_state
from gossamer.run.asynchronous.start import Core, Source, adopt, content_of, state_of
from gossamer.run.bookkeeping.evaluate import Probe, Probes, Result, assess
from gossamer.run.bookkeeping.finished import must_be_record_of
from gossamer.run.bookkeeping.journal import log_phase
from gossamer.run.config.resolved import InPairs, ResolvedRun
from gossamer.run.served.protocol import HERE
from gossamer.run.worker.replica import LocalPhase, Replica
from gossamer.run.worker.task import Task, task_of
from gossamer.topologies.mixing import Mixing
from gossamer.transport.processes.launch import one_device
from gossamer.tree import Tree

__all__ = ["replay_asynchronous"]

Name = tuple[int, int]
"""Names a process: its slot and its life."""
Key = tuple[int, ...]
"""Names a message: its slot, life and version, or its slot and the meeting: the starter, its life and a number."""
_NEVER = 1 << 31


def replay_asynchronous(config: ResolvedRun, folder: Path, recorded: Path) -> Result:
    """Computes the run in the folder `recorded` again and records it in `folder`, as far as its events go.

    Raises: ConfigError when the record is of another run or of none, or `folder` holds one; DataError for a record that
        contradicts itself.
    Cost: the models of all workers, and the messages that somebody has yet to hear.
    """
    must_be_record_of(config, recorded)
    order = read_order(recorded)
    if not order:
        raise ConfigError(
            f"'{recorded}' has no order of events (order-*.jsonl), which gossamer train writes where nobody waits; a "
            "simulation is repeated by gossamer simulate alone"
        )
    if strangers := [i for i in order if i >= config.workers]:
        raise DataError(
            f"'{recorded}' has events of worker {strangers[0]} of {config.workers}; restore the files of the run"
        )
    if branches := read_branches(recorded):
        raise ConfigError(
            f"'{recorded}' went on with other settings {described(branches[-1])}; only a run whose settings stayed the same can "
            "be computed again"
        )
    task = task_of(config)
    began, replay = time.perf_counter(), _Replay(config, folder, task, order)
    replay.run()
    for path in sorted(recorded.glob("order-*.jsonl")):
        shutil.copyfile(path, folder / path.name)
    return Result(replay.loss, replay.tokens, replay.tokens / (time.perf_counter() - began), {HERE: replay.time_s})


class _Process:
    """One process of a run, and how far its events have been taken."""

    def __init__(self, slot: int, one: OrderLife, after: OrderLife | None) -> None:
        self.slot, self.begun, self.ended = slot, one.begun, one.ended is not None
        self.name: Name = (slot, one.life)
        self.void_from = after.begun.round if after is not None else _NEVER
        """The round from which on the record of this one is void, as the slot went on from there."""
        self._void_phase = after.begun.number if after is not None else _NEVER
        self.left: list[Entered | OrderEvent] = [*reversed(one.events), one.begun]
        self.taken = -1
        """Events, without the begin."""
        self.round, self.phases = one.begun.round, one.begun.number

    @property
    def source(self) -> Source:
        """Where it is in its order of events."""
        return *self.name, self.taken

    def counts(self, event: Published | Learned) -> bool:
        """Whether no later process of the slot has trained this local phase again."""
        return event.round < self.void_from and event.number < self._void_phase

    def next_round(self) -> int:
        """Rounds that were over when its last phase was, which its next phase tells."""
        return next((one.round for one in reversed(self.left) if isinstance(one, Published | Learned)), self.round)


class _Replay:
    """A run that is computed again, with its record."""

    def __init__(
        self, config: ResolvedRun, folder: Path, task: Task,
        order: Mapping[int, list[OrderLife]],
    ) -> None:  # fmt: skip
        self._config, self._folder, self._line = config, folder, Lineage(config.digest)
        device = one_device(config.run.device)
        self._probe = Probe(config, task, device)
        self._processes = [
            _Process(slot, one, after)
            for slot, lives in sorted(order.items())
            for one, after in zip(lives, [*lives[1:], None], strict=True)
        ]
        self._last = {one.slot: one for one in self._processes}
        self._wanted = {one.begun.source for one in self._processes}
        self._states: dict[Source, bytes] = {}
        make = _Pairs if isinstance(config.method, InPairs) else _Gossip
        self._run = make(config, lambda slot: Replica(slot, config.unpaced(), task, device), order)
        self.tokens, self.time_s, self.loss = 0, 0.0, math.nan

    def run(self) -> None:
        """Takes every event as soon as what it needs is there."""
        config, processes = self._config, self._processes
        with (
            RunFolder(self._folder, config.document, config.record) as self._record,
            EventWriter(self._folder, network=HERE, workers=config.workers) as self._events,
        ):
            if config.run.eval_every:
                probe, n = self._probe, config.workers
                self._log_validation(-1, 0, [probe.x.clone()] * n, [probe.buffers] * n)
            while any(one.left for one in processes):
                took = 0
                for one in processes:
                    while one.left and self._ready(one):
                        self._take(one, one.left.pop())
                        took += 1
                    if not one.left and one is not self._last[one.slot]:
                        self._run.forget(one.name)
                if not took:
                    self._stuck()
            self._validate()

    def _ready(self, one: _Process) -> bool:
        event = one.left[-1]
        if isinstance(event, Entered):
            return event.source is None or event.source in self._states
        return self._run.ready(one.name, event)

    def _stuck(self) -> NoReturn:
        """Raises DataError: none of the next events can happen."""
        for one in self._processes:
            event = one.left[-1] if one.left else None
            if isinstance(event, Entered) and event.source is not None:
                worker, _, place = event.source
                _impossible(
                    one.slot, f"it began with the state of worker {worker} after {place} events, which it never had"
                )
            if event is not None and not isinstance(event, Entered):
                self._run.must_be_ready(one.name, event)
        raise AssertionError("nobody waits")

    def _take(self, one: _Process, event: Entered | OrderEvent) -> None:
        run = self._run
        self.time_s = max(self.time_s, event.time_s)
        if isinstance(event, Entered):
            self._begin(one, event)
        elif isinstance(event, Published | Learned):
            self._train(one, event)
        elif isinstance(event, Finished):
            run.end(one.name, event)
        else:
            for kind, source in run.take(one.name, event):
                if one.round < one.void_from:
                    self._events.write(
                        one.round, kind, source=source, target=one.slot, fragment=0, bytes=run.bytes, start_s=event.time_s,
                        end_s=event.time_s,
                    )  # fmt: skip
        one.taken += 1
        if one.source in self._wanted:
            self._states[one.source] = packed(self._state(one))
        due = 0
        if isinstance(event, Finished):
            due = event.round
        elif isinstance(event, Mixed | Learned):
            due = due_round(self._config, one.round, one.next_round())
        if 0 < due <= one.void_from:
            save_state(self._line, self._folder, due, one.slot, self._state(one))

    def _begin(self, one: _Process, begun: Entered) -> None:
        core, replica = self._run.begin(one.name)
        if begun.source is not None:
            adopt(state_of(unpacked(self._states[begun.source]), begun.round), core, replica)

    def _train(self, one: _Process, event: Published | Learned) -> None:
        one.round, one.phases = event.round, event.number + 1
        report = self._run.train(one.name, event)
        if one.counts(event):
            self.tokens += report.tokens
            phase = Phase(event.start_s, event.time_s, one.slot, event.number, report)
            log_phase(self._record, self._events, event.round, phase, self._run.replicas[one.name].local_steps)

    def _state(self, one: _Process) -> dict[str, Any]:
        return content_of(
            self._run.cores[one.name], self._run.replicas[one.name], phases=one.phases, source=one.source, held={}
        )

    def _validate(self) -> None:
        """Scores the workers that were there at the end, or all if nobody was."""
        config, run = self._config, self._run
        last = [*self._last.values()]
        chosen = [one.name for one in last if one.ended] or [one.name for one in last]
        xs, buffers = [run.cores[name].x for name in chosen], [run.replicas[name].buffers for name in chosen]
        self.loss = self._log_validation(config.rounds - 1, config.run.steps, xs, buffers)

    def _log_validation(
        self, round: int, step: int, xs: Sequence[Tensor], buffers: Sequence[Sequence[Tensor]]
    ) -> float:
        figures = assess(xs, Probes([self._probe]), buffers).figures()
        self._record.log("eval", round=round, step=step, tokens=self.tokens, **figures)
        return figures["loss"]


class _Run(ABC, Generic[Core]):
    """The workers of a replay, and the messages that somebody has yet to hear."""

    def __init__(
        self, config: ResolvedRun, replica: Callable[[int], Replica],
        order: Mapping[int, list[OrderLife]],
    ) -> None:  # fmt: skip
        self._workers, self._replica = config.workers, replica
        self.replicas: dict[Name, Replica] = {}
        self.cores: dict[Name, Core] = {}
        wanted = [
            key
            for slot, lives in order.items()
            for one in lives
            for event in one.events
            for key in self.needs((slot, one.life), event)
        ]
        self._options = LoopOptions(codec=config.method.codec, seed=config.seed)
        self._wanted, self._held = Counter(wanted), dict[Key, Tree]()
        self.bytes = 0
        """Of one message."""

    def begin(self, i: Name) -> tuple[Core, Replica]:
        """A process begins at the start of the run."""
        replica = self.replicas[i] = self._replica(i[0])
        core = self.cores[i] = self.core(i, replica)
        return core, replica

    def forget(self, i: Name) -> None:
        """Nothing more comes of a process."""
        self.replicas.pop(i, None)
        self.cores.pop(i, None)

    def ready(self, i: Name, event: OrderEvent) -> bool:
        """Whether the messages that an event needs are there."""
        return all(key in self._held for key in self.needs(i, event))

    def must_be_ready(self, i: Name, event: OrderEvent) -> None:
        """Raises DataError when a message that an event needs never comes."""
        for key in self.needs(i, event):
            if key not in self._held:
                what = f"its version {key[2]}" if len(key) == 3 else f"of meeting {key[3]} that worker {key[1]} started"
                _impossible(i[0], f"it heard a message of worker {key[0]} that was never sent: {what}")

    def keep(self, i: Name, key: Key, message: Tree, number: int, fragment: int = 0) -> Tree:
        """A message as others decode it, which is kept for those that hear it."""
        decoded, self.bytes = self._options.transmit(message, self.replicas[i].layout, i[0], number, fragment)
        if self._wanted[key]:
            self._held[key] = decoded
        return decoded

    def heard(self, key: Key) -> Tree:
        """A message, which goes once everybody has heard it."""
        message = self._held[key]
        must_be_finite({f"the message of worker {key[0]}": message})
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._held[key]
        return message

    @abstractmethod
    def core(self, i: Name, replica: Replica) -> Core:
        """The worker that a process is."""

    @abstractmethod
    def needs(self, i: Name, event: OrderEvent) -> list[Key]:
        """The messages that an event needs."""

    @abstractmethod
    def train(self, i: Name, event: Published | Learned) -> LocalPhase:
        """A local phase that ends."""

    @abstractmethod
    def take(self, i: Name, event: OrderEvent) -> Iterable[tuple[str, int]]:
        """Any other event; returns what was received, and from whom."""

    @abstractmethod
    def end(self, i: Name, event: Finished) -> None:
        """The worker ends on purpose."""


class _Gossip(_Run[GossipWorker]):
    def __init__(
        self, config: ResolvedRun, replica: Callable[[int], Replica],
        order: Mapping[int, list[OrderLife]],
    ) -> None:  # fmt: skip
        super().__init__(config, replica, order)
        assert isinstance(config.method, Method)
        self._rule, self._topology = config.method.rule, config.method.topology
        self._own: dict[Name, Tree] = {}
        everyone = frozenset(range(config.workers))
        self._alive = {
            (slot, life.life, one.number): everyone if one.alive is None else one.alive
            for slot, lives in order.items()
            for life in lives
            for one in life.events
            if isinstance(one, Mixed)
        }

    def core(self, i: Name, replica: Replica) -> GossipWorker:
        return GossipWorker(i[0], self._rule, replica, self._topology.mixing(0))

    def needs(self, i: Name, event: OrderEvent) -> list[Key]:
        return [(j, life, version) for j, version, life in event.heard] if isinstance(event, Mixed) else []

    def train(self, i: Name, event: Published | Learned) -> LocalPhase:
        if not isinstance(event, Published):
            _impossible(i[0], "it met others in a run without meetings")
        replica, number = self.replicas[i], event.number
        replica.round = event.round
        report = replica.local_phase(number)
        message = self.cores[i].message(number, self._mixing(i, number))
        self._own[i] = self.keep(i, (*i, number + 1), message, number)
        return report

    def take(self, i: Name, event: OrderEvent) -> Iterable[tuple[str, int]]:
        assert isinstance(event, Mixed)
        mixing, peers = self._mixing(i, event.number), [j for j, _, _ in event.heard]
        known = mixing.receives_from(i[0])
        if not {*peers} <= {*known}:
            _impossible(
                i[0], f"after phase {event.number} it heard workers {sorted(peers)}, and {known} were its peers"
            )
        received = {key[0]: self.heard(key) for key in self.needs(i, event)}
        self.cores[i].mix(event.number, self._own.pop(i), received, mixing)
        return [("fetch", j) for j in peers]

    def end(self, i: Name, event: Finished) -> None:
        pass

    def _mixing(self, i: Name, number: int) -> Mixing:
        slot, alive = i[0], self._alive.get((*i, number), frozenset(range(self._workers)))
        if not {slot} <= alive <= {*range(self._workers)}:
            _impossible(
                slot,
                f"workers {sorted(alive)} were alive in its phase {number}, of {self._workers} and itself among them",
            )
        return self._topology.mixing(number, alive)


class _Pairs(_Run[PairWorker]):
    def __init__(
        self, config: ResolvedRun, replica: Callable[[int], Replica],
        order: Mapping[int, list[OrderLife]],
    ) -> None:  # fmt: skip
        super().__init__(config, replica, order)
        assert isinstance(config.method, InPairs)
        self._rule = pair_rule_of(config.method)

    def core(self, i: Name, replica: Replica) -> PairWorker:
        return PairWorker(self._rule, replica)

    @staticmethod
    def _both(i: Name, event: Told | Met) -> tuple[Key, Key]:
        """The messages of both ends of a meeting, this worker's own first."""
        slot, meeting = i[0], event[1:4]
        if event.peer == slot or event.starter not in (slot, event.peer):
            _impossible(slot, f"it has a meeting with worker {event.peer} that worker {event.starter} started")
        return (slot, *meeting), (event.peer, *meeting)

    def needs(self, i: Name, event: OrderEvent) -> list[Key]:
        return [*self._both(i, event)] if isinstance(event, Met) else []

    def train(self, i: Name, event: Published | Learned) -> LocalPhase:
        if not isinstance(event, Learned):
            _impossible(i[0], "it published messages in a run of pairs that meet")
        replica, core = self.replicas[i], self.cores[i]
        replica.round = event.round
        report = replica.local_phase(event.number)
        core.advance(event.dt)
        core.learn()
        core.begin()
        return report

    def take(self, i: Name, event: OrderEvent) -> Iterable[tuple[str, int]]:
        assert isinstance(event, Told | Met)
        core, own, other = self.cores[i], *self._both(i, event)
        core.advance(event.dt)
        if isinstance(event, Told):
            self.keep(i, own, core.tell(), event.number, event.starter)
            return []
        told, heard = self.heard(own), self.heard(other)
        assert isinstance(told, Tensor) and isinstance(heard, Tensor)
        core.meet(told, heard)
        return [("meet", event.peer)]

    def end(self, i: Name, event: Finished) -> None:
        self.cores[i].advance(event.dt)


def _impossible(i: int, why: str) -> NoReturn:
    raise DataError(
        f"the order of events contradicts itself at worker {i}: {why}; bring the files order-*.jsonl of all workers together, as "
        "the run wrote them"
    )
