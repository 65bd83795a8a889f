"""The outcomes of a comparison: a line for each run as it ends, which says by what it was computed and survives a stop."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import gossamer
from commands import until
from gossamer.cli import main
from gossamer.errors import DataError, TrainingError
from gossamer.record import origin as origins
from gossamer.report.results import PointResult, read_results, result_lines
from gossamer.report.table import summary_rows
from gossamer.run.config.experiment_file import Point, folder_name, points
from gossamer.run.config.run_file import digest
from gossamer.run.experiments import processes
from gossamer.run.experiments.compare import train_all
from gossamer.run.experiments.processes import RunEnd, RunPool
from gossamer.run.experiments.shared_start import shared_trunks
from gossamer.run.worker.replica import Replica
from tiny import PARAMETERS, document

RATES = {"fast": 1e6, "slow": 1e5}
"""Of an uplink, in bits a second."""
NETWORK = {"uplink_bps": 1e6, "downlink_bps": 1e6, "step_s": 1.0}
CHECKOUT = Path(gossamer.__file__).parents[2]


@pytest.mark.usefixtures("forks")
def test_a_comparison_that_is_stopped_keeps_the_line_of_each_run_that_ended_and_resumes_with_several_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"label": "pairs"}, {"label": "wild", "inner": {"optimizer": "sgd", "lr": 1e18, "warmup_steps": 0}}]
    asked = {"workers": 3, "run__steps": 4, "rule__momentum": 0.97, "model__layers": 1}
    runs = points(document(**asked, variant=rows), seeds=[3, 4])
    folders, file = {run.label: tmp_path / folder_name(run.label) for run in runs}, tmp_path / "outcomes.jsonl"
    ended: list[str] = []

    def stopped(run: Point, end: RunEnd) -> None:
        ended.append(run.label)
        assert (end.loss is None) == run.label.startswith("wild") == bool(end.error)
        if len(ended) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_all(runs, folders, file, began=lambda run: None, on_end=stopped)
    before = file.read_text()
    assert [(one.method, one.seed) for one in read_results(file)] == [("pairs", 3), ("wild", 3), ("pairs", 4)]
    file.write_text(before + before.splitlines()[0][:40])  # what a killed process leaves
    again: list[str] = []
    caplog.clear()
    found = train_all(
        runs,
        folders,
        file,
        jobs=2,
        resume=True,
        began=lambda run: None,
        on_end=lambda run, end: again.append(run.label),
    )
    assert sorted(again) == ["wild seed=3", "wild seed=4"], "runs that diverged have no last validation"
    assert caplog.text.count("predicted to lose consensus") == 1, (
        "what several runs in processes of their own warn of is shown once"
    )
    after = file.read_text().splitlines()
    assert after[:2] == before.splitlines()[::2] and len(after) == 4
    (other,) = points(document(**asked, variant=rows[:1]), seeds=[5])
    folder = {other.label: tmp_path / folder_name(other.label)}
    train_all([other], folder, file, began=lambda run: None, on_end=lambda run, end: None)
    assert file.read_text().splitlines()[:4] == after, "those of other seeds stay"
    for run in runs:
        line = found[run.label]
        assert line is not None and (here := line.origin) is not None
        assert here["digest"] == digest(run.config) and (here["seconds"] or 0) > 0
        assert here["versions"]["gossamer"] == gossamer.__version__ and here["versions"].keys() == {
            "python",
            "gossamer",
            "torch",
        }


def test_the_loss_of_a_run_that_diverged_is_not_that_of_a_validation_before_it(tmp_path: Path, capsys: Any) -> None:
    wild = {"label": "wild", "rule.lr": {"0": 0.7, "4": 1e30}}  # a finite validation after step 3, and none after
    sizes = {"workers": 2, "run__steps": 12, "run__local_steps": 1, "run__eval_every": 3, "model__layers": 1}
    sizes |= {"rule__name": "diloco", "rule__momentum": 0.5, "topology__name": "complete"}
    text = document(**sizes, variant=[{"label": "sound"}, wild], network={"wan": NETWORK})
    (tmp_path / "two.toml").write_text(tomli_w.dumps(text | {"figure": {"target": "sound"}}))
    for more in ([], ["--resume"]):
        out = tmp_path / "out"
        assert main(["compare", str(tmp_path / "two.toml"), "--seeds", "0,1", "--out", str(out), *more]) == 0
        printed = capsys.readouterr().out
        assert "wild: not finite over 2 seeds (not finite, not finite)" in printed and "sound: " in printed
        sound, wild_ones = (read_results(out / "outcomes.jsonl")[k : k + 2] for k in (0, 2))
        for one in wild_ones:
            assert one.row["loss"] is None and one.row["loss_of_workers"] is None and one.row["worst_loss"] is None
            for curve in (one.row["loss_at_round"], one.row["loss_at_bytes"], one.row["loss_at_s"]["wan"]):
                assert math.isnan(curve[-1][1]), "it ends where the run ended"
        assert all(one.row["loss"] is not None for one in sound)
        assert "| wild | 0 of 2 runs | –, – | – |" in (out / "figure.md").read_text()
        page = (out / "report.html").read_text()
        assert "sound ended with a validation loss of" in page and "1 more ended without a finite loss" in page
    (line,) = summary_rows({"wild": out / "wild-seed=0"}, None)
    assert (
        math.isnan(line["loss"]) and main(["report", str(out / "wild-seed=0"), "--out", str(tmp_path / "r.html")]) == 0
    )
    assert "not finite" in capsys.readouterr().out, "its folder alone shows it too"
    before = read_results(out / "outcomes.jsonl")
    assert main(["compare", str(tmp_path / "two.toml"), "--seeds", "1", "--out", str(out), "--resume"]) == 0
    after = read_results(out / "outcomes.jsonl")
    assert {(one.method, one.seed) for one in after} == {(one.method, one.seed) for one in before}, "of other seeds too"


def test_a_comparison_names_the_learning_rate_that_a_method_puts_in_the_place_of_that_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"workers": 2, "run__steps": 1, "run__local_steps": 1, "model__layers": 1, "inner__lr": 0.004}
    rows = [{"method": "demo"}, {"method": "distro", "inner.lr": 0.004}, {"method": "diloco"}]
    (tmp_path / "three.toml").write_text(tomli_w.dumps(document(**sizes, variant=rows)))
    assert main(["compare", str(tmp_path / "three.toml"), "--out", str(tmp_path / "out")]) == 0
    (sentence,) = (one.getMessage() for one in caplog.records if "of its method" in one.getMessage())
    assert sentence.startswith("variant 'demo' has inner.lr = 0.0004 of its method, and not 0.004 of the file;")
    assert "distro" not in sentence


@pytest.mark.usefixtures("forks")
def test_two_processes_train_one_run_after_the_other_with_the_losses_of_one_process(tmp_path: Path) -> None:
    runs = points(document(workers=2, run__steps=2, model__layers=1), seeds=range(5))

    def trained(jobs: int) -> tuple[dict[str, float | None], set[int]]:
        found: dict[str, float | None] = {}
        with RunPool(jobs) as apart:
            for run in runs:
                apart.add(run.label, run.config, tmp_path / f"{jobs}-{run.seed}")
            while apart.busy:
                found |= {label: end.loss for label, end in apart.ended()}
            processes = {child.pid for child in multiprocessing.active_children() if child.pid}
        assert not processes & {child.pid for child in multiprocessing.active_children()}, "they end with it"
        return found, processes

    (alone, none), (together, two) = trained(1), trained(2)
    assert alone == together and len(alone) == 5 and not none and len(two) == 2


@pytest.mark.full
@pytest.mark.parametrize("quiet", [True, False])
def test_the_processes_of_a_quiet_comparison_are_quiet_too(tmp_path: Path, quiet: bool) -> None:
    (tmp_path / "text.txt").write_text("All of it is one document of a text. " * 400)
    asked = document(workers=2, run__steps=2, model__layers=1, data__source=str(tmp_path / "text.txt"))
    (tmp_path / "two.toml").write_text(tomli_w.dumps(asked | {"variant": [{"label": "a"}]}))
    asking = ["compare", tmp_path / "two.toml", "--out", tmp_path / "out", "--seeds", "0,1", "--jobs", "2"]
    words = [sys.executable, "-m", "gossamer", *asking]
    done = subprocess.run(
        [*words, *(["--quiet"] if quiet else [])], check=True, capture_output=True, text=True, timeout=120
    )
    assert ("text of " not in done.stderr) == quiet, done.stderr


@pytest.mark.usefixtures("forks")
def test_a_process_of_a_run_that_is_killed_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (run,) = points(document(workers=2, run__steps=2000, model__layers=1), seeds=[0])

    def kill() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.05)
        for child in children:
            child.kill()

    with RunPool(2) as apart:
        apart.add(run.label, run.config, tmp_path / "run")
        threading.Thread(target=kill).start()
        with pytest.raises(TrainingError, match=r"exit code -9; if the machine .* lower --jobs"):
            apart.ended()


@pytest.mark.usefixtures("forks")
def test_a_run_that_ends_as_another_is_killed_is_handed_over_before_that_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its line a search would train it again."""
    (long,) = points(document(workers=2, run__steps=1_000_000, run__eval_every=0, model__layers=1), seeds=[0])
    (short,) = points(document(workers=2, run__steps=2, model__layers=1), seeds=[1])
    wait = processes.wait

    def until_both_have_ended(links: list[Any], timeout: float) -> list[Any]:
        wait(links[1:])
        apart._members[0].process.kill()
        return wait(links[:1]) + links[1:]

    monkeypatch.setattr(processes, "wait", until_both_have_ended)
    with RunPool(2) as apart:
        for run in (long, short):
            apart.add(run.label, run.config, tmp_path / str(run.seed))
        ((label, end),) = apart.ended()
        assert label == short.label and end.loss is not None and apart.busy
        with pytest.raises(TrainingError, match="exit code -9"):
            apart.ended()


@pytest.mark.usefixtures("forks")
def test_the_runs_in_progress_save_when_the_process_of_another_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = points(
        document(workers=2, run__steps=1_000_000, run__eval_every=0, run__checkpoint_every=1_000_000, model__layers=1),
        seeds=[0, 1],
    )

    def kill() -> None:
        until(lambda: all((tmp_path / str(run.seed) / "run.toml").exists() for run in runs))
        apart._members[0].process.kill()

    with RunPool(2) as apart:
        for run in runs:
            apart.add(run.label, run.config, tmp_path / str(run.seed))
        (killer := threading.Thread(target=kill)).start()
        with pytest.raises(TrainingError, match="exit code -9"):
            apart.ended()
        killer.join()
    assert [*(tmp_path / "1" / "checkpoints").iterdir()] and "save after their round: 1" in caplog.text


@pytest.mark.usefixtures("forks")
def test_a_run_in_progress_saves_where_the_next_one_has_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (long,) = points(
        document(workers=2, run__steps=1_000_000, run__eval_every=0, run__checkpoint_every=1_000_000, model__layers=1),
        seeds=[0],
    )
    short = points(document(workers=2, run__steps=2, model__layers=1), seeds=[1, 2])
    with RunPool(2) as apart:
        for run in (long, *short):
            apart.add(run.label, run.config, tmp_path / str(run.seed))
        assert [label for label, _ in apart.ended()] == [short[0].label]
        (idle,) = [member for member in apart._members if member.key is None]
        idle.process.kill()
        idle.process.join()
        until((tmp_path / "0" / "run.toml").exists)
        with pytest.raises(TrainingError, match="exit code -9"):
            apart.ended()
    assert [*(tmp_path / "0" / "checkpoints").iterdir()] and "save after their round: 1" in caplog.text


@pytest.mark.usefixtures("forks")
def test_a_run_under_way_ends_in_python_when_its_comparison_is_left(tmp_path: Path) -> None:
    (run,) = points(document(workers=2, run__steps=1_000_000, run__eval_every=0, model__layers=1), seeds=[0])
    children = list[Any]()

    def stop() -> None:
        while not (tmp_path / "run" / "run.toml").exists():
            time.sleep(0.05)
        children.extend(multiprocessing.active_children())
        os.kill(os.getpid(), signal.SIGINT)

    def compare() -> None:
        with RunPool(2) as apart:
            apart.add(run.label, run.config, tmp_path / "run")
            threading.Thread(target=stop).start()
            apart.ended()

    # torch's launcher, which another test of this process may have run, leaves a handler of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compare()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [child.exitcode for child in children] == [0], "killed, it would leave what torch's compiler holds"


ENDLESS = """
import multiprocessing, sys, threading, time
from pathlib import Path
from gossamer.run.config.experiment_file import points
from gossamer.run.experiments.processes import RunPool
from tiny import document

def tell():
    while not (Path(sys.argv[1]) / "run.toml").exists():
        time.sleep(0.05)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)

(run,) = points(document(workers=2, run__steps=1_000_000, run__eval_every=0, model__layers=1), seeds=[0])
with RunPool(2) as apart:
    apart.add("endless", run.config, Path(sys.argv[1]))
    threading.Thread(target=tell).start()
    apart.ended()
"""


@pytest.mark.full
def test_the_processes_of_a_comparison_that_is_killed_end_with_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", ENDLESS, tmp_path / "run"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as comparison:
        assert comparison.stdout is not None
        (pid,) = map(int, comparison.stdout.readline().split())
        comparison.kill()
    process, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 60
    while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_that_is_trained_again_loses_its_run_file_last_so_that_a_kill_amid_that_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = points({**document(run__steps=2), "variant": [{"label": "a"}]})
    folder, removed, unlink = tmp_path / "a", list[str](), os.unlink
    for name in ("run.toml", "a.jsonl", "z.jsonl", "checkpoints/round-000001/worker-000.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def noted(path: Any, *, dir_fd: int | None = None) -> None:
        removed.append(Path(path).name)
        unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patched, RunPool(1) as apart:
        patched.setattr(os, "unlink", noted)
        patched.setattr(
            "gossamer.run.experiments.processes.simulate_until_asked",
            lambda config, parts, folder, **_: folder.resolve(strict=True),
        )
        apart.add("a", one.config, folder)
        with pytest.raises(FileNotFoundError):
            apart.ended()
    assert {"a.jsonl", "z.jsonl", "worker-000.json"} == {*removed[:-1]} and removed[-1] == "run.toml"


def test_the_commit_is_that_of_the_checkout_and_that_of_an_installed_package_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins._commit.cache_clear()  # which another test may have asked before a commit
    at = origins.origin("", None)["commit"]
    if (CHECKOUT / ".git").exists():
        head = subprocess.run(["git", "-C", CHECKOUT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert at.removesuffix("+") == head.stdout.strip()
    else:
        assert at == ""
    installed = tmp_path / "lib" / "site-packages" / "gossamer" / "record" / "origin.py"
    monkeypatch.setattr(origins, "__file__", str(installed))
    origins._commit.cache_clear()
    assert origins.origin("", None)["commit"] == ""
    origins._commit.cache_clear()


def result(**row: Any) -> PointResult:
    return PointResult("a", {"rule": {"lr": 0.5}}, 2, {"method": "a", "loss": None, "loss_at_s": {}, **row}, None)


def test_outcomes_are_read_as_they_were_written_and_a_loss_that_was_not_finite_is_a_gap(tmp_path: Path) -> None:
    whole = result(loss=2.5, loss_at_s={"wan": [[1.0, 2.0]]}, loss_at_round=[[1, 2.0]])._replace(
        origin=origins.origin("d", 1.5)
    )
    file = tmp_path / "outcomes.jsonl"
    file.write_text(result_lines([whole, result(loss=math.nan, loss_at_s={"wan": [[1.0, math.nan]]})]))
    first, second = read_results(file)
    assert first._replace(row=None) == whole._replace(row=None)
    assert first.row["loss_at_s"] == {"wan": [(1.0, 2.0)]} and first.row["loss_at_round"] == [(1, 2.0)]
    ((x, y),) = second.row["loss_at_s"]["wan"]
    assert (x, second.row["loss"]) == (1.0, None) and math.isnan(y)
    file.write_text('{"method":"a"}\n')
    with pytest.raises(DataError, match=r"outcomes\.jsonl:1"):
        read_results(file)


def test_runs_that_are_compared_are_trained_one_after_the_other_point_by_point_and_seed_by_seed(tmp_path: Path) -> None:
    rows = [{"label": "a", "sweep": [{"run.local_steps": 2, "workers": 3}, {"run.local_steps": 1}]}, {"label": "b"}]
    sweep = [{"run.local_steps": 2}, {"run": {"local_steps": 4}, "inner.lr": 1e-4}]
    tiniest = {
        "run__steps": 4,
        "run__eval_batches": 1,
        "run__eval_every": 0,
        "run__checkpoint_every": 0,
        "workers": 2,
        "model__layers": 1,
    }
    runs = points(document(**tiniest, variant=rows, sweep=sweep), seeds=[3, 4])
    assert [(run.config.workers, run.config.run.local_steps) for run in runs[::2]] == [(3, 2), (2, 1), (2, 2), (2, 4)]
    assert runs[-1].at == {"run.local_steps": 4, "inner.lr": 1e-4} and runs[-1].config.inner.lr == 1e-4
    folders, trained = {run.label: tmp_path / folder_name(run.label) for run in runs}, list[tuple[Any, ...]]()

    def ended_of(run: Point, end: RunEnd) -> None:
        trained.append((run.method, run.config.run.local_steps, run.seed))
        assert len(end.text) == 32

    train_all(runs, folders, tmp_path / "outcomes.jsonl", began=lambda run: None, on_end=ended_of)
    assert trained == [
        ("a", 2, 3),
        ("b", 2, 3),
        ("a", 2, 4),
        ("b", 2, 4),
        ("a", 1, 3),
        ("b", 4, 3),
        ("a", 1, 4),
        ("b", 4, 4),
    ]
    origins = [one.origin for one in read_results(tmp_path / "outcomes.jsonl")]
    assert len({one["text"] for one in origins if one is not None and "text" in one}) == 1


@pytest.mark.full
def test_lengths_that_anneal_share_a_trunk_and_have_the_bits_of_whole_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "run__eval_every": 0,
        "run__checkpoint_every": 0,
        "inner__schedule": "wsd",
        "inner__warmup_steps": 2,
        "workers": 2,
    }
    runs = points(document(**asked, sweep={"run.steps": [10, 20]}, rule={"name": "gasloc"}))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    phases = list[int]()
    real = Replica.train
    monkeypatch.setattr(Replica, "train", lambda self, *given: (phases.append(1), real(self, *given))[1])

    def trained(out: Path, jobs: list[Point], *, resume: bool = False) -> dict[str, float]:
        phases.clear()
        folders = {run.label: out / folder_name(run.label) for run in jobs}
        train_all(
            jobs, folders, out / "outcomes.jsonl", resume=resume, began=lambda run: None, on_end=lambda run, end: None
        )
        found = {one.at["run.steps"]: one.row for one in read_results(out / "outcomes.jsonl")}
        return {steps: row["loss"] for steps, row in found.items() if row["sent_bytes"] == 4 * PARAMETERS * steps / 2}

    apart = {steps: loss for run in runs for steps, loss in trained(whole, [run]).items()}
    assert len(phases) == 2 * 10, "a run with no other to share a trunk with is trained whole"
    shared = trained(parts, runs)
    assert shared == apart and len(shared) == 2
    assert len(phases) == 2 * (8 + 1 + 2), "rounds of the trunk, and of what is after it"
    # Stopped right after the first copy of the trunk: its folder holds no run of its own yet.
    folder = parts / folder_name(runs[0].label)
    shutil.rmtree(folder)
    shutil.copytree(parts / "trunks" / shared_trunks([run.config for run in runs])[0], folder)
    again = trained(parts, runs, resume=True)
    assert again == apart and len(phases) == 2 * 5, "the trunk is beyond this branch"


def test_runs_that_are_kept_or_copied_are_priced_on_the_networks_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    base = document(workers=2, run__steps=4, run__eval_every=0, model__layers=1)
    networks = {name: {"net": {"uplink_bps": bps, "downlink_bps": 1e6, "step_s": 1.0}} for name, bps in RATES.items()}
    for name, network in networks.items():
        (tmp_path / f"{name}.toml").write_text(
            tomli_w.dumps({**base, "network": network, "variant": [{"label": "pairs"}]})
        )

    def seconds(name: str, folder: str, *words: str) -> float:
        assert main(["compare", str(tmp_path / f"{name}.toml"), "--out", str(tmp_path / folder), *words]) == 0
        (one,) = read_results(tmp_path / folder / "outcomes.jsonl")
        assert f"{one.row['wall_s']['net']:.3g} s" in (tmp_path / folder / "report-table.md").read_text()
        return one.row["wall_s"]["net"]

    fast, slow = (seconds(name, name) for name in RATES)
    assert slow > fast + 1
    assert seconds("slow", "copied", "--reuse", str(tmp_path / "fast")) == slow
    assert seconds("slow", "fast", "--resume") == slow


def test_a_comparison_is_not_resumed_over_the_damaged_files_of_a_run_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = document(workers=2, run__steps=4, run__eval_every=0, model__layers=1)
    (tmp_path / "file.toml").write_text(tomli_w.dumps({**base, "variant": [{"label": "pairs"}]}))
    words = ["compare", str(tmp_path / "file.toml"), "--out", str(tmp_path / "out"), "--jobs", "1"]
    assert main(words) == 0
    folder, outcomes = tmp_path / "out" / "pairs", tmp_path / "out" / "outcomes.jsonl"
    lines = outcomes.read_bytes()

    def refused(name: str, content: str, *sentences: str) -> None:
        before = (folder / name).read_bytes()
        (folder / name).write_text(content)
        capsys.readouterr()
        assert main([*words, "--resume"]) != 0
        output = capsys.readouterr().err
        assert (
            all(some in output for some in sentences) and "remove that folder" in output and "Traceback" not in output
        )
        assert outcomes.read_bytes() == lines and (folder / name).read_text() == content
        (folder / name).write_bytes(before)

    trace = (folder / "trace.jsonl").read_text().splitlines(keepends=True)
    refused("trace.jsonl", "", "its trace has 0")
    refused("trace.jsonl", "".join(trace[:2]), "its trace has ")
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    refused("metrics.jsonl", "".join(one for one in metrics if '"eval"' not in one), "lack the last validation")
    assert main([*words, "--resume"]) == 0
    assert outcomes.read_bytes() == lines
    shutil.rmtree(folder)
    assert main([*words, "--resume"]) == 0
    (one,) = read_results(outcomes)
    assert one.row["loss"] == json.loads(lines)["row"]["loss"], "a run whose folder is removed is trained again"


def test_an_outcome_whose_folder_is_gone_is_kept_until_its_run_has_ended_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = document(workers=2, run__steps=4, run__eval_every=0, model__layers=1)
    variants = [{"label": "pairs"}, {"label": "all", "topology": {"name": "complete"}}]
    (tmp_path / "file.toml").write_text(tomli_w.dumps({**base, "variant": variants}))
    out = tmp_path / "out"
    words = ["compare", str(tmp_path / "file.toml"), "--out", str(out), "--jobs", "1"]
    assert main(words) == 0
    outcomes = out / "outcomes.jsonl"
    lines = outcomes.read_bytes()
    shutil.rmtree(out / "all")
    capsys.readouterr()

    def dies(pool: RunPool) -> list[tuple[str, RunEnd]]:
        raise RuntimeError("before the run has ended")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunPool, "ended", dies)
        with pytest.raises(RuntimeError, match="before the run"):
            main([*words, "--resume"])
    output = "".join(capsys.readouterr())
    assert "1 of 2 runs have a line in" in output and "'all' first" in output
    assert sorted(outcomes.read_text().splitlines()) == sorted(lines.decode().splitlines())
    assert main([*words, "--resume"]) == 0
    again = read_results(outcomes)
    assert sorted(one.method for one in again) == ["all", "pairs"], "one line for each run at the end"
