"""Codecs that send a random choice of elements, which the receiver repeats from the key: randomk and cocktail."""

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gossamer.codecs.blocks import empty, num_blocks
from gossamer.codecs.codec import Codec
from gossamer.codecs.packing import num_bytes, pack_codes, unpack_codes
from gossamer.codecs.quantize import Block, Quantized, int4
from gossamer.codecs.topk import PerChunk, ValueFormat, fits_chunk, gather, num_kept, value_bytes, value_dtype
from gossamer.errors import TransportError
from gossamer.settings.options import factory

_KEY_BYTES = 8
Run = Annotated[int, Field(ge=1, le=1 << 16)]
_KEYS = 1 << 63


class Drawn(NamedTuple):
    """The key of the choice (int64, one element), and the chosen values."""

    key: Tensor
    values: Tensor


class Cocktail(NamedTuple):
    """The key of the choice (int64, one element), a mask of the chosen elements sent (packed bits), and their values in int4."""

    key: Tensor
    sent: Tensor
    values: Quantized


@factory
def randomk(one_in: Run = 64, scaled: bool = False, values: ValueFormat = "same") -> Codec:
    """Sends one element of every run of `one_in`, drawn from the key; the key replaces the indices.

    x' = x at the drawn place of each run, 0 elsewhere;   times `one_in` if scaled, which makes the mean of x' equal to x

    Every element is drawn with the same probability, none twice, and a shorter last run has its own draw and factor. Equal keys
    select the same places, so x' is linear in x (but for the rounding of "bf16", "fp16"). A NaN is sent if it is drawn.

    Args:
        one_in: the length m of a run.
        scaled: whether to multiply by m.
        values: the format of the values on the wire; "same" is that of the tensor.
    Cost: 8 bytes, and value bits / m per element: 0.5 bits for one fp32 value in 64.
    Source: random-k sparsification with a shared seed, Stich et al., arXiv 1809.07599; one per run is stratified.
    Fails when: scaled with a large m without error feedback: the squared error is m - 1 times that of sending nothing.

    >>> codec = randomk(one_in=2); x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> codec.decode(codec.encode(x, 1), x)
    tensor([0., 2., 0., 4., 5.])
    """

    def encode(x: Tensor, key: int) -> Drawn:
        return Drawn(_key(key, x), _chosen(x, one_in, key).to(value_dtype(values, x)))

    def decode(payload: Drawn, like: Tensor) -> Tensor:
        x = empty(like.numel(), like.dtype, like.device).zero_()
        drawn = payload.values.to(like.dtype)
        if scaled:
            factors = torch.full_like(drawn, one_in)
            factors[like.numel() // one_in :] = like.numel() % one_in
            drawn = drawn * factors
        x[_places(like, one_in, int(payload.key))] = drawn
        return x

    return Codec(
        encode,
        decode,
        draws=one_in > 1,
        unbiased=(scaled or one_in == 1) and values in ("same", "fp32"),
        linear=values in ("same", "fp32"),
        contraction=None if (scaled and one_in > 1) or values == "fp16" else (1 - 2**-16) / one_in,
        payload_bytes=lambda numel: _KEY_BYTES + num_blocks(numel, one_in) * value_bytes(values),
    )


@factory
def cocktail(one_in: Run = 10, k: PerChunk = 256, chunk: PerChunk = 1280, block: Block = 128) -> Codec:
    """Draws one element of every run, keeps the largest of the drawn, and sends those in four bits.

    d = the drawn elements, as in `randomk`;   K = the k largest |d| of every chunk of d
    x' = int4(d_K) at its places, 0 elsewhere;   K is sent as one bit for each element of d

    A NaN or an infinity, if drawn, is kept, and makes the elements that share its int4 block decode to NaN.

    Args:
        one_in: the length of a run, of which one element is drawn.
        k: kept elements of each chunk.
        chunk: drawn elements per chunk.
        block: kept elements per int4 scale.
    Cost: 8 bytes, and (1 + k / chunk (4 + 16 / block)) / one_in bits per element: 0.1825, 175 times less than fp32.
    Source: CocktailSGD, Wang et al., ICML 2023 (PMLR 202).
    Differs: the draw is one per run instead of every tenth element shifted by one each step, and differs between workers;
        int4 blocks lie next to each other instead of strided; top-k is taken per chunk. Error feedback is the rule's.
    Fails when: used without error feedback, as each message carries few elements; when k / chunk is below about 0.1 the mask
        of kept elements is most of the payload, and topk's indices are shorter.

    >>> codec = cocktail(one_in=1, k=1, chunk=3); x = torch.tensor([1.0, -7.0, 3.0, 0.0, 0.0, 2.0])
    >>> codec.decode(codec.encode(x, 0), x)
    tensor([ 0., -7.,  0.,  0.,  0.,  2.])
    """
    fits_chunk("cocktail", k, chunk)
    inner = int4(block)

    def encode(x: Tensor, key: int) -> Cocktail:
        drawn = _chosen(x, one_in, key).float()
        indices, kept = gather(drawn, k, chunk)
        sent = torch.zeros(drawn.numel(), dtype=torch.uint8, device=x.device)
        owner = torch.arange(kept.numel(), device=x.device) // k
        sent[owner * chunk + indices] = 1
        return Cocktail(_key(key, x), pack_codes(sent, 1), inner.encode(kept, key))

    def decode(payload: Cocktail, like: Tensor) -> Tensor:
        drawn = num_blocks(like.numel(), one_in)
        kept = num_kept(drawn, k, chunk)
        sent = unpack_codes(payload.sent, 1, drawn).nonzero().view(-1)
        if sent.numel() != kept:
            raise TransportError(
                f"a cocktail payload marks {sent.numel()} of {drawn} elements as sent, but has values for {kept}: the sender "
                "is faulty or runs another version, so stop it or install the same gossamer version everywhere"
            )
        x = empty(like.numel(), like.dtype, like.device).zero_()
        values = inner.decode(payload.values, empty(kept, torch.float32, like.device))
        x[_places(like, one_in, int(payload.key))[sent]] = values.to(like.dtype)
        return x

    def payload_bytes(numel: int) -> int:
        drawn = num_blocks(numel, one_in)
        assert inner.payload_bytes is not None
        return _KEY_BYTES + num_bytes(drawn, 1) + inner.payload_bytes(num_kept(drawn, k, chunk))

    assert inner.contraction is not None
    return Codec(
        encode,
        decode,
        draws=one_in > 1,
        contraction=inner.contraction * k / chunk / one_in,
        payload_bytes=payload_bytes,
    )


def _key(key: int, x: Tensor) -> Tensor:
    return torch.tensor([key % _KEYS], dtype=torch.int64).to(x.device)


def _places(x: Tensor, one_in: int, key: int) -> Tensor:
    """The place drawn in each run of `one_in` elements (int64, ascending), from the key and the length of x alone."""
    generator = torch.Generator().manual_seed(key % _KEYS)
    places = torch.arange(0, x.numel(), one_in)
    places += torch.randint(0, one_in, places.shape, generator=generator)
    rest = x.numel() % one_in
    if rest:
        places[-1:] = x.numel() - rest + torch.randint(0, rest, (1,), generator=generator)
    return places.to(x.device)


def _chosen(x: Tensor, one_in: int, key: int) -> Tensor:
    """The elements at those places; their number alone on the meta device."""
    return x.new_empty(num_blocks(x.numel(), one_in)) if x.is_meta else x[_places(x, one_in, key)]
