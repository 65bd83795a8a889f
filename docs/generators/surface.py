"""S of docs/evidence/registered.md: what a method loses beside data parallelism after 5,400 steps, by local steps and codec."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from generators.sources import RESULTS, losses_by_seed
from generators.verdicts import rises
from gossamer.report.figures import mean_and_deviation
from gossamer.report.paired import effect
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_numbers

PENALTY = "penalty"
"""The stem of the file."""
_SPENT = (5, 15, 30, 60, 120)
"""Local steps."""
_HEADS = [f"H = {h}" for h in _SPENT]
LEAST = "data parallel"
_EXACT, _LOSSY = "exact", ("bf16", "int8", "int4", "topk2bit")

Surface = Mapping[str, Mapping[int, Mapping[int, float]]]
"""Nats above data parallelism, by method with its codec, local steps and seed."""


def surface_of(ended: Iterable[PointResult]) -> Surface:
    """Of each row the seeds that data parallelism has and the row at all of its local steps; nothing before one has."""
    losses = losses_by_seed(ended)
    least = losses.pop(LEAST, {})
    rows: dict[str, dict[int, dict[int, float]]] = {}
    for label, own in losses.items():
        name, _, steps = label.rpartition(", H = ")
        rows.setdefault(name, {})[int(steps)] = own
    found: dict[str, dict[int, dict[int, float]]] = {}
    for name, row in rows.items():
        if seeds := sorted({*least}.intersection(*row.values())):
            found[name] = {steps: {seed: own[seed] - least[seed] for seed in seeds} for steps, own in row.items()}
    return found


def committed_surface() -> Surface:
    """Of the committed outcomes."""
    return surface_of(read_results(RESULTS / "evidence" / f"{PENALTY}.jsonl"))


def surface_page(ended: Iterable[PointResult]) -> str:
    """Both tables, and Page's test over the local steps of each row, as Markdown."""
    surface = surface_of(ended)
    if not surface:
        return ""
    rows = {name: by_seed(own) for name, own in surface.items() if name.startswith("DiLoCo, ")}
    said = f"That the penalty of DiLoCo rises with local steps, by Page's test after Holm's correction: {rises(rows).effect}.\n"
    tested = [said] if len(rows["DiLoCo, exact"]) > 1 else []
    return "\n".join([penalties_table(surface), *tested, codecs_table(surface)])


def penalties_table(surface: Surface) -> str:
    """Nats above data parallelism, mean ± sample standard deviation over the seeds: a row for each method and codec."""
    rows = [
        [name, *(mean_and_deviation([*own[h].values()]) if h in own else DASH for h in _SPENT)]
        for name, own in surface.items()
    ]
    return markdown_numbers(["nats above data parallelism", *_HEADS], rows)


def codec_costs(surface: Surface) -> Surface:
    """What a codec adds to exact messages, by method with that codec, local steps and seed."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for method in dict.fromkeys(name.rpartition(", ")[0] for name in surface if name.endswith(f", {_EXACT}")):
        exact = surface[f"{method}, {_EXACT}"]
        for codec in _LOSSY:
            own = surface.get(f"{method}, {codec}", {})
            both = {
                h: {seed: nats - exact[h][seed] for seed, nats in some.items() if seed in exact[h]}
                for h, some in own.items()
            }
            if both and all(both.values()):
                found[f"{method}, {codec}"] = both
    return found


def codecs_table(surface: Surface) -> str:
    """What each codec adds, with the 95 % interval of the mean over seeds, and in the mean over local steps."""
    rows = [
        [name, *(_interval([*own[h].values()]) if h in own else DASH for h in _SPENT), _interval(means_by_seed(own))]
        for name, own in codec_costs(surface).items()
    ]
    heads = ["nats above exact messages", *_HEADS, "mean of all"]
    return markdown_numbers(heads, rows)


def by_seed(own: Mapping[int, Mapping[int, float]]) -> list[tuple[float, ...]]:
    """A row, over its local steps, of each seed."""
    return [*zip(*(some.values() for some in own.values()), strict=True)]


def means_by_seed(own: Mapping[int, Mapping[int, float]]) -> list[float]:
    """The means of a row over its local steps, of each seed."""
    return [statistics.fmean(seed) for seed in by_seed(own)]


def _interval(differences: Sequence[float]) -> str:
    found = effect([(difference, 1.0) for difference in differences])
    return f"{found.mean:+.4f}" + ("" if found.half is None else f" ± {found.half:.4f}")
