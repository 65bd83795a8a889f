"""Tables and sentences of verbs, on a terminal and in a file."""

import re

import pytest

from gossamer.cli.tables import print_sentence, print_table

HEADINGS = ("method", "codec", "hours", "loss in time")
ROWS = [("DiLoCo uneven less 4", "fp4", "27720", "+0.478"), ("GASLoC 2-Peer less 4", "bf16", "88.23", "chosen")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    return monkeypatch


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize(("columns", "names"), [(48, ["less 4", "less 4"]), (47, ["uneven less…", "2-Peer less…"])])
def test_a_terminal_cuts_the_longest_texts_where_a_row_does_not_fit_and_no_sooner(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, names: list[str]
) -> None:
    terminal.setenv("COLUMNS", str(columns))
    print_table(HEADINGS, ROWS, text=2)
    head, *rows = said(capsys)
    assert [name in row for name, row in zip(names, rows, strict=True)] == [True, True]
    assert "fp4" in rows[0] and "bf16" in rows[1], "the shorter texts stay"
    assert all(len(line) <= columns for line in (head, *rows))


def test_a_sentence_ends_a_line_of_a_terminal_between_two_words_and_is_one_line_of_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "chosen: dropping worker 4 (slowest): GASLoC 1-Peer, 480 local steps, codec bf16 [no markup]"
    monkeypatch.setenv("COLUMNS", "40")
    print_sentence(sentence)
    assert said(capsys) == [sentence]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    print_sentence(sentence)
    lines = said(capsys)
    assert len(lines) == 3 and all(len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines) == sentence
    print_sentence("  head  " + sentence, 8)
    first, *others = said(capsys)
    assert first.startswith("  head  chosen") and all(line.startswith(" " * 8 + line.strip()) for line in others)
