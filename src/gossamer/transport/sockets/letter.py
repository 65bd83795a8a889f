"""What the workers of an elastic run send each other: a header of fixed size, and a body of bounded size.

    letter = [header: magic, kind, run, sender, ticket, view, round, steps, size, checksum] [body]

Both come from another machine and are not trusted: who reads a header decides how large a body may be before any memory is
allocated, and nothing is ever unpickled.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import PeerError, TransportError
from gossamer.transport import wire
from gossamer.transport.contract import Ticket

__all__ = ["HEADER_BYTES", "NEWS_BYTES", "NO_TICKET", "Letter", "LetterKind", "body_of", "decode", "encode"]

MAGIC, VERSION = b"GOSL", 1
_LAYOUT = struct.Struct("<4sHHQIIIIQQQQQ")
HEADER_BYTES = _LAYOUT.size
NEWS_BYTES = 1 << 20
"""Most bytes of the body of a letter that is no payload."""
_LIMIT = 1 << 62
"""Above all rounds and inner steps."""
NO_TICKET = Ticket(0)
"""Of a letter that belongs to no exchange."""
_EMPTY = torch.empty(0, dtype=torch.uint8)


class LetterKind(IntEnum):
    """What a letter says."""

    NEWS = 0
    """Its body is the sender's view of the members. The first letter on each connection."""
    PAYLOAD = 1
    """Its body is the sender's message in the exchange of the ticket."""
    COMMIT = 2
    """The sender has the payload of the other end, and will count the exchange once it has this from it too."""
    DECLINE = 3
    """The sender does not exchange under this ticket with the other end, or no longer."""
    PING = 4
    """Asks whether the other end lives."""
    PONG = 5
    ASK = 6
    """A newcomer asks for a slot and a state; its body says which."""
    OFFER = 7
    """The slot, the sender's view, and how large the state is that follows."""
    CHUNK = 8
    """A part of a state."""
    REPORT = 9
    """How far its sender is with the mean of its round, see `gossamer.transport.elastic.closing`."""
    NAME = 10
    CLOSED = 11
    FETCH = 12
    """Asks for the newest message of the other end, see `gossamer.transport.elastic.fetches`."""
    MESSAGE = 13
    """Its body is a message, the answer to a fetch or one end of a meeting."""
    INVITE = 14
    """Asks the other end to meet, see `gossamer.transport.elastic.meetings`."""
    ACCEPT = 15
    AGREE = 16
    REFUSE = 17
    """The sender has no message, or does not meet."""
    DONE = 18
    """The sender has taken its last step, see `gossamer.transport.elastic.calls`."""


class Letter(NamedTuple):
    """One letter."""

    kind: LetterKind
    sender: int
    ticket: Ticket = NO_TICKET
    view: int = 0
    """Which workers are alive in the sender's view, as a hash; both ends of an exchange must agree."""
    round: int = 0
    """The round that the sender is in."""
    steps: int = 0
    """Inner steps of the sender's slot that a payload contains."""
    body: Tensor = _EMPTY
    """Flat uint8."""


def encode(letter: Letter, run: int) -> bytes:
    """The header of a letter; its body follows as it is.

    >>> letter = Letter(LetterKind.COMMIT, 3, Ticket(7), view=9, round=7)
    >>> decode(encode(letter, run=5), run=5)[0] == letter
    True
    """
    kind, sender, ticket, view, round, steps, body = letter
    check = wire.checksum(body) if body.numel() else 0
    return _LAYOUT.pack(
        MAGIC, VERSION, kind, run, sender, *ticket, view, round, steps, body.numel(), check
    )  # fmt: skip


def decode(raw: bytes, run: int) -> tuple[Letter, int, int]:
    """A letter without its body, the size of the body, and its checksum.

    Raises: TransportError for bytes that are no header, PeerError for one of another version or run.
    """
    magic, version, kind, theirs, sender, number, fragment, leg, view, round, steps, size, check = _LAYOUT.unpack(raw)
    if magic != MAGIC or kind >= len(LetterKind):
        raise TransportError(
            f"a letter starts with {magic!r} and is of kind {kind} where {MAGIC!r} and a kind below {len(LetterKind)} were "
            "expected; another program uses this port, choose another"
        )
    if version != VERSION:
        raise PeerError(
            f"worker {sender} sent version {version} of the letters and this one has version {VERSION}; install the same "
            "gossamer version on all machines"
        )
    if theirs != run:
        raise PeerError(
            f"worker {sender} runs configuration {theirs:016x} and this worker {run:016x}; start all workers with the same run "
            "file, data and gossamer"
        )
    if max(round, steps) >= _LIMIT:
        raise TransportError(
            f"worker {sender} says that it is in round {round} with {steps} inner steps behind it, and both are below {_LIMIT}; "
            "test its memory and network card"
        )
    return Letter(LetterKind(kind), sender, Ticket(number, fragment, leg), view, round, steps), size, check


def body_of(content: bytes) -> Tensor:
    """Bytes as the body of a letter."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _EMPTY
