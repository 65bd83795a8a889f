"""A worker is asked to leave by SIGTERM: it ends at the next place where nobody waits for it, and saves its state."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["leaving"]


@contextmanager
def leaving() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, as long as this lasts; one that is never set outside the main thread."""
    asked = threading.Event()
    # Python lets the main thread alone take signals; tests and own programs train in others.
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # The handler only sets the event: it may run between any two steps of the main thread, amid an exchange or a file.
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
