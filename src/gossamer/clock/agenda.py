"""What all event loops share: the agenda of virtual time, seconds of steps and messages, and the records of what happened."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.network.links import Network, jitter_factors

__all__ = [
    "ABSENCE",
    "ARRIVAL",
    "DECISION",
    "PHASE",
    "REPLY",
    "SERVER",
    "Absence",
    "Action",
    "Agenda",
    "Begins",
    "Budget",
    "Learner",
    "Links",
    "Phase",
    "Record",
    "Report",
    "Transfer",
    "Update",
    "plan_absences",
]

SERVER = -1
"""The server's number where a worker's is expected."""

# What comes first of all that happens at one time. Phases end before any message arrives, so that with equal clocks and free
# links everyone's message of a round is there when the first is looked at.
ABSENCE, PHASE, ARRIVAL, DECISION, REPLY = range(5)


class Report(Protocol):
    """What a local phase tells of itself."""

    @property
    def tokens(self) -> int:
        """Tokens it trained on, at least one."""
        ...


class Learner(Protocol):
    """What the loops drive: `gossamer.run.worker.Worker`, or anything with a flat vector that a local phase moves."""

    @property
    def x(self) -> Tensor:
        """The flat parameters `[P]`; written to in place, by the loop as well."""
        ...

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in them."""
        ...

    @property
    def local_steps(self) -> int:
        """Inner steps of a local phase."""
        ...

    def local_phase(self, round: int) -> Report:
        """Moves x by the inner steps of this worker's phase number `round`."""
        ...


class Absence(NamedTuple):
    """A worker leaves or returns. What it was computing is lost; what it has sent still arrives."""

    time_s: float
    worker: int
    change: Literal["leave", "return"]


class Phase(NamedTuple):
    """A local phase that ended."""

    start_s: float
    end_s: float
    worker: int
    number: int
    """Which of the worker's phases it was, from 0."""
    report: Any
    """What `local_phase` returned."""


class Transfer(NamedTuple):
    """A message that arrived."""

    kind: Literal["push", "fetch", "meet"]
    start_s: float
    end_s: float
    source: int
    target: int
    fragment: int
    bytes: int


class Update(NamedTuple):
    """The server has absorbed what these workers sent."""

    time_s: float
    fragment: int
    workers: tuple[int, ...]
    ages: tuple[int, ...]


Record = Absence | Phase | Transfer | Update
Action = Callable[[], list[Record]]
Begins = Callable[[int, int], None]
"""Told of a worker and the number of the phase it begins; until that phase ends, nothing else touches its parameters."""


class Agenda:
    """What is to happen and when, and the virtual time."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._heap: list[tuple[float, int, int, int, Action]] = []
        self._serial = itertools.count()
        self._work = 0

    def plan(self, time_s: float, kind: int, worker: int, action: Action) -> None:
        """Lets `action` happen at a time, after what is of a smaller kind, or of a smaller worker, at the same time."""
        self._work += kind != ABSENCE
        heapq.heappush(self._heap, (time_s, kind, worker, next(self._serial), action))

    def run(self, until_s: float, stuck: Action | None = None) -> Iterator[Record]:
        """Everything up to and at `until_s`; `stuck` is asked when nothing is left but workers that come and go."""
        while True:
            if self._work == 0 and stuck is not None:
                yield from stuck()
            if not self._heap or self._heap[0][0] > until_s:
                break
            self.time_s, kind, _, _, action = heapq.heappop(self._heap)
            self._work -= kind != ABSENCE
            yield from action()  # an action is done before its records are seen, so a caller may stop anywhere
        if until_s < math.inf:
            self.time_s = max(self.time_s, until_s)


class Budget:
    """Inner steps of all workers together, after which nobody begins another local phase."""

    def __init__(self, steps: float = math.inf) -> None:
        self.steps, self.begun = steps, 0

    def claim(self, steps: int) -> bool:
        """Whether another phase of so many steps may begin; it is counted if so."""
        if self.begun >= self.steps:
            return False
        self.begun += steps
        return True

    def give_back(self, steps: int) -> None:
        """Lets somebody else take the steps of a phase that was lost."""
        self.begun -= steps


class Links:
    """Seconds of local phases and messages on a network."""

    def __init__(self, network: Network, workers: int) -> None:
        if network.sites or network.changes:
            raise ConfigError(
                f"the network has {len(network.sites)} sites and {len(network.changes)} changes, but here each worker has a link "
                "of its own that stays as it is; give uplink_bps, downlink_bps and latency_s per worker"
            )

        def spread(name: str) -> tuple[float, ...]:
            value = getattr(network, name)
            values = value if isinstance(value, tuple) else (value,) * workers
            if len(values) != workers or None in values:
                got = "not given" if None in values else f"a list of {len(values)}"
                raise ConfigError(f"network.{name} is {got} for {workers} workers; give one number, or one per worker")
            return values

        self._up, self._down = spread("uplink_bps"), spread("downlink_bps")
        self._latency, self.step_s = spread("latency_s"), spread("step_s")
        self._network, self._workers = network, workers
        if min(self.step_s) <= 0:
            raise ConfigError(f"network.step_s is {network.step_s}; an inner step must take more than 0 seconds here")

    def phase_s(self, worker: int, number: int, steps: int) -> float:
        """Seconds of a worker's phase of so many inner steps, with the jitter of its number."""
        seconds = steps * self.step_s[worker]
        if not self._network.jitter:
            return seconds
        return seconds * float(jitter_factors(self._network, number, self._workers)[worker])

    def transfer_s(self, source: int, target: int, size: int) -> float:
        """Seconds from leaving to arriving; the server's own link costs nothing."""
        ends = [i for i in (source, target) if i != SERVER]
        rate = min(
            math.inf if source == SERVER else self._up[source], math.inf if target == SERVER else self._down[target]
        )
        return max(self._latency[i] for i in ends) + 8 * size / rate


def plan_absences(
    agenda: Agenda, absences: Sequence[Absence], workers: int, change: Callable[[Absence], list[Record]]
) -> None:
    """Puts comings and goings on the agenda. Raises ConfigError for one that cannot be."""
    present = [True] * workers
    for absence in sorted(absences, key=lambda absence: (absence.time_s, absence.worker)):
        if not 0 <= absence.worker < workers or absence.time_s < 0:
            raise ConfigError(
                f"{absence} is outside of the run; workers are 0 to {workers - 1} and times from 0 seconds on"
            )
        if present[absence.worker] != (absence.change == "leave"):
            state = "there" if present[absence.worker] else "away"
            raise ConfigError(
                f"worker {absence.worker} is to {absence.change} at {absence.time_s} s but is {state} then; "
                "let leave and return take turns, leave first"
            )
        present[absence.worker] = absence.change == "return"
        agenda.plan(absence.time_s, ABSENCE, absence.worker, partial(change, absence))
