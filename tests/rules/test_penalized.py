"""The penalty on long pseudo-gradients: nothing where none is long, and no weight for what is unusual."""

import itertools
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from drifted_rounds import play
from gossamer.errors import ConfigError
from gossamer.layout import Layout, Leaf
from gossamer.record.folder import read_metrics
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.schedule import Schedule
from gossamer.rules import (
    capped,
    clipped,
    data_parallel,
    diloco,
    eager,
    error_feedback,
    gasloc,
    make_rule,
    penalized,
    robust,
)
from gossamer.rules.contract import Context
from gossamer.run.simulated.simulate import simulate
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from tiny import single

P, N = 7, 4
LAYOUT = Layout((Leaf("embed", (3,), 0, 3), Leaf("layers.0.up", (2,), 3, 5), Leaf("layers.0.down", (2,), 5, 7)), P)
MEAN = diloco(1.0, optimizer="sgd")
QUICK = {"window": 3, "decay": 0.34}
close = torch.testing.assert_close


def context(t, layout=LAYOUT, over_shards=float):
    return Context(0, N, t, 1, 1 / N, layout, 1, True, (1, 2, 3), over_shards=over_shards)


def honest(rounds, n=N):
    """Messages of about the same length for each round and worker."""
    noise = iter(random_vectors(n * rounds, P))
    return [[torch.ones(P, dtype=torch.float64) + 0.1 * next(noise) for _ in range(n)] for _ in range(rounds)]


def steps(rule, messages, *of_shard):
    """How far the parameters moved against the gradient in each round, and the state after it."""
    x, found = torch.zeros_like(messages[0][0]), []
    s = rule.init(x, context(0, *of_shard))
    for t, (own, *others) in enumerate(messages):
        y, s = rule.recv(x, s, own, tuple(others), context(t, *of_shard))
        found.append((x - y, s))
        x = y
    return found


@pytest.mark.parametrize("rule", [diloco(), MEAN, error_feedback(diloco())], ids=lambda rule: rule.name)
def test_a_high_temperature_and_a_high_cap_give_the_bits_of_the_rule_alone(rule):
    start, drift = random_vectors(1, P, dtype=torch.float32) * 3, random_drift(P, dtype=torch.float32)
    wrapped = penalized(rule, temperature=1e30, cap=1e30, window=100)
    for one in (wrapped, capped(rule, 1e30)):
        plain, _ = play(rule, make_topology("complete", 3), start, 6, drift)
        same, _ = play(one, make_topology("complete", 3), start, 6, drift)
        assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))


def test_short_messages_weigh_more_by_the_softmax_of_their_negative_norms_in_each_layer():
    (messages,) = honest(1)
    messages[2][3:] *= 2.0
    ((step, _),) = steps(penalized(MEAN, temperature=0.5, cap=1e9), [messages])
    for span in (slice(0, 3), slice(3, 7)):
        stack = torch.stack([one[span] for one in messages])
        close(step[span], torch.softmax(-stack.norm(dim=1) / 0.5, 0) @ stack)


@pytest.mark.parametrize("temperature", [1.0, 1e9], ids=["weighs by length", "weighs alike"])
def test_a_worker_a_thousand_times_as_long_weighs_nothing_from_the_fourth_round_on(temperature):
    messages = honest(9)
    for t in range(3, 9):
        messages[t][3] = 1e3 * messages[t][3]
    rule = penalized(MEAN, temperature, 1e9, **QUICK)
    for t, (step, s) in enumerate(steps(rule, messages)):
        left = messages[t][: 3 if t >= 3 else 4]
        if temperature > 1:
            close(step, sum(left) / len(left))
        assert s.counted[1].tolist() == [0, 0, 0, max(0, t - 2)]
        assert s.norms[0] == s.norms[1] < 4


def test_only_the_layer_that_is_unusual_is_left_out():
    messages = honest(5)
    messages[4][1][3:] *= 100.0
    step, s = steps(penalized(MEAN, 1e9, 1e9, **QUICK), messages)[-1]
    close(step[:3], (sum(messages[4]) / 4)[:3])
    close(step[3:], (sum(m for i, m in enumerate(messages[4]) if i != 1) / 3)[3:])
    assert s.counted[1].tolist() == [0, 1, 0, 0]


def test_what_is_left_out_and_what_is_remembered_of_norms_follow_the_equations():
    decay, threshold, window, rounds = 0.25, 2.0, 4, 60
    scales = torch.stack(random_vectors(rounds, N)).exp()
    messages = [[scale * torch.ones(P, dtype=torch.float64) for scale in some] for some in scales]
    found = [s for _, s in steps(penalized(MEAN, 1e9, 1e9, threshold, window, decay), messages)]
    m, v = [0.0] * N, [0.0] * N
    scores, counted = [[0.0] * window for _ in range(N)], [0] * N

    def score(i, norm):
        return (norm - m[i]) / v[i] ** 0.5 if v[i] else 0.0

    for t, (some, s) in enumerate(zip(scales.tolist(), found, strict=True)):
        norms = [2.0 * scale for scale in some]  # of the layer of four elements
        limits = [threshold * max(1.0, statistics.stdev(scores[i])) for i in range(N)]
        out = [t >= window and score(i, norm) > limits[i] for i, norm in enumerate(norms)]
        for i, norm in enumerate(norms):
            counted[i] += out[i]
            if not out[i] or all(out):
                delta = norm - m[i]
                m[i] += decay * delta
                v[i] = (1 - decay) * (v[i] + decay * delta * (norm - m[i]))
                scores[i] = [*scores[i][1:], score(i, norm) if t + 1 >= window else 0.0]
        kept = s.lengths
        assert (kept.mean[:, 1].tolist(), kept.variance[:, 1].tolist()) == (pytest.approx(m), pytest.approx(v))
        assert kept.scores[:, 1].tolist() == [pytest.approx(one) for one in scores] and kept.rounds[0] == t + 1
        assert s.counted[1].tolist() == counted
    assert min(counted) > 0


def test_where_all_are_unusual_there_is_no_outer_step_and_the_momentum_stays():
    messages = honest(5)
    messages[4] = [torch.cat([one[:3], 1e3 * one[3:]]) for one in messages[4]]
    before, after = steps(penalized(diloco(0.7, 0.8), **QUICK), messages)[-2:]
    assert not after[0][3:].any() and after[0][:3].all()
    assert torch.equal(after[1].inner.b[3:], before[1].inner.b[3:])
    assert after[1].counted[1].tolist() == [1, 1, 1, 1]


def test_a_change_that_all_workers_make_stops_them_for_some_rounds_only():
    messages = honest(30)
    messages[10:] = [[20.0 * one for one in some] for some in messages[10:]]
    moved = [bool(step.any()) for step, _ in steps(penalized(MEAN, **QUICK), messages)]
    assert not moved[10] and all(moved[:10]) and all(moved[-10:])


def test_the_order_of_the_workers_does_not_matter():
    messages = honest(6)
    messages[5][0] = 50.0 * messages[5][0]
    rule = penalized(MEAN, **QUICK)
    turned = [[some[i] for i in (2, 0, 3, 1)] for some in messages]
    for (a, _), (b, _) in zip(steps(rule, messages), steps(rule, turned), strict=True):
        close(a, b)


@pytest.mark.parametrize("rule", [penalized(MEAN, cap=0.5), capped(MEAN, 0.5)], ids=lambda rule: rule.name)
def test_no_update_is_longer_than_the_cap_and_both_norms_are_known(rule):
    x, messages = torch.zeros(P, dtype=torch.float64), honest(1)[0]
    s = rule.init(x, context(0))
    row = tuple((j, 1 / N) for j in range(N))
    combined = rule.combine(messages[0], dict(enumerate(messages[1:], 1)), 0, row)
    y, s = rule.recv(x, s, messages[0], combined, context(0))
    layers = 1 if rule.averages else 2
    assert float(y.norm()) == pytest.approx(0.5 * layers**0.5) == float(rule.norms(s)[1])
    assert float(rule.norms(s)[0]) > 2.0


def test_two_shards_see_the_norms_of_whole_layers():
    messages, rule = honest(5), penalized(MEAN, cap=1.0, **QUICK)
    messages[4][3] = 1e3 * messages[4][3]
    meet, added = threading.Barrier(2), [0.0, 0.0]
    halves = torch.tensor([0, 1, 3, 5]), torch.tensor([2, 4, 6])

    def shard(k):
        def over_shards(mine):
            added[k] = mine
            meet.wait(10)
            total = added[0] + added[1]
            meet.wait(10)
            return total

        sizes = [2, 1, 1] if k == 0 else [1, 1, 1]
        ends = [0, *itertools.accumulate(sizes)]
        leaves = [Leaf(one.name, (b - a,), a, b) for one, a, b in zip(LAYOUT.leaves, ends, ends[1:], strict=False)]
        layout = Layout(tuple(leaves), ends[-1])
        return steps(rule, [[one[halves[k]] for one in some] for some in messages], layout, over_shards)

    with ThreadPoolExecutor(2) as pool:
        shards = [*pool.map(shard, range(2))]
    for whole, *parts in zip(steps(rule, messages), *shards, strict=True):
        for half, (step, s) in zip(halves, parts, strict=True):
            close(step, whole[0][half])
            close(s.norms, whole[1].norms)
            assert torch.equal(s.counted, whole[1].counted)


def test_what_cannot_be_penalized_is_refused_by_name():
    for rule in (gasloc(), eager(), data_parallel(), robust(diloco()), capped(diloco())):
        with pytest.raises(ConfigError, match=f"'{rule.name}'"):
            penalized(rule)
    with pytest.raises(ConfigError, match="window is 3, so that after 3 rounds"):
        penalized(diloco(), window=3)
    with pytest.raises(ConfigError, match="'clipped_diloco'"):
        capped(clipped(diloco()))
    assert make_rule("diloco", penalized={}).options["window"] == 100


def test_layers_of_fragments_are_refused_where_a_worker_is_several_processes():
    def faults(rule, fragments, shards=2):
        made = Combination(
            rule=rule,
            topology=make_topology("complete", 4),
            schedule=Schedule(fragments=fragments),
            local_steps=4,
            shards=shards,
        )
        return [
            sentence
            for sentence in incompatibilities.combination_faults(made)
            if "each layer of a fragment" in sentence
        ]

    assert faults(penalized(diloco()), 2) and not faults(penalized(diloco()), 1)
    assert not faults(capped(diloco()), 2) and not faults(penalized(diloco()), 2, 1)


def test_the_mean_gradient_is_clipped_to_the_cap():
    xs, _ = play(
        capped(data_parallel(), 0.5), make_topology("complete", 3), random_vectors(1, P) * 3, 1, random_drift(P)
    )
    assert float(xs[0].norm()) == pytest.approx(0.5)


def test_the_record_of_a_run_shows_both_norms_and_that_no_message_was_taken(tmp_path):
    settings: dict[str, Any] = {
        "rule__name": "diloco",
        "topology__name": "complete",
        "run__eval_every": 0,
        "run__steps": 6,
    }
    penalty = {"threshold": 1e-9, "window": 2, "decay": 0.5, "cap": 1e-3}
    simulate(single(**settings, rule__penalized=penalty, inner__warmup_steps=6), tmp_path)  # its norms grow
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [line["round"] for line in lines] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for line in lines[:6]:
        assert "declined" not in line and line["update_norm"] > line["capped_norm"] == pytest.approx(1e-3 * 2**0.5)
    for line in lines[6:]:
        assert line["declined"] == {"0": 1, "1": 1, "2": 1} and line["update_norm"] == line["capped_norm"] == 0.0
