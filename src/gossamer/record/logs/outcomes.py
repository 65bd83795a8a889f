"""The log of outcomes, which decided the results of an elastic run in addition to its run file. `outcomes-003.jsonl` is
that of slot 3.

Which exchanges were made, who was alive in whose view, and where a newcomer got its state from follow from deaths and seconds,
which no seed repeats. From these files a run can be replayed, bit for bit (`gossamer.run.replay.elastic`).

* `{"event":"begin","round":r,"after":q,"donor":j,"steps":s,"incarnation":k,"sha256":h,"followed":[],"time_s":t}`: a process
  begins to train at round r. Its state is that of the start of the run (q = 0), that of this slot's own checkpoint after q
  rounds (donor j is the slot itself), or that of worker j after q rounds, with s inner steps of its own slot completed.
  `sha256` is that of the state, empty at the start.
* `{"event":"exchange","round":r,"of":q,"fragment":p,"alive":[...],"missed":[...],"unsure":[...],"time_s":t}`: an exchange that
  ended in round r. It is that of fragment p (numbered as in `gossamer.rounds.loop`), with the peers that the topology of round q
  gives over the slots `alive`, null for all; of these, `missed` and `unsure` have not been counted at this end, and the other end
  may have counted those that are unsure. Written before any further send, so that the progress of a killed worker is
  known. Omitted where a round has one exchange, at its end: the next line has the same content.
* `{"event":"round","round":r,"alive":[...],"missed":[...],"unsure":[...],"steps":s,"time_s":t}`: a round that ended
  after s steps; `missed` and `unsure` are those of all exchanges that ended in it.
* `{"event":"end","round":r,"why":"finished" | "left","time_s":t}`: the process ended before round r.

Lines are appended when their round is over; `time_s` is Unix time, for people only.
"""

import time
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from gossamer.record.logs.event_log import EventLog, LogWriter, Whole, impossible
from gossamer.settings.fields import Words
from gossamer.settings.options import Number

_Hash = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
_Slots = frozenset[Whole]


class Begun(NamedTuple):
    """The start of a process."""

    round: Whole
    after: Whole
    donor: Whole
    steps: Number
    incarnation: Number
    sha256: _Hash = ""
    followed: Annotated[tuple[()], Words("an empty list")] = ()
    """Empty. Earlier versions logged here with whose states a newcomer had warmed its inner optimizer."""


class ExchangeOutcome(NamedTuple):
    """The outcome of one exchange of one worker."""

    round: Whole
    """The round in which it ended."""
    of: Whole
    """The round whose topology it followed."""
    fragment: Whole
    alive: _Slots | None
    """The workers over which the topology was drawn; None for all."""
    missed: _Slots = frozenset()
    unsure: _Slots = frozenset()

    @property
    def lost(self) -> frozenset[int]:
        """The peers whose messages this worker did not count."""
        return self.missed | self.unsure


class RoundOutcome(NamedTuple):
    """The outcome of one round of one worker."""

    round: Whole
    alive: _Slots | None
    """None for everyone."""
    missed: _Slots
    unsure: _Slots
    steps: Number

    @property
    def lost(self) -> frozenset[int]:
        """The peers whose messages this worker did not count."""
        return self.missed | self.unsure


class Ended(NamedTuple):
    """The regular end of a process."""

    round: Whole
    why: Literal["finished", "left"]


_Event = Begun | ExchangeOutcome | RoundOutcome | Ended
OUTCOMES = EventLog[_Event](
    "outcomes",
    {"begin": Begun, "exchange": ExchangeOutcome, "round": RoundOutcome, "end": Ended},
    after={"time_s": float},
)


class Life(NamedTuple):
    """One process in a slot, or its continuation with another worker's state."""

    begun: Begun
    rounds: tuple[RoundOutcome, ...]
    ended: Ended | None
    exchanges: tuple[ExchangeOutcome, ...] = ()
    """Exchanges, where a round has several, or one that ends later."""

    @property
    def lines(self) -> int:
        """Its lines in the file."""
        return 1 + len(self.rounds) + len(self.exchanges) + (self.ended is not None)


class OutcomeWriter(LogWriter[_Event]):
    """Appends to the log of one slot.

    Args: `first_round` is the first round that will be written: existing lines of it and of later ones are void, as all
        workers were rewound. None begins a new log.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with OutcomeWriter(folder, 3) as log:
    ...     log.write(Begun(0, 0, 3, 0, 0))
    ...     log.write(RoundOutcome(0, None, frozenset({1}), frozenset(), 15))
    >>> [life.rounds[0].missed for life in read_outcomes(folder)[3]]
    [frozenset({1})]
    """

    def __init__(self, folder: Path, slot: int, first_round: int | None = None) -> None:
        keeps = first_round is not None and (lambda event: event.round < first_round)
        super().__init__(OUTCOMES, OUTCOMES.path(folder, slot), keeps)

    def write(self, event: _Event) -> None:
        """Appends an event."""
        self.append(event, time_s=round(time.time(), 3))


def read_outcomes(run_folder: Path) -> dict[int, list[Life]]:
    """The lives in each slot of an elastic run, in their order; empty for a run without such a log.

    Raises: DataError for an invalid line, or one that cannot follow the one before it.
    """
    return {slot: _lives(path, slot) for slot, path in OUTCOMES.paths(run_folder).items()}


def _lives(path: Path, slot: int) -> list[Life]:
    lives: list[Life] = []
    for where, (event, _) in OUTCOMES.read(path):
        if isinstance(event, Begun):
            if not event.after and not event.sha256 and event.donor != slot:  # a state from elsewhere needs its hash
                impossible(
                    where,
                    f"worker {event.donor} begins with the run in the log of slot {slot}, which belongs to another",
                )
            if lives and event.round < _next(lives[-1]):
                impossible(where, f"a process begins at round {event.round} that an earlier one has behind it")
            lives.append(Life(event, (), None))
            continue
        if not lives or lives[-1].ended is not None or event.round < _next(lives[-1]):
            impossible(where, f"round {event.round} does not follow what is above it")
        life = lives[-1]
        if isinstance(event, Ended):
            lives[-1] = life._replace(ended=event)
        elif isinstance(event, ExchangeOutcome):
            lives[-1] = life._replace(exchanges=(*life.exchanges, event))
        else:
            lives[-1] = life._replace(rounds=(*life.rounds, event))
    return lives


def _next(life: Life) -> int:
    return life.rounds[-1].round + 1 if life.rounds else life.begun.round
