"""A mean direction of all messages, weighted by agreement with earlier means."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rules.combinations import by_worker, must_average, norm, ordered_sum, weighted_sum
from gossamer.rules.contract import Context, Rule, around
from gossamer.settings.options import Decay, Given, Positive, wrapper
from gossamer.topologies.mixing import each, widen
from gossamer.tree import Tree


class _State(NamedTuple):
    """The state of the wrapped rule, the score of each worker `[n]`, and the Δ̄ of the last round."""

    inner: Tree
    scores: Tensor
    last: Tensor


@wrapper
def trusted(rule: Given[Rule], keep: Decay = 0.9, temperature: Positive = 0.1) -> Rule:
    """Gives a rule the mean direction of all messages, weighted by how well each worker agreed with earlier means.

    s_k ← β s_k + (1 - β) cos(Δ_k, Δ̄_prev);   w = softmax(s / τ);   u = Σ_k w_k Δ_k / ||Δ_k||
    Δ̄ = u / ||u|| · (1/n) Σ_k ||Δ_k||,   and the mean of all in round 0

    so that Δ̄ is as long as a message is on average. The scores are part of the outer state, equal on all workers.

    Args:
        keep: β.
        temperature: τ.
    Cost: a whole message to everyone, n - 1 per worker and round, and n models of memory; the last Δ̄ and n numbers kept
        (1 P more).
    Source: RoDiLoCo's public code, which has no results yet; uniform weights are the average of directions of
        `decoupled_diloco` (arXiv 2604.21428).
    Differs: a worker that sends zeros has no direction, and a cosine of zero.
    Fails when: the wrong worker is there in round 0, which is a mean of all, or sends long messages, as Δ̄ is as long as one is on
        average; or the outer learning rate was tuned for a mean, whose norm is smaller. `robust` is for wrong messages.
    Raises: ConfigError for rules that do not average pseudo-gradients or gradients of the same round.

    >>> from gossamer.rules.diloco import diloco
    >>> trusted(diloco()).state_copies
    3
    """
    must_average(rule)

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(rule.init(x, ctx), x.new_zeros(ctx.n), torch.zeros_like(x))

    def recv(
        x: Tensor, s: _State, own_decoded: Tensor, received: tuple[Tensor, ...], ctx: Context
    ) -> tuple[Tensor, _State]:
        messages = [widen(one) for one in by_worker(own_decoded, received, ctx)]
        workers = sorted((ctx.worker, *ctx.peers))
        lengths = [norm(one, ctx.over_shards) for one in messages]
        before, scores = norm(s.last, ctx.over_shards), s.scores.tolist()
        for k, message, length in zip(workers, messages, lengths, strict=True):
            product = ctx.over_shards(ordered_sum(message * s.last))
            scores[k] = keep * scores[k] + (1.0 - keep) * product / max(length * before, 1e-30)
        if ctx.round == 0:
            d = weighted_sum(messages, [1.0 / len(messages)] * len(messages))
        else:
            shares = torch.softmax(
                torch.tensor([scores[k] for k in workers], dtype=torch.float64) / temperature, 0
            ).tolist()
            u = weighted_sum(messages, [w / max(length, 1e-30) for w, length in zip(shares, lengths, strict=True)])
            d = (sum(lengths) / len(lengths) / max(norm(u, ctx.over_shards), 1e-30)) * u
        d = d.to(x.dtype)
        x, inner = rule.recv(x, s.inner, own_decoded, d, ctx)
        return x, _State(inner, s.scores.new_tensor(scores), d)

    return around(
        rule,
        init=init,
        combine=each,
        recv=recv,
        mean_preserving=False,
        compiles=False,
        elementwise=False,
        sums_over_shards=rule.elementwise or rule.sums_over_shards,
        state_copies=rule.state_copies + 1,
    )
