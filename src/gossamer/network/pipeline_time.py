"""The duration of an inner step of a pipeline: stages that compute in turn, and the links between them.

A model is cut into pieces, of which each of S stages has one, or with the schedule "interleaved" every S-th. A stage does its
operations in the order of the schedule. A forward pass of a micro-batch through piece p needs its activations from piece p - 1,
a backward pass its gradients from piece p + 1; what an operation yields leaves at its end. A message of b bytes that finds its
link free at f and was sent at t

* starts at `max(f, t)`, occupies its link for `8 b / bandwidth_bps`, and arrives `latency_s` later;
* on a `serialised` link occupies it for the latency too. A stage then receives one message at a time, from either side, as relays
  in user space and the meters of some benchmarks have it.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Literal, NamedTuple

from pydantic import AllowInfNan, Field

from gossamer.errors import ConfigError
from gossamer.settings.options import Positive
from gossamer.settings.quantities import BITS_PER_SECOND, SECONDS
from gossamer.settings.schema import settings

Order = Literal["gpipe", "1f1b", "interleaved"]


@settings()
class StageLinks:
    """The links between the stages of a worker, all alike, and the speed of its processes."""

    bandwidth_bps: Annotated[float, AllowInfNan(True), Field(ge=1), BITS_PER_SECOND] = math.inf
    """Bits per second from a stage to another, in each direction."""
    latency_s: Annotated[float, Field(ge=0, le=1e9), SECONDS] = 0.0
    """Latency of a message in seconds."""
    duplex: Literal["full", "half"] = "full"
    """"half": activations and gradients take turns on the link between two stages."""
    serialised: bool = False
    """Whether a stage receives one message at a time, latency included."""
    speeds: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    """Speeds of a worker's processes, in order of its stages, relative to the machine that takes `step_s`; all 1 when
    left out.
    """


class Pass(NamedTuple):
    """The forward or backward pass of one micro-batch through one piece of a stage."""

    forward: bool
    micro_batch: int
    chunk: int = 0
    """The index of the piece in the stage."""


class PipelineStep(NamedTuple):
    """The seconds of one inner step."""

    seconds: float
    """From its start until the last stage has ended."""
    compute_s: tuple[float, ...]
    """Of each stage."""

    @property
    def wait_s(self) -> tuple[float, ...]:
        """Seconds in which each stage waits for others, for messages, or for the end of the step."""
        return tuple(self.seconds - busy for busy in self.compute_s)

    @property
    def computing(self) -> tuple[float, ...]:
        """The share of the step in which each stage computes; 1 for a step that takes no time."""
        return tuple(busy / self.seconds if self.seconds else 1.0 for busy in self.compute_s)


def microbatch_order(schedule: Order, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """The operations of a stage in an inner step, in order, as in torch's schedules.

    "gpipe": all forward passes, then all backward passes. "1f1b": `min(micro_batches, stages - stage)` forward passes, then one
    backward and one forward pass in turn, then the remaining backward passes: no stage holds more activations than that.
    "interleaved": groups of as many micro-batches as there are stages go through one piece after the other; after
    `(chunks - 1) stages + 2 (stages - 1 - stage)` forward passes, one forward and one backward pass in turn.

    Args: `chunks` are the pieces of each stage, with "interleaved" alone more than one.

    >>> "".join("BF"[one.forward] for one in microbatch_order("1f1b", 0, 2, 4))
    'FFBFBFBB'
    >>> [one.chunk for one in microbatch_order("interleaved", 1, 2, 2, 2)]
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    if schedule == "interleaved":
        return _interleaved(stage, stages, micro_batches, chunks)
    warm = min(micro_batches, stages - stage) if schedule == "1f1b" else micro_batches
    order = [Pass(True, k) for k in range(warm)]
    for k in range(micro_batches):
        order.append(Pass(False, k))
        if warm + k < micro_batches:
            order.append(Pass(True, warm + k))
    return order


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Pass]:
    group = micro_batches // max(1, micro_batches // stages)
    total = micro_batches * chunks

    def passes(*, forward: bool) -> list[Pass]:
        done, ordered = [0] * chunks, list[Pass]()
        for k in range(total):
            chunk = k // group % chunks
            chunk = chunk if forward else chunks - 1 - chunk
            ordered.append(Pass(forward, done[chunk], chunk))
            done[chunk] += 1
        return ordered

    ahead, behind = passes(forward=True), passes(forward=False)
    warm = min((chunks - 1) * group + 2 * (stages - 1 - stage), total)
    order = ahead[:warm]
    for k, backward in enumerate(behind):
        order += ahead[warm + k : warm + k + 1]
        order.append(backward)
    return order


def pipeline_step(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    forward_bytes: Sequence[float],
    backward_bytes: Sequence[float],
    micro_batches: int,
    links: StageLinks,
    schedule: Order = "1f1b",
    chunks: int = 1,
) -> PipelineStep:
    """The seconds of an inner step of a pipeline, by its operations and messages in the order of time.

    Args:
        forward_s, backward_s: seconds of one micro-batch in each piece of the model, in the order of its layers.
        forward_bytes, backward_bytes: of one micro-batch over each boundary, one fewer than pieces.
        micro_batches: of the step.
        chunks: the pieces of each stage, as in `microbatch_order`.
    Cost: O(stages · micro_batches · log).
    Raises: ConfigError for numbers that do not fit each other.
    Differs: nothing overlaps within a stage; messages that arrive while it computes wait in memory.

    >>> even = pipeline_step([1.0, 1.0], [2.0, 2.0], [0.0], [0.0], 4, StageLinks(), "gpipe")
    >>> even.seconds, even.wait_s
    (15.0, (3.0, 3.0))
    """
    pieces = len(forward_s)
    if not (len(backward_s) == pieces == len(forward_bytes) + 1 == len(backward_bytes) + 1) or micro_batches < 1:
        raise ConfigError(
            f"a pipeline was given {pieces} and {len(backward_s)} stages, {len(forward_bytes)} and {len(backward_bytes)} "
            f"boundaries and {micro_batches} micro-batches; give one boundary fewer than stages, and a micro-batch at least"
        )
    stages = pieces // chunks
    uneven = schedule == "interleaved" and micro_batches % max(1, micro_batches // max(1, stages)) != 0
    if pieces % chunks or uneven or (chunks > 1 and schedule != "interleaved"):
        raise ConfigError(
            f"a pipeline of {pieces} pieces and {micro_batches} micro-batches was given {chunks} chunks with the schedule "
            f"'{schedule}'; give a divisor of the pieces with 'interleaved', and a multiple of the stages as micro-batches"
        )
    orders = [microbatch_order(schedule, stage, stages, micro_batches, chunks) for stage in range(stages)]
    run = _Run((forward_s, backward_s), (forward_bytes, backward_bytes), orders, links)
    return PipelineStep(run.to_end(), tuple(run.computed_s))


class _Run:
    """An inner step, event by event. In pairs, the first value is for forward, the second for backward passes."""

    def __init__(
        self,
        seconds: tuple[Sequence[float], Sequence[float]],
        sizes: tuple[Sequence[float], Sequence[float]],
        orders: Sequence[Sequence[Pass]],
        links: StageLinks,
    ) -> None:
        self._seconds, self._sizes, self._links, self._orders = seconds, sizes, links, orders
        stages, last = len(orders), len(seconds[0]) // len(orders) - 1
        self._has = {(0, one) for one in orders[0] if one.forward and one.chunk == 0}
        # The last piece begins backward after its own forward pass, in its order.
        self._has |= {(stages - 1, one) for one in orders[-1] if not one.forward and one.chunk == last}
        self._free: dict[tuple[int | str, int], float] = {}
        self._busy, self._at, self.computed_s = [False] * stages, [0] * stages, [0.0] * stages
        self._events: list[tuple[float, int, bool, int, Pass]] = []
        """Time, number, whether a stage has computed or a message arrived, stage, pass; ties in order of planning."""
        self._planned = count()

    def to_end(self) -> float:
        """When the last stage ends."""
        now = 0.0
        for stage in range(len(self._orders)):
            self._begin(stage, now)
        while self._events:
            now, _, computed, stage, done = heapq.heappop(self._events)
            if computed:
                self._busy[stage], self._at[stage] = False, self._at[stage] + 1
                self._send(stage, done, now)
            else:
                self._has.add((stage, done))
            self._begin(stage, now)
        return now

    def _begin(self, stage: int, now: float) -> None:
        """Begins the next operation of an idle stage, if its inputs have arrived."""
        order, at = self._orders[stage], self._at[stage]
        if not self._busy[stage] and at < len(order) and (stage, order[at]) in self._has:
            seconds = self._seconds[not order[at].forward][self._piece(stage, order[at])]
            self._busy[stage] = True
            self.computed_s[stage] += seconds
            heapq.heappush(self._events, (now + seconds, next(self._planned), True, stage, order[at]))

    def _piece(self, stage: int, step: Pass) -> int:
        return step.chunk * len(self._orders) + stage

    def _send(self, stage: int, done: Pass, now: float) -> None:
        """Sends the output of a pass to the stage that needs it, if any."""
        piece, links = self._piece(stage, done), self._links
        to = piece + (1 if done.forward else -1)
        if not 0 <= to < len(self._seconds[0]):
            return
        chunk, target = divmod(to, len(self._orders))
        takes_s = 8 * self._sizes[not done.forward][min(piece, to)] / links.bandwidth_bps
        ends = (min(stage, target), max(stage, target)) if links.duplex == "half" else (stage, target)
        link = ("in", target) if links.serialised else ends
        sent = max(self._free.get(link, 0.0), now) + takes_s
        self._free[link] = sent + links.latency_s if links.serialised else sent
        heapq.heappush(
            self._events, (sent + links.latency_s, next(self._planned), False, target, done._replace(chunk=chunk))
        )
