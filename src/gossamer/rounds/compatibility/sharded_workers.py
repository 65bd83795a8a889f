"""What a worker of several processes, each with a shard of its model, cannot be combined with: rows for the table."""

from collections.abc import Callable

from gossamer.rounds.compatibility.combination import Combination, Incompatibility

_INNER = ("adamw", "accum_adamw", "sgd")
"""The inner optimizers that treat each number of a tensor alike, and so a shard as a whole."""


def _where(c: Combination) -> str:
    return f"each worker is a mesh of {c.shards} processes"


def _trains(c: Combination) -> bool:
    """Whether `gossamer train` shards its own model."""
    return c.driver == "train" and c.shards > 1


# What a run file may have, and somebody else's loop has not, or decides by itself.
_RUN_FILE: dict[str, tuple[Callable[[Combination], bool], Callable[[Combination], str]]] = {
    "stages": (
        lambda c: c.stages > 1,
        lambda c: f"pipeline.stages is {c.stages}, and a stage is one process; set one of the two to 1",
    ),
    "asynchronous": (
        lambda c: c.asynchronous,
        lambda c: "this run has no rounds, in which its processes would meet; use a rule such as 'gasloc'",
    ),
    "elastic": (
        lambda c: c.elastic,
        lambda c: (
            "run.elastic is true, and a worker in shards is gone when one of its processes is; set it to false, or train sites "
            "that come and go with gossamer.Outer(site=..., elastic=True)"
        ),
    ),
    "adapt": (
        lambda c: c.adapt is not False,
        lambda c: (
            f"run.adapt is {c.adapt!r}, but each process of a worker would measure its own seconds; set it to false"
        ),
    ),
    "hashes": (
        lambda c: c.hashes,
        lambda c: "record.hash is true, but a hash is of a whole worker, which no process has; set it to false",
    ),
    "gradients": (
        lambda c: c.rule.site == "gradients",
        lambda c: f"rule '{c.rule.name}' exchanges gradients, which FSDP2 keeps; use a rule such as 'diloco'",
    ),
    "experts": (
        lambda c: bool(c.holders),
        lambda c: "model.experts.holders leaves workers without some experts; remove one of the two",
    ),
    "codec": (
        lambda c: not (c.codec.exact or (c.codec.blockwise == 1 and not c.codec.draws)) or c.codec.back is not None,
        lambda c: (
            f"codec '{c.codec.name}' would cut or draw in each shard otherwise than in a whole worker, so that the simulation "
            "were no oracle; use 'exact', 'bf16' or 'fp16'"
        ),
    ),
    "inner optimizer": (
        lambda c: c.optimizer not in _INNER,
        lambda c: (
            f"inner.optimizer is '{c.optimizer}', which may look at whole tensors; use one of {', '.join(_INNER)}"
        ),
    ),
    "averaging": (
        lambda c: c.averaging is not None,
        lambda c: f"inner.averaging is '{c.averaging}', whose averages are of whole workers; remove it",
    ),
    "moments": (
        lambda c: bool(c.schedule.inner_every),
        lambda c: (
            f"schedule.inner_every is {[*c.schedule.inner_every]}, for moments of whole workers; remove "
            "schedule.inner_every"
        ),
    ),
}


SHARDS = (
    *(
        Incompatibility(
            f"shards and {name}",
            lambda c, fails=fails: _trains(c) and fails(c),
            lambda c, words=words: f"run.shards is {c.shards} and {words(c)}",
        )
        for name, (fails, words) in _RUN_FILE.items()
    ),
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
"""Conditions of a sharded model in `Outer` and in `gossamer train`; stages have theirs."""
