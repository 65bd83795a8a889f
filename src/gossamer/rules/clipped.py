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
from gossamer.rules.contract import Context, Rule, around, sends_parameters
from gossamer.settings.options import Count, Given, wrapper
from gossamer.topologies.mixing import Row, pull, widen
from gossamer.tree import Tree, leaves, map_leaves

Factor = Annotated[float, Field(ge=1)]
_FEWEST = 3
"""The number of ratios needed before messages are compared with them."""
_REMEMBERED = 0.9
"""Decay per round of the averages of squared drifts and of the worker's own messages; they span about seven rounds."""
_BEHIND = 0.5
"""The part of the way back to the worker's average past message above which a far message is an old one."""


class _State(NamedTuple):
    """The state of the wrapped rule and this worker's statistics of messages and senders."""

    inner: Tree
    start: Tree
    """Where the round began, for gossip; absent where the inner state has it."""
    past: Tree
    """The average of its past messages, for gossip."""
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
                           v = m_i - p,  b_j = -<a_j, v> / ||v||²,  p ← p + 0.1 v,  the average of its past messages
    a mean over everyone:  a_j = Δ_j,        u = the median of ||Δ_1||, ..., ||Δ_n||,   b_j = 0
    q_j = ||a_j|| / u;   τ = the median of the last K ratios;   each is kept as min(q_j, c τ)
    q_j > d τ,  or q_j > c τ and b_j > 0.5:  declined, and a strike for j;   otherwise one strike less
    a_j ← min(1, c τ / q_j) a_j,   or nothing if it is declined or j has s strikes or more

    The weight of what does not count goes to the worker's own message in gossip, and to the other messages in a mean.
    A far message with b_j > 0.5 leads back more than half of the way to where this worker was on average in the last ten rounds:
    it is an old one, sent late or again.
    Strikes are capped at 2 s, so a quarantined worker whose messages are usual again counts again after s + 1 of them.
    Nothing is compared until three ratios are known. The record of the run has how many messages of each worker were
    shortened and declined.

    Args:
        at: c, the ratio above which a message is shortened.
        decline: d, at least c.
        strikes: s.
        window: K.
    Cost: that of the rule, in gossip p (1 P) and the start of the round where the rule does not keep it (1 P); for a mean a whole
        message to everyone, n - 1 per worker and round, and n models of memory.
    Source: clipped gossip, He et al., arXiv 2202.01545, and centred clipping, Karimireddy et al., arXiv 2012.10333.
    Differs: their τ is given, or needs the honest variance; ours follows a running median, in units of the worker's own drift, so
        that learning rate schedules do not matter. Declining, b_j and strikes are ours: clipping alone leaves each bad message
        the length of an honest one, in every round.
    Fails when: half of what a worker receives is bad, or it is bad in the first rounds; a worker comes back from far away, as its
        messages are declined until the median has grown, or from far behind, as they are declined until it has caught up by what
        it receives; on a mean, for messages of the usual length that point elsewhere: `robust` is for those.
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
        start, past = (x.clone() if one else () for one in (keeps_start, gossips))
        zeros = none.new_zeros
        return _State(rule.init(x, ctx), start, past, zeros(1), zeros(window), none, zeros(2, ctx.n))

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: "_Messages", ctx: Context) -> tuple[Tensor, _State]:
        own, others = combined
        lengths = [_length(tree, ctx) for _, _, tree in others]
        if gossips:
            start = s.start if kept is None else kept(s.inner)
            drifted = _length(map_leaves(lambda one: widen(one) - start, own), ctx)
            way = map_leaves(lambda one: widen(one) - widen(s.past), own)
            behind = [_projection(tree, way, ctx) for _, _, tree in others]
            past = map_leaves(lambda one: (s.past + (1 - _REMEMBERED) * one).to(x.dtype), way)
            s = s._replace(drift=_REMEMBERED * s.drift + drifted**2, past=past)
            unit = math.sqrt(s.drift.item())
        else:
            unit, behind = median(lengths), [0.0] * len(lengths)
        seen = list(zip([j for j, _, _ in others], lengths, behind, strict=True))
        shares, known = _judged(s, seen, unit, None if gossips else ctx.worker, (at, decline, strikes))
        terms = [(w, share, tree) for (_, w, tree), share in zip(others, shares, strict=True) if share]
        if not gossips:
            whole = sum(w for w, _, _ in terms)
            terms = [(w / whole, share, tree) for w, share, tree in terms] if len(terms) < len(others) else terms
        summed = map_leaves(lambda like, *some: _sum(like, terms, some), own, *(tree for _, _, tree in terms))
        x, inner = rule.recv(x, s.inner, own_decoded, summed, ctx)
        return x, known._replace(inner=inner, start=x if keeps_start else ())

    made = around(
        rule,
        init=init,
        combine=_from_own if gossips else _from_zero,
        recv=recv,
        mean_preserving=False,
        compiles=False,
        elementwise=False,
        sums_over_shards=rule.elementwise or rule.sums_over_shards,
        state_copies=rule.state_copies + keeps_start + gossips,
        distrusts=lambda s: s.counted,
    )
    return made._replace(start=lambda s: s.start) if keeps_start else made


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


class _Messages(NamedTuple):
    """This worker's message; and worker, weight and distance from the centre of each message that is compared."""

    own: Tree
    others: tuple[tuple[int, float, Tree], ...]


def _from_own(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> _Messages:
    """The messages of the peers minus this worker's, as `pull` takes them."""
    less = lambda message, own: widen(message) - widen(own)  # noqa: E731
    return _Messages(own_decoded, tuple((j, w, map_leaves(less, received[j], own_decoded)) for j, w in row if j != i))


def _from_zero(own_decoded: Tree, received: Mapping[int, Tree], i: int, row: Row) -> _Messages:
    """All messages, as `mean` takes them."""
    each = ((j, w, own_decoded if j == i else received[j]) for j, w in row)
    return _Messages(own_decoded, tuple((j, w, map_leaves(widen, tree)) for j, w, tree in each))


def _length(tree: Tree, ctx: Context) -> float:
    """The Euclidean norm of all tensors together; infinite on overflow."""
    return math.sqrt(ctx.over_shards(sum(ordered_sum(leaf.double().square()) for leaf in leaves(tree))))


def _projection(tree: Tree, way: Tree, ctx: Context) -> float:
    """How far a distance from this worker's message leads back along its own way, as a part of it."""
    pairs = list(zip(leaves(tree), leaves(way), strict=True))
    product, square = (
        ctx.over_shards(sum(ordered_sum(a.double() * b.double()) for a, b in some))
        for some in (pairs, [(b, b) for _, b in pairs])
    )
    return -product / square if square > 0.0 else 0.0


def _judged(
    s: _State, seen: list[tuple[int, float, float]], unit: float, me: int | None, limits: tuple[float, float, int]
) -> tuple[list[float], _State]:
    """The share of each message that counts, and the next state, whose wrapped state is not updated yet.

    Args:
        seen: the sender of each message, its distance, and which part of this worker's own way leads back to it.
        me: this worker where its message is among them; all workers must decide alike, so it has no privilege.
    """
    (at, decline, most), before = limits, [ratio for ratio in s.ratios.tolist() if ratio > 0.0]
    strikes, counted, shares, new = s.strikes.tolist(), s.counted.clone(), list[float](), list[float]()
    usual = median(before) if len(before) >= _FEWEST and unit > 0.0 else math.inf
    for j, length, back in seen:
        ratio = length / unit if unit > 0.0 else 0.0
        is_old = back > _BEHIND and ratio > at * usual
        is_far = ratio > decline * usual or is_old
        strikes[j] = min(strikes[j] + 1.0, 2.0 * most) if is_far else max(strikes[j] - 1.0, 0.0)
        declined = is_far or strikes[j] >= most
        shares.append(0.0 if declined else min(1.0, at * usual / ratio) if ratio > 0.0 else 1.0)
        new.append(min(ratio, at * usual))
        counted[0, j] += 0.0 < shares[-1] < 1.0
        counted[1, j] += declined
    if me is not None and not any(shares):  # an empty mean: take all, shortened
        shares = [min(1.0, at * usual * unit / length) if length > 0.0 else 1.0 for _, length, _ in seen]
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
