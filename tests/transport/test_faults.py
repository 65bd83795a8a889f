"""Elastic runs over a network with faults: a hundred seeds, and what they have found, each by name."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faulty_network.network import FAULT_KINDS, check_faults
from gossamer.rng import key
from gossamer.rules import diloco, gasloc, gossip
from gossamer.topologies import make_topology
from gossamer.topologies.mixing import without
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.closing import Closing
from gossamer.transport.elastic.core import ElasticCore, Outcome
from gossamer.transport.elastic.members import (
    Members,
    MemberStatus,
    SlotEntry,
    membership_update,
    merged,
    read_membership_update,
)
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter, body_of
from tiny import limits

PARTS, SEEDS, FULL = 4, 120, 1000
BODY = torch.zeros(4, dtype=torch.uint8)
TICKET = Ticket(0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_runs_over_faulty_networks_keep_what_is_promised(part: int, request: pytest.FixtureRequest) -> None:
    """A thousand with `--full`."""
    counts = Counter[str]()
    for seed in range(part, FULL if request.config.getoption("--full") else SEEDS, PARTS):
        counts += check_faults(seed=seed).counts
    assert all(counts[kind] >= 5 for kind in FAULT_KINDS), counts


@pytest.mark.full
@pytest.mark.parametrize("part", range(2))
def test_workers_that_believe_each_other_about_themselves_alone_keep_what_is_promised(part: int) -> None:
    for seed in range(part, SEEDS // 2, 2):
        found = check_faults(seed=seed, keyed=True)
        assert found.made or found.closed


def test_a_seed_with_two_processes_of_a_slot_that_both_send_ahead_keeps_what_is_promised() -> None:
    assert check_faults(seed=1252, keyed=True).made


def test_a_seed_repeats_its_faults_and_other_seeds_have_others() -> None:
    first, again, other = (check_faults(seed=seed) for seed in (6, 6, 8))
    assert first == again and first.faults != other.faults
    assert first.made and first.faults


@pytest.mark.parametrize("seed", range(3))
def test_real_exchanges_see_the_faults_that_plain_numbers_see(seed: int) -> None:
    assert check_faults(gossip(), seed=seed) == check_faults(seed=seed)
    assert check_faults(gasloc(), seed=seed).made == check_faults(seed=seed).made


@pytest.mark.parametrize("seed", range(4))
def test_workers_of_a_mean_over_everyone_have_the_same_bits_after_each_round_that_is_closed(seed: int) -> None:
    assert check_faults(diloco(), seed=seed).closed
    assert check_faults(seed=4 * seed + 3).closed


def test_a_mean_continues_without_a_worker_whose_messages_are_not_finite_whatever_fails() -> None:
    """Where too few are left without it, those that have declined its message end, and newcomers fill their slots."""
    reports = [check_faults(diloco(), seed=seed, workers=5 + seed % 3, liars={seed % 5: 1}) for seed in range(6)]
    assert all(one.closed for one in reports)
    assert any("needs the message of worker" in fault for one in reports for fault in one.faults)


def test_a_worker_that_closes_a_round_before_all_have_its_mean_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: Closing, attempt: int, now: float) -> None:
        honest(self, attempt, now)
        self.closed = self.proposed is not None

    honest = Closing.hold
    monkeypatch.setattr(Closing, "hold", hasty)
    monkeypatch.setattr(
        Closing, "_may_let_go", lambda self, promises: True
    )  # else others keep the mean, and close it too
    with pytest.raises(
        AssertionError, match=r"with a mean that it does not have|with a second history|has ended with other parameters"
    ):
        [check_faults(seed=seed) for seed in range(3, 100, 4)]


def test_an_end_that_counts_an_exchange_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: ElasticCore, ticket: Ticket, peer: int, pact: object) -> None:
        honest(self, ticket, peer, pact)
        if pact.committed:  # type: ignore[attr-defined]
            pact.outcome = Outcome.MADE  # type: ignore[attr-defined]

    honest = ElasticCore._commit
    monkeypatch.setattr(ElasticCore, "_commit", hasty)
    with pytest.raises(AssertionError, match=r"^seed \d+, at [\d.]+ s: "):
        [check_faults(seed=seed) for seed in range(30)]


def test_a_mixing_that_forgets_the_weight_of_a_lost_peer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets = "faulty_network.gossiper.without"
    monkeypatch.setattr(forgets, lambda row, i, lost: tuple((j, w) for j, w in row if j not in lost))
    with pytest.raises(AssertionError, match="moves by other than its pulls"):
        [check_faults(seed=seed) for seed in range(10)]


# Algebra

_slots = st.integers(0, 3)
_statuses = st.sampled_from(MemberStatus)


def entries(slot: st.SearchStrategy[int] = _slots) -> st.SearchStrategy[SlotEntry]:
    """Entries; one process says one address and, within one incarnation, one first round."""

    def entry(slot: int, incarnation: int, nonce: int, status: MemberStatus, round: int, steps: int) -> SlotEntry:
        return SlotEntry(slot, incarnation, nonce, status, incarnation, f"host:{nonce + 1}", round, steps)

    few = st.integers(0, 2)
    return st.builds(entry, slot, few, few, _statuses, st.integers(0, 9), st.integers(0, 9))


@settings(deadline=None)
@given(entries(st.just(1)), entries(st.just(1)), entries(st.just(1)))
def test_merging_is_commutative_associative_and_idempotent(a: SlotEntry, b: SlotEntry, c: SlotEntry) -> None:
    assert merged(a, b) == merged(b, a)
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert merged(a, a) == a and merged(merged(a, b), b) == merged(a, b)


@settings(max_examples=100, deadline=None)
@given(st.lists(entries(), max_size=8), st.randoms(use_true_random=False))
def test_views_are_equal_whatever_the_order_of_the_news(letters_of: list[SlotEntry], random) -> None:
    me = SlotEntry(9, 0, 0, MemberStatus.ALIVE, 0)
    a, b = Members(limits(10), 9, [me]), Members(limits(10), 9, [me])
    a.merge(letters_of)
    for entry in random.sample(letters_of, len(letters_of)) + random.sample(letters_of, len(letters_of)):
        b.merge([entry])
    assert a.entries == b.entries
    in_order = tuple(a.entries[slot] for slot in sorted(a.entries))
    assert read_membership_update(membership_update(a.entries), limits(10)) == in_order


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), [(3, 3), (3, 7), (7, 3)])
def test_a_worker_that_is_suspected_answers_with_the_first_round_that_it_has_not_missed(
    mine: int, theirs: int, keyed: bool
) -> None:
    """With keys it keeps its own first round unless others are ahead, so that repeated suspicions keep it out of none."""
    both = [SlotEntry(i, 0, 5 + i, MemberStatus.ALIVE, 2, round=round) for i, round in enumerate((mine, theirs))]
    members = Members(limits(2), 0, both)
    if keyed:
        members.restrict_trust(lambda worker, slot: worker == slot)
    members.merge([both[0]._replace(status=MemberStatus.SUSPECT)], 1)
    first = 2 if keyed and mine >= theirs else max(mine, theirs) + 1
    assert members.own == both[0]._replace(incarnation=1, since=first)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["ring", "complete", "random"]),
    st.integers(2, 9),
    st.integers(0, 5),
    st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))),
)
def test_weights_without_the_exchanges_that_failed_stay_stochastic_and_symmetric(
    name: str, n: int, round: int, failed: set[tuple[int, int]]
) -> None:
    mixing = make_topology(name, n, 3).mixing(round)
    lost = [{j for a, j in failed if a == i} | {a for a, j in failed if j == i} for i in range(n)]
    rows = [dict(without(mixing.rows[i], i, lost[i] - {i})) for i in range(n)]
    for i, row in enumerate(rows):
        assert sum(row.values()) == pytest.approx(1.0) and i in row
        assert all(rows[j][i] == w for j, w in row.items())


# Two cores


def pair(**options: float) -> list[ElasticCore]:
    """Two workers in round 0, which have announced their exchange."""
    known = [SlotEntry(i, 0, 10 + i, MemberStatus.ALIVE, 0, f"host:{i + 1}") for i in range(2)]
    cores = [ElasticCore(Members(limits(2), i, known), timeout_s=8.0, **options) for i in range(2)]
    for i, core in enumerate(cores):
        core.begin_round(0, frozenset({0, 1}), [1 - i])
        core.expect(TICKET, 1 - i, BODY.numel())
    return cores


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["post 0", "post 1", "to 0", "to 1", "lose 0", "lose 1", "cut", "tick 0", "tick 1", "twice 0"]),
        max_size=30,
    )
)
def test_under_no_interleaving_does_one_end_count_what_the_other_knows_to_be_missed(acts: list[str]) -> None:
    cores, lines, now = pair(), ([], []), 0.0
    posted = [False, False]
    for act in [*acts, "post 0", "post 1", "end"]:
        now += 0.5
        what, _, which = act.partition(" ")
        i = int(which or 0)
        if what == "post" and not posted[i]:
            posted[i] = True
            cores[i].post(TICKET, 1 - i, BODY, now)
        elif what == "to" and lines[i]:
            cores[i].receive(lines[i].pop(0), now)
        elif what == "twice" and lines[i]:
            cores[i].receive(lines[i][0], now)
        elif what == "lose":
            cores[i].lost(1 - i)
        elif what == "cut":
            lines[0].clear(), lines[1].clear()
        elif what == "tick":
            cores[i].tick(now)
        elif what == "end":
            for core in cores:
                core.tick(now + 100)
        for core in cores:
            lines[1 - core.me].extend(letter for _, letter in core.outbox)
            core.outbox.clear()
    ends = {core.collect(TICKET)[1][1 - core.me] for core in cores}
    assert ends != {Outcome.MADE, Outcome.MISSED}


def test_an_exchange_that_is_under_way_keeps_the_view_of_the_round_that_it_was_planned_in() -> None:
    cores, now = pair(), 0.0
    for core in cores:
        core.steps = 4
        core.post(TICKET, 1 - core.me, BODY, now)
        core.begin_round(1, frozenset({0, 1} if core.me else {0}), [1 - core.me])
        core.steps = 9
    while letters := [(core, letter) for core in cores for _, letter in core.outbox]:
        for core in cores:
            core.outbox.clear()
        for core, letter in letters:
            cores[1 - core.me].receive(letter, now)
    for core in cores:
        assert core.collect(TICKET)[1] == {1 - core.me: Outcome.MADE}
        assert [core.members.entries[slot].steps for slot in range(2)] == [4, 4], "not those it has taken since"


# What the seeds have found


def letters_of(core: ElasticCore) -> list[tuple[int, LetterKind]]:
    return [(peer, letter.kind) for peer, letter in core.outbox]


def test_a_worker_that_knows_no_living_peer_continues_from_its_own_round() -> None:
    members = Members(
        limits(3),
        1,
        [SlotEntry(1, 1, 5, MemberStatus.JOINING, 0, round=4), SlotEntry(0, 0, 1, MemberStatus.SUSPECT, 0, round=9)],
    )
    assert members.newest_round == 4


def test_a_worker_that_has_left_is_drawn_for_the_rounds_that_it_was_in_and_for_no_later_one() -> None:
    left = SlotEntry(0, 1, 7, MemberStatus.LEFT, 2, round=5)
    members = Members(
        limits(3),
        1,
        [left, SlotEntry(1, 0, 8, MemberStatus.ALIVE, 0), SlotEntry(2, 0, 0, MemberStatus.LEFT, 0, round=9)],
    )
    assert [members.left_after(round) for round in (1, 2, 5, 6)] == [set(), {0}, {0}, set()]
    assert members.alive(5) == {1}, "nobody waits for it"


def test_a_process_that_is_suspected_while_it_joins_answers_and_is_alive_then() -> None:
    joins = SlotEntry(1, 2, 5, MemberStatus.JOINING, 0)
    members = Members(limits(2), 1, [joins, SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0)])
    members.merge([joins._replace(status=MemberStatus.SUSPECT)])
    members.declare(MemberStatus.ALIVE, 7)
    other = Members(
        limits(2), 0, [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0), joins._replace(status=MemberStatus.SUSPECT)]
    )
    other.merge([members.own])
    assert other.alive(7) == {0, 1}


def test_of_a_process_that_was_replaced_only_the_news_count() -> None:
    core, other = pair()
    other.post(TICKET, 0, BODY, 0.0)
    payload = next(letter for _, letter in other.outbox if letter.kind == LetterKind.PAYLOAD)
    core.members.merge([SlotEntry(1, 1, 77, MemberStatus.ALIVE, 0, "host:2")])
    core.post(TICKET, 1, BODY, 0.0)
    core.outbox.clear()
    assert core.receive(payload, 0.1, 11) == 11 and letters_of(core) == []
    assert core.receive(payload, 0.1, 77) == 77 and letters_of(core) == [(1, LetterKind.COMMIT)]
    greeting = Letter(
        LetterKind.MEMBERSHIP,
        1,
        body=torch.frombuffer(bytearray(membership_update(other.members.entries)), dtype=torch.uint8),
    )
    assert core.receive(greeting, 0.2, None) == 11


def test_steps_that_another_worker_has_counted_are_known_before_its_round_ends() -> None:
    core, other = pair()
    other.steps = 15
    core.post(TICKET, 1, BODY, 0.0)
    other.post(TICKET, 0, BODY, 0.0)
    for _, letter in [*other.outbox]:
        core.receive(letter, 0.1)
    assert core.members.entries[1].steps == 0
    core.receive(Letter(LetterKind.COMMIT, 1, TICKET), 0.2)
    assert core.members.entries[1].steps == 15


def test_news_that_may_have_been_lost_with_one_of_two_connections_are_sent_again() -> None:
    core, _ = pair()
    core.tell(1)
    core.outbox.clear()
    core.tell(1)
    assert letters_of(core) == []
    core.resend_view(1)
    assert letters_of(core) == [(1, LetterKind.MEMBERSHIP)]


def test_a_worker_that_receives_older_news_than_its_own_sends_its_own() -> None:
    core, other = pair()
    stale = body_of(membership_update(other.members.entries))
    core.members.merge([SlotEntry(1, 2, 11, MemberStatus.ALIVE, 5, "host:1")])
    core.receive(Letter(LetterKind.MEMBERSHIP, 1, body=stale), 0.1, 11)
    assert letters_of(core) == [(1, LetterKind.MEMBERSHIP)]


def test_a_worker_that_sees_no_majority_gives_no_slot_away_whose_worker_may_live_elsewhere() -> None:
    known = [SlotEntry(slot, 0, slot, MemberStatus.ALIVE if slot < 2 else MemberStatus.SUSPECT, 0) for slot in range(5)]
    core = ElasticCore(Members(limits(5), 0, known), timeout_s=8.0)
    core.limit_bytes = 100
    assert core.give_slot(9, "host:9") is None
    entry = core.give_slot(9, "host:9", ended={4})
    assert entry is not None and entry.slot == 4, "its machine says that it runs no more"
    core.members.merge([known[3]._replace(status=MemberStatus.LEFT)])
    entry = core.give_slot(9, "host:9")
    assert entry is not None and entry.slot == 3
    core.limit_bytes = None  # gossip continues in both halves
    entry = core.give_slot(8, "host:8")
    assert entry is not None and entry.slot == 2


@pytest.mark.parametrize("how", ["news", "gift"])
def test_an_early_payload_of_the_former_process_of_a_slot_is_not_counted_with_the_commit_of_the_next_one(
    how: str,
) -> None:
    core, _ = pair()
    ahead = Ticket(1)
    view = key(0, "view", 0, 1)
    core.receive(Letter(LetterKind.PAYLOAD, 1, ahead, view, 1, 4, BODY), 0.1, 11)
    assert core.kept == 1
    if how == "news":
        news = SlotEntry(1, 1, 99, MemberStatus.ALIVE, 0, "host:9")
        core.receive(Letter(LetterKind.MEMBERSHIP, 1, body=body_of(membership_update({1: news}))), 0.2, 99)
    else:
        core.members.suspect(1)
        entry = core.give_slot(99, "host:9")
        assert entry is not None and entry.slot == 1
        core.members.merge([entry._replace(status=MemberStatus.ALIVE)])
    core.begin_round(1, frozenset({0, 1}), [1])
    core.expect(ahead, 1, BODY.numel())
    core.post(ahead, 1, BODY, 0.3)
    core.receive(Letter(LetterKind.COMMIT, 1, ahead, view, 1), 0.4, 99)
    assert core.kept == 0 and not core.settled(ahead), "the payload of the next process is still to come"


def test_a_worker_that_has_taken_the_state_of_another_may_begin_its_round_once_more() -> None:
    known = [SlotEntry(i, 0, 10 + i, MemberStatus.ALIVE, 0, f"host:{i + 1}") for i in range(2)]
    core = ElasticCore(Members(limits(2), 0, known), timeout_s=8.0)
    core.limit_bytes = 100
    core.begin_round(3, frozenset({0, 1}), [1])
    views = set[int]()
    for line in (0, 7):
        core.begin_round(3, frozenset({0, 1}), [1])
        core.plan(frozenset({0, 1}), line)
        core.expect(TICKET, 1, 4)
        core.post(TICKET, 1, BODY, 0.0)
        views.add(core.outbox[-1].letter.view)
    assert len(views) == 2, "a payload that follows other rounds is none of this one"


@pytest.mark.parametrize("due_s", [0.0, 3.0, 7.0])
def test_a_peer_that_falls_silent_delays_no_worker_for_longer_than_the_timeout_whenever_its_payload_is_due(
    due_s: float,
) -> None:
    core, _ = pair()
    core.receive(Letter(LetterKind.PONG, 1), 0.0)
    for step in range(80):
        if step == round(10 * due_s):
            core.post(TICKET, 1, BODY, due_s)
        core.tick(0.1 * step)
        assert core.settled(TICKET) or core.deadline() < 8.0
    assert core.collect(TICKET)[1] == {1: Outcome.MISSED}
    assert core.members.entries[1].status is MemberStatus.SUSPECT


def test_a_worker_that_was_itself_stopped_does_not_suspect_those_whom_it_has_not_listened_to() -> None:
    core, _ = pair()
    core.tick(0.0)
    core.outbox.clear()
    core.tick(20.0)
    assert core.members.entries[1].status is MemberStatus.ALIVE and letters_of(core) == [(1, LetterKind.PING)]
    for step in range(16):
        core.tick(20.0 + 0.5 * step)
    assert core.members.entries[1].status is MemberStatus.SUSPECT


@pytest.mark.parametrize(("nonce_a", "nonce_b"), [(50, 60), (60, 50)])
def test_of_two_newcomers_that_two_donors_gave_one_slot_one_fills_it_and_the_other_learns_so(
    nonce_a: int, nonce_b: int
) -> None:
    known = [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0, "host:9"), SlotEntry(1, 0, 2, MemberStatus.ALIVE, 0, "host:1")]
    donors = [Members(limits(3), me, [*known, SlotEntry(2, 0, 3, MemberStatus.SUSPECT, 0, "host:2")]) for me in (0, 1)]
    given_ones = [donor.give_slot(n, f"host:{n}") for donor, n in zip(donors, (nonce_a, nonce_b), strict=True)]
    newcomers = [Members(limits(3), 2, donor.entries.values()) for donor in donors]
    assert [entry.slot for entry in given_ones if entry] == [2, 2]
    for newcomer in newcomers:
        newcomer.declare(MemberStatus.ALIVE, 4)
    views = [*donors, *newcomers]
    for _ in range(2):
        for view in views:
            for other in views:
                view.merge(list(other.entries.values()))
    assert {view.entries[2].nonce for view in donors} == {60}
    assert [view.replaced for view in newcomers] == [nonce_a == 50, nonce_b == 50]


def test_a_slot_that_somebody_was_given_is_given_again_last() -> None:
    members = Members(limits(4), 0, [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0)])
    given_ones = [members.give_slot(nonce, f"host:{nonce}") for nonce in range(5, 9)]
    assert [entry.slot for entry in given_ones if entry] == [1, 2, 3, 1]
