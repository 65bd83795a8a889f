"""Successive halving over learning rates and outer settings: a function of losses that reads no files and trains nothing.

Rung r runs every setting for the same number of tokens, fewer than the next. All settings of the grid run on the first; the
best half, at most, goes on to the next, until the last, whose losses alone decide. On every rung the grid grows where the best
setting stands at its edge. If there is a final, the two best of the last rung run again with more seeds, and the final decides
between them. As an outer momentum γ and a learning rate trade against each other (an outer step moves by η / (1 - γ) of a
steady drift), every pair (η, γ) gets its own best learning rate on the first rung.
"""

import math
from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from gossamer.errors import ConfigError

__all__ = ["Found", "GridPoint", "OuterPair", "Search", "Space", "Trial", "needed_tokens", "search"]

OuterPair = tuple[float, float]
"""Outer learning rate η and outer momentum γ."""
_LARGEST = 0.99  # no γ beyond it is tried
_NEIGHBOURHOOD = 3  # the best setting and its two neighbours, without which nobody knows that it is the best
_FINALISTS = 2  # seeds reverse close settings, which are the first ones


class GridPoint(NamedTuple):
    """One point of the space."""

    doublings: int
    """Of the lowest learning rate of the grid; negative below it."""
    outer: OuterPair | None
    """None for a method that has no such pair, or is to keep its own."""


class Trial(NamedTuple):
    """A setting on a rung, with all seeds."""

    setting: GridPoint
    rung: int
    """From 0; in the final one more than that of the last rung."""


class Space(NamedTuple):
    """What is searched, and what it may cost."""

    rates: int
    """Learning rates of the first grid, each twice the one before."""
    outers: tuple[OuterPair | None, ...]
    tokens: tuple[int, ...]
    """Of a trial on each rung."""
    budget: int
    """The most tokens of all trials together."""
    final: int = 0
    """Tokens of a trial in the final, beyond those of the last rung; 0 without a final."""
    grow_outer_lr: bool = True
    """Whether η grows and shrinks at its edge too; if not, only the learning rate and γ do."""

    def cost(self, trial: Trial) -> int:
        """The tokens of a trial."""
        return self.tokens[trial.rung] if trial.rung < len(self.tokens) else self.final


class Found(NamedTuple):
    """What a search found."""

    best: GridPoint | None
    """None if no trial of the final, or without one of the last rung, has a finite loss."""
    edges: tuple[str, ...]
    """Where the best stands at the edge of what was tried: "lr", "outer_lr", "momentum"; empty at an interior optimum."""
    spent: int


Search = Generator[tuple[Trial, ...], Mapping[Trial, float], Found]
"""Yields trials to run, takes their losses, and returns what it found."""


def needed_tokens(space: Space) -> int:
    """The smallest budget: the grid on the first rung, the best with its two neighbours on each further one, and the final."""
    grid = space.rates * len(space.outers) * space.tokens[0]
    return grid + _NEIGHBOURHOOD * sum(space.tokens[1:]) + _FINALISTS * space.final


def search(space: Space) -> Search:
    """Yields batches of trials until the budget or the questions end; equal losses lead to equal trials and the same choice.

    The rungs share what a final leaves of the budget equally, and a rung keeps enough for the neighbourhood of the best on those
    after it. A loss that is not finite ranks last.

    Raises: ConfigError for a budget below `needed_tokens`.
    Cost: no more tokens than the budget.
    Source: successive halving, arXiv 1502.07943; a grid that grows until its optimum is interior, arXiv 2503.09799.
    Fails when: short runs rank the settings otherwise than long ones, as large learning rates and momenta pay late.

    >>> asked = search(Space(rates=2, outers=(None,), tokens=(1, 4), budget=30))
    >>> [trial.setting.doublings for trial in next(asked)]
    [0, 1]
    >>> asked.send({Trial(GridPoint(0, None), 0): 2.0, Trial(GridPoint(1, None), 0): 1.0})  # the edge of the grid
    (Trial(setting=GridPoint(doublings=2, outer=None), rung=0),)
    """
    if space.budget < (least := needed_tokens(space)):
        raise ConfigError(
            f"the budget is {space.budget:,} tokens, but the grid on the first rung, three settings on each further one"
            f"{' and two in the final' if space.final else ''} take {least:,}; raise tune.budget_tokens, shorten tune.lr, "
            f"tune.outer{', tune.seeds or tune.final_seeds' if space.final else ' or tune.seeds'}, or lower run.steps"
        )
    state = _State(space)
    wanted: Iterable[GridPoint] = [GridPoint(k, outer) for outer in space.outers for k in range(space.rates)]
    for rung in range(len(space.tokens)):
        while trials := state.affordable(wanted, rung):
            losses = yield trials
            state.losses |= {trial: _rank(losses[trial]) for trial in trials}
            wanted = state.beyond(rung)
        wanted = state.survivors(rung)
    while final := state.final():
        losses = yield final
        state.losses |= {trial: _rank(losses[trial]) for trial in final}
    return state.found()


def _rank(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


class _State:
    """The losses so far, in the order of their trials."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self.losses: dict[Trial, float] = {}

    def affordable(self, settings: Iterable[GridPoint], rung: int) -> tuple[Trial, ...]:
        """The trials of these settings on a rung that have not run, as many as it can pay for."""
        new = [trial for setting in dict.fromkeys(settings) if (trial := Trial(setting, rung)) not in self.losses]
        return tuple(new[: self._left(rung) // self._space.tokens[rung]])

    def beyond(self, rung: int) -> list[GridPoint]:
        """The neighbours that may be better than the leading settings: the best, or those of the final, and on the first rung the
        best of each pair."""
        ranked = self._ranked(rung)
        leading = self._sound(ranked[: self._leaders(rung)], rung)
        pairs = self._sound(self._best_of_each(rung), rung) if rung == 0 else []
        found = [
            near for one in dict.fromkeys([*leading, *pairs] or ranked[:1]) for near in self._neighbours(one, rung)
        ]
        further = [near for one in leading for near in self._further_steps(one)] if self._space.grow_outer_lr else []
        return found + further + [near for one in leading for near in self._more_momentum(one)]

    def survivors(self, rung: int) -> list[GridPoint]:
        """The settings for the next rung: the best, its neighbours, and the others in their order, at most half of them all."""
        if rung + 1 == len(self._space.tokens):
            return []
        ranked = self._ranked(rung)
        # One neighbourhood is kept for a best that moves.
        share = self._left(rung + 1) // self._space.tokens[rung + 1] - (_NEIGHBOURHOOD - 1)
        many = max(_NEIGHBOURHOOD, min(share, math.ceil(len(ranked) / 2)))
        best = ranked[0]
        around = [
            near for k in (-1, 1) if Trial(near := GridPoint(best.doublings + k, best.outer), rung) in self.losses
        ]
        return [*dict.fromkeys([best, *around, *self._sound(ranked[1:], rung)])][:many]

    def final(self) -> tuple[Trial, ...]:
        """The next trials of the final: of the two best settings of the last rung, and while all diverged of the next two."""
        rungs = len(self._space.tokens)
        if not self._space.final or self._sound(self._ranked(rungs), rungs):
            return ()
        trials = [Trial(one, rungs) for one in self._sound(self._ranked(rungs - 1), rungs - 1)]
        left = (self._space.budget - self._spent(rungs + 1)) // self._space.final
        return tuple([trial for trial in trials if trial not in self.losses][: min(_FINALISTS, left)])

    def found(self) -> Found:
        """The best of the final, and without one of the last rung."""
        last = len(self._space.tokens) - 1
        deciding = max(trial.rung for trial in self.losses)
        best = self._ranked(deciding)[0]
        spent = self._spent(deciding + 1)
        if not math.isfinite(self.losses[Trial(best, deciding)]):
            return Found(None, (), spent)
        open_ends = {
            "lr": self._neighbours(best, last), "outer_lr": self._further_steps(best), "momentum": self._more_momentum(best),
        }  # fmt: skip
        return Found(best, tuple(name for name, settings in open_ends.items() if settings), spent)

    def _spent(self, rungs: int) -> int:
        """The tokens of all trials on the first so many rungs."""
        return sum(self._space.cost(trial) for trial in self.losses if trial.rung < rungs)

    def _left(self, rung: int) -> int:
        """The tokens that a rung may still spend: up to its share of the budget, and what it needs at least."""
        space = self._space
        budget = space.budget - _FINALISTS * space.final
        before, fair = self._spent(rung), budget * (rung + 1) // len(space.tokens)
        grid = space.rates * len(space.outers) if rung == 0 else _NEIGHBOURHOOD
        kept = _NEIGHBOURHOOD * sum(space.tokens[rung + 1 :])
        return min(budget - kept, max(fair, before + grid * space.tokens[rung])) - self._spent(rung + 1)

    def _leaders(self, rung: int) -> int:
        """How many settings lead a rung: those that go to a final, or the best alone."""
        return _FINALISTS if self._space.final and rung == len(self._space.tokens) - 1 else 1

    def _sound(self, settings: Iterable[GridPoint], rung: int) -> list[GridPoint]:
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

    def _further_steps(self, setting: GridPoint) -> list[GridPoint]:
        """The pair with the next η, a power of √2, where that of the best is the largest or the smallest tried."""
        if setting.outer is None:
            return []
        lr, momentum = setting.outer
        tried = self._tried(0)
        ways = [way for way, end in ((1, max(tried)), (-1, min(tried))) if lr == end]
        power = round(2 * math.log2(lr))
        return [GridPoint(setting.doublings, (float(f"{2 ** ((power + way) / 2):.2g}"), momentum)) for way in ways]

    def _tried(self, which: int) -> list[float]:
        """All η (0) or γ (1) so far."""
        return [trial.setting.outer[which] for trial in self.losses if trial.setting.outer is not None]

    def _more_momentum(self, setting: GridPoint) -> list[GridPoint]:
        """The pair with the next γ where that of the best is the largest or the smallest tried.

        1 - γ is halved or doubled, and at the same time the learning rate may be, as a larger γ moves further.
        """
        if setting.outer is None:
            return []
        lr, momentum = setting.outer
        tried = self._tried(1)
        found = []
        if momentum == max(tried) and momentum < _LARGEST:
            found.append(((lr, round((1 + momentum) / 2, 6)), -1))
        if momentum == min(tried) and momentum > 0:
            found.append(((lr, round(max(0.0, 2 * momentum - 1), 6)), 1))
        return [GridPoint(setting.doublings + step, outer) for outer, way in found for step in (0, way)]
