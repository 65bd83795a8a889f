"""What a pipeline replica cannot be combined with: rows for the table."""

from gossamer.codecs import Codec
from gossamer.rounds.compatibility.combination import Pairing
from gossamer.settings.user_code import is_code

__all__ = ["STAGES"]


def _elementwise(codec: Codec) -> bool:
    return codec.exact or codec.blockwise == 1


STAGES = (
    Pairing(
        "pipeline and adapting steps",
        lambda f: f.stages > 1 and f.driver == "train" and f.adapt is not False,
        lambda f: (
            f"pipeline.stages is {f.stages} and run.adapt is {f.adapt}, but each process of a worker would measure its own "
            "seconds; set run.adapt to false"
        ),
    ),
    Pairing(
        "pipeline and all-reduce",
        lambda f: f.stages > 1 and f.driver == "train" and f.reduction == "all_reduce",
        lambda f: (
            f"pipeline.stages is {f.stages} and run.reduction is 'all_reduce', which sums over all processes, and each stage "
            "exchanges with the same stage of its peers; use 'ordered'"
        ),
    ),
    Pairing(
        "pipeline and an optimizer of yours",
        lambda f: f.stages > 1 and f.driver == "train" and is_code(f.optimizer),
        lambda f: (
            f"pipeline.stages is {f.stages} and inner.optimizer is '{f.optimizer}', which each process would make for its own "
            "layers alone; use one of Gossamer's, such as 'adamw' or 'muon'"
        ),
    ),
    Pairing(
        "scattered stages of some workers",
        lambda f: f.stages > 1 and f.driver == "train" and f.partly and (f.scattered or f.averaging is not None),
        lambda f: (
            f"pipeline.workers leaves some replicas whole, which send each of {f.stages} stages its tensors as a slice, and with "
            + (
                "pipeline.chunks or the cuts of model.bottleneck"
                if f.scattered
                else f"inner.averaging = '{f.averaging}'"
            )
            + " these do not follow each other; remove one of the two, or use gossamer simulate"
        ),
    ),
    Pairing(
        "pipeline and hashes",
        lambda f: f.stages > 1 and f.driver == "train" and f.hashes,
        lambda f: (
            f"pipeline.stages is {f.stages} and record.hash is true, but a hash is of a whole worker, which no process has; set "
            "it to false"
        ),
    ),
    Pairing(
        "pipeline and asynchronous",
        lambda f: f.stages > 1 and f.asynchronous,
        lambda f: (
            f"pipeline.stages is {f.stages} and "
            + ("run.wait is false" if f.kind == "no waiting" else f"{f.who} runs asynchronously")
            + ", but a pipeline exchanges in rounds: "
            + ("set run.wait to true" if f.kind == "no waiting" else "use a rule such as 'gasloc'")
        ),
    ),
    Pairing(
        "pipeline and elastic",
        lambda f: f.stages > 1 and f.elastic,
        lambda f: (
            f"pipeline.stages is {f.stages} and run.elastic is true, but a worker in stages is gone when one of its processes "
            "is; remove one of the two"
        ),
    ),
    Pairing(
        "pipeline and rule",
        lambda f: f.stages > 1 and not f.rule.elementwise,
        lambda f: (
            f"pipeline.stages is {f.stages}, and rule '{f.rule.name}' looks at whole tensors or at all of them, while each stage "
            "exchanges its own part; use an elementwise rule such as 'gasloc' or 'diloco'"
        ),
    ),
    Pairing(
        "pipeline and codec",
        lambda f: (
            f.stages > 1 and f.codec.back is not None and not (_elementwise(f.codec) and _elementwise(f.codec.back))
        ),
        lambda f: (
            f"pipeline.stages is {f.stages}, and codec '{f.codec.name}' has a back leg, for chunks whose owners sum them, and "
            "chunks of a stage are others than those of a whole worker; remove codec.back"
        ),
    ),
    Pairing(
        "pipeline and schedule",
        lambda f: f.stages > 1 and bool(f.schedule.sends or f.schedule.inner_every),
        lambda f: (
            f"pipeline.stages is {f.stages}, with schedule.sends = {f.schedule.sends} and schedule.inner_every = "
            f"{[*f.schedule.inner_every]}, but stages would choose fragments by what each of them sees, and keep their moments; "
            "remove both"
        ),
    ),
)
