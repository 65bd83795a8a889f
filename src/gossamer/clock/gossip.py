"""Gossip rules without any waiting: everyone mixes with what its peers published last."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from gossamer.clock.agenda import (
    DECISION,
    PHASE,
    Absence,
    Agenda,
    Begins,
    Budget,
    Learner,
    Links,
    Phase,
    Record,
    Transfer,
    plan_absences,
)
from gossamer.codecs import Codec, exact
from gossamer.codecs.message import round_trip
from gossamer.errors import ConfigError, PairingError
from gossamer.network.links import Network
from gossamer.rounds.exchange import initial_state, own_message
from gossamer.rounds.kernel import Messages, outer_update
from gossamer.rounds.pairing import check
from gossamer.rules import Context, Rule
from gossamer.topologies import Topology
from gossamer.topologies.mixing import Mixing, pull
from gossamer.tree import Tree

__all__ = ["GossipRun"]


class GossipRun:
    """A gossip rule without any waiting: workers mix with what their peers published last.

    At the end of its k-th local phase a worker publishes its message and mixes it with the newest ones that can have reached it
    by then of those it hears in round k of the topology: GASLoC and its kin, asynchronous, with not a letter of the rule changed.

    With equal clocks and free links it is the synchronous rule, to the last bit. Consensus is a fixed point at any pace, and
    without momentum a still worker never leaves the convex hull of what was published.

    Args:
        rule: one that hears a `pull` on any connected graph, such as `gasloc()`.
        learners: each starts from its own parameters, which everyone else knows from the start.
        network: links between workers, and seconds of an inner step.
        codec: what is published goes through it, drawing from `seed`; its publisher, too, mixes with what comes out.
        budget: inner steps of all workers together; the run ends with the last local phase.
        begins: called when a local phase begins; `models` shows parameters that are trained meanwhile.
    Raises: PairingError for a rule that does not gossip, or that acts on gradients; ConfigError for a network that does not fit.
    Cost: a worker's messages of the longest transfer; one model per peer and phase on the wire.
    Differs (from the synchronous rule): the mean of the workers is *not* kept. Reading is one-sided: a fast worker moves towards
        a slow one many times while that one moves once, so slow workers weigh more in the mean, and steps by the fast ones are
        pulled back. Messages are late by the transfer, and by up to a phase of the peer.
    Fails when: momentum is near the stable limit of the synchronous rule, as lateness lowers that limit: 8 workers in random
        pairs with momentum 0.8 agree in step, and diverge on messages one round old. Also when fast and slow workers have
        different data, as the point they agree on favours the slow.
    """

    def __init__(
        self, rule: Rule, topology: Topology, learners: Sequence[Learner], network: Network, *,
        absences: Sequence[Absence] = (), codec: Codec | None = None, seed: int = 0, budget: float = math.inf,
        begins: Begins = lambda worker, number: None,
    ) -> None:  # fmt: skip
        if rule.hear is not pull or rule.needs != "connected" or rule.site != "parameters":
            raise PairingError(
                f"rule '{rule.name}' cannot run without waiting: it needs messages of one round from others, and here each "
                "worker has its own; take a rule that gossips on parameters, such as 'gasloc', or one of the servers"
            )
        if topology.n != len(learners):
            raise ConfigError(
                f"the topology has {topology.n} workers and there are {len(learners)} learners; give one learner for each"
            )
        self._codec, self._seed, self._budget = codec or exact(), seed, Budget(budget)
        check(rule, topology, self._codec)
        self.rule, self.topology, self.learners = rule, topology, learners
        self._links, self._begins = Links(network, len(learners)), begins
        self._agenda = Agenda()
        self._alive, self._epoch, self._phases = set(range(len(learners))), [0] * len(learners), [0] * len(learners)
        self._trains = [False] * len(learners)
        first = topology.mixing(0)
        self._states = [
            initial_state(rule, first, learner.x, self._context(i, first)) for i, learner in enumerate(learners)
        ]
        self._bytes = self._message(0, first)[1]
        self._published = [[(-math.inf, self._send(i, first))] for i in range(len(learners))]
        pairs = itertools.permutations(range(len(learners)), 2)
        self._slowest_s = max((self._links.transfer_s(j, i, self._bytes) for j, i in pairs), default=0.0)
        plan_absences(self._agenda, absences, len(learners), self._change)
        for i in range(len(learners)):
            self._begin_phase(i)

    @property
    def time_s(self) -> float:
        """The virtual time."""
        return self._agenda.time_s

    def models(self) -> list[Tensor]:
        """The parameters `[P]` of each worker: views of the learners' own."""
        return [learner.x for learner in self.learners]

    def states(self) -> list[Tree]:
        """The rule's state of each worker."""
        return list(self._states)

    def run(self, until_s: float = math.inf) -> Iterator[Record]:
        """What happens up to a virtual time, as it happens; may be stopped anywhere and called again."""
        return self._agenda.run(until_s)

    def _context(self, i: int, mixing: Mixing) -> Context:
        learner = self.learners[i]
        return Context(i, mixing.n, self._phases[i], learner.local_steps, mixing.weight(i), learner.layout)

    def _send(self, i: int, mixing: Mixing) -> Tree:
        return own_message(self.rule, self.learners[i].x, self._states[i], self._context(i, mixing))

    def _message(self, i: int, mixing: Mixing) -> tuple[Tree, int]:
        return round_trip(self._codec, self._send(i, mixing), self._seed, i, self._phases[i], 0)

    def _begin_phase(self, i: int) -> None:
        steps = self.learners[i].local_steps
        self._trains[i] = self._budget.claim(steps)
        if self._trains[i]:
            end_s = self.time_s + self._links.phase_s(i, self._phases[i], steps)
            self._agenda.plan(end_s, PHASE, i, partial(self._publish, i, self._epoch[i], self.time_s))
            self._begins(i, self._phases[i])

    def _publish(self, i: int, epoch: int, start_s: float) -> list[Record]:
        if epoch != self._epoch[i]:
            return []
        self._trains[i] = False
        report = self.learners[i].local_phase(self._phases[i])
        mixing = self.topology.mixing(self._phases[i], frozenset(self._alive))
        message, mine = self._message(i, mixing)[0], self._published[i]
        mine.append((self.time_s, message))
        oldest_of_use = bisect_right(mine, self.time_s - self._slowest_s, key=lambda version: version[0]) - 1
        del mine[:oldest_of_use]
        self._agenda.plan(self.time_s, DECISION, i, partial(self._mix, i, message, mixing))
        return [Phase(start_s, self.time_s, i, self._phases[i], report)]

    def _mix(self, i: int, own: Tree, mixing: Mixing) -> list[Record]:
        received, records = [], []
        for j in mixing.hears_from(i):
            size = self._bytes
            takes_s = self._links.transfer_s(j, i, size)
            left_s = self.time_s - takes_s
            newest = bisect_right(self._published[j], left_s, key=lambda version: version[0]) - 1
            published_s, message = self._published[j][newest]
            received.append(message)
            if published_s > -math.inf:
                records.append(Transfer("fetch", left_s, self.time_s, j, i, 0, size))
        messages = Messages(own, tuple(received), i, mixing.rows[i])
        x, s = self.learners[i].x, self._states[i]
        outer_update(self.rule, self.rule.hear, x, s, messages, self._context(i, mixing))
        self._phases[i] += 1
        self._begin_phase(i)
        return records

    def _change(self, absence: Absence) -> list[Record]:
        i = absence.worker
        self._epoch[i] += 1
        if self._trains[i]:
            self._budget.give_back(self.learners[i].local_steps)
            self._trains[i] = False
        if absence.change == "return":
            self._alive.add(i)
            self._begin_phase(i)
        else:
            self._alive.discard(i)
        return [absence]
