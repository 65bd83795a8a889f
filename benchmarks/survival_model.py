"""How much of its time a run with failures trains for good: what counts of an elastic run, and both kinds of run in virtual time.

A failure ends whatever process its machine has, also one that starts, and the machine starts another at once.
"""

import heapq
import math
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gossamer.record.logs.outcomes import Begun, Life, RoundOutcome
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import method_of
from gossamer.run.replay.script import script_of
from gossamer.topologies import Topology
from gossamer.topologies.mixing import without


class Setting(NamedTuple):
    """What a run is like, in seconds."""

    round_s: float
    restart_s: float
    """From a failure until the process that follows trains."""
    lasts_s: float
    """After which the run is looked at."""
    noticed_s: float = 0.5
    """From a death until those that wait for the dead go on."""


class Failure(NamedTuple):
    """A machine loses its process."""

    at_s: float
    machine: int


class Counted(NamedTuple):
    """What counts of a run, in rounds of one worker."""

    useful: int
    """Those whose steps are in the final mean with any weight."""
    by_weight: float
    """The same, each with its weight in the final mean over the 1/n that it has without failures, at most one."""


def draw_failures(machines: int, mtbf_s: float, lasts_s: float, seed: str) -> list[Failure]:
    """The failures of all machines, each a Poisson process, in the order of time."""
    if mtbf_s == math.inf:
        return []
    draw, found = random.Random(seed), list[Failure]()
    for machine in range(machines):
        at_s = draw.expovariate(1 / mtbf_s)
        while at_s < lasts_s:
            found.append(Failure(at_s, machine))
            at_s += draw.expovariate(1 / mtbf_s)
    return sorted(found)


def counted(lives: Mapping[int, Sequence[Life]], topology: Topology, alive: Collection[int]) -> Counted:
    """What counts of an elastic run, from its log of outcomes; `alive` are the slots whose workers are there at its end.

    The parameters of each worker are its start and weighted sums of all local phases; exchanges and newcomers mix these weights.
    """
    ends = [life.rounds[-1].round + 1 if life.rounds else life.begun.round for some in lives.values() for life in some]
    n, rounds = topology.n, max(ends, default=0)
    if not alive or not rounds:
        return Counted(0, 0.0)
    script = script_of(lives, method_of(Combination(topology=topology)), rounds + 1, seed=0, recorded=Path())
    held, kept = np.zeros((n, n * rounds)), dict[tuple[int, int], np.ndarray]()
    needed = script.taken_over()

    def state(slot: int, after: int) -> np.ndarray | float:
        if after == 0 or (slot, after) in kept:
            return kept[slot, after] if after else 0.0
        # It has taken this state over itself and not trained since.
        donor = next(
            life.begun.donor for life in lives[slot] if life.begun.after == after != 0 and life.begun.donor != slot
        )
        return state(donor, after)

    begins: dict[int, list[tuple[int, Begun]]] = {}
    for slot, some in script.lives.items():
        for life in some:
            begins.setdefault(life.begun.round, []).append((slot, life.begun))
    for round in sorted(script.turns.keys() | begins.keys()):
        for slot, begun in begins.get(round, ()):
            held[slot] = state(begun.donor, begun.after)
        if (turn := script.turns.get(round)) is None:  # whoever began there was lost before its first round ended
            continue
        sent = held.copy()
        for slot in turn.outcomes.keys() | {slot for slot, _ in turn.lost}:
            sent[slot, round * n + slot] = 1.0
        for slot, outcome in turn.outcomes.items():
            row = without(topology.mixing(round, outcome.alive).rows[slot], slot, outcome.lost)
            held[slot] = sum(w * sent[j] for j, w in row)
            if (slot, round + 1) in needed:
                kept[slot, round + 1] = held[slot].copy()
    mean = held[sorted(alive)].mean(0)
    return Counted(int((mean > 0).sum()), float(np.minimum(1.0, n * mean).sum()))


class _Slot:
    """A machine of an elastic run in virtual time."""

    def __init__(self, number: int) -> None:
        self.since: int | None = 0
        """The first round that it takes part in; None while its process starts."""
        self.after = 0
        """Rounds behind its state."""
        self.generation = 0
        self.lives = [Life(Begun(0, 0, number, 0, 0), (), None)]


def elastic_run(
    setting: Setting, failures: Sequence[Failure], topology: Topology
) -> tuple[dict[int, list[Life]], set[int]]:
    """An elastic run in virtual time: its log of outcomes, and the slots alive at its end.

    All rounds take the same time. A worker that dies misses its exchange, and who waits for it goes on when it has noticed. A
    newcomer takes the state of the lowest slot alive and takes part from the next round on; when nobody lives, nobody joins.
    """
    slots = [_Slot(i) for i in range(topology.n)]
    events = [(at_s, machine, -1) for at_s, machine in failures]
    heapq.heapify(events)
    began_s, round = 0.0, 0
    while began_s < setting.lasts_s:
        ends_s = min(began_s + setting.round_s, setting.lasts_s)
        taking = [i for i, slot in enumerate(slots) if slot.since is not None and slot.since <= round]
        died: set[int] = set()
        late_s = ends_s
        while events and events[0][0] < ends_s:
            at_s, number, generation = heapq.heappop(events)
            slot = slots[number]
            if generation < 0:  # a failure; what was starting is void
                died |= {number} & set(taking)
                slot.since, slot.generation = None, slot.generation + 1
                heapq.heappush(events, (at_s + setting.restart_s, number, slot.generation))
                late_s = max(late_s, at_s + setting.noticed_s)
            elif generation == slot.generation:
                donors = [i for i, one in enumerate(slots) if one.since is not None]
                if donors:
                    slot.since, slot.after = round + 1, slots[donors[0]].after
                    begun = Begun(round + 1, slot.after, donors[0], 0, len(slot.lives))
                    slot.lives.append(Life(begun, (), None))
        if began_s + setting.round_s > setting.lasts_s:
            break
        alive = None if len(taking) == topology.n else frozenset(taking)
        mixing = topology.mixing(round, alive) if taking else None
        for i in {*taking} - died:
            assert mixing is not None
            missed = frozenset(mixing.receives_from(i)) & died
            slot, outcome = slots[i], RoundOutcome(round, alive, missed, frozenset(), 0)
            slot.lives[-1] = slot.lives[-1]._replace(rounds=(*slot.lives[-1].rounds, outcome))
            slot.after = round + 1
        began_s, round = late_s, round + 1
    return {i: slot.lives for i, slot in enumerate(slots)}, {i for i, s in enumerate(slots) if s.since is not None}


def restarting_run(setting: Setting, failures: Sequence[Failure], every: int = 1, checkpoint_s: float = 0.0) -> int:
    """The rounds that a run has behind it at its end which restarts everybody from the last checkpoint at each failure.

    Args: it writes a checkpoint in `checkpoint_s` after `every` rounds.
    """
    saved, began_s = 0, 0.0

    def rounds(time_s: float) -> int:
        """Trained in a time without failures."""
        cycle_s = every * setting.round_s + checkpoint_s
        whole = math.floor(time_s / cycle_s)
        return whole * every + min(every, math.floor((time_s - whole * cycle_s) / setting.round_s))

    for at_s, _ in failures:
        if at_s > began_s:
            saved += rounds(at_s - began_s) // every * every
        began_s = at_s + setting.restart_s
    return saved + (rounds(setting.lasts_s - began_s) if setting.lasts_s > began_s else 0)
