"""Locks of the processes that train in a run folder, so that no second process cuts files that the first still writes.

The workers of one run each hold their own lock; a process that writes for all of them excludes any other. The system
releases a process's lock however it ends; the file `.lock-003` stays. Where the system or the file system has no locks,
no process is refused.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gossamer.errors import ConfigError
from gossamer.record.whole_files import make_folder, worker_suffix, writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ENDING_S = 3.0
"""How long to wait for a process that may be about to end, such as a worker whose launcher was just killed."""
LOOKING_S = 0.2
"""How long to wait for a process that only checks whether a lock is free, and so holds it for a moment."""
_NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path, worker: int | None, part: int = 0, parts: int = 1, *, strict: bool = True) -> Iterator[None]:
    """Locks the files of a worker, or one part of it, in a run folder; None locks those of all workers.

    Args: `strict` refuses if another process holds the lock; else this one continues without it, for example when it
        was given the slot of a process that hangs.
    Raises: ConfigError when another process trains there; DiskError.
    """
    is_new = not folder.exists()
    make_folder(folder)
    path = folder / f"{_NAME}{worker_suffix(worker, part, parts)}"
    with writing(path):
        file = path.open("a+b", buffering=0)  # a buffer that a full disk has refused is written again on close
    with file:
        if _taken(file, ENDING_S if strict else LOOKING_S) is not False:
            with contextlib.suppress(OSError):  # the content only identifies the holder
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                file.flush()
        elif strict:
            raise _already_trains(folder, file)
        if strict:
            # While holding its own lock: of two processes that start at once, at least one sees the other.
            others = [one for one in _locks(folder) if one != path] if worker is None else [folder / _NAME]
            _must_be_free(folder, others)
        try:
            yield
        except BaseException:
            # A process refused before it has written anything removes the folder, which would block the next one.
            with contextlib.suppress(OSError):
                if is_new and [*folder.iterdir()] == [path]:
                    path.unlink()
                    folder.rmdir()
            raise


def must_be_idle(folder: Path) -> None:
    """Refuses a run folder in which a process trains, before workers are started that would each refuse. Raises: ConfigError."""
    _must_be_free(folder, _locks(folder))


def _locks(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_NAME}*"))


def _must_be_free(folder: Path, locks: Iterable[Path]) -> None:
    """Raises ConfigError where another process holds one of these locks; missing files are free."""
    for path in locks:
        with contextlib.suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
            if _taken(file, ENDING_S, shared=True) is False:
                raise _already_trains(folder, file)


def trains_here(folder: Path, worker: int) -> bool | None:
    """Whether a process trains as this worker in a run folder; None where locks cannot show it, as across machines."""
    stem = f"{_NAME}{worker_suffix(worker)}"
    free: list[bool] = []
    for path in (path for name in (stem, f"{stem}-*") for path in folder.glob(name)):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if (taken := _taken(file, 0.0, shared=True)) is False:
                return True
            # A lock of another machine may be invisible here, and a copied folder has none.
            free.append(bool(taken) and file.read(200).decode(errors="replace").endswith(f" on {socket.gethostname()}"))
    return False if free and all(free) else None


def _taken(file: BinaryIO, patience_s: float, *, shared: bool = False) -> bool | None:
    """Takes the lock of a file, until it is closed; False where another process keeps it so long, None without locks.

    Args: `shared` is for those that only look, so that they do not take each other for one that trains.
    """
    until = time.monotonic() + patience_s
    while fcntl is not None:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        except OSError:
            return None
        else:
            return True
    return None


def _already_trains(folder: Path, file: BinaryIO) -> ConfigError:
    file.seek(0)
    owner = file.read(200).decode(errors="replace")
    who = owner if re.fullmatch(r"process [0-9]{1,10} on [\w.-]{1,64}", owner) else "another process"
    return ConfigError(
        f"the run in '{folder}' is in progress, as {who} trains in it; wait for its end, stop it first, or name another folder "
        "with --out"
    )
