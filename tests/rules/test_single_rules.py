"""What single rules promise beyond the common specification: the identities of their equations."""

import importlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import context, play
from gossamer.codecs import CODECS, int4, randomk, topk, topk2bit
from gossamer.errors import ConfigError, PairingError
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rules import (
    RULES,
    acco,
    anchored,
    anchored_gasloc,
    choco,
    data_parallel,
    diloco,
    easgd,
    error_feedback,
    fedopt,
    gasloc,
    gossip,
    local_sgd,
    omr,
    restarted,
    sgp,
    sparseloco,
    sparta,
    weighted,
)
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.topologies.mixing import mean, pull
from gossamer.tree import leaves

P = 7
close = torch.testing.assert_close


def averaged(drift, n, rounds, x):
    """The averaged pseudo-gradients of rounds whose drifts do not depend on the point."""
    return [-sum(drift(i, t, x) for i in range(n)) / n for t in range(rounds)]


def stepped(optimizer_class, start, gradients, **options):
    """The iterates of a torch optimizer fed with these gradients."""
    x = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([x], **options)
    for gradient in gradients:
        x.grad = gradient.clone()
        optimizer.step()
    return x.detach()


def once(worker, round, x):
    """A drift in the first round only: workers that begin alike, part, and then stand still."""
    return random_drift(x.numel())(worker, 0, x) if round == 0 else torch.zeros_like(x)


def spread(xs):
    middle = sum(xs) / len(xs)
    return float(sum(((x - middle) ** 2).sum() for x in xs) ** 0.5)


def test_fedopt_without_first_moment_is_torch_adagrad_on_the_averaged_pseudo_gradient():
    start, drift, tau = random_vectors(1, P)[0], random_drift(P), 1e-2
    rule = fedopt(lr=0.3, optimizer="adagrad", beta1=0.0, tau=tau)
    xs, _ = play(rule, make_topology("complete", 4), [start] * 4, 8, drift)
    options = {"lr": 0.3, "initial_accumulator_value": tau**2, "eps": tau}
    close(xs[0], stepped(torch.optim.Adagrad, start, averaged(drift, 4, 8, start), **options))


def test_fedopt_adam_without_memory_follows_the_sign_of_what_is_larger_than_tau():
    start, drift, tau = random_vectors(1, P)[0], random_drift(P), 1e-3
    xs, _ = play(fedopt(lr=0.1, beta1=0.0, beta2=0.0, tau=tau), make_topology("complete", 4), [start] * 4, 5, drift)
    steps = [d / (d.abs() + tau) for d in averaged(drift, 4, 5, start)]
    close(xs[0], start - 0.1 * sum(steps))
    assert (torch.stack(steps).abs() - 1).abs().max() < 0.2


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_fedopt_moments_are_written_out_and_never_corrected_for_their_bias(optimizer):
    start, drift = random_vectors(1, P)[0], random_drift(P)
    xs, states = play(fedopt(optimizer=optimizer), make_topology("complete", 3), [start] * 3, 6, drift)
    for k in range(P):
        x, m, v = start[k].item(), 0.0, 1e-6
        for d in (g[k].item() for g in averaged(drift, 3, 6, start)):
            m = 0.9 * m + 0.1 * d
            if optimizer == "adam":
                v = 0.99 * v + 0.01 * d * d
            else:
                v += 0.01 * d * d if d * d > v else -0.01 * d * d
            x -= 0.01 * m / (v**0.5 + 1e-3)
        assert (xs[0][k].item(), states[0].v[k].item()) == pytest.approx((x, v), rel=1e-9)


def test_a_restart_of_fedopt_keeps_the_second_moment():
    _, (s, *_) = play(fedopt(), make_topology("complete", 2), [random_vectors(1, P)[0]] * 2, 4, random_drift(P))
    fresh = fedopt().reset(s.anchor, s)
    assert not fresh.m.any() and torch.equal(fresh.v, s.v)


def test_omr_is_its_normalised_momentum_with_restarts_after_every_third_round():
    start, drift, nu, beta = random_vectors(1, P)[0], random_drift(P), 0.9, 0.7
    xs, _ = play(omr(nu, beta, every=3), make_topology("complete", 4), [start] * 4, 8, drift)
    x, m = start, torch.zeros_like(start)
    for t, d in enumerate(averaged(drift, 4, 8, start)):
        new = beta * m + (1 - beta) * d
        x = x - nu * ((1 + beta) * new - beta * m)
        m = torch.zeros_like(new) if (t + 1) % 3 == 0 else new
    close(xs[0], x)


@pytest.mark.parametrize(
    "rule",
    [
        r
        for r in (*(factory() for factory in RULES.values()), diloco(optimizer="sgd"), gasloc(optimizer="sgd"))
        if not r.reset
    ],
    ids=lambda rule: rule.name,
)
def test_what_has_no_momentum_cannot_be_restarted(rule):
    with pytest.raises(ConfigError, match=f"{rule.name}.*no outer momentum"):
        restarted(rule)
    with pytest.raises(ConfigError, match="auto"):
        restarted(gasloc(alpha="auto"))


@pytest.mark.parametrize("wrap", [restarted, weighted])
def test_the_function_that_settles_alpha_is_there_under_the_name_that_the_error_gives(wrap):
    with pytest.raises(ConfigError) as caught:
        wrap(gasloc(alpha="auto"))
    module, _, function = re.findall(r"gossamer[.\w]+", str(caught.value))[0].rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("codec", [topk(k=1, chunk=4), topk2bit(), int4()], ids=lambda codec: codec.name)
def test_what_is_sent_and_what_is_left_add_up_to_the_decayed_rest_and_the_new_message(codec):
    n, rule, start, drift = 3, sparseloco(lr=0.8, decay=0.9), random_vectors(1, P)[0], random_drift(P)
    topology = make_topology("complete", n)
    xs, states = play(rule, topology, [start] * n, 4, drift, codec=codec)
    before, rest = xs[0].clone(), [s.unsent.clone() for s in states]
    xs, states = play(rule, topology, xs, 1, drift, codec=codec, states=states, first=4)
    moved = (before - xs[0]) / 0.8  # the mean of what was sent
    left = sum(s.unsent for s in states) / n
    offered = sum(0.9 * e - drift(i, 4, start) for i, e in enumerate(rest)) / n
    close(moved + left, offered, rtol=1e-4, atol=1e-5)
    assert left.abs().max() > 1e-3


def test_without_decay_error_feedback_sends_everything_in_the_end():
    start, drift, codec = random_vectors(1, P)[0], random_drift(P), topk(k=1, chunk=4)
    alone = make_topology("complete", 2)
    kept, _ = play(error_feedback(diloco(1.0, optimizer="sgd")), alone, [start] * 2, 40, once, codec=codec)
    lost, _ = play(diloco(1.0, optimizer="sgd"), alone, [start] * 2, 40, once, codec=codec)
    whole = start + sum(once(i, 0, start) for i in range(2)) / 2
    close(kept[0], whole)
    assert not torch.allclose(lost[0], whole, atol=1e-2)
    _, states = play(error_feedback(diloco()), alone, [start] * 2, 5, drift)
    assert not any(s.unsent.any() for s in states)


def test_replicas_stay_bitwise_equal_through_a_lossy_codec_with_error_feedback():
    start = random_vectors(1, 300, dtype=torch.float32) * 4
    drift = random_drift(300, dtype=torch.float32)
    for rule in (sparseloco(), error_feedback(diloco(), decay=0.95)):
        xs, _ = play(rule, make_topology("complete", 4), start, 8, drift, codec=topk2bit())
        assert all(torch.equal(xs[0], x) for x in xs) and not torch.equal(xs[0], start[0])


@pytest.mark.parametrize("name", RULES)
def test_error_feedback_through_an_exact_codec_is_the_rule_to_the_last_bit_or_is_refused(name):
    rule = RULES[name]()
    replicas_are_equal = rule.averages and rule.identical and (rule.start is not None or rule.site == "gradients")
    if not replicas_are_equal or rule.delay_rounds or rule.feeds_back:
        with pytest.raises(ConfigError, match=f"{rule.name}.*choco.*anchored_gasloc"):
            error_feedback(rule)
        return
    start, drift = random_vectors(1, P, dtype=torch.float32) * 4, random_drift(P, dtype=torch.float32)
    with_it, _ = play(error_feedback(rule), make_topology("complete", 4), start, 6, drift)
    without, _ = play(rule, make_topology("complete", 4), start, 6, drift)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_the_centre_of_easgd_is_a_moving_mean_that_all_share_and_the_sum_is_conserved():
    n, beta, start, drift = 5, 0.7, random_vectors(1, P)[0], random_drift(P)
    topology = make_topology("complete", n)
    xs, states = play(easgd(beta), topology, [start] * n, 4, drift)
    assert all(torch.equal(s.centre, states[0].centre) for s in states) and spread(xs) > 0.1
    total, middle, centre = sum(xs) + states[0].centre, sum(xs) / n, states[0].centre.clone()
    xs, states = play(easgd(beta), topology, xs, 1, states=states, first=4)
    close(states[0].centre, (1 - beta) * centre + beta * middle)
    close(sum(xs) + states[0].centre, total)


def test_an_elasticity_of_one_puts_the_centre_at_the_mean():
    start = random_vectors(4, P)
    _, states = play(easgd(1.0), make_topology("complete", 4), start, 1)
    close(states[0].centre, sum(start) / 4)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 1000))
def test_sparta_exchanges_one_coordinate_of_every_run_and_leaves_the_others_alone(numel, one_in, round):
    start, topology, rule = random_vectors(4, numel), make_topology("complete", 4), sparta(one_in)
    xs, _ = play(rule, topology, start, 1, first=round)
    middle = sum(start) / 4
    moved = [(xs[0] - start[0])[a : a + one_in].ne(0) for a in range(0, numel, one_in)]
    assert [int(run.sum()) for run in moved] == [1] * -(-numel // one_in)
    where = torch.cat(moved)
    for x, own in zip(xs, start, strict=True):
        assert torch.equal(x[~where], own[~where])
        close(x[where], middle[where])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 1000))
def test_disjoint_slices_average_every_coordinate_once_in_a_cycle(numel, one_in, first):
    rule, start, topology = sparta(one_in, disjoint=True), random_vectors(2, numel), make_topology("complete", 2)
    middle, cycle = sum(start) / 2, min(one_in, numel)
    averaged = torch.zeros(numel, dtype=torch.int64)
    for round in range(first, first + cycle):
        xs, _ = play(rule, topology, start, 1, first=round)
        where = xs[0] != start[0]
        averaged += where
        close(xs[0][where], middle[where])
        sent = [rule.send(x, (), context(0, round, topology.mixing(round), x)) for x in (xs[0], xs[0].to("meta"))]
        assert sent[0].shape == sent[1].shape == (int(where.sum()),)
    assert torch.equal(averaged, torch.ones_like(averaged))
    xs, _ = play(rule, topology, start, cycle, first=first)
    close(xs[0], middle)
    close(xs[1], middle)


def test_sparta_reaches_every_coordinate_and_the_workers_agree():
    start = random_vectors(4, 11)
    xs, _ = play(sparta(4), make_topology("complete", 4), start, 60)
    assert spread(xs) < 1e-12
    close(sum(xs), sum(start))


def ratios_of_pushed(rounds, codec=None, topology=None):
    start = random_vectors(6, P)
    topology = topology or make_topology("random_push", 6, seed=2)
    xs, states = play(sgp(), topology, start, rounds, codec=codec)
    return start, xs, states


def test_pushed_mass_and_weight_are_conserved_and_their_ratio_finds_the_true_mean():
    start, xs, states = ratios_of_pushed(80)
    close(sum(s.mass for s in states), sum(start))
    close(sum(s.weight for s in states), torch.full((1,), 6.0, dtype=torch.float64))
    assert max(float(s.weight) for s in states) - min(float(s.weight) for s in states) > 0.1
    for x in xs:
        close(x, sum(start) / 6)


@pytest.mark.parametrize("codec", [int4(), topk(k=1, chunk=4), randomk(one_in=3)], ids=lambda codec: codec.name)
def test_no_codec_takes_mass_or_weight_away(codec):
    start, _, states = ratios_of_pushed(15, codec)
    close(sum(s.mass for s in states), sum(start))
    close(sum(s.weight for s in states), torch.full((1,), 6.0, dtype=torch.float64))
    assert all(float(s.weight) > 0 for s in states)


def test_the_drift_of_a_pushing_worker_reaches_everyone_whatever_its_weight():
    n, drift, start = 6, random_drift(P), random_vectors(1, P)[0]
    topology = make_topology("random_push", n, seed=2)
    xs, states = play(sgp(), topology, [start] * n, 10, drift)
    close(sum(s.mass for s in states), n * start + sum(drift(i, t, start) for i in range(n) for t in range(10)))
    for x, s in zip(xs, states, strict=True):
        close(x, s.mass / s.weight)


def test_on_a_doubly_stochastic_graph_the_weight_stays_one():
    _, _, states = ratios_of_pushed(9, topology=make_topology("one_peer_exponential", 6))
    assert all(float(s.weight) == 1.0 for s in states)


def test_only_push_rules_are_let_onto_a_push_topology():
    topology = make_topology("random_push", 6)
    for name, factory in RULES.items():
        if factory().needs == "push":
            incompatibilities.check(Combination(rule=factory(), topology=topology))
        else:
            with pytest.raises(PairingError, match=f"{name}.*random_push"):
                incompatibilities.check(Combination(rule=factory(), topology=topology))
    rows = topology._replace(column_stochastic=False)
    with pytest.raises(PairingError, match=r"sgp.*does not sum to one.*random_push"):
        incompatibilities.check(Combination(rule=sgp(), topology=rows))


def test_the_running_sum_of_choco_is_the_pull_of_the_public_copies():
    start, topology = [random_vectors(1, P)[0]] * 6, make_topology("ring", 6)
    _, states = play(choco(0.2), topology, start, 12, random_drift(P), codec=topk(k=1, chunk=4))
    public = dict(enumerate(s.public for s in states))
    for i, row in enumerate(topology.mixing(0).rows):
        close(states[i].drawn, pull(public[i], public, i, row), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("codec", "alpha", "rounds"),
    [(int4(), 0.8, 30), (topk(k=1, chunk=4), 0.25, 100), (CODECS["sign"](), 0.25, 100)],
    ids=["int4", "topk", "sign"],
)
def test_choco_comes_to_the_exact_mean_through_codecs_that_leave_plain_gossip_apart(codec, alpha, rounds):
    start, topology = [random_vectors(1, P)[0] + 10] * 6, make_topology("ring", 6)
    parted, _ = play(gossip(), make_topology("ring", 6)._replace(mixing=alone), start, 1, once)
    ours, _ = play(choco(alpha), topology, start, rounds, once, codec=codec)
    plain, _ = play(gossip(), topology, start, 20, once, codec=codec)
    assert spread(ours) < 1e-3 * spread(parted)
    assert spread(plain) > 10 * spread(ours)
    close(sum(ours) / 6, sum(parted) / 6)


def alone(round, alive=None):
    return make_topology("ring", 6).mixing(round, frozenset())


def test_anchored_gossip_among_all_is_the_one_way_form_of_cocktail():
    """θ_i ← θ_i - q_i + mean q;  c ← c + mean q, with q_i what was decoded of θ_i - c."""
    n, codec, drift, start = 4, int4(), random_drift(P), random_vectors(1, P)[0]
    topology, rule = make_topology("complete", n), anchored_gasloc(1.0, 0.0)
    xs, states = play(rule, topology, [start] * n, 1, drift, codec=codec)
    ends = [start + drift(i, 0, start) for i in range(n)]
    decoded = [codec.decode(codec.encode(end - start, 0), start) for end in ends]  # int4 rounds to nearest: no key
    for x, end, q in zip(xs, ends, decoded, strict=True):
        close(x, end - q + sum(decoded) / n)
    close(states[0].anchor, start + sum(decoded) / n)
    assert all(torch.equal(s.anchor, states[0].anchor) for s in states)


@pytest.mark.parametrize(("graph", "moves"), [("pga", True), ("complete", True), ("random", False), ("star", False)])
def test_the_anchor_is_the_same_everywhere_and_moves_when_all_hear_all(graph, moves):
    """The hub of a star hears everyone too; it must not move its anchor alone."""
    start, drift = random_vectors(1, 40, dtype=torch.float32) * 6, random_drift(40, dtype=torch.float32)
    xs, states = play(anchored_gasloc(), make_topology(graph, 6), start, 12, drift, codec=int4())
    assert all(torch.equal(s.anchor, states[0].anchor) for s in states)
    assert torch.equal(states[0].anchor, start[0]) != moves
    if moves:
        middle = sum(xs) / 6
        assert (states[0].anchor - middle).norm() < (start[0] - middle).norm()


def test_an_anchor_makes_the_error_of_a_codec_that_of_what_changed():
    start, drift = [random_vectors(1, 64)[0] * 50] * 6, random_drift(64)
    reference, _ = play(gasloc(), make_topology("random", 6), start, 8, drift)
    with_anchor, _ = play(anchored_gasloc(), make_topology("random", 6), start, 8, drift, codec=int4())
    without, _ = play(gasloc(), make_topology("random", 6), start, 8, drift, codec=int4())

    def error(xs):
        return float(sum(((x - y) ** 2).sum() for x, y in zip(xs, reference, strict=True)) ** 0.5)

    assert error(with_anchor) < 0.5 * error(without)


@pytest.mark.parametrize("name", RULES)
def test_only_gossip_can_be_anchored(name):
    rule = RULES[name]()
    if rule.combine is pull and rule.elementwise and not rule.delay_rounds:
        assert anchored(rule).name == f"anchored_{name}"
        return
    with pytest.raises(ConfigError, match=f"{rule.name}.*error_feedback"):
        anchored(rule)


def test_gossip_with_periodic_averaging_agrees_after_every_global_round_and_not_between():
    n, drift, topology = 6, random_drift(P), make_topology("pga", 6, every=4, graph="ring")
    xs, states = random_vectors(n, P), [()] * n
    for t in range(12):
        xs, states = play(gossip(), topology, xs, 1, drift, states=states, first=t)
        assert (spread(xs) < 1e-12) == (t % 4 == 3)


def test_a_rule_that_pushes_hears_a_mean_of_some_and_a_rule_for_everyone_a_mean_of_all():
    assert sgp().combine is mean and local_sgd().combine is mean
    _, states = play(sgp(), make_topology("ring", 5), random_vectors(5, P), 3)
    assert [t.shape for t in leaves(states[0])] == [(P,), (1,)]


def test_acco_is_data_parallelism_one_step_late():
    start, drift = [torch.zeros(P)] * 3, random_drift(P, dtype=torch.float32)
    topology = make_topology("complete", 3)
    for t in range(1, 5):
        xs, _ = play(acco(), topology, start, t, drift)
        wanted = play(data_parallel(), topology, start, t - 1, drift)[0] if t > 1 else start
        assert all(torch.equal(a, b) for a, b in zip(xs, wanted, strict=True))
