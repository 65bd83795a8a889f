"""The log of outcomes: what decided the numbers of an elastic run besides its run file. `outcomes-003.jsonl` is that of slot 3.

Which exchanges were made, who was alive in whose view, and where a newcomer got its state from follow from deaths and seconds,
which no seed repeats. With these files a run can be computed again, bit for bit (`gossamer.run.replay.elastic`).

* `{"event":"begin","round":r,"after":q,"donor":j,"steps":s,"incarnation":k,"sha256":h,"followed":[...],"time_s":t}`: a process
  begins to train at round r. Its state is that of the start of the run (q = 0), that of this slot's own checkpoint after q rounds
  (donor j is the slot itself), or that of worker j after q rounds, with the inner steps s of its own slot behind it. `sha256` is
  that of the state, empty at the start. A ghost has trained before: one local phase with each of the states `followed`, which are
  `[donor, after, steps, sha256]`, and has kept of them its inner optimizer alone.
* `{"event":"exchange","round":r,"of":q,"fragment":p,"alive":[...],"missed":[...],"unsure":[...],"time_s":t}`: an exchange that
  ended in round r. It is that of fragment p (numbered as in `gossamer.rounds.loop`), with the peers that the topology of round q
  gives over the slots `alive`, null for all; of these, `missed` and `unsure` have not been counted at this end, and the other end
  may have counted those that are unsure. Written before anything else is sent, so that it is known of a worker that is
  killed how far it came. There are none where a round has one exchange, at its end: the next line says the same of it.
* `{"event":"round","round":r,"alive":[...],"missed":[...],"unsure":[...],"steps":s,"time_s":t}`: a round that ended with s steps
  behind it; `missed` and `unsure` are those of all exchanges that ended in it.
* `{"event":"end","round":r,"why":"finished" | "left","time_s":t}`: the process ended before round r.

Lines are appended when their round is over; `time_s` is Unix time, for people only.
"""

import time
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import DataError
from gossamer.record.jsonl import json_line, records
from gossamer.record.whole_files import LineWriter, make_folder, worker_suffix, writing
from gossamer.settings.fields import AtLeastZero
from gossamer.settings.schema import RECORD, Records

__all__ = ["Begun", "Ended", "ExchangeOutcome", "Followed", "Life", "OutcomeWriter", "RoundOutcome", "read_outcomes"]

_Whole = Annotated[int, Field(ge=0, lt=1 << 31)]
_Hash = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


@with_config(RECORD)
class _Begin(TypedDict):
    event: Literal["begin"]
    round: _Whole
    after: _Whole
    donor: _Whole
    steps: AtLeastZero
    incarnation: AtLeastZero
    sha256: _Hash
    followed: list[tuple[_Whole, _Whole, AtLeastZero, _Hash]]
    time_s: float


@with_config(RECORD)
class _Exchange(TypedDict):
    event: Literal["exchange"]
    round: _Whole
    of: _Whole
    fragment: _Whole
    alive: list[_Whole] | None
    missed: list[_Whole]
    unsure: list[_Whole]
    time_s: float


@with_config(RECORD)
class _Round(TypedDict):
    event: Literal["round"]
    round: _Whole
    alive: list[_Whole] | None
    missed: list[_Whole]
    unsure: list[_Whole]
    steps: AtLeastZero
    time_s: float


@with_config(RECORD)
class _End(TypedDict):
    event: Literal["end"]
    round: _Whole
    why: Literal["finished", "left"]
    time_s: float


_Line = _Begin | _Exchange | _Round | _End
_LINES = Records[_Line](Annotated[_Line, Field(discriminator="event")])


class Followed(NamedTuple):
    """A local phase of a ghost: with whose state it began, and how many steps of its slot it took to be behind it."""

    donor: int
    after: int
    steps: int
    sha256: str = ""


class Begun(NamedTuple):
    """How a process began."""

    round: int
    after: int
    donor: int
    steps: int
    incarnation: int
    sha256: str = ""
    followed: tuple[Followed, ...] = ()
    """If any, the inner optimizer is the process's own."""


class ExchangeOutcome(NamedTuple):
    """What became of one exchange of one worker."""

    round: int
    """In which it ended."""
    of: int
    """The round whose topology it followed."""
    fragment: int
    alive: frozenset[int] | None
    """Those over which that was drawn; None for everyone."""
    missed: frozenset[int] = frozenset()
    unsure: frozenset[int] = frozenset()

    @property
    def lost(self) -> frozenset[int]:
        """The peers whose messages this worker did not count."""
        return self.missed | self.unsure


class RoundOutcome(NamedTuple):
    """What became of one round of one worker."""

    round: int
    alive: frozenset[int] | None
    """None for everyone."""
    missed: frozenset[int]
    unsure: frozenset[int]
    steps: int

    @property
    def lost(self) -> frozenset[int]:
        """The peers whose messages this worker did not count."""
        return self.missed | self.unsure


class Ended(NamedTuple):
    """How a process ended that was not killed."""

    round: int
    why: Literal["finished", "left"]


class Life(NamedTuple):
    """One process in a slot, or one that went on with another's state."""

    begun: Begun
    rounds: tuple[RoundOutcome, ...]
    ended: Ended | None
    exchanges: tuple[ExchangeOutcome, ...] = ()
    """Where a round has more than one, or one that does not end with it."""


class OutcomeWriter(LineWriter):
    """Appends to the log of one slot.

    Args: `first_round` is the first round that will be written: what is there of it and of later ones is void, as all workers
        went back behind them. None begins a new log.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with OutcomeWriter(folder, 3) as log:
    ...     log.begin(Begun(0, 0, 3, 0, 0))
    ...     log.round(RoundOutcome(0, None, frozenset({1}), frozenset(), 15))
    >>> [life.rounds[0].missed for life in read_outcomes(folder)[3]]
    [frozenset({1})]
    """

    def __init__(self, folder: Path, slot: int, first_round: int | None = None) -> None:
        make_folder(folder)
        path = _file(folder, slot)
        with writing(path):
            if first_round is None:
                path.unlink(missing_ok=True)
            elif path.exists():
                _cut(path, first_round)
        super().__init__(path)

    def begin(self, begun: Begun) -> None:
        """A process begins to train."""
        self._write("begin", **begun._asdict())

    def exchange(self, outcome: ExchangeOutcome) -> None:
        """An exchange has ended."""
        self._write("exchange", **outcome._asdict())

    def round(self, outcome: RoundOutcome) -> None:
        """A round is over."""
        self._write("round", **outcome._asdict())

    def end(self, ended: Ended) -> None:
        """The process ends on purpose."""
        self._write("end", **ended._asdict())

    def _write(self, event: str, **fields: object) -> None:
        plain = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields.items()}
        self._file.write(json_line({"event": event, **plain, "time_s": round(time.time(), 3)}))


def read_outcomes(run_folder: Path) -> dict[int, list[Life]]:
    """The lives in each slot of an elastic run, in their order; empty for a run without such a log.

    Raises: DataError for a line that is none, or that cannot follow the one before it.
    """
    found: dict[int, list[Life]] = {}
    for path in sorted(Path(run_folder).glob("outcomes-*.jsonl")):
        number = path.stem.removeprefix("outcomes-")
        if number.isascii() and number.isdigit():
            found[int(number)] = _lives(path)
    return found


def _lives(path: Path) -> list[Life]:
    lives: list[Life] = []
    for where, line in records(path, _LINES):
        if line["event"] == "begin":
            followed = tuple(Followed(*one) for one in line["followed"])
            begun = Begun(*(line[name] for name in Begun._fields))._replace(followed=followed)
            if lives and begun.round < _next(lives[-1]):
                raise _impossible(where, f"a process begins at round {begun.round} that an earlier one has behind it")
            lives.append(Life(begun, (), None))
            continue
        if not lives or lives[-1].ended is not None or line["round"] < _next(lives[-1]):
            raise _impossible(where, f"round {line['round']} does not follow what is above it")
        life = lives[-1]
        if line["event"] == "end":
            lives[-1] = life._replace(ended=Ended(line["round"], line["why"]))
        elif line["event"] == "exchange":
            some = ExchangeOutcome(line["round"], line["of"], line["fragment"], *_counted(line))
            lives[-1] = life._replace(exchanges=(*life.exchanges, some))
        else:
            lives[-1] = life._replace(rounds=(*life.rounds, _outcome(line)))
    return lives


def _outcome(line: _Round) -> RoundOutcome:
    return RoundOutcome(line["round"], *_counted(line), line["steps"])


def _counted(line: _Round | _Exchange) -> tuple[frozenset[int] | None, frozenset[int], frozenset[int]]:
    alive = None if line["alive"] is None else frozenset(line["alive"])
    return alive, frozenset(line["missed"]), frozenset(line["unsure"])


def _next(life: Life) -> int:
    return life.rounds[-1].round + 1 if life.rounds else life.begun.round


def _impossible(where: str, why: str) -> DataError:
    return DataError(f"{where}: {why}; restore the log as the run wrote it")


def _file(folder: Path, slot: int) -> Path:
    return Path(folder) / f"outcomes{worker_suffix(slot)}.jsonl"


def _cut(path: Path, first_round: int) -> None:
    """Keeps the lines before a round; a last line that a killed process left half-written goes too."""
    kept, size = 0, 0
    for raw in path.read_bytes().splitlines(keepends=True):
        size += len(raw)
        if raw.endswith(b"\n") and _LINES.parse(raw, str(path))["round"] < first_round:
            kept = size
    with path.open("r+b") as file:
        file.truncate(kept)
