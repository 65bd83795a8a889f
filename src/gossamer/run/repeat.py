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
from gossamer.record.outcomes import Begun
from gossamer.record.packed import packed, unpacked
from gossamer.rounds.exchange import Each
from gossamer.rounds.method import Method
from gossamer.run.config import RunConfig
from gossamer.run.script import Script
from gossamer.run.synchronous import crew, train_together
from gossamer.run.task import Task
from gossamer.run.worker import RoundReport, Worker
from gossamer.transport import Ticket, Transport
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
        self, config: RunConfig, task: Task, m: Method, script: Script, like: Tensor, *, logged: bool
    ) -> None:  # fmt: skip
        self._task, self._script, self._closes, self._logged = task, script, m.rule.needs == "everyone", logged
        network = MemoryNetwork(config.workers)
        self._transports = [_LoggedTransport(network.transport(i), script) for i in range(config.workers)]
        transports: Sequence[Transport] = (
            self._transports if logged else [network.transport(i) for i in range(config.workers)]
        )
        self.workers = crew(config, task, m, like, lambda i: transports[i])
        self._alive: dict[int, frozenset[int] | None] = {}
        for worker in self.workers if logged else ():
            worker.loop.alive = lambda round, slot=worker.index: self._alive.get(slot)
        self._kept: dict[tuple[int, int], bytes] = {}
        self._needed = script.taken_over()
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
            self.workers[slot].restore(checkpoint.load(store, round, slot, line))

    def advance(self, round: int, each: Each) -> list[tuple[Worker, RoundReport]]:
        """One round, after the states that are taken over before it; returns what those did that were there at its end.

        Raises: TrainingError; DataError where the log says that a worker had other inner steps behind it.
        """
        turn = self._script.turns[round]
        if not self._closes:
            for slot in turn.lost:
                self._lose(self.workers[slot], round)
        # Where a round is closed over all, those that were lost in it take part to its end, and are succeeded afterwards.
        after = turn.lost.keys() - turn.outcomes.keys() if self._closes else set[int]()
        self._begin({slot: several for slot, several in turn.begins.items() if slot not in after})
        self._alive = {slot: outcome.alive for slot, outcome in turn.outcomes.items()}
        self._alive |= {slot: turn.lost[slot] for slot in after}
        workers = [self.workers[slot] for slot in sorted(self._alive)]
        reports = zip(workers, train_together(workers, round, each), strict=True)
        present = [(worker, report) for worker, report in reports if worker.index in turn.outcomes]
        for slot in after:
            self.workers[slot].hashes()
        self._begin({slot: several for slot, several in turn.begins.items() if slot in after})
        for worker, _ in present:
            steps, said = worker.replica.steps_taken, turn.outcomes[worker.index].steps
            if self._logged and steps != said:
                raise _impossible(
                    f"worker {worker.index} has {said} inner steps behind it after round {round}, and {steps} follow from how it "
                    "began"
                )
            self._keep(worker, round + 1)
        return present

    def _begin(self, begins: Mapping[int, Sequence[Begun]]) -> None:
        for slot, several in begins.items():
            for begun in several:
                self._take_over(slot, begun)

    def _lose(self, worker: Worker, round: int) -> None:
        """The round of a worker that is killed after it has sent: what it hears no longer matters."""
        transport = self._transports[worker.index]
        transport.lost, self._alive[worker.index] = True, self._script.turns[round].lost[worker.index]
        for segment in worker.segments(round):
            worker.train(segment)
            worker.send(segment)
        worker.loop.under_way.clear()
        worker.hashes()
        transport.lost = False

    def _take_over(self, slot: int, begun: Begun) -> None:
        worker = self.workers[slot]
        if begun == self._script.lives[slot][0].begun and (begun.after, begun.donor) == (0, slot):
            worker.replica.steps_taken = begun.steps
            return
        found = self._states(begun.donor, begun.after, frozenset({(slot, begun)}))
        if not found:
            raise _impossible(
                f"worker {slot} begins at round {begun.round} with the state of worker {begun.donor} after {begun.after} rounds, "
                "which that one never had"
            )
        named = [raw for raw in found if begun.sha256 in ("", hashlib.sha256(raw).hexdigest())]
        if not named and not self._closes and "streams" not in self._task.data.state():
            log.warning(
                "worker %d began at round %d with a state of worker %d that hashes to %s, and here it is another: this is not "
                "what was computed then to the last bit; use the same processor and version of torch",
                slot, begun.round, begun.donor, begun.sha256[:12],
            )  # fmt: skip
        worker.restore(self._of(unpacked([*named, *found][0]), begun))

    def _states(self, slot: int, after: int, asking: frozenset[tuple[int, Begun]]) -> list[bytes]:
        """The states that the worker in a slot has had after so many rounds: its own, and those that it took over."""
        found = [self._kept[slot, after]] if (slot, after) in self._kept else []
        for begun, _, _ in self._script.lives.get(slot, ()):
            if begun.after == after and begun.donor != slot and (slot, begun) not in asking:
                theirs = self._states(begun.donor, after, asking | {(slot, begun)})
                found += [_packed(self._of(unpacked(raw), begun)) for raw in theirs]
        return found

    def _of(self, state: dict[str, Any], begun: Begun) -> dict[str, Any]:
        """A state with the place in the data of the slot that takes it over; the data of all workers is one object here."""
        return {**state, "data": self._task.data.state(), "steps_taken": begun.steps}

    def _keep(self, worker: Worker, after: int) -> None:
        if (worker.index, after) in self._needed:
            self._kept[worker.index, after] = _packed(worker.state())


class _LoggedTransport:
    """The transport of one worker, for the messages that the script counts.

    Whether a message counts is known when it is sent, so that whoever receives it waits for those alone.
    """

    keeps_frames = True

    def __init__(self, inner: MemoryTransport, script: Script) -> None:
        self.worker, self._inner, self._script = inner.worker, inner, script
        self.lost = False
        """Whether the worker is one that is killed in this round after it has sent."""

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor]) -> None:
        """See `gossamer.transport.Transport`."""
        turn, pair = self._script.turns[ticket.round], (self.worker, peer)
        if not self.lost and (pair in turn.heard or pair in turn.heard_of_lost):
            self._inner.expect(ticket, peer, like)

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """See `gossamer.transport.Transport`."""
        turn = self._script.turns[ticket.round]
        if (peer, self.worker) in (turn.heard_of_lost if self.lost else turn.heard):
            self._inner.post(ticket, peer, frames)

    def ready(self, ticket: Ticket) -> bool:
        """See `gossamer.transport.Transport`."""
        return self._inner.ready(ticket)

    def wait(self, ticket: Ticket) -> None:
        """See `gossamer.transport.Transport`."""
        self._inner.wait(ticket)

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """See `gossamer.transport.Transport`."""
        return self._inner.collect(ticket)

    def close(self) -> None:
        """See `gossamer.transport.Transport`."""
        self._inner.close()


def _packed(state: Mapping[str, Any]) -> bytes:
    """A state as a donor packs it, so that it has the same hash: where no rounds are closed, their hash is 0."""
    return packed({**state, "line": 0})


def _impossible(why: str) -> DataError:
    return DataError(
        f"the log of outcomes contradicts itself: {why}; bring the files outcomes-*.jsonl of all workers together, as the run "
        "wrote them"
    )
