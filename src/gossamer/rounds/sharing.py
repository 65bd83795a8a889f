"""The assignment of slots to workers while some are dead, so that the global batch stays the same.

Each slot has separate batches, one for each inner step. With `data.constant_batch` the workers alive share all slots:
worker i takes the mean gradient over the slots S_i that it trains, and the mean of a round weighs worker i by their
number,

    mean = Σ_i |S_i| message_i / Σ_i |S_i|.

The assignment depends only on the participants of the means of earlier rounds, which all workers agree on: so no
message is needed, and each slot's steps count exactly once, whatever each worker's membership view.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from gossamer.topologies.mixing import Mixing


@lru_cache(maxsize=64)
def shares(slots: int, present: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The slots that each worker trains, ascending: its own, and a share of those of absent workers.

    The latter are assigned in ascending order, each to the worker with the fewest slots; ties go to the lowest number.

    >>> shares(5, frozenset({0, 2, 3}))
    ((0, 1), (), (2, 4), (3,), ())
    """
    taken = {worker: [worker] for worker in sorted(present)}
    for slot in sorted(set(range(slots)) - present if present else ()):
        min(taken.values(), key=len).append(slot)
    return tuple(tuple(sorted(taken.get(worker, ()))) for worker in range(slots))


class Sharing(NamedTuple):
    """The assignment of slots in one round, the same on all workers with that round's parameters."""

    present: frozenset[int]
    """The participants of the last mean of the previous round: they share all slots."""
    before: tuple[int, ...]
    """Inner steps of each slot included in the mean at the start of the round."""
    steps: tuple[int, ...]
    """The same, updated during the round."""
    last: frozenset[int]
    """The participants of the last mean."""

    def begun(self) -> "Sharing":
        """The sharing at the start of the next round."""
        return Sharing(self.last, self.steps, self.steps, self.last)

    def slots_of(self, worker: int) -> tuple[int, ...]:
        """The slots that a worker trains and is counted for in this round; none for a newcomer whose slot another
        worker trains.
        """
        return shares(len(self.steps), self.present)[worker]

    def places(self, worker: int) -> dict[int, int]:
        """The slots whose batches a worker trains on, each with its next inner step.

        A newcomer that is not counted trains on its own slot, to warm up its inner optimizer.
        """
        return {slot: self.before[slot] for slot in self.slots_of(worker) or (worker,)}

    def weighed(self, mixing: Mixing, workers: Collection[int] | None) -> Mixing:
        """The mixing of a mean over these workers, None for all, by how many slots each has trained.

        Unchanged where all have trained equally many. A worker that is not counted stays in the rows, with weight zero.
        """
        members = range(mixing.n) if workers is None else sorted(workers)
        counts = {worker: len(self.slots_of(worker)) for worker in members}
        total = sum(counts.values())
        if len(set(counts.values())) == 1 or total == 0:
            return mixing
        row = tuple((worker, count / total) for worker, count in counts.items())
        return mixing._replace(rows=tuple(row if i in counts else own for i, own in enumerate(mixing.rows)))

    def closed(self, workers: Collection[int] | None, taken: int) -> "Sharing":
        """The sharing after a mean over these workers (None for all), with the inner steps each had taken in the round.

        The steps of any other worker are discarded: the worker that trains its slots next repeats them.
        """
        last = frozenset(range(len(self.steps)) if workers is None else workers)
        steps = list(self.steps)
        for slot in (slot for worker in last for slot in self.slots_of(worker)):
            steps[slot] = self.before[slot] + taken
        return self._replace(steps=tuple(steps), last=last)

    def state(self) -> list[list[int]]:
        """The state for a checkpoint at the end of a round."""
        return [sorted(self.last), list(self.steps)]

    def restored(self, state: object) -> "Sharing":
        """A state restored from a checkpoint or another worker. Raises: ValueError for an invalid state."""
        match state:
            case [[*last], [*steps]] if (
                len(steps) == len(self.steps)
                and last
                and all(type(slot) is int and 0 <= slot < len(steps) for slot in last)
                and all(type(step) is int and 0 <= step < 1 << 62 for step in steps)
            ):
                return Sharing(frozenset(last), tuple(steps), tuple(steps), frozenset(last))
        raise ValueError(f"the slots were shared as {state!r:.60}")


def first_sharing(slots: int) -> Sharing:
    """The sharing at the start of a run: each worker trains its own slot."""
    everyone, none = frozenset(range(slots)), (0,) * slots
    return Sharing(everyone, none, none, everyone)
