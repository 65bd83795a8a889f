"""Runs that wait for nobody on real processes, as a user starts them: who is slow, who dies, and the same bits again."""

import json
import os
import shutil
import signal

import pytest
import torch

from commands import run
from gossamer.cli import main
from gossamer.errors import DataError
from gossamer.record import checkpoint
from gossamer.record.events import read_events
from gossamer.record.order import Finished, Met, Mixed, phases_in, read_order
from gossamer.run.async_replay import replay_asynchronous
from gossamer.run.config import digest, dump
from tiny import tiny


def after_round_2(rank, act):
    """Worker `rank` does this to itself right after it has saved round 2 or a later one for the first time."""

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        real(store, finished, *state, **lineage)
        if finished >= 2 and not done:
            done.append(finished)
            os.kill(os.getpid(), act)

    done: list[int] = []
    if os.environ["RANK"] == str(rank):
        checkpoint.save = save


def train_but_kill_worker_2_and_ask_worker_1_to_leave(argv):
    """`gossamer train`, in which one worker is killed and another one is asked to leave."""
    after_round_2(2, signal.SIGKILL)
    after_round_2(1, signal.SIGTERM)
    return main(argv)


def train_but_kill_worker_2(argv):
    """`gossamer train`, in which one worker is killed."""
    after_round_2(2, signal.SIGKILL)
    return main(argv)


def trained(tmp_path, monkeypatch, work, **overrides):
    """A run whose last worker is eight times slower than the others: its folder, configuration, output and order of events."""
    # The paces are long, so that on a busy machine too nobody takes all steps before the others have begun.
    config = tiny(run__timeout_s=60, run__eval_every=8, run__pace_s=[0.1] * 3 + [0.8], workers=4, **overrides)
    folder = tmp_path / "run"
    (tmp_path / "run.toml").write_text(dump(config))
    with monkeypatch.context() as patched:
        patched.setattr("gossamer.cli.main", work)
        code, output = run("train", tmp_path / "run.toml", "--out", folder, "--local", 4)
    assert code == 0, output
    return folder, config, output, read_order(folder)


def must_be_the_same(folder, again, config, workers):
    for worker in workers:
        rounds = checkpoint.rounds(folder / "checkpoints", worker, digest(config))
        ours, theirs = (
            checkpoint.load(one / "checkpoints", rounds[-1], worker, digest(config)) for one in (folder, again)
        )
        assert torch.equal(ours["x"], theirs["x"]), worker
        assert all(map(torch.equal, ours["outer"], theirs["outer"])), worker


def test_gossip_that_waits_for_nobody_goes_on_without_the_dead_and_its_record_gives_the_same_bits(
    tmp_path, monkeypatch, caplog
):
    folder, config, output, order = trained(
        tmp_path, monkeypatch, train_but_kill_worker_2_and_ask_worker_1_to_leave, run__wait=False, codec__name="int8",
        run__steps=20,
    )  # fmt: skip
    phases = {i: phases_in(events) for i, events in order.items()}
    assert sum(f"worker 2 ended with code 137 after {phases[2]} local phases" in one for one in caplog.messages) == 2
    assert f"worker 1 has left after {phases[1]} local phases" in caplog.messages
    assert "worker 2 is suspected: the connection with it was lost" in output
    assert phases[0] > phases[3] > 0, "nobody waits for the slow one, which trains all the same"
    assert 4 * 10 - 2 <= sum(phases.values()) < 4 * 10 + 4, "the steps of those that are gone are taken by the others"
    assert [type(order[i][-1]) is Finished and order[i][-1].why for i in (0, 1, 3)] == ["finished", "left", "finished"]
    mixed = {i: [event for event in events if isinstance(event, Mixed)] for i, events in order.items()}
    assert mixed[0][-1].alive == {0, 3} and any(event.heard for event in mixed[0])
    versions = [version for event in mixed[0] for peer, version in event.heard if peer == 3]
    assert versions == sorted(versions) and len(set(versions)) <= phases[3]
    log = read_events(folder)
    assert log is not None and log.sent_bytes[0] > 0 and log.network == "these machines"

    code, output = run("simulate", tmp_path / "run.toml", "--replay", folder, "--out", tmp_path / "again", "--json")
    assert code == 0, output
    must_be_the_same(folder, tmp_path / "again", config, (0, 1, 3))
    assert read_order(tmp_path / "again") == order
    assert read_events(tmp_path / "again").sent_bytes.tolist() == log.sent_bytes.tolist()

    code, output = run("status", folder, "--json")
    assert [one["standing"] for one in json.loads(output)["workers"]] == ["finished", "left", "gone", "finished"]
    code, output = run("evaluate", folder, "--json")
    assert code == 0 and '"round": 10, "workers": [0, 3]' in output, output
    code, output = run("train", "--resume", folder, "--local", 4)
    assert code == 2 and "cannot resume" in output and "another --out" in output

    code, output = run("train", tmp_path / "run.toml", "--join", "auto")
    assert code == 2 and "start together" in output and "--local 4" in output

    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "order-003.jsonl").unlink()
    with pytest.raises(DataError, match="heard a message of worker 3 that was never sent"):
        replay_asynchronous(config, tmp_path / "nothing", copy)


def test_pairs_meet_while_they_train_and_their_record_gives_the_same_bits(tmp_path, monkeypatch, caplog):
    folder, config, output, order = trained(
        tmp_path, monkeypatch, train_but_kill_worker_2, pair__name="a2cid2", topology__name="complete", run__steps=32,
        events__meetings=3.0,
    )  # fmt: skip
    phases = {i: phases_in(events) for i, events in order.items()}
    assert sum(f"worker 2 ended with code 137 after {phases[2]} local phases" in one for one in caplog.messages) == 2
    assert phases[0] > phases[3] > 0 and 4 * 16 - 2 <= sum(phases.values()) < 4 * 16 + 4
    met = {i: {event[:3] for event in events if isinstance(event, Met)} for i, events in order.items()}
    assert sum(map(len, met.values())) > 4
    for i in (1, 3):  # nobody of these was killed amid of a meeting
        theirs = {(starter, number) for peer, starter, number in met[i] if peer == 0}
        assert theirs == {(starter, number) for peer, starter, number in met[0] if peer == i}
    code, output = run("simulate", tmp_path / "run.toml", "--replay", folder, "--out", tmp_path / "again", "--json")
    assert code == 0, output
    must_be_the_same(folder, tmp_path / "again", config, (0, 1, 3))
    code, output = run("evaluate", folder, "--json")
    assert code == 0 and '"round": 16, "workers": [0, 1, 3]' in output, output
