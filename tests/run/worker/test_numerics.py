"""Threads and kernels decide last digits, so a run is simulated with the threads of its workers and with kernels that repeat."""

import os
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import Command, done, free_port, must_have_stages_in_processes
from gossamer.errors import ConfigError, DataError
from gossamer.record import machines
from gossamer.record.folder import read_metrics
from gossamer.record.machines import Computed, Machine, Threads, machine_line, read_machines, this_machine
from gossamer.run.config.document import load_run, with_settings
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import dump, parse
from gossamer.run.simulated import threads as lanes
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.numerics import deterministic, threads_of, using_threads, warn_of_other_machine
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
    monkeypatch.delitem(sys.modules, "wide_sums", raising=False)  # that of an earlier test
    (tmp_path / "wide_sums.py").write_text(WIDE)

    def file(**settings):
        parts = {"model__size": "wide_sums:net", "model__loss": "wide_sums:loss", "data__source": "wide_sums:batch"}
        own = {"workers": 2, "run__threads": 0, "run__steps": 6, "run__eval_every": 2, "run__timeout_s": 60.0}
        config = tiny(**own, **parts, inner__lr=0.1, **settings)
        (tmp_path / "wide.toml").write_text(dump(config))
        return tmp_path / "wide.toml"

    return file


def config_of(folder, **changes):
    """The settings of a recorded run, with changes."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return settings_of(parse(with_settings(load_run(folder), dotted)))


def losses(folder):
    """Of each worker and step."""
    return {(one["worker"], one["step"]): one["loss"] for one in read_metrics(folder) if one["kind"] == "train"}


def tensors(folder):
    """All tensors of the newest checkpoints."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return {(path.stem, key): t for path in newest.glob("*.safetensors") for key, t in load_file(path).items()}


def evaluated(folder):
    """The loss by `gossamer evaluate`, which is that of the last validation of a simulation."""
    validated = [one["loss"] for one in read_metrics(folder) if one["kind"] == "eval" and one["round"] == 2][:1]
    done("evaluate", folder)
    loss = [one["loss"] for one in read_metrics(folder) if one["kind"] == "eval" and one["round"] == 2][-1]
    assert validated in ([], [loss])
    return loss


def same(a, b):
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys() and ours
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert losses(a) == losses(b) and losses(a)


@pytest.mark.sampled(3)
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


@pytest.mark.full
@pytest.mark.timeout(240)
def test_workers_of_machines_with_different_cores_are_simulated_audited_and_resumed_with_the_threads_of_each(
    cores, wide, tmp_path
):
    cores(1)
    words = ("train", wide(**KINDS["in rounds"], record__hash=True), "--out", "real", "--of", 2, "--quiet")
    address = ("--address", f"127.0.0.1:{free_port()}")
    both = [Command(*words, *address, "--rank", i, OMP_NUM_THREADS=str(3 - i)) for i in range(2)]
    ends = [one.finish() for one in both]
    assert [code for code, _ in ends] == [0, 0], ends
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    assert [(one.worker, one.machine.threads) for one in read_machines(real)] == [(0, 3), (1, 2)]
    done("simulate", real / "run.toml", "--out", simulated, "--quiet")
    same(real, simulated)
    assert "6 hashes of all workers agree" in done("audit", real) and "6 hashes" in done("audit", simulated)
    whole = tensors(real), losses(real)
    for folder, resume in ((real, ("train", "--local", 2)), (simulated, ("simulate",))):
        for path in (folder / "checkpoints" / "round-000003").iterdir():
            path.unlink()
        done(*resume, "--resume", folder, "--quiet")
        again = tensors(folder)
        assert losses(folder) == whole[1] and all(torch.equal(again[key], t) for key, t in whole[0].items())
        resumed = [(one.round, one.worker, one.machine.threads) for one in read_machines(folder)]
        assert resumed == [(0, 0, 3), (0, 1, 2), (2, 0, 3), (2, 1, 2)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["shards", "stages"])
def test_each_process_of_a_worker_in_parts_takes_its_share_of_the_cores_and_the_simulation_as_many(
    kind, cores, tmp_path, monkeypatch
):
    if kind == "stages":
        must_have_stages_in_processes()
    cores(6)
    parts = {"pipeline__stages": 2} if kind == "stages" else {"run__shards": 2}
    lengths = {"run__threads": 0, "run__steps": 4, "run__timeout_s": 60.0, "data__accumulate": 2, "model__layers": 2}
    config = tiny(workers=1, rule__name="diloco", topology__name="complete", **lengths, **parts)
    monkeypatch.chdir(tmp_path)
    Path("parts.toml").write_text(dump(config))
    done("train", "parts.toml", "--local", 1, "--out", "real", "--quiet")
    done("simulate", "parts.toml", "--out", "simulated", "--quiet")
    for folder in ("real", "simulated"):
        assert {one.machine.threads for one in read_machines(Path(folder))} == {3}
    assert losses(tmp_path / "real") == losses(tmp_path / "simulated")


@pytest.mark.full
@pytest.mark.parametrize("way", [{}, {"server__name": "heloco"}, {"run__wait": False}])
def test_a_simulation_resumes_with_the_threads_that_it_had_on_a_machine_with_fewer_cores(way, cores, wide, tmp_path):
    clock = {"clock": {"step_s": 1.0, "uplink_bps": 1e8, "downlink_bps": 1e8}}
    wide(**way, **({"network": clock} if way else {"rule__name": "diloco", "topology__name": "complete"}))
    cores(CORES)
    simulate("wide.toml", tmp_path / "whole")
    simulate("wide.toml", tmp_path / "parts", until=1)
    cores(2)
    simulate("wide.toml", tmp_path / "parts", resume=True)
    same(tmp_path / "whole", tmp_path / "parts")
    assert {one.machine.threads for one in read_machines(tmp_path / "parts")} == {CORES // 2}
    done("simulate", tmp_path / "whole" / "run.toml", "--out", "again", "--quiet")
    same(tmp_path / "whole", tmp_path / "again")


def test_threads_that_the_run_file_names_count_before_those_that_are_recorded(cores, wide, tmp_path, caplog):
    cores(CORES)
    config = single(workers=2, run__threads=0, run__steps=2, rule__name="diloco", topology__name="complete")
    simulate(config, tmp_path / "run")
    there = this_machine()
    assert threads_of(config_of(tmp_path / "run"), tmp_path / "run").at(1, 0) == 3
    assert threads_of(config_of(tmp_path / "run", run__threads=1), tmp_path / "run").at(1, 0) == 1
    assert threads_of(config_of(tmp_path / "run", run__threads=1)).at(1, 0) == 1
    assert "is here" not in caplog.text
    line = machine_line(0, there._replace(torch="1.0", threads=2))
    (tmp_path / "run" / "machines.jsonl").write_text(line)
    assert threads_of(config_of(tmp_path / "run"), tmp_path / "run").at(1, 0) == 2
    assert f"with another torch (1.0) than is here ({torch.__version__})" in caplog.text
    assert "another processor" not in caplog.text
    (tmp_path / "run" / "machines.jsonl").write_text(line.replace('"threads":2', '"threads":5000'))
    with pytest.raises(DataError, match="threads"):
        threads_of(config_of(tmp_path / "run"), tmp_path / "run")


def test_a_machine_that_rounds_products_in_bf16_otherwise_is_another_processor(tmp_path, monkeypatch, caplog):
    """ONEDNN_MAX_CPU_ISA does that, and so do virtual machines of one name; Muon takes other products there."""
    here, computes = this_machine(), machines.computes_bf16()
    (tmp_path / "machines.jsonl").write_text(machine_line(0, here))
    warn_of_other_machine(tmp_path)
    assert "rounds differently" not in caplog.text
    monkeypatch.setattr(machines, "computes_bf16", lambda: not computes)
    assert this_machine() != here
    warn_of_other_machine(tmp_path)
    assert "another processor" in caplog.text and "products in bf16)" in caplog.text


@pytest.mark.parametrize("content", [b'name = "', b'name = "\xff"'])
def test_a_damaged_run_file_of_a_recorded_run_is_named(content, tmp_path):
    config = single(workers=2, run__threads=0, run__steps=2, rule__name="diloco", topology__name="complete")
    simulate(config, tmp_path / "run")
    configured = config_of(tmp_path / "run", run__threads=1)
    (tmp_path / "run" / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml"):
        threads_of(configured, tmp_path / "run")


def test_threads_are_written_for_each_worker_where_they_differ_or_change(tmp_path):
    here, threads = Machine("2", "x", 7), Threads(2, {0: ((0, 2), (4, 2)), 1: ((0, 3), (4, 1)), 2: ((1, 5),)})
    (tmp_path / "machines.jsonl").write_text(threads.lines(1, here, 3))
    lines = [(one.round, one.worker, one.machine.threads) for one in read_machines(tmp_path)]
    assert lines == [(1, 0, 2), (1, 1, 3), (1, 2, 5), (4, 0, 2), (4, 1, 1)]
    (tmp_path / "machines.jsonl").write_text(Threads(4).lines(0, here, 3))
    (tmp_path / "machines-002.jsonl").write_text(machine_line(2, here))
    assert read_machines(tmp_path) == [Computed(0, None, here._replace(threads=4)), Computed(2, 2, here)]


@pytest.mark.parametrize(
    ("named", "threads"),
    [
        (None, 4),
        ("", 4),
        ("3", 3),
        ("3,2", 3),
        ("x", "OMP_NUM_THREADS is 'x'"),
        ("0", "'0'"),
        ("9" * 5000, "1 to 1024"),
    ],
)
def test_a_share_of_the_cores_is_taken_unless_the_environment_names_threads(named, threads, cores, monkeypatch):
    cores(9)
    if named is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    assert intra_op_threads(5, 2) == 5
    if isinstance(threads, str):
        with pytest.raises(ConfigError, match=threads):
            intra_op_threads(0, 2)
    else:
        assert intra_op_threads(0, 2) == threads
        assert intra_op_threads(0, 20) == (1 if not named else 3)


def test_threads_are_those_of_the_calling_thread_alone_and_are_put_back():
    inside, there = threading.Barrier(2), dict[str, int]()

    def other():
        with using_threads(3):
            inside.wait(20)
            there["other"] = torch.get_num_threads()
            inside.wait(20)

    def own():
        with using_threads(2):
            inside.wait(20)
            there["own"] = torch.get_num_threads()
            inside.wait(20)
            raise KeyError

    before = torch.get_num_threads()
    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(KeyError):
        own()
    thread.join()
    assert there == {"own": 2, "other": 3} and torch.get_num_threads() == before


def mode():
    return torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory


def test_deterministic_kernels_are_asked_for_while_any_thread_trains_and_as_before_afterwards_also_after_an_error():
    before, first, second = mode(), threading.Event(), threading.Event()

    def other():
        with deterministic():
            first.set()
            assert second.wait(20)

    def fails():
        with deterministic():
            thread.start()
            assert first.wait(20) and mode() == (1, False)
            raise KeyError

    thread = threading.Thread(target=other)
    with pytest.raises(KeyError):
        fails()
    assert mode() == (1, False), "the other still trains"
    second.set()
    thread.join()
    assert mode() == before
    torch.set_deterministic_debug_mode("error")
    try:
        with deterministic():
            assert mode() == (2, before[1]), "who has asked for errors gets errors"
        assert mode() == (2, before[1])
    finally:
        torch.set_deterministic_debug_mode("default")


def test_products_on_a_gpu_have_a_fixed_workspace_meanwhile(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for named, inside in ((None, ":4096:8"), (":16:8", ":16:8")):
        if named is not None:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", named)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with deterministic():
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == inside
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == named


def test_an_operation_without_a_deterministic_kernel_warns_once_and_the_switch_is_off_after_the_run(tmp_path):
    def net():
        return torch.nn.Linear(4, 4)

    def loss(model, x):
        assert torch.get_deterministic_debug_mode() == 1
        return (
            torch.nn.functional.max_unpool1d(model(x)[None], torch.tensor([[0, 2, 4, 6]] * 3)[None], 2).square().mean()
        )

    def batch(worker, step):
        return torch.ones(3, 4)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        simulate(model=net, data=batch, loss=loss, rule="diloco", workers=2, rounds=3, out=tmp_path)
    assert len([one for one in caught if "does not have a deterministic implementation" in str(one.message)]) == 1
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/outside/only", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        (
            "4:cpu,cpuacct:/d/e\n0::/",
            {"cpu,cpuacct/d/e/cpu.cfs_quota_us": "50000", "cpu,cpuacct/d/e/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("3:cpuset:/\n1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": "x y z"}, None),
    ],
)
def test_the_quota_of_a_container_bounds_the_cores(groups, files, cores, tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text(groups + "\n")
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    read = launch._cpu_quotas
    assert min(read(tmp_path / "cgroup", tmp_path / "fs"), default=None) == cores
    monkeypatch.setattr(launch, "_cpu_quotas", lambda *_: read(tmp_path / "cgroup", tmp_path / "fs"))
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(64)))
    assert launch.available_cores() == (64 if cores is None else max(1, int(cores)))
