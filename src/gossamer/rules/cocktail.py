"""CocktailSGD: workers send their compressed distance from a shared copy, and the sum is compressed a second time."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs import CodecSpec, codec_of, fitted
from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import factory
from gossamer.topologies.mixing import mean
from gossamer.tree import Tree


class _State(NamedTuple):
    """The shared copy c, and the accumulated error of the second compression: both bitwise the same on all workers."""

    shared: Tensor
    dropped: Tensor


@factory
def cocktail(back: CodecSpec = "int4") -> Rule:
    """Compresses both ways around a shared copy; the part of a drift that is not sent stays in the worker's parameters.

    q_i = C1(θ_i - c);   θ_i ← θ_i - q_i;   s = (1/n) Σ_j q_j + e;   Q = C2(s);   e ← s - Q;   θ_i ← θ_i + Q;   c ← c + Q

    C1 is the codec of the run, `cocktail` in the paper. There is no server: all receive every q_j and compute the same s and Q.

    Args:
        back: C2, a codec by its name, or with its options as in `{name = "topk", k = 512}`; it draws alike on all workers.
    Cost: with a lossy codec one payload to everyone, n - 1 per worker and round; shared copy and error of C2 kept (2 P).
    Source: CocktailSGD, Wang et al., ICML 2023 (PMLR 202), and the authors' code; not on arXiv.
    Differs: every worker acts as the server, where in the paper each one serves an n-th of the model: n - 1 payloads are sent
        instead of 2 (n-1)/n, e is kept n times, and C2 saves no bytes but affects training as in the paper. C2 sees all elements;
        the paper's takes the top 20 % of those that all workers draw in this round, for which `{name = "cocktail", one_in = 1}`
        comes closest, while "cocktail" would draw a second time. Nothing is delayed by a step to hide the exchange.
    Fails when: the local phase is long and few elements are sent: the workers differ by everything not sent yet.

    >>> cocktail(back="exact").mean_preserving, cocktail().mean_preserving
    (True, False)
    """
    c2 = codec_of(back)

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(x.clone(), torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return x - s.shared

    def recv(x: Tensor, s: _State, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, _State]:
        total = combined + s.dropped
        quantizer = fitted(c2, ctx.layout)
        q = quantizer.decode(quantizer.encode(total, rng.key(0, "cocktail", ctx.round)), total)
        shared = s.shared + q
        # θ - q_i + Q, computed relative to c: with an exact C1 the difference is zero, and all workers are bitwise at c.
        return shared + (send(x, s, ctx) - own_decoded), _State(shared, total - q)

    return Rule(
        init,
        send,
        mean,
        recv,
        needs="everyone",
        single_worker_limit="inner" if c2.exact else "outer optimizer",
        elementwise=c2.exact,
        mean_preserving=c2.exact,
        state_copies=2,
    )
