"""Races of a plan's shortlist: what each candidate gets, at the price of the planned model, and the command to its verdict."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network, Route, Site, times_as_fast
from gossamer.report.paired import standing
from gossamer.report.results import PointResult, read_results
from gossamer.run.config.experiment_file import points
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import dump, parse, shortened
from gossamer.run.experiments import processes, race
from gossamer.run.experiments.race import carried_over
from gossamer.run.planning.candidates import USUAL, choose_among, price_recipes
from gossamer.run.planning.check import examine_run
from gossamer.run.planning.choice import Candidate, Pick, pick, shortlist
from gossamer.run.planning.expected_loss import LossScale
from gossamer.run.planning.plan import PlanSettings, RunPlan, bits_per_parameter, plan
from tiny import TEXT

SLOW = Network(uplink_bps=(*[25e6] * 3, 2.5e6), downlink_bps=25e6, latency_s=0.02, step_s=(0.5, 0.5, 0.8, 0.5))
SMALLEST = ModelConfig(size="0.2m", layers=1, hidden_size=32, intermediate_size=64)
TWO_LAYERS = ModelConfig(size="0.2m", layers=2, hidden_size=32, intermediate_size=64)


@pytest.fixture(scope="module")
def planned() -> tuple[RunPlan, Pick, list[Candidate]]:
    """A plan on uneven links with everything on its shortlist, and that."""
    bits = bits_per_parameter(["bf16", "fp4"], 869_504)
    made = plan(SLOW, ModelConfig(size="1m"), PlanSettings(codecs=bits, local_steps=(5, 15, 60)))
    priced = price_recipes(made, USUAL)
    choice = choose_among(made, priced)
    return made, choice, shortlist(choice, [*made.candidates, *priced.candidates])


def test_a_shortlist_has_the_choice_its_neighbours_and_the_best_of_other_families(planned: Any) -> None:
    made, choice, some = planned
    assert some[0] == choice.best and 3 <= len(some) <= 6 and len({race.label_of(one) for one in some}) == len(some)
    own = [one.full_steps for one in some if one.name == choice.best.name]
    tried = {one.full_steps for one in made.candidates if one.name == choice.best.name}
    assert all(not any(min(a, own[0]) < steps < max(a, own[0]) for steps in tried) for a in own), "neighbours"
    assert all((above := choice.above_best(one)) is not None and above.nats - above.half <= 0.1 for one in some)
    others = [one for one in some if one.name != choice.best.name]
    assert len({one.name for one in others}) == len(others) >= 1


def test_every_candidate_gets_the_rounds_that_its_price_fits_into_the_time_of_the_choice(planned: Any) -> None:
    made, _, some = planned
    course = race.course_of(made, some, race.SMALL, 20)
    first = course.entrants[0]
    assert course.tokens_of(first) == pytest.approx(20 * 139_584, rel=0.1) and first.candidate == some[0]
    for one in course.entrants:
        whole_s = (one.rounds - (one.last != one.candidate.local_steps)) * one.candidate.round_s
        assert whole_s <= course.horizon_s * (1 + 1e-6) < whole_s + one.candidate.round_s
        assert one.steps == (one.rounds - 1) * one.candidate.full_steps + max(one.last)
    text = race.document(course, made, "stdlib", compiled=False)
    for run, one in zip(points(text, seeds=[3]), course.entrants, strict=True):
        assert run.config.length.rounds == one.rounds and run.config.inner.schedule == "cosine"
        assert sum(resolve(run.config).worker_tokens) == course.tokens_of(one)
        assert run.config.inner.warmup_steps == max(1, round(0.4 * one.steps)) and run.label == f"{one.label} seed=3"
        assert [run.config.length.local_steps_of(i) for i in range(run.config.workers)] == [*one.candidate.local_steps]


def test_a_candidate_whose_whole_rounds_leave_time_has_a_shorter_last_one_that_fits_as_priced(planned: Any) -> None:
    made, _, some = planned
    course = race.course_of(made, some, race.SMALL, 20)
    parts = [one for one in course.entrants if one.last != one.candidate.local_steps]
    assert parts and course.entrants[0] not in parts, "the time is that of whole rounds of the choice"
    runs = {run.method: run.config for run in points(race.document(course, made, "stdlib", compiled=False))}
    for one in course.entrants:
        steps = one.candidate.full_steps
        step_s = 2 * 0.8  # of the slowest, and a second one as no more than whole steps fit
        idle_s = course.horizon_s - one.seconds
        assert idle_s >= -1e-6 * course.horizon_s
        if one in parts:
            assert idle_s <= step_s and 1 <= max(one.last) < steps
            (whole,) = examine_run(shortened(runs[one.label], (one.rounds - 1) * steps)).networks
            text = tomllib.loads(dump(runs[one.label]))
            text["run"] = {"steps": 8 * max(one.last), "local_steps": list(one.last)}
            (short,) = examine_run(parse(text)).networks
            assert whole.round_s is not None and short.round_s is not None
            there_s = (one.rounds - 1) * whole.round_s + short.round_s
            assert there_s == pytest.approx(course.horizon_s, rel=0.03), one.label


@pytest.mark.full
def test_one_machine_and_one_site_alone_are_in_every_race(planned: Any) -> None:
    made, _, some = planned
    labels = [one.label for one in race.course_of(made, race.with_single_machine(made, some), race.SMALL, 20).entrants]
    assert sum("one machine alone" in label for label in labels) == 1
    sites = {"a": Site(workers=(0, 1)), "b": Site(workers=(2, 3))}
    network = replace(SLOW, sites=sites, routes=(Route(between=("a", "b"), latency_s=0.02, bandwidth_bps=1e7),))
    made = plan(network, ModelConfig(size="1m"), PlanSettings(codecs=made.options.codecs, local_steps=(15,)))
    names = [one.method for one in race.with_single_machine(made, [made.best])]
    assert names[-2:] == ["one machine alone", "one site alone"]
    course = race.course_of(made, race.with_single_machine(made, [made.best]), race.SMALL, 5)
    runs = points(race.document(course, made, str(TEXT), compiled=False))
    assert [run.config.workers for run in runs][-2:] == [1, 2]
    assert not any(examine_run(run.config).refused.get("simulate") for run in runs)
    first = next(iter(race.courses(made, [made.best, *(one for one in made.candidates if one.full_steps == 15)][:4])))
    assert len(first.entrants) + len(first.left) >= 4 and "minutes" in next(iter(first.left.values()))


@pytest.mark.full
def test_no_way_to_race_is_so_short_that_nothing_is_learnt(planned: Any) -> None:
    made, _, some = planned
    for way in race.courses(made, some):
        first = way.entrants[0]
        assert way.parameters >= 139_584 and way.tokens_of(first) >= 0.9 * 5 * way.parameters, way
        assert first.label == race.label_of(some[0])


@pytest.mark.parametrize("has", [True, False])
def test_a_race_takes_bf16_only_where_the_processor_is_fast_in_it(
    planned: Any, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, some = planned
    monkeypatch.setattr(race, "is_fast_in_bf16", lambda: has)
    text = race.document(race.course_of(made, some[:2], race.SMALL, 20), made, "stdlib", compiled=True)
    assert {(one.config.inner.compile, one.config.inner.autocast) for one in points(text)} == {
        (True, "bf16" if has else None)
    }


@pytest.mark.full
def test_a_round_of_the_small_model_has_the_price_of_the_planned_one(planned: Any) -> None:
    made, _, some = planned
    everything = [*some, *(one for one in made.candidates if one.codec == "fp4" and one.full_steps == 15)]
    course = race.course_of(made, everything, race.SMALL, 20)
    for run, one in zip(points(race.document(course, made, "stdlib")), course.entrants, strict=True):
        whole = shortened(run.config, (one.rounds - 1) * one.candidate.full_steps)  # without a shorter last round
        (priced,) = examine_run(whole).networks
        rel = 0.1 if one.candidate.method == USUAL else 0.03  # a model of fewer layers is sent in fewer fragments
        assert priced.round_s == pytest.approx(one.candidate.round_s, rel=rel), one.label


def test_links_that_are_slower_by_the_ratio_of_models_are_so_everywhere() -> None:
    network = Network(uplink_bps=(1e6, 2e6), downlink_bps=float("inf"), latency_s=0.1, step_s=1.0)
    slower = times_as_fast(network, 0.5)
    assert slower == Network(uplink_bps=(5e5, 1e6), downlink_bps=float("inf"), latency_s=0.1, step_s=1.0)


def test_a_candidate_with_fewer_than_three_rounds_is_left_out_and_named(planned: Any) -> None:
    made, _, some = planned
    slow = some[0]._replace(round_s=some[0].round_s * 1e4, codec="exact")
    course = race.course_of(made, [some[0], slow], race.SMALL, 2)
    assert [one.candidate for one in course.entrants] == [some[0]] and "at least 3" in course.left[race.label_of(slow)]


def test_streaming_has_as_many_fragments_as_the_small_model_has_layers_and_needs_two(planned: Any) -> None:
    made, _, some = planned
    streaming = next(one for one in price_recipes(made, USUAL).candidates if one.method == USUAL)
    course = race.course_of(made, [some[0], streaming], race.SMALL, 20)
    _, run = points(race.document(course, made, str(TEXT), compiled=False))
    assert run.config.schedule.fragments == 2 and "layer" not in str(examine_run(run.config).refused)
    with_one = race.course_of(made, [some[0], streaming], SMALLEST, 20)
    assert [one.candidate for one in with_one.entrants] == [some[0]]
    assert "a layer for each of its fragments" in with_one.left[race.label_of(streaming)]


def test_only_seeds_that_all_candidates_have_ended_count_and_a_diverged_run_has_no_loss(planned: Any) -> None:
    made, _, some = planned
    runs = points(race.document(race.course_of(made, some[:2], race.SMALL, 20), made, "stdlib"), seeds=range(3))
    labels = [*dict.fromkeys(run.method for run in runs)]

    def ended(label: str, seed: int, loss: float | None) -> PointResult:
        return PointResult(label, {}, seed, {"loss": loss})

    results = [ended(labels[0], seed, 2.0 + seed) for seed in range(3)] + [
        ended(labels[1], 0, 1.0),
        ended(labels[1], 1, None),
    ]
    seeds, losses, standing = race.race_standings(runs, results)
    assert seeds == [0, 1] and losses[labels[1]] == [1.0, float("inf")]
    assert standing is not None and standing.best == labels[0] and standing.alike == ()
    assert race.race_standings(runs, results[:3])[2] is None


@pytest.fixture
def small_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a race of two workers that takes seconds, whatever the minutes."""
    monkeypatch.setattr(race, "courses", lambda made, some: [race.course_of(made, some, TWO_LAYERS, 0.1)])
    monkeypatch.setattr(race, "MOST_SEEDS", 2)
    monkeypatch.setattr(race, "_SEQUENCES", 2)
    monkeypatch.setattr(race, "_ROUNDS", 3)
    monkeypatch.chdir(tmp_path)
    Path("network.toml").write_text("uplink_bps = 3e7\ndownlink_bps = 3e7\nlatency_s = 0.01\nstep_s = 0.5\n")
    words = ["plan", "network.toml", "--workers", "2", "--model", "1m", "--local-steps", "5,15", "--codec", "bf16"]
    return [*words, "--data", str(TEXT), "--race", "60", "--jobs", "1", "--quiet"]


def test_a_race_is_stopped_resumed_and_ends_with_a_verdict_a_report_and_a_run_file(
    small_race: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, whole = list[str](), processes.simulate_until_asked

    def until_the_third(config: Any, *rest: Any, **more: Any) -> Any:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(config.name)
        return whole(config, *rest, **more)

    monkeypatch.setattr(processes, "simulate_until_asked", until_the_third)
    assert main([*small_race, "--out", "run.toml"]) == 130
    assert "--resume keeps the finished runs in 'runs/race-network-1m'" in capsys.readouterr().err
    folder = Path("runs/race-network-1m")
    kept = read_results(folder / "outcomes.jsonl")
    assert len(kept) == 2 and not Path("run.toml").exists()
    assert main(small_race) == 2
    assert "go on with --resume" in capsys.readouterr().err

    monkeypatch.setattr(
        processes,
        "simulate_until_asked",
        lambda config, *rest, **more: (trained.append(config.name), whole(config, *rest, **more))[1],
    )
    assert main([*small_race, "--resume", "--out", "run.toml"]) == 0
    output = capsys.readouterr().out
    ended = read_results(folder / "outcomes.jsonl")
    document = tomllib.loads((folder / race.FILE).read_text())
    labels = [row["label"] for row in document["variant"]]
    assert len(trained) == len({*trained}) == len(ended) == 2 * len(labels) and ended[:2] == kept
    (taken,) = [label for label in labels if f"taken: {label}, by these losses" in output]
    assert "verdict: " in output and "losses are others, and their order may be" in output and "2 seeds" in output
    assert (folder / "report.html").is_file() and "race of" in output
    run = tomllib.loads(Path("run.toml").read_text())
    parse(run)
    assert run["data"]["source"] == str(TEXT) and all(label in output for label in labels)

    assert main([*small_race, "--resume", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["race"]
    assert found["seeds"] == [0, 1] and [one["label"] for one in found["candidates"]] == labels
    assert found["taken"] == taken
    assert found["best"] in labels
    assert [one["chosen"] for one in found["candidates"]] == [True] + [False] * (len(labels) - 1)
    assert all(len(one["losses"]) == 2 and one["rounds"] >= 3 for one in found["candidates"])

    other = [*small_race]
    other[other.index("--local-steps") + 1] = "60,120"
    assert main([*other, "--resume"]) == 2
    assert "which is not on the shortlist of this plan" in capsys.readouterr().err


def expected(choice: Pick, one: Candidate) -> float:
    found = choice.loss(one)
    assert found is not None
    return found.nats


def test_a_race_that_ends_as_the_plan_expects_it_to_leaves_the_choice_and_one_that_does_not_may_change_it() -> None:
    planned = LossScale(134_000_000, 8, 20 * 134e6, 32_000, steps=20 * 134e6 / 8192)
    raced = LossScale(139_584, 8, 20 * 139_584, 256, steps=20 * 139_584 / 2048)
    long, short = (
        Candidate("DiLoCo", "bf16", None, (steps,) * 8, 1.0, 1.0, 0.9, seconds)
        for steps, seconds in ((120, 1.0), (15, 1.25))
    )
    choice, candidates = pick([long, short], planned), {"long": long, "short": short}
    there = choice._replace(scale=raced)
    assert choice.best == long and expected(there, short) < expected(there, long), "which has few rounds in the race"
    chance = {"long": (0.0, 0.01, -0.01), "short": (0.01, -0.01, 0.0)}
    losses = {label: [1.5 + expected(there, one) + nats for nats in chance[label]] for label, one in candidates.items()}
    assert standing(losses).best == "short"
    found = carried_over(losses, candidates, choice, raced)
    above = expected(choice, short) - expected(choice, long)
    assert found.best == "long" and found.above["short"].mean == pytest.approx(above)
    worse = {**losses, "long": [nats + 1.0 for nats in losses["long"]]}
    again = carried_over(worse, candidates, choice, raced)
    assert again.best == "short" and again.decided
    assert again.above["long"].mean == pytest.approx(planned.gap / raced.gap - above)


def test_minutes_in_which_nothing_fits_are_refused_with_what_it_would_take(
    small_race: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small_race[small_race.index("--race") + 1] = "1e-6"
    assert main(small_race) == 2
    printed, output = capsys.readouterr()
    assert not printed, "a plan that nobody asked for alone"
    assert "--race got 1e-06 minutes, and 3 seeds of" in output
    assert re.search(r"candidates take about (\d+) minutes? here, .* give \1\n", output), (
        "its local steps are the fewest"
    )
    assert not Path("runs").exists()


def test_a_race_to_resume_must_exist(planned: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --resume out to begin a race"):
        race.opened_race(tmp_path, planned[2])
