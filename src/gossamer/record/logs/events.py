"""The event log of an event-driven run: a line for each local phase, message, update and absence.

Such a run leaves `events.jsonl` in place of a trace, a real one a file for each process. Its seconds, virtual or measured,
decided what was computed, so it cannot be priced on another network (`gossamer.record.logs.trace` can). A line of round
r was written during the r-th part of the run; a round is as many inner steps of all workers together as a synchronous
round has.

* `{"event":"start","network":"uneven","workers":4}`: whose seconds these are.
* `{"event":"phase","worker":i,"number":k,"start_s":a,"end_s":b,"steps":h,"tokens":t}`
* `{"event":"push","source":i,"target":-1,"fragment":p,"bytes":n,"start_s":a,"end_s":b}`, also "fetch" and "meet"; -1 is the
  server.
* `{"event":"report","region":g,"fragment":p,"bytes":n,"start_s":a,"end_s":b}`, to the global server, and "merge", its answer.
* `{"event":"update","fragment":p,"workers":[i],"ages":[a],"time_s":t}`
* `{"event":"leave","worker":i,"time_s":t}`, also "return".
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gossamer.errors import DataError
from gossamer.record.jsonl import Seen, folder_lines, json_line, keep_records
from gossamer.record.logs.event_log import EventLog, Seconds, Whole
from gossamer.record.whole_files import Appender, LineWriter, make_folder

_MAX_CELLS = 2**28


_Round = Annotated[int, Field(ge=-1, lt=2**31)]
_End = Annotated[int, Field(ge=-1, lt=2**31)]


class _Start(NamedTuple):
    network: str
    workers: Annotated[int, Field(ge=1, lt=2**20)]


class _Phase(NamedTuple):
    worker: Whole
    number: int
    start_s: Seconds
    end_s: Seconds
    steps: int
    tokens: int


class _Transfer(NamedTuple):
    source: _End
    target: _End
    fragment: int
    bytes: Annotated[int, Field(ge=0, lt=2**50)]
    start_s: float
    end_s: Seconds


class _Relay(NamedTuple):
    region: Whole
    fragment: int
    bytes: Annotated[int, Field(ge=0, lt=2**50)]
    start_s: float
    end_s: Seconds


class _Update(NamedTuple):
    fragment: int
    workers: list[Whole]
    ages: list[Whole]
    time_s: Seconds


class _Absence(NamedTuple):
    worker: Whole
    time_s: float


EVENTS = EventLog[NamedTuple](
    "events",
    {
        "start": _Start,
        "phase": _Phase,
        **dict.fromkeys(("push", "fetch", "meet"), _Transfer),
        **dict.fromkeys(("report", "merge"), _Relay),
        "update": _Update,
        **dict.fromkeys(("leave", "return"), _Absence),
    },
    before={"round": _Round},
)


class EventTotals(NamedTuple):
    """Totals of the seconds, bytes and ages of an event-driven run."""

    network: str
    """Whose seconds these are."""
    compute_s: NDArray[np.float64]
    """Seconds that each worker trained, `[rounds, workers]`."""
    end_s: NDArray[np.float64]
    """The time of the last event of each round, `[rounds]`."""
    sent_bytes: NDArray[np.int64]
    """Bytes that each worker sent, `[workers]`."""
    ages: tuple[int, ...]
    """Ages of all messages that a server absorbed, in the order of its updates."""
    absorbed: NDArray[np.int64]
    """Messages of each worker that a server absorbed, `[workers]`."""


class EventWriter(LineWriter):
    """Writes the events of one process; every line is flushed at once.

    Args:
        suffix: of the file's name, such as "-003" for a worker of a real run.
        resume_round: the first round to run again: lines of it and of later rounds are dropped. None keeps all.
        void: whether a line of an earlier round is dropped too.

    >>> import tempfile
    >>> with EventWriter(Path(tempfile.mkdtemp()), network="even", workers=1) as log:
    ...     log.write(0, "phase", worker=0, number=0, start_s=0.0, end_s=1.5, steps=15, tokens=960)
    >>> read_events(log.path.parent).end_s
    array([1.5])
    """

    def __init__(
        self,
        folder: Path,
        *,
        network: str,
        workers: int,
        suffix: str = "",
        resume_round: int | None = None,
        void: Callable[[Mapping[str, Any]], bool] = lambda line: False,
    ) -> None:
        make_folder(folder)
        self.path = folder / f"events{suffix}.jsonl"
        kept: Sequence[Mapping[str, Any]] = []
        if resume_round is not None:
            kept = keep_records(self.path, EVENTS.lines, lambda line: line["round"] < resume_round and not void(line))
        super().__init__(self.path)
        if not any(line["event"] == "start" for line in kept):
            self.write(-1, "start", network=network, workers=workers)

    def write(self, round: int, event: str, **fields: Any) -> None:
        """Appends one event; `fields` are plain JSON values."""
        self._file.write(json_line({"round": round, "event": event, **fields}))

    def drop(self, void: Callable[[Mapping[str, Any]], bool]) -> None:
        """Removes these lines."""
        self._file.close()
        keep_records(self.path, EVENTS.lines, lambda line: not void(line))
        self._file = Appender(self.path)


def has_events(run_folder: Path) -> bool:
    """Whether a run left events, and so had no rounds."""
    return any(Path(run_folder).glob("events*.jsonl"))


def writer_of(line: Mapping[str, Any], workers: int) -> int | None:
    """The process of a real run that writes this line, the server being number `workers`; None where it may be any."""
    match line["event"]:
        case "phase":
            return line["worker"]
        case "fetch" | "meet":
            return line["target"]
        case "push" | "update":
            return workers
    return None


def read_events(run_folder: Path, *, seen: Seen | None = None) -> EventTotals | None:
    """The events of a run from all the files its processes wrote; None for a run in rounds.

    Args: `seen` as in `folder_lines`.
    Raises: DataError for a malformed line.
    """
    if not has_events(run_folder):
        return None
    network, workers, rounds = "", 0, 0
    phases: list[tuple[int, int, float]] = []
    ends: list[tuple[int, float]] = []
    sent: list[tuple[int, int]] = []
    ages: list[int] = []
    absorbed: list[int] = []
    lines = folder_lines(run_folder, "events", EVENTS.lines, seen=seen, owner=lambda line: writer_of(line, workers))
    for _, _, line in lines:
        round = line["round"]
        rounds = max(rounds, round + 1)
        match line["event"]:
            case "start":
                network, workers = f"{line['network']:.80}", max(workers, line["workers"])
            case "phase":
                phases.append((round, line["worker"], max(0.0, line["end_s"] - line["start_s"])))
                ends.append((round, line["end_s"]))
            case "push" | "fetch" | "meet" | "report" | "merge":
                if line.get("source", -1) >= 0:
                    sent.append((line["source"], line["bytes"]))
                ends.append((round, line["end_s"]))
            case "update":
                ages += line["ages"]
                absorbed += line["workers"]
                ends.append((round, line["time_s"]))
    if rounds * workers > _MAX_CELLS:
        raise DataError(
            f"the events span {rounds} rounds of {workers} workers but at most {_MAX_CELLS} cells are allowed; "
            "look for a line with a wrong round"
        )
    stranger = max((i for i in [*(p[1] for p in phases), *(s[0] for s in sent), *absorbed]), default=-1)
    if stranger >= workers:
        raise DataError(f"the events name worker {stranger} of {workers}; gather the files of one run only")
    compute_s, end_s = np.zeros((rounds, workers)), np.zeros(rounds)
    for round, worker, seconds in phases:
        compute_s[max(round, 0), worker] += seconds
    for round, seconds in ends:
        end_s[max(round, 0)] = max(end_s[max(round, 0)], seconds)
    sent_bytes = np.zeros(workers, np.int64)
    for source, size in sent:
        sent_bytes[source] += size
    counts = np.bincount(np.array(absorbed, np.int64), minlength=workers)
    return EventTotals(network, compute_s, np.maximum.accumulate(end_s), sent_bytes, tuple(ages), counts)
