"""The notice board of a run, in the store of its launcher: which worker waits for which, and which failed first.

A worker sees only its own connections, but the worker that failed may be two hops away. So a worker that waits for long
repeatedly posts the peers it waits for. A worker that fails posts the reason, and only the first failure is kept. This
part of the board is used only on long waits and on errors. The board also holds small notes of each worker: its saved
round, and its pace.

Every store access has a deadline. While the store does not answer we lose diagnostics, never termination, and the board
warns once. A call that hangs is left to a thread, and no other is made before it ends; then the board works again.
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

from gossamer.record.jsonl import json_from_peer
from gossamer.transport.processes.store import THREADS, Entries, NoAnswerError, unanswered

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Pauses before the next call on a store after an error: the first, doubled after each, and the longest."""
MOST_DIGITS = 10
Cause = Literal["closed", "unreachable", "silent", "foreign", "changed"]
T = TypeVar("T")

log = logging.getLogger("gossamer")


class Note(NamedTuple):
    """The note of a waiting worker."""

    beat: int
    """Counts up while the worker is alive and waits."""
    peers: tuple[int, ...]
    """The peers that it waits for; none once it continues."""


class Failure(NamedTuple):
    """The first failure of a run, as the worker `reporter` saw it."""

    culprit: int
    round: int
    reporter: int
    cause: Cause


def sentence(
    failure: Failure,
    worker: int,
    timeout_s: float,
    chain: Sequence[int] = (),
    name: Callable[[int], str] = "worker {}".format,
) -> str:
    """The error sentence of `worker` about a failure.

    Args:
        timeout_s: how long it waits.
        chain: of waits from one of its peers to the worker that failed.
        name: the name of each.

    >>> sentence(Failure(2, 7, 0, "changed"), worker=1, timeout_s=30.0)  # doctest: +ELLIPSIS
    'worker 2 sent a payload that changed in transit in round 7, as worker 0 reported; a network card or memory is faulty: ...'
    """
    what, do = {
        "closed": ("closed its connection", "it was ended or ended early: look at its log"),
        "unreachable": (
            "cannot be reached any more",
            "the network between them loses what is sent, or its machine is off: check both, then resume",
        ),
        "silent": (
            f"did not answer for {timeout_s:g} s",
            "it hangs, is cut off or is slow: look at its log, or raise run.timeout_s",
        ),
        "foreign": (
            "sent bytes that do not match the agreed message",
            "start all workers with the same run file and gossamer version",
        ),
        "changed": (
            "sent a payload that changed in transit",
            "a network card or memory is faulty: test both machines, then resume",
        ),
    }[failure.cause]
    waits = [f"{i} waits for {j}" for i, j in pairwise(name(i).removeprefix("worker ") for i in [worker, *chain])]
    via = f" ({', '.join(waits)})" if len(waits) > 1 else ""
    by = "" if failure.reporter == worker else f", as {name(failure.reporter)} reported"
    return f"{name(failure.culprit)} {what} in round {failure.round}{via}{by}; {do}"


def cause_of(error: Exception) -> Cause:
    """Why a connection of the system, or of gloo, has failed.

    >>> cause_of(RuntimeError("[pair.cc:537] Read error [127.0.0.1]:25264: Connection timed out. GLHF!"))
    'unreachable'
    >>> cause_of(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:25264"))
    'closed'
    """
    lost = (os.strerror(code) for code in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))
    return "unreachable" if any(words in str(error) for words in lost) else "closed"


def blame(worker: int, missing: Collection[int], before: Mapping[int, Note], after: Mapping[int, Note]) -> list[int]:
    """The chain of waits from a peer that `worker` waits for to the worker at its end, which does not wait.

    A worker whose beat increased between the two looks is alive, so the chain continues with a peer that it waits for.
    A worker without a note, or with an unchanged beat, ends the chain. If all wait in a circle, the chain is only the
    first peer.

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
    """Access of one worker, or of one process of it, to the notices of all; no call raises or takes longer than `patience_s`."""

    def __init__(self, entries: Entries, worker: int, n: int, patience_s: float) -> None:
        self.worker = worker
        self.gone = False
        """Whether the store has not answered the last call, in time or at all."""
        self._n = n
        self._entries = entries.under("gossamer/board").within(patience_s)
        self._beat = 0
        self._errand = threading.Thread()
        self._pause_s, self._again_s, self._said = FIRST_PAUSE_S, 0.0, False
        self._saved = [0] * n
        """The newest round that each worker is known to have saved."""
        self._circulated: dict[int, bytes] = {}

    def post_waits(self, peers: Iterable[int]) -> None:
        """Posts the peers that this worker waits for, with a new beat."""
        self._beat += 1
        text = json.dumps([self._beat, sorted(peers)])
        self._query(lambda: self._entries.set(f"note/{self.worker}", text))

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
        standing = self._query(lambda: self._entries.first("failure", text))
        return (self._failure(standing) if standing is not None else None) or failure

    def saved(self, round: int) -> int:
        """Posts that this worker has the checkpoint of a round; returns the newest round r such that every worker is
        known to have one of round r or later: 0 while any has posted none, and the last known value if the store does
        not answer.
        """
        for worker, text in (self._query(lambda: self._exchange("saved", str(round))) or {}).items():
            if text.isdigit() and len(text) <= MOST_DIGITS:
                self._saved[worker] = max(self._saved[worker], int(text))
        return min(self._saved)

    def circulate(self, text: str) -> dict[int, bytes]:
        """Posts a note to all in the background, and returns the notes of all as read by the previous call; never
        waits.

        While the store has not answered the previous call, this one posts nothing.
        """
        known = self._circulated
        if not self._errand.is_alive():
            # In a thread that waits for the store: the caller keeps training, and gets the answer at a later call.
            self._errand = threading.Thread(target=self._circulate, args=(text,), name=THREADS, daemon=True)
            self._errand.start()
        return known

    def _circulate(self, text: str) -> None:
        notes = self._query(lambda: self._exchange("circular", text))
        self._circulated = self._circulated if notes is None else notes

    def _exchange(self, kind: str, text: str) -> dict[int, bytes]:
        """Posts a note of a kind, and returns those of all workers that have posted one."""
        names = {f"{kind}/{worker}": worker for worker in range(self._n)}
        self._entries.set(f"{kind}/{self.worker}", text)
        return {names[name]: note for name, note in self._entries.several([*names]).items()}

    def _read(self, name: str) -> bytes | None:
        return self._query(lambda: self._entries.get(name))

    def _query(self, question: Callable[[], T]) -> T | None:
        """The answer of the store, or None; it is not asked while an earlier call hangs, or for a while after an error."""
        if unanswered(self._entries.store) or time.monotonic() < self._again_s:
            return None
        try:
            answer = question()
        except RuntimeError as error:
            if not isinstance(error, NoAnswerError):  # it is gone for good, or for long
                self._again_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._silent()
            return None
        self.gone, self._pause_s = False, FIRST_PAUSE_S
        return answer

    def _silent(self) -> None:
        self.gone = True
        if not self._said:
            self._said = True
            log.warning(
                "the store of the run does not answer worker %d; until it does, more old checkpoints are kept, local steps stay "
                "as they are, and who failed first may stay unknown; look at the log of the launcher",
                self.worker,
            )

    def _note(self, text: bytes) -> Note:
        """Reads a note; a malformed one counts as none."""
        match json_from_peer(text):
            case [int(beat), [*peers]] if all(self._is_worker(peer) for peer in peers):
                return Note(beat, tuple(peers))
        return Note(0, ())

    def _failure(self, text: bytes) -> Failure | None:
        match json_from_peer(text):
            case [
                culprit,
                int(round_),
                reporter,
                ("closed" | "unreachable" | "silent" | "foreign" | "changed") as cause,
            ] if self._is_worker(culprit) and self._is_worker(reporter):
                return Failure(culprit, round_, reporter, cause)
        return None

    def _is_worker(self, value: object) -> bool:
        return isinstance(value, int) and 0 <= value < self._n
