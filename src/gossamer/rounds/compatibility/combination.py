"""What decides, before a run starts, whether its parts can be combined, and the form of a row that says when they cannot."""

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
"""Who runs it: one process over declared networks, real processes, or somebody else's training loop."""

INSTEAD: dict[str, tuple[str, ...]] = {
    "server": ("rule", "pair", "topology"),
    "pair": ("rule", "server"),
    "rule": ("server", "pair"),
}
"""The tables of a run file that each of the three kinds of method excludes."""


def rules_over_time(rule: Rule, steps: int) -> list[tuple[int, Rule]]:
    """A rule with its numbers at the inner steps of a run at which they change; of a shape, at some of them."""
    if (at := rule.at) is None:
        return [(0, rule)]
    changing = [value for value in rule.options.values() if over_time.changes(value)]
    moments = sorted({step for value in changing for step in over_time.moments(value, steps)})
    return [(step, at(step, steps)) for step in moments]


class Combination(NamedTuple):
    """The parts and settings of one run. A default stands for something unused or unknown, and fails no check."""

    kind: Kind = "rounds"
    driver: Driver = "simulate"
    workers: int | None = None
    """How many there are, for a topology that was not made for the run."""
    wait: bool = True
    """As in `run.wait`."""
    rule: Rule = gossip()
    topology: Topology = complete(1)
    codec: Codec = exact()
    schedule: Schedule = Schedule()
    local_steps: Steps | None = None
    """One number for all workers, or one per worker; of a timetable, those that a run begins with."""
    synchronous_steps: int = 0
    """As in `run.synchronous_steps`; `local_steps` and `timetable` are those of the rounds after them."""
    steps: int = 0
    """As in `run.steps`; 0 where it is not known."""
    timetable: Timetable | None = None
    """The local steps of each round, where these change."""
    server: str = ""
    """Name of the server."""
    regions: bool = False
    """Whether that server is one of several, in each region one, below a global server."""
    pair: PairRule | None = None
    optimizer: str = "adamw"
    """As in `inner.optimizer`."""
    averaging: str | None = None
    """As in `inner.averaging`."""
    adapt: bool | str = False
    weigh_steps: bool = False
    elastic: bool = False
    """As in `run.elastic`."""
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
    """Whether the tensors of a stage do not follow each other in the order of the model."""
    lost: frozenset[bool] = frozenset()
    """Whether stages that are lost (`pipeline.lost`) go on from a peer's; False is in it where one does from its neighbours."""
    hashes: bool = False
    """As in `record.hash`."""
    batched: int = 1
    """As in `run.batched`."""
    holders: tuple[frozenset[int], ...] = ()
    """The workers that hold each part of the parameters, where some hold some of the experts only."""
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
        """As `rules_over_time`, of its rule."""
        return rules_over_time(self.rule, self.steps)

    @property
    def full_steps(self) -> int | None:
        """Inner steps of the worker that takes most, in the longest of the rounds."""
        return max(self.all_full_steps, default=None)

    @property
    def fewest_steps(self) -> int | None:
        """The same in the shortest of the rounds."""
        return min(self.all_full_steps, default=None)

    @property
    def all_full_steps(self) -> list[int]:
        """The same in each stretch of rounds; none where they are not known."""
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
        """Whether seconds of a declared network decide what is computed, without rounds."""
        return self.asynchronous and self.networks is not None and (self.driver != "train" or self.dylu)

    @property
    def who(self) -> str:
        """The method, in an error message."""
        names = {"server": f"server '{self.server}'", "pair": f"pair '{self.pair and self.pair.name}'"}
        return names.get(self.kind, f"rule '{self.rule.name}'")

    @property
    def where(self) -> str:
        """Rule and topology, in an error message."""
        return f"rule '{self.rule.name}' on topology '{self.topology.name}' with {self.topology.n} workers"

    @property
    def pacing_network(self) -> Network | None:
        """The network whose seconds local steps adapt to in a simulation; None where they do not, or it is not clear which."""
        if not self.adapt or self.driver != "simulate" or self.networks is None:
            return None
        if isinstance(self.adapt, str):
            return self.networks.get(self.adapt)
        return next(iter(self.networks.values())) if len(self.networks) == 1 else None


class Incompatibility(NamedTuple):
    """A row of the table of what cannot work: a condition on the combination, and the sentence for it."""

    name: str
    fails: Callable[[Combination], bool]
    sentence: Callable[[Combination], str]
