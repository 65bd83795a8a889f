"""Several Llamas of one shape as one computation: every operation has one more dimension, for the replicas.

The operations of small models are too short to keep a processor busy. R replicas together take as many operations as
one, each R times as long.

Legend of shapes: R replicas, B sequences, S tokens of a sequence, V vocabulary, D hidden size, H heads.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.models.llama import NORM_EPS, attended, rotary, rotated
from gossamer.models.sizes import Shape


def stacked_losses(weights: Mapping[str, Tensor], shape: Shape, batch: Tensor) -> Tensor:
    """The loss of each replica on its own batch, `[R]`; equal to `gossamer.models.llama.loss` but for rounding.

    Args:
        weights: the parameters of all replicas, `[R, ...]` each, by their names in one; without a head it is the embedding.
        shape: of one replica, which has neither dropout nor a bottleneck.
        batch: int64 `[R, B, S + 1]`.
    Cost: the memory of R replicas' activations at a time.
    """
    tokens, targets = batch[..., :-1], batch[..., 1:]
    R, B, S = tokens.shape
    embedding = weights["model.embed_tokens.weight"]
    V = embedding.shape[1]
    offsets = torch.arange(R, device=batch.device)[:, None] * V  # the first row of each replica in an embedding of all
    x = F.embedding(tokens.flatten(1) + offsets, embedding.flatten(0, 1))  # [R, B·S, D]
    positions = rotary(shape.hidden_size // shape.heads, S).to(x)
    for k in range(shape.layers):
        layer = {name.removeprefix(f"model.layers.{k}."): weight for name, weight in weights.items()}
        x = x + _attention(_norm(x, layer["input_layernorm.weight"]), layer, shape, (R, B, S), positions)
        x = x + _mlp(_norm(x, layer["post_attention_layernorm.weight"]), layer)
    logits = _linear(_norm(x, weights["model.norm.weight"]), weights.get("lm_head.weight", embedding))
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(R, -1).mean(1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """`[R, N, in]` by `[R, out, in]` to `[R, N, out]`."""
    return torch.bmm(x, weight.transpose(1, 2))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight[:, None] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS))


def _attention(
    x: Tensor, layer: Mapping[str, Tensor], shape: Shape, sizes: tuple[int, int, int], positions: Tensor
) -> Tensor:
    R, B, S = sizes
    cos, sin = positions
    q, k, v = (
        _linear(x, layer[f"self_attn.{name}_proj.weight"])
        .view(R * B, S, -1, shape.hidden_size // shape.heads)
        .transpose(1, 2)
        for name in "qkv"
    )
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    y = attended(q, k, v)
    return _linear(y.transpose(1, 2).reshape(R, B * S, -1), layer["self_attn.o_proj.weight"])


def _mlp(x: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
    gate, up = _linear(x, layer["mlp.gate_proj.weight"]), _linear(x, layer["mlp.up_proj.weight"])
    return _linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])
