"""The seconds of an inner step of a worker in stages, in place of those of a whole replica."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from gossamer.boundaries import Boundary
from gossamer.boundaries.ends import LENGTH_BYTES
from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.models.sizes import crossing
from gossamer.models.stages import work_of_pieces
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
    most bytes that they can have. Where a boundary remembers samples it is the mean step of the run, whose first ones visit each
    of `data.windows` for the first time. Workers that `pipeline.workers` leaves whole keep theirs.

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
    cuts = cuts_of(pipeline, config.model, data)
    shapes = [(data.batch_size, data.seq_len, crossing(config.model, cut)) for cut in cuts]
    codecs = [boundary_of(getattr(pipeline, direction)) for direction in DIRECTIONS]

    def most_bytes(codec: Boundary) -> list[int]:
        length = LENGTH_BYTES if codec.length_first else 0
        return [codec.most_bytes(shape) + length for shape in shapes]

    there, back = map(most_bytes, codecs)
    shares = shares_of(layout, cuts)

    def seconds_with(there: Sequence[int], step_s: float) -> float:
        micro_s = [step_s / data.accumulate * share / speeds[k % pipeline.stages] for k, share in enumerate(shares)]
        forward_s, backward_s = [s / 3 for s in micro_s], [2 * s / 3 for s in micro_s]
        schedule = cast(Order, pipeline.schedule)  # its settings allow no other
        return pipeline_step(
            forward_s, backward_s, there, back, data.accumulate, links, schedule, pipeline.chunks
        ).seconds  # fmt: skip

    def seconds(step_s: float) -> float:
        whole, again = seconds_with(there, step_s), codecs[0].again_bytes
        if again is None or data.windows is None:  # nothing backward remembers
            return whole
        first = min(1.0, data.windows / (config.run.steps * data.accumulate * data.batch_size))
        return first * whole + (1 - first) * seconds_with([*map(again, shapes)], step_s)

    times = np.asarray(network.step_s, float)
    if pipeline.workers is None and not times.ndim:
        return replace(network, step_s=seconds(float(times)))
    each = times.tolist() if times.ndim else [float(times)] * config.workers
    own = (seconds(step_s) if pipeline.cuts_replica(worker) else step_s for worker, step_s in enumerate(each))
    return replace(network, step_s=tuple(own))


def shares_of(layout: Layout, cuts: tuple[int, ...]) -> list[float]:
    """The share of each piece in the work of an inner step."""
    work = work_of_pieces(((leaf.name, leaf.shape) for leaf in layout.leaves), cuts)
    return [part / sum(work) for part in work]
