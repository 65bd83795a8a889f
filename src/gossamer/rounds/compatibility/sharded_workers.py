"""What a worker of several processes, each with a shard of its model, cannot be combined with: rows for the table."""

from gossamer.rounds.compatibility.combination import Combination, Incompatibility

__all__ = ["SHARDS"]


def _where(c: Combination) -> str:
    return f"each worker is a mesh of {c.shards} processes"


SHARDS = (
    Incompatibility(
        "shards and rule",
        lambda c: c.shards > 1 and not (c.rule.elementwise or c.rule.sums_over_shards),
        lambda c: (
            f"{_where(c)}, and rule '{c.rule.name}' looks at whole tensors or at all of them, of which each process has its "
            "shard, for more than sums over them; use an elementwise rule such as 'gasloc' or 'diloco'"
        ),
    ),
    Incompatibility(
        "shards and all-reduce",
        lambda c: c.shards > 1 and c.reduction == "all_reduce",
        lambda c: (
            f"{_where(c)} and reduction is 'all_reduce', which overwrites one shard before its siblings know that theirs came "
            "too; use 'ordered'"
        ),
    ),
    Incompatibility(
        "shards and chosen fragments",
        lambda c: c.shards > 1 and c.schedule.sends > 0,
        lambda c: (
            f"{_where(c)} and schedule.sends is {c.schedule.sends}, but processes would choose fragments by what each of them "
            "sees; remove schedule.sends"
        ),
    ),
)
"""Conditions of `Outer` around a sharded model; stages of our own have theirs."""
