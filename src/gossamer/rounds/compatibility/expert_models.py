"""What a mixture of experts that lie on some workers each cannot be combined with: rows for the table."""

from gossamer.rounds.compatibility.combination import Facts, Pairing

__all__ = ["EXPERTS"]


def _needs_all(f: Facts) -> bool:
    """Whether the rule wants to see whole vectors, or exchanges something that only fits the same peers."""
    rule = f.rule
    alone = not rule.elementwise or rule.needs not in ("everyone", "connected") or rule.copies_per_peer > 0
    return alone or rule.delay_rounds > 0 or bool(rule.mixes_updates)


def _holders(f: Facts) -> str:
    return f"each expert lies on {len(f.holders[-1])} of {len(f.holders[0])} workers (model.experts.holders)"


EXPERTS = (
    Pairing(
        "experts without rounds",
        lambda f: bool(f.holders) and (f.asynchronous or f.elastic),
        lambda f: (
            f"{_holders(f)}, and the run has {f'no rounds ({f.kind})' if f.asynchronous else 'run.elastic = true'}, but an "
            "expert needs its own workers in every round; use a rule such as 'diloco' without run.elastic, or remove "
            "model.experts.holders"
        ),
    ),
    Pairing(
        "experts and rule",
        lambda f: bool(f.holders) and f.kind == "rounds" and _needs_all(f),
        lambda f: (
            f"{_holders(f)}, and rule '{f.rule.name}' looks at whole tensors, at fixed peers, or at messages of another round; "
            "use a rule such as 'diloco', 'local_sgd' or 'gasloc'"
        ),
    ),
    Pairing(
        "experts and schedule",
        lambda f: bool(f.holders) and (not f.schedule.plain or f.averaging is not None),
        lambda f: (
            f"{_holders(f)}, and experts are exchanged with all other parameters at the end of a round, but the run has "
            + (
                f"inner.averaging = '{f.averaging}'; remove it"
                if f.schedule.plain
                else f"[schedule] {f.schedule}; remove it"
            )
        ),
    ),
    Pairing(
        "experts and all-reduce",
        lambda f: bool(f.holders) and f.reduction == "all_reduce",
        lambda f: f"{_holders(f)}, and run.reduction = 'all_reduce' sums over all workers; set it to 'ordered'",
    ),
)
