"""What cannot run in somebody else's training loop, which has the model, the inner optimizer and the data: rows for the table."""

from gossamer.rounds.compatibility.combination import Pairing

__all__ = ["OWN_LOOP"]

OWN_LOOP = (
    Pairing(
        "asynchronous in somebody else's loop",
        lambda f: f.driver == "library" and f.asynchronous,
        lambda f: (
            f"{f.who} runs asynchronously ({f.kind}), and Outer exchanges in rounds, for which workers wait; use gossamer "
            "simulate or gossamer train, or a method in rounds such as 'gasloc'"
        ),
    ),
    Pairing(
        "gradients in somebody else's loop",
        lambda f: f.driver == "library" and f.rule.site == "gradients",
        lambda f: (
            f"rule '{f.rule.name}' acts on gradients, between backward and the inner optimizer, where Outer has no "
            "access; use torch's DistributedDataParallel, or a rule on parameters such as 'diloco'"
        ),
    ),
    Pairing(
        "moments in somebody else's loop",
        lambda f: f.driver == "library" and bool(f.schedule.inner_every),
        lambda f: (
            f"schedule.inner_every is {list(f.schedule.inner_every)}, but Outer has no access to the moments of your inner "
            "optimizer; remove schedule.inner_every"
        ),
    ),
    Pairing(
        "averaging in somebody else's loop",
        lambda f: f.driver == "library" and f.averaging is not None,
        lambda f: (
            f"inner.averaging is '{f.averaging}', whose iterate and average are exchanged in place of the parameters, and Outer "
            "exchanges parameters; use gossamer train, or gossamer.GPA as the optimizer of one worker without Outer"
        ),
    ),
    Pairing(
        "adapt in somebody else's loop",
        lambda f: f.driver == "library" and bool(f.adapt),
        lambda f: (
            f"run.adapt is {f.adapt!r}, which changes the local steps between rounds, and Outer counts the same number in each; "
            "use gossamer train, or give each worker its own local_steps"
        ),
    ),
)
"""Conditions of `gossamer.Outer`, which cannot know what the loop does between two calls."""
