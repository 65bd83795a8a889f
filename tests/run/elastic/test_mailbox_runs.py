"""Runs whose workers reach a folder, and not each other."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commands import Command, run
from gossamer.record import checkpoint
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.run.config.run_file import digest, dump
from gossamer.run.simulated.simulate import simulate
from tiny import tiny

RULES = {
    "gossip": {"rule__name": "gasloc", "topology__name": "random"},
    "means": {"rule__name": "diloco", "topology__name": "complete"},
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", RULES)
def test_a_run_through_a_folder_has_the_bits_of_its_simulation_and_leaves_nothing_there(
    tmp_path: Path, kind: str
) -> None:
    config = tiny(workers=2, run__elastic=True, run__timeout_s=60, **RULES[kind])
    (tmp_path / "run.toml").write_text(dump(config))
    words = ("train", tmp_path / "run.toml", "--mailbox", tmp_path / "box", "--out", tmp_path / "real", "--local", 2)
    code, said = run(*words)
    assert code == 0, said
    assert f"another takes a free slot with --mailbox {tmp_path / 'box'} --join auto" in said
    simulate(config, tmp_path / "simulated")
    for worker in range(2):
        ours, theirs = (
            checkpoint.load(tmp_path / where / "checkpoints", config.rounds, worker, digest(config))["x"]
            for where in ("real", "simulated")
        )
        assert torch.equal(ours, theirs)
    assert not list((tmp_path / "box").rglob("*"))


@pytest.mark.timeout(200)
def test_a_machine_with_a_key_joins_a_run_by_the_boxes_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, said = run("keys", "new", "both", "--json")
    assert code == 0, said
    peers = {"both": {"certificate": json.loads(said)["keys"][0]["certificate"], "workers": 2}}
    slow = {"run__steps": 8000, "run__pace_s": 0.05, "run__eval_every": 0, "run__checkpoint_every": 0}
    config = tiny(workers=2, run__elastic=True, run__timeout_s=60, peers=peers, **slow)
    (tmp_path / "run.toml").write_text(dump(config))
    box = tmp_path / "box"
    box.mkdir()
    (box / "a-box-of-the-dead").write_text("1000")
    first = Command("train", tmp_path / "run.toml", "--mailbox", box, "--out", tmp_path / "0")
    until(lambda: len([*box.glob("*")]) > 1, first)
    second = Command("train", tmp_path / "run.toml", "--mailbox", box, "--out", tmp_path / "1", "--join", "auto")
    until(lambda: any(len(life.rounds) > 3 for life in read_outcomes(tmp_path / "1").get(1, [])), second)
    for one in (second, first):
        os.kill(one.pid, signal.SIGTERM)
    (code, said), (of_first, _) = second.finish(), first.finish()
    assert (code, of_first) == (0, 130), said
    assert "worker 1 joins at round" in said
    rounds = read_outcomes(tmp_path / "1")[1][-1].rounds
    assert any(one.alive is None and not one.missed for one in rounds), "they have exchanged"


def until(holds: Callable[[], bool], command: Command) -> None:
    deadline = time.monotonic() + 150
    while not holds():
        assert time.monotonic() < deadline, command.finish(0)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "words", "told"),
    [
        ({}, (), "--mailbox was given with a run in rounds of all"),
        ({"run__elastic": True}, ("--listen", "127.0.0.1:29400"), "--mailbox was given with --listen too"),
        ({"server__name": "heloco"}, ("--local", 4), "--mailbox was given with a run with a [server]"),
        ({"run__elastic": True}, ("--mailbox", "nosuch://x"), "the mailbox 'nosuch://x' cannot be opened"),
    ],
)
def test_what_a_mailbox_does_not_carry_is_refused_in_a_sentence(
    tmp_path: Path, settings: dict[str, object], words: tuple[object, ...], told: str
) -> None:
    (tmp_path / "run.toml").write_text(dump(tiny(**settings)))
    box = () if "--mailbox" in words else ("--mailbox", tmp_path / "box")
    code, said = run("train", tmp_path / "run.toml", "--out", tmp_path / "out", *box, *words)
    assert code == 2 and told in said, said
