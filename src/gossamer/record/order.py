"""The order of events: what decided the numbers of a real run that waits for nobody. `order-003.jsonl` is that of worker 3.

Which message of a peer was the newest, and when two workers met, follows from seconds that no seed repeats. With these files a
run can be computed again, bit for bit (`gossamer.run.async_replay`). Gossip without waiting writes

* `{"event":"publish","number":k,"round":r,"start_s":a,"time_s":t}`: local phase k has ended, for whose learning rate r rounds of
  the run were over; the message of this worker is its version k + 1 now.
* `{"event":"mix","number":k,"alive":[...],"heard":[[j,v],...],"time_s":t}`: the outer update that follows. Its topology was drawn
  over the workers that are `alive`, null for all; `heard` has the version of each peer's message that was mixed. The weight of a
  peer that is missing stayed at home.

and workers that meet in pairs

* `{"event":"learn","number":k,"round":r,"dt":d,"start_s":a,"time_s":t}`: local phase k has ended, and the next one begins here.
* `{"event":"tell","peer":j,"starter":i,"number":m,"dt":d,"time_s":t}`: the message for meeting m of those that worker i started.
* `{"event":"meet","peer":j,"starter":i,"number":m,"dt":d,"time_s":t}`: that meeting, at this end.

`dt` is the time that passes for the method before an event since the one above it, exact to the last bit. Unless a worker is
killed, it ends with `{"event":"end","why":"finished" | "left","round":r,"dt":d,"time_s":t}`. `time_s` counts from its begin.
"""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import DataError
from gossamer.record.files import LineWriter, make_folder, worker_suffix, writing
from gossamer.record.jsonl import json_line, records
from gossamer.schema import RECORD, Records

__all__ = [
    "Finished",
    "Learned",
    "Met",
    "Mixed",
    "OrderEvent",
    "OrderWriter",
    "Published",
    "Told",
    "phases_in",
    "read_order",
]

_Whole = Annotated[int, Field(ge=0, lt=1 << 31)]
_Slot = Annotated[int, Field(ge=0, lt=1 << 20)]
_Seconds = Annotated[float, Field(ge=0, lt=1e12)]


@with_config(RECORD)
class _Publish(TypedDict):
    event: Literal["publish"]
    number: _Whole
    round: _Whole
    start_s: _Seconds
    time_s: _Seconds


@with_config(RECORD)
class _Mix(TypedDict):
    event: Literal["mix"]
    number: _Whole
    alive: list[_Slot] | None
    heard: list[Annotated[list[_Whole], Field(min_length=2, max_length=2)]]
    time_s: _Seconds


@with_config(RECORD)
class _Learn(TypedDict):
    event: Literal["learn"]
    number: _Whole
    round: _Whole
    dt: _Seconds
    start_s: _Seconds
    time_s: _Seconds


@with_config(RECORD)
class _Meeting(TypedDict):
    event: Literal["tell", "meet"]
    peer: _Slot
    starter: _Slot
    number: _Whole
    dt: _Seconds
    time_s: _Seconds


@with_config(RECORD)
class _End(TypedDict):
    event: Literal["end"]
    why: Literal["finished", "left"]
    round: _Whole
    dt: _Seconds
    time_s: _Seconds


_Line = _Publish | _Mix | _Learn | _Meeting | _End
_LINES = Records[_Line](Annotated[_Line, Field(discriminator="event")])


class Published(NamedTuple):
    """A local phase of gossip has ended."""

    number: int
    round: int
    start_s: float
    time_s: float


class Mixed(NamedTuple):
    """The outer update after it."""

    number: int
    alive: frozenset[int] | None
    """None for everyone."""
    heard: tuple[tuple[int, int], ...]
    """Each peer with the version of its message."""
    time_s: float


class Learned(NamedTuple):
    """A local phase of a worker that meets others has ended."""

    number: int
    round: int
    dt: float
    start_s: float
    time_s: float


class Told(NamedTuple):
    """A message for a meeting."""

    peer: int
    starter: int
    number: int
    dt: float
    time_s: float


class Met(NamedTuple):
    """A meeting that counts at this end."""

    peer: int
    starter: int
    number: int
    dt: float
    time_s: float


class Finished(NamedTuple):
    """The worker ended on purpose."""

    why: Literal["finished", "left"]
    round: int
    """Rounds of the run that are over, as far as the worker knows."""
    dt: float
    time_s: float


OrderEvent = Published | Mixed | Learned | Told | Met | Finished
_NAMES = {Published: "publish", Mixed: "mix", Learned: "learn", Told: "tell", Met: "meet", Finished: "end"}


class OrderWriter(LineWriter):
    """Writes the order of events of one worker anew; every line is handed to the system before this goes on.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with OrderWriter(folder, 3) as log:
    ...     log.write(Published(0, 0, 0.0, 1.5))
    ...     log.write(Mixed(0, None, ((1, 2),), 1.5))
    >>> read_order(folder)[3][1].heard
    ((1, 2),)
    """

    def __init__(self, folder: Path, worker: int) -> None:
        make_folder(folder)
        path = Path(folder) / f"order{worker_suffix(worker)}.jsonl"
        with writing(path):
            path.unlink(missing_ok=True)
        super().__init__(path)

    def write(self, event: OrderEvent) -> None:
        """Appends an event."""
        fields = event._asdict()
        if isinstance(event, Mixed) and event.alive is not None:
            fields["alive"] = sorted(event.alive)
        self._file.write(json_line({"event": _NAMES[type(event)], **fields}))


def read_order(run_folder: Path) -> dict[int, list[OrderEvent]]:
    """The events of each worker of a run that waits for nobody, in their order; empty for a run without such files.

    Raises: DataError for a line that is none, or that cannot follow those before it.
    """
    found: dict[int, list[OrderEvent]] = {}
    for path in sorted(Path(run_folder).glob("order-*.jsonl")):
        number = path.stem.removeprefix("order-")
        if number.isascii() and number.isdigit():
            found[int(number)] = _events(path)
    return found


def phases_in(events: list[OrderEvent]) -> int:
    """Local phases that a worker has behind it."""
    return sum(isinstance(event, Published | Learned) for event in events)


def _events(path: Path) -> list[OrderEvent]:
    events: list[OrderEvent] = []
    told: set[tuple[int, int, int]] = set()
    phases, kinds = 0, set[bool]()
    for where, line in records(path, _LINES):
        event = _event_of(line)
        if events and isinstance(events[-1], Finished):
            _impossible(where, "it follows the end")
        if not isinstance(event, Finished):
            kinds.add(isinstance(event, Published | Mixed))
        if len(kinds) == 2:
            _impossible(where, "gossip and meetings do not go together")
        if isinstance(event, Published | Learned) and event.number != phases:
            _impossible(where, f"phase {event.number} ends after {phases} others")
        follows = isinstance(event, Mixed) and events and isinstance(events[-1], Published)
        if isinstance(event, Mixed) and not (follows and event.number == phases - 1 and _once(event)):
            _impossible(where, f"an update after phase {event.number} does not follow what is above it")
        if isinstance(event, Published) and events and not isinstance(events[-1], Mixed):
            _impossible(where, "the update after the last phase is missing")
        if isinstance(event, Told | Met):
            key = event[:3]
            if (key in told) != isinstance(event, Met):
                _impossible(
                    where, f"a meeting with worker {event.peer} that was told {'twice' if key in told else 'never'}"
                )
            told.symmetric_difference_update({key})
        phases += isinstance(event, Published | Learned)
        events.append(event)
    return events


def _event_of(line: _Line) -> OrderEvent:
    if line["event"] == "publish":
        return Published(line["number"], line["round"], line["start_s"], line["time_s"])
    if line["event"] == "mix":
        alive = None if line["alive"] is None else frozenset(line["alive"])
        return Mixed(line["number"], alive, tuple((j, v) for j, v in line["heard"]), line["time_s"])
    if line["event"] == "learn":
        return Learned(line["number"], line["round"], line["dt"], line["start_s"], line["time_s"])
    if line["event"] == "end":
        return Finished(line["why"], line["round"], line["dt"], line["time_s"])
    kind = Told if line["event"] == "tell" else Met
    return kind(line["peer"], line["starter"], line["number"], line["dt"], line["time_s"])


def _once(event: Mixed) -> bool:
    return len({j for j, _ in event.heard}) == len(event.heard)


def _impossible(where: str, why: str) -> NoReturn:
    raise DataError(f"{where}: {why}; restore the file as the run wrote it")
