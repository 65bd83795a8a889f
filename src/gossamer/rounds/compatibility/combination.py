"""The combination of a run's parts that is checked before it starts, and the rows of the table of incompatibilities."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from gossamer.asynchronous import PairRule
from gossamer.codecs import Codec, exact
from gossamer.network.links import Network
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Rule, gossip
from gossamer.settings import over_time
from gossamer.settings.over_time import Steps, Timetable
from gossamer.topologies import Topology, complete

Kind = Literal["rounds", "server", "pair", "no waiting"]
"""The four ways in which a run communicates; all but the first are asynchronous."""
Driver = Literal["simulate", "train", "library"]
"""The driver: one process over declared networks, real processes, or a user's training loop."""


def rules_over_time(rule: Rule, steps: int) -> list[tuple[int, Rule]]:
    """A rule's variants at the inner steps of a run at which its options change; for a shape, at a sample of steps."""
    if (at := rule.at) is None:
        return [(0, rule)]
    changing = [value for value in rule.options.values() if over_time.changes(value)]
    steps_of_change = sorted({step for value in changing for step in over_time.change_steps(value, steps)})
    return [(step, at(step, steps)) for step in steps_of_change]


class Combination(NamedTuple):
    """The parts and settings of one run. A default stands for something unused or unknown, and fails no check."""

    kind: Kind = "rounds"
    driver: Driver = "simulate"
    workers: int | None = None
    """The number of workers, for a topology that was not made for the run."""
    wait: bool = True
    """As in `run.wait`."""
    rule: Rule = gossip()
    topology: Topology = complete(1)
    codec: Codec = exact()
    schedule: Schedule = Schedule()
    local_steps: Steps | None = None
    """One number for all workers, or one per worker; with a timetable, the initial ones."""
    synchronous_steps: int = 0
    """As in `run.synchronous_steps`; `local_steps` and `timetable` are those of the rounds after them."""
    steps: int = 0
    """As in `run.steps`; 0 where it is not known."""
    timetable: Timetable | None = None
    """The local steps of each round, where these change."""
    server: str = ""
    """Name of the server."""
    regions: bool = False
    """Whether there is a server in each region, below a global server."""
    pair: PairRule | None = None
    optimizer: str = "adamw"
    """As in `inner.optimizer`."""
    averaging: str | None = None
    """As in `inner.averaging`."""
    adapt: bool | str = False
    weigh_steps: bool = False
    elastic: bool = False
    """As in `run.elastic`."""
    store: bool = False
    """Whether its workers share a store alone, and come and go: `Outer(store=...)`, or `--store`."""
    peers: bool = False
    """Whether the run file has [peers], so that all connections are to be encrypted."""
    constant_batch: bool = False
    """As in `data.constant_batch`."""
    stages: int = 1
    """As in `pipeline.stages`."""
    shards: int = 1
    """Processes of each worker that hold one model: as in `Outer(mesh=...)`, and in a real run as in `run.shards`."""
    partly: bool = False
    """Whether `pipeline.workers` leaves some replicas whole."""
    scattered: bool = False
    """Whether a stage's tensors are non-contiguous in the flat layout."""
    lost: frozenset[bool] = frozenset()
    """For lost stages (`pipeline.lost`): whether each recovers from a peer (True) or from its neighbours (False)."""
    hashes: bool = False
    """As in `record.hash`."""
    batched: int = 1
    """As in `run.batched`."""
    holders: tuple[frozenset[int], ...] = ()
    """The workers that hold each part of the parameters, where some hold only some experts."""
    reduction: str = "ordered"
    fragments: int = 1
    """Of a server, as in `events.fragments`; those of rounds are the schedule's."""
    overlap: bool = False
    dylu: bool = False
    meetings: float | None = None
    absences: int = 0
    clock: str | None = None
    """As in `events.network`."""
    networks: Mapping[str, Network] | None = None
    """All networks that the run file declares, by name; None without a run file."""
    tables: frozenset[str] = frozenset()
    """The tables that the run file has."""

    @property
    def rules(self) -> list[tuple[int, Rule]]:
        """`rules_over_time` of its rule."""
        return rules_over_time(self.rule, self.steps)

    @property
    def full_steps(self) -> int | None:
        """The most inner steps of any worker, in the longest round."""
        return max(self.all_full_steps, default=None)

    @property
    def fewest_steps(self) -> int | None:
        """The same in the shortest round."""
        return min(self.all_full_steps, default=None)

    @property
    def all_full_steps(self) -> list[int]:
        """The same in each stretch of rounds; empty if unknown."""
        return [max(one) if isinstance(one, tuple) else one for one in self.all_local_steps]

    @property
    def all_local_steps(self) -> list[Steps]:
        """The local steps of each stretch of rounds."""
        if self.timetable is not None:
            return [one.local_steps for one in self.timetable.stretches]
        return [] if self.local_steps is None else [self.local_steps]

    @property
    def asynchronous(self) -> bool:
        """Whether there are no rounds."""
        return self.kind != "rounds"

    @property
    def clocked(self) -> bool:
        """Whether the seconds of a declared network decide the results, without rounds."""
        return self.asynchronous and self.networks is not None and (self.driver != "train" or self.dylu)

    @property
    def method_label(self) -> str:
        """The method, in an error message."""
        names = {"server": f"server '{self.server}'", "pair": f"pair '{self.pair and self.pair.name}'"}
        return names.get(self.kind, f"rule '{self.rule.name}'")

    @property
    def where(self) -> str:
        """Rule and topology, in an error message."""
        return f"rule '{self.rule.name}' on topology '{self.topology.name}' with {self.topology.n} workers"

    @property
    def pacing_network(self) -> Network | None:
        """The network whose seconds local steps adapt to in a simulation; None where they do not adapt, or it is ambiguous."""
        if not self.adapt or self.driver != "simulate" or self.networks is None:
            return None
        if isinstance(self.adapt, str):
            return self.networks.get(self.adapt)
        return next(iter(self.networks.values())) if len(self.networks) == 1 else None


class Incompatibility(NamedTuple):
    """A row of the table of incompatibilities: a condition on the combination, and its error sentence."""

    name: str
    fails: Callable[[Combination], bool]
    sentence: Callable[[Combination], str]
