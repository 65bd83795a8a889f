"""The choice of a plan: its losses are those of the committed outcomes, and its run file has their settings."""

import json
import tomllib
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from gossamer.cli import main
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.links import Network
from gossamer.run.config.resolve import faults
from gossamer.run.config.run_file import parse
from gossamer.run.planning.measured_losses import MEASURED, MEASURED_FOR, TunedLoss, loss_penalty
from gossamer.run.planning.plan import Candidate, PlanSettings, RunPlan, best_among, plan, plan_rows, run_toml
from gossamer.run.planning.without_slowest import without_slowest

ROOT = Path(__file__).parents[3]
EVIDENCE = [f"local_steps_tuned{scale}" for scale in ("-h1", "-h5", "-h10", "", "-h60", "-h120")]
LABELS = {"data_parallel": "data parallel"}


def measured_in(experiment: str) -> dict[tuple[str, int], TunedLoss]:
    """The means over the committed outcomes of an experiment, with the settings of its run file."""
    file = tomllib.loads((ROOT / "experiments" / "evidence" / f"{experiment}.toml").read_text(encoding="utf-8"))
    outcomes = ROOT / "docs" / "results" / "evidence" / f"{experiment}.jsonl"
    losses: dict[str, list[float]] = {}
    for line in outcomes.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        losses.setdefault(one["method"], []).append(one["row"]["loss"])
    found: dict[tuple[str, int], TunedLoss] = {}
    for variant in file["variant"]:
        label = variant["label"]
        assert len(losses[label]) == 5
        steps = 1 if label == "data_parallel" else file["run"]["local_steps"]
        found[LABELS.get(label, label), steps] = TunedLoss(
            round(mean(losses[label]), 4), variant.get("inner.lr", file["inner"]["lr"]),
            variant.get("rule.lr"), variant.get("rule.momentum"),
        )  # fmt: skip
    return found


def test_the_losses_and_settings_of_a_plan_are_those_of_the_committed_outcomes() -> None:
    expected: dict[tuple[str, int], TunedLoss] = {}
    for experiment in EVIDENCE:
        expected |= measured_in(experiment)
    board = measured_in("leaderboard_tuned")
    expected |= {key: one for key, one in board.items() if key[0] in ("data parallel", "local_sgd", "gossip")}
    assert {(method, steps): one for method, known in MEASURED.items() for steps, one in known.items()} == expected


def test_what_is_printed_of_the_measured_model_is_what_was_trained() -> None:
    parameters = parameter_count(ModelConfig(size="0.2m", layers=2), 256)
    assert f"{parameters:,} parameters and 8 workers" == MEASURED_FOR


def test_a_loss_between_measured_local_steps_lies_half_way_in_their_logarithm() -> None:
    at = {steps: loss_penalty("GASLoC 2-Peer", steps) for steps in (30, 42, 60, 120, 500)}
    assert at[30] is not None and at[60] is not None and at[42] == pytest.approx((at[30] + at[60]) / 2, abs=2e-3)
    assert at[500] == at[120], "no more is known"
    assert loss_penalty("local_sgd", 60) is None and loss_penalty("heloco", 30) is None


def one(method: str, steps: int, utilisation: float, seconds: float, penalty: float | None) -> Candidate:
    return Candidate(method, "exact", None, (steps,) * 4, 1.0, 1.0, utilisation, seconds, penalty)


def test_the_lowest_loss_is_taken_of_those_that_are_fast_enough() -> None:
    slow, few, mixing = one("a", 1, 0.5, 2.0, 0.0), one("b", 15, 0.92, 1.1, 0.3), one("c", 60, 0.91, 1.1, 0.2)
    assert best_among([slow, few, mixing], 0.9) == mixing
    assert best_among([slow, few, mixing], 0.5) == slow
    assert best_among([slow, few, mixing], 0.99) == mixing, "none reaches it, and both are about as fast"
    nearly, fastest = one("d", 240, 0.4, 1.2, 0.2), one("e", 240, 0.5, 1.0, 0.3)
    assert best_among([nearly, fastest], 0.9) == fastest
    assert best_among([nearly, fastest], 0.8) == nearly
    unknown = [one("f", 60, 0.95, 1.0, None), one("f", 30, 0.92, 1.0, None)]
    assert best_among(unknown, 0.9).full_steps == 30, "the fewest local steps, where no loss was measured"


def made(**options: Any) -> RunPlan:
    network = Network(uplink_bps=(*[25e6] * 7, 2.5e6), downlink_bps=25e6, latency_s=0.02, step_s=0.5)
    return plan(network, ModelConfig(size="0.2m"), PlanSettings(**options))


def test_on_the_slow_uplink_two_peers_are_taken_and_the_table_says_what_each_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = made()
    assert (planned.best.method, planned.best.full_steps) == ("GASLoC 2-Peer", 30)
    left = without_slowest(planned)
    assert left is not None and left.worker == 7
    assert (left.others.method, left.others.local_steps) == ("DiLoCo", (15,) * 7)
    out = tmp_path / "run.toml"
    words = ["plan", "configs/networks/slow_uplink.toml", "--model", "0.2m", "--out", str(out)]
    monkeypatch.chdir(ROOT)
    assert main([*words, "--method", "gasloc_2peer"]) == 0
    told = capsys.readouterr().out
    lines = [line.split() for line in told.splitlines()]
    _, _, shown = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition(f"$ gossamer plan {words[1]} --model 0.2m\n")
    )
    shown = shown.partition("\n```")[0].splitlines()
    assert len(shown) == 7 and all(line == "..." or line.split() in lines for line in shown)
    assert "nats above data parallel after as many tokens" in told and "≥ +0.298" in told
    text = out.read_text()
    assert "# Best at 30 local steps" in text and "inner.lr = 0.002" in text
    assert tomllib.loads(text)["rule"] == {"name": "gasloc", "lr": 0.7, "momentum": 0.7}


def test_the_candidates_of_the_decision_are_as_fast_and_as_good_as_it_says() -> None:
    found = {(one.method, one.full_steps): one for one in made().candidates if one.codec == "exact"}
    said = {
        ("GASLoC 1-Peer", 15): 92.5,
        ("DiLoCo", 120): 93.2,
        ("GASLoC 2-Peer", 30): 93.1,
        ("GASLoC 2-Peer", 15): 86.6,
    }
    assert {key: round(100 * found[key].utilisation, 1) for key in said} == said
    least = MEASURED["data parallel"][1].loss
    for key, loss in {("GASLoC 1-Peer", 15): 1.735, ("GASLoC 2-Peer", 15): 1.685}.items():
        assert found[key].loss_penalty == pytest.approx(loss - least, abs=6e-4)
    assert (made(target=0.85).best.method, made(target=0.85).best.full_steps) == ("GASLoC 2-Peer", 15)


def test_a_planned_run_has_the_outer_settings_of_the_nearest_measured_local_steps() -> None:
    found = made(local_steps=[3, 100], codecs={"exact": 32.0, "int8": 8.25})
    assert found.best.loss_penalty == min(
        other.loss_penalty for other in found.candidates if other.utilisation >= 0.9 and other.loss_penalty is not None
    )
    rules: dict[tuple[str, int, str], dict[str, Any]] = {}
    for candidate in found.candidates:
        document = tomllib.loads(run_toml(found, candidate))
        assert not faults(parse(document))
        rules[candidate.method, candidate.full_steps, candidate.codec] = document["rule"]
    assert rules["data parallel", 1, "exact"] == {"name": "data_parallel"}
    assert rules["DiLoCo", 100, "exact"] == {"name": "diloco", "lr": 1.0, "momentum": 0.7}
    assert rules["GASLoC 2-Peer", 3, "exact"] == {"name": "gasloc", "lr": 0.5, "momentum": 0.5}
    assert rules["GASLoC 1-Peer", 100, "int8"] == {"name": "anchored_gasloc", "lr": 1.0, "momentum": 0.5}
    assert [row[-1] for row in plan_rows(found.candidates)][:2] == ["+0.000", "+0.078"]


@pytest.mark.parametrize(
    "network",
    [
        Network(uplink_bps=25e6, downlink_bps=25e6, step_s=0.5),
        Network(uplink_bps=(*[25e6] * 6, 2.5e6, 2.5e6), downlink_bps=25e6, step_s=0.5),
        Network(uplink_bps=25e6, downlink_bps=25e6, step_s=(*[0.5] * 7, 0.52)),
    ],
    ids=["all alike", "two are slow", "hardly slower"],
)
def test_nobody_is_left_out_of_a_plan_where_no_worker_is_slowest_by_far(network: Network) -> None:
    assert without_slowest(plan(network, ModelConfig(size="0.2m"), PlanSettings(workers=8))) is None
