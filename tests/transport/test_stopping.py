"""All processes of a run stop after one and the same round, whichever process is asked and wherever the others are."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from gossamer.transport.processes import stopping
from gossamer.transport.processes.backend import threads_end
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.stopping import Stopping
from gossamer.transport.processes.store import Entries

ROUNDS = 10_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "LOOK_S", 0.005)
    monkeypatch.setattr(stopping, "WAIT_S", 0.05)


def members(n: int, store: HashStore, secret: bytes = b"") -> list[Member]:
    return [Member.at(i, n, torch.device("cpu"), store, secret=secret) for i in range(n)]


@pytest.mark.parametrize("seed", range(6))
def test_processes_that_are_rounds_apart_stop_after_the_same_one(seed: int) -> None:
    """Each waits in each round for one neighbour to have begun it, as in gossip; one or several of them are asked."""
    draw = random.Random(seed)
    n, store = draw.choice([1, 2, 3, 5]), HashStore()
    asked = {i: draw.randrange(1, 30) for i in draw.sample(range(n), draw.randint(1, n))}
    begun, news = [-1] * n, threading.Condition()

    def train(member: Member) -> int:
        me, round = member.rank, 0
        with Stopping(member, lambda: me in asked and round >= asked[me], 0) as stops:
            for round in range(ROUNDS):
                with news:
                    begun[me] = round
                    news.notify_all()
                    assert news.wait_for(lambda here=round: begun[(me + 1) % n] >= here, 60), (
                        "its peer has stopped before"
                    )
                time.sleep(0.002 * (me + 1))
                if stops.after(round + 1):
                    return round + 1
        return ROUNDS

    with ThreadPoolExecutor(n) as pool:
        ends = [*pool.map(train, members(n, store))]
    assert len({*ends}) == 1 and min(asked.values()) <= ends[0] < ROUNDS, (ends, asked)


def test_no_worker_stops_before_one_is_asked_and_the_entry_of_a_stranger_has_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    [member] = members(1, store, b"ours")
    members(1, store, b"a guess")[0].entries.under("gossamer").set(stopping.ENTRY, '{"0": 1}')
    monkeypatch.setattr(stopping, "WAIT_S", 60.0)
    asked = threading.Event()
    with Stopping(member, asked.is_set, 4) as stops:
        time.sleep(0.05)
        assert not stops.after(5)
        asked.set()
        assert stops.after(6) and stops.after(7)


def test_a_process_continues_where_the_store_is_gone_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("connection reset")

    threads_end(60.0)  # those of another test would say it too
    monkeypatch.setattr(Entries, "changed", gone)
    with Stopping(members(1, HashStore())[0], lambda: True, 0) as stops:
        assert not any(stops.after(finished) for finished in range(1, 4))
    assert caplog.text.count("process 0 was asked to stop") == 1


@pytest.mark.parametrize("text", ["[", "[1]", '{"0": "1", "1": 2}', '{"0": true, "1": 2}', '{"0": -1}', "[" * 100_000])
def test_an_entry_that_no_process_has_written_counts_for_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "WAIT_S", 60.0)
    store = HashStore()
    both = members(2, store)
    both[0].entries.under("gossamer").set(stopping.ENTRY, text)
    with Stopping(both[0], lambda: True, 2) as one, Stopping(both[1], lambda: True, 2) as other:
        assert one.after(3) == other.after(3) == True  # noqa: E712
