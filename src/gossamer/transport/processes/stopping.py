"""Early stop of a run in rounds: its processes agree on the round after which all of them stop.

A process that is asked to stop must not stop alone: its peers may be in a later round, or wait for its next message. So
one entry of the store holds, for each process, the number of rounds after which it could stop, its current round
included. Every process adds itself on seeing the entry, which is then complete once all have, and final. All stop after
the largest number in it. A process that ends a round before the entry is complete trains the next one, as others may
wait for its messages, and updates its number first.

The store is polled in a separate thread, so training never waits for it until a stop is requested.
"""

import json
import logging
import threading
import time
from collections.abc import Callable

from gossamer.record.jsonl import json_from_peer
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import ANSWER_S, THREADS, NoAnswerError

ENTRY = "stop"
LOOK_S = 1.0
"""How often a process polls for a stop requested by another."""
WAIT_S = 3.0
"""How long a process that could stop waits for the others' numbers, before it continues training."""
_MOST = 1 << 31

log = logging.getLogger("gossamer")


class Stopping:
    """A stop request of any process of the run, as seen by this one; a context that polls for it.

    Args:
        asked: whether this process has been asked to stop.
        finished: its completed rounds.
    """

    def __init__(self, member: Member, asked: Callable[[], bool], finished: int) -> None:
        self._entries = member.entries.under("gossamer").within(ANSWER_S)
        self._me, self._ranks = str(member.rank), member.ranks
        self._asked, self._after = asked, finished + 1
        self._wished = self._waited = self._warned = False
        self._last: int | None = None
        """The rounds after which all stop, once known."""
        self._lock = threading.Lock()
        """Guards this process's number."""
        self._over = threading.Event()

    def __enter__(self) -> "Stopping":
        # Requests are seen within a round, so that all have added their numbers when this one has ended it.
        threading.Thread(target=self._look, name=THREADS, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def after(self, finished: int) -> bool:
        """Whether this process stops now, after `finished` rounds; if not, it must train the next one.

        Never waits before a stop is requested; then once, at most `WAIT_S` and the store's time.
        """
        with self._lock:
            self._wished = self._wished or self._asked()
            if not self._wished:
                self._after = finished + 1
                return False
            deadline = time.monotonic() + (0.0 if self._waited else WAIT_S)
            self._waited = True
            # The others add their numbers independently of this process, from their own threads.
            while self._last is None and time.monotonic() < deadline:
                self._add()
                time.sleep(0.02)
            if self._last is None:
                self._after = finished + 1
                self._add()
            return self._last is not None and finished >= self._last

    def _look(self) -> None:
        """Polls until the entry is complete, or the run is over. Ends when the store is gone, as no agreement is
        possible then.
        """
        try:
            while not self._over.wait(LOOK_S if not self._asked() else 0.0) and self._last is None:
                if self._asked() or self._is_wished():
                    with self._lock:
                        if self._over.is_set():
                            return
                        self._wished = True
                        self._add()
                    self._over.wait(LOOK_S / 10)
        except RuntimeError:
            return

    def _is_wished(self) -> bool:
        try:
            return self._entries.get(ENTRY) is not None
        except NoAnswerError:  # it may come back, unlike one whose connection is lost
            return False

    def _add(self) -> None:
        """Adds the round after which this process could stop, unless the entry is complete."""
        try:
            content = self._entries.changed(ENTRY, self._added)
        except RuntimeError:
            if not self._warned:
                self._warned = True
                log.warning(
                    "process %s was asked to stop, or another was, but the store of the run does not answer, so they cannot "
                    "agree on a round; it trains on, and the newest checkpoint is what is left once it is killed",
                    self._me,
                )
            return
        numbers = self._read(content)
        if len(numbers) == self._ranks:
            self._last = max(numbers.values())

    def _added(self, text: bytes | None) -> str | None:
        numbers = self._read(text)
        if len(numbers) == self._ranks or numbers.get(self._me) == self._after:
            return None
        return json.dumps({**numbers, self._me: self._after})

    def _read(self, text: bytes | None) -> dict[str, int]:
        """The numbers of the processes; invalid entries are ignored."""
        content = json_from_peer(text or b"{}")
        if not isinstance(content, dict):
            return {}
        ranks = map(str, range(self._ranks))
        return {rank: content[rank] for rank in ranks if type(content.get(rank)) is int and 0 < content[rank] < _MOST}
