"""The sizes of the built-in model and their parameter counts, without torch, for planning."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.settings.fields import CodeName, OneOf
from gossamer.settings.options import Count, Decay, NotNegative, Number
from gossamer.settings.schema import settings
from gossamer.settings.user_code import is_code


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
LARGE: dict[str, Shape] = {
    "3b": Shape(3072, 28, 24, 8, 8192),
    "7b": Shape(4096, 32, 32, 32, 11008),
    "8b": Shape(4096, 32, 32, 8, 14336),  # 8,030,261,248 parameters with its vocabulary of 128,256 tokens
    "13b": Shape(5120, 40, 40, 40, 13824),
    "34b": Shape(8192, 48, 64, 8, 22016),
    "70b": Shape(8192, 80, 64, 8, 28672),
}
"""Further shapes for plans: those of Llama 2, 3.1 and 3.2, and of Code Llama. A run file gives them as dimensions."""


# Larger than any real model, and small enough that all tensors are listed within a second.
_Several = Annotated[int, Field(ge=1, le=2_000)]
_Width = Annotated[int, Field(ge=1, le=1_000_000)]
_MOST_EXPERTS = 50_000
"""Experts of all layers together."""


@settings("model.bottleneck")
class BottleneckConfig:
    """An architecture whose hidden states cross the cuts of a pipeline in few numbers. It is part of the model, cut or not."""

    name: Literal["resbm", "subspace"]
    """"resbm": an encoder and a decoder at each of `cuts`; "subspace": layers that write into a fixed subspace."""
    width: Count
    """Numbers of a token that cross."""
    cuts: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """For "resbm": the layers before which the stream is narrow, even if the cuts between stages change on resume."""
    kind: Literal["linear", "mlp"] = "linear"
    """For "resbm": one matrix each, or two with SiLU between them."""
    free_layers: Number = 1
    """For "subspace": the last layers, which may write anywhere; the model is not cut after them."""

    def __post_init__(self) -> None:
        if (self.name == "resbm") != (self.cuts is not None):
            raise ConfigError(
                f"model.bottleneck is '{self.name}' with cuts = {self.cuts and [*self.cuts]}; give cuts, such as [2], to "
                "'resbm' and none to 'subspace'"
            )
        if self.cuts is not None and [*self.cuts] != sorted({*self.cuts}):
            raise ConfigError(f"model.bottleneck.cuts is {[*self.cuts]}; give increasing numbers of layers")

    def misfits(self, hidden: int, layers: int) -> Iterator[str]:
        """A sentence for everything that does not fit a model of this width and depth."""
        if self.width > hidden:
            yield f"model.bottleneck.width is {self.width} and the hidden size {hidden}; take at most the hidden size"
        if self.cuts is not None and self.cuts[-1] >= layers:
            yield f"model.bottleneck.cuts is {[*self.cuts]}, but the model has {layers} layers; take at most {layers - 1}"
        if self.name == "subspace" and self.free_layers >= layers:
            yield (
                f"model.bottleneck.free_layers is {self.free_layers} of {layers} layers, so that none is in the subspace; take "
                f"at most {layers - 1}"
            )


@settings("model.experts")
class ExpertsConfig:
    """A mixture of experts in place of each feed-forward layer: a router sends every token to a few of them (FoMoE).

    Each is as wide as `model.intermediate_size` says.
    """

    count: Annotated[int, Field(ge=2, le=10_000)]
    """Experts of a layer (E)."""
    active: Annotated[int, Field(ge=2)] = 2
    """Experts that a token is sent to. Their gates sum to one, so a single one would teach the router nothing."""
    holders: Count | None = None
    """Workers that hold each expert, the overlap factor (O_e): the others let the tokens pass that the router sends to it. None
    for all workers; count · holders must be a multiple of them, so that all hold equally many."""
    balance: NotNegative = 0.01
    """Weight of the loss that spreads a worker's tokens evenly over all experts; 0 is none."""

    def __post_init__(self) -> None:
        if self.active > self.count:
            raise ConfigError(
                f"model.experts.active is {self.active} of {self.count} experts; take at most model.experts.count"
            )


@settings("model")
class ModelConfig:
    """A Llama of a named size; the other fields override single dimensions of it."""

    size: Annotated[str, OneOf(SIZES, code=True)] = "1m"
    """A shape of the built-in Llama; up to 30m the name counts parameters with a vocabulary of 256, from 134m on with one of
    32,000. Or "package.module:name", a function of yours that returns the model."""
    options: Mapping[str, Any] | None = None
    """Keywords for your model."""
    loss: CodeName | None = None
    """"package.module:name" of a function `loss(model, batch)` that returns a scalar; None for the mean cross-entropy of the
    next token."""
    hidden_size: _Width | None = None
    """Width of the model."""
    layers: _Several | None = None
    """Transformer blocks."""
    heads: Count | None = None
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values (grouped-query attention when fewer than `heads`)."""
    intermediate_size: _Width | None = None
    """Width of the feed-forward layer."""
    bottleneck: BottleneckConfig | None = None
    """An architecture for slow links between the stages of a pipeline."""
    experts: ExpertsConfig | None = None
    """A mixture of experts in place of each feed-forward layer."""
    tie_embeddings: bool = False
    """One matrix for the embedding and the output head."""
    dropout: Decay = 0.0
    """Dropout probability of the outputs of attention and feed-forward layers in training; 0 draws nothing."""

    def __post_init__(self) -> Iterator[str]:
        if self.own:
            for name in (*Shape._fields, "dropout", "bottleneck", "experts"):
                if given := getattr(self, name):
                    yield (
                        f"model.{name} is {given} and model.size is '{self.size}', which makes its own model; pass it in "
                        "model.options"
                    )
            return
        if self.options is not None:
            yield (
                f"model.options is {dict(self.options)} and model.size is '{self.size}', whose options are keys of [model]; "
                "remove model.options"
            )
        hidden, layers, heads, kv_heads, _ = self.shape
        if self.experts is not None and self.experts.count * layers > _MOST_EXPERTS:
            yield (
                f"model.experts.count is {self.experts.count:,} in each of {layers:,} layers, which makes more than "
                f"{_MOST_EXPERTS:,} experts; take fewer experts or layers"
            )
        if self.experts is not None and self.bottleneck is not None:
            yield (
                f"model.experts has {self.experts.count} experts and model.bottleneck is '{self.bottleneck.name}', but a model "
                "with experts is not cut into stages; remove one of the two"
            )
        if self.bottleneck is not None:
            yield from self.bottleneck.misfits(hidden, layers)
            if self.tie_embeddings and self.bottleneck.name == "subspace":
                yield (
                    f"model.tie_embeddings is true, but the embedding of a 'subspace' has {self.bottleneck.width} numbers of a "
                    f"token and the output head {hidden}; set it to false"
                )
        if hidden % (2 * heads):
            yield (
                f"model.hidden_size is {hidden} with {heads} heads, which is {hidden / heads:.4g} per head, but rotary "
                f"positions need an even whole number; take a multiple of {2 * heads}"
            )
        if heads % kv_heads:
            yield (
                f"model.kv_heads is {kv_heads}, which does not divide the {heads} heads; take a divisor of model.heads"
            )

    @property
    def own(self) -> bool:
        """Whether the model is the user's, so that nothing is known before it is built."""
        return is_code(self.size)

    @property
    def shape(self) -> Shape:
        """The named size with the overrides.

        >>> ModelConfig(size="1m", layers=2).shape
        Shape(hidden_size=128, layers=2, heads=4, kv_heads=4, intermediate_size=352)
        """
        overrides = {name: getattr(self, name) for name in Shape._fields}
        return SIZES[self.size]._replace(**{name: value for name, value in overrides.items() if value is not None})


def parameter_shapes(config: ModelConfig, vocab_size: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of each parameter of `build_model(config, vocab_size, ...)`, in its order, without building it.

    Raises: ConfigError for a vocabulary without tokens.
    """
    if vocab_size < 1:
        raise ConfigError(f"the vocabulary is {vocab_size} tokens but must be at least 1; 256 is that of bytes")
    hidden, layers, heads, kv_heads, _ = config.shape
    kv_size, narrow = hidden // heads * kv_heads, config.bottleneck
    parameters: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab_size, written(config, 0)))]
    for k in range(layers):
        layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (written(config, k), hidden),
            **_feed_forward(config, written(config, k)),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        parameters += [(f"model.layers.{k}.{name}.weight", shape) for name, shape in layer.items()]
    parameters.append(("model.norm.weight", (hidden,)))
    if narrow is not None:
        parameters += [
            (f"model.cuts.{cut}.{name}", shape) for cut in narrow.cuts or () for name, shape in _halves(narrow, hidden)
        ]
    if not config.tie_embeddings:
        parameters.append(("lm_head.weight", (vocab_size, hidden)))
    return tuple(parameters)


def _feed_forward(config: ModelConfig, out: int) -> dict[str, tuple[int, ...]]:
    """The parameters of one feed-forward layer, or of the router and the experts in its place."""
    hidden, wide, experts = config.shape.hidden_size, config.shape.intermediate_size, config.experts
    one = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (out, wide)}
    if experts is None:
        return {f"mlp.{name}": shape for name, shape in one.items()}
    each = {f"mlp.experts.{e}.{name}": shape for e in range(experts.count) for name, shape in one.items()}
    return {"mlp.router": (experts.count, hidden), **each}


def _halves(narrow: BottleneckConfig, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    """The parameters of one residual bottleneck."""
    parameters: list[tuple[str, tuple[int, ...]]] = []
    for half, size, to in (("encoder", hidden, narrow.width), ("decoder", narrow.width, hidden)):
        middle = max(4 * narrow.width, 64)
        shapes = [(to, size)] if narrow.kind == "linear" else [(middle, size), (to, middle)]
        parameters += [(f"{half}.{2 * k}.weight", shape) for k, shape in enumerate(shapes)]
    return parameters


def in_subspace(config: ModelConfig) -> int:
    """The number of first layers, which write into the model's subspace only; 0 without one."""
    narrow = config.bottleneck
    return config.shape.layers - narrow.free_layers if narrow is not None and narrow.name == "subspace" else 0


def written(config: ModelConfig, layer: int) -> int:
    """The width that a layer writes: the hidden size, or that of a subspace."""
    narrow = config.bottleneck
    return narrow.width if narrow is not None and layer < in_subspace(config) else config.shape.hidden_size


def crossing(config: ModelConfig, cut: int) -> int:
    """The width that crosses a cut before this layer.

    Raises: ConfigError where a model with a subspace writes anywhere before the cut.
    """
    narrow, layers = config.bottleneck, in_subspace(config)
    if narrow is None or (narrow.cuts is not None and cut not in narrow.cuts):
        return config.shape.hidden_size
    if narrow.cuts is None and cut > layers:
        raise ConfigError(
            f"the pipeline is cut before layer {cut}, and of the {config.shape.layers} layers only the first {layers} write "
            f"into the subspace; cut at most before layer {layers}, or lower model.bottleneck.free_layers"
        )
    return narrow.width


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """The number of parameters of `build_model(config, vocab_size, ...)`, without building it.

    Raises: ConfigError for a vocabulary without tokens.

    >>> parameter_count(ModelConfig(size="134m"), 32_000)
    134105856
    >>> parameter_count(ModelConfig(size="1b", **LARGE["8b"]._asdict()), 128_256)
    8030261248
    """
    return sum(math.prod(shape) for _, shape in parameter_shapes(config, vocab_size))
