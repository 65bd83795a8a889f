"""What all processes of a real run have in common: the key by which they know each other, and the bounds of what they say."""

import hashlib

import torch

from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.worker.task import OwnBatches, Task, found_by_each, task_of, warn_of_equal_batches
from gossamer.transport.alike import short_settings
from gossamer.transport.processes.launch import agree
from gossamer.transport.processes.member import Member
from gossamer.transport.sockets.header import Limits

__all__ = [
    "HERE",
    "compare_first_batches",
    "first_batch",
    "limits_of",
    "prepare",
    "run_key",
    "run_settings",
    "use_threads",
]

HERE = "these machines"
"""What a real run calls the network whose seconds it records."""


def prepare(config: ResolvedRun) -> tuple[Task, int]:
    """What a process does before it looks for the others: it sets its threads and opens its data.

    Returns: what it trains, and the key of the run. Raises: ConfigError, DataError.
    """
    use_threads(config)
    task = task_of(config)
    return task, run_key(config, task)


def use_threads(config: RunSettings) -> None:
    """Sets the intra-op threads of the run file; without that key, those of the environment."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)


def run_key(config: RunSettings, task: Task) -> int:
    """64 bits of what a server and its workers must have in common: the run and the text."""
    common = f"{config.digest} {found_by_each(task, config.parts)}"
    return int(hashlib.sha256(common.encode()).hexdigest()[:16], 16)


def run_settings(config: RunSettings, task: Task) -> dict[str, str]:
    """What `run_key` is made of, key by key: a server that refuses a worker names those that differ."""
    return short_settings({**config.decisive, **found_by_each(task, config.parts)})


def first_batch(task: Task, worker: int) -> int:
    """63 bits of the first batch of the user's own function; 0 where the data are ours, which gives each worker its own."""
    return int(task.data.fingerprint(worker), 16) >> 1 or 1 if isinstance(task.data, OwnBatches) else 0


def compare_first_batches(member: Member, task: Task, timeout_s: float) -> None:
    """Warns once where the user's function gives all workers that start together the same batches."""
    own = first_batch(task, member.worker)
    if not own:
        return
    begin = agree(member, "the first batch of each", own, timeout_s=timeout_s)
    if member.rank == 0:
        warn_of_equal_batches({member.owner(rank): one for rank, one in enumerate(begin)}.values())


def limits_of(config: RunSettings) -> Limits:
    """What the processes of a run may say of it at most.

    Where nobody waits, one worker could take all steps, in as many local phases; a rule that mixes updates exchanges each
    fragment twice.
    """
    steps = config.workers * config.run.steps
    rounds = steps if config.kind in ("pair", "no waiting") else config.rounds
    return Limits(config.workers, rounds, steps, 2 * config.fragments[0])
