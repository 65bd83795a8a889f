"""The differences between gloo and NCCL: choice of backend, completion of transfers, and shutdown.

Statements about NCCL come from its documentation; only a group of one process was ever run with it.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import ConfigError
from gossamer.rng import key
from gossamer.transport.processes.store import THREADS, answer
from gossamer.transport.sockets.keepalive import keeping_alive

Backend = Literal["gloo", "nccl"]
FOREVER = timedelta(days=365)
OWN, OWN_NCCL = "gossamer's own", "gossamer's own, of NCCL"
"""Descriptions of the groups of `gloo_group` and `nccl_group`, which torch's registry does not know."""
LIFELINE = key(0, "lifeline") >> 32
"""The tag of the receive that is never answered."""
LATER_S = 10.0
"""Extra seconds for torch to make a group: its own timeout names the missing process, ours does not."""
G = TypeVar("G")


class _Followers:
    """A pool of threads that wait for transfers inside torch: starting a thread takes longer than a small message."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._idle, self._closed = threading.Lock(), 0, 0

    def start(self, task: Callable[[], None]) -> None:
        """Runs a task in an idle thread, or in a new one."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._tasks.put(task)
                return
            # In gloo a transfer can have only one waiting thread, and a thread only one transfer to wait for.
            thread = threading.Thread(target=self._work, args=(task, self._closed), name=THREADS, daemon=True)
        thread.start()

    def close(self) -> None:
        """Ends the threads: idle ones at once, others after their task."""
        with self._lock:
            for _ in range(self._idle):
                self._tasks.put(None)
            self._idle, self._closed = 0, self._closed + 1

    def _work(self, task: Callable[[], None] | None, closed: int) -> None:
        while task is not None:
            task()
            task = None  # frees its memory
            with self._lock:
                if self._closed != closed:
                    return
                self._idle += 1
            task = self._tasks.get()


_FOLLOWERS = _Followers()
follow = _FOLLOWERS.start
"""Waits for transfers in a thread, until `hang_up`."""


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """The backend that carries the messages of a group, however it was made; see `carrier_in`."""
    if group is not None and group.group_desc in (OWN, OWN_NCCL):
        return "gloo" if group.group_desc == OWN else "nccl"
    return carrier_in(dist.get_backend_config(group))


def whole_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default one; torch's functions accept only registered groups, hence methods are used."""
    whole = group or dist.group.WORLD
    assert whole is not None
    return whole


def connected(store: Store, timeout_s: float, make: Callable[[], G]) -> G:
    """The backend that `make` builds on a process group connected through a store, with keepalive.

    Raises: RuntimeError when other processes are missing after `timeout_s`, or the store does not answer.
    """

    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def kept() -> G:
        if device is not None:
            torch.cuda.set_device(device)  # a per-thread setting
        # An idle connection lasts as long as a worker waits: this group cannot reconnect.
        with keeping_alive(timeout_s):
            return make()

    return answer(store, timeout_s + min(LATER_S, timeout_s), kept)


def gloo_group(store: Store, rank: int, size: int, timeout_s: float, address: str = "") -> dist.ProcessGroup:
    """A private gloo group of processes that share a store and need not be in one world.

    torch's `new_group` names a group by the number of groups that a process is in, so that processes with different
    histories would hang.

    Args:
        store: for this group alone.
        address: where this process listens for the others; by default torch chooses.
    Raises: RuntimeError when others are missing after `timeout_s`.
    """

    def make() -> dist.ProcessGroup:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
        group = _group_of(store, gloo(store, rank, size, options), OWN, "cpu")
        # A process that fails right away, for example as it refuses a rule, would cut off others that are still connecting,
        # which would fail with gloo's errors.
        group.barrier().wait()
        return group

    return connected(store, timeout_s, make)


def nccl_group(store: Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """As `gloo_group`, of NCCL; run with one process only.

    torch's `new_group` would split the communicator of the default group where that is bound to a device, and then all processes
    of the world must take part, also those of other lanes and those without an Outer: else it hangs. This creates a
    separate communicator. The first transfer creates it, for which all its processes must arrive together: make it a
    collective.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return _group_of(store, dist.ProcessGroupNCCL(store, rank, size, options), OWN_NCCL, "cuda")


def _group_of(store: Store, backend: Any, description: str, device: str) -> dist.ProcessGroup:
    """A process group that torch's registry does not know."""
    kinds = dist.ProcessGroup.BackendType
    kind = kinds.GLOO if description == OWN else kinds.NCCL
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    group._set_group_desc(description)
    return group


def carrier_in(config: str) -> Backend:
    """The backend for messages in a group of these backends: gloo if it serves the CPU, else NCCL.

    gloo is preferred because it names a lost peer and obeys deadlines; messages of a GPU then pass through the host.
    NCCL was never run between workers.

    Raises: ConfigError when there is neither.

    >>> [carrier_in(config) for config in ("cpu:gloo,cuda:gloo", "cuda:nccl,cpu:gloo", "cuda:nccl")]
    ['gloo', 'gloo', 'nccl']
    """
    parts = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if parts.get("cpu") == "gloo":
        return "gloo"
    if "nccl" in parts.values():
        return "nccl"
    raise ConfigError(
        f"the process group has the backends '{config}', and messages go over gloo or NCCL; make it with "
        "init_process_group('gloo'), or with 'cpu:gloo,cuda:nccl'"
    )


def hang_up(group: dist.ProcessGroup | None = None) -> bool:
    """Closes the connections of a gloo group and waits for the threads that are inside torch, as `threads_end`.

    Returns: whether all have ended. A thread that returns from C++ during Python's shutdown aborts the process; one
        whose peer was lost mid-transfer never returns.
    """
    if backend_of(group) == "gloo":
        whole = whole_of(group)
        for peer in {*range(whole.size())} - {whole.rank()}:
            # A wait that times out closes all connections, but one that ends because this peer has just left closes
            # none: hence the loop over all peers. A receive on a closed connection fails at once.
            with contextlib.suppress(RuntimeError):
                hold(peer, group).wait(timedelta(milliseconds=1))
    return threads_end()


def threads_end(limit_s: float = 2.0) -> bool:
    """Waits for the threads that are inside torch, at most `limit_s`, and returns whether all have ended."""
    _FOLLOWERS.close()
    deadline = time.monotonic() + limit_s
    while threads := [thread for thread in threading.enumerate() if thread.name == THREADS]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        try:
            threads[0].join(left_s)
        except RuntimeError:  # it has been started and does not run yet, as where a signal interrupted `start`
            time.sleep(1e-3)
    return True


def hold(peer: int, group: dist.ProcessGroup | None) -> dist.Work:
    """A receive that is never answered; it fails when the connection to this peer, a rank of the group, is lost."""
    return whole_of(group).recv([torch.empty(1, dtype=torch.uint8)], peer, LIFELINE)


def block(work: dist.Work) -> None:
    """Blocks in gloo, which offers no other way to detect the end of a transfer."""
    if not work.wait(FOREVER):
        raise RuntimeError("the process group ended before the transfer did")


def poll(work: dist.Work) -> None:
    """Waits for work on a device without blocking its stream.

    On NCCL `is_success` is not implemented and `exception` is deprecated; `wait` raises what went wrong, and returns at once
    when the work is complete.
    """
    pause_s = 1e-4
    while not work.is_completed():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)
    if not work.wait():
        raise RuntimeError("the process group ended before the transfer did")
