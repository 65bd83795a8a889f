"""What a GPU computes, beside what the CPU does. `make gpu` runs this, and the parity suite and all tiny runs on the GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from codecs_in_use import VARIANTS
from commands import free_port, run
from drifted_rounds import play
from gossamer.codecs import CODECS
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rounds.kernel import PLAIN, compiled
from gossamer.rules import RULES, Rule
from gossamer.run.config.run_file import digest, dump
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import Topology, make_topology
from gossamer.transport.processes.backend import backend_of, nccl_group, poll
from gossamer.transport.processes.local import loopback
from gossamer.tree import leaves, map_leaves, nbytes
from tiny import single

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Please use the new API settings")]
NUMEL, WORKERS, ROUNDS = 10_007, 4, 3


def on(rule: Rule) -> Topology:
    """A topology that this rule runs on."""
    for name in ("random", "complete", "tree", "random_push"):
        topology = make_topology(name, WORKERS)
        if not combination_faults(Combination(workers=WORKERS, rule=rule, topology=topology)):
            return topology
    raise AssertionError(f"{rule.name} runs nowhere")


def played(rule: Rule, device: str, kernel=PLAIN) -> list[torch.Tensor]:
    """The parameters and states of all workers after some rounds, on the host; all begin with numbers made there."""
    start = [x.to(device) for x in random_vectors(WORKERS, NUMEL, dtype=torch.float32)]
    drift = random_drift(NUMEL, dtype=torch.float32)
    xs, states = play(rule, on(rule), start, ROUNDS, lambda *place: drift(*place).to(device), kernel=kernel)
    return [t.cpu() for t in (*xs, *leaves(tuple(states)))]


@pytest.mark.parametrize("name", RULES)
def test_outer_updates_on_a_gpu_are_those_of_a_cpu(name: str) -> None:
    rule = RULES[name]()
    for there, here in zip(played(rule, "cuda"), played(rule, "cpu"), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name, factory in RULES.items() if factory().elementwise and factory().compiles]
)
def test_compiled_outer_updates_on_a_gpu_are_the_plain_ones(name: str) -> None:
    rule = RULES[name]()
    for fused, plain in zip(played(rule, "cuda", compiled()), played(rule, "cuda"), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_message_encoded_on_a_gpu_is_decoded_alike_on_a_cpu_and_loses_no_more(name: str) -> None:
    codec, x = VARIANTS[name], torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    there, here = codec.encode(x.cuda(), 7), codec.encode(x, 7)
    assert [(t.shape, t.dtype) for t in leaves(there)] == [(t.shape, t.dtype) for t in leaves(here)]
    assert nbytes(there) == nbytes(here) and all(t.is_cuda for t in leaves(there))
    decoded = codec.decode(there, x.cuda()).cpu()
    moved = map_leaves(lambda t: t.cpu(), there)
    torch.testing.assert_close(codec.decode(moved, x), decoded, rtol=1e-5, atol=1e-5)
    lost, lost_here = (decoded - x).norm(), (codec.decode(here, x) - x).norm()
    share = 0.05 if codec.draws else 0.01  # each device draws its own numbers
    assert abs(lost - lost_here) <= share * lost_here + 1e-6 and (lost < x.norm() or lost_here >= x.norm())


def test_every_codec_is_among_them() -> None:
    assert set(CODECS) <= set(VARIANTS)


def test_a_group_of_nccl_carries_what_is_on_the_gpu() -> None:
    group = nccl_group(HashStore(), 0, 1, timeout_s=20.0)
    assert backend_of(group) == "nccl"
    x = torch.arange(5.0, device="cuda")
    work = group.allreduce([x])
    poll(work)
    assert work.is_completed() and x.tolist() == [0, 1, 2, 3, 4]


def test_the_default_group_of_both_backends_is_distinguished_by_its_devices(tmp_path) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        assert backend_of() == "gloo"
        x = torch.ones(3, device="cuda")
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_two_sites_of_fsdp2_with_nccl_inside_and_gloo_between_train_on_a_gpu(tmp_path) -> None:
    """The script of the page about two machines, in jobs of one process, as NCCL takes no two on one GPU."""
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "ethernet.md").read_text(encoding="utf-8")
    [script] = re.findall(r"```python title=\"train.py\"\n(.*?)```", page, re.DOTALL)
    for here, there in (
        ('init_process_group("gloo")', 'init_process_group("cuda:nccl,cpu:gloo")'),
        ('init_device_mesh("cpu", ', 'init_device_mesh("cuda", '),
        ("torch.nn.Linear(64, 1))", "torch.nn.Linear(64, 1)).cuda()"),
        ("generator=data)", "generator=data).cuda()"),
    ):
        assert script.count(here) == 1, here
        script = script.replace(here, there)
    (tmp_path / "train.py").write_text(script)
    first, *ports = [free_port() for _ in range(3)]
    sites = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port), str(tmp_path / "train.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "SITE": str(site),
                "FIRST": f"127.0.0.1:{first}",
                "GOSSAMER_SECRET": 2 * "of-one-test-of-two-sites",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": loopback(),
            },
        )
        for site, port in enumerate(ports)
    ]
    ends = [(one.communicate(timeout=150)[0], one.returncode) for one in sites]
    assert all(code == 0 and f"site {site}: 3 rounds, loss" in output for site, (output, code) in enumerate(ends)), ends


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiled", [False, True])
def test_real_and_simulated_workers_agree_in_micro_batches_that_are_long_enough_for_atomic_additions(
    compiled: bool, tmp_path: Path
) -> None:
    """From 3,073 tokens in a micro-batch on, torch would add up the gradient of an embedding of few rows in any order."""
    length = {"data__seq_len": 256, "data__batch_size": 16, "run__steps": 4, "run__timeout_s": 120.0}
    where = {"workers": 2, "run__device": "cuda", "run__backend": "gloo", "inner__compile": compiled}
    config = single(rule__name="diloco", topology__name="complete", **length, **where)
    (tmp_path / "run.toml").write_text(dump(config))
    code, output = run("train", tmp_path / "run.toml", "--local", 2, "--out", tmp_path / "real", "--quiet")
    assert code == 0, output
    code, output = run("simulate", tmp_path / "run.toml", "--out", tmp_path / "simulated", "--quiet")
    assert code == 0, output
    losses = [
        {(one["worker"], one["round"]): one["loss"] for one in read_metrics(tmp_path / name) if one["kind"] == "train"}
        for name in ("real", "simulated")
    ]
    assert losses[0] == losses[1] and losses[0]
    for worker in range(2):
        ours, theirs = (
            checkpoint.load(tmp_path / name / "checkpoints", config.length.rounds, worker, digest(config))["x"]
            for name in ("real", "simulated")
        )
        assert torch.equal(ours, theirs)
