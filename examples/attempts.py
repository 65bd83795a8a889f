"""Two attempts on what gossip costs against averages over everyone, as code that a run file names.

    PYTHONPATH=examples gossamer compare experiments/evidence/attempts.toml --seeds 0,1,2

They were registered in docs/evidence/registered.md; docs/evidence/momentum.md says what became of them.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gossamer.rules import gasloc
from gossamer.rules.contract import Context, Rule
from gossamer.topologies import make_topology
from gossamer.topologies.contract import Topology, planned_topology
from gossamer.topologies.mixing import Mixing
from gossamer.tree import Tree

__all__ = ["ending", "gated"]


def ending(n: int, *, seed: int = 0, dense_from: int) -> Topology:
    """Random pairs, and means over everyone from a round on."""
    pairs, average = make_topology("random", n, seed=seed), make_topology("complete", n)

    def build(round: int, workers: Sequence[int]) -> Mixing:
        return (average if round >= dense_from else pairs).mixing(round, frozenset(workers))

    return planned_topology(n, build, symmetric=True, doubly_stochastic=True)


def gated(lr: float = 0.7, momentum: float = 0.5, reference: float = 0.8, whole: bool = False) -> Rule:
    """GASLoC in pairs, whose momentum shrinks with the alignment of the two.

    A = |Δ_i + Δ_j|² / 2 / (|Δ_i|² + |Δ_j|²),   g = clip((A - 1/2) / (reference - 1/2), 0, 1)
    z = θ_i + (Δ_i + Δ_j) / 2;   θ' = z + γ g (z - z_prev)

    with Δ the scaled steps of the two as worker i sees them, from its own start of the round.

    Args: `whole`: what the momentum loses the step gains, up to plain gossip: θ' += (1 - g) (1/η - 1) (z - θ_i).
    """
    plain = gasloc(lr=lr, momentum=momentum)

    def recv(x: Tensor, s: Any, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Any]:
        ours = lr * (x - s.anchor)
        theirs, both = ours + 2 * combined, ours + combined
        aligned = 2 * both.square().sum() / (ours.square().sum() + theirs.square().sum())
        gate = ((aligned - 0.5) / (reference - 0.5)).clamp(0.0, 1.0)
        z = s.anchor + both
        theta = z + momentum * gate * (z - s.prev)
        if whole:
            theta = theta + (1 - gate) * (1 / lr - 1) * both
        return theta, s._replace(anchor=theta, prev=z)

    return plain._replace(recv=recv, consensus=None)
