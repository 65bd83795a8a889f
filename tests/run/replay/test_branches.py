"""Runs resumed with other settings: audits and replays use those of each round, or say why they cannot."""

import json
import shutil
import threading

import pytest
import torch
from test_async_lives import KINDS, LIMIT_S, SECRET, Fleet, must_replay
from test_elastic_replay import newest, trained
from test_server_processes import Process, a_server, model, served
from test_virtual import timed

from commands import run
from gossamer.cli import main
from gossamer.errors import ConfigError, DataError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.lineage import read_branches, write_branches
from gossamer.record.logs.arrivals import read_arrivals
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.replay.asynchronous import replay_asynchronous
from gossamer.run.replay.audit import audit
from gossamer.run.replay.replay import replay
from gossamer.run.replay.served import replay_server
from gossamer.run.replay.stretches import stretches
from gossamer.run.served.served_worker import work
from gossamer.run.simulated.simulate import simulate
from tiny import single, tiny


def hashed(**overrides):
    """A run whose learning rate follows its number of steps from the first round on."""
    base = {"model__layers": 1, "record__hash": True, "run__steps": 8, "run__eval_every": 0, "inner__warmup_steps": 1}
    return tiny(**{**base, **overrides})


def lying(folder, round, worker):
    """Lets the record say that a worker sent something else in a round."""
    lines = read_metrics(folder)
    for line in lines:
        if (line["kind"], line["round"], line.get("worker")) == ("train", round, worker):
            line["hashes"] = [one[::-1] for one in line["hashes"]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


WAYS = {
    "more steps after the end": ({}, None, {"run__steps": 16}),
    "a learning rate on the way": ({"run__steps": 16}, 4, {"run__steps": 16, "inner__lr": 1e-4, "rule__lr": 0.5}),
    "messages in flight": (
        {"schedule__fragments": 2, "schedule__overlap_steps": 1, "model__layers": 2, "run__steps": 16},
        4,
        {
            "schedule__fragments": 2,
            "schedule__overlap_steps": 1,
            "model__layers": 2,
            "run__steps": 12,
            "inner__clip": 0.1,
        },
    ),
    "stages": (
        {"model__layers": 2, "data__accumulate": 2},
        None,
        {"model__layers": 2, "data__accumulate": 2, "run__steps": 16, "pipeline__stages": 2},
    ),
}
"""Settings, the rounds completed before the run continues, and the settings with which it continues."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "until", "after"), WAYS.values(), ids=WAYS.keys())
def test_an_audit_of_a_run_that_continued_with_other_settings_accuses_only_the_wrong_worker(
    before, until, after, tmp_path
):
    simulate(hashed(**before), tmp_path, until=until)
    config = hashed(**after)
    simulate(config, tmp_path, resume=True)
    (branch,) = read_branches(tmp_path)
    assert branch["round"] == 4
    last, stops = config.length.rounds - 1, config.schedule.fragments
    found = audit(tmp_path)
    assert found.difference is None and found.compared == 3 * stops * (last + 1 - found.first)
    shutil.rmtree(tmp_path / "checkpoints")
    assert audit(tmp_path) == (0, last, 0, 3 * stops * config.length.rounds, None), "across the branch"
    lying(tmp_path, 2, 1)
    assert audit(tmp_path).difference == (2, 1, "what it sent")
    assert audit(tmp_path, rounds=(4, None)).difference is None
    lying(tmp_path, last, 0)
    assert audit(tmp_path, rounds=(4, None)).difference == (last, 0, "what it sent")


def test_a_run_that_went_back_behind_a_change_of_settings_is_audited_with_the_later_ones(tmp_path):
    first, second, third = (hashed(run__steps=12, inner__lr=lr) for lr in (1e-3, 1e-4, 1e-5))
    simulate(first, tmp_path, until=3)
    simulate(second, tmp_path, resume=True, until=4)
    for file in tmp_path.glob("checkpoints/round-000004/*"):
        file.unlink()
    simulate(third, tmp_path, resume=True)
    assert [one["round"] for one in read_branches(tmp_path)] == [3, 3]
    assert [one.run.digest for one in stretches(resolve(third), tmp_path, real=False)] == [
        *map(digest, (first, second, third))
    ]
    assert audit(tmp_path, rounds=(0, None)).difference is None


def test_settings_before_a_change_that_cannot_be_recovered_are_no_reason_to_guess(tmp_path):
    simulate(hashed(), tmp_path)
    simulate(hashed(run__steps=16), tmp_path, resume=True)
    (branch,) = read_branches(tmp_path)
    write_branches(tmp_path, [{**branch, "changes": {"run.steps": [10, 16]}}])
    with pytest.raises(
        DataError, match=r"before they changed after round 4: run.steps from 10 to 16, cannot be recovered"
    ):
        audit(tmp_path)


SIMULATED = {
    "rounds": (hashed, {}),
    "gossip without waiting": (timed, {"run__wait": False, "run__checkpoint_every": 2}),
    "a server": (timed, {"server": {"name": "heloco"}, "run__checkpoint_every": 2}),
}


def test_a_replay_follows_a_change_after_a_round_at_which_no_checkpoint_was_due(tmp_path):
    before = hashed(run__steps=16, run__checkpoint_every=8)
    simulation = simulate(before, tmp_path / "k", until=1)
    with pytest.raises(KeyboardInterrupt, match="stopped after round 2 of 8, and saved"):
        simulation.go_on(asked=lambda: True)
    after = hashed(run__steps=16, run__checkpoint_every=8, inner__lr=1e-4)
    simulate(after, tmp_path / "k", resume=True)
    replay(lambda real: resolve(after, real=real), tmp_path / "again", tmp_path / "k")
    first, again = (
        [line for line in read_metrics(folder) if line["kind"] == "train"]
        for folder in (tmp_path / "k", tmp_path / "again")
    )
    assert first == again and len(first) == 3 * 8


@pytest.mark.full
@pytest.mark.parametrize(("make", "settings"), SIMULATED.values(), ids=SIMULATED.keys())
def test_simulating_the_run_file_of_a_run_whose_settings_changed_says_so_and_its_replay_follows_them(
    make, settings, tmp_path, capsys, caplog
):
    folder, slower = tmp_path / "k", make(**settings, run__steps=16, inner__lr=1e-4)
    simulate(make(**settings, run__steps=16), folder, until=3)
    simulate(slower, folder, resume=True)
    words = ["simulate", str(folder / "run.toml"), "--out"]
    assert main([*words, str(tmp_path / "last")]) == 0
    sentence = "after round 3: inner.lr from 0.001 to 0.0001; its run.toml has the settings since then alone"
    assert sentence in caplog.text and f"--replay {folder}" in caplog.text
    caplog.clear()
    assert main([*words, str(tmp_path / "again"), "--replay", str(folder)]) == 0, capsys.readouterr().err
    assert "settings since then alone" not in caplog.text

    def states(run):
        return [checkpoint.load(run / "checkpoints", 8, owner, digest(slower))["x"] for owner in resolve(slower).owners]

    assert all(map(torch.equal, states(folder), states(tmp_path / "again")))
    assert not all(map(torch.equal, states(folder), states(tmp_path / "last"))), "which is another run"
    assert read_metrics(tmp_path / "again") == read_metrics(folder)
    assert read_branches(tmp_path / "again") == read_branches(folder)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_an_elastic_run_that_continued_with_other_settings_is_replayed_and_audited_with_those_of_each_round(tmp_path):
    config = hashed(run__elastic=True, run__checkpoint_every=2, run__timeout_s=60)
    (tmp_path / "run.toml").write_text(dump(config))
    real = tmp_path / "real"
    code, output = run("train", tmp_path / "run.toml", "--out", real, "--local", 3)
    assert code == 0, output
    code, output = run("train", "--resume", real, "--local", 3, "--set", "run.steps=16", "--set", "inner.lr=3e-4")
    assert code == 0, output
    assert [len(lives) for lives in read_outcomes(real).values()] == [2] * 3
    code, output = run("simulate", real / "run.toml", "--out", tmp_path / "again", "--replay", real)
    assert code == 0, output
    assert trained(tmp_path / "again") == trained(real) and len(trained(real)) == 3 * 8
    after = hashed(run__elastic=True, run__steps=16, inner__lr=3e-4)
    for slot in range(3):
        (here, x), (there, y) = (newest(folder, after, slot) for folder in (tmp_path / "again", real))
        assert here == there == 8 and torch.equal(x, y)
    assert audit(real).difference is None
    shutil.rmtree(real / "checkpoints")
    assert audit(real) == (0, 7, 0, 3 * 8, None)
    # A log of outcomes that ends where the run ceased to be elastic is no log of the whole run.
    (branch,) = read_branches(real)
    write_branches(real, [{**branch, "changes": {**branch["changes"], "run.elastic": [True, False]}}])
    (real / "run.toml").write_text(dump(hashed(run__steps=16, inner__lr=3e-4)))
    with pytest.raises(ConfigError, match=r"run\.elastic changed after round 4 of .* only a run that was elastic from"):
        audit(real)
    code, output = run("simulate", real / "run.toml", "--out", tmp_path / "part", "--replay", real)
    assert code == 2 and "run.elastic changed after round 4" in output


@pytest.fixture
def a_secret(monkeypatch):
    monkeypatch.setenv("GOSSAMER_SECRET", SECRET)


@pytest.mark.usefixtures("a_secret")
def test_in_asynchronous_runs_settings_that_decide_no_number_may_change_and_others_are_refused_by_name(tmp_path):
    config = single(run__steps=8, run__checkpoint_every=4, run__timeout_s=LIMIT_S, run__eval_every=0, **KINDS["gossip"])
    folder = tmp_path / "run"
    fleet = Fleet(config, folder)
    together = threading.Barrier(3)
    fleet.start(lambda slot, number: together.wait(LIMIT_S) if number == 0 else None)
    fleet.finish()
    write_branches(folder, [{"round": 2, "digest": digest(config), "changes": {"run.timeout_s": [30.0, LIMIT_S]}}])
    must_replay(folder, tmp_path / "again", config)
    earlier = single(
        run__steps=4, run__checkpoint_every=4, run__timeout_s=LIMIT_S, run__eval_every=0, **KINDS["gossip"]
    )
    write_branches(folder, [{"round": 2, "digest": digest(earlier), "changes": {"run.steps": [4, 8]}}])
    with pytest.raises(ConfigError, match=r"after round 2: run.steps from 4 to 8; which of its .* is not recorded"):
        replay_asynchronous(resolve(config, real=True), tmp_path / "nothing", folder)


@pytest.mark.usefixtures("a_secret")
def test_a_server_that_was_resumed_with_other_settings_is_replayed_with_those_of_each_of_its_processes(
    tmp_path, monkeypatch
):
    real, given = tmp_path / "real", {"workers": 2, "server__name": "heloco", "run__checkpoint_every": 2}
    for steps, lr, resume in ((6, 1e-3, False), (12, 3e-4, True)):
        config = served(**given, run__steps=steps, inner__lr=lr)
        with a_server(config, real, monkeypatch, resume=resume) as (server, port):
            sides = [
                Process(work, resolve(config, real=True), real, "127.0.0.1", port, i, resume=resume) for i in range(2)
            ]
            for side in sides:
                side.join(60)
        assert [side.error for side in [server, *sides]] == [None] * 3
    first, second = (one for one in read_arrivals(real) if one.event == "serve")
    assert first.digest != second.digest == digest(config) and second.round == 3
    replay_server(resolve(config, real=True), tmp_path / "again", real)
    assert torch.equal(model(tmp_path / "again", config), model(real, config))
    assert read_branches(tmp_path / "again") == read_branches(real)
    (real / "branches.json").unlink()
    with pytest.raises(ConfigError, match=f"is a run of 2 workers with digest {first.digest} and the run file has 2"):
        replay_server(resolve(config, real=True), tmp_path / "nothing", real)
