"""Pairwise meetings on real processes: one worker, whose meetings take place while it trains."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from gossamer.asynchronous import PairRule, conditions
from gossamer.clock.pair_worker import PairWorker
from gossamer.record.logs.order import Learned, MeetingSent, Met
from gossamer.record.progress import say
from gossamer.rng import numpy_rng
from gossamer.run.asynchronous.async_participant import AsyncParticipant
from gossamer.run.asynchronous.message_form import MessageForm
from gossamer.run.config.resolved import InPairs, ResolvedRun
from gossamer.run.participant.rendezvous import RendezvousResult
from gossamer.run.worker.replica import LocalPhase
from gossamer.run.worker.task import Task
from gossamer.stop_signals import Asked
from gossamer.transport.elastic.meetings import Appointment, Meetings
from gossamer.tree import Tree

T = TypeVar("T")
_MOST_INVITED = 16
"""Invitations of one peer in a local phase, for each meeting of a mean phase and some more: this worker may be slow."""
LOOK_S = 0.02
"""How often a worker polls for the first completed local phase of any worker."""


def pair_rule_of(method: InPairs) -> PairRule:
    """The rule with options computed from the meetings; its unit of time is then a mean local phase."""
    rule = method.rule
    return rule if rule.settle is None else rule.settle(*conditions(method.topology.n, method.rates))


class PairParticipant(AsyncParticipant[PairWorker]):
    """A worker that starts `events.meetings / 2` meetings per mean local phase, at random times, with neighbours drawn alike.

    The length of a local phase is the average over all workers so far. Where a rule computes its options from the
    meetings, its time is in local phases; else in seconds. Before the first phase of any worker has ended, no meeting
    starts and no time passes.
    """

    def __init__(self, run: ResolvedRun, folder: Path, task: Task, rendezvous: RendezvousResult, asked: Asked) -> None:
        super().__init__(run, folder, task, rendezvous, asked)
        method = run.method
        assert isinstance(method, InPairs)
        self._in_phases = method.rule.settle is not None
        self.core = PairWorker(pair_rule_of(method), self.replica)
        self._messages = MessageForm(
            method.codec, self.replica.layout, self.core.tell(), seed=run.seed, worker=self.slot, device=self.device
        )
        self.calls = self._meetings = Meetings(
            rendezvous.members,
            self._messages.wire_bytes,
            limit_s=self.limit_s,
            tell=lambda one: self._guarded(lambda: self._message_for(one)),
            meet=lambda one, payload: self._guarded(lambda: self._meet(one, payload)),
            sound=self._is_sound,
            most_invited=math.ceil(_MOST_INVITED * (1.0 + (run.events.meetings or 1.0))),
        )
        self._neighbours = method.topology.mixing(0).receives_from(self.slot)
        self._started_per_phase = (run.events.meetings or 1.0) / 2
        self._first_s = self._last_s = 0.0
        self._before: dict[int, int] = {}
        """Local phases of each slot that had ended when this process began."""
        self._own_message: Tree = ()
        """The message of the current meeting, as the other end decodes it."""
        self._round, self._sent_s = 0, 0.0
        self._ended = threading.Event()
        self._failed: BaseException | None = None

    @property
    def busy(self) -> bool:
        """See `AsyncParticipant`."""
        return self._meetings.busy

    def before_others(self) -> None:
        """See `AsyncParticipant`."""
        self._first_s = self._last_s = self.now_s()
        self._before = {slot: one.ended for slot, one in self.transport.phases().items()}
        if self._neighbours:
            # In a thread, as meetings happen at random times, not between steps of the training thread.
            threading.Thread(target=self._start_meetings, daemon=True, name="gossamer meetings").start()

    def train(self, number: int, round: int, alive: frozenset[int]) -> tuple[LocalPhase, float]:
        """See `AsyncParticipant`."""
        start_s, self._round = self.now_s(), round
        self.replica.round = round
        report = self.replica.local_phase(number)
        # Trained without the lock, so that meetings can take place. The drift is added under it: otherwise a meeting
        # between clock, log line and update would be replayed in another order.
        with self.transport.changed:
            if self._failed is not None:
                raise self._failed
            dt = self._pass()
            self.log.write(Learned(number, round, dt, start_s, self.now_s()))
            self.core.learn()
            self.core.begin()
            self._meetings.begin_phase()
            self._meetings.steps = self.replica.steps_taken
            self.mark(number + 1)
        return report, start_s

    def end(self) -> float:
        """See `AsyncParticipant`."""
        self._ended.set()
        if self._failed is not None:
            raise self._failed
        m = self._meetings
        if m.missed or m.unsure:
            say(
                f"worker {self.slot} met {m.made} times; {m.missed} meetings failed, {m.unsure} may count at the other end alone"
            )
        return self._pass()

    def _pass(self) -> float:
        """Advances by the time since the last event, with `changed` held; returns it in the rule's unit."""
        now_s, unit_s = self.now_s(), self._phase_s() if self._in_phases else 1.0
        dt = max(0.0, now_s - self._last_s) / unit_s if unit_s else 0.0
        self._last_s = now_s
        self.core.advance(dt)
        return dt

    def _phase_s(self) -> float:
        """Seconds of a local phase, averaged over the workers; 0 while none has ended."""
        phases = self.transport.phases()
        counts = [max(0, one.ended - self._before.get(slot, 0)) for slot, one in phases.items()]
        ended, passed_s = sum(counts), self.now_s() - self._first_s
        return passed_s * sum(count > 0 for count in counts) / ended if ended else 0.0

    def _start_meetings(self) -> None:
        """Starts meetings at random times until the end."""
        rng = numpy_rng(self.run.seed, self.slot, self.life, "meetings")
        while True:
            phase_s = self._phase_s()
            wait_s = rng.exponential(phase_s / self._started_per_phase) if phase_s else LOOK_S
            if self._ended.wait(wait_s):
                return
            if phase_s:
                # Training steps do not hold this lock, so meetings start at the drawn times.
                with self.transport.changed:
                    self._meetings.invite(int(rng.choice(self._neighbours)), time.monotonic())
                    self.transport.flush()

    # The following is called by connection threads, which hold `changed`. So it runs between two events of the training
    # thread, and the order of lines in the log is the order of parameter changes.

    def _guarded(self, act: Callable[[], T]) -> T:
        """Passes an error, which would only end the connection, to the training thread."""
        try:
            return act()
        except BaseException as error:
            self._failed = self._failed or error
            raise

    def _is_sound(self, payload: Tensor, peer: int) -> bool:
        sound = self._messages.is_sound(payload, peer)
        if not sound:
            self.decline(peer, f"what worker {peer} sent is not finite or cannot be decoded")
        return sound

    def _message_for(self, appointment: Appointment) -> Tensor:
        dt = self._pass()
        self._sent_s = self.now_s()
        # Written before the message is sent, so that it is in the log of any meeting that uses it.
        self.log.write(
            MeetingSent(appointment.peer, appointment.starter, appointment.life, appointment.number, dt, self._sent_s)
        )
        self._own_message, packed = self._messages.pack(self.core.tell(), appointment.number, appointment.starter)
        return packed

    def _meet(self, appointment: Appointment, payload: Tensor) -> None:
        received, sent = self._messages.unpack(payload, appointment.peer), self._own_message
        assert isinstance(received, Tensor) and isinstance(sent, Tensor)
        dt, now_s = self._pass(), self.now_s()
        # Both messages are here and the other end knows it: once logged, the meeting counts at this end.
        self.log.write(Met(appointment.peer, appointment.starter, appointment.life, appointment.number, dt, now_s))
        self.core.meet(sent, received)
        self.record_steps(appointment.peer, appointment.steps)
        self.events.write(
            self._round,
            "meet",
            source=appointment.peer,
            target=self.slot,
            fragment=0,
            bytes=self._messages.bytes,
            start_s=self._sent_s,
            end_s=now_s,
        )
