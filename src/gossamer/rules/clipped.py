"""Messages that are unusually far away: shortened, declined, and their senders quarantined."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.rules.combinations import must_average, ordered_sum
from gossamer.rules.contract import Context, Rule, inside, reset_inside, sends_parameters
from gossamer.settings.options import Count, Given, wrapper
from gossamer.topologies.mixing import Row, pull, widen
from gossamer.tree import Tree, leaves, map_leaves

Factor = Annotated[float, Field(ge=1)]
_FEWEST = 3
"""The number of ratios needed before messages are compared with them."""
_REMEMBERED = 0.9
"""Decay per round of the average of squared drifts; it spans about seven rounds, as the disagreement of workers does."""


class _State(NamedTuple):
    """The state of the wrapped rule and this worker's statistics of messages and senders."""

    inner: Tree
    start: Tree
    """Where the round began, for gossip; absent where the inner state has it."""
    drift: Tensor
    """u², of gossip `[1]`."""
    ratios: Tensor
    """Ratios of the last messages `[window]`, each capped at the largest one allowed; zero where there was none."""
    strikes: Tensor
    """Strikes of each worker `[n]`."""
    counted: Tensor
    """How many messages of each worker were shortened, and how many declined `[2, n]`."""


@wrapper
def clipped(rule: Given[Rule], at: Factor = 1.5, decline: Factor = 2.5, strikes: Count = 2, window: Count = 16) -> Rule:
    """Shortens or declines messages that are unusually far away, and quarantines workers that often send such messages.

    gossip:                a_j = m_j - m_i,  u² ← 0.9 u² + ||m_i - start of the round||²,  what this worker itself has drifted
    a mean over everyone:  a_j = Δ_j,        u = the median of ||Δ_1||, ..., ||Δ_n||
    q_j = ||a_j|| / u;   τ = the median of the last K ratios;   each is kept as min(q_j, c τ)
    q_j > d τ:  declined, and a strike for j;   otherwise one strike less
    a_j ← min(1, c τ / q_j) a_j,   or nothing if it is declined or j has s strikes or more

    The weight of what does not count goes to the worker's own message in gossip, and to the other messages in a mean.
    Strikes are capped at 2 s, so a quarantined worker whose messages are usual again counts again after s + 1 of them.
    Nothing is compared until three ratios are known. The record of the run has how many messages of each worker were
    shortened and declined.

    Args:
        at: c, the ratio above which a message is shortened.
        decline: d, at least c.
        strikes: s.
        window: K.
    Cost: that of the rule, and the start of the round kept where the rule does not (1 P); for a mean a whole message to everyone,
        n - 1 per worker and round, and n models of memory.
    Source: clipped gossip, He et al., arXiv 2202.01545, and centred clipping, Karimireddy et al., arXiv 2012.10333.
    Differs: their τ is given, or needs the honest variance; ours follows a running median, in units of the worker's own drift, so
        that learning rate schedules do not matter. Declining and strikes are ours: clipping alone leaves each bad message the
        length of an honest one, in every round.
    Fails when: half of what a worker receives is bad, or it is bad in the first rounds; a worker comes back from far away, as its
        messages are declined until the median has grown; on a mean, for messages of the usual length that point elsewhere:
        `robust` is for those.
    Raises: ConfigError for rules that neither gossip whole parameters nor average pseudo-gradients or gradients of one round.

    >>> from gossamer.rules.gasloc import gasloc
    >>> clipped(gasloc()).mean_preserving
    False
    """
    if decline < at:
        raise ConfigError(
            f"decline is {decline:g} and at is {at:g}, but a message is shortened before it is declined; set decline >= at"
        )
    gossips, kept = _gossips(rule), rule.start
    keeps_start = gossips and kept is None

    def init(x: Tensor, ctx: Context) -> _State:
        none = x.new_zeros(ctx.n, dtype=torch.float64)
        start = x.clone() if keeps_start else ()
        zeros = none.new_zeros
        return _State(rule.init(x, ctx), start, zeros(1), zeros(window), none, zeros(2, ctx.n))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return rule.send(x, s.inner, ctx)

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: "_Heard", ctx: Context) -> tuple[Tensor, _State]:
        own, others = combined
        lengths = [_length(tree, ctx) for _, _, tree in others]
        if gossips:
            start = s.start if kept is None else kept(s.inner)
            drifted = _length(map_leaves(lambda one: widen(one) - start, own), ctx)
            s = s._replace(drift=_REMEMBERED * s.drift + drifted**2)
            unit = math.sqrt(s.drift.item())
        else:
            unit = median(lengths)
        workers = [j for j, _, _ in others]
        shares, known = _judged(s, workers, lengths, unit, None if gossips else ctx.worker, (at, decline, strikes))
        terms = [(w, share, tree) for (_, w, tree), share in zip(others, shares, strict=True) if share]
        if not gossips:
            whole = sum(w for w, _, _ in terms)
            terms = [(w / whole, share, tree) for w, share, tree in terms] if len(terms) < len(others) else terms
        summed = map_leaves(lambda like, *some: _sum(like, terms, some), own, *(tree for _, _, tree in terms))
        x, inner = rule.recv(x, s.inner, own_decoded, summed, ctx)
        return x, known._replace(inner=inner, start=x if keeps_start else ())

    return rule._replace(
        init=init,
        send=send,
        combine=_from_own if gossips else _from_zero,
        recv=recv,
        mean_preserving=False,
        compiles=False,
        elementwise=False,
        sums_over_shards=rule.elementwise or rule.sums_over_shards,
        state_copies=rule.state_copies + keeps_start,
        reset=reset_inside(rule.reset),
        start=(lambda s: s.start) if keeps_start else inside(kept),
        unsent=inside(rule.unsent),
        norms=inside(rule.norms),
        distrusts=lambda s: s.counted,
    )


def _gossips(rule: Rule) -> bool:
    """Whether messages are parameters rather than updates to be averaged. Raises ConfigError for rules that send neither."""
    # Whole tensors only: a message with some of the coordinates does not show where its sender is.
    whole = rule.combine is pull and rule.needs == "connected" and not rule.delay_rounds and rule.elementwise
    if whole and sends_parameters(rule):
        return True
    try:
        must_average(rule)
    except ConfigError:
        raise ConfigError(
            f"clipping needs a rule that gossips whole parameters or averages pseudo-gradients or gradients of a round, and "
            f"got '{rule.name}'; allowed are rules such as 'gasloc', 'gossip' and 'diloco'"
        ) from None
    return False


class _Heard(NamedTuple):
    """This worker's message; and worker, weight and distance from the centre of each message that is compared."""

    own: Tree
    others: tuple[tuple[int, float, Tree], ...]


def _from_own(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> _Heard:
    """The messages of the peers minus this worker's, as `pull` takes them."""
    less = lambda theirs, mine: widen(theirs) - widen(mine)  # noqa: E731
    return _Heard(own_decoded, tuple((j, w, map_leaves(less, received[j], own_decoded)) for j, w in row if j != i))


def _from_zero(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> _Heard:
    """All messages, as `mean` takes them."""
    each = ((j, w, own_decoded if j == i else received[j]) for j, w in row)
    return _Heard(own_decoded, tuple((j, w, map_leaves(widen, tree)) for j, w, tree in each))


def _length(tree: Tree, ctx: Context) -> float:
    """The Euclidean norm of all tensors together; infinite on overflow."""
    return math.sqrt(ctx.over_shards(sum(ordered_sum(leaf.double().square()) for leaf in leaves(tree))))


def _judged(
    s: _State, workers: list[int], lengths: list[float], unit: float, me: int | None, limits: tuple[float, float, int]
) -> tuple[list[float], _State]:
    """The share of each message that counts, and the next state, whose wrapped state is not updated yet.

    Args: `me` is this worker where its message is among them; all workers must decide alike, so it has no privilege.
    """
    (at, decline, most), before = limits, [ratio for ratio in s.ratios.tolist() if ratio > 0.0]
    strikes, counted, shares, new = s.strikes.tolist(), s.counted.clone(), list[float](), list[float]()
    usual = median(before) if len(before) >= _FEWEST and unit > 0.0 else math.inf
    for j, length in zip(workers, lengths, strict=True):
        ratio = length / unit if unit > 0.0 else 0.0
        is_far = ratio > decline * usual
        strikes[j] = min(strikes[j] + 1.0, 2.0 * most) if is_far else max(strikes[j] - 1.0, 0.0)
        declined = is_far or strikes[j] >= most
        shares.append(0.0 if declined else min(1.0, at * usual / ratio) if ratio > 0.0 else 1.0)
        new.append(min(ratio, at * usual))
        counted[0, j] += 0.0 < shares[-1] < 1.0
        counted[1, j] += declined
    if me is not None and not any(shares):  # an empty mean: take all, shortened
        shares = [min(1.0, at * usual * unit / length) if length > 0.0 else 1.0 for length in lengths]
    kept = [*before, *(ratio for ratio in new if ratio > 0.0)][-s.ratios.numel() :]
    ratios = s.ratios.new_tensor([0.0] * (s.ratios.numel() - len(kept)) + kept)
    return shares, s._replace(ratios=ratios, strikes=s.strikes.new_tensor(strikes), counted=counted)


def _sum(like: Tensor, terms: list[tuple[float, float, Tree]], some: tuple[Tensor, ...]) -> Tensor:
    """Σ w share m, in worker order; bitwise equal to `pull` and `mean` where all messages count fully."""
    summed: Tensor | None = None
    for (w, share, _), one in zip(terms, some, strict=True):
        term = w * one if share == 1.0 else w * (share * one)
        summed = term if summed is None else summed + term
    return widen(like).new_zeros(like.shape) if summed is None else summed
