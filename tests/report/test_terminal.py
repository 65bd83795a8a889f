"""How runs go, in a terminal and without one."""

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console
from test_follow import RUN_TOML, write_round

from gossamer.cli import main
from gossamer.record.folder import RunFolder, note_evaluation
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.logs.trace import Entry, Operation
from gossamer.record.progress import counting_children, note_trained, quieted, say, training_counts
from gossamer.report import terminal as terminal_of_runs
from gossamer.report.reading import tail
from gossamer.report.terminal import Terminal
from tiny import document


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plain(out: StringIO, clock: Clock) -> Terminal:
    return Terminal(Console(file=out, force_terminal=False, width=40), now_s=clock, looks=False)


@contextlib.contextmanager
def two_recording(folder: Path, out: StringIO, clock: Clock) -> Iterator[tuple[RunFolder, RunFolder, Terminal]]:
    """Two real workers that record in one folder, and a terminal."""
    with (
        RunFolder(folder, RUN_TOML, worker=0) as zero,
        RunFolder(folder, RUN_TOML, worker=1) as one,
        plain(out, clock) as terminal,
    ):
        yield zero, one, terminal


def test_without_a_terminal_each_evaluation_has_a_line_and_silence_lasts_30_s_at_most(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path / "a", RUN_TOML) as run, plain(out, clock) as terminal:
        terminal.follow("a [bold]", tmp_path / "a")
        for at, printed in ((1, 0), (29, 0), (30, 1), (59, 1), (60, 2)):
            clock.now_s = at
            terminal.look()
            assert len(out.getvalue().splitlines()) == printed, at
        write_round(run, 0)
        terminal.look()
        run.log("train", round=1, worker=0, step=18, loss=1.0, lr=1e-3, tokens=64)
        terminal.look()
    first, *_, last, end = out.getvalue().splitlines()
    assert first.startswith("a [bold]: round 0 of ")
    assert re.match(r"a \[bold\]: round 1 of 4  loss 3.5  val 2.5  disagreement 0.1  sent ", last), last
    assert end.startswith("a [bold]: round 2 of "), "the end has a line"


def test_within_a_round_that_trains_here_a_line_moves_from_the_first_second(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path / "a", RUN_TOML) as run, plain(out, clock) as terminal:
        terminal.follow("a", tmp_path / "a")
        per_worker = 36
        for at, steps, printed in (
            (0.5, 1, 0),
            (1, 0, 1),
            (2, 2, 1),
            (5.5, 0, 1),
            (6, 2, 2),
            (10, 0, 2),
            (11, 1, 3),
            (60, 0, 4),
        ):
            clock.now_s = at
            note_trained(steps, 32 * steps)
            terminal.look()
            assert len(out.getvalue().splitlines()) == printed, (at, out.getvalue())
        first, second, third, fourth = out.getvalue().splitlines()
        assert first == f"a: round 0 of 4  step 0/{per_worker}", first
        # Four steps of all since the first was seen, 5.5 s ago, and 2 workers.
        assert second.startswith(f"a: round 0 of 4  step 2/{per_worker}  tokens/s {4 * 32 / 5.5:.4g}  left "), second
        assert third.startswith(f"a: round 0 of 4  step 3/{per_worker}"), third
        assert fourth == third, "it waits for others, which says nothing of how long its steps take"
        write_round(run, 0)
        terminal.follow("b", tmp_path / "b")
        clock.now_s = 20
        note_trained(4, 128)
        terminal.look()
    assert "step" not in "".join(out.getvalue().splitlines()[4:]), "of two runs it is not known whose steps they are"


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_steps_and_speed_are_those_of_all_workers_whichever_of_them_train_here(tmp_path: Path, share: float) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path / "a", RUN_TOML), plain(out, clock) as terminal:
        terminal.follow("a", tmp_path / "a", share=share)
        for at, steps in ((1, 2), (7, 8)):  # of all workers, which take 72
            clock.now_s = at
            note_trained(int(steps * share), int(steps * share) * 32)
            terminal.look()
        line = out.getvalue().splitlines()[-1]
    assert re.match(r"a: round 0 of 4  step 5/36  tokens/s 42.67  .*left 46 s", line), line


def test_a_table_shows_steps_within_a_round_of_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_of_runs, "_EVERY_S", 0.05)
    file = tmp_path / "a.toml"
    run = document(run__steps=4, run__local_steps=4, run__pace_s=0.3)
    file.write_text(tomli_w.dumps(run))
    shown = on_a_terminal(["simulate", str(file), "--out", str(tmp_path / "a")], monkeypatch)
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()]
    seen = {word for row in rows if "0/1" in row for word in row if word.endswith("/4")}
    assert len(seen) >= 3, rows


def test_what_child_processes_train_is_counted_and_stays_so_when_they_have_ended() -> None:
    program = "from gossamer.record.progress import note_trained\nfor _ in range(3):\n    note_trained(1, 32)\ninput()"
    before = training_counts()
    with counting_children() as environment:
        children = [
            subprocess.Popen([sys.executable, "-c", program], env=os.environ | environment(), stdin=subprocess.PIPE)
            for _ in range(2)
        ]
        deadline = time.monotonic() + 60
        while training_counts().inner_steps < before.inner_steps + 6 and time.monotonic() < deadline:
            time.sleep(0.02)
        under_way = training_counts()
        for child in children:
            child.communicate(b"\n", timeout=60)
    assert under_way == training_counts() == (before.inner_steps + 6, before.tokens + 192)


def test_the_line_of_an_earlier_round_has_no_bytes_or_rates_of_a_later_one(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path / "a", RUN_TOML) as run, plain(out, clock) as terminal:
        terminal.follow("a", tmp_path / "a")
        for r in (0, 1):
            write_round(run, r)
        terminal.look()
    first, second = out.getvalue().splitlines()
    assert re.fullmatch(r"a: round 1 of 4  loss [\d.]+  val [\d.]+  disagreement [\d.]+", first), first
    assert second.startswith("a: round 2 of 4  loss ") and "  sent " in second, second


def test_the_last_line_of_a_worker_whose_peers_record_elsewhere_has_the_rate_of_all_workers(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path / "a", RUN_TOML, worker=0) as run, plain(out, clock) as terminal:
        terminal.follow("a", tmp_path / "a", share=0.5)
        for r in range(4):
            clock.now_s = 5 * r
            run.log("train", round=r, worker=0, step=9 * (r + 1), loss=1.0, tokens=32 * (r + 1), lr=1e-3)
            terminal.look()
    assert f"tokens/s {2 * 32 / 5:.4g}" in out.getvalue().splitlines()[-1], out.getvalue()


def test_runs_that_train_side_by_side_are_shown_until_each_has_ended(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with (
        RunFolder(tmp_path / "a", RUN_TOML) as a,
        RunFolder(tmp_path / "b", RUN_TOML) as b,
        plain(out, clock) as terminal,
    ):
        for name in ("a", "b"):
            terminal.follow(name, tmp_path / name)
        for r, run in ((0, a), (0, b), (1, a)):
            write_round(run, r)
            terminal.look()
        terminal.ended("a")
        write_round(a, 2)
        write_round(b, 1)
        terminal.look()
    assert [line[:10] for line in out.getvalue().splitlines()] == [
        "a: round 1",
        "b: round 1",
        "a: round 2",
        "b: round 2",
    ]


def test_a_resumed_run_prints_only_new_lines_and_one_that_goes_back_prints_them_again(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path, RUN_TOML) as run:
        for r in range(4):
            write_round(run, r)
    with plain(out, clock) as terminal:
        terminal.follow("a", tmp_path)
        terminal.look()
        assert not out.getvalue()
        with RunFolder(tmp_path, RUN_TOML, resume_round=2) as run:
            terminal.look()
            for r in range(2, 5):
                write_round(run, r)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["3", "4", "5"]


def test_a_long_record_that_is_read_in_parts_is_not_shown_as_trained_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path, RUN_TOML) as run:
        for r in range(3):
            write_round(run, r)
    monkeypatch.setattr(tail, "CHUNK", 400)
    monkeypatch.setattr(terminal_of_runs, "_LAST_LOOK_S", 0.0)
    monkeypatch.setattr(terminal_of_runs, "_LOOK_S", 0.0)
    with plain(out, clock) as terminal:
        terminal.follow("a", tmp_path)
        for _ in range(20):
            clock.now_s += 40.0
            terminal.look()
        assert "round 3 of 4" in out.getvalue()
        assert "tokens/s" not in out.getvalue()
        assert "left" not in out.getvalue()
        assert "round 2" not in out.getvalue()
        with RunFolder(tmp_path, RUN_TOML, resume_round=3) as run:
            write_round(run, 3)
        clock.now_s += 40.0
        for _ in range(5):
            terminal.look()
    assert "round 4 of 4" in out.getvalue()


def test_the_validations_of_real_workers_are_one_line_when_all_have_theirs(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with two_recording(tmp_path, out, clock) as (zero, one, terminal):
        terminal.follow("a", tmp_path)
        for i, run in enumerate((zero, one)):
            run.log("validation", round=-1, worker=i, step=0, tokens=0, loss=5.0 + i)
            terminal.look()
        assert out.getvalue() == "a: round 0 of 4  val of workers 5.5\n"
        for i, run in enumerate((zero, one)):
            run.log("train", round=0, worker=i, step=2, loss=3.0, lr=1e-3, tokens=64)
            run.log("validation", round=0, worker=i, step=2, tokens=64, loss=2.0 + i)
            run.log_seconds(RoundSeconds(0, i, None, 1.0, 0.25, {1 - i: 0.5}, 0.0, 1.75))
            terminal.look()
            assert out.getvalue().count("\n") == 1 + i
    assert (
        "val of workers 2.5" in out.getvalue()
        and "in exchange 0.75 s" in out.getvalue()
        and "workers 2/2" in out.getvalue()
    )


def test_the_validation_of_an_evaluated_round_is_not_shown_beside_a_later_round(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with two_recording(tmp_path, out, clock) as (zero, one, terminal):
        runs = zero, one

        def write(kind: str, round: int, loss: float) -> None:
            for i, run in enumerate(runs):
                run.log(kind, round=round, worker=i, step=round + 1, tokens=64 * (round + 1), loss=loss, lr=1e-3)

        write("train", 0, 3.0)
        write("validation", 0, 2.5)
        note_evaluation(tmp_path, round=0, step=1, tokens=64, loss=2.25, disagreement=0.5)
        terminal.follow("a", tmp_path)
        write("train", 1, 2.0)
        clock.now_s = 30
        terminal.look()
        assert re.search(
            r"round 2 of 4  loss 2  val 2.25 \(round 1\)  val of workers 2.5 \(round 1\)  dis", out.getvalue()
        )
        write("validation", 1, 1.5)
        terminal.look()
    last = out.getvalue().splitlines()[-1]
    assert re.match(r"a: round 2 of 4  loss 2  val of workers 1.5  workers 2/2", last), last


def test_a_validation_that_is_whole_two_rounds_late_keeps_the_lines_in_order_and_is_shown_with_its_round(
    tmp_path: Path,
) -> None:
    out, clock = StringIO(), Clock()
    with two_recording(tmp_path, out, clock) as (zero, one, terminal):
        terminal.follow("a", tmp_path)
        for r in range(3):
            zero.log("train", round=r, worker=0, step=r + 1, tokens=64, loss=3.0 - r, lr=1e-3)
            if r == 0:
                zero.log("validation", round=0, worker=0, step=1, tokens=64, loss=2.0)
        clock.now_s = 30
        terminal.look()
        one.log("train", round=0, worker=1, step=1, tokens=64, loss=3.0, lr=1e-3)
        one.log("validation", round=0, worker=1, step=1, tokens=64, loss=3.0)
        terminal.look()
    first, second = out.getvalue().splitlines()
    assert first.startswith("a: round 3 of 4  loss 1  workers 2/2"), first  # worker 1 may still validate round 1
    assert second.startswith("a: round 3 of 4  loss 1  val of workers 2.5 (round 1)  "), second


@pytest.mark.parametrize("dead", [True, False], ids=["a dead worker", "a worker that records elsewhere"])
def test_a_worker_without_lines_holds_back_no_validation(dead: bool, tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with contextlib.ExitStack() as open_:
        zero = open_.enter_context(RunFolder(tmp_path, RUN_TOML, worker=0))
        if dead:
            one = open_.enter_context(RunFolder(tmp_path, RUN_TOML, worker=1))
            one.log("train", round=0, worker=1, step=1, tokens=32, loss=3.0, lr=1e-3)
            one.log("validation", round=0, worker=1, step=1, tokens=32, loss=4.0)
            (tmp_path / "outcomes-001.jsonl").write_text('{"event":"end","round":1,"why":"left","time_s":1.0}\n')
        terminal = open_.enter_context(plain(out, clock))
        terminal.follow("a", tmp_path)
        for r in range(4):
            zero.log("train", round=r, worker=0, step=r + 1, tokens=32 * (r + 1), loss=3.0 - r, lr=1e-3)
            zero.log_trace(Entry(r, 0, 1, 0.1, (Operation("exchange", 0, ((1, 1000),), ()),)))
            zero.log("validation", round=r, worker=0, step=r + 1, tokens=32 * (r + 1), loss=2.0 - r / 4)
            terminal.look()
    lines = out.getvalue().splitlines()
    assert [re.sub(r"  (loss|sent) \S+( B)?|  workers.*", "", line) for line in lines] == [
        f"a: round {r + 1} of 4  val of workers {loss}" for r, loss in enumerate([2, 1.75, 1.5, 1.25])
    ][dead:], lines
    assert ("sent 4000 B" in lines[-1]) is not dead, lines  # by a worker, of those with lines here


def test_validations_that_become_whole_late_are_one_line(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with two_recording(tmp_path, out, clock) as (zero, one, terminal):
        terminal.follow("a", tmp_path)
        for run in (zero, one):
            for r in range(3):
                run.log("train", round=r, worker=int(run is one), step=r + 1, tokens=64, loss=3.0, lr=1e-3)
                run.log("validation", round=r, worker=int(run is one), step=r + 1, tokens=64, loss=2.0 + r)
            clock.now_s += 30
            terminal.look()
    assert [line.split("  ")[:3] for line in out.getvalue().splitlines()] == [
        ["a: round 3 of 4", "loss 3", "workers 2/2"],
        ["a: round 3 of 4", "loss 3", "val of workers 4"],
    ]


def test_priced_seconds_of_a_simulation_are_not_called_seconds_in_exchanges(tmp_path: Path) -> None:
    out, clock = StringIO(), Clock()
    with RunFolder(tmp_path, RUN_TOML) as run, plain(out, clock) as terminal:
        terminal.follow("a", tmp_path)
        for i in range(2):
            run.log("train", round=0, worker=i, step=2, loss=3.0, lr=1e-3, tokens=64)
            run.log_seconds(RoundSeconds(0, i, "home", 1.0, 0.25, {1 - i: 0.5}, 0.0, 1.75))
        terminal.ended()
    assert "priced exchange on home 0.75 s" in out.getvalue() and "in exchange" not in out.getvalue()


@pytest.mark.parametrize(
    ("width", "names"), [(100, {"in exchange", "sent", "loss", "val"}), (40, {"loss", "val"}), (20, {"val"})]
)
def test_a_narrow_terminal_leaves_out_figures_and_cuts_none(width: int, names: set[str], tmp_path: Path) -> None:
    out = StringIO()
    with (
        RunFolder(tmp_path, RUN_TOML) as run,
        Terminal(Console(file=out, force_terminal=True, width=width), looks=False) as terminal,
    ):
        terminal.follow("a", tmp_path)
        write_round(run, 0)
        terminal.ended()
    *_, head, row = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()
    assert "…" not in head + row
    assert {name for name in ("in exchange", "sent", "loss", "val") if name in head} == names


def test_nothing_is_shown_where_it_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with quieted(), Terminal() as terminal:
        terminal.follow("a", tmp_path)
        terminal.look()
    assert capfd.readouterr() == ("", "")


def on_a_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints on a pseudo-terminal."""
    controller, terminal = pty.openpty()
    found: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(controller, 4096):
                found.append(chunk)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    for key, value in {"TERM": "xterm", "COLUMNS": "130", "LINES": "30"}.items():
        monkeypatch.setenv(key, value)
    with os.fdopen(terminal, "w") as opened, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", opened)
        code = main(words)
    reader.join()
    os.close(controller)
    assert code == 0, b"".join(found).decode()
    return b"".join(found).decode()


def test_on_a_terminal_there_is_one_table_that_stays_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [{"label": name, "rule": {"name": name}} for name in ("gossip", "gasloc")]
    file = tmp_path / "two.toml"
    file.write_text(tomli_w.dumps({**document(run__steps=4, run__eval_every=1), "variant": variants}))
    words = ["compare", str(file), "--out", str(tmp_path / "runs")]
    shown = on_a_terminal(words, monkeypatch)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.rpartition("\x1b[1A")[2])
    heads, *rows = [line.split() for line in last.splitlines() if line.strip()]
    assert heads[:5] == ["run", "round", "loss", "val", "disagreement"] and "sent" in heads and "workers" in heads
    assert [row[0] for row in rows] == ["gossip", "gasloc"] and all(row[1] == "2/2" for row in rows), last
    assert "\x1b[1A\x1b[2K" in shown, "the table is drawn over itself"
    out = capsys.readouterr().out
    assert "\x1b" not in out and "report: " in out, "what is piped is the result alone"


@pytest.mark.full
@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_a_quiet_command_leaves_a_terminal_alone(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.toml"
    file.write_text(tomli_w.dumps(document()))
    assert on_a_terminal(["simulate", str(file), "--out", str(tmp_path / "a"), option], monkeypatch) == ""


def test_sentences_and_warnings_go_above_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    handler = logging.StreamHandler(out)
    logging.getLogger().addHandler(handler)
    try:
        with Terminal(Console(file=out, force_terminal=True, width=80), looks=False) as terminal:
            terminal.follow("a", tmp_path)
            say("a sentence")
            logging.getLogger("gossamer").warning("a warning")
            terminal.look()
    finally:
        logging.getLogger().removeHandler(handler)
    output = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in out.getvalue().splitlines()]
    assert "a sentence" in output and "a warning" in output and handler.stream is out
