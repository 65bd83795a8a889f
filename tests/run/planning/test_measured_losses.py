"""The losses of a plan are those of the committed outcomes."""

import math
from statistics import fmean

import pytest

from generators.measured_losses import FILE, measured_losses
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.run.planning.measured_losses import MEASURED, MEASURED_PARAMETERS, MEASURED_STEPS, measured_above


def test_the_losses_and_settings_of_a_plan_are_those_of_the_committed_outcomes() -> None:
    assert FILE.read_text(encoding="utf-8") == measured_losses(), "run make results"


def test_what_is_said_of_the_measured_model_is_what_was_trained() -> None:
    assert parameter_count(ModelConfig(size="0.2m", layers=2), 256) == MEASURED_PARAMETERS
    assert {len(one.losses) for own in MEASURED.values() for one in own.values()} == {5}, (
        "seeds are paired by their place"
    )


def test_a_loss_between_measured_rounds_lies_half_way_in_their_logarithm_for_every_seed() -> None:
    steps = (30, math.sqrt(30 * 60), 60, 120, 500)
    at = [measured_above("GASLoC 2-Peer", MEASURED_STEPS / each) for each in steps]
    (low, _), (middle, beyond), (high, _), (most, none), (more, far) = (one for one in at if one is not None)
    assert [2 * half for half in middle] == pytest.approx([a + b for a, b in zip(low, high, strict=True)])
    assert beyond == none == 0 < far and more == pytest.approx([nats + far for nats in most])
    assert measured_above("GASLoC 2-Peer", 2 * MEASURED_STEPS) == measured_above("GASLoC 2-Peer", MEASURED_STEPS)
    assert measured_above("heloco", 45) is None


def test_what_was_measured_with_one_number_of_rounds_changes_with_others_as_diloco_does() -> None:
    (own, _), (fewer, far), (diloco, _), (less, beyond) = (
        found
        for method in ("local_sgd", "DiLoCo")
        for rounds in (45, 5)
        if (found := measured_above(method, rounds)) is not None
    )
    assert fmean(fewer) / fmean(own) == pytest.approx(fmean(less) / fmean(diloco))
    assert far / fmean(fewer) == pytest.approx(beyond / fmean(less)) and far > 0
