"""The protocol of a server and its workers: the server's address, and the numbers sent with every starting point."""

from typing import NamedTuple

from torch import Tensor

from gossamer.errors import ConfigError, RefusedError
from gossamer.transport.sockets.addresses import split
from gossamer.transport.sockets.header import Limits

OWNED = 2
"""Number of checkpointed rounds that a joining worker reports: as many as it keeps."""

HELLO_BYTES = 8 * (1 + OWNED)
"""A fingerprint of the worker's first batch, 0 where there is nothing to compare, and these rounds."""

_LONGEST_US = 1 << 50
"""36 years."""


class Terms(NamedTuple):
    """The integers that the server sends with every starting point."""

    updates: int
    """Updates of this fragment that the server has made."""
    round: int
    """Completed rounds."""
    go: int
    """1 to train another phase, 0 when no phase is left."""
    phases: int
    """Local phases of this worker whose push the server has received."""
    again: int
    """1 for a worker that has been in the run before."""
    cut_round: int
    """The worker's records of this and later rounds are void: an interrupted run resumes from there."""
    checkpoint: int
    """The round of the worker's own checkpoint that it restores its inner optimizer from; 0 for a new inner optimizer."""
    elapsed_us: int
    """Microseconds since the run began."""


def decode_terms(numbers: Tensor, limits: Limits) -> Terms:
    """The terms in a frame. Raises RefusedError for impossible numbers."""
    terms = Terms(*numbers.tolist())
    # A fragment is updated at most once for each push, and a worker that takes all steps of the run ends a phase for each.
    most = Terms(limits.steps, limits.rounds, 1, limits.steps, 1, limits.rounds, limits.rounds, _LONGEST_US)
    if not all(0 <= value <= limit for value, limit in zip(terms, most, strict=True)):
        raise RefusedError(
            "bounds", f"malformed reply from the server: {terms}; check that all machines run the same gossamer version"
        )
    return terms


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    >>> parse_address("127.0.0.1:29400"), parse_address("[::1]:29400")
    (('127.0.0.1', 29400), ('::1', 29400))
    """
    try:
        return split(text)
    except ValueError:
        raise ConfigError(
            f"--server got '{text}'; write HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:29400 or [fd00::1]:29400"
        ) from None
