"""One exchange between two processes, against bare `batch_isend_irecv` of the same bytes on the same connection.

    python benchmarks/exchange.py

Both take turns in one run, on loopback with one thread each; the ratio is that of the median times (aim: 0.9 at 64 MB).
The rows "announced" have the receive announced before a barrier, as before a local phase.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.launch import Member, join, leave, run_local
from gossamer.transport import Ticket
from gossamer.transport.group import GroupTransport

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 26)


def measure(member: Member, size: int, repeats: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each bare exchange, each of ours, and each of ours that was announced early."""
    peer = 1 - member.worker
    transport = GroupTransport(member.store, run=1, timeout_s=60.0)
    ours, theirs = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    rounds = iter(range(1 << 30))

    def bare() -> Callable[[], None]:
        return lambda: finish(theirs)

    def finish(into: Tensor) -> None:
        operations = [dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, ours, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def post(ticket: Ticket) -> None:
        transport.post(ticket, peer, [ours])
        transport.wait(ticket)
        transport.collect(ticket)

    def late() -> Callable[[], None]:
        ticket = Ticket(next(rounds))
        return lambda: (transport.expect(ticket, peer, [ours]), post(ticket))[1]

    def early() -> Callable[[], None]:
        ticket = Ticket(next(rounds))
        transport.expect(ticket, peer, [ours])
        return lambda: post(ticket)

    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(repeats + 1):
        for kind, prepare in zip(times, (bare, late, early), strict=True):
            act = prepare()
            dist.barrier()
            start = time.perf_counter()
            act()
            kind.append(time.perf_counter() - start)
    return times[0][1:], times[1][1:], times[2][1:]


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(run_local(2, [], command=[sys.executable, __file__]))
    member = join(2, backend="gloo", device="cpu", threads=1)
    for size in SIZES:
        bare, late, early = (statistics.median(kind) for kind in measure(member, size, 15 if size >= 1 << 23 else 100))
        if member.worker == 0:
            print(
                f"{size:>9} bytes: bare {bare * 1e3:8.3f} ms ({size / bare / 1e9:.2f} GB/s each way), "
                f"gossamer {late * 1e3:8.3f} ms (ratio {bare / late:.2f}), "
                f"announced {early * 1e3:8.3f} ms (ratio {bare / early:.2f})"
            )
    leave()


if __name__ == "__main__":
    main()
