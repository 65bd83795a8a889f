"""What an elastic run cannot be combined with: rows for the table."""

from gossamer.rounds.compatibility.combination import Combination, Incompatibility
from gossamer.rounds.updates import topology_of_updates


def _key(c: Combination) -> str:
    """What is set, in a run file or in `Outer(elastic=True)`."""
    return "elastic" if c.driver == "library" else "run.elastic"


def _mean_of_updates(c: Combination) -> bool:
    updates = topology_of_updates(c.rule, c.topology.n, seed=0)
    return updates is not None and (updates.everyone or not updates.symmetric)


ELASTIC = (
    Incompatibility(
        "peers and rounds",
        lambda c: c.peers and c.driver == "train" and c.kind == "rounds" and not c.elastic,
        lambda c: (
            f"the run has [peers] and run.elastic is {c.elastic}, so its workers exchange over gloo, which cannot encrypt; set "
            "run.elastic = true, or remove [peers]"
        ),
    ),
    Incompatibility(
        "elastic and asynchronous",
        lambda c: c.elastic and c.asynchronous,
        lambda c: (
            f"{_key(c)} is true and {c.who} runs asynchronously ({c.kind}); remove {_key(c)}: nobody waits there for "
            "a worker that is gone"
        ),
    ),
    Incompatibility(
        "elastic and rule",
        lambda c: c.elastic and (c.rule.needs not in ("connected", "everyone") or c.rule.copies_per_peer > 0),
        lambda c: (
            f"{_key(c)} is true, and rule '{c.rule.name}' keeps something of each peer or sums over fixed neighbours, which a "
            "worker that dies would spoil; use a rule that gossips on parameters such as 'gasloc', or a mean over everyone such "
            "as 'diloco'"
        ),
    ),
    Incompatibility(
        "elastic and site",
        lambda c: c.elastic and c.rule.site == "gradients",
        lambda c: (
            f"{_key(c)} is true, and rule '{c.rule.name}' exchanges gradients in every inner step; use a rule with a local "
            "phase such as 'diloco'"
        ),
    ),
    Incompatibility(
        "elastic and topology",
        lambda c: c.elastic and not c.topology.symmetric,
        lambda c: (
            f"{_key(c)} is true, and the weights of topology '{c.topology.name}' are not symmetric: both ends of an exchange "
            "that fails must keep the same weight; use a symmetric topology such as 'random'"
        ),
    ),
    Incompatibility(
        "elastic and overlap",
        lambda c: (
            c.elastic and c.rule.needs == "everyone" and (c.schedule.overlap_steps > 0 or c.rule.delay_rounds > 0)
        ),
        lambda c: (
            f"{_key(c)} is true, and rule '{c.rule.name}' takes the mean of all while they train on: one is under way where a "
            "newcomer takes a state over, which would differ from the others' for good; set schedule.overlap_steps = 0 and "
            "use a rule without delay such as 'diloco', or one that gossips such as 'gasloc'"
        ),
    ),
    Incompatibility(
        "elastic and delay",
        lambda c: c.elastic and c.rule.needs != "everyone" and c.rule.delay_rounds > 0 and not c.rule.sends_ahead,
        lambda c: (
            f"{_key(c)} is true, and rule '{c.rule.name}' receives in each round what was sent in the one before, which a "
            "newcomer cannot take over; use a rule without delay such as 'gasloc', or 'fgd', which sends when a round begins"
        ),
    ),
    Incompatibility(
        "elastic and mixed updates",
        lambda c: c.elastic and _mean_of_updates(c),
        lambda c: (
            f"{_key(c)} is true, and rule '{c.rule.name}' takes the mean of all updates in addition to its gossip; set "
            "rule.mix_updates to 'none' or to a topology of pairs such as 'random'"
        ),
    ),
    Incompatibility(
        "elastic and adapt",
        lambda c: c.elastic and bool(c.adapt),
        lambda c: (
            f"{_key(c)} is true and run.adapt is {c.adapt!r}, for which all workers publish their pace; remove one of the two"
        ),
    ),
    Incompatibility(
        "elastic and all-reduce",
        lambda c: c.elastic and c.reduction == "all_reduce",
        lambda c: (
            f"{_key(c)} is true and run.reduction is '{c.reduction}', a barrier that ends with the first worker that dies; set "
            "it to 'ordered'"
        ),
    ),
    Incompatibility(
        "constant batch and deaths",
        lambda c: c.constant_batch and not c.elastic,
        lambda c: (
            f"data.constant_batch is true and run.elastic is {str(c.elastic).lower()}, so that a run ends when a worker "
            "dies and nobody can take its batches over; set run.elastic = true, or remove data.constant_batch"
        ),
    ),
    Incompatibility(
        "constant batch and rule",
        lambda c: c.constant_batch and c.elastic and not (c.rule.averages and c.rule.identical),
        lambda c: (
            f"data.constant_batch is true, and with {c.who} workers may disagree on who is dead, or differ in their parameters: "
            "two could train the same batches; use a rule that takes one mean of all such as 'diloco', or remove "
            "data.constant_batch"
        ),
    ),
    Incompatibility(
        "constant batch and error feedback",
        lambda c: c.constant_batch and c.rule.feeds_back,
        lambda c: (
            f"data.constant_batch is true, and rule '{c.rule.name}' sends the error of a message later, when its worker may "
            "count for more slots or fewer; use a rule without error feedback such as 'diloco', or remove data.constant_batch"
        ),
    ),
    Incompatibility(
        "constant batch and local steps",
        lambda c: c.constant_batch and isinstance(c.local_steps, tuple) and len(set(c.local_steps)) > 1,
        lambda c: (
            f"data.constant_batch is true and run.local_steps is {c.local_steps}, but all workers share the batches of one step; "
            "give one number of local steps"
        ),
    ),
    Incompatibility(
        "ghosts and newcomers",
        lambda c: c.ghost_rounds > 0 and not c.elastic,
        lambda c: (
            f"run.ghost_rounds is {c.ghost_rounds} and run.elastic is false, so that nobody joins the run while it goes on; set "
            "run.elastic = true, or remove run.ghost_rounds"
        ),
    ),
    Incompatibility(
        "ghosts and inner optimizer",
        lambda c: c.ghost_rounds > 0 and (c.averaging is not None or bool(c.schedule.inner_every)),
        lambda c: (
            f"run.ghost_rounds is {c.ghost_rounds}, and the workers exchange what their inner optimizers keep "
            f"(inner.averaging = {c.averaging!r}, schedule.inner_every = {list(c.schedule.inner_every)}), which a ghost does not "
            "take over; set run.ghost_rounds = 0"
        ),
    ),
)
"""Conditions of `run.elastic`, and of what only elastic runs have."""
