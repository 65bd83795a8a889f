"""From a run file to what runs."""

from dataclasses import replace

from gossamer.asynchronous import PAIRS, SERVERS, PairRule, ServerRule, dylu_steps
from gossamer.clock.durations import Durations
from gossamer.errors import ConfigError, PairingError, choose
from gossamer.network.links import Network
from gossamer.run.config import RunConfig

__all__ = ["clock", "no_server_options", "paced", "pair_rule", "server_rule"]


def clock(config: RunConfig) -> tuple[str, Network]:
    """The network whose seconds decide who is late, and its name. Raises ConfigError when the run file leaves that open."""
    names, name = sorted(config.network), config.events.network
    if name is None and len(names) != 1:
        raise ConfigError(
            f"the run looks at the clock and its file has {len(names)} networks ({', '.join(names) or 'none'}); "
            "write one as [network.NAME] with step_s, and name it in events.network where there are several"
        )
    name = names[0] if name is None else name
    if name not in config.network:
        raise ConfigError(choose("network in events.network", name, names) + "; correct the name")
    return name, config.network[name]


def server_rule(config: RunConfig) -> ServerRule:
    """The server's rule of a run. Raises ConfigError for what cannot go with a server."""
    assert config.server is not None
    if config.events.meetings is not None or not config.run.wait:
        given = "run.wait = false" if not config.run.wait else f"events.meetings = {config.events.meetings}"
        raise PairingError(
            f"server '{config.server.name}' got {given}, but its workers meet nobody and hear only the server; leave it out"
        )
    return SERVERS[config.server.name](**config.server.options)


def pair_rule(config: RunConfig) -> PairRule:
    """The pair rule of a run. Raises ConfigError and PairingError for what cannot go with pairs that train models."""
    assert config.pair is not None
    rule = PAIRS[config.pair.name](**config.pair.options)
    if not rule.any_phase:
        raise PairingError(
            f"pair '{rule.name}' with run.local_steps = {config.run.local_steps} and inner optimizer '{config.inner.optimizer}' "
            "cannot work: it needs exactly one gradient of a convex function as a local phase; take 'a2cid2' or 'ad_psgd'"
        )
    no_server_options(config, f"pair '{rule.name}'")
    return rule


def no_server_options(config: RunConfig, who: str) -> None:
    """Raises PairingError for options of a server in a run that has none."""
    if config.events.fragments > 1:
        raise PairingError(
            f"{who} got events.fragments = {config.events.fragments}, but only a server keeps fragments; leave it out"
        )


def paced(config: RunConfig, network: Network) -> RunConfig:
    """The run with the local steps that its workers take, fewer for the slow with `events.dylu`."""
    if not config.events.dylu:
        return config
    steps = config.run.local_steps
    if isinstance(steps, tuple):
        raise ConfigError(
            f"events.dylu = true sets local steps by speed and run.local_steps is {list(steps)}; give one number, that of the "
            "fastest worker"
        )
    step_s = Durations(network, config.workers).step_s
    return replace(config, run=replace(config.run, local_steps=dylu_steps(step_s, steps)))
