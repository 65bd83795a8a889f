"""Numbers that change over a run: a table by inner step, `{ 0 = 1, 2000 = 30 }`, or a shape, `{ shape = "cosine", to = 0.1 }`.

The inner steps are those of a worker that takes the full number of local steps, and the entry in force at the start of
a round applies to all of it.
"""

import functools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from gossamer.errors import ConfigError

ByStep = tuple[tuple[int, Any], ...]
SHAPES: Mapping[str, Mapping[str, bool]] = {
    "cosine": {"to": True, "from": False, "steps": False},
    "qsr": {"base": True, "alpha": True},
}
"""The keys of each shape, and whether it needs them."""


def changes(value: object) -> bool:
    """Whether a value of a run file is a table by inner step or a shape.

    >>> changes({"0": 1, "2000": 30}), changes({"shape": "cosine", "to": 0.1}), changes({"lr": 0.5}), changes(30)
    (True, True, False, False)
    """
    if not isinstance(value, Mapping) or not value or any(isinstance(one, Mapping) for one in value.values()):
        return False
    return "shape" in value or all(str(key).isdecimal() for key in value)


def as_written(value: Mapping[Any, Any]) -> dict[str, Any]:
    """A table or shape in the form of a run file, with text keys; a program may give inner steps as numbers."""
    return {str(key): tuple(one) if isinstance(one, list) else one for key, one in value.items()}


def entries(table: Mapping[Any, Any]) -> ByStep:
    """The entries of a table by inner step, ascending.

    >>> entries({"0": 1, "2000": [30, 15]})
    ((0, 1), (2000, (30, 15)))
    """
    return tuple(sorted((int(key), one) for key, one in as_written(table).items()))


def line(name: str, some: ByStep) -> str:
    """The line of a run file with these entries.

    >>> line("run.local_steps", ((0, 1), (2000, (30, 15))))
    'run.local_steps = { 0 = 1, 2000 = [30, 15] }'
    """
    each = (f"{step} = {list(one) if isinstance(one, tuple) else one}" for step, one in some)
    return f"{name} = {{ {', '.join(each)} }}"


def table_faults(name: str, value: Mapping[Any, Any], shape: str) -> Iterator[str]:
    """The structural faults of a mapping as a table by inner step or a shape; values are not checked."""
    if "shape" in value:
        keys = SHAPES[shape]
        missing = [key for key, needed in keys.items() if needed and key not in value]
        unknown = [str(key) for key in value if key != "shape" and key not in keys]
        if value["shape"] != shape or missing or unknown:
            needed = ", ".join(f"{key} = ..." for key, needed in keys.items() if needed)
            yield (
                f'{name} is {dict(value)!r:.80}; write {name} = {{ shape = "{shape}", {needed} }}, or a table by inner step such '
                f"as {name} = {{ 0 = ..., 2000 = ... }}"
            )
        return
    if not value or not all(str(key).isdecimal() for key in value):
        yield (
            f"{name} is {dict(value)!r:.80}; write a table by inner step such as {name} = {{ 0 = ..., 2000 = ... }}, or "
            f'{name} = {{ shape = "{shape}", ... }}'
        )
        return
    keys, some = [int(key) for key in value], entries(value)
    if any(a >= b for a, b in pairwise(keys)):
        yield f"{name} has the inner steps {', '.join(map(str, keys))}, which do not ascend; write {line(name, some)}"
    elif keys[0]:
        yield (
            f"{name} begins at inner step {keys[0]}, so that nothing is in force before it; write "
            f"{line(name, ((0, some[0][1]), *some))}"
        )


def beyond_faults(name: str, value: Mapping[Any, Any], steps: int) -> Iterator[str]:
    """A sentence for a table with entries beyond the end of a run of `steps` inner steps."""
    some = () if "shape" in value else entries(value)
    if (beyond := [step for step, _ in some if step >= steps]) and beyond != [0]:
        left = tuple(one for one in some if one[0] < steps)
        yield (
            f"{name} has an entry at inner step {beyond[0]}, and run.steps is {steps}, so that it never comes into force; write "
            f"{line(name, left)}, or raise run.steps"
        )


def in_force(value: Mapping[Any, Any], step: int, steps: int) -> float:
    """The value of a table or a cosine at inner step `step` of a run of `steps`.

    >>> in_force({"0": 0.4, "2000": 0.7}, 1999, 3000), in_force({"shape": "cosine", "from": 0.7, "to": 0.1}, 500, 1000)
    (0.4, 0.4)
    """
    if "shape" not in value:
        return [one for begin, one in entries(value) if begin <= step][-1]
    if step and not (steps := value.get("steps", steps)):
        raise ConfigError(
            f"{dict(value)!r:.80} is a shape over a training whose length is not known here; add steps = ... to it"
        )
    share = min(1.0, step / steps) if step else 0.0
    return value["to"] + (value["from"] - value["to"]) * (1 + math.cos(math.pi * share)) / 2


def change_steps(value: Mapping[Any, Any], steps: int) -> list[int]:
    """The inner steps at which a table changes; for a shape, 33 of them, spread evenly over the run."""
    if "shape" in value:
        return [(steps or value.get("steps", 0)) * k // 32 for k in range(33)]
    return [step for step, _ in entries(value)]


Steps = int | tuple[int, ...]
"""Local steps of a round: one number for all workers, or one for each."""


class EqualRounds(NamedTuple):
    """A stretch of consecutive rounds with the same local steps."""

    round: int
    step: int
    """Inner steps before its first round, for a worker that takes the full number."""
    local_steps: Steps

    @property
    def full_steps(self) -> int:
        """Inner steps of a round for the worker that takes most (H)."""
        return max(self.local_steps) if isinstance(self.local_steps, tuple) else self.local_steps

    def of(self, worker: int) -> int:
        """Inner steps of a round for one worker (H_i)."""
        return self.local_steps[worker] if isinstance(self.local_steps, tuple) else self.local_steps


class Timetable(NamedTuple):
    """The local steps of each round of a run: a pure function of the round, the same on every worker.

    >>> timetable = timetable_of(((0, 1), (3, (4, 2))), steps=11)
    >>> [(r, timetable.begin(r), timetable.at(r).full_steps, timetable.steps_before(1, r)) for r in range(timetable.rounds + 1)]
    [(0, 0, 1, 0), (1, 1, 1, 1), (2, 2, 1, 2), (3, 3, 4, 3), (4, 7, 4, 5), (5, 11, 4, 7)]
    """

    stretches: tuple[EqualRounds, ...]
    steps: int = 0
    """Inner steps of the whole run, for the worker that takes most; 0 where its end is not known."""

    @property
    def rounds(self) -> int:
        """Rounds of the run."""
        return self.rounds_within(self.steps)

    @property
    def changes(self) -> bool:
        """Whether not all rounds have the same local steps."""
        return len(self.stretches) > 1

    @property
    def words(self) -> str:
        """The local steps as text, for comparison between workers."""
        if not self.changes:
            return str(self.stretches[0].local_steps)
        return "; ".join(f"{one.local_steps} from inner step {one.step} on" for one in self.stretches)

    def rounds_within(self, steps: int) -> int:
        """The whole rounds within `steps` inner steps of a worker that takes the full number."""
        one = self.stretches[bisect_right(self.stretches, steps, key=operator.itemgetter(1)) - 1]
        return one.round + (steps - one.step) // one.full_steps

    def since(self, round: int) -> "Timetable":
        """The timetable of the rounds from this one on, which are numbered from zero."""
        first, step = self.at(round), self.begin(round)
        rest = (
            one._replace(round=one.round - round, step=one.step - step) for one in self.stretches if one.round > round
        )
        return Timetable((EqualRounds(0, 0, first.local_steps), *rest), max(0, self.steps - step))

    def at(self, round: int) -> EqualRounds:
        """The stretch that a round is in."""
        return self.stretches[bisect_right(self.stretches, round, key=operator.itemgetter(0)) - 1]

    def begin(self, round: int) -> int:
        """Inner steps before a round, of a worker that takes the full number."""
        one = self.at(round)
        return one.step + (round - one.round) * one.full_steps

    def progress(self, round: int, share: float) -> float:
        """Inner steps before this share of a round."""
        one = self.at(round)
        return one.step + (round - one.round + share) * one.full_steps

    def steps_before(self, worker: int, round: int) -> int:
        """Inner steps that one worker takes before a round."""
        return sum(rounds * one.of(worker) for one, rounds in self.rounds_per_stretch(round))

    def total_steps_before(self, workers: int, round: int) -> int:
        """Inner steps that all workers together take before a round."""
        each = self.rounds_per_stretch(round)
        return sum(r * (sum(h) if isinstance(h := one.local_steps, tuple) else workers * h) for one, r in each)

    def rounds_per_stretch(self, round: int) -> list[tuple[EqualRounds, int]]:
        """Each stretch that begins before a round, with the number of its rounds before it."""
        ends = [*(one.round for one in self.stretches[1:]), round]
        both = zip(self.stretches, ends, strict=True)
        return [(one, min(end, round) - one.round) for one, end in both if one.round < round]


def local_steps_entries(local_steps: Steps | Mapping[str, Any]) -> tuple[tuple[int, Steps], ...]:
    """The entries of `run.local_steps`; a single one for a plain number; not for a shape."""
    return entries(local_steps) if isinstance(local_steps, Mapping) else ((0, local_steps),)


def begun_alike(some: tuple[tuple[int, Steps], ...], synchronous_steps: int) -> tuple[tuple[int, Steps], ...]:
    """The entries of a run that begins with `synchronous_steps` steps of data parallelism.

    >>> begun_alike(((0, 5), (8, 9)), 3), begun_alike(((0, 5), (8, 9)), 8)
    (((0, 1), (3, 5), (8, 9)), ((0, 1), (8, 9)))
    """
    if not synchronous_steps:
        return some
    before = [one for step, one in some if step <= synchronous_steps]
    return ((0, 1), (synchronous_steps, before[-1]), *some[len(before) :])


class LearningRate(NamedTuple):
    """The inner learning rate, as in `[inner]` of a run file."""

    lr: float
    schedule: str
    warmup_steps: int
    min_lr_ratio: float
    decay_fraction: float

    def scale(self, progress: float, steps: int) -> float:
        """The share of `lr` at a (fractional) inner step of a run of `steps`, see `gossamer.optimizers.inner.lr_scale`."""
        w, m = self.warmup_steps, self.min_lr_ratio
        warmup = min(1.0, (progress + 1) / w) if w else 1.0
        if self.schedule == "cosine" and steps > w:
            u = _unit((progress - w) / (steps - w))
            return warmup * (m + (1 - m) * (1 + math.cos(math.pi * u)) / 2)
        if self.schedule == "wsd":
            decay_steps = self.decay_fraction * steps
            u = _unit((progress - (steps - decay_steps)) / decay_steps)
            return warmup * (1 - (1 - m) * u)
        return warmup


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))


@functools.lru_cache
def quadratic(base: int, alpha: float, inner: LearningRate, steps: int, begin: int = 0) -> Timetable:
    """The timetable of the quadratic synchronization rule: rounds grow as the inner learning rate decreases.

    H_t = max(H_base, floor((α / η_t)²)) for a round that begins at inner step t with the learning rate η_t. During
    warm-up the peak rate counts; the last round is cut at the end of the run.

    Args: `begin` are the steps of a synchronous start, each of which is a round.
    Cost: O(rounds). Source: arXiv 2310.14423, with its warm-up.

    >>> inner = LearningRate(0.1, "cosine", 2, 0.1, 0.2)
    >>> [(one.step, one.local_steps) for one in quadratic(2, 0.2, inner, 40).stretches]
    [(0, 4), (12, 5), (17, 8), (25, 15)]
    """
    stretches = [EqualRounds(0, 0, 1)] if begin else []
    round = step = begin
    while step < steps:
        eta = inner.lr * inner.scale(max(step, inner.warmup_steps), steps)
        most = steps - step
        local_steps = min(most, max(base, math.floor((alpha / eta) ** 2) if eta * math.sqrt(most) > alpha else most))
        if not stretches or stretches[-1].local_steps != local_steps:
            stretches.append(EqualRounds(round, step, local_steps))
        round, step = round + 1, step + local_steps
    return Timetable(tuple(stretches), steps)


@functools.lru_cache
def timetable_of(entries: tuple[tuple[int, Steps], ...], steps: int = 0) -> Timetable:
    """The timetable of a table of local steps by inner step, in which the entry at the start of a round applies to all of it."""
    stretches = [EqualRounds(0, 0, entries[0][1])]
    for begin, local_steps in entries[1:]:
        last = stretches[-1]
        rounds = max(0, -(-(begin - last.step) // last.full_steps))
        here = EqualRounds(last.round + rounds, last.step + rounds * last.full_steps, local_steps)
        if rounds == 0:
            stretches.pop()  # no round begins under this entry
        if not stretches or stretches[-1].local_steps != local_steps:
            stretches.append(here)
    return Timetable(tuple(stretches), steps)
