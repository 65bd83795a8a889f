"""From a run file to what runs: `settle(config)` is pure, opens no data and builds no model. Every driver begins with it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from gossamer.asynchronous import PairRule, Rates, ServerRule, conditions, dylu_steps, meeting_rates
from gossamer.clock import Absence
from gossamer.clock.durations import Durations
from gossamer.clock.phases import ordered
from gossamer.codecs import Codec
from gossamer.errors import ConfigError, PairingError
from gossamer.models.holders import holders_of
from gossamer.network.links import Network, links_of
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import Method, method_of, settled_rule, warnings_of
from gossamer.run.config.pipeline import by_stage, must_come_again
from gossamer.run.config.run_file import RunConfig
from gossamer.run.config.user_parts import OURS, Parts, make
from gossamer.topologies import Topology

__all__ = [
    "InPairs",
    "InRounds",
    "Settled",
    "WithServer",
    "WithoutWaiting",
    "faults",
    "in_rounds",
    "pairing_faults",
    "settle",
]


class InRounds(NamedTuple):
    """A run in synchronous rounds."""

    method: Method
    network: Network | None
    """The network whose seconds local steps adapt to; None where they do not adapt, and on real processes, which measure."""
    warnings: tuple[str, ...]
    """What will probably go wrong."""


class WithServer(NamedTuple):
    """An asynchronous run around a server."""

    config: RunConfig
    """The run with the local steps that its workers take, fewer for slower ones with `events.dylu`."""
    rule: ServerRule
    codec: Codec
    network: Network | None
    """The network whose seconds decide what is computed; None on real processes, which measure their own."""
    network_name: str | None
    absences: tuple[Absence, ...]


class InPairs(NamedTuple):
    """An asynchronous run of workers that meet in pairs."""

    config: RunConfig
    """As in `WithServer`."""
    rule: PairRule
    topology: Topology
    rates: Rates
    """Meetings of each pair per second; on real processes per mean local phase, whose seconds they measure."""
    codec: Codec
    network: Network | None
    """As in `WithServer`."""
    network_name: str | None
    absences: tuple[Absence, ...]
    warnings: tuple[str, ...]
    """What will probably go wrong."""


class WithoutWaiting(NamedTuple):
    """An asynchronous run of workers that mix with what their peers published last."""

    config: RunConfig
    """As in `WithServer`."""
    method: Method
    network: Network | None
    """As in `WithServer`."""
    network_name: str | None
    absences: tuple[Absence, ...]
    warnings: tuple[str, ...]
    """What will probably go wrong."""


Settled = InRounds | WithServer | InPairs | WithoutWaiting


def settle(config: RunConfig, parts: Parts = OURS, *, real: bool = False) -> Settled:
    """What a run file runs.

    Args:
        parts: the user's own, where the run names any.
        real: for real processes (`gossamer train`), which measure seconds and support less than a simulation.
    Raises: PairingError and ConfigError, the first of `faults`; UserCodeError.
    Cost: the stability of the rule on its topology, some milliseconds, up to a second for hundreds of workers.
    """
    facts, errors = _facts(config, parts, real)
    for error in [*errors, *map(PairingError, incompatibilities.faults(facts))]:
        raise error
    if facts.kind == "rounds":
        for network in () if real else config.network.values():
            links_of(network, config.workers)  # one of other workers is refused before the training, not after it
        m = method_of(facts, compile=config.run.compile)
        m = m._replace(codec=by_stage(m.codec, config.pipeline, config.model, config.data))
        return InRounds(m, facts.pacing_network, (*warnings_of(facts), *_unrecorded(config, real), *_unheard(config)))
    name, network, config = _clocked(config, facts)
    absences = _absences(config)
    if config.server is not None:
        rule = make(parts, "server", config)
        return WithServer(config, rule, facts.codec, network, name, absences)
    assert real or (network is not None and name is not None)
    if facts.pair is not None:
        rates = _rates(config, facts.topology, None if real else network)
        return InPairs(
            config, facts.pair, facts.topology, rates, facts.codec, network, name, absences, warnings_of(facts)
        )
    return WithoutWaiting(config, method_of(facts), network, name, absences, warnings_of(facts))


def _unrecorded(config: RunConfig, real: bool) -> tuple[str, ...]:
    """What the run file wants recorded that real processes do not know."""
    if not (real and config.record.alignment):
        return ()
    return (
        "record.alignment is true, but a real worker does not see the pseudo-gradients of all others, so their alignment is not "
        "recorded; run gossamer simulate on the same file to measure it",
    )


def _unheard(config: RunConfig) -> tuple[str, ...]:
    """A sentence for each text that only workers have which take a quarter of the local steps or fewer, and are not weighed."""
    if not isinstance(config.data.shards, tuple) or config.run.weigh_steps:
        return ()
    steps: dict[int, list[int]] = {}
    for worker, source in enumerate(config.data.shards):
        steps.setdefault(source, []).append(config.local_steps_of(worker))
    return tuple(
        f"the text of data.source {config.data.sources[source]!r:.60} is with workers that take at most {max(taken)} of "
        f"{config.full_steps} local steps, so it counts for little; if it matters, let them take more or set "
        "run.weigh_steps = true"
        for source, taken in sorted(steps.items())
        if 4 * max(taken) <= config.full_steps
    )


def in_rounds(config: RunConfig, parts: Parts = OURS, *, real: bool = False) -> InRounds:
    """What a run file runs in rounds. Raises ConfigError for an asynchronous one, and as `settle` does."""
    settled = settle(config, parts, real=real)
    if not isinstance(settled, InRounds):
        raise ConfigError(
            f"the run '{config.name}' is asynchronous ({config.kind}) and has no rounds; start it with gossamer simulate"
        )
    return settled


def faults(config: RunConfig, *, real: bool = False) -> list[str]:
    """A sentence for each reason why this run cannot start; empty if it can start, as far as is known without its data."""
    if found := pairing_faults(config, real=real):
        return found
    try:
        settle(config, real=real)
    except ConfigError as error:
        return [str(error)]
    return []


def pairing_faults(config: RunConfig, *, real: bool = False) -> list[str]:
    """A sentence for every part that cannot be made, and for every combination that cannot work."""
    facts, errors = _facts(config, OURS, real)
    return [*map(str, errors), *incompatibilities.faults(facts)]


_T = TypeVar("_T")


def _facts(config: RunConfig, parts: Parts, real: bool) -> tuple[Combination, list[ConfigError]]:
    """The facts for the table of pairings, and the errors of parts that cannot be made or used, which the facts omit."""
    errors: list[ConfigError] = []

    def attempt(make: Callable[[], _T]) -> _T | None:
        try:
            return make()
        except ConfigError as error:
            errors.append(error)
            return None

    run, events, nothing = config.run, config.events, Combination()
    attempt(lambda: must_come_again(config.pipeline, config.data, run.steps))
    codec, holders = attempt(lambda: make(parts, "codec", config)), holders_of(config.model.experts, config.workers)
    facts = Combination(
        kind=config.kind, driver="train" if real else "simulate", wait=run.wait, codec=codec or nothing.codec,
        schedule=config.schedule, local_steps=run.local_steps,
        server=config.server.name if config.server else "", optimizer=config.inner.optimizer,
        averaging=config.inner.averaging, adapt=run.adapt, weigh_steps=run.weigh_steps, reduction=run.reduction,
        eval_js=run.eval_js, elastic=run.elastic, stages=config.pipeline.stages, partly=config.pipeline.workers is not None,
        scattered=config.pipeline.chunks > 1 or (config.model.bottleneck is not None and bool(config.model.bottleneck.cuts)),
        hashes=config.record.hash, batched=run.batched, holders=holders.parts if holders is not None else (),
        constant_batch=config.data.constant_batch, ghost_rounds=run.ghost_rounds,
        fragments=events.fragments, overlap=events.overlap, dylu=events.dylu, meetings=events.meetings,
        absences=len(events.absences), clock=events.network, networks=config.network,
    )  # fmt: skip
    if config.server is not None:
        server = attempt(lambda: make(parts, "server", config))
        return facts._replace(regions=server is not None and server.regions is not None), errors
    topology = attempt(lambda: make(parts, "topology", config))
    if config.pair is not None:
        pair = attempt(lambda: make(parts, "pair", config))
        return facts._replace(pair=pair, topology=topology or nothing.topology), errors
    rule = attempt(lambda: make(parts, "rule", config))
    if rule is None or topology is None or codec is None:  # checks that depend on them are skipped
        return facts._replace(reduction="ordered", codec=nothing.codec), errors
    facts = facts._replace(rule=rule, topology=topology)
    return facts._replace(rule=attempt(lambda: settled_rule(facts)) or rule), errors


def _clocked(config: RunConfig, facts: Combination) -> tuple[str | None, Network | None, RunConfig]:
    """The network whose seconds count, with its name, and the run with the local steps that go with it."""
    if not facts.clocked:
        return None, None, config
    name = next(iter(config.network)) if facts.clock is None else facts.clock
    network, steps = config.network[name], config.run.local_steps
    step_s = Durations(network, config.workers).step_s
    if facts.dylu:
        assert not isinstance(steps, tuple)  # refused by the table
        config = replace(config, run=replace(config.run, local_steps=dylu_steps(step_s, steps)))
    return name, network, config


def _absences(config: RunConfig) -> tuple[Absence, ...]:
    """When workers leave and return. Raises ConfigError for impossible absences."""
    away = config.events.absences
    absences = [Absence(one.leave_s, one.worker, "leave") for one in away]
    absences += [Absence(one.return_s, one.worker, "return") for one in away if one.return_s < math.inf]
    return tuple(ordered(absences, config.workers))


def _rates(config: RunConfig, topology: Topology, network: Network | None) -> Rates:
    """Meetings of each pair per second, without a network per mean local phase. Raises ConfigError for a disconnected graph."""
    phase_s = 1.0
    if network is not None:
        step_s = Durations(network, config.workers).step_s
        phase_s = math.fsum(s * config.local_steps_of(i) for i, s in enumerate(step_s)) / config.workers
    rates = meeting_rates(topology.mixing(0), (config.events.meetings or 1.0) / phase_s)
    conditions(config.workers, rates)
    return rates
