"""Other ways to combine everybody's messages than their mean, for rounds in which some workers send what is wrong."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.contract import Context, Rule, inside, sends_parameters
from gossamer.settings.options import Count, Decay, Given, Positive, wrapper
from gossamer.topologies.mixing import each, widen
from gossamer.tree import Tree, map_leaves

__all__ = ["robust", "trusted"]

_WEISZFELD_STEPS, _NEAREST = 32, 1e-8
_BLOCK = 1024  # elements that one thread sums, so that the bits do not depend on the number of threads


@wrapper
def robust(
    rule: Given[Rule],
    by: Literal["trimmed", "median", "krum", "geometric_median"] = "trimmed",
    faulty: Count = 1,
    best: Count = 1,
) -> Rule:
    """Gives a rule, in place of the mean of all n messages, a combination that a few of them cannot move far.

    trimmed:           in every coordinate, the mean of what is left without the f smallest and the f largest; f < n / 2
    median:            in every coordinate, the median: trimmed with f = ⌈n/2⌉ - 1
    krum:              the mean of the m messages with the least Σ ||Δ_i - Δ_j||² over their n - f - 2 nearest
    geometric_median:  the point with the least Σ_j ||Δ_j - y||, by 32 steps of Weiszfeld's from the mean, distances from 1e-8 on

    An f or m that n workers are too few for is the largest possible one. All workers compute the same from the same messages.

    Args:
        by: which combination.
        faulty: f, how many workers may be wrong; not used by the two medians.
        best: m of "krum"; n is the mean.
    Cost: a whole message to everyone, n - 1 per worker and round, and n models of memory; the state of the rule. Chunk owners
        would halve the bytes, and an owner that is wrong would then decide its chunk alone.
    Source: trimmed mean and median arXiv 1803.01498, Krum Blanchard et al., NeurIPS 2017, geometric median arXiv 1912.13445;
        around an outer step as in RoDiLoCo's public code, which has no results yet.
    Differs: a message that is not finite is not dropped: it ends the run, as everywhere. Several tensors are combined
        one by one.
    Fails when: shards differ so much that honest messages look wrong; on sparse codecs, whose messages are zero at most places,
        as are their medians; and for "krum" where workers run on different processors, as two of them may choose differently.
    Raises: ConfigError for rules that do not average pseudo-gradients or gradients of the same round.

    >>> from gossamer.rules.diloco import diloco
    >>> robust(diloco(), by="krum").averages
    False
    """
    combine: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
        "trimmed": lambda messages: _trimmed(messages, faulty),
        "median": lambda messages: _trimmed(messages, len(messages)),
        "krum": lambda messages: _krum(messages, faulty, best),
        "geometric_median": _geometric_median,
    }
    one = combine[by]
    _must_average(rule)

    def recv(x: Tensor, s: Tree, own_decoded: Tree, received: tuple[Tree, ...], ctx: Context) -> tuple[Tensor, Tree]:
        messages = _by_worker(own_decoded, received, ctx)
        return rule.recv(x, s, own_decoded, map_leaves(lambda *own: _narrow(one, own), *messages), ctx)

    by_coordinate = by in ("trimmed", "median")
    return rule._replace(
        combine=each, recv=recv, mean_preserving=False, compiles=False, elementwise=rule.elementwise and by_coordinate
    )


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
    Fails when: the wrong worker is there in round 0, which is a mean of all; or the outer learning rate was tuned for a mean,
        whose norm is smaller.
    Raises: ConfigError for rules that do not average pseudo-gradients or gradients of the same round.

    >>> from gossamer.rules.diloco import diloco
    >>> trusted(diloco()).state_copies
    3
    """
    _must_average(rule)
    reset = rule.reset

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(rule.init(x, ctx), x.new_zeros(ctx.n), torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return rule.send(x, s.inner, ctx)

    def recv(
        x: Tensor, s: _State, own_decoded: Tensor, received: tuple[Tensor, ...], ctx: Context
    ) -> tuple[Tensor, _State]:
        messages = [widen(one) for one in _by_worker(own_decoded, received, ctx)]
        workers = sorted((ctx.worker, *ctx.peers))
        norms = [_norm(one) for one in messages]
        before, scores = _norm(s.last), s.scores.tolist()
        for k, message, norm in zip(workers, messages, norms, strict=True):
            scores[k] = keep * scores[k] + (1.0 - keep) * _total(message * s.last) / max(norm * before, 1e-30)
        if ctx.round == 0:
            d = _weighted(messages, [1.0 / len(messages)] * len(messages))
        else:
            shares = torch.softmax(
                torch.tensor([scores[k] for k in workers], dtype=torch.float64) / temperature, 0
            ).tolist()
            u = _weighted(messages, [w / max(norm, 1e-30) for w, norm in zip(shares, norms, strict=True)])
            d = (sum(norms) / len(norms) / max(_norm(u), 1e-30)) * u
        d = d.to(x.dtype)
        x, inner = rule.recv(x, s.inner, own_decoded, d, ctx)
        return x, _State(inner, s.scores.new_tensor(scores), d)

    return rule._replace(
        init=init,
        send=send,
        combine=each,
        recv=recv,
        mean_preserving=False,
        compiles=False,
        elementwise=False,
        state_copies=rule.state_copies + 1,
        reset=None if reset is None else lambda x, s: s._replace(inner=reset(x, s.inner)),
        start=inside(rule.start),
        unsent=inside(rule.unsent),
    )


def _must_average(rule: Rule) -> None:
    """Raises ConfigError unless a rule receives the mean of all differences or gradients in the round that made them."""
    if not (rule.averages and rule.identical) or rule.delay_rounds or sends_parameters(rule):
        raise ConfigError(
            f"a robust combination needs a rule that averages the pseudo-gradients or gradients of a round, and got '{rule.name}'"
            "; allowed are rules such as 'diloco' and 'data_parallel' (local SGD is 'diloco' with lr = 1 and optimizer = 'sgd')"
        )


def _by_worker(own_decoded: Tree, received: Sequence[Tree], ctx: Context) -> list[Tree]:
    """The messages of all workers in their order, this one's too: the same list on every worker."""
    own = sum(j < ctx.worker for j in ctx.peers)
    return [*received[:own], own_decoded, *received[own:]]


def _narrow(combine: Callable[[Sequence[Tensor]], Tensor], messages: Sequence[Tensor]) -> Tensor:
    """What is combined, computed in full precision; a message alone is itself."""
    if len(messages) == 1:
        return messages[0]
    return combine([widen(one) for one in messages]).to(messages[0].dtype)


def _trimmed(messages: Sequence[Tensor], faulty: int) -> Tensor:
    """The mean of each coordinate without its largest and smallest values."""
    n = len(messages)
    b = min(faulty, (n - 1) // 2)
    kept = torch.stack([*messages]).sort(0).values[b : n - b].unbind()
    return _weighted(kept, [1.0 / len(kept)] * len(kept))


def _krum(messages: Sequence[Tensor], faulty: int, best: int) -> Tensor:
    """The mean of the messages that are nearest to others."""
    n = len(messages)
    near = min(max(1, n - faulty - 2), n - 1)
    apart = [
        [_total((a - b).square()) if i != j else 0.0 for j, b in enumerate(messages)] for i, a in enumerate(messages)
    ]
    scores = [sum(sorted(row[:i] + row[i + 1 :])[:near]) for i, row in enumerate(apart)]
    chosen = sorted(sorted(range(n), key=scores.__getitem__)[:best])
    return _weighted([messages[i] for i in chosen], [1.0 / len(chosen)] * len(chosen))


def _geometric_median(messages: Sequence[Tensor]) -> Tensor:
    """The point with the least sum of distances to all messages."""
    y = _weighted(messages, [1.0 / len(messages)] * len(messages))
    for _ in range(_WEISZFELD_STEPS):
        closeness = [1.0 / max(_norm(one - y), _NEAREST) for one in messages]
        y = _weighted(messages, [c / sum(closeness) for c in closeness])
    return y


def _weighted(messages: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """A weighted sum, one term after the other."""
    total = weights[0] * messages[0]
    for w, one in zip(weights[1:], messages[1:], strict=True):
        total = total + w * one
    return total


def _total(x: Tensor) -> float:
    """The sum of all elements, with the same bits whatever the number of threads: no sum is split between two."""
    while x.numel() > _BLOCK:
        whole = x.numel() // _BLOCK * _BLOCK
        x = torch.cat([x[:whole].view(-1, _BLOCK).sum(1), x[whole:]])
    return float(x.sum())


def _norm(x: Tensor) -> float:
    return _total(x.square()) ** 0.5
