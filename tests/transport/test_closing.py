"""Closing a round over those that are ready: whatever is cut off and whenever, all workers end with one history."""

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from gossamer.errors import RefusedError
from gossamer.transport.elastic.closing import Closing, Proposal
from gossamer.transport.elastic.core import ElasticCore
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter, body_of
from tiny import limits

ROUNDS, STEP_S = 5, 0.1


class World:
    """Workers that close rounds over a virtual network, which falls apart and heals as a seed decides.

    Args: `per_round` is how often a round of the run is closed; states are given away as they were at its end.
    """

    def __init__(self, seed: int, n: int, *, per_round: int = 1, limit_s: float = 3.0) -> None:
        self.draw, self.n, self.now = random.Random(seed), n, 0.0
        self.per_round, self.limit_s = per_round, limit_s
        entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(n)]
        self.workers = [self.closing(Members(limits(n), i, entries)) for i in range(n)]
        self.dead = [False] * n
        self.deaths: list[float] = []
        self.ended = set[int]()
        """Who has ended, as its round needs a message that it has declined; nobody takes its slot."""
        self.kept = [(0, 0)] * n
        """The state at the end of the last round of each: in which closing it continues, and its line."""
        self.side = [0] * n
        self.unheard: set[tuple[int, int]] = set()
        """Senders and receivers whose letters are lost on the way, though the answers would come."""
        self.unsound = set[tuple[int, int]]()
        """Accusers and accused: whose message the first one declines in every attempt."""
        self.sent = set[tuple[int, tuple[int, int, int]]]()
        """Who has taken part in an attempt of a round: a mean needs the messages of all its workers."""
        self.faults = sorted(self.draw.uniform(0.0, 25.0) for _ in range(self.draw.randint(0, 6)))
        self.left_s = [self.draw.uniform(0.1, 2.0) for _ in range(n)]
        self.letters: list[tuple[float, int, int, Letter]] = []
        self.held: dict[int, tuple[int, int]] = {}
        self.histories: dict[tuple[int, int], set[tuple[int, frozenset[int]]]] = defaultdict(set)
        self.cut_s = [0.0] * n
        """How long each has been on a side without more than half of all."""
        self.cut_off = set[int]()
        """Who has ever been cut off from more than half of all for a deadline, but for the beats until an answer comes."""
        self.closers: list[tuple[int, tuple[int, int], Proposal]] = []
        """Who has closed which round, and how."""
        for worker in self.workers:
            worker.begin_round(0)

    def closing(self, members: Members) -> Closing:
        return Closing(members, limit_s=self.limit_s, beat_s=0.5, per_round=self.per_round)

    def meet(self, a: int, b: int) -> bool:
        return self.side[a] == self.side[b] and not self.dead[a] and not self.dead[b]

    def hears(self, b: int, a: int) -> bool:
        return self.meet(a, b) and (a, b) not in self.unheard

    def run(self, limit_s: float) -> bool:
        """Whether all workers that have not ended got through all rounds."""
        while self.now < limit_s:
            self.now += STEP_S
            self._fall_apart()
            self._die_and_come()
            for i in [i for i in range(self.n) if not self.dead[i]]:
                self._look_around(i)
                self._act(i, self.workers[i])
            self._deliver()
            some = [worker for i, worker in enumerate(self.workers) if i not in self.ended]
            if not some or {i for i in range(self.n) if self.dead[i]} > self.ended:
                continue
            if all(worker.round >= ROUNDS * self.per_round for worker in some):
                return True
        return False

    def _die_and_come(self) -> None:
        """Kills any worker but one whose death would leave too few, and fills a slot with a newcomer at any moment."""
        if self.deaths and self.now >= self.deaths[0]:
            self.deaths.pop(0)
            able = [i for i in range(self.n) if not self.dead[i]]
            if 2 * (len(able) - 1) > self.n:
                self._die(self.draw.choice(able))
        away = [i for i in range(self.n) if self.dead[i] and i not in self.ended]
        for slot in [i for i in away if not all(self.dead) and self.draw.random() < 0.05]:
            donor = self.draw.choice([i for i in range(self.n) if not self.dead[i]])
            entries = dict(self.workers[donor].members.entries)
            old = entries[slot]
            entries[slot] = old._replace(
                incarnation=old.incarnation + 1, nonce=old.nonce + 100, status=MemberStatus.ALIVE
            )
            self.workers[donor].members.entries[slot] = entries[slot]
            self.workers[slot] = self.closing(Members(limits(self.n), slot, entries.values()))
            self.letters = [letter for letter in self.letters if slot not in letter[1:3]]
            self.dead[slot], self.left_s[slot] = False, self.draw.uniform(0.1, 2.0)
            self._begin(slot, donor)

    def _die(self, i: int) -> None:
        """Ends a process, and with it what it alone has closed."""
        self.dead[i] = True
        self.closers = [closer for closer in self.closers if closer[0] != i]

    def _begin(self, i: int, source: int) -> None:
        """Goes on with another worker's state."""
        self.kept[i] = self.kept[source]
        self.workers[i].begin_round(*self.kept[i])
        self.held.pop(i, None)
        self.left_s[i] = self.draw.uniform(0.1, 2.0)

    @property
    def contradictions(self) -> set[tuple[int, int]]:
        """The rounds that two workers closed differently which were never cut off from a majority for a deadline."""
        outcomes: dict[tuple[int, int], set[Proposal]] = defaultdict(set)
        for i, place, proposed in self.closers:
            if i not in self.cut_off:
                outcomes[place].add(proposed)
        return {place for place, some in outcomes.items() if len(some) > 1}

    def _fall_apart(self) -> None:
        if self.faults and self.now >= self.faults[0]:
            self.faults.pop(0)
            whole = len(set(self.side)) == 1
            self.side = [self.draw.randint(0, 1) for _ in self.side] if whole else [0] * self.n
        elif not self.faults and self.now > 40.0:
            self.side = [0] * self.n
        few = [2 * self.side.count(side) <= self.n for side in self.side]
        self.cut_s = [cut_s + STEP_S if alone else 0.0 for cut_s, alone in zip(self.cut_s, few, strict=True)]
        self.cut_off |= {i for i, cut_s in enumerate(self.cut_s) if cut_s >= self.limit_s - 1.0}

    def _look_around(self, i: int) -> None:
        """Sooner or later a worker suspects those it cannot reach, and hears that others are back."""
        members = self.workers[i].members
        for j in set(range(self.n)) - {i}:
            entry, own = members.entries[j], self.workers[j].members.own
            if self.meet(i, j) and own.rank > entry.rank and own.nonce != entry.nonce and self.draw.random() < 0.1:
                members.entries[j] = own
            elif not self.meet(i, j) and self.draw.random() < 0.1:
                members.suspect(j)
            elif self.meet(i, j) and entry.status is MemberStatus.SUSPECT and self.draw.random() < 0.1:
                since = (
                    max(worker.round for worker in self.workers) + 1
                )  # as a worker answers that reads of the suspicion
                alive = entry._replace(status=MemberStatus.ALIVE, incarnation=entry.incarnation + 1, since=since)
                members.entries[j] = alive

    def _act(self, i: int, worker: Closing) -> None:
        self.left_s[i] -= STEP_S
        if worker.round < ROUNDS * self.per_round and self.left_s[i] <= 0:
            worker.ready(self.now)
            if worker.left_out:
                self._take_state(i, worker)
            elif worker.closed:
                assert worker.proposed is not None
                self.histories[worker.round, worker.history_hash].add(worker.proposed)
                self.closers.append((i, (worker.round, worker.history_hash), worker.proposed))
                worker.advance()
                if worker.round % self.per_round == 0:
                    self.kept[i] = worker.round, worker.history_hash
                self.left_s[i] = self.draw.uniform(0.1, 2.0)
            elif worker.proposed is not None and self.held.get(i) != (worker.round, worker.proposed.attempt):
                self._try(i, worker, worker.proposed)
            elif worker.needed(self.now):
                self.ended.add(i)
                return self._die(i)
        worker.tick(self.now)
        for peer, letter in worker.outbox:
            self.letters.append((self.now + self.draw.uniform(0.01, 0.3), i, peer, letter))
        worker.outbox.clear()

    def _try(self, i: int, worker: Closing, named: Proposal) -> None:
        key = self.workers[i].round, self.workers[i].history_hash, named.attempt
        self.sent.add((i, key))
        bad = {j for j in named.workers if (i, j) in self.unsound}
        if any({*pair} <= named.workers for pair in self.unsound):
            if self.draw.random() < 0.3:
                self.held[i] = worker.round, named.attempt
                worker.fail(named.attempt, self.now, bad)
        elif all(self.hears(i, j) and (j, key) in self.sent for j in named.workers) and self.draw.random() < 0.3:
            self.held[i] = worker.round, named.attempt
            worker.hold(named.attempt, self.now)

    def _take_state(self, i: int, worker: Closing) -> None:
        known = [worker.source] if worker.source is not None else [j for j in range(self.n) if j != i]
        sources = [j for j in known if self.meet(i, j) and not self._waits_for(worker, j)]
        if sources and self.draw.random() < 0.2:
            self._begin(i, sources[0])

    def _waits_for(self, worker: Closing, source: int) -> bool:
        """Whether it waits for the state at the end of a round that is closed several times."""
        waits = self.per_round > 1 and worker.source is not None and not worker.nobody_ahead
        return waits and self.kept[source][0] <= worker.round

    def _deliver(self) -> None:
        due = [letter for letter in self.letters if letter[0] <= self.now]
        self.letters = [letter for letter in self.letters if letter[0] > self.now]
        for _, sender, receiver, letter in sorted(due, key=lambda one: one[0]):
            if self.hears(receiver, sender):
                self.workers[receiver].receive(letter, self.now)


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("liar", range(2))
def test_rounds_are_closed_without_who_sends_all_others_what_is_not_finite(n: int, liar: int) -> None:
    for seed in range(2):
        world = World(seed, n)
        world.faults, world.unsound = [], {(i, liar) for i in range(n) if i != liar}
        assert world.run(limit_s=60.0), (seed, [worker.round for worker in world.workers])
        others = frozenset(range(n)) - {liar}
        assert all(workers == others for named in world.histories.values() for _, workers in named), seed
        accused = {pair for i in others for pair in world.workers[i].accused}
        assert accused == world.unsound


@pytest.mark.parametrize("accuser", range(3))
@pytest.mark.parametrize("n", [3, 5])
def test_of_one_that_accuses_one_each_is_left_out_in_turn_and_who_accuses_all_always(n: int, accuser: int) -> None:
    victim = (accuser + 1) % 3
    for seed, senders in enumerate(({victim}, {*range(n)} - {accuser})):
        world = World(seed, n)
        world.faults, world.unsound = [], {(accuser, j) for j in senders}
        assert world.run(limit_s=90.0), (seed, [worker.round for worker in world.workers])
        assert len({worker.history_hash for worker in world.workers}) == 1
        closed = [(round, workers) for (round, _), named in sorted(world.histories.items()) for _, workers in named]
        assert [round for round, _ in closed] == [*range(ROUNDS)]
        out = [frozenset(range(n)) - workers for _, workers in closed]
        if len(senders) > 1:
            assert {*out} == {frozenset({accuser})}
        else:  # and one that is left out may come back a round later
            assert out[0] == {victim} and {*out} == {frozenset({victim}), frozenset({accuser})}, closed


def test_all_end_with_one_history_where_some_accuse_others_and_the_network_falls_apart() -> None:
    for seed in range(6):
        world = World(seed, 5)
        world.unsound = {(a, b) for a, b in [world.draw.sample(range(5), 2) for _ in range(2)]}
        assert world.run(limit_s=240.0), (seed, [worker.round for worker in world.workers])
        assert len({one.history_hash for i, one in enumerate(world.workers) if i not in world.ended}) == 1, seed


@pytest.mark.parametrize(("n", "seed"), [(3, 151), (3, 274)])
def test_no_round_is_closed_twice_where_a_leader_excludes_itself_or_another_leads_late(n: int, seed: int) -> None:
    world = late_leader(seed, n)
    world.faults = []
    assert world.run(limit_s=240.0), [worker.round for worker in world.workers]
    assert all(len(named) == 1 for named in world.histories.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(20))
def test_who_is_never_cut_off_from_a_majority_for_a_deadline_has_one_history_throughout(part: int) -> None:
    for seed in range(4 * part, 4 * part + 4):
        for n in (3, 4, 5):
            for world in (World(seed, n), late_leader(seed, n)):
                world.run(limit_s=90.0)
                assert not world.contradictions, (seed, n)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(10))
def test_who_needs_a_declined_message_ends_and_the_others_have_one_history_where_some_die(part: int) -> None:
    ended = 0
    for seed, n, falls_apart in itertools.product((2 * part, 2 * part + 1), (3, 4, 5), (False, True)):
        world = late_leader(seed, n)
        world.deaths = sorted(world.draw.uniform(0.0, 15.0) for _ in range(4))
        world.faults = world.faults if falls_apart else []
        got_through = world.run(limit_s=120.0)
        live = [worker for i, worker in enumerate(world.workers) if not world.dead[i]]
        assert got_through or 2 * len(live) <= n, (seed, n, "only too few wait")
        assert len({(worker.round, worker.history_hash) for worker in live}) == len({one.round for one in live})
        assert not world.contradictions and not any(worker.needed(world.now) for worker in live), (seed, n)
        ended += len(world.ended)
    assert ended


def late_leader(seed: int, n: int) -> World:
    """Some accuse others, and worker 0, which most suspect at first, is late."""
    world, draw = World(seed, n), random.Random(7 * seed + n)
    pairs = [tuple(draw.sample(range(n), 2)) for _ in range(draw.randint(1, 2))]
    world.unsound = {(a, b) for a, b in pairs}
    world.left_s[0] += draw.uniform(1.0, 6.0)
    for i in range(1, n):
        if draw.random() < 0.7:
            world.workers[i].members.suspect(0)
    return world


def proposal(sender: int, attempt: int, workers: list[int], *promises: list[int]) -> Letter:
    """Proposes an attempt of round 0; promises are those of workers: the attempt, and what it holds and has failed."""
    return Letter(LetterKind.PROPOSAL, sender, body=body_of(json.dumps([0, 0, attempt, workers, promises]).encode()))


def holder() -> Closing:
    """Worker 2 of five, which holds the mean of an attempt of worker 1 when worker 0 proposes another one."""
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(5)]
    worker = Closing(Members(limits(5), 2, entries), limit_s=3.0, beat_s=0.5)
    worker.begin_round(0)
    worker.ready(0.0)
    worker.receive(proposal(1, 1, [1, 2, 3]), 0.0)
    worker.hold(1, 0.0)
    worker.receive(proposal(0, 5, [0, 2, 4]), 0.0)
    assert worker.proposed == Proposal(1, frozenset({1, 2, 3})), "worker 1 may have closed the round"
    return worker


def test_a_worker_closes_the_round_with_the_mean_that_it_holds_though_another_attempt_was_proposed() -> None:
    worker = holder()
    worker.receive(Letter(LetterKind.CLOSED, 1, body=body_of(b"[0, 0, 1]")), 0.1)
    assert worker.closed


@pytest.mark.parametrize(
    ("letter", "lets_go"),
    [
        (proposal(0, 5, [0, 2, 4], [1, 5, 1, -1]), True),  # its leader takes part in a later one
        (proposal(0, 5, [0, 2, 4], [3, 5, -1, -1]), True),  # one of its workers will never hold it
        (proposal(0, 5, [0, 2, 4], [3, 1, -1, 1]), True),
        (proposal(0, 5, [0, 2, 4], [3, 1, -1, -1]), False),
        (proposal(0, 5, [0, 2, 4], [3, 5, 1, -1]), False),
        (proposal(0, 5, [0, 2, 4], [4, 5, -1, -1]), False),
        (proposal(3, 8, [2, 3, 4], [1, 8, 1, -1]), False),  # worker 0 may close it now, too
        (proposal(3, 8, [2, 3, 4], [1, 8, 1, -1], [0, 8, -1, -1]), True),
    ],
)
def test_a_worker_lets_go_of_a_mean_once_nobody_can_close_the_round_with_it(letter: Letter, lets_go: bool) -> None:
    worker = holder()
    worker.receive(letter, 0.1)
    assert worker.proposed is not None and (worker.proposed.attempt == 1 or letter.sender), "worker 0 may close with it"
    _, _, attempt, workers, promises = json.loads(letter.content)
    worker.receive(proposal(letter.sender, attempt + 5, workers, *promises), 0.2)
    assert worker.proposed is not None and (worker.proposed.attempt == attempt + 5) == lets_go


def test_a_worker_lets_go_of_a_mean_whose_leader_another_process_has_replaced() -> None:
    worker = holder()
    worker.members.entries[1] = SlotEntry(1, 1, 200, MemberStatus.ALIVE, 0)
    worker.receive(proposal(0, 10, [0, 2, 4]), 0.1)
    assert worker.proposed == Proposal(10, frozenset({0, 2, 4}))


def test_a_worker_lets_go_of_a_mean_whose_leader_is_silent_for_a_deadline_in_which_it_could_have_answered() -> None:
    worker = holder()
    for now in (0.5, 1.0, 9.0, 10.0, 11.0):  # it is cut off itself between 1 and 9
        worker.receive(proposal(0, 5, [0, 2, 4]), now)
        assert worker.proposed is not None and worker.proposed.attempt == 1
    worker.receive(proposal(0, 5, [0, 2, 4]), 12.0)
    assert worker.proposed == Proposal(5, frozenset({0, 2, 4}))


def test_the_next_leader_closes_a_round_with_the_mean_that_a_majority_holds() -> None:
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(5)]
    workers = [Closing(Members(limits(5), i, entries), limit_s=1e6, beat_s=0.5) for i in range(5)]
    for worker in workers:
        worker.begin_round(0)
        worker.ready(1.0)
    deliver(workers)
    for worker in workers[1:]:
        worker.hold(0, 1.5)
        worker.outbox.clear()  # worker 0 ends
        worker.members.suspect(0)
    for _ in range(3):
        for worker in workers[1:]:
            worker.tick(2.0, again=True)
        for worker in workers[1:]:
            worker.outbox = [(peer, letter) for peer, letter in worker.outbox if peer]
        deliver(workers, 2.0)
    assert all(worker.closed and worker.proposed == Proposal(0, frozenset(range(5))) for worker in workers[1:])


def test_a_leader_that_closes_a_round_without_itself_takes_no_state_from_before_it() -> None:
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(3)]
    workers = [Closing(Members(limits(3), i, entries), limit_s=9.0, beat_s=0.5) for i in range(3)]
    leader, *others = workers
    for worker in workers:
        worker.begin_round(0)
        worker.ready(1.0)
    deliver(workers, 1.0)
    for worker in others:
        worker.fail(0, 1.0, {0})
    deliver(workers, 1.0)
    leader.tick(1.6)
    deliver(workers, 1.6)
    for worker in others:
        worker.hold(3, 1.6)
    deliver(workers, 1.6)
    assert not leader.closed and all(worker.closed for worker in others)
    assert not leader.left_out, "they still have the state from before the round, in which it would lead again"
    for worker in others:
        worker.advance()
    leader.tick(2.2)
    deliver(workers, 2.2)
    assert leader.left_out and leader.source == 1, "though the others train"


def test_where_too_few_are_left_without_who_sends_what_is_not_finite_its_message_is_needed() -> None:
    for slots, few in ((2, True), (3, False)):
        closing = Closing(
            Members(limits(slots), 0, [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(slots)]),
            limit_s=3.0,
            beat_s=0.5,
        )
        closing.begin_round(0)
        closing.ready(1.0)
        for i in range(1, slots):
            report = [0, 0, True, -1, -1, -1, False, False, None, []]
            closing.receive(Letter(LetterKind.REPORT, i, body=body_of(json.dumps(report).encode())), 1.0)
        assert closing.proposed is not None and closing.proposed.workers == frozenset(range(slots))
        closing.fail(closing.proposed.attempt, 1.0, {1})
        assert closing.needed(1.0) == (frozenset({1}) if few else frozenset())


@pytest.mark.parametrize("heals", [True, False])
def test_who_needs_a_declined_message_waits_a_deadline_for_workers_that_are_suspected(heals: bool) -> None:
    trio = Trio()
    for i in range(3):
        trio.workers[i].ready(0.0)
    trio.pass_s(0.2)
    trio.cut = {2}
    for worker in trio.workers[:2]:
        worker.members.suspect(2)
    first = trio.workers[0].proposed
    assert first is not None
    trio.workers[0].fail(first.attempt, trio.now, {1})
    trio.pass_s(2.5)
    assert not trio.workers[0].needed(trio.now), "worker 2 may answer yet"
    if heals:
        trio.cut = set()
        for worker in trio.workers[:2]:
            entry = worker.members.entries[2]
            worker.members.merge([entry._replace(status=MemberStatus.ALIVE, incarnation=1)])
        trio.pass_s(1.5)
        proposed = trio.workers[0].proposed
        assert proposed is not None and proposed.workers == {0, 2}, "the round is closed without the accused"
    trio.pass_s(0.6)
    assert trio.workers[0].needed(trio.now) == (frozenset() if heals else {1})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [3, 5])
def test_all_workers_end_with_one_history_after_any_partitions(n):
    for seed in range(12):
        world = World(seed, n)
        assert world.run(limit_s=120.0), (seed, [worker.round for worker in world.workers])
        assert len({worker.history_hash for worker in world.workers}) == 1, seed


def test_where_messages_between_two_pass_one_way_only_all_continue_with_one_history():
    for seed in range(8):
        world = World(seed, 5)
        world.faults, world.unheard = [], {(seed % 5, (seed + 1 + seed // 5) % 5)}
        world.run(limit_s=8.0)
        world.unheard.clear()
        assert world.run(limit_s=120.0), (seed, [worker.round for worker in world.workers])
        assert len({worker.history_hash for worker in world.workers}) == 1, seed


def test_without_faults_every_round_is_closed_over_everyone_at_the_first_attempt():
    world = World(0, 4)
    world.faults = []
    assert world.run(limit_s=60.0)
    assert {workers for named in world.histories.values() for _, workers in named} == {frozenset(range(4))}
    assert all(len(named) == 1 for named in world.histories.values())
    assert not any(worker.unvouched for worker in world.workers), "nobody has said anything wrong"


@pytest.mark.full
@pytest.mark.parametrize("per_round", [1, 2])
def test_nobody_waits_for_a_limit_where_workers_die_and_newcomers_take_their_slots_at_any_moment(per_round):
    for seed in (0, 1, 3, 4):  # with seed 2 two that are ahead of three, one of which is left out, wait for a deadline
        world = World(seed, 5, per_round=per_round, limit_s=1e6)
        world.faults, world.deaths = [], sorted(world.draw.uniform(0.0, 15.0) for _ in range(6))
        assert world.run(limit_s=90.0), (seed, [worker.round for worker in world.workers])
        assert len({worker.history_hash for worker in world.workers}) == 1, seed


@pytest.mark.parametrize("away", range(3))
def test_others_close_their_round_at_once_without_a_newcomer_that_came_amid_it_and_waits_for_the_state_after_it(away):
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.SUSPECT if i == away else MemberStatus.ALIVE, 3) for i in range(3)]
    workers = [Closing(Members(limits(3), i, entries), limit_s=30.0, beat_s=0.5, per_round=2) for i in range(3)]
    others = [worker for i, worker in enumerate(workers) if i != away]
    for worker in workers:
        worker.begin_round(6, history_hash=7)
    closed(workers, others)
    for worker in workers:
        worker.members.entries[away] = SlotEntry(away, 1, 200, MemberStatus.ALIVE, 3)
    workers[away].ready(1.0)
    for worker in others:
        worker.ready(1.0)
    deliver(workers)
    workers[away].tick(1.5)
    deliver(workers)
    assert workers[away].left_out and workers[away].source is not None
    closed(workers, others)
    assert [worker.round for worker in others] == [8, 8], "no time has passed in which they could have waited"


def deliver(workers: list[Closing], now: float = 1.5) -> None:
    """Lets all letters arrive, and those that answer them."""
    while letters := [(peer, letter) for worker in workers for peer, letter in worker.outbox]:
        for worker in workers:
            worker.outbox.clear()
        for peer, letter in letters:
            workers[peer].receive(letter, now)


def closed(workers: list[Closing], taking_part: list[Closing]) -> None:
    """A round that these close."""
    for step in ("ready", "hold", "advance"):
        for worker in taking_part:
            if step == "ready":
                worker.ready(1.5)
            elif step == "advance":
                worker.advance()
            elif worker.proposed is not None:
                worker.hold(worker.proposed.attempt, 1.5)
        deliver(workers)


def test_a_newcomer_that_leads_amid_a_round_names_an_attempt_after_those_that_it_does_not_know():
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE if i else MemberStatus.SUSPECT, 3) for i in range(5)]
    workers = [Closing(Members(limits(5), i, entries), limit_s=3.0, beat_s=0.5) for i in range(5)]
    for worker in workers:
        worker.begin_round(3, history_hash=7)
    for worker in workers[1:]:
        worker.ready(1.0)
    deliver(workers, 1.0)
    assert all(worker.proposed == Proposal(1, frozenset({1, 2, 3, 4})) for worker in workers[1:])
    for worker in workers:
        worker.members.entries[0] = SlotEntry(0, 1, 200, MemberStatus.ALIVE, 3)
    workers[0].ready(1.0)
    for worker in workers[1:]:
        worker.tick(1.0, again=True)
    deliver(workers, 1.0)  # no time passes: nobody waits for a limit
    assert {worker.proposed for worker in workers} == {Proposal(5, frozenset(range(5)))}


@pytest.mark.parametrize("me", [0, 1])
def test_a_leader_that_hangs_and_a_worker_that_hangs_before_it_is_ready_are_suspected_and_those_that_answer_are_not(
    me: int,
) -> None:
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0, f"host:{i}") for i in range(3)]
    core = ElasticCore(Members(limits(3), me, entries), timeout_s=4.0)
    worker, hangs = Closing(core.members, limit_s=4.0, beat_s=0.5), 1 - me
    worker.begin_round(0)
    assert not worker.awaited, "it trains itself"
    worker.ready(0.0)
    for step in range(100):
        now = 0.1 * step
        core.receive(Letter(LetterKind.PONG, 2), now)
        core.wait_for(worker.awaited)
        core.tick(now)
        asked = {peer for peer, letter in core.outbox if letter.kind is LetterKind.PING}
        assert hangs in asked
        assert core.members.entries[hangs].status is (MemberStatus.ALIVE if now < 3.5 else MemberStatus.SUSPECT), now
    assert core.members.entries[2].status is MemberStatus.ALIVE
    assert worker.awaited == {2}, "worker 1 leads where 0 has hung"


class Trio:
    """Three workers whose letters arrive at once, but those from or to whom is `cut` off."""

    def __init__(self, beat_s=0.5):
        entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(3)]
        self.workers = [Closing(Members(limits(3), i, entries), limit_s=3.0, beat_s=beat_s) for i in range(3)]
        self.cut, self.now = set(), 0.0
        for worker in self.workers:
            worker.begin_round(0)

    def pass_s(self, seconds):
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for worker in self.workers:
                worker.tick(self.now)
            while letters := [(i, *one) for i, worker in enumerate(self.workers) for one in worker.outbox]:
                for worker in self.workers:
                    worker.outbox.clear()
                for sender, target, letter in letters:
                    if not self.cut & {sender, target}:
                        self.workers[target].receive(letter, self.now)

    def close(self, *some):
        """The round of these, with all that it waits for; returns over whom it was closed."""
        for i in some:
            self.workers[i].ready(self.now)
        self.pass_s(0.2)
        over = self.workers[some[0]].proposed
        for i in over.workers if over else ():
            self.workers[i].hold(over.attempt, self.now)
        self.pass_s(0.2)
        for i in some:
            if self.workers[i].closed:
                self.workers[i].advance()
        return over and over.workers


@pytest.mark.parametrize("how", ["takes their state", "is lost"])
def test_those_that_closed_a_round_know_who_is_late_until_it_has_their_state_or_is_lost(how: str) -> None:
    trio = Trio()
    late = trio.workers[2]
    trio.cut = {2}
    trio.close(0, 1)
    trio.pass_s(3.0)
    assert trio.close(0, 1) == {0, 1}
    trio.cut = set()
    trio.pass_s(0.6)
    assert late.left_out
    assert [worker.late for worker in trio.workers] == [{2}, {2}, frozenset()]
    if how == "is lost":
        for worker in trio.workers[:2]:
            worker.members.suspect(2)
    else:
        late.begin_round(0, history_hash=0)  # a state from before that round
        trio.pass_s(0.6)
        assert late.left_out and trio.workers[0].late == {2}
        late.begin_round(1, trio.workers[0].history_hash)
        trio.pass_s(0.6)
    assert [worker.late for worker in trio.workers] == [frozenset()] * 3
    trio.close(0, 1, *([2] if how != "is lost" else []))
    assert [worker.late for worker in trio.workers] == [frozenset()] * 3


@pytest.mark.parametrize("in_time", [True, False])
def test_a_worker_that_is_left_out_again_is_waited_for_until_the_deadline(in_time):
    trio = Trio()
    late = trio.workers[2]
    trio.cut = {2}
    assert trio.close(0, 1) is None
    trio.pass_s(3.0)
    assert trio.close(0, 1) == {0, 1}
    trio.cut = set()
    trio.pass_s(0.6)
    assert late.left_out
    assert trio.close(0, 1) == {0, 1}, "nobody waits for who was left out once: it may have been cut off for long"
    late.begin_round(1, history_hash=0)  # with a state that is a round too old, as it took longer than a round
    trio.pass_s(0.6)
    assert late.left_out
    assert trio.close(0, 1) is None, "the others wait"
    if in_time:
        late.begin_round(2, history_hash=trio.workers[0].history_hash)
        assert trio.close(0, 1, 2) == {0, 1, 2}
        assert [worker.round for worker in trio.workers] == [3, 3, 3]
    else:
        trio.pass_s(3.0)
        assert trio.close(0, 1) == {0, 1}
        trio.pass_s(0.6)
        late.begin_round(2, history_hash=trio.workers[0].history_hash)
        trio.pass_s(0.6)
        assert late.left_out
        assert trio.close(0, 1) == {0, 1}, "of who is too slow for the deadline not every round waits"


def lie(sender, round, history_hash=0, last=None):
    """A report of a worker that says that it is there."""
    return Letter(
        LetterKind.REPORT,
        sender,
        body=body_of(json.dumps([round, history_hash, True, -1, -1, -1, False, False, last, []]).encode()),
    )


CLAIMS = {
    "report": lambda sender: lie(sender, 2),
    "report of a close": lambda sender: lie(sender, 1, 7, [0, 0, 5]),
    "report of a line": lambda sender: lie(sender, 0, 1 << 63),
    "proposal": lambda sender: Letter(LetterKind.PROPOSAL, sender, body=body_of(b"[2, 5, 9, [0, 1, 2], []]")),
    "closed": lambda sender: Letter(LetterKind.CLOSED, sender, body=body_of(b"[0, 0, 5]")),
}
"""Letters by which one worker says that others have closed rounds without the one that reads it."""


@pytest.mark.parametrize("liar", [0, 1, 2])
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_no_worker_gives_its_state_up_on_the_word_of_one_and_the_others_close_their_round_without_it(claim, liar):
    trio = Trio()
    honest = [i for i in range(3) if i != liar]
    trio.cut = {liar}  # it answers nobody, and says the same again and again
    for _ in range(20):
        for i in honest:
            trio.workers[i].receive(claim(liar), trio.now)
        trio.pass_s(0.1)
    assert not any(trio.workers[i].left_out for i in honest)
    assert trio.close(*honest) == set(honest), "they do not wait for the liar"
    assert [trio.workers[i].round for i in honest] == [1, 1]


def silent(worker: Closing, liar: int, now: float) -> None:
    """Says nothing more, and is suspected for it in the next round."""
    if worker.round:
        worker.members.suspect(liar)


def repeats_it(worker: Closing, liar: int, now: float) -> None:
    """Says in each round that it is in a later one."""
    worker.receive(lie(liar, worker.round + 2), now)


def takes_it_back(worker: Closing, liar: int, now: float) -> None:
    """Says that it is where the other worker is, and cannot be reached."""
    worker.receive(lie(liar, worker.round, worker.history_hash), now)
    worker.members.suspect(liar)


def leaves(worker: Closing, liar: int, now: float) -> None:
    """Leaves the run."""
    worker.members.entries[liar] = worker.members.entries[liar]._replace(status=MemberStatus.LEFT)


@pytest.mark.parametrize("then", [silent, repeats_it, takes_it_back, leaves])
@pytest.mark.parametrize("liar", [0, 1, 2])
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_who_says_once_that_it_is_ahead_is_named_with_the_round_though_rounds_are_closed_within_a_beat(
    claim: Callable[[int], Letter], liar: int, then: Callable[[Closing, int, float], None]
) -> None:
    trio = Trio(beat_s=1e6)
    honest = [i for i in range(3) if i != liar]
    trio.cut = {liar}
    for i in honest:
        trio.workers[i].receive(claim(liar), trio.now)
    for _ in range(2):
        for i in honest:
            then(trio.workers[i], liar, trio.now)
        assert trio.close(*honest) == {*honest}
    for i in honest:
        assert trio.workers[i].round == 2
        first = trio.workers[i].unvouched[0]
        assert (first.worker, first.here, first.waits) == (liar, 0, False) and first.round in (0, 1, 2)


@pytest.mark.parametrize("round", [-1, 0, 1])
def test_a_liar_that_joins_in_the_last_rounds_is_named_at_the_last(round: int) -> None:
    trio = Trio(beat_s=1e6)
    trio.cut = {2}
    first = limits(3).rounds - 2
    for worker in trio.workers:
        worker.begin_round(first, history_hash=7)
    for k in range(2):
        for i in range(2):
            if k >= round:
                trio.workers[i].receive(lie(2, min(first + 2, first + k + 2), history_hash=9), trio.now)
        if trio.close(0, 1) is None:  # who says nothing yet is waited for
            trio.pass_s(3.0)
            assert trio.close(0, 1) == {0, 1}
    for i in range(2):
        assert [(one.worker, one.here) for one in trio.workers[i].unvouched] == [(2, first + max(round, 0))]


def test_one_that_learns_late_how_its_round_was_closed_names_nobody() -> None:
    trio = Trio(beat_s=1e6)
    leader, late, _ = trio.workers
    for worker in (leader, late):
        worker.members.suspect(2)
        worker.ready(trio.now)
    trio.cut = {2}
    trio.pass_s(0.1)
    for worker in (leader, late):
        assert worker.proposed is not None
        worker.hold(worker.proposed.attempt, trio.now)
    leader.outbox.clear()
    leader.receive(late.outbox.pop()[1], trio.now)
    [(_, closed_letter)] = leader.outbox
    leader.advance()
    late.members.entries[2] = SlotEntry(2, 1, 200, MemberStatus.ALIVE, 1)
    late.receive(
        lie(2, 1, leader.history_hash), trio.now
    )  # it has the state of worker 0, whose letter is still under way
    late.receive(closed_letter, trio.now)
    late.advance()
    assert (late.round, late.history_hash) == (1, leader.history_hash) and not late.unvouched


def test_of_two_workers_neither_decides_for_the_other_and_each_names_the_other():
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE if i < 2 else MemberStatus.SUSPECT, 0) for i in range(3)]
    worker = Closing(Members(limits(3), 0, entries), limit_s=3.0, beat_s=0.5)
    worker.begin_round(0)
    worker.ready(0.0)
    for step in range(100):
        worker.receive(lie(1, 2), 0.1 * step)
    assert not worker.left_out and [(one.worker, one.round, one.waits) for one in worker.unvouched] == [(1, 2, True)]


def test_a_worker_whom_the_leader_alone_answers_believes_it_after_a_deadline():
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(3)]
    worker = Closing(Members(limits(3), 2, entries), limit_s=3.0, beat_s=0.5)
    worker.begin_round(0)
    worker.ready(0.0)
    for step in range(29):
        worker.receive(lie(0, 1), 0.1 * step)
    assert not worker.left_out
    worker.receive(lie(0, 1), 3.1)
    assert worker.left_out and worker.source == 0


def test_a_newcomer_whose_state_is_ahead_of_what_most_have_takes_another():
    trio = Trio()
    late = trio.workers[2]
    late.begin_round(50, history_hash=9)  # as a donor gave it
    late.ready(trio.now)
    for i in range(2):
        trio.workers[i].ready(trio.now)
    trio.pass_s(4.0)
    assert late.left_out and late.source == 0 and not trio.workers[0].left_out and not trio.workers[1].left_out


def test_less_than_a_majority_never_closes_a_round():
    world = World(0, 4)
    world.faults, world.side = [60.0], [0, 0, 1, 1]
    assert not world.run(limit_s=39.0)
    assert all(worker.round == 0 and not worker.closed for worker in world.workers)


@pytest.mark.parametrize("kind", [LetterKind.REPORT, LetterKind.PROPOSAL, LetterKind.CLOSED])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "[0,0,-1,[9],[]]",
        "[0,0,0,[0],[[9,0,0,0]]]",
        "[0,0,0,[0],[[0,true,0,0]]]",
        "[0,0,0,[0],[[0]]]",
        "[0,0,true,-5,-1,null]",
        "[0,0,true,0,1e9,null]",
        "[0,0,2147483648,[0,1,2],[]]",
        "[[[]]]",
        '{"a":1}',
        "[1e999,0,0]",
    ],
)
def test_letters_that_say_nothing_possible_are_refused_and_change_nothing(kind, text):
    entries = [SlotEntry(i, 0, 100 + i, MemberStatus.ALIVE, 0) for i in range(3)]
    worker = Closing(Members(limits(3), 0, entries), limit_s=3.0, beat_s=0.5)
    worker.begin_round(0)
    with pytest.raises(RefusedError, match=f"worker 1 sent a {kind.name.lower()} that cannot be in round 0"):
        worker.receive(Letter(kind, 1, body=body_of(text.encode())), 0.0)
    assert not worker.outbox and not worker.closed and not worker.left_out and worker.proposed is None
