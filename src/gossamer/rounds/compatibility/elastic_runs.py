"""What an elastic run cannot be combined with: rows for the table."""

from gossamer.rounds.compatibility.combination import Facts, Pairing
from gossamer.rounds.updates import topology_of_updates

__all__ = ["ELASTIC"]


def _mean_of_updates(f: Facts) -> bool:
    updates = topology_of_updates(f.rule, f.topology.n, seed=0)
    return updates is not None and (updates.everyone or not updates.symmetric)


ELASTIC = (
    Pairing(
        "elastic and asynchronous",
        lambda f: f.elastic and f.asynchronous,
        lambda f: (
            f"run.elastic is true and {f.who} runs asynchronously ({f.kind}); remove run.elastic: nobody waits there for "
            "a worker that is gone"
        ),
    ),
    Pairing(
        "elastic and rule",
        lambda f: f.elastic and (f.rule.needs not in ("connected", "everyone") or f.rule.copies_per_peer > 0),
        lambda f: (
            f"run.elastic is true, and rule '{f.rule.name}' keeps something of each peer or sums over fixed neighbours, which a "
            "worker that dies would spoil; use a rule that gossips on parameters such as 'gasloc', or a mean over everyone such "
            "as 'diloco'"
        ),
    ),
    Pairing(
        "elastic and site",
        lambda f: f.elastic and f.rule.site == "gradients",
        lambda f: (
            f"run.elastic is true, and rule '{f.rule.name}' exchanges gradients in every inner step; use a rule with a local "
            "phase such as 'diloco'"
        ),
    ),
    Pairing(
        "elastic and topology",
        lambda f: f.elastic and not f.topology.symmetric,
        lambda f: (
            f"run.elastic is true, and the weights of topology '{f.topology.name}' are not symmetric: both ends of an exchange "
            "that fails must keep the same weight; use a symmetric topology such as 'random'"
        ),
    ),
    Pairing(
        "elastic and overlap",
        lambda f: (
            f.elastic and f.rule.needs == "everyone" and (f.schedule.overlap_steps > 0 or f.rule.delay_rounds > 0)
        ),
        lambda f: (
            f"run.elastic is true, and rule '{f.rule.name}' takes the mean of all while they train on: one is under way where a "
            "newcomer takes a state over, which would differ from the others' for good; set schedule.overlap_steps = 0 and "
            "use a rule without delay such as 'diloco', or one that gossips such as 'gasloc'"
        ),
    ),
    Pairing(
        "elastic and delay",
        lambda f: f.elastic and f.rule.needs != "everyone" and f.rule.delay_rounds > 0 and not f.rule.sends_ahead,
        lambda f: (
            f"run.elastic is true, and rule '{f.rule.name}' receives in each round what was sent in the one before, which a "
            "newcomer cannot take over; use a rule without delay such as 'gasloc', or 'fgd', which sends when a round begins"
        ),
    ),
    Pairing(
        "elastic and mixed updates",
        lambda f: f.elastic and _mean_of_updates(f),
        lambda f: (
            f"run.elastic is true, and rule '{f.rule.name}' takes the mean of all updates beside its gossip; set "
            "rule.mix_updates to 'none' or to a topology of pairs such as 'random'"
        ),
    ),
    Pairing(
        "elastic and adapt",
        lambda f: f.elastic and bool(f.adapt),
        lambda f: (
            f"run.elastic is true and run.adapt is {f.adapt!r}, for which all workers publish their pace; remove one of the two"
        ),
    ),
    Pairing(
        "elastic and all-reduce",
        lambda f: f.elastic and f.reduction == "all_reduce",
        lambda f: (
            f"run.elastic is true and run.reduction is '{f.reduction}', a barrier that ends with the first worker that dies; set "
            "it to 'ordered'"
        ),
    ),
    Pairing(
        "constant batch and deaths",
        lambda f: f.constant_batch and not f.elastic,
        lambda f: (
            f"data.constant_batch is true and run.elastic is {str(f.elastic).lower()}, so that a run ends when a worker "
            "dies and nobody can take its batches over; set run.elastic = true, or remove data.constant_batch"
        ),
    ),
    Pairing(
        "constant batch and rule",
        lambda f: f.constant_batch and f.elastic and not (f.rule.averages and f.rule.identical),
        lambda f: (
            f"data.constant_batch is true, and with {f.who} workers may disagree on who is dead, or differ in their parameters: "
            "two could train the same batches; use a rule that takes one mean of all such as 'diloco', or remove "
            "data.constant_batch"
        ),
    ),
    Pairing(
        "constant batch and error feedback",
        lambda f: f.constant_batch and f.rule.feeds_back,
        lambda f: (
            f"data.constant_batch is true, and rule '{f.rule.name}' sends the error of a message later, when its worker may "
            "count for more slots or fewer; use a rule without error feedback such as 'diloco', or remove data.constant_batch"
        ),
    ),
    Pairing(
        "constant batch and local steps",
        lambda f: f.constant_batch and isinstance(f.local_steps, tuple) and len(set(f.local_steps)) > 1,
        lambda f: (
            f"data.constant_batch is true and run.local_steps is {f.local_steps}, but all workers share the batches of one step; "
            "give one number of local steps"
        ),
    ),
    Pairing(
        "ghosts and newcomers",
        lambda f: f.ghost_rounds > 0 and not f.elastic,
        lambda f: (
            f"run.ghost_rounds is {f.ghost_rounds} and run.elastic is false, so that nobody joins the run while it goes on; set "
            "run.elastic = true, or remove run.ghost_rounds"
        ),
    ),
    Pairing(
        "ghosts and inner optimizer",
        lambda f: f.ghost_rounds > 0 and (f.averaging is not None or bool(f.schedule.inner_every)),
        lambda f: (
            f"run.ghost_rounds is {f.ghost_rounds}, and the workers exchange what their inner optimizers keep "
            f"(inner.averaging = {f.averaging!r}, schedule.inner_every = {list(f.schedule.inner_every)}), which a ghost does not "
            "take over; set run.ghost_rounds = 0"
        ),
    ),
)
"""Conditions of `run.elastic`, and of what only elastic runs have."""
