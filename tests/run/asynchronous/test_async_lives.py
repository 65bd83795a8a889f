"""Workers that wait for nobody and come back, join and resume: threads of this process over real sockets, and their replays."""

import contextlib
import json
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from commands import run
from gossamer.errors import DataError
from gossamer.record import checkpoint
from gossamer.record.addresses import Address, write_address
from gossamer.record.checkpoint import Lineage
from gossamer.record.folder import read_metrics
from gossamer.record.logs.order import Entered, Met, Mixed, OrderWriter, Published, read_order
from gossamer.report.reading.status import run_status
from gossamer.run.asynchronous.async_state import newest_state
from gossamer.run.asynchronous.gossip_process import GossipParticipant
from gossamer.run.asynchronous.pair_process import PairParticipant
from gossamer.run.config.resolve import InPairs, resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.config.user_parts import own_parts
from gossamer.run.participant.rendezvous import RendezvousResult, join_run
from gossamer.run.replay.asynchronous import replay_asynchronous
from gossamer.run.worker.task import task_of
from gossamer.stop_signals import Asked
from gossamer.transport.elastic.calls import Calls
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.sockets.connection import Endpoint
from tiny import limits
from tiny import single as tiny

RUN, SECRET = 77, "0123456789abcdef0123456789abcdef"
LIMIT_S = 60.0
KINDS = {
    "gossip": {"run__wait": False, "rule__name": "gasloc", "codec__name": "int8"},
    "pairs": {"pair__name": "a2cid2", "topology__name": "complete", "events__meetings": 8.0},
}


class Died(Exception):
    """What ends a worker here in the place of a kill."""


class Fleet:
    """Workers of one run, each in a thread."""

    def __init__(self, config, folder):
        self.config, self.folder = config, folder
        self.run = resolve(config, own_parts(config), real=True)
        self.pool, self.running, self.asked = ThreadPoolExecutor(8), {}, {}

    def start(self, before_phase):
        """All workers; `before_phase(slot, number)` is called before each local phase."""
        n = self.config.workers
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
        where = [f"127.0.0.1:{one.getsockname()[1]}" for one in listeners]
        entries = [SlotEntry(i, 0, secrets.randbits(61), MemberStatus.ALIVE, 0, where[i]) for i in range(n)]
        for i in range(n):
            write_address(self.folder, Address(i, where[i], RUN))
            endpoint = Endpoint(listeners[i], RUN, SECRET.encode(), LIMIT_S)
            rendezvous = RendezvousResult(
                Members(limits(n), i, entries), endpoint, Lineage(digest(self.config)), 0, i, False
            )
            self._train(rendezvous, before_phase)

    def join(self, before_phase):
        """One more, which gets a free slot."""
        rendezvous = join_run(self.run, self.folder, RUN, "auto")
        return self._train(rendezvous, before_phase)

    def _train(self, rendezvous, before_phase):
        make = PairParticipant if isinstance(self.run.method, InPairs) else GossipParticipant
        task, slot = task_of(self.run), rendezvous.members.me
        self.asked[slot] = Asked()
        worker = make(self.run, self.folder, task, rendezvous, self.asked[slot])
        train = worker.train

        def watched(number, round, alive):
            before_phase(slot, number)
            return train(number, round, alive)

        worker.train = watched
        self.running[slot] = self.pool.submit(worker.live)
        return worker

    def finish(self):
        """Waits for all that run; raises what they have raised."""
        for one in self.running.values():
            one.result(2 * LIMIT_S)
        self.pool.shutdown()


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("GOSSAMER_SECRET", SECRET)
    monkeypatch.setattr("gossamer.report.reading.status.PATIENCE_S", LIMIT_S)  # all answer, on a busy machine late


def last_states(folder, config):
    """The newest state of each worker."""
    store = folder / "checkpoints"
    newest = {i: checkpoint.rounds(store, i, digest(config))[-1] for i in range(config.workers)}
    return {i: (round, checkpoint.load(store, round, i, digest(config))) for i, round in newest.items()}


def must_replay(folder, again, config):
    """The record of a run gives the same bits in another folder."""
    replay_asynchronous(resolve(config, real=True), again, folder)
    orders = [{path.name: path.read_bytes() for path in one.glob("order-*.jsonl")} for one in (folder, again)]
    assert orders[0] == orders[1]
    ours, theirs = last_states(folder, config), last_states(again, config)
    for i, (round, state) in ours.items():
        assert theirs[i][0] == round
        assert torch.equal(state["x"], theirs[i][1]["x"]), i
        assert all(map(torch.equal, state["outer"], theirs[i][1]["outer"])), i
        moments = [[one["exp_avg"] for one in two["inner"]["state"].values()] for two in (state, theirs[i][1])]
        assert all(map(torch.equal, *moments)), i
    assert read_order(again) == read_order(folder)


def test_no_phase_is_lost_while_news_of_the_last_ones_is_on_its_way(tmp_path, monkeypatch):
    """The moments in which others know of a phase, but not all of it, are stretched."""
    config = tiny(
        workers=2,
        topology__name="complete",
        run__steps=12,
        run__timeout_s=LIMIT_S,
        run__eval_every=0,
        run__checkpoint_every=0,
        **KINDS["gossip"],
    )
    write, finish = OrderWriter.write, Calls.finish

    def write_late(self, event):
        if isinstance(event, Mixed) and self.path.name == "order-001.jsonl":
            time.sleep(0.3)  # its message is out, and not yet the word that its phase has ended
        write(self, event)

    def finish_late(self):  # its last phase has ended, and not yet the word that it begins no other
        time.sleep(1.0)
        finish(self)

    monkeypatch.setattr(OrderWriter, "write", write_late)
    monkeypatch.setattr(Calls, "finish", finish_late)
    fleet = Fleet(config, tmp_path / "run")
    fleet.start(lambda slot, number: None if slot else time.sleep(0.2))
    fleet.finish()
    phases = [one[-1].phases for one in read_order(tmp_path / "run").values()]
    assert 2 * 6 <= sum(phases) < 2 * 6 + 2, phases


def test_an_order_of_events_that_was_cut_at_its_end_is_not_taken_for_a_whole_one(tmp_path):
    config = tiny(
        workers=2, topology__name="complete", run__steps=6, run__timeout_s=LIMIT_S, run__eval_every=0, **KINDS["gossip"]
    )
    folder = tmp_path / "run"
    fleet = Fleet(config, folder)
    fleet.start(lambda slot, number: None)
    fleet.finish()
    must_replay(folder, tmp_path / "again", config)
    order = folder / "order-000.jsonl"
    lines = order.read_text().splitlines(keepends=True)
    assert '"mix"' in lines[-2] and '"end"' in lines[-1]
    for kept, sentence in (
        (lines[:-1], "order-000.jsonl' ends before round 3, of which the folder has a checkpoint of worker 0"),
        (lines[:-2], "order-000.jsonl' ends before round 3, of which the folder has a checkpoint of worker 0"),
        ([*lines[:-2], lines[-1]], "the update after the last phase is missing"),
    ):
        order.write_text("".join(kept))
        with pytest.raises(DataError, match=sentence):
            replay_asynchronous(resolve(config, real=True), tmp_path / "refused", folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "own", "leaves"),
    [("gossip", True, False), ("pairs", False, False), ("pairs", True, True)],
    ids=["it died", "it died and takes another's state", "it left"],
)
def test_a_worker_comes_back_into_its_slot_and_the_record_gives_the_bits_of_both_lives(kind, own, leaves, tmp_path):
    config = tiny(
        run__steps=24,
        run__checkpoint_every=6,
        run__rejoin_rounds=20 if own else 0,
        run__timeout_s=LIMIT_S,
        run__pace_s=0.01,
        run__eval_every=0,
        **KINDS[kind],
    )
    folder, back, standings = tmp_path / "run", threading.Event(), []
    fleet = Fleet(config, folder)

    def die(slot, number):
        if leaves and slot == 2 and number == 4:
            fleet.asked[2].set()
        elif slot == 2 and number == 5:
            raise Died
        # Its last checkpoint is of round 6 at most: after 10 phases of the others it lags behind, however fast each is.
        if number >= (5 if slot == 2 else 8 if own else 10):
            assert back.wait(LIMIT_S)

    def come_back(slot, number):
        if not back.is_set():
            standings.append([one.standing for one in run_status(folder).workers])
            back.set()

    fleet.start(die)
    with contextlib.nullcontext() if leaves else pytest.raises(Died):
        fleet.running[2].result(LIMIT_S)
    standings.append([one.standing for one in run_status(folder).workers])
    saved, _ = newest_state(fleet.run, folder, 2, Lineage(digest(config)))
    newcomer = fleet.join(come_back)
    assert newcomer.slot == 2
    fleet.finish()
    assert standings == [["alive", "alive", "left" if leaves else "gone"], ["alive"] * 3]
    order = read_order(folder)
    first, second = order[2]
    assert (second.ended.why, second.life) == ("finished", newcomer.life) and second.life != first.life
    assert first.ended is None if not leaves else first.ended.why == "left"
    if leaves:
        assert second.begun[:3] == (5, saved.after, (2, first.life, len(first.events))), (
            "it continues where it has left"
        )
    assert (second.begun.source[:2] == (2, first.life)) == own == (second.begun.source[0] == 2)
    theirs = [event for i in (0, 1) for one in order[i] for event in one.events]
    if kind == "gossip":
        received = [one for event in theirs if isinstance(event, Mixed) for one in event.heard if one[0] == 2]
        counted = [version for _, version, life in received if life == first.life]
        assert second.begun.number == max([saved.phases, *counted]), (
            "nobody counts a local phase twice, and none is lost"
        )
        assert second.life in [life for _, _, life in received]
    else:
        met = [event for event in second.events if isinstance(event, Met)]
        assert met and {event[1:4] for event in met} <= {event[1:4] for event in theirs if isinstance(event, Met)}
    assert second.begun.number <= 5 < second.phases
    assert 36 <= sum(one[-1].phases for one in order.values()) < 36 + 3, (
        "the budget of all, and at most a phase of each"
    )
    lines = map(json.loads, (folder / "events-002.jsonl").read_text().splitlines())
    numbers = [line["number"] for line in lines if line["event"] == "phase"]
    assert numbers == sorted({*numbers}), "the record has each phase once"
    must_replay(folder, tmp_path / "again", config)
    if not own:
        (folder / f"order-00{second.begun.source[0]}.jsonl").unlink()
        with pytest.raises(DataError, match=r"began with the state of worker|heard a message of worker"):
            replay_asynchronous(resolve(config, real=True), tmp_path / "nothing", folder)


def test_a_worker_that_has_left_in_the_first_round_resumes_from_there_with_the_run(tmp_path):
    config = tiny(
        run__checkpoint_every=3, run__rejoin_rounds=20, run__timeout_s=LIMIT_S, run__eval_every=0, **KINDS["gossip"]
    )
    folder, left = tmp_path / "run", threading.Event()
    fleet = Fleet(config, folder)

    def leave(slot, number):
        if slot == 1 and number == 1:
            fleet.asked[1].set()
        if slot != 1:
            assert left.wait(LIMIT_S)

    fleet.start(leave)
    fleet.running[1].result(LIMIT_S)
    left.set()
    fleet.finish()
    assert checkpoint.rounds(folder / "checkpoints", 1) == [0]
    code, output = run("train", "--resume", folder, "--local", 3)
    assert code == 0, output
    first, second = read_order(folder)[1]
    assert second.begun[:3] == (2, 0, (1, first.life, len(first.events)))
    must_replay(folder, tmp_path / "again", config)


def test_a_replay_counts_a_phase_once_where_the_slot_has_gone_back_behind_it_twice(tmp_path):
    config, folder = tiny(workers=2, **KINDS["gossip"]), tmp_path / "run"
    alone = frozenset({0})
    lives = [(1, Entered(0, 0, None, 0.0), range(4)), (2, Entered(3, 2, (0, 1, 6), 4.0), range(3, 5))]
    lives += [(3, Entered(2, 1, (0, 1, 4), 6.0), range(2, 5))]
    for life, begun, numbers in lives:
        with OrderWriter(folder, 0, life=life, goes_on=life > 1) as log:
            log.write(begun)
            for k in numbers:
                log.write(Published(k, k // 2, 4.0 + k, 5.0 + k))
                log.write(Mixed(k, alone, (), 5.0 + k))
    (folder / "run.toml").write_text(dump(config))
    result = replay_asynchronous(resolve(config, real=True), tmp_path / "again", folder)
    lines = read_metrics(tmp_path / "again")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 4, 6, 8, 10]
    assert result.tokens == 10 * config.length.step_tokens
    scored = [(line["round"], line["step"]) for line in lines if line["kind"] == "eval"]
    assert scored == [(-1, 0), (1, 4)], "as far as its events go, and not to the end of the run"
