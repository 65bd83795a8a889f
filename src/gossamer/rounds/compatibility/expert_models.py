"""What a mixture of experts that lie on some workers each cannot be combined with: rows for the table."""

from gossamer.rounds.compatibility.combination import Combination, Incompatibility


def _needs_all(c: Combination) -> bool:
    """Whether the rule wants to see whole vectors, or exchanges something that only fits the same peers."""
    rule = c.rule
    alone = not rule.elementwise or rule.needs not in ("everyone", "connected") or rule.copies_per_peer > 0
    return alone or rule.delay_rounds > 0 or bool(rule.mixes_updates)


def _holders(c: Combination) -> str:
    return f"each expert lies on {len(c.holders[-1])} of {len(c.holders[0])} workers (model.experts.holders)"


EXPERTS = (
    Incompatibility(
        "experts without rounds",
        lambda c: bool(c.holders) and (c.asynchronous or c.elastic),
        lambda c: (
            f"{_holders(c)}, and the run has {f'no rounds ({c.kind})' if c.asynchronous else 'run.elastic = true'}, but an "
            "expert needs its own workers in every round; use a rule such as 'diloco' without run.elastic, or remove "
            "model.experts.holders"
        ),
    ),
    Incompatibility(
        "experts and rule",
        lambda c: bool(c.holders) and c.kind == "rounds" and _needs_all(c),
        lambda c: (
            f"{_holders(c)}, and rule '{c.rule.name}' looks at whole tensors, at fixed peers, or at messages of another round; "
            "use a rule such as 'diloco', 'local_sgd' or 'gasloc'"
        ),
    ),
    Incompatibility(
        "experts and schedule",
        lambda c: bool(c.holders) and (not c.schedule.plain or c.averaging is not None),
        lambda c: (
            f"{_holders(c)}, and experts are exchanged with all other parameters at the end of a round, but the run has "
            + (
                f"inner.averaging = '{c.averaging}'; remove it"
                if c.schedule.plain
                else f"[schedule] {c.schedule}; remove it"
            )
        ),
    ),
    Incompatibility(
        "experts and all-reduce",
        lambda c: bool(c.holders) and c.reduction == "all_reduce",
        lambda c: f"{_holders(c)}, and run.reduction = 'all_reduce' sums over all workers; set it to 'ordered'",
    ),
)
