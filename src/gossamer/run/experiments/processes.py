"""Runs several simulations in parallel, in as many subprocesses, each with its share of the cores."""

import contextlib
import gc
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from gossamer.errors import GossamerError, PairingError, TrainingError
from gossamer.record.progress import is_quiet, quieted
from gossamer.run.config.run_file import RunConfig
from gossamer.run.experiments.shared_start import anneal
from gossamer.run.simulated.simulate import simulate
from gossamer.transport.processes.local import end_with_parent

__all__ = ["Apart", "RunEnd"]

log = logging.getLogger("gossamer")

_ENDING_S = 5.0
"""How long a process without a run may take to end by itself."""


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


class _Lane:
    """A process that trains one run after the other: what it has imported and compiled, which takes seconds, serves all."""

    def __init__(self, number: int, lanes: int) -> None:
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.link, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, number, lanes, is_quiet()), daemon=True)
        self.process.start()
        theirs.close()
        self.key: Hashable = None
        """Of the run that it trains; None while it waits."""

    def train(self, key: Hashable, config: RunConfig, folder: Path) -> None:
        """Begins a run. Raises: TrainingError for a process that is gone."""
        self.key = key
        with self._there():
            self.link.send((config, folder))

    def result(self) -> RunEnd:
        """How its run has ended. Raises: GossamerError as `simulate` does; TrainingError for a process that is gone."""
        with self._there():
            result = self.link.recv()
        if isinstance(result, GossamerError):
            raise result
        return result

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self.process.join()
            raise TrainingError(
                f"the process of a run ended with exit code {self.process.exitcode}; if the machine was out of memory, lower "
                "--jobs"
            ) from None


class Apart:
    """Trains runs, so many at a time; those under way are ended when it is left.

    Args:
        jobs: with one, a run takes place in this process, as `ended` is called.
        began: is told of each run that begins, by its key; warnings are then shown, of several runs with the same each once.
    """

    def __init__(self, jobs: int, *, began: Callable[[Any], None] | None = None) -> None:
        self._jobs, self._began, self._warned = jobs, began, set[str]()
        self._waiting: list[tuple[Hashable, RunConfig, Path, Path | None]] = []
        self._lanes: list[_Lane] = []

    def __enter__(self) -> "Apart":
        if self._jobs > 1 and sys.platform == "linux":  # which imports once, and not for each process
            multiprocessing.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for lane in self._lanes:
            if lane.key is None:
                lane.link.close()  # it reads that nobody sends any more, and removes what torch's compiler holds as it ends
            else:
                lane.process.terminate()
        for lane in self._lanes:
            lane.process.join(_ENDING_S)
            lane.process.kill()
            lane.process.join()
            lane.link.close()

    @property
    def _running(self) -> list[_Lane]:
        return [lane for lane in self._lanes if lane.key is not None]

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
        done = {*wait([lane.link for lane in self._running])}
        ended = [lane for lane in self._running if lane.link in done]
        ends = [(lane.key, lane.result()) for lane in ended]
        for lane in ended:
            lane.key = None
        for key, end in ends if self._began is not None else ():
            for sentence in end.warnings:
                if sentence not in self._warned:
                    self._warned.add(sentence)
                    log.warning("%s: %s", key, sentence)
        return ends

    def _start(self, key: Hashable, config: RunConfig, folder: Path) -> None:
        lane = next((lane for lane in self._lanes if lane.key is None), None)
        if lane is None:
            lane = _Lane(len(self._lanes), self._jobs)
            self._lanes.append(lane)
        lane.train(key, config, folder)
        if self._began is not None:
            self._began(key)


def _work(link: Connection, lane: int, lanes: int, quiet: bool) -> None:
    """A process that trains what it is sent, until nobody sends any more."""
    end_with_parent()  # also amid a run
    gc.freeze()  # what was imported is shared with the others, and not collected
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends what is under way
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # in Python, which removes what torch's compiler holds
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _share(sorted(os.sched_getaffinity(0)), lane, lanes))
    kept = _Kept()
    log.addHandler(kept)
    log.propagate = False
    with contextlib.suppress(EOFError), quieted(quiet):
        while True:
            config, folder = link.recv()
            kept.sentences.clear()
            try:
                link.send(_trained(config, folder, warns=True)._replace(warnings=tuple(kept.sentences)))
            except GossamerError as error:
                link.send(error)


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
    if (mark := folder / "run.toml").exists():  # nothing but a run is ours to remove
        # The mark goes last: what a kill leaves of a run without it could neither be removed by the next process nor be resumed.
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != mark:
                path.unlink()
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
