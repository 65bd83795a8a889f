"""Run files: frozen dataclasses beside their owners, one TOML file, `--set rule.lr=0.5`, and no flag per field."""

import dataclasses
import hashlib
import inspect
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tomli_w

from gossamer.clock import Away, EventsConfig
from gossamer.data.settings import DataConfig
from gossamer.errors import ConfigError, PairingError, choose
from gossamer.layout import Pattern
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network, from_options, to_options
from gossamer.optimizers.inner import InnerConfig
from gossamer.record.folder import RecordConfig
from gossamer.rounds.schedule import Schedule
from gossamer.rules import WRAPPERS
from gossamer.run.document import EXPERIMENT, INSTEAD, TABLES, with_settings

__all__ = ["Choice", "LoopConfig", "RunConfig", "digest", "dump", "parse"]

_LONGEST_S = 1e6  # twelve days; threads and sockets take no wait without end


@dataclass(frozen=True)
class Choice:
    """A row of one of the tables, and the options for its factory."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, how often to talk, and on what."""

    steps: int = 300
    """Inner steps of a worker that takes the full number per round."""
    wait: bool = True
    """Whether a worker waits for the messages of its round; without, it mixes with what its peers published last, over the
    virtual time of `events.network`."""
    local_steps: int | tuple[int, ...] = 15
    """Inner steps between two exchanges (H); one number for all, or one per worker."""
    adapt: bool | str = False
    """Whether each worker takes as many local steps as fit its speed and its link (H_i), measured while the run goes on;
    local_steps is what it begins with, and the largest of them the most that any takes. In place of true, the simulator
    takes the name of the network whose seconds count."""
    weigh_steps: bool = False
    """Whether a worker that took fewer local steps has its drift scaled to as many as the others took (H / H_i)."""
    eval_every: int = 60
    """Inner steps between two validations, each after the first round that gets there; 0 validates only at the end."""
    eval_batches: int = 8
    """Validation batches of `data.batch_size` sequences."""
    checkpoint_every: int = 150
    """Inner steps between two checkpoints; the last round always has one, 0 means only that."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries real runs: gloo for CPU tensors, NCCL for GPUs."""
    mean: Literal["ordered", "all_reduce"] = "ordered"
    """How a real run carries a mean: summed in worker order by chunk owners, or the backend's own all-reduce, whose order
    and last bits are its own."""
    threads: int = 0
    """Intra-op threads per worker; 0 takes one in the simulator and an equal share of the cores in real runs."""
    compile: bool = False
    """Compile the outer update (needs a C++ compiler); bitwise the same, faster on large models."""
    timeout_s: float = 300.0
    """How long a worker waits for a peer before it gives up."""
    pace_s: float | tuple[float, ...] = 0.0
    """Seconds that an inner step takes at least, one number for all or one per worker: a worker that is faster sleeps, to
    stand for a larger model or a slower machine. Sleeping counts as computing in the trace."""

    def __post_init__(self) -> None:
        for name in ("local_steps", "pace_s"):
            if getattr(self, name) == ():
                raise ConfigError(f"run.{name} is an empty list; give one number, or one per worker")
        steps = self.local_steps if isinstance(self.local_steps, tuple) else (self.local_steps,)
        for name, value, low in [("steps", self.steps, 1), *(("local_steps", h, 1) for h in steps)]:
            if value < low:
                raise ConfigError(f"run.{name} is {value}; it must be at least {low}")
        if self.steps % max(steps):
            fewer = self.steps // max(steps) * max(steps)
            raise ConfigError(
                f"run.steps is {self.steps}, which is not a multiple of run.local_steps = {max(steps)}; "
                f"set run.steps to {f'{fewer} or ' if fewer else ''}{fewer + max(steps)}"
            )
        if not 0 < self.timeout_s <= _LONGEST_S:
            raise ConfigError(
                f"run.timeout_s is {self.timeout_s}; it must be above 0 and at most {_LONGEST_S:g} seconds"
            )
        if self.adapt and max(steps) == 1:
            raise ConfigError(
                f"run.adapt is set and run.local_steps is {self.local_steps}, of which none can be left out; raise "
                "run.local_steps to the most that a worker shall take"
            )
        for name in ("eval_every", "checkpoint_every", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"run.{name} is {getattr(self, name)}; it must be 0 or more")
        for pace_s in self.pace_s if isinstance(self.pace_s, tuple) else (self.pace_s,):
            if not 0 <= pace_s <= _LONGEST_S:
                raise ConfigError(f"run.pace_s is {pace_s}; it must be from 0 to {_LONGEST_S:g} seconds")
        if self.eval_batches < 1:
            raise ConfigError(f"run.eval_batches is {self.eval_batches}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, resolved: everything that decides its numbers, and a little that does not."""

    name: str = "run"
    seed: int = 0
    workers: int = 8
    rule: Choice = Choice("gasloc")
    topology: Choice = Choice("random")
    codec: Choice = Choice("exact")
    server: Choice | None = None
    """A server that takes each message as it comes, in place of rule and topology."""
    pair: Choice | None = None
    """What workers do that meet in pairs along the edges of the topology, in place of a rule."""
    events: EventsConfig = EventsConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    run: LoopConfig = LoopConfig()
    schedule: Schedule = Schedule()
    record: RecordConfig = RecordConfig()
    network: Mapping[str, Network] = field(default_factory=dict)
    """Networks to price the run on, by name."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; it must be at least 1")
        for name in ("local_steps", "pace_s"):
            value = getattr(self.run, name)
            if isinstance(value, tuple) and len(value) != self.workers:
                raise ConfigError(
                    f"run.{name} has {len(value)} entries for {self.workers} workers; give one number, or one per worker"
                )
        if isinstance(self.run.adapt, str) and self.run.adapt not in self.network:
            known = (
                choose("network", self.run.adapt, self.network) if self.network else "the run file declares no network"
            )
            raise ConfigError(
                f"run.adapt is '{self.run.adapt}': {known}; name a [network.NAME] of this file, or write true"
            )
        if self.run.mean == "all_reduce" and self.schedule.overlap_steps:
            raise ConfigError(
                f"run.mean is 'all_reduce', which blocks, and schedule.overlap_steps is {self.schedule.overlap_steps}; set "
                "run.mean = 'ordered' to train while a mean is under way"
            )
        rounds_only = {
            "[schedule]": not self.schedule.plain, "inner.averaging": self.inner.averaging is not None,
            "run.adapt": bool(self.run.adapt), "run.weigh_steps": self.run.weigh_steps,
            "codec.back": "back" in self.codec.options,
        }  # fmt: skip
        if self.event_driven and any(rounds_only.values()):
            raise PairingError(
                f"the run looks at the clock and has {', '.join(key for key, given in rounds_only.items() if given)}, which is "
                "for rounds; leave it out (events.fragments, events.overlap and events.dylu are a server's own)"
            )
        if self.inner.averaging is not None and self.schedule.fragments > 1:
            raise ConfigError(
                f"inner.averaging is '{self.inner.averaging}', whose iterate and average are exchanged together, and "
                f"schedule.fragments is {self.schedule.fragments}; use 1"
            )

    def local_steps(self, worker: int) -> int:
        """Inner steps per round of one worker (H_i); those it begins with if they adapt."""
        h = self.run.local_steps
        return h[worker] if isinstance(h, tuple) else h

    @property
    def full_steps(self) -> int:
        """Inner steps per round of the worker that takes most (H)."""
        h = self.run.local_steps
        return max(h) if isinstance(h, tuple) else h

    def pace_s(self, worker: int) -> float:
        """Seconds that an inner step of one worker takes at least."""
        pace_s = self.run.pace_s
        return pace_s[worker] if isinstance(pace_s, tuple) else pace_s

    @property
    def rounds(self) -> int:
        """Exchanges in the run: run.steps over the largest number of local steps."""
        return self.run.steps // self.full_steps

    @property
    def owners(self) -> range:
        """Whose snapshots make a round whole: all workers', or the server's, which comes after its workers."""
        return range(self.workers) if self.server is None else range(self.workers, self.workers + 1)

    @property
    def event_driven(self) -> bool:
        """Whether it has no rounds: who was late decides what is computed."""
        return self.server is not None or self.pair is not None or not self.run.wait

    @property
    def step_tokens(self) -> int:
        """Tokens one worker trains on in one inner step."""
        return self.data.batch_size * self.data.accumulate * self.data.seq_len

    @property
    def fragments(self) -> tuple[int, Pattern]:
        """How many fragments the parameters are cut into, and how; those of a server are packed by size."""
        if self.server is not None:
            return self.events.fragments, "packed"
        return self.schedule.fragments, self.schedule.pattern

    def due(self, every: int, finished: int) -> bool:
        """Whether something done every so many inner steps is due after this many finished rounds; always after the last."""
        here, before = finished * self.full_steps, (finished - 1) * self.full_steps
        return finished == self.rounds or (every > 0 and here // every > before // every)


def parse(document: Mapping[str, Any]) -> RunConfig:
    """The validated run in a document. Raises ConfigError for unknown keys (naming the nearest) and impossible values."""
    document = with_settings(document, {})
    if several := [key for key in EXPERIMENT if key in document]:
        raise ConfigError(
            f"the file has '{several[0]}', so it is an experiment with several runs; use gossamer compare"
        )
    if network := [key for key in ("uplink_bps", "downlink_bps") if key in document]:
        raise ConfigError(
            f"the file has '{network[0]}' at its top, so it is a network file; give a run file such as configs/gasloc.toml"
        )
    for kind, others in INSTEAD.items():
        if kind in document and (unused := [other for other in others if other in document]):
            raise PairingError(
                f"the run has [{kind}] and [{unused[0]}], but a {kind} method has no {unused[0]}; remove one of the two"
            )
    if "pair" in document and "topology" not in document:
        document = {**document, "topology": {"name": "complete"}}
    return _build(RunConfig, document, "")


def _build(cls: type, table: Any, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"[{where}] is {table!r}; it must be a table of options")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in table:
        if key not in names:
            raise ConfigError(choose(f"key in [{where}]" if where else "key", str(key), names) + "; correct the name")
    values = {key: _value(hints[key], value, f"{where}.{key}" if where else key) for key, value in table.items()}
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint in (Choice, Choice | None):
        return _choice(value, where)
    if hint == tuple[Away, ...] and isinstance(value, list | tuple):
        return tuple(_build(Away, row, where) for row in value)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if where == "network":
        if not isinstance(value, Mapping):
            raise ConfigError(f"network is {value!r}; write each network as a [network.NAME] table")
        return {name: from_options(table, f"network.{name}") for name, table in value.items()}
    if isinstance(value, list):
        value = tuple(value)
    if not _fits(hint, value):
        raise ConfigError(f"{where} is {value!r}; it must be {_words(hint)}")
    return float(value) if hint is float else value


def _fits(hint: Any, value: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(arg, value) for arg in args)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is tuple:
        inner = [args[0]] * len(value) if isinstance(value, tuple) and args[-1] is ... else list(args)
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, inner, value))
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint or hint is Any


def _words(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin is tuple:
        return f"a list of {_words(args[0])}"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))


def _choice(table: Any, where: str) -> Choice:
    """A row of a table, its options checked against the signature of its factory."""
    if isinstance(table, str):
        table = {"name": table}
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(f"[{where}] is {table!r}; it needs a name: one of {', '.join(sorted(TABLES[where]))}")
    name = table["name"]
    if name not in TABLES[where]:
        raise ConfigError(choose(where, name, TABLES[where]) + "; correct the name")
    options = {key: value for key, value in table.items() if key != "name"}
    wrappers = WRAPPERS if where == "rule" else {}
    own = [p for p in inspect.signature(TABLES[where][name]).parameters if p not in ("n", "seed")]
    _check_options(f"{where} '{name}'", options, [*own, *wrappers, *(["back"] if where == "codec" else [])])
    if where == "codec" and options.get("back") == "none":
        del options["back"]  # as a run without says it, to which a method's own gives way
    if where == "codec" and "back" in options:
        _choice(options["back"], "codec")
    for key in options.keys() & wrappers.keys():
        if not isinstance(options[key], Mapping):
            raise ConfigError(f"{where}.{key} is {options[key]!r}; write its options as a table, which may be empty")
        _check_options(f"{where}.{key}", options[key], [*inspect.signature(wrappers[key]).parameters][1:])
    parameters = inspect.signature(TABLES[where][name]).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in ("n", "seed", *options)]
    if needed:
        raise ConfigError(f"{where} '{name}' needs {', '.join(needed)} and got {options}; add what is missing")
    return Choice(name, options)


def _check_options(who: str, options: Mapping[str, Any], allowed: list[str]) -> None:
    for key in options:
        if key not in allowed:
            known = choose("option", key, allowed) if allowed else f"unknown option '{key}'; it has none"
            raise ConfigError(f"{who} got an {known}; correct or remove it")


def dump(config: RunConfig) -> str:
    """The resolved run as TOML; `parse` of it gives the run again."""
    return tomli_w.dumps(_document(config))


def _document(config: RunConfig) -> dict[str, Any]:
    """The run as a document, without what its kind of method has no use for."""
    document = _plain(config)
    kind = next((kind for kind in ("server", "pair") if kind in document), "rule")
    for unused in INSTEAD[kind]:
        document.pop(unused, None)
    if not config.event_driven and config.events == EventsConfig():
        document.pop("events")
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": value.name, **{k: _plain(v) for k, v in value.options.items()}}
    if isinstance(value, Network):
        return to_options(value)
    if dataclasses.is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain(item) for name, item in items if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def digest(config: RunConfig) -> str:
    """Sixteen hex digits of everything that decides the numbers of a run; equal on all workers of one run."""
    document = _document(config)
    networks = document["network"]
    for key in ("name", "record", *(() if config.run.adapt else ("network",))):
        document.pop(key)
    if config.event_driven:
        document["network"] = networks.get(config.events.network, networks)  # whose seconds decide the numbers
    else:
        document.pop("events", None)
        document["run"].pop("wait")
    document["data"].pop("cache", None)
    for key in (
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "device",
        "backend",
        "threads",
        "compile",
        "timeout_s",
        "pace_s",
    ):
        document["run"].pop(key)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
