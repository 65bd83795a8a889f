"""The report: what its table says, that the page needs nothing else, and that nothing in a run can break it."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gossamer.errors import ConfigError, DataError
from gossamer.network.links import Network, to_toml
from gossamer.record.folder import RecordConfig, RunFolder, metrics_line, note_evaluation
from gossamer.record.logs.trace import Entry, Operation
from gossamer.report.metrics import METRICS
from gossamer.report.page.page import write_report
from gossamer.report.page.view import run_view
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.runs import read_runs
from gossamer.report.table import MANY, markdown_table, render_table, summary_rows

PLAIN = RecordConfig(tensorboard=False)
FAST = Network(uplink_bps=8e6, downlink_bps=8e6, step_s=1)
SLOW = Network(uplink_bps=8e3, downlink_bps=8e3, step_s=1)
NOWHERE: Mapping[str, Network] = {}
RUN_TOML = 'name = "x"\nworkers = 2\nrule = "gossip"\n[run]\nsteps = 36\nlocal_steps = 9\n'


def make_run(folder: Path, rounds: int = 4, loss: float = 2.0, *, apart: bool = False, **evaluation: Any) -> Path:
    """Two workers that exchange 1000 bytes a round after 9 steps, evaluated before and after each round.

    Args: `apart` has them exchange 1000 bytes more after no further steps, as an entry of its own in the trace.
    """
    with RunFolder(folder, RUN_TOML, PLAIN) as run:
        for r in range(-1, rounds):
            line = {"step": 9 * (r + 1), "tokens": 64 * (r + 1), "loss": loss + 1 / (r + 2), "disagreement": 0.1}
            run.log("eval", round=r, **{**line, "worker_losses": [loss + 1, loss + 2], **evaluation})
            for i in range(2) if r >= 0 else ():
                message = ((1 - i, 1000),)
                run.log("train", round=r, worker=i, step=9 * (r + 1), loss=loss, tokens=32 * (r + 1), lr=1e-3)
                for part in range(1 + apart):
                    steps = 0 if part else 9
                    sent = (Operation("exchange", part, message, message),)
                    run.log_trace(Entry(r * (1 + apart) + part, i, steps, 0.1, sent))
    return folder


class Outline(HTMLParser):
    """Checks that tags are balanced, and keeps addresses and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)


def page_of(runs: dict[str, Path], folder: Path, networks: Mapping[str, Network] | None = NOWHERE) -> str:
    write_report(runs, folder / "report.html", networks)
    return (folder / "report.html").read_text("utf-8")


def test_a_row_tells_quality_bytes_and_priced_time(tmp_path: Path) -> None:
    (row,) = summary_rows({"a": make_run(tmp_path / "a")}, {"fast": FAST, "slow": SLOW})
    assert row["method"] == "a"
    assert row["loss"] == pytest.approx(2.2)
    assert row["worst_loss"] == 4.0
    assert row["disagreement"] == 0.1
    assert row["sent_bytes"] == 4000
    assert row["wall_s"] == pytest.approx({"fast": 4 * 9.001, "slow": 4 * 10})
    assert row["utilisation"] == pytest.approx({"fast": 9 / 9.001, "slow": 0.9})
    assert row["loss_at_s"]["slow"] == [(10 * (r + 1), 2 + 1 / (r + 2)) for r in range(4)]
    assert row["loss_at_bytes"] == [(1000 * (r + 1), 2 + 1 / (r + 2)) for r in range(4)]


def test_a_round_that_sends_in_two_parts_ends_with_the_second(tmp_path: Path) -> None:
    (row,) = summary_rows({"a": make_run(tmp_path / "a", apart=True)}, {"slow": SLOW})
    assert row["wall_s"]["slow"] == pytest.approx(4 * 11)
    assert row["loss_at_s"]["slow"] == [(pytest.approx(11 * (r + 1)), 2 + 1 / (r + 2)) for r in range(4)]
    assert row["loss_at_round"] == [(r + 1, 2 + 1 / (r + 2)) for r in range(4)]
    assert row["loss_at_bytes"] == [(2000 * (r + 1), 2 + 1 / (r + 2)) for r in range(4)]


def test_the_table_on_the_terminal_shows_every_row_in_plain_units(tmp_path: Path) -> None:
    rows = summary_rows({"a [red]": make_run(tmp_path / "a"), "b": make_run(tmp_path / "b", rounds=2)}, {"wan": SLOW})
    out = StringIO()
    Console(file=out, width=160).print(render_table(rows, 160))
    text = out.getvalue()
    assert all(
        part in text for part in ("a [red]", "2.2000", "4.0000", "4.0 kB", "40 s (90 %)", "20 s (90 %)", "time on wan")
    )


@pytest.mark.parametrize("width", [80, 20])
def test_the_table_on_a_narrow_terminal_breaks_cells_between_words_alone(width: int, tmp_path: Path) -> None:
    rows = summary_rows({"a": make_run(tmp_path / "a"), "b": make_run(tmp_path / "b", rounds=2)}, {"wan": SLOW})
    out = StringIO()
    Console(file=out, width=1000).print(render_table(rows, width))
    lines = out.getvalue().splitlines()
    assert width < 80 or all(len(line) <= width for line in lines)
    words = {word for line in lines for word in line.replace("│", " ").replace("┃", " ").split()}
    assert {"disagreement", "(computing)", "2.2000", "4.0000", "4.0", "kB", "40", "(90", "%)"} <= words


def test_the_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    page = page_of({"a": make_run(tmp_path / "a")}, tmp_path, {"wan": SLOW})
    outline = Outline(page)
    assert outline.addresses == ["data:,"], "an icon without bytes, so that no browser asks for one"
    assert not {"iframe", "base", "object", "img"} & set(outline.tags)
    assert outline.tags.count("link") == 1 and "default-src 'none'" in page
    assert "url(#" in page and "url(" not in page.replace("url(#", "")
    assert "@import" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "").replace(
        "http-equiv", ""
    )


def contents(page: str) -> dict[str, Any]:
    """What the scripts of a page draw."""
    (data,) = re.findall('<script type="application/json" id="contents">(.*?)</script>', page)
    return json.loads(data)


def test_the_page_shows_table_charts_configuration_and_sample(tmp_path: Path) -> None:
    runs = {"a": make_run(tmp_path / "a"), "b": make_run(tmp_path / "b", loss=1.0)}
    (tmp_path / "b" / "sample.txt").write_text("once <upon> a time")
    page = page_of(runs, tmp_path, {"wan": SLOW, "lan": FAST})
    outline = Outline(page)
    shown = contents(page)
    assert [figure["title"] for figure in shown["figures"]] == [
        "Validation loss of the mean model",
        "Validation loss of the worst worker",
        "Disagreement of the workers (rms)",
        "Training loss, mean over workers",
    ]
    assert [axis["key"] for axis in shown["axes"]] == ["round", "step", "tokens", "bytes", "time:wan", "time:lan"]
    curve = shown["runs"][0]["evals"]
    assert curve["x"]["round"] == [0, 1, 2, 3, 4], "a validation before training stands before the first round"
    assert curve["x"]["bytes"] == [0, 1000, 2000, 3000, 4000] and curve["x"]["time:wan"] == [0, 10, 20, 30, 40]
    assert curve["y"]["loss"] == pytest.approx([2 + 1 / (r + 2) for r in range(-1, 4)], rel=1e-5)
    assert shown["moments"][1]["3"]["pairs"] == [[0, 1, 1000], [1, 0, 1000]]
    assert outline.texts.count(RUN_TOML) == 2
    assert "once <upon> a time" in outline.texts
    assert re.search(r'<td class="best">1\.2000</td>', page), "the best loss is marked"
    assert page.count('class="best"') == 1


def test_nothing_in_a_run_or_a_name_becomes_markup(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>{body}$x$&'
    folder = make_run(tmp_path / "a")
    (folder / "run.toml").write_text(evil)
    (folder / "sample.txt").write_text(evil)
    page = page_of({evil: folder, "_b": folder}, tmp_path, {evil: SLOW})
    outline = Outline(page)
    assert outline.tags.count("script") == 6 and "<script>alert" not in page
    assert sum(evil in text for text in outline.texts) >= 6
    assert evil in "".join(Outline(page_of({evil: folder}, tmp_path)).texts[:2]), (
        "the title is the name of a single run"
    )


def test_the_mean_of_the_workers_own_losses_is_never_called_that_of_the_mean_model(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "real", RUN_TOML, PLAIN) as run:
        for r in range(2):
            for i in range(2):
                run.log("validation", round=r, worker=i, step=9 * (r + 1), loss=3.0 - r + i, tokens=32)
    runs = {"real": tmp_path / "real"}
    (row,) = summary_rows(runs, {})
    assert (row["loss"], row["loss_of_workers"], row["round"]) == (None, 2.5, 2)
    headings, values = (line.split(" | ") for line in markdown_table([row]).splitlines()[::2])
    assert headings[1:3] == ["val loss", "val of workers"] and values[1:3] == ["–", "2.5000"]
    note_evaluation(tmp_path / "real", round=0, loss=2.0, worker_losses=[3.0, 4.0])
    (row,) = summary_rows(runs, {})
    assert (row["loss"], row["loss_of_workers"], row["round"]) == (2.0, 3.5, 1), "all of one round"
    assert "val of workers" not in markdown_table([row])


def test_what_a_run_does_not_have_is_a_dash(tmp_path: Path) -> None:
    RunFolder(tmp_path / "started", "", PLAIN).close()
    (tmp_path / "bare").mkdir()
    runs = {"started": tmp_path / "started", "bare": tmp_path / "bare", "whole": make_run(tmp_path / "whole")}
    rows = summary_rows(runs, {"wan": SLOW})
    for row in rows[:2]:
        assert (row["loss"], row["worst_loss"], row["disagreement"], row["sent_bytes"]) == (None,) * 4
        assert row["wall_s"] == row["utilisation"] == {}
    assert Outline(page_of(runs, tmp_path, {"wan": SLOW})).texts.count("–") == 2 * 5


def test_runs_without_any_evaluation_still_make_a_page(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "", PLAIN) as run:
        run.log("train", round=0, worker=0, step=1, loss=3.0)
    (tmp_path / "run" / "run.toml").write_text(RUN_TOML)
    shown = contents(page_of({"a": tmp_path / "run"}, tmp_path, {"wan": SLOW}))
    assert [figure["title"] for figure in shown["figures"]] == ["Training loss, mean over workers"]
    assert shown["verdict"] == "No run has a validation loss yet."


def test_a_trace_whose_only_line_was_cut_short_is_none(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a", 'name = "a"', RecordConfig(tensorboard=False)) as run:
        run.log("eval", round=0, step=1, tokens=1, loss=1.0, worker_losses=[], disagreement=0.0)
    (tmp_path / "a" / "trace.jsonl").write_text('{"round":0,"worker":0,"st')
    assert "| – |" in markdown_table(summary_rows({"a": tmp_path / "a"}, {}))


def test_losses_that_were_not_finite_are_named_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", loss=math.nan, disagreement=math.inf)
    (row,) = summary_rows({"a": folder}, {})
    assert all(math.isnan(row[key]) for key in ("loss", "worst_loss", "disagreement"))
    assert Outline(page_of({"a": folder}, tmp_path)).texts.count("not finite") == 3


def test_one_diverged_worker_is_the_worst(tmp_path: Path) -> None:
    (row,) = summary_rows({"a": make_run(tmp_path / "a", worker_losses=[1.0, math.nan, 2.0])}, {})
    assert math.isnan(row["worst_loss"])


@pytest.mark.parametrize("later", [False, True])
def test_a_run_that_diverged_after_its_last_validation_has_no_loss_unless_others_continued(
    tmp_path: Path, later: bool
) -> None:
    folder, rounds = make_run(tmp_path / "a"), 9 if later else 3
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            metrics_line("diverged", round=5, worker=1) + metrics_line("train", round=rounds, worker=0, loss=1.0)
        )
    (row,) = summary_rows({"a": folder}, {})
    assert math.isnan(row["loss"]) is not later
    text = page_of({"a": folder}, tmp_path)
    assert (
        "a number was not finite, which ended worker 1" in text and ("not finite" in Outline(text).texts) is not later
    )


def test_an_evaluation_that_was_done_again_counts_once_and_last(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "metrics-evaluate.jsonl").write_text('{"kind":"eval","round":3,"loss":1.25}\n')
    (row,) = summary_rows({"a": folder}, {})
    assert row["loss"] == 1.25


def test_equal_runs_give_equal_pages(tmp_path: Path) -> None:
    runs = {"a": make_run(tmp_path / "a")}
    assert page_of(runs, tmp_path, {"wan": SLOW}) == page_of(runs, tmp_path, {"wan": SLOW})


@pytest.mark.parametrize(
    "evaluation",
    [
        {"worker_losses": 3},
        {"worker_losses": ["low"]},
        {"disagreement": True},
        {"disagreement": 10**400},
    ],
)
def test_a_foreign_figure_is_refused_with_a_sentence(tmp_path: Path, evaluation: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=rf"metrics.*:1: {next(iter(evaluation))}.* must be"):
        write_report({"a": make_run(tmp_path / "a", **evaluation)}, tmp_path / "report.html", {})


def test_a_line_that_cannot_be_drawn_is_refused_by_a_report_and_named_on_the_page_of_a_live_run(
    tmp_path: Path,
) -> None:
    folder, sentence = make_run(tmp_path / "a", tokens="many"), "tokens is 'many' but must be a number"
    with pytest.raises(DataError, match=rf"metrics\.jsonl:1: {sentence}"):
        page_of({"a": folder}, tmp_path)
    run = FollowedRun("a", folder)
    run.look()
    assert sentence in next(iter(run.complaints))


def test_what_the_table_has_read_is_not_read_again_for_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=5, apart=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"train","round":5,"wor')  # a killed writer's
    (run,) = read_runs({"a": folder}, None)
    once, alone = run.followed, FollowedRun("a", folder)
    assert (once.done, once.trained_lines, once.traced_lines, once.parts) == (5, 10, 20, 2), (
        "before anything is looked at"
    )
    assert once.look() and alone.look()
    assert (once.trained_lines, once.traced_lines) == (10, 20)
    assert run_view(once, once.modified_s) == run_view(alone, alone.modified_s)


def test_a_line_of_a_worker_that_the_run_does_not_have_is_named_on_the_page_also_where_the_table_reads_it(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"train","round":3,"worker":7,"step":36,"loss":1.0,"tokens":64}\n')
    (view,) = contents(page_of({"a": folder}, tmp_path))["runs"]
    assert [one for one in view["complaints"] if "names worker 7 of 2" in one]


def test_each_metric_is_shown_where_its_row_says(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (row,) = summary_rows({"a": folder}, {})
    assert {metric.name for metric in METRICS} <= row.keys()
    page = contents(page_of({"a": folder}, tmp_path))
    shown = [metric.heading for metric in METRICS if metric.heading and metric.shown([row])]
    assert page["table"]["headings"] == ["method", *shown]
    assert "worst worker" in shown and "val of workers" not in shown
    titles = {figure["key"]: (figure["title"], figure["log"]) for figure in page["figures"]}
    drawn = [metric for metric in METRICS if metric.key in titles]
    assert [titles[metric.key] for metric in drawn if metric.title] == [(m.title, m.log) for m in drawn if m.title]


def test_each_run_is_priced_on_its_own_networks_where_none_are_given_for_all(tmp_path: Path) -> None:
    folders = {name: make_run(tmp_path / name) for name in ("a", "b", "c")}
    for name, network in {"a": SLOW, "b": FAST}.items():
        (folders[name] / "run.toml").write_text(f"{RUN_TOML}\n[network.wan]\n{to_toml(network)}")
    slow, fast, none = summary_rows(folders, None)
    assert slow["wall_s"] == summary_rows({"a": folders["a"]}, {"wan": SLOW})[0]["wall_s"]
    assert fast["wall_s"]["wan"] < slow["wall_s"]["wan"] and none["wall_s"] == {}
    page = page_of(folders, tmp_path, None)
    assert "Network wan<" in page and "Network wan of b<" in page


def test_a_missing_folder_and_a_network_of_other_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run 'a' should be in"):
        summary_rows({"a": tmp_path / "nowhere"}, {})
    with pytest.raises(ConfigError, match="lists 3 workers but the run has 2"):
        summary_rows({"a": make_run(tmp_path / "a")}, {"three": Network(uplink_bps=(1e9,) * 3, downlink_bps=1e9)})


def test_pricing_and_reporting_need_no_torch(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from gossamer.network.links import Network
from gossamer.report.page.page import write_report
write_report({"a": Path(sys.argv[1])}, Path(sys.argv[2]), {"wan": Network(uplink_bps=1e6, downlink_bps=1e6)})
assert not {"torch", "tensorboard", "wandb"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", program, str(make_run(tmp_path / "a")), str(tmp_path / "out.html")],
        check=True,
        timeout=250,
    )


def test_a_table_in_markdown_has_a_line_per_run_and_cannot_be_broken_by_a_label(tmp_path: Path) -> None:
    rows = summary_rows({"a | b": make_run(tmp_path / "a")}, {})
    text = markdown_table(rows)
    assert len(text.splitlines()) == 3 and "a \\| b" in text


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As many runs as are shown one by one: the first is the worst but for one that diverged, and one without evaluations."""
    folder = tmp_path_factory.mktemp("many")
    runs = {f"run {k}": make_run(folder / str(k), loss=3.0 - 0.1 * k) for k in range(MANY)}
    runs["diverged"] = make_run(folder / "diverged", loss=math.nan)
    with RunFolder(folder / "begun", "", PLAIN):
        runs["begun"] = folder / "begun"
    return runs


def test_many_runs_are_ranked_by_where_they_ended_and_few_stay_in_their_order(
    many_runs: dict[str, Path], tmp_path: Path
) -> None:
    runs = many_runs
    lines = markdown_table(summary_rows(runs, {})).splitlines()[2:]
    expected = [*reversed(list(runs)[:MANY]), "diverged", "begun"]
    assert [line.split("|")[1].strip() for line in lines] == expected
    page = Outline(page_of(runs, tmp_path))
    assert [text for text in page.texts if text in runs] == expected
    few = dict(list(runs.items())[:3])
    assert [line.split("|")[1].strip() for line in markdown_table(summary_rows(few, {})).splitlines()[2:]] == list(few)


@pytest.mark.full
def test_a_page_of_many_long_runs_stays_small(tmp_path: Path) -> None:
    runs = {f"run {k}": make_run(tmp_path / str(k), rounds=600) for k in range(2)}
    page = page_of({f"{name} {k}": folder for k in range(6) for name, folder in runs.items()}, tmp_path)
    assert len(page) < 500_000
    assert all(len(view["evals"]["x"]["round"]) <= 300 for view in contents(page)["runs"])


def test_a_worker_that_was_alone_is_on_no_network_of_others(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "alone", "", PLAIN) as run:
        run.log_trace(Entry(0, 0, 9, 0.1, ()))
    networks = {"two": Network(uplink_bps=(8e6, 8e6), downlink_bps=8e6, step_s=1)}
    alone, pair = summary_rows({"alone": tmp_path / "alone", "pair": make_run(tmp_path / "pair")}, networks)
    assert alone["wall_s"] == {} and list(pair["wall_s"]) == ["two"]


def test_a_run_has_as_many_rounds_as_its_last_validation_ends(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "round": 4, "worker": 0, "step": 12, "loss": 2.0, "lr": 0.1, "tokens": 768},
        {"kind": "validation", "round": 5, "worker": 0, "step": 12, "tokens": 768, "loss": 2.0},
    ]
    (tmp_path / "metrics-000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = summary_rows({"without waiting": tmp_path}, None)
    assert (row["round"], row["rounds"]) == (6, 6), "its last steps began in the round before"
