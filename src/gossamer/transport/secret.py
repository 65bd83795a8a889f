"""The secret of a run, which authenticates its workers.

A launcher creates one for the processes that it starts. Otherwise it comes from the environment variable
GOSSAMER_SECRET, or from the run folder, where a server writes it. The secret itself is never sent. It authenticates
(`code`) and does not encrypt: traffic between workers is in the clear.
"""

import functools
import hmac
import logging
import os
import secrets
import stat
import sys
from pathlib import Path
from shlex import quote

from gossamer.errors import ConfigError

log = logging.getLogger("gossamer")

SECRET = "GOSSAMER_SECRET"
"""The environment variable with the secret of a run."""
SECRET_FILE = "secret"
"""The file of a run folder with the secret of the run."""
CODE_BYTES = 32
SHORTEST = 32
"""Fewest characters of a secret; an observer of a proof could guess short ones."""
LONGEST_BYTES = 4096


def new_secret() -> str:
    """256 random bits, as text."""
    return secrets.token_hex(32)


def code(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of length-delimited parts: only owners of the secret can compute or check it.

    >>> len(code(b"s", b"ab", b"c")), code(b"s", b"ab", b"c") == code(b"s", b"a", b"bc")
    (32, False)
    """
    return hmac.digest(secret, framed(*parts), "sha256")


def framed(*parts: bytes) -> bytes:
    """What is signed: parts that cannot run into each other."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def environment_secret() -> bytes:
    """The secret in GOSSAMER_SECRET; empty if unset. Raises ConfigError for one that is too short."""
    text = os.environ.get(SECRET, "")
    return _checked(text, SECRET) if text else b""


@functools.cache
def warn_of_plain(traffic: str, remedy: str) -> None:
    """Warns once in this process that others on the path may read what it sends, and says how to encrypt it."""
    log.warning(
        "traffic %s is not encrypted: parameters and settings cross the network in the clear; keep it in a network of your own "
        "or in a tunnel, or %s",
        traffic,
        remedy,
    )


def others_may_read(mode: int) -> bool:
    """Whether others than the owner may use a file of this mode; Windows has no such modes.

    >>> others_may_read(0o644), others_may_read(0o600)
    (True, False)
    """
    return sys.platform != "win32" and bool(mode & (stat.S_IRWXG | stat.S_IRWXO))


def read_secret(path: Path) -> str:
    """The secret in a file, with a warning where others may read it, as with a copy that has another mode. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(LONGEST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(
            f"the secret of the run cannot be read from '{path}' ({error.strerror}); copy the file that the first machine wrote"
        ) from None
    if others_may_read(mode):
        log.warning(
            "others on this machine may read the secret '%s' (mode %o); run chmod 600 %s",
            path,
            stat.S_IMODE(mode),
            quote(str(path)),
        )
    return _checked(text, f"the file '{path}'").decode()


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that its owner alone may read. Raises: OSError, and leaves none then."""
    # Created with its mode: between writing and a later chmod others could read it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink()
        raise


def folder_secret(folder: Path, *, make: bool = False) -> bytes:
    """The secret of a run: from the environment, else from its folder, else a new one written there, readable by its
    owner only.

    Args: `make` allows creating one.
    Raises: ConfigError when there is none, or it cannot be read or written.
    """
    if given := environment_secret():
        return given
    path = folder / SECRET_FILE
    if path.exists():
        return read_secret(path).encode()
    if not make:
        raise ConfigError(
            f"this worker does not know the secret of the run: there is neither {SECRET} nor '{path}'; copy the file "
            f"'{SECRET_FILE}' from the run folder of the first machine, or name it with --secret"
        )
    text, scratch = new_secret(), folder / f".{SECRET_FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        write_private(scratch, f"{text}\n".encode())
        os.replace(scratch, path)  # atomic: a concurrent reader gets the whole secret or none
    except OSError as error:
        raise ConfigError(
            f"the secret of the run could not be written to '{path}' ({error.strerror}); choose another --out, or set {SECRET}"
        ) from None
    return text.encode()


def _checked(text: str, where: str) -> bytes:
    secret = text.strip()
    if len(secret) < SHORTEST:
        raise ConfigError(
            f"{where} holds a secret of {len(secret)} characters and at least {SHORTEST} are needed; "
            "`openssl rand -hex 32` makes one"
        )
    return secret.encode()
