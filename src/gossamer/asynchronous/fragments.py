"""Fragments of a model that travel on their own: whole tensors, packed so that the largest fragment is small."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.layout import Layout, Leaf

__all__ = ["Fragment", "pack", "put", "take"]


class Fragment(NamedTuple):
    """Some tensors of a model: where they lie in its flat vector, and where in the flat vector of the fragment."""

    spans: tuple[tuple[int, int], ...]
    layout: Layout


def pack(layout: Layout, parts: int) -> tuple[Fragment, ...]:
    """Deals the tensors, largest first, each to the fragment that is smallest so far.

    The largest fragment is at most 4/3 - 1/(3 parts) times as large as in the best packing (Graham's bound for this rule).

    Args: `parts` is from 1 to the number of tensors.
    Raises: ConfigError when there are not enough tensors.
    Source: arXiv 2604.21428 (fragments by greedy bin packing).

    >>> layout = Layout((Leaf("a", (4,), 0, 4), Leaf("b", (3,), 4, 7), Leaf("c", (2,), 7, 9)), 9)
    >>> [fragment.spans for fragment in pack(layout, 2)]
    [((0, 4),), ((4, 7), (7, 9))]
    """
    if not 1 <= parts <= len(layout.leaves):
        raise ConfigError(
            f"fragments is {parts} for a model of {len(layout.leaves)} tensors; allowed is 1 to {len(layout.leaves)}, "
            "as a tensor is never split: choose fewer fragments"
        )
    bins: list[list[Leaf]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for leaf in sorted(layout.leaves, key=lambda leaf: leaf.start - leaf.stop):
        smallest = sizes.index(min(sizes))
        bins[smallest].append(leaf)
        sizes[smallest] += leaf.stop - leaf.start
    return tuple(_fragment(sorted(leaves, key=lambda leaf: leaf.start)) for leaves in bins)


def _fragment(leaves: list[Leaf]) -> Fragment:
    own, start = [], 0
    for leaf in leaves:
        stop = start + leaf.stop - leaf.start
        own.append(Leaf(leaf.name, leaf.shape, start, stop))
        start = stop
    return Fragment(tuple((leaf.start, leaf.stop) for leaf in leaves), Layout(tuple(own), start))


def take(x: Tensor, fragment: Fragment) -> Tensor:
    """The fragment's elements of a model's flat vector, as a copy."""
    return torch.cat([x[start:stop] for start, stop in fragment.spans])


def put(x: Tensor, fragment: Fragment, part: Tensor) -> None:
    """Writes the fragment's elements into a model's flat vector."""
    for (start, stop), leaf in zip(fragment.spans, fragment.layout.leaves, strict=True):
        x[start:stop] = part[leaf.start : leaf.stop]
