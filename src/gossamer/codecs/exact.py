"""The codec that changes nothing."""

from gossamer.codecs.codec import Codec
from gossamer.settings.options import factory

__all__ = ["EXACT", "exact"]


@factory
def exact() -> Codec:
    """Sends every element as it is: `decode(encode(x)) = x`.

    Cost: the bytes of the tensor, 32 bits per fp32 element; no copy.
    Fails when: a link is slow: nothing is saved.

    >>> import torch
    >>> codec = exact(); x = torch.ones(3)
    >>> codec.decode(codec.encode(x, 0), x) is x
    True
    """
    return Codec(
        lambda x, key: x,
        lambda payload, like: payload,
        exact=True,
        unbiased=True,
        linear=True,
        contraction=1.0,
        blockwise=1,
        payload_bytes=lambda numel: 4 * numel,
    )


EXACT = exact()
"""The one of every message that names none: to make another takes longer than to send a small one."""
