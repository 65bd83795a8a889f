"""Documents: the texts in files, the files of a run's sources, and the split into training and validation."""

import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import DataError, require

__all__ = ["Document", "field", "files_of", "held_out", "read_documents", "utf8"]

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")  # all but the last two are one document a file


class Document(NamedTuple):
    """One text, with a name for error messages."""

    name: str
    text: str


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The documents of one file: a text file is one document, and so is each line of jsonl and each row of parquet."""
    if path.suffix == ".jsonl":
        return _jsonl(path, text_field)
    if path.suffix == ".parquet":
        return _parquet(path, text_field)
    return _text(path)


def _text(path: Path) -> Iterator[Document]:
    try:
        yield Document(f"'{path}'", path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' has byte 0x{error.object[error.start]:02x} at offset {error.start}, which is not UTF-8; convert "
            "the file, or remove it from data.source"
        ) from None


def _jsonl(path: Path, text_field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            name = f"line {number} of '{path}'"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{name} is not JSON ({error}); repair or remove the line") from None
            if not isinstance(row, dict):
                raise DataError(f"{name} is {type(row).__name__} but must be a JSON object with a field '{text_field}'")
            yield Document(name, field(row, text_field, name))


def _parquet(path: Path, text_field: str) -> Iterator[Document]:
    require("pyarrow.parquet", "data", f"'{path}'")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise DataError(_no_field(f"'{path}'", text_field, names))
            rows = itertools.count()
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for row in batch.to_pylist():
                    name = f"row {next(rows)} of '{path}'"
                    yield Document(name, field(row, text_field, name))
    except (ArrowException, OSError) as error:
        raise DataError(
            f"'{path}' cannot be read as parquet: {error}; write it again, or remove it from data.source"
        ) from error


def field(row: Mapping[str, Any], text_field: str, name: str) -> str:
    """The text of a row; null counts as an empty text."""
    if text_field not in row:
        raise DataError(_no_field(name, text_field, row))
    value = row[text_field]
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"field '{text_field}' in {name} is of type {type(value).__name__} but must be text; set data.text_field "
            f"to one that is, of: {', '.join(map(str, row))}"
        )
    return value or ""


def _no_field(name: str, text_field: str, fields: Iterable[str]) -> str:
    return (
        f"{name} has no field '{text_field}'; it has: {', '.join(fields) or 'none'}; set data.text_field to one of them"
    )


def utf8(document: Document) -> bytes:
    """The text of a document as UTF-8. Raises DataError when it holds half a surrogate pair."""
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{document.name} has the lone surrogate {document.text[error.start]!r} at character {error.start}, which "
            "UTF-8 has no bytes for; repair or remove it"
        ) from None


def files_of(sources: Sequence[str]) -> dict[Path, int]:
    """Every file of the sources once, in the order given, and the place of its source; those of a folder or glob are sorted."""
    found: dict[Path, int] = {}
    for place, source in enumerate(sources):
        for path in _stdlib() if source == "stdlib" else _files_at(source):
            found.setdefault(path, place)
    return found


def _files_at(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        inside = [p for p in _by_path(path.rglob("*")) if p.suffix in SUFFIXES]
    elif path.is_file():
        inside = [path]
    else:
        inside = _by_path(map(Path, glob.glob(str(path), recursive=True)))
    if not inside:
        raise DataError(
            f"data.source '{source}' names no readable file (the working folder is '{Path.cwd()}'); give an "
            f"existing file, a folder or a glob of files that end in one of: {', '.join(SUFFIXES)}"
        )
    for p in inside:
        if p.suffix not in SUFFIXES:
            raise DataError(
                f"'{p}' ends in '{p.suffix}' but files must end in one of: {', '.join(SUFFIXES)}; convert it, or "
                "rename it to the ending of its format"
            )
    return inside


def _by_path(paths: Iterable[Path]) -> list[Path]:
    return sorted((path for path in paths if path.is_file()), key=Path.as_posix)


def _stdlib() -> list[Path]:
    """The modules of the running Python's standard library.

    Without installed packages, tests, and modules that are tables rather than text: codecs, pydoc topics, build settings.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    left_out = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "__pycache__",
    }
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not found:
        raise DataError(
            f"this Python keeps no source of its standard library in '{root}'; set data.source to other text"
        )
    return sorted(found, key=Path.as_posix)


def held_out(text: str, val_fraction: float) -> bool:
    """Whether a text is for validation: its hash, as a number between 0 and 1, is below the fraction."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64
