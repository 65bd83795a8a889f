"""One worker: a model replica with its inner optimizer and its data, and the outer state of its rule. Both drivers run these."""

import logging
import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer import stability
from gossamer.codecs import CODECS, Codec
from gossamer.config import RunConfig, digest
from gossamer.data import Corpus
from gossamer.errors import CheckpointError, TrainingError
from gossamer.fragment import Layout, attach, flat_gradients, layout_of
from gossamer.inner import build_optimizer, clip_gradients, lr_scale
from gossamer.model import build_model, loss
from gossamer.record import RunFolder
from gossamer.rules import RULES, Context, Rule
from gossamer.sync import PLAIN, Kernel, Part, check, compiled
from gossamer.topology import Topology, make_topology
from gossamer.trace import Entry, Operation
from gossamer.tree import leaves

__all__ = ["LocalPhase", "Method", "Worker", "method"]

log = logging.getLogger("gossamer")


class Method(NamedTuple):
    """What is trained with: the settled rule, its topology and codec, and how the outer update is carried out."""

    rule: Rule
    topology: Topology
    codec: Codec
    kernel: Kernel


def method(config: RunConfig) -> Method:
    """The rule, topology and codec of a run, checked to fit; warns when the disagreement is predicted to diverge.

    Raises: ConfigError and PairingError.
    """
    topology = make_topology(config.topology.name, config.workers, seed=config.seed, **config.topology.options)
    rule = stability.settle(RULES[config.rule.name](**config.rule.options), topology)
    codec = CODECS[config.codec.name](**config.codec.options)
    check(rule, topology, codec, local_steps=config.run.local_steps)
    if sentence := stability.warning(rule, topology):
        log.warning(sentence)
    return Method(rule, topology, codec, compiled() if config.run.compile else PLAIN)


class LocalPhase(NamedTuple):
    """What a worker reports of the inner steps of one round."""

    loss: float
    """Mean training loss over its inner steps, nats per token."""
    lr: float
    compute_s: float
    tokens: int


class Worker:
    """One replica. `x` is its flat parameter vector `[P]`, of which the model's parameters are views."""

    def __init__(
        self,
        index: int,
        config: RunConfig,
        rule: Rule,
        corpus: Corpus,
        device: torch.device,
        buffer: Tensor | None = None,
    ):
        self.index, self.config, self.rule, self.corpus, self.device = index, config, rule, corpus, device
        model = build_model(config.model, corpus.vocab_size, config.data.seq_len, config.seed)
        self.model = nn.Module.to(model, device)  # by this name because transformers types its own wrongly
        self.layout: Layout = layout_of(self.model)
        self.x = attach(self.model, self.layout, buffer)
        self.optimizer = build_optimizer(config.inner, self.model)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.outer = rule.init(self.x)
        self.gradient: Tensor | None = None
        if rule.site == "gradients":
            self.gradient = flat_gradients(self.model, self.layout, torch.zeros_like(self.x))
        self.local_steps = config.local_steps(index)
        self.lead = 0  # rounds by which the learning-rate schedule is ahead of this worker's own count of phases

    def part(self) -> Part:
        """What the round acts on: the parameters, or the gradients for a rule of that site."""
        return Part(self.x if self.gradient is None else self.gradient, self.outer, self.layout)

    def context(self, round: int, weight: float) -> Context:
        """What the rule may know of this round."""
        return Context(self.index, self.config.workers, round, self.local_steps, weight, self.layout)

    def local_phase(self, round: int) -> LocalPhase:
        """The inner steps of a round; for a rule on gradients all but the last optimizer step, which `apply` takes.

        Raises: TrainingError at the first loss that is not finite.
        """
        start = time.perf_counter()
        losses, tokens = [], 0
        for h in range(self.local_steps):
            step = round * self.local_steps + h
            value, count = self._backward(step)
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss of worker {self.index} became {value} at its inner step {step} (round {round}); "
                    "the last checkpoint is whole: lower inner.lr or the outer learning rate and resume from it"
                )
            losses.append(value)
            tokens += count
            if self.gradient is None:
                self._step(round, h)
            if self.config.run.pace_s:
                time.sleep(max(0.0, start + (h + 1) * self.config.run.pace_s - time.perf_counter()))
        lr = self.optimizer.param_groups[0]["lr"]
        return LocalPhase(math.fsum(losses) / len(losses), lr, time.perf_counter() - start, tokens)

    def apply(self, round: int) -> None:
        """The optimizer step on gradients that have been exchanged; nothing for a rule on parameters."""
        if self.gradient is not None:
            self._step(round, self.local_steps - 1)

    def _backward(self, step: int) -> tuple[float, int]:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=self.gradient is None)
        total, tokens = 0.0, 0
        accumulate = self.config.data.accumulate
        for micro in range(accumulate):
            batch = self.corpus.batch(self.index, step * accumulate + micro).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.inner.autocast == "bf16"):
                value = loss(self.model, batch)
            (value / accumulate if accumulate > 1 else value).backward()
            total += value.item()
            tokens += batch.shape[0] * (batch.shape[1] - 1)
        return total / accumulate, tokens

    def _step(self, round: int, h: int) -> None:
        # Workers with fewer local steps walk the schedule faster, so that all are at the same point of it after a round.
        progress = (round + self.lead + h / self.local_steps) * self.config.full_steps
        scale = lr_scale(self.config.inner, progress, self.config.run.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * scale
        if self.config.inner.clip is not None:
            clip_gradients(list(self.model.parameters()), self.config.inner.clip)
        self.optimizer.step()

    def tell(self, record: RunFolder, round: int, phase: LocalPhase, operation: Operation) -> None:
        """Writes what this worker did in a round into the metrics and the trace; both drivers write the same lines."""
        finished = round + 1
        record.log(
            "train", round=round, worker=self.index, step=finished * self.local_steps, loss=phase.loss, lr=phase.lr,
            tokens=finished * phase.tokens,
        )  # fmt: skip
        record.log_trace(Entry(round, self.index, self.local_steps, phase.compute_s, (operation,)))

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs to continue bit for bit: model, inner and outer state, data position, RNG."""
        return {
            "x": self.x,
            "outer": leaves(self.outer),
            "inner": self.optimizer.state_dict(),
            "data": self.corpus.state(),
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint back. Raises CheckpointError when it does not fit this model or rule."""
        try:
            mine, theirs = [self.x, *leaves(self.outer)], [state["x"], *state["outer"]]
            for own, saved in zip(mine, theirs, strict=True):
                if own.shape != saved.shape or own.dtype != saved.dtype:
                    raise ValueError(
                        f"a tensor of {tuple(saved.shape)} {saved.dtype} for {tuple(own.shape)} {own.dtype}"
                    )
            for own, saved in zip(mine, theirs, strict=True):
                own.copy_(saved)
            self.optimizer.load_state_dict(state["inner"])
            self.corpus.restore(state["data"])
            torch.set_rng_state(state["rng"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint of worker {self.index} does not fit rule '{self.rule.name}' and this model: {error}; "
                f"resume with the run file it was written by (digest {digest(self.config)})"
            ) from None
