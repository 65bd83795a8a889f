"""The records of one server process: inputs, events, and completed rounds, which it validates and saves.

Validations and snapshots do not block: a completed round is validated and saved in a thread, from the server's state at
its end, while the next messages are absorbed and answered. A round that is due before the last one is done waits for
it: at most one is in progress.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch

from gossamer.clock import Record
from gossamer.errors import CheckpointError
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.logs.arrivals import ArrivalWriter, ServerInput
from gossamer.record.logs.events import EventWriter
from gossamer.record.machines import Threads
from gossamer.record.whole_files import worker_suffix
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.journal import EventJournal, Journal, saver
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.config.resolved import RunSettings
from gossamer.run.participant.agreement import HERE


class ServerFiles(NamedTuple):
    """The output files of a server process."""

    record: RunFolder
    events: EventWriter
    arrivals: ArrivalWriter | None = None
    """The log of inputs, written first; None in a replay."""
    aside: ThreadPoolExecutor | None = None
    """The thread that validates and saves; None to do so synchronously."""


class ServerRecords:
    """The records of one server process; it writes in one thread, with the seconds since the run began.

    Args:
        state: the content of a checkpoint as of now; `x` in it are the parameters.
        round: completed rounds when this process begins, with the `steps` that count for them.
    """

    def __init__(
        self,
        run: RunSettings,
        folder: Path,
        files: ServerFiles,
        probe: Probe,
        state: Callable[[], dict[str, Any]],
        *,
        begin_s: float,
        round: int,
        steps: int,
    ) -> None:
        self.record, self.events, self._arrivals, self._aside = files
        self._run, self._folder, self._state = run, folder, state
        self._in_flight = Future[None]()
        self._in_flight.set_result(None)
        self._ended: dict[str, Any] = {}
        """The server's state at the end of the round being validated and saved. Rules never write into an old state."""
        self.now_s = begin_s
        """The time of the newest input."""
        self.asked: Callable[[], bool] = lambda: False
        """Whether a stop after the current round was requested."""
        self.stops: Collection[int] = ()
        """Rounds after which a recorded server saved on a stop request, for the replay."""
        self._stopped: int | None = None
        kept = 3 if self._arrivals is None else 2
        save = saver(lineage_of(run, folder), folder, lambda: [(run.workers, self._ended)], keep=kept)
        self._journal = Journal(run, lambda: files.record, lambda: {"loss": probe.loss(self._ended["x"])}, save)
        self.journal = EventJournal(self._journal, lambda: files.events, end_round=self._end_round)
        self.journal.round, self.journal.steps = round, steps

    def write(self, event: str, now_s: float, **fields: Any) -> None:
        """Writes an input, before its effect is visible."""
        self.now_s = now_s
        # Recorded before its effect, so that a replay reproduces every answer sent to a worker.
        if self._arrivals is not None:
            self._arrivals.append(ServerInput(event, now_s, **fields))

    def log(self, event: Record, local_steps: Sequence[int] = ()) -> None:
        """Writes an event, and ends the rounds that end with it."""
        self.journal.log(event, self.now_s, local_steps)

    def check(self) -> None:
        """Re-raises errors of validating or saving, and KeyboardInterrupt once a requested stop has saved everything."""
        if self._in_flight.done():
            self._in_flight.result()
            if self._stopped is not None:
                done = f"{self._stopped} of {self._run.rounds}"
                raise KeyboardInterrupt(
                    f"stopped after round {done}, and saved; resume with --resume {quote(str(self._folder))}"
                )

    def begin(self) -> None:
        """Validates the initial values."""
        self._ended = self._state()
        self._write(self.journal.begin)

    def close(self, now_s: float) -> None:
        """Validates and saves after the last round."""
        self.now_s = self.journal.time_s = now_s
        self.journal.end()
        self._in_flight.result()

    def _end_round(self, finished: int, **behind: Any) -> None:
        """Schedules validation and saving of a completed round, after the previous one."""
        if self._stopped is not None:  # later rounds belong to the resumed process
            return
        run, stops = self._run.loop, self.asked() and finished < self._run.rounds
        kept = stops or finished in self.stops
        if not kept and not any(self._run.due(every, finished) for every in (run.eval_every, run.checkpoint_every)):
            return
        self._in_flight.result()  # the previous one still reads `_ended`, and checkpoints must be written in order
        self._ended = {**self._state(), "time_s": self.now_s}

        def write() -> None:
            self._journal.end_round(finished, **behind)
            if kept:
                self._journal.save(finished)

        self._write(write)
        self._stopped = finished if stops else None

    def _write(self, task: Callable[[], None]) -> None:
        """Runs a task in the writing thread, or at once without one."""
        if self._aside is None:
            task()
        else:
            self._in_flight = self._aside.submit(task)


@contextlib.contextmanager
def open_files(
    run: RunSettings, folder: Path, start: int | None, *, replays: Threads | None = None, aside: bool = True
) -> Iterator[ServerFiles]:
    """The files of a server process, which a replay writes for the workers as well.

    Args:
        start: the number of completed rounds, whose lines are kept; 0 for a restarted run, None for a new one.
        replays: the threads of all, in a replay.
        aside: whether to validate and save in another thread, where it is no replay.
    Raises: CheckpointError and ConfigError.
    """
    n = run.workers
    who, suffix, threads = (n, worker_suffix(n), None) if replays is None else (None, "", (replays, run.owners.stop))
    with contextlib.ExitStack() as files:
        record = files.enter_context(
            RunFolder(folder, run.document, run.record, worker=who, resume_round=start, threads=threads)
        )
        events = files.enter_context(EventWriter(folder, network=HERE, workers=n, suffix=suffix, resume_round=start))
        arrivals = thread = None
        if replays is None:
            arrivals = files.enter_context(ArrivalWriter(folder, resume=bool(start)))
        if replays is None and aside:
            thread = files.enter_context(
                ThreadPoolExecutor(1, "aside", torch.set_num_threads, (torch.get_num_threads(),))
            )
        yield ServerFiles(record, events, arrivals, thread)


def restored(run: RunSettings, folder: Path, start: int | None, *, loads: bool = True) -> dict[str, Any]:
    """The server's checkpoint of a round, empty without one or where it is not to be loaded; later ones are removed.

    Raises: CheckpointError for one that is damaged or of a simulation.
    """
    if start is None:
        return {}
    store, n = folder / "checkpoints", run.workers
    saved: dict[str, Any] = checkpoint.load(store, start, n, lineage_of(run, folder)) if start and loads else {}
    if "run" in saved:
        raise CheckpointError(
            f"'{folder}' holds checkpoints of a simulation over virtual time, from which no real server continues; go on with "
            f"gossamer simulate --resume {quote(str(folder))}"
        )
    checkpoint.rewind(store, start, n)
    return saved
