"""Threads that train the workers of a simulation: as many as the cores allow, each with intra-op threads of its own."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gossamer.transport.launch import available_cores

__all__ = ["lanes"]

log = logging.getLogger("gossamer")


@contextlib.contextmanager
def lanes(device: torch.device, workers: int, threads: int) -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """A pool of threads and how many it has: one for a GPU, else no more than workers, nor than the cores allow."""
    cores, each = available_cores(), threads or 1
    count = 1 if device.type == "cuda" else max(1, min(workers, cores // each))
    if count * each > cores:
        log.warning(
            f"{count} x {each} threads oversubscribe {cores} cores, which is several times slower; lower run.threads"
        )
    if (busy := _busy_cores()) > cores / 4:
        log.warning(f"other processes keep {busy:.1f} of {cores} cores busy; this run will be slower")
    before = torch.get_num_threads()
    torch.set_num_threads(each)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(each,)) as pool:
            yield pool, count
    finally:
        torch.set_num_threads(before)


@functools.cache  # an experiment of many runs waits once
def _busy_cores(window_s: float = 0.1) -> float:
    """How many cores others use while this process waits a moment; 0 where the system does not report it."""

    def ticks() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all, and those idle or waiting for a disk

    if not Path("/proc/stat").exists():
        return 0.0
    (total, idle), _ = ticks(), time.sleep(window_s)
    total, idle = (after - before for after, before in zip(ticks(), (total, idle), strict=True))
    return (os.cpu_count() or 1) * (1 - idle / total) if total else 0.0
