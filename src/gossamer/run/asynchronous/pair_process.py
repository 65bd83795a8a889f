"""Workers that meet in pairs on real processes: one worker, whose meetings take place while it trains."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from gossamer.asynchronous import PairRule, conditions
from gossamer.clock.pair_worker import PairWorker
from gossamer.record.logs.order import Learned, Met, Told
from gossamer.record.progress import say
from gossamer.rng import numpy_rng
from gossamer.run.asynchronous.message_form import MessageForm
from gossamer.run.asynchronous.without_waiting import WithoutWaiting
from gossamer.run.config.resolved import InPairs, ResolvedRun
from gossamer.run.participant.seat import Seat
from gossamer.run.worker.replica import LocalPhase
from gossamer.run.worker.task import Task
from gossamer.stop_signals import Asked
from gossamer.transport.elastic.meetings import Appointment, Meetings
from gossamer.tree import Tree

T = TypeVar("T")
LOOK_S = 0.02
"""How often a worker looks whether anybody has ended a local phase yet."""


def pair_rule_of(method: InPairs) -> PairRule:
    """The rule with the options that it computes from the meetings, whose unit of time is a mean local phase then."""
    rule = method.rule
    return rule if rule.settle is None else rule.settle(*conditions(method.topology.n, method.rates))


class PairParticipant(WithoutWaiting[PairWorker]):
    """A worker that starts `events.meetings / 2` meetings per mean local phase, at random times, with neighbours drawn alike.

    A local phase takes as long as those of all workers together have taken so far, over their number. Where a rule computes its
    options from the meetings, its time is counted in local phases; else in seconds. Before the first phase of anybody has ended,
    nobody starts a meeting and no time passes.
    """

    def __init__(self, config: ResolvedRun, folder: Path, task: Task, seat: Seat, asked: Asked) -> None:
        super().__init__(config, folder, task, seat, asked)
        method = config.method
        assert isinstance(method, InPairs)
        self._in_phases = method.rule.settle is not None
        self.core = PairWorker(pair_rule_of(method), self.replica)
        self._messages = MessageForm(
            method.codec, self.replica.layout, self.core.tell(), seed=config.seed, worker=self.slot, device=self.device
        )
        self.calls = self._meetings = Meetings(
            seat.members,
            self._messages.wire_bytes,
            limit_s=self.limit_s,
            tell=lambda one: self._guarded(lambda: self._tell(one)),
            meet=lambda one, payload: self._guarded(lambda: self._meet(one, payload)),
            sound=self._is_sound,
        )
        self._neighbours = method.topology.mixing(0).receives_from(self.slot)
        self._started_per_phase = (config.events.meetings or 1.0) / 2
        self._first_s = self._last_s = 0.0
        self._before: dict[int, int] = {}
        """Local phases of each slot that had ended when this process began."""
        self._own_message: Tree = ()
        """For the meeting it is in, as the other end decodes it."""
        self._round, self._told_s = 0, 0.0
        self._ended = threading.Event()
        self._failed: BaseException | None = None

    @property
    def busy(self) -> bool:
        """See `WithoutWaiting`."""
        return self._meetings.busy

    def before_others(self) -> None:
        """See `WithoutWaiting`."""
        self._first_s = self._last_s = self.now_s()
        self._before = {slot: one.ended for slot, one in self.transport.phases().items()}
        if self._neighbours:
            # Meetings come at random times, not between two steps of the thread that trains.
            threading.Thread(target=self._start_meetings, daemon=True, name="gossamer meetings").start()

    def train(self, number: int, round: int, alive: frozenset[int]) -> tuple[LocalPhase, float]:
        """See `WithoutWaiting`."""
        start_s, self._round = self.now_s(), round
        self.replica.round = round
        report = self.replica.local_phase(number)
        # Trained without the lock, so that meetings take place meanwhile. The drift is added with it: a meeting that came between
        # the time that passes, the line in the log and the update would be replayed on the other side of them.
        with self.transport.changed:
            if self._failed is not None:
                raise self._failed
            dt = self._pass()
            self.log.write(Learned(number, round, dt, start_s, self.now_s()))
            self.core.learn()
            self.core.begin()
            self._meetings.steps = self.replica.steps_taken
            self.mark(number + 1)
        return report, start_s

    def end(self) -> float:
        """See `WithoutWaiting`."""
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
        """Lets the time since the last event pass, with `changed` held; returns it in the unit of the rule."""
        now_s, unit_s = self.now_s(), self._phase_s() if self._in_phases else 1.0
        dt = max(0.0, now_s - self._last_s) / unit_s if unit_s else 0.0
        self._last_s = now_s
        self.core.advance(dt)
        return dt

    def _phase_s(self) -> float:
        """Seconds of a local phase in the mean over the workers; 0 while none has ended."""
        phases = self.transport.phases()
        counts = [max(0, one.ended - self._before.get(slot, 0)) for slot, one in phases.items()]
        ended, passed_s = sum(counts), self.now_s() - self._first_s
        return passed_s * sum(count > 0 for count in counts) / ended if ended else 0.0

    def _start_meetings(self) -> None:
        """Starts meetings at random times until the end."""
        rng = numpy_rng(self.config.seed, self.slot, self.life, "meetings")
        while True:
            phase_s = self._phase_s()
            wait_s = rng.exponential(phase_s / self._started_per_phase) if phase_s else LOOK_S
            if self._ended.wait(wait_s):
                return
            if phase_s:
                # The seconds of a training step never hold this lock, so the time of a meeting is as drawn.
                with self.transport.changed:
                    self._meetings.invite(int(rng.choice(self._neighbours)), time.monotonic())
                    self.transport.flush()

    # What follows is called by the threads of connections, which hold `changed`. So it takes place between two events of the
    # thread that trains, and the order of lines in the log is the order in which the parameters have changed.

    def _guarded(self, act: Callable[[], T]) -> T:
        """Keeps an error, which would end the connection alone, for the thread that trains."""
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

    def _tell(self, one: Appointment) -> Tensor:
        dt = self._pass()
        self._told_s = self.now_s()
        # Written before anybody has the message, so that whoever meets with it finds it in the log.
        self.log.write(Told(one.peer, one.starter, one.life, one.number, dt, self._told_s))
        self._own_message, packed = self._messages.pack(self.core.tell(), one.number, one.starter)
        return packed

    def _meet(self, one: Appointment, payload: Tensor) -> None:
        theirs, own = self._messages.unpack(payload, one.peer), self._own_message
        assert isinstance(theirs, Tensor) and isinstance(own, Tensor)
        dt, now_s = self._pass(), self.now_s()
        # Both messages are here and the other end knows it: from this line on the meeting counts, whatever happens to either.
        self.log.write(Met(one.peer, one.starter, one.life, one.number, dt, now_s))
        self.core.meet(own, theirs)
        self.holds(one.peer, one.steps)
        self.events.write(
            self._round,
            "meet",
            source=one.peer,
            target=self.slot,
            fragment=0,
            bytes=self._messages.bytes,
            start_s=self._told_s,
            end_s=now_s,
        )
