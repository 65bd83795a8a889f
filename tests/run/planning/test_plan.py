"""Plans: what is expected of a run is what the run does, and what the command line says of it."""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.models.sizes import BottleneckConfig, ExpertsConfig, ModelConfig
from gossamer.network.links import Change, Network, Site, links_of, read_network
from gossamer.network.pricing import price
from gossamer.record.logs.trace import from_targets, read_trace
from gossamer.run.config.document import with_settings
from gossamer.run.config.recipes import recipes
from gossamer.run.config.resolve import run_faults as faults_of
from gossamer.run.config.run_file import parse
from gossamer.run.planning.candidates import PLANNED, SEVERAL, USUAL, price_recipes, recipe_toml
from gossamer.run.planning.check import examine_run
from gossamer.run.planning.plan import PlanSettings, RunPlan, matched_steps, plan
from gossamer.run.planning.planned_run_file import run_toml
from gossamer.run.simulated.simulate import simulate

TINY = ModelConfig(size="0.2m")
EVEN = Network(uplink_bps=25e6, downlink_bps=25e6, step_s=0.5)
CHANGING = replace(EVEN, changes=(Change(at_s=60.0, factor=0.5, worker=0),))
SLOW_UPLINK = Network(uplink_bps=(*[25e6] * 7, 2.5e6), downlink_bps=25e6, step_s=0.5)


def planned(network: Network, **options: Any) -> RunPlan:
    return plan(network, TINY, PlanSettings(**options))


def of(made: RunPlan, method: str, full_steps: int):
    return next(c for c in made.candidates if c.method == method and c.full_steps == full_steps)


def test_a_plan_says_what_the_formulas_say() -> None:
    made = planned(EVEN, workers=8, local_steps=[30])
    payload_bits = 32 * made.parameters
    ring, one, two = (of(made, method, 30) for method in ("DiLoCo", "GASLoC 1-Peer", "GASLoC 2-Peer"))
    assert ring.round_bytes == pytest.approx(7 / 4 * payload_bits / 8, rel=1e-4)
    assert ring.round_s == pytest.approx(15 + 7 / 4 * payload_bits / 25e6, rel=1e-4)
    assert one.round_bytes == payload_bits / 8
    assert one.round_s == pytest.approx(15 + payload_bits / 25e6)
    assert two.round_s == pytest.approx(15 + 2 * payload_bits / 25e6)
    assert one.utilisation == pytest.approx(15 / one.round_s)
    assert one.seconds_per_token == pytest.approx(one.round_s / (8 * 30 * 128 * 8))
    parallel = of(made, "data parallel", 1)
    assert parallel.unhidden_round_s == pytest.approx(0.5 + 7 / 4 * payload_bits / 25e6, rel=1e-4)


def test_a_straggler_takes_fewer_steps_and_no_worker_waits_for_it() -> None:
    network = Network(uplink_bps=(*[4.8e6] * 7, 4.8e5), downlink_bps=4.8e6, step_s=1.0)
    assert matched_steps(links_of(network, 8), 30, 1e6) == (*[30] * 7, 15)
    assert matched_steps(links_of(network, 8), 30, 2e6) == (*[30] * 7, 1)
    slow_link = of(planned(SLOW_UPLINK, local_steps=[60]), "GASLoC 1-Peer", 60)
    assert slow_link.local_steps == (*[60] * 7, 55)
    assert slow_link.round_s == pytest.approx(30 + 32 * 192_960 / 25e6, rel=0.01)


def test_a_slow_computer_takes_fewer_steps_and_a_shared_uplink_counts_in_parts() -> None:
    half = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=(1.0, 2.0, 1.0, 3.0))
    assert matched_steps(links_of(half, 4), 30, 0) == (30, 15, 30, 10)
    sites = {"a": Site(workers=(0, 1), uplink_bps=1.6e6), "b": Site(workers=(2, 3))}
    shared = Network(uplink_bps=8e6, downlink_bps=8e6, step_s=1.0, sites=sites)
    assert matched_steps(links_of(shared, 4), 30, 1e6) == (21, 21, 30, 30)


def test_somebody_takes_all_steps_where_the_fastest_computer_has_not_the_fastest_link() -> None:
    crossed = Network(uplink_bps=(8e5, 8e6), downlink_bps=8e6, step_s=(1.0, 1.2))
    assert matched_steps(links_of(crossed, 2), 30, 1e6) == (27, 30)


def test_a_planned_run_may_follow_the_clock_and_weigh_its_workers(tmp_path: Path) -> None:
    made = planned(SLOW_UPLINK, local_steps=[60])
    text = run_toml(made, of(made, "GASLoC 1-Peer", 60), adapt=True, weigh_steps=True)
    config = parse(tomllib.loads(text))
    assert config.run.adapt is True and config.run.weigh_steps and config.length.local_steps_of(7) == 55
    parallel = parse(tomllib.loads(run_toml(made, of(made, "data parallel", 1), adapt=True, weigh_steps=True)))
    assert not parallel.run.adapt and not parallel.run.weigh_steps
    assert parse(tomllib.loads(run_toml(made, of(made, "DiLoCo", 60)))).run.adapt is False


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(size="0.2m", bottleneck=BottleneckConfig(name="subspace", width=16)),
        ModelConfig(size="0.2m", experts=ExpertsConfig(count=4)),
    ],
)
def test_the_run_file_of_a_plan_has_the_tables_within_its_model(model: ModelConfig) -> None:
    made = plan(EVEN, model, PlanSettings(workers=4, local_steps=[30]))
    assert all(parse(tomllib.loads(run_toml(made, one))).model == model for one in made.candidates if not one.left_out)


def test_bits_per_parameter_scale_the_bytes_and_lossy_sums_come_back_in_bf16_where_that_is_less() -> None:
    made = planned(EVEN, workers=8, local_steps=[30], codecs={"exact": 32.0, "int8": 8.25, "topk2bit": 0.22})
    bytes_of = {(c.method, c.codec): c.round_bytes for c in made.candidates}
    assert bytes_of["GASLoC 1-Peer", "int8"] == pytest.approx(made.parameters * 8.25 / 8, abs=1)
    assert bytes_of["DiLoCo", "int8"] == pytest.approx(7 / 8 * made.parameters * 24.25 / 8, abs=7)
    assert bytes_of["DiLoCo", "topk2bit"] == pytest.approx(7 * made.parameters * 0.22 / 8, abs=7)
    written = {c.codec: tomllib.loads(run_toml(made, c))["codec"] for c in made.candidates if c.method == "DiLoCo"}
    assert written["int8"] == {"name": "int8", "back": "bf16"} and written["topk2bit"] == {"name": "topk2bit"}
    assert ("data parallel", "int8") not in bytes_of
    gossips = {c.codec: tomllib.loads(run_toml(made, c)) for c in made.candidates if c.method == "GASLoC 1-Peer"}
    assert {codec: run["rule"]["name"] for codec, run in gossips.items()} == {
        "exact": "gasloc",
        "int8": "gasloc",
        "topk2bit": "anchored_gasloc",
    }
    assert not any(faults_of(parse(run)) for run in gossips.values())


def test_the_step_time_follows_from_flops_where_nothing_gives_it() -> None:
    network = Network(uplink_bps=1e9, downlink_bps=1e9)
    made = planned(network, workers=2, peak_flops=1e12, mfu=0.5)
    assert made.network.step_s == 6 * made.parameters * 1024 / 5e11
    assert planned(network, workers=2, step_s=3.0).network.step_s == 3.0
    with pytest.raises(ConfigError, match="no step_s"):
        planned(network, workers=2)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: planned(EVEN), r"none is given beside its \['downlink_bps'.*; give the number of workers"),
        (lambda: planned(EVEN, workers=0), "a plan for 0 workers"),
        (lambda: planned(EVEN, workers=100_001), "from 1 to 100000; choose"),
        (lambda: planned(CHANGING, workers=2001), "from 1 to 2000 where links are shared or change; choose"),
        (lambda: planned(EVEN, workers=2, tokens=1e9, hours=2.0), "tokens is 1e[+]09 and hours is 2; give one of them"),
        (lambda: planned(EVEN, workers=2, local_steps=[0]), r"local_steps is \[0\]"),
        (lambda: planned(EVEN, workers=2, codecs={"x": 0.0}), "the size of codec 'x' is 0.0"),
        (lambda: planned(SLOW_UPLINK, workers=2), "uplink_bps lists 8 workers but the run has 2"),
        (lambda: matched_steps(links_of(Network(uplink_bps=1, downlink_bps=1, step_s=0), 2), 3, 1), "step_s goes down"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_with_a_sentence(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        act()


@pytest.mark.full
def test_a_hundred_thousand_workers_are_planned_and_their_gossip_costs_no_more_than_that_of_eight() -> None:
    few, many = (planned(EVEN, workers=n, local_steps=[30]) for n in (8, 100_000))
    assert of(many, "GASLoC 1-Peer", 30).round_s == pytest.approx(of(few, "GASLoC 1-Peer", 30).round_s)
    assert of(many, "GASLoC 2-Peer", 30).round_s == pytest.approx(of(few, "GASLoC 2-Peer", 30).round_s)
    payload_bits = 32 * many.parameters
    assert of(many, "DiLoCo", 30).round_s == pytest.approx(15 + 2 * payload_bits / 25e6, rel=0.05)
    assert of(many, "DiLoCo", 30).round_bytes == pytest.approx(2 * payload_bits / 8, rel=0.05)


def test_a_plan_is_the_same_whether_its_means_are_priced_one_message_at_a_time_or_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network(uplink_bps=(*[25e6] * 30, *[2e6] * 10), downlink_bps=25e6, latency_s=0.1, step_s=0.5, jitter=0.2)
    one_by_one = planned(network, local_steps=[30], keep_all=True)
    monkeypatch.setattr("gossamer.run.planning.plan._LIMIT_SHARED", 39)
    at_once = planned(network, local_steps=[30], keep_all=True)
    for a, b in zip(one_by_one.candidates, at_once.candidates, strict=True):
        assert a._replace(round_s=0, seconds_per_token=0, utilisation=0) == b._replace(
            round_s=0, seconds_per_token=0, utilisation=0
        )
        assert (a.round_s, a.utilisation) == pytest.approx((b.round_s, b.utilisation), rel=1e-9)


def test_two_workers_have_no_second_peer() -> None:
    methods = {c.method for c in planned(EVEN, workers=2).candidates}
    assert methods == {"data parallel", "DiLoCo", "GASLoC 1-Peer", "one machine alone"}


@pytest.mark.parametrize("method", ["data parallel", "DiLoCo", "GASLoC 2-Peer", "GASLoC 1-Peer"])
def test_the_run_that_was_planned_starts_as_it_is_and_sends_what_was_planned(tmp_path: Path, method: str) -> None:
    network = Network(uplink_bps=(25e6, 25e6, 25e6, 2.5e6), downlink_bps=25e6, step_s=0.5)
    made = planned(network, local_steps=[4], seq_len=16, batch_size=2)
    candidate = of(made, method, 1 if method == "data parallel" else 4)
    document = tomllib.loads(run_toml(made, candidate, steps=3))
    document["run"] |= {"eval_batches": 1}
    document["data"] |= {"max_bytes": 100_000}
    config = parse(document)
    assert config.run.steps == (3 if method == "data parallel" else 4)
    assert tuple(config.length.local_steps_of(i) for i in range(4)) == candidate.local_steps
    assert config.network["planned"] == network
    simulate(config, tmp_path / "run")
    sent = read_trace(tmp_path / "run").sent_bytes.mean() / config.length.rounds
    assert sent == pytest.approx(candidate.round_bytes, rel=1e-4)


def test_gossamer_plan_prints_a_table_and_writes_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = 4e6\ndownlink_bps = 4e6\nstep_s = 0.5\n")
    words = ["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--workers", "4", "--codec", "int8"]
    assert main([*words, "--all", "--out", str(tmp_path / "run.toml")]) == 0
    output = capsys.readouterr().out
    named = {line.removeprefix("no price: ").split()[0].rstrip(":") for line in output.splitlines() if line}
    assert recipes().keys() - PLANNED.keys() <= named, "every method has a price, or a reason why it has none"
    assert "no price: snoo: it is for 1 worker" in output and "…" not in output
    assert (
        "192,960 parameters, 4 workers with inner steps of 8 x 128 tokens, 3.859e+06 tokens, 20 a parameter" in output
    )
    first, *_ = output.splitlines()
    assert (
        first.startswith("take ")
        and " h for 3.86e+06 tokens, " in first
        and " times as fast as one machine alone" in first
    )
    assert "times as fast as data parallelism (" in first and "~" not in output
    assert "chosen: " in output and " local steps, int8 there and bf16 back: " in output and "not measured" in output
    assert "they are the same with any --model" in output
    assert parse(tomllib.loads((tmp_path / "run.toml").read_text())).workers == 4
    assert "it reads bytes" not in output
    words += ["--method", "diloco"]
    adaptive = tmp_path / "new" / "adaptive.toml"
    assert main([*words, "--adapt", "--weigh-steps", "--out", str(adaptive)]) == 0
    assert capsys.readouterr().out.startswith("asked for: DiLoCo")
    followed = parse(tomllib.loads(adaptive.read_text())).run
    assert followed.adapt is True and followed.weigh_steps
    assert main([*words, "--out", str(tmp_path / "run.toml")]) == 2
    assert "already exists" in capsys.readouterr().err
    for wrong in (
        ["--codec", "int9"],
        ["--local-steps", "a"],
        ["--local-steps", "{ 0 = 1, 2000 = 30 }"],
        ["--model", "900b"],
    ):
        assert main([*words, *wrong]) == 2
        assert capsys.readouterr().err.startswith("gossamer: ")


@pytest.mark.full
@pytest.mark.parametrize("method", ["diloco", "gasloc", "data_parallel", "streaming_diloco", "heloco"])
def test_the_run_file_of_a_plan_trains_on_its_tokens_or_for_its_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = [25e6, 5e6, 25e6]\ndownlink_bps = 25e6\nstep_s = 0.5\n")
    words = ["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--method", method, "--keep-all", "--json"]
    for goal in (["--tokens", "3e6"], ["--hours", "1"]):
        out = tmp_path / f"run{goal[0]}.toml"
        assert main([*words, *goal, "--out", str(out)]) == 0
        planned = json.loads(capsys.readouterr().out)
        length = examine_run(parse(tomllib.loads(out.read_text())))
        tokens = planned["tokens"]
        assert tokens - length.tokens / length.rounds < length.tokens <= tokens * 1.001, goal
        hours = length.rounds * planned["chosen"]["round_s"] / 3600
        assert (
            f"# {length.rounds:,} rounds, {hours:.4g} h: {length.tokens:.4g} tokens of all workers" in out.read_text()
        )


def test_a_plan_for_another_vocabulary_says_that_its_run_file_reads_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = 25e6\ndownlink_bps = 25e6\nstep_s = 0.5\n")
    words = ["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--workers", "4", "--vocab", "32000"]
    assert main([*words, "--out", str(tmp_path / "run.toml")]) == 0
    assert "it reads bytes; give data.tokenizer one of 32,000 tokens" in capsys.readouterr().out
    assert "# Planned for a vocabulary of 32,000, and reads bytes, which are 256" in (tmp_path / "run.toml").read_text()


@pytest.mark.full
def test_a_plan_takes_the_method_that_is_named_and_its_run_file_can_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = 1e6\ndownlink_bps = 1e6\nstep_s = 0.5\n")
    words = ["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--workers", "4", "--json"]
    chosen = {}
    for method in ("streaming_diloco", "sgp", "heloco", "gasloc"):
        out = tmp_path / f"{method}.toml"
        assert main([*words, "--method", method, "--local-steps", "15,30,60", "--out", str(out)]) == 0
        chosen[method] = json.loads(capsys.readouterr().out)["chosen"]
        document = tomllib.loads(out.read_text())
        assert not faults_of(parse(document)) and document["network"]["planned"]["step_s"] == 0.5
    assert chosen["gasloc"]["method"] == "GASLoC 1-Peer" and chosen["sgp"]["local_steps"] == [1] * 4
    streaming = chosen["streaming_diloco"]
    assert streaming["local_steps"] == [15] * 4, "the fewest in which its messages are hidden"
    own = {"workers": 4, "model": {"size": "0.2m"}, "run": {"local_steps": 15}}
    config = parse(with_settings(own, {"method": "streaming_diloco"}))
    assert streaming["round_bytes"] == pytest.approx(examine_run(config).sent_bytes)
    for method, sentence in (("gpa", "has no price here: it is for 1 worker"), ("sgpp", "did you mean 'sgp'")):
        assert main([*words, "--method", method]) == 2
        assert sentence in capsys.readouterr().err
    assert main([*words[:5], "2", "--method", "gasloc_2peer"]) == 2
    assert "GASLoC 2-Peer is not planned for 2 workers" in capsys.readouterr().err


@pytest.mark.full
def test_streaming_diloco_is_priced_without_a_slow_worker_too_and_its_run_file_leaves_that_one_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = [25e6, 25e6, 1e5, 25e6]\ndownlink_bps = 25e6\nstep_s = 0.5\n")
    out = tmp_path / "run.toml"
    words = ["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--method", "streaming_diloco"]
    assert main([*words, "--json", "--out", str(out)]) == 0
    planned = json.loads(capsys.readouterr().out)
    chosen = planned["chosen"]
    assert (chosen["method"], chosen["left_out"], chosen["local_steps"]) == ("streaming_diloco", [2], [5] * 3)
    run = parse(tomllib.loads(out.read_text()))
    assert run.workers == 3 and "# Without worker 2 of the planned network, whose own text is lost" in out.read_text()
    (network,) = examine_run(run).networks
    assert network.round_s == pytest.approx(chosen["round_s"], rel=0.02)
    assert main(words) == 0
    assert "dropping worker 2 (slowest): streaming_diloco" in capsys.readouterr().out
    (tmp_path / "net.toml").write_text(
        "uplink_bps = [25e6, 1e5, 1e5, 25e6, 25e6, 25e6]\ndownlink_bps = 25e6\nstep_s = 0.5\n"
    )
    assert main(words) == 0
    assert "dropping workers 1, 2 (slowest): streaming_diloco" in capsys.readouterr().out
    assert main([*words, "--json", "--keep-all"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["left_out"] == []


def test_streaming_diloco_takes_as_long_in_a_plan_as_in_the_check_of_its_run_file(tmp_path: Path) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 1e9\ndownlink_bps = 1e9\nstep_s = 0.25\n")
    words = [
        "plan",
        str(file),
        "--workers",
        "4",
        "--model",
        "10m",
        "--local-steps",
        "5",
        "--method",
        "streaming_diloco",
    ]
    assert main([*words, "--codec", "bf16", "--out", str(tmp_path / "run.toml")]) == 0
    text = (tmp_path / "run.toml").read_text()
    (round_s,) = re.findall(r"MB sent and ([\d.]+) s a round", text)
    assert examine_run(parse(tomllib.loads(text))).networks[0].round_s == pytest.approx(float(round_s), rel=1e-3)


def test_of_many_workers_streaming_diloco_is_priced_with_those_of_the_choice_alone() -> None:
    network = Network(uplink_bps=(*[25e6] * 16, 1e5), downlink_bps=25e6, step_s=0.5)
    made = plan(network, ModelConfig(size="0.2m"), PlanSettings(local_steps=(30,)))
    together = [one for one in made.candidates if one.method != "one machine alone"]
    assert {one.left_out for one in together} == {(), (16,)} and made.best.left_out == (16,)
    assert {one.left_out for one in price_recipes(made, USUAL).candidates} == {(16,)}


def test_a_sign_method_has_the_measured_learning_rate_when_small_and_that_of_its_recipe_when_large() -> None:
    for size, rate in ("0.2m", 0.004), ("134m", 0.0004):
        made = plan(EVEN, ModelConfig(size=size), PlanSettings(workers=4))
        (only,) = price_recipes(made, "distro", thorough=True).candidates
        loss = made.choice.loss(only)
        assert only.full_steps == 1 and loss is not None and loss.nats > 0
        assert parse(tomllib.loads(recipe_toml(made, only, name="x", run={}))).inner.lr == rate


def test_streaming_muon_and_sparse_messages_are_tried_with_all_local_steps_and_muon_has_separate_seconds() -> None:
    made = planned(EVEN, workers=4, local_steps=[15, 60], codecs={"bf16": 16.0, "fp4": 4.25})
    tried: dict[str, set[tuple[str, str | None, int]]] = {}
    for name in SEVERAL:
        found = price_recipes(made, name).candidates
        tried[name] = {(one.codec, one.back, one.full_steps) for one in found}
        known = {one.full_steps: own.nats for one in found if (own := one.penalty(made.choice.scale)) is not None}
        assert known[60] > known[15], "what DiLoCo loses more with more of them"
    assert tried["streaming_diloco"] == {("fp4", "bf16", 15), ("fp4", "bf16", 60)}
    assert tried["sparseloco"] == {("topk2bit", None, 15), ("topk2bit", None, 60)}
    assert tried["muloco"] == {
        (codec, back, steps) for codec, back in (("bf16", "bf16"), ("fp4", None)) for steps in (15, 60)
    }
    (muon,) = (one for one in price_recipes(made, "muloco").candidates if (one.codec, one.full_steps) == ("bf16", 60))
    (adamw,) = (one for one in made.candidates if (one.name, one.codec, one.full_steps) == ("DiLoCo", "bf16", 60))
    small, wide = [64 * 64] * 4, [64 * 192] * 3  # of each of three layers
    flops = 3 * sum(5 * (4 * 64 * size + 2 * 64**3) for size in (*small, *wide))
    more_s = 60 * 0.5 * flops / (6 * made.parameters * 1024)
    assert muon.round_s == pytest.approx(adamw.round_s + more_s, rel=1e-4) and more_s > 1
    written = parse(tomllib.loads(recipe_toml(made, muon, name="muon", run={})))
    assert written.codec.name == "bf16" and examine_run(written).networks[0].round_s == pytest.approx(muon.round_s)


def test_a_plan_says_when_more_local_steps_than_it_tried_would_end_lower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 3e6\ndownlink_bps = 3e6\nstep_s = 0.5\n")
    words = ["plan", str(file), "--workers", "8", "--model", "134m", "--method", "gasloc", "--local-steps"]
    for steps, helps in (("30,60", True), ("30,60,4000", False)):
        assert main([*words, steps]) == 0
        assert ("local steps, the most that were tried, are expected to end lower" in capsys.readouterr().out) == helps
    file.write_text("uplink_bps = 1e6\ndownlink_bps = 1e8\nlatency_s = 0.03\nstep_s = 0.3\n")
    words = ["plan", str(file), "--workers", "4", "--model", "134m", "--local-steps"]
    assert main([*words, "480"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("take one machine alone") and "--local-steps 480,960,1920 tries them" in out
    assert main([*words, "480,960,1920"]) == 0
    assert not capsys.readouterr().out.startswith("take one machine alone"), "it says so because that is so"


def test_the_first_line_and_the_run_file_say_what_is_uneven_and_what_a_price_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text(
        "uplink_bps = [8e7, 6e7]\ndownlink_bps = 8e7\nlatency_s = 0.01\nstep_s = [0.35, 0.5]\n"
        "[[changes]]\nat_s = 60\nfactor = 0.9\nworker = 1\n"
    )
    words = ["plan", str(file), "--model", "1m", "--local-steps", "120", "--out"]
    assert main([*words, str(tmp_path / "uneven.toml")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("take DiLoCo with 83 to 120 local steps on both workers") and "the network changes" not in out
    (there,) = examine_run(parse(tomllib.loads((tmp_path / "uneven.toml").read_text()))).networks
    assert there.note == "of the first 8 rounds, and the network changes after 60 s"
    assert main([*words, str(tmp_path / "every_step.toml"), "--method", "data_parallel"]) == 0
    text = (tmp_path / "every_step.toml").read_text()
    assert "with 1 local step, " in text and "gossamer train sends after the step and takes 0." in text


@pytest.mark.full
def test_seconds_that_vary_are_a_mean_of_many_rounds_with_its_spread_and_the_check_of_the_run_file_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = 4e6\ndownlink_bps = 4e6\nstep_s = 0.5\njitter = 0.5\n")
    words = ["plan", str(file), "--workers", "4", "--model", "0.2m", "--local-steps", "30", "--method", "gasloc"]
    assert main([*words, "--json", "--out", str(tmp_path / "run.toml")]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    (there,) = examine_run(parse(tomllib.loads((tmp_path / "run.toml").read_text()))).networks
    assert there.round_s is not None and 0 < chosen["spread_s"] < 0.1 * chosen["round_s"]
    assert abs(there.round_s - chosen["round_s"]) <= there.spread_s + chosen["spread_s"]
    network, options = read_network(file), {"workers": 4, "local_steps": [30], "rounds": 250}
    (long,) = {c for c in planned(network, **options).candidates if (c.method, c.codec) == ("GASLoC 1-Peer", "exact")}
    (short,) = {
        c
        for c in planned(network, **{**options, "rounds": 64}).candidates
        if (c.method, c.codec) == ("GASLoC 1-Peer", "exact")
    }
    assert abs(long.round_s - short.round_s) <= long.spread_s + short.spread_s
    assert main(words) == 0
    assert re.search(r"GASLoC 1-Peer .* ± 0\.", capsys.readouterr().out)


def test_a_plan_takes_the_model_of_a_run_file_the_vocabulary_of_a_tokenizer_and_sizes_beyond_those_that_are_built_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.toml").write_text("uplink_bps = 1e9\ndownlink_bps = 1e9\n")
    Path("own.toml").write_text('method = "diloco"\nworkers = 2\n[model]\nsize = "1m"\nlayers = 2\n')
    words = [
        "plan",
        "net.toml",
        "--workers",
        "2",
        "--local-steps",
        "30",
        "--json",
        "--method",
        "diloco",
        "--peak-flops",
        "1e15",
    ]
    words += ["--out"]

    def found(name: str, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        assert main([*words, name, *more]) == 0
        return json.loads(capsys.readouterr().out), tomllib.loads(Path(name).read_text())

    facts, document = found("a.toml", "--model", "own.toml")
    assert document["model"]["layers"] == 2 and facts["parameters"] < 869_504
    with Path("own.toml").open("a") as file:
        file.write('[data]\nsource = "text"\ntokenizer = "gpt2"\nseq_len = 64\nbatch_size = 2\naccumulate = 3\n')
    _, document = found("own_b.toml", "--model", "own.toml", "--vocab", "50257", "--tokenizer", "gpt2")
    assert document["data"] == {"source": "text", "seq_len": 64, "batch_size": 6, "tokenizer": "gpt2"}
    _, document = found("own_c.toml", "--model", "own.toml", "--vocab", "300", "--batch-size", "4", "--data", "stdlib")
    assert document["data"] == {"source": "stdlib", "seq_len": 64, "batch_size": 4}, "options come first"
    assert main([*words, "own_d.toml", "--model", "own.toml"]) == 2
    assert "'gpt2', which is not on this machine" in capsys.readouterr().err
    Path("two.toml").write_text('workers = 4\n[data]\nsource = ["a", "b"]\nglobal_batch = 8\n')
    assert main([*words, "own_e.toml", "--model", "two.toml"]) == 0
    assert "'two.toml' has 2 texts, and a plan is for one: it takes stdlib; give --data" in capsys.readouterr().err
    assert tomllib.loads(Path("own_e.toml").read_text())["data"]["batch_size"] == 2, "of each of its workers"
    facts, document = found("b.toml", "--model", "70b", "--vocab", "32000")
    assert 68e9 < facts["parameters"] < 71e9 and parse(document).model.shape.layers == 80
    assert main([*words, "none.toml", "--model", "7B"]) == 2
    assert "unknown --model '7B'; did you mean '7b'? Allowed: 0.2m, " in capsys.readouterr().err
    assert document["network"]["planned"]["step_s"] == pytest.approx(6 * facts["parameters"] * 1024 / 4e14)
    facts, document = found("c.toml", "--model", "1m", "--tokenizer", "gpt2", "--vocab", "50257")
    assert document["data"]["tokenizer"] == "gpt2" and facts["parameters"] == 128 * 50257 * 2 + 869_504 - 256 * 128 * 2
    assert main([*words, "d.toml", "--tokenizer", "gpt2"]) == 2
    assert "nothing says how many tokens it has; give --vocab" in capsys.readouterr().err
    assert main([*words, "e.toml", "--tokenizer", "bytes", "--vocab", "300"]) == 2
    assert "--vocab is 300 and 'bytes' has 256 tokens" in capsys.readouterr().err


def test_a_plan_says_how_often_its_run_would_read_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 1000)
    (tmp_path / "net.toml").write_text("uplink_bps = 1e9\ndownlink_bps = 1e9\nstep_s = 0.5\n")
    words = [
        "plan",
        str(tmp_path / "net.toml"),
        "--workers",
        "2",
        "--model",
        "0.2m",
        "--data",
        str(tmp_path / "text.txt"),
    ]
    for tokens, often in (("300000", True), ("60000", False)):
        assert main([*words, "--tokens", tokens, "--local-steps", "5"]) == 0
        assert ("the text is trained on about " in capsys.readouterr().out) == often


def test_a_run_without_a_worker_that_its_plan_dropped_is_priced_on_the_network_that_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "net.toml").write_text("uplink_bps = [25e6, 1e5, 20e6]\ndownlink_bps = 25e6\nstep_s = 0.5\n")
    words = ["plan", str(file), "--model", "0.2m", "--local-steps", "3", "--method", "diloco", "--seq-len", "16"]
    assert main([*words, "--tokens", "1e3", "--batch-size", "1", "--out", str(tmp_path / "run.toml")]) == 0
    document = tomllib.loads((tmp_path / "run.toml").read_text())
    document["data"] |= {"max_bytes": 100_000}
    document["run"] |= {"steps": 6, "eval_batches": 1}
    simulate(parse(document), tmp_path / "run")
    capsys.readouterr()
    assert main(["price", str(tmp_path / "run"), str(file), "--json"]) == 0
    output = capsys.readouterr()
    assert (
        json.loads(output.out)["workers"] == 2 and "without worker 1, whom the plan of this run left out" in output.err
    )
    (tmp_path / "other.toml").write_text("uplink_bps = [1e6, 1e5, 20e6]\ndownlink_bps = 25e6\nstep_s = 0.5\n")
    assert main(["price", str(tmp_path / "run"), str(tmp_path / "other.toml")]) == 2
    assert "lists 3 workers but the run has 2" in capsys.readouterr().err


def test_gossamer_utilisation_prints_the_published_bandwidths_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["utilisation", "--model", "1b", "--method", "diloco", "--plot", str(tmp_path / "curve.svg")]) == 0
    assert "95% computing: 23.3 Gbit/s" in capsys.readouterr().out
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")
    assert main(["utilisation", "--method", "diloco", "--set", "local_steps=500"]) == 0
    assert "95% computing: 23.3 Gbit/s" not in capsys.readouterr().out
    assert main(["utilisation", "--plot", str(tmp_path / "curve.pdf")]) == 2
    assert main(["utilisation", "--model", "2b"]) == 2
    assert "unknown model '2b'" in capsys.readouterr().err


def test_figure_9_is_printed_with_all_that_it_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["utilisation", "--figure9", "--plot", str(tmp_path / "figure9.png")]) == 0
    output = capsys.readouterr().out
    assert "assumed: one worker's uplink has 20% of the bandwidth" in output
    assert "assumed: no latency" in output
    assert "73.4% (4)" in output
    assert (tmp_path / "figure9.png").read_bytes().startswith(b"\x89PNG")
    assert main(["utilisation", "--figure9", "--set", "bandwidth_share=0.1"]) == 0
    assert "has 10% of the bandwidth" in capsys.readouterr().out
    assert main(["utilisation", "--figure9", "--set", "share=0.1"]) == 2
    assert "did you mean 'bandwidth_share'" in capsys.readouterr().err
    assert main(["utilisation", "--figure9", "--set", "model=70b"]) == 2
    assert "unknown option of --figure9 'model'" in capsys.readouterr().err


def test_the_hours_of_a_run_are_printed_with_all_that_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["utilisation", "--analytic", "--set", "replicas=2", "--set", "network=medium"]) == 0
    output = capsys.readouterr().out
    assert "DiLoCo, M = 2" in output
    assert "assumed: 100 Gbit/s and 0.001 s across sites" in output
    for words, sentence in (
        (["--set", "replica=2"], "did you mean 'replicas'"),
        (["--set", "network=lo"], "did you mean 'low'"),
        (["--set", "overlap_steps=20"], "overlap_steps of streaming is 20 but must be from 0 to 10"),
        (["--figure9"], "--analytic was given with --figure9"),
        *(
            [["--set", f"{name}=many"], f"{name}"]
            for name in ("parameters", "replicas", "nodes", "tokens", "fragments")
        ),
    ):
        assert main(["utilisation", "--analytic", *words]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--seq-len", "0"], "--seq-len is 0"),
        (["--seq-len", "-5"], "--seq-len is -5"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--vocab", "0"], "--vocab is 0"),
        (["--vocab", "-3", "--codec", "topk"], "--vocab is -3"),
        (["--peak-flops", "0"], "--peak-flops is 0"),
        (["--peak-flops", "inf"], "--peak-flops is inf"),
        (["--peak-flops", "nan"], "--peak-flops is nan"),
        (["--peak-flops", "1e15", "--mfu", "0"], "--mfu is 0"),
        (["--peak-flops", "1e15", "--mfu", "1.5"], "--mfu is 1.5"),
        (["--step-s", "0"], "--step-s is 0"),
        (["--step-s", "-1"], "--step-s is -1"),
        (["--step-s", "nan"], "--step-s is nan"),
        (["--step-s", "inf"], "--step-s is inf"),
        (["--step-s", "1", "--peak-flops", "1e12"], "--step-s got 1 and --peak-flops got 1e+12, but both"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_one_sentence(words, part, tmp_path, capsys) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = 1e9\ndownlink_bps = 1e9\n")
    given = [] if {"--peak-flops", "--step-s"} & {*words} else ["--step-s", "0.5"]
    assert main(["plan", str(tmp_path / "net.toml"), "--workers", "4", *given, *words]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and part in printed, printed


def test_a_network_that_changes_is_priced_between_its_changes_each_for_its_time() -> None:
    slower = tuple(each * 25e6 for each in (0.125, *[1.0] * 7))
    half = replace(EVEN, uplink_bps=slower, downlink_bps=slower)
    changing = replace(EVEN, changes=(Change(at_s=1800.0, factor=0.125, worker=0),))
    for method in ("DiLoCo", "GASLoC 2-Peer", "data parallel"):
        steps = 1 if method == "data parallel" else 30
        before, after, both = (
            of(planned(network, workers=8, local_steps=[30], hours=1.0), method, steps)
            for network in (EVEN, half, changing)
        )
        if method != "GASLoC 2-Peer":  # whose steps are those for the beginning
            assert 2 / both.round_s == pytest.approx(1 / before.round_s + 1 / after.round_s)
        assert both.local_steps == (steps,) * 8 and before.round_s < both.round_s and both.spread_s < 1e-6
    made = planned(changing, workers=8, local_steps=[30], tokens=58e6)
    for method in ("DiLoCo", "GASLoC 2-Peer"):
        found = of(made, method, 30)
        text = run_toml(made, found)
        rounds = tomllib.loads(text)["run"]["steps"] // 30
        everyone = [[j for j in range(8) if j != i] for i in range(8)]
        partners = [[i ^ 1, i ^ 2] for i in range(8)]
        targets, kind = (everyone, "mean") if method == "DiLoCo" else (partners, "exchange")
        sent = round(found.round_bytes / len(targets[0]))
        trace = from_targets(np.array([targets] * rounds), sent, np.array(found.local_steps), kind=kind)
        assert found.round_s == pytest.approx(price(trace, changing).total_s / rounds, rel=0.01), method


def test_what_a_slow_method_reads_before_a_change_does_not_depend_on_what_comes_after_the_choice_has_ended() -> None:
    slow = replace(EVEN, uplink_bps=2.5e6)
    late = replace(slow, changes=(Change(at_s=7200.0, factor=0.01, worker=0),))
    read = list[float]()
    for network in (slow, late):
        made = planned(network, workers=8, local_steps=[30], tokens=58e6, keep_all=True)
        assert made.choice.hours < 2
        read.append(made.choice.tokens_of(of(made, "data parallel", 1)))
    assert read[1] == pytest.approx(read[0], rel=1e-6)


def test_streaming_on_a_network_that_changes_is_priced_between_its_changes_too() -> None:
    changing = replace(EVEN, changes=(Change(at_s=1800.0, factor=0.02, worker=0),))
    slower = tuple(each * 25e6 for each in (0.02, *[1.0] * 3))
    rates = list[float]()
    for network in (EVEN, replace(EVEN, uplink_bps=slower, downlink_bps=slower), changing):
        made = planned(network, workers=4, local_steps=[30], hours=1.0)
        rates.append(1 / next(one for one in price_recipes(made, USUAL).candidates if not one.left_out).round_s)
    assert rates[1] < rates[0] and rates[2] == pytest.approx((rates[0] + rates[1]) / 2)


def test_of_a_network_that_changes_often_the_first_rounds_are_priced_and_the_plan_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = "".join(f"[[changes]]\nat_s = {60 * k}\nfactor = 0.{k % 9 + 1}\nworker = 0\n" for k in range(1, 18))
    (tmp_path / "net.toml").write_text(f"uplink_bps = [1e6, 1e6]\ndownlink_bps = 1e6\nstep_s = 0.5\n{changes}")
    assert main(["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--local-steps", "30"]) == 0
    out = capsys.readouterr().out
    assert "the network changes at 17 times" in out and " ± " not in out.split("above the choice")[1].split("chosen")[0]


def test_methods_that_were_measured_at_other_local_steps_take_those_that_were_asked_for() -> None:
    for steps, found in (((60, 240), [60, 240]), ((5, 30, 120), [30])):
        made = planned(EVEN, workers=8, local_steps=steps)
        assert [one.full_steps for one in price_recipes(made, "local_sgd").candidates] == found


def test_the_check_of_a_run_file_agrees_with_its_plan_on_a_committed_network_within_what_both_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = Path(__file__).parents[3] / "configs" / "networks" / "slow_in_turn.toml"
    file, words = tmp_path / "run.toml", ["--model", "134m", "--local-steps", "480", "--method", "gasloc"]
    assert main(["plan", str(network), *words, "--out", str(file)]) == 0
    plan_says = capsys.readouterr().out
    assert main(["check", str(file)]) == 0
    found = [
        re.search(r"([\d.]+) ± ([\d.]+) s (?:a|per) round", output) for output in (plan_says, capsys.readouterr().out)
    ]
    (there, its_half), (here, half) = (map(float, one.groups()) for one in found if one is not None)
    assert abs(there - here) <= its_half + half
    assert "± of hours and seconds: half of the 95 % interval" in plan_says


def test_workers_that_a_network_file_does_not_have_are_refused_with_its_name(tmp_path, capsys) -> None:
    """Also where its lists contradict each other, and in a run file with several networks."""
    file = tmp_path / "net.toml"
    for text, words, part in (
        ("uplink_bps = [1e9, 1e9, 1e9]\nstep_s = 1", ["--workers", "7"], f"--workers got 7 and '{file}' has 3 workers"),
        ("uplink_bps = [1e9, 1e9]\nstep_s = [1, 1, 1]", [], f"'{file}': uplink_bps lists 2 workers but step_s has 3"),
        ("uplink_bps = [1e9, 1e9]\nsites.a.workers = [0]", [], f"'{file}': uplink_bps lists 2 workers but sites has 1"),
    ):
        file.write_text(f"downlink_bps = 1e9\n{text}\n")
        assert main(["plan", str(file), *words]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and part in printed, printed
    networks = {name: {"uplink_bps": [1e9] * n, "downlink_bps": 1e9} for name, n in (("near", 8), ("far", 2))}
    (fault,) = faults_of(parse({"workers": 8, "run": {"steps": 30, "local_steps": 30}, "network": networks}))
    assert str(fault).startswith("network.far: uplink_bps lists 2 workers but the run has 8")


def test_a_plan_writes_no_run_file_that_could_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run has the name of its file, and both may be bytes that are no UTF-8."""
    (tmp_path / "net.toml").write_text("uplink_bps = 4e6\ndownlink_bps = 4e6\nstep_s = 0.5\n")
    words = ["plan", str(tmp_path / "net.toml"), "--model", "0.2m", "--workers", "4", "--codec", "int8"]
    for out, more, part in (
        ("two\nlines.toml", [], r"name is 'two\nlines' but must be a name for the folder"),
        ("run\udcff.toml", [], r"name is 'run\udcff' but must be a name for the folder"),
        ("run.toml", ["--data", "text\udcff"], r"data.source is 'text\udcff' but must be text: a path"),
    ):
        assert main([*words, "--out", str(tmp_path / out), *more]) == 2
        assert part in capsys.readouterr().err and [one.name for one in tmp_path.iterdir()] == ["net.toml"]


def test_data_parallelism_takes_the_quickest_way_and_backward_hides_two_thirds_of_a_step_of_it() -> None:
    (even,) = (c for c in planned(EVEN, workers=8, local_steps=[30]).candidates if c.method == "data parallel")
    all_reduce_s = 7 / 4 * 32 * 192_960 / 25e6
    assert even.unhidden_round_s == pytest.approx(0.5 + all_reduce_s, rel=1e-4)
    assert even.round_s == pytest.approx(0.5 + all_reduce_s - 2 / 3 * 0.5, rel=1e-4)
    assert even.utilisation == pytest.approx(0.5 / even.round_s)
    fast = replace(EVEN, uplink_bps=1e9, downlink_bps=1e9)
    assert of(planned(fast, workers=8, local_steps=[30]), "data parallel", 1).round_s == pytest.approx(0.5)
    sites = read_network(Path(__file__).parents[3] / "configs" / "networks" / "two_sites.toml")
    settings = PlanSettings(local_steps=(30,))
    found = [plan(replace(sites, mean=m), ModelConfig(size="134m"), settings) for m in ("owners", "ring")]
    ours, along = (of(each, "data parallel", 1) for each in found)
    assert ours.collective == along.collective == "ring" and ours.round_s == pytest.approx(along.round_s)
    owners_s, ring_s = ours.unhidden_round_s, along.unhidden_round_s
    assert owners_s and ring_s and ring_s < 0.5 * owners_s, "as the network file says that means are carried"
    assert ours.round_s == pytest.approx(ring_s - 2 / 3 * 0.5)
