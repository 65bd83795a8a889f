"""Servers of regions below a global one as real processes, and the replay of their records to the same bits."""

import os
import shlex
import signal
import socket
import threading
import time
from random import Random

import pytest
import torch
import torch._dynamo  # which the first step of any optimizer imports: here those of several threads at once
from hypothesis import given, settings
from hypothesis import strategies as st
from test_events import LAYOUT, P
from test_replay import losses, same, saved
from test_server_processes import KNOWN, Process, events, model, served, start, stopped

from commands import Command
from gossamer.asynchronous import halos
from gossamer.clock import Update
from gossamer.clock.fragment import RegionReport
from gossamer.clock.phases import Budget
from gossamer.clock.server_core import Send, ServerCore
from gossamer.clock.shares import Shares
from gossamer.errors import DataError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.jsonl import json_lines
from gossamer.record.logs.arrivals import ServerInput, arrivals_file, read_arrivals
from gossamer.record.logs.events import event_files, read_events
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.replay.served import _Recorded, _Replay, replay_server
from gossamer.run.served.global_server import serve_regions
from gossamer.run.served.global_session import LetterHeard, open_global
from gossamer.run.served.protocol import settled_server
from gossamer.run.served.region import serve_region
from gossamer.run.served.region_protocol import regions_of
from gossamer.run.served.session import region_session
from gossamer.run.served.worker import work
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.task import task_of
from gossamer.transport.secret import SECRET
from gossamer.transport.sockets.stream import connect

HALOS = {"name": "halos", "every": 2, "local_delay": 2}


@pytest.fixture(autouse=True)
def a_secret(monkeypatch):
    monkeypatch.setenv(SECRET, KNOWN)


def sites(*regions):
    """The network of these regions, each with its workers."""
    return {
        "step_s": 1.0, "uplink_bps": 1e9, "downlink_bps": 1e9,
        "sites": {f"r{k}": {"workers": [*members]} for k, members in enumerate(regions)},
    }  # fmt: skip


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def together(config, folder, places, monkeypatch):
    """A whole run with all sides as threads of this process, where no worker comes after the others have done its share."""
    arriving = threading.Semaphore(0)

    def connecting(*args, **options):
        arriving.release()
        return connect(*args, **options)

    monkeypatch.setattr("gossamer.run.served.worker.connect", connecting)
    top, ports = free_port(), [free_port() for _ in range(max(places) + 1)]
    sides = [Process(serve_regions, config, folder, "127.0.0.1", top)]
    while sides[0].is_alive() and not (folder / f"events-{config.workers:03}.jsonl").exists():
        time.sleep(0.01)
    sides += [Process(work, config, folder, "127.0.0.1", ports[g], i) for i, g in enumerate(places)]
    assert all(arriving.acquire(timeout=60) for _ in places)
    for g, port in enumerate(ports):
        sides.append(Process(serve_region, config, folder, ("127.0.0.1", port), ("127.0.0.1", top), g))
    for side in sides:
        side.join(90)
    assert [side.error for side in sides] == [None] * len(sides)
    assert not any(side.is_alive() for side in sides)


def phases_of(folder):
    """Each local phase in metrics and events, with its loss; lists, so that one which is there twice shows."""
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    found = [line for path in event_files(folder) for _, line in json_lines(path) if line["event"] == "phase"]
    return (
        sorted((line["worker"], line["step"], line["loss"]) for line in lines),
        sorted((line["worker"], line["number"], line["tokens"]) for line in found),
    )


def assert_replayed(real, config, folder):
    """Replays a real run, and compares the global server, all validations, and all local phases, which are there once."""
    replay_server(config, folder, real)
    n = config.workers
    assert same(saved(real, config, n), saved(folder, config, n))
    ours, theirs = losses(real)[0], losses(folder)[0]
    assert ours == theirs and ours
    assert phases_of(real) == phases_of(folder)
    assert [*map(len, phases_of(folder))] == [n * config.run.steps // config.full_steps] * 2


def test_two_regions_over_sockets_share_all_steps_and_replay_to_the_last_bit(tmp_path, monkeypatch):
    config = served(
        sites((0, 2), (1, 3)), workers=4, server=HALOS, run__steps=12, run__checkpoint_every=3, run__eval_every=3,
        events={"fragments": 2}, codec={"name": "int8"},
    )  # fmt: skip
    together(config, tmp_path / "real", (0, 1, 0, 1), monkeypatch)
    assert read_events(tmp_path / "real").absorbed.sum() == 4 * 6
    relays = [line for k in (4, 5, 6) for line in events(tmp_path / "real", k) if line["event"] in ("report", "merge")]
    assert {(line["event"], line["region"]) for line in relays} == {(e, g) for e in ("report", "merge") for g in (0, 1)}
    assert_replayed(tmp_path / "real", config, tmp_path / "replay")
    arrivals_file(tmp_path / "real", "-006").unlink()
    with pytest.raises(DataError, match=r"of region 1 at .* has no letter for it; gather the records of all regions"):
        replay_server(config, tmp_path / "again", tmp_path / "real")


def test_the_sessions_of_processes_given_the_events_of_a_simulation_compute_its_bits(tmp_path):
    # A process counts absorbed steps for its rounds and a simulation trained ones, so the learning rate is always the same.
    config = served(
        sites((0, 1, 2)) | {"step_s": [0.1, 0.17, 0.31]}, workers=3, server=HALOS, run__steps=16, inner__schedule="constant",
        inner__warmup_steps=0,
    )  # fmt: skip
    simulate(config, tmp_path / "virtual")
    settled, task = settled_server(config), task_of(config)
    run = _Recorded(config, settled, task, Probe(config, task, torch.device("cpu")), tmp_path / "real", tmp_path)
    with open_global(config, settled, run.folder, run.probe, None, replays=True) as above:
        (welcome,) = above.join(0, (), 0.0)
        (region,) = regions_of(settled.regions)
        session = region_session(config, settled, above.records.files, run.probe, region, welcome.content, 0.0)
        below, numbers = _Replay(session, run, tmp_path), [0] * 3

        def write(now_s):
            """The oldest letter reaches the global server, and its answer the region."""
            letter = session.letters.pop(0)
            (reply,) = above.hear(0, LetterHeard(letter, now_s), now_s)
            below.answer(reply.content, now_s)
            return letter

        for worker in range(3):
            below.enter(ServerInput("join", 0.0, worker=worker))
        for line in events(tmp_path / "virtual"):
            now_s = line.get("end_s", 0.0)
            if line["event"] == "push":
                worker = line["source"]
                below.enter(ServerInput("push", now_s, worker=worker, phase=numbers[worker]))
                numbers[worker] += 1
            elif line["event"] == "report":
                below.enter(ServerInput("tick", now_s))  # reports the rest, once nobody trains
                while write(now_s).message is None:
                    pass
            while session.letters and session.letters[0].message is None:
                write(now_s)
        assert sum(numbers) == 3 * 8 and len(set(numbers)) == 3
        below.enter(ServerInput("tick", now_s))
        assert write(now_s).done and session.over and above.over
        assert torch.equal(above.core.model(), model(tmp_path / "virtual", config))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), regions=st.integers(1, 4), phase=st.sampled_from([1, 3, 8]))
def test_all_steps_are_shared_out_once_whatever_regions_are_lost(seed, regions, phase):
    random, shares, lost = Random(seed), Shares(240, [4 * phase] * regions, phase), 0
    granted = {g: shares.join(g) for g in range(regions)}
    begun = dict.fromkeys(granted, 0)
    while granted:
        g = random.choice(sorted(granted))
        while begun[g] < granted[g].steps and random.random() < 0.8:
            begun[g] += phase
        if lost < 3 and random.random() < 0.1:  # what it has not reported is trained again
            shares.leave(g)
            granted[g], begun[g], lost = shares.join(g), 0, lost + 1
        elif begun[g] >= granted[g].steps and not granted[g].more:
            shares.report(g, begun[g])
            shares.leave(g)
            del granted[g]
            if not granted and not shares.over:  # it came back when the others had ended: who joins takes it
                granted[g], begun[g] = shares.join(g), 0
        else:
            if random.random() < 0.5:
                shares.report(g, begun[g])
            granted[g] = shares.grant(g, begun[g])
    assert shares.over and 240 <= shares.reported < 240 + (regions + 3) * phase


def test_a_worker_for_which_no_step_is_left_waits_for_the_next_grant_or_ends_with_the_last():
    budget = Budget(4, more=True)
    core = ServerCore(halos(every=2), torch.zeros(P), LAYOUT, ((0, P),), [4, 4, 4], budget=budget, strangers=(2,))
    assert [type(action) for action in core.join(0)] == [Send] and core.join(1) == []
    push = core.counted(0, 0, torch.ones(P), 1)
    assert [type(action) for action in core.push(0, push, 1.0)] == [Update] and not core.over
    core.leave(1, 1.5)
    assert core.tick(99.0) == []  # nobody trains, but there may be more
    (first,) = core.grant(8, more=True)
    assert (first.worker, first.go, first.starts[0].updates) == (0, True, 1)
    assert [type(action) for action in core.push(0, push, 2.0)] == [Update, RegionReport]
    (last,) = core.grant(8, more=False)
    assert not last.go and not core.over  # a report is under way
    core.merge(0, torch.zeros(P))
    assert core.over and core.tick(3.0) == []


def lines_of(path, event):
    return path.read_text().count(f'"event":"{event}"') if path.exists() else 0


def wait_for(launcher, happened, deadline_s=120):
    deadline = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < deadline, launcher.finish(0)
        time.sleep(0.02)


def as_told(launcher, words):
    """A process that takes the place of one that was killed, started as the launcher told when it ended."""
    told = next(line for line in launcher.lines() if words in line)
    return Command(*shlex.split(told[told.index("gossamer train") :])[1:])


@pytest.mark.timeout(400)
def test_a_worker_a_region_and_the_global_server_are_killed_and_come_back_and_the_run_replays_to_the_last_bit(tmp_path):
    config = served(
        sites((0, 1), (2, 3)), workers=4, server=HALOS, run__steps=48, run__checkpoint_every=4, run__eval_every=12,
        run__pace_s=0.04, run__timeout_s=100.0, model__layers=1,
    )  # fmt: skip
    real = tmp_path / "real"
    launcher = start(config, real)
    pids = launcher.processes(7)
    above, below = real / "arrivals.jsonl", real / "arrivals-006.jsonl"
    # A region that comes late finds much of the run taken, and who is killed must be in it.
    with stopped(pids["2"], pids["3"]):
        wait_for(launcher, lambda: lines_of(real / "arrivals-005.jsonl", "join") >= 2)
    wait_for(launcher, lambda: lines_of(below, "join") >= 2 and lines_of(above, "report") >= 3)
    os.kill(pids["1"], signal.SIGKILL)
    with stopped(pids["0"], pids["2"], pids["3"]):
        back = [as_told(launcher, "worker 1 ended")]
        wait_for(launcher, lambda: lines_of(real / "arrivals-005.jsonl", "join") >= 3)
    os.kill(pids["r1"], signal.SIGKILL)
    with stopped(pids["0"], back[0].pid):
        back.append(as_told(launcher, "the server of region 1 ended"))
        wait_for(launcher, lambda: lines_of(below, "join") >= 4 and lines_of(above, "gone") >= 1)
    reports = lines_of(above, "report")
    wait_for(launcher, lambda: lines_of(above, "report") >= reports + 3 and checkpoint.rounds(real / "checkpoints", 4))
    os.kill(pids["serve"], signal.SIGKILL)
    back.append(as_told(launcher, "resume it with"))
    code, output = launcher.finish(200)
    assert code == 128 + signal.SIGKILL, output  # of its own server; that its processes had successors it does not know
    said = [process.finish() for process in back]
    assert [code for code, _ in said] == [0, 0, 0], said
    assert "Traceback" not in output + "".join(words for _, words in said)
    assert [item.event for item in read_arrivals(real)].count("serve") == 2
    assert [item.event for item in read_arrivals(real, "-006")].count("begin") == 3
    phases = [[e["number"] for e in events(real, i) if e["event"] == "phase"] for i in range(4)]
    assert all(
        numbers == [*range(len(numbers))] for numbers in phases
    )  # what was lost was trained again, and counts once
    assert sum(map(len, phases)) == 4 * 24
    assert_replayed(real, config, tmp_path / "replay")
