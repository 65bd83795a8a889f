"""Parts of the user's own in run files: a separate package is installed, and runs simulated, real and in reports."""

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hatchling.builders.wheel import WheelBuilder
from test_watch import contents, served

import gossamer
from commands import run
from gossamer.errors import ConfigError, UserCodeError
from gossamer.record.folder import read_metrics
from gossamer.rules import make_rule
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import parse
from gossamer.run.config.user_parts import own_parts
from gossamer.run.participant.agreement import run_key, run_settings
from gossamer.run.worker.task import task_of
from gossamer.settings.user_code import imported, is_code
from gossamer.transport.alike import difference
from tiny import document

PACKAGE = Path(__file__).parents[2] / "stranger"
STEPS: dict[str, Any] = {
    "model__size": "stranger.parts:small",
    "model__options": {"width": 6},
    "model__loss": "stranger.parts:square",
    "data": {"source": "stranger.parts:batch", "validation": "stranger.parts:held_out", "seq_len": 1, "batch_size": 6},
    "inner__optimizer": "stranger.parts:descent",
    "inner__options": {"factor": 2.0},
    "inner__momentum": 0.5,
    "run__steps": 6,
    "run__local_steps": 2,
    "run__checkpoint_every": 2,
}
METHOD: dict[str, Any] = {
    "rule": {"name": "stranger.parts:halfway", "share": 0.25},
    "topology": {"name": "stranger.parts:line"},
    "codec": {"name": "stranger.parts:short"},
}


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package, built and unpacked as pip does it, in a folder of its own on the path of this process and of its children."""
    target = tmp_path_factory.mktemp("site")
    (wheel,) = WheelBuilder(str(PACKAGE)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    sys.path.insert(0, str(target))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{target}:{Path(gossamer.__file__).parents[1]}")
        yield target
    sys.path.remove(str(target))


def written(folder: Path, **overrides: Any) -> Path:
    """A run file with these parts."""
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps({**document(**{**STEPS, **overrides})}))
    return file


def test_a_package_of_somebody_else_runs_simulated_real_and_in_reports(stranger: Path, tmp_path: Path):
    file = written(tmp_path, **METHOD)
    code, output = run("simulate", file, "--out", tmp_path / "simulated")
    assert code == 0 and output.count("imported stranger.parts:") == 8, output
    code, output = run("train", file, "--local", 3, "--out", tmp_path / "real")
    assert code == 0 and output.count("imported stranger.parts:halfway") == 1, output
    code, output = run("evaluate", tmp_path / "real")
    assert code == 0, output
    last = [line for line in read_metrics(tmp_path / "simulated") if line["kind"] == "eval"][-1]
    again = [line for line in read_metrics(tmp_path / "real") if line["kind"] == "eval"][-1]
    assert (last["loss"], last["worker_losses"]) == (again["loss"], again["worker_losses"])
    assert (tmp_path / "real" / "model" / "model.safetensors").is_file()
    code, output = run("report", tmp_path / "simulated", tmp_path / "real", "--out", tmp_path / "both.html")
    assert code == 0 and "stranger.parts:halfway" in (tmp_path / "both.html").read_text(), output


def test_a_server_and_a_sweep_with_code_of_somebody_else_run_too(stranger: Path, tmp_path: Path):
    network = {"slow": {"step_s": 0.1, "uplink_bps": 1e6, "downlink_bps": 1e6}}
    file = written(tmp_path, server={"name": "stranger.parts:averaging", "share": 0.3}, network=network)
    code, output = run("simulate", file, "--out", tmp_path / "virtual")
    assert code == 0, output
    code, output = run("train", file, "--local", 3, "--out", tmp_path / "served")
    assert code == 0, output
    experiment = tmp_path / "compare.toml"
    variants = [{"label": name, "rule.name": name} for name in ("stranger.parts:damped", "gasloc")]
    experiment.write_text(tomli_w.dumps({**document(**STEPS), "variant": variants}))
    code, output = run("compare", experiment, "--out", tmp_path / "compared")
    assert code == 0 and output.count("imported stranger.parts:small") == 1, output


def test_an_own_rule_with_wrappers_and_options_is_that_rule(stranger: Path):
    config = parse(document(rule={"name": "stranger.parts:damped", "lr": 0.4, "restarted": {"every": 2}}))
    made, parts = resolve(config, own_parts(config)).in_rounds.rule, own_parts(config)
    ours = make_rule("gasloc", lr=0.4, momentum=0.3, restarted={"every": 2})
    assert made.options["lr"] == ours.options["lr"] == 0.4 and made.name == "restarted_stranger.parts:damped"
    assert [code.name for code in parts.codes] == ["stranger.parts:damped"] and len(parts.codes[0].sha256) == 64


def test_an_optimizer_of_torch_is_called_with_the_settings_that_it_takes():
    config = parse(document(inner={"optimizer": "torch.optim:RMSprop", "lr": 0.02, "options": {"alpha": 0.9}}))
    task = task_of(settings_of(config, own_parts(config)))
    assert task.optimizer is not None
    made = task.optimizer([torch.nn.Parameter(torch.ones(2))])
    assert isinstance(made, torch.optim.RMSprop)
    defaults = made.param_groups[0]
    assert (defaults["lr"], defaults["alpha"], defaults["weight_decay"]) == (0.02, 0.9, config.inner.weight_decay)


def test_an_optimizer_keeps_its_own_default_where_a_name_means_another_kind_of_value_there():
    config = parse(document(inner={"optimizer": "torch.optim:Adafactor", "lr": 0.02}))
    task = task_of(settings_of(config, own_parts(config)))
    assert task.optimizer is not None
    (group,) = task.optimizer([torch.nn.Parameter(torch.ones(2))]).param_groups
    assert group["lr"] == 0.02 and isinstance(group["eps"], tuple)  # ours is one number


def test_an_optimizer_whose_step_needs_a_closure_is_refused_before_the_training():
    config = parse(document(inner={"optimizer": "torch.optim:LBFGS"}))
    task = task_of(settings_of(config, own_parts(config)))
    assert task.optimizer is not None
    with pytest.raises(ConfigError, match=r"'torch\.optim:LBFGS', whose step cannot be called alone"):
        task.optimizer([torch.nn.Parameter(torch.ones(2))])


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module that must not be imported, a run file that names it, a run that did, and a network file."""
    place = tmp_path_factory.mktemp("trapped")
    (place / "trap.py").write_text("open('imported', 'w').close()")
    names: dict[str, Any] = {"rule": "trap:rule", "model__size": "trap:model", "data__source": "trap:batch"}
    (place / "trapped.toml").write_text(tomli_w.dumps(document(**names)))
    assert gossamer.simulate(document(run__steps=2), place / "run").over
    recorded = (place / "run" / "run.toml").read_text().replace('name = "gasloc"', 'name = "trap:rule"')
    (place / "run" / "run.toml").write_text(recorded)
    (place / "network.toml").write_text("step_s = 0.1\nuplink_bps = 1e6\ndownlink_bps = 1e6\n")
    return place


def test_verbs_that_only_look_import_no_code_of_a_run_file_or_a_run_folder(
    trapped: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(trapped)
    code, output = run("check", "trapped.toml")
    assert code == 0 and "Python code" in output and "trap:rule, which is not imported here" in output
    for words in ("price run network.toml", "report run --out r.html", "status run"):
        code, output = run(*words.split())
        assert code == 0, output
    run("doctor", "trapped.toml")  # whose exit code depends on this machine
    with served(Path("run")) as page:
        assert len(contents(page)["runs"]) == 1
    assert not Path("imported").exists()
    assert run("simulate", "trapped.toml")[0] == 2 and Path("imported").exists(), "the trap works"


WRONG = {
    "a missing module": ({"rule": "strange.parts:halfway"}, ConfigError, "there is no module 'strange'"),
    "a missing module inside": ({"rule": "stranger.no:halfway"}, ConfigError, "there is no module 'stranger.no'"),
    "a missing name": ({"rule": "stranger.parts:half"}, ConfigError, "has no 'half'; it has .*halfway"),
    "no function": ({"rule": "stranger.parts:not_callable"}, ConfigError, "a int, which cannot be called"),
    "the wrong kind": ({"rule": "stranger.parts:short"}, ConfigError, "returned a Codec where a Rule is needed"),
    "an unknown option": (
        {"rule": {"name": "stranger.parts:halfway", "shar": 1.0}},
        ConfigError,
        "did you mean 'share'",
    ),
    "an exception": ({"rule": "stranger.parts:broken"}, UserCodeError, "ZeroDivisionError: lr is 0.5"),
    "an unknown wrapper's option": (
        {"rule": {"name": "stranger.parts:halfway", "restarted": {"evry": 2}}},
        ConfigError,
        "did you mean 'every'",
    ),
    "options of our own model": ({"model__options": {"width": 3}}, ConfigError, "remove model.options"),
    "options of our own optimizer": ({"inner__options": {"a": 3}}, ConfigError, "remove inner.options"),
    "validation of our own data": (
        {"data__validation": "stranger.parts:held_out"},
        ConfigError,
        "remove data.validation",
    ),
    "layers of an own model": (
        {"model__size": "stranger.parts:small", "model__layers": 2},
        ConfigError,
        "pass it in model.options",
    ),
    "no name": ({"rule": "stranger parts:x"}, ConfigError, "unknown rule"),
}


def started(settings: dict[str, Any]) -> None:
    config = parse(settings)
    resolve(config, own_parts(config))


DRIVERS: dict[str, dict[str, Any]] = {
    "in rounds": {},
    "elastic": {"run__elastic": True},
    "without waiting": {"run__wait": False},
    "in pairs": {"pair__name": "a2cid2", "topology__name": "complete"},
    "served": {"server__name": "heloco", "run__pace_s": 0.5},  # else one may take all steps before another has come
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("driver", DRIVERS)
def test_real_workers_that_train_on_the_same_batches_are_warned_once(stranger: Path, tmp_path: Path, driver: str):
    settings = {**STEPS, "data": {**STEPS["data"], "source": "stranger.parts:same_for_all"}, "run__steps": 2}
    code, output = run(
        "train", written(tmp_path, **settings, **DRIVERS[driver]), "--local", 3, "--out", tmp_path / "real"
    )
    # Of a server's run two may have taken all steps before the third has come.
    found = re.findall("all [23] workers begin with the same batch", output)
    assert code == 0 and len(found) == 1, output


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_its_sentence(stranger: Path, name: str):
    overrides, kind, match = WRONG[name]
    with pytest.raises(kind, match=match):
        started(document(**overrides))


def test_an_exception_shows_the_users_traceback_and_no_frame_of_ours(stranger: Path, tmp_path: Path):
    code, output = run("simulate", written(tmp_path, rule="stranger.parts:broken"), "--out", tmp_path / "run")
    assert code == 2 and 'raise ZeroDivisionError(f"lr is {lr}")' in output and output.count("Traceback") == 1
    assert "gossamer/code.py" not in output and output.rstrip().splitlines()[-1].startswith("gossamer: rule.name")


def test_a_module_that_fails_while_it_is_imported_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "spoilt.py").write_text("import no_such_package_of_ours\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserCodeError, match="no_such_package_of_ours"):
        imported("rule.name", "spoilt:rule")


def test_workers_with_other_code_learn_which_file_differs(stranger: Path):
    config = parse(document(**{**STEPS, **METHOD}))
    ours = own_parts(config)
    theirs = ours._replace(codes=tuple(code._replace(sha256="0" * 64) for code in ours.codes[-1:]))
    here, there = settings_of(config, ours), settings_of(config, theirs)
    task = task_of(here)
    mine, others = run_settings(here, task), run_settings(there, task)
    assert run_key(here, task) != run_key(there, task)
    assert "the code of stranger.parts:" in difference("worker 1", mine, "worker 0", others)


def test_paths_and_streams_are_no_code():
    for name in ("hf:openwebtext", "data/a.txt", "stdlib", "https://x.y/z", "a b:c"):
        assert not is_code(name)
