"""Costs of the exchanges of an `Outer`, and the distance of its worker from those it exchanges with."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.record.logs.trace import Operation
from gossamer.topologies.mixing import widen
from gossamer.tree import Tree, leaves

_PIECE = 1 << 17  # elements that are compared at a time on a CPU, so that their differences stay in the cache


class OuterMetrics(NamedTuple):
    """Figures of this worker since the previous call of `Outer.metrics`; see there."""

    rounds: int
    """Rounds that have ended."""
    bytes_sent: int
    """Payload bytes of the exchanges that were begun, as in the trace of a simulation; without headers."""
    bytes_received: int
    messages: int
    """Messages sent. A mean over all workers takes two to each of the others: its chunk, and the sum of one's own chunk."""
    exchange_s: float
    """Seconds that `step` and `finish` took for exchanges: encoding, waiting, decoding and the outer update."""
    waiting_s: float
    """The part of them spent waiting for peers; the whole of an all-reduce."""
    disagreement: float | None
    """Root mean square, per number, of what was received minus what was sent; None while nothing was compared."""


class Meter:
    """Counts what the exchanges of one worker cost, and compares messages on request."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.rounds = self.bytes_sent = self.bytes_received = self.messages = 0
        self.exchange_s = self.waiting_s = 0.0
        self._squares: Tensor | None = None
        self._compared = 0

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Counts the seconds of what runs inside."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.exchange_s += time.perf_counter() - start_s

    def add_waiting(self, seconds: float) -> None:
        """Counts seconds of waiting."""
        self.waiting_s += seconds

    def count(self, operations: Iterable[Operation]) -> None:
        """Counts the messages and payload bytes of operations."""
        for operation in operations:
            self.bytes_sent += operation.sent_bytes
            self.bytes_received += operation.received_bytes
            self.messages += operation.peers * (2 if operation.kind == "mean" else 1)

    def compare(self, sent: Tree, received: Sequence[Tree]) -> None:
        """Adds up `(received - sent)²`, as `Setup.compare` asks for; without a wait for the device."""
        for message in received:
            for leaf, other in zip(leaves(sent), leaves(message), strict=True):
                piece = _PIECE if leaf.is_cpu else max(1, leaf.numel())
                for a, b in zip(leaf.split(piece), other.split(piece), strict=True):
                    apart = widen(b) - widen(a)
                    squares = apart.dot(apart).to(torch.float64)
                    self._squares = squares if self._squares is None else self._squares + squares
                self._compared += leaf.numel()

    def read(self) -> OuterMetrics:
        """The figures since the last reading."""
        disagreement = None
        if self._squares is not None and self._compared:
            disagreement = math.sqrt(self._squares.item() / self._compared)
        metrics = OuterMetrics(
            self.rounds,
            self.bytes_sent,
            self.bytes_received,
            self.messages,
            self.exchange_s,
            self.waiting_s,
            disagreement,
        )
        self._start()
        return metrics
