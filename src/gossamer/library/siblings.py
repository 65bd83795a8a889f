"""The other processes of one worker: all of them take an outer update, or none does."""

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import PeerError, first_line
from gossamer.library.lane import Lane, outer_store
from gossamer.transport.processes.backend import gloo_group

_WIDTH = 16
"""Numbers of one message in addition to those of each worker."""
_MOST = (1 << 63) - 1


class _Place(IntEnum):
    """The points at which the processes decide."""

    ALL_OR_NONE = 0
    FEWEST = 1
    FIRST = 2
    EACH = 3
    SUM = 4


class Siblings:
    """Common decisions of one worker's processes, over private connections; a worker of one process decides alone.

    Args:
        lane: of this process.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, lane: Lane, timeout_s: float) -> None:
        self._lane, self._group, self._width = lane, None, _WIDTH + max(lane.n, lane.shards)
        if lane.shards > 1:
            # Not the user's own group: waits there would interleave with the collectives of the training.
            store = PrefixStore(f"siblings/{lane.start}", outer_store(lane.within))
            try:
                self._group = gloo_group(store, lane.shard, lane.shards, timeout_s)
            except RuntimeError as error:
                raise PeerError(
                    f"a process of worker {lane.worker} could not connect to its {lane.shards - 1} others "
                    f"({first_line(error)}); look at their logs"
                ) from error

    @property
    def first(self) -> bool:
        """Whether this is the process that decides for the worker what one process must decide alone."""
        return self._lane.shard == 0

    @contextlib.contextmanager
    def all_or_none(self, operation: str, *numbers: int) -> Iterator[None]:
        """Raises on all processes of the worker when the body has failed on one, or `numbers` are not the same on all.

        Without it one shard of a model would take an update that its sibling, whose peer is gone, does not take.
        Raises: what was raised inside; PeerError when it was raised by another.
        Cost: one all-reduce of a few numbers inside the worker.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        ends = self._least(_Place.ALL_OR_NONE, [*numbers, *(-number for number in numbers)], operation, failure)
        half = len(numbers)
        if [*ends[:half]] != [-end for end in ends[half:]]:
            raise PeerError(
                f"the processes of worker {self._lane.worker} are at different places in {operation}, this one at {[*numbers]}; "
                "let all take the same steps, and load the states that were saved together"
            )

    def fewest(self, count: int) -> int:
        """The least of the values of the worker's processes."""
        return self._least(_Place.FEWEST, [count], "common_steps()")[0]

    def all_have(self, flags: Sequence[bool], operation: str) -> list[bool]:
        """For each of some things, whether all processes of the worker have it. Raises: PeerError when another has failed."""
        return [bool(one) for one in self._least(_Place.EACH, [int(one) for one in flags], operation)]

    def total(self, value: float) -> float:
        """The sum of the processes' values, added in the order of the mesh, so that all get the same to the last bit.

        Raises: PeerError when another has failed.
        Cost: one all-reduce of a few numbers inside the worker.
        """
        # Each writes the bits of its number, and the maximum for the others: the minimum of both is that number.
        numbers = [_MOST] * self._lane.shards
        (numbers[self._lane.shard],) = struct.unpack("<q", struct.pack("<d", value))
        total = 0.0
        for bits in self._least(_Place.SUM, numbers, "a sum over the shards"):
            # Not `sum`, which corrects itself from Python 3.12 on.
            total += struct.unpack("<d", struct.pack("<q", bits))[0]
        return total

    def from_first(self, choose: Callable[[], Sequence[int] | None], operation: str) -> list[int]:
        """The numbers of the first process, on all of them.

        Args: `choose` is called there alone, repeatedly until it returns some. It waits for some seconds at most and returns None
            while it has none yet, so that the others learn that the process lives.
        Raises: what `choose` raises there; PeerError on the others.
        """
        while True:
            chosen: Sequence[int] | None = None
            failure: Exception | None = None
            if self.first:
                try:
                    chosen = choose()
                except Exception as error:
                    failure = error
            # The least of one process's number and the maximum everywhere else is that number.
            mine = [_MOST] * self._width if not self.first else [0] if chosen is None else [1, *chosen]
            known, *numbers = self._least(_Place.FIRST, mine, operation, failure)
            if known:
                return numbers if chosen is None else [*chosen]

    def close(self) -> None:
        """Ends the connections. A second call does nothing."""
        self._group = None

    def _least(
        self, place: _Place, numbers: Sequence[int], operation: str, failure: Exception | None = None
    ) -> list[int]:
        """The least of each number over the processes; a failure on one of them is a failure on all.

        All messages have one size and name the decision: a process that has failed is at the next one already when the others
        wait for it at theirs.
        """
        if self._group is None:
            if failure is not None:
                raise failure
            return [*numbers]
        most = self._width
        padded = [*numbers, *(0 for _ in range(most - len(numbers)))][:most]
        least = torch.tensor([int(failure is None), place, -place, *padded])
        try:
            self._group.allreduce(least, dist.ReduceOp.MIN).wait()
        except RuntimeError as error:
            if failure is not None:
                raise failure from error
            raise PeerError(
                f"another process of worker {self._lane.worker} is gone, or did not come in time ({first_line(error)}); look at "
                f"the logs of its {self._lane.shards} processes"
            ) from error
        fine, first, last, *minima = least.tolist()
        if failure is not None:
            raise failure
        if not fine:
            raise PeerError(
                f"{operation} failed in another process of worker {self._lane.worker}, so that none of its {self._lane.shards} "
                "processes has taken it; look at their logs"
            )
        if first != -last:
            raise PeerError(
                f"the processes of worker {self._lane.worker} are not all in {operation}, as this one is; let all make the same "
                "calls of Outer"
            )
        return minima[: len(numbers)] if place != _Place.FIRST else minima
