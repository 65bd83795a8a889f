"""What cannot be trained as one computation of several replicas: rows for the table."""

from gossamer.rounds.compatibility.combination import Pairing

__all__ = ["BATCHED"]

BATCHED = (
    Pairing(
        "batched and real processes",
        lambda f: f.batched > 1 and f.driver == "train",
        lambda f: (
            f"run.batched is {f.batched}, and each process of gossamer train has a replica of its own; set run.batched to 1, or "
            "use gossamer simulate"
        ),
    ),
    Pairing(
        "batched and asynchronous",
        lambda f: f.batched > 1 and f.asynchronous,
        lambda f: (
            f"run.batched is {f.batched} and {f.who} runs asynchronously ({f.kind}), so that replicas do not train at the same "
            "time; set run.batched to 1"
        ),
    ),
    Pairing(
        "batched and rule",
        lambda f: f.batched > 1 and f.rule.adapted is not None,
        lambda f: (
            f"run.batched is {f.batched}, and rule '{f.rule.name}' decides on the local steps, which replicas in one computation "
            "have in common; set run.batched to 1"
        ),
    ),
)
