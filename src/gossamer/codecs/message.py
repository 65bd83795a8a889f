"""A message through a codec: the payload of each of its tensors."""

from gossamer.codecs import Codec
from gossamer.tree import Tree, leaves, refill

__all__ = ["decode", "encode"]


def encode(codec: Codec, message: Tree, key: int) -> Tree:
    """The payload of each tensor of a message, in a tuple parallel to its leaves."""
    return tuple(codec.encode(leaf, key + place) for place, leaf in enumerate(leaves(message)))


def decode(codec: Codec, payload: Tree, like: Tree) -> Tree:
    """The message whose tensors were encoded into this payload."""
    decoded = [codec.decode(part, leaf) for part, leaf in zip(payload, leaves(like), strict=True)]
    return refill(like, decoded)
