"""The driver of all replays: processes the recorded events of several actors, each as soon as its inputs are available.

An actor has recorded events in its own order, for example one process of a worker. Events of two actors are ordered
only by dependencies: a message, a state, or the end of a round. So no common clock is needed.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from gossamer.errors import DataError
from gossamer.record.whole_files import atomic_write

E = TypeVar("E")
A = TypeVar("A", bound="Actor[Any]")


class Missing(NamedTuple):
    """The missing input of an event."""

    why: str
    """A clause, such as 'it waits for a message of worker 3 that was never sent'."""
    source: Hashable = None
    """The key of the actor that provides it; None if there is none."""


class Contradiction(Exception):
    """An impossible event; its text is a clause with the reason, and the driver adds its location."""


class Actor(ABC, Generic[E]):
    """The unprocessed events of one actor.

    Args:
        key: its identifier among the actors of a run.
        who: its name in sentences.
        file: the file of its events.
    """

    def __init__(self, key: Hashable, who: str, file: Path, events: Iterable[E]) -> None:
        self.key, self.who, self.file, self.left = key, who, file, deque(events)

    @abstractmethod
    def named(self, event: E) -> str:
        """An event in words, such as 'phase 3'."""

    @abstractmethod
    def missing(self, event: E) -> Missing | None:
        """The missing input of the next event; None if it is ready. Raises Contradiction."""

    @abstractmethod
    def take(self, event: E) -> None:
        """Processes an event, which is removed from `left`. Raises Contradiction."""


def follow(actors: Sequence[A]) -> Iterator[tuple[A, Any]]:
    """Processes all events, yielding each one with its actor.

    The events of one actor keep their order, which affects results. The order between actors does not: an event depends
    on its actor's state and on recorded inputs from others (a message's version, a state after a number of events, a
    round), never on availability.

    Raises: DataError, naming an event, its actor, its file and its missing input, when no actor can proceed.
    """
    while waiting := [one for one in actors if one.left]:
        took = 0
        for one in waiting:
            while one.left and _missing(one) is None:
                event = one.left.popleft()
                try:
                    one.take(event)
                except Contradiction as error:
                    raise _at(one, event, str(error)) from None
                took += 1
                yield one, event
        if not took:
            raise _stuck(waiting)


def _missing(actor: Actor[Any]) -> Missing | None:
    try:
        return actor.missing(actor.left[0])
    except Contradiction as error:
        raise _at(actor, actor.left[0], str(error)) from None


def _stuck(waiting: Sequence[Actor[Any]]) -> DataError:
    """The error that names the actor at the end of the chain of dependencies."""
    by_key, one, seen = {one.key: one for one in waiting}, waiting[0], set[Hashable]()
    while True:
        missing = _missing(one)
        assert missing is not None  # else it would have proceeded
        seen.add(one.key)
        if missing.source not in by_key or missing.source in seen:
            return _at(one, one.left[0], missing.why)
        one = by_key[missing.source]


def _at(actor: Actor[Any], event: Any, why: str) -> DataError:
    return contradiction(actor.file, actor.who, actor.named(event), why)


def copy_record(file: Path, folder: Path, lines: int) -> None:
    """Copies the lines of a record that were read into a folder: a run in progress has written more since then.

    Raises: DiskError.
    """
    with file.open("rb") as record:
        atomic_write(folder / file.name, b"".join(itertools.islice(record, lines)))


def ends_early(file: Path, round: int, owner: str) -> DataError:
    """The error for a truncated record: its folder has a checkpoint after rounds that the record does not reach."""
    return DataError(
        f"the record in '{file}' ends before round {round}, of which the folder has a checkpoint of {owner}, so lines at its end "
        "are missing; restore the files of all workers as the run wrote them"
    )


def contradiction(file: Path, who: str, event: str, why: str) -> DataError:
    """The error for a record that contradicts itself at an event of an actor."""
    return DataError(
        f"the record in '{file}' contradicts itself at {who} in {event}: {why}; restore the files of all workers as "
        "the run wrote them"
    )
