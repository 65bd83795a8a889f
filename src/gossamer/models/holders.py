"""Which workers hold which experts of a mixture: a pure function of the settings, which needs no communication."""

import re
from typing import NamedTuple

from gossamer.errors import ConfigError
from gossamer.models.sizes import ExpertsConfig

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Holders(NamedTuple):
    """The parts in which parameters are exchanged, and the holders of each."""

    parts: tuple[frozenset[int], ...]
    """The workers that hold each part: all, for everything but the experts, then each set of workers with experts in common."""
    part_of: tuple[int, ...]
    """The part of each expert."""

    def part(self, name: str) -> int:
        """The part of the tensor with this name."""
        match = _EXPERT.search(name)
        return 0 if match is None else self.part_of[int(match[1])]

    def resident(self, worker: int) -> tuple[int, ...]:
        """The experts that a worker holds."""
        return tuple(e for e, p in enumerate(self.part_of) if worker in self.parts[p])


def holders_of(experts: ExpertsConfig | None, workers: int) -> Holders | None:
    """The holders of each expert, assigned round-robin: `holders(e) = {(e O + j) mod M : j < O}`.

    Returns: None without `model.experts.holders`, where every worker holds all parameters.
    Raises: ConfigError as `must_deal`.

    >>> made = holders_of(ExpertsConfig(count=4, holders=2), 4)
    >>> [sorted(part) for part in made.parts], made.part_of, made.resident(3)
    ([[0, 1, 2, 3], [0, 1], [2, 3]], (1, 2, 1, 2), (1, 3))
    """
    must_deal(experts, workers)
    if experts is None or experts.holders is None:
        return None
    copies = experts.holders
    held = [frozenset((e * copies + j) % workers for j in range(copies)) for e in range(experts.count)]
    sets = [*dict.fromkeys(held)]
    return Holders((frozenset(range(workers)), *sets), tuple(1 + sets.index(of_expert) for of_expert in held))


def must_deal(experts: ExpertsConfig | None, workers: int) -> None:
    """Raises ConfigError unless all workers can hold equally many experts."""
    if experts is None or experts.holders is None:
        return
    count, copies = experts.count, experts.holders
    if copies > workers:
        raise ConfigError(
            f"model.experts.holders is {copies} and the run has {workers} workers; take at most one copy for each worker"
        )
    if count * copies % workers:
        raise ConfigError(
            f"model.experts has {count} experts with {copies} holders each, and {workers} workers do not divide these "
            f"{count * copies} copies; change count, holders or workers so that count * holders is a multiple of workers"
        )
