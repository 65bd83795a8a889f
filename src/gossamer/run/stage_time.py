"""The seconds of an inner step of a worker in stages, in place of those of a whole replica."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from gossamer.boundaries import Boundary
from gossamer.boundaries.ends import LENGTH_BYTES
from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.models.sizes import crossing
from gossamer.models.stages import work_of_pieces
from gossamer.network.links import Network
from gossamer.network.pipeline import Order, PipelineStep, StageLinks, pipeline_step
from gossamer.record.seconds import RoundSeconds
from gossamer.record.stages import StageSeconds
from gossamer.run.config import RunConfig
from gossamer.run.document import DIRECTIONS
from gossamer.run.pipeline import boundary_of, cuts_of

__all__ = ["InnerSteps", "in_stages", "shares_of", "stage_seconds"]


class InnerSteps(NamedTuple):
    """The inner steps of a run on a network."""

    network: Network
    """With the seconds of an inner step in stages."""
    by_stage: tuple[tuple[float, ...], ...]
    """Of each worker, the share of an inner step in which each of its stages computes; in the rest it waits."""

    @property
    def computing(self) -> tuple[float, ...]:
        """The share of an inner step in which each worker computes, the mean over its stages."""
        return tuple(sum(shares) / len(shares) for shares in self.by_stage)


def in_stages(network: Network, config: RunConfig, layout: Layout) -> InnerSteps:
    """The network on which an inner step takes as long as a pipeline does; itself for workers in one piece, or without `step_s`.

    `step_s` is that of a whole replica on one machine. A stage takes the share of it that its matrices have of all
    parameters, over its speed; a third of it forward, two thirds backward (`gossamer.network.pipeline`). Payloads count with the
    most bytes that they can have. Where a boundary remembers samples it is the mean step of the run, whose first ones visit each
    of `data.windows` for the first time. Workers that `pipeline.workers` leaves whole keep theirs.

    Args: `layout` is that of the whole model.
    Raises: ConfigError when the network gives the speeds of another number of stages.
    """
    pipeline = config.pipeline
    if pipeline.stages == 1 or network.step_s is None:
        return InnerSteps(network, ((1.0,),) * config.workers)
    step_of, times = cache(_step_of(network.stages or StageLinks(), config, layout)), np.asarray(network.step_s, float)
    each = times.tolist() if times.ndim else [float(times)] * config.workers
    steps = [step_of(s) if pipeline.cuts_replica(i) else PipelineStep(s, (s,)) for i, s in enumerate(each)]
    alike = pipeline.workers is None and not times.ndim
    step_s = steps[0].seconds if alike else tuple(step.seconds for step in steps)
    return InnerSteps(replace(network, step_s=step_s), tuple(step.computing for step in steps))


def _step_of(links: StageLinks, config: RunConfig, layout: Layout) -> Callable[[float], PipelineStep]:
    """What an inner step in stages takes, given the seconds of a whole replica. Raises ConfigError as `in_stages`."""
    pipeline, data = config.pipeline, config.data
    speeds = links.speeds or (1.0,) * pipeline.stages
    if len(speeds) != pipeline.stages:
        raise ConfigError(
            f"network: stages.speeds lists {len(speeds)} stages but pipeline.stages is {pipeline.stages}; give "
            f"{pipeline.stages} speeds, or remove stages.speeds"
        )
    cuts = cuts_of(pipeline, config.model, data)
    shapes = [(data.batch_size, data.seq_len, crossing(config.model, cut)) for cut in cuts]
    codecs = [boundary_of(getattr(pipeline, direction)) for direction in DIRECTIONS]

    def most_bytes(codec: Boundary) -> list[int]:
        length = LENGTH_BYTES if codec.length_first else 0
        return [codec.most_bytes(shape) + length for shape in shapes]

    there, back = map(most_bytes, codecs)
    shares = shares_of(layout, cuts)

    def step_with(there: Sequence[int], step_s: float) -> PipelineStep:
        micro_s = [step_s / data.accumulate * share / speeds[k % pipeline.stages] for k, share in enumerate(shares)]
        forward_s, backward_s = [s / 3 for s in micro_s], [2 * s / 3 for s in micro_s]
        schedule = cast(Order, pipeline.schedule)  # its settings allow no other
        return pipeline_step(
            forward_s, backward_s, there, back, data.accumulate, links, schedule, pipeline.chunks
        )  # fmt: skip

    def step(step_s: float) -> PipelineStep:
        whole, again = step_with(there, step_s), codecs[0].again_bytes
        if again is None or data.windows is None:  # nothing backward remembers
            return whole
        first = min(1.0, data.windows / (config.run.steps * data.accumulate * data.batch_size))
        later = step_with([*map(again, shapes)], step_s)  # which computes as much
        return whole._replace(seconds=first * whole.seconds + (1 - first) * later.seconds)

    return step


def stage_seconds(
    steps: InnerSteps, rounds: Iterable[RoundSeconds], trained: Iterable[Mapping[str, Any]]
) -> Iterator[StageSeconds]:
    """What each stage of a simulated run does in each round, on the network of its inner steps.

    Args:
        rounds: the seconds of its workers, in which a local phase is all that they compute and spend otherwise.
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
                one.round, one.worker, stage, share * phase_s, (1 - share) * phase_s, forward, backward, None, one.network
            )  # fmt: skip


def shares_of(layout: Layout, cuts: tuple[int, ...]) -> list[float]:
    """The share of each piece in the work of an inner step."""
    work = work_of_pieces(((leaf.name, leaf.shape) for leaf in layout.leaves), cuts)
    return [part / sum(work) for part in work]
