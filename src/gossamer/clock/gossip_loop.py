"""Asynchronous gossip: workers mix with the latest messages of their peers and never wait."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.clock.durations import Durations
from gossamer.clock.event_queue import DECISION, EventQueue, EventQueueState, VirtualTimeLoop
from gossamer.clock.events import Absence, Phase, Record, Transfer
from gossamer.clock.gossip_worker import GossipWorker
from gossamer.clock.phases import DEFAULTS, Learner, LoopOptions, PhaseEnd, Phases, PhasesState
from gossamer.clock.saved import as_dicts, rebuilt, within
from gossamer.codecs import exact
from gossamer.network.links import Network
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.incompatibilities import check
from gossamer.rules import Rule
from gossamer.topologies import Topology
from gossamer.tree import Tree, leaves, must_fit, refill


class _Mix(NamedTuple):
    """An event: a worker mixes its new message with the messages received from the peers that were present."""

    worker: int
    number: int
    present: list[int]


class _GossipState(NamedTuple):
    """The part of a checkpoint for this loop; `published` has times and the tensors of messages, for each worker."""

    agenda: EventQueueState
    phases: PhasesState
    states: list[list[Tensor]]
    published: list[list[tuple[float, list[Tensor]]]]


class GossipRun(VirtualTimeLoop):
    """Runs a gossip rule asynchronously: workers mix with the latest messages of their peers and never wait.

    At the end of its k-th local phase a worker publishes its message. It then mixes it with the newest messages that have
    reached it from its peers in round k of the topology. The rule itself, such as GASLoC, is unchanged.

    With equal clocks and free links this is the synchronous rule, to the last bit. Consensus is a fixed point at any speed, and
    without momentum a worker without drift never leaves the convex hull of the published messages.

    Args:
        rule: one that combines messages by a `pull` on any connected graph, such as `gasloc()`.
        learners: each starts from its own parameters, which all others know from the start.
        network: links between workers, and seconds of an inner step.
        options: absences, budget and so on; the publisher of a message also mixes with the decoded one. The run ends with the
            last local phase. `models` returns parameters that may be in training.
    Raises: PairingError for a rule that does not gossip, or that acts on gradients; ConfigError for a network that does not fit.
    Cost: the messages a worker published during the longest transfer; one model per peer and phase on the wire.
    Differs (from the synchronous rule): the mean of the workers is *not* kept. Mixing is one-sided: a fast worker moves towards
        a slow one many times while the slow one moves once, so slow workers weigh more in the mean, and the steps of fast ones
        are pulled back. Messages are stale by the transfer, and by up to a phase of the peer.
    Fails when: momentum is near the stable limit of the synchronous rule, as staleness lowers that limit: 8 workers in random
        pairs with momentum 0.8 reach consensus synchronously, and diverge on messages one round old. Also when fast and slow
        workers have different data, as their consensus favours the slow.
    """

    def __init__(
        self,
        rule: Rule,
        topology: Topology,
        learners: Sequence[Learner],
        network: Network,
        options: LoopOptions = DEFAULTS,
    ) -> None:
        codec = options.codec or exact()
        check(Combination(kind="no waiting", workers=len(learners), rule=rule, topology=topology, codec=codec))
        self.rule, self.topology, self.learners = rule, topology, learners
        self._options, self._queue = options, EventQueue(self._perform)
        self._durations = Durations(network, len(learners))
        self._phases = Phases(self._queue, self._durations, learners, options, self._publish, self._change)
        first = topology.mixing(0)
        self._workers = [GossipWorker(i, rule, learner, first) for i, learner in enumerate(learners)]
        self._bytes = options.transmit(self._workers[0].message(0, first), learners[0].layout, 0, 0)[1]
        self._published = [[(-math.inf, worker.message(0, first))] for worker in self._workers]
        pairs = itertools.permutations(range(len(learners)), 2)
        self._slowest_s = max((self._durations.transfer_s(j, i, self._bytes) for j, i in pairs), default=0.0)
        for i in range(len(learners)):
            self._phases.begin(i)

    def models(self) -> list[Tensor]:
        """The parameters `[P]` of each worker: views of the learners' own."""
        return [learner.x for learner in self.learners]

    def states(self) -> list[Tree]:
        """The rule's state of each worker."""
        return [worker.s for worker in self._workers]

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint for this loop; the learners have separate parts."""
        published = [[(time_s, leaves(message)) for time_s, message in versions] for versions in self._published]
        states = [leaves(worker.s) for worker in self._workers]
        return as_dicts(_GossipState(self._queue.state(), self._phases.state(), states, published))

    def restore(self, state: Any) -> None:
        """Continues from a state, before the learners are restored. Raises ValueError when it does not fit."""
        saved, n = rebuilt(_GossipState, state), len(self.learners)
        if (len(saved.states), len(saved.published)) != (n, n) or not all(saved.published):
            raise ValueError(f"{len(saved.states)} states and {len(saved.published)} messages for {n} workers")
        for i, worker in enumerate(self._workers):
            _, like = self._published[i][0]
            must_fit(saved.states[i], leaves(worker.s))
            for _, message in saved.published[i]:
                must_fit(message, leaves(like))
            worker.s = refill(worker.s, saved.states[i])
            self._published[i] = [(time_s, refill(like, message)) for time_s, message in saved.published[i]]
        self._phases.restore(saved.phases)
        events = self._queue.restore(saved.agenda, (PhaseEnd, Absence, _Mix))
        within(events, worker=n)
        if not all(0 <= j < n for event in events if isinstance(event, _Mix) for j in event.present):
            raise ValueError(f"a worker beyond {n} was present")

    def _perform(self, event: PhaseEnd | Absence | _Mix) -> list[Record]:
        return self._mix(*event) if isinstance(event, _Mix) else self._phases.perform(event)

    def _publish(self, i: int, number: int, start_s: float) -> list[Record]:
        report = self.learners[i].local_phase(number)
        present = [j for j, present in enumerate(self._phases.present) if present]
        mixing = self.topology.mixing(number, frozenset(present))
        sent, versions = self._workers[i].message(number, mixing), self._published[i]
        message, _ = self._options.transmit(sent, self.learners[i].layout, i, number)
        versions.append((self.time_s, message))
        oldest_of_use = bisect_right(versions, self.time_s - self._slowest_s, key=lambda version: version[0]) - 1
        del versions[:oldest_of_use]
        self._queue.plan(self.time_s, DECISION, i, _Mix(i, number, present))
        return [Phase(start_s, self.time_s, i, number, report)]

    def _mix(self, i: int, number: int, present: Sequence[int]) -> list[Record]:
        mixing, sent = self.topology.mixing(number, frozenset(present)), self._published[i][-1][1]
        received, records = dict[int, Tree](), list[Record]()
        for j in mixing.receives_from(i):
            left_s = self.time_s - self._durations.transfer_s(j, i, self._bytes)
            newest = bisect_right(self._published[j], left_s, key=lambda version: version[0]) - 1
            published_s, message = self._published[j][newest]
            received[j] = message
            if published_s > -math.inf:
                records.append(Transfer("fetch", left_s, self.time_s, j, i, 0, self._bytes))
        self._workers[i].mix(number, sent, received, mixing)
        self._phases.begin(i)
        return records

    def _change(self, absence: Absence) -> list[Record]:
        if absence.change == "return":
            self._phases.begin(absence.worker)
        return []
