"""Elastic rounds: a worker keeps training when peers die or hang, admits newcomers, and may itself join a running run.

Its actions in a round depend on its membership view, which the log of outcomes (`gossamer.record.logs.outcomes`)
records, so that the run can be replayed. There is no single point of failure: after the start the workers know each
other's addresses, and any of them admits newcomers.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.errors import CheckpointError, DataError
from gossamer.record import checkpoint
from gossamer.record.logs.outcomes import (
    OUTCOMES,
    Begun,
    Ended,
    ExchangeOutcome,
    OutcomeWriter,
    RoundOutcome,
)
from gossamer.record.packed import unpacked
from gossamer.record.progress import say
from gossamer.rounds.loop import Membership
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.life import KEPT, Participant
from gossamer.run.participant.rendezvous import RendezvousResult
from gossamer.run.participant.state_transfer import PAUSE_S
from gossamer.run.worker.task import Task
from gossamer.run.worker.worker import RoundReport, Worker
from gossamer.stop_signals import Asked
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.closing import LeftOutError
from gossamer.transport.elastic.common import common_hash, must_be_common
from gossamer.transport.elastic.core import Outcome
from gossamer.transport.elastic.members import MemberStatus
from gossamer.transport.elastic.newcomer import Handover, Offer
from gossamer.transport.elastic.transport import ElasticTransport

log = logging.getLogger("gossamer")
_MANY_TAKEN = 4
"""States taken without a round between them after which a worker says why."""


@dataclass
class _RoundPlan:
    """The decisions about a round. They are final: the others know them, and payloads may have been sent."""

    participants: frozenset[int]
    """The participants; with closing, those of the last proposed mean."""
    next: int | None = None
    """The next round after it."""
    sends_ahead: bool | None = None
    """Whether this worker sends for that round before this one is over."""
    views: dict[int, frozenset[int]] = field(default_factory=dict)
    """The participants of each announced, unfinished exchange, by fragment."""


class ElasticRounds(Participant[ElasticTransport]):
    """A worker that takes part in rounds with the workers alive in its view.

    A rule that needs everyone closes its rounds: all workers that make an update agree on the participants of its mean
    (`gossamer.transport.elastic.closing`). A worker that was too late takes another's state.
    """

    def __init__(self, run: ResolvedRun, folder: Path, task: Task, rendezvous: RendezvousResult, asked: Asked) -> None:
        super().__init__(run, folder, task, rendezvous, asked)
        self._method = m = run.in_rounds
        self._closes, self._once = m.rule.needs == "everyone", m.exchanges_once
        self._closings = sum(bool(stop.sends) for stop in m.schedule.stops(0, run.full_steps))
        self._compares = m.equal_after_rounds
        self._donor: int | None = None
        """The donor of the last state taken, if no round has ended since."""
        self._taken_in_row = 0
        """The number of states taken since a round ended with this worker."""
        self._waste = 0
        """The number of consecutive states taken that were no newer than the previous one."""
        self._fresh = task.data.state()
        """Its own initial position in the data, which other workers' states do not replace."""
        self._finished = 0
        """Completed rounds in its parameters."""
        self._begun: Begun | None = None
        """Its last begin event."""
        self._kept_whose: dict[str, str] = {}
        """The source of the state kept for newcomers."""
        self._begins = True
        """Whether it has not yet trained since its last begin."""
        self._plans: dict[int, _RoundPlan] = {}
        """Plans of rounds that were begun, or for which messages were sent."""
        self._ended: list[ExchangeOutcome] = []
        """The exchanges that have ended in this round."""

    @property
    def x(self) -> Tensor:
        """See `Participant`."""
        return self.replica.evaluated

    # --- connect and begin --------------------------------------------------------------------------------------------

    def connect(self) -> ElasticTransport:
        """See `Participant`."""
        # A message has at most four tensors of the size of x; a larger one is invalid.
        limit_bytes = 16 * self.replica.layout.numel + (1 << 16) if self._closes else None
        transport = ElasticTransport(
            self.rendezvous.members,
            self.rendezvous.endpoint,
            host=self.host,
            device=self.device,
            limit_bytes=limit_bytes,
            closings=self._closings,
        )
        if not self._once:
            transport.taken = lambda: self.replica.steps_taken
        return transport

    def begin(self) -> None:
        """See `Participant`."""
        rendezvous, members, transport = self.rendezvous, self.rendezvous.members, self.transport
        membership = Membership(self._participants, self._next, self if self._closes else None)
        self._worker = Worker(self.replica, self._method, transport, membership=membership)
        begun = Begun(rendezvous.after, rendezvous.after, rendezvous.donor, 0, members.own.incarnation)
        joins = self.joins
        taken: Begun | None = None
        if joins:
            newest = transport.first_round(self.run.loop.timeout_s) - 1
            begun = begun._replace(round=0 if self._closes else newest + 1)
            if self._closes or begun.after == 0 or newest - begun.after > self.run.loop.rejoin_rounds:
                begun = self._fetched(begun)
        if begun.after and begun.donor == self.slot:
            try:
                saved = checkpoint.load(self.folder / "checkpoints", begun.after, self.slot, rendezvous.lineage)
                taken = _taken_over(saved)
                self._worker.restore({**saved, "under_way": []})
            except (CheckpointError, DataError) as error:
                log.warning("worker %d takes another's state: %s", self.slot, error)
                begun = self._fetched(begun)
        elif begun.after and not joins:
            begun = self._fetched(begun)
        if self._worker.loop.sharing is None:
            self.replica.steps_taken = max(self.replica.steps_taken, members.own.steps)
        # Kept before it is announced as alive, after which others may request its state.
        self._keep(begun.after)
        if joins:
            if not self._closes:
                begun = begun._replace(round=max(begun.round, transport.newest_round + 1))
            transport.declare(MemberStatus.ALIVE, begun.round)
            whose = self.whose(begun.donor)
            say(f"worker {self.slot} joins at round {begun.round} with {whose} after round {begun.after}")
        if begun.donor == self.slot and taken is not None:
            # The log line with the source of its state may be truncated, as others resume from before it.
            begun = taken._replace(round=begun.round, incarnation=begun.incarnation)
        self._begun = begun._replace(steps=self.replica.steps_taken)
        self._kept_whose = self._taken_over_entry()
        self.round, self._finished = begun.round, begun.after

    def open_record(self, open_: contextlib.ExitStack) -> None:
        """See `Participant`."""
        begun = self._begun
        assert begun is not None
        cut = begun.round if self.rendezvous.goes_on else None
        self.open_folder(open_, cut, traced_per_round=self._method.sends_per_round)
        self._log = open_.enter_context(OutcomeWriter(self.folder, self.slot, cut))
        self._log.write(begun)
        self.start_clock(initial=(begun.round, begun.incarnation) == (0, 0))

    # --- a round ------------------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """See `Participant`."""
        return self.round < self.run.rounds

    def phase(self) -> None:
        """One round, or the part of it before it was closed without this worker."""
        self.say_changes(rounds=self.run.rounds)
        round, steps_before = self.round, self.replica.steps_taken
        plan = self._plan(round)
        if self._begins and round:
            self._plans[round - 1] = _RoundPlan(frozenset(), next=round)
            self._worker.loop.send_ahead(round)
        begun, self._begins = self._begins, False
        self.count_phase(plan.participants)
        try:
            report = self._worker.train_round(round, lambda: self._note(round))
        except LeftOutError as error:
            # The result of these steps is lost, so they are repeated.
            self.replica.steps_taken = steps_before
            self._plans.clear()
            self._worker.hashes()
            if self.asked.is_set():
                # They are in its parameters and inner optimizer, and a resume from its checkpoint repeats them.
                self._worker.restore(unpacked(self.kept.whole.raw))
                self._begins = begun
            else:
                self._take_anothers_state(round, error.source)
            return
        self._end_round(report, plan.participants)
        self.round = self._next_round(round)
        self._plans = {r: plan for r, plan in self._plans.items() if r >= self.round or plan.views}
        if self._finished + self.run.loop.rejoin_rounds < self.round < self.run.rounds:
            self._drop_in_flight()
            self._take_anothers_state(self.round)

    def _end_round(self, report: RoundReport, alive: frozenset[int]) -> None:
        """Records the outcome of a round, keeps its state, and validates and saves if due."""
        round, replica = self.round, self.replica
        self._finished, self._donor, self._waste, self._taken_in_row = round + 1, None, 0, 0
        self._note(round)
        missed = frozenset(peer for one in self._ended for peer in one.missed)
        unsure = frozenset(peer for one in self._ended for peer in one.unsure)
        # The outcome is logged before the state is kept: a newcomer may take that state and refer to it in its own log.
        self._log.write(RoundOutcome(round, self._or_all(alive), missed, unsure, replica.steps_taken))
        self._show(alive)
        self._keep(self._finished)
        self.stopwatch.phase(report.whole.compute_s)
        self.stopwatch.waited(self.transport.waits(), self.transport.deliveries())
        self.journal.log(self._worker, round, report)
        self.journal.end_own_round(replica, self._finished)
        self.record.log_seconds(self.stopwatch.round(round))

    def _take_anothers_state(self, round: int, source: int | None = None) -> None:
        """Replaces this round by the state of another worker, preferably `source`."""
        if self._closings > 1 and source is not None:  # states are given away as of the ends of rounds
            self.transport.await_later(round)
        self._plans.clear()
        self._begins = True
        begin = Begun(round, self._finished, self.slot, 0, self.transport.members.own.incarnation)
        again, began_s = self._donor is not None, time.monotonic()
        begun = self._fetched(begin, source)
        self._say_if_slow(time.monotonic() - began_s)
        self._waste = self._waste + 1 if again and begun.after <= self._finished else 0
        if self._waste:
            # Each state taken is a line in the log: limits useless ones.
            self.asked.wait(min(self.run.loop.timeout_s, PAUSE_S * 2**self._waste))
        self._begun = begun._replace(steps=self.replica.steps_taken)
        self._keep(begun.after)
        self._log.write(self._begun)
        self.round, self._finished = begun.round, begun.after

    def _say_if_slow(self, took_s: float) -> None:
        """Says why a worker takes part in no round, once for every power of two of states that it has taken in vain."""
        self._taken_in_row = count = self._taken_in_row + 1
        if self._closes and count >= _MANY_TAKEN and count.bit_count() == 1:
            log.warning(
                "worker %d has taken a state %d times, and each time the others closed another round without it: the last one "
                "took %.1f s, and they wait %.1f s for it in every other round; give it a faster link, or set "
                "run.round_deadline_s above the first number",
                self.slot,
                count,
                took_s,
                self.transport.core.limit_s,
            )

    # --- what `OuterLoop` asks ----------------------------------------------------------------------------------------

    def _plan(self, round: int) -> _RoundPlan:
        """The plan of a round, fixed by the first call, when this worker begins it or sends for it."""
        if round not in self._plans:
            steps = self.replica.steps_taken + self.run.local_steps_of(self.slot, round)
            peers = partial(self._worker.loop.peers_in, round)
            self._plans[round] = _RoundPlan(self.transport.begin_round(round, peers, steps))
        return self._plans[round]

    def _next_round(self, round: int) -> int:
        """The next round after this one."""
        plan = self._plans[round]
        if plan.next is None:
            plan.next = self.transport.next_round()
        return plan.next

    def _next(self, round: int) -> int | None:
        """See `gossamer.rounds.loop.Membership.next_round`."""
        plan, after = self._plans[round], self._next_round(round)
        if plan.sends_ahead is None:
            far = after > round + 1 + self.run.loop.rejoin_rounds
            plan.sends_ahead = not (far or after >= self.run.rounds or self.asked.is_set())
        if not plan.sends_ahead:
            return None
        self._plan(after)
        return after

    def _participants(self, round: int, fragment: int) -> frozenset[int]:
        """See `gossamer.rounds.loop.Membership.participants`."""
        plan = self._plans[round]
        plan.views[fragment] = plan.participants
        return plan.participants

    def proposed(self, round: int) -> tuple[int, frozenset[int]]:
        """See `gossamer.transport.contract.Closes`."""
        attempt, self._plans[round].participants = self.transport.proposed(round)
        return attempt, self._plans[round].participants

    def committed(self, attempt: int, *, whole: bool, unsound: Collection[int] = ()) -> bool:
        """See `gossamer.transport.contract.Closes`."""
        return self.transport.committed(attempt, whole=whole, unsound=unsound)

    # --- what became of the exchanges ---------------------------------------------------------------------------------

    def _or_all(self, alive: frozenset[int]) -> frozenset[int] | None:
        return None if len(alive) == self.run.workers else alive

    def _note(self, round: int) -> None:
        """Logs the outcomes of exchanges that ended since the last call, before any further send.

        So the log has the progress of a killed worker, whatever the others received from it.
        """
        collected = self.transport.outcomes()
        if self._closes:  # a closed round is complete
            views = [(r, fragment) for r, plan in self._plans.items() for fragment in plan.views]
            collected = {Ticket(*key): dict[int, Outcome]() for key in views}
        for ticket, outcomes in collected.items():
            missed, unsure, declined = (
                frozenset(peer for peer, outcome in outcomes.items() if outcome is kind)
                for kind in (Outcome.MISSED, Outcome.UNSURE, Outcome.DECLINED)
            )
            self._worker.loop.declined.update(declined)
            missed |= declined
            alive = self._or_all(self._plans[ticket.round].views.pop(ticket.fragment))
            ended = ExchangeOutcome(round, ticket.round, ticket.fragment, alive, missed, unsure)
            self._ended.append(ended)
            if not self._once:
                self._log.write(ended)
            if ended.lost:
                which = ", ".join(map(str, sorted(ended.lost)))
                say(
                    f"round {round + 1}: worker {self.slot} did not exchange with worker {which}; its weight stays here"
                )

    def _show(self, alive: frozenset[int]) -> None:
        """Reports the outcomes of a round's exchanges, and clears them."""
        everyone, receives_from = frozenset(range(self.run.workers)), self._worker.loop.receives_from
        made = sum(len({*receives_from(one.of, one.fragment, one.alive or everyone)} - one.lost) for one in self._ended)
        missed, unsure = sum(len(one.missed) for one in self._ended), sum(len(one.unsure) for one in self._ended)
        self.record.show_exchanges(alive=len(alive), made=made, missed=missed, unsure=unsure)
        self._ended.clear()

    def _drop_in_flight(self) -> None:
        """Waits for exchanges in flight and drops them, before another's state is taken over: the other ends may count them."""
        in_flight = self._worker.loop.in_flight
        for exchange in in_flight.values():
            exchange.receive()
        in_flight.clear()
        self._note(self._finished)

    # --- its state, and its end ---------------------------------------------------------------------------------------

    def save(self, finished: int) -> None:
        """See `Participant`."""
        with self.saving:
            folder, lineage = self.folder / "checkpoints", self.rendezvous.lineage
            state = {**self._worker.state(), **self._taken_over_entry()}
            checkpoint.save(folder, finished, self.slot, state, digest=lineage, keep=KEPT)
            self.saved_after = finished

    def _taken_over_entry(self) -> dict[str, str]:
        """The checkpoint's entry on a state that was taken over and not trained yet."""
        if not self._begins or self._begun is None or self._begun.donor == self.slot:
            return {}
        return {"taken_over": OUTCOMES.line(self._begun, time_s=0.0)}

    def _keep(self, after: int) -> None:
        # Exchanges in flight are private; the hash of its closed rounds goes with the state of a newcomer.
        with self.saving:
            history_hash = self.transport.history_hash
            copy = self.keep(after, {**self._worker.state(), "under_way": [], "line": history_hash})
            if self._compares:
                self.hashes.add(after, lambda: common_hash(history_hash, copy.tensors("x", "outer")))
            self._kept_whose = self._taken_over_entry()

    def kept_for_checkpoint(self, kept: Handover) -> dict[str, Any]:
        """See `Participant`."""
        state = super().kept_for_checkpoint(kept)
        del state["line"]
        return {**state, **self._kept_whose}

    def _fetched(self, begun: Begun, source: int | None = None) -> Begun:
        """Continues with another worker's parameters, outer and inner state, and its own position in the data."""
        first, members = begun.donor if source is None else source, self.transport.members
        steps = max(members.own.steps, self.replica.steps_taken)

        def accept(offer: Offer, state: Any) -> int:
            taken, history_hash = self._accepted(offer, state, steps=steps), state["line"]
            if self._compares:
                must_be_common(
                    common_hash(history_hash, [taken["x"], *taken["outer"]]), offer, members, self.rendezvous.endpoint
                )
            self._worker.take_over(taken)
            return history_hash

        self.hashes.abstains = True  # until it keeps that state
        offer, history_hash = self.fetch(accept, first=first, behind=begun.after, before=self._donor)
        self._donor, round = offer.donor, max(begun.round, offer.after)
        if self._closes:
            round = offer.after
            self.transport.continue_from(offer.after, history_hash)
        return begun._replace(round=round, after=offer.after, donor=offer.donor, sha256=offer.sha256)

    def _accepted(self, offer: Offer, state: Any, *, steps: int) -> dict[str, Any]:
        """Another worker's state with this one's position in the data. Raises: CheckpointError unless all of it fits."""
        history_hash = state.get("line") if isinstance(state, dict) else None
        if type(history_hash) is not int or not 0 <= history_hash < 1 << 64:
            raise CheckpointError(
                f"it has {history_hash!r:.40} in place of the hash of its closed rounds; look at that machine"
            )
        taken = {**state, "data": self._fresh, "steps_taken": steps, "under_way": []}
        self._worker.must_be_of_another(taken)
        return taken

    def part(self, *, failed: bool) -> None:
        """See `Participant`: stays first, for those that the last round was closed without."""
        if not (failed or self.asked.is_set()):
            self.transport.stay_for_late()
        # With a required majority, the others must not wait for a worker whose training has failed. One stopped on
        # request may come back, for example when its machine is free again.
        self.transport.close(for_good=failed or not self.asked.is_set())

    def leave(self) -> None:
        """See `Participant`."""
        round, finished = min(self.round, self.run.rounds), self._finished
        if self._worker.loop.in_flight:
            self._worker.receive_rest()
            self._note(finished)
        left = self.asked.is_set() and round < self.run.rounds
        # A state taken over after the last round was not saved at the end of a round.
        if finished < self.run.rounds or self._begins:
            self.save(finished if left else self.run.rounds)
        # Last in the log, as it implies a checkpoint.
        self._log.write(Ended(round, "left" if left else "finished"))
        if left:
            say(f"worker {self.slot} leaves after round {finished}, as it was asked to, and has saved its state")


def _taken_over(state: Mapping[str, Any]) -> Begun | None:
    """The begin event of a process that saved this state as taken over; None if it has trained since.

    Raises: DataError for an invalid line of the log.
    """
    line = state.get("taken_over")
    event = None if line is None else OUTCOMES.parse(str(line), "a checkpoint").event
    return event if isinstance(event, Begun) else None
