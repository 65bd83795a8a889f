"""Workers in stages that lose processes and gain them again, each on a machine with a disk of its own."""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
from pathlib import Path

import torch

from commands import must_have_stages_in_processes, run
from gossamer.cli import main
from gossamer.record import checkpoint
from gossamer.record.lineage import read_branches
from gossamer.run.bookkeeping.resume import lineage
from gossamer.run.config.resolve import settings_in
from gossamer.run.config.run_file import dump
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import task_of
from gossamer.transport.processes.local import run_local
from tiny import preset as tiny

MACHINES = 6
SMALL = {
    "workers": 2,
    "pipeline__stages": 3,
    "data__accumulate": 3,
    "rule": {"name": "diloco"},
    "topology": {"name": "complete"},
    "run__steps": 16,
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
    number, after = plan["signals"].get(name, (0, 0))

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        real(store, finished, *state, **lineage)
        if number and finished == after:
            os.kill(os.getpid(), number)

    checkpoint.save = save
    return main(["train", str(Path(plan["root"]) / "run.toml"), "--stages", "auto", "--out", "run"])


def start(root, machines, **signals):
    """The exit code and the output of a run on these machines, as torchrun starts it once."""
    for name in machines:
        (root / name).mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    plan = {"root": str(root), "machines": machines, "port": port, "signals": signals}
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
        Store(config, folder).load(task_of(config), config.rounds, w, lineage(config, folder))["x"]
        for w in range(config.workers)
    ]


def test_two_workers_of_three_stages_lose_a_machine_with_its_disk_and_train_on_with_two_stages_until_it_is_back(
    tmp_path, forks
):
    must_have_stages_in_processes()
    (tmp_path / "run.toml").write_text(dump(tiny(**SMALL)))
    machines = [f"m{k}" for k in range(MACHINES)]
    code, output = start(tmp_path, machines, m1=(signal.SIGKILL, 3))
    assert code == 128 + signal.SIGKILL and "6 processes: 2 workers of 3 stages" in output, output
    shutil.rmtree(tmp_path / "m1")
    left = [name for name in machines if name != "m1"]
    code, output = start(tmp_path, left, m2=(signal.SIGTERM, 4))
    assert "5 processes: 2 workers of 2 stages" in output and "1 spare" in output, output
    assert output.count("and saved; resume with") == 4, output
    code, output = start(tmp_path, machines)
    assert code == 0 and "6 processes: 2 workers of 3 stages, cut before layers [1, 2]\n" in output, output
    lost, back = read_branches(tmp_path / "m1" / "run")
    assert lost["changes"]["pipeline.stages"] == [3, 2] and back["changes"]["pipeline.stages"] == [2, 3]
    assert lost["round"] == 2 and lost["round"] + 2 <= back["round"] < 8
    must_have_the_bits_of_its_replay(tmp_path, machines)


def must_have_the_bits_of_its_replay(root, machines):
    """A run that has ended, with the record of all machines, has the parameters that a simulation computes from its log."""
    whole = brought_together(root, machines)
    code, output = run("simulate", "--replay", whole, "--out", root / "again")
    assert code == 0, output
    config = settings_in(whole)
    assert all(map(torch.equal, parameters(config, whole), parameters(config, root / "again")))
