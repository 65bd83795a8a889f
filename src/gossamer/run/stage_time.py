"""The seconds of an inner step of a worker in stages, in place of those of a whole replica."""

from dataclasses import replace
from typing import cast

import numpy as np

from gossamer.boundaries.ends import LENGTH_BYTES
from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.models.sizes import crossing
from gossamer.models.stages import piece_of
from gossamer.network.links import Network
from gossamer.network.pipeline import Order, StageLinks, pipeline_step
from gossamer.run.config import RunConfig
from gossamer.run.document import DIRECTIONS
from gossamer.run.pipeline import boundary_of, cuts_of

__all__ = ["in_stages", "shares_of"]


def in_stages(network: Network, config: RunConfig, layout: Layout) -> Network:
    """The network on which an inner step takes as long as a pipeline does; itself for workers in one piece, or without `step_s`.

    `step_s` is that of a whole replica on one machine. A stage takes the share of it that its matrices have of all
    parameters, over its speed; a third of it forward, two thirds backward (`gossamer.network.pipeline`). Payloads count with the
    most bytes that they can have. Workers that `pipeline.workers` leaves whole keep theirs.

    Args: `layout` is that of the whole model.
    Raises: ConfigError when the network gives the speeds of another number of stages.
    """
    pipeline, data, links = config.pipeline, config.data, network.stages or StageLinks()
    if pipeline.stages == 1 or network.step_s is None:
        return network
    speeds = links.speeds or (1.0,) * pipeline.stages
    if len(speeds) != pipeline.stages:
        raise ConfigError(
            f"network: stages.speeds lists {len(speeds)} stages but pipeline.stages is {pipeline.stages}; give "
            f"{pipeline.stages} speeds, or remove stages.speeds"
        )
    cuts = cuts_of(pipeline, config.model)
    shape = (data.batch_size, data.seq_len)
    payloads: list[list[int]] = []
    for direction in DIRECTIONS:
        boundary = boundary_of(getattr(pipeline, direction))
        length = 0 if boundary.fixed or boundary.remembers else LENGTH_BYTES
        payloads.append([boundary.most_bytes((*shape, crossing(config.model, cut))) + length for cut in cuts])
    shares = shares_of(layout, cuts)

    def seconds(step_s: float) -> float:
        micro_s = [step_s / data.accumulate * share / speeds[k % pipeline.stages] for k, share in enumerate(shares)]
        there, back = payloads
        forward_s, backward_s = [s / 3 for s in micro_s], [2 * s / 3 for s in micro_s]
        schedule = cast(Order, pipeline.schedule)  # its settings allow no other
        return pipeline_step(
            forward_s, backward_s, there, back, data.accumulate, links, schedule, pipeline.chunks
        ).seconds  # fmt: skip

    times = np.asarray(network.step_s, float)
    if pipeline.workers is None and not times.ndim:
        return replace(network, step_s=seconds(float(times)))
    each = times.tolist() if times.ndim else [float(times)] * config.workers
    own = (seconds(step_s) if pipeline.cuts_replica(worker) else step_s for worker, step_s in enumerate(each))
    return replace(network, step_s=tuple(own))


def shares_of(layout: Layout, cuts: tuple[int, ...]) -> list[float]:
    """The share of each piece in the work of an inner step; an embedding is looked up and costs nothing."""
    work = [0] * (len(cuts) + 1)
    for leaf in layout.leaves:
        if len(leaf.shape) == 2 and not leaf.name.startswith("model.embed_tokens"):
            work[piece_of(leaf.name, cuts)] += leaf.stop - leaf.start
    return [part / sum(work) for part in work]
