"""Who trains on which slots of a round while some workers are dead, so that the global batch stays the same.

Each slot has batches of its own, one for each inner step. With `data.constant_batch` the workers that are there share all slots:
worker i takes the mean gradient over the slots S_i that it trains, and the mean of a round weighs worker i by their number,

    mean = Σ_i |S_i| message_i / Σ_i |S_i|.

Everything follows from the workers over whom the means of earlier rounds were taken, on which all of them agreed: so no message
is needed, and a slot's steps are part of the mean once, whatever each worker believes of the others.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from gossamer.topologies.mixing import Mixing


@lru_cache(maxsize=64)
def shares(slots: int, present: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The slots that each worker trains, ascending: its own, and some of those whose workers are not present.

    Of the latter each goes, in ascending order, to who has fewest slots; among those, to the lowest number.

    >>> shares(5, frozenset({0, 2, 3}))
    ((0, 1), (), (2, 4), (3,), ())
    """
    taken = {worker: [worker] for worker in sorted(present)}
    for slot in sorted(set(range(slots)) - present if present else ()):
        min(taken.values(), key=len).append(slot)
    return tuple(tuple(sorted(taken.get(worker, ()))) for worker in range(slots))


class Sharing(NamedTuple):
    """How the slots are shared in one round, as all workers know it whose parameters are those of that round."""

    present: frozenset[int]
    """Over whom the last mean of the round before was taken: they share all slots."""
    before: tuple[int, ...]
    """Inner steps of each slot that were part of the mean when the round began."""
    steps: tuple[int, ...]
    """The same by now."""
    last: frozenset[int]
    """Over whom the last mean was taken."""

    def begun(self) -> "Sharing":
        """At the start of the next round."""
        return Sharing(self.last, self.steps, self.steps, self.last)

    def slots_of(self, worker: int) -> tuple[int, ...]:
        """The slots that a worker trains in this round and counts for; none of a newcomer whose slot another one trains."""
        return shares(len(self.steps), self.present)[worker]

    def places(self, worker: int) -> dict[int, int]:
        """The slots whose batches a worker trains on, each with its next inner step.

        A newcomer who counts for none trains on those of its own slot, in order to warm its inner optimizer.
        """
        return {slot: self.before[slot] for slot in self.slots_of(worker) or (worker,)}

    def weighed(self, mixing: Mixing, workers: Collection[int] | None) -> Mixing:
        """The mixing of a mean over these workers, None for all, by how many slots each has trained.

        Unchanged where all have trained as many. Who counts for none stays in the rows, with weight zero.
        """
        members = range(mixing.n) if workers is None else sorted(workers)
        counts = {worker: len(self.slots_of(worker)) for worker in members}
        total = sum(counts.values())
        if len(set(counts.values())) == 1 or total == 0:
            return mixing
        row = tuple((worker, count / total) for worker, count in counts.items())
        return mixing._replace(rows=tuple(row if i in counts else own for i, own in enumerate(mixing.rows)))

    def closed(self, workers: Collection[int] | None, taken: int) -> "Sharing":
        """After a mean over these workers, None for all, who had each taken so many inner steps of the round.

        Those of a worker that is not among them are part of nothing: they are taken again by whoever trains its slots next.
        """
        last = frozenset(range(len(self.steps)) if workers is None else workers)
        steps = list(self.steps)
        for slot in (slot for worker in last for slot in self.slots_of(worker)):
            steps[slot] = self.before[slot] + taken
        return self._replace(steps=tuple(steps), last=last)

    def state(self) -> list[list[int]]:
        """What a checkpoint keeps at the end of a round."""
        return [sorted(self.last), list(self.steps)]

    def restored(self, state: object) -> "Sharing":
        """That of a checkpoint, or of another worker. Raises: ValueError for what is no such state."""
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
    """That of the start of a run: each worker trains its own slot."""
    everyone, none = frozenset(range(slots)), (0,) * slots
    return Sharing(everyone, none, none, everyone)
