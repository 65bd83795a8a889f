"""SpectralMuon: Muon with a coefficient triple for each Newton-Schulz step, scaled to a spectral norm."""

import platform
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.optimizers.contract import PerParameter
from gossamer.record.machines import computes_bf16
from gossamer.settings.options import Decay, NotNegative, checked

_TRIPLES = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class SpectralMuon(PerParameter):
    """Muon for matrices, whose step changes the output of a layer by lr, whatever the layer's shape.

    m ← μ m + g;   u = m, or g + μ m with Nesterov's momentum;   W ← (1 - lr λ) W - lr √(fan_out / fan_in) O(u)

    O(u) is near the orthogonal factor U Vᵀ of u = U S Vᵀ; see `orthogonalized`.

    Args:
        params: matrices `[fan_out, fan_in]`, or groups of them.
        lr: learning rate; the authors' default is 0.02.
        weight_decay: λ.
        momentum: μ.
        nesterov: whether the momentum looks ahead.
        eps: is added to the norm that u is divided by.
        stacks: whether each parameter is a stack of matrices instead, `[count, fan_out, fan_in]`, each orthogonalized
            separately.
    Raises: ConfigError for values out of range, and for a parameter that is no matrix, or no stack.
    Cost: one momentum (1 P), and 15 products of bf16 matrices for each matrix and step.
    Source: MuLoCo, arXiv 2505.23725, and its code, which took Muon from Ahn et al., arXiv 2504.05295. The scale is that of
        arXiv 2310.17813. `torch.optim.Muon` takes one triple for all steps, and scales otherwise.
    Differs: only matrices; their code also flattens tensors of more dimensions.
    Fails when: one matrix holds several maps, such as fused queries, keys and values: each should be orthogonalized
        separately.

    >>> w = torch.nn.Parameter(torch.zeros(2, 2))
    >>> optimizer = SpectralMuon([w], lr=0.5, weight_decay=0.0)
    >>> w.grad = torch.tensor([[0.0, 3.0], [-1.0, 0.0]])
    >>> optimizer.step(); (w.data / 0.1).round() / 10       # the sizes of the gradient do not count
    tensor([[ 0.0000, -0.5000],
            [ 0.5000,  0.0000]])
    """

    @checked
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: NotNegative = 0.02,
        weight_decay: NotNegative = 0.01,
        *,
        momentum: Decay = 0.95,
        nesterov: bool = False,
        eps: NotNegative = 1e-8,
        stacks: bool = False,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "eps": eps}
        super().__init__(params, settings)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim != 2 + stacks:
                raise ConfigError(
                    f"SpectralMuon got a parameter of shape {tuple(p.shape)}; only matrices have an orthogonal factor: give "
                    "the others to another optimizer, such as AdamW"
                )

    def _update(self, theta: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(theta)
        m, lr = state["momentum_buffer"], group["lr"]
        m.mul_(group["momentum"]).add_(gradient)
        u = m * group["momentum"] + gradient if group["nesterov"] else m
        fan_out, fan_in = theta.shape[-2:]
        theta.mul_(1 - lr * group["weight_decay"])
        theta.add_(orthogonalized(u, group["eps"]).to(theta.dtype), alpha=-lr * (fan_out / fan_in) ** 0.5)


def orthogonalized(u: Tensor, eps: float = 1e-8) -> Tensor:
    """Nearly the orthogonal factor of each matrix `[..., m, n]`, in bf16: u's directions with singular values from 0.96 to 1.04.

    X ← u / (‖u‖_F + ε), transposed if it is tall;   five times, with (a, b, c) of that step: A = X Xᵀ;   X ← a X + (b A + c A²) X

    Those below some 2e-3 of the norm stay smaller.
    """
    x = u.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + eps)
    by = torch.matmul if x.device.type != "cpu" or computes_bf16() else _rounded_product
    for a, b, c in _TRIPLES:
        gram = by(x, x.mT)
        x = a * x + by(b * gram + c * by(gram, gram), x)
    return x.mT if tall else x


def is_fast_in_bf16() -> bool:
    """Whether products in bf16 are faster than in fp32 on this processor: with AMX tiles, or the bf16 instructions of ARM.

    With those of AVX-512 alone they were measured to take two to three times as long.
    """
    return computes_bf16() and (platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_amx_tile_supported())


def _rounded_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices in bf16, summed in fp32 as processors with bf16 do."""
    return (a.float() @ b.float()).to(torch.bfloat16)
