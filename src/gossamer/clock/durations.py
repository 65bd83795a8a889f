"""Seconds of local phases and messages over virtual time."""

import math

import numpy as np

from gossamer.errors import ConfigError
from gossamer.network.links import Network, jitter_factors, links_of, must_be_direct, tcp_bps
from gossamer.record.logs.seconds import SERVER


def regions_in(network: Network, workers: int) -> tuple[int, ...]:
    """The region (site) of each worker, numbered in the order of their smallest workers, so that worker 0's is 0."""
    sites = links_of(network, workers).site.tolist()
    places = list(dict.fromkeys(sites))
    return tuple(places.index(place) for place in sites)


class Durations:
    """Seconds of local phases and messages on a network, where messages do not share the bandwidth of links.

    The workers of one site form a region; without sites, all workers do. A server is in the site of worker 0, unless
    each region has one.
    """

    def __init__(self, network: Network, workers: int) -> None:
        must_be_direct(network, "virtual time")
        shared = [name for name, site in network.sites.items() if min(site.uplink_bps, site.downlink_bps) < math.inf]
        if shared or network.changes:
            raise ConfigError(
                f"the network has {len(shared)} sites with a shared link and {len(network.changes)} changes, but here messages "
                "do not share links, which stay as they are; give uplink_bps, downlink_bps and latency_s per worker, and the "
                "[[routes]] between sites"
            )
        links = links_of(network, workers)
        if links.step_s is None:
            raise ConfigError(f"network.step_s is not given for {workers} workers; give one number, or one per worker")
        if not links.step_s.min() > 0:
            raise ConfigError(f"network.step_s is {network.step_s}; an inner step must take more than 0 seconds here")
        self.step_s: tuple[float, ...] = tuple(links.step_s.tolist())
        """Seconds of an inner step of each worker."""
        self._up, self._down = links.uplink_bps.tolist(), links.downlink_bps.tolist()
        self._latency = links.latency_s.tolist()
        self._network, self._workers = network, workers
        self._loss, self._loses = links.loss.tolist(), links.loses
        places = list(dict.fromkeys(links.site.tolist()))
        self.regions = regions_in(network, workers)
        """The region of each worker."""
        self._route_s, self._route_bps, self._route_loss = (
            option[places][:, places].tolist() for option in (links.route_latency_s, links.route_bps, links.route_loss)
        )

    def phase_s(self, worker: int, number: int, steps: int) -> float:
        """Seconds of a worker's phase of this many inner steps, with the jitter of that phase number."""
        seconds = steps * self.step_s[worker]
        if not self._network.jitter:
            return seconds
        return seconds * float(jitter_factors(self._network, number, self._workers)[worker])

    def transfer_s(self, source: int, target: int, size: int, *, near: bool = False) -> float:
        """Seconds from leaving to arriving; a server's own link costs nothing, nor does the route where it is `near`."""
        ends = [i for i in (source, target) if i != SERVER]
        rate = min(
            math.inf if source == SERVER else self._up[source], math.inf if target == SERVER else self._down[target]
        )
        a, b = (0 if i == SERVER else self.regions[i] for i in (source, target))
        route_s, route_bps = (0.0, math.inf) if near else (self._route_s[a][b], self._route_bps[a][b])
        latency_s = max(self._latency[i] for i in ends) + route_s
        if self._loses:
            kept = math.prod(1 - self._loss[i] for i in ends) * (1 if near else 1 - self._route_loss[a][b])
            rate = min(rate, float(tcp_bps(np.asarray(2 * latency_s), np.asarray(1 - kept))))
        return latency_s + 8 * size / min(rate, route_bps)

    def relay_s(self, region: int, size: int) -> float:
        """Seconds between the servers of a region and of region 0, where the global one is."""
        latency_s, rate = self._route_s[region][0], self._route_bps[region][0]
        if self._loses:
            rate = min(rate, float(tcp_bps(np.asarray(2 * latency_s), np.asarray(self._route_loss[region][0]))))
        return latency_s + 8 * size / rate
