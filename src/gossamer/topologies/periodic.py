"""Gossip with periodic global averaging over any other topology, and the topologies it may use."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from gossamer.errors import ConfigError
from gossamer.settings.fields import Words
from gossamer.settings.options import Count, factory, row, table
from gossamer.topologies.contract import Seed, Topology, Workers, planned_topology
from gossamer.topologies.graphs import chain, complete, exponential, ring, star, torus, tree
from gossamer.topologies.groups import grid, groups
from gossamer.topologies.mixing import Mixing
from gossamer.topologies.sequences import base, hypercube, one_peer_exponential, random, random_push

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


Graph = Annotated[str | Mapping[str, Any], Words("a topology's name, or a table with its name and options")]


@factory
def pga(n: Workers, *, seed: Seed = 0, every: Count = 6, graph: Graph = "one_peer_exponential") -> Topology:
    """Gossip with periodic global averaging: every `every`-th round is a mean over all workers, the others use `graph`.

    Args:
        every: K; the rounds K - 1, 2K - 1, … are global.
        graph: the topology of the other rounds, by its name, or with its options as in `{name = "random", peers = 2}`.
    Cost: that of `graph`, and n - 1 messages per worker in a global round, which is a barrier of all.
    Source: Chen et al., arXiv 2105.09080.
    Fails when: one link is slow: global rounds wait for it. On a random `graph` the predicted stability is an estimate that
        treats the global rounds as random too.

    >>> [len(pga(8, every=3).mixing(t).receives_from(0)) for t in range(6)]
    [1, 1, 7, 1, 1, 7]
    """
    spec = {"name": graph} if isinstance(graph, str) else graph
    if not isinstance(spec.get("name"), str):
        raise ConfigError(
            f"topology 'pga' got graph = {graph!r}; allowed are a topology's name, or a table with its name and options: "
            "add the name"
        )
    name, options = spec["name"], {key: value for key, value in spec.items() if key not in ("name", "n", "seed")}
    between = row("topology", PLAIN, name, options)(n, seed=seed, **options)
    average = complete(n)

    def build(round: int, workers: Sequence[int]) -> Mixing:
        return (average if (round + 1) % every == 0 else between).mixing(round, frozenset(workers))

    if every == 1 or (between.static and between.mixing(0) == average.mixing(0)):
        tags = {tag: getattr(average, tag) for tag in ("everyone", "tree", "period", "exact_rounds")}
        between = average
    else:
        period = None if between.period is None else math.lcm(between.period, every)
        tags = {"period": period, "exact_rounds": min(every, between.exact_rounds or every)}
    inherited = {tag: getattr(between, tag) for tag in ("symmetric", "doubly_stochastic", "column_stochastic", "psd")}
    return planned_topology(n, build, **tags, **inherited)
