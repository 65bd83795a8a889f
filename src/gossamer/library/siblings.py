"""The other processes of one worker: all of them take an outer update, or none does."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import PeerError, first_line
from gossamer.library.lane import Lane, outer_store
from gossamer.transport.processes.backend import gloo_group

__all__ = ["Siblings"]


class Siblings:
    """What the processes of one worker decide together, over connections of their own; a worker of one process decides alone.

    Args:
        lane: of this process.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, lane: Lane, timeout_s: float) -> None:
        self._lane, self._group = lane, None
        if lane.shards > 1:
            # Not the user's own group: what we wait for there would come between the collectives of the training.
            self._group = gloo_group(
                PrefixStore(f"siblings/{lane.start}", outer_store(lane.within)), lane.shard, lane.shards, timeout_s
            )

    @contextlib.contextmanager
    def all_or_none(self, what: str, *numbers: int) -> Iterator[None]:
        """Raises on all processes of the worker when what runs inside has failed on one, or `numbers` are not the same on all.

        Without it one shard of a model takes an update when its sibling, whose own peer is gone, does not: the model tears.
        Raises: what was raised inside; PeerError when it was raised by another.
        Cost: one all-reduce of a few numbers inside the worker.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        fewest, *ends = self._least([int(failure is None), *numbers, *(-number for number in numbers)])
        if failure is not None:
            raise failure
        if not fewest:
            raise PeerError(
                f"{what} failed in another process of worker {self._lane.worker}, so that none of its {self._lane.shards} "
                "processes has taken it; look at their logs"
            )
        half = len(numbers)
        if [*ends[:half]] != [-end for end in ends[half:]]:
            raise PeerError(
                f"the processes of worker {self._lane.worker} are at different places in {what}, this one at {[*numbers]}; let "
                "all take the same steps, and load the states that were saved together"
            )

    def fewest(self, mine: int) -> int:
        """The least of what the processes of the worker have."""
        return self._least([mine])[0]

    def close(self) -> None:
        """Ends the connections. A second call does nothing."""
        self._group = None

    def _least(self, numbers: list[int]) -> list[int]:
        if self._group is None:
            return numbers
        least = torch.tensor(numbers)
        try:
            self._group.allreduce(least, dist.ReduceOp.MIN).wait()
        except RuntimeError as error:
            raise PeerError(
                f"another process of worker {self._lane.worker} is gone, or did not come in time ({first_line(error)}); look at "
                f"the logs of its {self._lane.shards} processes"
            ) from error
        return least.tolist()
