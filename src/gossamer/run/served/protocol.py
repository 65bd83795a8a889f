"""What a server and its workers agree on: the run, the server's address, and the numbers sent with every starting point."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError, RefusedError
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.task import Task, found_by_each
from gossamer.transport.alike import short_settings
from gossamer.transport.sockets.addresses import split
from gossamer.transport.sockets.header import Limits

__all__ = ["HERE", "OWNED", "Terms", "address", "limits_of", "run_key", "run_settings", "terms_of", "use_threads"]

HERE = "these machines"
"""What a real run calls the network whose seconds it records."""
OWNED = 2
"""Number of checkpointed rounds that a joining worker reports: as many as it keeps."""

_LONGEST_US = 1 << 50
"""36 years."""


class Terms(NamedTuple):
    """What the server sends with every starting point, as whole numbers."""

    updates: int
    """Updates of this fragment that the server has made."""
    round: int
    """Rounds that are over."""
    go: int
    """1 to train another phase, 0 when there is nothing left to begin."""
    phases: int
    """Local phases of this worker whose push the server has received."""
    again: int
    """1 for a worker that has been in the run before."""
    cut_round: int
    """What the worker has recorded of this round and of later ones is void: an interrupted run continues from there."""
    checkpoint: int
    """The round of the worker's own checkpoint that it restores its inner optimizer from; 0 for a new inner optimizer."""
    elapsed_us: int
    """Since the run began."""


def terms_of(numbers: Tensor, limits: Limits) -> Terms:
    """The terms in a frame. Raises RefusedError for impossible numbers."""
    terms = Terms(*numbers.tolist())
    # A fragment is updated at most once for each push, and a worker that takes all steps of the run ends a phase for each.
    most = Terms(limits.steps, limits.rounds, 1, limits.steps, 1, limits.rounds, limits.rounds, _LONGEST_US)
    if not all(0 <= value <= limit for value, limit in zip(terms, most, strict=True)):
        raise RefusedError(
            "bounds", f"malformed reply from the server: {terms}; check that all machines run the same gossamer version"
        )
    return terms


def limits_of(config: RunSettings) -> Limits:
    """What the processes of a run may say of it at most.

    Where nobody waits, one worker could take all steps, in as many local phases; a rule that mixes updates exchanges each
    fragment twice.
    """
    steps = config.workers * config.run.steps
    rounds = steps if config.kind in ("pair", "no waiting") else config.rounds
    return Limits(config.workers, rounds, steps, 2 * config.fragments[0])


def address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    >>> address("127.0.0.1:29400"), address("[::1]:29400")
    (('127.0.0.1', 29400), ('::1', 29400))
    """
    try:
        return split(text)
    except ValueError:
        raise ConfigError(
            f"--server got '{text}'; write HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:29400 or [fd00::1]:29400"
        ) from None


def run_key(config: RunSettings, task: Task) -> int:
    """64 bits of what a server and its workers must have in common: the run and the text."""
    common = f"{config.digest} {found_by_each(task, config.parts)}"
    return int(hashlib.sha256(common.encode()).hexdigest()[:16], 16)


def run_settings(config: RunSettings, task: Task) -> dict[str, str]:
    """What `run_key` is made of, key by key: a server that refuses a worker names those that differ."""
    return short_settings({**config.decisive, **found_by_each(task, config.parts)})


def use_threads(config: RunSettings) -> None:
    """Sets the intra-op threads of the run file; without that key, those of the environment."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
