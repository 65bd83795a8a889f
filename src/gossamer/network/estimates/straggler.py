"""Utilisation of a run in which one worker has a slow uplink."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import SkipValidation

from gossamer.errors import ConfigError, choose
from gossamer.network.estimates.goodput import ensure
from gossamer.network.estimates.utilisation import BANDWIDTHS_BPS, MODELS, Model
from gossamer.network.estimates.wall_clock import Link, all_reduce_s
from gossamer.network.pacing import whole_steps
from gossamer.settings.options import Count, NotNegative, Positive, Share, check_values
from gossamer.settings.schema import settings


def matched_local_steps(full_steps: int, bandwidth_share: float, exchange_steps: float) -> int:
    """Local steps with which a worker on a slow link is ready in time: `clamp(⌊H - (1/share - 1)·c⌋, 1, H)`.

    The others compute H steps and then exchange for the time of c steps. The straggler's exchange takes c/share, so it
    computes for less time.

    Args: `bandwidth_share` is its bandwidth over that of the others, in (0, 1]; `exchange_steps` is c, the time of an
        exchange at full bandwidth in units of one step.
    Raises: ConfigError for a number out of bounds.
    Source: inferred from arXiv 2606.11081, figures 2 and 3: c = 5/3 for one peer and 10/3 for two give their 15 and 1.

    >>> matched_local_steps(30, 0.1, 5 / 3), matched_local_steps(30, 0.1, 10 / 3)
    (15, 1)
    """
    check_values(Count, full_steps=full_steps)
    check_values(Share, bandwidth_share=bandwidth_share)
    check_values(NotNegative, exchange_steps=exchange_steps)
    longest = full_steps - (1 / bandwidth_share - 1) * exchange_steps
    return whole_steps(longest, full_steps)


STRAGGLER_METHODS: dict[str, int | None] = {
    "data_parallel": None,
    "diloco": None,
    "gasloc_1_peer": 1,
    "gasloc_2_peer": 2,
}
"""How many peers a worker exchanges its model with in a round; None for an all-reduce over everyone."""


class StragglerUtilisation(NamedTuple):
    """Utilisation of a run in which one worker has a slow uplink."""

    method: str
    bandwidth_bps: float
    """Bandwidth of every worker but the straggler."""
    cycle_s: float
    """Seconds from one round to the next; the same for all workers in the long run."""
    local_steps: int
    """Inner steps of a healthy worker in a round."""
    straggler_local_steps: int
    """Inner steps of the straggler in a round."""
    healthy: float
    straggler: float
    mean: float
    """Over all workers."""
    assumptions: tuple[str, ...]
    """Assumptions, a sentence each, printed with the numbers."""


@settings("")
class StragglerRun:
    """A run of `workers`, one of which has a slow uplink.

    Raises: ConfigError for a number out of bounds.
    """

    bandwidth_share: Share = 0.2
    """The straggler's uplink bandwidth over that of the others, in (0, 1]."""
    workers: Count = 8
    local_steps: Count = 30
    """Inner steps of a healthy worker in a round."""
    model: SkipValidation[Model] = MODELS["70b"]
    bits_per_parameter: Positive = 16.0

    def __post_init__(self) -> None:
        check_values(Positive, step_s=self.model.step_s, parameters=self.model.parameters)

    @property
    def payload_bits(self) -> float:
        """Bits of one copy of the model."""
        return self.model.parameters * self.bits_per_parameter


def straggler_utilisation(
    method: str, bandwidth_bps: float, run: StragglerRun = StragglerRun()
) -> StragglerUtilisation:
    """Utilisation when one of n workers has a share of the bandwidth W that the others have.

    With P the bits of a model and t the seconds of a step:

    * all-reduce: all wait for the slowest link, and a cycle takes `H·t + 2·(n-1)/n · P/(share·W)`; data parallelism has H = 1
    * gossip with k peers: an exchange takes `C = k·P/W`. That of the straggler takes `C/share`, after the `H_i` steps of
      `matched_local_steps`. A cycle takes `max(H·t + C, H_i·t + C/share)`.

    Utilisation is the worker's own steps times t over the cycle. The second term of the maximum only counts once the
    straggler is down to one step and still late: its peers wait for it, their peers in the next round, and soon everyone.

    Raises: ConfigError for an unknown method or a number out of bounds.
    Source: arXiv 2606.11081, figure 9, by its caption; the formulas are ours.

    >>> straggler_utilisation("gasloc_1_peer", 10e9).straggler_local_steps
    4
    """
    if method not in STRAGGLER_METHODS:
        raise ConfigError(choose("method", method, STRAGGLER_METHODS))
    ensure("bandwidth_bps", bandwidth_bps, bandwidth_bps > 0, "above 0, in bits per second")
    peers, n, share, step_s = STRAGGLER_METHODS[method], run.workers, run.bandwidth_share, run.model.step_s
    fewest = 1 + (peers or 1)
    ensure(f"workers of {method}", n, n >= fewest, f"a whole number from {fewest}")
    steps = straggler_steps = 1 if method == "data_parallel" else run.local_steps
    if peers is None:
        cycle_s = steps * step_s + all_reduce_s(run.payload_bits, n, Link(bandwidth_bps * share, 0.0))
    else:
        exchange_s = peers * run.payload_bits / bandwidth_bps
        straggler_steps = matched_local_steps(steps, share, exchange_s / step_s)
        cycle_s = max(steps * step_s + exchange_s, straggler_steps * step_s + exchange_s / share)
    healthy, straggler = steps * step_s / cycle_s, straggler_steps * step_s / cycle_s
    return StragglerUtilisation(
        method=method,
        bandwidth_bps=float(bandwidth_bps),
        cycle_s=cycle_s,
        local_steps=steps,
        straggler_local_steps=straggler_steps,
        healthy=healthy,
        straggler=straggler,
        mean=healthy - (healthy - straggler) / n,
        assumptions=_assumptions(run, peers),
    )


def _assumptions(run: StragglerRun, peers: int | None) -> tuple[str, ...]:
    if peers is None:
        exchange = "a ring all-reduce moves 2(n-1)/n copies of the model at the pace of the slowest link"
    else:
        exchange = (
            f"each worker sends its model to {peers} peer(s) while it receives; the straggler takes fewer local steps "
            "to be ready in time, and where one step is still too many everyone waits for it"
        )
    return (
        f"{run.workers} workers, steps of {run.model.step_s:.3g} s",
        f"{run.model.parameters:.3g} parameters of {run.bits_per_parameter:g} bits",
        f"one worker's uplink has {run.bandwidth_share:.0%} of the bandwidth; its downlink is as fast as the others'",
        "no latency, and no transfer is hidden behind compute",
        exchange,
    )


def straggler_table(
    methods: Iterable[str] = tuple(STRAGGLER_METHODS),
    bandwidths_bps: ArrayLike = BANDWIDTHS_BPS,
    run: StragglerRun = StragglerRun(),
) -> list[StragglerUtilisation]:
    """`straggler_utilisation` of each method at each bandwidth, method by method.

    Raises: ConfigError for an unknown method or a number out of bounds.
    """
    bandwidths = [float(bandwidth) for bandwidth in np.asarray(bandwidths_bps, float).ravel()]
    return [straggler_utilisation(method, bandwidth, run) for method in methods for bandwidth in bandwidths]


def straggler_rows(run: StragglerRun = StragglerRun()) -> list[tuple[str, ...]]:
    """Per bandwidth in Gbit/s the mean utilisation of each of `STRAGGLER_METHODS`, with the straggler's local steps, as text.

    >>> straggler_rows(StragglerRun(workers=4))[0][:2]
    ('1', '0.2% (1)')
    """
    rows = []
    for bandwidth_bps in (1e9, 3e9, 1e10, 3e10, 1e11, 3e11, 1e12):
        points = straggler_table(bandwidths_bps=bandwidth_bps, run=run)
        cells = (f"{point.mean:.1%} ({point.straggler_local_steps})" for point in points)
        rows.append((f"{bandwidth_bps / 1e9:g}", *cells))
    return rows
