"""Codecs that send the largest elements of every chunk and their indices: topk, and topk2bit with two-bit values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.codecs import cut
from gossamer.codecs.blocks import empty, num_blocks, storable
from gossamer.codecs.codec import Codec
from gossamer.codecs.cut import Cut
from gossamer.codecs.packing import num_bytes, pack_codes, pack_indices, unpack_codes, unpack_indices
from gossamer.codecs.passes import passes_for
from gossamer.errors import TransportError
from gossamer.layout import Layout
from gossamer.settings.options import check_option, factory
from gossamer.tree import nbytes

LARGEST_CHUNK = 4096  # the range of an index of 12 bits
PerChunk = Annotated[int, Field(ge=1, le=LARGEST_CHUNK)]

ValueFormat = Literal["same", "fp32", "bf16", "fp16"]
_LLOYD_STEPS = 4  # on Gaussian data one step is enough; the tails of Student's t with 3 degrees still gain a third
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Kept(NamedTuple):
    """Indices of the kept elements in their chunks (12 bits each, packed to uint8), and their values."""

    indices: Tensor
    values: Tensor


class KeptCoarsely(NamedTuple):
    """As `Kept`, with a packed code of 2 bits for each value and two bf16 magnitudes for each chunk."""

    indices: Tensor
    codes: Tensor
    magnitudes: Tensor


@factory
def topk(k: PerChunk = 64, chunk: PerChunk = 4096, values: ValueFormat = "same") -> Codec:
    """Sends the k largest elements of every chunk and their indices; all others decode to zero.

    K = the k elements of the chunk with the largest |x|;   x' = x on K, 0 elsewhere

    Of equal magnitudes the first are kept, and indices are sent in ascending order, so equal tensors give equal payloads.
    A shorter last chunk of r elements keeps ⌈k r / chunk⌉. A NaN counts as larger than every number, and is sent.

    Args:
        k: kept elements of a chunk.
        chunk: elements of a chunk.
        values: the format of the values on the wire; "same" is that of the tensor.
    Cost: k (12 + value bits) / chunk bits per element: 0.69 for 64 of 4096 fp32 values, 0.44 in bf16. Relative error 94 %
        on Gaussian data, less on heavier tails.
    Source: the chunked top-k of DeMo, arXiv 2411.19870, and SparseLoCo, arXiv 2508.15706, without their other parts.
    Differs: chunks are runs of the flat vector rather than tiles of a matrix.
    Fails when: used without error feedback, as the other elements are never sent; or with "fp16" and magnitudes beyond 65504
        (sent as infinity) or below 6e-5 (with few bits or none).

    >>> codec = topk(k=2, chunk=4); x = torch.tensor([1.0, -3.0, 1.0, 0.5, 2.0])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([ 1., -3.,  0.,  0.,  2.])
    """
    fits_chunk("topk", k, chunk)

    def encode(x: Tensor, key: int) -> Kept:
        indices, kept = gather(x, k, chunk)
        return Kept(pack_indices(indices), kept.to(value_dtype(values, x)))

    def decode(payload: Kept, like: Tensor) -> Tensor:
        return place(unpack_indices(payload.indices, num_kept(like.numel(), k, chunk)), payload.values, like, k, chunk)

    def payload_bytes(numel: int) -> int:
        kept = num_kept(numel, k, chunk)
        return num_bytes(kept, 12) + kept * value_bytes(values)

    return Codec(
        encode,
        decode,
        contraction=None if values == "fp16" else k / chunk * (1 - 2**-16),
        blockwise=chunk,
        payload_bytes=payload_bytes,
    )


@factory
def topk2bit(k: PerChunk = 64, chunk: PerChunk = 4096, tiles: bool = True) -> Codec:
    """Sends the k largest elements of every chunk as one of four values -c₂, -c₁, c₁, c₂ that fit the chunk best.

    K = the k elements of the chunk with the largest |x|;   x' = sign(x) c(|x|) on K, 0 elsewhere
    c₁, c₂ = mean of the smaller and of the larger |x| on K, split by Lloyd's iteration from their mean

    Ties are handled as in `topk`, and chunks of r < `chunk` elements keep ⌈k r / chunk⌉. A NaN or an infinity makes all kept
    elements of its chunk decode to NaN.

    Args:
        k: kept elements of a chunk.
        chunk: elements of a chunk.
        tiles: whether chunks are tiles of a matrix, 64 x 64 of 4096 elements, and smaller ones at its edges, and runs of one
            vector such as a bias; or runs of the flat vector, across tensors. Anything but a whole fragment is cut in runs.
    Cost: 14 k + 32 bits per chunk: 14 bits per kept value and two bf16 magnitudes. For 64 of 4096 that is 0.2266 bits per
        element, 141 times less than fp32, and a little more with edges. Relative error of the kept values 6 % on Gaussian data.
    Source: SparseLoCo, arXiv 2508.15706; 12-bit places and 2-bit values as in its public implementation.
    Differs: four levels symmetric about zero for each chunk, where SparseLoCo has four bins of 1.5 σ around the mean of a
        tensor, of which kept values hit two.
    Fails when: used without error feedback, as the other elements are never sent.

    >>> codec = topk2bit(k=3, chunk=8); x = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.5, 4.0, 0.0, 0.0])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([ 0.,  1.,  0., -1.,  0.,  4.,  0.,  0.])
    """
    fits_chunk("topk2bit", k, chunk)
    in_runs = _two_bits(lambda numel: cut.vector_cut(numel, chunk), k, chunk)._replace(blockwise=chunk)
    if not tiles:
        return in_runs

    def fit(layout: Layout) -> Codec:
        whole = cut.tiles(layout, chunk)
        return _two_bits(lambda numel: whole if numel == whole.numel else cut.vector_cut(numel, chunk), k, chunk)

    return in_runs._replace(fit=fit)


def _two_bits(cut_of: Callable[[int], Cut], k: int, chunk: int) -> Codec:
    """The codec `topk2bit` on tensors that are cut in this way."""

    def encode(x: Tensor, key: int) -> KeptCoarsely:
        plan = cut_of(x.numel())
        sizes = plan.kept(k, chunk)
        if x.is_meta:
            return _form(sizes)
        indices, kept = _gather(x, plan, k, chunk)
        parts = kept.split([count * size for count, size in sizes])
        rows = [part.view(-1, size) for part, (_, size) in zip(parts, sizes, strict=True)] or [kept.view(0, 1)]
        codes, magnitudes = (
            torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*map(_two_levels, rows), strict=True)
        )
        return KeptCoarsely(pack_indices(indices), pack_codes(codes, 2), magnitudes)

    def decode(payload: KeptCoarsely, like: Tensor) -> Tensor:
        plan = cut_of(like.numel())
        sizes = plan.kept(k, chunk)
        codes = unpack_codes(payload.codes, 2, _total(sizes)).int()
        magnitudes = [
            each.repeat_interleave(size, 0)
            for each, (_, size) in zip(
                payload.magnitudes.float().view(-1, 2).split([count for count, _ in sizes]), sizes, strict=True
            )
        ]
        pairs = torch.cat(magnitudes) if magnitudes else payload.magnitudes.float().view(0, 2)
        values = pairs.gather(1, (codes & 1).long()[:, None]).view(-1)
        values = torch.where(codes > 1, -values, values)
        return _place(unpack_indices(payload.indices, _total(sizes)), values, like, plan, k, chunk)

    def payload_bytes(numel: int) -> int:
        return nbytes(_form(cut_of(numel).kept(k, chunk)))

    # What arrives of a chunk is its projection on the groups: at least (Σ_K |x|)² / k of ||x||², which is least for k
    # equal elements above equal others, k / chunk, or for a single one, 1 / k. The last factor rounds c₁ and c₂ to bf16.
    return Codec(encode, decode, contraction=min(k / chunk, 1 / k) * (1 - 2**-16), payload_bytes=payload_bytes)


def _form(sizes: Sequence[tuple[int, int]]) -> KeptCoarsely:
    """Shapes and dtypes of a payload; to find them by encoding without data takes longer than to encode a small model."""

    def empty(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    indices, codes = (empty(num_bytes(_total(sizes), bits)) for bits in (12, 2))
    return KeptCoarsely(indices, codes, empty(2 * sum(count for count, _ in sizes), torch.bfloat16))


def fits_chunk(codec: str, k: int, chunk: int) -> None:
    """Raises ConfigError for a codec that is to keep more elements of a chunk than it has."""
    check_option(f"codec '{codec}'", "k", k, Annotated[int, Field(ge=1, le=chunk)])


def num_kept(numel: int, k: int, chunk: int) -> int:
    """The number of kept elements of `numel`."""
    return numel // chunk * k + num_blocks(numel % chunk * k, chunk)


def value_dtype(values: ValueFormat, x: Tensor) -> torch.dtype:
    """The dtype in which values of x go over the wire."""
    return x.dtype if values == "same" else _DTYPES[values]


def value_bytes(values: ValueFormat) -> int:
    """Bytes of a value of an fp32 tensor on the wire."""
    return 4 if values == "same" else _DTYPES[values].itemsize


def gather(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """The places in their chunks (int16) and the values of the k largest elements of every chunk, flat and in order."""
    return _gather(x, cut.vector_cut(x.numel(), chunk), k, chunk)


def place(indices: Tensor, values: Tensor, like: Tensor, k: int, chunk: int) -> Tensor:
    """The inverse of `gather` on a tensor of zeros. Raises TransportError for an index outside its chunk."""
    return _place(indices, values, like, cut.vector_cut(like.numel(), chunk), k, chunk)


def _gather(x: Tensor, plan: Cut, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    total, start = _total(plan.kept(k, chunk)), 0
    indices = torch.empty(total, dtype=torch.int16, device=x.device)
    values = torch.empty(total, dtype=x.dtype, device=x.device)
    for view in plan.views(x):
        rows = view.flatten(2).flatten(0, 1)
        count = num_blocks(rows.shape[1] * k, chunk)
        here = slice(start, start := start + rows.shape[0] * count)
        if (passes := passes_for(rows)) is not None:
            passes("select_largest", rows, *rows.shape, count, indices[here], values[here])
            continue
        largest = _largest(rows, count)
        indices[here] = largest.view(-1)
        values[here] = rows.gather(1, largest).view(-1)
    return indices, values


def _place(indices: Tensor, values: Tensor, like: Tensor, plan: Cut, k: int, chunk: int) -> Tensor:
    x, start = empty(like.numel(), like.dtype, like.device).zero_(), 0
    for view in plan.views(x):
        rows = view.flatten(2).flatten(0, 1)  # of tiles a copy, and zeros as x is
        shape = rows.shape[0], num_blocks(rows.shape[1] * k, chunk)
        here = slice(start, start := start + shape[0] * shape[1])
        _check_indices(indices[here], rows.shape[1])
        rows.scatter_(1, indices[here].view(shape), values[here].view(shape).to(x.dtype))
        if rows.data_ptr() != view.data_ptr():
            view.copy_(rows.view(view.shape))
    return x


def _total(sizes: Iterable[tuple[int, int]]) -> int:
    return sum(count * size for count, size in sizes)


def _check_indices(indices: Tensor, length: int) -> None:
    """Raises TransportError if an index from a peer is outside a chunk of this length."""
    if indices.numel() and int(indices.max()) >= length:
        raise TransportError(
            f"a top-k payload points at element {int(indices.max())} of a chunk of {length}; only 0 to {length - 1} exist"
        )


def _largest(rows: Tensor, k: int) -> Tensor:
    """The places of the k largest magnitudes in each row, ascending; of equal ones the first."""
    backwards = (LARGEST_CHUNK - 1) - torch.arange(rows.shape[1], device=rows.device)
    # As integers, the bits of magnitudes are ordered as the magnitudes, NaN last. With the place below them no two are equal.
    ranks = rows.float().abs().view(torch.int32).long() << 12 | backwards
    best = ranks.topk(k, dim=1, sorted=False).values
    return ((LARGEST_CHUNK - 1) - (best & (LARGEST_CHUNK - 1))).sort(dim=1).values


def _two_levels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (1: the larger magnitude, 2: negative; uint8) and the two magnitudes (bf16 `[rows, 2]`) for rows of values."""
    size = values.float().abs()
    border = size.mean(1, keepdim=True)
    for _ in range(_LLOYD_STEPS):
        border = _group_means(size, size > border).mean(1, keepdim=True)
    high = size > border
    return high.to(torch.uint8) | (values < 0).to(torch.uint8) << 1, storable(_group_means(size, high))


def _group_means(size: Tensor, high: Tensor) -> Tensor:
    """The mean of each row outside and inside of `high`; a group without members has the mean of the other."""
    groups = torch.stack((~high, high), 1)
    means = (size[:, None] * groups).sum(2) / groups.sum(2)
    return torch.where(groups.any(2), means, means.flip(1))
