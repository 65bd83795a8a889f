"""What cannot be trained as one computation of several replicas: rows for the table."""

from gossamer.rounds.compatibility.combination import Incompatibility

BATCHED = (
    Incompatibility(
        "batched and real processes",
        lambda c: c.batched > 1 and c.driver == "train",
        lambda c: (
            f"run.batched is {c.batched}, and each process of gossamer train has its own replica; set run.batched to 1, or "
            "use gossamer simulate"
        ),
    ),
    Incompatibility(
        "batched and asynchronous",
        lambda c: c.batched > 1 and c.asynchronous,
        lambda c: (
            f"run.batched is {c.batched} and {c.who} runs asynchronously ({c.kind}), so that replicas do not train at the same "
            "time; set run.batched to 1"
        ),
    ),
    Incompatibility(
        "batched and rule",
        lambda c: c.batched > 1 and c.rule.adapted is not None,
        lambda c: (
            f"run.batched is {c.batched}, and rule '{c.rule.name}' decides on the local steps, which replicas in one computation "
            "have in common; set run.batched to 1"
        ),
    ),
)
