"""Workers whose processes hold one model together (`run.shards`), beside the simulator, which has whole workers."""

import json
import os
import shutil

import pytest
import torch

from commands import Command, run, until
from gossamer.record import checkpoint
from gossamer.record.logs.trace import read_trace
from gossamer.run.config.resolve import document_faults
from gossamer.run.config.run_file import digest, dump
from gossamer.run.simulated.simulate import simulate
from tiny import DEVICE, document, tiny

TWO = {
    "workers": 2,
    "run__shards": 2,
    "data__accumulate": 2,
    "run__steps": 8,
    "run__timeout_s": 60,
    "model__layers": 1,
}
MEAN = {"rule": {"name": "diloco"}, "topology": {"name": "complete"}}
EQUAL = {
    "gossip, adamw": TWO,
    "a mean of fragments that overlap, sgd, tied": {
        **TWO,
        **MEAN,
        "model__layers": 2,
        "model__tie_embeddings": True,
        "schedule__fragments": 2,
        "schedule__overlap_steps": 1,
        "inner__optimizer": "sgd",
        "inner__lr": 0.01,
    },
    "a mean of casts that comes back in another": {**TWO, **MEAN, "codec": {"name": "bf16", "back": "fp16"}},
    "dropout in bf16, with a codec": {
        **TWO,
        "model__dropout": 0.1,
        "inner__autocast": "bf16",
        "codec": {"name": "bf16"},
        "inner__optimizer": "accum_adamw",
    },
}
CLOSE = {
    "clipped, and penalized by layer": (
        {**TWO, **MEAN, "rule__penalized": {}, "inner__clip": 0.3, "run__steps": 20},
        1e-6,
    ),
    "three uneven shards": (
        {
            **TWO,
            "run__shards": 3,
            "data__accumulate": 3,
            "model__hidden_size": 18,
            "model__intermediate_size": 37,
            "model__heads": 1,
            "model__kv_heads": 1,
            "run__steps": 4,
        },
        1e-6,
    ),
    "two micro-batches in each": ({**TWO, **MEAN, "data__accumulate": 4}, 1e-5),
}
"""With how far the parameters may be apart, beside their norm; AdamW divides the rounding of small gradients by their size."""
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="two shards on one GPU have no NCCL between them")


def trained(root, settings):
    """The run folders of real processes and of the simulation, and the run."""
    config = tiny(**settings)
    (root / "run.toml").write_text(dump(config))
    code, output = run("train", root / "run.toml", "--out", root / "real", "--local", config.workers)
    assert code == 0, output
    simulate(config, root / "simulated")
    return root / "real", root / "simulated", config


def saved(folder, config, worker):
    return checkpoint.load(folder / "checkpoints", config.length.rounds, worker, digest(config))


def tensors(value):
    """All tensors in a state, in an order of their own."""
    if isinstance(value, dict):
        return [t for key in sorted(value, key=str) for t in tensors(value[key])]
    if isinstance(value, list | tuple):
        return [t for one in value for t in tensors(one)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.fixture(scope="module")
def gossiped(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("shards"), EQUAL["gossip, adamw"])


def must_be_alike(real, simulated, config):
    for worker in range(config.workers):
        mine, theirs = (saved(folder, config, worker) for folder in (real, simulated))
        assert mine.keys() == theirs.keys() and len(tensors(mine)) == len(tensors(theirs))
        assert all(torch.equal(a, b) for a, b in zip(tensors(mine), tensors(theirs), strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in EQUAL if name != "gossip, adamw"])
def test_workers_in_two_shards_end_with_the_checkpoints_of_the_simulation(name, tmp_path):
    must_be_alike(*trained(tmp_path, EQUAL[name]))


def test_shards_that_gossip_end_with_the_checkpoints_losses_and_bytes_of_the_simulation(gossiped):
    real, simulated, config = gossiped
    must_be_alike(real, simulated, config)
    for ours, theirs in zip(read_trace(real).messages, read_trace(simulated).messages, strict=True):
        assert (ours == theirs).all()
    printed = [run("evaluate", folder, "--json") for folder in (real, simulated)]
    assert [code for code, _ in printed] == [0, 0]
    losses = [json.loads(output.splitlines()[-1])["loss"] for _, output in printed]
    assert losses[0] == losses[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CLOSE)
def test_where_sums_have_another_order_shards_end_within_rounding_of_the_simulation(name, tmp_path):
    settings, tolerance = CLOSE[name]
    real, simulated, config = trained(tmp_path, settings)
    for worker in range(config.workers):
        a, b = (saved(folder, config, worker)["x"] for folder in (real, simulated))
        assert torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(b)


@pytest.mark.parametrize("shards", [2, 1])
def test_a_run_in_shards_resumes_with_as_many_or_with_whole_workers(shards, gossiped, tmp_path):
    _, simulated, config = gossiped
    folder = shutil.copytree(gossiped[0], tmp_path / "again")
    for worker in range(config.workers):
        checkpoint.rewind(folder / "checkpoints", config.length.rounds - 1, worker)
    code, output = run("train", "--resume", folder, "--local", config.workers, "--shards", shards)
    assert code == 0, output
    must_be_alike(folder, simulated, config)


def test_when_one_shard_is_killed_the_run_ends_names_it_and_resumes_later(gossiped, tmp_path):
    _, simulated, config = gossiped
    slow = tiny(**TWO, run__pace_s=0.2)
    (tmp_path / "run.toml").write_text(dump(slow))
    command = Command("train", tmp_path / "run.toml", "--out", tmp_path / "real", "--local", 2)
    os.kill(command.processes(4)["1.1"], 0)
    one_of_each = [f"round-000001/worker-{i:03}.json" for i in range(2)]  # both have something to continue from
    saved = lambda: all((tmp_path / "real" / "checkpoints" / name).exists() for name in one_of_each)  # noqa: E731
    until(saved, command)
    os.kill(command.processes(4)["1.1"], 9)
    code, output = command.finish()
    assert code == 137 and "shard 1 of worker 1" in output, output
    code, output = run("train", "--resume", tmp_path / "real", "--local", 2, "--set", "run.pace_s=0")
    assert code == 0, output
    must_be_alike(tmp_path / "real", simulated, config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"data__accumulate": 3}, "data.accumulate is 3"),
        ({"run__elastic": True}, "run.elastic is true"),
        ({"run__adapt": True, "run__local_steps": 4}, "run.adapt is True"),
        ({"record__hash": True}, "record.hash is true"),
        ({"codec": {"name": "int8"}}, "codec 'int8' would cut"),
        ({**MEAN, "codec": {"name": "bf16", "back": "int8"}}, "codec 'bf16' with codec.back = 'int8' would cut"),
        ({"inner__optimizer": "muon"}, "inner.optimizer is 'muon'"),
        ({"inner__averaging": "gpa"}, "inner.averaging is 'gpa'"),
        ({"inner__compile": True}, "inner.compile is true"),
        ({"pipeline__stages": 2, "model__layers": 2}, "pipeline.stages is 2"),
        ({**MEAN, "run__reduction": "all_reduce"}, "reduction is 'all_reduce'"),
        ({**MEAN, "schedule__inner_every": [2, 2], "rule": {"name": "local_sgd"}}, "schedule.inner_every is [2, 2]"),
        (
            {**MEAN, "rule": {"name": "data_parallel"}, "run__local_steps": 1},
            "rule 'data_parallel' acts on gradients",
        ),
        ({"model__experts": {"count": 2}}, "the run has model.experts"),
    ],
)
def test_what_shards_cannot_do_is_refused_by_name_and_simulated_all_the_same(settings, expected):
    found = document_faults(document(**{**TWO, **settings}), real=True)
    assert any(expected in sentence for sentence in found), found
    assert not any("run.shards" in sentence for sentence in document_faults(document(**{**TWO, **settings})))
