"""From a run file to what runs: `resolve(config)` is pure, opens no data and builds no model; the user's code is here already."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gossamer.asynchronous import Rates, conditions, dylu_steps, meeting_rates
from gossamer.clock import Absence
from gossamer.clock.durations import Durations
from gossamer.clock.phases import ordered
from gossamer.errors import ConfigError, PairingError
from gossamer.models.holders import holders_of
from gossamer.network.links import Network, links_of
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import method_of, settled_rule, warnings_of
from gossamer.run.config.choice import Choice
from gossamer.run.config.document import DIRECTIONS, KINDS, flat, load_run
from gossamer.run.config.pipeline import by_stage, donor_of, require_repeatable_samples, users_own
from gossamer.run.config.resolved import InPairs, ResolvedRun, RunSettings, WithServer
from gossamer.run.config.run_file import RunConfig, decisive, digest, dump, parse, survey
from gossamer.run.config.user_parts import BUILT_IN, UserParts, make, named, named_code, own_parts
from gossamer.settings.schema import changeable, parse_toml
from gossamer.topologies import Topology

CHANGEABLE = tuple(sorted(changeable(RunConfig)))
"""The dotted keys that a resumed run may change."""


def may_change(key: str) -> bool:
    """Whether a resumed run may change this dotted key.

    >>> may_change("inner.lr"), may_change("record.hash"), may_change("rule.name")
    (True, True, False)
    """
    return any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE)


def resolve(config: RunConfig, parts: UserParts = BUILT_IN, *, real: bool = False, store: bool = False) -> ResolvedRun:
    """The resolved run of a run file and the user's parts. Every verb that trains calls it once in a process.

    Args:
        parts: the user's own, where the run names any (`own_parts` imports them).
        real: for real processes (`gossamer train`), which measure seconds and support less than a simulation.
        store: for processes that share a store alone (`--store`), which carries less.
    Raises: PairingError and ConfigError, the first of `run_faults`; UserCodeError.
    Cost: the stability of the rule on its topology, some milliseconds, up to a second for hundreds of workers.
    """
    facts, errors = _facts(config, parts, real)
    facts = facts._replace(store=store)
    for error in [*errors, *map(PairingError, incompatibilities.combination_faults(facts)), *_misfits(config, real)]:
        raise error
    run, (name, network) = settings_of(config, parts), _clock(config, facts)
    if network is not None:
        step_s = Durations(network, run.workers).step_s  # refuses links that no simulation over virtual time can follow
        if facts.dylu:
            run = replace(run, loop=replace(run.loop, local_steps=dylu_steps(step_s, run.full_steps)))
    absences = () if facts.kind == "rounds" else _absences(config)
    warnings = () if facts.kind == "server" else warnings_of(facts)
    if facts.kind == "rounds":
        method = method_of(facts, compile=config.run.compile)
        method = method._replace(codec=by_stage(method.codec, config.pipeline, config.model, config.data))
        network, warnings = facts.pacing_network, (*warnings, *_unheard(config), *_routed(config))
    elif facts.kind == "server":
        method = WithServer(make(parts, "server", config), facts.codec)
    elif facts.pair is not None:
        rates = _rates(run, facts.topology, None if real else network)
        method = InPairs(facts.pair, facts.topology, rates, facts.codec)
    else:
        method = method_of(facts)
    return ResolvedRun(
        **vars(run), method=method, network=network, network_name=name, absences=absences, warnings=warnings
    )


def settings_of(config: RunConfig, parts: UserParts = BUILT_IN) -> RunSettings:
    """The settings of a run file without its method, of which nothing is made."""
    return RunSettings(
        name=config.name,
        seed=config.seed,
        workers=config.workers,
        kind=config.kind,
        model=config.model,
        pipeline=config.pipeline,
        data=config.data,
        inner=config.inner,
        loop=config.run,
        schedule=config.schedule,
        events=config.events,
        record=config.record,
        networks=config.network,
        peers=config.peers,
        parts=parts,
        code=named_code(config),
        digest=digest(config),
        decisive=decisive(config),
        document=dump(config),
    )


def settings_in(folder: Path, parts: UserParts = BUILT_IN) -> RunSettings:
    """The settings of the run that is recorded in a folder. Raises ConfigError where there is none."""
    return settings_of(parse(load_run(folder)), parts)


def recorded_run(folder: Path, parts: UserParts | None = None, *, real: bool) -> ResolvedRun:
    """The run that is recorded in a folder, as it was resolved when it was trained.

    Args: `parts` are the user's own; None imports those that the run names. Raises: as `own_parts` and `resolve`.
    """
    config = parse(load_run(folder))
    return resolve(config, own_parts(config) if parts is None else parts, real=real)


def resolve_document(document: Mapping[str, Any], parts: UserParts, *, real: bool) -> ResolvedRun:
    """The resolved run of a run file with this content. Raises: as `parse` and `resolve`."""
    return resolve(parse(document), parts, real=real)


def differences(before: RunSettings, after: RunSettings) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two runs differ, each with both values; None for a key that a run does not have."""
    old, new = (flat(parse_toml(one.document, "a run")) for one in (before, after))
    keys = sorted(old.keys() | new.keys())
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _routed(config: RunConfig) -> tuple[str, ...]:
    """How the routers of experts are trained, where that is unusual."""
    if config.model.experts is None or config.inner.optimizer not in ("muon", "spectral_muon"):
        return ()
    return (
        f"inner.optimizer '{config.inner.optimizer}' trains the routers of model.experts too, as they are hidden matrices; with "
        "'adamw' they are trained as norms and embeddings are",
    )


def _unheard(config: RunConfig) -> tuple[str, ...]:
    """A warning for each text read only by workers that take a quarter of the local steps or fewer, and are not weighed."""
    if not isinstance(config.data.shards, tuple) or config.run.weigh_steps:
        return ()
    steps, length = dict[int, list[int]](), config.length
    for worker, source in enumerate(config.data.shards):
        steps.setdefault(source, []).append(length.local_steps_of(worker))
    return tuple(
        f"data.source {config.data.sources[source]!r:.60} is only on workers that take {max(taken)} of {length.full_steps} local "
        "steps, so it is under-weighted; raise their local steps or set run.weigh_steps = true"
        for source, taken in sorted(steps.items())
        if 4 * max(taken) <= length.full_steps
    )


def document_faults(document: Mapping[str, Any], *, real: bool = False) -> list[str]:
    """A sentence for each reason why no run can start from a document; no fault hides another."""
    seen = survey(document)
    if seen.run is None or {*named(seen.run)} & {*KINDS}:  # whose parts are known once they are imported
        return seen.faults
    try:
        return [*seen.faults, *seen.sure(run_faults(seen.run, real=real))]
    except Exception:
        if not seen.faults:
            raise
        return seen.faults  # the checks rely on what is at fault


def run_faults(config: RunConfig, *, real: bool = False) -> list[str]:
    """A sentence for each reason why this run cannot start; empty if it can start, as far as is known without its data."""
    faults = [*pairing_faults(config, real=real), *map(str, _misfits(config, real))]
    if faults or not all(choice.name for choice in _choices(config)):
        return faults
    try:
        resolve(config, real=real)
    except ConfigError as error:
        return [str(error)]
    return []


def pairing_faults(config: RunConfig, *, real: bool = False) -> list[str]:
    """A sentence for every part that cannot be made, and for every combination that cannot work."""
    facts, errors = _facts(config, BUILT_IN, real)
    return [*map(str, errors), *incompatibilities.combination_faults(facts)]


def _choices(config: RunConfig) -> list[Choice]:
    """The rows of tables that a run takes, or would take if it were of another kind."""
    choices = (*(getattr(config, kind, None) for kind in KINDS), *(getattr(config.pipeline, one) for one in DIRECTIONS))
    return [choice for choice in choices if choice is not None]


def _misfits(config: RunConfig, real: bool) -> list[ConfigError]:
    """Why the declared networks, absences, ports and shards do not fit the workers of a run."""
    if config.kind == "rounds":
        networks = {} if real else config.network
        checks = [partial(links_of, one, config.workers, f"network.{name}") for name, one in networks.items()]
    else:
        checks = [partial(_absences, config)]
    errors = [*map(ConfigError, (*_unsharded(config), *_without_port(config)))] if real else []
    for check in checks:
        try:
            check()  # before the training, not after it
        except ConfigError as error:
            errors.append(error)
    return errors


def _without_port(config: RunConfig) -> Iterator[str]:
    """Why the last workers cannot serve their figures to Prometheus, each of which has the next port."""
    port, last = config.record.prometheus_port, config.workers - 1
    if port and port + last > 65535:
        yield (
            f"record.prometheus_port is {port}, and worker {last} would serve at {port + last}, above 65535; choose "
            f"{65535 - last} or lower, or 0 to serve nothing"
        )


def _unsharded(config: RunConfig) -> Iterator[str]:
    """Why the model of a run, or its batches, cannot be divided between the shards of a worker."""
    shards, model = config.run.shards, config.model
    if shards == 1:
        return
    setting = f"run.shards is {shards}"
    if own := users_own(model, config.data):
        yield (
            f"{setting} and {own[0]}, but only the built-in model on text is sharded; set it to 1, or shard your model in your "
            "own loop with gossamer.Outer"
        )
    if config.data.accumulate % shards:
        yield (
            f"{setting} and data.accumulate is {config.data.accumulate}: the processes of a worker share the micro-batches of a "
            f"step equally; set data.accumulate to a multiple of {shards}"
        )
    for key, value in (("model.experts", model.experts), ("model.bottleneck", model.bottleneck)):
        if value is not None:
            yield f"{setting} and the run has {key}, which was never tried together; remove one of the two"
    if config.inner.compile:
        yield f"{setting} and inner.compile is true, which was never tried together; set it to false"


_T = TypeVar("_T")


def _facts(config: RunConfig, parts: UserParts, real: bool) -> tuple[Combination, list[ConfigError]]:
    """The facts for the table of pairings, and the errors of parts that cannot be made or used, which the facts omit."""
    errors: list[ConfigError] = []

    def attempt(make: Callable[[], _T]) -> _T | None:
        try:
            return make()
        except ConfigError as error:
            errors.append(error)
            return None

    def made(kind: str) -> Any:
        return attempt(lambda: make(parts, kind, config)) if getattr(config, kind).name else None

    facts = _stated(config, real)
    if config.pipeline.forward.name:
        attempt(lambda: require_repeatable_samples(config.pipeline, config.data, config.run.steps))
    codec = made("codec")
    facts = facts._replace(codec=codec or facts.codec)
    if config.server is not None:
        server = made("server")
        return facts._replace(regions=server is not None and server.regions is not None), errors
    topology = made("topology")
    if config.pair is not None:
        return facts._replace(pair=made("pair"), topology=topology or facts.topology), errors
    rule = made("rule")
    if rule is None or topology is None or codec is None:  # checks that depend on them are skipped
        return facts._replace(reduction="ordered", codec=Combination().codec), errors
    facts = facts._replace(rule=rule, topology=topology)
    return facts._replace(rule=attempt(lambda: settled_rule(facts)) or rule), errors


def _stated(config: RunConfig, real: bool) -> Combination:
    """The facts that a run file states, without the parts that are made of it."""
    run, events, pipeline, model = config.run, config.events, config.pipeline, config.model
    timetable, holders = config.length.timetable.since(run.synchronous_steps), holders_of(model.experts, config.workers)
    return Combination(
        kind=config.kind,
        driver="train" if real else "simulate",
        wait=run.wait,
        schedule=config.schedule,
        local_steps=timetable.at(0).local_steps,
        synchronous_steps=run.synchronous_steps,
        steps=run.steps,
        timetable=timetable if timetable.changes else None,
        server=config.server.name if config.server else "",
        optimizer=config.inner.optimizer,
        averaging=config.inner.averaging,
        adapt=run.adapt,
        weigh_steps=run.weigh_steps,
        reduction=run.reduction,
        elastic=run.elastic,
        peers=bool(config.peers),
        stages=pipeline.stages,
        shards=run.shards if real else 1,
        partly=pipeline.workers is not None,
        scattered=pipeline.chunks > 1 or (model.bottleneck is not None and bool(model.bottleneck.cuts)),
        lost=frozenset(donor_of(one, pipeline, config.workers) is not None for one in pipeline.lost),
        hashes=config.record.hash,
        batched=run.batched,
        holders=() if holders is None else holders.parts,
        constant_batch=config.data.constant_batch,
        fragments=events.fragments,
        overlap=events.overlap,
        dylu=events.dylu,
        meetings=events.meetings,
        absences=len(events.absences),
        clock=events.network,
        networks=config.network,
    )


def _clock(config: RunConfig, facts: Combination) -> tuple[str | None, Network | None]:
    """The network whose seconds count, with its name."""
    if not facts.clocked:
        return None, None
    name = next(iter(config.network)) if facts.clock is None else facts.clock
    return name, config.network[name]


def _absences(config: RunConfig) -> tuple[Absence, ...]:
    """When workers leave and return. Raises ConfigError for impossible absences."""
    away = config.events.absences
    absences = [Absence(one.leave_s, one.worker, "leave") for one in away]
    absences += [Absence(one.return_s, one.worker, "return") for one in away if one.return_s < math.inf]
    return tuple(ordered(absences, config.workers))


def _rates(run: RunSettings, topology: Topology, network: Network | None) -> Rates:
    """Meetings of each pair per second, without a network per mean local phase. Raises ConfigError for a disconnected graph."""
    phase_s = 1.0
    if network is not None:
        step_s = Durations(network, run.workers).step_s
        phase_s = math.fsum(s * run.local_steps_of(i) for i, s in enumerate(step_s)) / run.workers
    rates = meeting_rates(topology.mixing(0), (run.events.meetings or 1.0) / phase_s)
    conditions(run.workers, rates)
    return rates
