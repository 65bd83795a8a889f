"""A worker is asked to leave by SIGTERM or Ctrl-C: it ends at the next place where nobody waits for it, and saves its state."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gossamer.transport.processes.local import is_launched

__all__ = ["Asked", "leaving"]

ONE_WISH_S = 1.0
"""Signals that come within this time are one wish: systemd, torchrun and shells send one to each process of a group."""
_STDERR = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Asked(threading.Event):
    """Set once this process has been asked to leave; asked once more, it ends by a KeyboardInterrupt wherever it is.

    Args: `who` is what this process is called.
    """

    def __init__(self, who: str = "this process") -> None:
        super().__init__()
        self.who = who
        self.at_once = False
        """Whether it ends when it is asked for the first time: it is not training yet."""
        self.over = False
        """Whether signals change nothing any more: it is ending."""
        self.left_s: Callable[[], float | None] = lambda: None
        """How long its local phase still lasts; None where that is not known."""
        self.saves: Callable[[], None] | None = None
        """Saves the state of the last exchange, in a thread, in case the process is killed before the phase is over."""
        self.saving: threading.Thread | None = None
        self._since_s: float | None = None

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        now_s = time.monotonic()
        if self.over:
            return
        if self.at_once:
            self.set()
            raise KeyboardInterrupt
        if self._since_s is None:
            self._since_s = now_s
            self.set()
            self._say_so()
            if self.saves is not None:
                # Apart from training, which goes on with this phase; and no work for a handler, which may interrupt anything.
                self.saving = threading.Thread(target=self.saves, daemon=True, name="gossamer save")
                self.saving.start()
        elif now_s > self._since_s + ONE_WISH_S:
            raise KeyboardInterrupt

    def _say_so(self) -> None:
        if is_launched():  # its launcher says it of all
            return
        left_s = self.left_s()
        phase = f", whose local phase takes about {left_s:.0f} s more" if left_s is not None and left_s >= 1 else ""
        # No log and no stream: the signal may have interrupted either amid a line.
        line = f"gossamer: {self.who} is asked to leave after its round{phase}; stop once more to end it at once\n"
        os.write(_STDERR, line.encode())


@contextmanager
def leaving(who: str = "this process") -> Iterator[Asked]:
    """What SIGTERM and Ctrl-C set, as long as this lasts; nothing outside the main thread does.

    Args: `who` is what this process is called.
    """
    asked = Asked(who)
    # Python lets the main thread alone take signals; tests and own programs train in others.
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # One that is ignored stays so: of what a shell or nohup has started in its background.
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, asked.signalled) for number in heeded}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
