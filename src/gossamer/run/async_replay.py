"""Computes a real run that waited for nobody again, in one process from the order of its events, with the same bits.

The run folder gets the metrics, events and checkpoints of its workers, one validation at the end, and a copy of the record, so
that the two folders can be compared.
"""

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from gossamer.clock import Phase
from gossamer.clock.gossip_worker import GossipWorker
from gossamer.clock.pair_worker import PairWorker
from gossamer.clock.phases import LoopOptions
from gossamer.errors import ConfigError, DataError
from gossamer.finite import must_be_finite
from gossamer.record.events import EventWriter
from gossamer.record.folder import RunFolder
from gossamer.record.order import Finished, Learned, Met, Mixed, OrderEvent, Published, Told, read_order
from gossamer.record.progress import Progress
from gossamer.run.async_pairs import settled_pair
from gossamer.run.async_participant import due_round, save_worker
from gossamer.run.config import RunConfig, dump
from gossamer.run.evaluate import Probe, Probes, Result, assess
from gossamer.run.finished import must_be_record_of
from gossamer.run.journal import log_phase
from gossamer.run.parts import own_parts
from gossamer.run.replica import LocalPhase, Replica
from gossamer.run.serve_protocol import HERE
from gossamer.run.settle import InPairs, WithoutWaiting, settle
from gossamer.run.task import Task, task_of
from gossamer.topologies.mixing import Mixing
from gossamer.transport.launch import one_device
from gossamer.tree import Tree

__all__ = ["replay_asynchronous"]

Key = tuple[int, ...]
"""Names a message: its worker and version, or its worker and the meeting."""


def replay_asynchronous(
    config: RunConfig, folder: Path, recorded: Path, *, progress: Progress | None = None
) -> Result:  # fmt: skip
    """Computes the run in the folder `recorded` again and records it in `folder`, as far as its events go.

    Raises: ConfigError when the record is of another run or of none, or `folder` holds one; DataError for a record that
        contradicts itself.
    Cost: the models of all workers, and the messages that somebody has yet to hear.
    """
    parts = own_parts(config)
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
    settled, task = settle(config, parts, real=True), task_of(config, parts)
    assert isinstance(settled, InPairs | WithoutWaiting)
    began, replay = time.perf_counter(), _Replay(config, settled, folder, task, order)
    replay.run(progress)
    for path in sorted(recorded.glob("order-*.jsonl")):
        shutil.copyfile(path, folder / path.name)
    return Result(replay.loss, replay.tokens, replay.tokens / (time.perf_counter() - began), {HERE: replay.time_s})


class _Replay:
    """A run that is computed again, with its record."""

    def __init__(
        self, config: RunConfig, settled: InPairs | WithoutWaiting, folder: Path, task: Task,
        order: Mapping[int, list[OrderEvent]],
    ) -> None:  # fmt: skip
        self._config, self._folder, self._order = config, folder, order
        device = one_device(config.run.device)
        self._probe = Probe(config, task, device)
        replicas = {i: Replica(i, settled.config.unpaced(), task, device) for i in order}
        make = _Pairs if isinstance(settled, InPairs) else _Gossip
        self._run = make(config, settled, replicas, order)
        self.tokens, self.time_s, self.loss = 0, 0.0, math.nan
        self._round = dict.fromkeys(order, 0)

    def run(self, progress: Progress | None) -> None:
        """Takes every event as soon as the messages that it needs are there."""
        config, left = self._config, {i: [*reversed(events)] for i, events in self._order.items()}
        with (
            RunFolder(self._folder, dump(config), config.record) as self._record,
            EventWriter(self._folder, network=HERE, workers=config.workers) as self._events,
        ):
            while any(left.values()):
                took = 0
                for i, events in left.items():
                    while events and self._run.ready(i, events[-1]):
                        self._take(i, events.pop())
                        took += 1
                if not took:
                    self._run.stuck({i: events[-1] for i, events in left.items() if events})
                if progress is not None:
                    progress.update(config.name, min(self._round.values()))
            self._validate()

    def _take(self, i: int, event: OrderEvent) -> None:
        config, run, replica = self._config, self._run, self._run.replicas[i]
        self.time_s = max(self.time_s, event.time_s)
        if isinstance(event, Published | Learned):
            if due := due_round(config, self._round[i], event.round):
                save_worker(config, self._folder, due, replica, run.x(i), run.outer(i))
            self._round[i] = event.round
            report = run.train(i, event)
            self.tokens += report.tokens
            phase = Phase(event.start_s, event.time_s, i, event.number, report)
            log_phase(self._record, self._events, event.round, phase, replica.local_steps)
        elif isinstance(event, Finished):
            run.end(i, event)
            save_worker(config, self._folder, event.round, replica, run.x(i), run.outer(i))
        else:
            for kind, source in run.take(i, event):
                self._events.write(
                    self._round[i], kind, source=source, target=i, fragment=0, bytes=run.bytes, start_s=event.time_s,
                    end_s=event.time_s,
                )  # fmt: skip

    def _validate(self) -> None:
        """Scores the workers that were there at the end, or all if nobody was."""
        config, run = self._config, self._run
        ended = [i for i, events in self._order.items() if events and isinstance(events[-1], Finished)]
        chosen = ended or [*self._order]
        buffers = [run.replicas[i].buffers for i in chosen]
        figures = assess([run.x(i) for i in chosen], Probes([self._probe]), buffers).figures()
        self.loss = figures["loss"]
        self._record.log("eval", round=config.rounds - 1, step=config.run.steps, tokens=self.tokens, **figures)


class _Run(ABC):
    """The workers of a replay, and the messages that somebody has yet to hear."""

    def __init__(
        self, config: RunConfig, settled: InPairs | WithoutWaiting, replicas: Mapping[int, Replica], wanted: Iterable[Key]
    ) -> None:  # fmt: skip
        codec = settled.codec if isinstance(settled, InPairs) else settled.method.codec
        self.replicas, self._workers = replicas, config.workers
        self._options = LoopOptions(codec=codec, seed=config.seed)
        self._wanted, self._held = Counter(wanted), dict[Key, Tree]()
        self.bytes = 0
        """Of one message."""

    def ready(self, i: int, event: OrderEvent) -> bool:
        """Whether the messages that an event needs are there."""
        return all(key in self._held for key in self.needs(i, event))

    def stuck(self, waiting: Mapping[int, OrderEvent]) -> NoReturn:
        """Raises DataError: none of the next events can happen."""
        for i, event in waiting.items():
            for key in self.needs(i, event):
                if key not in self._held:
                    what = (
                        f"its version {key[1]}"
                        if len(key) == 2
                        else f"of meeting {key[2]} that worker {key[1]} started"
                    )
                    _impossible(i, f"it heard a message of worker {key[0]} that was never sent: {what}")
        raise AssertionError("nobody waits")

    def keep(self, i: int, key: Key, message: Tree, number: int, fragment: int = 0) -> Tree:
        """A message as others decode it, which is kept for those that hear it."""
        decoded, self.bytes = self._options.transmit(message, self.replicas[i].layout, i, number, fragment)
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
    def needs(self, i: int, event: OrderEvent) -> list[Key]:
        """The messages that an event needs."""

    @abstractmethod
    def x(self, i: int) -> Tensor:
        """The parameters of a worker."""

    @abstractmethod
    def outer(self, i: int) -> Tree:
        """The state of its method."""

    @abstractmethod
    def train(self, i: int, event: Published | Learned) -> LocalPhase:
        """A local phase that ends."""

    @abstractmethod
    def take(self, i: int, event: OrderEvent) -> Iterable[tuple[str, int]]:
        """Any other event; returns what was received, and from whom."""

    @abstractmethod
    def end(self, i: int, event: Finished) -> None:
        """The worker ends on purpose."""


class _Gossip(_Run):
    def __init__(
        self, config: RunConfig, settled: Any, replicas: Mapping[int, Replica], order: Mapping[int, list[OrderEvent]]
    ) -> None:  # fmt: skip
        heard = [key for events in order.values() for one in events if isinstance(one, Mixed) for key in one.heard]
        super().__init__(config, settled, replicas, heard)
        rule, self._topology = settled.method.rule, settled.method.topology
        self._cores = {i: GossipWorker(i, rule, one, self._topology.mixing(0)) for i, one in replicas.items()}
        self._own: dict[int, Tree] = {}
        self._alive: dict[tuple[int, int], frozenset[int]] = {
            (i, one.number): frozenset(range(config.workers)) if one.alive is None else one.alive
            for i, events in order.items()
            for one in events
            if isinstance(one, Mixed)
        }

    def needs(self, i: int, event: OrderEvent) -> list[Key]:
        return [*event.heard] if isinstance(event, Mixed) else []

    def x(self, i: int) -> Tensor:
        return self.replicas[i].x

    def outer(self, i: int) -> Tree:
        return self._cores[i].s

    def train(self, i: int, event: Published | Learned) -> LocalPhase:
        if not isinstance(event, Published):
            _impossible(i, "it met others in a run without meetings")
        replica, number = self.replicas[i], event.number
        replica.round = event.round
        report = replica.local_phase(number)
        message = self._cores[i].message(number, self._mixing(i, number))
        self._own[i] = self.keep(i, (i, number + 1), message, number)
        return report

    def take(self, i: int, event: OrderEvent) -> Iterable[tuple[str, int]]:
        assert isinstance(event, Mixed)
        mixing, peers = self._mixing(i, event.number), [j for j, _ in event.heard]
        if not {*peers} <= {*mixing.hears_from(i)}:
            _impossible(
                i,
                f"after phase {event.number} it heard workers {sorted(peers)}, and {mixing.hears_from(i)} were its peers",
            )
        received = {key[0]: self.heard(key) for key in event.heard}
        self._cores[i].mix(event.number, self._own.pop(i), received, mixing)
        return [("fetch", j) for j in peers]

    def end(self, i: int, event: Finished) -> None:
        pass

    def _mixing(self, i: int, number: int) -> Mixing:
        alive = self._alive.get((i, number), frozenset(range(self._workers)))
        if not {i} <= alive <= {*range(self._workers)}:
            _impossible(
                i, f"workers {sorted(alive)} were alive in its phase {number}, of {self._workers} and itself among them"
            )
        return self._topology.mixing(number, alive)


class _Pairs(_Run):
    def __init__(
        self, config: RunConfig, settled: Any, replicas: Mapping[int, Replica], order: Mapping[int, list[OrderEvent]]
    ) -> None:  # fmt: skip
        meetings = [(i, one) for i, events in order.items() for one in events if isinstance(one, Met)]
        super().__init__(config, settled, replicas, [key for i, one in meetings for key in self._both(i, one)])
        rule = settled_pair(settled)
        self._cores = {i: PairWorker(rule, one) for i, one in replicas.items()}

    @staticmethod
    def _both(i: int, event: Told | Met) -> tuple[Key, Key]:
        """The messages of both ends of a meeting, this worker's own first."""
        if event.peer == i or event.starter not in (i, event.peer):
            _impossible(i, f"it has a meeting with worker {event.peer} that worker {event.starter} started")
        return (i, event.starter, event.number), (event.peer, event.starter, event.number)

    def needs(self, i: int, event: OrderEvent) -> list[Key]:
        return [*self._both(i, event)] if isinstance(event, Met) else []

    def x(self, i: int) -> Tensor:
        return self._cores[i].x

    def outer(self, i: int) -> Tree:
        return self._cores[i].s

    def train(self, i: int, event: Published | Learned) -> LocalPhase:
        if not isinstance(event, Learned):
            _impossible(i, "it published messages in a run of pairs that meet")
        replica, core = self.replicas[i], self._cores[i]
        replica.round = event.round
        report = replica.local_phase(event.number)
        core.advance(event.dt)
        core.learn()
        core.begin()
        return report

    def take(self, i: int, event: OrderEvent) -> Iterable[tuple[str, int]]:
        assert isinstance(event, Told | Met)
        core, own, other = self._cores[i], *self._both(i, event)
        core.advance(event.dt)
        if isinstance(event, Told):
            self.keep(i, own, core.tell(), event.number, event.starter)
            return []
        told, heard = self.heard(own), self.heard(other)
        assert isinstance(told, Tensor) and isinstance(heard, Tensor)
        core.meet(told, heard)
        return [("meet", event.peer)]

    def end(self, i: int, event: Finished) -> None:
        self._cores[i].advance(event.dt)


def _impossible(i: int, why: str) -> NoReturn:
    raise DataError(
        f"the order of events contradicts itself at worker {i}: {why}; bring the files order-*.jsonl of all workers together, as "
        "the run wrote them"
    )
