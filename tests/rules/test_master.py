"""Parameters in half precision: the outer update is made in fp32, and half precision is what is sent."""

import copy

import pytest
import torch
from torch import nn

import gossamer
from drifted_rounds import play
from gossamer.codecs import exact
from gossamer.rounds.compatibility.combine import FITTING, Method
from gossamer.rounds.kernel import PLAIN, compiled
from gossamer.rounds.loop import OuterLoop
from gossamer.rounds.schedule import Schedule
from gossamer.rules import RULES, weighted
from gossamer.settings.over_time import timetable_of
from gossamer.testing.drifted_workers import flat_layout as layout
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.testing.numbers import SPACING, half_precision_follows_full_precision, quarter_spacings
from gossamer.topologies import make_topology
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import nbytes

N, P, ROUNDS = 4, 64, 30
ROWS = {name: make() for name, make in RULES.items() if make().site == "parameters"}
ROWS["weighted"] = weighted(RULES["local_sgd"]())
every_row = pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS.keys())


def start():
    draw = torch.Generator().manual_seed(0)
    return 1.5 + SPACING * torch.randint(-5, 6, (P,), generator=draw).float()


@pytest.mark.sampled(5)
@every_row
def test_a_bf16_model_follows_the_fp32_run_within_the_rounding_of_bf16(rule):
    assert half_precision_follows_full_precision(rule, [make_topology(FITTING[rule.needs], N)]) > 4, "it moved"


@pytest.mark.parametrize("name", ["local_sgd", "gossip"])
def test_so_it_does_with_an_overlapped_exchange(name):
    rule, schedule, x = ROWS[name], Schedule(overlap_steps=1), start()
    topology = make_topology(FITTING[rule.needs], N)
    wide, _ = play(rule, topology, [x] * N, ROUNDS, quarter_spacings, schedule=schedule, steps=2)
    half, _ = play(rule, topology, [x.bfloat16()] * N, ROUNDS, quarter_spacings, schedule=schedule, steps=2)
    assert (sum(x.float() for x in half) / N - sum(wide) / N).abs().max() <= 0.6 * SPACING


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_messages_have_the_bytes_of_half_precision_and_the_state_those_of_fp32(dtype):
    def sent(rule, topology):
        network = MemoryNetwork(2)
        m = Method(rule, make_topology(topology, 2), exact(), Schedule(), PLAIN)
        loops = [
            OuterLoop(
                m,
                network.transport(i),
                [(start().to(dtype), layout(P))],
                local_steps=1,
                timetable=timetable_of(((0, 1),)),
                seed=0,
            )
            for i in range(2)
        ]
        (stop,) = loops[0].stops(0)
        for loop in loops:
            loop.announce(0, stop)
        (operation,) = loops[0].post(0, stop)
        loops[1].post(0, stop)
        return operation.sends[0][1], nbytes(loops[0].state)

    assert sent(ROWS["gossip"], "ring") == (2 * P, 4 * P)
    assert sent(ROWS["gasloc"], "ring") == (2 * P, 2 * 4 * P), "what keeps the start of the round needs no other master"
    assert sent(ROWS["sgp"], "random_push") == (2 * P + 4, 2 * 4 * P + 4)
    assert sent(RULES["sparta"](one_in=8), "ring") == (2 * P // 8, 4 * P)
    assert sent(ROWS["local_sgd"], "complete") == (P // 2 * 2 + P // 2 * 4, 4 * P)  # a chunk, and a sum in fp32 back


def test_the_compiled_update_has_the_same_bits():
    rule, ring, x = ROWS["gasloc"], make_topology("ring", N), random_vectors(1, 1000, dtype=torch.bfloat16) * N
    drift = random_drift(1000, dtype=torch.bfloat16)
    plain, _ = play(rule, ring, x, 5, drift)
    fused, _ = play(rule, ring, x, 5, drift, kernel=compiled())
    assert all(map(torch.equal, plain, fused))


@pytest.mark.parametrize("rule", [gossamer.gossip, gossamer.gasloc], ids=["gossip", "gasloc"])
def test_outer_around_a_bf16_model_has_an_fp32_state_and_continues_from_it(rule):
    def begin():
        model = nn.Linear(P, 1, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(start())
        return model, gossamer.Outer(model, rule(), local_steps=1)

    def drift(model, outer, steps):
        for step in steps:
            with torch.no_grad():
                model.weight.add_(quarter_spacings(0, step, model.weight)[None])
            outer.step()

    model, outer = begin()
    drift(model, outer, range(3))
    saved = copy.deepcopy((model.state_dict(), outer.state_dict()))
    assert {leaf.dtype for leaf in saved[1]["outer"]} == {torch.float32}
    drift(model, outer, range(3, ROUNDS))
    again, second = begin()
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    drift(again, second, range(3, ROUNDS))
    assert torch.equal(model.weight, again.weight)
    wide, _ = play(rule(), make_topology("ring", 1), [start()], ROUNDS, quarter_spacings)
    assert (model.weight - wide[0]).abs().max() <= 0.6 * SPACING and model.weight.dtype is torch.bfloat16
