"""`gossamer` as tests run it: to its end in this process, or in one of its own, which can be watched, stopped and killed.

Starting Python and importing torch takes far longer than what most tests train, so processes are forks (`import_early`), of one
process for all processes of tests: what a command starts is forked from the same as the command.
"""

import contextlib
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import queue
import runpy
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch

from gossamer.cli import main
from gossamer.cli.train import import_early

PR_SET_PDEATHSIG = 1
CONTEXT = multiprocessing.get_context("forkserver")
IN_FILES_OF_TESTS = ("pytest", "hypothesis.strategies", "torch._dynamo")
"""The imports of a process that calls a function of such a file, which it would repeat each time, as torch's optimizers do."""
Work = Callable[[list[str]], int]
"""From the words of a command to its exit code."""


def start_forking() -> None:
    """Processes that tests start are forks of one that has imported what they need."""
    import_early(*IN_FILES_OF_TESTS)


def run(*words: object) -> tuple[int, str]:
    """Exit code and output of `gossamer WORDS`, here; the workers it starts are processes."""
    if "--local" in words:
        start_forking()
    output = io.StringIO()
    # A command sets variables for the workers it starts, which later commands shall not find.
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main([*map(str, words)])
    return code, output.getvalue()


def done(*words: object) -> str:
    """The output of `gossamer WORDS`, which ends well."""
    code, output = run(*words)
    assert code == 0, output
    return output


def _enter(work: Work | None, words: list[str], folder: str, environment: dict[str, str], out: Connection) -> None:
    gc.freeze()
    os.environ.clear()  # that of the fork server, which had what the first test that needed one had set
    # It knows where its own fork server is, and would start another, although its documentation says that it does nothing.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign, attr-defined]
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in its background ignore it
    faulthandler.enable()  # where it hangs, it tells by SIGABRT
    sys.modules["__main__"] = types.ModuleType("__main__")  # else each process that it starts imports pytest
    sys.exit((work or main)(words))


_given = set[int]()


def free_port() -> int:
    """A port of loopback that nobody has, and that the system gives to nobody who asks for any, such as gloo, a moment later."""
    # Below the range of such ports, from 32,768 on; each process of the tests has its own, as a port may be taken only later.
    first = 10_000 + 2_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10)
    while True:
        port = first + secrets.randbelow(2_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in _given:
                _given.add(port)
                return port


def program(words: list[str]) -> int:
    """The work of a `Command` that is a file of Python and its arguments, in place of a verb."""
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def must_have_stages_in_processes() -> None:
    """Skips the test where this torch has no stages in several processes."""
    from gossamer.run.worker.stages.torch_stage import SINCE  # with all of torch's pipelines

    if torch.__version__ < SINCE:
        pytest.skip(f"stages in several processes need torch {SINCE}")


def in_forks(n: int, work: Callable[[int], object]) -> int:
    """Calls `work` with 0 to n - 1, each in a fork of this process, which has imported what they need; ends all when one fails.

    Returns: 0 if none has failed, else 1.
    """
    gc.collect()
    gc.freeze()  # else collections in each of them look at all that was imported, and copy it
    running = set[int]()
    for rank in range(n):
        fork = os.fork()
        if fork == 0:
            _work_to_the_end(work, rank)
        running.add(fork)
    codes = []
    while running:
        fork, status = os.wait()
        running.discard(fork)
        codes.append(os.waitstatus_to_exitcode(status))
        for other in running if status else ():
            os.kill(other, signal.SIGKILL)
    print("they ended with", codes)
    return int(any(codes))


def _work_to_the_end(work: Callable[[int], object], rank: int) -> NoReturn:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its parent
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forks() -> dict[int, str]:
    """The names of the processes that the processes of tests and their commands have started, by their ids."""
    parent = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    found = {}
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found[int(pid)] = Path(f"/proc/{pid}/comm").read_text().removesuffix("\n")
    return found


def _pipes(pid: int | str) -> set[str]:
    """The pipes of which a process has an end; none where it has ended."""
    held = set[str]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                held.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {one for one in held if one.startswith("pipe:")}


class Command:
    """`gossamer WORDS` (or other `work`), started; its output and its errors come as the lines of one stream."""

    def __init__(self, *words: object, work: Work | None = None, **environment: str) -> None:
        start_forking()
        source, sink = CONTEXT.Pipe(duplex=False)
        mine = (work, [*map(str, words)], os.getcwd(), {**os.environ, **environment}, sink)
        self._process = CONTEXT.Process(target=_enter, args=mine)
        self._process.start()
        sink.close()
        self._lines = open(os.dup(source.fileno()), errors="replace")  # noqa: SIM115
        source.close()
        self._output: list[str] = []
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Its lines are read as they come: it would stand still once a pipe is full that nobody reads.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        """Ends it at once, as a machine that dies does; nothing where it has ended by itself: its exit code tells."""
        self._process.kill()

    def lines(self) -> Iterator[str]:
        """Its lines, as they come."""
        return iter(self._said.get, None)

    def _read(self) -> None:
        for line in self._lines:
            self._output.append(line)
            self._said.put(line)
        self._said.put(None)

    def finish(self, timeout_s: float = 250.0) -> tuple[int, str]:
        """Exit code and output, once it has ended; if it has not within `timeout_s` it is killed, and says where it was."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            os.kill(self.pid, signal.SIGABRT)
            self._process.join(10)
        self._process.kill()
        self._process.join()
        self._reader.join()  # the workers hold the stream too, and end with their launcher
        self._lines.close()
        assert self._process.exitcode is not None
        return self._process.exitcode, "".join(self._output)

    def processes(self, n: int, deadline_s: float = 120.0) -> dict[str, int]:
        """The process ids of the n processes that it has started on this machine, by their names: "0" or "server"."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            # It shares pipes with what it has started: all are forks of one process. All forks have one that we have, too.
            ours = _pipes(self.pid) - _pipes("self")
            forks = {pid: name for pid, name in _forks().items() if _pipes(pid) & ours}
            found = {name[10:].rstrip("]"): pid for pid, name in forks.items() if name.startswith("gossamer [")}
            if len(found) == n:
                return found
            time.sleep(0.05)
        raise AssertionError(f"they did not come up: {self.finish(0)}")


def until(holds: Callable[[], bool], *commands: Command) -> None:
    """Waits, for many seconds if need be; shows what commands have printed where it never comes to hold."""
    deadline = time.monotonic() + 150
    while not holds():
        assert time.monotonic() < deadline, [command.finish(0) for command in commands]
        time.sleep(0.02)
