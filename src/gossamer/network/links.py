"""The links between workers and the workers' speed: the contents of a network file, without any pricing.

    uplink_bps = [1e9, 1e9, 1e8]   # bits per second a worker can send; one number for all, or one per worker
    downlink_bps = "1 Gbit/s"      # bits per second a worker can receive; inf for a link that costs nothing
    latency_s = 0.001              # seconds to leave or reach a worker; a message takes the larger of its two ends
    loss = 0.0                     # share of the packets that are lost on a worker's link, which bounds what TCP reaches
    duplex = "full"                # "half": sending and receiving take turns on one link
    step_s = 0.5                   # seconds of one inner step; the measured times of the trace when left out
    jitter = 0.1                   # standard deviation of the seconds of a local phase, over their mean
    jitter_kind = "lognormal"      # or "uniform"; both have mean one
    seed = 0                       # of the jitter; equal seeds give equal seconds
    mean = "owners"                # how a mean is carried: "owners" of chunks as gossamer does, "ring" or "tree"

    [step_of]                      # optional; the inner step that takes step_s: gossamer probe writes what it has measured
    model = { size = "1m" }
    vocab_size = 256
    seq_len = 128
    batch_size = 8

    [sites.paris]                  # optional; every worker is in one site
    workers = [0, 1]
    uplink_bps = 2e8               # what all streams that leave the site share; inf when left out
    downlink_bps = 2e8             # what all streams that enter it share

    [sites.tokyo]
    workers = [2]

    [[routes]]                     # between two sites, in both directions alike; one for each pair, or none at all
    between = ["paris", "tokyo"]
    latency_s = 0.12               # on top of that of the workers
    bandwidth_bps = 1e8            # what all streams of one direction share; inf when left out
    loss = 0.001                   # share of the packets that are lost between the two, on top of those of the workers' links

    [stages]                       # optional; between the stages of a worker, of a run that has several
    bandwidth_bps = 1e8            # from a stage to its neighbour; inf when left out
    latency_s = 0.02
    speeds = [1.0, 0.5]            # of the processes of a worker, relative to the machine that takes step_s; all 1 when left out

    [[changes]]                    # from then on, until the next change of the same link
    at_s = 3600.0
    factor = 0.1                   # a link has this times its own bandwidth, in both directions
    worker = 2                     # the link of a worker, or: site = "paris", the link that a site shares

Streams that share a worker's link, a site's or a route get max-min fair parts of it (`gossamer.network.fluid`). Where packets are
lost, no stream is faster than `tcp_bps`, which is a published formula, and was not measured here. Leave `loss` out where the
bandwidths are what `gossamer probe` has measured, as that was by TCP over the same loss.
Workers that share only a store (`gossamer train --store`) have a table `[store]`, whose `latency_s` are the seconds of a request
without its bytes and take the place of the workers' own, and neither sites, loss nor changes (`gossamer.network.store_time`).
"""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import AfterValidator, AllowInfNan, Field

from gossamer.errors import ConfigError, choose
from gossamer.models.sizes import ModelConfig
from gossamer.network.pipeline_time import StageLinks
from gossamer.network.store_time import StoreLink
from gossamer.record.logs.trace import Integers
from gossamer.rng import numpy_rng
from gossamer.settings.fields import Words
from gossamer.settings.options import Count
from gossamer.settings.quantities import BITS_PER_SECOND, SECONDS
from gossamer.settings.schema import build, parse_toml, read_toml, settings, toml_value

Floats = NDArray[np.float64]
PerWorker = float | tuple[float, ...]
Duplex = Literal["full", "half"]
JitterKind = Literal["lognormal", "uniform"]
MeanKind = Literal["owners", "ring", "tree"]


def _finite_or_endless(bps: float) -> float:
    if 1e18 < bps < math.inf:
        raise ValueError
    return bps


_Rate = Annotated[
    float,
    AllowInfNan(True),
    Field(ge=1),
    AfterValidator(_finite_or_endless),
    Words("a number of bits per second from 1 to 1e18, or inf"),
    BITS_PER_SECOND,
]
_Seconds = Annotated[float, Field(ge=0, le=1e9), Words("a number of seconds from 0 to 1e9"), SECONDS]
_Loss = Annotated[float, Field(ge=0, le=0.5), Words("a share of the packets from 0 to 0.5")]
_Index = Annotated[int, Field(ge=0, lt=2**31)]
_Rates = _Rate | Annotated[tuple[_Rate, ...], Field(min_length=1)]
_Times = _Seconds | Annotated[tuple[_Seconds, ...], Field(min_length=1)]
_Losses = _Loss | Annotated[tuple[_Loss, ...], Field(min_length=1)]
SEGMENT_BYTES = 1460
"""Payload of a packet of 1,500 bytes, without the headers of IPv4 and TCP."""


@settings()
class Site:
    """Workers in one place, and the link that they share for all that leaves or enters it."""

    workers: Annotated[tuple[_Index, ...], Field(min_length=1)]
    """Numbers of the workers in this place."""
    uplink_bps: _Rate = math.inf
    """Bits per second that leave the place, all workers together."""
    downlink_bps: _Rate = math.inf
    """Bits per second that enter the place, all workers together."""


@settings()
class Route:
    """The route between two sites; both directions are equal, and each has the whole bandwidth."""

    between: Annotated[tuple[str, str], Words("a list of the names of two sites")]
    """The names of the two sites."""
    latency_s: _Seconds = 0.0
    """Seconds from one site to the other, on top of those of the workers."""
    bandwidth_bps: _Rate = math.inf
    """Bits per second in each direction."""
    loss: _Loss = 0.0
    """Share of the packets that are lost, on top of those of the workers' links."""


@settings()
class Change:
    """From `at_s` on, the link of a worker, or the one a site shares, has `factor` times its own bandwidth."""

    at_s: _Seconds
    """Seconds after the start of the run."""
    factor: Annotated[float, Field(ge=1e-6, le=1e6)]
    """Multiplies the bandwidth that the link has without changes."""
    worker: _Index | None = None
    """The number of the worker whose link changes; give this or a site."""
    site: str | None = None
    """The name of the site whose shared link changes."""

    def __post_init__(self) -> None:
        if (self.worker is None) == (self.site is None):
            raise ConfigError(
                f"a change names worker {self.worker} and site {self.site} but must name one of the two; "
                "write two changes for two links"
            )


@settings()
class StepOf:
    """An inner step of which the seconds are known."""

    model: ModelConfig = ModelConfig()
    vocab_size: Count = 256
    seq_len: Count = 128
    """Tokens of a sequence."""
    batch_size: Count = 8
    """Sequences of the step."""

    def __str__(self) -> str:
        other = {key: value for key, value in toml_value(self.model, defaults=False).items() if key != "size"}
        overrides = f" with {', '.join(f'{key} = {value}' for key, value in other.items())}" if other else ""
        return (
            f"{self.model.size}{overrides}, a vocabulary of {self.vocab_size:,} and {self.batch_size} sequences of "
            f"{self.seq_len} tokens"
        )


@settings()
class Network:
    """The links between the workers and, if given, the workers' speed; the module's docstring explains each option.

    Raises: ConfigError for a value that is out of bounds, or parts that contradict each other.
    """

    uplink_bps: _Rates
    """Bits per second that a worker can send; one number for all, or one per worker."""
    downlink_bps: _Rates
    """Bits per second that a worker can receive; inf for a link that costs nothing."""
    latency_s: _Times = 0.0
    """Seconds to leave or reach a worker; a message takes the larger of its two ends."""
    loss: _Losses = 0.0
    """Share of the packets that are lost on a worker's link; with the round trip it bounds the rate of each message."""
    duplex: Duplex = "full"
    """"half": sending and receiving take turns on one link."""
    step_s: _Times | None = None
    """Seconds of one inner step; the measured times of the trace when left out."""
    step_of: StepOf | None = None
    """The inner step that takes `step_s`, where that was measured."""
    jitter: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Standard deviation of the seconds of a local phase, over their mean."""
    jitter_kind: JitterKind = "lognormal"
    """The distribution of the jitter; both have mean one."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the jitter; equal seeds give equal seconds."""
    mean: MeanKind = "owners"
    """How a mean is carried: "owners" of chunks as gossamer does, "ring" or "tree"."""
    sites: Mapping[str, Site] = field(default_factory=dict)
    """Workers in one place by the name of the place; every worker is in one site. A server such as halos has one in each."""
    routes: tuple[Route, ...] = ()
    """Routes between two sites; one for each pair, or none at all."""
    stages: StageLinks | None = None
    """The links between the stages of a worker; without cost when left out."""
    store: StoreLink | None = None
    """The store through which all messages go in place of connections."""
    changes: tuple[Change, ...] = ()
    """From then on, until the next change of the same link, a link is faster or slower."""

    def __post_init__(self) -> None:
        _check_jitter(self)
        _check_sites(self)
        _check_lists(self)
        _check_routes(self)
        _check_changes(self)
        _check_store(self)

    @property
    def workers(self) -> int | None:
        """The number of workers that it describes individually; None if it applies to any number."""
        if self.sites:
            return sum(len(site.workers) for site in self.sites.values())
        return next(iter(self.lengths.values()), None)

    @property
    def lengths(self) -> Mapping[str, int]:
        """The number of workers in each option that lists them."""
        options = {name: getattr(self, name) for name in ("uplink_bps", "downlink_bps", "latency_s", "loss", "step_s")}
        return {name: len(option) for name, option in options.items() if isinstance(option, tuple)}

    @property
    def shares(self) -> bool:
        """Whether bandwidth depends on other traffic, or on time."""
        shared = [s for site in self.sites.values() for s in (site.uplink_bps, site.downlink_bps)]
        return min([*shared, *(route.bandwidth_bps for route in self.routes), math.inf]) < math.inf or bool(
            self.changes
        )

    @property
    def loses(self) -> bool:
        """Whether packets are lost."""
        of_workers = self.loss if isinstance(self.loss, tuple) else (self.loss,)
        return any(of_workers) or any(route.loss for route in self.routes)


_SLOWEST_BPS = 1e4


def doubts_of(network: Network, name: str = "the network") -> list[str]:
    """A sentence where a link is so slow that its unit may be a slip.

    >>> doubts_of(Network(uplink_bps=25.0, downlink_bps=1e8))
    ["uplink_bps of the network is 25 bit/s; Mbit/s are written as uplink_bps = '25 Mbit/s'"]
    """
    links = {"uplink_bps": network.uplink_bps, "downlink_bps": network.downlink_bps}
    slowest = {key: min(bps) if isinstance(bps, tuple) else bps for key, bps in links.items()}
    return [
        f"{key} of {name} is {bps:g} bit/s; Mbit/s are written as {key} = '{bps:g} Mbit/s'"
        for key, bps in slowest.items()
        if bps < _SLOWEST_BPS
    ]


def tcp_bps(round_trip_s: Floats, loss: Floats) -> Floats:
    """Bits per second that one TCP connection reaches where a share p of its packets is lost; infinite where none is.

    `8·s / (R·√(2p/3) + 4R·min(1, 3·√(3p/8))·p·(1 + 32p²))`, with segments of s = 1,460 bytes and a round trip of R seconds: the
    formula of Padhye et al. (SIGCOMM 1998), with the time-out of 4R and the acknowledgement for each packet that RFC 5348
    takes. For small p it is that of Mathis et al. (1997), `8·s/R · √(3/2p)`.

    It is of Reno. CUBIC, the default of Linux, is faster on long and fast links that rarely lose a packet, and BBR hardly minds
    loss. It takes losses to be independent, so bursts cost less than it says; it knows no slow start, so that short messages
    take longer; and Linux waits for 0.2 s at least before it sends again, so that links under 50 ms with much loss are slower.

    >>> [round(bps / 1e6, 2) for bps in tcp_bps(np.array([0.1, 0.1, 0.2]), np.array([0.0001, 0.01, 0.01])).tolist()]
    [14.29, 1.31, 0.66]
    """
    with np.errstate(divide="ignore", over="ignore"):  # no loss, or hardly a round trip, is no limit
        timeouts = 4 * np.minimum(1, 3 * np.sqrt(3 * loss / 8)) * loss * (1 + 32 * loss**2)
        return 8 * SEGMENT_BYTES / (round_trip_s * (np.sqrt(2 * loss / 3) + timeouts))


class Links(NamedTuple):
    """A network for a given number of workers, as arrays `[workers]` and `[sites]`."""

    uplink_bps: Floats
    downlink_bps: Floats
    latency_s: Floats
    loss: Floats
    step_s: Floats | None
    site: Integers
    """The index of each worker's site; 0 for all without sites."""
    site_uplink_bps: Floats
    site_downlink_bps: Floats
    route_latency_s: Floats
    """`[sites, sites]`, symmetric, 0 within a site."""
    route_bps: Floats
    route_loss: Floats

    @property
    def loses(self) -> bool:
        """Whether packets are lost."""
        return bool(self.loss.any() or self.route_loss.any())

    def stream_bps(self, source: Integers, target: Integers) -> Floats:
        """The largest rate of a message from each source to each target, without contention: `tcp_bps`."""
        a, b = self.site[source], self.site[target]
        kept = (1 - self.loss[source]) * (1 - self.loss[target]) * (1 - self.route_loss[a, b])
        return tcp_bps(2 * self.message_latency_s(source, target), 1 - kept)

    def message_latency_s(self, source: Integers, target: Integers) -> Floats:
        """The latency of a message from each source to each target."""
        ends = np.maximum(self.latency_s[source], self.latency_s[target])
        if len(self.route_latency_s) == 1:  # without latency within a site
            return ends
        return ends + self.route_latency_s[self.site[source], self.site[target]]


def links_of(network: Network, workers: int, where: str = "network") -> Links:
    """The network's options, one entry per worker.

    Raises: ConfigError, which names `where`, when it describes another number of them.
    """

    def spread(name: str) -> Floats:
        values = np.asarray(getattr(network, name), float)
        if values.ndim and len(values) != workers:
            raise ConfigError(
                f"{where}: {name} lists {len(values)} workers but the run has {workers}; "
                f"give {workers} entries or one number for all"
            )
        return np.broadcast_to(values, workers)

    if network.sites and network.workers != workers:
        raise ConfigError(
            f"{where}: the sites have {network.workers} workers but the run has {workers}; "
            f"give each of 0 to {workers - 1} a site"
        )
    for change in network.changes:
        if change.worker is not None and change.worker >= workers:
            raise ConfigError(
                f"{where}: a change names worker {change.worker} but the run has {workers}; name one of 0 to {workers - 1}"
            )
    names, site = list(network.sites), np.zeros(workers, np.int64)
    for place, name in enumerate(names):
        site[list(network.sites[name].workers)] = place
    count = max(len(names), 1)
    latency_s, loss = np.zeros((count, count)), np.zeros((count, count))
    bandwidth_bps = np.full((count, count), math.inf)
    for route in network.routes:
        a, b = map(names.index, route.between)
        latency_s[a, b] = latency_s[b, a] = route.latency_s
        bandwidth_bps[a, b] = bandwidth_bps[b, a] = route.bandwidth_bps
        loss[a, b] = loss[b, a] = route.loss
    shared = [(site.uplink_bps, site.downlink_bps) for site in network.sites.values()] or [(math.inf, math.inf)]
    return Links(
        uplink_bps=spread("uplink_bps"),
        downlink_bps=spread("downlink_bps"),
        latency_s=spread("latency_s"),
        loss=spread("loss"),
        step_s=None if network.step_s is None else spread("step_s"),
        site=site,
        site_uplink_bps=np.array([up for up, _ in shared]),
        site_downlink_bps=np.array([down for _, down in shared]),
        route_latency_s=latency_s,
        route_bps=bandwidth_bps,
        route_loss=loss,
    )


def jitter_factors(network: Network, round: int, workers: int) -> Floats:
    """The factors on the seconds of the local phases of a round, `[workers]`; mean 1, deviation `jitter`.

    * lognormal: `exp(σ z - σ²/2)` with `σ² = ln(1 + jitter²)`
    * uniform: `1 + √3·jitter·u` with u from -1 to 1

    A worker draws the same in a run of any number of workers.
    """
    if not network.jitter:
        return np.ones(workers)
    draws = numpy_rng(network.seed, "jitter", round)
    if network.jitter_kind == "uniform":
        return 1 + math.sqrt(3) * network.jitter * draws.uniform(-1, 1, workers)
    variance = math.log1p(network.jitter**2)
    return np.exp(math.sqrt(variance) * draws.standard_normal(workers) - variance / 2)


def from_options(options: Any, where: str = "network") -> Network:
    """The network that a parsed TOML table describes; errors name `where`.

    Raises: ConfigError for an unknown or missing key, or a value out of bounds.
    """
    return build(Network, options, source=where)


def from_toml(text: str, where: str = "network") -> Network:
    """The network that a TOML text describes; errors name `where`.

    Raises: ConfigError for text that is not TOML, an unknown or missing key, or a value out of bounds.

    >>> from_toml("uplink_bps = [1e9, 1e8]\\ndownlink_bps = inf\\nstep_s = 0.5").uplink_bps
    (1000000000.0, 100000000.0)
    """
    return _of_document(parse_toml(text, where), where)


def _of_document(options: dict[str, Any], where: str) -> Network:
    if of_a_run := [key for key in ("run", "rule", "model", "data", "network", "method", "variant") if key in options]:
        raise ConfigError(
            f"{where} has '{of_a_run[0]}', so it is a run file, and a network file is needed; give one such as "
            "configs/networks/slow_uplink.toml"
        )
    return from_options(options, where)


def to_options(network: Network) -> dict[str, Any]:
    """The inverse of `from_options`, without fields at their default."""
    return toml_value(network, defaults=False)


def to_toml(network: Network) -> str:
    """The inverse of `from_toml`.

    >>> print(to_toml(Network(uplink_bps=1e9, downlink_bps=float("inf"), latency_s=0.1)), end="")
    uplink_bps = 1000000000.0
    downlink_bps = inf
    latency_s = 0.1
    """
    return tomli_w.dumps(to_options(network))


def read_network(path: Path) -> Network:
    """The network described by a TOML file.

    Raises: ConfigError when the file cannot be read or does not describe a network.
    """
    try:
        document = read_toml(Path(path), f"'{path}'")
    except OSError as error:
        raise ConfigError(
            f"the network file '{path}' cannot be read ({error.strerror}); give the path of a TOML file"
        ) from None
    return _of_document(document, f"'{path}'")


def _check_jitter(network: Network) -> None:
    high = 1 / math.sqrt(3)
    if network.jitter_kind == "uniform" and network.jitter > high:
        raise ConfigError(
            f"jitter is {network.jitter} but must be a number from 0 to {high:.3g} for uniform jitter; 0.1 lets the seconds of "
            "a local phase vary by 10 %"
        )
    if network.jitter and network.step_s is None:
        raise ConfigError(
            f"jitter is {network.jitter} without step_s, but measured times vary by themselves; give step_s or remove jitter"
        )


def _check_sites(network: Network) -> None:
    seen: set[int] = set()
    for name, site in network.sites.items():
        for worker in site.workers:
            if worker in seen:
                raise ConfigError(f"worker {worker} is in two sites, or twice in '{name}'; put it in one")
            seen.add(worker)
    if seen and max(seen) >= len(seen):
        missing = min(set(range(len(seen))) - seen)
        raise ConfigError(
            f"the sites name {len(seen)} workers up to {max(seen)} but not worker {missing}; put every worker in a site"
        )


def _check_lists(network: Network) -> None:
    counts = {**network.lengths, **({"sites": network.workers or 0} if network.sites else {})}
    for (name, count), (other, entries) in pairwise(counts.items()):
        if count != entries:
            raise ConfigError(
                f"{name} lists {count} workers but {other} has {entries}; give the same number of workers in both"
            )


def _check_routes(network: Network) -> None:
    pairs: set[frozenset[str]] = set()
    for route in network.routes:
        for end in route.between:
            if end not in network.sites:
                raise ConfigError(_unknown_site("routes.between", end, network))
        if len(set(route.between)) < 2:
            raise ConfigError(f"routes.between is {list(route.between)} but must name two sites; give their names")
        if frozenset(route.between) in pairs:
            raise ConfigError(f"two routes are between {' and '.join(route.between)}; keep one")
        pairs.add(frozenset(route.between))
    missing = next((pair for pair in combinations(network.sites, 2) if frozenset(pair) not in pairs), None)
    if pairs and missing:
        raise ConfigError(
            f"{len(pairs)} routes are given but none between {missing[0]} and {missing[1]}; "
            "give one for each pair of sites, or none at all"
        )


def _unknown_site(key: str, name: str, network: Network) -> str:
    """A sentence for a site that the network does not have."""
    if network.sites:
        return choose(f"site in {key}", name, network.sites) + "; correct the name"
    return f"{key} names the site '{name:.60}' and the network has no sites; add [sites.NAME] with its workers for each"


def _check_changes(network: Network) -> None:
    for change in network.changes:
        if change.site is not None and change.site not in network.sites:
            raise ConfigError(_unknown_site("changes", change.site, network))
        if change.worker is not None and change.worker >= (network.workers or 2**31):
            raise ConfigError(
                f"changes.worker is {change.worker} but must be a whole number from 0 to {(network.workers or 1) - 1}; "
                "choose one of those"
            )


def _check_store(network: Network) -> None:
    given = {
        "sites": network.sites,
        "changes": network.changes,
        "loss": network.loses,
        "mean": network.mean != "owners",
    }
    if network.store is not None and (names := [name for name, value in given.items() if value]):
        raise ConfigError(
            f"the network has a [store] and {' and '.join(names)}, but a store is priced over each worker's own uplink and "
            "downlink, which stay as they are; remove one of the two"
        )


def must_be_direct(network: Network, what: str) -> None:
    """Raises ConfigError where workers communicate through a store, which only prices of rounds know."""
    if network.store is not None:
        raise ConfigError(
            f"the network has a [store], which {what} does not know; remove [store], or look at the price of a run in "
            "rounds with gossamer check or gossamer price"
        )


def times_as_fast(network: Network, factor: float) -> Network:
    """The same network with all bandwidths scaled, those of sites and routes included; links between stages are
    unchanged.

    TCP's limit under packet loss is unchanged too.

    >>> times_as_fast(Network(uplink_bps=(1e6, 2e6), downlink_bps=math.inf), 10.0).uplink_bps
    (10000000.0, 20000000.0)
    """

    def rates(value: Any) -> Any:
        return tuple(factor * x for x in value) if isinstance(value, tuple) else factor * value

    sites = {
        name: replace(site, uplink_bps=rates(site.uplink_bps), downlink_bps=rates(site.downlink_bps))
        for name, site in network.sites.items()
    }
    routes = tuple(replace(route, bandwidth_bps=rates(route.bandwidth_bps)) for route in network.routes)
    return replace(
        network,
        uplink_bps=rates(network.uplink_bps),
        downlink_bps=rates(network.downlink_bps),
        sites=sites,
        routes=routes,
    )
