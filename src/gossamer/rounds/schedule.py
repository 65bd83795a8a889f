"""The schedule of exchanges: a pure function of the round, the same on every worker.

A round is H inner steps. The parameters are cut into P fragments; fragment p is sent after step (p + 1)·H/P of each round and
received `overlap_steps` inner steps later. One fragment without overlap is the plain round; several fragments that overlap with
training are Streaming DiLoCo, or streaming anything.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from gossamer.settings.options import Count, NotNegative, Number, Portion
from gossamer.settings.schema import settings


class Stop(NamedTuple):
    """A point of a round at which a worker exchanges with its peers: it first sends, then receives.

    There are two stops at one step where a fragment must be received before it is sent again.
    """

    step: int
    """Inner steps of the round before this stop, for the worker with the most steps."""
    sends: tuple[int, ...]
    """Fragments sent at this stop; where they are chosen (`Schedule.sends`), the positions of these sends in the round."""
    receives: tuple[tuple[int, int], ...]
    """Fragments received at this stop, each with its age in rounds."""

    def after(self, local_steps: int, full_steps: int) -> int:
        """Inner steps of the round before this stop for a worker that takes `local_steps` instead of `full_steps`.

        All workers are at the same stop after the same share of their round, so they have the same exchanges in flight.

        >>> [Stop(step, (), ()).after(local_steps=5, full_steps=15) for step in (5, 10, 15)]
        [1, 3, 5]
        """
        return self.step * local_steps // full_steps


@settings("schedule")
class Schedule:
    """The division of a round into fragments, and their overlap with training."""

    fragments: Count = 1
    """Parts of the model that are exchanged one after the other (P)."""
    pattern: Literal["strided", "sequential"] = "strided"
    """Which layers make a fragment: every P-th, or neighbours."""
    overlap_steps: Number = 0
    """Inner steps between sending a fragment and applying its update (τ), for the worker with the most steps; at most a round."""
    merge: Literal["keep", "taylor"] | Portion = "keep"
    """How a worker applies an outer update to its parameters x: "keep" adds it to x, so that nothing trained since the send
    is lost (the delta rule); a number a in [0, 1] sets x to a·x + (1 - a)·(outer result), the α of Streaming DiLoCo; "taylor"
    keeps too, and corrects what was trained since for where the update has moved to, as in CoCoDC."""
    merge_strength: NotNegative = 0.5
    """Length of the correction of "taylor" for each tensor, as a multiple of what was trained since (λ); 0 is "keep"."""
    sends: Number = 0
    """Sends in a round, each of the fragment whose outer value changes fastest, as in CoCoDC (N): at least as many as there are
    fragments, of which two or more, and at most one an inner step. 0 sends each fragment once a round, in turn. CoCoDC's N is
    max(fragments, 0.4 H · seconds of an inner step / seconds of a transfer), which uses spare bandwidth."""
    inner_every: tuple[Number, ...] = ()
    """Rounds between two averagings of the inner optimizer's first and second moments, as in DES-LOC; 0 for never, and ()
    leaves them to each worker alone."""

    def __post_init__(self) -> Iterator[str]:
        if self.inner_every and len(self.inner_every) != 2:
            yield (
                f"schedule.inner_every is {list(self.inner_every)}; give two numbers of rounds, for the first and the second "
                "moments of the inner optimizer, 0 for never"
            )
        if self.sends and (not 2 <= self.fragments <= self.sends or self.inner_every):
            yield (
                f"schedule.sends is {self.sends} with schedule.fragments = {self.fragments} and schedule.inner_every = "
                f"{list(self.inner_every)}; give at least two fragments, as many sends or more, and no inner_every"
            )
        if self.merge != "taylor" and self.merge_strength != 0.5:
            yield (
                f"schedule.merge_strength is {self.merge_strength:g} and schedule.merge is {self.merge!r}, which has none; set "
                "schedule.merge = 'taylor', or remove schedule.merge_strength"
            )

    @property
    def plain(self) -> bool:
        """Whether a round is its local phase and then one exchange of everything, without overlap."""
        return self == Schedule()

    @property
    def slots(self) -> int:
        """The number of sends in a round."""
        return self.sends or self.fragments

    def hidden(self, full_steps: int) -> float:
        """The share of a round's inner steps during which a fragment is in flight, if transfers do not overlap."""
        return min(1.0, self.slots * self.overlap_steps / full_steps)

    def stops(
        self, round: int, full_steps: int, delay_rounds: int = 0, *, ahead: bool = False, updates: bool = False
    ) -> tuple[Stop, ...]:
        """The stops of a round of `full_steps` inner steps, in their order; the last is its end.

        Args:
            delay_rounds: how many rounds late the rule receives messages, as in `Rule.delay_rounds`.
            ahead: whether it sends after it has received, as in `Rule.sends_ahead`.
            updates: whether the updates of each fragment are mixed first, as in `Rule.mixes_updates`; their numbers follow all
                others.

        >>> for stop in Schedule(fragments=2, overlap_steps=1).stops(3, full_steps=6): print(stop)
        Stop(step=1, sends=(), receives=((1, 1),))
        Stop(step=3, sends=(0,), receives=())
        Stop(step=4, sends=(), receives=((0, 0),))
        Stop(step=6, sends=(1,), receives=())
        """
        sends: dict[tuple[int, bool], list[int]] = {}
        receives: dict[tuple[int, bool], list[tuple[int, int]]] = {}

        def exchange(fragment: int, sent: int, late: int, first: bool = False) -> None:
            lag, before = divmod(sent + late - 1, full_steps)
            sends.setdefault((sent, not first), []).append(fragment)
            # Only a rule with delayed messages sends again before it has received the previous exchange.
            first = first or (late > 0 and before + 1 == sent and (ahead or not delay_rounds))
            receives.setdefault((before + 1, not first), []).append((fragment, lag))

        for p in range(self.slots):
            sent = (p + 1) * full_steps // self.slots
            if updates:
                exchange(self.fragments + len(self.inner_every) + p, sent, 0, first=True)
            exchange(p, sent, self.overlap_steps + delay_rounds * full_steps)
        for k, every in enumerate(self.inner_every):
            if every and (round + 1) % every == 0:
                exchange(self.fragments + k, full_steps, 0)
        stops = []
        for step, again in sorted(sends.keys() | receives.keys()):
            received = receives.get((step, again), [])
            if again:
                # Exchanges are received in the order sent: no worker waits for a message that depends on one it has not
                # sent yet.
                received = sorted(received, key=lambda fragment: -fragment[1])
            stops.append(Stop(step, tuple(sends.get((step, again), ())), tuple(received)))
        return tuple(stops)
