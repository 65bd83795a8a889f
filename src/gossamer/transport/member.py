"""Which worker of a run a process is: a worker is a replica, and a process is a worker or a part of one."""

from typing import NamedTuple

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.transport.store import Entries

__all__ = ["Member"]


class Member(NamedTuple):
    """This process as a part of one worker of a run; only a worker in stages has several.

    Rules, topologies, codecs and run folders know workers. Only process groups know ranks, and a rank is computed here and
    nowhere else. Part p of a worker exchanges messages with part p of its peers.
    """

    worker: int
    workers: int
    device: torch.device
    store: Store
    """Shared by all processes of the run; it lives in the launcher where there is one, else in rank 0."""
    part: int = 0
    """Which part of the worker this process holds."""
    parts: int = 1
    """Processes of a worker."""
    secret: bytes = b""
    """Known to the processes of the run only; empty where none was given."""

    @property
    def entries(self) -> Entries:
        """What the processes of the run tell each other in the store."""
        return Entries(self.store, self.secret)

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.workers * self.parts

    @property
    def rank(self) -> int:
        """The number of this process in the process group."""
        return self.rank_of(self.worker)

    def rank_of(self, worker: int) -> int:
        """The rank of the process of that worker that holds the same part."""
        return worker * self.parts + self.part

    def name(self, rank: int) -> str:
        """What the process of a rank is called.

        >>> import torch
        >>> from torch.distributed import HashStore
        >>> Member.at(0, 4, torch.device("cpu"), HashStore()).name(3)
        'worker 3'
        >>> Member.at(0, 4, torch.device("cpu"), HashStore(), parts=2).name(3)
        'stage 1 of worker 1'
        """
        worker, part = divmod(rank, self.parts)
        return f"worker {worker}" if self.parts == 1 else f"stage {part} of worker {worker}"

    @classmethod
    def at(
        cls, rank: int, workers: int, device: torch.device, store: Store, parts: int = 1, secret: bytes = b""
    ) -> "Member":  # fmt: skip
        """The process of this rank; `rank` turns it back.

        >>> import torch
        >>> from torch.distributed import HashStore
        >>> member = Member.at(5, 4, torch.device("cpu"), HashStore(), parts=2)
        >>> member.worker, member.part, member.rank, member.rank_of(3)
        (2, 1, 5, 7)
        """
        assert 0 <= rank < workers * parts, (rank, workers, parts)
        return cls(rank // parts, workers, device, store, rank % parts, parts, secret)
