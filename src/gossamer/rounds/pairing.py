"""Which rule, topology, codec and schedule can work together."""

import math

from gossamer.codecs import Codec
from gossamer.errors import PairingError
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Rule
from gossamer.topologies import Topology

__all__ = ["PLAIN_ROUNDS", "check"]

PLAIN_ROUNDS = Schedule()


def check(
    rule: Rule,
    topology: Topology,
    codec: Codec,
    local_steps: int | tuple[int, ...] = 1,
    schedule: Schedule = PLAIN_ROUNDS,
) -> None:
    """Raises PairingError when these cannot work together, with what is allowed instead."""
    got = f"rule '{rule.name}' on topology '{topology.name}' with {topology.n} workers"
    if rule.needs == "everyone" and not topology.everyone:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' needs everyone to hear everyone, which only topology 'complete' gives; "
            "use that, or a gossip rule such as 'gasloc'"
        )
    if rule.needs == "static" and not topology.static:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' keeps sums over its neighbours and needs the same graph in every round; "
            "use a static topology such as 'ring'"
        )
    if rule.needs == "tree" and not topology.tree:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' relays sums along a tree; use topology 'tree', 'chain' or 'star'"
        )
    if rule.needs == "push" and not topology.column_stochastic:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' counts the mass that each worker gives away, and here it does not sum to one; "
            "use a push topology such as 'random_push', or one whose weights are doubly stochastic, such as 'random'"
        )
    if rule.needs != "push" and not topology.doubly_stochastic:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' would drift, as the weights that workers give and get do not all sum to one; "
            "use a topology whose weights are doubly stochastic, such as 'random', or the rule 'sgp', which corrects for it"
        )
    if codec.back is not None and not rule.averages:
        raise PairingError(
            f"codec '{codec.name}' has back = '{codec.back.name}', the way back of a mean over everyone, and rule '{rule.name}' "
            "takes none; leave codec.back out, or take a rule such as 'diloco'"
        )
    if rule.site == "gradients" and local_steps != 1:
        raise PairingError(
            f"rule '{rule.name}' exchanges gradients in every inner step and got local_steps = {local_steps}; "
            "set run.local_steps = 1, or take a rule with a local phase such as 'diloco'"
        )
    if rule.site == "gradients" and not schedule.plain:
        raise PairingError(
            f"rule '{rule.name}' exchanges gradients before the step they are for and got {schedule}; leave [schedule] out, or "
            "take a rule on parameters such as 'diloco'"
        )
    if rule.delay_rounds and (schedule.overlap_steps or schedule.merge != "keep"):
        raise PairingError(
            f"rule '{rule.name}' hears {rule.delay_rounds} round late by itself and got schedule.overlap_steps = "
            f"{schedule.overlap_steps} and schedule.merge = {schedule.merge!r}; leave both out"
        )
    if rule.consensus is not None and math.isnan(rule.consensus.alpha):
        raise PairingError(
            f"{got} still has alpha = 'auto'; set a number, or call gossamer.rounds.stability.resolve_alpha(rule, topology) first"
        )
