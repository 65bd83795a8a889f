"""The timeline of every worker's compute, communication and waiting: the result of pricing a run."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from gossamer.network.links import Floats, Links, MeanKind, Network, jitter_factors
from gossamer.record.logs.trace import KINDS, Integers, Kind, Messages, Trace


class Timeline(NamedTuple):
    """The times of all rounds, as arrays `[rounds, workers]`; a worker's round starts when its previous one ends."""

    compute_s: Floats
    """Seconds of the local phase."""
    communication_s: Floats
    """Exposed communication: all other seconds of the round."""
    waits_on: Integers
    """The worker that caused most of the wait: it was late, or its link was the slower end. The worker itself if it did
    not wait.
    """
    end_s: Floats
    """Seconds from the start of the run to the end of the round."""
    computing: Floats | float = 1.0
    """The share of its local phases in which each worker computes, `[workers]`; otherwise its stages wait for each other."""

    @property
    def total_s(self) -> float:
        """Wall-clock seconds of the run: when the last worker ends its last round."""
        return float(self.end_s.max(initial=0.0))

    @property
    def utilisation(self) -> Floats:
        """Share of the run that each worker spends computing, `[workers]`; 1 for a run that takes no time."""
        return self._local_phase_shares * self.computing

    @property
    def mean_utilisation(self) -> float:
        """The mean of `utilisation` over the workers."""
        return float(self.utilisation.mean())

    @property
    def mean_between_stages(self) -> float:
        """Share of the run in which the stages of a worker wait for each other, messages between them included; a mean."""
        return float((self._local_phase_shares * (1 - np.asarray(self.computing))).mean())

    @property
    def _local_phase_shares(self) -> Floats:
        total = self.total_s
        return self.compute_s.sum(axis=0) / total if total else np.ones(self.end_s.shape[1])


_BATCHES = 8
"""The number of batches of rounds whose means give the confidence interval."""


def spread_s(timeline: Timeline) -> float:
    """Half of the 95 % interval of the mean seconds of a round, from the means of eight batches of rounds; 0 for fewer
    rounds.

    >>> even = np.cumsum(np.ones((16, 2)), axis=0)
    >>> spread_s(Timeline(even, even, even.astype(int), even))
    0.0
    """
    rounds = len(timeline.end_s)
    if rounds < _BATCHES:
        return 0.0
    edges = np.linspace(0, rounds, _BATCHES + 1).astype(int)
    ends = np.concatenate([[0.0], timeline.end_s.max(axis=1)])[edges]
    means = np.diff(ends) / np.diff(edges)
    return float(2.36 * means.std(ddof=1) / np.sqrt(_BATCHES))  # Student's t of seven degrees of freedom


class Leg(NamedTuple):
    """Simultaneous messages of a mean, as columns; the leg runs `times` times in a row."""

    source: Integers
    target: Integers
    bytes: Floats
    times: int


def legs_of(mean: MeanKind, messages: Messages) -> Iterator[Leg]:
    """The legs of a mean, however its messages were recorded; all move `2(n-1)` times the bytes that are averaged.

    >>> from gossamer.record.logs.trace import from_targets
    >>> trace = from_targets(np.array([[[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]]), 200, steps=1, kind="mean")
    >>> [(leg.bytes.tolist(), leg.times) for leg in legs_of("tree", trace.messages)]
    [([400.0, 400.0], 1), ([400.0], 1), ([400.0], 1), ([400.0, 400.0], 1)]
    """
    members = np.union1d(messages.source, messages.target)
    if mean == "owners":
        source, target, size = streams_of(messages)
        yield Leg(source, target, size / 2, 2)
    else:
        yield from legs_among(mean, members, messages.bytes.sum() / (2 * (len(members) - 1)))


def legs_among(mean: Literal["ring", "tree"], members: Integers, payload: float) -> Iterator[Leg]:
    """The legs of a mean of `payload` bytes over these workers, along a ring or a tree."""
    n = len(members)
    if mean == "ring":
        yield Leg(members, np.roll(members, -1), np.full(n, payload / n), 2 * (n - 1))
    else:
        inwards = []
        for stride in (1 << s for s in range((n - 1).bit_length())):
            far = members[stride :: 2 * stride]
            inwards.append(Leg(far, members[:: 2 * stride][: len(far)], np.full(len(far), payload), 1))
        yield from inwards
        yield from (leg._replace(source=leg.target, target=leg.source) for leg in reversed(inwards))


def format_utilisation(computing: float, between_stages: float) -> str:
    """The shares of a round that a worker computes and that its stages wait for each other, in words.

    >>> format_utilisation(0.75, 0.0), format_utilisation(0.5, 0.25)
    ('75.0% of it computing', '50.0% of it computing, 25.0% waiting between stages')
    """
    waiting = f", {between_stages:.1%} waiting between stages" if between_stages else ""
    return f"{computing:.1%} of it computing{waiting}"


def no_rounds(trace: Trace) -> Timeline:
    """The timeline of a run without rounds."""
    shape = trace.rounds, trace.workers
    return Timeline(np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape))


def compute_seconds(trace: Trace, network: Network, links: Links, r: int) -> Floats:
    """Seconds of the local phases of a round, `[workers]`."""
    if links.step_s is None:
        return trace.compute_s[r]
    return trace.steps[r] * links.step_s * jitter_factors(network, r, trace.workers)


def operations_of(messages: Messages) -> Iterator[tuple[Kind, int, Messages]]:
    """The operations of a round: kind, overlapping steps and messages."""
    kinds = messages.kind
    if len(kinds) and (kinds == kinds[0]).all() and not messages.overlap_steps.any():
        yield KINDS[kinds[0]], 0, messages  # the usual round, which needs no copies
        return
    for code, kind in enumerate(KINDS):
        for overlap_steps in np.unique(messages.overlap_steps[messages.kind == code]).tolist():
            these = (messages.kind == code) & (messages.overlap_steps == overlap_steps)
            yield kind, overlap_steps, Messages(*(column[these] for column in messages))


def overlap_of_each(trace: Trace, r: int, overlap_steps: int) -> Integers:
    """Steps of each worker, `[workers]`, proportional to `overlap_steps` of the worker with the most; not scaled if
    none has any.

    An entry without steps, for a send after an exchange at the same point, belongs to the previous one.
    """
    steps = next((steps for steps in trace.steps[r::-1] if steps.any()), trace.steps[r])
    most = int(steps.max())
    return overlap_steps * steps // most if most else np.full_like(steps, overlap_steps)


def streams_of(messages: Messages) -> tuple[Integers, Integers, Integers]:
    """Source, target and bytes of each pair of workers; fragments for one peer share one stream."""
    source, target, size = messages.source, messages.target, messages.bytes
    first = np.ones(len(source), bool)
    first[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[first], target[first], np.add.reduceat(size, np.flatnonzero(first))
