"""Runs whose local steps follow the clock: simulated on a declared network, and real ones on slow machines and slow links."""

import os
import shutil
import tomllib

import numpy as np
import pytest
import tomli_w
import torch

from commands import run
from gossamer.errors import ConfigError, PairingError
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.trace import read_trace
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump, parse
from gossamer.run.simulated.simulate import simulate
from tiny import document, single, tiny

SMALL = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate_size": 8}
PAYLOAD_BYTES = 4 * parameter_count(ModelConfig(**SMALL), 256)


def declared(share, step_s=1.0, **options):
    """A network on which one exchange lasts 5/3 steps, and the last worker has this share of the others' uplink."""
    bps = 8 * PAYLOAD_BYTES / (5 / 3 * step_s)
    return {"uplink_bps": [bps, bps, bps, share * bps], "downlink_bps": bps, "step_s": step_s, **options}


def adaptive(network, **overrides):
    """A run of four workers that adapt from at most 30 steps."""
    quick = {
        "workers": 4,
        "run__adapt": True,
        "run__steps": 120,
        "run__local_steps": 30,
        "run__eval_every": 0,
        "run__checkpoint_every": 0,
        "data__seq_len": 4,
        "data__batch_size": 1,
        "data__max_bytes": 50_000,
        **{f"model__{name}": value for name, value in SMALL.items()},
    }
    return parse({**document(**quick | overrides), "network": network})


def last_states(folder, config):
    return [
        checkpoint.load(folder / "checkpoints", config.length.rounds, w, digest(config)) for w in range(config.workers)
    ]


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    """A run in which one uplink has a tenth: its folder, configuration and result."""
    folder, config = tmp_path_factory.mktemp("slowed") / "run", adaptive({"slow": declared(0.1)}, run__steps=90)
    return folder, config, simulate(config, folder)


@pytest.mark.full
def test_a_slow_uplink_settles_on_the_published_steps_within_three_rounds(slowed, tmp_path):
    """`test_pacing` has the other published settings."""
    config = adaptive({"slow": declared(0.2)}, topology__peers=2, run__steps=90)
    simulate(config, tmp_path / "run")
    for folder, steps in ((slowed[0], 15), (tmp_path / "run", 16)):
        assert read_trace(folder).steps.tolist() == [[30] * 4, [30] * 4, [30, 30, 30, steps]]


@pytest.mark.full
def test_steps_follow_a_link_that_changes_and_a_slow_computer(tmp_path):
    later = {"at_s": 40.0, "factor": 0.2, "worker": 1}
    network = declared(1.0, changes=[later]) | {"step_s": [1.0, 1.0, 2.0, 1.0]}
    config = adaptive({"one": network}, run__local_steps=10, run__steps=120)
    simulate(config, tmp_path / "run")
    steps = read_trace(tmp_path / "run").steps
    assert steps[4].tolist() == [10, 10, 5, 10]
    assert steps[-1].tolist() == [10, 3, 5, 10]


@pytest.mark.full
def test_jitter_moves_no_steps_back_and_forth(tmp_path):
    config = adaptive({"one": declared(0.2, jitter=0.05)}, run__local_steps=15, run__steps=105)
    simulate(config, tmp_path / "run")
    steps = read_trace(tmp_path / "run").steps
    changes = (steps[4:] != steps[3:-1]).sum(axis=0)
    assert changes.max() <= 2
    assert all(abs(own - wanted) <= 2 for own, wanted in zip(steps[-1], (15, 15, 15, 8), strict=True))


@pytest.mark.full
def test_a_resumed_run_continues_with_the_steps_in_force_and_to_the_same_bits(tmp_path):
    config = adaptive(
        {"slow": declared(0.1)},
        run__local_steps=10,
        run__steps=40,
        run__checkpoint_every=10,
        run__weigh_steps=True,
        model__layers=2,
        schedule__fragments=2,
        schedule__overlap_steps=3,
    )
    simulate(config, tmp_path / "whole")
    simulate(config, tmp_path / "parts", until=3)
    simulate(config, tmp_path / "parts", resume=True)
    steps = [read_trace(tmp_path / name).steps.tolist() for name in ("whole", "parts")]
    assert steps[0] == steps[1] and min(steps[0][-1]) < 10
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    states = [last_states(tmp_path / name, config) for name in ("whole", "parts")]
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(*states, strict=True))
    fragments = config.schedule.fragments  # each has a round of its own in the trace
    assert [state["pace"]["steps"] for state in states[0]] == np.sum(steps[0][-fragments:], axis=0).tolist()


def test_tokens_are_those_that_were_trained_on(slowed, tmp_path):
    folder, config, result = slowed
    steps = int(read_trace(folder).steps.sum())
    assert result.tokens == steps * config.length.step_tokens < 90 * 4 * config.length.step_tokens
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    evaluate(tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["tokens"] == result.tokens


def test_declared_steps_are_what_a_run_begins_with_and_the_largest_the_most(tmp_path):
    config = adaptive({"slow": declared(0.1)}, run__local_steps=[10, 10, 10, 5], run__steps=20)
    simulate(config, tmp_path / "run")
    assert read_trace(tmp_path / "run").steps.tolist() == [[10, 10, 10, 5]] * 2


@pytest.mark.parametrize(
    ("networks", "overrides", "sentence"),
    [
        ({}, {}, r"run\.adapt is true and the run file declares 0 networks \(none\)"),
        ({"a": declared(1.0), "b": declared(1.0)}, {}, r"declares 2 networks \(a, b\)"),
        ({"a": declared(1.0)}, {"run__adapt": "c"}, "run.adapt is 'c': unknown network 'c'"),
        ({}, {"run__adapt": "c"}, "run.adapt is 'c': the run file declares no network"),
        ({"a": declared(1.0) | {"step_s": 0.0}}, {}, "gives step_s = 0"),
        ({"a": {"uplink_bps": 1e6, "downlink_bps": 1e6}}, {}, "gives step_s = None"),
        ({"a": {"uplink_bps": [1e6, 1e6], "downlink_bps": 1e6, "step_s": 1}}, {}, "lists 2 workers but the run has 4"),
        (
            {"a": declared(1.0)},
            {"run__local_steps": 1, "run__steps": 2},
            "needs room to shrink, but run.local_steps is 1",
        ),
    ],
)
def test_what_cannot_adapt_is_refused_in_a_sentence(networks, overrides, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence) as caught:
        simulate(adaptive(networks, **overrides), tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_what_the_sums_come_back_in_takes_no_step_from_whom_they_are_slow_for(tmp_path):
    bps = 5.2 * parameter_count(single().model, 256)
    network = {"slow": {"uplink_bps": [bps, bps, 0.1 * bps], "downlink_bps": 10 * bps, "step_s": 1.0}}
    steps = []
    for back in ("fp4", "bf16"):
        config = single(
            rule={"name": "diloco"},
            topology={"name": "complete"},
            codec={"name": "fp4", "back": back},
            network=network,
            run__adapt=True,
            run__local_steps=20,
            run__steps=60,
            run__checkpoint_every=0,
            run__eval_every=0,
        )
        simulate(config, tmp_path / back)
        steps.append(read_trace(tmp_path / back).steps[-1].tolist())
    assert steps == [[20, 20, 15]] * 2


def test_one_of_several_networks_can_be_named(tmp_path):
    both = {"even": declared(1.0), "slow": declared(0.1)}
    steps = {}
    for name in both:
        simulate(adaptive(both, run__adapt=name, run__local_steps=10, run__steps=30), tmp_path / name)
        steps[name] = read_trace(tmp_path / name).steps[-1, 3]
    assert steps["slow"] < steps["even"] == 10


def test_a_rule_that_hears_late_is_weighed_with_steps_that_stay_or_not_at_all():
    eager = {"rule__name": "eager", "topology__name": "complete"}
    resolve(tiny(**eager, run__weigh_steps=True))
    resolve(tiny(**eager, run__adapt=True), real=True)
    with pytest.raises(PairingError, match="applies updates 1 round late"):
        resolve(tiny(**eager, run__weigh_steps=True, run__adapt=True), real=True)


# --- real processes -------------------------------------------------------------------------------------------------


def train(config, folder, *words):
    """`gossamer train --local N` to its end."""
    (folder.parent / "run.toml").write_text(dump(config))
    target = words or (str(folder.parent / "run.toml"), "--out", str(folder))
    code, output = run("train", *target, "--local", config.workers)
    assert code == 0, output


@pytest.mark.timeout(300)
def test_a_slow_machine_settles_on_fewer_steps_and_keeps_them_when_resumed(tmp_path):
    config = single(
        run__local_steps=8,
        run__steps=40,
        run__adapt=True,
        run__pace_s=[0.08, 0.08, 0.4],
        run__eval_every=0,
        run__checkpoint_every=32,
        run__timeout_s=60,
    )
    train(config, tmp_path / "run")
    steps = read_trace(tmp_path / "run").steps
    assert steps[0].tolist() == [8, 8, 8]
    assert steps[-1, 2] <= 4 and steps[-1, :2].min() >= 6, steps
    for worker in range(3):  # as if all had been killed in the last rounds
        checkpoint.rewind(tmp_path / "run" / "checkpoints", 4, worker)
    train(config, tmp_path / "run", "--resume", str(tmp_path / "run"))
    resumed = read_trace(tmp_path / "run").steps
    assert (resumed[:4] == steps[:4]).all() and resumed[4].tolist() == steps[4].tolist()


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.timeout(300)
def test_a_slow_uplink_settles_on_fewer_steps(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root to limit links")
    import slow_links as links

    scale = links.QUICK._replace(workers=3, pace_s=0.19)  # links of 20 Mbit/s
    config = tiny(
        run__local_steps=20,
        run__steps=100,
        run__adapt=True,
        run__pace_s=0.1,
        run__eval_every=0,
        run__checkpoint_every=0,
        run__timeout_s=60,
        run__device="cpu",
        model__size="0.2m",
    )
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tomllib.loads(dump(config))))
    for attempt in range(3):  # what else runs here may slow every step down, beside which no link is slow
        with links.namespaces(scale, 0.2, "uplink") as names:
            links.train(names, tmp_path / "run.toml", tmp_path / f"run-{attempt}")
        steps = read_trace(tmp_path / f"run-{attempt}").steps
        # 0.31 s and 1.54 s for the 772 kB of a model: 20 steps, and 7 on the slow uplink.
        if steps[-1, 2] <= 11 and steps[-1, :2].min() >= 16:
            return
    raise AssertionError(steps)
