"""One reader of lines: a page takes a line for what the strict readers take it for, and shows what is damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.errors import DataError, GossamerError
from gossamer.record.folder import read_metrics
from gossamer.record.jsonl import keep_before
from gossamer.record.logs.arrivals import read_arrivals
from gossamer.record.logs.events import read_events
from gossamer.record.logs.order import read_order
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.logs.trace import read_trace
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.lines import KINDS_OF_FILES, line_of_kind, run_file_of
from gossamer.run.config.document import load_run
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import dump
from tiny import tiny

SAMPLES = Path(__file__).parents[1] / "samples" / "0.1.0"
FILES = sorted(path for kind in KINDS_OF_FILES for path in SAMPLES.glob(f"*/{kind}*.jsonl") if path.stat().st_size)
STRICT: dict[str, Callable[[Path], object]] = {
    "metrics": read_metrics,
    "trace": read_trace,
    "seconds": read_seconds,
    "events": read_events,
}


def kind_of(path: Path) -> str:
    return path.stem.partition("-")[0]


def look(folder: Path) -> FollowedRun:
    run = FollowedRun("a", folder)
    run.look()
    return run


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_line_with_further_keys_is_taken_for_what_it_is_without_them(path: Path) -> None:
    for line in path.read_bytes().splitlines():
        whole = line_of_kind(kind_of(path), line, "a line", path.name, 2)
        newer = json.dumps({**json.loads(line), "of a newer version": [1]}).encode()
        found = line_of_kind(kind_of(path), newer, "a line", path.name, 2)
        assert {key: value for key, value in found.items() if key != "of a newer version"} == whole


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_further_key_hides_no_wrong_value_and_no_lack(kind: str) -> None:
    for line in ({"round": "1", "more": 1}, {"round": 1, "more": {"round": 1}}):
        with pytest.raises(DataError, match="a line: "):
            line_of_kind(kind, json.dumps(line).encode(), "a line", f"{kind}-000.jsonl", 2)


@pytest.mark.parametrize(
    "path",
    [one for one in FILES if one.stem.endswith("-000") and kind_of(one) in STRICT],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_a_file_of_another_worker_is_refused_by_its_reader_and_shown_on_the_page(path: Path, tmp_path: Path) -> None:
    folder, kind = tmp_path / "k", kind_of(path)
    shutil.copytree(path.parent, folder)
    STRICT[kind](folder)
    assert not look(folder).complaints
    shutil.copy(folder / path.name.replace("-000", "-001"), folder / path.name)
    with pytest.raises(DataError, match=rf"{path.name}:\d+ is of worker 1 in the file of worker 0; restore"):
        STRICT[kind](folder)
    shown = [*look(folder).complaints]
    assert shown and f"{path.name} at byte" in shown[0] and "is of worker 1 in the file of worker 0" in shown[0], shown


def test_a_run_file_with_a_byte_that_is_no_text_is_refused_as_in_training(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes((SAMPLES / "rounds" / "run.toml").read_bytes().replace(b'"rounds"', b'"rou\xffnds"'))
    for read in (lambda: run_file_of(path), lambda: load_run(tmp_path)):
        with pytest.raises(GossamerError, match=r"run\.toml' is not UTF-8, as TOML is: byte 0xff in line 1"):
            read()
    run = look(tmp_path)
    assert run.file is None and "is not UTF-8" in next(iter(run.complaints))


def test_the_order_of_events_of_one_worker_in_the_files_of_two_is_refused_by_both_files(tmp_path: Path) -> None:
    assert len(read_order(SAMPLES / "asynchronous")) == 2
    for name in ("order-000.jsonl", "order-001.jsonl"):
        shutil.copy(SAMPLES / "asynchronous" / "order-000.jsonl", tmp_path / name)
    with pytest.raises(
        DataError, match=r"order-000\.jsonl and .*order-001\.jsonl: both have the life \d+ of a process"
    ):
        read_order(tmp_path)


def test_a_record_that_is_a_link_to_nothing_is_no_record_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "arrivals.jsonl").symlink_to(tmp_path / "arrivals.jsonl")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "away")
    with pytest.raises(OSError, match="symbolic links"):
        read_arrivals(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        keep_before(tmp_path / "metrics.jsonl", 1)
    assert not (tmp_path / "away").exists()


def test_a_run_whose_local_steps_change_is_shown_with_its_own_rounds(tmp_path: Path) -> None:
    qsr = {"shape": "qsr", "base": 2, "alpha": 0.003}
    for steps, local_steps in ((12, {"0": 1, "4": [4, 2, 4]}), (40, qsr)):
        config = tiny(run__steps=steps, run__local_steps=local_steps, run__synchronous_steps=2)
        (tmp_path / "run.toml").write_text(dump(config))
        shown = run_file_of(tmp_path / "run.toml")
        assert shown.timetable == config.length.timetable and shown.rounds == config.length.rounds
        assert shown.steps_before(shown.rounds) * config.length.step_tokens == sum(settings_of(config).worker_tokens)
    (tmp_path / "run.toml").write_text(dump(config).replace('"qsr"', '"x"'))
    with pytest.raises(DataError, match="local_steps"):
        run_file_of(tmp_path / "run.toml")
