"""The boundary codec `projection`: the few coordinates of hidden states in a fixed random subspace."""

from functools import lru_cache
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gossamer.boundaries.contract import Boundary, in_pieces, join
from gossamer.settings.options import Count, factory


@factory
def projection(width: Count = 8, seed: Annotated[int, Field(ge=0, lt=2**63)] = 0) -> Boundary:
    """Sends the coordinates of every token in a subspace that all stages know; the rest is lost.

    c = U^T h;   h' = U c,   with U `[D, width]` orthonormal, drawn from the seed once and for all

    Args:
        width: of the subspace, at most the hidden size.
        seed: of U.
    Cost: 32 width / D bits per element: 4 for 8 of 64 channels; forward, also what embeddings have outside of U, V · D fp32
        per boundary and local phase.
    Source: the boundaries of compressed replicas in heterogeneous SparseLoCo, arXiv 2601.02360, after a third party's code: the
        paper was not readable.
    Differs: forward, the embeddings are taken off before and put on after, as far as they lie outside of U. The authors store
        a table in two parts, TS inside of U and the rest, and move what TS has outside of U to the rest after each outer step;
        here the table is stored whole, and split again at the start of each local phase, which is the same split.
    Fails when: layers write far outside of U, as nothing keeps them in it: choose a large width, give few workers such a
        boundary (`pipeline.workers`), or train a model that is narrow at its cuts (`model.bottleneck`).

    >>> boundary = projection(width=2); h = torch.ones(1, 1, 4)
    >>> once = boundary.decode(boundary.encode(h), h)
    >>> bool((boundary.decode(boundary.encode(once), once) - once).abs().max() < 1e-6)
    True
    """

    def encode(h: Tensor) -> Tensor:
        return join(h.float() @ _basis(h.shape[-1], width, seed).to(h.device))

    def decode(payload: Tensor, like: Tensor) -> Tensor:
        (own,) = in_pieces(payload, 4 * width * (like.numel() // like.shape[-1]))
        coordinates = own.view(torch.float32).view(*like.shape[:-1], width)
        return (coordinates @ _basis(like.shape[-1], width, seed).T.to(like.device)).to(like.dtype)

    def most_bytes(shape: tuple[int, int, int]) -> int:
        return 4 * width * shape[0] * shape[1]

    return Boundary(encode, decode, most_bytes, linear=True)


@lru_cache(maxsize=8)
def _basis(size: int, width: int, seed: int) -> Tensor:
    """U: `[size, width]`."""
    draws = torch.randn(size, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(draws)[0].float().contiguous()
