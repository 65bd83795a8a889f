"""The inputs of a real server, in order: `arrivals.jsonl` in its run folder. Its run can be replayed from them.

A server's decisions are a function of these lines, their times included (`gossamer.run.replay.served`). Lines are only appended:
a server that resumes adds a line "serve", after which the state of its checkpoint counts.

* `{"event":"serve","time_s":t,"workers":n,"round":r,"digest":"..."}`: a process of the server begins after r rounds of the run
  with this digest.
* `{"event":"join","time_s":t,"worker":i,"checkpoint":r}`: a worker joined and restored its own checkpoint of round r; 0
  for none.
* `{"event":"push","time_s":t,"worker":i,"phase":k,"fragment":p}`: the push after its phase number k has arrived.
* `{"event":"leave","time_s":t,"worker":i}`
* `{"event":"tick","time_s":t}`: enough time had passed for the server to act, such as closing a quorum.
"""

import os
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from gossamer.errors import DataError
from gossamer.record.logs.event_log import EventLog, LogWriter, Seconds, Whole

_MOST_LINES = 1 << 26


class ServerInput(NamedTuple):
    """One line of the file; fields that its event does not have are 0."""

    event: str
    time_s: Seconds
    """Seconds since the run began."""
    worker: Whole = 0
    phase: Whole = 0
    fragment: Whole = 0
    checkpoint: Whole = 0
    workers: Annotated[int, Field(ge=1, lt=1 << 31)] = 0
    round: Whole = 0
    digest: Annotated[str, Field(max_length=128)] = ""


_FIELDS = {
    "serve": ("workers", "round", "digest"),
    "join": ("worker", "checkpoint"),
    "push": ("worker", "phase", "fragment"),
    "leave": ("worker",),
    "tick": (),
}
_LOG = EventLog[ServerInput](
    "arrivals",
    dict.fromkeys(_FIELDS, ServerInput),
    fields={word: ("event", "time_s", *fields) for word, fields in _FIELDS.items()},
)


class ArrivalWriter(LogWriter[ServerInput]):
    """Writes the inputs of one server process; every line is flushed at once.

    Args: `resume` keeps the lines of the earlier processes of the server.

    >>> import tempfile
    >>> with ArrivalWriter(Path(tempfile.mkdtemp()), resume=False) as log:
    ...     log.append(ServerInput("serve", 0.0, workers=1, digest="d"))
    ...     log.append(ServerInput("join", 1.5, worker=0))
    >>> read_arrivals(log.path.parent)[1].time_s
    1.5
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        super().__init__(_LOG, arrivals_file(folder), resume)


def arrivals_file(run_folder: Path) -> Path:
    """The file of a real server's inputs."""
    return Path(run_folder) / "arrivals.jsonl"


def read_arrivals(run_folder: Path) -> list[ServerInput]:
    """The inputs of the server of a real run, in their order; the first is "serve".

    Raises: DataError when there is no such file, or a line is invalid.
    """
    path = arrivals_file(run_folder)
    if not os.path.lexists(path):  # a dangling link is an unreadable file
        raise DataError(
            f"'{run_folder}' has no {path.name}, which the server of gossamer train writes; give the run folder of a server"
        )
    items: list[ServerInput] = []
    for where, (item, _) in _LOG.read(path):
        before = items[-1] if items else None
        begins = item.event == "serve" and item.round == 0
        if (before is None) != begins:
            raise DataError(f"{where} has event '{item.event}', but a file begins with one 'serve' of round 0")
        if before is not None and item.event != "serve" and item.time_s < before.time_s:
            raise DataError(
                f"{where}: 'time_s' is {item.time_s}, before the {before.time_s} of the line above; restore their order"
            )
        if len(items) == _MOST_LINES:
            raise DataError(f"{path} has more than {_MOST_LINES} lines; give the record of a shorter run")
        items.append(item)
    if not items:
        raise DataError(f"{path} has 0 lines, but the record of a server begins with 'serve'; give a whole run folder")
    return items
