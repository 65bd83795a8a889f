"""AccoAdamW: AdamW on gradients of two halves of a batch, of which the first makes an estimate that the second replaces."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.optimizers.accum_adamw import adamw_step, pieces
from gossamer.optimizers.contract import PerParameter
from gossamer.settings.options import Decay, NotNegative, checked


class AccoAdamW(PerParameter):
    """AdamW for gradients that arrive a step late, as with the rule `acco`: every second step replaces the one before.

    estimate, where g̃ came, the gradient at an estimate of θ_t:   θ̃ ← AdamW(θ_t, g̃), whose moments are forgotten
    commit, where g came, the gradient at θ_t:                    θ_{t+1} ← AdamW(θ_t, (g̃ + g) / 2)

    The first call changes nothing, as no gradient has arrived by then. The first two gradients are both taken at θ_0,
    so that there is no warm-up in which they are older than later ones.

    Args: as in `torch.optim.AdamW`.
    Raises: ConfigError for values out of range.
    Cost: AdamW's two moments, the parameters before the estimate and the gradient of the first half (4 P).
    Source: ACCO, Nabli et al., arXiv 2406.02613, algorithm and code.
    Differs: both halves weigh the same; a parameter without a gradient is skipped, and its step count does not increase.
    Fails when: an estimate is far from the step that replaces it, as with half of a small batch: half of all gradients are taken
        there.

    Where both halves have one gradient it is bitwise `torch.optim.AdamW(foreach=False)`.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = AccoAdamW([w], lr=0.25, weight_decay=0.0)
    >>> for g in (0.0, 3.0, -4.0):
    ...     w.grad = torch.full((2,), g)
    ...     optimizer.step()
    ...     print(w.data)
    tensor([ 1., -1.])
    tensor([ 0.7500, -1.2500])
    tensor([ 1.2500, -0.7500])
    """

    @checked
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: NotNegative = 1e-3,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, theta: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        names = ("exp_avg", "exp_avg_sq", "start", "half")
        if not state:
            state.update(step=torch.zeros(()), **{name: torch.zeros_like(theta) for name in names})
        came = int(state["step"])
        state["step"] += 1
        if came == 0:
            return
        k, commits = (came + 1) // 2, came % 2 == 0
        for p, g, m, v, start, half in pieces(theta, gradient, *(state[name] for name in names)):
            if commits:
                p.copy_(start)
                g = (half + g) / 2
            else:
                start.copy_(p)
                half.copy_(g)
            now_m, now_v = adamw_step(p, g, m, v, group, k)
            if commits:
                m.copy_(now_m)
                v.copy_(now_v)
