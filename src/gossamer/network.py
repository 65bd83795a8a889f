"""What a recorded run costs on a network: `price(trace, network) -> Timeline`, pure and exact.

The model, with full-duplex links. Worker i starts round t at S_i and is ready at `R_i = S_i + H_i·step_s_i`.

* exchange: a message j → i leaves when its sender is ready (receives are posted early) and arrives after
  `latency + 8·bytes / min(uplink_j / sends_j, downlink_i / receives_i)`: a direction that serves k peers in a round is
  shared evenly. The round of i ends at the latest of R_i, the arrivals at i and the arrivals of what i sent.
* mean: all members start at `max R_i` and end together after two legs (to the chunk owners and back), each with one
  latency and half of the bytes: `2·latency + max_i max(8·sent_i / uplink_i, 8·received_i / downlink_i)`.

A round with both kinds does its exchanges first.

Every step is a maximum or a sum of terms that fall with the bandwidth, so more bandwidth is never slower.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from numpy.typing import NDArray

from gossamer.errors import ConfigError, choose
from gossamer.trace import KINDS, Integers, Kind, Messages, Trace

__all__ = ["Network", "Timeline", "from_toml", "price", "read_network", "to_toml"]

Floats = NDArray[np.float64]
PerWorker = float | tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The links between the workers and, if given, the workers' speed; each a number for all or one per worker.

    Raises: ConfigError for a number that is out of bounds.
    """

    uplink_bps: PerWorker
    """Bits per second a worker can send; `inf` for a link that costs nothing."""
    downlink_bps: PerWorker
    """Bits per second a worker can receive."""
    latency_s: PerWorker = 0.0
    """Seconds from leaving a worker to arriving elsewhere; a message takes the larger latency of its two ends."""
    step_s: PerWorker | None = None
    """Seconds of one inner step; the measured times of the trace when None."""

    def __post_init__(self) -> None:
        for name in ("uplink_bps", "downlink_bps", "latency_s", "step_s"):
            value = getattr(self, name)
            if value is not None or name != "step_s":
                object.__setattr__(self, name, _checked(name, value))


class Timeline(NamedTuple):
    """When everything happened, as arrays `[rounds, workers]`; a worker's round starts where its last one ended."""

    compute_s: Floats
    """Seconds of the local phase."""
    communication_s: Floats
    """Exposed communication: seconds from the end of the local phase to the end of the round."""
    waits_on: Integers
    """The worker behind most of that wait: who was late, or whose link was the slower end; itself without a wait."""
    end_s: Floats
    """Seconds from the start of the run to the end of the round."""

    @property
    def total_s(self) -> float:
        """Wall-clock seconds of the run: when the last worker ends its last round."""
        return float(self.end_s.max(initial=0.0))

    @property
    def utilisation(self) -> Floats:
        """Share of the run that each worker spends computing, `[workers]`; 1 for a run that takes no time."""
        total = self.total_s
        return self.compute_s.sum(axis=0) / total if total else np.ones(self.end_s.shape[1])

    @property
    def mean_utilisation(self) -> float:
        """The mean of `utilisation` over the workers."""
        return float(self.utilisation.mean())


def from_toml(text: str, where: str = "network") -> Network:
    """The network that a TOML text describes; `where` is named when it describes none.

    Raises: ConfigError for text that is not TOML, an unknown or missing key, or a number out of bounds.

    >>> from_toml("uplink_bps = [1e9, 1e8]\\ndownlink_bps = inf\\nstep_s = 0.5")
    Network(uplink_bps=(1000000000.0, 100000000.0), downlink_bps=inf, latency_s=0.0, step_s=0.5)
    """
    try:
        options = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}; repair the file") from None
    known = [field.name for field in fields(Network)]
    for key in options:
        if key not in known:
            raise ConfigError(f"{where}: {choose('key', key, known)}")
    for key in ("uplink_bps", "downlink_bps"):
        if key not in options:
            raise ConfigError(
                f"{where} gives the keys {sorted(options)} but '{key}' is needed too; add it in bits per second"
            )
    return Network(**options)


def to_toml(network: Network) -> str:
    """The TOML text from which `from_toml` makes this network again.

    >>> print(to_toml(Network(uplink_bps=1e9, downlink_bps=float("inf"))), end="")
    uplink_bps = 1000000000.0
    downlink_bps = inf
    latency_s = 0.0
    """
    options: dict[str, Any] = {key: value for key, value in asdict(network).items() if value is not None}
    return tomli_w.dumps(options)


def read_network(path: Path) -> Network:
    """The network described by a TOML file.

    Raises: ConfigError when the file cannot be read or does not describe a network.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the network file {path} cannot be read ({error}); give the path of a TOML text file"
        ) from None
    return from_toml(text, str(path))


def price(trace: Trace, network: Network) -> Timeline:
    """When each worker would have finished each round of this trace on this network.

    Raises: ConfigError when the network lists another number of workers than the trace has.
    Cost: O(messages), vectorised over a round: 1 to 3 s for 10,000 workers and 1,000 rounds of single exchanges.

    >>> from gossamer.trace import from_targets
    >>> swap = from_targets(np.array([[1, 0]]), payload_bytes=1000, steps=30)
    >>> price(swap, Network(uplink_bps=(8000, 800), downlink_bps=8000, step_s=1)).end_s
    array([[40., 40.]])
    """
    shape = trace.rounds, trace.workers
    links = _links(network, trace.workers)
    timeline = Timeline(np.empty(shape), np.empty(shape), np.empty(shape, np.int32), np.empty(shape))
    bounds = np.searchsorted(trace.messages.round, np.arange(trace.rounds + 1))
    end = np.zeros(trace.workers)
    for r in range(trace.rounds):
        seconds = trace.compute_s[r] if links.step_s is None else trace.steps[r] * links.step_s
        ready = end = end + seconds
        waits_on = np.arange(trace.workers)
        messages = trace.messages.span(bounds[r], bounds[r + 1])
        edges = np.searchsorted(messages.kind, np.arange(len(KINDS) + 1))
        for kind, start, stop in zip(KINDS, edges[:-1], edges[1:], strict=True):
            if start < stop:
                end, waits_on = _CARRY[kind](end, waits_on, messages.span(start, stop), links)
        timeline.compute_s[r], timeline.communication_s[r] = seconds, end - ready
        timeline.waits_on[r], timeline.end_s[r] = waits_on, end
    return timeline


class _Links(NamedTuple):
    """A network as arrays `[workers]`."""

    uplink_bps: Floats
    downlink_bps: Floats
    latency_s: Floats
    step_s: Floats | None


_Carry = Callable[[Floats, Integers, Messages, _Links], tuple[Floats, Integers]]


def _exchange(ready: Floats, waits_on: Integers, messages: Messages, links: _Links) -> tuple[Floats, Integers]:
    """Point to point: when each worker is done, given when it was ready, and whom it waited for."""
    source, target, size = _streams(messages)
    up = (links.uplink_bps / np.maximum(np.bincount(source, minlength=len(ready)), 1))[source]
    down = (links.downlink_bps / np.maximum(np.bincount(target, minlength=len(ready)), 1))[target]
    takes = np.maximum(links.latency_s[source], links.latency_s[target]) + 8 * size / np.minimum(up, down)
    arrival = ready[source] + takes
    end = ready.copy()
    np.maximum.at(end, target, arrival)
    np.maximum.at(end, source, arrival)

    waits_on = waits_on.copy()
    slower = np.where(up <= down, source, target)
    for worker in (source, target):
        last = (arrival == end[worker]) & (arrival > ready[worker])
        late = ready[source] - ready[worker] > takes
        waits_on[worker[last]] = np.where(late, source, slower)[last]
    return end, waits_on


def _mean(ready: Floats, waits_on: Integers, messages: Messages, links: _Links) -> tuple[Floats, Integers]:
    """Through chunk owners: all members start when the last is ready and end together."""
    n = len(ready)
    sent = np.bincount(messages.source, weights=messages.bytes, minlength=n)
    received = np.bincount(messages.target, weights=messages.bytes, minlength=n)
    members = np.union1d(messages.source, messages.target)
    transfer = np.maximum(8 * sent / links.uplink_bps, 8 * received / links.downlink_bps)[members]
    takes = 2 * links.latency_s[members].max() + transfer.max()
    last, slowest = members[ready[members].argmax()], members[transfer.argmax()]
    start = ready[last]

    end, waits_on = ready.copy(), waits_on.copy()
    end[members] = start + takes
    held = members[start + takes > ready[members]]
    waits_on[held] = np.where(start - ready[held] > takes, last, slowest)
    return end, waits_on


_CARRY: dict[Kind, _Carry] = {"exchange": _exchange, "mean": _mean}


def _streams(messages: Messages) -> tuple[Integers, Integers, Integers]:
    """Source, target and bytes of each pair that talks: fragments for one peer follow each other on one stream."""
    source, target, size = messages.source, messages.target, messages.bytes
    first = np.ones(len(source), bool)
    first[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[first], target[first], np.add.reduceat(size, np.flatnonzero(first))


def _links(network: Network, workers: int) -> _Links:
    """The network's options, one entry per worker. Raises ConfigError when it lists another number of them."""

    def spread(name: str) -> Floats:
        values = np.asarray(getattr(network, name), float)
        if values.ndim and len(values) != workers:
            raise ConfigError(
                f"network: {name} lists {len(values)} workers but the run has {workers}; "
                f"give {workers} entries or one number for all"
            )
        return np.broadcast_to(values, workers)

    step_s = None if network.step_s is None else spread("step_s")
    return _Links(spread("uplink_bps"), spread("downlink_bps"), spread("latency_s"), step_s)


def _checked(name: str, value: Any) -> PerWorker:
    """An option as floats. Raises ConfigError unless it is one number within bounds or a list of them."""
    if isinstance(value, list | tuple):
        return tuple(_number(name, number) for number in value)
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    rate = name.endswith("_bps")
    low, high = (1, 1e18) if rate else (0, 1e9)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low <= value <= high or (rate and value == math.inf)):
        allowed = "bits per second from 1 to 1e18, or inf" if rate else "seconds from 0 to 1e9"
        raise ConfigError(
            f"network: {name} is {value!r:.60} but must be a number of {allowed}; give one for all workers or a list"
        )
    return float(value)
