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
from collections.abc import Callable, Hashable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from gossamer.errors import ConfigError, DataError, GossamerError, PairingError, TrainingError
from gossamer.record import checkpoint
from gossamer.record.progress import is_quiet, quieted
from gossamer.run.config.document import load_run
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import RunConfig, digest, parse
from gossamer.run.config.user_parts import own_parts
from gossamer.run.experiments.shared_start import anneal
from gossamer.run.simulated.simulate import simulate_until_asked
from gossamer.stop_signals import start_forkserver
from gossamer.transport.processes.local import end_with_parent

log = logging.getLogger("gossamer")

_ENDING_S = 5.0
"""How long an idle process may take to end by itself."""
_LOOK_S = 0.5
"""The polling interval for stop requests."""


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
    """Warnings of its process."""
    core_s: float = 0.0
    """CPU seconds of its process, which other work on the machine does not lengthen."""


class _PoolProcess:
    """A process that trains runs sequentially, sharing imports and compiled code, which take seconds."""

    def __init__(self, number: int, count: int) -> None:
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.link, child_end = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_work, args=(child_end, number, count, is_quiet()), daemon=True
        )
        self.process.start()
        child_end.close()
        self.key: Hashable = None
        """The key of its current run; None while idle."""

    def train(self, key: Hashable, config: RunConfig, folder: Path) -> None:
        """Begins a run."""
        self.key = key
        self._send((config, folder))

    def ask_to_stop(self) -> None:
        """Requests its run to save after its round and stop."""
        self._send(None)

    def result(self) -> RunEnd | None:
        """The end of its run; None for one that was stopped.

        Raises: GossamerError as `simulate` does; TrainingError for a process that is gone.
        """
        try:
            result = self.link.recv()
        except (EOFError, OSError):
            self.process.join()
            raise TrainingError(
                f"the process of a run ended with exit code {self.process.exitcode}; if the machine was out of memory, lower "
                "--jobs"
            ) from None
        if isinstance(result, GossamerError):
            raise result
        return result

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # of a lost process, which `result` reports
            self.link.send(message)


class RunPool:
    """Trains several runs at a time; those in progress are ended on exit.

    Args:
        jobs: with one, a run is trained in this process, inside `ended`.
        began: called with the key of each run that begins; identical warnings of several runs are shown once.
        asked: whether to stop; then the runs in progress save after their round.
    """

    def __init__(
        self, jobs: int, *, began: Callable[[Any], None] | None = None, asked: Callable[[], bool] = lambda: False
    ) -> None:
        self._jobs, self._began, self._warned = jobs, began, set[str]()
        self._asked, self._is_stopping = asked, False
        self._waiting: list[tuple[Hashable, RunConfig, Path, Path | None]] = []
        self._members: list[_PoolProcess] = []
        self._failed: GossamerError | None = None
        """The first failure, raised once the runs in progress have saved."""

    def __enter__(self) -> "RunPool":
        if self._jobs > 1 and sys.platform == "linux":  # imports once instead of in each process
            start_forkserver([__name__])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self._members:
            if member.key is None:
                member.link.close()  # the process sees the end of its pipe, and cleans up torch's compiler on exit
            else:
                member.process.terminate()
        for member in self._members:
            member.process.join(_ENDING_S)
            member.process.kill()
            member.process.join()
            member.link.close()

    @property
    def _running(self) -> list[_PoolProcess]:
        return [member for member in self._members if member.key is not None]

    @property
    def busy(self) -> bool:
        """Whether a run is waiting or in progress."""
        return bool(self._waiting or self._running or self._failed)

    def add(self, key: Hashable, config: RunConfig, folder: Path, trunk: Path | None = None) -> None:
        """Queues a run.

        One that was stopped in its folder continues from its newest checkpoint; else the folder is emptied before it begins.

        Args: `trunk` is the folder of the trunk that it is a branch of; with several jobs each run is trained whole.
        """
        self._waiting.append((key, config, folder, trunk))

    def drop(self) -> None:
        """Drops the queued runs."""
        self._waiting.clear()

    def ended(self) -> list[tuple[Any, RunEnd]]:
        """Waits until a run has ended, or several.

        Raises, once all runs in progress have saved: GossamerError as `simulate` does, but for a run that diverges;
            KeyboardInterrupt on a stop request.
        """
        if self._jobs == 1:
            return [self._train_here()]
        ends = list[tuple[Any, RunEnd]]()
        while not ends:
            if (self._failed or self._asked()) and not self._is_stopping:
                self._is_stopping = True
                if self._failed and self._running:
                    log.warning(
                        "a run has failed; the others in progress save after their round: %d", len(self._running)
                    )
                for member in self._running:
                    member.ask_to_stop()
            while not self._is_stopping and self._waiting and len(self._running) < self._jobs:
                key, config, folder, _ = self._waiting.pop(0)
                self._start(key, config, folder)
            if not self._running:  # all have saved
                raise self._failed or KeyboardInterrupt
            done = {*wait([member.link for member in self._running], _LOOK_S)}
            for member in [one for one in self._running if one.link in done]:
                key, member.key = member.key, None
                try:
                    if (end := member.result()) is not None:
                        ends.append((key, end))
                except GossamerError as error:
                    self._failed = self._failed or error
        self._report_warnings(ends)
        return ends

    def _train_here(self) -> tuple[Any, RunEnd]:
        if self._asked():
            raise KeyboardInterrupt
        key, config, folder, trunk = self._waiting.pop(0)
        if self._began is not None:
            self._began(key)
        return key, _trained(config, folder, trunk, warns=self._began is not None, asked=self._asked)

    def _report_warnings(self, ends: Iterable[tuple[Any, RunEnd]]) -> None:
        """Reports each warning of other processes once."""
        for key, end in ends if self._began is not None else ():
            for sentence in end.warnings:
                if sentence not in self._warned:
                    self._warned.add(sentence)
                    log.warning("%s: %s", key, sentence)

    def _start(self, key: Hashable, config: RunConfig, folder: Path) -> None:
        member = next((member for member in self._members if member.key is None), None)
        if member is None:
            member = _PoolProcess(len(self._members), self._jobs)
            self._members.append(member)
        member.train(key, config, folder)
        if self._began is not None:
            self._began(key)


def _work(link: Connection, number: int, count: int, quiet: bool) -> None:
    """The loop of a process that trains received runs, until its pipe is closed."""
    end_with_parent()  # even during a run
    gc.freeze()  # imports are shared with the others, and not collected
    # Ctrl-C and a terminal's hang-up reach only the parent, which lets the run save, or ends this process.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # a Python handler, so that torch's compiler cleans up
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _share(sorted(os.sched_getaffinity(0)), number, count))
    kept = _Kept()
    log.addHandler(kept)
    log.propagate = False
    with contextlib.suppress(EOFError), quieted(quiet):
        while True:
            if (job := link.recv()) is None:  # stopped right after its run had ended
                continue
            config, folder = job
            kept.sentences.clear()
            try:
                # While a run is in progress, the parent only sends stop requests.
                end = _trained(config, folder, warns=True, asked=link.poll)
                link.send(end._replace(warnings=tuple(kept.sentences)))
            except KeyboardInterrupt:
                link.recv()
                link.send(None)
            except GossamerError as error:
                link.send(error)


class _Kept(logging.Handler):
    """Collects the warnings of a process, for its parent to show."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one."""
        self.sentences.append(record.getMessage())


def _share(cores: Sequence[int], number: int, count: int) -> Sequence[int]:
    """The cores of one process of the pool: no two share a core, unless there are more processes than cores."""
    return cores[number::count] or [cores[number % len(cores)]]


def _trained(
    config: RunConfig,
    folder: Path,
    trunk: Path | None = None,
    *,
    warns: bool = False,
    asked: Callable[[], bool] = lambda: False,
) -> RunEnd:
    """Trains a run from its start, or from where it was stopped."""
    if not (resumed := _was_stopped(config, folder)):
        _empty(folder)
    began, began_core_s, level = time.perf_counter(), time.process_time(), log.level
    if not warns:
        log.setLevel(logging.ERROR)  # the same warnings for every run
    try:
        if resumed or trunk is None:
            done = simulate_until_asked(config, own_parts(config), folder, resume=resumed, asked=asked)
        else:
            done = anneal(config, folder, trunk, asked=asked)
    except (TrainingError, PairingError) as error:
        loss, reason, text = None, str(error), ""
    else:
        loss, reason, text = done.loss if math.isfinite(done.loss) else None, "", done.text
    finally:
        log.setLevel(level)
    seconds, core_s = time.perf_counter() - began, time.process_time() - began_core_s
    return RunEnd(loss, reason, round(seconds, 3), text, core_s=round(core_s, 3))


def _was_stopped(config: RunConfig, folder: Path) -> bool:
    """Whether the folder holds exactly this run up to a checkpoint before its end."""
    if not (folder / "run.toml").exists():
        return False
    try:
        alike = digest(parse(load_run(folder))) == digest(config)
    except (ConfigError, DataError):
        return False
    # One with a final checkpoint but no outcome has an incomplete record.
    newest = max(checkpoint.rounds(folder / "checkpoints", settings_of(config).owners[0]), default=0)
    return alike and 0 < newest < config.length.rounds


def _empty(folder: Path) -> None:
    """Removes the files of another run from a folder; refuses anything that is not a run."""
    if (mark := folder / "run.toml").exists():
        # The mark is removed last: without it, the remains of a kill could neither be removed nor resumed.
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != mark:
                path.unlink()
        shutil.rmtree(folder)
