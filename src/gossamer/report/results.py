"""The runs of an experiment that have ended, as `outcomes.jsonl` keeps them, a line each."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import Field, WrapValidator, with_config
from typing_extensions import TypedDict

from gossamer.record.folder import finite
from gossamer.record.jsonl import json_line, records
from gossamer.record.origin import Origin
from gossamer.settings.schema import RECORD, Records


class PointResult(NamedTuple):
    """The result of one run of an experiment."""

    method: str
    at: Mapping[str, Any]
    """The swept keys and their values."""
    seed: int
    row: Mapping[str, Any]
    """Of `gossamer.report.table.summary_rows`."""
    origin: Origin | None = None
    """Its provenance; None if not recorded."""


_Point = Annotated[list[int | float | None], Field(min_length=2, max_length=2)]


@with_config({**RECORD, "extra": "allow"})
class _Curves(TypedDict):
    loss_at_round: NotRequired[list[_Point]]
    loss_at_bytes: NotRequired[list[_Point]]
    loss_at_s: NotRequired[dict[str, list[_Point]]]


def _unchecked_row(row: dict[str, Any], validate: Callable[[Any], Any]) -> dict[str, Any]:
    validate(row)
    return row  # keeps key order, so that rewriting a line does not change it


@with_config(RECORD)
class _Line(TypedDict):
    method: str
    at: dict[str, Any]
    seed: int
    row: Annotated[_Curves, WrapValidator(_unchecked_row)]
    origin: NotRequired[Origin | None]


_LINES = Records[_Line](_Line)
_CURVES = ("loss_at_round", "loss_at_bytes")


def result_lines(results: Iterable[PointResult]) -> str:
    """One line of JSON for each run, with everything that the figure shows; a number that is not finite becomes null."""
    given = [{key: value for key, value in run._asdict().items() if value is not None} for run in results]
    return "".join(json_line(finite({**one, "row": {**one["row"]}})) for one in given)


def read_results(file: Path) -> list[PointResult]:
    """The runs in a file of such lines. Raises: DataError for an invalid line."""
    return [_result(line) for _, line in records(file, _LINES)]


def _result(line: _Line) -> PointResult:
    row: dict[str, Any] = {**line["row"]}
    row |= {key: _with_gaps(row[key]) for key in _CURVES if key in row}
    row["loss_at_s"] = {name: _with_gaps(curve) for name, curve in row.get("loss_at_s", {}).items()}
    return PointResult(line["method"], line["at"], line["seed"], row, line.get("origin"))


def _with_gaps(curve: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(x, math.nan if y is None else y) for x, y in curve]
