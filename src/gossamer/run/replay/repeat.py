"""All workers of a recorded run in one process again, round by round, with the bits that they had.

What they do is the same code as everywhere. Messages pass through the mailboxes of a simulation, except that those arrive which
the log of outcomes counts, and no others.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.errors import DataError
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.logs.outcomes import Begun, Followed
from gossamer.record.packed import cold, packed, unpacked
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.exchange import Each
from gossamer.run.config.resolved import RunSettings
from gossamer.run.replay.script import Message, Script
from gossamer.run.simulated.rounds import crew, train_together
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import Task
from gossamer.run.worker.worker import RoundReport, Worker
from gossamer.transport.contract import Ticket, Transport
from gossamer.transport.memory import MemoryNetwork, MemoryTransport

__all__ = ["Repeat"]

log = logging.getLogger("gossamer")


class Repeat:
    """The workers of a recorded run, at its start.

    Args:
        like: a vector of parameters of the task's model.
        logged: whether the script tells which messages counted; all do otherwise.
    Raises: ConfigError unless the workers start alike.
    """

    def __init__(
        self, config: RunSettings, task: Task, m: Method, script: Script, like: Tensor, *, logged: bool
    ) -> None:  # fmt: skip
        config = config.unpaced()
        self._config, self._task, self._method, self._like = config, task, m, like
        self._script, self._closes, self._logged = script, m.rule.needs == "everyone", logged
        self._network = MemoryNetwork(config.workers)
        self._lives = [_Life(self._network.transport(i), script) for i in range(config.workers)]
        transports: Sequence[Transport] = (
            self._lives if logged else [self._network.transport(i) for i in range(config.workers)]
        )
        self.workers = crew(config, task, m, like, lambda i: transports[i])
        for worker, life in zip(self.workers, self._lives, strict=True):
            if logged:
                life.lead(worker)
        self._kept: dict[tuple[int, int], bytes] = {}
        self._needed = script.taken_over()
        self._warmed: dict[tuple[int, Begun], bytes] = {}
        """The states with which ghosts began, by slot."""
        for worker in self.workers:
            self._keep(worker, 0)

    def restore(self, folder: Path, round: int, line: Lineage) -> None:
        """Goes to the start of a round, with the checkpoints that were written before it. Raises: CheckpointError."""
        store = folder / "checkpoints"
        self._needed = self._script.taken_over(round)
        for slot, after in self._needed:
            if 0 < after <= round:
                self._kept[slot, after] = _packed(checkpoint.load(store, after, slot, line))
        for slot in sorted(self._script.running(round)):
            self._lives[slot].number = self._script.life_at(slot, round)
            self.workers[slot].restore(checkpoint.load(store, round, slot, line))

    def advance(self, round: int, each: Each) -> list[tuple[Worker, RoundReport]]:
        """One round, after the states that are taken over before it; returns what those did that were there at its end.

        Raises: TrainingError; DataError where the log says that a worker had other inner steps behind it.
        """
        turn, replaced = self._script.turns[round], list[Worker]()
        for slot, several in turn.begins.items():
            for begun in several:
                life = self._lives[slot]
                if (slot, life.number) in turn.lost and life.begun != begun:
                    replaced.append(self.workers[slot])  # it has a part in the round too
                    self._replace(slot)
                self._take_over(slot, begun)
        there = set(turn.outcomes) | {slot for slot, k in turn.lost if self._lives[slot].number == k}
        workers = [*replaced, *(self.workers[slot] for slot in sorted(there))]
        reports = [*zip(workers, train_together(workers, round, each), strict=True)][len(replaced) :]
        present = [(worker, report) for worker, report in reports if worker.index in turn.outcomes]
        for slot in there - turn.outcomes.keys():
            self.workers[slot].hashes()
        for worker, _ in present:
            steps, said = worker.replica.steps_taken, turn.outcomes[worker.index].steps
            if self._logged and steps != said:
                raise _impossible(
                    f"worker {worker.index} has {said} inner steps behind it after round {round}, and {steps} follow from how it "
                    "began"
                )
            self._keep(worker, round + 1)
        return present

    def _replace(self, slot: int) -> None:
        """Lets another worker go on in a slot."""
        life = self._lives[slot] = _Life(self._network.transport(slot), self._script, self._lives[slot].number)
        self.workers[slot] = Worker(Replica(slot, self._config, self._task, self._like.device), self._method, life)
        life.lead(self.workers[slot])

    def _take_over(self, slot: int, begun: Begun) -> None:
        if begun.followed:
            self._replace(slot)  # its inner optimizer was cold
        worker, life, lives = self.workers[slot], self._lives[slot], self._script.lives[slot]
        life.number = next(k for k, one in enumerate(lives) if one.begun is begun)
        if life.number == 0 and (begun.after, begun.donor) == (0, slot):
            worker.replica.steps_taken = begun.steps
        else:
            for one in begun.followed:
                raw = self._taken(slot, one, begun)
                worker.rehearse(one.after, self._of(unpacked(raw), one))
            raw = self._taken(slot, begun, begun)
            worker.take_over(self._of(unpacked(raw), begun))
            if begun.followed:
                self._warmed[slot, begun] = _packed(worker.state())
        if begun.round:
            worker.loop.send_ahead(begun.round)

    def _taken(self, slot: int, one: Begun | Followed, begun: Begun) -> bytes:
        """The state that the process which began so in a slot took over, at last or as a ghost."""
        found = self._states(one.donor, one.after, frozenset({(slot, begun)}))
        if begun.followed:
            found = [cold(raw) for raw in found]
        if not found:
            raise _impossible(
                f"worker {slot} begins at round {begun.round} with the state of worker {one.donor} after {one.after} rounds, "
                "which that one never had"
            )
        named = [raw for raw in found if one.sha256 in ("", hashlib.sha256(raw).hexdigest())]
        if not named and not self._closes and "streams" not in self._task.data.state():
            log.warning(
                "worker %d began at round %d with a state of worker %d that hashes to %s, and here it is another: this is not "
                "what was computed then to the last bit; use the same processor and version of torch",
                slot, begun.round, one.donor, one.sha256[:12],
            )  # fmt: skip
        return [*named, *found][0]

    def _states(self, slot: int, after: int, asking: frozenset[tuple[int, Begun]]) -> list[bytes]:
        """The states that the worker in a slot has had after so many rounds: its own, and those that it took over."""
        found = [self._kept[slot, after]] if (slot, after) in self._kept else []
        for begun in [life.begun for life in self._script.lives.get(slot, ())]:
            if begun.after == after and begun.followed:
                found += [self._warmed[slot, begun]] if (slot, begun) in self._warmed else []
            elif begun.after == after and begun.donor != slot and (slot, begun) not in asking:
                theirs = self._states(begun.donor, after, asking | {(slot, begun)})
                found += [_packed(self._of(unpacked(raw), begun)) for raw in theirs]
        return found

    def _of(self, state: dict[str, Any], begun: Begun | Followed) -> dict[str, Any]:
        """A state with the place in the data of the slot that takes it over; the data of all workers is one object here."""
        return {**state, "data": self._task.data.state(), "steps_taken": begun.steps, "under_way": []}

    def _keep(self, worker: Worker, after: int) -> None:
        if (worker.index, after) in self._needed:
            self._kept[worker.index, after] = _packed(worker.state())


class _Life:
    """The transport of one process, for the messages that the script counts, and what else its log decides.

    Whether a message counts is known when it is sent, so that whoever receives it waits for those alone.
    """

    keeps_frames = True

    def __init__(self, inner: MemoryTransport, script: Script, number: int = 0) -> None:
        self.worker, self._inner, self._script = inner.worker, inner, script
        self.number = number
        """Which of the lives in its slot it is."""

    @property
    def begun(self) -> Begun | None:
        """How it began; None in a slot that nobody has filled."""
        lives = self._script.lives.get(self.worker, [])
        return lives[self.number].begun if lives else None

    def lead(self, worker: Worker) -> None:
        """Lets a worker take part as the log says."""
        alone = frozenset({self.worker})
        worker.loop.alive = lambda of, fragment: self._script.alive.get(
            ((self.worker, self.number), of, fragment), alone
        )
        worker.loop.next = lambda round: self._script.next.get(((self.worker, self.number), round))

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor]) -> None:
        """See `gossamer.transport.contract.Transport`."""
        if (Message(ticket.round, ticket.fragment, self.worker, peer), self.number) in self._script.heard:
            self._inner.expect(ticket, peer, like)

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """See `gossamer.transport.contract.Transport`."""
        if (Message(ticket.round, ticket.fragment, peer, self.worker), self.number) in self._script.sent:
            self._inner.post(ticket, peer, frames)

    def ready(self, ticket: Ticket) -> bool:
        """See `gossamer.transport.contract.Transport`."""
        return self._inner.ready(ticket)

    def wait(self, ticket: Ticket) -> None:
        """See `gossamer.transport.contract.Transport`."""
        self._inner.wait(ticket)

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """See `gossamer.transport.contract.Transport`."""
        return self._inner.collect(ticket)

    def close(self) -> None:
        """See `gossamer.transport.contract.Transport`."""
        self._inner.close()


def _packed(state: Mapping[str, Any]) -> bytes:
    """A state as a donor packs it, so that it has the same hash: where no rounds are closed, their hash is 0."""
    return packed({**state, "under_way": [], "line": 0})


def _impossible(why: str) -> DataError:
    return DataError(
        f"the log of outcomes contradicts itself: {why}; bring the files outcomes-*.jsonl of all workers together, as the run "
        "wrote them"
    )
