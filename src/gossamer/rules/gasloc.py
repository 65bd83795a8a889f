"""GASLoC: gossip on the parameters after the local phase, with outer momentum that accelerates the gossip too."""

import math
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.rules.contract import Context, OuterSGD, Rule
from gossamer.settings.options import Decay, OverTime, Positive, factory
from gossamer.topologies.mixing import Consensus, MomentumSite, pull
from gossamer.tree import Tree

_SITES: dict[str, MomentumSite] = {"post": "post", "drift": "drift"}
"""Where momentum acts; all others before the mixing."""


class _State(NamedTuple):
    """Where the round began (absent where nothing reads it), and the previous point that the momentum refers to, or in form
    "drift" the momentum itself."""

    anchor: Tree
    prev: Tree


@factory
def gasloc(
    lr: OverTime[Positive] = 0.7,
    momentum: OverTime[Decay] = 0.5,
    alpha: OverTime[Annotated[float, Field(gt=0, lt=2)] | Literal["auto"]] = 1.0,
    form: Literal["post", "published", "drift"] = "post",
    optimizer: Literal["nesterov", "heavy_ball", "sgd"] = "nesterov",
) -> Rule:
    """Each worker scales its drift, gossips the result with a few peers and adds outer momentum, without a global barrier.

    y = θ + η (θ_end - θ);   z = y + α Σ_j w_ij (y_j - y_i)  =  y - α Λ y
    θ' = z + γ (z - z_prev)   [form "post", outer Nesterov on the gossiped pseudo-gradient]
    θ' = z + γ (y - y_prev)   [form "published", momentum on y before mixing]
    θ' = z + γ (θ - θ_prev)   [optimizer "heavy_ball", in every form]      θ' = z   [optimizer "sgd"]

    with z_prev = y_prev = θ_prev = θ_0 in the first round. Form "drift" keeps momentum of the local drift g = θ_end -
    θ, which is never sent, and mixes its step with the parameters:

    b ← γ b + g;   y = θ + η (g + γ b);   θ' = z

    Args:
        lr: outer learning rate η.
        momentum: γ; not used by "sgd".
        alpha: gossip step; "auto" takes the step with the least steady disagreement for the chosen topology.
        form: where the Nesterov momentum acts.
        optimizer: the outer step; "nesterov" is the paper's.
    Cost: one model to each peer per round; previous point, and start copy if η ≠ 1 or "heavy_ball", kept (up to 2 P).
    Source: Cagnasso, Belilovsky, Oyallon, arXiv 2606.11081.
    Differs: "post" is the default: it is exactly DiLoCo, worker by worker, on the complete graph, and its disagreement stays
        bounded up to a larger γ (0.859 instead of 0.744 for 8 workers in random pairs). So is γ = 0.5, within 0.02 nats of the
        best setting that whole runs found (docs/adr/0031): for 2 to 32 workers it is stable on every topology of ours but
        `torus` and `base`, each at some sizes (`base` at 5, 6, 9 to 15 and 17 to 31).
        In every form the mean of the workers follows DiLoCo's outer rule for any doubly stochastic mixing. The heavy-ball form is
        ours, and so is "drift", whose momentum remembers no disagreement: its factor per round is max(√a, γ), with a that of
        gossip alone, so every γ < 1 is stable; on the complete graph it is DiLoCo too, worker by worker.
    Fails when: γ is beyond the stable range of the topology, which `gossamer topology` computes: the disagreement diverges, as it
        does with γ = 0.9 in random pairs; in form "drift", γ = 0.9 is stable and the disagreement large, as old drifts are sent
        again and again.

    >>> gasloc(lr=1.0).state_copies, gasloc().state_copies
    (1, 2)
    """
    eta, a = lr, math.nan if alpha == "auto" else alpha
    gamma = 0.0 if optimizer == "sgd" else momentum
    kind = form if optimizer == "nesterov" else optimizer
    keeps_anchor = eta != 1.0 or kind in ("heavy_ball", "drift")
    looks_ahead = gamma > 0.0 and kind != "heavy_ball"

    def init(x: Tensor, ctx: Context) -> _State:
        prev = () if kind == "sgd" else torch.zeros_like(x) if kind == "drift" else x.clone()
        return _State(x.clone() if keeps_anchor else (), prev)

    def momentum_of_drift(x: Tensor, s: _State) -> Tensor:
        return gamma * s.prev + (x - s.anchor)

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        if kind == "drift":
            return s.anchor + eta * ((x - s.anchor) + gamma * momentum_of_drift(x, s))
        return x if eta == 1.0 else s.anchor + eta * (x - s.anchor)

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        y = send(x, s, ctx)
        theta = z = y + a * combined
        if kind == "sgd":
            p = ()
        elif kind == "drift":
            p = momentum_of_drift(x, s)
        else:
            p = {"post": z, "published": y, "heavy_ball": s.anchor}[kind]
            theta = z + gamma * (p - s.prev)
        return theta, _State(theta if keeps_anchor else (), p)

    return Rule(
        init,
        send,
        pull,
        recv,
        needs="connected",
        single_worker_limit="inner" if eta == 1.0 and gamma == 0.0 else OuterSGD(lr, gamma, looks_ahead),
        mean_preserving=True,
        consensus=Consensus(a, gamma, _SITES.get(kind, "pre")),
        state_copies=keeps_anchor + (kind != "sgd"),
        reset=None if kind == "sgd" else lambda x, s: s._replace(prev=torch.zeros_like(x) if kind == "drift" else x),
        start=(lambda s: s.anchor) if keeps_anchor else None,
    )
