"""A codec that encodes the tensors of each part of a vector by themselves."""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs.blocks import empty
from gossamer.codecs.codec import Codec, fitted
from gossamer.layout import Layout, Leaf
from gossamer.tree import Tree


class _Part:
    """The slices of a vector that one part has, and the codec for them."""

    def __init__(self, number: int, leaves: list[Leaf], codec: Codec) -> None:
        self.number, moved, start = number, list[Leaf](), 0
        self._slices: list[tuple[int, int]] = []
        for leaf in leaves:
            if self._slices and self._slices[-1][1] == leaf.start:
                self._slices[-1] = (self._slices[-1][0], leaf.stop)
            else:
                self._slices.append((leaf.start, leaf.stop))
            moved.append(leaf._replace(start=start, stop=start + leaf.stop - leaf.start))
            start = moved[-1].stop
        self._numel, self._codec = start, fitted(codec, Layout(tuple(moved), start))

    def encode(self, x: Tensor, key: int) -> Tree:
        part = torch.cat([x[a:b] for a, b in self._slices])
        return self._codec.encode(part, rng.key(key, self.number, "part"))

    def decode(self, payload: Tree, into: Tensor) -> None:
        values = self._codec.decode(payload, into.new_empty(self._numel))
        for (a, b), piece in zip(self._slices, values.split([b - a for a, b in self._slices]), strict=True):
            into[a:b] = piece


def by_part(codec: Codec, part_of: Callable[[str], int]) -> Codec:
    """A codec that compresses every part of a vector as a separate vector, so that a worker with one part sends the
    same payload for it.

    x' = the parts of x, each through the codec, with a separate key

    Its claims are those of the codec, except that x cannot be cut anywhere. Blocks restart at every part, so the result
    differs from the codec applied to the whole: the last block of a part is shorter, a block selects among other
    elements, and random draws differ.

    Args:
        codec: one that is not `exact`, and has no second leg.
        part_of: the part of the tensor with a name, a number from 0 on.
    Cost: one copy of x more each way.
    """

    def fit(layout: Layout) -> Codec:
        by_number = sorted(layout.leaves, key=lambda leaf: part_of(leaf.name))  # stable: in a part the order stays
        parts = [_Part(k, [*members], codec) for k, members in groupby(by_number, key=lambda leaf: part_of(leaf.name))]

        def encode(x: Tensor, key: int) -> Tree:
            if x.numel() != layout.numel:
                return codec.encode(x, key)
            return tuple(part.encode(x, key) for part in parts)

        def decode(payload: Tree, like: Tensor) -> Tensor:
            if like.numel() != layout.numel:
                return codec.decode(payload, like)
            x = empty(like.numel(), like.dtype, like.device)
            for part, part_payload in zip(parts, payload, strict=True):
                part.decode(part_payload, x)
            return x

        return codec._replace(encode=encode, decode=decode, blockwise=None, payload_bytes=None, fit=None)

    return codec._replace(blockwise=None, fit=fit)
