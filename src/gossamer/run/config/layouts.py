"""The order in which the workers of a run hold their parameters: whole, in fragments, or only some experts of a mixture."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.layout import Layout, arrange, in_parts
from gossamer.models.holders import Holders, holders_of
from gossamer.models.sizes import ModelConfig, parameter_shapes
from gossamer.rounds.mean_model import mean_of
from gossamer.run.config.resolved import RunSettings

Spans = tuple[tuple[int, int], ...]


class Holding(NamedTuple):
    """A model that no worker holds whole: the full `[P]`, and the part of each worker `[P_i]`."""

    holders: Holders
    layout: Layout
    """The layout of the whole: what all hold, then the experts of each set of holders."""
    spans: Spans
    """The span of each part in the whole."""

    def of(self, worker: int) -> tuple[Layout, Spans]:
        """The layout of what a worker holds, and its parts there; those that it does not hold are empty."""
        parts = self._mine(worker)
        leaves = tuple(leaf for leaf in self.layout.leaves if self.holders.part(leaf.name) in parts)
        return _in_parts(Layout(leaves, 0), self.holders)

    @property
    def smaller(self) -> float:
        """The size of the model, or of its messages, relative to a worker's part: `1 / (1 - f + f O/M)`.

        f is the share of experts in the parameters, O the holders of each and M the workers.
        """
        return self.layout.numel / self.of(0)[0].numel

    def ring_numbers(self, worker: int) -> float:
        """Numbers that a worker sends for a mean of each part over its holders: `Σ_p 2 (1 - 1/O_p) P_p`.

        A ring all-reduce sends as many, and so do the owners of chunks that P_p divides into evenly; other chunks differ by a
        number each, and workers then share the sum unevenly.
        """
        sizes = ((b - a, len(self.holders.parts[p])) for p, (a, b) in enumerate(self.spans) if p in self._mine(worker))
        return sum(2 * (1 - 1 / holders) * size for size, holders in sizes)

    def alone(self, worker: int, x: Tensor) -> Tensor:
        """The whole model as one worker has it, with zeros for the experts that it lacks, which is as if tokens skip them."""
        return self._put(worker, x, x.new_zeros(self.layout.numel))

    def own(self, worker: int, whole: Tensor) -> Tensor:
        """The part of the whole model that one worker holds."""
        return torch.cat([whole[a:b] for a, b in map(self.spans.__getitem__, self._mine(worker))])

    def union(self, models: Sequence[Tensor]) -> Tensor:
        """The assembled model: each part is the mean of its holders, summed in worker order.

        Args: `models` are those of all workers, each as `alone` has it.
        """
        parts = zip(self.spans, self.holders.parts, strict=True)
        return torch.cat([mean_of([models[i][a:b] for i in sorted(workers)]) for (a, b), workers in parts])

    def beside(self, models: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
        """The whole model with the part of each worker in place, to measure how far that is from the whole."""
        return [self._put(i, self.own(i, x), whole.clone()) for i, x in enumerate(models)]

    def _mine(self, worker: int) -> list[int]:
        return [p for p, workers in enumerate(self.holders.parts) if worker in workers]

    def _put(self, worker: int, x: Tensor, into: Tensor) -> Tensor:
        start = 0
        for a, b in map(self.spans.__getitem__, self._mine(worker)):
            into[a:b] = x[start : start + b - a]
            start += b - a
        return into


def holding_of(run: RunSettings, layout: Layout | None) -> Holding | None:
    """The part of a model with this layout that each worker holds; None without `model.experts.holders`."""
    holders = holders_of(run.model.experts, run.workers)
    return None if holders is None or layout is None else Holding(holders, *_in_parts(layout, holders))


def _in_parts(layout: Layout, holders: Holders) -> tuple[Layout, Spans]:
    return in_parts(layout, holders.part, len(holders.parts))


def arranged(layout: Layout, run: RunSettings) -> tuple[Layout, Spans]:
    """The layout of a model, or of what a worker holds of it, in the order of a run, and the slices that are exchanged."""
    holders = holders_of(run.model.experts, run.workers)
    return arrange(layout, *run.fragments) if holders is None else _in_parts(layout, holders)


def layout_for(model: ModelConfig, vocab_size: int) -> Layout:
    """The layout of the built-in model with this vocabulary, which is not built."""
    return Layout.of(parameter_shapes(model, vocab_size))
