"""Progress of runs in the terminal: one table in place, or plain lines without a terminal.

Both are read from the run folders, as the live page is. So it is the same for all drivers, also where other processes
train, and training itself does not print. All output goes to stderr, so that the output of a command can be piped.
"""

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gossamer.record.progress import TrainedHere, is_quiet, printable, training_counts
from gossamer.report.metrics import METRICS
from gossamer.report.page.view import standings
from gossamer.report.reading.follow import FollowedRun, figure_of
from gossamer.report.reading.lines import RunFile

log = logging.getLogger("gossamer")
_EVERY_S = 0.5
"""Seconds between two reads of the folder."""
_LOOK_S, _LAST_LOOK_S = 0.1, 2.0
"""Time limits of one read, and of the last one of a run."""
_LONGEST_SILENCE_S = 30.0
_FIRST_LINE_S, _BETWEEN_LINES_S, _SHARE_OF_TIME = 1.0, 5.0, 0.1
"""For a run that trains here: seconds until the first line; between later ones, or this share of the elapsed time."""
_PRESENT = ("training", "silent", "finished")
_UNKNOWN = "–"
_LIVE = [metric for metric in METRICS if metric.live]
_SPARE = ("priced", "in exchange", "sent", "disagreement", "tokens/s", "step", "workers", "left", "val of", "loss")
"""How the names of those figures begin that a narrow terminal leaves out, the first of them first."""
_LONGEST_NAME = 32


class Terminal:
    """Shows runs, one or several at a time, on stderr; silent inside `gossamer.record.progress.quieted`.

    On a terminal it is a table with a row for each run. Elsewhere there is a line for each evaluation, at the end of a run and at
    least every 30 s. For a run trained by this process or its children there are lines within rounds too: after a
    second, and then every 5 s, later 30 s.

    Args:
        console: where to print.
        now_s: the clock of rates and of those 30 s.
        looks: whether a thread reads the folder twice a second; else `look` does.
    Cost: a thread that reads appended lines, at most 0.1 s at a time.

    >>> import tempfile
    >>> with Terminal(Console(file=sys.stdout, width=60, force_terminal=False), looks=False) as terminal:
    ...     terminal.follow("ring", Path(tempfile.mkdtemp()))  # it has no round yet, and says so after 30 s
    """

    def __init__(
        self, console: Console | None = None, *, now_s: Callable[[], float] = time.monotonic, looks: bool = True
    ) -> None:
        self._console = console or Console(stderr=True)
        self._now_s, self._looks = now_s, looks
        self._shown: list[_Shown] = []
        # The thread reads all runs while the caller adds and ends them; concurrent reads would print lines twice.
        self._quiet, self._lock, self._ended = is_quiet(), threading.Lock(), threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Terminal":
        if self._quiet:
            return self
        if self._console.is_terminal:
            before = sys.stderr
            redirects = sys.stdout.isatty()
            live = Live(console=self._console, auto_refresh=False, redirect_stdout=redirects, vertical_overflow="crop")
            self._live = self._open.enter_context(live)
            for handler in logging.getLogger().handlers:  # warnings are printed above the table
                if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                    handler.setStream(sys.stderr)
                    self._open.callback(handler.setStream, before)
        if self._looks:
            # In a thread, to update seconds on the screen during training; a round may last minutes.
            self._thread = threading.Thread(target=self._go_on, name="gossamer-terminal", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.ended()
        with contextlib.suppress(OSError):
            self._open.close()

    def follow(self, label: str, folder: Path, every: int = 0, share: float = 1.0) -> None:
        """Shows the run in this folder from now on.

        Args:
            folder: where it writes, or will.
            every: rounds between lines where no table is shown; 0 for only the lines that are due.
            share: the share of all workers whose steps this process and its children count; the others train elsewhere.
        """
        if self._quiet:
            return
        with self._lock:
            self._shown.append(_Shown(label, folder.resolve(), every, share, self._now_s()))

    def ended(self, label: str | None = None) -> None:
        """Shows the end of the run with this label, or of all, and frees data needed only by a running one."""
        with self._lock:
            self._show(_LAST_LOOK_S, over=[one for one in self._unfinished() if label in (None, one.label)])

    def look(self) -> None:
        """Shows new lines."""
        with self._lock:
            self._show(_LOOK_S)

    def _go_on(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()

    def _unfinished(self) -> "list[_Shown]":
        return [one for one in self._shown if not one.is_over]

    def _show(self, patience_s: float, *, over: "Sequence[_Shown]" = ()) -> None:
        """Reads the running runs, or the finished ones for the last time. Failures here never end training."""
        if self._quiet:
            return
        try:
            self._show_guarded(patience_s, over)
        except OSError as error:
            self._quiet = True
            if error.filename is not None:  # else the terminal or the reader of its lines is gone
                log.warning("the progress of the run is shown no longer (%s); training is not affected", error)
        except Exception as error:
            self._quiet = True
            log.warning("the progress of the run is shown no longer (%r); training is not affected", error)

    def _show_guarded(self, patience_s: float, over: "Sequence[_Shown]") -> None:
        now_s, lines = self._now_s(), list[str]()
        for one in over or self._unfinished():
            # With several running runs, this process's counters cannot be attributed to one.
            one.look(patience_s, now_s, training_counts() if len(self._unfinished()) == 1 else None)
            lines += one.lines(now_s, over=one in over) if self._live is None else []
        for one in over:
            one.end()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        for line in lines:
            self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        """The newest runs that fit the terminal; a figure that none of them has is left out."""
        rows = [(one.label, one.cells) for one in self._shown][-max(1, self._console.height - 4) :]
        heads = list(dict.fromkeys(head for _, cells in rows for head, cell in cells.items() if cell != _UNKNOWN))
        longest = max([len("run"), *(cell_len(printable(label)) for label, _ in rows)])
        room = self._console.width - min(longest, _LONGEST_NAME)
        widths = {head: max(len(head), *(len(cells.get(head, _UNKNOWN)) for _, cells in rows)) for head in heads}
        for spare in _SPARE:
            if sum(widths.values()) + 2 * len(widths) > room:
                widths = {head: w for head, w in widths.items() if not head.startswith(spare)}
        heads = [*widths]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=_LONGEST_NAME)
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for label, cells in rows:
            table.add_row(Text(printable(label)), *(Text(cells.get(head, _UNKNOWN)) for head in heads))
        return table


class _Shown:
    """One run, and its printed state."""

    def __init__(self, label: str, folder: Path, every: int, share: float, now_s: float) -> None:
        self.label, self._every, self._share = label, every, share
        self._run: FollowedRun | None = FollowedRun(label, folder)
        self._all_read = self._run.look(time.monotonic() + _LAST_LOOK_S)
        """Whether what a resumed run had recorded before is read."""
        self._told_s, self._has_line = now_s, False
        self._reported = self._seen = self._run.done
        self._evaluated = self._newest_evaluation()
        """Earlier evaluations of a resumed run are not printed again."""
        self._before: tuple[float, int, float] | None = None
        """Time, rounds and tokens at the first observed training, the baseline of rates."""
        self._start = self._run.done, _tokens(self._run)
        self._followed_s, self._here = now_s, _LocalProgress(self._run.done, training_counts())
        self._training: list[bool] = []
        """Which workers are training; a validation is awaited from them alone."""
        self._moves = False
        """Whether this process has trained some of it."""
        self.cells: dict[str, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether the run is over."""
        return self._run is None

    def end(self) -> None:
        """Frees everything but its row."""
        self._run = None

    def look(self, patience_s: float, now_s: float, here: TrainedHere | None) -> None:
        """Reads new lines, and updates its row.

        Args: `here` has this process's counters, if all are of this run.
        """
        run = self._run
        assert run is not None
        was_read, self._all_read = self._all_read, run.look(time.monotonic() + patience_s) or self._all_read
        newest = self._newest_evaluation()
        self._evaluated = min(self._evaluated, newest) if was_read else newest
        is_rewound = run.done < self._reported  # to a checkpoint
        if is_rewound:
            self._reported = self._seen = run.done
        if is_rewound or not was_read:
            self._before, self._start = None, (run.done, _tokens(run))
            self._here = _LocalProgress(run.done, here or training_counts())
        if self._before is None and (run.done, _tokens(run)) != self._start:
            self._before = now_s, run.done, _tokens(run)
        if here is None:
            self._here = _LocalProgress(run.done, training_counts())
        self._here = self._here.at(now_s, here)
        self._moves = here is not None and here.inner_steps > self._here.first.inner_steps
        words = [] if run.file is None else standings(run, time.time())
        self._training = [word == "training" for word in words]
        self.cells = {"round": _UNKNOWN} if run.file is None else self._figures(now_s, words)

    def lines(self, now_s: float, *, over: bool) -> list[str]:
        """The lines to print without a table."""
        run = self._run
        assert run is not None
        if not (self._all_read or over):
            return []
        silence_s = _LONGEST_SILENCE_S
        if self._moves and run.file is not None and run.done < run.file.rounds:
            past_s = now_s - self._followed_s
            apart_s = max(_BETWEEN_LINES_S, _SHARE_OF_TIME * past_s)
            silence_s = min(silence_s, apart_s if self._has_line else _FIRST_LINE_S)
        late = now_s - self._told_s >= silence_s
        if run.file is None:
            lines = [f"{self.label}: no round yet"] if late else []
        else:
            lines, rounds = [], run.file.rounds
            for round, figures in self._evaluations(over=over):
                shown, cells = round + 1, {"loss": _number(run.losses.mean_at(round)), **figures}
                if shown == run.done:  # rates and bytes only apply to the current round
                    cells = {**self.cells, **figures}
                elif shown < self._reported:  # a later round had its line before all workers had validated this one
                    shown, cells = run.done, {**self.cells, **_as_of(round, figures)}
                lines.append(f"{self.label}: round {shown} of {rounds}  {_words(cells)}")
                self._reported, self._evaluated = max(self._reported, shown), round
            passed = self._every > 0 and self._seen // self._every > self._reported // self._every
            if (over and run.done > self._reported) or (not lines and (late or passed)):
                lines.append(f"{self.label}: round {run.done} of {rounds}  {_words(self.cells)}")
                self._reported = run.done
            self._seen = run.done  # printed at the next read, when the round's validation is written too
        self._told_s, self._has_line = (now_s, True) if lines else (self._told_s, self._has_line)
        return lines

    def _figures(self, now_s: float, words: Sequence[str]) -> dict[str, str]:
        run = self._run
        assert run is not None and run.file is not None
        done, rounds = run.done, run.file.rounds
        validated, validation = next(reversed(_scored(run, self._training)), (-1, {}))
        per_s = left_s = math.nan
        if self._before is not None and now_s > self._before[0]:
            past_s = now_s - self._before[0]
            per_s = (_tokens(run) - self._before[2]) / past_s
            left_s = past_s * (rounds - done) / (done - self._before[1]) if done > self._before[1] else math.nan
        step = _UNKNOWN
        if self._moves and done < rounds:
            steps, pace = self._here.progress(run.file, self._share)
            step = f"{steps}/{run.file.steps}"
            if pace is not None:
                per_s, left_s = pace.tokens_per_s, pace.left_s
        # Measured seconds of a real run; those of a simulation are priced, without actual waiting.
        clock = None if None in run.spent_s else next(iter(run.spent_s), None)
        spent, where = run.spent_s.get(clock), "in exchange" if clock is None else f"priced exchange on {clock}"
        waited = 0.0 if spent is None else float(spent[:, 1:3].sum()) / run.here
        return {
            "round": f"{done}/{rounds}",
            "loss": _number(run.losses.mean_at(done - 1)),
            **(validation if validated + 1 == done else _as_of(validated, validation)),
            "step": step,
            "tokens/s": _number(per_s or math.nan),
            "sent": _size(float(np.nansum(run.sent.values())) / run.here) if run.sent.rows else _UNKNOWN,
            where: _time(waited or math.nan),  # none at all in a simulation without a network
            "workers": _counted(words) if done else _UNKNOWN,
            "left": _time(left_s) if done < rounds else _UNKNOWN,
        }

    def _newest_evaluation(self) -> int:
        """The last round with a validation; -2 before any."""
        assert self._run is not None
        return max((round for round, _ in _scored(self._run)), default=-2)

    def _evaluations(self, *, over: bool) -> list[tuple[int, dict[str, str]]]:
        """Rounds with an unprinted validation and its figures; at the end also incomplete ones.

        Those that come behind a line of a later round are left out where there is a newer one.
        """
        assert self._run is not None
        new = [one for one in _scored(self._run, None if over else self._training) if one[0] > self._evaluated]
        late = sum(round + 1 < self._reported for round, _ in new)
        return new[late:] or new[-1:]


class _Pace(NamedTuple):
    tokens_per_s: float
    left_s: float


class _LocalProgress(NamedTuple):
    """This process's progress in a run, also between two reads of its folder."""

    done: int
    """Completed rounds of the run when it was first observed."""
    first: TrainedHere
    """This process's counters at that time."""
    began: tuple[float, TrainedHere] | None = None
    """Time and counters at the first step observed since, the baseline of rates."""
    now: tuple[float, TrainedHere] | None = None

    def at(self, now_s: float, here: TrainedHere | None) -> "_LocalProgress":
        # While it waits for others it makes no step: the time of its last one counts, so that the time left does not grow.
        if here is None or here == (self.first if self.now is None else self.now[1]):
            return self
        return self._replace(began=self.began or (now_s, here), now=(now_s, here))

    def progress(self, file: RunFile, share: float) -> tuple[int, _Pace | None]:
        """The average inner steps of a worker, and the speed of all workers once there are two observations.

        Args: `share` as of `Terminal.follow`.
        """
        assert self.began is not None and self.now is not None
        (began_s, began), (now_s, now) = self.began, self.now
        ahead = max(0, now.inner_steps - self.first.inner_steps) / share
        all_steps = file.steps_before(file.rounds)
        steps = min(file.steps_before(self.done) + ahead, all_steps)
        mean = int(steps * file.steps / all_steps)
        past_s, trained_steps = now_s - began_s, (now.inner_steps - began.inner_steps) / share
        if past_s <= 0 or trained_steps == 0:
            return mean, None
        return mean, _Pace((now.tokens - began.tokens) / share / past_s, (all_steps - steps) * past_s / trained_steps)


def _scored(run: FollowedRun, training: Sequence[bool] | None = None) -> list[tuple[int, dict[str, str]]]:
    """The figures of each validation by round, those of the mean model and the mean of the workers' own under their names.

    Args: `training` as of `FollowedRun.own_losses`.
    """
    by_round: dict[int, dict[str, str]] = {}
    for line in run.evaluations.lines():
        by_round[line["round"]] = {one.live: _number(figure_of(line.get(one.name))) for one in _LIVE}
    for round, loss in run.own_losses(training):
        by_round.setdefault(round, {})["val of workers"] = _number(loss)
    names = [one.live for one in _LIVE]
    return [(round, {name: shown.get(name, _UNKNOWN) for name in names}) for round, shown in sorted(by_round.items())]


def _as_of(round: int, figures: Mapping[str, str]) -> dict[str, str]:
    """Figures of a validation shown at a later round, with their round."""
    return {name: cell if cell == _UNKNOWN else f"{cell} (round {round + 1})" for name, cell in figures.items()}


def _tokens(run: FollowedRun) -> float:
    """Tokens of all workers so far: those without lines here count as the others do."""
    here = float(np.nan_to_num(run.tokens.values()).max(axis=0).sum()) if run.tokens.rows else 0.0
    return here * (len(run.rounds_of) / run.here)


def _words(cells: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {cell}" for name, cell in cells.items() if name != "round" and cell != _UNKNOWN)


def _counted(words: Sequence[str]) -> str:
    """The number of workers alive, of all; or of those with lines in this folder, if others are on other machines.

    >>> _counted(["training", "gone"]), _counted(["training", "empty", "empty"])
    ('1/2', '1 here of 3')
    """
    present = sum(word in _PRESENT for word in words)
    return f"{present} here of {len(words)}" if "empty" in words else f"{present}/{len(words)}"


def _number(value: float) -> str:
    """A figure in a few characters.

    >>> _number(2.34567), _number(9999.7), _number(123456.0), _number(999_999.0), _number(math.nan)
    ('2.346', '10k', '123k', '1M', '–')
    """
    if not math.isfinite(value):
        return _UNKNOWN
    if abs(value) < 9999.5:
        return f"{value:.4g}"
    value = float(f"{value:.3g}")  # rounding may add a digit before the point
    power = min((len(f"{abs(value):.0f}") - 1) // 3, 4)
    return f"{value / 1000**power:.3g}{' kMGT'[power]}"


def _size(count: float) -> str:
    """Bytes in a few characters.

    >>> _size(640), _size(1_234_567)
    ('640 B', '1.23 MB')
    """
    text = _number(count)
    return f"{count:.0f} B" if count < 9999.5 else f"{text[:-1]} {text[-1]}B"


def _time(seconds: float) -> str:
    """A duration in a few characters.

    >>> _time(3.14159), _time(150), _time(9000), _time(math.nan)
    ('3.1 s', '2 min', '2.5 h', '–')
    """
    if not math.isfinite(seconds):
        return _UNKNOWN
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
