"""Error feedback: a worker sends the error of a lossy codec together with its next pseudo-gradient or gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.contract import Context, Rule, around
from gossamer.rules.diloco import diloco
from gossamer.settings.options import Given, OverTime, Positive, Share, factory, wrapper
from gossamer.tree import Tree


class _State(NamedTuple):
    """The state of the wrapped rule, and the error that was not sent yet."""

    inner: Tree
    unsent: Tensor


@wrapper
def error_feedback(rule: Given[Rule], decay: Share = 1.0) -> Rule:
    """Lets a rule add the earlier errors of its codec to each new message.

    e ← β e + message;   the others decode c from encode(e);   e ← e - c

    so that no more than the decayed part (1 - β) e is ever lost. With an exact codec e stays zero, and this is the unwrapped
    rule.

    Args:
        rule: one that sends a pseudo-gradient or a gradient (one tensor) and receives the mean of all.
        decay: β.
    Cost: that of the rule; its state and the unsent error kept (1 P more).
    Source: error feedback, Seide et al., INTERSPEECH 2014, and arXiv 1901.09847; the decay as in arXiv 2508.15706.
    Fails when: a worker leaves: its unsent error is lost.
    Raises: ConfigError for rules that do not receive a mean of gradients, or of steps from a common point: errors of parameters
        do not add up, and `choco` or `anchored` serve such rules. `eager` receives too late to know its errors; `cocktail`,
        `demo` and `sparseloco` already keep theirs.

    >>> error_feedback(diloco(0.7, 0.6), decay=0.95).state_copies
    3
    """
    # Replicas that are equal after each round, and keep its starting point, send only the drift since then.
    steps = rule.averages and rule.identical and (rule.start is not None or rule.site == "gradients")
    if not steps or rule.delay_rounds or rule.feeds_back:
        raise ConfigError(
            f"error feedback needs a rule that averages pseudo-gradients or gradients, and got '{rule.name}'; allowed are rules "
            "such as 'diloco' and 'data_parallel': for compressed gossip use 'choco' on a static graph, or 'anchored_gasloc'"
        )

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(rule.init(x, ctx), torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return decay * s.unsent + rule.send(x, s.inner, ctx)

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        unsent = send(x, s, ctx) - own_decoded
        x, inner = rule.recv(x, s.inner, own_decoded, combined, ctx)
        return x, _State(inner, unsent)

    return around(
        rule,
        init=init,
        send=send,
        recv=recv,
        state_copies=rule.state_copies + 1,
        unsent=lambda s: s.unsent,
    )


@factory
def sparseloco(lr: OverTime[Positive] = 1.0, decay: Share = 0.95) -> Rule:
    """Outer SGD on strongly compressed pseudo-gradients, with decaying error feedback instead of momentum.

    e_i ← β e_i + (θ_start - θ_i);   c_i = decode(encode(e_i));   e_i ← e_i - c_i;   θ ← θ_start - η (1/n) Σ_j c_j

    The compression is the codec's: the authors' is `topk2bit`, in tiles of each matrix. `error_feedback(diloco(...), decay)` is
    the same around an outer Nesterov step, as in MuLoCo (arXiv 2505.23725).

    Args:
        lr: outer learning rate η.
        decay: β of the unsent error; below one, old errors fade.
    Cost: with a lossy codec one payload to everyone, n - 1 per worker and round; start copy and unsent error kept (2 P).
    Source: arXiv 2508.15706.
    Differs: η is applied once, in the outer step (the authors' production code folds it into e). With an exact codec it is
        DiLoCo with outer SGD, whatever β.
    Fails when: a worker leaves: its unsent error is lost.

    >>> sparseloco().single_worker_limit
    OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    """
    return error_feedback(diloco(lr, optimizer="sgd"), decay)
