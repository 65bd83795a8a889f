"""Before anything is trained or rented: what each method would send on a network, how long it takes, and which to take.

Each candidate becomes the trace that its run would leave, and is priced like a recorded one (`gossamer.network.pricing`). So a
plan uses everything in a network file. With many local steps or few peers a run learns less from each token, and how much less
was measured for one small model (`gossamer.run.planning.measured_losses`). Hence the choice: the lowest measured loss among the
candidates that keep the workers computing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from gossamer.errors import ConfigError, choose
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.estimates.limits import ensure, positives
from gossamer.network.estimates.utilisation import step_seconds
from gossamer.network.links import Links, Network, PerWorker, links_of, to_options
from gossamer.network.pacing import Pace, fitting_steps, uplinks_bps, whole_steps
from gossamer.network.pricing import price
from gossamer.network.timeline import in_words
from gossamer.record.logs.trace import Integers, from_targets
from gossamer.run.planning.measured_losses import MEASURED_FOR, loss_penalty, nearest, penalty_text
from gossamer.topologies.matching import random_matchings

__all__ = [
    "EXACT",
    "PLAN_HEADINGS",
    "Candidate",
    "PlanSettings",
    "RunPlan",
    "best_among",
    "bits_per_parameter",
    "matched_steps",
    "plan",
    "plan_rows",
    "run_toml",
    "stepped",
    "with_tables",
    "workers_of",
]

EXACT: Mapping[str, float] = {"exact": 32.0}
"""The codec that sends fp32 as it is."""

_METHODS: dict[str, tuple[str, int | None]] = {
    "data parallel": ("data_parallel", None),
    "DiLoCo": ("diloco", None),
    "GASLoC 2-Peer": ("gasloc", 2),
    "GASLoC 1-Peer": ("gasloc", 1),
}
"""Rule and peers of each method (None for everyone), ordered from most mixing to least."""

_BACK_BITS = 16.0
"""Per parameter of the sum of a lossy mean, in bf16."""
_LIMIT_WORKERS = 2000
_LIMIT_MESSAGES = 10**7
"""A mean has a message for each pair of workers; a trace of more messages would take gigabytes."""


def bits_per_parameter(codecs: Iterable[str], parameters: int) -> dict[str, float]:
    """Of each codec on a model of so many parameters, and of `EXACT`. Raises ConfigError for one that is not in the table.

    >>> bits_per_parameter(["int8"], 10_000)["exact"]
    32.0
    """
    from gossamer.codecs import CODECS  # which needs torch
    from gossamer.codecs.message import payload_bytes

    bits = dict(EXACT)
    for name in codecs:
        if name not in CODECS:
            raise ConfigError(choose("codec", name, CODECS) + "; correct the name")
        bits[name] = 8 * payload_bytes(CODECS[name](), parameters) / parameters
    return bits


class Candidate(NamedTuple):
    """A method with its settings, and what it costs."""

    method: str
    codec: str
    back: str | None
    """The codec of the sums that come back from their owners; None where there are no sums, or they come back in fp32."""
    local_steps: tuple[int, ...]
    """Inner steps of each worker in a round."""
    round_s: float
    """Seconds of a round, mean over the planned rounds."""
    round_bytes: float
    """Bytes that a worker sends in a round, mean over the workers."""
    utilisation: float
    """Share of the time spent computing, mean over the workers."""
    seconds_per_token: float
    """Seconds of wall-clock per token of all workers together."""
    loss_penalty: float | None = None
    """Nats above data parallelism after as many tokens, in a small model and without a codec; None where it was not measured."""
    between_stages: float = 0.0
    """Share of the time in which the stages of a worker wait for each other, mean over the workers."""

    @property
    def full_steps(self) -> int:
        """Most inner steps that any worker takes in a round."""
        return max(self.local_steps)

    @property
    def in_local_phases(self) -> float:
        """Share of the time that the exchange leaves to inner steps; what their stages make of it is the same for all."""
        return self.utilisation + self.between_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What is trained, and which candidates are tried.

    Raises: ConfigError for a number out of bounds.
    """

    vocab_size: int = 256
    workers: int | None = None
    """Needed where the network describes any number of them."""
    seq_len: int = 128
    """Tokens of a sequence; times `batch_size`, the tokens of a worker's inner step."""
    batch_size: int = 8
    """Sequences of a worker's inner step."""
    local_steps: Sequence[int] = (15, 30, 60, 120, 240)
    """Local steps to try."""
    codecs: Mapping[str, float] = field(default_factory=lambda: EXACT)
    """Bits per parameter by name, for DiLoCo and GASLoC."""
    target: float = 0.9
    """Compute utilisation to reach; of replicas in stages, the share of the time that the exchange leaves to inner steps."""
    step_s: float | None = None
    """Seconds of an inner step, where the network gives none; or give `peak_flops`."""
    peak_flops: float | None = None
    """FLOP/s of a worker, from which an inner step takes `6·N·tokens / (peak_flops·mfu)` seconds."""
    mfu: float = 0.4
    """Share of the peak that is in use."""
    rounds: int = 64
    """Rounds to price, fewer where all are alike. A network that changes later is priced as it is until then."""
    seed: int = 0

    def __post_init__(self) -> None:
        ensure("the target utilisation", self.target, 0 < self.target <= 1, "above 0 and at most 1; 0.9 is usual")
        steps = list(self.local_steps)
        ensure("local_steps", steps, min(steps, default=0) >= 1, "a list of whole numbers from 1, such as [15, 30]")
        for name in ("seq_len", "batch_size"):
            value = getattr(self, name)
            ensure(name, value, value >= 1, "at least 1; give that of a worker's inner step")
        positives(**{name: v for name in ("step_s", "peak_flops") if (v := getattr(self, name)) is not None})
        ensure("mfu", self.mfu, 0 < self.mfu <= 1, "above 0 and at most 1; 0.4 is usual")
        for name, bits in self.codecs.items():
            ensure(f"the size of codec '{name}'", bits, 0 < bits <= 64, "above 0 and at most 64 bits per parameter")

    @property
    def step_tokens(self) -> int:
        """Tokens of a worker's inner step."""
        return self.seq_len * self.batch_size


class RunPlan(NamedTuple):
    """All candidates, the chosen one, and what they were made for."""

    candidates: tuple[Candidate, ...]
    best: Candidate
    network: Network
    """With the step time that was used."""
    model: ModelConfig
    parameters: int
    options: PlanSettings
    replica: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Further keys of the run file, in tables, where a replica is cut into stages."""


def plan(
    network: Network, model: ModelConfig, options: PlanSettings = PlanSettings(), computing: PerWorker = 1.0
) -> RunPlan:  # fmt: skip
    """Prices data parallelism, DiLoCo and GASLoC with one and two peers, and chooses one.

    DiLoCo is tried with each of `options.local_steps`. GASLoC takes these as the steps of its fastest worker; the others take
    as many as let them be ready in time (`matched_steps`). The sums of a lossy mean come back in bf16 where that is less to
    send; otherwise its payloads go to everyone whole.

    `best_among` says which is chosen.

    Args: `computing` is as in `gossamer.network.pricing.price`.
    Raises: ConfigError for what cannot be, or when nothing gives the step time.
    Cost: some 10 ms per candidate, up to a minute where links are uneven or shared and there are hundreds of workers.
    """
    n = workers_of(network, options)
    if not 2 <= n <= _LIMIT_WORKERS:
        raise ConfigError(
            f"a plan for {n} workers was asked for but it needs from 2 to {_LIMIT_WORKERS}; choose another number"
        )
    parameters = parameter_count(model, options.vocab_size)
    network = stepped(network, parameters, options)
    candidates = [_priced(sketch, network, parameters, options, computing) for sketch in _sketches(n, options)]
    return RunPlan(tuple(candidates), best_among(candidates, options.target), network, model, parameters, options)


def best_among(candidates: Sequence[Candidate], target: float) -> Candidate:
    """The candidate with the lowest measured loss among those that reach the target utilisation.

    Where replicas are in stages, which wait for each other however many local steps there are, these waits count as computing.
    If none reaches it, among those as fast as the fastest or nearly so: in its time they train on at least the target's share of
    its tokens. Of equals, and where no loss was measured, the one with the fewest local steps, then the first.
    """
    enough = [one for one in candidates if one.in_local_phases >= target]
    if not enough:
        fastest = min(one.seconds_per_token for one in candidates)
        enough = [one for one in candidates if target * one.seconds_per_token <= fastest]
    return min(enough, key=lambda one: (math.inf if one.loss_penalty is None else one.loss_penalty, one.full_steps))


def workers_of(network: Network, options: PlanSettings) -> int:
    """For how many workers to plan. Raises ConfigError when nothing gives their number."""
    n = network.workers if options.workers is None else options.workers
    if n is None:
        raise ConfigError(
            f"the network is the same for any number of workers and workers is {n}; give the number of workers"
        )
    return n


def stepped(network: Network, parameters: int, options: PlanSettings) -> Network:
    """The network with the seconds of an inner step. Raises ConfigError when nothing gives them."""
    if network.step_s is not None:
        return network
    if options.peak_flops is not None:
        return replace(network, step_s=step_seconds(parameters, options.step_tokens, options.peak_flops, options.mfu))
    if options.step_s is None:
        raise ConfigError(
            f"the seconds of an inner step are {options.step_s} and the network gives no step_s; give --step-s or "
            "--peak-flops, or step_s in the network file"
        )
    return replace(network, step_s=options.step_s)


class _Sketch(NamedTuple):
    """A candidate before it is priced."""

    n: int
    method: str
    full_steps: int
    codec: str
    bits: float
    """Per parameter of a payload."""

    @property
    def peers(self) -> int | None:
        return _METHODS[self.method][1]


def _sketches(n: int, options: PlanSettings) -> Iterator[_Sketch]:
    for method, (rule, peers) in _METHODS.items():
        alone = rule == "data_parallel"  # one local step, and gradients as they are
        if peers is None or peers < n:
            for steps in (1,) if alone else sorted(set(options.local_steps)):
                for codec, bits in (EXACT if alone else options.codecs).items():
                    yield _Sketch(n, method, steps, codec, bits)


def _priced(
    sketch: _Sketch, network: Network, parameters: int, options: PlanSettings, computing: PerWorker
) -> Candidate:  # fmt: skip
    n, method, steps, codec, bits = sketch
    payload_bytes = math.ceil(parameters * bits / 8)
    back, own = None, (steps,) * n
    if sketch.peers is not None:
        own = matched_steps(links_of(network, n), steps, sketch.peers * payload_bytes)
        targets = _gossip_targets(n, sketch.peers, options.rounds, options.seed)
        trace = from_targets(targets, payload_bytes, own)
    else:
        targets = _everyone(n, _rounds_of_means(network, n, options.rounds))
        back = "bf16" if codec not in EXACT and (bits + _BACK_BITS) / n < bits else None
        if back or codec in EXACT:
            mean_bytes = math.ceil(parameters * (bits + _BACK_BITS) / 8) if back else 2 * payload_bytes
            trace = from_targets(targets, round(mean_bytes / n), own, kind="mean")
        else:
            trace = from_targets(targets, payload_bytes, own)
    timeline = price(trace, network, computing)
    return Candidate(
        method=method,
        codec=codec,
        back=back,
        local_steps=own,
        round_s=timeline.total_s / trace.rounds,
        round_bytes=float(trace.sent_bytes.mean()) / trace.rounds,
        utilisation=timeline.mean_utilisation,
        seconds_per_token=timeline.total_s / (options.step_tokens * int(trace.steps.sum())),
        loss_penalty=loss_penalty(method, steps),
        between_stages=timeline.mean_between_stages,
    )


def matched_steps(links: Links, full_steps: int, sent_bytes: float) -> tuple[int, ...]:
    """How many inner steps each worker takes so that all finish sending together, up to less than one step.

    The worker that would finish first with `full_steps` takes that many (`gossamer.network.pacing`). The workers of a site
    share its link evenly. A slow downlink does not count: what comes late through it is sent by somebody else.

    Raises: ConfigError when a worker needs no time for a step.

    >>> fast = Network(uplink_bps=(4.8e6, 4.8e5), downlink_bps=4.8e6, step_s=1.0)
    >>> matched_steps(links_of(fast, 2), 30, sent_bytes=1e6)
    (30, 15)
    """
    assert links.step_s is not None
    if not links.step_s.min() > 0:
        raise ConfigError(
            f"step_s goes down to {links.step_s.min()} but must be above 0 to match workers by it; give seconds of a step"
        )
    exchange_s = 8 * sent_bytes / uplinks_bps(links)
    paces = [Pace(*pace) for pace in zip(links.step_s.tolist(), exchange_s.tolist(), strict=True)]
    return tuple(whole_steps(fitting_steps(pace, paces, full_steps), full_steps) for pace in paces)


def run_toml(
    plan: RunPlan, candidate: Candidate | None = None, *, name: str = "planned", steps: int = 300, adapt: bool = False,
    weigh_steps: bool = False,
) -> str:  # fmt: skip
    """A run file that trains as planned, on this machine's Python sources read as bytes; change `data` for anything else.

    Outer learning rate and momentum are those that were best in a small model with about as many local steps
    (`gossamer.run.planning.measured_losses`). The inner learning rate that they go with stands in a comment, as it depends on
    the model.

    Args:
        candidate: the best one unless given.
        steps: inner steps; rounded up to whole rounds.
        adapt, weigh_steps: as in the `[run]` table; the planned local steps are then the initial ones. Ignored for data
            parallelism, which has no local steps.
    """
    chosen = plan.best if candidate is None else candidate
    rule, peers = _METHODS[chosen.method]
    if peers is not None and chosen.codec not in EXACT:
        rule = "anchored_gasloc"  # the same bytes, but of differences
    own = chosen.local_steps
    measured_at, tuned = nearest(chosen.method, chosen.full_steps)
    outer = {key: value for key in ("lr", "momentum") if (value := getattr(tuned, key)) is not None}
    document: dict[str, Any] = {
        "name": name,
        "workers": len(own),
        "seed": plan.options.seed,
        "rule": {"name": rule, **outer},
        "topology": {"name": "complete"} if peers is None else {"name": "random", "peers": peers},
        "codec": {"name": chosen.codec, **({"back": chosen.back} if chosen.back else {})},
        "model": {
            key: value for key in ModelConfig.__dataclass_fields__ if (value := getattr(plan.model, key)) is not None
        },
        "data": {"source": "stdlib", "seq_len": plan.options.seq_len, "batch_size": plan.options.batch_size},
        "run": {
            "steps": -(-steps // chosen.full_steps) * chosen.full_steps,
            "local_steps": own[0] if len(set(own)) == 1 else list(own),
            **({"adapt": True} if adapt and chosen.full_steps > 1 else {}),
            **({"weigh_steps": True} if weigh_steps and rule != "data_parallel" else {}),
        },
        "network": {"planned": to_options(plan.network)},
    }
    document = with_tables(document, plan.replica)
    head = (
        f"# {chosen.method} with {chosen.full_steps} local steps, planned for {plan.parameters:,} parameters: "
        f"{chosen.round_bytes / 1e6:.4g} MB sent and {chosen.round_s:.4g} s a round, "
        f"{in_words(chosen.utilisation, chosen.between_stages)}.\n"
        f"# Best at {measured_at} local step{'s' if measured_at > 1 else ''}, for {MEASURED_FOR}: inner.lr = {tuned.inner_lr:g}"
        f"{', with the lr and momentum of [rule]' if outer else ''}. gossamer tune searches for your model.\n"
    )
    return head + tomli_w.dumps(document)


def with_tables(document: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A run file with further keys in its tables, which replace those of the same name.

    >>> with_tables({"name": "a", "run": {"steps": 1}}, {"run": {"seed": 2}})
    {'name': 'a', 'run': {'steps': 1, 'seed': 2}}
    """
    return {**document, **{table: {**document.get(table, {}), **keys} for table, keys in tables.items()}}


PLAN_HEADINGS = ("method", "codec", "steps", "MB/round", "s/round", "computing", "h/1e9 tokens", "loss")
"""Of the columns of `plan_rows`."""


def plan_rows(candidates: Iterable[Candidate]) -> list[tuple[str, ...]]:
    """Candidates as text, for a table under `PLAN_HEADINGS`."""
    rows = []
    for one in candidates:
        most, fewest = one.full_steps, min(one.local_steps)
        rows.append(
            (
                one.method,
                f"{one.codec}, {one.back} back" if one.back else one.codec,
                str(most) if fewest == most else f"{fewest}-{most}",
                f"{one.round_bytes / 1e6:.4g}",
                f"{one.round_s:.4g}",
                f"{one.utilisation:.1%}",
                f"{one.seconds_per_token * 1e9 / 3600:.4g}",
                penalty_text(one.method, most),
            )
        )
    return rows


def _rounds_of_means(network: Network, n: int, rounds: int) -> int:
    if not network.jitter and not network.changes:
        return 1
    return max(1, min(rounds, _LIMIT_MESSAGES // n**2))


def _everyone(n: int, rounds: int) -> Integers:
    """All others as targets of each worker, `[rounds, n, n - 1]`."""
    others = np.array([[j for j in range(n) if j != i] for i in range(n)])
    return np.broadcast_to(others, (rounds, *others.shape))


def _gossip_targets(n: int, peers: int, rounds: int, seed: int) -> Integers:
    """Targets of each worker in the topology "random", `[rounds, n, peers]`; its own number where it sends nothing."""
    targets = np.tile(np.arange(n)[:, None], (rounds, 1, peers))
    for r in range(rounds):
        matchings = random_matchings(n, peers, seed, r).reshape(peers, -1, 2)
        for k, pairs in enumerate(matchings):
            targets[r, pairs[:, 0], k], targets[r, pairs[:, 1], k] = pairs[:, 1], pairs[:, 0]
    return targets
