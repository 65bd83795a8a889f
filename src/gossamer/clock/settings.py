"""What a run file says of a run that looks at the clock: whose clock, how fragments travel, and who is away when."""

import math
from typing import Annotated

from pydantic import AllowInfNan, Field

from gossamer.errors import ConfigError
from gossamer.schema import Positive, settings

__all__ = ["Away", "EventsConfig"]


@settings("events.absences")
class Away:
    """A worker that leaves, and returns or does not."""

    worker: int
    leave_s: Annotated[float, Field(ge=0)]
    return_s: Annotated[float, AllowInfNan(True)] = math.inf

    def __post_init__(self) -> None:
        if not self.leave_s < self.return_s:
            raise ConfigError(
                f"events.absences has worker {self.worker} leave at {self.leave_s} s and return at {self.return_s} s; "
                "let it leave at 0 s or later, and return after that"
            )


@settings("events")
class EventsConfig:
    """How a run with a server, with pairs, or without waiting goes; runs in rounds do not read it."""

    network: str | None = None
    """The network whose seconds decide who is late, by its name; it may be left out where there is only one."""
    dylu: bool = False
    """Whether slower workers take fewer inner steps a phase, so that all return at about the same time (run.local_steps is
    that of the fastest)."""
    fragments: Positive = 1
    """Parts of the model that a server keeps and workers push one by one."""
    overlap: bool = False
    """Whether a worker goes on training while a reply of the server is under way; needs at least two fragments."""
    meetings: Annotated[float, Field(gt=0)] | None = None
    """Meetings of a pair rule that a worker takes part in while it takes a mean local phase; 1 when left out."""
    absences: tuple[Away, ...] = ()
