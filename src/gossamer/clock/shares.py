"""How a global server shares the inner steps of a run out to real regions, without input or output."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Grant", "Shares"]


class Grant(NamedTuple):
    """What a region may begin, and where the run is."""

    steps: int
    """Inner steps that it has been granted since it joined."""
    more: bool
    """Whether there may be more."""
    elsewhere: int
    """Inner steps of the run that others have reported, and this region before it joined."""


class Shares:
    """The inner steps of a run, shared out to the servers of regions, a few at a time.

    A region has been granted what it has begun and `ahead[region]` steps, unless fewer are left: of those it gets its part, so
    that the regions end at about the same time. What a region that is lost has not reported goes back to the others.

    Args:
        steps: of all workers together; a region exceeds its last grant by less than a local phase.
        ahead: of each region.
        phase: the most steps of a local phase.
        earlier: steps that were reported before this process of the global server.
    """

    def __init__(self, steps: int, ahead: Sequence[int], phase: int, *, earlier: int = 0) -> None:
        self.steps, self._ahead, self._phase, self._earlier = steps, ahead, phase, earlier
        self._granted, self._reported = [0] * len(ahead), [0] * len(ahead)
        self._present = [False] * len(ahead)

    @property
    def reported(self) -> int:
        """Steps that have been reported."""
        return self._earlier + sum(self._reported)

    @property
    def present(self) -> int:
        """The number of regions that are present."""
        return sum(self._present)

    @property
    def over(self) -> bool:
        """Whether all steps have been taken, and reported."""
        return self.present == 0 and self.reported >= self.steps

    def join(self, region: int) -> Grant:
        """A region joins, anew if it was there before."""
        self.leave(region)
        self._present[region] = True
        return self.grant(region, 0)

    def leave(self, region: int) -> None:
        """A region is gone: it has reported everything, or the rest is lost."""
        self._earlier += self._reported[region]
        self._granted[region] = self._reported[region] = 0
        self._present[region] = False

    def report(self, region: int, steps: int) -> None:
        """A region has reported so many steps since it joined."""
        self._reported[region] = steps

    def grant(self, region: int, begun: int) -> Grant:
        """What a region has been granted now that it has begun so many steps."""
        left = self._left()
        if left > 0:
            part = self._phase * -(-left // (len(self._ahead) * self._phase))
            wanted = begun + self._ahead[region] - self._granted[region]
            self._granted[region] += max(0, min(wanted, part, left))
        return Grant(self._granted[region], self._left() > 0, self.reported - self._reported[region])

    def _left(self) -> int:
        """Steps that no region has been granted."""
        begun = (max(granted, reported) for granted, reported in zip(self._granted, self._reported, strict=True))
        return self.steps - self._earlier - sum(begun)
