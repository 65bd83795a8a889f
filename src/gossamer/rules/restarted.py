"""Outer-momentum restarting: every few rounds the outer momentum is forgotten, and nothing else."""

import math

from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.options import whole, within
from gossamer.rules.contract import Context, Rule
from gossamer.rules.diloco import diloco
from gossamer.tree import Tree

__all__ = ["omr", "restarted"]


def restarted(rule: Rule, every: int = 3) -> Rule:
    """The same rule, whose outer momentum is forgotten after every `every` rounds.

    Parameters, inner optimizers and all other state stay.

    Cost: that of the rule; its state kept.
    Raises: ConfigError when the rule has no momentum, or its gossip step is still to be settled.

    >>> from gossamer.rules.gasloc import gasloc
    >>> restarted(gasloc(), every=4).options["every"]
    4
    """
    whole("restarted", "every", every, 1)
    reset = rule.reset
    if reset is None:
        raise ConfigError(
            f"rule '{rule.name}' with options {rule.options} has no outer momentum to restart; use it as it is"
        )
    if rule.consensus is not None and math.isnan(rule.consensus.alpha):
        raise ConfigError(
            f"rule '{rule.name}' still has alpha = 'auto', which is found for momentum that is not restarted; replace it with "
            "gossamer.rounds.stability.resolve_alpha(rule, topology) first, or give a number"
        )

    def recv(x: Tensor, s: Tree, told: Tree, heard: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        x, s = rule.recv(x, s, told, heard, ctx)
        return (x, reset(x, s)) if (ctx.round + 1) % every == 0 else (x, s)

    return rule._replace(
        name=f"restarted_{rule.name}", options={**rule.options, "every": every}, recv=recv,
        n1_limit="outer optimizer", consensus=None,
    )  # fmt: skip


def omr(lr: float = 0.9, momentum: float = 0.7, every: int = 3) -> Rule:
    """DiLoCo whose outer momentum is set to zero every few rounds.

    m' = β m + (1 - β) d;   θ ← θ_start - ν ((1 + β) m' - β m);   m ← 0 after every K rounds, else m'

    It is `restarted(diloco(ν (1 - β), β), every)`; K = 1 is outer SGD with learning rate ν (1 - β²), and K = ∞ is DiLoCo.

    Args:
        lr: ν, in the normalised dialect of the paper: ν (1 - β) is the `lr` of torch's SGD and of `diloco`.
        momentum: β in [0, 1).
        every: K of at least 1; the paper shows 3.
    Cost: 2(n-1)/n models per worker and round; start copy and momentum kept (2 P).
    Source: arXiv 2605.28585.
    Differs: written in torch's dialect, which gives the same iterates.
    Fails when: restarts are frequent and ν is small: within K rounds momentum has no time to build up.

    >>> omr().options
    {'lr': 0.9, 'momentum': 0.7, 'every': 3}
    """
    within("omr", "lr", lr, 0.0, math.inf, low_open=True)
    within("omr", "momentum", momentum, 0.0, 1.0)
    rule = restarted(diloco(lr * (1.0 - momentum), momentum), every)
    return rule._replace(name="omr", options={"lr": lr, "momentum": momentum, "every": every})
