"""Anchored gossip: workers compress their distance from a shared point."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.contract import Context, Rule, around
from gossamer.rules.gasloc import gasloc
from gossamer.settings.options import Given, factory, like, wrapper
from gossamer.topologies.mixing import Row, mean, pull
from gossamer.tree import Tree


class _State(NamedTuple):
    """The state of the rule inside, and the anchor, bitwise the same on all workers."""

    inner: Tree
    anchor: Tensor


@wrapper
def anchored(rule: Given[Rule]) -> Rule:
    """Lets a gossip rule send its parameters as their distance from a common anchor.

    ŷ_i = A + decode(encode(y_i - A));   y_i is drawn by Σ_j w_ij (ŷ_j - ŷ_i);   A ← mean_j ŷ_j when all receive from all

    The anchor cancels in the pull, so an exact codec gives the unwrapped rule. With a lossy codec the error has the size of
    y - A instead of y, and the mean of the workers is kept whatever is lost. A begins at the common starting point. In rounds
    in which all receive from all, A moves to the mean of the decoded messages, which is the same on every worker.

    Args:
        rule: a gossip rule that sends one tensor of parameters.
    Cost: that of the rule; its state and the anchor kept (1 P more).
    Fails when: workers move far from the anchor: the error of a lossy codec grows with the distance.
    Raises: ConfigError for rules that do not combine messages by a pull, or do so late.

    >>> from gossamer.rules.gossip import gossip
    >>> anchored(gossip()).state_copies
    1
    """
    if rule.combine is not pull or not rule.elementwise or rule.delay_rounds:
        raise ConfigError(
            f"an anchor cancels in gossip only, and rule '{rule.name}' does not gossip whole parameters at once; allowed are "
            "rules such as 'gasloc': for averaged pseudo-gradients use error_feedback"
        )

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(rule.init(x, ctx), x.clone())

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return rule.send(x, s.inner, ctx) - s.anchor

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        pulled, average = combined
        x, inner = rule.recv(x, s.inner, s.anchor + own_decoded, pulled, ctx)
        return x, _State(inner, s.anchor + average if ctx.everyone else s.anchor)

    return around(
        rule,
        init=init,
        send=send,
        combine=_pull_and_mean,
        recv=recv,
        state_copies=rule.state_copies + 1,
    )


@factory
@like(gasloc)
def anchored_gasloc(*args: Any, **options: Any) -> Rule:
    """GASLoC through a lossy codec, on any topology, with the mean of the workers kept exactly.

    ŷ_i = A + decode(encode(y_i - A));   z = y + α Σ_j w_ij (ŷ_j - ŷ_i);   and on as in `gasloc`

    Args: those of `gasloc`.
    Cost: one payload to each peer per round; what `gasloc` keeps, and the anchor, kept (1 P to 3 P).
    Source: the rule is arXiv 2606.11081; anchored messages are ours, akin to CHOCO (arXiv 1902.00340), which needs a static
        graph.
    Differs: topology "pga" moves A from time to time, at the price of a barrier; without it A stays at the starting point, and
        the error grows with the distance from it. On the complete graph with η = 1 and γ = 0 it is `cocktail` with an exact way
        back.
    Fails when: the codec drops most elements (topk, randomk): the workers never agree on elements that are never sent.

    >>> anchored_gasloc().options == gasloc().options
    True
    """
    return anchored(gasloc(*args, **options))


def _pull_and_mean(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> Tree:
    return pull(own_decoded, received, i, row), mean(own_decoded, received, i, row)
