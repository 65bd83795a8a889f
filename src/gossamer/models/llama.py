"""The built-in model: Llama shapes from 0.2M to 1B parameters, with the parameter names of `transformers`.

All code specific to Llama is here; the rest of Gossamer trains any `nn.Module` with a loss.

Legend of shapes: B sequences, S tokens of a sequence, V vocabulary, D hidden size, H heads of size D/H.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import rng
from gossamer.errors import ConfigError
from gossamer.models.bottleneck import ResidualBottleneck, Subspace
from gossamer.models.experts import Experts, balance_of
from gossamer.models.sizes import ExpertsConfig, ModelConfig, Shape, in_subspace, written

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6
INIT_STD = 0.02
_SHORT = 256
"""The sequence length up to which an attention matrix is smaller than the other activations."""


class RMSNorm(nn.Module):
    """`y = g · x / sqrt(mean(x²) + ε)`, computed in fp32 at least."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPS)
        return self.weight * wide.to(x.dtype)


def rotary(head_size: int, positions: int) -> Tensor:
    """Cosines and sines of rotary positions, `[2, positions, head_size]`: angle `t · θ^(-2k / head_size)` at position t."""
    frequencies = 1.0 / (ROPE_THETA ** (torch.arange(0, head_size, 2, dtype=torch.float) / head_size))
    angles = torch.arange(positions)[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys `[..., S, D/H]`, turned by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: `softmax(q kᵀ / √(D/H)) v`, where a position sees itself and those before it.

    Compiled for a CPU in bf16, short sequences take plain products: the backward pass of the fused one takes four times as long.

    Shapes: queries `[B, H, S, D/H]`; keys and values have as many heads or a divisor of them; the result is that of q.
    """
    S, shared = q.shape[-2], k.shape[-3] < q.shape[-3]
    plain = torch.compiler.is_compiling() and q.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if not plain or S > _SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=S > 1, enable_gqa=shared)
    if shared:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], dim=-3) for each in (k, v))
    later = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several heads may share keys and values."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.heads
        kv_size = shape.kv_heads * self.head_size
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, out, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, S, D]` to `[B, S, out]`."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, H, S, D/H]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return self.o_proj(attended(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """`W_down (silu(W_gate x) · W_up x)`."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, D]` to `[B, S, out]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each on the normalised stream and added to it through dropout (arXiv 1706.03762, section 5.4).

    Args:
        out: the width that they write, less than D in a subspace.
        experts: of a mixture in place of the MLP.
    """

    def __init__(self, shape: Shape, dropout: float, out: int, experts: ExpertsConfig | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(shape, out)
        self.mlp = MLP(shape, out) if experts is None else Experts(shape.hidden_size, experts, lambda: MLP(shape, out))
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, subspace: Subspace | None = None) -> Tensor:
        """`[B, S, D]` to `[B, S, D]`; what it adds is spread by the subspace that it writes into."""

        def spread(y: Tensor) -> Tensor:
            y = self.dropout(y)  # before it is spread: dropping single coordinates of D would leave the subspace
            return y if subspace is None else subspace.spread(y)

        x = x + spread(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + spread(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Embedding, layers and the last norm, and a bottleneck before the layers where the stream is narrow."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        shape, narrow = config.shape, config.bottleneck
        self.embed_tokens = nn.Embedding(vocab_size, written(config, 0))
        self.layers = nn.ModuleList(
            Layer(shape, config.dropout, written(config, k), config.experts) for k in range(shape.layers)
        )
        self.norm = RMSNorm(shape.hidden_size)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
        self.cuts = nn.ModuleDict()
        if narrow is not None:
            self.cuts.update({str(cut): ResidualBottleneck(shape.hidden_size, narrow) for cut in narrow.cuts or ()})
        for weight in self.cuts.parameters():
            nn.init.normal_(weight, std=INIT_STD / (2 * shape.layers) ** 0.25)


class Llama(nn.Module):
    """A decoder-only transformer: int64 tokens `[B, S]` to logits `[B, S, V]`, with S at most `seq_len`.

    Source: Touvron et al., arXiv 2302.13971. Without bottleneck and experts, parameters have the names, the order and the initial
        bits that they have in `transformers.LlamaForCausalLM`, and the same operations give the same logits and gradients, to the
        last bit.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        shape, narrow = config.shape, config.bottleneck
        self.config, self.vocab_size, self.seq_len = config, vocab_size, seq_len
        self.model = Decoder(config, vocab_size)
        self.lm_head = nn.Linear(shape.hidden_size, vocab_size, bias=False)
        self.rotary = nn.Buffer(rotary(shape.hidden_size // shape.heads, seq_len), persistent=False)
        nn.init.normal_(self.lm_head.weight, std=INIT_STD)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.subspace: Subspace | None = None
        if narrow is not None and narrow.name == "subspace":
            self.subspace = Subspace(shape.hidden_size, narrow.width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        x = self.model.embed_tokens(tokens)
        if self.subspace is not None:
            x = self.subspace.widen(x, tokens)
        cos, sin = self.rotary[:, : tokens.shape[1]].to(x.dtype)
        for k, layer in enumerate(self.model.layers):
            if (name := str(k)) in self.model.cuts:
                x = self.model.cuts[name](x)
            x = layer(x, cos, sin, self.subspace if k < in_subspace(self.config) else None)
        return self.lm_head(self.model.norm(x))


def build_model(config: ModelConfig, vocab_size: int, seq_len: int, seed: int) -> Llama:
    """A Llama on the CPU in fp32, initialised from the seed; equal arguments give bitwise equal parameters.

    The global random state is left as it was.
    """
    with rng.drawing(torch.device("cpu"), seed, "model"):
        return Llama(config, vocab_size, seq_len)


def loss(model: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, in nats: `-1/(B S) Σ log softmax(logits)[target]`, with logits in fp32.

    In training a model with experts adds its balance loss (`model.experts.balance`).

    Shapes: `batch` is int64 `[B, S + 1]`, the first S being inputs and the last S targets; the result is a scalar.
    """
    value = F.cross_entropy(logits_of(model, batch).flatten(0, 1), batch[:, 1:].flatten())
    balance = balance_of(model) if isinstance(model, Llama) and model.config.experts is not None else None
    return value if balance is None else value + balance


def logits_of(model: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    """The fp32 logits `[B, S, V]` of each next token, for int64 `[B, S + 1]`, of which the last column is a target only."""
    output = getattr(made := model(batch[:, :-1]), "logits", made)
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"model.loss was not given, and the cross-entropy that stands for it needs logits, but the model returned a "
            f"{type(made).__name__}; give loss(model, batch), or return the logits alone"
        )
    if output.ndim != 3 or output.shape[:2] != batch[:, 1:].shape:
        raise ConfigError(
            f"model.loss was not given, and the cross-entropy that stands for it needs logits for {tuple(batch[:, 1:].shape)} "
            f"tokens, but the model returned a tensor of shape {tuple(output.shape)}; give loss(model, batch), or return logits "
            "(batch, token, vocabulary)"
        )
    return output.float()  # models of `transformers` return them in an object
