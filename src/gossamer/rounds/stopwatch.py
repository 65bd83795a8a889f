"""The breakdown of a worker's seconds, as a real worker measures it."""

import time
from collections.abc import Callable, Iterator, Sequence

from gossamer.record.logs.seconds import SERVER, RoundSeconds
from gossamer.transport.contract import Delivery, Ticket, Wait


class Tally:
    """The seconds of one worker since its last round ended."""

    def __init__(self, worker: int, network: str | None = None, before_s: float = 0.0) -> None:
        self.worker, self.network = worker, network
        self.end_s = before_s
        """The time up to which all seconds are in a round or counted here."""
        self._clear()

    def _clear(self) -> None:
        self.compute_s = self.transfer_s = self.other_s = 0.0
        self.waiting_for: dict[int, float] = {}

    def wait(self, peer: int, seconds: float) -> None:
        """Counts waiting for a peer."""
        if seconds > 0:
            self.waiting_for[peer] = self.waiting_for.get(peer, 0.0) + seconds

    def round(self, round: int) -> RoundSeconds:
        """Ends a round with the seconds counted."""
        counted = RoundSeconds(
            round,
            self.worker,
            self.network,
            self.compute_s,
            self.transfer_s,
            self.waiting_for,
            self.other_s,
            self.end_s,
        )
        self._clear()
        return counted


def held_up(waits: Sequence[Wait], deliveries: Sequence[Delivery]) -> Iterator[tuple[int | None, float, float]]:
    """For each wait the peer whose message began to arrive last, the seconds until then, and those after it.

    >>> ticket = Ticket(0)
    >>> [*held_up([Wait(ticket, 1.0, 4.0)], [Delivery(ticket, 2, 8, 0.5, 3.5), Delivery(ticket, 1, 8, 0.5, 0.2)])]
    [(2, 2.5, 0.5)]
    """
    last: dict[Ticket, Delivery] = {}
    for arrival in deliveries:
        if arrival.ticket not in last or arrival.began_s > last[arrival.ticket].began_s:
            last[arrival.ticket] = arrival
    for ticket, start_s, end_s in waits:
        latest = last.get(ticket)
        began_s = start_s if latest is None else min(max(start_s, latest.began_s), end_s)
        yield (None if latest is None else latest.peer), began_s - start_s, end_s - began_s


class Stopwatch:
    """Measures the rounds of a real worker.

    A message counts as sent when its header arrives. NCCL does not report that, so all waiting counts as transfer. A worker of a
    server does not know it either, and the transfer of a reply counts as waiting for the server.

    Args: `before_s` is the end of the last round before the one that a resumed run continues from.
    """

    def __init__(self, worker: int, before_s: float = 0.0) -> None:
        self.before_s, self._tally = before_s, Tally(worker, before_s=before_s)
        self.start()

    def start(self, since_s: float | None = None) -> None:
        """Starts measuring now, or as of a time of `time.perf_counter`: earlier time belongs to no round."""
        self._start_s = (time.perf_counter() if since_s is None else since_s) - self._tally.end_s

    def blocking(self, act: Callable[[], None]) -> None:
        """Calls a blocking collective; all of its time counts as transfer."""
        start_s = time.perf_counter()
        act()
        self._tally.transfer_s += time.perf_counter() - start_s

    def phase(self, compute_s: float, sending_s: float = 0.0, waiting_s: float = 0.0) -> None:
        """Counts a local phase, and the seconds of sending its result to a server and waiting for the reply."""
        self._tally.compute_s += compute_s
        self._tally.transfer_s += sending_s
        self._tally.wait(SERVER, waiting_s)

    def waited(self, waits: Sequence[Wait], deliveries: Sequence[Delivery]) -> None:
        """Counts the delays of this worker in a round."""
        for peer, waiting_s, transfer_s in held_up(waits, deliveries):
            self._tally.transfer_s += transfer_s
            if peer is not None:
                self._tally.wait(peer, waiting_s)

    def round(self, round: int) -> RoundSeconds:
        """Ends a round now."""
        tally, now_s = self._tally, time.perf_counter() - self._start_s
        counted_s = tally.compute_s + tally.transfer_s + sum(tally.waiting_for.values())
        tally.other_s, tally.end_s = max(0.0, now_s - tally.end_s - counted_s), now_s
        return tally.round(round)
