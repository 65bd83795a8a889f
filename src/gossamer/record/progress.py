"""Printing: results on stdout, and progress of a run on stderr, which `quieted` suppresses.

Strings of files, folders and peers are printed by `echo`, or through `printable`; no other code in the package prints.
"""

import contextlib
import functools
import itertools
import mmap
import os
import struct
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import IO, NamedTuple

from gossamer.stop_signals import without_lost_terminal

_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control characters, invisible ones such as those that turn the direction of reading, halves of pairs, and line separators."""
_QUIET = ContextVar("quiet", default=False)


class TrainedHere(NamedTuple):
    """The inner steps and tokens trained since this process began, over all runs, by it and its children."""

    inner_steps: int
    tokens: int


_trained, _TRAINED_LOCK = TrainedHere(0, 0), threading.Lock()
_COUNTS = "GOSSAMER_COUNTS"
"""The environment variable with the shared counter that a process updates for its parent."""
_COUNT, _MOST_CHILDREN = struct.Struct("=qq"), 4096
_of_children: list[Callable[[], TrainedHere]] = []


def note_trained(inner_steps: int, tokens: int) -> None:
    """Counts completed inner steps; thread-safe."""
    global _trained
    with _TRAINED_LOCK:
        _trained = TrainedHere(_trained.inner_steps + inner_steps, _trained.tokens + tokens)
        if _COUNTS in os.environ and (place := _place_of_count(os.environ[_COUNTS])) is not None:
            _COUNT.pack_into(*place, *_trained)


@functools.cache
def _place_of_count(where: str) -> tuple[mmap.mmap, int] | None:
    """The parent's shared memory named here, and the offset; None if it is gone, as progress must never end training."""
    number, _, path = where.partition(":")
    with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), _MOST_CHILDREN * _COUNT.size), int(number) * _COUNT.size
    return None


@contextlib.contextmanager
def counting_children() -> Iterator[Callable[[], dict[str, str]]]:
    """A context in which `training_counts` includes children; yields a function that returns the environment for each of them."""
    numbers = itertools.count()
    with tempfile.NamedTemporaryFile(prefix="gossamer-") as file:
        file.truncate(_MOST_CHILDREN * _COUNT.size)
        with mmap.mmap(file.fileno(), 0) as memory:

            def total() -> TrainedHere:
                steps, tokens = zip(*_COUNT.iter_unpack(memory[:]), strict=True)
                return TrainedHere(sum(steps), sum(tokens))

            def environment() -> dict[str, str]:
                number = next(numbers)
                return {_COUNTS: f"{number}:{file.name}"} if number < _MOST_CHILDREN else {}

            _of_children.append(total)
            try:
                yield environment
            finally:
                _of_children.remove(total)
                note_trained(*total())  # the count never falls


def training_counts() -> TrainedHere:
    """The counts so far.

    >>> before = training_counts()
    >>> note_trained(2, 64)
    >>> training_counts().tokens - before.tokens
    64
    """
    with contextlib.suppress(ValueError):  # the memory of children that have just ended
        every = [_trained, *(total() for total in [*_of_children])]
        return TrainedHere(sum(one.inner_steps for one in every), sum(one.tokens for one in every))
    return _trained


@contextlib.contextmanager
def quieted(quiet: bool = True) -> Iterator[None]:
    """Suppresses progress in this context and thread, if `quiet`."""
    before = _QUIET.set(quiet or _QUIET.get())
    try:
        yield
    finally:
        _QUIET.reset(before)


def is_quiet() -> bool:
    """Whether this is inside `quieted`."""
    return _QUIET.get()


def say(sentence: str) -> None:
    """Prints a line of progress; ignores a terminal or reader that is gone."""
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
    """Prints a text and a line break, see `printable`; on stdout, unless another file is given.

    Where the terminal is gone the text is dropped: its signal may come later than a write fails, and lets the run save.
    """
    try:
        print(printable(text), file=file, flush=flush)
    except OSError:
        if not without_lost_terminal():
            raise
