"""The wire format: a header of fixed size, and the frames of one message as one flat buffer of bytes.

Both come from another machine and are untrusted: sizes are bounded and compared with the announced ones, and nothing is
ever unpickled.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from gossamer.errors import PeerError, TransportError
from gossamer.rng import key
from gossamer.transport.contract import WIRE_VERSION, Ticket

MAGIC = b"GOSS"
VERSION = WIRE_VERSION
ALIGN = 16
"""Each frame starts at a multiple of this many bytes: the widest dtype, so that frames can be views."""
LIMIT_BYTES = 1 << 36
"""No message may be larger than 64 GiB."""

_LAYOUT = struct.Struct("<4sHHQQIIIQQ")
_CHECKED = 1
HEADER_BYTES = _LAYOUT.size


class Header(NamedTuple):
    """The header of a message, sent before its payload."""

    run: int
    """64-bit digest of the run's configuration: messages of another run or model are refused."""
    ticket: Ticket
    sender: int
    payload_bytes: int
    checksum: int | None = None
    """Checksum of the payload, if any; only measurements of links omit it."""


def encode_header(header: Header) -> bytes:
    """The header as `HEADER_BYTES` bytes, little-endian.

    >>> decode_header(encode_header(Header(run=7, ticket=Ticket(3, 1), sender=2, payload_bytes=64)), sender=2)
    Header(run=7, ticket=Ticket(round=3, fragment=1, leg=0), sender=2, payload_bytes=64, checksum=None)
    """
    run, ticket, sender, payload_bytes, crc = header
    flags = 0 if crc is None else _CHECKED
    return _LAYOUT.pack(MAGIC, VERSION, flags, run, *ticket, sender, crc or 0, payload_bytes)


def decode_header(raw: bytes, sender: int) -> Header:
    """Reads a header that came over the connection with `sender`.

    Raises: TransportError when the bytes are not a header of this version.
    """
    magic, version, flags, run, first, second, third, claimed, crc, payload_bytes = _LAYOUT.unpack(raw)
    if magic != MAGIC:
        raise TransportError(
            f"worker {sender} sent a message that starts with {magic!r} where {MAGIC!r} was expected; "
            "another program uses this connection; choose another port"
        )
    if version != VERSION or flags & ~_CHECKED:
        raise PeerError(
            f"worker {sender} sent version {version} (flags {flags:#x}) of the wire format and this one has version {VERSION}; "
            "install the same gossamer version on all machines"
        )
    return Header(run, Ticket(first, second, third), claimed, payload_bytes, crc if flags & _CHECKED else None)


def check_header(header: Header, expected: Header) -> None:
    """Compares a header with the expected one; for `expected.checksum`, only its presence.

    Raises: PeerError when run, sender or use of checksums differ, TransportError when ticket or size do.
    """
    peer = expected.sender
    if header.run != expected.run:
        raise PeerError(
            f"worker {peer} runs configuration {header.run:016x} and this worker {expected.run:016x}; "
            "start all workers with the same run file, data and gossamer"
        )
    if header.sender != peer:
        raise PeerError(
            f"worker {peer} calls itself worker {header.sender}; its RANK was changed after it joined, start the run again"
        )
    if header.ticket != expected.ticket:
        raise TransportError(
            f"worker {peer} sent {header.ticket} where {expected.ticket} was expected; "
            "all workers must follow the same schedule and topology"
        )
    if header.payload_bytes != expected.payload_bytes:
        raise TransportError(
            f"worker {peer} sent {header.payload_bytes} bytes in {header.ticket} where {expected.payload_bytes} were expected; "
            "all workers must run the same rule, codec and model"
        )
    if (header.checksum is None) != (expected.checksum is None):
        has, wants = ("no checksum", "one") if header.checksum is None else ("a checksum", "none")
        raise PeerError(
            f"worker {peer} sent {has} where this worker expects {wants}; install the same gossamer version on all machines"
        )


def checksum(payload: Tensor) -> int:
    """A 64-bit XXH3 checksum of a flat uint8 buffer, against faulty memory and networks, not attackers.

    Cost: one pass at memory speed, without the interpreter's lock; a copy of a buffer on another device.

    >>> a = torch.arange(1 << 18).view(torch.uint8)
    >>> b = a.clone()
    >>> b[1 << 20] ^= 16
    >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(b)
    (True, False)
    """
    return xxh3_64_intdigest(on_host(payload).numpy().data)


@functools.lru_cache(1 << 10)
def tags(run: int, ticket: Ticket, payload_bytes: int, part: int = 0) -> tuple[int, int]:
    """The 31-bit tags under which header and payload travel.

    Two workers in one piece whose peers are in stages exchange the parts of all stages between the same two processes,
    each under separate tags.

    The payload's tag depends on its size and the run: gloo ends a process that receives more bytes than it has allocated, so
    a payload must never meet the wrong receive. The header's tag does not, so that a mismatch is found in the header.

    >>> a, b = tags(7, Ticket(3), 64), tags(7, Ticket(3), 65)
    >>> a[0] == b[0], a[1] == b[1]
    (True, False)
    """
    return key(part, *ticket) >> 32, key(run, part, *ticket, payload_bytes) >> 32


def frames_bytes(frames: Sequence[Tensor]) -> int:
    """The size of `pack_frames(frames)`.

    Raises: TransportError beyond `LIMIT_BYTES`.

    >>> frames_bytes([torch.empty(3), torch.empty(5, dtype=torch.uint8)])
    21
    """
    return _places(frames)[1]


def pack_frames(frames: Sequence[Tensor], allocate: Callable[[int], Tensor] | None = None) -> Tensor:
    """The frames as one flat uint8 buffer, each starting at a multiple of `ALIGN`.

    Args: `allocate` returns uninitialised uint8 memory of a given size; on the device of the frames when None.
    Raises: TransportError beyond `LIMIT_BYTES`.
    Cost: none for a single contiguous frame, which is viewed; one copy of the message otherwise.
    """
    places, size = _places(frames)
    if not frames:
        return torch.empty(0, dtype=torch.uint8)
    if len(frames) == 1:
        return frames[0].reshape(-1).view(torch.uint8)
    packed = allocate(size) if allocate else torch.empty(size, dtype=torch.uint8, device=frames[0].device)
    filled = 0
    for frame, (start, stop) in zip(frames, places, strict=True):
        packed[filled:start].zero_()  # old memory contents must not leave this machine
        packed[start:stop].copy_(frame.reshape(-1).view(torch.uint8))
        filled = stop
    return packed


def host_memory(size: int, device: torch.device) -> Tensor:
    """Uninitialised memory of the host for bytes that go to this device or come from it; torch keeps it for later messages.

    For a GPU it is pinned: copies took a quarter of the time (H100: 54 GB/s each way, instead of 15 and 8).
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def on_host(packed: Tensor) -> Tensor:
    """A flat uint8 buffer in memory of the host: itself, or a copy of one on another device."""
    return packed if packed.is_cpu else host_memory(packed.numel(), packed.device).copy_(packed)


def unpack_frames(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The frames of a buffer made by `pack_frames`, as views with the shapes and dtypes of `like` (which may be meta tensors).

    >>> frames = [torch.tensor([1, 2], dtype=torch.int64), torch.tensor(0.5, dtype=torch.bfloat16)]
    >>> unpack_frames(pack_frames(frames), frames)
    [tensor([1, 2]), tensor(0.5000, dtype=torch.bfloat16)]
    """
    places, size = _places(like)
    assert packed.dtype == torch.uint8 and packed.shape == (size,), (packed.dtype, packed.shape, size)
    frames: list[Tensor] = []
    for frame, (start, stop) in zip(like, places, strict=True):
        part = packed[start:stop]
        if part.storage_offset() % frame.element_size():
            part = part.clone()  # a buffer at an unaligned offset of its storage cannot be viewed
        frames.append(part.view(frame.dtype).view(frame.shape))
    return frames


def _places(frames: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Where each frame starts and stops in the packed buffer, and its size."""
    places: list[tuple[int, int]] = []
    stop = 0
    for frame in frames:
        start = -(-stop // ALIGN) * ALIGN
        stop = start + frame.numel() * frame.element_size()
        places.append((start, stop))
    if stop > LIMIT_BYTES:
        raise TransportError(
            f"a message of {stop} bytes is larger than {LIMIT_BYTES}; cut the model into more fragments"
        )
    return places, stop
