"""A worker of a server that is asked to leave by SIGTERM: nothing that it trained is lost, and it may come back."""

import os
import signal
from pathlib import Path

import pytest
import torch
from test_server_processes import events, had, model, served, start, stopped

from commands import Command, until
from gossamer.record import checkpoint
from gossamer.record.logs.arrivals import read_arrivals
from gossamer.record.logs.events import read_events
from gossamer.run.config.resolve import resolve
from gossamer.run.replay.served import replay_server

pytestmark = pytest.mark.usefixtures("forks")


@pytest.mark.timeout(240)
def test_a_worker_that_gets_sigterm_pushes_saves_and_leaves_and_comes_back_to_what_it_saved(tmp_path: Path) -> None:
    config = served(
        workers=2,
        server__name="heloco",
        run__steps=60,
        run__checkpoint_every=30,  # at the end, so that the only other one is that with which the worker leaves
        run__eval_every=20,
        run__pace_s=0.1,
        model__layers=1,
    )
    real = tmp_path / "real"
    launcher = start(config, real)
    pids = launcher.processes(3)
    served_at = next(line for line in launcher.lines() if "serving 2 workers on" in line).split()[-1]
    until(lambda: had(real, "push").count(1) >= 6)
    os.kill(pids["1"], signal.SIGTERM)
    until(lambda: had(real, "leave") == [1])
    with stopped(pids["0"]):
        [left] = checkpoint.rounds(real / "checkpoints", 1)
        spare = Command("train", real / "run.toml", "--out", real, "--server", served_at, "--worker", 1)
        until(lambda: had(real, "join").count(1) == 2)
    assert spare.finish()[0] == 0
    code, output = launcher.finish()
    assert code == 0 and "Traceback" not in output, output
    assert "worker 1 has left after" in output and "worker 1 ended with code" not in output, output
    [again] = [item for item in read_arrivals(real) if item.event == "join" and item.checkpoint]
    assert (again.worker, again.checkpoint) == (1, left) and 0 < left < 30
    numbers = [e["number"] for e in events(real, 1) if e["event"] == "phase"]
    log = read_events(real)
    assert log is not None and numbers == [*range(log.absorbed[1])], "no phase was cut or trained twice"
    replay_server(resolve(config, real=True), tmp_path / "replay", real)
    assert torch.equal(model(tmp_path / "replay", config), model(real, config))
