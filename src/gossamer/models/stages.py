"""A Llama cut into the stages of a pipeline: consecutive layers, which other stages reach by hidden states alone."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.models.bottleneck import narrow, widen
from gossamer.models.llama import Decoder, Llama
from gossamer.models.sizes import in_subspace

__all__ = ["Stage", "minimax", "stages_of"]


class _Part(nn.Module):
    """What a stage has of a Decoder, under the same names."""

    def __init__(self, whole: Decoder, first: int, last: int) -> None:
        super().__init__()
        self.embed_tokens = whole.embed_tokens if first == 0 else None
        self.layers = nn.ModuleDict({str(k): whole.layers[k] for k in range(first, last)})
        self.norm = whole.norm if last == len(whole.layers) else None
        self.cuts = nn.ModuleDict()
        for name, cut in whole.cuts.items():
            if first <= (k := int(name)) <= last:
                halves = [*(["encoder"] if k > first else []), *(["decoder"] if k < last else [])]
                self.cuts[name] = nn.ModuleDict({half: getattr(cut, half) for half in halves})


class Stage(nn.Module):
    """Layers `first` to `last - 1` of a Llama, whose parameters it shares under the same names.

    The first stage takes int64 tokens `[B, S]`, all others what crosses `[B, S, w]` and the tokens again, which a stage reads
    from the data; the last returns logits `[B, S, V]`, all others what crosses: hidden states, or a bottleneck's few
    numbers.
    """

    def __init__(self, whole: Llama, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.model = _Part(whole.model, first, last)
        self.lm_head = whole.lm_head if self.model.norm is not None else None
        self.rotary = nn.Buffer(whole.rotary, persistent=False)
        self.subspace, self._in_subspace = whole.subspace, in_subspace(whole.config)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Its part of `Llama.forward`, operation by operation."""
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(tokens)
        if self.subspace is not None:
            x = self.subspace.widen(x, tokens)
        cos, sin = self.rotary[:, : tokens.shape[1]].to(x.dtype)
        for name, layer in self.model.layers.items():
            k = int(name)
            if name in self.model.cuts:
                halves = cast(nn.ModuleDict, self.model.cuts[name])
                x = widen(x if k == self.first else narrow(x, halves["encoder"]), halves["decoder"])
            x = layer(x, cos, sin, self.subspace if k < self._in_subspace else None)
        if self.model.norm is not None and self.lm_head is not None:
            return self.lm_head(self.model.norm(x))
        if (name := str(self.last)) in self.model.cuts:
            return narrow(x, cast(nn.ModuleDict, self.model.cuts[name])["encoder"])
        return x if self.subspace is None else self.subspace.narrow(x, tokens)


def stages_of(model: Llama, cuts: Sequence[int]) -> list[Stage]:
    """The model cut before each of these layers.

    Raises: ConfigError unless the cuts increase and leave every stage a layer; and for tied embeddings, whose gradient the first
    and the last stage would have to add up.

    >>> from gossamer.models import ModelConfig, build_model
    >>> [len(stage.model.layers) for stage in stages_of(build_model(ModelConfig(size="0.2m"), 256, 16, seed=0), [2])]
    [2, 1]
    """
    layers = len(model.model.layers)
    places = [0, *cuts, layers]
    if any(a >= b for a, b in pairwise(places)):
        raise ConfigError(
            f"the pipeline is cut before layers {[*cuts]} of {layers}, but each stage needs a layer; take increasing numbers "
            f"from 1 to {layers - 1}"
        )
    if cuts and model.config.tie_embeddings:
        raise ConfigError(
            f"model.tie_embeddings is true, and with cuts before layers {[*cuts]} the embedding is on the first stage and the "
            "output head on the last; set it to false"
        )
    return [Stage(model, a, b) for a, b in pairwise(places)]


def minimax(costs: Sequence[float], speeds: Sequence[float], most: Sequence[int] | None = None) -> tuple[int, ...]:
    """The layers before which to cut so that the slowest stage is as fast as possible; one layer per stage at least.

    `best[s][l] = min_j max(best[s-1][j], Σ_(j <= k < l) cost_k / speed_s)`; of equal splits, the one with the earliest cuts.

    Args:
        costs: of each layer, in any unit of work.
        speeds: work per second of each stage, in order.
        most: the most layers that fit each stage; None without a limit.
    Raises: ConfigError when there are more stages than layers, or the layers do not fit.
    Cost: O(stages · layers²).
    Source: the graph planner of ElasWave, arXiv 2510.00606, by a dynamic programme.

    >>> minimax([1.0] * 6, [2.0, 1.0])
    (4,)
    """
    layers, stages = len(costs), len(speeds)
    limits = [layers] * stages if most is None else [*most]
    if stages > layers:
        raise ConfigError(
            f"pipeline.stages is {stages} and the model has {layers} layers, but each stage needs one; take at most {layers}"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for speed, limit in zip(speeds, limits, strict=True):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for j, (slowest, cuts) in best[-1].items():
            for stop in range(j + 1, min(j + limit, layers) + 1):
                candidate = (max(slowest, (total[stop] - total[j]) / speed), (*cuts, stop))
                found[stop] = min(found.get(stop, candidate), candidate)
        best.append(found)
    if layers not in best[-1]:
        raise ConfigError(
            f"{stages} stages have room for {limits} layers, and the model has {layers}; add stages, or make room for more layers"
        )
    return best[-1][layers][1][:-1]
