"""The transport of an asynchronous worker: the connections of an elastic run, over which workers call each other.

Membership is tracked as in an elastic run (`gossamer.transport.elastic.members`): a lost connection reveals a death at
once, and a silent peer that owes a message is suspected. The round of a worker is the number of its local phase here.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from gossamer.transport.elastic.calls import Calls
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint, PeerConnection
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter

_CALLS = frozenset(range(LetterKind.FETCH, LetterKind.DONE + 1))


class SlotPhases(NamedTuple):
    """The known local phases of a slot."""

    ended: int
    """Local phases that its worker has completed."""
    steps: int
    """Inner steps of the slot, by its current or an earlier worker, whose result others hold."""
    trains: bool
    """Whether its worker may be in another phase."""


class CallTransport(ElasticTransport):
    """Connections that carry calls. Users of `calls` must hold `changed`, and then call `flush`.

    Args: as of `ElasticTransport`; `calls` may call back in the thread of a connection, which holds `changed` then.
    """

    def __init__(
        self, members: Members, endpoint: Endpoint, calls: Calls, *, host: Callable[[Channel], None] | None = None
    ) -> None:
        self.calls = calls  # before the threads start
        super().__init__(members, endpoint, host=host)

    def begin_phase(self, number: int) -> frozenset[int]:
        """Announces to all that this worker has completed `number` local phases; returns the workers alive in its view.

        Raises: PeerError when another process has taken this worker's slot.
        """
        with self.changed:
            self._must_fill_its_slot()
            alive = self._count_phases(number)
            self.core.announce()
            self._flush()
        return alive

    def end_phases(self, number: int, *, leaves: bool) -> None:
        """Announces to all that this worker begins no further phase, and `leaves` or has taken its last step.

        In the same letter: the number alone would imply one more phase, which this worker would begin next.
        """
        with self.changed:
            self._count_phases(number)
            if leaves:
                self.declare(MemberStatus.LEFT)
            else:
                self.calls.finish()
                self._flush()

    def phases(self) -> dict[int, SlotPhases]:
        """The known local phases of each slot."""
        with self.changed:
            done = self.calls.done
            return {
                slot: SlotPhases(entry.round, entry.steps, self._lives(slot) and slot not in done)
                for slot, entry in self.members.entries.items()
            }

    def record_steps(self, slot: int, steps: int) -> None:
        """Records that this worker's parameters include `steps` inner steps of a slot."""
        with self.changed:
            self.members.progress(slot, 0, steps)

    def flush(self) -> None:
        """Sends the letters queued by the calls."""
        with self.changed:
            self._flush()

    def _count_phases(self, number: int) -> frozenset[int]:
        """Notes that this worker has completed `number` local phases; returns the workers that are alive."""
        alive = frozenset(slot for slot in self.members.entries if self._lives(slot))
        if number > self.core.round:
            self.core.begin_round(number, alive, ())
        return alive

    def _lives(self, slot: int) -> bool:
        return slot == self.worker or self.members.entries[slot].status == MemberStatus.ALIVE

    def _flush(self) -> None:
        outbox, self.calls.outbox = self.calls.outbox, []
        self.core.outbox += outbox
        super()._flush()

    def _accepts(self, link: PeerConnection, letter: Letter, size: int) -> bool:
        if letter.kind in _CALLS:
            return self.calls.accepts(letter, size)
        return letter.kind != LetterKind.PAYLOAD and super()._accepts(link, letter, size)

    def _heard(self, link: PeerConnection, letter: Letter) -> None:
        with self.changed:
            super()._heard(link, letter)
            if letter.kind in _CALLS and self.core.is_filled_by(link.peer, link.nonce):
                self.calls.receive(letter, time.monotonic())
                self._flush()
                self.changed.notify_all()

    def _lost(self, link: PeerConnection, why: str) -> None:
        with self.changed:
            super()._lost(link, why)
            if not self._links_to(link.peer):
                self.calls.lost(link.peer)
                self._flush()
                self.changed.notify_all()

    def _look_at(self, now: float) -> None:
        self.calls.tick(now)
        self.core.wait_for(self.calls.awaited)
        super()._look_at(now)
