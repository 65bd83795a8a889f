"""Warnings of the most common faults in a training loop: steps that are never exchanged, and workers that train alike."""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.collector import instances_of, subclasses_of
from gossamer.errors import PeerError
from gossamer.library.dtensors import local
from gossamer.library.peers import Peers

log = logging.getLogger("gossamer")


class Watch:
    """Whether the steps of one worker are counted and exchanged.

    It has no reference to its `Outer`, so that it outlives one that is dropped and collected.

    Args:
        checksum: returns that of the parameters as they are.
        optimizers: counts the steps of the model's optimizers.
        local_steps: of the current round.
        workers: the number of workers, or of slots in a store.
    """

    def __init__(
        self, worker: int, checksum: Callable[[], int], optimizers: "OptimizerSteps", local_steps: int, workers: int
    ) -> None:
        self._so = "so that it has trained apart from the others" if workers > 1 else "so that rounds changed nothing"
        self._worker, self._checksum, self._optimizers, self.local_steps = worker, checksum, optimizers, local_steps
        self._start = 0
        self.steps = 0
        """Steps since the last round ended."""
        self.quiet = False
        """Whether no more warnings are due: one was given, or an error ends the loop."""
        self.exchanged = self.called = False
        """Whether a round has ended, also before the state that was loaded or taken, and whether a step was counted."""
        self.came_early = False
        """Whether steps were counted that are no optimizer steps, or not all of these were, which was reported."""
        self.resumes = False
        """Whether an outer state was loaded, or taken from another site."""
        self.saved = False
        """Whether the outer state was saved after the last step, so that a resumed loop continues the rest of a round."""

    def begin(self, start: int | None = None) -> None:
        """Training begins, or parameters were loaded. Args: `start` is their checksum, where it is known."""
        self._start = self._checksum() if start is None else start

    def look_at_step(self, model: nn.Module, versions: object, start: int, taken: int | None) -> None:
        """Warns once when a step is counted after a backward pass and before an optimizer step.

        Args:
            versions, start: of the parameters, and their checksum, when training began.
            taken: optimizer steps since the last step that was counted; None where no optimizer was seen.
        Cost: nothing but a look at the parameters' versions at the first step, unless no optimizer step was taken.
        """
        first = not self.called
        if self.came_early or taken or not (first or taken == 0):
            return
        # A step that a GradScaler skipped leaves gradients that are not finite, or none.
        if (not first or (versions == versions_of(model) and self._checksum() == start)) and has_gradients(model):
            self.came_early = True
            log.warning(
                "worker %d called outer.step() %s after a backward pass and before an optimizer step, so that it counts "
                "something else than optimizer steps; call it after optimizer.step() and not after each micro-batch, and let the "
                "optimizer have the parameters of this model; nothing is wrong if the learning rate of this step was 0",
                self._worker,
                "for the first time" if first else "once more",
            )

    def look_at_numbers(self, counted: int, taken: int, scalers: "Scalers") -> None:
        """Warns where so many steps were counted, and the optimizer has taken half as many or twice as many."""
        if not self.came_early and taken and (2 * taken <= counted or taken >= 2 * counted) and not scalers.there():
            self.came_early = True
            log.warning(
                "worker %d has called outer.step() %d times since it began, and its optimizer has taken %d steps; call "
                "outer.step() once after each optimizer.step(), and not inside outer_loop, which calls it; nothing is wrong if "
                "your loop left out steps of the optimizer, or counts other steps on purpose",
                self._worker,
                counted,
                taken,
            )

    def look_at_resume(self, before: int) -> None:
        """Warns where an optimizer continues from earlier steps, and the outer state begins at zero.

        Args: `before` are the steps that it had taken when the first one in this loop began; 0 for none.
        """
        if before and not self.resumes:
            log.warning(
                "the optimizer of worker %d has taken %s before the first step of this outer loop, whose own state begins at "
                "zero; if training resumes here, load what outer.state_dict() has saved, by outer.load_state_dict(...)",
                self._worker,
                f"{before} steps" if before > 1 else "steps",
            )

    def forgotten(self) -> None:
        """The `Outer` was dropped without `close`. An error that nothing caught, and that ends the program, comes first."""
        if getattr(sys, "last_value", None) is None:
            self.end()

    def end(self) -> None:
        """Warns once when training ended with steps that were never exchanged, or never counted."""
        if self.quiet:
            return
        if self.steps:
            self.quiet = True
            log.warning(
                "worker %d ends with %d inner steps that were not exchanged, as a round has %d%s; %slet the number of steps be a "
                "multiple of local_steps",
                self._worker,
                self.steps,
                self.local_steps,
                "" if self.exchanged else f", and no round ended at all, {self._so}",
                "a loop that resumes from the state just saved continues with them; else " if self.saved else "",
            )
        elif not self.called and self._checksum() != self._start:
            self.quiet = True
            log.warning(
                "the parameters of worker %d have changed and outer.step() was never called, %s; call it after each "
                "optimizer.step(), or use gossamer.outer_loop",
                self._worker,
                self._so,
            )
        elif self.called and not self.came_early and (after := self._optimizers.uncounted()):
            self.quiet = True
            log.warning(
                "the optimizer of worker %d has taken %s after the last outer.step(), which no round has exchanged; call "
                "outer.step() after each optimizer.step()",
                self._worker,
                f"{after} steps" if after > 1 else "a step",
            )


class LoopCheck:
    """Whether the loop around one worker does what `Outer` needs, with a warning for each thing that it gets wrong.

    Args:
        checksum: takes that of the parameters as they are.
        local_steps: of the first round.
    """

    def __init__(
        self, model: nn.Module, worker: int, workers: int, checksum: Callable[[], int], local_steps: int
    ) -> None:
        self._model, self._worker, self._workers, self._checksum = model, worker, workers, checksum
        self._optimizers, self._scalers = OptimizerSteps(model), Scalers()
        self.watch = Watch(worker, checksum, self._optimizers, local_steps, workers)
        self._counted: tuple[int, int] | None = (0, 0)
        """Steps and optimizer steps since training began; None once they were compared."""
        self._uncounted = 0
        """Steps since the last exchange that no optimizer has taken."""
        self.begin()

    def begin(self, steps: int = 0) -> None:
        """Training begins, or continues after so many steps of a round from a state that was loaded."""
        now = self._checksum()
        self._start: int | None = None if steps else now
        """The checksum of the parameters, until the first exchange has compared it."""
        self._versions = versions_of(self._model)
        self._began_at, self._looks = str(self._start), 0 if steps else 3
        """The common start, and how often to compare yet how the first local phases of all workers ended."""
        self.watch.begin(now)

    def forget_start(self) -> None:
        """The parameters were replaced by another worker's."""
        self._start = None

    def step(self, *, may_be_resumed: bool) -> None:
        """Before a step is counted. Args: `may_be_resumed` is whether there is an outer state that a resume could forget."""
        taken = self._optimizers.taken()
        self._uncounted += not taken
        if self._counted is not None:
            self._counted = self._counted[0] + 1, self._counted[1] + (taken or 0)
        if self._start is not None:
            self.watch.look_at_step(self._model, self._versions, self._start, taken)
        if not self.watch.called and may_be_resumed:
            self.watch.look_at_resume(self._optimizers.before)
        self.watch.called, self.watch.saved = True, False

    def exchange(self, peers: Peers, steps: int, lr: Callable[[], float] | None) -> None:
        """Before an exchange after so many steps of a round. Args: `lr` returns the inner learning rate; None where unknown."""
        if self._workers > 1:
            self._scalers.look(self._worker, counted=self._uncounted > 0)
        self._uncounted = 0
        if self._counted is not None and self._counted[0] % 2 == 0:  # else of two calls only the first may be in it
            self.watch.look_at_numbers(*self._counted, self._scalers)
            self._counted = None
        if self._looks and self._start is None:
            # Not at the first exchange itself: the others may not have come to its end yet.
            has_warned = warn_of_phases(peers.published("phase"), self._workers, self._began_at)
            self._looks = 0 if has_warned else self._looks - 1
        if self._start is None:
            return
        now = self._checksum()
        peers.publish("phase", [str(now), None if lr is None else lr()])
        if self._start == now and self.watch.called and not self.watch.came_early:
            log.warning(
                "the parameters of worker %d did not change in the %d inner steps before its first exchange; call "
                "outer.step() after optimizer.step() and not after each micro-batch, and let the optimizer have the parameters "
                "of this model; nothing is wrong if a GradScaler skipped these steps, or the learning rate was 0",
                self._worker,
                steps,
            )
        self._start = None

    def end(self) -> None:
        """Stops counting optimizer steps."""
        self._optimizers.end()


class OptimizerSteps:
    """Counts the steps of all optimizers that have parameters of a model, by torch's hooks.

    It keeps neither model nor optimizers alive. An optimizer that is no `torch.optim.Optimizer`, or whose step is compiled, is
    not seen; `taken` is then None. Cost: about a microsecond for each step of any optimizer in this process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = {id(p) for p in model.parameters()}
        self._since = dict[int, int]()
        self._seen = False
        self.before = 0
        """The steps that the first optimizer had taken when its first step here began; 1 where it has a state and no count."""
        myself = weakref.ref(self)

        def count(optimizer: Optimizer, *_: Any) -> None:
            # A hook inside a compiled step would break its graph.
            if not torch.compiler.is_compiling() and (steps := myself()) is not None:
                steps._count(optimizer)

        self.end = weakref.finalize(self, register_optimizer_step_pre_hook(count).remove)
        """Stops counting."""

    def _count(self, optimizer: Optimizer) -> None:
        if not any(id(p) in self._own for group in optimizer.param_groups for p in group["params"]):
            return
        if not self._seen:
            self._seen, self.before = True, steps_before(optimizer)
        self._since[id(optimizer)] = self._since.get(id(optimizer), 0) + 1

    def taken(self) -> int | None:
        """Steps since the last call, of the optimizer that took most; None where none was ever seen."""
        most = self.uncounted() if self._seen else None
        self._since.clear()
        return most

    def uncounted(self) -> int:
        """Steps since the last call of `taken`."""
        return max(self._since.values(), default=0)


def steps_before(optimizer: Optimizer) -> int:
    """Steps that an optimizer has taken by its state; 1 for one that has numbers other than zero and counts none.

    >>> adam = torch.optim.AdamW([weight := torch.nn.Parameter(torch.ones(1))])
    >>> steps_before(adam)
    0
    >>> weight.grad = torch.ones(1)
    >>> adam.step()
    >>> steps_before(adam)
    1
    """
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    if counted := [int(state["step"]) for state in states if "step" in state]:
        return max(counted)
    kept = [local(t) for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    return int(any(bool(t.any()) for t in kept))


class Scalers:
    """The gradient scalers of this process, of which one may have skipped a step that `Outer.step` was not called for."""

    def __init__(self) -> None:
        self._scales: dict[weakref.ref[GradScaler], float] | None = None
        self._warned = False

    def there(self) -> bool:
        """Whether any is enabled. Cost: as of `look`."""
        return bool(self._known())

    def _known(self) -> dict[weakref.ref[GradScaler], float]:
        if self._scales is None:
            scalers = [one for one in instances_of(subclasses_of(GradScaler)) if one.is_enabled()]
            self._scales = {weakref.ref(one): one._init_scale for one in scalers}
        return self._scales

    def look(self, worker: int, counted: bool) -> None:
        """Warns once where a scale has decreased since the last call, as it does for each step that is skipped.

        Args: `counted` is whether `Outer.step` was called without an optimizer step since then.
        Cost: the first call scans all objects of this process, some tens of milliseconds.
        """
        for reference, before in (scales := self._known()).items():
            if (scaler := reference()) is not None:
                scales[reference] = now = scaler.get_scale()
                if now < before and not counted and not self._warned:
                    self._warned = True
                    log.warning(
                        "a GradScaler has skipped an optimizer step of worker %d and outer.step() was not called for it, so that "
                        "workers exchange after other numbers of batches, and one ends before the others; call outer.step() "
                        "after every scaler.step(optimizer)",
                        worker,
                    )


@contextmanager
def waiting_for(missing: Callable[[], list[int]], worker: int, patience_s: float) -> Iterator[None]:
    """Warns after a while of workers that have not entered `mean_model()`, while this one waits for them inside.

    Args: `missing` names them; it is called by another thread.
    """

    def say() -> None:
        if absent := missing():
            log.warning(
                "worker %d waits in mean_model() for %s, which did not enter it; all workers must, after the same step, also "
                "where one alone saves or validates the model",
                worker,
                " and ".join(f"worker {one}" for one in absent),
            )

    timer = threading.Timer(patience_s, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def versions_of(model: nn.Module) -> list[tuple[int, int]]:
    """Identity and version of each parameter; most optimizers update in place, which changes the version."""
    return [(id(p), 0 if p.is_inference() else p._version) for p in model.parameters()]


def has_gradients(model: nn.Module) -> bool:
    """Whether a backward pass has left gradients that an optimizer step would use: finite, and not all zero."""
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None and p.grad.layout == torch.strided]
    return all(bool(g.isfinite().all()) for g in grads) and any(bool(g.any()) for g in grads)


def warn_of_phases(facts: Mapping[int, Any], workers: int, start: str) -> bool:
    """Whether all workers have reported the end of their first local phase; warns of equal results or unequal learning rates.

    Args:
        facts: of each worker, the hash of its parameters before the exchange and its learning rate, None where unknown.
        start: the hash of the parameters that all began with.
    """
    ends = {worker: one for worker, one in facts.items() if isinstance(one, list) and len(one) == 2}
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


def explained(
    error: PeerError, left: Mapping[int, Any], means: Mapping[int, Any], entered: int, local_steps: int
) -> PeerError:
    """The error of an exchange, extended by the workers that have left their loop before, or are in `mean_model()` alone.

    Args:
        left: by worker after how many rounds and steps it has left, and its local steps; `local_steps` are those of this one.
        means: by worker how often it has entered `mean_model()`; `entered` is how often this one has.
    """
    inside = [worker for worker, count in sorted(means.items()) if type(count) is int and count > entered]
    if inside and not left:
        return PeerError(
            f"worker {inside[0]} has entered mean_model(), which this one did not: {error}; let all workers enter it, after the "
            "same step"
        )
    words = [
        f"worker {worker} {'' if one[2] == local_steps else f'(local_steps = {one[2]}, and {local_steps} here) '}"
        f"after round {one[0]} and {one[1]} more steps"
        for worker, one in sorted(left.items())
        if isinstance(one, list) and [*map(type, one)] == [int, int, int]
    ]
    if not words:
        return error
    return PeerError(
        f"{', '.join(words)} left the loop while this one continues: {error}; give all workers equally many batches, as "
        "place.shard does, or let all take outer.common_steps(len(loader)) steps, and call outer.step() also where a GradScaler "
        "skipped a step; sites with elastic=True go on without one that has left"
    )
