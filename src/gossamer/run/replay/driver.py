"""The driver of all replays: takes the recorded events of several actors, each as soon as what it needs is there.

An actor is whoever recorded events in its own order, such as one process of a worker. Nothing orders the events of two
actors but what one needs of the other: a message, a state, or that a round is over. So no common clock is needed.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from gossamer.errors import DataError

E = TypeVar("E")
A = TypeVar("A", bound="Actor[Any]")


class Missing(NamedTuple):
    """What an event waits for."""

    why: str
    """A clause, such as 'it heard a message of worker 3 that was never sent'."""
    source: Hashable = None
    """The key of the actor one of whose events brings it; None if there is none."""


class Contradiction(Exception):
    """An event that cannot have taken place; its text is the clause that says why, and the driver adds where it is recorded."""


class Actor(ABC, Generic[E]):
    """The recorded events of one actor that have yet to take place.

    Args:
        key: names it among the actors of a run.
        who: names it in sentences.
        file: where its events are recorded.
    """

    def __init__(self, key: Hashable, who: str, file: Path, events: Iterable[E]) -> None:
        self.key, self.who, self.file, self.left = key, who, file, deque(events)

    @abstractmethod
    def named(self, event: E) -> str:
        """An event in words, such as 'phase 3'."""

    @abstractmethod
    def missing(self, event: E) -> Missing | None:
        """What the next event waits for; None if it can take place. Raises Contradiction."""

    @abstractmethod
    def take(self, event: E) -> None:
        """The event takes place, and is not `left` any more. Raises Contradiction."""


def follow(actors: Sequence[A]) -> Iterator[tuple[A, Any]]:
    """Lets all events take place, and gives each one with its actor when it has.

    The events of one actor keep their order, which decides numbers. Which of several actors goes first decides none: an event
    computes from the state of its actor and from what its record names of others (the version of a message, the state after so
    many events, the round), never from what happens to be there.

    Raises: DataError, naming an event, its actor, its file and what it waits for, when nobody can go on.
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


def _missing(one: Actor[Any]) -> Missing | None:
    try:
        return one.missing(one.left[0])
    except Contradiction as error:
        raise _at(one, one.left[0], str(error)) from None


def _stuck(waiting: Sequence[Actor[Any]]) -> DataError:
    """Names whoever is at the end of the chain of those that wait for each other, as the others would go on after it."""
    by_key, one, seen = {one.key: one for one in waiting}, waiting[0], set[Hashable]()
    while True:
        missing = _missing(one)
        assert missing is not None  # else it would have gone on
        seen.add(one.key)
        if missing.source not in by_key or missing.source in seen:
            return _at(one, one.left[0], missing.why)
        one = by_key[missing.source]


def _at(one: Actor[Any], event: Any, why: str) -> DataError:
    return contradiction(one.file, one.who, one.named(event), why)


def ends_early(file: Path, round: int, owner: str) -> DataError:
    """A record was cut at its end: its folder has a checkpoint of an owner, after so many rounds, to which it does not lead."""
    return DataError(
        f"the record in '{file}' ends before round {round}, of which the folder has a checkpoint of {owner}, so lines at its end "
        "are missing; restore the files of all workers as the run wrote them"
    )


def contradiction(file: Path, who: str, event: str, why: str) -> DataError:
    """The record of a run contradicts itself at an event of an actor."""
    return DataError(
        f"the record in '{file}' contradicts itself at {who} in {event}: {why}; restore the files of all workers as "
        "the run wrote them"
    )
