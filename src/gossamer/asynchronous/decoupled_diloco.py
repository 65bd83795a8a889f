"""Decoupled DiLoCo: a syncer that waits for a quorum of learners, merges their messages, and takes one outer step."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous.contract import PushInfo, ServerRule, Slack, Window
from gossamer.settings.options import Count, Decay, NotNegative, Positive, Share, factory

CANCELLED = 1e-6  # a mean of unit vectors this short has no direction, only rounding


class _State(NamedTuple):
    """The model and the outer momentum."""

    x: Tensor
    b: Tensor


def token_weight(tokens: int, local_steps: int) -> float:
    """The weight of a learner: `tokens · (tokens / steps)`, its work times its batch.

    >>> token_weight(100, 10)
    1000.0
    """
    return tokens * (tokens / local_steps)


def weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`Σ_m (w_m / Σ w) v_m`, summed in the order given."""
    whole = math.fsum(weights)
    total = (weights[0] / whole) * vectors[0]
    for w, v in zip(weights[1:], vectors[1:], strict=True):
        total = total + (w / whole) * v
    return total


def radial_mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of the lengths in the direction of the mean of the directions (radial-directional averaging, RDA).

    R = Σ w ‖v‖ / Σ w;  u = Σ w φ(v) / Σ w;  result R φ(u), with φ(v) = v / ‖v‖ and φ(0) = 0

    Where the directions cancel, so that u has none, it is the plain weighted mean.
    """
    norms = [float(v.norm()) for v in vectors]
    directions = [v / norm if norm > 0 else v for v, norm in zip(vectors, norms, strict=True)]
    u = weighted_mean(directions, weights)
    length = float(u.norm())
    if length < CANCELLED:
        return weighted_mean(vectors, weights)
    radius = math.fsum(w * norm for w, norm in zip(weights, norms, strict=True)) / math.fsum(weights)
    return radius * (u / length)


def slack_s(overlap_steps: int, step_s: float, quorum_s: float, sync_s: float, share: float = 1.0) -> float:
    """Seconds a syncer may wait beyond its quorum for free: `γ (τ ξ_step - (ξ_quorum + ξ_sync))`, never below 0.

    Args:
        overlap_steps: τ, inner steps that learners take while a synchronisation is in flight; step_s is the time of one.
        quorum_s: seconds until the quorum was reached. sync_s: seconds of the exchange itself.
        share: γ, the part of the slack to use.

    >>> slack_s(2, 1.0, 0.5, 0.5), slack_s(2, 1.0, 3.0, 0.5)
    (1.0, 0.0)
    """
    return max(0.0, share * (overlap_steps * step_s - (quorum_s + sync_s)))


@factory
def decoupled_diloco(
    lr: Positive = 0.7,
    momentum: Decay = 0.9,
    quorum: Count = 1,
    grace_s: NotNegative | Literal["adaptive"] = "adaptive",
    share: Share = 0.9,
    merging: Literal["radial", "average"] = "radial",
    averaged: Sequence[str] = ("embed",),
) -> ServerRule:
    """Learners run on their own clocks; the messages that arrive until a quorum is reached and a grace period ends form a round.

    w_m = tokens_m · (tokens_m / steps_m);  Δ = merge_m(w_m, Δ_m) for each tensor;  b ← μ b + Δ;  θ ← θ - η (Δ + μ b)

    Args:
        lr: outer learning rate η.
        momentum: outer Nesterov momentum μ, in the dialect of `torch.optim.SGD`.
        quorum: K, learners that a round needs; with fewer present, all of them.
        grace_s: seconds to wait for more of them once the quorum is reached; "adaptive" waits as long as it costs no worker time,
            γ (τ ξ_step - (ξ_quorum + ξ_sync)) of `slack_s`, which is none for workers that do not train while they wait.
        share: γ, the part of the slack that "adaptive" uses; the rest is for phases that end early.
        merging: "radial" takes `radial_mean` of each tensor, "average" `weighted_mean`.
        averaged: tensors with one of these words in their name are averaged in any case (the authors' embeddings are).
    Cost: a push and a fetch of each fragment per H steps of a learner; model and momentum kept at the syncer (2 P).
    Source: arXiv 2604.21428.
    Differs: the paper does not state outer η and μ; these are DiLoCo's. Each learner's Δ is measured from its own starting
        point, also when it arrives a round late. τ is a local phase, at whose end a worker takes in the reply; the paper does
        not state γ. Real processes wait for the reply, so there the adaptive grace is zero.
    Fails when: K = 1 without grace and unequal learners: a fast one makes most rounds on its own.

    >>> decoupled_diloco(quorum=4).window.quorum
    4
    """
    eta, mu = lr, momentum

    def grace(slack: Slack, waited_s: float) -> float:
        if grace_s == "adaptive":
            return slack_s(slack.overlap_steps, slack.step_s, waited_s, slack.sync_s, share)
        return grace_s

    def merge(messages: Sequence[Tensor], arrivals: Sequence[PushInfo]) -> Tensor:
        weights = [token_weight(arrival.tokens, arrival.local_steps) for arrival in arrivals]
        if merging == "average":
            return weighted_mean(messages, weights)
        parts = []
        for leaf in arrivals[0].layout.leaves:
            mean = weighted_mean if any(word in leaf.name for word in averaged) else radial_mean
            parts.append(mean([message[leaf.start : leaf.stop] for message in messages], weights))
        return torch.cat(parts)

    def init(x: Tensor) -> _State:
        return _State(x.clone(), torch.zeros_like(x))

    def greet(s: _State) -> Tensor:
        return s.x

    def absorb(s: _State, message: Tensor, arrival: PushInfo) -> _State:
        b = mu * s.b + message
        return _State(s.x - eta * (message + mu * b), b)

    return ServerRule(
        init, greet, absorb, window=Window(quorum, grace, merge), elementwise=merging == "average", state_copies=2
    )
