"""The progress of a run: on stderr, so that the output of a command can be piped, and nowhere inside `quieted`."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

__all__ = ["Progress", "quieted", "say"]

_QUIET = ContextVar("quiet", default=False)
_LONGEST_SILENCE_S = 30.0


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
    """Shows how a run goes: live bars with the latest figures on a terminal, else plain lines.

    There is a line every so many rounds, after each validation, and after the first round that ends 30 s after the last line.

    Args: `now_s` is the clock of those 30 s.
    """

    def __init__(
        self,
        rounds: int,
        every: int = 10,
        console: Console | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rounds = rounds
        self._every = every
        self._now_s, self._told_s = now_s, now_s()
        self._validated: dict[str, float] = {}
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
        elif self._due(method, done, figures):
            self._told_s = self._now_s()
            self._console.print(
                f"{method}: round {done} of {self._rounds}  {shown}", markup=False, highlight=False, soft_wrap=True
            )

    def _due(self, method: str, done: int, figures: Mapping[str, float]) -> bool:
        """Whether there is to be a line, where no terminal shows it live."""
        loss = figures.get("val", math.nan)
        validated = not math.isnan(loss) and loss != self._validated.get(method)
        self._validated[method] = loss
        late = self._now_s() - self._told_s >= _LONGEST_SILENCE_S
        return done % self._every == 0 or done == self._rounds or validated or late
