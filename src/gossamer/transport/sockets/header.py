"""The header of a letter: its fields, the size of the body, and their bounds.

    letter = [magic, version, kind, run, sender, ticket, view, round, steps, size and checksum of the body, checksum] [body]

It comes from another machine and is untrusted. Its checksum covers each of its fields, and every number is bounded by
the receiver's run: one letter with round 2^61 would otherwise make all workers wait for that round. Needs no torch.
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
"""The most bytes of the body of a letter other than a payload."""
NO_TICKET = Ticket(0)
"""The ticket of a letter that belongs to no exchange."""
MOST_ATTEMPTS = 1 << 30
"""The most attempts at the mean of one round; a few in practice."""
LIFE_LIMIT = 1 << 31
"""An upper bound of the numbers of processes and their meetings."""
NEWCOMER = (1 << 32) - 1
"""The number with which a process that has no slot yet opens a connection."""
WATCHER = (1 << 32) - 2
"""The number with which a process opens a read-only connection."""
GUESTS = (NEWCOMER, WATCHER)


def called(number: int) -> str:
    """A process by the number that it gives in a handshake.

    >>> called(3), called(WATCHER)
    ('worker 3', 'a watcher or doctor')
    """
    return {NEWCOMER: "a newcomer", WATCHER: "a watcher or doctor"}.get(number, f"worker {number}")


class LetterKind(IntEnum):
    """The kind of a letter."""

    MEMBERSHIP = 0
    """Its body is the sender's membership view. The first letter on each connection of an elastic run."""
    PAYLOAD = 1
    """Its body is the sender's message in the exchange of the ticket."""
    COMMIT = 2
    """The sender has the other end's payload, and counts the exchange once it has received a COMMIT too."""
    DECLINE = 3
    """The sender does not, or no longer, exchange under this ticket with the other end."""
    PING = 4
    """Asks whether the other end lives."""
    PONG = 5
    ASK = 6
    """A newcomer requests a slot and a state, specified in its body."""
    OFFER = 7
    """The slot, the sender's view, and the size of the following state."""
    CHUNK = 8
    """A part of a state."""
    REPORT = 9
    """The sender's progress with the mean of its round, see `gossamer.transport.elastic.closing`."""
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
    """A worker joins a server; its body lists its checkpoints. The first letter on such a connection."""
    START = 21
    """A starting point from the server."""
    PUSH = 22
    """A pseudo-gradient for the server."""
    SETTINGS = 23
    """The sender's settings, for a server of another configuration."""
    REFUSAL = 24
    """The reason why the sender ends the connection."""
    END = 25
    """The sender sends no more on this connection, and closes it once the other end has."""


_EXCHANGES = {LetterKind.PAYLOAD, LetterKind.COMMIT, LetterKind.DECLINE}
_MEETINGS = {LetterKind.MESSAGE, LetterKind.INVITE, LetterKind.ACCEPT, LetterKind.AGREE, LetterKind.REFUSE}
_PHASES = {LetterKind.START, LetterKind.PUSH}


class LetterHead(NamedTuple):
    """The fields of a letter except its body."""

    kind: LetterKind
    sender: int
    ticket: Ticket = NO_TICKET
    view: int = 0
    """A hash of the workers alive in the sender's view; both ends of an exchange must agree."""
    round: int = 0
    """The sender's round."""
    steps: int = 0
    """Inner steps of the sender's slot included in a payload."""
    size: int = 0
    """Bytes of the body."""
    check: int = 0
    """Checksum of the body."""


class Limits(NamedTuple):
    """The upper bounds of a run on the numbers in letters."""

    workers: int
    rounds: int
    """Rounds of the run; if asynchronous, the local phases that one worker could take alone."""
    steps: int
    """Inner steps of all workers together."""
    fragments: int = 1
    """Exchanges of a round."""

    def check(self, header: LetterHead) -> None:
        """Raises RefusedError for a header with a number out of bounds."""
        kind, sender, ticket, _, round, steps, *_ = header
        # Bodies are bounded by their reader, before memory is allocated; the view is a hash, and compared with the
        # local one.
        if kind in _EXCHANGES:
            most = Ticket(self.rounds, self.fragments - 1, 2 * MOST_ATTEMPTS)
        elif kind in _MEETINGS:
            most = Ticket(LIFE_LIMIT - 1, max(LIFE_LIMIT - 1, self.workers), LIFE_LIMIT - 1)
        elif kind in _PHASES:
            most = Ticket(self.steps, self.fragments - 1, 0)
        else:
            most = NO_TICKET
        # For a chunk it is the offset of the part.
        steps_limit = SMALL_BYTES << 20 if kind is LetterKind.CHUNK else self.steps
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

    Raises: TransportError for invalid bytes; RefusedError for a header of another version or run, a corrupted one, and
        one with a number above the limits.
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
    """The error for a peer whose letters are of another version."""
    return RefusedError(
        "version",
        f"{who} speaks version {version} of the wire format and this process version {WIRE_VERSION}; install the same gossamer "
        "version on all machines",
    )
