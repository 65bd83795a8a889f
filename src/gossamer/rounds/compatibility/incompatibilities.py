"""The combinations that cannot work: one table of conditions, each with its error sentence.

Every driver checks its `Facts` against this table. A run file gives all facts, `gossamer.Outer` its rule, topology, codec and
schedule, and an event loop that is used directly only its own arguments.
"""

import math
from collections.abc import Callable

from gossamer.errors import PairingError, choose
from gossamer.rounds.compatibility import lossy_codecs as coding
from gossamer.rounds.compatibility.adaptive_steps import ADAPTING
from gossamer.rounds.compatibility.batched_replicas import BATCHED
from gossamer.rounds.compatibility.combination import INSTEAD, Facts, Pairing
from gossamer.rounds.compatibility.elastic_runs import ELASTIC
from gossamer.rounds.compatibility.expert_models import EXPERTS
from gossamer.rounds.compatibility.foreign_loops import OWN_LOOP
from gossamer.rounds.compatibility.staged_models import STAGES
from gossamer.topologies.mixing import pull

__all__ = ["PAIRINGS", "check", "faults"]


def faults(facts: Facts) -> list[str]:
    """A sentence for each pairing that cannot work."""
    return [pairing.sentence(facts) for pairing in PAIRINGS if pairing.fails(facts)]


def check(facts: Facts) -> None:
    """Raises PairingError, with the first sentence, when something cannot work."""
    for sentence in faults(facts):
        raise PairingError(sentence)


def _unsettled(f: Facts) -> bool:
    return f.rule.consensus is not None and math.isnan(f.rule.consensus.alpha) and f.topology.doubly_stochastic


def _step_s(f: Facts) -> object:
    network = f.pacing_network
    return network and network.step_s


def _without_step_s(f: Facts) -> bool:
    network = f.pacing_network
    if network is None:
        return False
    steps = network.step_s if isinstance(network.step_s, tuple) else (network.step_s,)
    return any(step_s is None or not step_s > 0 for step_s in steps)


def _count(f: Facts) -> int | None:
    """How many networks are declared; None without a run file."""
    return None if f.networks is None else len(f.networks)


def _names(f: Facts) -> str:
    return ", ".join(sorted(f.networks or ())) or "none"


def _reduction(f: Facts) -> str:
    return "reduction" if f.driver == "library" else "run.reduction"


# Rows for what the tables of a run file exclude.
_TABLES = tuple(
    Pairing(
        f"[{kind}] with [{other}]",
        lambda f, kind=kind, other=other: {kind, other} <= f.tables,
        lambda f, kind=kind, other=other: (
            f"the run has [{kind}] and [{other}], but a {kind} method has no {other}; remove one of the two"
        ),
    )
    for kind, others in INSTEAD.items()
    for other in others
    if kind != "rule" and (kind, other) != ("pair", "server")  # each two once
)

# Which topology a rule needs, and what it can be combined with.
_RULES = (
    Pairing(
        "workers of the topology",
        lambda f: f.workers is not None and f.topology.n != f.workers,
        lambda f: (
            f"topology '{f.topology.name}' is for {f.topology.n} workers, but the run has {f.workers}; make it for {f.workers}"
        ),
    ),
    Pairing(
        "everyone",
        lambda f: f.rule.needs == "everyone" and not f.topology.everyone,
        lambda f: (
            f"{f.where} cannot work: '{f.rule.name}' needs every worker to receive from all others, which only topology "
            "'complete' gives; use that, or a gossip rule such as 'gasloc'"
        ),
    ),
    Pairing(
        "static",
        lambda f: f.rule.needs == "static" and not f.topology.static,
        lambda f: (
            f"{f.where} cannot work: '{f.rule.name}' keeps sums over its neighbours and needs the same graph in every round; "
            "use a static topology such as 'ring'"
        ),
    ),
    Pairing(
        "tree",
        lambda f: f.rule.needs == "tree" and not f.topology.tree,
        lambda f: (
            f"{f.where} cannot work: '{f.rule.name}' relays sums along a tree; use topology 'tree', 'chain' or 'star'"
        ),
    ),
    Pairing(
        "push",
        lambda f: f.rule.needs == "push" and not f.topology.column_stochastic,
        lambda f: (
            f"{f.where} cannot work: '{f.rule.name}' counts the mass that each worker sends, and here it does not sum to "
            "one; use a push topology such as 'random_push', or one whose weights are doubly stochastic, such as 'random'"
        ),
    ),
    Pairing(
        "doubly stochastic",
        lambda f: f.rule.needs != "push" and not f.topology.doubly_stochastic,
        lambda f: (
            f"{f.where} cannot work: the mean of the workers would drift, as the weights that they send and receive do not all "
            "sum to one; use a topology whose weights are doubly stochastic, such as 'random', or the rule 'sgp', which corrects "
            "for it"
        ),
    ),
    Pairing(
        "alpha",
        _unsettled,
        lambda f: (
            f"{f.where} still has alpha = 'auto'; set a number, or call "
            "gossamer.rounds.stability.resolve_alpha(rule, topology) first"
        ),
    ),
    Pairing(
        "codec.back",
        lambda f: not f.asynchronous and f.codec.back is not None and not f.rule.averages,
        lambda f: (
            f"codec.back = '{f.codec.back and f.codec.back.name}' compresses the second leg of a mean over all workers, and rule "
            f"'{f.rule.name}' takes no such mean; remove codec.back, or use a rule such as 'diloco'"
        ),
    ),
    Pairing(
        "codec.back and tiles",
        lambda f: f.codec.back is not None and (f.codec.fit is not None or f.codec.back.fit is not None),
        lambda f: (
            f"codec '{f.codec.name}' has codec.back = '{f.codec.back and f.codec.back.name}', for which the vector is cut "
            "between workers, and tiles = true cuts matrices; set tiles = false, or remove codec.back"
        ),
    ),
    Pairing(
        "pushed mass and codec",
        coding.loses_mass,
        lambda f: (
            f"{f.where} cannot work with codec '{f.codec.name}': the mass that workers push is rounded and its weight is not, so "
            f"that even workers that agree move; remove [codec], or {coding.instead(f)}"
        ),
    ),
    Pairing(
        "parameters and codec",
        coding.destroys,
        lambda f: (
            f"{f.who} sends whole parameters, and {coding.too_much(f)}; {coding.instead(f)}, or use a finer codec"
        ),
    ),
    Pairing(
        "gradients and local steps",
        lambda f: f.rule.site == "gradients" and f.driver != "library" and f.full_steps not in (None, 1),
        lambda f: (
            f"rule '{f.rule.name}' exchanges gradients in every inner step and run.local_steps is {f.local_steps}; "
            "set run.local_steps = 1, or use a rule with a local phase such as 'diloco'"
        ),
    ),
    Pairing(
        "gradients and schedule",
        lambda f: f.rule.site == "gradients" and not f.schedule.plain,
        lambda f: (
            f"rule '{f.rule.name}' exchanges gradients before the inner step that uses them, so [schedule] cannot delay or "
            f"split them, but it is {f.schedule}; remove [schedule], or use a rule on parameters such as 'diloco'"
        ),
    ),
    Pairing(
        "no waiting",
        lambda f: (
            f.kind == "no waiting"
            and (
                f.rule.combine is not pull
                or f.rule.needs != "connected"
                or f.rule.site != "parameters"
                or f.rule.delay_rounds > 0
            )
        ),
        lambda f: (
            f"rule '{f.rule.name}' cannot run without waiting: it combines messages of one round, and an asynchronous run has "
            "no rounds; use a rule that gossips on parameters, such as 'gasloc', or a [server]"
        ),
    ),
)

# When things are sent and received, and how many inner steps lie between.
_SCHEDULE = (
    Pairing(
        "fragments and local steps",
        lambda f: f.full_steps is not None and f.schedule.slots > f.full_steps,
        lambda f: (
            f"schedule.{'sends' if f.schedule.sends else 'fragments'} is {f.schedule.slots} and a round has {f.full_steps} inner "
            "steps; use at most one fragment per inner step"
        ),
    ),
    Pairing(
        "overlap and local steps",
        lambda f: f.full_steps is not None and f.schedule.overlap_steps > f.full_steps,
        lambda f: (
            f"schedule.overlap_steps is {f.schedule.overlap_steps} and a round has {f.full_steps} inner steps, but a fragment "
            f"must be received before it is sent again; use at most {f.full_steps}, or raise run.local_steps"
        ),
    ),
    Pairing(
        "delayed rule and overlap",
        lambda f: f.rule.delay_rounds > 0 and (f.schedule.overlap_steps > 0 or f.schedule.merge != "keep"),
        lambda f: (
            f"rule '{f.rule.name}' already receives {f.rule.delay_rounds} round late, but schedule.overlap_steps = "
            f"{f.schedule.overlap_steps} and schedule.merge = {f.schedule.merge!r}; remove both"
        ),
    ),
    Pairing(
        "adapt and mixed updates",
        lambda f: bool(f.adapt) and bool(f.rule.mixes_updates),
        lambda f: (
            f"run.adapt counts on transfers that are hidden, and rule '{f.rule.name}' has mix_updates = "
            f"'{f.rule.mixes_updates}', for which all wait; remove one of the two"
        ),
    ),
    Pairing(
        "averaging and fragments",
        lambda f: f.averaging is not None and f.schedule.fragments > 1,
        lambda f: (
            f"inner.averaging is '{f.averaging}', whose iterate and average are exchanged together, and schedule.fragments is "
            f"{f.schedule.fragments}; set schedule.fragments = 1"
        ),
    ),
    Pairing(
        "moments and inner optimizer",
        lambda f: (
            f.driver != "library"
            and bool(f.schedule.inner_every)
            and (f.optimizer != "adamw" or f.averaging is not None)
        ),
        lambda f: (
            "schedule.inner_every exchanges the moments of plain AdamW, and the run has "
            + (f"inner.optimizer = '{f.optimizer}'" if f.averaging is None else f"inner.averaging = '{f.averaging}'")
            + "; use inner.optimizer = 'adamw' without averaging, or remove schedule.inner_every"
        ),
    ),
    Pairing(
        "all-reduce and overlap",
        lambda f: f.reduction == "all_reduce" and f.schedule.overlap_steps > 0,
        lambda f: (
            f"{_reduction(f)} = 'all_reduce' blocks, and schedule.overlap_steps is {f.schedule.overlap_steps}; set it to "
            "'ordered' to train while a mean is in flight"
        ),
    ),
    Pairing(
        "all-reduce and rule",
        lambda f: (
            f.kind == "rounds"
            and f.reduction == "all_reduce"
            and not (f.rule.averages and f.codec.exact and f.codec.back is None)
        ),
        lambda f: (
            f"{_reduction(f)} is 'all_reduce', and rule '{f.rule.name}' with codec '{f.codec.name}' takes no mean that the "
            "backend can compute; set it to 'ordered', or use a rule such as 'diloco' with the codec 'exact'"
        ),
    ),
    Pairing(
        "adapt and one local step",
        lambda f: bool(f.adapt) and f.full_steps == 1,
        lambda f: (
            f"run.adapt needs room to shrink, but run.local_steps is {f.local_steps}; set run.local_steps to the most that a "
            "worker may take"
        ),
    ),
    Pairing(
        "adapt, weigh_steps and a delayed rule",
        lambda f: bool(f.adapt) and f.weigh_steps and f.rule.delay_rounds > 0,
        lambda f: (
            f"run.adapt and run.weigh_steps cannot be combined with rule '{f.rule.name}': it applies updates "
            f"{f.rule.delay_rounds} round late, when the local steps they were weighted by may have changed; disable one"
        ),
    ),
    Pairing(
        "adapt and an unknown network",
        lambda f: isinstance(f.adapt, str) and f.networks is not None and f.adapt not in f.networks,
        lambda f: (
            f"run.adapt is '{f.adapt}': "
            + (choose("network", str(f.adapt), f.networks) if f.networks else "the run file declares no network")
            + "; name a [network.NAME] of this file, or write true"
        ),
    ),
    Pairing(
        "adapt and several networks",
        lambda f: f.adapt is True and f.kind == "rounds" and f.driver == "simulate" and _count(f) not in (None, 1),
        lambda f: (
            f"run.adapt is true and the run file declares {_count(f)} networks ({_names(f)}), but a simulation "
            "needs exactly one; declare one as [network.NAME], or set run.adapt to the name of one"
        ),
    ),
    Pairing(
        "adapt without seconds",
        lambda f: f.kind == "rounds" and _without_step_s(f),
        lambda f: (
            f"run.adapt needs the seconds of an inner step, and the network gives step_s = {_step_s(f)}; set it above 0"
        ),
    ),
)


_ROUNDS_ONLY: dict[str, Callable[[Facts], bool]] = {
    "[schedule]": lambda f: not f.schedule.plain,
    "inner.averaging": lambda f: f.averaging is not None,
    "run.adapt": lambda f: bool(f.adapt),
    "run.weigh_steps": lambda f: f.weigh_steps,
    "codec.back": lambda f: f.codec.back is not None,
}

# What asynchronous runs can and cannot do.
_ASYNCHRONOUS = (
    *(
        Pairing(
            f"asynchronous with {key}",
            lambda f, given=given: f.asynchronous and given(f),
            lambda f, key=key: (
                f"{key} applies to synchronous rounds only, and this run is asynchronous ([server], [pair] or run.wait = "
                f"false); remove {key} (a server has events.fragments, events.overlap and events.dylu)"
            ),
        )
        for key, given in _ROUNDS_ONLY.items()
    ),
    Pairing(
        "server and meetings",
        lambda f: f.kind == "server" and f.meetings is not None,
        lambda f: f"{f.who} got events.meetings = {f.meetings}, but its workers never meet; remove events.meetings",
    ),
    Pairing(
        "server and waiting",
        lambda f: f.kind == "server" and not f.wait,
        lambda f: (
            f"{f.who} got run.wait = false, but its workers exchange with the server only and never wait for each other; remove "
            "run.wait"
        ),
    ),
    Pairing(
        "server and predictions of workers",
        lambda f: f.kind == "server" and f.eval_js,
        lambda f: (
            f"{f.who} got run.eval_js = true, which compares the models of workers, but with a server only its own model is "
            "validated; remove run.eval_js"
        ),
    ),
    Pairing(
        "no waiting and meetings",
        lambda f: f.kind == "no waiting" and f.meetings is not None,
        lambda f: (
            f"{f.who} got events.meetings = {f.meetings}, but its workers read what their peers published last and never meet; "
            "remove events.meetings, or use a [pair] method"
        ),
    ),
    Pairing(
        "fragments without a server",
        lambda f: f.kind in ("pair", "no waiting") and f.fragments > 1,
        lambda f: (
            f"{f.who} got events.fragments = {f.fragments}, but only a server keeps fragments; remove events.fragments"
        ),
    ),
    Pairing(
        "overlap of one fragment",
        lambda f: f.overlap and f.fragments < 2,
        lambda f: (
            f"events.overlap is {f.overlap} with events.fragments = {f.fragments}, so everything that a worker learns while its "
            "reply is in flight would be lost; set events.fragments to at least 2, or remove events.overlap"
        ),
    ),
    Pairing(
        "pair and phase",
        lambda f: f.pair is not None and not f.pair.any_phase,
        lambda f: (
            f"{f.who} cannot train with run.local_steps = {f.local_steps} and inner.optimizer = '{f.optimizer}': its local phase "
            "must be exactly one gradient of a convex function; use 'a2cid2' or 'ad_psgd'"
        ),
    ),
    Pairing(
        "pair and topology",
        lambda f: f.kind == "pair" and not f.topology.static,
        lambda f: (
            f"{f.who} on topology '{f.topology.name}' cannot work: pairs meet at random along the edges of one fixed graph, and "
            "this one changes; use a static topology such as 'complete' or 'ring'"
        ),
    ),
    Pairing(
        "clock",
        lambda f: f.clocked and f.clock is None and _count(f) != 1,
        lambda f: (
            f"an asynchronous run needs one network for its timing, but the run file has {_count(f)} networks "
            f"({_names(f)}); declare one as [network.NAME] with step_s (in Python network=...), and set "
            "events.network if there are several"
        ),
    ),
    Pairing(
        "unknown clock",
        lambda f: f.clocked and f.clock is not None and f.clock not in (f.networks or {}),
        lambda f: choose("network in events.network", str(f.clock), f.networks or {}) + "; correct the name",
    ),
    Pairing(
        "dylu and local steps",
        lambda f: f.asynchronous and f.dylu and isinstance(f.local_steps, tuple),
        lambda f: (
            "events.dylu = true sets local steps by speed, and run.local_steps is "
            f"{list(f.local_steps) if isinstance(f.local_steps, tuple) else f.local_steps}; give one number, that of the fastest "
            "worker"
        ),
    ),
    Pairing(
        "real processes and virtual time",
        lambda f: f.driver == "train" and f.asynchronous and (f.overlap or f.absences > 0),
        lambda f: (
            f"gossamer train got {'events.overlap = true' if f.overlap else f'{f.absences} events.absences'}, which exist in "
            "simulations only: a real worker waits for the reply of its server, and leaves when it is stopped; remove it, or use "
            "gossamer simulate"
        ),
    ),
    Pairing(
        "real processes and regions",
        lambda f: f.driver == "train" and f.regions,
        lambda f: (
            f"gossamer train got {f.who}, whose servers in two levels exist in simulations only; use gossamer simulate, or one "
            "server for all workers such as 'delayed_nesterov' or 'heloco'"
        ),
    ),
)

PAIRINGS: tuple[Pairing, ...] = (
    *_TABLES, *OWN_LOOP, *_ASYNCHRONOUS, *ELASTIC, *STAGES, *BATCHED, *EXPERTS, *ADAPTING, *_SCHEDULE, *_RULES,
)  # fmt: skip
"""Every combination that cannot work; if several apply, the first is reported."""
