"""What methods are of each other beyond one row of `test_rules`: under gradients that depend on the point, and through codecs.

In fp64 and within rounding, unless a name says "to the last bit".
"""

import pytest
import torch
from test_rules import ROWS, context

from drifted_rounds import play
from gossamer.codecs import fp16, topk
from gossamer.layout import Layout, Leaf
from gossamer.record import checkpoint
from gossamer.rules import data_parallel, diloco, gasloc, gossip, local_sgd, noloco, slowmo, sparseloco
from gossamer.run.config.document import with_settings
from gossamer.run.config.recipes import recipe
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, parse
from gossamer.run.planning.traffic import traffic
from gossamer.run.simulated.simulate import simulate
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.tree import leaves
from tiny import tiny

P, N, RATE = 7, 4, 0.2
CENTRES = random_vectors(N, P, seed=5)
CURVATURE = torch.linspace(0.1, 2.0, P, dtype=torch.float64)
START = random_vectors(1, P)[0]
close = torch.testing.assert_close


def gradient(i, x):
    """Of the loss of worker i, a quadratic around its own centre."""
    return CURVATURE * (x - CENTRES[i])


def sgd_step(worker, step, x):
    return -RATE * gradient(worker, x)


def data_parallel_sgd(steps):
    """Where SGD ends with the gradient that the rule `data_parallel` hands to its workers."""
    x = START
    for _ in range(steps):
        received, _ = play(
            data_parallel(), make_topology("complete", N), [x] * N, 1, lambda i, t, _, at=x: gradient(i, at)
        )
        x = x - RATE * received[0]
    return x


@pytest.mark.parametrize(
    ("rule", "graph"),
    [
        (diloco(1.0, 0.0), {"name": "complete"}),
        (local_sgd(), {"name": "complete"}),
        (slowmo(1.0, 0.0), {"name": "complete"}),
        (gasloc(1.0, 0.0), {"name": "complete"}),
        (gasloc(1.0, 0.0, form="published"), {"name": "complete"}),
        (gossip(), {"name": "complete"}),
        (gossip(), {"name": "pga", "every": 1}),
    ],
    ids=["diloco", "local_sgd", "slowmo", "gasloc", "gasloc-published", "d_psgd", "gossip_pga"],
)
def test_with_one_inner_step_of_sgd_averaging_of_all_is_data_parallel_sgd(rule, graph):
    xs, _ = play(rule, make_topology(n=N, **graph), [START] * N, 8, sgd_step)
    for x in xs:
        close(x, data_parallel_sgd(8))


def test_diloco_with_one_worker_and_one_inner_step_is_not_data_parallelism():
    xs, _ = play(diloco(), make_topology("complete", 1), [START], 8, sgd_step)
    ys, _ = play(gossip(), make_topology("complete", 1), [START], 8, sgd_step)
    assert not torch.allclose(xs[0], ys[0], atol=0.1)


def test_with_one_inner_step_of_sgd_gasloc_without_momentum_is_d_psgd():
    topology = make_topology("ring", N)
    xs, _ = play(gasloc(1.0, 0.0), topology, [START] * N, 8, sgd_step)
    expected = [START] * N
    for t in range(8):
        moved = [x + sgd_step(i, t, x) for i, x in enumerate(expected)]
        expected = [sum(w * moved[j] for j, w in topology.mixing(t).rows[i]) for i in range(N)]
    for x, y in zip(xs, expected, strict=True):
        close(x, y)


@pytest.mark.parametrize("every", [2, 3])
def test_gossip_without_peers_and_a_global_average_every_few_rounds_is_local_sgd_with_longer_rounds(every):
    complete = make_topology("complete", N)

    def plan(round, alive=None):
        return complete.mixing(round, None if round % every == every - 1 else frozenset())

    xs, _ = play(gossip(), complete._replace(mixing=plan), [START] * N, 2 * every, sgd_step)
    ys, _ = play(local_sgd(), complete, [START] * N, 2, sgd_step, steps=every)
    for x, y in zip(xs, ys, strict=True):
        close(x, y)


def test_diloco_through_fp16_is_diloco_within_the_rounding_of_fp16():
    lr, momentum, rounds, drift = 0.7, 0.9, 5, random_drift(P)
    xs, _ = play(diloco(lr, momentum), make_topology("complete", N), [START] * N, rounds, drift)
    ys, _ = play(diloco(lr, momentum), make_topology("complete", N), [START] * N, rounds, drift, codec=fp16())
    largest = max(float(drift(i, t, START).abs().max()) for i in range(N) for t in range(rounds))
    # Each pseudo-gradient is off by half a unit in its last place of eleven bits; momentum adds up at most 1 / (1 - μ) of them.
    assert 0 < (xs[0] - ys[0]).abs().max() < rounds * lr / (1 - momentum) * largest * 2**-11
    assert all(torch.equal(ys[0], y) for y in ys)


def test_noloco_sends_its_parameters_to_the_last_bit_and_nothing_else():
    (x,) = random_vectors(1, P, dtype=torch.float32)
    message = leaves(noloco().send(x, noloco().init(x + 1, context()), context()))
    assert len(message) == 1 and torch.equal(message[0], x)


def test_sparseloco_that_sends_every_element_leaves_nothing_and_is_diloco_with_outer_sgd():
    (start,), drift = random_vectors(1, P, dtype=torch.float32), random_drift(P, dtype=torch.float32)
    complete = make_topology("complete", N)
    xs, states = play(sparseloco(0.8, 0.5), complete, [start] * N, 6, drift, codec=topk(k=4, chunk=4))
    ys, _ = play(diloco(0.8, optimizer="sgd"), complete, [start] * N, 6, drift)
    close(xs[0], ys[0])
    assert not any(s.unsent.any() for s in states)


def test_muloco_with_adamw_inside_is_diloco_to_the_last_bit():
    def named(**settings):
        return digest(parse(with_settings({"workers": 4}, settings)))

    inside = {"inner.optimizer": "adamw", "inner.lr": 1e-3, "inner.nesterov": True, "inner.weight_decay": 0.1}
    muloco = named(method="muloco", **inside)
    assert muloco == named(method="diloco", **{"rule.momentum": 0.6}) != named(method="muloco")


def states_of(run, folder):
    """What each worker of a run had at its end."""
    simulate(run, folder)
    return [checkpoint.load(folder / "checkpoints", run.length.rounds, i, digest(run)) for i in range(run.workers)]


AVERAGING = {"rule__name": "local_sgd", "topology__name": "complete"}


def test_where_parameters_and_moments_are_averaged_in_every_round_all_workers_are_equal_to_the_last_bit(tmp_path):
    """Local Adam, or DES-LOC with all its periods 1."""
    first, *others = states_of(tiny(schedule__inner_every=[1, 1], **AVERAGING), tmp_path)
    moments = [
        [state["inner"]["state"][k][name] for k in range(9) for name in ("exp_avg", "exp_avg_sq")]
        for state in (first, *others)
    ]
    for state, own in zip(others, moments[1:], strict=True):
        assert torch.equal(state["x"], first["x"])
        assert all(map(torch.equal, own, moments[0]))


@pytest.mark.full
def test_without_a_memory_of_the_first_moment_its_period_changes_no_bit(tmp_path):
    runs = [tiny(inner__betas=[0.0, 0.95], schedule__inner_every=[k, 2], **AVERAGING) for k in (1, 0)]
    averaged, left = (states_of(run, tmp_path / str(k)) for k, run in enumerate(runs))
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(averaged, left, strict=True))


def test_workers_that_never_average_their_moments_keep_their_own(tmp_path):
    first, second, _ = states_of(tiny(schedule__inner_every=[0, 0], **AVERAGING), tmp_path)
    assert not torch.equal(first["inner"]["state"][0]["exp_avg"], second["inner"]["state"][0]["exp_avg"])


def test_des_loc_sends_half_as_much_again_as_local_sgd_and_local_adam_twice_that():
    layout = Layout((Leaf("w", (1000,), 0, 1000),), 1000)
    base = {"workers": 8, "model.size": "0.2m"}
    sent = {
        name: traffic(resolve(parse(with_settings(with_settings({}, base), recipe(name).settings))), layout).sent_bytes
        for name in ("local_sgd", "des_loc", "local_adam")
    }
    assert sent["local_sgd"] == 1.75 * 4000
    assert (sent["des_loc"], sent["local_adam"]) == pytest.approx((1.5 * 1.75 * 4000, 3 * 1.75 * 4000))


ALIKE = [
    name
    for name, rule in ROWS.items()
    if rule.identical
    and rule.site == "parameters"
    and not rule.delay_rounds
    and not rule.name.startswith(("robust", "trusted", "penalized"))  # which hear no plain mean
]


@pytest.mark.parametrize("name", ALIKE)
def test_workers_that_hear_everyone_are_one_worker_that_took_the_mean_drift(name):
    rule, drift = ROWS[name], random_drift(P)
    xs, _ = play(rule, make_topology("complete", N), [START] * N, 6, drift)
    ys, _ = play(
        rule, make_topology("complete", 1), [START], 6, lambda _, t, x: sum(drift(i, t, x) for i in range(N)) / N
    )
    close(xs[0], ys[0])
