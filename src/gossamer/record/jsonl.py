"""JSON, one value a line."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import DataError
from gossamer.record.whole_files import atomic_write, worker_of_file
from gossamer.settings.schema import RECORD, Records

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Seen = Callable[[Path, int, int, Any], None]
"""A callback with a file, the start and end positions of a line in it, and the record of the line."""


class Parser(Protocol[T_co]):
    """A parser of lines into records, such as `gossamer.settings.schema.Records`."""

    def parse(self, line: bytes | str, where: str) -> T_co:
        """The record. Raises: DataError, which names `where`, for a line that holds none."""
        ...


def json_line(value: Mapping[str, Any]) -> str:
    """One line of a JSONL file; plain JSON, so NaN is an error here.

    >>> json_line({"round": 0, "loss": 2.5})
    '{"round":0,"loss":2.5}\\n'
    """
    return json_text(value) + "\n"


def json_text(value: Any) -> str:
    """A value within a line.

    >>> json_text([[5, 34]])
    '[[5,34]]'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def json_from_peer(raw: bytes) -> Any:
    """A JSON value from another process, whose strings are all valid UTF-8; None for anything else.

    JSON may escape half of a surrogate pair, which Python decodes to a string that cannot be encoded.

    >>> json_from_peer(b'{"round": 3}'), json_from_peer(b'"\\\\ud800"'), json_from_peer(b"[")
    ({'round': 3}, None, None)
    """
    try:
        text = raw.decode()  # not by `json.loads`, which lets encoded surrogates pass and guesses other encodings
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


class JsonObjects:
    """Parses lines that may be any JSON object."""

    def parse(self, line: bytes | str, where: str) -> dict[str, Any]:
        """The object. Raises: DataError, which names `where`, for a line that is none."""
        try:
            value = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error}) but must hold one object; remove the line") from None
        if not isinstance(value, dict):
            raise DataError(f"{where} holds {short(value)} but must hold one object; remove the line")
        return value


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its "file:line". Raises: as `records`."""
    return records(path, JsonObjects())


def records(path: Path, kind: Parser[T]) -> Iterator[tuple[str, T]]:
    """The records of a JSONL file, each with its "file:line"; a last line that was cut short is skipped.

    Raises: DataError for any other line that holds no such record.
    """
    return ((where, record) for where, _, record in _records(path, kind))


def folder_lines(
    folder: Path,
    kind: str,
    parser: Parser[T],
    *,
    seen: Seen | None = None,
    owner: Callable[[T], int | None] = lambda record: record["worker"],  # pyright: ignore[reportIndexIssue]
) -> Iterator[tuple[Path, str, T]]:
    """The records of all files of one kind in a run folder, such as `seconds*.jsonl`: each with its file and "file:line".

    Args:
        seen: is called with each record before it is yielded, for callers that also follow the run.
        owner: the worker that wrote a record; None where it may be any.
    Raises: DataError for an invalid line, or one in the file of another worker.
    """
    for path in sorted(Path(folder).glob(f"{kind}*.jsonl"), key=lambda path: path.stem):
        begin = 0
        for where, raw, record in _records(path, parser):
            must_be_own(where, path.name, owner(record))
            if seen is not None:
                seen(path, begin, begin + len(raw), record)
            begin += len(raw)
            yield path, where, record


def keep_records(path: Path, kind: Parser[T], keeps: Callable[[T], bool]) -> list[T]:
    """Removes the other records from a JSONL file, which may be missing; a last line that was cut short goes too.

    Raises: DataError, with nothing removed, for any other line that holds no such record; DiskError.
    """
    if not os.path.lexists(path):  # a dangling link is an unreadable file
        return []
    kept = [(raw, record) for _, raw, record in _records(path, kind) if keeps(record)]
    # The old file stays whole until the new one is complete: a kill in between loses no kept line.
    atomic_write(path, b"".join(raw if raw.endswith(b"\n") else raw + b"\n" for raw, _ in kept))
    return [record for _, record in kept]


def must_be_own(where: str, name: str, worker: int | None) -> None:
    """Raises DataError for a line in the file of another worker, as when files were swapped.

    Args: `worker` is the one that the line names; None for a line without a worker.
    """
    owner = worker_of_file(name)
    if None not in (owner, worker) and owner != worker:
        raise DataError(
            f"{where} is of worker {worker} in the file of worker {owner}; restore the file as the run wrote it"
        )


@with_config({**RECORD, "extra": "allow"})
class _Line(TypedDict):
    round: Annotated[int, Field(ge=-1, lt=2**31)]


_LINES = Records[_Line](_Line)


def keep_before(
    path: Path, round: int, void: Callable[[Mapping[str, Any]], bool] = lambda line: False
) -> Sequence[Mapping[str, Any]]:
    """Removes the lines of this round and of later ones, and the void ones; returns the others. Raises: as `keep_records`."""
    return keep_records(path, _LINES, lambda line: line["round"] < round and not void(line))


def _records(path: Path, kind: Parser[T]) -> Iterator[tuple[str, bytes, T]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                record = kind.parse(line, where)
            except DataError:
                if _is_json(line) or not _is_torn(line, number):
                    raise
                return
            yield where, line, record


def _is_torn(line: bytes, number: int) -> bool:
    """Whether a last line may be the remains of a kill or a power cut; a file whose first line is anything else is spoilt."""
    return not line.endswith(b"\n") and (number > 1 or line.startswith(b"{"))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def short(value: object) -> str:
    """A value shortened for quotation in a sentence."""
    try:
        return f"{value!r:.60}"
    except RecursionError:  # JSON nested as deeply as can just be parsed
        return "a deeply nested value"
