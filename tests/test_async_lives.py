"""Workers that wait for nobody and come back, join and resume: threads of this process over real sockets, and their replays."""

import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gossamer.record import checkpoint
from gossamer.record.addresses import Address, write_address
from gossamer.record.checkpoint import Lineage
from gossamer.record.order import Met, Mixed, read_order
from gossamer.run.async_gossip import GossipParticipant
from gossamer.run.async_pairs import PairParticipant
from gossamer.run.async_replay import replay_asynchronous
from gossamer.run.async_seat import AsyncSeat, async_seat
from gossamer.run.config import digest
from gossamer.run.parts import own_parts
from gossamer.run.settle import InPairs, settle
from gossamer.run.task import task_of
from gossamer.transport.link import Station
from gossamer.transport.members import Members, SlotEntry, Standing
from tiny import tiny

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
        self.settled = settle(config, own_parts(config), real=True)
        self.pool, self.running = ThreadPoolExecutor(8), {}

    def start(self, before_phase):
        """All workers; `before_phase(slot, number)` is called before each local phase."""
        n = self.config.workers
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
        where = [f"127.0.0.1:{one.getsockname()[1]}" for one in listeners]
        entries = [SlotEntry(i, 0, secrets.randbits(61), Standing.ALIVE, 0, where[i]) for i in range(n)]
        for i in range(n):
            write_address(self.folder, Address(i, where[i], RUN))
            station = Station(listeners[i], RUN, SECRET.encode(), LIMIT_S)
            seat = AsyncSeat(Members(n, i, entries), station, Lineage(digest(self.config)), None, None, False)
            self._train(seat, before_phase)

    def join(self, before_phase):
        """One more, which gets a free slot."""
        local_steps = [self.settled.config.local_steps_of(i) for i in range(self.config.workers)]
        nonce = secrets.randbits(61)
        seat = async_seat(
            self.config, self.folder, RUN, nonce, local_steps=local_steps, join="auto", resume=False
        )  # fmt: skip
        return self._train(seat, before_phase)

    def _train(self, seat, before_phase):
        make = PairParticipant if isinstance(self.settled, InPairs) else GossipParticipant
        task, slot = task_of(self.config, own_parts(self.config)), seat.members.me
        worker = make(self.config, self.settled, self.folder, task, seat, threading.Event())
        phase = worker.phase

        def watched(number, round, alive):
            before_phase(slot, number)
            return phase(number, round, alive)

        worker.phase = watched
        self.running[slot] = self.pool.submit(worker.train)
        return worker

    def finish(self):
        """Waits for all that run; raises what they have raised."""
        for one in self.running.values():
            one.result(2 * LIMIT_S)
        self.pool.shutdown()


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("GOSSAMER_SECRET", SECRET)


def last_states(folder, config):
    """The newest state of each worker."""
    store = folder / "checkpoints"
    newest = {i: checkpoint.rounds(store, i, digest(config))[-1] for i in range(config.workers)}
    return {i: (round, checkpoint.load(store, round, i, digest(config))) for i, round in newest.items()}


def must_replay(folder, again, config):
    """The record of a run gives the same bits in another folder."""
    replay_asynchronous(config, again, folder)
    ours, theirs = last_states(folder, config), last_states(again, config)
    for i, (round, state) in ours.items():
        assert theirs[i][0] == round
        assert torch.equal(state["x"], theirs[i][1]["x"]), i
        assert all(map(torch.equal, state["outer"], theirs[i][1]["outer"])), i
        moments = [[one["exp_avg"] for one in two["inner"]["state"].values()] for two in (state, theirs[i][1])]
        assert all(map(torch.equal, *moments)), i
    assert read_order(again) == read_order(folder)


@pytest.mark.parametrize("own", [True, False], ids=["with its own checkpoint", "with the state of another"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_died_comes_back_into_its_slot_and_the_record_gives_the_bits_of_both_lives(kind, own, tmp_path):
    config = tiny(
        run__steps=24, run__checkpoint_every=2, run__rejoin_rounds=20 if own else 0, run__timeout_s=LIMIT_S,
        run__pace_s=0.01, run__eval_every=0, **KINDS[kind],
    )  # fmt: skip
    fleet, back = Fleet(config, tmp_path / "run"), threading.Event()

    def die(slot, number):
        if slot == 2 and number == 4:
            raise Died
        if number >= 7:
            assert back.wait(LIMIT_S)

    fleet.start(die)
    with pytest.raises(Died):
        fleet.running[2].result(LIMIT_S)
    newcomer = fleet.join(lambda slot, number: back.set())
    assert newcomer.slot == 2
    fleet.finish()
    order = read_order(tmp_path / "run")
    first, second = order[2]
    assert first.ended is None and second.ended.why == "finished" and second.life == newcomer.life != first.life
    assert second.begun.source[0] == (2 if own else second.begun.source[0]) and (second.begun.source[0] == 2) == own
    events = [(one, event) for i in (0, 1) for one in order[i] for event in one.events]
    if kind == "gossip":
        counted = [
            v
            for _, event in events
            if isinstance(event, Mixed)
            for j, v, life in event.heard
            if (j, life) == (2, first.life)
        ]
        assert second.begun.number >= max(counted, default=0), "nobody counts a local phase twice"
        assert any(
            (2, second.life) == (j, life)
            for _, event in events
            if isinstance(event, Mixed)
            for j, _, life in event.heard
        )
    else:
        assert any(isinstance(event, Met) and event.peer == 2 for event in second_half(events, second))
    assert second.begun.number <= 4 < second.phases
    trained = sum(len({*range(one[-1].phases)}) for one in order.values())
    assert 36 <= trained < 36 + 3, "the budget of all is spent, and by no more than a phase of each"
    must_replay(tmp_path / "run", tmp_path / "again", config)


def second_half(events, second):
    """The events in which the second life of worker 2 has a part."""
    return [
        event for _, event in events if not isinstance(event, Mixed) and getattr(event, "of", 0) == second.life
    ] or [event for event in second.events]
