"""The functions of `passes.c`, compiled once on a machine that has a C compiler: with them, codecs make one pass over
memory each way.

Results are bitwise those of the plain form in Python, which is used without a compiler, off the CPU, for dtypes other
than fp32 and for short tensors. The compiled file is kept in a folder that only this user can write, as anyone who
could write there could run code.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LONG = 1 << 14
"""The number of elements from which the call pays off."""
_SOURCE = Path(__file__).with_suffix(".c")
# No fused multiply-add, as Python rounds product and sum separately; and no option that changes results.
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fwrapv", "-fno-math-errno")
log = logging.getLogger("gossamer")


class Passes:
    """The functions of a compiled file, called with tensors and whole numbers; they release the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __call__(self, name: str, *given: Tensor | int) -> None:
        function: Any = getattr(self._library, name)
        function(*(ctypes.c_int64(x) if isinstance(x, int) else ctypes.c_void_p(x.data_ptr()) for x in given))


def passes_for(x: Tensor) -> Passes | None:
    """The compiled functions for this tensor; None where the plain form is used.

    Cost: a second at the first call on a machine, where it is compiled.
    """
    long = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() >= LONG and x.is_contiguous()
    return _compiled() if long else None


@functools.cache
def _compiled() -> Passes | None:
    compiler = next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if (path := shutil.which(name or ""))), ""
    )
    if not compiler or sys.byteorder != "little" or sys.platform == "win32":
        log.warning(
            "no C compiler (cc) was found: codecs are several times slower, with the same numbers; install gcc or clang"
        )
        return None
    try:
        return _loaded(compiler)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (
            error.stderr.strip().splitlines()[:1] if isinstance(error, subprocess.CalledProcessError) else [str(error)]
        )
        log.warning(
            f"{compiler} did not compile the codecs ({' '.join(lines)}): they are several times slower, with the same numbers"
        )
        return None


def _loaded(compiler: str) -> Passes:
    key = repr((_SOURCE.read_text(encoding="utf-8"), _FLAGS, compiler, platform.machine(), platform.platform()))
    name = f"passes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
        is_private = stat.st_uid == os.getuid() and not stat.st_mode & 0o022 and os.access(folder, os.W_OK)
    except (OSError, RuntimeError):
        is_private = False
    if is_private and (folder / name).exists():
        return Passes(folder / name)
    with tempfile.TemporaryDirectory(dir=folder if is_private else None) as new:
        kept = folder / name if is_private else Path(new, name)
        began = time.perf_counter()
        compile_to(Path(new, "passes.so"), compiler)
        os.replace(Path(new, "passes.so"), kept)  # atomically, as several processes may compile it
        log.info(f"compiled the codecs in {time.perf_counter() - began:.1f} s, kept in {kept}")
        return Passes(kept)  # once loaded, the file is no longer needed


def compile_to(target: Path, compiler: str, *more: str) -> None:
    """Compiles `passes.c`, with additional flags. Raises: OSError, CalledProcessError."""
    words = [compiler, *_FLAGS, *more, "-o", str(target), str(_SOURCE)]
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
