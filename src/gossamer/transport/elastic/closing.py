"""The agreement of the workers of an elastic run on the participants of a round's mean, without any I/O.

Workers whose replicas are identical must all make the same update, or none. The lowest slot that is alive leads:

    every worker -> leader   REPORT    it is ready in this round; which attempt's mean it holds, or never will; or it is away
    leader -> all            PROPOSAL  the attempt and the set over which the mean is taken: those that are ready; and what
                                       workers have promised not to do, after a first attempt
    leader -> all            CLOSED    all of the set hold this attempt's mean: make the update

If a worker of the set fails on the way, the leader proposes the rest in a new attempt, or all again if a message was lost; if the
leader fails, the next slot leads. A worker that has received what is not finite, or cannot be decoded, accuses its sender, to
all: the round is closed without the one who is in most accusations, as accuser or accused. Where one accuses one, that is the
accused, and the accuser the next time, so the word of one worker does not keep another out for good (ADR 98). A set is more than
half of all slots, so at most one side of a partition continues, as long as newcomers take no slots meanwhile (ADR 97).
`history_hash` is a hash of all closed rounds: reports with another one do not count, so that a worker whose last round closed
differently takes another's state first.

A worker whose round was closed without it (it was late, or cut off) is left out: it takes another's state. It discards
its own state only on the claims of at least two others and of at least half of the workers alive, itself included,
never on a single claim: if another claims to be in a later round, or to have closed other rounds, a worker asks all for
their position. No worker waits for a peer that is alone with its claim, and the rounds closed next disprove it: then
the peer is reported, whatever it has claimed since. Of two workers neither decides for the other. With more than two, a
worker that only the leader answers believes the leader alone. A worker may also discover that the state it has just
taken is ahead of all others: then it takes another one.

Until it has a state, it announces that it is away, so that no worker waits for it or lets it lead. Otherwise the others
would wait for it to close the next round, and it for their state after that round. If a round has several closings and
only a few workers have made the first ones, as others died, that state is not given away: those few return to the start
of the round.

If a round takes less time than a state transfer, the others would have closed another round each time it is back. So a
worker that is left out again, before any round was closed with it, announces that it returns: the leader of the next
round waits for it, up to the usual deadline. It fetches the state after the last closed round meanwhile, and is in
time.

Workers that made the update say so in their reports. A worker that holds a mean keeps it when another leader proposes a
later attempt, as the first leader may have closed the round with it. It lets go of the mean once that leader takes part
in a later attempt itself, or a worker of the set never will hold it; proposals repeat what reports promise. If more than
half of all slots have kept one mean, the new leader closes the round with it. If the first leader is silent for a
deadline, it is let go of, so a leader that is cut off for so long may have closed the round differently (ADR 98).
"""

import json
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from gossamer.errors import RefusedError, TransportError
from gossamer.record.jsonl import json_from_peer
from gossamer.rng import key
from gossamer.transport.elastic.core import Outgoing
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.sockets.header import MOST_ATTEMPTS, LetterKind
from gossamer.transport.sockets.letter import Letter, body_of

_HASHES = 1 << 64
_JUMP = 1 << 16
"""Per slot, the most by which an attempt may exceed the newest known one: leaders may always pick a later one."""
_AWAY_BEATS = 3
"""How long, in beats, a worker's announcement that it is away counts."""
_DISPUTE_BEATS = 2
"""How long, in beats, a worker claims to be ahead before it is reported, where no round can be closed without it."""


class LeftOutError(TransportError):
    """This worker's round was closed without it; it continues with the state of another worker, `source` if known."""

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
    history_hash: int
    """Before it."""
    attempt: int


class _Place(NamedTuple):
    """A worker's position, as it claims."""

    round: int
    history_hash: int | None
    """None if not claimed: a worker that reports a closed round is in the next one."""
    closed: _Closed | None = None
    """That round."""


class _Promise(NamedTuple):
    """What a worker will not do any more in this round."""

    attempt: int
    """It takes part in no attempt before this one, and does not lead one either."""
    held: int
    """The only earlier attempt whose mean it holds, or will ever hold; -1 for none."""
    failed: int
    """It will never hold the mean of this attempt; -1 for none."""


class _Claim(NamedTuple):
    """Another worker's claim that rounds were closed without this one."""

    here: int
    """The round that this worker was in when it read that."""
    place: _Place
    nonce: int
    """The process that claimed it."""


class Unvouched(NamedTuple):
    """A worker whose claim of a position other than this worker's has too few supporters."""

    worker: int
    here: int
    """The round that this worker was in when it read that."""
    round: int
    """The round that the other claims to be in."""
    waits: bool
    """Whether the others are too few to close a round without it."""


class _Report(NamedTuple):
    """A worker's report."""

    round: int
    history_hash: int
    ready: bool
    held: int
    """The attempt whose mean it holds completely; -1 for none."""
    attempt: int
    """The newest attempt that it knows of in its round; -1 for none."""
    failed: int
    """The attempt that it does not take part in, or cannot complete; -1 for none."""
    away: bool
    """Whether it has been left out of its round, and takes another's state."""
    returns: bool
    """Whether the others should wait for it although it is away."""
    last: _Closed | None
    accused: frozenset[int] = frozenset()
    """Workers whose messages in this round it has declined."""


class Closing:
    """One worker's part in closing rounds. Callers must then send the letters in `outbox`.

    Args:
        limit_s: how long the leader waits for workers that are alive and not ready, or have not completed an attempt.
        beat_s: how often reports are repeated; letters may be lost with a connection.
        per_round: the number of closings per round of the run, each of which is called a round here: where fragments of
            the model are sent in sequence, the mean of each has its own participants.
    """

    def __init__(self, members: Members, *, limit_s: float, beat_s: float, per_round: int = 1) -> None:
        self.members, self._limit_s, self._beat_s, self.per_round = members, limit_s, beat_s, per_round
        self.outbox: list[Outgoing] = []
        self.round, self.history_hash = -1, 0
        self.proposed: Proposal | None = None
        """The newest attempt in which this worker takes part."""
        self._led: Proposal | None = None
        """The newest attempt, if this worker has proposed it."""
        self.closed = self.left_out = False
        """Whether the round of this worker has been closed with it, or without it."""
        self.source: int | None = None
        """A worker whose state this one may take when left out."""
        self._held, self._attempt, self._failed = -1, -1, -1
        self._decided: Proposal | None = None
        """How this leader has closed the round without itself, until one of these workers is in the next."""
        self._offer: Proposal | None = None
        """The newest attempt, while this worker does not take part in it as it holds the mean of an earlier one."""
        self._offered_s = self._kept_s = -1e9
        """When such an attempt was last proposed to it, and since when that happens without interruption."""
        self._closers: dict[int, tuple[int, int]] = {}
        """Leaders that may close the round with the mean that this worker holds: with which attempt, and their processes."""
        self._ready_s: float | None = None
        self._proposed_s = self._said_s = self._asked_s = -1e9
        self._leader = members.me
        self._last: _Closed | None = None
        self._reports: dict[int, _Report] = {}
        self._relayed: dict[int, _Promise] = {}
        """What the last proposal of this leader repeated of the reports."""
        self._places: dict[int, _Place] = {}
        """The last claimed position of each worker."""
        self.unvouched: list[Unvouched] = []
        """Workers to be reported; cleared by the caller that reports them."""
        self._claims: dict[int, _Claim] = {}
        """The first claim of each other worker that no closed round has confirmed or disproved."""
        self.accused: list[tuple[int, int]] = []
        """Accusers and accused to be reported; cleared by the caller that reports them."""
        self._declined, self._listed = set[int](), set[tuple[int, int]]()
        """Whose messages in this round it has declined, and the accusations of this round listed in `accused`."""
        self._few_s: float | None = None
        """Since when no round is closed without the workers whose messages it has declined, as too few are alive."""
        self._last_out: dict[tuple[int, int], int] = {}
        """Without which of the two the last round was closed in which one accused the other."""
        self._disputed_s: dict[int, float] = {}
        """Since when each other worker contradicts this worker's round and history."""
        self._named: set[int] = set()
        """Workers reported already, as this round cannot be closed without them."""
        self._spoke_s: dict[int, float] = {}
        """The time of each other worker's last report."""
        self._answered: dict[int, tuple[int, float]] = {}
        """The round and time at which each was last answered."""
        self._taken = False
        """Whether this worker has closed no round since it took another's state."""
        self._with: frozenset[int] | None = None
        """The workers with which the last round was closed; None unless this worker was one of them."""
        self._behind_s: float | None = None
        """Since when too many others are behind that state for it to be theirs."""
        self._away_until_s: dict[int, float] = {}
        self._returns_until_s: dict[int, float] = {}
        self._misses = 0
        """The number of times it was left out since a round was closed with it."""

    def begin_round(self, round: int, history_hash: int | None = None) -> None:
        """Begins a round; `history_hash` is that of another worker's state, if this worker has just taken one."""
        if history_hash is not None:
            self.history_hash, self._last, self._taken, self._behind_s = history_hash, None, True, None
            self._with = None
            self._claims.clear()  # they were about the rounds that this worker has discarded
        self.round, self.proposed, self._led, self._ready_s = round, None, None, None
        self._named.clear()
        self._declined.clear()
        self._listed.clear()
        was_away, self.closed, self.left_out = self.left_out, False, False
        self._held = self._attempt = self._failed = -1
        self._offer = self._decided = None
        self._closers.clear()
        if was_away:
            self._report_to_all()

    def ready(self, now: float) -> None:
        """Records that the local phase is over."""
        self._ready_s = now if self._ready_s is None else self._ready_s
        self.tick(now, again=True)

    def hold(self, attempt: int, now: float) -> None:
        """Records that this worker holds the complete mean of an attempt."""
        if self.proposed is not None and self.proposed.attempt == attempt:
            self._held = attempt
            self._vouch(attempt)
            self.tick(now, again=True)

    def fail(self, attempt: int, now: float, unsound: Collection[int] = ()) -> None:
        """Records that this worker cannot complete the mean of an attempt, as a message was lost or is `unsound`."""
        if self._attempt == attempt:
            self._failed = attempt
            self._declined.update(unsound)
            self._list(self.members.me, unsound)
            self.tick(now, again=True)

    def advance(self) -> None:
        """Records that the update of a closed round was made."""
        assert self.closed and self.proposed is not None
        self._last = _Closed(self.round, self.history_hash, self.proposed.attempt)
        self._misses, self._taken, self._behind_s, self._with = 0, False, None, self.proposed.workers
        for pair in self._accusations:
            if len(out := {*pair} - self.proposed.workers) == 1:
                (self._last_out[pair],) = out
        self.history_hash = key(
            self.history_hash, "closed", self.round, self.proposed.attempt, *sorted(self.proposed.workers)
        )
        self.begin_round(self.round + 1)
        self._judge_claims()

    def _judge_claims(self) -> None:
        """Reports workers whose claims the last closed round has disproved.

        A claim that `here` was closed may be right although this worker did not know it yet; then both have the same
        history. A claim that a later round was closed too implies that it was closed without this worker, which is
        disproved once it is closed with it. Until then this worker may be late, and learn so from others.
        """
        for j, (here, place, nonce) in [*self._claims.items()]:
            if self.round == here + 1 < place.round:
                continue
            del self._claims[j]
            same = place.closed == self._last if place.history_hash is None else place.history_hash == self.history_hash
            if not (same and self.round == here + 1 == place.round):
                self.unvouched.append(Unvouched(j, here, place.round, waits=False))
                self.members.disproved.add(nonce)

    def receive(self, letter: Letter, now: float) -> None:
        """Handles a received letter. Raises: RefusedError for an impossible one, which changes nothing."""
        values = json_from_peer(letter.content)
        self._spoke_s[letter.sender] = now
        match letter.kind, values:
            case LetterKind.REPORT, _ if (report := self._read_report(values)) is not None:
                if report.round >= 0:  # else it has not begun and there is no round to close
                    self._heard_report(letter.sender, report, now)
            case LetterKind.PROPOSAL, [*head, [*workers], [*seen]] if (
                (closed := self._closed_round(head)) is not None
                and self._are_slots(workers)
                and (promises := self._read_promises(seen)) is not None
            ):
                # Without promises there is one attempt, and its leader has no earlier mean either.
                promises = {letter.sender: _Promise(closed.attempt, -1, -1)} | promises
                self._heard_proposal(letter.sender, closed, workers, promises, now)
            case LetterKind.CLOSED, _ if (closed := self._closed_round(values)) is not None:
                self._heard_closed(letter.sender, closed, now)
            case _:
                raise RefusedError(
                    "bounds",
                    f"worker {letter.sender} sent a {letter.kind.name.lower()} that cannot be in round {self.round}: "
                    f"{letter.content!r:.80}; test its memory, and start all with the same gossamer",
                )

    def tick(self, now: float, *, again: bool = False) -> None:
        """Repeats its report, and leads if it is the leader."""
        self._away_until_s = {j: until_s for j, until_s in self._away_until_s.items() if now < until_s}
        self._returns_until_s = {j: until_s for j, until_s in self._returns_until_s.items() if now < until_s}
        self._few_s = (now if self._few_s is None else self._few_s) if self._are_few else None
        present = self._present
        if self.round % self.per_round and 2 * len(present) <= self.members.slots < 2 * len(self._living):
            self._leave_out(None)  # workers that are away wait for the end of this round, which needs them
        self._settle(now)
        alive = self._alive
        leader = min(alive)
        if again or leader != self._leader or now - self._said_s >= self._beat_s:
            self._said_s, self._leader = now, leader
            if self.left_out or self._declined:  # the next leader needs to know too
                self._report_to_all()
            elif leader != self.members.me:
                self._report_to(leader)
        if self._decided is not None and not self.left_out:
            self._wait_for_a_source(self._decided, again=again or self._said_s == now)
        elif leader == self.members.me and self._ready_s is not None and not self.closed and not self.left_out:
            self._reports[self.members.me] = self._own_report
            self._lead(alive, now)

    @property
    def _alive(self) -> frozenset[int]:
        """Workers with which this round may be closed: those in another round will not be ready in it."""
        return self._present - {j for j in self._places if self._contradicts(j)}

    @property
    def _accusations(self) -> set[tuple[int, int]]:
        """The accusers and accused of this round, by the last reports; a newcomer's replaces that of its slot."""
        place = self.round, self.history_hash
        said = {(j, k) for j, report in self._reports.items() if report[:2] == place for k in report.accused}
        return {(j, k) for j, k in said if self.members.me != j != k} | {(self.members.me, k) for k in self._declined}

    @property
    def _excluded(self) -> frozenset[int]:
        """The workers without which this one would close the round, so that no accusation is left between two others."""
        left, excluded = {pair for pair in self._accusations if self._living.issuperset(pair)}, set[int]()
        while left:
            counts = Counter(j for pair in left for j in pair)
            before, accused = {self._last_out.get(pair) for pair in left}, {j for _, j in left}
            most = max(counts, key=lambda j: (counts[j], j not in before, j in accused, j))
            excluded.add(most)
            left = {pair for pair in left if most not in pair}
        return frozenset(excluded)

    def needed(self, now: float) -> frozenset[int]:
        """The workers whose messages this one has declined, where a round needs them: without them too few are alive.

        Workers that are suspected or join have a deadline to take part: a partition may heal within seconds.
        """
        if self._few_s is None:
            return frozenset()
        others_may_come = self.members.with_status(MemberStatus.SUSPECT, MemberStatus.JOINING)
        waits = others_may_come and now < self._few_s + self._limit_s
        return frozenset() if waits else frozenset(self._declined & self._living)

    @property
    def _are_few(self) -> bool:
        """Whether those that are alive close no round without the workers whose messages this one has declined."""
        slots, living = self.members.slots, self._living
        return bool(self._declined & living) and 2 * len(living - self._excluded) <= slots < 2 * len(living)

    def _list(self, accuser: int, senders: Collection[int]) -> None:
        new = {(accuser, j) for j in senders if j != accuser} - self._listed
        self._listed |= new
        self.accused += sorted(new)

    @property
    def _present(self) -> frozenset[int]:
        """Any live worker may be ready, also one that was suspected and has announced a later round to gossip.

        If they were excluded until that round, workers that suspected each other in a partition would never close the
        one before it.
        """
        return self._living - self._away_until_s.keys()

    @property
    def _living(self) -> frozenset[int]:
        return frozenset(entry.slot for entry in self.members.with_status(MemberStatus.ALIVE)) | {self.members.me}

    @property
    def nobody_ahead(self) -> bool:
        """Whether no other training worker is known to be in a later round: waiting for the state after this one would
        be in vain.
        """
        others = self._present - {self.members.me}
        return all(j in self._places and self._places[j].round <= self.round for j in others)

    @property
    def late(self) -> frozenset[int]:
        """Live workers without which the last round was closed, and that have not yet taken a state after it."""
        if self._with is None:
            return frozenset()
        took_part = self.members.alive((self.round - 1) // self.per_round) & self._living
        return frozenset(
            j for j in took_part - self._with if j not in self._places or self._places[j].round < self.round
        )

    @property
    def awaited(self) -> frozenset[int]:
        """Workers whose letters are due before this round can be closed: the leader, or those that are not ready."""
        if self._ready_s is None or self.closed or self.left_out:
            return frozenset()
        leader = min(self._alive)
        if leader != self.members.me:
            return frozenset({leader})
        ready = {j for j, report in self._reports.items() if report.ready and report.round == self.round}
        return self._alive - ready - {leader}

    @property
    def _own_report(self) -> _Report:
        ready, held, failed = self._ready_s is not None, self._held, self._failed
        # With several closings in a round it could come back only at the first, and the others would wait for it at
        # each. It asks every other time: a worker whose state transfer exceeds the deadline must not delay every round.
        returns = self.left_out and self.per_round == 1 and self._misses % 2 == 0
        place, declined = (self.round, self.history_hash), frozenset(self._declined)
        return _Report(*place, ready, held, self._attempt, failed, self.left_out, returns, self._last, declined)

    def is_overtaken(self, attempt: int) -> bool:
        """Whether no more can come of an attempt: a later one was proposed, or this worker is left out.

        A worker that waited for its messages to time out would come to the later one when the others give that up, and so
        on: the round would be closed by luck alone.
        """
        return self.left_out or attempt < self._attempt

    def _lead(self, alive: frozenset[int], now: float) -> None:
        """Closes the round if enough workers hold a mean; else waits for the attempt in progress, or proposes the next one."""
        here = self.round, self.history_hash
        reports = {j: one for j, one in self._reports.items() if j in alive and one.ready and one[:2] == here}
        if self._led is not None and (holders := self._closing_holders(self._led, reports)):
            held = reports[min(holders)].held
            self._send_all(LetterKind.CLOSED, [self.round, self.history_hash, held])
            self.closed = self._held == held
            self._decided = None if self.closed else Proposal(held, holders)
            return
        self._take_offer(self._promises, now)
        # It has not led that attempt, so others may let go of it without its word: it proposes, and they vouch again.
        unled = self._led is None and self.proposed is not None and self._all_hold(self.proposed, reports)
        current = None if unled else self._led or self.proposed
        if current is None or not self._may_succeed(current, alive, reports, now):
            self._propose(alive, reports, now, at_once=unled)
            return
        waits = any(report.held not in (-1, current.attempt) for report in reports.values())
        news = waits and self._promises != self._relayed
        if news or now - self._said_s >= self._beat_s or self._said_s == now:
            self._send_all(LetterKind.PROPOSAL, self._proposal(current))

    def _may_succeed(self, proposed: Proposal, alive: frozenset[int], reports: dict[int, _Report], now: float) -> bool:
        """Whether all of an attempt may still come to hold its mean, as far as their reports say, within the deadline."""
        if not proposed.workers <= alive or now >= self._proposed_s + self._limit_s:
            return False
        if any(report.attempt > proposed.attempt for report in reports.values()):
            return False
        has_failed = any(self._contradicts(j) for j in proposed.workers) or self._has_failed(proposed)
        return not has_failed or now < self._proposed_s + self._beat_s

    def _propose(self, alive: frozenset[int], reports: dict[int, _Report], now: float, *, at_once: bool) -> None:
        """Proposes an attempt over those that are ready, once all are that may be, or the deadline is over."""
        assert self._ready_s is not None
        since_s, excluded = max(self._ready_s, self._proposed_s), self._excluded
        reports = {j: report for j, report in reports.items() if j not in excluded}
        expected = (alive | (self._living & self._returns_until_s.keys())) - excluded
        in_time = reports.keys() >= expected or at_once
        if 2 * len(reports) > self.members.slots and (in_time or now >= since_s + self._limit_s):
            # A newcomer that leads within a round does not know its attempts. No two leaders use the same number.
            newest = max(self._attempt, *(report.attempt for report in reports.values()))
            self._attempt = (newest // self.members.slots + 1) * self.members.slots + self.members.me
            self._proposed_s = now
            self._led = self._offer = Proposal(self._attempt, frozenset(reports))
            self._take_offer(self._promises, now)
            self._reports[self.members.me] = self._own_report
            self._send_all(LetterKind.PROPOSAL, self._proposal(self._led))

    def _wait_for_a_source(self, decided: Proposal, *, again: bool) -> None:
        """Takes a state only once it is one after this round: with one from before it, this leader would close it again."""
        if ahead := [j for j in decided.workers if self._contradicts(j)]:
            self._leave_out(min(ahead))
        elif not decided.workers & self._living:
            self._decided = None  # none has it any more
        elif again:
            self._send_all(LetterKind.CLOSED, [self.round, self.history_hash, decided.attempt])
            self._report_to_all()  # those in the next round answer, also during their local phase

    def _all_hold(self, proposed: Proposal, reports: dict[int, _Report]) -> bool:
        return all(j in reports and reports[j].held == proposed.attempt for j in proposed.workers)

    def _closing_holders(self, led: Proposal, reports: dict[int, _Report]) -> frozenset[int]:
        """The workers with whose mean this leader closes the round; empty for none.

        These are all of its attempt's, or more than half of all slots that have kept the mean of an earlier attempt when
        this one was proposed.
        """
        if self._all_hold(led, reports):
            return led.workers
        kept = {j: one.held for j, one in reports.items() if one.attempt == led.attempt > one.held >= 0}
        most = max(kept.values(), key=[*kept.values()].count, default=-1)
        holders = frozenset(j for j, held in kept.items() if held == most)
        return holders if 2 * len(holders) > self.members.slots else frozenset()

    @property
    def _promises(self) -> dict[int, _Promise]:
        """What this round's workers will not do any more, by their reports; empty as long as there is one attempt."""
        here = (self.round, self.history_hash)
        reports = {j: one for j, one in self._reports.items() if one[:2] == here and one.ready and one.attempt >= 0}
        reports[self.members.me] = self._own_report
        if all({one.attempt, one.held, one.failed} <= {-1, self._attempt} for one in reports.values()):
            return {}
        return {j: _Promise(one.attempt, one.held, one.failed) for j, one in sorted(reports.items())}

    def _take_offer(self, promises: dict[int, _Promise], now: float) -> None:
        """Takes part in the newest attempt, unless the round may be closed with the mean that this worker holds."""
        if self._offer is None:
            return
        if self._held >= 0 and not self._may_let_go(promises):
            if now > self._offered_s + _AWAY_BEATS * self._beat_s:
                self._kept_s = now  # after a cut it waits again for the leader of the attempt that it holds
            self._offered_s = now
            if now < self._kept_s + self._limit_s:
                return
        able = self._ready_s is not None and self._failed != self._offer.attempt
        takes_part = able and self.members.me in self._offer.workers
        self.proposed = self._offer if takes_part else None
        self._held, self._offer, self._offered_s = -1, None, -1e9
        self._closers.clear()

    def _may_let_go(self, promises: dict[int, _Promise], *, besides: int = -1) -> bool:
        """Whether no leader closes the round with the held mean, or has, besides that of one attempt."""
        assert self.proposed is not None and self.proposed.attempt == self._held
        for leader, (attempt, nonce) in self._closers.items():
            promise = promises.get(leader)
            leads = self._led is not None and self._led.attempt == attempt
            over = not leads if leader == self.members.me else promise is not None and promise.attempt > attempt
            incomplete = attempt == self._held and self._lacks_one(self.proposed, promises)
            if attempt != besides and not over and not incomplete and self._process(leader) == nonce:
                return False
        return True

    def _lacks_one(self, proposed: Proposal, promises: dict[int, _Promise]) -> bool:
        """Whether a worker of an attempt will never hold its mean: that attempt's leader needs all."""
        promised = [promises[j] for j in proposed.workers if j in promises]
        return any(
            one.held != proposed.attempt and (one.attempt > proposed.attempt or one.failed == proposed.attempt)
            for one in promised
        )

    def _vouch(self, attempt: int) -> None:
        """Lets the leader of an attempt close the round with the mean that this worker holds."""
        leader = attempt % self.members.slots
        self._closers[leader] = attempt, self._process(leader)

    def _process(self, slot: int) -> int:
        """The process that fills a slot; 0 if unknown."""
        return self.members.entries[slot].nonce if slot in self.members.entries else 0

    def _has_failed(self, proposed: Proposal) -> bool:
        here = self.round, self.history_hash, proposed.attempt
        reports = [self._reports[j] for j in proposed.workers if j in self._reports]
        return any((one.round, one.history_hash, one.failed) == here for one in reports)

    def _contradicts(self, j: int) -> bool:
        """Whether a worker claims to be in a later round than this one, or to have closed other rounds."""
        place = self._places.get(j)
        if place is None or self.closed:  # this worker is about to enter the next round itself
            return False
        return place.round > self.round or (
            place.round == self.round and place.history_hash not in (None, self.history_hash)
        )

    def _settle(self, now: float) -> None:
        """Treats this worker as left out if enough others claim it; asks all for their position while fewer do."""
        if self.left_out or self.closed:
            return
        others = self._living - {self.members.me}
        against = {j for j in others if self._contradicts(j)}
        self._disputed_s = {j: self._disputed_s.get(j, now) for j in against}
        excluded = self._excluded
        # It loses this round in any case, and without those that are ahead the others are too few.
        loses = self.members.me in excluded and 2 * len(self._alive - excluded) <= self.members.slots
        if self._are_enough(against) or (against and loses):
            self._leave_out(self._source_of(against))
            return
        for j in against:
            self._claims.setdefault(j, _Claim(self.round, self._places[j], self.members.entries[j].nonce))
        rest = others - against if self._taken else frozenset[int]()
        behind = {j for j in rest if j in self._places and self._places[j].round < self.round}
        if self._is_ahead_for_long(behind, now):
            self._leave_out(self._source_of(behind))
            return
        if (against or behind) and now - self._asked_s >= self._beat_s:
            self._asked_s = now
            self._report_to_all()  # they answer with their position
        if self._only_leader_answers(against, now):
            self._leave_out(min(against))
            return
        if 2 * (len(others) + 1 - len(against)) > self.members.slots:
            return  # the round will be closed without them, which decides
        for j in sorted(against - self._named):
            if now >= self._disputed_s[j] + _DISPUTE_BEATS * self._beat_s:
                self._named.add(j)
                self.unvouched.append(Unvouched(j, self.round, self._places[j].round, waits=True))

    def _is_ahead_for_long(self, behind: Collection[int], now: float) -> bool:
        """Whether the state that this worker has taken was ahead of too many others for a deadline to be theirs."""
        if not self._are_enough(behind, more_than_half=True):
            self._behind_s = None
            return False
        self._behind_s = now if self._behind_s is None else self._behind_s
        return now >= self._behind_s + self._limit_s

    def _only_leader_answers(self, against: Collection[int], now: float) -> bool:
        """Whether only the leader, which makes the claim, answers it.

        Two workers behind home routers may both reach the leader but not each other: each learns of rounds closed
        without it only from the leader. With two slots no round can be closed without both.
        """
        leader = min(self._living)
        if {*against} != {leader} or self.members.slots < 3 or now < self._disputed_s[leader] + self._limit_s:
            return False
        return all(
            self._spoke_s.get(j, -1e9) < self._disputed_s[leader] for j in self._living - {leader, self.members.me}
        )

    def _are_enough(self, some: Collection[int], *, more_than_half: bool = False) -> bool:
        """Whether this many others decide: at least two, and half of those alive, ties going to the later round or
        the larger hash.

        A round is closed over more than half of all slots, but some of those may have died since. So half is enough for
        a worker outside the set; if both halves gave way, each would take the other's state.
        """
        if len(some) < 2 or 2 * len(some) < len(self._living):
            return False
        place = self._places[self._source_of(some)]
        later = not more_than_half and (place.round, place.history_hash or 0) > (self.round, self.history_hash)
        return later or 2 * len(some) > len(self._living)

    def _source_of(self, some: Collection[int]) -> int:
        """One of these workers with the most common position; ties go to the earlier one."""
        rounds = [self._places[j].round for j in some]
        most = max(rounds, key=lambda round: (rounds.count(round), -round))
        return min(j for j in some if self._places[j].round == most)

    def _leave_out(self, source: int | None) -> None:
        if not self.left_out:
            self.left_out, self.source, self._misses = True, source, self._misses + 1
            self._last_out |= {pair: self.members.me for pair in self._accusations if self.members.me in pair}
            self._report_to_all()

    def _proposal(self, proposed: Proposal) -> list[object]:
        self._relayed = self._promises
        promises = [[j, *promise] for j, promise in self._relayed.items()]
        return [self.round, self.history_hash, proposed.attempt, sorted(proposed.workers), promises]

    def _heard_report(self, sender: int, report: _Report, now: float) -> None:
        self._reports[sender], self._places[sender] = report, _Place(report.round, report.history_hash)
        self._away_until_s.pop(sender, None)
        self._returns_until_s.pop(sender, None)
        if (report.round, report.history_hash) == (self.round, self.history_hash):
            self._list(sender, report.accused)
        if report.away:
            self._away_until_s[sender] = now + _AWAY_BEATS * self._beat_s
            if report.returns:
                self._returns_until_s[sender] = self._away_until_s[sender]
            if not self.left_out:
                self._report_to(sender)  # so that it knows what to wait for
        elif report.round > self.round and report.last is not None:
            self._close_what_is_held(report.last)
        elif report.round < self.round or self._leader != self.members.me:
            # Only the leader gets reports unasked: this one asks for all positions.
            self._answer(sender, report.round, now)
        self.tick(now)

    def _answer(self, sender: int, round: int, now: float) -> None:
        """Sends this worker's position to one in this round: once, and once per beat, as answers may trigger answers."""
        before = self._answered.get(sender)
        if before is None or before[0] != round or now >= before[1] + self._beat_s:
            self._answered[sender] = round, now
            self._report_to(sender)

    def _heard_proposal(
        self, sender: int, place: _Closed, workers: list[int], promises: dict[int, _Promise], now: float
    ) -> None:
        round, history_hash, attempt = place
        self._places[sender] = _Place(round, history_hash)
        if round < self.round:
            self._answer(sender, round, now)  # so that it learns how its round was closed
        elif (round, history_hash) != (self.round, self.history_hash):
            self._settle(now)
        elif attempt < self._attempt:
            self._report_to(sender)  # it leads and does not know of the later one
        elif not self.closed and self._decided is None:
            if attempt > self._attempt:
                self._attempt, self._proposed_s, self._led = attempt, now, None
                self._offer = Proposal(attempt, frozenset(workers))
            if self._offer is not None:
                self._consider(self._offer, promises, now)

    def _consider(self, offer: Proposal, promises: dict[int, _Promise], now: float) -> None:
        """Takes part in the newest attempt, or keeps the mean of an earlier one and reports which leaders may close with it."""
        attempt = offer.attempt
        self._take_offer(promises, now)
        if self._offer is not None:
            new = self._closers.get(attempt % self.members.slots, (-1, 0))[0] < attempt
            if self._failed != attempt and self._may_let_go(promises, besides=attempt):
                # It has let this leader close the round with that mean, so it takes part in the next attempt only.
                self._failed, new = attempt, True
            if new or now - self._asked_s >= self._beat_s:
                self._vouch(attempt)
                self._asked_s = now
                self._report_to_all()  # who has closed the round answers
        elif self.members.me in offer.workers and self._ready_s is None:
            self.fail(attempt, now)  # it refers to an earlier process of this slot

    def _heard_closed(self, sender: int, closed: _Closed, now: float) -> None:
        self._places[sender] = _Place(closed.round + 1, None, closed)
        self._close_what_is_held(closed)
        self._settle(now)

    def _close_what_is_held(self, closed: _Closed) -> None:
        """Makes the update of a mean that this worker holds, even if only one other reports it closed."""
        held = self.proposed is not None and self._held == self.proposed.attempt == closed.attempt
        if held and closed[:2] == (self.round, self.history_hash) and not self.left_out:
            self.closed = True

    def _report_to(self, peer: int) -> None:
        self._send(peer, LetterKind.REPORT, _plain(self._own_report))

    def _report_to_all(self) -> None:
        self._send_all(LetterKind.REPORT, _plain(self._own_report))

    def _send_all(self, kind: LetterKind, values: object) -> None:
        for j in sorted(self._living - {self.members.me}):
            self._send(j, kind, values)

    def _send(self, peer: int, kind: LetterKind, values: object) -> None:
        body = body_of(json.dumps(values).encode())
        letter = Letter(kind, self.members.me, round=max(self.round, 0) // self.per_round, body=body)
        self.outbox.append(Outgoing(peer, letter))

    # The following bounds every number from another worker by this worker's own knowledge.

    def _read_report(self, values: object) -> _Report | None:
        match values:
            case [
                int(round),
                int(history_hash),
                bool(ready),
                int(held),
                int(attempt),
                int(failed),
                bool(away),
                bool(returns),
                last,
                [*accused],
            ] if (
                self._are_bounded(round, history_hash, attempt)
                and self._is_attempt(held)
                and self._is_attempt(failed)
                and self._are_slots(accused)
            ):
                before = None if last is None else self._closed_round(last)
                if last is None or before is not None:
                    place, named = (round, history_hash), frozenset(accused)
                    return _Report(*place, ready, held, attempt, failed, away, returns, before, named)
        return None

    def _read_promises(self, seen: list[object]) -> dict[int, _Promise] | None:
        promises: dict[int, _Promise] = {}
        for one in seen:
            match one:
                case [int(slot), int(attempt), int(held), int(failed)] if self._are_slots([slot]) and all(
                    map(self._is_attempt, (attempt, held, failed))
                ):
                    promises[slot] = _Promise(attempt, held, failed)
                case _:
                    return None
        return promises

    def _closed_round(self, values: object) -> _Closed | None:
        match values:
            case [int(round), int(history_hash), int(attempt)] if round >= 0 and self._are_bounded(
                round, history_hash, attempt
            ):
                return _Closed(round, history_hash, attempt)
        return None

    def _are_bounded(self, round: object, history_hash: object, attempt: object) -> bool:
        newest = MOST_ATTEMPTS
        if round == self.round:
            known = max(self._attempt, 0, *(one.attempt for one in self._reports.values() if one.round == round))
            newest = min(newest, known + _JUMP * self.members.slots)
        last = self.members.limits.rounds * self.per_round
        sound = round == -1 or _is_below(round, last + 1)
        return sound and _is_below(history_hash, _HASHES) and self._is_attempt(attempt, newest)

    def _is_attempt(self, attempt: object, newest: int = MOST_ATTEMPTS) -> bool:
        return attempt == -1 or _is_below(attempt, newest)

    def _are_slots(self, workers: list[object]) -> bool:
        return all(_is_below(slot, self.members.slots) for slot in workers)


def _plain(report: _Report) -> list[object]:
    return [*report[:-2], None if report.last is None else list(report.last), sorted(report.accused)]


def _is_below(value: object, limit: int) -> bool:
    """Whether it is an integer from 0 to below the limit; JSON booleans are not."""
    return type(value) is int and 0 <= value < limit
