"""The inputs of a real server, in order: `arrivals.jsonl` in its run folder. Its run can be computed again from them.

A server's decisions are a function of these lines, their times included (`gossamer.run.replay.served`). Lines are only appended:
a server that resumes adds a line "serve", after which the state of its checkpoint counts.

* `{"event":"serve","time_s":t,"workers":n,"round":r,"digest":"..."}`: a process of the server begins after r rounds of the run
  with this digest.
* `{"event":"join","time_s":t,"worker":i,"checkpoint":r}`: a worker joined and restored its own checkpoint of round r; 0 is none.
* `{"event":"push","time_s":t,"worker":i,"phase":k,"fragment":p}`: the push after its phase number k has arrived.
* `{"event":"leave","time_s":t,"worker":i}`
* `{"event":"tick","time_s":t}`: enough time had passed for the server to act, such as closing a quorum.
"""

from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import DataError
from gossamer.record.jsonl import json_line, json_lines, short
from gossamer.record.whole_files import LineWriter, make_folder, writing

__all__ = ["ArrivalWriter", "ServerInput", "arrivals_file", "read_arrivals"]

_LIMIT, _LIMIT_LINES, _LIMIT_DIGEST = 1 << 31, 1 << 26, 128
_KEYS = {
    "serve": ("workers", "round", "digest"), "join": ("worker", "checkpoint"), "push": ("worker", "phase", "fragment"),
    "leave": ("worker",), "tick": (),
}  # fmt: skip


class ServerInput(NamedTuple):
    """One line of the file; what its event does not have is 0."""

    event: str
    time_s: float
    """Since the run began."""
    worker: int = 0
    phase: int = 0
    fragment: int = 0
    checkpoint: int = 0
    workers: int = 0
    round: int = 0
    digest: str = ""


class ArrivalWriter(LineWriter):
    """Writes the inputs of one server process; every line is handed to the system at once.

    Args: `resume` keeps the lines of the earlier processes of the server.

    >>> import tempfile
    >>> with ArrivalWriter(Path(tempfile.mkdtemp()), resume=False) as log:
    ...     log.write(ServerInput("serve", 0.0, workers=1, digest="d"))
    ...     log.write(ServerInput("join", 1.5, worker=0))
    >>> read_arrivals(log.path.parent)[1].time_s
    1.5
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        make_folder(folder)
        self.path = arrivals_file(folder)
        with writing(self.path):
            if resume and self.path.exists():
                self._end_last_line()
            elif not resume:
                self.path.unlink(missing_ok=True)
        super().__init__(self.path)

    def write(self, item: ServerInput) -> None:
        """Appends one input."""
        keys = ("event", "time_s", *_KEYS[item.event])
        self._file.write(json_line({key: getattr(item, key) for key in keys}))

    def _end_last_line(self) -> None:
        """Removes a last line that a killed server left half-written, as nothing may follow it."""
        content = self.path.read_bytes()
        with self.path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def arrivals_file(run_folder: Path) -> Path:
    """Where a real server writes its inputs."""
    return Path(run_folder) / "arrivals.jsonl"


def read_arrivals(run_folder: Path) -> list[ServerInput]:
    """The inputs of the server of a real run, in their order; the first is "serve".

    Raises: DataError when there is no such file, or a line is invalid.
    """
    path = arrivals_file(run_folder)
    if not path.exists():
        raise DataError(
            f"'{run_folder}' has no {path.name}, which the server of gossamer train writes; give the run folder of a server"
        )
    items: list[ServerInput] = []
    for where, line in json_lines(path):
        item, before = _item(line, where), items[-1] if items else None
        begins = item.event == "serve" and item.round == 0
        if (before is None) != begins:
            raise DataError(f"{where} has event '{item.event}', but a file begins with one 'serve' of round 0")
        if before is not None and item.event != "serve" and item.time_s < before.time_s:
            raise DataError(
                f"{where}: 'time_s' is {item.time_s}, before the {before.time_s} of the line above; restore their order"
            )
        if len(items) == _LIMIT_LINES:
            raise DataError(f"{path} has more than {_LIMIT_LINES} lines; give the record of a shorter run")
        items.append(item)
    if not items:
        raise DataError(f"{path} has 0 lines, but the record of a server begins with 'serve'; give a whole run folder")
    return items


def _item(line: dict[str, Any], where: str) -> ServerInput:
    event, time_s = line.get("event"), line.get("time_s")
    if not isinstance(event, str) or event not in _KEYS or set(line) != {"event", "time_s", *_KEYS[event]}:
        raise DataError(
            f"{where} has event {short(event)} and the keys {sorted(line)!r:.200}; allowed are {_KEYS}; repair the line"
        )
    if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not 0 <= time_s < 1e12:
        raise DataError(f"{where}: 'time_s' is {short(time_s)} but must be seconds from 0 to 1e12; repair the line")
    for key in _KEYS[event]:
        value, low = line[key], int(key == "workers")
        if key == "digest":
            if not isinstance(value, str) or len(value) > _LIMIT_DIGEST:
                raise DataError(f"{where}: 'digest' is {short(value)} but must be a short string; repair the line")
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < _LIMIT:
            raise DataError(
                f"{where}: '{key}' is {short(value)} but must be an integer from {low} to {_LIMIT - 1}; repair the line"
            )
    return ServerInput(**{**line, "time_s": float(time_s)})
