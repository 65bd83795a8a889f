"""Who trains in a run folder now: each process holds a lock there, so that no second one cuts what the first still writes.

Workers of one run are there together, each with its own lock; one process that writes for all of them is there alone. The lock
of a process is free as soon as that has ended, however it ended; its file `.lock-003` stays. Where the system or the file system
has no locks, nobody is refused.
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
"""How long a process is waited for that may be about to end, as workers do whose launcher was killed a moment ago."""
LOOKING_S = 0.2
"""How long whoever looks whether a lock is free, and so has it for a moment, is waited for."""
_NAME = ".lock"


@contextlib.contextmanager
def holding(folder: Path, worker: int | None, part: int = 0, parts: int = 1, *, strict: bool = True) -> Iterator[None]:
    """Inside, this process alone writes what a worker or one part of it writes into a run folder; None writes for all.

    Args: `strict` refuses where another process holds the lock; else this one goes on without it, as one does that others of its
        run have given the slot of a process that hangs.
    Raises: ConfigError when another process trains there; DiskError.
    """
    is_new = not folder.exists()
    make_folder(folder)
    path = folder / f"{_NAME}{worker_suffix(worker, part, parts)}"
    with writing(path):
        file = path.open("a+b")
    with file:
        if _taken(file, ENDING_S if strict else LOOKING_S) is not False:
            with contextlib.suppress(OSError):  # it only helps to say who it is
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                file.flush()
        elif strict:
            raise _under_way(folder, file)
        if strict:
            # With the own lock in hand: of two that come at once, one at least sees the other.
            others = [one for one in _locks(folder) if one != path] if worker is None else [folder / _NAME]
            _must_be_free(folder, others)
        try:
            yield
        except BaseException:
            # One that is refused before it has written anything leaves no folder behind, which the next would find in its way.
            with contextlib.suppress(OSError):
                if is_new and [*folder.iterdir()] == [path]:
                    path.unlink()
                    folder.rmdir()
            raise


def must_be_idle(folder: Path) -> None:
    """Refuses a run folder in which any process trains, before others are started that would each say so. Raises: ConfigError."""
    _must_be_free(folder, _locks(folder))


def _locks(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_NAME}*"))


def _must_be_free(folder: Path, locks: Iterable[Path]) -> None:
    """Raises ConfigError where another process holds one of these locks, which may not be there."""
    for path in locks:
        with contextlib.suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
            if _taken(file, ENDING_S, shared=True) is False:
                raise _under_way(folder, file)


def trains_here(folder: Path, worker: int) -> bool | None:
    """Whether a process trains as this worker in a run folder; None where its locks do not tell, as of other machines."""
    own = f"{_NAME}{worker_suffix(worker)}"
    free: list[bool] = []
    for path in (path for name in (own, f"{own}-*") for path in folder.glob(name)):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if (taken := _taken(file, 0.0, shared=True)) is False:
                return True
            # The lock of another machine's process may not be seen here, and a folder that was copied has none.
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


def _under_way(folder: Path, file: BinaryIO) -> ConfigError:
    file.seek(0)
    said = file.read(200).decode(errors="replace")
    who = said if re.fullmatch(r"process [0-9]{1,10} on [\w.-]{1,64}", said) else "another process"
    return ConfigError(
        f"the run in '{folder}' is under way, as {who} trains in it; wait for its end, stop it first, or name another folder "
        "with --out"
    )
