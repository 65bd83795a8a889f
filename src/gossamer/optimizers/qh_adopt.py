"""QHAdopt: ADOPT whose step is partly a slow momentum, which local steps do not forget, and partly the gradient."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.optimizers.accum_adamw import pieces
from gossamer.optimizers.contract import PerParameter
from gossamer.settings.options import Decay, NotNegative, Portion, Positive, checked


class QHAdopt(PerParameter):
    """ADOPT with quasi-hyperbolic momentum, for workers that average parameters and moments every K steps (MT-DAO).

    v ← g² in the first step, which moves nothing; in step t = 1, 2, ... after it:
    ĝ = g / max(√v, ε), each number between -t^¼ and t^¼;   u ← β₁ u + (1 - β₁) ĝ
    θ ← (1 - lr λ) θ - lr ((1 - ω) ĝ + ω u);   v ← β₂ v + (1 - β₂) g²

    u is slow: after K local steps the part β₁ᴷ of what the workers last agreed on is left, 0.85 of it at β₁ = 0.995 and K = 32,
    where 0.9 leaves 0.03. The gradient term lets the step follow changes at once.

    Args: as in `torch.optim.AdamW`; `slow_weight` is ω.
    Raises: ConfigError for values out of range.
    Cost: the two moments of AdamW (2 P); temporaries of a step stay in the cache.
    Source: MT-DAO, Iacob et al., arXiv 2510.05361, and its base ADOPT, Taniguchi et al., arXiv 2411.02853, algorithm 2.
    Differs: one slow momentum where the paper has any number; the default of ω is ours, as theirs was not readable; a parameter
        without a gradient is skipped, and its step count does not increase.
    Fails when: β₁ is large and ω is 1: the step ignores changes for hundreds of steps. Or the first gradient of a
        parameter is nearly zero: its second step is as long as the bound on ĝ allows. Or the run has few steps beside
        1 / (1 - β₂) = 10,000, so that v still holds most of the squares of its first, large gradients.

    With ω = 1 it is ADOPT, and with ω = 0 ADOPT without momentum.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = QHAdopt([w], lr=0.25, betas=(0.5, 0.5), weight_decay=0.0, slow_weight=0.5)
    >>> for _ in range(2):
    ...     w.grad = torch.tensor([3.0, -0.1])
    ...     optimizer.step()
    >>> w.data                                    # lr (½ ĝ + ½ u) with ĝ = 1 and u = ½
    tensor([ 0.8125, -0.8125])
    """

    @checked
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: NotNegative = 1e-3,
        betas: tuple[Decay, Decay] = (0.995, 0.9999),
        eps: Positive = 1e-6,
        weight_decay: NotNegative = 1e-2,
        *,
        slow_weight: Portion = 0.9,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "slow_weight": slow_weight}
        super().__init__(params, settings)

    def _update(self, theta: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        lr, (beta1, beta2), share = group["lr"], group["betas"], group["slow_weight"]
        if not state:
            state.update(step=torch.zeros(()), **{name: torch.zeros_like(theta) for name in ("exp_avg", "exp_avg_sq")})
        t = int(state["step"])
        state["step"] += 1
        if t == 0:
            state["exp_avg_sq"].copy_(gradient.square())
            return
        for p, g, u, v in pieces(theta, gradient, state["exp_avg"], state["exp_avg_sq"]):
            scaled = (g / v.sqrt().clamp(min=group["eps"])).clamp(-(t**0.25), t**0.25)
            u.mul_(beta1).add_(scaled, alpha=1 - beta1)
            p.mul_(1 - lr * group["weight_decay"])
            p.add_((1 - share) * scaled + share * u, alpha=-lr)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
