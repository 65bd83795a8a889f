"""Files of a run: whole or not there at all, and named after the worker that writes them."""

import os
import threading
from pathlib import Path

__all__ = ["atomic_write", "worker_suffix"]


def atomic_write(path: Path, data: bytes) -> None:
    """Puts `data` at `path` all at once: after a crash there is the old file or the new one, never a part.

    Raises: OSError when the disk refuses.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else the name may be lost in a power cut although the bytes are not
    finally:
        os.close(folder)


def worker_suffix(worker: int | None, part: int = 0, parts: int = 1) -> str:
    """What the name of a file ends in that one worker writes, or one part of a worker; nothing where one process writes for all.

    >>> worker_suffix(None), worker_suffix(3), worker_suffix(3, part=1, parts=2)
    ('', '-003', '-003-1')
    """
    if worker is None:
        return ""
    return f"-{worker:03}" + (f"-{part}" if parts > 1 else "")
