"""Run folders as 0.1.0 wrote them: they are evaluated, reported and gone on with."""

import logging
import shutil
from pathlib import Path

import pytest

import gossamer
from commands import run
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
def test_a_run_folder_of_0_1_0_is_evaluated_reported_and_gone_on_with(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "k"
    shutil.copytree(SAMPLES / "0.1.0" / kind, folder)
    caplog.set_level(logging.WARNING)
    code, said = run("evaluate", folder)
    assert code == 0 and "round 4: mean model 1." in said, said
    assert caplog.text.count("were saved by gossamer 0.1.0 or soon after") == 1, (
        "it says once that it could not compare"
    )
    assert {one.standing for one in run_status(folder).workers} == {"finished"}
    for words in (["report", folder, "--out", tmp_path / "page.html"], ["status", folder]):
        code, said = run(*words)
        assert code == 0, said
    more = [] if kind == "asynchronous" else ["--set", "run.steps=12"]
    words = ["simulate", "--resume", folder] if kind == "simulated" else ["train", "--resume", folder, "--local", 2]
    code, said = run(*words, *more, "--quiet")
    assert code == 0, said
    assert max(line["round"] for line in read_metrics(folder)) == (3 if kind == "asynchronous" else 5)
