"""Goodput under failures: the closed form against published numbers, a simulation and arithmetic by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.cli import main
from gossamer.network.estimates.goodput import (
    Failures,
    Goodput,
    GoodputOptions,
    Group,
    best_interval_s,
    draw_failures,
    fleets,
    goodput,
    goodput_curves,
    goodput_table,
    simulated_goodput,
    uptime,
)
from gossamer.network.estimates.published import PUBLISHED_GOODPUT, published_goodput

SECONDS = st.floats(1e-3, 1e6)


def group_of(method: str, options: GoodputOptions) -> Group:
    return next(group for group in fleets(options) if group.method == method)


def rows(options: GoodputOptions) -> dict[str, Goodput]:
    return {row.method: row for row in goodput_table(options).rows}


def spread(share: float, events: int) -> float:
    """Standard deviation of a simulated goodput F / (F + T) by the central limit theorem for renewal processes with rewards."""
    return (1 - share) * math.sqrt(share / events)


def test_one_downtime_gives_the_fifteen_published_cells_of_elastic_and_decoupled_training_within_5_points() -> None:
    off = [
        abs(cell.published - cell.goodput) for cell in published_goodput(downtime_s=22.6) if cell.method != "all_reduce"
    ]
    assert len(off) == 15 and max(off) < 0.05


def test_another_gives_the_three_cells_of_all_reduce_within_5_points() -> None:
    off = [
        abs(cell.published - cell.goodput) for cell in published_goodput(restart_s=72) if cell.method == "all_reduce"
    ]
    assert len(off) == 3 and max(off) < 0.05


def test_neither_downtime_fits_the_cells_of_the_other() -> None:
    swapped = published_goodput(restart_s=22.6, downtime_s=72)
    for rigid in (True, False):
        assert max(abs(c.published - c.goodput) for c in swapped if (c.method == "all_reduce") == rigid) > 0.2


@pytest.mark.parametrize("chips", PUBLISHED_GOODPUT)
def test_the_simulation_gives_the_published_cells_within_5_points_too(chips: int) -> None:
    for learners, percent in zip((2, 4, 8, 16), PUBLISHED_GOODPUT[chips]["decoupled"], strict=True):
        group = group_of("decoupled", GoodputOptions(chips=chips, learners=learners))
        share, _ = simulated_goodput(group, draw_failures(chips, GoodputOptions().mtbi_s, 10_000, seed=1))
        assert abs(share - percent / 100) < 0.05


@given(st.integers(1, 10**6), st.integers(1, 64), SECONDS, SECONDS, st.floats(1e3, 1e9))
def test_m_learners_on_n_chips_have_the_goodput_of_one_elastic_learner_on_an_mth_of_them(
    each: int, learners: int, downtime_s: float, catch_up_s: float, mtbi_s: float
) -> None:
    one = GoodputOptions(
        chips=each, mtbi_s=mtbi_s, learners=1, worker_chips=1, downtime_s=downtime_s, catch_up_s=catch_up_s
    )
    many = GoodputOptions(
        chips=each * learners,
        mtbi_s=mtbi_s,
        learners=learners,
        worker_chips=1,
        downtime_s=downtime_s,
        catch_up_s=catch_up_s,
    )
    assert group_of("decoupled", many).goodput == pytest.approx(group_of("elastic", one).goodput, rel=1e-12)
    assert group_of("decoupled", one) == group_of("elastic", one)._replace(method="decoupled")


def test_that_rule_holds_in_the_simulation_within_its_error() -> None:
    events, mtbi_s = 40_000, GoodputOptions().mtbi_s
    for learners in (2, 8):
        many = group_of("decoupled", GoodputOptions(learners=learners))
        one = group_of("elastic", GoodputOptions(chips=1_200_000 // learners))
        shares = [
            simulated_goodput(group, draw_failures(chips, mtbi_s, events, seed=3, repeat=learners))[0]
            for group, chips in ((many, 1_200_000), (one, 1_200_000 // learners))
        ]
        assert shares[0] != shares[1]
        assert abs(shares[0] - shares[1]) < 4 * math.sqrt(2) * spread(one.goodput, events)


@pytest.mark.parametrize(
    "options", [GoodputOptions(checkpoint_s=3), GoodputOptions(chips=150_000, checkpoint_s=20, interval_s=90)]
)
def test_the_closed_form_and_the_simulation_agree_with_and_without_lost_work(options: GoodputOptions) -> None:
    for row in rows(options).values():
        assert row.simulated.goodput == pytest.approx(row.goodput, abs=max(6 * row.simulated.error, 1e-4))
        assert row.simulated.error < 0.01


def test_a_few_interruptions_by_hand() -> None:
    """Two learners of two chips; the second interruption of the first finds it standing still."""
    failures = Failures(np.array([10.0, 12.0, 13.0, 40.0]), np.array([0, 1, 3, 2]), chips=4)
    # Learner 0 trains 0 to 10 and 15 to 40; learner 1 trains 0 to 13 and 18 to 40. Both stand still from 13 to 15.
    share, up = simulated_goodput(Group("decoupled", 2, 1.0, down_s=5.0), failures)
    assert (share, up) == (pytest.approx((10 + 25 + 13 + 22) / 80), pytest.approx(1 - 2 / 40))
    # One learner trains 0 to 10 and 15 to 40; of each time, three seconds of every four that are complete count.
    rigid = Group("all_reduce", 1, 1.0, down_s=5.0, interval_s=3.0, checkpoint_s=1.0)
    assert simulated_goodput(rigid, failures) == (pytest.approx((2 * 3 + 6 * 3) / 40), pytest.approx(35 / 40))


def test_a_learner_that_never_fails_has_a_goodput_of_one_and_one_that_always_does_has_none() -> None:
    for row in rows(GoodputOptions(mtbi_s=math.inf, restart_s=1e6, downtime_s=1e6, checkpoint_s=10.0)).values():
        assert row.goodput == row.uptime == row.simulated.goodput == row.simulated.uptime == 1
    assert goodput(math.inf, 5.0, interval_s=90.0, checkpoint_s=10.0) == 0.9, "but it writes its checkpoints"
    assert goodput(1e-9, 5.0, interval_s=90.0, checkpoint_s=10.0) == 0


@given(st.floats(0, 1), st.integers(1, 1000))
def test_some_learner_trains_unless_all_stand_still(share: float, learners: int) -> None:
    assert uptime(share, learners) == pytest.approx(1 - (1 - share) ** learners, abs=1e-12)


def test_the_published_uptime_from_four_learners_on_is_that_of_estimate_and_simulation() -> None:
    for learners, least in ((4, 0.99), (8, 0.99999), (16, 1 - 1e-9)):
        row = rows(GoodputOptions(chips=2_400_000, learners=learners))["decoupled"]
        assert row.uptime > least
        assert row.simulated.uptime == pytest.approx(row.uptime, abs=2e-3)


@given(SECONDS, st.floats(1e-3, 1e5))
@settings(max_examples=50)
def test_no_other_interval_between_checkpoints_is_better_than_the_best(mtbf_s: float, checkpoint_s: float) -> None:
    best_s = best_interval_s(mtbf_s, checkpoint_s)
    assert 0 < best_s <= math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + 1e-9), "never longer than Young's"
    here = goodput(mtbf_s, 10.0, interval_s=best_s, checkpoint_s=checkpoint_s)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert goodput(mtbf_s, 10.0, interval_s=best_s * factor, checkpoint_s=checkpoint_s) <= here * (1 + 1e-12)


def test_the_best_interval_becomes_that_of_young_for_a_cheap_checkpoint() -> None:
    assert best_interval_s(1e6, 1e-3) == pytest.approx(math.sqrt(2 * 1e-3 * 1e6), rel=1e-4)
    assert best_interval_s(1e6, 0.0) == 0 and best_interval_s(math.inf, 5.0) == math.inf


def test_lost_work_only_lowers_goodput_and_vanishes_with_frequent_free_checkpoints() -> None:
    assert goodput(100.0, 20.0, interval_s=1e-6) == pytest.approx(goodput(100.0, 20.0), rel=1e-6)
    shares = [goodput(100.0, 20.0, interval_s=interval_s) for interval_s in (1.0, 10.0, 100.0, 1000.0)]
    assert shares == sorted(shares, reverse=True) and shares[0] < goodput(100.0, 20.0)


def test_the_goodput_of_gossip_does_not_depend_on_the_number_of_chips() -> None:
    curves = goodput_curves()
    assert len({share for _, share in curves["gossip"]}) == 1
    for method in ("all_reduce", "elastic", "decoupled"):
        shares = [share for _, share in curves[method]]
        assert shares == sorted(shares, reverse=True) and shares[-1] < shares[0]


def test_gossamer_goodput_prints_both_tables_draws_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["goodput", "--set", "interruptions=200", "--plot", str(tmp_path / "goodput.png")]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "53.8%" in output and "assumed: a gossip worker of 8 chips restarts in 72 s" in output
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
    assert main(["goodput", "--published", "--set", "downtime_s=30"]) == 0
    output = capsys.readouterr().out
    assert "an elastic learner 30 s" in output and "digests of arXiv 2604.21428" in output
    for given_words, sentence in (
        (["--set", "chip=8"], "did you mean 'chips'"),
        (["--set", "chips=10"], "learners is 8 but must be a divisor of the 10 chips"),
        (["--set", "downtime_s=-1"], "downtime_s is -1 but must be a number of at least 0"),
        (["--set", "mtbi_s=0"], "mtbi_s is 0 but must be a number above 0"),
        (["--set", "interval_s=0"], "interval_s is 0 but must be a number above 0"),
        (["--set", "interruptions=many"], "interruptions is 'many'"),
        (["--set", "interruptions=1000000000"], "must be at most 10000000"),
        (["--published", "--set", "chips=8"], "--published was given with chips"),
    ):
        assert main(["goodput", *given_words]) == 2
        assert sentence in capsys.readouterr().err
