"""Pairwise meetings of workers during training: one invites, both send their messages, and the meeting counts when both
know that both have them.

    starter -> peer   INVITE
    peer -> starter   ACCEPT, MESSAGE; or REFUSE where it is in a meeting already
    starter -> peer   MESSAGE
    each, once it has both messages:   AGREE

A meeting counts at an end that has both messages and the other's AGREE. If an AGREE is lost, it may count at one end
only: the other is unsure, as in `gossamer.transport.elastic.core`. The ticket has the number of the meeting, its
starter and the life of the starter's process, so that a process that comes back is in none of its old meetings. A
worker is in one meeting at a time. If two workers invite each other at once, the lower-numbered one's invitation
counts.
"""

import sys
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.calls import Calls
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.sockets.header import LIFE_LIMIT, LetterKind
from gossamer.transport.sockets.letter import Letter


class Appointment:
    """A meeting in progress, from this end."""

    def __init__(self, peer: int, ticket: Ticket, since_s: float) -> None:
        self.peer, self.ticket, self.since_s = peer, ticket, since_s
        self.sent = False
        self.received: Letter | None = None
        self.agreed = False
        self.confirmed = False

    @property
    def starter(self) -> int:
        """Who has invited."""
        return self.ticket.fragment

    @property
    def life(self) -> int:
        """The life of the starter's process."""
        return self.ticket.leg

    @property
    def steps(self) -> int:
        """Inner steps of the peer's slot that its message includes."""
        return 0 if self.received is None else self.received.steps

    @property
    def number(self) -> int:
        """The number of this meeting among its starter's."""
        return self.ticket.round


class Meetings(Calls):
    """The meetings of one worker.

    Args:
        limit_s: how long a meeting may take.
        tell: this worker's payload for a meeting, as of now.
        meet: called with each meeting that counts and the payload of the other end.
        sound: whether the payload of the other end is valid; a meeting with an invalid one is missed at both ends.
        most_invited: the most invitations of one peer that are considered in a local phase: each accepted one is a line of
            the record.
    """

    def __init__(
        self,
        members: Members,
        payload_bytes: int,
        *,
        limit_s: float,
        tell: Callable[[Appointment], Tensor],
        meet: Callable[[Appointment, Tensor], None],
        sound: Callable[[Tensor, int], bool] = lambda payload, peer: True,
        most_invited: int = sys.maxsize,
    ) -> None:
        super().__init__(members, payload_bytes)
        self._most_invited, self._invitations = most_invited, Counter[int]()
        self._limit_s, self._tell, self._meet, self._sound = limit_s, tell, meet, sound
        self._now: Appointment | None = None
        self._started = 0
        self.made = self.missed = self.unsure = 0
        """The outcomes of accepted meetings."""

    @property
    def busy(self) -> bool:
        """Whether it is in a meeting."""
        return self._now is not None

    def begin_phase(self) -> None:
        """Begins a local phase, in which peers may invite this worker again."""
        self._invitations.clear()

    def invite(self, peer: int, now: float) -> None:
        """Starts a meeting, unless either is in another, or the peer is not alive."""
        entry = self.members.entries.get(peer)
        if self._now is None and not self.closed and entry is not None and entry.status == MemberStatus.ALIVE:
            self._now = Appointment(peer, Ticket(self._started, self.members.me, self.life), now)
            self._started += 1
            self._send(peer, LetterKind.INVITE, self._now.ticket)

    def stop(self) -> None:
        """See `Calls`."""
        super().stop()
        if self._now is not None:
            self._close(self._now)

    def lost(self, peer: int) -> None:
        """See `Calls`."""
        if self._now is not None and self._now.peer == peer:
            self._close(self._now)

    def tick(self, now: float) -> None:
        """See `Calls`; gives up a meeting that has timed out."""
        super().tick(now)
        if self._now is not None and now >= self._now.since_s + self._limit_s:
            self._send(self._now.peer, LetterKind.REFUSE, self._now.ticket)
            self._close(self._now)

    def _called(self, letter: Letter, now: float) -> None:
        peer, ticket, current = letter.sender, letter.ticket, self._now
        if letter.kind == LetterKind.INVITE:
            self._invited(peer, ticket, now)
        elif current is None or (peer, ticket) != (current.peer, current.ticket):
            if letter.kind in (LetterKind.ACCEPT, LetterKind.MESSAGE):
                self._send(peer, LetterKind.REFUSE, ticket)
        elif letter.kind == LetterKind.ACCEPT and not current.sent:
            self._send_message(current)
        elif letter.kind == LetterKind.MESSAGE and current.received is None:
            # Before the AGREE, without which the other end cannot count it either.
            if not self._sound(letter.body, peer):
                self._send(peer, LetterKind.REFUSE, ticket)
                self._close(current)
                return
            current.received = letter
            self._conclude(current)
        elif letter.kind == LetterKind.AGREE:
            current.confirmed = True
            self._conclude(current)
        elif letter.kind == LetterKind.REFUSE:
            self._close(current)

    def _invited(self, peer: int, ticket: Ticket, now: float) -> None:
        current, me = self._now, self.members.me
        crossed = current is not None and current.peer == peer and current.starter == me and not current.sent
        sound = ticket.fragment == peer and max(ticket.round, ticket.leg) < LIFE_LIMIT
        self._invitations[peer] += 1
        # After the last step no phase begins, and with it no new count.
        sound = sound and (self.over or self._invitations[peer] <= self._most_invited)
        if self.closed or not sound or not (current is None or (crossed and peer < me)):
            self._send(peer, LetterKind.REFUSE, ticket)
            return
        self._now = Appointment(peer, ticket, now)
        self._send(peer, LetterKind.ACCEPT, ticket)
        self._send_message(self._now)

    def _send_message(self, current: Appointment) -> None:
        current.sent = True
        self._send(current.peer, LetterKind.MESSAGE, current.ticket, self._tell(current))
        self._conclude(current)

    def _conclude(self, current: Appointment) -> None:
        """Agrees once one message is sent and the other received, and counts the meeting once the other end agrees too."""
        if current.sent and current.received is not None and not current.agreed:
            current.agreed = True
            self._send(current.peer, LetterKind.AGREE, current.ticket)
        if current.agreed and current.confirmed:
            assert current.received is not None
            self._now = None
            self.made += 1
            self._meet(current, current.received.body)

    def _close(self, current: Appointment) -> None:
        self._now = None
        if current.agreed:
            self.unsure += 1
        elif current.sent:
            self.missed += 1

    def _awaited(self) -> frozenset[int]:
        return frozenset() if self._now is None else frozenset({self._now.peer})
