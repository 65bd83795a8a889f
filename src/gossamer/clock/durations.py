"""Seconds of local phases and messages over virtual time."""

import math

from gossamer.clock.events import SERVER
from gossamer.errors import ConfigError
from gossamer.network.links import Network, jitter_factors, links_of

__all__ = ["Durations"]


class Durations:
    """Seconds of local phases and messages on a network, where messages do not share the bandwidth of links."""

    def __init__(self, network: Network, workers: int) -> None:
        if network.sites or network.changes:
            raise ConfigError(
                f"the network has {len(network.sites)} sites and {len(network.changes)} changes, but here each worker has a link "
                "of its own that stays as it is; give uplink_bps, downlink_bps and latency_s per worker"
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

    def phase_s(self, worker: int, number: int, steps: int) -> float:
        """Seconds of a worker's phase of this many inner steps, with the jitter of that phase number."""
        seconds = steps * self.step_s[worker]
        if not self._network.jitter:
            return seconds
        return seconds * float(jitter_factors(self._network, number, self._workers)[worker])

    def transfer_s(self, source: int, target: int, size: int) -> float:
        """Seconds from leaving to arriving; the server's own link costs nothing."""
        ends = [i for i in (source, target) if i != SERVER]
        rate = min(
            math.inf if source == SERVER else self._up[source], math.inf if target == SERVER else self._down[target]
        )
        return max(self._latency[i] for i in ends) + 8 * size / rate
