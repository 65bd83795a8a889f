"""Runs whose optimizer keeps an average: it is what is evaluated, saved and published, and stopping costs nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import parameters, words_of

from commands import run
from gossamer.errors import ConfigError
from gossamer.optimizers import GPA
from gossamer.optimizers.gpa import toward
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.run.bookkeeping.evaluate import Probe, evaluate
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import RunConfig, digest
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from tiny import DEVICE, single

ALONE = {"workers": 1, "rule__name": "gossip", "run__steps": 6, "inner__averaging": "gpa", "inner__mu_x": 0.8}
TOGETHER = {
    "workers": 2,
    "rule__name": "data_parallel",
    "topology__name": "complete",
    "run__local_steps": 1,
    "run__steps": 5,
    "inner__averaging": "gpa",
    "inner__mu_x": 0.8,
}


def by_hand(config: RunConfig) -> Replica:
    """One worker after all its inner steps, without a driver."""
    task = task_of(settings_of(config))
    worker = Replica(0, settings_of(config), task, torch.device(DEVICE))
    for round in range(config.length.rounds):
        worker.train(round, 0, worker.local_steps)
    return worker


def evaluations(folder):
    return [line["loss"] for line in read_metrics(folder) if line["kind"] == "eval"]


@pytest.mark.parametrize("averaging", ["gpa", "schedule_free"])
@pytest.mark.parametrize("optimizer", ["adamw", "accum_adamw"])
def test_one_worker_alone_is_evaluated_and_saved_at_its_average(averaging, optimizer, tmp_path):
    config = single(**{**ALONE, "inner__averaging": averaging, "inner__optimizer": optimizer})
    result = simulate(config, tmp_path / "run")
    worker = by_hand(config)
    assert isinstance(worker.optimizer, GPA)
    assert torch.equal(parameters(tmp_path / "run", config)[0], worker.evaluated)
    probe = Probe(settings_of(config), worker.task, torch.device(DEVICE))
    assert result.loss == evaluations(tmp_path / "run")[-1] == probe.loss(worker.evaluated)
    assert probe.loss(worker.x) != result.loss
    worker.optimizer.eval()
    assert torch.equal(worker.x, worker.evaluated)


def test_gradients_are_taken_where_evaluation_is_not(tmp_path):
    """The first steps of a run are evaluated at other points and trained at the same ones, whatever is averaged at μ_y = 0."""
    plain = {key: value for key, value in ALONE.items() if not key.startswith("inner")}
    for name, options in {"plain": plain, "averaged": {**ALONE, "inner__mu_y": 0.0}}.items():
        simulate(single(**options), tmp_path / name)
    train = [
        [line["loss"] for line in read_metrics(tmp_path / n) if line["kind"] == "train"] for n in ("plain", "averaged")
    ]
    assert train[0] == train[1]
    assert evaluations(tmp_path / "plain") != evaluations(tmp_path / "averaged")


def test_an_average_without_memory_changes_no_bit_of_a_run(tmp_path):
    plain = {key: value for key, value in ALONE.items() if not key.startswith("inner")}
    with_average = single(**{**ALONE, "inner__mu_x": 0.0})
    simulate(single(**plain), tmp_path / "plain")
    simulate(with_average, tmp_path / "averaged")
    assert torch.equal(
        parameters(tmp_path / "plain", single(**plain))[0], parameters(tmp_path / "averaged", with_average)[0]
    )
    assert read_metrics(tmp_path / "plain") == read_metrics(tmp_path / "averaged")


GOSSIP = {
    "workers": 3,
    "rule__name": "gasloc",
    "topology__name": "complete",
    "rule__lr": 1.0,
    "rule__momentum": 0.0,
    "run__steps": 6,
    "inner__averaging": "gpa",
    "inner__mu_x": 0.8,
}


@pytest.mark.parametrize("options", [ALONE, GOSSIP], ids=["alone", "gossip"])
def test_a_run_with_an_average_that_is_stopped_and_resumed_equals_the_uninterrupted_run(options, tmp_path):
    config = single(**options)
    simulate(config, tmp_path / "whole")
    simulate(config, tmp_path / "parts", until=2)
    simulate(config, tmp_path / "parts", resume=True)
    assert all(map(torch.equal, parameters(tmp_path / "whole", config), parameters(tmp_path / "parts", config)))
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    whole, parts = (
        checkpoint.load(tmp_path / name / "checkpoints", config.length.rounds, 0, digest(config))["inner"]["state"]
        for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[k][name], parts[k][name]) for k in whole for name in ("x", "z"))


def test_a_real_run_with_an_average_leaves_what_its_simulation_leaves(tmp_path):
    config = single(**GOSSIP, run__timeout_s=60)
    code, output = run(*words_of(config, tmp_path / "real"))
    assert code == 0, output
    simulate(config, tmp_path / "simulated")
    assert all(map(torch.equal, parameters(tmp_path / "real", config), parameters(tmp_path / "simulated", config)))
    own = [line["loss"] for line in read_metrics(tmp_path / "real") if line["kind"] == "validation"]
    assert own[-1] == pytest.approx(
        evaluations(tmp_path / "simulated")[-1], abs=1e-5
    )  # of this worker, and of the mean
    assert evaluations(tmp_path / "simulated")[-1] == evaluate(tmp_path / "real")[1].loss


def test_gossip_mixes_the_average_and_the_iterate_and_the_parameters_follow_from_them(tmp_path):
    config = single(**GOSSIP)
    simulate(config, tmp_path / "run")
    states = [
        checkpoint.load(tmp_path / "run" / "checkpoints", config.length.rounds, w, digest(config)) for w in range(3)
    ]
    for name in ("x", "z"):
        kept = [torch.cat([own[name].flatten() for own in state["inner"]["state"].values()]) for state in states]
        torch.testing.assert_close(kept[0], kept[1])  # all mix with all
        assert not torch.equal(kept[0], torch.zeros_like(kept[0]))
    losses = [line["worker_losses"] for line in read_metrics(tmp_path / "run") if line["kind"] == "eval"][-1]
    assert max(losses) - min(losses) < 1e-3


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.floats(0.0, 1.0))
def test_mixing_the_average_and_the_iterate_is_mixing_the_parameters_too(seed, mu_y):
    """y is linear in x and z, so a doubly stochastic mixing of these two keeps what makes them the parameters."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    weights = torch.softmax(torch.randn(3, generator=generator, dtype=torch.float64), 0)
    mixed = sum(w * pair for w, pair in zip(weights, pairs, strict=True))
    parameters = [toward(z, x, mu_y) for x, z in pairs]
    torch.testing.assert_close(
        toward(mixed[1], mixed[0], mu_y), sum(w * y for w, y in zip(weights, parameters, strict=True))
    )


def test_schedule_free_workers_exchange_average_and_iterate_and_the_average_is_evaluated_and_saved(tmp_path):
    """Four local phases of two workers, of which two are warm-up, against algorithm 1 of arXiv 2405.15682 for each worker."""
    config = single(
        workers=2,
        rule__name="local_sgd",
        topology__name="complete",
        run__steps=12,
        run__local_steps=3,
        run__eval_every=12,
        inner={
            "averaging": "schedule_free",
            "schedule": "constant",
            "warmup_steps": 6,
            "mu_y": 0.9,
            "weight_decay": 0.5,
        },
    )
    result = simulate(config, tmp_path)
    (x, z), y = schedule_free_by_hand(config)
    torch.testing.assert_close(parameters(tmp_path, config)[0], x.float(), rtol=0, atol=2e-6)
    final = checkpoint.load(tmp_path / "checkpoints", config.length.rounds, 0, digest(config))
    kept = [torch.cat([own[name].flatten() for own in final["inner"]["state"].values()]) for name in ("x", "z")]
    for ours, theirs in zip(kept, (x, z), strict=True):
        assert sorted(ours.tolist()) == pytest.approx(sorted(theirs.tolist()), abs=2e-6)
    probe = Probe(settings_of(config), task_of(settings_of(config)), torch.device(DEVICE))
    assert result.loss == pytest.approx(probe.loss(x.float()), abs=1e-5)
    assert abs(result.loss - probe.loss(y.float())) > 1e-3


def schedule_free_by_hand(config):
    """x and z, which are those of all workers at the end, and y between them."""
    task = task_of(settings_of(config))
    workers = [Replica(i, settings_of(config), task, torch.device(DEVICE)) for i in range(config.workers)]
    decayed = torch.cat(
        [torch.full((leaf.stop - leaf.start,), float(len(leaf.shape) > 1)) for leaf in workers[0].layout.leaves]
    )
    gradients = [worker.keep_gradient() for worker in workers]
    x = z = workers[0].x.double()
    lr, beta, (_, beta2), decay = config.inner.lr, config.inner.mu_y, config.inner.betas, config.inner.weight_decay
    squares = [torch.zeros_like(x) for _ in workers]
    total = 0.0
    for round in range(config.length.rounds):
        ends, weight = [], total
        for i, worker in enumerate(workers):
            own_x, own_z, total = x, z, weight
            for t in range(round * config.length.full_steps + 1, (round + 1) * config.length.full_steps + 1):
                y = (1 - beta) * own_z + beta * own_x
                worker.x.copy_(y)
                worker.train(round, 0, 1)
                g = gradients[i].double()
                rate = lr * min(1.0, t / config.inner.warmup_steps)
                squares[i] = beta2 * squares[i] + (1 - beta2) * g**2
                step = g / ((squares[i] / (1 - beta2**t)).sqrt() + config.inner.eps)
                own_z = own_z - rate * step - rate * decay * decayed * y
                total += rate**2
                own_x = own_x + rate**2 / total * (own_z - own_x)
            ends.append((own_x, own_z))
        x, z = (sum(parts) / len(workers) for parts in zip(*ends, strict=True))
    return (x, z), (1 - beta) * z + beta * x


def test_fragments_of_an_average_and_its_iterate_are_refused():
    with pytest.raises(ConfigError, match="exchanged together"):
        resolve(single(schedule__fragments=2, inner__averaging="gpa"))
