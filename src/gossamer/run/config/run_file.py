"""Run files: settings that each package declares, one TOML file, `--set rule.lr=0.5`, and no flag per field."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

import tomli_w
from pydantic import Field

from gossamer.clock import EventsConfig
from gossamer.data.settings import DataConfig
from gossamer.errors import ConfigError, GossamerError, PairingError
from gossamer.models.holders import must_deal
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network, to_options
from gossamer.optimizers.inner import InnerConfig, warmup_steps
from gossamer.record.folder import RecordConfig
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination, Kind
from gossamer.rounds.schedule import Schedule
from gossamer.run.config.choice import Choice, NamedIn
from gossamer.run.config.document import DIRECTIONS, EXPERIMENT, KINDS, flat, with_settings
from gossamer.run.config.pipeline import PipelineConfig, misfits
from gossamer.run.config.totals import each_batch, rounds_for, tokens_for
from gossamer.settings import over_time
from gossamer.settings.fields import NEUTRAL, Changeable, FolderName, Words
from gossamer.settings.kinds import INSTEAD
from gossamer.settings.options import Count, Number, Positive, check_values
from gossamer.settings.over_time import (
    LearningRate,
    Steps,
    Timetable,
    begun_alike,
    local_steps_entries,
    quadratic,
    timetable_of,
)
from gossamer.settings.quantities import SECONDS, TOKENS
from gossamer.settings.schema import build, default_of, settings, soundest, toml_value
from gossamer.settings.schema import settings_faults as schema_faults
from gossamer.settings.user_code import is_code
from gossamer.topologies.contract import MOST_WORKERS
from gossamer.transport.keys import Peer, duplicate_certificates

_IN_TOKENS = ("tokens", "tokens_per_parameter")
_LONGEST_S = 1e6  # twelve days; threads and sockets take no wait without end
_BATCHED: dict[str, Any] = {
    "model.loss": None,
    "model.dropout": 0.0,
    "model.bottleneck": None,
    "model.experts": None,
    "pipeline.stages": 1,
    "inner.averaging": None,
    "run.adapt": False,
    "run.pace_s": 0.0,
}
"""The only values with which several replicas can train as one computation."""
_STACKED = ("accum_adamw", "adamw", "sgd", "spectral_muon")
"""The inner optimizers for the parameters of several replicas at once; torch's Muon takes single matrices."""
_PER_WORKER = {
    "run.local_steps": "give one number, or one per worker",
    "run.pace_s": "give one number, or one per worker",
    "data.shards": "name a source for every worker",
}
"""Keys that may be a list with an entry for every worker, with the remedy for too few or too many entries."""
FIRST_KEYS: Mapping[str, str] = {
    "": "seed workers rule topology codec server pair events model pipeline data inner run schedule",
    "run": "steps wait local_steps adapt weigh_steps reduction batched",
    "data": "source options validation text_field tokenizer seq_len batch_size accumulate constant_batch windows shards "
    "val_fraction max_bytes shuffle_buffer",
    "events": "network dylu fragments overlap meetings absences",
    "events.absences": "worker leave_s return_s",
    "model": "size options loss hidden_size layers heads kv_heads intermediate_size bottleneck experts tie_embeddings dropout",
    "model.bottleneck": "name width cuts kind free_layers",
    "model.experts": "count active holders balance",
    "pipeline": "stages cuts speeds forward backward schedule chunks workers",
    "pipeline.lost": "worker stage after source",
    "inner": "optimizer options lr betas eps moments_every weight_decay momentum nesterov clip schedule warmup_steps "
    "min_lr_ratio decay_fraction autocast compile averaging mu_x mu_y",
    "schedule": "fragments pattern overlap_steps merge merge_strength sends inner_every",
}
"""The keys of each table that a digest holds whatever their values, as checkpoints were saved under such digests. It never grows:
a digest leaves out any other key at the value that a run without the key had, so that a new key with a default changes none."""
LEFT_OUT_AT: Mapping[str, Any] = {"pipeline.lost": []}
"""Keys that came later in a release, each with the value at which a digest leaves it out. That stays when its default changes;
for a key that no release has yet, it is its default."""
_FIRST = {f"{table}.{key}".removeprefix(".") for table, keys in FIRST_KEYS.items() for key in keys.split()}
GONE: Mapping[tuple[str, str], tuple[Any, str]] = {
    ("pipeline", "resplit_every"): (
        0,
        "a run keeps its cuts; remove the key, and when a stage has become slow, stop the run and resume it with --set "
        "pipeline.cuts=[...] or pipeline.speeds=[...]",
    ),
    ("run", "ghost_rounds"): (0, "a worker that joins takes over the inner optimizer of a peer; remove the key"),
    ("run", "eval_js"): (False, "predictions are not compared any more; remove the key"),
    ("record", "alignment"): (False, "pseudo-gradients are not compared any more; remove the key"),
}
"""Removed keys, each with its table, the value at which run folders still hold it, and what to do about any other."""
_OverTime = Annotated[Mapping[str, Any], Words("a table of these by inner step, such as { 0 = 1, 2000 = 30 }")]
_Pace = Annotated[float, Field(ge=0, le=_LONGEST_S), SECONDS]


@settings("run")
class LoopSettings:
    """How long to train, how often to exchange, and on which device."""

    steps: Annotated[Count, Changeable()] = 300
    """Inner steps of a worker that takes the full number per round."""
    tokens: Annotated[Annotated[Count, TOKENS] | None, NEUTRAL] = None
    """The most tokens of all workers together, in place of steps: the run has as many whole rounds as they pay for."""
    tokens_per_parameter: Annotated[float | None, Field(gt=0), NEUTRAL] = None
    """The same for each parameter of the model; 20 is the usual choice for a model of the best size for its compute."""
    wait: bool = True
    """Whether a worker waits for the messages of its round; with false, it mixes with what its peers published last. A
    simulation takes the virtual time of `events.network`."""
    local_steps: Count | Annotated[tuple[Count, ...], Field(min_length=1)] | _OverTime = 15
    """Inner steps between two exchanges (H); one number for all, or one per worker. A table has either by inner step of the
    worker that takes most, and what is in force at the begin of a round counts for all of it: `{ 0 = 1, 2000 = 30 }`."""
    synchronous_steps: Number = 0
    """Inner steps of data parallelism, with which the run begins: all step on the mean of their gradients, without an outer step.
    Then the method begins, from parameters that all have in common."""
    adapt: bool | str = False
    """Whether each worker takes as many local steps as fit its speed and its link (H_i), measured while the run continues;
    each begins with local_steps, and none exceeds the largest of them. The simulator also accepts, in place of true, the
    name of the network whose seconds count."""
    weigh_steps: bool = False
    """Whether the drift of a worker that took fewer local steps is scaled up by H / H_i, so that it counts fully."""
    eval_every: Annotated[Number, NEUTRAL] = 60
    """Inner steps between two validations, each at the end of the round that reaches them; the first is of the initial values.
    0 validates only at the end."""
    eval_batches: Annotated[Count, NEUTRAL] = 8
    """Validation batches of `data.batch_size` sequences."""
    eval_workers: Annotated[bool, NEUTRAL] = True
    """Whether a validation of a simulation or of `gossamer evaluate` also tries every worker's own parameters. With false it
    tries the mean model only, which takes 1/(n + 1) of the time with n workers. A process of a real run always tries its own."""
    checkpoint_every: Annotated[Number, NEUTRAL] = 150
    """Inner steps between two checkpoints; the last round always writes one, and 0 writes only that one."""
    device: Annotated[Literal["auto", "cpu", "cuda"], NEUTRAL] = "auto"
    """Where tensors live; auto takes CUDA if there is a device."""
    backend: Annotated[Literal["auto", "gloo", "nccl"], NEUTRAL] = "auto"
    """What carries real runs: gloo for CPU tensors, NCCL for GPUs."""
    reduction: Literal["ordered", "all_reduce"] = "ordered"
    """How a real run carries a mean: summed in worker order by chunk owners, or the backend's own all-reduce, whose order
    and last bits are its own."""
    shards: Annotated[int, Field(ge=1, le=1024), NEUTRAL] = 1
    """Processes of each worker of a real run that hold its model together, by FSDP2: each has a shard of it, and trains on its
    share of the micro-batches of `data.accumulate`. A simulation has whole workers; the numbers differ by rounding at most."""
    threads: Annotated[int, Field(ge=0, le=1024), NEUTRAL] = 0
    """Intra-op threads per worker; 0 takes those that OMP_NUM_THREADS gives, or else an equal share of the cores, in simulations
    as in real runs. Each worker's are in `machines[-003].jsonl` of the run folder, and a run that is computed again, or
    resumed, takes them from there."""
    take_turns: Annotated[bool, NEUTRAL] = False
    """Whether forward passes of a model or a loss of your own run one at a time in a simulation, for code that is not safe in
    several threads. Without it they do so only where they draw random numbers; batches and optimizers of your own always do."""
    batched: Count = 1
    """How many replicas a simulation trains as one computation. On small models that is faster; their numbers then differ from
    those of processes by rounding. It takes the built-in model, with any inner optimizer by name but muon."""
    compile: Annotated[bool, NEUTRAL] = False
    """Compile the outer update (needs a C++ compiler); bitwise the same, faster on large models."""
    timeout_s: Annotated[float, Field(gt=0, le=_LONGEST_S), SECONDS, NEUTRAL] = 300.0
    """How long a worker waits for a peer before it gives up."""
    elastic: Annotated[bool, NEUTRAL] = False
    """Whether a real run continues when workers die, hang, leave and join; bitwise equal to one without as long as nothing fails.
    For means over everyone, and gossip on parameters over a symmetric topology. `gossamer train --store` implies it."""
    round_deadline_s: Annotated[Annotated[float, Field(gt=0, le=_LONGEST_S), SECONDS] | None, NEUTRAL] = None
    """How long an elastic worker waits in a round for peers that live but have not answered; `timeout_s` if not set."""
    rejoin_rounds: Annotated[Number, NEUTRAL] = 2
    """A worker that comes back continues from its own state if that is at most so many rounds old, else from another worker's."""
    pace_s: Annotated[_Pace | Annotated[tuple[_Pace, ...], Field(min_length=1)], NEUTRAL] = 0.0
    """Seconds that an inner step takes at least, one number for all or one per worker: a worker that is faster sleeps, to
    stand for a larger model or a slower machine. Sleeping counts as computing in the trace."""

    @property
    def shape(self) -> Mapping[str, Any] | None:
        """The shape of the local steps, where they follow the learning rate."""
        return steps if isinstance(steps := self.local_steps, Mapping) and "shape" in steps else None

    @property
    def entries(self) -> tuple[tuple[int, Steps], ...]:
        """The local steps by inner step, those of the synchronous start first."""
        return begun_alike(local_steps_entries(self.local_steps), self.synchronous_steps)

    def __post_init__(self) -> Iterator[str]:
        wrong = [*local_steps_faults(self.local_steps)]
        yield from wrong
        lengths = {name: value for name in _IN_TOKENS if (value := getattr(self, name)) is not None}
        if lengths:  # the steps follow from the whole run
            lengths_given = ({"steps": self.steps} if self.steps != LoopSettings.steps else {}) | lengths
            if len(lengths_given) > 1:
                words = " and ".join(f"{name} = {value:g}" for name, value in lengths_given.items())
                yield (f"run has {words}, which each decide the length of the run; keep one of them")
            return
        if wrong or self.shape is not None:
            return
        timetable = timetable_of(self.entries, self.steps)
        fewer, last = timetable.begin(timetable.rounds), timetable.at(timetable.rounds).full_steps
        if fewer != self.steps:
            start = f"run.synchronous_steps = {self.synchronous_steps} and " if self.synchronous_steps else ""
            some = local_steps_entries(self.local_steps)
            one = list(some[0][1]) if isinstance(some[0][1], tuple) else some[0][1]
            given = over_time.line("run.local_steps", some) if len(some) > 1 else f"run.local_steps = {one}"
            whole = (
                f"where no round ends with {start}{given}"
                if timetable.changes
                else f"which is not a multiple of run.local_steps = {last}"
            )
            yield (
                f"run.steps is {self.steps}, {whole}; set run.steps to {f'{fewer} or ' if fewer else ''}{fewer + last}"
            )


def local_steps_faults(value: object) -> Iterator[str]:
    """Faults in a table of local steps by itself."""
    if not isinstance(value, Mapping):
        return
    wrong = [*over_time.table_faults("run.local_steps", value, "qsr")]
    yield from wrong
    kinds: dict[str, tuple[Any, Any]] = {}
    if "shape" in value and not wrong:
        kinds = {".base": (value["base"], Count), ".alpha": (value["alpha"], Positive)}
    elif not wrong:
        each = Count | Annotated[Sequence[Count], Field(min_length=1)]
        kinds = {f"[{step}]": (one, each) for step, one in over_time.entries(value)}
    for where, (one, kind) in kinds.items():
        try:
            check_values(kind, **{f"run.local_steps{where}": one})
        except ConfigError as error:
            yield str(error)


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The settings that decide the length of a run."""

    loop: LoopSettings
    data: DataConfig
    inner: InnerConfig

    @property
    def timetable(self) -> Timetable:
        """The local steps of each round."""
        loop, inner = self.loop, self.inner
        if (shape := loop.shape) is None:
            return timetable_of(loop.entries, loop.steps)
        w = warmup_steps(inner, loop.steps)
        rate = LearningRate(inner.lr, inner.schedule, w, inner.min_lr_ratio, inner.decay_fraction)
        return quadratic(shape["base"], float(shape["alpha"]), rate, loop.steps, loop.synchronous_steps)

    @property
    def full_steps(self) -> int:
        """Inner steps per round of the worker that takes most (H), in the longest of the rounds."""
        return max(one.full_steps for one in self.timetable.stretches)

    @property
    def rounds(self) -> int:
        """Exchanges in the run."""
        return self.timetable.rounds

    @property
    def step_tokens(self) -> int:
        """Tokens one worker trains on in one inner step."""
        return self.data.batch_size * self.data.accumulate * self.data.seq_len

    def local_steps_of(self, worker: int, round: int = 0) -> int:
        """Inner steps of one worker in a round (H_i); those it begins with if they adapt."""
        return self.timetable.at(round).of(worker)


@settings("", also=("method", *EXPERIMENT))
class RunConfig:
    """One run file, validated: everything that decides the numbers of a run, and a little that does not."""

    name: Annotated[FolderName, NEUTRAL] = "run"
    """The name of the run, and of its folder in `runs/` unless --out is given."""
    seed: int = 0
    """Of initial parameters, data order, topology and rounding."""
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 8
    """Replicas of the model; in a real run, processes."""
    rule: Annotated[Choice, NamedIn("rule"), Changeable("lr")] = Choice("gasloc")
    """What workers send after a local phase, and their update from what they receive."""
    topology: Annotated[Choice, NamedIn("topology")] = Choice("random")
    """Who sends to whom in which round, and with what weights."""
    codec: Annotated[Choice, NamedIn("codec")] = Choice("exact")
    """How messages are compressed."""
    server: Annotated[Annotated[Choice, NamedIn("server")] | None, Changeable("lr")] = None
    """A server that takes each message as it comes, in place of rule and topology."""
    pair: Annotated[Choice, NamedIn("pair")] | None = None
    """What workers do that meet in pairs along the edges of the topology, in place of a rule."""
    events: EventsConfig = EventsConfig()
    model: ModelConfig = ModelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    run: LoopSettings = LoopSettings()
    schedule: Schedule = Schedule()
    record: Annotated[RecordConfig, NEUTRAL] = RecordConfig()
    network: Annotated[Mapping[str, Network], NEUTRAL] = field(default_factory=dict)
    """Networks to price the run on, by name."""
    peers: Annotated[Mapping[str, Peer], NEUTRAL] = field(default_factory=dict)
    """The machines that may take part, by name, each with its certificate: all connections are encrypted then, and nobody else
    gets in. Of real runs that are elastic, asynchronous or have a [server]."""

    def __post_init__(self) -> Iterator[str]:
        self._split_totals()
        for key, advice in _PER_WORKER.items():
            value = attrgetter(key)(self)
            if isinstance(value, tuple) and len(value) != self.workers:
                yield (f"{key} has {len(value)} entries for {self.workers} workers; {advice}")
        if self.run.synchronous_steps >= self.run.steps:
            yield (
                f"run.synchronous_steps is {self.run.synchronous_steps} and run.steps is {self.run.steps}, so that nothing "
                "follows the synchronous start; set fewer, or use the rule 'data_parallel'"
            )
        if self.run.shape is not None and is_code(self.inner.optimizer):
            yield (
                f"run.local_steps follows the learning rate, and inner.optimizer is '{self.inner.optimizer}', whose learning "
                "rate is not known; give a table by inner step"
            )
        if isinstance(table := self.run.local_steps, Mapping) and self.run.shape is None:
            yield from over_time.beyond_faults("run.local_steps", table, self.run.steps)
            for step, each in local_steps_entries(table):
                if isinstance(each, tuple) and len(each) != self.workers:
                    yield (
                        f"run.local_steps[{step}] has {len(each)} entries for {self.workers} workers; "
                        f"{_PER_WORKER['run.local_steps']}"
                    )
        yield from misfits(self.pipeline, self.model, self.data, self.workers, self.schedule)
        if self.run.batched > 1:
            yield from self._unbatched()
        must_deal(self.model.experts, self.workers)
        yield from self._misdealt()

    def _misdealt(self) -> Iterator[str]:
        """Faults in the table of peers."""
        if (dealt := sum(peer.workers for peer in self.peers.values())) > self.workers:
            yield (
                f"[peers] have {dealt} workers together and the run has workers = {self.workers}; give each peer fewer, or raise "
                "workers"
            )
        servers = [name for name, peer in self.peers.items() if peer.server]
        if self.peers and (len(servers) == 1) != (self.kind == "server"):
            yield (
                f"{len(servers)} of [peers] have server = true, and a run {'with' if self.kind == 'server' else 'without'} a "
                f"[server] needs {'one' if self.kind == 'server' else 'none'}; set it for the server's machine alone"
            )
        if (sentence := duplicate_certificates(self.peers)) is not None:
            yield sentence

    def _unbatched(self) -> Iterator[str]:
        """Why replicas cannot train as one computation."""
        users_parts = {"model.size": self.model.own, "data.source": self.data.own}
        wrong = [key for key, given in users_parts.items() if given]
        wrong += [key for key, value in _BATCHED.items() if attrgetter(key)(self) != value]
        wrong += ["inner.optimizer"] if self.inner.optimizer not in _STACKED else []
        for key in wrong:
            yield (
                f"run.batched is {self.run.batched} and {key} is {attrgetter(key)(self)!r:.60}, but only whole replicas of the "
                f"built-in model with one of the optimizers {', '.join(_STACKED)} and fixed local steps train as one "
                "computation; remove one of the two"
            )

    def _split_totals(self) -> None:
        """Puts what each worker takes in place of a global batch, steps in place of tokens, and the steps of the warm-up."""
        data, run = self.data, self.run
        if data.global_batch is not None:
            data = replace(data, batch_size=each_batch(data, self.workers), global_batch=None)
            object.__setattr__(self, "data", data)
        tokens = run.tokens
        if run.tokens_per_parameter is not None:
            tokens = tokens_for(run.tokens_per_parameter, self.model, data)
        if tokens is not None and run.shape is not None:
            raise ConfigError(
                f"the run has {tokens:,} tokens and run.local_steps follows the learning rate, whose schedule needs its length; "
                "set run.steps"
            )
        if tokens is not None:
            timetable = timetable_of(run.entries)
            n, each = self.workers, self.length.step_tokens

            def tokens_before(round: int) -> int:
                if self.event_driven:
                    return each * n * timetable.begin(round)
                return each * timetable.total_steps_before(n, round)

            steps = timetable.begin(rounds_for(tokens, tokens_before))
            object.__setattr__(self, "run", replace(run, steps=steps, tokens=None, tokens_per_parameter=None))
        # Written out, so that a run that is resumed with more steps, and a trunk that many share, keep their warm-up.
        inner = replace(self.inner, warmup_steps=warmup_steps(self.inner, self.run.steps))
        object.__setattr__(self, "inner", inner)

    @property
    def length(self) -> RunLength:
        """How long it is, by its local steps as they are written."""
        return RunLength(loop=self.run, data=self.data, inner=self.inner)

    @property
    def kind(self) -> Kind:
        """How the run communicates."""
        if self.server is not None:
            return "server"
        if self.pair is not None:
            return "pair"
        return "rounds" if self.run.wait else "no waiting"

    @property
    def event_driven(self) -> bool:
        """Whether it is asynchronous: delays decide what is computed."""
        return self.kind != "rounds"


def shortened(config: RunConfig, steps: int) -> RunConfig:
    """The run that ends after so many inner steps, without what would come into force later."""

    def cut(value: Any) -> Any:
        if not over_time.changes(value) or "shape" in value:
            return value
        return {step: one for step, one in value.items() if int(step) < steps}

    rule = replace(config.rule, options={name: cut(value) for name, value in config.rule.options.items()})
    return replace(config, rule=rule, run=replace(config.run, steps=steps, local_steps=cut(config.run.local_steps)))


def has_shape(config: RunConfig) -> bool:
    """Whether something changes over the run by a shape, which the length of the run stretches."""
    given: list[Any] = [config.run.local_steps, *config.rule.options.values()]
    return any(over_time.changes(value) and "shape" in value for value in given)


def parse(document: Mapping[str, Any]) -> RunConfig:
    """The validated run in a document. Raises ConfigError for unknown keys (naming the nearest) and impossible values."""
    document = with_settings(document, {})
    if errors := [*_other_kind_errors(document), *_exclusive(document)]:
        raise errors[0]
    return build(RunConfig, _completed(document))


class Survey(NamedTuple):
    """The findings about a document that may have faults."""

    faults: list[str]
    run: RunConfig | None
    """The run that is left without the faulty keys; None where they leave none."""
    unknown: frozenset[str] = frozenset()
    """Dotted keys whose intended values differ from those of `run`."""

    def sure(self, sentences: Iterable[str]) -> list[str]:
        """Further faults of `run` that are new, and do not rest on a key at fault."""
        keys = [re.compile(rf"(?<![\w.]){re.escape(key)}\b") for key in self.unknown]
        known = [one for one in sentences if not any(key.search(one) for key in keys)]
        return [one for one in dict.fromkeys(known) if not any(fault.endswith(one) for fault in self.faults)]


def survey(document: Mapping[str, Any]) -> Survey:
    """All faults of a document by itself, and the run that is left without them, whose parts may not fit together."""
    try:
        document = with_settings(document, {})
    except GossamerError as error:
        return Survey([str(error)], None)
    if foreign := _other_kind_errors(document):
        return Survey([str(error) for error in foreign], None)
    excluded, document = _exclusive(document), _completed(document)
    faults = [str(error) for error in (*excluded, *schema_faults(RunConfig, document))]
    left = soundest(RunConfig, document)
    so_far = Survey(faults, left.settings, left.unknown)
    return so_far._replace(faults=[*faults, *so_far.sure(map(str, left.noted))])


def _other_kind_errors(document: Mapping[str, Any]) -> list[ConfigError]:
    """Why a document is not a run file but an experiment or a network."""
    for key in EXPERIMENT:
        if key in document:
            return [
                ConfigError(f"the file has '{key}', so it is an experiment with several runs; use gossamer compare")
            ]
    for key in ("uplink_bps", "downlink_bps"):
        if key in document:
            network = f"the file has '{key}' at its top, so it is a network file"
            return [ConfigError(f"{network}; give a run file such as configs/gasloc.toml")]
    errors: list[ConfigError] = []
    for (table, key), (default, advice) in GONE.items():
        value = part.get(key, default) if isinstance(part := document.get(table), Mapping) else default
        if value != default:
            errors.append(ConfigError(f"{table}.{key} is {value!r:.60}, and this version has no such key: {advice}"))
    return errors


def _exclusive(document: Mapping[str, Any]) -> Sequence[ConfigError]:
    """Kinds of methods that exclude each other."""
    return [*map(PairingError, incompatibilities.combination_faults(Combination(tables=frozenset(document))))]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the topology of a run in pairs, where it names none, and without removed keys."""
    for table, removed in GONE:
        if isinstance(part := document.get(table), dict):
            document = {**document, table: {key: value for key, value in part.items() if key != removed}}
    return {"topology": "complete", **document} if "pair" in document else document


def dump(config: RunConfig) -> str:
    """The resolved run as TOML; `parse` of it gives the run again."""
    return tomli_w.dumps(_document(config))


def _document(config: RunConfig, *, neutral: bool = True) -> dict[str, Any]:
    """The run as a document, without what its kind of method has no use for."""
    document = toml_value(config, neutral=neutral)
    for kind in {*KINDS} & document.keys():
        document[kind] = _chosen(getattr(config, kind))
    if config.pipeline.stages == 1:
        document.pop("pipeline")  # a whole replica
    else:
        for direction in DIRECTIONS:
            document["pipeline"][direction] = _chosen(getattr(config.pipeline, direction))
    if "network" in document:
        document["network"] = {name: to_options(network) for name, network in config.network.items()}
    kind = next((kind for kind in ("server", "pair") if kind in document), "rule")
    for unused in INSTEAD[kind]:
        document.pop(unused, None)
    if not config.event_driven and (not neutral or config.events == EventsConfig()):
        document.pop("events")  # only runs that follow a clock read it
    return document


def _chosen(choice: Choice) -> dict[str, Any]:
    """A row of a table with its options, as a run file has it."""
    return {"name": choice.name, **toml_value(choice.options)}


def digest(config: RunConfig) -> str:
    """Sixteen hex digits of everything that decides the numbers of a run; equal on all workers of one run."""
    return hashlib.sha256(json.dumps(_deciding(config), sort_keys=True).encode()).hexdigest()[:16]


def decisive(config: RunConfig) -> dict[str, Any]:
    """The dotted keys that decide the numbers of a run, which `digest` is of, with their values."""
    return flat(_deciding(config))


def _deciding(config: RunConfig) -> dict[str, Any]:
    document = _document(config, neutral=False)
    _leave_out(config, document)
    if "pipeline" in document:
        document["pipeline"]["resplit_every"] = 0  # a removed key that digests still hold
    if config.run.adapt or config.event_driven:  # whose seconds decide the numbers
        clock = config.events.network if config.event_driven else None
        document["network"] = {
            name: to_options(network)
            for name, network in config.network.items()
            if name == clock or clock not in config.network
        }
    return document


def _leave_out(given: Any, table: dict[str, Any], prefix: str = "") -> None:
    """Removes the keys that came after `_FIRST` and have the value that a run had before there was such a key.

    Args: `given` are the settings that a table is made of; a row of a table of methods has only the options that were given.
    """
    for option in dataclasses.fields(given):
        key, value = f"{prefix}{option.name}", table.get(option.name)
        if value is None:
            continue
        if key not in _FIRST and value == LEFT_OUT_AT.get(key, toml_value(default_of(option))):
            del table[option.name]
            continue
        inside = getattr(given, option.name)
        for one, own in zip(inside, value, strict=True) if isinstance(inside, tuple) else [(inside, value)]:
            if dataclasses.is_dataclass(one) and not isinstance(one, Choice):
                _leave_out(one, own, f"{key}.")
