"""The processes of tests (`pytest --numprocesses`) as forks of the one that starts them, which has imported all tests by then.

Each would import them for ten seconds, and start a fork server that imports for seven; the forks share the server, too.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.config import apply_warning_filters

if TYPE_CHECKING:
    from execnet.gateway_base import ExecModel
    from execnet.xspec import XSpec


class _Fork:
    """What execnet asks of the `Popen` of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


WRITTEN = tempfile.TemporaryFile("a+b")  # noqa: SIM115
"""What forks of the fork server write to their standard streams, where nobody has given them others."""


def written_of_late() -> str:
    """The end of what all forks have written."""
    length = os.fstat(WRITTEN.fileno()).st_size
    return os.pread(WRITTEN.fileno(), 4000, max(0, length - 4000)).decode(errors="replace")


@contextlib.contextmanager
def writing_there() -> Iterator[None]:
    """The standard streams of this process, and of those that it starts here, are `WRITTEN`."""
    kept = os.dup(1), os.dup(2)
    os.dup2(WRITTEN.fileno(), 1)
    os.dup2(WRITTEN.fileno(), 2)
    try:
        yield
    finally:
        for stream, own in enumerate(kept, 1):
            os.dup2(own, stream)
            os.close(own)


def fork_workers(config: pytest.Config, specs: "Sequence[XSpec]", tests: Sequence[Path]) -> None:
    """Forks the processes that xdist is about to start, after an import of these tests; xdist is then given the forks.

    A process that xdist starts in place of one that died imports for itself.
    """
    from execnet import gateway_io

    gc.disable()  # what is imported stays
    with warnings.catch_warnings():
        apply_warning_filters(config.getini("filterwarnings"), ())
        import torch

        torch.set_num_threads(1)  # threads would not exist in a fork
        from commands import start_forking

        with writing_there():
            start_forking()  # its server imports meanwhile
        for path in tests:
            try:
                importlib.import_module(path.stem)
            except (Exception, pytest.skip.Exception):
                continue  # imported again, and reported, by the process that collects it
    # A fork could wait for ever for a lock that another thread held; xdist starts processes then, as it does without this.
    if threading.active_count() > 1:
        warnings.warn(f"tests are not run in forks, as an import started {threading.enumerate()[1:]}", stacklevel=1)
        return
    gc.freeze()  # else the first collections of each fork would copy all of that memory
    ready = list[gateway_io.Popen2IOMaster]()
    for _ in specs:
        ready.append(_forked(config, ready))
    ready.reverse()
    started = gateway_io.create_io

    def create_io(spec: "XSpec", execmodel: "ExecModel") -> gateway_io.Popen2IOMaster:
        if not ready:
            return started(spec, execmodel)
        one = ready.pop()
        one.execmodel = execmodel
        return one

    gateway_io.create_io = create_io
    gc.enable()


def _forked(config: pytest.Config, others: Sequence[Any]) -> Any:
    from execnet import gateway_io

    (from_here, to_it), (from_it, to_here) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for other in others:  # a process is seen to have died when nobody holds the other end of its pipe
                other.outfile.close()
                other.infile.close()
            os.close(to_it)
            os.close(from_it)
            _serve(config, from_here, to_here)
        finally:
            os._exit(1)  # not a second pytest
    os.close(from_here)
    os.close(to_here)
    io = gateway_io.Popen2IOMaster.__new__(gateway_io.Popen2IOMaster)
    io.popen = _Fork(pid)
    super(gateway_io.Popen2IOMaster, io).__init__(os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb"), None)
    return io


def _serve(config: pytest.Config, from_here: int, to_here: int) -> NoReturn:
    """Does as `python -c BOOTSTRAP` does, with which execnet starts a process."""
    from execnet.gateway_io import popen_bootstrapline

    atexit._clear()  # what the first process shall do at its end, but for this, which ends what tests have started
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    os.dup2(from_here, 0)
    os.dup2(to_here, 1)
    os.close(from_here)
    os.close(to_here)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    # That of the first process would look whether it lives, and start another, as it is not its child.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main  # else each process that a test starts imports pytest's
    code = 1
    try:
        exec(popen_bootstrapline, main.__dict__)
        code = 0
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)
