"""The seconds of an inner step of workers in stages, in place of those of whole replicas."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from gossamer.errors import ConfigError
from gossamer.network.links import Network
from gossamer.network.pipeline_time import PipelineStep, StageLinks, pipeline_step
from gossamer.record.logs.pipeline_work import PipelineWork


class InnerSteps(NamedTuple):
    """The inner steps of a run on a network."""

    network: Network
    """The network, with the seconds of an inner step in stages."""
    by_stage: tuple[tuple[float, ...], ...]
    """For each worker, the share of an inner step in which each of its stages computes."""

    @property
    def computing(self) -> tuple[float, ...]:
        """The share of an inner step in which each worker computes, the mean over its stages."""
        return tuple(sum(shares) / len(shares) for shares in self.by_stage)


def inner_steps(network: Network, work: PipelineWork | None, workers: int) -> InnerSteps:
    """The network on which an inner step takes as long as a pipeline does; unchanged for workers in one piece, or
    without `step_s`.

    `step_s` is that of a whole replica on one machine. A stage takes its share of it, over its speed; a third of it forward, two
    thirds backward (`gossamer.network.pipeline_time`). Where a boundary remembers samples it is the mean step of the run, and
    each step has its share of what the stages pass on before a local phase. Workers that are left whole keep theirs.

    Args: `work` is None for a run of whole replicas.
    Raises: ConfigError when the network gives the speeds of another number of stages.
    """
    if work is None or network.step_s is None:
        return InnerSteps(network, ((1.0,),) * workers)
    links, times = network.stages or StageLinks(), np.asarray(network.step_s, float)
    step_of, cut = cache(lambda step_s: _step(links, work, step_s)), None if work["cut"] is None else {*work["cut"]}
    each = times.tolist() if times.ndim else [float(times)] * workers
    steps = [step_of(s) if cut is None or i in cut else PipelineStep(s, (s,)) for i, s in enumerate(each)]
    alike = cut is None and not times.ndim
    step_s = steps[0].seconds if alike else tuple(step.seconds for step in steps)
    return InnerSteps(replace(network, step_s=step_s), tuple(step.computing for step in steps))


def _step(links: StageLinks, work: PipelineWork, step_s: float) -> PipelineStep:
    """The seconds of an inner step in stages, given those of a whole replica. Raises ConfigError as `inner_steps`."""
    stages, micro_batches = work["stages"], work["micro_batches"]
    speeds = links.speeds or (1.0,) * stages
    if len(speeds) != stages:
        raise ConfigError(
            f"network: stages.speeds lists {len(speeds)} stages but pipeline.stages is {stages}; give {stages} speeds, or "
            "remove stages.speeds"
        )
    micro_s = [step_s / micro_batches * share / speeds[k % stages] for k, share in enumerate(work["shares"])]
    forward_s, backward_s = [s / 3 for s in micro_s], [2 * s / 3 for s in micro_s]

    def step_with(forward_bytes: Sequence[int]) -> PipelineStep:
        return pipeline_step(
            forward_s,
            backward_s,
            forward_bytes,
            work["backward_bytes"],
            micro_batches,
            links,
            work["schedule"],
            work["chunks"],
        )

    whole, first = step_with(work["forward_bytes"]), work["first"]
    if table_bytes := work.get("table_bytes"):
        hop_s = 8 * table_bytes / links.bandwidth_bps + links.latency_s  # each stage has it whole before it sends it on
        whole = whole._replace(seconds=whole.seconds + work.get("phases", 0.0) * (stages - 1) * hop_s)
    if first == 1:  # no samples that a boundary remembers
        return whole
    later = step_with(work["again_bytes"])  # with the same compute
    return whole._replace(seconds=first * whole.seconds + (1 - first) * later.seconds)
