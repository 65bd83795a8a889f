"""Utilisation against the published table, a schedule written out node by node, and hand arithmetic."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.network.estimates.published import PUBLISHED_GBPS, grid_steps_above_published
from gossamer.network.estimates.straggler import (
    STRAGGLER_METHODS,
    StragglerRun,
    matched_local_steps,
    straggler_table,
    straggler_utilisation,
)
from gossamer.network.estimates.utilisation import (
    MODELS,
    PUBLISHED_METHODS,
    TARGETS,
    Model,
    Setting,
    bandwidth_table,
    setting_of,
    step_seconds,
    utilisation,
    utilisation_curve,
)
from gossamer.network.estimates.wall_clock import (
    LINKS,
    Link,
    MultiSiteRun,
    WallClock,
    WallClockOptions,
    all_reduce_s,
    balanced_local_steps,
    batch_tokens_fit,
    inner_lr_fit,
    wall_clock,
    wall_clock_table,
)


def grid_steps_off(**options: object) -> list[int]:
    """How many grid points each of the 75 bandwidths lies above the published one."""
    return [
        off
        for model, methods in PUBLISHED_GBPS.items()
        for method in methods
        for off in grid_steps_above_published(model, method, **options)
    ]


@st.composite
def small_settings(draw: st.DrawFn) -> Setting:
    """Any method on a model of a few layers, with a link that matters at about 1 Gbit/s."""
    layers, local_steps = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    return Setting(
        layers=layers,
        step_s=draw(st.sampled_from((0.1, 1.0, 4.9))),
        parameters=draw(st.sampled_from((1e7, 1e8, 3e9))),
        local_steps=local_steps,
        fragment_layers=draw(st.none() | st.integers(1, layers + 1)),
        assignment=draw(st.sampled_from(("strided", "sequential"))),
        overlap_steps=draw(st.integers(0, local_steps - 1)),
        bits_per_parameter=draw(st.sampled_from((4.16, 8.0, 16.0, 32.0))),
        payload_factor=draw(st.sampled_from((0.84, 1.0, 1.75))),
        forward_share=draw(st.floats(0, 1)),
    )


def long_run(setting: Setting, bandwidth_bps: float, periods: int) -> float:
    """Utilisation by the definition: nodes with durations and dependencies, in seconds, over many periods."""
    layers, H, k = setting.layers, setting.local_steps, len(setting.fragments)
    forward_s = setting.step_s * setting.forward_share / layers
    backward_s = setting.step_s * (1 - setting.forward_share) / layers
    bits = setting.payload_factor * setting.bits_per_parameter * setting.parameters
    arrived: dict[tuple[int, int], float] = {}
    now = link = started = 0.0
    for step in range(periods * H):
        if step == periods // 2 * H:
            started = now
        for layer in range(layers):
            now = max(now, arrived.get((step - 1 - setting.overlap_steps, layer), 0.0)) + forward_s
        for layer in reversed(range(layers)):
            now += backward_s
            if any(p * H // k == step % H and layer in fragment for p, fragment in enumerate(setting.fragments)):
                link = max(link, now) + bits / layers / bandwidth_bps
                arrived[step, layer] = link
    return (periods - periods // 2) * H * setting.step_s / (now - started)


def test_a_bandwidth_off_the_grid_by_a_step_is_counted_as_one():
    # one bit per parameter less in sixteen moves what lies at the edge of a grid point, and nothing by two
    off = grid_steps_above_published("1b", "diloco", bits_per_parameter=15.0)
    assert set(off) == {0, -1}


def test_the_published_table_is_met_within_one_grid_step_and_nearly_always_exactly():
    off = grid_steps_off()
    assert len(off) == 75
    assert max(map(abs, off)) <= 1
    assert off.count(0) >= 69


def test_neighbouring_layers_as_fragments_do_not_explain_the_published_table():
    assert max(map(abs, grid_steps_off(assignment="sequential"))) > 1


def bandwidth_needed(setting: Setting, target: float) -> float | None:
    return bandwidth_table(setting, (target,))[0].bandwidth_bps


def test_two_settings_of_the_table_by_name():
    assert bandwidth_needed(setting_of("1b", "diloco"), 0.5) == pytest.approx(1.389e9, rel=1e-3)
    assert bandwidth_needed(setting_of("100b", "streaming_overlap_fp4"), 0.99) == pytest.approx(1.389e9, rel=1e-3)


@settings(max_examples=50, deadline=None)
@given(small_settings(), st.floats(6, 11))
def test_utilisation_equals_the_schedule_written_out_node_by_node(setting: Setting, exponent: float):
    bits = setting.payload_factor * setting.bits_per_parameter * setting.parameters
    cap = setting.local_steps * setting.step_s * 10**exponent / bits
    if 0.9 < cap < 1:  # the overlap hides a link that falls behind this slowly for longer than we look
        exponent -= 0.1
    expected = long_run(setting, 10**exponent, periods=80)
    assert float(utilisation(setting, 10**exponent)) == pytest.approx(expected, rel=1e-9)


def test_one_layer_that_is_reduced_in_each_step_waits_for_the_whole_transfer():
    setting = Setting(layers=1, step_s=2.0, parameters=1e9, local_steps=1, bits_per_parameter=16, payload_factor=1)
    assert float(utilisation(setting, 16e9)) == pytest.approx(2 / (2 + 1))


def test_of_two_layers_the_upper_one_travels_during_the_backward_pass_of_the_lower():
    setting = Setting(layers=2, step_s=1.0, parameters=2e9, local_steps=1, bits_per_parameter=16, payload_factor=1)
    # A third of a step for each backward pass: at 64 Gbit/s a layer takes 1/4 s and only the lower one is waited for;
    # at 16 Gbit/s it takes 1 s and the two follow each other, the first leaving at 2/3 s.
    assert utilisation(setting, [64e9, 16e9]) == pytest.approx([1 / 1.25, 1 / (2 / 3 + 2)])


def test_an_overlap_hides_a_transfer_that_fits_into_it_and_no_other():
    setting = Setting(
        layers=1, step_s=1.0, parameters=1e9, local_steps=10, overlap_steps=2, bits_per_parameter=1, payload_factor=1
    )
    assert utilisation(setting, [1e9 / 1.9, 1e9 / 3, 1e9 / 20]) == pytest.approx([1, 10 / 11, 10 / 28])


def test_a_link_that_cannot_carry_the_bytes_bounds_utilisation_even_where_the_overlap_is_long():
    setting = Setting(layers=6, step_s=1.0, parameters=1e9, local_steps=10, overlap_steps=9, payload_factor=1)
    bandwidth = 16e9 / 10.5
    assert float(utilisation(setting, bandwidth)) == pytest.approx(10 / 10.5, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(small_settings())
def test_more_bandwidth_never_lowers_utilisation(setting: Setting):
    values = utilisation(setting, np.logspace(5, 13, 400))
    assert (np.diff(values) >= -1e-12).all()
    assert (values > 0).all() and (values <= 1).all()


@settings(max_examples=50, deadline=None)
@given(small_settings())
def test_infinite_bandwidth_gives_exactly_one(setting: Setting):
    assert float(utilisation(setting, np.inf)) == 1.0


@settings(max_examples=50, deadline=None)
@given(small_settings(), st.floats(1, 31), st.sampled_from(TARGETS))
def test_fewer_bits_never_need_more_bandwidth(setting: Setting, bits: float, target: float):
    def needed(bits: float) -> float:
        options: dict[str, Any] = {name: getattr(setting, name) for name in Setting.__dataclass_fields__} | {
            "bits_per_parameter": bits
        }
        found = bandwidth_needed(Setting(**options), target)
        return np.inf if found is None else found

    assert needed(bits) <= needed(bits + 1)


@pytest.mark.parametrize("assignment", ["strided", "sequential"])
@settings(max_examples=50, deadline=None)
@given(layers=st.integers(1, 40), size=st.integers(1, 45))
def test_the_fragments_hold_each_layer_once_and_none_is_too_large(assignment: str, layers: int, size: int):
    setting = Setting(layers=layers, step_s=1, parameters=1, fragment_layers=size, assignment=assignment)  # pyright: ignore[reportArgumentType]
    assert sorted(layer for fragment in setting.fragments for layer in fragment) == list(range(layers))
    assert all(1 <= len(fragment) <= size for fragment in setting.fragments)


def test_strided_fragments_take_every_kth_layer_and_sequential_ones_neighbours():
    options: dict[str, Any] = {"layers": 6, "step_s": 1, "parameters": 1, "fragment_layers": 3}
    assert Setting(**options).fragments == ((0, 2, 4), (1, 3, 5))
    assert Setting(**options, assignment="sequential").fragments == ((0, 1, 2), (3, 4, 5))


def test_utilisation_keeps_the_shape_of_the_bandwidths():
    grid = np.array([[1e9, 2e9, 4e9], [8e9, 16e9, 32e9]])
    values = utilisation(setting_of("1b", "streaming"), grid)
    assert values.shape == (2, 3)
    assert values[1, 0] == utilisation(setting_of("1b", "streaming"), 8e9)


def test_a_target_that_no_bandwidth_of_the_grid_reaches_is_none():
    rows = bandwidth_table(setting_of("1b", "data_parallel"), (0.5, 0.99), [200e9, 100e9])
    assert [row.bandwidth_bps for row in rows] == [100e9, None]


def test_a_target_that_is_met_exactly_is_met():
    (row,) = bandwidth_table(setting_of("1b", "data_parallel"), (1.0,), [200e9, np.inf])
    assert row.bandwidth_bps == np.inf


def test_the_curve_lists_every_bandwidth_with_its_utilisation():
    setting = setting_of("70b", "diloco")
    points = utilisation_curve(setting, [1e9, 1e12])
    assert [p.bandwidth_bps for p in points] == [1e9, 1e12]
    assert [p.utilisation for p in points] == list(utilisation(setting, [1e9, 1e12]))
    assert len(utilisation_curve(setting)) == 50


def test_every_known_model_and_method_makes_a_setting():
    for model in MODELS:
        needed = [bandwidth_needed(setting_of(model, method), 0.8) for method in PUBLISHED_METHODS]
        assert all(needed) and needed == sorted(needed, key=lambda bps: -(bps or 0))


def test_an_all_reduce_moves_each_bit_twice_but_for_the_own_share():
    assert all_reduce_s(8e9, 2, Link(1e9, 0.0)) == 8.0
    assert all_reduce_s(8e9, 8, Link(1e9, 0.25)) == 14.25
    assert all_reduce_s(8e9, 1, Link(1e9, 0.25)) == 0.25


def test_the_step_takes_six_flops_per_parameter_and_token():
    assert step_seconds(2e9, 1e6, peak_flops=1e15) == pytest.approx(12.0)
    assert step_seconds(2e9, 1e6, peak_flops=1e15, mfu=0.6) == pytest.approx(20.0)
    assert MODELS["70b"].step_s == pytest.approx(17.4, abs=0.05)


RUN: dict[str, Any] = {"parameters": 1e9, "tokens": 20e9, "batch_tokens": 1e6, "nodes": 16}
"""20,000 steps; 6·10^9·2·10^10 / (16 · 3·10^14) = 25,000 s of compute; 16 Gbit per copy of the model."""


def test_data_parallel_wall_clock_by_hand():
    clock = wall_clock("data_parallel", MultiSiteRun(**RUN, across=LINKS["low"]))
    step_comm_s = 2 * 16e9 / 10e9 * (15 / 16) + 0.01  # 3.01 s
    assert clock == pytest.approx((25_000, 20_000 * step_comm_s, 0.0))
    assert clock.total_s == pytest.approx(25_000 + 60_200)
    assert clock.compute_s / clock.total_s == pytest.approx(25_000 / 85_200)


def test_diloco_with_one_replica_reduces_once_more_in_each_round_than_data_parallelism():
    plain = wall_clock("data_parallel", MultiSiteRun(**RUN, across=LINKS["medium"]))
    clock = wall_clock("diloco", MultiSiteRun(**RUN, across=LINKS["medium"], local_steps=25))
    assert clock.inner_s + clock.outer_s == pytest.approx(plain.inner_s * (1 + 1 / 25))


def test_diloco_with_four_replicas_by_hand():
    clock = wall_clock("diloco", MultiSiteRun(**RUN, across=LINKS["low"], replicas=4, local_steps=50))
    inner_s = 2 * 16e9 / 400e9 * (1 - 4 / 16) + 1e-4  # 0.0601 s
    assert clock == pytest.approx((25_000, 20_000 * inner_s, 400 * 3.01))


def test_streaming_costs_as_much_as_diloco_until_its_overlap_hides_it():
    options: dict[str, Any] = {**RUN, "across": LINKS["low"], "replicas": 4, "local_steps": 50}
    exposed, half, hidden = (wall_clock("streaming", MultiSiteRun(**options, overlap_steps=tau)) for tau in (0, 1, 3))
    assert exposed == wall_clock("diloco", MultiSiteRun(**options))
    step_s = 25_000 / 20_000 + 0.0601
    assert half.outer_s == pytest.approx(400 * (3.01 - step_s))
    assert hidden.outer_s == 0.0
    assert hidden.compute_s == exposed.compute_s and hidden.inner_s == exposed.inner_s


def test_fragments_pay_the_latency_each_and_are_hidden_each() -> None:
    options: dict[str, Any] = {**RUN, "across": LINKS["low"], "replicas": 4, "local_steps": 50, "fragments": 5}
    # a fifth of the 16 Gbit: 2 · 3.2 / 10 · 15/16 = 0.6 s and 0.01 s; 5 of them in each of 400 rounds, or hidden by a step
    assert wall_clock("streaming", MultiSiteRun(**options)).outer_s == pytest.approx(400 * 5 * 0.61)
    assert wall_clock("streaming", MultiSiteRun(**options, overlap_steps=1)).outer_s == 0.0
    slow = {**options, "across": Link(2e9, 0.0)}
    step_s = 25_000 / 20_000 + 0.0601
    assert wall_clock("streaming", MultiSiteRun(**slow, overlap_steps=2)).outer_s == pytest.approx(
        400 * 5 * (3.0 - 2 * step_s)
    )


@st.composite
def runs_on_sites(draw: st.DrawFn) -> dict[str, Any]:
    """A DiLoCo run of several replicas on two kinds of links."""
    replicas, each = draw(st.integers(2, 8)), draw(st.integers(1, 64))
    within = Link(draw(st.floats(1e9, 1e12)), draw(st.floats(1e-6, 1e-2)))
    return {
        "parameters": draw(st.floats(1e6, 1e12)),
        "nodes": replicas * each,
        "replicas": replicas,
        "within": within,
        "across": Link(within.bandwidth_bps / draw(st.floats(1, 1e4)), within.latency_s * draw(st.floats(1, 1e3))),
    }


@settings(max_examples=100, deadline=None)
@given(runs_on_sites())
def test_the_balanced_local_steps_are_the_fewest_that_leave_the_sites_half_of_the_communication(
    run: dict[str, Any],
) -> None:
    def clock(local_steps: int) -> WallClock:
        return wall_clock("diloco", MultiSiteRun(**run, tokens=1e12, batch_tokens=1e6, local_steps=local_steps))

    steps = balanced_local_steps(**run)
    assert clock(steps).outer_s <= clock(steps).inner_s * (1 + 1e-9)
    if steps > 1:
        assert clock(steps - 1).outer_s > clock(steps - 1).inner_s * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e6, 1e12), st.floats(1, 1e4), st.integers(2, 8), st.floats(1e-6, 1))
def test_the_ratio_of_the_bandwidths_is_enough_local_steps_but_for_what_few_nodes_need_not_move(
    parameters: float, ratio: float, replicas: int, latency_s: float
) -> None:
    links = {"within": Link(1e12, latency_s), "across": Link(1e12 / ratio, latency_s)}
    steps = balanced_local_steps(parameters=parameters, nodes=4096 * replicas, replicas=replicas, **links)
    assert steps <= np.ceil(ratio * 4096 / 4095)
    # with two nodes in each of two replicas a reduction within moves 1/2 and one across 3/4: half as many steps again
    few = balanced_local_steps(parameters=1e12, nodes=4, replicas=2, within=Link(1e9, 0), across=Link(1e8, 0))
    assert few == 15


@settings(max_examples=50, deadline=None)
@given(runs_on_sites(), st.floats(1, 100), st.integers(1, 50), st.integers(1, 8), st.integers(0, 6))
def test_wall_clock_falls_with_bandwidth_local_steps_and_overlap_and_rises_with_latency(
    run: dict[str, Any], factor: float, local_steps: int, fragments: int, overlap_steps: int
) -> None:
    def total_s(**changes: Any) -> float:
        options = {"tokens": 1e12, "batch_tokens": 1e6, "local_steps": 60, "fragments": fragments, **run, **changes}
        return wall_clock("streaming", MultiSiteRun(**options)).total_s

    (within_bps, within_s), (across_bps, across_s) = run["within"], run["across"]
    assert total_s(across=Link(across_bps * factor, across_s)) <= total_s()
    assert total_s(within=Link(within_bps * factor, within_s)) <= total_s()
    assert total_s() <= total_s(across=Link(across_bps, across_s * factor))
    assert total_s() <= total_s(within=Link(within_bps, within_s * factor))
    assert total_s(overlap_steps=overlap_steps + 1) <= total_s(overlap_steps=overlap_steps)
    assert total_s(fragments=1, local_steps=local_steps + 1) <= total_s(fragments=1, local_steps=local_steps)
    assert total_s(fragments=1) == pytest.approx(
        wall_clock("diloco", MultiSiteRun(**run, tokens=1e12, batch_tokens=1e6, local_steps=60)).total_s
    )


@settings(max_examples=50, deadline=None)
@given(st.floats(1e7, 1e11), st.integers(1, 8))
def test_larger_models_learn_with_smaller_steps_and_larger_batches_and_replicas_want_both_larger(
    parameters: float, replicas: int
) -> None:
    for fit, with_size, with_replicas in ((inner_lr_fit, -1, 1), (batch_tokens_fit, 1, 1)):
        here = fit(parameters, replicas)
        assert with_size * (fit(2 * parameters, replicas) - here) > 0
        assert with_replicas * (fit(parameters, replicas + 1) - here) > 0


def test_the_table_of_hours_by_hand() -> None:
    rows, assumptions = wall_clock_table(
        WallClockOptions(
            replicas=4, local_steps=50, network="low", tokens=20e9, batch_tokens=1e6, nodes=16, fragments=5
        )
    )
    assert "H = 51 and more" in assumptions[3]  # 3.01 s across, 0.0601 s within: 50.08 rounds up
    assert [row.method for row in rows] == [
        "data parallelism",
        "DiLoCo, M = 1",
        "DiLoCo, M = 4",
        "streaming",
        "streaming, τ = 1",
    ]
    step_s = 20_000 * 0.0601
    expected = [(60_200, 0), (60_200, 60_200 / 50), (step_s, 400 * 3.01), (step_s, 400 * 3.05), (step_s, 0)]
    for row, (inner_s, outer_s) in zip(rows, expected, strict=True):
        assert row.clock == pytest.approx((25_000, inner_s, outer_s))
    assert [row.at_once_bits for row in rows] == [16e9] * 3 + [3.2e9] * 2


def test_nodes_follow_the_batch_in_equal_replicas() -> None:
    row = wall_clock_table(WallClockOptions(parameters=1e9, replicas=4)).rows[0]
    # 391,000 tokens are 23.9 times 2^14: 24 nodes
    assert row.clock.compute_s == pytest.approx(6 * 1e9 * 20e9 / (24 * 300e12))
    row = wall_clock_table(WallClockOptions(parameters=1e6, replicas=4)).rows[0]
    assert row.clock.compute_s == pytest.approx(6 * 1e6 * 20e6 / (4 * 300e12)), "one node for each replica at least"


def test_local_steps_match_the_published_ones_and_predict_the_others():
    assert [matched_local_steps(30, 0.1, c) for c in (5 / 3, 10 / 3)] == [15, 1]
    assert [matched_local_steps(30, 0.2, c) for c in (5 / 3, 10 / 3)] == [23, 16]


def test_local_steps_that_are_whole_but_for_rounding_count_as_whole():
    assert 30 - (1 / 0.6 - 1) * 21 < 16
    assert matched_local_steps(30, 0.6, 21) == 16
    assert matched_local_steps(30, 0.1, np.nextafter(5 / 3, 2)) == 15


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.floats(0.01, 1), st.floats(0, 50))
def test_matched_local_steps_are_the_most_with_which_the_straggler_is_in_time(full: int, share: float, exchange: float):
    steps = matched_local_steps(full, share, exchange)
    assert 1 <= steps <= full
    cycle = full + exchange
    assert steps == 1 or steps + exchange / share <= cycle + 1e-6
    assert steps == full or steps + 1 + exchange / share > cycle - 1e-6


def test_a_worker_with_full_bandwidth_takes_all_its_steps():
    assert matched_local_steps(30, 1.0, 12.5) == 30


SEVENTY = Model(layers=80, step_s=20.0, parameters=70e9)
"""Steps of 20 s and 1,120 Gbit per copy: 112 s at 10 Gbit/s, 196 s for an all-reduce of eight."""


@pytest.mark.parametrize(
    ("method", "alone", "with_straggler"),
    [
        ("data_parallel", 20 / (20 + 196), 20 / (20 + 980)),
        ("diloco", 600 / (600 + 196), 600 / (600 + 980)),
        ("gasloc_1_peer", 600 / (600 + 112), 600 / (600 + 112)),
        ("gasloc_2_peer", 600 / (600 + 224), 600 / (20 + 1120)),
    ],
)
def test_healthy_workers_of_a_70b_run_by_hand(method: str, alone: float, with_straggler: float):
    assert straggler_utilisation(method, 10e9, StragglerRun(model=SEVENTY, bandwidth_share=1.0)).mean == pytest.approx(
        alone
    )
    assert straggler_utilisation(method, 10e9, StragglerRun(model=SEVENTY)).healthy == pytest.approx(with_straggler)


def test_a_straggler_with_matched_steps_costs_only_its_own_steps():
    # An exchange of 5/3 steps: the published 15 of 30 at a tenth of the bandwidth.
    bandwidth = 1120e9 / (20 * 5 / 3)
    got = straggler_utilisation("gasloc_1_peer", bandwidth, StragglerRun(model=SEVENTY, bandwidth_share=0.1))
    assert (got.local_steps, got.straggler_local_steps) == (30, 15)
    assert got.cycle_s == pytest.approx(20 * (30 + 5 / 3))
    assert got.healthy == pytest.approx(30 / (30 + 5 / 3))
    assert got.straggler == pytest.approx(got.healthy / 2)
    assert got.mean == pytest.approx(got.healthy * 7.5 / 8)


def test_a_straggler_that_is_late_with_one_step_makes_everyone_wait():
    got = straggler_utilisation("gasloc_2_peer", 10e9, StragglerRun(model=SEVENTY))
    assert got.straggler_local_steps == 1
    assert got.cycle_s == pytest.approx(20 + 224 / 0.2)
    assert got.straggler == pytest.approx(got.healthy / 30)


def test_gossip_stays_busier_than_all_reduce_beside_a_straggler_at_every_bandwidth():
    by_method = {m: [row.mean for row in straggler_table([m])] for m in STRAGGLER_METHODS}
    ranks = ("data_parallel", "diloco", "gasloc_2_peer", "gasloc_1_peer")
    for slower, faster in zip(ranks[:2], ranks[1:2] + ranks[3:], strict=True):
        assert all(a <= b for a, b in zip(by_method[slower], by_method[faster], strict=True))


@pytest.mark.parametrize("method", STRAGGLER_METHODS)
@settings(max_examples=20, deadline=None)
@given(share=st.floats(0.05, 1), workers=st.integers(3, 64))
def test_more_bandwidth_never_makes_a_round_longer_or_anyone_idler(method: str, share: float, workers: int):
    rows = straggler_table([method], run=StragglerRun(bandwidth_share=share, workers=workers))
    for less, more in itertools.pairwise(rows):
        assert more.cycle_s <= less.cycle_s * (1 + 1e-6)
        assert more.healthy >= less.healthy - 1e-6 and more.straggler >= less.straggler - 1e-6
    assert all(0 < row.straggler <= row.mean <= row.healthy <= 1 for row in rows)
    assert straggler_utilisation(method, np.inf, StragglerRun(bandwidth_share=share, workers=workers)).mean == 1.0


def test_the_straggler_table_lists_methods_in_order_and_says_what_it_assumes():
    rows = straggler_table(["diloco", "gasloc_1_peer"], [1e9, 1e10], run=StragglerRun(workers=4))
    assert [(r.method, r.bandwidth_bps) for r in rows] == [
        ("diloco", 1e9),
        ("diloco", 1e10),
        ("gasloc_1_peer", 1e9),
        ("gasloc_1_peer", 1e10),
    ]
    assert rows[0].assumptions[:2] == ("4 workers, steps of 17.4 s", "7e+10 parameters of 16 bits")
    assert "20%" in rows[0].assumptions[2]
    assert rows[0].assumptions[-1] != rows[2].assumptions[-1]


ONE_LAYER: dict[str, Any] = {"layers": 1, "step_s": 1.0, "parameters": 1.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: setting_of("1c", "diloco"), "unknown model '1c'; did you mean '1b'"),
        (lambda: setting_of("1b", "dilco"), "did you mean 'diloco'"),
        (lambda: setting_of("1b", "diloco", local_step=3), "did you mean 'local_steps'"),
        (lambda: setting_of("1b", "data_parallel", local_steps=30), "local_steps is 30"),
        (lambda: setting_of("1b", "diloco", fragment_layers=3), "fragment_layers is 3"),
        (lambda: setting_of("1b", "streaming", overlap_steps=100), "overlap_steps is 100 .* from 0 to 99"),
        (lambda: Setting(**ONE_LAYER, overlap_steps=0.5), "overlap_steps is 0.5"),  # pyright: ignore[reportArgumentType]
        (lambda: Setting(**{**ONE_LAYER, "layers": 0}), "layers is 0"),
        (
            lambda: Setting(**{**ONE_LAYER, "layers": np.int64(7)}),
            r"layers is np.int64\(7\) but must be a whole number",
        ),
        (lambda: Setting(**ONE_LAYER, fragment_layers=0), "fragment_layers is 0"),
        (lambda: Setting(**ONE_LAYER, local_steps=True), "local_steps is True"),
        (lambda: Setting(**ONE_LAYER, bits_per_parameter=float("nan")), "bits_per_parameter is nan"),
        (lambda: Setting(**ONE_LAYER, forward_share=1.5), "forward_share is 1.5"),
        (lambda: Setting(**ONE_LAYER, assignment="stride"), "did you mean 'strided'"),  # pyright: ignore[reportArgumentType]
        (lambda: utilisation(Setting(**ONE_LAYER), [1e9, 0.0]), "goes down to 0 but"),
        (lambda: utilisation(Setting(**ONE_LAYER), float("nan")), "goes down to nan but"),
        (lambda: bandwidth_needed(Setting(**ONE_LAYER), 95), "the target utilisation is 95"),
        (lambda: step_seconds(1e9, 1e6, 1e15, mfu=40), "mfu is 40"),
        (lambda: all_reduce_s(1.0, 0, LINKS["low"]), "nodes is 0"),
        (lambda: all_reduce_s(1.0, 2, Link(0.0, 0.0)), "bandwidth_bps of the link is 0.0"),
        (lambda: all_reduce_s(1.0, 2, Link(1.0, -1.0)), "latency_s of the link is -1.0"),
        (lambda: wall_clock("streamin", MultiSiteRun(**RUN, across=LINKS["low"])), "did you mean 'streaming'"),  # pyright: ignore[reportArgumentType]
        (
            lambda: wall_clock("diloco", MultiSiteRun(**RUN, across=LINKS["low"], replicas=3)),
            "a divisor of the 16 nodes",
        ),
        (
            lambda: wall_clock("diloco", MultiSiteRun(**RUN, across=LINKS["low"], overlap_steps=1)),
            "overlap_steps of diloco is 1",
        ),
        (
            lambda: wall_clock("data_parallel", MultiSiteRun(**RUN, across=LINKS["low"], replicas=2)),
            "replicas of data_parallel is 2",
        ),
        (lambda: matched_local_steps(0, 0.1, 1.0), "full_steps is 0"),
        (lambda: matched_local_steps(30, 0.0, 1.0), "bandwidth_share is 0.0"),
        (lambda: matched_local_steps(30, 0.1, float("inf")), "exchange_steps is inf"),
        (lambda: straggler_utilisation("diloco", 0.0), "bandwidth_bps is 0.0"),
        (lambda: straggler_utilisation("gasloc", 1e9), "unknown method 'gasloc'"),
        (
            lambda: straggler_utilisation("gasloc_2_peer", 1e9, StragglerRun(workers=2)),
            "workers of gasloc_2_peer is 2 .* from 3",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(call: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_module_needs_no_torch():
    code = "import sys, gossamer.network.estimates.utilisation; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=250).returncode == 0
