"""The links between workers and the workers' speed: what a network file says, and nothing of what a run costs on it.

    uplink_bps = [1e9, 1e9, 1e8]   # bits per second a worker can send; one number for all, or one per worker
    downlink_bps = 1e9             # bits per second a worker can receive; inf for a link that costs nothing
    latency_s = 0.001              # seconds to leave or reach a worker; a message takes the larger of its two ends
    duplex = "full"                # "half": sending and receiving take turns on one link
    step_s = 0.5                   # seconds of one inner step; the measured times of the trace when left out
    jitter = 0.1                   # standard deviation of the seconds of a local phase, over their mean
    jitter_kind = "lognormal"      # or "uniform"; both have mean one
    seed = 0                       # of the jitter; equal seeds give equal seconds
    mean = "owners"                # how a mean is carried: "owners" of chunks as gossamer does, "ring" or "tree"

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

    [[changes]]                    # from then on, until the next change of the same link
    at_s = 3600.0
    factor = 0.1                   # a link has this times its own bandwidth, in both directions
    worker = 2                     # the link of a worker, or: site = "paris", the link that a site shares

Streams that share a worker's link, a site's or a route get max-min fair parts of it (`gossamer.network.fluid`).
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import tomli_w
from numpy.typing import NDArray

from gossamer.errors import ConfigError, choose
from gossamer.record.trace import Integers
from gossamer.rng import numpy_rng

__all__ = [
    "Change",
    "Duplex",
    "Floats",
    "JitterKind",
    "Links",
    "MeanKind",
    "Network",
    "PerWorker",
    "Route",
    "Site",
    "from_options",
    "from_toml",
    "jitter_factors",
    "links_of",
    "read_network",
    "to_options",
    "to_toml",
]

Floats = NDArray[np.float64]
PerWorker = float | tuple[float, ...]
Duplex = Literal["full", "half"]
JitterKind = Literal["lognormal", "uniform"]
MeanKind = Literal["owners", "ring", "tree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Workers in one place, and the link that they share for all that leaves or enters it."""

    workers: tuple[int, ...]
    uplink_bps: float = math.inf
    downlink_bps: float = math.inf

    def __post_init__(self) -> None:
        _as_floats(self, "sites", "uplink_bps", "downlink_bps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """What lies between two sites; both directions are alike, and each has the whole bandwidth."""

    between: tuple[str, str]
    latency_s: float = 0.0
    bandwidth_bps: float = math.inf

    def __post_init__(self) -> None:
        _as_floats(self, "routes", "latency_s", "bandwidth_bps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """From `at_s` on, the link of a worker, or the one a site shares, has `factor` times its own bandwidth."""

    at_s: float
    factor: float
    worker: int | None = None
    site: str | None = None

    def __post_init__(self) -> None:
        _as_floats(self, "changes", "at_s")
        if not _is_number(self.factor) or not 1e-6 <= self.factor <= 1e6:
            raise ConfigError(
                f"network: changes.factor is {self.factor!r:.60} but must be a number from 1e-6 to 1e6; "
                "0.1 leaves a tenth of the bandwidth"
            )
        if (self.worker is None) == (self.site is None):
            raise ConfigError(
                f"network: a change names worker {self.worker} and site {self.site} but must name one of the two; "
                "write two changes for two links"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The links between the workers and, if given, the workers' speed; the module's docstring explains each option.

    Raises: ConfigError for a value that is out of bounds, or parts that contradict each other.
    """

    uplink_bps: PerWorker
    downlink_bps: PerWorker
    latency_s: PerWorker = 0.0
    duplex: Duplex = "full"
    step_s: PerWorker | None = None
    jitter: float = 0.0
    jitter_kind: JitterKind = "lognormal"
    seed: int = 0
    mean: MeanKind = "owners"
    sites: Mapping[str, Site] = field(default_factory=dict)
    routes: tuple[Route, ...] = ()
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        for name in ("uplink_bps", "downlink_bps", "latency_s", "step_s"):
            value = getattr(self, name)
            if value is not None or name != "step_s":
                object.__setattr__(self, name, _per_worker(name, value))
        for name, kind in (("duplex", Duplex), ("jitter_kind", JitterKind), ("mean", MeanKind)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"network: {choose(name, str(getattr(self, name)), get_args(kind))}")
        _whole("seed", self.seed, 2**63)
        _check_jitter(self)
        _check_sites(self)
        _check_routes(self)
        _check_changes(self)

    @property
    def workers(self) -> int | None:
        """The number of workers it describes one by one; None where it is the same for any number."""
        if self.sites:
            return sum(len(site.workers) for site in self.sites.values())
        lists = (self.uplink_bps, self.downlink_bps, self.latency_s, self.step_s)
        return next((len(option) for option in lists if isinstance(option, tuple)), None)

    @property
    def shares(self) -> bool:
        """Whether bandwidth depends on who else talks, or on the time."""
        shared = [s for site in self.sites.values() for s in (site.uplink_bps, site.downlink_bps)]
        return min([*shared, *(route.bandwidth_bps for route in self.routes), math.inf]) < math.inf or bool(
            self.changes
        )


class Links(NamedTuple):
    """A network for a given number of workers, as arrays `[workers]` and `[sites]`."""

    uplink_bps: Floats
    downlink_bps: Floats
    latency_s: Floats
    step_s: Floats | None
    site: Integers
    """The place of each worker's site; 0 for all where there are no sites."""
    site_uplink_bps: Floats
    site_downlink_bps: Floats
    route_latency_s: Floats
    """`[sites, sites]`, symmetric, 0 within a site."""
    route_bps: Floats

    def message_latency_s(self, source: Integers, target: Integers) -> Floats:
        """Seconds that the first bit from each source to each target is under way."""
        ends = np.maximum(self.latency_s[source], self.latency_s[target])
        return ends + self.route_latency_s[self.site[source], self.site[target]]


def links_of(network: Network, workers: int) -> Links:
    """The network's options, one entry per worker.

    Raises: ConfigError when it describes another number of them.
    """

    def spread(name: str) -> Floats:
        values = np.asarray(getattr(network, name), float)
        if values.ndim and len(values) != workers:
            raise ConfigError(
                f"network: {name} lists {len(values)} workers but the run has {workers}; "
                f"give {workers} entries or one number for all"
            )
        return np.broadcast_to(values, workers)

    if network.sites and network.workers != workers:
        raise ConfigError(
            f"network: the sites have {network.workers} workers but the run has {workers}; "
            f"give each of 0 to {workers - 1} a site"
        )
    for change in network.changes:
        if change.worker is not None and change.worker >= workers:
            raise ConfigError(
                f"network: a change names worker {change.worker} but the run has {workers}; name one of 0 to {workers - 1}"
            )
    names, site = list(network.sites), np.zeros(workers, np.int64)
    for place, name in enumerate(names):
        site[list(network.sites[name].workers)] = place
    count = max(len(names), 1)
    latency_s, bandwidth_bps = np.zeros((count, count)), np.full((count, count), math.inf)
    for route in network.routes:
        a, b = map(names.index, route.between)
        latency_s[a, b] = latency_s[b, a] = route.latency_s
        bandwidth_bps[a, b] = bandwidth_bps[b, a] = route.bandwidth_bps
    own = list(network.sites.values()) or [Site(workers=())]
    return Links(
        uplink_bps=spread("uplink_bps"),
        downlink_bps=spread("downlink_bps"),
        latency_s=spread("latency_s"),
        step_s=None if network.step_s is None else spread("step_s"),
        site=site,
        site_uplink_bps=np.array([s.uplink_bps for s in own]),
        site_downlink_bps=np.array([s.downlink_bps for s in own]),
        route_latency_s=latency_s,
        route_bps=bandwidth_bps,
    )


def jitter_factors(network: Network, round: int, workers: int) -> Floats:
    """What the seconds of the local phases of a round are multiplied by, `[workers]`; mean 1, deviation `jitter`.

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
    """The network that a parsed TOML table describes; `where` is named when it describes none.

    Raises: ConfigError for an unknown or missing key, or a value out of bounds.
    """
    table = dict(_table(options, Network, where))
    sites = table.get("sites", {})
    if not isinstance(sites, Mapping):
        raise ConfigError(f"{where}: sites is {sites!r:.60} but must be tables; write each as [sites.NAME]")
    table["sites"] = {name: Site(**_table(site, Site, f"{where}.sites.{name}")) for name, site in sites.items()}
    for key, kind in (("routes", Route), ("changes", Change)):
        rows = table.get(key, [])
        if not isinstance(rows, list | tuple):
            raise ConfigError(f"{where}: {key} is {rows!r:.60} but must be tables; write each as [[{key}]]")
        table[key] = tuple(kind(**_table(row, kind, f"{where}.{key}")) for row in rows)
    return Network(**table)


def from_toml(text: str, where: str = "network") -> Network:
    """The network that a TOML text describes; `where` is named when it describes none.

    Raises: ConfigError for text that is not TOML, an unknown or missing key, or a value out of bounds.

    >>> from_toml("uplink_bps = [1e9, 1e8]\\ndownlink_bps = inf\\nstep_s = 0.5").uplink_bps
    (1000000000.0, 100000000.0)
    """
    try:
        options = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}; repair the file") from None
    if of_a_run := [key for key in ("run", "rule", "model", "data", "network", "method", "variant") if key in options]:
        raise ConfigError(
            f"{where} has '{of_a_run[0]}', so it is a run file, and a network file is needed; give one such as "
            "configs/networks/slow_uplink.toml"
        )
    return from_options(options, where)


def to_options(network: Network) -> dict[str, Any]:
    """The table from which `from_options` makes this network again, without what is at its default."""
    return _plain(network)


def to_toml(network: Network) -> str:
    """The TOML text from which `from_toml` makes this network again.

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
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the network file {path} cannot be read ({error}); give the path of a TOML text file"
        ) from None
    return from_toml(text, str(path))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        given = {f: getattr(value, f.name) for f in fields(value)}
        return {f.name: _plain(option) for f, option in given.items() if option != _default(f)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _default(option: "Field[Any]") -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _table(value: Any, kind: type, where: str) -> dict[str, Any]:
    """The keys of a table, which must be those that the dataclass knows and needs; lists become tuples."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r:.60} but must be a table of options; write one key per line")
    known = {f.name: f for f in fields(kind)}
    for key in value:
        if key not in known:
            raise ConfigError(f"{where}: {choose('key', str(key), known)}; correct the name")
    for name, option in known.items():
        if name not in value and option.default is MISSING and option.default_factory is MISSING:
            unit = " in bits per second" if name.endswith("_bps") else ""
            raise ConfigError(f"{where} gives the keys {sorted(value)} but '{name}' is needed too; add it{unit}")
    return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}


def _check_jitter(network: Network) -> None:
    high = 1 / math.sqrt(3) if network.jitter_kind == "uniform" else 10.0
    if not _is_number(network.jitter) or not 0 <= network.jitter <= high:
        raise ConfigError(
            f"network: jitter is {network.jitter!r:.60} but must be a number from 0 to {high:.3g} for {network.jitter_kind} "
            "jitter; 0.1 lets the seconds of a local phase vary by 10 %"
        )
    if network.jitter and network.step_s is None:
        raise ConfigError(
            f"network: jitter is {network.jitter} without step_s, but measured times vary by themselves; "
            "give step_s or leave jitter out"
        )


def _check_sites(network: Network) -> None:
    seen: set[int] = set()
    for name, site in network.sites.items():
        if not isinstance(site.workers, tuple) or not site.workers:
            raise ConfigError(
                f"network: sites.{name}.workers is {site.workers!r:.60} but must list the workers of the site; "
                "give at least one"
            )
        for worker in site.workers:
            _whole(f"sites.{name}.workers", worker, 2**31)
            if worker in seen:
                raise ConfigError(f"network: worker {worker} is in two sites, or twice in '{name}'; put it in one")
            seen.add(worker)
    if seen and max(seen) >= len(seen):
        missing = min(set(range(len(seen))) - seen)
        raise ConfigError(
            f"network: the sites name {len(seen)} workers up to {max(seen)} but not worker {missing}; "
            "put every worker in a site"
        )


def _check_routes(network: Network) -> None:
    pairs: set[frozenset[str]] = set()
    for route in network.routes:
        ends = route.between
        named = isinstance(ends, tuple) and all(isinstance(end, str) for end in ends)
        if not named or len(ends) != 2 or ends[0] == ends[1]:
            raise ConfigError(f"network: routes.between is {ends!r:.60} but must name two sites; give their names")
        for end in ends:
            if end not in network.sites:
                raise ConfigError(f"network: {choose('site in routes.between', str(end), network.sites)}")
        if frozenset(ends) in pairs:
            raise ConfigError(f"network: two routes are between {ends[0]} and {ends[1]}; keep one")
        pairs.add(frozenset(ends))
    missing = next((pair for pair in combinations(network.sites, 2) if frozenset(pair) not in pairs), None)
    if pairs and missing:
        raise ConfigError(
            f"network: {len(pairs)} routes are given but none between {missing[0]} and {missing[1]}; "
            "give one for each pair of sites, or none at all"
        )


def _check_changes(network: Network) -> None:
    for change in network.changes:
        if change.site is not None and (not isinstance(change.site, str) or change.site not in network.sites):
            raise ConfigError(f"network: {choose('site in changes', str(change.site), network.sites)}")
        if change.worker is not None:
            _whole("changes.worker", change.worker, network.workers or 2**31)


def _as_floats(owner: Any, where: str, *names: str) -> None:
    """Makes numbers of a frozen part floats. Raises ConfigError for one out of bounds."""
    for name in names:
        object.__setattr__(owner, name, _number(f"{where}.{name}", getattr(owner, name)))


def _per_worker(name: str, value: Any) -> PerWorker:
    """An option as floats. Raises ConfigError unless it is one number within bounds or a list of them."""
    if isinstance(value, list | tuple):
        if not value:
            raise ConfigError(f"network: {name} is an empty list; give one number for all workers, or one per worker")
        return tuple(_number(name, number) for number in value)
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    rate = name.endswith("_bps")
    low, high = (1, 1e18) if rate else (0, 1e9)
    if not _is_number(value) or not (low <= value <= high or (rate and value == math.inf)):
        allowed = "bits per second from 1 to 1e18, or inf" if rate else "seconds from 0 to 1e9"
        several = "" if "." in name else "; give one for all workers or a list"
        raise ConfigError(f"network: {name} is {value!r:.60} but must be a number of {allowed}{several}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: Any, limit: int) -> None:
    if type(value) is not int or not 0 <= value < limit:
        raise ConfigError(
            f"network: {name} is {value!r:.60} but must be a whole number from 0 to {limit - 1}; choose one of those"
        )
