"""The store of a run: its address, and its entries, authenticated by the run's secret.

The store is a torch TCPStore, which does not authenticate. Ours listens only on the address towards the workers,
torchrun's on all. Gossamer accepts an entry only with an authentication code of its name and content under the secret
of the run. That does not encrypt, nor prevent an attacker who reaches the store from removing entries, replaying an
older entry of the same name, or filling the memory. Nor does it protect the keys that torch itself writes, with the
addresses at which the processes of a group connect: torch cannot authenticate them.

A client of such a store waits for each answer in C++, without a deadline and deaf to signals: forever, if a firewall,
router or a power cut drops its connection silently. So every call on a store goes through `answer`, which makes it in a
thread.
"""

import contextlib
import errno
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from typing import NamedTuple, TypeVar

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import PeerError, RefusedError, TransportError, first_line
from gossamer.transport.processes.interfaces import address_towards, advised, leads_to_itself
from gossamer.transport.secret import CODE_BYTES, code
from gossamer.transport.sockets.addresses import shown
from gossamer.transport.sockets.keepalive import keep_alive, keeping_alive

THREADS = "gossamer transfer"
"""The name of all threads that may be inside torch when a run ends: of transfers, the board and the store."""
ENTRY_BYTES = 1 << 20
"""Most bytes of the content of an entry."""
FALLEN = "fallen"
"""The entry in which a launcher reports the first worker that failed: its number and its exit code."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25
"""The polling interval of a worker that waits for entries or a failure: short at first, then growing."""
ANSWER_S = 5.0
"""The timeout of a store call that is retried over another connection, or in the next round."""

_MOST_TRIES = 10_000
"""The most attempts of a compare-and-set; more failures mean deliberate interference."""
T = TypeVar("T")

log = logging.getLogger("gossamer")


class NoAnswerError(DistStoreError):
    """A store has not answered in time; torch's error for a lost connection has the same parent."""


_unanswered: list[tuple[Store, threading.Thread]] = []
"""Stores with an unanswered call, and the thread that still waits for it."""


def answer(store: Store, timeout_s: float, ask: Callable[[], T]) -> T:
    """The result of a call on a store, or of any torch function that waits for one; the only way to make such a call.

    Signals are handled during the wait. An unanswered call is left to its thread, and other calls on this store wait
    for it, as they would in torch.

    Raises: NoAnswerError when there is none within `timeout_s`; what `ask` raises.

    >>> from torch.distributed import HashStore
    >>> answer(HashStore(), 10.0, lambda: 3)
    3
    """
    root, deadline = _root(store), time.monotonic() + timeout_s
    for thread in [thread for other, thread in _unanswered if other is root]:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise _no_answer(root, timeout_s)
    _unanswered[:] = [one for one in _unanswered if one[1].is_alive()]
    came = Future[T]()
    thread = threading.Thread(target=_try, args=(ask, came), name=THREADS, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # as Python exits it may start none, and the call has only the deadline of its connection
        _try(ask, came)
    if not wait([came], max(0.0, deadline - time.monotonic())).done:
        # Kept with its store, so that `root` of another part of it is the same object.
        _unanswered.append((root, thread))
        raise _no_answer(root, timeout_s)
    return came.result()


def _try(make: Callable[[], T], made: Future[T]) -> None:
    """Sets the result of a call, or its error, unless another call has done so."""
    with contextlib.suppress(InvalidStateError):
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)


def unanswered(store: Store) -> bool:
    """Whether an earlier call on a store still waits for its answer."""
    root = _root(store)
    return any(other is root and thread.is_alive() for other, thread in _unanswered)


def _no_answer(root: Store, timeout_s: float) -> NoAnswerError:
    where = f"the store at {shown(root.host, root.port)}" if isinstance(root, TCPStore) else "it"
    return NoAnswerError(
        f"{where} did not answer for {timeout_s:g} s: its machine is down, or a firewall or router drops what is sent"
    )


def _root(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


@contextlib.contextmanager
def store_answers() -> Iterator[None]:
    """Turns torch's errors for a lost store into a TransportError."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            f"the store where the workers meet is gone ({first_line(error)}); look at the log of the launcher or of worker 0"
        ) from error


class Entries(NamedTuple):
    """The entries that Gossamer writes into a store, and those it reads.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> entries = Entries(store, b"known to all workers")
    >>> entries.set("here", "gloo")
    >>> entries.get("here"), entries.get("there"), Entries(store, b"a guess").get("here")
    (b'gloo', None, None)
    """

    store: Store
    secret: bytes
    timeout_s: float = 300.0
    """How long the store has for each answer."""

    def within(self, timeout_s: float) -> "Entries":
        """The same entries with another timeout."""
        return self._replace(timeout_s=timeout_s)

    def under(self, prefix: str) -> "Entries":
        """The entries under a prefix."""
        return self._replace(store=PrefixStore(prefix, self.store))

    def sealed(self, name: str, text: str) -> str:
        """The content of an entry, prefixed with its code."""
        return code(self.secret, name.encode(), text.encode()).hex() + text

    def opened(self, name: str, raw: bytes) -> bytes | None:
        """The content of an entry; None if its code is wrong or it is too long."""
        seal, text = raw[: 2 * CODE_BYTES], raw[2 * CODE_BYTES :]
        if len(text) > ENTRY_BYTES:
            return None
        return text if hmac.compare_digest(seal, code(self.secret, name.encode(), text).hex().encode()) else None

    def set(self, name: str, text: str) -> None:
        """Writes an entry."""
        self._query(lambda: self.store.set(name, self.sealed(name, text)))

    def get(self, name: str) -> bytes | None:
        """The content of an entry, without waiting; None without a valid one."""
        raw = self._query(lambda: self.store.get(name) if self.store.check([name]) else None)
        return None if raw is None else self.opened(name, raw)

    def count(self, name: str) -> int:
        """Increments an unauthenticated counter, and returns it."""
        return self._query(lambda: self.store.add(name, 1))

    def first(self, name: str, text: str) -> bytes | None:
        """Writes an entry unless it exists, and returns the stored content."""
        return self.opened(name, self._query(lambda: self.store.compare_set(name, "", self.sealed(name, text))))

    def remove(self, name: str) -> None:
        """Removes an entry, if it exists."""
        self._query(lambda: self.store.delete_key(name))

    def changed(self, name: str, change: Callable[[bytes | None], str | None]) -> bytes | None:
        """Atomically applies `change` to the content of an entry, and returns the stored content.

        Safe for concurrent processes: no change is lost.

        Args: `change` gets the content, or None without a valid one, and returns None to leave it unchanged.
        """
        return self._query(lambda: self._changed(name, change))

    def _changed(self, name: str, change: Callable[[bytes | None], str | None]) -> bytes | None:
        raw = self.store.get(name) if self.store.check([name]) else b""
        for _ in range(_MOST_TRIES):
            text = self.opened(name, raw)
            new = change(text)
            if new is None:
                return text
            sealed = self.sealed(name, new).encode()
            now = self.store.compare_set(name, raw.decode("utf-8", "replace"), sealed.decode())
            if now == sealed:
                return new.encode()
            raw = now
        return None

    def several(self, names: Sequence[str]) -> dict[str, bytes]:
        """The contents of the valid entries among these."""
        opened = {name: self.opened(name, raw) for name, raw in self._query(lambda: self._several(names)).items()}
        return {name: text for name, text in opened.items() if text is not None}

    def _several(self, names: Sequence[str]) -> dict[str, bytes]:
        if not self.store.check(list(names)):  # reading a missing one would block
            names = [name for name in names if self.store.check([name])]
        return dict(zip(names, self.store.multi_get(list(names)), strict=True))

    def absent(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """Waits for all of these entries, and returns the indices of those still missing after `timeout_s`.

        Raises: PeerError as soon as a launcher reports that a worker has failed, TransportError when the store is gone.
        """
        # `Store.wait` would print a warning for each of the short waits between checks for failures.
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        with store_answers():
            while not self._query(lambda: self.store.check(list(names))):
                self._look_for_fallen()
                if time.monotonic() >= deadline:
                    return self._query(
                        lambda: [place for place, name in enumerate(names) if not self.store.check([name])]
                    )
                time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return []

    def read(self, name: str, worker: int) -> bytes:
        """The content of a worker's entry after `absent` has waited for it. Raises PeerError for an invalid code."""
        text = self.opened(name, self._query(lambda: self.store.get(name)))
        if text is None:
            raise PeerError(
                f"the entry '{name}' of worker {worker} in the store does not carry the code of this run's secret; give all "
                "workers the same GOSSAMER_SECRET, and keep others away from the port of the store"
            )
        return text

    def _query(self, question: Callable[[], T]) -> T:
        return answer(self.store, self.timeout_s, question)

    def _look_for_fallen(self) -> None:
        worker, _, exit_code = (self.get(FALLEN) or b"").partition(b" ")
        if exit_code:
            raise PeerError(
                f"worker {worker.decode()} ended with code {exit_code.decode()} before all workers were ready; look at its log"
            )


def report_fallen(entries: Entries, worker: str, exit_code: int) -> None:
    """Reports the end of a worker to workers that still wait for others to start."""
    entries.set(FALLEN, f"{worker} {exit_code}")


def shared_part(store: Store) -> Store:
    """The part of a store for this attempt of a run; torchrun counts attempts, and keeps the entries of earlier ones."""
    return PrefixStore(f"gossamer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def hosted_store(host: str, port: int, timeout_s: float = 300.0) -> TCPStore:
    """A new store in this process that listens on one address only.

    It is the address of `host`, unless others cannot reach it, because the name means loopback here, or it belongs to a
    router: then it is the address towards the others, with a warning if they may be elsewhere.

    Args: `port` 0 takes a free one.
    Raises: OSError when the port is taken or the host unknown, ConfigError where the address towards the others is not known.
    """
    with listening(host, port) as listener:
        return served_store(listener, timeout_s)


def served_store(listener: socket.socket, timeout_s: float) -> TCPStore:
    """A new store in this process that serves this socket, which is closed with it.

    From then on a torch thread resolves the names of connecting clients under a lock of the C library: a process forked
    meanwhile may inherit that lock held forever. So fork before serving.
    """
    address, port = listener.getsockname()[:2]
    keep_alive(listener, timeout_s)  # accepted connections inherit its options
    with keeping_alive(timeout_s):
        store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
            multi_tenant=True,  # so that a later init_process_group here shares the port
        )
    listener.detach()  # the store closes it
    return store


def reached_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store at this address. Raises OSError or RuntimeError when it cannot be reached within `timeout_s`."""
    where = host
    if leads_to_itself(host):
        # If equal, all processes are on this machine.
        if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
            log.warning("%s", advised(host))
        where = address_towards(host)  # where the host on this machine listens
    # torch would print a stack trace for each failed attempt.
    reached_in_time(timeout_s, lambda left_s: socket.create_connection((where, port), left_s)).close()
    return client_of(where, port, timeout_s)


def reached_in_time(timeout_s: float, reach: Callable[[float], T]) -> T:
    """The result of the first attempt that reaches a listener, which may begin to listen later.

    Args: `reach` makes one attempt in at most so many seconds.
    Raises: what the last attempt does; RefusedError at once, as another attempt would be refused too.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while True:
        try:
            return reach(max(FIRST_PAUSE_S, deadline - time.monotonic()))
        except RefusedError:
            raise
        except OSError:
            if time.monotonic() + pause_s >= deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def client_of(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store at this address. Raises: OSError where the listener does not answer like a store in time."""
    made = Future[TCPStore]()

    def make() -> TCPStore:
        with keeping_alive(timeout_s):
            return TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)

    # In a thread: torch waits forever for the first answer of the listener. Even a store may never answer, on a busy
    # machine, but does over another connection.
    deadline, patience_s = time.monotonic() + timeout_s, ANSWER_S
    while (left_s := deadline - time.monotonic()) > 0:
        threading.Thread(target=_try, args=(make, made), daemon=True, name="gossamer store").start()
        if wait([made], min(patience_s, left_s)).done:
            return made.result()
        patience_s *= 2
    raise TimeoutError(f"what listens there did not answer as a store within {timeout_s:g} s")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on one address only, as in `hosted_store`. Raises: OSError, ConfigError."""
    where = address_towards(host) if leads_to_itself(host) else host
    family, _, _, _, address = socket.getaddrinfo(where, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    where = address_towards(host)
    log.warning(
        "%s is no address of this machine, so the store of the run listens on %s, from where this machine reaches it",
        host,
        where,
    )
    return socket.create_server((where, port), family=family)
