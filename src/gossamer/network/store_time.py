"""The price of rounds whose workers share only a store (`gossamer.transport.bucket.protocol`), by formula.

Worker i is ready at R_i, and each request takes l seconds besides its bytes, which leave by its uplink u_i and arrive by its
downlink d_i. With messages of m_i bytes and a mean of p bytes among n workers, the round has

* messages: that of i lies in the store at `A_i = R_i + l + 8·m_i/u_i`;
* a closer c, which changes from round to round: at `max A` plus half a pause and a listing it reads the other n - 1 messages, one
  after the other, writes the mean (none in gossip) and the outcome, which is there at C;
* readers: half a pause and a listing after C worker i reads the outcome, then the mean, or in gossip the messages of its peers.
  The closer reads them without a pause.

A pause is a quarter of the time that a worker has waited since A_i, from half a second to 15 s, so half of one is expected. The
state that the closer writes every `run.checkpoint_every` steps is not counted, nor a store that is slow or fails.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.record.logs.trace import KINDS, Integers, Trace
from gossamer.settings.quantities import SECONDS
from gossamer.settings.schema import settings
from gossamer.transport.bucket.protocol import StoreTerms
from gossamer.transport.bucket.requests import LOOK_SHARE

Floats = NDArray[np.float64]
_LOOK_S, _REST_S = (StoreTerms._field_defaults[name] for name in ("look_s", "rest_s"))


@settings()
class StoreLink:
    """The store through which all messages go, in place of connections between workers."""

    latency_s: Annotated[float, Field(ge=0, le=1e9), SECONDS]
    """Seconds of a request without its bytes, there and back."""


class _Exchange(NamedTuple):
    """The one exchange of a round."""

    members: Integers
    sent: Floats
    """Bytes of the message of each member."""
    read: Floats
    """Bytes that each member reads once the round is closed."""
    objects: Floats | Integers
    """The number of objects in which these lie."""
    mean: float
    """Bytes of the mean; NaN in gossip."""


def store_seconds(
    trace: Trace, uplink_bps: Floats, downlink_bps: Floats, latency_s: float, compute_s: Floats
) -> tuple[Floats, NDArray[np.int32]]:
    """When each worker ends each round, and which worker it waits for.

    Args: `compute_s` are the seconds of the local phases, `[rounds, workers]`.
    Raises: ConfigError for a run that no store carries.
    """
    end, everybody = np.zeros(trace.workers), np.arange(trace.workers)
    ends, waits_on = np.zeros(compute_s.shape), np.tile(everybody.astype(np.int32), (trace.rounds, 1))
    for r in range(trace.rounds):
        end = end + compute_s[r]
        if (one := _exchange(trace, r)) is not None:
            i, up_s, down_s = one.members, 8 / uplink_bps, 8 / downlink_bps
            there = end[i] + latency_s + one.sent * up_s[i]
            late = there.max()
            turn = int(((i - r) % trace.workers).argmin())
            closer, others = i[turn], np.delete(one.sent, turn)
            wait_s = late - there[turn]
            closed = late + latency_s + (_pause_s(wait_s) if wait_s > latency_s else 0.0)
            closed += len(others) * latency_s + others.sum() * down_s[closer] + latency_s
            closed += 0.0 if math.isnan(one.mean) else latency_s + one.mean * up_s[closer]
            seen = closed + latency_s + _pause_s(closed - there)
            seen[turn] = closed
            end[i] = seen + latency_s + one.objects * latency_s + one.read * down_s[i]
            waits_on[r, i] = i[there.argmax()]
        ends[r] = end
    return ends, waits_on


def _pause_s(waited_s: Floats) -> Floats:
    """Half of the pause between two looks of a worker that has waited so long."""
    return np.clip(LOOK_SHARE * waited_s, _LOOK_S, _REST_S) / 2


def _exchange(trace: Trace, r: int) -> _Exchange | None:
    """The exchange of a round; None for a round without one. Raises: ConfigError for several."""
    first, last = trace.bounds[r : r + 2]
    messages, means = trace.messages.span(first, last), [mean for mean in trace.means if mean.round == r]
    fragments = np.unique(np.stack([messages.kind, messages.fragment, messages.overlap_steps]), axis=1)
    if fragments.shape[1] + len(means) > 1 or trace.overlaps:
        raise ConfigError(
            f"the network has a [store] and the run exchanges more than once a round, or while it trains on (in round {r} with "
            f"{len(messages.round)} messages and {len(means)} means), which no store carries; remove [store] from the network, "
            "or the run's fragments and overlap"
        )
    if means:
        n, sent, back = len(means[0].members), float(means[0].there.sum()), float(means[0].back.sum())
        return _Exchange(means[0].members, np.full(n, sent), np.full(n, back), np.ones(n), back)
    if not len(messages.round):
        return None
    members = np.union1d(messages.source, messages.target)
    n, places = len(members), np.searchsorted(members, messages.target)
    if messages.kind[0] == KINDS.index("mean"):
        size = messages.bytes.sum() / (2 * (n - 1))  # of the sum of chunks, there and back
        return _Exchange(members, np.full(n, size), np.full(n, size), np.ones(n), float(size))
    sent = np.zeros(n)
    np.maximum.at(sent, np.searchsorted(members, messages.source), messages.bytes)
    read = np.bincount(places, messages.bytes, n).astype(float)
    return _Exchange(members, sent, read, np.bincount(places, None, n), math.nan)
