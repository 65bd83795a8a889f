"""The workers of a recorded run in rounds, repeated in one process, bit for bit.

Workers run the same code as elsewhere. Messages pass through the mailboxes of a simulation, filtered to those that the
log of outcomes counts. There are two kinds of events: the begin of a process in a slot, with its own or another
worker's state, and a round, which all present workers train together.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.record import checkpoint
from gossamer.record.lineage import Lineage
from gossamer.record.logs.outcomes import OUTCOMES, Begun
from gossamer.record.machines import Threads
from gossamer.record.packed import packed, unpacked
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.exchange import Each
from gossamer.rounds.loop import EVERYONE, Membership
from gossamer.run.replay.driver import Actor, Missing, contradiction, follow
from gossamer.run.replay.script import Message, Script
from gossamer.run.replay.stretches import Stretch, stretch_of
from gossamer.run.simulated.rounds import make_workers, train_together
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import Task, task_of
from gossamer.run.worker.worker import RoundReport, Worker
from gossamer.transport.contract import Sound, Ticket, Transport
from gossamer.transport.memory import MemoryNetwork, MemoryTransport

log = logging.getLogger("gossamer")

Reports = list[tuple[Worker, RoundReport]]
_NEVER = 1 << 31


class Repeat:
    """The workers of a recorded run, at its start.

    Args:
        some: the settings of its rounds.
        recorded: its folder.
        threads: those of its workers.
        like: a vector of parameters of the task's model.
        logged: whether the script has the counted messages; otherwise all count.
    Raises: ConfigError unless the workers start alike, and where only some rounds are in the log.
    """

    def __init__(
        self,
        some: Sequence[Stretch],
        task: Task,
        script: Script,
        recorded: Path,
        like: Tensor,
        *,
        logged: bool,
        threads: Threads,
    ) -> None:
        self._threads, self._stretches = threads, some
        self.script, self.recorded, self._like, self._logged, self._given = script, recorded, like, logged, task
        changed = next((one for one in some if one.run.loop.elastic != some[0].run.loop.elastic), None)
        if logged and changed is not None:
            raise ConfigError(
                f"run.elastic changed after round {changed.first} of '{recorded}', and its log of outcomes has only the rounds "
                "in which it was true; only a run that was elastic from its start to its end can be computed again from that log"
            )
        self.begins: Sequence[_BeginActor] = ()
        self.trained: _TrainingActor
        self._slots = range(some[0].run.workers)
        self._processes = [_Process(slot, script) for slot in self._slots]
        self._kept = defaultdict[tuple[int, int], list[bytes]](list)
        """By slot and completed rounds: the states taken over by others."""
        self._needed, self._replaced = script.taken_over(), list[Worker]()
        begun = [life.begun for lives in script.lives.values() for life in lives]
        self._shared: dict[int, list[Tensor]] = {one.round: [] for one in begun if self._adds_means(one)}
        """By round in which a process begins with an older state and later means: the state shared by all workers then."""
        self._begin_stretch(stretch_of(0, some))
        for worker in self.workers:
            self._keep(worker, 0)

    def restore(self, folder: Path, round: int, lineage: Lineage) -> None:
        """Restores the start of a round from the checkpoints before it. Raises: CheckpointError."""
        store = folder / "checkpoints"
        if (there := stretch_of(round, self._stretches)) is not self.stretch:
            self._begin_stretch(there)
        self._needed = self.script.taken_over(round)
        for slot, after in self._needed:
            if 0 < after <= round:
                self._kept[slot, after] = [_packed(checkpoint.load(store, after, slot, lineage))]
        for slot in sorted(self.script.running(round)):
            self._processes[slot].number = self.script.life_at(slot, round)
            self.workers[slot].restore(checkpoint.load(store, round, slot, lineage))
            self._share(round, self.workers[slot])

    def rounds(self, each: Each, first: int = 0, last: int = _NEVER) -> Iterator[tuple[int, Reports]]:
        """Trains the rounds from `first` to `last`; yields after each the reports of the workers present at its end.

        Raises: TrainingError; DataError for a log that contradicts itself.
        """
        span = range(first, last + 1)
        self.begins = [_BeginActor(self, slot, span) for slot in sorted(self.script.lives)]
        self.trained = _TrainingActor(self, span, each)
        for actor, round in follow([*self.begins, self.trained]):
            if actor is self.trained:
                yield round, self.trained.reports

    def begin(self, slot: int, begun: Begun) -> None:
        """Begins a process in a slot."""
        self._reach(begun.round)
        process = self._processes[slot]
        if (slot, process.number) in self.script.turns[begun.round].lost and process.begun != begun:
            self._replaced.append(self.workers[slot])  # it takes part in the round too
            self._replace(slot)
        self._take_over(slot, begun)

    def _adds_means(self, begun: Begun) -> bool:
        """Whether a process has added the means of rounds to the state with which it begins, as in a store."""
        everyone = self._stretches[0].run.in_rounds.rule.needs == "everyone"
        return self._logged and everyone and begun.after < begun.round

    def _share(self, round: int, worker: Worker) -> None:
        """Keeps the state shared by all workers before a round, if a process begins with it."""
        if round in self._shared:
            self._shared[round] = [tensor.clone() for tensor in worker.loop.shared]

    def train(self, round: int, each: Each) -> Reports:
        """Trains one round of all present workers; returns the reports of those present at its end."""
        self._reach(round)
        turn, replaced = self.script.turns[round], self._replaced
        there = set(turn.outcomes) | {slot for slot, k in turn.lost if self._processes[slot].number == k}
        for slot in there:
            self._take_threads(slot, round)
        workers = [*replaced, *(self.workers[slot] for slot in sorted(there))]
        reports = [*zip(workers, train_together(workers, round, each), strict=True)][len(replaced) :]
        present = [(worker, report) for worker, report in reports if worker.index in turn.outcomes]
        self._replaced = []
        for slot in there - turn.outcomes.keys():
            self.workers[slot].hashes()
        for worker, _ in present:
            steps, logged_steps = worker.replica.steps_taken, turn.outcomes[worker.index].steps
            if self._logged and steps != logged_steps:
                raise contradiction(
                    OUTCOMES.path(self.recorded, worker.index),
                    f"worker {worker.index}",
                    f"round {round}",
                    f"it has {logged_steps} inner steps behind it, and {steps} follow from how it began",
                )
            self._keep(worker, round + 1)
            self._share(round + 1, worker)
        return present

    def _take_threads(self, slot: int, round: int) -> None:
        """Sets the worker's intra-op threads to its process's, or to this round's without a log of processes."""
        begun = self._processes[slot].begun if self._logged else None
        since = round if begun is None else begun.round
        self.workers[slot].replica.threads = self._threads.at(slot, since)

    def candidates(self, begun: Begun) -> tuple[list[bytes], bool]:
        """The donor's states after a number of rounds, and whether any matches the recorded hash.

        The choice affects results: a worker that took over another's state had two after the same round.
        """
        kept = self._kept.get((begun.donor, begun.after), [])
        named = [raw for raw in kept if begun.sha256 in ("", hashlib.sha256(raw).hexdigest())]
        return [*named, *kept], bool(named)

    def _reach(self, round: int) -> None:
        """Switches to the settings of a round, keeping the workers' states.

        A resumed run continues from the checkpoints of the previous round, which hold exactly these states, including
        messages in flight except for elastic workers.
        """
        there = stretch_of(round, self._stretches)
        if there is not self.stretch:
            states = [worker.state() for worker in self.workers]
            self._begin_stretch(there)
            for worker, state in zip(self.workers, states, strict=True):
                worker.restore({**state, "under_way": []} if self._logged else state)

    def _replace(self, slot: int) -> None:
        """Replaces the worker of a slot."""
        process = self._processes[slot] = _Process(slot, self.script, self._processes[slot].number)
        process.over(self._network.transport(slot))
        replica = Replica(slot, self.stretch.run.unpaced(), self._task, self._like.device)
        self.workers[slot] = Worker(replica, self._method, process, membership=process.membership())

    def _take_over(self, slot: int, begun: Begun) -> None:
        """Begins a process in a slot with the state of a worker."""
        worker, process, lives = self.workers[slot], self._processes[slot], self.script.lives[slot]
        process.number = next(k for k, one in enumerate(lives) if one.begun is begun)
        if self.script.is_first(slot, begun):
            worker.replica.steps_taken = begun.steps
        else:
            self._take_threads(slot, begun.round)
            worker.take_over(self._taken(slot, begun))
            if not self._adds_means(begun):
                self._keep(worker, begun.after)
        if self._adds_means(begun):
            for target, shared in zip(worker.loop.shared, self._shared[begun.round], strict=True):
                target.copy_(shared)
            worker.replica.recompute()
        if begun.round:
            worker.loop.send_ahead(begun.round)

    def _begin_stretch(self, there: Stretch) -> None:
        """Creates all workers with the settings of a stretch, as at the start of a run."""
        self.stretch, run = there, there.run.unpaced()
        # An optimizer of the user may take its options from the settings.
        self._task = self._given if there is self._stretches[-1] else task_of(there.run)
        self._method: Method = run.in_rounds
        self._network = MemoryNetwork(run.workers)
        plain = [self._network.transport(slot) for slot in self._slots]
        for process, inner in zip(self._processes, plain, strict=True):
            process.over(inner)
        transports: Sequence[Transport] = self._processes if self._logged else plain
        membership = [one.membership() if self._logged else EVERYONE for one in self._processes]
        self.workers = make_workers(
            run,
            self._task,
            self._method,
            self._like,
            transports.__getitem__,
            membership=membership.__getitem__,
        )

    def _taken(self, slot: int, begun: Begun) -> dict[str, Any]:
        """The state taken over by a process on this begin event."""
        (raw, *_), named = self.candidates(begun)
        closes, streams = self._method.rule.needs == "everyone", "streams" in self._task.data.state()
        if not named and not closes and not streams:  # their states contain data not repeated here
            log.warning(
                "worker %d began at round %d with a state of worker %d that hashes to %s, and here it is another: this is not "
                "what was computed then to the last bit; use the same processor and version of torch",
                slot,
                begun.round,
                begun.donor,
                begun.sha256[:12],
            )
        # The position in the data is the slot's; here all workers share one data object.
        return {**unpacked(raw), "data": self._task.data.state(), "steps_taken": begun.steps, "under_way": []}

    def _keep(self, worker: Worker, after: int) -> None:
        if (worker.index, after) in self._needed:
            self._kept[worker.index, after].append(_packed(worker.state()))


class _BeginActor(Actor[Begun]):
    """The begin events of a slot, in order."""

    def __init__(self, repeat: Repeat, slot: int, span: range) -> None:
        begun = [life.begun for life in repeat.script.lives[slot] if life.begun.round in span]
        super().__init__(slot, f"worker {slot}", OUTCOMES.path(repeat.recorded, slot), begun)
        self._repeat, self._slot = repeat, slot

    def named(self, event: Begun) -> str:
        """See `Actor`."""
        return f"round {event.round}"

    def missing(self, event: Begun) -> Missing | None:
        """See `Actor`."""
        repeat = self._repeat
        if event.round > repeat.trained.next:
            return Missing("the rounds before have not been trained", repeat.trained.key)
        if repeat.script.is_first(self._slot, event):
            return None
        states, named = repeat.candidates(event)
        # The donor may have taken over a state after the same round: then it has two, and the later one is meant.
        donor = next((other for other in repeat.begins if other.key == event.donor and other is not self), None)
        comes = donor is not None and bool(donor.left) and donor.left[0].round == event.round
        if states and (named or not comes):
            return None
        return Missing(
            f"it begins with the state of worker {event.donor} after {event.after} rounds, which that one never had",
            event.donor if comes else None,
        )

    def take(self, event: Begun) -> None:
        """See `Actor`."""
        self._repeat.begin(self._slot, event)


class _TrainingActor(Actor[int]):
    """The rounds of a run, which all present workers train together."""

    def __init__(self, repeat: Repeat, span: range, each: Each) -> None:
        rounds = sorted(round for round in repeat.script.turns if round in span)
        super().__init__("rounds", "all workers", repeat.recorded / "outcomes-*.jsonl", rounds)
        self._repeat, self._each = repeat, each
        self.reports: Reports = []
        """The reports of the last round."""

    @property
    def next(self) -> int:
        """The next round."""
        return self.left[0] if self.left else -1

    def named(self, event: int) -> str:
        """See `Actor`."""
        return f"round {event}"

    def missing(self, event: int) -> Missing | None:
        """See `Actor`."""
        late = next((one for one in self._repeat.begins if one.left and one.left[0].round <= event), None)
        return None if late is None else Missing(f"{late.who} begins there and cannot", late.key)

    def take(self, event: int) -> None:
        """See `Actor`."""
        self.reports = self._repeat.train(event, self._each)


class _Process:
    """The transport of one process, restricted to counted messages, and further decisions of its log.

    Whether a message counts is known when it is sent, so that receivers wait only for counted ones.
    """

    keeps_frames = True

    def __init__(self, slot: int, script: Script, number: int = 0) -> None:
        self.worker, self._script, self.number = slot, script, number
        """The worker, the script, and the index of the process's life in its slot."""

    def over(self, inner: MemoryTransport) -> None:
        """Sends and receives by mailboxes of a simulation from now on."""
        self._inner = inner
        self.ready, self.wait, self.collect, self.close = inner.ready, inner.wait, inner.collect, inner.close

    @property
    def begun(self) -> Begun | None:
        """Its begin event; None for an empty slot."""
        lives = self._script.lives.get(self.worker, [])
        return lives[self.number].begun if lives else None

    def membership(self) -> Membership:
        """The participants of each round, from its log."""
        script, alone = self._script, frozenset({self.worker})
        # The participants in its view determine the weights of a mix, even for messages that did not count.
        return Membership(
            lambda of, part: script.alive.get(((self.worker, self.number), of, part), alone),
            lambda round: script.next.get(((self.worker, self.number), round)),
        )

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        """See `gossamer.transport.contract.Transport`."""
        if (Message(ticket.round, ticket.fragment, self.worker, peer), self.number) in self._script.received:
            self._inner.expect(ticket, peer, like)

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """See `gossamer.transport.contract.Transport`."""
        if (Message(ticket.round, ticket.fragment, peer, self.worker), self.number) in self._script.sent:
            self._inner.post(ticket, peer, frames)


def _packed(state: Mapping[str, Any]) -> bytes:
    """A state packed as by the donor, for the same hash: without closed rounds, their hash is 0."""
    return packed({**state, "under_way": [], "line": 0})
