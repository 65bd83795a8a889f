"""The common base of asynchronous workers: gossip and pairwise meetings."""

import contextlib
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic

from torch import Tensor

from gossamer.clock import Phase
from gossamer.errors import CheckpointError
from gossamer.record import checkpoint
from gossamer.record.lineage import Lineage
from gossamer.record.logs.events import EventWriter
from gossamer.record.logs.order import Entered, Finished, OrderWriter
from gossamer.record.progress import say
from gossamer.record.whole_files import worker_suffix
from gossamer.run.asynchronous.async_state import (
    AsyncState,
    Core,
    adopt,
    content_of,
    newest_state,
    phases_behind,
    state_of,
    take_over,
)
from gossamer.run.bookkeeping.journal import log_phase
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.participant.agreement import HERE, limits_of
from gossamer.run.participant.life import Participant
from gossamer.run.participant.rendezvous import RendezvousResult
from gossamer.run.worker.replica import LocalPhase
from gossamer.run.worker.task import Task
from gossamer.stop_signals import Asked
from gossamer.transport.elastic.call_transport import CallTransport
from gossamer.transport.elastic.calls import Calls
from gossamer.transport.elastic.members import MemberStatus
from gossamer.transport.elastic.newcomer import Offer

PATIENCE_S = 1.0
"""How often a wait for a letter rechecks whether it may still arrive."""


class AsyncParticipant(Participant[CallTransport], Generic[Core]):
    """A worker that trains at its own pace, and processes messages as they arrive.

    All workers together take `workers · run.steps` inner steps: no worker begins a local phase once all known ones have
    begun. A finished worker stays, so that the others can still fetch from or meet it, until all that are alive are
    done.

    Connection threads use the worker while it trains. Shared state, and the order of events, are guarded by
    `transport.changed`.
    """

    calls: Calls
    core: Core
    log: OrderWriter
    events: EventWriter

    def __init__(self, run: ResolvedRun, folder: Path, task: Task, rendezvous: RendezvousResult, asked: Asked) -> None:
        super().__init__(run, folder, task, rendezvous, asked)
        endpoint = rendezvous.endpoint
        self.limit_s = min(endpoint.timeout_s, endpoint.deadline_s or endpoint.timeout_s)
        """How long it waits for an answer."""
        self._number = 0
        """Completed local phases of its slot."""
        self._local_steps = run.local_steps_of(self.slot)
        self._began = time.perf_counter()
        self._budget = run.workers * run.loop.steps
        self._held: dict[int, int] = {}
        """Inner steps of other slots included in its parameters."""
        self._declined = Counter[int]()
        """Declined messages of others since the last local phase."""
        self._state: dict[str, Any] = {}
        """The state at the end of its last local phase."""

    # --- what differs between gossip and meetings ---------------------------------------------------------------------

    def before_others(self) -> None:
        """Starts, right before others can fetch from or meet it, with `changed` held."""
        return

    @abstractmethod
    def train(self, number: int, round: int, alive: frozenset[int]) -> tuple[LocalPhase, float]:
        """Trains a local phase with its update and calls `mark`; returns its report and start time."""

    @abstractmethod
    def end(self) -> float:
        """Ends, with `changed` held; returns the method's time since its last event."""

    @property
    def busy(self) -> bool:
        """Whether it is in an operation that another worker relies on."""
        return False

    # --- what both use ------------------------------------------------------------------------------------------------

    @property
    def x(self) -> Tensor:
        """See `Participant`."""
        return self.core.x

    @property
    def life(self) -> int:
        """The number of this process."""
        return self.calls.life

    def now_s(self) -> float:
        """Seconds since the first process that wrote these files began."""
        return time.perf_counter() - self._began

    def record_steps(self, slot: int, steps: int) -> None:
        """Records that its parameters include `steps` inner steps of another slot, as reported by that slot."""
        self._held[slot] = max(min(steps, self._budget), self._held.get(slot, 0))
        self.transport.record_steps(slot, self._held[slot])

    def decline(self, peer: int, why: str) -> None:
        """Records a declined message of a peer."""
        self._declined[peer] += 1
        say(f"worker {self.slot} declined a message in its phase {self._number}: {why}; it continues without it")

    def mark(self, phases: int) -> None:
        """Marks the current state, after `phases` local phases of its slot, as that of checkpoints and newcomers.

        Called where no other thread can change the parameters, with `changed` held where one may: parameters and
        position in the order of events must be consistent, or the replay of a worker that takes this state would
        diverge. It holds the tensors themselves, as later events replace them and never write into them.
        """
        source = self.slot, self.life, self.log.place
        self._state = content_of(self.core, self.replica, phases=phases, source=source, held=self._held)

    # --- the life -----------------------------------------------------------------------------------------------------

    def connect(self) -> CallTransport:
        """See `Participant`. Calls are refused until the record is open."""
        return CallTransport(self.rendezvous.members, self.rendezvous.endpoint, self.calls, host=self.host)

    def begin(self) -> None:
        """See `Participant`. Steps that need a record are in `open_record`."""
        rendezvous, members, joins = self.rendezvous, self.rendezvous.members, self.joins
        state = rendezvous.content if isinstance(rendezvous.content, AsyncState) else None
        if joins:
            state, _ = newest_state(self.run, self.folder, self.slot, rendezvous.lineage)
            self.transport.first_round(self.run.loop.timeout_s)
        held = min(members.own.steps, self._budget)
        number = phases_behind(0 if state is None else state.phases, held, self._local_steps)
        if joins and state is not None and self._rounds_over(number) > state.after + self.run.loop.rejoin_rounds:
            state = None
        fetches = state is None and (joins or rendezvous.after > 0)
        if fetches:
            _, state = self.fetch(self._accepted, first=rendezvous.donor, behind=0)
            number = phases_behind(0, held, self._local_steps)
        self._number, self.round, self._begun = number, 0, Entered(number, 0, None, 0.0)
        self.replica.steps_taken = number * self._local_steps
        if state is None:
            return
        donor = state.source[0]
        is_own_state = donor == self.slot
        if not fetches:
            adopt(state, self.core, self.replica)
        self._held = state.held | ({} if is_own_state else {donor: state.phases * self.run.local_steps_of(donor)})
        self.round = state.after if is_own_state else max(state.after, self._rounds_over(number))
        self._begun = Entered(number, self.round, state.source, 0.0)
        if joins:
            say(
                f"worker {self.slot} joins after {number} local phases of its slot, with {self.whose(donor)} after round "
                f"{state.after}"
            )

    def _accepted(self, offer: Offer, content: Any) -> AsyncState:
        """Loads the state of another worker. Raises: CheckpointError unless all of it fits."""
        state = state_of(content, offer.after, limits_of(self.run))
        if state.source[0] != offer.donor:
            raise CheckpointError(f"it calls itself the state of worker {state.source[0]}; look at that machine")
        take_over(state, self.core, self.replica)
        return state

    def open_record(self, open_: contextlib.ExitStack) -> None:
        """See `Participant`; then this worker takes part, as calls of others can be recorded."""
        begun, rendezvous = self._begun, self.rendezvous
        cut, steps = begun.round if rendezvous.goes_on else None, begun.number * self.replica.local_steps
        goes_on = begun != Entered(0, 0, None, 0.0)
        last = self.run.rounds - 1

        def void(line: Mapping[str, Any]) -> bool:
            kind = line.get("kind")
            # A worker resumed from its end repeats its final validation.
            return (kind == "validation" and line["round"] == last) or (
                kind == "train" and line.get("step") not in range(steps + 1)
            )

        self.open_folder(open_, cut, void=void)
        self.log = open_.enter_context(OrderWriter(self.folder, self.slot, life=self.life, goes_on=goes_on))
        self.events = open_.enter_context(
            EventWriter(
                self.folder,
                network=HERE,
                workers=self.run.workers,
                suffix=worker_suffix(self.slot),
                resume_round=cut,
                void=lambda line: line["event"] == "phase" and line["number"] >= begun.number,
            )
        )
        self.start_clock(initial=(begun.number, begun.source) == (0, None))
        self._began = time.perf_counter() - self.stopwatch.before_s
        self.log.write(begun._replace(time_s=self.stopwatch.before_s))
        open_.callback(self._stop_calls)
        self._take_part()

    def _take_part(self) -> None:
        """Opens the calls: from now on others can fetch from this worker, or meet it."""
        self.mark(self._number)
        # A final state has completed all rounds; steps left to train, lost by others, belong to the last one.
        self.round = min(max(self.round, self._rounds_over(self._number)), self.run.rounds - 1)
        self.keep(self.round, self._state)
        self.transport.begin_phase(self._number)
        with self.transport.changed:
            self.calls.steps = self._number * self._local_steps
            self.before_others()
            self.calls.closed = False
        if self.joins:
            self.transport.declare(MemberStatus.ALIVE, self.round)

    def _stop_calls(self) -> None:
        # Entered last to end first: else a connection thread would write into closed files.
        with self.transport.changed:
            self.calls.stop()

    @property
    def has_more(self) -> bool:
        """See `Participant`: whether steps are left for the next phase, in this worker's view."""
        return self._steps(self._number, begun=True) < self._budget

    def _steps(self, number: int, *, begun: bool) -> int:
        """Inner steps of all workers in completed local phases, or `begun` ones; this worker's are `number`.

        Two workers may both begin the last phase, as updates take time: a run has at most one extra phase per worker. A
        worker that dies in the last phases, after the others have stopped, leaves its own out.
        """
        steps = number * self._local_steps
        for slot, one in self.transport.phases().items():
            if slot != self.slot:
                local = self.run.local_steps_of(slot)
                # The message of a phase may arrive before the announcement of its end: both refer to the same phase.
                phases = max(phases_behind(one.ended, one.steps, local), one.ended + (begun and one.trains))
                steps += phases * local
        return steps

    def phase(self) -> None:
        """A local phase and its update."""
        number, round = self._number, self.round
        alive = self.transport.begin_phase(number)
        self.count_phase(alive)
        self.say_changes(done=self.calls.done)
        report, start_s = self.train(number, round, alive)
        self.stopwatch.phase(report.compute_s)
        phase = Phase(start_s, self.now_s(), self.slot, number, report)
        with self.transport.changed:
            declined, self._declined = self._declined, Counter()
        log_phase(self.record, self.events, round, phase, self.replica.local_steps, declined)
        self._number += 1
        self.round = max(round, self._rounds_over(self._number))
        self.keep(self.round, self._state)
        if self.round > round:
            self.record.log_seconds(self.stopwatch.round(round))
        if due := due_round(self.run, round, self.round):
            self.journal.end_own_round(self.replica, due)

    def part(self, *, failed: bool) -> None:
        """See `Participant`."""
        # After a failure others continue from its last message, and the slot's next process continues there too.
        self.transport.close(leaves=not failed)

    def leave(self) -> None:
        """See `Participant`: stays for the others, saves and announces its end."""
        number, left = self._number, self.asked.is_set()
        self._stay_until_end(left)
        why = "left" if left and self.has_more else "finished"
        finished = self.run.rounds if why == "finished" else max(self.round, self._begun.round)
        with self.transport.changed:
            self.log.write(Finished(why, finished, self.end(), self.now_s()))
            self.mark(number)
        self.record.log_seconds(self.stopwatch.round(self.round))
        if why == "finished":
            self.journal.end_own_round(self.replica, finished)
        else:
            self.save(finished)
        if left:
            self.transport.end_phases(number, leaves=True)  # others counted its completed phase as begun until now
        if why == "left":
            say(f"worker {self.slot} leaves after {number} local phases, as it was asked to, and has saved its state")

    def _stay_until_end(self, left: bool) -> None:
        """Stays until all live workers have taken the last step; on a stop request, completes pending operations."""
        with self.transport.changed:
            if not left:
                self.transport.end_phases(self._number, leaves=False)
                while not self.calls.alone and not self.asked.is_set():
                    self.transport.changed.wait(PATIENCE_S)
            self.calls.closed = True
            while self.busy:  # the other end may count it already
                self.transport.changed.wait(PATIENCE_S)

    def _rounds_over(self, number: int) -> int:
        """Completed rounds of the run in this worker's view: the steps of all, over those of a round."""
        steps = self._steps(number, begun=False)
        return min(steps // (self.run.workers * self.run.full_steps), self.run.rounds - 1)

    def save(self, finished: int) -> None:
        """See `Participant`. Saves the state of its last local phase; meetings continue during the write."""
        with self.saving:
            save_state(self.rendezvous.lineage, self.folder, finished, self.slot, self._state)
            self.saved_after = finished


def due_round(run: RunSettings, before: int, reached: int) -> int:
    """The last round completed since `before` after which a validation or checkpoint is due; 0 for none."""
    loop = run.loop
    over = range(before + 1, reached + 1)
    return max((r for r in over if run.due(loop.eval_every, r) or run.due(loop.checkpoint_every, r)), default=0)


def save_state(lineage: Lineage, folder: Path, finished: int, slot: int, state: dict[str, Any]) -> None:
    """Saves one worker after `finished` rounds of the run."""
    checkpoint.save(folder / "checkpoints", finished, slot, state, digest=lineage)
