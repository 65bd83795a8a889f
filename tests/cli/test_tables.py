"""Tables and sentences of verbs, on a terminal and in a file."""

import logging
import re
import unicodedata
from pathlib import Path

import pytest

from gossamer.cli import _Printable, main
from gossamer.cli.tables import print_sentence, print_table
from gossamer.record.progress import printable, say
from gossamer.report.table import markdown_lines
from gossamer.run.config.run_file import dump
from tiny import TEXT, single

HEADINGS = ("method", "codec", "hours", "loss in time")
ROWS = [("DiLoCo uneven less 4", "fp4", "27720", "+0.478"), ("GASLoC 2-Peer less 4", "bf16", "88.23", "chosen")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    return monkeypatch


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize(("columns", "names"), [(48, ["less 4", "less 4"]), (47, ["uneven less…", "2-Peer less…"])])
def test_a_terminal_cuts_the_longest_texts_where_a_row_does_not_fit_and_no_sooner(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, names: list[str]
) -> None:
    terminal.setenv("COLUMNS", str(columns))
    print_table(HEADINGS, ROWS, text=2)
    head, *rows = printed_lines(capsys)
    assert [name in row for name, row in zip(names, rows, strict=True)] == [True, True]
    assert "fp4" in rows[0] and "bf16" in rows[1], "the shorter texts stay"
    assert all(len(line) <= columns for line in (head, *rows))


@pytest.mark.parametrize(("columns", "left"), [(48, 4), (47, 3), (41, 3), (40, 2)])
def test_a_narrow_terminal_leaves_out_columns_that_can_be_spared_before_it_cuts_a_text_short(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, left: int
) -> None:
    terminal.setenv("COLUMNS", str(columns))
    missing = print_table(HEADINGS, ROWS, text=2, spare=("codec", "hours"))
    head, *rows = printed_lines(capsys)
    assert [name in head for name in HEADINGS] == [True, left > 3, left > 2, True]
    assert missing == [name for name in HEADINGS if name not in head]
    assert all("less 4" in row for row in rows) and all(len(line) <= columns for line in (head, *rows))
    terminal.setenv("TTY_COMPATIBLE", "0")
    print_table(HEADINGS, ROWS, text=2, spare=("codec", "hours"))
    whole = printed_lines(capsys)[0]
    assert all(name in whole for name in HEADINGS)


@pytest.mark.parametrize("title", ["", "methods"])
def test_no_number_is_cut_where_a_terminal_is_too_narrow_for_all(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], title: str
) -> None:
    terminal.setenv("COLUMNS", "20")
    print_table(HEADINGS, ROWS, text=2, title=title)
    text = "\n".join(printed_lines(capsys))
    assert all(number in text for row in ROWS for number in row[2:]) and all(name in text for name in HEADINGS[2:])


def test_a_table_of_numbers_alone_is_printed_whole_on_a_narrow_terminal(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.setenv("COLUMNS", "10")
    print_table(HEADINGS[2:], [row[2:] for row in ROWS], text=0)
    assert all(number in line for row, line in zip(ROWS, printed_lines(capsys)[1:], strict=True) for number in row[2:])


def test_a_sentence_ends_a_line_of_a_terminal_between_two_words_and_is_one_line_of_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "chosen: dropping worker 4 (slowest): GASLoC 1-Peer, 480 local steps, codec bf16 [no markup]"
    monkeypatch.setenv("COLUMNS", "40")
    print_sentence(sentence)
    assert printed_lines(capsys) == [sentence]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    print_sentence(sentence)
    lines = printed_lines(capsys)
    assert len(lines) == 3 and all(len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines) == sentence
    print_sentence("  head  " + sentence, 8)
    first, *others = printed_lines(capsys)
    assert first.startswith("  head  chosen") and all(line.startswith(" " * 8 + line.strip()) for line in others)


ODD = "a\x1b]0;title\x07b\x1b[2J\rc\u202ed\x9bm\u2028<script>"
"""Of a file that somebody sends: it names the window, rings, clears the screen, overwrites its line, and turns letters round."""


def bare(text: str) -> set[str]:
    """The characters of a text that a terminal would obey."""
    return {one for one in text if one not in "\n\t" and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def test_no_verb_prints_control_characters_of_a_file_or_a_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOSSAMER_KEY", raising=False)
    (folder := tmp_path / f"of{ODD}").mkdir()
    text, run_file, run = folder / f"text{ODD}.txt", folder / f"run{ODD}.toml", folder / f"run{ODD}"
    text.write_text("".join(path.read_text() for path in sorted(TEXT.glob("*.py"))))
    networks = {ODD: {"uplink_bps": 1e6, "downlink_bps": 1e6, "latency_s": 0.1, "step_s": 0.1}}
    run_file.write_text(
        dump(single(data__source=str(text), network=networks, run__steps=4, run__eval_every=2, record__hash=True))
    )
    (broken := folder / f"broken{ODD}.toml").write_text(f"workers = '{ODD}".replace("\r", "").replace("\x1b", ""))
    (experiment := folder / f"experiment{ODD}.toml").write_text(
        run_file.read_text() + "\n[sweep]\n" + '"run.local_steps" = [1, 2]\n'
    )
    (network := folder / f"network{ODD}.toml").write_text(
        "uplink_bps = 1e6\ndownlink_bps = 1e6\nlatency_s = 0.1\nstep_s = 0.1\n"
    )
    missing, page = str(folder / "missing"), folder / "report.html"
    printed, wrong = "", []
    for words, code in {
        ("check", str(run_file)): 0,
        ("check", str(experiment)): 0,
        ("simulate", str(run_file), "--out", str(run)): 0,
        ("status", str(run)): 0,
        ("report", str(run), str(run), "--out", str(page)): 0,
        ("price", str(run), str(network)): 0,
        ("price", str(run), str(broken)): 2,
        ("evaluate", str(run)): 0,
        ("audit", str(run)): 0,
        ("topology", "ring", "--set", f"topology.{ODD}=1"): 2,
        ("keys", "show", "x", "--out", str(run_file)): 2,
        ("doctor", str(broken)): 1,
        ("train", str(broken)): 2,
        ("plan", missing): 2,
        ("compare", missing): 2,
        ("tune", missing): 2,
        ("watch", missing): 2,
        ("play", "--film", str(broken)): 2,
        (ODD,): 2,
        ("check", str(run_file), "--set", f"{ODD}=1"): 2,
        ("check", str(run_file), "--set", f"rule.name='{printable(ODD)}'".replace("\\x1b", ODD[1])): 2,
    }.items():
        got = main([*words])
        printed_lines = "".join(capfd.readouterr())
        if got != code or bare(printed_lines):
            wrong.append((words, got, printed_lines))
        printed += printed_lines
    assert not wrong
    assert printed.count("\\x1b[2J") > 10, "they are shown as escapes"
    page_text = (folder / "report-table.md").read_text()
    assert not bare(page_text) and "<script>" not in page_text and "&lt;script>" in page_text


def test_output_and_logs_show_control_characters_as_escapes_and_all_languages_unchanged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(f"worker 1: {ODD}\ud800")
    assert not bare(capsys.readouterr().err)
    record = logging.LogRecord("gossamer", logging.WARNING, "", 0, "refused %s", (ODD,), None)
    assert not bare(_Printable("gossamer: %(message)s").format(record))
    plain = "Zürich 東京 Ελλάδα θ_i ← θ_i 🧵\n\tb"
    assert printable(plain) == plain
    print_table([ODD, "b"], [[ODD, "1"]], title=ODD)
    assert not bare(capsys.readouterr().out)


def test_a_cell_of_markdown_ends_neither_its_cell_nor_its_line_and_begins_no_html() -> None:
    table = markdown_lines([["a", "b"], ["---", "---"], [f"x|y\\|z\n{ODD}", "p < 0.001 <!-- </td>"]])
    *_, row = table.splitlines()
    assert not bare(table) and len(table.splitlines()) == 3
    assert row.startswith("| x\\|y\\\\\\|z a\\x1b]0;") and row.endswith("| p < 0.001 &lt;!-- &lt;/td> |")
