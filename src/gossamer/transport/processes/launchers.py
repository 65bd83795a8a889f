"""The variables by which launchers number the processes that they start."""

from collections.abc import Mapping
from typing import NamedTuple


class Numbering(NamedTuple):
    """The variables of one launcher."""

    rank: str
    local_rank: str
    """Variables that other versions of the launcher set, separated by a bar; the first one that is set counts."""
    world_size: str


TORCHRUN = Numbering("RANK", "LOCAL_RANK", "WORLD_SIZE")
OTHERS = (
    Numbering("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    Numbering("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    Numbering("PMI_RANK", "MPI_LOCALRANKID|PALS_LOCAL_RANKID|PMI_LOCAL_RANK", "PMI_SIZE"),
    Numbering("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"),
    Numbering("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"),
    Numbering("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)
"""Open MPI, MVAPICH, what speaks PMI (MPICH, Intel MPI, Cray's PALS), jsrun, Flux and srun; the first that is there counts where
torchrun's variables are not set.

srun comes last: mpirun within an allocation of Slurm has the variables of both.
"""


def numbered_by(environment: Mapping[str, str]) -> tuple[Numbering, str] | None:
    """The variables of the launcher that has started this process as one of several, and their number; None for a lone process.

    The shell of an allocation of Slurm has SLURM_PROCID and SLURM_NTASKS as well; there a process is one of several only where
    MASTER_ADDR is set too, or srun has made a step of several tasks.

    >>> numbered_by({"PMI_RANK": "0", "PMI_SIZE": "2"}) == (OTHERS[2], "2")
    True
    >>> shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    >>> numbered_by(shell), numbered_by({**shell, "SLURM_STEP_NUM_TASKS": "2"}) == (OTHERS[-1], "2")
    (None, True)
    """
    for names in OTHERS:
        if not {names.rank, names.world_size} <= environment.keys():
            continue
        size = environment[names.world_size]
        if names.world_size == "SLURM_NTASKS" and "MASTER_ADDR" not in environment:
            size = environment.get("SLURM_STEP_NUM_TASKS", "1")
        return None if size == "1" else (names, size)
    return None
