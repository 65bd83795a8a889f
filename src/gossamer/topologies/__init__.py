"""Who talks to whom in which round, and with what weights.

A topology is a pure function of (seed, round, alive): every worker computes the same answer without talking, a run resumes in
any round, and a lost worker is simply left out. Each factory plans for m positions; the workers alive take them in ascending
order, and the others are left with a self-loop of weight one.
"""

import inspect
from collections.abc import Callable
from typing import Any

from gossamer.errors import ConfigError, choose
from gossamer.topologies.contract import Topology
from gossamer.topologies.graphs import chain, complete, exponential, ring, star, torus, tree
from gossamer.topologies.periodic import pga
from gossamer.topologies.sequences import base, hypercube, one_peer_exponential, random, random_push

__all__ = [
    "TOPOLOGIES",
    "Topology",
    "base",
    "chain",
    "complete",
    "exponential",
    "hypercube",
    "make_topology",
    "one_peer_exponential",
    "pga",
    "random",
    "random_push",
    "ring",
    "star",
    "torus",
    "tree",
]

TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "base": base,
    "chain": chain,
    "complete": complete,
    "exponential": exponential,
    "hypercube": hypercube,
    "one_peer_exponential": one_peer_exponential,
    "pga": pga,
    "random": random,
    "random_push": random_push,
    "ring": ring,
    "star": star,
    "torus": torus,
    "tree": tree,
}


def make_topology(name: str, n: int, seed: int = 0, **options: Any) -> Topology:
    """The topology of that name in `TOPOLOGIES`, with its own options.

    Raises: ConfigError when the name or an option is unknown, or a value cannot work.

    >>> make_topology("random", 8, peers=2).options
    {'peers': 2}
    """
    if name not in TOPOLOGIES:
        raise ConfigError(choose("topology", name, TOPOLOGIES))
    allowed = set(inspect.signature(TOPOLOGIES[name]).parameters) - {"n", "seed"}
    for option, value in options.items():
        if not allowed:
            raise ConfigError(f"topology '{name}' takes no options, and got {option} = {value!r}: leave it out")
        if option not in allowed:
            raise ConfigError(choose(f"option of topology '{name}'", option, allowed))
    return TOPOLOGIES[name](n, seed=seed, **options)
