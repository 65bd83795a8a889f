"""Whom a worker dials again and again: those that it has lost, and those of this run that nobody here has heard of.

Workers know each other by news. If all die through whom two could have heard of each other, as may happen after a partition and
several newcomers, each trains on without the other. So each looks once in a while for addresses that it does not know.
"""

from collections.abc import Callable, Container, Iterable

from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry

_NOBODY = -1
"""The nonce of no process: that of one of which nothing but its address is known."""


class Redial:
    """Whom to dial, and when.

    Args:
        lost_s: how often those that are suspected are dialled.
        others_s: how often those are that another process has replaced, and those that are unknown.
    """

    def __init__(self, lost_s: float, others_s: float) -> None:
        self.addresses: Callable[[], Iterable[tuple[int, str]]] = tuple
        """Slots and addresses of processes of this run, such as a run folder has them; they may be old."""
        self.ended = set[int]()
        """The nonces of processes that run no more: their machines have said that nobody listens at their addresses."""
        self._lost_s, self._others_s, self._looked_s = lost_s, others_s, -1e9
        self._dialled_s: dict[int, float] = {}
        self._found: list[tuple[int, str]] = []

    def dialled(self, slot: int, now: float) -> None:
        """Notes that a process of this slot is dialled."""
        self._dialled_s[slot] = now

    def look(self, now: float) -> None:
        """Looks for addresses if it is time to, which may take long."""
        if now >= self._looked_s + self._others_s:
            self._looked_s, self._found = now, [*self.addresses()]

    def due(
        self, now: float, members: Members, linked: Container[int], replaced: Iterable[SlotEntry]
    ) -> list[SlotEntry]:
        """The processes to dial now, those of unknown addresses once after each look.

        Args: `linked` are the slots with whose process there is a connection.

        >>> me, lost = SlotEntry(0, 0, 7, MemberStatus.ALIVE, 0, "a:1"), SlotEntry(1, 0, 8, MemberStatus.SUSPECT, 0, "b:1")
        >>> from gossamer.transport.sockets.header import Limits
        >>> members = Members(Limits(workers=3, rounds=9, steps=99), 0, [me, lost])
        >>> redial = Redial(lost_s=1.0, others_s=30.0)
        >>> redial.addresses = lambda: [(0, "a:1"), (1, "b:1"), (2, "c:1")]
        >>> redial.look(0.0)
        >>> [entry.address for entry in redial.due(0.0, members, [], [])]
        ['b:1', 'c:1']
        >>> redial.look(29.0)
        >>> [entry.address for entry in redial.due(29.0, members, [], [])]
        ['b:1']
        """
        known = {entry.address for entry in members.entries.values()}
        found, self._found = self._found, []
        lost = [entry for entry in members.with_status(MemberStatus.SUSPECT) if entry.address]
        return [
            *(entry for entry in lost if entry.slot not in linked and self._may_be(entry, now, self._lost_s)),
            *(
                entry
                for entry in replaced
                if self._may_be(entry, now, self._others_s) and entry.nonce not in self.ended
            ),
            *(
                SlotEntry(i, 0, _NOBODY, MemberStatus.SUSPECT, 0, address)
                for i, address in found
                if address not in known
            ),
        ]

    def _may_be(self, entry: SlotEntry, now: float, after_s: float) -> bool:
        return now >= self._dialled_s.get(entry.slot, -1e9) + after_s
