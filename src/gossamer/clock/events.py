"""Events of asynchronous training; every loop reports its course in these records."""

from typing import Any, Literal, NamedTuple

__all__ = ["SERVER", "Absence", "Phase", "Record", "Transfer", "Update"]

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


class Update(NamedTuple):
    """The server has absorbed the pushes of these workers."""

    time_s: float
    fragment: int
    workers: tuple[int, ...]
    ages: tuple[int, ...]


Record = Absence | Phase | Transfer | Update
