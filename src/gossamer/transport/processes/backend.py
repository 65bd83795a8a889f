"""Where gloo and NCCL differ: which carries the messages of a group, how the end of a transfer is learnt, and how all end.

What is said of NCCL here comes from its documentation: nothing in this package was ever run on a GPU.
"""

import contextlib
import threading
import time
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from gossamer.errors import ConfigError
from gossamer.rng import key
from gossamer.transport.processes.board import THREADS

__all__ = ["Backend", "backend_of", "block", "carrier_in", "hang_up", "hold", "poll"]

Backend = Literal["gloo", "nccl"]
FOREVER = timedelta(days=365)
LIFELINE = key(0, "lifeline") >> 32
"""The tag of the receive that nobody answers."""


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """What carries the messages of a group, however it was made; `carrier_in` says how it is chosen."""
    return carrier_in(dist.get_backend_config(group))


def carrier_in(config: str) -> Backend:
    """What carries messages in a group of these backends: gloo where it serves the CPU, else NCCL.

    gloo comes first because it names a peer that is gone and obeys a deadline; messages of a GPU then pass through the host.
    A group with NCCL was never run.

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


def hang_up(group: dist.ProcessGroup | None = None, limit_s: float = 2.0) -> bool:
    """Closes the connections of a gloo group and waits for the threads that are inside torch, at most `limit_s`.

    Returns: whether all have ended. One that comes back from C++ while Python shuts down aborts the process; one whose peer
        was lost amid its bytes never comes back.
    """
    if backend_of(group) == "gloo":
        for peer in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
            # A wait that times out closes all connections, but one that ends because this peer has just left closes
            # none: so every peer has its turn. A receive on a closed connection fails at once.
            with contextlib.suppress(RuntimeError):
                hold(peer, group).wait(timedelta(milliseconds=1))
    deadline = time.monotonic() + limit_s
    threads = [thread for thread in threading.enumerate() if thread.name == THREADS]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def hold(peer: int, group: dist.ProcessGroup | None) -> dist.Work:
    """A receive that nobody answers; it fails when the connection to this peer, a rank of the group, is lost."""
    lifeline = dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, tag=LIFELINE, group_src=peer)
    assert lifeline is not None
    return lifeline


def block(work: dist.Work) -> None:
    """Blocks in gloo, which has no other way to learn that a transfer has ended."""
    if not work.wait(FOREVER):
        raise RuntimeError("the process group ended before the transfer did")


def poll(work: dist.Work) -> None:
    """Waits for work on a device without blocking its stream. Its NCCL was never run.

    On NCCL `is_success` is not implemented and `exception` is deprecated; `wait` raises what went wrong, and returns at once
    when the work is complete.
    """
    pause_s = 1e-4
    while not work.is_completed():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)
    if not work.wait():
        raise RuntimeError("the process group ended before the transfer did")
