"""How far the workers' predictions are apart: against numpy, against arithmetic by hand, and in runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gossamer
from gossamer.errors import ConfigError
from gossamer.record.folder import read_metrics
from gossamer.run.bookkeeping.evaluate import js_divergence
from gossamer.run.config.resolve import settings_of
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.task import task_of
from tiny import tiny

CLOCK = {"step_s": 0.1, "uplink_bps": 1e8, "downlink_bps": 1e8}
KINDS = {  # as in `tiny`; the settings of each way to communicate that has a model for each worker
    "rounds": {},
    "pair": {"topology__name": "complete", "pair__name": "ad_psgd", "network": {"clock": CLOCK}},
    "no waiting": {"run__wait": False, "network": {"clock": CLOCK}},
}


def drawn(workers: int, tokens: int, words: int, seed: int, spread: float = 3.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [(spread * torch.randn(tokens, words, generator=draw)).log_softmax(-1) for _ in range(workers)]


def by_definition(predictions: list[Tensor]) -> float:
    """The metric in numpy, from its definition."""
    p = np.exp(np.stack([one.double().numpy() for one in predictions]))
    mean, (workers, tokens) = p.mean(0), p.shape[:2]
    total = 0.0
    for own in p:
        middle = (own + mean) / 2
        for a in (own, mean):
            here = a > 0
            total += (a[here] * np.log(a[here] / middle[here])).sum() / 2
    return total / workers / tokens


def all_validations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if line["kind"] == "eval"]


shapes = given(
    st.integers(1, 9), st.integers(1, 5), st.integers(2, 7), st.integers(0, 2**31), st.sampled_from((0.1, 3.0, 300.0))
)


@shapes
def test_it_is_what_the_definition_says(workers: int, tokens: int, words: int, seed: int, spread: float) -> None:
    predictions = drawn(workers, tokens, words, seed, spread)
    assert js_divergence(predictions) == pytest.approx(by_definition(predictions), abs=1e-9)


@shapes
def test_it_is_from_0_to_ln_2_and_does_not_depend_on_an_order(
    workers: int, tokens: int, words: int, seed: int, spread: float
) -> None:
    predictions = drawn(workers, tokens, words, seed, spread)
    found = js_divergence(predictions)
    assert 0 <= found < math.log(2)
    assert js_divergence(predictions[::-1]) == pytest.approx(found, abs=1e-12)
    assert js_divergence([one.flip(0, 1) for one in predictions]) == pytest.approx(found, abs=1e-12)


@shapes
def test_equal_workers_have_exactly_none(workers: int, tokens: int, words: int, seed: int, spread: float) -> None:
    assert js_divergence(drawn(1, tokens, words, seed, spread) * workers) == 0


def test_workers_that_are_sure_of_different_tokens_approach_ln_2_as_they_become_more() -> None:
    found = [js_divergence([*torch.eye(n).log().unsqueeze(1)]) for n in (2, 3, 10, 100, 1000)]
    for n, value in zip((2, 3, 10, 100, 1000), found, strict=True):
        assert value == pytest.approx(math.log(2) - ((1 + 1 / n) * math.log1p(1 / n) + math.log(n) / n) / 2, abs=1e-12)
    assert found[0] == pytest.approx(0.75 * math.log(4 / 3))
    assert found == sorted(found) and math.log(2) - 0.005 < found[-1] < math.log(2)


def test_a_prediction_that_is_not_finite_is_told() -> None:
    assert math.isnan(js_divergence([torch.full((1, 2), math.nan), torch.zeros(1, 2).log_softmax(-1)]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_simulation_measures_it_at_each_validation_and_nothing_else_changes(kind: str, tmp_path: Path) -> None:
    for name, on in (("with", True), ("without", False)):
        simulate(tiny(run__steps=4, run__eval_every=2, run__eval_js=on, **KINDS[kind]), tmp_path / name)
    measured, plain = all_validations(tmp_path / "with"), all_validations(tmp_path / "without")
    assert [line["round"] for line in measured] == [-1, 0, 1] and measured[0]["js_divergence"] == 0
    assert all(0 < line["js_divergence"] < math.log(2) for line in measured[1:])
    assert [{key: value for key, value in line.items() if key != "js_divergence"} for line in measured] == plain


def test_what_a_simulation_measures_is_that_of_its_models_on_the_first_validation_batch(tmp_path: Path) -> None:
    config = tiny(run__steps=4, run__eval_js=True)
    run = gossamer.simulate(config, out=tmp_path / "run")
    tokens = next(iter(task_of(settings_of(config)).data.validation(config.run.eval_batches)))
    with torch.no_grad():
        predictions = [run.model(i)(tokens[:, :-1]).log_softmax(-1).flatten(0, 1) for i in range(config.workers)]
    assert run.validation["js_divergence"][-1] == pytest.approx(by_definition(predictions), rel=1e-4)


def test_workers_that_are_equal_after_each_round_have_none(tmp_path: Path) -> None:
    simulate(tiny(rule__name="diloco", topology__name="complete", run__steps=2, run__eval_js=True), tmp_path / "run")
    assert [line["js_divergence"] for line in all_validations(tmp_path / "run")] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"data__source": "package.module:batch"}, "data.source is 'package.module:batch'"),
        ({"model__loss": "package.module:loss"}, "model.loss is 'package.module:loss'"),
    ],
)
def test_a_run_without_predictions_of_the_next_token_is_refused(options: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError, match=f"run.eval_js is true and {part}"):
        tiny(run__eval_js=True, **options)
