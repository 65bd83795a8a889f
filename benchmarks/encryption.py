"""What encryption costs: one exchange of an elastic run with keys, beside the same without, in turn over one link.

    python benchmarks/encryption.py

Two processes on loopback, then in two network namespaces whose links are limited to 100 Mbit/s (root, `ip` and `tc`; else skipped
with a line). Both send at once, as in a round. The ratio is that of median seconds.
"""

import base64
import contextlib
import ctypes
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from slow_links import can_limit, limited

from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.keys import Keys, Peer, certificate_of, new_key
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import Limits

LINK_BPS = 100e6
PORTS = {"plain": 29610, "with keys": 29620}
SECRET = b"the secret of this benchmark"
ON_LOOPBACK = {1 << 20: 60, 1 << 26: 9}
"""Bytes of a message, and how often it is exchanged."""
ON_THE_LINK = {3 << 20: 15}  # 0.87M parameters in fp32


def worker(
    me: int, hosts: Sequence[str], space: str | None, files: Sequence[Path], sizes: dict[int, int], met: Barrier
) -> None:
    """One of both processes; the first prints."""
    if space is not None:
        with open(f"/run/netns/{space}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    torch.set_num_threads(1)
    listed = {str(i): Peer(certificate=base64.b64encode(certificate_of(path)).decode()) for i, path in enumerate(files)}
    rounds = 2 + sum(sizes.values())
    transports, listeners = {}, []
    for kind, port in PORTS.items():
        entries = [SlotEntry(i, 0, i + 1, MemberStatus.ALIVE, 0, f"{host}:{port + i}") for i, host in enumerate(hosts)]
        listeners.append(socket.create_server((hosts[me], port + me)))
        keys = Keys(files[me], listed, 2) if kind == "with keys" else None
        met.wait()
        endpoint = Endpoint(listeners[-1], 7, SECRET, 60.0, keys=keys)
        transports[kind] = ElasticTransport(Members(Limits(2, rounds, rounds), me, entries), endpoint)
    number = 0
    for size, repeats in sizes.items():
        message = [torch.ones(size, dtype=torch.uint8)]
        taken_s: dict[str, list[float]] = {kind: [] for kind in PORTS}
        for _ in range(repeats):
            for kind, transport in transports.items():
                transport.begin_round(number, lambda alive: [1 - me], 1)
                transport.expect(Ticket(number), 1 - me, message)
                met.wait()
                start_s = time.perf_counter()
                transport.post(Ticket(number), 1 - me, message)
                transport.wait(Ticket(number))
                assert transport.collect(Ticket(number)), "the exchange was not made"
                taken_s[kind].append(time.perf_counter() - start_s)
            number += 1
        if me == 0:
            plain_s, keys_s = (statistics.median(taken_s[kind][1:]) for kind in PORTS)
            where = "loopback" if space is None else f"a link of {LINK_BPS / 1e6:g} Mbit/s"
            aim = "   (aim at most 1.05)" if space is not None else ""
            print(f"one exchange of {size >> 20} MB over {where}: {plain_s:.4f} s plain, {keys_s:.4f} s with keys")
            print(
                f"the same, with keys over plain, {size >> 20} MB over {where} = {keys_s / plain_s:.3f}{aim}",
                flush=True,
            )
    met.wait()
    for transport in transports.values():
        transport.close()
    for listener in listeners:
        listener.close()


def measure(hosts: Sequence[str], spaces: Sequence[str | None], files: Sequence[Path], sizes: dict[int, int]) -> None:
    """Starts both processes and waits for them."""
    context = multiprocessing.get_context("fork")
    met = context.Barrier(2, timeout=120.0)
    both = [context.Process(target=worker, args=(i, hosts, spaces[i], files, sizes, met)) for i in range(2)]
    try:
        for one in both:
            one.start()
        for one in both:
            one.join(300)
        assert [one.exitcode for one in both] == [0, 0], [one.exitcode for one in both]
    finally:
        for one in both:
            one.kill()


def main() -> int:
    """Prints the figures."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_:
        files = [new_key(str(i), Path(folder) / f"{i}.pem") for i in range(2)]
        measure(["127.0.0.1"] * 2, [None, None], files, ON_LOOPBACK)
        if can_limit():
            spaces = open_.enter_context(limited([LINK_BPS] * 2, [LINK_BPS] * 2))
            measure(["10.77.0.1", "10.77.0.2"], spaces, files, ON_THE_LINK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
