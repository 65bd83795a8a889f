"""How much of a training run is computing rather than waiting for the network; three models, none of which trains.

* `utilisation` follows every layer through the link between sites that compute at one pace: data parallelism, DiLoCo
  and its streaming form, overlapped or not (Streaming DiLoCo, arXiv 2501.18512, section 3.1).
* `wall_clock` is closed form: total hours of data parallelism and DiLoCo on links with a latency (scaling laws,
  arXiv 2503.09799, appendices A and B).
* `straggler_utilisation` compares all-reduce with gossip when one worker has a slow uplink (GASLoC, arXiv 2606.11081,
  figure 9).

Utilisation is always compute time over total time. Bandwidths are in bits per second, models in parameters.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gossamer.errors import ConfigError, choose

__all__ = [
    "BANDWIDTHS_BPS",
    "LINKS",
    "METHODS",
    "MODELS",
    "PUBLISHED_GBPS",
    "STRAGGLER_METHODS",
    "SUSTAINED_FLOPS",
    "TARGETS",
    "BandwidthNeeded",
    "Hours",
    "Link",
    "Model",
    "Setting",
    "StragglerUtilisation",
    "UtilisationAt",
    "WallClock",
    "WallClockTable",
    "all_reduce_s",
    "balanced_local_steps",
    "bandwidth_needed",
    "bandwidth_table",
    "batch_tokens_fit",
    "grid_steps_above_published",
    "inner_lr_fit",
    "loss_fit",
    "matched_local_steps",
    "plot_curves",
    "setting_of",
    "step_seconds",
    "straggler_table",
    "straggler_utilisation",
    "utilisation",
    "utilisation_curve",
    "wall_clock",
    "wall_clock_table",
]

Floats = NDArray[np.float64]

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The utilisations for which bandwidths are usually asked."""

BANDWIDTHS_BPS: Floats = np.logspace(-1, 3, 50) * 1e9
"""The published grid, 0.1 Gbit/s to 1 Tbit/s in steps of 21 %; every bandwidth of the published table lies on it."""
BANDWIDTHS_BPS.flags.writeable = False


def _within(what: str, value: float, holds: bool, allowed: str) -> None:
    """Raises ConfigError unless the condition holds; `allowed` says in words which values do."""
    if not holds:
        raise ConfigError(f"{what} is {value!r} but must be {allowed}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(name: str, value: float) -> None:
    _within(name, value, _is_whole(value) and value >= 1, "a whole number, 1 or more")


def _positive(name: str, value: float) -> None:
    _within(name, value, _is_number(value) and 0 < value < math.inf, "a finite number above 0")


def _check_share(bandwidth_share: float) -> None:
    holds = _is_number(bandwidth_share) and 0 < bandwidth_share <= 1
    _within("bandwidth_share", bandwidth_share, holds, "above 0 and at most 1, such as 0.1 for 10 %")


# --- layer by layer ---------------------------------------------------------------------------------------------------


def step_seconds(parameters: float, tokens: float, peak_flops: float, mfu: float = 1.0) -> float:
    """Seconds of one training step by its FLOPs: `6·N·tokens / (peak·MFU)`.

    Args: `tokens` in the batch of whatever has `peak_flops` FLOP/s; `mfu` is the share of that peak in use, in (0, 1].
    Raises: ConfigError for a number out of bounds.

    >>> step_seconds(1e9, tokens=1e6, peak_flops=1e15, mfu=0.4)
    15.0
    """
    for name, value in (("parameters", parameters), ("tokens", tokens), ("peak_flops", peak_flops)):
        _positive(name, value)
    _within("mfu", mfu, 0 < mfu <= 1, "above 0 and at most 1")
    return 6 * parameters * tokens / (peak_flops * mfu)


class Model(NamedTuple):
    """What a utilisation model needs to know of a network that is trained."""

    layers: int
    step_s: float
    """Seconds of one inner step of one worker."""
    parameters: float


MODELS: dict[str, Model] = {
    "1b": Model(layers=24, step_s=0.1, parameters=1e9),
    "10b": Model(layers=48, step_s=0.8, parameters=10e9),
    "100b": Model(layers=108, step_s=4.9, parameters=100e9),
    "70b": Model(layers=80, step_s=step_seconds(70e9, 2**20, peak_flops=64 * 989e12, mfu=0.4), parameters=70e9),
}
"""Known settings. The first three are those of arXiv 2501.18512, table 4. The step of "70b" is our choice: a worker of
64 accelerators with 989 TFLOP/s each at 40 % takes 17.4 s for 2^20 tokens."""

METHODS: dict[str, dict[str, Any]] = {
    "data_parallel": {"local_steps": 1, "fragment_layers": None},
    "diloco": {"fragment_layers": None},
    "streaming": {"fragment_layers": 3},
    "streaming_overlap": {"fragment_layers": 3, "overlap_steps": 1},
    "streaming_overlap_fp4": {"fragment_layers": 3, "overlap_steps": 1, "bits_per_parameter": 16 * 0.26},
}
"""What each column of the published table asks of a `Setting`. FP4 is priced at 4.16 bits: the 4 % above four, room for
scales, fit the published numbers best (67 instead of 69 of the 75 are met exactly without them)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One model, trained by one method. Data parallelism is one local step, DiLoCo one fragment of all layers.

    Raises: ConfigError for an option out of bounds.

    >>> Setting(layers=7, step_s=1, parameters=1e9, fragment_layers=3).fragments
    ((0, 3, 6), (1, 4), (2, 5))
    """

    layers: int
    step_s: float
    """Seconds of one inner step without any waiting."""
    parameters: float
    """Parameters of the model, taken to be spread evenly over the layers."""
    local_steps: int = 100
    """Inner steps between two reductions of the same layer (H)."""
    fragment_layers: int | None = 3
    """Layers of a fragment at most; None reduces the whole model at once."""
    assignment: Literal["strided", "sequential"] = "strided"
    """Whether a fragment takes every k-th layer or neighbouring ones."""
    overlap_steps: int = 0
    """Inner steps taken between the step that sends a layer and the step that waits for it (tau)."""
    bits_per_parameter: float = 16.0
    payload_factor: float = 0.84
    """Bits on the link per bit of the model. Two sites make 2·(1 - 1/2) = 1 of it; 0.84 fits the published table best,
    which gives no reason for it."""
    forward_share: float = 1 / 3
    """The forward pass's share of a step."""

    def __post_init__(self) -> None:
        for name in ("layers", "local_steps"):
            _count(name, getattr(self, name))
        if self.fragment_layers is not None:
            _count("fragment_layers", self.fragment_layers)
        for name in ("step_s", "parameters", "bits_per_parameter", "payload_factor"):
            _positive(name, getattr(self, name))
        _within("forward_share", self.forward_share, 0 <= self.forward_share <= 1, "between 0 and 1")
        if self.assignment not in ("strided", "sequential"):
            raise ConfigError(choose("assignment", str(self.assignment), ("strided", "sequential")))
        last = self.local_steps - 1
        _within(
            "overlap_steps",
            self.overlap_steps,
            _is_whole(self.overlap_steps) and 0 <= self.overlap_steps <= last,
            f"a whole number from 0 to {last}, one less than local_steps: a layer is reduced before it is sent again",
        )

    @property
    def fragments(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each fragment, ascending."""
        size = min(self.fragment_layers or self.layers, self.layers)
        count = -(-self.layers // size)
        if self.assignment == "strided":
            return tuple(tuple(range(p, self.layers, count)) for p in range(count))
        return tuple(tuple(range(p * size, min((p + 1) * size, self.layers))) for p in range(count))


def setting_of(model: str, method: str, **options: Any) -> Setting:
    """The setting of a known model under a known method; any option of `Setting` may be given on top.

    Raises: ConfigError for an unknown name, an option out of bounds or one that would turn the method into another.

    >>> setting_of("1b", "streaming_overlap", local_steps=30).overlap_steps
    1
    """
    for what, name, table in (("model", model, MODELS), ("method", method, METHODS)):
        if name not in table:
            raise ConfigError(choose(what, name, table))
    for name in options:
        if name not in Setting.__dataclass_fields__:
            raise ConfigError(choose("option", name, Setting.__dataclass_fields__))
    own = METHODS[method]
    if own.get("local_steps") == 1 and options.get("local_steps", 1) != 1:
        raise ConfigError(
            f"{method} reduces in each step but local_steps is {options['local_steps']}; only 1 is allowed, "
            "use the method diloco for more"
        )
    if own["fragment_layers"] is None and options.get("fragment_layers") is not None:
        raise ConfigError(
            f"{method} reduces the whole model at once but fragment_layers is {options['fragment_layers']}; "
            "leave it out, or use the method streaming"
        )
    return Setting(**(MODELS[model]._asdict() | own | options))


def utilisation(setting: Setting, bandwidth_bps: ArrayLike) -> Floats:
    """Share of the time spent computing in the steady state, one value for each bandwidth, in its shape.

    A layer's reduction starts when its backward pass has ended and the link is free, first come first served, and takes
    `payload_factor · bits · N / (layers · bandwidth)`. The forward pass of that layer `overlap_steps + 1` steps later
    waits until it is there. Fragment p of k leaves in step `⌊p·H/k⌋` of each H. The link has no latency.

    `CU = H / max(steps that pass in a period, steps that the link needs for its bytes)`

    Raises: ConfigError for a bandwidth below 1; infinity is allowed.
    Cost: O(local_steps + layers) operations on arrays of that shape, under 1 ms for the published grid.
    Source: arXiv 2501.18512, section 3.1; the rules are inferred from its table 4.

    >>> utilisation(setting_of("1b", "diloco"), [1e9, 1e10, np.inf]).round(3)
    array([0.428, 0.887, 1.   ])
    """
    bandwidth = np.asarray(bandwidth_bps, float)
    if not (bandwidth >= 1).all():
        raise ConfigError(f"bandwidth_bps goes down to {bandwidth.min():g} but must be 1 or more; give bits per second")
    s = setting
    period, forward, backward = s.local_steps, s.forward_share, 1 - s.forward_share
    bits = s.payload_factor * s.bits_per_parameter * s.parameters
    takes = bits / (s.layers * bandwidth * s.step_s)

    # Times are counted in steps, not seconds: whole steps are exact floats, so an infinite bandwidth gives exactly 1.
    sends = _sends(s)
    clock = begin = link_free = np.zeros_like(bandwidth)
    due: dict[int, list[tuple[int, Floats]]] = {}
    for step in range(2 * period):
        if step == period:
            begin = clock
        for layer, arrived in due.pop(step, ()):
            clock = np.maximum(clock, arrived - forward * layer / s.layers)
        for layer in sends.get(step % period, ()):
            ready = clock + (forward + backward * (s.layers - layer) / s.layers)
            link_free = np.maximum(link_free, ready) + takes
            due.setdefault(step + 1 + s.overlap_steps, []).append((layer, link_free))
        clock = clock + 1
    # From the second period on only one thing can change: a link that falls behind its bytes while the overlap still
    # hides it. In the end its load is the pace, so it is taken as such at once.
    return period / np.maximum(clock - begin, s.layers * takes)


def _sends(setting: Setting) -> dict[int, list[int]]:
    """The layers that leave in each step of a period, in the order in which the backward pass meets them."""
    sends: dict[int, list[int]] = {}
    count = len(setting.fragments)
    for p, layers in enumerate(setting.fragments):
        sends.setdefault(p * setting.local_steps // count, []).extend(layers)
    return {step: sorted(layers, reverse=True) for step, layers in sends.items()}


def bandwidth_needed(setting: Setting, target: float, bandwidths_bps: ArrayLike = BANDWIDTHS_BPS) -> float | None:
    """The smallest of the given bandwidths at which a target utilisation is reached; None where none is enough.

    Raises: ConfigError for a target outside (0, 1] or a bandwidth below 1.

    >>> f"{bandwidth_needed(setting_of('1b', 'diloco'), 0.95) / 1e9:.1f} Gbit/s"
    '23.3 Gbit/s'
    """
    return bandwidth_table(setting, (target,), bandwidths_bps)[0].bandwidth_bps


class BandwidthNeeded(NamedTuple):
    """A row of `bandwidth_table`."""

    utilisation: float
    """The target."""
    bandwidth_bps: float | None
    """The smallest bandwidth of the grid that reaches it; None where the largest does not."""


def bandwidth_table(
    setting: Setting, targets: Iterable[float] = TARGETS, bandwidths_bps: ArrayLike = BANDWIDTHS_BPS
) -> list[BandwidthNeeded]:
    """The bandwidth that each target utilisation needs.

    Raises: ConfigError for a target outside (0, 1] or a bandwidth below 1.
    """
    targets = tuple(targets)
    for target in targets:
        _within("the target utilisation", target, 0 < target <= 1, "above 0 and at most 1, such as 0.95")
    bandwidths = np.sort(np.asarray(bandwidths_bps, float), axis=None)
    reached = utilisation(setting, bandwidths)
    return [BandwidthNeeded(t, next((float(b) for b in bandwidths[reached >= t]), None)) for t in targets]


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
    for what, name, table in (("model", model, PUBLISHED_GBPS), ("method", method, METHODS)):
        if name not in table:
            raise ConfigError(choose(f"published {what}", name, table))
    off = []
    for row, gbps in zip(
        bandwidth_table(setting_of(model, method, **options)), PUBLISHED_GBPS[model][method], strict=True
    ):
        needed = math.inf if row.bandwidth_bps is None else row.bandwidth_bps
        _within(f"bandwidth for a utilisation of {row.utilisation:.0%}", needed, needed < math.inf, "on the grid")
        # The published ones have one decimal.
        published = int(np.abs(np.log(BANDWIDTHS_BPS / (gbps * 1e9))).argmin())
        off.append(int(np.searchsorted(BANDWIDTHS_BPS, needed)) - published)
    return off


class UtilisationAt(NamedTuple):
    """A point of `utilisation_curve`."""

    bandwidth_bps: float
    utilisation: float


def utilisation_curve(setting: Setting, bandwidths_bps: ArrayLike = BANDWIDTHS_BPS) -> list[UtilisationAt]:
    """Utilisation at each bandwidth, as points to print or draw. Raises ConfigError for one below 1."""
    bandwidths = np.asarray(bandwidths_bps, float).ravel()
    pairs = zip(bandwidths, utilisation(setting, bandwidths), strict=True)
    return [UtilisationAt(float(b), float(u)) for b, u in pairs]


# --- closed form ------------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """A connection between nodes."""

    bandwidth_bps: float
    latency_s: float


LINKS: dict[str, Link] = {"high": Link(400e9, 1e-4), "medium": Link(100e9, 1e-3), "low": Link(10e9, 1e-2)}
"""The networks of arXiv 2503.09799, appendix A; inside a site it is always "high"."""

SUSTAINED_FLOPS = 300e12
"""FLOP/s that one node keeps up, of the same source."""


def all_reduce_s(payload_bits: float, nodes: int, link: Link) -> float:
    """Seconds of a bandwidth-optimal all-reduce: `(2·bits/W)·(1 - 1/R) + latency`, a lower bound.

    Args: `nodes` is R; one node has nothing to send and pays the latency only.
    Raises: ConfigError for a number out of bounds. Source: arXiv 2503.09799, appendix A.

    >>> all_reduce_s(16e9, nodes=4, link=Link(bandwidth_bps=8e9, latency_s=0.5))
    3.5
    """
    _count("nodes", nodes)
    _positive("payload_bits", payload_bits)
    _within("bandwidth_bps of the link", link.bandwidth_bps, link.bandwidth_bps > 0, "above 0")
    _within("latency_s of the link", link.latency_s, 0 <= link.latency_s < math.inf, "a number of seconds, 0 or more")
    return 2 * payload_bits / link.bandwidth_bps * (1 - 1 / nodes) + link.latency_s


class WallClock(NamedTuple):
    """Where the seconds of a training run go."""

    compute_s: float
    inner_s: float
    """Reducing gradients in each step, within a replica (or over all nodes)."""
    outer_s: float
    """Reducing across replicas once per round, as far as nothing hides it."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole run."""
        return self.compute_s + self.inner_s + self.outer_s

    @property
    def utilisation(self) -> float:
        """Compute time over total time."""
        return self.compute_s / self.total_s


def wall_clock(
    method: Literal["data_parallel", "diloco", "streaming"],
    *,
    parameters: float,
    tokens: float,
    batch_tokens: float,
    nodes: int,
    across: Link,
    within: Link = LINKS["high"],
    replicas: int = 1,
    local_steps: int = 1,
    fragments: int = 1,
    overlap_steps: int = 0,
    bits_per_parameter: float = 16.0,
    flops: float = SUSTAINED_FLOPS,
) -> WallClock:
    """Seconds of training on R nodes in M replicas for `T = tokens / batch_tokens` steps, without overlap in a step.

    * compute: `6·N·tokens / (R·flops)`
    * data parallelism: `T · all_reduce(N, R, across)`
    * DiLoCo, M = 1: that, and the same once more in each H steps
    * DiLoCo, M ≥ 2: `T · all_reduce(N, R/M, within) + T/H · all_reduce(N, R, across)`
    * streaming: as DiLoCo, but `P · all_reduce(N/P, R, across)` in each H steps, of which up to `overlap_steps` steps each
      are hidden: as many bits in all, a P-th of them at once

    Args: `across` links sites, `within` the nodes of one; `local_steps` is H, `fragments` P.
    Raises: ConfigError for a number out of bounds or one that the method has no use for.
    Source: arXiv 2503.09799, appendices A and B; bits per parameter are implicit there, 16 is our choice.
    Differs: each fragment pays the latency, which the paper's total of a round counts once.
    """
    if method not in ("data_parallel", "diloco", "streaming"):
        raise ConfigError(choose("method", str(method), ("data_parallel", "diloco", "streaming")))
    floats = {"parameters": parameters, "tokens": tokens, "batch_tokens": batch_tokens, "flops": flops}
    for name, value in (floats | {"bits_per_parameter": bits_per_parameter}).items():
        _positive(name, value)
    counts = {"nodes": nodes, "replicas": replicas, "local_steps": local_steps, "fragments": fragments}
    for name, value in counts.items():
        _count(name, value)
    _within(
        "replicas", replicas, nodes % replicas == 0, f"a divisor of the {nodes} nodes, so that all replicas are equal"
    )
    if method == "data_parallel":
        for name, value in (("replicas", replicas), ("local_steps", local_steps)):
            _within(f"{name} of data_parallel", value, value == 1, "1, as it reduces each step over all nodes")
    streams = method == "streaming"
    _within(
        f"fragments of {method}", fragments, streams or fragments == 1, "1; only streaming sends the model in parts"
    )
    longest = local_steps // fragments if streams else 0
    _within(
        f"overlap_steps of {method}",
        overlap_steps,
        _is_number(overlap_steps) and 0 <= overlap_steps <= longest,
        f"from 0 to {longest}; only streaming hides transfers, each until the next one begins at most",
    )

    bits, steps = bits_per_parameter * parameters, tokens / batch_tokens
    compute_s = step_seconds(parameters, tokens, nodes * flops)
    inner_s = steps * all_reduce_s(bits, nodes // replicas, across if replicas == 1 else within)
    if method == "data_parallel":
        return WallClock(compute_s, inner_s, 0.0)
    hidden_s = overlap_steps * (compute_s + inner_s) / steps
    exposed_s = max(0.0, all_reduce_s(bits / fragments, nodes, across) - hidden_s)
    return WallClock(compute_s, inner_s, steps / local_steps * fragments * exposed_s)


def balanced_local_steps(
    *, parameters: float, nodes: int, replicas: int, across: Link, within: Link = LINKS["high"],
    bits_per_parameter: float = 16.0,
) -> int:  # fmt: skip
    """The fewest local steps with which DiLoCo's reductions across sites take at most half of its communication.

    `H = ⌈all_reduce(N, R, across) / all_reduce(N, R/M, within)⌉`, which comes to `⌈W0/W1⌉` for many nodes in each
    replica and bandwidths that outweigh latencies.

    Raises: ConfigError for a number out of bounds, or nodes of one replica that reduce for nothing.
    Source: arXiv 2503.09799, appendix A, where H ≥ W0/W1 is the rule.

    >>> balanced_local_steps(parameters=1e9, nodes=1024, replicas=2, across=LINKS["medium"]), 400e9 / 100e9
    (5, 4.0)
    """
    for name, value in (("nodes", nodes), ("replicas", replicas)):
        _count(name, value)
    _within("replicas", replicas, nodes % replicas == 0, f"a divisor of the {nodes} nodes")
    bits = bits_per_parameter * parameters
    inner_s = all_reduce_s(bits, nodes // replicas, within)
    _within("seconds of a reduction within a replica", inner_s, inner_s > 0, "above 0; give the link a latency")
    return max(1, math.ceil(all_reduce_s(bits, nodes, across) / inner_s * (1 - 1e-12)))


def loss_fit(parameters: float, replicas: int = 1) -> float:
    """The loss that DiLoCo reaches on C4 with 20 tokens a parameter and H = 30: `19.226 · N^-0.0985 · M^0.0116` nats a token.

    Source: arXiv 2503.09799, fitted from 35M to 2.4B parameters and 1 to 8 replicas.
    Fails when: there are more; of 10B it promises a loss that is 4 % too low.

    >>> round(loss_fit(1.3e9, replicas=2), 2), round(loss_fit(1.3e9, replicas=8), 2)  # measured there: 2.46, 2.49
    (2.45, 2.49)
    """
    _positive("parameters", parameters)
    _count("replicas", replicas)
    return 19.226 * parameters**-0.0985 * replicas**0.0116


def inner_lr_fit(parameters: float, replicas: int = 1) -> float:
    """The best learning rate of DiLoCo's AdamW: `22256 · N^-0.8827 · M^0.2929`. Source: as `loss_fit`.

    >>> f"{inner_lr_fit(1e9, replicas=2):.1e}"
    '3.1e-04'
    """
    _positive("parameters", parameters)
    _count("replicas", replicas)
    return 22256 * parameters**-0.8827 * replicas**0.2929


def batch_tokens_fit(parameters: float, replicas: int = 1) -> float:
    """The best batch of DiLoCo, of all replicas together: `2048 · 0.00709 · N^0.4695 · M^0.3399` tokens.

    Source: as `loss_fit`. Differs: sequences of 2048 tokens are our reading of its unit; only with them it meets the fit
    for two replicas alone, `15.75 · N^0.479` tokens.

    >>> f"{batch_tokens_fit(1e9, replicas=2):.2g}", f"{15.75 * 1e9**0.479:.2g}"
    ('3.1e+05', '3.2e+05')
    """
    _positive("parameters", parameters)
    _count("replicas", replicas)
    return 2048 * 0.00709 * parameters**0.4695 * replicas**0.3399


class Hours(NamedTuple):
    """A row of `wall_clock_table`."""

    method: str
    clock: WallClock
    at_once_bits: float
    """What a reduction across sites moves at a time."""


class WallClockTable(NamedTuple):
    """Where the seconds of a run go, method by method."""

    rows: tuple[Hours, ...]
    assumptions: tuple[str, ...]
    """What was assumed, a sentence each, to be printed beside the numbers."""


def wall_clock_table(
    parameters: float = 1e9,
    *,
    replicas: int = 4,
    local_steps: int = 30,
    network: str = "low",
    tokens: float | None = None,
    batch_tokens: float | None = None,
    nodes: int | None = None,
    node_tokens: float = 2.0**14,
    fragments: int = 3,
    overlap_steps: int = 1,
    bits_per_parameter: float = 16.0,
    flops: float = SUSTAINED_FLOPS,
) -> WallClockTable:
    """`wall_clock` of each method on one of `LINKS` between the sites.

    Args: 20 tokens a parameter, the batch of `batch_tokens_fit` and as many nodes as let each have about `node_tokens` of it,
        in equal replicas, unless given; `fragments` and `overlap_steps` are those of streaming.
    Raises: ConfigError for an unknown network or a number out of bounds.
    """
    if network not in LINKS:
        raise ConfigError(choose("network", network, LINKS))
    for name, value in (("parameters", parameters), ("node_tokens", node_tokens)):
        _positive(name, value)
    _count("replicas", replicas)
    _count("fragments", fragments)
    batch_tokens = batch_tokens_fit(parameters, replicas) if batch_tokens is None else batch_tokens
    tokens = 20 * parameters if tokens is None else tokens
    _positive("batch_tokens", batch_tokens)
    nodes = max(1, round(batch_tokens / node_tokens / replicas)) * replicas if nodes is None else nodes
    across, within, bits = LINKS[network], LINKS["high"], bits_per_parameter * parameters
    run: dict[str, Any] = {
        "parameters": parameters,
        "tokens": tokens,
        "batch_tokens": batch_tokens,
        "nodes": nodes,
        "across": across,
        "bits_per_parameter": bits_per_parameter,
        "flops": flops,
    }
    split: dict[str, Any] = run | {"replicas": replicas, "local_steps": local_steps}
    streams: dict[str, Any] = split | {"fragments": fragments}
    overlapped = wall_clock("streaming", **streams, overlap_steps=overlap_steps)
    rows = (
        Hours("data parallelism", wall_clock("data_parallel", **run), bits),
        Hours("DiLoCo, M = 1", wall_clock("diloco", **run, local_steps=local_steps), bits),
        Hours(f"DiLoCo, M = {replicas}", wall_clock("diloco", **split), bits),
        Hours("streaming", wall_clock("streaming", **streams), bits / fragments),
        Hours(f"streaming, τ = {overlap_steps}", overlapped, bits / fragments),
    )
    half = balanced_local_steps(
        parameters=parameters, nodes=nodes, replicas=replicas, across=across, bits_per_parameter=bits_per_parameter
    )
    assumptions = (
        f"{parameters:.3g} parameters of {bits_per_parameter:g} bits, {tokens:.3g} tokens, batches of {batch_tokens:.3g}",
        f"{nodes} nodes in {replicas} replicas, {flops:.3g} FLOP/s each; H = {local_steps}, {fragments} fragments in streaming",
        f"{across.bandwidth_bps / 1e9:g} Gbit/s and {across.latency_s:g} s across sites, {within.bandwidth_bps / 1e9:g} Gbit/s "
        f"and {within.latency_s:g} s within one; data parallelism and M = 1 reduce over all sites in each step",
        f"H = {half} and more leave the sites at most half of the communication of DiLoCo, M = {replicas}",
        "nothing overlaps within a step",
    )
    return WallClockTable(rows, assumptions)


# --- one straggler ----------------------------------------------------------------------------------------------------


def matched_local_steps(full_steps: int, bandwidth_share: float, exchange_steps: float) -> int:
    """Local steps with which a worker on a slow link is ready in time: `clamp(⌊H - (1/share - 1)·c⌋, 1, H)`.

    Others compute H steps and exchange for c; the straggler's exchange lasts c/share, so it computes that much less.

    Args: `bandwidth_share` is its bandwidth over that of the others, in (0, 1]; `exchange_steps` is c, the exchange at
    full bandwidth in units of one step.
    Raises: ConfigError for a number out of bounds.
    Source: inferred from arXiv 2606.11081, figures 2 and 3: c = 5/3 for one peer and 10/3 for two give their 15 and 1.

    >>> matched_local_steps(30, 0.1, 5 / 3), matched_local_steps(30, 0.1, 10 / 3)
    (15, 1)
    """
    _count("full_steps", full_steps)
    _check_share(bandwidth_share)
    _within("exchange_steps", exchange_steps, 0 <= exchange_steps < math.inf, "a number of steps, 0 or more")
    longest = full_steps - (1 / bandwidth_share - 1) * exchange_steps
    # 30 - (1/0.6 - 1)·21 is 15.999999999999998 in floats: what is whole but for rounding counts as whole.
    return int(min(max(math.floor(longest + 1e-9 * full_steps), 1), full_steps))


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
    """Of every worker but the straggler."""
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
    """What was assumed, a sentence each, to be printed beside the numbers."""


def straggler_utilisation(
    method: str,
    bandwidth_bps: float,
    *,
    bandwidth_share: float = 0.2,
    workers: int = 8,
    local_steps: int = 30,
    model: Model = MODELS["70b"],
    bits_per_parameter: float = 16.0,
) -> StragglerUtilisation:
    """Utilisation when one of n workers has a share of the bandwidth W that the others have.

    With P the bits of a model and t the seconds of a step:

    * all-reduce: all wait for the slowest link, a cycle is `H·t + 2·(n-1)/n · P/(share·W)`; data parallelism is H = 1
    * gossip with k peers: an exchange takes `C = k·P/W`, that of the straggler `C/share` after the `H_i` steps of
      `matched_local_steps`, and a cycle is `max(H·t + C, H_i·t + C/share)`

    and utilisation is the worker's own steps times t over the cycle. The second term of the maximum only counts once
    the straggler is down to one step and still late; its peers then wait, theirs in the next round, and soon everyone.

    Raises: ConfigError for an unknown method or a number out of bounds.
    Source: arXiv 2606.11081, figure 9, by its caption; the formulas are ours.

    >>> straggler_utilisation("gasloc_1_peer", 10e9).straggler_local_steps
    4
    """
    if method not in STRAGGLER_METHODS:
        raise ConfigError(choose("method", method, STRAGGLER_METHODS))
    for name, value in (
        ("step_s", model.step_s),
        ("parameters", model.parameters),
        ("bits_per_parameter", bits_per_parameter),
    ):
        _positive(name, value)
    _within("bandwidth_bps", bandwidth_bps, bandwidth_bps > 0, "above 0, in bits per second")
    _count("local_steps", local_steps)
    _check_share(bandwidth_share)
    peers = STRAGGLER_METHODS[method]
    fewest = 1 + (peers or 1)
    _within(f"workers of {method}", workers, _is_whole(workers) and workers >= fewest, f"a whole number from {fewest}")

    bits, step_s = model.parameters * bits_per_parameter, model.step_s
    steps = straggler_steps = 1 if method == "data_parallel" else local_steps
    if peers is None:
        cycle_s = steps * step_s + all_reduce_s(bits, workers, Link(bandwidth_bps * bandwidth_share, 0.0))
        exchange = "a ring all-reduce moves 2(n-1)/n copies of the model at the pace of the slowest link"
    else:
        exchange_s = peers * bits / bandwidth_bps
        straggler_steps = matched_local_steps(steps, bandwidth_share, exchange_s / step_s)
        cycle_s = max(steps * step_s + exchange_s, straggler_steps * step_s + exchange_s / bandwidth_share)
        exchange = (
            f"each worker sends its model to {peers} peer(s) while it receives; the straggler takes fewer local steps "
            "to be ready in time, and where one step is still too many everyone waits for it"
        )
    healthy, straggler = steps * step_s / cycle_s, straggler_steps * step_s / cycle_s
    return StragglerUtilisation(
        method=method,
        bandwidth_bps=float(bandwidth_bps),
        cycle_s=cycle_s,
        local_steps=steps,
        straggler_local_steps=straggler_steps,
        healthy=healthy,
        straggler=straggler,
        mean=healthy - (healthy - straggler) / workers,
        assumptions=(
            f"{workers} workers, steps of {step_s:.3g} s",
            f"{model.parameters:.3g} parameters of {bits_per_parameter:g} bits",
            f"one worker's uplink has {bandwidth_share:.0%} of the bandwidth; its downlink is as fast as the others'",
            "no latency, and no transfer is hidden behind compute",
            exchange,
        ),
    )


def straggler_table(
    methods: Iterable[str] = tuple(STRAGGLER_METHODS), bandwidths_bps: ArrayLike = BANDWIDTHS_BPS, **options: Any
) -> list[StragglerUtilisation]:
    """`straggler_utilisation` of each method at each bandwidth, method by method; options are passed on.

    Raises: ConfigError for an unknown method or a number out of bounds.
    """
    bandwidths = [float(bandwidth) for bandwidth in np.asarray(bandwidths_bps, float).ravel()]
    return [straggler_utilisation(method, bandwidth, **options) for method in methods for bandwidth in bandwidths]


# --- a picture --------------------------------------------------------------------------------------------------------


def plot_curves(curves: Mapping[str, Sequence[tuple[float, float]]], file: Path) -> None:
    """Draws points (bandwidth in bits per second, utilisation) of each curve into a file, PNG or SVG by its name.

    An SVG says nothing of when it was made, so that equal curves are equal files.
    Raises: ConfigError for another kind of file or one that cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if file.suffix not in (".png", ".svg"):
        raise ConfigError(f"the plot '{file}' ends in '{file.suffix}' but must end in .png or .svg; rename it")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for label, points in curves.items():
        axes.plot([bandwidth / 1e9 for bandwidth, _ in points], [share for _, share in points], label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel("bandwidth (Gbit/s)")
    axes.set_ylabel("share of the time spent computing")
    axes.grid(which="both", linewidth=0.4)
    axes.legend()
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gossamer"}):
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(
            f"the plot '{file}' cannot be written ({error}); name a file in a folder that exists"
        ) from None
