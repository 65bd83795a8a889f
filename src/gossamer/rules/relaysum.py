"""RelaySum: neighbours on a tree relay sums, so every worker gets the exact mean of all, each delayed by its distance."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import factory
from gossamer.topologies.mixing import each
from gossamer.tree import Tree


class _State(NamedTuple):
    """The common start x⁰, and for each peer k the last m_{k→i} and the last m_{i→k}."""

    origin: Tensor
    came: tuple[Tensor, ...]
    went: tuple[Tensor, ...]


@factory
def relaysum() -> Rule:
    """Every worker moves to the uniform mean of all, in which a worker τ + 1 links away appears with its value of τ rounds ago.

    m_{i→j}^t = x_i^{t+½} + Σ_{k ∈ N_i, k ≠ j} m_{k→i}^{t-1};   x_i^{t+1} = (1/n) (x_i^{t+½} + Σ_{k ∈ N_i} m_{k→i}^t)
              = (1/n) Σ_j x_j^{(t - τ_ij) + ½},   τ_ij = max(links between i and j - 1, 0)

    with all x relative to the common start x⁰, which stands in for messages that have not arrived yet. A worker sends all its
    neighbours the same S_i^t = x_i^{t+½} + Σ_k m_{k→i}^{t-1}, and each subtracts its own contribution: m_{i→j}^t = S_i^t -
    m_{j→i}^{t-1}. Both ends subtract the same bits that were added, so errors of rounding or of a codec leave with the message
    that carried them.

    Cost: one model to each peer per round; start, and two sums for each peer, kept (1 P, and 2 P per peer).
    Source: Vogels et al., arXiv 2110.04175.
    Differs: one message for all neighbours where the paper has one for each, at twice its buffers; sums are of differences from
        x⁰, so that missing first messages need no count, and workers without drift stay unchanged to the last bit; the local
        phase may have many steps.
    Fails when: the tree is deep: a steady drift moves the workers by 1 / (1 + mean τ) of itself per round, 0.36 in a chain of 8
        and 0.43 in a binary tree of 8; or the codec drops most elements, as topk does.

    >>> relaysum().needs
    'tree'
    """

    def init(x: Tensor, ctx: Context) -> _State:
        came, went = (tuple(torch.zeros_like(x) for _ in ctx.peers) for _ in range(2))
        return _State(x.clone(), came, went)

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return _added(x - s.origin, s.came)

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        came = tuple(total - part for total, part in zip(combined, s.went, strict=True))
        went = tuple(own_decoded - part for part in s.came)
        return s.origin + (1.0 / ctx.n) * _added(x - s.origin, came), _State(s.origin, came, went)

    return Rule(init, send, each, recv, needs="tree", single_worker_limit="inner", state_copies=1, copies_per_peer=2)


def _added(x: Tensor, sums: tuple[Tensor, ...]) -> Tensor:
    for term in sums:
        x = x + term
    return x
