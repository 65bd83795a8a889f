"""What cannot be combined with decisions that follow from received numbers, on rank, steps or fragments: rows for the table."""

from gossamer.rounds.compatibility.combination import Incompatibility


def _numbers(steps: int | tuple[int, ...]) -> tuple[int, ...]:
    return steps if isinstance(steps, tuple) else (steps,)


ADAPTING = (
    Incompatibility(
        "adapt and a rule that adapts",
        lambda c: c.rule.adapted is not None and (bool(c.adapt) or c.weigh_steps),
        lambda c: (
            f"rule '{c.rule.name}' with adapt_every = {c.rule.options.get('adapt_every')} decides on the local steps of all "
            f"workers, and {'run.adapt' if c.adapt else 'run.weigh_steps'} is set, which "
            f"{'decides on them too' if c.adapt else 'would scale what they trained back up'}; remove one of the two"
        ),
    ),
    Incompatibility(
        "a rule that adapts in somebody else's loop",
        lambda c: c.driver == "library" and c.rule.adapted is not None,
        lambda c: (
            f"rule '{c.rule.name}' with adapt_every = {c.rule.options.get('adapt_every')} changes the local steps of a round, "
            "and Outer counts the same number in each; set adapt_every = 0, or use gossamer train"
        ),
    ),
    Incompatibility(
        "elastic and decisions of all",
        lambda c: c.elastic and (c.rule.adapted is not None or c.schedule.sends > 0),
        lambda c: (
            "run.elastic is true, and "
            + (
                f"schedule.sends is {c.schedule.sends}"
                if c.schedule.sends
                else f"rule '{c.rule.name}' adapts its rank and steps"
            )
            + ", which follows from what all workers have received since the start; remove one of the two"
        ),
    ),
    Incompatibility(
        "chosen fragments and rule",
        lambda c: (
            c.schedule.sends > 0
            and (not c.rule.identical or c.rule.start is None or c.rule.delay_rounds > 0 or not c.topology.everyone)
        ),
        lambda c: (
            f"schedule.sends is {c.schedule.sends}, for which all workers must choose the same fragment, by how far its updates "
            f"have led, and {c.where} does not lead all of them to the same point in the same round; use one such as 'diloco', "
            "or remove schedule.sends"
        ),
    ),
    Incompatibility(
        "chosen fragments and overlap",
        lambda c: (
            c.schedule.sends > 0
            and c.full_steps is not None
            and c.schedule.overlap_steps >= c.schedule.fragments * max(1, c.full_steps // c.schedule.sends)
        ),
        lambda c: (
            f"schedule.overlap_steps is {c.schedule.overlap_steps}, so all {c.schedule.fragments} fragments may be in flight "
            f"when one of {c.schedule.sends} sends in {c.full_steps} inner steps is due; lower schedule.overlap_steps or "
            "schedule.sends"
        ),
    ),
    Incompatibility(
        "a last round of fewer steps",
        lambda c: (
            c.last_local_steps is not None
            and (c.driver != "simulate" or c.asynchronous or c.elastic or bool(c.adapt) or c.rule.adapted is not None)
        ),
        lambda c: (
            f"run.last_local_steps is {c.last_local_steps}, which a simulation in rounds has whose local steps are fixed; "
            "remove it, and set run.steps to whole rounds"
        ),
    ),
    Incompatibility(
        "a last round without a step for each stop",
        lambda c: (
            c.last_local_steps is not None
            and min(_numbers(c.last_local_steps)) < max(c.schedule.fragments, c.schedule.sends)
        ),
        lambda c: (
            f"run.last_local_steps is {c.last_local_steps}, and {max(c.schedule.fragments, c.schedule.sends)} parts of the "
            "model are sent one after the other in each round; give each worker as many steps at least"
        ),
    ),
)
"""Conditions of `Rule.adapted`, of `Schedule.sends` and of `run.last_local_steps`."""
