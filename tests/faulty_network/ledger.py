"""What all processes of a run over faults have counted, side by side: what no single process can know."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gossamer.rounds.sharing import Sharing, shares
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.closing import Proposal
from gossamer.transport.elastic.core import Outcome


class _Account(NamedTuple):
    """How one end saw an exchange."""

    outcome: Outcome
    sender: int | None
    """The process whose payload it has counted."""
    pull: tuple[float, ...]


class Ledger:
    """The exchanges of a run by ticket and both ends, and the steps of each slot whose results were counted."""

    def __init__(self, seed: int, slots: int) -> None:
        self._slot_count = slots
        self._closed: dict[tuple[int, int], tuple[frozenset[int], int, tuple[float, ...]]] = {}
        """Over whom an attempt of a round was closed, with which history and parameters."""
        self._lines: dict[int, int] = {}
        """The history before each round that was closed."""
        self._shared: dict[int, tuple[frozenset[int], tuple[int, ...]]] = {}
        """By history: how the slots are shared after it, and the steps of each that it contains."""
        self._accounts: dict[tuple[Ticket, int, int], _Account] = {}
        """By ticket, process, and the slot of the peer."""
        self._slots: dict[int, int] = {}
        self._counted: dict[int, dict[tuple[int, int, int], set[int]]] = {}
        """By slot: first step, end and process, and who has counted them."""
        self._asked: dict[int, frozenset[int] | None] = {}
        self.made = self.missed = self.unsure = self.one_sided = self.retrained = self.closings = 0

    def born(self, uid: int, slot: int, *, asked: Collection[int] | None) -> None:
        """A process fills a slot.

        Args: `asked` are those that it could ask how far the slot is; None where the last process in the slot lives.
        """
        self._slots[uid] = slot
        self._asked[uid] = None if asked is None else frozenset(asked)

    def enter(
        self, ticket: Ticket, uid: int, peer: int, outcome: Outcome, sender: int | None, pull: tuple[float, ...]
    ) -> None:
        """The end of an exchange, at one end."""
        key = (ticket, uid, peer)
        assert key not in self._accounts, f"process {uid} ends its exchange with worker {peer} in {ticket} twice"
        account = self._accounts[key] = _Account(outcome, sender, pull)
        self.made += outcome is Outcome.MADE
        self.missed += outcome is Outcome.MISSED
        self.unsure += outcome is Outcome.UNSURE
        for other in [other for other, slot in self._slots.items() if slot == peer]:
            theirs = self._accounts.get((ticket, other, self._slots[uid]))
            if theirs is not None:
                _must_fit(ticket, uid, account, other, theirs)

    def counted(self, uid: int, first: int, end: int, by: int) -> None:
        """A process has counted a payload with these steps of the slot of another one."""
        slot = self._slots[uid]
        spans = self._counted.setdefault(slot, {})
        for (a, b, other), holders in spans.items():
            if other != uid and a < end and first < b:
                late, knew = (uid, holders) if uid > other else (other, {by})
                asked = self._asked[late]
                assert asked is None or not asked & knew, (
                    f"steps {max(a, first)} to {min(b, end)} of slot {slot} were trained by process {other} and by {uid}"
                )
                self.retrained += min(b, end) - max(a, first)
        spans.setdefault((first, end, uid), set()).add(by)

    def closed(self, uid: int, round: int, line: int, then: int, named: Proposal, x: tuple[float, ...]) -> None:
        """A process has made the update of a round; `line` is the history before it and `then` after it.

        A leader that is cut off may close a round alone that the others then close anew: its own history ends there.
        """
        slot, workers = self._slots[uid], named.workers
        where = f"round {round}, which process {uid} closes over {sorted(workers)},"
        assert slot in workers, f"{where} is closed without its worker {slot}"
        assert 2 * len(workers) > self._slot_count, f"{where} is closed by no majority of {self._slot_count}"
        assert self._lines.setdefault(round, line) == line, f"{where} continues with a second history"
        known = self._closed.setdefault((round, named.attempt), (workers, then, x))
        assert known == (workers, then, x), f"{where} has ended with other parameters or workers: {x} and {known}"
        self.closings += 1

    def shared(
        self,
        uid: int,
        line: int,
        closed: tuple[int, frozenset[int]],
        before: Sharing,
        after: Sharing,
        places: Mapping[int, int],
    ) -> None:
        """A process has made the update of a round in which it trained from these steps of some slots.

        Args: `line` is the history before the round, `closed` the one after it and over whom the round was closed; `before` and
            `after` how the process believes the slots to be shared then.
        """
        (then, workers), slot = closed, self._slots[uid]
        where = f"process {uid}, which closes the round after history {line} over {sorted(workers)},"
        owners = {s: worker for worker, own in enumerate(shares(self._slot_count, before.present)) for s in own}
        assert sorted(owners) == [*range(self._slot_count)], f"{where} leaves slots to nobody: {owners}"
        trained = {s: first for s, first in places.items() if owners[s] == slot}
        assert trained == {s: before.before[s] for s in owners if owners[s] == slot}, f"{where} has trained {places}"
        counts = {s for s in owners if after.steps[s] > before.before[s]}
        assert counts == {s for s in owners if owners[s] in workers}, f"{where} counts the steps of slots {counts}"
        for history, one in ((line, (before.present, before.before)), (then, (after.last, after.steps))):
            known = self._shared.setdefault(history, one)
            assert known == one, f"{where} shares the slots as {one}, and others as {known}"

    @property
    def rounds_closed(self) -> int:
        """How many rounds were closed."""
        return len(self._lines)

    def close(self) -> None:
        """Counts the exchanges that one end alone has counted."""
        for (ticket, uid, _), account in self._accounts.items():
            if account.outcome is Outcome.MADE:
                theirs = self._accounts.get((ticket, account.sender or 0, self._slots[uid]))
                self.one_sided += theirs is None or theirs.outcome is not Outcome.MADE


def _must_fit(ticket: Ticket, uid: int, ours: _Account, other: int, theirs: _Account) -> None:
    where = f"in {ticket}, between process {uid} and process {other}"
    kinds = {ours.outcome, theirs.outcome}
    for a, b, one in ((ours, theirs, other), (theirs, ours, uid)):
        if a.outcome is Outcome.MADE and b.outcome is Outcome.MISSED and a.sender == one:
            raise AssertionError(
                f"{where}: one end has counted the exchange and process {one} knows that it was missed"
            )
    # Two parts of a network may each have a process in both slots, which exchange among themselves.
    if kinds == {Outcome.MADE} and (ours.sender == other or theirs.sender == uid):
        assert (ours.sender, theirs.sender) == (other, uid), (
            f"{where}: an end has counted the payload of a third process"
        )
        off = max(abs(a + b) for a, b in zip(ours.pull, theirs.pull, strict=True))
        assert off < 1e-5, f"{where}: the mean of all has moved by {off:g}"
