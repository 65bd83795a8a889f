"""Local steps that fit a worker's speed and link: the policy, what it is fed with, and runs that follow it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.network.estimates.straggler import matched_local_steps
from gossamer.network.links import Change, Network, Site
from gossamer.network.pacing import (
    Pace,
    PaceNote,
    Pacer,
    cycle_s,
    first_leg_bytes,
    fitting_steps,
    links_at,
    note_of,
    paces_of,
    uplinks_bps,
    whole_steps,
)
from gossamer.network.pricing import price
from gossamer.record.logs.trace import Operation, from_targets
from gossamer.topologies.sequences import random_matchings

PACES = st.lists(st.builds(Pace, st.floats(1e-3, 10.0), st.floats(0.0, 1e3)), min_size=1, max_size=8)
HIDDEN = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def steps_of(paces, full, hidden=0.0):
    return [whole_steps(fitting_steps(pace, paces, full, hidden), full) for pace in paces]


@given(PACES, st.integers(1, 200), HIDDEN)
def test_some_worker_takes_all_steps_and_none_that_could_skip_a_step_is_late(paces, full, hidden):
    together_s = min(cycle_s(pace, full, hidden) for pace in paces)
    steps = steps_of(paces, full, hidden)
    assert max(steps) == full
    for pace, own in zip(paces, steps, strict=True):
        limit_s = max(together_s, cycle_s(pace, 1, hidden)) * (1 + 1e-6)
        assert cycle_s(pace, own, hidden) <= limit_s
        if own < full:  # one step more, with what rounding may have cost, would be too many
            assert cycle_s(pace, own + 1 + 1e-6 * full, hidden) > limit_s / (1 + 1e-6)


@given(st.floats(1e-3, 10.0), st.floats(0.0, 1e3), st.floats(1.0, 10.0), st.integers(1, 200))
def test_a_slower_worker_takes_no_more_steps(step_s, exchange_s, factor, full):
    first = Pace(1e-3, 0.0)
    steps = steps_of([Pace(step_s, exchange_s), first], full)[0]
    assert steps_of([Pace(factor * step_s, exchange_s), first], full)[0] <= steps
    assert steps_of([Pace(step_s, factor * exchange_s), first], full)[0] <= steps


@pytest.mark.parametrize(
    ("share", "peers", "steps"), [(0.1, 1, 15), (0.1, 2, 1), (0.2, 1, 23), (0.2, 2, 16), (1.0, 2, 30)]
)
def test_the_published_settings_follow_from_the_seconds(share, peers, steps):
    exchange_s = peers * 5 / 3
    paces = [*[Pace(1.0, exchange_s)] * 7, Pace(1.0, exchange_s / share)]
    assert steps_of(paces, 30) == [*[30] * 7, steps]
    assert matched_local_steps(30, share, exchange_s) == steps


@given(st.integers(1, 100), st.floats(0.05, 1.0), st.floats(0.0, 10.0))
def test_one_slow_link_is_matched_as_the_closed_form_says(full, share, exchange_steps):
    paces = [Pace(1.0, exchange_steps), Pace(1.0, exchange_steps / share)]
    assert abs(steps_of(paces, full)[1] - matched_local_steps(full, share, exchange_steps)) <= 1e-6 * full


def test_fewer_steps_behind_a_slow_downlink_would_only_be_lost():
    """Every sender through it is delayed, whatever the worker behind it does: so only the uplink counts."""
    targets = np.tile(np.arange(8), (64, 1))
    for r in range(64):
        pairs = random_matchings(8, 1, 0, r).reshape(-1, 2)
        targets[r, pairs[:, 0]], targets[r, pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    network = Network(uplink_bps=4.8e6, downlink_bps=(*[4.8e6] * 7, 4.8e5), step_s=1.0)
    full, fewer = (price(from_targets(targets, 10**6, (*[30] * 7, steps)), network).total_s for steps in (30, 15))
    assert 0.99 * full < fewer <= full


def test_a_shared_uplink_counts_in_parts_and_as_it_is_at_the_time():
    sites = {"a": Site(workers=(0, 1), uplink_bps=1.6e6), "b": Site(workers=(2, 3))}
    changes = (
        Change(at_s=5, factor=0.5, site="a"),
        Change(at_s=9, factor=0.1, worker=2),
        Change(at_s=9, factor=1, site="a"),
    )
    network = Network(uplink_bps=8e6, downlink_bps=8e6, sites=sites, changes=changes)
    rates = {at_s: uplinks_bps(links_at(network, 4, at_s)).tolist() for at_s in (0, 6, 9)}
    assert rates == {0: [8e5, 8e5, 8e6, 8e6], 6: [4e5, 4e5, 8e6, 8e6], 9: [8e5, 8e5, 8e5, 8e6]}


# --- what is measured -----------------------------------------------------------------------------------------------


NOTES = st.builds(
    PaceNote,
    st.floats(1e-9, 1e6),
    st.floats(0, 1e12),
    st.dictionaries(st.integers(0, 4), st.floats(1e-3, 1e12), max_size=5),
)


@given(NOTES)
def test_a_note_comes_over_the_board_as_it_is(note):
    assert note_of(note.text.encode(), 5) == note


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "[1, 2]",
        "[0, 1, []]",
        "[NaN, 1, []]",
        "[Infinity, 1, []]",
        "[1, -1, []]",
        "[true, 1, []]",
        '["1", 1, []]',
        "[1, 1, [[5, 1.0]]]",
        "[1, 1, [[0, 0]]]",
        "[1, 1, [[0]]]",
        "[1, 1, [[0.5, 1]]]",
        "[1, 1, [3]]",
        "[1, 1, [[[], 1]]]",
        "[1, 1, [[0, 1], [0, 2]]]",
        "[" * 100_000,
        "[1, 1, []" + " " * (1 << 20) + "]",
    ],
)
def test_what_is_no_note_counts_as_none(text):
    assert note_of(text.encode(), 5) is None
    assert note_of(b"\xff" + text.encode(), 5) is None


@given(st.lists(st.floats(1e3, 1e9), min_size=3, max_size=8), st.data())
def test_a_link_is_estimated_from_its_receivers_whatever_the_other_downlinks_are(uplinks, data):
    n = len(uplinks)
    downlinks = [data.draw(st.floats(1e3, 1e9)) for _ in range(n)]
    notes = [PaceNote(1.0, 1e6, {j: min(uplinks[j], downlinks[i]) for j in range(n) if j != i}) for i in range(n)]
    for i, pace in enumerate(paces_of(notes)):
        others = max(downlinks[j] for j in range(n) if j != i)
        assert pace.exchange_s == pytest.approx(1e6 / min(uplinks[i], others))


def test_messages_without_a_measured_time_count_as_sent_in_no_time():
    assert paces_of([PaceNote(2.0, 1e6, {}), PaceNote(1.0, 1e6, {0: 5e5})]) == [Pace(2.0, 2.0), Pace(1.0, 0.0)]


def test_a_mean_counts_the_way_to_the_owners_and_an_exchange_as_it_is():
    operations = [
        Operation("exchange", 0, ((1, 30), (2, 30)), ((1, 30),)),
        Operation("mean", 1, ((1, 20), (2, 20)), ()),
    ]
    assert first_leg_bytes(operations) == 80
    assert first_leg_bytes(operations, lambda fragment: {1: 0.25}[fragment]) == 70


def pacer(steps=30, full=30, worker=0, hidden=0.0):
    return Pacer(worker, steps, full, hidden)


def feed(own, fits):
    """Steps after each round in which so many would have fitted exactly."""
    taken = []
    for some in fits:
        notes = {0: PaceNote(1.0, 1.0, {0: 1.0 / (30 - some + 1e-9)}), 1: PaceNote(1.0, 0.0, {})}
        taken.append(own.decided(notes, 2))
    return taken


def test_steps_change_after_two_rounds_and_stay_where_they_fit():
    assert feed(pacer(), [15, 15, 15, 15]) == [30, 15, 15, 15]
    assert feed(pacer(15), [30, 30, 30]) == [15, 30, 30]
    assert feed(pacer(29), [30, 30, 30]) == [29, 30, 30]
    assert feed(pacer(), [10, 14, 12]) == [30, 14, 14]  # the nearer of the two
    assert feed(pacer(), [15, 30, 15, 30, 15, 30]) == [30] * 6  # a single round is not believed
    assert feed(pacer(15), [29, 1, 29, 1]) == [15] * 4
    assert feed(pacer(5), [-20, -20, -20]) == [5, 1, 1]


@given(st.lists(st.floats(-0.7, 0.7), min_size=4, max_size=30))
def test_steps_do_not_jitter_with_what_fits_by_less_than_a_twentieth(noise):
    assert set(feed(pacer(15), [15.0 + some for some in noise])) == {15}
    assert set(feed(pacer(), [30.0 + some for some in noise])) == {30}


def test_steps_stay_as_they_are_while_a_note_is_missing():
    own = pacer()
    slow = PaceNote(1.0, 1.0, {0: 0.05})
    assert [own.decided({0: slow}, 2) for _ in range(5)] == [30] * 5
    assert [own.decided({}, 2) for _ in range(5)] == [30] * 5


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(1, 9)), min_size=1, max_size=30), st.integers(0, 30))
def test_a_pacer_continues_from_its_state_as_if_it_had_not_been_interrupted(rounds, cut):
    def run(own, some):
        taken = []
        for step_s, rate in some:
            note = own.measured(step_s, 20.0, {0: rate})
            taken.append(own.decided({0: note, 1: PaceNote(1.0, 0.0, {})}, 2))
        return taken

    whole, first, second = pacer(), pacer(), pacer()
    before = run(first, rounds[:cut])
    saved = json.loads(json.dumps(first.state()))
    second.restore(saved)
    assert run(whole, rounds) == [*before, *run(second, rounds[cut:])]
    assert whole.state() == second.state()


@pytest.mark.parametrize("change", [{"steps": 31}, {"steps": 0}, {"wanted": 99}, {"rounds": [[1, 2]]}, {"rounds": 3}])
def test_a_state_that_cannot_be_is_refused(change):
    with pytest.raises((KeyError, TypeError, ValueError)):
        pacer().restore({**pacer().state(), **change})


def test_a_worker_that_sits_out_a_round_sends_as_much_in_the_others():
    own = pacer()
    assert [own.measured(1.0, sent, {}).sent_bytes for sent in (0, 80, 0, 0, 80)] == [0, 80, 80, 80, 80]


def test_one_slow_round_changes_nothing():
    own = pacer(4, 4)
    for step_s in (1.0, 1.0, 1.0, 50.0, 1.0, 1.0):
        note = own.measured(step_s, 0.0, {})
        assert own.decided({0: note, 1: PaceNote(1.0, 0.0, {})}, 2) == 4
    assert math.isclose(own.clock_s, 4 * 55.0)
