"""Elastic runs computed again from their log of outcomes, to the last bit, and what an audit finds."""

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from commands import Command, run
from gossamer.cli import main
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.elastic.elastic_rounds import ElasticRounds
from gossamer.run.replay.elastic import replay_elastic
from gossamer.run.replay.script import outcomes_of
from gossamer.run.simulated.simulate import simulate
from gossamer.transport.elastic.transport import ElasticTransport
from tiny import tiny


def trained(folder):
    """What each worker recorded of each round: losses, inner steps, and hashes of what it sent."""
    return {
        (line["worker"], line["round"]): (line["loss"], line["step"], line["hashes"])
        for line in read_metrics(folder)
        if line["kind"] == "train"
    }


def newest(folder, config, slot):
    """The parameters in the newest checkpoint of a slot, and its round."""
    store = folder / "checkpoints"
    round = max(checkpoint.rounds(store, slot))
    return round, checkpoint.load(store, round, slot, digest(config))["x"]


@pytest.fixture(scope="module")
def churned(tmp_path_factory):
    """A run whose fragments are in flight while it trains; see `churn`."""
    return churn(
        tmp_path_factory.mktemp("churned"),
        topology__peers=2,
        inner__clip=0.5,
        schedule__fragments=2,
        schedule__overlap_steps=1,
        run__checkpoint_every=4,
    )


def churn(root, **settings):
    """An elastic run of real processes in which worker 1 was killed after a few rounds, and another process took its slot."""
    given = {
        "workers": 4,
        "model__layers": 2,
        "run__steps": 24,
        "run__eval_every": 0,
        "run__checkpoint_every": 2,
        "run__pace_s": 1.0,
        "run__timeout_s": 30,
        "run__rejoin_rounds": 0,
        **settings,
    }
    config = tiny(run__elastic=True, record__hash=True, **given)
    (root / "run.toml").write_text(dump(config))
    real = root / "real"
    launcher = Command("train", root / "run.toml", "--out", real, "--local", config.workers)
    pids = launcher.processes(config.workers)
    deadline = time.monotonic() + 120
    while not checkpoint.rounds(real / "checkpoints", 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(pids["1"], signal.SIGKILL)
    left = max(checkpoint.rounds(real / "checkpoints", 1))
    # The others continue without it, so that its own state is too old for the newcomer.
    while max(checkpoint.rounds(real / "checkpoints", 0), default=0) < left + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    newcomer = Command("train", root / "run.toml", "--out", real, "--join", "auto")
    code, printed = newcomer.finish()
    ended, output = launcher.finish()
    assert (code, ended) == (0, 0), printed + output
    return root, config


@pytest.mark.timeout(300)
def test_a_run_with_a_death_and_a_newcomer_is_replayed_to_the_last_bit(churned, caplog):
    is_replayed(*churned)
    assert "last bit" not in caplog.text


@pytest.mark.timeout(300)
def test_the_replay_of_a_run_in_progress_has_its_log_as_far_as_it_was_computed_again(churned, tmp_path, monkeypatch):
    root, config = churned
    folder = shutil.copytree(root / "real", tmp_path / "real")
    logs = {path.name: path.read_bytes() for path in folder.glob("outcomes-*.jsonl")}

    def read_before_more_is_written(recorded):
        lives = outcomes_of(recorded)
        for name, lines in logs.items():
            (recorded / name).write_bytes(lines + b"a later round\n")
        return lives

    monkeypatch.setattr("gossamer.run.replay.elastic.outcomes_of", read_before_more_is_written)
    replay_elastic(resolve(config, real=True), tmp_path / "again", folder)
    assert {name: (tmp_path / "again" / name).read_bytes() for name in logs} == logs


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        {"rule__name": "fgd", "rule__mix_updates": "ring", "model__layers": 1},
        {
            "workers": 3,
            "rule__name": "diloco",
            "topology__name": "complete",
            "schedule__fragments": 2,
            "data__constant_batch": True,
        },
    ],
    ids=["fgd", "means of fragments and shared slots"],
)
def test_so_is_one_of_a_rule_with_several_exchanges_a_round(settings, tmp_path, caplog):
    root, config = churn(tmp_path, **settings)
    is_replayed(root, config)
    if config.data.constant_batch:
        slots_are_shared(root / "real", config)
    else:
        assert "last bit" not in caplog.text


def slots_are_shared(folder, config):
    """Whether slot 1 continued except in the rounds in which its worker, present at their start, was lost."""
    lives = read_outcomes(folder)
    there = [outcome.alive is None or 1 in outcome.alive for life in lives[0] for outcome in life.rounds]
    begun = lives[1][1].begun
    went_on = [now or not before for before, now in zip([True, *there], there[: begun.round], strict=False)]
    lost = config.length.full_steps * begun.round - begun.steps  # a step may be part of one fragment's mean
    assert False in went_on and 0 <= config.length.full_steps * went_on.count(False) - lost < config.length.full_steps
    for slot in range(config.workers):
        saved = checkpoint.load(folder / "checkpoints", config.length.rounds, slot, digest(config))
        assert saved["sharing"][1] == [config.run.steps - lost * (slot == 1) for slot in range(config.workers)]


def is_replayed(root, config):
    """Whether a replay has the bits of the run."""
    first, *others = read_outcomes(root / "real")[1]
    assert first.ended is None and others and others[0].begun.round < config.length.rounds
    code, output = run("simulate", root / "run.toml", "--out", root / "replay", "--replay", root / "real")
    assert code == 0, output
    assert trained(root / "replay") == trained(root / "real")
    for slot in range(config.workers):
        (here, x), (there, y) = (newest(root / name, config, slot) for name in ("replay", "real"))
        assert here == there == config.length.rounds and torch.equal(x, y)


def test_until_somebody_dies_an_elastic_run_has_the_bits_of_its_simulation(churned, tmp_path):
    root, config = churned
    lives = [
        life for lives in read_outcomes(root / "real").values() for life in lives
    ]  # a worker that met it then has lost it
    death = min(outcome.round for life in lives for outcome in life.rounds if outcome.missed | outcome.unsure)
    simulate(config, tmp_path, until=death)
    calm = trained(tmp_path)
    real = {key: line for key, line in trained(root / "real").items() if key[1] < death}
    assert death >= 2 and real == calm


@pytest.mark.timeout(300)
def test_the_audit_of_an_elastic_run_agrees_and_finds_a_worker_that_says_something_else(churned, tmp_path):
    root, config = churned
    code, output = run("audit", root / "real", "--rounds", f"{config.length.rounds - 2}..", "--json")
    found = json.loads(output.splitlines()[-1])
    assert (code, found["difference"], found["compared"]) == (0, None, 2 * 2 * config.workers), "two for each round"
    last, lie = config.length.rounds - 2, tmp_path / "lie"
    shutil.copytree(root / "real", lie)
    lines = [json.loads(line) for line in (lie / "metrics-002.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train" and line["round"] == last:
            line["hashes"] = [one[::-1] for one in line["hashes"]]
    (lie / "metrics-002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output = run("audit", lie, "--rounds", f"{last}..", "--quiet")
    assert code == 1 and f"round {last}: worker 2 differs in what it sent" in output
    code, output = run("audit", lie, "--rounds", f"{last}..", "--worker", 3, "--quiet")
    assert code == 0, output
    code, output = run("audit", lie, "--rounds", "soon")
    assert code == 2 and "write the first and the last round" in output


def train_but_leave_amid_round_3(argv):
    """`gossamer train`, in which all workers are asked to leave while they wait for each other to close the rest of a round."""

    def proposed(self, round, real=ElasticTransport.proposed):
        if self.core.round == 3 and self.closing.round % self.closing.per_round == self.closing.per_round - 1:
            folder = Path(argv[argv.index("--out") + 1])
            (folder / f"comes-{self.worker}").touch()
            while len([*folder.glob("comes-*")]) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, round)

    ElasticTransport.proposed = proposed
    return main(argv)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fragments", [1, 2])
def test_workers_that_leave_amid_a_round_continue_from_its_start_with_the_bits_of_the_replay(
    fragments, tmp_path, monkeypatch
):
    config = tiny(
        run__elastic=True,
        rule__name="diloco",
        topology__name="complete",
        record__hash=True,
        run__timeout_s=60,
        run__eval_every=0,
        schedule__fragments=fragments,
    )
    (tmp_path / "run.toml").write_text(dump(config))
    with monkeypatch.context() as patched:
        patched.setattr("gossamer.cli.main", train_but_leave_amid_round_3)
        code, output = run("train", tmp_path / "run.toml", "--out", tmp_path / "real", "--local", 3)
    assert code == 2 and output.count("leaves after round 3") == 3, output
    code, output = run("train", "--resume", tmp_path / "real", "--local", 3)
    assert code == 0, output
    code, output = run("audit", tmp_path / "real")
    assert code == 0, output
    code, output = run("simulate", tmp_path / "run.toml", "--out", tmp_path / "replay", "--replay", tmp_path / "real")
    assert code == 0 and trained(tmp_path / "replay") == trained(tmp_path / "real"), output


def train_but_leave_after_round_4(argv):
    """`gossamer train`, in which each worker waits after round 4 until it may leave, and one that joins then leaves at once."""

    def end(self, *report, real=ElasticRounds._end_round):
        real(self, *report)
        if self.round == 3:
            (self.folder / f"waits-{self.slot}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    def start(self, real=ElasticRounds.start_clock, **how):
        if self.round == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, **how)

    ElasticRounds._end_round, ElasticRounds.start_clock = end, start
    return main(argv)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["gasloc", "diloco"])
def test_a_worker_that_leaves_with_a_state_that_it_has_taken_over_continues_with_it_and_is_replayed(
    rule, tmp_path, monkeypatch
):
    config = tiny(
        run__elastic=True,
        rule__name=rule,
        topology__name="complete",
        record__hash=True,
        run__timeout_s=60,
        run__eval_every=0,
    )
    real, command = tmp_path / "real", ("train", tmp_path / "run.toml", "--out", tmp_path / "real")
    (tmp_path / "run.toml").write_text(dump(config))

    def join() -> tuple[int, str]:
        deadline = time.monotonic() + 100
        while len([*real.glob("waits-*")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = Command(*command, "--join", "auto", work=train_but_leave_after_round_4).finish()
        (real / "go").touch()
        return ended

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        patched.setattr("gossamer.cli.main", train_but_leave_after_round_4)
        newcomer = pool.submit(join)
        code, output = run(*command, "--local", 2)
    left, printed = newcomer.result()
    assert left == 0 and "worker 2 leaves after round 4" in printed, printed
    assert code == 2 and output.count("leaves after round 4") == 2, output
    code, output = run("train", "--resume", real, "--local", 3)
    assert code == 0, output
    assert [[life.begun.round for life in lives] for lives in read_outcomes(real).values()] == [[0, 4], [0, 4], [4]]
    code, output = run("audit", real)
    assert code == 0, output
    code, output = run("simulate", tmp_path / "run.toml", "--out", tmp_path / "replay", "--replay", real)
    assert code == 0 and trained(tmp_path / "replay") == trained(real), output
