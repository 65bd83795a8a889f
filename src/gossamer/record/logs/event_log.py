"""Event logs: JSON lines with one implementation of writing, validation, reading and truncation.

An event is a NamedTuple; a line has its fields, its name as "event", and the further keys of all lines of the log. A
line is flushed before its writer continues, and a killed writer's partial last line does not count.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NoReturn, NotRequired, TypeVar, get_type_hints

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import DataError
from gossamer.record.jsonl import json_line, keep_records, records
from gossamer.record.whole_files import LineWriter, make_folder, worker_suffix, writing
from gossamer.settings.schema import RECORD, Records

T = TypeVar("T")
Whole = Annotated[int, Field(ge=0, lt=1 << 31)]
"""A number of a worker, a round or a phase in a line of a log."""
Seconds = Annotated[float, Field(ge=0, lt=1e12)]


class Recorded(NamedTuple, Generic[T]):
    """A line of a log."""

    event: T
    line: Mapping[str, Any]
    """All keys of the line."""


class EventLog(Generic[T]):
    """A kind of log, with one file per worker of a run.

    Args:
        name: the prefix of the file names, as "order" in order-003.jsonl.
        kinds: the NamedTuple of each event, whose annotations bound its fields.
        fields: for events that share a NamedTuple, which has the event's name as a field, the fields of each.
        before, after: further keys of each line, before "event" and after the fields, with their types.
    """

    def __init__(
        self,
        name: str,
        kinds: Mapping[str, type[T]],
        *,
        fields: Mapping[str, tuple[str, ...]] | None = None,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._kinds = name, kinds
        self._words = {kind: word for word, kind in kinds.items()}
        self._fields = fields or {word: _fields(kind) for word, kind in kinds.items()}
        self._before, self._after = before or {}, after or {}
        lines = [self._line_of(word) for word in kinds]
        self.lines = Records[dict[str, Any]](
            Annotated[functools.reduce(operator.or_, lines), Field(discriminator="event")]
        )
        """The parser of its lines as plain dicts."""

    def _line_of(self, word: str) -> Any:
        """The description of the lines of one event, for pydantic."""
        hints = {**get_type_hints(self._kinds[word], include_extras=True), "event": Literal[word]}
        keys = {**self._before, **{key: hints[key] for key in ("event", *self._fields[word])}, **self._after}
        return _described(word, keys)

    def path(self, folder: Path, worker: int) -> Path:
        """The file of one worker."""
        return Path(folder) / f"{self.name}{worker_suffix(worker)}.jsonl"

    def paths(self, folder: Path) -> dict[int, Path]:
        """The files of a run folder, by worker."""
        numbers = {path: path.stem.removeprefix(f"{self.name}-") for path in Path(folder).glob(f"{self.name}-*.jsonl")}
        by_worker = {int(text): path for path, text in numbers.items() if text.isascii() and text.isdigit()}
        return dict(sorted(by_worker.items()))

    def line(self, event: T, **more: object) -> str:
        """The line of an event; `more` are the keys that each line has. Sets are written as sorted lists."""
        word = event.event if "event" in _fields(event) else self._words[type(event)]  # pyright: ignore
        values = {**more, "event": word}
        keys = dict.fromkeys((*self._before, "event", *self._fields[word], *self._after))
        fields = {key: values[key] if key in values else getattr(event, key) for key in keys}
        return json_line({key: sorted(v) if isinstance(v, frozenset) else v for key, v in fields.items()})

    def parse(self, line: bytes | str, where: str) -> Recorded[T]:
        """The event of a line. Raises: DataError, which names `where`, for an invalid line."""
        fields = self.lines.parse(line, where)
        word = fields["event"]
        return Recorded(self._kinds[word](**{key: fields[key] for key in self._fields[word]}), fields)

    def known(self, line: bytes | str, where: str) -> dict[str, Any]:
        """A line of a possibly newer version, with lists in place of sets. Raises: as `parse`."""
        return {key: sorted(v) if isinstance(v, frozenset) else v for key, v in self.lines.known(line, where).items()}

    def read(self, path: Path) -> Iterator[tuple[str, Recorded[T]]]:
        """The events of a file, each with its "file:line". Raises: DataError."""
        return records(path, self)


class LogWriter(LineWriter, Generic[T]):
    """Appends to one file of a log.

    Args: `keeps` selects the events of the file to keep; True keeps them all, False begins a new file.
    Raises: DataError for an invalid line where some are dropped; DiskError.
    """

    def __init__(self, log: EventLog[T], path: Path, keeps: bool | Callable[[T], bool]) -> None:
        make_folder(path.parent)
        with writing(path):
            if keeps is False:
                path.unlink(missing_ok=True)
        if not isinstance(keeps, bool):
            keep_records(path, log, lambda recorded: keeps(recorded.event))
        super().__init__(path)
        self.path, self._log = path, log

    def append(self, event: T, **more: object) -> None:
        """Appends an event, with the keys that each line has."""
        self._file.write(self._log.line(event, **more))


def row_lines(kind: Any) -> Records[dict[str, Any]]:
    """The lines of a log with the fields of one NamedTuple, whose annotations bound them; fields with a default are optional."""
    hints, optional = get_type_hints(kind, include_extras=True), kind._field_defaults
    keys = {key: NotRequired[hint] if key in optional else hint for key, hint in hints.items()}
    return Records[dict[str, Any]](_described(kind.__name__, keys))


def _described(name: str, keys: Mapping[str, Any]) -> Any:
    return with_config(RECORD)(TypedDict(name, keys))  # pyright: ignore[reportArgumentType]


def impossible(where: str, why: str) -> NoReturn:
    """Raises DataError for a line that is impossible at its position."""
    raise DataError(f"{where}: {why}; restore the file as the run wrote it")


def _fields(event: Any) -> tuple[str, ...]:
    """Of a NamedTuple, or of its type."""
    return event._fields
