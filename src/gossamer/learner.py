"""A worker as the event loops drive it, over virtual time and in a process of its own: the one place where they meet."""

from typing import Any

import torch
from torch import Tensor

from gossamer.config import RunConfig
from gossamer.data import Corpus
from gossamer.fragment import Layout
from gossamer.worker import LocalPhase, Worker

__all__ = ["WorkerLearner"]


class WorkerLearner:
    """A `gossamer.worker.Worker` that follows no rule: it trains, and the loops around it do the rest."""

    def __init__(self, index: int, config: RunConfig, corpus: Corpus, device: torch.device) -> None:
        self._worker = Worker(index, config, corpus, device)
        self.round = 0
        """Rounds of the run that are over: the learning rate goes by it, so that fast workers do not run out of schedule."""

    @property
    def x(self) -> Tensor:
        """The flat parameters `[P]`."""
        return self._worker.x

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in them."""
        return self._worker.layout

    @property
    def local_steps(self) -> int:
        """Inner steps of a local phase."""
        return self._worker.local_steps

    def local_phase(self, round: int) -> LocalPhase:
        """The inner steps of this worker's phase of that number, which also decides the batches."""
        self._worker.steps_taken = round * self.local_steps
        return self._worker.local_phase(self.round, 0, self.local_steps)

    def state(self) -> dict[str, Any]:
        """Everything a snapshot needs to continue bit for bit."""
        return self._worker.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a snapshot back. Raises CheckpointError when it does not fit."""
        self._worker.restore(state)
