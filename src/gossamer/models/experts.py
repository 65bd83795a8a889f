"""A mixture of experts in place of a feed-forward layer, of which a worker may hold some experts only.

Legend of shapes: B sequences, S tokens of a sequence, T = B S, D hidden size, E experts, k active ones.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.models.sizes import ExpertsConfig


class Experts(nn.Module):
    """`y = Σ_(e in the k largest p) p_e / (Σ of the k) · expert_e(x)` with `p = softmax(R x)` over all E experts.

    A token skips an expert that is not resident: that expert adds nothing, and the gates of the others stay unchanged,
    as if missing experts were zero.

    Compiled, every expert here computes all tokens, with weight zero where it was not chosen: the same sum in fixed shapes, for
    E/k times the products, which is faster where the experts are small.

    Args: `expert` makes one, from `[T, D]` to `[T, D]`.
    Source: FoMoE, arXiv 2606.19025; router and gates of Mixtral, arXiv 2401.04088, so that `transformers` opens the whole.
    Differs: FoMoE names sigmoid gates (σ-MoE), and does not specify the other gates when one is skipped.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.active, self.weight = config.active, config.balance
        self.router = nn.Linear(hidden_size, config.count, bias=False)
        self.experts = nn.ModuleDict({str(e): expert() for e in range(config.count)})
        self.balance: Tensor | None = None
        """The balance loss of the last forward pass in training, with its weight; None without one."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, D]` to `[B, S, D]`."""
        tokens = x.flatten(0, 1)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        shares = self.router(tokens).softmax(-1, dtype=wide)  # [T, E]
        gates, chosen = shares.topk(self.active, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        self.balance = self.weight * _imbalance(shares, chosen) if self.training and self.weight else None
        if torch.compiler.is_compiling():
            weights = torch.zeros_like(shares).scatter(-1, chosen, gates)
            terms = [weights[:, int(name), None] * expert(tokens) for name, expert in self.experts.items()]
            return torch.stack(terms).sum(0).to(x.dtype).view_as(x) if terms else torch.zeros_like(x)
        y = torch.zeros_like(tokens)
        for name, expert in self.experts.items():
            token, place = (chosen == int(name)).nonzero(as_tuple=True)  # no token twice: no sum is in doubt
            y.index_add_(0, token, (gates[token, place, None] * expert(tokens[token])).to(y.dtype))
        return y.view_as(x)


def _imbalance(shares: Tensor, chosen: Tensor) -> Tensor:
    """`E Σ_e f_e p_e`: f_e is the share of choices that fell on an expert, p_e its mean share; 1 where all are alike.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2.
    """
    count = shares.shape[-1]
    fell = F.one_hot(chosen, count).to(shares.dtype).mean((0, 1))
    return count * (fell * shares.mean(0)).sum()


def balance_of(model: nn.Module) -> Tensor | None:
    """The mean balance loss of the layers, with its weight, after a forward pass in training; None for a model without one."""
    losses = [
        module.balance for module in model.modules() if isinstance(module, Experts) and module.balance is not None
    ]
    return torch.stack(losses).mean() if losses else None


def keep_experts(model: nn.Module, resident: Collection[int]) -> None:
    """Removes all other experts from a model."""
    for module in model.modules():
        if isinstance(module, Experts):
            for name in [name for name in module.experts if int(name) not in resident]:
                del module.experts[name]
