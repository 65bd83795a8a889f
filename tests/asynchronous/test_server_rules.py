"""The specification of server and pair rules: every row of the tables, and the identities of each method."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.asynchronous import (
    PAIRS,
    SERVERS,
    PushInfo,
    a2cid2,
    acceleration,
    ad_psgd,
    cgad,
    conditions,
    dadao,
    decoupled_diloco,
    delayed_nesterov,
    dylu_steps,
    heloco,
    meeting_rates,
)
from gossamer.asynchronous.cgad import attenuation
from gossamer.asynchronous.decoupled_diloco import radial_mean, slack_s, token_weight, weighted_mean
from gossamer.errors import ConfigError
from gossamer.layout import Layout, Leaf, arrange
from gossamer.rules import diloco
from gossamer.settings.options import options_of
from gossamer.testing.drifted_workers import random_vectors
from gossamer.topologies import ring
from gossamer.tree import leaves, map_leaves

P = 12
LAYOUT = Layout((Leaf("embed", (2, 2), 0, 4), Leaf("a", (5,), 4, 9), Leaf("b", (3,), 9, 12)), P)

SERVER_ROWS = {
    **{name: factory() for name, factory in SERVERS.items()},
    "delayed_nesterov-1": delayed_nesterov(delay=1),
    "delayed_nesterov-spread": delayed_nesterov(spread=0.25),
    "decoupled_diloco-average": decoupled_diloco(merging="average"),
}
PAIR_ROWS = {"a2cid2": a2cid2(0.3, 0.9), "ad_psgd": ad_psgd(), "dadao": dadao(1.0, 20.0, 2.0)}
every_server = pytest.mark.parametrize("rule", SERVER_ROWS.values(), ids=SERVER_ROWS.keys())
every_pair = pytest.mark.parametrize("rule", PAIR_ROWS.values(), ids=PAIR_ROWS.keys())


def arrival(age=0, worker=0, tokens=100, local_steps=10, layout=LAYOUT):
    return PushInfo(worker, age, tokens, local_steps, layout)


def absorbed(rule, start, messages, ages=(0,) * 99):
    """The server's model after each of the messages."""
    s, models = rule.init(start), []
    for message, age in zip(messages, ages, strict=False):
        s = rule.absorb(s, message, arrival(age))
        models.append(s.x)
    return models


def torch_steps(optimizer, start, gradients, **options):
    """The iterates of an optimizer of torch fed with pseudo-gradients."""
    x = torch.nn.Parameter(start.clone())
    stepper, iterates = optimizer([x], **options), []
    for gradient in gradients:
        x.grad = gradient.clone()
        stepper.step()
        iterates.append(x.detach().clone())
    return iterates


def close(got, expected, tolerance=1e-12):
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(got, expected, strict=True))


# Every server


@every_server
def test_a_server_at_rest_stays_where_it_is_to_the_last_bit(rule):
    x = random_vectors(1, P, dtype=torch.float32)[0]
    models = absorbed(rule, x, [torch.zeros(P)] * 9, ages=range(9))
    assert all(torch.equal(model, x) for model in models)


@every_server
def test_a_server_greets_with_its_model_before_it_has_received_anything(rule):
    x = random_vectors(1, P)[0]
    assert torch.equal(rule.greet(rule.init(x)), x)


@every_server
def test_a_server_moves_towards_what_its_workers_have_learned(rule):
    x, message = random_vectors(2, P)
    (model,) = absorbed(rule, x, [message])
    assert float((x - model) @ message) > 0


@every_server
def test_a_server_never_writes_into_its_arguments(rule):
    x, first, second = random_vectors(3, P)
    s = rule.absorb(rule.init(x), first, arrival())
    versions = [t._version for t in (x, second, *leaves(s))]
    copies = [t.clone() for t in (x, second, *leaves(s))]
    rule.greet(s)
    rule.absorb(s, second, arrival(age=3))
    if rule.window is not None:
        rule.window.merge([second, first], [arrival(), arrival(worker=1)])
    assert versions == [t._version for t in (x, second, *leaves(s))]
    assert all(torch.equal(a, b) for a, b in zip(copies, (x, second, *leaves(s)), strict=True))


@every_server
def test_a_server_owns_its_state(rule):
    x = random_vectors(1, P)[0]
    s = rule.init(x)
    before = s.x.clone()
    x.zero_()
    assert torch.equal(s.x, before)
    assert sum(leaf.numel() == P for leaf in leaves(s)) == rule.state_copies


@every_server
def test_a_server_keeps_dtype(rule):
    x, message = random_vectors(2, P, dtype=torch.float32)
    s = rule.absorb(rule.init(x), message, arrival())
    assert s.x.dtype == rule.greet(s).dtype == torch.float32


@pytest.mark.parametrize(
    "rule", [r for r in SERVER_ROWS.values() if r.elementwise], ids=[n for n, r in SERVER_ROWS.items() if r.elementwise]
)
def test_halves_may_be_absorbed_one_by_one_if_elementwise(rule):
    start, *messages = random_vectors(6, P)
    whole = absorbed(rule, start, messages, ages=range(5))[-1]
    halves = [
        absorbed(rule, start[part], [m[part] for m in messages], ages=range(5))[-1] for part in (slice(5), slice(5, P))
    ]
    assert torch.equal(whole, torch.cat(halves))


@pytest.mark.parametrize("factory", [*SERVERS.values(), *PAIRS.values()], ids=[*SERVERS, *PAIRS])
def test_the_options_of_a_rule_are_the_arguments_of_its_factory(factory):
    rule = {**SERVER_ROWS, **PAIR_ROWS}[factory.__name__]
    assert list(rule.options) == [option.name for option in options_of(factory)]
    assert factory(**rule.options).options == rule.options


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (delayed_nesterov, {"delay": 0}),
        (delayed_nesterov, {"delay": 2.5}),
        (delayed_nesterov, {"delay": 4, "spread": 0.3}),
        (cgad, {"cutoff": 0.0}),
        (heloco, {"c_ok": 1.5}),
        (heloco, {"beta_max": -0.1}),
        (decoupled_diloco, {"quorum": 0}),
        (decoupled_diloco, {"merging": "median"}),
        (decoupled_diloco, {"averaged": "embed"}),
        (a2cid2, {"eta": -1.0}),
        (dadao, {"strong_convexity": 2.0, "smoothness": 1.0, "chi1": 1.0}),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(factory, options):
    with pytest.raises(ConfigError, match=f"'{factory.__name__}' got .*(must be|choose|give)"):
        factory(**options)


# Delayed Nesterov


def test_delayed_nesterov_with_a_delay_of_one_is_nesterov_of_torch():
    start, *messages = random_vectors(9, P)
    expected = torch_steps(torch.optim.SGD, start, messages, lr=0.3, momentum=0.9, nesterov=True)
    assert close(absorbed(delayed_nesterov(lr=0.3, delay=1), start, messages), expected)


@pytest.mark.parametrize("delay", [2, 3, 4])
def test_delayed_nesterov_is_at_every_nth_arrival_nesterov_on_window_means(delay):
    start, *messages = random_vectors(1 + 5 * delay, P)
    means = [torch.stack(messages[k : k + delay]).mean(0) for k in range(0, len(messages), delay)]
    expected = torch_steps(torch.optim.SGD, start, means, lr=0.3, momentum=0.9, nesterov=True)
    assert close(absorbed(delayed_nesterov(lr=0.3, delay=delay), start, messages)[delay - 1 :: delay], expected)


def test_delayed_nesterov_without_momentum_is_sgd_with_an_nth_of_the_learning_rate():
    start, *messages = random_vectors(10, P)
    expected = torch_steps(torch.optim.SGD, start, messages, lr=0.3 / 4)
    assert close(absorbed(delayed_nesterov(lr=0.3, momentum=0.0, delay=4), start, messages), expected)


def test_delayed_nesterov_spreads_the_same_momentum_over_a_window_when_it_does_not_change():
    start, m, zero = *random_vectors(2, P), torch.zeros(P, dtype=torch.float64)

    def after_a_window(spread):
        rule = delayed_nesterov(delay=4, spread=spread, momentum=0.9)
        s = rule.init(start)._replace(m=m, acc=4 * (m - 0.9 * m))  # renewing this momentum gives it again
        for _ in range(4):
            s = rule.absorb(s, zero, arrival())
        return s.x

    assert close([after_a_window(0.25), after_a_window(0.1)], [after_a_window(0.0)] * 2)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), st.integers(1, 100))
@settings(max_examples=50, deadline=None)
def test_dylu_lets_no_worker_take_longer_than_the_fastest_unless_one_step_does(step_s, local_steps):
    steps = dylu_steps(step_s, local_steps)
    round_s = local_steps * min(step_s)
    assert steps[step_s.index(min(step_s))] == local_steps
    assert all(h == 1 or h * s <= round_s * (1 + 1e-6) for h, s in zip(steps, step_s, strict=True))
    assert all((h + 1) * s > round_s * (1 - 1e-6) for h, s in zip(steps, step_s, strict=True))


# CGAD


def test_cgad_at_age_zero_is_adam_of_torch():
    start, *messages = random_vectors(12, P)
    expected = torch_steps(torch.optim.Adam, start, messages, lr=0.01, betas=(0.9, 0.99))
    assert close(absorbed(cgad(lr=0.01), start, messages), expected)


def test_cgad_without_decay_and_cutoff_is_adam_at_any_age():
    start, *messages = random_vectors(12, P)
    rule = cgad(decay=0.0, cutoff=math.inf)
    ages = absorbed(rule, start, messages, ages=range(0, 1100, 100))
    assert all(torch.equal(a, b) for a, b in zip(ages, absorbed(rule, start, messages), strict=True))


def test_cgad_takes_an_old_message_for_a_smaller_one_in_both_moments():
    start, message = random_vectors(2, P)
    rule = cgad()
    old = rule.absorb(rule.init(start), message, arrival(age=5))
    small = rule.absorb(rule.init(start), attenuation(5) * message, arrival())
    assert all(torch.equal(a, b) for a, b in zip(leaves(old), leaves(small), strict=True))


def test_cgad_skips_what_is_too_old_to_count_and_leaves_the_moments_alone():
    start, first, second = random_vectors(3, P)
    for rule in (cgad(cutoff=16), cgad(decay=2.0, cutoff=math.inf)):  # σ(16) is 0, and exp(-32)
        s = rule.absorb(rule.init(start), first, arrival())
        assert all(
            torch.equal(a, b) for a, b in zip(leaves(s), leaves(rule.absorb(s, second, arrival(age=16))), strict=True)
        )
        assert not torch.equal(s.x, rule.absorb(s, 1e-9 * second, arrival(age=1)).x)


# HeLoCo


def block_layout(size):
    return Layout((Leaf("w", (size,), 0, size),), size)


def taken_in(rule, d, m):
    """What HeLoCo makes of the message d when its momentum is m, read off the momentum after it."""
    s = rule.init(torch.zeros_like(d))._replace(m=m)
    mu, after = rule.options["momentum"], rule.absorb(s, d, arrival(layout=block_layout(d.numel())))
    return (after.m - mu * m) / (1 - mu)


def at_cosine(c, size=6, scale=1.0):
    """A message and a momentum with this cosine between them."""
    m, other = random_vectors(2, size)
    v = m / m.norm()
    across = other - (other @ v) * v
    return scale * (c * v + math.sqrt(1 - c * c) * across / across.norm()), m


def test_heloco_that_passes_everything_is_mla():
    start, *messages = random_vectors(12, P)
    rule = heloco(c_ok=-1.0, rho=0.5, lr=0.3, momentum=0.8)
    x, m = start, torch.zeros_like(start)
    expected = []
    for message in messages:
        m = 0.8 * m + 0.2 * (0.5 * message)
        x = x - 0.3 * (0.5 * message + 0.8 * m)
        expected.append(x)
    assert close(absorbed(rule, start, messages), expected)


def test_heloco_that_passes_everything_passes_the_exact_opposite_of_its_momentum_too():
    for seed in range(20):
        (m,) = random_vectors(1, 7, seed=seed, dtype=torch.float32)
        assert close([taken_in(heloco(c_ok=-1.0), -3 * m, m)], [-3 * m], 1e-5)


@pytest.mark.parametrize("c", [0.2000001, 0.5, 0.99])
def test_heloco_passes_what_agrees_with_its_momentum(c):
    d, m = at_cosine(c)
    assert close([taken_in(heloco(), d, m)], [d])


@pytest.mark.parametrize("c", [0.0, 0.1, 0.19])
@pytest.mark.parametrize("scale", [0.1, 1.0, 50.0])
@pytest.mark.parametrize("turn", [0.6, 1.0, 1e9])
def test_heloco_turns_what_hardly_agrees_towards_its_momentum_and_keeps_its_length(c, scale, turn):
    d, m = at_cosine(c, scale=scale)
    norm_d, norm_m = float(d.norm()), float(m.norm())
    share = min(turn * (1 - c) * norm_d / (norm_d + 3 * norm_m + 1e-8), 1.0)
    way = (1 - share) * d / norm_d + share * m / norm_m
    assert close([taken_in(heloco(turn=turn), d, m)], [norm_d * way / way.norm()], 1e-9)


@pytest.mark.parametrize("c", [-0.1, -0.7, -1.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 50.0])
def test_heloco_shrinks_the_part_that_conflicts_with_its_momentum_and_leaves_the_rest(c, scale):
    d, m = at_cosine(c, scale=scale)
    got, v = taken_in(heloco(), d, m), m / m.norm()
    norm_d, norm_m = float(d.norm()), float(m.norm())
    beta = min(0.5 * -c * norm_d / (norm_d + 3 * norm_m + 1e-8), 0.5)
    assert float(got @ v) == pytest.approx((1 - beta) * float(d @ v), rel=1e-9)
    assert close([got - (got @ v) * v], [d - (d @ v) * v], 1e-9)


def test_heloco_shrinks_by_no_more_than_beta_max():
    d, m = at_cosine(-1.0, scale=1e6)
    assert close([taken_in(heloco(conflict=100.0, beta_max=0.25), d, m)], [0.75 * d], 1e-9)


def test_heloco_without_momentum_yet_corrects_nothing():
    d = random_vectors(1, 5)[0]
    assert close([taken_in(heloco(), d, torch.zeros_like(d))], [d])


def test_heloco_corrects_each_tensor_on_its_own():
    d1, m1 = at_cosine(-0.8, size=4)
    d2, m2 = at_cosine(0.9, size=8)
    rule = heloco()
    layout = Layout((Leaf("a", (4,), 0, 4), Leaf("b", (8,), 4, 12)), 12)
    s = rule.init(torch.zeros(12, dtype=torch.float64))._replace(m=torch.cat([m1, m2]))
    got = rule.absorb(s, torch.cat([d1, d2]), arrival(layout=layout)).m
    assert close([(got - 0.9 * s.m) / (1 - 0.9)], [torch.cat([taken_in(rule, d1, m1), d2])], 1e-10)


def test_heloco_greets_ahead_where_its_momentum_points():
    start, message = random_vectors(2, P)
    rule = heloco(lr=0.5, momentum=0.8)
    s = rule.absorb(rule.init(start), message, arrival())
    assert torch.equal(rule.greet(s), s.x - 0.5 * 0.8 * s.m)
    assert not torch.equal(rule.greet(s), s.x)


# Decoupled DiLoCo


def test_a_learner_with_100_tokens_in_10_steps_weighs_1000():
    assert token_weight(100, 10) == 1000


def test_radial_mean_of_one_learner_is_what_it_sent():
    v = random_vectors(1, P)[0]
    assert close([radial_mean([v], [3.0])], [v])


def test_radial_mean_of_equal_vectors_is_their_mean():
    v = random_vectors(1, P)[0]
    assert close([radial_mean([v] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])], [v])


def test_radial_mean_of_orthogonal_vectors_of_one_length_keeps_that_length():
    vectors = list(4.0 * torch.eye(9, dtype=torch.float64))
    assert float(radial_mean(vectors, [1.0] * 9).norm()) == pytest.approx(4.0)
    assert float(weighted_mean(vectors, [1.0] * 9).norm()) == pytest.approx(4.0 / 3)


def test_radial_mean_where_directions_cancel_is_the_plain_mean():
    v = random_vectors(1, P)[0]
    for vectors in ([3 * v, -v], [v, torch.zeros_like(v), -v], [torch.zeros_like(v)] * 2):
        expected = weighted_mean(vectors, [1.0] * len(vectors))
        assert torch.equal(radial_mean(vectors, [1.0] * len(vectors)), expected)


@given(st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_radial_mean_has_the_mean_length_and_ignores_the_scale_of_weights(n, seed):
    vectors = random_vectors(n, P, seed=seed)
    weights = [1.0 + k for k in range(n)]
    got = radial_mean(vectors, weights)
    radius = sum(w * float(v.norm()) for w, v in zip(weights, vectors, strict=True)) / sum(weights)
    assert float(got.norm()) == pytest.approx(radius)
    assert close([radial_mean(vectors, [7 * w for w in weights])], [got], 1e-9)


def test_decoupled_diloco_merges_tensors_on_their_own_and_averages_embeddings():
    messages = random_vectors(3, P)
    arrivals = [arrival(worker=i, tokens=100 * (i + 1)) for i in range(3)]
    weights = [token_weight(100 * (i + 1), 10) for i in range(3)]
    got = decoupled_diloco().window.merge(messages, arrivals)
    assert torch.equal(got[:4], weighted_mean([m[:4] for m in messages], weights))
    for a, b in ((4, 9), (9, 12)):
        assert torch.equal(got[a:b], radial_mean([m[a:b] for m in messages], weights))


def test_decoupled_diloco_with_equal_learners_and_plain_averaging_is_diloco_to_the_last_bit():
    server, worker = decoupled_diloco(lr=0.7, momentum=0.9, merging="average"), diloco(lr=0.7, momentum=0.9)
    x, *drifts = random_vectors(1 + 4 * 6, P, dtype=torch.float32)
    s, state = server.init(x), worker.init(x, None)
    for t in range(6):
        ends = [x + drift for drift in drifts[4 * t : 4 * t + 4]]
        messages = [server.greet(s) - end for end in ends]
        arrivals = [arrival(worker=i) for i in range(4)]
        s = server.absorb(s, server.window.merge(messages, arrivals), arrivals[0])
        sent = [worker.send(end, state, None) for end in ends]
        row = tuple((j, 0.25) for j in range(4))
        x, state = worker.recv(ends[0], state, sent[0], worker.combine(sent[0], dict(enumerate(sent)), 0, row), None)
        assert torch.equal(x, s.x)


def test_decoupled_diloco_with_one_learner_and_a_plain_step_ends_where_the_learner_did():
    start, end = random_vectors(2, P)
    for merging in ("average", "radial"):
        rule = decoupled_diloco(lr=1.0, momentum=0.0, merging=merging)
        s = rule.init(start)
        assert close([rule.absorb(s, rule.window.merge([start - end], [arrival()]), arrival()).x], [end])


def test_the_grace_period_is_a_share_of_the_slack_and_never_negative():
    assert slack_s(4, 1.0, 0.5, 1.5, share=0.5) == 1.0
    assert slack_s(1, 1.0, 5.0, 5.0) == 0.0


# Fragments


def layout_of_sizes(sizes):
    edges = [0, *itertools.accumulate(sizes)]
    return Layout(tuple(Leaf(str(k), (b - a,), a, b) for k, (a, b) in enumerate(itertools.pairwise(edges))), edges[-1])


def best_peak(sizes, parts):
    """The smallest possible largest fragment, by trying all packings."""
    choices = itertools.product(range(parts), repeat=len(sizes))
    return min(
        max(sum(s for s, b in zip(sizes, choice, strict=True) if b == k) for k in range(parts)) for choice in choices
    )


def fragment_sizes(sizes, parts):
    return [b - a for a, b in arrange(layout_of_sizes(sizes), parts, "packed")[1]]


@given(st.lists(st.integers(1, 40), min_size=3, max_size=7), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_the_largest_fragment_is_at_most_four_thirds_of_the_best_packing(sizes, parts):
    assert max(fragment_sizes(sizes, parts)) <= 4 / 3 * best_peak(sizes, parts)


def test_the_greedy_packing_can_be_worse_than_the_best():
    sizes = [3, 3, 2, 2, 2]
    assert max(fragment_sizes(sizes, 2)) == 7
    assert best_peak(sizes, 2) == 6


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
@settings(max_examples=40, deadline=None)
def test_packed_fragments_are_slices_that_hold_every_tensor_once_and_in_its_order(sizes, data):
    layout = layout_of_sizes(sizes)
    packed, spans = arrange(layout, data.draw(st.integers(1, len(sizes))), "packed")
    assert sorted(leaf.name for leaf in packed.leaves) == sorted(leaf.name for leaf in layout.leaves)
    assert packed.numel == layout.numel == spans[-1][1] and spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    for a, b in spans:
        names = [int(leaf.name) for leaf in packed.slice(a, b).leaves]
        assert names == sorted(names)
        assert [sizes[name] for name in names] == [leaf.stop - leaf.start for leaf in packed.slice(a, b).leaves]


@pytest.mark.parametrize("parts", [0, 4])
def test_more_fragments_than_tensors_are_refused(parts):
    with pytest.raises(ConfigError, match=rf"fragments is {parts} .* 1 to 3"):
        arrange(LAYOUT, parts, "packed")


# Every pair rule


@every_pair
def test_a_pair_rule_never_writes_into_its_arguments(rule):
    x, drift, received = random_vectors(3, P)
    s = rule.init(x)
    sent = rule.tell(x, s)
    inputs = (x, drift, received, *leaves(s))
    copies = [t.clone() for t in inputs]
    rule.advance(x, s, 0.5)
    rule.learn(x, s, drift)
    rule.meet(x, s, sent, received)
    assert all(torch.equal(a, b) for a, b in zip(copies, inputs, strict=True))
    assert sum(leaf.numel() for leaf in leaves(s)) == rule.state_copies * P


@every_pair
def test_time_that_passes_in_two_parts_is_time_that_passes(rule):
    x, drift = random_vectors(2, P)
    x, s = rule.learn(x, rule.init(x), drift)
    x, s = rule.meet(x, s, rule.tell(x, s), rule.tell(x, s) + drift)
    whole = rule.advance(x, s, 0.8)
    parts = rule.advance(*rule.advance(x, s, 0.3), 0.5)
    assert close(leaves(parts), leaves(whole))


@every_pair
def test_a_meeting_of_two_that_tell_the_same_changes_nothing(rule):
    x, drift = random_vectors(2, P)
    x, s = rule.learn(x, rule.init(x), drift)
    sent = rule.tell(x, s)
    assert all(torch.equal(a, b) for a, b in zip(leaves((x, s)), leaves(rule.meet(x, s, sent, sent)), strict=True))


@every_pair
def test_the_two_ends_of_a_meeting_move_by_opposite_amounts(rule):
    starts = random_vectors(2, P)
    (x1, s1), (x2, s2) = [rule.advance(*rule.learn(x, rule.init(x), x.flip(0)), 0.5) for x in starts]
    t1, t2 = rule.tell(x1, s1), rule.tell(x2, s2)
    before = map_leaves(torch.add, (x1, s1), (x2, s2))
    after = map_leaves(torch.add, rule.meet(x1, s1, t1, t2), rule.meet(x2, s2, t2, t1))
    assert close(leaves(after), leaves(before), 1e-10)
    assert not close(leaves(rule.meet(x1, s1, t1, t2)), leaves((x1, s1)))


def test_two_that_meet_in_ad_psgd_end_at_their_mean():
    rule, (a, b) = ad_psgd(), random_vectors(2, P)
    assert close([rule.meet(a, (), a, b)[0], rule.meet(b, (), b, a)[0]], [(a + b) / 2] * 2)


# A²CiD²


def test_a2cid2_without_mixing_is_ad_psgd_to_the_last_bit():
    one, other = a2cid2(0.0), ad_psgd()
    x, drift, received = random_vectors(3, P, dtype=torch.float32)
    mine, theirs = (x, one.init(x)), (x, other.init(x))
    for dt in (0.3, 2.0):
        mine, theirs = one.advance(*mine, dt), other.advance(*theirs, dt)
        mine, theirs = one.learn(*mine, drift), other.learn(*theirs, drift)
        sent = one.tell(*mine)
        mine, theirs = one.meet(*mine, sent, received), other.meet(*theirs, sent, received)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1].copy, theirs[0])


@given(st.floats(0, 3), st.floats(0, 10), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_the_mixing_of_a2cid2_is_a_matrix_exponential(eta, dt, seed):
    x, copy = random_vectors(2, P, seed=seed)
    rule = a2cid2(eta)
    got_x, got_s = rule.advance(x, rule.init(copy), dt)
    flow = torch.linalg.matrix_exp(dt * torch.tensor([[-eta, eta], [eta, -eta]], dtype=torch.float64))
    expected = flow @ torch.stack([x, copy])
    assert close([got_x, got_s.copy], list(expected), 1e-9)


def test_the_mixing_of_a2cid2_leaves_equal_copies_alone_to_the_last_bit():
    x = random_vectors(1, P, dtype=torch.float32)[0]
    rule = a2cid2(0.7)
    got, s = rule.advance(x, rule.init(x), 1.3)
    assert torch.equal(got, x) and torch.equal(s.copy, x)


def test_the_conditions_of_a_ring_have_their_closed_form():
    for n in (4, 9, 32):
        rates = meeting_rates(ring(n).mixing(0), 1.0)
        chi1, chi2 = conditions(n, rates)
        assert chi1 == pytest.approx(1 / (1 - math.cos(2 * math.pi / n)))  # each edge at rate 1/2
        assert chi2 == pytest.approx((n - 1) / n)  # a resistance of 2 in parallel to n - 1 of them, halved
        assert acceleration(chi1, chi2) == (1 / (2 * math.sqrt(chi1 * chi2)), 0.5 * math.sqrt(chi1 / chi2))


def test_conditions_of_a_graph_in_two_parts_are_refused():
    with pytest.raises(ConfigError, match="not connected"):
        conditions(4, {(0, 1): 1.0, (2, 3): 1.0})


# DADAO


def test_a_gradient_a_meeting_and_a_moment_of_dadao_are_its_equations():
    """With μ = 8 and L = 64, so that ν = 4 and √(ν/L) = 1/4, and χ₁ = 3. At the optimum below all of them vanish."""
    x, x_, y, y_, z, z_, drift, sent, received = random_vectors(9, P)
    rule = dadao(8.0, 64.0, 3.0)
    s = rule.init(x)._replace(x_=x_, y=y, y_=y_, z=z, z_=z_)
    r, p = -drift - 4 * x - y_, sent - received
    assert close(leaves(rule.learn(x, s, drift)), [x - r / 256, x_ - r / 64, y, y_ + 17 / 16 * r, z, z_])
    assert close(leaves(rule.meet(x, s, sent, received)), [x, x_, y, y_, z - p / 2, z_ - 24 * p])
    assert torch.equal(rule.tell(x, s), y + z)
    ends = (leaves(rule.advance(x, s, dt)) for dt in (1e-4, -1e-4))
    pulls = (x_ - x) / 32, (x - x_) / 32, (y_ - y) / 16, -2 * (4 * x_ + y + z), (z_ - z) / 16, (z - z_) / 32
    assert close([(after - before) / 2e-4 for after, before in zip(*ends, strict=True)], pulls, 1e-6)


def test_the_optimum_is_a_fixed_point_of_dadao():
    n, mu, big_l = 5, 1.0, 20.0
    curvature = torch.linspace(mu, big_l, n, dtype=torch.float64)[:, None]
    targets = torch.stack(random_vectors(n, 3))
    best = (curvature * targets).sum(0) / curvature.sum(0)
    gradients = curvature * (best - targets)
    rule, nu = dadao(mu, big_l, 1.0), mu / 2
    states = []
    for gradient in gradients:
        y, z = gradient - nu * best, -gradient
        states.append((best, rule.init(best)._replace(y=y, y_=y, z=z, z_=z)))
    for i, state in enumerate(states):
        other = states[(i + 1) % n]
        moved = rule.advance(*state, 0.7)
        moved = rule.learn(*moved, -gradients[i])
        moved = rule.meet(*moved, rule.tell(*moved), rule.tell(*other))
        assert close(leaves(moved), leaves(state), 1e-11)
