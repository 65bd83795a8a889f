"""The header of a letter: what it says, how large the body is that follows, and between which bounds all of it may be.

    letter = [magic, version, kind, run, sender, ticket, view, round, steps, size and checksum of the body, checksum] [body]

It comes from another machine and is not trusted. Its checksum covers each of its fields, and no number is believed that the run
of the receiver does not allow: one letter with round 2^61 would otherwise have everybody wait for that round. Needs no torch.
"""

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from gossamer.errors import RefusedError, TransportError
from gossamer.transport.contract import WIRE_VERSION, Ticket

MAGIC = b"GOSL"
_LAYOUT = struct.Struct("<4sHHQIIIIQQQQQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _LAYOUT.size + _SUM.size
SMALL_BYTES = 1 << 20
"""Most bytes of the body of a letter that is no payload."""
NO_TICKET = Ticket(0)
"""Of a letter that belongs to no exchange."""
MOST_ATTEMPTS = 1 << 30
"""Attempts to take the mean of one round, of which there are seldom more than a few."""
LIFE_LIMIT = 1 << 31
"""Above the numbers by which processes and their meetings are named."""
NEWCOMER = (1 << 32) - 1
"""The number with which a process that has no slot yet opens a connection."""
WATCHER = (1 << 32) - 2
"""The number with which a process opens a connection that only wants to look."""
GUESTS = (NEWCOMER, WATCHER)


class LetterKind(IntEnum):
    """What a letter says."""

    MEMBERSHIP = 0
    """Its body is the sender's view of the members. The first letter on each connection of an elastic run."""
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
    PROPOSAL = 10
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
    VIEW = 19
    """The answer to a watcher, see `gossamer.transport.elastic.ask`."""
    HELLO = 20
    """A worker joins a server; its body says which checkpoints it has. The first letter on such a connection."""
    START = 21
    """A starting point from the server."""
    PUSH = 22
    """A pseudo-gradient for the server."""
    SETTINGS = 23
    """What the sender runs, for a server of another configuration."""
    REFUSAL = 24
    """The reason why the sender ends the connection."""
    END = 25
    """The sender sends no more on this connection, and closes it once the other end has."""


_EXCHANGES = {LetterKind.PAYLOAD, LetterKind.COMMIT, LetterKind.DECLINE}
_MEETINGS = {LetterKind.MESSAGE, LetterKind.INVITE, LetterKind.ACCEPT, LetterKind.AGREE, LetterKind.REFUSE}
_PHASES = {LetterKind.START, LetterKind.PUSH}


class LetterHead(NamedTuple):
    """What a letter says but for its body."""

    kind: LetterKind
    sender: int
    ticket: Ticket = NO_TICKET
    view: int = 0
    """Which workers are alive in the sender's view, as a hash; both ends of an exchange must agree."""
    round: int = 0
    """The round that the sender is in."""
    steps: int = 0
    """Inner steps of the sender's slot that a payload contains."""
    size: int = 0
    """Bytes of the body."""
    check: int = 0
    """Checksum of the body."""


class Limits(NamedTuple):
    """What everybody in a run knows to be the most that another may say."""

    workers: int
    rounds: int
    """Rounds of the run; where nobody waits, the local phases that one worker could take alone."""
    steps: int
    """Inner steps of all workers together."""
    fragments: int = 1
    """Exchanges of a round."""

    def check(self, header: LetterHead) -> None:
        """Raises RefusedError for a header with a number that cannot be."""
        kind, sender, ticket, _, round, steps, *_ = header
        # Bodies are bounded by who reads them, before memory is allocated; the view is a hash, and compared with one's own.
        if kind in _EXCHANGES:
            most = Ticket(self.rounds, self.fragments - 1, 2 * MOST_ATTEMPTS)
        elif kind in _MEETINGS:
            most = Ticket(LIFE_LIMIT - 1, max(LIFE_LIMIT - 1, self.workers), LIFE_LIMIT - 1)
        elif kind in _PHASES:
            most = Ticket(self.steps, self.fragments - 1, 0)
        else:
            most = NO_TICKET
        steps_limit = SMALL_BYTES << 20 if kind is LetterKind.CHUNK else self.steps  # there it is the place of the part
        # The number of a server follows those of its workers.
        self._must("sender", sender, self.workers, sender in GUESTS)
        self._must("round", round, self.rounds)
        self._must("inner steps", steps, steps_limit)
        for name, value, limit in zip(("round", "fragment", "leg"), ticket, most, strict=True):
            self._must(f"{name} of its ticket", value, limit)

    def _must(self, name: str, value: int, most: int, otherwise: bool = False) -> None:
        if value > most and not otherwise:
            raise RefusedError(
                "bounds",
                f"it says that the {name} is {value}, and in a run of {self.workers} workers, {self.rounds} rounds and "
                f"{self.steps} inner steps that is at most {most}; test its memory, and start all with the same gossamer",
            )


def encode(header: LetterHead, run: int) -> bytes:
    """The header as bytes; the body follows.

    >>> header = LetterHead(LetterKind.COMMIT, 3, Ticket(7), view=9, round=7)
    >>> decode(encode(header, run=5), run=5, limits=Limits(4, 9, 90)) == header
    True
    """
    kind, sender, ticket, *rest = header
    raw = _LAYOUT.pack(MAGIC, WIRE_VERSION, kind, run, sender, *ticket, *rest)
    return raw + _SUM.pack(zlib.crc32(raw))


def decode(raw: bytes, run: int, limits: Limits) -> LetterHead:
    """The header in these bytes.

    Raises: TransportError for bytes that are none; RefusedError for a header of another version or run, one that changed on its
        way, and one with a number above the limits.
    """
    magic, version, kind, theirs, sender, number, fragment, leg, *rest = _LAYOUT.unpack_from(raw)
    if magic != MAGIC:
        raise TransportError(
            f"it sent {raw[:8]!r} where a letter that starts with {MAGIC!r} was expected; another program uses this port, choose "
            "another"
        )
    if version != WIRE_VERSION:
        raise wrong_version("it", version)
    if _SUM.unpack_from(raw, _LAYOUT.size)[0] != zlib.crc32(raw[: _LAYOUT.size]):
        raise RefusedError(
            "checksum",
            "the header of its letter changed in transit; a network card or memory is faulty: test both machines",
        )
    if theirs != run:
        raise RefusedError(
            "other run",
            f"it runs configuration {theirs:016x} and this process {run:016x}; start all workers with the same run file, data "
            "and gossamer",
        )
    if kind >= len(LetterKind):
        raise RefusedError("bounds", f"it sent a letter of kind {kind}, and the last kind is {len(LetterKind) - 1}")
    header = LetterHead(LetterKind(kind), sender, Ticket(number, fragment, leg), *rest)
    limits.check(header)
    return header


def wrong_version(who: str, version: int | str) -> RefusedError:
    """A peer whose letters are of another version."""
    return RefusedError(
        "version",
        f"{who} speaks version {version} of the wire format and this process version {WIRE_VERSION}; install the same gossamer "
        "version on all machines",
    )
