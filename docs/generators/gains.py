"""The gain of outer momentum: runs that differ in nothing but their outer step, with momentum and without, cell by cell.

A cell is whatever else a file varies: shards, graph, workers, local steps, rounds. DiLoCo without momentum is local SGD, and
GASLoC without momentum gossip, which may have an outer learning rate of their own; each has the learning rate tuned for it.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from gossamer.report.figures import chart_style, plain_axes, svg
from gossamer.report.paired import effect, effect_cells, effect_heads
from gossamer.report.results import PointResult
from gossamer.report.table import DASH, markdown_lines
from gossamer.run.config.experiment_file import Point, place_in_experiment
from gossamer.run.config.run_file import RunConfig, decisive

MARGIN = 0.01
"""Of all stages, in nats (docs/evidence/registered.md)."""
_WITHOUT = {"diloco": "local_sgd", "gasloc": "gossip"}
_GRAPHS = {"complete": "everyone", "ring": "ring", "exponential": "exponential"}
_VARIED = ("shards", "graph", "workers", "H", "rounds")


class Gain(NamedTuple):
    """A cell, with the runs of those seeds that both sides have."""

    method: str
    """The variant with momentum."""
    plain: str
    where: dict[str, Any]
    """What a table shows of the cell."""
    pairs: list[tuple[float, float]]
    """Of each seed the loss with momentum minus that without, and the loss without."""
    alignment: float | None
    """Mean over rounds and seeds, of the runs without momentum."""


def gains(runs: Sequence[Point], ended: Iterable[PointResult]) -> list[Gain]:
    """The cells of an experiment in which a run with momentum and one without have ended, in the order of the file.

    Args: `runs` are all runs of the file, with the seeds of `ended`.
    """
    found, cells = {place_in_experiment(one): one for one in ended}, dict[str, dict[str, list[Point]]]()
    for run in runs:
        rule = run.config.rule.name
        if run.config.kind == "rounds" and rule in {*_WITHOUT, *_WITHOUT.values()}:
            family = _WITHOUT.get(rule, rule)
            cells.setdefault(f"{family} {_cell(run.config)}", {}).setdefault(run.method, []).append(run)
    made = list[Gain]()
    for arms in cells.values():
        plain = next((name for name, own in arms.items() if _is_plain(own[0].config)), None)
        for name, own in arms.items():
            if plain is not None and not _is_plain(own[0].config):
                base = {run.seed: found.get(place_in_experiment(run)) for run in arms[plain]}
                both = [
                    (one, other)
                    for run in own
                    if (one := _ended(found.get(place_in_experiment(run)))) and (other := _ended(base.get(run.seed)))
                ]
                if both:
                    made.append(_gain(name, plain, own[0].config, both))
    return made


def gains_page(found: Sequence[Gain]) -> str:
    """The cells as Markdown: the differences with their verdicts, Holm's correction over all cells, and the rank correlation."""
    varied = [key for key in _VARIED if len({one.where[key] for one in found}) > 1]
    measured = any(one.alignment is not None for one in found)
    heads = ["with momentum", "loss above that of", *varied, *["alignment"] * measured, *effect_heads(MARGIN, None)]
    rows = list[list[str]]()
    for one, cells in zip(found, effect_cells([one.pairs for one in found], MARGIN, None), strict=True):
        said = [DASH if one.alignment is None else f"{one.alignment:.3f}"] * measured
        rows.append([one.method, one.plain, *(str(one.where[key]) for key in varied), *said, *cells])
    numbers = 2 + len([key for key in varied if key in ("shards", "graph")])
    table = markdown_lines([heads, ["---"] * numbers + ["---:"] * (len(heads) - numbers), *rows])
    rho = rank_correlation(found)
    if rho is None:
        return table
    return f"{table}\nSpearman's ρ between alignment and gain over {len(found)} cells: {rho:.2f}.\n"


def rank_correlation(found: Sequence[Gain]) -> float | None:
    """Spearman's ρ between the alignment at γ = 0 and the gain (the fall in loss); None of fewer than four cells."""
    from scipy.stats import spearmanr

    known = [(one.alignment, -_mean(one)) for one in found if one.alignment is not None]
    if len(known) < 4:
        return None
    aligned, gained = zip(*known, strict=True)
    rho = float(cast(Any, spearmanr(aligned, gained)).statistic)
    return rho if math.isfinite(rho) else None


def is_map(found: Sequence[Gain]) -> bool:
    """Whether the cells can be drawn as a map: several, and no two in one place."""
    return 1 < len({(_row(one), one.where["H"]) for one in found}) == len(found)


def drawn_gains(found: Sequence[Gain]) -> bytes:
    """The map as SVG: the gain in each cell, bold where its 95 % interval excludes 0."""
    from matplotlib.figure import Figure as Canvas

    places = {_row(one): None for one in found}
    rows, columns = [*places], sorted({one.where["H"] for one in found})
    widest = max([0.01, *(abs(_mean(one)) for one in found)])
    with chart_style():
        canvas = Canvas(figsize=(2.6 + 1.1 * len(columns), 1.0 + 0.3 * len(rows)), layout="constrained")
        axes = canvas.add_subplot()
        grid = [[math.nan] * len(columns) for _ in rows]
        for one in found:
            row, column = rows.index(_row(one)), columns.index(one.where["H"])
            grid[row][column] = -_mean(one)
            half = effect(one.pairs).half
            sure = half is not None and half < abs(_mean(one))
            axes.text(column, row, f"{-_mean(one):+.3f}", ha="center", va="center", weight="bold" if sure else "normal")
        axes.imshow(grid, cmap="RdBu", vmin=-1.5 * widest, vmax=1.5 * widest, aspect="auto")
        axes.set_xticks(range(len(columns)), [str(h) for h in columns])
        axes.set_yticks(range(len(rows)), rows)
        axes.set_title("gain of outer momentum in nats", fontsize=10)
        plain_axes(axes, "local steps", grid=False)
        return svg(canvas)


def _row(one: Gain) -> str:
    return ", ".join(str(one.where[key]) for key in ("shards", "graph", "workers"))


def _mean(one: Gain) -> float:
    return statistics.fmean(difference for difference, _ in one.pairs)


def _gain(name: str, plain: str, config: RunConfig, both: Sequence[tuple[PointResult, PointResult]]) -> Gain:
    pairs = [(one.row["loss"] - other.row["loss"], other.row["loss"]) for one, other in both]
    aligned = [other.row["alignment"] for _, other in both if other.row.get("alignment") is not None]
    topology = config.topology
    peers = topology.options.get("peers", 1)
    graph = _GRAPHS.get(topology.name) or (f"{peers} random" if topology.name == "random" else topology.name)
    where = {
        "shards": config.data.shards,
        "graph": graph,
        "workers": config.workers,
        "H": config.length.full_steps,
        "rounds": config.length.rounds,
    }
    return Gain(name, plain, where, pairs, statistics.fmean(aligned) if aligned else None)


def _is_plain(config: RunConfig) -> bool:
    return config.rule.name in _WITHOUT.values() or config.rule.options.get("momentum") == 0


def _cell(config: RunConfig) -> str:
    """All that decides a run but its outer step, its tuned learning rate and its seed."""
    kept = {
        key: value
        for key, value in decisive(config).items()
        if not key.startswith("rule.") and key not in ("inner.lr", "seed")
    }
    return json.dumps(kept, sort_keys=True)


def _ended(run: PointResult | None) -> PointResult | None:
    """A run with a finite loss."""
    return run if run is not None and run.row["loss"] is not None and math.isfinite(run.row["loss"]) else None
