"""Architectures whose hidden states cross the cuts of a pipeline in few numbers: a residual bottleneck, and a fixed subspace.

Legend of shapes: B sequences, S tokens of a sequence, D hidden size, w the width that crosses.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.models.sizes import BottleneckConfig


class ResidualBottleneck(nn.Module):
    """Lets w numbers of a token cross each of its cuts: an encoder and a decoder, and w coordinates that bypass both.

    z = E(h) + h[:w];   x = D(z) + (z, 0)

    The halves lie on two stages: `narrow` and `widen_stream` use one each. With E = D = 0 it drops all but the first w
    coordinates; its linear form is a matrix of rank w at most, so it never is the identity for w < D.

    Cost: 32 w / D bits per element in each direction; where the maps are linear, 2 w D parameters at each cut.
    Source: ResBM, arXiv 2604.11947.
    Differs: its encoder and decoder are not described; these are linear, or two layers with SiLU.
    Fails when: few numbers cross: the loss rises as the width falls. The cuts are part of the model and stay.
    """

    def __init__(self, hidden_size: int, config: BottleneckConfig) -> None:
        super().__init__()
        self.encoder = _map(hidden_size, config.width, config.kind)
        self.decoder = _map(config.width, hidden_size, config.kind)

    def forward(self, h: Tensor) -> Tensor:
        """`[B, S, D]` to `[B, S, D]`, as one process has it."""
        return widen_stream(narrow(h, self.encoder), self.decoder)


def narrow(h: Tensor, encoder: nn.Module) -> Tensor:
    """The sender's part: `[B, S, D]` to `[B, S, w]`."""
    z = encoder(h)
    return z + h[..., : z.shape[-1]]


def widen_stream(z: Tensor, decoder: nn.Module) -> Tensor:
    """The receiver's part: `[B, S, w]` to `[B, S, D]`."""
    x = decoder(z)
    return x + F.pad(z, (0, x.shape[-1] - z.shape[-1]))


def _map(size: int, to: int, kind: str) -> nn.Sequential:
    if kind == "linear":
        return nn.Sequential(nn.Linear(size, to, bias=False))
    middle = max(4 * min(size, to), 64)
    return nn.Sequential(nn.Linear(size, middle, bias=False), nn.SiLU(), nn.Linear(middle, to, bias=False))


class Subspace(nn.Module):
    """Lets w numbers of a token cross any cut: layers write into one fixed subspace, and the component outside it is
    known to all stages.

    x = F[token] + U c,   with a random table F and an orthonormal basis U [D, w], both fixed

    Layers write into the span of U alone, so c is all that need cross, and gradients off that span reach no parameter:
    compressing both directions changes nothing but the rounding. Both tensors follow from the seed and are no parameters.

    Cost: 32 w / D bits per element in each direction; F and U on every stage, which are not trained.
    Source: Subspace Networks, arXiv 2506.01260, in the form that stores `W = U W_w` (ProtocolNanoGPT).
    Differs: U stays as it is, where the paper moves it. Every stage reads the tokens from the data, where the paper sends them.
    Fails when: few numbers cross: all layers but the last write into so few dimensions, and the loss rises as the width falls.
    """

    def __init__(self, hidden_size: int, width: int, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.randn(vocab_size, hidden_size), persistent=False)
        self.basis = nn.Buffer(torch.linalg.qr(torch.randn(hidden_size, width))[0].contiguous(), persistent=False)

    def spread(self, c: Tensor) -> Tensor:
        """`U c`: `[B, S, w]` to `[B, S, D]`."""
        return c @ self.basis.T

    def narrow(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The coordinates that cross: `c = Uᵀ (x - F[token])`."""
        return (x - self.table[tokens]) @ self.basis

    def widen(self, c: Tensor, tokens: Tensor) -> Tensor:
        """The hidden states at the receiver: `F[token] + U c`."""
        return self.spread(c) + self.table[tokens]


BOTTLENECKS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "resbm": (ResidualBottleneck, ("width", "cuts", "kind")),
    "subspace": (Subspace, ("width", "free_layers")),
}
"""The architectures by their names in `model.bottleneck`, each with its keys."""
