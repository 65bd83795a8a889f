"""A worker as the event loops drive it, over virtual time and in a process of its own: the one place where they meet."""

from typing import Any

import torch
from torch import Tensor

from gossamer.data.corpus import Corpus
from gossamer.errors import CheckpointError
from gossamer.layout import Layout
from gossamer.run.config import RunConfig
from gossamer.run.worker import LocalPhase, Worker

__all__ = ["WorkerLearner"]


class WorkerLearner:
    """A `gossamer.run.worker.Worker` that follows no rule: it trains, and the loops around it do the rest."""

    def __init__(self, index: int, config: RunConfig, corpus: Corpus, device: torch.device) -> None:
        self._worker = Worker(index, config, corpus, device)
        self.round: int | None = None
        """Rounds of the run that are over, by which the learning rate goes: fast workers do not run out of their schedule.
        None takes this worker's own count of phases."""

    @property
    def x(self) -> Tensor:
        """The flat parameters `[P]`."""
        return self._worker.x

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in them."""
        return self._worker.layout

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The fragments of x, as slices."""
        return self._worker.spans

    @property
    def local_steps(self) -> int:
        """Inner steps of a local phase."""
        return self._worker.local_steps

    def local_phase(self, round: int) -> LocalPhase:
        """The inner steps of this worker's phase of that number, which also decides the batches."""
        self._worker.steps_taken = round * self.local_steps
        return self._worker.local_phase(round if self.round is None else self.round, 0, self.local_steps)

    def state(self) -> dict[str, Any]:
        """What a worker needs to go on from where a server sends it: inner optimizer, place in the data, random numbers."""
        worker = self._worker
        return {"inner": worker.optimizer.state_dict(), "data": worker.corpus.state(), "rng": torch.get_rng_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a snapshot back. Raises CheckpointError when it does not fit."""
        try:
            self._worker.optimizer.load_state_dict(state["inner"])
            self._worker.corpus.restore(state["data"])
            torch.set_rng_state(state["rng"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the snapshot of worker {self._worker.index} does not fit this model and inner optimizer: {error}; remove it, "
                "and the worker starts its inner optimizer anew"
            ) from None
