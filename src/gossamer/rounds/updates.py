"""The extra exchange of a rule that mixes the updates of a round first: its topology, and the rule it runs."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.contract import Context, Rule
from gossamer.topologies import Topology, make_topology
from gossamer.topologies.mixing import mean, pull, widen
from gossamer.tree import Tree


def topology_of_updates(rule: Rule, n: int, seed: int) -> Topology | None:
    """The topology over which a rule mixes updates; None for a rule that mixes none.

    Raises: ConfigError for one that does not exist for n workers, or does not keep their mean.
    """
    if not rule.mixes_updates:
        return None
    topology = make_topology(rule.mixes_updates, n, seed=seed)
    if not topology.doubly_stochastic:
        raise ConfigError(
            f"rule '{rule.name}' has mix_updates = '{rule.mixes_updates}', whose weights are not doubly stochastic, so that the "
            "mean of the workers would drift; use one whose weights are, such as 'random'"
        )
    return topology


def left_by_updates(rule: Rule, n: int) -> float:
    """The share of the drift's variance that remains after mixing the updates, averaged over directions and rounds.

    Exact where one of the two mixings is exchangeable or the complete graph: no direction is special there.
    """
    if (updates := topology_of_updates(rule, n, seed=0)) is None or n == 1:
        return 1.0
    squares = [
        (math.fsum(w * w for row in updates.mixing(t).rows for _, w in row) - 1.0) / (n - 1)
        for t in range(updates.period or 1)
    ]
    return math.fsum(squares) / len(squares)


class MixedUpdate(NamedTuple):
    """The state of the exchange of updates, as views of the main rule's state."""

    start: Tensor
    mixed: Tensor


def rule_of_updates(topology: Topology) -> Rule:
    """The exchange of pseudo-gradients, which leaves x and the start of the round as they are and writes the mixed one.

    Δ_i = start_i - x_i;   mixed_i ← Δ_i + Σ_j v_ij (Δ_j - Δ_i),   or   mixed_i ← (1/n) Σ_j Δ_j   where all receive from all
    """

    def own(x: Tensor, s: MixedUpdate) -> Tensor:
        return widen(s.start.to(x.dtype)) - widen(x)

    def init(x: Tensor, ctx: Context) -> Tree:
        return MixedUpdate(x.clone(), torch.zeros_like(x))

    def send(x: Tensor, s: MixedUpdate, ctx: Context) -> Tree:
        return own(x, s).to(x.dtype)

    def gossiped(x: Tensor, s: MixedUpdate, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        return x, s._replace(mixed=own(x, s) + combined)

    def averaged(x: Tensor, s: MixedUpdate, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        return x, s._replace(mixed=combined)

    combine, recv, needs = (mean, averaged, "everyone") if topology.everyone else (pull, gossiped, "connected")
    return Rule(init, send, combine, recv, needs=needs, single_worker_limit="inner", name="updates", compiles=False)
