"""What workers that wait for nobody ask of each other, without processes: any order of letters, lost links, and the log of it."""

import contextlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.asynchronous import a2cid2, ad_psgd
from gossamer.clock.gossip_worker import GossipWorker
from gossamer.clock.pair_worker import PairWorker
from gossamer.errors import DataError
from gossamer.finite import all_finite
from gossamer.layout import Layout
from gossamer.record.logs.order import (
    Entered,
    Finished,
    Learned,
    MeetingSent,
    Met,
    Mixed,
    OrderLife,
    OrderWriter,
    Published,
    phases_in,
    read_order,
)
from gossamer.rules import gasloc
from gossamer.topologies import random
from gossamer.transport.elastic.fetches import Fetches
from gossamer.transport.elastic.meetings import Meetings
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter
from tiny import limits

N, SIZE = 3, 4


class Still:
    """A learner whose local phase is a given drift."""

    local_steps = 1
    layout = Layout((), SIZE)

    def __init__(self, x):
        self.x = x


def members(me):
    return Members(limits(N), me, [SlotEntry(i, 0, i, MemberStatus.ALIVE, 0, "127.0.0.1:4000") for i in range(N)])


class Mail:
    """Letters between cores: in order on each link, and otherwise in any."""

    def __init__(self, cores):
        self.cores, self.queues, self.time_s = cores, {}, 0.0

    def collect(self):
        for i, core in enumerate(self.cores):
            for peer, letter in core.outbox:
                self.queues.setdefault((i, peer), []).append(letter)
            core.outbox.clear()

    def deliver(self, choice):
        """The next letter of one of the links that have any; returns whether there was one."""
        self.collect()
        links = sorted(link for link, letters in self.queues.items() if letters)
        if links:
            source, target = links[choice % len(links)]
            self.time_s += 0.01
            self.cores[target].receive(self.queues[source, target].pop(0), self.time_s)
        self.collect()
        return bool(links)

    def cut(self, i, j):
        """The connection of two workers is lost, with what is on it."""
        self.collect()
        self.queues[i, j], self.queues[j, i] = [], []
        self.cores[i].lost(j)
        self.cores[j].lost(i)

    def deliver_all(self):
        while self.deliver(0):
            pass


class Fleet:
    """Workers that meet, each with a log of the meetings that counted at its end."""

    def __init__(self, rule, xs, sound=lambda payload, peer: True, **options):
        self.workers = [PairWorker(rule, Still(x)) for x in xs]
        self.met = [[] for _ in xs]
        self.told = [None] * len(xs)
        self.cores = [
            Meetings(
                members(i),
                4 * SIZE,
                limit_s=1.0,
                tell=lambda one, i=i: self._tell(i),
                meet=lambda one, payload, i=i: self._meet(i, one, payload),
                sound=sound,
                **options,
            )
            for i in range(len(xs))
        ]
        self.mail = Mail(self.cores)
        for core in self.cores:
            core.closed = False

    def _tell(self, i):
        self.told[i] = self.workers[i].tell()
        return self.told[i].clone().view(torch.uint8)

    def _meet(self, i, one, payload):
        self.met[i].append((one.starter, one.number, one.peer))
        self.workers[i].meet(self.told[i], payload.view(torch.float32))

    @property
    def mean(self):
        return torch.stack([worker.x for worker in self.workers]).double().mean(0)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("invite"), st.integers(0, N - 1), st.integers(1, N - 1)),
        st.tuples(st.just("deliver"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("learn"), st.integers(0, N - 1), st.just(0)),
        st.tuples(st.just("cut"), st.integers(0, N - 1), st.integers(1, N - 1)),
        st.tuples(st.just("late"), st.integers(0, N - 1), st.just(0)),
    ),
    max_size=60,
)


@given(actions, st.booleans())
@settings(max_examples=150, deadline=None)
def test_in_any_order_of_events_a_meeting_counts_at_both_ends_or_one_end_says_that_it_is_unsure(events, faulty):
    fleet = Fleet(ad_psgd(), [torch.full((SIZE,), float(2**i)) for i in range(N)])
    drift, mean = torch.zeros(SIZE, dtype=torch.float64), fleet.mean
    for what, i, k in events:
        if what == "invite":
            fleet.cores[i].invite((i + k) % N, fleet.mail.time_s)
        elif what == "deliver":
            fleet.mail.deliver(i)
        elif what == "learn":
            worker = fleet.workers[i]
            worker.begin()
            worker.learner.x += 0.5
            worker.learn()
            drift += 0.5 / N
        elif what == "cut" and faulty:
            fleet.mail.cut(i, (i + k) % N)
        elif what == "late" and faulty:
            fleet.mail.time_s += 2.0
            fleet.cores[i].tick(fleet.mail.time_s)
    fleet.mail.deliver_all()
    ends = [(starter, number, *sorted((i, peer))) for i, met in enumerate(fleet.met) for starter, number, peer in met]
    alone = [one for one in set(ends) if ends.count(one) == 1]
    assert max([ends.count(one) for one in ends], default=0) <= 2
    assert len(alone) <= sum(core.unsure for core in fleet.cores)
    assert all(core.busy is False for core in fleet.cores) or faulty
    if not alone:
        torch.testing.assert_close(fleet.mean, mean + drift)
    if not faulty:
        assert not alone and sum(core.missed + core.unsure for core in fleet.cores) == 0


def test_two_workers_that_invite_each_other_at_once_meet_once():
    fleet = Fleet(ad_psgd(), [torch.full((SIZE,), float(i)) for i in range(N)])
    fleet.cores[0].invite(1, 0.0)
    fleet.cores[1].invite(0, 0.0)
    fleet.mail.deliver_all()
    assert fleet.met == [[(0, 0, 1)], [(0, 0, 0)], []]
    assert fleet.workers[0].x.tolist() == fleet.workers[1].x.tolist() == [0.5] * SIZE


@pytest.mark.parametrize("starter", [0, 1])
def test_a_meeting_with_a_message_that_is_not_sound_is_missed_at_both_ends(starter):
    numbers = [0.0, torch.nan, 2.0]
    fleet = Fleet(
        ad_psgd(),
        [torch.full((SIZE,), one) for one in numbers],
        lambda payload, peer: all_finite(payload.view(torch.float32)),
    )
    fleet.cores[starter].invite(1 - starter, 0.0)
    fleet.mail.deliver_all()
    assert fleet.met == [[], [], []] and not any(core.busy for core in fleet.cores)
    assert fleet.cores[0].missed == 1 and fleet.cores[0].unsure == 0 and fleet.workers[0].x.tolist() == [0.0] * SIZE
    fleet.cores[0].invite(2, 0.0)  # and both are free for others
    fleet.mail.deliver_all()
    assert fleet.met == [[(0, starter == 0, 2)], [], [(0, starter == 0, 0)]]


def test_a_peer_is_met_a_bounded_number_of_times_in_a_local_phase():
    fleet = Fleet(ad_psgd(), [torch.zeros(SIZE)] * N, most_invited=3)

    def invite(times):
        for _ in range(times):
            fleet.cores[0].invite(1, 0.0)
            fleet.mail.deliver_all()
        return len(fleet.met[1])

    assert invite(5) == 3 and not any(core.busy for core in fleet.cores)
    fleet.cores[1].begin_phase()
    assert invite(5) == 6
    fleet.cores[1].finish()
    assert invite(5) == 11, "who trains on may meet it as before"


def test_a_worker_in_a_meeting_or_about_to_end_refuses_another():
    fleet = Fleet(ad_psgd(), [torch.zeros(SIZE)] * N)
    fleet.cores[0].invite(1, 0.0)
    fleet.cores[2].invite(0, 0.0)
    fleet.cores[1].closed = True
    fleet.mail.deliver(1)  # the second invitation comes first
    fleet.mail.deliver_all()
    assert fleet.met == [[]] * N and not any(core.busy for core in fleet.cores)


@given(st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1), st.floats(0, 3)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_workers_that_agree_and_do_not_learn_stay_where_they_are_to_the_last_bit(events):
    x = torch.tensor([0.1, -2.7, 3e-5, 1e4])
    pairs = [PairWorker(a2cid2(0.3, 0.7), Still(x.clone())) for _ in range(N)]
    topology = random(N, seed=1)
    gossips = [GossipWorker(i, gasloc(), Still(x.clone()), topology.mixing(0)) for i in range(N)]
    published, phases = [{} for _ in range(N)], [0] * N
    for i, j, dt in events:
        if i != j:
            for k in (i, j):
                pairs[k].advance(dt)
            sent = pairs[i].tell(), pairs[j].tell()
            pairs[i].meet(sent[0], sent[1])
            pairs[j].meet(sent[1], sent[0])
        number, mixing = phases[i], topology.mixing(phases[i])
        phases[i] += 1
        own = published[i][phases[i]] = gossips[i].message(number, mixing)
        chosen = {p: published[p][1 + int(dt) % len(published[p])] for p in mixing.receives_from(i) if published[p]}
        gossips[i].mix(number, own, chosen, mixing)
    assert all(torch.equal(worker.x, x) for worker in pairs)
    assert all(torch.equal(worker.learner.x, x) for worker in gossips)


def test_a_peer_answers_with_its_newest_message_or_that_it_has_none_and_what_is_lost_or_late_is_not_waited_for():
    cores = [Fetches(members(i), 2, limit_s=1.0) for i in range(N)]
    mail = Mail(cores)
    cores[0].ask([1, 2], 0.0)
    mail.deliver_all()
    assert not cores[0].pending and cores[0].take() == {}
    for number in (1, 2):
        cores[1].publish(number, torch.full((2,), number, dtype=torch.uint8))
    cores[0].ask([1, 2], 5.0)
    assert cores[0].pending and cores[0].awaited == {1, 2}
    mail.collect()
    mail.cut(0, 2)
    mail.deliver_all()
    came = {peer: (one.version, one.life, one.payload.tolist()) for peer, one in cores[0].take().items()}
    assert came == {1: (2, 1, [2, 2])} and not cores[0].pending
    cores[0].ask([1], 7.0)
    cores[0].tick(8.5)
    assert not cores[0].pending, "the answer takes too long"
    mail.deliver_all()
    assert cores[0].take() == {}, "and does not count when it comes"
    assert not cores[0].accepts(Letter(LetterKind.MESSAGE, 1), 3)


def test_a_worker_that_has_taken_its_last_step_waits_until_all_living_workers_have():
    cores = [Fetches(members(i), 2, limit_s=1.0) for i in range(N)]
    mail = Mail(cores)
    cores[0].finish()
    mail.deliver_all()
    assert not cores[0].alone and cores[0].awaited == {1, 2} and cores[1].done == {0}
    cores[1].finish()
    mail.deliver_all()
    assert not cores[0].alone
    cores[0].members.suspect(2)
    assert cores[0].alone


def newcomer(cores, slot, nonce):
    """Another process fills a slot, in everybody's view."""
    for core in cores:
        before = core.members.entries[slot]
        core.members.merge([before._replace(incarnation=before.incarnation + 1, nonce=nonce)])


def test_a_newcomer_in_the_slot_of_a_finished_worker_is_waited_for():
    cores = [Fetches(members(i), 2, limit_s=1.0) for i in range(N)]
    mail = Mail(cores)
    for core in cores[:2]:
        core.finish()
    mail.deliver_all()
    cores[0].members.suspect(2)
    assert cores[0].alone
    newcomer(cores[:1], 1, nonce=99)
    assert not cores[0].alone and cores[0].awaited == {1}


@pytest.mark.parametrize("letters", range(1, 6))
def test_a_process_that_comes_back_is_in_none_of_its_old_meetings(letters):
    fleet = Fleet(ad_psgd(), [torch.full((SIZE,), float(i)) for i in range(N)])
    fleet.cores[0].invite(1, 0.0)
    for _ in range(letters):
        fleet.mail.deliver(0)
    again = Fleet(ad_psgd(), [torch.full((SIZE,), 5.0)] * N)
    again.cores[0].members = Members(limits(N), 0, [*fleet.cores[1].members.entries.values()])
    newcomer([fleet.cores[1], again.cores[0]], 0, nonce=99)
    fleet.cores[0] = again.cores[0]  # the letters that are under way reach the new process, and its own number is 99
    again.cores[0].members.entries[0] = again.cores[0].members.entries[0]._replace(nonce=99)
    fleet.mail.deliver_all()
    assert again.met[0] == [] and not again.cores[0].busy, "it has met nobody"
    counted = len(fleet.met[1])
    assert counted <= 1 and not fleet.cores[1].busy, "the old one may have agreed before it died"
    again.cores[0].invite(1, 1.0)
    fleet.mail.deliver_all()
    assert again.met[0] == [(0, 0, 1)] and fleet.met[1][counted:] == [(0, 0, 0)], "it meets anew"


BEGUN = Entered(0, 0, None, 0.0)
GOSSIP = [Published(0, 0, 0.0, 1.0), Mixed(0, frozenset({0, 2}), ((2, 1, 9),), 1.1), Finished("left", 7, 0.0, 2.0)]
PAIRS = [
    Learned(0, 0, 1 / 3, 0.0, 1.0),
    MeetingSent(1, 1, 9, 0, 1e-17, 1.2),
    Learned(1, 1, 0.1, 1.0, 2.0),
    Met(1, 1, 9, 0, 0.7, 2.1),
]


def written(folder, worker, events, *, life=5, begun=BEGUN, goes_on=False):
    with OrderWriter(folder, worker, life=life, goes_on=goes_on) as log:
        log.write(begun)
        for event in events:
            log.write(event)
    assert log.place == len(events)


@pytest.mark.parametrize("events", [GOSSIP, PAIRS, []])
def test_the_order_of_events_is_read_as_it_was_written_to_the_last_bit(events, tmp_path):
    written(tmp_path, 2, events)
    assert read_order(tmp_path) == {2: [OrderLife(5, BEGUN, tuple(events))]}


def test_the_lives_of_a_slot_follow_each_other_and_a_process_that_was_taken_for_dead_may_write_between(tmp_path):
    written(tmp_path, 2, GOSSIP[:1])
    path, later = tmp_path / "order-002.jsonl", Entered(7, 3, (1, 9, 4), 8.0)
    first = path.read_text()
    path.write_text(first + '{"life":5,"event":"mi')
    written(tmp_path, 2, [Published(7, 3, 8.0, 9.0)], life=6, begun=later, goes_on=True)
    written(tmp_path / "late", 2, GOSSIP)
    path.write_text(
        path.read_text() + "".join((tmp_path / "late" / path.name).read_text().splitlines(keepends=True)[2:])
    )
    lives = read_order(tmp_path)[2]
    assert lives == [OrderLife(5, BEGUN, tuple(GOSSIP)), OrderLife(6, later, (Published(7, 3, 8.0, 9.0),))]
    assert (lives[1].phases, phases_in(lives), lives[0].ended, lives[1].ended) == (8, 8, GOSSIP[2], None)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([GOSSIP[1]], "does not follow"),
        ([GOSSIP[0], GOSSIP[0]], "phase 0 ends after 1"),
        ([GOSSIP[0], Published(1, 0, 1.0, 2.0)], "the update after the last phase is missing"),
        ([GOSSIP[0], GOSSIP[1]._replace(heard=((2, 1, 9), (2, 0, 9)))], "does not follow"),
        ([GOSSIP[2], GOSSIP[0]], "follows the end"),
        ([PAIRS[0], PAIRS[3]], "sent never"),
        ([PAIRS[1], PAIRS[1]], "sent twice"),
        ([*PAIRS, PAIRS[3]], "sent never"),
        ([PAIRS[0], Published(1, 0, 1.0, 2.0)], "do not go together"),
    ],
)
def test_events_that_cannot_follow_each_other_are_refused(events, why, tmp_path):
    written(tmp_path, 0, events)
    with pytest.raises(DataError, match=why):
        read_order(tmp_path)


def test_a_life_that_begins_twice_or_not_at_all_is_refused(tmp_path):
    written(tmp_path, 0, [])
    written(tmp_path, 0, [], goes_on=True)
    with pytest.raises(DataError, match="begins twice"):
        read_order(tmp_path)
    path = tmp_path / "order-000.jsonl"
    path.write_text('{"life":4,"event":"end","why":"left","round":0,"dt":0,"time_s":1}\n')
    with pytest.raises(DataError, match="has not begun"):
        read_order(tmp_path)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), st.lists, max_leaves=4)
)
@settings(max_examples=60, deadline=None)
def test_a_spoilt_line_is_refused_in_a_sentence(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("order")
    begin = {"life": 1, "event": "begin", "number": 0, "round": 0, "source": None, "time_s": 0}
    publish = {"life": 1, "event": "publish", "number": 0, "round": 0, "start_s": 0, "time_s": 1}
    mix = {"life": 1, "event": "mix", "number": 0, "alive": None, "heard": [], "time_s": 0.0}
    for field in ("number", "heard", "alive", "event", "life"):
        line, start = {**mix, field: value}, f"{json.dumps(begin)}\n{json.dumps(publish)}\n"
        (folder / "order-000.jsonl").write_text(start + json.dumps(line) + "\n")
        refusals = []
        try:
            read_order(folder)
        except DataError as error:
            refusals.append(str(error))
        assert all("order-000.jsonl:3" in refusal for refusal in refusals)
        (folder / "order-000.jsonl").write_text(json.dumps({**begin, "source": [0, value, 1]}) + "\n")
        with contextlib.suppress(DataError):
            (life,) = read_order(folder)[0]
            assert life.begun.source is not None and type(life.begun.source[1]) is int
