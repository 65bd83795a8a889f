"""Events of asynchronous training, which every loop yields, and the settings that determine them."""

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AllowInfNan

from gossamer.errors import ConfigError
from gossamer.settings.options import Count, NotNegative, Positive
from gossamer.settings.schema import settings


class Absence(NamedTuple):
    """A worker leaves or returns. Its current local phase is lost; messages in flight still arrive."""

    time_s: float
    worker: int
    change: Literal["leave", "return"]


class Phase(NamedTuple):
    """A local phase that ended."""

    start_s: float
    end_s: float
    worker: int
    number: int
    """Which of the worker's phases it was, from 0."""
    report: Any
    """The result of `local_phase`."""


class Transfer(NamedTuple):
    """A message that arrived."""

    kind: Literal["push", "fetch", "meet"]
    start_s: float
    end_s: float
    source: int
    target: int
    fragment: int
    bytes: int


class Relay(NamedTuple):
    """A message that arrived, between the server of a region and the global one: a report going up, a merge coming down."""

    kind: Literal["report", "merge"]
    start_s: float
    end_s: float
    region: int
    fragment: int
    bytes: int


class Update(NamedTuple):
    """A server has absorbed the pushes of these workers."""

    time_s: float
    fragment: int
    workers: tuple[int, ...]
    ages: tuple[int, ...]


Record = Absence | Phase | Transfer | Relay | Update


@settings("events.absences")
class Away:
    """A worker that leaves, and may return."""

    worker: int
    """Its number."""
    leave_s: NotNegative
    """Virtual seconds after which it leaves."""
    return_s: Annotated[float, AllowInfNan(True)] = math.inf
    """Virtual seconds after which it returns; inf for never."""

    def __post_init__(self) -> None:
        if not self.leave_s < self.return_s:
            raise ConfigError(
                f"events.absences has worker {self.worker} leave at {self.leave_s} s and return at {self.return_s} s; "
                "let it leave at 0 s or later, and return after that"
            )


@settings("events")
class EventsConfig:
    """Settings of a run with a server, with pairs, or with run.wait = false; synchronous runs do not read them."""

    network: str | None = None
    """The name of the network whose times decide in a simulation which messages are late; optional where there is only one."""
    dylu: bool = False
    """Whether slower workers take fewer inner steps per phase, so that all phases take about as long; the fastest
    worker takes run.local_steps.
    """
    fragments: Count = 1
    """Parts of the model that a server keeps and workers push one by one."""
    overlap: bool = False
    """Whether a worker continues to train while a reply of the server is in flight; needs at least two fragments."""
    meetings: Positive | None = None
    """Meetings of a worker per mean local phase, for a pair rule; 1 by default."""
    absences: tuple[Away, ...] = ()
    """Workers that leave, and when."""
