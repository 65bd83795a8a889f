"""Dense packing of numbers of 1 to 8 and of 12 bits; the first number in the lowest bits, on little-endian machines.

Codes that divide a byte are packed by folding: the codes of one output byte, one per byte at first, are read as one
integer and shifted onto each other, twice as many in every fold. That is a few vectorised passes, whatever the number
of bits. Of other codes eight make one integer, of which as many bytes are kept as a code has bits.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
_SPREAD = {
    4: ((4, 0x0F0F),),
    2: ((12, 0x000F000F), (6, 0x03030303)),
    1: ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101)),
}


def num_bytes(numel: int, bits: int) -> int:
    """The bytes of `numel` packed numbers of this many bits.

    >>> num_bytes(5, 4), num_bytes(3, 12)
    (3, 5)
    """
    return -(-numel * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Flat uint8 codes below 2**bits as flat bytes, for 1 to 8 bits; unused bits of the last byte are zero.

    >>> pack_codes(torch.tensor([1, 2, 15], dtype=torch.uint8), 4).tolist()
    [33, 15]
    >>> pack_codes(torch.tensor([1, 7, 7], dtype=torch.uint8), 3).tolist()
    [249, 1]
    """
    if bits == 8:
        return codes
    if bits not in _WORDS:
        octets = pad(codes, (0, -codes.numel() % 8)).view(-1, 8).long()
        words = (octets << _bit_offsets(bits, codes.device)).sum(1)  # their bits do not overlap
        return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: num_bytes(codes.numel(), bits)]
    gap = -codes.numel() % (8 // bits)
    word = (pad(codes, (0, gap)) if gap else codes).view(_WORDS[bits])
    for shift, _ in reversed(_SPREAD[bits]):
        word = word | word >> shift
    return word.to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The `numel` uint8 codes in these bytes.

    >>> unpack_codes(torch.tensor([33, 15], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 15]
    """
    if bits == 8:
        return packed[:numel]
    if bits not in _WORDS:
        words = pad(pad(packed, (0, -packed.numel() % bits)).view(-1, bits), (0, 8 - bits)).view(torch.int64)
        return ((words >> _bit_offsets(bits, packed.device)) & (1 << bits) - 1).to(torch.uint8).view(-1)[:numel]
    word = packed.to(_WORDS[bits])
    for shift, mask in _SPREAD[bits]:
        word = (word | word << shift) & mask
    return word.view(torch.uint8)[:numel]


def _bit_offsets(bits: int, device: torch.device) -> Tensor:
    """The lowest bit of each of eight codes in one integer."""
    return torch.arange(0, 8 * bits, bits, device=device)


def lookup(packed: Tensor, bits: int, levels: tuple[float, ...]) -> Tensor:
    """The fp32 value of every code in these bytes, those in unused bits included; `levels` has the 2**bits values.

    >>> lookup(torch.tensor([0b1001], dtype=torch.uint8), 4, tuple(range(16))).tolist()
    [9.0, 0.0]
    """
    return _byte_table(bits, levels, packed.device).index_select(0, packed.int()).view(torch.float32).view(-1)


@functools.cache
def _byte_table(bits: int, levels: tuple[float, ...], device: torch.device) -> Tensor:
    """The values in each of the 256 bytes: `[256, 8 / bits]` fp32."""
    every_byte = torch.arange(256, dtype=torch.uint8)
    codes = unpack_codes(every_byte, bits, 256 * 8 // bits).long()
    table = torch.tensor(levels, dtype=torch.float32)[codes].view(256, -1).to(device)
    # Two fp32 move as one fp64, which is three times as fast as rows of two; no arithmetic is done on it.
    return table.view(torch.float64).view(256) if bits == 4 else table


def pack_indices(indices: Tensor) -> Tensor:
    """Flat indices below 4096 as flat bytes, two in three bytes.

    >>> pack_indices(torch.tensor([1, 4095, 2])).tolist()
    [1, 240, 255, 2, 0]
    """
    pairs = pad(indices, (0, indices.numel() % 2)).view(-1, 2).int()
    words = pairs[:, 0] | pairs[:, 1] << 12
    return words.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)[: num_bytes(indices.numel(), 12)]


def unpack_indices(packed: Tensor, numel: int) -> Tensor:
    """The `numel` int64 indices in these bytes.

    >>> unpack_indices(torch.tensor([1, 240, 255, 2, 0], dtype=torch.uint8), 3).tolist()
    [1, 4095, 2]
    """
    low, middle, high = pad(packed, (0, -packed.numel() % 3)).view(-1, 3).int().unbind(1)
    words = low | middle << 8 | high << 16
    return torch.stack((words & 4095, words >> 12), 1).view(-1)[:numel].long()
