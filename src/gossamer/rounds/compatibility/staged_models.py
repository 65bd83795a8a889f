"""What a pipeline replica cannot be combined with: rows for the table."""

from gossamer.codecs import Codec
from gossamer.rounds.compatibility.combination import Incompatibility
from gossamer.settings.user_code import is_code


def _elementwise(codec: Codec) -> bool:
    return codec.exact or codec.blockwise == 1


STAGES = (
    Incompatibility(
        "pipeline and adapting steps",
        lambda c: c.stages > 1 and c.driver == "train" and c.adapt is not False,
        lambda c: (
            f"pipeline.stages is {c.stages} and run.adapt is {c.adapt}, but each process of a worker would measure its own "
            "seconds; set run.adapt to false"
        ),
    ),
    Incompatibility(
        "pipeline and all-reduce",
        lambda c: c.stages > 1 and c.driver == "train" and c.reduction == "all_reduce",
        lambda c: (
            f"pipeline.stages is {c.stages} and run.reduction is 'all_reduce', which sums over all processes, and each stage "
            "exchanges with the same stage of its peers; use 'ordered'"
        ),
    ),
    Incompatibility(
        "pipeline and an optimizer of yours",
        lambda c: c.stages > 1 and c.driver == "train" and is_code(c.optimizer),
        lambda c: (
            f"pipeline.stages is {c.stages} and inner.optimizer is '{c.optimizer}', which each process would make for its own "
            "layers alone; use one of Gossamer's, such as 'adamw' or 'muon'"
        ),
    ),
    Incompatibility(
        "scattered stages of some workers",
        lambda c: c.stages > 1 and c.driver == "train" and c.partly and (c.scattered or c.averaging is not None),
        lambda c: (
            f"pipeline.workers leaves some replicas whole, which send each of {c.stages} stages its tensors as a slice, and with "
            + (
                "pipeline.chunks or the cuts of model.bottleneck"
                if c.scattered
                else f"inner.averaging = '{c.averaging}'"
            )
            + " these do not follow each other; remove one of the two, or use gossamer simulate"
        ),
    ),
    Incompatibility(
        "pipeline and hashes",
        lambda c: c.stages > 1 and c.driver == "train" and c.hashes,
        lambda c: (
            f"pipeline.stages is {c.stages} and record.hash is true, but a hash is of a whole worker, which no process has; set "
            "it to false"
        ),
    ),
    Incompatibility(
        "pipeline and asynchronous",
        lambda c: c.stages > 1 and c.asynchronous,
        lambda c: (
            f"pipeline.stages is {c.stages} and "
            + ("run.wait is false" if c.kind == "no waiting" else f"{c.who} runs asynchronously")
            + ", but a pipeline exchanges in rounds: "
            + ("set run.wait to true" if c.kind == "no waiting" else "use a rule such as 'gasloc'")
        ),
    ),
    Incompatibility(
        "pipeline and elastic",
        lambda c: c.stages > 1 and c.elastic,
        lambda c: (
            f"pipeline.stages is {c.stages} and run.elastic is true, but a worker in stages is gone when one of its processes "
            "is; remove one of the two"
        ),
    ),
    Incompatibility(
        "pipeline and rule",
        lambda c: c.stages > 1 and not c.rule.elementwise,
        lambda c: (
            f"pipeline.stages is {c.stages}, and rule '{c.rule.name}' looks at whole tensors or at all of them, while each stage "
            "exchanges its own part; use an elementwise rule such as 'gasloc' or 'diloco'"
        ),
    ),
    Incompatibility(
        "pipeline and codec",
        lambda c: (
            c.stages > 1 and c.codec.back is not None and not (_elementwise(c.codec) and _elementwise(c.codec.back))
        ),
        lambda c: (
            f"pipeline.stages is {c.stages}, and codec '{c.codec.name}' has a back leg, for chunks whose owners sum them, and "
            "chunks of a stage are others than those of a whole worker; remove codec.back"
        ),
    ),
    Incompatibility(
        "pipeline and schedule",
        lambda c: c.stages > 1 and bool(c.schedule.sends or c.schedule.inner_every),
        lambda c: (
            f"pipeline.stages is {c.stages}, with schedule.sends = {c.schedule.sends} and schedule.inner_every = "
            f"{[*c.schedule.inner_every]}, but stages would choose fragments by what each of them sees, and keep their moments; "
            "remove both"
        ),
    ),
    Incompatibility(
        "lost stages and rule",
        lambda c: (
            bool(c.lost)
            and (
                c.rule.needs not in ("connected", "everyone")
                or c.rule.copies_per_peer > 0
                or c.rule.site == "gradients"
            )
        ),
        lambda c: (
            f"pipeline.lost names stages, and rule '{c.rule.name}' "
            + (
                "exchanges gradients in every inner step"
                if c.rule.site == "gradients"
                else "keeps something of each peer or sums over fixed neighbours"
            )
            + ", which a stage that goes on from what others have would spoil; use a rule that gossips on parameters such as "
            "'gasloc', or a mean over everyone such as 'diloco'"
        ),
    ),
    Incompatibility(
        "lost stages and overlap",
        lambda c: bool(c.lost) and (c.schedule.overlap_steps > 0 or c.rule.delay_rounds > 0),
        lambda c: (
            f"pipeline.lost names stages, and with schedule.overlap_steps = {c.schedule.overlap_steps} and rule '{c.rule.name}' "
            "messages are under way between two rounds, which are lost with a stage; set schedule.overlap_steps = 0 and use a "
            "rule without delay such as 'diloco' or 'gasloc'"
        ),
    ),
    Incompatibility(
        "lost stages and neighbours",
        lambda c: False in c.lost and c.topology.n > 1 and c.rule.identical,
        lambda c: (
            f"pipeline.lost has a stage that goes on from its neighbours, and rule '{c.rule.name}' adds the same to equal "
            "parameters of all workers, so that this one would differ from the others for good; take source = 'peer'"
        ),
    ),
    Incompatibility(
        "lost stages and inner optimizer",
        lambda c: bool(c.lost) and (c.averaging is not None or is_code(c.optimizer)),
        lambda c: (
            f"pipeline.lost names stages, whose inner optimizer begins anew, and with inner.optimizer = '{c.optimizer}' and "
            f"inner.averaging = {c.averaging!r} what it keeps would be missing; use one of Gossamer's, without an average"
        ),
    ),
)
