"""Runs whose optimizer keeps an average: it is what is evaluated, saved and published, and stopping costs nothing."""

import pytest
import torch

from gossamer import checkpoint
from gossamer.config import RunConfig, digest
from gossamer.data import open_corpus
from gossamer.errors import ConfigError
from gossamer.evaluate import Probe, evaluate
from gossamer.optimizers import GPA
from gossamer.record import read_metrics
from gossamer.rules import RULES
from gossamer.simulate import simulate
from gossamer.worker import Worker, method
from test_train import finish, parameters, start
from tiny import tiny

ALONE = {"workers": 1, "rule__name": "gossip", "run__steps": 6, "inner__averaging": "gpa", "inner__mu_x": 0.8}
TOGETHER = {
    "workers": 2, "rule__name": "data_parallel", "topology__name": "complete", "run__local_steps": 1, "run__steps": 5,
    "inner__averaging": "gpa", "inner__mu_x": 0.8,
}  # fmt: skip


def by_hand(config: RunConfig) -> Worker:
    """One worker after all its inner steps, without a driver."""
    corpus = open_corpus(config.data, config.workers, config.seed)
    worker = Worker(0, config, method(config).rule, corpus, torch.device("cpu"))
    for round in range(config.rounds):
        worker.local_phase(round)
    return worker


def evaluations(folder):
    return [line["loss"] for line in read_metrics(folder) if line["kind"] == "eval"]


@pytest.mark.parametrize("averaging", ["gpa", "schedule_free"])
@pytest.mark.parametrize("optimizer", ["adamw", "accum_adamw"])
def test_one_worker_alone_is_evaluated_and_saved_at_its_average(averaging, optimizer, tmp_path):
    config = tiny(**{**ALONE, "inner__averaging": averaging, "inner__optimizer": optimizer})
    result = simulate(config, tmp_path / "run")
    worker = by_hand(config)
    assert isinstance(worker.optimizer, GPA)
    assert torch.equal(parameters(tmp_path / "run", config)[0], worker.evaluated)
    probe = Probe(config, worker.corpus, torch.device("cpu"))
    assert result.final.loss == evaluations(tmp_path / "run")[-1] == probe.loss(worker.evaluated)
    assert probe.loss(worker.x) != result.final.loss
    worker.optimizer.eval()
    assert torch.equal(worker.x, worker.evaluated)


def test_gradients_are_taken_where_evaluation_is_not(tmp_path):
    """The first steps of a run are evaluated at other points and trained at the same ones, whatever is averaged at μ_y = 0."""
    plain = {key: value for key, value in ALONE.items() if not key.startswith("inner")}
    for name, options in {"plain": plain, "averaged": {**ALONE, "inner__mu_y": 0.0}}.items():
        simulate(tiny(**options), tmp_path / name)
    train = [
        [line["loss"] for line in read_metrics(tmp_path / n) if line["kind"] == "train"] for n in ("plain", "averaged")
    ]
    assert train[0] == train[1]
    assert evaluations(tmp_path / "plain") != evaluations(tmp_path / "averaged")


def test_an_average_without_memory_changes_no_bit_of_a_run(tmp_path):
    plain = {key: value for key, value in ALONE.items() if not key.startswith("inner")}
    with_average = tiny(**{**ALONE, "inner__mu_x": 0.0})
    simulate(tiny(**plain), tmp_path / "plain")
    simulate(with_average, tmp_path / "averaged")
    assert torch.equal(
        parameters(tmp_path / "plain", tiny(**plain))[0], parameters(tmp_path / "averaged", with_average)[0]
    )
    assert read_metrics(tmp_path / "plain") == read_metrics(tmp_path / "averaged")


@pytest.mark.parametrize("options", [ALONE, TOGETHER], ids=["alone", "together"])
def test_a_run_with_an_average_that_is_stopped_and_resumed_equals_the_uninterrupted_run(options, tmp_path):
    config = tiny(**options)
    simulate(config, tmp_path / "whole")
    simulate(config, tmp_path / "parts", until=2)
    simulate(config, tmp_path / "parts", resume=True)
    assert all(map(torch.equal, parameters(tmp_path / "whole", config), parameters(tmp_path / "parts", config)))
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    whole, parts = (
        checkpoint.load(tmp_path / name / "checkpoints", config.rounds, 0, digest(config))["inner"]["state"]
        for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[k][name], parts[k][name]) for k in whole for name in ("x", "z"))


def test_a_real_run_with_an_average_leaves_what_its_simulation_leaves(tmp_path):
    config = tiny(**TOGETHER, run__timeout_s=60)
    code, output = finish(start(config, tmp_path / "real"))
    assert code == 0, output
    simulate(config, tmp_path / "simulated")
    assert all(map(torch.equal, parameters(tmp_path / "real", config), parameters(tmp_path / "simulated", config)))
    own = [line["loss"] for line in read_metrics(tmp_path / "real") if line["kind"] == "validation"]
    assert own[-1] == evaluations(tmp_path / "simulated")[-1] == evaluate(tmp_path / "real")[1].loss


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule().site == "parameters"])
def test_a_rule_that_would_move_the_parameters_behind_the_average_is_refused(rule):
    with pytest.raises(ConfigError, match=rf"rule '{rule}' and 2 workers.*data_parallel"):
        tiny(workers=2, rule__name=rule, inner__averaging="gpa")


def test_an_outer_optimizer_of_one_worker_is_refused_beside_an_average():
    with pytest.raises(ConfigError, match="rule 'diloco' and 1 workers"):
        tiny(workers=1, rule__name="diloco", inner__averaging="gpa")
