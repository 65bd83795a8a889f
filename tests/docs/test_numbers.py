"""Numbers of pages that name their source: each number is that of its source, and a key without a number is reported."""

import re
from pathlib import Path

import pytest

from generators import bound, sources
from generators.bound import Numbers, filled, marked, numbers_of, unbound
from gossamer.rounds.stability import stability_of
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import points
from gossamer.run.config.resolve import resolve

SOURCES = {
    "h": "paper/h_sweep.jsonl",
    "s10": "paper/straggler_10.jsonl",
    "grid": "paper/outer_grid.jsonl",
    "iid": "rivals/equal_iid.jsonl",
    "demo": "demo.jsonl",
    "slow": "slow_links.md",
    "fast": "evidence/momentum.jsonl",
}


def page_with(text: str, *places: tuple[str, str]) -> str:
    """What stands in place of a text after it is filled."""
    return filled(text, Numbers(SOURCES, places), "page.md")


@pytest.mark.parametrize("page", bound.with_sources())
def test_the_numbers_of_a_page_are_those_of_their_sources(page: str) -> None:
    text = (sources.ROOT / page).read_text(encoding="utf-8")
    assert filled(text, numbers_of(page), page) == text, "run make results"


@pytest.mark.parametrize("page", bound.pages())
def test_a_page_has_no_measured_number_without_a_source(page: str) -> None:
    assert unbound(marked((sources.ROOT / page).read_text(encoding="utf-8"), numbers_of(page), page)) == []


def test_pages_that_programs_write_and_records_of_their_runs_are_not_asked_for_sources() -> None:
    asked = bound.pages()
    assert {
        "README.md",
        "docs/evidence.md",
        "docs/evidence/momentum.md",
        "docs/tutorial.md",
        "docs/how-to/experts.md",
        "docs/results/rivals.md",
    } <= {*asked}
    written = (
        "methods",
        "results/demo",
        "results/methods",
        "results/goodput",
        "results/chaos",
        "results/overlap",
        "results/clock",
    )
    assert not {f"docs/{name}.md" for name in written} & {*asked}


def test_the_predicted_variances_of_the_rivals_are_those_of_the_code() -> None:
    page = sources.source(sources.RESULTS / "rivals.md")
    ours = "GASLoC, post"
    predicted = {}
    for run in points(load_document(sources.ROOT / "experiments" / "rivals" / "equal.toml")):
        method = resolve(run.config).in_rounds
        found = stability_of(method.rule, method.topology, method.schedule.merge)
        predicted[run.method] = 0.0 if found is None else found.variance
    for method, variance in predicted.items():
        read = [page.read(method, {}, heading) for heading in ("predicted variance", "over that of post")]
        assert [one.value for (one,) in read] == pytest.approx([variance, variance / predicted[ours]], abs=0.0051)


@pytest.mark.parametrize(
    ("stands", "key", "becomes"),
    [
        ("at 9.9", "h: DiLoCo; local_steps=30", "at 2.4"),
        ("at **9.999 ±\n9.99", "h: DiLoCo; local_steps=30", "at **2.402 ± 0.02"),
        ("in 1.0000", "h: DiLoCo; local_steps=1; seed=0", "in 2.5970"),
        ("9.000, 1.0", "h: DiLoCo; local_steps=1; each", "2.597, 2.531, 2.570"),
        ("+0.0", "h: GASLoC 1-Peer above DiLoCo; highest mean", "+0.1"),
        ("−0.00", "h: DiLoCo above GASLoC 1-Peer; local_steps=1", "−0.04"),
        ("-0.00", "h: DiLoCo above GASLoC 1-Peer; local_steps=1", "-0.04"),
        ("0", "h: DiLoCo; count", "18"),
        ("0.00 ± 0.00", "s10: GASLoC 1-Peer, H_i = 15; time to DiLoCo", "0.70 ± 0.02"),
        ("0", "s10: GASLoC 1-Peer, H_i = 15; time to DiLoCo; less in %; max", "30"),
        ("1, 1", "s10: GASLoC 1-Peer, H_i = 15; rounds to DiLoCo; each", "26, 26, 27"),
        ("+0.0000", "iid: GASLoC, drift; behind DiLoCo by rounds", "+0.0061"),
        ("0.000", "grid: GASLoC 2-Peer with GASLoC complete", "0.993"),
        ("0", "demo: GASLoC 1-Peer over DiLoCo; seconds on straggler; less in %", "22"),
        ("0.00", "iid: Factored Gossip, pairs over GASLoC, post; disagreement; seed=0; squared", "4.27"),
        ("0.00000", "h: GASLoC 1-Peer above DiLoCo; local_steps=30; low", "0.00024"),
        ("0.000", "h: GASLoC 1-Peer above DiLoCo; local_steps=30; high", "0.083"),
        ("0", "fast: DiLoCo, contiguous; local_steps=40; training seconds; min", "24"),
        ("0.0", "slow: 10% u…; seed=1; method=DiLoCo; measured", "88.0"),
    ],
)
def test_a_number_keeps_its_form_and_gets_the_value_of_its_key(stands: str, key: str, becomes: str) -> None:
    words = re.match(r"[a-z ]*[*]*", stands)
    assert words is not None
    assert page_with(f"<{stands}>", (f"<{words[0]}", key)) == f"<{becomes}>"


def test_a_place_without_its_text_or_its_number_is_reported_with_the_page() -> None:
    with pytest.raises(ValueError, match=r"page\.md: no number stands after 'ends at '"):
        page_with("It ends at about 2.4.", ("ends at ", "h: DiLoCo"))
    with pytest.raises(ValueError, match=r"page\.md has no 'and ' after 'It ends at 2\.4'"):
        page_with("It ends at 2.4.", ("ends at ", "h: DiLoCo"), ("and ", "h: DiLoCo"))


def test_places_are_found_in_their_order_over_line_ends() -> None:
    key = "h: DiLoCo; local_steps=1; seed="
    text = page_with(
        "7.7 is of nobody;\nDiLoCo\nends at 9.99 and 9.999", ("DiLoCo ends at ", f"{key}0"), ("and ", f"{key}1")
    )
    assert text == "7.7 is of nobody;\nDiLoCo\nends at 2.60 and 2.531"


def test_cells_have_the_key_of_their_row_and_column_and_others_stay() -> None:
    cells = "cells of slow\nrows: 10% u…; seed=0; method=DiLoCo | -\ncolumns: measured | text priced | - | seed"
    table = "| a | b | c | d | e |\n|---|---:|---:|---:|---:|\n"
    row = "| DiLoCo | **1.0** s | x | 7 | 1 |\n"
    places = ("| a | b |", cells), ("| x | 7 | ", "slow: 10% u…; seed=1; method=DiLoCo; seed")
    after = page_with(f"{table}{row}| us | 5 | x | 7 | 1 |\n", *places).splitlines()
    assert after[-2:] == ["| DiLoCo | **89.9** s | 94.7 s | 7 | 1 |", "| us | 5 | x | 7 | 1 |"]
    with pytest.raises(ValueError, match="2 rows are named for a table of 1"):
        page_with(f"{table}{row}", *places)


def test_a_whole_table_is_that_of_the_experiment() -> None:
    made = Path(sources.ROOT / "docs" / "results" / "paper" / "h_sweep.md").read_text(encoding="utf-8")
    (table,) = [part for part in made.split("\n\n") if part.startswith("|")]
    filled = page_with("before\n\n| old |\n|---|\n\nafter\n", ("| old |", "table 1 of h by paper/h_sweep.toml"))
    assert filled == f"before\n\n{table}\n\nafter\n"


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("x: DiLoCo", "page.md names the source 'x' and lists h, s10"),
        ("h: DiLoC", "page.md: h: DiLoC: 'DiLoC' is none of DiLoCo"),
        ("h: DiLoCo; local_steps=31", "there is no such number"),
        ("h: DiLoCo; los", "outcomes have no 'los'"),
        ("slow: 10% u…; measurd", "there is no such number"),
    ],
)
def test_a_key_without_a_number_is_reported_with_its_page(key: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        page_with("at 1.0", ("at ", key))


@pytest.mark.parametrize(
    "text",
    [
        "η is 0.7 or 0.5, arXiv 2606.11081, `0.1234`, 139,584, 2.30.1, Python 3.11, torch 2.13",
        "**1.234**<!-- h: DiLoCo --> or 1.23, 1.24<!-- h: DiLoCo; each -->",
        "0.745<!-- tests/rounds/test_stability.py -->, 0.81<!-- benchmarks/slow_links.py -->, 1.42<!-- arXiv 2606.19025 -->",
        "expected were 0.04 to 0.08<!-- registered -->, γ = 0.95, within ±0.01, ± 0.01 nats, 0.14M, 0.87 million parameters",
        "a 95 % interval, 10 % bandwidth, 50 to 99 %, −7<!-- slow: *; measured --> %",
        "text\n\n    ends at 2.345, +3.1 %\n\ntext",
        "```\n2.345\n```",
    ],
)
def test_settings_margins_sizes_code_and_numbers_that_name_where_they_are_from_are_not_measured_ones(text: str) -> None:
    assert unbound(text) == []


def test_losses_and_per_cents_without_a_source_are_found() -> None:
    assert unbound("at 2.34, 2.3456 and **0.05**, by 2.1 % or -6 %: +0.5 %") == [
        "2.34",
        "2.3456",
        "0.05",
        "2.1 %",
        "-6 %",
        "+0.5 %",
    ]
