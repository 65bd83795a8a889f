"""One exchange over a relay that delays, beside what the network model says of the same latency and bandwidth.

    python benchmarks/delay.py

The two processes of an exchange meet on loopback through a relay, which holds all bytes for the latency and lets them pass no
faster than the bandwidth. An elastic run's exchange has a latency more than its price, as both ends confirm it once the
payload is there. The handling of a message without delay, which is measured over a bare relay in turn, is taken off.
Packets that are lost are not tried: their formula is a published one, of TCP on links that this machine does not have.
"""

import contextlib
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections import deque
from multiprocessing.synchronize import Barrier

import numpy as np
import torch

from gossamer.network.links import Network
from gossamer.network.pricing import price
from gossamer.record.logs.trace import from_targets
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import Limits

SECRET, PORT, REPEATS = b"the secret of this benchmark", 29640, 9
CASES = ((0.02, 1e9, 1 << 10), (0.1, 1e9, 1 << 10), (0.1, 1e8, 1 << 20), (0.3, 1e8, 1 << 20))
"""Seconds of latency, bits per second, and bytes of a message."""


def relay(listener: socket.socket, port: int, latency_s: float, bandwidth_bps: float) -> None:
    """Passes on all connections to a port of loopback, each direction by itself."""

    def carry(source: socket.socket, sink: socket.socket) -> None:
        held: deque[tuple[float, bytes]] = deque()
        changed, over = threading.Condition(), False

        def pour() -> None:
            while True:
                with changed:
                    changed.wait_for(lambda: held or over)
                    if not held:
                        break
                    due_s, data = held.popleft()
                time.sleep(max(0.0, due_s - time.perf_counter()))
                try:
                    sink.sendall(data)
                except OSError:
                    break
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        threading.Thread(target=pour, daemon=True).start()
        free_s = 0.0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                free_s = max(free_s, time.perf_counter()) + 8 * len(data) / bandwidth_bps
                with changed:
                    held.append((free_s + latency_s, data))
                    changed.notify()
        with changed:
            over = True
            changed.notify()

    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", port))
        for a, b in ((near, far), (far, near)):
            a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=carry, args=(a, b), daemon=True).start()


def worker(me: int, met: Barrier) -> None:
    """One of both processes, with a relay in front of it; the first prints."""
    torch.set_num_threads(1)
    kinds, transports, closing = [(0.0, 1e12), *sorted({case[:2] for case in CASES})], {}, []
    for number, (latency_s, bandwidth_bps) in enumerate(kinds):
        ports = [PORT + 10 * number + i for i in range(4)]  # of the relays, and of the workers behind them
        own = socket.create_server(("127.0.0.1", ports[2 + me]))
        front = socket.create_server(("127.0.0.1", ports[me]))
        closing += [front, own]
        threading.Thread(target=relay, args=(front, ports[2 + me], latency_s, bandwidth_bps), daemon=True).start()
        entries = [SlotEntry(i, 0, i + 1, MemberStatus.ALIVE, 0, f"127.0.0.1:{ports[i]}") for i in range(2)]
        met.wait()
        rounds = 2 * REPEATS * len(CASES)
        members = Members(Limits(2, rounds, rounds), me, entries)
        transports[latency_s, bandwidth_bps] = ElasticTransport(members, Endpoint(own, 7, SECRET, 60.0))
    numbers = dict.fromkeys(transports, 0)

    def exchange_s(kind: tuple[float, float], message: list[torch.Tensor]) -> float:
        transport, ticket = transports[kind], Ticket(numbers[kind])
        transport.begin_round(numbers[kind], lambda alive: [1 - me], 1)
        transport.expect(ticket, 1 - me, message)
        numbers[kind] += 1
        met.wait()
        start_s = time.perf_counter()
        transport.post(ticket, 1 - me, message)
        transport.wait(ticket)
        assert transport.collect(ticket), "the exchange was not made"
        return time.perf_counter() - start_s

    for latency_s, bandwidth_bps, size in CASES:
        message = [torch.ones(size, dtype=torch.uint8)]
        taken_s = [
            exchange_s((latency_s, bandwidth_bps), message) - exchange_s(kinds[0], message) for _ in range(REPEATS)
        ]
        if me == 0:
            network = Network(uplink_bps=bandwidth_bps, downlink_bps=bandwidth_bps, latency_s=latency_s, step_s=0.0)
            priced_s = price(from_targets(np.array([[1, 0]]), size, 1), network).total_s + latency_s
            found_s = statistics.median(taken_s[1:])
            what = f"{size:,} bytes over {1e3 * latency_s:g} ms and {bandwidth_bps / 1e6:g} Mbit/s"
            print(f"{what}: {found_s:.4f} s; price and confirmation {priced_s:.4f} s")
            print(f"{what}, over price and confirmation = {found_s / priced_s:.3f}   (aim at most 1.1)", flush=True)
    met.wait()
    for one in (*transports.values(), *closing):
        one.close()


def main() -> int:
    """Prints the figures."""
    context = multiprocessing.get_context("fork")
    met = context.Barrier(2, timeout=120.0)
    both = [context.Process(target=worker, args=(i, met)) for i in range(2)]
    try:
        for one in both:
            one.start()
        for one in both:
            one.join(200)
        assert [one.exitcode for one in both] == [0, 0], [one.exitcode for one in both]
    finally:
        for one in both:
            one.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
