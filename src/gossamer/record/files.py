"""Files that are there whole or not at all."""

import os
import threading
from pathlib import Path

__all__ = ["atomic_write"]


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
