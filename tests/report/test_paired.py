"""Statistics of runs that are compared seed by seed, against scipy and worked examples, and the tables that show them."""

import importlib
import math
from typing import Any

import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.report.figures import Figure, figure_table
from gossamer.report.paired import effect, holm, standing, trend
from gossamer.report.results import PointResult

numbers = st.lists(st.integers(-1000, 1000), min_size=2, max_size=9, unique=True).map(lambda s: [k / 1000 for k in s])


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What takes longer to import than an example may take, and only this file needs."""
    importlib.import_module("scipy.stats")


@pytest.mark.full
@given(numbers, st.floats(0.01, 2.0))
def test_the_interval_and_the_one_sided_tests_are_those_of_scipy(differences: list[float], margin: float) -> None:
    pairs = [(difference, 2.0) for difference in differences]
    found = effect(pairs, margin=margin, side="below")
    t = scipy.stats.ttest_1samp(differences, 0.0)
    interval = t.confidence_interval(0.95)
    assert found.half is not None
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert found.one_sided == pytest.approx(scipy.stats.ttest_1samp(differences, 0.0, alternative="less").pvalue)
    above = scipy.stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue
    assert effect(pairs, side="above").one_sided == pytest.approx(above)
    low = scipy.stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    high = scipy.stats.ttest_1samp(differences, margin, alternative="less").pvalue
    assert found.equivalent == pytest.approx(max(low, high))
    assert found.percent == pytest.approx(50 * found.mean)


def test_differences_without_spread_are_certain_and_one_difference_says_nothing() -> None:
    sure = effect([(-0.5, 2.0)] * 3, margin=0.6, side="below")
    assert (sure.half, sure.one_sided, sure.equivalent) == (0.0, 0.0, 0.0)
    assert effect([(-0.5, 2.0)] * 3, margin=0.5, side="above")[4:] == (1.0, 1.0, 0.0)
    assert effect([(0.1, 2.0)], margin=0.5, side="above")[2:] == (None, pytest.approx(5.0), None, None, None)


def test_holm_adjusts_as_in_the_worked_example_and_never_reorders() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_pages_test_finds_the_trend_that_was_stated_and_not_its_opposite() -> None:
    rows = [[1.0, 1.1, 1.3, 1.2], [0.9, 1.2, 1.4, 1.5], [1.1, 1.0, 1.2, 1.6]]
    rising, falling = trend(rows, "rising"), trend(rows, "falling")
    assert rising == pytest.approx(scipy.stats.page_trend_test(rows).pvalue) and rising < 0.01
    assert falling is not None and falling > 0.9
    assert trend(rows[:1], "rising") is None and trend([[1.0, 2.0]] * 5, "rising") is None


def swept(gap: float) -> list[PointResult]:
    """Two variants over three values of H and three seeds; the gap between them grows with H."""
    return [
        PointResult(method, {"run.local_steps": h}, seed, {"loss": 2.0 + 0.1 * seed + noise * h + lead})
        for h in (1, 2, 4)
        for seed, noise in ((0, 0.01), (1, 0.012), (2, 0.008))
        for method, lead in (("DiLoCo", 0.0), ("GASLoC", gap * h + noise), ("gossip", 3 * gap + noise * h))
    ]


def test_a_sweep_shows_every_difference_its_interval_and_the_tests_that_the_file_states() -> None:
    asked = Figure(x="run.local_steps", against="DiLoCo", margin=0.05, side="above", trend="rising")
    losses, one, two, four, page = figure_table(swept(0.01), asked).split("\n\n")
    assert losses.splitlines()[0] == "| local steps | 1 | 2 | 4 |"
    heads = "| each seed | mean, 95 % interval | in % | p (above, Holm) | p (within ±0.05) | verdict |"
    assert one.splitlines()[0] == f"| loss above DiLoCo's, local steps 1 {heads}"
    assert one.splitlines()[2].startswith("| GASLoC | +0.0200, +0.0220, +0.0180 | +0.0200 ± 0.0050 | +0.95 | 0.00")
    assert two.splitlines()[3].startswith("| gossip | +0.0500, +0.0540, +0.0460 | +0.0500 ± ")
    assert "local steps 4" in four
    assert page.splitlines()[0] == "| differences from DiLoCo rising along local steps | p (Page) |"
    assert page.splitlines()[2] == "| GASLoC | 0.005 |"
    assert len(figure_table(swept(0.01), Figure(x="run.local_steps", trend="falling")).split("\n\n")) == 2


def test_a_seed_that_diverged_leaves_its_pair_out_and_no_other() -> None:
    runs = [
        run._replace(row={"loss": None})
        if (run.method, run.seed, run.at["run.local_steps"]) == ("GASLoC", 1, 2)
        else run
        for run in swept(0.01)
    ]
    lines = figure_table(runs, Figure(x="run.local_steps", against="DiLoCo")).split("\n\n")[2].splitlines()
    assert lines[2].startswith("| GASLoC | +0.0300, –, +0.0280 |") and lines[3].count("+0.0") >= 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "a", "trend": "rising"}, "needs one swept key"),
        ({"x": "h", "y": "k", "against": "a"}, "needs one swept key"),
        ({"x": "h", "margin": 0.1}, "no pairs to test"),
        ({"x": "h", "against": "a", "margin": -0.1}, "figure.margin is -0.1"),
        ({"x": "h", "trend": "up"}, "unknown figure.trend 'up'"),
    ],
)
def test_a_test_without_its_pairs_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Figure(**options)
    with pytest.raises(ConfigError, match=r"figure\.against"):
        figure_table(swept(0.01), Figure(x="run.local_steps", against="DiLoC"))


arms = st.integers(2, 6).flatmap(
    lambda seeds: st.dictionaries(
        st.sampled_from("abcdef"),
        st.lists(st.integers(1000, 3000).map(lambda k: k / 1000), min_size=seeds, max_size=seeds),
        min_size=1,
        max_size=6,
    )
)


@given(arms, st.integers(0, 1000).map(lambda k: k / 1000))
def test_a_standing_does_not_depend_on_the_order_of_arms_and_on_what_a_seed_adds_to_all(
    losses: dict[str, list[float]], added: float
) -> None:
    found = standing(losses)
    assert {found.best, *found.above} == losses.keys() and {*found.alike} <= found.above.keys()
    assert all(one.mean >= 0 for one in found.above.values())
    shifted = standing(
        {arm: [loss + added * k for k, loss in enumerate(some)] for arm, some in [*losses.items()][::-1]}
    )
    tied = [arm for arm, some in losses.items() if math.isclose(sum(some), sum(losses[found.best]), abs_tol=1e-9)]
    if len(tied) == 1:
        assert shifted.best == found.best
        for arm, one in found.above.items():
            assert shifted.above[arm].mean == pytest.approx(one.mean, abs=1e-9)


@given(arms.filter(lambda some: len(some) > 1))
def test_equal_arms_are_alike_an_arm_far_above_is_not_and_a_diverged_one_is_never_the_best(
    losses: dict[str, list[float]],
) -> None:
    first, *others = losses
    level = losses[first]
    assert {*standing(dict.fromkeys(losses, level)).alike} == {*others}
    apart = standing({first: level, **{arm: [loss + 5.0 for loss in level] for arm in others}})
    assert apart.best == first and apart.decided and not apart.alike
    diverged = standing({first: [math.inf, *level[1:]], **dict.fromkeys(others, level)})
    assert diverged.best == others[0] and first not in diverged.above and first not in diverged.alike


def test_one_seed_makes_no_difference_significant() -> None:
    found = standing({"a": [1.0], "b": [9.0]})
    assert found.best == "a" and found.alike == ("b",) and not found.decided and found.above["b"].half is None
