"""Before anything is trained or rented: what each method would send on a network, how long it takes, and which to take.

Each candidate becomes the trace that its run would leave, and is priced like a recorded one (`gossamer.network.pricing`). So a
plan uses everything in a network file. With many local steps or few peers a run learns less from each token, and how much less is
in `gossamer.run.planning.expected_loss`. Hence the choice: the lowest expected loss in the time, and where several cannot be told
apart, the one that needs least time (`gossamer.run.planning.choice`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from gossamer.errors import ConfigError, choose
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.estimates.goodput import ensure
from gossamer.network.estimates.utilisation import step_seconds
from gossamer.network.links import Links, MeanKind, Network, PerWorker, links_of, to_options
from gossamer.network.pacing import Pace, cycle_s, fitting_steps, stretches_of, uplinks_bps, whole_steps
from gossamer.network.pricing import price, price_everyone, price_together
from gossamer.network.timeline import Timeline, spread_s
from gossamer.record.logs.trace import Integers, Trace, from_targets
from gossamer.report.table import digits_text
from gossamer.run.planning.choice import ALONE, SITE_ALONE, Candidate, Pick, pick
from gossamer.run.planning.expected_loss import EXACT_CODECS, TOKENS_PER_PARAMETER, Law, LossScale
from gossamer.run.planning.teams import (
    MOST_COUNTED,
    kind_of,
    machines,
    network_without,
    places_of,
    site_teams,
    sites_as_workers,
    slow_teams,
)
from gossamer.settings.options import Positive, Share, check_values
from gossamer.topologies.sequences import random_matchings

EXACT: Mapping[str, float] = {"exact": 32.0}
"""The codec that sends fp32 as it is."""
BYTES = 256
"""The vocabulary of a run file that reads text as bytes."""

METHODS: dict[str, tuple[str, int | None]] = {
    "data parallel": ("data_parallel", None),
    "DiLoCo": ("diloco", None),
    "GASLoC 2-Peer": ("gasloc", 2),
    "GASLoC 1-Peer": ("gasloc", 1),
}
"""Rule and peers of each method (None for everyone), ordered from most mixing to least."""

BACKWARD = 2 / 3
"""The share of an inner step that backward takes, and DDP hides an all-reduce behind: two of its six FLOPs a parameter are
forward."""
COLLECTIVES: tuple[MeanKind, ...] = ("owners", "ring", "tree")
"""Ways to carry an all-reduce, of which data parallelism takes the quickest."""
_BF16_BITS = 16.0
"""Bits of a number in bf16, in which the sum of a lossy mean comes back."""
_FSDP = 1.5
"""The bytes that FSDP2 sends in a step, relative to an all-reduce: weights are gathered for forward and backward, gradients
scattered."""
_MORE_DRAWS = 4
"""The factor of rounds to price where they vary and not all workers wait for each other, as these drift apart slowly."""
MOST_STRETCHES = 16
"""Stretches between changes of a network that are priced each; with more of them, only first rounds are."""
_LARGEST = 10**12
_LIMIT_WORKERS = 100_000
_LIMIT_LISTED = MOST_COUNTED
"""Workers among whom all messages of a mean are listed; of more they are priced at once, where no links are shared."""
_LIMIT_SHARED = 2000
"""Workers where links are shared or change, as every message is then replayed."""
_LIMIT_CELLS = 800_000
"""Rounds times workers."""
_LIMIT_MESSAGES = 10**7
"""A mean has a message for each pair of workers; a trace of more messages would take gigabytes."""


def bits_per_parameter(codecs: Iterable[str], parameters: int) -> dict[str, float]:
    """Bits per parameter of each codec on a model of this size, and of `EXACT`. Raises ConfigError for a codec not in the table.

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


BOUNDS: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "seq_len", "batch_size"), Annotated[int, Field(ge=1, le=_LARGEST)]),
    **dict.fromkeys(("tokens", "hours", "step_s", "peak_flops"), Positive),
    "mfu": Share,
}
"""The numbers of `PlanSettings`, with their bounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """The model and its training, and the candidates that are tried.

    Raises: ConfigError for a number out of bounds.
    """

    vocab_size: int = 256
    workers: int | None = None
    """Needed where the network describes any number of them."""
    seq_len: int = 128
    """Tokens of a sequence; times `batch_size`, the tokens of a worker's inner step."""
    batch_size: int = 8
    """Sequences of a worker's inner step."""
    tokens: float | None = None
    """Tokens to train on; the default is 20 for each parameter."""
    hours: float | None = None
    """Hours to train for, in place of `tokens`."""
    local_steps: Sequence[int] = (5, 15, 30, 60, 120, 240, 480)
    """Local steps to try."""
    codecs: Mapping[str, float] = field(default_factory=lambda: EXACT)
    """Bits per parameter by name, for DiLoCo and GASLoC. Data parallelism is tried with the exact ones, and with bf16 where one
    is lossy."""
    keep_all: bool = False
    """Whether candidates without the workers that hold all others up are left out."""
    step_s: float | None = None
    """Seconds of an inner step, where the network gives none; or give `peak_flops`."""
    peak_flops: float | None = None
    """FLOP/s of a worker, from which an inner step takes `6·N·tokens / (peak_flops·mfu)` seconds."""
    mfu: float = 0.4
    """Share of the peak that is in use."""
    rounds: int = 64
    """Rounds to price, fewer where all are alike; as many for each stretch between two changes of the network."""
    sites: Literal["too", "only", "never"] = "too"
    """Whether sites take part as one worker each: too, beside single machines; only they, in shards under FSDP2, as no machine
    holds a replica; or never, as a replica is in stages."""
    seed: int = 0
    source: str = "stdlib"
    """The text of the run file, as in data.source."""
    tokenizer: str | None = None
    """The tokenizer of the run file, as in data.tokenizer; bytes unless given."""
    law: Law | None = None
    """The law of the losses on that text, where it is known."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.hours is not None:
            raise ConfigError(f"tokens is {self.tokens:g} and hours is {self.hours:g}; give one of them")
        steps = list(self.local_steps)
        held = min(steps, default=0) >= 1 and max(steps) <= _LARGEST
        ensure("local_steps", steps, held, f"a list of whole numbers from 1 to {_LARGEST}, such as [15, 30]")
        for name, kind in BOUNDS.items():
            if (value := getattr(self, name)) is not None:
                check_values(kind, **{name: value})
        for name, bits in self.codecs.items():
            ensure(f"the size of codec '{name}'", bits, 0 < bits <= 64, "above 0 and at most 64 bits per parameter")

    @property
    def step_tokens(self) -> int:
        """Tokens of a worker's inner step."""
        return self.seq_len * self.batch_size

    @property
    def data_table(self) -> dict[str, Any]:
        """The table `data` of a run file."""
        table: dict[str, Any] = {"source": self.source, "seq_len": self.seq_len, "batch_size": self.batch_size}
        return {**table, "tokenizer": self.tokenizer} if self.tokenizer else table


class RunPlan(NamedTuple):
    """All candidates, the choice among them, and what they were made for."""

    candidates: tuple[Candidate, ...]
    choice: Pick
    network: Network
    """With the step time that was used."""
    model: ModelConfig
    parameters: int
    options: PlanSettings
    replica: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Further keys of the run file, in tables, where a replica is cut into stages."""

    @property
    def best(self) -> Candidate:
        """The choice."""
        return self.choice.best

    @property
    def workers(self) -> int:
        """The number of all workers, including those that the choice leaves out."""
        return self.choice.scale.workers

    def rounds_of(self, candidate: Candidate) -> int:
        """Whole rounds of a run of a candidate, as many as the tokens or the hours pay for; at least one."""
        tokens = self.choice.scale.tokens if self.options.hours is None else self.choice.tokens_of(candidate)
        return max(1, math.floor(tokens / (self.options.step_tokens * candidate.taken) * (1 + 1e-9)))

    def length_of(self, candidate: Candidate, rounds: int) -> str:
        """Comments of a run file with so many rounds: how long they take, and whose vocabulary the text needs."""
        tokens = rounds * self.options.step_tokens * candidate.taken
        some = f"{rounds:,} round{'s' if rounds > 1 else ''}"
        length = f"# {some}, {digits_text(rounds * candidate.round_s / 3600)} h: {tokens:.4g} tokens of all workers together.\n"
        if self.options.vocab_size == BYTES or self.options.tokenizer:
            return length
        return (
            f"{length}# Planned for a vocabulary of {self.options.vocab_size:,}, and reads bytes, which are {BYTES}: give "
            "data.tokenizer the tokenizer of your text.\n"
        )


def plan(
    network: Network, model: ModelConfig, options: PlanSettings = PlanSettings(), computing: PerWorker = 1.0
) -> RunPlan:
    """Prices data parallelism, DiLoCo and GASLoC with one and two peers, with all workers and without slow ones, and chooses.

    One machine alone, of each kind, and each site alone in data parallelism are among the candidates; the former is a plan for
    one worker.

    DiLoCo is tried with each of `options.local_steps`. GASLoC takes these as the steps of its fastest worker; the others take
    as many as let them be ready in time (`matched_steps`), and so does DiLoCo once more, where that are fewer. The sums of a
    lossy mean come back in bf16 where that is less to send; otherwise its payloads go to everyone whole. `slow_teams` lists
    the workers that may be left out.

    Args: `computing` is as in `gossamer.network.pricing.price`.
    Raises: ConfigError for what cannot be, or when nothing gives the step time.
    Cost: some ms per candidate, up to a minute where links are shared and there are hundreds of workers, and two minutes for
        100,000.
    """
    listed = network.shares or network.loses
    n, most = workers_of(network, options), _LIMIT_SHARED if listed else _LIMIT_WORKERS
    if not 1 <= n <= most:
        of_links = " where links are shared or change" if network.shares else " where packets are lost"
        shared = of_links if listed else ""
        raise ConfigError(
            f"a plan for {n} workers was asked for but it needs from 1 to {most}{shared}; choose another number"
        )
    parameters = parameter_count(model, options.vocab_size)
    network = stepped(network, parameters, options)
    priced_for = _PricedFor(network, parameters, options, computing)
    candidates = _candidates(priced_for, n)
    tokens, seconds = options.tokens or TOKENS_PER_PARAMETER * parameters, None
    if network.changes and options.hours is None:  # all are compared in the time in which the first has read the tokens
        hours = tokens * min(one.seconds_per_token for one in candidates) / 3600
        candidates = _candidates(priced_for._replace(options=replace(options, tokens=None, hours=hours)), n)
    if options.hours is not None:
        seconds = 3600 * options.hours
        tokens = seconds / min(one.seconds_per_token for one in candidates)
    per_e_fold = None if options.law is None else options.law.per_e_fold(tokens)
    steps = tokens / (options.step_tokens * n)
    scale = LossScale(parameters, n, tokens, options.vocab_size, per_e_fold, steps=steps, seconds=seconds)
    chosen = pick(choosable(candidates, options), scale, options.hours)
    return RunPlan(tuple(candidates), chosen, network, model, parameters, options)


class _PricedFor(NamedTuple):
    """What a price depends on besides the candidate."""

    network: Network
    parameters: int
    options: PlanSettings
    computing: PerWorker
    """As in `gossamer.network.pricing.price`."""


def _candidates(whole: _PricedFor, n: int) -> list[Candidate]:
    """The priced candidates: of all workers, without slow ones, of one machine alone, and of sites."""
    network, options = whole.network, whole.options
    if options.sites == "only":
        alone = [*_sites_alone(whole, n)]
        return [*alone, *_site_candidates(whole, alone)]
    teams: list[tuple[tuple[int, ...], PerWorker]] = [((), whole.computing)]
    if not options.keep_all:
        teams += [(left_out, 1.0) for left_out in slow_teams(network, n, whole.parameters)]
    if not options.keep_all and not network.stages and n <= MOST_COUNTED:
        teams += [(left_out, 1.0) for left_out in _other_sites(network, n, [without for without, _ in teams])]
    candidates, sites = list[Candidate](), site_teams(network, n)
    for without, part in teams:
        team, sketches = network_without(network, n, without), _sketches(n - len(without), options)
        kept = [one for one in sketches if one.method != "data parallel" or without not in sites]
        priced = _all_priced(kept, whole._replace(network=team, computing=part))
        candidates += [one._replace(left_out=without) for one in priced]
    candidates += _alone(whole, n)
    return [*candidates, *_site_candidates(whole, candidates)]


def _other_sites(network: Network, n: int, teams: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The teams of one site each whose links and machines are not those of a team that is tried anyhow."""
    known, others = [kind_of(network, n, without) for without in teams], list[tuple[int, ...]]()
    for left_out in site_teams(network, n):
        if (site := kind_of(network, n, left_out)) not in known:
            known.append(site)
            others.append(left_out)
    return others


def choosable(candidates: Iterable[Candidate], options: PlanSettings) -> list[Candidate]:
    """The candidates that may be taken: without those that leave workers out, where all are to stay."""
    return [one for one in candidates if not (options.keep_all and one.left_out)]


def _alone(whole: _PricedFor, n: int) -> Iterator[Candidate]:
    """One machine of each kind, and each site."""
    network, options, share = whole.network, whole.options, np.broadcast_to(np.asarray(whole.computing, float), n)
    for worker, step_s in machines(network, n):
        if not step_s > 0:
            raise ConfigError(
                f"step_s of worker {worker} is {step_s} but must be above 0 to plan by it; give seconds of a step"
            )
        share_here = float(share[worker])
        yield Candidate(
            method=ALONE,
            codec="exact",
            back=None,
            local_steps=(1,),
            round_s=step_s,
            round_bytes=0.0,
            utilisation=share_here,
            seconds_per_token=step_s / options.step_tokens,
            between_stages=1 - share_here,
            left_out=tuple(i for i in range(n) if i != worker),
        )
    yield from _sites_alone(whole, n)


def _sites_alone(whole: _PricedFor, n: int) -> Iterator[Candidate]:
    """The workers of each site in data parallelism, or in shards."""
    network, options, share = whole.network, whole.options, np.broadcast_to(np.asarray(whole.computing, float), n)
    for left_out in site_teams(network, n):
        team, part = network_without(network, n, left_out), tuple(np.delete(share, left_out))
        sketches = [one for one in _sketches(n - len(left_out), options) if one.method == "data parallel"]
        if options.sites == "only":
            sketches = [one._replace(bits=_FSDP * one.bits) for one in sketches]
        for one in _all_priced(sketches, whole._replace(network=team, computing=part)):
            yield one._replace(method=SITE_ALONE, left_out=left_out)


def workers_of(network: Network, options: PlanSettings) -> int:
    """The number of workers to plan for. Raises ConfigError when it is not given."""
    n = network.workers if options.workers is None else options.workers
    if n is None:
        raise ConfigError(
            f"the network is the same for any number of workers, and none is given beside its "
            f"{sorted(to_options(network))}; give the number of workers (--workers)"
        )
    return n


def _site_candidates(whole: _PricedFor, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Methods between sites, each of which is one worker with the batches of all its workers."""
    coarse = _with_sites_as_workers(whole.network, candidates)
    if coarse is None or whole.network.stages or whole.options.sites == "never":
        return
    site = len(next(iter(places_of(whole.network).values())))
    options = replace(whole.options, batch_size=site * whole.options.batch_size, workers=None)
    sketches = [one for one in _sketches(len(coarse.sites), options) if one.method != "data parallel"]
    for one in _all_priced(sketches, whole._replace(network=coarse, options=options, computing=1.0)):
        yield one._replace(site=site)


def _with_sites_as_workers(network: Network, candidates: Iterable[Candidate]) -> Network | None:
    """The network whose workers are the sites, with their seconds of a step in data parallelism; None where they cannot be."""
    step_s, places = dict[str, float](), places_of(network)
    for one in candidates:
        if one.method == SITE_ALONE:
            (name,) = [name for name, workers in places.items() if not {*workers} & {*one.left_out}]
            step_s[name] = min(one.round_s, step_s.get(name, math.inf))
    return sites_as_workers(network, step_s) if step_s.keys() == places.keys() else None


def network_of(plan: RunPlan, candidate: Candidate) -> Network:
    """The network of the participants of a candidate, as its run file has it."""
    if candidate.site == 1:
        return network_without(plan.network, plan.workers, candidate.left_out)
    coarse = _with_sites_as_workers(plan.network, plan.candidates)
    assert coarse is not None, "it was priced there"
    return coarse


def stepped(network: Network, parameters: int, options: PlanSettings) -> Network:
    """The network with the seconds of an inner step. Raises ConfigError when nothing gives them."""
    if network.step_s is not None:
        return network
    if options.peak_flops is not None:
        return replace(network, step_s=step_seconds(parameters, options.step_tokens, options.peak_flops, options.mfu))
    if options.step_s is None:
        raise ConfigError(
            "nothing says how long an inner step takes, as the network gives no step_s; give --step-s or --peak-flops, or "
            "step_s in the network file"
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
    matched: bool
    """Whether slow workers take fewer local steps, so that all are ready in time."""

    @property
    def peers(self) -> int | None:
        return METHODS[self.method][1]


def _sketches(n: int, options: PlanSettings) -> Iterator[_Sketch]:
    exact = {name: bits for name, bits in options.codecs.items() if name in EXACT_CODECS} or EXACT
    if options.codecs.keys() - {*EXACT_CODECS}:  # so that what compresses is not compared with fp32 alone
        exact = {**exact, "bf16": _BF16_BITS}
    for method, (rule, peers) in METHODS.items():
        alone = rule == "data_parallel"  # one local step, and gradients as they are or cast
        if n > 1 and (peers is None or peers < n):
            for steps in (1,) if alone else sorted(set(options.local_steps)):
                for codec, bits in (exact if alone else options.codecs).items():
                    for matched in (False, True) if peers is None and not alone else (not alone,):
                        yield _Sketch(n, method, steps, codec, bits, matched)


def over_time(
    network: Network,
    n: int,
    priced: Callable[[Network], list[Candidate]],
    parameters: int,
    options: PlanSettings,
) -> list[Candidate]:
    """Candidates at their mean price over a run, where each stretch between two changes of the network has a price.

    Args: `priced` are the same candidates on a network that stays as it is.
    """
    if not network.changes:
        return priced(network)
    if len(stretches := stretches_of(network, n)) > MOST_STRETCHES:
        return [one._replace(spread_s=0.0) for one in priced(network)]  # a change is no chance
    known = list[tuple[Network, list[Candidate]]]()
    for _, now in stretches:
        if all(now != one for one, _ in known):
            known.append((now, priced(now)))
    each = [next(prices for one, prices in known if one == now) for _, now in stretches]
    begin = [at_s for at_s, _ in stretches]
    return [_mean_price(begin, ones, parameters, options) for ones in zip(*each, strict=True)]


def _mean_price(begin: Sequence[float], ones: Sequence[Candidate], parameters: int, options: PlanSettings) -> Candidate:
    """The price of a run that takes its rounds at the price of the stretch in which they lie, until its tokens or hours end."""
    left_s, rounds = math.inf, math.inf
    if options.hours is not None:
        left_s = 3600 * options.hours
    else:
        tokens = options.tokens or TOKENS_PER_PARAMETER * parameters
        rounds = max(1.0, tokens / (options.step_tokens * ones[0].taken))
    spent = list[float]()
    for since, until, one in zip(begin, [*begin[1:], math.inf], ones, strict=True):
        spent.append(min(until - since, left_s, rounds * one.round_s))
        left_s, rounds = left_s - spent[-1], rounds - spent[-1] / one.round_s
    share = np.array(spent) / sum(spent)

    def mean(name: str) -> float:
        return float(share @ [getattr(one, name) for one in ones])

    def mean_s(name: str) -> float:
        return 1 / float(share @ [1 / getattr(one, name) for one in ones])

    longest, round_s = ones[int(share.argmax())], mean_s("round_s")
    spread = math.hypot(*(part * one.spread_s / one.round_s for part, one in zip(share, ones, strict=True)))
    return longest._replace(
        round_s=round_s,
        spread_s=round_s * spread,
        seconds_per_token=mean_s("seconds_per_token"),
        utilisation=mean("utilisation"),
        between_stages=mean("between_stages"),
        unhidden_round_s=None if longest.unhidden_round_s is None else mean_s("unhidden_round_s"),
    )


def _all_priced(sketches: Sequence[_Sketch], team: _PricedFor) -> list[Candidate]:
    """The prices of sketches of one team, without those whose workers should take fewer local steps, where none is slow."""
    if not sketches:
        return []

    def priced(now: Network) -> list[Candidate]:
        return _priced_on(team._replace(network=now), sketches, team.network)

    return over_time(team.network, sketches[0].n, priced, team.parameters, team.options)


def _priced_on(there: _PricedFor, sketches: Iterable[_Sketch], matched_on: Network) -> list[Candidate]:
    """The prices on a network, with local steps for the speeds of another, from whose start a run has them."""
    network, options = there.network, there.options
    traces, candidates = dict[_Sketch, Trace](), dict[_Sketch, Candidate | None]()
    for sketch in sketches:
        payload_bytes = math.ceil(there.parameters * sketch.bits / 8)
        if (local_steps := _own_steps(sketch, matched_on, payload_bytes)) is None:
            continue
        if sketch.peers is None:
            candidates[sketch] = _priced_mean(sketch, local_steps, payload_bytes, there)
            continue
        candidates[sketch] = None  # in its place
        rounds = options.rounds if network.jitter or network.changes else max(16, 8 * options.rounds // sketch.n)
        rounds = min(rounds, options.rounds) * (_MORE_DRAWS if _draws_freely(network, sketch.n) else 1)
        trace = _gossip(sketch.n, sketch.peers, _at_most(rounds, sketch.n), options.seed)
        sizes = np.broadcast_to(np.int64(payload_bytes), len(trace.messages.bytes))
        steps = np.broadcast_to(np.array(local_steps), trace.steps.shape)
        traces[sketch] = trace._replace(steps=steps, messages=trace.messages._replace(bytes=sizes))
    timelines = price_together([*traces.values()], network, there.computing)
    for (sketch, trace), timeline in zip(traces.items(), timelines, strict=True):
        local_steps = tuple(trace.steps[0].tolist())
        sent_bytes = float(trace.sent_bytes.mean()) / trace.rounds
        candidates[sketch] = _candidate(sketch, local_steps, None, sent_bytes, timeline, options)
    return [one for one in candidates.values() if one is not None]


def _priced_mean(sketch: _Sketch, local_steps: tuple[int, ...], payload_bytes: int, there: _PricedFor) -> Candidate:
    """The price of a sketch in which everyone sends to everyone."""
    network, options, n, codec, bits = there.network, there.options, sketch.n, sketch.codec, sketch.bits
    back = back_of(bits, codec, n)
    kind, message_bytes = "exchange", payload_bytes
    if back or codec in EXACT:
        mean_bytes = math.ceil(there.parameters * (bits + _BF16_BITS) / 8) if back else 2 * payload_bytes
        kind, message_bytes = "mean", round(mean_bytes / n)
    rounds = _rounds_of_means(network, n, options.rounds)
    sent_bytes = float((n - 1) * message_bytes)

    def carried_by(how: MeanKind) -> Candidate:
        carrying = replace(network, mean=how)
        if network.shares or network.loses or n <= _LIMIT_LISTED:
            trace = from_targets(_everyone(n, rounds), message_bytes, local_steps, kind=kind)
            timeline = price(trace, carrying, there.computing)
        else:
            steps = np.broadcast_to(np.array(local_steps), (rounds, n))
            timeline = price_everyone(steps, message_bytes, carrying, kind=kind, computing=there.computing)
        one = _candidate(sketch, local_steps, back, sent_bytes, timeline, options)
        return _behind_backward(one, timeline, how) if sketch.method == "data parallel" else one

    if sketch.method != "data parallel":
        return carried_by(network.mean)
    as_sent = carried_by(network.mean)
    others: list[MeanKind] = [how for how in COLLECTIVES if how != network.mean and n <= _LIMIT_LISTED]
    quickest = min((as_sent, *map(carried_by, others)), key=lambda one: one.round_s)
    return quickest._replace(unhidden_round_s=as_sent.unhidden_round_s)


def back_of(bits: float, codec: str, n: int) -> str | None:
    """The codec in which the sums of a lossy mean come back, where that is less to send than whole payloads to everyone."""
    return "bf16" if codec not in EXACT and (bits + _BF16_BITS) / n < bits else None


def _behind_backward(candidate: Candidate, timeline: Timeline, collective: MeanKind) -> Candidate:
    """Data parallelism as DDP runs it: only the part of its all-reduce that outlasts backward takes time.

    Buckets leave as soon as their gradients are there, so all but the last are in flight during backward, which is
    `BACKWARD` of an inner step; here that of the slowest worker, whose gradients come last.
    """
    step_s = float(timeline.compute_s.max(axis=1).mean())
    hidden_s = min(max(0.0, candidate.round_s - step_s), BACKWARD * step_s)
    share = 1 - hidden_s / candidate.round_s
    return candidate._replace(
        round_s=candidate.round_s * share,
        spread_s=candidate.spread_s * share,
        seconds_per_token=candidate.seconds_per_token * share,
        utilisation=candidate.utilisation / share,
        between_stages=candidate.between_stages / share,
        collective=collective,
        unhidden_round_s=candidate.round_s,
    )


def _candidate(
    sketch: _Sketch,
    local_steps: tuple[int, ...],
    back: str | None,
    sent_bytes: float,
    timeline: Timeline,
    options: PlanSettings,
) -> Candidate:
    """A sketch with its price."""
    rounds = len(timeline.end_s)
    return Candidate(
        method=sketch.method,
        codec=sketch.codec,
        back=back,
        local_steps=local_steps,
        round_s=timeline.total_s / rounds,
        round_bytes=sent_bytes,
        utilisation=timeline.mean_utilisation,
        seconds_per_token=timeline.total_s / (options.step_tokens * rounds * sum(local_steps)),
        between_stages=timeline.mean_between_stages,
        spread_s=spread_s(timeline),
    )


def _draws_freely(network: Network, n: int) -> bool:
    """Whether seconds vary by chance, and more rounds of them cost little: workers drift apart for many rounds."""
    return network.jitter > 0 and not network.shares and n <= _LIMIT_LISTED


def _own_steps(sketch: _Sketch, network: Network, payload_bytes: int) -> tuple[int, ...] | None:
    """Local steps of each worker; None for a mean where they would be the same for all although they are to differ.

    Of a mean through owners, half of what a worker sends is sent before it needs anything from the others. Those of a ring
    and a tree begin when the last is ready, so only the seconds of a step count.
    """
    n, steps = sketch.n, sketch.full_steps
    if not sketch.matched:
        return (steps,) * n
    ahead = (n - 1) / n if network.mean == "owners" else 0.0
    sent_bytes = payload_bytes * (ahead if sketch.peers is None else sketch.peers)
    matched = matched_steps(links_of(network, n), steps, sent_bytes)
    return matched if sketch.peers is not None or min(matched) < steps else None


def matched_steps(links: Links, full_steps: int, sent_bytes: float) -> tuple[int, ...]:
    """The inner steps of each worker with which all finish sending together, up to less than one step.

    The worker that would finish first with `full_steps` takes that many (`gossamer.network.pacing`). The workers of a site
    share its link evenly. A slow downlink does not count: what comes late through it is sent by another worker.

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
    first = min(paces, key=lambda pace: cycle_s(pace, full_steps))  # the cycle to which all others are matched
    fitting = {pace: whole_steps(fitting_steps(pace, [first], full_steps), full_steps) for pace in set(paces)}
    return tuple(fitting[pace] for pace in paces)


def _rounds_of_means(network: Network, n: int, rounds: int) -> int:
    if not network.jitter and not network.changes:
        return 1
    return _at_most(rounds, n) if n > _LIMIT_SHARED else max(1, min(rounds, _LIMIT_MESSAGES // n**2))


def _at_most(rounds: int, n: int) -> int:
    """The rounds to price; with thousands of workers fewer, down to 8: each of their rounds includes rare draws already."""
    return rounds if n <= _LIMIT_SHARED else min(rounds, max(8, _LIMIT_CELLS // n))


def _everyone(n: int, rounds: int) -> Integers:
    """All others as targets of each worker, `[rounds, n, n - 1]`."""
    others = np.array([[j for j in range(n) if j != i] for i in range(n)])
    return np.broadcast_to(others, (rounds, *others.shape))


@lru_cache(maxsize=2)  # of one and two peers: candidates differ in what they send and compute, not in who talks to whom
def _gossip(n: int, peers: int, rounds: int, seed: int) -> Trace:
    """The trace of a run in the topology "random", with payloads of one byte."""
    return from_targets(_gossip_targets(n, peers, rounds, seed), 1, steps=0)


def _gossip_targets(n: int, peers: int, rounds: int, seed: int) -> Integers:
    """Targets of each worker in the topology "random", `[rounds, n, peers]`; its own number where it sends nothing."""
    targets = np.tile(np.arange(n)[:, None], (rounds, 1, peers))
    for r in range(rounds):
        matchings = random_matchings(n, peers, seed, r).reshape(peers, -1, 2)
        for k, pairs in enumerate(matchings):
            targets[r, pairs[:, 0], k], targets[r, pairs[:, 1], k] = pairs[:, 1], pairs[:, 0]
    return targets
