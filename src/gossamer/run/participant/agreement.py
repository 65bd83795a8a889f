"""The values that all processes of a real run share: the run's key, and the bounds of letters."""

import hashlib
from pathlib import Path

import torch

from gossamer.errors import PeerError
from gossamer.record.machines import MOST_THREADS, read_machines
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.worker.numerics import warn_of_other_machine
from gossamer.run.worker.task import OwnBatches, Task, found_by_each, task_of, warn_of_equal_batches
from gossamer.transport.alike import short_settings
from gossamer.transport.processes.launch import agree, intra_op_threads
from gossamer.transport.processes.member import Member
from gossamer.transport.sockets.header import Limits

HERE = "these machines"
"""The network name in the recorded seconds of a real run."""


def prepare(run: ResolvedRun) -> tuple[Task, int]:
    """Prepares a process before the rendezvous: sets its threads and opens its data.

    Returns: its task, and the key of the run. Raises: ConfigError, DataError.
    """
    use_threads(run)
    task = task_of(run)
    return task, run_key(run, task)


def use_threads(run: RunSettings) -> None:
    """Sets the intra-op threads of a process that does not know the number of processes on this machine.

    The run file's, or else torch's default, one for each physical core, within a container's quota.
    """
    threads = intra_op_threads(run.loop.threads, 1)
    torch.set_num_threads(threads if run.loop.threads else min(threads, torch.get_num_threads()))


def use_recorded_threads(run: RunSettings, folder: Path, worker: int) -> None:
    """Sets the recorded intra-op threads of a resumed worker or server.

    Another machine's default would change the order of sums. Threads in the run file take precedence.
    """
    recorded = [one for one in read_machines(folder) if one.worker in (None, worker)]
    if recorded:
        warn_of_other_machine(folder)
        if not run.loop.threads:
            torch.set_num_threads(recorded[-1].machine.threads)


def use_equal_threads(run: RunSettings, member: Member) -> None:
    """Sets the intra-op threads of all processes of a worker to their minimum, as they count as one worker elsewhere.

    Raises: PeerError for an invalid number of threads.
    """
    if max(run.processes) == 1:
        return
    published = agree(member, "the threads of each", torch.get_num_threads(), timeout_s=run.loop.timeout_s)
    counts = [threads for rank, threads in enumerate(published) if member.owner(rank) == member.worker]
    if not all(isinstance(threads, int) and 1 <= threads <= MOST_THREADS for threads in counts):
        raise PeerError(
            f"a process of worker {member.worker} published {counts!r:.60} as its threads; allowed is a whole number "
            f"from 1 to {MOST_THREADS}: install the same gossamer version everywhere"
        )
    torch.set_num_threads(min(counts))


def run_key(run: RunSettings, task: Task) -> int:
    """A 64-bit digest of run and text, which a server and its workers must share."""
    common = f"{run.digest} {found_by_each(task, run.parts)}"
    return int(hashlib.sha256(common.encode()).hexdigest()[:16], 16)


def run_settings(run: RunSettings, task: Task) -> dict[str, str]:
    """The inputs of `run_key` by key: a server that refuses a worker names differences."""
    return short_settings({**run.decisive, **found_by_each(task, run.parts)})


def first_batch(task: Task, worker: int) -> int:
    """A 63-bit digest of the first batch of a user's function; 0 for our data, where each worker has its own."""
    return int(task.data.fingerprint(worker), 16) >> 1 or 1 if isinstance(task.data, OwnBatches) else 0


def compare_first_batches(member: Member, task: Task, timeout_s: float) -> None:
    """Warns once where the user's function gives all workers that start together the same batches."""
    batch_hash = first_batch(task, member.worker)
    if not batch_hash:
        return
    begin = agree(member, "the first batch of each", batch_hash, timeout_s=timeout_s)
    if member.rank == 0:
        warn_of_equal_batches({member.owner(rank): one for rank, one in enumerate(begin)}.values())


def limits_of(run: RunSettings) -> Limits:
    """The bounds on numbers in letters of a run.

    In an asynchronous run one worker could take all steps, in as many local phases; a rule that mixes updates exchanges
    each fragment twice.
    """
    steps = run.workers * run.loop.steps
    rounds = steps if run.kind in ("pair", "no waiting") else run.rounds
    return Limits(run.workers, rounds, steps, 2 * run.fragments[0])
