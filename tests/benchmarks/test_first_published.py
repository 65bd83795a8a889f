"""Runs at 35M parameters in loans of a GPU: what is left is trained while there is time, and nothing without a GPU."""

from pathlib import Path

import first_published
import pytest
import torch

from gossamer.models.sizes import parameter_count
from gossamer.report.results import read_results
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import points
from tiny import TEXT

SMALL = """
name = "small"
workers = 2
model = {hidden_size = 8, layers = 1, heads = 2, kv_heads = 2, intermediate_size = 8}
data = {seq_len = 8, batch_size = 1}
run = {steps = 4, local_steps = 2, eval_every = 0, eval_batches = 1, checkpoint_every = 2, batched = 2}
record = {tensorboard = false, export = false}
variant = [{label = "a", method = "diloco", run.local_steps = 2}, {label = "b", method = "gasloc", run.local_steps = 2}]
"""


def test_a_loan_trains_what_the_last_one_has_left(tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.setattr(first_published, "FILE", tmp_path / "small.toml")
    out = tmp_path / "ended.jsonl"
    words = ["--out", str(out), "--set", "run.device=cpu", "--set", f"data.source={TEXT}"]

    def loan(minutes: str, folder: str = "runs") -> int:
        return first_published.main([*words, "--minutes", minutes, "--folder", str(tmp_path / folder)])

    assert loan("0") == 75 and "the time is up" in capfd.readouterr().err
    assert read_results(out) == []
    assert loan("5") == 0 and [one.method for one in read_results(out)] == ["a", "b"]
    capfd.readouterr()
    assert loan("5", "another") == 0 and "2 of 2 runs have ended" in capfd.readouterr().err
    assert not (tmp_path / "another").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(capfd) -> None:
    assert first_published.main([]) == 2 and "has no GPU" in capfd.readouterr().err


def test_other_runs_do_not_count_as_registered(capfd) -> None:
    assert first_published.main(["--set", "run.device=cpu"]) == 2 and "--out" in capfd.readouterr().err


def test_all_five_have_the_size_of_the_first_published_law_and_read_as_much() -> None:
    configs = [one.config for one in points(load_document(first_published.FILE))]
    sizes = {(parameter_count(one.model, 256), one.run.steps * one.length.step_tokens) for one in configs}
    assert sizes == {(35_057_152, 4_800 * 18 * 256)} and len(configs) == 5
