"""Frames over one TCP connection between a server and a worker, each after a header of `wire`.

Both ends know what may come next and how large it is. Every header is compared with that before memory is allocated, and a
mismatch ends the connection with an error message. Nothing is ever unpickled.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.errors import LostConnectionError, PeerError, TransportError
from gossamer.transport import wire
from gossamer.transport.alike import read_settings
from gossamer.transport.contract import Turn
from gossamer.transport.sockets.handshake import HANDSHAKE_S, prove_to_server

__all__ = ["HELLO", "PUSH", "START", "Patience", "Stream", "connect"]

HELLO, START, PUSH, _REFUSE, _SETTINGS = range(5)
"""The kinds of frames, as the kind of a turn: hello of a worker, starting point, pseudo-gradient, refusal, and the settings of a
worker of another configuration."""

_LIMIT_REFUSAL_BYTES = 1000
_LIMIT_SETTINGS_BYTES = 1 << 18
_PIECE_BYTES = 1 << 20
PAUSE_S = 0.2
"""Before a process tries again, so that a server that hangs up on it is not asked without end."""
_ATTEMPTS = 5
"""How often a worker offers its proof to a server that hangs up on it; a server may also do so for want of room."""


class Stream:
    """One end of a connection, for one thread at a time.

    Args:
        run: 64-bit digest of the run that both ends must be of.
        me, peer: the numbers of both ends.
        name: of the other end, in error messages.
        timeout_s: how long to wait for the next bytes.
    A connection that breaks raises LostConnectionError.
    """

    def __init__(
        self, sock: socket.socket, *, run: int, me: int, peer: int, name: str, timeout_s: float
    ) -> None:  # fmt: skip
        self.peer, self.name = peer, name
        self.answered = False
        """Whether a message has arrived."""
        self._sock, self._run, self._me = sock, run, me
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wait_at_most(timeout_s)

    def wait_at_most(self, timeout_s: float) -> None:
        """Sets how long to wait for the next bytes."""
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def send(self, turn: Turn, frames: Sequence[Tensor]) -> int:
        """Sends one message; returns the bytes of its payload.

        Raises: PeerError when the other end accepts no more bytes, with its reason if it sent one before it hung up.
        """
        payload = wire.pack_frames([frame.cpu() for frame in frames])
        header = wire.Header(self._run, turn, self._me, payload.numel(), wire.checksum(payload))
        try:
            self._sock.sendall(wire.encode_header(header))
            view = payload.numpy().data
            # In pieces, so that the timeout limits progress and not the whole transfer.
            for start in range(0, len(view), _PIECE_BYTES):
                self._sock.sendall(view[start : start + _PIECE_BYTES])
        except OSError as error:
            raise self._refusal_before(error) or self._lost(error) from None
        return payload.numel()

    def receive(self, turn: Turn, like: Sequence[Tensor]) -> list[Tensor]:
        """The message of this turn, with frames like these (which may be meta tensors).

        Raises: PeerError or TransportError when anything else arrives, or nothing within the timeout.
        """
        header = self._header()
        if (refusal := self._refusal(header)) is not None:
            raise refusal
        wire.check_header(header, wire.Header(self._run, turn, self.peer, wire.frames_bytes(like), 0))
        payload = self._exactly(header.payload_bytes)
        if (found := wire.checksum(payload)) != header.checksum:
            raise TransportError(
                f"{self.name} sent {header.payload_bytes} bytes with checksum {header.checksum:016x} that arrived with "
                f"{found:016x}; a network card or memory is faulty: test both machines"
            )
        self.answered = True
        return wire.unpack_frames(payload, like)

    def refuse(self, reason: str) -> None:
        """Sends the other end the reason why it is refused, if it is still connected."""
        with contextlib.suppress(TransportError):
            self.send(Turn(0, 0, _REFUSE), [_bytes(reason.encode()[:_LIMIT_REFUSAL_BYTES] or b" ")])

    def send_settings(self, settings: Mapping[str, str]) -> None:
        """Sends what this end runs, so that the other one can name what differs."""
        text = json.dumps(settings).encode()
        self.send(Turn(0, 0, _SETTINGS), [_bytes(text if len(text) <= _LIMIT_SETTINGS_BYTES else b"{}")])

    def receive_settings(self) -> dict[str, str]:
        """What the other end runs; empty when it sends anything that is no settings. Raises PeerError when it is gone."""
        header = self._header()
        if header.ticket.kind != _SETTINGS or header.payload_bytes > _LIMIT_SETTINGS_BYTES:
            return {}
        try:
            return read_settings(json.loads(self._text(header.payload_bytes))) or {}
        except (ValueError, RecursionError):
            return {}

    def stop_listening(self) -> None:
        """Ends what the thread of this connection waits for; what it sends still arrives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Ends the connection, also for another thread that waits on it; may be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _header(self) -> wire.Header[Turn]:
        return wire.decode_header(self._exactly(wire.HEADER_BYTES).numpy().tobytes(), self.peer, Turn)

    def _text(self, size: int) -> str:
        return self._exactly(size).numpy().tobytes().decode("utf-8", "replace")

    def _exactly(self, size: int) -> Tensor:
        """The next `size` bytes."""
        buffer = torch.empty(size, dtype=torch.uint8)
        view, filled = buffer.numpy().data, 0
        while filled < size:
            try:
                got = self._sock.recv_into(view[filled:])
            except OSError as error:
                raise self._lost(error) from None
            if not got:
                raise LostConnectionError(
                    f"{self.name} closed the connection after {filled} of {size} bytes; look at its log"
                )
            filled += got
        return buffer

    def _lost(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(
                f"{self.name} did nothing for {self._timeout_s:g} s; look at its log, or raise run.timeout_s"
            )
        return LostConnectionError(f"the connection with {self.name} was lost ({error}); look at its log")

    def _refusal(self, header: wire.Header[Turn]) -> PeerError | None:
        """The refusal, with the reason of the other end, that this is the header of; None if it is no refusal."""
        if header.ticket.kind != _REFUSE or header.payload_bytes > _LIMIT_REFUSAL_BYTES:
            return None
        text = self._text(header.payload_bytes)
        return PeerError(f"{self.name} refused this process: {''.join(c for c in text if c.isprintable())}")

    def _refusal_before(self, error: OSError) -> PeerError | None:
        """What the other end refused this process with before it hung up, if it did."""
        if isinstance(error, TimeoutError):
            return None
        try:
            return self._refusal(self._header())
        except TransportError:
            return None


class Patience:
    """How long a process may go on without the server above it, which it reaches again and again."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lost_s: float | None = None

    @property
    def left_s(self) -> float:
        """How long the next connection may take."""
        left_s = self._timeout_s if self._lost_s is None else self._lost_s + self._timeout_s - time.monotonic()
        return max(left_s, PAUSE_S)

    def lost(self, stream: Stream, error: LostConnectionError) -> None:
        """A connection was lost; waits a moment. Raises PeerError when there has been none that answered for too long."""
        now_s = time.monotonic()
        self._lost_s = now_s if self._lost_s is None or stream.answered else self._lost_s
        if now_s - self._lost_s >= self._timeout_s:
            raise PeerError(
                f"{str(error).partition(';')[0]} for {self._timeout_s:g} s; look at the server's log"
            ) from None
        time.sleep(PAUSE_S)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def connect(
    host: str, port: int, *, secret: bytes, run: int, me: int, server: int, timeout_s: float,
    settings: Mapping[str, str] | None = None,
) -> Stream:  # fmt: skip
    """A connection to the server, after both ends have proved that they know the secret of the run.

    Args:
        me: the number of the worker.
        settings: sent to a server of another configuration, which names those that differ.
    Retried for `timeout_s` while the server starts, or has no room. Raises PeerError when it cannot be reached, or refuses.
    """
    who, name = f"worker {me}", "the server"
    deadline, attempts, reason = time.monotonic() + timeout_s, 0, "it hung up"
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            reason = str(error)
        else:
            try:
                accepted = prove_to_server(sock, secret, run=run, me=me, timeout_s=min(timeout_s, HANDSHAKE_S))
            except PeerError as error:
                sock.close()
                if (attempts := attempts + 1) == _ATTEMPTS:
                    raise PeerError(
                        f"{who} was turned away by {name} at {host}:{port} (the connection: {error}); give both the "
                        "same secret, by GOSSAMER_SECRET or the file 'secret' of the server's run folder"
                    ) from None
            else:
                if accepted is not None:
                    stream = Stream(sock, run=run, me=me, peer=server, name=name, timeout_s=timeout_s)
                    if not accepted:
                        with contextlib.closing(stream):
                            stream.send_settings(settings or {})
                            stream.receive(Turn(0, 0, START), [])  # raises with the server's reason
                    return stream
                sock.close()
        if time.monotonic() + 0.2 > deadline:
            raise PeerError(
                f"{who} could not reach {name} at {host}:{port} within {timeout_s:g} s ({reason}); start it first"
            )
        time.sleep(0.2)
