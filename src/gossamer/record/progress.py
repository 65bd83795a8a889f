"""What a run says while it goes: sentences on stderr, so that the output of a command can be piped; none inside `quieted`."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["is_quiet", "quieted", "say"]

_QUIET = ContextVar("quiet", default=False)


@contextlib.contextmanager
def quieted(quiet: bool = True) -> Iterator[None]:
    """Shows no progress in here, in this thread, if `quiet`."""
    before = _QUIET.set(quiet or _QUIET.get())
    try:
        yield
    finally:
        _QUIET.reset(before)


def is_quiet() -> bool:
    """Whether this is inside `quieted`."""
    return _QUIET.get()


def say(sentence: str) -> None:
    """Prints a line about how a run goes."""
    if not _QUIET.get():
        print(sentence, file=sys.stderr, flush=True)
