"""Workers that train independently, and meet in pairs at random times."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.asynchronous import PairRule, Rates, conditions
from gossamer.clock.durations import Durations
from gossamer.clock.event_queue import DECISION, REPLY, EventQueue, EventQueueState, VirtualTimeLoop
from gossamer.clock.events import Absence, Phase, Record, Transfer
from gossamer.clock.pair_worker import PairWorker
from gossamer.clock.phases import DEFAULTS, Learner, LoopOptions, PhaseEnd, Phases, PhasesState
from gossamer.clock.saved import as_dicts, rebuilt, tensors_of, within
from gossamer.errors import ConfigError
from gossamer.network.links import Network
from gossamer.rng import numpy_rng
from gossamer.tree import Tree, leaves, must_fit, refill


@dataclass
class _Peer:
    """A worker at time_s."""

    worker: PairWorker
    time_s: float = 0.0
    meets: int | None = None  # the number of the meeting it is in


class _Begin(NamedTuple):
    """An event: two workers begin to meet, if both are here and free."""

    worker: int
    other: int


class _Meet(NamedTuple):
    """An event: the messages of a meeting have arrived, which takes place if both ends are still in it."""

    number: int
    worker: int
    other: int
    sent: tuple[Tensor, Tensor]
    bytes: int
    start_s: float


class _PeerState(NamedTuple):
    """A `_Peer`, with the tensors of the rule's state."""

    x: Tensor
    s: list[Tensor]
    start: Tensor
    time_s: float
    meets: int | None


class _PairState(NamedTuple):
    """The part of a checkpoint for this loop."""

    agenda: EventQueueState
    phases: PhasesState
    peers: list[_PeerState]
    rng: dict[str, Any]
    meetings: int
    planned: bool


class PairRun(VirtualTimeLoop):
    """Workers that train independently, and meet in pairs at random times.

    Each pair of `rates` meets as an independent Poisson process. Both ends send their message when the meeting begins, and the
    meeting acts on both when both messages have arrived, or on neither if one leaves meanwhile. A worker is in one meeting at a
    time; a meeting does not take place if one end is busy or absent. A local phase starts from the worker's current parameters,
    and its drift is added when it ends, so training never waits for a meeting, nor a meeting for training.

    A worker that leaves loses its current phase, and continues from its own parameters when it returns.

    Args:
        learners: each starts from its own parameters; local phases update its `x` in place.
        network: links between workers, and seconds of an inner step.
        rates: meetings per second of each pair, such as `meeting_rates(mixing, 1.0)`; a rule whose options are "auto" computes
            them from these.
        options: absences, budget and so on; both ends of a meeting act on decoded messages. The run ends with the last local
            phase.
    Raises: ConfigError for pairs that are not workers and rates that are not above zero.
    Cost: two vectors per worker in addition to its model, and the rule's state.
    """

    def __init__(
        self,
        rule: PairRule,
        learners: Sequence[Learner],
        network: Network,
        rates: Rates,
        options: LoopOptions = DEFAULTS,
    ) -> None:
        for (i, j), rate in rates.items():
            if not 0 <= i < j < len(learners) or not 0 < rate < math.inf:
                raise ConfigError(
                    f"the pair ({i}, {j}) meets {rate} times a second; pairs are (i, j) with i < j of {len(learners)} workers, "
                    "and meet at a finite rate above 0: remove pairs that never meet from the rates"
                )
        if rule.settle is not None:
            rule = rule.settle(*conditions(len(learners), rates))
        self.rule, self.learners = rule, learners
        self._options, self._queue = options, EventQueue(self._perform)
        self._durations = Durations(network, len(learners))
        self._phases = Phases(self._queue, self._durations, learners, options, self._end_phase, self._change)
        self._pairs = sorted(rates)
        self._edges = list(itertools.accumulate(rates[pair] for pair in self._pairs))
        self._rng = numpy_rng(options.seed, "meetings")
        self._meetings = 0
        self._meeting_planned = False
        self._peers = [_Peer(PairWorker(rule, learner)) for learner in learners]
        for i in range(len(learners)):
            self._begin_phase(i)
        self._plan_meeting()

    def models(self) -> list[Tensor]:
        """The parameters `[P]` of each worker, all at the current virtual time."""
        return [x for x, _ in self._at_current_time()]

    def states(self) -> list[Tree]:
        """The rule's state of each worker, all at the current virtual time."""
        return [s for _, s in self._at_current_time()]

    def _at_current_time(self) -> list[tuple[Tensor, Tree]]:
        now_s = self.time_s
        return [self.rule.advance(peer.worker.x, peer.worker.s, now_s - peer.time_s) for peer in self._peers]

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint for this loop; the learners have separate parts."""
        peers = [
            _PeerState(peer.worker.x, leaves(peer.worker.s), peer.worker.start, peer.time_s, peer.meets)
            for peer in self._peers
        ]
        agenda, phases, rng = self._queue.state(), self._phases.state(), dict(self._rng.bit_generator.state)
        return as_dicts(_PairState(agenda, phases, peers, rng, self._meetings, self._meeting_planned))

    def restore(self, state: Any) -> None:
        """Continues from a state. Raises ValueError, TypeError or KeyError when it does not fit."""
        saved, n = rebuilt(_PairState, state), len(self.learners)
        for peer, saved_peer in zip(self._peers, saved.peers, strict=True):
            worker = peer.worker
            must_fit([saved_peer.x, saved_peer.start, *saved_peer.s], [worker.x, worker.start, *leaves(worker.s)])
        for peer, (x, s, start, at_s, meets) in zip(self._peers, saved.peers, strict=True):
            worker = peer.worker
            worker.x, worker.s, worker.start = x, refill(worker.s, s), start
            peer.time_s, peer.meets = at_s, meets
        self._rng.bit_generator.state = saved.rng
        self._meetings, self._meeting_planned = saved.meetings, saved.planned
        self._phases.restore(saved.phases)
        events = self._queue.restore(saved.agenda, (PhaseEnd, Absence, _Begin, _Meet))
        within(events, worker=n, other=n)
        for tensor in tensors_of(events):
            must_fit([tensor], [self._peers[0].worker.x])

    def _perform(self, event: PhaseEnd | Absence | _Begin | _Meet) -> list[Record]:
        match event:
            case _Begin():
                return self._begin_meeting(*event)
            case _Meet():
                return self._meet(*event)
            case _:
                return self._phases.perform(event)

    def _now(self, i: int) -> PairWorker:
        """The worker, advanced to the current virtual time."""
        peer = self._peers[i]
        peer.worker.advance(self.time_s - peer.time_s)
        peer.time_s = self.time_s
        return peer.worker

    def _begin_phase(self, i: int) -> None:
        self._now(i).begin()
        self._phases.begin(i)

    def _end_phase(self, i: int, number: int, start_s: float) -> list[Record]:
        worker = self._now(i)
        report = self.learners[i].local_phase(number)
        worker.learn()
        self._begin_phase(i)
        return [Phase(start_s, self.time_s, i, number, report)]

    def _plan_meeting(self) -> None:
        self._meeting_planned = bool(self._pairs) and any(self._phases.trains)
        if not self._meeting_planned:
            return
        wait_s = self._rng.exponential(1 / self._edges[-1])
        place = bisect_right(self._edges, self._rng.random() * self._edges[-1])
        i, j = self._pairs[min(place, len(self._pairs) - 1)]
        self._queue.plan(self.time_s + wait_s, DECISION, i, _Begin(i, j))

    def _begin_meeting(self, i: int, j: int) -> list[Record]:
        self._plan_meeting()
        if all(self._phases.present[k] and self._peers[k].meets is None for k in (i, j)):
            number, self._meetings = self._meetings, self._meetings + 1
            sent, size = list[Tensor](), 0
            for k in (i, j):
                self._peers[k].meets = number
                message, size = self._options.transmit(self._now(k).tell(), self.learners[k].layout, k, number)
                sent.append(message)
            takes_s = max(self._durations.transfer_s(i, j, size), self._durations.transfer_s(j, i, size))
            meeting = _Meet(number, i, j, (sent[0], sent[1]), size, self.time_s)
            self._queue.plan(self.time_s + takes_s, REPLY, i, meeting)
        return []

    def _meet(
        self, number: int, i: int, j: int, sent: tuple[Tensor, Tensor], size: int, start_s: float
    ) -> list[Record]:
        if any(self._peers[k].meets != number for k in (i, j)):
            return []
        for k, message, other in ((i, sent[0], sent[1]), (j, sent[1], sent[0])):
            self._now(k).meet(message, other)
            self._peers[k].meets = None
        return [
            Transfer("meet", start_s, self.time_s, i, j, 0, size),
            Transfer("meet", start_s, self.time_s, j, i, 0, size),
        ]

    def _change(self, absence: Absence) -> list[Record]:
        self._now(absence.worker)
        peer = self._peers[absence.worker]
        if absence.change == "return":
            self._begin_phase(absence.worker)
            if not self._meeting_planned:
                self._plan_meeting()
        else:
            for other in self._peers:
                if other is not peer and peer.meets is not None and other.meets == peer.meets:
                    other.meets = None
            peer.meets = None
        return []
