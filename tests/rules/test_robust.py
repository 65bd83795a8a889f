"""Robust hearing: the mean where it must be, and never far from the honest workers where one of them is wrong."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.codecs import bf16, both_ways, exact
from gossamer.errors import ConfigError, PairingError
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rules import data_parallel, diloco, eager, gossip, local_sgd, make_rule, robust, trusted
from gossamer.rules.contract import Context
from gossamer.testing.drifted_workers import flat_layout as layout
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.tree import leaves

P = 7
BY = ("trimmed", "median", "krum", "geometric_median")
MEAN = diloco(1.0, optimizer="sgd")
close = torch.testing.assert_close


def combined(rule, messages, rounds=1):
    """What a rule hears of these messages: the step that outer SGD with learning rate 1 makes."""
    n, x = len(messages), torch.zeros(messages[0].numel(), dtype=messages[0].dtype)

    def ctx(t):
        return Context(0, n, t, 1, 1 / n, layout(x.numel()), 1, True, tuple(range(1, n)))

    s = rule.init(x, ctx(0))
    for t in range(rounds):
        y, s = rule.recv(x, s, messages[0], tuple(messages[1:]), ctx(t))
        s = s._replace(inner=s.inner._replace(anchor=x)) if hasattr(s, "inner") else s._replace(anchor=x)
    return -y


def lying(n=8, seed=0):
    """Messages that agree but for noise, and one that is turned round and ten times as long."""
    honest = [1.0 + 0.1 * noise for noise in random_vectors(n - 1, P, seed)]
    return honest, [*honest, -10.0 * honest[0]]


@pytest.mark.parametrize("by", BY)
@given(st.integers(1, 9), st.integers(0, 10**6), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_equal_messages_are_combined_unchanged_and_the_order_of_the_workers_does_not_matter(by, n, seed, faulty):
    messages = random_vectors(n, P, seed)
    rule = robust(MEAN, by=by, faulty=faulty)
    close(combined(rule, messages[:1] * n), messages[0])
    close(combined(trusted(MEAN), messages[:1] * n, rounds=3), messages[0])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    if by != "krum" or n > faulty + 3:  # below, two workers are nearest to each other, and the first of them is taken
        close(combined(rule, [messages[i] for i in order]), combined(rule, messages))
    close(combined(trusted(MEAN), [messages[i] for i in order], 3), combined(trusted(MEAN), messages, 3))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_nothing_trimmed_and_everybody_chosen_are_the_mean(n):
    messages = random_vectors(n, P)
    middle = sum(messages) / n
    if n <= 2:
        close(combined(robust(MEAN), messages), middle)
    close(combined(robust(MEAN, by="krum", best=9), messages), middle)
    close(combined(trusted(MEAN), messages), middle)  # in its first round


def test_trimmed_and_median_are_numpys():
    messages = random_vectors(9, P)
    stack = torch.stack(messages)
    close(combined(robust(MEAN, by="median"), messages), stack.median(0).values)
    close(combined(robust(MEAN, faulty=2), messages), stack.sort(0).values[2:7].mean(0))
    close(combined(robust(MEAN, faulty=50), messages), stack.median(0).values)


def test_krum_takes_the_mean_of_the_messages_with_the_least_distance_to_their_neighbours():
    messages = random_vectors(7, P)
    scores = [sum(sorted(float((a - b).square().sum()) for b in messages)[1:5]) for a in messages]  # itself is at 0
    order = sorted(range(7), key=scores.__getitem__)
    for best in (1, 3):
        wanted = sum(messages[i] for i in order[:best]) / best
        close(combined(robust(MEAN, by="krum", faulty=1, best=best), messages), wanted)


def test_the_geometric_median_is_where_the_directions_to_all_messages_cancel():
    messages = random_vectors(6, P)
    y = combined(robust(MEAN, by="geometric_median"), messages)
    pull = sum((one - y) / (one - y).norm() for one in messages)
    assert pull.norm() < 1e-3


@pytest.mark.parametrize("by", BY)
def test_one_worker_with_a_flipped_and_ten_times_longer_message_does_not_flip_the_result(by):
    honest, messages = lying()
    low, high = torch.stack(honest).amin(0), torch.stack(honest).amax(0)
    received = combined(robust(MEAN, by=by), messages)
    if by == "geometric_median":
        assert (received - sum(honest) / 7).norm() < 0.3
    else:
        assert (low <= received).all() and (received <= high).all()
    assert (sum(messages) / 8 < 0).all()  # the mean goes the wrong way


@pytest.mark.parametrize("scale", [1e6, 1e18, 3e38])
@pytest.mark.parametrize("by", BY)
def test_no_length_of_three_wrong_messages_moves_the_result_far(by, scale):
    honest = [0.01 * one.float() for one in random_vectors(5, P)]
    spread = max(float(one.norm()) for one in honest)
    messages = [torch.full((P,), scale), *honest, torch.full((P,), scale), torch.full((P,), scale)]
    result = combined(robust(MEAN, by=by, faulty=3), messages)
    assert float(result.norm()) < 2 * spread


def test_trust_keeps_the_mean_norm_and_turns_from_a_liar_one_round_late():
    honest, messages = lying()
    norms = [float(one.norm()) for one in messages]
    first, second, later = (combined(trusted(MEAN), messages, t) for t in (1, 2, 40))
    close(first, sum(messages) / 8)
    for received in (second, later):
        assert float(received.norm()) == pytest.approx(sum(norms) / 8)
    assert float(torch.dot(first, honest[0])) < 0 < float(torch.dot(later, honest[0]))


def test_scores_of_trust_and_the_direction_that_they_weigh_follow_the_equations():
    n, keep, temperature, rule = 4, 0.7, 0.3, trusted(MEAN, keep=0.7, temperature=0.3)
    x, last, scores = torch.zeros(P, dtype=torch.float64), None, torch.zeros(n, dtype=torch.float64)
    ctx = Context(0, n, 0, 1, 1 / n, layout(P), 1, True, (1, 2, 3))
    s = rule.init(x, ctx)
    for t in range(4):
        messages = torch.stack(random_vectors(n, P, seed=t))
        lengths = messages.norm(dim=1)
        if last is None:
            last = messages.mean(0)
        else:
            scores = keep * scores + (1 - keep) * torch.cosine_similarity(messages, last[None], dim=1)
            u = torch.softmax(scores / temperature, 0) @ (messages / lengths[:, None])
            last = lengths.mean() * u / u.norm()
        _, s = rule.recv(x, s, messages[0], tuple(messages[1:]), ctx._replace(round=t))
        close((s.scores, s.last), (scores, last))


def test_trust_goes_to_workers_that_agree_with_earlier_results():
    """All are honest in the first round; then one turns round, and loses its weight."""
    honest, messages = lying()
    n, x = 8, torch.zeros(P, dtype=torch.float64)
    rule = trusted(MEAN)
    ctx = [Context(0, n, t, 1, 1 / n, layout(P), 1, True, tuple(range(1, n))) for t in range(12)]
    s = rule.init(x, ctx[0])
    for t in range(12):
        sent = [*honest, honest[0]] if t == 0 else messages
        _, s = rule.recv(x, s, sent[0], tuple(sent[1:]), ctx[t])
    assert s.scores[-1] < -0.5 < 0.5 < s.scores[:-1].min()
    assert float(torch.nn.functional.cosine_similarity(s.last, sum(honest), 0)) > 0.99


@pytest.mark.parametrize(
    "wrapped", [*(robust(diloco(), by=by) for by in BY), trusted(diloco())], ids=lambda r: r.options
)
def test_a_run_with_a_liar_stays_near_the_run_without(wrapped):
    """Through the real exchange: one worker of eight moves against the others, ten times as far, from the second round on."""
    drift, start = random_drift(P), [random_vectors(1, P)[0]] * 8
    common = random_vectors(1, P, 3)[0]

    def honest(worker, step, x):
        return common + 0.1 * drift(worker, step, x)

    def lies(worker, step, x):
        return honest(worker, step, x) * (-10.0 if worker == 5 and step > 0 else 1.0)

    topology = make_topology("complete", 8)
    wanted, _ = play(diloco(), topology, start, 4, honest)
    (hurt, *_), _ = play(diloco(), topology, start, 4, lies)
    xs, _ = play(wrapped, topology, start, 4, lies)
    assert all(torch.equal(xs[0], x) for x in xs)
    right, way, wrong = (x - start[0] for x in (wanted[0], xs[0], hurt))
    assert float(torch.nn.functional.cosine_similarity(right, way, 0)) > 0.9
    assert float((wrong - right).norm()) > 0.5 * float(right.norm())
    if wrapped.name.startswith("robust"):  # the length of the other is that of the mean length
        assert float((way - right).norm()) < 0.2 * float(right.norm())


def test_robust_rules_send_whole_messages_and_are_refused_where_others_would_sum():
    complete = make_topology("complete", 4)
    for rule in (robust(diloco()), trusted(diloco())):
        incompatibilities.check(Combination(rule=rule, topology=complete, codec=bf16()))
        with pytest.raises(PairingError, match="takes no such mean"):
            incompatibilities.check(Combination(rule=rule, topology=complete, codec=both_ways(bf16(), bf16())))
        with pytest.raises(PairingError, match="takes no mean"):
            incompatibilities.check(Combination(rule=rule, topology=complete, codec=exact(), reduction="all_reduce"))
        with pytest.raises(PairingError, match="every worker to receive from all"):
            incompatibilities.check(Combination(rule=rule, topology=make_topology("ring", 4)))
    for wrong, wrap in itertools.product((eager(), gossip(), local_sgd(), robust(diloco())), (robust, trusted)):
        with pytest.raises(ConfigError, match=f"averages the pseudo-gradients.*'{wrong.name}'"):
            wrap(wrong)


def test_gradients_may_be_combined_robustly_and_wrappers_are_named_in_their_order():
    assert robust(data_parallel()).site == "gradients"
    rule = make_rule("diloco", error_feedback={}, robust={"by": "median"})
    assert rule.name == "robust_error_feedback_diloco" and rule.feeds_back


def test_the_scores_of_trust_are_outer_state_and_equal_on_all_workers():
    start, drift = [random_vectors(1, P)[0]] * 4, random_drift(P)
    _, states = play(trusted(diloco()), make_topology("complete", 4), start, 3, drift)
    assert all(torch.equal(a, b) for s in states[1:] for a, b in zip(leaves(states[0]), leaves(s), strict=True))
    assert states[0].scores.abs().min() > 0
