"""Weighting by local steps: a worker's drift counts per inner step, whatever the number of its steps."""

import math
from typing import NamedTuple

from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.contract import Context, Rule, around
from gossamer.settings.options import Given, wrapper
from gossamer.tree import Tree


class _State(NamedTuple):
    """The state of the wrapped rule, and where the round began (absent where that state has it)."""

    inner: Tree
    start: Tree


@wrapper
def weighted(rule: Given[Rule]) -> Rule:
    """Scales the drift of a worker that took fewer local steps to the number of steps the others took.

    θ_i(end) ← θ_i(start) + (H / H_i) (θ_i(end) - θ_i(start)),   and on as in the rule

    With unequal local steps the unscaled mean drift is an average over steps, in which a worker with few steps, and with it
    its own data, hardly counts. With scaling, the mean drift is H times the mean over workers of the drift per step. A worker
    with H_i = H is unchanged to the last bit.

    Args:
        rule: one that acts on parameters.
    Cost: that of the rule, and 1 P more of state where the rule does not keep the start of the round.
    Source: ours; akin to the normalised averaging of FedNova (arXiv 2007.07481), with plain sums of steps.
    Fails when: H_i is much smaller than H: the noise of a few steps is multiplied as well. In `gossamer.Outer` every worker
        knows only its own steps, and nothing is scaled.
    Raises: ConfigError for rules on gradients, or that mix updates, and while the rule's gossip step is still "auto".

    >>> from gossamer.rules.gasloc import gasloc
    >>> weighted(gasloc()).state_copies == gasloc().state_copies
    True
    """
    if rule.site != "parameters":
        raise ConfigError(
            f"rule '{rule.name}' acts on {rule.site} and has no local steps to weigh by; allowed are rules with a local phase, "
            "such as 'diloco': remove run.weigh_steps or choose such a rule"
        )
    if rule.consensus is not None and math.isnan(rule.consensus.alpha):
        raise ConfigError(
            f"rule '{rule.name}' still has alpha = 'auto'; replace it with "
            "gossamer.rounds.stability.resolve_alpha(rule, topology) first, or give a number"
        )
    if rule.mixes_updates:
        raise ConfigError(
            f"rule '{rule.name}' mixes pseudo-gradients over '{rule.mixes_updates}' before its update, where nobody knows the "
            "others' local steps; use it without run.weigh_steps, or with mix_updates = 'none'"
        )
    kept = rule.start

    def whole(x: Tensor, s: _State, ctx: Context) -> Tensor:
        """The parameters as if this worker had taken all steps."""
        if ctx.local_steps >= ctx.full_steps:
            return x
        start = s.start if kept is None else kept(s.inner)
        return start + ctx.full_steps / ctx.local_steps * (x - start)

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(rule.init(x, ctx), x.clone() if kept is None else ())

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return rule.send(whole(x, s, ctx), s.inner, ctx)

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        x, inner = rule.recv(whole(x, s, ctx), s.inner, own_decoded, combined, ctx)
        return x, _State(inner, x if kept is None else ())

    return around(
        rule,
        init=init,
        send=send,
        recv=recv,
        state_copies=rule.state_copies + (kept is None),
        start=(lambda s: s.start) if kept is None else lambda s: kept(s.inner),
    )
