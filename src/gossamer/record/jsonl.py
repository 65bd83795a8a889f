"""JSON, one value a line."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gossamer.errors import DataError
from gossamer.settings.schema import Records

__all__ = ["json_line", "json_lines", "records", "short"]

T = TypeVar("T")


def json_line(value: Mapping[str, Any]) -> str:
    """One line of a JSONL file; plain JSON, so NaN is an error here.

    >>> json_line({"round": 0, "loss": 2.5})
    '{"round":0,"loss":2.5}\\n'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with the "file:line" it stands at.

    A last line that was cut short is skipped: that is what a killed writer leaves behind.
    Raises: DataError for any other line that is not a JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                value = json.loads(line, parse_constant=_refuse)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise DataError(f"{where} is not JSON ({error}) but must hold one object; remove the line") from None
            if not isinstance(value, dict):
                raise DataError(f"{where} holds {short(value)} but must hold one object; remove the line")
            yield where, value


def records(path: Path, kind: Records[T]) -> Iterator[tuple[str, T]]:
    """The records of a JSONL file, each with the "file:line" it stands at; a last line that was cut short is skipped.

    Raises: DataError for any other line that holds no such record.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                record = kind.parse(line, where)
            except DataError:
                if line.endswith(b"\n") or _is_json(line):
                    raise
                return
            yield where, record


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def short(value: object) -> str:
    """A value as a sentence about it may quote it."""
    return f"{value!r:.60}"
