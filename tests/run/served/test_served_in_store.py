"""Runs with a server that lie in a folder: each worker has the server's state, and no death costs what was acknowledged."""

import base64
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from test_stored import look
from test_virtual import EVEN, timed

from commands import Command, run, until
from gossamer.record import checkpoint
from gossamer.record.logs.arrivals import read_arrivals
from gossamer.report.page.live import LiveRuns
from gossamer.report.reading.stored import FollowedStore
from gossamer.run.config.run_file import RunConfig, digest, dump
from gossamer.transport.bucket.bucket import Folder, SecretSeal
from gossamer.transport.bucket.server_log import event_in
from gossamer.transport.keys import certificate_of, new_key
from s3 import S3


def in_store(**overrides: object) -> RunConfig:
    base = {"run__timeout_s": 3.0, "run__threads": 1, "workers": 2, "run__eval_every": 0, "server__name": "heloco"}
    return timed(EVEN, **{**base, **overrides})


def model(folder: Path, config: RunConfig) -> list[torch.Tensor]:
    """The parameters and the state of the rule at the end of a run."""
    state = checkpoint.load(folder / "checkpoints", config.length.rounds, config.workers, digest(config))
    return [state["x"], *state["outer"]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def pushes(folder: Path) -> list[tuple[int, int]]:
    return [(item.worker, item.phase) for item in read_arrivals(folder) if item.event == "push"]


METHODS = {
    "heloco": {"server": {"name": "heloco"}, "codec": {"name": "int8"}},
    "a window, in fragments": {"server": {"name": "decoupled_diloco"}, "events": {"fragments": 2}},
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_one_worker_in_a_store_computes_the_bits_of_virtual_time(method: dict[str, object], tmp_path: Path) -> None:
    config = in_store(workers=1, **method)
    (tmp_path / "run.toml").write_text(dump(config))
    code, output = run("train", tmp_path / "run.toml", "--store", tmp_path / "store", "--out", tmp_path / "real")
    assert code == 0, output
    code, output = run("simulate", tmp_path / "run.toml", "--out", tmp_path / "virtual")
    assert code == 0, output
    real = checkpoint.load(tmp_path / "real" / "checkpoints", config.length.rounds, 1, digest(config))["x"]
    virtual = checkpoint.load(tmp_path / "virtual" / "checkpoints", config.length.rounds, 1, digest(config))["x"]
    assert torch.equal(real, virtual)


@pytest.mark.timeout(1800)
def test_no_kill_costs_an_acknowledged_push_and_the_replay_has_the_bits_of_all(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The first worker is killed at the moment of a push, then all."""
    kills = 20 if request.config.getoption("--full") else 1
    config = in_store(run__steps=60 + 60 * kills, run__checkpoint_every=4, run__pace_s=0.2, codec__name="int8")
    (tmp_path / "run.toml").write_text(dump(config))
    store = tmp_path / "store"

    def start(name: str, *more: object) -> Command:
        return Command("train", tmp_path / "run.toml", "--store", store, "--out", tmp_path / name, *more)

    def pushed() -> list[tuple[int, int, int]]:
        """The pushes that have an event, in their order."""
        names = sorted(path.name for path in store.glob("r*-commit"))
        found = [event_in(k, SecretSeal().opened(name, (store / name).read_bytes()), 2) for k, name in enumerate(names)]
        return [(one.worker, one.life, one.phase) for one in found if one is not None and one.event == "push"]

    def length() -> int:
        return len([*store.glob("r*-commit")])

    alive = {"a": start("a"), "b": start("b")}
    until(lambda: length() > 8, *alive.values())
    acknowledged = set[tuple[int, int, int]]()
    for kill in range(kills):
        name = sorted(alive)[kill % 2]
        there = length()
        until(lambda there=there: length() > there, *alive.values())
        alive[name].kill()  # as soon as an event shows, its own or that of the other one
        acknowledged |= {*pushed()}
        assert alive.pop(name).finish()[0] == -signal.SIGKILL
        there = length()
        until(lambda there=there: length() > there + 3, *alive.values())
        again = name if kill % 2 else f"c{kill}"
        alive[again] = start(again)
        until(lambda again=again: (tmp_path / again / "slot.txt").exists(), *alive.values())
        there = length()
        until(lambda there=there: length() > there + 3, *alive.values())
    acknowledged |= {*pushed()}
    for one in alive.values():
        one.kill()
    for one in alive.values():
        assert one.finish()[0] == -signal.SIGKILL
    code, output = run("status", store, "--json")
    status = json.loads(output)
    assert code == 0 and 0 < status["round"] < config.length.rounds and status["states"], output
    assert [slot["standing"] for slot in status["workers"]] == ["held", "held"]
    shown = json.loads(LiveRuns([], stores=[look(FollowedStore(str(store)))]).data(""))["runs"][0]
    assert (shown["kind"], shown["done"], shown["standings"]) == ("server", status["round"], ["held", "held"])
    assert shown["evals"]["x"]["bytes"][-1] > 0 and shown["events"]["push"] == len(pushed())
    last = {f"last{k}": start(f"last{k}", "--set", "run.pace_s=0") for k in range(2)}
    ends = {name: one.finish() for name, one in last.items()}
    assert all(code == 0 for code, _ in ends.values()), ends
    counted = pushed()
    assert acknowledged <= {*counted}
    assert pushes(tmp_path / "last0") == [(worker, phase) for worker, _, phase in counted], (
        "from the first on, and once"
    )
    assert len({*pushes(tmp_path / "last0")}) == len(counted)
    whole = model(tmp_path / "last0", config)
    assert same(whole, model(tmp_path / "last1", config)), "both have the server"
    code, output = run("simulate", "--replay", tmp_path / "last0", "--out", tmp_path / "again")
    assert code == 0, output
    assert same(whole, model(tmp_path / "again", config)), output
    code, output = run("status", store)
    assert code == 0 and f"{config.length.rounds} of {config.length.rounds} rounds" in output, output
    code, output = run("train", tmp_path / "run.toml", "--store", store, "--out", tmp_path / "late")
    assert code == 0 and f"the run in the store has ended after {config.length.rounds} rounds" in output, output


@pytest.mark.full
@pytest.mark.timeout(300)
def test_with_keys_a_server_in_an_object_store_that_fails_now_and_then_has_the_bits_of_its_replay_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: S3
) -> None:
    pytest.importorskip("cryptography")
    keys = {name: new_key(name, tmp_path / f"{name}.pem") for name in ("berlin", "paris")}
    peers = {name: {"certificate": base64.b64encode(certificate_of(path)).decode()} for name, path in keys.items()}
    config = in_store(
        run__timeout_s=20,
        run__steps=24,
        codec__name="int8",
        peers={**peers, "berlin": {**peers["berlin"], "server": True}},
    )
    (tmp_path / "run.toml").write_text(dump(config))
    store, bucket.fails_every = "s3://bucket/run", 40
    words = {
        name: ("train", tmp_path / "run.toml", "--store", store, "--out", tmp_path / name, "--key", key)
        for name, key in keys.items()
    }
    started = {name: Command(*some) for name, some in words.items()}
    ends = {name: one.finish() for name, one in started.items()}
    assert all(code == 0 and "is not encrypted" not in output for code, output in ends.values()), ends
    assert pushes(tmp_path / "berlin") == pushes(tmp_path / "paris")
    assert {worker for worker, _ in pushes(tmp_path / "berlin")} == {0, 1}
    code, output = run("simulate", "--replay", tmp_path / "berlin", "--out", tmp_path / "again")
    assert code == 0, output
    whole = model(tmp_path / "berlin", config)
    assert same(whole, model(tmp_path / "paris", config)) and same(whole, model(tmp_path / "again", config))
    bucket.fails_every, objects = 0, [*bucket.objects.values()]
    assert not any(word in one for one in objects for word in (b"heloco", b"event", b"phase", b"leaves"))
    monkeypatch.setenv("GOSSAMER_KEY", str(keys["paris"]))
    code, output = run("status", store, "--peers", tmp_path / "run.toml", "--json")
    assert code == 0 and json.loads(output)["round"] == config.length.rounds, output


def test_a_worker_that_pushes_an_invalid_update_is_gone_for_all_and_the_others_take_its_steps(tmp_path: Path) -> None:
    config = in_store(run__steps=12, run__pace_s=0.1)
    (tmp_path / "run.toml").write_text(dump(config))
    folder, out = tmp_path / "store", tmp_path / "out"
    honest = Command("train", tmp_path / "run.toml", "--store", folder, "--out", out)
    until(lambda: (folder / "r00000000-commit").exists(), honest)
    store, seal = Folder(str(folder)), SecretSeal()
    first = {"event": "join", "at_s": 0.0, "phase": 0, "message": 0, "owned": [], "rounds": 0}
    commit = {"parts": {"1": {"life": 0, "steps": 0, "begun": None}}, "steps": [0, 0], "mean": "", "time_s": 0.0}
    number = 1
    store.create("t00001-0000", seal.sealed("t00001-0000", {"nonce": ""}))
    store.create("r00000000-from-00001-0000", seal.sealed("r00000000-from-00001-0000", {}, b"too short"))
    for event in ("join", "push"):
        head = {**first, **commit, "event": event, "at_s": 1000.0, "closer": [1, 0]}
        while not store.create(name := f"r{number:08d}-commit", seal.sealed(name, head)):
            number += 1
    code, output = honest.finish()
    assert code == 0 and "worker 1 is gone (9 bytes where 106880 are due)" in output, output
    assert [(item.event, item.worker) for item in read_arrivals(out) if item.worker == 1] == [("join", 1), ("leave", 1)]
    assert len(pushes(out)) == 12, "each of one step"


def test_a_worker_that_ends_with_an_error_frees_its_slot(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(in_store(workers=1, inner__lr=1e38)))
    code, output = run("train", tmp_path / "run.toml", "--store", tmp_path / "store", "--out", tmp_path / "out")
    assert code == 2 and "became nan" in output, output
    assert (tmp_path / "store" / "v00000-0000").exists() and not [*tmp_path.glob("store/u*")]


def test_a_process_that_is_stopped_while_it_waits_for_a_slot_ends_at_once_as_before_training(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(in_store(run__timeout_s=30.0)))
    store, seal = tmp_path / "store", SecretSeal()
    store.mkdir()
    for name in ("t00000-0000", "t00001-0000"):
        Folder(str(store)).create(name, seal.sealed(name, {"nonce": ""}))
    late = Command("train", tmp_path / "run.toml", "--store", store, "--out", tmp_path / "late")
    until(lambda: any("all slots are taken" in line for line in late._output), late)
    os.kill(late.pid, signal.SIGTERM)
    code, output = late.finish()
    assert code == 130, output
