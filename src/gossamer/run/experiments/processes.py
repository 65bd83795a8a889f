"""Runs several simulations in parallel, one subprocess each, with its share of the cores."""

import gc
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from gossamer.errors import GossamerError, PairingError, TrainingError
from gossamer.run.config.run_file import RunConfig
from gossamer.run.experiments.shared_start import anneal
from gossamer.run.simulated.simulate import simulate

__all__ = ["Apart", "RunEnd"]

log = logging.getLogger("gossamer")


class RunEnd(NamedTuple):
    """A run that has ended."""

    loss: float | None
    """Of its last validation; None if it diverged, or cannot work."""
    error: str
    """Why; else empty."""
    seconds: float
    text: str = ""
    """The fingerprint of its text, where that is files."""
    warnings: tuple[str, ...] = ()
    """What it warned of in its own process."""


class _Running(NamedTuple):
    key: Any
    process: BaseProcess
    result: Connection
    lane: int


class Apart:
    """Trains runs, so many at a time; those under way are killed when it is left.

    Args:
        jobs: with one, a run takes place in this process, as `ended` is called.
        began: is told of each run that begins, by its key; warnings are then shown, of several runs with the same each once.
    """

    def __init__(self, jobs: int, *, began: Callable[[Any], None] | None = None) -> None:
        self._jobs, self._began, self._warned = jobs, began, set[str]()
        self._waiting: list[tuple[Hashable, RunConfig, Path, Path | None]] = []
        self._running: list[_Running] = []
        self._context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")

    def __enter__(self) -> "Apart":
        if self._jobs > 1 and sys.platform == "linux":  # which imports once, and not for each run
            multiprocessing.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for one in self._running:
            one.process.kill()
        for one in self._running:
            one.process.join()
            one.result.close()

    @property
    def busy(self) -> bool:
        """Whether a run waits or is under way."""
        return bool(self._waiting or self._running)

    def add(self, key: Hashable, config: RunConfig, folder: Path, trunk: Path | None = None) -> None:
        """Adds a run to those that wait; its folder is emptied before it begins.

        Args: `trunk` is the folder of the trunk that it is a branch of; with several jobs each run is trained whole.
        """
        self._waiting.append((key, config, folder, trunk))

    def drop(self) -> None:
        """Forgets the runs that wait."""
        self._waiting.clear()

    def ended(self) -> list[tuple[Any, RunEnd]]:
        """Waits until a run has ended, or several. Raises GossamerError as `simulate` does, but for a run that diverges."""
        if self._jobs == 1:
            key, config, folder, trunk = self._waiting.pop(0)
            if self._began is not None:
                self._began(key)
            return [(key, _trained(config, folder, trunk, warns=self._began is not None))]
        while self._waiting and len(self._running) < self._jobs:
            key, config, folder, _ = self._waiting.pop(0)
            self._start(key, config, folder)
        done = {*wait([one.result for one in self._running])}
        ended = [one for one in self._running if one.result in done]
        self._running = [one for one in self._running if one.result not in done]
        ends = [(one.key, _result_of(one)) for one in ended]
        for key, end in ends if self._began is not None else ():
            for sentence in end.warnings:
                if sentence not in self._warned:
                    self._warned.add(sentence)
                    log.warning("%s: %s", key, sentence)
        return ends

    def _start(self, key: Hashable, config: RunConfig, folder: Path) -> None:
        lane = min({*range(self._jobs)} - {one.lane for one in self._running})
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(theirs, config, folder, lane, self._jobs), daemon=True)
        process.start()
        theirs.close()
        if self._began is not None:
            self._began(key)
        self._running.append(_Running(key, process, ours, lane))


def _result_of(one: _Running) -> RunEnd:
    try:
        result = one.result.recv()
    except EOFError:
        one.process.join()
        raise TrainingError(
            f"the process of a run ended with exit code {one.process.exitcode}; if the machine was out of memory, lower --jobs"
        ) from None
    finally:
        one.result.close()
    one.process.join()
    if isinstance(result, GossamerError):
        raise result
    return result


def _work(result: Connection, config: RunConfig, folder: Path, lane: int, lanes: int) -> None:
    """A process that trains one run."""
    gc.freeze()  # what was imported is shared with the others, and not collected
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which kills what is under way
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _share(sorted(os.sched_getaffinity(0)), lane, lanes))
    kept = _Kept()
    log.addHandler(kept)
    log.propagate = False
    try:
        result.send(_trained(config, folder, warns=True)._replace(warnings=tuple(kept.sentences)))
    except GossamerError as error:
        result.send(error)


class _Kept(logging.Handler):
    """Keeps the warnings of a process, for its parent, which shows them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one."""
        self.sentences.append(record.getMessage())


def _share(cores: Sequence[int], lane: int, lanes: int) -> Sequence[int]:
    """The cores of one lane: each core has one lane, unless there are more lanes than cores."""
    return cores[lane::lanes] or [cores[lane % len(cores)]]


def _trained(config: RunConfig, folder: Path, trunk: Path | None = None, *, warns: bool = False) -> RunEnd:
    """Trains a run from its start."""
    if (folder / "run.toml").exists():  # nothing but a run is ours to remove
        shutil.rmtree(folder)
    began, level = time.perf_counter(), log.level
    if not warns:
        log.setLevel(logging.ERROR)  # the same warnings for every run
    try:
        done = simulate(config, folder) if trunk is None else anneal(config, folder, trunk)
    except (TrainingError, PairingError) as error:
        return RunEnd(None, str(error), round(time.perf_counter() - began, 3))
    finally:
        log.setLevel(level)
    loss = done.loss if math.isfinite(done.loss) else None
    return RunEnd(loss, "", round(time.perf_counter() - began, 3), done.text)
