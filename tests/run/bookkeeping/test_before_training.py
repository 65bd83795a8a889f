"""The validation of the initial values: first in the record, the start of every curve, and never taken for a result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_follow import RUN_TOML

import gossamer
from gossamer.record.folder import RunFolder, read_metrics
from gossamer.report.page.contents import row_of_view
from gossamer.report.page.view import run_view
from gossamer.report.reading.follow import FollowedRun
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.config.resolve import settings_of
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.task import task_of
from tiny import tiny

CLOCK = {"clock": {"step_s": 0.1, "uplink_bps": 1e8, "downlink_bps": 1e8}}
KINDS: dict[str, dict[str, Any]] = {
    "rounds": {},
    "server": {"server": {"name": "heloco"}, "network": CLOCK},
    "pairs": {"pair": {"name": "ad_psgd"}, "topology": {"name": "complete"}, "network": CLOCK},
    "no waiting": {"run__wait": False, "network": CLOCK},
}


def evals(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if line["kind"] == "eval"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_simulation_validates_its_initial_values_once_also_when_it_starts_again(kind: str, tmp_path: Path) -> None:
    config = tiny(run__steps=6, run__eval_every=2, run__checkpoint_every=0, **KINDS[kind])
    stopped = simulate(config, tmp_path, until=0).go_on(1)
    simulate(config, tmp_path, resume="auto")
    first, *others = evals(tmp_path)
    probe = Probe(settings_of(config), task_of(settings_of(config)), torch.device("cpu"))
    assert [line["round"] for line in others] == [0, 1, 2]
    assert (first["round"], first["step"], first["tokens"]) == (-1, 0, 0)
    assert first["loss"] == probe.loss(probe.x.clone()) > others[-1]["loss"]
    assert first.get("disagreement", 0.0) == 0.0 and set(first.get("worker_losses", [])) <= {first["loss"]}
    assert stopped.validation["round"][0] == -1


def test_a_run_that_validates_only_at_its_end_has_no_such_line(tmp_path: Path) -> None:
    config = tiny(run__steps=4, run__eval_every=0)
    assert simulate(config, tmp_path, until=1).loss > 0 and not evals(tmp_path)
    simulate(config, tmp_path, resume="auto")
    assert [line["round"] for line in evals(tmp_path)] == [1]


def test_workers_that_start_alike_are_scored_once_buffers_included() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                scored.append(len(x))
            return self.layers(x)

    scored: list[int] = []
    run = gossamer.simulate(
        model=Counting,
        data=lambda worker, step: torch.full((4, 2), worker + 1.0),
        loss=lambda model, x: model(x).square().mean(),
        rule="gasloc",
        topology="ring",
        workers=3,
        rounds=1,
        settings={"run.eval_batches": 2, "run.eval_every": 1000},
    )
    assert run.validation["round"] == [-1, 0] and scored[:2] == [4, 4]
    assert len(scored) == 2 + 2 * (1 + 3), "the mean model and each worker's at the end"


def test_a_report_reads_no_result_from_it(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", RUN_TOML, worker=0) as zero, RunFolder(tmp_path / "a", RUN_TOML, worker=1) as one:
        run = FollowedRun("a", tmp_path / "a")
        for worker, record in enumerate((zero, one)):
            record.log("validation", round=-1, worker=worker, step=0, tokens=0, loss=5.0 + worker)
        run.look()
        before = run_view(run, run.modified_s)
        assert before["evals"] == {"x": {"round": [0]}, "y": {"own": [5.5]}} and before["done"] == 0
        assert row_of_view(before)["loss"] is None, "it is of no training"
        for worker, record in enumerate((zero, one)):
            record.log("train", round=0, worker=worker, step=9, loss=3.0, lr=1e-3, tokens=32)
            record.log("validation", round=0, worker=worker, step=9, tokens=32, loss=2.0 + worker)
        run.look()
    after = run_view(run, run.modified_s)
    assert after["evals"]["y"] == {"own": [5.5, 2.5]} and row_of_view(after)["loss"] is None
    assert (row_of_view(after)["loss_of_workers"], row_of_view(after)["round"]) == (2.5, 1)
    assert after["evals"]["x"] == {"round": [0, 1], "step": [0, 9], "tokens": [0, 64]}
