"""Robust alternatives to the mean of all messages, for rounds in which some workers send wrong ones."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from gossamer.rules.combinations import by_worker, geometric_median, krum, must_average, trimmed_mean
from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import Count, Given, wrapper
from gossamer.topologies.mixing import each, widen
from gossamer.tree import Tree, map_leaves


@wrapper
def robust(
    rule: Given[Rule],
    by: Literal["trimmed", "median", "krum", "geometric_median"] = "trimmed",
    faulty: Count = 1,
    best: Count = 1,
) -> Rule:
    """Replaces the mean of all n messages by a combination that a few of them cannot move far.

    trimmed:           in every coordinate, the mean of what is left without the f smallest and the f largest; f < n / 2
    median:            in every coordinate, the median: trimmed with f = ⌈n/2⌉ - 1
    krum:              the mean of the m messages with the least Σ ||Δ_i - Δ_j||² over their n - f - 2 nearest
    geometric_median:  the point with the least Σ_j ||Δ_j - y||, by 32 steps of Weiszfeld's from the median, distances >= 1e-8

    An f or m that is too large for n workers is lowered to the largest possible. All workers compute the same from the
    same messages.

    Args:
        by: which combination.
        faulty: f, how many workers may be wrong; not used by the two medians.
        best: m of "krum"; n is the mean.
    Cost: a whole message to everyone, n - 1 per worker and round, and n models of memory; the state of the rule. Chunk owners
        would halve the bytes, and an owner that is wrong would then decide its chunk alone.
    Source: trimmed mean and median arXiv 1803.01498, Krum Blanchard et al., NeurIPS 2017, geometric median arXiv 1912.13445;
        around an outer step as in RoDiLoCo's public code, which has no results yet.
    Differs: a message that is not finite counts for nothing, as everywhere. Several tensors are
        combined one by one.
    Fails when: shards differ so much that honest messages look wrong; on sparse codecs, whose messages are zero at most places,
        as are their medians; and for "krum" where workers run on different processors, as two of them may choose differently.
    Raises: ConfigError for rules that do not average pseudo-gradients or gradients of the same round.

    >>> from gossamer.rules.diloco import diloco
    >>> robust(diloco(), by="krum").averages
    False
    """
    combine: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
        "trimmed": lambda messages: trimmed_mean(messages, faulty),
        "median": lambda messages: trimmed_mean(messages, len(messages)),
        "krum": lambda messages: krum(messages, faulty, best),
        "geometric_median": geometric_median,
    }
    one = combine[by]
    must_average(rule)

    def recv(x: Tensor, s: Tree, own_decoded: Tree, received: tuple[Tree, ...], ctx: Context) -> tuple[Tensor, Tree]:
        messages = by_worker(own_decoded, received, ctx)
        return rule.recv(x, s, own_decoded, map_leaves(lambda *own: _narrow(one, own), *messages), ctx)

    by_coordinate = by in ("trimmed", "median")
    return rule._replace(
        combine=each,
        recv=recv,
        mean_preserving=False,
        compiles=False,
        elementwise=rule.elementwise and by_coordinate,
        sums_over_shards=rule.sums_over_shards and by_coordinate,
    )


def _narrow(combine: Callable[[Sequence[Tensor]], Tensor], messages: Sequence[Tensor]) -> Tensor:
    """The combination, computed in full precision; a single message is returned as it is."""
    if len(messages) == 1:
        return messages[0]
    return combine([widen(one) for one in messages]).to(messages[0].dtype)
