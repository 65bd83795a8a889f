"""Waits of a process for others of its run, with timeouts that name the missing or failed ones."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from gossamer.errors import PeerError
from gossamer.transport.contract import Delivery, Wait
from gossamer.transport.processes.board import Board, Failure, Note, blame, sentence
from gossamer.transport.processes.member import Member

_MOST = 1 << 14


class ExchangeTimes:
    """Buffered deliveries and waits of a transport; beyond a limit the oldest are dropped."""

    def __init__(self) -> None:
        self.came: deque[Delivery] = deque(maxlen=_MOST)
        self.waited: deque[Wait] = deque(maxlen=_MOST)

    def deliveries(self) -> list[Delivery]:
        """The messages received since the last call."""
        # Threads append concurrently, which needs no lock: later items are returned by the next call.
        return [self.came.popleft() for _ in range(len(self.came))]

    def waits(self) -> list[Wait]:
        """The waits since the last call."""
        waited = list(self.waited)
        self.waited.clear()
        return waited


class PeerWait:
    """Waits of this process, during which it posts the awaited peers on the notice board.

    Args: `timeout_s` is the longest.
    """

    def __init__(self, member: Member, timeout_s: float) -> None:
        self._member, self._timeout_s = member, timeout_s
        self._beat_s = min(1.0, timeout_s / 8)
        self.board = Board(member.entries, member.rank, member.ranks, patience_s=min(2.0, timeout_s / 4))

    def wait(self, round: int, missing: Callable[[float], Sequence[int]]) -> None:
        """Returns once no peer is missing.

        Args: `missing` waits at most a given number of seconds, and returns the ranks still awaited.
        Raises: PeerError after the timeout, or as soon as a failure is known, naming the process that failed first if
            known.
        """
        deadline = time.monotonic() + self._timeout_s
        before: dict[int, Note] | None = None
        noted = False
        while ranks := missing(min(self._beat_s, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise self._late(round, ranks, before or {})
            self.board.waits_for(ranks)
            noted = True
            if (standing := self.board.failure()) is not None:
                raise PeerError(self._sentence(standing))
            if before is None and time.monotonic() >= deadline - 3 * self._beat_s:
                before = self.board.look(ranks)
        if noted:
            self.board.waits_for(())

    def ranks_of(self, pending: Iterable[tuple[str, int]]) -> list[int]:
        """The ranks of the workers whose messages are pending ("from"); if all have arrived, of those that have not
        received ours.
        """
        peers = [*pending]
        receives = sorted(peer for way, peer in peers if way == "from")
        return [*map(self._member.rank_of, receives or sorted(peer for _, peer in peers))]

    def failed(self, round: int, rank: int, cause: Literal["closed", "silent", "foreign", "changed"]) -> PeerError:
        """The error to raise when the process of this rank has failed; the first failure of the run counts."""
        return PeerError(self._sentence(self.board.claim(Failure(rank, round, self._member.rank, cause))))

    def _late(self, round: int, ranks: Sequence[int], before: Mapping[int, Note]) -> PeerError:
        """The error to raise when the deadline has passed."""
        chain = blame(self._member.rank, ranks, before, self.board.look(ranks))
        mine = Failure(chain[-1], round, self._member.rank, "silent")
        standing = self.board.claim(mine)
        return PeerError(self._sentence(standing, chain if standing == mine else []))

    def _sentence(self, failure: Failure, chain: Sequence[int] = ()) -> str:
        text = sentence(failure, self._member.rank, self._timeout_s, chain, self._member.name)
        lost = "; the launcher's store does not answer either, so another may have failed before it"
        return f"{text}{lost}" if self.board.gone else text
