"""Run files: frozen dataclasses beside their owners, one TOML file, `--set rule.lr=0.5`, and no flag per field."""

import copy
import dataclasses
import hashlib
import inspect
import itertools
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w

from gossamer.codecs import CODECS
from gossamer.data import DataConfig
from gossamer.errors import ConfigError, PairingError, choose
from gossamer.events import Away, EventsConfig
from gossamer.figures import Figure
from gossamer.inner import InnerConfig
from gossamer.methods import recipe
from gossamer.network import Network, from_options, to_options
from gossamer.record import RecordConfig
from gossamer.rules import RULES, WRAPPERS
from gossamer.schedule import Schedule
from gossamer.servers import PAIRS, SERVERS
from gossamer.shapes import ModelConfig
from gossamer.topology import TOPOLOGIES

__all__ = [
    "Choice",
    "LoopConfig",
    "Point",
    "RunConfig",
    "digest",
    "dump",
    "figure",
    "load",
    "load_run",
    "parse",
    "points",
    "settings",
    "with_settings",
]

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

    def due(self, every: int, finished: int) -> bool:
        """Whether something done every so many inner steps is due after this many finished rounds; always after the last."""
        here, before = finished * self.full_steps, (finished - 1) * self.full_steps
        return finished == self.rounds or (every > 0 and here // every > before // every)


_TABLES: dict[str, Mapping[str, Any]] = {
    "rule": RULES, "topology": TOPOLOGIES, "codec": CODECS, "server": SERVERS, "pair": PAIRS,
}  # fmt: skip
_INSTEAD: dict[str, tuple[str, ...]] = {
    "server": ("rule", "pair", "topology"), "pair": ("rule", "server"), "rule": ("server", "pair"),
}  # fmt: skip
"""What each of the three kinds of method has no use for."""
_EXPERIMENT = ("variant", "sweep", "scale", "figure")
"""What an experiment file has beside its base."""


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document in a TOML run file with dotted overrides applied; not yet validated.

    Raises: ConfigError when the file is missing, too large to be a run file, or not TOML.
    """
    if not path.is_file():
        raise ConfigError(f"there is no run file '{path}'; give the path of a TOML file, such as configs/gasloc.toml")
    if path.stat().st_size > 1 << 20:
        raise ConfigError(
            f"'{path}' has {path.stat().st_size} bytes; a run file has at most 1 MiB: is it the right file?"
        )
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not TOML: {error}; correct that line") from None
    return with_settings(document, overrides or {})


def load_run(folder: Path) -> dict[str, Any]:
    """The document of the run that a folder holds. Raises ConfigError, naming the runs inside it, when it holds none."""
    if not (folder / "run.toml").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/run.toml"))
        names = ", ".join(inside[:8]) + (f" and {len(inside) - 8} more" if len(inside) > 8 else "")
        instead = f"it holds runs: {names}; name one of them" if inside else "name one that gossamer wrote"
        raise ConfigError(f"'{folder}' is no run folder (no run.toml); {instead}")
    return load(folder / "run.toml")


def settings(words: list[str]) -> dict[str, Any]:
    """Dotted overrides from `key=value` words; a value is TOML, and anything that is not is taken as text.

    >>> settings(["rule.lr=0.5", "topology.name=ring"])
    {'rule.lr': 0.5, 'topology.name': 'ring'}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set got '{word}'; write it as key=value, such as rule.lr=0.5")
        try:
            found[key] = tomllib.loads(f"v = {value}")["v"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found


def with_settings(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The document with each dotted key set; naming another rule, topology or codec drops the options of the old one.

    Naming a server drops the rule and the topology of the document, and so on: a run has one kind of method. `method` stands for
    the settings of a recipe, which give way to what is said beside it.
    """
    result = copy.deepcopy(dict(document))
    if "method" in result:
        base = with_settings({}, recipe(result.pop("method")).settings)
        beside = _flat({key: result.pop(key) for key in [*result] if key in base})
        result |= with_settings(base, beside)
    if "method" in overrides:
        own = {key: value for key, value in overrides.items() if key != "method"}
        overrides = {**recipe(overrides["method"]).settings, **own}
    given = {key.partition(".")[0] for key in overrides}
    for kind, others in _INSTEAD.items():
        if kind in overrides or f"{kind}.name" in overrides:
            for other in {*others} - given:
                result.pop(other, None)
    for key, value in sorted(overrides.items(), key=lambda item: not item[0].endswith(".name")):
        *path, last = key.split(".")
        node: Any = result
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"cannot set '{key}': '{part}' is a value, not a table; check the dots")
        if last == "name" and path and path[-1] in _TABLES and node.get("name") != value:
            node.clear()
        node[last] = copy.deepcopy(value)  # a recipe's own table must not be what the next override is written into
    return result


class Point(NamedTuple):
    """One run of an experiment file: whose it is, where it stands on the grid, and the run itself."""

    method: str
    """The label of its variant."""
    at: Mapping[str, Any]
    """The swept keys and their values here, the seed not among them."""
    seed: int
    label: str
    """The method with all that was swept: the run's own name."""
    config: RunConfig


def points(document: Mapping[str, Any], *, seeds: Sequence[int] = (), scale: str = "") -> list[Point]:
    """All runs of an experiment file: `[[variant]]` tables, times the grid in `[sweep]`, over one base.

    A variant is a table of dotted overrides with a `label`; `[sweep]` maps dotted keys to lists of values, and a variant
    may have a `[variant.sweep]` of its own instead. A file with neither is one run, labelled with its name.
    `[scale.NAME]` has dotted overrides for another size of the same experiment, `[variant.scale.NAME]` those of a variant.

    Args:
        seeds: run every point with each of them.
        scale: the name of the size to take; empty for the file as it is.
    """
    base = {key: value for key, value in document.items() if key not in _EXPERIMENT}
    rows = document.get("variant", [{}])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"variant is {type(rows).__name__}; write each variant as a [[variant]] table")
    if scale and "scale" not in document:
        raise ConfigError(f"--scale got '{scale}' and the file has no [scale.NAME]; leave --scale out, or write one")
    if scale and scale not in document["scale"]:
        raise ConfigError(choose("scale", scale, document["scale"]) + "; name one that the file has")
    base = with_settings(base, _flat(document.get("scale", {}).get(scale, {})))
    runs: list[Point] = []
    for row in rows:
        own = _flat({key: value for key, value in row.items() if key not in ("label", "sweep", "scale")})
        own |= _flat(row.get("scale", {}).get(scale, {}))
        method = str(row.get("label", row.get("method", base.get("name", "run"))))
        grid = _grid(row.get("sweep", document.get("sweep", {})), seeds)
        for values in itertools.product(*grid.values()):
            here = dict(zip(grid, values, strict=True))
            label = method + "".join(f" {key.rpartition('.')[2]}={_word(value)}" for key, value in here.items())
            config = parse(with_settings(base, {**own, **here, "name": label}))
            runs.append(Point(method, {k: v for k, v in here.items() if k != "seed"}, config.seed, label, config))
    labels = [run.label for run in runs]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"the labels of the runs are {labels}; each variant needs its own: set label")
    return runs


def figure(document: Mapping[str, Any]) -> Figure | None:
    """What the `[figure]` table of an experiment file asks for. Raises ConfigError when it asks for the impossible."""
    return _build(Figure, document["figure"], "figure") if "figure" in document else None


def _grid(sweep: Any, seeds: Sequence[int]) -> dict[str, list[Any]]:
    """The swept keys with their values; the seed comes last, so that labels differ by their end."""
    if not isinstance(sweep, Mapping) or not all(isinstance(values, list) and values for values in sweep.values()):
        raise ConfigError(f"sweep is {sweep!r}; write it as a [sweep] table of dotted keys with lists of values")
    return {**sweep, "seed": list(seeds)} if seeds else dict(sweep)


def _word(value: Any) -> str:
    return str(value["name"]) if isinstance(value, Mapping) and "name" in value else str(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        table_below = isinstance(value, dict) and (
            value or not prefix
        )  # an empty one inside another may mean something
        flat.update(_flat(value, f"{prefix}{key}.") if table_below else {prefix + key: value})
    return flat


def parse(document: Mapping[str, Any]) -> RunConfig:
    """The validated run in a document. Raises ConfigError for unknown keys (naming the nearest) and impossible values."""
    document = with_settings(document, {})
    if several := [key for key in _EXPERIMENT if key in document]:
        raise ConfigError(
            f"the file has '{several[0]}', so it is an experiment with several runs; use gossamer compare"
        )
    if network := [key for key in ("uplink_bps", "downlink_bps") if key in document]:
        raise ConfigError(
            f"the file has '{network[0]}' at its top, so it is a network file; give a run file such as configs/gasloc.toml"
        )
    for kind, others in _INSTEAD.items():
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
        raise ConfigError(f"[{where}] is {table!r}; it needs a name: one of {', '.join(sorted(_TABLES[where]))}")
    name = table["name"]
    if name not in _TABLES[where]:
        raise ConfigError(choose(where, name, _TABLES[where]) + "; correct the name")
    options = {key: value for key, value in table.items() if key != "name"}
    wrappers = WRAPPERS if where == "rule" else {}
    own = [p for p in inspect.signature(_TABLES[where][name]).parameters if p not in ("n", "seed")]
    _check_options(f"{where} '{name}'", options, [*own, *wrappers, *(["back"] if where == "codec" else [])])
    if where == "codec" and options.get("back") == "none":
        del options["back"]  # as a run without says it, to which a method's own gives way
    if where == "codec" and "back" in options:
        _choice(options["back"], "codec")
    for key in options.keys() & wrappers.keys():
        if not isinstance(options[key], Mapping):
            raise ConfigError(f"{where}.{key} is {options[key]!r}; write its options as a table, which may be empty")
        _check_options(f"{where}.{key}", options[key], [*inspect.signature(wrappers[key]).parameters][1:])
    parameters = inspect.signature(_TABLES[where][name]).parameters.values()
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
    for unused in _INSTEAD[kind]:
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
