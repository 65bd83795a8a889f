"""Threads that train the workers of a simulation: as many as the cores allow, each with its own intra-op threads."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch

from gossamer.record.machines import Threads
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.turns import Turns
from gossamer.transport.processes.launch import available_cores

log = logging.getLogger("gossamer")


class WorkerThreads:
    """The threads of a simulation: no more than workers, nor than the cores allow.

    A user's rule, codec or topology need not be thread-safe: with any of them, there is one thread. Batches and
    optimizers of the user's are called by one thread at a time (`rng.TURN`), and so are forward passes that draw
    (`turns`).
    """

    pool: ThreadPoolExecutor

    def __init__(self, device: torch.device, run: RunSettings, threads: Threads) -> None:
        cores, self.intra_op = available_cores(), threads.widest
        alone = not run.parts.own.keys() <= {"model", "loss", "data", "validation", "optimizer"}
        self.count = 1 if alone or device.type == "cuda" else max(1, min(run.workers, cores // self.intra_op))
        self.turns = Turns(always=run.loop.take_turns) if self.count > 1 else None
        """For the replicas and probes that train and score in these threads."""
        if self.count * self.intra_op > cores:
            log.warning(
                f"{self.count} x {self.intra_op} threads oversubscribe {cores} cores, which is several times slower; lower "
                "run.threads, unless this repeats a run that had so many"
            )
        _warn_of_others(cores)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Starts the threads, and ends them on exit; inside, the calling thread has as many intra-op threads as they."""
        before, each = torch.get_num_threads(), self.intra_op
        torch.set_num_threads(each)
        try:
            with ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(each,)) as self.pool:
                yield
        finally:
            torch.set_num_threads(before)

    def each(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """The results for all items, in order."""
        return list(self.pool.map(function, items))


@functools.cache  # once for an experiment of many runs
def _warn_of_others(cores: int) -> None:
    """Warns where other processes keep the cores of this one busy."""
    if (busy := _busy_cores()) > cores / 4:
        log.warning(
            f"other processes keep {busy:.1f} of {cores} core{'s' if cores > 1 else ''} busy; this run will be slower"
        )


def _busy_cores(window_s: float = 0.1) -> float:
    """The number of this process's cores that are busy while it sleeps; 0 if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return 0.0
    ours = os.sched_getaffinity(0)  # each concurrent run has its own cores
    percent = psutil.cpu_percent(window_s, percpu=True)
    return sum(percent[core] for core in ours if core < len(percent)) / 100
