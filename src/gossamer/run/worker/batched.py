"""Replicas of a simulation that train together, as one batched computation."""

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.models.stacked import stacked_losses
from gossamer.optimizers import InnerOptimizer, Joined, SpectralMuon
from gossamer.record.progress import note_trained
from gossamer.rounds.exchange import Each
from gossamer.run.worker.compiled import made_ready
from gossamer.run.worker.numerics import deterministic
from gossamer.run.worker.replica import LocalPhase, Replica, loss_must_be_finite
from gossamer.run.worker.stages.in_one_process import computing
from gossamer.run.worker.task import on_device
from gossamer.run.worker.worker import Segment, Worker


class Stack:
    """Replicas that take the same inner steps at the same time; each has its own parameters, moments and data.

    Between calls of `train`, parameters and moments are in the replicas.

    Cost: a copy of their parameters, gradients and moments, and the activations of all of them at a time.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas, like = replicas, replicas[0]
        self._weights = {
            name: torch.empty(len(replicas), *p.shape, dtype=p.dtype, device=p.device).requires_grad_()
            for name, p in like.model.named_parameters()
        }
        self._losses = made_ready(stacked_losses, like.run)
        names = {p: name for name, p in like.model.named_parameters()}
        self._part: dict[str, str] = {}
        """The part of a joined optimizer that updates each parameter."""
        parts = dict[str, Optimizer]()
        for part, optimizer in _parts(like.optimizer).items():
            self._part |= {names[p]: part for group in optimizer.param_groups for p in group["params"]}
            groups = ({**g, "params": [self._weights[names[p]] for p in g["params"]]} for g in optimizer.param_groups)
            stacks = {"stacks": True} if isinstance(optimizer, SpectralMuon) else {}  # others are elementwise
            parts[part] = cast(Any, type(optimizer))(groups, **stacks)
        self._optimizer = Joined(**parts)

    def train(self, round: int, start: int, stop: int) -> list[LocalPhase]:
        """The inner steps `start` to `stop` of a round, or only their gradients; returns each replica's report.

        Raises: TrainingError at the first loss that is not finite.
        """
        with deterministic():
            return self._train(round, start, stop)

    def _train(self, round: int, start: int, stop: int) -> list[LocalPhase]:
        began, like, R = time.perf_counter(), self._replicas[0], len(self._replicas)
        steps = like.gradient is None  # else each replica steps separately, once it has the mean
        losses: list[list[float]] = []
        self._take(moments=steps)
        for h in range(start, stop):
            losses.append(self._backward(round))
            if steps:
                self._step(round, h)
            note_trained(R, R * like.run.step_tokens)
        if steps:
            self._give()
        else:
            self._give_gradients()
        each_s = (time.perf_counter() - began) / R
        lr = (self._optimizer if steps else like.optimizer).param_groups[0]["lr"]
        tokens = len(losses) * like.run.step_tokens
        return [LocalPhase(tuple(values[r] for values in losses), lr, each_s, tokens) for r in range(R)]

    def _backward(self, round: int) -> list[float]:
        """The gradients of one inner step of all replicas; returns their losses."""
        like, accumulate = self._replicas[0], self._replicas[0].run.data.accumulate
        self._optimizer.zero_grad()
        total = torch.zeros(len(self._replicas), device=like.device)
        for micro in range(accumulate):
            number = like.steps_taken * accumulate + micro
            batch = torch.stack([replica.task.data.batch(replica.index, number) for replica in self._replicas])
            with computing(like.run, like.device):
                losses = self._losses(self._weights, like.run.model.shape, on_device(batch, like.device))
            (losses.sum() / accumulate).backward()
            total += losses.detach()
        values = (total / accumulate).tolist()
        for replica, value in zip(self._replicas, values, strict=True):
            loss_must_be_finite(value, replica, round)
            replica.steps_taken += 1
        return values

    def _step(self, round: int, h: int) -> None:
        like = self._replicas[0]
        like.set_lr(self._optimizer, round, h)
        if like.run.inner.clip is not None:
            self._clip(like.run.inner.clip)
        self._optimizer.step()

    def _clip(self, max_norm: float) -> None:
        """Shortens each replica's gradient to this norm, as `clip_gradients` does."""
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
        shares = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(shares.view(-1, *[1] * (g.ndim - 1)))

    @torch.no_grad()
    def _take(self, *, moments: bool) -> None:
        """Copies the parameters of all replicas, and their moments where it is to step."""
        for r, replica in enumerate(self._replicas):
            for name, p in replica.model.named_parameters():
                weight = self._weights[name]
                weight[r].copy_(p)
                if not moments:
                    continue
                shared, states = self._states(replica, name, p)
                for key, saved in states.items():
                    if _is_one_for_each(saved, p):
                        shared.setdefault(key, torch.empty_like(weight))[r].copy_(saved)
                    else:
                        shared[key] = _copied(saved)  # the step counts, equal for all

    @torch.no_grad()
    def _give(self) -> None:
        """Copies them back, moments in place, as these may be views of exchanged vectors."""
        for r, replica in enumerate(self._replicas):
            for name, p in replica.model.named_parameters():
                weight, (shared, states) = self._weights[name], self._states(replica, name, p)
                p.copy_(weight[r])
                for key, value in shared.items():
                    state = value[r] if _is_one_for_each(value, weight) else value
                    if isinstance(states.get(key), Tensor):
                        states[key].copy_(state)
                    else:
                        states[key] = _copied(state)

    def _states(self, replica: Replica, name: str, p: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """The optimizer's state for a parameter of all replicas, and that of one."""
        part = self._part[name]
        return self._optimizer.parts[part].state[self._weights[name]], _parts(replica.optimizer)[part].state[p]

    @torch.no_grad()
    def _give_gradients(self) -> None:
        """Copies each replica's gradient to its exchanged vector."""
        for r, replica in enumerate(self._replicas):
            for name, p in replica.model.named_parameters():
                gradient = self._weights[name].grad
                assert gradient is not None and p.grad is not None
                p.grad.copy_(gradient[r])


def _parts(optimizer: InnerOptimizer) -> dict[str, Optimizer]:
    """The parts of a joined optimizer by name, or the optimizer itself."""
    return dict(optimizer.parts) if isinstance(optimizer, Joined) else {"alone": cast(Optimizer, optimizer)}


def _is_one_for_each(value: Any, parameter: Tensor) -> bool:
    """Whether this is a moment of each number of a parameter, rather than a count."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class Stacks:
    """The workers of a simulation in stacks of bounded size with equal local steps."""

    def __init__(self, workers: Sequence[Worker], size: int) -> None:
        def steps(worker: Worker) -> list[int]:
            return [one.of(worker.index) for one in worker.run.timetable.stretches]

        alike = [[*group] for _, group in groupby(sorted(workers, key=steps), key=steps)]
        groups = [group[k : k + size] for group in alike for k in range(0, len(group), size)]
        self._groups = [(group, Stack([worker.replica for worker in group])) for group in groups]

    def train(self, turns: Sequence[tuple[Worker, Segment]], each: Each) -> list[LocalPhase]:
        """`Worker.train` for all workers."""
        segments = {worker.index: segment for worker, segment in turns}

        def together(group: tuple[Sequence[Worker], Stack]) -> list[LocalPhase]:
            workers, stack = group
            for worker in workers:
                worker.loop.announce(segments[worker.index].round, segments[worker.index].stop)
            segment = segments[workers[0].index]  # the same for all of them, which take equally many local steps
            return stack.train(segment.round, segment.first, segment.last)

        phases = zip(self._groups, each(together, self._groups), strict=True)
        by_worker = {
            worker.index: phase for (workers, _), some in phases for worker, phase in zip(workers, some, strict=True)
        }
        return [by_worker[worker.index] for worker, _ in turns]
