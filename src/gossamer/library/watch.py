"""What goes wrong in most loops of one's own, as one warning each: steps that nobody exchanges, and workers that train alike."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gossamer.errors import PeerError
from gossamer.library.dtensors import local

log = logging.getLogger("gossamer")


class Watch:
    """Whether the steps of one worker are counted and exchanged.

    It knows nothing of its `Outer`, so that it can look on when that is forgotten and collected.

    Args:
        checksum: takes that of the parameters as they are.
        local_steps: of the round that it is in.
    """

    def __init__(self, worker: int, checksum: Callable[[], int], local_steps: int) -> None:
        self._worker, self._checksum, self.local_steps = worker, checksum, local_steps
        self._start = checksum()
        self.quiet = False
        """Whether nothing more is to be said: it has been, or an error ends the loop."""
        self.exchanged = self.called = False
        self.came_early = False
        """Whether the first step was counted before an optimizer step, which was reported."""
        self.saved = False
        """Whether the outer state was saved after the last step, so that a resumed loop goes on with what is left of a round."""

    def begin(self) -> None:
        """Looks at the parameters again, which somebody has loaded."""
        self._start = self._checksum()

    def look_at_first_step(self, model: nn.Module, versions: object, start: int) -> None:
        """Warns when the first step is counted after a backward pass and before any optimizer step.

        Args: `versions` and `start` are those of the parameters and their checksum when training began.
        Cost: nothing but a look at the parameters' versions, unless these have not changed.
        """
        # A step that a GradScaler skipped leaves gradients that are not finite, or none.
        if versions == versions_of(model) and self._checksum() == start and has_gradients(model):
            self.came_early = True
            log.warning(
                "worker %d called outer.step() for the first time after a backward pass and before an optimizer step, so that it "
                "counts something else than optimizer steps; call it after optimizer.step() and not after each micro-batch; "
                "nothing is wrong if the learning rate of this step was 0",
                self._worker,
            )

    def end(self, steps: int = 0) -> None:
        """Warns once when training ended with steps that were never exchanged, or never counted.

        Args: `steps` are those since the last round ended.
        """
        if self.quiet:
            return
        if steps:
            self.quiet = True
            log.warning(
                "worker %d ends with %d inner steps that were not exchanged, as a round has %d%s; %slet the number of steps be a "
                "multiple of local_steps",
                self._worker,
                steps,
                self.local_steps,
                "" if self.exchanged else ", and no round ended at all, so that it has trained apart from the others",
                "a loop that resumes from the state just saved goes on with them; else " if self.saved else "",
            )
        elif not self.called and self._checksum() != self._start:
            self.quiet = True
            log.warning(
                "the parameters of worker %d have changed and outer.step() was never called, so that it has trained apart from "
                "the others; call it after each optimizer.step(), or use gossamer.outer_loop",
                self._worker,
            )


def versions_of(model: nn.Module) -> list[tuple[int, int]]:
    """Which tensors the parameters are, and how often each was changed in place; most optimizers change them so."""
    return [(id(p), 0 if p.is_inference() else p._version) for p in model.parameters()]


def has_gradients(model: nn.Module) -> bool:
    """Whether a backward pass has left gradients that an optimizer step would use: finite, and not all zero."""
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None and p.grad.layout == torch.strided]
    return all(bool(g.isfinite().all()) for g in grads) and any(bool(g.any()) for g in grads)


def warn_of_phases(said: Mapping[int, Any], workers: int, start: str) -> bool:
    """Whether all workers have told how their first local phase ended; warns when it did with the same bits, or other rates.

    Args:
        said: of each worker, the hash of its parameters before the exchange and its learning rate, None where unknown.
        start: the hash of the parameters that all began with.
    """
    ends = {worker: one for worker, one in said.items() if isinstance(one, list) and len(one) == 2}
    if len(ends) < workers:
        return False
    hashes = {str(one[0]) for one in ends.values()}
    if workers > 1 and len(hashes) == 1 and hashes != {start}:
        log.warning(
            "all %d workers came out of their first local phase with the same bits: they train on the same batches with the same "
            "random numbers, so that more workers add nothing; give each its own part of the data, as place.shard does",
            workers,
        )
    rates = {worker: one[1] for worker, one in ends.items() if isinstance(one[1], float)}
    if len(set(rates.values())) > 1:
        log.warning(
            "workers have other inner learning rates at the same exchange (%s); let their schedules count the same steps, also "
            "after one has resumed",
            ", ".join(f"worker {worker} {rate:.6g}" for worker, rate in sorted(rates.items())),
        )
    return True


def explained(error: PeerError, left: Mapping[int, Any]) -> PeerError:
    """The error of an exchange, with who has left its loop before, after how many rounds and steps."""
    words = [
        f"worker {worker} after round {one[0]} and {one[1]} more steps"
        for worker, one in sorted(left.items())
        if isinstance(one, list) and [*map(type, one)] == [int, int]
    ]
    if not words:
        return error
    return PeerError(
        f"{', '.join(words)} left the loop while this one goes on: {error}; give all workers equally many batches, as "
        "place.shard does, or let all take outer.common_steps(len(loader)) steps, and call outer.step() also where a GradScaler "
        "skipped a step; sites with elastic=True go on without one that has left"
    )
