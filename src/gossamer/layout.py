"""One flat buffer per worker: the model's parameters become views of it, in one canonical order."""

import math
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError

Pattern = Literal["strided", "sequential", "packed"]
"""How tensors are put into fragments; `arrange` explains each."""


class Leaf(NamedTuple):
    """One parameter tensor inside the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout(NamedTuple):
    """The position of each tensor in a flat vector of `numel` elements; `start` and `stop` count from its beginning."""

    leaves: tuple[Leaf, ...]
    numel: int

    @staticmethod
    def of(shapes: Iterable[tuple[str, Sequence[int]]]) -> "Layout":
        """The layout of tensors with these names and shapes, one after the other."""
        named = list(shapes)
        ends = [0, *accumulate(math.prod(shape) for _, shape in named)]
        leaves = (Leaf(name, tuple(shape), a, b) for (name, shape), (a, b) in zip(named, pairwise(ends), strict=True))
        return Layout(tuple(leaves), ends[-1])

    def slice(self, start: int, stop: int) -> "Layout":
        """The layout of `x[start:stop]`; both ends must lie between tensors. An empty tensor there is of what follows."""
        end = stop if stop < self.numel else stop + 1
        inside = [leaf for leaf in self.leaves if start <= leaf.start < end and leaf.stop <= stop]
        assert sum(leaf.stop - leaf.start for leaf in inside) == stop - start, "a fragment ends inside a tensor"
        return Layout(tuple(Leaf(n, s, a - start, b - start) for n, s, a, b in inside), stop - start)


def layout_of(model: nn.Module) -> Layout:
    """The canonical layout of a model's trainable parameters: in `named_parameters` order, tied tensors once.

    Raises: ConfigError when nothing is trainable or the parameters differ in dtype or device.
    """
    named = [(name, p) for name, p in _named_parameters(model).items() if p.requires_grad]
    if not named:
        raise ConfigError(
            f"{type(model).__name__} has 0 trainable parameters; at least one is needed to train and to send"
        )
    kinds = {(p.dtype, p.device) for _, p in named}
    if len(kinds) > 1:
        raise ConfigError(
            f"the trainable parameters of {type(model).__name__} have {len(kinds)} kinds of dtype and device ({kinds}); "
            "one flat buffer needs one: convert the model with model.to(...) first"
        )
    return Layout.of((name, p.shape) for name, p in named)


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""The modules that torch.compile and activation checkpointing put around others."""


def bare_name(name: str) -> str:
    """The name of a parameter without wrappers, so that compiled and plain models have the same names.

    >>> bare_name("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight")
    'layers.0.up.weight'
    """
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their bare names, or by their full ones where two have the same bare name."""
    named = dict(model.named_parameters())
    bare = {bare_name(name): p for name, p in named.items()}
    return bare if len(bare) == len(named) else named


def arrange(layout: Layout, fragments: int, pattern: Pattern = "strided") -> tuple[Layout, tuple[tuple[int, int], ...]]:
    """The same tensors in an order in which each fragment is one slice of the flat vector, and these slices.

    "strided" puts every fragments-th layer in a fragment, "sequential" neighbouring layers. The number in a tensor's name
    identifies its layer; tensors before the first layer (the embedding) belong to the first, tensors without a number after a
    layer (the final norm, the head) to that layer. A model without numbers may be cut between any two tensors.

    "packed" ignores layers and makes the largest fragment small: it assigns tensors, largest first, to the fragment that is
    smallest so far. The largest fragment is then at most 4/3 - 1/(3 fragments) times as large as in the best packing
    (Graham's bound). Source: arXiv 2604.21428 (fragments by greedy bin packing).

    Raises: ConfigError when there are fewer layers, or packed tensors, than fragments.

    >>> layers = [Leaf(f"layers.{k}.w", (2,), 2 * k, 2 * k + 2) for k in range(4)]
    >>> layout, spans = arrange(Layout(tuple(layers), 8), 2)
    >>> [leaf.name for leaf in layout.leaves], spans
    (['layers.0.w', 'layers.2.w', 'layers.1.w', 'layers.3.w'], ((0, 4), (4, 8)))
    """
    if fragments == 1:
        return layout, ((0, layout.numel),)
    return _one_after_the_other(
        _packed(layout, fragments) if pattern == "packed" else _by_layers(layout, fragments, pattern)
    )


def in_parts(layout: Layout, part_of: Callable[[str], int], parts: int) -> tuple[Layout, tuple[tuple[int, int], ...]]:
    """The same tensors in an order in which each part is one slice of the flat vector, and these slices; a part may be empty.

    Args: `part_of` has the part of the tensor with a name.
    """
    groups: list[list[Leaf]] = [[] for _ in range(parts)]
    for leaf in layout.leaves:
        groups[part_of(leaf.name)].append(leaf)
    return _one_after_the_other(groups)


def subset(
    layout: Layout, spans: Sequence[tuple[int, int]], names: Container[str]
) -> tuple[Layout, tuple[tuple[int, int], ...]]:
    """A subset of the tensors of an arranged layout, in its order, and its remaining slices; see `arrange`."""
    return _one_after_the_other(
        [[leaf for leaf in layout.leaves if a <= leaf.start < b and leaf.name in names] for a, b in spans]
    )


def _one_after_the_other(groups: Sequence[Sequence[Leaf]]) -> tuple[Layout, tuple[tuple[int, int], ...]]:
    layout = Layout.of((leaf.name, leaf.shape) for group in groups for leaf in group)
    ends = [0, *(leaf.stop for leaf in layout.leaves)]
    return layout, tuple((ends[a], ends[b]) for a, b in pairwise(accumulate(map(len, groups), initial=0)))


def _by_layers(layout: Layout, fragments: int, pattern: Pattern) -> list[list[Leaf]]:
    """The tensors of each fragment; a layer is never split."""
    units = [[leaf for _, leaf in group] for _, group in groupby(_with_layer(layout), key=lambda pair: pair[0])]
    if len(units) < fragments:
        raise ConfigError(
            f"schedule.fragments is {fragments} and the model has {len(units)} layers; take at most one fragment per layer"
        )
    places = [fragment_of(u, len(units), fragments, pattern) for u in range(len(units))]
    return [[leaf for u, unit in enumerate(units) if places[u] == p for leaf in unit] for p in range(fragments)]


def fragment_of(layer: int, layers: int, fragments: int, pattern: Pattern) -> int:
    """The fragment of a layer, for patterns other than "packed"; see `arrange`."""
    return layer % fragments if pattern == "strided" else layer * fragments // layers


def _packed(layout: Layout, fragments: int) -> list[list[Leaf]]:
    """The tensors of each fragment, with a small largest fragment; inside a fragment they keep their order."""
    if not 1 <= fragments <= len(layout.leaves):
        raise ConfigError(
            f"events.fragments is {fragments} for a model of {len(layout.leaves)} tensors; allowed is 1 to "
            f"{len(layout.leaves)}, as a tensor is never split: choose fewer fragments"
        )
    bins: list[list[Leaf]] = [[] for _ in range(fragments)]
    sizes = [0] * fragments
    for leaf in sorted(layout.leaves, key=lambda leaf: leaf.start - leaf.stop):
        smallest = sizes.index(min(sizes))
        bins[smallest].append(leaf)
        sizes[smallest] += leaf.stop - leaf.start
    return [sorted(group, key=lambda leaf: leaf.start) for group in bins]


def _with_layer(layout: Layout) -> list[tuple[str, Leaf]]:
    """Each tensor with the name of its layer."""
    prefixes = [_layer(leaf.name) for leaf in layout.leaves]
    first = next((prefix for prefix in prefixes if prefix), None)
    if first is None:
        return [(leaf.name, leaf) for leaf in layout.leaves]
    pairs, current = [], first
    for prefix, leaf in zip(prefixes, layout.leaves, strict=True):
        current = prefix or current
        pairs.append((current, leaf))
    return pairs


def _layer(name: str) -> str:
    """The name up to its first number, "model.layers.3" of "model.layers.3.mlp.up.weight"; empty without one."""
    words = name.split(".")
    place = next((k for k, word in enumerate(words) if word.isdigit()), None)
    return "" if place is None else ".".join(words[: place + 1])


def layers_of(layout: Layout) -> list[list[tuple[int, int]]]:
    """The slices of the flat vector that each layer has, in the order of their first tensors.

    A layer is all tensors under the same number; those without a number form one layer, like FSDP's outermost unit.

    >>> names = ["embed", "layers.0.up", "layers.0.down", "norm"]
    >>> ends = [(0, 2), (2, 4), (4, 5), (5, 6)]
    >>> layers_of(Layout(tuple(Leaf(name, (b - a,), a, b) for name, (a, b) in zip(names, ends)), 6))
    [[(0, 2), (5, 6)], [(2, 4), (4, 5)]]
    """
    slices: dict[str, list[tuple[int, int]]] = {}
    for leaf in layout.leaves:
        slices.setdefault(_layer(leaf.name), []).append((leaf.start, leaf.stop))
    return [*slices.values()]


def attach(model: nn.Module, layout: Layout, buffer: Tensor | None = None, *, own_storage: bool = False) -> Tensor:
    """Copies the parameters into a flat buffer `[P]` and makes them views of it; existing optimizers stay valid.

    Args:
        buffer: the memory to use (a row of a stacked `[n, P]` tensor in the simulator); a new one when None.
        own_storage: whether each parameter has a storage object that ends where it does, over the same memory. Saving
            or pickling a parameter writes its whole storage.
    Returns: the buffer. Cost: one copy of the model, after which the old storage is free.
    """
    parameters = _named_parameters(model)
    first = parameters[layout.leaves[0].name]
    if buffer is None:
        buffer = torch.empty(layout.numel, dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for leaf in layout.leaves:
            part = buffer[leaf.start : leaf.stop]
            view = (_with_own_storage(part) if own_storage else part).view(leaf.shape)
            view.copy_(parameters[leaf.name])
            parameters[leaf.name].data = view
    return buffer


def _with_own_storage(part: Tensor) -> Tensor:
    """The same memory behind a storage object of just this part, which keeps the whole alive.

    Only CPU and CUDA tensors have one; others, and a part of no numbers, stay as they are.
    """
    return torch.from_dlpack(part) if part.numel() and part.device.type in ("cpu", "cuda") else part


def keep_attached(model: nn.Module, layout: Layout, buffer: Tensor) -> None:
    """Brings parameters that have left the flat buffer `[P]` back into it, such as those of `load_state_dict(assign=True)`.

    Raises: ConfigError when one is gone or has another shape, dtype or device than at the start, or one became trainable since.
    Cost: one walk over the model that compares addresses, about 1 µs per parameter; a copy of those that have left.
    """
    parameters = _named_parameters(model)
    start, size, left = buffer.data_ptr(), buffer.element_size(), list[Leaf]()
    for leaf in layout.leaves:
        p = parameters.pop(leaf.name, None)
        if p is None or p.shape != leaf.shape or p.dtype != buffer.dtype or p.device != buffer.device:
            now = "is gone" if p is None else f"is {p.dtype} {list(p.shape)} on {p.device}"
            raise ConfigError(
                f"parameter '{leaf.name}' {now}, and was {buffer.dtype} {list(leaf.shape)} on {buffer.device} when Outer was "
                "made; convert, move, resize or wrap the model before Outer is made"
            )
        # A view in another order, as p.data.t() of a square matrix, begins at the same address.
        if p.data_ptr() != start + leaf.start * size or not p.is_contiguous():
            left.append(leaf)
            p.data = p.data.clone()  # it may lie in the buffer that it is copied to
    if late := [name for name, p in parameters.items() if p.requires_grad]:
        raise ConfigError(
            f"{len(late)} parameters are trainable that were not when Outer was made, and are not exchanged (the first is "
            f"'{late[0]}'); make them trainable before Outer is made, and freeze them afterwards for as long as you like"
        )
    if left:
        attach(model, Layout(tuple(left), layout.numel), buffer, own_storage=True)


def flat_gradients(model: nn.Module, layout: Layout, buffer: Tensor) -> Tensor:
    """Makes every `.grad` a view of `buffer` `[P]`, so that gradients accumulate in the buffer that is sent."""
    parameters = _named_parameters(model)
    for leaf in layout.leaves:
        parameters[leaf.name].grad = buffer[leaf.start : leaf.stop].view(leaf.shape)
    return buffer


def views(model: nn.Module, layout: Layout, buffer: Tensor) -> dict[nn.Parameter, Tensor]:
    """A view of another flat buffer `[P]` for every parameter, such as for optimizer state that is sent to peers."""
    parameters = _named_parameters(model)
    return {parameters[leaf.name]: buffer[leaf.start : leaf.stop].view(leaf.shape) for leaf in layout.leaves}


class Reused:
    """A pool of host memory for flat tensors: a block is reused once no view of it is left, as touching fresh memory
    costs as much as copying.

    Args: `keep_bytes` bounds the idle memory that is kept for reuse.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._keep_bytes = keep_bytes

    def take(self, size: int) -> Tensor:
        """An uninitialised uint8 buffer of this many bytes."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:  # several threads take blocks, and garbage collection returns them at any point in any thread: hence no lock
            block = self._free[size].pop()
        except (KeyError, IndexError):
            block = np.empty(size, np.uint8)  # in large pages, where the system has them
        lease = block[:]  # torch keeps this alive, and only this, until the last view of the tensor is gone
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(lease)

    def _give_back(self, block: np.ndarray) -> None:
        if block.nbytes + sum(size * len(blocks) for size, blocks in [*self._free.items()]) <= self._keep_bytes:
            self._free.setdefault(block.nbytes, []).append(block)
