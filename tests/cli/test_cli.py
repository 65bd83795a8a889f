"""The command line: one sentence and exit code 2 for whatever a user can get wrong, and no traceback."""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

import gossamer
from commands import Command
from gossamer import cli
from gossamer.cli import main
from gossamer.cli.list import from_code
from gossamer.cli.run_file_options import resume_hint
from gossamer.errors import installs
from gossamer.record.lineage import write_branches
from gossamer.report.page.live import LiveRuns
from gossamer.report.results import read_results, result_lines
from gossamer.run.config.run_file import dump
from gossamer.run.simulated.simulate import simulate
from tiny import document, single


def run(words, capsys):
    """Exit code, output and error of one command."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def sentences(err):
    """The lines of stderr, without those that say how busy this machine is, what was read and how far a round is."""
    of_progress = re.compile(r"text of |.*this run will be slower|\S+: round \d+ of \d+  step ")
    return [line for line in err.splitlines() if not of_progress.match(line)]


def refused(words, capsys, *parts):
    """Asserts that a command is refused in one sentence that holds these parts."""
    code, _, err = run(words, capsys)
    lines = sentences(err)
    assert code == 2, (code, err)
    assert len(lines) == 1, err
    assert lines[0].startswith("gossamer: ")
    for part in parts:
        assert part in lines[0], (part, lines[0])


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(document(model__layers=1)))
    return path


WRONG = {
    "an unknown key": (["rule.momentun=0.5"], ["momentun", "did you mean 'momentum'"]),
    "an unknown section": (["modle.size=1m"], ["modle", "did you mean 'model'"]),
    "an unknown rule": (["rule.name=dilco"], ["dilco", "did you mean 'diloco'"]),
    "an unknown topology": (["topology.name=rnig"], ["rnig", "did you mean 'ring'"]),
    "an impossible pairing": (["rule.name=diloco"], ["'diloco' on topology 'random'", "complete"]),
    "gradients with a local phase": (
        ["rule.name=data_parallel", "topology.name=complete"],
        ["run.local_steps is 2", "local_steps = 1"],
    ),
    "an option out of range": (["rule.momentum=1.5"], ["1.5", "from 0 to below 1"]),
    "an option out of range that may be a word": (["rule.alpha=3.0"], ["3.0", 'above 0 and below 2 or "auto"']),
    "a value of another type": (["workers='three'"], ["workers is 'three'", "a whole number"]),
    "no workers": (["workers=0"], ["workers is 0", "from 1 to 1000000"]),
    "steps that do not divide": (["run.steps=13"], ["13", "not a multiple", "set run.steps to 12 or 14"]),
    "steps fewer than local steps": (["run.steps=1"], ["not a multiple", "set run.steps to 2"]),
    "local steps for other workers": (["run.local_steps=[1,2]"], ["2 entries for 3 workers"]),
    "a topology for other numbers": (["topology.name=hypercube"], ["hypercube", "3"]),
    "too many peers": (["topology.peers=3"], ["peers", "3"]),
    "missing data": (["data.source=/nowhere/at/all.txt"], ["/nowhere/at/all.txt"]),
    "a model of no known size": (["model.size=7b"], ["7b", "1b"]),
    "an inner optimizer that is not there": (["inner.optimizer=lion"], ["lion", "adamw"]),
    "a setting without a value": (["rule.lr"], ["rule.lr", "key=value"]),
    "a network without bandwidth": (
        ["network.slow.uplink_bps=0", "network.slow.downlink_bps=1"],
        ["uplink_bps", "from 1"],
    ),
    "a table where a value belongs": (["seed.x=1"], ["seed"]),
    "an endless wait": (["run.timeout_s=inf"], ["run.timeout_s is inf", "at most 1e+06"]),
    "a wait that is no number": (["run.timeout_s=nan"], ["run.timeout_s is nan"]),
    "a wait beyond what a socket takes": (["run.timeout_s=1e15"], ["run.timeout_s is 1000000000000000.0"]),
    "an endless pace": (["run.pace_s=[0.0,inf,0.0]"], ["run.pace_s[1] is inf", "from 0 to 1e+06"]),
    "a pace that is no number": (["run.pace_s=nan"], ["run.pace_s is nan"]),
    "a negative pace": (["run.pace_s=-1"], ["run.pace_s is -1"]),
    "the first of several mistakes": (
        ["workers=0", "run.local_steps=[]"],
        ["workers is 0", "; gossamer check /", "run.toml, with the same --set, names all 2 mistakes"],
    ),
    "no local steps": (["run.local_steps=[]"], ["run.local_steps is an empty list"]),
    "no pace": (["run.pace_s=[]"], ["run.pace_s is an empty list"]),
}


@pytest.mark.parametrize(("settings", "parts"), WRONG.values(), ids=WRONG.keys())
def test_impossible_input_is_refused_in_one_sentence(settings, parts, run_file, tmp_path, capsys):
    words = [word for one in settings for word in ("--set", one)]
    refused(["simulate", run_file, "--out", tmp_path / "run", *words], capsys, *parts)
    assert not (tmp_path / "run").exists()


def test_one_mistake_does_not_send_to_the_verb_that_names_all(run_file, tmp_path, capsys):
    assert main(["simulate", str(run_file), "--out", str(tmp_path / "run"), "--set", "workers=0"]) == 2
    assert "gossamer check" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["compare", "tune"])
def test_the_first_of_several_mistakes_in_an_experiment_file_sends_to_the_verb_that_names_all(verb, tmp_path, capsys):
    file = tmp_path / "several.toml"
    tune = {"budget_tokens": 1000, "lr": [1e-3]}
    variants = [{"method": "diloco"}, {"method": "gossip"}]
    file.write_text(tomli_w.dumps({**document(run__local_steps=-3, workers=0), "variant": variants, "tune": tune}))
    refused([verb, file, "--out", tmp_path / "out"], capsys, f"; gossamer check {file} names all 2 mistakes")
    assert main(["check", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    file.write_text(tomli_w.dumps({**document(run__local_steps=-3), "variant": variants, "tune": tune}))
    assert main([verb, str(file), "--out", str(tmp_path / "out")]) == 2
    assert "gossamer check" not in capsys.readouterr().err


def test_empty_data_and_text_that_is_too_short_are_refused(run_file, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hello")
    for name in ("empty.txt", "short.txt"):
        refused(["simulate", run_file, "--set", f"data.source={tmp_path / name}", "--out", tmp_path / "run"], capsys)


def test_a_missing_or_broken_run_file_is_refused(tmp_path, capsys):
    refused(["simulate", tmp_path / "none.toml"], capsys, "none.toml", "there is no run file", "configs/gasloc.toml")
    (tmp_path / "broken.toml").write_text("workers = [")
    refused(["simulate", tmp_path / "broken.toml"], capsys, "broken.toml", "not TOML")
    refused(["simulate"], capsys, "no run file")
    refused(["check", tmp_path], capsys, "is a folder, and a run file is needed; give the path")
    refused(["train", tmp_path / "broken.toml", "--local", "3"], capsys, "not TOML")


def test_a_run_folder_given_for_its_run_file_is_distinguished_from_a_missing_file(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(tomli_w.dumps(document()))
    refused(["simulate", tmp_path], capsys, f"its run file is '{tmp_path / 'run.toml'}'")


def test_an_argument_that_is_missing_is_named(capsys):
    refused(["report"], capsys, "gossamer report was given no RUN, and needs one; see gossamer report --help")
    refused(["probe", "--local", 2], capsys, "gossamer probe was given no --out")


def test_a_file_in_the_place_of_a_new_folder_is_reported_as_a_file(run_file, tmp_path, capsys):
    refused(["init", run_file], capsys, "is a file, and a folder is to be made there; name another folder")
    refused(["simulate", run_file, "--out", run_file], capsys, "is a file, and a folder is to be made there")


def test_workers_are_not_started_where_they_would_all_be_refused(run_file, tmp_path, capsys):
    """The launcher says it once, and does not offer to resume what it has not begun."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics-001.jsonl").touch()
    here = ["train", run_file, "--out", tmp_path / "run"]
    refused([*here, "--local", document()["workers"]], capsys, "already holds metrics-001.jsonl")
    refused([*here, "--local", 7], capsys, "--local 7 but", "or add --set workers=7")
    refused([*here, "--listen", "127.0.0.1:29400"], capsys, "has neither [peers] nor run.elastic = true, so nobody")


@pytest.mark.parametrize("key", ["variant", "sweep", "scale", "figure"])
def test_an_experiment_file_is_not_taken_for_a_run(key, run_file, capsys):
    run_file.write_text(tomli_w.dumps(document() | {key: [{"label": "a"}] if key == "variant" else {}}))
    refused(["simulate", run_file], capsys, f"'{key}'", "use gossamer compare")


def test_a_run_file_and_a_network_file_are_not_taken_for_each_other(run_file, tmp_path, capsys):
    (tmp_path / "network.toml").write_text("uplink_bps = 1e6\ndownlink_bps = 1e6\n")
    refused(["plan", run_file], capsys, "run.toml", "it is a run file")
    refused(["simulate", tmp_path / "network.toml"], capsys, "'uplink_bps'", "it is a network file")
    refused(["plan", tmp_path / "network.toml", "--workers", 2], capsys, "give --step-s or --peak-flops, or step_s")


def test_what_is_no_run_folder_is_refused_in_the_same_words_by_all_that_read_one(tmp_path, capsys):
    for name in "ba":
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.toml").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "run").write_text("")
    (tmp_path / "text").write_text("")
    (tmp_path / "network.toml").write_text("uplink_bps = 1e6\ndownlink_bps = 1e6\n")
    folder, read = tmp_path / "runs" / "a", (["evaluate"], ["report"], ["price"], ["audit"])
    for words in (*read, ["simulate", "--resume"], ["train", "--resume"], ["simulate", "--replay"], ["status"]):
        more = [tmp_path / "network.toml"] if words == ["price"] else []
        for path, sentence in (
            (tmp_path / "runs", "is no run folder (no run.toml); it holds runs: a, b; name one"),
            (tmp_path / "empty", "is no run folder (no run.toml); name one"),
            (tmp_path / "nowhere", "is no run folder (nothing is there); name one"),
            (tmp_path / "text", "is a file and no run folder; name a run's folder"),
            (folder / "run.toml", f"is a file and no run folder; name its folder, '{folder}'"),
            *(((tmp_path / "store", "is the store of a run and no run folder"),) if words != ["status"] else ()),
        ):
            refused([*words, path, *more], capsys, f"'{path}' {sentence}")


def test_the_address_of_a_store_is_refused_as_it_was_given_where_a_path_is_needed(
    run_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sentence = (
        "'s3://bucket/run', which is an address, and a file or folder of this machine is needed; gossamer status,"
    )
    for words in (["simulate", run_file, "--out"], ["train", "--resume"], ["status", "store", "--peers"]):
        refused([*words, "s3://bucket/run"], capsys, f"{words[-1]} got {sentence}")
    for words in (["report", "run"], ["price"], ["evaluate"], ["audit"], ["check"], ["compare"], ["init"]):
        refused([*words, "file:///run"], capsys, "'file:///run' was given, which is an address, and a file or folder")
    assert {one.name for one in tmp_path.iterdir()} <= {run_file.name}


def test_a_run_that_has_ended_is_not_resumed_but_scored(tmp_path, capsys):
    simulate(single(run__steps=4), tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.glob("run/*.jsonl")}
    sentence = f"the run has ended after 2 rounds; gossamer evaluate {tmp_path / 'run'} scores it"
    for words in (["simulate"], ["train", "--local", 3]):
        code, out, err = run([*words, "--resume", tmp_path / "run"], capsys)
        assert code == 0 and sentence in err.splitlines(), (out, err)
    assert {path: path.read_bytes() for path in tmp_path.glob("run/*.jsonl")} == before
    refused(["evaluate", tmp_path / "run", "--round", 7], capsys, "round 7 lacks some checkpoints; complete are: 1, 2;")
    assert run(["evaluate", tmp_path / "run", "--round", 1], capsys)[1].startswith("round 1:")


@pytest.mark.parametrize("finished", [0, 1])
def test_a_run_that_is_stopped_says_how_to_resume_it_if_it_can(finished, run_file, tmp_path, capsys, monkeypatch):
    def stopped(config, parts, folder, **options):
        if finished:
            simulate(config, folder, until=finished)
        raise KeyboardInterrupt

    monkeypatch.setattr("gossamer.cli.simulate.train_here", stopped)
    code, _, err = run(["simulate", run_file, "--out", tmp_path / "run"], capsys)
    sentence = f"stopped; resume with --resume {tmp_path / 'run'}" if finished else "stopped"
    assert code == 130 and err.splitlines()[-1] == f"gossamer: {sentence}"


def test_one_that_is_stopped_before_it_has_joined_joins_again_and_resumes_nothing(tmp_path):
    simulate(single(run__steps=2), tmp_path / "run", until=1)
    expects = pytest.raises(KeyboardInterrupt, match=r"^stopped; join again with the same command$")
    with expects, resume_hint(tmp_path / "run", joins=True):
        raise KeyboardInterrupt


def test_local_workers_other_than_the_run_file_says_are_refused(run_file, capsys):
    refused(["train", run_file, "--local", "5"], capsys, "--local 5", "workers = 3")


def test_real_servers_in_two_levels_are_refused_and_the_simulation_is_named(run_file, capsys):
    for how in (["--local", "3"], ["--server", "127.0.0.1:29400"]):
        words = ["train", run_file, "--set", "server={name='halos'}", *how]
        refused(words, capsys, "'halos'", "use gossamer simulate", "'heloco'")


def test_a_corrupt_and_a_foreign_checkpoint_are_refused(tmp_path, capsys):
    config = single(run__steps=4)
    simulate(config, tmp_path / "run")
    for tensors in (tmp_path / "run" / "checkpoints").glob("*/worker-001.safetensors"):
        data = bytearray(tensors.read_bytes())
        data[len(data) // 2] ^= 1
        tensors.write_bytes(bytes(data))
    refused(["simulate", "--resume", tmp_path / "run"], capsys, "worker-001.safetensors")
    (tmp_path / "run" / "run.toml").write_text(dump(single(run__steps=4, seed=7)))
    refused(
        ["simulate", "--resume", tmp_path / "run"],
        capsys,
        "run.toml was changed since: seed was 0 and is 7",
        "put it back",
    )
    refused(["evaluate", tmp_path / "run"], capsys, "run.toml was changed since", "put it back")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refused(
        ["evaluate", tmp_path / "run"], capsys, "is sound for all 3 workers", "worker 0, 1, 2 has no checkpoint of it"
    )
    refused(["evaluate", tmp_path / "nowhere"], capsys, "nowhere")


def test_a_loss_that_is_not_a_number_ends_in_a_sentence(run_file, tmp_path, capsys):
    words = ["inner.optimizer=sgd", "inner.lr=1e18", "inner.warmup_steps=0", "run.eval_every=0"]
    refused(
        ["simulate", run_file, "--out", tmp_path / "run", *(f"--set={one}" for one in words)],
        capsys,
        "inner step",
        "nan",
        "worker",
    )


def test_compare_runs_every_variant_and_reports_them_on_one_page(tmp_path, capsys):
    experiment = document(run__steps=4, record__export=True, model__layers=1)
    experiment["network"] = {"even": {"uplink_bps": 1e8, "downlink_bps": 1e8, "step_s": 0.1}}
    experiment["variant"] = [
        {"label": "pairs"},
        {"label": "everyone", "rule": {"name": "diloco"}, "topology": {"name": "complete"}},
    ]
    experiment["sweep"] = {"inner.lr": [1e-3, 2e-3]}
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(experiment))
    words = ["compare", tmp_path / "experiment.toml", "--out", tmp_path / "out", "--set", "inner.clip=1.0"]
    code, _, _ = run(words, capsys)
    assert code == 0
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert folders == ["everyone-lr=0.001", "everyone-lr=0.002", "pairs-lr=0.001", "pairs-lr=0.002"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "--set inner.clip=1.0" in page, "the command that made it"
    assert "pairs lr=0.001" in page and "http://" not in page.replace("http://www.w3.org", "")
    for name in ("run.toml", "trace.jsonl", "metrics.jsonl", "sample.txt", "model", "checkpoints"):
        assert (tmp_path / "out" / "pairs-lr=0.001" / name).exists(), name
    refused(["compare", tmp_path / "experiment.toml", "--out", tmp_path / "out"], capsys, "already exists")
    of_a_run = tmp_path / "out" / "pairs-lr=0.001"
    refused(["compare", tmp_path / "experiment.toml", "--out", of_a_run], capsys, "is the folder of a run")


@pytest.mark.full
def test_compare_over_seeds_and_a_scale_draws_a_figure_and_continues_where_it_was_stopped(tmp_path, capsys):
    experiment = document(run__steps=4, workers=2, model__layers=1) | {
        "sweep": {"run.local_steps": [1, 2]},
        "scale": {"long": {"run": {"steps": 8}}},
        "figure": {"x": "run.local_steps"},
        "variant": [
            {"label": "pairs", "scale": {"long": {"rule.momentum": 0.5}}},
            {"label": "wild", "inner": {"optimizer": "sgd", "lr": 1e18, "warmup_steps": 0}},
        ],
    }
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(experiment))
    words = ["compare", tmp_path / "experiment.toml", "--seeds", "0,1", "--scale", "long", "--out", tmp_path / "out"]
    code, _, output = run(words, capsys)
    assert code == 0 and "wild local_steps=1 seed=0: the loss of worker" in output, (
        "a run that diverges ends only itself"
    )
    pairs = tmp_path / "out" / "pairs-local_steps=2-seed=1"
    resolved = tomllib.loads((pairs / "run.toml").read_text())
    assert resolved["run"]["steps"] == 8 and resolved["rule"]["momentum"] == 0.5
    made = {name: (tmp_path / "out" / name).read_bytes() for name in ("figure.svg", "figure.md")}
    outcomes = read_results(tmp_path / "out" / "outcomes.jsonl")
    assert b"| wild | \xe2\x80\x93 |" in made["figure.md"] and len(outcomes) == 8
    metrics = (pairs / "metrics.jsonl").read_text().splitlines(keepends=True)
    (pairs / "metrics.jsonl").write_text("".join(metrics[: len(metrics) // 2]))  # as if stopped in this run
    lines = [one for one in outcomes if one[:3] != ("pairs", {"run.local_steps": 2}, 1)]
    assert len(lines) == 7
    (tmp_path / "out" / "outcomes.jsonl").write_text(result_lines(lines))
    others = (tmp_path / "out" / "pairs-local_steps=1-seed=0" / "metrics.jsonl").stat().st_mtime_ns
    code, _, _ = run([*words, "--resume"], capsys)
    assert code == 0 and {name: (tmp_path / "out" / name).read_bytes() for name in made} == made
    again = read_results(tmp_path / "out" / "outcomes.jsonl")
    assert [one[:4] for one in again] == [one[:4] for one in outcomes], (
        "in the order of the file, with the same numbers"
    )
    assert (tmp_path / "out" / "pairs-local_steps=1-seed=0" / "metrics.jsonl").stat().st_mtime_ns == others
    for other in ("inner.lr=0.5", "run.eval_batches=3", "run.eval_every=2"):
        refused([*words, "--resume", "--set", other], capsys, "other settings")
    refused([*words[:-4], "--scale", "lomg"], capsys, "did you mean 'long'")
    (tmp_path / "plain.toml").write_text(tomli_w.dumps(document()))
    refused(["compare", tmp_path / "plain.toml", "--scale", "paper"], capsys, "the file has no [scale.NAME]")
    refused(["compare", tmp_path / "experiment.toml", "--seeds", "0,x"], capsys, "--seeds got '0,x'")
    refused(["compare", tmp_path / "experiment.toml", "--seeds", "0,1,0"], capsys, "with 0 more than once")
    (tmp_path / "wrong.toml").write_text(tomli_w.dumps(experiment | {"figure": {"x": "run.steps"}}))
    refused(["compare", tmp_path / "wrong.toml", "--out", tmp_path / "none"], capsys, "'pairs' sweeps run.local_steps")
    assert not (tmp_path / "none").exists(), "refused before the first run"


def test_labels_that_share_a_folder_are_refused_before_anything_is_trained(tmp_path, capsys):
    experiment = document(run__steps=4) | {"variant": [{"label": "A b"}, {"label": "c"}, {"label": "A-B"}]}
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(experiment))
    for words in ([], ["--resume"]):
        refused(["compare", tmp_path / "experiment.toml", "--out", tmp_path / "out", *words], capsys, "['A b', 'A-B']")
    assert not (tmp_path / "out").exists()


def test_price_and_report_read_what_was_recorded(tmp_path, capsys):
    simulate(single(run__steps=4), tmp_path / "run")
    (tmp_path / "network.toml").write_text("uplink_bps = 1e6\ndownlink_bps = 1e6\nstep_s = 1.0\n")
    code, out, err = run(["price", tmp_path / "run", tmp_path / "network.toml"], capsys)
    assert code == 0 and "2 rounds of 3 workers" in out and "Mbit/s" not in err
    (tmp_path / "network.toml").write_text("uplink_bps = 25\ndownlink_bps = 1e6\nstep_s = 1.0\n")
    code, out, err = run(["price", tmp_path / "run", tmp_path / "network.toml"], capsys)
    assert code == 0 and "is 25 bit/s; Mbit/s are written as uplink_bps = '25 Mbit/s'" in err
    assert " h for 2 rounds of 3 workers" in out, "with hours as a plan has them"
    code, out, _ = run(["report", tmp_path / "run", "--out", tmp_path / "page.html"], capsys)
    assert code == 0 and (tmp_path / "page.html").exists()
    assert f"table: {tmp_path / 'page-table.md'}" in out.replace("\n", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["network.toml", "page-table.md", "page.html", "run"]
    write_branches(tmp_path / "run", [{"round": 1, "digest": "", "changes": {"pipeline.stages": [3, 2]}}])
    code, out, err = run(["price", tmp_path / "run", tmp_path / "network.toml"], capsys)
    words = "after round 1: pipeline.stages from 3 to 2"
    assert code == 0 and f"changed ({words}), and all rounds are priced with the last ones" in err
    refused(["price", tmp_path / "run", tmp_path / "none.toml"], capsys, "none.toml")
    (tmp_path / "eight.toml").write_text(
        "uplink_bps = 1e6\ndownlink_bps = 1e6\nstep_s = 1.0\nsites.a.workers = [0, 1, 2, 3]\n"
    )
    refused(["price", tmp_path / "run", tmp_path / "eight.toml"], capsys, "eight.toml' does not fit")
    (tmp_path / "run" / "trace.jsonl").write_text("")
    refused(["price", tmp_path / "run", tmp_path / "network.toml"], capsys, "has finished no round")
    refused(["report", tmp_path / "nothing"], capsys, "nothing")
    refused(["report", tmp_path / "run", "--out", tmp_path / "run" / "run.toml"], capsys, "ends in .html")
    refused(["demo", "--foo"], capsys, "--jobs")


def test_runs_of_other_settings_do_not_count_as_seeds_of_one_method(tmp_path, capsys):
    for seed, lr in ((0, 1e-3), (1, 1e-3), (2, 2e-3)):
        text = single(name=f"a seed={seed}", seed=seed, inner__lr=lr, run__steps=2)
        simulate(text, tmp_path / f"run{seed}")
    folders = [tmp_path / f"run{seed}" for seed in range(3)]
    _, out, _ = run(["report", *folders[:2], "--out", tmp_path / "page.html"], capsys)
    assert "a seed=1" in out and "over 2 seeds" in out
    _, out, _ = run(["report", *folders, "--out", tmp_path / "page.html"], capsys)
    assert "run2" in out and "seeds" not in out
    assert "one seed each" in (tmp_path / "page.html").read_text()
    for shown, label in ((folders[:2], "a seed=1"), (folders, "run1")):
        contents = json.loads(LiveRuns(shown).data(""))
        assert label in [view["label"] for view in contents["runs"]]


def test_topology_shows_gap_condition_stability_and_the_graph(capsys):
    code, out, _ = run(["topology", "random", "--workers", 8, "--momentum", 0.8], capsys)
    assert code == 0
    for part in ("0.968", "1.029", "0.859", "0.744", "0 receives from 4"):
        assert part in out, (part, out)
    refused(["topology", "ring", "--round", "-1"], capsys, "--round got -1; give a round, from 0 on")
    code, out, _ = run(["topology", "ring", "--workers", 8, "--set", "edge_weight=1.0"], capsys)
    assert code == 0 and "spectral gap" in out and "6.828" in out and "none" in out
    refused(["topology", "rnig"], capsys, "did you mean 'ring'")


def test_a_table_says_what_it_is_for(tmp_path, capsys):
    (tmp_path / "network.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e8\nstep_s = 1.0\n")
    _, out, _ = run(["plan", tmp_path / "network.toml", "--workers", 2, "--local-steps", 15], capsys)
    assert out.splitlines()[1].startswith(
        "134m with a vocabulary of 256 (--vocab): 85,347,072 parameters, 2 workers"
    ), out
    _, out, _ = run(["utilisation", "--model", "10b", "--method", "diloco", "--set", "local_steps=30"], capsys)
    assert out.startswith("10b (10e9 parameters in 48 layers), diloco: ") and "s a step, 30 local steps" in out, out


def test_what_list_prints_is_what_the_code_has() -> None:
    stored = json.loads((Path(cli.__file__).parent / "list.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(from_code())), "run make methods"
    cut = [row[0] for kind, rows in stored.items() if kind != "methods" for row in rows if not row[1].endswith(".")]
    assert not cut, "a sentence ends where its docstring has the end of a line"


def test_list_shows_one_kind_and_cuts_no_option_off(capsys):
    code, out, _ = run(["list", "topologies"], capsys)
    assert code == 0 and "hypercube" in out and "sparseloco" not in out
    assert "graph=one_peer_" in out and not re.search(r"\w…", out), "a word that is too long continues in the next line"
    assert run(["list", "topologies", "--json"], capsys)[1].startswith('{"topologies": [{"name": ')
    code, _, err = run(["list", "codec"], capsys)
    assert code == 2 and "unknown list 'codec'; did you mean 'codecs'?" in err


MISTAKES = {
    "an unknown verb": (["simulat"], ["unknown command 'simulat'", "did you mean 'simulate'"]),
    "an unknown option": (["simulate", "--resum", "x"], ["'--resum'", "gossamer simulate", "did you mean '--resume'"]),
    "an unknown option before any verb": (["--versoin"], ["did you mean '--version'"]),
    "an option without its value": (["simulate", "--out"], ["--out", "see gossamer simulate --help"]),
    "an option given twice": (["simulate", "--out", "a", "--out", "b"], ["--out", "multiple"]),
    "a number that is none": (["topology", "ring", "--workers", "x"], ["--workers", "'x'"]),
    "a fraction of a worker": (["topology", "ring", "--workers", "2.5"], ["--workers", "'2.5'"]),
    "a flag with another value": (["compare", "--resume=perhaps"], ["--resume", "'perhaps'"]),
    "a word too many": (["topology", "ring", "tree"], ["'tree'", "gossamer topology --help"]),
    "an option in place of an argument": (["topology", "ring", "--set", "n=4"], ["unknown option 'n'", "edge_weight"]),
    "an option that the verb has": (["topology", "ring", "--set", "seed=4"], ["unknown option 'seed'"]),
    "a model by --set": (["utilisation", "--set", "model=70b"], ["unknown option 'model'"]),
    "a method by --set": (["utilisation", "--set", "method=diloco"], ["unknown option 'method'"]),
    "no folder": (["report"], ["RUN"]),
    "no network": (["price", "runs/x"], ["NETWORK"]),
    "no option that is needed": (["probe"], ["--out"]),
}


@pytest.mark.parametrize(("words", "parts"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_the_arguments_of_a_command_is_reported_in_one_sentence(words, parts, capsys):
    refused(words, capsys, *parts)


def test_every_verb_is_a_module_and_says_what_each_of_its_arguments_and_options_is(capsys):
    commands = {path.stem for path in Path(cli.__file__).parent.glob("*.py") if "\ndef command(" in path.read_text()}
    assert commands == set(cli.VERBS)
    for verb, sentence in cli.VERBS.items():
        code, out, _ = run([verb, "--help"], capsys)
        assert code == 0 and sentence in " ".join(out.split())
        mute = [line for line in out.splitlines() if re.fullmatch(r"  \S+( \S+)*( +\[required\])?", line)]
        assert not mute and max(map(len, out.splitlines())) <= 80, (verb, mute)


GROUPED = {
    "train": {
        "Options": ["--set", "--stages", "--shards", "--out", "--local"],
        "Continue": ["--resume", "--restarts", "--allow-code"],
        "Several machines": [
            "--rank",
            "--of",
            "--address",
            "--join",
            "--server",
            "--worker",
            "--key",
            "--listen",
            "--store",
            "--secret",
        ],
        "Output": ["--json", "--quiet", "--watch"],
    },
    "plan": {
        "Model and text": ["--model", "--data", "--tokenizer", "--vocab", "--seq-len", "--batch-size"],
        "Goal": ["--tokens", "--hours", "--loss", "--anchor", "--law"],
        "Machines": ["--workers", "--step-s", "--peak-flops", "--mfu", "--memory-bytes"],
        "What is tried": ["--local-steps", "--codec", "--boundary", "--keep-all", "--method", "--all"],
        "Run file": ["--out", "--adapt", "--weigh-steps"],
        "Race": ["--race", "--race-folder", "--resume", "--jobs"],
        "Output": ["--json", "--quiet", "--watch"],
    },
}


@pytest.mark.parametrize("verb", GROUPED)
def test_the_options_of_a_long_list_stand_in_groups_by_purpose(verb, capsys):
    groups = dict[str, list[str]]()
    for line in run([verb, "--help"], capsys)[1].splitlines():
        if title := re.fullmatch(r"(\w[\w ]+):", line):
            groups[title[1]] = options = []
        elif option := re.match(r"  (--[a-z-]+)", line):
            options.append(option[1])
    groups.pop("Arguments")
    assert list(groups.items()) == list(GROUPED[verb].items())


def test_the_version_is_that_of_the_package(capsys):
    assert run(["--version"], capsys) == (0, f"{gossamer.__version__}\n", "")


def test_a_closed_pipe_ends_a_command_silently():
    command = [sys.executable, "-m", "gossamer", "init", "--list"]  # which imports little
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, b"")


def test_a_plan_writes_its_run_file_though_its_table_has_no_reader(tmp_path):
    (tmp_path / "network.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e8\nstep_s = 1.0\n")
    command = [sys.executable, "-m", "gossamer", "plan", "network.toml", "--workers", "2", "--local-steps", "15"]
    with subprocess.Popen([*command, "--out", "run.toml"], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        process.stdout.close()
        assert process.wait(250) == 0 and (tmp_path / "run.toml").is_file()


def test_a_command_that_is_terminated_ends_as_with_ctrl_c():
    program = "import os, signal\nfrom gossamer.cli import app, main\n"
    program += (
        "app.command(lambda: os.kill(os.getpid(), signal.SIGTERM), name='stop')\nraise SystemExit(main(['stop']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (130, "gossamer: stopped\n")


class Hidden:
    """Finds none of the packages of the extras."""

    NAMES = frozenset(["matplotlib", "tensorboard", "wandb", "pyarrow", "datasets", "tokenizers", "transformers"])

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def without_extras(words):
    """Several commands, where nothing but the dependencies is installed."""
    assert not Hidden.NAMES & {*sys.modules}
    sys.meta_path.insert(0, Hidden())
    for command in json.loads(words[0]):
        code = main(command)
        sys.stdout.flush()
        print(command[0], "exits with", code)
    return 0


def test_without_the_extras_a_run_is_trained_and_reported_and_one_sentence_names_what_draws(run_file, tmp_path):
    swept = document(run__steps=4, model__layers=1) | {
        "sweep": {"run.local_steps": [1, 2]},
        "figure": {"x": "run.local_steps"},
    }
    (tmp_path / "swept.toml").write_text(tomli_w.dumps(swept))
    commands = [
        ["simulate", run_file, "--out", tmp_path / "run", "--set", "run.steps=4", "--set", "record.export=true"],
        ["report", tmp_path / "run", "--out", tmp_path / "page.html"],
        ["compare", tmp_path / "swept.toml", "--out", tmp_path / "swept"],
        ["simulate", run_file, "--out", tmp_path / "other", "--set", "record.tensorboard=true"],
        ["simulate", run_file, "--out", tmp_path / "other", "--set", "record.wandb_project=p"],
        ["utilisation", "--plot", tmp_path / "curve.svg"],
    ]
    words = json.dumps([[str(word) for word in command] for command in commands])
    code, output = Command(words, work=without_extras).finish()
    assert code == 0, output
    lines = [line for line in sentences(output) if line.startswith("gossamer: ") or "exits with" in line]
    lacking = "the figure of an experiment needs the extra 'plots' (No module named 'matplotlib'); run pip install"
    lines = [line for line in lines if "has its full size after" not in line]
    assert lines[:2] == ["simulate exits with 0", "report exits with 0"] and lines[3] == "compare exits with 0", lines
    assert lines[2].startswith(f"gossamer: {lacking}"), lines
    assert output.count("val loss") == 3 and (tmp_path / "run" / "model").is_dir()
    assert (tmp_path / "swept" / "figure.md").exists() and not (tmp_path / "swept" / "figure.svg").exists()
    for page in (tmp_path / "run" / "report.html", tmp_path / "page.html", tmp_path / "swept" / "report.html"):
        text = page.read_text()
        assert "<table>" in text and "Training loss, mean over workers" in text, "the page needs no extra"
    refusals = [("tensorboard", "simulate"), ("wandb", "simulate"), ("plots", "utilisation")]
    assert lines[5::2] == [f"{verb} exits with 2" for _, verb in refusals]
    for sentence, (extra, _) in zip(lines[4::2], refusals, strict=True):
        assert f"the extra '{extra}'" in sentence and f"run {installs(extra)}, or " in sentence, sentence
        assert "gossamer[" not in sentence, "nobody has published that name"


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_some_characters_shows_others_and_ends_no_command(encoding, tmp_path, monkeypatch):
    settings = document(model__layers=1, run__steps=2, data__batch_size=1)
    (tmp_path / "run.toml").write_text(tomli_w.dumps({**settings, "name": "läuft τ"}), "utf-8")
    words = [
        ["simulate", "run.toml", "--out", "out"],
        ["report", "out"],
        ["plan", "--help"],
        *(["list", kind] for kind in ("rules", "methods", "codecs", "topologies", "pairs")),
    ]
    monkeypatch.chdir(tmp_path)
    code, errors = Command(encoding, json.dumps(words), work=in_an_encoding).finish()
    text = (tmp_path / "said").read_text(encoding)
    assert code == 0 and "Traceback" not in errors and text.count("code 0") == len(words), (text, errors)
    assert ("l?uft ?" if encoding == "ascii" else "läuft ?") in text


def in_an_encoding(words):
    """Several commands whose output is a file in this encoding, as PYTHONIOENCODING says to Python."""
    encoding, commands = words
    os.dup2(os.open("said", os.O_CREAT | os.O_WRONLY), 1)
    sys.stdout.reconfigure(encoding=encoding)
    for command in json.loads(commands):
        print("code", main(command))
    sys.stdout.flush()
    return 0


@pytest.mark.parametrize("verb", ["init", "plan"])
def test_a_full_disk_leaves_no_part_of_a_file_that_a_second_call_would_take_for_whole(verb, tmp_path, capsys):
    network = tmp_path / "network.toml"
    network.write_text("uplink_bps = [1e8, 1e8]\ndownlink_bps = 1e8\nstep_s = 0.5\n")
    plan = ["plan", network, "--local-steps", 15, "--method", "diloco", "--out", tmp_path / "run.toml"]
    words = {"init": ["init", tmp_path / "configs"], "plan": plan}[verb]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file may grow, as on a full disk
    try:
        code, _, err = run(words, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "could not be written (File too large); free some space, then call it again" in err, err
    assert [*tmp_path.rglob("*.toml")] == [network]
    assert run(words, capsys)[0] == 0


def test_only_a_fault_of_a_disk_advises_to_look_at_a_path(monkeypatch, capsys):
    faults = {
        ConnectionResetError("the hub hung up"): "a connection failed (ConnectionResetError: the hub hung up)",
        TimeoutError(): "a connection failed (TimeoutError)",
        OSError(errno.ENOSPC, "No space left on device"): "No space left on device; check that path, its permissions",
        PermissionError(
            errno.EACCES, "Permission denied", "a/b"
        ): "'a/b'; check that path, its permissions and the space",
        OSError("Can't load tokenizer"): "a library refused something (OSError: Can't load tokenizer)",
    }
    for fault, sentence in faults.items():

        def failing(words, fault=fault):
            raise fault

        monkeypatch.setattr(cli, "app", failing)
        code, _, err = run([], capsys)
        assert code == 2 and sentence in err and ("check that path" in err) == ("check that path" in sentence), err
