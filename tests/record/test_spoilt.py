"""Spoilt files and full disks end in one sentence: mutated run files, experiments and records, and disks that refuse."""

import contextlib
import copy
import datetime
import io
import json
import math
import re
import resource
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.cli import main
from gossamer.data.documents import read_documents
from gossamer.errors import ConfigError, DataError, DiskError, GossamerError
from gossamer.network.links import from_toml
from gossamer.record.folder import read_metrics
from gossamer.record.lineage import read_branches
from gossamer.record.logs.arrivals import ArrivalWriter, ServerInput, read_arrivals
from gossamer.record.logs.events import EventWriter, read_events
from gossamer.record.logs.pipeline_work import read_pipeline, write_pipeline
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.logs.stage_seconds import read_stages
from gossamer.record.logs.trace import read_trace
from gossamer.record.machines import read_machines
from gossamer.record.whole_files import Appender, atomic_write, make_folder
from gossamer.report.results import read_results
from gossamer.run.bookkeeping.resume import history
from gossamer.run.config.document import load_document
from gossamer.run.config.document import parse_overrides as words_as_settings
from gossamer.run.config.experiment_file import figure, points
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import dump, parse, survey
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.stages.timing import pipeline_work
from gossamer.transport.processes.local import run_local
from tiny import document, single, tiny

CONFIGS = sorted(Path(__file__).parents[2].joinpath("src", "gossamer", "configs").glob("*.toml"))
DOCUMENTS = {path.stem: tomllib.loads(path.read_text()) for path in CONFIGS} | {"tiny": document()}
JUNK: list[Any] = [
    0,
    -1,
    3,
    1.5,
    math.nan,
    math.inf,
    True,
    "",
    "x",
    "*",
    "a.b",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    {"name": "x"},
    {"name": []},
    [{"a": 1}],
    [{"label": {}}],
    {"a": {"b": [1]}},
    datetime.date(2026, 1, 1),
    1 << 70,
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every table or list in a document with a key that it has, or that is new."""
    if isinstance(value, dict):
        yield value, "new"
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(part)


def mutate(value: Any, data: st.DataObject, junk: list[Any]) -> Any:
    """The value with some of its parts replaced or removed."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 2))):
        owner, key = data.draw(st.sampled_from([*places(value)]))
        if key != "new" and data.draw(st.booleans()):
            del owner[key]
        elif isinstance(owner, dict) and data.draw(st.booleans()):
            owner[data.draw(st.sampled_from(["", "x", "a.b", "sweep", "scale", "label", "method"]))] = copy.deepcopy(
                data.draw(st.sampled_from(junk))
            )
        elif key != "new":
            owner[key] = copy.deepcopy(data.draw(st.sampled_from(junk)))
        if not value:
            break
    return value


def planned(call: Callable[[], object]) -> None:
    """Calls, and lets pass only what is raised on purpose."""
    with contextlib.suppress(GossamerError):
        call()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DOCUMENTS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_mutated_run_or_experiment_file_has_faults_and_nothing_else(name: str, data: st.DataObject) -> None:
    changed = mutate(DOCUMENTS[name], data, JUNK)
    planned(lambda: parse(changed))
    assert all(survey(changed).faults), "each is a sentence"
    planned(lambda: figure(changed))
    if name != "methods":  # which is a run of every method, described in the same words as the others
        planned(lambda: points(changed, scale=data.draw(st.sampled_from(["", "tiny"]))))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "is not TOML"),
        ("a" + ".a" * 5000 + " = 1", "nested more than 32 deep"),
        ("a = " + "[" * 40 + "]" * 40, "nested more than 32 deep"),
    ],
)
def test_deep_toml_is_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_document(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=sentence):
        from_toml(text, "a network")
    assert words_as_settings(["a=" + "[" * 5000]) == {"a": "[" * 5000}
    with pytest.raises(ConfigError, match="a key of 5001 parts"):
        words_as_settings([text]) if text.startswith("a.") else words_as_settings(["a" + ".a" * 5000 + "=1"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every record that there is."""
    folder = tmp_path_factory.mktemp("recorded")
    simulate(single(run__steps=4), folder, until=1)
    simulate(single(run__steps=4, inner__lr=1e-4), folder, resume=True)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of an asynchronous run, and that of one in stages."""
    folder = tmp_path_factory.mktemp("served")
    with EventWriter(folder, network="n", workers=2) as log:
        log.write(0, "phase", worker=0, number=0, start_s=0.0, end_s=1.5, steps=15, tokens=960)
        log.write(0, "push", source=0, target=-1, fragment=0, bytes=8, start_s=1.5, end_s=2.0)
        log.write(0, "update", fragment=0, workers=[0], ages=[0], time_s=2.0)
        log.write(0, "leave", worker=1, time_s=2.0)
    with ArrivalWriter(folder, resume=False) as arrivals:
        arrivals.append(ServerInput("serve", 0.0, workers=2, digest="d"))
        arrivals.append(ServerInput("join", 1.5, worker=0))
        arrivals.append(ServerInput("push", 2.5, worker=0))
    cut = tiny(pipeline__stages=2, model__layers=2, data__accumulate=2)
    write_pipeline(folder, pipeline_work(settings_of(cut), layout_for(cut.model, 256)))
    return folder


READERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": read_metrics,
    "trace.jsonl": read_trace,
    "seconds.jsonl": read_seconds,
    "branches.json": read_branches,
    "events.jsonl": read_events,
    "arrivals.jsonl": read_arrivals,
    "pipeline.json": read_pipeline,
    "run.toml": lambda folder: history(settings_of(single(run__steps=4)), folder),
}
DEEP = "[" * 100_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", READERS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_mutated_record_is_refused_or_read_and_nothing_else(
    name: str, recorded: Path, served: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spoilt")
    text = next(path for path in (recorded / name, served / name) if path.exists()).read_text()
    lines = text.splitlines(keepends=True)
    k = data.draw(st.integers(0, len(lines) - 1))
    match data.draw(st.sampled_from(["value", "bytes", "deep", "cut"])):
        case "value" if name.endswith(".jsonl"):
            junk = [one for one in JUNK if not isinstance(one, datetime.date)]
            lines[k] = json.dumps(mutate(json.loads(lines[k]), data, junk)) + "\n"
        case "deep":
            lines[k] = data.draw(st.sampled_from([DEEP, f"a = {DEEP}", f'{{"a":{DEEP}']))
        case "cut":
            lines[k] = lines[k][: data.draw(st.integers(0, len(lines[k])))]
        case _:
            place = data.draw(st.integers(0, len(lines[k]) - 1))
            lines[k] = lines[k][:place] + data.draw(st.characters(codec="utf-8")) + lines[k][place + 1 :]
    (folder / name).write_text("".join(lines))
    planned(lambda: READERS[name](folder))


def test_a_disk_that_refuses_is_named_by_whatever_writes_there(tmp_path: Path) -> None:
    lines = Appender(Path("/dev/full"))
    with pytest.raises(
        DiskError, match=r"'/dev/full' could not be written \(No space left on device\); free some space"
    ):
        lines.write("a line\n")
    lines.close()
    (tmp_path / "file").write_text("")
    for write in (
        lambda: make_folder(tmp_path / "file" / "folder"),
        lambda: atomic_write(tmp_path / "none" / "file", b""),
        lambda: Appender(tmp_path),
        lambda: simulate(tiny(run__steps=2), tmp_path / "file" / "run"),
    ):
        with pytest.raises(
            DiskError, match=r"^'.*' could not be written \(.*\); name another place, or let this one be written$"
        ):
            write()


def main_on_a_small_disk(argv: Sequence[str]) -> int:
    """`gossamer` where no file may have more bytes than its run file and some rounds need."""
    sys.dont_write_bytecode = True  # what is imported from here on would be kept, cut short, for every later process
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    return main(argv)


@pytest.mark.usefixtures("forks")
def test_a_disk_that_is_full_while_metrics_are_written_ends_a_run_with_a_sentence(tmp_path: Path) -> None:
    config = single(run__steps=30, run__local_steps=1, run__eval_every=0, run__checkpoint_every=0)
    (tmp_path / "run.toml").write_text(dump(config))
    errors, words = io.StringIO(), ["simulate", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    with contextlib.redirect_stderr(errors):
        assert run_local(1, main_on_a_small_disk, words) == 2, errors.getvalue()
    assert ".jsonl' could not be written (File too large)" in errors.getvalue().splitlines()[-1], errors.getvalue()
    assert "Traceback" not in errors.getvalue()
    assert read_metrics(tmp_path / "run")  # what fitted is whole


def test_a_file_that_may_not_be_read_is_a_sentence_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(dump(tiny()))
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 2
    output = capsys.readouterr().err
    assert output.startswith("gossamer: [Errno 21] Is a directory") and output.count("\n") == 1, output


@pytest.mark.parametrize(
    ("name", "content", "read", "sentence"),
    [
        ("machines.jsonl", f'{{"{"a" * 20_000}": 0}}\n', read_machines, "and 'round' is needed too"),
        ("stages.jsonl", '{"round": 0, "worker": 0}\n', lambda folder: [*read_stages(folder)], "'stage' is needed too"),
        (
            "results.jsonl",
            '{"method": "m", "at": {}, "seed": 1, "row": {"loss_at_round": 3}}\n',
            lambda folder: read_results(folder / "results.jsonl"),
            "row.loss_at_round is 3 but must be a list",
        ),
        (
            "results.jsonl",
            '{"method": "m", "at": {}, "seed": 1, "row": {"loss_at_s": "x"}}\n',
            lambda folder: read_results(folder / "results.jsonl"),
            "row.loss_at_s is 'x' but must be",
        ),
        (
            "a.jsonl",
            f'{{"{"a" * 20_000}": "the cat"}}\n',
            lambda folder: [*read_documents(folder / "a.jsonl", "text")],
            "has no field 'text'",
        ),
        (
            "a.parquet",
            "PAR1" + "x" * 60 + "PAR1",
            lambda folder: [*read_documents(folder / "a.parquet", "text")],
            "cannot be read as parquet",
        ),
    ],
)
def test_the_error_about_a_spoilt_file_is_one_short_line(
    name: str, content: str, read: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(sentence)) as refused:
        read(tmp_path)
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)
