"""A folder or an object store as a bucket: objects with flat names that are created once and never changed.

An object is `[SHA-256 or HMAC, size of the head, head as JSON, body]`. The code covers its name too, so a piece that is damaged
or lies under another name is refused; with the secret of a run, also one by a writer without it. Needs no torch.
"""

import contextlib
import datetime
import errno
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from gossamer.errors import ConfigError, TransportError
from gossamer.record.jsonl import json_from_peer

log = logging.getLogger("gossamer")
MOST_HEAD_BYTES = 1 << 24
"""Most bytes of a head in JSON: some hundred for each of 100,000 workers."""
_CODE = hashlib.sha256().digest_size
_SIZE = 4


_PART, _LEFT_S = re.compile(r"\.[0-9a-f]{16}"), 3600.0
"""The name of an object in a folder while it is written, and how long it is not written to where its writer was killed."""


class RefusedByStoreError(OSError):
    """An answer of an object store that the same request gets again: no right, no such bucket, a wrong region."""


_REFUSALS = (RefusedByStoreError, PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
_REFUSAL_CODES = (errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)
_PASSING = (408, 409, 425, 429)
"""The answers of HTTP below 500 that another try may change."""


def is_lasting(error: OSError) -> bool:
    """Whether a store gives the same answer until somebody changes it; a full disk is emptied by the others' states.

    >>> is_lasting(PermissionError()), is_lasting(TimeoutError())
    (True, False)
    """
    return isinstance(error, _REFUSALS) or error.errno in _REFUSAL_CODES


class Bucket(Protocol):
    """The operations of a store that a run needs. Each method is one request, and raises OSError where the store fails."""

    def create(self, name: str, content: bytes) -> bool:
        """Creates an object, which others see whole or not at all; False where there is one of this name."""
        ...

    def get(self, name: str, most_bytes: int) -> bytes | None:
        """The content of an object; None where there is none. Raises: TransportError for one that is larger."""
        ...

    def names(self, after: str) -> list[str]:
        """All names that sort after this one, sorted.

        Without a bound: a part of a listing would hide what the run needs. Who fills a store with names delays the run, and
        could as well delete it.
        """
        ...

    def remove(self, name: str) -> None:
        """Removes an object, if there is one."""
        ...


class Item(NamedTuple):
    """The content of an object."""

    head: Any
    body: memoryview
    writers: frozenset[int] | None = None
    """The slots of the key that has signed it; None where no key has."""

    def is_of(self, slot: int) -> bool:
        """Whether the worker of a slot may have written it."""
        return self.writers is None or slot in self.writers


class Seal(Protocol):
    """How objects are protected, and who may write them."""

    @property
    def proves_writers(self) -> bool:
        """Whether an object proves which key has written it."""
        ...

    def may_hold_slot(self, slot: int) -> bool:
        """Whether this process may have a slot."""
        ...

    def trusts(self, slot: int) -> bool:
        """Whether a mean that the worker of a slot has taken counts unchecked."""
        ...

    def sealed(self, name: str, head: Mapping[str, Any], body: bytes | memoryview = b"") -> bytes:
        """The content of an object."""
        ...

    def opened(self, name: str, raw: bytes) -> Item:
        """The content of an object as `sealed` made it. Raises: TransportError for anything else."""
        ...


class SecretSeal(NamedTuple):
    """Objects with a code by the secret that all workers of a run share, or a checksum only. See `Seal`."""

    secret: bytes = b""
    proves_writers: bool = False

    def may_hold_slot(self, slot: int) -> bool:
        """See `Seal`."""
        return True

    def trusts(self, slot: int) -> bool:
        """See `Seal`."""
        return True

    def sealed(self, name: str, head: Mapping[str, Any], body: bytes | memoryview = b"") -> bytes:
        """See `Seal`.

        >>> SecretSeal().opened("r0", SecretSeal().sealed("r0", {"steps": 5}, b"xyz")).head
        {'steps': 5}
        """
        content = head_and_body(head, body)
        return self._code(name, content) + content

    def opened(self, name: str, raw: bytes) -> Item:
        """See `Seal`.

        >>> SecretSeal().opened("r1", SecretSeal().sealed("r0", {"steps": 5}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gossamer.errors.TransportError: the object 'r1' of the store is not what a worker of this run wrote there...
        """
        whole = memoryview(raw)
        code = self._code(name, whole[_CODE:])
        if hmac.compare_digest(code, whole[:_CODE]) and (item := item_in(whole[_CODE:])) is not None:
            return item
        raise TransportError(
            f"the object '{name}' of the store is not what a worker of this run wrote there: it is damaged, or of one with "
            "another secret; remove what others wrote there, or start with an empty store"
        )

    def _code(self, name: str, content: bytes | memoryview) -> bytes:
        whole = hmac.new(self.secret, f"gossamer object {name}\0".encode(), hashlib.sha256)
        whole.update(content)
        return whole.digest()


def head_and_body(head: Mapping[str, Any], body: bytes | memoryview) -> bytes:
    """The content of an object as bytes: the size of the head, the head as JSON, and the body.

    >>> item_in(memoryview(head_and_body({"steps": 5}, b"xyz"))).head
    {'steps': 5}
    """
    text = json.dumps(head, allow_nan=False).encode()
    return b"".join((len(text).to_bytes(_SIZE, "little"), text, body))


def item_in(content: memoryview) -> Item | None:
    """The content that `head_and_body` made; None for anything else."""
    size = int.from_bytes(content[:_SIZE], "little")
    if not _SIZE <= _SIZE + size <= len(content) or size > MOST_HEAD_BYTES:
        return None
    return Item(json_from_peer(bytes(content[_SIZE : _SIZE + size])), content[_SIZE + size :])


class ObjectLimit(NamedTuple):
    """The most bytes of an object that a kind of store creates by one request, as `ObjectStore.create` does."""

    store: str
    most_bytes: int


S3_LIMIT = ObjectLimit("S3", 5 << 30)
AZURE_LIMIT = ObjectLimit("Azure", 5000 << 20)
"""Of Put Blob, from version 2019-12-12 of that interface on; `obstore` uses a later one."""


def object_limit(url: str) -> ObjectLimit | None:
    """The limit of the store at an address; None for a folder, and where none is known.

    >>> [object_limit(url).store for url in ("s3://bucket/run", "https://bucket.s3.eu-west-1.amazonaws.com/run")]
    ['S3', 'S3']
    >>> [object_limit(url).store for url in ("abfs://container/run", "https://a.blob.core.windows.net/container/run")]
    ['Azure', 'Azure']
    >>> object_limit("gs://bucket/run"), object_limit("/runs/az")
    (None, None)
    """
    if re.match(r"s3a?:|https://[^/]*\.(amazonaws|r2\.cloudflarestorage)\.com(/|$)", url, re.IGNORECASE):
        return S3_LIMIT
    azure = r"(az|azure|adl|abfss?):|https://[^/]*\.(blob|dfs)\.(core\.windows\.net|fabric\.microsoft\.com)(/|$)"
    return AZURE_LIMIT if re.match(azure, url, re.IGNORECASE) else None


def too_large(state_bytes: float, limit: ObjectLimit) -> str:
    """Why a store would refuse the state of a run; empty where it takes it.

    >>> too_large(1e9, S3_LIMIT), too_large(6e9, S3_LIMIT)
    ('', 'the state of this run is an object of 6 GB, where S3 takes at most 5.37 GB in one; take a folder or another store, \
or a smaller model')
    """
    return (
        ""
        if state_bytes <= limit.most_bytes
        else f"the state of this run is an object of {state_bytes / 1e9:.3g} GB, where {limit.store} takes at most "
        f"{limit.most_bytes / 1e9:.3g} GB in one; take a folder or another store, or a smaller model"
    )


def bucket_at(url: str) -> Bucket:
    """The bucket at an address. Raises: ConfigError for one that cannot be opened."""
    if re.match(r"[A-Za-z][A-Za-z0-9]+:/(?!/)|file://(?!/)", url):  # else a folder of that name would be made here
        raise ConfigError(
            f"the store '{url}' is no complete address; write the path of a folder, file:///path, or an object store such as "
            "s3://bucket/run"
        )
    try:
        return (
            Folder(unquote(url.removeprefix("file://")))
            if url.startswith("file://")
            else (ObjectStore(url) if "://" in url else Folder(url))
        )
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"the store '{url}' cannot be opened ({error}); give a folder, or an object store such as s3://bucket/run with pip "
            "install 'gossamer[store]' and its credentials in the environment"
        ) from None


def opened_bucket(url: str) -> Bucket:
    """The bucket at an address, after a trial: a run needs a store that creates an object only where there is none.

    Raises: ConfigError for one that cannot be opened, or has no such conditional create.
    """
    bucket, name = bucket_at(url), f"probe-{secrets.token_hex(8)}"
    why = "it wrote over an object that was there"
    try:
        if isinstance(bucket, Folder) and not os.path.isdir(bucket.root):
            os.makedirs(bucket.root, exist_ok=True)
            log.warning(
                "the store '%s' was not there and is made for a new run; to join one that is there already, correct the address",
                bucket.root,
            )
        refuses = bucket.create(name, b"1") and not bucket.create(name, b"2")
        try:
            if isinstance(bucket, Folder):
                bucket.remove_parts(name)
            bucket.get(name, 1)
            bucket.names("~")  # behind all names of a run
        finally:
            bucket.remove(name)
    except NotImplementedError:  # the answer of the library for some kinds
        refuses, why = False, "stores of this kind write over an object that is there"
    except OSError as error:
        raise ConfigError(
            f"the store '{url}' cannot be used ({error}); give a folder with hard links, or an object store that creates an "
            "object only where there is none, and in which this machine may list, read, create and remove"
        ) from None
    if not refuses:
        raise ConfigError(
            f"the store '{url}' has no conditional create: {why}, so two workers could close one round with two outcomes; give "
            "a store that has it (S3, GCS and Azure do)"
        )
    return bucket


class Folder:
    """A folder as a bucket: an object is written aside and linked under its name, which fails where there is one."""

    def __init__(self, root: str) -> None:
        self.root = root

    def create(self, name: str, content: bytes) -> bool:
        """See `Bucket`."""
        path, part = os.path.join(self.root, name), os.path.join(self.root, f".{secrets.token_hex(8)}")
        try:
            with open(part, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave an empty object under the name
            os.link(part, path)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
        return True

    def remove_parts(self, newest: str) -> None:
        """Removes what killed processes have left of objects: parts that nobody had written to for an hour before this object.

        So the clock of the store alone counts. A process that was only stopped for so long writes its object once more.
        """
        now_s = os.stat(os.path.join(self.root, newest)).st_mtime
        with os.scandir(self.root) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process removes it too
                    if _PART.fullmatch(entry.name) and now_s - entry.stat().st_mtime > _LEFT_S:
                        os.unlink(entry.path)

    def get(self, name: str, most_bytes: int) -> bytes | None:
        """See `Bucket`."""

        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # no link leads elsewhere, and no pipe blocks

        try:
            with open(os.path.join(self.root, name), "rb", opener=opener) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "it is no file", name)
                _must_fit(name, status.st_size, most_bytes)
                return file.read(most_bytes)
        except FileNotFoundError:
            return None

    def names(self, after: str) -> list[str]:
        """See `Bucket`."""
        return sorted(name for name in os.listdir(self.root) if name > after and not name.startswith("."))

    def remove(self, name: str) -> None:
        """See `Bucket`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.root, name))


class ObjectStore:
    """An object store that `obstore` reaches. Raises: ImportError without that package, ValueError for no such address."""

    def __init__(self, url: str) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError
        from obstore.store import from_url

        self._api, self._exists, self._failed = obstore, AlreadyExistsError, BaseError
        with self._errors():
            # The caller retries, and reports it.
            patience: Any = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=30)}
            self._store = from_url(url) if url.startswith("memory:") else from_url(url, retry_config=patience)

    @contextlib.contextmanager
    def _errors(self) -> Any:
        """A context that turns the errors of the library into OSError."""
        try:
            yield
        except (self._failed, FileNotFoundError) as error:
            answer = str(error).partition("\n")[0]
            status = re.search(r"status code: (4\d\d)\b", answer)
            # The library has one class for most of them.
            lasts = int(status[1]) not in _PASSING if status is not None else "redirect without LOCATION" in answer
            raise (RefusedByStoreError if lasts else OSError)(answer[:300]) from None

    def create(self, name: str, content: bytes) -> bool:
        """See `Bucket`."""
        with self._errors():
            try:
                self._api.put(self._store, name, content, mode="create", use_multipart=False)
            except self._exists:
                return False
            return True

    def get(self, name: str, most_bytes: int) -> bytes | None:
        """See `Bucket`."""
        with self._errors():
            try:
                result = self._api.get(self._store, name)
                _must_fit(name, result.meta["size"], most_bytes)
                return bytes(result.bytes())
            except FileNotFoundError:
                return None

    def names(self, after: str) -> list[str]:
        """See `Bucket`."""
        with self._errors():
            return sorted(one["path"] for some in self._api.list(self._store, offset=after) for one in some)

    def remove(self, name: str) -> None:
        """See `Bucket`."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._store, name)


def _must_fit(name: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise TransportError(
            f"the object '{name}' of the store has {size} bytes where at most {most_bytes} are expected; remove it"
        )
