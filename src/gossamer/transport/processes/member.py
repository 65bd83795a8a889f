"""The identity of a process in a run: a worker is a replica, and a process is a worker or a part of one."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.transport.processes.keyed_store import KeyedStore
from gossamer.transport.processes.store import Entries


def sizes_of_workers(workers: int, parts: int | Sequence[int]) -> tuple[int, ...]:
    """The processes of each worker, from one number for all of them or from those of each."""
    sizes = (parts,) * workers if isinstance(parts, int) else tuple(parts)
    assert len(sizes) == workers, (workers, parts)
    return sizes


def place_of(rank: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Worker and part of the process of a rank: ranks enumerate the parts of worker 0, then of worker 1, and so on.

    >>> [place_of(rank, (1, 2, 1)) for rank in range(4)]
    [(0, 0), (1, 0), (1, 1), (2, 0)]
    """
    worker = sum(stop <= rank for stop in accumulate(sizes))
    return worker, rank - sum(sizes[:worker])


class Member(NamedTuple):
    """This process as a part of one worker of a run; only a worker in stages or shards has several.

    Rules, topologies, codecs and run folders know workers. Only process groups know ranks, and ranks are computed only
    here. Part p of a worker exchanges messages with part p of its peers, and with the one process of a peer that has no
    parts; such a worker takes the place of each part in turn (`on_side`).
    """

    worker: int
    sizes: tuple[int, ...]
    """The processes of each worker."""
    device: torch.device
    store: Store
    """Shared by all processes of the run; hosted by the launcher, or by rank 0 without one."""
    part: int = 0
    """The part of the worker that this process holds."""
    secret: bytes = b""
    """Known only to the processes of the run; empty if none was given."""
    part_is: str = "stage"
    """The word for a part."""
    timeout_s: float = 300.0
    """The timeout of each store call."""
    behind: KeyedStore | None = None
    """The carrier of the store, where it is reached through keys."""

    @property
    def entries(self) -> Entries:
        """The entries of the run's processes in the store."""
        return Entries(self.store, self.secret, self.timeout_s)

    @property
    def workers(self) -> int:
        """Workers of the run."""
        return len(self.sizes)

    @property
    def parts(self) -> int:
        """Processes of this worker."""
        return self.sizes[self.worker]

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return sum(self.sizes)

    @property
    def rank(self) -> int:
        """The number of this process in the process group."""
        return self.rank_of(self.worker)

    def rank_of(self, worker: int, part: int | None = None) -> int:
        """The rank of the process of that worker that holds this part, by default the same; its one process if it has one."""
        own = self.part if part is None else part
        return sum(self.sizes[:worker]) + (own if self.sizes[worker] > 1 else 0)

    def on_side(self, part: int) -> "Member":
        """This process in the role of part `part`, towards peers with parts, where it is all of its worker."""
        assert self.parts == 1
        return self._replace(part=part)

    def owner(self, rank: int) -> int:
        """The worker that the process of a rank belongs to."""
        return place_of(rank, self.sizes)[0]

    def name(self, rank: int) -> str:
        """The name of the process of a rank.

        >>> import torch
        >>> from torch.distributed import HashStore
        >>> Member.at(0, 4, torch.device("cpu"), HashStore()).name(3)
        'worker 3'
        >>> Member.at(0, 4, torch.device("cpu"), HashStore(), parts=2).name(3)
        'stage 1 of worker 1'
        """
        worker, part = place_of(rank, self.sizes)
        return f"worker {worker}" if self.sizes[worker] == 1 else f"{self.part_is} {part} of worker {worker}"

    @classmethod
    def at(
        cls,
        rank: int,
        workers: int,
        device: torch.device,
        store: Store,
        parts: int | Sequence[int] = 1,
        secret: bytes = b"",
    ) -> "Member":
        """The process of this rank; the inverse of `rank`.

        Args: `parts` are the processes of a worker, or those of each.

        >>> import torch
        >>> from torch.distributed import HashStore
        >>> member = Member.at(5, 4, torch.device("cpu"), HashStore(), parts=2)
        >>> member.worker, member.part, member.rank, member.rank_of(3)
        (2, 1, 5, 7)
        >>> some = Member.at(2, 3, torch.device("cpu"), HashStore(), parts=(1, 2, 1))
        >>> some.name(2), some.rank, [some.rank_of(worker) for worker in range(3)]
        ('stage 1 of worker 1', 2, [0, 2, 3])
        """
        sizes = sizes_of_workers(workers, parts)
        assert 0 <= rank < sum(sizes), (rank, sizes)
        worker, part = place_of(rank, sizes)
        return cls(worker, sizes, device, store, part, secret)
