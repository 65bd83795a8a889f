"""Annealed loss over priced time: the lengths of each method, branches of one trunk, against the longest of one method."""

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from gossamer.report.figures import chart_style, line_styles, plain_axes, svg
from gossamer.report.results import PointResult
from gossamer.report.table import DASH, markdown_lines, markdown_numbers
from gossamer.run.config.experiment_file import Point, place_in_experiment


class Branch(NamedTuple):
    """A run that was annealed after so many rounds, on one network."""

    method: str
    network: str
    seed: int
    rounds: int
    share: float
    """Its priced time over that of the target's run with this seed."""
    above: float
    """Its loss minus that run's."""


def branches(
    runs: Sequence[Point], ended: Sequence[PointResult], target: str, steps: int | None = None
) -> list[Branch]:
    """The runs that have ended, beside the target's of so many steps, or its longest; of the seeds for which there is one.

    Args: `runs` are all runs of the file, with the seeds of `ended`.
    """
    rounds = {place_in_experiment(run): run.config.length.rounds for run in runs}
    known = [(rounds[place], one) for one in ended if (place := place_in_experiment(one)) in rounds]
    asked = {run.config.length.rounds for run in runs if run.method == target and run.config.run.steps == steps}
    length = max(asked or {own for own, one in known if one.method == target}, default=0)
    ends = {one.seed: one for own, one in known if one.method == target and own == length}
    return [
        Branch(
            one.method,
            network,
            one.seed,
            own,
            one.row["wall_s"][network] / ends[one.seed].row["wall_s"][network],
            one.row["loss"] - ends[one.seed].row["loss"],
        )
        for own, one in known
        if one.seed in ends and one.row["loss"] is not None and ends[one.seed].row["loss"] is not None
        for network in one.row["wall_s"]
    ]


def time_shares(found: Sequence[Branch], method: str, network: str) -> dict[int, float | None]:
    """By seed the share of the target's time after which a method first ends as low as the target; None where it never does."""
    mine = sorted((one for one in found if (one.method, one.network) == (method, network)), key=lambda one: one.share)
    return {
        seed: next((one.share for one in mine if one.seed == seed and one.above <= 0), None)
        for seed in sorted({one.seed for one in mine})
    }


def shares_between(found: Sequence[Branch], method: str, network: str) -> dict[int, float | None]:
    """As `time_shares`, where straight lines join the losses of a method's lengths; its shortest where that is as low already."""
    shares: dict[int, float | None] = {}
    for seed, first in time_shares(found, method, network).items():
        own = sorted(
            (one.share, one.above) for one in found if (one.method, one.network, one.seed) == (method, network, seed)
        )
        crossings = (x + (y - x) * a / (a - b) for (x, a), (y, b) in itertools.pairwise(own) if a > 0 >= b)
        shares[seed] = first if own[0][1] <= 0 else next(crossings, None)
    return shares


def annealed_page(found: Sequence[Branch], target: str) -> str:
    """The branches as Markdown: how far above the target each length ends, and when each method with several is first as low."""
    networks, methods = (
        list(dict.fromkeys(column)) for column in zip(*((o.network, o.method) for o in found), strict=True)
    )
    last = next(one.rounds for one in found if one.method == target and (one.share, one.above) == (1.0, 0.0))
    parts = [f"Beside {target} after {last} rounds, which are annealed as all others.\n"]
    if len({(one.method, one.rounds) for one in found}) > len(methods):
        first = f"first annealed as low as {target}, over its time; each seed"
        for network in networks:
            heads = [f"on {network}", first, "mean share", "between lengths, each seed"]
            rows = [_first(found, method, network) for method in methods]
            parts.append(markdown_lines([heads, ["---", "---:", "---:", "---:"], *rows]))
    over = [f"time over {target}'s" + (f" on {network}" if len(networks) > 1 else "") for network in networks]
    heads = ["method", "rounds", *over, f"annealed loss above {target}'s after {last} rounds; each seed", "mean"]
    rows = list[list[str]]()
    for method in methods:
        mine = [one for one in found if one.method == method]
        for rounds in sorted({one.rounds for one in mine}):
            here = sorted((one for one in mine if one.rounds == rounds), key=lambda one: one.seed)
            shares = [statistics.fmean(one.share for one in here if one.network == network) for network in networks]
            above = [one.above for one in here if one.network == networks[0]]
            each, mean = ", ".join(f"{one:+.4f}" for one in above), statistics.fmean(above)
            rows.append([method, str(rounds), *(f"{share:.3f}" for share in shares), each, f"{mean:+.4f}"])
    parts.append(markdown_numbers(heads, rows))
    return "\n".join(parts)


def _first(found: Sequence[Branch], method: str, network: str) -> list[str]:
    """When a method is first as low as the target, among its lengths and between them."""
    shares = time_shares(found, method, network)
    reached = [share for share in shares.values() if share is not None]
    whole = (
        f"{statistics.fmean(reached):.3f}" if len(reached) == len(shares) else f"{len(reached)} of {len(shares)} seeds"
    )
    each, joined = (
        ", ".join(DASH if one is None else f"{one:.3f}" for one in some.values())
        for some in (shares, shares_between(found, method, network))
    )
    return [method, each, whole, joined]


def drawn_branches(found: Sequence[Branch], target: str) -> bytes:
    """Mean annealed loss above the target's last over priced time, as SVG; a panel for each network."""
    from matplotlib.figure import Figure as Canvas

    networks, methods = (
        [*dict.fromkeys(column)] for column in zip(*((o.network, o.method) for o in found), strict=True)
    )
    with chart_style():
        canvas = Canvas(figsize=(1.0 + 5.0 * len(networks), 4.0), layout="constrained")
        for axes, network in zip(canvas.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
            for method, (colour, line) in line_styles(methods).items():
                lengths: dict[float, list[float]] = {}
                for one in found:
                    if (one.method, one.network) == (method, network):
                        lengths.setdefault(one.share, []).append(one.above)
                shares = sorted(lengths)
                means = [statistics.fmean(lengths[share]) for share in shares]
                axes.plot(
                    shares, means, color=colour, linestyle=line, marker="o", markersize=4, linewidth=1.6, label=method
                )
            axes.axhline(0.0, color="black", linewidth=0.6)
            axes.set_title(network, fontsize=10)
            axes.set_ylabel(f"annealed loss, minus the last of {target}")
            axes.legend(frameon=False)
            plain_axes(axes, f"priced time, as a share of that of {target}")
        return svg(canvas)
