"""The runs of an experiment against one of its variants, seed by seed, at equal sent bytes, rounds and time."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gossamer.errors import ConfigError, choose
from gossamer.report.table import DASH, markdown_lines

__all__ = ["ROUNDS", "SENT", "PointResult", "Reach", "curves_of", "half_interval", "paired_table", "reach"]

SENT, ROUNDS = "sent bytes", "rounds"
"""In place of a network's name: runs are compared by what they sent, or round by round."""


class PointResult(NamedTuple):
    """The result of one run of an experiment."""

    method: str
    at: Mapping[str, Any]
    """The swept keys and their values."""
    seed: int
    row: Mapping[str, Any]
    """Of `gossamer.report.table.summary_rows`."""


class Reach(NamedTuple):
    """When a run reached the last loss of the target run, for one seed and network."""

    method: str
    network: str
    """Its name, `SENT` or `ROUNDS`."""
    seed: int
    ratio: float | None
    """Seconds (bytes, rounds) until then over those of the whole target run; None if it never did."""
    behind: float | None
    """Loss at the last evaluation within those of the target run, minus the target's last; None without such an evaluation."""


def reach(results: Sequence[PointResult], target: str, *, paired: bool = False) -> list[Reach]:
    """For every run and network, the share of the target's wall-clock after which its loss first reached the target's last.

    Evaluations are used as they are: nothing is interpolated or smoothed.

    Args: `paired` adds the same by sent bytes and by rounds.
    Raises: ConfigError when no run has that label.

    >>> def run(method, *points): return PointResult(method, {}, 0, {"loss_at_s": {"lan": points}})
    >>> reach([run("a", (10, 3.0), (20, 2.5)), run("b", (4, 2.8), (8, 2.4))], "a")[1]
    Reach(method='b', network='lan', seed=0, ratio=0.4, behind=-0.10000000000000009)
    """
    ends = {
        (name, run.seed): curve[-1]
        for run in results
        if run.method == target
        for name, curve in curves_of(run, paired=paired).items()
        if curve
    }
    if not ends:
        raise ConfigError(choose("target of the figure", target, {run.method for run in results}) + "; correct it")
    found = []
    for run in results:
        for name, curve in curves_of(run, paired=paired).items():
            if (name, run.seed) in ends:
                end, loss = ends[name, run.seed]
                first = next((x for x, own in curve if own <= loss), None)
                within = [own for x, own in curve if x <= end]
                ratio = None if first is None else first / end
                found.append(Reach(run.method, name, run.seed, ratio, within[-1] - loss if within else None))
    return found


def curves_of(run: PointResult, *, paired: bool) -> dict[str, Sequence[tuple[float, float]]]:
    """Losses of a run by seconds on each network; if `paired`, before these by sent bytes and by rounds."""
    more = {SENT: run.row["loss_at_bytes"], ROUNDS: run.row["loss_at_round"]} if paired else {}
    return {**more, **run.row["loss_at_s"]}


def paired_table(found: Sequence[Reach], target: str) -> str:
    """The differences in loss as Markdown: each seed's, and their mean with its 95 % interval (Student's t).

    >>> print(paired_table([Reach("b", "lan", seed, None, 0.01 * seed) for seed in (1, 2, 3)], "a"))
    | loss above a's, in its time on lan | each seed | mean, 95 % interval |
    | --- | ---: | ---: |
    | b | +0.0100, +0.0200, +0.0300 | +0.0200 ± 0.0248 |
    <BLANKLINE>
    """
    parts = []
    for name in dict.fromkeys(one.network for one in found):
        here = [one for one in found if one.network == name and one.method != target]
        rows = []
        for method in dict.fromkeys(one.method for one in here):
            behind = [one.behind for one in here if one.method == method]
            each = ", ".join(DASH if one is None else f"{one:+.4f}" for one in behind)
            known = [one for one in behind if one is not None]
            mean = f"{statistics.fmean(known):+.4f}" if known else DASH
            rows.append([method, each, f"{mean} ± {half_interval(known):.4f}" if len(known) > 1 else mean])
        where = {SENT: "at its sent bytes", ROUNDS: "after its rounds"}.get(name, f"in its time on {name}")
        heads = [f"loss above {target}'s, {where}", "each seed", "mean, 95 % interval"]
        parts.append(markdown_lines([heads, ["---", "---:", "---:"], *rows]))
    return "\n".join(parts)


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean, by Student's t: t(0.975, n - 1) s / √n, of at least two values.

    >>> round(half_interval([-1.0, 0.0, 1.0]) * 3**0.5, 3)  # the tabulated quantile for two degrees of freedom
    4.303
    """
    nu = len(values) - 1
    t = np.linspace(0.0, 13.0, 13_001)
    log_scale = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    density = np.exp(log_scale - (nu + 1) / 2 * np.log1p(t * t / nu))
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)]) * (t[1] - t[0])
    return float(np.interp(0.475, area, t)) * statistics.stdev(values) / math.sqrt(len(values))
