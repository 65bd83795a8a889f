"""The plan of all other methods: what each recipe would send on a network, and how long it takes.

`gossamer.run.planning.plan` prices data parallelism, DiLoCo and GASLoC by formula, with local steps that match each worker's
speed. Here every method is resolved as its run file is, a few of its rounds are played on tensors without data, and
their trace is priced. All workers take the same local steps, unless the method chooses them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import tomli_w

from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network, to_options
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.recipes import Recipe, recipe, recipes
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import parse
from gossamer.run.planning.check import ROUNDS, counted, is_hidden
from gossamer.run.planning.choice import Candidate, Pick, pick
from gossamer.run.planning.measured_losses import EVERY_STEP, MEASURED
from gossamer.run.planning.optima import is_published
from gossamer.run.planning.plan import PlanSettings, RunPlan, back_of, choosable, over_time
from gossamer.run.planning.planned_run_file import headline, optima_of, with_tables, without_text
from gossamer.run.planning.teams import network_without
from gossamer.settings.schema import toml_value

PLANNED = {
    "data_parallel": "data parallel",
    "diloco": "DiLoCo",
    "gasloc_2peer": "GASLoC 2-Peer",
    "gasloc": "GASLoC 1-Peer",
}
"""The methods that `gossamer.run.planning.plan` prices itself, with its names for them."""
USUAL = "streaming_diloco"
"""The method with fragments and overlap that is chosen from as well."""
SEVERAL = (USUAL, "muloco", "sparseloco")
"""Methods that are tried with all local steps of a plan and, where they have no codec, with all codecs."""

_DRAWS, _T_OF_THREE = 4, 3.18
"""Draws of jitter that are priced, and Student's t of their 95 % interval."""
_FEW = 16
"""Workers among whom a price takes less than a second; it takes several among 64."""


_Tried = tuple[int, tuple[int, ...], str | None]
"""Local steps, workers that are left out, and a codec in place of the method's."""


class Priced(NamedTuple):
    """Candidates of other methods, and why the rest have none."""

    candidates: tuple[Candidate, ...]
    unpriced: Mapping[str, str]


def price_recipes(made: RunPlan, only: str | None = None, *, thorough: bool = False) -> Priced:
    """Prices every recipe for the network and model of a plan.

    Those of `SEVERAL` take all local steps that the plan tries; all others, and of many workers these too, take those of the
    plan that their loss was measured with, or all where it has none of these, or that the plan would choose. `USUAL` is priced
    without the workers that the plan may leave out as well; with many workers, with those of the plan's choice alone.

    Args: `only` is the name of the one method to price; `thorough` tries all local steps of the plan.
    Raises: ConfigError for a method that is not there.
    Cost: a few rounds played for each of the 60 methods, seconds in all; minutes with hundreds of workers.
    """
    if only is not None:
        recipe(only)  # raises
    if made.options.sites == "only":
        why = "it is not priced between sites whose machines hold a shard each"
        return Priced((), {} if only is None or only in PLANNED else {only: why})
    candidates: list[Candidate] = []
    unpriced: dict[str, str] = {}
    layout, teams = layout_for(made.model, made.options.vocab_size), _teams(made)
    for name, one in recipes().items():
        if name in PLANNED or (only is not None and name != only):
            continue
        if why := "one worker sends nothing" if made.workers == 1 else _without_price(one):
            unpriced[name] = why
            continue
        several = name in SEVERAL and "codec.name" not in one.settings
        codecs: Iterable[str | None] = made.options.codecs if several else [None]
        try:
            tried = [
                (steps, left_out, codec)
                for steps in _tried_steps(name, one, made, thorough=thorough)
                for codec in codecs
                for left_out in (teams if name == USUAL else [()])
            ]

            def priced(now: Network, name: str = name, tried: Sequence[_Tried] = tried) -> list[Candidate]:
                there = made._replace(network=now)
                return [_candidate(name, steps, there, layout, left_out, codec) for steps, left_out, codec in tried]

            in_time = replace(made.options, tokens=None, hours=made.choice.hours)
            candidates += over_time(made.network, made.workers, priced, made.parameters, in_time)
        except ConfigError as error:
            unpriced[name] = str(error)
    return Priced(tuple(candidates), unpriced)


def _teams(made: RunPlan) -> list[tuple[int, ...]]:
    """The workers that are left out where `USUAL` is priced: all choices of the plan, or its best alone among many workers."""
    few = made.workers <= _FEW
    teams = [*dict.fromkeys(((), *(one.left_out for one in made.candidates)))] if few else [made.best.left_out]
    return [one for one in teams if made.workers - len(one) > 1] or [()]


def _tried_steps(name: str, recipe: Recipe, made: RunPlan, *, thorough: bool) -> list[int]:
    """The local steps with which a method is priced."""
    if name in EVERY_STEP:
        return [1]
    if (fixed := recipe.settings.get("run.local_steps")) is not None:
        return [fixed]
    if thorough or (made.workers <= _FEW and name in SEVERAL):
        return sorted({*made.options.local_steps})
    if name in MEASURED and name not in SEVERAL:
        return [one for one in MEASURED[name] if one in made.options.local_steps] or sorted({*made.options.local_steps})
    between = [one for one in made.candidates if one.full_steps > 1] or made.candidates
    return [max(2, pick(between, made.choice.scale, made.options.hours).best.full_steps)]


def _without_price(recipe: Recipe) -> str:
    """Why a method has no price on any network; empty where it may have one."""
    if "workers" in recipe.settings:
        return f"it is for {recipe.settings['workers']} worker, which sends nothing"
    if "model.experts.count" in recipe.settings:
        return "it trains a mixture of experts, which is another model"
    if recipe.settings.get("run.adapt"):
        return "its local steps follow the seconds that it measures; 'GASLoC 1-Peer' has those that fit the network"
    return ""


def chosen_from(made: RunPlan, priced: Priced) -> list[Candidate]:
    """The candidates that a plan chooses from unless a method is named: its own, and those of `USUAL`."""
    return [*made.candidates, *(one for one in priced.candidates if one.method == USUAL)]


def choose_among(made: RunPlan, priced: Priced, method: str | None = None) -> Pick:
    """The choice of a plan with streaming DiLoCo, or that among the candidates of a method.

    Raises: ConfigError for a method without a price.
    """
    scale, hours = made.choice.scale, made.options.hours
    if method is None:
        return pick(choosable(chosen_from(made, priced), made.options), scale, hours)
    if made.workers == 1:
        raise ConfigError(f"--method got '{method}' but one worker exchanges nothing; leave --method out")
    if method in priced.unpriced:
        raise ConfigError(f"method '{method}' has no price here: {priced.unpriced[method]}; choose another --method")
    label = PLANNED.get(method, method)
    labelled = [one for one in [*made.candidates, *priced.candidates] if one.method == label]
    if not labelled:
        raise ConfigError(f"{label} is not planned for {made.workers} workers; choose another --method")
    return pick(labelled, scale, hours)


def recipe_toml(made: RunPlan, chosen: Candidate, *, name: str, run: Mapping[str, Any]) -> str:
    """A run file for a candidate of `price_recipes`, as `gossamer.run.planning.planned_run_file.run_toml` writes one for its own.

    Args: `run` are further keys of its `[run]` table.
    """
    rounds = made.rounds_of(chosen)
    codec = (chosen.codec, chosen.back) if chosen.method in SEVERAL else None
    document = _document(chosen.method, chosen.full_steps, made, rounds, chosen.left_out, codec)
    document["run"] |= run
    own = recipe(chosen.method).settings
    # Published rates are those of AdamW.
    own_lr = own.get("inner.optimizer") in _MUONS or ("inner.lr" in own and is_published(made.parameters))
    best = optima_of(made, chosen, rounds, own_lr=own_lr)
    document = with_tables(document, {"inner": best.inner, **({"rule": best.rule} if best.rule else {})})
    head = f"{headline(made, chosen)}{without_text(chosen)}{best.source}{made.length_of(chosen, rounds)}"
    return head + tomli_w.dumps({"name": name, **document})


def drafted(
    method: str, workers: int, model: ModelConfig, options: PlanSettings, tables: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A run file of a method on the text of the plan, with further keys in its tables."""
    document = {
        "method": method,
        "workers": workers,
        "seed": options.seed,
        "model": toml_value(model),
        "data": options.data_table,
    }
    return with_tables(document, tables)


def _document(
    method: str,
    local_steps: int,
    made: RunPlan,
    rounds: int,
    left_out: Sequence[int],
    codec: tuple[str, str | None] | None = None,
) -> dict[str, Any]:
    """The run file of a method, without some workers, with its own codec unless given one."""
    run = {"steps": rounds * local_steps, "local_steps": local_steps}
    network = network_without(made.network, made.workers, left_out)
    if recipe(method).settings.get("inner.optimizer") in _MUONS:
        network = _with_muon(network, made)
    tables: dict[str, Mapping[str, Any]] = {"run": run, "network": {"planned": to_options(network)}}
    if codec is not None:
        there, back = codec
        tables["codec"] = {"name": there, **({"back": back} if back else {})}
    document = drafted(method, made.workers - len(left_out), made.model, made.options, tables)
    return with_tables(document, made.replica)


_MUONS = ("muon", "spectral_muon")
_ORTHOGONALISED = 5
"""Newton-Schulz iterations of a step of Muon."""


def _with_muon(network: Network, made: RunPlan) -> Network:
    """The network with the seconds of a step of Muon: those of AdamW and of its further multiplications, at the same FLOP/s.

    An iteration on a matrix of m by n numbers, m <= n, is two products of m² n and one of m³ multiplications; the six FLOPs of a
    parameter and token are the step without them.
    """
    hidden = (sorted(leaf.shape) for leaf in layout_for(made.model, made.options.vocab_size).leaves if is_hidden(leaf))
    flops = sum(_ORTHOGONALISED * (4 * m * m * n + 2 * m**3) for m, n in hidden)
    factor = 1 + flops / (6 * made.parameters * made.options.step_tokens)
    step_s = network.step_s
    assert step_s is not None, "a plan knows them"
    return replace(network, step_s=tuple(factor * s for s in step_s) if isinstance(step_s, tuple) else factor * step_s)


def _candidate(
    method: str, local_steps: int, made: RunPlan, layout: Layout, left_out: tuple[int, ...], sent_in: str | None
) -> Candidate:
    """The price of a method with these local steps. Raises ConfigError where it cannot run, or its network has no price.

    Args: `sent_in` is a codec in place of the method's.
    """
    both = None
    if sent_in is not None:
        both = sent_in, back_of(made.options.codecs[sent_in], sent_in, made.workers - len(left_out))
    document = _document(method, local_steps, made, made.options.rounds, left_out, both)
    networks = document["network"]
    if made.network.jitter:
        seeds = range(1, _DRAWS)
        networks |= {f"draw-{k}": {**networks["planned"], "seed": made.network.seed + k} for k in seeds}
    config = parse(document)
    run = resolve(config)
    sent_bytes, _, _, draws, _ = counted(run, layout, ROUNDS)  # in fewer, too little of what workers wait would be seen
    priced = draws[0]
    if priced.round_s is None or priced.utilisation is None or priced.between_stages is None:
        staying = made.workers - len(left_out)
        raise ConfigError(f"with {staying} worker{'s' * (staying > 1)}, {priced.note.removeprefix('unknown: ')}")
    round_s = [one.round_s for one in draws if one.round_s is not None]
    spread_s = _T_OF_THREE * stdev(round_s) / math.sqrt(len(round_s)) if len(round_s) > 1 else 0.0
    shorter = priced.round_s / fmean(round_s)
    codec = run.method.codec
    each_steps = tuple(config.length.local_steps_of(i) for i in range(config.workers))
    return Candidate(
        method=method,
        codec=codec.name,
        back=codec.back.name if codec.back else None,
        local_steps=each_steps,
        round_s=fmean(round_s),
        round_bytes=sent_bytes,
        utilisation=priced.utilisation * shorter,
        seconds_per_token=fmean(round_s) / (made.options.step_tokens * sum(each_steps)),
        between_stages=priced.between_stages * shorter,
        spread_s=spread_s,
        left_out=left_out,
    )
