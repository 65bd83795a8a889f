"""Runs that wait for nobody on real processes, as a user starts them: who is slow, who dies, and the same bits again."""

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from commands import Command, run
from gossamer.cli import main
from gossamer.errors import DataError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.events import read_events
from gossamer.record.logs.order import Met, Mixed, Published, phases_in, read_order
from gossamer.record.logs.seconds import read_seconds
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.replay.asynchronous import replay_asynchronous
from tiny import single as tiny


def after_round_2(acts, until):
    """Some workers do something to themselves right after they have first saved round 2 or a later one.

    The others wait then until something holds of the run folder: else those that import faster would have spent the budget before
    a slow one begins.
    """

    def save(store, finished, *state, real=checkpoint.save, **lineage):
        real(store, finished, *state, **lineage)
        if finished >= 2 and not done:
            done.append(finished)
            if rank in acts:
                (store.parent / f"acted-{rank}").touch()
                os.kill(os.getpid(), acts[rank])
            deadline = time.monotonic() + 100
            while rank not in acts and not until(store.parent):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    rank, done = int(os.environ["RANK"]), []
    checkpoint.save = save


def train_but_kill_worker_2_and_ask_worker_1_to_leave(argv):
    """`gossamer train`, in which one worker is killed and another one is asked to leave."""
    after_round_2({2: signal.SIGKILL, 1: signal.SIGTERM}, lambda folder: len([*folder.glob("acted-*")]) == 2)
    return main(argv)


def train_but_kill_worker_2_and_wait_for_another(argv):
    """`gossamer train`, in which one worker is killed, and the others continue once another process fills its slot."""
    after_round_2({2: signal.SIGKILL}, lambda folder: (folder / "order-002.jsonl").read_text().count('"begin"') == 2)
    return main(argv)


def train_and_wait_for_all(argv):
    """`gossamer train`, in which each worker waits with its first checkpoint until all have one."""
    after_round_2(
        {}, lambda folder: len({one.name for one in folder.glob("checkpoints/round-*[1-9]/worker-*.json")}) == 3
    )
    return main(argv)


def trained(tmp_path, monkeypatch, work, meanwhile=None, **overrides):
    """A run whose last worker is eight times slower than the others: its folder, configuration, output and order of events.

    `meanwhile` is called with the folder as the run begins, in a thread.
    """
    config = tiny(run__timeout_s=60, run__eval_every=8, run__pace_s=[0.05] * 3 + [0.4], workers=4, **overrides)
    folder, when = tmp_path / "run", meanwhile or (lambda folder: None)
    (tmp_path / "run.toml").write_text(dump(config))
    pool = ThreadPoolExecutor(1)
    aside = pool.submit(when, folder)
    with monkeypatch.context() as patched:
        patched.setattr("gossamer.cli.main", work)
        code, output = run("train", tmp_path / "run.toml", "--out", folder, "--local", 4)
    aside.result()
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


def test_asynchronous_gossip_continues_without_the_dead_and_its_record_gives_the_same_bits(
    tmp_path, monkeypatch, caplog
):
    folder, config, output, order = trained(
        tmp_path,
        monkeypatch,
        train_but_kill_worker_2_and_ask_worker_1_to_leave,
        run__wait=False,
        codec__name="int8",
        run__steps=20,
    )
    phases = {i: phases_in(events) for i, events in order.items()}
    assert sum(f"worker 2 ended with code 137 after {phases[2]} local phases" in one for one in caplog.messages) == 2
    assert f"worker 1 has left after {phases[1]} local phases" in caplog.messages
    assert "worker 2 is suspected: the connection with it was lost" in output
    assert phases[0] > phases[3] > 0, "nobody waits for the slow one, which trains all the same"
    assert 4 * 10 <= sum(phases.values()) < 4 * 10 + 4, "the steps of those that are gone are taken by the others"
    assert [order[i][-1].ended and order[i][-1].ended.why for i in range(4)] == ["finished", "left", None, "finished"]
    mixed = {i: [event for event in lives[0].events if isinstance(event, Mixed)] for i, lives in order.items()}
    assert mixed[0][-1].alive == {0, 3} and any(event.heard for event in mixed[0])
    versions = [version for event in mixed[0] for peer, version, _ in event.heard if peer == 3]
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

    for path in (folder / "checkpoints").glob("round-*/worker-001.*"):
        path.unlink()
    code, output = run("train", "--resume", folder, "--local", 4)
    assert code == 0, output
    lives = read_order(folder)
    assert [len(lives[i]) for i in range(4)] == [2] * 4 and all(
        one[-1].ended.why == "finished" for one in lives.values()
    )
    for i, (first, second) in lives.items():
        # The state of worker 1 was lost, and that of worker 2 is too old.
        assert first == order[i][0] and second.begun.source[0] == (0 if i in (1, 2) else i)
        assert i in (1, 2) or second.begun.source[1] == first.life
    for i in (1, 2):
        received = [version for event in mixed[0] + mixed[3] for j, version, _ in event.heard if j == i]
        assert lives[i][1].begun.number >= max(received, default=0), (
            "phases whose message others received are not repeated"
        )
    behind = sum(one[-1].phases for one in lives.values())
    # As above: a phase of which the others knew, and that is in no state any more, may be counted.
    assert 4 * 10 - 2 <= behind < 4 * 10 + 4, "what died with it is"
    code, output = run("simulate", folder / "run.toml", "--replay", folder, "--out", tmp_path / "both", "--json")
    assert code == 0, output
    must_be_the_same(folder, tmp_path / "both", config, range(4))
    code, output = run("evaluate", folder, "--json")
    assert code == 0 and '"round": 10, "workers": [0, 1, 2, 3]' in output, output
    assert published(lives[2]) == published(read_order(tmp_path / "both")[2])

    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "order-003.jsonl").unlink()
    with pytest.raises(DataError, match="heard a message of worker 3 that was never sent"):
        replay_asynchronous(resolve(config, real=True), tmp_path / "nothing", copy)


def published(lives):
    return [[event for event in one.events if isinstance(event, Published)] for one in lives]


def join_after_the_kill(folder):
    """Starts a worker once one has been killed, by the one command; it ends with the others."""
    deadline = time.monotonic() + 100
    while not (folder / "acted-2").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, output = Command("train", folder / "run.toml", "--join", "auto", "--out", folder).finish()
    assert code == 0 and "worker 2 joins after" in output and "with its own checkpoint" in output, output


def test_pairs_meet_while_they_train_and_their_record_gives_the_same_bits(tmp_path, monkeypatch, caplog):
    folder, config, output, order = trained(
        tmp_path,
        monkeypatch,
        train_but_kill_worker_2_and_wait_for_another,
        join_after_the_kill,
        pair__name="a2cid2",
        topology__name="complete",
        run__steps=32,
        events__meetings=3.0,
        run__rejoin_rounds=9,
    )
    phases = {i: phases_in(lives) for i, lives in order.items()}
    killed, back = order[2]
    assert (
        sum(f"worker 2 ended with code 137 after {killed.phases} local phases" in one for one in caplog.messages) == 2
    )
    assert killed.ended is None and back.ended.why == "finished" and back.begun.source[:2] == (2, killed.life)
    assert "worker 2 is replaced: another process has taken its slot" in output
    assert phases[0] > phases[3] > 0 and 4 * 16 - 2 <= sum(phases.values()) < 4 * 16 + 4
    met = {
        i: {event[:4] for one in lives for event in one.events if isinstance(event, Met)} for i, lives in order.items()
    }
    assert sum(map(len, met.values())) > 4
    for i in (1, 3):  # nobody of these was killed amid of a meeting
        assert {one[1:] for one in met[i] if one[0] == 0} == {one[1:] for one in met[0] if one[0] == i}
    code, output = run("simulate", tmp_path / "run.toml", "--replay", folder, "--out", tmp_path / "again", "--json")
    assert code == 0, output
    must_be_the_same(folder, tmp_path / "again", config, range(4))
    code, output = run("evaluate", folder, "--json")
    assert code == 0 and '"round": 16, "workers": [0, 1, 2, 3]' in output, output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tolerance", [20, 2], ids=["its own", "another's"])
def test_a_worker_that_resumes_from_the_end_of_a_run_trains_the_steps_that_others_have_lost_in_its_last_round(
    tolerance, tmp_path, monkeypatch
):
    config = tiny(
        pair__name="ad_psgd",
        topology__name="complete",
        run__eval_every=6,
        run__checkpoint_every=6,
        run__rejoin_rounds=tolerance,
        run__timeout_s=60,
        run__pace_s=0.01,
        run__steps=24,
    )
    folder, own = tmp_path / "run", digest(config)
    (tmp_path / "run.toml").write_text(dump(config))
    with monkeypatch.context() as patched:
        patched.setattr("gossamer.cli.main", train_and_wait_for_all)
        code, output = run("train", tmp_path / "run.toml", "--out", folder, "--local", 3)
    assert code == 0, output
    store = folder / "checkpoints"
    for worker in (1, 2):
        for path in store.glob(f"round-000012/worker-00{worker}.*"):
            path.unlink()
    # Nobody holds what these have trained since, so that it is trained again.
    checkpoint.save(store, 12, 0, {**checkpoint.load(store, 12, 0, own), "held": {}}, digest=own)
    code, output = run("train", "--resume", folder, "--local", 3)
    assert code == 0, output
    lives = read_order(folder)
    assert [lives[i][1].begun.source[0] for i in range(3)] == ([0, 1, 2] if tolerance == 20 else [0, 0, 0])
    assert sum(some[-1].phases for some in lives.values()) >= 36
    lines = read_metrics(folder)
    assert max(line["round"] for line in lines) == 11 and max(one.round for one in read_seconds(folder)) == 11
    for worker in range(3):
        (last,) = (one for one in lines if (one["kind"], one["worker"], one["round"]) == ("validation", worker, 11))
        assert last["step"] == 2 * lives[worker][-1].phases
    assert "12 of 12 rounds" in run("status", folder)[1]
    code, output = run("simulate", folder / "run.toml", "--replay", folder, "--out", tmp_path / "again")
    assert code == 0 and "of 13" not in output, output
    must_be_the_same(folder, tmp_path / "again", config, range(3))
