"""The local phases of all workers over virtual time, for every loop: who is present, who trains, and until when."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gossamer.clock.durations import Durations
from gossamer.clock.event_queue import ABSENCE, PHASE, EventQueue
from gossamer.clock.events import Absence, Record
from gossamer.codecs import Codec, fitted
from gossamer.codecs.cast import EXACT
from gossamer.codecs.message import round_trip
from gossamer.errors import ConfigError
from gossamer.finite import must_be_finite
from gossamer.layout import Layout
from gossamer.tree import Tree


class Report(Protocol):
    """The result of a local phase."""

    @property
    def tokens(self) -> int:
        """Tokens it trained on, at least one."""
        ...


class Learner(Protocol):
    """A model replica, or anything else with a flat vector that a local phase changes."""

    @property
    def x(self) -> Tensor:
        """The flat parameters `[P]`; the loop also writes to them in place."""
        ...

    @property
    def layout(self) -> Layout:
        """The position of each tensor in `x`."""
        ...

    @property
    def local_steps(self) -> int:
        """Inner steps of a local phase."""
        ...

    def local_phase(self, round: int) -> Report:
        """Takes the inner steps of this worker's phase number `round` on x."""
        ...


Begins = Callable[[int, int], None]
"""Called with a worker and the number of the phase it begins; until that phase ends, no other code changes its parameters."""


class LoopOptions(NamedTuple):
    """The options that every loop has."""

    absences: Sequence[Absence] = ()
    codec: Codec | None = None
    """The codec of messages; None sends them as they are."""
    seed: int = 0
    """The seed of all random draws of the loop and its codec."""
    budget: float = math.inf
    """Inner steps of all workers together, after which no local phase begins."""
    begins: Begins = lambda worker, number: None
    """Called when a local phase begins, so that a driver may start to compute it."""

    def transmit(
        self,
        message: Tree,
        layout: Layout,
        worker: int,
        number: int,
        fragment: int = 0,
        *,
        on: torch.device | None = None,
    ) -> tuple[Tree, int]:
        """The decoded message of a worker after its phase `number`, and the bytes of its payload.

        Args: `layout` is that of the fragment; `on` the device that decodes it, that of the message by default.
        Raises: TrainingError, naming the worker, for a message that is not finite, as sent or as decoded.
        """
        name = f"the message of worker {worker} in its phase {number}"
        must_be_finite({name: message})
        codec = fitted(self.codec or EXACT, layout)
        decoded, size = round_trip(codec, message, self.seed, worker, number, fragment, on=on)
        if decoded is not message:
            must_be_finite({f"{name}, decoded,": decoded})
        return decoded, size


DEFAULTS = LoopOptions()


class Budget:
    """Inner steps of all workers together, after which no local phase begins."""

    def __init__(self, steps: float = math.inf) -> None:
        self.steps, self.begun = steps, 0

    def claim(self, steps: int) -> bool:
        """Claims a phase of this many steps; returns False if the budget is spent."""
        if self.begun >= self.steps:
            return False
        self.begun += steps
        return True

    def give_back(self, steps: int) -> None:
        """Returns the steps of a phase that was lost, so that another worker can take them."""
        self.begun -= steps


class PhaseEnd(NamedTuple):
    """An event: a worker's local phase ends, unless the worker has left since."""

    worker: int
    epoch: int
    start_s: float


class PhasesState(NamedTuple):
    """The part of a checkpoint for the local phases of all workers."""

    present: list[bool]
    epoch: list[int]
    trains: list[bool]
    ended: list[int]
    begun: int


class Phases:
    """When each worker trains over virtual time. A worker that leaves loses its current phase and returns its steps.

    Args:
        ended: called at the end of a phase with its worker, number and start; a phase that was lost has no end.
        changed: called when a worker has left or returned.
    Raises: ConfigError for absences that contradict each other.
    """

    def __init__(
        self,
        agenda: EventQueue,
        durations: Durations,
        learners: Sequence[Learner],
        options: LoopOptions,
        ended: Callable[[int, int, float], list[Record]],
        changed: Callable[[Absence], list[Record]],
    ) -> None:
        self._queue, self._durations, self._learners = agenda, durations, learners
        self._begins, self._ended, self._changed = options.begins, ended, changed
        self._budget = Budget(options.budget)
        self.present = [True] * len(learners)
        self.epoch = [0] * len(learners)
        """Changes of presence of each worker; an event planned for it in an earlier epoch is void."""
        self.trains = [False] * len(learners)
        self.count = [0] * len(learners)
        """Phases of each worker that have ended."""
        for absence in ordered(options.absences, len(learners)):
            agenda.plan(absence.time_s, ABSENCE, absence.worker, absence)

    def begin(self, worker: int) -> None:
        """Begins the worker's next phase, unless the budget is spent."""
        steps, number, start_s = self._learners[worker].local_steps, self.count[worker], self._queue.time_s
        self.trains[worker] = self._budget.claim(steps)
        if self.trains[worker]:
            end_s = start_s + self._durations.phase_s(worker, number, steps)
            self._queue.plan(end_s, PHASE, worker, PhaseEnd(worker, self.epoch[worker], start_s))
            self._begins(worker, number)

    def perform(self, event: PhaseEnd | Absence) -> list[Record]:
        """Executes an event of a phase or a presence."""
        return self._change(event) if isinstance(event, Absence) else self._end(*event)

    def state(self) -> PhasesState:
        """The presence and progress of all workers."""
        return PhasesState(self.present, self.epoch, self.trains, self.count, self._budget.begun)

    def restore(self, state: PhasesState) -> None:
        """Continues from a state. Raises ValueError when it is of another number of workers."""
        if any(len(each) != len(self._learners) for each in state[:4]):
            raise ValueError(f"{len(state.present)} workers for {len(self._learners)}")
        self.present, self.epoch, self.trains, self.count, self._budget.begun = state

    def _end(self, worker: int, epoch: int, start_s: float) -> list[Record]:
        if epoch != self.epoch[worker]:
            return []
        number, self.trains[worker] = self.count[worker], False
        self.count[worker] += 1
        return self._ended(worker, number, start_s)

    def _change(self, absence: Absence) -> list[Record]:
        worker = absence.worker
        self.present[worker], self.epoch[worker] = absence.change == "return", self.epoch[worker] + 1
        if self.trains[worker]:
            self._budget.give_back(self._learners[worker].local_steps)
            self.trains[worker] = False
        return [absence, *self._changed(absence)]


def ordered(absences: Sequence[Absence], workers: int) -> list[Absence]:
    """Absences in the order in which they happen. Raises ConfigError for those that contradict each other."""
    present = [True] * workers
    by_time = sorted(absences, key=lambda absence: (absence.time_s, absence.worker))
    for absence in by_time:
        if not 0 <= absence.worker < workers or absence.time_s < 0:
            raise ConfigError(
                f"{absence} is outside the run; give a worker from 0 to {workers - 1} and a time from 0 seconds on"
            )
        if present[absence.worker] != (absence.change == "leave"):
            state = "present" if present[absence.worker] else "away"
            raise ConfigError(
                f"worker {absence.worker} is to {absence.change} at {absence.time_s} s but is {state} then; "
                "alternate leave and return, leave first"
            )
        present[absence.worker] = absence.change == "return"
    return by_time
