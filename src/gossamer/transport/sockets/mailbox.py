"""Connections without a network: what two processes send each other lies in a folder or an object store that both reach.

    store/BOX                    a process listens, and says so again and again: when, by its clock
    store/BOX.d/STREAM/in-N      the N-th piece of a connection, from the process that has dialled
    store/BOX.d/STREAM/out-N     from the one that listens; a piece is [size, CRC-32] and its bytes, none at the end

A box has an address like any other, `NAME.mailbox:1`, so all that goes over a socket goes through a mailbox as it is: the news of
members, payloads, commits, states for newcomers, and the encryption of a run with keys, by which a piece that was changed, left
out, repeated or put there by somebody else ends its connection and changes nothing. Who reads a piece removes it.

An object store has no rename and needs none: a put under the final name is seen whole or not at all. A folder has, and a piece is
renamed into place. What a tool that copies folders has brought only half is read again later. Needs no torch.

Cost: an object for whatever was sent within some hundredths of a second, and a look for each connection every `POLL_S`.
"""

import contextlib
import errno
import logging
import math
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from gossamer.errors import ConfigError, TransportError
from gossamer.transport.sockets.addresses import shown

log = logging.getLogger("gossamer")

MAILBOX = "GOSSAMER_MAILBOX"
"""The environment variable with the store, as fsspec names it; what `--mailbox` says."""
POLL_S = {"file": 0.05, "memory": 0.01}
"""How long nobody looks for what has not come; half a second where it is not said."""
LOST_S = 30.0
"""How long a piece may lie there before its reader counts as gone, and one that is not whole before it counts as damaged."""
GONE_S = 300.0
"""How often the reader of the last piece is looked for: a connection with a process that was killed shall end."""
HERE_S = 10.0
"""How often the owner of a box says that it is there."""
FORGOTTEN_S = 86_400.0
"""How long the owner of a box may say nothing before the next who opens one removes it; longer than any two clocks differ."""
PARTING_S = 3.0
"""How long the last piece may lie there."""
_DOMAIN = ".mailbox"
_NAME = re.compile(r"[a-z0-9-]{1,40}")
_OWN = re.compile(r"[0-9a-f]{16}")
_STREAM = re.compile(r"[0-9a-f]{32}")
_HEAD = struct.Struct("<QQ")
_MOST_BYTES = 1 << 23
_AHEAD = 8
"""Pieces that are under way at most, as a socket has a window."""
_GATHER_S, _LOOKS = 0.02, 4
"""What is written without a longer pause becomes one object, and how often a pause is looked at."""
_MOST_STREAMS = 512
"""That others have opened: whoever can write into the store shall not take all threads of a process."""


class Mailbox:
    """A store that several processes reach; one object of a process may serve all of its threads.

    Args: `url` is a folder or what fsspec opens, such as s3://bucket/run.
    Raises: ConfigError for what cannot be opened.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            fs, root = url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(
                f"the mailbox '{url}' cannot be opened ({error}); give a folder or an address that fsspec knows, such as "
                "s3://bucket/run, with the package that it needs"
            ) from None
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        self._store = _Folder(root) if protocol == "file" else _ObjectStore(fs, root)
        self.poll_s = POLL_S.get(protocol, 0.5)

    def put(self, name: str, content: bytes) -> None:
        """Puts an object, which others see whole or not at all. Raises: OSError."""
        self._store.put(name, content)

    def get(self, name: str, most_bytes: int) -> bytes | None:
        """The content of an object; None where it has not come. Raises: OSError; TransportError for one that is too large."""
        try:
            return self._store.get(name, most_bytes)
        except FileNotFoundError:
            return None

    def there(self, name: str) -> bool:
        """Whether an object lies there. Raises: OSError."""
        return self._store.there(name)

    def names(self, under: str) -> list[str]:
        """The names right under a name. Raises: OSError."""
        try:
            return sorted(self._store.names(under))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def addresses(self) -> list[str]:
        """Those of all boxes; some may be of processes that have died, and come last. Raises: OSError."""
        return [shown(name + _DOMAIN, 1) for name in sorted(self._boxes(), key=self._said_s, reverse=True)]

    def remove_forgotten(self) -> None:
        """Removes what processes have left that were killed a day before somebody else was last here. Raises: OSError."""
        said = {box: self._said_s(box) for box in self._boxes()}
        # By the clocks of the others too: a machine whose own is a day ahead would remove the boxes of all that live.
        forgotten_s = min(time.time(), max(said.values(), default=0.0)) - FORGOTTEN_S
        for box, said_s in said.items():
            # A name of ours, with a time in it: other files of this folder are somebody's.
            if _OWN.fullmatch(box) and 0 < said_s < forgotten_s:
                self.remove(box)
                self.remove(f"{box}.d")

    def _boxes(self) -> list[str]:
        return [name for name in self.names("") if _NAME.fullmatch(name)]

    def _said_s(self, box: str) -> float:
        """When the owner of a box last said that it is there, by its own clock."""
        try:
            return float(self.get(box, 32) or 0)
        except (ValueError, OSError, TransportError):
            return 0.0

    def say_here(self, box: str) -> None:
        """Says that a process listens there. Raises: OSError."""
        self.put(box, f"{time.time():.3f}".encode())

    def remove(self, name: str) -> None:
        """Removes an object, or all under a name; nothing where it is not there."""
        with contextlib.suppress(Exception):  # what cannot be removed stays, and is read by nobody
            self._store.remove(name)


class _Folder:
    """A folder as the store, in which no link is followed: it would lead to other files of this user.

    Each folder of a name is opened within the one before, and none is named by a path: between a look at a path and its use
    somebody could put a link there.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def put(self, name: str, content: bytes) -> None:
        with self._inside(name, make=True) as (folder, last):
            part = f"{last}.{secrets.token_hex(4)}.part"
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder), "wb") as file:
                file.write(content)
            os.replace(part, last, src_dir_fd=folder, dst_dir_fd=folder)

    def get(self, name: str, most_bytes: int) -> bytes:
        with self._inside(name) as (folder, last):
            found = os.stat(last, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise TransportError(f"the object {name} of the mailbox is a link, a pipe or a folder; remove it")
            _must_fit(name, found.st_size, most_bytes)

            def opener(path: str, flags: int) -> int:
                # It may have been replaced since: by a link, or by a pipe, which would be opened once somebody writes.
                return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)

            with open(last, "rb", opener=opener) as file:
                return file.read(most_bytes)

    def there(self, name: str) -> bool:
        try:
            with self._inside(name) as (folder, last):
                os.stat(last, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def names(self, under: str) -> list[str]:
        with self._inside(f"{under}/" if under else "") as (folder, _):
            return os.listdir(folder)

    def remove(self, name: str) -> None:
        with self._inside(name) as (folder, last):
            if stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(last, dir_fd=folder)
            else:
                os.unlink(last, dir_fd=folder)

    @contextlib.contextmanager
    def _inside(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder in which an object lies, as a descriptor, and the last part of its name.

        Raises: FileNotFoundError; NotADirectoryError where a part of the name is a link.
        """
        *parts, last = name.split("/")
        if make:
            os.makedirs(self._root, exist_ok=True)
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                try:
                    inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                except OSError as error:
                    if (
                        error.errno == errno.ELOOP
                    ):  # what some systems say of a link, where Linux says that it is no folder
                        raise NotADirectoryError(errno.ENOTDIR, "a link is not followed", part) from None
                    raise
                os.close(folder)
                folder = inner
            yield folder, last
        finally:
            os.close(folder)


class _ObjectStore:
    """A store that fsspec reaches."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs, self._root = fs, root

    def put(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(name), content)

    def get(self, name: str, most_bytes: int) -> bytes:
        path = self._path(name)
        # Asked first: who can write into the store could put an object there that no memory holds.
        found = self._fs.info(path, refresh=True)
        _must_fit(name, found["size"], most_bytes)
        if found["type"] != "file":
            raise TransportError(f"the object {name} of the mailbox is no file, but of the kind '{found['type']}'")
        content: bytes = self._fs.cat_file(path, end=most_bytes)
        return content

    def there(self, name: str) -> bool:
        self._forget()
        return bool(self._fs.exists(self._path(name)))

    def names(self, under: str) -> list[str]:
        self._forget()
        return [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path(under), detail=False)]

    def remove(self, name: str) -> None:
        self._fs.rm(self._path(name), recursive=True)

    def _forget(self) -> None:
        self._fs.invalidate_cache()  # listings are kept, and what another has put would never be seen

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _must_fit(name: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise TransportError(f"the object {name} of the mailbox has {size} bytes, and {most_bytes} are the most")


def opened(url: str | None = None) -> Mailbox:
    """The mailbox of this process, as GOSSAMER_MAILBOX names it. Raises: ConfigError where nothing does."""
    url = url or os.environ.get(MAILBOX)
    if not url:
        raise ConfigError(
            f"the address of a mailbox was given, and no mailbox; give --mailbox URL, or set {MAILBOX}, on every machine"
        )
    with _lock:
        if url not in _open:
            _open[url] = Mailbox(url)
        return _open[url]


_open: dict[str, Mailbox] = {}
_carries: "set[_Carry]" = set()
_lock = threading.Lock()
_chance = secrets.SystemRandom()


def is_box(host: str) -> bool:
    """Whether a host is a box.

    >>> is_box("berlin.mailbox"), is_box("10.0.0.1")
    (True, False)
    """
    return host.endswith(_DOMAIN) and _NAME.fullmatch(host.removesuffix(_DOMAIN)) is not None


def listen_in(mailbox: Mailbox) -> tuple[socket.socket, str]:
    """A socket that listens to whoever dials this process's new box, and the address of the box.

    The box is there until the socket is closed. It listens on loopback, where its own thread connects for each that dials.
    Raises: TransportError where the store takes nothing.
    """
    name = secrets.token_hex(8)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = listener.getsockname()
    try:
        mailbox.remove_forgotten()
        mailbox.say_here(name)
    except OSError as error:
        listener.close()
        raise TransportError(
            f"the mailbox took no object ({error}); look at its address and your rights there"
        ) from None
    # No daemon: a process that ends is waited for until others have read what it has said last, and its box is gone.
    threading.Thread(
        target=_serve, args=(mailbox, name, weakref.ref(listener), address), name="gossamer mailbox"
    ).start()
    return listener, shown(name + _DOMAIN, 1)


def connect(host: str, timeout_s: float) -> socket.socket:
    """One end of a new connection with the process whose box this is.

    Raises: ConnectionRefusedError where there is no such box; OSError where the store does not answer; ConfigError.
    """
    mailbox, name = opened(), host.removesuffix(_DOMAIN)
    if not mailbox.there(name):
        raise ConnectionRefusedError(f"the mailbox has no box '{name}'")
    stream = f"{name}.d/{secrets.token_hex(16)}"
    mailbox.put(f"{stream}/in-0", _packed(b"\0"))  # the first piece tells the other end that there is a connection
    ours, theirs = socket.socketpair()
    _Carry(mailbox, stream, theirs, accepted=False).start()
    ours.settimeout(timeout_s)
    return ours


def _serve(mailbox: Mailbox, name: str, listener: weakref.ref[socket.socket], address: tuple[str, int]) -> None:
    """Looks for new connections until the socket is closed, or the process ends."""
    said_s = time.monotonic()
    while threading.main_thread().is_alive() and (sock := listener()) is not None and sock.fileno() >= 0:
        del sock  # else a listener that everybody has forgotten would never be closed
        with contextlib.suppress(Exception):  # a store that does not answer for a while, and raises what it likes
            if time.monotonic() > said_s + HERE_S:
                mailbox.say_here(name)
                said_s = time.monotonic()
            open_ = {one.stream for one in _carries.copy() if one.was_accepted}
            there = {f"{name}.d/{stream}" for stream in mailbox.names(f"{name}.d") if _STREAM.fullmatch(stream)} - open_
            # Any of them and not the first: those that are dead would keep all others out.
            for stream in _chance.sample(sorted(there), min(len(there), max(0, _MOST_STREAMS - len(open_)))):
                if mailbox.there(f"{stream}/in-0"):  # else it has ended, and a piece of it came too late
                    near = socket.create_connection(address)
                    _Carry(mailbox, stream, near, accepted=True).start()
        time.sleep(mailbox.poll_s)
    _leave(mailbox, name)


def _leave(mailbox: Mailbox, name: str) -> None:
    mailbox.remove(name)  # first, so that nobody dials any more
    until = time.monotonic() + 2 * PARTING_S + 1.0
    for carry in _carries.copy():
        if carry.stream.startswith(f"{name}.d/") or carry.closes:
            carry.ended.wait(max(0.0, until - time.monotonic()))
    mailbox.remove(f"{name}.d")


def _packed(content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


class _Carry:
    """Carries the bytes of one connection between a local socket and the store, until either end is closed.

    Args: `accepted` is whether the other end has dialled, so that its first piece, which carries nothing, lies there already.
    """

    def __init__(self, mailbox: Mailbox, stream: str, near: socket.socket, *, accepted: bool) -> None:
        self._mailbox, self.stream, self._near, self.was_accepted = mailbox, stream, near, accepted
        self._ours, self._others = ("out", "in") if accepted else ("in", "out")
        self._sent, self._came = 0 if accepted else 1, 0
        self._patience, self.ended = math.inf, threading.Event()

    def start(self) -> None:
        """Carries both ways, in threads of its own."""
        _carries.add(self)
        # Whoever trains writes to a socket, and does not wait for a store that takes seconds for a piece.
        threading.Thread(target=self._both, daemon=True, name="gossamer mailbox").start()

    def _both(self) -> None:
        # One thread for each way: the next piece of the other end may come in an hour, and ours is to go out now.
        inward = threading.Thread(target=self._until_lost, args=(self._in,), daemon=True, name="gossamer mailbox")
        inward.start()
        self._until_lost(self._out)
        # What this end has said last is read by then, and the other end says that it has closed too, unless it is gone.
        self._patience = time.monotonic() + PARTING_S
        inward.join()  # only then: a descriptor that is free may be another connection's a moment later
        self._near.close()
        with contextlib.suppress(Exception):
            self._is_read(self._sent - 1, PARTING_S)
            self._mailbox.remove(self.stream)
        _carries.discard(self)
        self.ended.set()

    @property
    def closes(self) -> bool:
        """Whether this end has closed, and waits for the other one."""
        return self._patience < math.inf

    def _until_lost(self, carry: Callable[[], None]) -> None:
        try:
            carry()
        except Exception as error:  # a store raises what it likes; the connection is lost then, as any may be
            # What somebody has put there, or a tool has spoilt, will be met again; that a peer is gone is told by others.
            level = logging.WARNING if isinstance(error, TransportError) else logging.INFO
            log.log(level, "a connection through the mailbox is lost: %s", error)
            self._patience = 0.0
        with contextlib.suppress(OSError):  # by which the other direction ends, and whoever uses the socket learns it
            self._near.shutdown(socket.SHUT_RDWR)

    def _out(self) -> None:
        content = b"?"
        while content:
            content = self._gathered()
            if not self._is_read(self._sent - _AHEAD, LOST_S):
                raise ConnectionError(f"nobody has read for {LOST_S:g} s what lies there")
            self._mailbox.put(self._piece(self._ours, self._sent), _packed(content))
            self._sent += 1

    def _gathered(self) -> bytes:
        """What the process has written, as one piece; nothing at the end."""
        content, quiet = bytearray(self._near.recv(_MOST_BYTES)), 0
        while content and len(content) < _MOST_BYTES and quiet < _LOOKS:
            try:
                # No timeout of the socket: it would be that of the thread which writes too.
                more = self._near.recv(_MOST_BYTES - len(content), socket.MSG_DONTWAIT)
            except BlockingIOError:
                quiet += 1
                time.sleep(_GATHER_S / _LOOKS)
                continue
            if not more:
                break
            content += more
            quiet = 0
        return bytes(content)

    def _in(self) -> None:
        part, since_s = None, time.monotonic()
        looked_s, sent = since_s, self._sent
        while time.monotonic() < self._patience:
            name = self._piece(self._others, self._came)
            raw = self._mailbox.get(name, _HEAD.size + _MOST_BYTES)
            if raw is None or not _whole(raw):
                if raw != part:
                    part, since_s = raw, time.monotonic()
                elif raw is not None and time.monotonic() > since_s + LOST_S:
                    raise TransportError(f"the object {name} is damaged, and has not changed for {LOST_S:g} s")
                if time.monotonic() > looked_s + GONE_S:
                    if sent and self._mailbox.there(self._piece(self._ours, sent - 1)):
                        raise ConnectionError(f"nobody has read for {GONE_S:g} s what lies there")
                    looked_s, sent = time.monotonic(), self._sent
                time.sleep(self._mailbox.poll_s)
                continue
            self._mailbox.remove(name)
            content, first = raw[_HEAD.size :], self.was_accepted and self._came == 0
            self._came += 1
            if not content:
                return
            if not first:  # which only says that there is a connection
                with contextlib.suppress(OSError):  # this end has closed
                    self._near.sendall(content)

    def _is_read(self, number: int, patience_s: float) -> bool:
        """Whether the other end has read a piece of ours, within this time."""
        until = time.monotonic() + patience_s
        while number >= 0 and self._mailbox.there(self._piece(self._ours, number)):
            if time.monotonic() > until:
                return False
            time.sleep(self._mailbox.poll_s)
        return True

    def _piece(self, direction: str, number: int) -> str:
        return f"{self.stream}/{direction}-{number}"


def _whole(raw: bytes) -> bool:
    """Whether all of a piece has come."""
    if len(raw) < _HEAD.size:
        return False
    size, check = _HEAD.unpack_from(raw)
    return len(raw) == _HEAD.size + size and zlib.crc32(raw[_HEAD.size :]) == check
