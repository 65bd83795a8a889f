"""Which worker a process is a part of: a worker is one process, or the processes of a mesh that hold one model together."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import ConfigError, PeerError
from gossamer.library.dtensors import processes_of
from gossamer.transport.processes.launch import agree
from gossamer.transport.processes.member import Member
from gossamer.transport.secret import environment_secret

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Lane", "lane_in", "outer_store"]


class Lane(NamedTuple):
    """The processes of all workers that hold the same shard, and those of the worker of this one.

    Process s of worker i exchanges messages with process s of worker j only, so that each pair of workers has as many lanes as a
    worker has processes, and no process ever sees a whole model.
    """

    across: tuple[int, ...] = (0,)
    """The processes that hold this shard, as ranks of the default group, in the order of their workers."""
    within: tuple[int, ...] = (0,)
    """The processes of this worker, in the order of its mesh."""
    worker: int = 0
    shard: int = 0
    start: str = ""
    """Identifies this start on all its processes."""

    @property
    def n(self) -> int:
        """Workers."""
        return len(self.across)

    @property
    def shards(self) -> int:
        """Processes of a worker."""
        return len(self.within)


def outer_store(ranks: Sequence[int]) -> "PrefixStore":
    """The part of the default store for these processes. Groups of the same have one; others never read what they write."""
    place = hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]
    return PrefixStore(f"outer/{place}", dist.distributed_c10d._get_default_store())  # it has no public name


def lane_in(ranks: Sequence[int], mesh: "DeviceMesh | None", timeout_s: float) -> Lane:
    """The lane of this process among those of a group, each of which says which mesh its worker is.

    Args: `ranks` are those of the group, ascending; `mesh` is None for a worker that is this process alone.
    Raises: PeerError when the meshes are not as many equal parts of the group, or processes do not come; ConfigError for a mesh
        that is not inside the group.
    """
    if not dist.is_initialized():
        return Lane()
    rank = dist.get_rank()
    own = [rank] if mesh is None else processes_of(mesh)
    if not {*ranks}.issuperset(own):
        raise ConfigError(
            f"the worker of this process is on the processes {own}, and the process group has {[*ranks]} only; give Outer a "
            "process_group of all processes of all workers"
        )
    member = Member.at(
        ranks.index(rank), len(ranks), torch.device("cpu"), outer_store(ranks), secret=environment_secret()
    )
    said = agree(
        member, "gossamer.Outer, places", [own, mesh and [*mesh.shape], secrets.token_hex(8)], timeout_s=timeout_s
    )
    workers = list[list[int]]()
    for one in said:
        match one:
            case [[*processes], _, str()] if all(type(p) is int for p in processes):
                if processes not in workers:
                    workers.append(processes)
            case _:
                raise PeerError("a process does not say where it is; install the same gossamer version everywhere")
    shapes = [shape for _, shape, _ in said]
    if odd := next((k for k, shape in enumerate(shapes) if shape != shapes[0]), None):
        raise PeerError(
            f"workers are meshes of different shapes: process {ranks[0]} has {_shape(shapes[0])} and process {ranks[odd]} "
            f"{_shape(shapes[odd])}; give all workers the same number of processes, sharded alike"
        )
    if sorted(p for processes in workers for p in processes) != [*ranks]:
        raise PeerError(
            f"the processes {[*ranks]} are not parts of as many whole workers: these have {workers}; shard each model over the "
            "processes of its own worker, or give Outer(mesh=...)"
        )
    workers.sort(key=min)
    shard = own.index(rank)
    return Lane(tuple(processes[shard] for processes in workers), tuple(own), workers.index(own), shard, said[0][2])


def _shape(shape: object) -> str:
    return "one process" if shape is None else f"a mesh of {shape}"
