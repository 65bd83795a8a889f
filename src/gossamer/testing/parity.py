"""The same rounds in one process and in several: the simulation equals the real run, bit for bit."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.codecs import Codec, codec_of, exact
from gossamer.errors import ConfigError
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import Method, method_of, settled_rule
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Rule
from gossamer.testing.drifted_workers import DriftedWorkers, random_drift, random_vectors, simulated_workers
from gossamer.testing.specification import must_be_rule
from gossamer.topologies import Topology, make_topology
from gossamer.transport.processes.group import GroupTransport
from gossamer.transport.processes.launch import leave
from gossamer.transport.processes.local import loopback
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import listening, reached_store, served_store
from gossamer.tree import leaves

NUMEL = 1001  # so that no chunk of a mean is as long as the next, and few enough to cost nothing
GRACE_S = 2.0  # for the other workers to end by themselves, once one has failed
Trail = list[list[Tensor]]
"""Parameters and outer state of a worker after each round."""


class _Run(NamedTuple):
    """The parameters of the run; inherited by fork, since a rule's functions cannot be pickled."""

    m: Method
    local_steps: int
    rounds: int
    timeout_s: float


def check_parity(
    rule: Rule,
    topology: str | Topology = "random",
    *,
    workers: int = 4,
    codec: str | Codec | None = None,
    schedule: Schedule | None = None,
    rounds: int = 4,
    timeout_s: float = 60.0,
) -> None:
    """Checks that real processes compute what the simulator computes: parameters and outer state, in every round, bit for bit.

    Each process is a fork of this one, and they exchange over gloo on the loopback interface, through the outer loop that
    `gossamer.simulate`, `gossamer train` and `gossamer.Outer` run. Parameters are moved by prescribed drifts, so that
    no model is needed.

    Args:
        topology: a topology or its name.
        workers: how many processes, for a topology by name.
        codec: a name from `CODECS`, or a `Codec`; exact by default.
        schedule: several fragments, and overlap with training; by default neither.
        timeout_s: the time limit of the whole check.
    Raises: AssertionError with one sentence that names worker, round and tensor, or a process's error; PairingError for
        an impossible combination; ConfigError where processes cannot be forked (Linux can, unless CUDA or a process
        group is in use).
    Cost: one to two seconds, most of them for four processes to connect.

    >>> import gossamer
    >>> gossamer.testing.check_parity(gossamer.gasloc(lr=0.5), "ring", workers=2, rounds=2)
    """
    graph = make_topology(topology, workers) if isinstance(topology, str) else topology
    chosen = codec_of(codec) if isinstance(codec, str) else codec or exact()
    run = _settled(must_be_rule("check_parity", rule), graph, chosen, schedule or Schedule(), rounds, timeout_s)
    _must_fork()
    with TemporaryDirectory(prefix="gossamer-") as folder:
        real = _in_processes(run, Path(folder))
    _compare(run, real, _simulated(run))


def _settled(rule: Rule, topology: Topology, codec: Codec, schedule: Schedule, rounds: int, timeout_s: float) -> _Run:
    """The run, with as many inner steps in a round as the schedule needs. Raises PairingError."""
    steps = 1 if rule.site == "gradients" else max(2, schedule.slots, schedule.overlap_steps)
    combination = Combination(rule=rule, topology=topology, codec=codec, schedule=schedule, local_steps=steps)
    return _Run(method_of(combination._replace(rule=settled_rule(combination))), steps, rounds, timeout_s)


def _must_fork() -> None:
    """Raises ConfigError where a fork of this process would not work."""
    if sys.platform != "linux":
        raise ConfigError(
            f"check_parity forks this process, and on {sys.platform} system libraries do not survive that; run it on Linux, such "
            "as in your continuous integration"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"check_parity forks this process, and CUDA {torch.version.cuda}, which is in use here, does not survive that; call "
            "it in a process that has not used the GPU, such as that of a test file of its own"
        )
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            f"check_parity makes its own process group, and this process is in one of {dist.get_world_size()} already; "
            "call destroy_process_group() first"
        )


def _rounds(run: _Run, workers: DriftedWorkers) -> list[Trail]:
    """Trains the workers, and returns the trail of each."""
    noise = random_drift(NUMEL, dtype=torch.float32)
    trails: list[Trail] = [[] for _ in workers.xs]
    for t in range(run.rounds):
        workers.train(range(t, t + 1), lambda worker, step, x: noise(worker, step, x) - 0.1 * x)
        if t + 1 == run.rounds:
            workers.finish()
        for trail, x, state in zip(trails, workers.xs, workers.states, strict=True):
            trail.append([x.clone(), *(leaf.clone() for leaf in leaves(state))])
    return trails


def _start(run: _Run) -> tuple[Tensor, list[tuple[int, int]]]:
    """The common starting point, and the spans of the fragments."""
    parts = run.m.schedule.fragments
    cuts = [NUMEL * p // parts for p in range(parts + 1)]
    return random_vectors(1, NUMEL, dtype=torch.float32)[0], [*pairwise(cuts)]


def _simulated(run: _Run) -> list[Trail]:
    start, spans = _start(run)
    with torch.no_grad():
        return _rounds(run, simulated_workers(run.m, [start] * run.m.topology.n, steps=run.local_steps, spans=spans))


def _in_processes(run: _Run, folder: Path) -> list[Trail]:
    """The trails of workers that are processes. Raises AssertionError when one of them fails, or they take too long."""
    n, deadline = run.m.topology.n, time.monotonic() + run.timeout_s
    listener, context = listening("127.0.0.1", 0), multiprocessing.get_context("fork")
    port = listener.getsockname()[1]
    processes = [context.Process(target=_worker, args=(run, i, port, folder), daemon=True) for i in range(n)]
    try:
        with listener, warnings.catch_warnings():
            # The child runs only code of this module and torch, and waits for no thread of this process.
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in processes:
                process.start()
            _store = served_store(listener, run.timeout_s)  # after all forks, and until they have ended
        _wait(processes, deadline)
        codes = [process.exitcode for process in processes]
        where = _where(processes, folder)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    failed = {i: file for i in range(n) if codes[i] and (file := folder / f"{i}.txt").exists()}
    texts = {i: file.read_text(encoding="utf-8") for i, file in failed.items()}
    mute = {i: code for i, code in enumerate(codes) if i not in failed and not (folder / f"{i}.pt").exists()}
    ended = any(code is not None for code in mute.values())  # silently, so that its peers report its loss
    if failed and not (ended and all("PeerError" in text for text in texts.values())):
        first = min(failed, key=lambda i: ("PeerError" in texts[i], failed[i].stat().st_mtime_ns))
        raise AssertionError(
            f"{_name(run)} failed in the process of worker {first} of {n}; correct what its traceback shows:\n{texts[first]}"
        )
    if mute:
        raise AssertionError(
            f"{_name(run)}: workers {[*mute]} of {n} have no result after {run.timeout_s:g} s at most (exit codes "
            f"{[*mute.values()]}, None for one that was still running); look for calls in the rule that wait or end the "
            f"process, or raise timeout_s{where}"
        )
    return [torch.load(folder / f"{i}.pt", weights_only=True) for i in range(n)]


def _wait(processes: Sequence[BaseProcess], deadline: float) -> None:
    """Waits until all have ended, the deadline, or a short time after the first failure."""
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() >= deadline:
            return
        wait([process.sentinel for process in running], timeout=max(0.0, min(0.5, deadline - time.monotonic())))


def _where(processes: Sequence[BaseProcess], folder: Path) -> str:
    """Stack traces of the running processes; empty if none is running."""
    asked = {
        i: process.pid for i, process in enumerate(processes) if process.exitcode is None and process.pid is not None
    }
    files = {i: folder / f"{i}.where" for i in asked}
    for i, pid in asked.items():
        if files[i].exists():  # else the signal's default action would end it
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while any(file.exists() and not file.stat().st_size for file in files.values()) and time.monotonic() < deadline:
        time.sleep(0.02)
    traces = {
        i: file.read_text(encoding="utf-8") if file.exists() else "  it had not begun\n" for i, file in files.items()
    }
    return "".join(f"\nworker {i} was here:\n{text}" for i, text in traces.items())


def _worker(run: _Run, rank: int, port: int, folder: Path) -> None:
    """The work of a process, which writes its trail, or a traceback, into the folder."""
    with open(folder / f"{rank}.begun", "w", encoding="utf-8") as where:
        faulthandler.register(signal.SIGUSR1, where)  # written by the signal handler itself, even in a hanging process
        os.rename(where.name, folder / f"{rank}.where")
        _train(run, rank, port, folder)


def _train(run: _Run, rank: int, port: int, folder: Path) -> None:
    gc.freeze()  # avoids collecting the parent's objects
    torch.set_num_threads(1)  # the parent's threads do not exist here
    torch.manual_seed(rank)  # different seeds, as on different machines
    random.seed(rank)
    np.random.seed(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    n, timeout_s = run.m.topology.n, run.timeout_s
    try:
        store = reached_store("127.0.0.1", port, timeout_s)
        dist.init_process_group(
            "gloo", store=PrefixStore("group", store), rank=rank, world_size=n, timeout=timedelta(seconds=timeout_s)
        )
        member = Member.at(rank, n, torch.device("cpu"), PrefixStore("run", store))
        transport, (start, spans) = GroupTransport(member, run=0, timeout_s=timeout_s), _start(run)
        with torch.no_grad():
            (trail,) = _rounds(run, DriftedWorkers(run.m, [transport], [start], steps=run.local_steps, spans=spans))
        torch.save(trail, folder / f"{rank}.pt")
    except Exception:
        (folder / f"{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    with contextlib.suppress(RuntimeError):  # another worker's failure; no process leaves while another still receives
        dist.barrier()
    transport.close()
    leave()


def _compare(run: _Run, real: Sequence[Trail], simulated: Sequence[Trail]) -> None:
    """Raises AssertionError, naming the first round, worker and tensor that differ."""
    for t in range(run.rounds):
        for worker, (real_trail, simulated_trail) in enumerate(zip(real, simulated, strict=True)):
            for k, (a, b) in enumerate(zip(real_trail[t], simulated_trail[t], strict=True)):
                if a.dtype == b.dtype and torch.equal(a, b):
                    continue
                which = "parameters" if k == 0 else f"tensor {k - 1} of its outer state"
                count, size = int((a != b).sum()), float((a - b).abs().max())
                raise AssertionError(
                    f"{_name(run)}: in round {t}, {count} of {a.numel()} numbers of worker {worker} ({which}) are up to "
                    f"{size:.3g} apart between its own process and the simulator; let the rule depend on its arguments only: no "
                    "Python variable that outlives a call, no global random numbers (gossamer.rng.torch_rng draws by worker and "
                    "round), no clock"
                )


def _name(run: _Run) -> str:
    return f"rule '{run.m.rule.name}' on topology '{run.m.topology.name}'"
