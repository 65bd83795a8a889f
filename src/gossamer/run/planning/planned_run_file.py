"""The run file of a plan: what is trained as it was planned, with comments that name its price, its settings and its limits."""

from collections.abc import Mapping
from typing import Any

import tomli_w

from gossamer.network.links import to_options
from gossamer.network.timeline import format_utilisation
from gossamer.report.table import digits_text
from gossamer.run.planning.choice import Candidate
from gossamer.run.planning.expected_loss import EXACT_CODECS
from gossamer.run.planning.measured_losses import CODECS_MEASURED, nearest_measured
from gossamer.run.planning.optima import Optima, optima
from gossamer.run.planning.plan import METHODS, PlanSettings, RunPlan, network_of
from gossamer.settings.schema import toml_value


def run_toml(
    plan: RunPlan,
    candidate: Candidate | None = None,
    *,
    name: str = "planned",
    steps: int | None = None,
    adapt: bool = False,
    weigh_steps: bool = False,
) -> str:
    """A run file that trains as planned, on the text of the plan's settings read as bytes.

    Learning rates, warm-up and outer momentum are those for its size (`gossamer.run.planning.optima`), whose source a comment
    names.

    Args:
        candidate: the best one unless given.
        steps: inner steps, rounded up to whole rounds; those of the plan unless given.
        adapt, weigh_steps: as in the `[run]` table; the planned local steps are then the initial ones. Ignored for data
            parallelism, which has no local steps.
    """
    chosen = plan.best if candidate is None else candidate
    local_steps = chosen.local_steps
    rounds = plan.rounds_of(chosen) if steps is None else -(-steps // chosen.full_steps)
    best, parts = optima_of(plan, chosen, rounds), method_tables(chosen)
    parts["rule"] |= best.rule
    document: dict[str, Any] = {
        "name": name,
        "workers": len(local_steps),
        "seed": plan.options.seed,
        **parts,
        "model": toml_value(plan.model),
        "data": {**plan.options.data_table, **({"accumulate": chosen.site} if chosen.site > 1 else {})},
        "inner": dict(best.inner),
        "run": {
            "steps": rounds * chosen.full_steps,
            "local_steps": local_steps[0] if len(set(local_steps)) == 1 else list(local_steps),
            **({"adapt": True} if adapt and chosen.full_steps > 1 else {}),
            **({"weigh_steps": True} if weigh_steps and chosen.method != "data parallel" else {}),
        },
        "network": {"planned": to_options(network_of(plan, chosen))},
    }
    document = with_tables(document, plan.replica)
    head = (
        f"{headline(plan, chosen)}{_sending_comment(chosen)}"
        f"{without_text(chosen)}{_uneven_steps_comment(chosen)}{_sites_comment(chosen, plan.options)}"
        f"{best.source}"
        f"{plan.length_of(chosen, rounds)}"
    )
    return head + tomli_w.dumps(document)


def optima_of(plan: RunPlan, chosen: Candidate, rounds: int, *, own_lr: bool = False) -> Optima:
    """The settings of a candidate's run of so many rounds."""
    replicas, steps = len(chosen.local_steps), rounds * chosen.full_steps
    batch_tokens = plan.options.step_tokens * replicas * chosen.site
    return optima(chosen.trained_as, plan.parameters, replicas, batch_tokens, steps, chosen.full_steps, own_lr=own_lr)


def with_tables(document: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A run file with further keys in its tables, which replace those of the same name.

    >>> with_tables({"name": "a", "run": {"steps": 1}}, {"run": {"seed": 2}})
    {'name': 'a', 'run': {'steps': 1, 'seed': 2}}
    """
    return {**document, **{table: {**document.get(table, {}), **keys} for table, keys in tables.items()}}


def method_tables(chosen: Candidate) -> dict[str, dict[str, Any]]:
    """The tables `rule`, `topology` and `codec` of a run file for a candidate of `plan`, at the best measured settings."""
    rule, peers = METHODS[chosen.trained_as]
    if peers is not None and chosen.codec not in (*EXACT_CODECS, *CODECS_MEASURED.get(chosen.method, ())):
        rule = "anchored_gasloc"  # the same bytes, but of differences
    _, tuned = nearest_measured(chosen.trained_as, chosen.full_steps)
    return {
        "rule": {
            "name": rule,
            **{key: value for key in ("lr", "momentum") if (value := getattr(tuned, key)) is not None},
        },
        "topology": {"name": "complete"} if peers is None else {"name": "random", "peers": peers},
        "codec": {"name": chosen.codec, **({"back": chosen.back} if chosen.back else {})},
    }


def headline(plan: RunPlan, chosen: Candidate) -> str:
    """The first comment of a run file: its method, its size and its seconds a round."""
    return (
        f"# {chosen.method} with {chosen.full_steps:,} local step{'s' * (chosen.full_steps > 1)}, planned for "
        f"{plan.parameters:,} parameters: {digits_text(chosen.round_bytes / 1e6)} MB sent and {digits_text(chosen.round_s)} s "
        f"a round, {format_utilisation(chosen.utilisation, chosen.between_stages)}.\n"
    )


def _sending_comment(chosen: Candidate) -> str:
    """A comment of the run file where its seconds are those of DDP, and `gossamer train` takes longer; else empty."""
    as_sent = chosen.unhidden_round_s
    if as_sent is None or as_sent <= chosen.round_s * (1 + 1e-9):
        return ""
    return (
        f"# That is as DDP runs it; gossamer train sends after the step and takes {digits_text(as_sent)} s a round.\n"
    )


def _uneven_steps_comment(chosen: Candidate) -> str:
    """A comment of the run file that names the workers with fewer local steps; empty where there are none."""
    if not chosen.fewer:
        return ""
    return f"# {chosen.fewer[0].upper()}{chosen.fewer[1:]} of {chosen.full_steps:,} local steps, which count less.\n"


def in_a_site(chosen: Candidate, options: PlanSettings) -> str:
    """How the processes of a site train as one worker, where each worker is a site; else empty.

    Codecs with blocks or draws, with which a plan's sums come back in bf16, would cut each shard otherwise than a whole worker.
    """
    if chosen.site == 1:
        return ""
    if chosen.codec in EXACT_CODECS and chosen.back is None:
        ways = "under FSDP2" if options.sites == "only" else "in data parallelism or under FSDP2"
        return f"{ways}: gossamer train --shards {chosen.site}"
    casts = "exact" if len(chosen.local_steps) > 2 else "bf16"
    return (
        f"in a loop of your own with gossamer.Outer(site=...), whose shards take any codec; gossamer train --shards "
        f"{chosen.site} (FSDP2) takes none such as this: --codec {casts} plans for it"
    )


def _sites_comment(chosen: Candidate, options: PlanSettings) -> str:
    """A comment of the run file where each of its workers is a site; else empty."""
    if chosen.site == 1:
        return ""
    how = in_a_site(chosen, options).replace("; ", ";\n# ")
    return f"# Each worker is a site of {chosen.site} processes, which take a micro-batch each,\n# {how}.\n"


def without_text(chosen: Candidate) -> str:
    """A comment of the run file that names the workers left out; empty where there are none."""
    if not chosen.dropped:
        return ""
    return f"# Without {chosen.dropped} of the planned network, whose own text is lost; the others are renumbered.\n"
