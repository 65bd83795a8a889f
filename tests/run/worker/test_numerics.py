"""Threads and kernels decide last digits, so a run is simulated with the threads of its workers and with kernels that repeat."""

import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import Command, free_port, must_have_stages_in_processes, run
from gossamer.errors import ConfigError, DataError
from gossamer.record.folder import read_metrics
from gossamer.record.machines import Computed, Machine, Threads, machine_line, read_machines, this_machine
from gossamer.run.config.run_file import dump
from gossamer.run.simulated import threads as lanes
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.compiled import made_ready
from gossamer.run.worker.numerics import deterministic, threads_of, using_threads
from gossamer.transport.processes import launch
from gossamer.transport.processes.launch import intra_op_threads
from tiny import single, tiny

WIDE = """
import torch

SIZE = 200_000  # a sum of so many numbers is shared between threads, and its last digits tell between how many

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SIZE))

def net():
    return Net()

def batch(worker, step):
    return torch.randn(2, SIZE, generator=torch.Generator().manual_seed(100 * worker + step))

def loss(model, x):
    return (model.weight * x[0] - x[1]).square().sum().sqrt() + (model.weight * x[1]).sum().cos()
"""
CORES = 6
KINDS = {
    "in rounds": {"rule__name": "diloco", "topology__name": "complete"},
    "elastic": {"run__elastic": True},
    "with a server": {"server__name": "heloco"},
    "in pairs": {"pair__name": "ad_psgd", "topology__name": "complete", "events__meetings": 4.0},
    "without waiting": {"run__wait": False},
}


@pytest.fixture
def cores(monkeypatch):
    """Sets how many cores there seem to be, to launchers and to what computes in this process."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def seem(count):
        for place in (launch, lanes):
            monkeypatch.setattr(place, "available_cores", lambda: count)

    return seem


@pytest.fixture
def wide(tmp_path, monkeypatch):
    """Makes run files of a model with sums that threads share."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wide_sums.py").write_text(WIDE)

    def file(**settings):
        parts = {"model__size": "wide_sums:net", "model__loss": "wide_sums:loss", "data__source": "wide_sums:batch"}
        own = {"workers": 2, "run__threads": 0, "run__steps": 6, "run__eval_every": 2, "run__timeout_s": 60.0}
        config = tiny(**own, **parts, inner__lr=0.1, **settings)
        (tmp_path / "wide.toml").write_text(dump(config))
        return tmp_path / "wide.toml"

    return file


def done(*words):
    code, said = run(*words)
    assert code == 0, said
    return said


def losses(folder):
    """Of each worker and step."""
    return {(one["worker"], one["step"]): one["loss"] for one in read_metrics(folder) if one["kind"] == "train"}


def tensors(folder, name="worker-*"):
    """Those of the newest checkpoints, and of the messages in flight."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return {(path.stem, key): t for path in newest.glob(f"{name}.safetensors") for key, t in load_file(path).items()}


def evaluated(folder):
    """What `gossamer evaluate` finds, which is what the last validation of a simulation has found."""
    scored = [one["loss"] for one in read_metrics(folder) if one["kind"] == "eval" and one["round"] == 2][:1]
    done("evaluate", folder)
    found = [one["loss"] for one in read_metrics(folder) if one["kind"] == "eval" and one["round"] == 2][-1]
    assert scored in ([], [found])
    return found


def same(a, b):
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys() and ours
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert losses(a) == losses(b) and losses(a)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_fewer_workers_than_cores_has_the_bits_of_its_simulation_and_of_its_replay_on_any_number_of_cores(
    kind, cores, wide, tmp_path
):
    cores(CORES)
    settings = KINDS[kind] | ({"record__hash": True} if kind in ("in rounds", "elastic") else {})
    done("train", wide(**settings), "--local", 2, "--out", "real", "--quiet")
    machines = read_machines(tmp_path / "real")
    assert {one.machine.threads for one in machines} == {CORES // 2}
    assert {one.worker for one in machines} == {0, 1, 2} if kind == "with a server" else {0, 1}
    if kind in ("in rounds", "elastic"):
        done("simulate", "wide.toml", "--out", "simulated", "--quiet")
        same(tmp_path / "real", tmp_path / "simulated")
        assert evaluated(tmp_path / "real") == evaluated(tmp_path / "simulated")
    cores(1)
    if kind == "in rounds":
        done("simulate", tmp_path / "real" / "run.toml", "--out", "again", "--quiet")
    else:
        done("simulate", "--replay", "real", "--out", "again", "--quiet")
    same(tmp_path / "real", tmp_path / "again")
    assert {one.machine.threads for one in read_machines(tmp_path / "again")} == {CORES // 2}
    if kind in ("in rounds", "elastic"):
        assert "6 hashes of all workers agree" in done("audit", "real")
        assert evaluated(tmp_path / "real") == evaluated(tmp_path / "simulated")
