"""Files of a run: written atomically, and named after the worker that writes them."""

import contextlib
import errno
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from gossamer.errors import DiskError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for a full disk, an exceeded quota, or a file-size limit."""
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)
"""Errors of file systems such as CIFS and gcsfuse that cannot open a folder as a file, or sync it."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context for writes to `path`, in which any failure raises DiskError with its name."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        instead = (
            "free some space, then call it again (a run with --resume), or name another place with --out"
            if error.errno in _FULL
            else "name another place, or let this one be written"
        )
        raise DiskError(f"'{path}' could not be written ({error.strerror or error}); {instead}") from None


def make_folder(path: Path) -> None:
    """Creates a folder with its parents, unless it exists. Raises DiskError."""
    if str(path).encode(errors="ignore") != os.fsencode(path):  # safetensors would write there, and read nothing
        raise DiskError(f"'{path}' is no name in UTF-8, which checkpoints and models need; name another folder")
    if re.match(r"[A-Za-z][A-Za-z0-9]+:/", str(path)):  # of a URL, which as a path has one slash
        raise DiskError(f"'{path}' is an address, and a folder of this machine is to be made; name a folder")
    if path.exists() and not path.is_dir():
        raise DiskError(f"'{path}' is a file, and a folder is to be made there; name another folder")
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


class Appender:
    """A text file that grows line by line; every line is flushed at once, so a killed process keeps it.

    The remains of a killed process's last line are removed first, as no line may follow half a line.

    Raises: DiskError, from the constructor and from `write`, when writing fails.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            if path.is_file():
                _end_last_line(path)
            # Unbuffered: a buffer would be written again on close after a failure.
            self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Appends one line, which ends in a line break."""
        rest = line.encode()
        with writing(self._path):
            # The file was deleted: it would grow unseen, and vanish at the end.
            if not os.fstat(self._file.fileno()).st_nlink:
                raise DiskError(
                    f"'{self._path}' was removed while the run was writing it, so the record of its earlier rounds is lost; "
                    "bring it back and go on with --resume, or start again with another --out"
                )
            while rest:  # a nearly full disk may write a part
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._file.close()


def _end_last_line(path: Path) -> None:
    """Removes a half-written last line; one that only lacks its line break is complete for readers, and gets one."""
    with path.open("r+b") as file:
        if not file.seek(0, os.SEEK_END):
            return
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
        file.seek(0)
        content = file.read()
        begin = content.rfind(b"\n") + 1
        try:
            json.loads(content[begin:])
        except (ValueError, RecursionError):
            file.truncate(begin)
        else:
            file.write(b"\n")


class LineWriter:
    """The writer of one file of lines, a context manager that closes it."""

    def __init__(self, path: Path) -> None:
        self._file = Appender(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._file.close()


def atomic_write(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically: after a crash there is the old file or the new one, never a part.

    Raises: DiskError when writing fails.
    """
    with writing(path):
        _atomic_write(path, data)


def _atomic_write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the rename: else a power cut may leave the name without its bytes
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Syncs the names in a folder: else a power cut may lose a name although its bytes were written.

    Does nothing on Windows, which opens no folder as a file, and keeps the names of NTFS in a journal; nor on a file system that
    does not offer this for folders, as many network file systems and buckets do not. Any other fault of the disk is raised.
    """
    if sys.platform == "win32":
        return
    try:
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def worker_of_file(name: str) -> int | None:
    """The worker that writes a file of lines, by its name; None where one process writes for all.

    >>> worker_of_file("metrics-003.jsonl"), worker_of_file("metrics.jsonl"), worker_of_file("metrics-evaluated.jsonl")
    (3, None, None)
    """
    number = name.removesuffix(".jsonl").rpartition("-")[2]
    return int(number) if "-" in name and number.isascii() and number.isdigit() else None


def worker_suffix(worker: int | None, part: int = 0, parts: int = 1) -> str:
    """The file-name suffix of one worker, or one part of it; empty where one process writes for all.

    >>> worker_suffix(None), worker_suffix(3), worker_suffix(3, part=1, parts=2)
    ('', '-003', '-003-1')
    """
    if worker is None:
        return ""
    return f"-{worker:03}" + (f"-{part}" if parts > 1 else "")
