"""Hours of a whole run by formula, and the published fits of loss, learning rate and batch size."""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import SkipValidation

from gossamer.errors import ConfigError, choose
from gossamer.network.estimates.goodput import ensure
from gossamer.network.estimates.utilisation import step_seconds
from gossamer.settings.fields import OneOf
from gossamer.settings.options import Count, NotNegative, Positive, check_values
from gossamer.settings.schema import settings


class Link(NamedTuple):
    """The connection of a node to the others."""

    bandwidth_bps: float
    latency_s: float


LINKS: dict[str, Link] = {"high": Link(400e9, 1e-4), "medium": Link(100e9, 1e-3), "low": Link(10e9, 1e-2)}
"""The networks of arXiv 2503.09799, appendix A; inside a site it is always "high"."""
SUSTAINED_FLOPS = 300e12
"""FLOP/s that one node sustains, from the same source."""


def all_reduce_s(payload_bits: float, nodes: int, link: Link) -> float:
    """Seconds of a bandwidth-optimal all-reduce: `(2·bits/W)·(1 - 1/R) + latency`, a lower bound.

    Args: `nodes` is R; a single node has nothing to send and pays only the latency.
    Raises: ConfigError for a number out of bounds. Source: arXiv 2503.09799, appendix A.

    >>> all_reduce_s(16e9, nodes=4, link=Link(bandwidth_bps=8e9, latency_s=0.5))
    3.5
    """
    check_values(Count, nodes=nodes)
    check_values(Positive, payload_bits=payload_bits)
    ensure("bandwidth_bps of the link", link.bandwidth_bps, link.bandwidth_bps > 0, "above 0")
    check_values(NotNegative, **{"latency_s of the link": link.latency_s})
    return 2 * payload_bits / link.bandwidth_bps * (1 - 1 / nodes) + link.latency_s


class WallClock(NamedTuple):
    """The breakdown of the seconds of a training run."""

    compute_s: float
    inner_s: float
    """Seconds of reducing gradients in each step, within a replica (or over all nodes)."""
    outer_s: float
    """Exposed seconds of reducing across replicas once per round."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole run."""
        return self.compute_s + self.inner_s + self.outer_s


@settings("")
class MultiSiteRun:
    """A whole training run on nodes in several sites.

    Raises: ConfigError for a number out of bounds.
    """

    parameters: Positive
    tokens: Positive
    """Of the whole run."""
    batch_tokens: Positive
    """Of one step, over all nodes."""
    nodes: Count
    """Over all replicas (R)."""
    across: SkipValidation[Link]
    """The link of a node to the other sites."""
    within: SkipValidation[Link] = LINKS["high"]
    """The link of a node to the others of its site."""
    replicas: Count = 1
    """Sites with a replica each (M)."""
    local_steps: Count = 1
    """Steps between two reductions across sites (H)."""
    fragments: Count = 1
    """Parts in which the model is reduced across sites (P)."""
    overlap_steps: NotNegative = 0
    """Steps that hide the transfer of a fragment."""
    bits_per_parameter: Positive = 16.0
    flops: Positive = SUSTAINED_FLOPS
    """FLOP/s of one node."""

    def __post_init__(self) -> None:
        _check_replicas(self.replicas, self.nodes)

    @property
    def payload_bits(self) -> float:
        """Bits of one copy of the model."""
        return self.bits_per_parameter * self.parameters


def _check_replicas(replicas: int, nodes: int) -> None:
    allowed = f"a divisor of the {nodes} nodes, so that all replicas are equal"
    ensure("replicas", replicas, nodes % replicas == 0, allowed)


def wall_clock(method: Literal["data_parallel", "diloco", "streaming"], run: MultiSiteRun) -> WallClock:
    """Seconds of training on R nodes in M replicas for `T = tokens / batch_tokens` steps, without overlap in a step.

    * compute: `6·N·tokens / (R·flops)`
    * data parallelism: `T · all_reduce(N, R, across)`
    * DiLoCo, M = 1: that, and the same once more in each H steps
    * DiLoCo, M ≥ 2: `T · all_reduce(N, R/M, within) + T/H · all_reduce(N, R, across)`
    * streaming: as DiLoCo, but `P · all_reduce(N/P, R, across)` in each H steps. Each of these P transfers moves a P-th of
      the bits, and up to `overlap_steps` steps hide it.

    Raises: ConfigError for an option that the method does not have.
    Source: arXiv 2503.09799, appendices A and B; bits per parameter are implicit there, 16 is our choice.
    Differs: each fragment pays the latency, which the paper's total of a round counts once.
    """
    _check_method(method, run)
    steps = run.tokens / run.batch_tokens
    compute_s = step_seconds(run.parameters, run.tokens, run.nodes * run.flops)
    inner_link = run.across if run.replicas == 1 else run.within
    inner_s = steps * all_reduce_s(run.payload_bits, run.nodes // run.replicas, inner_link)
    if method == "data_parallel":
        return WallClock(compute_s, inner_s, 0.0)
    hidden_s = run.overlap_steps * (compute_s + inner_s) / steps
    exposed_s = max(0.0, all_reduce_s(run.payload_bits / run.fragments, run.nodes, run.across) - hidden_s)
    return WallClock(compute_s, inner_s, steps / run.local_steps * run.fragments * exposed_s)


def _check_method(method: str, run: MultiSiteRun) -> None:
    """Raises ConfigError for an unknown method, or for an option of the run that the method does not have."""
    if method not in ("data_parallel", "diloco", "streaming"):
        raise ConfigError(choose("method", str(method), ("data_parallel", "diloco", "streaming")))
    if method == "data_parallel":
        for name, value in (("replicas", run.replicas), ("local_steps", run.local_steps)):
            ensure(f"{name} of data_parallel", value, value == 1, "1, as it reduces each step over all nodes")
    streams, tau = method == "streaming", run.overlap_steps
    whole = streams or run.fragments == 1
    ensure(f"fragments of {method}", run.fragments, whole, "1; only streaming sends the model in parts")
    longest = run.local_steps // run.fragments if streams else 0
    allowed = f"from 0 to {longest}; only streaming hides transfers, and each must end before the next one begins"
    ensure(f"overlap_steps of {method}", int(tau) if float(tau).is_integer() else tau, tau <= longest, allowed)


def balanced_local_steps(
    *,
    parameters: float,
    nodes: int,
    replicas: int,
    across: Link,
    within: Link = LINKS["high"],
    bits_per_parameter: float = 16.0,
) -> int:
    """The fewest local steps with which DiLoCo's reductions across sites take at most half of its communication.

    `H = ⌈all_reduce(N, R, across) / all_reduce(N, R/M, within)⌉`, which comes to `⌈W0/W1⌉` for many nodes in each
    replica and bandwidths that outweigh latencies.

    Raises: ConfigError for a number out of bounds, or where a reduction within a replica takes no time.
    Source: arXiv 2503.09799, appendix A, where H ≥ W0/W1 is the rule.

    >>> balanced_local_steps(parameters=1e9, nodes=1024, replicas=2, across=LINKS["medium"]), 400e9 / 100e9
    (5, 4.0)
    """
    check_values(Count, nodes=nodes, replicas=replicas)
    _check_replicas(replicas, nodes)
    bits = bits_per_parameter * parameters
    inner_s = all_reduce_s(bits, nodes // replicas, within)
    ensure("seconds of a reduction within a replica", inner_s, inner_s > 0, "above 0; give the link a latency")
    return max(1, math.ceil(all_reduce_s(bits, nodes, across) / inner_s * (1 - 1e-12)))


def data_parallel_fit(parameters: float) -> float:
    """The loss that data parallelism reaches on C4 with 20 tokens a parameter: `18.129 · N^-0.0953` nats a token.

    Source: arXiv 2503.09799, fitted from 35M to 2.4B parameters.

    >>> round(data_parallel_fit(1.3e9), 2)
    2.45
    """
    check_values(Positive, parameters=parameters)
    return 18.129 * parameters**-0.0953


DILOCO_FITS: Mapping[int, tuple[float, float]] = {2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""Loss of DiLoCo by its number of replicas, `A · N^a`; source: arXiv 2503.09799, a fit for each of them."""
FITTED_PARAMETERS = (35e6, 2.4e9)
"""From the fewest to the most of these fits."""


@functools.lru_cache(maxsize=1 << 12)
def diloco_gap(parameters: float, replicas: int) -> float:
    """The share by which DiLoCo's loss with H = 30 is above data parallelism's, by the fit of each number of replicas.

    Between these it is interpolated in log-log space. One replica has none: its fit is a little below data parallelism.
    With more than 8 it rises as from 4 to 8. Parameter counts outside the fitted range are clamped to it, as beyond it
    the fits of all replicas meet and cross.

    Source: arXiv 2503.09799, 35M to 2.4B parameters and 2, 4 and 8 replicas.

    >>> [f"{diloco_gap(35e6, replicas):.1%}" for replicas in (1, 2, 4, 8)]  # measured there: -0.1, 0.7, 2.0 and 3.9 %
    ['0.0%', '0.7%', '1.9%', '3.7%']
    """
    check_values(Positive, parameters=parameters)
    check_values(Count, replicas=replicas)
    fewest, most = FITTED_PARAMETERS
    least = data_parallel_fit(n := min(max(parameters, fewest), most))
    known = {1: 0.0, **{m: math.log(a * n**power / least) for m, (a, power) in DILOCO_FITS.items()}}
    high = next((m for m in known if m >= replicas), 8)
    if high == 1:
        return 0.0
    low = high // 2
    gap = known[low] + (known[high] - known[low]) * math.log(replicas / low) / math.log(2)
    return math.expm1(gap)


def inner_lr_fit(parameters: float, replicas: int = 1) -> float:
    """The best learning rate of DiLoCo's AdamW: `22256 · N^-0.8827 · M^0.2929`. Source: as `diloco_gap`.

    >>> f"{inner_lr_fit(1e9, replicas=2):.1e}"
    '3.1e-04'
    """
    check_values(Positive, parameters=parameters)
    check_values(Count, replicas=replicas)
    return 22256 * parameters**-0.8827 * replicas**0.2929


def batch_tokens_fit(parameters: float, replicas: int = 1) -> float:
    """The best batch of DiLoCo, of all replicas together: `2048 · 0.00709 · N^0.4695 · M^0.3399` tokens.

    Source: as `diloco_gap`. Differs: the unit, sequences of 2048 tokens, is our reading; only with it does this fit agree with
        the separate one for two replicas, `15.75 · N^0.479` tokens.

    >>> f"{batch_tokens_fit(1e9, replicas=2):.2g}", f"{15.75 * 1e9**0.479:.2g}"
    ('3.1e+05', '3.2e+05')
    """
    check_values(Positive, parameters=parameters)
    check_values(Count, replicas=replicas)
    return 2048 * 0.00709 * parameters**0.4695 * replicas**0.3399


class Hours(NamedTuple):
    """A row of `wall_clock_table`."""

    method: str
    clock: WallClock
    at_once_bits: float
    """Bits that one reduction across sites moves at a time."""


class WallClockTable(NamedTuple):
    """The breakdown of the seconds of a run, by method."""

    rows: tuple[Hours, ...]
    assumptions: tuple[str, ...]
    """Assumptions, a sentence each, printed with the numbers."""


@settings("")
class WallClockOptions:
    """The run that `wall_clock_table` compares the methods on.

    Raises: ConfigError for an unknown network or a number out of bounds.
    """

    parameters: Positive = 1e9
    replicas: Count = 4
    local_steps: Count = 30
    network: Annotated[str, OneOf(LINKS)] = "low"
    """Between the sites."""
    tokens: Positive | None = None
    """Of the whole run; 20 per parameter if None."""
    batch_tokens: Positive | None = None
    """Of one step; those of `batch_tokens_fit` if None."""
    nodes: Count | None = None
    """Over all replicas; if None, as many as give each about `node_tokens` of the batch, the same number in each replica."""
    node_tokens: Positive = 2.0**14
    fragments: Count = 3
    """Of streaming."""
    overlap_steps: NotNegative = 1
    """Of streaming."""
    bits_per_parameter: Positive = 16.0
    flops: Positive = SUSTAINED_FLOPS
    """FLOP/s of one node."""

    def run(self) -> MultiSiteRun:
        """The run of DiLoCo in all replicas. Raises ConfigError for a number out of bounds."""
        batch_tokens, nodes = self.batch_tokens, self.nodes
        if batch_tokens is None:
            batch_tokens = batch_tokens_fit(self.parameters, self.replicas)
        if nodes is None:
            nodes = max(1, round(batch_tokens / self.node_tokens / self.replicas)) * self.replicas
        return MultiSiteRun(
            parameters=self.parameters,
            tokens=20 * self.parameters if self.tokens is None else self.tokens,
            batch_tokens=batch_tokens,
            nodes=nodes,
            across=LINKS[self.network],
            replicas=self.replicas,
            local_steps=self.local_steps,
            bits_per_parameter=self.bits_per_parameter,
            flops=self.flops,
        )


def wall_clock_table(options: WallClockOptions = WallClockOptions()) -> WallClockTable:
    """`wall_clock` of each method. Raises ConfigError for a number out of bounds."""
    split = options.run()
    one = replace(split, replicas=1)
    streams = replace(split, fragments=options.fragments)
    bits, tau = split.payload_bits, options.overlap_steps
    rows = (
        Hours("data parallelism", wall_clock("data_parallel", replace(one, local_steps=1)), bits),
        Hours("DiLoCo, M = 1", wall_clock("diloco", one), bits),
        Hours(f"DiLoCo, M = {split.replicas}", wall_clock("diloco", split), bits),
        Hours("streaming", wall_clock("streaming", streams), bits / options.fragments),
        Hours(
            f"streaming, τ = {tau}",
            wall_clock("streaming", replace(streams, overlap_steps=tau)),
            bits / options.fragments,
        ),
    )
    return WallClockTable(rows, _assumptions(streams))


def _assumptions(run: MultiSiteRun) -> tuple[str, ...]:
    across, within = run.across, run.within
    half = balanced_local_steps(
        parameters=run.parameters,
        nodes=run.nodes,
        replicas=run.replicas,
        across=across,
        bits_per_parameter=run.bits_per_parameter,
    )
    return (
        f"{run.parameters:.3g} parameters of {run.bits_per_parameter:g} bits, {run.tokens:.3g} tokens, batches of "
        f"{run.batch_tokens:.3g}",
        f"{run.nodes} nodes in {run.replicas} replicas, {run.flops:.3g} FLOP/s each; H = {run.local_steps}, "
        f"{run.fragments} fragments in streaming",
        f"{across.bandwidth_bps / 1e9:g} Gbit/s and {across.latency_s:g} s across sites, {within.bandwidth_bps / 1e9:g} Gbit/s "
        f"and {within.latency_s:g} s within one; data parallelism and M = 1 reduce over all sites in each step",
        f"H = {half} and more leave the sites at most half of the communication of DiLoCo, M = {run.replicas}",
        "nothing overlaps within a step",
    )


HOURS_HEADINGS = ("method", "hours", "computing", "reducing each step", "each round", "Gbit at once")
"""Headings of the columns of `hours_rows`."""


def hours_rows(table: WallClockTable) -> list[tuple[str, ...]]:
    """The hours and their shares as text, for a table under `HOURS_HEADINGS`."""
    return [
        (
            row.method,
            f"{row.clock.total_s / 3600:.4g}",
            *(f"{seconds / row.clock.total_s:.1%}" for seconds in row.clock),
            f"{row.at_once_bits / 1e9:.4g}",
        )
        for row in table.rows
    ]
