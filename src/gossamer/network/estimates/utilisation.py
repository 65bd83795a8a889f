"""Compute utilisation of data parallelism, DiLoCo and Streaming DiLoCo between sites, layer by layer.

Three models estimate the share of a training run spent computing rather than waiting for the network, without training:

* `utilisation`, here, follows every layer through the link between sites that compute at the same speed, overlapped or
  not (Streaming DiLoCo, arXiv 2501.18512, section 3.1).
* `gossamer.network.estimates.wall_clock` gives total hours of data parallelism and DiLoCo in closed form, on links with a latency
  (scaling laws, arXiv 2503.09799, appendices A and B).
* `gossamer.network.estimates.straggler` compares all-reduce with gossip when one worker has a slow uplink (GASLoC, arXiv
  2606.11081, figure 9).

Utilisation is always compute time over total time. Bandwidths are in bits per second, models in parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from gossamer.errors import ConfigError, choose, require
from gossamer.network.estimates.goodput import build_settings, ensure
from gossamer.network.links import Floats
from gossamer.settings.options import Count, Number, Portion, Positive, Share, check_values
from gossamer.settings.schema import settings

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The usual target utilisations."""

BANDWIDTHS_BPS: Floats = np.logspace(-1, 3, 50) * 1e9
"""The published grid, 0.1 Gbit/s to 1 Tbit/s in steps of 21 %; every bandwidth of the published table lies on it."""
BANDWIDTHS_BPS.flags.writeable = False


def step_seconds(parameters: float, tokens: float, peak_flops: float, mfu: float = 1.0) -> float:
    """Seconds of one training step by its FLOPs: `6·N·tokens / (peak·MFU)`.

    Args: `tokens` of the batch; `peak_flops`, FLOP/s of the hardware that computes it; `mfu`, the share of it in use, in (0, 1].
    Raises: ConfigError for a number out of bounds.

    >>> step_seconds(1e9, tokens=1e6, peak_flops=1e15, mfu=0.4)
    15.0
    """
    check_values(Positive, parameters=parameters, tokens=tokens, peak_flops=peak_flops)
    check_values(Share, mfu=mfu)
    return 6 * parameters * tokens / (peak_flops * mfu)


class Model(NamedTuple):
    """The properties of a trained model on which utilisation depends."""

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

PUBLISHED_METHODS: dict[str, dict[str, Any]] = {
    "data_parallel": {"local_steps": 1, "fragment_layers": None},
    "diloco": {"fragment_layers": None},
    "streaming": {"fragment_layers": 3},
    "streaming_overlap": {"fragment_layers": 3, "overlap_steps": 1},
    "streaming_overlap_fp4": {"fragment_layers": 3, "overlap_steps": 1, "bits_per_parameter": 16 * 0.26},
}
"""The `Setting` options of each column of the published table. FP4 is priced at 4.16 bits: the extra 4 %, room for scales,
fit the published numbers best (without them 67 of the 75 are met exactly, with them 69)."""


@settings("")
class Setting:
    """One model and one method. Data parallelism takes one local step, DiLoCo has one fragment with all layers.

    Raises: ConfigError for an option out of bounds.

    >>> Setting(layers=7, step_s=1, parameters=1e9, fragment_layers=3).fragments
    ((0, 3, 6), (1, 4), (2, 5))
    """

    layers: Count
    step_s: Positive
    """Seconds of one inner step without any waiting."""
    parameters: Positive
    """Parameters of the model, assumed to be spread evenly over the layers."""
    local_steps: Count = 100
    """Inner steps between two reductions of the same layer (H)."""
    fragment_layers: Count | None = 3
    """Most layers of a fragment; None reduces the whole model at once."""
    assignment: Literal["strided", "sequential"] = "strided"
    """Whether a fragment takes every k-th layer or neighbouring ones."""
    overlap_steps: Number = 0
    """Inner steps taken between the step that sends a layer and the step that waits for it (tau)."""
    bits_per_parameter: Positive = 16.0
    payload_factor: Positive = 0.84
    """Bits on the link per bit of the model. An all-reduce between two sites needs 2·(1 - 1/2) = 1; we use 0.84, which fits
    the published table best. The paper gives no reason for it."""
    forward_share: Portion = 1 / 3
    """The forward pass's share of a step."""

    def __post_init__(self) -> None:
        last = self.local_steps - 1
        ensure(
            "overlap_steps",
            self.overlap_steps,
            self.overlap_steps <= last,
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


def setting_of(model: str, method: str, /, **options: Any) -> Setting:
    """The setting of a known model under a known method; any option of `Setting` may be given on top.

    Raises: ConfigError for an unknown name, an option out of bounds or one that would turn the method into another.

    >>> setting_of("1b", "streaming_overlap", local_steps=30).overlap_steps
    1
    """
    for noun, name, table in (("model", model, MODELS), ("method", method, PUBLISHED_METHODS)):
        if name not in table:
            raise ConfigError(choose(noun, name, table))
    defaults = PUBLISHED_METHODS[method]
    if defaults.get("local_steps") == 1 and options.get("local_steps", 1) != 1:
        raise ConfigError(
            f"{method} reduces in each step but local_steps is {options['local_steps']}; only 1 is allowed, "
            "use the method diloco for more"
        )
    if defaults["fragment_layers"] is None and options.get("fragment_layers") is not None:
        raise ConfigError(
            f"{method} reduces the whole model at once but fragment_layers is {options['fragment_layers']}; "
            "remove fragment_layers, or use the method streaming"
        )
    return build_settings(Setting, MODELS[model]._asdict() | defaults | options)


def utilisation(setting: Setting, bandwidth_bps: ArrayLike) -> Floats:
    """Share of the time spent computing in the steady state, one value for each bandwidth, in its shape.

    The reduction of a layer starts when its backward pass has ended and the link is free, first come first served. It takes
    `payload_factor · bits · N / (layers · bandwidth)`. The forward pass of that layer `overlap_steps + 1` steps later
    waits for it. Fragment p of k leaves in step `⌊p·H/k⌋` of each H. The link has no latency.

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

    # Times are in steps, not seconds: whole steps are exact floats, so an infinite bandwidth gives exactly 1.
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
    # From the second period on only one thing can change: the link falls behind its bytes while the overlap still hides it.
    # In the long run its load sets the speed, so we use that at once.
    return period / np.maximum(clock - begin, s.layers * takes)


def _sends(setting: Setting) -> dict[int, list[int]]:
    """The layers that leave in each step of a period, in the order in which the backward pass meets them."""
    sends: dict[int, list[int]] = {}
    count = len(setting.fragments)
    for p, layers in enumerate(setting.fragments):
        sends.setdefault(p * setting.local_steps // count, []).extend(layers)
    return {step: sorted(layers, reverse=True) for step, layers in sends.items()}


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

    >>> [f"{row.bandwidth_bps / 1e9:.1f} Gbit/s" for row in bandwidth_table(setting_of("1b", "diloco"), [0.95])]
    ['23.3 Gbit/s']
    """
    targets = tuple(targets)
    for target in targets:
        check_values(Share, **{"the target utilisation": target})
    bandwidths = np.sort(np.asarray(bandwidths_bps, float), axis=None)
    reached = utilisation(setting, bandwidths)
    return [BandwidthNeeded(t, next((float(b) for b in bandwidths[reached >= t]), None)) for t in targets]


class UtilisationAt(NamedTuple):
    """A point of `utilisation_curve`."""

    bandwidth_bps: float
    utilisation: float


def utilisation_curve(setting: Setting, bandwidths_bps: ArrayLike = BANDWIDTHS_BPS) -> list[UtilisationAt]:
    """Utilisation at each bandwidth, as points to print or draw. Raises ConfigError for one below 1."""
    bandwidths = np.asarray(bandwidths_bps, float).ravel()
    pairs = zip(bandwidths, utilisation(setting, bandwidths), strict=True)
    return [UtilisationAt(float(b), float(u)) for b, u in pairs]


def assumed(model: str, method: str, setting: Setting) -> str:
    """The assumptions of a table of bandwidths, in one line."""
    fragments, overlap = len(setting.fragments), setting.overlap_steps
    return (
        f"{model} ({setting.parameters / 1e9:g}e9 parameters in {setting.layers} layers), {method}: {setting.step_s:g} s a step, "
        f"{setting.local_steps} local step{'s' * (setting.local_steps != 1)}, {fragments} fragment{'s' * (fragments != 1)}, "
        f"{overlap} step{'s' * (overlap != 1)} of overlap, {setting.bits_per_parameter:g} bits a parameter, of "
        f"which a share of {setting.payload_factor:g} is sent, no latency"
    )


_DASHES = ("solid", "dashed", "dotted", "dashdot")


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    file: Path,
    *,
    x_label: str = "bandwidth (Gbit/s)",
    y_label: str = "share of the time spent computing",
    unit: float = 1e9,
    marks: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Draws points (bandwidth in bits per second, utilisation) of each curve into a file, PNG or SVG by its name.

    An SVG carries no date, so equal curves give equal files.

    Args:
        unit: the divisor of bandwidths.
        marks: further points of some of the curves, drawn as dots in their colours.
    Raises: ConfigError for another kind of file, or one that cannot be written; MissingPackageError without matplotlib.
    """
    require("matplotlib.figure", "plots", f"the plot '{file}'", "remove --plot")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if file.suffix not in (".png", ".svg"):
        raise ConfigError(f"the plot '{file}' ends in '{file.suffix}' but must end in .png or .svg; rename it")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for place, (label, points) in enumerate(curves.items()):
        (line,) = axes.plot(
            [x / unit for x, _ in points],
            [share for _, share in points],
            linestyle=_DASHES[place % len(_DASHES)],
            label=label,
        )
        if marks is not None and label in marks:
            dots = marks[label]
            axes.plot([x / unit for x, _ in dots], [share for _, share in dots], "o", color=line.get_color())
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(which="both", linewidth=0.4)
    axes.legend()
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gossamer"}):
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(
            f"the plot '{file}' cannot be written ({error}); name a file in a folder that exists"
        ) from None
