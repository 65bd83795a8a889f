"""Every boundary codec under every schedule of a pipeline: two processes have the bits of the virtual pipeline."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.boundaries import BOUNDARIES
from gossamer.record.folder import read_metrics
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import parse
from gossamer.run.simulated.simulate import simulate
from gossamer.run.synchronous.train import train_member
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import task_of
from gossamer.transport.processes.launch import join, leave
from gossamer.transport.processes.local import run_local
from gossamer.transport.processes.member import Member
from tiny import document, tiny

Case = tuple[str, str, str]
"""A schedule, and the codecs forward and backward."""

TIMEOUT_S = 60
SCHEDULES = ("gpipe", "1f1b", "interleaved")
COVER: tuple[Case, ...] = (
    ("gpipe", "aqsgd", "tahquant"),
    ("gpipe", "projection", "cast"),
    ("gpipe", "intk", "dense"),
    ("1f1b", "aqsgd", "cast"),
    ("1f1b", "tahquant", "projection"),
    ("1f1b", "dense", "intk"),
    ("interleaved", "aqsgd", "projection"),
    ("interleaved", "tahquant", "intk"),
    ("interleaved", "cast", "dense"),
)
"""Each schedule with each codec in one of its directions."""
PRODUCT: tuple[Case, ...] = tuple(
    (schedule, there, back)
    for schedule, there, back in itertools.product(SCHEDULES, BOUNDARIES, BOUNDARIES)
    if not BOUNDARIES[back]().remembers
)
OPTIONS = {"tahquant": {"tile": 32}}  # the hidden size is 32


def settings(case: Case) -> dict[str, Any]:
    """The run of a case: one worker in two stages, which take two inner steps and see some samples twice."""
    schedule, *codecs = case
    made: dict[str, Any] = {
        "workers": 1,
        "rule": {"name": "diloco"},
        "topology": {"name": "complete"},
        "model__layers": 2,
        "data__accumulate": 4,
        "data__windows": 5,
        "run__steps": 2,
        "run__eval_every": 0,
        "run__timeout_s": TIMEOUT_S,
        "pipeline__stages": 2,
        "pipeline__schedule": schedule,
    }
    if schedule == "interleaved":
        made |= {"pipeline__chunks": 2, "model__layers": 4}
    for direction, name in zip(("forward", "backward"), codecs, strict=True):
        made[f"pipeline__{direction}"] = {"name": name, **OPTIONS.get(name, {})}
    return made


def train_all(argv: list[str]) -> int:
    """One of two processes, the stages of one worker in every case."""
    first = join(2, backend="gloo", device="cpu", threads=1, timeout_s=TIMEOUT_S)
    for folder, made in json.loads(Path(argv[0]).read_text()):
        config = parse(made)
        store = PrefixStore(folder, first.store)
        member = Member.at(first.rank, 1, torch.device("cpu"), store, config.pipeline.processes(1))
        train_member(resolve(config, real=True), Path(folder), member)
        dist.barrier()
    leave()
    return 0


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> tuple[Case, ...]:
    """All pairs of codecs, or in CI those in which each codec meets each schedule."""
    return PRODUCT if request.config.getoption("--full") else COVER


def test_in_ci_each_codec_meets_each_schedule() -> None:
    assert {*COVER} <= {*PRODUCT}
    for schedule in SCHEDULES:
        met = [name for case in COVER if case[0] == schedule for name in case[1:]]
        assert sorted(met) == sorted(BOUNDARIES)


def test_two_processes_have_the_bits_and_the_bytes_of_the_virtual_pipeline_with_each_codec_and_schedule(
    cases: tuple[Case, ...], tmp_path: Path, forks: None
) -> None:
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    plan = [(str(real / "-".join(case)), document(**settings(case))) for case in cases]
    (tmp_path / "cases.json").write_text(json.dumps(plan))
    assert run_local(1, train_all, [str(tmp_path / "cases.json")], parts=2) == 0
    for case in cases:
        config = tiny(**settings(case))
        run = settings_of(config)
        simulate(config, simulated / "-".join(case))
        found: list[tuple[torch.Tensor, Any]] = []
        for folder in (real / "-".join(case), simulated / "-".join(case)):
            x = Store(run, folder).load(task_of(run), run.rounds, 0, lineage_of(run, folder))["x"]
            lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
            found.append((x, [(line["loss"], line["boundary_bytes"]) for line in lines]))
        (x, crossed), (expected, bytes_) = found
        assert torch.equal(x, expected) and crossed == bytes_ and crossed, case
