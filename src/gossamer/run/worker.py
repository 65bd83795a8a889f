"""One worker: a model replica with its inner optimizer and its data, and the outer state of its rule. Both drivers run these."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.codecs import make_codec
from gossamer.data.corpus import Corpus
from gossamer.errors import CheckpointError, PairingError, TrainingError
from gossamer.layout import Layout, arrange, attach, flat_gradients, layout_of, views
from gossamer.models.llama import build_model, loss
from gossamer.network.pacing import Note, Pacer, first_leg_bytes
from gossamer.optimizers import GPA
from gossamer.optimizers.inner import build_optimizer, clip_gradients, lr_scale, share_moments
from gossamer.record.folder import RunFolder
from gossamer.record.trace import Entry, Operation
from gossamer.rounds import loop as outer
from gossamer.rounds import stability
from gossamer.rounds.loop import Method, OuterLoop
from gossamer.rounds.schedule import Stop
from gossamer.rules import make_rule, weighted
from gossamer.run.config import RunConfig, digest
from gossamer.topologies import Topology, make_topology
from gossamer.transport import Ticket, Transport
from gossamer.tree import leaves, must_fit

__all__ = ["LocalPhase", "Worker", "joined", "method", "parts_of", "topology_of"]


def method(config: RunConfig) -> Method:
    """The rule, topology, codec and schedule of a run, checked to fit.

    Raises: ConfigError and PairingError.
    """
    topology = topology_of(config)
    rule = make_rule(config.rule.name, **config.rule.options)
    if config.run.weigh_steps:
        rule = weighted(stability.settle(rule, topology))
    if config.run.weigh_steps and config.run.adapt and rule.delay_rounds:
        raise PairingError(
            f"run.adapt and run.weigh_steps are set for rule '{rule.name}', which hears {rule.delay_rounds} round late, when its "
            "local steps may be others than those it sent; leave one of the two out"
        )
    codec = make_codec(config.codec.name, **config.codec.options)
    if config.run.mean == "all_reduce" and not (rule.averages and codec.exact and codec.back is None):
        raise PairingError(
            f"run.mean is 'all_reduce' and rule '{rule.name}' with codec '{codec.name}' takes no mean that a backend could; set "
            "run.mean = 'ordered', or take a rule such as 'diloco' with the codec 'exact'"
        )
    return outer.method(
        rule, topology, codec, config.schedule, local_steps=config.run.local_steps, compile=config.run.compile
    )


def topology_of(config: RunConfig) -> Topology:
    """The topology of a run. Raises ConfigError for options that cannot work."""
    return make_topology(config.topology.name, config.workers, seed=config.seed, **config.topology.options)


class LocalPhase(NamedTuple):
    """What a worker reports of the inner steps between two stops; phases of one round add up with `joined`."""

    losses: tuple[float, ...]
    """Training loss of each inner step, nats per token."""
    lr: float
    compute_s: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean training loss."""
        return math.fsum(self.losses) / len(self.losses)


def parts_of(
    x: Tensor, layout: Layout, spans: Sequence[tuple[int, int]], averaged: Tensor | None, moments: Sequence[Tensor]
) -> list[tuple[Tensor, Layout]]:
    """What a worker exchanges, as `OuterLoop` takes it: the fragments of x, or average and iterate together, and moments."""
    if averaged is None:
        parts = [(x[a:b], layout.slice(a, b)) for a, b in spans]
    else:  # mixing the parameters alone would part them from these two
        n = layout.numel
        again = (leaf._replace(start=leaf.start + n, stop=leaf.stop + n) for leaf in layout.leaves)
        parts = [(averaged, Layout((*layout.leaves, *again), 2 * n))]
    return [*parts, *((each, layout) for each in moments)]


def joined(phases: Sequence[LocalPhase]) -> LocalPhase:
    """Consecutive phases as one."""
    losses = tuple(loss for phase in phases for loss in phase.losses)
    return LocalPhase(losses, phases[-1].lr, sum(p.compute_s for p in phases), sum(p.tokens for p in phases))


class Worker:
    """One replica. `x` is its flat parameter vector `[P]`, of which the model's parameters are views.

    It trains on its own; `join` gives it the outer loop through which it talks to its peers. What is evaluated, saved and
    published is `evaluated`: `x` itself, or the average of an optimizer that keeps one.
    """

    loop: OuterLoop

    def __init__(
        self, index: int, config: RunConfig, corpus: Corpus, device: torch.device, buffer: Tensor | None = None
    ):
        self.index, self.config, self.corpus, self.device = index, config, corpus, device
        model = build_model(config.model, corpus.vocab_size, config.data.seq_len, config.seed)
        self.model = model.to(device)
        schedule = config.schedule
        self.layout, self.spans = arrange(layout_of(self.model), *config.fragments)
        self.x = attach(self.model, self.layout, buffer)
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
        self.optimizer = build_optimizer(config.inner, self.model, **homes)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.moments: tuple[Tensor, Tensor] | None = None
        """The inner optimizer's first and second moments, `[P]` each, where the schedule exchanges them."""
        if schedule.inner_every:
            self.moments = share_moments(self.optimizer, self.model, self.layout)
        self.gradient: Tensor | None = None
        self.local_steps = config.local_steps(index)
        self.pacer: Pacer | None = None
        """Decides on the local steps of the next round, where they adapt."""
        self.steps_taken = 0

    def join(
        self, m: Method, transport: Transport, reduce: Callable[[Sequence[Tensor], Ticket], None] | None = None
    ) -> None:
        """Takes up the outer loop, with the outer state as it is at the start of a run."""
        x = self.x
        if m.rule.site == "gradients":
            x = self.gradient = flat_gradients(self.model, self.layout, torch.zeros_like(self.x))
        averaged = self.averaged if m.rule.site == "parameters" else None
        parts = parts_of(x, self.layout, self.spans, averaged, self.moments or ())
        self.loop = OuterLoop(
            m, transport, parts, workers=self.config.workers, local_steps=self.local_steps,
            full_steps=self.config.full_steps, seed=self.config.seed, reduce=reduce,
        )  # fmt: skip
        if self.config.run.adapt:
            hidden = 1.0 if m.rule.delay_rounds else m.schedule.hidden(self.config.full_steps)
            self.pacer = Pacer(self.index, self.local_steps, self.config.full_steps, hidden)

    def take(self, local_steps: int) -> None:
        """From the next round on, takes so many inner steps in each."""
        self.local_steps = self.loop.local_steps = local_steps

    def local_phase(self, round: int, start: int, stop: int, between: Callable[[], None] | None = None) -> LocalPhase:
        """The inner steps `start` to `stop` of a round; for a rule on gradients without the optimizer step, which `apply` takes.

        Args: `between` is called after each inner step.
        Raises: TrainingError at the first loss that is not finite.
        """
        began = time.perf_counter()
        losses, tokens = [], 0
        for h in range(start, stop):
            value, count = self._backward(self.steps_taken)
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss of worker {self.index} became {value} at its inner step {self.steps_taken} (round {round}); "
                    "the last checkpoint is whole: lower inner.lr or the outer learning rate and resume from it"
                )
            losses.append(value)
            tokens += count
            self.steps_taken += 1
            if self.gradient is None:
                self._step(round, h)
            if pace_s := self.config.pace_s(self.index):
                time.sleep(max(0.0, began + len(losses) * pace_s - time.perf_counter()))
            if between is not None:
                between()
        lr = self.optimizer.param_groups[0]["lr"]
        return LocalPhase(tuple(losses), lr, time.perf_counter() - began, tokens)

    def take_in(self) -> None:
        """What follows from what was just heard: an optimizer that averages makes the parameters anew."""
        if isinstance(self.optimizer, GPA) and self.gradient is None:
            self.optimizer.recompute()

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
        progress = (round + h / self.local_steps) * self.config.full_steps
        scale = lr_scale(self.config.inner, progress, self.config.run.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * scale
        if self.config.inner.clip is not None:
            clip_gradients(list(self.model.parameters()), self.config.inner.clip)
        self.optimizer.step()

    def segments(self, round: int) -> Iterator[tuple[Stop, int, int]]:
        """The stops of a round, each with the inner steps of this worker that lead to it."""
        start = 0
        for stop in self.loop.stops(round):
            end = stop.after(self.local_steps, self.config.full_steps)
            yield stop, start, end
            start = end

    def tell(
        self, record: RunFolder, round: int, phases: Sequence[LocalPhase], operations: Sequence[Sequence[Operation]]
    ) -> None:
        """Writes what this worker did between the stops of a round, and sent at them, into the metrics and the trace.

        Both drivers write the same lines. In the trace each fragment has a round of its own, which ends when it is sent.
        """
        whole = joined(phases)
        record.log(
            "train", round=round, worker=self.index, step=self.steps_taken, loss=whole.loss, lr=whole.lr,
            tokens=self.steps_taken * self.config.step_tokens,
        )  # fmt: skip
        entry, gathered = round * self.config.schedule.fragments, []
        for phase, sent in zip(phases, operations, strict=True):
            gathered.append(phase)
            if sent:
                part = joined(gathered)
                record.log_trace(Entry(entry, self.index, len(part.losses), part.compute_s, tuple(sent)))
                entry, gathered = entry + 1, []

    def measured(
        self, phase: LocalPhase, operations: Sequence[Sequence[Operation]], uplinks_bytes_per_s: Mapping[int, float],
        step_s: float | None = None,
    ) -> Note:  # fmt: skip
        """Tells the pacer how the round went, and returns what the others should know; `step_s` in place of the measured one."""
        assert self.pacer is not None
        own_s = phase.compute_s / len(phase.losses) if step_s is None else step_s
        sent_bytes = first_leg_bytes((operation for some in operations for operation in some), self.loop.share_there)
        return self.pacer.measured(own_s, sent_bytes, uplinks_bytes_per_s)

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs to continue bit for bit: model, inner and outer state, data position, RNG."""
        return {
            "x": self.evaluated,
            "outer": leaves(self.loop.state),
            "under_way": self.loop.state_under_way(),
            "steps_taken": self.steps_taken,
            "pace": None if self.pacer is None else self.pacer.state(),
            "inner": self.optimizer.state_dict(),
            "data": self.corpus.state(),
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a checkpoint back. Raises CheckpointError when it does not fit this model or rule."""
        try:
            mine, theirs = [self.evaluated, *leaves(self.loop.state)], [state["x"], *state["outer"]]
            must_fit(theirs, mine)
            for own, saved in zip(mine, theirs, strict=True):
                own.copy_(saved)
            self.steps_taken = int(state["steps_taken"])
            if self.pacer is not None:
                self.pacer.restore(state["pace"])
                self.take(self.pacer.steps)
            self.optimizer.load_state_dict(state["inner"])
            if self.moments:
                share_moments(self.optimizer, self.model, self.layout, self.moments)
            self.loop.restore_under_way(state["under_way"])
            self.corpus.restore(state["data"])
            torch.set_rng_state(state["rng"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint of worker {self.index} does not fit rule '{self.config.rule.name}' and this model "
                f"({error}); "
                f"resume with the run file it was written by (digest {digest(self.config)})"
            ) from None
