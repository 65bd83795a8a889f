"""What is printed: results on stdout, and what a run says while it goes on stderr, none of that inside `quieted`.

Strings of files, folders and peers are printed by `echo`, or through `printable`: nothing else in the package prints.
"""

import contextlib
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextvars import ContextVar
from typing import IO, NamedTuple

_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control characters, invisible ones such as those that turn the direction of reading, halves of pairs, and line separators."""
_QUIET = ContextVar("quiet", default=False)


class Trained(NamedTuple):
    """What the replicas of this process have trained since it began, whatever run they belong to."""

    inner_steps: int
    tokens: int


_trained, _TRAINED_LOCK = Trained(0, 0), threading.Lock()


def note_trained(inner_steps: int, tokens: int) -> None:
    """Counts inner steps that have ended; any thread may call it."""
    global _trained
    with _TRAINED_LOCK:
        _trained = Trained(_trained.inner_steps + inner_steps, _trained.tokens + tokens)


def trained() -> Trained:
    """The counts so far.

    >>> before = trained()
    >>> note_trained(2, 64)
    >>> trained().tokens - before.tokens
    64
    """
    return _trained


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
    """Prints a line about how a run goes; nothing where its terminal, or what reads its output, is gone."""
    if not _QUIET.get():
        with contextlib.suppress(OSError):
            echo(sentence, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    r"""A text with escapes in place of the characters by which it could move the cursor, erase lines or hide what it says.

    Line breaks and tabs stay.

    >>> printable("a\x1b[2Jb\rc\u202ed"), printable("Σ 1")
    ('a\\x1b[2Jb\\rc\\u202ed', 'Σ 1')
    """
    if text.isprintable():
        return text
    return "".join(
        one.encode("unicode_escape").decode() if one not in "\n\t" and unicodedata.category(one) in _ESCAPED else one
        for one in text
    )


def echo(text: str = "", *, file: IO[str] | None = None, flush: bool = False) -> None:
    """Prints a text and a line break, see `printable`; on stdout, unless another file is given."""
    print(printable(text), file=file, flush=flush)
