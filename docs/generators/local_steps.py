"""Local steps against bytes: each method at its own settings for each number of local steps, and those that send as much."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from generators.gains import MARGIN
from generators.sources import RESULTS
from gossamer.report.figures import mean_and_deviation
from gossamer.report.paired import effect_cells, effect_heads
from gossamer.report.results import PointResult, read_results
from gossamer.report.table import DASH, markdown_lines, markdown_numbers

LENGTHS = (1, 5, 10, 30, 60, 120)
"""Local steps that have a search and a comparison of their own (`experiments/evidence/local_steps.toml`)."""
_PRAISED, _MEGA = "DiLoCo", 1e6


class Length(NamedTuple):
    """A method with a number of local steps."""

    sent_bytes: float
    losses: Mapping[int, float]
    """By seed."""


def by_length(ended: Callable[[str], Iterable[PointResult]]) -> dict[str, dict[int, list[PointResult]]]:
    """The runs that have a loss, by method and local steps.

    Args: `ended` gives the runs of a file by its name.
    """
    found: dict[str, dict[int, list[PointResult]]] = {}
    for steps in LENGTHS:
        for one in ended(f"local_steps_tuned{'' if steps == 30 else f'-h{steps}'}"):
            if one.row["loss"] is not None:
                found.setdefault(one.method, {}).setdefault(steps, []).append(one)
    return found


def lengths() -> dict[str, dict[int, Length]]:
    """The committed outcomes by method and local steps."""
    runs = by_length(lambda stem: read_results(RESULTS / "evidence" / f"{stem}.jsonl"))
    return {method: {steps: _length(some) for steps, some in own.items()} for method, own in runs.items()}


def _length(runs: Sequence[PointResult]) -> Length:
    losses = {one.seed: one.row["loss"] for one in runs}
    return Length(statistics.fmean(one.row["sent_bytes"] for one in runs), losses)


def local_steps_table(found: Mapping[str, Mapping[int, Length]]) -> str:
    """The losses by local steps, means ± sample standard deviations over the seeds, and what each sends in all."""
    rows = list[list[str]]()
    for method, own in found.items():
        cells = [own.get(steps) for steps in LENGTHS]
        rows.append([method, *(DASH if one is None else mean_and_deviation([*one.losses.values()]) for one in cells)])
        rows.append(["MB sent", *(DASH if one is None else f"{one.sent_bytes / _MEGA:.1f}" for one in cells)])
    heads = ["loss after equal tokens", *(f"H = {steps}" for steps in LENGTHS)]
    return markdown_numbers(heads, rows)


def equal_bytes_table(found: Mapping[str, Mapping[int, Length]]) -> str:
    """DiLoCo against every other method at equal bytes: with the fewest local steps at which it sends no more than the other.

    >>> far, near = Length(10e6, {0: 2.0, 1: 2.1}), Length(20e6, {0: 1.9, 1: 2.0})
    >>> print(equal_bytes_table({"DiLoCo": {1: near, 2: far}, "pairs": {1: Length(11e6, {0: 2.25, 1: 2.35})}}))
    | DiLoCo | beside | MB sent, of each | each seed | mean, 95 % interval | in % | p (within ±0.01) | verdict |
    | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
    | H = 2 | pairs, H = 1 | 10.0, 11.0 | -0.2500, -0.2500 | -0.2500 ± 0.0000 | -10.87 | 1.000 | lower |
    <BLANKLINE>
    """
    ours = found[_PRAISED]
    names, arms = list[list[str]](), list[list[tuple[float, float] | None]]()
    for method, own in found.items():
        for steps, other in own.items() if method != _PRAISED else ():
            longer = min((h for h, one in ours.items() if one.sent_bytes <= other.sent_bytes), default=None)
            if longer is None:
                continue
            both = sorted(ours[longer].losses.keys() & other.losses.keys())
            sent = f"{ours[longer].sent_bytes / _MEGA:.1f}, {other.sent_bytes / _MEGA:.1f}"
            names.append([f"H = {longer}", f"{method}, H = {steps}", sent])
            arms.append([(ours[longer].losses[seed] - other.losses[seed], other.losses[seed]) for seed in both])
    cells = effect_cells(arms, MARGIN, None)
    heads = [_PRAISED, "beside", "MB sent, of each", *effect_heads(MARGIN, None)]
    rows = [[*name, *own] for name, own in zip(names, cells, strict=True)]
    return markdown_lines([heads, ["---"] * 2 + ["---:"] * (len(heads) - 2), *rows])
