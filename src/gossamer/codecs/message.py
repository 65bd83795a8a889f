"""Messages through a codec: the payload of each tensor, and its bytes."""

import functools

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs import Codec, exact, fitted
from gossamer.errors import ConfigError, TransportError, first_line
from gossamer.finite import all_finite
from gossamer.tree import Tree, leaves, map_leaves, nbytes, refill


def encode(codec: Codec, message: Tree, key: int) -> Tree:
    """The payload of each tensor of a message, in a tuple parallel to its leaves.

    Raises: ConfigError for complex numbers, of which a codec would send the real parts.
    """
    if not codec.exact and (kinds := [leaf.dtype for leaf in leaves(message) if leaf.is_complex()]):
        raise ConfigError(
            f"codec '{codec.name}' got a message in {kinds[0]}, and sends real numbers; let the rule send "
            "torch.view_as_real(...), or use codec 'exact'"
        )
    return tuple(codec.encode(leaf, key + place) for place, leaf in enumerate(leaves(message)))


def decode(codec: Codec, payload: Tree, like: Tree) -> Tree:
    """The message whose tensors were encoded into this payload."""
    decoded = [codec.decode(part, leaf) for part, leaf in zip(payload, leaves(like), strict=True)]
    return refill(like, decoded)


def decode_received(codec: Codec, payload: Tree, like: Tree) -> Tree:
    """The message of another worker, from untrusted bytes.

    Raises: TransportError for one that no honest worker sends: it cannot be decoded, or has numbers that are not finite.

    >>> from gossamer.codecs import exact
    >>> decode_received(exact(), (torch.tensor([torch.nan]),), torch.zeros(1))
    Traceback (most recent call last):
        ...
    gossamer.errors.TransportError: its 1 numbers are not all finite
    """
    try:
        message = decode(codec, payload, like)
    except Exception as error:  # a codec, which may be the user's, meets bytes that its `encode` never makes
        raise TransportError(f"codec '{codec.name}' cannot decode it ({first_line(error)})") from error
    if not all_finite(message):
        raise TransportError(f"its {sum(leaf.numel() for leaf in leaves(message))} numbers are not all finite")
    return message


def payload_like(codec: Codec, like: Tree) -> Tree:
    """Shapes and dtypes of the payload of any message of this form, on the meta device."""
    return encode(codec, map_leaves(lambda t: torch.empty_like(t, device="meta"), like), 0)


def each_shape_once(codec: Codec) -> Codec:
    """A codec for tensors without data, whose payloads follow from the shape, made once for each."""
    made: dict[tuple[torch.Size, torch.dtype], Tree] = {}

    def encode(t: Tensor, key: int) -> Tree:
        if (t.shape, t.dtype) not in made:
            made[t.shape, t.dtype] = codec.encode(t, key)
        return made[t.shape, t.dtype]

    fit = codec.fit and functools.cache(lambda layout: each_shape_once(fitted(codec, layout)))
    return codec._replace(encode=encode, fit=fit, back=codec.back and each_shape_once(codec.back))


def round_trip(codec: Codec, message: Tree, *place: int, on: torch.device | None = None) -> tuple[Tree, int]:
    """The message as a receiver decodes it, and the bytes of the payload.

    Args:
        place: the seed, then worker, round and fragment; a codec that rounds at random is seeded by it.
        on: the device of a receiver that has another than the sender, such as a server on its host. One payload decoded on
            two kinds of devices can differ in the last bit.

    >>> from gossamer.codecs import bf16
    >>> round_trip(bf16(), torch.tensor([1.0, 1.001]), 0, 0, 0, 0)
    (tensor([1., 1.]), 4)
    """
    there = message if on is None else map_leaves(lambda t: t.to(on), message)
    if codec.exact:
        return there, nbytes(message)
    payload = encode(codec, message, rng.key(*place, "codec"))
    arrived = payload if on is None else map_leaves(lambda t: t.to(on), payload)
    return decode(codec, arrived, there), nbytes(payload)


def payload_bytes(codec: Codec, numel: int) -> int:
    """The bytes of the payload of an fp32 tensor.

    >>> payload_bytes(exact(), 1000)
    4000
    """
    if codec.payload_bytes is not None:
        return codec.payload_bytes(numel)
    return nbytes(payload_like(codec, torch.empty(numel, dtype=torch.float32, device="meta")))


def owners_share(codec: Codec, numel: int) -> float:
    """The share of the bytes a worker sends in an all-to-all mean that goes to chunk owners; the rest are its sums.

    >>> from gossamer.codecs import bf16, both_ways
    >>> owners_share(exact(), 1000), round(owners_share(both_ways(bf16(), exact()), 1000), 3)
    (0.5, 0.333)
    """
    there, back = payload_bytes(codec, numel), payload_bytes(codec.back or exact(), numel)
    return there / (there + back)
