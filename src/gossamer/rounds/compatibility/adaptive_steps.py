"""What cannot be combined with decisions that follow from received numbers, on rank, steps or fragments: rows for the table."""

from gossamer.rounds.compatibility.combination import Pairing

__all__ = ["ADAPTING"]

ADAPTING = (
    Pairing(
        "adapt and a rule that adapts",
        lambda f: f.rule.adapted is not None and (bool(f.adapt) or f.weigh_steps),
        lambda f: (
            f"rule '{f.rule.name}' with adapt_every = {f.rule.options.get('adapt_every')} decides on the local steps of all "
            f"workers, and {'run.adapt' if f.adapt else 'run.weigh_steps'} is set, which "
            f"{'decides on them too' if f.adapt else 'would scale what they trained back up'}; remove one of the two"
        ),
    ),
    Pairing(
        "a rule that adapts in somebody else's loop",
        lambda f: f.driver == "library" and f.rule.adapted is not None,
        lambda f: (
            f"rule '{f.rule.name}' with adapt_every = {f.rule.options.get('adapt_every')} changes the local steps of a round, "
            "and Outer counts the same number in each; set adapt_every = 0, or use gossamer train"
        ),
    ),
    Pairing(
        "elastic and decisions of all",
        lambda f: f.elastic and (f.rule.adapted is not None or f.schedule.sends > 0),
        lambda f: (
            "run.elastic is true, and "
            + (
                f"schedule.sends is {f.schedule.sends}"
                if f.schedule.sends
                else f"rule '{f.rule.name}' adapts its rank and steps"
            )
            + ", which follows from what all workers have received since the start; remove one of the two"
        ),
    ),
    Pairing(
        "chosen fragments and rule",
        lambda f: (
            f.schedule.sends > 0
            and (not f.rule.identical or f.rule.start is None or f.rule.delay_rounds > 0 or not f.topology.everyone)
        ),
        lambda f: (
            f"schedule.sends is {f.schedule.sends}, for which all workers must choose the same fragment, by how far its updates "
            f"have led, and {f.where} does not lead all of them to the same point in the same round; use one such as 'diloco', "
            "or remove schedule.sends"
        ),
    ),
    Pairing(
        "chosen fragments and overlap",
        lambda f: (
            f.schedule.sends > 0
            and f.full_steps is not None
            and f.schedule.overlap_steps >= f.schedule.fragments * max(1, f.full_steps // f.schedule.sends)
        ),
        lambda f: (
            f"schedule.overlap_steps is {f.schedule.overlap_steps}, so all {f.schedule.fragments} fragments may be in flight "
            f"when one of {f.schedule.sends} sends in {f.full_steps} inner steps is due; lower schedule.overlap_steps or "
            "schedule.sends"
        ),
    ),
)
"""Conditions of `Rule.adapted` and of `Schedule.sends`."""
