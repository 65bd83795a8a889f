"""Pipelines of real processes: each stage of a worker its own, and the bits of the simulator's virtual pipeline."""

import contextlib
import inspect
import io
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_flat import in_ci_or_not
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from commands import must_have_stages_in_processes, run
from gossamer.boundaries import aqsgd, tahquant
from gossamer.boundaries.ends import BoundaryEnd
from gossamer.cli import main
from gossamer.errors import TrainingError
from gossamer.models import ModelConfig, build_model
from gossamer.models.stages import OwnLayers
from gossamer.optimizers import Joined
from gossamer.optimizers.inner import InnerConfig, build_optimizer
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.pipeline_work import read_pipeline
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.logs.stage_seconds import end_logs_of_others, read_stages
from gossamer.record.logs.trace import read_trace
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.bookkeeping.which_round import lost_stages
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import dump, parse
from gossamer.run.simulated.simulate import simulate
from gossamer.run.synchronous.train import train_member
from gossamer.run.worker.stages.checkpoints import WHOLE, Store, joined_state, partition_of, state_of_part
from gossamer.run.worker.stages.in_one_process import StagedModel
from gossamer.run.worker.stages.torch_stage import BoundaryStage
from gossamer.run.worker.task import task_of
from gossamer.transport.processes.launch import join, leave
from gossamer.transport.processes.local import run_local
from gossamer.transport.processes.member import Member
from tiny import preset as tiny
from tiny import preset_document as document

TIMEOUT_S = 60
TWO = {"workers": 2, "pipeline__stages": 2, "data__accumulate": 4, "run__steps": 4, "run__timeout_s": TIMEOUT_S}
CASES = {
    "dense, gpipe": {**TWO, "record__export": True},
    "tahquant and intk, 1f1b, clipped": {
        **TWO,
        "pipeline__schedule": "1f1b",
        "pipeline__forward": "tahquant",
        "pipeline__backward": "intk",
        "inner__clip": 0.5,
        "inner__optimizer": "muon",
        "data__accumulate": 3,
        "model__layers": 4,
        "schedule__fragments": 2,
        "schedule__overlap_steps": 1,
    },
    "aqsgd, resumed": {
        **TWO,
        "pipeline__forward": "aqsgd",
        "pipeline__backward": {"name": "intk", "bits": 8},
        "data__windows": 5,
        "pipeline__schedule": "1f1b",
    },
    "interleaved, tahquant and cast": {
        **TWO,
        "pipeline__schedule": "interleaved",
        "pipeline__chunks": 2,
        "model__layers": 4,
        "inner__clip": 0.5,
        "pipeline__forward": "tahquant",
        "pipeline__backward": "cast",
        "rule": {"name": "diloco"},
        "topology": {"name": "complete"},
        "codec": {"name": "int4", "rounding": "stochastic"},
        "model__bottleneck": {"name": "resbm", "width": 64, "cuts": [1, 2, 3]},
    },
    "four stages of one worker": {
        "workers": 1,
        "pipeline__stages": 4,
        "model__layers": 4,
        "data__accumulate": 5,
        "pipeline__forward": "cast",
        "pipeline__backward": "intk",
        "run__steps": 4,
        "pipeline__schedule": "1f1b",
        "inner__clip": 0.5,
        "rule": {"name": "diloco"},
        "topology": {"name": "complete"},
    },
    "gradients, clipped, of projections": {
        **TWO,
        "rule": {"name": "data_parallel"},
        "topology": {"name": "complete"},
        "run__local_steps": 1,
        "run__steps": 2,
        "inner__clip": 0.05,
        "pipeline__forward": {"name": "projection", "width": 8},
        "pipeline__backward": "cast",
    },
    "stages that are laid otherwise": {
        **TWO,
        "model__layers": 4,
        "pipeline__schedule": "interleaved",
        "pipeline__chunks": 2,
        "pipeline__forward": "aqsgd",
        "data__windows": 5,
        "inner__optimizer": "muon",
        "inner__averaging": "schedule_free",
        "rule": {"name": "sparseloco"},
        "codec": {"name": "topk2bit", "k": 16},
        "topology": {"name": "complete"},
    },
    "more stages than a simulation had": {
        "workers": 1,
        "pipeline__stages": 2,
        "model__layers": 4,
        "data__accumulate": 4,
        "run__steps": 4,
        "pipeline__forward": "aqsgd",
        "data__windows": 5,
        "rule": {"name": "diloco"},
        "topology": {"name": "complete"},
    },
    "an average, a bottleneck in bf16": {
        **TWO,
        "inner__averaging": "gpa",
        "inner__autocast": "bf16",
        "run__steps": 4,
        "codec": {"name": "bf16"},
        "model__bottleneck": {"name": "subspace", "width": 8},
        "pipeline__forward": "cast",
    },
}

SOME = {**TWO, "workers": 3, "model__layers": 2, "data__accumulate": 3}
MIXED = {
    "narrow, of a sparse mean, resumed": {
        **SOME,
        "pipeline__workers": [2],
        "rule": {"name": "sparseloco"},
        "topology": {"name": "complete"},
        "codec": {"name": "topk2bit", "k": 16},
        "pipeline__forward": {"name": "projection", "width": 8},
        "pipeline__backward": {"name": "projection", "width": 8},
    },
    "a mean through owners, clipped": {
        **SOME,
        "pipeline__workers": [0],
        "rule": {"name": "diloco"},
        "topology": {"name": "complete"},
        "inner__clip": 0.5,
        "pipeline__forward": "aqsgd",
        "data__windows": 5,
        "inner__optimizer": "muon",
        "pipeline__schedule": "1f1b",
    },
    "gossip of fragments that overlap": {
        **SOME,
        "pipeline__workers": [0],
        "topology": {"name": "ring"},
        "model__layers": 4,
        "schedule__fragments": 2,
        "schedule__overlap_steps": 1,
        "codec": {"name": "int8", "rounding": "stochastic"},
        "pipeline__forward": "tahquant",
        "pipeline__backward": "intk",
    },
    "one that is laid otherwise, with a memory": {
        **SOME,
        "model__layers": 4,
        "pipeline__workers": [2],
        "pipeline__cuts": [1],
        "pipeline__forward": "aqsgd",
        "data__windows": 5,
        "codec__name": "int8",
        "schedule__overlap_steps": 1,
        "inner__optimizer": "muon",
    },
}
"""Runs of three workers, one of which is in two stages: four processes.

Not worker 1: its processes have taken part in different earlier cases, and torch names a group by how many a process has.
"""
LATER = {
    "narrow, of a sparse mean, resumed": {},
    "gossip of fragments that overlap": {"pipeline__schedule": "1f1b"},
    "aqsgd, resumed": {},
    "stages that are laid otherwise": {
        "pipeline__schedule": "1f1b",
        "pipeline__chunks": 1,
        "pipeline__cuts": [3],
        "pipeline__backward": "intk",
    },
    "more stages than a simulation had": {"pipeline__stages": 4},
    "four stages of one worker": {"pipeline__lost": [{"worker": 0, "stage": 2, "after": 1}]},
    "one that is laid otherwise, with a memory": {"pipeline__cuts": [3]},
}
"""What is set when the last round is trained again; a stage that is lost has no checkpoint then."""
LAST = {name: {**case, **LATER.get(name, {})} for name, case in {**CASES, **MIXED}.items()}
NEEDED = ("dense, gpipe", "aqsgd, resumed")
"""Those of which more than their own tests want to know something."""
BEYOND_CI = (
    "tahquant and intk, 1f1b, clipped",
    "more stages than a simulation had",
    "an average, a bottleneck in bf16",
    "a mean through owners, clipped",
    "one that is laid otherwise, with a memory",
)
"""What others do most of: each case takes seconds of CPU."""

DIVERGING = {
    "workers": 1,
    "pipeline__stages": 4,
    "model__layers": 4,
    "data__accumulate": 4,
    "rule": {"name": "diloco"},
    "topology": {"name": "complete"},
    "inner__lr": 1e15,
    "inner__warmup_steps": 0,
}


def train_pipelines(argv):
    """One of four processes, which train every case, one after the other."""
    cases = json.loads(Path(argv[0]).read_text())
    first = join(4, backend="gloo", device="cpu", threads=1, timeout_s=TIMEOUT_S)
    for folder, turns in cases:
        root = Path(folder)
        for turn, made in enumerate(turns):
            config = parse(made)
            resume = turn > 0 or (root / "run.toml").exists()
            member = Member.at(
                first.rank,
                config.workers,
                torch.device("cpu"),
                PrefixStore(f"{folder}{turn}", first.store),
                config.pipeline.processes(config.workers),
            )
            try:
                train_member(resolve(config, real=True), root, member, resume=resume)
            except TrainingError as error:
                (root / f"said-{member.part}").write_text(str(error))
            dist.barrier()
            if turn + 1 < len(turns) and member.part:  # the newest round that all have is the one before
                lost = any(one.stage == member.part for one in parse(turns[turn + 1]).pipeline.lost)
                for saved in (root / "checkpoints").glob(f"stage-{member.part}-*"):
                    checkpoint.rewind(saved, -1 if lost else config.length.rounds - 1, member.worker)
            dist.barrier()
    leave()
    return 0


@pytest.fixture(scope="module")
def trained(looked_at, tmp_path_factory, forks):
    """Every case that is looked at, trained by processes and by the simulator."""
    must_have_stages_in_processes()
    root = tmp_path_factory.mktemp("stages")
    cases = {name: case for name, case in {**CASES, **MIXED}.items() if name in looked_at or name in NEEDED}
    plan = [(str(root / "diverging"), [document(**DIVERGING)])]
    for name, case in cases.items():
        turns = [document(**case), document(**LAST[name])] if name in LATER else [document(**case)]
        if sum(tiny(**case).pipeline.processes(case["workers"])) < 4:
            simulate(tiny(**case), root / "real" / name, until=tiny(**case).length.rounds - 1)
            turns = turns[1:]
        plan.append((str(root / "real" / name), turns))
    (root / "cases.json").write_text(json.dumps(plan))
    assert run_local(2, train_pipelines, [str(root / "cases.json")], parts=2) == 0
    for name, case in cases.items():
        if LATER.get(name):
            simulate(tiny(**case), root / "simulated" / name, until=tiny(**case).length.rounds - 1)
        simulate(tiny(**LAST[name]), root / "simulated" / name, resume=bool(LATER.get(name)))
    return root


def test_when_a_loss_is_not_finite_all_stages_end_with_the_same_sentence(trained):
    text = [(trained / "diverging" / f"said-{part}").read_text() for part in range(4)]
    assert len({*text}) == 1 and re.match("the loss of worker 0 became (nan|inf) at its inner step", text[0])


def parameters(config, folder):
    """Those of each worker after the last round."""
    task, line = task_of(settings_of(config)), lineage_of(settings_of(config), folder)
    return [
        Store(settings_of(config), folder).load(task, config.length.rounds, w, line)["x"] for w in range(config.workers)
    ]


def lines_of(folder, kind, *names):
    return {
        (line["round"], line["worker"]): [line[name] for name in names]
        for line in read_metrics(folder)
        if line["kind"] == kind
    }


def scored_in(folder, first=-1):
    """The validation loss of each worker of a simulation, after each round that has one, from the first on."""
    return {
        (line["round"], worker): [loss]
        for line in read_metrics(folder)
        if line["kind"] == "eval" and line["round"] >= first
        for worker, loss in enumerate(line["worker_losses"])
    }


@pytest.mark.parametrize("name", in_ci_or_not(*CASES, beyond=BEYOND_CI))
def test_a_pipeline_of_processes_has_the_bits_and_the_bytes_of_the_virtual_one(trained, name):
    config, real, simulated = tiny(**LAST[name]), trained / "real" / name, trained / "simulated" / name
    assert len([*(real / "checkpoints").glob("stage-*")]) == config.pipeline.stages
    assert not [*(real / "checkpoints").glob("round-*")] and not [*(simulated / "checkpoints").glob("stage-*")]
    assert all(map(torch.equal, parameters(config, real), parameters(config, simulated)))
    own = lines_of(real, "train", "loss", "lr", "tokens", "boundary_bytes")
    assert own == lines_of(simulated, "train", "loss", "lr", "tokens", "boundary_bytes") and own


@pytest.mark.full
@pytest.mark.timeout(900)  # a busy machine compiles for minutes
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks, and hides its input
def test_compiled_stages_of_processes_have_the_bits_of_those_in_one(tmp_path):
    must_have_stages_in_processes()
    options = {
        **TWO,
        "inner__compile": True,
        "inner__autocast": "bf16",
        "inner__clip": 0.5,
        "pipeline__forward": "tahquant",
        "pipeline__backward": "intk",
        "pipeline__schedule": "1f1b",
        "run__eval_every": 0,
        "run__timeout_s": 300,
    }
    config, plain = tiny(**options), tiny(**{**options, "inner__compile": False})
    (tmp_path / "run.toml").write_text(dump(config))
    code, output = run("train", tmp_path / "run.toml", "--local", 2, "--out", tmp_path / "real")
    assert code == 0, output
    simulate(config, tmp_path / "simulated")
    simulate(plain, tmp_path / "plain")
    ours, theirs = (parameters(config, tmp_path / name) for name in ("real", "simulated"))
    assert all(map(torch.equal, ours, theirs))
    for compiled, eager in zip(theirs, parameters(plain, tmp_path / "plain"), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=4e-3)  # some steps of Adam
        assert not torch.equal(compiled, eager)


@pytest.mark.parametrize("name", in_ci_or_not(*MIXED, beyond=BEYOND_CI))
def test_workers_in_stages_and_whole_ones_have_the_bits_and_the_bytes_that_they_have_in_a_simulation(trained, name):
    config, real, simulated = tiny(**LAST[name]), trained / "real" / name, trained / "simulated" / name
    assert all(map(torch.equal, parameters(config, real), parameters(config, simulated)))
    own = lines_of(real, "train", "loss", "lr", "tokens")
    assert own == lines_of(simulated, "train", "loss", "lr", "tokens") and own
    (cut,) = config.pipeline.workers or ()
    assert {one.worker for one in read_stages(real)} == {cut}
    crossed, sent = [], []
    for place in (real, simulated):
        lines = [
            line
            for line in read_metrics(place)
            if line["kind"] == "train" and line["round"] == config.length.rounds - 1
        ]
        crossed.append({line["worker"]: line.get("boundary_bytes") for line in lines})
        sent.append(read_trace(place).sent_bytes.sum())
    assert crossed[0] == crossed[1] and [worker for worker, sizes in crossed[0].items() if sizes] == [cut]
    assert sent[0] == sent[1]
    assert read_pipeline(real) == read_pipeline(simulated) is not None, "both are priced alike"
    assert lines_of(real, "validation", "loss") == scored_in(simulated)


@pytest.mark.parametrize("name", in_ci_or_not(*CASES, beyond=BEYOND_CI))
def test_validation_through_the_stages_is_that_of_the_whole_model_and_leaves_the_memories_of_codecs_alone(
    trained, name
):
    found = lines_of(trained / "real" / name, "validation", "loss")
    case = tiny(**CASES[name])
    first = 0 if case.pipeline.stages * case.workers < 4 else -1  # a simulation began it, and validated the mean model
    assert found == scored_in(trained / "simulated" / name, first) and found


@pytest.mark.full
def test_the_trace_has_the_messages_of_a_worker_once_and_a_line_of_each_stage_says_what_it_did(trained):
    name = "dense, gpipe"
    config, real = tiny(**CASES[name]), trained / "real" / name
    trace = read_trace(real)
    for ours, theirs in zip(trace.messages, read_trace(trained / "simulated" / name).messages, strict=True):
        assert (ours == theirs).all()
    lines = [*read_stages(real)]
    assert sorted((one.round, one.worker, one.stage) for one in lines) == [
        (r, w, s) for r in range(config.length.rounds) for w in range(2) for s in range(2)
    ]
    crossed = 2 * 4 * 4 * 2 * 16 * 64  # steps of a round, micro-batches, bytes of an element, B, S, D
    assert {(one.stage, one.forward_bytes, one.backward_bytes) for one in lines} == {(0, crossed, 0), (1, 0, crossed)}
    assert all(one.compute_s > 0 and one.wait_s > 0 and one.outer_bytes for one in lines)
    first = {(one.round, one.worker): one for one in lines if one.stage == 0}
    for one in read_seconds(real):
        whole_s = trace.compute_s[one.round, one.worker]
        assert first[one.round, one.worker].compute_s <= one.compute_s < whole_s, "a wait for a stage is no computing"


def test_the_logs_of_stages_that_are_no_more_end_before_the_round_that_is_trained_again(tmp_path):
    for part in range(3):
        (tmp_path / f"stages-001-{part}.jsonl").write_text("".join(json.dumps({"round": r}) + "\n" for r in range(4)))
    end_logs_of_others(tmp_path, 1, 2, 3)
    assert [len((tmp_path / f"stages-001-{part}.jsonl").read_text().splitlines()) for part in range(3)] == [4, 4, 3]
    end_logs_of_others(tmp_path, 1, 1, 2)
    assert [len((tmp_path / f"stages-001-{part}.jsonl").read_text().splitlines()) for part in range(3)] == [2, 2, 2]


def test_evaluate_puts_each_worker_together_from_its_stages(trained):
    name = "dense, gpipe"
    found = evaluate(trained / "real" / name)
    scored = [line for line in read_metrics(trained / "simulated" / name) if line["kind"] == "eval"][-1]
    assert (found.result.loss, [*found.result.worker_losses]) == (scored["loss"], scored["worker_losses"])
    model = "model/model.safetensors"
    assert (trained / "real" / name / model).read_bytes() == (trained / "simulated" / name / model).read_bytes()


def test_a_simulation_resumes_from_checkpoints_of_stages(trained, tmp_path):
    name = "aqsgd, resumed"
    longer = tiny(**{**CASES[name], "run__steps": 6, "pipeline__cuts": [1]})
    for kind in ("real", "simulated"):
        shutil.copytree(trained / kind / name, tmp_path / kind)
        simulate(longer, tmp_path / kind, resume=True)
        assert not [*(tmp_path / kind / "checkpoints").glob("stage-*")]
    assert all(map(torch.equal, parameters(longer, tmp_path / "real"), parameters(longer, tmp_path / "simulated")))


INNER = {
    "accum_adamw": {"inner__optimizer": "accum_adamw"},
    "muon, gpa": {"inner__optimizer": "muon", "inner__averaging": "gpa"},
    "spectral_muon, schedule_free": {"inner__optimizer": "spectral_muon", "inner__averaging": "schedule_free"},
    "adamw, fragments": {"schedule__fragments": 2},
    "sgd, a rule that remembers": {"inner__optimizer": "sgd", "rule": {"name": "gasloc", "momentum": 0.9}},
}


def alike(one, other):
    """Whether two states are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", INNER)
def test_a_state_that_is_cut_into_stages_and_joined_is_what_it_was(name, tmp_path):
    run = tiny(
        **{**TWO, "model__layers": 4, "data__accumulate": 2, "run__steps": 2, "run__eval_every": 0, **INNER[name]}
    )
    simulate(run, tmp_path / "run")
    config = settings_of(run)
    task, line = task_of(config), checkpoint.Lineage(config.digest)
    whole = Store(config, tmp_path / "run").load(task, 1, 1, line)
    last = config.schedule.fragments - 1
    sent = whole["x"] * 2 if last == 0 else whole["outer"][-1] * 2
    whole["under_way"] = [{"round": 0, "fragment": last, "sent": [sent]}]
    model = task.model()
    # With chunks, a stage would have no layer of some fragment.
    for cut in ({}, {"pipeline__schedule": "interleaved", "pipeline__chunks": 2})[: 2 - last]:
        there = partition_of(settings_of(tiny(**{**TWO, "model__layers": 4, **cut})), 0)
        parts = [state_of_part(config, model, there, part, whole) for part in range(2)]
        assert sum(part["x"].numel() for part in parts) == whole["x"].numel() and alike(whole["data"], parts[0]["data"])
        assert sum(part["under_way"][0]["sent"][0].numel() for part in parts) == sent.numel()
        assert alike(joined_state(config, model, there, parts), whole)
    assert alike(joined_state(config, model, WHOLE, [whole]), whole)


@pytest.mark.parametrize("cuts", [[1], [3], [1, 2, 3]])
def test_any_split_gives_the_same_gradient_in_double_precision(cuts):
    def gradients(**more):
        config = settings_of(tiny(workers=1, model__layers=4, data__accumulate=4, **more))
        task = task_of(config)
        replica = StagedModel(task.model().double(), config)
        replica.backward([(task.data.batch(0, k), [2 * k, 2 * k + 1]) for k in range(4)])
        return [p.grad for p in replica.model.parameters()]

    one = gradients(pipeline__stages=2)
    other = gradients(pipeline__stages=len(cuts) + 1, pipeline__cuts=cuts)
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(one, other, strict=True))


def train_to_its_end(argv):
    """`gossamer train`, in which stage 1 of worker 0 is killed when it has saved its first checkpoint."""

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        real(store, finished, *state, **lineage)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        checkpoint.save = save
    return main(argv)


def test_when_a_stage_dies_all_processes_end_and_name_it_and_its_worker(tmp_path, forks):
    must_have_stages_in_processes()
    config, errors = tiny(**CASES["dense, gpipe"]), io.StringIO()
    (tmp_path / "run.toml").write_text(dump(config))
    with contextlib.redirect_stderr(errors):
        code = run_local(
            2,
            train_to_its_end,
            ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")],
            parts=2,
            grace_s=30,
        )
    printed = [line for line in errors.getvalue().splitlines() if "closed its connection" in line]
    assert code == 128 + signal.SIGKILL
    assert sorted(line[:5] for line in printed) == ["[0.0]", "[1.0]", "[1.1]"], errors.getvalue()
    assert all("gossamer: stage 1 of worker 0 closed its connection in round" in line for line in printed)
    code, output = run("train", "--resume", tmp_path / "run", "--local", 2, "--set", "pipeline.cuts=[1]")
    assert code == 0 and output.count(": round 2 of 2  loss") == 1, output
    assert "settings change after round 1: pipeline.cuts from none to [1]" in output, output
    other = tiny(**CASES["dense, gpipe"], pipeline__cuts=[1])
    simulate(config, tmp_path / "simulated", until=1)
    simulate(other, tmp_path / "simulated", resume=True)
    assert all(map(torch.equal, parameters(other, tmp_path / "run"), parameters(other, tmp_path / "simulated")))


def lose_a_stage(argv):
    """`gossamer train`, in which stage 1 is killed once when all have saved, and nothing that it has saved is left."""

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        real(store, finished, *state, **lineage)
        if not (died := store.parent / "died").exists():
            while len([*store.parent.glob("stage-*/round-*/worker-*.json")]) < 3:
                time.sleep(0.01)
            died.touch()
            shutil.rmtree(store)
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK") == "1":
        checkpoint.save = save
    return main(argv)


def test_a_run_starts_again_without_a_stage_that_is_killed_and_continues_from_its_neighbours(
    tmp_path, forks, monkeypatch, caplog
):
    must_have_stages_in_processes()
    small = {**TWO, "workers": 1, "pipeline__stages": 3, "data__accumulate": 3}
    config = tiny(**small)
    (tmp_path / "run.toml").write_text(dump(config))
    monkeypatch.setattr("gossamer.cli.main", lose_a_stage)
    words = ("train", tmp_path / "run.toml", "--local", 1, "--out", tmp_path / "run", "--restarts")
    code, output = run(*words, 1)
    assert code == 0 and "a process was ended by signal 9; all 3 start again" in caplog.text, output
    assert "stage 1 of worker 0 was lost after round 1, and went on from the mean of its neighbours" in output
    other = tiny(**small, pipeline__lost=[{"worker": 0, "stage": 1, "after": 1}])
    simulate(other, tmp_path / "simulated")
    assert all(map(torch.equal, parameters(other, tmp_path / "run"), parameters(other, tmp_path / "simulated")))
    assert lost_stages(tmp_path / "run") == other.pipeline.lost
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in [*checkpoints.glob("stage-1-*"), *checkpoints.glob("stage-[02]-*/round-000001")]:
        shutil.rmtree(path)
    code, output = run("train", "--resume", tmp_path / "run", "--local", 1, "--set", "run.steps=6")
    again = "--set 'pipeline.lost=[{worker = 0, stage = 1, after = 1}, {worker = 0, stage = 1, after = 2}]'"
    assert code == 2 and "round 2: stage 1 of worker 0 has no checkpoint of it" in output and again in output, output
    code, output = run(*words[:2], "--restarts", 1)
    assert code == 2 and "--restarts is 1, and only who has started all processes" in output


def test_stages_as_a_word_of_a_command_cut_the_workers_of_a_file(tmp_path):
    (tmp_path / "run.toml").write_text(dump(tiny(data__accumulate=4)))
    code, output = run(
        "simulate", tmp_path / "run.toml", "--stages", 2, "--out", tmp_path / "run", "--set", "run.steps=2"
    )
    assert code == 0, output
    assert all(len(line["boundary_bytes"]) == 1 for line in read_metrics(tmp_path / "run") if line["kind"] == "train")
    code, output = run("check", tmp_path / "run.toml", "--stages", 5)
    assert code == 2 and "pipeline.stages is 5 and the model has 3 layers" in output
    code, output = run("train", tmp_path / "run.toml", "--stages", 2, "--local", 6)
    assert code == 2 and "--local 6 but the run file has workers = 3" in output


def test_what_is_private_in_the_pipelines_of_torch_is_as_it_was():
    must_have_stages_in_processes()
    ours = {name for name, one in vars(BoundaryStage).items() if inspect.isfunction(one)} - {"__init__"}
    assert len(ours) == 8
    for name in ours:
        assert [*inspect.signature(getattr(BoundaryStage, name)).parameters] == [
            *inspect.signature(getattr(PipelineStage, name)).parameters
        ], f"torch has changed {name}, which gossamer.run.worker.stages.torch_stage replaces"
    stage = inspect.getsource(inspect.getmodule(PipelineStage))
    for text in (
        "self.fwd_cache[fwd_chunk_id] = (\n            output_tuple,",
        "self.bwd_cache[bwd_chunk_id] = grads_input",
    ):
        assert text in stage, "torch has changed a cache that gossamer.run.worker.stages.torch_stage reads"
    for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        assert "scale_grads" in inspect.signature(kind).parameters


@pytest.mark.parametrize("forward", [tahquant, aqsgd])
def test_the_lengths_of_payloads_to_come_are_known_before_they_come_also_of_a_sample_that_comes_twice(forward):
    shape = (2, 16, 64)
    sender, receiver = BoundaryEnd(forward(), shape), BoundaryEnd(forward(), shape)
    batches = [[3, 4], [4, 4], [5, 5], [3, 6]]
    sizes = receiver.payload_bytes(batches)
    payloads = [sender.encode(torch.randn(shape), samples) for samples in batches]
    assert sizes == [None if sender.length_first else payload.numel() for payload in payloads]
    for payload, samples in zip(payloads, batches, strict=True):
        receiver.decode(payload, torch.empty(shape), samples)
    assert all(torch.equal(sender.memory[sample], receiver.memory[sample]) for sample in sender.memory)


def test_muon_takes_every_hidden_matrix_of_a_stage_whether_or_not_the_output_head_is_on_it():
    whole = build_model(ModelConfig(size="0.2m"), 256, 16, seed=0)
    shares = [
        build_optimizer(InnerConfig(optimizer="muon"), OwnLayers(whole, spans))
        for spans in ([(0, 1)], [(1, 2)], [(2, 3)])
    ]
    matrices = [p for share in shares for group in share.param_groups if "ns_steps" in group for p in group["params"]]
    joined = build_optimizer(InnerConfig(optimizer="muon"), whole)
    assert isinstance(joined, Joined)
    every = [p for group in joined.param_groups if "ns_steps" in group for p in group["params"]]
    assert {*map(id, matrices)} == {*map(id, every)} and len(matrices) == len(every) == 21
