"""What is wrong with a checkpoint: a kind, by which a run decides how it goes on, and a clause, which a person reads."""

from enum import StrEnum
from typing import NamedTuple

from gossamer.errors import CheckpointError

_LONGEST = 400  # characters of a clause that another worker has said


class FaultKind(StrEnum):
    """Why a generation does not count. Its value crosses the wire."""

    ABSENT = "absent"
    """There is no file, where one of several has to be: its worker may have been stopped before it saved."""
    UNFINISHED = "unfinished"
    """Its tensors are there and the manifest is not, which is written last: lost, or its worker was stopped while it saved."""
    MISPLACED = "misplaced"
    """It is sound, and of another worker, round or step than its place says."""
    FOREIGN = "foreign"
    """It is sound, and of another run, of other settings, or of another version."""
    DAMAGED = "damaged"
    """It is cut short, has changed, or cannot be read."""


class Fault(NamedTuple):
    """What is wrong with a generation.

    >>> Fault.of(CheckpointError("file 'x' has worker 1 but needs 0; move it", FaultKind.MISPLACED))
    Fault(kind=<FaultKind.MISPLACED: 'misplaced'>, why="file 'x' has worker 1 but needs 0")
    """

    kind: FaultKind
    why: str
    """One clause that names the file."""

    @staticmethod
    def of(error: CheckpointError) -> "Fault":
        """That of an error, without what to do."""
        return Fault(FaultKind(error.kind), str(error).partition("; ")[0])

    @property
    def said(self) -> list[str]:
        """What a worker tells the others, as JSON holds it."""
        return [self.kind, self.why[:_LONGEST]]


def fault_heard(value: object) -> Fault | None:
    """What another worker has said so; None for anything else.

    >>> fault_heard(["damaged", "file 'x' is cut short"])
    Fault(kind=<FaultKind.DAMAGED: 'damaged'>, why="file 'x' is cut short")
    >>> fault_heard(["odd", "file 'x'"]), fault_heard("damaged")
    (None, None)
    """
    match value:
        case [str(kind), str(why)] if kind in [*FaultKind]:
            return Fault(FaultKind(kind), why[:_LONGEST])
    return None
