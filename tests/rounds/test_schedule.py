"""When is separate: fragments, overlap and late hearing around any rule, and the identities of the methods they make."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.codecs import exact, fp4
from gossamer.errors import ConfigError, PairingError
from gossamer.layout import Layout, Leaf, arrange
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import settled_rule, warnings_of
from gossamer.rounds.schedule import Schedule
from gossamer.rules import RULES, data_parallel, diloco, eager, gasloc, gossip, local_sgd, make_rule
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.tree import leaves

P = 9
THIRDS = ((0, 3), (3, 6), (6, 9))


def complete(n):
    return make_topology("complete", n)


@given(
    fragments=st.integers(1, 6),
    full_steps=st.integers(1, 24),
    overlap=st.integers(0, 24),
    delay=st.integers(0, 1),
    rounds=st.integers(2, 4),
)
def test_every_fragment_is_sent_once_a_round_and_received_once_after_its_overlap(
    fragments, full_steps, overlap, delay, rounds
):
    if fragments > full_steps or overlap > full_steps or (delay and overlap):
        return
    schedule = Schedule(fragments=fragments, overlap_steps=overlap)
    sent, received, log = {}, {}, []
    for t in range(rounds):
        stops = schedule.stops(t, full_steps, delay)
        assert stops[-1].step == full_steps and list(stops) == sorted(stops, key=lambda stop: stop.step)
        for stop in stops:
            for p in stop.sends:
                assert p not in log or delay, "sent again before it was heard"
                sent[t, p] = t * full_steps + stop.step
                log.append(p)
            for p, lag in stop.receives:
                if t >= lag:
                    received[t - lag, p] = t * full_steps + stop.step
                    log.remove(p)
    assert set(sent) == {(t, p) for t in range(rounds) for p in range(fragments)}
    late = overlap + delay * full_steps
    assert all(received[key] - sent[key] == late for key in received)
    assert all(key in received for key in sent if sent[key] + late <= rounds * full_steps)


@given(full=st.integers(1, 40), local=st.integers(1, 40), fragments=st.integers(1, 5), overlap=st.integers(0, 10))
def test_workers_with_fewer_steps_meet_the_same_stops_in_the_same_order_within_their_round(
    full, local, fragments, overlap
):
    if local > full or fragments > full or overlap > full:
        return
    steps = [stop.after(local, full) for stop in Schedule(fragments=fragments, overlap_steps=overlap).stops(0, full)]
    assert steps == sorted(steps) and steps[-1] == local


@given(layers=st.integers(1, 9), fragments=st.integers(1, 9), pattern=st.sampled_from(["strided", "sequential"]))
def test_fragments_are_whole_layers_that_cover_the_model_once(layers, fragments, pattern):
    names = ["embed.w", *(f"model.layers.{k}.{part}" for k in range(layers) for part in "ab"), "norm.w", "head.w"]
    layout = Layout(tuple(Leaf(name, (2, k + 1), k * (k + 1), (k + 1) * (k + 2)) for k, name in enumerate(names)), 0)
    layout = layout._replace(numel=layout.leaves[-1].stop)
    if fragments > layers:
        with pytest.raises(ConfigError, match="layers"):
            arrange(layout, fragments, pattern)
        return
    arranged, spans = arrange(layout, fragments, pattern)
    assert sorted(leaf.name for leaf in arranged.leaves) == sorted(names)
    assert arranged.numel == layout.numel == spans[-1][1] and spans[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans))
    holder = {}
    for p, (start, stop) in enumerate(spans):
        part = arranged.slice(start, stop)  # asserts that no tensor is cut
        for leaf in part.leaves:
            holder.setdefault(leaf.name.rpartition(".")[0], set()).add(p)
    assert all(len(fragments) == 1 for fragments in holder.values())
    of = {name: next(iter(held)) for name, held in holder.items()}
    assert of["embed"] == of["model.layers.0"] and of["norm"] == of["head"] == of[f"model.layers.{layers - 1}"]
    if pattern == "strided":
        assert all(of[f"model.layers.{k}"] == k % fragments for k in range(layers))


def test_one_fragment_without_overlap_and_an_overwriting_merge_is_diloco_to_the_last_bit():
    start, drift = [random_vectors(1, P, dtype=torch.float32)[0]] * 4, random_drift(P, dtype=torch.float32)
    plain, _ = play(diloco(), complete(4), start, 5, drift, steps=3)
    merged, _ = play(diloco(), complete(4), start, 5, drift, steps=3, schedule=Schedule(merge=0.0))
    assert all(map(torch.equal, plain, merged))


def test_workers_that_keep_all_of_their_own_are_independent_while_the_anchor_moves_on():
    start, drift = [random_vectors(1, P)[0]] * 3, random_drift(P)
    schedule = Schedule(fragments=3, overlap_steps=1, merge=1.0)
    xs, states = play(diloco(), complete(3), start, 4, drift, steps=3, schedule=schedule, spans=THIRDS)
    for i, x in enumerate(xs):
        torch.testing.assert_close(x, start[0] + sum(drift(i, step, x) for step in range(12)))
    anchors = [torch.cat([s.anchor for s in state]) for state in states]
    assert all(torch.equal(anchors[0], anchor) for anchor in anchors) and not torch.equal(anchors[0], start[0])


def test_alone_and_without_overlap_each_fragment_has_a_separate_outer_nesterov():
    start, drift = random_vectors(1, P), random_drift(P)
    xs, _ = play(diloco(0.4, 0.9), complete(1), start, 5, drift, steps=3, schedule=Schedule(fragments=3), spans=THIRDS)
    for p, (a, b) in enumerate(THIRDS):
        x = torch.nn.Parameter(start[0][a:b].clone())
        optimizer = torch.optim.SGD([x], lr=0.4, momentum=0.9, nesterov=True)
        walked = 0  # a fragment is sent in the middle of a round, so what it was trained since goes into the next one
        for t in range(5):
            end = 3 * t + p + 1
            x.grad = -sum(drift(0, step, start[0])[a:b] for step in range(walked, end))
            optimizer.step()
            walked = end
        rest = sum((drift(0, step, start[0])[a:b] for step in range(walked, 15)), torch.zeros(b - a))
        torch.testing.assert_close(xs[0][a:b], x.detach() + rest)


@pytest.mark.parametrize("wrapper", [{}, {"restarted": {"every": 4}}])
def test_a_rule_whose_numbers_change_is_the_one_with_each_of_them_in_its_rounds(wrapper):
    """With two steps to a round the entry at step 5 is in force from round 3 on."""
    topology, start, drift = make_topology("random", 4), random_vectors(4, P), random_drift(P)
    first, then = ({"lr": 0.4, "momentum": 0.1}, {"lr": 0.7, "momentum": 0.1})
    changing = make_rule("gasloc", lr={0: 0.4, 5: 0.7}, momentum={"0": 0.1}, **wrapper)
    whole, states = play(changing, topology, start, 6, drift, steps=2)
    half, kept = play(make_rule("gasloc", **first, **wrapper), topology, start, 3, drift, steps=2)
    rest, last = play(make_rule("gasloc", **then, **wrapper), topology, half, 3, drift, steps=2, states=kept, first=3)
    assert all(map(torch.equal, whole, rest)) and all(map(torch.equal, leaves(tuple(states)), leaves(tuple(last))))
    same, _ = play(make_rule("gasloc", **first, **wrapper), topology, start, 6, drift, steps=2)
    assert not torch.equal(whole[0], same[0])
    assert changing.options["lr"] == {"0": 0.4, "5": 0.7} and changing.at(5, 12).options["lr"] == 0.7


def test_what_cannot_change_over_a_run_is_refused_with_the_line_that_would_do():
    for options, words in (
        ({"lr": {4: 0.5}}, "rule.lr begins at inner step 4.*write rule.lr = { 0 = 0.5, 4 = 0.5 }"),
        ({"lr": {0: 0.5, 9: 1.1, 4: 0.7}}, "do not ascend; write rule.lr = { 0 = 0.5, 4 = 0.7, 9 = 1.1 }"),
        ({"lr": {0: 0.5, 4: -1.0}}, "lr.4 = -1.0, which must be a number above 0"),
        ({"alpha": {0: "auto"}}, "only numbers change over a run"),
        ({"form": {0: "post"}}, "form = {0: 'post'}, which must be one of"),
        ({"lr": {"shape": "cosine"}}, 'write rule.lr = { shape = "cosine", to = ... }'),
    ):
        with pytest.raises(ConfigError, match=words):
            gasloc(**options)
    four = {"topology": make_topology("random", 4), "steps": 8}
    for rule, words in (
        (
            gasloc(lr={0: 0.5, 8: 0.7}),
            r"entry at inner step 8, and run.steps is 8.*write rule.lr = { 0 = 0.5 }, or raise",
        ),
        (gasloc(lr={0: 0.5, 4: 1.0}), "keeps another state, as with lr = 1"),
        (gasloc(alpha="auto", momentum={0: 0.5, 4: 0.6}), "alpha = 'auto' and numbers that change"),
    ):
        with pytest.raises(ConfigError, match=words):
            settled_rule(Combination(rule=rule, **four))
    endless = Combination(rule=gasloc(lr={"shape": "cosine", "to": 0.1}), **{**four, "steps": 0})
    with pytest.raises(ConfigError, match="whose length is not known here; add steps"):
        settled_rule(endless)
    unstable = Combination(rule=gasloc(momentum={0: 0.5, 4: 0.9, 6: 0.6}), topology=make_topology("random", 8), steps=8)
    (sentence,) = warnings_of(unstable)
    assert sentence.startswith("at inner step 4, rule 'gasloc' is predicted to lose consensus")


@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
@pytest.mark.parametrize("codec", [exact(), fp4()], ids=lambda codec: codec.name)
def test_gossip_that_overlaps_loses_nothing_that_was_trained_meanwhile(overlap, codec):
    start, drift = random_vectors(4, P), random_drift(P)
    schedule = Schedule(fragments=3, overlap_steps=overlap)
    xs, _ = play(
        gossip(), make_topology("random", 4), start, 5, drift, steps=3, schedule=schedule, spans=THIRDS, codec=codec
    )
    total = sum(start) + sum(drift(i, step, start[0]) for i in range(4) for step in range(15))
    torch.testing.assert_close(sum(xs), total)


def test_gossip_under_a_whole_inner_step_combines_what_was_sent_and_then_adapts():
    """Decentralized AdamW overlaps like this: the gradient is taken before mixing and applied after it."""
    topology, start, drift = make_topology("random", 4), random_vectors(4, P), random_drift(P)
    xs, _ = play(gossip(), topology, start, 4, drift, steps=1, schedule=Schedule(overlap_steps=1))
    expected = [x + drift(i, 0, x) for i, x in enumerate(start)]
    for t in range(1, 4):
        rows = topology.mixing(t - 1).rows
        expected = [sum(w * expected[j] for j, w in rows[i]) + drift(i, t, expected[i]) for i in range(4)]
    expected = [sum(w * expected[j] for j, w in topology.mixing(3).rows[i]) for i in range(4)]
    for x, y in zip(xs, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_the_mean_of_eager_workers_hears_its_own_share_at_once_and_the_others_a_round_late():
    n, start, drift = 4, [random_vectors(1, P)[0]] * 4, random_drift(P)
    xs, _ = play(eager(0.4, 0.9), complete(n), start, 6, drift)
    x = torch.nn.Parameter(start[0].clone())
    optimizer = torch.optim.SGD([x], lr=0.4, momentum=0.9, nesterov=True)
    before = torch.zeros_like(start[0])
    for t in range(6):
        now = -sum(drift(i, t, start[0]) for i in range(n)) / n
        x.grad = now / n + (1 - 1 / n) * before
        optimizer.step()
        before = now
    torch.testing.assert_close(sum(xs) / n, x.detach())
    assert not torch.allclose(xs[0], xs[1])


def test_on_a_constant_pseudo_gradient_eager_moves_as_diloco_does_from_its_second_round():
    start, n = [random_vectors(1, P)[0]] * 3, 3
    step = lambda i, t, x: torch.full_like(x, 0.1 * (i + 1))  # noqa: E731

    def moved(rule, rounds):
        xs, states = play(rule, complete(n), start, rounds, step)
        return sum(states[i].b for i in range(n)) / n, xs

    _, late = moved(eager(0.4, 0.0), 5)
    _, early = moved(eager(0.4, 0.0), 4)
    _, plain = moved(diloco(0.4, 0.0), 5)
    _, before = moved(diloco(0.4, 0.0), 4)
    torch.testing.assert_close(sum(late) - sum(early), sum(plain) - sum(before))


def test_naive_delayed_updates_apply_last_rounds_mean_and_nothing_of_this_round():
    n, start, drift = 3, [random_vectors(1, P)[0]] * 3, random_drift(P)
    xs, _ = play(eager(0.5, 0.0, fresh=False), complete(n), start, 4, drift)
    means = [sum(drift(i, t, start[0]) for i in range(n)) / n for t in range(3)]
    torch.testing.assert_close(xs[0], start[0] + 0.5 * sum(means))
    assert all(torch.equal(xs[0], x) for x in xs)


@settings(deadline=None, max_examples=15)
@given(steps=st.lists(st.integers(1, 6), min_size=3, max_size=3), overlap=st.integers(0, 6))
def test_uneven_local_steps_keep_all_exchanges_paired(steps, overlap):
    if overlap > max(steps) or max(steps) < 3:
        return
    start, drift = random_vectors(3, P), random_drift(P)
    schedule = Schedule(fragments=3, overlap_steps=overlap)
    xs, _ = play(gossip(), make_topology("ring", 3), start, 3, drift, steps=steps, schedule=schedule, spans=THIRDS)
    total = sum(start) + sum(drift(i, step, start[0]) for i in range(3) for step in range(3 * steps[i]))
    torch.testing.assert_close(sum(xs), total)


def test_inner_moments_are_averaged_at_their_own_periods_and_by_nothing_but_a_mean():
    schedule = Schedule(inner_every=(2, 3))
    sends = [[p for stop in schedule.stops(t, 4) for p in stop.sends] for t in range(6)]
    assert sends == [[0], [0, 1], [0, 2], [0, 1], [0], [0, 1, 2]]
    start = random_vectors(2, P)
    spans = ((0, 3), (3, 6), (6, 9))
    xs, states = play(diloco(), complete(2), start, 1, schedule=Schedule(inner_every=(1, 0)), spans=spans)
    assert torch.equal(xs[0][3:6], xs[1][3:6])
    torch.testing.assert_close(xs[0][3:6], (start[0] + start[1])[3:6] / 2)
    assert torch.equal(xs[0][6:], start[0][6:])
    assert len(leaves(states[0][1])) == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fragments": 0}, "at least 1"),
        ({"overlap_steps": -1}, "at least 0"),
        ({"merge": 1.5}, "from 0 to 1"),
        ({"inner_every": (3,)}, "two numbers"),
    ],
)
def test_an_impossible_schedule_is_refused_in_a_sentence(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Schedule(**wrong)


def test_a_round_too_short_for_its_schedule_is_refused():
    with pytest.raises(ConfigError, match="fragment"):
        incompatibilities.check(Combination(schedule=Schedule(fragments=4), local_steps=3))
    with pytest.raises(ConfigError, match="received before it is sent again"):
        incompatibilities.check(Combination(schedule=Schedule(overlap_steps=4), local_steps=3))


def test_rules_that_cannot_be_late_are_refused():
    with pytest.raises(PairingError, match="exchanges gradients"):
        incompatibilities.check(Combination(rule=data_parallel(), topology=complete(2), schedule=Schedule(fragments=2)))
    with pytest.raises(PairingError, match="already receives 1 round late"):
        incompatibilities.check(Combination(rule=eager(), topology=complete(2), schedule=Schedule(overlap_steps=1)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule().site == "parameters"])
def test_any_rule_on_parameters_streams_its_fragments_and_overlaps(name):
    rule = RULES[name]()
    topology = next(
        make_topology(t, 4)
        for t in ("random", "complete", "ring", "star", "random_push")
        if not _refused(rule, make_topology(t, 4))
    )
    start, drift = [random_vectors(1, P)[0]] * 4, random_drift(P)
    overlap = 0 if rule.delay_rounds else 2
    xs, _ = play(
        rule, topology, start, 4, drift, steps=3, schedule=Schedule(fragments=3, overlap_steps=overlap), spans=THIRDS
    )
    assert all(x.isfinite().all() for x in xs) and not torch.equal(xs[0], start[0])
    again, _ = play(
        rule, topology, start, 4, drift, steps=3, schedule=Schedule(fragments=3, overlap_steps=overlap), spans=THIRDS
    )
    assert all(map(torch.equal, xs, again))


def _refused(rule, topology):
    try:
        incompatibilities.check(Combination(rule=rule, topology=topology))
    except PairingError:
        return True
    return False


def test_streaming_gasloc_among_all_is_streaming_diloco():
    start, drift = [random_vectors(1, P)[0]] * 4, random_drift(P)
    schedule = Schedule(fragments=3, overlap_steps=0)
    ours, _ = play(gasloc(0.7, 0.7), complete(4), start, 4, drift, steps=3, schedule=schedule, spans=THIRDS)
    theirs, _ = play(diloco(0.7, 0.7), complete(4), start, 4, drift, steps=3, schedule=schedule, spans=THIRDS)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)


def test_averaging_that_overlaps_keeps_the_mean_of_what_was_sent_and_adds_what_came_since():
    start, drift = [random_vectors(1, P)[0]] * 2, random_drift(P)
    xs, _ = play(local_sgd(), complete(2), start, 2, drift, steps=2, schedule=Schedule(overlap_steps=1))
    total = start[0] + sum(drift(i, step, start[0]) for i in range(2) for step in range(4)) / 2
    torch.testing.assert_close(xs[0], total)
