"""Tensors in pieces that stay in the cache while several elementwise operations pass over them."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["pieces"]

PIECE = 1 << 15  # of one thread; torch gives a thread no less


def pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Views of the same elements of tensors of one shape, piece by piece.

    The whole tensors on a GPU, where each piece would be another kernel to start, and where their memory is not in one run.

    >>> sum(a.numel() for a, b in pieces(torch.ones(2, 20_000), torch.ones(2, 20_000)))
    40000
    """
    if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors):
        return zip(*(t.view(-1).split(PIECE * torch.get_num_threads()) for t in tensors), strict=True)
    return [tensors]
