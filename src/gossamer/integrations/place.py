"""Which worker this process is, for a framework that must see a single process."""

import logging
import os
from collections.abc import Iterable, Mapping, Sized
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from gossamer.errors import ConfigError, PeerError, first_line
from gossamer.library.parts import in_own_words
from gossamer.transport.processes.backend import backend_of
from gossamer.transport.processes.launch import join
from gossamer.transport.processes.launchers import TORCHRUN, numbered_by

log = logging.getLogger("gossamer")

COUNTED = (
    *TORCHRUN,
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
)
FAMILIES = (
    "SLURM_",
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "PALS_",
    "JSM_NAMESPACE_",
    "FLUX_TASK_",
    "FLUX_JOB_",
    "TORCHELASTIC_",
)
"""Variables, or prefixes of them, from which frameworks infer the number of processes, or that Slurm has started them."""
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that a launcher sets for each process."""
GPUS, SITE = "CUDA_VISIBLE_DEVICES", "GOSSAMER_SITE"

Data = TypeVar("Data", bound=Sized)


class Place(NamedTuple):
    """One worker among those that train together."""

    worker: int
    workers: int

    def shard(self, dataset: Data) -> Data | Subset[Any]:
        """The samples of this worker: every `workers`-th, beginning with number `worker`.

        All workers have equally many, because one that ends early would leave its peers waiting; up to `workers` - 1 samples at
        the end are left out. A `datasets.Dataset` stays one, and anything else becomes a `torch.utils.data.Subset`.

        Raises: ConfigError for a data set without a length or without numbered samples, or with fewer samples than workers.

        >>> [list(Place(worker, 2).shard("abcde")) for worker in range(2)]
        [['a', 'c'], ['b', 'd']]
        """
        try:
            n = len(dataset)
        except TypeError:
            raise ConfigError(
                f"shard got a {type(dataset).__name__}, which has no length; split a stream where it is read, as with "
                f"datasets.distributed.split_dataset_by_node(dataset, {self.worker}, {self.workers})"
            ) from None
        if isinstance(dataset, Mapping) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"shard got a {type(dataset).__name__}, whose samples have no numbers from 0 on; give a list, a data set of "
                "torch, or one split of a datasets.DatasetDict"
            )
        indices = range(self.worker, n - n % self.workers, self.workers)
        if not indices:
            raise ConfigError(f"shard got {n} samples for {self.workers} workers; give at least one to each")
        # Other classes have a `select` that means something else: that of a tensor takes a dimension, and pandas' has another.
        ours = any(kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__)
        select = getattr(dataset, "select", None) if ours else None
        return select(indices) if select else Subset(dataset, indices)  # pyright: ignore[reportArgumentType]


def newest_common_step(steps: Iterable[int]) -> int:
    """The newest step of which every worker has a checkpoint, so that all resume from it; 0 where there is none.

    All workers call it together, before training.

    Args: `steps` are those of which this worker has checkpoints.
    Raises: PeerError when another worker has ended.

    >>> newest_common_step([10, 30, 20])
    30
    """
    available = {*steps}
    if not dist.is_initialized():
        return max(available, default=0)
    device = torch.device("cuda" if backend_of(None) == "nccl" else "cpu")
    limit = max(available, default=0)
    while True:  # each turn passes over a checkpoint of some worker, and all see the same numbers
        each = gathered(limit, device)
        if min(each) == max(each):
            return limit
        limit = max((step for step in available if step <= min(each)), default=0)


def gathered(number: int, device: torch.device, group: dist.ProcessGroup | None = None) -> list[int]:
    """The numbers of all workers, in their order. Raises: PeerError when one of them has ended."""
    own = torch.tensor([number], device=device)
    each = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(each, own, group=group)
    except RuntimeError as error:
        raise PeerError(
            f"another worker ended before training began ({first_line(error)}); look at the logs of the others"
        ) from error
    return [int(one) for one in each]


@in_own_words()
def as_worker(timeout_s: float = 300.0) -> Place:
    """Makes this process a worker that its framework takes for the only process; call it before anything of the framework.

    It joins the other processes that `torchrun` has started, over gloo; then it removes the variables of all launchers, such as
    WORLD_SIZE and SLURM_NTASKS, from the environment, so that the framework counts one process. Processes that mpirun or srun
    has started are numbered by its variables, and need MASTER_ADDR and MASTER_PORT in their environment too. Where a machine has
    several GPUs, the worker sees one of them (this was never run on a GPU). A process group that you have made stays as it is,
    and so do the GPUs then. Without a launcher there is one worker, and a warning says so; a lone process with GOSSAMER_SITE is
    that site. A second call returns the same.

    Args: `timeout_s` is how long to wait for the other processes.
    Raises: ConfigError when the environment does not fit or CUDA was in use before; PeerError when processes do not come.

    >>> as_worker()
    Place(worker=0, workers=1)
    """
    if not dist.is_initialized():
        _take_numbers()
    missing = [name for name in NEEDED if name not in os.environ]
    if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= {*missing}:
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} is not set, so this process does not know which worker it is or where worker 0 is; start "
                "the script with torchrun --nproc-per-node N, or set MASTER_ADDR and MASTER_PORT to the machine of worker 0 and "
                "a free port there, or unset RANK and WORLD_SIZE to train alone"
            )
        world, turn = os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
        _take_gpu(int(turn) if turn.isdigit() else 0)
        join(int(world) if world.isdigit() else 1, backend="gloo", timeout_s=timeout_s)  # it refuses what is no number
    for name in [name for name in os.environ if name in COUNTED or name.startswith(FAMILIES)]:
        del os.environ[name]
    if dist.is_initialized() and dist.get_world_size() > 1:
        return Place(dist.get_rank(), dist.get_world_size())
    if SITE in os.environ:
        return Place(*site_of(os.environ[SITE]))
    if not dist.is_initialized():
        log.warning(
            "no launcher has started this process, so it counts one worker, which trains alone unless site=... or store=... is "
            "given later; start several with torchrun --nproc-per-node N"
        )
    return Place(0, 1)


def site_of(words: str | None) -> tuple[int, int]:
    """The number of a site and how many there are. Raises ConfigError for anything else.

    >>> site_of("0/3")
    (0, 3)
    """
    number, slash, sites = (words or "").partition("/")
    if not (slash and number.isdecimal() and sites.isdecimal() and int(number) < int(sites)):
        given = "not set" if words is None else repr(words)
        raise ConfigError(f"{SITE} is {given}; set it to the number of this site and how many there are, such as 0/3")
    return int(number), int(sites)


def _take_numbers() -> None:
    """Takes the numbers of another launcher than torchrun for torchrun's, where it has started several processes."""
    if {*TORCHRUN} & {*os.environ} or (found := numbered_by(os.environ)) is None:
        return
    names, size = found
    local_ranks = (os.environ[name] for name in names.local_rank.split("|") if name in os.environ)
    os.environ |= {
        TORCHRUN.rank: os.environ[names.rank],
        TORCHRUN.local_rank: next(local_ranks, "0"),
        TORCHRUN.world_size: size,
    }


def _take_gpu(turn: int) -> None:
    """Leaves one GPU visible, as a framework with one process and several GPUs would use all of them."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    used = torch.cuda.is_initialized()
    os.environ[GPUS] = _gpu(os.environ.get(GPUS), count, turn)
    if used or torch.cuda.device_count() != 1:
        raise ConfigError(
            f"CUDA was in use with {count} GPUs before as_worker(), so this worker cannot be left with one; call as_worker() at "
            f"the top of the script, or set {GPUS} for each process"
        )


def _gpu(visible: str | None, count: int, turn: int) -> str:
    """The name of the GPU of a process.

    >>> _gpu(None, 4, 3), _gpu("2,GPU-8f", 2, 1), _gpu("2,3", 2, 2)
    ('3', 'GPU-8f', '2')
    """
    names = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    return names[turn % count].strip()
