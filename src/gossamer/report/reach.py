"""The runs of an experiment against one of its variants, seed by seed, at equal sent bytes, rounds and time."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossamer.errors import ConfigError, choose
from gossamer.report.paired import Effect, Side, effect, effect_cells, effect_heads
from gossamer.report.results import PointResult
from gossamer.report.table import markdown_numbers

SENT, ROUNDS, ENDS = "sent bytes", "rounds", "end"
"""In place of a network's name: runs are compared by sent bytes, round by round, or at their ends."""


class Reach(NamedTuple):
    """The time at which a run reached the last loss of the target run, for one seed and network."""

    method: str
    network: str
    """Its name, `SENT`, `ROUNDS` or `ENDS`."""
    seed: int
    ratio: float | None
    """Seconds (bytes, rounds) until then over those of the whole target run; None if it never did."""
    behind: float | None
    """Loss at the last evaluation within those of the target run, minus the target's last; None without one that is finite."""
    target_loss: float
    """The target's last loss."""


def reach(results: Sequence[PointResult], target: str, *, paired: bool = False) -> list[Reach]:
    """For every run and network, the share of the target's wall-clock after which its loss first reached the target's last.

    Evaluations are used as they are: nothing is interpolated or smoothed.

    Args: `paired` adds the same by sent bytes and by rounds.
    Raises: ConfigError when no run has that label.

    >>> def run(method, *points): return PointResult(method, {}, 0, {"loss_at_s": {"lan": points}})
    >>> reach([run("a", (10, 3.0), (20, 2.5)), run("b", (4, 2.8), (8, 2.4))], "a")[1]
    Reach(method='b', network='lan', seed=0, ratio=0.4, behind=-0.10000000000000009, target_loss=2.5)
    """
    lasts = {
        (name, run.seed): curve[-1]
        for run in results
        if run.method == target
        for name, curve in curves_of(run, paired=paired).items()
        if curve and curve[-1][0] > 0 and math.isfinite(curve[-1][1])  # no bytes to compare without sends
    }
    if target not in (methods := {run.method for run in results}):
        raise ConfigError(choose("target of the figure", target, methods) + "; correct it")
    reaches = []
    for run in results:
        for name, curve in curves_of(run, paired=paired).items():
            if (name, run.seed) in lasts:
                end, loss = lasts[name, run.seed]
                first = next((x for x, reached in curve if reached <= loss), None)
                within = [reached for x, reached in curve if x <= end]
                behind = within[-1] - loss if within and math.isfinite(within[-1]) else None
                ratio = None if first is None else first / end
                reaches.append(Reach(run.method, name, run.seed, ratio, behind, loss))
    return reaches


class EqualTime(NamedTuple):
    """Methods at the end of the one that ends first, on the network where their ends differ most; means over seeds."""

    network: str
    first: str
    """The method that ends first; of those within a hundredth of its time, the one with the lowest loss."""
    end_s: float
    loss: float
    """Its last loss."""
    others: Mapping[str, Effect]
    """How far each other method's loss is above it by then, at its last evaluation; without those that have none."""

    @property
    def ahead(self) -> str:
        """The method with the lowest loss by then."""
        lowest = min(self.others, key=lambda method: self.others[method].mean, default=self.first)
        return lowest if lowest in self.others and self.others[lowest].mean < 0 else self.first

    def by_then(self, method: str) -> float | None:
        """The loss of a method by then; None without an evaluation."""
        if method == self.first:
            return self.loss
        return self.loss + self.others[method].mean if method in self.others else None


def at_equal_time(results: Sequence[PointResult]) -> EqualTime | None:
    """Which method is ahead when the first of them ends; None where no network has priced or measured all of them.

    >>> def run(method, *points): return PointResult(method, {}, 0, {"loss_at_s": {"lan": points}})
    >>> both = at_equal_time([run("gossip", (10, 3.0), (20, 2.5)), run("mean", (14, 2.75), (28, 2.25))])
    >>> both.first, both.ahead, both.by_then("mean")
    ('gossip', 'gossip', 2.75)
    """
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in results:
        for network, curve in run.row.get("loss_at_s", {}).items():
            if curve:
                curves.setdefault(network, {}).setdefault(run.method, []).append(curve[-1])
    methods = {run.method for run in results}
    means = {
        network: {
            method: (statistics.fmean(end_s for end_s, _ in lasts), statistics.fmean(loss for _, loss in lasts))
            for method, lasts in of.items()
        }
        for network, of in curves.items()
        if of.keys() == methods and min(end_s for lasts in of.values() for end_s, _ in lasts) > 0
    }
    if not means:
        return None
    network = max(means, key=lambda name: max(means[name].values())[0] / min(means[name].values())[0])
    # Ends that nearly coincide are equal, else the other's loss would be that of an earlier validation.
    soon_s = 1.01 * min(end_s for end_s, _ in means[network].values())
    soonest = {method: loss for method, (end_s, loss) in means[network].items() if end_s <= soon_s}
    first = min(soonest, key=lambda method: soonest[method])
    pairs = dict[str, list[tuple[float, float]]]()
    for one in reach(results, first):
        if one.method != first and one.network == network and one.behind is not None:
            pairs.setdefault(one.method, []).append((one.behind, one.target_loss))
    return EqualTime(network, first, *means[network][first], {method: effect(some) for method, some in pairs.items()})


def ends(results: Sequence[PointResult], target: str) -> list[Reach]:
    """For every other run, the difference of its last loss from the target's, regardless of traffic.

    >>> ends([PointResult("a", {}, 0, {"loss": 2.5}), PointResult("b", {}, 0, {"loss": 2.75})], "a")
    [Reach(method='b', network='end', seed=0, ratio=None, behind=0.25, target_loss=2.5)]
    """

    def last(run: PointResult) -> float | None:
        loss = run.row["loss"]
        return loss if loss is not None and math.isfinite(loss) else None

    lasts = {run.seed: loss for run in results if run.method == target and (loss := last(run)) is not None}
    return [
        Reach(
            run.method,
            ENDS,
            run.seed,
            None,
            None if (loss := last(run)) is None else loss - lasts[run.seed],
            lasts[run.seed],
        )
        for run in results
        if run.method != target and run.seed in lasts
    ]


def has_only_final_losses(results: Sequence[PointResult]) -> bool:
    """Whether no run has a loss from before its end."""
    return all(len(curve) < 2 for run in results for curve in curves_of(run, paired=True).values())


def curves_of(run: PointResult, *, paired: bool) -> dict[str, Sequence[tuple[float, float]]]:
    """Losses of a run by seconds on each network; if `paired`, before these by sent bytes and by rounds."""
    more = {SENT: run.row["loss_at_bytes"], ROUNDS: run.row["loss_at_round"]} if paired else {}
    return {**more, **run.row["loss_at_s"]}


def paired_table(
    reaches: Sequence[Reach], target: str, *, margin: float | None = None, side: Side | None = None
) -> str:
    """The differences in loss as Markdown: each seed's, and their mean with its 95 % interval, in nats and in per cent.

    Args: as in `effect`; the one-sided tests of all methods are adjusted together (Holm).

    >>> print(paired_table([Reach("b", "lan", seed, None, 0.01 * seed, 2.0) for seed in (1, 2, 3)], "a"))
    | loss above a's, in its time on lan | each seed | mean, 95 % interval | in % |
    | --- | ---: | ---: | ---: |
    | b | +0.0100, +0.0200, +0.0300 | +0.0200 ± 0.0248 | +1.00 |
    <BLANKLINE>
    """
    parts = []
    for name in dict.fromkeys(one.network for one in reaches):
        here = [one for one in reaches if one.network == name and one.method != target]
        methods = [*dict.fromkeys(one.method for one in here)]
        arms = [
            [None if one.behind is None else (one.behind, one.target_loss) for one in here if one.method == method]
            for method in methods
        ]
        rows = [[method, *cells] for method, cells in zip(methods, effect_cells(arms, margin, side), strict=True)]
        places = {SENT: "at its sent bytes", ROUNDS: "after its rounds", ENDS: "at the end"}
        where = places.get(name, f"in its time on {name}")
        heads = [f"loss above {target}'s, {where}", *effect_heads(margin, side)]
        parts.append(markdown_numbers(heads, rows))
    return "\n".join(parts)
