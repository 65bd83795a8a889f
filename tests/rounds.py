"""Rounds of any rule over the real exchange code with prescribed drifts, for tests that need no model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer.codecs import Codec, exact
from gossamer.layout import Layout, Leaf
from gossamer.record.trace import Operation
from gossamer.rounds.exchange import Each, Exchange, finish_all
from gossamer.rounds.kernel import PLAIN, Kernel
from gossamer.rounds.loop import OuterLoop
from gossamer.rounds.method import Method
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Context, Rule
from gossamer.topologies import Topology
from gossamer.topologies.mixing import Mixing
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import Tree

Drift = Callable[[int, int, Tensor], Tensor]


def layout(numel: int) -> Layout:
    """A layout of one tensor."""
    return Layout((Leaf("w", (numel,), 0, numel),), numel)


def context(worker: int, round: int, mixing: Mixing, x: Tensor) -> Context:
    """What a worker that took one step knows of its round, before the exchange adds what the mixing says."""
    return Context(worker, mixing.n, round, 1, mixing.weight(worker), layout(x.numel()))


def serially(fn, items):
    """A map over workers without threads."""
    return [fn(item) for item in items]


def drive(exchanges: Sequence[Exchange], each: Each) -> list[Operation]:
    """Posts and finishes the exchanges of all workers; returns what each sent and received."""
    operations = each(Exchange.post, exchanges)
    finish_all(exchanges, each)
    return operations


def play(
    rule: Rule, topology: Topology, start: Sequence[Tensor], rounds: int, drift: Drift | None = None, *,
    codec: Codec | None = None, states: list[Tree] | None = None, first: int = 0, kernel: Kernel | None = None,
    schedule: Schedule | None = None, steps: int | Sequence[int] = 1, spans: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[Tensor], list[Tree]]:  # fmt: skip
    """The workers after `rounds` rounds from `start`; `drift(worker, step, x)` is added to x in each inner step.

    For a rule on gradients the drift is the gradient itself. What is under way after the last round is heard as at the end
    of a run.
    """
    xs = [x.clone() for x in start]
    n, network = len(xs), MemoryNetwork(len(xs))
    local = [steps] * n if isinstance(steps, int) else list(steps)
    m = Method(rule, topology, codec or exact(), schedule or Schedule(), kernel or PLAIN)
    loops = []
    for i, x in enumerate(xs):
        parts = [(x[a:b], layout(b - a)) for a, b in spans or [(0, x.numel())]]
        loop = OuterLoop(m, network.transport(i), parts, local_steps=local[i], full_steps=max(local), seed=0)
        if states is not None:
            own = loop.fragments[0]
            loop.fragments[0] = own._replace(part=own.part._replace(s=states[i]))
        loops.append(loop)
    for t in range(first, first + rounds):
        before = [0] * n
        for stop in loops[0].stops(t):
            for i, (x, loop) in enumerate(zip(xs, loops, strict=True)):
                loop.announce(t, stop)
                end = stop.after(local[i], max(local))
                for h in range(before[i], end):
                    if drift is not None:
                        moved = drift(i, t * local[i] + h, x)
                        x.copy_(moved if rule.site == "gradients" else x + moved)
                before[i] = end
            for loop in loops:
                loop.post(t, stop)
            for due in zip(*(loop.pop_due(t, stop) for loop in loops), strict=True):
                finish_all(due, serially)
            for loop in loops:
                loop.update_from_zeros(t, stop)
    for due in zip(*(loop.pop_rest() for loop in loops), strict=True):
        finish_all(due, serially)
    return xs, [loop.state[0] if spans is None else loop.state for loop in loops]


def random_vectors(n: int, numel: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """n unequal starting points."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(n)]


def random_drift(numel: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Drift:
    """Drifts that depend on worker and round alone."""

    def drift(worker: int, round: int, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, worker, round)) & 0xFFFFFFFF)
        return torch.randn(numel, generator=generator, dtype=dtype)

    return drift
