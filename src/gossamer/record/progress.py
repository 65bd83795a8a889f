"""The progress of a run: on stderr, so that the output of a command can be piped, and nowhere inside `quieted`."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

__all__ = ["Progress", "quieted", "say"]

_QUIET = ContextVar("quiet", default=False)


@contextlib.contextmanager
def quieted(quiet: bool = True) -> Iterator[None]:
    """Shows no progress in here, in this thread, if `quiet`."""
    before = _QUIET.set(quiet or _QUIET.get())
    try:
        yield
    finally:
        _QUIET.reset(before)


def say(sentence: str) -> None:
    """Prints a line about how a run goes."""
    if not _QUIET.get():
        print(sentence, file=sys.stderr, flush=True)


class Progress:
    """Shows how a run goes: live bars with the latest figures on a terminal, else one plain line per `every` rounds."""

    def __init__(self, rounds: int, every: int = 10, console: Console | None = None) -> None:
        self._rounds = rounds
        self._every = every
        self._quiet = _QUIET.get()
        self._console = console or Console(stderr=True)
        self._tasks: dict[str, TaskID] = {}
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=self._quiet or not self._console.is_terminal,
        )

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, method: str, done: int, **figures: float) -> None:
        """`done` rounds of this method are over; `figures` are shown by name, such as `loss=2.1`."""
        if self._quiet:
            return
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        if self._console.is_terminal:
            if method not in self._tasks:
                self._tasks[method] = self._bars.add_task(method, total=self._rounds, figures="")
            self._bars.update(self._tasks[method], completed=done, figures=shown)
        elif done % self._every == 0 or done == self._rounds:
            self._console.print(
                f"{method}: round {done} of {self._rounds}  {shown}", markup=False, highlight=False, soft_wrap=True
            )
