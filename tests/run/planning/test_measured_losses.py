"""The losses of a plan are those of the committed outcomes."""

import pytest

from generators.measured_losses import FILE, measured_losses
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.run.planning.measured_losses import MEASURED, MEASURED_PARAMETERS, measured_above


def test_the_losses_and_settings_of_a_plan_are_those_of_the_committed_outcomes() -> None:
    assert FILE.read_text(encoding="utf-8") == measured_losses(), "run make results"


def test_what_is_said_of_the_measured_model_is_what_was_trained() -> None:
    assert parameter_count(ModelConfig(size="0.2m", layers=2), 256) == MEASURED_PARAMETERS
    assert {len(one.losses) for own in MEASURED.values() for one in own.values()} == {5}, (
        "seeds are paired by their place"
    )


def test_a_loss_between_measured_local_steps_lies_half_way_in_their_logarithm_for_every_seed() -> None:
    at = {steps: measured_above("GASLoC 2-Peer", steps) for steps in (30, 42, 60, 120, 500)}
    (low, _), (middle, beyond), (high, _), (most, none), (more, far) = (one for one in at.values() if one is not None)
    assert [2 * half for half in middle] == pytest.approx([a + b for a, b in zip(low, high, strict=True)], abs=6e-3)
    assert beyond == none == 0 < far and more == pytest.approx([nats + far for nats in most])
    assert measured_above("local_sgd", 60) is None and measured_above("heloco", 30) is None
