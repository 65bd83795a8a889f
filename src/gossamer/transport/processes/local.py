"""All processes of a run on this machine: starting them, forwarding their output, and ending them."""

import contextlib
import gc
import io
import logging
import math
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

from gossamer.record.progress import counting_children
from gossamer.stop_signals import has_launcher, ignore_stop_signals
from gossamer.transport.keys import Keys
from gossamer.transport.processes.keyed_store import meeting_store
from gossamer.transport.processes.launch import intra_op_threads
from gossamer.transport.processes.member import place_of, sizes_of_workers
from gossamer.transport.processes.store import Entries, hosted_store, report_fallen, shared_part
from gossamer.transport.secret import SECRET, environment_secret, new_secret

LISTENER = "GOSSAMER_LISTENER"
"""The environment variable with the file descriptor of the listening socket that a server inherits, and uses once."""


class Among(NamedTuple):
    """The place of the processes of this machine among those of several."""

    first: int
    """The rank of the first of them."""
    of: int
    """Processes on all machines."""
    host: str
    """The machine of rank 0, where the store of the run is."""
    port: int
    keys: Keys | None = None
    """The keys of the run, which protect that store."""


Work = Callable[[Sequence[str]], int]
"""The work of a process, from its arguments to its exit code; a module-level function, as processes import it by name."""

ASKED = "all workers are asked to leave after their round; stop once more to end them at once"
STOPPED = 130
"""The exit code of a process that was stopped, as for Ctrl-C."""
REPORT_S = 5.0
"""How long a launcher tries to reach the store of another machine."""
LAST_WORDS_S = 10.0
"""How long a launcher forwards what ended processes have written; a process that they started may hold their output open."""

log = logging.getLogger("gossamer")


def run_local(
    n: int,
    work: Work,
    argv: Sequence[str],
    *,
    parts: int | Sequence[int] = 1,
    among: Among | None = None,
    grace_s: float = 10.0,
) -> int:
    """Runs n workers on this machine over loopback, and forwards their output with the worker's number before each line.

    Workers of several parts are as many processes each, and their lines begin with the numbers of both, such as `[3.1]`.

    The store lives here, so it outlives every worker, and its entries are authenticated by a secret that only they get.
    When a worker fails, workers that wait for others to start see it in the store, and all have `grace_s` to end by
    themselves. So a run ends at most that long after the first failure: a death, or a wait that exceeded
    `run.timeout_s`. No worker outlives this process.

    Args:
        work: the function of each worker, such as `gossamer.cli.main`.
        argv: its arguments, such as `["train", "run.toml"]`.
        parts: processes of a worker, or those of each, which are the n workers or all of the run.
        among: for a run on several machines; then worker 0 has the store, and the processes connect to it as those of
            other machines do.
    Returns: the exit code of the worker that failed first (128 + k if signal k ended it), else 0, or `STOPPED` if one was.
    Raises: KeyboardInterrupt when this process is stopped, once all workers have left: they save after a common round.
        A second stop ends them at once.
    """
    sizes = sizes_of_workers(n, parts) if isinstance(parts, int) else tuple(parts)
    first, _ = (0, 0) if among is None else place_of(among.first, sizes)
    names = _names(sizes)[sum(sizes[:first]) : sum(sizes[: first + n])]
    with _workers(names, work, argv, b"", among) as (workers, report):
        try:
            return _outcome(workers, grace_s, lambda rank, code: report(names[rank], code))
        except KeyboardInterrupt:
            log.warning("%s", ASKED)
            _ask_to_leave(workers)
            # A second signal would end them in the middle of a round.
            _outcome(workers, grace_s, lambda rank, code: None, stopped=True)
            raise


def _names(sizes: Sequence[int]) -> list[str]:
    """The name of each process: the worker's number, and for several parts a dot and the part's number."""
    return [str(w) if size == 1 else f"{w}.{part}" for w, size in enumerate(sizes) for part in range(size)]


def run_elastic(
    n: int,
    work: Work,
    argv: Sequence[str],
    secret: bytes,
    fell: Callable[[int, int, str], None] = lambda *_: None,
    among: Among | None = None,
) -> dict[int, int]:
    """Runs n workers of an elastic run like `run_local`; when one fails, the others continue.

    Args:
        secret: of the run, which workers that join must have too.
        fell: called with each failed worker, its exit code, and whether others continue, as soon as it is noticed.
        among: as in `run_local`.
    Returns: the exit code of each worker (128 + k if signal k ended it), in the order in which they ended.
    Raises: KeyboardInterrupt when this process is stopped, once all workers have left: they finish their round and
        save. A second stop ends them at once.
    """
    first = 0 if among is None else among.first
    with _workers([str(first + i) for i in range(n)], work, argv, secret, among) as (workers, report):

        def reported(worker: int, code: int, left: str) -> None:
            report(str(worker), code)
            fell(worker, code, left)

        try:
            return _codes(workers, reported, first)
        except KeyboardInterrupt:
            log.warning("%s", ASKED)
            _ask_to_leave(workers)
            _codes(workers, lambda *_: None, first)
            raise


@contextlib.contextmanager
def _workers(
    names: Sequence[str], work: Work, argv: Sequence[str], secret: bytes, among: Among | None = None
) -> Iterator[tuple[list[BaseProcess], Callable[[str, int], None]]]:
    """The started processes of a run, by name, and a function that reports a failed one with its exit code to the
    others.

    Their store lives here, unless the run spans several machines.
    """
    common = {"LOCAL_WORLD_SIZE": str(len(names))}
    if among is None:
        secret = environment_secret() or secret or new_secret().encode()
        store = hosted_store("127.0.0.1", 0)
        among = Among(0, len(names), "127.0.0.1", store.port)
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": loopback()}
    else:
        secret, store = environment_secret(), None
    common |= {"MASTER_ADDR": among.host, "MASTER_PORT": str(among.port), "WORLD_SIZE": str(among.of)}

    def report(name: str, code: int) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # worker 0's store, which may be gone or not started yet
            place = {"hosts": False, "me": among.first, "keys": among.keys, "timeout_s": REPORT_S}
            shared, behind = meeting_store(among.host, among.port, **place) if store is None else (store, None)
            try:
                report_fallen(Entries(shared_part(shared), secret, REPORT_S), name, code)
            finally:
                if behind is not None:
                    behind.close()

    with _children(len(names), work, secret) as start:
        workers = [
            start(argv, f"[{name}] ", {**common, "RANK": str(among.first + i), "LOCAL_RANK": str(i)})
            for i, name in enumerate(names)
        ]
        yield workers, report


def run_served(
    n: int, work: Work, argv: Sequence[str], secret: bytes, *, resume: Sequence[str] = (), grace_s: float = 10.0
) -> int:
    """Runs a server and n workers on this machine over loopback; a worker that fails does not stop the others.

    When a signal ends the server, its workers retry for `run.timeout_s`, and it may be resumed at its port.

    The listening socket is created here and inherited by the server, so that no other process can take its port.

    Args:
        work: as in `run_local`.
        argv: the arguments of every process; `--server HOST:PORT` and, for workers, `--worker I` are added.
        secret: of the run, which each gets in its environment.
        resume: the arguments with which the server is resumed, without `--server HOST:PORT`.
        grace_s: how long workers have to end by themselves once the server has ended by itself.
    Returns: the exit code of the server (128 + k if signal k ended it); 0 when all workers trained to the end of a resumed one.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, _children(n, work, secret) as start:
        at = ["--server", f"127.0.0.1:{listener.getsockname()[1]}"]
        own = [[*argv, *at, "--worker", str(i)] for i in range(n)]
        workers = [start(words, f"[{i}] ", {}) for i, words in enumerate(own)]
        server = start([*argv, *at], "[server] ", {}, listener)
        listener.close()  # now only the server has it; once it is gone, no connection is possible
        try:
            code = _served_code(server, workers, own)
        except KeyboardInterrupt:
            # Its workers keep running: without them its round would never end.
            log.warning("the server is asked to save and to end after its round; stop once more to end it at once")
            server.terminate()
            server.join()
            _ask_to_leave(workers)  # as below
            _wait(workers, time.monotonic() + grace_s)
            raise
        deadline = time.monotonic() + grace_s
        if code > 0:  # stopped or failed: they would look for a server until `run.timeout_s` is over
            _ask_to_leave(workers)
        if code < 0:
            again = shlex.join(["gossamer", *resume, *at])
            log.warning("the server ended with code %d; its workers try again; resume it with %s", _shown(code), again)
            deadline = math.inf
        _wait(workers, deadline)
        if code < 0 and all(worker.exitcode == 0 for worker in workers):
            return 0
        return _shown(code)


def _served_code(server: BaseProcess, workers: Sequence[BaseProcess], own: Sequence[Sequence[str]]) -> int:
    """Waits for the end of a server, and reports failed workers; returns the exit code of its process.

    Args: `own` has the arguments of each worker.
    """
    fallen: set[int] = set()
    while (code := server.exitcode) is None:
        for i, worker in enumerate(workers):
            if worker.exitcode and i not in fallen:
                fallen.add(i)
                log.warning(
                    "worker %d ended with code %d, and %s; start it again with %s",
                    i,
                    _shown(worker.exitcode),
                    _left(workers),
                    shlex.join(["gossamer", *own[i]]),
                )
        time.sleep(0.05)
    return code


@contextlib.contextmanager
def _children(n: int, work: Work, secret: bytes) -> Iterator[Callable[..., BaseProcess]]:
    """A function that starts processes, whose output is forwarded with a prefix; on exit, all of them are ended.

    On Linux they are forks of one process with preloaded imports (`multiprocessing.set_forkserver_preload`), which
    would cost every worker seconds of a core. That process does no work and has one thread, so it can be forked.
    Elsewhere, system libraries do not survive a fork, and every process imports for itself.
    """
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    common = {
        **os.environ,
        SECRET: secret.decode(),
        "OMP_NUM_THREADS": str(intra_op_threads(0, n)),
    }
    processes: list[BaseProcess] = []
    pumps: list[threading.Thread] = []

    def start(
        argv: Sequence[str], prefix: str, environment: Mapping[str, str], listener: socket.socket | None = None
    ) -> BaseProcess:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        name = prefix.strip("[] ")  # among several parts of a worker, the first counts its steps
        variables = {**common, **(counting() if name.endswith(".0") or "." not in name else {}), **environment}
        given = work, [*argv], prefix, variables, os.getcwd(), *(inner for _, inner in pipes), listener
        process = context.Process(target=_enter, name=name, args=given)
        process.start()
        processes.append(process)
        for (outer, inner), sink in zip(pipes, (sys.stdout, sys.stderr), strict=True):
            inner.close()
            pumps.append(_forward(outer, sink, prefix))
        return process

    with counting_children() as counting:
        try:
            yield start
        finally:
            _end(processes)
            deadline = time.monotonic() + LAST_WORDS_S
            for pump in pumps:
                pump.join(max(0.0, deadline - time.monotonic()))


def end_with_parent() -> None:
    """Makes this process, started by multiprocessing, end with its parent, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A killed parent does not end its children, and with a forkserver it is not the parent for the system.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _enter(
    work: Work,
    argv: list[str],
    prefix: str,
    environment: dict[str, str],
    folder: str,
    out: Connection,
    err: Connection,
    listener: socket.socket | None,
) -> None:
    """The entry point of a new process: sets up session, environment, folder and output, and then works."""
    gc.freeze()  # else its first collections would scan all imports, and copy the shared memory
    os.setsid()  # Ctrl-C and a terminal's hang-up reach only the launcher, which then asks its processes to leave
    has_launcher()
    end_with_parent()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"gossamer {prefix.strip()}")  # the name in `top` and `ps -o comm`
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if listener is not None:
        os.environ[LISTENER] = str(listener.detach())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # the launcher forwards line by line
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch read the variable on import
    code = work(argv)
    # Once one process was stopped, the launcher stops all: that signal's exception during Python's shutdown would give
    # code 1.
    ignore_stop_signals()
    sys.exit(code)


def _wait(workers: Sequence[BaseProcess], deadline: float) -> None:
    """Waits until all have ended, or until a deadline on the clock of `time.monotonic`."""
    while any(worker.exitcode is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)


def _ask_to_leave(workers: Sequence[BaseProcess]) -> None:
    """Sends SIGTERM to the running ones."""
    for worker in workers:
        if worker.exitcode is None:
            worker.terminate()


def _shown(code: int) -> int:
    """The exit code of a process in a shell's convention: 128 + k if signal k ended it."""
    return code if code >= 0 else 128 - code


def _left(workers: Sequence[BaseProcess]) -> str:
    """Whether any worker continues, in words."""
    return "the others go on" if any(worker.exitcode is None for worker in workers) else "no other is left"


def _codes(workers: Sequence[BaseProcess], fell: Callable[[int, int, str], None], first: int = 0) -> dict[int, int]:
    """The exit code of each worker, whose numbers begin at `first`, once all have ended; `fell` is called for failed ones."""
    codes: dict[int, int] = {}
    while True:
        for worker, process in enumerate(workers, first):
            code = process.exitcode
            if code is not None and worker not in codes:
                codes[worker] = _shown(code)
                if code:
                    fell(worker, codes[worker], _left(workers))
        if len(codes) == len(workers):
            return codes
        time.sleep(0.05)


def _outcome(
    workers: Sequence[BaseProcess], patience_s: float, report: Callable[[int, int], None], *, stopped: bool = False
) -> int:
    """The exit code of the worker that failed first, once all have ended or `patience_s` has passed since that failure.

    If one was stopped, all stop: training workers have agreed on it, and those not training yet are asked here. They
    take the time that they need, and the code is `STOPPED` unless one fails.

    Args:
        report: called with the worker that failed first and its exit code.
        stopped: whether all have been asked to stop already.
    """
    code, deadline = 0, float("inf")
    while True:
        codes = [worker.exitcode for worker in workers]
        if STOPPED in codes and not stopped:
            stopped = True
            _ask_to_leave(workers)
        # A process without a handler yet ends by the signal.
        as_asked = (STOPPED, -signal.SIGTERM) if stopped else (STOPPED,)
        if not code and (failed := [(i, one) for i, one in enumerate(codes) if one and one not in as_asked]):
            # Among several that ended since the last poll, one ended by a signal was first: the others reacted to its
            # loss.
            worker, ended = min(failed, key=lambda one: one[1] > 0)
            code, deadline = _shown(ended), time.monotonic() + patience_s
            report(worker, code)
        if None not in codes or time.monotonic() >= deadline:
            return code or (STOPPED if stopped else 0)
        time.sleep(0.05)


def _end(workers: Sequence[BaseProcess], grace_s: float = 2.0) -> None:
    """Ends the workers that still run, by their process ids: first terminate, then kill."""
    running = [worker for worker in workers if worker.exitcode is None]
    for worker in running:
        log.warning("ending worker %s (process %d), which has not ended by itself", worker.name, worker.pid)
        worker.terminate()
    deadline = time.monotonic() + grace_s
    for worker in running:
        worker.join(max(0.0, deadline - time.monotonic()))
    for worker in running:
        worker.kill()
        worker.join()


def _forward(source: Connection, sink: TextIO, prefix: str) -> threading.Thread:
    """Forwards lines in a thread."""

    def copy() -> None:
        with source, open(source.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                with contextlib.suppress(OSError):
                    sink.write(prefix + line.rstrip("\n") + "\n")
                    sink.flush()

    # An unread pipe blocks its writer, so it is drained even if the output is gone.
    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def loopback() -> str:
    """The name of the loopback interface: lo on Linux, lo0 on macOS."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
