"""Goodput of a run whose chips fail: the share of all chip time whose training steps count, for four ways to train.

* all-reduce: one learner; each interruption of a chip restarts the whole run from its last checkpoint.
* elastic: one learner, which pauses for a short time and then continues with the remaining chips.
* decoupled: M elastic learners; while one of them is down the others keep training.
* gossip: every worker of a few chips is its own learner, which restarts from the parameters of its peers.

A closed form and a simulation of the same model check each other.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from gossamer.errors import ConfigError, choose
from gossamer.network.links import Floats
from gossamer.rng import numpy_rng
from gossamer.settings.options import Count, NotNegative, Portion, Positive, check_values
from gossamer.settings.schema import settings

Settings = TypeVar("Settings")


def ensure(what: str, value: object, holds: bool, allowed: str) -> None:
    """Raises ConfigError unless the condition holds; `allowed` describes the accepted values."""
    if not holds:
        raise ConfigError(f"{what} is {value!r} but must be {allowed}")


def build_settings(
    kind: type[Settings], options: Mapping[str, Any], what: str = "option", *, without: Collection[str] = ()
) -> Settings:
    """A settings dataclass from options that a user named.

    Args: `what` is the word for an option in messages; `without` names fields that a user cannot write.
    Raises: ConfigError for a name that the dataclass does not have, or for a value that it refuses.
    """
    names = [field.name for field in fields(kind) if field.name not in without]  # pyright: ignore[reportArgumentType]
    for name in options:
        if name not in names:
            raise ConfigError(choose(what, name, names))
    return kind(**options)


YEAR_S = 365 * 86400.0
CHIPS: Floats = np.logspace(4, 7, 61)
"""The numbers of chips of `goodput_curves`."""
CHIPS.flags.writeable = False
_REPEATS = 8


_Between = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""Mean seconds between two interruptions, infinite if there are none."""
_Interval = Annotated[float, Field(ge=0, allow_inf_nan=True)]


def goodput(mtbf_s: float, down_s: float, *, interval_s: float = 0.0, checkpoint_s: float = 0.0) -> float:
    """The share of time whose training is kept: `τ / ((F + T) (exp((τ + c)/F) - 1))`, with τ = c = 0 `F / (F + T)`.

    The learner is interrupted after a time of mean F, exponentially distributed, and is then down for T. Every τ
    seconds of training it writes a checkpoint in c seconds. An interruption loses the training since the last
    checkpoint.

    Args:
        mtbf_s: F, the mean time to the next interruption of a learner that trains; inf for one that never fails.
        down_s: T; a further interruption in this time does not prolong it.
        interval_s: τ; 0 with `checkpoint_s` = 0 for a learner that loses no work.
        checkpoint_s: c.
    Raises: ConfigError for a number out of bounds.
    Source: renewal theory; with T = 0 it is the expected time of J. T. Daly, Future Generation Computer Systems 22 (2006).
    Differs: in Daly's form interruptions during a restart begin it again, so that F + T is F exp(T/F).
    Fails when: interruptions come in groups, as those of a rack or a network do.

    >>> goodput(100.0, 25.0), goodput(math.inf, 25.0), round(goodput(3600.0, 300.0, interval_s=600.0, checkpoint_s=20.0), 3)
    (0.8, 1.0, 0.819)
    """
    check_values(_Between, mtbf_s=mtbf_s)
    check_values(NotNegative, down_s=down_s, checkpoint_s=checkpoint_s)
    check_values(_Interval, interval_s=interval_s)
    ensure("interval_s", interval_s, interval_s > 0 or checkpoint_s == 0, "above 0, as each checkpoint takes time")
    if mtbf_s == math.inf:
        return 1.0 if interval_s in (0, math.inf) else interval_s / (interval_s + checkpoint_s)
    segments = (interval_s + checkpoint_s) / mtbf_s
    if segments == 0:
        return mtbf_s / (mtbf_s + down_s)
    return interval_s * math.exp(-segments) / (-math.expm1(-segments) * (mtbf_s + down_s))


def best_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """The seconds of training between two checkpoints that give the highest `goodput`, whatever the downtime.

    It solves `exp((τ + c)/F) (1 - τ/F) = 1`. Young's τ = √(2cF) is the limit for c ≪ F, and is never below it.

    Args: as `goodput`.
    Raises: ConfigError for a number out of bounds.
    Source: J. W. Young, Communications of the ACM 17 (1974); Daly, as in `goodput`, approximates the solution.

    >>> round(best_interval_s(3600.0, 20.0), 1), round((2 * 20 * 3600) ** 0.5, 1), best_interval_s(3600.0, 0.0)
    (366.3, 379.5, 0.0)
    """
    check_values(_Between, mtbf_s=mtbf_s)
    check_values(NotNegative, checkpoint_s=checkpoint_s)
    if checkpoint_s == 0 or mtbf_s == math.inf:
        return checkpoint_s and math.inf
    cost = checkpoint_s / mtbf_s
    # The root of -ln(1 - s) - s - cost, which is convex: from these bounds above it, Newton's steps only descend.
    below_one = math.nextafter(1.0, 0.0)
    share = min(math.sqrt(2 * cost), -math.expm1(-1 - cost), below_one)
    for _ in range(60):
        share = min(share - (1 - share) / share * (-math.log1p(-share) - share - cost), below_one)
    return share * mtbf_s


def uptime(available: float, learners: int) -> float:
    """The share of the time that at least one of M learners trains, each for a share `available`: `1 - (1 - a)^M`.

    Raises: ConfigError for a number out of bounds.

    >>> uptime(0.7, learners=1), round(uptime(0.7, learners=4), 4)
    (0.7, 0.9919)
    """
    check_values(Portion, available=available)
    check_values(Count, learners=learners)
    return available if learners == 1 else -math.expm1(learners * math.log1p(-available)) if available < 1 else 1.0


@settings("")
class GoodputOptions:
    """A cluster and what an interruption costs on it.

    Raises: ConfigError for a number out of bounds.
    """

    chips: Count = 1_200_000
    """Chips of the whole run (N)."""
    mtbi_s: _Between = YEAR_S
    """Mean time between two interruptions of one chip; inf for chips that never fail."""
    learners: Count = 8
    """Learners of decoupled training (M), each of N/M chips."""
    worker_chips: Count = 8
    """Chips of a gossip worker."""
    restart_s: NotNegative = 72.0
    """Seconds from an interruption until an all-reduce run, or a gossip worker, trains again."""
    downtime_s: NotNegative = 22.6
    """Seconds from an interruption until an elastic learner trains again."""
    catch_up_s: NotNegative = 0.0
    """Seconds that an elastic learner, or a gossip worker, then needs to fetch state from others."""
    checkpoint_s: NotNegative = 0.0
    """Seconds of a checkpoint, for which all-reduce stops."""
    interval_s: Positive | None = None
    """Seconds of training between two checkpoints of all-reduce; None for `best_interval_s`."""
    interruptions: Count = 100_000
    """Interruptions of chips in the simulation."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (("chips", self.chips, 10**12), ("interruptions", self.interruptions, 10**7)):
            ensure(name, value, value <= most, f"at most {most}")
        for name, parts in (("learners", self.learners), ("worker_chips", self.worker_chips)):
            ensure(name, parts, self.chips % parts == 0, f"a divisor of the {self.chips} chips, so that all are equal")


class Group(NamedTuple):
    """Equal learners that share all chips, and the cost of an interruption of one."""

    method: str
    learners: float
    mtbf_s: float
    """Mean time to the next interruption of one learner."""
    down_s: float
    interval_s: float = 0.0
    checkpoint_s: float = 0.0

    @property
    def goodput(self) -> float:
        """The result of the function `goodput`."""
        return goodput(self.mtbf_s, self.down_s, interval_s=self.interval_s, checkpoint_s=self.checkpoint_s)

    def kept_s(self, trained_s: float) -> float:
        """The training that is kept from the end of a downtime to an interruption."""
        cycle_s = self.interval_s + self.checkpoint_s
        return math.floor(trained_s / cycle_s) * self.interval_s if cycle_s else trained_s


def fleets(options: GoodputOptions, chips: float | None = None) -> tuple[Group, ...]:
    """The four ways to train on the chips of the options, or on another number of them."""
    o, n = options, options.chips if chips is None else chips
    whole_s, again_s = o.mtbi_s / n, o.downtime_s + o.catch_up_s
    interval_s = best_interval_s(whole_s, o.checkpoint_s) if o.interval_s is None else o.interval_s
    return (
        Group("all_reduce", 1, whole_s, o.restart_s, interval_s, o.checkpoint_s),
        Group("elastic", 1, whole_s, again_s),
        Group("decoupled", o.learners, whole_s * o.learners, again_s),
        Group("gossip", n / o.worker_chips, o.mtbi_s / o.worker_chips, o.restart_s + o.catch_up_s),
    )


class Failures(NamedTuple):
    """Interruptions of chips, in the order of time."""

    at_s: Floats
    chip: np.ndarray
    chips: int

    @property
    def end_s(self) -> float:
        """The time of the last interruption, which ends the simulation."""
        return float(self.at_s[-1])


def draw_failures(chips: int, mtbi_s: float, count: int, seed: int, repeat: int = 0) -> Failures:
    """The first interruptions of chips that fail independently, each as a Poisson process; a pure function of its arguments."""
    drawn = numpy_rng(seed, "goodput", repeat)
    return Failures(np.cumsum(drawn.exponential(mtbi_s / chips, count)), drawn.integers(chips, size=count), chips)


class Simulated(NamedTuple):
    """The results of a simulation."""

    goodput: float
    error: float
    """Standard error of the goodput."""
    uptime: float


def simulated_goodput(group: Group, failures: Failures) -> tuple[float, float]:
    """Goodput and uptime of learners under these interruptions, one after the other.

    Cost: a microsecond for each interruption.
    """
    learners, size = round(group.learners), failures.chips // round(group.learners)
    back_s: dict[int, float] = {}
    kept_s, stops = 0.0, []
    for at_s, learner in zip(failures.at_s.tolist(), (failures.chip // size).tolist(), strict=True):
        since_s = back_s.get(learner, 0.0)
        if at_s >= since_s:  # else it is already down
            kept_s += group.kept_s(at_s - since_s)
            stops.append(at_s)
            back_s[learner] = at_s + group.down_s
    end_s = failures.end_s
    kept_s += sum(group.kept_s(max(0.0, end_s - since_s)) for since_s in back_s.values())
    kept_s += (learners - len(back_s)) * group.kept_s(end_s)
    return kept_s / learners / end_s, 1 - _all_down_s(np.array(stops), group.down_s, end_s, learners) / end_s


def _all_down_s(stops: Floats, down_s: float, end_s: float, learners: int) -> float:
    """Seconds in which all learners are down."""
    edges_s = np.concatenate([stops, np.minimum(stops + down_s, end_s)])
    order = np.argsort(edges_s, kind="stable")
    standing = np.cumsum(np.where(order < len(stops), 1, -1))
    return float(np.diff(edges_s[order])[standing[:-1] == learners].sum())


class Goodput(NamedTuple):
    """A row of `goodput_table`."""

    method: str
    learners: int
    mtbf_s: float
    """Mean time to the next interruption of one learner."""
    down_s: float
    """Seconds of its downtime."""
    interval_s: float
    """Training between two checkpoints; 0 where no work is lost."""
    goodput: float
    """By the closed form."""
    uptime: float
    """The share of the time in which at least one learner trains, by the closed form."""
    simulated: Simulated


class GoodputTable(NamedTuple):
    """The goodput of each way to train."""

    rows: tuple[Goodput, ...]
    assumptions: tuple[str, ...]
    """Assumptions, a sentence each, printed with the numbers."""


def goodput_table(options: GoodputOptions = GoodputOptions()) -> GoodputTable:
    """Goodput and uptime of the four ways to train, by the closed form and simulated under the same interruptions.

    Cost: about half a second with the default number of interruptions.
    """
    drawn: list[Failures] = []
    if options.mtbi_s < math.inf:
        each = -(-options.interruptions // _REPEATS)
        drawn = [draw_failures(options.chips, options.mtbi_s, each, options.seed, i) for i in range(_REPEATS)]
    rows = tuple(
        Goodput(
            group.method,
            round(group.learners),
            group.mtbf_s,
            group.down_s,
            group.interval_s,
            group.goodput,
            uptime(goodput(group.mtbf_s, group.down_s), round(group.learners)),
            _simulated(group, drawn),
        )
        for group in fleets(options)
    )
    return GoodputTable(rows, _assumptions(options))


def _simulated(group: Group, drawn: Sequence[Failures]) -> Simulated:
    if not drawn:
        return Simulated(group.goodput, 0.0, 1.0)
    shares = np.array([simulated_goodput(group, failures) for failures in drawn])
    error = shares[:, 0].std(ddof=1) / math.sqrt(len(shares))
    return Simulated(float(shares[:, 0].mean()), float(error), float(shares[:, 1].mean()))


def _assumptions(options: GoodputOptions) -> tuple[str, ...]:
    o = options
    return (
        f"{o.chips} chips, each interrupted independently and on average once in {o.mtbi_s / 86400:.4g} days",
        f"all-reduce restarts in {o.restart_s:g} s, and stops for {o.checkpoint_s:g} s to write a checkpoint; it loses what came "
        "after the last one",
        f"an elastic learner stands still for {o.downtime_s:g} s and waits {o.catch_up_s:g} s for the state; it loses no step",
        f"a gossip worker of {o.worker_chips} chips restarts in {o.restart_s:g} s and waits {o.catch_up_s:g} s for the state",
        "an interruption of a learner that stands still does not prolong that",
        "what learners send each other costs no time, and a learner with fewer chips is as fast as before",
        f"the simulation has {o.interruptions} interruptions of chips",
    )


def goodput_curves(
    options: GoodputOptions = GoodputOptions(), chips: Sequence[float] | Floats = CHIPS
) -> dict[str, list[tuple[float, float]]]:
    """Goodput by the closed form against the number of chips, as points to draw, for each way to train."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for n in chips:
        for group in fleets(options, float(n)):
            curves.setdefault(group.method, []).append((float(n), group.goodput))
    return curves


GOODPUT_HEADINGS = (
    "method",
    "learners",
    "interrupted every (s)",
    "down (s)",
    "goodput",
    "simulated",
    "at least one trains",
)
"""Headings of the columns of `goodput_rows`."""


def goodput_rows(table: GoodputTable) -> list[tuple[str, ...]]:
    """The rows as text, for a table under `GOODPUT_HEADINGS`."""
    return [
        (
            row.method,
            str(row.learners),
            f"{row.mtbf_s:.4g}",
            f"{row.down_s:g}",
            _share_text(row.goodput),
            f"{_share_text(row.simulated.goodput)} ± {100 * row.simulated.error:.1f}",
            _share_text(row.uptime),
        )
        for row in table.rows
    ]


def _share_text(share: float) -> str:
    """A share in percent; one that rounds to all has more digits."""
    if share < 0.9995 or share == 1:
        return f"{share:.1%}"
    return f"{min(share, 0.999999):.4%}"
