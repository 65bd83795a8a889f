"""The work of a worker's stages in an inner step, and its seconds on a network."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from gossamer.boundaries import Boundary
from gossamer.boundaries.ends import LENGTH_BYTES
from gossamer.layout import Layout
from gossamer.models.sizes import crossing
from gossamer.models.stages import work_of_pieces
from gossamer.network.inner_steps import InnerSteps, inner_steps
from gossamer.network.links import Network
from gossamer.network.pipeline_time import Order
from gossamer.record.logs.pipeline_work import PipelineWork
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.logs.stage_seconds import StageSeconds
from gossamer.run.config.document import DIRECTIONS
from gossamer.run.config.pipeline import boundary_of, cuts_of
from gossamer.run.config.resolved import RunSettings


def in_stages(network: Network, run: RunSettings, layout: Layout) -> InnerSteps:
    """The inner steps of a run on a network, see `gossamer.network.inner_steps.inner_steps`.

    Args: `layout` is that of the whole model.
    Raises: ConfigError when the network gives the speeds of another number of stages.
    """
    return inner_steps(network, pipeline_work(run, layout), run.workers)


def pipeline_work(run: RunSettings, layout: Layout) -> PipelineWork | None:
    """The work of an inner step in stages; None for whole replicas.

    A stage's share of the work is its matrices' share of all parameters. Payloads count with their maximum size. Where
    a boundary remembers samples, the first steps visit each of `data.windows` for the first time. A step has as many
    local phases as the mean step of the run.

    Args: `layout` is that of the whole model.
    """
    pipeline, data = run.pipeline, run.data
    if pipeline.stages == 1:
        return None
    cuts = cuts_of(pipeline, run.model, data)
    shapes = [(data.batch_size, data.seq_len, crossing(run.model, cut)) for cut in cuts]
    codecs = [boundary_of(getattr(pipeline, direction)) for direction in DIRECTIONS]

    def most_bytes(codec: Boundary) -> list[int]:
        length = LENGTH_BYTES if codec.length_first else 0
        return [codec.most_bytes(shape) + length for shape in shapes]

    (there, back), again, first = map(most_bytes, codecs), codecs[0].again_bytes, 1.0
    if again is not None and data.windows is not None:
        first = min(1.0, data.windows / (run.loop.steps * data.accumulate * data.batch_size))
    work = PipelineWork(
        stages=pipeline.stages,
        chunks=pipeline.chunks,
        schedule=cast(Order, pipeline.schedule),  # the settings allow only these
        micro_batches=data.accumulate,
        shares=shares_of(layout, cuts),
        forward_bytes=there,
        backward_bytes=back,
        again_bytes=there if again is None else [*map(again, shapes)],
        first=first,
        cut=None if pipeline.workers is None else [*pipeline.workers],
    )
    if codecs[0].linear:  # what it loses of the embeddings goes to all stages, as `InStages.begin` has it
        (table,) = (leaf for leaf in layout.leaves if leaf.name.startswith("model.embed_tokens."))
        work["table_bytes"], work["phases"] = 4 * math.prod(table.shape), run.rounds / run.loop.steps
    return work


def stage_seconds(
    steps: InnerSteps, rounds: Iterable[RoundSeconds], trained: Iterable[Mapping[str, Any]]
) -> Iterator[StageSeconds]:
    """The seconds of each stage of a simulated run in each round, on the network of its inner steps.

    Args:
        rounds: the seconds of its workers, whose local phase is the sum of compute and other seconds.
        trained: its metrics of kind "train", with what crossed each boundary.
    """
    crossed = {(line["round"], line["worker"]): line.get("boundary_bytes", []) for line in trained}
    for one in rounds:
        shares, phase_s = steps.by_stage[one.worker], one.compute_s + one.other_s
        if len(shares) == 1:
            continue
        sent = [[0, 0] for _ in shares]
        for boundary, (there, back) in enumerate(crossed.get((one.round, one.worker), [])):
            sent[boundary % len(shares)][0] += there
            sent[(boundary + 1) % len(shares)][1] += back
        for stage, (share, (forward, backward)) in enumerate(zip(shares, sent, strict=True)):
            yield StageSeconds(
                one.round,
                one.worker,
                stage,
                share * phase_s,
                (1 - share) * phase_s,
                forward,
                backward,
                None,
                one.network,
            )


def shares_of(layout: Layout, cuts: tuple[int, ...]) -> list[float]:
    """The share of each piece in the work of an inner step."""
    work = work_in(layout, cuts)
    return [part / sum(work) for part in work]


def work_in(layout: Layout, cuts: Sequence[int]) -> list[int]:
    """The work of each piece in an inner step, as `work_of_pieces` counts it."""
    return work_of_pieces(((leaf.name, leaf.shape) for leaf in layout.leaves), cuts)
