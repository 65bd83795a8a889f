"""What a pipeline replica cannot be combined with: rows for the table."""

from gossamer.codecs import Codec
from gossamer.rounds.facts import Pairing

__all__ = ["STAGES"]


def _by_tensor(codec: Codec) -> bool:
    """Whether it compresses tensor by tensor, so that stages with whole tensors compress their parts to the same bits."""
    return codec.fit is not None and not codec.draws and codec.back is None


STAGES = (
    Pairing(
        "pipeline and real processes",
        lambda f: f.stages > 1 and f.driver == "train",
        lambda f: (
            f"pipeline.stages is {f.stages}, and gossamer train runs whole replicas; use gossamer simulate, which computes "
            "what a pipeline of processes would"
        ),
    ),
    Pairing(
        "pipeline and asynchronous",
        lambda f: f.stages > 1 and f.asynchronous,
        lambda f: (
            f"pipeline.stages is {f.stages} and {f.who} runs asynchronously ({f.kind}); a pipeline exchanges in rounds: use a "
            "rule such as 'gasloc'"
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
        lambda f: f.stages > 1 and not (f.codec.exact or f.codec.blockwise == 1 or _by_tensor(f.codec)),
        lambda f: (
            f"pipeline.stages is {f.stages}, and codec '{f.codec.name}' compresses blocks that would lie across two stages; use "
            "'exact', 'bf16', 'fp16' or 'topk2bit', in tiles and without a codec_back"
        ),
    ),
    Pairing(
        "pipeline and schedule",
        lambda f: f.stages > 1 and not f.schedule.plain,
        lambda f: (
            f"pipeline.stages is {f.stages}, whose stages exchange together at the end of a round, but [schedule] is "
            f"{f.schedule}; remove [schedule]"
        ),
    ),
)
