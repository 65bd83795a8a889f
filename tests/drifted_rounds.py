"""Rounds of any rule over the real exchange code with prescribed drifts, for tests that need no model."""

from collections.abc import Sequence

from torch import Tensor

from gossamer.codecs import Codec, exact
from gossamer.record.logs.trace import Operation
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.exchange import Each, Exchange, finish_all
from gossamer.rounds.kernel import PLAIN, Kernel
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Context, Rule
from gossamer.testing.drifted_workers import Drift, simulated_workers
from gossamer.testing.drifted_workers import flat_layout as layout
from gossamer.topologies import Topology
from gossamer.topologies.mixing import Mixing
from gossamer.tree import Tree


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
    """The workers after `rounds` rounds from `start`, see `gossamer.testing.drifted_workers`.

    What is under way after the last round is heard as at the end of a run.
    """
    m = Method(rule, topology, codec or exact(), schedule or Schedule(), kernel or PLAIN)
    workers = simulated_workers(m, start, steps=steps, spans=spans)
    for loop, s in zip(workers.loops, states or (), strict=states is not None):
        own = loop.fragments[0]
        loop.fragments[0] = own._replace(part=own.part._replace(s=s))
    workers.train(range(first, first + rounds), drift)
    workers.finish()
    return workers.xs, [s[0] if spans is None else s for s in workers.states]
