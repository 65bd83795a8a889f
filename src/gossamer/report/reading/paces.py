"""Detection of workers that have become slower than before, a more common failure of machines than stopping."""

import statistics
from collections import defaultdict, deque

_TIMES, _ROUNDS, _BEFORE = 2.0, 3, 5
"""A worker counts as slow if it took `_TIMES` its usual seconds in `_ROUNDS` rounds, after `_BEFORE` earlier ones."""
_REMEMBERED = 64
"""Rounds in the median."""
_SILENT_S = 10.0


def is_silent(age_s: float, round_s: float) -> bool:
    """Whether a worker that trains is called silent, as it has written nothing for 10 s, or for five of its rounds if that is
    longer.
    """
    return age_s > max(_SILENT_S, 5 * round_s)


class Paces:
    """The seconds of an inner step of each worker, round by round.

    >>> paces = Paces()
    >>> [paces.slowed(0, 1.0) for _ in range(5)], [paces.slowed(0, step_s) for step_s in (3.0, 2.0, 2.5, 2.5, 1.0)]
    ([None, None, None, None, None], [None, None, 2.0, None, None])
    """

    def __init__(self) -> None:
        self._usual: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._slow: dict[int, list[float]] = defaultdict(list)

    def slowed(self, worker: int, step_s: float) -> float | None:
        """Adds the seconds of a worker's step in its next round.

        Returns: in the round in which a worker begins to count as slow, the smallest slowdown factor; else None.
        """
        usual, slow = self._usual[worker], self._slow[worker]
        if len(usual) < _BEFORE or step_s < _TIMES * statistics.median(usual):
            usual.extend([*slow, step_s] if len(slow) < _ROUNDS else [step_s])
            slow.clear()
            return None
        slow.append(step_s)
        return min(slow) / statistics.median(usual) if len(slow) == _ROUNDS else None

    def now(self, worker: int) -> float | None:
        """The smallest slowdown factor of a slow worker; None for one that is not."""
        slow = self._slow[worker]
        return min(slow[-_ROUNDS:]) / statistics.median(self._usual[worker]) if len(slow) >= _ROUNDS else None
