"""The choice of a plan, on the network of the first screen and others, and its report."""

import json
import math
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli import main
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network, read_network
from gossamer.run.config.resolve import run_faults
from gossamer.run.config.run_file import parse
from gossamer.run.planning.candidates import price_recipes
from gossamer.run.planning.choice import (
    PLAN_HEADINGS,
    Candidate,
    _with_more_steps,  # pyright: ignore[reportPrivateUsage]
    doublings_that_help,
    hours_text,
    leading,
    notes_on,
    pick,
    plan_rows,
)
from gossamer.run.planning.expected_loss import LossScale
from gossamer.run.planning.measured_losses import DRIFT, MEASURED_PARAMETERS, measured_schedule
from gossamer.run.planning.plan import PlanSettings, RunPlan, bits_per_parameter, plan, slow_teams
from gossamer.run.planning.planned_run_file import run_toml

ROOT = Path(__file__).parents[3]
BITS = bits_per_parameter(["bf16", "int8", "fp4"], 192_960)
SCALE = LossScale(139_584, 8, 20 * 139_584, 256)


def one(method: str, steps: int, seconds: float, codec: str = "exact", **more: Any) -> Candidate:
    return Candidate(method, codec, None, (steps,) * 8, 1.0, 1.0, 0.9, seconds, **more)


def test_the_lowest_loss_in_the_time_is_taken_and_waiting_counts_as_loss() -> None:
    data_parallel, diloco = one("data parallel", 1, 1.0), one("DiLoCo", 30, 0.9)
    assert pick([data_parallel, diloco], SCALE).best == data_parallel
    waits = one("data parallel", 1, 20.0)
    found = pick([waits, diloco], SCALE)
    assert found.best == diloco and not found.undecided
    above = found.above_best(waits)
    assert above is not None and above.nats > above.half


def test_hours_and_workers_are_written_without_an_exponent_and_without_a_range_of_one_number() -> None:
    choice = pick([varies := one("DiLoCo", 30, 1.0, spread_s=0.5)], SCALE, hours=1000.0)
    assert hours_text(choice, varies) == "1,000 ± 500"
    fewer = Candidate("DiLoCo", "bf16", None, (5, 5, 3, 3, 3, 3), 1.0, 1.0, 0.9, 1.0)
    assert (
        fewer.fewer == "4 workers take 3"
        and fewer._replace(local_steps=(5000, 2, 3, 3, 3000)).fewer == "4 workers take 2 to 3,000"
    )


def test_a_loss_after_more_than_ten_times_the_tokens_of_the_plan_has_words_and_no_number() -> None:
    choice = pick([slow := one("DiLoCo", 30, 1e6)], SCALE)
    rows = plan_rows(choice, [slow, *(one("one machine alone", 1, 1e6 / times) for times in (9.9, 10.1, 1e9))])
    losses, stands = zip(*(row[-2:] for row in rows), strict=True)
    assert stands[0] == "chosen" and losses[1].startswith("-") and " ± " in stands[1]
    assert (losses[2:], stands[2:]) == (("not foretold",) * 2, ("lower",) * 2)
    assert choice.too_far(one("DiLoCo", 30, 1.0)) and not choice.too_far(slow)


def test_a_loss_far_from_all_measured_local_steps_has_a_mark_and_is_not_taken_for_it() -> None:
    far, near = one("streaming_diloco", 240, 1.0, "fp4"), one("streaming_diloco", 120, 1.0, "fp4")
    choice = pick([one("DiLoCo", 30, 1.0), far, near, one("DiLoCo", 480, 1.0)], SCALE)
    rows = [row[-2] for row in plan_rows(choice, [far, near, one("DiLoCo", 480, 1.0), one("DiLoCo", 960, 1.0)])]
    assert [row.endswith("*") for row in rows] == [True, False, False, True] and choice.carried_from(far) == 30
    (note,) = notes_on(choice, [far, near])
    assert note.startswith("*: carried from the nearest") and note.endswith(": streaming_diloco with 30")
    assert not notes_on(choice, [near]), "nothing to explain"
    assert choice.best == one("DiLoCo", 30, 1.0) and pick([far, near], SCALE).best == near


def test_local_steps_far_from_all_measured_ones_in_too_few_rounds_are_taken_only_if_significantly_lower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e5\ndownlink_bps = 1e5\nlatency_s = 0.02\nstep_s = 0.5\n")
    words = ["plan", str(file), "--workers", "2", "--model", "134m", "--local-steps", "480,5000,50000"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("take one machine alone") and "50,000" in printed, "17 rounds of 50,000 local steps"
    assert "a row with * and fewer rounds than were measured is taken only if" in printed
    words[-1] = "480,50000"
    assert main([*words, "--method", "diloco"]) == 0, "with 480 it takes thirteen times as long"
    assert capsys.readouterr().out.startswith("asked for: DiLoCo with 50,000 local steps")


def test_more_local_steps_are_not_advised_where_they_would_not_be_taken() -> None:
    at = LossScale(85_347_072, 2, 20 * 85_347_072, 256, steps=20 * 85_347_072 / 2048)
    alone = Candidate("one machine alone", "exact", None, (1,), 0.5, 0.0, 1.0, 0.5 / 1024)
    steps, round_s = 20_000, 10_000 + 9_000.0
    pair = Candidate(
        "DiLoCo", "fp4", None, (steps, steps), round_s, 1.0, 10_000 / round_s, round_s / (2 * steps * 1024)
    )
    choice, more = pick([alone, pair], at), _with_more_steps(pair, 2)
    assert choice.best == alone and choice.is_guess(more) and not choice.is_guess(pair)
    assert (above := choice.above_best(more)) is not None and above.nats < -0.005 and above.open
    assert pick([alone, pair, more], at).best == alone and doublings_that_help(choice, [alone, pair], steps) is None


def test_no_number_is_printed_for_a_loss_no_lower_than_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e5\ndownlink_bps = 1e5\nstep_s = 0.5\n")
    words = ["plan", str(file), "--workers", "2", "--model", "134m", "--hours", "0.001", "--local-steps", "480"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^DiLoCo .* not foretold +no whole round$", printed, re.MULTILINE), printed
    assert "or no lower than without any training" in printed
    assert max(map(float, re.findall(r" \+(\d+\.\d{3})\b", printed)), default=0.0) < math.log(256)


def test_the_json_of_a_plan_says_from_which_local_steps_a_loss_is_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e7\ndownlink_bps = 1e7\nstep_s = 0.1\n")
    words = ["plan", f"{file}", "--method", "gossip", "--workers", "4", "--model", "0.2m", "--local-steps"]
    assert main([*words, "60,240", "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    carried = {tuple(one["local_steps"]): one["carried_from"] for one in candidates if one["method"] == "gossip"}
    assert carried == {(60,) * 4: None, (240,) * 4: 30}
    assert main([*words, "240"]) == 0
    assert "*: carried from the nearest local steps that were measured" in capsys.readouterr().out


def test_a_plan_on_a_link_of_25_bits_a_second_foretells_no_loss_of_one_machine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.toml").write_text("uplink_bps = 25\ndownlink_bps = 25\nstep_s = 0.1\n")
    words = ["plan", f"{tmp_path / 'slow.toml'}", "--method", "diloco", "--workers", "8", "--model", "1m"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^one machine alone .* not foretold +lower$", shown, re.MULTILINE), shown
    assert "not foretold: after more than 10 times the tokens of the plan" in shown
    assert main([*words, "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    (alone,) = [one for one in candidates if one["method"] == "one machine alone"]
    assert (alone["loss"], alone["above_choice"]) == (None, None) and alone["tokens"] > 0
    assert any(one["loss"] is not None for one in candidates)


def test_of_candidates_that_are_as_low_the_fastest_is_taken_and_of_nearly_as_fast_ones_the_simplest() -> None:
    two_peers, everyone = one("GASLoC 2-Peer", 120, 1.0), one("DiLoCo", 120, 1.04)
    assert pick([two_peers, everyone], SCALE).best == everyone, "fewer parts"
    exact, cast, four = (
        one("DiLoCo", 30, seconds, codec) for seconds, codec in ((1.0, "exact"), (0.9, "bf16"), (0.88, "fp4"))
    )
    assert pick([exact, cast, four], SCALE).best == cast, "a cast has no part of its own"


def test_where_nothing_is_decided_the_lowest_expectation_is_taken_as_it_knows_the_time_already() -> None:
    few, many = one("GASLoC 1-Peer", 60, 1.0), one("GASLoC 1-Peer", 120, 0.85)
    found = pick([few, many], SCALE)
    above = found.above_best(many)
    assert found.best == few and found.undecided == (many,) and above is not None and above.open and above.nats > 0.005


def test_doubt_alone_does_not_choose_the_faster() -> None:
    data_parallel, lossy = one("data parallel", 1, 1.0), one("DiLoCo", 5, 0.9, "fp4")
    found = pick([data_parallel, lossy], SCALE)
    assert found.best == data_parallel and not found.undecided


def test_a_codec_that_was_not_measured_is_shown_and_not_chosen_unless_there_is_nothing_else() -> None:
    lossy, exact = one("GASLoC 1-Peer", 30, 0.1, "int4"), one("GASLoC 1-Peer", 30, 1.0)
    found = pick([lossy, exact], SCALE)
    assert found.best == exact and [row[-2:] for row in plan_rows(found, [lossy])] == [("not measured", "")]
    assert pick([lossy, lossy._replace(seconds_per_token=0.05)], SCALE).best.seconds_per_token == 0.05


def test_a_plan_that_keeps_all_says_so_where_one_machine_alone_is_expected_to_end_lower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e4\ndownlink_bps = 1e4\nstep_s = 0.3\n")
    words = ["plan", str(file), "--workers", "2", "--model", "0.2m", "--local-steps", "5", "--codec", "bf16"]
    assert main([*words, "--keep-all"]) == 0
    kept = capsys.readouterr().out
    assert "one machine alone is expected to end lower, and is not taken, as --keep-all leaves nobody out" in kept
    assert main(words) == 0
    free = capsys.readouterr().out
    assert (
        "take one machine alone" in free and "text that only worker 1 has is lost" in free and "not taken" not in free
    )


def test_a_plan_that_keeps_all_names_streaming_diloco_without_some_where_that_is_lowest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text(
        "uplink_bps = 1e9\ndownlink_bps = 1e9\nlatency_s = 0.01\nstep_s = 0.3\n[sites.rest]\nworkers = [1, 2, 3, 4, 5]\n"
        "[sites.hub]\nworkers = [0]\nuplink_bps = 1e7\ndownlink_bps = 1e7\n"
    )
    assert main(["plan", str(file), "--model", "134m", "--local-steps", "15,480", "--codec", "int8", "--keep-all"]) == 0
    kept = capsys.readouterr().out
    assert "streaming_diloco less 0 is expected to end lower, and is not taken, as --keep-all leaves nobody out" in kept


def test_the_recommendation_of_data_parallelism_says_whose_hours_it_has_and_the_plan_how_to_repeat_less_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e8\nlatency_s = 0.01\nstep_s = 0.3\n")
    words = ["plan", str(file), "--workers", "4", "--model", "1m", "--local-steps", "5", "--codec", "bf16"]
    assert main([*words, "--tokens", "60e6"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("take data parallel on all 4 workers, bf16, as DDP runs it: ")
    assert "give more of it by --data, or plan for fewer --tokens or --hours" in output and "run.steps" not in output


@pytest.mark.parametrize(
    ("option", "words"),
    [
        *[(one, "is 0.0 but must be a number above 0") for one in ("--tokens", "--hours", "--step-s", "--peak-flops")],
        *[(one, "is 0.0 but must be a number above 0") for one in ("--mfu", "--memory-bytes")],
        *[(one, "is 0 but must be a whole number from 1") for one in ("--vocab", "--seq-len", "--batch-size")],
        ("--local-steps", "local_steps is [0] but must be a list of whole numbers from 1"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_option_before_the_network_is_read(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "nowhere.toml", option, "0"]) == 2
    assert (words if option == "--local-steps" else f"{option} {words}") in capsys.readouterr().err


def test_a_run_file_that_cannot_be_written_is_refused_before_the_network_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "nowhere.toml", "--out", "/proc/run.toml"]) == 2
    assert "'/proc/run.toml' could not be written" in capsys.readouterr().err


def test_a_plan_of_a_large_model_says_what_a_replica_takes_and_what_cuts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e9\ndownlink_bps = 1e9\nstep_s = 9.0\n")
    words = ["plan", str(file), "--workers", "2", "--local-steps", "30", "--codec", "bf16", "--method", "diloco"]
    for size, large in (("7b", True), ("350m", False)):
        assert main([*words, "--model", size]) == 0
        assert ("GB for weights, gradients and AdamW" in capsys.readouterr().out) is large


def test_data_parallelism_casts_its_gradients_where_others_may_compress() -> None:
    network = Network(uplink_bps=1e8, downlink_bps=1e8, step_s=0.5)
    for codecs, there in (({"exact": 32.0}, {"exact"}), ({"exact": 32.0, "fp4": 4.06}, {"exact", "bf16"})):
        settings = PlanSettings(workers=4, local_steps=(30,), codecs=codecs)
        found = plan(network, ModelConfig(size="0.2m"), settings)
        assert {one.codec for one in found.candidates if one.method == "data parallel"} == there
        assert {one.codec for one in found.candidates if one.method == "DiLoCo"} == {*codecs}


def test_streaming_diloco_among_many_says_in_one_sentence_why_it_has_no_price() -> None:
    among = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=0.5)
    found = plan(among, ModelConfig(size="0.2m"), PlanSettings(workers=64, local_steps=(30,)))
    why = "with 64 workers, a round of so many workers and messages takes too long to price"
    assert price_recipes(found, "streaming_diloco").unpriced == {"streaming_diloco": why}


def test_the_choice_does_not_depend_on_the_goal_and_its_figures_do() -> None:
    some = [one("DiLoCo", steps, 1 + 5 / steps) for steps in (5, 15, 30, 60, 120)]
    for_tokens, for_hours = pick(some, SCALE), pick(some, SCALE, hours=2.0)
    assert for_tokens.best == for_hours.best
    assert for_tokens.tokens == SCALE.tokens and for_tokens.hours_of(for_tokens.best) == pytest.approx(for_tokens.hours)
    assert for_hours.hours == 2.0 and for_hours.tokens == pytest.approx(7200 / for_hours.best.seconds_per_token)
    assert for_hours.hours_to_loss(for_hours.best) > 2.0, "it loses something, and has to make up for it"


def test_what_ends_no_round_in_the_time_is_taken_only_if_nothing_does() -> None:
    whole, longer = one("DiLoCo", 60, 1.0), one("DiLoCo", 30, 0.9)._replace(round_s=100.0)
    for found in (pick([whole, longer], SCALE, hours=50 / 3600), pick([whole, longer], SCALE._replace(tokens=50.0))):
        assert found.best == whole and not found.whole_round(longer) and not found.undecided
        assert plan_rows(found, [longer])[0][-1] == "no whole round"
    assert pick([whole, longer], SCALE, hours=100 / 3600).best == longer
    only = pick([longer], SCALE, hours=0.01)
    assert only.best == longer and not only.whole_round(longer)


SLOW = Network(uplink_bps=(*[25e6] * 7, 2.5e6), downlink_bps=25e6, latency_s=0.02, step_s=0.5)


def made(network: Network = SLOW, **options: Any) -> RunPlan:
    return plan(network, ModelConfig(size="0.2m"), PlanSettings(**{"workers": 8, "codecs": BITS, **options}))


def test_data_parallelism_wins_where_its_price_says_so_and_local_steps_where_links_are_slow() -> None:
    for bandwidth_bps, wins in ((1e12, True), (1e9, True), (1e7, True), (1e6, False), (1e5, False)):
        found = made(Network(uplink_bps=bandwidth_bps, downlink_bps=bandwidth_bps, latency_s=0.02, step_s=0.5))
        assert (found.best.method == "data parallel") == wins and not found.best.left_out, bandwidth_bps
    steps = [made(Network(uplink_bps=bps, downlink_bps=bps, step_s=0.5)).best.full_steps for bps in (1e9, 1e7, 1e6)]
    assert steps == sorted(steps)


@pytest.mark.full
@pytest.mark.parametrize("network", [SLOW, Network(uplink_bps=1e7, downlink_bps=1e7, step_s=0.5)])
def test_no_pick_changes_with_the_seed(network: Network) -> None:
    picks = {
        (found.method, found.codec, found.full_steps, found.left_out)
        for found in (made(network, seed=k).best for k in range(3))
    }
    assert len(picks) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["slow_in_turn", "strangers"])
def test_no_pick_on_a_committed_network_changes_with_the_seed_of_its_matchings_and_its_jitter(name: str) -> None:
    network = read_network(ROOT / "configs" / "networks" / f"{name}.toml")
    found = [made(replace(network, seed=k), seed=k, local_steps=(5, 30, 120)).best for k in range(3)]
    assert len({(one.name, one.codec, one.full_steps) for one in found}) == 1


def test_a_plan_may_let_slow_workers_take_fewer_local_steps_with_a_mean_too_and_says_who() -> None:
    found = made(keep_all=True)
    uneven = [one for one in found.candidates if one.name == "DiLoCo uneven"]
    assert uneven and all(one.missing > 0 and one.local_steps[7] == min(one.local_steps) for one in uneven)
    assert all(set(one.local_steps[:7]) == {one.full_steps} for one in uneven)
    one = next(one for one in uneven if one.full_steps == 15)
    even = next(
        other for other in found.candidates if (other.name, other.codec, other.full_steps) == ("DiLoCo", one.codec, 15)
    )
    assert one.round_s < even.round_s, "the slow uplink begins to send earlier"
    assert one.fewer == f"worker 7 takes {one.local_steps[7]}"
    assert f"# Worker 7 takes {one.local_steps[7]} of 15 local steps" in run_toml(found, one)
    assert tomllib.loads(run_toml(found, one))["run"]["local_steps"] == [*one.local_steps]
    all_alike = made(Network(uplink_bps=1e7, downlink_bps=1e7, step_s=0.5))
    assert not any("uneven" in one.name for one in all_alike.candidates)


@pytest.mark.parametrize("codec", ["exact", "fp4"])
def test_a_mean_of_workers_with_fewer_local_steps_is_expected_to_lose_what_their_mean_number_of_steps_does(
    codec: str,
) -> None:
    scale = LossScale(139_584, 4, 20 * 139_584, 256)
    one = made(keep_all=True).candidates[0]._replace(method="DiLoCo", codec=codec, local_steps=(120, 120, 60, 20))
    all_alike = one._replace(local_steps=(80,) * 4)
    own, alike = one.penalty(scale), all_alike.penalty(scale)
    assert own is not None and alike is not None and own._replace(missing=0.0) == alike
    assert own.missing == pytest.approx(scale.gap / 3), "and the interval knows that nobody measured it"


def test_gossip_whose_late_workers_take_fewer_local_steps_is_expected_to_lose_what_all_of_them_do() -> None:
    scale = LossScale(139_584, 4, 20 * 139_584, 256)
    one = (
        made(keep_all=True)
        .candidates[0]
        ._replace(method="GASLoC 2-Peer", codec="exact", local_steps=(120, 120, 60, 20))
    )
    own, alike = one.penalty(scale), one._replace(local_steps=(120,) * 4).penalty(scale)
    assert own is not None and alike is not None and own._replace(missing=0.0) == alike


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--loss", "3"], "--loss got 3 with neither --anchor nor --law"),
        (["--anchor", "3@1e9"], "--loss got nothing with --anchor"),
        (["--loss", "3", "--anchor", "3@1e9", "--law", "law.toml"], "with --anchor and --law"),
        (["--loss", "3", "--law", "law.toml"], "the law 'law.toml' is not a file"),
        (["--race", "0"], "--race got 0 minutes"),
        (["--race", "1", "--jobs", "0"], "--jobs got 0"),
        (["--race", "1", "--method", "acco"], "--race got 1 minute and"),
        (["--race", "1", "--memory-bytes", "1e9"], "trains replicas in one piece"),
        (["--race", "1", "--method", "diloco"], "a race compares methods"),
        (["--step-s", "2"], "--step-s got 2, but 'configs/networks/slow_uplink.toml' has step_s"),
        (["--peak-flops", "1e12"], "--peak-flops got 1e+12, but"),
        (["--local-steps", "9" * 20], "whole numbers from 1 to 1000000000000"),
        (["--vocab", "9" * 20], "must be a whole number from 1 to 1000000000000"),
        (["--adapt"], "--adapt was given, which is of a run file, and no --out"),
        (["--resume"], "--resume was given and --race was not"),
        (["--watch"], "--watch was given and --race was not"),
    ],
)
def test_goals_and_races_that_cannot_be_are_refused_in_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", "configs/networks/slow_uplink.toml", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_a_loss_that_a_method_never_reaches_by_the_law_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "law.toml").write_text("floor = 2.0\nscale = 200.0\npower = 0.5\ntokens = [1e5, 1e9]\n")
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e6\ndownlink_bps = 1e6\nstep_s = 0.1\n")
    words = ["plan", str(file), "--workers", "4", "--model", "0.2m", "--law", str(tmp_path / "law.toml")]
    words += ["--method", "diloco", "--local-steps", "120"]
    hours = {}
    for loss in ("2.1", "3.3"):
        assert main([*words, "--loss", loss]) == 0
        sentence = f"loss {loss} by the law: {'never' if loss == '2.1' else 'after about '}"
        assert sentence in capsys.readouterr().out
        assert main([*words, "--loss", loss, "--json"]) == 0
        hours[loss] = json.loads(capsys.readouterr().out)["hours_to_loss"]
    assert hours["2.1"] is None and hours["3.3"] > 0


@pytest.mark.parametrize(("goal", "ends"), [("0.02", True), ("1e-9", False)])
def test_a_run_is_not_longer_than_its_hours_unless_no_method_ends_a_round_in_them(
    goal: str, ends: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e7\ndownlink_bps = 1e7\nstep_s = 0.3\n")
    out = tmp_path / "run.toml"
    words = ["--workers", "4", "--model", "0.2m", "--local-steps", "5,480", "--hours", goal, "--out", str(out)]
    assert main(["plan", str(file), *words]) == 0
    assert ("no method ends a round in that time" in capsys.readouterr().out) == (not ends)
    document = tomllib.loads(out.read_text())
    steps = document["run"]["steps"]
    assert steps % document["run"]["local_steps"] == 0 and (0.3 * steps <= 3600 * float(goal)) == ends


@pytest.mark.full
def test_on_the_slow_uplink_the_slow_worker_is_dropped_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.toml"
    words = ["plan", "configs/networks/slow_uplink.toml", "--model", "0.2m", "--out", str(out)]
    monkeypatch.chdir(ROOT)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "chosen: dropping worker 7 (slowest): data parallel" in printed
    assert "text that only worker 7 has is lost" in printed
    text = out.read_text()
    document = tomllib.loads(text)
    assert "# Without worker 7" in text and "# Best at 1 local step, " in text and "inner.lr = 0.004" in text
    assert document["inner"] == {**measured_schedule(document["run"]["steps"]), "lr": 0.004}, (
        "as the losses were measured"
    )
    assert document["workers"] == 7 and document["network"]["planned"]["uplink_bps"] == [25e6] * 7
    assert not run_faults(parse(document)) and document["rule"] == {"name": "data_parallel"}
    assert main([*words[:4], "--keep-all", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["chosen"]["left_out"] == [] and len(kept["chosen"]["local_steps"]) == 8
    assert all(one["left_out"] == [] or one["method"] == "one machine alone" for one in kept["candidates"])


def test_beside_one_slow_uplink_what_is_not_decided_is_near_and_gossip_is_taken_with_everybody() -> None:
    found, kept = made(), made(keep_all=True)
    best, all_eight = found.choice.loss(found.best), kept.choice.loss(kept.best)
    assert found.best.name == "data parallel less 7" and best is not None and best.nats == 0
    assert not found.choice.undecided, "backward hides most of an all-reduce of the other seven"
    assert all_eight is not None and str(all_eight) == "+0.105 ± 0.073"
    assert (kept.best.name, kept.best.codec) == ("GASLoC 2-Peer", "int8") and kept.best.local_steps == (*[5] * 7, 2)
    assert DRIFT == {"parameters": 0.29, "tokens": 0.72, "workers": 0.81}


def test_undecided_candidates_are_listed_by_method_for_any_number_of_sets_of_workers_left_out() -> None:
    best, others = one("DiLoCo", 30, 1.0), [one("DiLoCo", 30, 1.0, left_out=gone) for gone in ((7,), (6, 7), (5, 6, 7))]
    gossip = one("GASLoC 1-Peer", 30, 1.0, left_out=(7,))
    found = pick([best], SCALE)
    assert found._replace(undecided=(*others, gossip)).undecided_in_words == (
        "DiLoCo without some workers in 3 ways, GASLoC 1-Peer less 7"
    )
    assert found._replace(undecided=(one("DiLoCo", 60, 1.0),)).undecided_in_words == "DiLoCo with other settings"


def test_a_table_has_at_most_eight_rows_the_choice_first_and_always_one_machine_and_data_parallelism() -> None:
    found = made(tokens=1e12)
    shown = leading(found.choice, found.candidates)
    assert len({one.name for one in shown}) == len(shown) == 8 and shown[0] == found.best
    assert {"one machine alone", "data parallel"} <= {one.name for one in shown}
    nats = [above.nats for one in shown if (above := found.choice.above_best(one)) is not None]
    assert nats == sorted(nats) and len(nats) == 8, "in the order of what is expected"
    rows = [PLAN_HEADINGS, *plan_rows(found.choice, shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    assert sum(widths) + 2 * len(widths) <= 125, rows
    for row, one in zip(rows[1:], shown, strict=True):
        above = found.choice.above_best(one)
        assert above is not None and not any("~" in cell for cell in row)
        assert one == found.best or (row[-1] == "cannot tell apart") == above.open, row


@pytest.mark.parametrize(
    ("network", "left_out"),
    [
        (SLOW, (7,)),
        (Network(uplink_bps=(2.5e6, *[25e6] * 6, 2.5e6), downlink_bps=25e6, step_s=0.5), (0, 7)),
        (Network(uplink_bps=25e6, downlink_bps=25e6, step_s=0.5), ()),
        (Network(uplink_bps=25e6, downlink_bps=25e6, step_s=(*[0.5] * 7, 0.52)), ()),
        (Network(uplink_bps=(*[25e6] * 4, *[2.5e6] * 4), downlink_bps=25e6, step_s=0.5), (4, 5, 6, 7)),
    ],
    ids=["one is slow", "two are slow", "all alike", "hardly slower", "half are slow"],
)
def test_only_workers_that_hold_the_others_up_by_far_may_be_dropped(
    network: Network, left_out: tuple[int, ...]
) -> None:
    assert max(slow_teams(network, 8, 192_960), key=len, default=()) == left_out


FAST = {"uplink_bps": 1e9, "downlink_bps": 1e9, "latency_s": 0.001, "step_s": 1.0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"uplink_bps": (*[1e9] * 7, 8.9e6)}, {"uplink_bps": (*[1e9] * 7, 9.2e6)}),
        ({"step_s": (*[1.0] * 6, 10.01, 100.0)}, {"step_s": (*[1.0] * 6, 9.99, 100.0)}),
        ({"latency_s": (*[0.001] * 7, 3.0)}, {"latency_s": (*[0.001] * 7, 1.0)}),
        ({"step_s": (*[1.0] * 7, 1.2)}, {"step_s": (*[1.0] * 7, 1.1)}),
        ({"step_s": tuple(1.09**k for k in range(8))}, {"step_s": (*(1.09**k for k in range(7)), 1.5)}),
    ],
    ids=["an uplink", "the second slowest", "a latency", "hardly slower", "each is a little slower"],
)
def test_a_worker_that_gets_faster_never_makes_the_pick_worse(slower: dict[str, Any], faster: dict[str, Any]) -> None:
    def found(**links: Any) -> float:
        """The expected loss of the pick but for what all picks have in common."""
        made_ = made(Network(**{**FAST, **links}), rounds=8)
        own = made_.best.penalty(made_.choice.scale)
        assert own is not None
        return own.nats + made_.choice.scale.per_e_fold * math.log(made_.best.seconds_per_token)

    assert found(**faster) <= found(**slower) + 0.005, "what the plan gives for a faster or simpler one"


@pytest.mark.parametrize("goal", [{}, {"tokens": 4e7}, {"hours": 2.0}])
def test_a_worker_that_is_left_out_changes_nothing_for_the_workers_that_train(goal: dict[str, float]) -> None:
    four = made(Network(uplink_bps=2.5e5, downlink_bps=25e6, step_s=(0.5,) * 4), workers=4, **goal).choice
    useless = Network(uplink_bps=(*[2.5e5] * 4, 1e4), downlink_bps=25e6, step_s=(*[0.5] * 4, 500.0))
    five = made(useless, workers=5, **goal).choice
    assert five.best.left_out == (4,) and five.best._replace(left_out=()) == four.best
    expected, with_it = four.loss(four.best), five.loss(five.best)
    assert expected is not None and with_it is not None
    assert (with_it.nats, five.hours, five.tokens) == pytest.approx((expected.nats, four.hours, four.tokens))


def test_rounds_of_a_mean_are_those_that_fit_however_few_steps_its_slow_workers_take() -> None:
    even = Candidate("DiLoCo", "exact", None, (30,) * 8, 100.0, 1.0, 0.9, 1.0)
    uneven = even._replace(local_steps=(*[40] * 4, *[20] * 4))
    in_hours = SCALE._replace(steps=300.0, seconds=1000.0)
    for scale in (in_hours, in_hours._replace(seconds=None)):
        a, b = even.penalty(scale), uneven.penalty(scale)
        assert a is not None and b is not None and a.few_rounds > 0
        assert b.few_rounds == pytest.approx(a.few_rounds)


def test_the_workers_left_out_depend_on_the_length_of_a_round() -> None:
    both = Network(uplink_bps=(*[1e9] * 6, 1e6, 1e9), downlink_bps=1e9, step_s=(*[1.0] * 7, 3.0))
    assert slow_teams(both, 8, 192_960) == [(6,), (6, 7), (7,)]


def test_a_planned_run_has_the_outer_settings_of_the_nearest_measured_local_steps() -> None:
    found = made(local_steps=[3, 100], keep_all=True)
    rules: dict[tuple[str, int, str], dict[str, Any]] = {}
    for candidate in found.candidates:
        document = tomllib.loads(run_toml(found, candidate))
        assert candidate.codec == "fp4" or not run_faults(parse(document)), candidate
        rules[candidate.method, candidate.full_steps, candidate.codec] = document["rule"]
    assert rules["data parallel", 1, "bf16"] == {"name": "data_parallel"}
    assert rules["DiLoCo", 100, "exact"] == {"name": "diloco", "lr": 1.0, "momentum": 0.7}
    assert rules["GASLoC 2-Peer", 3, "bf16"] == {"name": "gasloc", "lr": 0.5, "momentum": 0.5}
    assert rules["GASLoC 1-Peer", 100, "int8"] == {"name": "gasloc", "lr": 1.0, "momentum": 0.5}, "as it was measured"
    assert rules["GASLoC 1-Peer", 100, "fp4"] == {"name": "anchored_gasloc", "lr": 1.0, "momentum": 0.5}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tokens", "1e9", "--hours", "3"], "--tokens and --hours were given, and a plan has one goal"),
        (["--loss", "3.0"], "a loss on your text is known only from what was measured there"),
        (["--anchor", "3.2@1e9"], "a loss on your text is known only from what was measured there"),
        (["--loss", "3.0", "--anchor", "3.2"], "must be LOSS@TOKENS"),
        (["--loss", "0.1", "--anchor", "3.2@1e9"], "too far from --anchor"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--hours", "-1"], "--hours is -1"),
    ],
)
def test_a_goal_that_cannot_be_is_refused_in_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = 1e9\ndownlink_bps = 1e9\nstep_s = 1.0\n")
    assert main(["plan", str(tmp_path / "net.toml"), "--workers", "4", "--model", "0.2m", *words]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and sentence in output, output


def test_two_goals_are_refused_before_torch_is_imported() -> None:
    words = ["plan", "configs/networks/two_sites.toml", "--tokens", "1e9", "--hours", "3"]
    program = f"import sys; from gossamer.cli import main; print(main({words}), 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["2", "False"] and "a plan has one goal" in ended.stderr


def test_a_loss_is_reached_by_way_of_what_data_parallelism_reached_on_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = 1e7\ndownlink_bps = 1e7\nstep_s = 0.5\n")
    words = ["plan", str(tmp_path / "net.toml"), "--workers", "4", "--model", "0.2m", "--json", "--method", "diloco"]
    needed = []
    for loss in ("1.5", "1.4"):
        assert main([*words, "--loss", loss, "--anchor", "1.5@4e6"]) == 0
        needed.append(json.loads(capsys.readouterr().out))
    assert needed[0]["tokens"] == pytest.approx(4e6) and needed[1]["tokens"] > 5e6
    assert needed[1]["hours_to_loss"] > needed[0]["hours_to_loss"] > needed[0]["hours"]


def test_pairs_of_an_odd_number_are_reported_as_not_measured_since_one_worker_has_no_partner() -> None:
    scale = LossScale(MEASURED_PARAMETERS, 8, 20 * MEASURED_PARAMETERS, 256)
    even = Candidate("GASLoC 1-Peer", "bf16", None, (30,) * 8, 20.0, 1e6, 0.9, 1e-4)
    odd = even._replace(local_steps=(30,) * 7, left_out=(7,))
    assert even.penalty(scale) is not None and odd.penalty(scale) is None
    assert odd._replace(method="GASLoC 2-Peer").penalty(scale) is not None
