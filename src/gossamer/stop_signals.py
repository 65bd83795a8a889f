"""Stop signals of a process: Ctrl-C, SIGTERM, or SIGHUP of a closed terminal.

The first signal requests an orderly end, and another one, a second or more later, an immediate one. A signal that was
ignored at the start of the process, as by nohup or for background jobs, stays ignored.
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
"""Signals within this time after the first count as one request: shells, launchers and impatient users send several."""
_asked_s = -math.inf
"""The time of the last request to stop, on the clock of `time.monotonic`."""
_launched = False


def interrupted() -> None:
    """Makes a stop signal raise KeyboardInterrupt in the main thread."""

    def stop() -> None:
        raise KeyboardInterrupt

    _install(_handler(stop))


def ignore_stop_signals() -> dict[Any, Any]:
    """Disables stop signals, once the exit code is decided. Returns the previous handlers."""
    return _install(lambda *_: None)  # not SIG_IGN, which whatever is started would inherit


def has_launcher() -> None:
    """Leaves an immediate end to the launcher of this process, as both may receive the same signal."""
    global _launched
    _launched = True


def is_launched() -> bool:
    """Whether a launcher of this package has started this process."""
    return _launched


class Asked(threading.Event):
    """An event that is set by the first request to stop; a second request raises KeyboardInterrupt.

    Args: `sentence` is printed at the first request, by the launcher if there is one.
    """

    def __init__(self, sentence: str = "this process is asked to leave after its round") -> None:
        super().__init__()
        self.sentence = sentence
        self.at_once = False
        """Whether the first request already interrupts, as before training."""
        self.over = False
        """Whether signals are ignored, as the process is ending."""
        self.left_s: Callable[[], float | None] = lambda: None
        """Seconds left of the local phase; None if unknown."""
        self.saves: Callable[[], None] | None = None
        """Saves the state of the last exchange, in a thread, in case the process is killed before the phase is over."""
        self.saving: threading.Thread | None = None

    def pause(self, seconds: float) -> None:
        """Waits, or until the first request; after that at most a fifth of a second."""
        self.wait(seconds) if not self.is_set() else time.sleep(min(seconds, 0.2))

    def signalled(self) -> None:
        """Handles one request to stop, in the signal handler."""
        if self.over:
            return
        if self.at_once:
            self.set()
            raise KeyboardInterrupt
        if not self.is_set():
            self.set()
            self._report_request()
            if self.saves is not None:
                # In a thread, as training continues with this phase, and a handler may interrupt anything and must stay
                # short.
                self.saving = threading.Thread(target=self.saves, daemon=True, name="gossamer save")
                self.saving.start()
        elif not _has_launcher():  # else the launcher ends it: both may get the same signal
            raise KeyboardInterrupt

    def _report_request(self) -> None:
        if _has_launcher():  # which prints it for all of them
            return
        left_s = self.left_s()
        phase = f", whose local phase takes about {left_s:.0f} s more" if left_s is not None and left_s >= 1 else ""
        # No log and no stream: the signal may have interrupted either amid a line.
        with contextlib.suppress(OSError):  # its terminal may be gone
            os.write(2, f"gossamer: {self.sentence}{phase}; stop once more to end it at once\n".encode())


@contextmanager
def leaving(sentence: str = "this process is asked to leave after its round") -> Iterator[Asked]:
    """The event that a stop signal sets inside this context; never set outside the main thread. See `Asked`."""
    asked = Asked(sentence)
    # Python handles signals in the main thread only; tests and users' programs train in others.
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
    """A handler that passes on the first of several signals for one request."""
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
    """Sets the handler of all stop signals that are not ignored; returns the previous ones."""
    # A handler not set from Python is None, and cannot be restored.
    before = {one: signal.getsignal(one) for one in STOP_SIGNALS}
    heeded = {one: old for one, old in before.items() if old not in (signal.SIG_IGN, None)}
    for one in heeded:
        signal.signal(one, handler)
    return heeded


def without_lost_terminal() -> bool:
    """Discards output to a terminal that is gone, where every write would fail; returns whether one is gone."""
    lost = False
    for fd in (1, 2):
        # A stream that was closed on purpose, as by 2>&-, is left alone.
        with contextlib.suppress(OSError):
            if _was_terminal(fd) and not os.isatty(fd):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
                lost = True
    return lost


def _was_terminal(fd: int) -> bool:
    """Whether it is a device of another kind than /dev/null and /dev/full."""
    seen = os.fstat(fd)
    return stat.S_ISCHR(seen.st_mode) and os.major(seen.st_rdev) != os.major(os.stat(os.devnull).st_rdev)


_HELD = {*STOP_SIGNALS}  # also Ctrl-C: a fork server ignores it only once it has imported its modules


def start_forkserver(modules: Sequence[str]) -> None:
    """Starts the fork server, unless it runs already; it imports these modules in the background."""
    multiprocessing.set_forkserver_preload([__name__, *modules])
    # It begins with these signals blocked: one sent to the launcher's whole process group, as by a terminal's hang-up
    # or `timeout`, would end it, and the launcher would lose track of its processes.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        resource_tracker.ensure_running()  # lets SIGTERM through again once it has started its own process
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if sys.platform == "linux" and signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    # In the fork server: processes forked from it, by us or by the user's program, take signals again.
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD))
