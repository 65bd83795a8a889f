"""How the workers of an elastic run agree over whom the mean of a round is taken, without any I/O.

Workers whose replicas are identical must all make the same update, or none. The lowest slot that is alive leads:

    everybody -> leader      REPORT    it is ready in this round; which attempt's mean it holds, or never will; or it is away
    leader    -> everybody   PROPOSAL  the attempt and the set over which the mean is taken: those that are ready
    leader    -> everybody   CLOSED    all of the set hold this attempt's mean: make the update

If a worker of the set fails on the way, the leader proposes the rest in a new attempt, or all again if a message was lost; if the
leader fails, the next slot leads. A set is more than half of all slots, so at most one half of a partition goes on. `line` is a
hash of all rounds that were closed: reports with another line do not count, so that a worker whose last round closed otherwise
takes another's state first.

A worker whose round was closed without it (it was late, or cut off) is left out: it takes another's state. It gives its own up
on the word of at least two others and of at least half of those that are alive, itself among them, and never on that of one:
where another says that it is in a later round, or has other rounds behind it, a worker asks all where they are. Nobody waits for
who says so alone, and the rounds that are closed next show that it was not so: then it is named, whatever it has said since. Of
two workers neither decides for the other. The leader alone is believed by a worker that
no other one answers, where there are more. A worker may also find that the state that it has
just taken is ahead of what the others have: then it takes another one.

Until it has a state, it tells everybody that it is away, so that nobody waits for it or lets it lead. Otherwise those who close
the next round would wait for it, and it for the state that they have after that. Where a round has several closings and only few
have made the first ones, as others died, nobody gets that state: those few go back to the start of the round.

Where a round takes less time than a state, the others would have closed another one whenever it is back. So one that is left out
again, before any round was closed with it, says that it returns: whoever leads the next round waits for it, as for anybody else
for its deadline at most. What it fetches meanwhile is the state after the last round that was closed, and it is in time.

Whoever has made the update says so in its reports, so a leader that failed amid its CLOSED letters leaves no doubt.
"""

import json
from collections.abc import Collection
from typing import NamedTuple

from gossamer.errors import RefusedError, TransportError
from gossamer.record.jsonl import json_from_peer
from gossamer.rng import key
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.sockets.header import MOST_ATTEMPTS, LetterKind
from gossamer.transport.sockets.letter import Letter, body_of

_HASHES = 1 << 64
_JUMP = 1 << 16
"""How many attempts for each slot one may be above the newest that is known: a leader can always name a later one."""
_AWAY_BEATS = 3
"""How long the last word of a worker counts that it is away."""
_DISPUTE_BEATS = 2
"""How long a worker says that it is ahead before it is named, where no round can be closed without it."""


class LeftOutError(TransportError):
    """This worker's round was closed without it; it goes on with the state of another worker, `source` if that is known."""

    def __init__(self, worker: int, round: int, source: int | None) -> None:
        super().__init__(f"round {round} was closed without worker {worker}; it takes another worker's state")
        self.source = source


class Proposal(NamedTuple):
    """An attempt to take a round's mean."""

    attempt: int
    workers: frozenset[int]


class _Closed(NamedTuple):
    """A round that was closed."""

    round: int
    line: int
    """Before it."""
    attempt: int


class _Place(NamedTuple):
    """Where a worker is, as it says itself."""

    round: int
    line: int | None
    """None where it has not said it: whoever says that a round was closed is in the next one."""
    closed: _Closed | None = None
    """That round."""


class _Claim(NamedTuple):
    """Another worker's word that rounds were closed without this one."""

    here: int
    """The round that this worker was in when it read that."""
    place: _Place


class Unvouched(NamedTuple):
    """A worker that alone, or with fewer than it takes, says that it is somewhere else than this one."""

    worker: int
    here: int
    """The round that this worker was in when it read that."""
    round: int
    """The one that the other says it is in."""
    waits: bool
    """Whether the others are too few to close a round without it."""


class _Report(NamedTuple):
    """What a worker says of itself."""

    round: int
    line: int
    ready: bool
    held: int
    """The attempt whose mean it holds completely; -1 for none."""
    attempt: int
    """The newest that it has heard of in its round; -1 for none."""
    failed: int
    """The attempt of its round that it takes no part in, or whose mean cannot become complete here; -1 for none."""
    away: bool
    """Whether it has been left out of its round, and takes another's state."""
    returns: bool
    """Whether the others shall wait for it though it is away."""
    last: _Closed | None


class Closing:
    """One worker's part in closing rounds. Whoever calls it then sends what lies in `outbox`.

    Args:
        limit_s: how long the leader waits for workers that are alive and not ready, or have not completed an attempt.
        beat_s: how often reports are repeated; letters may be lost with a connection.
        per_round: how often a round of the run is closed, each time as what is called a round here: where fragments of the model
            are sent one after the other, the mean of each is taken over a set of its own.
    """

    def __init__(self, members: Members, *, limit_s: float, beat_s: float, per_round: int = 1) -> None:
        self.members, self._limit_s, self._beat_s, self.per_round = members, limit_s, beat_s, per_round
        self.outbox: list[tuple[int, Letter]] = []
        self.round, self.line = -1, 0
        self.proposed: Proposal | None = None
        self.closed = self.left_out = False
        """Whether the round of this worker has been closed with it, or without it."""
        self.source: int | None = None
        """A worker whose state one that is left out may take."""
        self._held, self._attempt, self._failed = -1, -1, -1
        self._ready_s: float | None = None
        self._proposed_s = self._said_s = self._asked_s = -1e9
        self._leader = members.me
        self._last: _Closed | None = None
        self._reports: dict[int, _Report] = {}
        self._places: dict[int, _Place] = {}
        """Where each was when it last said so."""
        self.unvouched: list[Unvouched] = []
        """Those to be named; whoever names them empties it."""
        self._claims: dict[int, _Claim] = {}
        """The first of each other worker that no closed round has shown to be so or not."""
        self._disputed_s: dict[int, float] = {}
        """Since when each of the others says something else than this worker's round and line."""
        self._named: set[int] = set()
        """Those that are named already as this round cannot be closed without them."""
        self._spoke_s: dict[int, float] = {}
        """When each of the others last said anything about its round."""
        self._answered: dict[int, tuple[int, float]] = {}
        """In which round each was when it was last answered, and when that was."""
        self._taken = False
        """Whether this worker has closed no round since it took another's state."""
        self._behind_s: float | None = None
        """Since when so many others are behind that state that it cannot be theirs."""
        self._away_until_s: dict[int, float] = {}
        self._returns_until_s: dict[int, float] = {}
        self._misses = 0
        """How often it was left out since a round was closed with it."""

    def enter(self, round: int, line: int | None = None) -> None:
        """Begins a round; `line` is that of another worker's state, if this worker has just taken one."""
        if line is not None:
            self.line, self._last, self._taken, self._behind_s = line, None, True, None
            self._claims.clear()  # they were about the rounds that this worker has given up
        self.round, self.proposed, self._ready_s = round, None, None
        self._named.clear()
        was_away, self.closed, self.left_out = self.left_out, False, False
        self._held = self._attempt = self._failed = -1
        if was_away:
            self._tell_all(LetterKind.REPORT, _plain(self._own))

    def ready(self, now: float) -> None:
        """The local phase is over."""
        self._ready_s = now if self._ready_s is None else self._ready_s
        self.tick(now, again=True)

    def hold(self, attempt: int, now: float) -> None:
        """The mean of this attempt is complete here."""
        if self.proposed is not None and self.proposed.attempt == attempt:
            self._held = attempt
            self.tick(now, again=True)

    def fail(self, attempt: int, now: float) -> None:
        """The mean of this attempt cannot become complete here: a message of it was lost."""
        if self._attempt == attempt:
            self._failed = attempt
            self.tick(now, again=True)

    def advance(self) -> None:
        """The update of a closed round is made."""
        assert self.closed and self.proposed is not None
        self._last = _Closed(self.round, self.line, self.proposed.attempt)
        self._misses, self._taken, self._behind_s = 0, False, None
        self.line = key(self.line, "closed", self.round, self.proposed.attempt, *sorted(self.proposed.workers))
        self.enter(self.round + 1)
        self._judge_claims()

    def _judge_claims(self) -> None:
        """Names those whose word the round that was closed last has shown to be wrong.

        Who says that `here` was closed may be right though this worker had not learned it, and then both have the same rounds
        behind them. Who says that a later round was closed too says that this was without this worker, which shows to be wrong
        once it is closed with it. Until then this worker may be late, and learn that from others.
        """
        for j, (here, place) in [*self._claims.items()]:
            if self.round == here + 1 < place.round:
                continue
            del self._claims[j]
            same = place.closed == self._last if place.line is None else place.line == self.line
            if not (same and self.round == here + 1 == place.round):
                self.unvouched.append(Unvouched(j, here, place.round, waits=False))

    def heard(self, letter: Letter, now: float) -> None:
        """Takes a letter in. Raises: RefusedError for one that says anything impossible, which changes nothing."""
        values = json_from_peer(letter.content)
        self._spoke_s[letter.sender] = now
        match letter.kind, values:
            case LetterKind.REPORT, _ if (report := self._report(values)) is not None:
                if report.round >= 0:  # before, it has not begun and nothing is to be closed
                    self._heard_report(letter.sender, report, now)
            case LetterKind.PROPOSAL, [*head, [*workers]] if (
                closed := self._closed_round(head)
            ) is not None and self._are_slots(workers):
                self._heard_proposal(letter.sender, closed, workers, now)
            case LetterKind.CLOSED, _ if (closed := self._closed_round(values)) is not None:
                self._heard_closed(letter.sender, closed, now)
            case _:
                raise RefusedError(
                    "bounds",
                    f"worker {letter.sender} sent a {letter.kind.name.lower()} that cannot be in round {self.round}: "
                    f"{letter.content!r:.80}; test its memory, and start all with the same gossamer",
                )

    def tick(self, now: float, *, again: bool = False) -> None:
        """Repeats its report, and leads if it is the one to lead."""
        self._away_until_s = {j: until_s for j, until_s in self._away_until_s.items() if now < until_s}
        self._returns_until_s = {j: until_s for j, until_s in self._returns_until_s.items() if now < until_s}
        present = self._present
        if self.round % self.per_round and 2 * len(present) <= self.members.slots < 2 * len(self._living):
            self._leave_out(None)  # those that are away wait for the end of this round, which cannot come without them
        self._settle(now)
        alive = self._alive
        leader = min(alive)
        if again or leader != self._leader or now - self._said_s >= self._beat_s:
            self._said_s, self._leader = now, leader
            if self.left_out:
                self._tell_all(LetterKind.REPORT, _plain(self._own))
            elif leader != self.members.me:
                self._say(leader, LetterKind.REPORT, _plain(self._own))
        if leader == self.members.me and self._ready_s is not None and not self.closed and not self.left_out:
            self._reports[self.members.me] = self._own
            self._lead(alive, now)

    @property
    def _alive(self) -> frozenset[int]:
        """Those with whom this round may be closed: who says that it is elsewhere will not be ready in it."""
        return self._present - {j for j in self._places if self._contradicts(j)}

    @property
    def _present(self) -> frozenset[int]:
        """Whoever lives may be ready, also a worker that was suspected and has told gossip to wait for a later round.

        Were they left to that round, those that suspected each other in a partition would never close the one before it.
        """
        return self._living - self._away_until_s.keys()

    @property
    def _living(self) -> frozenset[int]:
        return frozenset(entry.slot for entry in self.members.with_status(MemberStatus.ALIVE)) | {self.members.me}

    @property
    def nobody_ahead(self) -> bool:
        """Whether no other that trains is known to be in a later round: to wait for the state after this one is in vain."""
        others = self._present - {self.members.me}
        return all(j in self._places and self._places[j].round <= self.round for j in others)

    @property
    def awaited(self) -> frozenset[int]:
        """Of whom something must come before this round can be closed: of the leader, or of those that are not ready."""
        if self._ready_s is None or self.closed or self.left_out:
            return frozenset()
        leader = min(self._alive)
        if leader != self.members.me:
            return frozenset({leader})
        ready = {j for j, report in self._reports.items() if report.ready and report.round == self.round}
        return self._alive - ready - {leader}

    @property
    def _own(self) -> _Report:
        ready, held, failed = self._ready_s is not None, self._held, self._failed
        # Of several closings in a round it could come back at the first alone, and the others would wait for it at each. It asks
        # every other time: one whose state takes longer than the deadline does not hold up every round.
        returns = self.left_out and self.per_round == 1 and self._misses % 2 == 0
        return _Report(self.round, self.line, ready, held, self._attempt, failed, self.left_out, returns, self._last)

    def _lead(self, alive: frozenset[int], now: float) -> None:
        assert self._ready_s is not None
        reports = {
            j: report
            for j, report in self._reports.items()
            if j in alive and report.ready and (report.round, report.line) == (self.round, self.line)
        }
        if (proposed := self.proposed) is not None:
            if all(j in reports and reports[j].held == proposed.attempt for j in proposed.workers):
                self._tell_all(LetterKind.CLOSED, [self.round, self.line, proposed.attempt])
                self.closed = True
                return
            lost = any(self._contradicts(j) for j in proposed.workers)
            overtaken = any(report.attempt > proposed.attempt for report in reports.values())
            failed = now >= self._proposed_s + self._beat_s and (lost or self._has_failed(proposed))
            if proposed.workers <= alive and now < self._proposed_s + self._limit_s and not overtaken and not failed:
                if now - self._said_s >= self._beat_s or self._said_s == now:
                    self._tell_all(LetterKind.PROPOSAL, self._proposal(proposed))
                return
        since_s = max(self._ready_s, self._proposed_s)
        expected = alive | (self._living & self._returns_until_s.keys())
        if 2 * len(reports) > self.members.slots and (reports.keys() >= expected or now >= since_s + self._limit_s):
            # A newcomer that leads amid a round has not heard of its attempts. No two leaders give the same number.
            newest = max(self._attempt, *(report.attempt for report in reports.values()))
            self._attempt = (newest // self.members.slots + 1) * self.members.slots + self.members.me
            self._held, self._proposed_s = -1, now
            self.proposed = Proposal(self._attempt, frozenset(reports))
            self._reports[self.members.me] = self._own
            self._tell_all(LetterKind.PROPOSAL, self._proposal(self.proposed))

    def _has_failed(self, proposed: Proposal) -> bool:
        said = [self._reports[j] for j in proposed.workers if j in self._reports]
        return any((one.round, one.line, one.failed) == (self.round, self.line, proposed.attempt) for one in said)

    def _contradicts(self, j: int) -> bool:
        """Whether a worker says that it is in a later round than this one, or has other rounds behind it."""
        place = self._places.get(j)
        if place is None or self.closed:  # this worker is about to be in the next round itself
            return False
        return place.round > self.round or (place.round == self.round and place.line not in (None, self.line))

    def _settle(self, now: float) -> None:
        """Is left out where enough others say so; asks all where they are as long as fewer do."""
        if self.left_out or self.closed:
            return
        others = self._living - {self.members.me}
        against = {j for j in others if self._contradicts(j)}
        self._disputed_s = {j: self._disputed_s.get(j, now) for j in against}
        if self._are_enough(against):
            self._leave_out(self._source_of(against))
            return
        for j in against:
            self._claims.setdefault(j, _Claim(self.round, self._places[j]))
        behind = set[int]()
        if self._taken:
            behind = {j for j in others - against if j in self._places and self._places[j].round < self.round}
            if not self._are_enough(behind, more_than_half=True):
                self._behind_s = None
            elif self._behind_s is None:
                self._behind_s = now
            elif now >= self._behind_s + self._limit_s:
                self._leave_out(self._source_of(behind))
                return
        if (against or behind) and now - self._asked_s >= self._beat_s:
            self._asked_s = now
            self._tell_all(LetterKind.REPORT, _plain(self._own))  # which they answer with where they are
        if self._hears_nobody_but(against, now):
            self._leave_out(min(against))
            return
        if 2 * (len(others) + 1 - len(against)) > self.members.slots:
            return  # the round will be closed without them, which decides
        for j in sorted(against - self._named):
            if now >= self._disputed_s[j] + _DISPUTE_BEATS * self._beat_s:
                self._named.add(j)
                self.unvouched.append(Unvouched(j, self.round, self._places[j].round, waits=True))

    def _hears_nobody_but(self, against: Collection[int], now: float) -> bool:
        """Whether it can ask nobody but the leader, which says so.

        Two behind routers at home may both reach the leader and not each other: each learns of the rounds that were closed
        without it from the leader alone. Of two slots nothing can be closed without both.
        """
        leader = min(self._living)
        if {*against} != {leader} or self.members.slots < 3 or now < self._disputed_s[leader] + self._limit_s:
            return False
        return all(
            self._spoke_s.get(j, -1e9) < self._disputed_s[leader] for j in self._living - {leader, self.members.me}
        )

    def _are_enough(self, some: Collection[int], *, more_than_half: bool = False) -> bool:
        """Whether so many others decide: two or more, and half of those alive, where the later round or line counts.

        A round is closed over more than half of all slots, but some of those may have died since. So half is enough for who was
        not among them; were both halves to give way, each would take the state of the other.
        """
        if len(some) < 2 or 2 * len(some) < len(self._living):
            return False
        place = self._places[self._source_of(some)]
        later = not more_than_half and (place.round, place.line or 0) > (self.round, self.line)
        return later or 2 * len(some) > len(self._living)

    def _source_of(self, some: Collection[int]) -> int:
        """One of these workers, which is where most of them are; of the earlier ones."""
        rounds = [self._places[j].round for j in some]
        most = max(rounds, key=lambda round: (rounds.count(round), -round))
        return min(j for j in some if self._places[j].round == most)

    def _leave_out(self, source: int | None) -> None:
        if not self.left_out:
            self.left_out, self.source, self._misses = True, source, self._misses + 1
            self._tell_all(LetterKind.REPORT, _plain(self._own))

    def _proposal(self, proposed: Proposal) -> list[object]:
        return [self.round, self.line, proposed.attempt, sorted(proposed.workers)]

    def _heard_report(self, sender: int, report: _Report, now: float) -> None:
        self._reports[sender], self._places[sender] = report, _Place(report.round, report.line)
        self._away_until_s.pop(sender, None)
        self._returns_until_s.pop(sender, None)
        if report.away:
            self._away_until_s[sender] = now + _AWAY_BEATS * self._beat_s
            if report.returns:
                self._returns_until_s[sender] = self._away_until_s[sender]
            if not self.left_out:
                self._say(sender, LetterKind.REPORT, _plain(self._own))  # which tells it what it can wait for
        elif report.round > self.round and report.last is not None:
            self._close_what_is_held(report.last)
        elif report.round < self.round or self._leader != self.members.me:
            self._answer(sender, report.round, now)  # only the leader gets reports unasked: this one asks where all are
        self.tick(now)

    def _answer(self, sender: int, round: int, now: float) -> None:
        """Says where this worker is to one that is in this round: once, and once a beat, as an answer may bring another one."""
        before = self._answered.get(sender)
        if before is None or before[0] != round or now >= before[1] + self._beat_s:
            self._answered[sender] = round, now
            self._say(sender, LetterKind.REPORT, _plain(self._own))

    def _heard_proposal(self, sender: int, what: _Closed, workers: list[int], now: float) -> None:
        round, line, attempt = what
        self._places[sender] = _Place(round, line)
        if round < self.round:
            self._answer(sender, round, now)  # which tells it how its round was closed
        elif (round, line) != (self.round, self.line):
            self._settle(now)
        elif attempt > self._attempt and not self.closed:
            self._attempt, self._held, self._proposed_s = attempt, -1, now
            mine = self.members.me in workers and self._ready_s is not None
            self.proposed = Proposal(attempt, frozenset(workers)) if mine else None
            if self.members.me in workers and not mine:
                self.fail(attempt, now)  # it means the process that filled this slot before
        elif attempt < self._attempt:
            self._say(sender, LetterKind.REPORT, _plain(self._own))  # it leads and has not heard of the later one

    def _heard_closed(self, sender: int, closed: _Closed, now: float) -> None:
        self._places[sender] = _Place(closed.round + 1, None, closed)
        self._close_what_is_held(closed)
        self._settle(now)

    def _close_what_is_held(self, closed: _Closed) -> None:
        """Makes the update of a mean that this worker holds itself, be it that one other says that it was closed."""
        held = self.proposed is not None and self._held == self.proposed.attempt == closed.attempt
        if held and closed[:2] == (self.round, self.line) and not self.left_out:
            self.closed = True

    def _tell_all(self, kind: LetterKind, values: object) -> None:
        for j in sorted(self._living - {self.members.me}):
            self._say(j, kind, values)

    def _say(self, peer: int, kind: LetterKind, values: object) -> None:
        body = body_of(json.dumps(values).encode())
        letter = Letter(kind, self.members.me, round=max(self.round, 0) // self.per_round, body=body)
        self.outbox.append((peer, letter))

    # What follows bounds every number that another worker sends by what this one knows.

    def _report(self, values: object) -> _Report | None:
        match values:
            case [
                int(round),
                int(line),
                bool(ready),
                int(held),
                int(attempt),
                int(failed),
                bool(away),
                bool(returns),
                last,
            ] if self._are_bounded(round, line, attempt) and self._may_be(held) and self._may_be(failed):
                before = None if last is None else self._closed_round(last)
                if last is None or before is not None:
                    return _Report(round, line, ready, held, attempt, failed, away, returns, before)
        return None

    def _closed_round(self, values: object) -> _Closed | None:
        match values:
            case [int(round), int(line), int(attempt)] if round >= 0 and self._are_bounded(round, line, attempt):
                return _Closed(round, line, attempt)
        return None

    def _are_bounded(self, round: object, line: object, attempt: object) -> bool:
        newest = MOST_ATTEMPTS
        if round == self.round:
            known = max(self._attempt, 0, *(one.attempt for one in self._reports.values() if one.round == round))
            newest = min(newest, known + _JUMP * self.members.slots)
        last = self.members.limits.rounds * self.per_round
        sound = round == -1 or _is_below(round, last + 1)
        return sound and _is_below(line, _HASHES) and self._may_be(attempt, newest)

    def _may_be(self, attempt: object, newest: int = MOST_ATTEMPTS) -> bool:
        return attempt == -1 or _is_below(attempt, newest)

    def _are_slots(self, workers: list[object]) -> bool:
        return all(_is_below(slot, self.members.slots) for slot in workers)


def _plain(report: _Report) -> list[object]:
    return [*report[:-1], None if report.last is None else list(report.last)]


def _is_below(value: object, limit: int) -> bool:
    """Whether it is a whole number from 0 to below the limit; the truth values of JSON are none."""
    return type(value) is int and 0 <= value < limit
