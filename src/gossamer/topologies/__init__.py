"""Which workers communicate in which round, and with what weights.

A topology is a pure function of (seed, round, alive): every worker computes the same mixing without communication, a run can
resume in any round, and lost workers are left out. Each factory plans for m positions; the workers alive take them in
ascending order, and the others have a self-loop of weight one.
"""

from collections.abc import Callable
from typing import Any

from gossamer.settings.options import row
from gossamer.topologies.contract import Topology
from gossamer.topologies.graphs import chain as chain
from gossamer.topologies.graphs import complete as complete
from gossamer.topologies.graphs import exponential as exponential
from gossamer.topologies.graphs import graph as graph
from gossamer.topologies.graphs import ring as ring
from gossamer.topologies.graphs import star as star
from gossamer.topologies.graphs import torus as torus
from gossamer.topologies.graphs import tree as tree
from gossamer.topologies.groups import grid as grid
from gossamer.topologies.groups import groups as groups
from gossamer.topologies.periodic import PLAIN
from gossamer.topologies.periodic import pga as pga
from gossamer.topologies.sequences import base as base
from gossamer.topologies.sequences import hypercube as hypercube
from gossamer.topologies.sequences import one_peer_exponential as one_peer_exponential
from gossamer.topologies.sequences import random as random
from gossamer.topologies.sequences import random_push as random_push

__all__ = [
    "TOPOLOGIES",
    "Topology",
    "make_topology",
]

TOPOLOGIES: dict[str, Callable[..., Topology]] = dict(sorted({**PLAIN, "pga": pga}.items()))


def make_topology(name: str, n: int, seed: int = 0, **options: Any) -> Topology:
    """The topology of that name in `TOPOLOGIES`, with its own options.

    Raises: ConfigError when the name or an option is unknown, or a value cannot work.

    >>> make_topology("random", 8, peers=2).options
    {'peers': 2}
    """
    return row("topology", TOPOLOGIES, name, options)(n, seed=seed, **options)
