"""Settings of a run as a whole: a global batch, and a length in tokens, split among the workers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.models.sizes import parameter_count
from gossamer.run.config.experiment_file import points
from gossamer.run.config.run_file import RunConfig, digest, dump, parse, survey
from gossamer.settings.schema import parse_toml
from tiny import document


def without(*keys: str, **overrides: Any) -> dict[str, Any]:
    found = document(**overrides)
    for key in keys:
        table, _, name = key.partition(".")
        found[table].pop(name)
    return found


def tokens_of(config: RunConfig) -> int:
    return (
        config.length.rounds
        * sum(config.length.local_steps_of(i) for i in range(config.workers))
        * config.length.step_tokens
    )


def test_a_sweep_over_workers_at_one_global_batch_and_budget_trains_on_the_same_tokens() -> None:
    base = without("data.batch_size", "run.steps", data__global_batch=16, run__tokens=20_000)
    runs = [point.config for point in points({**base, "sweep": {"workers": [1, 2, 4, 16]}})]
    assert [(run.workers, run.data.batch_size) for run in runs] == [(1, 16), (2, 8), (4, 4), (16, 1)]
    assert {tokens_of(run) for run in runs} == {20_000 // (16 * 16 * 2) * 16 * 16 * 2}
    assert {run.run.steps for run in runs} == {78}


def test_a_budget_of_tokens_counts_rounds_that_grow() -> None:
    table = {"0": 1, "4": [4, 2, 4]}
    each = 16 * 2 * (4 * 3 + 10)  # four rounds of one step, and one of ten
    found = parse(without("run.steps", run__tokens=each + 32 * 9, run__local_steps=table))
    assert found.run.steps == 8 and found.length.rounds == 5
    assert parse(without("run.steps", run__tokens=each + 32 * 10, run__local_steps=table)).run.steps == 12
    qsr = {"shape": "qsr", "base": 2, "alpha": 0.003}
    with pytest.raises(ConfigError, match=r"whose schedule needs its length; set run\.steps"):
        parse(without("run.steps", run__tokens=20_000, run__local_steps=qsr))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40_000))
def test_a_budget_of_tokens_pays_for_whole_rounds_and_not_for_one_more(
    workers: int, h: int, accumulate: int, tokens: int
) -> None:
    written = without("run.steps", workers=workers, run__local_steps=h, run__tokens=tokens, data__accumulate=accumulate)
    a_round = workers * h * 2 * 16 * accumulate
    if tokens < a_round:
        with pytest.raises(ConfigError, match=f"and a round of all workers takes {a_round:,}; raise run.tokens"):
            parse(written)
    else:
        assert tokens_of(parse(written)) <= tokens < tokens_of(parse(written)) + a_round


def test_workers_of_different_local_steps_share_the_budget() -> None:
    config = parse(without("run.steps", run__local_steps=[1, 2, 3], run__tokens=6 * 32 * 5))
    assert config.length.rounds == 5 and tokens_of(config) == 6 * 32 * 5
    server = parse(without("run.steps", server="heloco", run__tokens=3 * 2 * 32 * 4))
    assert server.run.steps == 8


def test_tokens_per_parameter_count_the_parameters_of_the_model() -> None:
    config = parse(without("run.steps", run__tokens_per_parameter=0.5))
    wanted = round(0.5 * parameter_count(config.model, 256))
    assert wanted - 3 * 2 * 32 < tokens_of(config) <= wanted


def test_a_resolved_run_has_steps_and_batches_alone() -> None:
    config = parse(without("data.batch_size", "run.steps", data__global_batch=6, run__tokens=1000))
    plain = parse(document(run__steps=config.run.steps, data__batch_size=2))
    assert (dump(config), digest(config)) == (dump(plain), digest(plain))
    assert parse(parse_toml(dump(config), "it")) == config


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (without("data.batch_size", data__global_batch=16), r"global_batch is 16, which 3 workers cannot .* 15 or 18"),
        (without("data.batch_size", data__global_batch=2), r"global_batch is 2, which 3 workers cannot .* to 3$"),
        (
            without("data.batch_size", data__global_batch=9, data__accumulate=2),
            r"3 workers in 2 passes each cannot split equally; set it to 6 or 12",
        ),
        (document(data__global_batch=6), r"data\.batch_size is 2, and data\.global_batch = 6"),
        (document(run__tokens=600), r"run has steps = 12 and tokens = 600, which each decide"),
        (
            without("run.steps", run__tokens=600, run__tokens_per_parameter=20),
            r"tokens = 600 and tokens_per_parameter = 20",
        ),
        (
            without("run.steps", run__tokens_per_parameter=20, data__tokenizer="gpt2"),
            r"not known in advance; set run\.tokens",
        ),
        (without("run.steps", run__tokens=0), r"run\.tokens is 0"),
    ],
)
def test_totals_that_do_not_come_out_even_are_refused_in_a_sentence(written: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(written)
    assert len(survey(written).faults) == 1
