"""A search over learning rates and outer settings: a pure function of losses, without files or training.

On the first rung runs a cross: the learning rates with the first pair (η, γ), then all pairs at the best learning rate, and then
whatever is missing of the cross through the best setting so far. Each arm grows where the best stands at its end. If there is a
final, the two best run again with more seeds, and the final decides between them.

There may be several rungs, of runs that become longer (successive halving): the best half of a rung, at most, continues to the
next, and the last decides. In place of the cross the first rung may run the product of learning rates and pairs, each pair with
its own best learning rate, as an outer step moves by η / (1 - γ) of a steady drift. Runs of a quarter of the length rank DiLoCo's
η the other way round than whole ones (docs/adr/0033).
"""

import math
from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from gossamer.errors import ConfigError

OuterPair = tuple[float, float]
"""Outer learning rate η and outer momentum γ."""
_ETA, _GAMMA = 0, 1  # of a pair
_LARGEST = 0.99  # no γ beyond it is tried
_NEIGHBOURHOOD = 3  # the best setting and its two neighbours, which confirm that it is the best
_FINALISTS = 2  # the top settings are close, and seeds may reverse them


class GridPoint(NamedTuple):
    """One point of the space."""

    doublings: int
    """Of the lowest learning rate of the grid; negative below it."""
    outer: OuterPair | None
    """None for a method without such a pair, or with a fixed one."""


class Trial(NamedTuple):
    """A setting on a rung, with all seeds."""

    setting: GridPoint
    rung: int
    """From 0; in the final one more than that of the last rung."""


class Space(NamedTuple):
    """The search space and its budget."""

    rates: int
    """Learning rates of the first grid, each twice the one before."""
    outers: tuple[OuterPair | None, ...]
    tokens: tuple[int, ...]
    """Of a trial on each rung."""
    budget: int
    """The most tokens of all trials together."""
    final: int = 0
    """Tokens of a trial in the final, beyond those of the last rung; 0 without a final."""
    cross: bool = True
    """Whether the first rung runs a cross in place of the product, whose η does not grow."""

    @property
    def first(self) -> int:
        """Trials of the first grid."""
        return self.rates + len(self.outers) - 1 if self.cross else self.rates * len(self.outers)

    def cost(self, trial: Trial) -> int:
        """The tokens of a trial."""
        return self.tokens[trial.rung] if trial.rung < len(self.tokens) else self.final


class SearchResult(NamedTuple):
    """The result of a search."""

    best: GridPoint | None
    """None if no trial of the final, or without one of the last rung, has a finite loss."""
    edges: tuple[str, ...]
    """The dimensions in which the best is at the edge of the tried range: "lr", "outer_lr", "momentum"; empty at an
    interior optimum.
    """
    spent: int


Search = Generator[tuple[Trial, ...], Mapping[Trial, float], SearchResult]
"""A generator that yields trials, receives their losses, and returns the result."""


def needed_tokens(space: Space) -> int:
    """The smallest budget: the grid on the first rung, the best with its two neighbours on each further one, and the final."""
    return space.first * space.tokens[0] + _NEIGHBOURHOOD * sum(space.tokens[1:]) + _FINALISTS * space.final


def search(space: Space) -> Search:
    """Yields batches of trials until the budget is spent or the search is complete; deterministic in the losses.

    The rungs share what a final leaves of the budget equally, and a rung keeps enough for the neighbourhood of the best on those
    after it. A loss that is not finite ranks last.

    Raises: ConfigError for a budget below `needed_tokens`.
    Cost: no more tokens than the budget.
    Source: successive halving, arXiv 1502.07943; a grid that grows until its optimum is interior, arXiv 2503.09799.
    Fails when: with several rungs, short runs rank the settings differently than long ones; with a cross, the best pair
        at the first learning rates is not the best at the optimal one.

    >>> asked = search(Space(rates=2, outers=(None,), tokens=(1, 4), budget=30))
    >>> [trial.setting.doublings for trial in next(asked)]
    [0, 1]
    >>> asked.send({Trial(GridPoint(0, None), 0): 2.0, Trial(GridPoint(1, None), 0): 1.0})  # the edge of the grid
    (Trial(setting=GridPoint(doublings=2, outer=None), rung=0),)
    """
    if space.budget < (least := needed_tokens(space)):
        parts = [f"{space.first} settings on the first rung"]
        parts += ["three on each further one"] if len(space.tokens) > 1 else []
        parts += ["two in the final"] if space.final else []
        raise ConfigError(
            f"the budget is {space.budget:,} tokens, but {' and '.join(parts)} take {least:,}; raise tune.budget_tokens, "
            f"shorten tune.lr, tune.outer{', tune.seeds or tune.final_seeds' if space.final else ' or tune.seeds'}, or lower "
            "run.steps"
        )
    state = _State(space)
    pairs = space.outers[:1] if space.cross else space.outers
    wanted: Iterable[GridPoint] = [GridPoint(k, outer) for outer in pairs for k in range(space.rates)]
    for rung in range(len(space.tokens)):
        while trials := state.affordable(wanted, rung):
            losses = yield trials
            state.losses |= {trial: _rank(losses[trial]) for trial in trials}
            wanted = state.beyond(rung)
        wanted = state.survivors(rung)
    while final := state.final():
        losses = yield final
        state.losses |= {trial: _rank(losses[trial]) for trial in final}
    return state.result()


def _rank(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


class _State:
    """The losses so far, in the order of their trials."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self.losses: dict[Trial, float] = {}

    def affordable(self, settings: Iterable[GridPoint], rung: int) -> tuple[Trial, ...]:
        """The trials of these settings on a rung that have not run, within the budget."""
        new = [trial for setting in dict.fromkeys(settings) if (trial := Trial(setting, rung)) not in self.losses]
        return tuple(new[: self._left(rung) // self._space.tokens[rung]])

    def beyond(self, rung: int) -> list[GridPoint]:
        """The settings that may be better than the leading ones, which are the best, or those of the final: what is missing of a
        cross through them, or their neighbours, and on the first rung of a product those of the best of each pair."""
        ranked = self._ranked(rung)
        leading = self._without_diverged(ranked[: self._leaders(rung)], rung)
        if self._space.cross:
            return self._beyond_a_cross(rung, leading or ranked[:1])
        pairs = self._without_diverged(self._best_of_each(rung), rung) if rung == 0 else []
        settings = [
            near for one in dict.fromkeys([*leading, *pairs] or ranked[:1]) for near in self._neighbours(one, rung)
        ]
        # A larger γ moves further, so the learning rate may be halved with it, and doubled with a smaller one.
        for one in leading:
            settings += [
                GridPoint(one.doublings + k, pair) for pair, way in self._beyond_edges(one, _GAMMA) for k in (0, -way)
            ]
        return settings

    def _beyond_a_cross(self, rung: int, leading: list[GridPoint]) -> list[GridPoint]:
        """What is missing around the best, and then around the second; before that the pairs of the first grid, each once."""
        tried = {trial.setting.outer for trial in self.losses}
        if new := [pair for pair in self._space.outers if pair not in tried]:
            best = self._without_diverged(leading[:1], rung)
            return [GridPoint(one.doublings, pair) for one in best for pair in new] or self._neighbours(
                leading[0], rung
            )
        for one in leading:
            # Pairs are tried on the first rung alone: a later one has those that it leaves.
            outer = rung == 0 and self._without_diverged([one], rung)
            around = [*self._untried_next_to(one, _ETA), *self._untried_next_to(one, _GAMMA)] if outer else []
            if missing := [*self._neighbours(one, rung), *around]:
                return missing
        return []

    def survivors(self, rung: int) -> list[GridPoint]:
        """The settings for the next rung: the best, its neighbours, and the others in their order, at most half of them all."""
        if rung + 1 == len(self._space.tokens):
            return []
        ranked = self._ranked(rung)
        # Reserves one neighbourhood in case the best moves.
        share = self._left(rung + 1) // self._space.tokens[rung + 1] - (_NEIGHBOURHOOD - 1)
        many = max(_NEIGHBOURHOOD, min(share, math.ceil(len(ranked) / 2)))
        best = ranked[0]
        around = [
            near for k in (-1, 1) if Trial(near := GridPoint(best.doublings + k, best.outer), rung) in self.losses
        ]
        return [*dict.fromkeys([best, *around, *self._without_diverged(ranked[1:], rung)])][:many]

    def final(self) -> tuple[Trial, ...]:
        """The next trials of the final: of the two best settings of the last rung, and while all diverged of the next two."""
        rungs = len(self._space.tokens)
        if not self._space.final or self._without_diverged(self._ranked(rungs), rungs):
            return ()
        trials = [Trial(one, rungs) for one in self._without_diverged(self._ranked(rungs - 1), rungs - 1)]
        left = (self._space.budget - self._spent_tokens(rungs + 1)) // self._space.final
        return tuple([trial for trial in trials if trial not in self.losses][: min(_FINALISTS, left)])

    def result(self) -> SearchResult:
        """The best of the final, and without one of the last rung."""
        last = len(self._space.tokens) - 1
        deciding = max(trial.rung for trial in self.losses)
        best = self._ranked(deciding)[0]
        spent = self._spent_tokens(deciding + 1)
        if not math.isfinite(self.losses[Trial(best, deciding)]):
            return SearchResult(None, (), spent)
        edges = ["lr"] if self._neighbours(best, last) else []
        for name, which in (("outer_lr", _ETA), ("momentum", _GAMMA)):
            if self._untried_next_to(best, which) if self._space.cross else self._beyond_edges(best, which):
                edges.append(name)
        return SearchResult(best, tuple(edges), spent)

    def _spent_tokens(self, rungs: int) -> int:
        """The tokens of all trials on the first so many rungs."""
        return sum(self._space.cost(trial) for trial in self.losses if trial.rung < rungs)

    def _left(self, rung: int) -> int:
        """The tokens that a rung may still spend: up to its share of the budget, and what it needs at least."""
        space = self._space
        budget = space.budget - _FINALISTS * space.final
        before, fair = self._spent_tokens(rung), budget * (rung + 1) // len(space.tokens)
        grid = space.first if rung == 0 else _NEIGHBOURHOOD
        kept = _NEIGHBOURHOOD * sum(space.tokens[rung + 1 :])
        return min(budget - kept, max(fair, before + grid * space.tokens[rung])) - self._spent_tokens(rung + 1)

    def _leaders(self, rung: int) -> int:
        """How many settings lead a rung: those that go to a final, or the best alone."""
        return _FINALISTS if self._space.final and rung == len(self._space.tokens) - 1 else 1

    def _without_diverged(self, settings: Iterable[GridPoint], rung: int) -> list[GridPoint]:
        """Those that have not diverged."""
        return [one for one in settings if math.isfinite(self.losses[Trial(one, rung)])]

    def _ranked(self, rung: int) -> list[GridPoint]:
        """The settings of a rung from the best on; equal ones in the order in which they were tried."""
        here = [trial for trial in self.losses if trial.rung == rung]
        return [trial.setting for trial in sorted(here, key=lambda trial: self.losses[trial])]

    def _best_of_each(self, rung: int) -> list[GridPoint]:
        """The best setting of each pair, the best pair first."""
        best: dict[OuterPair | None, GridPoint] = {}
        for setting in self._ranked(rung):
            best.setdefault(setting.outer, setting)
        return [*best.values()]

    def _neighbours(self, setting: GridPoint, rung: int) -> list[GridPoint]:
        """The next learning rates that were not tried on a rung; where all diverged only the next below all."""
        k, outer = setting
        if not math.isfinite(self.losses[Trial(setting, rung)]):
            lowest = min(trial.setting.doublings for trial in self.losses if trial.setting.outer == outer)
            return [GridPoint(lowest - 1, outer)]
        return [near for step in (-1, 1) if Trial(near := GridPoint(k + step, outer), rung) not in self.losses]

    def _tried(self, which: int) -> list[float]:
        """All η or γ so far, and those of the first grid."""
        pairs = [*self._space.outers, *(trial.setting.outer for trial in self.losses)]
        return [pair[which] for pair in pairs if pair is not None]

    def _beyond_edges(self, setting: GridPoint, which: int) -> list[tuple[OuterPair, int]]:
        """The pair with the next η or γ where that of a setting is the largest tried (1), and the smallest (-1)."""
        plain = not any(pair[_GAMMA] for pair in self._space.outers if pair)
        if setting.outer is None or (plain and which == _GAMMA):  # a grid without momentum stays without
            return []
        value_here, tried = setting.outer[which], self._tried(which)
        ends = []
        for way in [way for way, end in ((1, max(tried)), (-1, min(tried))) if value_here == end]:
            if (value := _next(value_here, which, way)) is not None:
                ends.append((_with(setting.outer, which, value), way))
        return ends

    def _untried_next_to(self, setting: GridPoint, which: int) -> list[GridPoint]:
        """The pairs with the next η or γ on both sides of a setting's that have not run with its learning rate."""
        if setting.outer is None:
            return []
        values = sorted({*self._tried(which)})
        at = values.index(setting.outer[which])
        neighbours = [_with(setting.outer, which, values[k]) for k in (at - 1, at + 1) if 0 <= k < len(values)]
        pairs = [*neighbours, *(pair for pair, _ in self._beyond_edges(setting, which))]
        known = {trial.setting for trial in self.losses}
        return [near for pair in pairs if (near := GridPoint(setting.doublings, pair)) not in known]


def _with(pair: OuterPair, which: int, value: float) -> OuterPair:
    return (value, pair[_GAMMA]) if which == _ETA else (pair[_ETA], value)


def _next(value: float, which: int, way: int) -> float | None:
    """The next η, a power of √2, or the next γ, with half of 1 - γ or twice as much; None where there is none."""
    if which == _ETA:
        return float(f"{2 ** ((round(2 * math.log2(value)) + way) / 2):.2g}")
    if way > 0:
        return round((1 + value) / 2, 6) if value < _LARGEST else None
    return round(max(0.0, 2 * value - 1), 6) if value > 0 else None
