"""The order of events, which decided the results of a real asynchronous run. `order-003.jsonl` is that of worker 3.

Which message of a peer was the newest, and when two workers met, follows from seconds that no seed repeats. From these
files a run can be replayed, bit for bit (`gossamer.run.replay.asynchronous`). Several processes may fill a slot one
after the other. Each has a random number, its life, with which all of its lines begin (`{"life":l,`, left out below).

* `"event":"begin","number":k,"round":r,"source":[j,m,p],"time_s":t}`: a process begins, with its local phase k. Its state is that
  of worker j in life m after p events, or that of the start of the run (null). Earlier lines of the slot from round r
  or phase k on are void.

Gossip without waiting writes

* `"event":"publish","number":k,"round":r,"start_s":a,"time_s":t}`: local phase k has ended, for whose learning rate r rounds of
  the run were over; the message of this worker is its version k + 1 now.
* `"event":"mix","number":k,"alive":[...],"heard":[[j,v,m],...],"time_s":t}`: the outer update that follows. Its
  topology was drawn over the workers that are `alive`, null for all; `heard` has the version of each peer's message that
  was mixed, and the life that published it. The weight of a missing peer went to the worker's own.

and workers that meet in pairs

* `"event":"learn","number":k,"round":r,"dt":d,"start_s":a,"time_s":t}`: local phase k has ended, and the next one begins here.
* `"event":"tell","peer":j,"starter":i,"of":m,"number":k,"dt":d,"time_s":t}`: the message for meeting k of those that worker i
  started in life m.
* `"event":"meet","peer":j,"starter":i,"of":m,"number":k,"dt":d,"time_s":t}`: that meeting, at this end.

`dt` is the time that passes for the method before an event since the one above it, exact to the last bit. Unless a worker is
killed, its life ends with `"event":"end","why":"finished" | "left","round":r,"dt":d,"time_s":t}`. `time_s` counts from
the start of the first process of the slot on that machine.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from gossamer.record.logs.event_log import EventLog, LogWriter, Seconds, Whole, impossible

_Slot = Annotated[int, Field(ge=0, lt=1 << 20)]
_Three = tuple[Whole, Whole, Whole]


class Entered(NamedTuple):
    """A process begins in a slot."""

    number: Whole
    """Number of its first local phase. Earlier lines of the slot about this and later phases are void."""
    round: Whole
    """Earlier lines about this and later rounds are void too."""
    source: _Three | None
    """The source of its state: worker, life, and number of events of that life. None for the start of the run."""
    time_s: Seconds


class Published(NamedTuple):
    """A local phase of gossip has ended."""

    number: Whole
    round: Whole
    start_s: Seconds
    time_s: Seconds


class Mixed(NamedTuple):
    """The outer update after a local phase."""

    number: Whole
    alive: frozenset[_Slot] | None
    """None for everyone."""
    heard: tuple[_Three, ...]
    """Each peer with the version of its mixed message, and the life that published it."""
    time_s: Seconds


class Learned(NamedTuple):
    """A local phase of a worker that meets others has ended."""

    number: Whole
    round: Whole
    dt: Seconds
    start_s: Seconds
    time_s: Seconds


class MeetingSent(NamedTuple):
    """A message for a meeting."""

    peer: _Slot
    starter: _Slot
    of: Whole
    """The life of the starter."""
    number: Whole
    dt: Seconds
    time_s: Seconds


class Met(NamedTuple):
    """A meeting that counts at this end."""

    peer: _Slot
    starter: _Slot
    of: Whole
    number: Whole
    dt: Seconds
    time_s: Seconds


class Finished(NamedTuple):
    """The worker ended on purpose."""

    why: Literal["finished", "left"]
    round: Whole
    """Completed rounds of the run, as far as the worker knows."""
    dt: Seconds
    time_s: Seconds


OrderEvent = Published | Mixed | Learned | MeetingSent | Met | Finished
ORDER = EventLog[Entered | OrderEvent](
    "order",
    {
        "begin": Entered,
        "publish": Published,
        "mix": Mixed,
        "learn": Learned,
        "tell": MeetingSent,
        "meet": Met,
        "end": Finished,
    },
    before={"life": Whole},
)


class OrderLife(NamedTuple):
    """One process in a slot."""

    life: int
    begun: Entered
    events: tuple[OrderEvent, ...]

    @property
    def lines(self) -> int:
        """Its lines in the file."""
        return 1 + len(self.events)

    @property
    def phases(self) -> int:
        """Local phases completed by the slot."""
        return self.begun.number + sum(isinstance(event, Published | Learned) for event in self.events)

    @property
    def ended(self) -> Finished | None:
        """Its end; None if it was killed, or is running."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished) else None


class OrderWriter(LogWriter[Entered | OrderEvent]):
    """Writes the order of events of one process; every line is flushed before the process continues.

    Args:
        life: the random number of the process.
        goes_on: whether earlier lives of the slot stay in the file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with OrderWriter(folder, 3, life=77) as log:
    ...     log.write(Entered(0, 0, None, 0.0))
    ...     log.write(Published(0, 0, 0.0, 1.5))
    ...     log.write(Mixed(0, None, ((1, 2, 99),), 1.5))
    >>> read_order(folder)[3][0].events[1].heard
    ((1, 2, 99),)
    """

    def __init__(self, folder: Path, worker: int, *, life: int, goes_on: bool = False) -> None:
        super().__init__(ORDER, ORDER.path(folder, worker), goes_on)
        self._life = life
        self.place = 0
        """Events of this life so far, without its first line."""

    def write(self, event: Entered | OrderEvent) -> None:
        """Appends an event."""
        self.append(event, life=self._life)
        self.place += not isinstance(event, Entered)


def read_order(run_folder: Path) -> dict[int, list[OrderLife]]:
    """The lives of each worker of an asynchronous run, in order; empty for a run without such files.

    Raises: DataError for an invalid line, or one that cannot follow those before it.
    """
    by_slot = {slot: _lives(path) for slot, path in ORDER.paths(run_folder).items()}
    whose: dict[int, int] = {}
    for slot, life in ((slot, one.life) for slot, lives in by_slot.items() for one in lives):
        if whose.setdefault(life, slot) != slot:
            impossible(
                f"{ORDER.path(run_folder, whose[life])} and {ORDER.path(run_folder, slot)}",
                f"both have the life {life} of a process, so that one of them is of another worker",
            )
    return by_slot


def phases_in(lives: Sequence[OrderLife]) -> int:
    """Local phases completed by a slot."""
    return lives[-1].phases if lives else 0


def _lives(path: Path) -> list[OrderLife]:
    lives: dict[int, _Reader] = {}
    kinds = set[bool]()
    for where, (event, line) in ORDER.read(path):
        life = line["life"]
        if isinstance(event, Entered):
            if life in lives:
                impossible(where, f"life {life} begins twice")
            lives[life] = _Reader(event)
            continue
        if life not in lives:
            impossible(where, f"life {life} has not begun")
        if not isinstance(event, Finished):
            kinds.add(isinstance(event, Published | Mixed))
        if len(kinds) == 2:
            impossible(where, "gossip and meetings do not go together")
        lives[life].add(where, event)
    return [OrderLife(life, one.begun, tuple(one.events)) for life, one in lives.items()]


class _Reader:
    """The events of one life, each of which must follow from those before it."""

    def __init__(self, begun: Entered) -> None:
        self.begun = begun
        self.events: list[OrderEvent] = []
        self._phases = begun.number
        self._sent: set[tuple[int, ...]] = set()

    def add(self, where: str, event: OrderEvent) -> None:
        """Appends an event. Raises DataError when it cannot be the next."""
        before, phases = self.events[-1] if self.events else None, self._phases
        if isinstance(before, Finished):
            impossible(where, "it follows the end")
        if isinstance(event, Published | Learned) and event.number != phases:
            impossible(where, f"phase {event.number} ends after {phases} others")
        follows = isinstance(event, Mixed) and isinstance(before, Published)
        if isinstance(event, Mixed) and not (follows and event.number == phases - 1 and _has_distinct_peers(event)):
            impossible(where, f"an update after phase {event.number} does not follow what is above it")
        if isinstance(event, Published | Finished) and isinstance(before, Published):
            impossible(where, "the update after the last phase is missing")
        if isinstance(event, MeetingSent | Met):
            key = event[:4]
            if (key in self._sent) != isinstance(event, Met):
                times = "twice" if key in self._sent else "never"
                impossible(where, f"a meeting with worker {event.peer} whose message was sent {times}")
            self._sent.symmetric_difference_update({key})
        self._phases += isinstance(event, Published | Learned)
        self.events.append(event)


def _has_distinct_peers(event: Mixed) -> bool:
    return len({j for j, _, _ in event.heard}) == len(event.heard)
