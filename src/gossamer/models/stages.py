"""A Llama cut into the stages of a pipeline: consecutive layers, which exchange hidden states only."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.models.bottleneck import narrow, widen_stream
from gossamer.models.llama import Decoder, Llama
from gossamer.models.sizes import in_subspace

_MOST_SPLITS = 5e6
"""The most splits compared to find the best one, which takes some seconds."""


class _Part(nn.Module):
    """The submodules of a Decoder for some spans of layers, under the same names."""

    def __init__(self, whole: Decoder, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.embed_tokens = whole.embed_tokens if any(first == 0 for first, _ in spans) else None
        self.layers = nn.ModuleDict({str(k): whole.layers[k] for first, last in spans for k in range(first, last)})
        self.norm = whole.norm if any(last == len(whole.layers) for _, last in spans) else None
        self.cuts = nn.ModuleDict()
        for name, cut in whole.cuts.items():
            k = int(name)
            sends, takes = (any(a < k <= b for a, b in spans), any(a <= k < b for a, b in spans))
            if halves := [*(["encoder"] if sends else []), *(["decoder"] if takes else [])]:
                self.cuts[name] = nn.ModuleDict({half: getattr(cut, half) for half in halves})


class OwnLayers(nn.Module):
    """One process's share of a Llama: the parameters of some spans of layers, under the same names.

    Args: `spans` are the first layer of each and the one after its last.
    """

    def __init__(self, whole: Llama, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.model = _Part(whole.model, spans)
        self.lm_head = whole.lm_head if self.model.norm is not None else None

    def get_output_embeddings(self) -> nn.Module | None:
        """The output head, for optimizers that treat it differently; None where another process has it."""
        return self.lm_head


class Stage(OwnLayers):
    """Layers `first` to `last - 1` of a Llama, whose parameters it shares under the same names.

    The first stage takes int64 tokens `[B, S]`, all others what crosses `[B, S, w]` and the tokens again, which a stage reads
    from the data; the last returns logits `[B, S, V]`, all others what crosses, in fp32 at least: hidden states, or a
    bottleneck's few numbers.
    """

    def __init__(self, whole: Llama, first: int, last: int) -> None:
        super().__init__(whole, [(first, last)])
        self.first, self.last = first, last
        self.rotary = nn.Buffer(whole.rotary, persistent=False)
        self.subspace, self._in_subspace = whole.subspace, in_subspace(whole.config)

    @property
    def table(self) -> Tensor:
        """The embeddings `[V, D]` of the first stage, without their gradient."""
        assert self.model.embed_tokens is not None
        return self.model.embed_tokens.weight.detach()

    def forward(self, x: Tensor, tokens: Tensor, *, full: bool = False) -> Tensor:
        """Its part of `Llama.forward`, operation by operation.

        Args: `full` lets hidden states cross as they are, `[B, S, D]`, also where a subspace has fewer numbers.
        """
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(tokens)
        if self.subspace is not None and (self.first == 0 or not full):
            x = self.subspace.widen(x, tokens)
        cos, sin = self.rotary[:, : tokens.shape[1]].to(x.dtype)
        for name, layer in self.model.layers.items():
            k = int(name)
            if name in self.model.cuts:
                halves = cast(nn.ModuleDict, self.model.cuts[name])
                x = widen_stream(x if k == self.first else narrow(x, halves["encoder"]), halves["decoder"])
            x = layer(x, cos, sin, self.subspace if k < self._in_subspace else None)
        if self.model.norm is not None and self.lm_head is not None:
            return self.lm_head(self.model.norm(x))
        if (name := str(self.last)) in self.model.cuts:
            return narrow(x, cast(nn.ModuleDict, self.model.cuts[name])["encoder"])
        if self.subspace is not None and not full:
            x = self.subspace.narrow(x, tokens)
        return x.to(torch.promote_types(x.dtype, torch.float32))  # the next stage must know what it receives


def cutting_faults(cuts: Sequence[int], layers: int, *, tied: bool) -> Iterator[tuple[str, str, str]]:
    """The settings that prevent cutting a model of `layers` layers: each with its value and the reason."""
    if cuts and tied:
        yield (
            "model.tie_embeddings",
            "true",
            "the embedding is on the first stage and the output head on the last; set it to false",
        )
    if any(a >= b for a, b in pairwise([0, *cuts, layers])):
        yield (
            "pipeline.cuts",
            f"{[*cuts]}",
            f"the model has {layers} layers and every stage needs one; take increasing numbers from 1 to {layers - 1}",
        )


def piece_of(name: str, cuts: Sequence[int]) -> int:
    """The piece of a Llama cut before these layers that the parameter with a name is in; see `OwnLayers`.

    >>> [piece_of(f"model.{name}", [2, 4]) for name in ("embed_tokens.weight", "layers.2.w", "cuts.2.encoder.w", "norm.weight")]
    [0, 1, 0, 2]
    """
    words = name.split(".")
    if words[1] == "cuts":  # an encoder is at the end of a piece, its decoder at the beginning of the next
        return bisect_left(cuts, int(words[2]) + (words[3] != "encoder"))
    if words[1] == "layers":
        return bisect_right(cuts, int(words[2]))
    return 0 if words[1] == "embed_tokens" else len(cuts)


def work_of_pieces(tensors: Iterable[tuple[str, tuple[int, ...]]], cuts: Sequence[int]) -> list[int]:
    """The work of each piece of a Llama cut before these layers, in numbers of its matrices; the last has the output head.

    An embedding is looked up and costs nothing.

    Args: `tensors` are name and shape of each parameter.

    >>> work_of_pieces([("model.layers.0.w", (2, 2)), ("model.layers.1.w", (2, 2)), ("lm_head.weight", (9, 2))], [1])
    [4, 22]
    """
    work = [0] * (len(cuts) + 1)
    for name, shape in tensors:
        if len(shape) == 2 and not name.startswith("model.embed_tokens"):
            work[piece_of(name, cuts)] += math.prod(shape)
    return work


def stages_of(model: Llama, cuts: Sequence[int]) -> list[Stage]:
    """The model cut before each of these layers.

    Raises: ConfigError unless the cuts increase and leave every stage a layer; and for tied embeddings, whose gradient the first
        and the last stage would have to add up.

    >>> from gossamer.models import ModelConfig, build_model
    >>> [len(stage.model.layers) for stage in stages_of(build_model(ModelConfig(size="0.2m"), 256, 16, seed=0), [2])]
    [2, 1]
    """
    layers = len(model.model.layers)
    for key, value, why in cutting_faults(cuts, layers, tied=model.config.tie_embeddings):
        raise ConfigError(f"{key} is {value}, but {why}")
    places = [0, *cuts, layers]
    return [Stage(model, a, b) for a, b in pairwise(places)]


def must_be_enough(layers: int, stages: int) -> None:
    """Raises ConfigError when there are more stages than layers."""
    if stages > layers:
        raise ConfigError(
            f"pipeline.stages is {stages} and the model has {layers} layers, but each stage needs one; take at most {layers}"
        )


def minimax(costs: Sequence[float], speeds: Sequence[float], most: Sequence[int] | None = None) -> tuple[int, ...]:
    """The layers before which to cut so that the slowest stage is as fast as possible; one layer per stage at least.

    `best[s][l] = min_j max(best[s-1][j], Σ_(j <= k < l) cost_k / speed_s)`; of equal splits, the one with the earliest cuts.

    Args:
        costs: of each layer, in any unit of work.
        speeds: work per second of each stage, in order.
        most: the most layers that fit each stage; None without a limit.
    Raises: ConfigError when there are more stages than layers, they are too many to compare, or the layers do not fit.
    Cost: O(stages · layers²).
    Source: the graph planner of ElasWave, arXiv 2510.00606, by a dynamic programme.

    >>> minimax([1.0] * 6, [2.0, 1.0])
    (4,)
    """
    layers, stages = len(costs), len(speeds)
    must_be_enough(layers, stages)
    if stages * layers**2 > _MOST_SPLITS:
        raise ConfigError(
            f"the best places for {stages:,} stages of {layers:,} layers take too long to find; name the layers before which to "
            "cut in pipeline.cuts"
        )
    limits = [layers] * stages if most is None else [*most]
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for speed, limit in zip(speeds, limits, strict=True):
        row: dict[int, tuple[float, tuple[int, ...]]] = {}
        for j, (slowest, cuts) in best[-1].items():
            for stop in range(j + 1, min(j + limit, layers) + 1):
                candidate = (max(slowest, (total[stop] - total[j]) / speed), (*cuts, stop))
                row[stop] = min(row.get(stop, candidate), candidate)
        best.append(row)
    if layers not in best[-1]:
        raise ConfigError(
            f"{stages} stages have room for {limits} layers, and the model has {layers}; add stages, or make room for more layers"
        )
    return best[-1][layers][1][:-1]
