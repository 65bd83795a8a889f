"""The record of a loop of one's own: what `Outer.record` writes, and what the verbs make of it."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from commands import free_port, run
from gossamer.cli import main
from gossamer.errors import ConfigError, DiskError
from gossamer.record.folder import RunFolder, read_metrics
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.logs.trace import read_trace
from gossamer.report.reading.status import run_status
from gossamer.report.table import summary_rows
from gossamer.rounds.schedule import Schedule
from gossamer.transport.processes.local import run_local

STEPS = 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Loop:
    """A loop that may stop at any step and resume from its saved state."""

    def __init__(self, folder: Path, saved: dict[str, Any] | None = None, **options: Any) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.outer = gossamer.Outer(self.model, "diloco", **{"local_steps": 3, **options})
        if saved is not None:
            self.outer.load_state_dict(saved["outer"])
        self.outer.record(folder, steps=STEPS, step_tokens=8)
        self.losses: list[float] = []

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * self.outer.worker + step))
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if self.outer.step(loss):
                self.outer.log_validation(0.5)

    def saved(self) -> dict[str, Any]:
        return {
            "model": {name: t.clone() for name, t in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "outer": self.outer.state_dict(),
        }


def both(argv: Sequence[str]) -> int:
    """One of two workers, which meet without a process group."""
    folder = Path(argv[0])
    for name, options in {"plain": {}, "parts": {"schedule": Schedule(fragments=2)}}.items():
        loop = Loop(folder / name, timeout_s=60.0, **options)
        loop.outer.metrics()  # from here on they are counted
        loop.train(range(STEPS))
        sent = loop.outer.metrics().bytes_sent
        (folder / f"{name}-{loop.outer.worker}.json").write_text(json.dumps([sent, loop.losses]))
        loop.outer.close()
    return 0


def test_two_workers_of_a_loop_record_what_status_report_and_pages_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert run_local(2, both, [str(tmp_path)]) == 0
    for name, parts in {"plain": 1, "parts": 2}.items():
        folder = tmp_path / name
        found = [json.loads((tmp_path / f"{name}-{worker}.json").read_text()) for worker in (0, 1)]
        trained = [line for line in read_metrics(folder) if line["kind"] == "train"]
        for line in trained:
            losses = found[line["worker"]][1][3 * line["round"] : 3 * line["round"] + 3]
            assert line["loss"] == pytest.approx(math.fsum(losses) / 3) and line["tokens"] == 8 * line["step"]
        assert sorted((line["round"], line["worker"]) for line in trained) == [(r, i) for r in range(4) for i in (0, 1)]
        trace = read_trace(folder)
        assert (trace.workers, trace.rounds) == (2, 4 * parts)
        assert trace.steps.sum(axis=0).tolist() == [STEPS, STEPS]
        assert trace.sent_bytes.tolist() == [sent for sent, _ in found]
        seconds = [one for one in read_seconds(folder) if one.worker == 0]
        assert sum(one.total_s for one in seconds) == pytest.approx(seconds[-1].end_s)
        assert all(one.compute_s > 0 for one in seconds)
        status = run_status(folder)
        assert [(one.standing, one.round, one.loss) for one in status.workers] == [
            ("finished", 4, line["loss"]) for line in trained[-2:]
        ]
    assert main(["status", str(tmp_path / "plain")]) == 0
    assert "plain (rounds): 4 of 4 rounds; workers: 2 finished" in capsys.readouterr().out
    rows = summary_rows({name: tmp_path / name for name in ("plain", "parts")}, None)
    assert [row["loss_of_workers"] for row in rows] == [0.5, 0.5] and rows[0]["sent_bytes"] > 0
    folders = [str(tmp_path / name) for name in ("plain", "parts")]
    assert main(["report", *folders, "--out", str(tmp_path / "both.html")]) == 0
    assert "gossamer" in (tmp_path / "both.html").read_text()


def test_a_loop_that_resumes_from_its_saved_state_leaves_the_record_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole")
    whole.train(range(STEPS))
    first = Loop(tmp_path / "cut")
    first.train(range(6))
    saved = first.saved()
    first.train(range(6, 9))  # a round that is lost
    first.outer.close()
    again = Loop(tmp_path / "cut", saved)
    again.train(range(6, STEPS))
    for loop in (whole, again):
        loop.outer.close()
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    ends = [one.end_s for one in read_seconds(tmp_path / "cut")]
    assert len(ends) == 4 and ends == sorted(ends)


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "."],
        ["audit", "."],
        ["train", "--resume", "."],
        ["simulate", "--resume", "."],
        ["check", "run.toml"],
    ],
    ids=" ".join,
)
def test_what_would_check_train_or_evaluate_a_recorded_loop_says_that_no_file_has_it(
    tmp_path: Path, words: list[str]
) -> None:
    loop = Loop(tmp_path / "run")
    loop.train(range(3))
    loop.outer.close()
    code, output = run(*words[:-1], tmp_path / "run" / words[-1])
    assert code == 2 and "model.size is 'python:Sequential', an object that a Python program gave" in output


def test_a_recorded_loop_that_an_error_ends_prints_this_error_alone(tmp_path: Path) -> None:
    script = (
        "import torch, gossamer\n"
        "model = torch.nn.Linear(2, 1)\n"
        "outer = gossamer.Outer(model, 'diloco', local_steps=2)\n"
        f"outer.record({str(tmp_path / 'run')!r}, steps=8)\n"
        "for step in range(3): outer.step(1.0)\n"
        "raise ValueError('no more batches')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1] == "ValueError: no more batches", ended.stderr
    assert run_status(tmp_path / "run").round == 1


def test_a_record_refuses_what_it_cannot_be_in_a_sentence(tmp_path: Path) -> None:
    first = Loop(tmp_path / "run")
    first.train(range(3))
    with pytest.raises(
        ConfigError, match=r"record\(\) got '.*other', and this Outer records into '.*run'; call it once"
    ):
        first.outer.record(tmp_path / "other", steps=STEPS)
    with pytest.raises(ConfigError, match=r"step\(\) got a loss of shape \(2,\); give one number"):
        first.outer.step(torch.ones(2))
    with pytest.raises(ConfigError, match=r"step\(\) got 'high' as its loss; give one number, or a tensor of one"):
        first.outer.step("high")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"in progress, .*; give record\(\) another folder"):
        Loop(tmp_path / "run").outer.step()
    first.outer.close()
    with pytest.raises(ConfigError, match=r"already holds metrics-000\.jsonl; give record\(\) another folder, or load"):
        Loop(tmp_path / "run").outer.step()
    plain = gossamer.Outer(net(), "gossip", local_steps=3)
    with pytest.raises(ConfigError, match=r"record\(\) got steps=2, and the first round has 3; give more"):
        plain.record(tmp_path / "other", steps=2)
    with pytest.raises(
        ConfigError,
        match=r"log_validation\(0\.5\) was called without a record; call record\(folder, steps=\.\.\.\) first",
    ):
        plain.log_validation(0.5)
    assert not (tmp_path / "other").exists()


def test_what_is_recorded_can_be_reported_whatever_steps_name_and_loss_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    outer = gossamer.Outer(net(), "gossip", local_steps=2)
    with pytest.raises(ConfigError, match=r"record got name = 'a/\.\./b', which must be a name for the folder"):
        outer.record(".", steps=5, name="a/../b")
    outer.record(".", steps=5)
    for _ in range(5):
        outer.step(1e308)
    outer.close()
    assert [line["loss"] for line in read_metrics(Path())] == [None, None]
    assert main(["report", ".", "--out", "page.html"]) == 0
    status = run_status(Path())
    assert (status.name, status.round, status.rounds) == ("here", 2, 2)


def test_a_round_without_losses_is_recorded_without_one(tmp_path: Path) -> None:
    outer = gossamer.Outer(net(), "gossip", local_steps=1)
    outer.record(tmp_path / "run", steps=2, name="mine")
    outer.lr = lambda: 0.25
    outer.log_validation(0.75)
    outer.step()
    outer.close()
    before, line = read_metrics(tmp_path / "run")
    assert (before["kind"], before["round"], before["loss"]) == ("validation", -1, 0.75)
    assert (line["loss"], line["lr"], line["tokens"]) == (None, 0.25, 0)
    assert run_status(tmp_path / "run").name == "mine"


def test_a_disk_that_fails_ends_the_record_with_one_warning_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path / "run")
    loop.train(range(3))

    def full(*args: Any, **fields: Any) -> None:
        raise DiskError("no space is left")

    monkeypatch.setattr(RunFolder, "log", full)
    loop.train(range(3, STEPS))
    loop.outer.close()
    assert loop.outer.rounds == 4 and caplog.text.count("worker 0 trains on without a record: no space is left") == 1
    assert [line["round"] for line in read_metrics(tmp_path / "run") if line["kind"] == "train"] == [0]
