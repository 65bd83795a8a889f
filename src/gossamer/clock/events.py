"""Events of asynchronous training; every loop reports its course in these records."""

from typing import Any, Literal, NamedTuple

__all__ = ["SERVER", "Absence", "Phase", "Record", "Relay", "Transfer", "Update"]

SERVER = -1
"""The server's number where a worker's is expected."""


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
