"""What `gossamer evaluate` finds belongs to a round and a branch: it is cut with them, and replaced when it is found again."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, constants

from gossamer.cli import main
from gossamer.errors import DataError, DiskError
from gossamer.record.folder import note_evaluation, read_metrics
from gossamer.record.lineage import read_branches
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.table import summary_rows, table_cells
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.bookkeeping.journal import Journal
from gossamer.run.config.run_file import RunConfig
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.worker import RoundReport, Worker
from tiny import single


def silent(**overrides: object) -> RunConfig:
    """A run that validates nothing on its way."""
    return single(run__eval_every=0, **{"run__steps": 12, "inner__schedule": "constant", **overrides})


def evaluated(folder: Path) -> list[dict[str, object]]:
    path = folder / "metrics-evaluated.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def row(folder: Path) -> dict[str, object]:
    (found,) = summary_rows({"k": folder}, None)
    return found


def test_a_figure_of_before_more_steps_is_not_shown_beside_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "k"
    simulate(silent(), folder, until=3)
    first = evaluate(folder).result.loss
    assert (row(folder)["loss"], row(folder)["round"]) == (first, 3)
    simulate(silent(run__steps=16), folder, resume=True, until=5)
    assert [line["branch"] for line in evaluated(folder)] == [0], "it stays, as its round does"
    assert row(folder)["loss"] is None, "and is none of the run as it is now"
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    assert (shown["loss"], shown["round"], shown["rounds"]) == (None, None, 5)
    second = evaluate(folder).result.loss
    assert row(folder)["loss"] == second != first and [line["branch"] for line in evaluated(folder)] == [0, 1]


def test_a_figure_of_an_older_round_of_the_same_settings_says_of_which(tmp_path: Path) -> None:
    simulate(silent(), tmp_path, until=3)
    loss = evaluate(tmp_path).result.loss
    simulate(silent(), tmp_path, resume=True, until=4)
    _, (cells,) = table_cells([row(tmp_path)])
    assert cells[1] == f"{loss:.4f} (round 3 of 4)"


def test_a_run_that_goes_back_drops_the_figures_of_the_rounds_that_it_trains_again(tmp_path: Path) -> None:
    simulate(silent(), tmp_path, until=3)
    evaluate(tmp_path)
    evaluate(tmp_path, 2)
    assert [line["round"] for line in evaluated(tmp_path)] == [2, 1]
    (tmp_path / "checkpoints" / "round-000003" / "worker-001.json").write_bytes(b"")
    simulate(silent(inner__lr=1e-4), tmp_path, resume=True, until=3)
    assert [line["round"] for line in evaluated(tmp_path)] == [1]
    loss = evaluate(tmp_path).result.loss
    assert [(line["round"], line["branch"], line["loss"]) for line in evaluated(tmp_path)][1:] == [(2, 1, loss)]


def test_a_model_that_cannot_be_written_is_scored_nevertheless(tmp_path: Path) -> None:
    simulate(silent(), tmp_path, until=1)
    (tmp_path / "model").write_text("a file where the folder would be")
    with pytest.raises(DiskError, match=r"^the mean model of round 1 has a loss of \d\.\d{4} nats, but '.*model"):
        evaluate(tmp_path)
    assert len(evaluated(tmp_path)) == 1


def test_a_round_that_is_evaluated_again_has_one_figure(tmp_path: Path) -> None:
    simulate(silent(), tmp_path, until=3)
    evaluate(tmp_path)
    lines = evaluated(tmp_path)
    (tmp_path / "metrics-evaluated.jsonl").write_text(json.dumps({**lines[0], "loss": 99.0}) + "\n")
    assert row(tmp_path)["loss"] == 99.0
    evaluate(tmp_path)
    assert evaluated(tmp_path) == lines


def test_a_figure_of_a_branch_that_the_run_has_left_is_not_read(tmp_path: Path) -> None:
    """As on a machine that took no part when the run went back."""
    simulate(silent(), tmp_path, until=3)
    evaluate(tmp_path)
    stale = (tmp_path / "metrics-evaluated.jsonl").read_text()
    for path in tmp_path.glob("checkpoints/round-000003/*"):
        path.unlink()
    simulate(silent(inner__lr=1e-4), tmp_path, resume=True, until=3)
    assert [one["round"] for one in read_branches(tmp_path)] == [2]
    (tmp_path / "metrics-evaluated.jsonl").write_text(stale)
    assert not [line for line in read_metrics(tmp_path) if line["kind"] == "eval"] and row(tmp_path)["loss"] is None
    followed = FollowedRun("k", tmp_path)
    followed.look()
    assert not followed.evaluations.lines()
    note_evaluation(tmp_path, round=2, loss=1.5)
    assert row(tmp_path)["loss"] == 1.5 and [line["branch"] for line in evaluated(tmp_path)] == [1]


def test_figures_of_0_1_0_count(tmp_path: Path) -> None:
    simulate(silent(), tmp_path, until=3)
    evaluate(tmp_path)
    old = [{key: value for key, value in line.items() if key != "branch"} for line in evaluated(tmp_path)]
    (tmp_path / "metrics-evaluated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    assert row(tmp_path)["loss"] == old[0]["loss"]


def test_a_model_is_pushed_to_the_hub_with_a_card_that_says_how_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, name, **options: calls.append((name, options)) or f"hub/{name}"
    )
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: calls.append(("uploaded", options)))
    simulate(silent(name="a | b"), tmp_path / "run", until=3)
    assert main(["evaluate", str(tmp_path / "run"), "--push", "me/small", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["pushed"] == "hub/me/small" and calls[0] == ("me/small", {"private": True, "exist_ok": True})
    assert calls[1] == (
        "uploaded",
        {
            "repo_id": "me/small",
            "folder_path": tmp_path / "run" / "model",
            "commit_message": "Mean model of a run of Gossamer",
        },
    )
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert f"| validation loss | {result['loss']:.4f} nats a token |" in card and "| rounds | 3 of " in card
    assert ModelCard(card).data.library_name == "transformers"
    assert str(tmp_path) not in card, "nothing of this machine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--push", "me/small"],
            "'me/small' was not pushed to the Hugging Face Hub: .*; name it USER/NAME, and log in",
        ),
        (["--push", "a/b/c"], "'a/b/c' was not pushed to the Hugging Face Hub: .*; name it USER/NAME, and log in"),
        (
            ["--push", "me/small", "--source", "stdlib"],
            "--source stdlib was given, with which no model is written, and --push me/small",
        ),
        (["--public"], "--public is True and --push was not given"),
    ],
)
def test_a_model_that_cannot_be_pushed_is_refused_in_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(
        HfApi.__init__, "__defaults__", ("http://127.0.0.1:1", *(HfApi.__init__.__defaults__ or ())[1:])
    )
    simulate(silent(), tmp_path, until=1)
    assert main(["evaluate", str(tmp_path), *words]) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_a_folder_that_is_moved_while_the_run_trains_is_made_again_and_can_be_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = Journal.log

    def log_and_move(self: Journal, worker: Worker, round: int, report: RoundReport) -> None:
        log(self, worker, round, report)
        if round == 2 and worker.index == 0:
            (tmp_path / "run").rename(tmp_path / "moved")

    monkeypatch.setattr(Journal, "log", log_and_move)
    with pytest.raises(
        DataError, match="holds no trace"
    ):  # a simulation is priced at its end, by the trace that was moved
        simulate(single(run__steps=8), tmp_path / "run")
    assert caplog.text.count("was moved or removed while the run trains") == 1
    assert evaluate(tmp_path / "run")[0] == 4
    assert evaluate(tmp_path / "moved")[0] == 2
