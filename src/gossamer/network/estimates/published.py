"""Published bandwidths and goodputs, compared with ours."""

import math
from typing import Any, NamedTuple

import numpy as np

from gossamer.errors import ConfigError, choose
from gossamer.network.estimates.goodput import GoodputOptions, ensure, fleets
from gossamer.network.estimates.utilisation import BANDWIDTHS_BPS, PUBLISHED_METHODS, bandwidth_table, setting_of

PUBLISHED_GBPS: dict[str, dict[str, tuple[float, ...]]] = {
    "1b": {
        "data_parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "streaming_overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
        "streaming_overlap_fp4": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10b": {
        "data_parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "streaming_overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
        "streaming_overlap_fp4": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    "100b": {
        "data_parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "streaming_overlap": (1.7, 3.6, 4.3, 5.2, 5.2),
        "streaming_overlap_fp4": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Gbit/s for a utilisation of 50, 80, 90, 95 and 99 %, by model and method: arXiv 2501.18512 (Streaming DiLoCo), table 4."""


def grid_steps_above_published(model: str, method: str, **options: Any) -> list[int]:
    """How many points of the grid each bandwidth of `bandwidth_table` lies above the published one.

    Raises: ConfigError for a name that is not in `PUBLISHED_GBPS`, an option out of bounds, or a target out of reach.

    >>> grid_steps_above_published("1b", "diloco")
    [0, 0, 0, 0, 0]
    """
    for what, name, table in (("model", model, PUBLISHED_GBPS), ("method", method, PUBLISHED_METHODS)):
        if name not in table:
            raise ConfigError(choose(f"published {what}", name, table))
    off = []
    for row, gbps in zip(
        bandwidth_table(setting_of(model, method, **options)), PUBLISHED_GBPS[model][method], strict=True
    ):
        needed = math.inf if row.bandwidth_bps is None else row.bandwidth_bps
        ensure(f"bandwidth for a utilisation of {row.utilisation:.0%}", needed, needed < math.inf, "on the grid")
        # The published ones have one decimal.
        published = int(np.abs(np.log(BANDWIDTHS_BPS / (gbps * 1e9))).argmin())
        off.append(int(np.searchsorted(BANDWIDTHS_BPS, needed)) - published)
    return off


PUBLISHED_GOODPUT: dict[int, dict[str, tuple[int, ...]]] = {
    150_000: {"all_reduce": (72,), "elastic": (88,), "decoupled": (94, 96, 98, 99)},
    1_200_000: {"all_reduce": (27,), "elastic": (58,), "decoupled": (70, 82, 88, 93)},
    2_400_000: {"all_reduce": (18,), "elastic": (40,), "decoupled": (54, 73, 80, 86)},
}
"""Goodput in percent by number of chips, each of which fails once a year, and by method, for `PUBLISHED_LEARNERS`.

Source: Decoupled DiLoCo, arXiv 2604.21428, as three digests of it report them, which agree where they overlap. We could not
    read the paper itself, and the downtimes of its simulator are not in the digests.
"""

PUBLISHED_LEARNERS: dict[str, tuple[int, ...]] = {"all_reduce": (1,), "elastic": (1,), "decoupled": (2, 4, 8, 16)}
"""The numbers of learners M of the columns of `PUBLISHED_GOODPUT`."""


class PublishedGoodput(NamedTuple):
    """A cell of `PUBLISHED_GOODPUT` and ours, as shares."""

    chips: int
    method: str
    learners: int
    published: float
    goodput: float


def published_goodput(restart_s: float = 72.0, downtime_s: float = 22.6) -> list[PublishedGoodput]:
    """Each published goodput next to that of our closed form, without lost work.

    Args: the effective seconds that an interruption costs, as in `GoodputOptions`; with the defaults, 72 s for the 3 cells of
        all-reduce and 22.6 s for the 15 others, the largest differences are the least, to a second.
    Raises: ConfigError for a number out of bounds.

    >>> round(max(abs(cell.published - cell.goodput) for cell in published_goodput()), 3)
    0.043
    """
    cells = []
    for chips, methods in PUBLISHED_GOODPUT.items():
        for method, percents in methods.items():
            for learners, percent in zip(PUBLISHED_LEARNERS[method], percents, strict=True):
                options = GoodputOptions(
                    chips=chips, learners=learners, restart_s=restart_s, downtime_s=downtime_s, worker_chips=1
                )
                ours = next(group.goodput for group in fleets(options) if group.method == method)
                cells.append(PublishedGoodput(chips, method, learners, percent / 100, ours))
    return cells
