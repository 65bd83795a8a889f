"""Plans of models that do not fit a process: stages, what crosses them, and the method, together."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network, Site, read_network, to_toml
from gossamer.network.pipeline_time import StageLinks
from gossamer.run.config.resolve import run_faults
from gossamer.run.config.run_file import parse
from gossamer.run.planning.check import examine_run
from gossamer.run.planning.choice import SITE_ALONE
from gossamer.run.planning.plan import PlanSettings, plan
from gossamer.run.planning.planned_stages import BOUNDARY_PAIRS, SPEED_LEFT, ShardPlan, StagePlan, plan_in_parts

MODEL = ModelConfig(size="1m")
FAST = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=0.4, stages=StageLinks(bandwidth_bps=1e9))
SETTINGS = PlanSettings(workers=4, local_steps=[15, 30], batch_size=8)
WHOLE = 20e6
"""Less than what a replica takes, and more than half of it."""


def cut(memory_bytes: float, network: Network = FAST) -> StagePlan:
    made = plan_in_parts(network, MODEL, SETTINGS, memory_bytes)
    assert isinstance(made, StagePlan)
    return made


def test_a_replica_that_fits_stays_whole_and_others_are_cut_into_the_fewest_stages_that_fit() -> None:
    needed = cut(WHOLE).replica_bytes
    assert plan_in_parts(FAST, MODEL, SETTINGS, needed) is None
    just = plan_in_parts(FAST, MODEL, SETTINGS, needed - 1)
    assert isinstance(just, StagePlan) and just.chosen.stages == 2
    for memory in (0.6 * needed, 0.4 * needed, 0.3 * needed):
        chosen = cut(memory).chosen
        assert chosen.stage_bytes <= memory and len(chosen.cuts) == chosen.stages - 1
        assert chosen.stages >= needed / memory
        assert SETTINGS.batch_size % chosen.micro_batches == 0 and chosen.micro_batches >= chosen.stages
    config = parse({"method": "diloco", "workers": 4, "model": {"size": "1m"}})
    assert needed == examine_run(config).worker_bytes, "of the planned methods DiLoCo keeps most"


def test_the_mildest_codec_is_taken_that_keeps_the_stages_computing_and_else_the_fastest() -> None:
    names = {}
    for bandwidth in (1e9, 40e6, 8e6, 1e4):
        made = cut(WHOLE, replace(FAST, stages=StageLinks(bandwidth_bps=bandwidth)))
        assert [one.forward for one in made.tried] == [*BOUNDARY_PAIRS]
        assert [one.step_s for one in made.tried] == sorted((one.step_s for one in made.tried), reverse=True)
        names[bandwidth] = made.chosen.forward
        if (left := made.chosen.unhindered) < SPEED_LEFT:
            assert left == max(one.unhindered for one in made.tried)
        else:
            assert all(one.unhindered < SPEED_LEFT for one in made.tried[: made.tried.index(made.chosen)])
    assert names[1e9] == "dense" and names[1e4] == "tahquant"
    assert {names[40e6], names[8e6]} - {"dense", "tahquant"}, "one between"


def test_faster_stages_have_more_layers_and_the_number_of_speeds_is_that_of_stages() -> None:
    uneven = replace(FAST, stages=StageLinks(bandwidth_bps=1e9, speeds=(3.0, 1.0)))
    assert cut(WHOLE).chosen.cuts == (2,) == cut(WHOLE, uneven).chosen.cuts, "more layers would not fit"
    assert cut(26e6).chosen.cuts == (2,) and cut(26e6, uneven).chosen.cuts == (3,)


def test_stages_have_as_much_work_as_memory_allows_with_the_output_head() -> None:
    made = plan_in_parts(FAST, ModelConfig(size="134m"), PlanSettings(workers=4, vocab_size=32_000), 2.2e9)
    assert isinstance(made, StagePlan) and made.chosen.cuts == (5, 10) and made.chosen.stage_bytes <= 2.2e9


def test_waits_between_stages_take_the_same_share_of_every_candidate_and_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = replace(FAST, uplink_bps=3e7, stages=StageLinks(bandwidth_bps=4e6))
    made = cut(WHOLE, slow)
    assert made.chosen.computing < 0.6, "its stages wait for each other"
    for one in made.made.candidates:
        assert one.utilisation == pytest.approx((one.utilisation + one.between_stages) * made.chosen.computing)
    (tmp_path / "net.toml").write_text(to_toml(slow))
    words = ["plan", tmp_path / "net.toml", "--model", "1m", "--workers", 4, "--memory-bytes", WHOLE]
    assert main([*map(str, words), "--local-steps", "15,30", "--method", "diloco"]) == 0
    output = capsys.readouterr().out
    assert (
        f"its stages compute for {made.chosen.computing:.1%} of an inner step and wait for each other in the rest"
        in output
    )


def test_where_the_machines_of_a_site_hold_a_replica_together_the_workers_are_sites_in_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = Path(__file__).parents[3] / "configs" / "networks" / "two_sites.toml"
    words = ["plan", str(network), "--model", "1m", "--memory-bytes", "25e6", "--local-steps", "30"]
    assert main([*words, "--json", "--out", str(tmp_path / "run.toml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"] is None and found["shards"]["shards"] == 4
    assert {one["site"] for one in found["candidates"] if one["method"] != SITE_ALONE} == {4}
    assert not any(one["method"] == "one machine alone" for one in found["candidates"]), "none holds the model"
    text = (tmp_path / "run.toml").read_text()
    (priced,) = examine_run(parse(tomllib.loads(text))).networks
    assert priced.round_s == pytest.approx(found["chosen"]["round_s"], rel=1e-3)
    assert "--shards 4" in text and "data parallelism" not in text
    assert main(words) == 0
    output, each = capsys.readouterr().out, found["shards"]["replica_bytes"] / 4e9
    assert f"the 4 of a site hold it in shards of {each:.4g} GB (FSDP2)" in output
    assert "in a site, 4 workers train as one, under FSDP2" in output
    for more in (["--boundary", "dense"], ["--memory-bytes", "8e6"]):
        assert main([*words, *more, "--json"]) in (0, 2)
        assert '"shards": {' not in capsys.readouterr().out, f"{more} leaves stages"
    assert main([*words, "--method", "streaming_diloco"]) == 2
    assert "not priced between sites" in capsys.readouterr().err
    assert main([*words, "--method", "gasloc"]) == 0
    assert capsys.readouterr().out.startswith("asked for: GASLoC 1-Peer")


def test_shards_need_sites_of_one_size_that_hold_the_replica_which_a_machine_does_not() -> None:
    network = read_network(Path(__file__).parents[3] / "configs" / "networks" / "two_sites.toml")
    settings = replace(SETTINGS, workers=None)
    made = plan_in_parts(network, MODEL, settings, 25e6)
    assert isinstance(made, ShardPlan) and made.shards == 4
    flat = plan_in_parts(FAST, MODEL, replace(SETTINGS, workers=8), WHOLE)
    assert isinstance(flat, StagePlan) and made.replica_bytes < flat.replica_bytes, "methods of eight workers keep more"
    assert plan_in_parts(network, MODEL, settings, flat.replica_bytes) is None, "it fits a machine"
    assert isinstance(plan_in_parts(network, MODEL, settings, flat.replica_bytes - 1), ShardPlan), (
        "and no stages are needed"
    )
    with pytest.raises(ConfigError, match="does not fit"):  # neither a site nor stages
        plan_in_parts(network, MODEL, settings, made.replica_bytes / 4 - 1)
    uneven = {"a": Site(workers=(0, 1, 2)), "b": Site(workers=(3, 4, 5, 6, 7))}
    for other in (replace(network, sites=uneven, routes=()), replace(network, sites={}, routes=()), FAST):
        assert isinstance(plan_in_parts(other, MODEL, replace(SETTINGS, workers=8), 25e6), StagePlan)
    thin = replace(network, uplink_bps=1e7, downlink_bps=1e7)
    parts = plan_in_parts(thin, MODEL, settings, 25e6)
    assert isinstance(parts, ShardPlan)
    shards, whole = (
        min(one.round_s for one in found.candidates if one.method == SITE_ALONE)
        for found in (parts.made, plan(thin, MODEL, settings))
    )
    assert shards > 1.2 * whole, "FSDP2 sends half as much again as an all-reduce"


def test_a_plan_in_stages_says_how_many_machines_it_is_of_and_takes_no_site_as_one_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards and stages of one worker do not go together, and hours of twice as many machines need them."""
    network = Path(__file__).parents[3] / "configs" / "networks" / "two_sites.toml"
    words = [
        "plan",
        str(network),
        "--model",
        "1m",
        "--memory-bytes",
        "20e6",
        "--local-steps",
        "30",
        "--boundary",
        "dense",
    ]
    assert main([*words, "--json", "--out", str(tmp_path / "run.toml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"]["chosen"]["stages"] == 2 and {one["site"] for one in found["candidates"]} == {1}
    (priced,) = examine_run(parse(tomllib.loads((tmp_path / "run.toml").read_text()))).networks
    as_sent = found["chosen"]["unhidden_round_s"] or found["chosen"]["round_s"]
    assert priced.round_s == pytest.approx(as_sent, rel=1e-3)
    assert main(words) == 0
    first, *_ = (output := capsys.readouterr().out).splitlines()
    assert "on 2 machines a worker (" in first
    assert "a worker is then 2 machines and not one, 16 in all" in output
    assert "what crosses between stages takes no time here, as the network file has no [stages]" in output


@pytest.mark.full
def test_the_run_that_was_planned_starts_and_its_check_has_the_planned_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text(
        "uplink_bps = 1e8\ndownlink_bps = 1e8\nstep_s = 0.4\n[stages]\nbandwidth_bps = 2e7\nlatency_s = 0.01\n"
    )
    words = [
        "plan",
        tmp_path / "net.toml",
        "--model",
        "1m",
        "--workers",
        4,
        "--memory-bytes",
        WHOLE,
        "--local-steps",
        30,
    ]
    for method in ("gasloc", "local_sgd"):
        out = tmp_path / f"{method}.toml"
        assert main([*map(str, words), "--method", method, "--json", "--out", str(out)]) == 0
        found = json.loads(capsys.readouterr().out)
        config = parse(tomllib.loads(out.read_text()))
        assert not run_faults(config) and config.pipeline.stages == found["stages"]["chosen"]["stages"] == 2
        assert config.pipeline.forward.name == found["stages"]["chosen"]["forward"] != "dense"
        (network,) = examine_run(config).networks
        assert network.round_s == pytest.approx(found["chosen"]["round_s"], rel=1e-3)
    assert "pipeline.stages is 2" in found["unpriced"].get("local_sgd", "pipeline.stages is 2")
    assert main([*map(str, words), "--all"]) == 0
    output = capsys.readouterr().out
    assert "in 2 stages, cut before the layers 2, a process takes" in output and "boundary codec: " in output
    assert "no price: sgp: pipeline.stages is 2" in output
    assert found["stages"]["chosen"]["unhindered"] < 0.9 and "model.bottleneck 'resbm' or 'subspace'" in output
    assert main([*map(str, words[:-3]), "1e9"]) == 0
    assert "a replica fits a process of 1 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--memory-bytes", "1e5"], "the model does not fit 4 of them"),
        (["--memory-bytes", "0"], "--memory-bytes is 0.0 but must be a number above 0"),
        (["--memory-bytes", "nan"], "--memory-bytes is nan"),
        (["--memory-bytes", "20e6", "--batch-size", "1"], "raise --batch-size to 2 or more"),
        (["--memory-bytes", "20e6", "--boundary", "tahquaint"], "did you mean 'tahquant'"),
        (["--boundary", "cast"], "give --memory-bytes"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_sentence(
    words: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text("uplink_bps = 1e9\ndownlink_bps = 1e9\nstep_s = 1.0\n")
    assert main(["plan", str(tmp_path / "net.toml"), "--model", "1m", "--workers", "4", *words]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and part in output, output


def test_a_boundary_codec_that_does_not_fit_the_model_is_named_and_at_least_one_must_fit() -> None:
    odd = ModelConfig(size="1m", hidden_size=120, heads=4)
    made = plan_in_parts(FAST, odd, SETTINGS, 25e6)
    assert isinstance(made, StagePlan) and made.refused.keys() <= {"intk", "tahquant"} and made.refused
    with pytest.raises(ConfigError, match="no boundary codec fits"):
        plan_in_parts(FAST, odd, SETTINGS, 25e6, boundaries=["tahquant"])
