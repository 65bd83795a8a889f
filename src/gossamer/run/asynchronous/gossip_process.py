"""Asynchronous gossip on real processes: one worker, which fetches the newest messages of its peers while it trains."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gossamer.clock.gossip_worker import GossipWorker
from gossamer.errors import TransportError
from gossamer.record.logs.order import Mixed, Published
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.asynchronous.async_participant import PATIENCE_S, AsyncParticipant
from gossamer.run.asynchronous.message_form import MessageForm
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.rendezvous import RendezvousResult
from gossamer.run.worker.replica import LocalPhase
from gossamer.run.worker.task import Task
from gossamer.stop_signals import Asked
from gossamer.transport.elastic.fetches import Fetched, Fetches
from gossamer.tree import Tree


class GossipParticipant(AsyncParticipant[GossipWorker]):
    """A worker that mixes, after each local phase, with the newest messages fetched from its peers.

    It requests them before the end of the phase by twice the last answer's time, and at least one inner step. It waits
    for an answer in flight at the end: a wait for a link, never for a peer's training. A peer that is gone, that does
    not answer within `run.round_deadline_s` or that has not published yet is left out, and its weight goes to the
    worker's own message.
    """

    def __init__(self, run: ResolvedRun, folder: Path, task: Task, rendezvous: RendezvousResult, asked: Asked) -> None:
        super().__init__(run, folder, task, rendezvous, asked)
        m = run.method
        assert isinstance(m, Method)
        self._topology, first = m.topology, m.topology.mixing(0)
        self.core = GossipWorker(self.slot, m.rule, self.replica, first)
        self._messages = MessageForm(
            m.codec,
            self.replica.layout,
            self.core.message(0, first),
            seed=run.seed,
            worker=self.slot,
            device=self.device,
        )
        self.calls = self._fetches = Fetches(rendezvous.members, self._messages.wire_bytes, limit_s=self.limit_s)
        self._step_s = 0.0

    def train(self, number: int, round: int, alive: frozenset[int]) -> tuple[LocalPhase, float]:
        """See `AsyncParticipant`."""
        start_s, mixing = self.now_s(), self._topology.mixing(number, alive)
        replica = self.replica
        replica.steps_taken = number * replica.local_steps
        report = replica.train(round, 0, replica.local_steps, self._asking(mixing.receives_from(self.slot)))
        self._step_s, ended_s = report.compute_s / replica.local_steps, self.now_s()
        own_message, packed = self._messages.pack(self.core.message(number, mixing), number)
        # Logged before any peer can get it: if this worker were killed in between, that peer's mix could not be
        # replayed.
        self.log.write(Published(number, round, start_s, ended_s))
        with self.transport.changed:  # connection threads answer with it
            self._fetches.publish(number + 1, packed, replica.steps_taken)
        came: dict[int, Fetched] = {}
        self.stopwatch.blocking(lambda: came.update(self._fetched()))
        received: dict[int, Tree] = {}
        for peer, one in sorted(came.items()):
            try:
                received[peer] = self._messages.unpack(one.payload, peer)
            except TransportError as error:  # treated as missing, also in the log
                self.decline(peer, str(error))
        now_s, everyone = self.now_s(), len(alive) == self.run.workers
        # Logged before it is computed: a worker killed in between loses the mix, and its next life begins before it.
        mixed = tuple((peer, came[peer].version, came[peer].life) for peer in received)
        self.log.write(Mixed(number, None if everyone else alive, mixed, now_s))
        for peer in received:
            # From now on the peer's slot continues after these steps, as they are in this worker's parameters.
            self.record_steps(peer, came[peer].steps)
            self.events.write(
                round,
                "fetch",
                source=peer,
                target=self.slot,
                fragment=0,
                bytes=self._messages.bytes,
                start_s=ended_s,
                end_s=now_s,
            )
        self.core.mix(number, own_message, received, mixing)
        self.mark(number + 1)
        return report, start_s

    def end(self) -> float:
        """See `AsyncParticipant`."""
        return 0.0

    def _asking(self, peers: Iterable[int]) -> Callable[[], None]:
        """A callback after each inner step of a phase that requests messages in time."""
        left = self.replica.local_steps
        steps = 1 + math.ceil(2 * self._fetches.took_s / self._step_s) if self._step_s else 1

        def ask() -> None:
            with self.transport.changed:  # atomically: an answer is only accepted for a recorded request
                self._fetches.ask(peers, time.monotonic())
                self.transport.flush()

        def after_step() -> None:
            nonlocal left
            left -= 1
            if left == steps:
                ask()

        if steps >= left:
            ask()
        return after_step

    def _fetched(self) -> dict[int, Fetched]:
        """The fetched messages, once none is pending."""
        with self.transport.changed:
            # A thread of the transport times out pending requests, so this ends.
            while self._fetches.pending:
                self.transport.changed.wait(PATIENCE_S)
            return self._fetches.take()
