"""A worker's round without drift as a linear map of its state, for `gossamer.rounds.stability`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.topologies.mixing import Consensus
from gossamer.tree import Tree, leaves, map_leaves, refill

if TYPE_CHECKING:  # gossip on a topology is predicted without torch
    from gossamer.rules import Rule

Array = NDArray[Any]


class Recursion(NamedTuple):
    """A worker with state v, of which v[0] is θ, sends y = sent·v, and `v' = own v + pulled Σ_j w_ij (y_j - y_i)`."""

    own: Array
    """`[k, k]`"""
    pulled: Array
    """`[k]`"""
    sent: Array
    """`[k]`"""
    drift: Array
    """The change of v `[k]` by a drift that, without momentum, changes y by one."""


def consensus_recursion(consensus: Consensus) -> Recursion:
    """The recursion on (θ, θ_prev) at site "pre", (θ, z_prev) at "post", (θ, m) at "drift", and (θ, m, drift) at "start".

    >>> consensus_recursion(Consensus(1.0, 0.5, "post")).pulled.tolist()
    [1.5, 1.0]
    """
    alpha, g, site = consensus
    if site == "drift":
        return Recursion(np.array([[1.0, g], [0.0, g]]), np.array([alpha, 0.0]), np.array([1.0, g]), np.ones(2))
    if site == "start":  # its drift is added after mixing
        own = np.array([[1.0, g, 1.0], [0.0, g, 0.0], [0.0, 0.0, 0.0]])
        return Recursion(own, np.array([alpha, 0.0, 0.0]), np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 1.0]))
    own = np.array([[1 + g, -g], [1.0, 0.0]])
    pulled = np.array([alpha, 0.0] if site == "pre" else [alpha * (1 + g), alpha])
    return Recursion(own, pulled, np.array([1.0, 0.0]), np.array([1.0, 0.0]))


def rule_recursion(rule: "Rule", merge: float) -> Recursion:
    """The recursion of a rule that has a consensus, when a schedule merges its result into the parameters.

    The parameters become a θ + (1 - a) θ', while the rule's own state has the θ' (`Schedule.merge`). The joint
    recursion differs from rule to rule, so it is computed by applying the rule's functions to unit states.
    """
    import torch

    from gossamer.layout import Layout
    from gossamer.rules import Context

    ctx = Context(0, 2, 0, 1, 0.5, Layout.of([("w", (1,))]), 1, peers=(1,))
    zero = torch.zeros(1, dtype=torch.float64)
    form = map_leaves(torch.zeros_like, (zero, rule.init(zero, ctx)))

    def played(values: Sequence[float], pull: float) -> tuple[Tree, list[float]]:
        """The message from a state with these values, and the state after the round."""
        x, s = refill(form, [torch.full_like(zero, value) for value in values])
        message = rule.send(x, s, ctx)
        peer = map_leaves(lambda t: t + 2 * pull, message)
        result, s = rule.recv(x, s, message, rule.combine(message, {1: peer}, 0, ((0, 0.5), (1, 0.5))), ctx)
        return message, [float(t) for t in leaves((merge * x + (1 - merge) * result, s))]

    def sent(values: Sequence[float]) -> float:
        message = played(values, 0.0)[0]
        assert isinstance(message, torch.Tensor)  # a rule with a consensus sends one tensor
        return float(message)

    k = len(leaves(form))
    unit = np.eye(k).tolist()
    own, pulled = np.array([played(one, 0.0)[1] for one in unit]).T, np.array(played([0.0] * k, 1.0)[1])
    # Constant state, such as a common anchor, is the same on all workers.
    moves = [j for j in range(k) if j == 0 or pulled[j] or own[j].tolist() != unit[j]]
    y = np.array([sent(one) for one in unit])[moves]
    # At this site y has the drift itself and, γ times, as part of the momentum.
    fresh = 1 + rule.consensus.gamma if rule.consensus is not None and rule.consensus.site == "drift" else 1.0
    return Recursion(own[np.ix_(moves, moves)], pulled[moves], y, np.eye(len(y))[0] * fresh / y[0])
