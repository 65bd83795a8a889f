"""Resuming: behind rounds that are spoilt, with other settings, and with the command that started the run."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from commands import run
from gossamer.cli import main
from gossamer.errors import CheckpointError, ConfigError, DataError
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.folder import read_metrics
from gossamer.record.lineage import read_branches
from gossamer.record.logs.trace import read_trace
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.config.document import with_settings
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import RunConfig, digest, dump, parse
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import task_of
from gossamer.settings.schema import changeable
from tiny import document, single, tiny


def parameters(folder: Path, config: RunConfig, round: int | None = None) -> list[Tensor]:
    run = settings_of(config)
    key, task, store = lineage_of(run, folder), task_of(run), Store(run, folder)
    return [store.load(task, round or run.rounds, w, key)["x"] for w in range(run.workers)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def flip(path: Path) -> None:
    """Changes one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def poisoned(folder: Path, round: int, worker: int, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves this round of a worker again with a NaN in it, as versions without the check did."""
    state = checkpoint.load(folder, round, worker, key)
    state["x"][7] = torch.nan
    with monkeypatch.context() as patch:
        patch.setattr("gossamer.record.checkpoint.check_finite", lambda tensors, whose: None)
        checkpoint.save(folder, round, worker, state, digest=key)


def test_a_resume_walks_back_over_rounds_that_are_spoilt_and_says_once_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = single(run__steps=6)
    whole = simulate(config, tmp_path / "whole")
    for kind in ("flipped", "not finite"):
        folder, store = tmp_path / kind, tmp_path / kind / "checkpoints"
        simulate(config, folder, until=2)
        if kind == "flipped":
            flip(store / "round-000002" / "worker-001.safetensors")
        else:
            poisoned(store, 2, 2, digest(config), monkeypatch)
        caplog.clear()
        assert simulate(config, folder, resume=True).loss == whole.loss
        assert same(parameters(folder, config), parameters(tmp_path / "whole", config))
        (output,) = [record.message for record in caplog.records if "skipped" in record.message]
        what = "worker-001.safetensors' has changed" if kind == "flipped" else "state.x of checkpoint file"
        assert output.startswith("round 2 is skipped: ") and what in output, output


def test_a_run_without_a_sound_round_is_refused_with_the_fault_of_each(tmp_path: Path) -> None:
    config = single(run__steps=4)
    simulate(config, tmp_path)
    for tensors in tmp_path.glob("checkpoints/*/worker-000.safetensors"):
        flip(tensors)
    for resume in (True, "auto"):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint of .* is sound for all 3 workers \(round 2: .*; round 1: .*--out"
        ):
            simulate(config, tmp_path, resume=resume)


def test_a_run_continues_with_another_learning_rate_and_its_folder_records_since_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = single(run__steps=12)
    folder, slower = tmp_path / "run", single(run__steps=12, inner__lr=1e-4, inner__clip=1.0)
    simulate(config, folder, until=3)
    words = ["simulate", "--resume", str(folder), "--set", "inner.lr=1e-4", "--set", "inner.clip=1.0"]
    assert main(words) == 0, capsys.readouterr()
    changes = {"inner.clip": [None, 1.0], "inner.lr": [0.001, 0.0001]}
    assert read_branches(folder) == [{"round": 3, "digest": digest(config), "changes": changes}]
    assert "inner.lr from 0.001 to 0.0001" in (folder / "report.html").read_text()
    assert lineage_of(settings_of(slower), folder)[:2] == Lineage(digest(slower), ((digest(config), 3),))[:2]
    assert evaluate(folder)[0] == 6
    # The same as a run whose settings were changed between two rounds, by hand.
    other = tmp_path / "other"
    simulate(config, other, until=3)
    assert simulate(slower, other, resume=True).loss == read_metrics(folder)[-1]["loss"]
    # Going back behind the branch, the new settings count from there.
    for round in (4, 5, 6):
        for file in folder.glob(f"checkpoints/round-{round:06}/*"):
            file.unlink()
    assert not any(folder.glob("checkpoints/round-000003/*"))  # no longer kept
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0


def test_a_branch_that_was_stopped_before_its_first_checkpoint_is_still_known(tmp_path: Path) -> None:
    config, slower, slowest = (single(run__steps=12, inner__lr=lr) for lr in (1e-3, 1e-4, 1e-5))
    for stop in ("at once", "later"):
        folder = tmp_path / stop
        simulate(config, folder, until=3)
        simulate(slower, folder, resume=True, until=4)
        if stop == "at once":
            for file in folder.glob("checkpoints/round-000004/*"):
                file.unlink()
        simulate(slowest, folder, resume=True)
        first, second = read_branches(folder)
        assert (first["round"], second["round"]) == ((3, 3) if stop == "at once" else (3, 4))
        assert second["digest"] == digest(slower)
    (folder / "branches.json").write_text('[{"round": -1}]')
    with pytest.raises(DataError, match=r"branches\.json: "):
        simulate(slowest, folder, resume=True)


def test_a_lineage_counts_earlier_settings_up_to_their_last_round() -> None:
    line = Lineage("now", (("old", 3),))
    assert line.owns("now", 9) and line.owns("old", 3) and not line.owns("old", 4) and not line.owns("else", 1)


@pytest.mark.full
@pytest.mark.parametrize("first", ["train", "simulate"])
def test_a_round_that_the_other_verb_trains_again_is_recorded_once(first: str, tmp_path: Path) -> None:
    config, folder = single(), tmp_path / "run"
    (tmp_path / "run.toml").write_text(dump(config))
    more = {"train": ["--local", 3], "simulate": []}
    second = "simulate" if first == "train" else "train"
    code, output = run(first, tmp_path / "run.toml", "--out", folder, *more[first])
    assert code == 0, output
    # As of one that was killed before it had saved: what it has recorded of its last rounds is trained again.
    shutil.rmtree(folder / "checkpoints" / f"round-{config.length.rounds:06}")
    code, output = run(second, "--resume", folder, *more[second])
    assert code == 0, output
    trained = [(line["round"], line["worker"]) for line in read_metrics(folder) if line["kind"] == "train"]
    assert trained == [(r, i) for r in range(config.length.rounds) for i in range(3)]
    assert len(read_trace(folder).compute_s) == config.length.rounds
    assert same(parameters(folder, config), parameters(simulated(tmp_path / "whole", config), config))


@pytest.mark.parametrize("kind", ["a server", "without waiting"])
def test_real_processes_refuse_to_continue_from_a_simulation_over_virtual_time(kind: str, tmp_path: Path) -> None:
    links = {"uplink_bps": 1e8, "downlink_bps": 1e8, "step_s": 0.1}
    settings = document(model__layers=1, run__checkpoint_every=1) | {"network": {"even": links}}
    more = {"server.name": "heloco"} if kind == "a server" else {"run.wait": False}
    config = parse(with_settings(settings, more))
    simulate(config, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / f"round-{config.length.rounds:06}")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    code, output = run("train", "--resume", tmp_path, "--local", 3)
    assert code == 2 and "of a simulation over virtual time" in output and "gossamer simulate --resume" in output, (
        output
    )
    assert "Traceback" not in output and (tmp_path / "metrics.jsonl").read_bytes() == before, output


def simulated(folder: Path, config: RunConfig) -> Path:
    simulate(config, folder)
    return folder


def test_more_steps_continue_where_a_run_had_ended_and_fewer_than_it_has_are_refused(tmp_path: Path) -> None:
    simulate(single(run__steps=4, inner__schedule="constant"), tmp_path)
    assert simulate(single(run__steps=8, inner__schedule="constant"), tmp_path, resume=True).tokens == 8 * 3 * 2 * 16
    whole = tmp_path / "whole"
    simulate(single(run__steps=8, inner__schedule="constant"), whole)
    config = single(run__steps=8, inner__schedule="constant")
    assert same(parameters(tmp_path, config), parameters(whole, config))
    with pytest.raises(ConfigError, match=r"run\.steps is 6, which ends the run after round 3, but it is at round 4"):
        simulate(single(run__steps=6, inner__schedule="constant"), tmp_path, resume=True)


@pytest.mark.parametrize(("schedule", "warned"), [("cosine", True), ("constant", False)])
def test_a_finished_run_that_gets_more_steps_says_where_its_learning_rate_goes(
    schedule: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"inner__schedule": schedule, "inner__warmup_steps": 0}
    simulate(single(run__steps=4, **settings), tmp_path)
    simulate(single(run__steps=8, **settings), tmp_path, resume=True)
    assert "run.steps from 4 to 8" in caplog.text
    assert (
        "continues at 0.00055, where it would have been 0.0001, as inner.schedule 'cosine'" in caplog.text
    ) == warned
    caplog.clear()
    simulate(single(run__steps=12, inner__lr=5e-4, **settings), tmp_path, resume=True)
    assert "the learning rate continues at" in caplog.text and "as inner.schedule" not in caplog.text


def test_a_run_that_gets_more_steps_says_where_the_cosine_of_its_outer_learning_rate_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = {"shape": "cosine", "to": 0.1}
    settings = {"inner__schedule": "constant", "inner__warmup_steps": 0, "rule__momentum": {**ends, "steps": 4}}
    simulate(single(run__steps=4, rule__lr=ends, **settings), tmp_path)
    simulate(single(run__steps=8, rule__lr=ends, **settings), tmp_path, resume=True)
    sentence = (
        "the cosine of rule.lr, which ends with the run, continues at 50% of it, where it would have been at 100%"
    )
    assert sentence in caplog.text and "cosine of rule.momentum" not in caplog.text, "its steps are its own"
    caplog.clear()
    simulate(single(run__steps=12, rule__lr=0.5, **settings), tmp_path, resume=True)
    assert "settings change" in caplog.text and "the cosine of" not in caplog.text, "it was given"


def test_keys_that_may_not_change_are_refused_with_those_that_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(single(run__steps=8), tmp_path / "run", until=2)
    for word in ("workers=4", "rule=diloco", "run.local_steps=4", "data.batch_size=3", "inner.weight_decay=0.2"):
        assert main(["train", "--resume", str(tmp_path / "run"), "--set", word]) == 2
        output = capsys.readouterr().err.splitlines()[-1]
        assert output.startswith("gossamer: ") and "but a resumed run keeps it; may change: " in output, output
        for key in ("inner.clip", "inner.lr", "run.steps", "run.eval_every", "network", "rule.lr"):
            assert key in output.partition("may change: ")[2]
    # The file of another run differs in the method first.
    assert main(["train", "--resume", str(tmp_path / "run"), "--set", "data.batch_size=3", "--set", "rule=diloco"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("gossamer: rule.name is 'gasloc'")
    assert not (tmp_path / "run" / "branches.json").exists()


def test_the_marks_of_the_schema_are_the_keys_that_may_change() -> None:
    keys = changeable(RunConfig)
    assert {"inner.lr", "run.steps", "rule.lr", "server.lr", "record", "network", "run.timeout_s"} <= {*keys}
    assert not {"seed", "workers", "run", "inner", "inner.betas", "run.local_steps", "rule"} & {*keys}


def test_auto_starts_resumes_or_says_that_the_run_has_ended(tmp_path: Path) -> None:
    config = single(run__steps=6, run__checkpoint_every=4)
    simulate(config, tmp_path / "whole")
    kept = ("kind", "round", "worker", "step", "loss", "tokens")
    for kill, until in {"nowhere": 0, "before a checkpoint": 1, "after some": 2, "at the end": 3}.items():
        if until:
            simulate(config, tmp_path / kill, until=until)
        simulate(config, tmp_path / kill, resume="auto")
        assert same(parameters(tmp_path / kill, config), parameters(tmp_path / "whole", config)), kill
        ours, theirs = (
            [{key: line.get(key) for key in kept} for line in read_metrics(tmp_path / name)] for name in (kill, "whole")
        )
        assert ours == theirs, kill


def test_auto_starts_again_when_some_never_had_a_checkpoint_and_not_when_one_has_lost_them(tmp_path: Path) -> None:
    config = single(run__steps=12)
    for until, restarts in ((1, True), (5, False)):
        folder = tmp_path / f"{until}"
        simulate(config, folder, until=until)
        for file in folder.glob("checkpoints/*/worker-001.*"):
            file.unlink()
        if restarts:
            simulate(config, folder, resume="auto", until=1)
        else:
            with pytest.raises(
                CheckpointError,
                match=r"for all 3 workers \(round 5: worker 1 has no checkpoint of it; round 4: .*; bring sound files back, or",
            ):
                simulate(config, folder, resume="auto")


def test_auto_of_an_asynchronous_simulation_continues_until_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"slow": {"step_s": 0.1, "uplink_bps": 1e8, "downlink_bps": 1e8}}
    config = single(server__name="cgad", network=slow, run__steps=4)
    whole = simulate(config, tmp_path, resume="auto").result
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-2]))  # as if killed before the end
    shutil.rmtree(max((tmp_path / "checkpoints").glob("round-*")))
    assert simulate(config, tmp_path, resume="auto").result == whole._replace(tokens_per_s=pytest.approx(0, abs=1e9))
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines)
    assert simulate(config, tmp_path, resume="auto").loss == whole.loss and "has ended" in capsys.readouterr().err


def test_auto_takes_a_run_file_and_changes_what_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    for settings, code in (({}, 0), ({"run__steps": 16}, 0), ({"seed": 7, "run__steps": 16}, 2)):
        file.write_text(tomli_w.dumps(document(**{"run__steps": 8, **settings})))
        assert main(["simulate", str(file), "--out", str(folder), "--resume", "auto"]) == code, capsys.readouterr()
    assert [(b["round"], b["changes"]) for b in read_branches(folder)] == [
        (4, {"inner.warmup_steps": [1, 2], "run.steps": [8, 16]})
    ]
    assert "seed is 0 in" in capsys.readouterr().err


def train_but_die_once(folder: str, *words: str) -> int:
    """`gossamer train`, in which process 1 is killed after its first checkpoint, when it is started for the first time."""

    def save(store: Path, finished: int, *state: Any, real: Any = checkpoint.save, **lineage: Any) -> None:
        real(store, finished, *state, **lineage)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        checkpoint.save = save
    if code := main(["train", *words, "--out", folder, "--resume", "auto"]):
        raise SystemExit(code)
    return code


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stages", [1, 2])
def test_torchrun_restarts_a_run_of_which_a_process_was_killed_to_the_same_bits(
    stages: int, tmp_path: Path, forks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent of torchrun, here; the processes that it starts are forks. Of two stages, process 1 is the second of worker 0."""
    cut = {"pipeline__stages": stages, "model__layers": stages, "data__accumulate": stages}
    config = tiny(workers=2, topology__name="complete", run__steps=6, run__timeout_s=60, **cut)
    (tmp_path / "run.toml").write_text(dump(config))
    folder = tmp_path / "run"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = LaunchConfig(
        1,
        1,
        2 * stages,
        run_id="restarted",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    assert elastic_launch(torchrun, train_but_die_once)(str(folder), str(tmp_path / "run.toml")) == dict.fromkeys(
        range(2 * stages), 0
    )
    assert "Signal 9" in caplog.text or "SIGKILL" in caplog.text or "exitcode: -9" in caplog.text
    simulate(config, tmp_path / "simulated")
    assert same(parameters(folder, config), parameters(tmp_path / "simulated", config))
    lines = map(json.loads, (folder / "metrics-001.jsonl").read_text().splitlines())
    assert [line["round"] for line in lines if line["kind"] == "train"] == [*range(config.length.rounds)]


@pytest.mark.full
def test_a_copy_of_a_trunk_anneals_to_the_bits_of_a_run_that_annealed_from_the_start(tmp_path: Path) -> None:
    trunk = single(inner__schedule="constant", inner__warmup_steps=2, run__steps=8)
    simulate(trunk, tmp_path / "trunk")
    shutil.copytree(tmp_path / "trunk", tmp_path / "branch")
    annealed = ["--set", "inner.schedule=wsd", "--set", "run.steps=10", "--quiet"]  # the last fifth decays
    assert main(["simulate", "--resume", str(tmp_path / "branch"), *annealed]) == 0
    whole = single(inner__schedule="wsd", inner__warmup_steps=2, run__steps=10)
    simulate(whole, tmp_path / "whole")
    assert same(parameters(tmp_path / "branch", whole), parameters(tmp_path / "whole", whole))
    simulate(single(inner__schedule="constant", inner__warmup_steps=2, run__steps=12), tmp_path / "trunk", resume=True)
    on = simulate(single(inner__schedule="constant", inner__warmup_steps=2, run__steps=12), tmp_path / "at once")
    assert on.loss == read_metrics(tmp_path / "trunk")[-1]["loss"], "the trunk continues as if nobody had copied it"


def test_a_simulation_whose_first_checkpoint_is_of_some_workers_is_started_again_as_its_sentence_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    simulate(single(run__steps=4, run__checkpoint_every=2), folder, until=1)
    for path in (folder / "checkpoints").glob("round-*/worker-00[12].*"):  # as of a disk that was full
        path.unlink()
    assert main(["simulate", "--resume", str(folder)]) == 2
    output = capsys.readouterr().err
    again = f"gossamer simulate {folder / 'run.toml'} --out {folder} --resume auto"
    assert f"start it again there with {again}" in output and "elastic" not in output, output
    assert main([*again.split()[1:], "--quiet"]) == 0
