"""How a run in rounds stops before its end: its processes agree on the round after which all of them stop.

A process that is asked to stop must not stop on its own: its peers may be in a later round, or wait for its next message. So
one entry of the store holds, for each process, after how many rounds it could stop, with the one that it is in. Everybody adds
himself as soon as he sees the entry, and it is complete once all have; nothing changes it then. All stop after the largest number
in it. Who ends a round before the entry is complete trains the next one, as others may wait for its messages, and says so first.

The store is asked in a thread of its own, so training never waits for it, before somebody wants to stop.
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
"""How often a process looks whether another has been asked to stop."""
WAIT_S = 3.0
"""How long a process that could stop waits for the others to say so too, before it trains on."""
_MOST = 1 << 31

log = logging.getLogger("gossamer")


class Stopping:
    """The wish of any process of the run to stop, as this one sees it; a context in which it looks for it.

    Args:
        asked: whether this process has been asked to stop.
        finished: rounds behind it.
    """

    def __init__(self, member: Member, asked: Callable[[], bool], finished: int) -> None:
        self._entries = member.entries.under("gossamer").within(ANSWER_S)
        self._me, self._ranks = str(member.rank), member.ranks
        self._asked, self._after = asked, finished + 1
        self._wished = self._waited = self._told = False
        self._last: int | None = None
        """The rounds after which all stop, once that is known."""
        self._lock = threading.Lock()
        """Who holds it may change what this process has said."""
        self._over = threading.Event()

    def __enter__(self) -> "Stopping":
        # The wish of another is seen amid a round, so that all have said how far they are when this one has ended it.
        threading.Thread(target=self._look, name=THREADS, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def after(self, finished: int) -> bool:
        """Whether this process stops now, with so many rounds behind it; if not, it must train the next one.

        Never waits before somebody has been asked to stop; then once, at most `WAIT_S` and the time of the store.
        """
        with self._lock:
            self._wished = self._wished or self._asked()
            if not self._wished:
                self._after = finished + 1
                return False
            deadline = time.monotonic() + (0.0 if self._waited else WAIT_S)
            self._waited = True
            # The others need nothing of this process to say when they could stop: each does that from its own thread.
            while self._last is None and time.monotonic() < deadline:
                self._say()
                time.sleep(0.02)
            if self._last is None:
                self._after = finished + 1
                self._say()
            return self._last is not None and finished >= self._last

    def _look(self) -> None:
        """Looks until all is said, or the run is over. A store that is gone is asked no more: nobody can agree any longer."""
        try:
            while not self._over.wait(LOOK_S if not self._asked() else 0.0) and self._last is None:
                if self._asked() or self._is_wished():
                    with self._lock:
                        if self._over.is_set():
                            return
                        self._wished = True
                        self._say()
                    self._over.wait(LOOK_S / 10)
        except RuntimeError:
            return

    def _is_wished(self) -> bool:
        try:
            return self._entries.get(ENTRY) is not None
        except NoAnswerError:  # it may come back, unlike one whose connection is lost
            return False

    def _say(self) -> None:
        """Adds after how many rounds this process could stop, unless all have done so: then all know when they will."""
        try:
            found = self._entries.changed(ENTRY, self._added)
        except RuntimeError:
            if not self._told:
                self._told = True
                log.warning(
                    "process %s was asked to stop, or another was, but the store of the run does not answer, so they cannot "
                    "agree on a round; it trains on, and the newest checkpoint is what is left once it is killed",
                    self._me,
                )
            return
        said = self._read(found)
        if len(said) == self._ranks:
            self._last = max(said.values())

    def _added(self, text: bytes | None) -> str | None:
        said = self._read(text)
        if len(said) == self._ranks or said.get(self._me) == self._after:
            return None
        return json.dumps({**said, self._me: self._after})

    def _read(self, text: bytes | None) -> dict[str, int]:
        """What the processes have said; what is no process or no number of rounds counts as nothing."""
        found = json_from_peer(text or b"{}")
        if not isinstance(found, dict):
            return {}
        ranks = map(str, range(self._ranks))
        return {rank: found[rank] for rank in ranks if type(found.get(rank)) is int and 0 < found[rank] < _MOST}
