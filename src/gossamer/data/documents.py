"""Documents: the texts in files, the files of a run's sources, and the split into training and validation."""

import contextlib
import functools
import glob
import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import DataError, first_line, require

PLAIN = (".txt", ".text", ".md", ".rst", ".py")  # one document a file
SUFFIXES = (*PLAIN, ".jsonl", ".parquet")  # in upper case too, and all but the last also behind .gz
TOKENS = ".bin"  # token files of other tools, by name or by glob: a folder may hold .bin files of any kind
MOST_BYTES = 1 << 30  # limits of a line and of an unpacked compressed text: a small file may hold any number of zeros
MARK = "\ufeff"  # the byte-order mark, which editors write before a text and is not part of it


class Document(NamedTuple):
    """One text, with a name for error messages."""

    name: str
    text: str


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The documents of one file: a text file is one document, and so is each line of jsonl and each row of parquet.

    Raises: DataError for a file that cannot be read, is damaged, or has no such field.
    """
    kind = _kind(path)
    try:
        if kind == ".parquet":
            yield from _parquet(path, text_field)
        else:
            yield from _jsonl(path, text_field) if kind == ".jsonl" else _text(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read ({error}); correct it, or leave it out") from error


def must_have_text(path: Path, text_field: str) -> None:
    """Raises DataError where the first line of jsonl, or the schema of parquet, does not have this field; reads no more."""
    if _kind(path) == ".jsonl":
        next(read_documents(path, text_field), None)
    elif _kind(path) == ".parquet" and importlib.util.find_spec("pyarrow"):
        with _opened_parquet(path, text_field):
            pass


def is_as_long_as_its_text(path: Path) -> bool:
    """Whether a file is at least as long as its text, that is, not compressed."""
    return not path.name.lower().endswith(".gz") and _kind(path) != ".parquet"


def _kind(path: Path) -> str:
    """The suffix that gives the format of a file, in lower case; for a compressed file, the one before .gz."""
    name = path.name.lower()
    bare = _suffix(name.removesuffix(".gz"))
    return bare if bare in SUFFIXES[:-1] else _suffix(name)


def _suffix(name: str) -> str:
    """`Path(name).suffix`, in a tenth of the time: a source may have a thousand files."""
    place = name.rfind(".")
    return name[place:] if 0 < place < len(name) - 1 else ""


def _bytes_of(path: Path) -> Any:
    """The open file, unpacked where it is compressed."""
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _text(path: Path) -> Iterator[Document]:
    with _bytes_of(path) as file:
        raw = file.read(MOST_BYTES + 1 if path.suffix.lower() == ".gz" else -1)
    if path.suffix.lower() == ".gz" and len(raw) > MOST_BYTES:
        raise DataError(
            f"'{path}' holds more than {MOST_BYTES:,} bytes, which is no one document; unpack it, or leave it out"
        )
    try:
        yield Document(f"'{path}'", raw.decode().removeprefix(MARK))
    except UnicodeDecodeError as error:
        utf16 = ", as it begins like UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(
            f"'{path}' has byte 0x{error.object[error.start]:02x} at offset {error.start}, which is not UTF-8{utf16}; convert "
            "the file, or leave it out"
        ) from None


def _jsonl(path: Path, text_field: str) -> Iterator[Document]:
    with _bytes_of(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), start=1):
            if line.isspace():
                continue
            name = f"line {number} of '{path}'"
            if len(line) > MOST_BYTES:
                raise DataError(
                    f"{name} has more than {MOST_BYTES:,} bytes; write a document a line, or leave the file out"
                )
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{name} is not JSON ({error}); repair or remove the line") from None
            if not isinstance(row, dict):
                raise DataError(f"{name} is {type(row).__name__} but must be a JSON object with a field '{text_field}'")
            yield Document(name, field(row, text_field, name))


def _parquet(path: Path, text_field: str) -> Iterator[Document]:
    with _opened_parquet(path, text_field) as file:
        rows = itertools.count()
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            for row in batch.to_pylist():
                name = f"row {next(rows)} of '{path}'"
                yield Document(name, field(row, text_field, name))


@contextlib.contextmanager
def _opened_parquet(path: Path, text_field: str) -> Iterator[Any]:
    """The open file, which has the field."""
    require("pyarrow.parquet", "data", f"'{path}'")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names, leaves = file.schema_arrow.names, [file.schema.column(k) for k in range(len(file.schema))]
            if text_field not in [*names, *(leaf.path for leaf in leaves)]:
                strings = [leaf for leaf in leaves if leaf.logical_type.type == "STRING"]
                texts = [leaf.path for leaf in strings if not leaf.max_repetition_level]
                raise DataError(_no_field(f"'{path}'", text_field, names, texts))
            yield file
    except (ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:  # the last two from a value of a row
        raise DataError(
            f"'{path}' cannot be read as parquet ({first_line(error)}); write it again, or leave it out"
        ) from error


def field(row: Mapping[str, Any], text_field: str, name: str) -> str:
    """The text of a row, without a byte-order mark; null counts as an empty text. In "a.b", b is a field of the object a."""
    value: Any = row
    for key in [text_field] if text_field in row else text_field.split("."):
        if value is None:
            break
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(_no_field(name, text_field, row, _texts(row)))
        value = value[key]
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"field '{text_field}' in {name} is of type {type(value).__name__} but must be text; {_choose(_texts(row))}"
        )
    return (value or "").removeprefix(MARK)


def _texts(row: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The fields of a row, and of the objects in it, that are text."""
    for key, value in row.items():
        if isinstance(value, str):
            yield f"{above}{key}"
        elif isinstance(value, Mapping):
            yield from _texts(value, f"{above}{key}.")


def _no_field(name: str, text_field: str, fields: Iterable[str], texts: Iterable[str]) -> str:
    return f"{name} has no field '{text_field}'; it has: {_listed(fields) or 'none'}; {_choose(texts)}"


def _listed(fields: Iterable[str]) -> str:
    """The fields, cut to the length of a sentence."""
    first = [f"{field:.60}" for field in itertools.islice(fields, 41)]
    return ", ".join(first if len(first) <= 40 else [*first[:40], "..."])


def _choose(texts: Iterable[str]) -> str:
    fit = _listed(texts)
    return (
        f"set data.text_field to one that is text, of: {fit}" if fit else "none of its fields is text: write it as text"
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


class SourceFiles(NamedTuple):
    """The files of one source."""

    source: str
    files: tuple[Path, ...]
    left_out: Mapping[str, int]
    """How many files of a folder are not read, by their ending."""


def besides(left_out: Mapping[str, int]) -> str:
    """The unread files of a folder, in words; empty if all are read."""
    others = ", ".join(f"{count} {ending}" for ending, count in sorted(left_out.items()))
    return f"; left out: {others}" if others else ""


def source_files(sources: Sequence[str]) -> list[SourceFiles]:
    """The files of each source, in the order given, each file once; those of a folder or glob are sorted.

    Of a folder, all files are read that end in one of `SUFFIXES`, but no README.md next to jsonl or parquet, as it is about
    the text.

    Raises: DataError for a source without any file to read, and for a folder of which only a README would be.
    """
    seen: set[Path] = set()
    listed = []
    for source in sources:
        files, left_out = (_stdlib(), {}) if source == "stdlib" else _files_at(source)
        listed.append(SourceFiles(source, tuple(path for path in files if path not in seen), left_out))
        seen.update(files)
    return listed


def _files_at(source: str) -> tuple[list[Path], Mapping[str, int]]:
    path, left_out = Path(source).expanduser(), Counter[str]()
    if path.is_dir():
        # Hidden folders of editors and downloads, such as .ipynb_checkpoints, hold older copies of the same text.
        there = [p for p in _by_path(path.rglob("*")) if not _hidden(p.relative_to(path))]
        inside = [p for p in there if _kind(p) in SUFFIXES]
        cards = [p for p in inside if p.name.lower() == "readme.md"]
        if any(_kind(p) in (".jsonl", ".parquet") for p in inside):
            inside = [p for p in inside if p not in cards]
            left_out.update(p.name for p in cards)
        left_out.update(_ending(p) for p in there if _kind(p) not in SUFFIXES)
        if left_out and all(p.stem.lower() == "readme" for p in inside):
            names = f"only {inside[0].name} to read" if inside else "no readable file"
            raise DataError(
                f"data.source '{source}' has {names}{besides(left_out)}; convert those to one of: "
                f"{', '.join(SUFFIXES)}, or name files; tokens in .bin files are named one by one or as '{path / '*.bin'}'"
            )
    elif path.is_file():
        inside = [path]
    else:
        inside = _by_path(map(Path, glob.glob(str(path), recursive=True)))
    if not inside:
        raise DataError(
            f"data.source '{source}' names no readable file (the working folder is '{Path.cwd()}'); give an "
            f"existing file, a folder or a glob of files that end in one of: {', '.join((*SUFFIXES, TOKENS))}"
        )
    for p in inside:
        if _kind(p) not in (*SUFFIXES, TOKENS):
            raise DataError(
                f"'{p}' ends in '{_ending(p)}' but files must end in one of: {', '.join((*SUFFIXES, TOKENS))}; convert it, or "
                "rename it to the ending of its format"
            )
    return inside, left_out


def holds_tokens(sources: Sequence[SourceFiles]) -> bool:
    """Whether the files of all sources are tokens and no text. Raises DataError where there are both."""
    kinds = {_kind(path) == TOKENS: path for source in sources for path in source.files}
    if len(kinds) > 1:
        raise DataError(f"data.source names text, '{kinds[False]}', and tokens, '{kinds[True]}'; give one or the other")
    return True in kinds


def _ending(path: Path) -> str:
    """The suffix of a file that is not read, with the preceding one if it only gives the compression."""
    endings = [suffix.lower() for suffix in path.suffixes[-2:]]
    return (
        "".join(endings)
        if endings[-1:] in ([".gz"], [".zst"], [".bz2"], [".xz"])
        else "".join(endings[-1:]) or path.name
    )


def _hidden(path: Path) -> bool:
    """Whether a file is hidden: settings, caches and git's objects."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _by_path(paths: Iterable[Path]) -> list[Path]:
    return sorted((path for path in paths if path.is_file()), key=Path.as_posix)


def _stdlib() -> list[Path]:
    """The modules of the running Python's standard library.

    Without installed packages, tests, and modules that are tables rather than text: codecs, pydoc topics, build settings.
    """
    root = sysconfig.get_path("stdlib")
    if not (modules := _modules_in(root)):
        raise DataError(
            f"this Python keeps no source of its standard library in '{root}'; set data.source to other text"
        )
    return [*modules]


@functools.cache  # which do not change while Python runs
def _modules_in(root: str) -> tuple[Path, ...]:
    modules: list[Path] = []
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
        sources = (name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        modules += [Path(folder, name) for name in sources]
    return tuple(sorted(modules, key=Path.as_posix))


def held_out(text: str, val_fraction: float) -> bool:
    """Whether a text is for validation: its hash, as a number between 0 and 1, is below the fraction."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64
