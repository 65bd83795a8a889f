"""The notice board of a run, in the store of its launcher: who waits for whom, and who failed first.

A worker only sees its own connections, yet the worker that failed may be two hops away. So whoever waits for long pins up
for whom, again and again, and whoever fails pins up why, which only the first can do. For that the board is read and written
on long waits and on errors alone. Beside it hang small notes of each worker: what it has saved, and how fast it is. Each use
is bounded in time: a store that is gone costs the blame and the news, never the run's end.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["THREADS", "Board", "Failure", "Note", "blame"]

THREADS = "gossamer transfer"
"""The name of all threads that may be inside torch when a run ends: those that follow transfers, and that of a board."""
T = TypeVar("T")


class Note(NamedTuple):
    """What a waiting worker pins up."""

    beat: int
    """Counts up while the worker is alive and waits."""
    peers: tuple[int, ...]
    """For whom it waits; nobody once it has gone on."""


class Failure(NamedTuple):
    """The first failure of a run, as the worker `reporter` saw it."""

    culprit: int
    round: int
    reporter: int
    cause: Literal["closed", "silent", "foreign"]


def blame(worker: int, missing: Collection[int], before: Mapping[int, Note], after: Mapping[int, Note]) -> list[int]:
    """The chain of waits from a peer that `worker` misses to the one at its end, which waits for nobody.

    A worker whose beat went on between the two looks is alive, and the blame passes to those it waits for; one that has no
    note, or one that stands still, is the end. If everybody waits for somebody, the chain is the first peer alone.

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
    """The notices of one worker and of all others; nothing here raises, and nothing takes longer than `patience_s`."""

    def __init__(self, store: Store, worker: int, n: int, patience_s: float) -> None:
        self.worker = worker
        self.gone = False
        """Whether the store did not answer in time; it is not asked again."""
        self._n = n
        self._patience_s = patience_s
        self._store = PrefixStore("gossamer/board", store)
        self._beat = 0
        self._errand: threading.Thread | None = None
        self._circulated: dict[int, bytes] = {}

    def waits_for(self, peers: Iterable[int]) -> None:
        """Pins up, with a new beat, for whom this worker waits."""
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
        """The failure that was pinned up first, if any."""
        text = self._read("failure")
        return None if text is None else self._failure(text)

    def claim(self, failure: Failure) -> Failure:
        """Pins up a failure unless one is there, and returns the one that stands."""
        text = json.dumps(failure)
        standing = self._ask(lambda: self._store.compare_set("failure", "", text))
        return (self._failure(standing) if standing is not None else None) or failure

    def saved(self, round: int) -> int:
        """Pins up that this worker owns the snapshot of a round; returns the round that everybody is known to own one of, or
        a later one of. 0 if somebody has said nothing yet, or the store does not answer.
        """
        self._ask(lambda: self._store.set(f"saved/{self.worker}", str(round)))
        said = [self._read(f"saved/{worker}") for worker in range(self._n)]
        return min(int(text) if text is not None and text.isdigit() else 0 for text in said)

    def circulate(self, text: str) -> dict[int, bytes]:
        """Pins up a note for all in the background, and returns the notes of all that the last time found; never waits.

        While the store has not answered yet, nothing more is asked of it.
        """
        if not self.gone and (self._errand is None or not self._errand.is_alive()):
            self._errand = threading.Thread(target=self._circulate, args=(text,), name=THREADS, daemon=True)
            self._errand.start()
        return self._circulated

    def _circulate(self, text: str) -> None:
        keys = {worker: f"circular/{worker}" for worker in range(self._n)}
        try:
            self._store.set(keys[self.worker], text)
            if not self._store.check(list(keys.values())):  # a store waits for what is not there
                keys = {worker: key for worker, key in keys.items() if self._store.check([key])}
            self._circulated = dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))
        except RuntimeError:
            self.gone = True

    def _read(self, name: str) -> bytes | None:
        return self._ask(lambda: self._store.get(name) if self._store.check([name]) else None)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The answer of the store, or None if it is gone: a call into a store that hangs cannot be ended, only left behind."""
        if self.gone:
            return None
        answers: list[T] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError:
                self.gone = True

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self._patience_s)
        self.gone = self.gone or thread.is_alive()
        return answers[0] if answers else None

    def _note(self, text: bytes) -> Note:
        """Reads a note; one that makes no sense counts as none."""
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
    except ValueError:
        return None
