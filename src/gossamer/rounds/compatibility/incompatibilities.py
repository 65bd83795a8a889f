"""The combinations that cannot work: one table of conditions, each with its error sentence.

Every driver checks its `Combination` against this table. A run file gives all fields, `gossamer.Outer` its rule, topology, codec
and schedule, and an event loop that is used directly only its own arguments.
"""

import math
from collections.abc import Callable

from gossamer.errors import PairingError, choose
from gossamer.rounds.compatibility import lossy_codecs as coding
from gossamer.rounds.compatibility.combination import Combination, Incompatibility
from gossamer.rounds.compatibility.modes import MODES
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Rule
from gossamer.settings.kinds import INSTEAD
from gossamer.topologies.mixing import pull


def combination_faults(combination: Combination) -> list[str]:
    """A sentence for each incompatibility of a combination."""
    return [row.sentence(combination) for row in INCOMPATIBILITIES if row.fails(combination)]


def check(combination: Combination) -> None:
    """Raises PairingError, with the first sentence, when something cannot work."""
    for sentence in combination_faults(combination):
        raise PairingError(sentence)


def _unsettled(c: Combination) -> bool:
    return c.rule.consensus is not None and math.isnan(c.rule.consensus.alpha) and c.topology.doubly_stochastic


def _step_s(c: Combination) -> object:
    network = c.pacing_network
    return network and network.step_s


def _without_step_s(c: Combination) -> bool:
    network = c.pacing_network
    if network is None:
        return False
    steps = network.step_s if isinstance(network.step_s, tuple) else (network.step_s,)
    return any(step_s is None or not step_s > 0 for step_s in steps)


def _count(c: Combination) -> int | None:
    """The number of declared networks; None without a run file."""
    return None if c.networks is None else len(c.networks)


def _names(c: Combination) -> str:
    return ", ".join(sorted(c.networks or ())) or "none"


def _reduction(c: Combination) -> str:
    return "reduction" if c.driver == "library" else "run.reduction"


# Rows for tables of a run file that exclude each other.
_TABLES = tuple(
    Incompatibility(
        f"[{kind}] with [{other}]",
        lambda c, kind=kind, other=other: {kind, other} <= c.tables,
        lambda c, kind=kind, other=other: (
            f"the run has [{kind}] and [{other}], but a {kind} method has no {other}; remove one of the two"
        ),
    )
    for kind, others in INSTEAD.items()
    for other in others
    if kind != "rule" and (kind, other) != ("pair", "server")  # each two once
)

# Rows for a rule's topology, codec and schedule.
_RULES = (
    Incompatibility(
        "workers of the topology",
        lambda c: c.workers is not None and c.topology.n != c.workers,
        lambda c: (
            f"topology '{c.topology.name}' is for {c.topology.n} workers, but the run has {c.workers}; make it for {c.workers}"
        ),
    ),
    Incompatibility(
        "everyone",
        lambda c: c.rule.needs == "everyone" and not c.topology.everyone,
        lambda c: (
            f"{c.where} cannot work: '{c.rule.name}' needs every worker to receive from all others, which only topology "
            "'complete' gives; use that, or a gossip rule such as 'gasloc'"
        ),
    ),
    Incompatibility(
        "static",
        lambda c: c.rule.needs == "static" and not c.topology.static,
        lambda c: (
            f"{c.where} cannot work: '{c.rule.name}' keeps sums over its neighbours and needs the same graph in every round; "
            "use a static topology such as 'ring'"
        ),
    ),
    Incompatibility(
        "tree",
        lambda c: c.rule.needs == "tree" and not c.topology.tree,
        lambda c: (
            f"{c.where} cannot work: '{c.rule.name}' relays sums along a tree; use topology 'tree', 'chain' or 'star'"
        ),
    ),
    Incompatibility(
        "push",
        lambda c: c.rule.needs == "push" and not c.topology.column_stochastic,
        lambda c: (
            f"{c.where} cannot work: '{c.rule.name}' counts the mass that each worker sends, and here it does not sum to "
            "one; use a push topology such as 'random_push', or one whose weights are doubly stochastic, such as 'random'"
        ),
    ),
    Incompatibility(
        "doubly stochastic",
        lambda c: c.rule.needs != "push" and not c.topology.doubly_stochastic,
        lambda c: (
            f"{c.where} cannot work: the mean of the workers would drift, as the weights that they send and receive do not all "
            "sum to one; use a topology whose weights are doubly stochastic, such as 'random', or the rule 'sgp', which corrects "
            "for it"
        ),
    ),
    Incompatibility(
        "alpha",
        _unsettled,
        lambda c: (
            f"{c.where} still has alpha = 'auto'; set a number, or call "
            "gossamer.rounds.stability.resolve_alpha(rule, topology) first"
        ),
    ),
    Incompatibility(
        "codec.back",
        lambda c: not c.asynchronous and c.codec.back is not None and not c.rule.averages,
        lambda c: (
            f"codec.back = '{c.codec.back and c.codec.back.name}' compresses the second leg of a mean over all workers, and rule "
            f"'{c.rule.name}' takes no such mean; remove codec.back, or use a rule such as 'diloco'"
        ),
    ),
    Incompatibility(
        "codec.back and tiles",
        lambda c: c.codec.back is not None and (c.codec.fit is not None or c.codec.back.fit is not None),
        lambda c: (
            f"codec '{c.codec.name}' has codec.back = '{c.codec.back and c.codec.back.name}', for which the vector is cut "
            "between workers, and tiles = true cuts matrices; set tiles = false, or remove codec.back"
        ),
    ),
    Incompatibility(
        "pushed mass and codec",
        coding.loses_mass,
        lambda c: (
            f"{c.where} cannot work with codec '{c.codec.name}': the mass that workers push is rounded and its weight is not, so "
            f"that even workers that agree move; remove [codec], or {coding.instead(c)}"
        ),
    ),
    Incompatibility(
        "parameters and codec",
        coding.destroys,
        lambda c: (
            f"{c.method_label} sends whole parameters, and {coding.too_much(c)}; {coding.instead(c)}, or use a finer codec"
        ),
    ),
    Incompatibility(
        "gradients and local steps",
        lambda c: c.rule.site == "gradients" and c.driver != "library" and c.full_steps not in (None, 1),
        lambda c: (
            f"rule '{c.rule.name}' exchanges gradients in every inner step and run.local_steps "
            f"{'is' if c.timetable is None else 'reaches'} {c.full_steps}; set run.local_steps = 1, or use a rule with a "
            "local phase such as 'diloco'"
        ),
    ),
    Incompatibility(
        "gradients and schedule",
        lambda c: c.rule.site == "gradients" and not c.schedule.plain,
        lambda c: (
            f"rule '{c.rule.name}' exchanges gradients before the inner step that uses them, so [schedule] cannot delay or "
            f"split them, but it is {c.schedule}; remove [schedule], or use a rule on parameters such as 'diloco'"
        ),
    ),
    Incompatibility(
        "no waiting",
        lambda c: (
            c.kind == "no waiting"
            and (
                c.rule.combine is not pull
                or c.rule.needs != "connected"
                or c.rule.site != "parameters"
                or c.rule.delay_rounds > 0
            )
        ),
        lambda c: (
            f"rule '{c.rule.name}' cannot run without waiting: it combines messages of one round, and an asynchronous run has "
            "no rounds; use a rule that gossips on parameters, such as 'gasloc', or a [server]"
        ),
    ),
)


def _lags(schedule: Schedule, rule: Rule, full_steps: int) -> tuple[tuple[int, int], ...]:
    """The fragments received in a round of `full_steps` steps, with their age in rounds."""
    stops = schedule.stops(0, full_steps, rule.delay_rounds, ahead=rule.sends_ahead, updates=bool(rule.mixes_updates))
    return tuple(sorted(one for stop in stops for one in stop.receives))


# Rows for the schedule of sends and receives.
_SCHEDULE = (
    Incompatibility(
        "fragments and local steps",
        lambda c: c.fewest_steps is not None and c.schedule.slots > c.fewest_steps,
        lambda c: (
            f"schedule.{'sends' if c.schedule.sends else 'fragments'} is {c.schedule.slots} and a round has {c.fewest_steps} "
            "inner steps; use at most one fragment per inner step"
        ),
    ),
    Incompatibility(
        "overlap and local steps",
        lambda c: c.fewest_steps is not None and c.schedule.overlap_steps > c.fewest_steps,
        lambda c: (
            f"schedule.overlap_steps is {c.schedule.overlap_steps} and a round has {c.fewest_steps} inner steps, but a fragment "
            f"must be received before it is sent again; use at most {c.fewest_steps}, or raise run.local_steps"
        ),
    ),
    Incompatibility(
        "local steps that change and overlap",
        lambda c: (
            c.timetable is not None
            and max(c.schedule.slots, c.schedule.overlap_steps) <= min(c.all_full_steps)  # else another row refuses it
            and len({_lags(c.schedule, c.rule, full_steps) for full_steps in {*c.all_full_steps}}) > 1
        ),
        lambda c: (
            f"run.local_steps changes, and with schedule.fragments = {c.schedule.fragments}, schedule.sends = {c.schedule.sends} "
            f"and schedule.overlap_steps = {c.schedule.overlap_steps} some parts would be received in the round that sends them "
            "under some local steps and a round later under others; set schedule.overlap_steps = 0, or schedule.fragments = 1"
        ),
    ),
    Incompatibility(
        "delayed rule and overlap",
        lambda c: c.rule.delay_rounds > 0 and (c.schedule.overlap_steps > 0 or c.schedule.merge != "keep"),
        lambda c: (
            f"rule '{c.rule.name}' already receives {c.rule.delay_rounds} round late, but schedule.overlap_steps = "
            f"{c.schedule.overlap_steps} and schedule.merge = {c.schedule.merge!r}; remove both"
        ),
    ),
    Incompatibility(
        "adapt and mixed updates",
        lambda c: bool(c.adapt) and bool(c.rule.mixes_updates),
        lambda c: (
            f"run.adapt counts on transfers that are hidden, and rule '{c.rule.name}' has mix_updates = "
            f"'{c.rule.mixes_updates}', for which all wait; remove one of the two"
        ),
    ),
    Incompatibility(
        "averaging and fragments",
        lambda c: c.averaging is not None and c.schedule.fragments > 1,
        lambda c: (
            f"inner.averaging is '{c.averaging}', whose iterate and average are exchanged together, and schedule.fragments is "
            f"{c.schedule.fragments}; set schedule.fragments = 1"
        ),
    ),
    Incompatibility(
        "moments and inner optimizer",
        lambda c: (
            c.driver != "library"
            and bool(c.schedule.inner_every)
            and (c.optimizer not in ("adamw", "qh_adopt") or c.averaging is not None)
        ),
        lambda c: (
            "schedule.inner_every exchanges the moments of plain AdamW or QHAdopt, and the run has "
            + (f"inner.optimizer = '{c.optimizer}'" if c.averaging is None else f"inner.averaging = '{c.averaging}'")
            + "; use inner.optimizer = 'adamw' or 'qh_adopt' without averaging, or remove schedule.inner_every"
        ),
    ),
    Incompatibility(
        "estimates and rule",
        lambda c: c.driver != "library" and c.optimizer == "acco_adamw" and c.rule.name != "acco",
        lambda c: (
            f"inner.optimizer is 'acco_adamw', which takes gradients that come a step late, and rule '{c.rule.name}' sends none "
            "of these; use rule 'acco', or inner.optimizer = 'adamw'"
        ),
    ),
    Incompatibility(
        "all-reduce and overlap",
        lambda c: c.reduction == "all_reduce" and c.schedule.overlap_steps > 0,
        lambda c: (
            f"{_reduction(c)} = 'all_reduce' blocks, and schedule.overlap_steps is {c.schedule.overlap_steps}; set it to "
            "'ordered' to train while a mean is in flight"
        ),
    ),
    Incompatibility(
        "all-reduce and rule",
        lambda c: (
            c.kind == "rounds"
            and c.reduction == "all_reduce"
            and not (c.rule.averages and c.codec.exact and c.codec.back is None)
        ),
        lambda c: (
            f"{_reduction(c)} is 'all_reduce', and rule '{c.rule.name}' with codec '{c.codec.name}' takes no mean that the "
            "backend can compute; set it to 'ordered', or use a rule such as 'diloco' with the codec 'exact'"
        ),
    ),
    Incompatibility(
        "adapt and one local step",
        lambda c: bool(c.adapt) and c.full_steps == 1,
        lambda c: (
            f"run.adapt needs room to shrink, but run.local_steps is {c.local_steps}; set run.local_steps to the most that a "
            "worker may take"
        ),
    ),
    Incompatibility(
        "adapt, weigh_steps and a delayed rule",
        lambda c: bool(c.adapt) and c.weigh_steps and c.rule.delay_rounds > 0,
        lambda c: (
            f"run.adapt and run.weigh_steps cannot be combined with rule '{c.rule.name}': it applies updates "
            f"{c.rule.delay_rounds} round late, when the local steps they were weighted by may have changed; disable one"
        ),
    ),
    Incompatibility(
        "adapt and an unknown network",
        lambda c: isinstance(c.adapt, str) and c.networks is not None and c.adapt not in c.networks,
        lambda c: (
            f"run.adapt is '{c.adapt}': "
            + (choose("network", str(c.adapt), c.networks) if c.networks else "the run file declares no network")
            + "; name a [network.NAME] of this file, or write true"
        ),
    ),
    Incompatibility(
        "adapt and several networks",
        lambda c: c.adapt is True and c.kind == "rounds" and c.driver == "simulate" and _count(c) not in (None, 1),
        lambda c: (
            f"run.adapt is true and the run file declares {_count(c)} networks ({_names(c)}), but a simulation "
            "needs exactly one; declare one as [network.NAME], or set run.adapt to the name of one"
        ),
    ),
    Incompatibility(
        "adapt without seconds",
        lambda c: c.kind == "rounds" and _without_step_s(c),
        lambda c: (
            f"run.adapt needs the seconds of an inner step, and the network gives step_s = {_step_s(c)}; set it above 0"
        ),
    ),
)


_ROUNDS_ONLY: dict[str, Callable[[Combination], bool]] = {
    "[schedule]": lambda c: not c.schedule.plain,
    "inner.averaging": lambda c: c.averaging is not None,
    "run.adapt": lambda c: bool(c.adapt),
    "run.weigh_steps": lambda c: c.weigh_steps,
    "codec.back": lambda c: c.codec.back is not None,
}

# Rows for asynchronous runs.
_ASYNCHRONOUS = (
    *(
        Incompatibility(
            f"asynchronous with {key}",
            lambda c, given=given: c.asynchronous and given(c),
            lambda c, key=key: (
                f"{key} applies to synchronous rounds only, and this run is asynchronous ([server], [pair] or run.wait = "
                f"false); remove {key} (a server has events.fragments, events.overlap and events.dylu)"
            ),
        )
        for key, given in _ROUNDS_ONLY.items()
    ),
    Incompatibility(
        "server and meetings",
        lambda c: c.kind == "server" and c.meetings is not None,
        lambda c: (
            f"{c.method_label} got events.meetings = {c.meetings}, but its workers never meet; remove events.meetings"
        ),
    ),
    Incompatibility(
        "server and waiting",
        lambda c: c.kind == "server" and not c.wait,
        lambda c: (
            f"{c.method_label} got run.wait = false, but its workers exchange with the server only and never wait for each "
            "other; remove run.wait"
        ),
    ),
    Incompatibility(
        "no waiting and meetings",
        lambda c: c.kind == "no waiting" and c.meetings is not None,
        lambda c: (
            f"{c.method_label} got events.meetings = {c.meetings}, but its workers read what their peers published last and "
            "never meet; remove events.meetings, or use a [pair] method"
        ),
    ),
    Incompatibility(
        "fragments without a server",
        lambda c: c.kind in ("pair", "no waiting") and c.fragments > 1,
        lambda c: (
            f"{c.method_label} got events.fragments = {c.fragments}, but only a server keeps fragments; remove events.fragments"
        ),
    ),
    Incompatibility(
        "overlap of one fragment",
        lambda c: c.overlap and c.fragments < 2,
        lambda c: (
            f"events.overlap is {c.overlap} with events.fragments = {c.fragments}, so everything that a worker learns while its "
            "reply is in flight would be lost; set events.fragments to at least 2, or remove events.overlap"
        ),
    ),
    Incompatibility(
        "pair and phase",
        lambda c: c.pair is not None and not c.pair.any_phase,
        lambda c: (
            f"{c.method_label} cannot train with run.local_steps = {c.local_steps} and inner.optimizer = '{c.optimizer}': its "
            "local phase must be exactly one gradient of a convex function; use 'a2cid2' or 'ad_psgd'"
        ),
    ),
    Incompatibility(
        "pair and topology",
        lambda c: c.kind == "pair" and not c.topology.static,
        lambda c: (
            f"{c.method_label} on topology '{c.topology.name}' cannot work: pairs meet at random along the edges of one fixed "
            "graph, and this one changes; use a static topology such as 'complete' or 'ring'"
        ),
    ),
    Incompatibility(
        "clock",
        lambda c: c.clocked and c.clock is None and _count(c) != 1,
        lambda c: (
            f"an asynchronous run needs one network for its timing, but the run file has {_count(c)} networks "
            f"({_names(c)}); declare one as [network.NAME] with step_s (in Python network=...), and set "
            "events.network if there are several"
        ),
    ),
    Incompatibility(
        "unknown clock",
        lambda c: c.clocked and c.clock is not None and c.clock not in (c.networks or {}),
        lambda c: choose("network in events.network", str(c.clock), c.networks or {}) + "; correct the name",
    ),
    Incompatibility(
        "dylu and local steps",
        lambda c: c.asynchronous and c.dylu and isinstance(c.local_steps, tuple),
        lambda c: (
            "events.dylu = true sets local steps by speed, and run.local_steps is "
            f"{list(c.local_steps) if isinstance(c.local_steps, tuple) else c.local_steps}; give one number, that of the fastest "
            "worker"
        ),
    ),
    Incompatibility(
        "real processes and virtual time",
        lambda c: c.driver == "train" and c.asynchronous and (c.overlap or c.absences > 0),
        lambda c: (
            f"gossamer train got {'events.overlap = true' if c.overlap else f'{c.absences} events.absences'}, which exist in "
            "simulations only: a real worker waits for the reply of its server, and leaves when it is stopped; remove it, or use "
            "gossamer simulate"
        ),
    ),
    Incompatibility(
        "real processes and regions",
        lambda f: f.driver == "train" and f.regions,
        lambda f: (
            f"gossamer train got {f.method_label}, whose servers in two levels exist in simulations only; use gossamer simulate, "
            "or one server for all workers such as 'delayed_nesterov' or 'heloco'"
        ),
    ),
)

INCOMPATIBILITIES: tuple[Incompatibility, ...] = (
    *_TABLES,
    *MODES,
    *_ASYNCHRONOUS,
    *_SCHEDULE,
    *_RULES,
)
"""Every combination that cannot work; if several apply, the first is reported."""
