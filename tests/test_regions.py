"""Servers of regions below a global one as real processes, and the replay of their records to the same bits."""

import os
import shlex
import signal
import socket
import time
from contextlib import contextmanager

import pytest
import torch

from commands import Command
from gossamer.clock.shares import Shares
from gossamer.record import checkpoint
from gossamer.record.arrivals import read_arrivals
from gossamer.record.events import read_events
from gossamer.record.files import worker_suffix
from gossamer.record.seconds import read_seconds
from gossamer.run.serve_global import serve_regions
from gossamer.run.serve_region import serve_region
from gossamer.run.serve_replay import replay_server
from gossamer.run.serve_worker import work
from gossamer.run.simulate import simulate
from test_replay import losses, same, saved
from test_serve import KNOWN, Process, events, evals, model, served, start
from test_virtual import EVEN
from gossamer.transport.secret import SECRET

HALOS = {"name": "halos", "every": 2, "local_delay": 2}


@pytest.fixture(autouse=True)
def a_secret(monkeypatch):
    monkeypatch.setenv(SECRET, KNOWN)


def sites(*regions):
    """The network of these regions, each with its workers."""
    return {
        "step_s": 1.0, "uplink_bps": 1e9, "downlink_bps": 1e9,
        "sites": {f"r{k}": {"workers": [*members]} for k, members in enumerate(regions)},
    }  # fmt: skip


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def together(config, folder, places):
    """A whole run with all sides as threads of this process; raises what any of them raised."""
    top, ports = free_port(), [free_port() for _ in range(max(places) + 1)]
    sides = [Process(serve_regions, config, folder, "127.0.0.1", top)]
    while sides[0].is_alive() and not (folder / f"events-{config.workers:03}.jsonl").exists():
        time.sleep(0.01)
    for g, port in enumerate(ports):
        sides.append(Process(serve_region, config, folder, ("127.0.0.1", port), ("127.0.0.1", top), g))
    sides += [Process(work, config, folder, "127.0.0.1", ports[g], i) for i, g in enumerate(places)]
    for side in sides:
        side.join(90)
    for side in sides:
        if side.error is not None:
            raise side.error
    assert not any(side.is_alive() for side in sides)


def assert_replayed(real, config, folder):
    replay_server(config, folder, real)
    n = config.workers
    assert same(saved(real, config, n), saved(folder, config, n))
    ours, theirs = losses(real), losses(folder)
    assert ours[0] == theirs[0] and ours[0]
    assert ours[1].items() <= theirs[1].items() and len(ours[1]) > 0


@pytest.mark.parametrize("method", [{}, {"events": {"fragments": 2}, "codec": {"name": "int8"}}], ids=["whole", "fragments"])
def test_two_regions_over_sockets_share_all_steps_and_replay_to_the_last_bit(method, tmp_path):
    config = served(sites((0, 2), (1, 3)), workers=4, server=HALOS, run__steps=24, run__checkpoint_every=6, run__eval_every=6, **method)
    together(config, tmp_path / "real", (0, 1, 0, 1))
    assert read_events(tmp_path / "real").absorbed.sum() == 4 * 12
    assert_replayed(tmp_path / "real", config, tmp_path / "replay")
