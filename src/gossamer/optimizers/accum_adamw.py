"""AccumAdamW: AdamW whose moments see the mean gradient of several steps."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.optimizers.contract import PerParameter
from gossamer.settings.options import Count, Decay, NotNegative, checked

PIECE = 1 << 15  # elements of one thread; torch gives a thread no fewer


def pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Views of the same elements of tensors of one shape, piece by piece.

    The whole tensors on a GPU, where each piece would be another kernel to start, and where their memory is not in one run.

    >>> sum(a.numel() for a, b in pieces(torch.ones(2, 20_000), torch.ones(2, 20_000)))
    40000
    """
    if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors):
        return zip(*(t.view(-1).split(PIECE * torch.get_num_threads()) for t in tensors), strict=True)
    return [tensors]


def adamw_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], k: int) -> tuple[Tensor, Tensor]:
    """Moves a parameter by the k-th step of AdamW; returns the moments after it, and leaves those that were given as they are.

    The operations are those of torch's Adam: bitwise equal to `torch.optim.AdamW(foreach=False)`.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    now_m = torch.lerp(m, g, 1 - beta1)
    now_v = v.mul(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (now_v.sqrt() / (1 - beta2**k) ** 0.5).add_(group["eps"])
    p.mul_(1 - lr * group["weight_decay"])
    p.addcdiv_(now_m, denominator, value=-lr / (1 - beta1**k))
    return now_m, now_v


class AccumAdamW(PerParameter):
    """AdamW for workers that average often: it steps with every gradient g, and its moments keep means over s gradients only.

    In every step t, with k = ⌈t / s⌉ and moments m', v' for this step alone:
    m' = β₁ m + (1 - β₁) g;   v' = β₂ v + (1 - β₂) g²
    θ ← (1 - lr λ) θ - lr m̂ / (√v̂ + ε)   with m̂ = m' / (1 - β₁ᵏ) and v̂ = v' / (1 - β₂ᵏ);   b ← b + g / s
    and in every s-th step:   m ← β₁ m + (1 - β₁) b;   v ← β₂ v + (1 - β₂) b²;   b ← 0

    The mean of s gradients has 1/s of their variance, like the mean over s workers; so v is like that of data parallelism.

    Args: as in `torch.optim.AdamW`; `moments_every` is s.
    Raises: ConfigError for values out of range.
    Cost: AdamW's two moments and the sum b (3 P); temporaries of a step stay in the cache.
    Source: Wang et al., arXiv 2410.11998; the bias correction by ⌈t / s⌉ and ε outside the root are those of the authors' code.
    Differs: a parameter without a gradient is skipped, and its step count does not increase.
    Fails when: the moments must follow a fast change, as β₁ and β₂ decay per window of s steps: they average s times as many.

    With s = 1 it is bitwise `torch.optim.AdamW(foreach=False)`.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = AccumAdamW([w], lr=0.25, weight_decay=0.0, moments_every=2)
    >>> w.grad = torch.tensor([3.0, -0.1])
    >>> optimizer.step(); w.data                         # the first step of Adam has the size lr, whatever the gradient
    tensor([ 0.7500, -0.7500])
    >>> optimizer.state[w]["exp_avg"]                    # which the moments have not seen yet
    tensor([0., 0.])
    """

    @checked
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: NotNegative = 1e-3,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 1e-2,
        *,
        moments_every: Count = 4,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "moments_every": moments_every}
        super().__init__(params, settings)

    def _update(self, theta: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), s = group["betas"], group["moments_every"]
        if not state:
            state.update(step=0, **{name: torch.zeros_like(theta) for name in ("exp_avg", "exp_avg_sq", "accumulated")})
        state["step"] += 1
        k = math.ceil(state["step"] / s)
        for p, g, m, v, b in pieces(theta, gradient, state["exp_avg"], state["exp_avg_sq"], state["accumulated"]):
            adamw_step(p, g, m, v, group, k)
            b.add_(g / s)
            if state["step"] % s == 0:
                m.lerp_(b, 1 - beta1)
                v.mul_(beta2).addcmul_(b, b, value=1 - beta2)
                b.zero_()
