"""Gossamer in someone else's loop: any model, any optimizer, alone or under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gossamer
from gossamer.errors import CheckpointError, ConfigError, PairingError

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"


def train(model, outer, steps, seed=0):
    """A plain loop on random regression data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 3, generator=draw)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_alone_gossip_changes_nothing_and_gasloc_is_an_outer_momentum():
    plain, gossiped, outer = net(), net(), net()
    train(plain, None, 6)
    with gossamer.Outer(gossiped, gossamer.gossip(), local_steps=2) as loop:
        train(gossiped, loop, 6)
        assert loop.rounds == 3
    assert torch.equal(flat(plain), flat(gossiped))
    with gossamer.Outer(outer, gossamer.gasloc(), local_steps=2) as loop:
        train(outer, loop, 6)
    assert not torch.equal(flat(plain), flat(outer))


@pytest.mark.parametrize(
    "schedule", [None, gossamer.Schedule(fragments=2, overlap_steps=2)], ids=["plain", "streaming"]
)
def test_saved_and_loaded_between_two_rounds_it_continues_to_the_same_bits(schedule):
    whole = net()
    loop = gossamer.Outer(whole, gossamer.gasloc(), local_steps=3, schedule=schedule)
    train(whole, loop, 6)
    saved = {"model": {k: v.clone() for k, v in whole.state_dict().items()}, "outer": loop.state_dict()}
    train(whole, loop, 6, seed=1)

    again = net()
    second = gossamer.Outer(again, gossamer.gasloc(), local_steps=3, schedule=schedule)
    again.load_state_dict(saved["model"])
    second.load_state_dict(saved["outer"])
    train(again, second, 6, seed=1)
    assert torch.equal(flat(whole), flat(again))
    with pytest.raises(CheckpointError, match="load it with the rule"):
        gossamer.Outer(net(), gossamer.gossip()).load_state_dict(saved["outer"])


def test_a_schedule_divides_the_round_and_what_is_left_at_the_end_is_heard():
    model, schedule = net(), gossamer.Schedule(fragments=2, overlap_steps=1)
    with gossamer.Outer(model, gossamer.diloco(0.5, 0.0), local_steps=2, schedule=schedule) as loop:
        before = flat(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1.0
        assert not loop.step()  # the first fragment is sent, and heard after the next step
        assert torch.equal(flat(model), before + 1.0)
        assert loop.step()
        assert (flat(model) != before + 1.0).any()  # half of what it had moved when it was sent is taken back
        loop.finish()
    torch.testing.assert_close(flat(model), before + 0.5)


def test_what_cannot_work_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        gossamer.Outer(net(), gossamer.data_parallel())
    with pytest.raises(ConfigError, match="local_steps is 0"):
        gossamer.Outer(net(), gossamer.gasloc(), local_steps=0)
    with pytest.raises(ConfigError, match="for 4 workers"):
        gossamer.Outer(net(), gossamer.gasloc(), topology=gossamer.make_topology("ring", 4))
    with pytest.raises(ConfigError, match="0 trainable"):
        gossamer.Outer(nn.ReLU(), gossamer.gasloc())
    assert issubclass(PairingError, ConfigError)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_example_trains_alone_and_under_torchrun(processes):
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    words = [sys.executable, *launcher, str(EXAMPLE), "--steps", "20"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=110, env={**environment, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(processes):
        assert f"worker {rank} of {processes}, step 20: loss" in result.stdout
    assert len(EXAMPLE.read_text().splitlines()) < 60
