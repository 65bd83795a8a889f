"""What a run file resolves to: all that drivers, replicas, journals, layouts and replays need to know of a run.

None of them sees a run file: resolving it a second time could give a different result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from gossamer.asynchronous import PairRule, Rates, ServerRule
from gossamer.clock import Absence, EventsConfig
from gossamer.codecs import Codec
from gossamer.errors import ConfigError
from gossamer.layout import Pattern
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network
from gossamer.record.folder import RecordConfig
from gossamer.record.lineage import Lineage, choice_in_words, state_is_of
from gossamer.rounds.compatibility.combination import Kind
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.schedule import Schedule
from gossamer.run.config.pipeline import PipelineConfig
from gossamer.run.config.run_file import RunLength
from gossamer.run.config.user_parts import UserParts
from gossamer.settings.over_time import EqualRounds, Steps
from gossamer.topologies import Topology
from gossamer.transport.keys import Peer


class WithServer(NamedTuple):
    """The method of an asynchronous run around a server."""

    rule: ServerRule
    codec: Codec


class InPairs(NamedTuple):
    """The method of an asynchronous run of workers that meet in pairs."""

    rule: PairRule
    topology: Topology
    rates: Rates
    """Meetings of each pair per second; on real processes per mean local phase, whose seconds they measure."""
    codec: Codec


@dataclass(frozen=True, kw_only=True)
class RunSettings(RunLength):
    """A run without its method, which only training needs: enough to read, price, evaluate or resume it."""

    name: str
    seed: int
    workers: int
    kind: Kind
    """How the workers communicate."""
    model: ModelConfig
    pipeline: PipelineConfig
    schedule: Schedule
    events: EventsConfig
    record: RecordConfig
    networks: Mapping[str, Network]
    """Networks to price the run on, by name."""
    peers: Mapping[str, Peer]
    """The machines whose keys take part; empty where the workers share a secret."""
    parts: UserParts
    """The user's own."""
    code: Mapping[str, tuple[str, str]]
    """See `gossamer.run.config.user_parts.named_code`."""
    digest: str
    """Sixteen hex digits of everything that decides the numbers; equal on all workers, and that of the file in any variant."""
    decisive: Mapping[str, Any]
    """The content of the digest: the dotted keys of the file with their values."""
    document: str
    """The file with all its defaults, as `run.toml` has it."""

    @property
    def event_driven(self) -> bool:
        """Whether it is asynchronous: delays decide what is computed."""
        return self.kind != "rounds"

    @property
    def worker_tokens(self) -> list[int]:
        """The tokens of each worker; a run without rounds ends when all have taken as many steps together as full rounds have."""
        workers, rounds = range(self.workers), self.rounds
        steps = [self.loop.steps if self.event_driven else self.timetable.steps_before(i, rounds) for i in workers]
        return [one * self.step_tokens for one in steps]

    @property
    def processes(self) -> tuple[int, ...]:
        """Number of processes of each worker in a real run: one for each of its stages, or of its shards."""
        return self.pipeline.processes(self.workers) if self.loop.shards == 1 else (self.loop.shards,) * self.workers

    @property
    def owners(self) -> range:
        """The owners whose checkpoints a complete round has: all workers, or the server, whose number follows theirs."""
        return range(self.workers, self.workers + 1) if self.kind == "server" else range(self.workers)

    @property
    def lineage(self) -> Lineage:
        """The lineage of a run whose settings were never changed: which checkpoints belong to it."""
        kind = {"server": "server", "pair": "pair"}.get(self.kind, "rule")
        return Lineage(
            self.digest,
            of=state_is_of(
                self.decisive.get(f"{kind}.name", ""),
                self._options(kind),
                topology=self._in_words("topology"),
                workers=self.workers,
                codec=self._in_words("codec"),
                schedule=self._in_words("schedule"),
                local_steps=f"{self.decisive['run.local_steps']}",
            ),
        )

    def _in_words(self, table: str) -> str:
        return choice_in_words(self.decisive.get(f"{table}.name", "none"), self._options(table))

    def _options(self, table: str) -> dict[str, Any]:
        """The other keys of a table of the file, as far as they decide the numbers."""
        prefix = f"{table}."
        options = {key: value for key, value in self.decisive.items() if key.startswith(prefix)}
        return {key.removeprefix(prefix): value for key, value in options.items() if key != f"{prefix}name"}

    @property
    def fragments(self) -> tuple[int, Pattern]:
        """Number and pattern of the fragments that the parameters are cut into; those of a server are packed by size."""
        if self.kind == "server":
            return self.events.fragments, "packed"
        return self.schedule.fragments, self.schedule.pattern

    def pace_s_of(self, worker: int) -> float:
        """The least seconds that an inner step of one worker takes."""
        pace_s = self.loop.pace_s
        return pace_s[worker] if isinstance(pace_s, tuple) else pace_s

    def due(self, every: int, finished: int) -> bool:
        """Whether something done every so many inner steps is due after this many finished rounds; always after the last."""
        here, before = self.timetable.begin(finished), self.timetable.begin(max(0, finished - 1))
        return finished == self.rounds or (every > 0 and here // every > before // every)

    def unpaced(self) -> Self:
        """The run without a minimum time of inner steps, for a replay."""
        return replace(self, loop=replace(self.loop, pace_s=0.0))


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(RunSettings):
    """A run as it is trained. Its local steps are those that its workers take, fewer for slower ones with `events.dylu`."""

    method: Method | WithServer | InPairs
    """A `Method` in rounds, and for workers that mix with what their peers published last."""
    network: Network | None
    """The network whose seconds decide what is computed: that of the clock, or to which local steps adapt. None where none do,
    and on real processes, which measure their own."""
    network_name: str | None
    absences: tuple[Absence, ...]
    """Absences of workers in an asynchronous run, in the order of their seconds."""
    warnings: tuple[str, ...]
    """Warnings of what will probably go wrong."""

    def parts_of_run(self) -> list["ResolvedRun"]:
        """The run in parts with constant settings, each as a separate run with as many rounds."""
        m, start = self.method, self.loop.synchronous_steps
        if not self.timetable.changes and not start:
            return [self]

        def alone(local_steps: Steps, rounds: int) -> ResolvedRun:
            made = EqualRounds(0, 0, local_steps)
            loop = replace(self.loop, local_steps=local_steps, synchronous_steps=0, steps=rounds * made.full_steps)
            return replace(self, loop=loop)

        after = self.timetable.since(start)
        parts = [alone(one.local_steps, rounds) for one, rounds in after.rounds_per_stretch(self.rounds - start)]
        if isinstance(m, Method) and m.start is not None:
            parts.insert(0, replace(alone(1, start), method=m.start, schedule=m.start.schedule))
        return parts

    @property
    def in_rounds(self) -> Method:
        """The method of a run in rounds. Raises ConfigError for any other."""
        if self.kind != "rounds" or not isinstance(self.method, Method):
            raise ConfigError(
                f"the run '{self.name}' is asynchronous ({self.kind}) and has no rounds; start it with gossamer simulate"
            )
        return self.method

    @property
    def with_server(self) -> WithServer:
        """The method of a run with a server; the caller has checked that it has one."""
        assert isinstance(self.method, WithServer)
        return self.method
