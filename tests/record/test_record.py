"""The run folder: what survives a kill, what a resumed run keeps, and how progress is shown."""

import errno
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import Command
from gossamer.cli import main
from gossamer.cli.report import _labels
from gossamer.errors import ConfigError, DataError, DiskError
from gossamer.record import checkpoint
from gossamer.record.dashboards import loggers
from gossamer.record.folder import RecordConfig, RunFolder, read_metrics
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.logs.trace import Entry, Operation, read_trace
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.run.config.run_file import dump
from tiny import single

PLAIN = RecordConfig(tensorboard=False)
BOARD = RecordConfig(tensorboard=True)


def entry(round: int, worker: int) -> Entry:
    peer = 1 - worker
    return Entry(round, worker, 15, 0.5, (Operation("exchange", 0, ((peer, 10),), ((peer, 10),)),))


def fill(run: RunFolder, rounds: range, workers: tuple[int, ...] = (0, 1)) -> None:
    for r in rounds:
        for i in workers:
            run.log("train", round=r, worker=i, step=15 * (r + 1), loss=3.0 - 0.1 * r, lr=1e-3, tokens=100 * (r + 1))
            run.log_trace(entry(r, i))
        run.log(
            "eval",
            round=r,
            step=15 * (r + 1),
            tokens=200 * (r + 1),
            loss=2.5,
            worker_losses=[2.5, 2.6],
            disagreement=0.1,
        )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_folder_holds_configuration_metrics_and_trace(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "seed = 1\n", PLAIN) as run:
        fill(run, range(2))
        run.write_text("sample.txt", "héllo")
    assert sorted(contents(tmp_path / "run")) == [
        "machines.jsonl",
        "metrics.jsonl",
        "run.toml",
        "sample.txt",
        "trace.jsonl",
    ]
    assert (tmp_path / "run" / "run.toml").read_text() == "seed = 1\n"
    assert (tmp_path / "run" / "sample.txt").read_text("utf-8") == "héllo"
    assert [(m["kind"], m["round"]) for m in read_metrics(tmp_path / "run")] == [
        ("train", 0),
        ("train", 0),
        ("eval", 0),
        ("train", 1),
        ("train", 1),
        ("eval", 1),
    ]
    assert read_trace(tmp_path / "run").steps.tolist() == [[15, 15], [15, 15]]


def test_workers_of_a_real_run_write_beside_each_other_and_are_read_together(tmp_path: Path) -> None:
    for worker in (1, 0):
        with RunFolder(tmp_path, "", PLAIN, worker=worker) as run:
            for r in range(2):
                run.log("train", round=r, worker=worker, step=r, loss=1.0)
                run.log_trace(entry(r, worker))
    assert {"metrics-000.jsonl", "trace-001.jsonl"} <= set(contents(tmp_path))
    assert [(m["round"], m["worker"]) for m in read_metrics(tmp_path)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert read_trace(tmp_path).workers == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats() | st.lists(st.floats(), max_size=3), max_size=5))
def test_every_line_is_json_whatever_the_numbers(
    tmp_path_factory: pytest.TempPathFactory, values: list[object]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    with RunFolder(folder, "", PLAIN) as run:
        run.log("eval", round=0, values=values)
    (line,) = read_metrics(folder)

    def expected(value: object) -> object:
        if isinstance(value, list):
            return [expected(part) for part in value]
        return value if isinstance(value, float) and abs(value) < 1e300 else None

    assert line["values"] == expected(values)


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "old", PLAIN) as run:
        fill(run, range(1))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"already holds metrics\.jsonl"):
        RunFolder(tmp_path, "new", PLAIN)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("first", "second"), [(None, 0), (1, None)])
@pytest.mark.parametrize("kind", ["metrics", "trace"])
def test_a_simulation_and_a_real_run_do_not_mix(
    kind: str, first: int | None, second: int | None, tmp_path: Path
) -> None:
    with RunFolder(tmp_path, "old", PLAIN, worker=first):
        pass
    for path in tmp_path.glob("*.jsonl"):
        if not path.name.startswith(kind):
            path.unlink()
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"already holds {kind}"):
        RunFolder(tmp_path, "new", PLAIN, worker=second)
    assert contents(tmp_path) == before
    RunFolder(tmp_path, "old", PLAIN, worker=second, resume_round=0).close()


def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    for name, attempts in {"whole": [range(5)], "broken": [range(4), range(2, 5)]}.items():
        for rounds in attempts:
            resume = rounds.start if rounds.start else None
            with RunFolder(tmp_path / name, "x = 1", PLAIN, resume_round=resume) as run:
                fill(run, rounds)
    whole, broken = contents(tmp_path / "whole"), contents(tmp_path / "broken")
    machines = [one.pop("machines.jsonl").count(b"\n") for one in (whole, broken)]
    assert broken == whole and machines == [1, 2], "each process says with what it computed"


def test_resuming_an_earlier_round_drops_that_and_later_ones_and_continues(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "", PLAIN) as run:
        run.log("eval", round=-1, loss=5.0)
        fill(run, range(3))
    with RunFolder(tmp_path, "", PLAIN, resume_round=1) as run:
        fill(run, range(1, 2))
    assert sorted({m["round"] for m in read_metrics(tmp_path)}) == [-1, 0, 1]
    assert read_trace(tmp_path).rounds == 2
    RunFolder(tmp_path, "", PLAIN, resume_round=0).close()
    assert read_metrics(tmp_path) == [], "who starts again validates the initial values again"


@pytest.mark.full
def test_a_killed_writer_loses_at_most_its_last_line(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from gossamer.record.dashboards import loggers
from gossamer.record.folder import RecordConfig, RunFolder
run = RunFolder(Path(sys.argv[1]), "", RecordConfig(tensorboard=False))
for r in range(10**9):
    run.log("train", round=r, worker=0, step=r, loss=1.0)
    if r == 200:
        print("ready", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"train","rou')
    assert [m["round"] for m in read_metrics(tmp_path)][:201] == list(range(201))
    with RunFolder(tmp_path, "", PLAIN, resume_round=150) as run:
        run.log("train", round=150, worker=0, step=150, loss=1.0)
    assert [m["round"] for m in read_metrics(tmp_path)] == list(range(151))


@pytest.mark.parametrize(
    "line",
    [
        '{"round":0}',
        '{"kind":"eval"}',
        '{"kind":"eval","round":"0"}',
        '{"kind":1,"round":0}',
        '{"kind":"eval","round":-2}',
        "7",
    ],
)
def test_a_foreign_metric_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"eval","round":0}\n' + line + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_an_atomic_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    atomic_write(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, b"new")
    assert contents(tmp_path) == {"state": b"old"}


@pytest.mark.parametrize("code", ["EINVAL", "ENOTSUP", "EBADF", "EACCES", "EPERM"])
def test_a_file_system_that_syncs_no_folders_takes_a_run_and_one_that_syncs_no_files_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def refused(descriptor: int, folders: bool = True) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
            raise OSError(getattr(errno, code), "refused")

    monkeypatch.setattr(os, "fsync", refused)
    with RunFolder(tmp_path / "run", "seed = 1\n", PLAIN) as run:
        fill(run, range(1))
    checkpoint.save(tmp_path / "run", 1, 0, {"step": 1}, digest="d")
    assert checkpoint.load(tmp_path / "run", 1, 0, "d") == {"step": 1}
    monkeypatch.setattr(os, "fsync", lambda descriptor: refused(descriptor, folders=False))
    with pytest.raises(DiskError, match="refused"):
        atomic_write(tmp_path / "there", b"1")


def test_a_folder_that_cannot_be_synced_as_its_disk_fails_is_a_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(DiskError, match="Input/output error"):
        atomic_write(tmp_path / "there", b"1")


def test_no_folder_is_opened_as_a_file_on_windows_which_refuses_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_as_windows_does(path: Path, *args: int) -> int:
        if Path(path).is_dir():
            raise AssertionError(f"{path} is opened")
        return really(path, *args)

    really = os.open
    monkeypatch.setattr(os, "open", open_as_windows_does)
    with pytest.raises(AssertionError, match="is opened"):
        atomic_write(tmp_path / "here", b"1")
    monkeypatch.setattr(sys, "platform", "win32")
    atomic_write(tmp_path / "there", b"1")
    checkpoint.save(tmp_path, 1, 0, {"step": 1}, digest="d")
    assert checkpoint.load(tmp_path, 1, 0, "d") == {"step": 1}


def test_tensorboard_gets_the_curves_and_forgets_what_a_resume_redoes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def curve(tag: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        return [(e.step, round(e.value, 3)) for e in events.Scalars(tag)]

    with RunFolder(tmp_path, "", BOARD) as run:
        fill(run, range(3))
    assert curve("train/loss/worker-001") == [(15, 3.0), (30, 2.9), (45, 2.8)]
    with RunFolder(tmp_path, "", BOARD, resume_round=1) as run:
        run.log("eval", round=1, step=30, loss=1.5)
    assert curve("eval/loss") == [(15, 2.5), (30, 1.5)]


def test_tensorboard_gets_the_bytes_and_the_seconds_of_each_worker_over_inner_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunFolder(tmp_path, "", BOARD, worker=3) as run:
        run.log("train", round=0, worker=3, step=15, loss=2.5)
        run.log_trace(Entry(0, 3, 15, 0.5, (Operation("exchange", 0, ((1, 1000), (2, 500)), ()),)))
        run.log_seconds(RoundSeconds(0, 3, None, 1.0, 0.25, {1: 0.5, 2: 0.125}, 0.0, 1.875))
    events = EventAccumulator(str(tmp_path / "tensorboard" / "worker-003")).Reload()
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown == {
        "train/loss/worker-003": [(15, 2.5)],
        "sent_bytes/worker-003": [(15, 1500.0)],
        "seconds/compute/worker-003": [(15, 1.0)],
        "seconds/transfer/worker-003": [(15, 0.25)],
        "seconds/waiting/worker-003": [(15, 0.625)],
        "seconds/other/worker-003": [(15, 0.0)],
    }


def test_a_process_that_writes_for_all_workers_shows_their_means_and_the_seconds_it_finds_at_the_end(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunFolder(tmp_path, "", BOARD, traced_per_round=2) as run:
        run.log("eval", round=-1, step=0, loss=5.0, disagreement=0.0, worker_losses=[5.0, 5.0])
        for round in range(2):
            for worker in range(2):
                run.log("train", round=round, worker=worker, step=15 * round + 15, loss=2.0 + worker - round)
                for part in range(2):
                    sends = ((1 - worker, 1000 * (1 + worker)),)
                    run.log_trace(Entry(2 * round + part, worker, 15, 0.5, (Operation("exchange", 0, sends, ()),)))
            run.log("eval", round=round, step=15 * round + 15, loss=2.0, disagreement=0.5, worker_losses=[2.0, 4.0])
        seconds = [RoundSeconds(r, i, "home", 1.0, 0.25, {1 - i: i}, 0.0, 2.0 * r) for i in range(2) for r in range(2)]
        run.write_seconds(seconds)
        run.write_seconds(seconds)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown["train/loss/mean"] == [(15, 2.5), (30, 1.5)] and shown["sent_bytes/mean"] == [(15, 3000), (30, 3000)]
    assert shown["sent_bytes/worker-001"] == [(15, 4000), (30, 4000)], "what it sends in a round, in all its parts"
    assert shown["eval/own_loss/mean"] == [(0, 5), (15, 3), (30, 3)], "the first is of the initial values"
    assert shown["eval/disagreement"] == [(0, 0), (15, 0.5), (30, 0.5)]
    assert shown["seconds/waiting/home/worker-001"] == [(15, 1), (30, 1)]
    assert shown["seconds/waiting/home/mean"] == [(15, 0.5), (30, 0.5)]


def test_each_process_of_a_real_run_has_its_own_tensorboard_folder(tmp_path: Path) -> None:
    for worker in range(2):
        with RunFolder(tmp_path, "", BOARD, worker=worker) as run:
            run.log("train", round=0, worker=worker, step=1, loss=1.0)
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == ["worker-000", "worker-001"]


@pytest.mark.parametrize(
    ("module", "config", "remedy"),
    [
        ("wandb", RecordConfig(tensorboard=False, wandb_project="p"), r"pip install 'wandb>="),
        ("trackio", RecordConfig(tensorboard=False, trackio_project="p"), r"pip install 'trackio>=.* remove that key"),
        ("torch.utils.tensorboard", RecordConfig(tensorboard=True), r"pip install 'tensorboard>=.* set it to false"),
    ],
)
def test_a_missing_dashboard_is_a_sentence_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, config: RecordConfig, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=remedy):
        RunFolder(tmp_path, "", config)


def test_weights_and_biases_continues_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = RecordConfig(tensorboard=False, wandb_project="p")
    with RunFolder(tmp_path, "seed = 1\n", config) as run:
        run.log("eval", round=0, step=15, loss=2.5)
    first = (tmp_path / "wandb-id.txt").read_text()
    with RunFolder(tmp_path, "seed = 1\n", config, resume_round=1) as run:
        run.log("eval", round=1, step=30, loss=2.4)
    assert (tmp_path / "wandb-id.txt").read_text() == first
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first.splitlines()[0]}*"))) == 2


class Service:
    """Weights & Biases without a network: its rows, which it numbers from 0 in every process, and only takes in their order."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[int, dict[str, float]]]] = {}
        """By the id of a run, and by process: what is in each row."""

    def init(self, *, id: str | None, **options: object) -> "Service.Run":
        processes = self.rows.setdefault(id or f"run{len(self.rows)}", [])
        processes.append({})
        return Service.Run(next(name for name, own in self.rows.items() if own is processes), processes[-1])

    class Run:
        step = 0

        def __init__(self, id: str, rows: dict[int, dict[str, float]]) -> None:
            self.id, self._rows = id, rows

        def define_metric(self, name: str, step_metric: str) -> None:
            assert (name, step_metric) == ("*", "step")

        def log(self, values: dict[str, float], step: int) -> None:
            assert step >= max(self._rows, default=0), "dropped"
            self._rows.setdefault(step, {}).update(values)

        def finish(self) -> None:
            pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_a_copy_of_a_run_folder_is_a_separate_run_on_weights_and_biases(tmp_path: Path, service: Service) -> None:
    config = RecordConfig(tensorboard=False, wandb_project="p")
    with RunFolder(tmp_path / "trunk", "", config) as run:
        run.log("eval", round=0, step=15, loss=2.5)
    for name in ("at-600", "at-900"):
        shutil.copytree(tmp_path / "trunk", tmp_path / name)
    for name in ("at-600", "at-900", "at-600", "trunk"):
        with RunFolder(tmp_path / name, "", config, resume_round=1) as run:
            run.log("eval", round=1, step=30, loss=2.4)
    assert [len(processes) for processes in service.rows.values()] == [2, 2, 1]
    (tmp_path / "trunk" / "wandb-id.txt").write_text("before")  # without the name of its folder
    with RunFolder(tmp_path / "trunk", "", config, resume_round=1):
        assert [*service.rows][-1] == "before"


def test_the_rows_of_weights_and_biases_continue_where_a_resumed_run_takes_steps_again_and_none_is_lost(
    tmp_path: Path, service: Service
) -> None:
    config = RecordConfig(tensorboard=False, wandb_project="p")
    with RunFolder(tmp_path, "", config) as run:
        fill(run, range(3))
    with RunFolder(tmp_path, "", config, resume_round=1) as run:
        fill(run, range(1, 3))
        run.write_seconds(RoundSeconds(r, 0, "home", 1.0, 0.0, {}, 0.0, 0.0) for r in (1, 2))
    ((first, second),) = service.rows.values()
    assert [*first] == [15, 30, 45] and [*second] == [30, 45, 46, 47]
    assert [row["step"] for row in second.values()] == [30, 45, 30, 45]
    assert second[30]["train/loss/worker-000"] == second[30]["train/loss/worker-001"] == 2.9
    found = {name for row in second.values() for name in row}
    assert {"eval/loss", "train/loss/mean", "sent_bytes/mean", "seconds/compute/home/mean"} <= found


class Faulty(Service):
    """Weights & Biases of which some calls fail or hang."""

    def __init__(self, at: str, fault: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._fault = at, fault

    def init(self, *, id: str | None, **options: object) -> "Service.Run":
        if self._at == "init":
            self._fault()
        run = super().init(id=id, **options)
        for name in ("log", "finish"):
            setattr(run, name, functools.partial(self._call, name, getattr(run, name)))
        return run

    def _call(self, name: str, real: Callable[..., None], *args: object, **options: object) -> None:
        if self._at == name:
            self._fault()
        real(*args, **options)


def failing(times: int) -> Callable[[], None]:
    """A call that fails so many times, and works then."""
    left = [TimeoutError("api.wandb.ai: 503") for _ in range(times)]

    def fault() -> None:
        if left:
            raise left.pop()

    return fault


@pytest.mark.parametrize("at", ["init", "log", "finish"])
def test_a_dashboard_that_fails_once_is_warned_of_opened_again_and_gets_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    service = Faulty(at, failing(1))
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setattr(loggers, "PAUSE_S", 0.01)
    with RunFolder(tmp_path, "", RecordConfig(tensorboard=False, wandb_project="p")) as run:
        fill(run, range(3))
    rows = [row for processes in service.rows.values() for process in processes for row in process]
    assert rows == [15, 30, 45] and len(read_metrics(tmp_path)) == 9
    (warned,) = caplog.messages
    assert "Weights & Biases failed (api.wandb.ai: 503); training continues" in warned


@pytest.mark.parametrize("at", ["init", "log", "finish"])
def test_a_dashboard_that_hangs_holds_a_run_up_for_a_bounded_time_and_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    over = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", Faulty(at, lambda: void(over.wait(100))))
    for name in ("OPEN_S", "END_S", "END_FAILED_S"):
        monkeypatch.setattr(loggers, name, 0.2)
    began, stdout = time.monotonic(), sys.stdout
    with RunFolder(tmp_path, "", RecordConfig(tensorboard=False, wandb_project="p")) as run:
        fill(run, range(3))
    assert time.monotonic() - began < 50 and sys.stdout is stdout and len(read_metrics(tmp_path)) == 9
    (warned,) = caplog.messages
    assert "Weights & Biases has not" in warned
    over.set()


def test_rows_that_no_dashboard_takes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "MOST_POINTS", 2)
    monkeypatch.setattr(loggers, "OPEN_S", 0.1)
    over, service = threading.Event(), Faulty("init", lambda: void(over.wait(100)))
    monkeypatch.setitem(sys.modules, "wandb", service)
    with RunFolder(tmp_path, "", RecordConfig(tensorboard=False, wandb_project="p")) as run:
        for r in range(5):
            run.log("eval", round=r, step=r + 1, loss=1.0)
        over.set()
    assert [row for ((process,),) in [service.rows.values()] for row in process] == [4, 5]


def void(_: object) -> None:
    """Nothing, whatever was computed."""


def test_trackio_gets_the_curves_continues_a_resumed_run_and_leaves_stdout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))  # which it reads when it is imported
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    config = RecordConfig(tensorboard=False, trackio_project="p")
    for round, resume in ((0, None), (1, 1)):
        with RunFolder(tmp_path / "run", "seed = 1\n", config, worker=3, resume_round=resume) as run:
            run.log("train", round=round, worker=3, step=15 * round + 15, loss=2.5 - round)
    assert capsys.readouterr().out == ""
    assert [(one["step"], one["train/loss/worker-003"]) for one in storage.get_logs("p", "run-003")] == [
        (15, 2.5),
        (30, 1.5),
    ]


def test_a_log_without_rounds_between_lines_is_refused() -> None:
    with pytest.raises(ConfigError, match="print_every is 0"):
        RecordConfig(print_every=0)


def test_a_line_on_disk_is_what_the_schema_says(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "", PLAIN) as run:
        run.log("train", round=0, worker=3, step=15, loss=2.5, lr=1e-3, tokens=1024)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "kind": "train",
        "round": 0,
        "worker": 3,
        "step": 15,
        "loss": 2.5,
        "lr": 1e-3,
        "tokens": 1024,
    }


def test_a_record_that_is_removed_while_a_run_writes_it_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "") as run:
        run.log("train", round=0, worker=0, step=1, loss=3.0)
        (tmp_path / "run" / "metrics.jsonl").unlink()
        with pytest.raises(DiskError, match=r"metrics.jsonl' was removed while the run was writing it"):
            run.log("train", round=1, worker=0, step=2, loss=2.0)


STAND_IN = """
import time

class Run:
    id, step, rows = "one", 0, 0

    def define_metric(self, *names, **options): pass

    def log(self, values, step):
        Run.rows += 1
        if Run.rows == 3: {log}

    def finish(self): {finish}

def init(**options):
    print("where it logs")
    {init}
    return Run()
"""
FAULTS = {
    "init raises": {"init": "raise RuntimeError('Run initialization has timed out after 90.0 sec')"},
    "init hangs": {"init": "time.sleep(1000)"},
    "log raises": {"log": "raise ConnectionError('503')"},
    "finish raises": {"finish": "raise TimeoutError('finish')"},
}


EACH_DASHBOARD = """
import sys
from gossamer.cli import main
from gossamer.cli.report import _labels
for name, package in zip(*(sys.argv[k].split(",") for k in (1, 2))):
    sys.path.insert(0, name)
    sys.modules.pop(package, None)
    print("run of", name, file=sys.stderr)
    words = ["simulate", "run.toml", "--out", f"{name}-run", "--set", f"record.{package}_project=p", "--json"]
    print("code", main(words), file=sys.stderr)
    print("end of a run")
    del sys.path[0]
"""


@pytest.mark.full
@pytest.mark.timeout(200)
def test_whatever_a_dashboard_does_a_simulation_trains_all_rounds_and_warns_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(single(run__steps=12, run__eval_every=0)))
    cases = {name: ("wandb", fault) for name, fault in FAULTS.items()}
    cases["log of trackio raises"] = "trackio", FAULTS["log raises"]
    for name, (package, fault) in cases.items():
        (modules := tmp_path / name).mkdir()
        code = STAND_IN.format(**{"init": "pass", "log": "pass", "finish": "pass", **fault})
        (modules / f"{package}.py").write_text(code)
    alone = [name for name in cases if "hangs" in name]  # as its process has to end all the same
    started = {}
    for names in (alone, [name for name in cases if name not in alone]):
        listed = [",".join(names), ",".join(cases[name][0] for name in names)]
        started[tuple(names)] = subprocess.Popen(
            [sys.executable, "-c", EACH_DASHBOARD, *listed],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    for names, process in started.items():
        outputs, all_errors = process.communicate()
        assert process.returncode == 0, all_errors
        for name, out, errors in zip(
            names, outputs.split("end of a run")[:-1], all_errors.split("run of ")[1:], strict=True
        ):
            assert errors.startswith(name) and "code 0" in errors and "Traceback" not in errors, errors
            assert errors.count("training continues") == 1 and errors.count("where it logs") >= 1, errors
            assert json.loads(out)["runs"], "stdout has the result alone"
            rounds = {line["round"] for line in read_metrics(tmp_path / f"{name}-run") if line["kind"] == "train"}
            assert rounds == {*range(6)}


def main_beside(words: list[str]) -> int:
    """`gossamer` and its workers with modules of this folder."""
    folder, *words = words
    sys.path.insert(0, folder)
    return main(words)


@pytest.mark.timeout(200)
def test_real_workers_train_all_rounds_whatever_becomes_of_their_dashboards(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(single(workers=2, run__steps=12, run__eval_every=0)))
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "wandb.py").write_text(STAND_IN.format(init="raise OSError('no route')", log="pass", finish="pass"))
    words = ["train", tmp_path / "run.toml", "--out", tmp_path / "out", "--local", 2, "--set", "record.wandb_project=p"]
    code, output = Command(modules, *words, work=main_beside, OMP_NUM_THREADS="1").finish()
    assert code == 0 and "Traceback" not in output, output
    assert output.count("Weights & Biases failed (no route); training continues") == 2, "one for each worker"
    lines = read_metrics(tmp_path / "out")
    assert {(line["round"], line["worker"]) for line in lines if line["kind"] == "train"} == {
        (r, w) for r in range(6) for w in range(2)
    }


def test_tensorboard_whose_disk_is_full_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    with RunFolder(tmp_path, "", BOARD) as run:
        fill(run, range(3))
    (warned,) = caplog.messages
    assert "TensorBoard failed ([Errno 28] No space left on device); training continues" in warned
    assert len(read_metrics(tmp_path)) == 9


def test_a_number_that_a_line_may_lack_is_refused_with_its_bounds(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","round":0,"worker":99999999,"loss":1.0}\n')
    with pytest.raises(DataError, match="worker is 99999999 but must be a whole number from 0 to below 1048576"):
        read_metrics(tmp_path)


def test_no_folder_is_made_that_is_named_as_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiskError, match="'s3:/bucket/run' is an address, and a folder of this machine is to be made"):
        make_folder(Path("s3://bucket/run"))
    assert not [*tmp_path.iterdir()]


def test_a_folder_in_which_no_checkpoint_could_be_read_again_is_not_made(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(DiskError, match="no name in UTF-8, which checkpoints and models need; name another folder"):
        make_folder(folder)
    assert not folder.exists()
    names = _labels([folder, tmp_path], [{"name": "a", "seed": 0}, {"name": "a", "seed": 1}])
    assert names[0] == "caf\\udce9", "the page of one that was renamed shows its bytes"
