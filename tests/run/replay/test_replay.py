"""The record of a real server run, and its replay in one process: the same bits with any number of workers, deaths included."""

import json
import os
import shutil
import signal
import time

import pytest
import torch
from test_server_processes import events, in_place_of_a_killed_worker, served, start, together
from test_virtual import evals

from gossamer.cli import main
from gossamer.errors import CheckpointError, ConfigError, DataError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.arrivals import ArrivalWriter, ServerInput, arrivals_file, read_arrivals
from gossamer.record.logs.events import read_events
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest
from gossamer.run.replay.served import replay_server


def saved(folder, config, owner, round=None):
    """What an owner's checkpoint (of the last round) holds, without the clock."""
    state = checkpoint.load(folder / "checkpoints", round or config.length.rounds, owner, digest(config))
    return {key: value for key, value in state.items() if key != "time_s"}


def same(a, b):
    """Whether two states hold the same numbers, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def losses(folder):
    """Validations by their round, and the training losses of each worker's phases; a phase that was lost is taken again."""
    lines = read_metrics(folder)
    return (
        {line["round"]: line["loss"] for line in lines if line["kind"] == "eval"},
        {(line["worker"], line["step"]): line["loss"] for line in lines if line["kind"] == "train"},
    )


def assert_replayed(real, config, folder):
    """Replays a real run, and compares the server, the workers and all losses."""
    replay_server(resolve(config, real=True), folder, real)
    for owner in range(config.workers + 1):
        newest = max(checkpoint.rounds(real / "checkpoints", owner))
        assert owner < config.workers or newest == config.length.rounds
        assert same(saved(real, config, owner, newest), saved(folder, config, owner, newest)), owner
    assert losses(real) == losses(folder)
    assert absences(real, config.workers) == absences(folder)


def absences(folder, who=None):
    """Who was lost and who came back, as a server writes it, and its replay for all."""
    return [event for event in events(folder, who) if event["event"] in ("leave", "return")]


RUNS = {
    "no window": {"server": {"name": "heloco"}},
    "a window": {
        "server": {"name": "decoupled_diloco", "quorum": 2, "grace_s": 0.02},
        "events": {"fragments": 2},
        "codec": {"name": "int8"},
    },
}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_worker_leaves_the_others_a_new_process_takes_its_place_and_all_is_replayed_to_the_last_bit(tmp_path):
    config = served(
        workers=3,
        run__steps=64,
        run__checkpoint_every=8,
        run__eval_every=32,
        run__pace_s=0.02,
        run__timeout_s=100.0,
        model__layers=2,
        **RUNS["a window"],
    )
    real, store = tmp_path / "real", tmp_path / "real" / "checkpoints"
    launcher = start(config, real)
    pids = launcher.processes(4)
    deadline = time.monotonic() + 120
    while not checkpoint.rounds(store, 1) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pids["1"], signal.SIGKILL)
    spare = in_place_of_a_killed_worker(launcher, real, 1, pids["0"], pids["2"])
    code, output = launcher.finish(150)
    assert code == 0, output
    code, printed = spare.finish()
    assert code == 0, printed
    first, second = (item for item in read_arrivals(real) if item.event == "join" and item.worker == 1)
    assert first.checkpoint == 0 < second.checkpoint
    assert "worker 1 ended with code 137, and the others go on" in output and "Traceback" not in output + printed
    assert [e["event"] for e in events(real, 3) if e["event"] in ("leave", "return")] == ["leave", "return"]
    taken = read_events(real).absorbed
    assert taken.sum() == 3 * 32 and (taken > 0).all()
    scored = evals(real)
    assert scored[-1]["loss"] < scored[0]["loss"]
    assert_replayed(real, config, tmp_path / "replay")


@pytest.mark.full
@pytest.mark.parametrize("method", RUNS.values(), ids=RUNS.keys())
def test_the_command_line_replays_a_run_of_several_workers(method, tmp_path, monkeypatch, capsys):
    config = served(workers=3, run__steps=12, run__checkpoint_every=6, **method)
    together(config, tmp_path / "real", monkeypatch)
    assert_replayed(tmp_path / "real", config, tmp_path / "replay")
    assert main(["simulate", "--out", str(tmp_path / "again"), "--replay", str(tmp_path / "real")]) == 0
    assert main(["simulate", "--out", str(tmp_path / "none"), "--replay", str(tmp_path)]) == 2
    assert "is no run folder (no run.toml); it holds runs: again, real, replay" in capsys.readouterr().err
    assert same(saved(tmp_path / "again", config, 3), saved(tmp_path / "real", config, 3))


def changed(real, folder, change):
    """A run folder with the record of another, of which `change` edits the lines."""
    folder.mkdir()
    lines = [json.loads(line) for line in arrivals_file(real).read_text().splitlines()]
    arrivals_file(folder).write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return folder


def test_a_record_that_cannot_be_is_refused_with_its_place(tmp_path, monkeypatch):
    config = served(workers=1, server__name="heloco", run__steps=4, inner__warmup_steps=20)
    real = tmp_path / "real"
    together(config, real, monkeypatch)
    good = [item.event for item in read_arrivals(real)]
    assert good[:4] == ["serve", "join", "push", "push"]  # and it leaves
    forged = {
        "no record": (lambda lines: [], "begins with|a process|serve"),
        "another phase": (lambda lines: [*lines[:2], {**lines[2], "phase": 3}], "phase 3, fragment 0"),
        "a push of nobody": (lambda lines: [lines[0], lines[2]], "joins once"),
        "a worker too many": (lambda lines: [lines[0], {**lines[1], "worker": 7}], "worker 7"),
        "two joins": (lambda lines: [*lines[:2], lines[1]], "joins once"),
        "a checkpoint of nobody": (
            lambda lines: [lines[0], {**lines[1], "checkpoint": 1}],
            "no worker can restore round 1",
        ),
        "time that runs back": (lambda lines: [*lines[:2], {**lines[2], "time_s": 0.0}], "before the"),
        "no first line": (lambda lines: lines[1:], "begins with"),
        "a word of its own": (lambda lines: [*lines, {"event": "sleep", "time_s": 1e6}], "'sleep'"),
        "a key of its own": (lambda lines: [lines[0], {**lines[1], "path": "/etc"}], "path"),
        "a huge number": (
            lambda lines: [lines[0], {**lines[1], "worker": 1 << 40}],
            "worker is 1099511627776 but must be",
        ),
        "a truth": (
            lambda lines: [lines[0], {**lines[1], "worker": True}],
            "worker is True but must be a whole number",
        ),
        "no time": (
            lambda lines: [lines[0], {**lines[1], "time_s": "soon"}],
            "time_s is 'soon' but must be a number from 0",
        ),
    }
    for name, (change, part) in forged.items():
        folder = changed(real, tmp_path / name, change)
        with pytest.raises(DataError, match=part):
            replay_server(resolve(config, real=True), tmp_path / f"replay of {name}", folder)
    with pytest.raises(DataError, match="has no arrivals"):
        replay_server(resolve(config, real=True), tmp_path / "b", tmp_path)
    with pytest.raises(ConfigError, match=r"run\.steps is \d+ there and 8 here; replay it with its own '.*run\.toml'"):
        replay_server(
            resolve(served(workers=1, server__name="heloco", run__steps=8, inner__warmup_steps=20), real=True),
            tmp_path / "c",
            real,
        )
    regions = changed(real, tmp_path / "regions", lambda lines: lines)
    (regions / "arrivals-003.jsonl").touch()
    with pytest.raises(
        ConfigError, match=r"by 0\.1\.0 with real regions; this version replays servers without regions"
    ):
        replay_server(resolve(config, real=True), tmp_path / "e", regions)
    with pytest.raises(ConfigError, match=r"needs a run with a \[server\]"):
        replay_server(resolve(served(pair__name="ad_psgd"), real=True), tmp_path / "d", real)


def test_a_record_without_its_end_is_replayed_as_far_as_it_came(tmp_path, monkeypatch):
    config = served(workers=1, server__name="heloco", run__steps=8, run__checkpoint_every=2)
    together(config, tmp_path / "real", monkeypatch)
    cut = changed(tmp_path / "real", tmp_path / "cut", lambda lines: lines[:4])
    replay_server(resolve(config, real=True), tmp_path / "replay", cut)
    assert checkpoint.rounds(tmp_path / "replay" / "checkpoints", 1) == [1, 2]
    newest = checkpoint.rounds(tmp_path / "real" / "checkpoints", 1)[-1]
    shutil.copytree(tmp_path / "real" / "checkpoints", cut / "checkpoints")
    with pytest.raises(
        DataError, match=rf"arrivals.jsonl' ends before round {newest}, of which the folder has a checkpoint"
    ):
        replay_server(resolve(config, real=True), tmp_path / "again", cut)
    with pytest.raises(CheckpointError):
        saved(tmp_path / "replay", config, 1)


def test_a_server_that_resumes_appends_to_whole_lines(tmp_path):
    with ArrivalWriter(tmp_path, resume=False) as log:
        log.append(ServerInput("serve", 0.0, workers=2, digest="d"))
        log.append(ServerInput("tick", 1.25))
    with arrivals_file(tmp_path).open("a") as file:
        file.write('{"event":"push","time')
    with ArrivalWriter(tmp_path, resume=True) as log:
        log.append(ServerInput("serve", 1.0, workers=2, round=3, digest="d"))
    assert [(item.event, item.time_s, item.round) for item in read_arrivals(tmp_path)] == [
        ("serve", 0.0, 0),
        ("tick", 1.25, 0),
        ("serve", 1.0, 3),
    ]
