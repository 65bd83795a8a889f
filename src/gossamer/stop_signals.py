"""How a process is asked to stop: by Ctrl-C, by SIGTERM, or as its terminal is closed (SIGHUP).

The first signal asks it to end in order, and another one, a second or more later, to end at once. A signal that was ignored
when the process began, as nohup and shells that run something in the background do, stays ignored.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from types import FrameType
from typing import Any

# Windows has no SIGHUP.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
ONE_WISH_S = 1.0
"""Signals within so long after the first are part of it: shells, launchers and impatient hands send several for one wish."""
_asked_s = -math.inf
"""When this process was last asked to stop, on the clock of `time.monotonic`."""
_launched = False


def interrupted() -> None:
    """From here on a signal to stop raises KeyboardInterrupt in the main thread."""

    def stop() -> None:
        raise KeyboardInterrupt

    _install(_handler(stop))


def deaf() -> dict[Any, Any]:
    """From here on signals to stop change nothing: the exit code of the process is known. Returns the handlers of before."""
    return _install(lambda *_: None)  # not SIG_IGN, which whatever is started would inherit


def has_launcher() -> None:
    """From here on it is the launcher of this process that ends it where it is asked twice: both may get the same signal."""
    global _launched
    _launched = True


def is_launched() -> bool:
    """Whether a launcher of this package has started this process."""
    return _launched


class Asked(threading.Event):
    """Set once this process has been asked to stop; asked once more, it ends by a KeyboardInterrupt wherever it is.

    Args: `sentence` is printed then; a process that a launcher has started leaves that to it.
    """

    def __init__(self, sentence: str = "this process is asked to leave after its round") -> None:
        super().__init__()
        self.sentence = sentence
        self.at_once = False
        """Whether it ends when it is asked for the first time: it is not training yet."""
        self.over = False
        """Whether signals change nothing any more: it is ending."""
        self.left_s: Callable[[], float | None] = lambda: None
        """How long its local phase still lasts; None where that is not known."""
        self.saves: Callable[[], None] | None = None
        """Saves the state of the last exchange, in a thread, in case the process is killed before the phase is over."""
        self.saving: threading.Thread | None = None

    def signalled(self) -> None:
        """Takes one wish to stop, in the handler of its signal."""
        if self.over:
            return
        if self.at_once:
            self.set()
            raise KeyboardInterrupt
        if not self.is_set():
            self.set()
            self._say_so()
            if self.saves is not None:
                # Apart from training, which continues with this phase; and no work for a handler, which may interrupt anything.
                self.saving = threading.Thread(target=self.saves, daemon=True, name="gossamer save")
                self.saving.start()
        elif not _has_launcher():  # else the launcher ends it: both may get the same signal
            raise KeyboardInterrupt

    def _say_so(self) -> None:
        if _has_launcher():  # which says it of all
            return
        left_s = self.left_s()
        phase = f", whose local phase takes about {left_s:.0f} s more" if left_s is not None and left_s >= 1 else ""
        # No log and no stream: the signal may have interrupted either amid a line.
        with contextlib.suppress(OSError):  # its terminal may be gone
            os.write(2, f"gossamer: {self.sentence}{phase}; stop once more to end it at once\n".encode())


@contextmanager
def leaving(sentence: str = "this process is asked to leave after its round") -> Iterator[Asked]:
    """What a signal to stop sets, as long as this lasts; nothing outside the main thread does. See `Asked`."""
    asked = Asked(sentence)
    # Python lets the main thread alone take signals; tests and own programs train in others.
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = _install(_handler(asked.signalled))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_launcher() -> bool:
    return _launched or "TORCHELASTIC_RUN_ID" in os.environ


def _handler(stop: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    """A handler that passes on the first of several signals for one wish."""
    global _asked_s
    _asked_s = -math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        global _asked_s
        now_s = time.monotonic()
        if number == getattr(signal, "SIGHUP", None):
            without_lost_terminal()
        if now_s - _asked_s >= ONE_WISH_S:
            _asked_s = now_s
            stop()

    return handle


def _install(handler: Any) -> dict[Any, Any]:
    """Sets the handler of all signals to stop that are not ignored; returns those of before."""
    # A handler that is not of Python is None, and cannot be set again.
    before = {one: signal.getsignal(one) for one in STOP_SIGNALS}
    heeded = {one: old for one, old in before.items() if old not in (signal.SIG_IGN, None)}
    for one in heeded:
        signal.signal(one, handler)
    return heeded


def without_lost_terminal() -> bool:
    """Lets what is printed go nowhere where its terminal is gone, whose every write would fail; returns whether one is gone."""
    lost = False
    for fd in (1, 2):
        # Closed altogether, as by 2>&-, it is no concern of ours.
        with contextlib.suppress(OSError):
            if _was_terminal(fd) and not os.isatty(fd):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
                lost = True
    return lost


def _was_terminal(fd: int) -> bool:
    """Whether it is a device of another kind than /dev/null and /dev/full are."""
    seen = os.fstat(fd)
    return stat.S_ISCHR(seen.st_mode) and os.major(seen.st_rdev) != os.major(os.stat(os.devnull).st_rdev)


_HELD = {*STOP_SIGNALS} - {signal.SIGINT}  # a fork server ignores Ctrl-C by itself


def start_forkserver(modules: Sequence[str]) -> None:
    """Starts the process that others are forks of, which imports these modules meanwhile, unless it is there."""
    multiprocessing.set_forkserver_preload([__name__, *modules])
    # It begins with these signals blocked. One that goes to the whole group of the launcher, as the hang-up of a terminal and
    # `timeout` send it, would else end it, and with it what the launcher knows of its processes.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        resource_tracker.ensure_running()  # lets SIGTERM through again once it has started its own process
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if sys.platform == "linux" and signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    # This is that process: what is forked from it, by us or by the program that uses us, takes signals again.
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD))
