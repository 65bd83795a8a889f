"""Run folders as 0.1.0 and 0.2.0 wrote them: every verb that takes one works on it, or says in a true sentence why not."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer
from commands import run
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.report.reading.status import run_status

SAMPLES = Path(__file__).parents[2] / "samples"
KINDS = ("rounds", "elastic", "asynchronous", "served", "simulated")


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the user that the runs name can be imported, by this process and by its children."""
    monkeypatch.setenv("PYTHONPATH", f"{SAMPLES}:{Path(gossamer.__file__).parents[1]}")
    monkeypatch.syspath_prepend(str(SAMPLES))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_folder_of_0_1_0_is_evaluated_reported_and_continued(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "k"
    shutil.copytree(SAMPLES / "0.1.0" / kind, folder)
    caplog.set_level(logging.WARNING)
    code, output = run("evaluate", folder, "--allow-code")
    assert code == 0 and "round 4: mean model 1." in output, output
    assert caplog.text.count("were saved by gossamer 0.1.0 or soon after") == 1, (
        "it says once that it could not compare"
    )
    assert {one.standing for one in run_status(folder).workers} == {"finished"}
    for words in (["report", folder, "--out", tmp_path / "page.html"], ["status", folder]):
        code, output = run(*words)
        assert code == 0, output
    more = [] if kind == "asynchronous" else ["--set", "run.steps=12"]
    words = ["simulate", "--resume", folder] if kind == "simulated" else ["train", "--resume", folder, "--local", 2]
    code, output = run(*words, *more, "--allow-code", "--quiet")
    assert code == 0, output
    assert max(line["round"] for line in read_metrics(folder)) == (3 if kind == "asynchronous" else 5)


LAN = ["--set", "network.lan={uplink_bps = 1e9, downlink_bps = 1e9, step_s = 1.0}"]
NO_HASHES = "no hashes"
LATER: dict[str, dict[str, str]] = {
    # Why a verb does not work on a kind of run; all others do.
    "rounds": {"replay": "has no log of outcomes"},
    "elastic": {},
    "asynchronous": {"audit": NO_HASHES, "simulate": "holds checkpoints of real processes"},
    "served": {"audit": "has no rounds of hashes", "simulate": "holds checkpoints of real processes"},
    "simulated": {"replay": "has no log of outcomes"},
    "stages": {"audit": "has no hashes to compare", "replay": "has no log of outcomes"},
}


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", LATER)
def test_every_verb_works_on_a_run_folder_of_0_2_0_or_says_why_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(SAMPLES / "small_text.txt", "small_text.txt")
    original, folder = SAMPLES / "0.2.0" / kind, Path("k")
    # An asynchronous run keeps its steps, and needs a network for a simulation.
    further = LAN if kind in ("asynchronous", "served") else ["--set", "run.steps=12"]
    verbs: dict[str, list[object]] = {
        "evaluate": ["evaluate", folder, "--allow-code"],
        "score": ["evaluate", folder, "--source", "small_text.txt", "--allow-code"],
        "report": ["report", folder, "--out", "page.html"],
        "status": ["status", folder],
        "check": ["check", folder / "run.toml"],
        "audit": ["audit", folder, "--allow-code"],
        "replay": ["simulate", "--replay", folder, "--out", "again", "--allow-code", "--quiet"],
        "simulate": ["simulate", "--resume", folder, *further, "--allow-code", "--quiet"],
        "train": ["train", "--resume", folder, "--set", "run.steps=12", "--local", 2, "--allow-code", "--quiet"],
    }
    if kind == "stages" and not request.config.getoption("--full"):
        del verbs["train"]  # four processes, each of which imports torch's pipelines
    why = {"score": "neither may be a function", **LATER[kind]} if kind != "stages" else LATER[kind]
    for verb, words in verbs.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        code, output = run(*words)
        if verb == "audit" and "audit it where it was computed" in output:
            continue  # on a processor like that of the samples, or another
        assert code == (2 if verb in why else 0), (verb, output)
        assert why.get(verb, "") in output and "Traceback" not in output, (verb, output)
        if verb in ("simulate", "train") and verb not in why:
            assert max(line["round"] for line in read_metrics(folder)) == 5, verb
            assert [*folder.glob("inputs*.json")], "what it went on with is recorded"


@pytest.mark.full
def test_a_folder_written_before_a_deciding_key_was_added_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """The key is one annotated line with a default, in a copy of the package; nothing else is written for it."""
    package = Path(gossamer.__file__).parent
    shutil.copytree(package, tmp_path / "later" / "gossamer")
    settings = tmp_path / "later" / "gossamer" / "optimizers" / "inner.py"
    lines = settings.read_text(encoding="utf-8").splitlines(keepends=True)
    place = next(k for k, line in enumerate(lines) if line.startswith("    lr: "))
    settings.write_text(
        "".join([*lines[:place], "    label_smoothing: float = 0.0\n", *lines[place:]]), encoding="utf-8"
    )
    for name in ("now", "later"):
        shutil.copytree(SAMPLES / "0.2.0" / "simulated", tmp_path / name / "k")
    words = ["simulate", "--set", "run.steps=12", "--allow-code", "--quiet", "--resume"]
    assert run(*words, tmp_path / "now" / "k")[0] == 0
    path = f"{tmp_path / 'later'}:{SAMPLES}"
    done = subprocess.run(
        [sys.executable, "-m", "gossamer", *words, "k"],
        cwd=tmp_path / "later",
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": path, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "label_smoothing = 0.0" in (tmp_path / "later" / "k" / "run.toml").read_text()
    rounds = checkpoint.rounds(tmp_path / "now" / "k" / "checkpoints", 0)
    assert rounds and rounds[-1] == 6
    for worker in range(2):
        one, other = (
            (tmp_path / name / "k" / "checkpoints" / "round-000006" / f"worker-{worker:03}.json").read_bytes()
            for name in ("now", "later")
        )
        assert one == other, "the same state, under the same digest"
