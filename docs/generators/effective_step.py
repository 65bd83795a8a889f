"""F of docs/evidence/registered.md: outer momentum against none at an equal effective step η/(1 - γ)."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from generators.gains import MARGIN
from generators.sources import RESULTS
from gossamer.report.paired import effect_cells, effect_heads
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines, markdown_numbers

EFFECTIVE_STEP = "effective_step"
"""The stem of the file."""
GRAPHS = ("everyone", "two peers")
_STEPS, _MOMENTA = (1.0, 1.4, 2.0, 2.8), (0.0, 0.3, 0.5, 0.7)

Arms = Mapping[tuple[str, float, float], Sequence[float]]
"""Losses by graph, effective step and γ, of the same seeds; NaN for a run that diverged."""


def by_arm(ended: Iterable[PointResult]) -> Arms:
    """The losses of the seeds that all arms have; nothing before one has run with all."""
    losses: dict[str, dict[int, float]] = {}
    for one in ended:
        loss = one.row["loss"]
        losses.setdefault(one.method, {})[one.seed] = math.nan if loss is None else loss
    names = {
        (graph, step, gamma): f"{graph}, step {step}, γ = {gamma}"
        for graph in GRAPHS
        for step in _STEPS
        for gamma in _MOMENTA
    }
    seeds = sorted(set.intersection(*({*losses.get(name, ())} for name in names.values())))
    return {arm: [losses[name][seed] for seed in seeds] for arm, name in names.items()} if seeds else {}


def committed_arms() -> Arms:
    """Of the committed outcomes."""
    return by_arm(read_results(RESULTS / "evidence" / f"{EFFECTIVE_STEP}.jsonl"))


def effective_step_page(ended: Iterable[PointResult]) -> str:
    """All tables, and what follows from them, as Markdown."""
    arms = by_arm(ended)
    parts = [losses_table(arms)] if arms else []
    for graph in GRAPHS if arms else ():
        step, found = verdict(arms, graph)
        seeds = len(arms[graph, step, 0.0])
        said = f"With {graph}, γ = 0 is lowest at a step of {step:g}; over {seeds} seeds momentum is there: {found}.\n"
        parts += [compared(arms, graph), said]
    return "\n".join(parts)


def losses_table(arms: Arms) -> str:
    """Mean losses: a row for each graph and step, a column for each γ."""
    heads = ["", "η/(1 − γ)", *(f"γ = {gamma:g}" for gamma in _MOMENTA)]
    rows = [
        [graph, f"{step:g}", *(_text(arms[graph, step, gamma]) for gamma in _MOMENTA)]
        for graph in GRAPHS
        for step in _STEPS
    ]
    return markdown_numbers(heads, rows)


def compared(arms: Arms, graph: str) -> str:
    """The twelve comparisons of a graph, corrected together."""
    heads = ["η/(1 − γ)", "γ", *effect_heads(MARGIN, None)[1:]]
    return markdown_lines([heads, ["---:"] * len(heads), *_rows(arms, graph)])


def verdict(arms: Arms, graph: str) -> tuple[float, str]:
    """The step at which γ = 0 is lowest in the mean, and what momentum is there, in the words of the registration."""
    plain = {step: mean for step in _STEPS if math.isfinite(mean := statistics.fmean(arms[graph, step, 0.0]))}
    lowest = min(plain, key=plain.__getitem__)
    there = [row[-1] for row in _rows(arms, graph) if row[0] == f"{lowest:g}"]
    if any("lower" in found for found in there):
        return lowest, "more than a larger step"
    return lowest, "a larger step only" if all("equivalent" in found for found in there) else "open"


def _rows(arms: Arms, graph: str) -> list[list[str]]:
    places = [(step, gamma) for step in _STEPS for gamma in _MOMENTA if gamma]
    pairs = [_pairs(arms[graph, step, gamma], arms[graph, step, 0.0]) for step, gamma in places]
    cells = effect_cells(pairs, MARGIN, None)
    return [[f"{step:g}", f"{gamma:g}", *own[1:]] for (step, gamma), own in zip(places, cells, strict=True)]


def _pairs(ours: Sequence[float], plain: Sequence[float]) -> list[tuple[float, float] | None]:
    pairs = zip(ours, plain, strict=True)
    return [(loss - base, base) if math.isfinite(loss - base) else None for loss, base in pairs]


def _text(losses: Sequence[float]) -> str:
    mean = statistics.fmean(losses)
    return f"{mean:.4f}" if math.isfinite(mean) else DASH
