"""The method of a run in rounds: a rule settled for its topology, with its codec and schedule."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gossamer.codecs import Codec, exact
from gossamer.errors import ConfigError, PairingError
from gossamer.rounds import stability
from gossamer.rounds.compatibility import lossy_codecs as coding
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.incompatibilities import check
from gossamer.rounds.compatibility.modes import exchanges_once, is_equal_after_rounds
from gossamer.rounds.kernel import PLAIN, Kernel, compiled
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.updates import topology_of_updates
from gossamer.rules import Rule, data_parallel, weighted
from gossamer.rules.contract import Needs
from gossamer.settings import over_time
from gossamer.topologies import Topology, complete

FITTING: Mapping[Needs, str] = {
    "everyone": "complete",
    "connected": "random",
    "static": "ring",
    "tree": "tree",
    "push": "random_push",
}
"""The default topology of a rule."""


class Method(NamedTuple):
    """A method: the settled rule, its topology, codec and schedule, and the implementation of its update."""

    rule: Rule
    topology: Topology
    codec: Codec
    schedule: Schedule
    kernel: Kernel
    holders: tuple[frozenset[int], ...] = ()
    """The workers that hold each part of the parameters, where some hold some of the experts only."""
    start: "Method | None" = None
    """The data parallelism of a synchronous start, after which this method begins; None for a run without one."""

    @property
    def parts(self) -> int:
        """The number of parts in which the parameters are exchanged."""
        return len(self.holders) or self.schedule.fragments

    @property
    def sends_per_round(self) -> int:
        """The number of sends of a worker in a round, each of which is an entry of the trace."""
        return self.schedule.slots * (2 if self.rule.mixes_updates else 1)

    @property
    def exchanges_once(self) -> bool:
        """Whether a round has one exchange, which ends with it."""
        return exchanges_once(self.rule, self.schedule)

    @property
    def equal_after_rounds(self) -> bool:
        """Whether parameters and outer state of all workers are equal after a round of a mean over everyone.

        Else workers differ by what is in flight, by their own errors or by their experts. A lossy codec changes nothing: all
        decode the same messages, and the same sums on the way back (ADR 18).
        """
        return is_equal_after_rounds(self.rule) and self.exchanges_once and not self.holders

    def topology_of(self, seed: int) -> Callable[[int], Topology]:
        """The topology that the exchanges of each fragment follow, numbered as in `gossamer.rounds.loop`."""
        updates = topology_of_updates(self.rule, self.topology.n, seed)
        first = self.schedule.fragments + len(self.schedule.inner_every)
        return lambda fragment: self.topology if updates is None or fragment < first else updates


def settled_rule(c: Combination) -> Rule:
    """The rule as it will run: `alpha = "auto"` resolved for the topology, and drifts weighted by local steps if
    requested.

    Raises: ConfigError for a rule that cannot be weighted, or that mixes updates where that is not possible.
    """
    rule, topology = c.rule, c.topology
    topology_of_updates(rule, topology.n, seed=0)
    if topology.doubly_stochastic:  # on any other, the rule is refused by the table
        rule = stability.resolve_alpha(rule, topology)
    if rule.at is not None:
        _must_keep_its_state(c)
    return weighted(rule) if c.weigh_steps else rule


def _must_keep_its_state(c: Combination) -> None:
    """Raises ConfigError for a rule whose state depends on a scheduled option, a shape without a known length, or a
    table beyond the end of the run.
    """
    if c.rule.at is not None and not c.steps:
        c.rule.at(1, 0)
    for option, value in c.rule.options.items() if c.steps else ():
        if over_time.changes(value):
            for sentence in over_time.beyond_faults(f"rule.{option}", value, c.steps):
                raise ConfigError(sentence)
    states = {(rule.state_copies, rule.start is None, rule.reset is None): rule for _, rule in c.rules}
    if len(states) > 1:
        one, other, *_ = states.values()
        raise ConfigError(
            f"rule '{c.rule.name}' changes over the run from {dict(one.options)} to {dict(other.options)}, with which it keeps "
            "another state, as with lr = 1; use a number beside it, such as 0.999"
        )


def warnings_of(c: Combination) -> tuple[str, ...]:
    """Warnings for a settled combination, a sentence each."""
    unstable = None
    if c.kind != "pair":
        step, rule = stability.least_stable(c.rules, c.topology, c.schedule.merge)
        unstable = stability.stability_warning(rule, c.topology, c.schedule.merge)
        if unstable is not None and c.rule.at is not None:
            unstable = f"at inner step {step}, {unstable}"
    return tuple(one for one in (unstable, coding.lossy_warning(c), _audit_warning(c)) if one is not None)


def _audit_warning(c: Combination) -> str | None:
    """A warning of hashes that `gossamer audit` will not compare."""
    real = c.driver == "train"
    given = {
        "run.adapt": bool(c.adapt),
        "run.batched": c.batched > 1,
        "run.reduction": real and c.reduction != "ordered",
    }
    if not c.hashes or not (some := [key for key, on in given.items() if on]):
        return None
    return (
        f"record.hash is true, and gossamer audit cannot compute a run with {some[0]} again, so that the hashes serve nothing; "
        f"remove {some[0]} or record.hash"
    )


def method_of(c: Combination, *, compile: bool = False) -> Method:
    """The method of a run in rounds, for a settled rule (`settled_rule`). Raises PairingError when something cannot work."""
    check(c)
    if compile and c.rule.at is not None:
        raise PairingError(
            f"run.compile is true and numbers of rule '{c.rule.name}' change over the run, which would be compiled for each; set "
            "it to false"
        )
    kernel = compiled() if compile else PLAIN
    start = None
    if c.synchronous_steps:
        start = Method(data_parallel(), complete(c.topology.n), exact(), Schedule(), kernel)
    return Method(c.rule, c.topology, c.codec, c.schedule, kernel, c.holders, start)
