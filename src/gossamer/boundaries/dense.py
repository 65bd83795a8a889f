"""Boundary codecs that send every element as a float."""

import math
from typing import Literal

import torch
from torch import Tensor

from gossamer.boundaries.contract import Boundary, in_pieces, join
from gossamer.settings.options import factory


@factory
def dense() -> Boundary:
    """Sends every element as it is.

    Cost: 4 bytes per element of fp32.

    >>> boundary = dense(); h = torch.ones(1, 2, 3)
    >>> boundary.encode(h).numel(), torch.equal(boundary.decode(boundary.encode(h), h), h)
    (24, True)
    """

    def decode(payload: Tensor, like: Tensor) -> Tensor:
        (own,) = in_pieces(payload, like.numel() * like.element_size())
        return own.view(like.dtype).view(like.shape)

    return Boundary(join, decode, lambda shape: 4 * math.prod(shape), exact=True)


@factory
def cast(dtype: Literal["bf16", "fp16"] = "bf16") -> Boundary:
    """Sends every element in a narrower float format; see `gossamer.codecs.bf16` and `gossamer.codecs.fp16`.

    Args:
        dtype: the format; fp16 turns magnitudes beyond 65504 into infinities, and gradients below 3e-8 into zero.
    Cost: 2 bytes per element.

    >>> boundary = cast(); h = torch.tensor([[[1.0, 0.3]]])
    >>> boundary.decode(boundary.encode(h), h)
    tensor([[[1.0000, 0.3008]]])
    """
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    def decode(payload: Tensor, like: Tensor) -> Tensor:
        (own,) = in_pieces(payload, 2 * like.numel())
        return own.view(narrow).view(like.shape).to(like.dtype)

    return Boundary(lambda h: join(h.to(narrow)), decode, lambda shape: 2 * math.prod(shape))
