"""DTensor parameters, shared by processes: local parts and meshes, without the second that importing DTensor costs all others."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def as_dtensor(t: Tensor) -> "DTensor | None":
    """The tensor, if it is a DTensor; none can be one while torch's DTensor module is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return cast("DTensor", t) if module is not None and isinstance(t, module.DTensor) else None


def local(t: Tensor) -> Tensor:
    """This process's part of a tensor: the same memory, without a gradient."""
    shared = as_dtensor(t)
    return (t if shared is None else shared.to_local()).detach()


def like_parameter(part: Tensor, shared: "DTensor") -> "DTensor":
    """A DTensor of the same global shape, with this part as this process's local part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, shared.device_mesh, shared.placements, run_check=False, shape=shared.shape, stride=shared.stride()
    )


def copied_over(t: Tensor) -> tuple[int, ...]:
    """The mesh dimensions over which processes hold copies of the same part; none for a plain tensor."""
    shared = as_dtensor(t)
    if shared is None:
        return ()
    sizes = shared.device_mesh.shape
    return tuple(d for d, place in enumerate(shared.placements) if place.is_replicate() and sizes[d] > 1)


def reshard(model: nn.Module) -> None:
    """Discards what FSDP2 has gathered: a forward pass without a backward keeps it, and it would be stale."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None:
        for one in model.modules():
            if isinstance(one, module.FSDPModule):
                cast("FSDPModule", one).reshard()


def processes_of(mesh: "DeviceMesh") -> list[int]:
    """The ranks of a mesh, row by row."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def mesh_of(parameters: Iterable[tuple[str, Tensor]], given: "DeviceMesh | None") -> "DeviceMesh | None":
    """The mesh of one worker: the given one, or the largest among its parameters; None for a worker of one process.

    Raises: ConfigError for a given mesh that this process is not in, or a parameter that lies on other processes too.
    """
    mesh = given
    shared = [(name, d) for name, t in parameters if (d := as_dtensor(t)) is not None]
    for _, t in shared if given is None else ():
        if mesh is None or t.device_mesh.size() > mesh.size():
            mesh = t.device_mesh
    if mesh is None:
        return None
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"Outer got a mesh of the processes {processes_of(mesh)}, and this process is none of them; give the mesh of its "
            "own worker, such as mesh['shard']"
        )
    in_mesh = {*processes_of(mesh)}
    for name, t in shared:
        if not in_mesh.issuperset(processes := processes_of(t.device_mesh)):
            raise ConfigError(
                f"parameter '{name}' lies on the processes {processes}, and the mesh of its worker has {sorted(in_mesh)}; give "
                "Outer(mesh=...) the mesh of all processes of one worker"
            )
        if any(place.is_partial() for place in t.placements):
            raise ConfigError(
                f"parameter '{name}' is a sum that no process has whole ({t.placements}); redistribute it to Shard or Replicate "
                "before Outer is made"
            )
    return mesh
