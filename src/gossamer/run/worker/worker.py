"""A worker of a run in rounds: a replica, its outer loop, and its pacer. All drivers of rounds use it."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import CheckpointError, DataError, first_line
from gossamer.finite import all_finite
from gossamer.layout import Layout
from gossamer.network.pacing import PaceNote, Pacer, first_leg_bytes
from gossamer.record.fault import FaultKind
from gossamer.record.logs.trace import Operation
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.loop import EVERYONE, Membership, OuterLoop
from gossamer.rounds.schedule import Stop
from gossamer.rounds.setup import Setup
from gossamer.rounds.sharing import first_sharing
from gossamer.rounds.together import Together
from gossamer.run.worker.numerics import using_threads
from gossamer.run.worker.replica import MISFITS, LocalPhase, Replica, merged_phases
from gossamer.transport.contract import Reduce, Transport
from gossamer.tree import leaves, must_fit


def parts_of(
    x: Tensor, layout: Layout, spans: Sequence[tuple[int, int]], averaged: Tensor | None, moments: Sequence[Tensor]
) -> list[tuple[Tensor, Layout]]:
    """The exchanged parts of a worker, for `OuterLoop`: the fragments of x, or average and iterate together, and moments."""
    if averaged is None:
        parts = [(x[a:b], layout.slice(a, b)) for a, b in spans]
    else:  # mixing only the parameters would separate them from these two
        n = layout.numel
        again = (leaf._replace(start=leaf.start + n, stop=leaf.stop + n) for leaf in layout.leaves)
        parts = [(averaged, Layout((*layout.leaves, *again), 2 * n))]
    return [*parts, *((each, layout) for each in moments)]


def _no_op() -> None:
    """A no-op callback after an inner step or a stop."""


class Segment(NamedTuple):
    """The part of a round that ends at a stop: inner steps, then sends and receives."""

    round: int
    stop: Stop
    first: int
    last: int


class RoundReport(NamedTuple):
    """A worker's report on a round: training before each stop, and traffic at it."""

    phases: list[LocalPhase]
    operations: list[list[Operation]]

    @property
    def whole(self) -> LocalPhase:
        """All inner steps of the round."""
        return merged_phases(self.phases)


class Worker:
    """A replica that takes part in rounds. It starts with the initial outer state of a run.

    Args: `reduce`, `together`, `membership` and `sides` as in `OuterLoop`.
    """

    def __init__(
        self,
        replica: Replica,
        m: Method,
        transport: Transport,
        reduce: Reduce | None = None,
        together: Together | None = None,
        membership: Membership = EVERYONE,
        sides: Callable[[Setup], Setup] | None = None,
    ) -> None:
        self.replica, self.run, self.index = replica, replica.run, replica.index
        self._method, self._transport = m, transport
        self._reduce, self._together, self._membership, self._sides = reduce, together, membership, sides
        self.loop = self._looped(m.start or m)
        self.pacer: Pacer | None = None
        """Decides on the local steps of the next round, where they adapt."""
        if self.run.loop.adapt:
            full_steps = self.run.full_steps
            hidden = 1.0 if m.rule.delay_rounds else m.schedule.hidden(full_steps)
            self.pacer = Pacer(self.index, replica.local_steps, full_steps, hidden)
        self._hashes: list[str] = []

    def _looped(self, m: Method) -> OuterLoop:
        """The exchanges of the method, or of its synchronous start, with their initial outer state."""
        replica = self.replica
        replica.gradient = None
        on_gradients = m.rule.site == "gradients"
        x = replica.keep_gradient(clips_own=m.rule.clips_own) if on_gradients else replica.x
        averaged = replica.averaged if m.rule.site == "parameters" else None
        moments = replica.moments if m.schedule.inner_every else None
        parts = parts_of(x, replica.layout, replica.spans, averaged, moments or ())
        return OuterLoop(
            m,
            self._transport,
            parts,
            local_steps=replica.local_steps,
            timetable=self.run.timetable,
            seed=self.run.seed,
            reduce=self._reduce,
            together=self._together,
            membership=self._membership,
            sharing=first_sharing(self.run.workers) if self.run.data.constant_batch else None,
            sides=self._sides,
            first=self.run.loop.synchronous_steps if m is self._method else 0,
            **(
                {}
                if replica.shards is None
                else {"shard": replica.shards.part, "over_shards": replica.shards.all_reduce_sum}
            ),
        )

    @property
    def _starts(self) -> bool:
        """Whether its synchronous start is still running."""
        return self.loop.method is not self._method

    def set_local_steps(self, local_steps: int) -> None:
        """The inner steps of each round from the next one on."""
        self.replica.local_steps = self.loop.local_steps = local_steps

    def begin_round(self, round: int) -> None:
        """Sets the method and the local steps of a round, unless they follow from the previous round."""
        if self._starts and round >= self.run.loop.synchronous_steps:
            self.loop = self._looped(self._method)
        if self.pacer is None:
            self.set_local_steps(self.loop.adapted(self.run.local_steps_of(self.index, round)))

    def segments(self, round: int) -> Iterator[Segment]:
        """The segments of a round, one for each stop."""
        self.begin_round(round)
        start = 0
        self.loop.begin_round(round)
        if self.loop.sharing is not None:
            self.replica.places = self.loop.sharing.places(self.index)
        for stop in self.loop.stops(round):
            end = stop.after(self.replica.local_steps, self.loop.full_steps)
            yield Segment(round, stop, start, end)
            start = end

    def train_round(self, round: int, after_stop: Callable[[], None] = _no_op) -> RoundReport:
        """One round: at each stop it sends and receives what is due.

        Args: `after_stop` is called after each stop, before any further send.
        """
        self.begin_round(round)
        loop, report = self.loop, RoundReport([], [])
        overlaps = self.run.schedule.overlap_steps or loop.method.rule.delay_rounds
        after_step = loop.advance if overlaps else _no_op
        for segment in self.segments(round):
            report.phases.append(self.train(segment, after_step))
            report.operations.append(self.send(segment))
            self.receive(segment)
            after_stop()
        self.replica.step_on_gradient(round)
        if round + 1 == self.run.rounds:
            self.receive_rest()
        return report

    def train(self, segment: Segment, after_step: Callable[[], None] = _no_op) -> LocalPhase:
        """Announces the exchanges at the stop of a segment, and takes the inner steps up to it."""
        self.loop.announce(segment.round, segment.stop)
        return self.replica.train(segment.round, segment.first, segment.last, after_step)

    def send(self, segment: Segment) -> list[Operation]:
        """Sends the fragments due at the stop of a segment."""
        if self.run.record.hash and segment.stop.sends:
            self._hashes.append(self._hash(segment.stop))
        with using_threads(self.replica.threads):
            return self.loop.post(segment.round, segment.stop)

    def hashes(self) -> list[str]:
        """A hash for each stop with sends since the last call, of the state right before sending.

        A worker that computes wrong results differs first there, before others are affected.
        """
        taken, self._hashes = self._hashes, []
        return taken

    def _hash(self, stop: Stop) -> str:
        replica, digest = self.replica, hashlib.sha256(str(self.replica.steps_taken).encode())
        parts = [self.loop.part(p) for p in stop.sends]
        trained = [] if replica.gradient is None else [replica.x]
        for t in [*trained, *(leaf for part in parts for leaf in (part.x, *leaves(part.s)))]:
            digest.update(t.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    def receive(self, segment: Segment) -> None:
        """Waits for the exchanges due at the stop of a segment, and makes its outer updates."""
        with using_threads(self.replica.threads):
            self.loop.receive(segment.round, segment.stop)
        self.replica.recompute()
        self._count_steps()

    def _count_steps(self) -> None:
        """With shared slots, the inner steps of this worker's slot are those in the mean, by any worker."""
        if self.loop.sharing is not None:
            self.replica.steps_taken = self.loop.sharing.steps[self.index]

    def receive_rest(self) -> None:
        """After the last round, finishes the exchanges in flight."""
        self.loop.end()
        self.replica.recompute()

    def pace_note(
        self, report: RoundReport, uplinks_bytes_per_s: Mapping[int, float], step_s: float | None = None
    ) -> PaceNote:
        """Updates the pacer with the seconds of a round, and returns the note for the others; `step_s` replaces the
        measured one.
        """
        assert self.pacer is not None
        phase = report.whole
        own_s = phase.compute_s / len(phase.losses) if step_s is None else step_s
        sent_bytes = first_leg_bytes(
            (operation for some in report.operations for operation in some), self.loop.owners_share
        )
        return self.pacer.measured(own_s, sent_bytes, uplinks_bytes_per_s)

    def adapt(self, notes: Mapping[int, PaceNote]) -> None:
        """Sets the local steps of the next round by the notes of all workers."""
        assert self.pacer is not None
        self.set_local_steps(self.pacer.decided(notes, self.run.workers))

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs to continue bit for bit: model, inner and outer state, data position.

        The state is that of the whole worker: all processes of a sharded one call it together.
        """
        sharing, shards = self.loop.sharing, self.replica.shards
        state = {
            "x": self.replica.evaluated,
            "outer": leaves(self.loop.state),
            "under_way": self.loop.state_in_flight(),
            "steps_taken": self.replica.steps_taken,
            "pace": None if self.pacer is None else self.pacer.state(),
            **({} if sharing is None else {"sharing": sharing.state()}),
            **self.replica.state(),
        }
        return state if shards is None else shards.whole(state)

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint. Raises CheckpointError when it does not fit this model or rule."""
        try:
            self._load(state, self.replica.restore)
        except DataError:  # it is the text that differs, and says so
            raise
        except MISFITS as error:
            raise CheckpointError(
                f"the checkpoint of worker {self.index} does not fit rule '{self.loop.method.rule.name}' and this model "
                f"({error}); "
                f"resume with the run file it was written by (digest {self.run.digest})"
            ) from None

    def _load(self, state: dict[str, Any], load_replica: Callable[[dict[str, Any]], None]) -> None:
        """Loads a state. Raises: one of MISFITS."""
        shards = self.replica.shards
        if self._starts and int(state["steps_taken"]) > self.run.loop.synchronous_steps:
            self.loop = self._looped(self._method)
        state = state if shards is None else shards.own(state)
        tensors, saved_tensors = [self.replica.evaluated, *leaves(self.loop.state)], [state["x"], *state["outer"]]
        must_fit(saved_tensors, tensors)
        sharing = self.loop.sharing
        sharing = None if sharing is None else sharing.restored(state["sharing"])
        for tensor, saved in zip(tensors, saved_tensors, strict=True):
            tensor.copy_(saved)
        if shards is not None:
            shards.flat.write()
        self.replica.steps_taken = int(state["steps_taken"])
        if self.pacer is not None:
            self.pacer.restore(state["pace"])
            self.set_local_steps(self.pacer.steps)
        load_replica(state)
        self.loop.reset_distrust_counts()
        self.loop.restore_in_flight(state["under_way"], sharing)
        self._count_steps()

    def must_be_of_another(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError, without changes, unless the received state of another worker can be taken over."""
        try:
            tensors = [state["x"], *state["outer"]]
            must_fit(tensors, [self.replica.evaluated, *leaves(self.loop.state)])
            if not all_finite(tuple(tensors)):
                raise ValueError("it has numbers that are not finite")
            self.replica.must_be_of_another(state)
            if self.loop.sharing is not None and max(self.loop.sharing.restored(state["sharing"]).steps) > (
                self.run.workers * self.run.loop.steps
            ):
                raise ValueError("it counts more inner steps than the run has")
        except MISFITS as error:
            raise _other_state(error) from None

    def take_over(self, state: dict[str, Any]) -> None:
        """Loads the state of another worker, except the errors that only that one sends. Raises: CheckpointError."""
        try:
            self._load(state, self.replica.load)
        except MISFITS as error:
            raise _other_state(error) from None
        self.loop.forget_unsent()


def _other_state(error: Exception) -> CheckpointError:
    """The error for an invalid state of another worker, as opposed to this worker's checkpoint."""
    reason = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
    return CheckpointError(
        f"the state of another worker does not fit this worker ({reason}); look at the machine that gave it, and start all with "
        "the same run file and gossamer",
        FaultKind.FOREIGN,
    )
