"""Learning rates, warm-up and momentum of planned runs, by the size of their model."""

import tomllib

import pytest

from gossamer.models.sizes import ModelConfig
from gossamer.network.estimates.wall_clock import batch_tokens_fit, inner_lr_fit
from gossamer.network.links import Network
from gossamer.run.config.resolve import run_faults
from gossamer.run.config.run_file import parse
from gossamer.run.planning.candidates import price_recipes, recipe_toml
from gossamer.run.planning.measured_losses import MEASURED
from gossamer.run.planning.optima import optima
from gossamer.run.planning.plan import PlanSettings, plan
from gossamer.run.planning.planned_run_file import run_toml

EVEN = Network(uplink_bps=25e6, downlink_bps=25e6, step_s=0.5)


def test_a_large_model_has_the_published_rates_for_its_batch_and_a_small_one_those_of_our_search() -> None:
    for parameters in (85_347_072, 10**9):
        batch = batch_tokens_fit(parameters, 4)
        at_its_batch = optima("DiLoCo", parameters, 4, batch, 100_000, 30)
        assert at_its_batch.inner["lr"] == pytest.approx(inner_lr_fit(parameters, 4), rel=0.005)
        assert optima("DiLoCo", parameters, 4, 10 * batch, 100_000, 30).inner == at_its_batch.inner, "no more than that"
        quarter = optima("DiLoCo", parameters, 4, batch / 4, 100_000, 30)
        assert quarter.inner["lr"] == pytest.approx(at_its_batch.inner["lr"] / 2, rel=0.01)
        assert (quarter.inner["warmup_steps"], quarter.rule) == (1000, {"lr": 0.7, "momentum": 0.9})
        assert "arXiv 2503.09799" in quarter.source and "arXiv 2205.10330" in quarter.source
        assert all(line.startswith("# ") and len(line) <= 130 for line in quarter.source.splitlines())
    one, eight = (optima("data parallel", 10**9, n, 1e5, 1000, 1) for n in (1, 8))
    assert one == eight and one.rule == {} and one.inner["warmup_steps"] == 200
    small, tuned = optima("DiLoCo", 192_960, 8, 8192, 1000, 30), MEASURED["DiLoCo"][30]
    assert (small.inner["lr"], small.inner["warmup_steps"]) == (tuned.inner_lr, 400)
    assert small.rule == {"lr": tuned.lr, "momentum": tuned.momentum}


@pytest.mark.parametrize("size", ["0.2m", "134m"])
def test_every_run_file_of_a_plan_has_its_rates_and_can_start(size: str) -> None:
    made = plan(EVEN, ModelConfig(size=size), PlanSettings(workers=4, local_steps=(30,)))
    for one in made.candidates:
        document = tomllib.loads(run_toml(made, one))
        assert not run_faults(parse(document)) and document["inner"]["lr"] < 0.01
        if size == "134m":
            assert document["inner"]["warmup_steps"] == 1000, "not a fifth of some hundred thousand steps"
            assert document["rule"].get("momentum") in (None, 0.9 if one.method == "DiLoCo" else 0.5)
    for name, lr in (("streaming_diloco", 0.4), ("muloco", None)):
        (one, *_) = price_recipes(made, name).candidates
        document = tomllib.loads(recipe_toml(made, one, name="own", run={}))
        run = parse(document)
        assert not run_faults(run)
        assert ("lr" in document["inner"]) == (name != "muloco"), "Muon keeps that of its recipe"
        if lr is not None and size == "134m":
            assert run.rule.options["lr"] == lr, "as it was published"
