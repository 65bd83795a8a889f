"""Workers without a model: the real outer loop and exchange, with parameters moved by prescribed drifts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.layout import Layout
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.loop import OuterLoop, finish_together
from gossamer.settings.over_time import timetable_of
from gossamer.transport.contract import Transport
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import Tree

Drift = Callable[[int, int, Tensor], Tensor]
"""`drift(worker, step, x)` is added to x in an inner step; for a rule on gradients it is the gradient itself."""


def flat_layout(numel: int) -> Layout:
    """A layout of one tensor."""
    return Layout.of([("w", (numel,))])


def random_vectors(n: int, numel: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """n unequal starting points."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(n)]


def random_drift(numel: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Drift:
    """Drifts that depend only on worker and step."""

    def drift(worker: int, step: int, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, worker, step)) & 0xFFFFFFFF)
        return torch.randn(numel, generator=generator, dtype=dtype)

    return drift


class DriftedWorkers:
    """The workers of one process (all in a simulation, one in a real process): parameters and outer loops.

    Args:
        transports: one for each worker of this process, which identifies it.
        start: their parameters, which are copied.
        steps: inner steps of a round, of all workers of the run.
        spans: of the fragments; one of all numbers when None.
    """

    def __init__(
        self,
        m: Method,
        transports: Sequence[Transport],
        start: Sequence[Tensor],
        *,
        steps: int | Sequence[int] = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.xs = [x.clone() for x in start]
        self.loops: list[OuterLoop] = []
        local = [steps] * m.topology.n if isinstance(steps, int) else list(steps)
        for x, transport in zip(self.xs, transports, strict=True):
            parts = [(x[a:b], flat_layout(b - a)) for a, b in spans or [(0, x.numel())]]
            worker_steps = local[transport.worker]
            timetable = timetable_of(((0, tuple(local)),))
            self.loops.append(OuterLoop(m, transport, parts, local_steps=worker_steps, timetable=timetable, seed=0))

    @property
    def states(self) -> list[Tree]:
        """The outer state of the fragments of each worker."""
        return [loop.state for loop in self.loops]

    def train(self, rounds: range, drift: Drift | None = None) -> None:
        """Trains these rounds; without a drift the parameters do not move locally."""
        for t in rounds:
            for loop in self.loops:
                loop.begin_round(t)
            before = [0] * len(self.loops)
            for stop in self.loops[0].stops(t):
                for k, (x, loop) in enumerate(zip(self.xs, self.loops, strict=True)):
                    loop.announce(t, stop)
                    end = stop.after(loop.local_steps, loop.full_steps)
                    for h in range(before[k], end):
                        if drift is not None:
                            moved = drift(loop.worker, t * loop.local_steps + h, x)
                            x.copy_(moved if loop.method.rule.site == "gradients" else x + moved)
                    before[k] = end
                for loop in self.loops:
                    loop.post(t, stop)
                finish_together(self.loops, self.loops[0].due(t, stop), _serially)
                for loop in self.loops:
                    loop.receive(t, stop)

    def finish(self) -> None:
        """Receives what is in flight after the last round."""
        finish_together(self.loops, self.loops[0].rest(), _serially)


def simulated_workers(
    m: Method,
    start: Sequence[Tensor],
    *,
    steps: int | Sequence[int] = 1,
    spans: Sequence[tuple[int, int]] | None = None,
) -> DriftedWorkers:
    """All workers in this process."""
    network = MemoryNetwork(len(start))
    return DriftedWorkers(m, [network.transport(i) for i in range(len(start))], start, steps=steps, spans=spans)


def _serially(fn: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [fn(item) for item in items]
