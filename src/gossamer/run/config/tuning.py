"""The `[tune]` table of an experiment file."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from gossamer.settings.fields import Words
from gossamer.settings.options import Count, Decay, Positive, Share
from gossamer.settings.schema import settings

__all__ = ["OuterValues", "Positive", "TuneConfig"]

OuterValues = tuple[Positive, Decay]


@settings("tune")
class TuneConfig:
    """The `[tune]` table of an experiment file: what `gossamer tune` tries for each method, and with how many tokens."""

    budget_tokens: Count
    """The most tokens that one method may train on, all its runs together; the same for every method."""
    lr: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """The first grid of `inner.lr`, each twice the one before. It grows where the best is at its edge."""
    outer: Annotated[
        tuple[OuterValues, ...], Words("a list of pairs [η, γ] with η above 0 and γ from 0 to below 1")
    ] = (
        (0.7, 0.5),
        (1.0, 0.5),
        (0.7, 0.7),
        (1.0, 0.0),
    )
    """Outer learning rates and momenta (η, γ) of methods that have both, and beyond them where the best is at their edge. A
    method with an empty list keeps its own."""
    grid: Literal["cross", "product"] = "cross"
    """"cross": each `inner.lr` with the first pair, each pair at the best of them, and then what is missing around the best;
    "product": each `inner.lr` with each pair, and η takes these values only."""
    rungs: Annotated[tuple[Share, ...], Field(min_length=1)] = (1.0,)
    """Lengths of the runs as shares of the whole run, from the first rung of successive halving to the last, which is 1. Runs
    of a quarter of the length, which cost less, ranked η the other way round than whole ones."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    """Every setting is run with each of them, and judged by the mean."""
    final_seeds: tuple[int, ...] = ()
    """With these the two best settings of the last rung are run again, and the mean decides between them; empty for no final. A
    seed that a setting has been run with is not run again."""

    def __post_init__(self) -> Iterator[str]:
        if any(abs(high / low - 2) > 1e-6 for low, high in zip(self.lr, self.lr[1:], strict=False)):
            yield (
                f"tune.lr is {[*self.lr]}, but each must be twice the one before; write a grid such as [5e-4, 1e-3, 2e-3]"
            )
        if sorted(set(self.rungs)) != [*self.rungs] or self.rungs[-1] != 1:
            yield (f"tune.rungs is {[*self.rungs]}, but they must grow and end in 1.0; write [0.25, 1.0]")
        for name, values in (("outer", self.outer), ("seeds", self.seeds), ("final_seeds", self.final_seeds)):
            if len(set(values)) < len(values):
                yield (f"tune.{name} is {[*values]}, which contains duplicates; list each once")
        if self.final_seeds and not {*self.final_seeds} > {*self.seeds}:
            yield (
                f"tune.final_seeds is {[*self.final_seeds]}, but it must hold all of tune.seeds, {[*self.seeds]}, and one more; "
                f"write {[*self.seeds, max(self.seeds) + 1]}, or leave it out"
            )
