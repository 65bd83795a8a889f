"""One flat buffer per worker: the model's parameters become views of it, in one canonical order."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError

__all__ = ["Layout", "Leaf", "attach", "flat_gradients", "layout_of", "views"]


class Leaf(NamedTuple):
    """One parameter tensor inside the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout(NamedTuple):
    """Where each tensor lies in a flat vector of `numel` elements; `start` and `stop` of leaves count from its beginning."""

    leaves: tuple[Leaf, ...]
    numel: int

    def slice(self, start: int, stop: int) -> "Layout":
        """The layout of `x[start:stop]`; both ends must lie between tensors."""
        inside = [leaf for leaf in self.leaves if start <= leaf.start and leaf.stop <= stop]
        assert sum(leaf.stop - leaf.start for leaf in inside) == stop - start, "a fragment ends inside a tensor"
        return Layout(tuple(Leaf(n, s, a - start, b - start) for n, s, a, b in inside), stop - start)


def layout_of(model: nn.Module) -> Layout:
    """The canonical layout of a model's trainable parameters: in `named_parameters` order, tied tensors once.

    Raises: ConfigError when nothing is trainable or the parameters differ in dtype or device.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ConfigError(
            f"{type(model).__name__} has 0 trainable parameters; at least one is needed to have anything to send"
        )
    kinds = {(p.dtype, p.device) for _, p in named}
    if len(kinds) > 1:
        raise ConfigError(
            f"the trainable parameters of {type(model).__name__} have {len(kinds)} kinds of dtype and device ({kinds}); "
            "one flat buffer needs one: convert the model with model.to(...) first"
        )
    leaves, start = [], 0
    for name, p in named:
        leaves.append(Leaf(name, tuple(p.shape), start, start + p.numel()))
        start += p.numel()
    return Layout(tuple(leaves), start)


def attach(model: nn.Module, layout: Layout, buffer: Tensor | None = None) -> Tensor:
    """Copies the parameters into a flat buffer `[P]` and makes them views of it; optimizers keep working, unaware.

    Args: `buffer` is the memory to use (a row of a stacked `[n, P]` tensor in the simulator); a new one when None.
    Returns: the buffer. Cost: one copy of the model, after which the old storage is free.
    """
    parameters = dict(model.named_parameters())
    first = parameters[layout.leaves[0].name]
    if buffer is None:
        buffer = torch.empty(layout.numel, dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for leaf in layout.leaves:
            view = buffer[leaf.start : leaf.stop].view(leaf.shape)
            view.copy_(parameters[leaf.name])
            parameters[leaf.name].data = view
    return buffer


def flat_gradients(model: nn.Module, layout: Layout, buffer: Tensor) -> Tensor:
    """Points every `.grad` at its place in `buffer` `[P]`, so that gradients are accumulated where they will be sent from."""
    parameters = dict(model.named_parameters())
    for leaf in layout.leaves:
        parameters[leaf.name].grad = buffer[leaf.start : leaf.stop].view(leaf.shape)
    return buffer


def views(model: nn.Module, layout: Layout, buffer: Tensor) -> dict[nn.Parameter, Tensor]:
    """The place of every parameter in another flat buffer `[P]`: for what an optimizer keeps of each, and peers are sent."""
    parameters = dict(model.named_parameters())
    return {parameters[leaf.name]: buffer[leaf.start : leaf.stop].view(leaf.shape) for leaf in layout.leaves}
