"""What runs in rounds: a rule settled for its topology, with its codec and schedule."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gossamer.codecs import Codec
from gossamer.rounds import stability
from gossamer.rounds.compatibility import lossy_codecs as coding
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.incompatibilities import check
from gossamer.rounds.kernel import PLAIN, Kernel, compiled
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.updates import topology_of_updates
from gossamer.rules import Rule, weighted
from gossamer.rules.contract import Needs
from gossamer.topologies import Topology

FITTING: Mapping[Needs, str] = {
    "everyone": "complete",
    "connected": "random",
    "static": "ring",
    "tree": "tree",
    "push": "random_push",
}
"""The default topology of a rule."""


class Method(NamedTuple):
    """What is trained with: the settled rule, its topology and codec, when it acts, and how the update is carried out."""

    rule: Rule
    topology: Topology
    codec: Codec
    schedule: Schedule
    kernel: Kernel
    holders: tuple[frozenset[int], ...] = ()
    """The workers that hold each part of the parameters, where some hold some of the experts only."""

    @property
    def parts(self) -> int:
        """In how many parts the parameters are exchanged."""
        return len(self.holders) or self.schedule.fragments

    @property
    def sends_per_round(self) -> int:
        """How often a worker sends in a round, each of which is an entry of the trace."""
        return self.schedule.slots * (2 if self.rule.mixes_updates else 1)

    @property
    def exchanges_once(self) -> bool:
        """Whether a round has one exchange, which ends with it."""
        schedule = self.schedule
        several = schedule.fragments > 1 or schedule.inner_every or self.rule.mixes_updates
        return not (several or schedule.overlap_steps or self.rule.delay_rounds)

    def topology_of(self, seed: int) -> Callable[[int], Topology]:
        """The topology that the exchanges of each fragment follow, numbered as in `gossamer.rounds.loop`."""
        updates = topology_of_updates(self.rule, self.topology.n, seed)
        first = self.schedule.fragments + len(self.schedule.inner_every)
        return lambda fragment: self.topology if updates is None or fragment < first else updates


def settled_rule(c: Combination) -> Rule:
    """The rule as it will run: `alpha = "auto"` found for the topology, and drifts weighted by local steps if asked for.

    Raises: ConfigError for a rule that cannot be weighted, or that mixes updates where that is not possible.
    """
    rule, topology = c.rule, c.topology
    topology_of_updates(rule, topology.n, seed=0)
    if topology.doubly_stochastic:  # on any other, the rule is refused by the table
        rule = stability.resolve_alpha(rule, topology)
    return weighted(rule) if c.weigh_steps else rule


def warnings_of(c: Combination) -> tuple[str, ...]:
    """A sentence for everything that will probably go wrong, once the rule is settled."""
    unstable = None if c.kind == "pair" else stability.stability_warning(c.rule, c.topology, c.schedule.merge)
    return tuple(sentence for sentence in (unstable, coding.lossy_warning(c)) if sentence is not None)


def method_of(c: Combination, *, compile: bool = False) -> Method:
    """What runs in rounds, once the rule is settled (`settled_rule`). Raises PairingError when something cannot work."""
    check(c)
    kernel = compiled() if compile else PLAIN
    return Method(c.rule, c.topology, c.codec, c.schedule, kernel, c.holders)
