"""Codecs that send every element as a float: `exact`, which changes nothing, and narrower formats."""

import torch
from torch import Tensor

from gossamer.codecs.blocks import empty
from gossamer.codecs.codec import Codec
from gossamer.settings.options import factory


@factory
def bf16() -> Codec:
    """Sends every element in bf16: x' = round(x) to 8 significant bits, |x - x'| <= 2⁻⁸ |x|.

    NaN and infinities arrive as they are; so does an element that already is bf16.

    Cost: 16 bits per element.
    Fails when: differences below 0.4 % of an element matter; use it on pseudo-gradients rather than on parameters.

    >>> codec = bf16(); x = torch.tensor([1.0, 0.3])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([1.0000, 0.3008])
    """
    return _cast(torch.bfloat16, contraction=1 - 2**-16)


@factory
def fp16() -> Codec:
    """Sends every element in fp16: x' = round(x) to 11 significant bits, |x - x'| <= 2⁻¹¹ |x| from 6.1e-5 to 65504.

    NaN and infinities arrive as they are; magnitudes beyond 65504 arrive as infinities.

    Cost: 16 bits per element.
    Source: the outer all-reduce of OpenDiLoCo, arXiv 2407.07852.
    Fails when: elements are small: below 6.1e-5 the spacing stays at 6e-8, so that pseudo-gradients of a low learning rate
        lose their last bits, and below 3e-8 everything. Hence no contraction; bf16 has one.

    >>> codec = fp16(); x = torch.tensor([0.3, 1e-8, 1e6])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([0.3000, 0.0000,    inf])
    """
    return _cast(torch.float16, contraction=None)


def _cast(dtype: torch.dtype, contraction: float | None) -> Codec:
    return Codec(
        lambda x, key: _as(x, dtype),
        lambda payload, like: _as(payload, like.dtype),
        contraction=contraction,
        blockwise=1,
        payload_bytes=lambda numel: 2 * numel,
    )


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else empty(x.numel(), dtype, x.device).copy_(x)


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
