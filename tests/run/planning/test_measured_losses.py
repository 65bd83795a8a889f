"""The losses of a plan are those of the committed outcomes."""

import math
from statistics import fmean

import pytest

from generators.measured_losses import FILE, measured_losses
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.run.planning.measured_losses import MEASURED, MEASURED_PARAMETERS, Shape, measured_shapes


def test_the_losses_and_settings_of_a_plan_are_those_of_the_committed_outcomes() -> None:
    assert FILE.read_text(encoding="utf-8") == measured_losses(), "run make results"


def test_what_is_said_of_the_measured_model_is_what_was_trained() -> None:
    assert parameter_count(ModelConfig(size="0.2m", layers=2), 256) == MEASURED_PARAMETERS
    assert {len(one.losses) for own in MEASURED.values() for one in own.values()} == {5}, (
        "seeds are paired by their place"
    )


METHODS = ("DiLoCo", "GASLoC 2-Peer", "GASLoC 1-Peer")


def shapes(method: str, local_steps: float) -> tuple[Shape, Shape]:
    found = measured_shapes(method, local_steps)
    assert found is not None
    return found


def test_diloco_with_30_local_steps_is_the_unit_at_both_lengths() -> None:
    assert [fmean(shape.by_seed) for shape in shapes("DiLoCo", 30)] == pytest.approx([1.0, 1.0])
    assert [len(shape.by_seed) for method in MEASURED for shape in shapes(method, 30)] == [5, 3] * len(MEASURED)
    assert measured_shapes("heloco", 30) is None


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_between_measured_local_steps_lies_half_way_in_their_logarithm_for_every_seed(method: str) -> None:
    for low, middle, high in zip(*(shapes(method, steps) for steps in (30, math.sqrt(30 * 60), 60)), strict=True):
        halves = [(a + b) / 2 for a, b in zip(low.by_seed, high.by_seed, strict=True)]
        assert middle.by_seed == pytest.approx(halves) and middle.beyond == low.beyond == high.beyond == 0


@pytest.mark.parametrize("method", METHODS)
def test_with_more_local_steps_than_measured_a_loss_goes_on_as_from_30_to_the_most_and_is_doubted(method: str) -> None:
    for unit, most, more in zip(*(shapes(method, steps) for steps in (30, 120, 480)), strict=True):
        rise = fmean(most.by_seed) - fmean(unit.by_seed)
        assert fmean(more.by_seed) - fmean(most.by_seed) == pytest.approx(rise) == more.beyond and most.beyond == 0


@pytest.mark.parametrize("method", METHODS)
def test_with_fewer_local_steps_than_were_trained_long_a_loss_falls_as_in_the_shorter_runs(method: str) -> None:
    (short, long), (five, longer) = shapes(method, 1), shapes(method, 5)
    assert fmean(long.by_seed) / fmean(longer.by_seed) == pytest.approx(fmean(short.by_seed) / fmean(five.by_seed))
    assert long.beyond > 0 == short.beyond == longer.beyond
    assert shapes(method, 0.5)[0] == short, "an exchange after each step is the least"


def test_what_was_measured_with_one_number_of_local_steps_changes_as_diloco_does() -> None:
    own = [shapes("local_sgd", steps) for steps in (30, 480)]
    diloco = [shapes("DiLoCo", steps) for steps in (30, 480)]
    for length in (0, 1):
        mean, more, unit, other = (fmean(pair[length].by_seed) for pair in (*own, *diloco))
        assert more / mean == pytest.approx(other / unit)
        assert own[1][length].beyond / more == pytest.approx(diloco[1][length].beyond / other)
