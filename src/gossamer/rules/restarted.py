"""Outer-momentum restarting: every few rounds the outer momentum, and nothing else, is reset to zero."""

import math

from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.contract import Context, Rule, amplification
from gossamer.rules.diloco import diloco
from gossamer.settings.options import Count, Decay, Given, OverTime, Positive, factory, wrapper
from gossamer.tree import Tree


@wrapper
def restarted(rule: Given[Rule], every: Count = 3) -> Rule:
    """Resets a rule's outer momentum to zero every `every` rounds.

    Parameters, inner optimizers and all other state stay as they are.

    Args:
        rule: one with outer momentum.
        every: rounds between two restarts.
    Cost: that of the rule; its state kept.
    Source: arXiv 2605.28585 for DiLoCo; for GASLoC ours.
    Raises: ConfigError when the rule has no momentum, or its gossip step is still "auto".

    >>> from gossamer.rules.gasloc import gasloc
    >>> restarted(gasloc(), every=4).options["every"]
    4
    """
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

    def recv(x: Tensor, s: Tree, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        x, s = rule.recv(x, s, own_decoded, combined, ctx)
        return (x, reset(x, s)) if (ctx.round + 1) % every == 0 else (x, s)

    return rule._replace(
        recv=recv, single_worker_limit="outer optimizer", consensus=None, amplifies=amplification(rule)
    )


@factory
def omr(lr: OverTime[Positive] = 0.9, momentum: OverTime[Decay] = 0.7, every: Count = 3) -> Rule:
    """DiLoCo whose outer momentum is set to zero every few rounds.

    m' = β m + (1 - β) d;   θ ← θ_start - ν ((1 + β) m' - β m);   m ← 0 after every K rounds, else m'

    It is `restarted(diloco(ν (1 - β), β), every)`; K = 1 is outer SGD with learning rate ν (1 - β²), and K = ∞ is DiLoCo.

    Args:
        lr: ν, in the normalised convention of the paper: ν (1 - β) is the `lr` of torch's SGD and of `diloco`.
        momentum: β.
        every: K, rounds between two restarts; the paper shows 3.
    Cost: 2(n-1)/n models per worker and round; start copy and momentum kept (2 P).
    Source: arXiv 2605.28585.
    Differs: written in the convention of torch's SGD, which gives the same iterates.
    Fails when: restarts are frequent and ν is small: within K rounds momentum has no time to build up.

    >>> omr().options
    {'lr': 0.9, 'momentum': 0.7, 'every': 3}
    """
    return restarted(diloco(lr * (1.0 - momentum), momentum), every)
