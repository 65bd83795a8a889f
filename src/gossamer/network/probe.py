"""Measures running workers and their links, as a network file: the seconds of an inner step of each, all at once, and
latency and bandwidth of each pair, with no other traffic.

Pairs follow a factorisation of the complete graph: in each round every worker is in one pair, and a pair sends in one
direction at a time. Messages grow until one takes long enough to be timed, within limits of bytes and time. So a slow link is
not flooded, and the bandwidth of a fast one is not guessed from its latency.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from gossamer.errors import ConfigError, PeerError
from gossamer.network.links import Network, Route, Site, StepOf
from gossamer.network.probe_limits import SMALLEST_BYTES, LargestMessage, LongEnough
from gossamer.settings.options import check_values
from gossamer.topologies.sequences import factors
from gossamer.transport.contract import Ticket, Transport
from gossamer.transport.processes.group import GroupTransport
from gossamer.transport.processes.launch import agree, join
from gossamer.transport.processes.member import Member

PINGS = 5
SLOWER = 0.8
"""A pair that reaches less than this share of what both its workers reach elsewhere has its own bottleneck."""
EQUAL = 1.25
"""Latencies within this factor of their median, or within a millisecond of it, count as equal."""
DIGITS = 3
LONGEST_STEP_S = 600.0
"""How long to wait for the others' inner steps: the first imports the compiler, and a large model takes its time."""


class Measured(NamedTuple):
    """One direction between two workers."""

    latency_s: float
    """Half of the shortest round trip."""
    bandwidth_bps: float


StepTimer = Callable[[Member], tuple[float, StepOf]]
"""Measures the seconds of an inner step of a worker, and returns the step's description."""


def probe(
    step: StepTimer | None = None,
    *,
    max_bytes: int = 1 << 24,
    test_s: float = 0.5,
    max_rounds: int = 15,
    timeout_s: float = 60.0,
) -> Network | None:
    """Joins the other workers, started by `run_local` or another launcher that numbers them, and measures their links.

    Args:
        step: measures the seconds of an inner step, on all workers at once and before the links; they are left out when
            None.
        max_bytes: of one message; a test sends at most about 4/3 of it.
        test_s: a message that takes this long is long enough.
        max_rounds: with how many peers a worker is paired; routes need all of them.
        timeout_s: how long to wait for another worker.
    Returns: the network, to three digits, on worker 0, and None on the others.
    Raises: ConfigError for options or an environment that cannot work, PeerError for workers that do not answer.
    Cost: at most 15 rounds of two tests of about `4/3·test_s` each, or longer where 16 kB take longer.
    """
    check_values(LargestMessage, max_bytes=max_bytes)
    check_values(LongEnough, test_s=test_s)
    world = os.environ.get("WORLD_SIZE", "")
    member = join(int(world) if world.isdigit() else 0, backend="gloo", device="cpu", timeout_s=timeout_s)
    if member.workers < 2:
        raise ConfigError(f"{member.workers} worker was started but a link has two ends; start at least 2")
    compute_s, of = (None, None) if step is None else step(member)
    facts = agree(member, f"step of {of}", compute_s, timeout_s=max(timeout_s, LONGEST_STEP_S))
    step_s = None if of is None else tuple(_rounded(_seconds(i, fact)) for i, fact in enumerate(facts))
    transport = GroupTransport(member, run=0, timeout_s=timeout_s, checksum=False)
    everyone = member.workers - 1 + member.workers % 2
    meetings = factors(member.workers, np.arange(min(everyone, max_rounds))).tolist()
    measured: dict[str, list[float]] = {}
    for round, pairs in enumerate(meetings):
        for first, second in pairs:
            if member.worker in (first, second):
                peer = second if member.worker == first else first
                link = _Link(transport, peer, round)
                measured[str(peer)] = list(_measure(link, member.worker == first, max_bytes, test_s))
    facts = agree(member, f"probe {max_bytes} {test_s} {max_rounds}", measured, timeout_s=timeout_s)
    transport.close()
    if member.worker != 0:
        return None
    links = network_of([_measured(i, fact, member.workers) for i, fact in enumerate(facts)])
    return replace(links, step_s=step_s, step_of=of)


def network_of(measured: Sequence[Mapping[int, Measured]]) -> Network:
    """The network that explains what each worker measured to each of its peers.

    The bandwidth of a worker, in each direction, is the most that it reached with any peer. If latencies differ between pairs,
    or a pair is slower than both of its workers are elsewhere, each worker becomes a site and each pair a route, provided
    that all pairs were measured.

    >>> network_of([{1: Measured(0.01, 1e6)}, {0: Measured(0.01, 5e6)}])
    ... # doctest: +ELLIPSIS
    Network(uplink_bps=(1000000.0, 5000000.0), downlink_bps=(5000000.0, 1000000.0), latency_s=0.01, ...
    """
    n = len(measured)
    ways = {(i, j): way for i, by_peer in enumerate(measured) for j, way in by_peer.items()}
    up = [max(way.bandwidth_bps for (i, _), way in ways.items() if i == k) for k in range(n)]
    down = [max(way.bandwidth_bps for (_, j), way in ways.items() if j == k) for k in range(n)]
    latency_s = statistics.median(way.latency_s for way in ways.values())
    routes = _routes(ways, up, down)
    differ = any(abs(r.latency_s - latency_s) > max((EQUAL - 1) * latency_s, 1e-3) for r in routes)
    apart = len(routes) == n * (n - 1) // 2 and (differ or any(r.bandwidth_bps < math.inf for r in routes))
    return Network(
        uplink_bps=tuple(map(_rounded, up)),
        downlink_bps=tuple(map(_rounded, down)),
        latency_s=0.0 if apart else _rounded(latency_s),
        sites={_site(i): Site(workers=(i,)) for i in range(n)} if apart else {},
        routes=routes if apart else (),
    )


def _routes(ways: Mapping[tuple[int, int], Measured], up: Sequence[float], down: Sequence[float]) -> tuple[Route, ...]:
    """A route for each pair measured in both directions; with a bandwidth only where the pair has its own bottleneck."""
    routes = []
    for i, j in sorted(pair for pair in ways if pair[0] < pair[1] and pair[::-1] in ways):
        there, back = ways[i, j], ways[j, i]
        slower = there.bandwidth_bps < SLOWER * min(up[i], down[j]) and back.bandwidth_bps < SLOWER * min(
            up[j], down[i]
        )
        routes.append(
            Route(
                between=(_site(i), _site(j)),
                latency_s=_rounded(min(there.latency_s, back.latency_s)),
                bandwidth_bps=_rounded(max(there.bandwidth_bps, back.bandwidth_bps)) if slower else math.inf,
            )
        )
    return tuple(routes)


def _site(worker: int) -> str:
    return f"worker-{worker}"


class _Link:
    """Messages to and from one peer, one at a time and of known size."""

    def __init__(self, transport: Transport, peer: int, round: int):
        self.transport, self.peer, self.round, self.count = transport, peer, round, 0

    def send(self, *words: torch.Tensor) -> None:
        """Sends a message, and returns once it has left."""
        ticket = self._ticket()
        self.transport.post(ticket, self.peer, words)
        self.transport.wait(ticket)
        self.transport.collect(ticket)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """The next message."""
        ticket = self._ticket()
        self.transport.expect(ticket, self.peer, [like])
        self.transport.wait(ticket)
        return self.transport.collect(ticket)[self.peer][0]

    def answer_and_receive(self, like: torch.Tensor) -> torch.Tensor:
        """Allocates memory for the next message, signals the peer to send, and returns the message received."""
        answer, coming = self._ticket(), self._ticket()
        self.transport.expect(coming, self.peer, [like])
        self.transport.post(answer, self.peer, [_NUMBER])
        for ticket in (answer, coming):
            self.transport.wait(ticket)
        self.transport.collect(answer)
        return self.transport.collect(coming)[self.peer][0]

    def _ticket(self) -> Ticket:
        self.count += 1
        return Ticket(self.round, leg=self.count)


_NUMBER = torch.zeros(1, dtype=torch.int64)


def _measure(link: _Link, first: bool, max_bytes: int, test_s: float) -> Measured:
    """Both tests of a pair: each end in turn sends and measures, while the other answers."""
    if first:
        figures = _send_test(link, max_bytes, test_s)
        _answer_test(link, max_bytes)
        return figures
    _answer_test(link, max_bytes)
    return _send_test(link, max_bytes, test_s)


def _send_test(link: _Link, max_bytes: int, test_s: float) -> Measured:
    trips = []
    for _ in range(PINGS + 1):
        start = time.perf_counter()
        link.send(_NUMBER)
        link.receive(_NUMBER)
        trips.append(time.perf_counter() - start)
    trip_s = min(trips[1:])  # the first one also waited for the peer to start
    size = SMALLEST_BYTES
    while True:
        payload = torch.zeros(size, dtype=torch.uint8)
        link.send(torch.full_like(_NUMBER, size))
        link.receive(_NUMBER)  # now the peer waits for the payload, and the clock can start
        start = time.perf_counter()
        link.send(payload)
        link.receive(_NUMBER)
        took_s = time.perf_counter() - start
        if took_s >= test_s or size == max_bytes:
            break
        size = min(4 * size, max_bytes)
    link.send(_NUMBER)
    # A message that took about its latency says nothing about bandwidth: at most nine tenths of its time count as latency.
    return Measured(trip_s / 2, 8 * size / max(took_s - trip_s, 0.1 * took_s))


def _answer_test(link: _Link, max_bytes: int) -> None:
    for _ in range(PINGS + 1):
        link.receive(_NUMBER)
        link.send(_NUMBER)
    while size := int(link.receive(_NUMBER)):
        if not 0 < size <= max_bytes:
            raise PeerError(
                f"worker {link.peer} announced {size} bytes but at most {max_bytes} were agreed; start all with the same options"
            )
        link.answer_and_receive(torch.empty(size, dtype=torch.uint8))
        link.send(_NUMBER)


def _measured(worker: int, fact: Any, n: int) -> dict[int, Measured]:
    """The measurements sent by a worker. Raises PeerError for anything else."""
    match fact:
        case dict() if fact and all(
            key.isdigit()
            and int(key) < n
            and isinstance(way, list)
            and len(way) == 2
            and all(isinstance(x, float) and 0 < x < math.inf for x in way)
            for key, way in fact.items()
        ):
            return {int(key): Measured(*way) for key, way in fact.items()}
    raise PeerError(
        f"worker {worker} sent {fact!r:.60} as its measurements, which is malformed; install the same gossamer everywhere"
    )


def _seconds(worker: int, fact: Any) -> float:
    """The seconds of an inner step sent by a worker. Raises PeerError for anything else."""
    if not isinstance(fact, float) or not 0 < fact <= 1e6:
        raise PeerError(
            f"worker {worker} sent {fact!r:.60} as the seconds of its inner step; install the same gossamer everywhere"
        )
    return fact


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
