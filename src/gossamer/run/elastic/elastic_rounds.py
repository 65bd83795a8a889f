"""One worker of an elastic run: it trains on when peers die or hang, takes newcomers in, and may itself join a running run.

A worker fills a slot. What it does in a round depends on what it knows of the others; the log of outcomes
(`gossamer.record.logs.outcomes`) keeps that, and with it the run can be computed again. There is no place that all depend on:
after the start the workers know each other's addresses, and any of them takes a newcomer in.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.errors import CheckpointError
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.logs.outcomes import Begun, Ended, ExchangeOutcome, Followed, OutcomeWriter, RoundOutcome
from gossamer.record.packed import cold, frozen
from gossamer.record.progress import say
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.journal import Journal
from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.bookkeeping.spent_seconds import Stopwatch, recorded_s
from gossamer.run.bookkeeping.text_read import tell_text
from gossamer.run.bookkeeping.which_round import ended
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import run_key, use_threads
from gossamer.run.participant.membership_log import say_changes
from gossamer.run.participant.seat import Seat, addresses_in, joined, started
from gossamer.run.participant.sigterm import leaving
from gossamer.run.participant.state_transfer import give_state, take_state
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import Task, task_of
from gossamer.run.worker.worker import Worker
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.closing import LeftOutError
from gossamer.transport.elastic.core import Outcome
from gossamer.transport.elastic.members import MemberStatus, SlotTakenError
from gossamer.transport.elastic.newcomer import Handover
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.processes.launch import device_of
from gossamer.transport.sockets.channel import Channel

__all__ = ["KEPT", "train_elastic"]

log = logging.getLogger("gossamer")

KEPT = 4
"""Checkpoints that a worker keeps: gossip lets workers run ahead, and nobody knows what a worker that is gone has owned."""


def train_elastic(config: ResolvedRun, folder: Path, *, join: str | None = None, resume: Resume = False) -> None:
    """Trains one worker of an elastic run to the end, or until it is asked to leave by SIGTERM.

    Args:
        join: the address of any worker of a running run, "auto" for one that has written its address into `folder`; None to
            start with all others.
        resume: whether a run that starts goes on from its checkpoints, from the round of
            `gossamer.run.bookkeeping.which_round.to_resume`. Those without it take the state of one that has it.
    Raises: ConfigError, DataError, CheckpointError, TrainingError; PeerError when no worker can be reached to join;
        SlotTakenError when another process has taken the slot of one that has not joined, which asks for another.
    """
    use_threads(config)
    task = task_of(config)
    key, nonce = run_key(config, task), secrets.randbits(61)
    starts = join is None
    seat = started(config, folder, key, nonce, resume=resume) if starts else joined(config, folder, key, nonce, join)
    if starts and seat.begun.after == config.rounds:
        seat.endpoint.listener.close()
        if seat.members.me == 0:
            say(ended(folder, config.rounds))
        return
    with leaving() as asked:
        while True:
            try:
                return _Participant(config, folder, task, seat, asked).train()
            except SlotTakenError:
                if join is None or asked.is_set():
                    raise
            lost, others = seat.members.me, seat.members.with_status(MemberStatus.ALIVE)
            say(f"worker {lost} lost its slot to another process, and asks for a free one")
            nonce = secrets.randbits(61)
            seat = joined(config, folder, key, nonce, join, [entry.address for entry in others])


class _Participant:
    """One process in its slot."""

    def __init__(self, config: ResolvedRun, folder: Path, task: Task, seat: Seat, asked: threading.Event) -> None:
        m = config.in_rounds
        self.config, self.folder, self._method, self._seat, self._asked = config, folder, m, seat, asked
        self.slot, self._store, self._line = seat.members.me, folder / "checkpoints", seat.line
        device = device_of(config.run.device)
        self._replica = Replica(self.slot, config, task, device)
        self._probe = Probe(config, task, device)
        self._kept, self._ready = Handover(0, bytes, cold), threading.Event()
        self._closes = m.rule.needs == "everyone"
        # A message has at most four tensors of the size of x; what is larger is no payload.
        limit_bytes = 16 * self._replica.layout.numel + (1 << 16) if self._closes else None
        self._closings = sum(bool(stop.sends) for stop in m.schedule.stops(0, config.full_steps))
        self._transport = ElasticTransport(
            seat.members,
            seat.endpoint,
            host=self._host,
            device=device,
            limit_bytes=limit_bytes,
            closings=self._closings,
        )
        self._transport.stop = asked.is_set
        self._transport.redial.addresses = lambda: addresses_in(folder, config, seat.endpoint.run)
        if not m.exchanges_once:
            self._transport.taken = lambda: self._replica.steps_taken
        self._topology_of, self._once = m.topology_of(config.seed), m.exchanges_once
        self._worker = Worker(self._replica, m, self._transport)
        self._worker.loop.alive = self._take_part
        self._worker.loop.next = self._next
        self._worker.loop.closes = self if self._closes else None
        self._alive: frozenset[int] = frozenset()
        """Who takes part in the round that was begun last, or in the closing that was named last."""
        self._after: tuple[int, int] | None = None
        """The newest round after which it is decided with which one to go on, and that one."""
        self._sends: tuple[int, int | None] | None = None
        """The same of the round for which this worker sends ahead; None where it sends nothing."""
        self._entered = -1
        self._views: dict[tuple[int, int], frozenset[int]] = {}
        """Who takes part in each exchange that was announced and has not ended, by the round that it follows and fragment."""
        self._ended: list[ExchangeOutcome] = []
        """The exchanges that have ended in this round."""
        self._fresh = task.data.state()
        self._known = dict(seat.members.entries)

    def train(self) -> None:
        """Trains until the end of the run, or until it is asked to leave."""
        try:
            begun = self._begin()
            fresh = not self._seat.resumes
            with (
                RunFolder(  # which refuses a folder that holds another run, before anything of it is written over
                    self.folder, self.config.document, self.config.record, worker=self.slot,
                    resume_round=None if fresh else begun.round, traced_per_round=self._method.sends_per_round,
                ) as record,
                OutcomeWriter(self.folder, self.slot, None if fresh else begun.round) as log,
            ):  # fmt: skip
                tell_text(record, self._worker.replica.task.data)
                log.write(begun)
                self._rounds(begun, log, record)
        finally:
            self._transport.close()

    def _begin(self) -> Begun:
        """Takes over the state that this process begins with, and tells the others from which round on it takes part."""
        begun, members, transport = self._seat.begun, self._seat.members, self._transport
        joins = members.own.status == MemberStatus.JOINING
        if joins:
            newest = transport.first_round(self.config.run.timeout_s) - 1
            begun = begun._replace(round=0 if self._closes else newest + 1)
            if self._closes or begun.after == 0 or newest - begun.after > self.config.run.rejoin_rounds:
                if self.config.run.ghost_rounds:
                    begun = self._follow(begun)
                begun = self._fetched(begun)
        if begun.after and begun.donor == self.slot:
            try:
                saved = checkpoint.load(self._store, begun.after, self.slot, self._line)
                self._worker.restore({**saved, "under_way": []})
            except CheckpointError as error:
                log.warning("worker %d takes another's state: %s", self.slot, error)
                begun = self._fetched(begun)
        elif begun.after and not joins:
            begun = self._fetched(begun)
        if self._worker.loop.sharing is None:
            self._replica.steps_taken = max(self._replica.steps_taken, members.own.steps)
        self._keep(begun.after)
        self._ready.set()
        if joins:
            if not self._closes:
                begun = begun._replace(round=max(begun.round, transport.newest_round + 1))
            transport.declare(MemberStatus.ALIVE, begun.round)
            whose = "its own checkpoint" if begun.donor == self.slot else f"the state of worker {begun.donor}"
            say(f"worker {self.slot} joins at round {begun.round} with {whose} after round {begun.after}")
        return begun._replace(steps=self._replica.steps_taken)

    def _follow(self, begun: Begun) -> Begun:
        """Trains as a ghost, until the inner optimizer is warm; returns how this process begins, as far as that is known then."""
        transport, replica, followed = self._transport, self._replica, list[Followed]()
        transport.declare(MemberStatus.GHOST)
        behind = transport.members.own.steps
        for k in range(self.config.run.ghost_rounds):
            if self._asked.is_set() or transport.members.replaced:
                break
            members, endpoint = transport.members, self._seat.endpoint
            offer, state = take_state(
                members, endpoint, first=begun.donor, behind=begun.after, inner=False, stop=self._asked.is_set
            )
            steps = behind + k * replica.local_steps
            self._worker.rehearse(offer.after, self._mine(state, steps))
            followed.append(Followed(offer.donor, offer.after, steps, offer.sha256))
        replica.steps_taken = behind
        newest = transport.first_round(self.config.run.timeout_s) - 1
        return begun._replace(round=0 if self._closes else newest + 1, followed=tuple(followed))

    def _rounds(self, begun: Begun, log: OutcomeWriter, record: RunFolder) -> None:
        config, worker, transport, replica = self.config, self._worker, self._transport, self._replica
        journal = Journal(
            config, lambda: record, lambda: {"loss": self._probe.loss(replica.evaluated, replica.buffers)}, self._save,
            kind="validation",
        )  # fmt: skip
        if (begun.round, begun.incarnation) == (0, 0):  # for one that joins, others may be waiting
            journal.begin(worker=self.slot)
        stopwatch = Stopwatch(self.slot, recorded_s(self.folder, self.slot, begun.round))
        stopwatch.start()
        round, finished, begins = begun.round, begun.after, True
        while round < config.rounds and not self._asked.is_set():
            self._known = say_changes(self._known, transport, round=round, rounds=config.rounds)
            before = replica.steps_taken
            self._enter(round)
            alive = self._alive
            if begins and round:
                self._after = round - 1, round
                worker.loop.send_ahead(round)
            begins = False
            try:
                report = worker.train_round(round, lambda: self._note(round, log))  # noqa: B023
            except LeftOutError as error:
                replica.steps_taken = before  # nobody has what they have led to: they are taken again
                self._views.clear()
                worker.hashes()
                if self._asked.is_set():
                    break
                begun = Begun(round, finished, self.slot, 0, self._incarnation)
                round, begins = self._go_on(begun, log, error.source), True
                continue
            finished = round + 1
            self._note(round, log)
            alive = self._alive if self._closes else alive
            missed = frozenset(peer for one in self._ended for peer in one.missed)
            unsure = frozenset(peer for one in self._ended for peer in one.unsure)
            log.write(RoundOutcome(round, self._or_all(alive), missed, unsure, replica.steps_taken))
            self._show(alive, record)
            self._keep(finished)
            stopwatch.phase(report.whole.compute_s)
            stopwatch.waited(transport.waits(), transport.deliveries())
            journal.enter(worker, round, report)
            journal.end_own_round(replica, finished)
            record.log_seconds(stopwatch.round(round))
            round = self._decided(round)
            if round > finished + config.run.rejoin_rounds and round < config.rounds:
                self._settle(finished, log)
                round, begins = self._go_on(Begun(round, finished, self.slot, 0, self._incarnation), log), True
        self._end(min(round, config.rounds), finished, log)

    def _enter(self, round: int) -> None:
        """Begins a round, or the sending for it, if this worker has not yet."""
        if round != self._entered:
            steps = self._replica.steps_taken + self._replica.local_steps
            self._alive, self._entered = self._transport.enter(round, self._peers(round), steps), round

    def _decided(self, round: int) -> int:
        """The round to go on with after this one."""
        if self._after is None or self._after[0] != round:
            self._after = round, self._transport.next_round()
        return self._after[1]

    def _next(self, round: int) -> int | None:
        """See `OuterLoop.next`. What it says of a round stays."""
        if self._sends is None or self._sends[0] != round:
            after = self._decided(round)
            far = after > round + 1 + self.config.run.rejoin_rounds
            self._sends = round, None if far or after >= self.config.rounds or self._asked.is_set() else after
            if self._sends[1] is not None:
                self._enter(after)
        return self._sends[1]

    def _take_part(self, round: int, fragment: int) -> frozenset[int]:
        """See `OuterLoop.alive`."""
        self._views[round, fragment] = self._alive
        return self._alive

    @property
    def _incarnation(self) -> int:
        return self._transport.members.own.incarnation

    def _go_on(self, begun: Begun, log: OutcomeWriter, source: int | None = None) -> int:
        """Goes on with another worker's state; returns the round to go on with."""
        if self._closings > 1 and source is not None:  # states are given away as they were at the ends of rounds
            self._transport.await_later(begun.round)
        self._entered = -1
        begun = self._fetched(begun, source)
        self._keep(begun.after)
        log.write(begun._replace(steps=self._replica.steps_taken))
        return begun.round

    def proposed(self, round: int) -> tuple[int, frozenset[int]]:
        """See `gossamer.transport.contract.Closes`."""
        attempt, self._alive = self._transport.proposed(round)
        return attempt, self._alive

    def committed(self, attempt: int, *, whole: bool) -> bool:
        """See `gossamer.transport.contract.Closes`."""
        return self._transport.committed(attempt, whole=whole)

    def _end(self, round: int, finished: int, log: OutcomeWriter) -> None:
        """Receives what is under way, saves and says goodbye."""
        if self._worker.loop.in_flight:
            self._worker.receive_rest()
            self._note(finished, log)
        left = self._asked.is_set() and round < self.config.rounds
        if finished < self.config.rounds:
            self._save(finished if left else self.config.rounds)
        log.write(Ended(round, "left" if left else "finished"))
        if left:
            say(f"worker {self.slot} leaves after round {finished}, as it was asked to, and has saved its state")

    def _peers(self, round: int) -> Callable[[frozenset[int]], tuple[int, ...]]:
        every = range(self._worker.loop.exchanges)
        return lambda alive: tuple(sorted({j for p in every for j in self._hears_from(round, p, alive)}))

    def _hears_from(self, of: int, fragment: int, alive: frozenset[int]) -> tuple[int, ...]:
        return self._topology_of(fragment).mixing(of, alive).receives_from(self.slot)

    def _or_all(self, alive: frozenset[int]) -> frozenset[int] | None:
        return None if len(alive) == self.config.workers else alive

    def _note(self, round: int, log: OutcomeWriter) -> None:
        """Keeps what became of the exchanges that have ended since the last call, before anything else is sent."""
        collected = self._transport.outcomes()
        if self._closes:  # what is closed has everything
            collected = {Ticket(*key): dict[int, Outcome]() for key in self._views}
        for ticket, outcomes in collected.items():
            missed, unsure = (
                frozenset(peer for peer, outcome in outcomes.items() if outcome is kind)
                for kind in (Outcome.MISSED, Outcome.UNSURE)
            )
            alive = self._or_all(self._views.pop(ticket[:2]))
            ended = ExchangeOutcome(round, ticket.round, ticket.fragment, alive, missed, unsure)
            self._ended.append(ended)
            if not self._once:
                log.write(ended)
            if ended.lost:
                which = ", ".join(map(str, sorted(ended.lost)))
                say(
                    f"round {round + 1}: worker {self.slot} did not exchange with worker {which}; its weight stays here"
                )

    def _show(self, alive: frozenset[int], record: RunFolder) -> None:
        """Shows what became of the exchanges of a round, and forgets them."""
        everyone = frozenset(range(self.config.workers))
        made = sum(
            len({*self._hears_from(one.of, one.fragment, one.alive or everyone)} - one.lost) for one in self._ended
        )
        missed, unsure = sum(len(one.missed) for one in self._ended), sum(len(one.unsure) for one in self._ended)
        record.show_exchanges(alive=len(alive), made=made, missed=missed, unsure=unsure)
        self._ended.clear()

    def _settle(self, round: int, log: OutcomeWriter) -> None:
        """Waits for what is under way and drops it, before another's state is taken over: other ends may count it."""
        in_flight = self._worker.loop.in_flight
        for exchange in in_flight.values():
            exchange.receive()
        in_flight.clear()
        self._note(round, log)

    def _save(self, finished: int) -> None:
        checkpoint.save(self._store, finished, self.slot, self._worker.state(), digest=self._line, keep=KEPT)

    def _keep(self, after: int) -> None:
        """Keeps the present state for newcomers. Cost: one copy of the model, its outer and its inner state."""
        state = {**self._worker.state(), "under_way": [], "line": self._transport.line}
        self._kept = Handover(after, frozen(state), cold)

    def _fetched(self, begun: Begun, source: int | None = None) -> Begun:
        """Goes on with another worker's parameters, outer and inner state, and with its own place in the data."""
        first, members, endpoint = (
            begun.donor if source is None else source,
            self._transport.members,
            self._seat.endpoint,
        )
        offer, state = take_state(
            members, endpoint, first=first, behind=begun.after, inner=not begun.followed, stop=self._asked.is_set
        )
        self._worker.take_over(self._mine(state, max(members.own.steps, self._replica.steps_taken)))
        round = max(begun.round, offer.after)
        if self._closes:
            round = offer.after
            self._transport.go_on_from(offer.after, int(state["line"]))
        return begun._replace(round=round, after=offer.after, donor=offer.donor, sha256=offer.sha256)

    def _mine(self, state: dict[str, Any], steps: int) -> dict[str, Any]:
        """Another worker's state with this one's own place in the data."""
        return {**state, "data": self._fresh, "steps_taken": steps, "under_way": []}

    def _host(self, channel: Channel) -> None:
        # Somebody may ask while this object is made. Who asks one without a state may ask another.
        if self._seat.members.own.status != MemberStatus.GHOST and self._ready.wait(self._seat.endpoint.timeout_s):
            give_state(channel, self._transport, self._seat.endpoint, lambda: self._kept)
