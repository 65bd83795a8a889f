"""One exchange between two processes, against bare `batch_isend_irecv` of the same bytes on the same connection.

    python benchmarks/exchange.py

Both take turns in one run, on loopback with one thread each. The ratio is that of the median times.
For "announced" the receives are posted ahead of time, as before a local phase. "unchecked" goes without the checksum of the
payload, whose cost is also given by itself: one pass over what is sent and one over what is received, as a share of it.
"sockets" goes over connections of our own, as runs with keys do, here without any, and "keys" over encrypted ones.
"""

import base64
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gossamer.transport import wire
from gossamer.transport.contract import Ticket, Transport
from gossamer.transport.keys import KEY, Keys, Peer, certificate_of, new_key
from gossamer.transport.processes.group import GroupTransport
from gossamer.transport.processes.launch import agree, join, leave
from gossamer.transport.processes.local import run_local
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.sockets import SocketTransport
from gossamer.transport.sockets.addresses import listen, shown
from gossamer.transport.sockets.connection import Endpoint

AIMS = {1 << 10: ("1 kB", 0.4), 1 << 20: ("1 MB", 0.7), 1 << 26: ("64 MB", 0.9)}
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 26)


def over_sockets(member: Member, keys: Keys | None) -> SocketTransport:
    """Connections of our own, on loopback."""
    listener = listen("127.0.0.1", 0)
    addresses = agree(member, f"exchange {keys is None}", shown(*listener.getsockname()[:2]), timeout_s=60.0)
    return SocketTransport(member, Endpoint(listener, 1, member.secret, 60.0, keys=keys), addresses)


def measure(member: Member, size: int, repeats: int, own: dict[str, SocketTransport]) -> dict[str, float]:
    """Median seconds of a bare exchange, of ours, of ours when it was announced early or unchecked, of a checksum, and of ours
    over each of our own connections."""
    peer = 1 - member.worker
    checked = GroupTransport(member, run=1, timeout_s=60.0)
    unchecked = GroupTransport(member, run=1, timeout_s=60.0, checksum=False)
    ours, theirs = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def bare() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, theirs, peer), dist.P2POp(dist.isend, ours, peer)]):
            work.wait()

    def gossamer(transport: Transport, ticket: Ticket, announced: bool) -> None:
        if not announced:
            transport.expect(ticket, peer, [ours])
        transport.post(ticket, peer, [ours])
        transport.wait(ticket)
        transport.collect(ticket)

    times: dict[str, list[float]] = {"bare": [], "gossamer": [], "announced": [], "unchecked": [], "checksum": []}
    times |= {kind: [] for kind in own}
    for round in range(repeats):
        checked.expect(Ticket(round, fragment=1), peer, [ours])
        for kind, act in (
            ("bare", bare),
            ("gossamer", functools.partial(gossamer, checked, Ticket(round, fragment=0), announced=False)),
            ("announced", functools.partial(gossamer, checked, Ticket(round, fragment=1), announced=True)),
            ("unchecked", functools.partial(gossamer, unchecked, Ticket(round, fragment=2), announced=False)),
            ("checksum", functools.partial(wire.checksum, ours)),
            *(
                (kind, functools.partial(gossamer, transport, Ticket(round), announced=False))
                for kind, transport in own.items()
            ),
        ):
            dist.barrier()
            start = time.perf_counter()
            act()
            times[kind].append(time.perf_counter() - start)
    return {kind: statistics.median(seconds) for kind, seconds in times.items()}


def exchanges(argv: Sequence[str]) -> int:
    """One of the two processes: prints the figures of every size."""
    member = join(2, backend="gloo", device="cpu", threads=1)
    path = Path(os.environ[KEY])
    peers = {"here": Peer(certificate=base64.b64encode(certificate_of(path)).decode(), workers=2)}
    own = {"sockets": over_sockets(member, None), "keys": over_sockets(member, Keys(path, peers, 2))}
    for size in SIZES:
        seconds = measure(member, size, repeats=15 if size >= 1 << 23 else 100, own=own)
        if member.worker == 0:
            bare = seconds["bare"]
            figures = [
                f"{kind} {s * 1e3:8.3f} ms (ratio {bare / s:.2f})"
                for kind, s in seconds.items()
                if kind not in ("bare", "checksum")
            ]
            share = 2 * seconds["checksum"] / seconds["unchecked"]
            figures.append(f"checksum {size / seconds['checksum'] / 1e9:.1f} GB/s (twice: {share:.1%} of unchecked)")
            print(
                f"{size:>9} bytes: bare {bare * 1e3:8.3f} ms ({size / bare / 1e9:.2f} GB/s each way), {', '.join(figures)}"
            )
            if size in AIMS:
                called, aim = AIMS[size]
                print(f"one exchange of {called} over a bare one = {bare / seconds['gossamer']:.2f}   (aim {aim})")
    for transport in own.values():
        transport.close()
    leave()
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ[KEY] = str(new_key("here", Path(folder) / "key.pem"))
        sys.exit(run_local(2, exchanges, []))
