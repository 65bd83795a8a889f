"""Asynchronous DiLoCo with delayed Nesterov: every arrival moves the server, only every N-th updates its momentum."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous.contract import PushInfo, ServerRule
from gossamer.errors import ConfigError
from gossamer.settings.options import Count, Decay, NotNegative, Positive, factory


class _State(NamedTuple):
    """The model, the momentum, the sum of pseudo-gradients since its last update, and the number of arrivals in all."""

    x: Tensor
    m: Tensor
    acc: Tensor
    arrivals: Tensor


@factory
def delayed_nesterov(
    lr: Positive = 0.7, momentum: Decay = 0.9, delay: Count = 4, spread: NotNegative = 0.0
) -> ServerRule:
    """The server steps on each pseudo-gradient at once, and updates its momentum with the mean of N of them.

    acc ← acc + Δ;  at every N-th arrival  m ← β m + acc / N,  acc ← 0,  θ ← θ - ε ((1 - c N + c) β m + Δ / N)
    otherwise                              θ ← θ - ε (c β m + Δ / N)

    Args:
        lr: outer learning rate ε.
        momentum: β.
        delay: N, arrivals between two updates of the momentum; the number of workers is a good start.
        spread: c in [0, 1/N]; 0 lets the momentum act at every N-th arrival only, 1/N in equal parts at each.
    Cost: a push and a fetch of one model per local phase; model, m and acc kept at the server (3 P).
    Source: Liu et al., arXiv 2401.09135.
    Differs: arrivals are absorbed one by one; the authors' toy code batches those within half a second.
    Fails when: workers differ much in speed and take the same number of steps: the messages of the slow ones are stale, which
        `dylu_steps` avoids; N = 1, plain Nesterov on arrivals, is clearly worse than N = workers (same source).

    >>> delayed_nesterov().state_copies
    3
    """
    if spread > 1 / delay:
        raise ConfigError(
            f"server 'delayed_nesterov' got spread = {spread!r} for delay = {delay}; allowed are numbers from 0 to 1/delay: "
            "choose one of them"
        )
    eps, beta, n, c = lr, momentum, delay, spread

    def init(x: Tensor) -> _State:
        return _State(x.clone(), torch.zeros_like(x), torch.zeros_like(x), torch.tensor(0))

    def greet(s: _State) -> Tensor:
        return s.x

    def absorb(s: _State, message: Tensor, arrival: PushInfo) -> _State:
        arrivals, acc = s.arrivals + 1, s.acc + message
        if int(arrivals) % n == 0:
            m = beta * s.m + acc / n
            return _State(s.x - eps * ((1 - c * n + c) * beta * m + message / n), m, torch.zeros_like(acc), arrivals)
        return _State(s.x - eps * (c * beta * s.m + message / n), s.m, acc, arrivals)

    return ServerRule(init, greet, absorb, state_copies=3)


def dylu_steps(step_s: Sequence[float], local_steps: int) -> tuple[int, ...]:
    """Dynamic local updates: inner steps per worker, `H_w = ⌊v_w / v_max · H⌋`, so that all return at about the same time.

    Args:
        step_s: seconds of one inner step of each worker; its speed is v_w = 1 / step_s.
        local_steps: H, the steps of the fastest worker.
    Returns: at least one step for everybody.
    Source: arXiv 2401.09135.

    >>> dylu_steps([1.0, 2.0, 3.0], 30)
    (30, 15, 10)
    """
    fastest = min(step_s)
    # A ratio such as 0.1 / 0.3 · 30 rounds to just below the whole number that it equals.
    return tuple(max(1, math.floor(fastest / seconds * local_steps + 1e-9)) for seconds in step_s)
