"""A replica: a model with its inner optimizer and its place in the data, which trains on its own and has no peers."""

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
from gossamer.layout import attach, flat_gradients, layout_of, restricted, views
from gossamer.models.experts import keep_experts
from gossamer.models.llama import Llama
from gossamer.optimizers import GPA, InnerOptimizer, Joined
from gossamer.optimizers.inner import build_optimizer, clip_gradients, lr_scale, share_moments, warn_of_slow_bf16
from gossamer.optimizers.received import must_be_state_of
from gossamer.record.progress import note_trained
from gossamer.rounds.exchange import Each
from gossamer.run.config.layouts import arranged
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.compiled import made_ready
from gossamer.run.worker.numerics import deterministic, using_threads
from gossamer.run.worker.shards import Shards
from gossamer.run.worker.stages.in_one_process import InStages, StagedModel, computing
from gossamer.run.worker.task import Task, buffers_of, on_device
from gossamer.run.worker.turns import Turns
from gossamer.tree import must_fit

MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What reading a state raises that has other keys, types or shapes than were expected; errors of Gossamer about it among them."""


class LocalPhase(NamedTuple):
    """What a replica reports of consecutive inner steps; phases of one round add up with `merged_phases`."""

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
    """The inner steps of all replicas on gradients that have been exchanged, as `Replica.step_on_gradient` makes them.

    Where Muon would orthogonalize the same matrices for each, with data parallelism, the first steps and the others take over
    what it has found, which is the same to the last bit.
    """
    first, *others = replicas
    if first.gradient is None:  # nor has any other one
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
    """Raises ConfigError unless all replicas have the same parameters, as all workers of a run begin with."""
    for replica in replicas[1:]:
        if not torch.equal(replicas[0].x, replica.x):
            raise ConfigError(
                f"model.size is '{replica.config.model.size}', which returned a model with other parameters when called again; "
                "let it draw from torch's own generator alone, which is seeded before each call, or load the same file"
            )


class Replica:
    """The model of one worker. `x` is its flat parameter vector `[P]`, of which the model's parameters are views.

    Where a mixture of experts lies on some workers each, it has no others (`Task.holding`), and P is the size of what it has.

    It satisfies `gossamer.clock.Learner`. What is evaluated, saved and published is `evaluated`: `x` itself, or the average
    of an optimizer that keeps one.

    Args:
        buffer: memory for `x`; its own when None.
        cut: makes of a model the stages that this process has, where `x` and all else shall be of these alone.
        shard: makes of a model the shard that this process has of it; then `x` is a copy of the parameters of the shard.
    """

    def __init__(
        self,
        index: int,
        config: RunSettings,
        task: Task,
        device: torch.device,
        buffer: Tensor | None = None,
        cut: Callable[[Llama], InStages] | None = None,
        shard: Callable[[Llama], Shards] | None = None,
    ) -> None:
        self.index, self.config, self.task, self.device = index, config, task, device
        self.threads: int | None = None
        """Intra-op threads with which it trains, in a process with several workers; None takes those of the calling thread."""
        if index == 0:  # one of all says it
            warn_of_slow_bf16(config.inner, device)
        self.turns: Turns | None = None
        """What lets forward passes of several replicas of a process run at once; None where each takes its turn."""
        self.model = task.model()
        if task.holding is not None:
            keep_experts(self.model, task.holding.holders.resident(index))
        self.layout, self.spans = arranged(layout_of(self.model), config)
        self.staged: InStages | None = None
        """The stages of a model that is cut, which share its parameters."""
        if config.pipeline.cuts_replica(index):
            assert isinstance(self.model, Llama)  # `must_fit` refuses others
            self.staged = cut(self.model) if cut else StagedModel(self.model.to(device), config)
            self.model = self.staged.model
            self.layout, self.spans = restricted(self.layout, self.spans, dict(self.model.named_parameters()))
        self.model.to(device)
        self._loss = made_ready(task.loss, config)
        self._recomputes = task.draws
        """Whether backward passes may set torch's generator; the first one tells."""
        self.buffers = buffers_of(self.model)
        """Its own, as the running statistics of batch norm; they are never exchanged."""
        self.shards: Shards | None = None
        """This process's shard of a model that several processes hold together."""
        if shard is None:
            self.x = attach(self.model, self.layout, buffer)
        else:
            self.shards = shard(cast(Llama, self.model))  # others are refused
            flat = self.shards.flat
            self.x, self.layout, self.spans = flat.x, flat.layout, flat.spans
        self.averaged: Tensor | None = None
        """The average x and the iterate z of an optimizer that averages, one after the other `[2P]`; the parameters follow."""
        homes = {}
        if config.inner.averaging is not None:
            self.averaged = torch.empty(2 * self.x.numel(), dtype=self.x.dtype, device=device)
            homes = {
                name: views(self.model, self.layout, half)
                for name, half in zip("xz", self.averaged.chunk(2), strict=True)
            }
        self.evaluated = self.x if self.averaged is None else self.averaged[: self.x.numel()]
        self.optimizer = (
            build_optimizer(config.inner, self.model, **homes, own=task.optimizer)
            if self.shards is None
            else self.shards.optimizer()
        )
        its_own = task.optimizer is not None and not type(self.optimizer).__module__.startswith("torch.optim.")
        self._turn_to_step = rng.TURN if its_own else contextlib.nullcontext()
        """Around the steps of an optimizer that the user has written; those of torch's work in any thread."""
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.moments: tuple[Tensor, Tensor] | None = None
        """The inner optimizer's first and second moments, `[P]` each, where the schedule exchanges them."""
        if config.schedule.inner_every:
            self.moments = share_moments(self.optimizer, self.model, self.layout)
        self.gradient: Tensor | None = None
        """The flat gradient `[P]` of a replica whose inner steps wait for the mean gradient; see `keep_gradient`."""
        self.local_steps = config.local_steps_of(index)
        """Inner steps of its next local phases."""
        self.phase_left_s: float | None = None
        """How long its local phase still takes, by the steps of it that are over; None before the first one."""
        self.steps_taken = 0
        self.places: dict[int, int] | None = None
        """The slots whose batches it trains on, ascending, each with its next inner step; None for its own alone."""
        self.round: int | None = None
        """Rounds of the run that are over, where `local_phase` shall take the learning rate from them: fast workers do not run
        out of their schedule. None takes this worker's own count of phases."""

    @property
    def scored(self) -> Tensor:
        """`evaluated` as a vector of the whole model `[P]`; zeros for experts that this worker does not hold."""
        holding = self.task.holding
        return self.evaluated if holding is None else holding.alone(self.index, self.evaluated)

    def keep_gradient(self) -> Tensor:
        """From now on a local phase leaves its gradient `[P]` here, and `step_on_gradient` makes the inner step."""
        self.gradient = flat_gradients(self.model, self.layout, torch.zeros_like(self.x))
        return self.gradient

    def local_phase(self, round: int) -> LocalPhase:
        """The whole local phase of this number, which also decides the batches."""
        self.steps_taken = round * self.local_steps
        return self.train(round if self.round is None else self.round, 0, self.local_steps)

    def train(self, round: int, start: int, stop: int, after_step: Callable[[], None] = lambda: None) -> LocalPhase:
        """The inner steps `start` to `stop` of a round; with `keep_gradient` the gradients alone.

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
            with (
                deterministic()
            ):  # without what follows: an exchange does not recompile its update under another switch
                value, count = self._backward(self.places or {self.index: self.steps_taken})
                loss_must_be_finite(value, self, round)
                losses.append(value)
                tokens += count
                self.steps_taken += 1
                if self.places is not None:
                    self.places = {slot: step + 1 for slot, step in self.places.items()}
                if self.gradient is None:
                    self._step(round, h)
            note_trained(1, count)
            if pace_s := self.config.pace_s_of(self.index):
                time.sleep(max(0.0, began + len(losses) * pace_s - time.perf_counter()))
            self.phase_left_s = (self.local_steps - h - 1) * (time.perf_counter() - began) / len(losses)
            after_step()
        if self.shards is not None:
            self.shards.flat.read()
        lr = self.optimizer.param_groups[0]["lr"]
        return LocalPhase(tuple(losses), lr, time.perf_counter() - began, tokens)

    def step_on_gradient(self, round: int) -> None:
        """The inner step on a gradient that has been exchanged; nothing for a replica that keeps none."""
        if self.gradient is not None:
            with using_threads(self.threads), deterministic():
                self._step(round, self.local_steps - 1)

    def steps_like(self, other: "Replica") -> bool:
        """Whether Muon's step on the gradient of another replica is its step here, to the last bit."""
        if self.staged is not None or not isinstance(self.optimizer, Joined):
            return False
        if self.task.optimizer is not None:
            return False  # what a step of the user's own changes is not known
        if self.threads != other.threads:
            return False
        mine, theirs = self._stepped(), other._stepped()
        if len(mine) != len(theirs) or len(mine) == 2:
            return False  # before the first step there are no moments to copy to
        return all(map(torch.equal, mine, theirs))

    def take_step_of(self, other: "Replica", round: int) -> None:
        """The step of `step_on_gradient` from a replica that was alike in all and has made it."""
        self.set_lr(self.optimizer, round, self.local_steps - 1)
        for own, found in zip(self._stepped(), other._stepped(), strict=True):
            own.copy_(found)

    def _stepped(self) -> list[Tensor]:
        """What a step on the gradient changes."""
        assert self.gradient is not None and isinstance(self.optimizer, Joined)
        groups = ((part.state, group) for part in self.optimizer.parts.values() for group in part.param_groups)
        moments = [value for state, group in groups for p in group["params"] for value in state.get(p, {}).values()]
        return [self.x, self.gradient, *moments]

    @contextlib.contextmanager
    def holding_evaluated(self) -> Iterator[None]:
        """In here the parameters are those that are evaluated."""
        if self.averaged is None:
            yield
            return
        # Copied in and out, as the model's parameters and the optimizer's are views of this very memory.
        own = self.x.clone()
        self.x.copy_(self.evaluated)
        try:
            yield
        finally:
            self.x.copy_(own)

    def recompute(self) -> None:
        """After an outer step, the parameters follow `x`, or of an optimizer that averages its average and iterate."""
        if self.shards is not None:
            self.shards.flat.write()
        if isinstance(self.optimizer, GPA) and self.gradient is None:
            self.optimizer.recompute()

    def _backward(self, places: Mapping[int, int]) -> tuple[float, int]:
        """The mean loss over these slots, at these inner steps, and its tokens; leaves the mean gradient."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=self.gradient is None)
        if self.staged is None:
            losses = self._backward_whole(places)
        else:
            (step,) = places.values()  # a worker in stages trains on its own slot alone
            losses = self._backward_in_stages(step)
        return sum(losses) / len(losses), len(places) * self.config.step_tokens

    def read_ahead(self, round: int = 0, rounds: int = 1) -> None:
        """Reads the batches of so many rounds, from this one on, where they come from a stream.

        So nothing of a round has begun when one cannot be read. Raises: DataError.
        """
        per_step, step, timetable = self.config.data.accumulate, self.steps_taken, self.config.timetable
        steps = rounds * self.local_steps
        if timetable.changes:
            steps = timetable.steps_before(self.index, round + rounds) - timetable.steps_before(self.index, round)
        self.task.data.read_ahead(self.index, step * per_step, steps * per_step)

    def _backward_whole(self, places: Mapping[int, int]) -> list[float]:
        if self.shards is None:
            return self._backward_over(places, range(self.config.data.accumulate))
        with self.shards.step():
            losses = self._backward_over(places, self.shards.share(self.config.data.accumulate))
        return self.shards.all_losses(losses)

    def _backward_over(self, places: Mapping[int, int], micro_batches: range) -> list[float]:
        """The losses of these micro-batches of each slot; leaves their mean gradient."""
        losses, accumulate = list[float](), self.config.data.accumulate
        passes = len(micro_batches) * len(places)
        for slot, step in places.items():
            for number in (step * accumulate + k for k in micro_batches):
                batch = on_device(self.task.data.batch(slot, number), self.device)
                value = self._forward(slot, number, batch)
                self._backward_from(value / passes if passes > 1 else value)
                losses.append(value.item())
        return losses

    def _backward_from(self, value: Tensor) -> None:
        """The backward pass, while other threads go on; unless it computes forward passes again, which draw again."""
        if not self._recomputes:
            value.backward()
            return
        with rng.TURN:
            self._recomputes = rng.sets_generator(value.backward)
            if self.turns is not None:
                self.turns.learn(self._recomputes)

    def _backward_in_stages(self, step: int) -> list[float]:
        assert self.staged is not None
        data, accumulate = cast(Corpus, self.task.data), self.config.data.accumulate
        numbers = range(step * accumulate, (step + 1) * accumulate)
        return self.staged.backward(
            [(on_device(data.batch(self.index, k), self.device), data.samples(self.index, k)) for k in numbers]
        )

    def _forward(self, slot: int, number: int, batch: Any) -> Tensor:
        """The loss of a batch. What it draws is each slot's and each batch's own; backward draws none.

        A forward pass that draws nothing is spared the lock, under which the replicas of one process would wait for each other.
        """

        def act() -> Tensor:
            with computing(self.config, self.device):
                return self._loss(self.model, batch)

        if not self.task.draws:
            return act()
        alone = functools.partial(rng.drawing, self.device, self.config.seed, slot, number, "model")
        if self.turns is not None:
            return self.turns.call(act, alone, self._keep_buffers)
        with alone():
            return act()

    def _keep_buffers(self) -> Callable[[], None]:
        """Copies the buffers, which a forward pass may change as batch norm's do, and returns what puts them back."""
        homes = [module._buffers for module in self.model.modules()]
        # All of them: torch does not count the changes that batch norm makes (`Tensor._version`).
        kept = [(home, name, one, one.clone()) for home in homes for name, one in home.items() if one is not None]

        def restore() -> None:
            for home, name, buffer, copy in kept:
                buffer.copy_(copy)
                home[name] = buffer

        return restore

    def set_lr(self, optimizer: InnerOptimizer, round: int, h: int) -> None:
        """Gives an optimizer with the groups of this replica's own the learning rates of an inner step."""
        # Workers with fewer local steps walk the schedule faster, so that all are at the same point of it after a round.
        progress = self.config.timetable.progress(round, h / self.local_steps)
        scale = lr_scale(self.config.inner, progress, self.config.run.steps)
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * scale

    def _step(self, round: int, h: int) -> None:
        self.set_lr(self.optimizer, round, h)
        if self.config.inner.clip is not None:
            if self.shards is not None:
                self.shards.clip(self.config.inner.clip)
            elif self.staged is None:
                clip_gradients(list(self.model.parameters()), self.config.inner.clip)
            else:
                self.staged.clip(self.config.inner.clip, again=self.gradient is not None)
        with self._turn_to_step:
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """What a replica needs to train on from given parameters: inner optimizer and place in the data.

        Its random numbers follow from worker and inner step.
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
        for own, saved in zip(self.buffers, state.get("buffers", ()), strict=True):
            own.copy_(saved)
        if self.staged is not None:
            squares = {int(first): float(square) for first, square in state.get("squares", {}).items()}
            self.staged.restore(on_device(state.get("boundaries", {}), self.device), squares)

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a saved state. Raises CheckpointError when it does not fit."""
        try:
            self.load(state)
        except DataError:  # it is the text that differs, and says so
            raise
        except MISFITS as error:
            raise CheckpointError(
                f"the checkpoint of worker {self.index} does not fit this model and inner optimizer ({error}); use the run file "
                "that wrote it, or remove the checkpoint"
            ) from None
