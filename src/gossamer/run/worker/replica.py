"""A replica: a model with its inner optimizer and its position in the data, without peers."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gossamer import rng
from gossamer.data.corpus import Corpus
from gossamer.errors import CheckpointError, ConfigError, DataError, TrainingError
from gossamer.finite import GO_ON, all_finite
from gossamer.layout import attach, flat_gradients, layout_of, subset, views
from gossamer.models.experts import keep_experts
from gossamer.models.llama import Llama
from gossamer.optimizers import GPA, InnerOptimizer, Joined
from gossamer.optimizers.inner import build_optimizer, clip_gradients, lr_scale, share_moments, warn_of_slow_bf16
from gossamer.optimizers.received import must_be_state_of
from gossamer.record.progress import note_trained
from gossamer.rounds.exchange import Each
from gossamer.run.config.layouts import arranged
from gossamer.run.config.resolved import RunSettings
from gossamer.run.config.user_parts import KEYS
from gossamer.run.worker.compiled import made_ready
from gossamer.run.worker.numerics import deterministic, using_threads
from gossamer.run.worker.shards import Shards
from gossamer.run.worker.stages.in_one_process import InStages, StagedModel, computing
from gossamer.run.worker.task import Task, buffers_of, on_device
from gossamer.run.worker.turns import Turns
from gossamer.settings.user_code import calling
from gossamer.tree import must_fit

MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The exceptions of reading a state with unexpected keys, types or shapes, Gossamer's errors included."""


class LocalPhase(NamedTuple):
    """A replica's report on consecutive inner steps; phases of one round are merged by `merged_phases`."""

    losses: tuple[float, ...]
    """Training loss of each inner step, nats per token."""
    lr: float
    compute_s: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean training loss."""
        return math.fsum(self.losses) / len(self.losses)


def merged_phases(phases: Sequence[LocalPhase]) -> LocalPhase:
    """Consecutive phases as one."""
    losses = tuple(loss for phase in phases for loss in phase.losses)
    return LocalPhase(losses, phases[-1].lr, sum(p.compute_s for p in phases), sum(p.tokens for p in phases))


def step_on_gradients(replicas: Sequence["Replica"], round: int, each: Each) -> None:
    """The inner steps of all replicas on exchanged gradients, as by `Replica.step_on_gradient`.

    With data parallelism Muon would orthogonalize the same matrices for each: only the first steps, and the others copy
    its bitwise identical result.
    """
    first, *others = replicas
    if first.gradient is None:  # then no other has one
        return
    if not all(each(first.steps_like, others)):
        each(lambda replica: replica.step_on_gradient(round), replicas)
        return
    first.step_on_gradient(round)
    each(lambda other: other.take_step_of(first, round), others)


def loss_must_be_finite(loss: float, replica: "Replica", round: int) -> None:
    """Raises TrainingError unless the loss of an inner step is a number."""
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss of worker {replica.index} became {loss} at its inner step {replica.steps_taken} (round {round}); {GO_ON}"
        )


def must_start_alike(replicas: Sequence["Replica"]) -> None:
    """Raises ConfigError unless all replicas have the same initial parameters."""
    for replica in replicas[1:]:
        if not torch.equal(replicas[0].x, replica.x):
            raise ConfigError(
                f"model.size is '{replica.run.model.size}', which returned a model with other parameters when called again; "
                "let it draw from torch's own generator alone, which is seeded before each call, or load the same file"
            )


class Replica:
    """The model of one worker. `x` is its flat parameter vector `[P]`, of which the model's parameters are views.

    With experts held by some workers each, it only has its own (`Task.holding`), and P counts these.

    It satisfies `gossamer.clock.Learner`. Evaluation, checkpoints and publication use `evaluated`: `x` itself, or the
    average of an averaging optimizer.

    Args:
        buffer: memory for `x`; allocated when None.
        cut: builds this process's stages from a model; then `x` and all state belong to these only.
        shard: builds this process's shard of a model; then `x` is a copy of the shard's parameters.
    """

    def __init__(
        self,
        index: int,
        run: RunSettings,
        task: Task,
        device: torch.device,
        buffer: Tensor | None = None,
        cut: Callable[[Llama], InStages] | None = None,
        shard: Callable[[Llama], Shards] | None = None,
    ) -> None:
        self.index, self.run, self.task, self.device = index, run, task, device
        self.threads: int | None = None
        """Intra-op threads with which it trains, in a process with several workers; None takes those of the calling thread."""
        if index == 0:  # warn once
            warn_of_slow_bf16(run.inner, device)
        self.turns: Turns | None = None
        """Coordinates concurrent forward passes of a process's replicas; None if they are serialised."""
        self.model = task.model()
        if task.holding is not None:
            keep_experts(self.model, task.holding.holders.resident(index))
        self.layout, self.spans = arranged(layout_of(self.model), run)
        self.staged: InStages | None = None
        """The stages of a model that is cut, which share its parameters."""
        if run.pipeline.cuts_replica(index):
            assert isinstance(self.model, Llama)  # `must_fit` refuses others
            self.staged = cut(self.model) if cut else StagedModel(self.model.to(device), run)
            self.model = self.staged.model
            self.layout, self.spans = subset(self.layout, self.spans, dict(self.model.named_parameters()))
        self.model.to(device)
        self._loss = made_ready(task.loss, run)
        self._recomputes = task.draws
        """Whether backward passes may set torch's generator; determined by the first one."""
        self.buffers = buffers_of(self.model)
        """Local buffers, such as batch norm's running statistics; never exchanged."""
        self.shards: Shards | None = None
        """This process's shard of a model that several processes hold together."""
        if shard is None:
            self.x = attach(self.model, self.layout, buffer)
        else:
            self.shards = shard(cast(Llama, self.model))  # others are refused
            flat = self.shards.flat
            self.x, self.layout, self.spans = flat.x, flat.layout, flat.spans
        self.averaged: Tensor | None = None
        """The average x and the iterate z of an averaging optimizer, concatenated `[2P]`; the parameters follow from them."""
        homes = {}
        if run.inner.averaging is not None:
            self.averaged = torch.empty(2 * self.x.numel(), dtype=self.x.dtype, device=device)
            homes = {
                name: views(self.model, self.layout, half)
                for name, half in zip("xz", self.averaged.chunk(2), strict=True)
            }
        self.evaluated = self.x if self.averaged is None else self.averaged[: self.x.numel()]
        self.optimizer = (
            build_optimizer(run.inner, self.model, **homes, factory=task.optimizer)
            if self.shards is None
            else self.shards.optimizer()
        )
        its_own = task.optimizer is not None and not type(self.optimizer).__module__.startswith("torch.optim.")
        self._turn_to_step = rng.TURN if its_own else contextlib.nullcontext()
        """The lock for steps of a user's optimizer; torch's work in any thread."""
        step = self.optimizer.step
        self._step_of_optimizer = calling(KEYS["optimizer"], step) if its_own else step
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.moments: tuple[Tensor, Tensor] | None = None
        """The inner optimizer's first and second moments, `[P]` each, where the schedule exchanges them."""
        if run.schedule.inner_every:
            self.moments = share_moments(self.optimizer, self.model, self.layout)
        self.gradient: Tensor | None = None
        """The flat gradient `[P]` of a replica whose inner steps wait for the mean gradient; see `keep_gradient`."""
        self._clips_own = False
        self.local_steps = run.local_steps_of(index)
        """Inner steps of its next local phases."""
        self.phase_left_s: float | None = None
        """The estimated seconds left of its local phase, from its completed steps; None before the first one."""
        self.steps_taken = 0
        self.places: dict[int, int] | None = None
        """The slots whose batches it trains on, ascending, each with its next inner step; None for only its own."""
        self.round: int | None = None
        """Completed rounds of the run, from which `local_phase` takes the learning rate, so that fast workers do not
        run out of their schedule. None uses this worker's phase count.
        """

    @property
    def scored(self) -> Tensor:
        """`evaluated` as a vector of the whole model `[P]`; zeros for experts that this worker does not hold."""
        holding = self.task.holding
        return self.evaluated if holding is None else holding.alone(self.index, self.evaluated)

    def keep_gradient(self, *, clips_own: bool = False) -> Tensor:
        """Makes local phases leave their gradient `[P]` here, for `step_on_gradient`.

        Args: `clips_own` makes `inner.clip` shorten that gradient, not what it is exchanged for.
        """
        self._clips_own = clips_own
        self.gradient = flat_gradients(self.model, self.layout, torch.zeros_like(self.x))
        return self.gradient

    def local_phase(self, round: int) -> LocalPhase:
        """The whole local phase of this number, which also decides the batches."""
        self.steps_taken = round * self.local_steps
        return self.train(round if self.round is None else self.round, 0, self.local_steps)

    def train(self, round: int, start: int, stop: int, after_step: Callable[[], None] = lambda: None) -> LocalPhase:
        """The inner steps `start` to `stop` of a round; with `keep_gradient` only the gradients.

        Raises: TrainingError at the first loss that is not finite.
        """
        with using_threads(self.threads):
            return self._train(round, start, stop, after_step)

    def _train(self, round: int, start: int, stop: int, after_step: Callable[[], None]) -> LocalPhase:
        began = time.perf_counter()
        losses, tokens = [], 0
        if self.staged is not None and start == 0:
            self.staged.begin()
        for h in range(start, stop):
            # The exchange after the step is outside: torch would compile its update again under another switch.
            with deterministic():
                value, count = self._backward(self.places or {self.index: self.steps_taken})
                loss_must_be_finite(value, self, round)
                losses.append(value)
                tokens += count
                self.steps_taken += 1
                if self.places is not None:
                    self.places = {slot: step + 1 for slot, step in self.places.items()}
                if self.gradient is None:
                    self._step(round, h)
                elif self._clips_own:
                    self._clip()
            note_trained(1, count)
            if pace_s := self.run.pace_s_of(self.index):
                time.sleep(max(0.0, began + len(losses) * pace_s - time.perf_counter()))
            self.phase_left_s = (self.local_steps - h - 1) * (time.perf_counter() - began) / len(losses)
            after_step()
        if self.shards is not None:
            self.shards.flat.read()
        lr = self.optimizer.param_groups[0]["lr"]
        return LocalPhase(tuple(losses), lr, time.perf_counter() - began, tokens)

    def step_on_gradient(self, round: int) -> None:
        """The inner step on an exchanged gradient; a no-op for a replica that keeps none."""
        if self.gradient is not None:
            with using_threads(self.threads), deterministic():
                self._step(round, self.local_steps - 1)

    def steps_like(self, other: "Replica") -> bool:
        """Whether Muon's step on the gradient of another replica is its step here, to the last bit."""
        if self.staged is not None or not isinstance(self.optimizer, Joined):
            return False
        if self.task.optimizer is not None:
            return False  # the effect of a user's step is unknown
        if self.threads != other.threads:
            return False
        states, other_states = self._stepped(), other._stepped()
        if len(states) != len(other_states) or len(states) == 2:
            return False  # no moments before the first step
        return all(map(torch.equal, states, other_states))

    def take_step_of(self, other: "Replica", round: int) -> None:
        """Copies the step of `step_on_gradient` from an identical replica."""
        self.set_lr(self.optimizer, round, self.local_steps - 1)
        for target, source in zip(self._stepped(), other._stepped(), strict=True):
            target.copy_(source)

    def _stepped(self) -> list[Tensor]:
        """The tensors that a step changes."""
        assert self.gradient is not None and isinstance(self.optimizer, Joined)
        groups = ((part.state, group) for part in self.optimizer.parts.values() for group in part.param_groups)
        moments = [value for state, group in groups for p in group["params"] for value in state.get(p, {}).values()]
        return [self.x, self.gradient, *moments]

    @contextlib.contextmanager
    def holding_evaluated(self) -> Iterator[None]:
        """A context in which the parameters are the evaluated ones."""
        if self.averaged is None:
            yield
            return
        # Copied in and out, as the model's and the optimizer's parameters are views of this memory.
        saved = self.x.clone()
        self.x.copy_(self.evaluated)
        try:
            yield
        finally:
            self.x.copy_(saved)

    def recompute(self) -> None:
        """Recomputes the parameters after an outer step, from `x` or an averaging optimizer's average and iterate."""
        if self.shards is not None:
            self.shards.flat.write()
        if isinstance(self.optimizer, GPA) and self.gradient is None:
            self.optimizer.recompute()

    def _backward(self, places: Mapping[int, int]) -> tuple[float, int]:
        """The mean loss over these slots at these inner steps, and its tokens; accumulates the mean gradient."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=self.gradient is None)
        if self.staged is None:
            losses = self._backward_whole(places)
        else:
            (step,) = places.values()  # a worker in stages trains only on its own slot
            losses = self._backward_in_stages(step)
        return sum(losses) / len(losses), len(places) * self.run.step_tokens

    def read_ahead(self, round: int = 0, rounds: int = 1) -> None:
        """Prefetches the batches of `rounds` rounds from a stream, beginning with this one.

        So a read error occurs before the round begins. Raises: DataError.
        """
        per_step, step, timetable = self.run.data.accumulate, self.steps_taken, self.run.timetable
        steps = rounds * self.local_steps
        if timetable.changes:
            steps = timetable.steps_before(self.index, round + rounds) - timetable.steps_before(self.index, round)
        self.task.data.read_ahead(self.index, step * per_step, steps * per_step)

    def _backward_whole(self, places: Mapping[int, int]) -> list[float]:
        if self.shards is None:
            return self._backward_over(places, range(self.run.data.accumulate))
        with self.shards.step():
            losses = self._backward_over(places, self.shards.share(self.run.data.accumulate))
        return self.shards.all_losses(losses)

    def _backward_over(self, places: Mapping[int, int], micro_batches: range) -> list[float]:
        """The losses of these micro-batches of each slot; accumulates their mean gradient."""
        losses, accumulate = list[float](), self.run.data.accumulate
        passes = len(micro_batches) * len(places)
        for slot, step in places.items():
            for number in (step * accumulate + k for k in micro_batches):
                batch = on_device(self.task.data.batch(slot, number), self.device)
                value = self._forward(slot, number, batch)
                self._backward_from(value / passes if passes > 1 else value)
                losses.append(value.item())
        return losses

    def _backward_from(self, value: Tensor) -> None:
        """The backward pass, concurrent with other threads unless it recomputes forward passes, which draw again."""
        if not value.requires_grad:
            model = self.run.model
            kind, name = ("model", model.size) if model.loss is None else ("loss", model.loss)
            raise ConfigError(
                f"{KEYS[kind]} '{name}' gives training a loss without a gradient, as after detach(), a conversion to whole "
                "numbers or a constant; compute the loss from the model's parameters"
            )
        if not self._recomputes:
            value.backward()
            return
        with rng.TURN:
            self._recomputes = rng.sets_generator(value.backward)
            if self.turns is not None:
                self.turns.learn(self._recomputes)

    def _backward_in_stages(self, step: int) -> list[float]:
        assert self.staged is not None
        data, accumulate = cast(Corpus, self.task.data), self.run.data.accumulate
        numbers = range(step * accumulate, (step + 1) * accumulate)
        return self.staged.backward(
            [(on_device(data.batch(self.index, k), self.device), data.samples(self.index, k)) for k in numbers]
        )

    def _forward(self, slot: int, number: int, batch: Any) -> Tensor:
        """The loss of a batch. Its random numbers depend on slot and batch; backward draws none.

        A forward pass without random draws avoids the lock, which would serialise the replicas of one process.
        """

        def act() -> Tensor:
            with computing(self.run, self.device):
                return self._loss(self.model, batch)

        if not self.task.draws:
            return act()
        alone = functools.partial(rng.drawing, self.device, self.run.seed, slot, number, "model")
        if self.turns is not None:
            return self.turns.call(act, alone, self._keep_buffers)
        with alone():
            return act()

    def _keep_buffers(self) -> Callable[[], None]:
        """Copies the buffers, which a forward pass may change, and returns a function that restores them."""
        homes = [module._buffers for module in self.model.modules()]
        # All of them: batch norm's changes do not increase `Tensor._version`.
        kept = [(home, name, one, one.clone()) for home in homes for name, one in home.items() if one is not None]

        def restore() -> None:
            for home, name, buffer, copy in kept:
                buffer.copy_(copy)
                home[name] = buffer

        return restore

    def set_lr(self, optimizer: InnerOptimizer, round: int, h: int) -> None:
        """Sets the learning rates of an inner step in an optimizer with this replica's groups."""
        # Workers with fewer local steps advance faster in the schedule, so that all are at the same point after a
        # round.
        progress = self.run.timetable.progress(round, h / self.local_steps)
        scale = lr_scale(self.run.inner, progress, self.run.loop.steps)
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * scale

    def _step(self, round: int, h: int) -> None:
        self.set_lr(self.optimizer, round, h)
        if self.gradient is None or not self._clips_own:
            self._clip()
        with self._turn_to_step:
            self._step_of_optimizer()

    def _clip(self) -> None:
        if (norm := self.run.inner.clip) is None:
            return
        if self.shards is not None:
            self.shards.clip(norm)
        elif self.staged is None:
            clip_gradients(list(self.model.parameters()), norm)
        else:
            self.staged.clip(norm, again=self.gradient is not None and not self._clips_own)

    def state(self) -> dict[str, Any]:
        """The state to resume training from given parameters: inner optimizer and position in the data.

        Random numbers depend only on worker and inner step.
        """
        buffers = {"buffers": self.buffers} if self.buffers else {}
        boundaries = (
            {} if self.staged is None else {"boundaries": self.staged.state(), "squares": self.staged.squares()}
        )
        return {"inner": self.optimizer.state_dict(), "data": self.task.data.state(), **buffers, **boundaries}

    def must_be_of_another(self, state: Mapping[str, Any]) -> None:
        """Raises one of MISFITS unless the received state of another worker can be loaded as this replica's."""
        must_be_state_of(self.optimizer, state["inner"])
        must_fit(state.get("buffers", []), self.buffers)
        if not all_finite(tuple(state.get("buffers", []))):
            raise ValueError("a buffer of the model has numbers that are not finite")

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes a state as its own. Raises: one of MISFITS when it does not fit."""
        self.optimizer.load_state_dict(state["inner"])
        if self.moments:
            share_moments(self.optimizer, self.model, self.layout, self.moments)
        self.task.data.restore(state["data"])
        for buffer, saved in zip(self.buffers, state.get("buffers", ()), strict=True):
            buffer.copy_(saved)
        if self.staged is not None:
            squares = {int(first): float(square) for first, square in state.get("squares", {}).items()}
            self.staged.restore(on_device(state.get("boundaries", {}), self.device), squares)

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a saved state. Raises CheckpointError when it does not fit."""
        try:
            self.load(state)
        except DataError:  # already names the difference in the text
            raise
        except MISFITS as error:
            raise CheckpointError(
                f"the checkpoint of worker {self.index} does not fit this model and inner optimizer ({error}); use the run file "
                "that wrote it, or remove the checkpoint"
            ) from None
