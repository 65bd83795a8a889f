"""S of docs/evidence/registered.md: what a method loses beside data parallelism after 5,400 steps, by local steps and codec."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from generators.sources import RESULTS, losses_by_seed
from generators.verdicts import rises
from gossamer.report.figures import mean_and_deviation
from gossamer.report.paired import effect
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines

__all__ = [
    "PENALTY",
    "codec_costs",
    "codecs_table",
    "committed_surface",
    "penalties_table",
    "surface_of",
    "surface_page",
]

PENALTY = "penalty"
"""The stem of the file."""
_SPENT = (5, 15, 30, 60, 120)
"""Local steps."""
_HEADS = [f"H = {h}" for h in _SPENT]
_EXACT, _LOSSY = "exact", ("bf16", "int8", "int4", "topk2bit")

Surface = Mapping[str, Mapping[int, Sequence[float]]]
"""Nats above data parallelism, of each seed, by method with its codec and local steps."""


def surface_of(ended: Iterable[PointResult]) -> Surface:
    """Of the seeds that all arms have; nothing before one has run with all."""
    losses = losses_by_seed(ended)
    least = losses.pop("data parallel", {})
    seeds = sorted({*least}.intersection(*losses.values()))
    found: dict[str, dict[int, list[float]]] = {}
    for label, own in losses.items() if seeds else ():
        name, _, steps = label.rpartition(", H = ")
        found.setdefault(name, {})[int(steps)] = [own[seed] - least[seed] for seed in seeds]
    return found


def committed_surface() -> Surface:
    """Of the committed outcomes."""
    return surface_of(read_results(RESULTS / "evidence" / f"{PENALTY}.jsonl"))


def surface_page(ended: Iterable[PointResult]) -> str:
    """Both tables, and Page's test over the local steps of each row, as Markdown."""
    surface = surface_of(ended)
    if not surface:
        return ""
    rows = {name: [*zip(*own.values(), strict=True)] for name, own in surface.items() if name.startswith("DiLoCo, ")}
    said = f"That the penalty of DiLoCo rises with local steps, by Page's test after Holm's correction: {rises(rows).effect}.\n"
    tested = [said] if len(rows["DiLoCo, exact"]) > 1 else []
    return "\n".join([penalties_table(surface), *tested, codecs_table(surface)])


def penalties_table(surface: Surface) -> str:
    """Nats above data parallelism, mean ± sample standard deviation over the seeds: a row for each method and codec."""
    rows = [
        [name, *(mean_and_deviation(own[h]) if h in own else DASH for h in _SPENT)] for name, own in surface.items()
    ]
    return markdown_lines([["nats above data parallelism", *_HEADS], ["---", *["---:"] * len(_SPENT)], *rows])


def codec_costs(surface: Surface) -> Mapping[str, Mapping[int, Sequence[float]]]:
    """What a codec adds to exact messages, of each seed, by method with that codec and local steps."""
    return {
        f"{method}, {codec}": {
            h: [lossy - exact for lossy, exact in zip(own[h], surface[f"{method}, {_EXACT}"][h], strict=True)]
            for h in own
        }
        for method in dict.fromkeys(name.rpartition(", ")[0] for name in surface if name.endswith(f", {_EXACT}"))
        for codec in _LOSSY
        if (own := surface.get(f"{method}, {codec}"))
    }


def codecs_table(surface: Surface) -> str:
    """What each codec adds, with the 95 % interval of the mean over seeds, and in the mean over local steps."""
    rows = [
        [name, *(_interval(own[h]) if h in own else DASH for h in _SPENT), _interval(_means(own))]
        for name, own in codec_costs(surface).items()
    ]
    heads = ["nats above exact messages", *_HEADS, "mean of all"]
    return markdown_lines([heads, ["---", *["---:"] * (len(heads) - 1)], *rows])


def _means(own: Mapping[int, Sequence[float]]) -> list[float]:
    """Of each seed, over the local steps."""
    return [statistics.fmean(seed) for seed in zip(*own.values(), strict=True)]


def _interval(differences: Sequence[float]) -> str:
    found = effect([(difference, 1.0) for difference in differences])
    return f"{found.mean:+.4f}" + ("" if found.half is None else f" ± {found.half:.4f}")
