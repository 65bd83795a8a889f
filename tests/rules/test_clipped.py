"""Clipping: nothing happens to messages that are as far away as usual, and little by those that are not."""

import math
import statistics
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.errors import ConfigError
from gossamer.rules import clipped, diloco, eager, gasloc, gossip, local_sgd, make_rule, restarted
from gossamer.rules.contract import Context
from gossamer.testing.drifted_workers import flat_layout as layout
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.topologies.mixing import Row

P, N = 7, 4
close = torch.testing.assert_close
PEERS: Row = tuple((j, 0.25) for j in range(N))


def step(rule, x, s, own, others, t):
    """A round of worker 0 that hears three peers."""
    ctx = Context(0, N, t, 1, 0.25, layout(P), 1, False, (1, 2, 3))
    return rule.recv(x, s, own, rule.combine(own, dict(enumerate(others, 1)), 0, PEERS), ctx)


def rounds(rule, bad=None, last=12, seed=0):
    """Where worker 0 ends that drifts by one each round while its peers are near it; `bad(x, t)` is what worker 3 sends."""
    x, noise = torch.zeros(P, dtype=torch.float64), iter(random_vectors(3 * last, P, seed))
    s = rule.init(x, Context(0, N, 0, 1, 0.25, layout(P), 1, False, (1, 2, 3)))
    for t in range(last):
        x = x + 1.0
        near = [x + 0.3 * next(noise) / P**0.5 for _ in range(3)]
        if bad is not None and t >= 4:
            near[2] = bad(x, t)
        x, s = step(rule, x, s, rule.send(x, s, Context(0, N, t, 1, 0.25, layout(P), 1)), near, t)
    return x, s


@pytest.mark.parametrize("rule", [gossip(), gasloc(), gasloc(lr=1.0), restarted(gasloc()), diloco()], ids=repr)
@pytest.mark.parametrize("topology", ["random", "complete"])
def test_workers_whose_messages_are_all_short_enough_have_the_bits_of_the_rule_without_clipping(rule, topology):
    n = 6
    if rule.averages and topology != "complete":
        pytest.skip("a mean is over everyone")
    start, drift = random_vectors(1, P) * n, random_drift(P)
    plain, _ = play(rule, make_topology(topology, n, seed=1), start, 8, drift)
    wrapped, states = play(clipped(rule, at=1e9, decline=1e9), make_topology(topology, n, seed=1), start, 8, drift)
    if rule.averages:  # a mean through chunk owners has another order of sums
        close(plain, wrapped)
    else:
        assert all(torch.equal(a, b) for a, b in zip(plain, wrapped, strict=True))
    assert all(not s.counted.any() for s in states)


@pytest.mark.parametrize("rule", [gossip(), gasloc()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("factor", [-1.0, 10.0, 1e6, 1e200])
def test_a_peer_that_multiplies_its_messages_is_declined_and_moves_no_worker(rule, factor):
    def multiplied(x, t):
        return factor * x

    x, s = rounds(clipped(rule), multiplied)
    assert s.counted[1].tolist() == [0, 0, 0, 8] and s.strikes[3] == 4
    assert torch.equal(x, rounds(clipped(rule), lambda x, t: 1e3 * x)[0])
    assert all(torch.isfinite(leaf).all() for leaf in (x, s.ratios))


@pytest.mark.parametrize("rule", [gossip(), gasloc()], ids=lambda rule: rule.name)
def test_old_messages_are_declined_though_they_are_hardly_further_away_than_those_of_the_others(rule):
    wrapped, apart = clipped(rule), iter(random_vectors(120, P, 3))
    x = torch.zeros(P, dtype=torch.float64)
    s, sent = wrapped.init(x, Context(0, N, 0, 1, 0.25, layout(P), 1, False, (1, 2, 3))), []
    for t in range(40):
        own = x + 1.0
        near = [own + 8.0 * one / one.norm() for one in (next(apart) for _ in range(3))]
        sent.append(near[1])
        if t >= 10:
            near[1] = sent[t - 10]
        x, s = step(wrapped, own, s, wrapped.send(own, s, Context(0, N, t, 1, 0.25, layout(P), 1)), near, t)
    assert s.counted[1].tolist() == [0, 0, 30, 0]


def test_workers_that_no_longer_move_decline_no_message_though_each_distance_leads_back_to_earlier_parameters():
    rule, apart = clipped(gossip()), (one / one.norm() for one in random_vectors(320, P, 5))
    s = rule.init(torch.zeros(P, dtype=torch.float64), Context(0, N, 0, 1, 0.25, layout(P), 1, False, (1, 2, 3)))
    for t in range(80):
        own = next(apart)
        _, s = step(rule, own, s, own, [next(apart) for _ in range(3)], t)
    assert s.counted.sum() <= 1  # with the first three distances


def test_a_message_that_is_somewhat_far_is_shortened_to_what_is_allowed():
    rule = clipped(gossip(), at=1.5, decline=100.0)
    x, s = rounds(rule, last=8)
    own, usual = x + 1.0, s.ratios[s.ratios > 0].median()
    direction = torch.ones(P, dtype=torch.float64) / P**0.5
    unit = (0.9 * s.drift + P).sqrt().item()
    far = own + 20 * unit * usual * direction
    moved, after = step(rule, own, s, own, [own, own, far], 8)
    allowed = 1.5 * float(torch.tensor(sorted(s.ratios[s.ratios > 0].tolist())).double().quantile(0.5)) * unit
    close(moved - own, 0.25 * allowed * direction, rtol=0.05, atol=0)
    assert after.counted[0, 3] == 1 and after.counted[1, 3] == 0


def test_what_counts_of_gossip_and_what_is_remembered_follow_the_equations():
    c, d, most, window, numel = 1.1, 1.8, 2, 5, 2
    rule = clipped(gossip(), at=c, decline=d, strikes=most, window=window)
    x = start = p = torch.zeros(numel, dtype=torch.float64)
    s, drift, ratios, strikes = rule.init(x, Context(0, N, 0, 1, 0.25, layout(numel), 1)), 0.0, [], [0] * N
    draws, seen = iter(random_vectors(4 * 80, numel)), Counter()
    for t in range(80):
        own = x + next(draws)
        others = [own + 2.0 * next(draws) for _ in range(3)]
        x, s = step(rule, own, s, own, others, t)
        v, drift = own - p, 0.9 * drift + float((own - start).square().sum())
        usual, start = statistics.median(ratios) if len(ratios) >= 3 else math.inf, own.clone()
        for j, a in enumerate((one - own for one in others), 1):
            q, back = float(a.norm()) / drift**0.5, -float(a @ v / (v @ v))
            far, old = q > d * usual, q > c * usual and back > 0.5
            strikes[j] = min(strikes[j] + 1, 2 * most) if far or old else max(strikes[j] - 1, 0)
            declined = far or old or strikes[j] >= most
            start = start + (0.0 if declined else 0.25 * min(1.0, c * usual / q)) * a
            ratios.append(min(q, c * usual))
            seen.update(far=far, old=old and not far, quarantined=declined and not far and not old, short=q > c * usual)
        p, ratios = p + 0.1 * v, ratios[-window:]
        close((x, s.drift.item(), s.past), (start, drift, p))
        assert s.ratios.tolist()[-len(ratios) :] == pytest.approx(ratios) and s.strikes.tolist() == strikes
    assert min(seen.values()) > 3, seen


def test_where_no_message_of_a_mean_would_count_all_count_with_the_length_that_is_allowed():
    rule = clipped(diloco(1.0, optimizer="sgd"), at=1.0, decline=1.0)
    x, (way, _) = torch.zeros(P, dtype=torch.float64), (one / one.norm() for one in random_vectors(2, P))
    ctx = Context(0, 2, 0, 1, 0.5, layout(P), 1, True, (1,))
    s = rule.init(x, ctx)
    for t, lengths in enumerate([(0.1, 1.9)] * 4 + [(3.0, 3.0)]):  # both longer than usual, in units of their median
        usual, sent = s.ratios[s.ratios > 0].tolist(), [length * way for length in lengths]
        combined = rule.combine(sent[0], {1: sent[1]}, 0, ((0, 0.5), (1, 0.5)))
        y, s = rule.recv(x, s, sent[0], combined, ctx._replace(round=t))
        s = s._replace(inner=s.inner._replace(anchor=x))
    assert 0.0 < statistics.median(usual) < 1.0 and s.strikes.tolist() == [1, 3]
    close(y, -3.0 * statistics.median(usual) * way)


def test_a_quarantined_peer_counts_again_after_it_has_sent_what_is_usual_for_a_while():
    rule = clipped(gossip(), strikes=2)
    x, s = rounds(rule, lambda x, t: -x, last=9)
    assert s.strikes[3] == 4
    counts = []
    for t in range(9, 14):
        own = x + 1.0
        near = [own + 0.1 * one for one in random_vectors(3, P, t)]
        before = s.counted[1, 3].item()
        x, s = step(rule, own, s, own, near, t)
        counts.append(s.counted[1, 3].item() - before)
    assert counts == [1, 1, 0, 0, 0]


@given(st.integers(0, 10**6), st.sampled_from([-1.0, 10.0, 1e6]))
@settings(max_examples=20, deadline=None)
def test_one_longer_message_of_a_mean_counts_no_more_than_another_on_every_worker_alike(seed, factor):
    rule, n = clipped(diloco(1.0, optimizer="sgd")), 5
    x, messages = torch.zeros(P, dtype=torch.float64), [1.0 + 0.1 * one for one in random_vectors(5, P, seed)]
    found = []
    for i in range(n):
        s = rule.init(x, Context(i, n, 0, 1, 0.2, layout(P), 1, True, ()))
        for t in range(3):
            sent = [*messages[:-1], factor * messages[-1] if t else messages[-1]]
            ctx = Context(i, n, t, 1, 0.2, layout(P), 1, True, tuple(j for j in range(n) if j != i))
            others = {j: one for j, one in enumerate(sent) if j != i}
            row = tuple((j, 1 / n) for j in range(n))
            y, s = rule.recv(x, s, sent[i], rule.combine(sent[i], others, i, row), ctx)
            s = s._replace(inner=s.inner._replace(anchor=x))
        found.append(y)
    assert all(torch.equal(found[0], one) for one in found)
    if factor > 0:
        close(-found[0], sum(messages[:-1]) / 4)


def test_clipping_is_for_gossip_of_parameters_and_for_means_of_a_round():
    for wrong in (eager(), local_sgd(), clipped(gossip())):
        with pytest.raises(
            ConfigError, match=r"clipping needs a rule that gossips whole parameters or averages .* 'gasloc'"
        ):
            clipped(wrong)
    with pytest.raises(ConfigError, match=r"^decline is 1.2 and at is 2, .* set decline >= at"):
        clipped(gossip(), at=2.0, decline=1.2)
    assert make_rule("gasloc", clipped={"at": 2.0}).options["at"] == 2.0
    assert make_rule("gossip", clipped={}).state_copies == 2 and make_rule("gasloc", clipped={}).state_copies == 3
