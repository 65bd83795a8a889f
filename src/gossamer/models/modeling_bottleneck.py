"""A Llama of `transformers` with residual bottlenecks (arXiv 2604.11947), for models that Gossamer has trained with them.

This file is written next to such a model and stands alone:
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.
"""

from typing import Any

from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaForCausalLM

_Llama: Any = LlamaForCausalLM  # type checking its imports would take as long as a third of Gossamer


class BottleneckLlama(_Llama):
    """Before each layer in `config.bottleneck["cuts"]` the stream h becomes `D(z) + (z, 0)`, with `z = E(h) + h[:width]`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        narrow, size = config.bottleneck, config.hidden_size
        self.model.cuts = cuts = nn.ModuleDict()
        for cut in narrow["cuts"]:
            ways = {"encoder": (size, narrow["width"]), "decoder": (narrow["width"], size)}
            cuts[str(cut)] = nn.ModuleDict({name: _map(*sizes, narrow["kind"]) for name, sizes in ways.items()})
            self.model.layers[cut].register_forward_pre_hook(self._crossing(str(cut)))
        self.post_init()

    def _crossing(self, cut: str) -> Any:
        def cross(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            h, *rest = given
            halves: Any = self.get_submodule(f"model.cuts.{cut}")
            z = halves["encoder"](h)
            z = z + h[..., : z.shape[-1]]
            x = halves["decoder"](z)
            return (x + functional.pad(z, (0, x.shape[-1] - z.shape[-1])), *rest)

        return cross


def _map(size: int, to: int, kind: str) -> nn.Sequential:
    if kind == "linear":
        return nn.Sequential(nn.Linear(size, to, bias=False))
    middle = max(4 * min(size, to), 64)
    return nn.Sequential(nn.Linear(size, middle, bias=False), nn.SiLU(), nn.Linear(middle, to, bias=False))
