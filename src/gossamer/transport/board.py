"""The notice board of a run, in the store of its launcher: who waits for whom, and who failed first.

A worker sees only its own connections, but the worker that failed may be two hops away. So a worker that waits for long
repeatedly posts which peers it waits for. A worker that fails posts why, and only the first failure is kept. This part of the
board is used only on long waits and on errors. The board also holds small notes of each worker: what it has saved, and its pace.

Every store access has a deadline. If the store is gone we lose diagnostics, never termination.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["THREADS", "Board", "Failure", "Note", "blame"]

THREADS = "gossamer transfer"
"""The name of all threads that may be inside torch when a run ends: those of transfers and of the board."""
T = TypeVar("T")


class Note(NamedTuple):
    """What a waiting worker posts."""

    beat: int
    """Counts up while the worker is alive and waits."""
    peers: tuple[int, ...]
    """The peers that it waits for; none once it continues."""


class Failure(NamedTuple):
    """The first failure of a run, as the worker `reporter` saw it."""

    culprit: int
    round: int
    reporter: int
    cause: Literal["closed", "silent", "foreign"]


def blame(worker: int, missing: Collection[int], before: Mapping[int, Note], after: Mapping[int, Note]) -> list[int]:
    """The chain of waits from a peer that `worker` waits for to the worker at its end, which waits for nobody.

    A worker whose beat increased between the two looks is alive, so the chain continues with a peer that it waits for. A
    worker without a note, or whose beat stands still, ends the chain. If all wait in a circle, the chain is the first peer alone.

    >>> blame(0, [1], {1: Note(4, (2,))}, {1: Note(7, (2,))})
    [1, 2]
    >>> blame(0, [1], {1: Note(4, (2,))}, {1: Note(4, (2,))})
    [1]
    """
    chains = [[peer] for peer in sorted(missing)]
    first, seen = chains[0], {worker, *missing}
    while chains:
        chain = chains.pop(0)
        last = chain[-1]
        note = after.get(last, Note(0, ()))
        if not note.peers or note.beat == before.get(last, Note(0, ())).beat:
            return chain
        chains += [[*chain, peer] for peer in note.peers if peer not in seen]
        seen |= {last, *note.peers}
    return first


class Board:
    """Access of one worker to the notices of all; no method raises or takes longer than `patience_s`."""

    def __init__(self, store: Store, worker: int, n: int, patience_s: float) -> None:
        self.worker = worker
        self.gone = False
        """Whether the store has failed to answer in time; it is then not used again."""
        self._n = n
        self._patience_s = patience_s
        self._store = PrefixStore("gossamer/board", store)
        self._beat = 0
        self._errand: threading.Thread | None = None
        self._circulated: dict[int, bytes] = {}

    def waits_for(self, peers: Iterable[int]) -> None:
        """Posts, with a new beat, the peers that this worker waits for."""
        self._beat += 1
        text = json.dumps([self._beat, sorted(peers)])
        self._ask(lambda: self._store.set(f"note/{self.worker}", text))

    def look(self, peers: Iterable[int]) -> dict[int, Note]:
        """The notes of these peers, of those they wait for, and so on."""
        notes: dict[int, Note] = {}
        queue = list(peers)
        while queue and not self.gone:
            peer = queue.pop()
            if peer not in notes and (text := self._read(f"note/{peer}")) is not None:
                notes[peer] = self._note(text)
                queue += notes[peer].peers
        return notes

    def failure(self) -> Failure | None:
        """The failure that was posted first, if any."""
        text = self._read("failure")
        return None if text is None else self._failure(text)

    def claim(self, failure: Failure) -> Failure:
        """Posts a failure unless there is one already, and returns the one that counts."""
        text = json.dumps(failure)
        standing = self._ask(lambda: self._store.compare_set("failure", "", text))
        return (self._failure(standing) if standing is not None else None) or failure

    def saved(self, round: int) -> int:
        """Posts that this worker owns the checkpoint of a round; returns the newest round r such that every worker is known to
        own one of round r or later. It is 0 while a worker has posted nothing, or if the store does not answer.
        """
        self._ask(lambda: self._store.set(f"saved/{self.worker}", str(round)))
        said = [self._read(f"saved/{worker}") for worker in range(self._n)]
        return min(int(text) if text is not None and text.isdigit() else 0 for text in said)

    def circulate(self, text: str) -> dict[int, bytes]:
        """Posts a note to all in the background, and returns the notes of all as the previous call found them; never waits.

        While the store has not answered the previous call, this one posts nothing.
        """
        if not self.gone and (self._errand is None or not self._errand.is_alive()):
            self._errand = threading.Thread(target=self._circulate, args=(text,), name=THREADS, daemon=True)
            self._errand.start()
        return self._circulated

    def _circulate(self, text: str) -> None:
        keys = {worker: f"circular/{worker}" for worker in range(self._n)}
        try:
            self._store.set(keys[self.worker], text)
            if not self._store.check(list(keys.values())):  # reading a missing key would block
                keys = {worker: key for worker, key in keys.items() if self._store.check([key])}
            self._circulated = dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))
        except RuntimeError:
            self.gone = True

    def _read(self, name: str) -> bytes | None:
        return self._ask(lambda: self._store.get(name) if self._store.check([name]) else None)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The answer of the store, or None if it is gone; a call that hangs cannot be ended, so its thread is left behind."""
        if self.gone:
            return None
        answers: list[T] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError:
                self.gone = True

        thread = threading.Thread(target=ask, name=THREADS, daemon=True)
        thread.start()
        thread.join(self._patience_s)
        self.gone = self.gone or thread.is_alive()
        return answers[0] if answers else None

    def _note(self, text: bytes) -> Note:
        """Reads a note; a malformed one counts as none."""
        match _parsed(text):
            case [int(beat), [*peers]] if all(self._is_worker(peer) for peer in peers):
                return Note(beat, tuple(peers))
        return Note(0, ())

    def _failure(self, text: bytes) -> Failure | None:
        match _parsed(text):
            case [culprit, int(round_), reporter, ("closed" | "silent" | "foreign") as cause] if self._is_worker(
                culprit
            ) and self._is_worker(reporter):
                return Failure(culprit, round_, reporter, cause)
        return None

    def _is_worker(self, value: object) -> bool:
        return isinstance(value, int) and 0 <= value < self._n


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
