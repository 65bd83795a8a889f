"""What a flood of strangers costs a worker with keys: beside the same flood against a port that has nothing to do with the run.

    python benchmarks/flood.py

A process with a listener that has keys computes products of matrices. Meanwhile another process makes 10,000 connections, each
of which sends some bytes that are no encryption and reads until it is hung up on: to a listener in a third process that does the
same and nothing else, then to the worker's own, in turn. The ratio is that of median seconds of work for each product while the
flood lasts. Where there are fewer processors than three, the flood takes them from the work in both cases.
"""

import base64
import contextlib
import logging
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gossamer.transport.keys import Keys, Peer, certificate_of, new_key
from gossamer.transport.sockets.listener import Listener, Refusals

CONNECTS, TURNS, PRODUCTS = 10_000, 3, 50


def flood(asked: Connection) -> None:
    """Connects as often as asked, to the port that is asked for."""
    garbage = secrets.token_bytes(64)
    while (port := asked.recv()) is not None:
        refused = 0
        for _ in range(CONNECTS):
            with contextlib.suppress(OSError), socket.socket() as sock:
                # Reset at the end and not closed, so that ten thousand ports do not wait for a minute each.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                sock.settimeout(10.0)
                if sock.connect_ex(("127.0.0.1", port)):
                    refused += 1
                    continue
                sock.sendall(garbage)
                while sock.recv(1024):
                    pass
        asked.send(refused)


def stand_in(listener: socket.socket) -> None:
    """A program that accepts, reads and closes."""
    while True:
        with contextlib.suppress(OSError), listener.accept()[0] as sock:
            sock.recv(1024)


def work(asked: Connection) -> tuple[float, float]:
    """Computes products of matrices until the flood is over; seconds for each, and in all."""
    x, start_s, done = torch.ones(256, 256), time.perf_counter(), 0
    while not asked.poll():
        for _ in range(PRODUCTS):
            torch.mm(x, x)
        done += PRODUCTS
    seconds = time.perf_counter() - start_s
    return seconds / done, seconds


def main() -> int:
    """Prints the figures."""
    logging.disable(logging.WARNING)  # each refusal that is reported
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    unrelated = socket.create_server(("127.0.0.1", 0), backlog=128)
    near, far = context.Pipe()
    helpers = [context.Process(target=stand_in, args=(unrelated,)), context.Process(target=flood, args=(far,))]
    for helper in helpers:
        helper.start()
    with tempfile.TemporaryDirectory() as folder:
        path = new_key("berlin", Path(folder) / "berlin.pem")
        certificate = base64.b64encode(certificate_of(path)).decode()
        own = socket.create_server(("127.0.0.1", 0), backlog=128)
        keys = Keys(path, {"berlin": Peer(certificate=certificate)}, 1)
        refusals = Refusals()
        listener = Listener(own, b"", 7, lambda arrival: None, refusals, keys=keys)
        before = len(os.listdir("/proc/self/fd"))
        work_s, flood_s, failed = {}, {}, {}
        for turn in range(TURNS + 1):
            for kind, sock in {"an unrelated port": unrelated, "a listener with keys": own}.items():
                near.send(sock.getsockname()[1])
                each_s, seconds = work(near)
                refused = near.recv()
                if turn:  # the first warms up
                    work_s.setdefault(kind, []).append(each_s)
                    flood_s.setdefault(kind, []).append(seconds)
                failed[kind] = failed.get(kind, 0) + refused
        end_s = time.monotonic() + 20
        while (after := len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < end_s:
            time.sleep(0.1)
        near.send(None)
        listener.close()
    for helper in helpers:
        helper.kill()
        helper.join()
    unrelated.close()
    (plain, with_keys) = work_s
    print(
        f"{CONNECTS * (TURNS + 1):,} connects of strangers to a listener with keys: {sum(refusals.counts.values()):,} refused"
    )
    print(f"descriptors that are left open after them = {after - before}   (aim at most 0)")
    for kind in work_s:
        each_us, seconds = 1e6 * statistics.median(work_s[kind]), statistics.median(flood_s[kind])
        print(
            f"{CONNECTS:,} connects to {kind} take {seconds:.1f} s, and a product {each_us:.0f} µs; {failed[kind]} not accepted"
        )
    ratio = statistics.median(work_s[with_keys]) / statistics.median(work_s[plain])
    print(
        f"seconds of work under a flood, of a listener with keys over an unrelated port = {ratio:.3f}   (aim at most 1.10)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
