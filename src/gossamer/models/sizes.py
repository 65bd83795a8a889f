"""The sizes of the built-in model and their parameter counts, without torch, for planning."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from gossamer.code import is_code
from gossamer.errors import ConfigError
from gossamer.fields import AtLeastOne, CodeName, OneOf
from gossamer.schema import settings

__all__ = ["SIZES", "ModelConfig", "Shape", "parameter_count", "tensors"]


class Shape(NamedTuple):
    """The dimensions of a Llama, except for its vocabulary."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int


SIZES: dict[str, Shape] = {
    #                                       parameters, untied: V = 256      V = 32,000
    "0.2m": Shape(64, 3, 2, 2, 192),  #                         192,960       4,256,192
    "1m": Shape(128, 4, 4, 4, 352),  #                          869,504       8,995,968
    "3m": Shape(192, 6, 6, 6, 512),  #                        2,755,008      14,944,704
    "10m": Shape(320, 8, 5, 5, 864),  #                      10,081,600      30,397,760
    "30m": Shape(512, 10, 8, 8, 1280),  #                    30,419,456      62,925,312
    "134m": Shape(768, 12, 12, 12, 2048),  #                 85,347,072     134,105,856
    "350m": Shape(1024, 24, 16, 16, 2560),  #               289,981,440     354,993,152
    "1b": Shape(2048, 22, 32, 4, 5632),  #                  970,024,960   1,100,048,384
}
"""Shapes by name: up to 30m the name counts a byte vocabulary, from 134m on one of 32,000 tokens."""


@settings("model")
class ModelConfig:
    """A Llama of a named size; the other fields override single dimensions of it."""

    size: Annotated[str, OneOf(SIZES, code=True)] = "1m"
    """A shape of the built-in Llama; up to 30m the name counts parameters with a vocabulary of 256, from 134m on with one of
    32,000. Or "package.module:name", a function of yours that returns the model."""
    options: Mapping[str, Any] | None = None
    """Keywords for a model of your own."""
    loss: CodeName | None = None
    """"package.module:name" of a function `loss(model, batch)` that returns a scalar; None for the mean cross-entropy of the
    next token."""
    hidden_size: AtLeastOne | None = None
    """Width of the model."""
    layers: AtLeastOne | None = None
    """Transformer blocks."""
    heads: AtLeastOne | None = None
    """Attention heads."""
    kv_heads: AtLeastOne | None = None
    """Heads of keys and values (grouped-query attention when fewer than `heads`)."""
    intermediate_size: AtLeastOne | None = None
    """Width of the feed-forward layer."""
    tie_embeddings: bool = False
    """One matrix for the embedding and the output head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of what attention and the feed-forward layer add that is left out at random in training; 0 draws nothing."""

    def __post_init__(self) -> None:
        if self.own:
            for name in (*Shape._fields, "dropout"):
                if given := getattr(self, name):
                    raise ConfigError(
                        f"model.{name} is {given} and model.size is '{self.size}', which makes its own model; pass it in "
                        "model.options"
                    )
            return
        if self.options is not None:
            raise ConfigError(
                f"model.options is {dict(self.options)} and model.size is '{self.size}', whose options are keys of [model]; "
                "remove model.options"
            )
        hidden, _, heads, kv_heads, _ = self.shape
        if hidden % (2 * heads):
            raise ConfigError(
                f"model.hidden_size is {hidden} with {heads} heads, which is {hidden / heads:.4g} per head, but rotary "
                f"positions need an even whole number; take a multiple of {2 * heads}"
            )
        if heads % kv_heads:
            raise ConfigError(
                f"model.kv_heads is {kv_heads}, which does not divide the {heads} heads; take a divisor of model.heads"
            )

    @property
    def own(self) -> bool:
        """Whether the model is the user's own, of which nothing is known before it is made."""
        return is_code(self.size)

    @property
    def shape(self) -> Shape:
        """The named size with the overrides.

        >>> ModelConfig(size="1m", layers=2).shape
        Shape(hidden_size=128, layers=2, heads=4, kv_heads=4, intermediate_size=352)
        """
        own = {name: getattr(self, name) for name in Shape._fields}
        return SIZES[self.size]._replace(**{name: value for name, value in own.items() if value is not None})


def tensors(config: ModelConfig, vocab_size: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of each parameter of `build_model(config, vocab_size, ...)`, in its order, without building it.

    Raises: ConfigError for a vocabulary without tokens.
    """
    if vocab_size < 1:
        raise ConfigError(f"the vocabulary is {vocab_size} tokens but must be at least 1; 256 is that of bytes")
    hidden, layers, heads, kv_heads, intermediate = config.shape
    narrow = hidden // heads * kv_heads
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden), "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab_size, hidden))]
    found += [(f"model.layers.{k}.{name}.weight", shape) for k in range(layers) for name, shape in layer.items()]
    found.append(("model.norm.weight", (hidden,)))
    if not config.tie_embeddings:
        found.append(("lm_head.weight", (vocab_size, hidden)))
    return tuple(found)


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """The number of parameters of `build_model(config, vocab_size, ...)`, without building it.

    Raises: ConfigError for a vocabulary without tokens.

    >>> parameter_count(ModelConfig(size="134m"), 32_000)
    134105856
    """
    return sum(math.prod(shape) for _, shape in tensors(config, vocab_size))
