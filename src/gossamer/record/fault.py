"""Faults of a checkpoint: a kind, by which a run decides how to resume, and a clause for people."""

from enum import StrEnum
from typing import NamedTuple

from gossamer.errors import CheckpointError

_LONGEST = 400  # characters of a clause from another worker


class FaultKind(StrEnum):
    """The kind of a generation's fault. Its value crosses the wire."""

    ABSENT = "absent"
    """A file of the generation is missing: its worker may have been stopped before it saved."""
    UNFINISHED = "unfinished"
    """The tensors exist without the manifest, which is written last: it was lost, or its worker was stopped while saving."""
    MISPLACED = "misplaced"
    """It is sound, but of another worker, round or step than its path says."""
    FOREIGN = "foreign"
    """It is sound, but of another run, settings or version."""
    DAMAGED = "damaged"
    """It is cut short, has changed, or cannot be read."""


class Fault(NamedTuple):
    """A fault of a generation.

    >>> Fault.of(CheckpointError("file 'x' has worker 1 but needs 0; move it", FaultKind.MISPLACED))
    Fault(kind=<FaultKind.MISPLACED: 'misplaced'>, why="file 'x' has worker 1 but needs 0")
    """

    kind: FaultKind
    why: str
    """One clause that names the file."""

    @staticmethod
    def of(error: CheckpointError) -> "Fault":
        """The fault that an error describes, without its advice."""
        return Fault(FaultKind(error.kind), str(error).partition("; ")[0])

    @property
    def encoded(self) -> list[str]:
        """The fault as JSON, to send to other workers."""
        return [self.kind, self.why[:_LONGEST]]


def decode_fault(value: object) -> Fault | None:
    """A fault parsed from another worker's JSON; None for anything else.

    >>> decode_fault(["damaged", "file 'x' is cut short"])
    Fault(kind=<FaultKind.DAMAGED: 'damaged'>, why="file 'x' is cut short")
    >>> decode_fault(["odd", "file 'x'"]), decode_fault("damaged")
    (None, None)
    """
    match value:
        case [str(kind), str(why)] if kind in [*FaultKind]:
            return Fault(FaultKind(kind), why[:_LONGEST])
    return None
