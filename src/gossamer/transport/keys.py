"""Keys of the machines of a run: only owners of the keys in the run file take part, and all traffic is encrypted.

A key is an Ed25519 key with a self-signed certificate. The certificates of all peers are in the run file, as `[peers]`,
and only these are trusted; the key stays on its machine, in a file that only its owner may read. Each connection is
mutually authenticated TLS 1.3, by Python's ssl. A certificate names no machine.

Needs no torch.
"""

import base64
import binascii
import hashlib
import os
import ssl
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from shlex import quote
from typing import Annotated

from pydantic import Field

from gossamer.errors import ConfigError, RefusedError, require
from gossamer.settings.schema import build, read_toml, settings
from gossamer.transport.secret import others_may_read, write_private

KEY = "GOSSAMER_KEY"
"""The environment variable with the file of this machine's key."""
SECRET_WORD = b"the certificates of this run prove who takes part"
"""Replaces the secret of a run in the handshake within an encrypted connection."""
_LONGEST_BYTES = 1 << 14
_YEARS = 10
_LONGEST_NAME = 64


@settings()
class Peer:
    """A machine, or several with one key, that may take part in the run."""

    certificate: str = ""
    """The output of `gossamer keys show` on that machine: its certificate, in base64."""
    workers: Annotated[int, Field(ge=0)] = 1
    """The number of workers it may run. Numbers are assigned in the order of the file: the first peer with 2 has
    workers 0 and 1.
    """
    server: bool = False
    """Whether it may be the server of a run with a [server]."""

    def __post_init__(self) -> Iterator[str]:
        if _der(self.certificate) is None:
            yield (
                f"certificate is {self.certificate!r:.40}, which is not one certificate; paste what gossamer keys show prints on "
                "that machine"
            )


@settings()
class _PeersFile:
    peers: Mapping[str, Peer] = field(default_factory=dict)


@dataclass(frozen=True)
class _Listed:
    name: str
    numbers: frozenset[int]


class Keys:
    """The key of this machine and the certificates of all peers of a run.

    Args:
        path: of the key of this machine.
        peers: those of the run file, in its order.
        workers: of the run; the number of a server follows theirs.
    Raises: ConfigError for a key that cannot be read, that others may read, that is not among the peers, or whose file lacks
        the private key of its certificate.
    """

    def __init__(self, path: Path, peers: Mapping[str, Peer], workers: int) -> None:
        self.path = path
        self._peers = {
            _der(peers[name].certificate) or b"": _Listed(
                name, frozenset([*numbers, *([workers] * peers[name].server)])
            )
            for name, numbers in dealt(peers).items()
        }
        self._whose = {number: listed.name for listed in self._peers.values() for number in listed.numbers}
        self.certificate = certificate_of(path)
        """This machine's certificate, as DER."""
        if self.certificate not in self._peers:
            raise ConfigError(
                f"the key '{path}' ({certificate_fingerprint(self.certificate)}) is none of the run's [peers] "
                f"({', '.join(peers)}); add the lines that gossamer keys show prints to the run file of every machine, or name "
                f"another key with {KEY}=FILE"
            )
        # Created at the start, when the private key is read: an unusable one would otherwise fail each connection.
        self._accepting, self._dialling = self._new(ssl.PROTOCOL_TLS_SERVER), self._new(ssl.PROTOCOL_TLS_CLIENT)
        self._accepting.num_tickets = 0  # no session resumption: each connection authenticates its peer

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """Those of all peers, as DER."""
        return tuple(self._peers)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """The TLS context of this machine's connections."""
        return self._accepting if server else self._dialling

    def numbers(self, certificate: bytes | None) -> frozenset[int]:
        """The numbers of workers, and of the server, allowed to the owner of a certificate."""
        peer = self._peers.get(certificate or b"")
        return frozenset() if peer is None else peer.numbers

    def are_one(self, number: int, other: int) -> bool:
        """Whether two numbers belong to one key, so that one may report on the other."""
        return number == other or (number in self._whose and self._whose[number] == self._whose.get(other))

    def name(self, certificate: bytes | None) -> str:
        """The run file's name for the owner of a certificate."""
        peer = self._peers.get(certificate or b"")
        return "a stranger" if peer is None else f"peer '{peer.name}'"

    def must_list(self, certificate: bytes | None) -> None:
        """Raises RefusedError unless the run file lists a certificate.

        OpenSSL's check is not enough: a listed CA certificate would also accept any certificate that it has signed.
        """
        if certificate not in self._peers:
            fingerprint = certificate_fingerprint(certificate or b"")
            raise RefusedError(
                "key",
                f"it showed a certificate ({fingerprint}) that is not in the run's [peers]; add it there, or use a listed key",
            )

    def must_have(self, certificate: bytes | None, number: int) -> None:
        """Raises RefusedError unless the owner of a certificate may have this number."""
        if number not in self.numbers(certificate):
            raise RefusedError(
                "key",
                f"{self.name(certificate)} calls itself worker {number}, which its key may not be; give it a worker of its own "
                "in [peers]",
            )

    def must_own(self, number: int) -> None:
        """Raises ConfigError unless this machine may have this number."""
        if number not in self.numbers(self.certificate):
            allowed = ", ".join(map(str, sorted(self.numbers(self.certificate)))) or "none"
            raise ConfigError(
                f"this machine's key '{self.path}' is {self.name(self.certificate)} in [peers], with the workers {allowed}, and "
                f"this process is worker {number}; start the right one here, or deal the workers otherwise"
            )

    def must_start(self, here: int) -> None:
        """Raises ConfigError unless this machine may have the first `here` workers of a run, as the machine that starts
        it does.
        """
        allowed = self.numbers(self.certificate)
        if allowed.issuperset(range(here)):
            return
        me, first = self.name(self.certificate), self._whose.get(0, "")
        instead = (
            f"give --local at most {len(allowed)}, or that peer more workers"
            if 0 in allowed
            else f"let the machine of peer '{first}' start the run and join it from here, or list this peer first, in the run "
            "file of every machine"
        )
        raise ConfigError(
            f"who starts a run has its workers from 0 on, here {here}, and this machine's key is {me} in [peers], with the "
            f"workers {', '.join(map(str, sorted(allowed))) or 'none'}; {instead}"
        )

    def _new(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version, context.check_hostname = ssl.TLSVersion.TLSv1_3, False  # no certificate names a host
        context.verify_mode = ssl.CERT_REQUIRED
        _load_key(context, self.path)
        for certificate in self._peers:
            context.load_verify_locations(cadata=certificate)
        return context


def dealt(peers: Mapping[str, Peer]) -> dict[str, range]:
    """The worker numbers assigned to each peer.

    >>> dealt({})
    {}
    """
    ends = [*accumulate((peer.workers for peer in peers.values()), initial=0)]
    return {name: range(start, end) for name, (start, end) in zip(peers, pairwise(ends), strict=True)}


def read_peers(path: Path) -> dict[str, Peer]:
    """The peers in a TOML file: its tables [peers.NAME], as `gossamer keys show` prints them. Raises: ConfigError."""
    if not path.is_file():
        raise ConfigError(f"the peers '{path}' are not a file; name a TOML file with tables [peers.NAME]")
    document = read_toml(path, f"'{path}'")
    peers = build(_PeersFile, {"peers": document.get("peers", {})}, source=f"'{path}'").peers
    if not peers:
        raise ConfigError(f"'{path}' has no table [peers.NAME]; paste what gossamer keys show prints on each machine")
    if (sentence := duplicate_certificates(peers)) is not None:
        raise ConfigError(f"'{path}': {sentence}")
    return dict(peers)


def duplicate_certificates(peers: Mapping[str, Peer]) -> str | None:
    """A sentence about two peers with the same certificate, in any base64 form; None if all differ.

    >>> duplicate_certificates({})
    """
    names: dict[bytes | None, str] = {}
    for name, peer in peers.items():
        first = names.setdefault(_der(peer.certificate), name)
        if first != name:
            return (
                f"[peers] has the same certificate for '{first}' and '{name}'; list each certificate once, with as many workers "
                "as it fills"
            )
    return None


def keys_for(peers: Mapping[str, Peer], workers: int) -> Keys | None:
    """The keys of a run; None for one without [peers], whose workers share a secret.

    The key of this machine is that of GOSSAMER_KEY (`--key`), else the one in `own_keys()` that the run file lists.

    Raises: ConfigError.
    """
    if not peers:
        return None
    if given := os.environ.get(KEY):
        return Keys(Path(given), peers, workers)
    listed = {_der(peer.certificate) for peer in peers.values()}
    paths = [path for path in own_keys() if certificate_of(path) in listed]
    if len(paths) == 1:
        return Keys(paths[0], peers, workers)
    listed_keys = f"{len(paths)} of the keys" if paths else "none of the keys"
    raise ConfigError(
        f"[peers] lists {listed_keys} in '{_home()}' on this machine, and one is needed; name the right one with "
        f"{KEY}=FILE before the command (train and doctor take --key FILE too), or make one with gossamer keys new NAME"
    )


def own_keys() -> list[Path]:
    """The keys of this user on this machine."""
    return sorted(_home().glob("*.pem"))


def new_key(name: str, path: Path | None = None) -> Path:
    """Creates a key with its certificate, in a file that only its owner may read, and returns its path.

    Raises: ConfigError for an invalid name, a file that exists or cannot be written; MissingPackageError.
    """
    if not name or not name.isprintable() or len(name) > _LONGEST_NAME or set(name) & set('/\\."'):
        raise ConfigError(
            f"the key's name is {name!r:.80}; give up to {_LONGEST_NAME} printable characters without slashes, dots and quotes"
        )
    path = path or _home() / f"{name}.pem"
    content = _new_key_pem()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        write_private(path, content)
    except FileExistsError:
        raise ConfigError(f"'{path}' exists, and a key is never written over; choose another name or --out") from None
    except OSError as error:
        raise ConfigError(
            f"the key could not be written to '{path}' ({error.strerror}); choose another --out"
        ) from None
    return path


def certificate_of(path: Path) -> bytes:
    """The certificate in the file of a key, as DER.

    Raises: ConfigError for a file that cannot be read, has none, or that others may read.
    """
    try:
        with path.open("rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(_LONGEST_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(
            f"the key '{path}' cannot be read ({error.strerror}); make one with gossamer keys new NAME"
        ) from None
    if others_may_read(mode):
        raise ConfigError(
            f"the key '{path}' can be read by others (mode {stat.S_IMODE(mode):o}); run chmod 600 {quote(str(path))}"
        )
    start, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if start < 0 or end < start:
        raise ConfigError(f"'{path}' holds no certificate; make a key with gossamer keys new NAME")
    raw = _der("".join(text[start + len(ssl.PEM_HEADER) : end].split()))
    if raw is None:
        raise ConfigError(f"the certificate in '{path}' is damaged; make a new key with gossamer keys new NAME")
    return raw


def require_private_key(path: Path) -> None:
    """Checks that the file of a key has the private key of its certificate.

    Raises: ConfigError for a private key that is missing, damaged, another certificate's, or behind a password.
    """
    _load_key(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), path)


def _load_key(context: ssl.SSLContext, path: Path) -> None:
    def password() -> bytes:
        # Without this OpenSSL would prompt on the terminal, and a process without one would hang.
        raise ConfigError(
            f"the private key in '{path}' has a password, and is read by processes that nobody attends; give a key without one, "
            "such as gossamer keys new NAME makes"
        )

    try:
        context.load_cert_chain(path, password=password)
    except OSError as error:  # SSLError is one
        # OpenSSL gives a reason only where the private key is readable and belongs to another certificate.
        reason = (getattr(error, "reason", None) or "it is missing or damaged").lower().replace("_", " ")
        raise ConfigError(
            f"the key '{path}' has no private key that fits its certificate ({reason}); copy the whole file that gossamer keys "
            "new wrote, or make a new key with gossamer keys new NAME"
        ) from None


def certificate_fingerprint(certificate: bytes) -> str:
    """A short name of a certificate, to be compared by eye.

    >>> certificate_fingerprint(b"certificate")[:22]
    'sha256:03:d6:6d:d0:88:'
    """
    raw = hashlib.sha256(certificate).hexdigest()
    return "sha256:" + ":".join(raw[i : i + 2] for i in range(0, 32, 2))


def _home() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "gossamer" / "keys"


def _der(text: str) -> bytes | None:
    """A single certificate in base64; None for anything else, including trailing data."""
    try:
        raw = base64.b64decode(text, validate=True)
        # OpenSSL would trust each of several concatenated certificates, unknown to Keys.
        if len(raw) > _LONGEST_BYTES or len(raw) != _der_size(raw):
            return None
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=raw)
    except (binascii.Error, ValueError, ssl.SSLError):
        return None
    return raw


def _der_size(raw: bytes) -> int:
    """The size of the first DER value by its header, which may exceed the data; 0 without a header.

    >>> _der_size(bytes([0x30, 2, 9, 9, 7])), _der_size(bytes([0x30, 0x82, 1, 0])), _der_size(b"")
    (4, 260, 0)
    """
    if len(raw) < 2:
        return 0
    # A length below 128 is the second byte itself; else that byte has the number of length bytes that follow.
    more = raw[1] & 0x7F if raw[1] & 0x80 else 0
    return 2 + more + (int.from_bytes(raw[2 : 2 + more]) if more else raw[1])


def _new_key_pem() -> bytes:
    """A new key and its certificate, as PEM. Its subject is a random number, so that it reveals no name."""
    require("cryptography", "keys", "making a key")
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, now = Ed25519PrivateKey.generate(), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, os.urandom(16).hex())])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
