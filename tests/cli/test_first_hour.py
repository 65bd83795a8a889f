"""The first hour: what is in the wheel, files to start from, the demo, results for programs, and links that lead somewhere."""

import contextlib
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from gossamer.cli import VERBS, main
from gossamer.cli.demo import NEXT, meaning, next_steps
from gossamer.cli.init import EXAMPLES
from gossamer.record.folder import read_metrics
from gossamer.report.results import PointResult, read_results
from gossamer.report.verdict import verdict
from tiny import document

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.size": "0.2m",
    "data.seq_len": 16,
    "data.batch_size": 2,
    "data.max_bytes": 100_000,
    "run.steps": 4,
    "run.local_steps": 2,
    "run.eval_batches": 1,
    "run.checkpoint_every": 2,
    "run.threads": 1,
}
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


def test_every_example_file_is_in_the_package() -> None:
    link = ROOT / "configs"  # of the repository only
    assert not link.exists() or link.resolve() == EXAMPLES.resolve(), "configs is a link to the files of the package"
    files = [*map(str, EXAMPLES.rglob("*.toml"))]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert len(files) > 8 and ignored.stdout == "", "hatch leaves out of the wheel what git ignores"


def start_from(words: list[str]) -> int:
    """What one does first, with the package in this folder in place of the one that was imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "gossamer"]:
        del sys.modules[name]
    sys.path.insert(0, words[0])
    for name in ("gossamer", "gossamer.cli.demo", "gossamer.run.simulated.simulate"):
        assert str(importlib.import_module(name).__file__).startswith(words[0]), f"{name} is that of the repository"
    main = importlib.import_module("gossamer.cli").main
    demo = ["demo", "--quiet", *SETS, "--set", "run.steps=2"]
    return main(["init"]) or main(["check", "configs/gasloc.toml"]) or main(demo)


def test_the_wheel_holds_the_example_files_and_its_verbs_run_without_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    sources = importlib.import_module("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    with tarfile.open(next(sources.build(directory=str(tmp_path), versions=["standard"]))) as archive:
        kept = sum("/src/gossamer/configs/" in name for name in archive.getnames())
    assert kept == len([*EXAMPLES.rglob("*.toml")]), "hatch takes each file once, and would take the link to them first"
    monkeypatch.chdir(tmp_path)
    code, output = Command(tmp_path / "site", work=start_from).finish()
    assert code == 0, output
    assert (tmp_path / "runs" / "demo" / "report.html").exists() and "gasloc: can start" in output


def test_init_writes_examples_and_keeps_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gasloc.toml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert (tmp_path / "gasloc.toml").read_text() == "mine" and "gasloc.toml (exists, and was kept)" in output
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.toml")}
    examples = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.toml")}
    assert written == examples
    assert (tmp_path / "demo.toml").read_bytes() == (EXAMPLES / "demo.toml").read_bytes()
    assert main(["init", str(tmp_path / "other"), "--list"]) == 0
    assert not (tmp_path / "other").exists()
    assert capsys.readouterr().out.count(".toml: ") == len(examples)
    assert main(["init", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == []


def test_the_demo_leaves_its_models_and_no_checkpoints_and_can_be_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--out", str(tmp_path / "demo"), *SETS]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "GASLoC 1-Peer" in out and "DiLoCo" in out and "round 2 of 2" in err
    assert "What it means: " in out and out.endswith(NEXT.partition("\n")[2] + "\n") and "watch:" not in err, (
        "no terminal, no page"
    )
    runs = [tmp_path / "demo" / name for name in ("gasloc-1-peer", "diloco")]
    assert all((run / "model" / "model.safetensors").exists() for run in runs)
    assert not any((run / "checkpoints").exists() for run in runs)
    recipe = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "gossamer demo --resume" in recipe, "a second call is the one below, which ends with the same table"
    assert (
        sum(path.stat().st_size for path in tmp_path.rglob("*")) < 5e6
    )  # four models of 0.6 MB; 50 MB with checkpoints
    assert main([*words, "--resume", "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [one["method"] for one in result["runs"]] == ["GASLoC 1-Peer", "DiLoCo", "gossip 1-Peer", "local SGD"]
    assert out.count("\n") == 1 and result.keys() == EXPLAINED["demo"] and not err
    before = read_metrics(runs[0])
    assert main(["simulate", "--resume", str(runs[0])]) == 0
    assert "the run has ended after 2 rounds; gossamer report" in capsys.readouterr().err
    assert read_metrics(runs[0]) == before
    assert main(["evaluate", str(runs[0])]) == 2
    assert "record.keep_checkpoints is false" in capsys.readouterr().err


def test_a_demo_of_another_version_stays_and_the_next_one_takes_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["demo", "--resume", *SETS, "--set", "run.steps=2"]
    assert main(words) == 0 and "other settings" not in capsys.readouterr().err
    before = Path("runs/demo/report.html").read_bytes()
    assert main([*words, "--set", "seed=5"]) == 0
    assert "'runs/demo' holds runs with other settings" in capsys.readouterr().err
    assert Path("runs/demo/report.html").read_bytes() == before
    Path("runs/demo-2/diloco/run.toml").write_text("gone = 1\n")
    assert main([*words, "--set", "seed=5"]) == 0
    assert "'runs/demo-2' holds" in capsys.readouterr().err and Path("runs/demo-3/report.html").exists()
    assert main(words) == 0 and "other settings" not in capsys.readouterr().err, "the first is finished"


def test_a_run_that_will_keep_no_checkpoints_resumes_until_it_has_ended(tmp_path: Path) -> None:
    from gossamer.run.config.run_file import parse
    from gossamer.run.simulated.simulate import simulate

    config = parse(document(record__keep_checkpoints=False, run__steps=8, model__layers=1))
    simulate(config, tmp_path / "cut", until=2)
    assert (tmp_path / "cut" / "checkpoints").exists()
    assert simulate(config, tmp_path / "cut", resume=True).loss == simulate(config, tmp_path / "whole").loss
    assert not (tmp_path / "cut" / "checkpoints").exists() and not (tmp_path / "whole" / "checkpoints").exists()


WITHOUT_JSON = {"completion": "prints a script", "play": "serves a page to play with", "watch": "serves a page"}
KEYS = {  # the sections of docs/json.md, and the keys that each explains
    verb: set(re.findall(r"^- (`\w+`(?:, `\w+`)*)", section, re.MULTILINE))
    for section in (ROOT / "docs" / "json.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for verb in section.partition("\n")[0].split(", ")
}
EXPLAINED = {verb: {key.strip("`") for keys in some for key in keys.split(", ")} for verb, some in KEYS.items()}
INSIDE = {  # all that each section has in backticks
    verb: set(re.findall(r"`(\w+)`", section))
    for section in (ROOT / "docs" / "json.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for verb in section.partition("\n")[0].split(", ")
}
BY_NAME = {
    "files",
    "network",
    "peers",
    "unpriced",
    "validation",
    "waiting_for",
    "wall_s",
    "weights",
    "left_out",
    "refused",
}
"""Objects whose keys are names, numbers of workers, or keys of a network file; `utilisation` of a report is another."""


def keys_inside(result: Any) -> set[str]:
    """The keys of a result and of the objects and lists in it that are one word, those inside of `BY_NAME` apart."""
    if isinstance(result, list):
        return {key for one in result for key in keys_inside(one)}
    if not isinstance(result, dict):
        return set()
    inside = [keys_inside(value) for key, value in result.items() if key not in BY_NAME]
    return {key for key in result if key.isidentifier()}.union(*inside)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, a network file, and what the verbs that need a run work on."""
    import tomli_w

    folder = tmp_path_factory.mktemp("json")
    experiment = document(run__steps=2, workers=2, run__local_steps=1, model__layers=1)
    experiment["network"] = {"slow": {"uplink_bps": 1e8, "downlink_bps": 1e8, "step_s": 0.5}}
    (folder / "run.toml").write_text(tomli_w.dumps(experiment))
    (folder / "two.toml").write_text(tomli_w.dumps({**experiment, "sweep": {"seed": [0]}}))
    tune = {"budget_tokens": 192, "lr": [1e-3], "outer": [], "rungs": [1.0]}
    (folder / "tune.toml").write_text(tomli_w.dumps({**experiment, "tune": tune}))
    (folder / "network.toml").write_text("uplink_bps = 1e8\ndownlink_bps = 1e8\nstep_s = 0.5\n")
    for name, hashes in (("run", "false"), ("hashed", "true")):
        words = [
            "simulate",
            str(folder / "run.toml"),
            "--out",
            str(folder / name),
            "--quiet",
            "--set",
            f"record.hash={hashes}",
        ]
        assert main(words) == 0
    return folder


def words_of(verb: str, folder: Path, out: Path) -> list[object]:
    """A command that has a result."""
    file, run, network = folder / "run.toml", folder / "run", folder / "network.toml"
    return {
        "simulate": [file, "--out", out],
        "check": [file],
        "train": [file, "--local", 2, "--out", out, "--quiet"],
        "compare": [folder / "two.toml", "--out", out],
        "tune": [folder / "tune.toml", "--out", out, "--jobs", 1],
        "keys": ["new", "berlin", "--out", out / "berlin.pem"],
        "doctor": [file],
        "status": [run],
        "evaluate": [run],
        "audit": [folder / "hashed"],
        "topology": ["ring"],
        "probe": ["--local", 2, "--links-only", "--out", out, "--max-bytes", 65536, "--test-s", 0.01],
        "price": [run, network],
        "plan": [network, "--workers", 2, "--local-steps", 15, "--method", "diloco"],
        "utilisation": ["--analytic"],
        "goodput": ["--set", "interruptions=100"],
        "report": [run, "--out", out.with_suffix(".html")],
        "list": [],
        "init": [out],
    }[verb]


def test_a_verb_without_a_result_for_programs_is_explained() -> None:
    assert VERBS.keys() - EXPLAINED.keys() == WITHOUT_JSON.keys()
    *others, last = (f"`{verb}`, which {why}" for verb, why in WITHOUT_JSON.items())
    explained = f"{', '.join(others)}, and {last}"
    assert explained in (ROOT / "docs" / "json.md").read_text().replace("\n", " ")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in WITHOUT_JSON and verb != "demo"])  # above
def test_the_result_of_every_verb_is_one_line_of_json_with_the_keys_that_are_explained(
    verb: str, a_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main([verb, *map(str, words_of(verb, a_run, tmp_path / "out")), "--json"]) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and out.endswith("\n"), out
    assert verb != "train" or "round 2 of 2" not in err, "the workers are quiet, too"
    result = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    only_with_figure = set() if verb == "compare" else {"figure", "numbers"}
    assert result.keys() == EXPLAINED[verb] - only_with_figure
    assert keys_inside(result) - {"slow"} <= INSIDE[verb]
    if verb == "train":  # nobody has scored the mean model, and the mean of its workers' own losses has another name
        losses = [*result["validation"].values()]
        assert result["loss"] is None and result["loss_of_workers"] == math.fsum(losses) / 2 and result["round"] == 2
    if verb == "simulate":
        assert result["runs"][0]["loss_of_workers"] is not None


@pytest.mark.parametrize("verb", ["simulate", "compare"])
def test_a_quiet_verb_prints_its_result_and_no_progress(
    verb: str, a_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, *map(str, words_of(verb, a_run, tmp_path / "out")), "--quiet"]) == 0
    out, err = capfd.readouterr()
    assert re.search("^(report|run): ", out, re.MULTILINE) and "round 2 of" not in out + err, (out, err)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_a_shell_gets_a_script_that_knows_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in VERBS) and "local-steps" in script


COMPLETES = {
    "bash": """source ./script
for line in "$@"; do
  COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _gossamer_values 2> errors; echo ${COMPREPLY[@]}
done""",
    # The builtins that work within a completion alone are replaced by what shows their words.
    "zsh": """compdef() { : }; source ./script
compadd() { shift ${@[(i)--]}; print -r -- ${(M)@:#$words[CURRENT]*} }
_describe() { compadd -- simulate }
_arguments() { state=cmds }
for line in "$@"; do words=(${=line}); CURRENT=$#words; print -r -- $(_gossamer_values); done""",
    "fish": """source ./script
for line in $argv; echo (complete -C $line | string replace -r '\\t.*' ''); end""",
}


@pytest.mark.parametrize("shell", COMPLETES)
def test_shells_complete_run_folders_keys_topologies_and_methods(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"this machine has no {shell}")
    assert main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out, encoding="utf-8")
    for run in ("first", "second"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "run.toml").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    lines = {
        "gossamer status runs/": "runs/first runs/second",
        "gossamer evaluate runs/fi": "runs/first",
        "gossamer topology hyp": "hypercube",
        "gossamer list top": "topologies",
        "gossamer simulate a.toml --set rule.na": "rule.name=",
        "gossamer simulate a.toml --set meth": "method=",
        "gossamer plan net.toml --method streaming_d": "streaming_diloco",
        "gossamer simul": "simulate",
    }
    (tmp_path / "program").write_text(COMPLETES[shell])
    output = subprocess.run([shell, "program", *lines], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert [line.strip() for line in output.stdout.splitlines()] == [*lines.values()], output


DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
GENERATED = (
    "methods/",
    "reference/",
    "adr/index.md",
    "results/index.md",
    "results/paper/index.md",
    "topologies.md",
    "codecs.md",
    "boundaries.md",
    "contributing.md",
    "changelog.md",
    "film.html",
)
"""Pages that only the site has; its strict build finds links to what is not there."""


def anchors(page: Path) -> Iterator[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_of_a_page_is_broken(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if there.is_relative_to(DOCS) and str(there.relative_to(DOCS)).startswith(GENERATED):
            continue
        assert there.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(there), f"{page}: {target} names no heading"


def outcome(method: str, straggler: list[tuple[float, float]], seed: int = 0) -> PointResult:
    """A run by its seconds and losses beside a slow uplink."""
    end_s, loss = straggler[-1]
    row = {"method": method, "loss": loss, "wall_s": {"even": 1.0, "straggler": end_s}}
    row["loss_at_s"] = {"even": [(1.0, loss)], "straggler": straggler}
    return PointResult(method, {}, seed, row, None)


def test_the_demo_says_in_a_sentence_what_its_table_means_and_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gasloc = outcome("GASLoC 1-Peer", [(431, 2.03), (862, 1.86)])
    slow = [gasloc, outcome("DiLoCo", [(828, 1.84), (1104, 1.79)]), outcome("gossip 1-Peer", [(862, 1.9)])]
    sentence = meaning(slow)
    assert "DiLoCo ends with the lowest validation loss (1.790), and where one uplink" in sentence
    assert "it takes 18 min 24 s. GASLoC 1-Peer ends first there, after 14 min 22 s at 1.860" in sentence
    assert (
        "the last validation of DiLoCo by then is 1.840: at equal time DiLoCo is ahead with this seed. With one seed each"
        in sentence
    )
    behind = [gasloc, outcome("DiLoCo", [(828, 1.87), (1104, 1.79)]), outcome("local SGD", [(860, 1.85), (1104, 1.88)])]
    assert "DiLoCo by then is 1.870: at equal time GASLoC 1-Peer is ahead" in meaning(behind[:2])
    assert "DiLoCo by then is 1.870, and that of local SGD 1.850: at equal time local SGD is ahead" in meaning(behind)
    assert "DiLoCo has no validation by then: at equal time GASLoC" in meaning(
        [gasloc, outcome("DiLoCo", [(900, 1.8)])]
    )
    alike = [one._replace(seed=1) for one in (gasloc, outcome("DiLoCo", [(828, 1.88), (1104, 1.79)]))]
    assert "at equal time no difference is shown" in meaning([*slow[:2], *alike])
    assert "it takes 14 min 25 s: none" in meaning([gasloc, outcome("DiLoCo", [(600, 2.0), (865, 1.79)])])
    assert "it takes 14 min 22 s: none ends sooner" in meaning([gasloc, outcome("DiLoCo", [(1104, 1.95)])])
    assert "--seeds" not in meaning([*slow, *(one._replace(seed=1) for one in slow)])
    for lacking in ([], [outcome("DiLoCo", [(1.0, math.nan)])], [gasloc, outcome("DiLoCo", [(1104, math.nan)])]):
        assert "says nothing yet" in meaning(lacking)
    committed = read_results(ROOT / "docs" / "results" / "demo.jsonl")
    ahead = "DiLoCo by then is 1.851: at equal time DiLoCo is ahead."
    assert meaning(committed).startswith("What it means: DiLoCo ends") and ahead in meaning(committed)
    assert ahead in verdict([one.row for one in committed]), "the page says the same"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    (tmp_path / "bin" / "gossamer").touch(mode=0o755)
    assert next_steps("bin/no-environment") == NEXT
    with contextlib.chdir(tmp_path):
        assert next_steps("bin/gossamer").splitlines()[1].split("#")[0].strip() == ". bin/activate"
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        assert next_steps("bin/gossamer") == next_steps(str(tmp_path / "bin" / "gossamer")) == NEXT
    words = [line.partition("#")[0].split() for line in NEXT.splitlines()[1:]]
    text = tmp_path / "text.txt"
    text.write_text("all that is read is read again\n" * 400)
    few = ("model.layers=1", "run.steps=1", "run.local_steps=1", "inner.warmup_steps=0", "workers=2", "data.seq_len=8")
    fewer = [word for one in (*few, "run.eval_batches=1", "data.batch_size=1") for word in ("--set", one)]
    ran = []
    with contextlib.chdir(tmp_path):
        for _, verb, *rest in words:
            given = [word.replace("TEXT", str(text)) for word in rest]
            if verb != "play":
                assert main([verb, *given, *(fewer if verb == "simulate" else [])]) == 0, verb
            ran.append(verb)
    assert ran == ["init", "simulate", "plan", "play"]
