"""Periodic redialling of lost workers, and of processes of this run that are unknown here.

Workers know each other through gossip. If all workers that connect two others die, as may happen after a partition and
several newcomers, each keeps training without the other. So each periodically looks for unknown addresses.
"""

from collections.abc import Callable, Container, Iterable

from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry

_NOBODY = -1
"""A placeholder nonce for a process of which only the address is known."""


class Redial:
    """The schedule of redialling.

    Args:
        lost_s: how often suspected workers are dialled.
        others_s: how often replaced and unknown ones are.
    """

    def __init__(self, lost_s: float, others_s: float) -> None:
        self.addresses: Callable[[], Iterable[tuple[int, str]]] = tuple
        """Slots and addresses of processes of this run, for example from a run folder; possibly stale."""
        self.ended = set[int]()
        """The nonces of processes that have ended: their machines refused a connection."""
        self._lost_s, self._others_s, self._looked_s = lost_s, others_s, -1e9
        self._dialled_s: dict[int, float] = {}
        self._listed: list[tuple[int, str]] = []

    def dialled(self, slot: int, now: float) -> None:
        """Records that a process of this slot is dialled."""
        self._dialled_s[slot] = now

    def look(self, now: float) -> None:
        """Looks for addresses if due, which may take long."""
        if now >= self._looked_s + self._others_s:
            self._looked_s, self._listed = now, [*self.addresses()]

    def due(
        self, now: float, members: Members, linked: Container[int], replaced: Iterable[SlotEntry]
    ) -> list[SlotEntry]:
        """The processes to dial now; unknown addresses once after each look.

        Args: `linked` are the slots that are connected.

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
        addresses, self._listed = self._listed, []
        suspects = [entry for entry in members.with_status(MemberStatus.SUSPECT) if entry.address]
        lost = [e for e in suspects if e.slot not in linked and self._may_have_returned(e, now, self._lost_s)]
        apart = [e for e in replaced if e.nonce not in self.ended and self._may_have_returned(e, now, self._others_s)]
        unknown = [(i, address) for i, address in addresses if address not in known]
        return [*lost, *apart, *(SlotEntry(i, 0, _NOBODY, MemberStatus.SUSPECT, 0, at) for i, at in unknown)]

    def _may_have_returned(self, entry: SlotEntry, now: float, after_s: float) -> bool:
        return now >= self._dialled_s.get(entry.slot, -1e9) + after_s
