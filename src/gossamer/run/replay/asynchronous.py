"""Replays an asynchronous run in one process from the order of its events, bit for bit.

Every process of the run is computed as far as its events go, including those that died, came back or were resumed.
Repeated phases of a slot count once in the metrics, as trained by its last process.

The run folder gets the metrics, events and checkpoints of its workers, one validation at the end, and a copy of the record, so
that the two folders can be compared.
"""

import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic

from torch import Tensor

from gossamer.clock import Phase
from gossamer.clock.gossip_worker import GossipWorker
from gossamer.clock.pair_worker import PairWorker
from gossamer.clock.phases import LoopOptions
from gossamer.errors import CheckpointError, ConfigError, DataError
from gossamer.finite import must_be_finite
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.logs.events import EventWriter
from gossamer.record.logs.order import (
    ORDER,
    Entered,
    Finished,
    Learned,
    MeetingSent,
    Met,
    Mixed,
    OrderEvent,
    OrderLife,
    Published,
    read_order,
)
from gossamer.record.machines import Threads
from gossamer.record.packed import packed, unpacked
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.asynchronous.async_participant import due_round, save_state
from gossamer.run.asynchronous.async_state import Core, Source, adopt, content_of, state_of
from gossamer.run.asynchronous.pair_process import pair_rule_of
from gossamer.run.bookkeeping.evaluate import Probe, Probes, Result, assess
from gossamer.run.bookkeeping.finished import must_be_record_of
from gossamer.run.bookkeeping.inputs import must_have_inputs, note_inputs
from gossamer.run.bookkeeping.journal import log_phase
from gossamer.run.config.resolved import InPairs, ResolvedRun
from gossamer.run.participant.agreement import HERE, limits_of
from gossamer.run.replay.driver import Actor, Contradiction, Missing, copy_record, ends_early, follow
from gossamer.run.replay.stretches import must_not_have_changed
from gossamer.run.worker.numerics import threads_of
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.topologies.mixing import Mixing
from gossamer.transport.processes.launch import one_device
from gossamer.tree import Tree

Key = tuple[int, ...]
"""The key of a message: slot, life and version, or slot and meeting (starter, its life and a number)."""
_NEVER = 1 << 31


def replay_asynchronous(run: ResolvedRun, folder: Path, recorded: Path) -> Result:
    """Replays the run in the folder `recorded` and records it in `folder`, as far as its events go.

    Raises: ConfigError when the record is of another run or of none, or `folder` holds one; DataError for a record that
        contradicts itself.
    Cost: the models of all workers, and messages still to be received.
    """
    must_be_record_of(run, recorded)
    saved = {slot: checkpoint.rounds(recorded / "checkpoints", slot, run.lineage)[-1:] for slot in range(run.workers)}
    order = read_order(recorded)  # after the checkpoints, to which a run in progress adds more
    if not order:
        raise ConfigError(
            f"'{recorded}' has no order of events (order-*.jsonl), which gossamer train writes where nobody waits; a "
            "simulation is repeated by gossamer simulate alone"
        )
    if strangers := [i for i in order if i >= run.workers]:
        raise DataError(
            f"'{recorded}' has events of worker {strangers[0]} of {run.workers}; restore the files of the run"
        )
    must_not_have_changed(run, recorded, "which of its workers' events came before is not recorded")
    _must_be_whole(run, recorded, order, saved)
    began, replayed = time.perf_counter(), _Replayed(run, folder, threads_of(run, recorded))
    must_have_inputs(run, replayed.task, recorded, "repeat")
    replayed.compute(recorded, order)
    for slot, lives in order.items():
        copy_record(ORDER.path(recorded, slot), folder, sum(life.lines for life in lives))
    return Result(
        replayed.loss, replayed.tokens, replayed.tokens / (time.perf_counter() - began), {HERE: replayed.time_s}
    )


def _must_be_whole(
    run: ResolvedRun, recorded: Path, order: Mapping[int, Sequence[OrderLife]], saved: Mapping[int, Sequence[int]]
) -> None:
    """Raises DataError where the newest checkpoint of a worker is of later events than its record has.

    Rounds do not show it: a worker saves after a phase, and may be killed before it records the next.
    """
    store, events = recorded / "checkpoints", {one.life: len(one.events) for some in order.values() for one in some}
    for slot in order:
        for round in saved[slot]:
            try:
                state = state_of(checkpoint.load(store, round, slot, run.lineage), round, limits_of(run))
            except CheckpointError:  # damage is reported elsewhere, and does not concern the record
                continue
            worker, life, place = state.source
            if place > events.get(life, 0):
                raise ends_early(ORDER.path(recorded, worker), round, f"worker {slot}")


class _Replayed:
    """A replayed run with its record: the messages and states shared by its processes, and their output."""

    record: RunFolder
    events: EventWriter
    messages: "_Messages"

    def __init__(self, run: ResolvedRun, folder: Path, threads: Threads) -> None:
        self.run, self.folder, self.lineage, self._threads = run, folder, run.lineage, threads
        self.task, self._device = task_of(run), one_device(run.loop.device)
        self._probe = Probe(run, self.task, self._device)
        self._probe.threads = threads.at(0, 0)
        self.states: dict[Source, bytes | None] = {}
        """Initial states of processes; None for one not computed yet."""
        self.tokens, self.time_s, self.loss = 0, 0.0, math.nan

    def replica(self, slot: int, round: int) -> Replica:
        """A worker's replica at the start of the run, for a process that begins in this round."""
        replica = Replica(slot, self.run.unpaced(), self.task, self._device)
        replica.threads = self._threads.at(slot, round)
        return replica

    def compute(self, recorded: Path, order: Mapping[int, list[OrderLife]]) -> None:
        """Processes all events."""
        run, probe, n = self.run, self._probe, self.run.workers
        make = _PairReplay if isinstance(self.run.method, InPairs) else _Gossip
        processes = [
            make(self, slot, one, lives[k + 1 :], ORDER.path(recorded, slot))
            for slot, lives in sorted(order.items())
            for k, one in enumerate(lives)
        ]
        self.states = {one.begun.source: None for lives in order.values() for one in lives if one.begun.source}
        self.messages = _Messages(run, processes)
        last: dict[int, _Process[Any]] = {one.slot: one for one in processes}
        with (
            RunFolder(self.folder, run.document, run.record, threads=(self._threads, run.owners.stop)) as self.record,
            EventWriter(self.folder, network=HERE, workers=n) as self.events,
        ):
            note_inputs(run, self.task, self.folder, None)
            if run.loop.eval_every:
                self._validate(0, [probe.x.clone()] * n, [probe.buffers] * n)
            for one, _ in follow(processes):
                if not one.left and one is not last[one.slot]:
                    one.forget()
            # The workers present at the end are scored, or all if none was.
            chosen = [one for one in last.values() if one.ended] or [*last.values()]
            xs, buffers = [one.core.x for one in chosen], [one.replica.buffers for one in chosen]
            over = max(one.round for one in last.values())
            self.loss = self._validate(over, xs, buffers)

    def _validate(self, over: int, xs: Sequence[Tensor], buffers: Sequence[Sequence[Tensor]]) -> float:
        figures = assess(xs, Probes([self._probe]), buffers)._asdict()
        if over or not self.tokens:  # else it is in the first round, after validation of the initial values
            step = over * self.run.full_steps
            self.record.log("eval", round=over - 1, step=step, tokens=self.tokens, **figures)
        return figures["loss"]


class _Messages:
    """Messages still to be received, as others decode them."""

    def __init__(self, run: ResolvedRun, processes: Sequence["_Process[Any]"]) -> None:
        self._options = LoopOptions(codec=run.method.codec, seed=run.seed)
        self._wanted = Counter(key for one in processes for event in one.left for key in one.needs(event))
        self._senders = {key: one.key for one in processes for event in one.left for key in one.sends(event)}
        self._held = dict[Key, Tree]()
        self.bytes = 0
        """Of one message."""

    def missing(self, key: Key) -> Missing | None:
        """The reason for waiting for a message."""
        if key in self._held:
            return None
        which = f"its version {key[2]}" if len(key) == 3 else f"of meeting {key[3]} that worker {key[1]} started"
        why = f"it heard a message of worker {key[0]} that was never sent: {which}"
        return Missing(why, self._senders.get(key))

    def keep(self, key: Key, replica: Replica, message: Tree, number: int, fragment: int = 0) -> Tree:
        """A message as others decode it, kept for its receivers."""
        decoded, self.bytes = self._options.transmit(message, replica.layout, key[0], number, fragment)
        if self._wanted[key]:
            self._held[key] = decoded
        return decoded

    def take(self, key: Key) -> Tree:
        """A message, dropped after its last receiver."""
        message = self._held[key]
        must_be_finite({f"the message of worker {key[0]}": message})
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._held[key]
        return message


class _Process(Actor["Entered | OrderEvent"], Generic[Core]):
    """One process of a run, with its worker."""

    core: Core
    replica: Replica
    kinds: ClassVar[tuple[type, ...]]
    """The events of such a run, except begin and end."""

    def __init__(self, run: _Replayed, slot: int, life: OrderLife, later: Sequence[OrderLife], file: Path) -> None:
        super().__init__((slot, life.life), f"worker {slot}", file, [life.begun, *life.events])
        self.slot, self.life, self.ended, self._replayed = slot, life.life, life.ended is not None, run
        # The slot resumed from there, so this process's records from that round or phase on are void. A second resume
        # may go back further.
        self._void_round = min((other.begun.round for other in later), default=_NEVER)
        self._void_phase = min((other.begun.number for other in later), default=_NEVER)
        self._taken = -1
        """The number of events, without the begin."""
        self.round, self._phases = life.begun.round, life.begun.number

    def named(self, event: Entered | OrderEvent) -> str:
        """See `Actor`."""
        kind = type(event).__name__.lower()
        which = f" of worker {event.starter}" if isinstance(event, MeetingSent | Met) else ""
        number = "" if isinstance(event, Finished) else f" {event.number}"
        return f"'{kind}'{number}{which} at {event.time_s:g} s"

    def missing(self, event: Entered | OrderEvent) -> Missing | None:
        """See `Actor`."""
        if isinstance(event, Entered):
            if event.source is None or self._replayed.states[event.source] is not None:
                return None
            worker, life, place = event.source
            why = f"it began with the state of worker {worker} after {place} events, which it never had"
            return Missing(why, (worker, life))
        if not isinstance(event, (*self.kinds, Finished)):
            raise Contradiction(f"a run like this one has no '{type(event).__name__.lower()}'")
        reasons = (self._replayed.messages.missing(key) for key in self.needs(event))
        return next((one for one in reasons if one is not None), None)

    def take(self, event: Entered | OrderEvent) -> None:
        """See `Actor`."""
        run = self._replayed
        run.time_s = max(run.time_s, event.time_s)
        if isinstance(event, Entered):
            self._begin(event)
        elif isinstance(event, Published | Learned):
            self._train(event)
        else:
            for kind, source in self.exchange(event):
                if self.round < self._void_round:
                    run.events.write(
                        self.round,
                        kind,
                        source=source,
                        target=self.slot,
                        fragment=0,
                        bytes=run.messages.bytes,
                        start_s=event.time_s,
                        end_s=event.time_s,
                    )
        self._taken += 1
        # A process that begins with this state got it as of right after this event, within a local phase or not.
        if self._source in run.states:
            run.states[self._source] = packed(self._state())
        due = 0
        if isinstance(event, Finished):
            due = self.round = event.round
        elif isinstance(event, Mixed | Learned):
            # A worker saves when it next checks the run's progress, in its next phase.
            reached = (one.round for one in self.left if isinstance(one, Published | Learned))
            due = due_round(run.run, self.round, next(reached, self.round))
        if 0 < due <= self._void_round:
            save_state(run.lineage, run.folder, due, self.slot, self._state())

    def forget(self) -> None:
        """Frees its state after its last event."""
        del self.core, self.replica

    @property
    def _source(self) -> Source:
        return self.slot, self.life, self._taken

    def _begin(self, begun: Entered) -> None:
        self.replica = self._replayed.replica(self.slot, begun.round)
        self.core = self.new_core()
        if begun.source is not None:
            state = self._replayed.states[begun.source]
            assert state is not None  # it was missing
            adopt(state_of(unpacked(state), begun.round, limits_of(self._replayed.run)), self.core, self.replica)

    def _train(self, event: Published | Learned) -> None:
        run, replica = self._replayed, self.replica
        self.round, self._phases, replica.round = event.round, event.number + 1, event.round
        report = replica.local_phase(event.number)
        self.trained(event)
        if event.round < self._void_round and event.number < self._void_phase:
            run.tokens += report.tokens
            phase = Phase(event.start_s, event.time_s, self.slot, event.number, report)
            log_phase(run.record, run.events, event.round, phase, replica.local_steps)

    def _state(self) -> dict[str, Any]:
        return content_of(self.core, self.replica, phases=self._phases, source=self._source, held={})

    @abstractmethod
    def new_core(self) -> Core:
        """The worker at the start of the run."""

    @abstractmethod
    def needs(self, event: Entered | OrderEvent) -> list[Key]:
        """The messages that an event needs."""

    @abstractmethod
    def sends(self, event: Entered | OrderEvent) -> list[Key]:
        """The messages that an event brings."""

    @abstractmethod
    def trained(self, event: Any) -> None:
        """A local phase has ended."""

    @abstractmethod
    def exchange(self, event: Any) -> Iterable[tuple[str, int]]:
        """Processes an event other than training; returns the received message and its sender."""


class _Gossip(_Process[GossipWorker]):
    kinds = (Published, Mixed)

    def __init__(self, run: _Replayed, slot: int, life: OrderLife, later: Sequence[OrderLife], file: Path) -> None:
        super().__init__(run, slot, life, later, file)
        assert isinstance(run.run.method, Method)
        self._method, self._own = run.run.method, dict[int, Tree]()
        # A published message depends on the peers, which are in the following mix event.
        self._alive = {event.number: event.alive for event in life.events if isinstance(event, Mixed)}

    def new_core(self) -> GossipWorker:
        return GossipWorker(self.slot, self._method.rule, self.replica, self._method.topology.mixing(0))

    def needs(self, event: Entered | OrderEvent) -> list[Key]:
        return [(j, life, version) for j, version, life in event.heard] if isinstance(event, Mixed) else []

    def sends(self, event: Entered | OrderEvent) -> list[Key]:
        return [(self.slot, self.life, event.number + 1)] if isinstance(event, Published) else []

    def trained(self, event: Published) -> None:
        number, (key,) = event.number, self.sends(event)
        message = self.core.message(number, self._mixing(number))
        self._own[number] = self._replayed.messages.keep(key, self.replica, message, number)

    def exchange(self, event: Mixed | Finished) -> Iterable[tuple[str, int]]:
        if isinstance(event, Finished):
            return []
        number, peers = event.number, [j for j, _, _ in event.heard]
        mixing = self._mixing(number)
        known = mixing.receives_from(self.slot)
        if not {*peers} <= {*known}:
            raise Contradiction(f"after phase {number} it heard workers {sorted(peers)}, and {known} were its peers")
        # A mix depends on the versions of the peers' messages and the workers of the topology, not on the order of
        # arrival, as messages are summed in the order of the mixing matrix.
        received = {key[0]: self._replayed.messages.take(key) for key in self.needs(event)}
        self.core.mix(number, self._own.pop(number), received, mixing)
        return [("fetch", j) for j in peers]

    def _mixing(self, number: int) -> Mixing:
        everyone = frozenset(range(self._replayed.run.workers))
        alive = self._alive.get(number)
        alive = everyone if alive is None else alive
        if not {self.slot} <= alive <= everyone:
            raise Contradiction(
                f"workers {sorted(alive)} were alive in its phase {number}, of {len(everyone)} and itself among them"
            )
        return self._method.topology.mixing(number, alive)


class _PairReplay(_Process[PairWorker]):
    kinds = (Learned, MeetingSent, Met)

    def new_core(self) -> PairWorker:
        assert isinstance(self._replayed.run.method, InPairs)
        return PairWorker(pair_rule_of(self._replayed.run.method), self.replica)

    def missing(self, event: Entered | OrderEvent) -> Missing | None:
        """See `Actor`."""
        if isinstance(event, MeetingSent | Met) and (
            event.peer == self.slot or event.starter not in (self.slot, event.peer)
        ):
            raise Contradiction(f"it has a meeting with worker {event.peer} that worker {event.starter} started")
        return super().missing(event)

    def needs(self, event: Entered | OrderEvent) -> list[Key]:
        """Both messages of a meeting, this worker's own first."""
        return [(self.slot, *event[1:4]), (event.peer, *event[1:4])] if isinstance(event, Met) else []

    def sends(self, event: Entered | OrderEvent) -> list[Key]:
        return [(self.slot, *event[1:4])] if isinstance(event, MeetingSent) else []

    def trained(self, event: Learned) -> None:
        # The drift is added to the parameters as changed by meetings since the phase began. Time advances first, as in
        # every event: momentum mixes with exactly the recorded seconds.
        self.core.advance(event.dt)
        self.core.learn()
        self.core.begin()

    def exchange(self, event: MeetingSent | Met | Finished) -> Iterable[tuple[str, int]]:
        self.core.advance(event.dt)
        if isinstance(event, Finished):
            return []
        if isinstance(event, MeetingSent):
            # The message is of this moment: phases that end between it and the meeting only count in the latter.
            (key,) = self.sends(event)
            self._replayed.messages.keep(key, self.replica, self.core.tell(), event.number, event.starter)
            return []
        sent, received = map(self._replayed.messages.take, self.needs(event))
        assert isinstance(sent, Tensor) and isinstance(received, Tensor)
        self.core.meet(sent, received)
        return [("meet", event.peer)]
