"""Letters between processes of a run: a header of fixed size (`gossamer.transport.sockets.header`), and a body.

The reader bounds the body by the header before any memory is allocated, and nothing is ever unpickled.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import RefusedError
from gossamer.transport import wire
from gossamer.transport.contract import Ticket
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.header import HEADER_BYTES, NO_TICKET, LetterHead, LetterKind, Limits, decode
from gossamer.transport.sockets.header import encode as encode_header

_EMPTY = torch.empty(0, dtype=torch.uint8)


def fresh_memory(size: int) -> Tensor:
    """An uninitialised uint8 buffer of this many bytes."""
    return torch.empty(size, dtype=torch.uint8)


class Letter(NamedTuple):
    """One letter; its fields but the body are those of `LetterHead`."""

    kind: LetterKind
    sender: int
    ticket: Ticket = NO_TICKET
    view: int = 0
    round: int = 0
    steps: int = 0
    body: Tensor = _EMPTY
    """Flat uint8."""

    @property
    def content(self) -> bytes:
        """The body as bytes."""
        return self.body.numpy().tobytes()


def body_of(content: bytes) -> Tensor:
    """Bytes as the body of a letter."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _EMPTY


def encode(letter: Letter, run: int) -> bytes:
    """The header of a letter; its body follows unchanged."""
    kind, sender, ticket, view, round, steps, body = letter
    check = wire.checksum(body) if body.numel() else 0
    return encode_header(LetterHead(kind, sender, ticket, view, round, steps, body.numel(), check), run)


def send_letter(channel: Channel, letter: Letter, run: int) -> None:
    """Sends a letter. Raises: OSError."""
    channel.write(encode(letter, run))
    channel.write(letter.body.numpy().data)


def receive_letter(
    channel: Channel,
    run: int,
    limits: Limits,
    accepts: Callable[[Letter, int], bool],
    *,
    idle: bool = False,
    deadline: float | None = None,
    memory: Callable[[int], Tensor] = fresh_memory,
) -> Letter:
    """The next letter.

    Args:
        accepts: whether a body of this size may follow a header.
        idle: allows unlimited silence before a letter begins.
        deadline: on the clock of `time.monotonic`, for the whole letter.
        memory: allocates the body.
    Raises: OSError when the connection is lost or stalls, TransportError for an invalid letter, RefusedError for one
        out of bounds.
    """
    raw = bytearray(HEADER_BYTES)
    channel.read_into(memoryview(raw), deadline, idle=idle)
    kind, sender, ticket, view, round, steps, size, check = decode(bytes(raw), run, limits)
    letter = Letter(kind, sender, ticket, view, round, steps)
    if not accepts(letter, size):
        raise RefusedError(
            "bounds",
            f"it sent {size} bytes as {letter.kind.name.lower()} in {letter.ticket}, which is not what may come now; all workers "
            "must run the same rule, codec and model",
        )
    body = memory(size)
    channel.read_into(body.numpy().data, deadline)
    if size and wire.checksum(body) != check:
        raise RefusedError(
            "checksum",
            f"the {size} bytes of its {letter.kind.name.lower()} in {letter.ticket} changed in transit (another checksum); a "
            "network card or memory is faulty: test both machines",
        )
    return letter._replace(body=body)


def letters_up_to(*kinds: LetterKind, most_bytes: int) -> Callable[[Letter, int], bool]:
    """A predicate that accepts letters of these kinds only, with bodies of at most this size."""
    return lambda letter, size: letter.kind in kinds and size <= most_bytes
