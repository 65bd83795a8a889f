"""The losses of a plan are those of the committed outcomes."""

import math
from itertools import pairwise
from statistics import fmean

import pytest

from generators.measured_losses import FILE, PAGE, losses_page, measured_losses
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.run.planning.measured_losses import MEASURED, MEASURED_PARAMETERS, RelativeLoss, relative_losses


def test_the_losses_and_settings_of_a_plan_are_those_of_the_committed_outcomes() -> None:
    assert FILE.read_text(encoding="utf-8") == measured_losses(), "run make results"


def test_the_page_names_the_law_and_the_runs_of_every_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == losses_page(), "run make results"
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert all("evidence/" in row and row.count(" | ") == 3 for row in rows) and len(rows) >= len(MEASURED) + 8


@pytest.mark.parametrize("method", ["DiLoCo", "GASLoC 2-Peer", "GASLoC 1-Peer"])
def test_means_never_fall_with_more_local_steps_from_five_on_and_seeds_differ_as_measured(method: str) -> None:
    both = zip(*(relative(method, steps) for steps in (5, 7, 10, 20, 30, 45, 60, 90, 120, 500)), strict=True)
    for length in both:
        means = [fmean(one.by_seed) for one in length]
        assert all(a <= b + 1e-12 for a, b in pairwise(means))
    own = MEASURED[method][60].losses
    least = MEASURED["data parallel"][1].losses
    above = [a - b for a, b in zip(own, least, strict=True)]
    unit = fmean(MEASURED["DiLoCo"][30].losses) - fmean(least)
    shown = relative(method, 60)[0].by_seed
    assert [a - b for a, b in pairwise(shown)] == pytest.approx([(a - b) / unit for a, b in pairwise(above)])


def test_the_description_of_the_measured_model_matches_the_trained_one() -> None:
    assert parameter_count(ModelConfig(size="0.2m", layers=2), 256) == MEASURED_PARAMETERS
    assert {len(one.losses) for own in MEASURED.values() for one in own.values()} == {5}, (
        "seeds are paired by their place"
    )


METHODS = ("DiLoCo", "GASLoC 2-Peer", "GASLoC 1-Peer")


def relative(method: str, local_steps: int) -> tuple[RelativeLoss, RelativeLoss]:
    found = relative_losses(method, local_steps)
    assert found is not None
    return found


def test_diloco_with_30_local_steps_is_the_unit_at_both_lengths() -> None:
    assert [fmean(one.by_seed) for one in relative("DiLoCo", 30)] == pytest.approx([1.0, 1.0])
    assert {tuple(len(one.by_seed) for one in relative(method, min(own))) for method, own in MEASURED.items()} == {
        (5, 3)
    }
    assert relative_losses("heloco", 30) is None


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_between_measured_local_steps_lies_between_in_their_logarithm_for_every_seed(method: str) -> None:
    share = math.log2(40 / 30)
    for low, between, high in zip(*(relative(method, steps) for steps in (30, 40, 60)), strict=True):
        expected = [(1 - share) * a + share * b for a, b in zip(low.by_seed, high.by_seed, strict=True)]
        assert between.by_seed == pytest.approx(expected) and between.beyond == low.beyond == high.beyond == 0


@pytest.mark.parametrize("method", METHODS)
def test_with_more_local_steps_than_measured_a_loss_continues_as_from_30_to_the_most_with_a_wider_interval(
    method: str,
) -> None:
    for unit, most, more in zip(*(relative(method, steps) for steps in (30, 120, 480)), strict=True):
        rise = fmean(most.by_seed) - fmean(unit.by_seed)
        assert fmean(more.by_seed) - fmean(most.by_seed) == pytest.approx(rise) == more.beyond and most.beyond == 0


@pytest.mark.parametrize("method", METHODS)
def test_with_fewer_local_steps_than_were_trained_long_a_loss_falls_as_in_the_shorter_runs(method: str) -> None:
    (short, long), (five, longer) = relative(method, 1), relative(method, 5)
    assert fmean(long.by_seed) / fmean(longer.by_seed) == pytest.approx(fmean(short.by_seed) / fmean(five.by_seed))
    assert long.beyond > 0 == short.beyond == longer.beyond


def test_what_was_measured_with_one_number_of_local_steps_stands_to_diloco_in_longer_runs_as_in_shorter_ones() -> None:
    losses = [MEASURED[method][30].losses[:3] for method in ("local_sgd", "DiLoCo")]
    least = MEASURED["data parallel"][1].losses[:3]
    own, diloco = ([a - b for a, b in zip(some, least, strict=True)] for some in losses)
    long = relative("local_sgd", 30)[1]
    assert long.by_seed == pytest.approx([nats / fmean(diloco) for nats in own]) and long.beyond == 0
    for there, more, few in zip(*(relative_losses("local_sgd", steps) or () for steps in (30, 60, 5)), strict=True):
        assert fmean(more.by_seed) > fmean(there.by_seed) == pytest.approx(fmean(few.by_seed)), (
            "as DiLoCo does, or not at all"
        )
        assert more.beyond > there.beyond == 0 < few.beyond, "which is doubt"
