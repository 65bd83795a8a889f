"""Gossamer in someone else's loop: any model, any optimizer, alone or under torchrun."""

import atexit
import contextlib
import copy
import gc
import io
import itertools
import logging
import math
import os
import pickle
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import gossamer
from commands import free_port
from drifted_rounds import serially
from gossamer import rng
from gossamer.codecs import CODECS, bf16, both_ways, topk
from gossamer.errors import CheckpointError, ConfigError, PairingError, PeerError
from gossamer.library.metrics import Meter
from gossamer.library.peers import common_of, must_agree
from gossamer.library.saved import must_continue_alike
from gossamer.library.watch import LoopCheck, Scalers, warn_of_phases
from gossamer.optimizers.inner import build_optimizer
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING, Method
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rounds.kernel import PLAIN
from gossamer.rounds.loop import OuterLoop, finish_together
from gossamer.rounds.mean_model import mean_of, mean_over_workers
from gossamer.rules import RULES, make_rule
from gossamer.run.config.recipes import missing, recipes
from gossamer.settings.over_time import timetable_of
from gossamer.testing.drifted_workers import flat_layout as layout
from gossamer.topologies import make_topology
from gossamer.transport.memory import MemoryNetwork, MemoryTransport
from gossamer.transport.processes.local import run_local
from tiny import DEVICE


def train(model, outer, steps, seed=0):
    """A plain loop on random regression data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 3, generator=draw).to(DEVICE)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(DEVICE)


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


@pytest.mark.parametrize("theirs", [partial(torch.autocast, "cpu", torch.bfloat16), partial(torch.device, "meta")])
@pytest.mark.parametrize(("rule", "codec"), [("sparseloco", "dct_topk"), ("dilocox", None), ("sparta", None)])
def test_autocast_and_a_default_device_around_a_step_change_no_bit(theirs, rule, codec):
    def ends(around):
        torch.manual_seed(0)
        model = nn.Linear(200, 200)
        with around():
            outer = gossamer.Outer(model, rule, codec=codec, local_steps=1)
        for _ in range(2):
            with torch.no_grad():
                model.weight += 0.1 * torch.randn(200, 200)
            with around():
                outer.step()
        outer.close()
        return flat(model)

    assert torch.equal(ends(contextlib.nullcontext), ends(theirs))


def test_after_an_exchange_that_failed_every_call_says_so_and_nothing_is_saved(caplog):
    model = net()
    outer = gossamer.Outer(model, "gasloc", local_steps=2)
    train(model, outer, 3)
    model.register_parameter("late", nn.Parameter(torch.ones(1, device=DEVICE)))
    with pytest.raises(ConfigError, match="'late'"):
        outer.step()
    for call in (outer.step, outer.finish, outer.state_dict, outer.shared_state_dict, outer.mean_model().__enter__):
        with pytest.raises(
            ConfigError, match=r"after the exchange of round 1 had failed, .*; make another Outer on all"
        ):
            call()
    outer.close()
    assert not caplog.messages  # such as of steps that were not exchanged: the error comes first


SCHEDULES = {
    "plain": gossamer.Schedule(),
    "fragments": gossamer.Schedule(fragments=2),
    "overlap": gossamer.Schedule(overlap_steps=2),
    "streaming": gossamer.Schedule(fragments=2, overlap_steps=3),
}


RESUMED = {
    **{name: (gossamer.gasloc, schedule) for name, schedule in SCHEDULES.items()},
    "late": (gossamer.rules.eager, None),
    "ahead": (lambda: gossamer.rules.fgd(mix_updates="ring"), gossamer.Schedule(fragments=2)),
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


@pytest.mark.parametrize(("rule", "schedule"), RESUMED.values(), ids=RESUMED.keys())
def test_a_state_that_is_saved_after_close_has_the_exchanges_in_flight_too(rule, schedule):
    model = net()
    loop = gossamer.Outer(model, rule(), local_steps=6, schedule=schedule)
    train(model, loop, 8)
    before = loop.state_dict()["under_way"]
    loop.close()
    after = loop.state_dict()["under_way"]
    assert [(one["round"], one["fragment"]) for one in after] == [(one["round"], one["fragment"]) for one in before]
    for one, other in zip(after, before, strict=True):
        assert all(map(torch.equal, one["sent"], other["sent"]))
    if before:
        with pytest.raises(ConfigError, match="with exchanges of round 1 in flight"):
            loop.shared_state_dict()


def test_local_steps_and_numbers_of_a_rule_change_in_a_users_loop_and_continue_from_a_saved_state():
    def loop():
        model = net()
        rule = make_rule("diloco", lr={0: 0.5, 2: 0.9}, momentum={"shape": "cosine", "to": 0.1, "steps": 8})
        return model, gossamer.Outer(model, rule, local_steps={0: 1, 2: 3})

    model, outer = loop()
    ended, states = [], {}
    for step in range(8):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * (step + 1))
        ended.append(outer.step())
        states[step] = [p.detach().clone() for p in model.parameters()], outer.state_dict()
    assert ended == [True, True, False, False, True, False, False, True] and outer.steps_taken == 8
    again, resumed = loop()
    with torch.no_grad():
        for p, saved in zip(again.parameters(), states[3][0], strict=True):
            p.copy_(saved)
    resumed.load_state_dict(states[3][1])
    for step in range(4, 8):
        with torch.no_grad():
            for p in again.parameters():
                p.add_(0.1 * (step + 1))
        assert resumed.step() == ended[step]
    assert torch.equal(flat(model), flat(again))
    with pytest.raises(CheckpointError, match="local steps"):
        gossamer.Outer(net(), outer.method.rule, local_steps={0: 1, 2: 4}).load_state_dict(states[3][1])
    for wrong, words in (
        ({3: 1}, "local_steps begins at inner step 3"),
        ({0: 1, 2: 0}, r"local_steps\[2\] = 0, which must be a whole number"),
        ({"shape": "qsr", "base": 1, "alpha": 0.1}, "Outer does not know yours"),
    ):
        with pytest.raises(ConfigError, match=words):
            gossamer.Outer(net(), "gossip", local_steps=wrong)


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
        *({key: good[key] for key in good if key != left} for left in ("outer", "under_way", "rounds", "steps")),
        *({**good, "steps": steps} for steps in (6, 7, -1, 1.5, "x", True, None)),
        *({**good, "rounds": rounds} for rounds in (-1, 2.5, "x", None, 1 << 40)),
        *({**good, "outer": outer} for outer in (3, None, [3], [], [t.double() for t in good["outer"]])),
        *(
            {**good, "under_way": in_flight}
            for in_flight in (3, [3], [{"round": 0}], [one, one], [{**one, "sent": [3]}])
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
    for wrong in (
        *({key: good[key] for key in good if key != left} for left in ("format", "of", "start")),
        *({**good, "format": number} for number in ("2", True, 2.0, 1, 3, -1)),
        *({**good, "of": of} for of in (None, 3, [], {}, {**good["of"], "worker": 0}, {**good["of"], "more": "1"})),
        *({**good, "start": one} for one in (None, 3, "x" * 1000)),
    ):
        with pytest.raises(CheckpointError, match=r"the (saved )?outer state (has|names)"):
            start(schedule=SCHEDULES["streaming"])[1].load_state_dict(wrong)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rule": gossamer.gossip()}, "has rule gasloc and this Outer gossip"),
        ({"rule": gossamer.rules.gasloc(momentum=0.1)}, "has rule option momentum 0.5 and this Outer 0.1"),
        ({"schedule": gossamer.Schedule(overlap_steps=2)}, "has schedule .*overlap_steps=0.* and this Outer .*=2"),
        ({"schedule": gossamer.Schedule(fragments=2)}, "has schedule .*fragments=1.* and this Outer .*fragments=2"),
        ({"local_steps": 3}, "has local steps 6 and this Outer 3"),
        ({"codec": "int8"}, "has codec 'exact' .* and this Outer 'int8'"),
        ({"topology": "ring"}, "has topology 'random' .* and this Outer 'ring'"),
        ({"model": nn.Linear(3, 1)}, "has model 4 tensors of 21 numbers .* and this Outer 2 tensors of 4 numbers"),
    ],
    ids=itertools.count(),
)
def test_a_state_of_something_else_is_refused_with_what_either_side_has(options, sentence):
    def outer(**own):
        return gossamer.Outer(**{"model": net(), "rule": gossamer.gasloc(), "local_steps": 6, **own})

    good = outer().state_dict()
    outer().load_state_dict(good)
    with pytest.raises(CheckpointError, match=sentence):
        outer(**options).load_state_dict(good)
    for key, what in (("worker", "1"), ("workers", "3")):
        with pytest.raises(CheckpointError, match=f"has {key} {what} and this Outer"):
            outer().load_state_dict({**good, "of": {**good["of"], key: what}})


def test_no_state_of_one_rule_is_taken_by_another():
    states = {}
    for name, make in RULES.items():
        if not missing(make) and make().site == "parameters":
            states[name] = gossamer.Outer(net(), make(), local_steps=6)
    for mine, loop in states.items():
        for theirs, other in states.items():
            if mine != theirs:
                with pytest.raises(CheckpointError, match=f"has rule {theirs} and this Outer {mine};"):
                    loop.load_state_dict(other.state_dict())


def test_a_state_continues_with_another_outer_learning_rate():
    saved = gossamer.Outer(net(), gossamer.gasloc(lr=0.7)).state_dict()
    gossamer.Outer(net(), gossamer.gasloc(lr=0.1)).load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_learning_rate_on_a_cosine_continues_through_a_distributed_checkpoint_to_the_same_bits(tmp_path):
    def start():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return model, optimizer, cosine, gossamer.Outer(model, "gasloc", local_steps=6)

    def go_on(model, optimizer, cosine, loop, steps):
        for step in steps:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            model(x).square().mean().backward()
            for one in (optimizer, cosine, loop):
                one.step()
            optimizer.zero_grad()

    def state_of(model, optimizer, cosine, loop):
        optim = get_optimizer_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optim": optim, "cosine": cosine.state_dict(), **loop.shared_state_dict()}

    whole, stopped, resumed = start(), start(), start()
    go_on(*whole, range(20))
    go_on(*stopped, range(14))
    dcp.save(state_of(*stopped), checkpoint_id=tmp_path)
    saved = state_of(*resumed)
    dcp.load(saved, checkpoint_id=tmp_path)
    model, optimizer, cosine, loop = resumed
    model.load_state_dict(saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optim"])
    cosine.load_state_dict(saved["cosine"])
    loop.load_shared_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == stopped[1].param_groups[0]["lr"]
    go_on(*resumed, range(14, 20))
    assert torch.equal(flat(model), flat(whole[0])) and cosine.get_last_lr() == whole[2].get_last_lr()


def test_a_state_of_0_1_0_continues_where_it_was_with_one_warning(caplog):
    saved = torch.load(Path(__file__).parent / "outer_state_0_1_0.pt", weights_only=True)
    model = net()
    with gossamer.Outer(model, gossamer.gasloc(), local_steps=6, schedule=SCHEDULES["streaming"]) as loop:
        model.load_state_dict(saved["model"])
        loop.load_state_dict(saved["outer"])
        train(model, loop, 15, seed=1)
        # Written on another machine, whose kernels may round otherwise.
        torch.testing.assert_close(flat(model).cpu(), saved["after 15 more steps"], rtol=1e-5, atol=1e-6)
        assert caplog.text.count("does not say what it is of") == len(caplog.records) == 1


def eager(model):
    return torch.compile(model, backend="eager")


def eager_inside(model):
    model[0] = eager(model[0])
    return model


def eager_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [eager, eager_inside, eager_in_place])
def test_a_compiled_model_continues_the_state_of_a_plain_one_and_the_other_way_around(compiled):
    models = {"plain": lambda model: model, "compiled": compiled}
    saved, ends = {}, []
    for name, make in models.items():
        model = net()
        loop = gossamer.Outer(make(model), "gasloc", local_steps=6)
        train(loop.model, loop, 8)
        saved[name] = copy.deepcopy((flat(model), loop.state_dict()))
    for begun, make in itertools.product(saved, models.values()):
        loop = gossamer.Outer(make(net()), "gasloc", local_steps=6)
        loop.x.copy_(saved[begun][0])
        loop.load_state_dict(saved[begun][1])
        train(loop.model, loop, 10, seed=1)
        ends.append(flat(loop.model))
        with loop.mean_model() as mean:
            assert mean is loop.model
            plain = net()
            plain.load_state_dict(mean.state_dict())
        assert torch.equal(flat(plain), ends[-1])
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_a_model_that_is_compiled_after_outer_was_made_trains_on():
    plain, wrapped = net(), net()
    loops = [gossamer.Outer(model, "gasloc", local_steps=2) for model in (plain, wrapped)]
    train(plain, loops[0], 4)
    train(eager(wrapped), loops[1], 4)
    assert torch.equal(flat(plain), flat(wrapped))


@pytest.mark.parametrize(
    ("shapes", "compiled"), [("d322e6dd", eager), ("d322e6dd", lambda model: model), ("d636e688", eager_inside)]
)
def test_a_state_of_0_2_0_under_the_names_of_torch_compile_is_read(shapes, compiled):
    """With the hash of such names, as 0.2.0 saved it."""
    loop = gossamer.Outer(compiled(net()), "gasloc", local_steps=6)
    saved = loop.state_dict()
    words, mine = saved["of"]["model"].rsplit(" ", 1)
    assert mine not in ("d322e6dd", "d636e688")
    loop.load_state_dict({**saved, "of": {**saved["of"], "model": f"{words} {shapes}"}})
    with pytest.raises(CheckpointError, match=r"has model .* hash to 00000000 and this Outer"):
        loop.load_state_dict({**saved, "of": {**saved["of"], "model": f"{words} 00000000"}})


def saved_bytes(what):
    file = io.BytesIO()
    torch.save(what, file)
    return len(file.getvalue())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_saves_a_part_of_a_model_writes_that_part_and_not_the_whole_flat_buffer(dtype):
    model = nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 2)).to(DEVICE, dtype)

    def sizes():
        parts = [
            model[1].state_dict(),
            {"w": model[2].weight},
            {"b": model[2].bias.data},
            model[2],
            copy.deepcopy(model[1]),
        ]
        pickled = [pickle.dumps(part) for part in (model[2].weight, model.state_dict()["2.bias"])]
        return [*map(saved_bytes, parts), *map(len, pickled)]

    before = sizes()
    loop = gossamer.Outer(model, "gasloc", local_steps=1)
    with torch.no_grad():
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
        model[0].weight.add_(1.0)
    loop.step()  # takes the parameters back into its buffer
    assert all(after <= 1.2 * size for after, size in zip(sizes(), before, strict=True)), (sizes(), before)
    assert safetensors.torch.load(safetensors.torch.save(model.state_dict()))["1.weight"].shape == (300,)
    weight = model.state_dict()["0.weight"]
    loop.x.zero_()
    assert not weight.any() and not model[2].weight.any()  # still one memory


def test_where_workers_continue_is_compared_in_words():
    must_continue_alike([[3, 2, 6, "a"], [3, 2, 6, "a"], [3, 2, 6, "a"]])
    must_continue_alike([[3, 2, 6, "a"], [3, 1, 3, "a"]])  # with other local steps a step is at another place
    for other, words in (
        ([0, 0, 6, None], "worker 0 from round 3, step 2, worker 1 from the beginning, without a state;"),
        ([2, 2, 6, "a"], "worker 1 from round 2, step 2;"),
        ([3, 1, 6, "a"], "worker 1 from round 3, step 1;"),
        ([3, 2, 6, "b"], "worker 1 from round 3, step 2 of another run;"),
    ):
        with pytest.raises(PeerError, match=words):
            must_continue_alike([[3, 2, 6, "a"], other])
    for wrong in (None, [], "x", [1, 2, 3], [1, 2, "x", None], [1.5, 2, 3, None], {"a": 1}):
        with pytest.raises(PeerError, match="worker 1 does not say where it continues"):
            must_continue_alike([[3, 2, 6, "a"], wrong])


def test_a_schedule_divides_the_round_and_exchanges_in_flight_at_the_end_are_received():
    model, schedule = net(), gossamer.Schedule(fragments=2, overlap_steps=1)
    with gossamer.Outer(model, gossamer.diloco(0.5, 0.0), local_steps=2, schedule=schedule) as loop:
        before = flat(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1.0
        assert not loop.step()  # the first fragment is sent, and received after the next step
        assert torch.equal(flat(model), before + 1.0)
        assert loop.step()
        assert (flat(model) != before + 1.0).any()  # half of what it had moved when it was sent is taken back
        loop.finish()
    torch.testing.assert_close(flat(model), before + 0.5)


@pytest.mark.parametrize(
    ("rule", "schedule"),
    [*(("gasloc", name) for name in SCHEDULES), ("eager", "plain"), ("eager", "fragments"), ("fgd", "fragments")],
)
@pytest.mark.parametrize("steps", [7, 9, 11])
def test_training_that_ends_within_a_round_can_be_finished_and_continued(rule, schedule, steps):
    model = net()
    with gossamer.Outer(model, rule, local_steps=6, schedule=SCHEDULES[schedule]) as loop:
        train(model, loop, steps)
        loop.finish()
        loop.finish()
        train(model, loop, 12)
        assert (loop.rounds, loop.steps) == divmod(steps + 12, 6)


def test_what_cannot_work_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        gossamer.Outer(net(), gossamer.rules.data_parallel())
    with pytest.raises(ConfigError, match="local_steps = 0, which must be a whole number of at least 1"):
        gossamer.Outer(net(), gossamer.gasloc(), local_steps=0)
    with pytest.raises(ConfigError, match="for 4 workers"):
        gossamer.Outer(net(), gossamer.gasloc(), topology=gossamer.topologies.make_topology("ring", 4))
    with pytest.raises(ConfigError, match="0 trainable"):
        gossamer.Outer(nn.ReLU(), gossamer.gasloc())
    assert issubclass(PairingError, ConfigError)
    with pytest.raises(PairingError, match="reduction is 'all_reduce', and rule 'gasloc'"):
        gossamer.Outer(net(), "gasloc", reduction="all_reduce")
    with pytest.raises(PairingError, match="reduction = 'all_reduce' blocks"):
        gossamer.Outer(net(), "diloco", reduction="all_reduce", schedule=SCHEDULES["overlap"])
    with pytest.raises(ConfigError, match="reduction = 'mean', which must be one of ordered, all_reduce"):
        gossamer.Outer(net(), "diloco", reduction="mean")


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


def meet_without_a_group(argv):
    """Under a launcher that only numbers processes, such as srun, so that the first of them serves the store."""
    os.environ["MASTER_PORT"] = argv[0]
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    rank = int(os.environ["RANK"])
    for before in (True, False):
        model = net()
        with gossamer.Outer(model, "diloco", local_steps=2, timeout_s=20) as loop:
            train(model, loop, 4, seed=rank)
            assert (loop.worker, loop.n, loop.rounds) == (rank, 2, 2)
            with loop.mean_model() as mean:
                assert torch.equal(flat(mean), flat(model))
        if before:
            assert not dist.is_initialized()
            dist.init_process_group("gloo")  # at the same address
    assert dist.get_world_size() == 2
    dist.barrier()
    return 0


def test_processes_of_a_launcher_are_workers_without_a_process_group_which_may_be_made_later(forks):
    assert run_local(2, meet_without_a_group, [str(free_port())]) == 0


def use_the_store_after_worker_0(argv):
    """Worker 0's script ends with its `init_process_group`, and worker 1 uses the store of the group after that."""
    os.environ["MASTER_PORT"] = argv[0]
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    atexit._clear()  # a process of multiprocessing calls none of these functions, so that they are called here
    with gossamer.Outer(net(), "gossip", timeout_s=20) as loop:
        assert loop.n == 2
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("process", str(os.getpid()))
    else:
        process, deadline = int(store.get("process")), time.monotonic() + 1.5
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(process, 0)
                time.sleep(0.02)
        assert store.add("later", 1) == 1
    atexit._run_exitfuncs()
    return 0


def test_worker_0_of_such_a_launcher_hosts_the_store_until_the_others_have_ended_too(forks):
    assert run_local(2, use_the_store_after_worker_0, [str(free_port())]) == 0


# --- around an optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["plain", "streaming"])
def test_a_loop_inside_outer_loop_trains_to_the_bits_of_outer(schedule):
    ends = []
    for hooked in (True, False):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        options = {"local_steps": 6, "schedule": SCHEDULES[schedule]}
        draw = torch.Generator().manual_seed(3)

        def one_step(model=model, optimizer=optimizer, draw=draw):
            model(torch.randn(8, 3, generator=draw).to(DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if hooked:
            with gossamer.outer_loop(model, optimizer, "gasloc", **options) as outer:
                for _ in range(20):
                    one_step()
                assert (outer.rounds, outer.steps) == (3, 2)
            one_step()  # after the block the optimizer is as it was
            assert (outer.rounds, outer.steps) == (3, 2)
        else:
            with gossamer.Outer(model, "gasloc", **options) as outer:
                for _ in range(20):
                    one_step()
                    outer.step()
                outer.finish()
            one_step()
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_outer_loop_ends_with_an_error_inside_and_lets_go_of_the_optimizer():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(KeyError), gossamer.outer_loop(model, optimizer, "gasloc", local_steps=1) as outer:
        raise KeyError("inside")
    optimizer.step()
    with pytest.raises(ConfigError, match="closed after round 0"):
        outer.step()


def test_outer_loop_refuses_what_it_cannot_follow():
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    for optimizer, words in ((other, "a SGD that has none of the model's 4"), ("adamw", "a str as optimizer")):
        with pytest.raises(ConfigError, match=words), gossamer.outer_loop(net(), optimizer, "gasloc"):
            pass


# --- methods by name -------------------------------------------------------------------------------------------------

NOT_HERE = {
    "asynchronously": {
        "a2cid2",
        "ad_psgd",
        "cgad",
        "decoupled_diloco",
        "delayed_nesterov",
        "gasloc_without_waiting",
        "halos",
        "heloco",
        "mla",
        "pa_cgad",
    },
    "acts on gradients": {"acco", "data_parallel", "demo", "distro", "gpa_data_parallel", "schedule_free"},
    "inner.averaging": {"gpa", "gpa_gossip"},
    "moments": {"des_loc", "local_adam", "mt_dao"},
    "run.adapt": {"a_edit", "gasloc_adaptive"},
    "it sets model.experts.count = 8, model.experts.holders = 2": {"fomoe"},
    "adapt_every = 5": {"dilocox_adaptive"},
    "peers = 2, which must be a whole number from 1 to 1": {"gasloc_2peer"},
}


def test_every_method_runs_two_rounds_of_one_worker_or_is_refused_in_a_sentence():
    refused = {}
    for name in recipes():
        model = nn.Sequential(*net(), nn.Linear(1, 1)).to(DEVICE)  # of three layers, for three fragments
        try:
            found = gossamer.method(name)
            with gossamer.Outer(model, found, local_steps=None if found.local_steps else 6) as loop:
                train(model, loop, 2 * loop.local_steps)
                loop.finish()
            assert loop.rounds == 2 and flat(model).isfinite().all(), name
            assert loop.local_steps == recipes()[name].settings.get("run.local_steps", 6), name
        except ConfigError as error:
            refused[name] = str(error)
    assert refused.keys() == set().union(*NOT_HERE.values())
    for reason, names in NOT_HERE.items():
        for name in names:
            assert reason in refused[name] and "\n" not in refused[name]


def test_every_setting_of_a_method_is_in_what_outer_gets():
    refused = set().union(*NOT_HERE.values()) - {"gasloc_2peer"}  # which fails for one worker only
    for name, recipe in recipes().items():
        if name in refused:
            continue
        found, settings = gossamer.method(name), dict(recipe.settings)
        of = {
            head: {key.partition(".")[2]: settings.pop(key) for key in [*settings] if key.startswith(f"{head}.")}
            for head in ("rule", "topology", "codec", "schedule", "inner", "run")
        }
        expected = make_rule(of["rule"].pop("name"), **of["rule"])
        assert (found.rule.name, found.rule.options) == (expected.name, expected.options)
        assert {"name": found.topology, **found.topology_options} == of["topology"]
        assert found.codec.name == of["codec"].get("name", "exact")
        assert (found.codec.back and found.codec.back.name) == of["codec"].get("back")
        assert all(getattr(found.schedule, key) == value for key, value in of["schedule"].items())
        assert all(
            getattr(found.inner, key) in (value, tuple(value) if isinstance(value, list) else value)
            for key, value in of["inner"].items()
        )
        assert (found.local_steps, found.workers) == (of["run"].get("local_steps"), settings.pop("workers", None))
        assert not settings and of["run"].keys() <= {"local_steps"}, name


def test_a_method_is_its_parts_and_explicit_arguments_take_precedence():
    model, found = net(), gossamer.method("streaming_diloco", rule={"momentum": 0.5}, schedule={"fragments": 2})
    assert (found.rule.options["lr"], found.rule.options["momentum"]) == (0.4, 0.5)
    ends = []
    for rule, options in (
        (found, {}),
        (found.rule, {"codec": found.codec, "schedule": found.schedule, "topology": "complete", "local_steps": 30}),
    ):
        model = net()
        with gossamer.Outer(model, rule, **options) as loop:
            train(model, loop, 40)
        ends.append(flat(model))
    assert torch.equal(*ends)
    with gossamer.Outer(
        net(), found, local_steps=5, codec="exact", schedule=gossamer.Schedule(), topology="ring"
    ) as loop:
        assert (loop.local_steps, loop.method.codec.name, loop.method.schedule) == (5, "exact", gossamer.Schedule())
        assert loop.method.topology.name == "ring" != FITTING[loop.method.rule.needs]


def test_impossible_arguments_of_a_method_are_refused():
    for wrong, sentence in (
        (lambda: gossamer.method("muloko"), "did you mean 'muloco'"),
        (lambda: gossamer.method("diloco", rule={"speed": 1}), "unknown option 'speed'"),
        (lambda: gossamer.method("diloco", schedule={"overlap": 1}), "did you mean 'overlap_steps'"),
        (lambda: gossamer.method("diloco", codec="int9"), "did you mean 'int8'"),
        (lambda: gossamer.Outer(net(), "streaming_diloco"), r"give gossamer.method\('streaming_diloco'\)"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            wrong()


def test_a_method_with_an_inner_optimizer_is_reported_and_the_optimizer_can_be_built(caplog):
    found = gossamer.method("muloco")
    assert "spectral_muon" in caplog.text and "lr = 0.02" in caplog.text
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = build_optimizer(found.inner, model)
    with gossamer.Outer(model, found, local_steps=1) as loop:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        assert loop.step()
    caplog.clear()
    assert gossamer.method("diloco").inner is None and not caplog.text


# --- what is said of the loop, and what random numbers it draws ------------------------------------------------------


def test_a_loop_that_trains_nothing_before_the_first_exchange_is_warned_once(caplog):
    model = net()
    with gossamer.Outer(model, "gasloc", local_steps=3) as loop:
        for _ in range(3):  # as with gradient accumulation over more micro-batches than local steps
            loop.step()
        assert "worker 0 did not change in the 3 inner steps before its first exchange" in caplog.text
        assert "after optimizer.step() and not after each micro-batch" in caplog.text
        caplog.clear()
        for _ in range(3):
            loop.step()
    for trained in (1, 2):
        model = net()
        with gossamer.Outer(model, "gasloc", local_steps=3) as loop:
            train(model, None, trained)
            for _ in range(6):
                loop.step()
    assert "did not change" not in caplog.text


def early_steps(model, loop, micro_batches, *, before, scale=1.0, clear=False):
    """Counts micro-batches, or counts before the optimizer step, or, with neither, as it should be."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for micro in range(12):
        (scale * model(torch.ones(2, 3, device=DEVICE)).square().mean()).backward()
        if before:
            loop.step()
        if micro % micro_batches == micro_batches - 1 and all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        if clear or micro % micro_batches == micro_batches - 1:
            optimizer.zero_grad()
        if not before:
            loop.step()


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"micro_batches": 2, "before": False}, True),
        ({"micro_batches": 1, "before": True}, True),
        ({"micro_batches": 1, "before": False}, False),
        ({"micro_batches": 1, "before": False, "scale": float("inf")}, False),  # each step skipped, as by a GradScaler
        ({"micro_batches": 2, "before": False, "clear": True}, False),
    ],
)
def test_a_first_step_that_is_counted_before_the_optimizer_step_is_named_once(options, early, caplog):
    model = net()
    with gossamer.Outer(model, "gasloc", local_steps=4) as loop:
        early_steps(model, loop, **options)
    words = "worker 0 called outer.step() for the first time after a backward pass and before an optimizer step"
    assert caplog.text.count(words) == early
    assert not early or len(caplog.records) == 1, caplog.text


def test_a_later_step_that_is_counted_between_two_optimizer_steps_is_named_in_the_first_round(caplog):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with gossamer.Outer(model, "gasloc", local_steps=4) as loop:
        for micro in range(8):  # of each two, the optimizer takes the first
            model(torch.ones(2, 3, device=DEVICE)).square().mean().backward()
            if micro % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            loop.step()
    assert (
        caplog.text.count("worker 0 called outer.step() once more after a backward pass and before an optimizer") == 1
    )
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("calls", "optimizer_steps", "local_steps", "scaler", "named"),
    [
        (2, 1, 4, False, True),
        (2, 1, 5, False, True),
        (2, 1, 1, False, True),
        (1, 3, 4, False, True),
        (1, 1, 4, False, False),
        (1, 1, 1, False, False),
        (2, 1, 4, True, False),  # which may have skipped half of the steps
    ],
)
def test_steps_that_are_counted_twice_or_seldom_are_named_once(
    calls, optimizer_steps, local_steps, scaler, named, caplog
):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = torch.amp.GradScaler(DEVICE) if scaler else None
    with gossamer.Outer(model, "gasloc", local_steps=local_steps) as loop:
        while loop.steps_taken < 20:
            for _ in range(optimizer_steps):
                model(torch.ones(2, 3, device=DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            for _ in range(calls):
                loop.step()
    del kept
    assert len(caplog.records) == named, caplog.text
    assert caplog.text.count("worker 0 has called outer.step()") == named


def test_an_optimizer_step_after_the_last_count_is_named_at_the_end(caplog):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with gossamer.Outer(model, "gasloc", local_steps=4) as loop:
        for _ in range(8):  # counts before each step, with no gradients left
            optimizer.zero_grad()
            loop.step()
            model(torch.ones(2, 3, device=DEVICE)).square().mean().backward()
            optimizer.step()
    assert caplog.text.count("has taken a step after the last outer.step(), which no round has exchanged") == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_a_resume_that_forgets_the_outer_state_is_named_in_any_loop(made, kind, caplog):
    """Whether the optimizer was loaded before the Outer was made or after, and whether it counts its steps or not."""

    def resumed(saved, rule="diloco"):
        model = net()
        optimizer = kind(model.parameters())
        loop = None
        if made == "after":
            loop = gossamer.Outer(model, rule, local_steps=3)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        loop = loop or gossamer.Outer(model, rule, local_steps=3)
        if saved is not None and "outer" in saved:
            loop.load_state_dict(saved["outer"])
        with loop:
            for _ in range(3):
                model(torch.ones(2, 3, device=DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.step()
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": loop.state_dict()}

    saved = copy.deepcopy(resumed(None))
    resumed(saved)
    resumed({**{key: saved[key] for key in ("model", "optimizer")}}, "local_sgd")  # which keeps nothing
    assert not caplog.text
    del saved["outer"]
    resumed(saved)
    words = r"the optimizer of worker 0 has taken (3 )?steps before the first step of this outer loop"
    assert len(re.findall(words, caplog.text)) == 1


def test_an_optimizer_whose_step_is_compiled_in_one_graph_steps_beside_an_outer():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = torch.compile(optimizer.step, backend="eager")
    with gossamer.Outer(model, "gasloc", local_steps=2) as loop:
        for _ in range(4):
            model(torch.ones(2, 3, device=DEVICE)).square().mean().backward()
            step()
            loop.step()
    assert loop.rounds == 2


def test_an_optimizer_that_changes_parameters_past_autograd_counts_as_one(caplog):
    model = net()
    with gossamer.Outer(model, "gasloc", local_steps=1) as loop:
        model(torch.ones(2, 3, device=DEVICE)).square().mean().backward()
        for p in model.parameters():
            p.data.sub_(0.1 * p.grad)
        loop.step()
    assert not caplog.text


def test_an_outer_loop_around_an_optimizer_that_resumes_without_the_outer_state_is_named(caplog):
    def resumed(rule, state):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            optimizer.state[p] = {"step": torch.tensor(6.0), "exp_avg": p * 0, "exp_avg_sq": p * 0}
        with gossamer.outer_loop(model, optimizer, rule, local_steps=3) as loop:
            if state is not None:
                loop.load_state_dict(state)
            for _ in range(3):
                model(torch.ones(2, 3, device=DEVICE)).square().mean().backward()
                optimizer.step()
            return loop.state_dict()

    saved = resumed("diloco", None)
    assert (
        caplog.text.count("the optimizer of worker 0 has taken 6 steps before the first step of this outer loop") == 1
    )
    caplog.clear()
    resumed("diloco", saved)
    resumed("local_sgd", None)  # which keeps nothing
    assert not caplog.text


def test_steps_that_are_never_exchanged_are_reported_once(caplog):
    def said(steps, end=gossamer.Outer.close):
        caplog.clear()
        model = net()
        loop = gossamer.Outer(model, "gasloc", local_steps=4)
        train(model, loop, steps)
        end(loop)
        loop.close()
        return caplog.text

    assert not said(8)
    for end in (gossamer.Outer.close, gossamer.Outer.finish):
        text = said(6, end)
        assert text.count("ends with 2 inner steps that were not exchanged, as a round has 4;") == 1
        assert "as a round has 4, and no round ended at all, so that rounds changed nothing; let" in said(3, end)
    caplog.clear()

    def fails():
        with gossamer.Outer(model := net(), "gasloc", local_steps=4) as loop:
            train(model, loop, 3)
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fails()
    assert not caplog.text


def test_a_worker_without_others_or_after_earlier_rounds_is_not_reported_as_trained_apart(caplog):
    with gossamer.Outer(model := net(), "gasloc", local_steps=4) as loop:
        train(model, loop, 6)
        saved = loop.state_dict()
    caplog.clear()
    with gossamer.Outer(net(), "gasloc", local_steps=4) as loop:
        loop.load_state_dict(saved)
    assert "ends with 2 inner steps that were not exchanged, as a round has 4; let the number" in caplog.text
    for workers, words in ((1, "so that rounds changed nothing"), (2, "so that it has trained apart from the others")):
        watch = LoopCheck(net(), 0, workers, iter(range(9)).__next__, 4).watch
        watch.end()
        assert f"and outer.step() was never called, {words}; call it" in caplog.messages[-1]
        watch.steps, watch.quiet = 3, False
        watch.end()
        assert f"as a round has 4, and no round ended at all, {words}; let the number" in caplog.messages[-1]


def test_steps_of_an_incomplete_round_are_reported_when_the_loop_is_dropped(caplog, monkeypatch):
    def forgotten():
        caplog.clear()
        loop = gossamer.Outer(model := net(), "gasloc", local_steps=4)
        train(model, loop, 6)
        del loop
        gc.collect()
        return caplog.text

    assert forgotten().count("ends with 2 inner steps that were not exchanged") == 1
    monkeypatch.setattr("sys.last_value", KeyError("nothing caught it"), raising=False)
    assert not forgotten()


def test_closing_after_a_save_within_a_round_says_that_a_resumed_loop_continues(caplog):
    for steps_after_saving, warned in ((0, True), (1, False)):
        caplog.clear()
        with gossamer.Outer(model := net(), "gasloc", local_steps=4) as loop:
            train(model, loop, 2)
            loop.state_dict()
            train(model, loop, steps_after_saving)
        assert ("a loop that resumes from the state just saved continues with them" in caplog.text) == warned


def test_a_refused_state_does_not_make_of_a_loaded_model_a_trained_one(caplog):
    loop = gossamer.Outer(model := net(), "gasloc", local_steps=4)
    train(model, None, 2)  # stands for model.load_state_dict
    with pytest.raises(CheckpointError):
        loop.load_state_dict({"format": 9, "of": {}})
    loop.close()
    assert not caplog.text


def test_an_outer_shows_its_codec_and_its_schedule():
    with gossamer.Outer(
        net(), "diloco", codec="int8", schedule=gossamer.Schedule(fragments=2, overlap_steps=1)
    ) as loop:
        assert "on complete(), codec=int8(" in repr(loop) and "fragments=2, overlap_steps=1, local_steps=30" in repr(
            loop
        )


@pytest.mark.parametrize("end", ["close", "finish", "forgotten"])
def test_a_loop_that_never_calls_step_is_warned(end, caplog):
    model = net()
    loop = gossamer.Outer(model, "gasloc")
    train(model, None, 3)
    if end == "forgotten":
        del loop
        gc.collect()
    else:
        getattr(loop, end)()
    assert "outer.step() was never called" in caplog.text
    caplog.clear()
    for untrained in (gossamer.Outer(model, "gasloc"), gossamer.Outer(model, "gasloc")):
        saved = copy.deepcopy(model.state_dict())
        with untrained.mean_model():
            pass
        model.load_state_dict(saved)
        untrained.close()
    assert not caplog.text


def test_first_local_phases_are_compared_in_words(caplog):
    assert not warn_of_phases({0: ["7", None]}, 2, "1")
    for entries in ({0: ["7", None], 1: ["8", 0.1]}, {0: ["1", None], 1: ["1", None]}, {0: ["7", 0.1], 1: ["8", 0.1]}):
        assert warn_of_phases(entries, 2, "1") and not caplog.text
    assert not warn_of_phases({0: ["7", None], 1: "x"}, 2, "1") and not caplog.text
    assert warn_of_phases({0: ["7", 0.1], 1: ["7", 0.1]}, 2, "1")
    assert "all 2 workers came out of their first local phase with the same bits" in caplog.text
    caplog.clear()
    assert warn_of_phases({0: ["7", 0.1], 1: ["8", 0.2]}, 2, "1")
    assert "(worker 0 0.1, worker 1 0.2)" in caplog.text


def test_random_numbers_of_a_step_are_those_that_a_replica_draws_whatever_was_drawn_before():
    model = net()
    with gossamer.Outer(model, "gossip", local_steps=2, seed=7) as loop:
        for step in range(5):
            assert loop.steps_taken == step
            with rng.drawing(torch.device("cpu"), 7, 0, step, "model"):  # as in gossamer.run.worker.replica
                expected = torch.rand(4)
            torch.rand(step)
            before = torch.get_rng_state()
            with loop.drawing():
                assert torch.equal(torch.rand(4), expected)
            assert torch.equal(torch.get_rng_state(), before)
            train(model, loop, 1)
        with loop.drawing(3):
            first = torch.rand(4)
            with rng.drawing(torch.device("cpu"), 7, 0, 3, "model"):  # one inside another does not wait for it
                assert torch.equal(torch.rand(4), first)


# --- metrics of one process ------------------------------------------------------------------------------------------


def compared():
    """Every rule on parameters, by name, with its topology for four workers and each codec that goes with both."""
    for name, make in RULES.items():
        if missing(make) or make().site != "parameters":
            continue
        topology = make_topology(FITTING[make().needs], 4)
        for codec in ("exact", "int8"):
            if not combination_faults(Combination(rule=make(), topology=topology, codec=CODECS[codec]())):
                yield pytest.param(make(), topology, CODECS[codec](), id=f"{name}-{codec}")


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("rule", "topology", "codec"), [*compared()])
def test_messages_of_every_rule_are_compared_and_no_bit_changes(rule, topology, codec):
    ends = []
    for asks in (True, False):
        meters, network, xs = [Meter() for _ in range(4)], MemoryNetwork(4), [torch.ones(64) for _ in range(4)]
        m = Method(rule, topology, codec, gossamer.Schedule(), PLAIN)
        loops = [
            OuterLoop(
                m, network.transport(i), [(x, layout(64))], local_steps=1, timetable=timetable_of(((0, 1),)), seed=0
            )
            for i, x in enumerate(xs)
        ]
        for round in range(3):
            for place, stop in enumerate(loops[0].stops(round)):
                for i, loop in enumerate(loops):
                    if asks:
                        loop.compare_messages(meters[i].compare)
                    loop.announce(round, stop)
                    xs[i] += 0.0 if place else 0.1 * i
                    meters[i].count(loop.post(round, stop))
                finish_together(loops, loops[0].due(round, stop), serially)
        ends.append(torch.stack(xs))
        read = [meter.read() for meter in meters]
        assert all(one.bytes_sent > 0 and (one.disagreement is not None) == asks for one in read)
        assert not asks or 0.0 < max(one.disagreement for one in read) < 10.0
        assert meters[0].read() == (0, 0, 0, 0, 0.0, 0.0, None)
    assert torch.equal(*ends)


# --- the mean model --------------------------------------------------------------------------------------------------


def normed():
    """A model with statistics of its own in floating point, and a count of batches."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(DEVICE)


def whole(model):
    """All numbers of a model, copied."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def test_after_the_mean_model_everything_is_as_it_was_whatever_happened_inside():
    model = normed()
    with gossamer.Outer(model, "gasloc", local_steps=4) as loop:
        train(model, loop, 6)
        before, statistics = whole(model), model[1].running_mean

        def unchanged():
            return all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

        def fails(mean):
            mean(torch.randn(8, 3))  # which moves the statistics
            raise KeyError("inside")

        def assigns(mean):
            mean.load_state_dict({name: t + 1 for name, t in before.items()}, assign=True)

        def refused(mean):
            for call in (loop.step, loop.finish, loop.state_dict, lambda: loop.load_state_dict({})):
                with pytest.raises(ConfigError, match=r"was called inside mean_model\(\)"):
                    call()
            with pytest.raises(ConfigError, match=r"mean_model\(\) was called inside"), loop.mean_model():
                pass

        for act in (assigns, refused, fails):
            try:
                with loop.mean_model() as mean:
                    assert mean is model
                    assert unchanged()  # one worker is its own mean
                    act(mean)
            except KeyError:
                assert act is fails
            assert unchanged() and torch.equal(flat(model), loop.x)
            assert model[1].running_mean is statistics
        train(model, loop, 2)
        assert loop.rounds == 2
    with pytest.raises(ConfigError, match="closed after round 2"), loop.mean_model():
        pass


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_mean_over_workers_is_that_of_a_simulation_to_the_last_bit(n, alike):
    draw = torch.Generator().manual_seed(n)
    of = {
        "a": [torch.randn(101, generator=draw) for _ in range(n)],
        "b": [torch.randn((), generator=draw) for _ in range(n)],
    }
    of["c"] = [torch.randn(2, 3, generator=draw).to(torch.bfloat16) for _ in range(n)]
    of["a"] = [torch.cat([of["a"][0][:60], x[60:]]) for x in of["a"]]  # equal in most chunks, and not in all
    if alike:
        of = {name: [vectors[0].clone() for _ in vectors] for name, vectors in of.items()}
    network, found = MemoryNetwork(n), {}
    with ThreadPoolExecutor(n) as pool:

        def work(i):
            transport = Patient(network, i)
            return mean_over_workers([vectors[i] for vectors in of.values()], transport, n, round=3, fragment=1)

        found = list(pool.map(work, range(n)))
    for means in found:
        for mean, vectors in zip(means, of.values(), strict=True):
            expected = mean_of(vectors)
            assert mean.dtype == expected.dtype and torch.equal(mean, expected.reshape(-1))


class Patient(MemoryTransport):
    """Waits for the other threads of the test."""

    def wait(self, ticket):
        deadline = time.monotonic() + 20
        while not self.ready(ticket) and time.monotonic() < deadline:
            time.sleep(0.001)
        super().wait(ticket)


# --- what workers must have in common --------------------------------------------------------------------------------


def test_workers_that_differ_see_the_difference_and_both_values():
    with gossamer.Outer(net(), "gasloc") as loop:
        mine = common_of(loop.method, loop._flat, reduction="ordered", rest="compare", local_steps="30", seed=0)
    must_agree([[*mine], [*mine]], mine)
    for key in mine._fields:
        theirs = mine._replace(**{key: "something else"})
        with pytest.raises(
            PeerError, match=f"worker 1 differs from worker 0 in {key.replace('_', ' ')}: .*something else"
        ):
            must_agree([[*mine], [*theirs], [*mine]], mine)
    for wrong in (None, [], [*mine][:3], {"model": 1}, [["x" * 10_000]]):
        with pytest.raises(PeerError, match="worker 1 differs"):
            must_agree([[*mine], wrong], mine)
    other = mine._replace(schedule="in other fragments", model="whose hash is another then")
    with pytest.raises(PeerError, match=r"workers 1, 2 differ from worker 0 in schedule: .* in other fragments"):
        must_agree([[*mine], [*other], [*other]], mine)
    with pytest.raises(PeerError, match="worker 1 compares other things than the 9 of this worker"):
        must_agree([[*mine], [*mine, "more"]], mine)


# --- three processes, one after the other through all of this --------------------------------------------------------

CODECS_OF_EACH = {
    "there": (topk(k=64), topk(k=32), topk(k=64)),
    "back": (both_ways(bf16(), topk(k=64)), both_ways(bf16(), topk(k=32)), both_ways(bf16(), topk(k=64))),
}


def gathered(t):
    """A tensor of each worker."""
    ends = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(ends, t.contiguous())
    return ends


def other_codecs():
    for name, codecs in CODECS_OF_EACH.items():
        with pytest.raises(
            PeerError, match=r"worker 1 differs from worker 0 in codec: .*k = 32.* and worker 0 .*k = 64"
        ):
            gossamer.Outer(net(), "diloco", codec=codecs[dist.get_rank()], timeout_s=20)
        dist.barrier()
        assert name


def one_method_for_one_worker():
    with pytest.raises(ConfigError, match="method 'snoo' is for 1 worker and there are 3"):
        gossamer.Outer(net(), gossamer.method("snoo"))


def reductions():
    """The backend's all-reduce gives what the ordered mean gives, but for rounding, and workers that agree."""
    ends = {}
    for reduction in ("ordered", "all_reduce"):
        model = net()
        with gossamer.Outer(model, "diloco", local_steps=2, reduction=reduction, timeout_s=20) as loop:
            loop.metrics()
            train(model, loop, 6, seed=dist.get_rank())
            found = loop.metrics()
            ends[reduction] = flat(model), found
        assert found.rounds == 3 and found.exchange_s >= found.waiting_s > 0.0
        first, *others = gathered(flat(model))
        assert all(torch.equal(first, other) for other in others)
    (one, measured), (other, other_measured) = ends.values()
    torch.testing.assert_close(one, other)
    assert (measured.bytes_sent, measured.bytes_received, measured.messages) == (
        other_measured.bytes_sent,
        other_measured.bytes_received,
        other_measured.messages,
    )
    torch.testing.assert_close(measured.disagreement, other_measured.disagreement)


def metrics():
    """Bytes and disagreement are what one computes by hand."""
    rank, numel = dist.get_rank(), flat(net()).numel()
    by_hand = {  # the workers are at x, x + 1 and x + 2: from a ring of three come both others, from a mean the mean
        "gossip": ("ring", 2 * 4 * numel, 2, [2.5**0.5, 1.0, 2.5**0.5][rank]),
        "local_sgd": ("complete", None, 4, [1.0, 0.0, 1.0][rank]),
    }
    for rule, (topology, sent, messages, apart) in by_hand.items():
        model = net()
        with gossamer.Outer(model, rule, topology=topology, local_steps=1, timeout_s=20) as loop:
            assert loop.metrics() == (0, 0, 0, 0, 0.0, 0.0, None)
            with torch.no_grad():
                for p in model.parameters():
                    p += rank
            loop.step()
            found = loop.metrics()
            assert (found.rounds, found.messages) == (1, messages)
            assert sent is None or found.bytes_sent == found.bytes_received == sent
            total = torch.tensor([found.bytes_sent, found.bytes_received])
            dist.all_reduce(total)
            assert total[0] == total[1] > 0
            assert abs(found.disagreement - apart) < 1e-5, (rule, found)


def compiled_and_plain():
    """Worker 0 has its model compiled, worker 1 a part of it, and worker 2 nothing."""
    rank, model = dist.get_rank(), net()
    compiled = [eager, eager_inside, eager_in_place][rank](model)
    with gossamer.Outer(compiled, "diloco", local_steps=2, timeout_s=20) as loop:
        train(compiled, loop, 2, seed=rank)
        all_weights = [torch.empty_like(flat(model)) for _ in range(3)]
        dist.all_gather(all_weights, flat(model))
        assert loop.rounds == 1 and all(torch.equal(one, all_weights[0]) for one in all_weights)


def mean_models():
    """The same bits as the mean of a simulation, within a round and with exchanges in flight; who stays away is named."""
    rank, ends = dist.get_rank(), []
    for asks in (True, False):
        model = normed()
        with gossamer.Outer(model, "gasloc", local_steps=6, schedule=SCHEDULES["streaming"], timeout_s=20) as loop:
            train(model, loop, 6, seed=rank)  # one fragment is in flight
            for seed in (3, 6):
                if asks:
                    loop.metrics()
                    compare_mean_model(model, loop)
                train(model, loop, 4, seed=seed + rank)
            loop.finish()
        ends.append(flat(model))
    assert torch.equal(*ends)  # neither the mean model nor the metrics changed a bit
    with gossamer.Outer(net(), "gasloc", timeout_s=5) as loop:
        if rank != 1:
            sentence = r"not all workers entered mean_model\(\): worker 1 did not answer for 5 s"
            with pytest.raises(PeerError, match=sentence), loop.mean_model():
                raise AssertionError("it was made without worker 1")
        dist.barrier()


def compare_mean_model(model, loop):
    before = whole(model)
    expected = {name: mean_of(gathered(t)) if t.is_floating_point() else t for name, t in before.items()}
    assert not torch.equal(expected["0.weight"], before["0.weight"])
    with loop.mean_model() as mean:
        for name, t in mean.state_dict().items():
            assert torch.equal(t, expected[name]) and all(torch.equal(t, other) for other in gathered(t))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def states_of_other_steps():
    """A worker that continues from another round, step or run, or without its state, is refused before anything is exchanged."""
    rank, states = dist.get_rank(), []

    def start(rule="diloco"):
        model = net()
        return model, gossamer.Outer(model, rule, local_steps=2, timeout_s=60)

    for _ in range(2):
        model, loop = start()
        with loop:
            for steps in (2, 1):
                train(model, loop, steps, seed=rank)
                states.append(loop.state_dict())
    for of_one, words in (
        (None, "worker 1 from the beginning, without a state"),
        (states[1], "worker 1 from round 1, step 1;"),
        (states[2], "worker 1 from round 1, step 0 of another run"),
    ):
        model, loop = start()
        with loop:
            if (mine := of_one if rank == 1 else states[0]) is not None:
                loop.load_state_dict(mine)
            began = time.monotonic()
            with pytest.raises(
                PeerError, match=f"continue from different states: worker 0 from round 1, step 0, {words}"
            ):
                train(model, loop, 1)
            assert time.monotonic() - began < 30
            dist.barrier()
    others = [None, None, None]
    dist.all_gather_object(others, states[0])
    model, loop = start()
    with loop, pytest.raises(CheckpointError, match=f"has worker {(rank + 1) % 3} and this Outer {rank};"):
        loop.load_state_dict(others[(rank + 1) % 3])
    model, loop = start()
    with loop:
        loop.load_state_dict(states[0])
        train(model, loop, 2, seed=rank)
        assert loop.rounds == 2


class Heard(logging.Handler):
    """What is logged while it is entered."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("gossamer").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("gossamer").removeHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def the_same_data_and_other_rates():
    """Workers that train on the same batches, and those whose learning rates differ, are warned once."""
    rank = dist.get_rank()
    for rule, own_data, own_rate in (("diloco", False, False), ("gasloc", False, False), ("gasloc", True, True)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + own_rate * rank))
        draw = torch.Generator().manual_seed(own_data * rank)
        with Heard() as lines, gossamer.outer_loop(model, optimizer, rule, local_steps=2, timeout_s=60):
            for step in range(8):
                model(torch.randn(8, 3, generator=draw).to(DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:  # else a worker that no other waits for may end before the others have reported anything
                    dist.barrier()
        same = [
            line for line in lines if "all 3 workers came out of their first local phase with the same bits" in line
        ]
        rates = [line for line in lines if "(worker 0 0.05, worker 1 0.1, worker 2 0.15)" in line]
        assert (len(same), len(rates)) == (not own_data, own_rate), lines
        dist.barrier()


def uneven_data():
    """Who has fewer batches than others is named to them; `common_steps` is the way."""
    rank = dist.get_rank()
    batches = 50 if rank else 47
    model = net()
    if rank:
        sentence = (
            r"worker 0 after round 9 and 2 more steps left the loop while this one continues: .*equally many batches"
        )
        with (
            gossamer.Outer(model, "diloco", local_steps=5, timeout_s=60) as loop,
            pytest.raises(PeerError, match=sentence),
        ):
            train(model, loop, batches, seed=rank)
    else:
        with gossamer.Outer(model, "diloco", local_steps=5, timeout_s=60) as loop:
            train(model, loop, batches, seed=rank)
    dist.barrier()
    with gossamer.Outer(model, "diloco", local_steps=5, timeout_s=60) as loop:
        assert loop.common_steps(batches) == 47
        train(model, loop, 47, seed=rank)
        assert (loop.rounds, loop.steps) == (9, 2)
    dist.barrier()
    # Local steps may differ, and by mistake they lead to other numbers of rounds with equally many batches.
    with gossamer.Outer(model, "diloco", local_steps=5 if rank else 6, timeout_s=60) as loop:
        expects = pytest.raises(
            PeerError, match=r"worker 0 \(local_steps = 6, and 5 here\) after round 2 and 0 more steps"
        )
        with expects if rank else contextlib.nullcontext():
            train(model, loop, 15 if rank else 12, seed=rank)
    dist.barrier()


def one_finishes_and_stays():
    """Who has finished and is still there, as one that writes its model, is named to those that wait for it in vain."""
    rank = dist.get_rank()
    with gossamer.Outer(net(), "diloco", local_steps=5, timeout_s=5) as loop:
        train(loop.model, loop, 5, seed=rank)
        loop.finish()  # all do, and continue, so that none has left
        assert [loop._peers.published("left").get(rank)] == [[1, 0, 5]]
        train(loop.model, loop, 4 if rank else 2, seed=rank)
        if rank == 0:
            loop.finish()
            dist.barrier()
        else:
            sentence = (
                r"^worker 0 after round 1 and 2 more steps left the loop .*did not answer for 5 s.*or raise timeout_s;.*"
                r"outer\.common_steps\(len\(loader\)\) steps, and call outer\.step\(\) also where a GradScaler skipped"
            )
            with pytest.raises(PeerError, match=sentence):
                train(loop.model, loop, 1, seed=rank)
            dist.barrier()


def one_enters_the_mean_alone():
    """Who waits inside mean_model() names those that did not enter it long before the timeout, and they learn why they failed."""
    rank = dist.get_rank()
    with gossamer.Outer(model := net(), "diloco", local_steps=2, timeout_s=6) as loop, Heard() as lines:
        train(model, loop, 2, seed=rank)
        if rank:
            with pytest.raises(
                PeerError, match=r"^worker 0 has entered mean_model\(\), which this one did not: .*same step$"
            ):
                train(model, loop, 2, seed=rank)
        else:
            with pytest.raises(PeerError, match="not all workers entered"), loop.mean_model():
                pass
            assert [
                line for line in lines if "worker 0 waits in mean_model() for worker 1 and worker 2, which did" in line
            ]
        dist.barrier()


def one_leaves_out_the_steps_that_a_scaler_skips():
    """A loop that begins its next turn where a GradScaler skipped a step is named in the first round; one that counts is not."""
    rank = dist.get_rank()
    for leaves_out in (True, False):
        model = net()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=8.0)
        with gossamer.Outer(model, "diloco", local_steps=3, timeout_s=60) as loop, Heard() as lines:
            for step in range(4 if leaves_out and rank == 1 else 3):
                spoilt = math.inf if step == 0 and rank == 1 else 1.0
                scaler.scale(spoilt * model(torch.full((2, 3), 1.0 + rank)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if not leaves_out or math.isfinite(spoilt):
                    loop.step()
        named = [
            line for line in lines if "a GradScaler has skipped an optimizer step of worker 1 and outer.step()" in line
        ]
        assert len(named) == (leaves_out and rank == 1), lines
        dist.barrier()


def go_through_all(argv):
    dist.init_process_group("gloo")
    for act in (
        other_codecs,
        states_of_other_steps,
        the_same_data_and_other_rates,
        uneven_data,
        one_finishes_and_stays,
        one_enters_the_mean_alone,
        one_leaves_out_the_steps_that_a_scaler_skips,
        one_method_for_one_worker,
        reductions,
        metrics,
        mean_models,
        compiled_and_plain,
    ):
        act()
        dist.barrier()
    dist.destroy_process_group()
    return 0


def test_a_look_for_gradient_scalers_spoils_no_tuple_that_another_thread_is_building() -> None:
    """A reference to a tuple that is not yet whole makes its builder fail, with a SystemError of Python."""
    looked, built = threading.Event(), threading.Event()

    class SlowScaler(torch.amp.GradScaler):
        def is_enabled(self) -> bool:
            looked.set()
            built.wait(60)
            return super().is_enabled()

    def numbers() -> Iterator[int]:
        yield from range(5)
        started.set()
        looked.wait(60)
        yield from range(5, 30)

    def build() -> tuple[int, ...]:
        try:
            return tuple(numbers())
        finally:
            built.set()

    started = threading.Event()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(build)
        started.wait(60)
        slow = SlowScaler(DEVICE)
        assert Scalers().there() == slow._enabled
        assert other.result(60) == tuple(range(30))


def test_three_workers_agree_reduce_count_and_lend_the_mean_model(forks):
    assert run_local(3, go_through_all, []) == 0
