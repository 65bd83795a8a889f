"""How a server and a worker prove to each other that they know the secret of a run, before anything else is sent.

    server → worker   a, 32 random bytes, the same whoever connects
    worker → server   its number i, 32 random bytes b, r = code("run", a, b, i, run), p = code("worker", a, b, i, r)
    server → worker   code("server", a, b, i, r), or code("refusal", a, b, i, r) if r shows another run

`code` is an HMAC with the secret. Without the right p a connection is closed, and has received 32 random bytes whatever it sent.
Fresh numbers of both ends make an old proof useless. The digest of the run is never sent; what follows is not encrypted.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections import Counter

from gossamer.errors import PeerError
from gossamer.transport.secret import CODE_BYTES, code

__all__ = ["HANDSHAKE_S", "HalfOpen", "dial", "prove_to_server", "prove_to_worker", "received"]

HANDSHAKE_S = 10.0
"""How long a whole handshake may take."""
_NONCE_BYTES = 32
_PROOF = struct.Struct(f"<I{_NONCE_BYTES}s{CODE_BYTES}s{CODE_BYTES}s")


def prove_to_worker(
    sock: socket.socket, secret: bytes, *, run: int, timeout_s: float = HANDSHAKE_S
) -> tuple[int, bool]:
    """The server's side: the number of the worker at the other end, and whether it is of this run, which it has then been told.

    Raises: PeerError when the other end does not know the secret, or is not done within `timeout_s`.
    """
    deadline, ours = time.monotonic() + timeout_s, secrets.token_bytes(_NONCE_BYTES)
    _send(sock, ours, deadline)
    worker, theirs, of_run, proof = _PROOF.unpack(_receive(sock, _PROOF.size, deadline))
    about = _about(ours, theirs, worker)
    if not hmac.compare_digest(proof, code(secret, b"worker", *about, of_run)):
        raise PeerError(
            f"it calls itself worker {worker} and does not know the secret of this run; give all workers the same"
        )
    same = hmac.compare_digest(of_run, code(secret, b"run", *about, _bytes_of(run)))
    _send(sock, code(secret, b"server" if same else b"refusal", *about, of_run), deadline)
    return worker, same


def prove_to_server(
    sock: socket.socket, secret: bytes, *, run: int, me: int, timeout_s: float = HANDSHAKE_S
) -> bool | None:
    """The worker's side: whether the server takes it as a worker of its run, None if it hung up before anything was asked.

    Raises: PeerError when the server hangs up on the proof, does not know the secret, or is not done within `timeout_s`.
    """
    deadline, ours = time.monotonic() + timeout_s, secrets.token_bytes(_NONCE_BYTES)
    try:
        theirs = _receive(sock, _NONCE_BYTES, deadline)
    except PeerError:
        return None
    about = _about(theirs, ours, me)
    of_run = code(secret, b"run", *about, _bytes_of(run))
    _send(sock, _PROOF.pack(me, ours, of_run, code(secret, b"worker", *about, of_run)), deadline)
    answer = _receive(sock, CODE_BYTES, deadline)
    for kind in (b"server", b"refusal"):
        if hmac.compare_digest(answer, code(secret, kind, *about, of_run)):
            return kind == b"server"
    raise PeerError(f"it answered worker {me} and does not know the secret of this run")


def dial(address: str, secret: bytes, *, run: int, me: int, timeout_s: float) -> socket.socket:
    """A connection with the worker at `host:port`, after both ends have proved that they know the secret of the run.

    Raises: OSError when nobody answers, PeerError when the other end refuses or does not know the secret.
    """
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    try:
        accepted = prove_to_server(sock, secret, run=run, me=me, timeout_s=min(timeout_s, HANDSHAKE_S))
        if accepted is None:
            raise ConnectionError(f"{address} hung up before the handshake")
        if not accepted:
            raise PeerError(
                f"{address} runs another configuration than {run:016x}; start all workers with the same run file, data and "
                "gossamer"
            )
    except BaseException:
        sock.close()
        raise
    sock.settimeout(timeout_s)
    return sock


class HalfOpen:
    """The connections whose other end has not proved anything yet: a bounded number of each address, and of all.

    A new one is always admitted, and the oldest gives way: of its own address, or of the address that has most.
    """

    def __init__(self, per_address: int = 8, total: int = 64) -> None:
        self._per_address, self._total = per_address, total
        self._open: dict[socket.socket, str] = {}
        """The address of each, the oldest first."""
        self._lock = threading.Lock()

    def admit(self, sock: socket.socket, address: str) -> None:
        """Counts a new connection, and ends those for which it leaves no room."""
        with self._lock:
            counts = Counter(self._open.values())
            if counts[address] >= self._per_address:
                self._end(address)
            elif len(self._open) >= self._total:
                self._end(counts.most_common(1)[0][0])
            self._open[sock] = address

    def settle(self, sock: socket.socket) -> None:
        """Counts a connection no longer."""
        with self._lock:
            self._open.pop(sock, None)

    def close(self) -> None:
        """Ends all of them."""
        with self._lock:
            while self._open:
                self._end(next(iter(self._open.values())))

    def _end(self, address: str) -> None:
        """Ends the oldest connection of an address; its thread notices and closes it."""
        oldest = next(sock for sock, where in self._open.items() if where == address)
        del self._open[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)


def _about(server: bytes, worker: bytes, number: int) -> tuple[bytes, bytes, bytes]:
    return server, worker, _bytes_of(number)


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    try:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        sock.sendall(data)
    except OSError as error:
        raise PeerError(f"it was lost during the handshake ({error})") from None


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    try:
        return received(sock, size, deadline)
    except OSError as error:
        raise PeerError(f"it was lost during the handshake ({error})") from None


def received(sock: socket.socket, size: int, deadline: float) -> bytes:
    """The next bytes, all before the deadline (of `time.monotonic`), however slowly they come. Raises: OSError."""
    data = b""
    while len(data) < size:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("it took too long")
        sock.settimeout(left_s)
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError(f"it was closed after {len(data)} of {size} bytes")
        data += part
    return data
