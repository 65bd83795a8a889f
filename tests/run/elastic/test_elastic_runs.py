"""Elastic runs as a user starts them: deaths on the way, scores and reports after them, and how the run continues."""

import json
import os
import shutil
import signal
import time

import pytest
import torch

from commands import Command, free_port, run
from gossamer.cli import main
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.run.config.run_file import digest, dump
from gossamer.run.elastic.elastic_rounds import ElasticRounds
from gossamer.run.simulated.simulate import simulate
from gossamer.transport.elastic.members import MemberStatus
from gossamer.transport.elastic.transport import ElasticTransport
from tiny import single as tiny


def train_but_kill_worker_2(argv):
    """`gossamer train`, in which worker 2 is killed right after it has saved round 3."""

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        real(store, finished, *state, **lineage)
        if finished == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "2":
        checkpoint.save = save
    return main(argv)


def train_but_lose_the_slot_once(argv):
    """`gossamer train`, whose first slot another process is given too, by another worker."""

    def declare(self, standing, since=None, real=ElasticTransport.declare):
        if standing == MemberStatus.ALIVE:
            ElasticTransport.declare = real
            own = self.members.own
            self.members.merge([own._replace(nonce=own.nonce + 1)])
        real(self, standing, since)

    ElasticTransport.declare = declare
    return main(argv)


def train_but_leave_at_once(argv):
    """`gossamer train`, in which each worker is asked to leave before its first round."""

    def start(self, real=ElasticRounds.start_clock, **how):
        os.kill(os.getpid(), signal.SIGTERM)
        real(self, **how)

    ElasticRounds.start_clock = start
    return main(argv)


def status(folder):
    code, output = run("status", folder, "--json")
    assert code == 0, output
    return json.loads(output)


def standings(folder):
    return [worker["standing"] for worker in status(folder)["workers"]]


def rounds_of(folder, worker):
    return [line["round"] for line in read_metrics(folder) if line["kind"] == "train" and line["worker"] == worker]


def rounds_after(folder, worker, round):
    return [each for each in rounds_of(folder, worker) if each > round]


def eventually(command, holds, timeout_s):
    """Waits until it `holds` while a command runs; if it does not, ends the command and tells what it said."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, command.finish(0)
        time.sleep(0.3)


def without_disk(folder, worker):
    """What is left of a run folder when one worker's disk is gone."""
    for path in [*folder.rglob(f"*-{worker:03}.*")]:
        path.unlink()


@pytest.mark.timeout(600)  # its waits together: a busy machine needs them
def test_a_run_ends_well_without_a_worker_that_died_and_resumes_with_fewer_and_with_newcomers(
    tmp_path, monkeypatch, caplog
):
    folder, config = tmp_path / "run", tiny(run__elastic=True, run__timeout_s=60)
    (tmp_path / "run.toml").write_text(dump(config))
    with monkeypatch.context() as patched:
        patched.setattr("gossamer.cli.main", train_but_kill_worker_2)
        code, output = run("train", tmp_path / "run.toml", "--out", folder, "--local", 3)
    assert code == 0, output
    died = "worker 2 ended with code 137 after round 3"
    assert caplog.messages == [f"{died}, and the others go on", f"{died} of 6"]
    assert "worker 2 is suspected: the connection with it was lost" in output
    assert standings(folder) == ["finished", "finished", "gone"]
    code, output = run("evaluate", folder, "--json")
    assert code == 0 and '"round": 6, "workers": [0, 1]' in output, output
    assert caplog.messages[-1] == "round 6 has no checkpoint of worker 2; the mean model is that of worker 0, 1"
    code, output = run("report", folder, "--out", tmp_path / "page.html")
    assert code == 0, output

    without_disk(folder, 0)
    sets = [
        f"--set={each}" for each in ("run.steps=8000", "run.pace_s=0.1", "run.eval_every=0", "run.checkpoint_every=50")
    ]
    rest = Command("train", "--resume", folder, "--local", 2, *sets)
    eventually(
        rest, lambda: standings(folder) == ["alive", "alive", "gone"] and min(rounds_of(folder, 0) or [0]) >= 6, 250
    )
    words = "train", folder / "run.toml", "--out", folder, "--join", "auto"
    newcomer = Command(*words, work=train_but_lose_the_slot_once)
    eventually(newcomer, lambda: standings(folder) == ["alive"] * 3 and len(rounds_after(folder, 2, 6)) > 2, 200)
    os.kill(rest.pid, signal.SIGTERM)
    code, output = rest.finish()
    assert code == 130 and f"stopped; resume with --resume {folder}" in output, output
    # Its peers look once a round, so one that joins within a round has joined when they first see it.
    assert "worker 2 has joined, and takes part from round" in output and "worker 0 leaves after round" in output, (
        output
    )
    os.kill(newcomer.pid, signal.SIGTERM)
    code, output = newcomer.finish()
    assert code == 0 and "worker 2 leaves after round" in output, output
    assert "worker 2 lost its slot to another process, and asks for a free one" in output, output
    assert standings(folder) == ["left"] * 3
    resumed, joined = read_outcomes(folder)[0][-1], read_outcomes(folder)[2][-1]
    assert resumed.begun[:4] == (6, 6, 1, 12) and resumed.rounds[0].alive == {0, 1}
    assert joined.begun.donor in (0, 1) and joined.begun.incarnation == 2 and joined.begun.steps >= 12
    with_all = [checkpoint.rounds(folder / "checkpoints", slot)[-1] for slot in range(3)]
    assert min(with_all) > 6, "they have saved when they left"


def test_a_run_that_all_have_left_in_its_first_round_is_not_offered_for_resuming(tmp_path, monkeypatch, caplog):
    folder, config = tmp_path / "run", tiny(run__elastic=True, run__timeout_s=60)
    (tmp_path / "run.toml").write_text(dump(config))
    command = "train", tmp_path / "run.toml", "--out", folder, "--local", 3
    with monkeypatch.context() as patched:
        patched.setattr("gossamer.cli.main", train_but_leave_at_once)
        code, output = run(*command)
    assert code == 2 and output.count("leaves after round 0, as it was asked to") == 3, output
    assert caplog.messages[-1] == "the run ended before its last round, with code 2"
    assert standings(folder) == ["left"] * 3
    code, output = run(*command, "--resume", "auto")
    assert code == 0 and standings(folder) == ["finished"] * 3, output


def test_the_first_machine_of_a_run_of_means_waits_for_others_that_come_or_come_back_and_says_so(tmp_path):
    config = tiny(
        workers=2,
        rule__name="diloco",
        topology__name="complete",
        run__elastic=True,
        run__timeout_s=60,
        run__eval_every=0,
        run__steps=24,
        run__pace_s=0.25,
    )
    (tmp_path / "run.toml").write_text(dump(config))
    words, secret = ("train", tmp_path / "run.toml", "--out"), {"GOSSAMER_SECRET": "of both " * 5}
    address = f"127.0.0.1:{free_port()}"
    join = (*words, tmp_path / "1", "--join", address)
    first = Command(*words, tmp_path / "0", "--listen", address, **secret)
    waits = (line for line in first.lines() if "waits for others to join" in line)
    assert "round 1 waits" in (waiting := next(waits)) and "more than half of the 2 workers, and here is one" in waiting
    second = Command(*join, **secret)
    eventually(second, lambda: len(rounds_of(tmp_path / "1", 1)) > 1, 100)
    os.kill(second.pid, signal.SIGTERM)
    assert second.finish()[0] == 0
    assert next(waits) != waiting
    third = Command(*join, **secret)
    (code, printed), (of_first, output) = third.finish(), first.finish()
    assert (code, of_first) == (0, 0), printed + output
    ours, theirs = (
        checkpoint.load(tmp_path / str(worker) / "checkpoints", config.length.rounds, worker, digest(config))["x"]
        for worker in range(2)
    )
    assert torch.equal(ours, theirs)
    assert [one["standing"] for one in status(tmp_path / "0")["workers"]] == ["finished", "unknown"]


@pytest.mark.parametrize("kind", [{"run__elastic": True}, {"pair__name": "ad_psgd"}])
def test_the_first_machine_of_a_run_of_gossip_waits_for_another_and_says_so(tmp_path, kind):
    config = tiny(workers=3, run__timeout_s=60, run__eval_every=0, run__steps=8, topology__name="complete", **kind)
    (tmp_path / "run.toml").write_text(dump(config))
    words, secret = ("train", tmp_path / "run.toml", "--out"), {"GOSSAMER_SECRET": "of both " * 5}
    address = f"127.0.0.1:{free_port()}"
    first = Command(*words, tmp_path / "0", "--listen", address, **secret)
    waits_line = next(line for line in first.lines() if "waits for another to join" in line)
    assert "worker 0 waits" in waits_line and "of 3 workers it is the only one here" in waits_line
    assert not [line for line in read_metrics(tmp_path / "0") if line["kind"] == "train"]
    second = Command(*words, tmp_path / "1", "--join", address, **secret)
    (code, printed), (of_first, output) = second.finish(), first.finish()
    assert (code, of_first) == (0, 0), printed + output
    alone = [line for line in output.splitlines() if "local phases alone" in line]
    assert not alone, "the second took part from the first round or the next one on"


def test_a_calm_elastic_run_resumes_with_the_same_bits_and_a_worker_that_lagged_sets_the_round(tmp_path):
    """Within a stretch of more local steps than there were at the start, and with another momentum."""
    steps = {"run__steps": 15, "run__local_steps": {"0": 1, "3": 4}, "run__checkpoint_every": 1}
    config = tiny(run__elastic=True, run__timeout_s=60, rule__momentum={"0": 0.5, "7": 0.3}, **steps)
    simulate(config, tmp_path / "whole")
    simulate(config, tmp_path / "half", until=4)
    folder = tmp_path / "run"
    shutil.copytree(tmp_path / "half" / "checkpoints", folder / "checkpoints")
    (folder / "run.toml").write_text(dump(config))
    without_disk(folder / "checkpoints" / "round-000004", 1)
    code, output = run("train", "--resume", folder, "--local", 3)
    assert code == 0, output
    assert [rounds_of(folder, worker) for worker in range(3)] == [[3, 4, 5]] * 3
    for worker in range(3):
        ours, theirs = (
            checkpoint.load(where / "checkpoints", 6, worker, digest(config)) for where in (folder, tmp_path / "whole")
        )
        assert torch.equal(ours["x"], theirs["x"]), worker
    code, output = run("train", "--resume", folder, "--local", 3)
    assert code == 0 and f"the run has ended after {config.length.rounds} rounds" in output


def test_an_encrypted_run_has_the_bits_of_a_plain_one_and_accepts_listed_keys(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, printed = run("keys", "new", "berlin", "--json")
    assert code == 0, printed
    certificate = json.loads(printed)["keys"][0]["certificate"]
    config = tiny(run__elastic=True, run__timeout_s=60, peers={"berlin": {"certificate": certificate, "workers": 3}})
    plain, folder = tiny(run__elastic=True), tmp_path / "run"
    assert digest(config) == digest(plain), "who takes part decides no number"
    simulate(plain, tmp_path / "whole")
    (tmp_path / "run.toml").write_text(dump(config))
    for elastic in ("true", "false"):
        changed = ("--set", f"run.elastic={elastic}")
        code, output = run("train", tmp_path / "run.toml", "--local", 3, "--out", folder / elastic, *changed)
        assert code == 0, output
        own = digest(config if elastic == "true" else tiny())
        for worker in range(3):
            ours, theirs = (
                checkpoint.load(where / "checkpoints", 6, worker, line)
                for where, line in ((folder / elastic, own), (tmp_path / "whole", digest(config)))
            )
            assert torch.equal(ours["x"], theirs["x"]), (elastic, worker)
    (tmp_path / "gossamer" / "keys" / "berlin.pem").unlink()
    code, output = run("train", tmp_path / "run.toml", "--local", 3, "--out", tmp_path / "c")
    assert code == 2 and "lists none of the keys in" in output and "gossamer keys new NAME" in output


def test_only_an_elastic_run_is_scored_where_a_checkpoint_is_missing_and_starts_with_fewer_workers(tmp_path):
    for elastic in (True, False):
        folder, config = tmp_path / str(elastic), tiny(run__elastic=elastic, run__steps=4)
        simulate(config, folder)
        without_disk(folder / "checkpoints" / "round-000002", 1)
        code, output = run("evaluate", folder, "--json")
        assert code == 0 and ('"round": 2, "workers": [0, 2]' if elastic else '"round": 1') in output
        code, output = run("evaluate", folder, "--round", 7)
        assert code == 2 and ("round 7 has no checkpoint of any worker" if elastic else "round 7 lacks some") in output
    code, output = run("train", "--resume", folder, "--local", 2)
    assert code == 2 and "--local 2 but the run file has workers = 3" in output
