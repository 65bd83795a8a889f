"""Stages that are laid anew between two rounds of a run: what decides, and that the bits are those of a run told to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.errors import ConfigError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.run.config.pipeline import work_of_layers
from gossamer.run.config.run_file import RunConfig, digest
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.stages.resplit import as_simulated, laid_anew, lays_anew, measured_speeds
from tiny import preset as tiny

RUN = {
    "workers": 2, "model__layers": 4, "data__accumulate": 2, "run__steps": 6, "pipeline__stages": 2, "pipeline__cuts": [1],
}  # fmt: skip
ANEW = {**RUN, "pipeline__resplit_every": 4, "pipeline__speeds": [3.0, 1.0]}
LOSSY = {
    "pipeline__forward": "aqsgd", "data__windows": 5, "schedule__overlap_steps": 1, "codec__name": "int8",
    "inner__optimizer": "muon",
}  # fmt: skip


def states(folder: Path, config: RunConfig, round: int) -> list[dict[str, Any]]:
    """Those of all workers after a round of a simulation."""
    line = checkpoint.Lineage(digest(config))
    return [checkpoint.load(folder / "checkpoints", round, worker, line) for worker in range(config.workers)]


def test_stages_that_are_laid_anew_have_the_bits_of_a_run_that_was_stopped_and_told_to_and_of_one_that_is_resumed(
    tmp_path: Path,
) -> None:
    config = tiny(**ANEW, **LOSSY)
    whole = simulate(config, tmp_path / "whole")
    told = {**RUN, **LOSSY}
    simulate(tiny(**told), tmp_path / "told", until=2)
    by_hand = simulate(tiny(**{**told, "pipeline__cuts": [3]}), tmp_path / "told", resume=True)
    simulate(config, tmp_path / "parts", until=2)
    resumed = simulate(config, tmp_path / "parts", resume=True)
    assert whole.loss == by_hand.loss == resumed.loss
    lines = {
        name: [line for line in read_metrics(tmp_path / name) if line["kind"] == "resplit"]
        for name in ("whole", "parts")
    }
    assert lines["whole"] == lines["parts"] == [{"kind": "resplit", "round": 1, "cuts": [3]}]
    for one, other in zip(*(states(tmp_path / name, config, 3) for name in ("whole", "parts")), strict=True):
        assert torch.equal(one["x"], other["x"]) and [*one["boundaries"]] == [*other["boundaries"]] == [3]


def test_with_exact_boundaries_a_run_whose_stages_are_laid_anew_is_that_of_whole_workers(tmp_path: Path) -> None:
    plain = {"inner__clip": None, "workers": 2, "model__layers": 4, "data__accumulate": 2, "run__steps": 6}
    config = tiny(**{**plain, **ANEW})
    simulate(config, tmp_path / "anew")
    simulate(tiny(**plain), tmp_path / "whole")
    one, other = states(tmp_path / "anew", config, 3), states(tmp_path / "whole", tiny(**plain), 3)
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(one, other, strict=True)) and [*one[0]["boundaries"]] == [3]


def test_the_slowest_worker_says_how_fast_a_stage_is_and_cuts_that_cannot_be_are_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny(**ANEW)
    first, *others, last = work_of_layers(config.model, config.data)
    assert last > first, "the last layer has the output head"
    speeds = measured_speeds(config, [[0, 1.0], [1, 2.0], None, [0, 4.0], [1, 1.0]])
    assert speeds == [first / 4, (sum(others) + last) / 2]
    assert laid_anew(config, [1.0, 9.0]) is config
    assert laid_anew(config, [1.0, 1.0]).pipeline.cuts == (2,)
    assert as_simulated(config, {"boundaries": {3: []}}).pipeline.cuts == (3,)
    assert as_simulated(config, {"boundaries": {1: [], 2: []}}) is config is as_simulated(config, {})
    fragments = {"schedule__fragments": 2, "schedule__pattern": "strided", "pipeline__cuts": [2]}
    shared = tiny(**{**ANEW, **fragments})
    assert laid_anew(shared, [1.0, 9.0]) is shared and "the stages stay as they are" in caplog.text


def test_stages_are_laid_anew_every_so_many_inner_steps_but_not_after_the_last_round() -> None:
    config = tiny(**ANEW)
    assert [finished for finished in range(1, 4) if lays_anew(config, finished)] == [2]
    with pytest.raises(ConfigError, match=r"pipeline.resplit_every is 2 and pipeline.stages is 1"):
        tiny(pipeline__resplit_every=2)
