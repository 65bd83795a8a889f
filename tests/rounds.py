"""Rounds of any rule over the real exchange code with prescribed drifts, for tests that need no model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer import sync
from gossamer.codecs import Codec, exact
from gossamer.fragment import Layout, Leaf
from gossamer.mixing import Mixing
from gossamer.rules import Context, Rule
from gossamer.sync import drive
from gossamer.topology import Topology
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import Tree

Drift = Callable[[int, int, Tensor], Tensor]


def layout(numel: int) -> Layout:
    """A layout of one tensor."""
    return Layout((Leaf("w", (numel,), 0, numel),), numel)


def context(worker: int, round: int, mixing: Mixing, x: Tensor) -> Context:
    """What a worker that took one step knows of its round, before `sync` adds what the mixing says."""
    return Context(worker, mixing.n, round, 1, mixing.weight(worker), layout(x.numel()))


def serially(fn, items):
    """A map for `drive` without threads."""
    return [fn(item) for item in items]


def play(
    rule: Rule, topology: Topology, start: Sequence[Tensor], rounds: int, drift: Drift | None = None, *,
    codec: Codec | None = None, states: list[Tree] | None = None, first: int = 0, kernel: sync.Kernel | None = None,
) -> tuple[list[Tensor], list[Tree]]:  # fmt: skip
    """The workers after `rounds` rounds from `start`; `drift(worker, round, x)` is added to x in each local phase.

    For a rule on gradients the drift is the gradient itself.
    """
    xs = [x.clone() for x in start]
    if states is None:
        mixing = topology.mixing(first)
        states = [sync.initial_state(rule, mixing, x, context(i, first, mixing, x)) for i, x in enumerate(xs)]
    network = MemoryNetwork(len(xs))
    transports = [network.transport(i) for i in range(len(xs))]
    for t in range(first, first + rounds):
        mixing = topology.mixing(t)
        exchanges = []
        for i, (x, s) in enumerate(zip(xs, states, strict=True)):
            ctx = context(i, t, mixing, x)
            part = sync.Part(x, s, ctx.layout)
            exchanges.append(
                sync.begin(rule, codec or exact(), mixing, transports[i], part, ctx, seed=0, kernel=kernel)
            )
        for i, x in enumerate(xs):
            if drift is not None:
                x.copy_(drift(i, t, x) if rule.site == "gradients" else x + drift(i, t, x))
        drive(exchanges, transports, serially)
    return xs, states


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
