"""What cannot run in somebody else's training loop, which has the model, the inner optimizer and the data: rows for the table."""

from gossamer.rounds.compatibility.combination import Incompatibility

OWN_LOOP = (
    Incompatibility(
        "asynchronous in somebody else's loop",
        lambda c: c.driver == "library" and c.asynchronous,
        lambda c: (
            f"{c.who} runs asynchronously ({c.kind}), and Outer exchanges in rounds, for which workers wait; use gossamer "
            "simulate or gossamer train, or a method in rounds such as 'gasloc'"
        ),
    ),
    Incompatibility(
        "gradients in somebody else's loop",
        lambda c: c.driver == "library" and c.rule.site == "gradients",
        lambda c: (
            f"rule '{c.rule.name}' acts on gradients, between backward and the inner optimizer, where Outer has no "
            "access; use torch's DistributedDataParallel, or a rule on parameters such as 'diloco'"
        ),
    ),
    Incompatibility(
        "moments in somebody else's loop",
        lambda c: c.driver == "library" and bool(c.schedule.inner_every),
        lambda c: (
            f"schedule.inner_every is {list(c.schedule.inner_every)}, but Outer has no access to the moments of your inner "
            "optimizer; remove schedule.inner_every"
        ),
    ),
    Incompatibility(
        "averaging in somebody else's loop",
        lambda c: c.driver == "library" and c.averaging is not None,
        lambda c: (
            f"inner.averaging is '{c.averaging}', whose iterate and average are exchanged in place of the parameters, and Outer "
            "exchanges parameters; use gossamer train, or gossamer.GPA as the optimizer of one worker without Outer"
        ),
    ),
    Incompatibility(
        "elastic sites and overlap",
        lambda c: (
            c.driver == "library"
            and c.elastic
            and (c.schedule.overlap_steps > 0 or c.schedule.sends > 0 or c.rule.delay_rounds > 0)
        ),
        lambda c: (
            f"elastic is true, and {c.who} has exchanges under way between rounds or chooses fragments by them "
            f"(schedule.overlap_steps = {c.schedule.overlap_steps}, sends = {c.schedule.sends}), which a site that comes back "
            "does not have; use a schedule without, and a rule without delay such as 'gasloc', or sites of a fixed number"
        ),
    ),
    Incompatibility(
        "adapt in somebody else's loop",
        lambda c: c.driver == "library" and bool(c.adapt),
        lambda c: (
            f"run.adapt is {c.adapt!r}, which changes the local steps between rounds, and Outer counts the same number in each; "
            "use gossamer train, or give each worker its own local_steps"
        ),
    ),
)
"""Conditions of `gossamer.Outer`, which cannot know what the loop does between two calls."""
