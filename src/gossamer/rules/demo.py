"""DeMo and DisTrO: momentum stays with each worker, and its largest frequencies are exchanged in every step."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.codecs.dct import coefficients, from_coefficients
from gossamer.rules.combinations import by_worker
from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import Share, factory
from gossamer.topologies.mixing import each
from gossamer.tree import Tree


class _State(NamedTuple):
    """The momentum δ: what was not sent yet."""

    unsent: Tensor


@factory
def demo(decay: Share = 0.999, signs: bool = False) -> Rule:
    """Every worker sends the largest frequencies of its own momentum, which they leave; all step along the sign of their mean.

    δ ← β δ + g;   q = DCT(δ);   q' = what the codec sends of q, zero elsewhere;   δ ← δ - IDCT(q')
    Q = the mean of each coefficient over the workers that sent it;   g ← sign(IDCT(Q)),  then  θ ← Inner(θ, g)

    The DCT is of runs of 64 x 64 elements, so the codec of the paper is `topk` with 32 of 4096, and the inner optimizer SGD
    without momentum. A coefficient of zero is one that was not sent. `inner.clip` shortens g, as in Psyche's code.

    Args:
        decay: β; one forgets nothing that was not sent.
        signs: whether the mean is of the signs of the coefficients, as in DisTrO: what was sent leaves δ whole, in whatever
            precision it was sent.
    Cost: one payload to everyone, n - 1 per worker and inner step, behind a barrier of all, and a transform there and two back;
        the momentum kept (1 P).
    Source: DeMo, arXiv 2411.19870, and the authors' code, bloc97/DeMo; `signs` as in Psyche's code, PsycheFoundation/psyche.
    Differs: runs of the flat vector rather than tiles of each matrix; δ is of gradients, where their code has those times the
        learning rate, so that a schedule does not weigh what is in δ. Psyche moves each worker ahead along the sign of its own
        δ until the others' coefficients come; here all wait.
    Fails when: parameters and gradients are in half precision, where a decay of 0.999 is none; workers run on different
        processors, where a matrix product may differ in the last bit, and with it a sign; or, with `signs`, the codec sends
        many frequencies, of which small ones then count as large ones do.

    >>> demo().feeds_back, demo().site
    (True, 'gradients')
    """

    def init(x: Tensor, ctx: Context) -> _State:
        return _State(torch.zeros_like(x))

    def send(x: Tensor, s: _State, ctx: Context) -> Tree:
        return coefficients(decay * s.unsent + x)

    def recv(
        x: Tensor, s: _State, own_decoded: Tensor, received: tuple[Tensor, ...], ctx: Context
    ) -> tuple[Tensor, _State]:
        delta = decay * s.unsent + x
        sent = torch.where(own_decoded != 0.0, coefficients(delta), 0.0) if signs else own_decoded
        total, senders = torch.zeros_like(own_decoded), torch.zeros_like(own_decoded)
        for one in by_worker(own_decoded, received, ctx):
            total = total + (one.sign() if signs else one)
            senders = senders + (one != 0.0)
        step = from_coefficients(total / senders.clamp(min=1.0), x).sign()
        return step, _State(delta - from_coefficients(sent, x))

    return Rule(
        init,
        send,
        each,
        recv,
        needs="everyone",
        single_worker_limit="outer optimizer",
        site="gradients",
        clips_own=True,
        elementwise=False,
        compiles=False,
        identical=True,
        unsent=lambda s: s.unsent,
        state_copies=1,
    )
