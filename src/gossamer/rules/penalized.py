"""Pseudo-gradients of unusual length: left out, weighted down and shortened, layer by layer; or their mean alone shortened."""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.layout import layers_of
from gossamer.rules.combinations import by_worker, must_average, ordered_sum, weighted_sum
from gossamer.rules.contract import Context, Rule, around
from gossamer.settings.options import Given, Positive, Share, wrapper
from gossamer.topologies.mixing import each, widen
from gossamer.tree import Tree, map_leaves

Spans = Sequence[tuple[int, int]]


class _Lengths(NamedTuple):
    """Statistics of the norms of each worker's messages, in fp64."""

    rounds: Tensor
    """Rounds in which the worker sent a message `[n]`."""
    mean: Tensor
    """m of each worker and layer `[n, K]`."""
    variance: Tensor
    """v, likewise."""
    scores: Tensor
    """The last z, likewise `[n, K, W]`."""


class _State(NamedTuple):
    """The state of the wrapped rule, the statistics of norms, and the counts for the record of the run."""

    inner: Tree
    lengths: _Lengths
    counted: Tensor
    """Messages of each worker that were shortened (always 0), and layers in which they were left out `[2, n]`."""
    norms: Tensor
    """Norms of the last mean before and after clipping `[2]`."""


@wrapper
def penalized(
    rule: Given[Rule],
    temperature: Positive = 1.0,
    cap: Positive = 10.0,
    threshold: Positive = 3.0,
    window: Annotated[int, Field(ge=2)] = 100,
    decay: Share = 0.02,
) -> Rule:
    """Gives a rule, in each layer, the mean of all pseudo-gradients weighted by how short they are, without unusual ones.

    G_i = ||Δ_i||;   z_i = (G_i - m_i) / √v_i > t max(1, std of the last W z_i):   i is left out, from its round W + 1 on
    δ = G_i - m_i;   m_i ← m_i + α δ;   v_i ← (1 - α) (v_i + α δ (G_i - m_i))
    w_i = exp(-G_i / T) / Σ_j exp(-G_j / T) over the others;   Δ = Σ_i w_i Δ_i;   Δ ← min(1, φ / ||Δ||) Δ

    A layer is what FSDP shards together: the tensors under one number in their names; all that are under none are one layer.
    Where all workers are left out, a layer makes no outer step: it goes back to where the round began, and keeps its momentum.
    `clipped` differs: it compares whole messages with those of the other workers, in units of their median, shortens each one,
    and quarantines; here a worker is compared with its own past, a short message counts more than a long one, and the mean is
    shortened.

    Args:
        temperature: T; large ones weigh all workers alike.
        cap: φ, the largest norm of the mean in a layer.
        threshold: t.
        window: W.
        decay: α, at least 1 / W.
    Cost: a whole message to everyone, n - 1 per worker and round, and n models of memory; n (W + 2) numbers kept per layer; over
        shards n + 1 sums per layer.
    Source: the pseudo-gradient penalty of EDiT, arXiv 2412.07210, and the authors' code, atorch.
    Differs: a norm that is left out does not enter m and v, unless all are: a worker stays out as long as it is unusual, and no
        run stands still for good. In the authors' code it enters with FSDP, and not with DDP.
    Fails when: a worker is unusual from its first round on, as it is compared with itself; T is far below the norms, where the
        shortest message is nearly alone; or norms grow at once, after a jump of the learning rate: some rounds make no step.
    Raises: ConfigError for rules that do not average pseudo-gradients of the same round, element by element, and for a mean of
        norms that still remembers its start at zero after W rounds.

    >>> from gossamer.rules.diloco import diloco
    >>> penalized(diloco(0.7, 0.8)).single_worker_limit
    'outer optimizer'
    """
    must_average(rule)
    start = rule.start
    if start is None or not rule.elementwise:
        raise ConfigError(
            f"the penalty goes back to where a round began, in single layers, and got '{rule.name}'; allowed are elementwise "
            "rules on pseudo-gradients such as 'diloco': around others use 'capped'"
        )
    if window * decay < 1.0:
        raise ConfigError(
            f"decay is {decay:g} and window is {window}, so that after {window} rounds the mean of the norms still is "
            f"{(1 - decay) ** window:.0%} of the zero it starts from; set decay >= {1 / window:.2g}, or a longer window"
        )

    def init(x: Tensor, ctx: Context) -> _State:
        zeros, layers = x.new_zeros(0, dtype=torch.float64).new_zeros, len(layers_of(ctx.layout))
        lengths = _Lengths(zeros(ctx.n), zeros(ctx.n, layers), zeros(ctx.n, layers), zeros(ctx.n, layers, window))
        return _State(rule.init(x, ctx), lengths, zeros(2, ctx.n), zeros(2))

    def recv(
        x: Tensor, s: _State, own_decoded: Tensor, received: tuple[Tensor, ...], ctx: Context
    ) -> tuple[Tensor, _State]:
        messages = [widen(one) for one in by_worker(own_decoded, received, ctx)]
        workers = sorted((ctx.worker, *ctx.peers))
        layers = layers_of(ctx.layout)
        norms = s.norms.new_tensor([[_length(one, spans, ctx) for spans in layers] for one in messages])
        out, lengths = _judged(s.lengths, workers, norms, threshold, window, decay)
        counted = s.counted.clone()
        counted[1, workers] += out.any(1).to(counted.dtype)
        shares = torch.softmax((-norms / temperature).masked_fill(out, -math.inf), 0)
        d, stays = _mean_by_layer(messages, layers, shares, out.all(0))
        capped = _shorten(d, layers, cap, ctx)
        moved, inner = rule.recv(x, s.inner, own_decoded, d.to(x.dtype), ctx)
        if stays.any():
            moved = torch.where(stays, start(s.inner), moved)
            inner = map_leaves(lambda old, new: torch.where(stays, old, new), s.inner, inner)
        return moved, _State(inner, lengths, counted, s.norms.new_tensor(capped))

    return around(
        rule,
        init=init,
        combine=each,
        recv=recv,
        single_worker_limit="outer optimizer",
        mean_preserving=False,
        compiles=False,
        elementwise=False,
        sums_over_shards=True,
        by_layer=True,
        distrusts=lambda s: s.counted,
        norms=lambda s: s.norms,
    )


def _mean_by_layer(
    messages: Sequence[Tensor], layers: Sequence[Spans], shares: Tensor, nobody: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean weighted by the shares `[workers, K]`, and which elements are in layers of nobody `[K]`, where it is zero."""
    d, stays = torch.zeros_like(messages[0]), torch.zeros_like(messages[0], dtype=torch.bool)
    for spans, own, none in zip(layers, shares.T.tolist(), nobody.tolist(), strict=True):
        for a, b in spans:
            stays[a:b] = none
            if not none:
                d[a:b] = weighted_sum([one[a:b] for one in messages], own)
    return d, stays


def _length(x: Tensor, spans: Spans, ctx: Context) -> float:
    """The Euclidean norm of a layer."""
    return math.sqrt(ctx.over_shards(sum(ordered_sum(x[a:b].double().square()) for a, b in spans)))


def _shorten(d: Tensor, layers: Sequence[Spans], cap: float, ctx: Context) -> tuple[float, float]:
    """Shortens each layer in place to a norm of at most `cap`; returns the norm of all layers before and after."""
    lengths = [_length(d, spans, ctx) for spans in layers]
    for spans, length in zip(layers, lengths, strict=True):
        for a, b in spans if length > cap else ():
            d[a:b] = cap / length * d[a:b]
    return math.hypot(*lengths), math.hypot(*(min(length, cap) for length in lengths))


def _judged(
    seen: _Lengths, workers: list[int], norms: Tensor, threshold: float, window: int, decay: float
) -> tuple[Tensor, _Lengths]:
    """Which messages are left out in which layers `[workers, K]`, and the updated statistics of norms."""
    rounds, mean, variance, scores = (one[workers] for one in seen)
    rounds = rounds[:, None]
    far = _score(norms, mean, variance) > threshold * scores.std(-1).clamp(min=1.0)
    out = far & (rounds >= window)
    learns = ~out | out.all(0)
    new_mean = mean + decay * (norms - mean)
    new_variance = (1.0 - decay) * (variance + decay * (norms - mean) * (norms - new_mean))
    score = torch.where(rounds + 1 >= window, _score(norms, new_mean, new_variance), 0.0)
    new = _Lengths(
        rounds[:, 0] + 1,
        torch.where(learns, new_mean, mean),
        torch.where(learns, new_variance, variance),
        torch.where(learns[..., None], torch.cat([scores[..., 1:], score[..., None]], -1), scores),
    )
    kept = [old.clone() for old in seen]
    for old, updated in zip(kept, new, strict=True):
        old[workers] = updated
    return out, _Lengths(*kept)


def _score(norms: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """z; zero where nothing has varied yet."""
    return torch.where(variance > 0.0, (norms - mean) / variance.sqrt(), 0.0)


class _CappedState(NamedTuple):
    """The state of the wrapped rule, and the norm of the last mean before and after it was shortened `[2]`."""

    inner: Tree
    norms: Tensor


@wrapper
def capped(rule: Given[Rule], norm: Positive = 10.0) -> Rule:
    """Gives a rule the mean of all messages no longer than a given norm.

    Δ ← min(1, φ / ||Δ||) Δ,   of the mean of a fragment, or of the whole model where there are no fragments

    On gradients it clips the mean gradient, as `inner.clip` does, and metrics have both norms.

    Args:
        norm: φ.
    Cost: that of the rule: the mean may be taken by chunk owners; over shards one sum.
    Source: the last part of EDiT's penalty, arXiv 2412.07210; on gradients, clipping as in arXiv 1211.5063.
    Fails when: φ is below the usual norm of the mean, so that its length says nothing any more; steps shrink during training, and
        with them what a fixed φ protects from.
    Raises: ConfigError for rules that do not average pseudo-gradients or gradients of the same round.

    >>> from gossamer.rules.diloco import diloco
    >>> capped(diloco()).averages
    True
    """
    must_average(rule)

    def init(x: Tensor, ctx: Context) -> _CappedState:
        return _CappedState(rule.init(x, ctx), x.new_zeros(2, dtype=torch.float64))

    def recv(
        x: Tensor, s: _CappedState, own_decoded: Tensor, combined: Tensor, ctx: Context
    ) -> tuple[Tensor, _CappedState]:
        length = _length(combined, ((0, combined.numel()),), ctx)
        shorter = norm / length * combined if length > norm else combined
        x, inner = rule.recv(x, s.inner, own_decoded, shorter, ctx)
        return x, _CappedState(inner, s.norms.new_tensor([length, min(length, norm)]))

    return around(
        rule,
        init=init,
        recv=recv,
        single_worker_limit="outer optimizer",
        compiles=False,
        elementwise=False,
        sums_over_shards=rule.elementwise or rule.sums_over_shards,
        norms=lambda s: s.norms,
    )
