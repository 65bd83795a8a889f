"""The result of an experiment as one table and one figure, from the summaries of its runs (`gossamer.report.table`).

A sweep over one key gives final loss against it, a sweep over two a heat map. An experiment with a target method compares the
wall-clock at which each method first reaches the target's last loss, or the losses at equal bytes and equal time.
"""

import contextlib
import io
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field

from gossamer.errors import ConfigError, choose, require
from gossamer.report.colours import COLOURS, places_of
from gossamer.report.paired import Side, Slope, effect, effect_cells, effect_heads, p_value_text, trend
from gossamer.report.reach import ROUNDS, SENT, curves_of, ends, has_only_final_losses, paired_table, reach
from gossamer.report.results import PointResult
from gossamer.report.table import DASH, markdown_numbers
from gossamer.settings.schema import settings

INK, FAINT = "#2b2b2b", "#d9d9d9"
_DASHES = ((), (5, 2), (1, 1.5), (5, 1.5, 1, 1.5))


@contextlib.contextmanager
def chart_style() -> Iterator[None]:
    """Matplotlib settings for making and writing figures; with a fixed salt, equal figures give equal bytes."""
    import matplotlib

    with matplotlib.rc_context(
        {"svg.hashsalt": "gossamer", "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}
    ):
        yield


def plain_axes(axes: Any, x_label: str, *, grid: bool = True) -> None:
    """Removes everything from the axes that nobody reads."""
    axes.set_xlabel(x_label, color=INK)
    if grid:
        axes.grid(which="both", color=FAINT, linewidth=0.6)
    axes.tick_params(which="both", colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def svg(figure: Any) -> bytes:
    """A matplotlib figure as SVG, without a date."""
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


_DARK = {
    **dict.fromkeys(("fill: #2b2b2b", "fill: #000000", "fill: #4a4a4a"), "fill: #e6e8ea"),
    **dict.fromkeys(("stroke: #2b2b2b", "stroke: #000000", "stroke: #4a4a4a"), "stroke: #e6e8ea"),
    **dict.fromkeys(("stroke: #d9d9d9", "stroke: #b0b0b0", "stroke: #cccccc"), "stroke: #4a4f54"),
}
"""What the ink and the grid of a figure become on a dark page."""


def on_any_ground(image: bytes) -> bytes:
    """An SVG of matplotlib without a ground, whose ink and grid are light where the page is dark.

    >>> b"prefers-color-scheme: dark" in on_any_ground(b'<svg><defs></defs><path style="fill: #ffffff"/></svg>')
    True
    """
    rules = " ".join(f'[style*="{light}"] {{ {dark} !important }}' for light, dark in _DARK.items())
    style = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ fill: #e6e8ea }} {rules} }}</style>\n <defs>"
    return image.replace(b'style="fill: #ffffff', b'style="fill: none').replace(b"<defs>", style.encode(), 1)


def dashed_styles(methods: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """Colour and line style of each of few methods, of which each has other dashes than its neighbours."""
    every = [(0, dashes) if dashes else "-" for dashes in _DASHES]
    return {
        method: (COLOURS[place % len(COLOURS)], every[at % len(every)])
        for at, (method, place) in enumerate(places_of([*methods]).items())
    }


def line_style(place: int) -> tuple[str, Any]:
    """Colour and line style of the run at this place: all colours solid first, then dashed."""
    dashes = _DASHES[place // len(COLOURS) % len(_DASHES)]
    return COLOURS[place % len(COLOURS)], (0, dashes) if dashes else "-"


def line_styles(methods: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """Colour and line style of each method."""
    return {method: line_style(place) for method, place in places_of([*methods]).items()}


@settings("figure")
class Figure:
    """What the `[figure]` table of an experiment file asks for."""

    x: str | tuple[str, ...] = ()
    """The swept key along the axis; of several, the one that a variant sweeps."""
    y: str = ""
    """A second swept key: a heat map for each variant in place of curves."""
    log_x: bool = False
    target: str = ""
    """In place of x, a variant: when each variant first reaches the last loss of this one, on every network."""
    paired: bool = False
    """With a target: how far each variant's loss is from the target's last, seed by seed, when it has sent the target's bytes,
    after the target's rounds, and in the target's time on every network. Runs that are validated only once are compared at their
    ends, and the figure has these differences in place of curves."""
    against: str = ""
    """With x, a variant: the difference of every other variant's last loss from its, seed by seed at each x."""
    margin: Annotated[float | None, Field(gt=0)] = None
    """With paired or against: differences within ± this many nats count as none, and a p-value says how surely they are (two
    one-sided tests). State it before the runs."""
    side: Side | None = None
    """With paired or against: whether the other variants' losses were expected "below" or "above". A p-value says how surely they
    are, adjusted for the number of variants (Holm)."""
    trend: Slope | None = None
    """With x: whether the losses, or with against the differences, were expected "rising" or "falling" along it (Page's test)."""

    def __post_init__(self) -> Iterator[str]:
        if bool(self.x) == bool(self.target):
            yield (
                f"figure has x = {self.x!r} and target = {self.target!r} but needs one of the two: "
                "a swept key for x, or a variant's label for target"
            )
        if self.paired and not self.target:
            yield (
                f"figure.paired is true and figure.target is {self.target!r}; name the variant to compare with as target"
            )
        if (self.against or self.trend) and (not self.x or self.y):
            yield (
                f"figure has against = {self.against!r} and trend = {self.trend!r} but needs one swept key for them; set x, and "
                "no y"
            )
        if (self.margin or self.side) and not (self.paired or self.against):
            yield (
                f"figure has margin = {self.margin} and side = {self.side!r} but no pairs to test; set paired with a target, or "
                "against"
            )
        if self.y and not self.x:
            yield (f"figure.y is '{self.y}' without an x; name the other swept key as x")

    @property
    def keys(self) -> tuple[str, ...]:
        """`x` as a tuple."""
        return (self.x,) if isinstance(self.x, str) else self.x


def figure_table(results: Sequence[PointResult], figure: Figure) -> str:
    """The figure's numbers as Markdown: mean ± sample standard deviation over the seeds.

    >>> runs = [PointResult("a", {"h": h}, seed, {"loss": h + 0.25 * seed}) for h in (1, 2) for seed in (0, 2)]
    >>> print(figure_table(runs, Figure(x="h")))
    | h | 1 | 2 |
    | --- | ---: | ---: |
    | a | 1.2500 ± 0.3536 | 2.2500 ± 0.3536 |
    <BLANKLINE>
    """
    check_figure(results, figure)
    if figure.paired:
        once = has_only_final_losses(results)
        reaches = ends(results, figure.target) if once else reach(results, figure.target, paired=True)
        if not reaches:
            return _nothing_to_reach(figure.target)
        return paired_table(reaches, figure.target, margin=figure.margin, side=figure.side)
    if figure.target:
        return _reach_table(results, figure.target)
    losses = _losses(results, figure)
    if not figure.y:
        x_values = list(dict.fromkeys(x for _, x, _ in losses))
        names = list(dict.fromkeys(method for method, _, _ in losses))
        rows = [[name, *(_over_known(losses.get((name, x, None), [])) for x in x_values)] for name in names]
        parts = [markdown_numbers([_axis(figure.keys[0]), *map(str, x_values)], rows)]
        by_seed = _by_seed(results, figure)
        parts += _against_tables(by_seed, figure) if figure.against else ()
        parts += [] if figure.trend is None else [_trend_table(by_seed, figure, figure.trend)]
        return "\n".join(parts)
    parts = []
    for name in dict.fromkeys(method for method, _, _ in losses):
        x_values, y_values = _axes_of(losses, name)
        rows = [[str(y), *(_over_known(losses.get((name, x, y), [])) for x in x_values)] for y in y_values]
        parts.append(
            f"{name}\n\n"
            + markdown_numbers([f"{_axis(figure.y)} \\ {_axis(figure.keys[0])}", *map(str, x_values)], rows)
        )
    return "\n".join(parts)


def draw_figure(results: Sequence[PointResult], figure: Figure) -> bytes:
    """The figure as SVG; equal results give equal bytes. Raises MissingPackageError without matplotlib."""
    check_figure(results, figure)
    require("matplotlib.figure", "plots", "the figure of an experiment")
    if figure.target:
        paint = _draw_ends if figure.paired and has_only_final_losses(results) else _draw_reach
    else:
        paint = _draw_maps if figure.y else _draw_curves
    with chart_style():
        return svg(paint(results, figure))


class _Placed(Protocol):
    """A run of an experiment, before it has ended or after."""

    @property
    def method(self) -> str: ...
    @property
    def at(self) -> Mapping[str, Any]: ...
    @property
    def seed(self) -> int: ...


def check_figure(runs: Sequence[_Placed], figure: Figure) -> None:
    """Raises ConfigError for a variant or key that no run has, and if runs that differ in another key would count as seeds."""
    methods = dict.fromkeys(run.method for run in runs)
    for name, label in (("target", figure.target), ("against", figure.against)):
        if label and label not in methods:
            raise ConfigError(choose(f"figure.{name}", label, methods) + "; correct it")
    first: dict[tuple[Any, ...], _Placed] = {}
    for run in runs:
        other = first.setdefault((run.method, *((None, None) if figure.target else _cell(run, figure)), run.seed), run)
        if key := next((key for key in {**other.at, **run.at} if run.at.get(key) != other.at.get(key)), ""):
            asked = f"figure.target is '{figure.target}'" if figure.target else f"figure.x is {figure.x!r}"
            raise ConfigError(
                f"{asked}, but '{run.method}' sweeps {key} too, and its runs at {swept(other.at.get(key))} and "
                f"{swept(run.at.get(key))} would count as seeds; "
                + ("leave [figure] out" if figure.target or figure.y else "name it as figure.y, or leave [figure] out")
            )


def _cell(run: _Placed, figure: Figure) -> tuple[Any, Any]:
    """Where a run stands in the figure: its x and y."""
    if figure.y and figure.y not in run.at:
        raise ConfigError(choose("figure.y", figure.y, run.at) + "; name a key that every variant sweeps")
    key = next((key for key in figure.keys if key in run.at), None)
    if key is None:
        raise ConfigError(
            f"figure.x is {figure.x!r}, but '{run.method}' sweeps {', '.join(run.at) or 'nothing'}; name that key too"
        )
    return swept(run.at[key]), swept(run.at[figure.y]) if figure.y else None


_BySeed = dict[tuple[str, Any], dict[int, float]]


def _by_seed(results: Sequence[PointResult], figure: Figure) -> _BySeed:
    """Final losses by method, x and seed; only finite ones."""
    by_point: _BySeed = {}
    for run in results:
        for (method, x, _), (loss,) in _losses([run], figure).items():
            here = by_point.setdefault((method, x), {})
            if math.isfinite(loss):
                here[run.seed] = loss
    return by_point


def _differences(losses: _BySeed, against: str) -> _BySeed:
    """The losses of the other variants above those of one, of the seeds that both have."""
    return {
        (method, x): {seed: loss - reference[seed] for seed, loss in here.items() if seed in reference}
        for (method, x), here in losses.items()
        if method != against and (reference := losses.get((against, x))) is not None
    }


def _against_tables(losses: _BySeed, figure: Figure) -> Iterable[str]:
    """A table for each x: the differences from one variant, seed by seed."""
    differences = _differences(losses, figure.against)
    for x in dict.fromkeys(x for _, x in differences):
        base, methods = losses[figure.against, x], [method for method, at in differences if at == x]
        arms = [
            [(here[seed], base[seed]) if seed in here else None for seed in base]
            for here in (differences[method, x] for method in methods)
        ]
        cells = effect_cells(arms, figure.margin, figure.side)
        heads = effect_heads(figure.margin, figure.side)
        first = f"loss above {figure.against}'s, {_axis(figure.keys[0])} {x}"
        yield markdown_numbers([first, *heads], [[method, *line] for method, line in zip(methods, cells, strict=True)])


def _trend_table(losses: _BySeed, figure: Figure, slope: Slope) -> str:
    """A table with the p-value of the expected trend of each variant, over the seeds that have every point."""
    values, rows = _differences(losses, figure.against) if figure.against else losses, []
    for method in dict.fromkeys(method for method, _ in values):
        points = [here for (name, _), here in values.items() if name == method]
        whole = sorted(set.intersection(*map(set, points)))
        rows.append([method, p_value_text(trend([[here[seed] for here in points] for seed in whole], slope))])
    what = f"differences from {figure.against}" if figure.against else "losses"
    return markdown_numbers([f"{what} {slope} along {_axis(figure.keys[0])}", "p (Page)"], rows)


_Losses = dict[tuple[str, Any, Any], list[float]]


def _losses(results: Sequence[PointResult], figure: Figure) -> _Losses:
    """Final losses of all seeds by method, x and y; NaN of a run that ended without a finite one."""
    losses: _Losses = {}
    for run in results:
        x, y = _cell(run, figure)
        loss = run.row["loss"]
        losses.setdefault((run.method, x, y), []).append(loss if loss is not None and math.isfinite(loss) else math.nan)
    return losses


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _over_known(of_seeds: Sequence[float | None], form: str = ".4f") -> str:
    """Mean and sample standard deviation over the seeds that have a finite number, with their count where others have none."""
    known = _finite([value for value in of_seeds if value is not None])
    few = f" ({len(known)} of {len(of_seeds)} seeds)" if 0 < len(known) < len(of_seeds) else ""
    return mean_and_deviation(known, form) + few


def swept(value: Any) -> Any:
    """A swept value as it stands in labels and along axes: of a table its name, or its settings.

    >>> swept(3), swept({"name": "ring"}), swept({"lr": 0.7, "momentum": 0.5})
    (3, 'ring', 'lr=0.7,momentum=0.5')
    """
    if not isinstance(value, Mapping):
        return value
    return str(value["name"]) if "name" in value else ",".join(f"{key}={option}" for key, option in value.items())


def _axes_of(losses: _Losses, method: str) -> tuple[list[Any], list[Any]]:
    points = [(x, y) for name, x, y in losses if name == method]
    return list(dict.fromkeys(x for x, _ in points)), list(dict.fromkeys(y for _, y in points))


def _axis(key: str) -> str:
    """A key as an axis title: "run.local_steps" is "local steps"."""
    section, _, last = key.rpartition(".")
    return section if last == "name" else last.replace("_", " ")


def mean_and_deviation(values: Sequence[float | None], form: str = ".4f") -> str:
    """Mean and sample standard deviation over the seeds; a dash where one has none.

    >>> mean_and_deviation([1.0, 3.0], ".1f"), mean_and_deviation([1.0]), mean_and_deviation([1.0, None])
    ('2.0 ± 1.4', '1.0000', '–')
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return DASH
    mean = format(statistics.fmean(known), form)
    return f"{mean} ± {format(statistics.stdev(known), form)}" if len(known) > 1 else mean


def _nothing_to_reach(target: str) -> str:
    return f"Nothing is compared: no other run shares a seed with one of '{target}' that has a finite last loss and a cost.\n"


def _reach_table(results: Sequence[PointResult], target: str) -> str:
    reaches = reach(results, target)
    if not reaches:
        return _nothing_to_reach(target)
    parts = []
    for network in dict.fromkeys(one.network for one in reaches):
        rows = []
        for method in dict.fromkeys(one.method for one in reaches):
            of_method = [one for one in reaches if one.network == network and one.method == method]
            ratios = [one.ratio for one in of_method if one.ratio is not None]
            each = ", ".join(DASH if one.ratio is None else f"{one.ratio:.3f}" for one in of_method)
            share = f"{len(ratios)} of {len(of_method)} runs"
            if len(ratios) == len(of_method):
                share = mean_and_deviation(ratios, ".3f")
            behind = _over_known([one.behind for one in of_method], "+.4f").replace("± +", "± ")
            rows.append([method, share, each, behind])
        headings = [f"on {network}", f"time to {target}'s last loss, over {target}'s time", "each seed"]
        parts.append(markdown_numbers([*headings, f"loss above {target}'s in its time"], rows))
    return "\n".join(parts)


def _canvas(width: float, height: float) -> Any:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout="constrained")


def _draw_curves(results: Sequence[PointResult], figure: Figure) -> Any:
    losses = _losses(results, figure)
    x_values = list(dict.fromkeys(x for _, x, _ in losses))
    numeric = all(isinstance(x, int | float) for x in x_values)
    place_of: Callable[[Any], float] = float if numeric else lambda x: float(x_values.index(x))
    canvas = _canvas(6.4, 4.0)
    axes = canvas.add_subplot()
    methods = list(dict.fromkeys(name for name, _, _ in losses))
    styles = line_styles(methods)
    for place, method in enumerate(methods):
        aside = 0.0 if numeric else 0.08 * (place - (len(methods) - 1) / 2)  # otherwise one mark would hide another
        points = {
            place_of(x) + aside: known
            for (name, x, _), of_seeds in losses.items()
            if name == method and (known := _finite(of_seeds))
        }
        _draw_points(axes, points, method, styles[method], joined=numeric)
    if figure.log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks([place_of(x) for x in x_values], [str(x) for x in x_values])
    axes.set_ylabel("validation loss of the mean model")
    axes.legend(frameon=False)
    plain_axes(axes, _axis(figure.keys[0]))
    return canvas


def _draw_points(
    axes: Any, points: Mapping[float, Sequence[float]], label: str, style: tuple[str, Any], *, joined: bool
) -> None:
    """Draws mean and sample standard deviation over the seeds at each x."""
    colour, line = style
    axes.errorbar(
        list(points),
        [statistics.fmean(of_seeds) for of_seeds in points.values()],
        [statistics.stdev(of_seeds) if len(of_seeds) > 1 else 0.0 for of_seeds in points.values()],
        color=colour,
        label=label,
        marker="o",
        markersize=4,
        capsize=3,
        linewidth=1.6,
        linestyle=line if joined else "",
    )


def _draw_maps(results: Sequence[PointResult], figure: Figure) -> Any:
    # The mean of the seeds that did not diverge would make a cell at the edge of instability look good.
    means = {key: statistics.fmean(some) for key, some in _losses(results, figure).items()}
    losses = {key: mean for key, mean in means.items() if math.isfinite(mean)}
    methods = list(dict.fromkeys(name for name, _, _ in losses))
    low = min(losses.values(), default=0.0)
    # A run that diverged would leave one colour for all others.
    high = min(max(losses.values(), default=1.0), low + 1.0)
    canvas = _canvas(1.2 + 4.4 * len(methods), 3.9)
    for place, method in enumerate(methods):
        axes = canvas.add_subplot(1, len(methods), place + 1)
        of_method = {(x, y): loss for (name, x, y), loss in losses.items() if name == method}
        x_values, y_values = ([*dict.fromkeys(part)] for part in zip(*of_method, strict=True))
        grid = [[of_method.get((x, y), math.nan) for x in x_values] for y in y_values]
        axes.imshow(grid, cmap="viridis_r", vmin=low, vmax=high, aspect="auto", origin="lower")
        best = min(of_method.values())
        for (x, y), loss in of_method.items():
            dark = loss > (low + high) / 2
            axes.text(
                x_values.index(x),
                y_values.index(y),
                f"{loss:.3f}",
                ha="center",
                va="center",
                color="white" if dark else "black",
                weight="bold" if loss == best else "normal",
            )
        axes.set_xticks(range(len(x_values)), [str(x) for x in x_values])
        axes.set_yticks(range(len(y_values)), [str(y) for y in y_values])
        axes.set_title(method, fontsize=10)
        axes.set_ylabel(_axis(figure.y))
        plain_axes(axes, _axis(figure.keys[0]), grid=False)
    return canvas


def _draw_reach(results: Sequence[PointResult], figure: Figure) -> Any:
    reaches = reach(results, figure.target, paired=figure.paired)
    curves = [curves_of(run, paired=figure.paired) for run in results]
    networks = list(dict.fromkeys(one.network for one in reaches))
    methods = dict.fromkeys(one.method for one in reaches)
    styles = line_styles(methods)
    canvas = _canvas(1.0 + 5.0 * len(networks), 4.0)
    panels = canvas.subplots(1, max(1, len(networks)), squeeze=False)[0]
    for axes, network in zip(panels, networks, strict=False):  # without a network one panel, which stays empty
        ends = {
            r.seed: own[network][-1]
            for r, own in zip(results, curves, strict=True)
            if r.method == figure.target and own.get(network)
        }
        for run, own_curves in zip(results, curves, strict=True):
            if run.seed not in ends or not own_curves.get(network):
                continue
            end_s, loss = ends[run.seed]
            # Relative to the end of the target run of the same seed, so that seeds can share one panel.
            points = [(s / end_s, own - loss) for s, own in own_curves[network] if s <= 1.02 * end_s]
            colour, line = styles[run.method]
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colour, linestyle=line, linewidth=1.2, alpha=0.75
            )
            if run.method != figure.target and (hit := next((x for x, y in points if y <= 0), None)) is not None:
                axes.plot([hit], [0.0], marker="v", color=colour, markersize=6)
        axes.axhline(0.0, color="#2b2b2b", linewidth=0.8)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(-0.15, 0.6)
        axes.set_title(network, fontsize=10)
        plain_axes(axes, f"{network if network in (SENT, ROUNDS) else 'wall-clock'} over that of {figure.target}")
    panels[0].set_ylabel(f"validation loss above {figure.target}'s last")
    handles = [
        panels[-1].plot([], [], color=colour, linestyle=line, label=name)[0] for name, (colour, line) in styles.items()
    ]
    panels[-1].legend(handles=handles, frameon=False)
    return canvas


def _draw_ends(results: Sequence[PointResult], figure: Figure) -> Any:
    reaches = ends(results, figure.target)
    methods = [*dict.fromkeys(one.method for one in reaches)]
    canvas = _canvas(6.0, 1.0 + 0.3 * len(methods))
    axes, styles = canvas.subplots(), line_styles(methods)
    for place, method in enumerate(methods):
        pairs = [(one.behind, one.target_loss) for one in reaches if one.method == method and one.behind is not None]
        if not pairs:
            continue
        arm, (colour, _) = effect(pairs), styles[method]
        axes.plot([difference for difference, _ in pairs], [place] * len(pairs), ".", color=colour, alpha=0.5)
        axes.errorbar(arm.mean, place, xerr=arm.half or 0.0, fmt="o", color=colour)
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#2b2b2b", linewidth=0.8)
    if figure.margin is not None:
        axes.axvspan(-figure.margin, figure.margin, color="#2b2b2b", alpha=0.1, linewidth=0)
    plain_axes(axes, f"loss above {figure.target}'s, each seed and mean with its 95 % interval")
    return canvas
