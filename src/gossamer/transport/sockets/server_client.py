"""A worker's end of its connection with a server: alternating letters, and reconnection to a restarted server.

Its worker waits for each answer, so it needs no threads: it reads and writes the letters itself.
"""

import contextlib
import json
import time
from collections.abc import Mapping

from gossamer.errors import LostConnectionError, PeerError, RefusedError, TransportError
from gossamer.record.jsonl import json_from_peer
from gossamer.transport.alike import read_settings
from gossamer.transport.contract import Ticket
from gossamer.transport.keys import Keys
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import REFUSAL_BYTES, refused_by
from gossamer.transport.sockets.handshake import dial_any
from gossamer.transport.sockets.header import LetterKind, Limits
from gossamer.transport.sockets.letter import Letter, body_of, receive_letter, send_letter

SETTINGS_BYTES = 1 << 18
NO_RUN, NO_NUMBERS = 0, Limits(0, 0, 0)
"""Placeholders in letters between processes of different runs."""
PAUSE_S = 0.2
"""Pause before a retry, so that a server that hangs up is not flooded."""
_ATTEMPTS = 5
"""How often a worker retries its proof with a server that hangs up; a server may also do so when it is full."""


class ServerClient:
    """A connection with the server.

    Args: `me` is the number of the worker; that of the server follows those of all workers.
    Raises: LostConnectionError, in any call, when the connection breaks.
    """

    def __init__(self, channel: Channel, *, run: int, me: int, limits: Limits) -> None:
        self.answered = False
        """Whether a letter has been received."""
        self.channel, self._run, self._me, self._limits = channel, run, me, limits

    def send(self, letter: Letter) -> None:
        """Sends a letter, and returns once it is sent.

        Raises: PeerError when the other end accepts no more bytes, with its reason if it sent one before it hung up.
        """
        try:
            send_letter(self.channel, letter, self._run)
        except OSError as error:
            if not isinstance(error, TimeoutError):  # the server may have sent a reason before it hung up
                with contextlib.suppress(LostConnectionError):
                    self._receive(LetterKind.END, Ticket(0), 0)
            raise self._lost(error) from None

    def receive(self, kind: LetterKind, ticket: Ticket, size: int) -> Letter:
        """The letter of this kind and ticket, with `size` bytes.

        Raises: PeerError for any other letter, or none within the timeout.
        """
        letter = self._receive(kind, ticket, size)
        self.answered = True
        self.channel.settle()  # the server has received the request, and nothing is sent until the end of the next phase
        return letter

    def close(self) -> None:
        """Ends the connection; may be called twice."""
        self.channel.close()

    def _receive(self, kind: LetterKind, ticket: Ticket, size: int) -> Letter:
        def accepts(letter: Letter, body_bytes: int) -> bool:
            refused = letter.kind is LetterKind.REFUSAL and body_bytes <= REFUSAL_BYTES
            expected = (letter.kind, letter.ticket, body_bytes) == (kind, ticket, size)
            return letter.sender == self._limits.workers and (refused or expected)

        try:
            letter = receive_letter(self.channel, self._run, self._limits, accepts)
        except RefusedError as error:
            raise RefusedError(error.kind, f"the server cannot be believed: {error}") from None
        except TransportError:
            raise
        except OSError as error:
            raise self._lost(error) from None
        if letter.kind is LetterKind.REFUSAL:
            raise PeerError(refused_by("the server", letter))
        return letter

    def _lost(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(
                f"the server did nothing for {self.channel.timeout_s:g} s; look at its log, or raise run.timeout_s"
            )
        return LostConnectionError(f"the connection with the server was lost ({error}); look at its log")


class Patience:
    """The time for which a process may run without its server while it keeps reconnecting."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lost_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds left for the next connection."""
        left_s = self._timeout_s if self._lost_s is None else self._lost_s + self._timeout_s - time.monotonic()
        return max(left_s, PAUSE_S)

    def lost(self, client: ServerClient, error: LostConnectionError) -> None:
        """Handles a lost connection, after a short wait. Raises PeerError when no connection has answered for too long."""
        now_s = time.monotonic()
        self._lost_s = now_s if self._lost_s is None or client.answered else self._lost_s
        if now_s - self._lost_s >= self._timeout_s:
            raise PeerError(
                f"{str(error).partition(';')[0]} for {self._timeout_s:g} s; look at the server's log"
            ) from None
        time.sleep(PAUSE_S)


def connect(
    address: str,
    *,
    secret: bytes,
    run: int,
    me: int,
    limits: Limits,
    timeout_s: float,
    settings: Mapping[str, str] | None = None,
    keys: Keys | None = None,
) -> ServerClient:
    """A mutually authenticated connection to the server at `host:port`.

    Args: `settings` are sent to a server of another configuration, which reports differences. Retried for `timeout_s`
        while the server starts, or is full. Raises PeerError when it cannot be reached, or refuses.
    """
    deadline, attempts = time.monotonic() + timeout_s, 0
    while True:
        try:
            channel, accepted = dial_any(
                address, secret, run=run, me=me, timeout_s=timeout_s, older=b"GOSS", keys=keys, whom=limits.workers
            )
        except PeerError as error:
            if isinstance(error, RefusedError) and error.kind in ("version", "key", "changed"):
                raise RefusedError(error.kind, f"the server at {address}: {error}") from None
            reason, attempts = str(error), attempts + 1
            if attempts == _ATTEMPTS:
                raise PeerError(
                    f"worker {me} was turned away by the server at {address} (the connection: {error}); give both the same "
                    "secret, by GOSSAMER_SECRET or the file 'secret' of the server's run folder"
                ) from None
        except OSError as error:
            reason = str(error)
        else:
            if accepted:
                return ServerClient(channel, run=run, me=me, limits=limits)
            with channel:
                text = json.dumps(settings or {}).encode()
                client = ServerClient(channel, run=NO_RUN, me=0, limits=NO_NUMBERS)
                client.send(
                    Letter(LetterKind.SETTINGS, 0, body=body_of(text if len(text) <= SETTINGS_BYTES else b"{}"))
                )
                client.receive(LetterKind.END, Ticket(0), 0)  # raises with the server's reason
            raise PeerError(f"the server at {address} runs another configuration and did not say which")
        if time.monotonic() + PAUSE_S > deadline:
            raise PeerError(
                f"worker {me} could not reach the server at {address} within {timeout_s:.0f} s ({reason}); start it first"
            )
        time.sleep(PAUSE_S)


def read_settings_in(letter: Letter) -> dict[str, str]:
    """The settings of the other end; empty if invalid."""
    return read_settings(json_from_peer(letter.content)) or {}
