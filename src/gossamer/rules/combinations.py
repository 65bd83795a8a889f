"""Robust combinations of the messages of all workers, bitwise the same on every worker."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.contract import Context, Rule, sends_parameters
from gossamer.tree import Tree

_WEISZFELD_STEPS, _NEAREST = 32, 1e-8
_BLOCK = 1024  # elements summed by one thread, so that the result does not depend on the number of threads


def must_average(rule: Rule) -> None:
    """Raises ConfigError unless a rule receives the mean of all differences or gradients in the round that made them."""
    if not (rule.averages and rule.identical) or rule.delay_rounds or sends_parameters(rule):
        raise ConfigError(
            f"a robust combination needs a rule that averages the pseudo-gradients or gradients of a round, and got '{rule.name}'"
            "; allowed are rules such as 'diloco' and 'data_parallel' (local SGD is 'diloco' with lr = 1 and optimizer = 'sgd')"
        )


def by_worker(own_decoded: Tree, received: Sequence[Tree], ctx: Context) -> list[Tree]:
    """The messages of all workers, this one's included, in worker order: the same list on every worker."""
    place = sum(j < ctx.worker for j in ctx.peers)
    return [*received[:place], own_decoded, *received[place:]]


def trimmed_mean(messages: Sequence[Tensor], faulty: int) -> Tensor:
    """The mean of each coordinate without its largest and smallest values."""
    n = len(messages)
    b = min(faulty, (n - 1) // 2)
    kept = torch.stack([*messages]).sort(0).values[b : n - b].unbind()
    return weighted_sum(kept, [1.0 / len(kept)] * len(kept))


def krum(messages: Sequence[Tensor], faulty: int, best: int) -> Tensor:
    """The mean of the messages that are nearest to others."""
    n = len(messages)
    near = min(max(1, n - faulty - 2), n - 1)
    apart = [
        [ordered_sum((a - b).square()) if i != j else 0.0 for j, b in enumerate(messages)]
        for i, a in enumerate(messages)
    ]
    scores = [sum(sorted(row[:i] + row[i + 1 :])[:near]) for i, row in enumerate(apart)]
    chosen = sorted(sorted(range(n), key=scores.__getitem__)[:best])
    return weighted_sum([messages[i] for i in chosen], [1.0 / len(chosen)] * len(chosen))


def geometric_median(messages: Sequence[Tensor]) -> Tensor:
    """The point with the least sum of distances to all messages."""
    # From the mean, a message that is far away would still count after all steps, by a part of its length.
    y = trimmed_mean(messages, len(messages))
    for _ in range(_WEISZFELD_STEPS):
        # In fp64, where no distance between numbers of fp32 overflows.
        closeness = [1.0 / max(norm(one.double() - y), _NEAREST) for one in messages]
        y = weighted_sum(messages, [c / sum(closeness) for c in closeness])
    return y


def weighted_sum(messages: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """A weighted sum, term by term in order."""
    total = weights[0] * messages[0]
    for w, one in zip(weights[1:], messages[1:], strict=True):
        total = total + w * one
    return total


def ordered_sum(x: Tensor) -> float:
    """The sum of all elements, bitwise independent of the number of threads."""
    while x.numel() > _BLOCK:
        whole = x.numel() // _BLOCK * _BLOCK
        x = torch.cat([x[:whole].view(-1, _BLOCK).sum(1), x[whole:]])
    return float(x.sum())


def norm(x: Tensor, over_shards: Callable[[float], float] = float) -> float:
    """The Euclidean norm, of `ordered_sum`, over the shards of a worker where it has several (`Context.over_shards`)."""
    return over_shards(ordered_sum(x.square())) ** 0.5
