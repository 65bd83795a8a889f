"""Committed results: what is computed is what the code gives, what is measured is there for all, and no page waits for text."""

import importlib.util
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from generators import experiments, prices, sources
from gossamer.cli import main
from gossamer.report.results import PointResult, read_results, result_lines
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import points
from gossamer.run.config.recipes import recipes
from tiny import document

ROOT = Path(__file__).parents[1].parent


def program(name: str) -> Any:
    """The benchmark of this name, as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMITTED = (ROOT / "docs" / "results" / "utilisation.md").read_text(encoding="utf-8")
utilisation_page = program("utilisation")


@pytest.mark.parametrize("name", ["utilisation", "goodput", "bench"])
def test_the_page_is_what_the_code_computes(name: str) -> None:
    file = {"bench": "benchmarks"}.get(name, name)
    committed = (ROOT / "docs" / "results" / f"{file}.md").read_text(encoding="utf-8")
    assert program(name).page() == committed, "run make results"


def test_the_figure_of_goodput_is_what_the_code_draws(tmp_path: Path) -> None:
    program("goodput").draw(tmp_path / "goodput.svg")
    drawn = (tmp_path / "goodput.svg").read_text(encoding="utf-8")
    labels = [
        re.findall(r"<text [^>]*>([^<]+)</text>", text)
        for text in (
            drawn,
            (ROOT / "docs" / "results" / "goodput.svg").read_text(encoding="utf-8"),
        )
    ]
    assert labels[0] == labels[1] and "gossip" in labels[0] and "<dc:date>" not in drawn


def test_it_has_all_75_bandwidths_and_the_published_one_wherever_ours_differs() -> None:
    rows = [line.split("|")[3:-1] for line in COMMITTED.splitlines() if line.startswith(("| 1b", "| 10b", "| 100b"))]
    cells = [cell.strip() for row in rows for cell in row]
    assert len(cells) == 75
    assert sum("(" not in cell for cell in cells) == 69
    assert all(cell.endswith(("+1)", "-1)")) for cell in cells if "(" in cell)


def test_the_figure_beside_it_has_every_method_and_no_date() -> None:
    figure = (ROOT / "docs" / "results" / utilisation_page.FIGURE).read_text(encoding="utf-8")
    assert all(method in figure for method in utilisation_page.STRAGGLER_METHODS)
    assert "<dc:date>" not in figure
    assert len(figure) < 100_000


def test_drawing_it_twice_gives_the_same_file(tmp_path: Path) -> None:
    from gossamer.network.estimates.utilisation import plot_curves

    for name in ("a.svg", "b.svg"):
        plot_curves({"curve": [(1e9, 0.5), (1e10, 0.9)]}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


PAPER = sorted((ROOT / "experiments" / "paper").glob("*.toml"))


@pytest.mark.parametrize("file", PAPER, ids=lambda file: file.stem)
def test_an_experiment_has_an_outcome_for_each_of_its_runs_and_seeds(file: Path) -> None:
    raw = (ROOT / "docs" / "results" / "paper" / f"{file.stem}.jsonl").read_text(encoding="utf-8")
    outcomes = [json.loads(line) for line in raw.splitlines()]
    seeds = sorted({one["seed"] for one in outcomes})
    asked = [(run.method, dict(run.at), run.seed) for run in points(load_document(file), seeds=seeds)]
    assert [(one["method"], one["at"], one["seed"]) for one in outcomes] == asked
    assert seeds == ([0] if file.stem.endswith("_lr") else [0, 1, 2])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("file", experiments.outcome_files(), ids=lambda file: file.stem)
def test_the_page_of_an_experiment_is_what_its_outcomes_say(file: Path) -> None:
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert page == experiments.page(file), "run make results"
    if f"({file.stem}.svg)" in page:
        assert b"</svg>" in file.with_suffix(".svg").read_bytes()


def test_a_page_has_the_runs_that_have_ended_in_the_order_of_the_file_with_their_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (experiments, sources):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    config = tmp_path / "experiments" / "evidence" / "gap-at-h.toml"
    outcomes = tmp_path / "docs" / "results" / "evidence" / "gap-at-h-twice.jsonl"
    for path in (config, outcomes):
        path.parent.mkdir(parents=True)
    rows = [{"label": name} for name in ("DiLoCo", "GASLoC")]
    scale = {"twice": {"run.steps": 8}}
    asked = {"target": "DiLoCo", "paired": True, "margin": 0.5}
    text = tomli_w.dumps(document(workers=2, run__steps=4, variant=rows, scale=scale, figure=asked))
    config.write_text(f"# What a gap\n# costs.\n#\n#     gossamer compare\n{text}", encoding="utf-8")

    def ended(method: str, seed: int) -> PointResult:
        loss = 2.0 + 0.01 * seed + (0.1 + 0.001 * seed) * (method == "GASLoC")
        row = {
            **dict.fromkeys(("worst_loss", "disagreement", "sent_bytes")),
            "method": method,
            "wall_s": {},
            "utilisation": {},
        }
        row |= {"loss": loss, "loss_at_s": {}, "loss_at_bytes": [(5.0, loss)], "loss_at_round": [(2, loss)]}
        return PointResult(
            method,
            {},
            seed,
            row,
            {"digest": "d", "commit": "0123456789ab+", "versions": {"torch": "2"}, "seconds": 36.0},
        )

    written = [ended(*place) for place in (("GASLoC", 1), ("DiLoCo", 0), ("GASLoC", 0), ("DiLoCo", 1), ("DiLoCo", 2))]
    outcomes.write_text(result_lines(written), encoding="utf-8")
    title, about, command, verdict, *tables, picture = experiments.page(outcomes).split("\n\n")
    assert (title, about) == ("# gap-at-h-twice", "What a gap costs.")
    assert command == "    gossamer compare experiments/evidence/gap-at-h.toml --scale twice --seeds 0,1,2"
    assert verdict == "5 of 6 runs; commit 012345678+; torch 2; 0.05 hours of training."
    assert tables[0].startswith("| loss above DiLoCo's, at the end | each seed |") and len(tables) == 1
    assert "| GASLoC | +0.1000, +0.1010 | +0.1005 ± 0.0064 | +5.01 |" in tables[0]
    assert tables[0].endswith("| higher, equivalent |") and picture == "![gap-at-h-twice](gap-at-h-twice.svg)\n"
    assert (experiments.drawn(outcomes) or b"").endswith(b"</svg>\n")
    outcomes.write_text(result_lines(written[:1]), encoding="utf-8")  # none of the target yet
    early = experiments.page(outcomes)
    assert "1 of 2 runs" in early and "| GASLoC | 2.1110 |" in early and experiments.drawn(outcomes) is None
    with pytest.raises(FileNotFoundError, match="other"):
        sources.config_of(outcomes.with_name("other.jsonl"))


def test_the_fresh_seeds_are_compared_as_registered_on_every_text(tmp_path: Path) -> None:
    prose = tmp_path / "evidence" / "fresh-prose.jsonl"
    prose.parent.mkdir()
    prose.write_text((sources.RESULTS / "evidence" / "fresh.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    page = experiments.page(prose)
    assert "## What is compared" in page and "## With momentum and without" not in page
    assert experiments.drawn(prose) is None


def test_a_page_without_a_figure_has_a_row_for_each_method_with_the_losses_of_its_seeds_in_order() -> None:
    outcomes = ROOT / "docs" / "results" / "evidence" / "local_steps_tuned-h60.jsonl"
    losses: dict[str, dict[int, float]] = {}
    for one in read_results(outcomes):
        losses.setdefault(one.method, {})[one.seed] = one.row["loss"]
    rows = [line.strip("| ").split(" | ") for line in experiments.page(outcomes).splitlines() if line.startswith("| ")]
    assert rows[0] == ["method", "loss", "loss, each seed", "disagreement", "sent per worker"]
    assert [row[0] for row in rows[2:]] == [*losses] and all(len(own) == 5 for own in losses.values())
    for method, mean, each, *_ in rows[2:]:
        assert mean.startswith(f"{statistics.fmean(losses[method].values()):.4f} ± ")
        assert each == ", ".join(f"{losses[method][seed]:.4f}" for seed in range(5))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_no_page_has_a_place_that_was_left_for_later(page: Path) -> None:
    assert not re.findall(r"^[A-Z]+_[A-Z_]+$|TODO|TBD|FIXME", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.full
def test_the_page_of_all_methods_has_bytes_and_times_of_each_and_no_loss() -> None:
    page = (ROOT / "docs" / "results" / "methods.md").read_text(encoding="utf-8")
    assert page == prices.prices_page(), "run make results"
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*recipes()]


@pytest.mark.full
def test_the_losses_on_each_text_are_those_of_the_runs_on_it(tmp_path: Path) -> None:
    texts = [tmp_path / f"{name}.jsonl" for name in ("words", "numbers")]
    texts[0].write_text("".join(json.dumps({"text": f"some words, {k} times again\n" * 3}) + "\n" for k in range(60)))
    texts[1].write_text("".join(json.dumps({"text": f"{k * k * 999_983} " * 3}) + "\n" for k in range(60)))
    sources, folder = [*map(str, texts)], tmp_path / "runs"
    rows = [{"label": "alone"}, {"label": "with both", "data": {"shards": [0, 1]}}]
    base = document(
        workers=2, data__source=sources, data__shards=[0, 0], run__steps=60, run__local_steps=4, variant=rows
    )
    (file := tmp_path / "experiment.toml").write_text(tomli_w.dumps(base))
    assert main(["compare", str(file), "--out", str(folder)]) == 0
    table = program("by_text").by_text(folder)
    heads, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert heads == ["method", *sources] and [line[0] for line in lines] == ["alone", "with both"]
    (_, *alone), (_, *both) = ([line[0], *map(float, line[1:])] for line in lines)
    assert alone[1] > both[1] + 0.1  # who has trained on a text models it better
    assert both[0] == pytest.approx(evaluate(folder / "with-both", source=sources[0]).result.loss, abs=1e-4)
