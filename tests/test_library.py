"""Gossamer in someone else's loop: any model, any optimizer, alone or under torchrun."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.codecs import bf16, both_ways, topk
from gossamer.errors import CheckpointError, ConfigError, PairingError, PeerError
from gossamer.transport.local import run_local

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


SCHEDULES = {
    "plain": gossamer.Schedule(),
    "fragments": gossamer.Schedule(fragments=2),
    "overlap": gossamer.Schedule(overlap_steps=2),
    "streaming": gossamer.Schedule(fragments=2, overlap_steps=3),
}


RESUMED = {
    **{name: (gossamer.gasloc, schedule) for name, schedule in SCHEDULES.items()},
    "late": (gossamer.rules.eager, None),
}


@pytest.mark.parametrize(("rule", "schedule"), RESUMED.values(), ids=RESUMED.keys())
@pytest.mark.parametrize("steps", range(6, 12))
def test_saved_and_loaded_after_any_step_it_continues_to_the_same_bits(rule, schedule, steps):
    def start():
        model = net()
        return model, gossamer.Outer(model, rule(), local_steps=6, schedule=schedule)

    (whole, loop), (again, second) = start(), start()
    train(whole, loop, steps)
    saved = copy.deepcopy({"model": whole.state_dict(), "outer": loop.state_dict()})
    train(whole, loop, 15, seed=1)

    again.load_state_dict(saved["model"])
    second.load_state_dict(saved["outer"])
    train(again, second, 15, seed=1)
    assert (second.rounds, second.steps) == (loop.rounds, loop.steps) == divmod(steps + 15, 6)
    assert torch.equal(flat(whole), flat(again))


def test_a_state_goes_into_a_loop_that_has_ended_a_round_and_into_none_that_is_within_one():
    model = net()
    loop = gossamer.Outer(model, gossamer.gasloc(), local_steps=3)
    train(model, loop, 3)
    saved = loop.state_dict()
    train(model, loop, 3)
    loop.load_state_dict(saved)
    assert loop.rounds == 1
    train(model, loop, 2)
    with pytest.raises(
        CheckpointError, match="2 steps of round 1, with 1 exchanges in flight; load it into a new Outer"
    ):
        loop.load_state_dict(saved)
    train(model, loop, 1)
    assert loop.rounds == 2


def test_a_state_that_does_not_fit_is_refused_in_a_sentence_whatever_is_wrong_with_it():
    def start(rule=gossamer.gasloc, **options):
        model = net()
        return model, gossamer.Outer(model, rule(), **{"local_steps": 6, **options})

    model, loop = start(schedule=SCHEDULES["streaming"])
    train(model, loop, 10)
    good = loop.state_dict()
    start(schedule=SCHEDULES["streaming"])[1].load_state_dict(good)
    one = good["under_way"][0]
    wrong = [
        {},
        [],
        None,
        *({key: value for key, value in good.items() if key != left} for left in good),
        *({**good, "steps": steps} for steps in (6, 7, -1, 1.5, "x", True, None)),
        *({**good, "rounds": rounds} for rounds in (-1, 2.5, "x", None, 1 << 40)),
        *({**good, "outer": outer} for outer in (3, None, [3], [], [t.double() for t in good["outer"]])),
        *(
            {**good, "under_way": under_way}
            for under_way in (3, [3], [{"round": 0}], [one, one], [{**one, "sent": [3]}])
        ),
        *(
            {**good, "under_way": [{**one, key: value}]}
            for key in ("round", "fragment")
            for value in (99, -1, "x", [1])
        ),
        {**good, "under_way": [{**one, "local_steps": 99}]},
    ]
    for state in wrong:
        model, fresh = start(schedule=SCHEDULES["streaming"])
        with pytest.raises(CheckpointError, match="load it with the rule"):
            fresh.load_state_dict(state)
    for options in (
        {"rule": gossamer.gossip},
        {"schedule": None},
        {"schedule": SCHEDULES["overlap"]},
        {"local_steps": 3},
    ):
        with pytest.raises(CheckpointError, match="load it with the rule"):
            start(**options)[1].load_state_dict(good)


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
        gossamer.Outer(net(), gossamer.rules.data_parallel())
    with pytest.raises(ConfigError, match="local_steps = 0; allowed are whole numbers of at least 1"):
        gossamer.Outer(net(), gossamer.gasloc(), local_steps=0)
    with pytest.raises(ConfigError, match="for 4 workers"):
        gossamer.Outer(net(), gossamer.gasloc(), topology=gossamer.topologies.make_topology("ring", 4))
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


def begin_of_two(rule, **options):
    """The rank of this process of two, and a model with its `Outer`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = net()
    return dist.get_rank(), model, gossamer.Outer(model, rule, local_steps=6, timeout_s=20, **options)


def stop_within_a_round(argv):
    rank, whole, loop = begin_of_two("gasloc", schedule=SCHEDULES["streaming"])
    train(whole, loop, 10, seed=rank)
    saved = copy.deepcopy({"model": whole.state_dict(), "outer": loop.state_dict()})
    train(whole, loop, 14, seed=rank + 2)
    loop.finish()
    loop.close()
    dist.barrier()
    rank, again, loop = begin_of_two("gasloc", schedule=SCHEDULES["streaming"])
    again.load_state_dict(saved["model"])
    loop.load_state_dict(saved["outer"])
    train(again, loop, 14, seed=rank + 2)
    loop.finish()
    loop.close()
    return 0 if torch.equal(flat(whole), flat(again)) else 1


def test_two_workers_stopped_within_a_round_continue_to_the_same_bits(forks):
    assert run_local(2, stop_within_a_round, []) == 0


CODECS_OF_TWO = {
    "there": (topk(k=64), topk(k=32)),
    "back": (both_ways(bf16(), topk(k=64)), both_ways(bf16(), topk(k=32))),
}


def begin_with_other_codecs(argv):
    for codecs in CODECS_OF_TWO.values():
        with pytest.raises(PeerError, match="worker"):
            begin_of_two("diloco", codec=codecs[int(os.environ["RANK"])])
        dist.barrier()
    return 0


def test_workers_whose_codecs_differ_in_an_option_are_not_let_in(forks):
    assert run_local(2, begin_with_other_codecs, []) == 0
