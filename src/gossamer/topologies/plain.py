"""The topologies that are made of nothing but themselves, by name: the rows that one around another may choose from."""

from collections.abc import Callable

from gossamer.settings.options import table
from gossamer.topologies.contract import Topology
from gossamer.topologies.graphs import chain, complete, exponential, ring, star, torus, tree
from gossamer.topologies.groups import grid, groups
from gossamer.topologies.sequences import base, hypercube, one_peer_exponential, random, random_push

__all__ = ["PLAIN"]

PLAIN: dict[str, Callable[..., Topology]] = table(
    base,
    chain,
    complete,
    exponential,
    grid,
    groups,
    hypercube,
    one_peer_exponential,
    random,
    random_push,
    ring,
    star,
    torus,
    tree,
    kind="topology",
    where="topology",
)
