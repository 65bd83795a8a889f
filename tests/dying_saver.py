"""Processes that save checkpoints and are killed while they do, for test_checkpoint.

`FOLDER/call-K` is left by a process that was killed at the K-th change it made to the disk while saving round 3, for
every K there is; `FOLDER/again-K` likewise, where that round had been saved before with other values; `FOLDER/time-K` by
one that saved round after round and was killed at some moment.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gossamer.record import checkpoint

DIGEST = "a run"


def state(round: int, shift: float = 0.0) -> dict[str, Any]:
    """What the worker holds at the end of a round."""
    return {"x": torch.full((100_000,), round + shift), "step": 10 * round}


def save(folder: Path, round: int, shift: float = 0.0) -> None:
    """Saves that round."""
    checkpoint.save(folder, round, 0, state(round, shift), digest=DIGEST)


def die_at_call(k: int) -> None:
    """Makes this process die right before the k-th call from here on that changes the disk."""
    calls = itertools.count()

    def fatal(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == k:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "mkdir", "replace", "rmdir", "unlink"):
        setattr(os, name, fatal(getattr(os, name)))


def killed_at_call(folder: Path, k: int, *, again: bool) -> bool:
    """Whether a process that saves rounds 1, 2 and 3 had a k-th call in round 3 to die at."""
    child = os.fork()
    if child == 0:
        save(folder, 1)
        save(folder, 2)
        if again:
            save(folder, 3, shift=0.5)
        die_at_call(k)
        save(folder, 3)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def killed_after(folder: Path, delay_s: float) -> None:
    """Kills a process that saves round after round, some time after it owns its first."""
    child = os.fork()
    if child == 0:
        for round in itertools.count(1):
            save(folder, round)
    while not checkpoint.rounds(folder, 0):
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def leave_folders(words: list[str]) -> int:
    """What such processes leave behind, in the folder that is named."""
    folder = Path(*words)
    for kind in ("call", "again"):
        for k in itertools.count():
            if not killed_at_call(folder / f"{kind}-{k:02d}", k, again=kind == "again"):
                break
    delays = random.Random(0)
    for k in range(12):
        killed_after(folder / f"time-{k:02d}", delays.uniform(0.0, 0.03))
    return 0
