"""Mutual authentication of two processes by the secret of a run, before anything else is sent.

    listener → dialler   m, the magic and version of the wire format; a, 24 random bytes, independent of the dialler
    dialler → listener   m, its number i, 32 random bytes b, r = code("run", ma, b, i, run), p = code("worker", ma, b, i, r)
    listener → dialler   code("server", ma, b, i, r), or code("refusal", ma, b, i, r) if r shows another run

`code` is an HMAC with the secret. Without the right p a connection is closed, and has received 32 bytes whatever it sent.
Fresh random numbers of both ends prevent replay. The digest of the run is never sent. In a run with keys all of this
runs over an encrypted connection whose ends have shown their certificates, which determine the numbers that each may
have; the secret is then a public constant. Without keys, what follows is not encrypted.

Both begin with their version, so each can report both when they differ. Version 2 had no magic here: 32 random bytes,
and a proof that began with the number. Such a peer is answered in its format, and then reads the version of this
process.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator

from gossamer.errors import LostConnectionError, RefusedError
from gossamer.transport.contract import WIRE_VERSION
from gossamer.transport.keys import SECRET_WORD, Keys
from gossamer.transport.secret import CODE_BYTES, code
from gossamer.transport.sockets.addresses import split
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.header import GUESTS, called, wrong_version

HANDSHAKE_S = 10.0
"""Timeout of a whole handshake."""
_MAGIC = b"GOSS"
_VERSION = struct.Struct("<4sHxx")
_OURS = _VERSION.pack(_MAGIC, WIRE_VERSION)
_HELLO_BYTES = 32
_PROOF = struct.Struct(f"<I32s{CODE_BYTES}s{CODE_BYTES}s")
_OLDER = "2 or an earlier one"
_OLDER_LETTER = struct.Struct("<4sH66x")
"""The part of a letter that an older process reads before it compares versions."""
_MOST_UNREAD = 1 << 16


@contextlib.contextmanager
def _may_be_lost() -> Iterator[None]:
    """Turns the loss of the connection, and a timeout, into a LostConnectionError."""
    try:
        yield
    except RefusedError:
        raise
    except OSError as error:
        raise LostConnectionError(f"it was lost during the handshake ({error})") from None


@_may_be_lost()
def prove_to_dialler(
    channel: Channel,
    secret: bytes,
    *,
    run: int,
    older: bytes = b"GOSL",
    timeout_s: float = HANDSHAKE_S,
    begun: Callable[[], None] = lambda: None,
) -> tuple[int, bool]:
    """The listening side: returns the number of the process at the other end, and whether it is of this run, which both
    ends then know.

    Args: `older` is the beginning of a letter in version 2 of such a run; `begun` is called when the other end's
        version has arrived.
    Raises: RefusedError when the other end does not know the secret or speaks another version, PeerError when it is lost, or not
        done within `timeout_s`.
    """
    deadline, ours = time.monotonic() + timeout_s, _OURS + secrets.token_bytes(_HELLO_BYTES - len(_OURS))
    channel.write(ours, deadline)
    first = channel.read(len(_OURS), deadline)
    magic, version = _VERSION.unpack(first)
    if magic == _MAGIC and version != WIRE_VERSION:
        raise wrong_version("it", version)
    if magic == _MAGIC:
        begun()
    rest = channel.read(_PROOF.size - (0 if magic == _MAGIC else len(first)), deadline)
    worker, theirs, of_run, proof = _PROOF.unpack(rest if magic == _MAGIC else first + rest)
    about = ours, theirs, _bytes_of(worker)
    if magic != _MAGIC and hmac.compare_digest(proof, code(secret, b"worker", *about, of_run)):
        _tell_older(
            channel, code(secret, b"server", *about, of_run) + _OLDER_LETTER.pack(older, WIRE_VERSION), deadline
        )
        raise wrong_version(called(worker), _OLDER)
    about = *about, first
    if not hmac.compare_digest(proof, code(secret, b"worker", *about, of_run)):
        raise RefusedError(
            "secret",
            f"it calls itself {called(worker)} and does not know the secret of this run; give all workers the same",
        )
    same = hmac.compare_digest(of_run, code(secret, b"run", *about, _bytes_of(run)))
    channel.write(code(secret, b"server" if same else b"refusal", *about, of_run), deadline)
    return worker, same


@_may_be_lost()
def prove_to_listener(
    channel: Channel, secret: bytes, *, run: int, me: int, older: bytes = b"GOSL", timeout_s: float = HANDSHAKE_S
) -> bool | None:
    """The dialling side: whether the other end accepts it as one of its run, None if it hung up before the first
    message, or sent none.

    Raises: RefusedError when the other end does not know the secret or speaks another version; PeerError when it hangs up on the
        proof, or is not done within `timeout_s`.
    """
    deadline, ours = time.monotonic() + timeout_s, secrets.token_bytes(_HELLO_BYTES)
    try:
        theirs = channel.read(_HELLO_BYTES, deadline)
    except RefusedError:  # in TLS 1.3, the dialler learns here that its certificate was refused
        raise
    except OSError:
        return None
    magic, version = _VERSION.unpack_from(theirs)
    if magic == _MAGIC and version != WIRE_VERSION:
        with contextlib.suppress(OSError):
            channel.write(_OURS, deadline)  # so that the other end can report both versions too
        raise wrong_version("it", version)
    about = (theirs, ours, _bytes_of(me), *([_OURS] if magic == _MAGIC else []))
    of_run = code(secret, b"run", *about, _bytes_of(run))
    proof = _PROOF.pack(me, ours, of_run, code(secret, b"worker", *about, of_run))
    if magic != _MAGIC:
        answer = b""
        with contextlib.suppress(OSError):
            channel.write(proof, deadline)
            answer = channel.read(CODE_BYTES, deadline)
        if hmac.compare_digest(answer, code(secret, b"server", *about, of_run)):
            _tell_older(channel, _OLDER_LETTER.pack(older, WIRE_VERSION), deadline)
            raise wrong_version("it", _OLDER)
        raise RefusedError(
            "version",
            f"it began with {theirs[:16]!r}, and gossamer begins with {_MAGIC!r}; if another program, such as an SSH server, "
            "listens at that port, give the port of the run, else install the same gossamer version on all machines",
        )
    channel.write(_OURS + proof, deadline)
    answer = channel.read(CODE_BYTES, deadline)
    for kind in (b"server", b"refusal"):
        if hmac.compare_digest(answer, code(secret, kind, *about, of_run)):
            return kind == b"server"
    raise RefusedError("secret", f"it answered worker {me} and does not know the secret of this run")


def dial(
    address: str,
    secret: bytes,
    *,
    run: int,
    me: int,
    timeout_s: float,
    keys: Keys | None = None,
    whom: int | None = None,
) -> Channel:
    """A mutually authenticated connection with the process at `host:port`.

    Args:
        keys: encrypt the connection, and replace the secret.
        whom: the number that the other end must have, if there are keys; None for any of the run.
    Raises: OSError without an answer, PeerError when the other end refuses or does not know the secret.
    """
    channel, accepted = dial_any(address, secret, run=run, me=me, timeout_s=timeout_s, keys=keys, whom=whom)
    if not accepted:
        channel.close()
        raise RefusedError(
            "other run",
            f"{address} runs another configuration than {run:016x}; start all workers with the same run file, data and gossamer",
        )
    return channel


def dial_any(
    address: str,
    secret: bytes,
    *,
    run: int,
    me: int,
    timeout_s: float,
    older: bytes = b"GOSL",
    keys: Keys | None = None,
    whom: int | None = None,
) -> tuple[Channel, bool]:
    """As `dial`, but also accepts other runs; returns whether the other end is of the same run."""
    if keys is not None and me not in GUESTS:
        keys.must_own(me)
    # The only place where a process dials.
    sock = socket.create_connection(split(address), timeout_s)
    channel = Channel(sock, timeout_s)
    patience_s = min(timeout_s, HANDSHAKE_S)
    try:
        if keys is not None:
            secret = SECRET_WORD
            channel.encrypt(keys, server=False, deadline=time.monotonic() + patience_s)
            keys.must_list(channel.certificate)
            if whom is not None:
                keys.must_have(channel.certificate, whom)
        accepted = prove_to_listener(channel, secret, run=run, me=me, older=older, timeout_s=patience_s)
        if accepted is None:
            raise ConnectionError(_without_handshake(address))
    except BaseException as error:
        channel.close()
        if isinstance(error, TimeoutError):  # no word of TLS from a machine that has let the connection in
            raise ConnectionError(_without_handshake(address)) from error
        raise
    channel.wait_at_most(timeout_s)
    return channel, accepted


def _without_handshake(address: str) -> str:
    return f"{address} was silent or hung up where the handshake begins"


def _tell_older(channel: Channel, data: bytes, deadline: float) -> None:
    """Sends an older process bytes that it reads as another version, and waits until it hangs up.

    Closing before its pending data has arrived would reset the connection, and it might not read our version.
    """
    with contextlib.suppress(OSError):
        channel.write(data, deadline)
        channel.read(_MOST_UNREAD, min(deadline, time.monotonic() + 2.0))


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(8, "little")
