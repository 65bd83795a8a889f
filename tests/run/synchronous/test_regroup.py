"""Workers in stages that lose processes and gain them again, each on a machine with a disk of its own."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import HashStore

from commands import free_port, must_have_stages_in_processes, run
from gossamer.cli import main
from gossamer.errors import PeerError
from gossamer.record import checkpoint
from gossamer.record.lineage import read_branches
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.config.resolve import settings_in, settings_of
from gossamer.run.config.run_file import dump
from gossamer.run.synchronous import regroup
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import task_of
from gossamer.transport.processes.local import run_local
from gossamer.transport.processes.member import Member
from tiny import preset as tiny

MACHINES = 6
SMALL = {
    "workers": 2,
    "pipeline__stages": 3,
    "data__accumulate": 3,
    "rule": {"name": "diloco"},
    "topology": {"name": "complete"},
    "run__steps": 12,
    "run__local_steps": 2,
    "run__checkpoint_every": 2,
    "run__timeout_s": 60,
    "inner__clip": 0.5,
    "codec": {"name": "int4", "rounding": "stochastic"},
    "pipeline__forward": "aqsgd",
    "pipeline__backward": "intk",
    "data__windows": 5,
}
"""A run whose numbers depend on its cuts in four ways: by clipping, by blocks of two codecs, and by a memory of boundaries."""


KILLED_AT_3 = (signal.SIGKILL, 3, 0.0)
"""A signal, and the round after whose checkpoint it comes, in so many seconds."""


def on_a_machine(argv):
    """What torchrun starts on one of several machines: the run, and a signal once this machine has saved a round."""
    plan = json.loads(argv[0])
    name = plan["machines"][int(os.environ["RANK"])]
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "a run",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_PORT": str(plan["port"]),
        "LOCAL_WORLD_SIZE": "1",
    }
    os.chdir(Path(plan["root"]) / name)
    number, after, delay_s = plan["signals"].get(name, (0, 0, 0.0))
    newest = 0

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        nonlocal newest
        real(store, finished, *state, **lineage)
        newest = finished
        if number and finished == after:
            threading.Timer(delay_s, os.kill, (os.getpid(), number)).start() if delay_s else os.kill(
                os.getpid(), number
            )

    checkpoint.save = save
    # Noise of a busy machine shall not decide; a machine is slow from a round on.
    regroup._speed = lambda config: 0.25 if newest >= plan["slow"].get(name, 1 << 31) else 1.0
    return main(["train", str(Path(plan["root"]) / "run.toml"), "--stages", "auto", "--out", "run"])


def start(root, machines, slow=None, **signals):
    """The exit code and the output of a run on these machines, as torchrun starts it once.

    A machine gets a signal some seconds after it has saved a round.
    """
    for name in machines:
        (root / name).mkdir(exist_ok=True)
    plan = {"root": str(root), "machines": machines, "port": free_port(), "signals": signals, "slow": slow or {}}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run_local(len(machines), on_a_machine, [json.dumps(plan)], grace_s=60)
    return code, output.getvalue()


def brought_together(root, machines):
    """A run folder with what all machines have saved."""
    whole = root / "whole"
    for name in machines:
        shutil.copytree(root / name / "run", whole, dirs_exist_ok=True)
    return whole


def parameters(config, folder):
    """The parameters of each worker after the last round."""
    return [
        Store(config, folder).load(task_of(config), config.rounds, w, lineage_of(config, folder))["x"]
        for w in range(config.workers)
    ]


def test_two_workers_of_three_stages_lose_a_machine_with_its_disk_and_train_on_with_two_stages_until_it_is_back(
    tmp_path, forks
):
    must_have_stages_in_processes()
    (tmp_path / "run.toml").write_text(dump(tiny(**SMALL)))
    machines = [f"m{k}" for k in range(MACHINES)]
    code, output = start(tmp_path, machines, m1=KILLED_AT_3)
    assert code == 128 + signal.SIGKILL and "6 processes: 2 workers of 3 stages" in output, output
    shutil.rmtree(tmp_path / "m1")
    left = [name for name in machines if name != "m1"]
    code, output = start(tmp_path, left, m2=(signal.SIGTERM, 3, 0))
    assert "5 processes: 2 workers of 2 stages" in output and "1 spare" in output, output
    assert output.count("and saved; resume with") == 4, output
    code, output = start(tmp_path, machines)
    assert code == 0 and "6 processes: 2 workers of 3 stages, cut before layers [1, 2]\n" in output, output
    lost, back = read_branches(tmp_path / "m1" / "run")
    assert lost["changes"]["pipeline.stages"] == [3, 2] and back["changes"]["pipeline.stages"] == [2, 3]
    assert lost["round"] == 2 and lost["round"] < back["round"] < 6
    must_have_the_bits_of_its_replay(tmp_path, machines)


def must_have_the_bits_of_its_replay(root, machines):
    """A run that has ended, with the record of all machines, has the parameters that a simulation computes from its log."""
    whole = brought_together(root, machines)
    code, output = run("simulate", "--replay", whole, "--out", root / "again")
    assert code == 0, output
    config = settings_in(whole)
    assert all(map(torch.equal, parameters(config, whole), parameters(config, root / "again")))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0])
def test_after_twenty_kills_at_any_time_of_any_machine_half_of_them_with_their_disk_a_run_has_the_bits_of_its_replay(
    tmp_path, forks, seed
):
    must_have_stages_in_processes()
    draw = random.Random(seed)
    case = {**SMALL, "run__steps": 100, "run__local_steps": 1, "run__checkpoint_every": 1}
    (tmp_path / "run.toml").write_text(dump(tiny(**case)))
    machines, away = [f"m{k}" for k in range(MACHINES)], set[str]()
    for _ in range(20):
        here = [name for name in machines if name not in away]
        saved = [int(path.name[6:]) for path in tmp_path.glob("m*/run/checkpoints/stage-*/round-*")]
        victim = draw.choice(here[: len(here) // 2 * 2])
        when = (signal.SIGKILL, max(saved, default=0) + draw.randint(1, 2), draw.choice([0.0, draw.uniform(0, 0.5)]))
        code, output = start(tmp_path, here, **{victim: when})
        assert code == 128 + signal.SIGKILL, output
        if draw.random() < 0.5:
            shutil.rmtree(tmp_path / victim)
        away = {victim} if draw.random() < 0.7 else set()
    code, output = start(tmp_path, machines)
    assert code == 0, output
    stages = {one["changes"].get("pipeline.stages", [0, 0])[1] for one in read_branches(tmp_path / "m0" / "run")}
    assert {2, 3} <= stages
    must_have_the_bits_of_its_replay(tmp_path, machines)


@pytest.mark.full
def test_a_machine_that_becomes_slow_has_fewer_layers_after_some_rounds(tmp_path, forks):
    must_have_stages_in_processes()
    case = {
        **SMALL,
        "run__steps": 60,
        "model__layers": 6,
    }  # the speeds of all, and the request to stop, take some rounds to arrive
    (tmp_path / "run.toml").write_text(dump(tiny(**case)))
    machines = [f"m{k}" for k in range(MACHINES)]
    code, output = start(tmp_path, machines, slow={"m4": 1})
    assert code in (2, 130) and "a process is slow; all are asked to stop" in output, output
    code, output = start(tmp_path, machines, slow={"m4": 0})
    assert code == 0, output
    (change,) = read_branches(tmp_path / "m0" / "run")
    assert change["changes"] == {"pipeline.cuts": [[2, 4], [2, 3]]}
    must_have_the_bits_of_its_replay(tmp_path, machines)


@pytest.mark.full
def test_the_memories_of_boundaries_outlive_other_stages_with_which_no_round_was_trained(tmp_path, forks):
    must_have_stages_in_processes()
    (tmp_path / "run.toml").write_text(dump(tiny(**SMALL)))
    machines = [f"m{k}" for k in range(MACHINES)]
    for lost in ("m1", "m2"):
        code, output = start(tmp_path, [one for one in machines if one != "m1" or lost == "m1"], **{lost: KILLED_AT_3})
        assert code == 128 + signal.SIGKILL, output
        shutil.rmtree(tmp_path / lost)
    code, output = start(tmp_path, machines)
    assert code == 0, output
    assert [one["round"] for one in read_branches(tmp_path / "m1" / "run")] == [2, 2]
    must_have_the_bits_of_its_replay(tmp_path, machines)


def meet_with(monkeypatch, folder, *logs):
    """Takes the newest record of this folder and of others, which have been at these meetings."""
    logs = [[{"id": name, "round": round} for name, round in log] for log in logs]
    others = [[len(log), [dump(tiny(**SMALL)), "[]"], log, "now", "elsewhere"] for log in logs]
    monkeypatch.setattr(regroup, "agree", lambda member, digest, mine, **more: [*others, mine])
    member = Member.at(len(others), len(others) + 1, torch.device("cpu"), HashStore())
    found = regroup._take_newest_record(settings_of(tiny(**SMALL)), folder, member)
    (folder / "meetings.json").write_text(json.dumps(found[:-1]))
    return [(note["id"], note["round"]) for note in found]


def test_the_folder_of_another_run_of_the_run_file_is_refused_by_name_and_changes_no_record(tmp_path, monkeypatch):
    first = [("first", 0)]
    assert meet_with(monkeypatch, tmp_path, first) == [*first, ("now", 0)]  # with an empty disk
    assert (tmp_path / "run.toml").exists()
    meet_with(monkeypatch, tmp_path, [], first)  # one that has no record yet, or that of an earlier version
    with pytest.raises(
        PeerError, match=r"of process 1 on elsewhere is of another run than that of process 0 on elsewhere, proc"
    ):
        meet_with(monkeypatch, tmp_path, first, [("other", 0), ("later", 2)])
    assert json.loads((tmp_path / "meetings.json").read_text()) == [{"id": "first", "round": 0}]


def test_checkpoints_that_others_have_trained_again_without_a_machine_are_dropped_when_it_is_back(
    tmp_path, monkeypatch
):
    def rounds():
        return checkpoint.rounds(tmp_path / "checkpoints" / "stage-1-of-2-cut-1", 0)

    meet_with(monkeypatch, tmp_path, [("first", 0)])
    for round in (2, 3, 4):
        checkpoint.save(tmp_path / "checkpoints" / "stage-1-of-2-cut-1", round, 0, {}, digest="d", keep=9)
    meet_with(monkeypatch, tmp_path, [("first", 0)])
    assert rounds() == [2, 3, 4]
    # They resumed from round 3, then from 6; a meeting of the same round at which nobody trained is known to some alone.
    missed = [("first", 0), ("second", 3), ("third", 6)]
    assert meet_with(monkeypatch, tmp_path, missed, [("first", 0), ("lonely", 6)]) == [*missed, ("now", 0)]
    assert rounds() == [2, 3]


UNDER_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a run",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "RANK": "0",
    "WORLD_SIZE": "1",
}


@pytest.mark.parametrize(
    ("environment", "words", "sentence"),
    [
        ({}, ["train"], "no torchrun has started this one; start it on each machine with TORCH_DISABLE_SHARE"),
        (
            {**UNDER_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ["train"],
            "this one keeps a store from restart to",
        ),
        (
            {},
            ["train", "--local", "2"],
            "--stages auto was given with --local 2, which it replaces; start each machine with",
        ),
        (
            {},
            ["simulate"],
            "--stages auto follows the processes that torchrun starts for gossamer train; give a number",
        ),
        (UNDER_TORCHRUN, ["train", "--set", "pipeline.cuts=[1,2]"], "pipeline.cuts are set; leave these out"),
        (
            UNDER_TORCHRUN,
            ["train", "--set", "data.accumulate=2"],
            "data.accumulate is 2: with fewer micro-batches than stages",
        ),
        (
            UNDER_TORCHRUN,
            ["train"],
            "processes are there: 1, which are fewer than 2 stages for each of 2 workers; start more",
        ),
    ],
)
def test_another_launch_or_a_run_that_cannot_have_fewer_stages_is_refused(
    tmp_path, monkeypatch, environment, words, sentence
):
    (tmp_path / "run.toml").write_text(dump(tiny(**SMALL)))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    verb, *rest = words
    code, output = run(verb, tmp_path / "run.toml", "--stages", "auto", "--out", tmp_path / "run", *rest)
    assert code == 2 and sentence in " ".join(output.split()), output
    assert not (tmp_path / "run").exists()


def test_layers_move_when_that_makes_the_slowest_stage_faster_by_a_third():
    config = settings_of(tiny(**SMALL, model__layers=6, pipeline__cuts=[2, 4]))
    assert regroup.cuts_at([1.0] * 6, config) == (2, 4)
    assert not regroup.may_be_faster([1.0, 0.9, 1.1] * 2, config)  # noise
    assert regroup.cuts_at([1.0, 1.0, 1.0, 1.0, 0.25, 1.0], config) == (2, 3)  # stage 1 of worker 1
    assert regroup.may_be_faster([1.0, 1.0, 1.0, 1.0, 0.25, 1.0], config)
    assert not regroup.may_be_faster([0.25] * 6, config)  # slow in all places alike


def agent(root, name, port):
    """torchrun on one of several machines, as docs/how-to/pipelines.md starts it, with shorter waits."""
    (root / name).mkdir(exist_ok=True)
    conf = f"is_host={int(name == 'm0')},last_call_timeout=5,keep_alive_interval=4,join_timeout=300"
    words = ["--nnodes", "4:6", "--nproc-per-node", "1", "--max-restarts", "100", "--monitor-interval", "0.5"]
    words += ["--rdzv-id", "a-run", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["--rdzv-conf", conf, "--local-addr", "127.0.0.1", "-m", "gossamer"]
    words += ["train", str(root / "run.toml"), "--stages", "auto", "--out", "run"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (root / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=root / name,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_torchrun_starts_a_run_again_without_a_machine_that_is_gone_and_with_it_when_it_is_back(tmp_path):
    must_have_stages_in_processes()
    case = {**SMALL, "run__steps": 80, "run__local_steps": 1, "run__checkpoint_every": 1, "run__pace_s": 0.5}
    (tmp_path / "run.toml").write_text(dump(tiny(**case)))
    port = free_port()
    agents = {name: agent(tmp_path, name, port) for name in (f"m{k}" for k in range(MACHINES))}

    def logged(words):
        return any(words in path.read_text() for path in tmp_path.glob("m*.log"))

    def wait_until(happened):
        until = time.monotonic() + 240
        while not happened():
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("m*.log")))
            assert time.monotonic() < until and agents["m0"].poll() is None, logs
            time.sleep(0.2)

    try:
        wait_until(lambda: [*tmp_path.glob("m1/run/checkpoints/stage-*/round-00000[3-9]")])
        for process in [*psutil.Process(agents["m1"].pid).children(recursive=True), agents["m1"]]:
            process.kill()
        agents["m1"].wait()
        shutil.rmtree(tmp_path / "m1")
        wait_until(lambda: logged("5 processes: 2 workers of 2 stages"))
        agents["m1"] = agent(tmp_path, "m1", port)
        assert [one.wait(400) for one in agents.values()] == [0] * MACHINES
    finally:
        for one in agents.values():
            one.terminate()
    changes = [one["changes"].get("pipeline.stages") for one in read_branches(tmp_path / "m1" / "run")]
    assert changes == [[3, 2], [2, 3]]
    must_have_the_bits_of_its_replay(tmp_path, [*agents])
