"""The messages and the memory of the workers of a run, counted without training.

Rounds are played on tensors without data: every message and payload is really made and sent, and none is received.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gossamer.codecs import fitted
from gossamer.codecs.message import each_shape_once, payload_bytes
from gossamer.layout import Layout, arrange
from gossamer.optimizers.inner import without_compiler
from gossamer.record.logs.trace import Entry, Operation
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.loop import OuterLoop
from gossamer.rules import Rule
from gossamer.run.config.layouts import arranged, holding_of
from gossamer.run.config.resolved import InPairs, ResolvedRun, RunSettings, WithServer
from gossamer.run.worker.worker import parts_of
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import Tree, leaves, nbytes


class Traffic(NamedTuple):
    """Averages for one worker and one round, or for one local phase of an asynchronous run."""

    sent_bytes: float
    most_bytes: float
    """The bytes of the worker that sends most."""
    messages: float
    peers: float
    kinds: tuple[str, ...]
    """The kinds of operations, of `gossamer.record.logs.trace.KINDS`."""
    state_copies: float
    """Outer state, in models."""
    flight_copies: float
    """Memory for exchanges in flight while training continues, in models, at its most."""


def traffic(run: ResolvedRun, layout: Layout, rounds: int = 0) -> Traffic:
    """Plays rounds of a run and counts; as many as until everything repeats, unless given.

    Args: `layout` is that of the whole model.
    """
    m = run.method
    if isinstance(m, WithServer | InPairs):
        return _phase_traffic(run, m, layout)
    # Without waiting, what is published after a phase is what would be sent in a round.
    return play_rounds(run, m, layout, *extent(run, m, rounds or period_of(run, m)))[0]


def period_of(run: RunSettings, m: Method) -> int:
    """Rounds after which what is sent repeats, as far as its bytes go."""
    return math.lcm(m.topology.period or 1, *(every for every in run.schedule.inner_every if every))


MOST_PLAYED = 1_000
"""Workers whose part in a round is played, where not all of them are asked for."""
_MOST_MESSAGES, _OF_A_ROUND = 100_000, 10
"""Messages that are played, which takes some seconds, and those that take as long as the rest of a worker's round."""
_MOST_ROWS = 1_000_000
"""Rows of mixing matrices of the rounds that are played; they are made twice."""


def extent(run: RunSettings, m: Method, rounds: int) -> tuple[int, Sequence[int]]:
    """How many of so many rounds to play, and the workers: all of them, or so many, spread evenly from worker 0 on, that their
    messages are few."""
    n = run.workers
    rounds = min(rounds, max(1, _MOST_ROWS // n))
    sizes = [[len(row) for row in m.topology.mixing(t).rows] for t in range(rounds)]

    def messages(peers: float) -> float:
        return m.sends_per_round * (_OF_A_ROUND + peers)

    if n <= MOST_PLAYED and rounds * n * messages(sum(map(sum, sizes)) / len(sizes) / n) <= _MOST_MESSAGES:
        return rounds, range(n)
    most = messages(sum(map(max, sizes)) / len(sizes))
    rounds = min(rounds, max(1, int(_MOST_MESSAGES / (2 * most))))
    count = min(n, MOST_PLAYED, max(2, int(_MOST_MESSAGES / (rounds * most))))
    return rounds, [k * n // count for k in range(count)]


def play_rounds(
    run: RunSettings, m: Method, layout: Layout, rounds: int, workers: Sequence[int] | None = None
) -> tuple[Traffic, list[Entry]]:
    """The messages and the memory of so many rounds, and the trace that they would leave, its seconds left at zero.

    Args: `workers` are those that are played, all by default; the counts are then means over them.
    """
    from torch import _refs  # what computes on tensors without data

    with without_compiler(vars(_refs).values()), _ShapeAlone():
        return _played(run, m, layout, rounds, range(run.workers) if workers is None else workers)


class _ShapeAlone(TorchFunctionMode):
    """Sums, products and zeros of tensors without data, where the result is like the first one.

    What torch does for them instead imports sympy, which takes as long as a quarter of torch.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _LIKE_FIRST and not (kwargs or {}).keys() - {"min", "max"} and _is_like_first(*args):
            return args[0].new_empty(args[0].shape)
        return func(*args, **(kwargs or {}))


_LIKE_FIRST = {
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("add", "sub", "mul", "div", "neg", "clamp", "empty_like", "zeros_like", "ones_like", "full_like")
    if hasattr(place, name)
}


def _is_like_first(first: Any, other: Any = 0.0, *more: Any) -> bool:
    if more or not isinstance(first, Tensor) or not first.is_meta or not first.is_floating_point():
        return False
    if isinstance(other, Tensor):
        return (other.shape, other.dtype) == (first.shape, first.dtype)
    return isinstance(other, float | int)


def _played(
    run: RunSettings, m: Method, layout: Layout, rounds: int, workers: Sequence[int]
) -> tuple[Traffic, list[Entry]]:
    x = torch.empty(layout.numel, device="meta")
    loops, period = _loops(run, m, layout, workers, x), period_of(run, m)
    # Messages of a round look alike for all workers. So where peers repeat, those of the first worker show that all do.
    repeats = m.topology.period is not None and not (m.rule.mixes_updates or m.schedule.sends or m.holders)
    played: list[list[Entry]] = []
    flight = 0.0
    for t in range(rounds):
        settled = period + max((lag for stop in loops[0].stops(t) for _, lag in stop.receives), default=0)
        entries, flight = _round_of(run, m, workers[0], loops[0], t, flight)
        before = played[t - period] if repeats and t >= settled else []
        again = [one._replace(round=one.round + period * m.sends_per_round) for one in before]
        if entries and entries == [one for one in again if one.worker == workers[0]]:
            entries = again
        else:
            for i, loop in zip(workers[1:], loops[1:], strict=True):
                more, flight = _round_of(run, m, i, loop, t, flight)
                entries += more
        played.append(entries)
    state = max(sum(nbytes(leaf) for leaf in leaves(tuple(one.part.s for one in loop.fragments))) for loop in loops)
    every = [entry for entries in played for entry in entries]
    sent: dict[int, list[Operation]] = {i: [] for i in workers}
    for entry in every:
        sent[entry.worker].extend(entry.operations)
    return _counted([*sent.values()], rounds, state / nbytes(x), flight / nbytes(x)), every


def _round_of(
    run: RunSettings, m: Method, worker: int, loop: OuterLoop, t: int, flight: float
) -> tuple[list[Entry], float]:
    """The entries of one worker in a round, and the most bytes in flight so far."""
    entries, done, part = list[Entry](), 0, t * m.sends_per_round
    loop.begin_round(t)
    for stop in loop.stops(t):
        loop.announce(t, stop)
        operations = tuple(loop.post(t, stop))
        steps = stop.after(run.local_steps_of(worker, t), run.timetable.at(t).full_steps)
        if operations:
            entries.append(Entry(part, worker, steps - done, 0.0, operations))
            done = steps
        part += bool(stop.sends)
        loop.pop_due(t, stop)  # and never finished: what is received changes no byte
        flight = max(flight, sum(nbytes(tuple(one["sent"])) for one in loop.state_in_flight()))
    return entries, flight


def _counted(sent: Sequence[Sequence[Operation]], rounds: int, state_copies: float, flight_copies: float) -> Traffic:
    """The averages of what each worker has sent in some rounds."""
    totals = [sum(operation.sent_bytes for operation in of_worker) / rounds for of_worker in sent]
    every = [operation for of_worker in sent for operation in of_worker]
    return Traffic(
        sum(totals) / len(sent),
        max(totals),
        sum(op.peers * (2 if op.kind == "mean" else 1) for op in every) / len(sent) / rounds,
        sum(op.peers for op in every) / max(1, len(every)),
        tuple(dict.fromkeys(op.kind for op in every)),
        state_copies,
        flight_copies,
    )


def _loops(run: RunSettings, m: Method, layout: Layout, workers: Sequence[int], x: Tensor) -> list[OuterLoop]:
    """The outer loops of these workers, whose parameters are all `x`, a tensor without data."""
    network, m = MemoryNetwork(run.workers), m._replace(codec=each_shape_once(m.codec), rule=_meta_rule(m.rule))
    averages = run.inner.averaging is not None and m.rule.site == "parameters"
    averaged, moments = x.new_empty(2 * x.numel()) if averages else None, [x] * len(run.schedule.inner_every)
    held, of_all = holding_of(run, layout), arranged(layout, run)
    return [
        OuterLoop(
            m,
            network.transport(i),
            parts_of(x, *(of_all if held is None else held.of(i)), averaged, moments),
            local_steps=run.local_steps_of(i),
            timetable=run.timetable,
            seed=run.seed,
        )
        for i in workers
    ]


def _meta_rule(rule: Rule) -> Rule:
    """A rule for tensors without data, whose first states and messages of a round look alike for all workers, made once.

    It counts no distrusted messages: without data there are no counts to read.
    """

    def kept(make: Callable[..., Tree]) -> Callable[..., Tree]:
        made: dict[Hashable, Tree] = {}

        def of(*given: Any) -> Tree:
            *trees, ctx = given
            alike = ctx._replace(worker=0, peers=(0,) * len(ctx.peers))
            key = (alike, *((t.shape, t.dtype) for t in leaves(tuple(trees))))
            if key not in made:
                made[key] = make(*given)
            return made[key]

        return of

    return rule._replace(init=kept(rule.init), send=kept(rule.send), distrusts=None, norms=None, at=None)


def _phase_traffic(run: RunSettings, method: WithServer | InPairs, layout: Layout) -> Traffic:
    """The messages of a worker after one local phase: what it pushes, or sends at a meeting."""
    # A worker of a server keeps one: where the server let it start.
    copies = 1.0 if isinstance(method, WithServer) else float(method.rule.state_copies)
    arranged, spans = arrange(layout, *run.fragments)
    sizes = [payload_bytes(fitted(method.codec, arranged.slice(a, b)), b - a) for a, b in spans]
    sent_bytes = sum(sizes) / len(sizes)
    return Traffic(sent_bytes, sent_bytes, 1, 1, (), copies, 0.0)
